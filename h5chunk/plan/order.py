"""Compute which samples form which batch of an epoch, as a pure function of the fields of an `Order`.

The chunks are permuted, and the samples of all chunks are concatenated to a sequence (`h5chunk.plan.permutation`). The
sequence is cut into windows, whose samples are shuffled and cut into batches. Every sample occurs once. Consecutive
windows share at most one chunk, which is the chunk at their border.

``interleave`` windows form a round, in which their batches alternate: batch ``t`` of a round belongs to window ``t %
interleave``. torch's DataLoader gives batch ``t`` to worker ``t % num_workers``. If ``num_workers`` divides
``interleave``, each worker therefore reads complete windows, and no chunk is read by two workers. Windows of a single
batch do not alternate. Nor do those of a loader without workers, whose ``interleave`` is 1.

For several processes (ranks) the sequence is divided into lanes, which are cut into windows and batches independently.
Each rank has some of the lanes, and its batch ``t`` consists of batch ``t`` of each of its lanes. The batches ``t`` of
all ranks together therefore have the same samples for any number of ranks that divides the number of lanes. All ranks
have the same number of batches. No chunk is read by two ranks, except for some chunks at the end of the sequence, fewer
than there are lanes.

With ``nodes``, consecutive lanes belong to the same node, and a node has the same chunks in all epochs, so that it can
keep them in a disk cache. The nodes do not depend on the number of ranks. Only some chunks at the end of the sequence
may belong to any node: at most two per lane, and two more if the file's last chunk is short. With a selection, two
nodes share only the chunk at which their parts meet. With weights, these chunks differ between epochs.

>>> order = Order(num_samples=10, chunk_samples=2, batch_size=4, window_chunks=2, seed=0)
>>> [batch.tolist() for batch in order.batches()]
[[0, 1, 5, 4], [8, 3, 9, 2], [7, 6]]
>>> two = [replace(order, batch_size=2, lanes=2, rank=rank, world_size=2) for rank in range(2)]
>>> [[batch.tolist() for batch in each.batches()] for each in two]
[[[0, 1], [5, 4], [6]], [[3, 2], [9, 8], [7]]]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from h5chunk.errors import OptionError, check_whole
from h5chunk.plan.cache import FINISHED_FIRST, OLDEST_FIRST
from h5chunk.plan.draws import REPEAT, epoch_rows, keys_of_repeated
from h5chunk.plan.permutation import MAX_SEED, WINDOW, Indices, Lane, ShuffledSequence, random_bits, sorted_order
from h5chunk.plan.selection import Selection, SelectionSequence, WeightedSelection

MAX_EPOCH = (1 << 63) - 1
MAX_OPEN_BYTES = 1 << 30  # total size of the windows whose batches alternate
INTERLEAVE = 24  # divisible by 1, 2, 3, 4, 6, 8, 12 and 24 workers
PLANNED_WINDOWS, PLANNED_SAMPLES = 24, 1 << 17  # most windows, and samples, to plan together if they do not alternate
LARGE_GROUP = 1 << 14  # samples of a group of windows that takes long to plan: its first window is planned first
Keys = Callable[[Indices], Indices]  # returns the keys of the samples at positions of the sequence


class Round(NamedTuple):
    """Windows of ``window_batches`` batches each, whose batches alternate. The last round may lack some batches."""

    first_batch: int
    num_windows: int
    window_batches: int


class Window(NamedTuple):
    """The samples of one window, or of several windows that are read together, in two orders: (n,) int64 each.

    The orders are related by ``samples[destinations] == rows``.
    """

    samples: Indices  # batch after batch; all batches are full, except for the last one of the epoch
    rows: Indices  # chunk by chunk, for reading
    destinations: Indices
    batches: Sequence[int]  # indices of the batches in the epoch, ascending
    keys: Indices  # the keys of ``samples``, for `h5chunk.plan.draws`
    sizes: Sequence[int] | None = None  # number of samples in each batch, if batches differ in size

    @classmethod
    def of(cls, keys: Indices, batches: Sequence[int] = (0,), sizes: Sequence[int] | None = None) -> Window:
        """Return the window of samples in any order, given their keys, batch after batch."""
        samples = keys % REPEAT
        places = np.argsort(samples, kind="stable")
        return cls(samples, samples[places], places, batches, keys, sizes)

    def without(self, start: int, batch_size: int) -> Window:
        """Return the window without its batches before batch ``start``. All its batches have ``batch_size`` samples."""
        done = sum(number < start for number in self.batches)
        first = done * batch_size
        is_left = self.destinations >= first
        return Window(
            self.samples[first:],
            self.rows[is_left],
            self.destinations[is_left] - first,
            self.batches[done:],
            self.keys[first:],
        )

    @classmethod
    def joined(cls, windows: Sequence[Window]) -> Window:
        """Return consecutive windows, whose batches do not alternate, as one."""
        if len(windows) == 1:
            return windows[0]
        samples, rows, places, batches, keys, sizes = zip(*windows, strict=True)
        begins = np.cumsum([0, *map(len, samples[:-1])]).tolist()
        return cls(
            np.concatenate(samples),
            np.concatenate(rows),
            np.concatenate([own + begin for own, begin in zip(places, begins, strict=True)]),
            list(chain.from_iterable(batches)),
            np.concatenate(keys),
            None if sizes[0] is None else list(chain.from_iterable(sizes)),
        )


class Epoch(Protocol):
    """The batches of one epoch, in windows: an `Order`, or the batches of the user (`h5chunk.feed.given`)."""

    @property
    def epoch(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def batch_size(self) -> int:
        """Number of samples in each batch of a window without ``sizes``, except for the last one."""

    @property
    def is_pure(self) -> bool:
        """Whether the windows depend only on the fields. Then another thread may plan them, and the next epoch."""

    @property
    def has_equal_batches(self) -> bool:
        """Whether all batches have ``batch_size`` samples, except for the last one."""

    @property
    def num_batches(self) -> int | None:
        """Number of batches, or None if it is not known before the last one."""

    @property
    def replan(self) -> Callable[[int], Any] | None:
        """Returns a `h5chunk.plan.slots.SlotPlan` for a batch larger than planned. None: there is none."""

    @property
    def settings(self) -> dict[str, int]:
        """The numbers that determine the batches of all epochs, apart from ranks, which a saved position must have."""

    def numbers(self, start: int = 0) -> Iterator[int]:
        """Yield the numbers of the batches, from batch ``start`` on."""

    def rows_together(self) -> Indices | None:
        """Return samples that are read together, ascending, to count bytes. None means all, each chunk once."""

    def numbers_of(self, keys: Indices) -> Indices:
        """Convert the keys of samples to the indices of the samples."""

    def groups_of(self, numbers: Indices) -> list[Any] | None:
        """Return the groups of samples of the data set: one may replace another of its group. None: any other."""

    def keys(self, start: int = 0) -> Iterator[Indices]:
        """Yield the keys of the samples of each batch, from batch ``start`` on: (n,) int64."""

    def windows(self, start: int = 0) -> Iterator[Window]:
        """Yield the windows, from batch ``start`` on, in the order of first use."""


@dataclass(frozen=True)
class Order:
    """The batches of one epoch on one rank.

    Without ``pad`` and ``drop_last``, the last batches of the ranks may differ in size by one sample per lane, and some
    of them may be empty.
    """

    num_samples: int  # number of samples in the data set, or in the ``selection``
    chunk_samples: int
    batch_size: int  # samples per batch on one rank
    window_chunks: int  # chunks of a lane that are shuffled together; a window has at least one batch
    interleave: int = INTERLEAVE  # number of windows whose batches alternate
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True  # False: in the order of the file
    drop_last: bool = False  # leave out an incomplete last batch, on all ranks
    lanes: int = 1  # number of independently shuffled parts of the sequence, a multiple of ``world_size``
    rank: int = 0
    world_size: int = 1  # number of ranks
    pad: bool = False  # fill up the last batch of every rank with samples from the beginning of its lanes
    nodes: int = 1  # number of nodes that have the same chunks in all epochs; a divisor of ``lanes``
    selection: Selection | None = field(default=None, repr=False)  # the samples to visit; None: all samples
    epoch_samples: int = 0  # if not 0, samples differ between epochs: see `h5chunk.plan.draws.epoch_rows`

    is_pure: ClassVar[bool] = True
    has_equal_batches: ClassVar[bool] = True
    by_chunk: ClassVar[bool] = True  # whether windows have the samples of whole chunks, except at their borders
    without_echo: ClassVar[str] = ""  # what the batches are, if they cannot be repeated
    replan: ClassVar[None] = None

    def __post_init__(self) -> None:
        at_least = dict.fromkeys(("chunk_samples", "batch_size", "window_chunks", "interleave", "world_size"), 1)
        at_most = {"epoch": MAX_EPOCH, "seed": MAX_SEED}
        at_least |= {"lanes": 1, "nodes": 1, "num_samples": 0, "rank": 0, "epoch": 0, "seed": 0}
        for name, minimum in at_least.items():
            value = check_whole(name, getattr(self, name), minimum, at_most.get(name))
            object.__setattr__(self, name, value)  # NumPy's narrow integers wrap around
        self._check_lanes()

    def _check_lanes(self) -> None:
        if self.rank >= self.world_size:
            raise OptionError(
                f"rank is {self.rank}, but world_size is {self.world_size}: pass a rank from 0 to {self.world_size - 1}"
            )
        if self.lanes % self.world_size:
            raise OptionError(
                f"lanes is {self.lanes}, which is not a multiple of world_size {self.world_size}: pass a multiple, and "
                "the same number of lanes in all runs that share this order"
            )
        if self.lanes % self.nodes:
            raise OptionError(f"lanes is {self.lanes}, which is not a multiple of nodes {self.nodes}: pass a multiple")
        if self.batch_size * self.world_size % self.lanes:
            raise OptionError(
                f"batch_size is {self.batch_size}, but each rank has {self.lanes // self.world_size} lanes: pass "
                f"a multiple of {self.lanes // self.world_size} as batch_size, or fewer lanes"
            )
        if self.selection is not None and len(self.selection) != self.num_samples:
            raise OptionError(
                f"num_samples is {self.num_samples}, but the selection has {len(self.selection)} samples: pass "
                f"num_samples={len(self.selection)}"
            )
        if self.drop_last and self.pad:
            raise OptionError("drop_last and pad exclude each other: pass only one of them")
        if self.pad and 0 < self.num_samples < self.lanes:
            raise OptionError(
                f"pad is set, but {self.num_samples} samples are too few for {self.lanes} lanes, because each lane "
                "repeats one of its samples: use fewer lanes or processes, or pad=False"
            )

    @property
    def lane_batch(self) -> int:
        """Number of samples of one lane in a full batch."""
        return self.batch_size * self.world_size // self.lanes

    @property
    def batch_text(self) -> str:
        """The size of a batch, for messages."""
        return str(self.batch_size)

    @property
    def num_batches(self) -> int:
        """Number of batches of the epoch on each rank."""
        together = self.batch_size * self.world_size
        return self.num_samples // together if self.drop_last else math.ceil(self.num_samples / together)

    @property
    def num_idle_ranks(self) -> int:
        """Number of ranks whose last batch is empty."""
        lanes = np.array([self._lane(number).num_samples for number in range(self.lanes)])
        num_samples = lanes.reshape(self.world_size, -1).sum(axis=1)  # of each rank
        return 0 if self.pad else int((num_samples <= (self.num_batches - 1) * self.batch_size).sum())

    @property
    def settings(self) -> dict[str, int]:
        """See `Epoch.settings`."""
        return {
            "num_samples": self.num_samples,
            "chunk_samples": self.chunk_samples,
            "seed": self.seed,
            "global_batch_size": self.batch_size * self.world_size,
            "lanes": self.lanes,
            "locality": self.nodes,
            "window_chunks": self.window_chunks,
            "interleave": self.interleave,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
            "pad": int(self.pad),
        }

    @property
    def num_chunks(self) -> int:
        """Number of chunks in the data set."""
        return math.ceil(self.num_samples / self.chunk_samples)

    @property
    def window_batches(self) -> int:
        """Number of batches of a full window, at least 1. It is 1 without shuffling."""
        if not self.shuffle:
            return 1
        num_batches = max(1, self.window_chunks * self.chunk_samples // self.lane_batch)
        return num_batches // self._chunk_batches * self._chunk_batches or num_batches  # whole chunks, if possible

    @property
    def _chunk_batches(self) -> int:
        """The smallest number of batches that consists of whole chunks."""
        return math.lcm(self.lane_batch, self.chunk_samples) // self.lane_batch

    @property
    def open_chunks(self) -> int:
        """The maximum number of chunks that are partly read at a time. If a cache holds them, no chunk is read twice.

        A batch is read chunk by chunk. A window of one batch therefore has at most three open chunks: those at its
        borders, and the chunk that is being read. The chunk that fills the gap after the file's short last chunk stays
        open until the end of the epoch.
        """
        samples = self.window_batches * self.lane_batch
        whole = samples % self.chunk_samples == 0 and self.selection is None
        if self.window_batches == 1:
            chunks = 1 if whole else 3
        elif whole:
            chunks = self.interleave * samples // self.chunk_samples
        else:
            chunks = self.interleave * ((samples - 2) // self.chunk_samples + 2)
        fill = 1 if self.shuffle and self.num_samples % self.chunk_samples else 0
        return max(1, min((chunks + fill) * self.lanes // self.world_size, self.num_chunks))

    @property
    def cache_w0(self) -> float:
        """The ``w0`` of HDF5's cache, which `h5chunk.plan.cache` explains."""
        return FINISHED_FIRST if self.window_batches == 1 else OLDEST_FIRST

    def open_chunks_of(self, num_workers: int) -> int:
        """Return `open_chunks` for one of ``num_workers`` workers that read batches in turn."""
        groups = num_workers if self.window_batches == 1 else math.gcd(num_workers, self.interleave)
        return math.ceil(self.open_chunks / groups)

    def rounds(self) -> Iterator[Round]:
        """Yield the rounds of the epoch. The last rounds have smaller windows, then fewer windows."""
        full, num_batches = self.window_batches, self.num_batches
        unit = self._chunk_batches if full % self._chunk_batches == 0 else 1
        counts = divisors(self.interleave)
        done = 0
        while done < num_batches:
            left = num_batches - done
            num_windows = next((n for n in counts if n * unit <= left), 1)
            window_batches = min(full, max(unit, left // num_windows // unit * unit), left)
            yield Round(done, num_windows, window_batches)
            done += num_windows * window_batches

    def numbers(self, start: int = 0) -> Iterator[int]:
        """Yield the numbers of the batches, from batch ``start`` on."""
        return iter(range(start, self.num_batches))

    def batches(self, start: int = 0) -> Iterator[Indices]:
        """Yield the indices of the samples of each batch, from batch ``start`` on: (n,) int64."""
        return (self.numbers_of(keys) for keys in self.keys(start))

    def rows_together(self) -> Indices | None:
        """Return all samples of the epoch, ascending, because their order reads each chunk once."""
        return None if self.selection is None else self.selection.resolve(self.seed, self.epoch).samples

    def numbers_of(self, keys: Indices) -> Indices:
        """Convert keys, which `keys` yields, to the indices of the samples."""
        return keys % REPEAT if isinstance(self.selection, WeightedSelection) else keys

    def groups_of(self, numbers: Indices) -> list[Any] | None:
        """Return the groups of samples of the data set, given their positions in it, or None if there are none."""
        return None

    def keys(self, start: int = 0) -> Iterator[Indices]:
        """Yield the keys of the samples of each batch, from batch ``start`` on: (n,) int64."""
        waiting: dict[int, Indices] = {}
        windows = self.windows(start)
        for batch in range(start, self.num_batches):
            while batch not in waiting:
                window = next(windows)
                cuts = range(self.batch_size, self.batch_size * len(window.batches), self.batch_size)
                waiting.update(zip(window.batches, np.split(window.keys, cuts), strict=True))
            yield waiting.pop(batch)

    def windows(self, start: int = 0) -> Iterator[Window]:
        """Yield the windows that contain batch ``start`` or later batches, in the order of first use.

        Earlier batches are left out of the windows.
        """
        sequence, count = self._sequence(), self.lanes // self.world_size
        added = epoch_rows(self.epoch, self.epoch_samples) if self.epoch_samples else 0
        lanes = [self._lane(number) for number in range(self.rank * count, (self.rank + 1) * count)]
        is_first = len(lanes) == 1
        for group in self._groups():
            stop = group.first_batch + group.num_windows * group.window_batches
            if stop <= start:
                continue
            size = group.window_batches * self.batch_size
            planned = 0  # windows of the group
            for window in range(group.num_windows):
                numbers = range(group.first_batch + window, stop, group.num_windows)
                if self.interleave == 1:
                    first = group.first_batch + window * group.window_batches
                    numbers = range(first, first + group.window_batches)
                if numbers[-1] < start:
                    continue
                if window >= planned:
                    begun, planned = (window if len(lanes) == 1 else 0), group.num_windows
                    if is_first and group.num_windows * size > LARGE_GROUP:  # alone, so that reading can begin
                        planned, is_first = window + 1, False
                    row_keys, destinations = _group_rows(self, sequence, lanes, group, begun, planned)
                    row_keys = row_keys + added if added else row_keys
                    keys = np.empty_like(row_keys)
                    begins = np.repeat(np.arange(0, len(keys), size), min(size, len(keys)))[: len(keys)]
                    keys[destinations + begins] = row_keys
                    rows, samples = self.numbers_of(row_keys), self.numbers_of(keys)
                of = slice((window - begun) * size, (window - begun + 1) * size)
                whole = Window(samples[of], rows[of], destinations[of], numbers, keys[of])
                yield whole if numbers[0] >= start else whole.without(start, self.batch_size)

    def _groups(self) -> Iterator[Round]:
        """Yield groups of windows that are planned together, because each call of NumPy has a fixed cost.

        They are the rounds, or, if windows do not alternate, consecutive windows.
        """
        if self.interleave > 1:
            yield from self.rounds()
            return
        for window_batches, windows in groupby(self.rounds(), lambda each: each.window_batches):
            most = max(1, min(PLANNED_WINDOWS, PLANNED_SAMPLES // (window_batches * self.batch_size)))
            while group := list(islice(windows, most)):
                yield Round(group[0].first_batch, len(group), window_batches)

    def _lane(self, number: int) -> Lane:
        # the chunks of a selection differ in size, so its lanes are contiguous parts
        chunk = self.chunk_samples if self.selection is None else max(1, self.num_samples)
        return Lane(number, self.lanes, num_samples=self.num_samples, chunk_samples=chunk)

    def _sequence(self) -> Keys:
        if self.selection is not None:
            selected = self.selection.resolve(self.seed, self.epoch)
            if isinstance(self.selection, WeightedSelection) and selected.samples is not None:
                selected = replace(selected, samples=keys_of_repeated(selected.samples))
            first_lanes = map(self._lane, range(0, self.lanes, self.lanes // self.nodes))
            nodes = [lane.first_position for lane in first_lanes]
            return SelectionSequence(selected, self.seed, self.epoch, shuffle=self.shuffle, nodes=nodes).at
        if self.shuffle:
            parts = {"nodes": self.nodes, "lanes": self.lanes}
            return ShuffledSequence(self.num_samples, self.chunk_samples, self.seed, self.epoch, **parts).at
        return lambda positions: positions


def with_full_windows(order: Order) -> Order:
    """Reduce ``interleave`` if the epoch has too few batches to fill that many windows.

    >>> order = Order(num_samples=120, chunk_samples=1, batch_size=10, window_chunks=40)
    >>> [each.num_windows for each in order.rounds()], [each.num_windows for each in with_full_windows(order).rounds()]
    ([12], [3])
    """
    fitting = (n for n in divisors(order.interleave) if n * order.window_batches <= order.num_batches)
    return replace(order, interleave=next(fitting, 1))


def choose_interleave(window_bytes: int) -> int:
    """Choose ``interleave`` so that the windows of a round have at most `MAX_OPEN_BYTES` in total.

    >>> choose_interleave(10 << 20), choose_interleave(100 << 20), choose_interleave(4 << 30)
    (24, 8, 1)
    """
    return next((n for n in divisors(INTERLEAVE) if n * window_bytes <= MAX_OPEN_BYTES), 1)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, the largest first."""
    return [n for n in range(number, 0, -1) if number % n == 0]


def _group_rows(
    order: Order, sequence: Keys, lanes: list[Lane], group: Round, begin: int, end: int
) -> tuple[Indices, Indices]:
    """Return the keys of the samples of a group's windows, and the position of each sample in its window.

    The windows are those from ``begin`` to ``end`` (excluded), which with several lanes must be all. The samples are
    sorted by window, then by lane, then by position in the sequence.
    """
    parts = [_lane_rows(order, lane, group, begin, end) for lane in lanes]
    if len(lanes) == 1:
        return sequence(parts[0][0]), parts[0][1]
    lengths, batch = [len(rows) for rows, _ in parts], order.lane_batch
    left = lengths[0] - batch * np.arange(group.num_windows * group.window_batches)  # samples from each batch on
    longer, shorter = (np.clip(left - fewer, 0, batch) for fewer in (0, lengths[0] - lengths[-1]))
    num_longer, windows = lengths.count(lengths[0]), []  # the first lanes may have a sample more than the others
    for number, (_, destinations) in enumerate(parts):
        before = min(number, num_longer) * longer + max(0, number - num_longer) * shorter
        windows.append(np.arange(len(destinations)) // (group.window_batches * batch))
        batches = destinations // batch
        destinations += batches * (order.batch_size - batch) + before[windows[-1] * group.window_batches + batches]
    by_window = np.argsort(np.concatenate(windows).astype(np.uint32), kind="stable")
    rows, destinations = (np.concatenate(column)[by_window] for column in zip(*parts, strict=True))
    return sequence(rows), destinations


def _lane_rows(order: Order, lane: Lane, group: Round, begin: int, end: int) -> tuple[Indices, Indices]:
    """Return the samples of a lane in some windows, as positions in the sequence, and their positions in their windows.

    The windows are those of the group from ``begin`` to ``end`` (excluded). All of them are shuffled in one call,
    because each call has a fixed cost.
    """
    size = group.window_batches * order.lane_batch
    first = group.first_batch * order.lane_batch
    start, stop = first + begin * size, first + end * size
    if not order.pad:
        stop = min(stop, lane.num_samples)
    rows, count = lane.positions(start, stop), max(0, stop - start)
    if not order.shuffle:
        return rows, np.arange(count, dtype=np.int64) % size
    own = min(count, max(0, lane.num_samples - start))  # the rest, if any, fills up the last batch
    keys = random_bits(max(0, start + own - first), order.seed, (WINDOW, order.epoch, first), lane.number)
    keys = keys[start - first :]
    destinations = np.empty(count, np.int64)
    full = own // size * size
    if full:
        turns = sorted_order(keys[:full].reshape(-1, size))
        np.put_along_axis(destinations[:full].reshape(-1, size), turns, np.arange(size, dtype=np.int64), axis=1)
    turns = sorted_order(keys[full:])
    destinations[full:own][turns] = np.arange(own - full, dtype=np.int64)
    destinations[own:] = np.arange(own - full, count - full, dtype=np.int64)
    if count > own and start + full == 0:  # the only window: of its own samples those that are last are not repeated
        rows[own:] = rows[np.sort(np.resize(turns, count - own))]
    return rows, destinations
