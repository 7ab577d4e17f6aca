"""Dense batches that worker processes of a DataLoader, or threads, prepare in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info
from vae_data import Rows

from peers.vae_job import Job

THREAD_BATCHES = 10  # batches that a thread makes at once


class DenseRows(Dataset):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __getitem__(self, index: int) -> torch.Tensor:
        first, last = self.rows.indptr[index], self.rows.indptr[index + 1]
        row = np.zeros(self.rows.num_columns, np.uint8)
        row[self.rows.indices[first:last]] = 1
        return torch.from_numpy(row)


class DenseBatches(Dataset):
    """A Dataset whose items are dense batches, so that nothing is collated. In a worker they are in shared memory."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix

    def __getitem__(self, rows: np.ndarray) -> torch.Tensor:
        shape = (len(rows), self.matrix.shape[1])
        if get_worker_info() is None:
            return torch.from_numpy(self.matrix[rows].toarray())
        storage = torch.UntypedStorage._new_shared(shape[0] * shape[1])  # as torch's default_collate does it
        batch = torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)
        self.matrix[rows].toarray(out=batch.numpy())
        return batch


class Order(Sampler):
    """A sampler that yields the batches of the current epoch."""

    def __init__(self, job: Job) -> None:
        self.job, self.number = job, 0

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.job.batches(self.number))

    def __len__(self) -> int:
        return self.job.num_batches


class Workers:
    """torch's DataLoader with worker processes, whose ``__getitem__`` returns dense rows or dense batches."""

    def __init__(self, job: Job, whole_batches: bool) -> None:
        self._job, self._order = job, Order(job)
        options: dict[str, Any] = {"num_workers": job.num_workers, "pin_memory": job.on_gpu}
        options["persistent_workers"] = job.num_workers > 0
        if whole_batches:
            self._loader = DataLoader(
                DenseBatches(job.matrix.astype(np.uint8)), batch_size=None, sampler=self._order, **options
            )
        else:
            self._loader = DataLoader(DenseRows(job.rows), batch_sampler=self._order, **options)

    def epoch(self, number: int) -> Iterator[torch.Tensor]:
        self._order.number = number
        for batch in self._loader:
            yield batch.to(self._job.device, non_blocking=True).to(self._job.dtype)

    def close(self) -> None:
        del self._loader


class Threads:
    """Threads make ten batches dense at once, and send them in advance. The batches are split on the device."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rooms: deque[torch.Tensor] = deque()
        if job.on_gpu:
            self._stream = torch.cuda.Stream(job.device)
            shape = (THREAD_BATCHES * job.batch_size, job.rows.num_columns)
            for _ in range(job.num_threads):
                self._rooms.append(torch.empty(shape, dtype=torch.uint8, pin_memory=True))

    def epoch(self, number: int) -> Iterator[torch.Tensor]:
        under_way: deque = deque()
        with ThreadPoolExecutor(self._job.num_threads) as pool:
            for rows in self._job.batches(number, THREAD_BATCHES):
                under_way.append(pool.submit(self._make, rows))
                if len(under_way) > self._job.num_threads:
                    yield from self._split(under_way.popleft().result())
            while under_way:
                yield from self._split(under_way.popleft().result())

    def _make(self, rows: np.ndarray) -> torch.Tensor:
        if not self._job.on_gpu:
            return torch.from_numpy(self._job.matrix[rows].toarray())
        room = self._rooms.popleft()
        self._job.matrix[rows].toarray(out=room[: len(rows)].numpy())
        with torch.cuda.stream(self._stream):
            there = room[: len(rows)].to(self._job.device, non_blocking=True)
            sent = torch.cuda.Event()
            sent.record()
        sent.synchronize()
        self._rooms.append(room)
        return there

    def _split(self, batches: torch.Tensor) -> Iterator[torch.Tensor]:
        if self._job.on_gpu:  # its memory was allocated on the other stream
            batches.record_stream(torch.cuda.current_stream(self._job.device))
        for batch in batches.split(self._job.batch_size):
            yield batch.to(self._job.dtype)

    def close(self) -> None:
        self._rooms.clear()
