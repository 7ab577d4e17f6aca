"""Settle how the samples of a source are written, and write them into one file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from h5chunk.errors import SampleError, ShapeError, SourceError
from h5chunk.machine import available_cores
from h5chunk.plan.layout import plan_layout
from h5chunk.plan.permutation import permutation
from h5chunk.source import SampleField, SampleSource
from h5chunk.store.format.spec import GROUP
from h5chunk.store.write.fill import Filled
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.samples import SampleJob, write_samples
from h5chunk.tools.convert.options import SampleOptions
from h5chunk.tools.convert.resume import Notify, TaskLog, command_id, job_key, keeping
from h5chunk.tools.progress import Progress, count_up

PROBES = 24  # samples read to estimate the time
DTYPE_KINDS = "iufS"  # of fields: integers, floats and fixed-length strings


def prepare(source: SampleSource, path: Path, how: SampleOptions) -> SampleJob:
    """Settle layout and order of a new file.

    Parameters
    ----------
    source : SampleSource
    path : Path
        The output; not looked at.
    how : SampleOptions

    Raises
    ------
    SourceError
        The source has no samples, or fields that a file cannot hold.
    """
    check_fields(source)
    largest = max(field.sample_bytes for field in source.fields.values())
    return SampleJob(
        path=path,
        source=source,
        order=permutation(len(source), how.seed) if how.shuffle else np.arange(len(source), dtype=np.int64),
        layout=plan_layout(len(source), largest, how.chunk_samples),
        options={**_default_fields(source), **source.options, "seed": how.seed, "shuffle": how.shuffle},
        columns=source.columns,
        categories=source.categories,
        num_workers=available_cores() if how.workers is None else how.workers,
        skip=how.on_error == "skip",
    )


def _default_fields(source: SampleSource) -> dict[str, list[str]]:
    """Return what the header records of the fields that readers read by default: none for images and their labels."""
    return {} if "images" in source.fields else {"fields": [*source.fields, *source.columns]}


def check_fields(source: SampleSource) -> None:
    """Raise SourceError unless a file can hold the fields and columns of a source."""
    if not len(source) or not source.fields:
        raise SourceError(f"the source has {len(source)} samples of {len(source.fields)} fields: give at least one")
    columns = {name: SampleField(values.shape[1:], values.dtype) for name, values in source.columns.items()}
    for name, field in (*source.fields.items(), *columns.items()):
        if not name or "/" in name or name in (".", GROUP):
            raise SourceError(f"{name!r} cannot be the name of a field: rename it")
        if field.dtype.kind not in DTYPE_KINDS or not field.sample_bytes:
            raise SourceError(
                f"field {name!r} is {field.dtype} of shape {field.shape}: give integers, floats or strings of a fixed "
                "length, and at least one element"
            )
    for name, values in source.columns.items():
        if name in source.fields or values.shape != (len(source),):
            raise SourceError(f"column {name!r} is {values.shape} but there are {len(source)} samples, or is a field")


def count_written(total: int, progress: Progress | None) -> Callable[[int], None]:
    """Return what is told of samples as they are written, and tells how many of all these are."""
    written = count_up("convert", total, progress)
    written(0)
    return written


def write_file(job: SampleJob, overwrite: bool, progress: Progress | None, notify: Notify) -> tuple[SampleJob, Filled]:
    """Write one file and put it in its place, continuing what was done of it before.

    Returns
    -------
    SampleJob
        With the samples that were not skipped.
    Filled
    """
    new = NewFile(job.path, overwrite)
    with keeping(new, job, notify), new:
        new.journal.open(job_key(job, 1))
        log = TaskLog(new.journal, [job], notify)
        written, filled = write_samples(
            new, job, claims=log.claims(0), finished=log.adder(0), written=count_written(len(job.order), progress)
        )
        log.finish()
        new.command_id = command_id(job, 1, filled.stamp)
        new.commit()
    return written, filled


def estimate_s(job: SampleJob) -> float:
    """Return the seconds that writing will take, from reading a few samples spread over the source."""
    source, out = job.source, job.sample_buffers()
    probes = np.unique(np.linspace(0, len(source) - 1, PROBES).astype(np.int64))
    started = time.perf_counter()
    with source.session():
        for index in probes.tolist():
            try:
                source.read_into(index, out)
            except ShapeError:
                raise SourceError(source.disagreement()) from None
            except SampleError as error:
                if not job.skip:
                    raise SampleError(f"{source.name(index)}: {error}") from None
    return (time.perf_counter() - started) / len(probes) * len(source) / max(1, min(job.num_workers, available_cores()))
