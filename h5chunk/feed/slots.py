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
from h5chunk.native import Buffer
from h5chunk.transforms.csr import SampleNumbers


class Slot:
    """Memory that windows are read into, one after another. It is a base class.

    Attributes
    ----------
    kinds : mapping of str to Kind
        The fields.
    window : tuple of columns
        The window, valid from `receive` to `release`.
    device : torch.device
        Where it is.
    queues : bool
        Whether nothing is written to the slot's memory before threads read the window, so that it can be queued.
    buffer : Buffer, optional
        The memory for which it is queued, if others use that, too.
    sender : (int or None, int or None)
        The addresses of a C function and its argument that do the same as `send`, or (None, None).
    """

    device = torch.device("cpu")
    buffer: Buffer | None = None
    sender: tuple[int | None, int | None] = None, None

    def __init__(self, kinds: Kinds, num_samples: int) -> None:
        """Make a slot for windows of up to ``num_samples``."""
        self.kinds, self._num_samples = kinds, num_samples
        self.window: Columns = ()
        self._read: Columns = ()  # the columns that threads fill
        self.queues = all(kind.is_fixed for kind in kinds.values())

    def holds(self, num_samples: int) -> bool:
        """Return whether a window of this size fits."""
        return num_samples <= self._num_samples

    def has_pinned(self, *, queued: bool) -> bool:
        """Return whether there is a pinned buffer to begin with, if one is needed. It may still be copied from."""
        return True

    def can_begin(self, *, queued: bool) -> bool:
        """Return whether a window can begin without waiting for memory."""
        return True

    def begin(self, samples: np.ndarray, *, queued: bool) -> Mapping[str, Destination]:
        """Prepare for the window with these samples, and return the destinations of all fields."""
        raise NotImplementedError

    def _destinations(self) -> dict[str, Destination]:
        pairs = zip(self.kinds.items(), self._read, strict=True)
        return {name: kind.destination(column) for (name, kind), column in pairs}

    def send(self) -> None:
        """Start to copy the window, which has been read, to the device. Any thread may call this."""

    def check(self) -> None:
        """Raise FileError if the data that was read is damaged."""
        for kind, column in zip(self.kinds.values(), self._read, strict=True):
            kind.check(column)

    def return_pinned(self) -> None:
        """Make pinned memory available to other windows. No thread may write this window to it any more."""

    def receive(self) -> None:
        """Make the consumer's current stream wait until the window is on the device."""

    def release(self) -> None:
        """Allow another window in this memory, after the consumer has used all batches."""


class CpuSlot(Slot):
    """A slot in ordinary memory, in which a window is used where it is read.

    Each window gets new memory from ``memory``; if that is None, all windows use the same memory.
    """

    def __init__(self, kinds: Kinds, num_samples: int, memory: BatchMemory | None) -> None:
        super().__init__(kinds, num_samples)
        self._is_lent = memory is None
        self._memory: BatchMemory | Room
        if memory is not None:
            self._memory = memory
        else:
            held = BatchMemory().empty((slot_bytes(kinds, num_samples),), torch.uint8)
            self._memory = Room(held, kinds.values(), num_samples)

    def holds(self, num_samples: int) -> bool:
        return not self._is_lent or super().holds(num_samples)

    def begin(self, samples: np.ndarray, *, queued: bool) -> Mapping[str, Destination]:
        allocate = self._memory.allocate()
        self.window = self._read = tuple(kind.empty(samples, allocate) for kind in self.kinds.values())
        return self._destinations()

    def release(self) -> None:
        if not self._is_lent:
            self.window = self._read = ()


def to_device(numbers: np.ndarray, device: torch.device) -> SampleNumbers:
    """Copy sample numbers to a device. The caller may change the array at once, even if the copy is still running."""
    return SampleNumbers(numbers, torch.from_numpy(numbers).to(device, non_blocking=True))
