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
        "Compute the mean and standard deviation for Normalize": "h5chunk info robot.h5 --stats --fields '*/obs/state'",
        "Describe this machine": "h5chunk info",
    }
)
@click.argument("path", metavar="[FILE]...", type=click.Path(), nargs=-1)
@shared.trusted
@option(
    "--stats",
    is_flag=True,
    heading=RUNNING,
    help="Also compute the mean and standard deviation of each channel of the training fields, and store them beside "
    "FILE.",
)
@option(
    "--fields",
    multiple=True,
    metavar="DATASET",
    show_default="those that info names",
    heading=RUNNING,
    help="With --stats: compute the statistics of this dataset, such as obsm/X_pca, or '*/obs/state' for all episodes "
    "(repeatable).",
)
@option("--all", "show_all", is_flag=True, heading=OUTPUT, help="List every dataset of FILE, with its chunks.")
@shared.as_json
def info(path: tuple[str, ...], **options: Any) -> None:
    """Describe any HDF5 FILE, and whether its layout suits training.

    FILE may also be a folder, a quoted pattern such as 'shards/*.h5', or several files: the report then says whether
    they form one data set. Without FILE, describe this machine: the available cores, memory, threads and devices, and
    the versions of packages.
    """
    run(h5chunk.info, list(path) if len(path) > 1 else next(iter(path), None))
