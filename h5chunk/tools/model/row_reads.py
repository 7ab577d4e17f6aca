"""What the reader of `h5chunk.store.read.reader` asks HDF5 for, batch by batch, and what the chunk cache makes of it.

A batch is sorted; of its rows in a chunk, those that lie close are read in one call and copied out, others one by one.

>>> rows = np.array([9, 0, 1, 2, 40])
>>> find_reads(rows, band_samples=8, row_bytes=1000, whole=False)  # samples from and to, of each call
(array([ 0,  9, 40]), array([ 3, 10, 41]))
>>> find_reads(rows, band_samples=8, row_bytes=100_000, whole=False)[0].tolist()  # too large to read through
[0, 1, 2, 9, 40]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.tools.model.accesses import find_row_accesses
from h5chunk.tools.model.hdf5_cache import HIT, ChunkCache

CALL_BYTES = 48 << 10  # as h5chunk.store.read.reader has it: bytes that HDF5 copies in the time of one call

Rows = npt.NDArray[np.int64]


def find_reads(rows: Rows, *, band_samples: int, row_bytes: int, whole: bool) -> tuple[Rows, Rows]:
    """First sample, and the one behind the last, of each call that reads a batch.

    Parameters
    ----------
    rows : (n,) int64
        Samples of the batch, in any order.
    band_samples : int
        Samples of a chunk along the first axis.
    row_bytes : int
        Of a sample.
    whole : bool
        Chunks are decoded anew at every call: then each is read once, however far apart its rows are.

    Returns
    -------
    starts, stops : (m,) int64
    """
    if not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ordered = np.sort(rows)
    bands = ordered // band_samples
    first = np.flatnonzero(np.concatenate(([True], bands[1:] != bands[:-1])))
    count = np.diff(np.append(first, len(ordered)))
    low, high = ordered[first], ordered[first + count - 1] + 1
    too_many = (high - low) * row_bytes > (count - 1) * CALL_BYTES
    singly = (count == 1) | (too_many & (not whole))
    each = np.repeat(singly, count)
    place = np.arange(len(ordered)) - np.repeat(first, count)
    kept = each | (place == 0)
    stops = np.where(each, ordered + 1, np.repeat(high, count))
    return ordered[kept], stops[kept]


@dataclass(frozen=True)
class BatchReads:
    """What reading some batches through HDF5 costs.

    Attributes
    ----------
    num_samples, num_calls, num_accesses : int
        Samples of the batches, calls of HDF5, and visits of chunks.
    misses : int
        Visits that read the file: whole chunks, or the wanted bytes of chunks that are not cached.
    chunk_bytes : int
        Decoded bytes that they read.
    copied_bytes : int
        Bytes that HDF5 copied out of chunks, those between wanted rows among them.
    """

    num_samples: int
    num_calls: int
    num_accesses: int
    misses: int
    chunk_bytes: int
    copied_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the visits that read nothing."""
        return 1 - self.misses / max(1, self.num_accesses)


def replay_batches(
    grid: ChunkGrid, cache: CacheSettings, batches: Iterable[Rows], *, most_accesses: int, skip: int = 0
) -> BatchReads:
    """Read batches through the exact model of the cache, until so many chunks were visited.

    Parameters
    ----------
    grid : ChunkGrid
        With chunks.
    cache : CacheSettings
    batches : iterable of (n,) int64
    most_accesses : int
        At least one batch is read.
    skip : int
        Visits that warm the cache and are not counted.

    Raises
    ------
    OptionError
        The grid has no chunks.
    """
    model = ChunkCache(grid, cache)
    band, whole = grid.band_samples or 1, grid.filtered and grid.band_bytes > cache.nbytes
    counts = np.zeros(6, np.int64)
    seen = 0
    for rows in batches:
        starts, stops = find_reads(rows, band_samples=band, row_bytes=max(1, grid.sample_bytes), whole=whole)
        accesses = find_row_accesses(grid, starts, stops)
        replay = model.access(accesses)
        seen += len(accesses)
        if seen > skip or not counts[0]:
            misses = int((replay.outcomes != HIT).sum())
            copied = int(accesses.bytes_each.sum())
            counts += (len(rows), len(starts), len(accesses), misses, replay.bytes_read, copied)
        if counts[2] >= most_accesses:
            break
    return BatchReads(*counts.tolist())
