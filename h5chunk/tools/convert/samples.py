"""Plan the fields, order, layout and shards in which samples are written, and recognise earlier work."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

import h5chunk
from h5chunk.errors import (
    OptionError,
    SampleError,
    ShapeError,
    SourceError,
    as_text,
    count_text,
    human_bytes,
    printable,
)
from h5chunk.machine import available_cores
from h5chunk.plan.layout import Layout, plan_layout
from h5chunk.plan.permutation import permutation
from h5chunk.sample_source import OpenContext, SampleField, SampleSource
from h5chunk.sources.samples import PADDING
from h5chunk.store.format.spec import GROUP, HEADER_BYTES
from h5chunk.store.read.files import shard_name
from h5chunk.store.write.fill import Failure, stamp_of_samples
from h5chunk.store.write.journal import has_command_id, is_made_by, key_of
from h5chunk.store.write.samples import SampleJob
from h5chunk.tools.convert.options import MAX_SHARDS, SampleOptions
from h5chunk.tools.progress import Progress

PROBES = 24  # samples read to estimate the time
SPLIT = "split"  # field with the split of each sample
SPLIT_NAME = re.compile(r"\w[\w .-]*")
MAX_SPLITS = 100
DTYPE_KINDS = "iufS"  # kinds of NumPy dtypes that a field may have: integers, floats, fixed-length strings
KEY_FACTS = {"h5chunk": h5chunk.__version__, "journal": 2}  # part of the key of every journal


def open_context(options: SampleOptions, path: Path, progress: Progress | None) -> OpenContext:
    """Return the context for opening a source of samples, which are written to ``path``."""
    report = progress or (lambda stage, done, total: None)
    return OpenContext(
        memory_bytes=options.memory_bytes,
        temporary_folder=path.absolute().parent,
        skips_bad_samples=options.on_error == "skip",
        report_found=lambda count: report("list", count, None),
    )


def prepare(source: SampleSource, path: Path, options: SampleOptions) -> SampleJob:
    """Choose the layout and order of a new file. Raises SourceError if a file cannot contain the source's fields."""
    check_fields(source)
    if options.split_files:
        source.read_columns()
    largest = max(field.sample_bytes for field in source.fields.values())
    # Readers load images and labels by default; other default fields are recorded.
    fields = {} if "images" in source.fields else {"fields": [*source.fields, *source.columns]}
    return SampleJob(
        path=path,
        source=source,
        order=permutation(len(source), options.seed) if options.shuffle else np.arange(len(source), dtype=np.int64),
        layout=plan_layout(len(source), largest, options.chunk_samples),
        options={**fields, **source.options, "seed": options.seed, "shuffle": options.shuffle, **options.recorded()},
        columns=source.columns,
        categories=source.categories,
        num_workers=available_cores() if options.workers is None else options.workers,
        skip=options.on_error == "skip",
    )


def check_fields(source: SampleSource) -> None:
    """Raise SourceError unless a file can contain the fields and columns of the source."""
    if not len(source) or not source.fields:
        raise SourceError(
            f"the source has {len(source)} samples and {len(source.fields)} fields: use a source with at least one of "
            "each"
        )
    columns = {name: SampleField(values.shape[1:], values.dtype) for name, values in source.columns.items()}
    for name, field in (*source.fields.items(), *columns.items()):
        if not name or "/" in name or name in (".", GROUP):
            raise SourceError(
                f"{name!r} cannot be the name of a field, because it is empty, reserved, or contains a slash: rename it"
            )
        if field.dtype.kind not in DTYPE_KINDS or not field.sample_bytes:
            raise SourceError(
                f"field {name!r} has type {field.dtype} and shape {field.shape}: use integers, floats or strings of a "
                f"fixed length, with at least one element; {PADDING}"
            )
    for name, values in source.columns.items():
        if name in source.fields or values.shape != (len(source),):
            raise SourceError(
                f"column {name!r} has shape {values.shape} for {len(source)} samples, or has the name of a field: use "
                "one value per sample, and a unique name"
            )


def estimate_s(job: SampleJob) -> float:
    """Estimate the time to write the file, in seconds, by reading a few samples."""
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


# ---- the shards of a folder


def split_job(job: SampleJob, write_options: SampleOptions) -> list[SampleJob]:
    """Divide a job into one job per output file; return an empty list if the output is a single file.

    Shards get equal numbers of complete chunks if possible. If there are fewer chunks than shards, chunks become
    smaller, unless their size was requested. Raises OptionError if there are still fewer chunks than shards, or if a
    chunk exceeds ``shard_bytes``.
    """
    if not write_options.is_sharded:
        return []
    if write_options.split_files:
        return _files_of_splits(job)
    layout, shards = job.layout, write_options.shards
    if shards is not None and write_options.chunk_samples is None and layout.num_chunks < shards <= layout.num_samples:
        smaller = plan_layout(layout.num_samples, layout.sample_bytes, layout.num_samples // shards)
        samples = count_text(smaller.chunk_samples, "sample")
        layout = replace(smaller, reasons=(f"{samples} per chunk, so that each shard has a chunk",))
    if write_options.shard_bytes is not None:
        shards = _num_shards(job, layout, write_options.shard_bytes)
    assert shards is not None
    jobs, starts = [], shard_starts(layout.num_samples, layout.chunk_samples, shards)
    for number, (first, last) in enumerate(pairwise(starts)):
        name = shard_name(job.path.name.removesuffix(".h5"), number, shards)
        options = {**job.options, "shard": number, "shards": shards}
        shard = replace(job, path=job.path / name, layout=layout, options=options)
        jobs.append(shard.with_order(job.order[first:last]))
    return jobs


def shard_starts(num_samples: int, chunk_samples: int, shards: int) -> list[int]:
    """Return the index of the first sample of each shard, then the number of samples. Shards get complete chunks.

    >>> shard_starts(99, 4, 3)
    [0, 36, 68, 99]
    """
    num_chunks = -(-num_samples // chunk_samples)
    if num_chunks < shards:
        raise OptionError(
            f"shards is {shards}, but the data has only {count_text(num_chunks, 'chunk')} of "
            f"{count_text(chunk_samples, 'sample')}: use fewer shards, or fewer samples per chunk"
        )
    size, more = divmod(num_chunks, shards)
    return [min((size * n + min(n, more)) * chunk_samples, num_samples) for n in range(shards + 1)]


def _files_of_splits(job: SampleJob) -> list[SampleJob]:
    """Divide a job into one job per value of the field ``split``. The values become the file names."""
    splits = job.columns.get(SPLIT)
    if splits is None:
        raise OptionError(
            "split_files (--split-files) requires a field 'split', which the source lacks: put samples into folders "
            "such as train/ and val/, or add a column of that name"
        )
    jobs: list[SampleJob] = []
    for split in np.unique(splits):
        name = as_text(split) if isinstance(split, bytes) else str(split)
        name = job.categories[SPLIT][int(split)] if SPLIT in job.categories else name
        if not SPLIT_NAME.fullmatch(name) or len(jobs) == MAX_SPLITS:
            problem = "a value that cannot name a file" if len(jobs) < MAX_SPLITS else f"more than {MAX_SPLITS} values"
            raise OptionError(
                f"split_files (--split-files) makes a file for each value of the field 'split', but the field has "
                f"{problem}, such as {printable(name)}: rename or merge values"
            )
        of_split = replace(job, path=job.path / f"{name}.h5")
        jobs.append(of_split.with_order(job.order[splits[job.order] == split]))
    return jobs


def folder_layout(jobs: list[SampleJob]) -> Layout:
    """Return the combined layout of all shards; its last reason describes the number and size of the files."""
    first, num_samples = jobs[0], sum(len(job.order) for job in jobs)
    size = human_bytes(first.spec().num_bytes)
    samples = count_text(max(len(job.order) for job in jobs), "sample")
    reason = f"{count_text(len(jobs), 'file')} of up to {samples}, such as {first.path.name} of {size}"
    return replace(first.layout, num_samples=num_samples, reasons=(*first.layout.reasons, reason))


def _num_shards(job: SampleJob, layout: Layout, shard_bytes: int) -> int:
    """Return the smallest number of shards such that no shard exceeds ``shard_bytes``."""
    sample_bytes = (job.spec().num_bytes - HEADER_BYTES) / layout.num_samples  # includes all fields and tables
    chunk_bytes = int(sample_bytes * layout.chunk_samples) + 1
    per_shard = (shard_bytes - HEADER_BYTES) // chunk_bytes
    if per_shard < 1:
        samples = count_text(layout.chunk_samples, "sample")
        raise OptionError(
            f"shard_bytes is {shard_bytes}, but a file with one chunk of {samples} needs "
            f"{chunk_bytes + HEADER_BYTES} bytes: raise shard_bytes, or use fewer samples per chunk"
        )
    shards = -(-layout.num_chunks // per_shard)
    if shards > MAX_SHARDS:
        raise OptionError(
            f"shard_bytes is {shard_bytes}, which makes {shards} shards, but the limit is {MAX_SHARDS}: raise "
            "shard_bytes"
        )
    return shards


# ---- recognising earlier work


def job_key(job: SampleJob, num_files: int) -> str | None:
    """Return a hash of everything that determines the bytes of new chunks, except the samples.

    Returns None if the source has no identity, so that earlier work cannot be reused.
    """
    identity = job.source.identity()
    if identity is None:
        return None
    facts, blobs = identity
    fields = [(name, field.form or field.shape, str(field.dtype)) for name, field in job.fields.items()]
    written = {"fields": fields, "chunk_samples": job.layout.chunk_samples, "files": num_files}
    written |= {name: job.options[name] for name in ("seed", "shuffle", "split_files") if name in job.options}
    return key_of({**KEY_FACTS, "kind": job.source.kind, **facts, **written}, blobs)


def command_id(job: SampleJob, num_files: int, stamp: int) -> str | None:
    """Return a hash that is equal for commands that write the same file; None if the source has no identity.

    ``stamp`` is the combined stamp of all samples: see `h5chunk.store.write.fill.stamp_of_samples`.
    """
    key = job_key(job, num_files)
    if key is None:
        return None
    columns, categories = job.columns, job.categories
    facts = {"key": key, "options": dict(job.options), "skip": job.skip, "stamp": stamp}
    facts |= {"categories": dict(categories), "columns": {name: str(columns[name].dtype) for name in columns}}
    return key_of(facts, (values.tobytes() for values in columns.values()))


def is_complete(job: SampleJob, num_files: int) -> bool:
    """Return whether the output exists and this command wrote it from the samples in their present state."""
    if not has_command_id(job.path):
        return False
    command = command_id(job, num_files, stamp_of_samples(job.source, job.order))
    return command is not None and is_made_by(job.path, command)


def find_skipped(job: SampleJob, numbers: np.ndarray) -> list[Failure]:
    """Read the samples of the job whose indices are not in ``numbers``, and return why each of them was skipped."""
    failures = []
    out = job.sample_buffers()
    with job.source.session():
        for row in np.flatnonzero(~np.isin(job.order, numbers)).tolist():
            reason = "was unusable when it was converted, but is usable now"
            try:
                job.source.read_into(int(job.order[row]), out)
            except SampleError as error:
                reason = str(error)
            failures.append(Failure(row, reason, SampleError.__name__))
    return failures
