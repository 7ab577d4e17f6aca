"""Progress bars, notes and reports of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from tqdm import tqdm

from h5chunk.errors import printable


def note(line: str) -> None:
    tqdm.write(f"note: {printable(line)}", file=sys.stderr)  # above the bar


@contextmanager
def progress_bar(quiet: bool, unit: str = " images") -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Draw a progress bar per stage, unless --quiet is given or standard error is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    words = {"list": "listing", "convert": "converting", "bench": "measuring", "read": "reading", "write": "writing"}
    words |= {"repack": "repacking", "tune": "tuning", "verify": "verifying", "copy": "copying"}
    units = {"read": "B", "write": " entries", "repack": "B", "verify": "B", "copy": "B"}
    bar: tqdm[Any] | None = None
    current = ""

    def show(stage: str, done: int, total: int | None) -> None:
        nonlocal bar, current
        if stage != current or bar is None:
            if bar is not None:
                bar.close()
            bar = tqdm(
                desc=words[stage],
                unit=units.get(stage, unit),
                unit_scale=stage in units,
                total=total,
                leave=False,
                mininterval=0.1,
                dynamic_ncols=True,
            )
            current = stage
        bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def show(result: Any, *, as_json: bool, quiet: bool = False) -> None:
    """Print a report for people, or as JSON, which --quiet does not silence."""
    if as_json:
        click.echo(result.to_json())
    elif not quiet:
        click.echo(str(result))
