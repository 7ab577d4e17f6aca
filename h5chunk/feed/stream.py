"""A stream of windows, epoch after epoch, and their batches in order; each window several times if asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, Protocol

import numpy as np
import torch

from h5chunk.feed.batches import Maker, Tensors
from h5chunk.feed.read_pool import Direct, ReadPool, WindowRead
from h5chunk.feed.slots import BatchMemory, CpuSlot, CudaSlot, Layouts, PinnedMemory, slot_bytes
from h5chunk.plan.order import Order, Window
from h5chunk.plan.slots import SlotPlan, echo_pass, num_echoed
from h5chunk.store.read.reader import H5Reader


@dataclass
class EpochReport:
    """What an epoch gave so far.

    Attributes
    ----------
    batches, samples : int
        Handed out, echoes included.
    fresh_samples : int
        Of those, the samples that are no echoes.
    seconds : float
        From the first request to the last, with opening the file, and all that the caller did meanwhile.
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
    """The fields of a file, and what they are read with.

    Attributes
    ----------
    reader : H5Reader
    direct : dict of str to Direct
        The fields that are read by byte ranges.
    why : dict of str to str
        The fields that are read through HDF5, and why.
    numbered : dict of str to callable
        The fields that are not in the file: see `ReadPool`.
    layouts : dict of str to FieldLayout or MatrixLayout
    device : torch.device
    num_threads : int
    mapped : bool
    timeout_s : float, optional
    """

    reader: H5Reader
    direct: dict[str, Direct]
    why: dict[str, str]
    numbered: dict[str, Callable[[np.ndarray], np.ndarray]]
    layouts: Layouts
    device: torch.device
    num_threads: int
    mapped: bool
    timeout_s: float | None

    def open(self) -> ReadPool:
        """Start the threads."""
        return ReadPool(
            self.reader,
            self.direct,
            self.num_threads,
            numbered=self.numbered,
            mapped=self.mapped,
            timeout_s=self.timeout_s,
        )


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
        stream = WindowStream(
            resources.pool, slots, plan.order, maker, lends_slot=lends_slot, echo=echo, once=once, start=start
        )
        return stream, resources.close
    except BaseException:
        resources.close()
        raise


class _Resources:
    """The pinned memory and threads of a stream."""

    def __init__(self) -> None:
        self.pool: ReadPool | None = None
        self._pinned: PinnedMemory | None = None
        self._copies: Any = None

    def slots(self, source: DataSource, plan: SlotPlan, lends_slot: bool) -> list[Any]:
        """The slots of a plan."""
        if source.device.type == "cpu":
            memory = None if lends_slot else BatchMemory()
            gathered = BatchMemory()
            return [CpuSlot(source.layouts, plan.window_samples, memory, gathered) for _ in range(plan.num_slots)]
        self._copies = torch.cuda.Stream(source.device)
        num_bytes = slot_bytes(source.layouts, plan.window_samples)
        with torch.cuda.device(source.device):
            self._pinned = PinnedMemory(plan.num_slots * num_bytes)
        parts = self._pinned.bytes[: plan.num_slots * num_bytes].reshape(plan.num_slots, num_bytes)
        return [CudaSlot(source.layouts, part, self._copies) for part in parts]

    def close(self) -> None:
        """End the threads, then give the memory back."""
        if self.pool is not None:
            self.pool.close()
        if self._pinned is not None:
            self._copies.synchronize()
            self._pinned.close()
            self._pinned = None


class BatchSource(Protocol):
    """Gives the batches of epochs: `WindowStream`, or `h5chunk.feed.resident.Resident`."""

    def batches(self, order: Order, report: EpochReport, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from ``start`` on."""


class WindowStream:
    """Keeps windows coming and gives their batches.

    Parameters
    ----------
    pool : ReadPool
    slots : list of slots
        One more than windows are open at a time, at least.
    order : Order
        Of the first epoch. With an echo its windows come one after the other (``interleave=1``).
    start : int
        The first epoch's first batch.
    maker : Maker
    lends_slot : bool
        A batch lies in its slot until the next one is asked for: the slot stays so long. Else it was copied, or has
        memory of its own.
    echo : float
    once : bool
        One epoch alone: nothing is read beyond it.
    """

    def __init__(
        self,
        pool: ReadPool,
        slots: list[Any],
        order: Order,
        maker: Maker,
        *,
        lends_slot: bool,
        echo: float = 1,
        once: bool = False,
        start: int = 0,
    ) -> None:
        self._pool, self._free, self._maker = pool, slots, maker
        self._lends_slot, self._echo = lends_slot, echo
        self._seed, self._batch_size = order.seed, order.batch_size
        self._windows = _windows(order, once, start)
        self._open: dict[tuple[int, int], tuple[_OpenWindow, int]] = {}
        self._fill()

    def _fill(self) -> None:
        while self._free and (following := next(self._windows, None)) is not None:
            epoch, window = following
            opened = _OpenWindow(self._pool.load(window, self._free.pop()), epoch, self._batch_size, self._maker)
            for number, batch in enumerate(window.batches):
                self._open[epoch, batch] = opened, number

    def batches(self, order: Order, report: EpochReport, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from ``start`` on, which only the first has; epochs come one after the other."""
        self._report = report
        report.waited_s += time.perf_counter() - report.started  # starting threads, opening the file
        for number in range(start, order.num_batches):
            opened, place = self._open.pop((order.epoch, number))
            if not opened.load.is_ready:
                self._wait(opened.load)
            last = opened.left == 1
            yield from self._give(opened.take(place), opened if last and self._echo == 1 else None, fresh=True)
            if last and self._echo != 1:
                due, before = (num_echoed(self._echo, n) for n in (number + 1, number + 1 - len(opened)))
                for batch in islice(opened.echoes(self._seed), due - before):
                    yield from self._give(batch, None, fresh=False)
                self._release(opened)

    def _wait(self, load: WindowRead) -> None:
        waits = time.perf_counter()
        load.wait(self._pool.timeout_s)
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
        opened.load.slot.release()
        self._free.append(opened.load.slot)
        self._fill()


class _OpenWindow:
    """A window whose batches are being taken; its length is their number."""

    def __init__(self, load: WindowRead, epoch: int, batch_size: int, maker: Maker) -> None:
        self.load, self._epoch, self._batch_size, self._maker = load, epoch, batch_size, maker
        self.left = len(load.window.batches)
        self._received, self._together = False, 1
        self._made: dict[int, Tensors] = {}

    def __len__(self) -> int:
        return len(self.load.window.batches)

    def take(self, place: int) -> Tensors:
        """A batch. It is made with those beside it, if they are small."""
        self.load.wait()
        if not self._received:
            self.load.slot.receive()
            self._received, self._together = True, self._maker.num_together(self._batch_size)
        if place not in self._made:
            first = place - place % self._together
            start, stop = first * self._batch_size, (first + self._together) * self._batch_size
            self._make(first, start, stop)
        if place not in self._made:  # a last one without samples, as other ranks have it
            self._make(place, len(self.load.window.samples), stop)
        self.left -= 1
        return self._made.pop(place)

    def _make(self, first: int, start: int, stop: int) -> None:
        """Batch ``first`` and those behind it, of these samples of the window."""
        samples = tuple(field[start:stop] for field in self.load.slot.window)
        self._made.update(enumerate(self._maker.make(samples, self._batch_size), first))

    def echoes(self, seed: int) -> Iterator[Tensors]:
        """Batches of the window shuffled again, and again."""
        window, size = self.load.window, self._batch_size
        for number in count():
            order = echo_pass(len(window.samples), seed, self._epoch, window.batches[0], number)
            for first in range(0, len(order), size):
                yield from self._maker.make(self.load.slot.gather(order[first : first + size]), size, gathered=True)


def _windows(order: Order, once: bool, start: int) -> Iterator[tuple[int, Window]]:
    while order.num_batches:
        for window in order.windows(start):
            yield order.epoch, window
        if once:
            return
        order, start = replace(order, epoch=order.epoch + 1), 0
