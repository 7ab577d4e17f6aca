"""Reading ahead: threads fill slots with windows, in the order in which their batches will be wanted.

A slot holds one window, each of its samples at its place in the shuffled window: a batch is a slice of it. Windows are
cut into parts of a few megabytes, which threads read side by side. Nothing here knows what a batch is for;
`h5chunk.feed.loader` does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.plan.order import Window
from h5chunk.store.direct import DirectField
from h5chunk.store.reader import H5Reader

PART_BYTES = 4 << 20  # what a thread reads at a time: small enough to share a window out, large enough not to count
WHOLE_ROW_BYTES = 64  # fields of such small rows, labels mostly, are kept in memory whole
WHOLE_BYTES = 64 << 20  # up to this size
WAIT_S = 120.0  # after which threads that finish nothing are an error

Part = Callable[[], None]


class Slot(Protocol):
    """Where a window goes. Only the consumer's thread calls it."""

    def begin(self, num_samples: int) -> Mapping[str, memoryview]:
        """Make room; gives writable bytes of each field, sample after sample."""


class Load:
    """A window on its way into a slot; ``path`` is where from, for messages."""

    def __init__(self, slot: Any, window: Window, num_parts: int, path: Path) -> None:
        self.slot, self.window = slot, window
        self.error: BaseException | None = None
        self._path = path
        self._left = num_parts
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._process = os.getpid()
        if not num_parts:
            self._ready.set()

    @property
    def is_ready(self) -> bool:
        """Whether all parts are done, or have failed."""
        return self._ready.is_set()

    def run(self, part: Part) -> None:
        """Do one part; the last one makes it ready. An error is kept for the consumer."""
        try:
            if self.error is None:
                part()
        except BaseException as error:  # raised again by wait()
            self.error = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._ready.set()

    def drop(self) -> None:
        """Do one part no more."""
        self.run(self._closed)

    def _closed(self) -> None:
        raise FileError(f"{printable(self._path)}: closed while it was read")

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the slot is filled; raise what went wrong. Every ``timeout_s`` some part has to be done."""
        if os.getpid() != self._process:
            raise FileError(f"{printable(self._path)}: read ahead by threads that a fork leaves behind: start again")
        left = self._left
        while not self._ready.wait(timeout_s):
            if self._left == left:
                shown = printable(self._path)
                raise FileError(f"{shown}: no data came for {timeout_s:.0f} s: a thread or the file system hangs")
            left = self._left
        if self.error is not None:
            raise self.error


class Readers:
    """Threads that read parts of windows. Holds the file open until it is closed.

    Parameters
    ----------
    reader : H5Reader
        For the fields that need HDF5: one thread at a time reads those.
    direct : dict of str to DirectField
        For the others.
    num_threads : int
    """

    def __init__(self, reader: H5Reader, direct: Mapping[str, DirectField], num_threads: int) -> None:
        self._reader, self._direct = reader, direct
        self._process = os.getpid()
        self._hdf5 = threading.Lock()
        self._tasks: SimpleQueue[tuple[Load, Part] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._descriptor = _open(reader.path)
        try:
            reader.check_unchanged(self._descriptor)
            self._whole = {
                name: field.read_all(self._descriptor)
                for name, field in direct.items()
                if field.is_one_run and field.row_bytes <= WHOLE_ROW_BYTES and field.num_bytes <= WHOLE_BYTES
            }
            for _ in range(num_threads):
                thread = threading.Thread(target=_work, args=(self._tasks,), name="h5chunk-reader", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def load(self, window: Window, slot: Slot) -> Load:
        """Start reading a window into a slot."""
        parts: list[Part] = []
        for name, buffer in slot.begin(len(window.samples)).items():
            if name in self._whole:
                _gather(self._whole[name], window.samples, buffer)
            elif name in self._direct:
                parts += self._parts(self._direct[name], buffer, window)
            else:
                parts.append(partial(self._read_by_hdf5, name, buffer, window.samples))
        load = Load(slot, window, len(parts), self._reader.path)
        for part in parts:
            self._tasks.put((load, part))
        if not self._threads:  # closed: the consumer shall not wait
            self._drop_tasks()
        return load

    def _parts(self, field: DirectField, buffer: memoryview, window: Window) -> Iterator[Part]:
        """The runs of a window, in parts for the threads: plain lists, as NumPy calls there would fight for the GIL."""
        borders = field.borders(window.rows)
        rows = window.rows[borders[:-1]].tolist()
        starts, cuts = (window.places * field.row_bytes).tolist(), borders.tolist()
        per_part = max(1, PART_BYTES * len(rows) // max(1, len(buffer)))
        for first in range(0, len(rows), per_part):
            last = min(first + per_part, len(rows))
            yield partial(self._read_runs, field, buffer, rows[first:last], starts, cuts[first : last + 1])

    def _read_runs(
        self, field: DirectField, buffer: memoryview, rows: list[int], starts: list[int], cuts: list[int]
    ) -> None:
        size = field.row_bytes
        for row, (first, last) in zip(rows, pairwise(cuts), strict=True):
            field.read_run(self._descriptor, row, [buffer[start : start + size] for start in starts[first:last]])
        self._reader.check_unchanged(self._descriptor)

    def _read_by_hdf5(self, name: str, buffer: memoryview, samples: np.ndarray) -> None:
        field = self._reader.fields[name]
        out = np.frombuffer(buffer, field.dtype).reshape(len(samples), *field.sample_shape)
        with self._hdf5:
            self._reader.read(name, samples, out)
        self._reader.check_unchanged(self._descriptor)  # HDF5 gives zeros for what was cut off

    def close(self) -> None:
        """Stop and join the threads, and close the file. Parts that no thread has begun are dropped."""
        if os.getpid() != self._process:  # a fork has the descriptor, but neither the threads nor their locks
            os.close(self._descriptor)
            return
        if threading.current_thread() in self._threads:  # the garbage collector's call, in the middle of a part
            threading.Thread(target=self.close, name="h5chunk-closer", daemon=True).start()
            return
        self._drop_tasks()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        os.close(self._descriptor)
        self._reader.close()

    def _drop_tasks(self) -> None:
        with suppress(Empty):
            while task := self._tasks.get_nowait():
                task[0].drop()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(f"{printable(path)}: cannot be opened: {error.strerror}") from None


def _gather(values: np.ndarray, samples: np.ndarray, buffer: memoryview) -> None:
    out = np.frombuffer(buffer, values.dtype).reshape(len(samples), *values.shape[1:])
    np.take(values, samples, axis=0, out=out, mode="clip")  # another mode makes NumPy copy once more


def _work(tasks: SimpleQueue[tuple[Load, Part] | None]) -> None:
    while (task := tasks.get()) is not None:
        load, part = task
        load.run(part)
        del task, load, part  # they hold a slot
