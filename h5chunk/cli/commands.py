"""The commands: arguments and options of the functions of `h5chunk.tools`, which are imported on use."""

from __future__ import annotations

import sys
from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main, note, run
from h5chunk.cli.options import (
    FIELDS,
    FRACTION,
    LAYOUT,
    OUTPUT,
    RUNNING,
    SOURCE,
    given_options,
    number,
    option,
    options_of,
)
from h5chunk.tools.convert.options import WriteOptions, append_options, convert_options

AS_BEFORE = "as when FILE was made"


@main.command(
    examples={
        "Append a folder of images": "h5chunk append photos.h5 more_photos/",
        "See what would be done": "h5chunk append photos.h5 more_photos/ --dry-run",
        "Add images of classes that the file does not have": "h5chunk append photos.h5 birds/ --new-classes",
    }
)
@click.argument("file", type=click.Path())
@click.argument("source", type=click.Path())
@shared.source_format
@options_of(
    append_options(),
    left_out=("size", "color", "layout", "animated"),
    defaults={"fit": AS_BEFORE, "split_folders": AS_BEFORE},
)
@shared.dry_run
@shared.quiet
@shared.as_json
def append(
    file: str, source: str, format: str | None, dry_run: bool, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Append the samples of SOURCE to FILE, which convert made.

    SOURCE must have the fields of FILE. A longer file replaces FILE once it is complete and on disk; until then FILE
    stays as it is, so there must be room for both. Images are decoded with the options that FILE was made with.
    """
    call = h5chunk.plan_append if dry_run else h5chunk.append
    run(call, file, source, quiet=quiet, as_json=as_json, format=format, notify=note, **given_options(options))


@main.command(
    examples={
        "Name the slowest stage of feeding a file": "h5chunk bench photos.h5",
        "Measure up to the GPU for a minute": "h5chunk bench photos.h5 --device cuda --budget 1m",
        "Measure the files of a folder as one data set": "h5chunk bench shards/ --workers 0 --workers 8",
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
    help="Whether to measure the disk too, after parts of FILE left the page cache.",
)
@shared.quiet
@shared.as_json
def bench(file: str, fields: tuple[str, ...], workers: tuple[int, ...], **options: Any) -> None:
    """Measure how fast this machine feeds FILE, and name the slowest stage.

    The files of a folder, or of a quoted pattern such as 'shards/*.h5', are measured as one data set.
    """
    run(h5chunk.bench, file, unit=" %", fields=fields or None, workers=workers or None, **options)


@main.command(
    examples={
        "Convert a folder with one folder per class": "h5chunk convert photos/ photos.h5 --size 224 224 --fit crop",
        "Convert ratings and keep the last duplicates": "h5chunk convert ratings.csv ratings.h5 --duplicates last",
        "See what would be done": "h5chunk convert photos/ photos.h5 --dry-run",
    }
)
@click.argument("source", type=click.Path())
@click.argument("output", type=click.Path())
@shared.source_format
@options_of(convert_options())
@option(
    "--tuned",
    type=click.Path(),
    metavar="FOUND.json",
    heading=LAYOUT,
    help="Recommendation of h5chunk tune: take chunk_samples from it, unless --chunk-samples is given.",
)
@shared.overwrite
@shared.dry_run
@shared.quiet
@shared.as_json
def convert(
    source: str,
    output: str,
    format: str | None,
    tuned: str | None,
    overwrite: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Convert SOURCE into the HDF5 file OUTPUT, or a folder of such files.

    SOURCE is a folder of images with one folder per class, a flat folder, or either in a .zip or .tar; arrays in .npy
    or .npz; a table or a folder of tables in .parquet; or a sparse matrix: ratings.csv and other (row, column[, value])
    lines, .npz of scipy, .mtx, libsvm, .h5ad, 10x .h5 or folder.

    If it is stopped, by Ctrl-C, a full disk, a bad sample or a signal, the same command continues. If OUTPUT is already
    complete, the same command says so and does nothing.
    """
    given = given_options(options)
    if tuned is not None:  # what convert has no place for is said
        from h5chunk.tools.repack.options import read_tuned

        found = read_tuned(tuned)
        given.setdefault("chunk_samples", found.chunk_samples)
        left = [name for name in ("window_chunks", "cache", "compression") if getattr(found, name) is not None]
        if left:
            note(f"convert settles {', '.join(left)} itself; repack takes them from {tuned}")
    run(
        h5chunk.plan_convert if dry_run else h5chunk.convert,
        source,
        output,
        quiet=quiet,
        as_json=as_json,
        format=format,
        overwrite=overwrite,
        notify=note,
        **given,
    )


@main.command(
    examples={
        "Describe a file": "h5chunk info photos.h5",
        "Describe several files that are read as one": "h5chunk info 'shards/*.h5'",
        "Describe this machine": "h5chunk info --json",
    }
)
@click.argument("file", type=click.Path(), required=False)
@shared.trusted
@shared.as_json
def info(file: str | None, as_json: bool, **options: Any) -> None:
    """Describe any HDF5 FILE, and whether its samples lie well for training.

    For a folder, or a quoted pattern such as 'shards/*.h5', describe its files and whether they read as one data set.
    Without FILE, describe what this process may use of the machine: cores, memory, threads, device and versions.
    """
    result = h5chunk.info(file, **options)
    click.echo(result.to_json() if as_json else str(result))


@main.command(
    examples={
        "Give any HDF5 file chunks of whole samples": "h5chunk repack theirs.h5 ours.h5",
        "Shuffle the samples too": "h5chunk repack theirs.h5 ours.h5 --shuffle --seed 7",
        "Take what tune found": "h5chunk repack theirs.h5 ours.h5 --tuned found.json",
    }
)
@click.argument("file", type=click.Path())
@click.argument("output", type=click.Path())
@option(
    "--fields",
    multiple=True,
    metavar="DATASET",
    show_default="images, AnnData's X, or the largest",
    heading=FIELDS,
    help="Dataset whose length is the number of samples (repeatable).",
)
@option(
    "--keep",
    multiple=True,
    metavar="DATASET",
    heading=FIELDS,
    help="Copy this dataset unchanged although its length matches (repeatable).",
)
@options_of([WriteOptions], left_out=["shuffle"])
@option("--window-chunks", type=number(1), heading=LAYOUT, help="Recommended shuffle window to store, in chunks.")
@option(
    "--compression",
    metavar="NAME[:LEVEL]",
    show_default="none",
    heading=LAYOUT,
    help="Compression of the fields: gzip, lzf, zstd, lz4, blosc or none.",
)
@option("--shuffle", is_flag=True, heading=LAYOUT, help="Permute the samples of all fields alike.")
@option(
    "--tuned",
    type=click.Path(),
    metavar="FOUND.json",
    heading=LAYOUT,
    help="Settings that h5chunk tune --json printed. Options that are given here take precedence.",
)
@shared.memory_bytes("1GiB", "Approximate upper limit on memory, such as 512M.")
@shared.overwrite
@shared.dry_run
@shared.quiet
@shared.as_json
def repack(file: str, output: str, dry_run: bool, **options: Any) -> None:
    """Rewrite any HDF5 FILE as OUTPUT, with whole samples in its chunks.

    Everything else is kept. Fields are the datasets whose first axis is as long as that of the main one. The report
    compares the layout of each field before and after.
    """
    run(h5chunk.plan_repack if dry_run else h5chunk.repack, file, output, **options)


@main.command(
    examples={
        "Find the best settings for a file, and store them for its readers": "h5chunk tune photos.h5 --apply",
        "Save what repack and convert take as --tuned": "h5chunk tune theirs.h5 --json > found.json",
        "Compare the reads of HDF5 with the predicted ones": "h5chunk tune theirs.h5 --verify --budget 2m",
    }
)
@click.argument("file", type=click.Path())
@shared.trusted
@shared.fields
@option(
    "--group-by",
    metavar="DATASET",
    show_default="labels",
    heading=FIELDS,
    help="Dataset whose equal values mark similar samples.",
)
@shared.batch_size
@option(
    "--min-effective-batch",
    type=FRACTION,
    default=0.95,
    heading=FIELDS,
    help="Minimum shuffle quality, as a fraction of a full shuffle.",
)
@shared.memory_bytes("4GiB", "Upper limit on the memory that feeding takes, such as 512M.")
@shared.loader_workers("0, 1, 2 and 4, as far as there are cores")
@shared.device
@shared.budget("60s")
@option("--verify", is_flag=True, heading=RUNNING, help="Compare the reads that HDF5 makes with the predicted ones.")
@option("--apply", is_flag=True, heading=OUTPUT, help="Store window and cache in FILE.h5chunk.json for its readers.")
@option(
    "--plot",
    type=click.Path(),
    metavar="PICTURE.png",
    heading=OUTPUT,
    help="Draw rate against effective batch (needs matplotlib).",
)
@shared.quiet
@option("--json", "as_json", is_flag=True, heading=OUTPUT, help="Print JSON, which convert and repack take as --tuned.")
def tune(file: str, fields: tuple[str, ...], workers: tuple[int, ...], **options: Any) -> None:
    """Find the settings that feed FILE fastest on this machine and still mix well.

    Settings are chunks, window, cache and workers. FILE is one that h5chunk made, or any other HDF5 file. The best few
    settings are measured on its data.
    """
    run(h5chunk.tune, file, unit=" %", fields=fields or None, workers=workers or None, **options)


@main.command(
    examples={
        "Check every chunk of a file": "h5chunk verify photos.h5",
        "Check some chunks of each dataset": "h5chunk verify photos.h5 --quick",
        "Rewrite damaged chunks from the images": "h5chunk verify photos.h5 --repair photos/",
    }
)
@click.argument("file", type=click.Path())
@shared.trusted
@option(
    "--repair",
    type=click.Path(),
    metavar="SOURCE",
    heading=SOURCE,
    help="Rewrite damaged chunks of images from SOURCE, which FILE was converted from.",
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
def verify(file: str, **options: Any) -> None:
    """Check the structure of FILE, and every chunk against its checksum. Exit code 1 if anything is wrong.

    If FILE is a folder, all files in it are checked, and missing shards are named. Other HDF5 files have no checksums:
    their chunks are decoded, and the report says so.
    """
    if not run(h5chunk.verify, file, **options).ok:
        sys.exit(1)
