"""Slots: where windows of samples lie until their batches were taken, on the CPU or on a GPU.

On a GPU a slot is a pair of buffers, pinned host memory and device memory. Two events guard its reuse: the host
overwrites the pinned buffer only after the copy out of it is done, and a copy overwrites the device buffer only after
the consumer's kernels that read it are done. Batches are made on the consumer's stream, so that nothing else needs a
guard: no ``record_stream``, no new stream an epoch.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from h5chunk.errors import OptionError
from h5chunk.feed.memory import BatchMemory

ALIGNMENT = 512  # of a field in a slot's buffer


def find_device(device: str | torch.device) -> torch.device:
    """The device that a user names.

    Raises
    ------
    OptionError
        It is no CPU or CUDA device, or not there.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"device is {device!r}: give cpu or cuda: {str(error).splitlines()[0]}") from None
    if found.type not in ("cpu", "cuda"):
        raise OptionError(f"device is {device!r}: give cpu or cuda")
    if found.type == "cpu":
        return found
    if not torch.cuda.is_available():
        raise OptionError(f"device is {device!r} but torch finds no CUDA device: give cpu")
    if (found.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device is {device!r} but torch finds {torch.cuda.device_count()}: give a smaller number")
    return found


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody has taken."""
    return int(torch.cuda.mem_get_info(device)[0])


@dataclass(frozen=True)
class FieldSpace:
    """Shape and dtype of a field's samples in a slot."""

    sample_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.sample_shape) * self.dtype.itemsize


Spaces = Mapping[str, FieldSpace]
Tensors = tuple[torch.Tensor, ...]  # one a field


def slot_bytes(spaces: Spaces, num_samples: int) -> int:
    """Of a window of this many samples."""
    return sum(-(-num_samples * space.sample_bytes // ALIGNMENT) * ALIGNMENT for space in spaces.values())


class CpuSlot:
    """A window in ordinary memory. Each window gets memory of its own from ``memory``, or, reused, the same again.

    Gathered samples come in memory of ``gathered``, which slots may share.
    """

    def __init__(
        self, spaces: Spaces, num_samples: int, memory: BatchMemory | None, gathered: BatchMemory | None = None
    ) -> None:
        self._spaces, self._memory = spaces, memory
        self._gathered = gathered or BatchMemory()
        self._held: Tensors = ()
        if memory is None:
            self._held = tuple(
                BatchMemory().empty((num_samples, *space.sample_shape), space.dtype) for space in spaces.values()
            )
        self.window: Tensors = ()

    def begin(self, num_samples: int) -> dict[str, np.ndarray]:
        """Make room for a window; gives memory of each field, (num_samples, sample_bytes) uint8."""
        if self._memory is None:
            self.window = tuple(tensor[:num_samples] for tensor in self._held)
        else:
            self.window = tuple(
                self._memory.empty((num_samples, *space.sample_shape), space.dtype) for space in self._spaces.values()
            )
        return {name: _bytes_of(tensor) for name, tensor in zip(self._spaces, self.window, strict=True)}

    def send(self) -> None:
        """It is where it shall be."""

    def receive(self) -> None:
        """The consumer is about to use the window."""

    def gather(self, order: np.ndarray) -> Tensors:
        """These samples of the window, copied."""
        return gather(self.window, torch.from_numpy(order), self._gathered)

    def release(self) -> None:
        """The consumer is done with all batches of the window."""
        if self._memory is not None:
            self.window = ()


class PinnedMemory:
    """Host memory that a GPU copies from at full speed: exactly as much as was asked for, and given back in time.

    torch's own pinned allocator takes powers of two and keeps what was freed.

    Source: cudaHostRegister of the CUDA runtime.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, num_bytes))
        self.bytes = np.frombuffer(self._map, np.uint8)
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(self.bytes.ctypes.data, self.bytes.nbytes, 0)))

    def close(self) -> None:
        """Unpin it; nothing copies from it any more."""
        error = int(torch.cuda.cudart().cudaHostUnregister(self.bytes.ctypes.data))
        if error:
            warnings.warn(f"pinned memory could not be given back: CUDA error {error}", stacklevel=2)


class CudaSlot:
    """A window in pinned memory and its copy on the device: one buffer each for all fields, one copy for a window.

    Parameters
    ----------
    spaces : mapping of str to FieldSpace
    num_samples : int
        Of the largest window.
    pinned : (slot_bytes,) uint8
    stream : torch.cuda.Stream
        Of the copies.
    """

    def __init__(self, spaces: Spaces, num_samples: int, pinned: np.ndarray, stream: torch.cuda.Stream) -> None:
        self._stream, self._spaces, self._num_samples = stream, spaces, num_samples
        self._pinned = torch.from_numpy(pinned)
        self._there = torch.empty(pinned.nbytes, dtype=torch.uint8, device=stream.device)
        self._parts: dict[str, slice] = {}
        start = 0
        for name, space in spaces.items():
            self._parts[name] = slice(start, start + num_samples * space.sample_bytes)
            start += slot_bytes({name: space}, num_samples)
        self._bytes = {
            name: pinned[part].reshape(num_samples, spaces[name].sample_bytes) for name, part in self._parts.items()
        }
        self._fields = tuple(
            self._there[part].view(spaces[name].dtype).view(num_samples, *spaces[name].sample_shape)
            for name, part in self._parts.items()
        )
        self._used = 0
        self._copied = torch.cuda.Event(blocking=True)
        self._consumed = torch.cuda.Event()
        self.release()  # who had the memory of the device buffer before may still be using it on the current stream

    def begin(self, num_samples: int) -> dict[str, np.ndarray]:
        """Make room for a window; gives pinned memory of each field, (num_samples, sample_bytes) uint8."""
        if not self._copied.query():
            self._copied.synchronize()  # the host may overwrite the pinned buffer
        self._used = num_samples
        if num_samples == self._num_samples:
            return self._bytes
        return {name: part[:num_samples] for name, part in self._bytes.items()}

    def send(self) -> None:
        """Start the copy to the device; any thread may."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._consumed)  # the copy may overwrite the device buffer
            if self._used == self._num_samples:
                self._there.copy_(self._pinned, non_blocking=True)
            else:
                for name, part in self._parts.items():
                    some = slice(part.start, part.start + self._used * self._spaces[name].sample_bytes)
                    self._there[some].copy_(self._pinned[some], non_blocking=True)
            self._copied.record(self._stream)

    def receive(self) -> None:
        """The consumer's current stream waits for the copy."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    @property
    def window(self) -> Tensors:
        """All samples, on the device; valid from `receive` until `release`."""
        return self._fields if self._used == self._num_samples else tuple(f[: self._used] for f in self._fields)

    def gather(self, order: np.ndarray) -> Tensors:
        """These samples of the window, copied, on the device."""
        return gather(self.window, to_device(order, self._stream.device), None)

    def release(self) -> None:
        """The consumer has queued, on its current stream, all that reads the device buffer."""
        self._consumed.record(torch.cuda.current_stream(self._stream.device))


def gather(fields: Tensors, samples: torch.Tensor, memory: BatchMemory | None) -> Tensors:
    """Some samples of each field: on a GPU in torch's memory, on the CPU in that of ``memory``.

    By NumPy there: torch's threads wait for each other, which takes long where others use the cores.
    """
    if memory is None:
        return tuple(field.index_select(0, samples) for field in fields)
    rooms = tuple(memory.empty((len(samples), *field.shape[1:]), field.dtype) for field in fields)
    for field, room in zip(fields, rooms, strict=True):
        np.take(field.numpy(), samples.numpy(), axis=0, out=room.numpy(), mode="clip")
    return rooms


def to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on a device; the caller waits until it is read, but not for what the device has to do before."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """(num_samples, sample_bytes) uint8, in the same memory."""
    if not tensor.numel():
        return np.empty((len(tensor), 0), np.uint8)
    return tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()
