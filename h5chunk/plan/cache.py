"""Choose the settings of HDF5's chunk cache for a given number of open (partly read) chunks.

``nslots`` is the length of a hash table. With ``nslots >= num_chunks``, no two chunks of whole samples compete for a
slot. `ChunkGrid.num_slots` is the number for other chunks.

To evict a chunk, HDF5 first looks for one that was read completely, among the oldest chunks. ``w0`` is their fraction.
With ``w0 = 0`` HDF5 evicts the oldest chunk. With ``w0 = 1.0`` it never evicts partly read chunks, so that ``nbytes``
has no effect. A chunk that extends past the end of the data never counts as completely read.

A chunk larger than ``nbytes`` is never cached. If it has no filter, only the requested bytes are read.
`scripts/hdf5_cache.py` models the cache.

Source: H5Pset_chunk_cache in the HDF5 reference manual; H5Dchunk.c, H5D__chunk_cache_prune.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h5chunk.errors import OptionError

OLDEST_FIRST = 0.0  # the w0 that keeps all chunks of a round of windows until the round ends
FINISHED_FIRST = 0.75  # the w0 that keeps a chunk that two batches share while other chunks are read
DIRECT_BYTES = 32 << 10  # samples of at least this size bypass the cache (measured: scripts/LOG.md)
MAX_SLOTS = 1 << 20  # limit on slots, of 8 bytes each: beyond it, collisions cost less than the memory of more slots


@dataclass(frozen=True)
class CacheSettings:
    """Settings of an HDF5 chunk cache, named as in h5py without the ``rdcc_`` prefix.

    Attributes
    ----------
    nslots : int
        Length of the hash table, at least 1.
    nbytes : int
        Maximum size in bytes of the decoded chunks that are cached per dataset and process. 0 disables the cache.
    w0 : float
        Preemption policy, 0 <= w0 < 1: how strongly chunks that were read completely are evicted first.
    """

    nslots: int
    nbytes: int
    w0: float = OLDEST_FIRST

    def __post_init__(self) -> None:
        if self.nslots < 1:
            raise OptionError(f"cache nslots is {self.nslots}: pass at least 1, ideally the number of chunks")
        if self.nbytes < 0:
            raise OptionError(f"cache nbytes is {self.nbytes}: pass 0 (no cache) or more")
        if self.w0 == 1.0:
            raise OptionError(
                "cache w0 is 1.0, with which HDF5 never evicts partly read chunks, and memory grows without limit: "
                f"use {OLDEST_FIRST:.0f}, or up to 0.99 to evict completely read chunks first"
            )
        if not 0.0 <= self.w0 < 1.0:
            raise OptionError(f"cache w0 is {self.w0}: pass a number of at least 0 and below 1")

    @classmethod
    def of(cls, value: CacheSettings | Sequence[Any]) -> CacheSettings:
        """Convert a ``(nslots, nbytes, w0)`` triple to settings. Settings are returned unchanged."""
        if isinstance(value, CacheSettings):
            return value
        try:
            nslots, nbytes, w0 = value
            return cls(operator.index(nslots), operator.index(nbytes), float(w0))
        except OptionError:
            raise
        except (TypeError, ValueError):
            raise OptionError(f"cache is {value!r}: pass (nslots, nbytes, w0), like h5py's rdcc_* arguments") from None


def cache_for(open_chunks: int, chunk_bytes: int, num_chunks: int) -> CacheSettings:
    """Return the smallest cache that keeps ``open_chunks`` chunks until they have been read completely.

    It has space for one more chunk, because a chunk of the previous round or epoch may still be cached.
    `h5chunk.plan.order.Order.open_chunks` is the number of chunks that an order keeps open.

    >>> cache_for(7, 1_048_576, 1500)
    CacheSettings(nslots=1500, nbytes=8388608, w0=0.0)
    """
    room = max(1, min(open_chunks + 1, num_chunks))
    return CacheSettings(nslots=max(1, min(num_chunks, MAX_SLOTS)), nbytes=room * chunk_bytes)


@dataclass(frozen=True)
class ChunkGrid:
    """The shape of an HDF5 dataset and of its chunks, and the cost of reading one random sample.

    A sample is one index of the first axis. A band consists of all chunks that contain parts of the same samples. A
    contiguous dataset has ``chunks=None``, and only the bytes of the sample are read. This is CIFAR-10 with the chunks
    that h5py chooses by default:

    >>> grid = ChunkGrid((50000, 32, 32, 3), (6250, 4, 4, 1), 1)
    >>> grid.chunks_per_sample, grid.amplification(cached=True)
    (192, 6250.0)
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    itemsize: int
    filtered: bool = False  # whether chunks have filters, so that they are always read completely

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Decoded size of one chunk in bytes. For a contiguous dataset, the size of one sample."""
        return math.prod(self.chunks) * self.itemsize if self.chunks else self.sample_bytes

    @property
    def chunks_per_sample(self) -> int:
        """Number of chunks that a sample spans, which is 1 for a contiguous dataset."""
        if not self.chunks:
            return 1
        return math.prod(math.ceil(s / c) for s, c in zip(self.shape[1:], self.chunks[1:], strict=True))

    @property
    def band_samples(self) -> int | None:
        """Number of samples in a band, or None for a contiguous dataset."""
        return self.chunks[0] if self.chunks else None

    @property
    def band_bytes(self) -> int:
        """Decoded size of a band in bytes."""
        return self.chunks_per_sample * self.chunk_bytes

    @property
    def num_bands(self) -> int:
        """Number of chunks along the first axis. For a contiguous dataset, the number of samples."""
        return math.ceil(self.shape[0] / self.chunks[0]) if self.chunks else self.shape[0]

    @property
    def num_chunks(self) -> int:
        """Number of chunks, which is 0 for a contiguous dataset."""
        return self.num_bands * self.chunks_per_sample if self.chunks else 0

    @property
    def num_slots(self) -> int:
        """The smallest ``nslots`` with which no two chunks share a slot.

        HDF5 computes a slot by concatenating the bits of the chunk's positions along all axes.
        """
        if not self.chunks:
            return 1
        last = max(0, self.num_bands - 1)
        for size, chunk in zip(self.shape[1:], self.chunks[1:], strict=True):
            last_position = max(0, math.ceil(size / chunk) - 1)
            last = (last << last_position.bit_length()) + last_position
        return last + 1

    @property
    def needs_cache(self) -> bool:
        """True for small samples, samples that span several chunks, and filtered chunks.

        A large sample that is one run of bytes in the file is read directly, because a cache would add a copy.
        """
        if self.chunks is None:
            return False
        return self.filtered or self.chunks_per_sample > 1 or self.sample_bytes < DIRECT_BYTES

    def cache_for(self, open_bands: int, w0: float = OLDEST_FIRST) -> CacheSettings:
        """Return the smallest cache that holds ``open_bands`` bands. If none is needed, the cache has 0 bytes."""
        if not self.needs_cache:
            return CacheSettings(1, 0)
        nbytes = cache_for(open_bands, self.band_bytes, max(1, self.num_bands)).nbytes
        return CacheSettings(min(self.num_slots, MAX_SLOTS), nbytes, w0)

    def amplification(self, cached: bool) -> float:
        """Return the ratio of bytes read to bytes used for one random sample.

        HDF5 reads whole chunks if they have filters or fit into the cache (``cached``). Otherwise it reads only the
        bytes of the sample.
        """
        if not self.chunks or not self.sample_bytes or not (cached or self.filtered):
            return 1.0
        return self.band_bytes / self.sample_bytes

    def reads_per_sample(self, cached: bool) -> int:
        """Return the number of byte ranges that HDF5 requests from the file for one random sample."""
        if not self.chunks or cached or self.filtered:
            return self.chunks_per_sample
        for axis in range(len(self.shape) - 1, 0, -1):
            if self.chunks[axis] != self.shape[axis]:  # elements are contiguous only along this axis and later ones
                return math.prod(self.shape[1:axis]) * math.ceil(self.shape[axis] / self.chunks[axis])
        return 1


def mean_hits(grid: ChunkGrid, num_slots: int, num_bytes: int, is_shuffled: bool) -> float:
    """Return the expected hit rate of a chunk cache, empty at first, when samples are read one by one for an epoch.

    Shuffled samples hit the fraction of all bands that the cache holds, except for the first sample of each band. In
    other orders, such as that of windows whose chunks fit in the cache, only the first sample of each band is a miss.

    >>> mean_hits(ChunkGrid((1000, 8), (100, 8), 1), 521, 3200, is_shuffled=True)
    0.396
    """
    held = min(num_bytes // max(1, grid.chunk_bytes), num_slots, grid.num_chunks)
    bands = held // grid.chunks_per_sample
    first = grid.num_bands / max(1, grid.shape[0])
    if is_shuffled:
        return bands / max(1, grid.num_bands) * (1 - first)
    return 1 - first if bands else 0.0
