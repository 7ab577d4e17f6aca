"""`h5chunk verify`: whether a file is whole."""

from __future__ import annotations

import sys
from typing import Any

import click

from h5chunk.cli.group import main
from h5chunk.cli.options import trusted
from h5chunk.cli.output import progress_bar, show


@main.command()
@click.argument("file", type=click.Path())
@click.option("--quick", is_flag=True, help="Read 32 chunks of each dataset only; the report says which.")
@click.option(
    "--repair", type=click.Path(), metavar="SRC", help="Write bad chunks anew from what FILE was converted from."
)
@click.option(
    "--manifest", type=click.Path(), metavar="FILE.csv", help="To repair: the manifest that it was converted with."
)
@trusted
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def verify(file: str, as_json: bool, **options: Any) -> None:
    """Check FILE: its structure, and every chunk against its checksum. Exit code 1 if anything is wrong.

    FILE may be a folder: then all files in it are checked, and shards that are missing are named. Of a file that
    h5chunk did not make there are no checksums: its chunks are decoded, and the report says so.
    """
    from h5chunk.tools.verify.verify import verify as run

    with progress_bar(as_json) as progress:
        result = run(file, progress=progress, **options)
    show(result, as_json=as_json)
    if not result.ok:
        sys.exit(1)
