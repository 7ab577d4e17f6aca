"""The command `info`."""

from __future__ import annotations

from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main
from h5chunk.cli.options import OUTPUT, option


@main.command(
    examples={
        "Describe a file": "h5chunk info photos.h5",
        "Describe several files that form one data set": "h5chunk info 'shards/*.h5'",
        "Describe this machine": "h5chunk info --json",
    }
)
@click.argument("file", type=click.Path(), required=False)
@shared.trusted
@option("--all", "show_all", is_flag=True, heading=OUTPUT, help="List every dataset of FILE, with its chunks.")
@shared.as_json
def info(file: str | None, as_json: bool, **options: Any) -> None:
    """Describe any HDF5 FILE, and whether its layout suits training.

    FILE may also be a folder, or a quoted pattern such as 'shards/*.h5': the report then says whether its files form
    one data set. Without FILE, describe the cores, memory, threads and devices that are available, and the versions of
    packages.
    """
    result = h5chunk.info(file, **options)
    click.echo(result.to_json() if as_json else str(result))
