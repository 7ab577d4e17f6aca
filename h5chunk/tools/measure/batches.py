"""Measure the batch rates of `ChunkLoader`, torch's DataLoader and plain h5py.

Each way stays open between measurements, so that several can be measured in turns.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader

from h5chunk.feed.budget import RESIDENT_SHARE, free_bytes
from h5chunk.feed.dataset import ChunkDataset, Fields
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.plan.order import Order
from h5chunk.plan.selection import FixedSelection
from h5chunk.store.hdf5.open import open_file
from h5chunk.store.read.fields import MatrixField
from h5chunk.store.read.files import Paths
from h5chunk.store.read.reader import H5Reader

SETTLE_S, SETTLE_STEP_S = (
    0.5,
    0.005,
)  # how long threads that read ahead are waited for, and how often they are looked at


@dataclass
class Epochs:
    """An open source of batches; each iteration is an epoch of at least one batch of fields.

    Attributes
    ----------
    batches : iterable
    device : str
        Where the batches are: its work is waited for before a clock is read.
    read_ahead : int
        Samples that may have been read ahead.
    close : callable
        Ends what gives the batches, and frees what it held.
    """

    batches: Iterable[Any]
    device: str
    read_ahead: int
    close: Callable[[], None]


class BatchRate:
    """Measures the rate of batches, epoch after epoch.

    Parameters
    ----------
    epochs : Epochs
        Closed with this object, or if its first batch fails.
    """

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._batches = _endless(epochs.batches)
        try:
            with warnings.catch_warnings():  # more workers than cores, a fork with threads: it was asked for
                warnings.simplefilter("ignore")
                next(self._batches)
        except BaseException:
            epochs.close()
            raise

    def rate(self, seconds: float, lead_s: float) -> float:
        """Samples/s over about this many seconds, and at least one batch.

        Before that, what was read ahead is used up, as far as ``lead_s`` seconds allow.
        """
        self._take(lead_s, self._epochs.read_ahead)
        self._synchronize()
        started = time.perf_counter()
        num_samples = self._take(seconds)
        self._synchronize()
        return num_samples / max(1e-9, time.perf_counter() - started)

    def _take(self, seconds: float, most: int | None = None) -> int:
        deadline, num_samples = time.perf_counter() + seconds, 0
        while True:
            num_samples += len(next(self._batches)[0])
            if time.perf_counter() >= deadline or (most is not None and num_samples >= most):
                return num_samples

    def _synchronize(self) -> None:
        if self._epochs.device != "cpu":
            torch.cuda.synchronize(self._epochs.device)

    def close(self) -> None:
        """Close the source and free its memory."""
        self._batches.close()
        self._epochs.close()


def _endless(epochs: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from epochs


def settle() -> None:
    """Wait until reading threads are idle, so that they do not disturb the next measurement."""
    until = time.perf_counter() + SETTLE_S
    while time.perf_counter() < until:
        used = time.process_time()
        time.sleep(SETTLE_STEP_S)
        if time.process_time() - used < SETTLE_STEP_S / 4:
            return


def open_loader(dataset: ChunkDataset, order: Order, *, device: str, **options: Any) -> Epochs:
    """Open a `ChunkLoader` in this order.

    Raises
    ------
    FileError, FieldError, OptionError
        As `ChunkLoader`.
    """
    with warnings.catch_warnings():  # why HDF5 reads is said in the report
        warnings.simplefilter("ignore")
        sampler = ChunkSampler.of_order(dataset, order)
        loader = ChunkLoader(dataset, sampler=sampler, device=device, **{"resident": False, **options})
    return Epochs(loader, device, loader.read_ahead_samples, loader.close)


def open_dataset(dataset: ChunkDataset, order: Order, *, num_workers: int) -> Epochs:
    """Open `ChunkDataset` and `ChunkSampler` in torch's DataLoader, in this order.

    Raises
    ------
    FileError, FieldError, OptionError
        As `ChunkDataset` and `ChunkSampler`.
    """
    sampler = ChunkSampler.of_order(dataset, order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epochs = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)

    def close() -> None:
        if (running := epochs._iterator) is not None and num_workers:
            running._shutdown_workers()  # type: ignore[attr-defined]
        dataset.close()

    return Epochs(epochs, "cpu", (2 * num_workers + 1) * order.batch_size, close)


def make_dataset(path: Paths, fields: Fields | None, trusted: bool) -> ChunkDataset:
    """Open a data set, for callers that do not import torch."""
    return ChunkDataset(path, fields=fields, trusted=trusted)


def first_samples(dataset: ChunkDataset, batch_size: int, num_samples: int) -> Order:
    """The default order of a data set, restricted to its first samples."""
    order = ChunkSampler(dataset, batch_size).order
    if order.selection is None or num_samples == order.num_samples:
        return replace(order, num_samples=num_samples)
    starts = order.selection.resolve(order.seed, order.epoch).starts  # all samples of files whose chunks differ
    cut = FixedSelection(np.append(starts[starts < num_samples], num_samples))
    return replace(order, num_samples=num_samples, selection=cut)


def resident_bytes(device: str) -> int | None:
    """Upper limit on the bytes of data resident on a GPU; None for the CPU."""
    return None if device == "cpu" else free_bytes(torch.device(device)) // RESIDENT_SHARE


class PlainLoop:
    """Reads single random samples by ``h5py.File(path)[name][i]``, stacked into batches, as most training loops do.

    Parameters
    ----------
    reader : H5Reader
    num_samples : int
        The first samples, which are drawn from.
    batch_size : int
    seed : int
        Of the random order.
    """

    def __init__(self, reader: H5Reader, num_samples: int, batch_size: int, seed: int = 0) -> None:
        self._file = open_file(reader.path)
        fields = [each for each in reader.fields.values() if not isinstance(each, MatrixField)]
        self._datasets = [self._file[each.dataset] for each in fields]
        self._matrix = self._file[reader.matrix.dataset] if reader.matrix is not None else None
        self._num_columns = reader.matrix.num_columns if reader.matrix is not None else 0
        self._rng = np.random.default_rng(seed)
        self._num_samples, self._batch_size = num_samples, batch_size

    def rate(self, seconds: float) -> float:
        """Samples/s over about this many seconds, at least one sample."""
        started, done = time.perf_counter(), 0
        while not done or time.perf_counter() < started + seconds:
            done += self._read_batch(started + seconds)
        return done / (time.perf_counter() - started)

    def _read_batch(self, deadline: float) -> int:
        """Read a batch, or the part of it that the time allows; returns its samples."""
        samples: list[list[Any]] = [[] for _ in self._datasets]
        done = 0
        for row in self._rng.integers(0, self._num_samples, self._batch_size).tolist():
            for dataset, column in zip(self._datasets, samples, strict=True):
                column.append(dataset[row])
            if self._matrix is not None:
                self._read_row(self._matrix, row)
            done += 1
            if time.perf_counter() >= deadline:
                break
        for column in samples:
            np.stack(column)
        return done

    def _read_row(self, matrix: h5py.Group, row: int) -> None:
        start, stop = matrix["indptr"][row : row + 2].tolist()
        dense = np.zeros(self._num_columns, np.float32)
        dense[matrix["indices"][start:stop]] = matrix["data"][start:stop]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
