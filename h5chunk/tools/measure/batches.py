"""Measure the batch rates of `ChunkLoader`, torch's DataLoader and plain h5py.

Loaders stay open between measurements, so that several loaders can be measured in turns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader

from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.machine import warnings_filtered
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.order import Order
from h5chunk.plan.selection import FixedSelection
from h5chunk.sources.decode import decode
from h5chunk.sources.kinds import ImageOptions
from h5chunk.store.hdf5.open import open_file
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.store.read.ragged import ImagesField, RaggedField
from h5chunk.store.read.source import Source
from h5chunk.store.read.vlen import VlenField
from h5chunk.tools.measure.checks import CROP

SETTLE_S, SETTLE_STEP_S = 0.5, 0.005  # timeout and interval of checks whether threads are idle


class BatchRate:
    """Measure the rate of a loader's batches over many epochs.

    ``epochs`` is a loader: each iteration over it yields at least one batch, which is a tuple of fields. The clock is
    read after all work on ``device`` has finished. The loader prefetches up to ``read_ahead`` samples, also between
    measurements. ``close`` is called by the method `close`, and if the first batch fails.
    """

    def __init__(
        self, epochs: Iterable[Any], device: str, order: Order, read_ahead: int, close: Callable[[], None]
    ) -> None:
        self._device, self._read_ahead, self._close = device, read_ahead, close
        first = next(order.rounds(), None)
        self._round = 1 if first is None else first.num_windows * first.window_batches
        self._batches = (batch for _ in itertools.count() for batch in epochs)
        try:
            with warnings_filtered("ignore"):  # torch warns of more workers than cores, and of forks with threads
                next(self._batches)
        except BaseException:
            close()
            raise

    def warm_up(self, seconds: float) -> None:
        """Consume batches until all prefetch buffers have been used, but stop after about ``seconds``."""
        self._take(seconds, 2 * self._read_ahead)

    def rate(self, seconds: float, lead_s: float, max_s: float = 0.0) -> float:
        """Measure samples/s for about ``seconds``, with at least one batch.

        Prefetched samples are first consumed for up to ``lead_s`` seconds. All batches of a window become ready at
        once, so complete rounds of windows are measured, unless that takes more than ``max_s`` seconds.
        """
        self._take(lead_s, self._read_ahead)
        self._synchronize()
        started = time.perf_counter()
        num_samples = self._take(seconds, max_s=max_s)
        self._synchronize()
        return num_samples / max(1e-9, time.perf_counter() - started)

    def _take(self, seconds: float, max_samples: int | None = None, max_s: float = 0.0) -> int:
        started, num_samples, num_batches = time.perf_counter(), 0, 0
        while True:
            num_samples, num_batches = num_samples + len(next(self._batches)[0]), num_batches + 1
            taken_s = time.perf_counter() - started
            is_round = num_batches % self._round == 0 or taken_s >= max_s
            if (taken_s >= seconds and is_round) or (max_samples is not None and num_samples >= max_samples):
                return num_samples

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Close the loader and free its memory."""
        self._batches.close()
        self._close()


def wait_for_readers() -> None:
    """Wait until reader threads are idle, so that they do not disturb the next measurement."""
    until = time.perf_counter() + SETTLE_S
    while time.perf_counter() < until:
        used = time.process_time()
        time.sleep(SETTLE_STEP_S)
        if time.process_time() - used < SETTLE_STEP_S / 4:
            return


def open_loader(dataset: ChunkDataset, order: Order, *, device: str, **options: Any) -> BatchRate:
    """Open a `ChunkLoader` that yields batches in ``order``, and read its first batch."""
    with warnings_filtered("ignore"):  # the report explains why the file is read through HDF5
        sampler = ChunkSampler.of_order(dataset, order)
        loader = ChunkLoader(dataset, batch_sampler=sampler, device=device, **{"resident": False, **options})
    return BatchRate(loader, device, loader.order, loader.read_ahead_samples, loader.close)


def open_dataset(dataset: ChunkDataset, order: Order, *, num_workers: int) -> BatchRate:
    """Open a DataLoader that reads a `ChunkDataset` in ``order``, and read its first batch."""
    sampler = ChunkSampler.of_order(dataset, order)
    with warnings_filtered("ignore"):
        epochs = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)

    def close() -> None:
        if (running := epochs._iterator) is not None and num_workers:
            running._shutdown_workers()  # type: ignore[attr-defined]
        dataset.close()

    return BatchRate(epochs, "cpu", order, (2 * num_workers + 1) * order.batch_size, close)


def first_samples(dataset: ChunkDataset, batch_size: int, num_samples: int) -> Order:
    """Return the default order of a data set, restricted to its first samples."""
    order = ChunkSampler(dataset, batch_size).order
    if order.selection is None or num_samples == order.num_samples:
        return replace(order, num_samples=num_samples)
    starts = order.selection.resolve(
        order.seed, order.epoch
    ).starts  # the selection is all samples if the files' chunks differ
    cut = FixedSelection(np.append(starts[starts < num_samples], num_samples))
    return replace(order, num_samples=num_samples, selection=cut)


def plain_rate(
    reader: Source, batches: Iterator[np.ndarray], seconds: float, cache: CacheSettings | None = None
) -> float:
    """Measure samples/s of ``h5py.File(path)[name][i]``, stacked into batches, as in a training loop without h5chunk.

    ``batches`` yields indices of samples without end. ``cache`` is the chunk cache. Default: that of h5py. A warm-up of
    the same duration precedes the measurement.
    """
    done, warm = 0, False
    options = {f"rdcc_{name}": value for name, value in asdict(cache).items()} if cache else {}
    with open_file(reader.path, **options) as file:
        datasets = [file[field.dataset] for field in reader.fields.values() if isinstance(field, Field)]
        others = [_row_reader(file, field) for field in reader.ragged_fields.values()]
        started = time.perf_counter()
        while not done or not warm or time.perf_counter() < started + seconds:
            if not warm and time.perf_counter() >= started + seconds:
                started, done, warm = time.perf_counter(), 0, True
            samples: list[list[Any]] = [[] for _ in datasets]
            for row in next(batches).tolist():
                for dataset, column in zip(datasets, samples, strict=True):
                    column.append(dataset[row])
                for read_row in others:
                    read_row(row)
                done += 1
                if time.perf_counter() >= started + seconds:
                    break
            for column in samples:
                np.stack(column)
        return done / (time.perf_counter() - started)


def _row_reader(file: h5py.File, field: RaggedField) -> Callable[[int], Any]:
    """Return a function that reads a matrix row, an array or an image, as a plain training loop would."""
    group = file[field.dataset]
    if isinstance(field, MatrixField):
        columns = field.num_columns

        def read_row(row: int) -> None:
            dense = np.zeros(columns, np.float32)
            start, stop = group["indptr"][row : row + 2].tolist()
            dense[group["indices"][start:stop]] = group["data"][start:stop]

        return read_row

    if isinstance(field, VlenField):
        return lambda row: group[row]
    assert isinstance(field, ImagesField)
    options = ImageOptions(color="rgb" if field.channels == 3 else "gray")

    def read_image(row: int) -> torch.Tensor:
        start, stop = group["offsets"][row : row + 2].tolist()
        pixels = group["data"][start:stop]
        if field.form == "encoded":
            pixels = np.array(decode(pixels.tobytes(), options).image)
        image = torch.from_numpy(pixels.reshape(group["heights"][row], group["widths"][row], field.channels))
        return torch.nn.functional.interpolate(image.permute(2, 0, 1)[None], (CROP, CROP), mode="bilinear")

    return read_image
