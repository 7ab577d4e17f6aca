"""Memory for windows and batches: reused on the host, or pinned for copies to a GPU."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import warnings
from collections import deque
from contextlib import suppress

import numpy as np
import torch

from h5chunk.errors import OptionError, human_bytes
from h5chunk.feed.columns import ALIGNMENT
from h5chunk.transforms.csr import Allocate

MADV_POPULATE_WRITE = 23  # allocates pages; CUDA would do so much more slowly, with a lock that blocks copies
POPULATED_BYTES = 2 << 20  # per call, so that other threads do not wait long for the lock on this process's memory
KEPT = 2  # free buffers to keep per field, because a loop holds one batch while the next is read
BYTE = np.dtype(np.uint8)
REUSED_BYTES = 1 << 20  # smaller buffers are allocated by malloc, which reuses their memory itself

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


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


class PinnedMemory:
    """Pinned host memory of exactly the requested size, from which a GPU copies at full speed. `close` frees it.

    torch's own pinned allocator rounds sizes up to powers of two, and keeps freed memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, num_bytes))
        self.bytes = np.frombuffer(self._map, np.uint8)
        for start in range(0, self.bytes.nbytes, POPULATED_BYTES):
            some = self.bytes[start : start + POPULATED_BYTES]
            _madvise(some.ctypes.data, some.nbytes, MADV_POPULATE_WRITE)  # has no effect before Linux 5.14
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(self.bytes.ctypes.data, self.bytes.nbytes, 0)))

    def close(self) -> None:
        """Unpin the memory. The caller must ensure that no copy from it is running."""
        error = int(torch.cuda.cudart().cudaHostUnregister(self.bytes.ctypes.data))
        if error:
            warnings.warn(f"pinned memory could not be freed: CUDA error {error}", stacklevel=2)
