"""Slots: the buffers that windows of samples are read into, on the CPU or on a GPU.

On a GPU a slot is a pair of buffers, pinned host memory and device memory. Two events guard its reuse: the host
overwrites the pinned buffer only after the copy out of it is done, and a copy overwrites the device buffer only after
the consumer's kernels that read it are done. Batches are made on the consumer's stream, so that nothing else needs a
guard: no ``record_stream``, no new stream per epoch.

Where a slot keeps its memory, the views of its arrays are made once: torch lets other threads run for each view, and
then waits for them.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from h5chunk.errors import OptionError, human_bytes
from h5chunk.feed.layout import ArrayShape, CsrWindow, FieldLayout, Layouts, aligned_bytes, slot_bytes
from h5chunk.store.read.csr import CsrBuffers
from h5chunk.transforms.csr import CsrRows, Numbers

KEPT = 2  # free buffers to keep: a loop holds one batch while the next is read
REUSED_BYTES = 1 << 20  # smaller buffers are left to malloc, which keeps their memory itself

Fields = tuple[Any, ...]  # the samples of each field, on the device: a torch.Tensor or CsrRows
Destination = np.ndarray | CsrBuffers  # where readers put the samples of a field
Arrays = list[list[torch.Tensor]]  # of each field


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


class _Window:
    """The arrays that the samples of a window take in a slot."""

    def __init__(self, layouts: Layouts, samples: np.ndarray) -> None:
        self._names = list(layouts)
        self.shapes: list[list[ArrayShape]] = []
        self._matrices: list[CsrWindow | None] = []
        for layout in layouts.values():
            if isinstance(layout, FieldLayout):
                self._matrices.append(None)
                self.shapes.append([((len(samples), *layout.sample_shape), layout.dtype)])
            else:
                self._matrices.append(matrix := layout.window(samples))
                self.shapes.append(matrix.shapes)

    def destinations(self, arrays: Arrays) -> dict[str, Destination]:
        """Where readers put each field; of dense samples (num_samples, sample_bytes) uint8."""
        fields = zip(self._names, self._matrices, arrays, strict=True)
        return {
            name: _rows_of_bytes(own[0].numpy()) if matrix is None else matrix.destination(own)
            for name, matrix, own in fields
        }

    def samples(self, arrays: Arrays) -> Fields:
        """The samples of each field, in these arrays."""
        fields = zip(self._matrices, arrays, strict=True)
        return tuple(own[0] if matrix is None else matrix.rows(own) for matrix, own in fields)

    def check(self) -> None:
        """Raise FileError if the entries of a matrix are damaged; any bytes are valid dense samples."""
        for matrix in self._matrices:
            if matrix is not None:
                matrix.check()


def _rows_of_bytes(samples: np.ndarray) -> np.ndarray:
    if not samples.size:
        return np.empty((len(samples), 0), np.uint8)
    return samples.reshape(len(samples), -1).view(np.uint8)


class _FixedArrays:
    """The arrays of the largest window, one behind the other in a buffer."""

    def __init__(self, layouts: Layouts, num_samples: int, buffer: torch.Tensor) -> None:
        self._arrays: Arrays = []
        start = 0
        for layout in layouts.values():
            own = []
            for shape, dtype in layout.capacity(num_samples):
                stop = start + math.prod(shape) * dtype.itemsize
                own.append(buffer[start:stop].view(dtype).view(shape))
                start += aligned_bytes([(shape, dtype)])
            self._arrays.append(own)

    def of(self, window: _Window) -> Arrays:
        """The arrays of a window: those of the largest one as they are, or the beginning of each."""
        fields = zip(self._arrays, window.shapes, strict=True)
        return [
            [_first(array, shape[0]) for array, (shape, _) in zip(own, shapes, strict=True)] for own, shapes in fields
        ]

    def are_all(self, arrays: Arrays) -> bool:
        """Whether these are the arrays of the largest window."""
        return all(
            one is other
            for own, others in zip(arrays, self._arrays, strict=True)
            for one, other in zip(own, others, strict=True)
        )


def _first(array: torch.Tensor, count: int) -> torch.Tensor:
    return array if len(array) == count else array[:count]


class CpuSlot:
    """A window in ordinary memory. Each window gets memory of its own from ``memory``, or, reused, the same again.

    Gathered samples come in memory of ``gathered``, which slots may share.
    """

    def __init__(
        self, layouts: Layouts, num_samples: int, memory: BatchMemory | None, gathered: BatchMemory | None = None
    ) -> None:
        self._layouts, self._memory = layouts, memory
        self._gathered = gathered or BatchMemory()
        self._fixed: _FixedArrays | None = None
        if memory is None:
            held = BatchMemory().empty((slot_bytes(layouts, num_samples),), torch.uint8)
            self._fixed = _FixedArrays(layouts, num_samples, held)
        self._window: _Window | None = None
        self.window: Fields = ()

    def begin(self, samples: np.ndarray) -> Mapping[str, Destination]:
        """Allocate memory for a window of these samples; returns the destination of each field."""
        self._window = window = _Window(self._layouts, samples)
        if self._memory is None:
            assert self._fixed is not None
            arrays = self._fixed.of(window)
        else:
            arrays = [[self._memory.empty(*shape) for shape in shapes] for shapes in window.shapes]
        destinations = window.destinations(arrays)
        self.window = window.samples(arrays)
        return destinations

    def send(self) -> None:
        """Check the window that was read. It stays where it is."""
        if self._window is not None:
            self._window.check()

    def receive(self) -> None:
        """Prepare for use by the consumer: there is nothing to do."""

    def gather(self, order: np.ndarray) -> Fields:
        """Copies of these samples of the window."""
        return gather(self.window, Numbers(order, torch.from_numpy(order)), self._gathered)

    def release(self) -> None:
        """Let go of the window: the consumer is done with all its batches."""
        if self._memory is not None:
            self.window, self._window = (), None


class CudaSlot:
    """A window in pinned memory and its copy on the device: one buffer each for all fields.

    Parameters
    ----------
    layouts : Layouts
    num_samples : int
        Of the largest window.
    pinned : (slot_bytes,) uint8
    stream : torch.cuda.Stream
        The stream of the copies.
    """

    def __init__(self, layouts: Layouts, num_samples: int, pinned: np.ndarray, stream: torch.cuda.Stream) -> None:
        self._stream, self._layouts = stream, layouts
        self._buffers = (
            torch.empty(pinned.nbytes, dtype=torch.uint8, device=stream.device),
            torch.from_numpy(pinned),
        )
        self._device, self._host = (_FixedArrays(layouts, num_samples, buffer) for buffer in self._buffers)
        self._window: _Window | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.window: Fields = ()
        self._copied = torch.cuda.Event(blocking=True)
        self._consumed = torch.cuda.Event()
        self.release()  # who had the memory of the device buffer before may still be using it on the current stream

    def begin(self, samples: np.ndarray) -> Mapping[str, Destination]:
        """Wait until the pinned buffer may be overwritten; returns the destination of each field in it."""
        if not self._copied.query():
            self._copied.synchronize()
        self._window = window = _Window(self._layouts, samples)
        device, host = self._device.of(window), self._host.of(window)
        self._copies = [self._buffers]
        if not self._host.are_all(host):
            self._copies = [pair for own in zip(device, host, strict=True) for pair in zip(*own, strict=True)]
        self.window = window.samples(device)  # valid from `receive` until `release`
        return window.destinations(host)

    def send(self) -> None:
        """Start the copy to the device; any thread may."""
        if self._window is not None:
            self._window.check()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._consumed)  # the copy may overwrite the device buffer
            for device, host in self._copies:
                device.copy_(host, non_blocking=True)
            self._copied.record(self._stream)

    def receive(self) -> None:
        """Let the consumer's current stream wait for the copy."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def gather(self, order: np.ndarray) -> Fields:
        """These samples of the window, on the device."""
        return gather(self.window, Numbers(order, to_device(order, self._stream.device)), None)

    def release(self) -> None:
        """Note that the consumer has queued, on its current stream, all that reads the device buffer."""
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
    """Copy an array to a device; the caller waits until it is read, but not for what the device has to do before."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)
