"""Convert a source of any kind into one HDF5 file, or samples into a folder of files."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import OutputError
from h5chunk.plan.duplicates import IN_ORDER
from h5chunk.source import OpenContext
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.open import choose_options, find_kind, open_kind
from h5chunk.sources.options import Options
from h5chunk.sources.recognise import is_path
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.open import opened
from h5chunk.store.write.command_id import has_command_id
from h5chunk.store.write.fill import Filled
from h5chunk.store.write.new_folder import check_folder
from h5chunk.store.write.part_file import check_not_source, check_output, check_room, parse_output
from h5chunk.store.write.samples import SampleJob
from h5chunk.tools.convert.matrix import convert_matrix, naming_memory, plan_matrix
from h5chunk.tools.convert.options import MatrixOptions, SampleOptions
from h5chunk.tools.convert.report import ConvertPlan, ConvertReport
from h5chunk.tools.convert.report_matrix import MatrixPlan, MatrixReport
from h5chunk.tools.convert.resume import Notify, is_complete, left_out, say_nothing
from h5chunk.tools.convert.samples import estimate_s, prepare, write_file
from h5chunk.tools.convert.shards import check_shards, describe, folder_bytes, split_job, write_shards
from h5chunk.tools.convert.skipped import save_skipped, skipped_path
from h5chunk.tools.progress import Progress
from h5chunk.tools.report import COMPLETE


def convert(
    source: Any,
    output: str | os.PathLike[str],
    *,
    format: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    notify: Notify | None = None,
    **options: Any,
) -> ConvertReport | MatrixReport:
    """Convert a source of any kind into one HDF5 file, or samples into a folder of several.

    The file, or folder, appears under its name only when it is complete and on disk. Equal source and options give
    equal bytes, with any number of workers. What was done when it is stopped, by Ctrl-C, a full disk, a sample that
    cannot be used or a signal, is kept in ``.NAME.h5chunk-part`` beside it: the same call continues. A matrix is
    started anew.

    Parameters
    ----------
    source : path or object
        Images: a folder with one folder per class, a flat folder, or either in a .zip or .tar. A sparse matrix: a file
        of (row, column[, value]) lines such as MovieLens' ratings.csv, .npz of scipy, Matrix Market, libsvm, .h5ad,
        10x .h5, or a 10x folder (its cells become the samples). Arrays: .npy, .npz, an array, or a dict of arrays. A
        table: .parquet, or a folder of such files. A data set in Python: any object with a length and samples by
        number, such as those of torchvision and Hugging Face.
    output : path
        The file to make; with ``shards`` or ``shard_bytes``, the folder.
    format : str, optional
        The kind of the source, where its name and first bytes do not tell: see `h5chunk.sources.open.KINDS`.
    overwrite : bool
        Whether to replace a file at ``output``, or a folder that holds nothing but shards.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.
    notify : callable, optional
        Called with a line for people: that an unfinished conversion is continued, or kept.
    **options
        Options of the kind of source: the fields of `h5chunk.sources.images.ImageSourceOptions` and its like. Options
        of the file: the fields of `h5chunk.tools.convert.options.SampleOptions`, or of `MatrixOptions` for a sparse
        matrix. ``h5chunk convert --help`` lists all of them.

    Returns
    -------
    ConvertReport or MatrixReport

    Raises
    ------
    SourceError, SampleError
        The source cannot be used; names the sample and the reason.
    OutputError
        The file cannot be made, or something else than what the same call made stands at ``output``, which is as it
        was.
    OptionError
        An option does not exist, does not apply to the source, or has an invalid value.
    """
    request = _parse(source, format, options)
    path = _check_output(request, output, overwrite)
    if isinstance(request.how, MatrixOptions):
        matrix = _open(request, progress)
        how = request.source_options.given()
        return convert_matrix(matrix, path, request.how, how=how, overwrite=overwrite, progress=progress)
    return _convert_samples(request, path, overwrite, progress, notify or say_nothing)


class _Request(NamedTuple):
    """A source of a known kind, and its options, checked."""

    kind: Any
    source: Any
    source_options: Options
    how: SampleOptions | MatrixOptions


def _parse(source: Any, format: str | None, options: dict[str, Any]) -> _Request:
    kind = find_kind(source, format)
    mine, others = SampleOptions, MatrixOptions
    if issubclass(kind, SparseSource):
        mine, others = others, mine  # type: ignore[assignment]
    return _Request(kind, source, *choose_options(kind, source, options, (kind.Options, mine), others))


def _open(request: _Request, progress: Progress | None) -> Any:
    def report_found(count: int) -> None:
        if progress:
            progress("list", count, None)

    if isinstance(request.how, SampleOptions):
        context = OpenContext(skips_bad_samples=request.how.on_error == "skip", report_found=report_found)
        return open_kind(request.kind, request.source, request.source_options, context)
    memory_bytes = request.how.memory_bytes
    with naming_memory(memory_bytes):
        context = OpenContext(memory_bytes, with_times=request.how.duplicates in IN_ORDER)
        return open_kind(request.kind, request.source, request.source_options, context)


def _is_sharded(request: _Request) -> bool:
    how = request.how
    return isinstance(how, SampleOptions) and (how.shards is not None or how.shard_bytes is not None)


def _check_output(request: _Request, output: str | os.PathLike[str], overwrite: bool) -> Path:
    """Refuse an output that cannot be written, before the source is read."""
    is_folder = _is_sharded(request)
    if isinstance(request.how, SampleOptions):
        check_shards(request.how.shards, request.how.shard_bytes)
    path = parse_output(output, folder=is_folder)
    sources = [request.source] if is_path(request.source) else []
    check_not_source(path, *sources, *request.source_options.paths())
    (check_folder if is_folder else check_output)(path, overwrite=overwrite or has_command_id(path))
    return path


def _convert_samples(
    request: _Request, path: Path, overwrite: bool, progress: Progress | None, notify: Notify
) -> ConvertReport:
    started = time.perf_counter()
    job, shards = _prepare(request, path, progress)
    complete = False
    try:
        if shards:
            files, filled = write_shards(job, shards, overwrite, progress, notify)
        else:
            left, filled = write_file(job, overwrite, progress, notify)
            files = [left]
    except OutputError:
        complete = not overwrite and is_complete(job, len(shards) or 1)
        if not complete:
            raise
        files, filled = _read_back(shards or [job], job)
    skipped = [(job.name(failure.row), failure.reason) for failure in filled.failures]
    if overwrite and not skipped:
        skipped_path(job.path).unlink(missing_ok=True)  # of the file that was replaced
    return ConvertReport(
        path=str(job.path),
        source_kind=request.kind.kind,
        num_samples=sum(len(each.order) for each in files),
        num_bytes=folder_bytes(job.path) if shards else job.path.stat().st_size,
        sample_shape=_main_shape(job),
        fields=[spec.name for spec in job.spec().fields],
        chunk_samples=files[0].layout.chunk_samples,
        seconds=time.perf_counter() - started,
        modes={note: n for note, n in filled.notes.most_common() if note not in _APPLIED},
        applied={note: filled.notes[note] for note in _APPLIED if note in filled.notes},
        skipped=skipped,
        skipped_list=save_skipped(job.path, skipped),
        ignored=list(job.source.ignored),
        class_names=list(job.source.categories.get("labels", [])),
        notes=list(job.source.notes),
        already_complete=complete,
    )


_APPLIED = ("rotated", "resized", "first frame")


def _main_shape(job: SampleJob) -> tuple[int, ...]:
    """The shape of a sample of the largest field."""
    return max(job.source.fields.values(), key=lambda field: field.sample_bytes).shape


def _read_back(files: list[SampleJob], job: SampleJob) -> tuple[list[SampleJob], Filled]:
    """What was written of files that are complete, without what only reading all of their samples could tell."""
    left = []
    for each in files:
        with opened(each.path) as file:
            left.append(each.with_order(file[f"{GROUP}/source_index"][()]))
    kept = np.concatenate([each.order for each in left])
    return left, Filled(failures=left_out(job, kept))


def _prepare(request: _Request, path: Path, progress: Progress | None) -> tuple[SampleJob, list[SampleJob]]:
    """Open the source, and settle the conversion and those of its shards, if it has any."""
    how = request.how
    assert isinstance(how, SampleOptions)
    job = prepare(_open(request, progress), path, how)
    if not _is_sharded(request):
        return job, []
    return job, split_job(job, how.shards, how.shard_bytes, chosen=how.chunk_samples is None)


def plan_convert(
    source: Any,
    output: str | os.PathLike[str],
    *,
    format: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    notify: Notify | None = None,
    **options: Any,
) -> ConvertPlan | MatrixPlan:
    """Predict what `convert` would do with the same arguments; writes nothing.

    Raises
    ------
    As `convert`, as far as a look at the source and at a few samples shows it.
    """
    plan = foresee_convert(source, output, format=format, overwrite=overwrite, progress=progress, **options)
    if isinstance(plan, ConvertPlan):
        check_room(Path(output), plan.num_bytes)
    return plan


def foresee_convert(
    source: Any,
    output: str | os.PathLike[str],
    *,
    format: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> ConvertPlan | MatrixPlan:
    """Predict as `plan_convert` does, whether or not the disk has room for the output."""
    request = _parse(source, format, options)
    path = _check_output(request, output, overwrite)
    if isinstance(request.how, MatrixOptions):
        how = request.source_options.given()
        return plan_matrix(_open(request, progress), path, request.how, how=how, overwrite=overwrite)
    job, shards = _prepare(request, path, progress)
    complete = not overwrite and is_complete(job, len(shards) or 1)
    if not complete:
        (check_folder if shards else check_output)(job.path, overwrite)
    return _plan_samples(job, shards, complete)


def _plan_samples(job: SampleJob, shards: list[SampleJob], complete: bool) -> ConvertPlan:
    specs = [each.spec() for each in shards or [job]]
    layout = job.layout
    if shards:
        first = shards[0].layout
        layout = replace(first, num_samples=len(job.order), reasons=(*first.reasons, describe(shards)))
    source = job.source
    return ConvertPlan(
        num_samples=len(source),
        source_kind=source.kind,
        sample_shape=_main_shape(job),
        shapes={spec.name: tuple(spec.sample_shape) for spec in specs[0].fields},
        layout=layout,
        fields={each.name: str(each.dtype) for each in specs[0].fields},
        num_bytes=sum(spec.num_bytes for spec in specs),
        free_bytes=shutil.disk_usage(job.path.parent).free,
        estimated_s=estimate_s(job),
        num_workers=job.num_workers,
        class_names=list(source.categories.get("labels", [])),
        ignored=list(source.ignored),
        notes=[*source.notes, *([COMPLETE] if complete else [])],
        already_complete=complete,
    )
