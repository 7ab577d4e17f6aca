"""Decide whether a loader streams its data or keeps it on the device, within a memory budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from h5chunk.errors import OptionError, count_text, human_bytes
from h5chunk.feed.columns import slot_bytes
from h5chunk.feed.given import GivenOrder
from h5chunk.feed.memory import KEPT
from h5chunk.feed.source import DataSource
from h5chunk.plan.order import Epoch, Order
from h5chunk.plan.slots import SMALL_BYTES, TOGETHER_BYTES, SlotPlan, largest_window, plan_slots, with_windows_together
from h5chunk.store.read.checksums import OFF, PIECE_BYTES
from h5chunk.store.read.field_readers import (
    NOTABLE,
    is_small_field,
    scratch_bytes,
)
from h5chunk.transforms.converter import Converter

LOADING_BYTES = 8 << 20  # size of the pieces in which resident data is read
LOADING_SLOTS = 4  # number of pieces that are read concurrently
REMOTE_AHEAD_BYTES = 256 << 20  # read ahead from object stores, so that many requests are in flight
GPU_SMALL_BYTES = 512 << 20  # the same limit as SMALL_BYTES for a GPU, where host and device buffers both count
GROUP_BYTES = 16 << 20  # windows of the user's batches
WHOLE_CHUNKS_BYTES = 128 << 20  # the same if reading a few samples of a chunk takes as long as reading all
ENDLESS = 64  # windows of an epoch whose length is not known
SHARES = 8  # a window of the user's batches has at most this part of the samples


class MemoryBudget:
    """Plans the windows that fit in a loader's memory limit, for host and device together."""

    def __init__(
        self, source: DataSource, converters: Sequence[Converter], memory_bytes: int | None, *, reuse: bool
    ) -> None:
        self._source, self._memory_bytes, self._reuse = source, memory_bytes, reuse
        self._converters = converters
        self._on_cpu = source.device.type == "cpu"
        self._converted_bytes = sum(converter.sample_bytes for converter in converters if not converter.changes_nothing)
        gathered = (source.reader.fields[name] for name, kind in source.kinds.items() if kind.is_gathered)
        self._converted_bytes += sum(field.grid.sample_bytes for field in gathered)

    def of_source(self, source: DataSource) -> MemoryBudget:
        """Return the budget of another source of the same fields."""
        return MemoryBudget(source, self._converters, self._memory_bytes, reuse=self._reuse)

    def plan_given(self, order: GivenOrder, batch_samples: int) -> SlotPlan:
        """Plan windows of the user's batches, of ``batch_samples`` each.

        Windows are small, so that batches are not drawn long before their use, unless a batch reads much more than its
        samples.
        """
        times = self._source.read_amplification(replace(order, window_samples=batch_samples))
        num_bytes = GROUP_BYTES if times < NOTABLE else WHOLE_CHUNKS_BYTES
        if not self._has_fixed_slots:  # memory for the samples of each window
            batch_bytes = batch_samples * sum(kind.sample_bytes for kind in self._source.kinds.values())
        else:
            batch_bytes = self._window_bytes(batch_samples)
        together = min(num_bytes // max(1, batch_bytes), order.num_samples // (SHARES * batch_samples))
        size = max(1, together) * batch_samples
        endless = Order(ENDLESS * size, 1, batch_samples, window_chunks=size, interleave=1)
        plan = self._plan_slots(endless, min_chunks=batch_samples, small_bytes=0)
        return replace(plan, order=replace(order, batch_size=batch_samples, window_samples=plan.window_samples))

    def plan_larger(self, order: GivenOrder, batch_samples: int) -> SlotPlan:
        """Plan windows for a batch that is larger than planned, with some room for others, if the memory suffices."""
        try:
            return self.plan_given(order, batch_samples + batch_samples // 4)
        except OptionError:
            return self.plan_given(order, batch_samples)

    @property
    def _has_fixed_slots(self) -> bool:
        return not self._on_cpu or self._reuse or self._source.has_frames

    def plan(
        self, resident: bool, order: Order | GivenOrder, *, min_chunks: int | None, join: bool = True
    ) -> SlotPlan | None:
        """Plan the number and size of windows. Return None if all data is kept on the device instead.

        With ``join``, small windows are read together. Raise `OptionError` if resident data was requested but does not
        fit.
        """
        if self._fits_device(resident, order):
            return None
        if isinstance(order, GivenOrder):
            return self.plan_given(order, order.batch_size)
        small_bytes = SMALL_BYTES if self._on_cpu else GPU_SMALL_BYTES
        plan = self._plan_slots(order, min_chunks=min_chunks, small_bytes=small_bytes)
        if not join:
            return plan
        if self._on_cpu:
            return with_windows_together(plan, TOGETHER_BYTES, 0 if self._reuse else KEPT)
        return with_windows_together(plan, 2 * TOGETHER_BYTES)

    def _plan_slots(self, order: Order, *, min_chunks: int | None, small_bytes: int) -> SlotPlan:
        return plan_slots(
            order,
            self._window_bytes,
            self._beside_windows,
            memory_bytes=self._memory_bytes,
            min_chunks=min_chunks,
            ahead_bytes=self._ahead_bytes,
            small_bytes=small_bytes,
        )

    @property
    def _ahead_bytes(self) -> int:
        """The number of bytes of remote objects to read ahead, which is at most half of the limit on their cache."""
        mirrors = [mirror for mirror in self._source.reader.mirrors if mirror is not None]
        limits = [mirror.cache_bytes // 2 for mirror in mirrors if mirror.cache_bytes is not None]
        return min([REMOTE_AHEAD_BYTES, *limits]) if mirrors else 0

    def _window_bytes(self, num_samples: int) -> int:
        """Return the size of a window in bytes. For a GPU, this counts the host and the device buffer."""
        return (1 if self._on_cpu else 2) * slot_bytes(self._source.kinds, num_samples)

    def _beside_windows(self, order: Order) -> int:
        """Return the bytes that streaming in this order needs in addition to the windows."""
        total = self._reading_bytes()
        total += sum(converter.decoding_bytes(order.batch_size) for converter in self._converters)
        if self._on_cpu and not self._reuse and not self._source.has_frames:  # released windows that wait for reuse
            total += KEPT * self._window_bytes(largest_window(order))
        if self._source.skipping is not None:  # a window is read again, in parts, to find its bad samples
            total += self._window_bytes(largest_window(order))
        if self._on_cpu:
            total += (KEPT + 1) * order.batch_size * self._converted_bytes
        return total

    def _reading_bytes(self) -> int:
        source = self._source
        total = sum(field.num_bytes for field in source.fields.values() if is_small_field(field))
        total += scratch_bytes(source.fields.values(), source.num_threads)
        copies = 2 if len(source.reader.readers) > 1 else 1  # also the cache of each file
        total += source.reader.indptr_bytes * copies
        if source.reader.checksums != OFF:
            total += source.num_threads * PIECE_BYTES
        return total

    def _fits_device(self, resident: bool, order: Order | GivenOrder) -> bool:
        """Return whether to keep all data on the device. Raise OptionError if it does not fit."""
        if not resident or not order.num_samples:
            return False
        held, pieces = self._resident_bytes, self._source.pieces
        loading = 0 if self._on_cpu else LOADING_SLOTS * 2 * slot_bytes(pieces, self.loading_samples(order))
        needed = held + loading + self._reading_bytes()
        limit = math.inf if self._memory_bytes is None else self._memory_bytes
        if not self._on_cpu:
            limit = min(limit, free_bytes(self._source.device))
        if needed > limit:
            what, remedy = "the GPU's free memory is", "leave"
            if limit == self._memory_bytes:
                what, remedy = "memory_bytes is", "raise it, or leave"
            raise OptionError(
                f"resident=True needs {needed} bytes, {held} of them for the data, but {what} {limit}: {remedy} "
                "resident out"
            )
        return True

    @property
    def _resident_bytes(self) -> int:
        return slot_bytes(self._source.pieces, self._source.num_samples)

    def loading_samples(self, order: Order | GivenOrder) -> int:
        """Return how many samples are read at a time when resident data is loaded."""
        sample_bytes = sum(kind.sample_bytes for kind in self._source.kinds.values())
        return max(1, min(LOADING_BYTES // max(1, sample_bytes), order.num_samples // LOADING_SLOTS))

    def describe(self, order: Epoch, plan: SlotPlan | None) -> str:
        """Describe the use of memory for the repr of a loader. Without a plan, all data is on the device."""
        if plan is None:
            return f"all {self._source.num_samples} samples resident ({human_bytes(self._resident_bytes)})"
        windows = count_text(plan.num_slots * plan.together, "window")
        num_batches = -(-plan.window_samples // (plan.together * order.batch_size))
        return f"{windows} of {count_text(num_batches, 'batch')} ({human_bytes(plan.num_bytes)})"


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, in bytes."""
    return int(torch.cuda.mem_get_info(device)[0])
