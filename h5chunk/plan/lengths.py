"""Compute batches of samples that differ in length. Batches are limited by elements, or have samples of similar length.

The samples are shuffled within windows, as in `h5chunk.plan.order`. Each window is then cut into batches, so that the
number of batches differs between windows and epochs, but never between ranks. If the samples of a rank need fewer
batches, the rank cuts its largest batches in two. The batches are a pure function of the fields of a
`LengthOrder`.

With buckets, the samples of several batches are sorted by length before they are cut, ascending and descending in turn,
and the batches of a window are shuffled.

>>> from dataclasses import replace
>>> lengths = np.array([1, 9, 2, 8, 3, 7])
>>> order = LengthOrder(6, 6, 2, 1, interleave=1, lengths=lengths, max_elements=16)
>>> [lengths[batch].tolist() for batch in order.batches()]
[[1], [9], [7, 8], [2, 3]]
>>> [lengths[batch].tolist() for batch in replace(order, bucket_batches=3).batches()]
[[7, 8], [9], [1, 2, 3]]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from h5chunk.errors import OptionError, check_whole
from h5chunk.plan.draws import REPEAT
from h5chunk.plan.order import Order, Round, Window
from h5chunk.plan.permutation import BUCKETS, Indices, random_bits, sorted_order

MIN_BATCHES = 8  # minimum number of batches in a window, because its last batch is not full
NO_OPTIONS = {"lengths", "subset", "selection", "rank", "_sizes"}  # all ranks have the same numbers of batches
KEPT_EPOCHS = 4  # number of epochs whose numbers of batches are cached


@dataclass(frozen=True)
class LengthOrder(Order):
    """An order whose batches depend on the lengths of samples.

    ``batch_size`` is the size of an average batch, which determines the windows. ``max_samples`` is the maximum size of
    a batch. There is one lane per rank.
    """

    lengths: Indices = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)  # of all samples
    subset: Indices | None = field(default=None, repr=False, compare=False)  # indices of the subset's samples
    max_elements: int | None = None  # limit on the elements of a batch
    max_samples: int | None = None
    padded: bool = True  # count the elements of a batch after padding to its longest sample
    bucket_batches: int = 1  # number of batches whose samples are sorted by length together
    _sizes: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # cache of `_batches_of_windows`

    has_equal_batches: ClassVar[bool] = False
    without_echo: ClassVar[str] = "batches by length"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("bucket_batches", self.bucket_batches, 1)
        if self.lanes != self.world_size:
            raise OptionError(f"lanes is {self.lanes}, but batches by length need one lane per rank: leave lanes out")
        if self.interleave != 1:
            raise OptionError(
                f"num_workers is {self.interleave}, but batches by length do not alternate: leave num_workers out"
            )

    @property
    def window_batches(self) -> int:
        """Number of average batches in a full window."""
        count = max(MIN_BATCHES, self.bucket_batches, self.window_chunks * self.chunk_samples // self.batch_size)
        return count // self._chunk_batches * self._chunk_batches or count  # whole chunks, if possible

    @property
    def batch_text(self) -> str:
        if self.max_elements is None:
            return str(self.max_samples)
        return f"up to {self.max_elements:,} {'padded ' if self.padded else ''}elements"

    @property
    def settings(self) -> dict[str, int]:
        own = {"batch_elements": self.max_elements or 0, "padded": int(self.padded)}
        return super().settings | own | {"bucket_batches": self.bucket_batches}

    @property
    def num_batches(self) -> int:
        return sum(self._batches_of_windows)

    @property
    def _batches_of_windows(self) -> list[int]:
        """The number of batches of each window, on every rank."""
        # copies made by `replace` share the cache, so an entry is valid only for the options and arrays it was made for
        arrays = self.lengths, self.subset, self.selection
        key = tuple(getattr(self, each.name) for each in fields(self) if each.name not in NO_OPTIONS)
        kept, found = self._sizes.get(key, ((), []))
        if len(kept) != len(arrays) or any(old is not new for old, new in zip(kept, arrays, strict=True)):
            ranks = [self._counts(rank) for rank in range(self.world_size)]
            found = np.max([counts for counts, _ in ranks], axis=0).tolist()
            if self.drop_last and found:
                found[-1] = min(full for _, full in ranks)
            while len(self._sizes) >= KEPT_EPOCHS:
                self._sizes.pop(next(iter(self._sizes)))
            self._sizes[key] = arrays, found
        return list(found)

    @property
    def num_idle_ranks(self) -> int:
        """Number of ranks with an empty batch, because they have fewer samples in a window than there are batches."""
        if self.pad or self.world_size == 1 or not self.num_samples:
            return 0
        counts, size = np.array(self._batches_of_windows), self.window_batches * self.batch_size
        ranks = np.array([self._lane(rank).num_samples for rank in range(self.world_size)])
        samples = np.clip(ranks[:, None] - size * np.arange(len(counts)), 0, size)  # of each rank in each window
        return int((samples < counts).any(axis=1).sum())

    def _counts(self, rank: int) -> tuple[list[int], int]:
        """Return the number of batches in each window of a rank, and the number of full batches in the last window."""
        counts, full = [], 0
        for keys in self._windows_of(rank).keys():  # noqa: SIM118
            sizes = self._cut(self.lengths_of(keys)[self._sorted(keys)])
            counts.append(len(sizes))
            is_last_full = bool(sizes) and sizes[-1] == self.max_samples
            full = max(0, len(sizes) - 1) + is_last_full
        return counts, full

    def _windows_of(self, rank: int) -> Order:
        """Return an order whose batches are the shuffled windows of a rank."""
        own = {each.name: getattr(self, each.name) for each in fields(Order)}
        size = self.window_batches * self.batch_size
        changes = {"batch_size": size, "window_chunks": 1, "rank": rank, "epoch_samples": 0}
        changes |= {"drop_last": False, "pad": False}
        return Order(**own | changes)

    def rounds(self) -> Iterator[Round]:
        """Yield rounds of one window, counted in average batches."""
        together = self.window_batches * self.batch_size * self.world_size
        for number in range(-(-self.num_samples // together)):
            yield Round(number * self.window_batches, 1, self.window_batches)

    def keys(self, start: int = 0) -> Iterator[Indices]:
        for window in self.windows(start):
            assert window.sizes is not None
            yield from np.split(window.keys, np.cumsum(window.sizes)[:-1])

    def windows(self, start: int = 0) -> Iterator[Window]:
        """Yield the windows that contain batch ``start`` or later batches."""
        first, begin = 0, None
        pairs = zip(self._windows_of(self.rank).windows(), self._batches_of_windows, strict=True)
        for number, (window, num_batches) in enumerate(pairs):
            begin = window if begin is None else begin
            if self.pad and len(window.keys) < num_batches:
                window = _filled_up(window, begin.keys, num_batches)
            if first + num_batches > max(start, first):
                yield self._window_of(window, number, first, num_batches, max(0, start - first))
            first += num_batches

    def _window_of(self, window: Window, number: int, first: int, num_batches: int, done: int) -> Window:
        """Cut a shuffled window into batches, and leave out the first ``done`` of them."""
        order = self._sorted(window.keys)
        sizes = self._cut(self.lengths_of(window.keys)[order])
        while len(sizes) < num_batches:
            largest = max(range(len(sizes)), key=sizes.__getitem__, default=0)
            whole = sizes[largest] if sizes else 0
            sizes[largest : largest + 1] = [whole - whole // 2, whole // 2]
        parts = np.split(order, np.cumsum(sizes))[:num_batches]
        if self.bucket_batches > 1 and self.shuffle:
            turns = sorted_order(random_bits(len(parts), self.seed, (BUCKETS, self.epoch, number), self.rank))
            parts = [parts[turn] for turn in turns.tolist()]
        chosen = np.concatenate(parts[done:])  # positions in the window, batch after batch
        places = np.full(len(window.keys), -1)
        places[chosen] = np.arange(len(chosen))
        destinations = places[window.destinations]
        is_left = destinations >= 0
        keys = window.keys[chosen]
        rows, batches = window.rows[is_left], range(first + done, first + num_batches)
        sizes = [len(part) for part in parts[done:]]
        return Window(self.numbers_of(keys), rows, destinations[is_left], batches, keys, sizes)

    def lengths_of(self, keys: Indices) -> Indices:
        numbers = self.numbers_of(keys)
        if self.subset is not None and (self.selection is None or self.selection.samples is None):
            numbers = self.subset[numbers]
        return self.lengths[numbers]

    def _sorted(self, keys: Indices) -> Indices:
        """Return the order in which the samples of a window are cut into batches."""
        size, order = self.bucket_batches * self.batch_size, np.arange(len(keys))
        if self.bucket_batches == 1:
            return order
        lengths = self.lengths_of(keys)
        blocks = order // size
        return np.lexsort((np.where(blocks % 2, -lengths, lengths), blocks))

    def _cut(self, lengths: Indices) -> list[int]:
        """Return the sizes of the batches into which samples of these lengths are cut."""
        limit = self.max_samples or len(lengths)
        if self.max_elements is None:
            return [min(limit, len(lengths) - first) for first in range(0, len(lengths), limit)]
        lengths, sizes, first = np.maximum(lengths, 1), list[int](), 0
        while first < len(lengths):
            some = lengths[first : first + min(limit, self.max_elements // int(lengths[first]))]
            counts = np.arange(1, len(some) + 1)
            elements = np.maximum.accumulate(some) * counts if self.padded else np.cumsum(some)
            sizes.append(max(1, int(np.searchsorted(elements, self.max_elements, "right"))))
            first += sizes[-1]
        return sizes


def _filled_up(window: Window, keys: Indices, num_samples: int) -> Window:
    """Add some of the samples that ``keys`` begins with to a window, so that it has ``num_samples``."""
    added = np.resize(keys, num_samples - len(window.keys))
    every = np.concatenate([window.keys, added])
    places = np.concatenate([window.destinations, np.arange(len(window.keys), num_samples)])
    numbers = np.concatenate([window.samples, added % REPEAT])
    return Window(numbers, numbers[places], places, window.batches, every)


def usual_batch(lengths: Indices, max_elements: int | None, max_samples: int | None, padded: bool) -> int:
    """Return the size of an average batch. Raises OptionError if a sample has more elements than a batch may have."""
    if max_elements is None:
        return check_whole("batch_size", max_samples, 1)
    most = int(lengths.max(initial=1))
    if check_whole("batch_elements", max_elements, 1) < most:
        raise OptionError(
            f"batch_elements is {max_elements}, but sample {int(lengths.argmax())} has {most}: pass at least that, or "
            f"leave out long samples: dataset.subset(dataset.sample_lengths <= {max_elements})"
        )
    usual = np.quantile(lengths, 0.9 if padded else 0.5) if len(lengths) else 1
    size = max(1, max_elements // max(1, round(usual)))
    return size if max_samples is None else min(size, check_whole("batch_size", max_samples, 1))
