"""`h5chunk append`: more images into a file."""

from __future__ import annotations

from typing import Any

import click

from h5chunk.cli.group import main
from h5chunk.cli.output import note, progress_bar, show


@main.command()
@click.argument("file", type=click.Path())
@click.argument("source", metavar="SRC", type=click.Path())
@click.option(
    "--manifest",
    type=click.Path(),
    metavar="FILE.csv",
    help="Table of paths below SRC; its further columns are fields.",
)
@click.option(
    "--split-folders",
    type=click.Choice(["auto", "yes", "no"]),
    help="Whether the top folders of SRC are splits (train, val, ...). [default: as when FILE was made]",
)
@click.option(
    "--fit",
    type=click.Choice(["error", "stretch", "crop", "pad"]),
    help="What to do with images of another size. [default: as when FILE was made]",
)
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 64) - 1),
    default=0,
    show_default=True,
    help="Of the order that new samples are written in.",
)
@click.option("--no-shuffle", is_flag=True, help="Keep the order of SRC.")
@click.option("--workers", type=click.IntRange(0), help="Processes that decode. [default: one per core]")
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="With skip, leave out images that cannot be used, and list them in FILE.skipped.csv.",
)
@click.option(
    "--max-pixels", type=click.IntRange(1), default=89_478_485, show_default=True, help="Refuse images of more pixels."
)
@click.option("--new-classes", is_flag=True, help="Put classes that FILE does not have behind its own.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--quiet", is_flag=True, help="No progress bar, no report.")
@click.option("--json", "as_json", is_flag=True, help="Print the report (or plan) as JSON.")
def append(file: str, source: str, no_shuffle: bool, dry_run: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Append the images of SRC to FILE, which convert made of images.

    A longer file takes the place of FILE once it is complete and on disk; until then FILE stays as it is, and there
    must be room for both. How samples are made is as FILE says of its own.
    """
    from h5chunk.tools.append.append import append as run
    from h5chunk.tools.append.append import plan_append

    with progress_bar(quiet) as progress:
        call = plan_append if dry_run else run
        result = call(file, source, shuffle=not no_shuffle, progress=progress, notify=note, **options)
    show(result, as_json=as_json, quiet=quiet)
