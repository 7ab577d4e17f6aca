"""The order of an epoch: which samples form which batch, a pure function of (seed, epoch).

Chunks are permuted and laid end to end. This line of samples is cut into windows of whole batches; the samples of
a window are shuffled and cut into its batches. Every sample comes once, no batch crosses a window, and two windows
share at most the one chunk that their border cuts (none where a window is a whole number of chunks). The file's
last chunk may be short; the chunk that ends the line fills its gap, so that the borders behind it stay where they are.

Batches of ``interleave`` windows alternate: batch ``t`` of a round belongs to window ``t % interleave``. torch's
DataLoader hands batch ``t`` to worker ``t % num_workers``, so that every ``num_workers`` that divides ``interleave``
gets whole windows, and no chunk is read by two workers. The order itself knows nothing of workers. A window of a
single batch needs none of this and is not interleaved.

Random numbers are raw Philox bits, sorted by all but the lowest of them: NumPy promises the bits of a bit generator for
good, but not those of ``Generator.permutation``.

>>> order = Order(num_samples=10, chunk_samples=2, batch_size=4, window_chunks=2, seed=0)
>>> [batch.tolist() for batch in order.batches()]
[[0, 1, 5, 4], [8, 3, 9, 2], [7, 6]]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from h5chunk.errors import OptionError
from h5chunk.plan.cache import FINISHED_FIRST, OLDEST_FIRST

INTERLEAVE = 24  # divisible by 1, 2, 3, 4, 6, 8, 12 and 24 workers

Indices = npt.NDArray[np.int64]

_CHUNKS, _WINDOW, _FILL, _ONCE, _SHORT = range(5)  # what a stream of random bits is for


def permutation(size: int, seed: int, *, stream: tuple[int, int, int] = (_ONCE, 0, 0)) -> Indices:
    """A random permutation of ``range(size)``, the same on every machine and for every version of NumPy.

    Parameters
    ----------
    size : int
    seed : int
        From 0 to 2**64 - 1.
    stream : (int, int, int)
        Names one of the independent streams of this seed.

    Returns
    -------
    (size,) int64
    """
    _check_seed(seed)
    return _sorted_order(_bits(size, seed, stream))


def _sorted_order(keys: npt.NDArray[np.uint64]) -> Indices:
    """The order that sorts random keys along the last axis.

    By all but the lowest bits of a key, and by its index, which takes their place: numbers that are all different are
    sorted the same by every algorithm, so that NumPy may take its fastest, 6 to 10 times that of a stable ``argsort``.
    """
    size = keys.shape[-1]
    index_bits = np.uint64((1 << max(0, size - 1).bit_length()) - 1)
    packed = (keys & ~index_bits) | np.arange(size, dtype=np.uint64)
    packed.sort(axis=-1)
    order: Indices = (packed & index_bits).astype(np.int64)
    return order


def _bits(size: int, seed: int, stream: tuple[int, int, int]) -> npt.NDArray[np.uint64]:
    generator = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=np.array([0, *stream], np.uint64))
    return np.asarray(generator.random_raw(size), np.uint64)


def _check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 64:
        raise OptionError(f"seed is {seed!r}: give a whole number from 0 to {(1 << 64) - 1}")


class Round(NamedTuple):
    """Windows whose batches alternate: ``num_windows`` of them, of ``window_batches`` batches each."""

    first_batch: int
    num_windows: int
    window_batches: int


class Window(NamedTuple):
    """Samples that are shuffled together.

    Attributes
    ----------
    samples : (n,) int64
        Batch after batch.
    rows, places : (n,) int64
        The same in the order of the line, neighbours in a chunk side by side: ``samples[places] == rows``.
    batches : range
        Which batches of the epoch they are.
    """

    samples: Indices
    rows: Indices
    places: Indices
    batches: range


@dataclass(frozen=True)
class Order:
    """The batches of one epoch.

    Attributes
    ----------
    num_samples, chunk_samples, batch_size : int
        At least 1 each (``num_samples`` may be 0).
    window_chunks : int
        Chunks that are shuffled together, at least 1; a window is never less than a batch.
    interleave : int
        Windows whose batches alternate.
    seed, epoch : int
        What the order is drawn from.
    shuffle : bool
        False: file order.
    drop_last : bool
        Whether a last batch that is not full is left out.
    """

    num_samples: int
    chunk_samples: int
    batch_size: int
    window_chunks: int
    interleave: int = INTERLEAVE
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("num_samples", 0),
            ("chunk_samples", 1),
            ("batch_size", 1),
            ("window_chunks", 1),
            ("interleave", 1),
            ("epoch", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise OptionError(f"{name} is {value!r}: give a whole number, at least {least}")
        _check_seed(self.seed)

    @property
    def num_batches(self) -> int:
        """Batches of the epoch."""
        if self.drop_last:
            return self.num_samples // self.batch_size
        return math.ceil(self.num_samples / self.batch_size)

    @property
    def num_chunks(self) -> int:
        """Chunks of the data set."""
        return math.ceil(self.num_samples / self.chunk_samples)

    @property
    def window_batches(self) -> int:
        """Batches of a full window: as many as ``window_chunks`` hold, at least one; one if nothing is shuffled."""
        if not self.shuffle:
            return 1
        return self._whole_chunks(max(1, self.window_chunks * self.chunk_samples // self.batch_size))

    def _whole_chunks(self, num_batches: int) -> int:
        """The largest number of batches, at most this, that is a whole number of chunks; else as it is."""
        unit = math.lcm(self.batch_size, self.chunk_samples) // self.batch_size
        return num_batches // unit * unit or num_batches

    @property
    def open_chunks(self) -> int:
        """The most chunks that are partly read at one time; with a cache of this many each is read just once.

        A batch is read chunk by chunk, so a window of one batch leaves open only the chunks at its borders, beside
        the one that is being read. The chunk that fills the gap of the short one stays open to the end.
        """
        samples = self.window_batches * self.batch_size
        whole = samples % self.chunk_samples == 0
        if self.window_batches == 1:
            chunks = 1 if whole else 3
        elif whole:
            chunks = self.interleave * samples // self.chunk_samples
        else:
            chunks = self.interleave * ((samples - 2) // self.chunk_samples + 2)
        fill = 1 if self.shuffle and self.num_samples % self.chunk_samples else 0
        return max(1, min(chunks + fill, self.num_chunks))

    @property
    def cache_w0(self) -> float:
        """Which chunks HDF5's cache should evict first: see `h5chunk.plan.cache`."""
        return FINISHED_FIRST if self.window_batches == 1 else OLDEST_FIRST

    def open_chunks_of(self, num_workers: int) -> int:
        """`open_chunks` of each of ``num_workers`` workers that take the batches in turn."""
        groups = num_workers if self.window_batches == 1 else math.gcd(num_workers, self.interleave)
        return math.ceil(self.open_chunks / groups)

    def rounds(self) -> Iterator[Round]:
        """The windows, round by round.

        What is left at the end of an epoch makes smaller windows, then fewer: still a number of them that many
        numbers of workers divide.
        """
        unit = math.lcm(self.batch_size, self.chunk_samples) // self.batch_size
        least = unit if self.window_batches % unit == 0 else 1
        done = 0
        while done < self.num_batches:
            left = self.num_batches - done
            num_windows = next((n for n in _divisors(self.interleave) if n * least <= left), 1)
            window_batches = min(self.window_batches, max(least, left // num_windows // least * least), left)
            yield Round(done, num_windows, window_batches)
            done += num_windows * window_batches

    def batches(self, start: int = 0) -> Iterator[Indices]:
        """The samples of each batch from batch ``start`` on: (batch_size,) int64 each; the last may be shorter."""
        waiting: dict[int, Indices] = {}
        windows = self.windows(start)
        for batch in range(start, self.num_batches):
            while batch not in waiting:
                window = next(windows)
                cuts = range(self.batch_size, len(window.samples), self.batch_size)
                waiting.update(zip(window.batches, np.split(window.samples, cuts), strict=True))
            yield waiting.pop(batch)

    def windows(self, start: int = 0) -> Iterator[Window]:
        """The windows that hold batches from ``start`` on, in the order in which they are first wanted."""
        chunks, short_turn = self._turns() if self.shuffle else (np.empty(0, np.int64), 0)
        for first_batch, num_windows, window_batches in self.rounds():
            num_batches = num_windows * window_batches
            if first_batch + num_batches <= start:
                continue
            size = window_batches * self.batch_size
            first = first_batch * self.batch_size
            rows, places = self._round(chunks, short_turn, first, size, num_windows)
            for window in range(num_windows):
                numbers = range(first_batch + window, first_batch + num_batches, num_windows)
                if numbers[-1] >= start:
                    part = slice(window * size, (window + 1) * size)
                    samples = np.empty_like(rows[part])
                    samples[places[part]] = rows[part]
                    yield Window(samples, rows[part], places[part], numbers)

    def _turns(self) -> tuple[Indices, int]:
        """The chunks in the order of their turns, and the turn of the file's last one.

        If that is short it comes last less often than the others, so that its samples are no likelier than others to
        be at the end of the line.
        """
        chunks = permutation(self.num_chunks, self.seed, stream=(_CHUNKS, self.epoch, 0))
        short_turn = int(chunks.argmax()) if chunks.size else 0
        if self.num_samples % self.chunk_samples:
            place = int(_bits(1, self.seed, (_SHORT, self.epoch, 0))[0]) % self.num_samples
            drawn_turn = place // self.chunk_samples
            chunks[[short_turn, drawn_turn]] = chunks[[drawn_turn, short_turn]]
            short_turn = drawn_turn
        return chunks, short_turn

    def _round(
        self, chunks: Indices, short_turn: int, first: int, size: int, num_windows: int
    ) -> tuple[Indices, Indices]:
        """The samples of a round of windows in the order of the line, and the place of each in its window.

        One sort for all windows: the time of an order is that of the calls it takes, not of the numbers in it.
        """
        stop = min(first + num_windows * size, self.num_samples)
        if not self.shuffle:
            rows = np.arange(first, stop, dtype=np.int64)
            return rows, (rows - first) % size
        keys = _bits(stop - first, self.seed, (_WINDOW, self.epoch, first))
        places = np.empty(stop - first, np.int64)
        full = (stop - first) // size * size
        turns = _sorted_order(keys[:full].reshape(-1, size))
        np.put_along_axis(places[:full].reshape(-1, size), turns, np.arange(size, dtype=np.int64), axis=1)
        places[full:][_sorted_order(keys[full:])] = np.arange(stop - first - full, dtype=np.int64)
        return self._line(chunks, short_turn, first, stop), places

    def _line(self, chunks: Indices, short_turn: int, start: int, stop: int) -> Indices:
        """Samples ``start`` to ``stop`` of the line.

        The place of sample ``o`` of the chunk in turn ``t`` is ``t * chunk_samples + o``. What the file's last chunk
        lacks (its turn is ``short_turn``) is filled with samples, drawn at random, of the chunk that ends the line.
        """
        size = self.chunk_samples
        turn, offset = np.divmod(np.arange(start, stop, dtype=np.int64), size)
        rest = self.num_samples % size
        last_turn = self.num_chunks - 1
        if rest and short_turn != last_turn:
            drawn = permutation(size, self.seed, stream=(_FILL, self.epoch, 0))
            fills = (turn == short_turn) & (offset >= rest)
            ends = turn == last_turn
            offset[ends | fills] = drawn[offset[ends | fills]]
            turn[fills] = last_turn
        return chunks[turn] * size + offset


def with_full_windows(order: Order) -> Order:
    """The order with as many alternating windows as there are: fewer, rather than smaller ones.

    >>> order = Order(num_samples=120, chunk_samples=1, batch_size=10, window_chunks=40)
    >>> [each.num_windows for each in order.rounds()], [each.num_windows for each in with_full_windows(order).rounds()]
    ([12], [3])
    """
    fitting = (n for n in _divisors(order.interleave) if n * order.window_batches <= order.num_batches)
    return replace(order, interleave=next(fitting, 1))


def _divisors(number: int) -> list[int]:
    return [n for n in range(number, 0, -1) if number % n == 0]
