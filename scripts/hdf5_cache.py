"""An exact model of HDF5's chunk cache (rdcc): which accesses to chunks read the file, for given settings.

HDF5 reads a range of samples chunk by chunk, in row-major order of the chunks' coordinates; chunks are numbered in that
order. `range_accesses` lists these accesses with the bytes needed from each chunk, and `ChunkCache` replays them:

>>> grid = ChunkGrid(shape=(12, 5), chunks=(4, 5), itemsize=1)
>>> cache = ChunkCache(grid, CacheSettings(nslots=3, nbytes=40, w0=0.0))
>>> replay = cache.access(sample_accesses(grid, [0, 4, 1, 8, 2, 5]))
>>> replay
CacheReplay(hits=2, misses=4, bypasses=0, bytes_read=80, num_reads=4)
>>> replay.outcomes.tolist()  # of chunks 0, 1, 0, 2, 0, 1: a hit moves 0 behind 1, so that 2 evicts 1
[1, 1, 0, 1, 0, 1]

The rules, for reading chunks that exist in the file:

- A chunk has one slot, a hash of its coordinates modulo ``nslots``. If two chunks share a slot, the later one evicts
  the earlier one, even if the cache is not full.
- The entries form a list. A miss appends an entry at the end, and a hit moves its entry one step towards the end.
- Every entry costs the full decoded size of a chunk, also at the edge of the dataset. A miss first evicts the occupant
  of its slot, then prunes the list if the cache is full.
- Pruning walks the list from the front with one pointer, which evicts only entries that were read in full. After
  ``int(num_entries * w0)`` steps, a second pointer starts at the front, which evicts any entry; at each step, the first
  pointer acts before the second. As all entries cost the same, one eviction is always enough. So the victim is the
  first entry that was read in full among the first ``int(num_entries * w0) + 1`` entries or, if there is none, the
  first entry of the list.
- "Read in full" counts bytes: an entry starts with the bytes of a chunk, and every request subtracts its bytes, even if
  they are the same bytes again.
- A chunk larger than ``nbytes`` bypasses the cache: with a filter it is read and decoded whole at every access; without
  one, only the requested bytes are read, with one read per contiguous run.

Not modelled: chunks that were never written (they cost no read, but may occupy a slot), writing, files whose edge
chunks are left unfiltered, MPI. During a miss, memory holds one decoded chunk more than the cache, and its stored
bytes. `check_cache_model.py` compares the model with HDF5 itself; `h5chunk.plan.cache` chooses settings by these rules.

Source: HDF5 1.14 and 2.0, H5Dchunk.c: H5D__chunk_io_init, H5D__create_piece_file_map_hyper, H5D__chunk_lock,
H5D__chunk_unlock, H5D__chunk_cache_prune, H5D__chunk_cacheable, H5D__chunk_hash_val.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from h5chunk.errors import OptionError
from h5chunk.plan.cache import CacheSettings, ChunkGrid

Integers = npt.NDArray[np.int64]

HDF5_1_14 = CacheSettings(521, 1 << 20, 0.75)  # the defaults of HDF5 up to 1.14
HDF5_2 = CacheSettings(8191, 8 << 20, 0.75)  # the defaults from HDF5 2.0 on

HIT, MISS, BYPASS = range(3)

_NOTHING = -1


@dataclass(frozen=True, eq=False, repr=False)
class Accesses:
    """Chunks in the order in which HDF5 accesses them in consecutive reads, as (n,) int64 arrays.

    ``runs`` is the number of contiguous pieces of the requested bytes, both in the chunk and in the result. HDF5 reads
    a chunk in this number of pieces if it has no filter and does not fit in the cache.
    """

    chunks: Integers
    bytes_each: Integers
    runs: Integers

    def __len__(self) -> int:
        return len(self.chunks)


def chunk_counts(grid: ChunkGrid) -> tuple[int, ...]:
    """Return the number of chunks along each axis. Raise OptionError if the dataset has no chunks."""
    if grid.chunks is None:
        raise OptionError(f"dataset of shape {grid.shape} is contiguous: it has no chunks and no chunk cache")
    return tuple(math.ceil(length / chunk) for length, chunk in zip(grid.shape, grid.chunks, strict=True))


def sample_accesses(grid: ChunkGrid, samples: npt.ArrayLike) -> Accesses:
    """List the accesses that HDF5 makes for ``dataset[sample]``, for each of the samples in order."""
    starts = np.asarray(samples, np.int64)
    return range_accesses(grid, starts, starts + 1)


def range_accesses(grid: ChunkGrid, starts: npt.ArrayLike, stops: npt.ArrayLike) -> Accesses:
    """List the accesses that HDF5 makes for ``dataset[start:stop]``, for each of the ranges in order.

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
    """Return per chunk of a sample: elements, contiguous pieces, and whether the next sample extends the last."""
    elements, runs, joined = np.ones(1, np.int64), np.ones(1, np.int64), np.ones(1, bool)
    assert grid.chunks is not None
    for length, chunk in zip(reversed(grid.shape[1:]), reversed(grid.chunks[1:]), strict=True):
        sizes = np.minimum(chunk, length - np.arange(0, length, chunk))[:, None]
        runs = (sizes * runs - joined * (sizes - 1)).ravel()
        elements = (sizes * elements).ravel()
        joined = ((sizes == length) & (length == chunk) & joined).ravel()
    return elements, runs, joined


@dataclass(frozen=True)
class CacheReplay:
    """The outcome of accesses to a chunk cache.

    The stored bytes that were read of filtered chunks are ``stored[accesses.chunks[replay.outcomes != HIT]].sum()``.
    """

    hits: int
    misses: int
    bypasses: int  # read without the cache
    bytes_read: int  # decoded bytes of all misses and bypasses; only the wanted bytes of an unfiltered bypass
    num_reads: int  # separate byte ranges requested from the file
    outcomes: npt.NDArray[np.uint8] = field(repr=False, compare=False)  # (n,): HIT, MISS or BYPASS of each access


class ChunkCache:
    """The chunk cache of one open dataset. Its content is kept between calls of `access`.

    As in HDF5, its memory grows with the number of slots: about 50 bytes per slot. Raises OptionError if the dataset
    has no chunks, or settings are out of range.
    """

    def __init__(self, grid: ChunkGrid, settings: CacheSettings | Sequence[float] = HDF5_2) -> None:
        self._counts = chunk_counts(grid)
        self.grid = grid
        self.settings = CacheSettings.of(settings)
        self._room = self.settings.nbytes // grid.chunk_bytes
        num_slots = min(self.settings.nslots, grid.num_slots) if self._room else 0
        self._resident = [_NOTHING] * num_slots
        never_full = self._room >= min(num_slots, grid.num_chunks)  # which entries were read in full does not matter
        depth = 0 if never_full else int(self._room * self.settings.w0)
        self._entries = _EntryList(num_slots, grid.chunk_bytes, depth)

    @property
    def held_bytes(self) -> int:
        """Bytes of decoded chunks in the cache."""
        return self._entries.size * self.grid.chunk_bytes

    def slots(self, chunks: Integers) -> Integers:
        """Return the slots of chunks, by their row-major numbers: (n,) int64. Source: H5D__chunk_hash_val."""
        if not len(chunks):
            return np.empty(0, np.int64)
        hashed = np.zeros(len(chunks), np.uint64)
        for scaled, count in zip(np.unravel_index(chunks, self._counts), self._counts, strict=True):
            hashed = (hashed << np.uint64((count - 1).bit_length())) ^ scaled.astype(np.uint64)
        slots: Integers = (hashed % np.uint64(self.settings.nslots)).astype(np.int64)
        return slots

    def access(self, accesses: Accesses) -> CacheReplay:
        """Replay accesses to chunks of this grid, and return what was read."""
        outcomes = np.full(len(accesses), HIT if self._room else BYPASS, np.uint8)
        if self._room:
            outcomes[self._visit(accesses.chunks, accesses.bytes_each)] = MISS
        hits, misses, bypasses = np.bincount(outcomes, minlength=3).tolist()
        straight = bypasses and not self.grid.filtered
        return CacheReplay(
            hits,
            misses,
            bypasses,
            bytes_read=int(accesses.bytes_each.sum()) if straight else (misses + bypasses) * self.grid.chunk_bytes,
            num_reads=int(accesses.runs.sum()) if straight else misses + bypasses,
            outcomes=outcomes,
        )

    def _visit(self, chunks: Integers, bytes_each: Integers) -> list[int]:
        """Return the indices of the accesses that miss."""
        resident, entries, room = self._resident, self._entries, self._room
        promote, take_off = entries.promote, entries.take_off if entries.depth else None
        missed = []
        visits = zip(chunks.tolist(), self.slots(chunks).tolist(), bytes_each.tolist(), strict=True)
        for index, (chunk, slot, wanted) in enumerate(visits):
            if resident[slot] == chunk:
                promote(slot)
            else:
                missed.append(index)
                if resident[slot] != _NOTHING:
                    entries.remove(slot)
                elif entries.size == room:
                    victim = entries.victim()
                    entries.remove(victim)
                    resident[victim] = _NOTHING
                resident[slot] = chunk
                entries.append(slot)
            if take_off:
                take_off(slot, wanted)
        return missed


class _EntryList:
    """The cache's list of entries, each identified by its slot.

    It is a circular list in the arrays ``after`` and ``before``, closed by the index after the last slot. Every step
    takes O(1) time. As in HDF5, a victim is searched for among the first ``depth + 1`` entries.
    """

    def __init__(self, num_slots: int, chunk_bytes: int, depth: int) -> None:
        self.size = 0
        self.depth = depth
        self._end = num_slots
        self._chunk_bytes = chunk_bytes
        self._before = [num_slots] * (num_slots + 1)
        self._after = [num_slots] * (num_slots + 1)
        self._left = [chunk_bytes] * num_slots  # bytes to read until an entry counts as read in full
        self._num_finished = 0  # number of entries read in full

    def append(self, slot: int) -> None:
        """Add an entry at the end, with none of its bytes read yet."""
        before, after, end = self._before, self._after, self._end
        last = before[end]
        after[last] = before[end] = slot
        before[slot], after[slot] = last, end
        self.size += 1

    def remove(self, slot: int) -> None:
        if not self._left[slot]:
            self._num_finished -= 1
        self._left[slot] = self._chunk_bytes
        leader, follower = self._before[slot], self._after[slot]
        self._after[leader], self._before[follower] = follower, leader
        self.size -= 1

    def promote(self, slot: int) -> None:
        before, after = self._before, self._after
        follower = after[slot]
        if follower == self._end:
            return
        leader, beyond = before[slot], after[follower]
        after[leader], before[follower] = follower, leader
        after[follower], before[slot] = slot, follower
        after[slot], before[beyond] = beyond, slot

    def take_off(self, slot: int, wanted: int) -> None:
        """Subtract the bytes that were read from what remains to be read of an entry."""
        left = self._left[slot]
        if left:
            self._left[slot] = max(0, left - wanted)
            self._num_finished += left <= wanted

    def victim(self) -> int:
        """Return the entry that pruning evicts; the list must have more than ``depth`` entries."""
        foremost = slot = self._after[self._end]
        if self._num_finished:
            for _ in range(self.depth + 1):
                if not self._left[slot]:
                    return slot
                slot = self._after[slot]
        return foremost


class CountingFile:
    """A file object for ``h5py.File`` that records the offset and size of every read in ``reads``."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.reads: list[tuple[int, int]] = []

    def readinto(self, buffer: Any) -> int:
        self.reads.append((self._file.tell(), len(buffer)))
        return int(self._file.readinto(buffer))  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
