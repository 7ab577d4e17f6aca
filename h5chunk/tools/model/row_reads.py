"""Model the calls of HDF5 that `h5chunk.store.read.reader` makes for a batch, and replay them through a chunk cache.

The rows of a batch are sorted. Of the rows in one chunk, those that lie close are read in one call and copied out,
others one by one.

>>> rows = np.array([9, 0, 1, 2, 40])
>>> find_reads(rows, band_samples=8, row_bytes=1000, whole=False)  # first sample of each call, and the one behind it
(array([ 0,  9, 40]), array([ 3, 10, 41]))
>>> find_reads(rows, band_samples=8, row_bytes=100_000, whole=False)[0].tolist()  # too large to read rows between
[0, 1, 2, 9, 40]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from h5chunk.plan.cache import CALL_BYTES, CacheSettings, ChunkGrid
from h5chunk.tools.model.accesses import Accesses, Integers, range_accesses
from h5chunk.tools.model.hdf5_cache import HIT, ChunkCache


def find_reads(rows: Integers, *, band_samples: int, row_bytes: int, whole: bool) -> tuple[Integers, Integers]:
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
        Whether chunks are decoded anew at every call: then each is read once, however far apart its rows are.

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
    singly = np.repeat((count == 1) | (too_many & (not whole)), count)
    kept = singly.copy()
    kept[first] = True
    stops = np.where(singly, ordered + 1, np.repeat(high, count))
    return ordered[kept], stops[kept]


def batch_accesses(grid: ChunkGrid, cache: CacheSettings, rows: Integers) -> tuple[int, Accesses]:
    """Number of calls that read a batch through a cache, and the chunks that they visit.

    Raises
    ------
    OptionError
        The grid has no chunks.
    """
    whole = grid.filtered and grid.band_bytes > cache.nbytes
    starts, stops = find_reads(rows, band_samples=grid.band_samples or 1, row_bytes=grid.sample_bytes, whole=whole)
    return len(starts), range_accesses(grid, starts, stops)


@dataclass(frozen=True)
class BatchReads:
    """Reads of some batches through HDF5.

    Attributes
    ----------
    num_samples, num_calls, num_accesses : int
        Samples of the batches, calls of HDF5, and visits of chunks.
    misses : int
        Visits that read the file: whole chunks, or the wanted bytes of chunks that are not cached.
    chunk_bytes : int
        Decoded bytes that they read.
    """

    num_samples: int
    num_calls: int
    num_accesses: int
    misses: int
    chunk_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the visits that read nothing."""
        return 1 - self.misses / max(1, self.num_accesses)


def replay_batches(
    grid: ChunkGrid, cache: CacheSettings, batches: Iterable[Integers], *, most_accesses: int
) -> BatchReads:
    """Replay batches, at least one, through the model of the cache, until ``most_accesses`` chunks were visited.

    Raises
    ------
    OptionError
        The grid has no chunks.
    """
    model = ChunkCache(grid, cache)
    counts = np.zeros(5, np.int64)
    for rows in batches:
        num_calls, accesses = batch_accesses(grid, cache, rows)
        replay = model.access(accesses)
        misses = int((replay.outcomes != HIT).sum())
        counts += (len(rows), num_calls, len(accesses), misses, replay.bytes_read)
        if counts[2] >= most_accesses:
            break
    return BatchReads(*counts.tolist())
