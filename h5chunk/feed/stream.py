"""A stream of windows, epoch after epoch, and their batches in order; echoed if asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from h5chunk.feed.batchmaker import Maker, Tensors
from h5chunk.feed.pipeline import Load, Readers
from h5chunk.plan.echo import AUTO, MAX_AUTO_PASSES, echo_pass, num_echoed
from h5chunk.plan.order import Order, Window


@dataclass
class EpochReport:
    """What an epoch gave so far.

    Attributes
    ----------
    batches, samples : int
        Handed out, echoes included.
    fresh_samples : int
        Of those, not echoed.
    seconds : float
        From the first request to the last, with opening the file, and all that the caller did meanwhile.
    waited_s : float
        Of those, in which the caller waited for data. On a GPU the copy may be waited for there, uncounted.
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


class WindowStream:
    """Keeps windows coming and gives their batches.

    Parameters
    ----------
    readers : Readers
    slots : list of slots
        One more than windows are open at a time, at least; another one with ``echo="auto"``.
    order : Order
        Of the first epoch. With an echo its windows come one after the other (``interleave=1``).
    start : int
        The first epoch's first batch.
    maker : Maker
    late : bool
        A batch lies in its slot until the next one is asked for: the slot stays so long. Else it was copied, or has
        memory of its own.
    echo : float or "auto"
    once : bool
        One epoch alone: nothing is read beyond it.
    """

    def __init__(
        self,
        readers: Readers,
        slots: list[Any],
        order: Order,
        maker: Maker,
        *,
        late: bool,
        echo: float | str = 1,
        once: bool = False,
        start: int = 0,
    ) -> None:
        self._readers, self._free, self._maker = readers, slots, maker
        self._late, self._echo = late, echo
        self._seed, self._batch_size = order.seed, order.batch_size
        self._windows = _windows(order, once, start)
        self._places: dict[tuple[int, int], tuple[_Open, int]] = {}
        self._echoing: _Open | None = None  # its batches were given; kept for more of them while others are late
        self._fill()

    def _fill(self) -> None:
        while self._free and (following := next(self._windows, None)) is not None:
            epoch, window = following
            opened = _Open(self._readers.load(window, self._free.pop()), epoch, self._batch_size, self._maker)
            for place, number in enumerate(window.batches):
                self._places[epoch, number] = opened, place

    def batches(self, order: Order, report: EpochReport, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from ``start`` on, which only the first has; epochs come one after the other."""
        self._report = report
        report.waited_s += time.perf_counter() - report.started  # starting threads, opening the file
        for number in range(start, order.num_batches):
            opened, place = self._places.pop((order.epoch, number))
            if not opened.load.is_ready:
                yield from self._echoes_until_ready(opened.load)
                self._wait(opened.load)
            last = opened.left == 1
            yield from self._give(opened.take(place), opened if last and self._echo == 1 else None, fresh=True)
            if not last or self._echo == 1:
                continue
            if self._echo == AUTO:
                if self._echoing is not None:
                    self._release(self._echoing)
                self._echoing = opened
            else:
                due, before = (num_echoed(float(self._echo), n) for n in (number + 1, number + 1 - len(opened)))
                for batch in islice(opened.echoes(self._seed), due - before):
                    yield from self._give(batch, None)
                self._release(opened)

    def _echoes_until_ready(self, load: Load) -> Iterator[Any]:
        """With "auto": batches of the last window again, as long as there is nothing else."""
        last = self._echoing
        while last is not None and not load.is_ready and last.num_echoed < (MAX_AUTO_PASSES - 1) * len(last):
            yield from self._give(next(last.echoes(self._seed)), None)
            last.num_echoed += 1

    def _wait(self, load: Load) -> None:
        waits = time.perf_counter()
        load.wait(self._readers.timeout_s)
        self._report.waited_s += time.perf_counter() - waits

    def _give(self, batch: Tensors, done: _Open | None, *, fresh: bool = False) -> Iterator[Any]:
        """One batch; ``done`` is the window whose last one it is."""
        num_samples = len(batch[0])
        if done is not None and not self._late:
            self._release(done)
        self._report.batches += 1
        self._report.samples += num_samples
        self._report.fresh_samples += num_samples if fresh else 0
        self._report.seconds = time.perf_counter() - self._report.started
        yield batch if self._maker.transform is None else self._maker.transform(batch)
        if done is not None and self._late:
            self._release(done)

    def _release(self, opened: _Open) -> None:
        opened.load.slot.release()
        self._free.append(opened.load.slot)
        self._fill()


class _Open:
    """A window whose batches are being taken; its length is their number."""

    def __init__(self, load: Load, epoch: int, batch_size: int, maker: Maker) -> None:
        self.load, self._epoch, self._batch_size, self._maker = load, epoch, batch_size, maker
        self.left, self.num_echoed = len(load.window.batches), 0
        self._received = False
        self._together = maker.num_together(batch_size)
        self._made: dict[int, Tensors] = {}
        self._echoes: Iterator[Tensors] | None = None

    def __len__(self) -> int:
        return len(self.load.window.batches)

    def take(self, place: int) -> Tensors:
        """A batch. It is made with those beside it, if they are small."""
        self.load.wait()
        if not self._received:
            self.load.slot.receive()
            self._received = True
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
        """Batches of the window shuffled again, and again; each call goes on where the last one stopped."""
        if self._echoes is None:
            self._echoes = _echoes(self.load, seed, self._epoch, self._batch_size, self._maker)
        return self._echoes


def _echoes(load: Load, seed: int, epoch: int, batch_size: int, maker: Maker) -> Iterator[Tensors]:
    window = load.window
    for number in count():
        order = echo_pass(len(window.samples), seed, epoch, window.batches[0], number)
        for first in range(0, len(order), batch_size):
            yield from maker.make(load.slot.gather(order[first : first + batch_size]), batch_size, gathered=True)


def _windows(order: Order, once: bool, start: int) -> Iterator[tuple[int, Window]]:
    while order.num_batches:
        for window in order.windows(start):
            yield order.epoch, window
        if once:
            return
        order, start = replace(order, epoch=order.epoch + 1), 0
