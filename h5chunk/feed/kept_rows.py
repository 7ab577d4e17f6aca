"""Cache of matrix rows: a process keeps the rows of a chunk from its first use until other chunks need the memory.

A sampler's batch has a few rows from each of many chunks, and reading them one by one takes two system calls per row.
Therefore all rows of a chunk are read at its first use, so that the rows of later batches are already in memory.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np
import torch

from h5chunk.feed.columns import Ragged
from h5chunk.plan.order import MAX_OPEN_BYTES, Order
from h5chunk.store.read.samples import CsrBuffers
from h5chunk.store.read.source import Source
from h5chunk.transforms.csr import CsrRows, SampleNumbers

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0x40  # MAP_NORESERVE, which Python's mmap lacks before 3.13
MIN_USED = 0.5  # fraction of the rows in its chunks that an order must use; otherwise rows are read one by one
KEPT_BYTES = 256 << 20  # for all workers together: up to this size, chunks are kept even if the order needs fewer


class KeptRows:
    """Cached rows of a matrix, in virtual memory that has room for all rows of the matrix.

    Only the rows of cached chunks occupy physical pages. ``read(rows, room)`` must read ``rows``, (n,) int64, into
    ``room``. Raises OSError if there is not enough address space.
    """

    def __init__(
        self, reader: Source, kind: Ragged, max_chunks: int, read: Callable[[np.ndarray, CsrBuffers], None]
    ) -> None:
        self._starts, self._size = reader.chunk_starts, reader.chunk_samples
        self._kind, self._read, self._max_chunks, self._clock = kind, read, max_chunks, 0
        num_chunks = -(-reader.num_samples // self._size) if self._starts is None else len(self._starts) - 1
        self._used = np.zeros(num_chunks, np.int64)  # when a chunk was last used; 0 if it is not kept
        entries = kind.entries(int(kind.indptr[-1]))
        keeps_all = max_chunks >= num_chunks
        self._maps = [_addresses(shape[0] * dtype.itemsize, large_pages=keeps_all) for shape, dtype in entries]
        pairs = zip(self._maps, entries, strict=True)
        self._arrays = [torch.frombuffer(own, dtype=dtype, count=shape[0]) for own, (shape, dtype) in pairs]
        self._rows = CsrRows(torch.from_numpy(kind.indptr), kind.indptr, self._arrays[0], (*self._arrays, None)[1])

    def take(self, rows: np.ndarray) -> CsrRows:
        """Return the rows at the indices ``rows``, (n,) int64. Their entries are valid until the next call."""
        chunks = rows // self._size if self._starts is None else np.searchsorted(self._starts, rows, "right") - 1
        self._clock += 1
        missing = np.unique(chunks[self._used[chunks] == 0])
        self._used[chunks] = self._clock
        if len(missing):
            self._used[missing] = 0  # until they are read
            self._make_room(len(missing))
            self._load(missing)
        return self._rows.take(SampleNumbers(rows, torch.from_numpy(rows)))

    def _rows_of_chunk(self, chunk: int) -> tuple[int, int]:
        if self._starts is not None:
            return int(self._starts[chunk]), int(self._starts[chunk + 1])
        return chunk * self._size, min((chunk + 1) * self._size, len(self._kind.indptr) - 1)

    def _load(self, chunks: np.ndarray) -> None:
        indptr, borders = self._kind.indptr, [self._rows_of_chunk(chunk) for chunk in chunks.tolist()]
        rows = np.concatenate([np.arange(*each) for each in borders])
        indices, *values = (array.numpy() for array in self._arrays)
        self._read(rows, CsrBuffers(indptr[rows], indices, values[0] if values else None))
        for first, end in borders:
            self._kind.check(self._rows[first:end])
        self._used[chunks] = self._clock

    def _make_room(self, num_new: int) -> None:
        """Free the pages of the least recently used chunks, except the chunks of this batch."""
        kept = np.flatnonzero(self._used)
        num_over = len(kept) + num_new - self._max_chunks
        if num_over <= 0:
            return
        oldest = kept[np.argsort(self._used[kept], kind="stable")][:num_over]
        for chunk in oldest[self._used[oldest] < self._clock].tolist():
            self._used[chunk] = 0
            low, high = (int(self._kind.indptr[border]) for border in self._rows_of_chunk(chunk))
            for own, array in zip(self._maps, self._arrays, strict=True):
                _free(own, low * array.itemsize, high * array.itemsize)


def num_kept_chunks(reader: Source, kinds: Iterable[Ragged], order: Order, num_workers: int) -> int:
    """Return the number of chunks of some matrices that each worker keeps for an order.

    Return 0 if they would need too much memory, or if the order uses less than half of the rows in its chunks.
    """
    num_chunks = max(1, -(-reader.num_samples // reader.chunk_samples))
    chunk_bytes = max(1, sum(kind.sample_bytes for kind in kinds) * reader.num_samples // num_chunks)
    num_open = min(order.open_chunks_of(num_workers), num_chunks)
    used = order.num_samples / (reader.chunk_samples * order.num_chunks)
    if num_open * chunk_bytes > MAX_OPEN_BYTES or used < MIN_USED:
        return 0
    return max(num_open, KEPT_BYTES // num_workers // chunk_bytes)


def _addresses(num_bytes: int, large_pages: bool) -> mmap.mmap:
    """Reserve address space, whose pages are allocated when they are first used.

    A large page holds many chunks, so that it is only of use if no chunk is freed. Rows are copied faster from it.
    """
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # the system has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
    return memory


def _free(memory: mmap.mmap, low: int, high: int) -> None:
    first, end = -(-low // mmap.PAGESIZE) * mmap.PAGESIZE, high // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        memory.madvise(mmap.MADV_DONTNEED, first, end - first)
