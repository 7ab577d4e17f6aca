"""How fast batches come, from `ChunkLoader` or torch's DataLoader, and how fast a GPU takes bytes: for `h5chunk bench`.

What is measured stays open between slices of time, so that several can take turns. Nothing here knows what a figure is
compared with.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from h5chunk.feed.dataset import ChunkDataset, Fields
from h5chunk.feed.device import PinnedMemory, find_device, free_bytes
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.room import RESIDENT_SHARE
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.plan.line import Picks
from h5chunk.plan.order import Order
from h5chunk.store.guard.guard import Trusted
from h5chunk.store.read.files import Paths

SETTLE_S, SETTLE_STEP_S = 0.5, 0.005  # for what is read ahead: at most, and how often it is looked
LEAD = 0.15  # part of a slice that is taken before it, uncounted: batches that were read ahead during a pause
COPY_BYTES = 256 << 20  # of a copy to the device


class Batches:
    """Batches, epoch after epoch, with the time they take.

    Parameters
    ----------
    epochs : iterable
        Each iteration is an epoch of batches: tuples or lists of fields, at least one batch.
    sample_bytes : int
    device : torch.device
        Where the batches are: its work is waited for before a clock is read.
    close : callable
        Ends what gives them.
    """

    def __init__(
        self, epochs: Iterable[Any], sample_bytes: int, device: torch.device, close: Callable[[], None]
    ) -> None:
        self._batches = _endless(epochs)
        self._sample_bytes, self._device, self._close = sample_bytes, device, close
        with warnings.catch_warnings():  # more workers than cores, a fork with threads: it was asked for
            warnings.simplefilter("ignore")
            next(self._batches)
        _settle()

    def rate(self, seconds: float) -> float:
        """Bytes/s, as samples are decoded, over about so many seconds and at least one batch."""
        self._take(LEAD * seconds)
        self._synchronize()
        started = time.perf_counter()
        num_samples = self._take(seconds)
        self._synchronize()
        taken = max(1e-9, time.perf_counter() - started)
        _settle()
        return num_samples * self._sample_bytes / taken

    def _take(self, seconds: float) -> int:
        deadline, num_samples = time.perf_counter() + seconds, 0
        while True:
            num_samples += len(next(self._batches)[0])
            if time.perf_counter() >= deadline:
                return num_samples

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """End it; what it held is free."""
        self._batches.close()
        self._close()


def _endless(epochs: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from epochs


def _settle() -> None:
    """Wait until threads have read ahead as far as they may, so that they do not disturb what is measured next."""
    until = time.perf_counter() + SETTLE_S
    while time.perf_counter() < until:
        used = time.process_time()
        time.sleep(SETTLE_STEP_S)
        if time.process_time() - used < SETTLE_STEP_S / 4:
            return


def loader_batches(
    path: Paths,
    batch_size: int,
    *,
    fields: Fields | None,
    device: str,
    num_samples: int,
    sample_bytes: int,
    trusted: Trusted = False,
    reader: str = "auto",
    reuse: bool = False,
    resident: bool = False,
) -> Batches:
    """Batches of a `ChunkLoader` over the first ``num_samples`` samples of a file.

    Raises
    ------
    FileError, FieldError, OptionError
        As `ChunkLoader`.
    """
    with warnings.catch_warnings():  # why HDF5 reads is said in the report
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"device": device, "reader": reader, "reuse": reuse, "resident": resident}
        loader = ChunkLoader(path, batch_size, fields=fields, trusted=trusted, **options)
    loader._order = _first(loader.order, num_samples)
    try:
        return Batches(loader, sample_bytes, torch.device(device), loader.close)
    except BaseException:
        loader.close()
        raise


def dataset_batches(
    path: Paths,
    batch_size: int,
    *,
    fields: Fields | None,
    num_workers: int,
    num_samples: int,
    sample_bytes: int,
    trusted: Trusted = False,
) -> Batches:
    """Batches of `ChunkDataset` and `ChunkSampler` in a DataLoader, of the first ``num_samples`` samples of a file.

    Raises
    ------
    FileError, FieldError, OptionError
        As `ChunkDataset` and `ChunkSampler`.
    """
    dataset = ChunkDataset(path, fields=fields, trusted=trusted)
    sampler = ChunkSampler(dataset, batch_size)
    sampler._order = _first(sampler.order, num_samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epochs = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)

    def close() -> None:
        if (running := epochs._iterator) is not None and num_workers:
            running._shutdown_workers()  # type: ignore[attr-defined]
        dataset.close()

    return Batches(epochs, sample_bytes, torch.device("cpu"), close)


def _first(order: Order, num_samples: int) -> Order:
    """The order of the first samples alone."""
    if order.picks is None or num_samples == order.num_samples:
        return replace(order, num_samples=num_samples)
    starts = order.picks.drawn(order.seed, order.epoch).starts  # all samples of files whose chunks differ
    cut = Picks(np.append(starts[starts < num_samples], num_samples))
    return replace(order, num_samples=num_samples, picks=cut)


class DeviceCopy:
    """Copies of pinned memory to a GPU, one after the other."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self._device)
        with torch.cuda.device(self._device):
            self._pinned = PinnedMemory(COPY_BYTES)
        self._host = torch.from_numpy(self._pinned.bytes[:COPY_BYTES])
        self._host.zero_()

    def rate(self, seconds: float) -> float:
        """Bytes/s over about so many seconds."""
        torch.cuda.synchronize(self._device)
        started, num_bytes = time.perf_counter(), 0
        while True:
            self._there.copy_(self._host, non_blocking=True)
            torch.cuda.synchronize(self._device)
            num_bytes += COPY_BYTES
            taken = time.perf_counter() - started
            if taken >= seconds:
                return num_bytes / taken

    def close(self) -> None:
        """Give the memory back."""
        torch.cuda.synchronize(self._device)
        self._pinned.close()
        del self._host, self._there


def check_device(device: str) -> str:
    """The device's name for people.

    Raises
    ------
    OptionError
        It is no CPU or CUDA device, or not there.
    """
    found = find_device(device)
    return "cpu" if found.type == "cpu" else f"{device} ({torch.cuda.get_device_name(found)})"


def resident_room(device: str) -> int | None:
    """Bytes that data may take to stay on a GPU; None for the CPU."""
    found = torch.device(device)
    return None if found.type == "cpu" else free_bytes(found) // RESIDENT_SHARE


def torch_version() -> str:
    """Of torch."""
    return str(torch.__version__)
