"""What every feed of `peers.vae_feeds` is given, and the way of batches from host memory to the device."""

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
    """A feed that cannot be had here."""


@dataclass(frozen=True)
class Job:
    """What every feed is given.

    Attributes
    ----------
    path : Path
        Packed file of the rows; and ``rows``, the same in memory.
    dtype : torch.dtype
        Of the batches.
    num_workers : int
        Processes of a DataLoader; and ``num_threads``, that make batches ahead.
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
        """Rows of each batch, or of ``size`` batches together: int64."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        order, step = order[: self.num_batches * self.batch_size], size * self.batch_size
        return [order[first : first + step] for first in range(0, len(order), step)]

    @property
    def host_dtype(self) -> torch.dtype:
        """Of what is made dense by the host: for a GPU a quarter of the bytes, for a CPU what the network takes."""
        return torch.uint8 if self.on_gpu else torch.float32

    @cached_property
    def matrix(self) -> Any:
        """The rows as scipy's CSR matrix, of ``host_dtype``."""
        from scipy.sparse import csr_matrix

        ones = np.ones(len(self.rows.indices), np.uint8 if self.on_gpu else np.float32)
        return csr_matrix((ones, self.rows.indices, self.rows.indptr), (len(self.rows), self.rows.num_columns))


class Feed(Protocol):
    """Batches of an epoch, on the device."""

    def epoch(self, number: int) -> Iterator[torch.Tensor]: ...

    def close(self) -> None: ...


class Sender:
    """Room for batches in host memory, and the way from there to the device.

    On a CPU a batch is that memory itself, if it has its dtype: valid until the next but one.
    """

    def __init__(self, job: Job, dtype: torch.dtype) -> None:
        self._job, self._turn = job, 0
        shape = (job.batch_size, job.rows.num_columns)
        self._rooms = [torch.empty(shape, dtype=dtype, pin_memory=job.on_gpu) for _ in range(2)]
        self._sent: list[Any] = [None] * len(self._rooms)

    def room(self, num_rows: int) -> torch.Tensor:
        """Memory to fill, once the last copy out of it has ended."""
        self._turn = (self._turn + 1) % len(self._rooms)
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        return self._rooms[self._turn][:num_rows]

    def send(self, room: torch.Tensor) -> torch.Tensor:
        """What was filled, as a batch."""
        batch = room.to(self._job.device, non_blocking=True)
        if self._job.on_gpu:
            self._sent[self._turn] = torch.cuda.Event()
            self._sent[self._turn].record()
        return batch.to(self._job.dtype)
