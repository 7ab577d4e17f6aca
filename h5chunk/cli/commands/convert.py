"""The command `convert`."""

from __future__ import annotations

from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main, note, run
from h5chunk.cli.options import options_of
from h5chunk.tools.convert.options import KIND_OPTIONS, convert_options


@main.command(
    examples={
        "Convert images with one folder per class": "h5chunk convert photos/ photos.h5 --size 224,224 --fit crop",
        "Convert ratings, keeping the last duplicate": "h5chunk convert ratings.csv ratings.h5 --duplicates last",
        "Print the plan and write nothing": "h5chunk convert photos/ photos.h5 --dry-run",
    }
)
@click.argument("source", type=click.Path())
@click.argument("output", type=click.Path())
@shared.source_format(KIND_OPTIONS)
@options_of(convert_options())
@shared.tuned
@shared.client
@shared.overwrite
@shared.dry_run
@shared.quiet
@shared.as_json
def convert(source: str, output: str, **options: Any) -> None:
    """Convert SOURCE into the HDF5 file OUTPUT, or a folder of such files.

    SOURCE contains one of these:

    \b
    - images: a folder with one folder per class, a flat folder, or folders
      images/ and masks/ with files of the same names; any of these may be a
      .zip or .tar
    - arrays: .npy or .npz
    - a table: .parquet, or delimited text such as .csv
    - a dataset or group per sample, in an HDF5 file (with --samples)
    - a sparse matrix: ratings.csv or other lines of row, column and value,
      .npz of SciPy, .mtx, libsvm, .h5ad, 10x .h5, a folder of 10x, or a folder
      or quoted pattern of .h5ad files

    If SOURCE is a URL (s3://, gs://, az://, https://), it is first downloaded to a hidden folder beside OUTPUT.

    If a conversion is stopped by Ctrl-C, a full disk, a bad sample or a signal, the same command continues it. If
    OUTPUT is already complete, the command reports this and does nothing.
    """
    run(h5chunk.convert, source, output, notify=note)
