"""Select the samples of an epoch: subsets, weights and splits.

Selected samples are visited chunk by chunk. Chunks without selected samples are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.plan.permutation import CHUNKS, NODES, SPLIT, WEIGHTS, Indices, permutation, random_bits


@dataclass(frozen=True, eq=False)
class FixedSelection:
    """A selection that is the same in all epochs: a subset, or all samples of a data set whose chunks differ in size.

    ``samples``, (n,) int64, are the indices of the selected samples, ascending and possibly repeated. If it is None,
    all samples are selected. ``starts``, (num_chunks + 1,) int64, has the number of selected samples before each chunk
    that contains any, and finally n.

    >>> samples = np.array([1, 2, 5, 5, 40])
    >>> selection = FixedSelection(starts_of_runs(samples // 4), samples)  # of chunks of four
    >>> len(selection), selection.starts.tolist()
    (5, [0, 2, 4, 5])
    """

    starts: Indices
    samples: Indices | None = None
    chunks: Indices | None = None  # (num_chunks,): the indices of the chunks, if they differ between epochs

    def __len__(self) -> int:
        return int(self.starts[-1])

    def resolve(self, _seed: int, _epoch: int) -> FixedSelection:
        """Return this selection."""
        return self

    @property
    def num_chunks(self) -> int:
        """Number of chunks with a selected sample."""
        return len(self.starts) - 1

    @property
    def max_draws(self) -> int:
        """The largest number of times that an epoch draws a sample."""
        return 1


class SelectionSequence:
    """The sequence of selected samples, chunk by chunk. If ``shuffle`` is True, the chunks are permuted.

    ``nodes``, (n,), are the positions in the sequence at which the parts of the nodes begin. The part of a node has the
    same chunks in all epochs. A chunk at which two parts meet is divided between them.
    """

    def __init__(
        self, selection: FixedSelection, seed: int, epoch: int, *, shuffle: bool = True, nodes: Sequence[int] = (0,)
    ) -> None:
        self._samples = selection.samples
        firsts, sizes = selection.starts[:-1], np.diff(selection.starts)
        order = np.arange(selection.num_chunks)
        if shuffle and len(nodes) > 1:
            firsts, sizes, order = _runs_of_nodes(selection, seed, epoch, nodes)
        elif shuffle:
            order = permutation(selection.num_chunks, seed, stream=(CHUNKS, epoch, 0))
        self._firsts = firsts[order]
        self._ends = np.concatenate(([0], np.cumsum(sizes[order])))

    def at(self, positions: Indices) -> Indices:
        """Return the samples at these positions of the sequence: (n,) int64."""
        turn = np.searchsorted(self._ends, positions, "right") - 1
        numbers = self._firsts[turn] + positions - self._ends[turn]
        return numbers if self._samples is None else self._samples[numbers]


def _runs_of_nodes(
    selection: FixedSelection, seed: int, epoch: int, nodes: Sequence[int]
) -> tuple[Indices, Indices, Indices]:
    """Divide the chunks among nodes. Returns the first samples, the sizes and the order of the resulting runs."""
    chunks = np.arange(selection.num_chunks) if selection.chunks is None else selection.chunks
    division = np.argsort(random_bits(int(chunks.max(initial=0)) + 1, seed, (NODES, 0, 0))[chunks], kind="stable")
    firsts, ends = selection.starts[:-1][division], np.cumsum(np.diff(selection.starts)[division])
    begins = np.concatenate(([0], ends[:-1]))
    cuts = np.union1d(begins, nodes)
    cuts = cuts[cuts < len(selection)]
    number, node = np.searchsorted(ends, cuts, "right"), np.searchsorted(nodes, cuts, "right")
    order = np.lexsort((random_bits(len(cuts), seed, (CHUNKS, epoch, 1)), node))
    return firsts[number] + cuts - begins[number], np.diff(cuts, append=len(selection)), order


@dataclass(frozen=True, eq=False)
class WeightedSelection:
    """A new random selection for each epoch, in which samples occur in proportion to their weights.

    A sample that is expected 2.3 times in an epoch is drawn two or three times, never more or less often.

    Source: systematic sampling; Madow, "On the theory of systematic sampling" (1949).

    >>> selection = WeightedSelection.of(np.array([1.0, 0.0, 3.0, 4.0]), np.array([0, 0, 1, 1]), num_draws=4)
    >>> selection.resolve(seed=0, epoch=0).samples.tolist()
    [2, 2, 3, 3]
    """

    chunks: Indices  # (n,): the chunk of each sample, ascending
    expected: np.ndarray  # (n + 1,): cumulative sums of the expected number of draws of each sample
    samples: Indices | None = None  # (n,): indices of the samples; None: 0 to n - 1

    @classmethod
    def of(cls, weights: np.ndarray, chunks: Indices, num_draws: int) -> WeightedSelection:
        """Make a selection of ``num_draws`` draws from weights, (n,) float64, which may have any sum."""
        expected = np.concatenate(([0.0], np.cumsum(weights / weights.max())))  # huge weights would overflow
        expected *= num_draws / expected[-1]
        expected[-1] = num_draws
        return cls(chunks, np.minimum(expected, num_draws))

    def __len__(self) -> int:
        return int(self.expected[-1])

    @property
    def num_chunks(self) -> int:
        """Number of chunks that have a sample with a positive weight."""
        return len(np.unique(self.chunks[np.diff(self.expected) > 0]))

    @property
    def max_draws(self) -> Indices:
        """The largest number of times that an epoch may draw each sample: (n,) int64."""
        return np.ceil(np.diff(self.expected)).astype(np.int64) + 1

    def resolve(self, seed: int, epoch: int) -> FixedSelection:
        """Draw the samples of an epoch."""
        chance = float(random_bits(1, seed, (WEIGHTS, epoch, 0))[0] >> np.uint64(11)) / (1 << 53)
        ends = np.floor(self.expected + chance).astype(np.int64)
        counts: Indices = ends[1:] - ends[:-1]
        numbers = np.repeat(np.arange(len(counts)), counts)
        starts = starts_of_runs(self.chunks[numbers])
        chunks = self.chunks[numbers[starts[:-1]]]
        return FixedSelection(starts, numbers if self.samples is None else self.samples[numbers], chunks)


class Selection(Protocol):
    """The samples that an epoch visits: a `FixedSelection`, or others that are drawn in each epoch."""

    @property
    def samples(self) -> Indices | None:
        """The numbers in the file of the samples, (n,), from which is drawn; None means 0 to n - 1."""

    def __len__(self) -> int: ...

    def resolve(self, seed: int, epoch: int, /) -> FixedSelection:
        """Return the samples of an epoch."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks with a sample that may be visited."""

    @property
    def max_draws(self) -> Any:
        """The largest number of times that an epoch may draw each sample, (n,) int64, or a number for all of them."""


def starts_of_runs(chunks: Indices) -> Indices:
    """Return the start of each run of equal values, and finally the length of the array: (num_runs + 1,) int64."""
    if not len(chunks):
        return np.zeros(1, np.int64)
    return np.concatenate(([0], np.flatnonzero(chunks[1:] != chunks[:-1]) + 1, [len(chunks)]))


def select_samples(samples: Any, num_samples: int) -> Indices:
    """Validate a subset, and return the indices of its samples, ascending: (n,) int64.

    ``samples`` is a mask of all samples, or the indices of the selected samples in any order, without repetition.
    """
    subset = as_array("subset", samples)
    if subset.dtype == bool:
        if subset.shape != (num_samples,):
            raise OptionError(
                f"subset is a mask of shape {subset.shape}, but there are {num_samples} samples: "
                "pass one value for each sample"
            )
        return np.flatnonzero(subset)
    if subset.ndim != 1 or (subset.size and subset.dtype.kind not in "iu"):
        raise OptionError(
            f"subset has the shape {subset.shape} and the dtype {subset.dtype}: pass sample indices, or a mask"
        )
    numbers = np.sort(subset)
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= num_samples):
        wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise OptionError(f"subset has sample {wrong}: pass indices from 0 to {num_samples - 1}")
    repeated = np.flatnonzero(numbers[1:] == numbers[:-1])
    if len(repeated):
        raise OptionError(f"subset has sample {numbers[repeated[0]]} twice: to repeat samples, use weights")
    return numbers.astype(np.int64)


def as_array(name: str, values: Any) -> np.ndarray:
    """Convert an argument to an array. Raises OptionError if that is impossible."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError):
        raise OptionError(
            f"{name} cannot be converted to an array (are its lists of equal length?): pass numbers"
        ) from None


def check_weights(weights: Any, num_samples: int) -> np.ndarray:
    """Validate weights, one per sample, and return them as (n,) float64."""
    array = as_array("weights", weights)
    if array.dtype.kind not in "biuf":
        raise OptionError(f"weights have the dtype {array.dtype}: pass numbers, or the name of a field")
    values = array.astype(np.float64)
    if values.shape != (num_samples,):
        raise OptionError(
            f"weights have the shape {values.shape}, but there are {num_samples} samples: pass one weight for each"
        )
    wrong = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(wrong):
        raise OptionError(f"weights[{wrong[0]}] is {values[wrong[0]]}: pass finite numbers, 0 or more")
    if not values.any():
        raise OptionError("weights are all 0: pass at least one positive weight")
    return values


def balanced_weights(groups: np.ndarray) -> np.ndarray:
    """Return weights, (n,) float64, with which all groups of samples are equally likely.

    ``groups`` has the group of each sample.

    >>> balanced_weights(np.array([7, 7, 7, 9])).round(3).tolist()
    [0.333, 0.333, 0.333, 1.0]
    """
    _, group, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return 1.0 / counts[group]


def split_samples(shuffled: Indices, fractions: Sequence[float], groups: np.ndarray | None, seed: int) -> list[Indices]:
    """Divide samples, (n,) int64 in random order, into parts of these fractions. Each part is sorted.

    If the fractions add up to less than 1, samples are left out. ``groups`` is the group of each sample of the data
    set, such as its class. Every group is divided in the same proportions.

    >>> [part.tolist() for part in split_samples(np.array([3, 1, 0, 2]), (0.5, 0.5), None, 0)]
    [[1, 3], [0, 2]]
    """
    shares = as_array("fractions", fractions)
    are_numbers = shares.dtype.kind in "biuf" and shares.ndim == 1 and len(shares)
    if not are_numbers or not (np.isfinite(shares).all() and (shares >= 0).all()):
        raise OptionError(f"fractions are {fractions!r}: pass numbers from 0 to 1, one for each part")
    if shares.sum() > 1 + 1e-9:
        raise OptionError(f"fractions {fractions!r} have the sum {shares.sum():g}: pass a sum of at most 1")
    if groups is None:
        return _cut([shuffled], shares)
    by_group = shuffled[np.argsort(groups[shuffled], kind="stable")]
    members = np.split(by_group, starts_of_runs(groups[by_group])[1:-1])
    turn = permutation(len(members), seed, stream=(SPLIT, 1, 0))  # decides which part gets an extra sample
    return _cut([members[number] for number in turn], shares)


def _cut(groups: list[Indices], shares: np.ndarray) -> list[Indices]:
    """Divide every group in proportion to ``shares``. Rounding errors are carried over to the next group."""
    ends = np.cumsum(shares)
    parts: list[list[Indices]] = [[] for _ in shares]
    carried = np.zeros(len(shares))
    for group in groups:
        due = len(group) * ends + carried
        cuts = np.clip(np.floor(due + 0.5), 0, len(group)).astype(np.int64)
        cuts = np.maximum.accumulate(cuts)
        carried = due - cuts
        for part, start, stop in zip(parts, [0, *cuts[:-1]], cuts, strict=True):
            part.append(group[start:stop])
    return [np.sort(np.concatenate(part)) for part in parts]
