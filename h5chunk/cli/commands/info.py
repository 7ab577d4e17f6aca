"""The command `info`."""

from __future__ import annotations

from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main, run
from h5chunk.cli.options import OUTPUT, RUNNING, option


@main.command(
    examples={
        "Describe a file": "h5chunk info photos.h5",
        "Compute the mean and standard deviation of each channel, for Normalize": "h5chunk info photos.h5 --stats",
        "Describe this machine": "h5chunk info",
    }
)
@click.argument("file", type=click.Path(), required=False)
@shared.trusted
@option(
    "--stats",
    is_flag=True,
    heading=RUNNING,
    help="Also compute the mean and standard deviation of each channel of the training fields, and store them beside "
    "FILE.",
)
@option("--all", "show_all", is_flag=True, heading=OUTPUT, help="List every dataset of FILE, with its chunks.")
@shared.as_json
def info(file: str | None, **options: Any) -> None:
    """Describe any HDF5 FILE, and whether its layout suits training.

    FILE may also be a folder, or a quoted pattern such as 'shards/*.h5': the report then says whether its files form
    one data set. Without FILE, describe this machine: the available cores, memory, threads and devices, and the
    versions of packages.
    """
    run(h5chunk.info, file)
