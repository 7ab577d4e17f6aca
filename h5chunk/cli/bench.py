"""`h5chunk bench`: what this machine gives for a file."""

from __future__ import annotations

from typing import Any

import click

from h5chunk.cli.group import main
from h5chunk.cli.options import Seconds, trusted
from h5chunk.cli.output import progress_bar, show


@main.command()
@click.argument("file", type=click.Path())
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True, help="Samples in a batch.")
@click.option(
    "--device", metavar="cpu|cuda", default="cpu", show_default=True, help="Where ChunkLoader brings the batches."
)
@click.option(
    "--fields",
    multiple=True,
    metavar="DATASET",
    help="Dataset to read (repeatable). [default: images, and labels if there are any]",
)
@click.option(
    "--budget",
    "budget_s",
    type=Seconds(),
    default="10s",
    show_default=True,
    help="Time to take, such as 10s or 1m.",
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    multiple=True,
    help="DataLoader worker count to try (repeatable). [default: 0, and one per core up to 4]",
)
@click.option(
    "--cold/--no-cold", default=True, help="Also read from the disk, after parts of FILE left the page cache. [default]"
)
@trusted
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def bench(file: str, fields: tuple[str, ...], workers: tuple[int, ...], as_json: bool, **options: Any) -> None:
    """Measure what this machine gives for FILE, and name the slowest stage.

    The files of a folder, or of a quoted pattern such as 'shards/*.h5', are measured as one data set.
    """
    from h5chunk.tools.bench.bench import bench as run

    with progress_bar(as_json, " %") as progress:
        result = run(file, fields=fields or None, workers=workers or None, progress=progress, **options)
    show(result, as_json=as_json)
