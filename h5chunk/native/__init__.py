"""Call the C library, which reads and decodes parts of files, gathers rows and makes rows dense without the GIL.

`pip install` builds the library if there is a C compiler. If it is missing, or with ``H5CHUNK_NATIVE=0``, `available`
is False, and callers use Python threads and NumPy.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 20  # version of the functions and structures in C
PART_BYTES = 2 << 20  # approximate bytes of the jobs that a thread takes at a time
JOB = np.dtype(
    [
        ("kind", np.int32),
        ("descriptor", np.int32),
        ("offset", np.int64),
        ("count", np.int64),
        ("num_bytes", np.int64),
        ("source", np.uintp),
        ("indices", np.uintp),
        ("destination", np.uintp),
        ("expected", np.uint32),
        ("is_checked", np.uint32),
        ("map", np.uintp),
        ("mapped_bytes", np.int64),
    ]
)
BLOCK = np.dtype(  # a stored block that a job decodes; core.c describes its fields
    [
        *((name, np.int64) for name in ("offset", "stored_bytes", "num_bytes", "mask", "pipeline", "first", "end")),
        *((name, np.uintp) for name in ("shape", "target", "state")),
    ]
)
EMPTY, FILLING, FULL = range(3)  # states of the memory for a block that several jobs share
READ, VERIFY, GATHER, ROWS, BLOCKS = range(5)  # kinds of jobs; core.c describes their fields
WINDOW_NUMBERS = ("samples", "rows", "destinations")  # arrays of a window that native threads read
# statuses of a ticket; a ticket is the id under which jobs were submitted
DONE, SYSTEM, CUT_SHORT, CHECKSUM, CANCELLED, CHANGED, NOT_SENT, DAMAGED = range(8)
_abandoned: list[Any] = []  # jobs and memory that hanging threads may still use


class Result(ctypes.Structure):
    """The result of the jobs of a ticket."""

    ticket: int
    status: int  # DONE, SYSTEM, ...
    error: int  # the errno for SYSTEM; the actual checksum, as int32, for CHECKSUM; CUDA's error for NOT_SENT
    job: int  # index of the job that failed first
    offset: int  # offset in the file at which that job failed
    _fields_ = (
        ("ticket", ctypes.c_uint64),
        ("status", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("job", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


class Ending(ctypes.Structure):
    """Work that is done after all jobs of a ticket have succeeded, by the native thread that ran the last job.

    If ``path`` is given, the thread compares the stamp of that file. If it is not the one in the fields, the status is
    CHANGED. If ``send`` is given, the thread then calls it with ``argument``. If that fails, the status is NOT_SENT.
    """

    _fields_ = (
        ("send", ctypes.c_void_p),
        ("argument", ctypes.c_void_p),
        ("path", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("device", "inode", "size", "modified_ns")),
    )


class Buffer(ctypes.Structure):
    """Memory that several tickets fill one after another, in the order in which they are submitted.

    A ticket begins once the previous one has ended and the C function ``is_free``, called with the address ``last``,
    returns a value other than 0. ``last`` is the ``argument`` of the previous ticket's ending, or 0.
    """

    last: int
    _fields_ = (("is_free", ctypes.c_void_p), ("last", ctypes.c_void_p), ("is_taken", ctypes.c_int64))


class Blocks(ctypes.Structure):
    """Blocks that jobs decode, (n,) BLOCK, with their ``pipelines``, (m,) `h5chunk.native.filters.PIPELINE`.

    Their ``parts`` are copied to elements of ``out``, (k, *shape) of items, as `BoxCopies` describes.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("blocks", "pipelines", "parts")),
        *((name, ctypes.c_int64) for name in ("axes", "item_bytes")),
        *((name, ctypes.c_void_p) for name in ("out", "out_shape")),
    )

    def __init__(self, blocks: np.ndarray, pipelines: np.ndarray, parts: np.ndarray, out: np.ndarray) -> None:
        shape = np.array(out.shape[1:], np.int64)
        self.kept = blocks, pipelines, parts, out, shape  # kept alive, because the C library uses their memory
        tables = (each.ctypes.data for each in (blocks, pipelines, parts))
        super().__init__(*tables, len(shape), out.itemsize, out.ctypes.data, shape.ctypes.data)


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("starts", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("num_columns", ctypes.c_int64),
        ("column_bytes", ctypes.c_int32),
        ("value_bytes", ctypes.c_int32),
    )


def available() -> bool:
    """Return whether the C library was built for this version and is not disabled."""
    return os.environ.get("H5CHUNK_NATIVE", "1") != "0" and _library() is not None


def can_map() -> bool:
    """Return whether jobs may copy rows of mapped files: a page that cannot be read does not end the process."""
    return bool(available() and _library().h5chunk_can_map())


@functools.cache
def _library() -> Any:
    """Load the library next to this module. Returns None if it is missing or of another version."""
    for path in sorted(Path(__file__).parent.glob("_core*.so")):
        with suppress(OSError, AttributeError):  # a library for another machine, or another file
            library = ctypes.CDLL(str(path))
            if library.h5chunk_version() == VERSION:
                return _declare(library)
    return None


@functools.cache
def _quick() -> Any:
    """Load the library for calls of a few microseconds. They keep the GIL, because reacquiring it takes longer."""
    return _declare(ctypes.PyDLL(_library()._name))


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pool, address, number = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("open", pool, (ctypes.c_int, number, ctypes.c_int)),
        ("num_threads", ctypes.c_int, (pool,)),
        ("submit", ctypes.c_int, (pool, ctypes.c_uint64, address, number, *map(ctypes.POINTER, (Ending, Buffer)))),
        ("wait", ctypes.c_int, (pool, ctypes.c_double, ctypes.POINTER(Result))),
        ("run", None, (address, number, ctypes.POINTER(Result))),
        ("progress", number, (pool,)),
        ("decoding", number, (pool,)),
        ("num_open", number, (pool,)),
        ("cancel", None, (pool,)),
        ("close", ctypes.c_int, (pool, ctypes.c_double)),
        ("free", None, (pool,)),
        ("can_map", ctypes.c_int, ()),
        ("crc32", ctypes.c_uint32, (address, number, ctypes.c_uint32)),
        ("set_libraries", None, (address,)),
        ("unshuffle", None, (address, address, number, number)),
        ("fletcher32", ctypes.c_uint32, (address, number)),
        ("unlzf", number, (address, number, address, number)),
        ("dense", ctypes.c_int, (ctypes.POINTER(_Matrix), address, number, address, address, number)),
        ("augment", ctypes.c_int, (address, address, number, address, number, number, address)),
        ("jitter", None, (address, address, number, number, number, ctypes.c_int)),
        ("copy_boxes", None, (address, address, number, number, address, number, address, address)),
        ("find_jpeg", ctypes.c_int, (address,)),
        ("decode", number, (*[address] * 4, number)),
        ("cuda_context", address, ()),
        ("cuda_load", address, (address, ctypes.c_char_p, ctypes.c_char_p)),
        ("cuda_order", ctypes.c_int, (address,) * 4),
        ("cuda_send", ctypes.c_int, (address,)),
        ("cuda_is_copied", ctypes.c_int, (address,)),
        ("cuda_launch", ctypes.c_int, (address, address, ctypes.c_uint32)),
        ("cuda_parameters", ctypes.c_int, (address,)),
        ("entries", None, (ctypes.POINTER(_Matrix), address, number, ctypes.c_int32, *[address] * 3)),
    ):
        function = getattr(library, f"h5chunk_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class NativePool:
    """A pool of C threads that run jobs, which must not be used after a fork.

    Raises OSError if no thread can be started.

    Rows of a mapped file are copied past the processor's caches, or through them with ``is_cached``, for memory that is
    read at once: a device then copies it from the cache.
    """

    def __init__(self, num_threads: int, *, is_cached: bool = False) -> None:
        self._library = _library()
        self._kept: dict[int, tuple[Any, ...]] = {}  # by ticket
        self._lock = threading.Lock()  # ensures that no function is called after the pool was freed
        self._num_inside = 0  # number of threads that are inside the library
        opened: list[Any] = []  # contains the pool even if a signal interrupts the next statement
        try:
            opened.extend(map(self._library.h5chunk_open, [num_threads], [PART_BYTES], [is_cached]))
            self._pool = opened[0]
        except BaseException:
            for pool in filter(None, opened):
                self._library.h5chunk_close(pool, 1.0)
                self._library.h5chunk_free(pool)
            raise
        if not self._pool:
            raise OSError("no reader thread could be started")

    @property
    def num_threads(self) -> int:
        """Number of running threads.

        It is lower than requested if the system refused more, and 0 once they have exited.
        """
        return self._ask("num_threads")

    @property
    def progress(self) -> int:
        """Nanoseconds for which all threads together have run jobs. They increase whenever a part of a job ends."""
        return self._ask("progress")

    @property
    def decoding(self) -> int:
        """Nanoseconds of `progress` in which blocks were decoded."""
        return self._ask("decoding")

    @property
    def num_open(self) -> int:
        """Number of submitted tickets that `wait` has not yet returned."""
        return self._ask("num_open")

    def _ask(self, name: str) -> int:
        with self._lock:
            return int(getattr(_quick(), f"h5chunk_{name}")(self._pool)) if self._pool else 0

    def submit(self, ticket: int, jobs: np.ndarray, ending: Ending | None = None, buffer: Buffer | None = None) -> None:
        """Queue jobs, (n,) JOB, C-contiguous. When all have ended, `wait` returns their result, with ``ticket``.

        The memory that the jobs, the ending and the buffer refer to must live until then. An ending requires at least
        one job, and a buffer requires an ending. Raises OSError if the pool is closed or memory is short.
        """
        with self._lock:
            self._kept[ticket] = jobs, ending, buffer
            given = ticket, jobs.ctypes.data, len(jobs), ending, buffer
            if not self._pool or _quick().h5chunk_submit(self._pool, *given):
                del self._kept[ticket]
                raise OSError("the pool of reader threads is closed")

    def wait(self, timeout_s: float) -> Result | None:
        """Return the result of the next ticket that ends, or None if none ends within ``timeout_s``.

        Raises EOFError if the pool is closed and the results of all tickets were returned.
        """
        result = Result()
        with self._inside() as pool:
            state = self._library.h5chunk_wait(pool, timeout_s, result) if pool else -1
        if state < 0:
            raise EOFError("the pool of reader threads is closed")
        if not state:
            return None
        self._kept.pop(result.ticket, None)
        return result

    def poll(self) -> Result | None:
        """Return the result of a ticket that has ended, if there is one, without waiting."""
        result = Result()
        with self._lock:
            if not self._pool or _quick().h5chunk_wait(self._pool, 0.0, result) != 1:
                return None
        self._kept.pop(result.ticket, None)
        return result

    def cancel(self) -> None:
        """Drop the jobs that no thread has started. Their tickets end with the status CANCELLED."""
        with self._lock:
            if self._pool:
                _quick().h5chunk_cancel(self._pool)

    def close(self, timeout_s: float) -> bool:
        """Drop the waiting jobs, and wait for the threads.

        Returns whether all have exited. May be called repeatedly.
        """
        with self._inside() as pool:
            return not pool or bool(self._library.h5chunk_close(pool, timeout_s))

    @contextmanager
    def _inside(self) -> Iterator[Any]:
        """Return a context with the pool's handle, which is not freed while the context is active."""
        with self._lock:
            pool = self._pool
            self._num_inside += 1
        try:
            yield pool
        finally:
            with self._lock:
                self._num_inside -= 1

    def free(self) -> None:
        """Free the closed pool, unless another thread is inside the library. Threads that hang keep their memory."""
        if self.num_threads:
            _abandoned.append(self._kept)
        with self._lock:
            pool, self._pool = self._pool, None
            if pool and not self._num_inside:
                self._library.h5chunk_free(pool)


class NativeTasks:
    """Tasks that native threads run together as one ticket: a table of ``jobs``, (n,) JOB.

    If ``ending`` is set, they run it after the tasks. If ``buffer`` is set, they begin once it is free.

    ``files`` opens the files of the tasks, and checks at the end that they are unchanged.
    """

    ending: Ending | None = None
    buffer: Buffer | None = None

    def __init__(self, tasks: Sequence[Any], files: Any) -> None:
        self._tasks, self._files = tasks, files
        tables = [task.jobs(files) for task in tasks]
        self._ends = list(accumulate(map(len, tables)))
        self.jobs = np.concatenate([table.view(np.uint8) for table in tables]).view(JOB)  # slow for structured arrays
        self._kept: Any = None  # the memory that the jobs refer to, in addition to that of the tasks

    def for_window(self, window: Any, outs: Sequence[Any]) -> NativeTasks:
        """Return tasks that do the same for as many other samples, which takes less time than making tasks.

        ``window`` is a `h5chunk.plan.order.Window`. ``outs`` has the memory for each task, which must have an ``aim``.
        """
        numbers = {name: np.ascontiguousarray(getattr(window, name), np.int64) for name in WINDOW_NUMBERS}
        window, tasks = window._replace(**numbers), copy(self)
        tasks.jobs, first = self.jobs.copy(), 0
        aimed: list[Any] = []
        for task, end, out in zip(self._tasks, self._ends, outs, strict=True):
            aimed.append(task.aim(tasks.jobs[first:end], window, out))
            first = end
        tasks._kept = aimed, window, outs
        return tasks

    def end(self, result: Result) -> None:
        """Finish the tasks after all jobs have ended without being cancelled. Raises the error of a failed job."""
        if result.status not in (DONE, CHANGED, NOT_SENT):
            raise self._tasks[bisect_right(self._ends, result.job)].error_of(result)
        for file in {task.file for task in self._tasks if task.file is not None}:
            self._files.check(file)
        for task in self._tasks:
            task.end()


def run(jobs: np.ndarray) -> Result:
    """Run jobs, (n,) JOB, C-contiguous, in the calling thread, and return their result."""
    result = Result()
    _library().h5chunk_run(jobs.ctypes.data, len(jobs), result)
    return result


def crc32(data: np.ndarray, start: int = 0) -> int:
    """Return the CRC-32 of (n,) uint8, C-contiguous. ``start`` is the CRC-32 of preceding bytes, if there are any.

    >>> hex(crc32(np.frombuffer(b"123456789", np.uint8))) if available() else '0xcbf43926'
    '0xcbf43926'
    """
    return int(_library().h5chunk_crc32(data.ctypes.data, data.nbytes, start))


class BoxCopies:
    """Copies boxes of arrays to elements of ``out``, (n, *shape), C-contiguous.

    A row of ``table``, (m, 1 + 3 * axes) int64, C-contiguous, has the index in ``out``, and then, for all axes each,
    the first indices in the array, the first indices in the element, and the lengths.
    """

    def __init__(self, table: np.ndarray, out: np.ndarray) -> None:
        self._kept = table, out, np.array(out.shape[1:])  # kept alive, because the C library uses their memory
        self._table, self._out, self._shape = (each.ctypes.data for each in self._kept)
        self._item_bytes, self._row_bytes = out.itemsize, table.strides[0]

    def copy(self, values: np.ndarray, shape: np.ndarray, first: int, end: int) -> None:
        """Copy the boxes of rows ``first`` to ``end`` of the table. ``values`` are the bytes of an array, C-contiguous.

        ``shape`` is the shape of the array, (axes,) int64, whose items have the size of those of ``out``.
        """
        boxes, own = self._table + first * self._row_bytes, shape.ctypes.data
        source, item, count = values.ctypes.data, self._item_bytes, end - first
        _library().h5chunk_copy_boxes(source, own, len(shape), item, boxes, count, self._out, self._shape)


class SparseRows:
    """The rows of a sparse matrix. Row i has the entries ``starts[i]`` to ``starts[i + 1]`` (excluded).

    The value of an entry is ``table[code]``, where ``code`` is its uint8 code. If there is no table, codes are the
    values. If there are no codes, all values are ``table[0]``.
    """

    def __init__(
        self,
        starts: np.ndarray,
        columns: np.ndarray,
        codes: np.ndarray | None,
        table: np.ndarray | None,
    ) -> None:
        self._arrays = starts, columns, codes, table  # kept alive, because the C library uses their memory
        addresses = (None if array is None else array.ctypes.data for array in self._arrays)
        values = table if table is not None else codes
        assert values is not None
        self._matrix = _Matrix(*addresses, 0, columns.itemsize, values.itemsize)

    def make_dense(self, rows: np.ndarray, out: np.ndarray, filled: np.ndarray | None = None) -> None:
        """Write rows, (n,) int64, as dense rows to ``out``, which is C-contiguous and has the itemsize of the values.

        If ``filled``, (n, 1 + m) int32, is given, ``filled[i, 0]`` is the number of columns that are not zero in row i
        of ``out``, and these follow; or it is -1, and the row may have any values. This is changed to describe the new
        rows. Then only these columns are cleared, instead of whole rows.

        Raises IndexError if a column is outside of ``out``.
        """
        self._matrix.num_columns = out.shape[1]
        where = (None, 0) if filled is None else (filled.ctypes.data, filled.shape[1] - 1)
        if _library().h5chunk_dense(self._matrix, rows.ctypes.data, len(rows), out.ctypes.data, *where):
            raise IndexError(f"a column is out of range for {out.shape[1]} columns")

    def copy(self, rows: np.ndarray, index_bytes: int, starts: int, columns: int, values: int) -> None:
        """Concatenate the entries of rows, (n,) int64, C-contiguous, in the arrays at three addresses.

        The entries of row i begin at index ``starts[i]`` of ``columns`` and ``values``. There are n + 1 starts. Starts
        and columns are integers of ``index_bytes`` bytes, which is 4 or 8.
        """
        matrix, numbers = self._matrix, rows.ctypes.data
        _library().h5chunk_entries(matrix, numbers, len(rows), index_bytes, starts, columns, values)
