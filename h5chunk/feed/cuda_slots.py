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

from h5chunk.feed.columns import Destination, Kinds, Room, slot_bytes
from h5chunk.feed.memory import PinnedMemory
from h5chunk.feed.slots import Slot
from h5chunk.native import Buffer, available, cuda
from h5chunk.transforms.compiled import current_stream

PINNED_BYTES = 96 << 20  # of all pinned buffers of small windows; more would not stay in the processor's cache
MIN_PINNED = 4  # pinned buffers of large windows: two are filled while one is copied


class PinnedBuffer:
    """A pinned host buffer that windows are read into, one after another.

    ``num_queued`` windows are being read into the buffer by native threads, or will be once it is free.
    """

    def __init__(self, kinds: Kinds, num_samples: int) -> None:
        self._memory = PinnedMemory(slot_bytes(kinds, num_samples))
        self.room = Room(torch.from_numpy(self._memory.bytes), kinds.values(), num_samples)
        self.turn = Buffer(cuda.copied() if available() else None)
        self.num_queued = 0
        self.copied: torch.cuda.Event | None = None  # recorded after the last copy from this memory
        # native threads ask whether the last copy has ended, even after the slot that started it is gone
        self.senders: dict[int, Any] = {}

    @property
    def is_free(self) -> bool:
        return not self.num_queued and (self.copied is None or self.copied.query())

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


class CudaSlot(Slot):
    """A device buffer that holds all fields of one window.

    A window is first read into one of the ``pinned`` host buffers, which slots share, and then copied to the device.
    ``num_samples`` is the size of the largest window, and ``stream`` is the CUDA stream for the copies. A window that
    only native threads read is queued for a pinned buffer that is still in use; they begin once it is free.
    """

    def __init__(self, kinds: Kinds, num_samples: int, pinned: deque[PinnedBuffer], stream: torch.cuda.Stream) -> None:
        super().__init__(kinds, num_samples)
        self.device, self._stream, self._all_pinned = stream.device, stream, pinned
        self._pinned: PinnedBuffer | None = None
        memory = torch.empty(slot_bytes(kinds, num_samples), dtype=torch.uint8, device=stream.device)
        self._room = Room(memory, kinds.values(), num_samples)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tables: dict[int, np.ndarray] = {}  # copies of the whole buffer, by the address of the pinned buffer
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
            self._sending.events = self._consumed, self._copied
            self.sender = cuda.sender(), self._sending.address
        self.queues = self.queues and self._sending is not None  # else Python threads start the copy

    @property
    def _pinned_now(self) -> tuple[PinnedBuffer, ...]:
        """The pinned buffers so far. Another thread may be making more, so the deque must not be iterated over."""
        return tuple(self._all_pinned)

    def has_pinned(self, *, queued: bool) -> bool:
        """See `Slot.has_pinned`. A window that is queued shares a buffer with others, and another one does not."""
        return bool(self._all_pinned) if queued else any(not each.num_queued for each in self._pinned_now)

    def can_begin(self, *, queued: bool) -> bool:
        return self.has_pinned(queued=True) if queued else any(each.is_free for each in self._pinned_now)

    def _next_pinned(self, *, queued: bool) -> PinnedBuffer:
        """Take a pinned buffer in turn. Unless the window is ``queued`` for it, wait until the last copy is done."""
        if queued:
            pinned = self._all_pinned[0]
            self._all_pinned.rotate(-1)
            pinned.num_queued += 1
            self.buffer = pinned.turn
            return pinned
        unused = [each for each in self._pinned_now if not each.num_queued]
        assert unused, "a window was begun before a pinned buffer was free: see has_pinned"
        self._all_pinned.remove(unused[0])
        unused[0].wait()
        self.buffer = None
        return unused[0]

    def begin(self, samples: np.ndarray, *, queued: bool) -> Mapping[str, Destination]:
        """Take a pinned buffer, and return the destinations of all fields in it: see `Slot.begin`."""
        pinned = self._pinned = self._next_pinned(queued=queued)
        pinned.senders[id(self._sending)] = self._sending
        on_host, on_device = pinned.room.allocate(), self._room.allocate()
        columns, window = [], []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for kind in self.kinds.values():
            columns.append(kind.empty(samples, on_host))
            arrays = kind.arrays(columns[-1])
            copies += [(on_device(array.shape, array.dtype), array) for array in arrays]
            window.append(kind.copied(columns[-1], [device for device, _ in copies[-len(arrays) :]]))
        self._read, self.window = tuple(columns), tuple(window)
        if all(own is array for own, (_, array) in zip(pinned.room.arrays, copies, strict=True)):
            self._copy_whole_buffer(pinned)
        else:
            self._copies = copies
            if self._sending is not None:
                self._sending.set_copies(_copy_table(copies))
        return self._destinations()

    def _copy_whole_buffer(self, pinned: PinnedBuffer) -> None:
        self._copies = [(self._room.buffer, pinned.room.buffer)]
        if self._sending is not None:
            address = pinned.room.buffer.data_ptr()
            if address not in self._tables:
                self._tables[address] = _copy_table(self._copies)
            self._sending.set_copies(self._tables[address])

    def send(self) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._consumed)  # the copy may overwrite the device buffer
            for device, host in self._copies:
                device.copy_(host, non_blocking=True)
            self._copied.record(self._stream)

    def return_pinned(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is None:
            return
        pinned.copied = self._copied
        if pinned.num_queued:
            pinned.num_queued -= 1
            return
        if self._sending is not None:
            pinned.turn.last = self._sending.address
        self._all_pinned.append(pinned)

    def receive(self) -> None:
        stream = current_stream(self._stream.device.index)
        if self._context is None or not cuda.order(self._context, stream, wait=self._events[1]):
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def release(self) -> None:
        """Record an event on the consumer's current stream, after which the device buffer may be overwritten."""
        stream = current_stream(self._stream.device.index)
        if self._context is None or not cuda.order(self._context, stream, record=self._events[0]):
            self._consumed.record(torch.cuda.current_stream(self._stream.device))


def _copy_table(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> np.ndarray:
    places = [(device.data_ptr(), host.data_ptr(), host.nbytes) for device, host in copies]
    return np.array(places, np.int64).reshape(-1, 3)
