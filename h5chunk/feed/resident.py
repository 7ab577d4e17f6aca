"""Data that stays on the device: read once, then gathered there, at the speed of the device's memory."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from h5chunk.feed.batches import BatchMaker, Passthrough, Tensors
from h5chunk.feed.layout import Layouts, slot_bytes
from h5chunk.feed.slots import BatchMemory, Fields, gather, to_device
from h5chunk.feed.stream import DataSource, EpochReport, open_stream
from h5chunk.plan.order import Order
from h5chunk.plan.slots import SlotPlan, echo_pass, num_echoed
from h5chunk.transforms.csr import Numbers

LOADING_SLOTS = 4  # pieces that are read at a time


class Resident:
    """All samples on the device, and their batches in the order of the epoch.

    Parameters
    ----------
    layouts : Layouts
    num_samples : int
    device : torch.device
    pieces : iterator of tuples of Samples
        The samples from 0 on, of each field, each piece valid until the next.
    maker : BatchMaker
    echo : float

    Attributes
    ----------
    close : callable
        Frees the data and ends the thread; holds nothing else of this.
    is_usable : bool
        Whether this process may go on with it, which a fork may, too.
    """

    is_usable = True

    def __init__(
        self,
        layouts: Layouts,
        num_samples: int,
        device: torch.device,
        pieces: Iterator[Fields],
        maker: BatchMaker,
        *,
        echo: float,
    ) -> None:
        self._fields: list[Any] = [layout.empty(num_samples, device) for layout in layouts.values()]
        done = 0
        for piece in pieces:
            for layout, field, part in zip(layouts.values(), self._fields, piece, strict=True):
                layout.put(field, done, part)
            done += len(piece[0])
        self._device, self._maker, self._echo = device, maker, echo
        self._memory = BatchMemory() if device.type == "cpu" else None
        self._planner = _planner()
        self._process = os.getpid()
        self._planned: dict[int, Future[np.ndarray]] = {}
        self.close = partial(_close, self._planner, self._fields)

    def batches(self, order: Order, report: EpochReport, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from ``start`` on; the order of the next one is drawn meanwhile."""
        samples = self._plan(order).result()[start * order.batch_size :]
        report.waited_s += time.perf_counter() - report.started
        self._plan(replace(order, epoch=order.epoch + 1))
        fresh = order.num_batches - start
        for number, batch in enumerate(self._batches(samples, order, fresh)):
            report.add(len(batch[0]), fresh=number < fresh)
            yield self._maker.finish(batch)

    def _batches(self, samples: np.ndarray, order: Order, fresh: int) -> Iterator[Tensors]:
        """Gathered several at a time, if they are small; after the fresh ones those of the echoes."""
        left = fresh + num_echoed(self._echo, fresh)
        without = fresh - math.ceil(len(samples) / order.batch_size)  # a last batch that other ranks have
        together = 1 if self._memory is not None else self._maker.num_gathered(order.batch_size)
        for number in count():
            numbers = Numbers(samples, to_device(samples, self._device))
            for first in range(0, len(samples), together * order.batch_size):
                if not left:
                    return
                some = numbers.part(first, first + together * order.batch_size)
                made = self._maker.make(gather(tuple(self._fields), some, self._memory), order.batch_size)
                yield from made[:left]
                left -= len(made[:left])
            if left and (without if not number else not len(samples)):
                nothing = Numbers(samples[:0], to_device(samples[:0], self._device))
                yield from self._maker.make(gather(tuple(self._fields), nothing, self._memory), order.batch_size)
                left -= 1
            if not left:
                return
            samples = samples[echo_pass(len(samples), order.seed, order.epoch, 0, number)]

    def _plan(self, order: Order) -> Future[np.ndarray]:
        if self._process != os.getpid():  # a fork leaves the thread behind
            self._planner, self._process, self._planned = _planner(), os.getpid(), {}
        plan = self._planned.get(order.epoch) or self._planner.submit(_whole, order)
        self._planned = {epoch: other for epoch, other in self._planned.items() if epoch == order.epoch - 1}
        self._planned[order.epoch] = plan
        return plan


def load_resident(source: DataSource, piece_samples: int, maker: BatchMaker, echo: float) -> Resident:
    """Read all samples of a file, in its order, in pieces of so many."""
    num_samples = source.reader.num_samples
    source = replace(source, layouts={name: layout.of_pieces for name, layout in source.layouts.items()})
    pieces = Order(num_samples, chunk_samples=1, batch_size=piece_samples, window_chunks=1, shuffle=False)
    plan = SlotPlan(pieces, LOADING_SLOTS, piece_samples, slot_bytes(source.layouts, piece_samples))
    stream, close = open_stream(source, plan, Passthrough(), lends_slot=True, once=True)
    try:
        read = stream.batches(pieces, EpochReport())
        return Resident(source.layouts, num_samples, source.device, read, maker, echo=echo)
    finally:
        close()


def _planner() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="h5chunk-order")


def _close(planner: ThreadPoolExecutor, fields: list[Any]) -> None:
    planner.shutdown(cancel_futures=True)
    fields.clear()


def _whole(order: Order) -> np.ndarray:
    batches = list(order.batches())
    return np.concatenate(batches) if batches else np.empty(0, np.int64)
