"""Threads that read ahead: they fill slots with windows, in the order in which their batches will be wanted.

A slot holds one window, each of its samples at its place in the shuffled window: a batch is a slice of it. Windows are
cut into tasks of a few megabytes, which threads read side by side; the thread that finishes the last task of a window
hands it on. Nothing here knows what a batch is for; `h5chunk.feed.stream` does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from h5chunk.errors import FileError, WorkerError, printable
from h5chunk.plan.order import Window
from h5chunk.store.read.csrrows import CsrField, CsrRoom
from h5chunk.store.read.direct import EncodedField, PlainField
from h5chunk.store.read.filesdirect import FilesField, OpenFiles
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.ranges import Part as ReadTask
from h5chunk.store.read.ranges import open_descriptor
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.tiles import TiledField

WHOLE_ROW_BYTES = 1 << 10  # fields of such small rows are kept in memory whole, as a place of preadv costs like 1 KB
WHOLE_BYTES = 64 << 20  # up to this size
QUICK_BYTES = 16 << 10  # to gather so little takes less time than to hand it to a thread
Direct = PlainField | EncodedField | TiledField | CsrField | FilesField  # what reads a field by byte ranges
TIMEOUT_S = 120.0  # without any finished task, an error is raised


class Slot(Protocol):
    """The buffer that a window is read into."""

    def begin(self, samples: np.ndarray) -> Mapping[str, np.ndarray | CsrRoom]:
        """Make room for these samples, by field; the consumer's thread calls it.

        Of each field (num_samples, row_bytes) uint8, or, of a matrix, a `CsrRoom` in which rows have their starts.
        """

    def send(self) -> None:
        """The window is read; any thread calls it. Raises FileError if what was read is damaged."""


class Progress:
    """Counts the tasks that are done, of all windows: a window that waits for others is not stuck."""

    count = 0
    hangs = False  # tasks were waited for in vain


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
        self._end_task(pool)

    def drop(self, pool: ReadPool) -> None:
        """Leave one task undone."""
        if self.error is None:  # not raised here: its traceback would keep the slot until the garbage is collected
            self.error = FileError(f"{printable(self._path)}: closed while it was read")
        self._end_task(pool)

    def _end_task(self, pool: ReadPool) -> None:
        self._progress.count += 1  # threads may count over each other: that it moves is enough
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
        if os.getpid() != self._process:
            raise FileError(f"{printable(self._path)}: read ahead by threads that a fork leaves behind: start again")
        done = self._progress.count
        while not self._ready.wait(timeout_s):
            if self._progress.count == done:
                self._progress.hangs = True
                raise WorkerError(
                    f"{printable(self._path)}: no data came for {timeout_s:g} s: a reading thread or the file system "
                    "hangs: see whether the file can still be read, or raise timeout"
                )
            done = self._progress.count
        if self.error is not None:
            raise self.error


class ReadPool:
    """Threads that do the tasks of windows. Holds the file, or files, open until it is closed.

    Parameters
    ----------
    reader : H5Reader
        Reads the fields that need HDF5, by one thread at a time.
    direct : dict of str to PlainField, EncodedField, TiledField, CsrField or FilesField
        Reads the other fields.
    num_threads : int
    numbered : dict of str to callable
        Fields that are not in the file: the function gives the values of samples by their numbers in the file.
    mapped : bool
        Copy plain rows out of mapped memory: see `PlainField.map`.
    timeout_s : float, optional
        How long to wait while no task is finished; None: for ever.
    """

    def __init__(
        self,
        reader: H5Reader,
        direct: Mapping[str, Direct],
        num_threads: int,
        *,
        numbered: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None,
        mapped: bool = False,
        timeout_s: float | None = TIMEOUT_S,
    ) -> None:
        self._reader, self._direct, self._numbered = reader, direct, numbered or {}
        self.timeout_s = timeout_s
        self._process = os.getpid()
        self._hdf5 = threading.Lock()
        self._progress = Progress()
        self._tasks: SimpleQueue[tuple[WindowRead, ReadTask] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.descriptor: Any = OpenFiles(reader) if isinstance(reader, FileSet) else open_descriptor(reader.path)
        try:
            self._forget()
            self._read_whole(mapped)
            for _ in range(num_threads):
                thread = threading.Thread(target=_work, args=(self, self._tasks), name="h5chunk-reader", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def _read_whole(self, mapped: bool) -> None:
        """Read small fields at once, and map large ones; what became of the file meanwhile each window checks."""
        if mapped:  # of a file that was cut short, the system would end the process
            self.check_unchanged()
        try:
            self._whole = {
                name: field.read_all(self.descriptor)
                for name, field in self._direct.items()
                if not isinstance(field, CsrField) and is_kept_whole(field)
            }
            for field in self._direct.values():
                if mapped and isinstance(field, (PlainField, FilesField)):
                    field.map(self.descriptor)
        except (FileError, ValueError, OSError):
            self.check_unchanged()
            raise

    def check_unchanged(self) -> None:
        """Raise FileError unless the file is what it was when the reader was made: the open one, and under its name."""
        self._reader.check_unchanged(self.descriptor)
        if not isinstance(self.descriptor, OpenFiles):  # of a set each is looked at as it is read
            self._reader.check_unchanged()

    def load(self, window: Window, slot: Slot) -> WindowRead:
        """Start reading a window into a slot."""
        tasks = [
            task for name, out in slot.begin(window.samples).items() for task in self._field_tasks(name, window, out)
        ]
        load = WindowRead(slot, window, len(tasks), self._reader.path, self._progress)
        for task in tasks:
            self._tasks.put((load, task))
        if not tasks:
            load.finish(self)
        if not self._threads:  # closed: the consumer shall not wait
            self._drop_tasks()
        return load

    def _field_tasks(self, name: str, window: Window, out: np.ndarray | CsrRoom) -> Iterable[ReadTask]:
        """The tasks that read a field; what takes no longer than handing it to a thread is done at once."""
        if name in self._numbered and not isinstance(out, CsrRoom):
            _fill(self._numbered[name](window.samples), out)
            return ()
        if name in self._whole and not isinstance(out, CsrRoom):
            gather = partial(_gather, self._whole[name], window.samples, out)
            if out.nbytes > QUICK_BYTES:
                return (gather,)
            gather(self.descriptor)
            return ()
        if not len(window.samples):  # a last batch that only other ranks have
            return ()
        if name in self._direct:
            return self._direct[name].parts(window.rows, window.places, out)  # type: ignore[arg-type]
        return (partial(self._read_by_hdf5, name, window.samples, out),)

    def _read_by_hdf5(self, name: str, samples: np.ndarray, out: np.ndarray | CsrRoom, _descriptor: int) -> None:
        field = self._reader.fields[name]
        values = out if isinstance(out, CsrRoom) else out.view(field.dtype).reshape(len(samples), *field.sample_shape)
        with self._hdf5:
            self._reader.read(name, samples, values)

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
        self._drop_tasks()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        wait_s = 0.0 if self._progress.hangs else self.timeout_s
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

    def _drop_tasks(self) -> None:
        with suppress(Empty):
            while task := self._tasks.get_nowait():
                task[0].drop(self)


def is_kept_whole(field: Direct) -> bool:
    """Whether a `ReadPool` reads a field at once and keeps it in memory."""
    return not isinstance(field, CsrField) and field.row_bytes <= WHOLE_ROW_BYTES and field.num_bytes <= WHOLE_BYTES


def _gather(values: np.ndarray, samples: np.ndarray, out: np.ndarray, _descriptor: int) -> None:
    there = out.view(values.dtype).reshape(len(samples), *values.shape[1:])
    np.take(values, samples, axis=0, out=there, mode="clip")  # another mode makes NumPy copy once more


def _fill(values: np.ndarray, out: np.ndarray) -> None:
    out.view(values.dtype).reshape(values.shape)[:] = values


def _work(pool: ReadPool, tasks: SimpleQueue[tuple[WindowRead, ReadTask] | None]) -> None:
    while (queued := tasks.get()) is not None:
        load, task = queued
        load.run(task, pool)
        del queued, load, task  # they hold a slot
