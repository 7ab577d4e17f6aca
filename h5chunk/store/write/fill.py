"""Fill the chunks of a new file from a source, in worker processes.

Workers take runs of chunks, read samples from a source, and write each chunk with one ``pwrite``: pixels are never sent
between processes. A worker returns checksums, and notes that are counted. The bytes of a chunk do not depend on the
worker. Workers first check the chunks that a journal claims to be written.

On Linux workers are forked, which is fast and needs no guard in the caller's main module: they run Pillow, NumPy and
zlib in one thread, and take no lock that a thread of the parent may hold. Elsewhere fork is not safe, and the caller's
main module needs the same guard as for torch's DataLoader.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import struct
import sys
import tempfile
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import SampleError, WorkerError
from h5chunk.source import SampleReader
from h5chunk.store.hdf5.codecs import crc32
from h5chunk.store.write.part_file import write_at, writing

START_METHOD = "fork" if sys.platform == "linux" else "spawn"
TASK_SAMPLES = 64  # samples per task, which costs the main process about 0.3 ms
TASKS_AHEAD = 3  # tasks that wait for each worker
GO_ON, STOP, LEAVE = 0, 1, 2  # commands to workers
LEAVE_S = 1.0  # to stop reading; values above it: to exit at once
LOOK_S = 0.5

Written = Callable[[int], None]  # called with the number of samples written since the last call


class FillField(NamedTuple):
    """A field to fill: where its first chunk starts in the file, and the shape and dtype of a sample."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass
class FillJob:
    """The fields to fill, the source and the file. The job is sent to each worker once."""

    part: Path
    fields: tuple[FillField, ...]  # the fields that the source reads
    chunk_samples: int
    source: SampleReader
    order: np.ndarray  # (num_samples,) int64: row i of each field is sample ``order[i]`` of the source

    @property
    def num_chunks(self) -> int:
        return -(-len(self.order) // self.chunk_samples)

    def tasks(self) -> list[range]:
        """Return the chunks of each task."""
        step = max(1, TASK_SAMPLES // self.chunk_samples)
        return [range(first, min(first + step, self.num_chunks)) for first in range(0, self.num_chunks, step)]

    def rows(self, chunks: range) -> range:
        """Return the rows of some chunks."""
        size = self.chunk_samples
        return range(chunks.start * size, min(chunks.stop * size, len(self.order)))


class Failure(NamedTuple):
    """A sample that could not be read: its row, the reason, and the name of the error's class."""

    row: int
    reason: str
    kind: str


class Done(NamedTuple):
    """The result of a task.

    ``checksums`` has a list of the fields' CRC-32 for each chunk; fewer lists than ``chunks`` if the task was stopped.
    """

    chunks: range
    checksums: list[list[int]]
    notes: Counter[str]  # what the source noted of its samples
    failures: list[Failure]
    stamp: int  # stamp of its samples, see `stamp_of_samples`
    is_new: bool = True  # False: all chunks had been written before

    def record(self) -> list[Any]:
        """Return a record for a journal."""
        return [self.chunks.start, self.checksums, dict(self.notes), [list(f) for f in self.failures], self.stamp]


def parse_record(record: Any) -> Done | None:
    """Return the finished task that a journal's record claims; None if it is not such a record."""
    try:
        first, checksums, notes, failures, stamp = record
        chunks = range(first, first + len(checksums))
        checksums = [[int(checksum) for checksum in chunk] for chunk in checksums]
        failed = [Failure(int(row), str(reason), str(kind)) for row, reason, kind in failures]
        return Done(chunks, checksums, Counter(notes), failed, int(stamp), is_new=False)
    except (TypeError, ValueError):
        return None


@dataclass
class Filled:
    """Result of `fill`."""

    checksums: dict[str, np.ndarray] = field(default_factory=dict)  # checksums of each field's chunks
    notes: Counter[str] = field(default_factory=Counter)  # what the source noted of its samples
    failures: list[Failure] = field(default_factory=list)  # in row order; their rows are zeros
    stamp: int = 0  # stamp of all samples at the time of reading


def fill(
    job: FillJob,
    num_workers: int,
    stop_at_failure: bool,
    written: Written,
    claims: Mapping[int, Done] | None = None,
    finished: Callable[[Done], None] = lambda done: None,
) -> Filled:
    """Write all chunks of the job, in ``num_workers`` processes, or with 0 in this process.

    Tasks in ``claims``, by their first chunks, are not repeated if the claim holds. ``finished`` is called with each
    task that was done now, unless the failure of a sample stops the job.
    """
    filled = Filled()
    checksums = np.zeros((len(job.fields), job.num_chunks), np.uint32)
    claims = claims or {}
    claimed = {first: claim for first, claim in claims.items() if not (stop_at_failure and claim.failures)}
    tasks = [(chunks, claimed.get(chunks.start)) for chunks in job.tasks()]
    tasks.sort(key=lambda task: task[1] is None)
    results = _in_this_process(job, tasks) if num_workers == 0 else _in_workers(job, tasks, num_workers)
    try:
        for done in results:
            for chunk, of_fields in zip(done.chunks, done.checksums, strict=False):
                checksums[:, chunk] = of_fields
            filled.notes.update(done.notes)
            filled.failures.extend(done.failures)
            filled.stamp ^= done.stamp
            is_end = bool(done.failures) and stop_at_failure
            if done.is_new and not is_end:
                finished(done)
            written(len(job.rows(done.chunks)))
            if is_end:
                break
    finally:
        results.close()
    filled.failures.sort()
    filled.checksums = {each.name: of_field for each, of_field in zip(job.fields, checksums, strict=True)}
    return filled


_Task = tuple[range, "Done | None"]


def _in_this_process(job: FillJob, tasks: list[_Task]) -> Generator[Done]:
    with _TaskRunner(job) as runner:
        for task in tasks:
            yield runner.run(*task)


def _in_workers(job: FillJob, tasks: list[_Task], num_workers: int) -> Generator[Done]:
    context = multiprocessing.get_context(START_METHOD)
    try:
        told = context.RawValue("b", GO_ON)  # without a lock, which a killed worker could hold
        pool = ProcessPoolExecutor(
            min(num_workers, len(tasks)), mp_context=context, initializer=_start_worker, initargs=(job, told)
        )
    except OSError as error:
        raise WorkerError(
            f"no worker can be started: {error.strerror}: check the space in /dev/shm and {tempfile.gettempdir()}, or "
            "use --workers 0"
        ) from None
    waiting: set[Future[Done]] = set()
    left = iter(tasks)
    try:
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # warnings about forks of processes with threads
                for task in left:
                    waiting.add(pool.submit(_run_task, *task))
                    if len(waiting) >= TASKS_AHEAD * num_workers:
                        break
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise WorkerError(
            "a worker process died (killed, or out of memory?): the output is "
            "unchanged; run it again, with fewer workers if memory is short"
        ) from None
    finally:
        told.value = STOP  # after an error or Ctrl-C, do not finish the tasks that were started
        timer = threading.Timer(LEAVE_S, lambda: setattr(told, "value", LEAVE))
        timer.start()
        pool.shutdown(wait=True, cancel_futures=True)
        timer.cancel()


_runner: _TaskRunner


def _start_worker(job: FillJob, told: Any) -> None:
    global _runner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, which stops this one
    threading.Thread(target=_leave_in_time, args=(told,), daemon=True).start()
    _runner = _TaskRunner(job, lambda: told.value != GO_ON)
    _runner.__enter__()  # until this process exits


def _leave_in_time(told: Any) -> None:
    """Exit with the parent, or on command: a killed process could hold a lock that others wait for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        while told.value != LEAVE and not multiprocessing.connection.wait([parent.sentinel], LOOK_S):
            pass
        os._exit(1)


def _run_task(chunks: range, claim: Done | None) -> Done:
    return _runner.run(chunks, claim)


class _ChunkBuffer:
    """A reused buffer for one chunk of a field: allocating new memory would cost more than writing."""

    def __init__(self, field: FillField, chunk_samples: int) -> None:
        self._start = field.offset
        shape = (chunk_samples, *field.shape)
        self.samples = np.zeros(shape, field.dtype)
        self.data = self.samples.reshape(-1).view(np.uint8).reshape(chunk_samples, -1)

    def offset(self, chunk: int) -> int:
        """Return the offset of a chunk in the file."""
        return self._start + chunk * self.data.nbytes


class _TaskRunner:
    """Runs tasks, one after the other. Context manager."""

    def __init__(self, job: FillJob, stopped: Callable[[], bool] = lambda: False) -> None:
        self._job = job
        self._stopped = stopped
        self._buffers = {field.name: _ChunkBuffer(field, job.chunk_samples) for field in job.fields}
        self._session = job.source.session()

    def __enter__(self) -> _TaskRunner:
        self._descriptor = os.open(self._job.part, os.O_RDWR | os.O_CLOEXEC)
        self._session.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._session.__exit__(*error)
        os.close(self._descriptor)

    def run(self, chunks: range, claim: Done | None = None) -> Done:
        """Write some chunks of all fields, unless a claim that they are written holds."""
        if claim is not None and self._holds(chunks, claim):
            return claim
        done = Done(chunks, [], Counter(), [], 0)
        for chunk in chunks:
            stamp = self._read_chunk(chunk, done)
            if stamp is None:
                return done
            done = done._replace(stamp=done.stamp ^ stamp)
            with writing(self._job.part):
                for buffer in self._buffers.values():
                    write_at(self._descriptor, buffer.data.data, buffer.offset(chunk))
        return done

    def _read_chunk(self, chunk: int, done: Done) -> int | None:
        """Read the samples of a chunk into the buffers; return their stamp, or None if the task was stopped."""
        rows = self._job.rows(range(chunk, chunk + 1))
        buffers = list(self._buffers.values())
        checksums, stamp = [0] * len(buffers), 0
        for place, row in enumerate(rows):
            if self._stopped():
                return None
            index = int(self._job.order[row])
            stamp ^= stamp_of_sample(self._job.source, index)
            failure = self._read_sample(index, place, done.notes)
            if failure is not None:
                done.failures.append(Failure(row, str(failure), type(failure).__name__))
            for number, buffer in enumerate(buffers):  # while the sample is in the processor's cache
                checksums[number] = zlib.crc32(buffer.data[place], checksums[number])
        for number, buffer in enumerate(buffers):
            padding = buffer.data[len(rows) :]
            if len(padding):
                padding[...] = 0
                checksums[number] = zlib.crc32(padding.data, checksums[number])
        done.checksums.append(checksums)
        return stamp

    def _read_sample(self, index: int, place: int, notes: Counter[str]) -> SampleError | None:
        """Read a sample into the buffers; on failure, fill its place with zeros."""
        out = {name: buffer.samples[place, ...] for name, buffer in self._buffers.items()}
        try:
            notes.update(self._job.source.read_into(index, out))
        except SampleError as error:
            for values in out.values():
                values[...] = np.zeros((), values.dtype)
            return error
        return None

    def _holds(self, chunks: range, claim: Done) -> bool:
        """Whether the source is unchanged, failures included, and the chunks have the checksums of the claim."""
        job = self._job
        if claim.chunks != chunks:
            return False
        rows = job.rows(chunks)
        now = stamp_of_samples(job.source, job.order[rows.start : rows.stop])
        return now == claim.stamp and self._still_fail(claim.failures) and self._are_written(claim)

    def _still_fail(self, failures: list[Failure]) -> bool:
        """Whether samples that failed fail again: the cause may be gone without a change to their files."""
        for failure in failures:
            if not 0 <= failure.row < len(self._job.order):
                return False
            error = self._read_sample(int(self._job.order[failure.row]), 0, Counter())
            if error is None or (str(error), type(error).__name__) != failure[1:]:
                return False
        return True

    def _are_written(self, claim: Done) -> bool:
        """Whether the chunks have the checksums that the claim states."""
        for chunk, checksums in zip(claim.chunks, claim.checksums, strict=True):
            if len(checksums) != len(self._buffers):
                return False
            for buffer, checksum in zip(self._buffers.values(), checksums, strict=True):
                data = buffer.data.reshape(-1)
                try:
                    length = os.preadv(self._descriptor, [data.data], buffer.offset(chunk))
                except OSError:
                    return False
                if length != data.nbytes or crc32(data) != checksum:
                    return False
        return True


def stamp_of_sample(source: SampleReader, index: int) -> int:
    """Return a number of 64 bits that changes when a sample may have changed; 0 for one that never does."""
    stamp = source.stamp(index)
    if not stamp:
        return 0
    packed = struct.pack(f"<{len(stamp) + 1}q", index, *stamp)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def stamp_of_samples(source: SampleReader, indices: np.ndarray) -> int:
    """Return the current stamp of several samples: the stamps of all, combined by exclusive or, in any order."""
    stamp = 0
    for index in indices.tolist():
        stamp ^= stamp_of_sample(source, index)
    return stamp
