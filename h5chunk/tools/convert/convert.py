"""Convert a source of any kind into one HDF5 file, or samples into a folder of files."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import OutputError
from h5chunk.source import OpenContext
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.open import choose_options, find_kind, open_kind
from h5chunk.sources.recognise import is_path
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.open import opened
from h5chunk.store.write.fill import Filled
from h5chunk.store.write.journal import has_command_id
from h5chunk.store.write.output import check_folder
from h5chunk.store.write.part_file import check_not_source, check_output, check_room, parse_output
from h5chunk.store.write.samples import SampleJob
from h5chunk.tools.convert.matrix import convert_matrix, naming_memory, plan_matrix
from h5chunk.tools.convert.options import IN_ORDER, MatrixOptions, SampleOptions
from h5chunk.tools.convert.report import ConvertPlan, ConvertReport, MatrixPlan, MatrixReport
from h5chunk.tools.convert.samples import (
    Notify,
    estimate_s,
    folder_layout,
    is_complete,
    left_out,
    open_context,
    prepare,
    save_skipped,
    say_nothing,
    skipped_path,
    split_job,
    write_file,
    write_shards,
)
from h5chunk.tools.progress import Progress
from h5chunk.tools.report import COMPLETE

APPLIED = ("rotated", "resized", "first frame")  # what is counted of images, besides their modes


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
    """Convert a source of any kind into one HDF5 file, or samples into a folder of several files.

    The file, or folder, appears under its name only when it is complete and on disk. Equal source and options give
    equal bytes, with any number of workers. If a conversion is stopped, by Ctrl-C, a full disk, an unusable sample or a
    signal, its work is kept in ``.NAME.h5chunk-part`` beside the output: the same call continues. The conversion of a
    matrix starts over.

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
        The kind of the source, if its name and first bytes do not show it: see `h5chunk.sources.kinds.KINDS`.
    overwrite : bool
        Whether to replace a file at ``output``, or a folder that holds nothing but shards.
    progress : callable, optional
        Called as ``progress(stage, done, total)``.
    notify : callable, optional
        Called with a line of text: an unfinished conversion is continued, or kept.
    **options
        Options of the kind of source: the fields of classes such as `h5chunk.sources.kinds.ImageSourceOptions`. Options
        of the file: the fields of `h5chunk.tools.convert.options.SampleOptions`, or of `MatrixOptions` for a sparse
        matrix. ``h5chunk convert --help`` lists all of them.

    Returns
    -------
    ConvertReport or MatrixReport

    Raises
    ------
    SourceError, SampleError
        The source cannot be used; the message names the sample and the reason.
    OutputError
        The file cannot be made, or ``output`` exists and was not made by the same call; it is unchanged.
    OptionError
        An option does not exist, does not apply to the source, or has an invalid value.
    """
    started = time.perf_counter()
    opened, path, how, given = _open(source, output, format, overwrite, options, progress)
    if isinstance(how, MatrixOptions):
        return convert_matrix(opened, path, how, how=given, overwrite=overwrite, progress=progress)
    job = prepare(opened, path, how)
    return _convert_samples(job, split_job(job, how), overwrite, progress, notify or say_nothing, started)


def _open(
    source: Any,
    output: str | os.PathLike[str],
    format: str | None,
    overwrite: bool,
    options: dict[str, Any],
    progress: Progress | None,
) -> tuple[Any, Path, SampleOptions | MatrixOptions, dict[str, Any]]:
    """Check all options, refuse an output that cannot be written, and open the source.

    Returns the source, the path of the output, the options for writing it, and the options given to the source.
    """
    kind = find_kind(source, format)
    groups = (MatrixOptions, SampleOptions) if issubclass(kind, SparseSource) else (SampleOptions, MatrixOptions)
    source_options, how = choose_options(kind, source, options, (kind.Options, groups[0]), groups[1])
    is_folder = isinstance(how, SampleOptions) and how.is_sharded
    path = parse_output(output, folder=is_folder)
    check_not_source(path, *([source] if is_path(source) else []), *source_options.paths())
    (check_folder if is_folder else check_output)(path, overwrite=overwrite or has_command_id(path))
    if isinstance(how, SampleOptions):
        opened = open_kind(kind, source, source_options, open_context(how, progress))
    else:
        with naming_memory(how.memory_bytes):
            context = OpenContext(how.memory_bytes, with_times=how.duplicates in IN_ORDER)
            opened = open_kind(kind, source, source_options, context)
    return opened, path, how, source_options.given()


def _convert_samples(
    job: SampleJob, shards: list[SampleJob], overwrite: bool, progress: Progress | None, notify: Notify, started: float
) -> ConvertReport:
    complete = False
    try:
        if shards:
            files, filled = write_shards(job, shards, overwrite, progress, notify)
        else:
            written, filled = write_file(job, overwrite, progress, notify)
            files = [written]
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
        source_kind=job.source.kind,
        num_samples=sum(len(file.order) for file in files),
        num_bytes=sum(file.path.stat().st_size for file in shards or [job]),
        sample_shape=next(iter(job.fields.values())).shape,
        fields=job.field_names,
        chunk_samples=files[0].layout.chunk_samples,
        seconds=time.perf_counter() - started,
        modes={note: n for note, n in filled.notes.most_common() if note not in APPLIED},
        applied={note: filled.notes[note] for note in APPLIED if note in filled.notes},
        skipped=skipped,
        skipped_list=save_skipped(job.path, skipped),
        ignored=list(job.source.ignored),
        class_names=list(job.source.categories.get("labels", [])),
        notes=list(job.source.notes),
        already_complete=complete,
    )


def _read_back(files: list[SampleJob], job: SampleJob) -> tuple[list[SampleJob], Filled]:
    """Report on files that are already complete, except facts that would require reading all samples."""
    written = []
    for each in files:
        with opened(each.path) as file:
            written.append(each.with_order(file[f"{GROUP}/source_index"][()]))
    kept = np.concatenate([each.order for each in written])
    return written, Filled(failures=left_out(job, kept))


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
    """Predict what `convert` would do with the same arguments, without writing.

    Raises
    ------
    As `convert`, as far as the source and a few of its samples show.
    """
    source, path, how, given = _open(source, output, format, overwrite, options, progress)
    if isinstance(how, MatrixOptions):
        return plan_matrix(source, path, how, how=given, overwrite=overwrite)
    job = prepare(source, path, how)
    shards = split_job(job, how)
    specs = [shard.spec() for shard in shards or [job]]
    num_bytes = sum(spec.num_bytes for spec in specs)
    complete = not overwrite and is_complete(job, len(shards) or 1)
    if not complete:
        (check_folder if shards else check_output)(job.path, overwrite)
        check_room(job.path, num_bytes)
    fields = {spec.name: spec for spec in specs[0].fields}
    names = job.field_names
    return ConvertPlan(
        num_samples=len(source),
        source_kind=source.kind,
        sample_shape=next(iter(job.fields.values())).shape,
        shapes={name: tuple(fields[name].sample_shape) for name in names},
        layout=folder_layout(shards) if shards else job.layout,
        fields={name: str(fields[name].dtype) for name in names},
        num_bytes=num_bytes,
        free_bytes=shutil.disk_usage(job.path.parent).free,
        estimated_s=estimate_s(job),
        num_workers=job.num_workers,
        class_names=list(source.categories.get("labels", [])),
        ignored=list(source.ignored),
        notes=[*source.notes, *([COMPLETE] if complete else [])],
        already_complete=complete,
    )
