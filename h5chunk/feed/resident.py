"""Keep all data on the device, and gather batches from it at the speed of the device's memory.

On the CPU, the next batches are copied while the caller uses the current one: this memory is the source of a stream.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from h5chunk.errors import FileError
from h5chunk.feed.batches import BatchMaker, EpochReport, Tensors
from h5chunk.feed.budget import LOADING_SLOTS
from h5chunk.feed.columns import Columns, slot_bytes
from h5chunk.feed.memory import KEPT, BatchMemory
from h5chunk.feed.skipping import Bad, check_skipped
from h5chunk.feed.slots import to_device
from h5chunk.feed.source import DataSource
from h5chunk.feed.stream import BadSamplesError, WindowStream
from h5chunk.native import available
from h5chunk.plan.draws import REPEAT, Draws
from h5chunk.plan.order import Epoch, Order, Window
from h5chunk.plan.selection import FixedSelection
from h5chunk.plan.slots import SlotPlan, echo_pass, num_echoed
from h5chunk.transforms.segments import as_array

AHEAD = 3  # windows per thread that are copied ahead
AHEAD_BYTES = 64 << 20  # limit on the windows that are copied ahead
TOGETHER_BYTES = 16 << 20  # small batches are copied several at a time, because each window has overhead in Python
QUICK_BYTES = 64 << 10  # copying a smaller batch is faster than passing it to a thread


class Resident:
    """All samples of a data set on the device. The batches of each epoch are gathered from them."""

    is_usable = True  # also in a forked process

    def __init__(self, source: DataSource, piece_samples: int, echo: float) -> None:
        """Read all samples, in the order of the file, ``piece_samples`` at a time."""
        self._device, self._echo, self._skipping, self._bad = source.device, echo, source.skipping, Bad()
        self._columns: Columns = ()
        while True:
            self._subset = source.subset
            try:
                self._read(source, piece_samples)
                break
            except BadSamplesError as error:
                self._bad |= error.bad
            samples = np.arange(source.reader.num_samples) if source.subset is None else source.subset
            source = replace(source, subset=np.setdiff1d(samples, list(self._bad)))
        self._memory = BatchMemory(KEPT * len(source.kinds)) if source.device.type == "cpu" else None
        self._ahead: _Ahead | None = None
        if self._memory is not None and available() and all(kind.is_fixed for kind in source.kinds.values()):
            self._ahead = _Ahead(source, self._columns)
        self._planned: dict[int, _DrawnOrder] = {}

    def _read(self, source: DataSource, piece_samples: int) -> None:
        num_samples, source = source.num_samples, replace(source, kinds=source.pieces)
        on_cpu = self._device.type == "cpu"  # then the whole data is one piece, which is kept without a copy
        piece_samples = num_samples if on_cpu else piece_samples
        order = Order(num_samples, chunk_samples=1, batch_size=piece_samples, window_chunks=1, shuffle=False)
        if source.subset is not None:
            order = replace(order, selection=FixedSelection(np.arange(num_samples + 1), source.subset))
        num_slots = 1 if on_cpu else LOADING_SLOTS
        plan = SlotPlan(order, num_slots, num_slots, piece_samples, slot_bytes(source.kinds, piece_samples))
        stream = WindowStream(source, plan, lends_slot=True, once=True)
        try:
            pieces = stream.windows(order)
            if on_cpu:
                self._columns = next(pieces)
                return
            kinds, samples = source.kinds.values(), np.arange(num_samples) if source.subset is None else source.subset
            allocate: Any = partial(_on_device, self._device)
            self._columns = tuple(kind.empty(samples, allocate) for kind in kinds)
            for number, piece in enumerate(pieces):
                for kind, column, part in zip(kinds, self._columns, piece, strict=True):
                    kind.put(column, number * piece_samples, part)
        finally:
            stream.close()

    def close(self) -> None:
        """Free the data and stop the threads."""
        for planned in self._planned.values():
            planned.wait()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._columns = ()

    def batches(self, order: Epoch, maker: BatchMaker, report: EpochReport, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch, starting at batch ``start``, while the next epoch's order is computed."""
        if not isinstance(order, Order) or not order.has_equal_batches:
            yield from self._one_by_one(order, maker, report, start)
            return
        planned = self._plan(order).result()[start * order.batch_size :]
        report.waited_s += time.perf_counter() - report.started
        self._plan(replace(order, epoch=order.epoch + 1))
        fresh = order.num_batches - start
        for number, batch in enumerate(self._batches(planned, order, maker, fresh, report)):
            report.add(maker.num_samples(batch), fresh=number < fresh)
            yield maker.finish(batch)

    def _one_by_one(self, order: Epoch, maker: BatchMaker, report: EpochReport, start: int) -> Iterator[Any]:
        for planned in order.keys(start):
            keys = self._without_bad(planned, max(1, len(planned)), order, report)
            samples = self._positions(keys, order)
            taken = maker.take(self._columns, to_device(samples, self._device), self._memory)
            try:
                made = maker.make(taken, Draws(order.seed, order.epoch, keys), max(1, len(keys)))
            except FileError as error:
                check_skipped(self._skipping, error)
                made = [self._made_again(planned, keys, order, maker, report)]
            for batch in made:
                report.add(len(keys), fresh=True)
                yield maker.finish(batch)

    def _without_bad(self, keys: np.ndarray, batch_size: int, order: Epoch, report: EpochReport) -> np.ndarray:
        """Replace the samples that could not be read."""
        if self._skipping is not None and self._bad:
            keys, replaced = self._skipping.replaced(keys, batch_size, self._bad, order)
            report.add_skipped(replaced)
        return keys

    def _made_again(
        self, planned: np.ndarray, keys: np.ndarray, order: Epoch, maker: BatchMaker, report: EpochReport, use: int = 0
    ) -> Tensors:
        """Make a batch, of which samples that turn out to be bad are replaced by others."""
        assert self._skipping is not None

        def make(own: np.ndarray) -> Tensors:
            samples = to_device(self._positions(own, order), self._device)
            taken = maker.take(self._columns, samples, self._memory)
            return maker.make(taken, Draws(order.seed, order.epoch, own, use), len(own))[0]

        _, batch, replaced = self._skipping.remade(planned, keys, self._bad, order, make)
        report.add_skipped(replaced)
        return batch

    def _batches(
        self, planned: np.ndarray, order: Order, maker: BatchMaker, fresh: int, report: EpochReport
    ) -> Iterator[Tensors]:
        """Yield the fresh batches, then the echoed batches. Small batches are gathered several at a time."""
        keys = self._without_bad(planned, order.batch_size, order, report)
        left = fresh + num_echoed(self._echo, fresh)
        without = fresh - math.ceil(len(keys) / order.batch_size)  # 1 if the last batch is empty
        together = 1 if self._memory is not None else maker.num_gathered(order.batch_size)
        if self._ahead is not None and maker.passes_columns:
            together = self._ahead.num_together(order.batch_size)
        for number in count():
            samples = self._positions(keys, order)
            draws = Draws(order.seed, order.epoch, keys, number, kept={}, whole=keys)
            first, size = 0, together * order.batch_size
            for gathered in self._gathered(samples, size, maker, order.batch_size):
                if not left:
                    return
                own = slice(first, first + size)
                try:
                    made = maker.make(gathered, draws.part(first, first + size), order.batch_size)
                except FileError as error:
                    check_skipped(self._skipping, error)
                    made = [self._made_again(planned[own], keys[own], order, maker, report, number)]
                first += size
                yield from made[:left]
                left -= len(made[:left])
            if left and (without if not number else not len(samples)):
                gathered = maker.take(self._columns, to_device(samples[:0], self._device), self._memory)
                yield from maker.make(gathered, draws.part(0, 0), order.batch_size)
                left -= 1
            if not left:
                return
            shuffled = echo_pass(len(keys), order.seed, order.epoch, 0, number)
            keys, planned = keys[shuffled], planned[shuffled]

    def _positions(self, keys: np.ndarray, order: Epoch) -> np.ndarray:
        """Convert the keys of samples to positions in the data that is kept."""
        # samples that replace bad ones are repetitions, whatever the order
        samples = order.numbers_of(keys) if self._skipping is None else keys % REPEAT
        return samples if self._subset is None else np.searchsorted(self._subset, samples)

    def _gathered(self, samples: np.ndarray, size: int, maker: BatchMaker, batch_size: int) -> Iterator[Columns]:
        if self._ahead is not None and self._ahead.is_worthwhile(batch_size):
            yield from self._ahead.windows(samples, size)
            return
        numbers = to_device(samples, self._device)
        for first in range(0, len(samples), size):  # a suspended generator must not keep the fields
            yield maker.take(self._columns, numbers.part(first, first + size), self._memory)

    def _plan(self, order: Order) -> _DrawnOrder:
        plan = self._planned.get(order.epoch)
        if plan is None or plan.order.selection is not order.selection:  # proportions may have changed
            plan = _DrawnOrder(order)
        self._planned = {epoch: other for epoch, other in self._planned.items() if epoch == order.epoch - 1}
        self._planned[order.epoch] = plan
        return plan


def _on_device(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


class _DrawnOrder:
    """The order of an epoch's samples, computed in a thread. Unlike an executor's locks, its locks survive Ctrl-C."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._drawn: np.ndarray | BaseException | None = None
        self._thread = threading.Thread(target=self._draw, name="h5chunk-order", daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        try:
            self._drawn = np.concatenate([np.empty(0, np.int64), *self.order.keys()])
        except BaseException as error:  # raised again by result()
            self._drawn = error

    def wait(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def result(self) -> np.ndarray:
        """Return the keys of the samples in order, as `Order.keys` yields them: (num_samples,) int64."""
        self.wait()
        if self._drawn is None:  # a fork has no threads
            self._draw()
        if isinstance(self._drawn, BaseException):
            raise self._drawn
        assert self._drawn is not None
        return self._drawn


@dataclass(frozen=True)
class _Listed:
    """The windows of samples that a stream copies from memory, in this order, ``size`` at a time."""

    samples: np.ndarray
    size: int
    epoch: int

    is_pure = False  # the next samples are not known

    @property
    def num_batches(self) -> int:
        """The number of windows."""
        return -(-len(self.samples) // self.size)

    def windows(self, start: int = 0) -> Iterator[Window]:
        """Yield windows, the first of which is window ``start``."""
        for number in range(start, self.num_batches):
            some = self.samples[number * self.size : (number + 1) * self.size]
            yield Window(some, some, some, range(number, number + 1), some)


class _Ahead:
    """Copies samples of columns in the host's memory ahead, as a stream of windows whose source is this memory."""

    def __init__(self, source: DataSource, columns: Columns) -> None:
        memory = {name: as_array(column) for name, column in zip(source.kinds, columns, strict=True)}
        self._source = replace(source, memory=memory, fields={}, numbered={}, skipping=None)
        self._sample_bytes = max(1, sum(kind.sample_bytes for kind in source.kinds.values()))
        self._stream: WindowStream | None = None
        self._numbers = count()

    def num_together(self, batch_size: int) -> int:
        """Return the number of batches to copy into one buffer, which these batches then share."""
        return max(1, TOGETHER_BYTES // (batch_size * self._sample_bytes))

    def is_worthwhile(self, batch_size: int) -> bool:
        """Return whether it pays to copy batches of this size ahead."""
        return batch_size * self._sample_bytes >= QUICK_BYTES

    def windows(self, samples: np.ndarray, size: int) -> Iterator[Columns]:
        """Yield the columns of ``size`` samples at a time. ``samples``, (n,) int64, are their positions in memory."""
        order = _Listed(np.ascontiguousarray(samples), size, next(self._numbers))
        if self._stream is None or not self._stream.is_usable:  # a fork has no threads
            num_bytes = size * self._sample_bytes
            num_slots = 1 + max(2, min(AHEAD * self._source.num_threads, AHEAD_BYTES // num_bytes))
            plan = SlotPlan(order, num_slots, num_slots, size, num_bytes)
            self._stream = WindowStream(self._source, plan, lends_slot=False, once=True)
        try:
            yield from self._stream.windows(order)
        except GeneratorExit:  # the threads stay for the next samples
            raise
        except BaseException:  # a signal may have hidden that a window has been copied
            self.close()
            raise

    def close(self) -> None:
        """Stop the threads."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
