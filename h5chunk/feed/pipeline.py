"""Reading ahead: threads fill slots with windows, in the order in which their batches will be wanted.

A slot holds one window, each of its samples at its place in the shuffled window: a batch is a slice of it. Windows are
cut into parts of a few megabytes, which threads read side by side; the thread that reads the last part finishes the
slot (on a GPU it starts the copy). Nothing here knows what a batch is for; `h5chunk.feed.loader` does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from h5chunk.errors import FileError
from h5chunk.plan.order import Window
from h5chunk.store.direct import DirectField
from h5chunk.store.reader import H5Reader

PART_BYTES = 4 << 20  # what a thread reads at a time: small enough to share a window out, large enough not to count
WAIT_S = 120.0  # after which a thread that does not answer is an error

Task = Callable[[], None]


class Slot(Protocol):
    """Where a window goes."""

    def begin(self, num_samples: int) -> Mapping[str, memoryview]:
        """Make room; gives writable bytes of each field, sample after sample. Called by the consumer."""

    def filled(self) -> None:
        """All bytes are there. Called by the thread that read the last part."""


class Load:
    """A window on its way into a slot."""

    def __init__(self, slot: Any, window: Window, num_parts: int) -> None:
        self.slot, self.window = slot, window
        self.error: BaseException | None = None
        self._left = num_parts
        self._lock = threading.Lock()
        self._ready = threading.Event()

    def run(self, part: Task) -> None:
        """Do one part; the last one finishes the slot. An error is kept for the consumer."""
        try:
            if self.error is None:
                part()
        except BaseException as error:  # raised again by wait()
            self.error = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            try:
                if self.error is None:
                    self.slot.filled()
            except BaseException as error:
                self.error = error
            self._ready.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the slot is filled; raise what went wrong."""
        if not self._ready.wait(timeout_s):
            raise FileError(f"no data came for {timeout_s:.0f} s: a reading thread or the file system hangs")
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
        self._descriptor = os.open(reader.path, os.O_RDONLY | os.O_CLOEXEC)
        reader.check_unchanged(self._descriptor)
        self._hdf5 = threading.Lock()
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name="h5chunk-reader", daemon=True)
            for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, window: Window, slot: Slot) -> Load:
        """Start reading a window into a slot."""
        buffers = slot.begin(len(window.samples))
        parts = [part for name, buffer in buffers.items() for part in self._parts(name, buffer, window.samples)]
        load = Load(slot, window, len(parts))
        for part in parts:
            self._tasks.put(partial(load.run, part))
        return load

    def _parts(self, name: str, buffer: memoryview, samples: np.ndarray) -> Iterator[Task]:
        field = self._direct.get(name)
        if field is None:
            yield partial(self._read_by_hdf5, name, buffer, samples)
            return
        places, borders = field.runs(samples)
        num_parts = max(1, min(len(buffer) // PART_BYTES, len(borders) - 1))
        cuts = np.linspace(0, len(borders) - 1, num_parts + 1).astype(int)
        for first, last in pairwise(cuts):
            yield partial(self._read_runs, field, buffer, samples, places, borders[first : last + 1])

    def _read_runs(
        self, field: DirectField, buffer: memoryview, samples: np.ndarray, places: np.ndarray, borders: np.ndarray
    ) -> None:
        size = field.row_bytes
        starts = (places[borders[0] : borders[-1]] * size).tolist()
        rows = samples[places[borders[:-1]]].tolist()
        cuts = (borders - borders[0]).tolist()
        for number, row in enumerate(rows):
            run = [buffer[start : start + size] for start in starts[cuts[number] : cuts[number + 1]]]
            field.read_run(self._descriptor, row, run)

    def _read_by_hdf5(self, name: str, buffer: memoryview, samples: np.ndarray) -> None:
        field = self._reader.fields[name]
        out = np.frombuffer(buffer, field.dtype).reshape(len(samples), *field.sample_shape)
        with self._hdf5:
            self._reader.read(name, samples, out)

    def close(self) -> None:
        """Stop and join the threads, and close the file. Parts that no thread has begun are dropped."""
        while not self._tasks.empty():
            self._tasks.get()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        os.close(self._descriptor)
        with self._hdf5:
            self._reader.close()


def _work(tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds a slot
