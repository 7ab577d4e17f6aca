"""The command `append`."""

from __future__ import annotations

from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main, note, run
from h5chunk.cli.options import options_of
from h5chunk.tools.convert.options import SAMPLE_KINDS, append_options

AS_RECORDED = "as recorded in FILE"


@main.command(
    examples={
        "Append a folder of images": "h5chunk append photos.h5 more_photos/",
        "Print the plan and write nothing": "h5chunk append photos.h5 more_photos/ --dry-run",
        "Add images of classes that the file does not have": "h5chunk append photos.h5 birds/ --new-classes",
    }
)
@click.argument("file", type=click.Path())
@click.argument("source", type=click.Path())
@shared.source_format(SAMPLE_KINDS)
@options_of(
    append_options(),
    excluded=("size", "color", "layout", "animated", "mask_column", "keep_encoded", "keep_size", "max_side", "quality"),
    defaults={"fit": AS_RECORDED, "split_folders": AS_RECORDED},
)
@shared.dry_run
@shared.quiet
@shared.as_json
def append(file: str, source: str, **options: Any) -> None:
    """Append the samples of SOURCE to FILE, which convert must have written.

    SOURCE must have the same fields as FILE. Its images are decoded with the options that FILE records. A longer file
    is written beside FILE and replaces it once it is complete, so the disk must have space for both.
    """
    run(h5chunk.append, file, source, notify=note)
