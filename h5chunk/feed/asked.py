"""What a loader is asked for: its data, how often each sample may come, and arguments that cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.feed.dataset import ChunkDataset, Fields
from h5chunk.feed.orders import make_order, make_picks
from h5chunk.plan.order import Order
from h5chunk.plan.picks import WeightedPicks
from h5chunk.store.guard.checksums import OFF
from h5chunk.store.guard.guard import Trusted
from h5chunk.store.read.files import Paths
from h5chunk.store.read.reader import H5Reader


def dataset_of(
    path: Paths | ChunkDataset, fields: Fields | None, subset: Any, trusted: Trusted, checksums: str | None = None
) -> ChunkDataset:
    """What is to be read, as a data set.

    Raises
    ------
    FileError, FieldError, OptionError
        As `ChunkDataset`; ``fields`` or ``checksums`` beside a data set.
    """
    if isinstance(path, ChunkDataset):
        if fields is not None:
            raise OptionError("fields is given, but the data set has its own: give a path, or leave fields out")
        if checksums is not None:
            raise OptionError("checksums is given, but the data set has its own: give them there, or give a path")
        dataset = path
    else:
        dataset = ChunkDataset(path, fields=fields, trusted=trusted, checksums=checksums or OFF)
    return dataset if subset is None else dataset.subset(subset)


def order_of(
    dataset: ChunkDataset,
    reader: H5Reader,
    batch_size: int,
    *,
    weights: Any,
    echo: float | str,
    window_chunks: int | None,
    **options: Any,
) -> tuple[Order, int | None]:
    """The order of the first epoch, and the least chunks that its windows may be made of to fit in memory.

    None: they stay as they were asked for. ``options`` are those of `make_order`.
    """
    samples = None if dataset.is_whole else dataset.samples
    order = make_order(
        reader,
        batch_size,
        window_chunks=window_chunks,
        interleave=1 if echo != 1 else None,
        picks=make_picks(reader, samples, weights, positions=False, values=dataset.values),
        **options,
    )
    if window_chunks is not None:
        return order, None
    least = 1 if echo == 1 else math.ceil(2 * batch_size / order.chunk_samples)  # of one batch: the same batch again
    return replace(order, window_chunks=max(order.window_chunks, least)), least


def counts_of(dataset: ChunkDataset, order: Order) -> np.ndarray | None:
    """How often each sample of the file may come in an epoch: (n,) int64; None: all of them once."""
    if order.picks is None and not order.pad:
        return None
    most = order.picks.most if isinstance(order.picks, WeightedPicks) else 1
    counts = np.zeros(dataset.new_reader().num_samples, np.int64)
    counts[slice(None) if dataset.is_whole else dataset.samples] = most
    if order.pad:  # a short lane begins again, and perhaps again
        counts *= 1 + math.ceil(order.lane_batch / max(1, order.num_samples // order.lanes))
    return counts


def check_asked(
    reader: str,
    resident: bool | str,
    num_threads: int | None,
    memory_bytes: int | None,
    timeout: float,
    transform: Callable[..., Any] | None = None,
) -> None:
    """Raise OptionError for what cannot be, whatever the file."""
    if reader not in ("auto", "direct", "mapped", "h5py"):
        raise OptionError(f"reader is {reader!r}: give auto, direct, mapped or h5py")
    if not isinstance(resident, bool) and resident != "auto":
        raise OptionError(f"resident is {resident!r}: give True, False or 'auto'")
    for name, number, least in (("num_threads", num_threads, 1), ("memory_bytes", memory_bytes, 0)):
        if number is not None and (
            isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < least
        ):
            raise OptionError(f"{name} is {number!r}: give a whole number, at least {least}")
    if transform is not None and not callable(transform):
        raise OptionError(f"transform is {transform!r}: give a function of a batch's tuple of tensors")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout < math.inf:
        raise OptionError(f"timeout is {timeout!r}: give seconds, or 0 to wait for ever")
