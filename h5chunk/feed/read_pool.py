"""Threads that read ahead: they fill slots with windows, in the order in which their batches will be wanted.

A slot holds one window, each of its samples at its place in the shuffled window: a batch is a slice of it. Windows are
cut into tasks of a few megabytes, which threads read side by side; the thread that finishes the last task of a window
hands it on. Nothing here knows what a batch is for; `h5chunk.feed.stream` does.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from h5chunk.errors import FileError, WorkerError, printable
from h5chunk.native import DONE, GATHER, JOB, NativePool, Result, available
from h5chunk.plan.order import Window
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.ranges import Part as ReadTask
from h5chunk.store.hdf5.ranges import VectorPart, open_descriptor
from h5chunk.store.read.csr import CsrBuffers, CsrField
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.several import DirectField, FileParts, OpenFiles

WHOLE_ROW_BYTES = 1 << 10  # fields of such small rows are kept in memory whole, as a place of preadv costs like 1 KB
WHOLE_BYTES = 64 << 20  # up to this size
QUICK_BYTES = 16 << 10  # to gather so little takes less time than to hand it to a thread
FOREVER_S = 1e9
TIMEOUT_S = 120.0  # without any finished task, an error is raised


class Slot(Protocol):
    """The buffer that a window is read into."""

    def begin(self, samples: np.ndarray) -> Mapping[str, np.ndarray | CsrBuffers]:
        """Make room for these samples, by field; the consumer's thread calls it.

        Of each field (num_samples, row_bytes) uint8, or, of a matrix, a `CsrBuffers` in which rows have their starts.
        """

    def send(self) -> None:
        """The window is read; any thread calls it. Raises FileError if what was read is damaged."""


class Progress:
    """Counts the tasks that are done, of all windows: a window that waits for others is not stuck."""

    tasks = 0  # of threads of Python
    native: NativePool | None = None
    hangs = False  # tasks were waited for in vain

    @property
    def count(self) -> int:
        """A number that grows whenever anything is done."""
        return self.tasks + (0 if self.native is None else self.native.progress)

    def hang(self, path: Path, timeout_s: float | None) -> WorkerError:
        """Note that something hangs, and return the error that says so."""
        self.hangs = True
        return WorkerError(
            f"{printable(path)}: no data came for {timeout_s:g} s: a reading thread or the file system hangs: see "
            "whether the file can still be read, or raise timeout"
        )


class WindowRead:
    """A window on its way into a slot; ``path`` names the file in messages."""

    def __init__(self, slot: Any, window: Window, num_tasks: int, path: Path, progress: Progress) -> None:
        self.slot, self.window = slot, window
        self.error: BaseException | None = None
        self._path, self._progress = path, progress
        self._left = num_tasks
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._process = os.getpid()

    @property
    def is_ready(self) -> bool:
        """Whether all tasks are done, or have failed."""
        return self._ready.is_set()

    def run(self, task: ReadTask, pool: ReadPool) -> None:
        """Do one task; the last one hands the window on. An error is kept for the consumer."""
        try:
            if self.error is None:
                task(pool.descriptor)
        except BaseException as error:  # raised again by wait()
            self.error = error
        self.end_task(pool)

    def drop(self, pool: ReadPool) -> None:
        """Leave one task undone."""
        if self.error is None:  # not raised here: its traceback would keep the slot until the garbage is collected
            self.error = FileError(f"{printable(self._path)}: closed while it was read")
        self.end_task(pool)

    def end_task(self, pool: ReadPool) -> None:
        """Count a task as over; the last one hands the window on."""
        self._progress.tasks += 1  # threads may count over each other: that it moves is enough
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.finish(pool)

    def finish(self, pool: ReadPool) -> None:
        """Hand the window on: all tasks are done."""
        try:
            if self.error is None:
                pool.check_unchanged()
                self.slot.send()
        except BaseException as error:
            self.error = error
        self._ready.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the slot is filled.

        Raises
        ------
        WorkerError
            For ``timeout_s`` no task was finished, of any window.
        BaseException
            The error of a task.
        """
        self.settle(timeout_s)
        if self.error is not None:
            raise self.error

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until no thread writes to the slot, whatever came of it.

        Raises
        ------
        WorkerError
            For ``timeout_s`` no task was finished, of any window.
        """
        if os.getpid() != self._process:
            raise FileError(f"{printable(self._path)}: read ahead by threads that a fork leaves behind: start again")
        if self._ready.is_set():
            return
        done = self._progress.count
        while not self._ready.wait(timeout_s):
            if self._progress.count == done:
                raise self._progress.hang(self._path, timeout_s)
            done = self._progress.count


class RowGather:
    """Copy rows of a field that is kept in memory."""

    def __init__(self, values: np.ndarray, samples: np.ndarray, out: np.ndarray) -> None:
        self._values, self._samples, self._out = values, np.ascontiguousarray(samples), out

    def __call__(self, _descriptor: object) -> None:
        there = self._out.view(self._values.dtype).reshape(len(self._samples), *self._values.shape[1:])
        np.take(self._values, self._samples, axis=0, out=there, mode="clip")  # another mode makes NumPy copy once more

    def jobs(self, _descriptor: int) -> np.ndarray:
        """The same as a job of a `h5chunk.native.NativePool`: (1,) JOB."""
        job = np.zeros(1, JOB)
        job["kind"], job["count"], job["num_bytes"] = GATHER, len(self._samples), self._out.nbytes
        job["source"], job["indices"] = self._values.ctypes.data, self._samples.ctypes.data
        job["destination"] = self._out.ctypes.data
        return job


class NativeRead:
    """The part of a window that native threads read, as one ticket.

    Parameters
    ----------
    load : WindowRead
    tasks : list of (VectorPart or RowGather, int, callable or None)
        Each with its descriptor, and what is to be called when it is over.
    """

    def __init__(
        self, load: WindowRead, tasks: list[tuple[VectorPart | RowGather, int, Callable[[], None] | None]]
    ) -> None:
        self.load, self._tasks = load, tasks
        tables = [task.jobs(descriptor) for task, descriptor, _ in tasks]
        self._ends = list(accumulate(map(len, tables)))
        self.jobs = np.concatenate([table.view(np.uint8) for table in tables]).view(JOB)  # structures are slow to join

    def end(self, result: Result, pool: ReadPool) -> None:
        """All jobs are over. An error is kept for the consumer."""
        if result.status != DONE:
            task = self._tasks[bisect_right(self._ends, result.job)][0]
            assert isinstance(task, VectorPart)
            self.load.error = task.error_of(result)  # not raised here: its traceback would keep the slot
        try:
            for _, _, check in self._tasks:
                if check is not None:
                    check()
        except BaseException as error:
            self.load.error = self.load.error or error
        self.load.end_task(pool)


class ReadPool:
    """Threads that do the tasks of windows. Holds the file, or files, open until it is closed.

    Byte ranges are read by threads in C, where `h5chunk.native` was built: threads of Python are started only for what
    those cannot do, and one that hands on what they have read.

    Parameters
    ----------
    reader : H5Reader
        Reads the fields that need HDF5, by one thread at a time.
    direct : dict of str to DirectField
        Reads the other fields.
    num_threads : int
    numbered : dict of str to callable
        Fields that are not in the file: the function gives the values of samples by their numbers in the file.
    timeout_s : float, optional
        How long to wait while no task is finished; None: for ever.
    """

    def __init__(
        self,
        reader: H5Reader,
        direct: Mapping[str, DirectField],
        num_threads: int,
        *,
        numbered: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None,
        timeout_s: float | None = TIMEOUT_S,
    ) -> None:
        self._reader, self._direct, self._numbered = reader, direct, numbered or {}
        self.path, self.timeout_s = reader.path, timeout_s
        self._process = os.getpid()
        self._hdf5 = threading.Lock()
        self._progress = Progress()
        self._tasks: SimpleQueue[tuple[WindowRead, ReadTask] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_threads, self._has_workers = num_threads, False
        self._native_reads: dict[int, NativeRead] = {}
        self._native: NativePool | None = None
        self.descriptor: Any = self._open()
        try:
            self._forget()
            self._read_whole()
            if available():
                self._native = self._progress.native = NativePool(num_threads)
                self._start_thread(_hand_on, self._native)
            else:
                self._start_workers()
        except BaseException:
            self.close()
            raise

    def _start_workers(self) -> None:
        self._has_workers = True
        for _ in range(self._num_threads):
            self._start_thread(_work, self._tasks)

    def _start_thread(self, target: Callable[..., None], queue: Any) -> None:
        thread = threading.Thread(target=target, args=(self, queue), name="h5chunk-reader", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _read_whole(self) -> None:
        """Read small fields at once; what became of the file meanwhile each window checks."""
        try:
            self._whole = {
                name: field.read_all(self.descriptor)
                for name, field in self._direct.items()
                if not isinstance(field, CsrField) and is_kept_whole(field)
            }
        except (FileError, ValueError, OSError):
            self.check_unchanged()
            raise

    def check_unchanged(self) -> None:
        """Raise FileError unless the file under the name of the open one is what it was when the reader was made.

        The open file is that one as long as its name leads to it; of several files each is checked as it is read.
        """
        if not isinstance(self.descriptor, OpenFiles) and stamp_of(self._reader.path) != self._reader.stamp:
            self._reader.check_unchanged()

    def _open(self) -> Any:
        """Open the file, or prepare to open several.

        Raises
        ------
        FileError
            It cannot be opened, or is not the one that the reader was made of.
        """
        if isinstance(self._reader, FileSet):
            return OpenFiles(self._reader)
        descriptor = open_descriptor(self._reader.path)
        if stamp_of(descriptor) != self._reader.stamp:
            os.close(descriptor)
            self._reader.check_unchanged()
            raise FileError(f"{printable(self._reader.path)}: replaced or changed while it was opened: start again")
        return descriptor

    def load(self, window: Window, slot: Slot) -> WindowRead:
        """Start reading a window into a slot."""
        tasks = [
            task for name, out in slot.begin(window.samples).items() for task in self._field_tasks(name, window, out)
        ]
        native, tasks = self._split(tasks)
        load = WindowRead(slot, window, len(tasks) + bool(native), self._reader.path, self._progress)
        if native:
            self._submit(NativeRead(load, native))
        if tasks and self._threads and not self._has_workers:
            self._start_workers()
        for task in tasks:
            self._tasks.put((load, task))
        if not tasks and not native:
            load.finish(self)
        if not self._threads:  # closed: the consumer shall not wait
            self.cancel()
        return load

    def _split(self, tasks: list[ReadTask]) -> tuple[list[Any], list[ReadTask]]:
        """The tasks for native threads, with their descriptors, and those for threads of Python."""
        if self._native is None or os.getpid() != self._process:
            return [], tasks
        native: list[Any] = []
        others: list[ReadTask] = []
        for task in tasks:
            if isinstance(task, VectorPart | RowGather):
                native.append((task, self.descriptor, None))
            elif isinstance(task, FileParts) and task.is_plain:
                native += task.each(self.descriptor)
            else:
                others.append(task)
        return native, others

    def _submit(self, read: NativeRead) -> None:
        ticket = id(read)
        self._native_reads[ticket] = read
        try:
            assert self._native is not None
            self._native.submit(ticket, read.jobs)
        except OSError:  # closed
            del self._native_reads[ticket]
            read.load.drop(self)

    def end_native(self, result: Result) -> None:
        """A ticket of the native threads is over."""
        self._native_reads.pop(result.ticket).end(result, self)

    def _field_tasks(self, name: str, window: Window, out: np.ndarray | CsrBuffers) -> Iterable[ReadTask]:
        """The tasks that read a field; what takes no longer than handing it to a thread is done at once."""
        if name in self._numbered and not isinstance(out, CsrBuffers):
            _fill(self._numbered[name](window.samples), out)
            return ()
        if name in self._whole and not isinstance(out, CsrBuffers):
            gather = RowGather(self._whole[name], window.samples, out)
            if out.nbytes > QUICK_BYTES:
                return (gather,)
            gather(self.descriptor)
            return ()
        if not len(window.samples):  # a last batch that only other ranks have
            return ()
        if name in self._direct:
            return self._direct[name].parts(window.rows, window.destinations, out)  # type: ignore[arg-type]
        return (partial(self._read_by_hdf5, name, window.samples, out),)

    def _read_by_hdf5(self, name: str, samples: np.ndarray, out: np.ndarray | CsrBuffers, _descriptor: int) -> None:
        field = self._reader.fields[name]
        values = (
            out if isinstance(out, CsrBuffers) else out.view(field.dtype).reshape(len(samples), *field.sample_shape)
        )
        with self._hdf5:
            self._reader.read(name, samples, values)

    def hangs(self) -> WorkerError:
        """Note that nothing came for as long as it may take, and return the error that says so."""
        return self._progress.hang(self.path, self.timeout_s)

    @property
    def wait_s(self) -> float | None:
        """How long closing waits for threads: not at all for those that hang already."""
        return 0.0 if self._progress.hangs else self.timeout_s

    def close(self) -> None:
        """Stop and join the threads, and close the file. Tasks that no thread has begun are dropped.

        A thread that hangs in a read is not waited for: it keeps the file open until it comes back.
        """
        if os.getpid() != self._process:  # a fork has the descriptor, but neither the threads nor their locks
            self._close_descriptor()
            return
        if threading.current_thread() in self._threads:  # the garbage collector's call, in the middle of a task
            threading.Thread(target=self.close, name="h5chunk-closer", daemon=True).start()
            return
        self.cancel()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        wait_s = self.wait_s
        if self._native is not None:
            self._native.close(FOREVER_S if wait_s is None else wait_s)
        end = None if wait_s is None else time.monotonic() + wait_s
        for thread in threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            threading.Thread(target=self._end, args=(threads,), name="h5chunk-closer", daemon=True).start()
        else:
            self._end(threads)

    def _end(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join()
        if self._native is not None:
            self._native.close(FOREVER_S)
            self._native.free()
        self._close_descriptor()
        self._reader.close()
        self._forget()

    def _close_descriptor(self) -> None:
        if isinstance(self.descriptor, OpenFiles):
            self.descriptor.close()
        else:
            os.close(self.descriptor)

    def _forget(self) -> None:
        for field in self._direct.values():
            field.forget()

    def cancel(self) -> None:
        """Drop the tasks that no thread has begun: their windows end with an error."""
        with suppress(Empty):
            while task := self._tasks.get_nowait():
                task[0].drop(self)


def is_kept_whole(field: DirectField) -> bool:
    """Whether a `ReadPool` reads a field at once and keeps it in memory."""
    return not isinstance(field, CsrField) and field.row_bytes <= WHOLE_ROW_BYTES and field.num_bytes <= WHOLE_BYTES


def _fill(values: np.ndarray, out: np.ndarray) -> None:
    out.view(values.dtype).reshape(values.shape)[:] = values


def _work(pool: ReadPool, tasks: SimpleQueue[tuple[WindowRead, ReadTask] | None]) -> None:
    while (queued := tasks.get()) is not None:
        load, task = queued
        load.run(task, pool)
        del queued, load, task  # they hold a slot


def _hand_on(pool: ReadPool, native: NativePool) -> None:
    with suppress(EOFError):  # closed
        while True:
            if (result := native.wait(FOREVER_S)) is not None:
                pool.end_native(result)
