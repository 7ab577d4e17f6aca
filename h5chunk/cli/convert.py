"""`h5chunk convert`: images or a sparse matrix into a file."""

from __future__ import annotations

from typing import Any

import click

from h5chunk.cli.group import main
from h5chunk.cli.options import Bytes, ChunkSamples, Names
from h5chunk.cli.output import note, progress_bar, show


@main.command()
@click.argument("source", type=click.Path())
@click.argument("output", type=click.Path())
@click.option(
    "--manifest",
    type=click.Path(),
    metavar="FILE.csv",
    help="Table of paths below SOURCE; its further columns become fields.",
)
@click.option(
    "--split-folders",
    type=click.Choice(["auto", "yes", "no"]),
    default="auto",
    show_default=True,
    help="Whether the top folders are splits (train, val, ...), which become a field, with classes one level down.",
)
@click.option(
    "--size", type=int, nargs=2, metavar="H W", help="Height and width of all images. Without it they must agree."
)
@click.option(
    "--fit",
    type=click.Choice(["error", "stretch", "crop", "pad"]),
    default="error",
    show_default=True,
    help="What to do with images of another size.",
)
@click.option(
    "--color",
    type=click.Choice(["rgb", "gray", "keep"]),
    default="rgb",
    show_default=True,
    help="Channels of the images in the file; keep: as they are, with alpha.",
)
@click.option(
    "--layout",
    type=click.Choice(["nchw", "nhwc"]),
    default="nchw",
    show_default=True,
    help="Axes of the images in the file.",
)
@click.option(
    "--chunk-samples", type=ChunkSamples(), default="auto", show_default=True, help="Samples in one HDF5 chunk."
)
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 64) - 1),
    default=0,
    show_default=True,
    help="Of the order that samples are written in.",
)
@click.option("--no-shuffle", is_flag=True, help="Keep the order of the source.")
@click.option("--workers", type=click.IntRange(0), help="Processes that decode. [default: one per core]")
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="skip leaves out images that cannot be used, and lists them in OUTPUT.skipped.csv.",
)
@click.option(
    "--animated",
    type=click.Choice(["error", "first"]),
    default="error",
    show_default=True,
    help="For images of several frames: refuse, or take the first.",
)
@click.option(
    "--max-pixels", type=click.IntRange(1), default=89_478_485, show_default=True, help="Refuse images of more pixels."
)
@click.option(
    "--format",
    type=click.Choice(["images", "csv", "npz", "mtx", "libsvm", "h5ad", "10x", "npy"]),
    help="What SOURCE is. [default: as its name and first bytes say]",
)
@click.option(
    "--layer", metavar="NAME", help="Sparse: matrix of an .h5ad (X, raw, or a layer), or genome of a 10x file."
)
@click.option(
    "--columns",
    type=Names(),
    help="Sparse: columns of a delimited file that are row, column, value and time (names, or 0, 1, ...).",
)
@click.option("--scale", type=float, metavar="S", help="Sparse: store value * S. [default: the smallest that is exact]")
@click.option(
    "--clip", is_flag=True, help="Sparse: values below 0 become 0, and above 255 (255 / S with --scale) that."
)
@click.option("--binarize", type=float, metavar="MIN", help="Sparse: values >= MIN become 1, all others are dropped.")
@click.option(
    "--min-row-count", type=click.IntRange(0), default=0, metavar="N", help="Sparse: leave out rows of fewer entries."
)
@click.option(
    "--min-column-count",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Sparse: leave out columns of fewer entries, before rows are.",
)
@click.option(
    "--duplicates",
    type=click.Choice(["auto", "error", "sum", "last", "first", "max", "mean"]),
    default="auto",
    show_default=True,
    help="Sparse: what counts where entries share a row and a column; last and first go by the column of times, if "
    "there is one; auto: error for ratings and libsvm, sum for other sources.",
)
@click.option("--transpose", is_flag=True, help="Sparse: make the columns of SOURCE the samples.")
@click.option("--dense", is_flag=True, help="Sparse: pack dense rows instead.")
@click.option(
    "--filter",
    type=click.Choice(["gzip", "none"]),
    default="gzip",
    show_default=True,
    help="How --dense rows are compressed.",
)
@click.option(
    "--memory-bytes",
    "memory_bytes",
    type=Bytes(),
    default=1 << 30,
    help="Sparse: about the most memory to take, such as 512M; the rest waits on disk. [default: 1GiB]",
)
@click.option(
    "--shards", type=click.IntRange(1), metavar="N", help="Images: make OUTPUT a folder of N files that read as one."
)
@click.option("--shard-bytes", type=Bytes(), help="Images: the same, in files of at most so much, about, such as 1GiB.")
@click.option(
    "--tuned",
    type=click.Path(),
    metavar="FILE.json",
    help="What a tuner found: takes chunk_samples, if not given here.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--quiet", is_flag=True, help="No progress bar, no report.")
@click.option("--json", "as_json", is_flag=True, help="Print the report (or plan) as JSON.")
def convert(
    source: str,
    output: str,
    no_shuffle: bool,
    tuned: str | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Pack the images, or the sparse matrix, of SOURCE into the HDF5 file OUTPUT, or images into a folder of several.

    SOURCE is a folder with one folder per class, a flat folder, or either in a .zip or .tar; or a sparse matrix:
    ratings.csv and other (row, column[, value]) lines, .npz, .mtx, libsvm, .h5ad, 10x .h5 or folder, .npy.

    If it is stopped, by Ctrl-C, a full disk, a bad image or a signal, the same command continues. If OUTPUT is already
    complete, the same command says so and does nothing.
    """
    from h5chunk.tools.convert.convert import convert as run
    from h5chunk.tools.convert.convert import plan_convert

    options["shuffle"] = not no_shuffle
    if tuned is not None:
        _take_tuned(tuned, options)
    with progress_bar(quiet) as progress:
        result = (plan_convert if dry_run else run)(source, output, progress=progress, notify=note, **options)
    show(result, as_json=as_json, quiet=quiet)


def _take_tuned(path: str, options: dict[str, Any]) -> None:
    """Take what convert has a place for; say what it has none for."""
    from h5chunk.tools.repack.options import read_tuned

    tuned = read_tuned(path)
    if options["chunk_samples"] is None:
        options["chunk_samples"] = tuned.chunk_samples
    left = [name for name in ("window_chunks", "cache", "compression") if getattr(tuned, name) is not None]
    if left:
        note(f"convert settles {', '.join(left)} itself; repack takes them from {path}")
