"""Worker processes that write samples into a new file, whole chunks in place.

Workers take runs of chunks, get the samples from a source, and write each chunk with one ``pwrite``: pixels never
pass between processes. What comes back for a chunk is its checksum and what to count. Which worker writes a chunk
does not change its bytes.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from h5chunk.errors import OutputError, SampleError, WorkerError, printable
from h5chunk.store.newfile import write_at

TASK_SAMPLES = 64  # samples a worker takes at a time: a task costs the main process about 0.3 ms
TASKS_AHEAD = 3  # waiting for each worker

Written = Callable[[int], None]  # told how many samples were written since the last call


class Source(Protocol):
    """What can be written: samples by number."""

    def session(self) -> AbstractContextManager[None]: ...
    def read_into(self, index: int, out: np.ndarray) -> Sequence[str]: ...


@dataclass
class FillJob:
    """What to write where. Travels to the workers once.

    Attributes
    ----------
    part : Path
        The file.
    offset : int
        Of the field's first chunk.
    sample_shape : tuple of int
    chunk_samples : int
    source : Source
        Gives uint8 samples.
    order : (num_samples,) int64
        Row i of the field is sample ``order[i]`` of the source.
    """

    part: Path
    offset: int
    sample_shape: tuple[int, ...]
    chunk_samples: int
    source: Source
    order: np.ndarray

    @property
    def num_chunks(self) -> int:
        return -(-len(self.order) // self.chunk_samples)

    def new_buffer(self) -> np.ndarray:
        """Memory of one chunk."""
        return np.zeros((self.chunk_samples, *self.sample_shape), np.uint8)


class Failure(NamedTuple):
    """A sample that could not be had: its row, the reason, and the name of the error's class."""

    row: int
    reason: str
    kind: str


@dataclass
class Filled:
    """What came of it.

    Attributes
    ----------
    checksums : (num_chunks,) uint32
    notes : Counter
        What the source noted of its samples.
    failures : list of Failure
        In row order; their rows hold zeros.
    """

    checksums: np.ndarray
    notes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


class _Part(NamedTuple):
    first_chunk: int
    checksums: list[int]
    notes: Counter[str]
    failures: list[Failure]


def write_chunks(
    job: FillJob,
    descriptor: int,
    buffer: np.ndarray,
    first: int,
    last: int,
    stopped: Callable[[], bool] = lambda: False,
) -> _Part:
    """Write chunks ``first`` to ``last`` (excluded), unless told that nobody wants them any more.

    ``buffer`` is one chunk, (chunk_samples, *sample_shape) uint8, used again and again: new memory would cost more
    than writing does.
    """
    part = _Part(first, [], Counter(), [])
    for chunk in range(first, last):
        start = chunk * job.chunk_samples
        rows = range(start, min(start + job.chunk_samples, len(job.order)))
        buffer[len(rows) :] = 0
        checksum = 0
        for row in rows:
            if stopped():
                return part
            out = buffer[row - start]
            try:
                part.notes.update(job.source.read_into(int(job.order[row]), out))
            except SampleError as error:
                out[...] = 0
                part.failures.append(Failure(row, str(error), type(error).__name__))
            checksum = zlib.crc32(out.data, checksum)  # while it is in the processor's cache
        part.checksums.append(zlib.crc32(buffer[len(rows) :].data, checksum))
        try:
            write_at(descriptor, buffer.data, job.offset + start * buffer[0].nbytes)
        except OSError as error:
            raise OutputError(f"{printable(job.part)}: cannot be written: {error.strerror}") from None
    return part


def fill(job: FillJob, num_workers: int, stop_at_failure: bool, written: Written) -> Filled:
    """Write all chunks of the job.

    Parameters
    ----------
    job : FillJob
    num_workers : int
        Processes; 0 to write in this one.
    stop_at_failure : bool
        Return as soon as a sample failed.
    written : callable

    Raises
    ------
    WorkerError
        A worker died.
    OutputError
        A chunk could not be written.
    """
    filled = Filled(np.zeros(job.num_chunks, np.uint32))
    step = max(1, TASK_SAMPLES // job.chunk_samples)
    tasks = [(first, min(first + step, job.num_chunks)) for first in range(0, job.num_chunks, step)]
    parts = _in_this_process(job, tasks) if num_workers == 0 else _in_workers(job, tasks, num_workers)
    try:
        for part in parts:
            last = part.first_chunk + len(part.checksums)
            filled.checksums[part.first_chunk : last] = part.checksums
            filled.notes.update(part.notes)
            filled.failures.extend(part.failures)
            written(min(last * job.chunk_samples, len(job.order)) - part.first_chunk * job.chunk_samples)
            if part.failures and stop_at_failure:
                break
    finally:
        parts.close()
    filled.failures.sort()
    return filled


def _in_this_process(job: FillJob, tasks: list[tuple[int, int]]) -> Generator[_Part]:
    descriptor = os.open(job.part, os.O_WRONLY | os.O_CLOEXEC)
    try:
        buffer = job.new_buffer()
        with job.source.session():
            for first, last in tasks:
                yield write_chunks(job, descriptor, buffer, first, last)
    finally:
        os.close(descriptor)


def _in_workers(job: FillJob, tasks: list[tuple[int, int]], num_workers: int) -> Generator[_Part]:
    context = multiprocessing.get_context(_start_method())
    stop = context.RawValue("b", 0)  # no lock: a worker that is killed must not hold one
    pool = ProcessPoolExecutor(
        min(num_workers, len(tasks)), mp_context=context, initializer=_start_worker, initargs=(job, stop)
    )
    waiting: set[Future[_Part]] = set()
    left = iter(tasks)
    try:
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
                for first, last in left:
                    waiting.add(pool.submit(_run_task, first, last))
                    if len(waiting) >= TASKS_AHEAD * num_workers:
                        break
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise WorkerError(
            "a worker process died (killed, or out of memory?): the output was left as it was; "
            "run it again, with fewer workers if memory was short"
        ) from None
    finally:
        stop.value = 1  # after an error or Ctrl-C, do not finish the tasks that were started
        pool.shutdown(wait=True, cancel_futures=True)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_method() -> str:
    """How workers are started: by fork on Linux, at once and without a guard in the caller's main module.

    They run Pillow, NumPy and zlib in one thread, and take no lock that a thread of the parent may hold. Elsewhere
    fork is not safe, and the caller's main module needs the guard that torch's DataLoader needs as well.
    """
    return "fork" if sys.platform == "linux" else "spawn"


_job: FillJob
_descriptor: int
_buffer: np.ndarray
_session: AbstractContextManager[None]
_stop: Any


def _start_worker(job: FillJob, stop: Any) -> None:
    global _job, _descriptor, _buffer, _session, _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, which stops us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _job, _descriptor = job, os.open(job.part, os.O_WRONLY | os.O_CLOEXEC)
    _buffer, _stop = job.new_buffer(), stop
    _session = job.source.session()  # in force for the life of this process
    _session.__enter__()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _run_task(first: int, last: int) -> _Part:
    return write_chunks(_job, _descriptor, _buffer, first, last, lambda: bool(_stop.value))
