"""Compute batches by group: with the proportions of groups, of a few groups, or of groups with matched controls.

A set has ``set_samples`` samples of one group, and a batch has ``batch_sets`` sets, of different groups. With matched
controls, a set has as many samples of the group's control group, after those of the group. In a stratified order, a set
is one sample, and a batch has any number of sets of a group, in proportion to the sets of the group.

Chunks are visited in random order, and each group draws its samples in this order of the chunks. A window has the sets
that the next chunks have, as far as its batches can have the right shares of the groups, or different groups. In a
shuffled file, all groups are therefore at about the same chunk; in a file that is sorted by group, stratified batches
keep a chunk of each group open. The sets of a window are shuffled, and dealt to its batches. Sets that no batch can
have, because it would have two sets of a group, are left out: others in each epoch.

Source: systematic sampling: Madow, "On the theory of systematic sampling" (1949). Dealing sets in turn to batches:
McNaughton, "Scheduling with deadlines and loss functions" (1959). Exchanging sets between batches: Strona et al., "A
fast and unbiased procedure to randomize ecological binary matrices with fixed row and column totals" (2014).

>>> codes = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
>>> selection = GroupSelection.of(codes, np.arange(12) // 4, names=["a", "b", "c"], batch_size=4, groups_per_batch=2)
>>> order = GroupOrder(len(selection), 4, 4, 1, interleave=1, selection=selection)
>>> [codes[batch].tolist() for batch in order.batches()]
[[0, 0, 2, 2], [1, 1, 0, 0], [1, 1, 2, 2]]
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import numpy as np

from h5chunk.errors import OptionError, count_text, names_text
from h5chunk.plan.draws import MOST_REPEATS, REPEAT, epoch_rows, keys_of_repeated
from h5chunk.plan.order import Order, Round, Window, divisors
from h5chunk.plan.permutation import (
    ADVANCE,
    CHUNKS,
    DEAL,
    GROUPS,
    Indices,
    mixed,
    permutation,
    random_bits,
    sorted_order,
)
from h5chunk.plan.selection import FixedSelection, starts_of_runs

LONGEST, SHORTEST = "longest", "shortest"  # the group that ends an epoch of a mixture
SLACK = 0.5  # default of `GroupSelection.slack` for the proportions of the data set
MOST_MIXED = 1 << 31  # limit on the samples in an epoch of a mixture
SHARE = 1 << 30  # the unit of proportions, which are whole numbers so that rounding is exact


def mixed_counts(sizes: Indices, weights: np.ndarray, *, longest: bool) -> Indices:
    """Return how many samples an epoch has of each group: in proportion to weights, and at least one.

    A group has so many samples that it is used up first or, if ``longest``, last; these it has once.

    >>> mixed_counts(np.array([6, 2]), np.array([1.0, 1.0]), longest=True).tolist()
    [6, 6]
    """
    with np.errstate(over="ignore"):
        passes = sizes / weights
        counts = np.minimum(weights * (passes.max() if longest else passes.min()), MOST_MIXED)
    counts = np.maximum(1, np.rint(counts)).astype(np.int64)
    return np.asarray(counts if longest else np.minimum(counts, sizes))


def shared_out(weights: Indices, total: int, seed: int, stream: tuple[int, int, int]) -> Indices:
    """Divide ``total`` in proportion to weights, (n,) int64, and round each part up or down at random: (n,) int64.

    >>> shared_out(np.array([2, 3, 5]), 10, 0, (0, 0, 0)).tolist()
    [2, 3, 5]
    """
    order = permutation(len(weights), seed, stream=stream)
    ends = np.cumsum(weights[order])
    start = int(random_bits(len(weights) + 1, seed, stream)[-1] % np.uint64(ends[-1]))
    parts = np.empty(len(weights), np.int64)
    parts[order] = np.diff((ends * total + start) // ends[-1], prepend=0)
    return parts


class Stream(NamedTuple):
    """The draws of one epoch, group after group.

    ``counts``, (num_groups,), has the number of sets of each group. ``begins`` has the position in ``keys`` at which
    each group begins, also those that are only controls. The keys are those of positions in the data set.
    """

    counts: Indices
    begins: Indices
    keys: Indices
    arrivals: Indices  # the group of each draw, except of controls, in the order of the chunks


@dataclass(frozen=True, eq=False)
class GroupSelection:
    """The samples of groups of which an epoch draws sets.

    ``members``, (m,) int64, are the samples, by group and then ascending, and group g begins at ``starts[g]``. Control
    groups follow all others: ``controls``, (num_groups,), is the control group of each other group. ``shares`` has the
    sets of each group, which are drawn in proportion to it, ``num_sets`` in total.
    """

    chunks: Indices  # (n,): the chunk of each sample, ascending
    members: Indices
    starts: Indices
    shares: Indices
    num_sets: int
    set_samples: int
    batch_sets: int
    stratified: bool
    slack: float = 0.0  # samples by which the share of a group may differ in the batches of a window, before rounding
    controls: Indices | None = None
    in_passes: bool = False  # whether all samples of a group are drawn once before one of them is drawn again
    proportions: tuple[float, ...] | None = None  # those that were given
    samples: Indices | None = None  # (n,): indices of the samples in the file; None: 0 to n - 1
    names: Sequence[Any] = ()  # of the groups

    @classmethod
    def of(
        cls,
        codes: Indices,
        chunks: Indices,
        *,
        names: Sequence[Any],
        batch_size: int,
        groups_per_batch: int | None = None,
        proportions: np.ndarray | None = None,
        controls: Indices | None = None,
        length: str | int | None = None,
        world_size: int = 1,
        drop_last: bool = False,
        pad: bool = False,
    ) -> GroupSelection:
        """Plan the sets of an epoch.

        ``codes``, (n,), is the group of each sample, and ``names`` has the names of the groups. ``proportions``,
        (num_groups,), is the share of each group in a batch. ``controls``, (num_groups,), is the group of controls of
        each group, which is the group itself for those that are only controls. With ``length``, an epoch is that of a
        mixture: until the group that is `LONGEST` or `SHORTEST`, relative to its proportion, was used once, or a number
        of batches.
        """
        sizes = np.bincount(codes, minlength=len(names))
        drawn, control_of = np.arange(len(names)), None
        if controls is not None:
            own = controls == drawn
            drawn = np.concatenate([drawn[~own], drawn[own]])
            control_of = np.argsort(drawn)[controls[drawn[: int((~own).sum())]]]
        if proportions is not None:
            drawn = np.flatnonzero(proportions)
        number = np.full(len(names), len(drawn))
        number[drawn] = np.arange(len(drawn))
        order = np.argsort(number[codes], kind="stable")
        starts = np.concatenate(([0], np.cumsum(sizes[drawn])))
        members, own_sizes = order[: starts[-1]], sizes[drawn]
        drawn_names = [names[group] for group in drawn.tolist()]
        if groups_per_batch is None:
            together, total = batch_size * world_size, len(codes) if proportions is not None else len(members)
            shares, slack = own_sizes, SLACK
            if proportions is not None:
                slack, shares = 0.0, np.rint(proportions[drawn] / proportions.sum() * SHARE)
                shares = np.maximum(1, shares).astype(np.int64)
            if isinstance(length, int):
                total = length * together
            elif length is not None:
                assert proportions is not None
                shares = mixed_counts(own_sizes, proportions[drawn], longest=length == LONGEST)
                total = int(shares.sum())
            if length is not None and total >= MOST_MIXED:
                raise OptionError(
                    f"an epoch of the mixture would have {MOST_MIXED:,} samples or more: pass fewer batches as epoch, "
                    "or more equal weights"
                )
            total = total // together * together if drop_last else -(-total // together) * together if pad else total
            return cls(
                chunks,
                members,
                starts,
                shares,
                total,
                1,
                batch_size,
                stratified=True,
                slack=slack,
                in_passes=length is not None,
                proportions=None if proportions is None else tuple(proportions.tolist()),
                names=drawn_names,
            )
        num_groups = len(drawn) if control_of is None else len(control_of)
        set_samples = _set_samples(batch_size, groups_per_batch, num_groups, has_controls=control_of is not None)
        if not pad:
            used = np.append(np.arange(num_groups), [] if control_of is None else np.unique(control_of)).astype(
                np.int64
            )
            _check_sizes([drawn_names[group] for group in used.tolist()], own_sizes[used], set_samples)
        sets = (own_sizes[:num_groups] + (set_samples - 1 if pad else 0)) // set_samples
        num_batches = _most_batches(sets, groups_per_batch) // world_size * world_size
        if not num_batches:
            raise OptionError(
                f"the samples do not suffice for a batch on each of {world_size} ranks: pass a smaller batch_size"
            )
        numbers = num_batches * groups_per_batch, set_samples, groups_per_batch
        shares = np.minimum(sets, num_batches)
        return cls(chunks, members, starts, shares, *numbers, stratified=False, controls=control_of, names=drawn_names)

    def __len__(self) -> int:
        return self.num_sets * self.samples_of_set

    @property
    def samples_of_set(self) -> int:
        """Number of samples in a set, with the controls."""
        return self.set_samples * (1 if self.controls is None else 2)

    @property
    def num_chunks(self) -> int:
        """Number of chunks with a sample of a group."""
        return len(np.unique(self.chunks[self.members]))

    @property
    def fingerprint(self) -> bytes:
        """A digest of the sets and the samples of the groups."""
        numbers = self.num_sets, self.set_samples, self.batch_sets, self.stratified
        arrays = self.members, self.starts, self.shares, np.empty(0) if self.controls is None else self.controls
        return f"{numbers} {[zlib.crc32(array.tobytes()) for array in arrays]}".encode()

    @cached_property
    def codes(self) -> Indices:
        """The number of the group of each sample, (n,) int64, with -1 for samples that are left out."""
        codes = np.full(len(self.chunks), -1)
        codes[self.members] = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        return codes

    @property
    def num_left_out(self) -> int:
        """Number of samples of the data set that an epoch does not use."""
        draws = self._draws(self._counts(0, 0))
        return len(self.chunks) - int(np.minimum(draws, np.diff(self.starts)).sum())

    @property
    def max_draws(self) -> Indices:
        """The largest number of times that an epoch may draw each sample: (n,) int64."""
        sets = -(-self.shares * self.num_sets // self.shares.sum())
        sizes, most = np.diff(self.starts), np.zeros(len(self.chunks), np.int64)
        most[self.members] = np.repeat(-(-self._draws(sets) // np.maximum(1, sizes)), sizes)
        return most

    def resolve(self, seed: int, epoch: int) -> FixedSelection:
        """Return the samples that an epoch draws, chunk by chunk."""
        drawn = np.sort(self._drawn(seed, epoch, self._draws(self._counts(seed, epoch)), shuffle=True) % REPEAT)
        starts = starts_of_runs(self.chunks[drawn])
        numbers: Indices = drawn if self.samples is None else self.samples[drawn]
        return FixedSelection(starts, numbers, self.chunks[drawn[starts[:-1]]])

    def stream(self, seed: int, epoch: int, *, shuffle: bool = True, window_sets: int = 1) -> Stream:
        """Draw the samples of an epoch. ``window_sets`` is the smallest number of sets that are dealt together.

        If a sample is drawn several times, these draws follow each other, so that its chunk is read once. As a set has
        a sample once, there are several passes through the samples of a group that has fewer sets in a window.
        """
        counts = self._counts(seed, epoch)
        draws = self._draws(counts)
        keys = self._drawn(seed, epoch, draws, shuffle=shuffle)
        repeats = -(-draws // np.diff(self.starts))
        of_window = np.maximum(1, draws // self.set_samples * window_sets // max(1, self.num_sets))
        passes = -(-repeats // of_window)
        if not self.stratified and passes.max(initial=1) > 1:
            keys = _in_passes(keys, draws, np.maximum(1, passes))
        num_own = int(draws[: len(counts)].sum())
        turns = self._turns(seed, epoch, shuffle=shuffle)[self.chunks[keys[:num_own] % REPEAT]]
        words = turns << 32 | np.repeat(np.arange(len(counts)), draws[: len(counts)])
        return Stream(counts, np.cumsum(draws) - draws, keys, np.sort(words) & (1 << 32) - 1)

    def _turns(self, seed: int, epoch: int, *, shuffle: bool) -> Indices:
        """Return the position of each chunk in the order of an epoch."""
        turns = np.arange(int(self.chunks[-1]) + 1)
        if shuffle:
            turns[permutation(len(turns), seed, stream=(CHUNKS, epoch, 0))] = np.arange(len(turns))
        return turns

    def _drawn(self, seed: int, epoch: int, draws: Indices, *, shuffle: bool) -> Indices:
        """Return the keys of the samples of each group: (num_draws,) int64. All samples of a group are equally likely.

        A group that is drawn d times, and has n samples, draws every n/d-th of them, from a random one on.
        """
        sizes, line = np.diff(self.starts), self._by_chunk(seed, epoch) if shuffle else self.members
        if np.array_equal(draws, sizes):
            return line
        first = random_bits(len(sizes), seed, (GROUPS, epoch, 1)) % sizes.astype(np.uint64)
        if self.in_passes:
            groups = zip(np.split(line, self.starts[1:-1]), draws.tolist(), first.tolist(), strict=True)
            return np.concatenate([part for each in groups for part in _whole_passes(*each)])
        turns = np.arange(int(draws.sum())) - np.repeat(np.cumsum(draws) - draws, draws)
        steps = turns * np.repeat(sizes, draws) + np.repeat(first.astype(np.int64), draws)
        positions = np.repeat(self.starts[:-1], draws) + steps // np.repeat(draws, draws)
        return np.asarray(line[positions] + keys_of_repeated(positions) - positions)

    def _by_chunk(self, seed: int, epoch: int) -> Indices:
        """Return the members of each group in the order of the epoch's permutation of the chunks."""
        firsts, groups, chunks = self._runs
        turns = self._turns(seed, epoch, shuffle=True)
        order = np.argsort(groups * len(turns) + turns[chunks])
        sizes = np.diff(firsts, append=len(self.members))[order]
        shifts = firsts[order] - (np.cumsum(sizes) - sizes)
        return np.asarray(self.members[np.arange(len(self.members)) + np.repeat(shifts, sizes)])

    @cached_property
    def _runs(self) -> tuple[Indices, Indices, Indices]:
        """The first members of runs of one group in one chunk, and the group and the chunk of each run."""
        chunks = self.chunks[self.members]
        groups = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        firsts = starts_of_runs(chunks + groups * (int(self.chunks[-1]) + 1))[:-1]
        return firsts, groups[firsts], chunks[firsts]

    def _counts(self, seed: int, epoch: int) -> Indices:
        """Return how many sets of each group an epoch has: (num_groups,) int64."""
        return shared_out(self.shares, self.num_sets, seed, (GROUPS, epoch, 0))

    def _draws(self, sets: Indices) -> Indices:
        """Return how many samples of each group, and then of each control group, these sets have."""
        if self.controls is None:
            return sets * self.set_samples
        return np.concatenate([sets, self.sets_of_controls(sets)]) * self.set_samples

    def sets_of_controls(self, sets: Indices) -> Indices:
        """Return how many sets each control group belongs to, given the sets of each other group."""
        assert self.controls is not None
        num_groups = len(self.controls)
        counts = np.zeros(len(self.starts) - 1 - num_groups, np.int64)
        np.add.at(counts, self.controls - num_groups, sets)
        return counts


def _whole_passes(samples: Indices, draws: int, first: int) -> list[Indices]:
    """Return the keys of all samples of a group, as often as possible, and those of every k-th sample for the rest.

    >>> [(part % REPEAT).tolist() for part in _whole_passes(np.array([4, 5, 6]), 7, 1)]
    [[4, 5, 6, 4, 5, 6], [5]]
    """
    passes, rest = divmod(draws, len(samples))
    repeats = np.arange(passes + 1) % MOST_REPEATS * REPEAT
    some = (np.arange(rest) * len(samples) + first) // max(1, rest)
    return [(samples + repeats[:-1, None]).reshape(-1), samples[some] + repeats[-1]]


def _in_passes(keys: Indices, sizes: Indices, passes: Indices) -> Indices:
    """Rearrange the keys of each group, of these sizes, such that pass p has each ``passes``-th of them from p on.

    >>> _in_passes(np.array([0, 0, 1, 1, 2, 2, 8, 9]), np.array([6, 2]), np.array([2, 1])).tolist()
    [0, 1, 2, 0, 1, 2, 8, 9]
    """
    begins = np.repeat(np.cumsum(sizes) - sizes, sizes)
    size, count = np.repeat(sizes, sizes), np.repeat(passes, sizes)
    turn, number = np.divmod(np.arange(len(keys)) - begins, count)
    arranged = np.empty_like(keys)
    arranged[begins + number * (size // count) + np.minimum(number, size % count) + turn] = keys
    return arranged


def _set_samples(batch_size: int, groups_per_batch: int, num_groups: int, *, has_controls: bool) -> int:
    """Return the number of samples of a set, without controls. Raise OptionError if batches do not consist of sets."""
    num_parts = groups_per_batch * (2 if has_controls else 1)
    if batch_size % num_parts:
        what = "groups and their controls" if has_controls else "groups"
        raise OptionError(
            f"batch_size is {batch_size}, which is not a multiple of the {num_parts} {what} in a batch: pass a "
            "multiple, or other groups_per_batch"
        )
    if groups_per_batch > num_groups:
        raise OptionError(
            f"groups_per_batch is {groups_per_batch}, but there are {count_text(num_groups, 'group')}: pass at most "
            f"{num_groups}"
        )
    return batch_size // num_parts


def _check_sizes(names: Sequence[Any], sizes: Indices, set_samples: int) -> None:
    """Raise OptionError if a group has fewer samples than a set."""
    if small := np.flatnonzero(sizes < set_samples).tolist():
        raise OptionError(
            f"group {names[small[0]]!r} has {count_text(int(sizes[small[0]]), 'sample')}, but a batch needs "
            f"{set_samples} of a group ({count_text(len(small), 'group')} too small: "
            f"{names_text(names[number] for number in small)}): pass pad=True to repeat samples, a smaller batch_size, "
            "more groups_per_batch, or leave the groups out by dataset.where"
        )


def _most_batches(sets: Indices, batch_sets: int) -> int:
    """Return how many batches can have ``batch_sets`` sets of different groups, given the sets of each group."""
    low, high = 0, int(sets.sum()) // batch_sets
    while low < high:
        middle = (low + high + 1) // 2
        fits = int(np.minimum(sets, middle).sum()) >= batch_sets * middle
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


@dataclass(frozen=True)
class GroupOrder(Order):
    """An order whose batches consist of sets of groups. Its ``selection`` is a `GroupSelection`.

    There is one lane per rank. Consecutive windows of sets belong to different ranks in turn.
    """

    by_chunk: ClassVar[bool] = False
    without_echo: ClassVar[str] = "batches by group"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lanes != self.world_size:
            raise OptionError(f"lanes is {self.lanes}, but batches by group need one lane per rank: leave lanes out")

    @property
    def _sets(self) -> GroupSelection:
        assert isinstance(self.selection, GroupSelection)
        return self.selection

    @property
    def batch_text(self) -> str:
        sets = self._sets
        if sets.stratified:
            return f"{self.batch_size}, stratified"
        controls = "" if sets.controls is None else f", each with {sets.set_samples} controls"
        return f"{self.batch_size} ({count_text(sets.batch_sets, 'group')} x {sets.set_samples}{controls})"

    def __str__(self) -> str:
        left_out = f"; an epoch leaves out {count_text(number, 'sample')}" if (number := self.num_left_out) else ""
        return f"{self!r}: {count_text(self.num_batches, 'batch')} of {self.batch_text}{left_out}"

    def numbers_of(self, keys: Indices) -> Indices:
        return np.asarray(keys % REPEAT)

    def groups_of(self, numbers: Indices) -> list[Any]:
        return [self._sets.names[code] for code in self._sets.codes[numbers].tolist()]

    @cached_property
    def open_chunks(self) -> int:
        """The estimated number of chunks that are partly read at a time: those of the windows of the second round."""
        first = list(islice(self._chunks_of_windows(), 2 * self.interleave))
        alternating = 1 if self.window_batches == 1 else self.interleave
        return max(1, len(np.unique(np.concatenate([np.empty(0, np.int64), *first[-alternating:]]))))

    def _chunks_of_windows(self) -> Iterator[Indices]:
        """Yield the chunks from which each window reads."""
        own = replace(self, selection=replace(self._sets, samples=None), epoch_samples=0)
        return (np.unique(self._sets.chunks[window.samples]) for window in own.windows())

    @property
    def num_idle_ranks(self) -> int:
        rest = self._sets.num_sets % (self._sets.batch_sets * self.world_size)
        return max(0, self.world_size - rest) if rest else 0

    @property
    def num_left_out(self) -> int:
        """Number of samples of the data set that an epoch leaves out."""
        return self._sets.num_left_out

    def chunk_reads(self) -> float:
        """Return the number of windows of this rank that read from each chunk, on average."""
        chunks = list(self._chunks_of_windows())
        return sum(map(len, chunks)) / max(1, len(np.unique(np.concatenate(chunks))))

    def rounds(self) -> Iterator[Round]:
        """Yield the rounds of the epoch.

        Windows have at least half of the batches of a full window, if the epoch has. An incomplete last batch is a
        round of its own.
        """
        full, size, done = self.num_samples // (self.batch_size * self.world_size), self.window_batches, 0
        while full - done >= 2 * size or full - done == size:
            num_windows = next(n for n in divisors(self.interleave) if n * size <= full - done)
            if num_windows > 1 and 0 < full - done - num_windows * size < size:
                num_windows = next(n for n in divisors(self.interleave) if (n + 1) * size <= full - done)
            yield Round(done, num_windows, size)
            done += num_windows * size
        left = full - done
        for batches in [left] if left <= size else [left - left // 2, left // 2]:
            if batches:
                yield Round(done, 1, batches)
                done += batches
        if done < self.num_batches:
            yield Round(done, 1, 1)

    def windows(self, start: int = 0) -> Iterator[Window]:
        """Yield the windows that contain batch ``start`` or later batches, in the order of first use."""
        added = epoch_rows(self.epoch, self.epoch_samples) if self.epoch_samples else 0
        dealer = _Dealer(self)
        for round_ in self.rounds():
            stop = min(self.num_batches, round_.first_batch + round_.num_windows * round_.window_batches)
            for window in range(round_.num_windows):
                batches = range(round_.first_batch + window, stop, round_.num_windows)
                keys = dealer.deal(round_.window_batches, wanted=batches[-1] >= start).reshape(-1)
                if batches[-1] < start:
                    continue
                done = sum(batch < start for batch in batches)
                keys = self._keys_in_file(keys[done * self.batch_size :]) + added
                yield Window.of(keys, batches[done:])

    def _keys_in_file(self, keys: Indices) -> Indices:
        if self._sets.samples is None:
            return keys
        positions = keys % REPEAT
        return np.asarray(self._sets.samples[positions] + keys - positions)


class _Dealer:
    """Deal the sets of an epoch to the batches of a rank, window after window."""

    def __init__(self, order: GroupOrder) -> None:
        self._order, self._sets = order, order._sets
        smallest = max(1, min(order.window_batches // 2, order.num_batches)) * self._sets.batch_sets
        self._stream = self._sets.stream(order.seed, order.epoch, shuffle=order.shuffle, window_sets=smallest)
        self._left = self._stream.counts.copy()  # sets of each group that were not dealt yet
        self._seen = np.zeros_like(self._left)  # draws of each group in the chunks up to the current one
        self._num_seen = 0
        self._begins = self._stream.begins.copy()  # where the rest of each group begins in the stream
        self._num_dealt = 0  # windows of all ranks

    def deal(self, num_batches: int, *, wanted: bool) -> Indices:
        """Return the keys of the samples of the next window of this rank: (num_batches, batch_size).

        The windows of the other ranks are dealt, too. An incomplete last batch is divided among the ranks.
        """
        order, batch_sets = self._order, self._sets.batch_sets
        num_left = int(self._left.sum())
        if num_left < num_batches * batch_sets * order.world_size:
            return self._grouped(num_left)[0][order.rank :: order.world_size].reshape(1, -1)
        for rank in range(order.world_size):
            if rank == order.rank and wanted:
                dealt = self._batches(num_batches)
            else:
                self._advance(num_batches * batch_sets)
            self._num_dealt += 1
        return dealt if wanted else np.empty((0, 0), np.int64)

    def _advance(self, num_sets: int) -> tuple[Indices, Indices]:
        """Take the sets of a window. Returns where each group begins in the stream, and its number of sets."""
        own, arrivals = self._stream.counts, self._stream.arrivals
        fewest, most = self._bounds(num_sets)
        while True:
            in_chunks = self._seen // self._sets.set_samples - (own - self._left)
            counts = np.clip(in_chunks, fewest, most)
            excess = int(counts.sum()) - num_sets
            if excess >= 0 or self._num_seen == len(arrivals):
                break
            ahead = max(-excess, num_sets // 16, 1) * self._sets.set_samples
            self._seen += np.bincount(arrivals[self._num_seen : self._num_seen + ahead], minlength=len(own))
            self._num_seen = min(self._num_seen + ahead, len(arrivals))
        if excess:
            counts -= shared_out(
                counts - fewest, excess, self._order.seed, (ADVANCE, self._order.epoch, self._num_dealt)
            )
        begins = self._begins.copy()
        self._left -= counts
        self._begins += self._sets._draws(counts)
        return begins, counts

    def _bounds(self, num_sets: int) -> tuple[Indices, Indices]:
        """Return the smallest and largest number of sets of each group in a window, so that later windows are possible.

        Always possible is the number that has the same share of the window as of all sets that are left.
        """
        left, sets = self._left, self._sets
        num_left = int(left.sum())
        num_batches, later = num_sets / sets.batch_sets, (num_left - num_sets) / sets.batch_sets
        if not sets.stratified:  # at most one set in a batch; these numbers are whole
            return np.maximum(left - int(later), 0), np.minimum(left, int(num_batches))
        same_share, share = left * (num_sets / num_left), self._stream.counts / sets.num_sets
        expected, surplus = share * num_sets, left - share * num_left  # a surplus has to be used up later
        fewest = expected + np.maximum(-sets.slack * num_batches, surplus - sets.slack * later)
        most = expected + np.minimum(sets.slack * num_batches, surplus + sets.slack * later)
        least = np.maximum(np.minimum(np.ceil(fewest), np.floor(same_share)), 0)
        most = np.minimum(np.maximum(np.floor(most), np.ceil(same_share)), left)
        return least.astype(np.int64), most.astype(np.int64)

    def _bits(self, size: int, stream: int) -> np.ndarray:
        """Return random words, or ascending ones if samples are not shuffled: (size,) uint64."""
        order = self._order
        if not order.shuffle:
            return np.asarray(np.arange(size, dtype=np.uint64) << np.uint64(64 - max(1, size).bit_length()))
        return random_bits(size, order.seed, (DEAL, order.epoch, self._num_dealt), stream)

    def _grouped(self, num_sets: int) -> tuple[Indices, Indices]:
        """Return the next sets, (num_sets, set_samples), group by group in random order, and the group of each set."""
        begins, counts = self._advance(num_sets)
        groups = np.flatnonzero(counts)
        groups = groups[sorted_order(self._bits(len(groups), 0))]
        keys = self._shuffled(begins[groups], counts[groups], 1)
        of_sets = np.repeat(groups, counts[groups])
        if (controls := self._sets.controls) is None:
            return keys, of_sets
        num_groups = len(controls)
        matched = self._shuffled(begins[num_groups:], self._sets.sets_of_controls(counts), 2)
        places = np.argsort(controls[of_sets], kind="stable")
        own = np.empty_like(matched)
        own[places] = matched  # the sets of controls are in the order of the control groups
        return np.concatenate([keys, own], axis=1), of_sets

    def _shuffled(self, begins: Indices, counts: Indices, stream: int) -> Indices:
        """Return sets of groups, of samples that are shuffled within each group: (num_sets, set_samples).

        The draws of one sample follow each other after shuffling, and are dealt to different sets of the group.
        """
        set_samples = self._sets.set_samples
        sizes = counts * set_samples
        firsts = np.cumsum(sizes) - sizes
        turns = np.arange(int(sizes.sum())) - np.repeat(firsts, sizes)
        keys = self._stream.keys[turns + np.repeat(begins, sizes)]
        if self._order.shuffle:
            words = mixed((keys % REPEAT).astype(np.uint64), self._bits(1, stream)[0])
        else:
            words = self._bits(len(keys), stream)
        group_bits = np.uint64(max(1, len(sizes)).bit_length())
        groups = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes) << (np.uint64(64) - group_bits)
        place, number = np.divmod(turns, np.repeat(counts, sizes))
        sets = np.empty_like(keys)
        sets[np.repeat(firsts, sizes) + number * set_samples + place] = keys[sorted_order(words >> group_bits | groups)]
        return sets.reshape(-1, set_samples)

    def _batches(self, num_batches: int) -> Indices:
        """Return the batches of a window: (num_batches, batch_size)."""
        num_sets = num_batches * self._sets.batch_sets
        sets, groups = self._grouped(num_sets)
        # the sets of a group follow each other, and are dealt to different batches
        grid = np.arange(num_sets).reshape(self._sets.batch_sets, num_batches).T
        grid = grid[sorted_order(self._bits(num_batches, 3))]
        if self._sets.stratified:  # parts of a batch, such as those of several devices, have about the same shares
            within = sorted_order(self._bits(grid.size, 4).reshape(grid.shape))
            grid = np.take_along_axis(grid, within, axis=1)
        elif self._order.shuffle:
            for turn in range(2 * num_batches.bit_length()):
                self._exchange(grid, groups, turn)
        return np.asarray(sets[grid.reshape(-1)]).reshape(num_batches, -1)

    def _exchange(self, grid: Indices, groups: Indices, turn: int) -> None:
        """Exchange random sets between pairs of batches, such that no batch has two sets of a group.

        ``grid``, (num_batches, batch_sets), has the numbers of the sets, and ``groups`` the group of each set.
        """
        half, width = len(grid) // 2, grid.shape[1]
        pairs = sorted_order(self._bits(len(grid), 5 + 2 * turn))[: 2 * half].reshape(2, half)
        both = np.concatenate(grid[pairs], axis=1)
        both = np.take_along_axis(both, np.argsort(groups[both], axis=1, kind="stable"), axis=1)
        keys = self._bits(both.size, 6 + 2 * turn).reshape(both.shape)
        is_common = groups[both[:, 1:]] == groups[both[:, :-1]]  # in both batches, where it stays
        keys[:, :-1][is_common] = 0
        keys[:, 1:][is_common] = np.iinfo(np.uint64).max
        both = np.take_along_axis(both, sorted_order(keys), axis=1)
        grid[pairs[0]], grid[pairs[1]] = both[:, :width], both[:, width:]
