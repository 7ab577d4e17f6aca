"""Read byte ranges of a file into many buffers, with one system call per range.

``os.preadv`` needs a Python object per buffer. This module instead builds tables of addresses and lengths with NumPy,
and passes them to the ``preadv`` of libc.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import FileError, closed, printable
from h5chunk.native import (
    CUT_SHORT,
    DONE,
    GATHER,
    JOB,
    READ,
    ROWS,
    SYSTEM,
    NativeTasks,
    Result,
    available,
    run,
)
from h5chunk.remote.mirror import Descriptor
from h5chunk.urls import local_copy_of

RUN_BYTES = 2 << 20  # approximate bytes per system call; longer ranges are cut, so that threads can share them
MAX_VECTORS = 1024  # IOV_MAX of Linux and macOS: maximum number of buffers per call
NO_BYTES = np.empty(0, np.uint8)
CUT = "the file ends in the middle of its data, so it was cut short"
PART_BYTES = 8 << 20  # bytes per task of a Python thread; smaller tasks would compete for the GIL (scripts/LOG.md)

ReadTask = Callable[[Any], None]  # a task: called with the open files, `h5chunk.store.read.open_files.OpenFiles`
Ranges = tuple[np.ndarray, np.ndarray]  # offsets and sizes in bytes: (n,) int64 each
Where = Callable[[int], str]  # returns the text that names the data at an offset of the file, for messages

_preadv = ctypes.CDLL(None).preadv
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_preadv.restype = ctypes.c_ssize_t


def open_descriptor(path: Path) -> int:
    """Open a file for reading, and return the descriptor. Raises FileError if that fails."""
    try:
        if (mirror := local_copy_of(path)) is not None:
            return mirror.open_descriptor()
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(f"{printable(path)}: cannot be opened: {error.strerror}") from None


def held(descriptor: int, offsets: np.ndarray, sizes: np.ndarray) -> AbstractContextManager[object]:
    """Return a context in which byte ranges of a file can be read. Ranges of a remote object are fetched first."""
    if isinstance(descriptor, Descriptor) and len(offsets):
        return closing(descriptor.mirror.held(offsets, sizes))
    return nullcontext()


class _Rows(ctypes.Structure):
    kept: tuple[Any, ...] = ()  # the arrays that the pointers refer to
    _fields_ = (
        ("blocks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_rows", "row_bytes")),
        *((name, ctypes.c_void_p) for name in ("rows", "counts", "destinations", "out")),
    )

    @property
    def ranges(self) -> Ranges:
        """The byte ranges of all rows in the file."""
        blocks, rows, counts, *_ = self.kept
        offsets = blocks[rows // self.block_rows] + rows % self.block_rows * self.row_bytes
        return offsets, np.full(len(rows), self.row_bytes) if counts is None else counts * self.row_bytes


class OneFile:
    """A single open file, which tasks are called with instead of the files of a data set."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def descriptor(self, _number: int) -> int:
        """Return the descriptor of the file."""
        return self._descriptor

    def mapped(self, _number: int) -> tuple[int, int]:
        """Return zeros, because the file is not mapped."""
        return 0, 0

    def opened(self, _number: int) -> AbstractContextManager[int]:
        """Return the descriptor of the file in a context."""
        return nullcontext(self._descriptor)

    def check(self, _number: int) -> None:
        """Do nothing, because the caller checks that the file is unchanged."""


class VectorTask:
    """A task that reads runs of bytes of a file, and scatters each run to several buffers.

    ``jobs``, (n,) `h5chunk.native.JOB`, describes the runs. Their file descriptor is set when the task runs. Without
    native threads there is one job for each run, and ``vectors``, (n, 2) uintp, has the address and length of each
    buffer. The task keeps ``vectors`` and ``out``, which owns the buffers, alive.
    """

    def __init__(self, jobs: np.ndarray, vectors: Any, out: object, where: Where, file: int = 0) -> None:
        self._jobs, self.vectors, self._out, self._where = jobs, vectors, out, where
        self.file = file

    def __call__(self, files: Any) -> None:
        with files.opened(self.file) as descriptor:
            if isinstance(descriptor, Descriptor):
                with held(descriptor, *self._ranges):
                    self._read(int(descriptor))
            else:
                self._read(descriptor)
        files.check(self.file)

    @property
    def _ranges(self) -> Ranges:
        if isinstance(self.vectors, _Rows):
            return self.vectors.ranges
        return self._jobs["offset"], self._jobs["num_bytes"]

    @property
    def ranges(self) -> Iterator[tuple[int, Ranges]]:
        """The byte ranges that the task reads, by number of the file."""
        yield self.file, self._ranges

    def _read(self, descriptor: int) -> None:
        if available():
            self._jobs["descriptor"] = descriptor
            result = run(self._jobs)
            if result.status != DONE:
                raise self.error_of(result)
            return
        for source, count, offset, num_bytes in self._runs():
            got = _preadv(descriptor, source, min(count, MAX_VECTORS), offset)
            if got != num_bytes:  # after an error of the system, read_bytes raises it
                self._read_rest(descriptor, self._buffers(source, count), offset, max(0, got))

    def jobs(self, files: Any) -> np.ndarray:
        """Return the jobs of the task for a `h5chunk.native.NativePool`: (n,) JOB."""
        self._jobs["descriptor"] = files.descriptor(self.file)
        self._jobs["map"], self._jobs["mapped_bytes"] = files.mapped(self.file)
        return self._jobs

    def aim(self, jobs: np.ndarray, window: Any, out: np.ndarray) -> Any:
        """Let a copy of the jobs, made by `row_tasks` for single rows, read those of a window. Return what it needs."""
        table = _Rows.from_buffer_copy(self.vectors)
        table.rows, table.destinations = (each.ctypes.data for each in (window.rows, window.destinations))
        table.out = out.ctypes.data
        jobs["source"] = ctypes.addressof(table)
        return table

    def end(self) -> None:
        """Do nothing, because no work remains after the jobs have succeeded."""

    def error_of(self, result: Result) -> FileError:
        return read_error(self._where(result.offset), result)

    def _runs(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(*(self._jobs[name].tolist() for name in ("source", "count", "offset", "num_bytes")), strict=True)

    def _buffers(self, source: int, count: int) -> list[list[int]]:
        first = (source - self.vectors.ctypes.data) // self.vectors.strides[0]
        buffers: list[list[int]] = self.vectors[first : first + count].tolist()
        return buffers

    def _read_rest(self, descriptor: int, buffers: list[list[int]], offset: int, got: int) -> None:
        """Read the bytes after the first ``got`` bytes, after preadv read less than requested."""
        for address, length in buffers:
            if got < length:
                buffer = (ctypes.c_char * length).from_address(address)
                read_bytes(descriptor, offset + got, memoryview(buffer).cast("B")[got:], self._where)
            offset += length
            got = max(0, got - length)


class RowGather:
    """A task that copies rows of a field in memory. It has the interface of `VectorTask`."""

    def __init__(self, values: np.ndarray, samples: np.ndarray, out: np.ndarray) -> None:
        self._values, self._samples, self._out = values, np.ascontiguousarray(samples), out

    file = None  # nothing is read from a file
    ranges = ()

    def aim(self, jobs: np.ndarray, window: Any, out: np.ndarray) -> None:
        """Let a copy of the job copy the rows of a window."""
        jobs["indices"], jobs["destination"] = window.samples.ctypes.data, out.ctypes.data

    def __call__(self, _files: object) -> None:
        target = self._out.view(self._values.dtype).reshape(len(self._samples), *self._values.shape[1:])
        np.take(self._values, self._samples, axis=0, out=target, mode="clip")  # in other modes NumPy copies twice

    def end(self) -> None:
        """Do nothing, because no work remains after the job has succeeded."""

    def jobs(self, _files: object) -> np.ndarray:
        """Return the job of the task: (1,) JOB."""
        job = np.zeros(1, JOB)
        job["kind"], job["count"] = GATHER, len(self._samples)
        job["num_bytes"] = len(self._samples) * self._values[:1].nbytes
        job["source"], job["indices"] = self._values.ctypes.data, self._samples.ctypes.data
        job["destination"] = self._out.ctypes.data
        return job


def native_tasks(tasks: Sequence[Any], files: Any) -> tuple[NativeTasks | None, list[ReadTask]]:
    """Divide tasks into those for native threads and those for Python threads.

    The first result is None if there are no tasks for native threads.
    """
    native = [task for task in tasks if hasattr(task, "jobs")]
    others = [task for task in tasks if not hasattr(task, "jobs")]
    return NativeTasks(native, files) if native else None, others


def read_error(where: str, result: Result) -> FileError:
    """Return the error for the result of a job that failed to read the data that ``where`` names."""
    if result.status == SYSTEM:
        return FileError(f"{where}: cannot be read: {os.strerror(result.error)}")
    if result.status == CUT_SHORT:
        return FileError(f"{where}: {CUT}")
    return closed(where)


def vectors_of(sizes: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return the vectors of a `VectorTask`, (n, 2) uintp: ``sizes[i]`` bytes at byte ``destinations[i]`` of ``out``."""
    vectors = np.empty((len(sizes), 2), np.uintp)
    vectors[:, 0], vectors[:, 1] = out.ctypes.data + destinations, sizes
    return vectors


@functools.lru_cache(16)
def _equal_jobs(num_rows: int, row_bytes: int, most_bytes: int) -> np.ndarray:
    job_rows = max(1, most_bytes // max(1, row_bytes))
    return _jobs_of(np.append(np.arange(0, num_rows, job_rows), num_rows), np.arange(1, num_rows + 1) * row_bytes)


def _jobs_of(cuts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    jobs = np.zeros(len(cuts) - 1, JOB)
    jobs["kind"], jobs["offset"], jobs["count"] = ROWS, cuts[:-1], np.diff(cuts)
    jobs["num_bytes"] = np.diff(ends[cuts[1:] - 1], prepend=0)
    return jobs


def vector_tasks(
    offsets: np.ndarray, sizes: np.ndarray, destinations: np.ndarray, out: np.ndarray, where: Where, file: int = 0
) -> Iterator[VectorTask]:
    """Yield tasks that read ``sizes[i]`` bytes at ``offsets[i]`` of the file to byte ``destinations[i]`` of ``out``.

    The arrays are (n,) int64, with n > 0. Adjacent ranges share a system call. Native threads get a single task.
    """
    if available():
        yield from row_tasks((offsets, 1, 1), np.arange(len(offsets)), sizes, destinations, out, where, file)
        return
    vectors = vectors_of(sizes, destinations, out)
    groups = (np.cumsum(sizes) - 1) // RUN_BYTES
    apart = (offsets[1:] != offsets[:-1] + sizes[:-1]) | (groups[1:] != groups[:-1])
    apart[MAX_VECTORS - 1 :: MAX_VECTORS] = True
    firsts = np.append(0, np.flatnonzero(apart) + 1)
    counts = np.diff(np.append(firsts, len(sizes)))
    jobs = read_jobs(vectors, firsts, counts, offsets[firsts], np.add.reduceat(sizes, firsts))
    per_part = max(1, PART_BYTES * len(jobs) // max(1, int(sizes.sum())))
    for first in range(0, len(jobs), per_part):
        yield VectorTask(jobs[first : first + per_part], vectors, out, where, file)


def row_tasks(
    blocks: tuple[np.ndarray, int, int],
    rows: np.ndarray,
    counts: np.ndarray | None,
    destinations: np.ndarray,
    out: np.ndarray,
    where: Where,
    file: int = 0,
) -> Iterator[VectorTask]:
    """Yield tasks that read row ``rows[i]`` of a file to row ``destinations[i]`` of ``out``.

    With ``counts``, ``rows[i]`` is the first of ``counts[i]`` rows to read. ``blocks`` has the offsets of the file's
    blocks, the number of rows in each block, and the bytes per row. The other arrays are (n,) int64, with n > 0. Native
    threads get a single task, whose jobs read about `RUN_BYTES` each.
    """
    starts, block_rows, row_bytes = blocks
    if not available():
        offsets = starts[rows // block_rows] + rows % block_rows * row_bytes
        sizes = np.full(len(rows), row_bytes) if counts is None else counts * row_bytes
        yield from vector_tasks(offsets, sizes, destinations * row_bytes, out, where, file)
        return
    tables = (starts, rows, counts, destinations)
    arrays = [None if table is None else np.ascontiguousarray(table, np.int64) for table in tables]
    block, row, count, destination = (None if array is None else array.ctypes.data for array in arrays)
    table = _Rows(block, block_rows, row_bytes, row, count, destination, out.ctypes.data)
    table.kept = (*arrays, out)
    if counts is None:
        jobs = _equal_jobs(len(rows), row_bytes, RUN_BYTES).copy()
    else:
        ends = np.cumsum(counts) * row_bytes
        parts = np.arange(RUN_BYTES, max(1, int(ends[-1])), RUN_BYTES)
        jobs = _jobs_of(np.unique(np.concatenate([[0], np.searchsorted(ends, parts), [len(rows)]])), ends)
    jobs["source"] = ctypes.addressof(table)
    yield VectorTask(jobs, table, out, where, file)


def read_jobs(
    vectors: np.ndarray, firsts: np.ndarray, counts: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """Return jobs that read ``sizes[i]`` bytes at ``offsets[i]`` to ``counts[i]`` vectors starting at ``firsts[i]``."""
    jobs = np.zeros(len(firsts), JOB)
    jobs["kind"], jobs["offset"], jobs["count"], jobs["num_bytes"] = READ, offsets, counts, sizes
    jobs["source"] = vectors.ctypes.data + firsts * vectors.strides[0]
    return jobs


def read_bytes(descriptor: int, offset: int, buffer: memoryview, where: Where) -> None:
    """Fill a buffer with the bytes at an offset. Raises FileError if the file ends too early or cannot be read."""
    if isinstance(descriptor, Descriptor):
        with held(descriptor, np.array([offset]), np.array([len(buffer)])):
            read_bytes(int(descriptor), offset, buffer, where)
        return
    done = 0
    while done < len(buffer):
        try:
            more = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise FileError(f"{where(offset + done)}: cannot be read: {error.strerror or error}") from error
        if not more:
            raise FileError(f"{where(offset + done)}: {CUT}")
        done += more
