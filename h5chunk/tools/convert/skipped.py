"""The list of samples that were left out, in a file beside the output."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from h5chunk.errors import OutputError, printable

HEADER = ["path", "reason"]


def skipped_path(output: Path) -> Path:
    """Return the path of the list of an output."""
    return output.with_name(output.name + ".skipped.csv")


def save_skipped(output: Path, skipped: Sequence[tuple[str, str]], *, behind: bool = False) -> str | None:
    """Write the list; return its path, or None if nothing was left out.

    Parameters
    ----------
    output : Path
    skipped : sequence of (name, reason)
    behind : bool
        Put them behind those of an earlier list, unless that ends with them.

    Raises
    ------
    OutputError
        It cannot be written.
    """
    target, rows = skipped_path(output), [list(each) for each in skipped]
    if not rows:
        return None
    try:
        there = _read(target) if behind and target.exists() else []
        if there[-len(rows) :] != rows:
            with target.open("a" if there else "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows if there else [HEADER, *rows])
    except OSError as error:
        raise OutputError(
            f"{printable(target)}: the list of {len(rows)} skipped samples cannot be written: {error.strerror}; "
            f"{printable(output)} itself is complete"
        ) from None
    return str(target)


def _read(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return list(csv.reader(file))
