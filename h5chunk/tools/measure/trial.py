"""How fast a setting of `h5chunk tune` gives batches: `ChunkLoader`, or a DataLoader's workers, in a given order."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from h5chunk.feed.dataset import ChunkDataset, Fields
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.plan.order import Order
from h5chunk.store.guard.guard import Trusted

Path = str | os.PathLike[str]

MOST_DRAIN = 3  # times the seconds of a measurement, to use up what was read ahead


@dataclass
class Epochs:
    """What gives batches: each iteration is an epoch. ``stock``: samples that may have been read ahead."""

    batches: Iterable[Any]
    close: Callable[[], None]
    stock: int


class Trial:
    """Batches, epoch after epoch, as fast as they come.

    Parameters
    ----------
    epochs : Epochs
    device : torch.device
        Where the batches are: its work is waited for before a clock is read.
    """

    def __init__(self, epochs: Epochs, device: torch.device) -> None:
        self._batches = _endless(epochs.batches)
        self._device, self._close, self._stock = device, epochs.close, epochs.stock
        with warnings.catch_warnings():  # more workers than cores, a fork with threads: it was asked for
            warnings.simplefilter("ignore")
            next(self._batches)

    def rate(self, seconds: float) -> float:
        """Samples/s over about so many seconds, once what was read ahead is used up."""
        self._take(MOST_DRAIN * seconds, self._stock)
        self._synchronize()
        started = time.perf_counter()
        num_samples = self._take(seconds, None)
        self._synchronize()
        return num_samples / max(1e-9, time.perf_counter() - started)

    def _take(self, seconds: float, most: int | None) -> int:
        deadline, num_samples = time.perf_counter() + seconds, 0
        while True:
            num_samples += len(next(self._batches)[0])
            if time.perf_counter() >= deadline or (most is not None and num_samples >= most):
                return num_samples

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """End it; what it held is free."""
        self._batches.close()
        self._close()


def _endless(batches: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from batches


def loader_trial(path: Path, order: Order, *, fields: Fields | None, device: str, trusted: Trusted = False) -> Trial:
    """Batches of a `ChunkLoader` in this order; their `rate` is in samples/s.

    Raises
    ------
    FileError, FieldError, OptionError
        As `ChunkLoader`.
    """
    return _batches(_loader(path, order, fields, trusted, device), device)


def dataset_trial(
    path: Path, order: Order, *, fields: Fields | None, num_workers: int, trusted: Trusted = False
) -> Trial:
    """Batches of `ChunkDataset` in a DataLoader in this order; their `rate` is in samples/s.

    Raises
    ------
    FileError, FieldError, OptionError
        As `ChunkDataset` and `ChunkSampler`.
    """
    return _batches(_dataset(path, order, fields, trusted, num_workers), "cpu")


def first_epoch(
    path: Path,
    order: Order,
    seconds: float,
    *,
    fields: Fields | None,
    device: str,
    num_workers: int | None,
    trusted: Trusted = False,
) -> int:
    """Samples that come within so many seconds of the first epoch; at least a batch. Without workers: `ChunkLoader`."""
    until = time.perf_counter() + seconds
    if num_workers is None:
        made = _loader(path, order, fields, trusted, device)
    else:
        made = _dataset(path, order, fields, trusted, num_workers)
    num_samples = 0
    try:
        for batch in made.batches:
            num_samples += len(batch[0])
            if time.perf_counter() >= until:
                break
        return num_samples
    finally:
        made.close()


def _batches(made: Epochs, device: str) -> Trial:
    try:
        return Trial(made, torch.device(device))
    except BaseException:
        made.close()
        raise


def _loader(path: Path, order: Order, fields: Fields | None, trusted: Trusted, device: str) -> Epochs:
    with warnings.catch_warnings():  # why HDF5 reads is said in the report
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"device": device, "window_chunks": order.window_chunks, "resident": False}
        loader = ChunkLoader(path, order.batch_size, fields=fields, trusted=trusted, **options)
    loader._order = order
    loader._plan = loader._room.plan_windows(order, echo=1, least_chunks=None)
    return Epochs(loader, loader.close, loader._plan.num_slots * loader._plan.window_samples)


def _dataset(path: Path, order: Order, fields: Fields | None, trusted: Trusted, num_workers: int) -> Epochs:
    dataset = ChunkDataset(path, fields=fields, trusted=trusted)
    sampler = ChunkSampler(dataset, order.batch_size, window_chunks=order.window_chunks)
    sampler._order = dataset._order = order
    dataset._cache_known = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epochs = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)

    def close() -> None:
        if (running := epochs._iterator) is not None and num_workers:
            running._shutdown_workers()  # type: ignore[attr-defined]
        dataset.close()

    return Epochs(epochs, close, (2 * num_workers + 1) * order.batch_size)
