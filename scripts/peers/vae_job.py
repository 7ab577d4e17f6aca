"""The arguments of all feeds of `peers.vae_feeds`, and the transfer of batches from the host to the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from vae_data import Rows


class FeedError(ValueError):
    """Raised if a feed is not available on this machine or for this data."""


@dataclass(frozen=True)
class Job:
    """The arguments of all feeds.

    Attributes
    ----------
    path : Path
        Packed file of the rows; ``rows`` has the same rows in memory.
    dtype : torch.dtype
        Dtype of the batches.
    num_workers : int
        Worker processes of a DataLoader; ``num_threads`` is the number of threads that make batches ahead.
    """

    path: Path
    rows: Rows
    batch_size: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    seed: int = 0
    drop_last: bool = True
    num_workers: int = 0
    num_threads: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_batches(self) -> int:
        return len(self.rows) // self.batch_size if self.drop_last else -(-len(self.rows) // self.batch_size)

    def batches(self, epoch: int, size: int = 1) -> list[np.ndarray]:
        """Yield the rows of each batch, or of groups of ``size`` batches: int64."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        order, step = order[: self.num_batches * self.batch_size], size * self.batch_size
        return [order[first : first + step] for first in range(0, len(order), step)]

    @property
    def host_dtype(self) -> torch.dtype:
        """Dtype of rows that the host makes dense: uint8 for a GPU, the network's dtype for a CPU."""
        return torch.uint8 if self.on_gpu else torch.float32

    @cached_property
    def matrix(self) -> Any:
        """The rows as a SciPy CSR matrix of ``host_dtype``."""
        from scipy.sparse import csr_matrix

        ones = np.ones(len(self.rows.indices), np.uint8 if self.on_gpu else np.float32)
        return csr_matrix((ones, self.rows.indices, self.rows.indptr), (len(self.rows), self.rows.num_columns))


class Feed(Protocol):
    """Yield the batches of an epoch on the device."""

    def epoch(self, number: int) -> Iterator[torch.Tensor]: ...

    def close(self) -> None: ...


class Sender:
    """Reused host buffers for batches, and the copy of batches to the device.

    On a CPU, a batch of the right dtype is the buffer itself. It is valid until the batch after the next one.
    """

    def __init__(self, job: Job, dtype: torch.dtype) -> None:
        self._job, self._turn = job, 0
        shape = (job.batch_size, job.rows.num_columns)
        self._rooms = [torch.empty(shape, dtype=dtype, pin_memory=job.on_gpu) for _ in range(2)]
        self._sent: list[Any] = [None] * len(self._rooms)

    def room(self, num_rows: int) -> torch.Tensor:
        """Return a buffer to fill, once the last copy from it has ended."""
        self._turn = (self._turn + 1) % len(self._rooms)
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        return self._rooms[self._turn][:num_rows]

    def send(self, room: torch.Tensor) -> torch.Tensor:
        """Return the filled buffer as a batch on the device."""
        batch = room.to(self._job.device, non_blocking=True)
        if self._job.on_gpu:
            self._sent[self._turn] = torch.cuda.Event()
            self._sent[self._turn].record()
        return batch.to(self._job.dtype)
