"""Slots: the buffers that windows of samples are read into, on the CPU or on a GPU.

On a GPU a slot is a pair of buffers, pinned host memory and device memory. Two events guard its reuse: the host
overwrites the pinned buffer only after the copy out of it is done, and a copy overwrites the device buffer only after
the consumer's kernels that read it are done. Batches are made on the consumer's stream, so that nothing else needs a
guard: no ``record_stream``, no new stream per epoch.
"""

from __future__ import annotations

import math
import mmap
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from h5chunk.errors import FieldError, OptionError, human_bytes
from h5chunk.store.read.csrrows import CsrRoom
from h5chunk.transforms.csr import CsrRows, Numbers

ALIGNMENT = 512  # of an array in a slot's buffer
KEPT = 2  # free buffers to keep: a loop holds one batch while the next is read
REUSED_BYTES = 1 << 20  # smaller buffers are left to malloc, which keeps their memory itself

ArrayShape = tuple[tuple[int, ...], torch.dtype]
Samples = torch.Tensor | CsrRows  # of one field, on the device
Fields = tuple[Any, ...]  # the Samples of each field
Destination = np.ndarray | CsrRoom  # where readers put the samples of a field
Take = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class BatchMemory:
    """Gives tensors whose memory returns here when the last reference to it is gone.

    Touching memory for the first time costs several times the copy into it (scripts/LOG.md has the figures), so that a
    loop that takes a fresh batch of 38 MB each time would spend most of its time in page faults. A tensor, all its
    views and everything that shares its storage keep the memory: it is never used twice at a time. Buffers are NumPy's,
    which asks the system for huge pages. The last reference may go in any thread, or in the middle of a call here (the
    garbage collector's), so that free buffers come and go in steps that cannot be divided.

    Parameters
    ----------
    keep : int
        Free buffers to keep.
    """

    def __init__(self, keep: int = KEPT) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=keep)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < REUSED_BYTES:
            return torch.empty(shape, dtype=dtype)
        buffer = self._take(num_bytes)
        owned = buffer[:num_bytes]
        weakref.finalize(owned, self._free.append, buffer).atexit = False
        return torch.from_numpy(owned).view(dtype).view(shape)

    def _take(self, num_bytes: int) -> np.ndarray:
        for _ in range(len(self._free)):
            try:
                buffer = self._free.pop()
            except IndexError:  # another thread took the last one
                break
            if num_bytes <= buffer.nbytes <= 2 * num_bytes:
                return buffer
            self._free.appendleft(buffer)
        try:
            return np.empty(num_bytes, np.uint8)
        except (MemoryError, ValueError):  # ValueError: more than NumPy can count
            raise OptionError(
                f"a batch takes {human_bytes(num_bytes)} of memory, more than there is: take a smaller batch_size, or "
                "of a wide matrix transforms=[Csr()]"
            ) from None

    def __reduce__(self) -> tuple[object, ...]:
        return BatchMemory, (self._free.maxlen,)  # memory stays in its process


class SingleBuffer:
    """Gives tensors that all lie in the same memory: each is valid until the next."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, in the place of the one before."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._held.numel() < num_bytes:
            self._held = BatchMemory().empty((num_bytes,), torch.uint8)
        return self._held[:num_bytes].view(dtype).view(shape).data


class Window(Protocol):
    """The samples of a field in a window."""

    shapes: list[ArrayShape]

    def destination(self, arrays: Sequence[torch.Tensor]) -> Destination:
        """Where readers put them, in arrays of these shapes."""

    def check(self) -> None:
        """Raise FileError if what was read is damaged."""

    def samples(self, arrays: Sequence[torch.Tensor]) -> Samples:
        """The samples of which batches are made."""


class DenseWindow:
    """Samples of equal size: one array."""

    def __init__(self, num_samples: int, layout: FieldLayout) -> None:
        self.shapes: list[ArrayShape] = [((num_samples, *layout.sample_shape), layout.dtype)]

    def destination(self, arrays: Sequence[torch.Tensor]) -> np.ndarray:
        """Where readers put them: (num_samples, sample_bytes) uint8."""
        (samples,) = arrays
        if not samples.numel():
            return np.empty((len(samples), 0), np.uint8)
        return samples.reshape(len(samples), -1).view(torch.uint8).numpy()

    def check(self) -> None:
        """Any bytes are valid."""

    def samples(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """The samples of which batches are made."""
        return arrays[0]


@dataclass(frozen=True)
class FieldLayout:
    """Shape and dtype of a field's samples."""

    sample_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.sample_shape) * self.dtype.itemsize

    def most_bytes(self, num_samples: int) -> int:
        """The bytes of any window of this many samples."""
        return aligned(num_samples * self.sample_bytes)

    def all_bytes(self, num_samples: int) -> int:
        """The bytes of all samples of the file."""
        return self.most_bytes(num_samples)

    def window(self, samples: np.ndarray) -> DenseWindow:
        """A window of these samples."""
        return DenseWindow(len(samples), self)

    @property
    def example(self) -> None:
        """Kernels are compiled without one."""

    def empty(self, num_samples: int, device: torch.device) -> torch.Tensor:
        """Memory for all samples of the file."""
        return torch.empty((num_samples, *self.sample_shape), dtype=self.dtype, device=device)

    def put(self, there: torch.Tensor, first: int, samples: torch.Tensor) -> None:
        """Copy some samples to their place among all."""
        there[first : first + len(samples)].copy_(samples)


Layouts = Mapping[str, Any]  # FieldLayout or h5chunk.feed.matrix_layout.MatrixLayout, by field


def torch_dtype(dtype: np.dtype, name: str) -> torch.dtype | None:
    """The torch dtype of a field; None for strings.

    Raises
    ------
    FieldError
        torch does not have it.
    """
    if dtype.kind == "S":
        return None
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        raise FieldError(f"field {name!r} has the type {dtype}, which torch does not have: leave it out") from None


def aligned(num_bytes: int) -> int:
    """The bytes that an array of this size takes in a slot's buffer."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def slot_bytes(layouts: Layouts, num_samples: int) -> int:
    """The bytes of any window of this many samples."""
    return sum(layout.most_bytes(num_samples) for layout in layouts.values())


class _Buffers:
    """The arrays of a window in the memory of a slot, which ``take`` gives piece by piece."""

    def __init__(self, layouts: Layouts, samples: np.ndarray, take: Take) -> None:
        self._windows: list[Window] = [layout.window(samples) for layout in layouts.values()]
        self.arrays = [[take(*shape) for shape in window.shapes] for window in self._windows]

    def destinations(self, names: Layouts) -> dict[str, Destination]:
        """Where readers put each field."""
        windows = zip(names, self._windows, self.arrays, strict=True)
        return {name: window.destination(arrays) for name, window, arrays in windows}

    def check(self) -> None:
        """Raise FileError if what was read is damaged."""
        for window in self._windows:
            window.check()

    def samples(self, arrays: list[list[torch.Tensor]]) -> Fields:
        """The samples of each field, in these arrays."""
        return tuple(window.samples(some) for window, some in zip(self._windows, arrays, strict=True))


class _Pieces:
    """Cuts a buffer into arrays, one behind the other."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self.used = buffer, 0
        self.places: list[tuple[int, tuple[int, ...], torch.dtype]] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next array."""
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
        self, layouts: Layouts, num_samples: int, memory: BatchMemory | None, gathered: BatchMemory | None = None
    ) -> None:
        self._layouts, self._memory = layouts, memory
        self._gathered = gathered or BatchMemory()
        self._buffers: _Buffers | None = None
        if memory is None:
            self._held = BatchMemory().empty((slot_bytes(layouts, num_samples),), torch.uint8)
        self.window: Fields = ()

    def begin(self, samples: np.ndarray) -> Mapping[str, Destination]:
        """Make room for a window of these samples; gives memory of each field."""
        take = _Pieces(self._held).take if self._memory is None else self._memory.empty
        self._buffers = _Buffers(self._layouts, samples, take)
        destinations = self._buffers.destinations(self._layouts)
        self.window = self._buffers.samples(self._buffers.arrays)
        return destinations

    def send(self) -> None:
        """The window is read: there is nowhere to send it."""
        if self._buffers is not None:
            self._buffers.check()

    def receive(self) -> None:
        """The consumer is about to use the window."""

    def gather(self, order: np.ndarray) -> Fields:
        """Copies of these samples of the window."""
        return gather(self.window, Numbers(order, torch.from_numpy(order)), self._gathered)

    def release(self) -> None:
        """The consumer is done with all batches of the window."""
        if self._memory is not None:
            self.window, self._buffers = (), None


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
    """A window in pinned memory and its copy on the device: one buffer each for all fields, one copy per window.

    Parameters
    ----------
    layouts : Layouts
    pinned : (slot_bytes,) uint8
        Memory for the largest window.
    stream : torch.cuda.Stream
        The stream of the copies.
    """

    def __init__(self, layouts: Layouts, pinned: np.ndarray, stream: torch.cuda.Stream) -> None:
        self._stream, self._layouts = stream, layouts
        self._pinned = torch.from_numpy(pinned)
        self._there = torch.empty(pinned.nbytes, dtype=torch.uint8, device=stream.device)
        self._used = 0
        self._buffers: _Buffers | None = None
        self.window: Fields = ()
        self._copied = torch.cuda.Event(blocking=True)
        self._consumed = torch.cuda.Event()
        self.release()  # who had the memory of the device buffer before may still be using it on the current stream

    def begin(self, samples: np.ndarray) -> Mapping[str, Destination]:
        """Make room for a window of these samples; gives pinned memory of each field."""
        if not self._copied.query():
            self._copied.synchronize()  # the host may overwrite the pinned buffer
        pieces = _Pieces(self._pinned)
        self._buffers = _Buffers(self._layouts, samples, pieces.take)
        self._used = pieces.used
        places = iter(pieces.places)
        there = [[view_at(self._there, *next(places)) for _ in arrays] for arrays in self._buffers.arrays]
        self.window = self._buffers.samples(there)  # valid from `receive` until `release`
        return self._buffers.destinations(self._layouts)

    def send(self) -> None:
        """Start the copy to the device; any thread may."""
        if self._buffers is not None:
            self._buffers.check()
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

    On the CPU by NumPy, because torch's threads wait for each other, which is slow where other work uses the cores.
    Rows of a matrix stay where they are, and are taken by number when a batch is made of them.
    """
    return tuple(
        field.take(samples) if isinstance(field, CsrRows) else _gather(field, samples, memory) for field in fields
    )


def _gather(field: torch.Tensor, samples: Numbers, memory: BatchMemory | None) -> torch.Tensor:
    if memory is None:
        return field.index_select(0, samples.there)
    out = memory.empty((len(samples.host), *field.shape[1:]), field.dtype)
    np.take(field.numpy(), samples.host, axis=0, out=out.numpy(), mode="clip")
    return out


def to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on a device; the caller waits until it is read, but not for what the device has to do before."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)
