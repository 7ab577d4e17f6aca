"""Slots: buffers on the CPU or a GPU that windows of samples are read into.

On a GPU, a slot is a pair of buffers, one in pinned host memory and one in device memory. Two events guard their reuse:
the host overwrites the pinned buffer only after the copy from it has ended, and a copy overwrites the device buffer
only after the consumer's kernels that read it have ended. Batches are made on the consumer's stream. Therefore no other
synchronisation is needed, neither ``record_stream`` nor a new stream per epoch.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import torch

from h5chunk.errors import OptionError, human_bytes
from h5chunk.feed.columns import ALIGNMENT, Columns, Destination, Kinds, Room, slot_bytes
from h5chunk.transforms.csr import Allocate, SampleNumbers

KEPT = 2  # free buffers to keep per field, because a loop holds one batch while the next is read
BYTE = np.dtype(np.uint8)
REUSED_BYTES = 1 << 20  # smaller buffers are allocated by malloc, which reuses their memory itself


class _Lent(np.ndarray):
    """An array in a buffer that returns to the free buffers once nothing refers to the array."""

    home: tuple[deque[np.ndarray], np.ndarray] | None = None  # the free buffers and this array's buffer

    def __del__(self) -> None:
        if self.home is not None:
            free, buffer = self.home
            free.append(buffer)


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype | None:
    """Return the dtype of NumPy, or None if it has none, such as for bfloat16."""
    with suppress(TypeError):
        return np.dtype(torch.empty(0, dtype=dtype).numpy().dtype)
    return None


class BatchMemory:
    """Allocates tensors whose memory is reused once the last reference to them is gone.

    The first access to new memory takes several times as long as the copy into it (scripts/LOG.md), so a loop that
    allocates 38 MB per batch would spend most of its time in page faults. Memory is free once nothing refers to the
    tensor, its views, or anything else that shares its storage. Up to ``keep`` free buffers are kept. They are
    allocated by NumPy, which asks the system for huge pages. The last reference may disappear in any thread, or during
    a call of this class (through the garbage collector), so the list of free buffers is changed only atomically.
    """

    def __init__(self, keep: int = KEPT) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=keep)

    def allocate(self) -> Allocate:
        """Return `empty`: see `h5chunk.feed.columns.Room.allocate`."""
        return self.empty

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < REUSED_BYTES:
            return torch.empty(shape, dtype=dtype)
        buffer, numbers = self._take(num_bytes), _numpy_dtype(dtype)
        if numbers is None:
            return torch.from_numpy(self._lent((num_bytes,), BYTE, buffer)).view(dtype).view(shape)
        return torch.from_numpy(self._lent(shape, numbers, buffer))

    def _lent(self, shape: tuple[int, ...], dtype: np.dtype, buffer: np.ndarray) -> _Lent:
        array = _Lent(shape, dtype, buffer)
        array.home = self._free, buffer
        return array

    def _take(self, num_bytes: int) -> np.ndarray:
        for _ in range(len(self._free)):
            try:
                buffer = self._free.pop()
            except IndexError:  # another thread took the last buffer
                break
            if num_bytes <= buffer.nbytes <= 2 * num_bytes:
                return buffer
            self._free.appendleft(buffer)
        try:
            memory = np.empty(num_bytes + ALIGNMENT, np.uint8)  # copies past the caches write whole lines
            return memory[-memory.ctypes.data % ALIGNMENT :][:num_bytes]
        except (MemoryError, ValueError):  # ValueError: NumPy cannot represent the size
            raise OptionError(
                f"a batch needs {human_bytes(num_bytes)}, which is more than the free memory: use a smaller "
                "batch_size or, for a sparse matrix, transforms=[Csr()]"
            ) from None


class SingleBuffer:
    """Allocates tensors that all share the same memory. Each tensor is valid until the next one is allocated."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised tensor, in the memory of the previous one."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._held.numel() < num_bytes:
            self._held = BatchMemory().empty((num_bytes,), torch.uint8)
        return self._held[:num_bytes].view(dtype).view(shape).data


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
