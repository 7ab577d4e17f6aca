"""ChunkLoader: shuffled batches at the rate at which the machine can move bytes, on the device that wants them."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from h5chunk.errors import OptionError
from h5chunk.feed.batchmaker import AsItIs, BatchMaker, Normalize, Tensors, make_convert
from h5chunk.feed.dataset import ChunkDataset, Fields
from h5chunk.feed.device import find_device, free_bytes
from h5chunk.feed.memory import KEPT
from h5chunk.feed.orders import DataIdentity, make_order, make_picks
from h5chunk.feed.ranks import check_ranks, find_ranks
from h5chunk.feed.resident import Resident
from h5chunk.feed.state import State, load_state, save_state
from h5chunk.feed.stream import EpochReport, WindowStream
from h5chunk.feed.supply import Supply
from h5chunk.plan.echo import AUTO, check_echo, num_echoed
from h5chunk.plan.layout import human_bytes
from h5chunk.plan.order import Order
from h5chunk.plan.picks import WeightedPicks
from h5chunk.plan.slots import largest_window, plan_slots
from h5chunk.store.files import Paths
from h5chunk.store.fill import available_cores
from h5chunk.store.guard import Trusted

MAX_THREADS = 10  # more of them wait for each other, and keep the loop waiting; scripts/LOG.md
LOADING_BYTES, LOADING_SLOTS = 8 << 20, 4  # in what pieces resident data is read, and how many at a time
RESIDENT_SHARE = 4  # resident="auto" takes at most one part in so many of the device's free memory


class ChunkLoader:
    """Batches of a file, read ahead by threads: one line is all that a training loop needs.

    ::

        for images, labels in h5chunk.ChunkLoader("photos.h5", batch_size=256, device="cuda"):
            ...

    The order is that of `ChunkSampler` with the same arguments, unless data is echoed, or ``memory_bytes`` makes
    windows smaller. Each iteration is an epoch, and the first windows of the next one are read while this one ends.
    On a GPU, take the batches of an epoch on one stream. On the CPU a batch is a part of a window's memory:
    who keeps one keeps the window; ``clone()`` it to keep it alone.

    Parameters
    ----------
    path : path, sequence of paths, or ChunkDataset
        As for `ChunkDataset`. A data set stands for its files, fields and subset; not for its transform, or how it
        makes rows.
    batch_size : int
    fields : sequence or mapping of str, optional
        As for `ChunkDataset`; numbers only, and a matrix first.
    shuffle, seed, window_chunks, drop_last, pad, lanes, rank, world_size
        As for `ChunkSampler`.
    subset : array of bool or of int, optional
        A mask of all samples, or the numbers of those to visit; chunks in which there are none are not read.
    weights : array or str, optional
        As for `ChunkSampler`; of the samples of a subset, if there is one.
    device : str or torch.device
        Where batches shall be: ``"cpu"`` or a CUDA device.
    memory_bytes : int, optional
        Bound of what the loader holds in host memory (pinned for a GPU) plus device memory: windows under way, or the
        resident data; chunk caches; memory to decode in. Not of the batches that it gave. Without ``window_chunks``,
        windows are made smaller than the file recommends if they have to be.
    num_threads : int, optional
        That read; default: one a core, at most 10.
    normalize : (mean, std) or "l2", optional
        Of the first field, a number or one a channel each; uint8 counts as 0..1, as torchvision does it. Where a file
        does not say which axis holds the channels, it is the one of 1, 3 or 4. ``"l2"`` for a matrix: each row is
        divided by its Euclidean length, if it has one.
    dtype : torch.dtype, optional
        Of the first field. Default: as in the file, or float32 with ``normalize`` and for a matrix; images of uint8
        made floating give 0..1, codes of a matrix the values that they stand for.
    channels_last : bool
        Memory format of the first field's batches.
    sparse : {"dense", "csr"}, optional
        What rows of a sparse matrix become, on the device: (batch_size, columns) tensors, dense (the default) or
        ``torch.sparse_csr``. They are read and sent as they are in the file.
    binarize : float, optional
        Of a matrix: values from here on become 1, others 0 (in a CSR batch they stay among the entries).
    transform : callable, optional
        Applied to the tuple of tensors of a batch, on the device.
    echo : float or "auto"
        How often each sample is trained: whenever a window of chunks has been trained, its samples are shuffled again
        and cut into other batches. 1.5 does so for every second batch, ``"auto"`` only while the next window is not
        there yet, and at most three times. For training that reading cannot keep up with; windows are of two batches
        at least then, unless ``window_chunks`` says otherwise. `report` tells fresh from echoed samples.
    resident : bool or "auto"
        Read everything once and keep it on the device, a sparse matrix sparse; the order stays what it is. ``"auto"``:
        if the device is a GPU, and the data fits in ``memory_bytes`` or, without that, in a quarter of the memory that
        is free there.
    reuse : bool
        On the CPU, give batches that are valid only until the next one: none is ever allocated anew. (Without it,
        memory is used again as well, once nothing refers to it.)
    reader : {"auto", "direct", "mapped", "h5py"}
        How bytes are read: by byte ranges, through HDF5, or by ranges where the file allows it. ``"mapped"`` copies
        them out of mapped memory, which is faster where few cores are the limit; but a file that is cut short meanwhile
        ends the process without a message, where the others raise an error.
    trusted : bool, path or sequence of paths
        As for `ChunkDataset`.

    Attributes
    ----------
    report : EpochReport
        What the last epoch gave so far: samples/s, fresh ones, and how long its batches were waited for.
    resident : bool
        Whether the data stays on the device.

    Raises
    ------
    FileError, FieldError
        As for `ChunkDataset`; while iterating: what a reading thread met, with file and chunk.
    OptionError
        An argument cannot be; ``reader="direct"`` or ``"mapped"`` with the reason why the file does not allow it.
    """

    def __init__(
        self,
        path: Paths | ChunkDataset,
        batch_size: int,
        *,
        fields: Fields | None = None,
        shuffle: bool = True,
        seed: int = 0,
        window_chunks: int | None = None,
        drop_last: bool = False,
        pad: bool = False,
        lanes: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        subset: Any = None,
        weights: Any = None,
        device: str | torch.device = "cpu",
        memory_bytes: int | None = None,
        num_threads: int | None = None,
        normalize: Normalize | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool = False,
        sparse: str | None = None,
        binarize: float | None = None,
        transform: Callable[[Tensors], Any] | None = None,
        echo: float | str = 1,
        resident: bool | str = "auto",
        reuse: bool = False,
        reader: str = "auto",
        trusted: Trusted = False,
    ) -> None:
        _check_options(reader, resident, num_threads, memory_bytes)
        check_echo(echo)
        self._device = find_device(device)
        dataset = _dataset(path, fields, subset, trusted)
        self._reader = dataset.new_reader()
        samples = None if dataset.is_whole else dataset.samples
        picks = make_picks(self._reader, samples, weights, positions=False, values=dataset.values)
        order = make_order(
            self._reader,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            window_chunks=window_chunks,
            drop_last=drop_last,
            interleave=1 if echo != 1 else None,
            ranks=find_ranks(lanes, rank, world_size),
            pad=pad,
            picks=picks,
        )
        threads = num_threads or min(MAX_THREADS, available_cores())
        counts = _counts(order, self._reader.num_samples, samples)
        self._supply = Supply(
            self._reader, reader, self._device, threads, counts=counts, lanes=order.lanes // order.world_size
        )
        self._convert = make_convert(
            self._reader,
            normalize=normalize,
            dtype=dtype,
            channels_last=channels_last,
            sparse=sparse,
            binarize=binarize,
            reuse=reuse,
        )
        self._transform, self._reuse, self._echo = transform, reuse, echo
        self._identity = DataIdentity(dataset, weights)
        least_chunks = None
        if window_chunks is None:  # echoes of a single batch would be the same batch again
            least_chunks = 1 if echo == 1 else math.ceil(2 * batch_size / order.chunk_samples)
            order = replace(order, window_chunks=max(order.window_chunks, least_chunks))
        self._order = order
        self.resident = self._choose_resident(resident, memory_bytes)
        if not self.resident:
            self._plan = plan_slots(
                order,
                self._supply.window_bytes,
                self._beside_windows,
                memory_bytes=memory_bytes,
                num_spare=1 if echo == AUTO else 0,
                least_chunks=least_chunks,
            )
            self._order = self._plan.order
        self.report = EpochReport()
        self._given_rank = rank
        self._feed: WindowStream | Resident | None = None
        self._feed_is_at: int | None = None  # the epoch whose windows it reads next, if it stands between two
        self._start_batch = 0  # of the epoch that comes next
        self._running: tuple[Order, int] | None = None  # an epoch that is not over, and how many batches it gave

    def _beside_windows(self, order: Order) -> int:
        """Memory that streaming in this order takes beside the windows."""
        total = self._supply.other_bytes(order)
        if self._device.type == "cpu" and not self._reuse:  # windows that were given back and wait to be used again
            total += KEPT * self._supply.window_bytes(largest_window(order))
        if self._device.type == "cpu" and not self._convert.changes_nothing:
            total += (KEPT + 1) * order.batch_size * self._convert.sample_bytes
        return total

    def _choose_resident(self, wanted: bool | str, memory_bytes: int | None) -> bool:
        if not wanted or not self._order.num_samples:
            return False
        if wanted == AUTO and self._device.type == "cpu":
            return False
        held = self._supply.all_bytes
        loading = LOADING_SLOTS * self._supply.window_bytes(self._loading_samples)
        needed = held + loading + self._supply.other_bytes(self._order)
        room = math.inf if memory_bytes is None else memory_bytes
        if self._device.type == "cuda":
            free = free_bytes(self._device)
            room = min(room, free // RESIDENT_SHARE if wanted == AUTO and memory_bytes is None else free)
        if wanted is True and needed > room:
            raise OptionError(
                f"resident=True needs {needed} bytes, {held} of them for the data, and there is room for {room}: "
                "raise memory_bytes, or leave resident out"
            )
        return needed <= room

    @property
    def _loading_samples(self) -> int:
        """Of the pieces in which resident data is read."""
        sample_bytes = sum(space.sample_bytes for space in self._supply.spaces.values())
        return max(1, min(LOADING_BYTES // max(1, sample_bytes), self._order.num_samples // LOADING_SLOTS))

    def __len__(self) -> int:
        """Batches of an epoch; with ``echo="auto"`` those without echoes."""
        fresh = self._order.num_batches
        return fresh if self._echo == AUTO else fresh + num_echoed(float(self._echo), fresh)

    @property
    def order(self) -> Order:
        """The order of the epoch that comes next."""
        return self._order

    @property
    def batch_sampler(self) -> Any:
        """Its ``sampler`` is this loader: there Lightning's Trainer looks for what has a ``set_epoch``."""
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, from 0 on. Without it, each iteration goes on to the next epoch.

        The epoch at which a loaded state stands goes on where that says.
        """
        if epoch != self._order.epoch:
            self._start_batch = 0
        self._order = replace(self._order, epoch=epoch)
        self._running = None

    def state_dict(self) -> State:
        """Where the epoch stands: a few integers, for `load_state_dict` of any loader or sampler of the same file.

        Raises
        ------
        OptionError
            The loader echoes: how far a window has been trained is not kept.
        """
        if self._echo != 1:
            raise OptionError(f"echo is {self._echo!r}: the state of a loader that echoes cannot be saved: use echo=1")
        order, batch = self._running or (self._order, self._start_batch)
        return save_state(order, batch, self._identity())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` says, with the next iteration.

        Raises
        ------
        StateError
            It is of another file, seed, batch size or order.
        """
        epoch, self._start_batch = load_state(state, self._order, self._identity())
        self._order = replace(self._order, epoch=epoch)
        self._running = None

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise OptionError(
                "a ChunkLoader in a DataLoader's worker: each would give all samples; iterate it directly"
            )
        if self._feed is not None and self._feed_is_at is None:
            raise OptionError("this loader is being iterated already: make a second one, or end that iteration first")
        order, start = self._order, self._start_batch
        check_ranks(order, self._given_rank)
        report = EpochReport(started=time.perf_counter())
        if self._feed is None or ((self._feed_is_at != order.epoch or start) and not self.resident):
            self.close()
            self._feed = self._start(order, start)
        feed, self._feed_is_at, number = self._feed, None, start
        try:
            self._order, self._start_batch = replace(order, epoch=order.epoch + 1), 0
            self._running, self.report = (order, start), report
            batches = feed.batches(order, report, start)
            for number, batch in enumerate(batches, start + 1):
                self._running = order, number
                yield batch
                if self._feed is not feed:
                    raise OptionError("this loader was closed while it was iterated: end the iteration first")
            self._running, self._feed_is_at = None, order.epoch + 1
        finally:
            if self._feed is feed and self._feed_is_at is None:
                # what is on the device stays right; who counts batches stops at the last one, and that is an end, too
                at_last = not self._reuse and number == order.num_batches
                if self.resident or (at_last and next(batches, self) is self):
                    self._feed_is_at = order.epoch + 1
                else:
                    self.close()

    def _start(self, order: Order, start: int) -> WindowStream | Resident:
        self._convert.to(self._device, self._supply.example)
        keep = self.resident or (self._device.type == "cpu" and self._echo == 1)  # who changes a batch, changes no echo
        maker = BatchMaker(self._convert, self._transform, keep=keep)
        if not self.resident:
            late = self._device.type == "cpu" and self._reuse
            plan = self._plan
            feed, close = self._supply.start(
                order, plan.num_slots, plan.window_samples, maker, late=late, echo=self._echo, start=start
            )
            self._finalizer = weakref.finalize(self, close)
            return feed
        return self._start_resident(maker)

    def _start_resident(self, maker: BatchMaker) -> Resident:
        """Read the whole file, in its order."""
        num_samples, size = self._reader.num_samples, self._loading_samples
        pieces = Order(num_samples, chunk_samples=1, batch_size=size, window_chunks=1, shuffle=False)
        stream, close = self._supply.start(pieces, LOADING_SLOTS, size, AsItIs(), late=True)
        try:
            read = stream.batches(pieces, EpochReport())
            echo = 1.0 if self._echo == AUTO else float(self._echo)
            resident = Resident(self._supply.spaces, num_samples, self._device, read, maker, echo=echo)
        finally:
            close()
        self._finalizer = weakref.finalize(self, resident.close)
        return resident

    def close(self) -> None:
        """Stop the threads, free the memory and close the file; the next iteration starts anew."""
        if self._feed is not None:
            self._finalizer()
            self._feed = self._feed_is_at = None
            self._convert.forget()

    def __reduce__(self) -> Any:
        raise TypeError("a ChunkLoader stays in its process, with its threads: make one where it is used")

    def __enter__(self) -> ChunkLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        supply = self._supply
        how = ", ".join(f"{name}: {'h5py' if name in supply.why else 'direct'}" for name in supply.spaces)
        if self.resident:
            held = human_bytes(supply.all_bytes)
            what = f"all {self._reader.num_samples} samples resident ({held})"
        else:
            held = human_bytes(self._plan.num_slots * supply.window_bytes(self._plan.window_samples))
            batches = -(-self._plan.window_samples // self._order.batch_size)
            what = f"windows of {batches} batches, {self._plan.num_slots} under way ({held})"
        echo = "" if self._echo == 1 else f"; echo {self._echo}"
        return (
            f"ChunkLoader({str(self._reader.path)!r} to {self._device}: {len(self)} batches of "
            f"{self._order.batch_size}; {what}{echo}; {supply.num_threads} threads; {how})"
        )


def _dataset(path: Paths | ChunkDataset, fields: Fields | None, subset: Any, trusted: Trusted) -> ChunkDataset:
    """What is to be read, as a data set."""
    if isinstance(path, ChunkDataset):
        if fields is not None:
            raise OptionError("fields is given, but the data set has its own: give a path, or leave fields out")
        dataset = path
    else:
        dataset = ChunkDataset(path, fields=fields, trusted=trusted)
    return dataset if subset is None else dataset.subset(subset)


def _counts(order: Order, num_samples: int, samples: np.ndarray | None) -> np.ndarray | None:
    """How often each sample of the file may come in an epoch: (num_samples,) int64; None: all of them once."""
    if order.picks is None and not order.pad:
        return None
    most = order.picks.most if isinstance(order.picks, WeightedPicks) else 1
    counts = np.zeros(num_samples, np.int64)
    counts[slice(None) if samples is None else samples] = most
    if order.pad:  # a short lane begins again, and perhaps again
        counts *= 1 + math.ceil(order.lane_batch / max(1, order.num_samples // order.lanes))
    return counts


def _check_options(reader: str, resident: bool | str, num_threads: int | None, memory_bytes: int | None) -> None:
    if reader not in ("auto", "direct", "mapped", "h5py"):
        raise OptionError(f"reader is {reader!r}: give auto, direct, mapped or h5py")
    if not isinstance(resident, bool) and resident != "auto":
        raise OptionError(f"resident is {resident!r}: give True, False or 'auto'")
    for name, number, least in (("num_threads", num_threads, 1), ("memory_bytes", memory_bytes, 0)):
        if number is not None and (
            isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < least
        ):
            raise OptionError(f"{name} is {number!r}: give a whole number, at least {least}")
