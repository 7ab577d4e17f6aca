"""Fill the chunks of a new file from a source, in worker processes.

A task is a range of chunks. A worker reads their samples and writes each chunk with one ``pwrite``, so that no samples
are sent between processes. The result of a task has the checksums of the chunks. A claim is the result of a task of an
earlier run, from a journal. A worker verifies the claim, and writes the chunks again if the verification fails.

`h5chunk.store.write.workers` starts the processes.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import SampleError
from h5chunk.remote.pages import write_at
from h5chunk.sample_source import SampleReader
from h5chunk.store.hdf5.codecs import crc32
from h5chunk.store.write.part_file import writing
from h5chunk.store.write.workers import run_tasks

TASK_SAMPLES = 64  # samples per task; the main process needs about 0.3 ms for a task


class FillField(NamedTuple):
    """A field to fill: the offset of its first chunk in the file, and the shape and dtype of a sample."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass
class FillJob:
    """The part file, the fields to fill, the source, and the order of its samples.

    Each worker receives the job once.
    """

    part: Path
    fields: tuple[FillField, ...]  # the fields that the source reads
    chunk_samples: int
    source: SampleReader
    order: np.ndarray  # (num_samples,) int64: row i of each field is sample ``order[i]`` of the source

    in_order = False  # whether results must be returned in the order of the tasks

    def runner(self, stopped: Callable[[], bool] = lambda: False) -> TaskRunner:
        """Return an object that runs tasks in one process until ``stopped()`` is true."""
        return TaskRunner(self, stopped)

    @property
    def num_chunks(self) -> int:
        return -(-len(self.order) // self.chunk_samples)

    def tasks(self) -> list[range]:
        """Divide the chunks into tasks."""
        step = max(1, TASK_SAMPLES // self.chunk_samples)
        return [range(first, min(first + step, self.num_chunks)) for first in range(0, self.num_chunks, step)]

    def rows(self, chunks: range) -> range:
        """Return the rows in a range of chunks."""
        size = self.chunk_samples
        return range(chunks.start * size, min(chunks.stop * size, len(self.order)))


class Failure(NamedTuple):
    """A sample that could not be read: its row, the reason, and the name of the error's class."""

    row: int
    reason: str
    kind: str


class TaskResult(NamedTuple):
    """The result of a task.

    ``checksums`` has, for each chunk, a list of the CRC-32 of each field. Images of any size have other lists.
    """

    chunks: range
    checksums: list[list[int]]
    notes: Counter[str]  # number of samples for each note of the source
    failures: list[Failure]
    stamp: int  # the stamp of the samples, from `stamp_of_samples`
    is_new: bool = True  # False for a claim, whose chunks an earlier run wrote
    values: tuple[tuple[int, Mapping[str, Any]], ...] = ()  # index of each sample, and its values of columns
    data: bytes = b""  # concatenated images of any size, which the main process writes

    def record(self) -> list[Any]:
        """Return a JSON value that `parse_record` converts to a claim."""
        return [self.chunks.start, self.checksums, dict(self.notes), [list(f) for f in self.failures], self.stamp]


def parse_record(record: Any) -> TaskResult | None:
    """Convert a journal's record to a claim. Returns None if the record is not the result of a task."""
    try:
        first, checksums, notes, failures, stamp = record
        chunks = range(first, first + len(checksums))
        checksums = [[int(checksum) for checksum in chunk] for chunk in checksums]
        failed = [Failure(int(row), str(reason), str(kind)) for row, reason, kind in failures]
        return TaskResult(chunks, checksums, Counter(notes), failed, int(stamp), is_new=False)
    except (TypeError, ValueError):
        return None


@dataclass
class Filled:
    """The combined results of all tasks, which `fill` returns."""

    checksums: dict[str, np.ndarray] = field(default_factory=dict)  # by field: (num_chunks,) uint32
    notes: Counter[str] = field(default_factory=Counter)  # number of samples for each note of the source
    failures: list[Failure] = field(default_factory=list)  # in row order; rows of failures are filled with zeros
    stamp: int = 0  # stamp of all samples at the time of reading

    @classmethod
    def of(cls, job: FillJob) -> Filled:
        """Return the results of no task yet."""
        return cls({each.name: np.zeros(job.num_chunks, np.uint32) for each in job.fields})

    def add(self, done: TaskResult) -> None:
        """Add the result of a task. Results of jobs that are ``in_order`` are added in order."""
        self.notes.update(done.notes)
        self.failures.extend(done.failures)
        self.stamp ^= done.stamp
        for number, checksums in enumerate(self.checksums.values()):
            checksums[done.chunks.start : done.chunks.stop] = [of_fields[number] for of_fields in done.checksums]

    def accept(self, job: FillJob, claims: Mapping[int, TaskResult]) -> Iterator[TaskResult]:
        """Yield the claims of the job's first tasks that no worker needs to verify."""
        yield from ()


def fill(
    job: FillJob,
    num_workers: int,
    stop_at_failure: bool,
    written: Callable[[int], None],
    claims: Mapping[int, TaskResult] | None = None,
    finished: Callable[[TaskResult], None] = lambda done: None,
    filled: Filled | None = None,
) -> Filled:
    """Write all chunks of the job, in ``num_workers`` processes, or in this process if the number is 0.

    ``claims`` maps first chunks to claims. ``finished`` is called with each new result, except for a result with a
    failed sample if ``stop_at_failure`` is set. ``written`` is called with the number of samples written since the last
    call. The results are added to ``filled``, if it is given.
    """
    if filled is None:
        filled = Filled.of(job)
    usable = {first: claim for first, claim in (claims or {}).items() if not (stop_at_failure and claim.failures)}
    results = _results(job, filled, usable, num_workers)
    try:
        for done in results:
            filled.add(done)
            is_end = bool(done.failures) and stop_at_failure
            if done.is_new and not is_end:
                finished(done)
            written(len(job.rows(done.chunks)))
            if is_end:
                break
    finally:
        results.close()
    filled.failures.sort()
    return filled


def _results(job: FillJob, filled: Filled, claims: Mapping[int, TaskResult], num_workers: int) -> Generator[TaskResult]:
    left = job.tasks()
    for claim in filled.accept(job, claims):
        yield claim
        left = left[1:]
    tasks = [(chunks, claims.get(chunks.start)) for chunks in left]
    if not job.in_order:
        tasks.sort(key=lambda task: task[1] is None)
    yield from run_tasks(job, tasks, num_workers)


Task = tuple[range, "TaskResult | None"]


class TaskRunner:
    """A context manager that runs tasks one after another.

    The buffers for one chunk of each field are reused, because allocating new memory would take longer than writing.
    """

    def __init__(self, job: FillJob, stopped: Callable[[], bool] = lambda: False) -> None:
        self._job, self._stopped = job, stopped
        size = job.chunk_samples
        self._samples = {field.name: np.zeros((size, *field.shape), field.dtype) for field in job.fields}
        self._bytes = [samples.reshape(-1).view(np.uint8).reshape(size, -1) for samples in self._samples.values()]
        self._record = self._new_record()  # what a result says about the present chunk, up to the present sample
        self._session = job.source.session()
        self.position = (0, -1)  # how many samples were begun, and the sample that is being read, or -1

    def __enter__(self) -> TaskRunner:
        self._descriptor = os.open(self._job.part, os.O_RDWR | os.O_CLOEXEC)
        self._session.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._session.__exit__(*error)
        os.close(self._descriptor)

    def run(self, chunks: range, claim: TaskResult | None = None) -> TaskResult:
        """Write these chunks of all fields. If the chunks match a claim, return the claim instead."""
        try:
            if claim is not None and self.is_unchanged(chunks, claim) and self._are_written(claim):
                return claim
            return self._run(chunks)
        finally:
            self._begin(-1)

    def _new_record(self) -> list[int]:
        return [0] * max(1, len(self._job.fields))

    def _begin(self, index: int) -> None:
        """Note that a sample is read from now on, or none."""
        self.position = (self.position[0] + 1, index)

    def _run(self, chunks: range) -> TaskResult:
        """Read the samples of these chunks. If the runner is stopped, the result is not used."""
        done, stamp = TaskResult(chunks, [], Counter(), [], 0), 0
        for chunk in chunks:
            rows = self._job.rows(range(chunk, chunk + 1))
            indices = self._job.order[rows.start : rows.stop]
            stamp ^= stamp_of_samples(self._job.source, indices)
            self._record = self._new_record()
            for position, index in enumerate(indices.tolist()):
                if self._stopped():
                    return done
                error = self._read_sample(index, position, done.notes)
                if error is not None:
                    done.failures.append(Failure(rows[position], str(error), type(error).__name__))
            self._finish_chunk(chunk, len(rows))
            done.checksums.append(self._record)
        return done._replace(stamp=stamp)

    def _read_sample(self, index: int, position: int, notes: Counter[str]) -> SampleError | None:
        """Read a sample into row ``position`` of the buffers. If that fails, write zeros and return the error."""
        self._begin(index)
        out = {name: samples[position, ...] for name, samples in self._samples.items()}
        failure = None
        try:
            notes.update(self._job.source.read_into(index, out))
        except SampleError as error:
            for values in out.values():
                values[...] = np.zeros((), values.dtype)
            failure = error
        for number, data in enumerate(self._bytes):  # while the sample is in the CPU's cache
            self._record[number] = zlib.crc32(data[position], self._record[number])
        return failure

    def _finish_chunk(self, chunk: int, num_samples: int) -> None:
        """Write the buffers to a chunk, which has so many samples."""
        with writing(self._job.part):
            for number, (target, data) in enumerate(zip(self._job.fields, self._bytes, strict=True)):
                padding = data[num_samples:]
                padding[...] = 0
                self._record[number] = zlib.crc32(padding.data, self._record[number])
                write_at(self._descriptor, data.data, target.offset + chunk * data.nbytes)

    def is_unchanged(self, chunks: range, claim: TaskResult) -> bool:
        """Return whether the samples of a claim are unchanged, including those that failed."""
        job = self._job
        if claim.chunks != chunks:
            return False
        rows = job.rows(chunks)
        now = stamp_of_samples(job.source, job.order[rows.start : rows.stop])
        return now == claim.stamp and self._still_fail(claim.failures)

    def _still_fail(self, failures: list[Failure]) -> bool:
        """Return whether all failed samples fail again. The cause may have been removed without changing the files."""
        for failure in failures:
            if not 0 <= failure.row < len(self._job.order):
                return False
            error = self._read_sample(int(self._job.order[failure.row]), 0, Counter())
            if error is None or (str(error), type(error).__name__) != failure[1:]:
                return False
        return True

    def _are_written(self, claim: TaskResult) -> bool:
        """Return whether the chunks in the file match the checksums of the claim."""
        for chunk, checksums in zip(claim.chunks, claim.checksums, strict=True):
            if len(checksums) != len(self._bytes):
                return False
            for target, samples, checksum in zip(self._job.fields, self._bytes, checksums, strict=True):
                data = samples.reshape(-1)
                try:
                    length = os.preadv(self._descriptor, [data.data], target.offset + chunk * data.nbytes)
                except OSError:
                    return False
                if length != data.nbytes or crc32(data) != checksum:
                    return False
        return True


def stamp_of_samples(source: SampleReader, indices: np.ndarray) -> int:
    """Return a 64-bit fingerprint of samples in any order from their stamps, or 0 if the source has no stamps."""
    combined = 0
    for index in indices.tolist():
        if stamp := source.stamp(index):
            packed = struct.pack(f"<{len(stamp) + 1}q", index, *stamp)
            combined ^= int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    return combined
