"""Memory for batches: used again where that is safe, shared with the main process where a worker reads.

Touching memory for the first time costs several times the copy into it (scripts/LOG.md has the figures), so that a
loop that takes a fresh batch of 38 MB each time spends most of its time in page faults.
"""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch

KEPT = 2  # free buffers to keep: a loop holds one batch while the next is read
REUSED_BYTES = 1 << 20  # smaller ones are left to malloc, which keeps their memory itself


class BatchMemory:
    """Gives tensors whose memory returns here when the last reference to it is gone.

    A tensor, all its views and everything that shares its storage keep the memory: it is never used twice at a time.
    Buffers are NumPy's, which asks the system for huge pages.

    Parameters
    ----------
    keep : int
        Free buffers to keep.
    """

    def __init__(self, keep: int = KEPT) -> None:
        self._keep = keep
        self._free: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < REUSED_BYTES:
            return torch.empty(shape, dtype=dtype)
        buffer = self._take(num_bytes)
        owned = buffer[:num_bytes]
        weakref.finalize(owned, self._give_back, buffer).atexit = False
        return torch.from_numpy(owned).view(dtype).view(shape)

    def _take(self, num_bytes: int) -> np.ndarray:
        for number, buffer in enumerate(self._free):
            if num_bytes <= buffer.nbytes <= 2 * num_bytes:
                return self._free.pop(number)
        return np.empty(num_bytes, np.uint8)

    def _give_back(self, buffer: np.ndarray) -> None:
        self._free = [buffer, *self._free[: self._keep - 1]]

    def __getstate__(self) -> dict[str, object]:
        return {"_keep": self._keep, "_free": []}  # memory stays in its process


def shared_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in memory shared between processes: a worker that fills it sends no bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(num_bytes)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
