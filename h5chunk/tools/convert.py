"""Pack a folder, an archive or a manifest of images, or a sparse matrix, into one HDF5 file."""

from __future__ import annotations

import csv
import inspect
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import h5chunk
from h5chunk.errors import OptionError, OutputError, SampleError, SourceError, printable
from h5chunk.plan.layout import Layout, plan_layout
from h5chunk.plan.permute import permutation
from h5chunk.sources.decode import MAX_PIXELS, ImageOptions
from h5chunk.sources.images import ImageSource, ShapeError
from h5chunk.sources.listing import Listing, list_images
from h5chunk.sources.manifest import list_manifest
from h5chunk.store.csr import field_checksums
from h5chunk.store.fill import Filled, FillJob, available_cores, fill
from h5chunk.store.format import FORMAT_VERSION, GROUP, FieldSpec, FileSpec
from h5chunk.store.newfile import NewFile, check_output, check_room
from h5chunk.tools.convert_sparse import MEMORY_BYTES, convert_sparse, plan_sparse
from h5chunk.tools.report import ConvertPlan, ConvertReport
from h5chunk.tools.report_sparse import SparsePlan, SparseReport
from h5chunk.tools.sparse_options import SPARSE_ONLY, is_sparse, sparse_arguments

IMAGES = "images"
NAMES_AT_A_TIME = 65_536
PROBES = 24  # images decoded to estimate the time

Progress = Callable[[str, int, "int | None"], None]
"""Told (stage, done, total): stage "list" without a total, then "convert" with one."""


@dataclass(frozen=True)
class _Conversion:
    """All that is settled before the first sample is written."""

    source: ImageSource
    path: Path
    layout: Layout
    sample_shape: tuple[int, ...]
    order: np.ndarray
    options: dict[str, Any]
    num_workers: int
    skip: bool

    @property
    def listing(self) -> Listing:
        return self.source.listing

    def spec(self) -> FileSpec:
        """The file to write."""
        listing, layout, order = self.listing, self.layout, self.order
        images = FieldSpec(IMAGES, self.sample_shape, np.dtype(np.uint8))
        columns = [FieldSpec(name, (), values.dtype) for name, values in listing.columns.items()]
        ends = listing.names.offsets
        tables: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            "source_index": ((len(order),), np.dtype(np.int64)),
            "source_name_ends": ((len(order),), np.dtype(np.int64)),
            "source_names": ((int((ends[order + 1] - ends[order]).sum()),), np.dtype(np.uint8)),
        }
        if listing.class_names:
            tables["class_names"] = ((len(listing.class_names),), _class_table(listing.class_names).dtype)
        for each in (images, *columns):
            tables[f"checksums/{each.name}"] = ((layout.num_chunks,), np.dtype(np.uint32))
        cache = layout.cache
        return FileSpec(
            num_samples=len(order),
            chunk_samples=layout.chunk_samples,
            fields=(images, *columns),
            tables=tables,
            attributes={
                "format_version": np.int64(FORMAT_VERSION),
                "h5chunk_version": h5chunk.__version__,
                "num_samples": np.int64(len(order)),
                "chunk_samples": np.int64(layout.chunk_samples),
                "window_chunks": np.int64(layout.window_chunks),
                "rdcc_nslots": np.int64(cache.nslots),
                "rdcc_nbytes": np.int64(cache.nbytes),
                "rdcc_w0": np.float64(cache.w0),
                "seed": np.uint64(self.options["seed"]),
                "shuffled": np.uint8(self.options["shuffle"]),
                "options": json.dumps(self.options, sort_keys=True),
            },
            field_attributes={IMAGES: {"axes": self.source.options.layout.upper()}},
        )


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    manifest: str | os.PathLike[str] | None = None,
    size: tuple[int, int] | None = None,
    fit: str = "error",
    color: str = "rgb",
    layout: str = "nchw",
    chunk_samples: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    workers: int | None = None,
    on_error: str = "fail",
    animated: str = "error",
    max_pixels: int = MAX_PIXELS,
    format: str | None = None,
    layer: str | None = None,
    columns: Sequence[str] | None = None,
    scale: float | None = None,
    clip: bool = False,
    binarize: float | None = None,
    min_row_count: int = 0,
    min_column_count: int = 0,
    dense: bool = False,
    filter: str = "gzip",
    memory_bytes: int = MEMORY_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConvertReport | SparseReport:
    """Pack images, or a sparse matrix, into one HDF5 file.

    The file appears under its name only when it is complete and on disk. Equal source and options give equal bytes,
    with any number of workers.

    Parameters
    ----------
    source : path
        A folder with one folder per class, a flat folder, or either in a .zip or .tar; or a sparse matrix: a file of
        (row, column[, value]) lines such as MovieLens' ratings.csv, .npz of scipy, Matrix Market, libsvm, .h5ad,
        10x .h5, or a dense .npy.
    path : path
        The file to make.
    manifest : path, optional
        A .csv with a path column, relative to ``source``, and columns that become fields.
    size : (height, width), optional
        Of all images in the file. Without it, they must agree.
    fit : {"error", "stretch", "crop", "pad"}
        What to do with images of another size.
    color : {"rgb", "gray", "keep"}
    layout : {"nchw", "nhwc"}
        Axes of the field ``images``: (N, C, H, W) or (N, H, W, C), uint8.
    chunk_samples : int, optional
        Samples in one chunk; chosen if not given.
    seed : int
        Of the permutation that the samples are written in.
    shuffle : bool
        False keeps the order of the source.
    workers : int, optional
        Processes that decode; as many as there are cores if not given; 0: none but this one.
    on_error : {"fail", "skip"}
        For an image that cannot be used: give up, or leave it out and list it in ``PATH.skipped.csv``.
    animated : {"error", "first"}
        For an image of several frames.
    max_pixels : int
        Images of more pixels are refused.
    format : {"images", "csv", "npz", "mtx", "libsvm", "h5ad", "10x", "npy"}, optional
        What the source is, where its name and first bytes do not tell. This and all options down to ``memory_bytes``
        are for sparse matrices; those from ``manifest`` to ``max_pixels``, but for ``chunk_samples``, ``seed`` and
        ``shuffle``, for images.
    layer : str, optional
        Which matrix of an .h5ad: ``X``, ``raw`` or the name of a layer; which genome of an old 10x file.
    columns : sequence of str, optional
        Names or numbers (from 0) of the columns of a delimited file that are row, column and, if any, value.
    scale : float, optional
        Values are stored as value * scale, which must be whole numbers from 0 to 255; without, the smallest of 1, 2,
        4, 5, 8, 10, 16, 20, 100 that makes them so. The values of duplicate entries are summed before anything else.
    clip : bool
        Whether what lies outside of 0..255 becomes 0 or 255.
    binarize : float, optional
        Values of at least this become 1, all others are dropped.
    min_row_count, min_column_count : int
        Leave out first columns, then rows, of fewer entries than this; once. Rows without entries are kept if the
        source has them by number, and if this is 0.
    dense : bool
        Pack dense rows instead.
    filter : {"gzip", "none"}
        Of their chunks.
    memory_bytes : int
        About the most memory to take; what does not fit waits on disk, beside ``path``. The output does not depend on
        it.
    overwrite : bool
        Whether to replace a file at ``path``.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.

    Returns
    -------
    ConvertReport or SparseReport

    Raises
    ------
    SourceError, SampleError
        The source cannot be used, with the image and the reason.
    OutputError
        The file cannot be made; what stood at ``path`` is as it was.
    OptionError
        An argument cannot be.
    """
    given = dict(locals())
    if is_sparse(source, given, convert):
        return convert_sparse(source, path, **sparse_arguments(given), progress=progress)
    return _convert_images(**{name: value for name, value in given.items() if name not in SPARSE_ONLY})


def _convert_images(*, overwrite: bool, progress: Progress | None, **options: Any) -> ConvertReport:
    started = time.perf_counter()
    job = _prepare(overwrite=overwrite, progress=progress, **options)
    with NewFile(job.path, overwrite) as new:
        regions = new.allocate(job.spec())
        filled = _fill(new, job, regions[IMAGES].offset, progress)
        skipped = [(job.source.name(int(job.order[f.row])), f.reason) for f in filled.failures]
        if filled.failures:
            job = _close_gaps(new, job, filled)
        _write_tables(new, job, filled.checksums)
        new.commit()
    return ConvertReport(
        path=printable(job.path),
        num_samples=len(job.order),
        num_bytes=job.path.stat().st_size,
        sample_shape=job.sample_shape,
        chunk_samples=job.layout.chunk_samples,
        seconds=time.perf_counter() - started,
        modes={note: n for note, n in filled.notes.most_common() if note not in _APPLIED},
        applied={note: filled.notes[note] for note in _APPLIED if note in filled.notes},
        skipped=skipped,
        skipped_list=_write_skipped(job.path, skipped, overwrite),
        ignored=job.listing.ignored,
        class_names=job.listing.class_names,
    )


_APPLIED = ("rotated", "resized", "first frame")


def plan_convert(
    source: str | os.PathLike[str], path: str | os.PathLike[str], **options: Any
) -> ConvertPlan | SparsePlan:
    """What `convert` would do with the same arguments; writes nothing.

    Raises
    ------
    As `convert`, as far as a look at the source and at a few images shows it.
    """
    call = inspect.signature(convert).bind(source, path, **options)
    call.apply_defaults()
    given = call.arguments
    if is_sparse(source, given, convert):
        return plan_sparse(source, path, **sparse_arguments(given))
    job = _prepare(**{name: value for name, value in given.items() if name not in SPARSE_ONLY})
    spec = job.spec()
    check_room(job.path, spec.num_bytes)
    return ConvertPlan(
        num_samples=len(job.source),
        sample_shape=job.sample_shape,
        layout=job.layout,
        fields={each.name: str(each.dtype) for each in spec.fields},
        num_bytes=spec.num_bytes,
        free_bytes=shutil.disk_usage(job.path.parent).free,
        estimated_s=_estimate_s(job),
        num_workers=job.num_workers,
        class_names=job.listing.class_names,
        ignored=job.listing.ignored,
    )


def _prepare(
    *,
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    manifest: str | os.PathLike[str] | None,
    chunk_samples: int | None,
    seed: int,
    shuffle: bool,
    workers: int | None,
    on_error: str,
    overwrite: bool,
    progress: Progress | None,
    **image_options: Any,
) -> _Conversion:
    """Check the arguments of `convert`, list the source, and settle layout and order."""
    options = ImageOptions(**image_options)
    path = Path(path)
    if not 0 <= seed < 1 << 64:
        raise OptionError(f"seed is {seed}: give a number from 0 to {(1 << 64) - 1}")
    if on_error not in ("fail", "skip"):
        raise OptionError(f"on_error is {on_error!r}: give fail or skip")
    if workers is not None and workers < 0:
        raise OptionError(f"workers is {workers}: give 0 (none but this process) or more")
    for read in (source, manifest):
        if read is not None and os.path.exists(path) and os.path.exists(read) and path.samefile(read):
            raise OutputError(f"{printable(path)}: is the source itself: write to another file")
    check_output(path, overwrite)

    def found(count: int) -> None:
        if progress:
            progress("list", count, None)

    listing = list_images(source, found) if manifest is None else list_manifest(manifest, source, found)
    images = ImageSource(listing, options)
    _, shape = images.first_shape(skip=on_error == "skip")
    layout = plan_layout(len(images), int(np.prod(shape)), chunk_samples)
    order = permutation(len(images), seed) if shuffle else np.arange(len(images), dtype=np.int64)
    asked = {
        "size": options.size,
        "fit": options.fit,
        "color": options.color,
        "layout": options.layout,
        "animated": options.animated,
        "seed": seed,
        "shuffle": shuffle,
    }
    num_workers = available_cores() if workers is None else workers
    return _Conversion(images, path, layout, shape, order, asked, num_workers, on_error == "skip")


def _fill(new: NewFile, job: _Conversion, offset: int, progress: Progress | None) -> Filled:
    """Have the workers write all images; raise what a failure means."""
    total, done = len(job.order), 0

    def written(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress("convert", done, total)

    written(0)
    fill_job = FillJob(new.part, offset, job.sample_shape, job.layout.chunk_samples, job.source, job.order)
    with new.flusher():
        filled = fill(fill_job, job.num_workers, not job.skip, written)
    if any(failure.kind == ShapeError.__name__ for failure in filled.failures):
        raise SourceError(job.source.disagreement(job.sample_shape))
    if filled.failures and not job.skip:
        first = filled.failures[0]
        raise SampleError(
            f"{job.source.name(int(job.order[first.row]))}: {first.reason} (to leave such images out: --on-error skip)"
        )
    if len(filled.failures) == total:
        first = filled.failures[0]
        name = job.source.name(int(job.order[first.row]))
        raise SourceError(f"none of the {total} images can be used, such as {name}: {first.reason}")
    return filled


def _close_gaps(new: NewFile, job: _Conversion, filled: Filled) -> _Conversion:
    """Leave failed rows out: the last good rows take their places, and the file becomes one of fewer samples.

    Returns
    -------
    _Conversion
        With the order and the layout that are left.
    """
    order = job.order.copy()
    failed = [failure.row for failure in filled.failures]
    num_samples = len(order) - len(failed)
    gaps = [row for row in failed if row < num_samples]
    behind = set(failed)
    movers = [row for row in range(num_samples, len(order)) if row not in behind]
    sample_bytes = job.layout.sample_bytes
    for gap, mover in zip(gaps, movers, strict=True):
        new.write_bytes(IMAGES, gap * sample_bytes, new.read(IMAGES, mover * sample_bytes, sample_bytes))
        order[gap] = order[mover]
    size = min(job.layout.chunk_samples, num_samples)
    num_chunks = -(-num_samples // size)
    window_chunks = min(job.layout.window_chunks, num_chunks)
    layout = replace(job.layout, num_samples=num_samples, chunk_samples=size, window_chunks=window_chunks)
    job = replace(job, layout=layout, order=order[:num_samples])
    new.replace_header(job.spec())
    rest = num_chunks * size - num_samples
    new.write_bytes(IMAGES, num_samples * sample_bytes, bytes(rest * sample_bytes))
    filled.checksums = filled.checksums[:num_chunks]
    for chunk in {*(gap // size for gap in gaps), num_chunks - 1}:
        chunk_bytes = size * sample_bytes
        filled.checksums[chunk] = zlib.crc32(new.read(IMAGES, chunk * chunk_bytes, chunk_bytes))
    return job


def _write_tables(new: NewFile, job: _Conversion, image_checksums: np.ndarray) -> None:
    listing, order, size = job.listing, job.order, job.layout.chunk_samples
    new.write(f"{GROUP}/checksums/{IMAGES}", image_checksums)
    for name, values in listing.columns.items():
        rows = values[order]
        new.write(name, rows)
        new.write(f"{GROUP}/checksums/{name}", field_checksums(rows, size))
    new.write(f"{GROUP}/source_index", order)
    ends = np.cumsum(listing.names.offsets[order + 1] - listing.names.offsets[order])
    new.write(f"{GROUP}/source_name_ends", ends)
    for start in range(0, len(order), NAMES_AT_A_TIME):
        names = b"".join(listing.names[i] for i in order[start : start + NAMES_AT_A_TIME])
        new.write_bytes(f"{GROUP}/source_names", int(ends[start - 1]) if start else 0, names)
    if listing.class_names:
        new.write(f"{GROUP}/class_names", _class_table(listing.class_names))


def _class_table(class_names: list[str]) -> np.ndarray:
    return np.array([name.encode() for name in class_names], dtype="S")


def _write_skipped(path: Path, skipped: list[tuple[str, str]], overwrite: bool) -> str | None:
    """Write the list of what was left out beside the file; the list of a file that was replaced goes with it."""
    target = path.with_name(path.name + ".skipped.csv")
    try:
        if not skipped:
            if overwrite:
                target.unlink(missing_ok=True)
            return None
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("path", "reason"))
            writer.writerows(skipped)
    except OSError as error:
        raise OutputError(
            f"{printable(target)}: the list of {len(skipped)} skipped images cannot be written: {error.strerror}; "
            f"{printable(path)} itself is complete"
        ) from None
    return printable(target)


def _estimate_s(job: _Conversion) -> float:
    """Seconds that the conversion will take, from decoding a few images spread over the source."""
    source = job.source
    probes = np.unique(np.linspace(0, len(source) - 1, PROBES).astype(np.int64))
    out = np.empty(job.sample_shape, np.uint8)
    started = time.perf_counter()
    with source.session():
        for index in probes:
            try:
                source.read_into(int(index), out)
            except ShapeError:
                raise SourceError(source.disagreement(job.sample_shape)) from None
            except SampleError as error:
                if not job.skip:
                    raise SampleError(f"{source.name(int(index))}: {error}") from None
    return (time.perf_counter() - started) / len(probes) * len(source) / max(1, min(job.num_workers, available_cores()))
