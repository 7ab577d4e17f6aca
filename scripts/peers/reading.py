"""Read batches by index for peers: in this process, in threads that read ahead, or in DataLoader workers.

Every peer can use all three methods, and is compared with its fastest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from peers import REUSED, Source

Allocate = Callable[[int], np.ndarray]
Batch = tuple[torch.Tensor, torch.Tensor]


class Reader(Protocol):
    """Read a batch: images into the memory from ``allocate(n)`` or into a new array, and labels."""

    def read(self, indices: np.ndarray, allocate: Allocate) -> tuple[Any, Any]: ...


def new_batch(shape: Sequence[int]) -> np.ndarray:
    """Allocate a uint8 batch. In a DataLoader's worker it is in shared memory, as in torch's default_collate.

    NumPy's memory has huge pages, unlike that of torch.empty, which makes it 2 to 4 times as fast here.
    """
    if get_worker_info() is not None:
        num_bytes = int(np.prod(shape))
        storage = torch.UntypedStorage._new_shared(num_bytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, tuple(shape)).numpy()
    return np.empty(shape, np.uint8)


def tensors(images: Any, labels: Any) -> Batch:
    return torch.as_tensor(images), torch.as_tensor(labels, dtype=torch.int64)


class Batches(Dataset):
    """A Dataset whose items are complete batches, so that the DataLoader has nothing to collate."""

    def __init__(self, open_reader: Callable[[], Reader], sample_shape: tuple[int, ...]) -> None:
        self.open_reader, self.sample_shape = open_reader, sample_shape
        self.reader: Reader | None = None

    def __getitem__(self, indices: np.ndarray) -> Batch:
        self.reader = self.reader or self.open_reader()
        return tensors(*self.reader.read(indices, lambda n: new_batch((n, *self.sample_shape))))


class Order(Sampler):
    """A sampler that yields the batches of the current epoch."""

    def __init__(self, source: Source, batch_size: int) -> None:
        self.source, self.batch_size, self.number = source, batch_size, 0

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.source.batches(self.number, self.batch_size))

    def __len__(self) -> int:
        return -(-self.source.count // self.batch_size)


class Indexed:
    """Shuffled batches, read by index.

    ``workers`` processes of a DataLoader or ``threads`` that read ahead read them, or neither. With ``memory="reused"``
    a batch is valid until the next one. Workers send each batch in new shared memory.
    """

    def __init__(
        self,
        open_reader: Callable[[], Reader],
        source: Source,
        batch_size: int,
        *,
        workers: int = 0,
        threads: int = 0,
        memory: str = "fresh",
    ) -> None:
        self.source, self.batch_size, self.threads = source, batch_size, threads
        self.reused = memory == REUSED
        self.order = Order(source, batch_size)
        if workers:
            self.loader = DataLoader(
                Batches(open_reader, source.sample_shape),
                batch_size=None,
                sampler=self.order,
                num_workers=workers,
                persistent_workers=True,
            )
        else:
            self.reader = open_reader()
            self.free: deque[np.ndarray] = deque()
        self.workers = workers

    def epoch(self, number: int) -> Iterator[Batch]:
        self.order.number = number
        if self.workers:
            yield from self.loader
        elif self.threads:
            yield from self.ahead()
        else:
            for indices in self.order:
                buffer = self.take()
                yield self.read(indices, buffer)
                self.give_back(buffer)

    def ahead(self) -> Iterator[Batch]:
        under_way: deque = deque()
        with ThreadPoolExecutor(self.threads) as pool:
            for indices in self.order:
                buffer = self.take()
                under_way.append((pool.submit(self.read, indices, buffer), buffer))
                if len(under_way) > self.threads:
                    yield from self.give(under_way)
            while under_way:
                yield from self.give(under_way)

    def give(self, under_way: deque) -> Iterator[Batch]:
        future, buffer = under_way.popleft()
        batch = future.result()
        del future
        yield batch
        self.give_back(buffer)

    def give_back(self, buffer: np.ndarray | None) -> None:
        if buffer is not None:
            self.free.append(buffer)

    def take(self) -> np.ndarray | None:
        """Return a free buffer, or None if memory is not reused."""
        if not self.reused:
            return None
        return self.free.popleft() if self.free else np.empty((self.batch_size, *self.source.sample_shape), np.uint8)

    def read(self, indices: np.ndarray, buffer: np.ndarray | None) -> Batch:
        if buffer is None:
            return tensors(*self.reader.read(indices, lambda n: new_batch((n, *self.source.sample_shape))))
        return tensors(*self.reader.read(indices, lambda n: buffer[:n]))


WAYS = (
    {},
    {"memory": REUSED},
    {"threads": 2},
    {"threads": 2, "memory": REUSED},
    {"workers": 1},
    {"workers": 2},
)


class Collate:
    """Collate samples of (bytes or array, label) with one copy."""

    def __init__(self, sample_shape: tuple[int, ...]) -> None:
        self.sample_shape = sample_shape

    def __call__(self, samples: Sequence[tuple[Any, Any]]) -> Batch:
        images = new_batch((len(samples), *self.sample_shape))
        flat = images.reshape(len(samples), -1)
        for place, (pixels, _) in enumerate(samples):
            flat[place] = np.frombuffer(pixels, np.uint8) if isinstance(pixels, bytes | memoryview) else pixels.ravel()
        return tensors(images, [int(label) for _, label in samples])


def loader(dataset: Any, sample_shape: tuple[int, ...], batch_size: int, workers: int, ahead: int = 2) -> DataLoader:
    """Return a DataLoader over an iterable of samples."""
    options = {"persistent_workers": True, "prefetch_factor": ahead} if workers else {}
    return DataLoader(dataset, batch_size, num_workers=workers, collate_fn=Collate(sample_shape), **options)
