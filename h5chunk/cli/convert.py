"""`h5chunk convert`: data of any kind into a file."""

from __future__ import annotations

from typing import Any

import click

from h5chunk.cli import options as shared
from h5chunk.cli.group import main
from h5chunk.cli.kinds import given_options, options_of, source_format
from h5chunk.cli.options import option
from h5chunk.cli.output import note, progress_bar, show
from h5chunk.tools.convert.options import convert_options

EXAMPLES = {
    "Convert a folder with one folder per class": "h5chunk convert photos/ photos.h5 --size 224 224 --fit crop",
    "Convert ratings, of which the last counts": "h5chunk convert ratings.csv ratings.h5 --duplicates last",
    "See what would be done": "h5chunk convert photos/ photos.h5 --dry-run",
}


@main.command(examples=EXAMPLES)
@click.argument("source", type=click.Path())
@click.argument("output", type=click.Path())
@source_format
@options_of(convert_options())
@option(
    "--tuned",
    type=click.Path(),
    metavar="FOUND.json",
    heading="Layout",
    help="Recommendation of h5chunk tune, from which chunk_samples is taken unless it is given.",
)
@shared.overwrite
@shared.dry_run
@shared.quiet
@shared.as_json
def convert(
    source: str,
    output: str,
    format: str | None,
    tuned: str | None,
    overwrite: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert SOURCE into the HDF5 file OUTPUT, or a folder of such files.

    SOURCE is a folder of images with one folder per class, a flat folder, or either in a .zip or .tar; arrays in .npy
    or .npz; a table or a folder of tables in .parquet; or a sparse matrix: ratings.csv and other (row, column[, value])
    lines, .npz of scipy, .mtx, libsvm, .h5ad, 10x .h5 or folder.

    If it is stopped, by Ctrl-C, a full disk, a bad sample or a signal, the same command continues. If OUTPUT is already
    complete, the same command says so and does nothing.
    """
    from h5chunk.tools.convert.convert import convert as run
    from h5chunk.tools.convert.convert import plan_convert

    given = given_options(options)
    if tuned is not None:
        _take_tuned(tuned, given)
    with progress_bar(quiet) as progress:
        result = (plan_convert if dry_run else run)(
            source, output, format=format, overwrite=overwrite, progress=progress, notify=note, **given
        )
    show(result, as_json=as_json, quiet=quiet)


def _take_tuned(path: str, given: dict[str, Any]) -> None:
    """Take what convert has a place for; say what it has none for."""
    from h5chunk.tools.repack.options import read_tuned

    tuned = read_tuned(path)
    given.setdefault("chunk_samples", tuned.chunk_samples)
    left = [name for name in ("window_chunks", "cache", "compression") if getattr(tuned, name) is not None]
    if left:
        note(f"convert settles {', '.join(left)} itself; repack takes them from {path}")
