"""ChunkLoader: shuffled batches at the rate at which the machine can move bytes, on the device that wants them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from h5chunk.errors import OptionError, printable
from h5chunk.feed.asked import check_asked, counts_of, dataset_of, order_of
from h5chunk.feed.batchmaker import Normalize, Tensors, make_convert
from h5chunk.feed.dataset import ChunkDataset, Fields
from h5chunk.feed.device import find_device
from h5chunk.feed.orders import DataIdentity
from h5chunk.feed.pipeline import TIMEOUT_S
from h5chunk.feed.ranks import check_ranks, find_ranks
from h5chunk.feed.resident import Resident
from h5chunk.feed.room import Room
from h5chunk.feed.state import Resumable, State, save_state
from h5chunk.feed.stream import EpochReport, WindowStream
from h5chunk.feed.supply import Supply
from h5chunk.plan.echo import AUTO, check_echo, num_echoed
from h5chunk.store.guard.guard import Trusted
from h5chunk.store.read.files import Paths


class ChunkLoader(Resumable):
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
        Number of reading threads. Default: one per core, at most 10, and no more than decode compressed chunks in
        1 GiB together: each holds three chunks.
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
        Applied to the tuple of tensors of a batch, on the device; of no samples where the last one of a rank is empty.
    echo : float or "auto"
        How often each sample is trained: whenever a window of chunks has been trained, its samples are shuffled again
        and cut into other batches. 1.5 does so for every second batch, ``"auto"`` only while the next window is not
        there yet, and at most three times. For training that reading cannot keep up with; windows are of two batches
        at least then, unless ``window_chunks`` says otherwise. `report` tells fresh from echoed samples. There is no
        state to save then.
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
    checksums : {"off", "first", "always"}, optional
        As for `ChunkDataset`, before anything goes to the device; what stays in memory is checked when it is read.
        Default: off, or as the data set has it. ``"first"`` takes processor time in the first epoch alone.
    timeout : float
        Seconds after which threads that finish nothing are an error; 0: never.

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
    WorkerError
        While iterating: for ``timeout`` no thread finished anything.
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
        checksums: str | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        check_asked(reader, resident, num_threads, memory_bytes, timeout, transform)
        check_echo(echo)
        self._device = find_device(device)
        dataset = dataset_of(path, fields, subset, trusted, checksums)
        self._reader = dataset.new_reader()
        order, least_chunks = order_of(
            dataset,
            self._reader,
            batch_size,
            weights=weights,
            echo=echo,
            window_chunks=window_chunks,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pad=pad,
            ranks=find_ranks(lanes, rank, world_size),
        )
        self._supply = Supply(
            self._reader,
            reader,
            self._device,
            num_threads,
            counts=counts_of(dataset, order),
            lanes=order.lanes // order.world_size,
            timeout_s=timeout or None,
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
        self._identity = DataIdentity(dataset, weights, echo)
        self._order = order
        self._room = Room(self._supply, self._convert, self._device, memory_bytes, reuse=reuse)
        self.resident = self._room.choose_resident(resident, order)
        if not self.resident:
            self._plan = self._room.plan_windows(order, echo=echo, least_chunks=least_chunks)
            self._order = self._plan.order
        self.report = EpochReport()
        self._given_rank = rank
        self._feed: WindowStream | Resident | None = None
        self._feed_is_at: int | None = None  # the epoch whose windows it reads next, if it stands between two

    def __len__(self) -> int:
        """Batches of an epoch; with ``echo="auto"`` those without echoes."""
        fresh = self._order.num_batches
        return fresh if self._echo == AUTO else fresh + num_echoed(float(self._echo), fresh)

    @property
    def read_amplification(self) -> float:
        """Bytes that the next epoch reads of the file, on all ranks, over the bytes of its samples.

        More than 1 where a subset, or weights, want only a part of chunks that have to be read whole, as they are
        compressed or small; less than 1 where samples come more than once. Fields that are kept in memory, and what
        ``checksums`` reads again, are not counted.
        """
        return self._supply.read_amplification(self._order)

    @property
    def batch_sampler(self) -> Any:
        """Its ``sampler`` is this loader: there Lightning's Trainer looks for what has a ``set_epoch``."""
        return SimpleNamespace(sampler=self)

    def state_dict(self) -> State:
        """Where the epoch stands: a few integers, for `load_state_dict` of any loader or sampler of the same file.

        Raises
        ------
        OptionError
            The loader echoes: how far a window has been trained is not kept.
        """
        return save_state(*self._position(), self._identity())

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
            plan = None if self.resident else self._plan
            self._feed, close = self._room.start(order, start, plan, self._transform, self._echo)
            self._finalizer = weakref.finalize(self, close)
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

    def close(self) -> None:
        """Stop the threads, free the memory and close the file; the next iteration starts anew."""
        if self._feed is not None:
            self._finalizer()
            self._feed = self._feed_is_at = None
            self._convert.forget()

    def __getitem__(self, _: object) -> Any:
        raise OptionError("a ChunkLoader gives batches, not samples: iterate it, without a DataLoader around it")

    def __reduce__(self) -> Any:
        raise OptionError("a ChunkLoader stays in its process, with its threads: make one where it is used")

    def __enter__(self) -> ChunkLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        plan = None if self.resident else self._plan
        batches = f"{len(self)} batches of {self._order.batch_size}"
        return printable(f"ChunkLoader({self._room.describe(batches, self._order, plan, self._echo)})")
