"""Pinned memory for copies to a GPU, and memory for batches that is shared with another process."""

from __future__ import annotations

import math
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

FLAG_BYTES = 64  # bytes at the end of a shared buffer; tensors start at multiples of this

Tensors = tuple[torch.Tensor, ...]
Places = tuple[tuple[int, tuple[int, ...], torch.dtype], ...]  # start, shape and dtype of each tensor
Assemble = Callable[[Tensors], Tensors]


class PinnedMemory:
    """Pinned host memory of exactly the requested size, which a GPU copies from at full speed; freed by `close`.

    torch's own pinned allocator rounds sizes up to powers of two, and keeps freed memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, num_bytes))
        self.bytes = np.frombuffer(self._map, np.uint8)
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(self.bytes.ctypes.data, self.bytes.nbytes, 0)))

    def close(self) -> None:
        """Unpin the memory; no copy from it may be running."""
        error = int(torch.cuda.cudart().cudaHostUnregister(self.bytes.ctypes.data))
        if error:
            warnings.warn(f"pinned memory could not be freed: CUDA error {error}", stacklevel=2)


class SharedMemory:
    """Allocate the batches of a DataLoader's worker in memory that it shares with the main process, and reuse it.

    torch sends a shared tensor as a file descriptor, but allocates new memory for each batch, whose pages the system
    must find and clear. Here a buffer is used again once no tensor of this process refers to it, and the receiving
    process has dropped its last reference and cleared the flag in the buffer's last bytes.
    """

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []

    def empty(
        self, fields: Sequence[tuple[tuple[int, ...], torch.dtype]], assemble: Assemble | None = None
    ) -> SharedFields:
        """Allocate tensors of these shapes and dtypes in one buffer; ``assemble`` builds a batch's fields from them."""
        places, end = [], 0
        for shape, dtype in fields:
            places.append((end, shape, dtype))
            end += -(-math.prod(shape) * dtype.itemsize // FLAG_BYTES) * FLAG_BYTES
        buffer = self._take(end + FLAG_BYTES)
        owned = buffer.numpy()[:end]
        weakref.finalize(owned, self._idle.append, buffer).atexit = False
        return SharedFields(buffer, owned, tuple(places), assemble)

    def _take(self, num_bytes: int) -> torch.Tensor:
        returned = [buffer for buffer in self._idle if not buffer[-1]]
        for buffer in returned:
            self._idle[:] = [other for other in self._idle if other is not buffer]
            if buffer.numel() >= num_bytes:
                return buffer
        buffer = shared_empty((num_bytes,), torch.uint8)
        buffer[-1] = 0
        return buffer


class SharedFields(tuple[torch.Tensor, ...]):
    """Fields in one shared buffer; another process receives them as a plain tuple of tensors."""

    tensors: tuple[torch.Tensor, ...]  # ``assemble``, if given, makes the fields from these
    _sent: tuple[torch.Tensor, Places, Assemble | None]

    def __new__(
        cls, buffer: torch.Tensor, owned: np.ndarray, places: Places, assemble: Assemble | None
    ) -> SharedFields:
        tensors = tuple(_views(owned, places))
        self = super().__new__(cls, tensors if assemble is None else assemble(tensors))
        self.tensors, self._sent = tensors, (buffer, places, assemble)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        self._sent[0][-1] = 1  # in use by the receiver
        return _receive, self._sent


def _receive(buffer: torch.Tensor, places: Places, assemble: Assemble | None) -> tuple[torch.Tensor, ...]:
    owned = buffer.numpy()[:-FLAG_BYTES]
    weakref.finalize(owned, _clear, buffer[-1:], os.getpid()).atexit = False
    tensors = tuple(_views(owned, places))
    return tensors if assemble is None else assemble(tensors)


def _clear(flag: torch.Tensor, process: int) -> None:
    if os.getpid() == process:  # a fork that drops its copy does not free this one
        flag.zero_()


def _views(owned: np.ndarray, places: Places) -> Iterator[torch.Tensor]:
    whole = torch.from_numpy(owned)
    for start, shape, dtype in places:
        yield whole[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape).data


def shared_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor in memory shared between processes, so that a worker that fills it sends no bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(num_bytes)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
