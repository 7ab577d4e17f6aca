"""Slots: buffers on the CPU or a GPU that windows of samples are read into.

On a GPU, a slot is a pair of buffers, one in pinned host memory and one in device memory. Two events guard their reuse:
the host overwrites the pinned buffer only after the copy from it has ended, and a copy overwrites the device buffer
only after the consumer's kernels that read it have ended. Batches are made on the consumer's stream. Therefore no other
synchronisation is needed, neither ``record_stream`` nor a new stream per epoch.

If a slot always uses the same memory, the views of its arrays are created only once. Creating a view releases the GIL
and then waits for it, which is slow while other threads run.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from h5chunk.errors import FileError, OptionError, human_bytes
from h5chunk.feed.frames import FrameBuffers, FrameLayout, Frames, FrameWindow
from h5chunk.feed.layout import FieldLayout, Layouts, MatrixLayout, aligned_bytes, slot_bytes
from h5chunk.store.read.samples import CsrBuffers
from h5chunk.transforms.csr import CsrRows, SampleNumbers
from h5chunk.transforms.hold_out import as_array
from h5chunk.transforms.images import ImagesByNumber

KEPT = 2  # free buffers to keep per field, because a loop holds one batch while the next is read
BYTE = np.dtype(np.uint8)
REUSED_BYTES = 1 << 20  # smaller buffers are allocated by malloc, which reuses their memory itself

Fields = tuple[Any, ...]  # the samples of each field, on the device: a torch.Tensor or CsrRows
Destination = np.ndarray | CsrBuffers | FrameBuffers  # the memory that readers fill with the samples of a field
Arrays = list[list[torch.Tensor]]  # for each field, one array of dense samples or the arrays of a CSR matrix


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
            return np.empty(num_bytes, np.uint8)
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


class DenseWindow:
    """The samples of a dense field in one window. ``shapes`` has the shape and dtype of the array that holds them."""

    def __init__(self, layout: FieldLayout, samples: np.ndarray) -> None:
        self.shapes = [((len(samples), *layout.sample_shape), layout.dtype)]

    def destination(self, arrays: Sequence[torch.Tensor]) -> np.ndarray:
        """Return a view of the host array for readers to fill: (num_samples, sample_bytes) uint8."""
        samples = as_array(arrays[0])
        return samples.reshape(len(samples), -1 if samples.size else 0).view(np.uint8)

    def check(self) -> None:
        """Do nothing, because any bytes are valid."""

    def samples(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        return arrays[0]


class CsrWindow:
    """The rows of a CSR matrix in one window. ``shapes`` has the shapes and dtypes of the arrays that hold them."""

    def __init__(self, layout: MatrixLayout, samples: np.ndarray) -> None:
        starts = np.zeros(len(samples) + 1, np.int64)
        np.cumsum(layout.indptr[samples + 1] - layout.indptr[samples], out=starts[1:])
        self.shapes = layout.arrays(len(starts) - 1, int(starts[-1]))
        self._starts, self._layout = starts, layout
        self._room = CsrBuffers(starts, starts, None)

    def destination(self, arrays: Sequence[torch.Tensor]) -> CsrBuffers:
        """Fill in the row starts, and return views of the host arrays, into which readers write the entries."""
        starts, indices, *values = (array.numpy() for array in arrays)
        starts[:] = self._starts
        self._room = CsrBuffers(starts, indices, values[0] if values else None)
        return self._room

    def check(self) -> None:
        """Raise FileError unless all columns exist in the matrix, and no row repeats a column."""
        if self._layout.may_repeat:
            self._check_repeated()
        indices, columns = self._room.indices, self._layout.num_columns
        if not columns:
            return
        signed = indices.dtype.kind == "i"
        if not len(indices) or (not signed and np.iinfo(indices.dtype).max < columns):
            return
        most, least = int(indices.max()), int(indices.min()) if signed else 0
        if most >= columns or least < 0:
            wrong = most if most >= columns else least
            raise FileError(f"{self._layout.where} is damaged: it has an entry in column {wrong} of {columns}")

    def _check_repeated(self) -> None:
        indices, starts = self._room.indices, self._starts
        falls = np.flatnonzero(indices[1:] <= indices[:-1]) + 1
        if (starts[np.searchsorted(starts, falls)] == falls).all():
            return
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))  # a row is not in order
        order = np.lexsort((indices, rows))
        same = (np.diff(rows[order]) == 0) & (indices[order[1:]] == indices[order[:-1]])
        if same.any():
            column = int(indices[order[int(same.argmax())]])
            raise FileError(
                f"{self._layout.where} has a row with several entries in column {column}: write a file in which they "
                "are added up (h5chunk convert does so for .h5ad and 10x files)"
            )

    def samples(self, arrays: Sequence[torch.Tensor]) -> CsrRows:
        return CsrRows(arrays[0], self._starts, arrays[1], arrays[2] if len(arrays) > 2 else None)


Windows = dict[str, DenseWindow | CsrWindow | FrameWindow]
KINDS: dict[type, Any] = {FieldLayout: DenseWindow, MatrixLayout: CsrWindow, FrameLayout: FrameWindow}


def arrays_in(buffer: torch.Tensor, layouts: Layouts, num_samples: int) -> Arrays:
    """Divide a buffer into the arrays of each field, in the sizes for the largest window."""
    arrays: Arrays = []
    start = 0
    for layout in layouts.values():
        arrays.append([])
        for shape, dtype in layout.capacity(num_samples):
            stop = start + math.prod(shape) * dtype.itemsize
            arrays[-1].append(buffer[start:stop].view(dtype).view(shape))
            start += aligned_bytes([(shape, dtype)])
    return arrays


def beginnings(arrays: Arrays, windows: Windows) -> Arrays:
    """For each array of a slot, return the leading part that holds the given windows."""
    for own, window in zip(arrays, windows.values(), strict=True):
        if any(array.shape[0] < shape[0] for array, (shape, _) in zip(own, window.shapes, strict=True)):
            raise OptionError(
                "a window whose bad samples were replaced needs more memory than planned: use a smaller "
                "max_skipped, or repair the files"
            )
    return [
        [
            array if array.shape[0] == shape[0] else array[: shape[0]]
            for array, (shape, _) in zip(own, window.shapes, strict=True)
        ]
        for own, window in zip(arrays, windows.values(), strict=True)
    ]


class CpuSlot:
    """A slot in ordinary memory.

    Each window gets new memory from ``memory``; if that is None, all windows use the same memory. Samples that are
    gathered from a window get memory from ``gathered``, which several slots may share.
    """

    def __init__(
        self, layouts: Layouts, num_samples: int, memory: BatchMemory | None, gathered: BatchMemory | None = None
    ) -> None:
        self._layouts, self._memory = layouts, memory
        self._gathered = gathered or BatchMemory()
        self._arrays: Arrays = []  # reused by all windows if ``memory`` is None
        if memory is None:
            held = BatchMemory().empty((slot_bytes(layouts, num_samples),), torch.uint8)
            self._arrays = arrays_in(held, layouts, num_samples)
        self._windows: Windows = {}
        self.window: Fields = ()
        self.names, self._num_samples = tuple(layouts), num_samples
        self.tasks: Any = None  # the `LastingTasks` of all windows of ``num_samples``
        is_dense = all(isinstance(layout, FieldLayout) for layout in layouts.values())
        dense = layouts.values() if is_dense else ()
        self._shapes = [((num_samples, *layout.sample_shape), layout.dtype) for layout in dense]

    has_pinned = True  # see CudaSlot

    def holds(self, num_samples: int) -> bool:
        """Return whether a window of this size fits."""
        return self._memory is not None or num_samples <= self._num_samples

    def can_begin(self, _num_samples: int) -> bool:
        """Return True, because no window has to wait for memory."""
        return True

    def lasts(self, num_samples: int) -> bool:
        """Return whether a window of this size can be read by `LastingTasks`."""
        return num_samples == self._num_samples and bool(self._shapes)

    def begin_again(self) -> list[int]:
        """Prepare for a window that `LastingTasks` read, and return the addresses of its arrays, one per field."""
        memory, self._windows = self._memory, {}
        if memory is None:
            self.window = tuple(own[0] for own in self._arrays)
        else:
            self.window = tuple(memory.empty(*shape) for shape in self._shapes)
        return [array.data_ptr() for array in self.window]

    def begin(self, samples: np.ndarray) -> Mapping[str, Destination]:
        """Prepare for the window with these samples, and return the destinations of all fields."""
        self._windows = windows = windows_of(self._layouts, samples)
        if (memory := self._memory) is None:
            arrays = beginnings(self._arrays, windows)
        else:
            arrays = [[memory.empty(*shape) for shape in window.shapes] for window in windows.values()]
        self.window = samples_in(windows, arrays)
        return destinations_in(windows, arrays)

    sender: tuple[int | None, int | None] = None, None  # nothing has to be sent

    def send(self) -> None:
        """Do nothing, because the window is already in the memory in which it is used."""

    def check(self) -> None:
        """Raise FileError if the data that was read is damaged."""
        for window in self._windows.values():
            window.check()

    def return_pinned(self) -> None:
        """Do nothing, because there is no pinned memory."""

    def receive(self) -> None:
        """Do nothing, because there is no copy to wait for."""

    def gather(self, order: np.ndarray) -> Fields:
        """Copy samples of the window, given their positions in it, (n,) int64."""
        return gather(self.window, SampleNumbers(order, torch.from_numpy(order)), self._gathered)

    def release(self) -> None:
        """Release the memory of the window, after the consumer has used all its batches."""
        if self._memory is not None:
            self.window, self._windows = (), {}


def windows_of(layouts: Layouts, samples: np.ndarray) -> Windows:
    return {name: KINDS[type(layout)](layout, samples) for name, layout in layouts.items()}


def destinations_in(windows: Windows, arrays: Arrays) -> dict[str, Destination]:
    fields = zip(windows.items(), arrays, strict=True)
    return {name: window.destination(own) for (name, window), own in fields}


def samples_in(windows: Windows, arrays: Arrays) -> Fields:
    return tuple(window.samples(own) for window, own in zip(windows.values(), arrays, strict=True))


def gather(fields: Fields, samples: SampleNumbers, memory: BatchMemory | None) -> Fields:
    """Gather samples of all fields. On the CPU, the results are in memory from ``memory``.

    NumPy does this on the CPU, because torch's threads would wait for each other on busy cores. Rows of a matrix are
    only selected; they are copied when a batch is made.
    """
    gathered: list[Any] = []
    for field in fields:
        if isinstance(field, (CsrRows, Frames, ImagesByNumber)):
            gathered.append(field.take(samples))
        elif memory is None:
            gathered.append(field.index_select(0, samples.on_device))
        else:
            out = memory.empty((len(samples.host), *field.shape[1:]), field.dtype)
            np.take(as_array(field), samples.host, axis=0, out=as_array(out), mode="clip")
            gathered.append(out)
    return tuple(gathered)


def to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device. The caller may change the array at once, even if the copy is still running."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)
