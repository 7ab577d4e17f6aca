"""ChunkLoader: shuffled batches at the rate at which the machine can move bytes, on the device that wants them."""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from h5chunk.errors import FieldError, OptionError
from h5chunk.feed.dataset import Fields, field_mapping, make_order, torch_dtype
from h5chunk.feed.device import Convert, CpuSlot, CudaSlot, FieldSpace
from h5chunk.feed.memory import BatchMemory
from h5chunk.feed.pipeline import WAIT_S, Load, Readers
from h5chunk.plan.layout import human_bytes
from h5chunk.plan.order import Order, Window
from h5chunk.store.direct import DirectField, NotDirect
from h5chunk.store.fill import available_cores
from h5chunk.store.format import open_file
from h5chunk.store.reader import H5Reader, model_cache

AHEAD = 6  # windows that are read ahead of the one in use; scripts/LOG.md
AHEAD_BYTES = 1 << 30  # but no more than this, unless memory_bytes says otherwise
MAX_THREADS = 8  # more threads wait for the GIL: 16 gave 33 GB/s, 8 gave 41, on a host that moves 55 to its GPU


class ChunkLoader:
    """Batches of a file, read ahead by threads: one line is all that a training loop needs.

    ::

        for images, labels in h5chunk.ChunkLoader("photos.h5", batch_size=256, device="cuda"):
            ...

    The order is that of `ChunkSampler` with the same arguments. Each iteration is an epoch, and the first windows of
    the next one are read while this one ends.

    Parameters
    ----------
    path : path
    batch_size : int
    fields : sequence or mapping of str, optional
        As for `ChunkDataset`; numbers only.
    shuffle, seed, window_chunks, drop_last
        As for `ChunkSampler`.
    device : str or torch.device
        Where batches shall be: ``"cpu"`` or a CUDA device.
    memory_bytes : int, optional
        Bound of the windows under way, in host memory (pinned for a GPU) plus device memory.
    num_threads : int, optional
        That read; default: one a core, at most 8.
    normalize : (mean, std), optional
        Of the first field, a number or one a channel each; uint8 counts as 0..1, as torchvision does it.
    dtype : torch.dtype, optional
        Of the first field. Default: as in the file, or float32 with ``normalize``; uint8 made floating gives 0..1.
    channels_last : bool
        Memory format of the first field's batches.
    transform : callable, optional
        Applied to the tuple of tensors of a batch, on the device.
    reuse : bool
        On the CPU, give batches that are valid only until the next one: none is ever allocated anew. (Without it,
        memory is used again as well, once nothing refers to it.)
    reader : {"auto", "direct", "h5py"}
        How bytes are read: by byte ranges, through HDF5, or by ranges where the file allows it.

    Raises
    ------
    FileError, FieldError
        As for `ChunkDataset`; while iterating: what a reading thread met, with file and chunk.
    OptionError
        An argument cannot be; ``reader="direct"`` with the reason why the file does not allow it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        *,
        fields: Fields | None = None,
        shuffle: bool = True,
        seed: int = 0,
        window_chunks: int | None = None,
        drop_last: bool = False,
        device: str | torch.device = "cpu",
        memory_bytes: int | None = None,
        num_threads: int | None = None,
        normalize: tuple[Sequence[float] | float, Sequence[float] | float] | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool = False,
        transform: Callable[[tuple[torch.Tensor, ...]], Any] | None = None,
        reuse: bool = False,
        reader: str = "auto",
    ) -> None:
        if reader not in ("auto", "direct", "h5py"):
            raise OptionError(f"reader is {reader!r}: give auto, direct or h5py")
        self._reader = H5Reader(path, field_mapping(fields))
        self._spaces = {name: _space(self._reader, name) for name in self._reader.fields}
        self._first = next(iter(self._spaces))
        try:
            self._device = torch.device(device)
        except RuntimeError as error:
            raise OptionError(f"device is {device!r}: give cpu or cuda: {error}") from None
        if self._device.type not in ("cpu", "cuda"):
            raise OptionError(f"device is {device!r}: give cpu or cuda")
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise OptionError(f"device is {device!r} but torch finds no CUDA device: give cpu")
        self._order = make_order(
            self._reader,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            window_chunks=window_chunks,
            drop_last=drop_last,
            interleave=None,
        )
        first = self._spaces[self._first]
        self._convert = Convert(
            first.dtype, dtype, normalize, channels_last, first.sample_shape, _channel_axis(self._reader)
        )
        self._direct, self._why = _direct_fields(self._reader, reader)
        for name, number, least in (("num_threads", num_threads, 1), ("memory_bytes", memory_bytes, 0)):
            if number is not None and (not isinstance(number, int) or number < least):
                raise OptionError(f"{name} is {number!r}: give a whole number, at least {least}")
        self._num_threads = num_threads or min(MAX_THREADS, available_cores())
        self._num_slots = self._choose_slots(memory_bytes)
        self._transform, self._reuse = transform, reuse
        self._feed: _Feed | None = None
        self._feed_is_at: int | None = None  # the epoch whose windows it reads next, if it stands between two

    def _choose_slots(self, memory_bytes: int | None) -> int:
        """Windows under way, within memory_bytes."""
        copies = 1 if self._device.type == "cpu" else 2
        least = (self._order.interleave if self._order.window_batches > 1 else 1) + 1
        ahead = AHEAD if memory_bytes is not None else min(AHEAD, AHEAD_BYTES // max(1, copies * self._slot_bytes))
        slots = max(least, least - 1 + ahead)
        if memory_bytes is not None:
            slots = min(slots, memory_bytes // max(1, copies * self._slot_bytes))
            if slots < least:
                raise OptionError(
                    f"memory_bytes is {memory_bytes} but {least} windows of {self._order.window_batches} batches need "
                    f"{least * copies * self._slot_bytes}: give that, or smaller window_chunks or batch_size"
                )
        return slots

    @property
    def _slot_samples(self) -> int:
        return min(self._order.window_batches * self._order.batch_size, max(1, self._order.num_samples))

    @property
    def _slot_bytes(self) -> int:
        return self._slot_samples * sum(space.sample_bytes for space in self._spaces.values())

    def __len__(self) -> int:
        return self._order.num_batches

    @property
    def order(self) -> Order:
        """The order of the epoch that comes next."""
        return self._order

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, from 0 on. Without it, each iteration goes on to the next epoch."""
        self._order = replace(self._order, epoch=epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._feed is not None and self._feed_is_at is None:
            raise OptionError("this loader is being iterated already: make a second one, or end that iteration first")
        order = self._order
        if self._feed is None or self._feed_is_at != order.epoch:
            self.close()
            self._feed = self._start(order)
        feed, self._feed_is_at = self._feed, None
        self._order = replace(order, epoch=order.epoch + 1)
        try:
            for number in range(order.num_batches):
                if self._feed is not feed:
                    raise OptionError("this loader was closed while it was iterated: end the iteration first")
                yield self._finish(feed, feed.batch(order.epoch, number))
            self._feed_is_at = order.epoch + 1
        finally:
            if self._feed_is_at is None and self._feed is feed:
                self.close()

    def _finish(self, feed: _Feed, batch: dict[str, torch.Tensor]) -> Any:
        """A batch as the user asked for it; on a GPU a copy, so that the slot can be filled again."""
        on_cpu = self._device.type == "cpu"
        first, *others = batch.items()
        tensors = [self._convert(first[1], keep=on_cpu)]
        tensors += [tensor if on_cpu else tensor.clone() for _, tensor in others]
        feed.release_used()
        result = tuple(tensors)
        return result if self._transform is None else self._transform(result)

    def _start(self, order: Order) -> _Feed:
        slots: list[Any]
        if self._device.type == "cpu":
            memory = None if self._reuse else BatchMemory(keep=self._num_slots)
            slots = [CpuSlot(self._spaces, self._slot_samples, memory) for _ in range(self._num_slots)]
        else:
            stream = torch.cuda.Stream(self._device)
            sizes = self._slot_samples, min(self._order.batch_size, self._slot_samples)
            slots = [CudaSlot(self._spaces, *sizes, self._device, stream) for _ in range(self._num_slots)]
        self._convert.to(self._device)
        if len(self._direct) < len(self._spaces):
            self._reader.set_caches(model_cache(self._reader, order.open_chunks, order.cache_w0))
        readers = Readers(self._reader, self._direct, self._num_threads)
        late = self._device.type == "cpu" and self._reuse
        self._finalizer = weakref.finalize(self, readers.close)
        try:
            feed = _Feed(readers, slots, order, late)
        except BaseException:
            self._finalizer()
            raise
        return feed

    def close(self) -> None:
        """Stop the threads, free the memory and close the file; the next iteration starts anew."""
        if self._feed is not None:
            self._finalizer()
            self._feed = self._feed_is_at = None

    def __enter__(self) -> ChunkLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        copies = 1 if self._device.type == "cpu" else 2
        how = ", ".join(f"{name}: {'h5py' if name in self._why else 'direct'}" for name in self._spaces)
        return (
            f"ChunkLoader({str(self._reader.path)!r} to {self._device}: {len(self)} batches of "
            f"{self._order.batch_size}; windows of {self._order.window_batches} batches, {self._num_slots} under way "
            f"({human_bytes(copies * self._num_slots * self._slot_bytes)}); {self._num_threads} threads; {how})"
        )


class _Feed:
    """Keeps windows coming, epoch after epoch, and gives their batches in order."""

    def __init__(self, readers: Readers, slots: list[Any], order: Order, late: bool) -> None:
        self._readers, self._free = readers, slots
        self._windows = _endless(order)
        self._batches: dict[tuple[int, int], tuple[Load, int]] = {}
        self._batch_size = order.batch_size
        self._left: dict[int, int] = {}  # batches that a slot still has to give, by its id
        self._used: list[Any] = []
        self._unsent: deque[Load] = deque()
        self._late = late  # whether a batch is used until the next one is asked for
        self._fill()

    def _fill(self) -> None:
        while self._free and (following := next(self._windows, None)) is not None:
            epoch, window = following
            slot = self._free.pop(0)
            load = self._readers.load(window, slot)
            self._unsent.append(load)
            self._left[id(slot)] = len(window.batches)
            for place, number in enumerate(window.batches):
                self._batches[epoch, number] = load, place

    def batch(self, epoch: int, number: int) -> dict[str, torch.Tensor]:
        """Batch ``number`` of an epoch; batches are asked for in order."""
        if self._late:
            self._release()
        load, place = self._batches.pop((epoch, number))
        load.wait(WAIT_S)
        self._send()
        slot = load.slot
        first = place * self._batch_size
        self._left[id(slot)] -= 1
        if not self._left[id(slot)]:
            self._used.append(slot)
        last = min(first + self._batch_size, len(load.window.samples))
        return slot.batch(first, last)

    def _send(self) -> None:
        """Hand on the windows that are there, in their order; copies to a device then run beside its work."""
        while self._unsent and self._unsent[0].is_ready and self._unsent[0].error is None:
            self._unsent.popleft().slot.send()

    def release_used(self) -> None:
        """The consumer has taken what it needs of the last batch."""
        if not self._late:
            self._release()

    def _release(self) -> None:
        for slot in self._used:
            slot.release()
            self._free.append(slot)
        self._used = []
        self._fill()


def _endless(order: Order) -> Iterator[tuple[int, Window]]:
    while order.num_batches:
        for window in order.windows():
            yield order.epoch, window
        order = replace(order, epoch=order.epoch + 1)


def _space(reader: H5Reader, name: str) -> FieldSpace:
    field = reader.fields[name]
    dtype = torch_dtype(field.dtype, name)
    if dtype is None:
        raise FieldError(f"field {name!r} holds strings, which no device takes: leave it out, or use ChunkDataset")
    return FieldSpace(field.sample_shape, dtype)


def _channel_axis(reader: H5Reader) -> int:
    return 2 if next(iter(reader.fields.values())).axes == "NHWC" else 0


def _direct_fields(reader: H5Reader, how: str) -> tuple[dict[str, DirectField], Mapping[str, str]]:
    """The fields that can be read by byte ranges, and why the others cannot."""
    if how == "h5py":
        return {}, dict.fromkeys(reader.fields, "asked for")
    direct: dict[str, DirectField] = {}
    why: dict[str, str] = {}
    with open_file(reader.path) as file:
        for name, field in reader.fields.items():
            try:
                direct[name] = DirectField(reader.path, file, field)
            except NotDirect as error:
                why[name] = str(error)
    if why and how == "direct":
        name, reason = next(iter(why.items()))
        raise OptionError(f"field {name!r} cannot be read directly: {reason}: use reader='auto' or 'h5py'")
    for name, reason in why.items():
        warnings.warn(f"field {name!r} is read through h5py, in one thread: {reason}", stacklevel=3)
    return direct, why
