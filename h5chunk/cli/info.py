"""`h5chunk info`: what is in a file."""

from __future__ import annotations

from typing import Any

import click

from h5chunk.cli.group import main
from h5chunk.cli.options import trusted
from h5chunk.cli.output import show


@main.command()
@click.argument("file", type=click.Path())
@trusted
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def info(file: str, as_json: bool, **options: Any) -> None:
    """Say what is in any HDF5 FILE, and whether samples lie well in it for training.

    Of a folder, or a quoted pattern such as 'shards/*.h5': what its files are, and whether they read as one data set.
    """
    from h5chunk.tools.info.info import info as run

    result = run(file, **options)
    show(result, as_json=as_json)
