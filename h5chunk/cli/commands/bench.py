"""The command `bench`."""

from __future__ import annotations

from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main, run
from h5chunk.cli.options import RUNNING, option


@main.command(
    examples={
        "Name the slowest stage of feeding a file": "h5chunk bench photos.h5",
        "Include the copies to the GPU, and measure for a minute": "h5chunk bench photos.h5 --device cuda --budget 1m",
        "Measure a folder of files as one data set": "h5chunk bench shards/ --workers 0 --workers 8",
    }
)
@click.argument("file", type=click.Path())
@shared.trusted
@shared.fields
@shared.batch_size
@shared.device
@shared.loader_workers("0, and one per core up to 4")
@shared.budget("10s")
@option(
    "--cold/--no-cold",
    default=True,
    heading=RUNNING,
    help="Whether to measure the disk too, by dropping parts of FILE from the page cache and reading them again.",
)
@shared.quiet
@shared.as_json
def bench(file: str, **options: Any) -> None:
    """Measure how fast this machine delivers batches from FILE, and name the slowest stage.

    FILE may also be a folder, or a quoted pattern such as 'shards/*.h5', whose files are measured as one data set. For
    a URL, requests to the object store are measured, and the loaders.
    """
    run(h5chunk.bench, file)
