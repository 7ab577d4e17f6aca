"""Where a loader's data waits: windows under way, or all of it on the device, within what memory there is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from h5chunk.errors import OptionError
from h5chunk.feed.batchmaker import BatchMaker, Tensors
from h5chunk.feed.device import free_bytes
from h5chunk.feed.memory import KEPT
from h5chunk.feed.normalize import Convert
from h5chunk.feed.resident import LOADING_SLOTS, Resident, load_resident
from h5chunk.feed.rowconvert import RowConvert
from h5chunk.feed.stream import WindowStream
from h5chunk.feed.supply import Supply
from h5chunk.plan.echo import AUTO
from h5chunk.plan.layout import human_bytes
from h5chunk.plan.order import Order
from h5chunk.plan.slots import SlotPlan, largest_window, plan_slots
from h5chunk.store.read.amplification import NOTABLE

LOADING_BYTES = 8 << 20  # of the pieces in which resident data is read
RESIDENT_SHARE = 4  # resident="auto" takes at most one part in so many of the device's free memory


class Room:
    """The memory that a loader may take, and what fits there.

    Parameters
    ----------
    supply : Supply
    convert : Convert or RowConvert
    device : torch.device
    memory_bytes : int, optional
        Bound of the host's and the device's together.
    reuse : bool
        On the CPU, a batch is valid until the next one.
    """

    def __init__(
        self,
        supply: Supply,
        convert: Convert | RowConvert,
        device: torch.device,
        memory_bytes: int | None,
        *,
        reuse: bool,
    ) -> None:
        self._supply, self._convert, self._device = supply, convert, device
        self._memory_bytes, self._reuse = memory_bytes, reuse

    def plan_windows(self, order: Order, *, echo: float | str, least_chunks: int | None) -> SlotPlan:
        """How many windows are under way, and the order, whose windows may be made smaller for it.

        Raises
        ------
        OptionError
            They do not fit.
        """
        return plan_slots(
            order,
            self._supply.window_bytes,
            self._beside_windows,
            memory_bytes=self._memory_bytes,
            num_spare=1 if echo == AUTO else 0,
            least_chunks=least_chunks,
        )

    def _beside_windows(self, order: Order) -> int:
        """Memory that streaming in this order takes beside the windows."""
        total = self._supply.other_bytes(order)
        if self._device.type == "cpu" and not self._reuse:  # windows that were given back and wait to be used again
            total += KEPT * self._supply.window_bytes(largest_window(order))
        if self._device.type == "cpu" and not self._convert.changes_nothing:
            total += (KEPT + 1) * order.batch_size * self._convert.sample_bytes
        return total

    def choose_resident(self, wanted: bool | str, order: Order) -> bool:
        """Whether all data shall stay on the device.

        Raises
        ------
        OptionError
            It shall, but does not fit.
        """
        if not wanted or not order.num_samples:
            return False
        if wanted == AUTO and self._device.type == "cpu":
            return False
        held = self._supply.all_bytes
        loading = LOADING_SLOTS * self._supply.window_bytes(self.loading_samples(order))
        needed = held + loading + self._supply.other_bytes(order)
        room = math.inf if self._memory_bytes is None else self._memory_bytes
        if self._device.type == "cuda":
            free = free_bytes(self._device)
            room = min(room, free // RESIDENT_SHARE if wanted == AUTO and self._memory_bytes is None else free)
        if wanted is True and needed > room:
            raise OptionError(
                f"resident=True needs {needed} bytes, {held} of them for the data, and there is room for {room}: "
                "raise memory_bytes, or leave resident out"
            )
        return needed <= room

    def loading_samples(self, order: Order) -> int:
        """Of the pieces in which resident data is read."""
        sample_bytes = sum(space.sample_bytes for space in self._supply.spaces.values())
        return max(1, min(LOADING_BYTES // max(1, sample_bytes), order.num_samples // LOADING_SLOTS))

    def start(
        self,
        order: Order,
        start: int,
        plan: SlotPlan | None,
        transform: Callable[[Tensors], Any] | None,
        echo: float | str,
    ) -> tuple[WindowStream | Resident, Callable[[], None]]:
        """What gives batches in this order from batch ``start`` on, and what ends it.

        Without a plan they are of data that stays on the device.
        """
        on_cpu = self._device.type == "cpu"
        self._convert.to(self._device, self._supply.example)
        keep = plan is None or (on_cpu and echo == 1)  # who changes a batch, changes no echo
        maker = BatchMaker(self._convert, transform, keep=keep)
        if plan is None:
            resident = load_resident(self._supply, self.loading_samples(order), self._device, maker, echo)
            return resident, resident.close
        return self._supply.start(
            order, plan.num_slots, plan.window_samples, maker, late=on_cpu and self._reuse, echo=echo, start=start
        )

    def describe(self, batches: str, order: Order, plan: SlotPlan | None, echo: float | str) -> str:
        """All of it in words; without a plan the data stays on the device."""
        supply = self._supply
        if plan is None:
            what = f"all {supply.num_samples} samples resident ({human_bytes(supply.all_bytes)})"
        else:
            held = human_bytes(plan.num_slots * supply.window_bytes(plan.window_samples))
            what = (
                f"windows of {-(-plan.window_samples // order.batch_size)} batches, {plan.num_slots} under way ({held})"
            )
        echoed = "" if echo == 1 else f"; echo {echo}"
        times = supply.read_amplification(order)
        beside = "" if times < NOTABLE else f"; reads {times:.2f} x the bytes of its samples"
        how = ", ".join(f"{name}: {'h5py' if name in supply.why else 'direct'}" for name in supply.spaces)
        return (
            f"{str(supply.path)!r} to {self._device}: {batches}; {what}{echoed}{beside}; {supply.num_threads} threads; "
            f"{how}"
        )
