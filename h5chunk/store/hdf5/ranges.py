"""Read byte ranges of a file into many buffers, with one system call per range.

``os.preadv`` needs a Python object per buffer, created under the GIL. Here NumPy makes tables of addresses and lengths,
which are passed to libc's ``preadv``, so that scattering a shuffled batch takes no time in Python.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.native import CUT_SHORT, DONE, GATHER, JOB, READ, SYSTEM, Result, available, plan_reads, run
from h5chunk.remote.mirror import Descriptor
from h5chunk.urls import local_copy_of

RUN_BYTES = 2 << 20  # approximate bytes per system call: longer ranges are cut, so that threads can share them
MAX_VECTORS = 1024  # IOV_MAX of Linux and macOS: buffers of one call
CUT = "the file ends in the middle of its data: it was cut short"
PART_BYTES = 8 << 20  # bytes per task of a thread: smaller tasks would compete for the GIL; scripts/LOG.md

ReadTask = Callable[[int], None]  # a task: called with the descriptor of the file
Ranges = tuple[np.ndarray, np.ndarray]  # offsets and numbers of bytes: (n,) int64 each
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
    """Return a context in which byte ranges of a file can be read: those of a remote object are fetched first."""
    if isinstance(descriptor, Descriptor) and len(offsets):
        return closing(descriptor.mirror.held(offsets, sizes))
    return nullcontext()


class VectorTask:
    """A task that reads runs of bytes of a file, and scatters each run to several buffers.

    ``jobs``, (num_runs,) `h5chunk.native.JOB`, describes the runs; their descriptor is set later. ``vectors``, (n, 2)
    uintp, has the address and length of each buffer. ``out`` owns the memory, and is kept alive.
    """

    def __init__(self, jobs: np.ndarray, vectors: np.ndarray, out: object, where: Where) -> None:
        self._jobs, self._vectors, self._out, self._where = jobs, vectors, out, where

    def __call__(self, descriptor: int) -> None:
        with held(descriptor, *self.ranges):
            self._read(descriptor)

    @property
    def ranges(self) -> Ranges:
        """The byte ranges that the task reads."""
        return self._jobs["offset"], self._jobs["num_bytes"]

    def _read(self, descriptor: int) -> None:
        if available():
            result = run(self.jobs(descriptor))
            if result.status != DONE:
                raise self.error_of(result)
            return
        for source, count, offset, num_bytes in self._runs():
            got = _preadv(descriptor, source, min(count, MAX_VECTORS), offset)
            if got != num_bytes:  # read_bytes gets an error of the system again
                self._read_rest(descriptor, self._buffers(source, count), offset, max(0, got))

    def jobs(self, descriptor: int) -> np.ndarray:
        """Return the jobs for a `h5chunk.native.NativePool`: (num_runs,) JOB."""
        self._jobs["descriptor"] = descriptor
        return self._jobs

    def end(self) -> None:
        """Finish the task after all jobs have succeeded; here there is nothing to do."""

    def error_of(self, result: Result) -> FileError:
        """Return the error for the result of a job of this task that failed."""
        return read_error(self._where(result.offset), result)

    def _runs(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(*(self._jobs[name].tolist() for name in ("source", "count", "offset", "num_bytes")), strict=True)

    def _buffers(self, source: int, count: int) -> list[list[int]]:
        first = (source - self._vectors.ctypes.data) // self._vectors.strides[0]
        buffers: list[list[int]] = self._vectors[first : first + count].tolist()
        return buffers

    def _read_rest(self, descriptor: int, buffers: list[list[int]], offset: int, got: int) -> None:
        """Read the bytes after the first ``got``: preadv may read less than requested, such as after a signal."""
        for address, length in buffers:
            if got < length:
                buffer = (ctypes.c_char * length).from_address(address)
                read_bytes(descriptor, offset + got, memoryview(buffer).cast("B")[got:], self._where)
            offset += length
            got = max(0, got - length)


class RowGather:
    """A task, with the interface of `VectorTask`, that copies rows of a field in memory."""

    def __init__(self, values: np.ndarray, samples: np.ndarray, out: np.ndarray) -> None:
        self._values, self._samples, self._out = values, np.ascontiguousarray(samples), out

    def __call__(self, _descriptor: object) -> None:
        target = self._out.view(self._values.dtype).reshape(len(self._samples), *self._values.shape[1:])
        np.take(self._values, self._samples, axis=0, out=target, mode="clip")  # in another mode NumPy copies twice

    def end(self) -> None:
        """See `VectorTask.end`."""

    def jobs(self, _descriptor: int) -> np.ndarray:
        """See `VectorTask.jobs`: (1,) JOB."""
        job = np.zeros(1, JOB)
        job["kind"], job["count"], job["num_bytes"] = GATHER, len(self._samples), self._out.nbytes
        job["source"], job["indices"] = self._values.ctypes.data, self._samples.ctypes.data
        job["destination"] = self._out.ctypes.data
        return job


def read_error(where: str, result: Result) -> FileError:
    """Return the error for the result of a job that failed to read the data named ``where``."""
    if result.status == SYSTEM:
        return FileError(f"{where}: cannot be read: {os.strerror(result.error)}")
    if result.status == CUT_SHORT:
        return FileError(f"{where}: {CUT}")
    return FileError(f"{where}: closed while it was read")


def vectors_of(sizes: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return the vectors of a `VectorTask`: ``sizes[i]`` bytes at byte ``destinations[i]`` of ``out``; (n, 2) uintp."""
    vectors = np.empty((len(sizes), 2), np.uintp)
    vectors[:, 0], vectors[:, 1] = out.ctypes.data + destinations, sizes
    return vectors


def vector_tasks(
    offsets: np.ndarray, sizes: np.ndarray, destinations: np.ndarray, out: np.ndarray, where: Where
) -> Iterator[VectorTask]:
    """Yield tasks that read ``sizes[i]`` bytes at ``offsets[i]`` of the file to byte ``destinations[i]`` of ``out``.

    The arrays are (n,) int64, with n > 0. Ranges that are adjacent in the file share a system call. There is one task
    for all native threads, or several for Python threads.
    """
    if available():
        yield VectorTask(
            *plan_reads(offsets, 1, 1, np.arange(len(offsets)), sizes, destinations, out, RUN_BYTES), out, where
        )
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
        yield VectorTask(jobs[first : first + per_part], vectors, out, where)


def row_tasks(
    blocks: tuple[np.ndarray, int, int],
    rows: np.ndarray,
    counts: np.ndarray | None,
    destinations: np.ndarray,
    out: np.ndarray,
    where: Where,
) -> Iterator[VectorTask]:
    """Yield tasks that read row ``rows[i]``, or ``counts[i]`` rows from it, to row ``destinations[i]`` of ``out``.

    ``blocks`` describes the file: the offsets of equal blocks of rows, the rows of a block, and the bytes of a row. The
    other arrays are (n,) int64, with n > 0.
    """
    if available():
        yield VectorTask(*plan_reads(*blocks, rows, counts, destinations, out, RUN_BYTES), out, where)
        return
    starts, block_rows, row_bytes = blocks
    offsets = starts[rows // block_rows] + rows % block_rows * row_bytes
    sizes = np.full(len(rows), row_bytes) if counts is None else counts * row_bytes
    yield from vector_tasks(offsets, sizes, destinations * row_bytes, out, where)


def read_jobs(
    vectors: np.ndarray, firsts: np.ndarray, counts: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """Return jobs that read ``sizes[i]`` bytes at ``offsets[i]`` to ``counts[i]`` vectors starting at ``firsts[i]``."""
    jobs = np.zeros(len(firsts), JOB)
    jobs["kind"], jobs["offset"], jobs["count"], jobs["num_bytes"] = READ, offsets, counts, sizes
    jobs["source"] = vectors.ctypes.data + firsts * vectors.strides[0]
    return jobs


def read_bytes(descriptor: int, offset: int, buffer: memoryview, where: Where) -> None:
    """Fill a buffer with the bytes at an offset. Raises FileError if the file ends too early, or cannot be read."""
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
