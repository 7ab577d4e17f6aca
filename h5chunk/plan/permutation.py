"""Compute random permutations that are identical on every machine, and the sequence of samples in an epoch.

A small permutation is the order that sorts random words of the Philox generator. NumPy guarantees that these are the
same in all versions, which it does not guarantee for ``Generator.permutation``. A large permutation is a function that
is evaluated on demand.

The sequence of an epoch contains all samples, chunk by chunk, with the chunks in random order. Only the requested part
is computed, so that even an epoch of 10**10 samples needs little memory.

Source: Philox is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). Large permutations are from
Black and Rogaway, "Ciphers with arbitrary finite domains" (2002): a Feistel network on two halves of an
index, which are its digits in a base of about sqrt(size), with cycle walking.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from h5chunk.errors import check_whole

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Stream = tuple[int, int, int]

CHUNKS, WINDOW, FILL, ONCE, SHORT, ECHO = range(6)  # streams of random numbers; ECHO + k is for pass k of echoes
WEIGHTS, SPLIT, NODES, BUCKETS = 1 << 40, (1 << 40) + 1, (1 << 40) + 2, (1 << 40) + 3
MAX_LISTED = 1 << 22  # larger permutations are evaluated on demand: an array would need more than 32 MiB
MAX_SEED = (1 << 64) - 1
NUM_ROUNDS = 8  # rounds of the network; 4 already pass the statistical tests (tests/plan/test_permutation.py)


def permutation(size: int, seed: int, *, stream: Stream = (ONCE, 0, 0)) -> Indices:
    """Make a random permutation of ``range(size)``, the same on every machine and NumPy version: (size,) int64.

    The seed must be from 0 to 2**64 - 1. Different streams of the same seed give independent permutations.
    """
    return sorted_order(random_bits(size, check_whole("seed", seed, 0, MAX_SEED), stream))


class Permutation:
    """A random permutation that is evaluated on demand. Up to the size ``MAX_LISTED`` it equals `permutation`.

    >>> Permutation(8, 0).at(np.arange(8)).tolist() == permutation(8, 0).tolist()
    True
    >>> len(set(Permutation(10**12, 0).at(np.arange(1000)).tolist()))
    1000
    """

    def __init__(self, size: int, seed: int, *, stream: Stream = (ONCE, 0, 0), max_listed: int | None = None) -> None:
        self.size, most = size, MAX_LISTED if max_listed is None else max_listed
        self._listed = permutation(size, seed, stream=stream) if size <= most else None
        self._base = math.isqrt(max(0, size - 1)) + 1  # numbers have two digits, with the bases _base and _other
        self._other = -(-size // self._base) if size else 1
        self._keys = random_bits(NUM_ROUNDS, seed, stream) if self._listed is None else None

    def at(self, positions: Indices) -> Indices:
        """Return the elements of the permutation at these positions, which are from 0 to ``size`` - 1: (n,) int64."""
        if self._listed is not None:
            return np.asarray(self._listed[positions], np.int64)
        numbers = self._network(positions)
        outside = np.flatnonzero(numbers >= self.size)
        while len(outside):  # the network permutes a slightly larger range, and repeating it leads back below size
            numbers[outside] = self._network(numbers[outside])
            outside = outside[numbers[outside] >= self.size]
        return numbers

    def _network(self, numbers: Indices) -> Indices:
        assert self._keys is not None
        bases = np.uint64(self._base), np.uint64(self._other)
        low, high = numbers.astype(np.uint64) % bases[0], numbers.astype(np.uint64) // bases[0]
        for number, key in enumerate(self._keys):
            if number % 2:
                high = (high + mixed(low, key) % bases[1]) % bases[1]
            else:
                low = (low + mixed(high, key) % bases[0]) % bases[0]
        return np.asarray(high * bases[0] + low, np.int64)


def mixed(words: Words, key: np.uint64) -> Words:
    """Hash 64-bit words with the finaliser of SplitMix64."""
    bits = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


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


class NodePermutation:
    """A random permutation of chunks in which every node has the same chunks in all epochs.

    The seed decides which chunks a node has. The permutation of an epoch begins with ``part`` chunks of each node, node
    after node, in random order. The remaining chunks, which differ between epochs, are at the end.

    >>> epochs = [NodePermutation(9, 0, epoch, nodes=2, part=4).at(np.arange(9)).tolist() for epoch in range(2)]
    >>> [(sorted(order[:4]), sorted(order[4:8]), order[8]) for order in epochs]
    [([0, 2, 6, 8], [1, 3, 4, 7], 5), ([0, 2, 6, 8], [1, 3, 4, 5], 7)]
    """

    def __init__(self, size: int, seed: int, epoch: int, *, nodes: int, part: int) -> None:
        self._part, self._division = part, Permutation(size, seed, stream=(NODES, 0, 0))
        starts = [size * node // nodes for node in range(nodes + 1)]
        self._starts, listed = np.array(starts[:-1], np.int64), MAX_LISTED // nodes
        self._orders = [
            Permutation(count, seed, stream=(CHUNKS, epoch, 1 + node), max_listed=listed)
            for node, count in enumerate(np.diff(starts).tolist())
        ]
        rest = [order.at(np.arange(part, order.size)) for order in self._orders]
        self._rest = np.concatenate([start + left for start, left in zip(starts[:-1], rest, strict=True)])

    def at(self, positions: Indices) -> Indices:
        """Return the chunks at these positions of the permutation: (n,) int64."""
        chunks = np.empty_like(positions)
        in_parts = positions < self._part * len(self._orders)
        chunks[~in_parts] = self._rest[positions[~in_parts] - self._part * len(self._orders)]
        nodes = positions // max(1, self._part)
        for node in np.unique(nodes[in_parts]).tolist():
            own = in_parts & (nodes == node)
            chunks[own] = self._starts[node] + self._orders[node].at(positions[own] - node * self._part)
        return self._division.at(chunks)


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
        self._chunks: Permutation | NodePermutation = Permutation(num_chunks, seed, stream=(CHUNKS, epoch, 0))
        if nodes > 1:
            part = num_samples // lanes // chunk_samples * (lanes // nodes)
            self._chunks = NodePermutation(num_chunks, seed, epoch, nodes=nodes, part=part)
        self._last = num_chunks - 1  # both the index of the short chunk and the last turn
        if self._short_samples:
            self._short_turn = int(random_bits(1, seed, (SHORT, epoch, 0))[0]) % num_samples // chunk_samples
            self._instead = int(self._chunks.at(np.array([self._short_turn]))[0])
            if self._short_turn != self._last:
                self._fill = permutation(chunk_samples, seed, stream=(FILL, epoch, 0))

    def at(self, positions: Indices) -> Indices:
        """Return the samples at these positions of the sequence: (n,) int64."""
        turn, offset = np.divmod(positions, self._size)
        if self._short_samples and self._short_turn != self._last:
            fills = (turn == self._short_turn) & (offset >= self._short_samples)
            ends = turn == self._last
            offset[ends | fills] = self._fill[offset[ends | fills]]
            turn[fills] = self._last
        chunks = self._chunks.at(turn)
        if self._short_samples:  # exchange the short chunk with the chunk at its position
            chunks[chunks == self._last] = self._instead
            chunks[turn == self._short_turn] = self._last
        samples: Indices = chunks * self._size + offset
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
