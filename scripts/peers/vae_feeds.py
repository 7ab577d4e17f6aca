"""Ways to feed dense rows of a sparse matrix to a network: h5chunk's and the usual ones, each at its best.

All yield shuffled batches (batch, columns) of zeros and ones on the device, in the job's dtype, with every row once per
epoch. The host makes dense rows for a GPU as uint8, with a quarter of the bytes of float32. They become floats on the
GPU, to which they are copied asynchronously from reused pinned memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import h5chunk
from h5chunk.errors import human_bytes
from h5chunk.tools.measure.machine import available_bytes
from h5chunk.transforms import Dense as DenseRows
from peers.vae_ahead import Threads, Workers
from peers.vae_job import Feed, FeedError, Job, Sender

DENSE_SHARE = 2  # a dense matrix may use at most 1 / DENSE_SHARE of the free memory
FILL_ROWS = 1024  # rows that are made dense at a time


class Ours:
    """ChunkLoader, streaming from disk or resident."""

    def __init__(self, job: Job, resident: bool) -> None:
        options: dict[str, Any] = {"transforms": [DenseRows(job.dtype)], "resident": resident}
        order = {"seed": job.seed, "drop_last": job.drop_last}
        self.loader = h5chunk.ChunkLoader(job.path, job.batch_size, device=job.device, **order, **options)

    def epoch(self, number: int) -> Iterator[torch.Tensor]:
        del number  # each iteration is the next epoch
        for (x,) in self.loader:
            yield x

    def close(self) -> None:
        self.loader.close()


class ToArray:
    """SciPy's ``mat[rows].toarray()`` in the loop."""

    def __init__(self, job: Job) -> None:
        self._job, self._sender = job, Sender(job, job.host_dtype)

    def epoch(self, number: int) -> Iterator[torch.Tensor]:
        for rows in self._job.batches(number):
            room = self._sender.room(len(rows))
            self._job.matrix[rows].toarray(out=room.numpy())
            yield self._sender.send(room)

    def close(self) -> None:
        """Do nothing, because nothing is open."""


class SparseTensor:
    """Copy a sparse tensor of ``mat[rows]`` to the device, and make it dense there with ``to_dense()``."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._matrix = job.matrix.astype(np.float32)  # to_dense does not support uint8

    def epoch(self, number: int) -> Iterator[torch.Tensor]:
        for rows in self._job.batches(number):
            part = self._matrix[rows]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
                parts = (self._to_device(values) for values in (part.indptr, part.indices, part.data))
                yield torch.sparse_csr_tensor(*parts, part.shape, check_invariants=False).to_dense().to(self._job.dtype)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self._job.device, non_blocking=True) if self._job.on_gpu else tensor

    def close(self) -> None:
        """Do nothing, because nothing is open."""


class Dense:
    """Keep the whole matrix dense in memory. The host or the GPU gathers batches from it."""

    def __init__(self, job: Job, on_device: bool) -> None:
        if on_device and not job.on_gpu:
            raise FeedError("dense-device is for a GPU, because on a CPU it would be the same as dense")
        self._job, self._on_device = job, on_device
        where = job.device if on_device else torch.device("cpu")
        self.matrix = torch.empty(self._shape(), dtype=self._fitting(), device=where)
        for first in range(0, len(job.rows), FILL_ROWS):
            part = self.matrix[first : first + FILL_ROWS]
            part[:] = job.rows.dense(first, first + len(part), where, part.dtype)
        self._sender = Sender(job, self.matrix.dtype)

    def _shape(self) -> tuple[int, int]:
        return len(self._job.rows), self._job.rows.num_columns

    def _fitting(self) -> torch.dtype:
        """Return the dtype of the matrix: that of batches, or uint8 if only this fits or the host feeds a GPU."""
        job, (num_rows, num_columns) = self._job, self._shape()
        free = torch.cuda.mem_get_info(job.device)[0] if self._on_device else available_bytes()
        wanted = job.dtype if self._on_device else job.host_dtype
        for dtype in (wanted, torch.uint8):
            if num_rows * num_columns * dtype.itemsize <= free // DENSE_SHARE:
                return dtype
        raise FeedError(
            f"a dense matrix of {num_rows:,} x {num_columns:,} takes {human_bytes(num_rows * num_columns)} as uint8, "
            f"more than half of the {human_bytes(free)} of free memory of the {'GPU' if self._on_device else 'host'}"
        )

    def epoch(self, number: int) -> Iterator[torch.Tensor]:
        order = torch.from_numpy(np.concatenate(self._job.batches(number)))
        if self._on_device:
            order = order.to(self._job.device)  # a copy per batch would wait for the previous one
        for rows in order.split(self._job.batch_size):
            if self._on_device:
                yield self.matrix[rows].to(self._job.dtype)
            else:
                room = self._sender.room(len(rows))
                torch.index_select(self.matrix, 0, rows, out=room)
                yield self._sender.send(room)

    def close(self) -> None:
        del self.matrix


class Cached:
    """Return the same real batch on the device each time, to measure the model alone."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._batch = next(ToArray(job).epoch(0)).clone()

    def epoch(self, number: int) -> Iterator[torch.Tensor]:
        for rows in self._job.batches(number):
            yield self._batch[: len(rows)]

    def close(self) -> None:
        del self._batch


FEEDS: dict[str, Callable[[Job], Feed]] = {
    "cached": Cached,
    "h5chunk": partial(Ours, resident=False),
    "h5chunk-resident": partial(Ours, resident=True),
    "getitem": partial(Workers, whole_batches=False),
    "workers": partial(Workers, whole_batches=True),
    "toarray": ToArray,
    "sparse": SparseTensor,
    "thread": Threads,
    "dense": partial(Dense, on_device=False),
    "dense-device": partial(Dense, on_device=True),
}
OURS = ("h5chunk", "h5chunk-resident")
