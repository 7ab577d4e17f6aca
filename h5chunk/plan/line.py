"""The line of an epoch: all its samples, chunk by chunk, the chunks in random order.

Windows are cut out of it. Only the part that is asked for is ever computed: where all chunks are equal, an epoch over
10**10 samples takes no memory for those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from h5chunk.plan.permute import CHUNKS, FILL, SHORT, Indices, Permutation, permutation, random_bits


class Line(Protocol):
    """Samples by their place in the line."""

    def at(self, places: Indices) -> Indices:
        """The samples in these places: (n,) int64."""


class FileLine:
    """The order of the file."""

    def at(self, places: Indices) -> Indices:
        """The samples in these places: (n,) int64."""
        return places


class ChunkLine:
    """Equal chunks, permuted and laid end to end; the file's last one may be short.

    The place of sample ``o`` of the chunk in turn ``t`` is ``t * chunk_samples + o``. What the short chunk lacks is
    filled with samples, drawn at random, of the chunk that ends the line, so that the borders behind it stay where
    they are. It comes last less often than the others, so that its samples are no likelier than others to be there.

    Parameters
    ----------
    num_samples, chunk_samples : int
    seed, epoch : int
    """

    def __init__(self, num_samples: int, chunk_samples: int, seed: int, epoch: int) -> None:
        self._size, self._rest = chunk_samples, num_samples % chunk_samples
        num_chunks = -(-num_samples // chunk_samples)
        self._chunks = Permutation(num_chunks, seed, stream=(CHUNKS, epoch, 0))
        self._short, self._end = num_chunks - 1, num_chunks - 1
        if self._rest:
            self._short_turn = int(random_bits(1, seed, (SHORT, epoch, 0))[0]) % num_samples // chunk_samples
            self._instead = int(self._chunks.at(np.array([self._short_turn]))[0])
            if self._short_turn != self._end:
                self._drawn = permutation(chunk_samples, seed, stream=(FILL, epoch, 0))

    def at(self, places: Indices) -> Indices:
        """The samples in these places: (n,) int64."""
        turn, offset = np.divmod(places, self._size)
        if self._rest and self._short_turn != self._end:
            fills = (turn == self._short_turn) & (offset >= self._rest)
            ends = turn == self._end
            offset[ends | fills] = self._drawn[offset[ends | fills]]
            turn[fills] = self._end
        chunks = self._chunks.at(turn)
        if self._rest:  # the short chunk changes places with the one that had its turn
            chunks[chunks == self._short] = self._instead
            chunks[turn == self._short_turn] = self._short
        samples: Indices = chunks * self._size + offset
        return samples


@dataclass(frozen=True, eq=False)
class Picks:
    """What an epoch visits where that is not all samples of equal chunks.

    Attributes
    ----------
    starts : (num_chunks + 1,) int64
        Where the picks of each chunk begin, of those that have any.
    samples : (n,) int64, or None
        The picks, ascending, some perhaps more than once; None: all samples, chunks of unequal size.

    Examples
    --------
    >>> picks = Picks.of(np.array([1, 2, 5, 5, 40]), chunk_samples=4)
    >>> len(picks), picks.starts.tolist()
    (5, [0, 2, 4, 5])
    """

    starts: Indices
    samples: Indices | None = None

    @classmethod
    def of(cls, samples: Indices, chunk_samples: int) -> Picks:
        """These samples, ascending, of equal chunks."""
        chunks = samples // chunk_samples
        borders = np.flatnonzero(chunks[1:] != chunks[:-1]) + 1
        return cls(np.concatenate(([0], borders, [len(samples)])) if len(samples) else np.zeros(1, np.int64), samples)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def drawn(self, _seed: int, _epoch: int) -> Picks:
        """Those of an epoch: in each the same."""
        return self

    @property
    def num_chunks(self) -> int:
        """Chunks with anything wanted in them."""
        return len(self.starts) - 1


class PickLine:
    """Picks chunk by chunk, the chunks permuted."""

    def __init__(self, picks: Picks, seed: int, epoch: int, *, shuffle: bool = True) -> None:
        self._samples = picks.samples
        order = np.arange(picks.num_chunks)
        if shuffle:
            order = permutation(picks.num_chunks, seed, stream=(CHUNKS, epoch, 0))
        self._firsts = picks.starts[:-1][order]
        self._places = np.concatenate(([0], np.cumsum(np.diff(picks.starts)[order])))

    def at(self, places: Indices) -> Indices:
        """The samples in these places: (n,) int64."""
        turn = np.searchsorted(self._places, places, "right") - 1
        picks = self._firsts[turn] + places - self._places[turn]
        return picks if self._samples is None else self._samples[picks]


@dataclass(frozen=True)
class Lane:
    """A part of the line that is shuffled and cut into batches by itself, whoever reads the others.

    All lanes have the same number of whole chunks; what is left at the end of the line is dealt out to them sample by
    sample, so that they differ by one sample at most.

    Attributes
    ----------
    number, num_lanes : int
    own : int
        Samples in whole chunks of each lane.
    first : int
        Where the rest of this lane begins in the line.
    num_samples : int
        Of this lane.

    Examples
    --------
    >>> lanes = [Lane.of(number, 3, num_samples=23, chunk_samples=5) for number in range(3)]
    >>> [lane.places(0, lane.num_samples).tolist() for lane in lanes]
    [[0, 1, 2, 3, 4, 15, 16, 17], [5, 6, 7, 8, 9, 18, 19, 20], [10, 11, 12, 13, 14, 21, 22]]
    """

    number: int
    num_lanes: int
    own: int
    first: int
    num_samples: int

    @classmethod
    def of(cls, number: int, num_lanes: int, *, num_samples: int, chunk_samples: int) -> Lane:
        """Lane ``number`` of so many."""
        least, more = divmod(num_samples, num_lanes)
        own = least // chunk_samples * chunk_samples
        first = num_lanes * own + number * (least - own) + min(number, more)
        return cls(number, num_lanes, own, first, least + (number < more))

    def places(self, start: int, stop: int) -> Indices:
        """Where samples ``start`` to ``stop`` of this lane are in the line. Beyond its end it begins again."""
        within = np.arange(start, stop, dtype=np.int64)
        if stop > self.num_samples:
            within %= self.num_samples
        return np.where(within < self.own, self.number * self.own + within, self.first + within - self.own)
