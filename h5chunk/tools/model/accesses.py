"""List the chunks that HDF5 visits to read samples or batches, in order, and the bytes needed from each chunk.

HDF5 reads a range of samples chunk by chunk, in row-major order of the chunks' coordinates. Chunks are numbered in that
order.

>>> grid = ChunkGrid(shape=(10, 6), chunks=(4, 3), itemsize=2)
>>> accesses = range_accesses(grid, starts=[5, 2], stops=[6, 5])
>>> accesses.chunks.tolist(), accesses.bytes_each.tolist()  # sample 5; then samples 2 and 3, and sample 4
([2, 3, 0, 1, 2, 3], [6, 6, 12, 12, 6, 6])

Source: H5Dchunk.c, H5D__chunk_io_init and H5D__create_piece_file_map_hyper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from h5chunk.errors import OptionError
from h5chunk.plan.cache import ChunkGrid

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Accesses:
    """Chunks in the order in which HDF5 visits them, over consecutive reads, as (n,) int64 arrays.

    ``runs`` is the number of contiguous pieces that hold the wanted bytes, both in the chunk and in the result: HDF5
    makes as many reads of a chunk that has no filter and does not fit the cache.
    """

    chunks: Integers
    bytes_each: Integers
    runs: Integers

    def __len__(self) -> int:
        return len(self.chunks)


def chunk_counts(grid: ChunkGrid) -> tuple[int, ...]:
    """Number of chunks along each axis. Raises OptionError if the dataset has no chunks."""
    if grid.chunks is None:
        raise OptionError(f"dataset of shape {grid.shape} is contiguous: it has no chunks and no chunk cache")
    return tuple(math.ceil(length / chunk) for length, chunk in zip(grid.shape, grid.chunks, strict=True))


def sample_accesses(grid: ChunkGrid, samples: npt.ArrayLike) -> Accesses:
    """List the accesses of reading single samples, ``dataset[sample]``, in this order."""
    starts = np.asarray(samples, np.int64)
    return range_accesses(grid, starts, starts + 1)


def range_accesses(grid: ChunkGrid, starts: npt.ArrayLike, stops: npt.ArrayLike) -> Accesses:
    """List the accesses of reading ranges of samples, ``dataset[start:stop]``, in this order.

    Parameters
    ----------
    grid : ChunkGrid
    starts, stops : (m,) int
        ``0 <= start <= stop <= grid.shape[0]``.
    """
    per_band = math.prod(chunk_counts(grid)[1:])
    first, last = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
    if first.shape != last.shape or first.ndim != 1:
        raise OptionError(f"starts and stops have the shapes {first.shape} and {last.shape}: give two (m,) arrays")
    wrong = np.flatnonzero((first < 0) | (last < first) | (last > grid.shape[0]))
    if len(wrong):
        at = int(wrong[0])
        raise OptionError(f"range {at} is {first[at]} to {last[at]}: give 0 <= start <= stop <= {grid.shape[0]}")
    band_samples = grid.band_samples or 1
    first_band = first // band_samples
    num_bands = np.where(last > first, -(-last // band_samples) - first_band, 0)
    before = np.cumsum(num_bands) - num_bands
    bands = np.arange(int(num_bands.sum())) + np.repeat(first_band - before, num_bands)
    low = np.maximum(bands * band_samples, np.repeat(first, num_bands))
    high = np.minimum((bands + 1) * band_samples, np.repeat(last, num_bands))
    samples = (high - low)[:, None]
    elements, runs, joined = _pieces_of_sample(grid)
    return Accesses(
        (bands[:, None] * per_band + np.arange(per_band)).ravel(),
        (samples * elements * grid.itemsize).ravel(),
        (samples * runs - joined * (samples - 1)).ravel(),
    )


def _pieces_of_sample(grid: ChunkGrid) -> tuple[Integers, Integers, npt.NDArray[np.bool_]]:
    """Return, per chunk of a sample: elements, contiguous pieces, and whether the next sample continues them."""
    elements, runs, joined = np.ones(1, np.int64), np.ones(1, np.int64), np.ones(1, bool)
    assert grid.chunks is not None
    for length, chunk in zip(reversed(grid.shape[1:]), reversed(grid.chunks[1:]), strict=True):
        sizes = np.minimum(chunk, length - np.arange(0, length, chunk))[:, None]
        runs = (sizes * runs - joined * (sizes - 1)).ravel()
        elements = (sizes * elements).ravel()
        joined = ((sizes == length) & (length == chunk) & joined).ravel()
    return elements, runs, joined
