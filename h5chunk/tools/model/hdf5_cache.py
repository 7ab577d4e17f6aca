"""HDF5's chunk cache (HDF5 calls it rdcc), exactly: which chunk accesses read the file, for given settings.

The rules, for reading chunks that exist in the file:

- A chunk has one slot, a hash of its coordinates modulo ``nslots``; of two chunks with one slot the later evicts the
  earlier, even if there is room.
- The entries form a list. A miss appends at its end, a hit moves its entry one step towards the end.
- Every entry costs the full decoded size of a chunk, chunks at the edge too. A miss first evicts the occupant of its
  slot, then prunes the list if there is no room.
- Pruning sends one pointer along the list from the front, which evicts only entries that were read in full; after
  ``int(num_entries * w0)`` steps a second one starts at the front, which evicts anything, the first taking its turn
  before it. As all entries cost the same, one eviction is always enough. So: the first entry among the foremost
  ``int(num_entries * w0) + 1`` that was read in full, else the foremost.
- "Read in full" counts bytes: an entry starts with the bytes of a chunk, and every request takes off what it wants,
  the same bytes again too.
- A chunk larger than ``nbytes`` bypasses the cache: with a filter it is read and decoded whole at every access;
  without one, only what is wanted is read, one read for each contiguous run.

Not modelled: chunks that were never written (they cost no read, but may take a place), writing, files in which
chunks at the edge are left unfiltered, MPI. While a miss is under way, one decoded chunk more and its stored bytes are
in memory than the cache holds.

Room for two chunks, and no collisions: 0 and 1 are read; the hit moves 0 behind 1, so that 2 evicts 1.

>>> from h5chunk.tools.model.accesses import find_accesses
>>> grid = ChunkGrid(shape=(12, 5), chunks=(4, 5), itemsize=1)
>>> cache = ChunkCache(grid, CacheSettings(nslots=3, nbytes=40, w0=0.0))
>>> replay = cache.access(find_accesses(grid, [0, 4, 1, 8, 2, 5]))
>>> replay
CacheReplay(hits=2, misses=4, bypasses=0, bytes_read=80, num_reads=4, held_bytes=40, peak_bytes=40)
>>> replay.outcomes.tolist()  # of chunks 0, 1, 0, 2, 0, 1
[1, 1, 0, 1, 0, 1]

`scripts/check_cache_model.py` compares the model with the library.

Source: HDF5 1.14 and 2.0, H5Dchunk.c, H5D__chunk_lock, H5D__chunk_unlock, H5D__chunk_cache_prune, H5D__chunk_cacheable,
H5D__chunk_hash_val.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from h5chunk.errors import OptionError
from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.tools.model.accesses import Accesses, Numbers, chunk_counts
from h5chunk.tools.model.entries import Entries

HDF5_1_14 = CacheSettings(521, 1 << 20, 0.75)  # what HDF5 up to 1.14 takes if nothing is said
HDF5_2 = CacheSettings(8191, 8 << 20, 0.75)  # and from 2.0 on

HIT, MISS, BYPASS = range(3)

_NOTHING = -1


@dataclass(frozen=True)
class CacheReplay:
    """What a chunk cache made of some accesses.

    Attributes
    ----------
    hits, misses, bypasses : int
        Accesses served from memory, read into the cache, and read past it.
    bytes_read : int
        Decoded bytes of all misses and bypasses; of an unfiltered bypass only those wanted. Stored bytes of filtered
        chunks: ``stored[accesses.chunks[replay.outcomes != HIT]].sum()``.
    num_reads : int
        Separate byte ranges asked of the file; at least, as `Accesses.runs` are.
    held_bytes, peak_bytes : int
        Decoded chunks in the cache after the last access, and at most since the cache was made.
    outcomes : (n,) uint8
        ``HIT``, ``MISS`` or ``BYPASS`` of each access.
    """

    hits: int
    misses: int
    bypasses: int
    bytes_read: int
    num_reads: int
    held_bytes: int
    peak_bytes: int
    outcomes: npt.NDArray[np.uint8] = field(repr=False, compare=False)

    @property
    def hit_rate(self) -> float:
        """Share of the accesses that read nothing; 0.0 without accesses."""
        return self.hits / max(1, len(self.outcomes))


class ChunkCache:
    """The chunk cache of one open dataset: what it holds stays from one `access` to the next.

    As in HDF5, its memory grows with the slots: about 50 bytes each, of no more slots than chunks can use.

    Parameters
    ----------
    grid : ChunkGrid
        With ``filtered`` as it is: it decides what a bypass reads.
    settings : CacheSettings or (nslots, nbytes, w0)
        `HDF5_2` and `HDF5_1_14` are the library's defaults.

    Raises
    ------
    OptionError
        The dataset has no chunks, or settings are out of range.
    """

    def __init__(self, grid: ChunkGrid, settings: CacheSettings | Sequence[float] = HDF5_2) -> None:
        self._counts = chunk_counts(grid)
        self.grid = grid
        self.settings = CacheSettings.of(settings)
        self._room = self.settings.room_chunks(grid.chunk_bytes)
        self._peak = 0
        num_slots = min(self.settings.nslots, grid.num_slots) if self._room else 0
        self._resident = [_NOTHING] * num_slots
        never_full = self._room >= min(num_slots, grid.num_chunks)  # then it does not matter what was read in full
        depth = 0 if never_full else int(self._room * self.settings.w0)
        self._entries = Entries(num_slots, grid.chunk_bytes, depth)

    @property
    def held_bytes(self) -> int:
        """Bytes of decoded chunks in the cache."""
        return self._entries.size * self.grid.chunk_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that `held_bytes` has been."""
        return self._peak * self.grid.chunk_bytes

    def __repr__(self) -> str:
        held = f"{self._entries.size} of {self.grid.num_chunks} chunks, {self.held_bytes} bytes"
        return f"ChunkCache({self.settings}, holds {held})"

    def slots(self, chunks: Numbers) -> Numbers:
        """The slot of each chunk. Source: H5D__chunk_hash_val.

        Parameters
        ----------
        chunks : (n,) int64
            Row-major numbers.

        Returns
        -------
        (n,) int64
        """
        if not len(chunks):
            return np.empty(0, np.int64)
        hashed = np.zeros(len(chunks), np.uint64)
        for scaled, count in zip(np.unravel_index(chunks, self._counts), self._counts, strict=True):
            hashed = (hashed << np.uint64((count - 1).bit_length())) ^ scaled.astype(np.uint64)
        slots: Numbers = (hashed % np.uint64(self.settings.nslots)).astype(np.int64)
        return slots

    def access(self, accesses: Accesses) -> CacheReplay:
        """Visit chunks in this order, with what is in the cache from before.

        Parameters
        ----------
        accesses : Accesses
            From `find_accesses` or `find_row_accesses` for the same grid, or made by hand.

        Raises
        ------
        OptionError
            A chunk that the grid does not have, or arrays that do not agree.
        """
        self._check(accesses)
        if not self._room:
            outcomes = np.full(len(accesses), BYPASS, np.uint8)
        else:
            outcomes = np.zeros(len(accesses), np.uint8)
            outcomes[self._visit(accesses.chunks, accesses.bytes_each)] = MISS
        hits, misses, bypasses = np.bincount(outcomes, minlength=3).tolist()
        straight = bypasses and not self.grid.filtered
        return CacheReplay(
            hits,
            misses,
            bypasses,
            bytes_read=int(accesses.bytes_each.sum()) if straight else (misses + bypasses) * self.grid.chunk_bytes,
            num_reads=int(accesses.runs.sum()) if straight else misses + bypasses,
            held_bytes=self.held_bytes,
            peak_bytes=self.peak_bytes,
            outcomes=outcomes,
        )

    def _check(self, accesses: Accesses) -> None:
        lengths = {len(accesses.chunks), len(accesses.bytes_each), len(accesses.runs)}
        if len(lengths) > 1:
            raise OptionError(f"accesses has arrays of {sorted(lengths)} elements: give one of each for every access")
        for name, values, least, most in (
            ("chunks", accesses.chunks, 0, self.grid.num_chunks - 1),
            ("bytes_each", accesses.bytes_each, 1, self.grid.chunk_bytes),
        ):
            wrong = values[(values < least) | (values > most)]
            if len(wrong):
                raise OptionError(
                    f"accesses {name} has {wrong[0]} but the grid allows {least} to {most}: find them for {self.grid}"
                )

    def _visit(self, chunks: Numbers, bytes_each: Numbers) -> list[int]:
        """Which accesses miss."""
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
                if entries.size > self._peak:
                    self._peak = entries.size
            if take_off:
                take_off(slot, wanted)
        return missed
