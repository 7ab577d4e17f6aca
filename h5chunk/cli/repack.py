"""`h5chunk repack`: any file anew, with whole samples in its chunks."""

from __future__ import annotations

from typing import Any

import click

from h5chunk.cli.group import main
from h5chunk.cli.options import Bytes, ChunkSamples
from h5chunk.cli.output import progress_bar, show


@main.command()
@click.argument("file", type=click.Path())
@click.argument("out", type=click.Path())
@click.option(
    "--chunk-samples", type=ChunkSamples(), default="auto", show_default=True, help="Samples in one HDF5 chunk."
)
@click.option("--window-chunks", type=click.IntRange(1), metavar="N", help="Recommended window to store, in chunks.")
@click.option("--shuffle", is_flag=True, help="Permute the samples of all fields alike.")
@click.option(
    "--seed", type=click.IntRange(0, (1 << 64) - 1), default=0, show_default=True, help="Seed of that permutation."
)
@click.option(
    "--compression",
    metavar="NAME[:LEVEL]",
    help="Compression of the fields: gzip, lzf, zstd, lz4, blosc or none. [default: none]",
)
@click.option(
    "--tuned",
    type=click.Path(),
    metavar="FILE.json",
    help="Settings that h5chunk tune --json printed. Options given here count more.",
)
@click.option(
    "--fields",
    multiple=True,
    metavar="DATASET",
    help="Dataset that says how many samples there are (repeatable). [default: images, AnnData's X, or the largest]",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="DATASET",
    help="Copy this dataset unchanged although its length matches (repeatable).",
)
@click.option(
    "--memory-bytes",
    "memory_bytes",
    type=Bytes(),
    default=1 << 30,
    help="Upper limit on memory, about, such as 512M. [default: 1GiB]",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--quiet", is_flag=True, help="No progress bar, no report.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def repack(file: str, out: str, quiet: bool, as_json: bool, **options: Any) -> None:
    """Write any HDF5 FILE anew as OUT, with whole samples in its chunks; all else is kept.

    Fields are the datasets as long as the main one along their first axis. The report says how each lay before and how
    it lies now.
    """
    from h5chunk.tools.repack.repack import repack as run

    with progress_bar(quiet) as progress:
        result = run(file, out, progress=progress, **options)
    show(result, as_json=as_json, quiet=quiet)
