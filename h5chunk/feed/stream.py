"""Stream windows epoch after epoch, and give their batches in order; each window several times where data is echoed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from h5chunk.errors import FileError, printable
from h5chunk.feed.batches import BatchMaker, Passthrough, Tensors
from h5chunk.feed.layout import Layouts, slot_bytes
from h5chunk.feed.memory import PinnedMemory
from h5chunk.feed.read_pool import ReadPool, WindowRead
from h5chunk.feed.slots import BatchMemory, CpuSlot, CudaSlot
from h5chunk.plan.order import Order, Window
from h5chunk.plan.slots import SlotPlan, echo_pass, num_echoed
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.several import DirectField


@dataclass
class EpochReport:
    """Counts and times of an epoch so far.

    Attributes
    ----------
    batches, samples : int
        Handed out, with echoes.
    fresh_samples : int
        Of those, the samples that are no echoes.
    seconds : float
        From the first request to the last, with the opening of the file, and all that the caller did meanwhile.
    waited_s : float
        Of those, the seconds in which the caller waited for data. On a GPU the wait for a copy is not counted.
    """

    batches: int = 0
    samples: int = 0
    fresh_samples: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    started: float = field(default_factory=time.perf_counter, repr=False, compare=False)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def fresh_samples_per_s(self) -> float:
        return self.fresh_samples / self.seconds if self.seconds else 0.0

    def add(self, num_samples: int, *, fresh: bool) -> None:
        """Count a batch that is handed out now."""
        self.batches += 1
        self.samples += num_samples
        self.fresh_samples += num_samples if fresh else 0
        self.seconds = time.perf_counter() - self.started


@dataclass(frozen=True)
class DataSource:
    """The fields of a data set, and how they are read.

    Attributes
    ----------
    reader : H5Reader
    direct : dict of str to DirectField
        The fields that are read by byte ranges.
    why : dict of str to str
        Why a field is read through HDF5, for those that are.
    numbered : dict of str to callable
        The fields that are not in the file: see `ReadPool`.
    layouts : dict of str to FieldLayout or MatrixLayout
    device : torch.device
    num_threads : int
    timeout_s : float, optional
    """

    reader: H5Reader
    direct: dict[str, DirectField]
    why: dict[str, str]
    numbered: dict[str, Callable[[np.ndarray], np.ndarray]]
    layouts: Layouts
    device: torch.device
    num_threads: int
    timeout_s: float | None

    def open(self) -> ReadPool:
        """Start the threads."""
        how: dict[str, Any] = {"numbered": self.numbered, "timeout_s": self.timeout_s}
        return ReadPool(self.reader, self.direct, self.num_threads, **how)


Maker = BatchMaker | Passthrough


def open_stream(
    source: DataSource,
    plan: SlotPlan,
    maker: Maker,
    *,
    lends_slot: bool,
    echo: float = 1,
    once: bool = False,
    start: int = 0,
) -> tuple[WindowStream, Callable[[], None]]:
    """Start reading the windows of a plan, and return the stream and the function that ends it.

    ``lends_slot``, ``echo``, ``once`` and ``start`` are those of `WindowStream`.
    """
    resources = _Resources()
    try:
        slots = resources.slots(source, plan, lends_slot)
        resources.pool = source.open()
        resources.planner = _Planner(resources.pool, slots)
        stream = WindowStream(
            resources.pool,
            resources.planner,
            plan.order,
            maker,
            lends_slot=lends_slot,
            echo=echo,
            once=once,
            start=start,
        )
        return stream, resources.close
    except BaseException:
        resources.close()
        raise


class _Resources:
    """The pinned memory and threads of a stream."""

    def __init__(self) -> None:
        self.pool: ReadPool | None = None
        self.planner: _Planner | None = None
        self._pinned: PinnedMemory | None = None
        self._copies: Any = None

    def slots(self, source: DataSource, plan: SlotPlan, lends_slot: bool) -> list[Any]:
        """Make the slots of a plan."""
        layouts, num_samples = source.layouts, plan.window_samples
        if source.device.type == "cpu":
            memory = None if lends_slot else BatchMemory()
            gathered = BatchMemory()
            return [CpuSlot(layouts, num_samples, memory, gathered) for _ in range(plan.num_slots)]
        self._copies = torch.cuda.Stream(source.device)
        num_bytes = slot_bytes(layouts, num_samples)
        with torch.cuda.device(source.device):
            self._pinned = PinnedMemory(plan.num_slots * num_bytes)
        parts = self._pinned.bytes[: plan.num_slots * num_bytes].reshape(plan.num_slots, num_bytes)
        return [CudaSlot(layouts, num_samples, part, self._copies) for part in parts]

    def close(self) -> None:
        """End the threads, then give the memory back; in the background, if the planner hangs or calls this itself."""
        if self.planner is None or self.planner.close():
            self._free()
        else:
            threading.Thread(target=self._close_later, name="h5chunk-closer", daemon=True).start()

    def _close_later(self) -> None:
        assert self.planner is not None
        self.planner.join()
        self._free()

    def _free(self) -> None:
        if self.pool is not None:
            self.pool.close()
        if self._pinned is not None:
            self._copies.synchronize()
            self._pinned.close()
            self._pinned = None


class _Planner:
    """Starts reading windows in a thread of its own, as slots become free: the consumer's thread is spared that.

    Attributes
    ----------
    free : queue of slots
    opened : queue of _OpenWindow, or the exception that ended the thread
    """

    def __init__(self, pool: ReadPool, slots: list[Any]) -> None:
        self._pool = pool
        self.free: SimpleQueue[Any] = SimpleQueue()
        self.opened: SimpleQueue[_OpenWindow | BaseException] = SimpleQueue()
        for slot in slots:
            self.free.put(slot)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, windows: Iterator[tuple[int, Window]]) -> None:
        """Start reading these windows."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(windows,), name="h5chunk-planner", daemon=True)
        self._thread.start()

    def get(self) -> _OpenWindow:
        """Return the next window that was opened.

        Raises
        ------
        WorkerError
            The planner hangs, as in a file system that does not answer.
        FileError
            It was closed.
        """
        try:
            opened = self.opened.get(timeout=self._pool.timeout_s)
        except Empty:
            raise self._pool.hangs() from None
        if isinstance(opened, BaseException):
            raise opened
        return opened

    def end(self) -> None:
        """End the thread. Windows that it opened stay in the queue.

        Raises
        ------
        WorkerError
            It hangs.
        """
        self._stop.set()
        self.free.put(None)  # it may be waiting for a slot
        if not self.join(self._pool.timeout_s):
            raise self._pool.hangs()
        for slot in filter(None, [self.free.get() for _ in range(self.free.qsize())]):
            self.free.put(slot)

    def close(self) -> bool:
        """End the thread, and whoever waits for a window; return whether it has ended."""
        self._stop.set()
        self.free.put(None)
        has_ended = self._thread is not threading.current_thread() and self.join(self._pool.wait_s)
        self.opened.put(FileError(f"{printable(self._pool.path)}: closed while it was read"))
        return has_ended

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread, and return whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self, windows: Iterator[tuple[int, Window]]) -> None:
        try:
            for epoch, window in windows:
                slot = self.free.get()
                if self._stop.is_set():
                    self.free.put(slot)
                    return
                self.opened.put(_OpenWindow(self._pool.load(window, slot), epoch))
        except BaseException as error:  # raised again in the consumer's thread
            self.opened.put(error)


class BatchSource(Protocol):
    """Gives the batches of epochs: `WindowStream`, or `h5chunk.feed.resident.Resident`."""

    @property
    def is_usable(self) -> bool:
        """Whether this process may go on with it."""

    def batches(self, order: Order, report: EpochReport, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from ``start`` on."""


class WindowStream:
    """Read windows ahead and give their batches.

    Parameters
    ----------
    pool : ReadPool
    planner : _Planner
        With at least one slot more than the windows that are open at a time.
    order : Order
        Of the first epoch. With an echo its windows come one after the other (``interleave=1``).
    start : int
        The first epoch's first batch.
    maker : BatchMaker or Passthrough
    lends_slot : bool
        A batch lies in its slot until the next one is asked for, and so long the slot stays. Else batches have memory
        of their own.
    echo : float
    once : bool
        Read one epoch, and nothing beyond it.
    """

    def __init__(
        self,
        pool: ReadPool,
        planner: _Planner,
        order: Order,
        maker: Maker,
        *,
        lends_slot: bool,
        echo: float = 1,
        once: bool = False,
        start: int = 0,
    ) -> None:
        self._pool, self._planner, self._maker = pool, planner, maker
        self._lends_slot, self._echo, self._once = lends_slot, echo, once
        self._process = os.getpid()
        self._open: dict[_OpenWindow, None] = {}  # in the order in which they are read
        self._batches: dict[tuple[int, int], tuple[_OpenWindow, int]] = {}
        self._begin(order, start)

    @property
    def is_usable(self) -> bool:
        """Whether its threads are in this process: a fork leaves them behind."""
        return self._process == os.getpid()

    def _begin(self, order: Order, start: int) -> None:
        self._next: tuple[int, int] | None = (order.epoch, start)
        self._planner.begin(_windows(order, self._once, start))

    def _begin_again(self, order: Order, start: int) -> None:
        """Go on elsewhere, with the same threads and memory. What is being read is waited for, and dropped."""
        self._planner.end()
        while not self._planner.opened.empty():
            self._receive_window()
        self._pool.cancel()
        self._batches.clear()
        for opened in list(self._open):
            opened.read.settle(self._pool.timeout_s)
            self._release(opened)
        self._begin(order, start)

    def _receive_window(self) -> None:
        """Take over the next window that the planner has opened."""
        if not self.is_usable:
            path = printable(self._pool.path)
            raise FileError(f"{path}: read ahead by threads that a fork leaves behind: start again")
        opened = self._planner.get()
        self._open[opened] = None
        for number, batch in enumerate(opened.read.window.batches):
            self._batches[opened.epoch, batch] = opened, number

    def batches(self, order: Order, report: EpochReport, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from ``start`` on. What was read ahead is used, if it is of these."""
        if self._next != (order.epoch, start):
            self._begin_again(order, start)
        self._next, self._report = None, report
        report.waited_s += time.perf_counter() - report.started  # starting threads, opening the file
        for number in range(start, order.num_batches):
            while (order.epoch, number) not in self._batches:
                self._receive_window()
            opened, place = self._batches.pop((order.epoch, number))
            opened.receive(self._maker, order.batch_size, self._wait)
            batch, last = opened.take(place), opened.left == 0
            if number + 1 == order.num_batches and self._echo == 1 and not self._lends_slot:
                self._next = order.epoch + 1, 0  # whoever counts batches stops here, and that is an end, too
            yield from self._give(batch, opened if last and self._echo == 1 else None, fresh=True)
            if last and self._echo != 1:
                due, before = (num_echoed(self._echo, n) for n in (number + 1, number + 1 - len(opened)))
                for batch in islice(opened.echoes(self._maker, order), due - before):
                    yield from self._give(batch, None, fresh=False)
                self._release(opened)
        self._next = order.epoch + 1, 0

    def _wait(self, read: WindowRead) -> None:
        waits = time.perf_counter()
        read.wait(self._pool.timeout_s)
        self._report.waited_s += time.perf_counter() - waits

    def _give(self, batch: Tensors, done: _OpenWindow | None, *, fresh: bool) -> Iterator[Any]:
        """One batch; ``done`` is the window whose last one it is."""
        if done is not None and not self._lends_slot:
            self._release(done)
        self._report.add(len(batch[0]), fresh=fresh)
        yield self._maker.finish(batch)
        if done is not None and self._lends_slot:
            self._release(done)

    def _release(self, opened: _OpenWindow) -> None:
        """Give the slot of a window back."""
        del self._open[opened]
        opened.batches = None
        opened.read.slot.release()
        self._planner.free.put(opened.read.slot)


class _OpenWindow:
    """A window whose batches are being taken; its length is their number."""

    def __init__(self, read: WindowRead, epoch: int) -> None:
        self.read, self.epoch = read, epoch
        self.left = len(self)
        self.batches: Any = None  # once it was read

    def __len__(self) -> int:
        return len(self.read.window.batches)

    def receive(self, maker: Maker, batch_size: int, wait: Callable[[WindowRead], None]) -> None:
        """Wait until it is read, and raise its error if there is one."""
        if self.batches is not None:
            return
        if not self.read.is_ready:
            wait(self.read)
        self.read.wait()
        self.read.slot.receive()
        self.batches = maker.open(self.read.slot.window, batch_size)

    def take(self, place: int) -> Tensors:
        """The batch at a place, once."""
        self.left -= 1
        return self.batches.take(place)

    def echoes(self, maker: Any, order: Order) -> Iterator[Tensors]:
        """Batches of the window shuffled again, and again."""
        window, size = self.read.window, order.batch_size
        for number in count():
            samples = echo_pass(len(window.samples), order.seed, self.epoch, window.batches[0], number)
            for first in range(0, max(1, len(samples)), size):  # one without samples, where other ranks have some
                yield from maker.make(self.read.slot.gather(samples[first : first + size]), size)


def _windows(order: Order, once: bool, start: int) -> Iterator[tuple[int, Window]]:
    while order.num_batches:
        for window in order.windows(start):
            yield order.epoch, window
        if once:
            return
        order, start = replace(order, epoch=order.epoch + 1), 0
