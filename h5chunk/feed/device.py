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
from collections.abc import Callable, Mapping

import numpy as np
import torch

from h5chunk.errors import OptionError
from h5chunk.feed.memory import BatchMemory
from h5chunk.feed.spaces import CsrRows, CsrWindow, DenseWindow, Fields, Numbers, Spaces, aligned, slot_bytes
from h5chunk.store.read.csrrows import CsrRoom

Room = np.ndarray | CsrRoom  # where readers put the samples of a field
Take = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


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


class _Laid:
    """A window as it lies in the memory of a slot: what `h5chunk.feed.spaces` says it takes, taken piece by piece."""

    def __init__(self, spaces: Spaces, samples: np.ndarray, take: Take) -> None:
        self.windows: list[DenseWindow | CsrWindow] = [space.window(samples) for space in spaces.values()]
        self.arrays = [[take(*shape) for shape in window.shapes] for window in self.windows]

    def rooms(self, spaces: Spaces) -> dict[str, Room]:
        """Where readers put each field."""
        return {
            name: window.room(arrays) for name, window, arrays in zip(spaces, self.windows, self.arrays, strict=True)
        }

    def check(self) -> None:
        """Raise FileError if what was read cannot be."""
        for window in self.windows:
            window.check()

    def samples(self, arrays: list[list[torch.Tensor]]) -> Fields:
        """Of each field, in these arrays."""
        return tuple(window.samples(some) for window, some in zip(self.windows, arrays, strict=True))


class _Pieces:
    """Cuts a buffer into arrays, one behind the other."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self.used = buffer, 0
        self.places: list[tuple[int, tuple[int, ...], torch.dtype]] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next one."""
        self.places.append((self.used, shape, dtype))
        self.used += aligned(math.prod(shape) * dtype.itemsize)
        return view_at(self._buffer, *self.places[-1])


def view_at(buffer: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An array in a buffer of bytes."""
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class CpuSlot:
    """A window in ordinary memory. Each window gets memory of its own from ``memory``, or, reused, the same again.

    Gathered samples come in memory of ``gathered``, which slots may share.
    """

    def __init__(
        self, spaces: Spaces, num_samples: int, memory: BatchMemory | None, gathered: BatchMemory | None = None
    ) -> None:
        self._spaces, self._memory = spaces, memory
        self._gathered = gathered or BatchMemory()
        self._laid: _Laid | None = None
        if memory is None:
            self._held = BatchMemory().empty((slot_bytes(spaces, num_samples),), torch.uint8)
        self.window: Fields = ()

    def begin(self, samples: np.ndarray) -> Mapping[str, Room]:
        """Make room for a window of these samples; gives memory of each field."""
        take = _Pieces(self._held).take if self._memory is None else self._memory.empty
        self._laid = _Laid(self._spaces, samples, take)
        rooms = self._laid.rooms(self._spaces)
        self.window = self._laid.samples(self._laid.arrays)
        return rooms

    def send(self) -> None:
        """It is where it shall be."""
        if self._laid is not None:
            self._laid.check()

    def receive(self) -> None:
        """The consumer is about to use the window."""

    def gather(self, order: np.ndarray) -> Fields:
        """These samples of the window, copied."""
        return gather(self.window, Numbers(order, torch.from_numpy(order)), self._gathered)

    def release(self) -> None:
        """The consumer is done with all batches of the window."""
        if self._memory is not None:
            self.window, self._laid = (), None


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
    spaces : Spaces
    pinned : (slot_bytes,) uint8
        Of the largest window.
    stream : torch.cuda.Stream
        Of the copies.
    """

    def __init__(self, spaces: Spaces, pinned: np.ndarray, stream: torch.cuda.Stream) -> None:
        self._stream, self._spaces = stream, spaces
        self._pinned = torch.from_numpy(pinned)
        self._there = torch.empty(pinned.nbytes, dtype=torch.uint8, device=stream.device)
        self._used = 0
        self._laid: _Laid | None = None
        self.window: Fields = ()
        self._copied = torch.cuda.Event(blocking=True)
        self._consumed = torch.cuda.Event()
        self.release()  # who had the memory of the device buffer before may still be using it on the current stream

    def begin(self, samples: np.ndarray) -> Mapping[str, Room]:
        """Make room for a window of these samples; gives pinned memory of each field."""
        if not self._copied.query():
            self._copied.synchronize()  # the host may overwrite the pinned buffer
        pieces = _Pieces(self._pinned)
        self._laid = _Laid(self._spaces, samples, pieces.take)
        self._used = pieces.used
        places = iter(pieces.places)
        there = [[view_at(self._there, *next(places)) for _ in arrays] for arrays in self._laid.arrays]
        self.window = self._laid.samples(there)  # valid from `receive` until `release`
        return self._laid.rooms(self._spaces)

    def send(self) -> None:
        """Start the copy to the device; any thread may."""
        if self._laid is not None:
            self._laid.check()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._consumed)  # the copy may overwrite the device buffer
            self._there[: self._used].copy_(self._pinned[: self._used], non_blocking=True)
            self._copied.record(self._stream)

    def receive(self) -> None:
        """The consumer's current stream waits for the copy."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def gather(self, order: np.ndarray) -> Fields:
        """These samples of the window, on the device."""
        return gather(self.window, Numbers(order, to_device(order, self._stream.device)), None)

    def release(self) -> None:
        """The consumer has queued, on its current stream, all that reads the device buffer."""
        self._consumed.record(torch.cuda.current_stream(self._stream.device))


def gather(fields: Fields, samples: Numbers, memory: BatchMemory | None) -> Fields:
    """Some samples of each field: on a GPU in torch's memory, on the CPU in that of ``memory``.

    By NumPy there: torch's threads wait for each other, which takes long where others use the cores. Rows of a
    matrix stay where they are, and are taken by number when a batch is made of them.
    """
    return tuple(
        field.take(samples) if isinstance(field, CsrRows) else _gather(field, samples, memory) for field in fields
    )


def _gather(field: torch.Tensor, samples: Numbers, memory: BatchMemory | None) -> torch.Tensor:
    if memory is None:
        return field.index_select(0, samples.there)
    room = memory.empty((len(samples.host), *field.shape[1:]), field.dtype)
    np.take(field.numpy(), samples.host, axis=0, out=room.numpy(), mode="clip")
    return room


def to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on a device; the caller waits until it is read, but not for what the device has to do before."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)
