"""Pack a folder, an archive or a manifest of images, or a sparse matrix, into one HDF5 file or a folder of shards."""

from __future__ import annotations

import inspect
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import OutputError
from h5chunk.sources.decode import MAX_PIXELS
from h5chunk.store.format import GROUP, opened
from h5chunk.store.write.command_id import has_command_id
from h5chunk.store.write.fill import Filled
from h5chunk.store.write.newfile import NewFile
from h5chunk.store.write.newfolder import check_folder
from h5chunk.store.write.partfile import check_output, check_room, parse_output
from h5chunk.tools.convert.images import Conversion, count_written, estimate_s, prepare, write_images
from h5chunk.tools.convert.report import ConvertPlan, ConvertReport
from h5chunk.tools.convert.report_sparse import SparsePlan, SparseReport
from h5chunk.tools.convert.resume import Notify, TaskLog, say_nothing, telling
from h5chunk.tools.convert.shards import check_shards, describe, folder_bytes, split_conversion, write_shards
from h5chunk.tools.convert.skipped import save_skipped, skipped_path
from h5chunk.tools.convert.sparse import MEMORY_BYTES, convert_sparse, plan_sparse
from h5chunk.tools.convert.sparse_options import SPARSE_ONLY, is_sparse, sparse_arguments
from h5chunk.tools.progress import Progress
from h5chunk.tools.report import COMPLETE


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    manifest: str | os.PathLike[str] | None = None,
    split_folders: str = "auto",
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
    duplicates: str = "auto",
    transpose: bool = False,
    dense: bool = False,
    filter: str = "gzip",
    memory_bytes: int = MEMORY_BYTES,
    shards: int | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    notify: Notify | None = None,
) -> ConvertReport | SparseReport:
    """Pack images, or a sparse matrix, into one HDF5 file, or images into a folder of several.

    The file, or folder, appears under its name only when it is complete and on disk. Equal source and options give
    equal bytes, with any number of workers. What was done when it is stopped, by Ctrl-C, a full disk, an image that
    cannot be used or a signal, is kept in ``.NAME.h5chunk-part`` beside it: the same call continues.

    Parameters
    ----------
    source : path
        A folder with one folder per class, a flat folder, or either in a .zip or .tar; or a sparse matrix: a file of
        (row, column[, value]) lines such as MovieLens' ratings.csv, .npz of scipy, Matrix Market, libsvm, .h5ad,
        10x .h5, a 10x folder (its cells become the samples), or a dense .npy.
    path : path
        The file to make; with ``shards`` or ``shard_bytes``, the folder.
    manifest : path, optional
        A .csv with a path column, relative to ``source``, and columns that become fields.
    split_folders : {"auto", "yes", "no"}
        Whether the top folders are splits, such as ``train`` and ``val``: then classes are the folders in those, and
        the field ``split`` says which split each sample is of. ``auto``: they are if all are called like splits; where
        only some are, it is an error.
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
        Names or numbers (from 0) of the columns of a delimited file that are row, column and, if there are more, value
        and time.
    scale : float, optional
        Values are stored as value * scale, which must be whole numbers from 0 to 255; without, the smallest of 1, 2,
        4, 5, 8, 10, 16, 20, 100 that makes them so. Duplicate entries are combined before anything else.
    clip : bool
        Whether values below 0 become 0, and those above 255, or above 255 / ``scale`` if that is given, become that.
    binarize : float, optional
        Values of at least this become 1, all others are dropped.
    min_row_count, min_column_count : int
        Leave out first columns, then rows, of fewer entries than this; once. Rows without entries are kept if the
        source has them by number, and if this is 0.
    duplicates : {"auto", "error", "sum", "last", "first", "max", "mean"}
        What counts where several entries of the source share a row and a column. ``last`` and ``first`` go by the
        column of times of a delimited file, if it has one, and else by the order in the source; a ``mean`` without an
        exact code is an error. ``auto`` is ``error`` for ratings (delimited files) and libsvm, else ``sum``.
    transpose : bool
        Make the columns of the source the samples. Fields of rows (``obs``, labels) are left out then.
    dense : bool
        Pack dense rows instead.
    filter : {"gzip", "none"}
        Of their chunks.
    memory_bytes : int
        About the most memory to take; what does not fit waits on disk, beside ``path``. The output does not depend on
        it. A source whose rows and columns alone take more is refused before that memory is taken.
    shards : int, optional
        Of images: make so many files ``PATH/NAME-00000-of-00012.h5``, each complete by itself, with samples that were
        shuffled over all of them. `h5chunk.ChunkDataset` reads the folder as one.
    shard_bytes : int, optional
        The same, in as few files as there can be of at most so many bytes, about.
    overwrite : bool
        Whether to replace a file at ``path``, or a folder in which there are shards alone.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.
    notify : callable, optional
        Called with a line for people: that an unfinished conversion of images is continued, or kept.

    Returns
    -------
    ConvertReport or SparseReport

    Raises
    ------
    SourceError, SampleError
        The source cannot be used, with the image and the reason.
    OutputError
        The file cannot be made, or something else than what the same call made stands at ``path``, which is as it was.
    OptionError
        An argument cannot be.
    """
    given = dict(locals())
    if is_sparse(source, given, convert):
        return convert_sparse(source, path, **sparse_arguments(given), progress=progress)
    return _convert_images(**_of_images(given), notify=notify or say_nothing)


def _of_images(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in (*SPARSE_ONLY, "notify")}


def _convert_images(*, overwrite: bool, progress: Progress | None, notify: Notify, **options: Any) -> ConvertReport:
    started = time.perf_counter()
    job, shards = _prepare(overwrite=overwrite, progress=progress, **options)
    complete = False
    try:
        if shards:
            files, filled = write_shards(job, shards, overwrite, progress, notify)
        else:
            left, filled = _write_file(job, overwrite, progress, notify)
            files = [left]
    except OutputError:
        complete = not overwrite and job.is_complete(len(shards) or 1)
        if not complete:
            raise
        files, filled = _read_back(shards or [job], job)
    skipped = [(job.source.name(int(job.order[f.row])), f.reason) for f in filled.failures]
    if overwrite and not skipped:
        skipped_path(job.path).unlink(missing_ok=True)  # of the file that was replaced
    return ConvertReport(
        path=str(job.path),
        num_samples=sum(len(each.order) for each in files),
        num_bytes=folder_bytes(job.path) if shards else job.path.stat().st_size,
        sample_shape=job.sample_shape,
        chunk_samples=files[0].layout.chunk_samples,
        seconds=time.perf_counter() - started,
        modes={note: n for note, n in filled.notes.most_common() if note not in _APPLIED},
        applied={note: filled.notes[note] for note in _APPLIED if note in filled.notes},
        skipped=skipped,
        skipped_list=save_skipped(job.path, skipped),
        ignored=job.listing.ignored,
        class_names=job.listing.class_names,
        notes=job.listing.notes,
        already_complete=complete,
    )


def _write_file(
    job: Conversion, overwrite: bool, progress: Progress | None, notify: Notify
) -> tuple[Conversion, Filled]:
    new = NewFile(job.path, overwrite)
    with telling(new, notify), new:
        new.journal.open(job.key(1))
        log = TaskLog(new.journal, [(len(job.order), job.layout.chunk_samples)], notify)
        result = write_images(new, job, count_written(len(job.order), progress), log)
        log.finish()
        new.command_id = job.command_id(1, result[1].stamp)
        new.commit()
    return result


def _read_back(files: list[Conversion], job: Conversion) -> tuple[list[Conversion], Filled]:
    """What was written of files that are complete, without what only decoding all of their images could tell."""
    left = []
    for each in files:
        with opened(each.path) as file:
            order = file[f"{GROUP}/source_index"][()]
        size = min(each.layout.chunk_samples, len(order))
        left.append(replace(each, order=order, layout=replace(each.layout, num_samples=len(order), chunk_samples=size)))
    kept = np.concatenate([each.order for each in left])
    return left, Filled(np.empty(0, np.uint32), failures=job.left_out(kept))


_APPLIED = ("rotated", "resized", "first frame")


def _prepare(
    *,
    path: str | os.PathLike[str],
    shards: int | None,
    shard_bytes: int | None,
    overwrite: bool,
    **options: Any,
) -> tuple[Conversion, list[Conversion]]:
    """The conversion, and those of its shards if it is to have any."""
    check_shards(shards, shard_bytes)
    is_sharded = shards is not None or shard_bytes is not None
    path = parse_output(path, folder=is_sharded)
    check = partial(check_folder if is_sharded else check_output, overwrite=overwrite or has_command_id(path))
    job = prepare(path=path, check=check, **options)
    if not is_sharded:
        return job, []
    return job, split_conversion(job, shards, shard_bytes, chosen=options["chunk_samples"] is None)


def plan_convert(
    source: str | os.PathLike[str], path: str | os.PathLike[str], **options: Any
) -> ConvertPlan | SparsePlan:
    """What `convert` would do with the same arguments; writes nothing.

    Raises
    ------
    As `convert`, as far as a look at the source and at a few images shows it.
    """
    plan = foresee_convert(source, path, **options)
    if isinstance(plan, ConvertPlan):
        check_room(Path(path), plan.num_bytes)
    return plan


def foresee_convert(
    source: str | os.PathLike[str], path: str | os.PathLike[str], **options: Any
) -> ConvertPlan | SparsePlan:
    """As `plan_convert`, whether or not the disk has room for it."""
    call = inspect.signature(convert).bind(source, path, **options)
    call.apply_defaults()
    given = call.arguments
    if is_sparse(source, given, convert):
        return plan_sparse(source, path, **sparse_arguments(given))
    job, shards = _prepare(**_of_images(given))
    complete = not given["overwrite"] and job.is_complete(len(shards) or 1)
    if not complete:
        (check_folder if shards else check_output)(job.path, given["overwrite"])
    specs = [each.spec() for each in shards or [job]]
    num_bytes = sum(spec.num_bytes for spec in specs)
    layout = job.layout
    if shards:
        first = shards[0].layout
        layout = replace(first, num_samples=len(job.order), reasons=(*first.reasons, describe(shards)))
    return ConvertPlan(
        num_samples=len(job.source),
        sample_shape=job.sample_shape,
        layout=layout,
        fields={each.name: str(each.dtype) for each in specs[0].fields},
        num_bytes=num_bytes,
        free_bytes=shutil.disk_usage(job.path.parent).free,
        estimated_s=estimate_s(job),
        num_workers=job.num_workers,
        class_names=job.listing.class_names,
        ignored=job.listing.ignored,
        notes=[*job.listing.notes, *([COMPLETE] if complete else [])],
        already_complete=complete,
    )
