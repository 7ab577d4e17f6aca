"""Memory for windows on a GPU: pinned host buffers that windows are read into, and device buffers they are copied to.

A window needs a pinned buffer only until it has been copied, but its device buffer until its batches have been used.
Therefore there are fewer pinned buffers. They are filled in turn, and stay in the processor's cache if windows are
small.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from h5chunk.feed.layout import FieldLayout, Layouts, slot_bytes
from h5chunk.feed.memory import PinnedMemory
from h5chunk.feed.slots import (
    Arrays,
    Destination,
    Fields,
    Windows,
    arrays_in,
    beginnings,
    destinations_in,
    gather,
    samples_in,
    to_device,
    windows_of,
)
from h5chunk.native import cuda
from h5chunk.transforms.compiled import current_stream
from h5chunk.transforms.csr import SampleNumbers

PINNED_BYTES = 96 << 20  # of all pinned buffers of small windows; more would not stay in the processor's cache
MIN_PINNED = 4  # pinned buffers of large windows: two are filled while one is copied


class PinnedBuffer:
    """A pinned host buffer that holds one window at a time.

    ``tasks`` are the read tasks that fill the buffer with a full window. They are kept, so that later windows reuse
    them.
    """

    def __init__(self, layouts: Layouts, num_samples: int) -> None:
        self._memory = PinnedMemory(slot_bytes(layouts, num_samples))
        self.bytes = torch.from_numpy(self._memory.bytes)
        self.arrays = arrays_in(self.bytes, layouts, num_samples)
        self.of_full_window: Mapping[str, Destination] | None = None
        self.tasks: Any = None
        self.copied: torch.cuda.Event | None = None  # recorded after the last copy from this memory

    @property
    def is_free(self) -> bool:
        return self.copied is None or self.copied.query()

    def wait(self) -> None:
        """Wait until the last copy is done."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()

    def close(self) -> None:
        """Free the memory. The caller must ensure that no copy from it is running."""
        self._memory.close()


def num_pinned(num_slots: int, num_bytes: int) -> int:
    """Return the number of pinned buffers for slots of ``num_bytes``.

    >>> num_pinned(30, 11 << 20), num_pinned(7, 38 << 20), num_pinned(2, 38 << 20)
    (8, 4, 2)
    """
    return min(num_slots, max(MIN_PINNED, PINNED_BYTES // max(1, num_bytes)))


class CudaSlot:
    """A device buffer that holds all fields of one window.

    A window is first read into one of the ``pinned`` host buffers, which slots share, and then copied to the device.
    ``num_samples`` is the size of the largest window, and ``stream`` is the CUDA stream for the copies. ``is_full`` is
    true if the window has that size and its destinations are the same as for the previous full window in its pinned
    buffer.
    """

    def __init__(
        self, layouts: Layouts, num_samples: int, pinned: deque[PinnedBuffer], stream: torch.cuda.Stream
    ) -> None:
        self._stream, self._layouts, self._all_pinned = stream, layouts, pinned
        self._pinned: PinnedBuffer | None = None
        self._bytes = torch.empty(slot_bytes(layouts, num_samples), dtype=torch.uint8, device=stream.device)
        self._largest = [layout.capacity(num_samples) for layout in layouts.values()]  # shapes of arrays
        self._arrays = arrays_in(self._bytes, layouts, num_samples)
        self._windows: Windows = {}
        self._full: Fields | None = None  # views of a full window of dense fields
        self.is_full, self._num_samples = False, num_samples
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tables: dict[int, np.ndarray] = {}  # copies of the whole buffer, by the address of the pinned buffer
        self.window: Fields = ()
        self._copied = torch.cuda.Event(blocking=True)
        self._consumed = torch.cuda.Event()
        self._copied.record(stream)  # makes the event
        self._consumed.record(torch.cuda.current_stream(stream.device))  # earlier users of the memory may still run
        with torch.cuda.device(stream.device):
            self._context = cuda.context()
        self._events = self._consumed.cuda_event, self._copied.cuda_event
        self._sending: cuda.Sending | None = None
        if self._context is not None:
            self._sending = cuda.Sending(self._context, stream.cuda_stream, *self._events)

    @property
    def has_pinned(self) -> bool:
        """Whether a pinned buffer is available. A copy from it may still be running."""
        return bool(self._all_pinned)

    @property
    def is_free(self) -> bool:
        """Whether `begin` would return without waiting."""
        return self.has_pinned and self._all_pinned[0].is_free

    @property
    def tasks(self) -> Any:
        """The tasks that read a full window into the pinned buffer; None if the slot has no pinned buffer."""
        return None if self._pinned is None else self._pinned.tasks

    @tasks.setter
    def tasks(self, tasks: Any) -> None:
        if self._pinned is not None:
            self._pinned.tasks = tasks

    def begin(self, samples: np.ndarray) -> Mapping[str, Destination]:
        """Take a pinned buffer, wait until the last copy from it is done, and return the destinations of all fields."""
        pinned = self._pinned = self._all_pinned.popleft()
        pinned.wait()
        is_full = len(samples) == self._num_samples
        if is_full and self._full is not None and pinned.of_full_window is not None:
            self._windows, self.window, self.is_full = {}, self._full, True
            self._copy_whole_buffer(pinned)
            return pinned.of_full_window
        self.is_full = False
        self._windows = windows = windows_of(self._layouts, samples)
        device, host = beginnings(self._arrays, windows), beginnings(pinned.arrays, windows)
        if [window.shapes for window in windows.values()] == self._largest:
            self._copy_whole_buffer(pinned)
        else:
            self._copy_arrays(device, host)
        self.window = samples_in(windows, device)  # valid from `receive` until `release`
        destinations = destinations_in(windows, host)
        if is_full and all(isinstance(layout, FieldLayout) for layout in self._layouts.values()):
            self._full, pinned.of_full_window = self.window, destinations
        return destinations

    def _copy_whole_buffer(self, pinned: PinnedBuffer) -> None:
        self._copies = [(self._bytes, pinned.bytes)]
        if self._sending is not None:
            address = pinned.bytes.data_ptr()
            if address not in self._tables:
                self._tables[address] = _copy_table(self._copies)
            self._sending.set_copies(self._tables[address])

    def _copy_arrays(self, device: Arrays, host: Arrays) -> None:
        self._copies = [pair for own in zip(device, host, strict=True) for pair in zip(*own, strict=True)]
        if self._sending is not None:
            self._sending.set_copies(_copy_table(self._copies))

    @property
    def sender(self) -> tuple[int | None, int | None]:
        """The addresses of a C function and its argument that do the same as `send`, or (None, None)."""
        return (None, None) if self._sending is None else (cuda.sender(), self._sending.address)

    def send(self) -> None:
        """Start the copy to the device. Any thread may call this."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._consumed)  # the copy may overwrite the device buffer
            for device, host in self._copies:
                device.copy_(host, non_blocking=True)
            self._copied.record(self._stream)

    def check(self) -> None:
        """Raise FileError if the data that was read is damaged."""
        for window in self._windows.values():
            window.check()

    def return_pinned(self) -> None:
        """Make the pinned buffer available to other slots. No thread may write to it any more."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.copied = self._copied
            self._all_pinned.append(pinned)

    def receive(self) -> None:
        """Make the consumer's current stream wait for the copy."""
        stream = current_stream(self._stream.device.index)
        if self._context is None or not cuda.order(self._context, stream, wait=self._events[1]):
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def gather(self, order: np.ndarray) -> Fields:
        """Copy samples of the window on the device, given their positions in it, (n,) int64."""
        return gather(self.window, SampleNumbers(order, to_device(order, self._stream.device)), None)

    def release(self) -> None:
        """Record an event on the consumer's current stream, after which the device buffer may be overwritten."""
        stream = current_stream(self._stream.device.index)
        if self._context is None or not cuda.order(self._context, stream, record=self._events[0]):
            self._consumed.record(torch.cuda.current_stream(self._stream.device))


def _copy_table(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> np.ndarray:
    places = [(device.data_ptr(), host.data_ptr(), host.nbytes) for device, host in copies]
    return np.array(places, np.int64).reshape(-1, 3)
