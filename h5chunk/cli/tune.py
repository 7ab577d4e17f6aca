"""`h5chunk tune`: find the best settings for a file on this machine."""

from __future__ import annotations

from typing import Any

import click

from h5chunk.cli.group import main
from h5chunk.cli.options import Bytes, Seconds, Triple, trusted
from h5chunk.cli.output import progress_bar, show


@main.command()
@click.argument("source", metavar="SRC", type=click.Path())
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True, help="Samples in a batch.")
@click.option(
    "--memory-bytes",
    "memory_bytes",
    type=Bytes(),
    default=4 << 30,
    help="Upper limit on the memory that feeding takes, such as 512M. [default: 4GiB]",
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    multiple=True,
    help="DataLoader worker count to try (repeatable). [default: 0, 1, 2 and 4, as far as there are cores]",
)
@click.option("--device", metavar="cpu|cuda", default="cpu", show_default=True, help="Device that batches are for.")
@click.option(
    "--fields",
    multiple=True,
    metavar="DATASET",
    help="Dataset to read (repeatable). [default: images, and labels if there are any]",
)
@click.option("--group-by", metavar="FIELD", help="Dataset that says which samples are alike. [default: labels]")
@click.option(
    "--min-effective-batch",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Minimum shuffle quality, as a fraction of a full shuffle.",
)
@click.option(
    "--budget", "budget_s", type=Seconds(), default="60s", show_default=True, help="Time to take, such as 60s or 2m."
)
@click.option(
    "--h5py-cache",
    type=Triple(),
    metavar="NSLOTS,NBYTES,W0",
    help="Cache that you give h5py.File today. [default: the library's]",
)
@click.option(
    "--size",
    type=int,
    nargs=2,
    metavar="H W",
    help="Size of images that are not converted yet. [default: that of the first one]",
)
@click.option("--plot", type=click.Path(), metavar="PNG", help="Draw rate against effective batch; needs matplotlib.")
@click.option("--apply", is_flag=True, help="Write window and cache to SRC.h5chunk.json, where readers find them.")
@click.option("--verify", is_flag=True, help="Compare the reads that HDF5 makes with the predicted ones.")
@trusted
@click.option("--json", "as_json", is_flag=True, help="Print JSON, which convert and repack take with --tuned.")
def tune(source: str, fields: tuple[str, ...], workers: tuple[int, ...], as_json: bool, **options: Any) -> None:
    """Find the fastest chunks, window, cache and workers for SRC on this machine that still mix well.

    SRC is a file that h5chunk made, anybody's HDF5 file, or what convert takes: images or a sparse matrix. The best few
    settings are measured on its data.
    """
    from h5chunk.tools.tune.tune import tune as run

    with progress_bar(as_json, " %") as progress:
        result = run(source, fields=fields or None, workers=workers or None, progress=progress, **options)
    show(result, as_json=as_json)
