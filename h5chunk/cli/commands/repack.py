"""The command `repack`."""

from __future__ import annotations

from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main, run
from h5chunk.cli.options import options_of
from h5chunk.tools.repack.options import RepackOptions


@main.command(
    examples={
        "Rewrite images with whole samples in each chunk": "h5chunk repack old.h5 new.h5 --fields 'data/*/obs/rgb'",
        "Rewrite all shards of a folder": "h5chunk repack old/ new/ --dask local:4",
        "Shuffle the samples, with settings from tune": "h5chunk repack old.h5 new.h5 --tuned found.json --shuffle",
    }
)
@click.argument("file", type=click.Path())
@click.argument("output", type=click.Path())
@options_of([RepackOptions], excluded=["cache"])
@shared.tuned
@shared.client
@shared.overwrite
@shared.dry_run
@shared.quiet
@shared.as_json
def repack(file: str, output: str, **options: Any) -> None:
    """Rewrite any HDF5 FILE as OUTPUT, with complete samples in each chunk.

    The largest dataset, those as long as it, and the datasets of other groups that have one like it, such as episodes,
    get new chunks; all else is copied unchanged, and a note names datasets whose samples stay cut. The report compares
    the old and new layouts. If FILE is a folder, OUTPUT becomes a folder too; if the command is stopped, running it
    again continues the work.
    """
    run(h5chunk.repack, file, output)
