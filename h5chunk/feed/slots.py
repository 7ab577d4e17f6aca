"""Slots: buffers on the CPU or a GPU that windows of samples are read into.

On a GPU, a slot is a pair of buffers, one in pinned host memory and one in device memory. Two events guard their reuse:
the host overwrites the pinned buffer only after the copy from it has ended, and a copy overwrites the device buffer
only after the consumer's kernels that read it have ended. Batches are made on the consumer's stream. Therefore no other
synchronisation is needed, neither ``record_stream`` nor a new stream per epoch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from h5chunk.feed.columns import Columns, Destination, Kinds, Room, slot_bytes
from h5chunk.feed.memory import BatchMemory
from h5chunk.transforms.csr import SampleNumbers


class CpuSlot:
    """A slot in ordinary memory.

    Each window gets new memory from ``memory``; if that is None, all windows use the same memory.
    """

    device = torch.device("cpu")
    buffer = None
    sender: tuple[int | None, int | None] = None, None  # nothing has to be sent

    def __init__(self, kinds: Kinds, num_samples: int, memory: BatchMemory | None) -> None:
        self.kinds, self._num_samples, self._is_lent = kinds, num_samples, memory is None
        self.queues = all(kind.is_fixed for kind in kinds.values())  # see CudaSlot
        self._memory: BatchMemory | Room
        if memory is not None:
            self._memory = memory
        else:
            held = BatchMemory().empty((slot_bytes(kinds, num_samples),), torch.uint8)
            self._memory = Room(held, kinds.values(), num_samples)
        self.window: Columns = ()

    def holds(self, num_samples: int) -> bool:
        """Return whether a window of this size fits."""
        return not self._is_lent or num_samples <= self._num_samples

    def can_begin(self, *, queued: bool) -> bool:
        """Return True, because no window has to wait for memory."""
        return True

    has_pinned = can_begin

    def begin(self, samples: np.ndarray, *, queued: bool) -> Mapping[str, Destination]:
        """Prepare for the window with these samples, and return the destinations of all fields."""
        allocate = self._memory.allocate()
        self.window = tuple(kind.empty(samples, allocate) for kind in self.kinds.values())
        return destinations(self.kinds, self.window)

    def send(self) -> None:
        """Do nothing, because the window is already in the memory in which it is used."""

    def check(self) -> None:
        """Raise FileError if the data that was read is damaged."""
        for kind, column in zip(self.kinds.values(), self.window, strict=True):
            kind.check(column)

    def return_pinned(self) -> None:
        """Do nothing, because there is no pinned memory."""

    def receive(self) -> None:
        """Do nothing, because there is no copy to wait for."""

    def release(self) -> None:
        """Release the memory of the window, after the consumer has used all its batches."""
        if not self._is_lent:
            self.window = ()


def destinations(kinds: Kinds, columns: Columns) -> dict[str, Destination]:
    """Return the memory that readers fill, by field."""
    pairs = zip(kinds.items(), columns, strict=True)
    return {name: kind.destination(column) for (name, kind), column in pairs}


def to_device(numbers: np.ndarray, device: torch.device) -> SampleNumbers:
    """Copy sample numbers to a device. The caller may change the array at once, even if the copy is still running."""
    return SampleNumbers(numbers, torch.from_numpy(numbers).to(device, non_blocking=True))
