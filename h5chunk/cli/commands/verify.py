"""The command `verify`."""

from __future__ import annotations

import sys
from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main, run
from h5chunk.cli.options import RUNNING, SOURCE, option


@main.command(
    examples={
        "Check every chunk of a file": "h5chunk verify photos.h5",
        "Accept labels that were corrected with h5py": "h5chunk verify photos.h5 --accept labels",
        "Rewrite damaged chunks from the original images": "h5chunk verify photos.h5 --repair photos/",
    }
)
@click.argument("file", type=click.Path())
@shared.trusted
@option(
    "--repair",
    type=click.Path(),
    metavar="SOURCE",
    heading=SOURCE,
    help="Rewrite damaged chunks of images from SOURCE, the folder or archive that FILE was converted from.",
)
@option(
    "--manifest",
    type=click.Path(),
    metavar="TABLE.csv",
    heading=SOURCE,
    help="Manifest from which FILE was converted, if there was one. Needed only with --repair.",
)
@option(
    "--accept",
    multiple=True,
    metavar="FIELD",
    heading=SOURCE,
    help="Field whose values were changed on purpose: replace its checksums, and report how many chunks had changed "
    "(repeatable).",
)
@option("--quick", is_flag=True, heading=RUNNING, help="Read only 32 chunks of each dataset; the report says which.")
@shared.client
@shared.quiet
@shared.as_json
def verify(file: str, **options: Any) -> None:
    """Check the structure of FILE, and every chunk against its checksum. The exit code is 1 if anything is wrong.

    If FILE is a folder, all files in it are checked, and missing shards are listed. HDF5 files that h5chunk did not
    write have no checksums, so their chunks are only read and decoded, and the report says so.
    """
    if not run(h5chunk.verify, file).ok:
        sys.exit(1)
