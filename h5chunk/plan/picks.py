"""Which samples an epoch visits, and how often, where that is not all of them once.

A subset, or samples drawn by weight, are still visited chunk by chunk: chunks in which nothing is wanted are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.plan.line import Picks
from h5chunk.plan.permute import SPLIT, WEIGHTS, Indices, permutation, random_bits


@dataclass(frozen=True, eq=False)
class WeightedPicks:
    """Samples drawn anew for each epoch, each as often as its weight says, up to a whole number.

    Of the two whole numbers beside what is expected of a sample, chance takes one: no sample that is due three times
    comes five times, or not at all.

    Attributes
    ----------
    chunks : (n,) int64
        The chunk of each sample, ascending.
    samples : (n,) int64, or None
        Their numbers; None: 0 to n - 1.
    expected : (n + 1,) float64
        How often all before each sample are due, from 0 to how many are drawn.

    Source: systematic sampling; Madow, "On the theory of systematic sampling" (1949).

    Examples
    --------
    >>> picks = WeightedPicks.of(np.array([1.0, 0.0, 3.0, 4.0]), np.array([0, 0, 1, 1]), None, num_draws=4)
    >>> picks.drawn(seed=0, epoch=0).samples.tolist()
    [2, 2, 3, 3]
    """

    chunks: Indices
    samples: Indices | None
    expected: np.ndarray

    @classmethod
    def of(cls, weights: np.ndarray, chunks: Indices, samples: Indices | None, num_draws: int) -> WeightedPicks:
        """By weights, (n,) float64 of any sum."""
        expected = np.concatenate(([0.0], np.cumsum(weights / weights.max())))  # the sum of huge ones is infinite
        expected *= num_draws / expected[-1]
        expected[-1] = num_draws
        return cls(chunks, samples, np.minimum(expected, num_draws))

    def __len__(self) -> int:
        return int(self.expected[-1])

    @property
    def num_chunks(self) -> int:
        """Chunks with a sample that may be drawn."""
        return len(np.unique(self.chunks[np.diff(self.expected) > 0]))

    @property
    def most(self) -> Indices:
        """The most that each may come in an epoch: (n,) int64."""
        return np.ceil(np.diff(self.expected)).astype(np.int64) + 1

    def drawn(self, seed: int, epoch: int) -> Picks:
        """Those of an epoch."""
        chance = float(random_bits(1, seed, (WEIGHTS, epoch, 0))[0] >> np.uint64(11)) / (1 << 53)
        ends = np.floor(self.expected + chance).astype(np.int64)
        counts: Indices = ends[1:] - ends[:-1]
        numbers = np.repeat(np.arange(len(counts)), counts)
        borders = np.flatnonzero(np.diff(self.chunks[numbers])) + 1
        starts = np.concatenate(([0], borders, [len(numbers)])) if len(numbers) else np.zeros(1, np.int64)
        return Picks(starts, numbers if self.samples is None else self.samples[numbers])


def pick_samples(samples: Any, num_samples: int) -> Indices:
    """The numbers of a subset, ascending: (n,) int64.

    Parameters
    ----------
    samples : array of bool or of whole numbers
        A mask of all samples, or the numbers of some, in any order.
    num_samples : int
        Of all.

    Raises
    ------
    OptionError
        A number is out of range or comes twice, or the mask has another length.
    """
    given = as_array("subset", samples)
    if given.dtype == bool:
        if given.shape != (num_samples,):
            raise OptionError(f"subset is a mask of shape {given.shape}, but there are {num_samples} samples")
        return np.flatnonzero(given)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise OptionError(f"subset has the shape {given.shape} and type {given.dtype}: give whole numbers, or a mask")
    numbers = np.sort(given)
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= num_samples):
        wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise OptionError(f"subset names sample {wrong}, but they are numbered from 0 to {num_samples - 1}")
    twice = np.flatnonzero(numbers[1:] == numbers[:-1])
    if len(twice):
        raise OptionError(f"subset names sample {numbers[twice[0]]} twice: for more of some samples use weights")
    return numbers.astype(np.int64)


def as_array(name: str, values: Any) -> np.ndarray:
    """What a user gives as an array of numbers.

    Raises
    ------
    OptionError
        It is none, such as lists of different lengths.
    """
    try:
        return np.asarray(values)
    except (TypeError, ValueError):
        raise OptionError(
            f"{name} cannot be made one array, such as lists of different lengths: give numbers"
        ) from None


def check_weights(weights: Any, num_samples: int) -> np.ndarray:
    """Weights as (n,) float64.

    Raises
    ------
    OptionError
        There are not as many as samples, one is negative or not finite, or none is positive.
    """
    given = as_array("weights", weights)
    if given.dtype.kind not in "biuf":
        raise OptionError(f"weights are of type {given.dtype}: give numbers, or the name of a field")
    found = given.astype(np.float64)
    if found.shape != (num_samples,):
        raise OptionError(f"weights have the shape {found.shape}, but there are {num_samples} samples: give one each")
    wrong = np.flatnonzero(~np.isfinite(found) | (found < 0))
    if len(wrong):
        raise OptionError(f"weights[{wrong[0]}] is {found[wrong[0]]}: give finite numbers, 0 or more")
    if not found.any():
        raise OptionError("weights are all 0: nothing can be drawn")
    return found


def balanced_weights(groups: np.ndarray) -> np.ndarray:
    """Weights by which each group is as likely as any other.

    >>> balanced_weights(np.array([7, 7, 7, 9])).round(3).tolist()
    [0.333, 0.333, 0.333, 1.0]
    """
    _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return 1.0 / counts[group]


def split_samples(line: Indices, fractions: Sequence[float], groups: np.ndarray | None, seed: int) -> list[Indices]:
    """Cut samples into parts.

    Parameters
    ----------
    line : (n,) int64
        The samples in random order, from which parts are cut.
    fractions : sequence of float
        Of each part; they make 1, or less where samples shall be left out.
    groups : (n,) array, optional
        Of the sample with each number: every group is cut like that.
    seed : int

    Returns
    -------
    list of (m,) int64, ascending

    Examples
    --------
    >>> [part.tolist() for part in split_samples(np.array([3, 1, 0, 2]), (0.5, 0.5), None, 0)]
    [[1, 3], [0, 2]]
    """
    shares = as_array("fractions", fractions)
    if shares.dtype.kind not in "biuf":
        raise OptionError(f"fractions are {fractions!r}: give numbers from 0 to 1, one for each part")
    shares = shares.astype(np.float64)
    if shares.ndim != 1 or not len(shares) or not (np.isfinite(shares).all() and (shares >= 0).all()):
        raise OptionError(f"fractions are {fractions!r}: give numbers from 0 to 1, one for each part")
    if shares.sum() > 1 + 1e-9:
        raise OptionError(f"fractions are {fractions!r} and make {shares.sum():g}: give at most 1 in all")
    if groups is None:
        return _cut([line], shares)
    order = line[np.argsort(groups[line], kind="stable")]
    borders = np.flatnonzero(groups[order][1:] != groups[order][:-1]) + 1
    of_each = np.split(order, borders)
    turn = permutation(len(of_each), seed, stream=(SPLIT, 1, 0))  # who gets the sample that cannot be cut
    return _cut([of_each[number] for number in turn], shares)


def _cut(lines: list[Indices], shares: np.ndarray) -> list[Indices]:
    """Each line cut by the shares; what is rounded in one is made up for in the next, so that totals are right."""
    ends = np.cumsum(shares)
    parts: list[list[Indices]] = [[] for _ in shares]
    owed = np.zeros(len(shares))
    for line in lines:
        wanted = len(line) * ends + owed
        cuts = np.clip(np.floor(wanted + 0.5), 0, len(line)).astype(np.int64)
        cuts = np.maximum.accumulate(cuts)
        owed = wanted - cuts
        for part, start, stop in zip(parts, [0, *cuts[:-1]], cuts, strict=True):
            part.append(line[start:stop])
    return [np.sort(np.concatenate(part)) for part in parts]
