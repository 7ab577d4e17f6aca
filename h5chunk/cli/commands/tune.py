"""The command `tune`."""

from __future__ import annotations

from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main, run
from h5chunk.cli.options import FIELDS, LAYOUT, NUMBERS, OUTPUT, option


@main.command(
    examples={
        "Find the best settings for a file, and store them for its readers": "h5chunk tune photos.h5 --apply",
        "Save the settings, which repack and convert accept as --tuned": "h5chunk tune old.h5 --json > found.json",
        "Find chunks for patches of volumes": "h5chunk tune ct.h5 --patch 64,64,64",
    }
)
@click.argument("file", type=click.Path())
@shared.trusted
@shared.fields
@option(
    "--group-by",
    metavar="DATASET",
    show_default="labels, if FILE has any",
    heading=FIELDS,
    help="Dataset, such as labels, in which similar samples have equal values. It is used to measure shuffle quality.",
)
@option(
    "--patch",
    type=NUMBERS,
    default=(),
    metavar="N,N[,N]",
    show_default=False,
    heading=LAYOUT,
    help="Measure nothing; compute which chunks suit random patches of this shape, and print the repack command that "
    "writes them.",
)
@option(
    "--window",
    type=int,
    metavar="N",
    heading=LAYOUT,
    help="Measure nothing; compute which chunks suit random windows of N time steps, and print the repack command "
    "that writes them.",
)
@shared.batch_size
@option(
    "--min-effective-batch",
    type=float,
    metavar="FRACTION",
    default=0.95,
    heading=FIELDS,
    help="Minimum shuffle quality, as a fraction of a full shuffle.",
)
@shared.memory_bytes("4GiB", "Upper limit on the memory of the loader, such as 512M.")
@shared.loader_workers("0, 1, 2 and 4, up to the number of cores")
@shared.device
@shared.budget("60s")
@option(
    "--apply",
    is_flag=True,
    heading=OUTPUT,
    help="Store the recommended window and cache in FILE.h5chunk.json, where h5chunk's readers find them.",
)
@option(
    "--plot",
    type=click.Path(),
    metavar="PICTURE.png",
    heading=OUTPUT,
    help="Plot the measured samples/s of all settings (needs matplotlib).",
)
@shared.quiet
@option(
    "--json",
    "as_json",
    is_flag=True,
    heading=OUTPUT,
    help="Print the report as JSON, which convert and repack accept as --tuned.",
)
def tune(file: str, **options: Any) -> None:
    """Find the settings that load batches from FILE fastest on this machine and still shuffle well.

    The settings are the chunk size, the shuffle window, the cache and the number of workers. FILE may be an h5chunk
    file or any other HDF5 file. The most promising settings are measured on its data. For a URL, the settings are the
    number and size of concurrent requests. With --window or --patch, tune only computes which chunks suit windows of
    episodes or patches of volumes.
    """
    run(h5chunk.tune, file)
