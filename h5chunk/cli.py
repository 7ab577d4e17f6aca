"""The command line: arguments, progress bars and exit codes around the functions of `h5chunk.tools`.

Exit codes: 0 done, 1 a named error (one line on standard error), 2 arguments that click refuses, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from tqdm import tqdm

import h5chunk
from h5chunk.errors import H5ChunkError


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except H5ChunkError as error:
            click.echo(f"error: {_one_line(str(error))}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted: nothing was changed", err=True)
            ctx.exit(130)


def _one_line(message: str) -> str:
    """A message with line breaks and other control characters (of file names) escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


def _note(line: str) -> None:
    tqdm.write(f"note: {_one_line(line)}", file=sys.stderr)  # above the bar


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(h5chunk.__version__, package_name="h5chunk")
def main() -> None:
    """Keep training data in plain HDF5, and feed the GPU from it as fast as the machine can move bytes."""
    tqdm.monitor_interval = 0  # its thread would make forking workers unsafe


class _ChunkSamples(click.ParamType):
    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value in (None, "auto"):
            return None
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither auto nor a number", param, ctx)


class _Bytes(click.ParamType):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from h5chunk.tools.sparse_options import parse_bytes

        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except H5ChunkError as error:
            self.fail(str(error), param, ctx)


_trusted = click.option(
    "--trusted",
    multiple=True,
    type=click.Path(),
    metavar="FOLDER",
    callback=lambda _context, _option, folders: list(folders) or False,
    help="Follow links, views and external storage into FOLDER, and load plugins for filters; again for more.",
)


class _Seconds(click.ParamType):
    name = "SECONDS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        factor = 60.0 if text.endswith("m") else 1.0
        try:
            seconds = factor * float(text.rstrip("ms"))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r} is no time above 0 such as 60s or 2m", param, ctx)
        return seconds


class _Triple(click.ParamType):
    name = "NSLOTS,NBYTES,W0"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in value.split(",")) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not three numbers with commas between", param, ctx)


class _Names(click.ParamType):
    name = "A,B[,C]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return tuple(value.split(",")) if isinstance(value, str) else tuple(value)


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
    "--chunk-samples", type=_ChunkSamples(), default="auto", show_default=True, help="Samples in one HDF5 chunk."
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
    type=_Names(),
    help="Sparse: columns of a delimited file that are row, column and value (names, or 0, 1, ...).",
)
@click.option("--scale", type=float, metavar="S", help="Sparse: store value * S. [default: the smallest that is exact]")
@click.option("--clip", is_flag=True, help="Sparse: what is outside of 0..255 becomes 0 or 255.")
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
@click.option("--dense", is_flag=True, help="Sparse: pack dense rows instead.")
@click.option(
    "--filter",
    type=click.Choice(["gzip", "none"]),
    default="gzip",
    show_default=True,
    help="How --dense rows are compressed.",
)
@click.option(
    "--memory",
    "memory_bytes",
    type=_Bytes(),
    default=1 << 30,
    help="Sparse: about the most memory to take, such as 512M; the rest waits on disk. [default: 1GiB]",
)
@click.option(
    "--shards", type=click.IntRange(1), metavar="N", help="Images: make OUTPUT a folder of N files that read as one."
)
@click.option(
    "--shard-bytes", type=_Bytes(), help="Images: the same, in files of at most so much, about, such as 1GiB."
)
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
    ratings.csv and other (row, column[, value]) lines, .npz, .mtx, libsvm, .h5ad, 10x .h5, .npy.

    If it is stopped, by Ctrl-C, a full disk, a bad image or a signal, the same command continues.
    """
    from h5chunk.tools.convert import convert as run
    from h5chunk.tools.convert import plan_convert

    options["shuffle"] = not no_shuffle
    if tuned is not None:
        _take_tuned(tuned, options)
    with _progress(quiet) as progress:
        result = (plan_convert if dry_run else run)(source, output, progress=progress, notify=_note, **options)
    if as_json:
        click.echo(result.to_json())
    elif not quiet:
        click.echo(str(result))


def _take_tuned(path: str, options: dict[str, Any]) -> None:
    """Take what convert has a place for; say what it has none for."""
    from h5chunk.tools.repack_options import read_tuned

    tuned = read_tuned(path)
    if options["chunk_samples"] is None:
        options["chunk_samples"] = tuned.chunk_samples
    left = [name for name in ("window_chunks", "cache", "compression") if getattr(tuned, name) is not None]
    if left:
        click.echo(f"note: convert settles {', '.join(left)} itself; repack takes them from {path}", err=True)


@main.command()
@click.argument("file", type=click.Path())
@click.argument("out", type=click.Path())
@click.option(
    "--chunk-samples", type=_ChunkSamples(), default="auto", show_default=True, help="Samples in one HDF5 chunk."
)
@click.option("--window", type=click.IntRange(1), metavar="N", help="Store N as the recommended window, in chunks.")
@click.option("--shuffle", is_flag=True, help="Permute the samples of all fields alike.")
@click.option(
    "--seed", type=click.IntRange(0, (1 << 64) - 1), default=0, show_default=True, help="Of that permutation."
)
@click.option(
    "--compression",
    metavar="NAME[:LEVEL]",
    help="Of the fields: gzip, lzf, zstd, lz4, blosc or none. [default: none]",
)
@click.option(
    "--tuned",
    type=click.Path(),
    metavar="FILE.json",
    help="What a tuner found: chunks, window, cache, compression, shuffling. Options given here count more.",
)
@click.option(
    "--fields",
    multiple=True,
    metavar="DATASET",
    help="Dataset that says how many samples there are; again for more. [default: images, AnnData's X, or the largest]",
)
@click.option(
    "--keep", multiple=True, metavar="DATASET", help="Dataset that holds no samples, though as long as one; again."
)
@click.option(
    "--memory",
    "memory_bytes",
    type=_Bytes(),
    default=1 << 30,
    help="About the most memory to take, such as 512M. [default: 1GiB]",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--quiet", is_flag=True, help="No progress bar, no report.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def repack(file: str, out: str, quiet: bool, as_json: bool, **options: Any) -> None:
    """Write any HDF5 FILE anew as OUT, with whole samples in its chunks; all else is kept.

    Fields are the datasets as long as the main one along their first axis. The report says how each lay before and how
    it lies now.
    """
    from h5chunk.tools.repack import repack as run

    with _progress(quiet) as progress:
        result = run(file, out, progress=progress, **options)
    if as_json:
        click.echo(result.to_json())
    elif not quiet:
        click.echo(str(result))


@main.command()
@click.argument("file", type=click.Path())
@click.argument("source", metavar="SRC", type=click.Path())
@click.option(
    "--manifest",
    type=click.Path(),
    metavar="FILE.csv",
    help="Images: table of paths below SRC; its further columns are fields.",
)
@click.option(
    "--fit",
    type=click.Choice(["error", "stretch", "crop", "pad"]),
    help="Images: what to do with those of another size. [default: as when FILE was made]",
)
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 64) - 1),
    default=0,
    show_default=True,
    help="Of the order that new samples are written in.",
)
@click.option("--no-shuffle", is_flag=True, help="Keep the order of SRC.")
@click.option("--workers", type=click.IntRange(0), help="Images: processes that decode. [default: one per core]")
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="Images: skip leaves out those that cannot be used, and lists them in FILE.skipped.csv.",
)
@click.option(
    "--max-pixels", type=click.IntRange(1), default=89_478_485, show_default=True, help="Refuse images of more pixels."
)
@click.option("--new-classes", is_flag=True, help="Put classes that FILE does not have behind its own.")
@click.option(
    "--format",
    type=click.Choice(["csv", "npz", "mtx", "libsvm", "h5ad", "10x", "npy"]),
    help="Sparse: what SRC is. [default: as its name and first bytes say]",
)
@click.option(
    "--layer", metavar="NAME", help="Sparse: matrix of an .h5ad (X, raw, or a layer), or genome of a 10x file."
)
@click.option("--columns", type=_Names(), help="Sparse: columns of a delimited file that are row, column and value.")
@click.option("--drop-columns", is_flag=True, help="Sparse: leave out entries in columns that FILE does not have.")
@click.option(
    "--memory",
    "memory_bytes",
    type=_Bytes(),
    default=1 << 30,
    help="Sparse: about the most memory to take, such as 512M. [default: 1GiB]",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--quiet", is_flag=True, help="No progress bar, no report.")
@click.option("--json", "as_json", is_flag=True, help="Print the report (or plan) as JSON.")
def append(file: str, source: str, no_shuffle: bool, dry_run: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Add the samples of SRC to FILE, which convert made: images to images, rows to a sparse matrix.

    A longer file takes the place of FILE once it is complete and on disk; until then FILE stays as it is, and there
    must be room for both. How samples are made is as FILE says of its own.
    """
    from h5chunk.tools.append import append as run
    from h5chunk.tools.append import plan_append

    with _progress(quiet) as progress:
        call = plan_append if dry_run else run
        result = call(file, source, shuffle=not no_shuffle, progress=progress, notify=_note, **options)
    if as_json:
        click.echo(result.to_json())
    elif not quiet:
        click.echo(str(result))


@main.command()
@click.argument("file", type=click.Path())
@_trusted
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def info(file: str, as_json: bool, **options: Any) -> None:
    """Say what is in any HDF5 FILE, and whether samples lie well in it for training.

    Of a folder, or a quoted pattern such as 'shards/*.h5': what its files are, and whether they read as one data set.
    """
    from h5chunk.tools.info import info as run

    result = run(file, **options)
    click.echo(result.to_json() if as_json else str(result))


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
    help="Dataset to read; again for more. [default: images, and labels if there are any]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Time to take, about.",
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    multiple=True,
    help="Of torch's DataLoader; again for more numbers. [default: 0, and one per core up to 4]",
)
@click.option(
    "--cold/--no-cold", default=True, help="Also read from the disk, after parts of FILE left the page cache. [default]"
)
@_trusted
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def bench(file: str, fields: tuple[str, ...], workers: tuple[int, ...], as_json: bool, **options: Any) -> None:
    """Measure what this machine gives for FILE, and name the slowest stage.

    The files of a folder, or of a quoted pattern such as 'shards/*.h5', are measured as one data set.
    """
    from h5chunk.tools.bench import bench as run

    with _progress(as_json, " %") as progress:
        result = run(file, fields=fields or None, workers=workers or None, progress=progress, **options)
    click.echo(result.to_json() if as_json else str(result))


@main.command()
@click.argument("source", metavar="SRC", type=click.Path())
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True, help="Samples in a batch.")
@click.option(
    "--memory",
    "memory_bytes",
    type=_Bytes(),
    default=4 << 30,
    help="The most that feeding may take, such as 512M. [default: 4GiB]",
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    multiple=True,
    help="Of torch's DataLoader; again for more numbers. [default: 0, 1, 2 and 4, as far as there are cores]",
)
@click.option("--device", metavar="cpu|cuda", default="cpu", show_default=True, help="Where batches shall be.")
@click.option(
    "--fields",
    multiple=True,
    metavar="DATASET",
    help="Dataset to read; again for more. [default: images, and labels if there are any]",
)
@click.option("--group-by", metavar="FIELD", help="Dataset that says which samples are alike. [default: labels]")
@click.option(
    "--min-effective-batch",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Part of a batch that it shall be worth, against a full shuffle.",
)
@click.option(
    "--budget", "budget_s", type=_Seconds(), default="60s", show_default=True, help="Time to take, such as 60s or 2m."
)
@click.option(
    "--h5py-cache",
    type=_Triple(),
    metavar="NSLOTS,NBYTES,W0",
    help="The cache that you give h5py.File today. [default: the library's]",
)
@click.option("--size", type=int, nargs=2, metavar="H W", help="Of images that are not converted yet.")
@click.option("--plot", type=click.Path(), metavar="PNG", help="Draw rate against effective batch; needs matplotlib.")
@click.option("--apply", is_flag=True, help="Store window and cache in SRC (of another's file: beside it) for readers.")
@click.option("--verify", is_flag=True, help="Count what HDF5 really reads against what was predicted.")
@_trusted
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON, which convert and repack take with --tuned.")
def tune(source: str, fields: tuple[str, ...], workers: tuple[int, ...], as_json: bool, **options: Any) -> None:
    """Find the fastest chunks, window, cache and workers for SRC on this machine that still mix well.

    SRC is a file that h5chunk made, anybody's HDF5 file, or what convert takes: images or a sparse matrix. The best few
    settings are measured on its data.
    """
    from h5chunk.tools.tune import tune as run

    with _progress(as_json, " %") as progress:
        result = run(source, fields=fields or None, workers=workers or None, progress=progress, **options)
    click.echo(result.to_json() if as_json else str(result))


@main.command()
@click.argument("file", type=click.Path())
@click.option("--quick", is_flag=True, help="Read 32 chunks of each dataset only; the report says which.")
@click.option(
    "--repair", type=click.Path(), metavar="SRC", help="Write bad chunks anew from what FILE was converted from."
)
@click.option(
    "--manifest", type=click.Path(), metavar="FILE.csv", help="To repair: the manifest that it was converted with."
)
@_trusted
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def verify(file: str, as_json: bool, **options: Any) -> None:
    """Check FILE: its structure, and every chunk against its checksum. Exit code 1 if anything is wrong.

    FILE may be a folder: then all files in it are checked, and shards that are missing are named. Of a file that
    h5chunk did not make there are no checksums: its chunks are decoded, and the report says so.
    """
    from h5chunk.tools.verify import verify as run

    with _progress(as_json) as progress:
        result = run(file, progress=progress, **options)
    click.echo(result.to_json() if as_json else str(result))
    if not result.ok:
        sys.exit(1)


@contextmanager
def _progress(quiet: bool, unit: str = " images") -> Iterator[Callable[[str, int, int | None], None] | None]:
    """A bar for each stage; none with --quiet or where nobody watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    words = {"list": "listing", "convert": "converting", "bench": "measuring", "read": "reading", "write": "writing"}
    words |= {"repack": "repacking", "tune": "tuning", "verify": "verifying", "copy": "copying"}
    units = {"read": "B", "write": " entries", "repack": "B", "verify": "B", "copy": "B"}
    bar: tqdm[Any] | None = None
    current = ""

    def show(stage: str, done: int, total: int | None) -> None:
        nonlocal bar, current
        if stage != current or bar is None:
            if bar is not None:
                bar.close()
            bar = tqdm(
                desc=words[stage],
                unit=units.get(stage, unit),
                unit_scale=stage in units,
                total=total,
                leave=False,
                mininterval=0.1,
                dynamic_ncols=True,
            )
            current = stage
        bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


if __name__ == "__main__":
    main()
