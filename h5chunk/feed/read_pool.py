"""Reader threads that fill slots with windows, in the order in which their batches will be used.

A slot holds one window. Each sample is read to its position in the shuffled window, so that a batch is a slice of it.
The source is a file or, if all samples are in memory, this memory. Threads read a window in parallel, in tasks of a few
megabytes, which native threads get as one table of jobs. After the last task, the window is checked and sent to
the device by the thread that ran this task or, with native threads, by the thread that waits for the window. If native
threads read the entire window, they also send it, so that a copy never waits for Python.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from h5chunk.errors import FileError, WorkerError, closed, lost_by_fork, printable
from h5chunk.feed.columns import Destination
from h5chunk.feed.skipping import Bad
from h5chunk.feed.slots import Slot
from h5chunk.native import CANCELLED, DONE, Ending, NativePool, NativeTasks, Result, available
from h5chunk.plan.order import Window
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.ranges import NO_BYTES, ReadTask, RowGather, native_tasks
from h5chunk.store.read.field_readers import read_small_fields
from h5chunk.store.read.open_files import OpenFiles
from h5chunk.store.read.samples import FieldReader
from h5chunk.store.read.source import Source

KEPT_TASKS = 8  # sizes of windows for which tasks are kept
QUICK_BYTES = 16 << 10  # gathering a smaller window takes less time than passing it to a thread
SIGNALS_S = 0.1  # longest delay before a signal, such as Ctrl-C, is handled
TIMEOUT_S = 120.0  # seconds without a finished task before an error is raised


class WindowRead:
    """The read of one window into a slot, by tasks for Python threads and one ticket for native threads."""

    def __init__(
        self, pool: ReadPool, slot: Slot, window: Window, num_tasks: int, native: NativeTasks | None = None
    ) -> None:
        self.slot, self.window = slot, window
        self.planned = window  # before bad samples were replaced
        self.bad: Bad = {}
        self._places: np.ndarray | None = None  # of samples in the slot, if some were replaced after they were read
        self.error: BaseException | None = None
        self.is_sent = False  # whether native threads have checked that the file is unchanged, and sent the window
        self._pool, self.native = pool, native
        self.num_left = num_tasks + (native is not None)
        self.at_end: Callable[[], None] | None = None  # called once the window has been read, or has failed
        self.is_ready = False  # whether all tasks are done, or have failed
        self._ready: threading.Event | None = None  # made when a thread waits for Python threads

    def run(self, task: ReadTask) -> None:
        """Run one task, and finish the window after the last one. `wait` raises the error of a failed task."""
        try:
            if self.error is None:
                task(self._pool.files)
        except BaseException as error:  # raised again by wait()
            self.error = error
        self._end_task()

    def drop(self) -> None:
        """Count a task as done without running it. The window then ends with an error."""
        self.error = self.error or self._closed()
        self._end_task()

    def _closed(self) -> FileError:
        return closed(self._pool.path)

    def end_native(self, result: Result) -> None:
        """Process the result of the native threads, after all their jobs have ended."""
        assert self.native is not None
        try:
            self.is_sent = result.status == DONE and self.native.ending is not None
            if result.status == CANCELLED:
                self.error = self.error or self._closed()
            else:
                self.native.end(result)
        except BaseException as error:
            self.error = self.error or error
        self.native = None  # tasks refer to the memory of the slot
        self._end_task()

    def _end_task(self) -> None:
        self._pool.tasks_done += 1  # threads may overwrite each other's counts; any change is enough
        with self._pool.lock:
            self.num_left -= 1
            last = self.num_left == 0
        if last:
            self.finish()

    def finish(self) -> None:
        """Check the window and send it to the device, after all its tasks are done."""
        try:
            if self.error is None and not self.is_sent:
                self._pool.check_unchanged()
                self.slot.send()
            if self.error is None:
                self.slot.check()
        except BaseException as error:
            self.error = error
        self.slot.return_pinned()
        with self._pool.lock:
            self.is_ready, waited = True, self._ready
        if waited is not None:
            waited.set()
        if self.at_end is not None:
            self.at_end()

    def places_of(self, some: np.ndarray) -> np.ndarray:
        """Return the places in the slot of some of the window's samples: (n,) int64."""
        return some.copy() if self._places is None else self._places[some]

    def replace(self, some: np.ndarray, keys: np.ndarray, places: np.ndarray) -> None:
        """Replace some of the window's samples by others in the slot, given their keys and places."""
        own = self.window.keys.copy()
        own[some] = keys
        self.window = self.window._replace(keys=own)
        self._places = np.arange(len(own)) if self._places is None else self._places
        self._places[some] = places

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the slot is filled. Raise the error of a failed task.

        Raise `WorkerError` if no task of any window completes for ``timeout_s``.
        """
        if not self.is_ready:
            self.wait_for_threads(timeout_s)
        if self.error is not None:
            raise self.error

    def wait_for_threads(self, timeout_s: float | None = None) -> None:
        """Wait until no thread writes to the slot any more, whether or not the read succeeded.

        Raise `WorkerError` if no task of any window completes for ``timeout_s``.
        """
        if not self._pool.is_usable:
            raise lost_by_fork(self._pool.path)
        done = self._pool.progress
        while not self.is_ready:
            came = self._pool.finish_next(timeout_s) if self.native else self._wait_for_workers(timeout_s)
            if not came and self._pool.progress == done:
                raise self._pool.mark_hanging(timeout_s)
            done = self._pool.progress

    def _wait_for_workers(self, timeout_s: float | None) -> bool:
        with self._pool.lock:
            if self.is_ready:
                return True
            self._ready = ready = self._ready or threading.Event()
        return ready.wait(timeout_s)


class ReadPool:
    """Threads that run the read tasks of windows. The pool keeps its files open until it is closed.

    If `h5chunk.native` was built, C threads read byte ranges, and the caller finishes the windows that they have read,
    because a Python thread would wait for the GIL at each step. Python threads are started only for other tasks.

    ``fields`` has the readers of the fields of ``reader``. ``numbered`` computes the fields that are not in the file
    from sample numbers. `WorkerError` is raised if no task completes for ``timeout_s`` seconds; None waits forever.
    With ``skips``, small fields that are damaged are not kept in memory, but read with each window. ``is_cached`` is as
    in `NativePool`. If ``memory`` has all samples, (num_samples, ...) by field, windows are copied from it, and no file
    is opened.
    """

    def __init__(
        self,
        reader: Source,
        fields: Mapping[str, FieldReader],
        num_threads: int,
        *,
        numbered: Mapping[str, Callable[[np.ndarray], np.ndarray]] | None = None,
        timeout_s: float | None = TIMEOUT_S,
        skips: bool = False,
        is_cached: bool = False,
        memory: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._reader, self._numbered = reader, numbered or {}
        self._fields = {name: field.rows_field for name, field in fields.items()}
        self.path, self.timeout_s = reader.path, timeout_s
        self.epoch, self.tasks_done = 0, 0  # epoch of the next windows to read; tasks that Python threads have done
        self._in_memory = memory is not None
        self.is_local = self._in_memory or not reader.is_remote  # whether all data is on this machine
        self._hangs = False  # whether a wait has run into its timeout
        self.has_ended = threading.Event()  # set once the pool is closed and all threads have ended
        self._process = os.getpid()
        self.lock = threading.Lock()  # for the states of all reads
        self._tasks: SimpleQueue[tuple[WindowRead, ReadTask] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_threads, self._has_workers, self._is_closed = num_threads, False, False
        self._native: NativePool | None = None
        self._native_reads: dict[int, WindowRead] = {}  # by ticket
        self._plain: set[str] = set()  # fields that native threads can copy, row by row, from one file or from memory
        self._made: dict[int, NativeTasks] = {}  # tasks that read these fields, by the number of samples
        self.files = OpenFiles(reader)
        try:
            self._stamp: tuple[Any, ...] = ()  # path and stamp of a single local file
            if memory is not None:
                self._whole = dict(memory)
            else:
                if not self.files.are_several:
                    self._stamp = () if reader.is_remote else (os.fsencode(reader.path), *reader.stamp)
                    self.files.descriptor(0)
                self._forget()
                stored = {name: reader.source_of(name).fields[name] for name in fields}
                self._whole = read_small_fields(self._fields, stored, self.files, reader.check_unchanged, skips=skips)
            self._plain |= self._whole.keys() | {name for name, field in self._fields.items() if field.reads_rows}
            if available():
                self._native = NativePool(num_threads, is_cached=is_cached)
            else:
                self._start_workers()
        except BaseException:
            self.close()
            raise

    def _start_workers(self) -> None:
        self._has_workers = True
        for _ in range(self._num_threads):
            thread = threading.Thread(target=self._work, name="h5chunk-reader", daemon=True)
            self._threads.append(thread)  # first, as a signal may interrupt its start
            thread.start()

    def _work(self) -> None:
        while (queued := self._tasks.get()) is not None:
            queued[0].run(queued[1])
            del queued  # tasks refer to a slot

    def finish_next(self, timeout_s: float | None) -> bool:
        """Wait until native threads have read any window, and finish it. Return False on a timeout."""
        assert self._native is not None
        end, done = math.inf if timeout_s is None else time.monotonic() + timeout_s, self.tasks_done
        while True:
            left = end - time.monotonic()
            try:
                result = self._native.wait(max(0.0, min(left, SIGNALS_S)))
            except EOFError:
                self._drop_native()
                return True
            if result is not None:
                self._end_read(result)
                return True
            if left <= SIGNALS_S or self.tasks_done != done:  # a Python thread may have ended a task of the window
                return self.tasks_done != done

    def _drop_native(self) -> None:
        """End the reads of the native threads with an error. The threads must have ended."""
        with suppress(KeyError):
            while True:
                ticket, read = self._native_reads.popitem()
                read.end_native(Result(ticket, CANCELLED, 0, 0, 0))

    def _end_read(self, result: Result) -> None:
        if (read := self._native_reads.pop(result.ticket, None)) is not None:  # else it was dropped just now
            read.end_native(result)

    def finish_ready(self, ready: WindowRead | None = None) -> None:
        """Finish the windows that native threads have read, without waiting. Stop once ``ready`` is ready."""
        while self._native_reads and self._native and not (ready and ready.is_ready):
            if (result := self._native.poll()) is None:
                return
            self._end_read(result)

    @property
    def is_usable(self) -> bool:
        """Whether the threads belong to this process. A fork has descriptors, but no threads, and unusable locks."""
        return os.getpid() == self._process

    @property
    def progress(self) -> int:
        """A number that grows whenever a task of any window is done."""
        return self.tasks_done + (0 if self._native is None else self._native.progress)

    def mark_hanging(self, timeout_s: float | None) -> WorkerError:
        """Record that a read hangs, and return the error to raise."""
        self._hangs = True
        return WorkerError(
            f"{printable(self.path)}: no data was read for {timeout_s:g} s, because a reading thread or the file "
            "system hangs: check that the file can still be read, or pass a larger timeout"
        )

    @property
    def wait_s(self) -> float | None:
        """Seconds for which `close` waits for threads. It is 0 if a read already hangs, and None for no limit."""
        return 0.0 if self._hangs else self.timeout_s

    def check_unchanged(self) -> None:
        """Raise FileError if the only file has changed since it was opened. Several files are checked during reads."""
        if not (self._in_memory or self.files.are_several) and stamp_of(self._reader.path) != self._reader.stamp:
            self._reader.check_unchanged()

    def load(self, window: Window, slot: Slot) -> WindowRead:
        """Start reading a window into a slot."""
        queued = self.queues(slot, len(window.samples))
        fields = slot.begin(window.samples, queued=queued)
        native: NativeTasks | None = None
        all_tasks: list[ReadTask] = []
        tasks: list[ReadTask] = []  # those that Python threads run
        try:
            if queued:
                native = self._rows_of(window, fields)
            else:
                all_tasks = [task for name, to in fields.items() for task in self._field_tasks(name, window, to)]
                has_native = self._native is not None and self.is_usable
                native, tasks = native_tasks(all_tasks, self.files) if has_native else (None, all_tasks)
        except FileError as error:  # raised again when the window is due
            load = WindowRead(self, slot, window, 0)
            load.error = error
            load.finish()
            return load
        if native is not None and not tasks and self.is_local:
            native.ending, native.buffer = Ending(*slot.sender, *self._stamp), slot.buffer
        load = WindowRead(self, slot, window, len(tasks), native)
        if not load.num_left:
            load.finish()
        else:
            self._begin(load, all_tasks, tasks)
        if self._is_closed:  # neither the consumer nor the threads that were just started may wait
            self.cancel()
            for _ in self._threads:
                self._tasks.put(None)
        return load

    def _begin(self, load: WindowRead, _all_tasks: list[ReadTask], tasks: list[ReadTask]) -> None:
        if load.native is not None:
            self._submit(load)
        if tasks and not self._has_workers and not self._is_closed:
            self._start_workers()
        for task in tasks:
            self._tasks.put((load, task))

    def _submit(self, load: WindowRead) -> None:
        assert self._native is not None and load.native is not None
        self._native_reads[id(load)] = load
        try:
            self._native.submit(id(load), load.native.jobs, load.native.ending, load.native.buffer)
        except OSError:  # closed
            del self._native_reads[id(load)]
            load.drop()

    def queues(self, slot: Slot, num_samples: int) -> bool:
        """Return whether native threads alone fill a slot, so that a window can be queued for memory still in use."""
        can_queue = num_samples and (self._stamp or self._in_memory) and self._native is not None and slot.queues
        return bool(can_queue and self._plain >= slot.kinds.keys())

    def _rows_of(self, window: Window, fields: Mapping[str, Destination]) -> NativeTasks:
        """Return the tasks that read a window of fields whose samples are rows of the file, or are in memory.

        Tasks for as many samples are made once, and then aimed at the samples of each window.
        """
        num_samples = len(window.samples)
        if num_samples not in self._made:
            nothing, tasks = np.zeros(num_samples, np.int64), list[Any]()
            for name in fields:
                if name in self._whole:
                    tasks.append(RowGather(self._whole[name], nothing, NO_BYTES))
                else:
                    tasks += self._fields[name].tasks(nothing, nothing, NO_BYTES)
            if len(self._made) == KEPT_TASKS:
                self._made.clear()
            self._made[num_samples] = NativeTasks(tasks, self.files)
        return self._made[num_samples].for_window(window, [to.out for to in fields.values()])

    def _field_tasks(self, name: str, window: Window, to: Destination) -> Iterable[ReadTask]:
        """Return the tasks that read a field. Small fields are copied at once, and need no task."""
        out: Any = to.out
        if name in self._numbered:
            values = self._numbered[name](window.samples)
            out.view(values.dtype).reshape(values.shape)[:] = values
            return ()
        rows, destinations, samples = window.rows, window.destinations, window.samples
        if to.rows is not None:
            rows, destinations, samples = to.rows, np.arange(len(to.rows)), to.rows
        if name in self._whole:
            gather = RowGather(self._whole[name], samples, out)
            if out.nbytes > QUICK_BYTES:
                return (gather,)
            gather(self.files)
            return ()
        if not len(window.samples):  # an empty last batch
            return ()
        return self._fields[name].tasks(rows, destinations, out)

    def close(self) -> None:
        """Stop and join the threads, and close the file. Tasks that have not begun are dropped.

        A hanging thread is not waited for. It keeps the file open until its read returns.
        """
        if not self.is_usable:
            self.files.close()
            self.has_ended.set()
            return
        if threading.current_thread() in self._threads:  # called by the garbage collector during a task
            threading.Thread(target=self.close, name="h5chunk-closer", daemon=True).start()
            return
        self._is_closed = True
        self.cancel()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        end = math.inf if self.wait_s is None else time.monotonic() + self.wait_s
        if not self._join(threads, end):
            threading.Thread(target=self._end, args=(threads,), name="h5chunk-closer", daemon=True).start()
        else:
            self._end(threads)

    def _join(self, threads: list[threading.Thread], end: float) -> bool:
        def remaining_s() -> float:
            return max(0.0, min(end - time.monotonic(), 1e9))

        have_ended = self._native is None or self._native.close(remaining_s())
        for thread in threads:
            if thread.is_alive():  # else it was not started
                thread.join(remaining_s())
        return have_ended and not any(thread.is_alive() for thread in threads)

    def _end(self, threads: list[threading.Thread]) -> None:
        self._join(threads, math.inf)
        if self._native is not None:
            self._native.free()
        self._drop_native()
        self.files.close()
        self._forget()
        self.has_ended.set()

    def _forget(self) -> None:
        for field in self._fields.values():
            field.cache.forget()

    def cancel(self) -> None:
        """Drop the tasks that have not begun. Their windows end with an error."""
        if self._native is not None:
            self._native.cancel()
        ends = 0  # number of requests that a thread should end
        with suppress(Empty):
            while True:
                if (task := self._tasks.get_nowait()) is None:
                    ends += 1
                else:
                    task[0].drop()
        for _ in range(ends):
            self._tasks.put(None)
