"""The command `repack`."""

from __future__ import annotations

from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main, run
from h5chunk.cli.options import FIELDS, LAYOUT, number, option, options_of
from h5chunk.tools.convert.options import WriteOptions


@main.command(
    examples={
        "Give any HDF5 file chunks of whole samples": "h5chunk repack theirs.h5 ours.h5",
        "Shuffle the samples too": "h5chunk repack theirs.h5 ours.h5 --shuffle --seed 7",
        "Take what tune found": "h5chunk repack theirs.h5 ours.h5 --tuned found.json",
    }
)
@click.argument("file", type=click.Path())
@click.argument("output", type=click.Path())
@option(
    "--fields",
    multiple=True,
    metavar="DATASET",
    show_default="images, AnnData's X, or the largest",
    heading=FIELDS,
    help="Dataset whose length is the number of samples (repeatable).",
)
@option(
    "--keep",
    multiple=True,
    metavar="DATASET",
    heading=FIELDS,
    help="Copy this dataset unchanged although its length matches (repeatable).",
)
@options_of([WriteOptions], left_out=["shuffle"])
@option("--window-chunks", type=number(1), heading=LAYOUT, help="Recommended shuffle window to store, in chunks.")
@option(
    "--compression",
    metavar="NAME[:LEVEL]",
    show_default="none",
    heading=LAYOUT,
    help="Compression of the fields: gzip, lzf, zstd, lz4, blosc or none.",
)
@option("--shuffle", is_flag=True, heading=LAYOUT, help="Permute the samples of all fields alike.")
@option(
    "--tuned",
    type=click.Path(),
    metavar="FOUND.json",
    heading=LAYOUT,
    help="Settings that h5chunk tune --json printed. Options that are given here take precedence.",
)
@shared.memory_bytes("1GiB", "Approximate upper limit on memory, such as 512M.")
@shared.overwrite
@shared.dry_run
@shared.quiet
@shared.as_json
def repack(file: str, output: str, dry_run: bool, **options: Any) -> None:
    """Rewrite any HDF5 FILE as OUTPUT, with whole samples in its chunks.

    The fields are the datasets whose first axis counts samples; everything else is copied unchanged. The report
    compares the layout of each field before and after.
    """
    run(h5chunk.plan_repack if dry_run else h5chunk.repack, file, output, **options)
