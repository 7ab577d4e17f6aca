"""Compute random permutations that are identical on every machine, and the sequence of samples in an epoch.

A permutation is the order that sorts random words of the Philox generator. NumPy guarantees that these are the
same in all versions, which it does not guarantee for ``Generator.permutation``.

The sequence of an epoch contains all samples, chunk by chunk, with the chunks in random order. Of the samples, only the
requested part is computed; the chunks are listed, with 8 bytes each.

Source: Philox is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from h5chunk.errors import check_whole

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Stream = tuple[int, int, int]

CHUNKS, WINDOW, FILL, ONCE, SHORT, ECHO = range(6)  # streams of random numbers; ECHO + k is for pass k of echoes
WEIGHTS, SPLIT, NODES, BUCKETS, GROUPS, ADVANCE, DEAL = range(1 << 40, (1 << 40) + 7)
MAX_SEED = (1 << 64) - 1

# of SplitMix64; made once, because making a scalar of NumPy takes as long as adding small arrays
ONE, GOLDEN, LAST_SHIFT = np.uint64(1), np.uint64(0x9E3779B97F4A7C15), np.uint64(31)
MIXING = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]


def permutation(size: int, seed: int, *, stream: Stream = (ONCE, 0, 0)) -> Indices:
    """Make a random permutation of ``range(size)``, the same on every machine and NumPy version: (size,) int64.

    The seed must be from 0 to 2**64 - 1. Different streams of the same seed give independent permutations.
    """
    return sorted_order(random_bits(size, check_whole("seed", seed, 0, MAX_SEED), stream))


def mixed(words: Words, key: np.uint64) -> Words:
    """Hash 64-bit words with the finaliser of SplitMix64."""
    bits = np.asarray(words + ONE)
    bits *= GOLDEN
    bits ^= key
    for shift, factor in MIXING:
        bits ^= bits >> shift
        bits *= factor
    bits ^= bits >> LAST_SHIFT
    return bits


def sorted_order(keys: Words) -> Indices:
    """Return the indices that sort random keys along the last axis.

    The lowest bits of each key are replaced by its index, which makes the keys distinct, so that every sorting
    algorithm gives the same result. NumPy's fastest one is 6 to 10 times as fast as a stable ``argsort``.
    """
    size = keys.shape[-1]
    index_bits = np.uint64((1 << max(0, size - 1).bit_length()) - 1)
    packed = keys & ~index_bits
    packed |= np.arange(size, dtype=np.uint64)
    packed.sort(axis=-1)
    packed &= index_bits
    order: Indices = packed.view(np.int64)
    return order


def random_bits(size: int, seed: int, stream: Stream, lane: int = 0) -> Words:
    """Return random words, (size,) uint64, which are independent for different seeds, streams and lanes."""
    generator = np.random.Philox(key=np.array([seed, lane], np.uint64), counter=np.array([0, *stream], np.uint64))
    return np.asarray(generator.random_raw(size), np.uint64)


def node_permutation(size: int, seed: int, epoch: int, *, nodes: int, part: int) -> Indices:
    """Permute chunks so that every node has the same chunks in all epochs: (size,) int64.

    The seed decides which chunks a node has. The permutation of an epoch begins with ``part`` chunks of each node, node
    after node, in random order. The remaining chunks, which differ between epochs, are at the end.

    >>> epochs = [node_permutation(9, 0, epoch, nodes=2, part=4).tolist() for epoch in range(2)]
    >>> [(sorted(order[:4]), sorted(order[4:8]), order[8]) for order in epochs]
    [([0, 2, 6, 8], [1, 3, 4, 7], 5), ([0, 2, 6, 8], [1, 3, 4, 5], 7)]
    """
    borders = [size * node // nodes for node in range(nodes + 1)]
    orders = [
        start + permutation(stop - start, seed, stream=(CHUNKS, epoch, 1 + node))
        for node, (start, stop) in enumerate(pairwise(borders))
    ]
    places = np.concatenate([*(order[:part] for order in orders), *(order[part:] for order in orders)])
    chunks: Indices = permutation(size, seed, stream=(NODES, 0, 0))[places]
    return chunks


class ShuffledSequence:
    """The sequence of all samples with the chunks permuted. The last chunk of the file may be short.

    Sample ``o`` of the ``t``-th chunk is at position ``t * chunk_samples + o``. The gap after the short chunk is filled
    with random samples of the last chunk of the sequence, so that the chunks after the gap keep their positions. The
    probability that the short chunk is the last one is proportional to its size, so that its samples are not at the end
    of the epoch more often than other samples.

    With several ``nodes``, the sequence begins with one part per node, for ``lanes / nodes`` lanes each. The chunks of
    a part are the same in all epochs, except for the short chunk and the chunk that it is exchanged with. The chunks
    after the parts vary.
    """

    def __init__(
        self, num_samples: int, chunk_samples: int, seed: int, epoch: int, *, nodes: int = 1, lanes: int = 1
    ) -> None:
        self._size, self._short_samples = chunk_samples, num_samples % chunk_samples
        num_chunks = -(-num_samples // chunk_samples)
        if nodes > 1:
            part = num_samples // lanes // chunk_samples * (lanes // nodes)
            self._chunks = node_permutation(num_chunks, seed, epoch, nodes=nodes, part=part)
        else:
            self._chunks = permutation(num_chunks, seed, stream=(CHUNKS, epoch, 0))
        self._last = num_chunks - 1  # both the index of the short chunk and the last turn
        self._short_turn: int | None = None  # where positions after the end of the short chunk have to be filled
        if self._short_samples:
            short_turn = int(random_bits(1, seed, (SHORT, epoch, 0))[0]) % num_samples // chunk_samples
            instead = int(self._chunks[short_turn])
            self._chunks[self._chunks == self._last] = instead  # exchanges the short chunk with the one in its place
            self._chunks[short_turn] = self._last
            if short_turn != self._last:
                self._short_turn, self._fill = short_turn, permutation(chunk_samples, seed, stream=(FILL, epoch, 0))

    def at(self, positions: Indices) -> Indices:
        """Return the samples at these positions of the sequence: (n,) int64."""
        turn = positions // self._size  # much faster than np.divmod
        offset = positions - turn * self._size
        if self._short_turn is not None:
            is_short, ends = turn == self._short_turn, turn == self._last
            if is_short.any() or ends.any():
                fills = is_short & (offset >= self._short_samples)
                offset[ends | fills] = self._fill[offset[ends | fills]]
                turn[fills] = self._last
        samples: Indices = self._chunks[turn]
        samples *= self._size
        samples += offset
        return samples


class Lane:
    """A part of the sequence that is shuffled and cut into batches independently of other parts.

    All lanes have the same number of whole chunks. The remaining samples, at the end of the sequence, are divided among
    the lanes, so that the lengths of lanes differ by at most one sample.

    >>> lanes = [Lane(number, 3, num_samples=23, chunk_samples=5) for number in range(3)]
    >>> [lane.positions(0, lane.num_samples).tolist() for lane in lanes]
    [[0, 1, 2, 3, 4, 15, 16, 17], [5, 6, 7, 8, 9, 18, 19, 20], [10, 11, 12, 13, 14, 21, 22]]
    """

    def __init__(self, number: int, num_lanes: int, *, num_samples: int, chunk_samples: int) -> None:
        shortest, num_longer = divmod(num_samples, num_lanes)
        self.number, self.num_samples = number, shortest + (number < num_longer)
        whole = shortest // chunk_samples * chunk_samples
        self._head_samples, self._head_start = whole, number * whole  # the lane's whole chunks in the sequence
        self._tail_start = num_lanes * whole + number * (shortest - whole) + min(number, num_longer)

    @property
    def first_position(self) -> int:
        """The position in the sequence of the first sample of this lane."""
        return self._head_start if self._head_samples else self._tail_start

    def positions(self, start: int, stop: int) -> Indices:
        """Return the positions in the sequence of samples ``start`` to ``stop`` (excluded) of this lane.

        Positions after the last sample of the lane wrap around to its first samples.
        """
        if stop <= self._head_samples:
            return np.arange(self._head_start + start, self._head_start + stop, dtype=np.int64)
        within = np.arange(start, stop, dtype=np.int64)
        if stop > self.num_samples:
            within %= self.num_samples
        start_of_part = np.where(within < self._head_samples, self._head_start, self._tail_start - self._head_samples)
        return start_of_part + within
