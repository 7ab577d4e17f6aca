"""`h5chunk verify`: whether a file is whole."""

from __future__ import annotations

import sys
from typing import Any

import click

from h5chunk.cli import options as shared
from h5chunk.cli.group import main
from h5chunk.cli.options import RUNNING, SOURCE, option
from h5chunk.cli.output import progress_bar, show

EXAMPLES = {
    "Check every chunk of a file": "h5chunk verify photos.h5",
    "Check some chunks of each dataset": "h5chunk verify photos.h5 --quick",
    "Write damaged chunks anew from the images": "h5chunk verify photos.h5 --repair photos/",
}


@main.command(examples=EXAMPLES)
@click.argument("file", type=click.Path())
@shared.trusted
@option(
    "--repair",
    type=click.Path(),
    metavar="SOURCE",
    heading=SOURCE,
    help="Write damaged chunks of images anew from SOURCE, which FILE was converted from.",
)
@option(
    "--manifest",
    type=click.Path(),
    metavar="TABLE.csv",
    heading=SOURCE,
    help="Manifest that FILE was converted with, for --repair.",
)
@option("--quick", is_flag=True, heading=RUNNING, help="Read only 32 chunks of each dataset; the report says which.")
@shared.quiet
@shared.as_json
def verify(file: str, quiet: bool, as_json: bool, **options: Any) -> None:
    """Check the structure of FILE, and every chunk against its checksum. Exit code 1 if anything is wrong.

    If FILE is a folder, all files in it are checked, and missing shards are named. Other HDF5 files have no checksums:
    their chunks are decoded, and the report says so.
    """
    from h5chunk.tools.verify.verify import verify as run

    with progress_bar(quiet) as progress:
        result = run(file, progress=progress, **options)
    show(result, as_json=as_json, quiet=quiet)
    if not result.ok:
        sys.exit(1)
