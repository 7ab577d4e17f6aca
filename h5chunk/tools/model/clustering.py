"""Measure how often neighbouring samples of a file share a class, patient, video or other group.

The measure compares the probability that two samples of one piece of the file, such as a chunk, share a group, with the
probability that any two samples share a group. Both are counted over pairs of samples. The result is 0 on average in a
shuffled file, whatever the sizes of groups and pieces, including a short last piece. The number of pairs also gives the
probability that a shuffled file is as clustered by chance.

For example, with six samples in pieces of three, 4 of the 6 pairs within a piece share a group, and 4 of all 15 pairs:

>>> find_clustering(np.array([7, 7, 7, 8, 9, 9]), 3).correlation == (4 / 6 - 4 / 15) / (1 - 4 / 15)
True

Source: L. Kish, Survey Sampling, 1965 (intraclass correlation); N. Mantel, Cancer Research 27, 1967 (mean and variance
of pair counts under permutation); arXiv:2206.05830, section 4 (h_y).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from h5chunk.errors import OptionError

MIN_CHANCE = 1e-6  # clustering that is more probable than this in shuffled data is ignored
BLOCK_SAMPLES = 1 << 20  # samples processed at a time
MAX_TABLE = 1 << 24  # group numbers of a smaller range are counted in a table, others are sorted

Groups = npt.NDArray[Any]


@dataclass(frozen=True)
class Clustering:
    """Similarity of the samples within a piece of the file, such as a chunk."""

    num_samples: int
    piece_samples: int
    same_group: float  # fraction of all pairs of samples that share a group
    correlation: float  # 0 on average in a shuffled file, 1 if all samples of a piece share a group
    chance: float  # upper bound on the probability that a shuffled file is as clustered as this one

    @property
    def h_y(self) -> float:
        """Design effect of the pieces: 1 in a shuffled file, ``piece_samples`` if each piece has a single group."""
        return 1 + (self.piece_samples - 1) * self.correlation


def find_clustering(groups: Groups, piece_samples: int) -> Clustering:
    """Measure how often two samples of a piece share a group. Takes 1 to 2 s for 10**8 samples in a few groups.

    Parameters
    ----------
    groups : (num_samples,) array of integers, bool or fixed-length strings
        The group of each sample, in the order of the file.
    piece_samples : int
        Length of a piece, such as a chunk, in consecutive samples. The last piece may be short.

    Examples
    --------
    >>> find_clustering(np.array([7, 7, 7, 8, 8, 8]), 3).h_y
    3.0
    """
    if groups.ndim != 1 or not len(groups):
        raise OptionError(f"groups has shape {groups.shape}: pass one integer or string per sample")
    if groups.dtype.kind not in "biuSU":
        raise OptionError(
            f"groups has type {groups.dtype}: pass integers or fixed-length strings, or convert it with "
            "numpy.unique(groups, return_inverse=True)[1]"
        )
    if piece_samples < 1:
        raise OptionError(f"piece_samples is {piece_samples}: use at least 1, such as the number of samples in a chunk")
    groups, size, piece = integer_groups(groups), len(groups), min(piece_samples, len(groups))
    num_pairs = _same_group_pairs(groups, piece)
    sizes = _group_sizes(groups)
    pairs = size // piece * math.comb(piece, 2) + math.comb(size % piece, 2)
    same_group = _pairs_and_forks(sizes)[0] / max(1, math.comb(size, 2))
    correlation = (num_pairs / pairs - same_group) / (1 - same_group) if pairs and same_group < 1 else 0.0
    return Clustering(size, piece, same_group, correlation, _chance(sizes, size, piece, num_pairs))


def integer_groups(groups: Groups) -> Groups:
    """Return groups as integers. A string becomes its index in the sorted list of all strings."""
    return groups if groups.dtype.kind in "iu" else np.unique(groups, return_inverse=True)[1]


def _same_group_pairs(groups: Groups, piece: int) -> int:
    """Count the pairs of samples that are in the same piece and share a group."""
    found = 0
    for block in _blocks(groups, max(1, BLOCK_SAMPLES // piece) * piece):
        whole = len(block) // piece * piece
        found += _equal_pairs_in_rows(block[:whole].reshape(-1, piece)) + _equal_pairs_in_rows(
            block[whole:].reshape(1, -1)
        )
    return found


def _equal_pairs_in_rows(rows: Groups) -> int:
    if not rows.size:
        return 0
    rows = np.sort(rows, axis=1)
    ends = np.ones(rows.shape, bool)  # whether a run of equal numbers ends here; each row ends a run
    np.not_equal(rows[:, 1:], rows[:, :-1], out=ends[:, :-1])
    lengths = np.diff(np.flatnonzero(ends), prepend=-1)
    return (int(np.dot(lengths, lengths)) - rows.size) // 2


def _group_sizes(groups: Groups) -> list[tuple[int, int]]:
    """Return the histogram of group sizes as a list of (number of samples, number of groups of this size)."""
    low, high = int(groups.min()), int(groups.max())
    if high - low < MAX_TABLE:
        counts = np.zeros(high - low + 1, np.int64)
        for block in _blocks(groups, BLOCK_SAMPLES):
            found = np.bincount((block.astype(np.uint64) - np.uint64(low % (1 << 64))).astype(np.int64))
            counts[: len(found)] += found
        counts = counts[counts > 0]
    else:
        counts = np.unique(groups, return_counts=True)[1]
    members, sets = np.unique(counts, return_counts=True)
    return list(zip(members.tolist(), sets.tolist(), strict=True))


def _blocks(groups: Groups, size: int) -> Iterator[Groups]:
    return (groups[start : start + size] for start in range(0, len(groups), size))


def _chance(sizes: list[tuple[int, int]], size: int, piece: int, num_pairs: int) -> float:
    """Return an upper bound on the probability that a random order has at least ``num_pairs`` pairs.

    A pair is two samples that share a piece and a group. The mean and variance of their number over all permutations
    are exact (Mantel). The bound is Chernoff's for the gamma distribution with this mean and variance, shifted to the
    smallest possible number of pairs.
    """
    if size < 4:
        return 1.0
    pieces = [(piece, size // piece), (size % piece, 1)]
    pairs, forks = _pairs_and_forks(pieces)
    alike_pairs, alike_forks = _pairs_and_forks(sizes)
    mean = Fraction(pairs * alike_pairs, math.comb(size, 2))
    square = mean + Fraction(forks * alike_forks, math.perm(size, 3))
    # ordered pairs of pairs that have no common sample
    apart, alike_apart = pairs**2 - pairs - forks, alike_pairs**2 - alike_pairs - alike_forks
    square += Fraction(4 * apart * alike_apart, math.perm(size, 4))
    num_pieces, min_pairs = -(-size // piece), 0
    for members, count in sizes:  # the smallest number of pairs, if every group is spread evenly over the pieces
        share, rest = divmod(members, num_pieces)
        min_pairs += count * (num_pieces * math.comb(share, 2) + rest * share)
    variance = square - mean**2
    if num_pairs <= mean or not variance:
        return 1.0
    ratio = float((num_pairs - min_pairs) / (mean - min_pairs))
    return math.exp(-float((mean - min_pairs) ** 2 / variance) * (ratio - 1 - math.log(ratio)))


def _pairs_and_forks(sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """Count the pairs, and the ordered triples, of different members of the same set.

    ``sizes`` is a histogram of set sizes: a list of (number of members, number of sets).
    """
    pairs = sum(count * math.comb(members, 2) for members, count in sizes)
    return pairs, sum(count * math.perm(members, 3) for members, count in sizes)
