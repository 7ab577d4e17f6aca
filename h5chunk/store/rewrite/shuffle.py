"""Copy the rows of a dataset into a new file, in the same order or shuffled, within a memory limit.

A shuffle that exceeds the memory needs two passes, which `h5chunk.plan.repack` plans. The first pass writes each row to
the bucket of its new position, and the second pass sorts the rows of each bucket. Between the passes the buckets are
stored in the new file itself, or for a compressed dataset in a temporary file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from h5chunk.errors import OptionError, exact_bytes
from h5chunk.machine import in_order
from h5chunk.plan.repack import MemoryShares, plan_buckets, plan_steps, plan_uneven
from h5chunk.store.hdf5.codecs import scratch
from h5chunk.store.hdf5.ranges import OneFile, vector_tasks
from h5chunk.store.rewrite.raw_rows import RawRows
from h5chunk.store.write.spool import TemporaryBytes
from h5chunk.store.write.targets import PlainTarget, Target, Waiting

ROW_BYTES = 48  # memory per row, in addition to its values, while rows are regrouped
MIN_VECTOR_BYTES = 512  # larger rows are read directly to their destinations, and others are sorted in memory
INDEX_BYTES = 24  # memory per element, in addition to its value, if rows differ in length

Moved = Callable[[int], None]  # called with the number of bytes moved since the last call
T = TypeVar("T")
R = TypeVar("R")


class NewOrder:
    """A permutation of rows. Row i of the new file is row ``order[i]`` of the old file, and ``inverse`` maps back."""

    def __init__(self, order: np.ndarray) -> None:
        self.order = order
        self.inverse = np.empty_like(order)
        self.inverse[order] = np.arange(len(order), dtype=order.dtype)


class Rows:
    """Rows of equal length that are shuffled: their byte offsets, their buckets, and how they are regrouped.

    If possible, buckets consist of complete chunks of ``unit_rows`` rows.
    """

    _starts: Any  # first element of each row in the old order; here an element is a row
    _new_starts: Any  # first element of each row in the new order

    def __init__(self, source: RawRows, unit_rows: int = 1) -> None:
        self.source, self._unit_rows, self._width = source, unit_rows, source.row_bytes
        self._starts = self._new_starts = range(source.num_rows + 1)

    @property
    def num_bytes(self) -> int:
        """Total size of all rows in bytes."""
        return self.old_offset(len(self._starts) - 1)

    def spans(self, shares: MemoryShares, step_bytes: int) -> Iterator[range]:
        """Divide the old order into spans of rows that are read together, of about ``step_bytes`` each."""
        source, cost = self.source, self._width + ROW_BYTES
        step_bytes = shares.with_whole_band(step_bytes, source.band_rows * cost, source.whole_bands)
        return plan_steps(source.num_rows, row_bytes=cost, band_rows=source.band_rows, step_bytes=step_bytes)

    def borders(self, part_bytes: int) -> np.ndarray:
        """Divide the new order into buckets of at most ``part_bytes``.

        Returns the borders, (num_buckets + 1,) int64.
        """
        return plan_buckets(self.source.num_rows, self._width + ROW_BYTES, part_bytes, self._unit_rows)

    def old_offset(self, row: int) -> int:
        """Return the number of bytes before row ``row`` of the old order."""
        return int(self._starts[row]) * self._width

    def new_offset(self, row: int) -> int:
        """Return the number of bytes before row ``row`` of the new order."""
        return int(self._new_starts[row]) * self._width

    def read(self, rows: range, out: np.ndarray) -> None:
        """Read a range of rows of the old order into ``out``, (n,) uint8, which has the size of the rows."""
        first, last = int(self._starts[rows.start]), int(self._starts[rows.stop])
        if last > first:
            self.source.read(first, last, out.reshape(last - first, self._width))

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of bytes of each of these rows: (n,) int64."""
        return np.full(len(rows), self._width, np.int64)

    def gather(self, data: np.ndarray, held: np.ndarray | None, picks: np.ndarray, out: np.ndarray) -> None:
        """Copy rows from ``data`` to ``out``. Row i of ``out`` becomes row ``picks[i]`` of ``data``.

        ``held`` has the old indices of the rows in ``data``. If it is None, ``data`` has all rows.
        """
        wide = f"V{self._width}" if self._width in (1, 2, 4, 8, 16, 32) else np.uint8
        table, target = (array.reshape(-1, self._width).view(wide) for array in (data, out))
        np.take(table, picks, axis=0, out=target, mode="clip")


class UnevenRows(Rows):
    """Rows of different lengths that are shuffled: rows of a sparse matrix, or concatenated names or images.

    Row i has the elements ``starts[i]`` to ``starts[i + 1]`` (excluded) of ``source``. ``starts``, (num_rows + 1,)
    int64, must ascend. Raises OptionError if a row needs more than ``part_bytes`` of memory.
    """

    def __init__(self, source: RawRows, starts: np.ndarray, order: np.ndarray, part_bytes: int, where: str) -> None:
        super().__init__(source)
        self._starts, self._counts = starts, np.diff(starts)
        self._new_starts = np.concatenate(([0], np.cumsum(self._counts[order])))
        self._are_long = source.num_rows * self._width >= MIN_VECTOR_BYTES * len(self._counts)
        self._cost = self._width + (0 if self._are_long else INDEX_BYTES)
        longest = int(self._counts.max(initial=0)) * self._cost
        if longest > part_bytes:
            row = int(self._counts.argmax())
            raise OptionError(
                f"{where}: row {row} needs {exact_bytes(longest)} of memory, but the memory limit allows "
                f"{exact_bytes(part_bytes)} per row: use more memory (--memory-bytes)"
            )

    def spans(self, shares: MemoryShares, step_bytes: int) -> Iterator[range]:
        borders = plan_uneven(self._starts, step_bytes, self._cost).tolist()
        return (range(first, last) for first, last in pairwise(borders))

    def borders(self, part_bytes: int) -> np.ndarray:
        return plan_uneven(self._new_starts, part_bytes, self._cost)

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        return self._counts[rows] * self._width

    def gather(self, data: np.ndarray, held: np.ndarray | None, picks: np.ndarray, out: np.ndarray) -> None:
        if held is None:
            firsts, counts = self._starts[picks], self._counts[picks]
        else:
            lengths = self._counts[held]
            firsts, counts = (np.cumsum(lengths) - lengths)[picks], lengths[picks]
        before = np.cumsum(counts) - counts
        if self._are_long:
            for first, place, size in zip(*(n * self._width for n in (firsts, before, counts)), strict=True):
                out[place : place + size] = data[first : first + size]
            return
        index = np.repeat(firsts - before, counts)
        index += np.arange(len(index))
        wide = f"V{self._width}"
        np.take(data.view(wide), index, out=out.view(wide), mode="clip")


def copy_rows(source: RawRows, target: Target, shares: MemoryShares, *, unit_rows: int, moved: Moved) -> None:
    """Copy all rows in their old order. ``unit_rows`` is the number of rows that are best written together."""
    width = source.row_bytes
    step_bytes = shares.with_whole_band(shares.step_bytes, source.band_rows * width, source.whole_bands)

    def steps() -> Iterator[range]:
        return plan_steps(
            source.num_rows, row_bytes=width, band_rows=source.band_rows, step_bytes=step_bytes, unit_rows=unit_rows
        )

    def move(step: range, buffer: np.ndarray) -> np.ndarray:
        data = buffer[: len(step) * width]
        source.read(step.start, step.stop, data.reshape(len(step), width))
        if target.any_order:
            target.put(step.start * width, data)
        return data

    size = len(next(steps())) * width
    for step, data in _in_order(steps(), move, size, min(source.num_threads, shares.num_threads)):
        if not target.any_order:
            target.put(step.start * width, data)
        moved(len(data))


def shuffle_rows(
    rows: Rows, new: NewOrder, target: Target, shares: MemoryShares, *, folder: Path, moved: Moved
) -> None:
    """Write all rows in their new order. If a temporary file is needed, it is created in ``folder``."""
    borders = rows.borders(shares.bucket_bytes(rows.num_bytes))
    if len(borders) == 2:  # all rows fit in memory
        whole, data = np.empty((2, rows.num_bytes), np.uint8)
        for span in rows.spans(shares, shares.step_bytes):
            rows.read(span, whole[rows.old_offset(span.start) : rows.old_offset(span.stop)])
        rows.gather(whole, None, new.order, data)
        target.put(0, data)
        moved(rows.num_bytes)
        return
    with ExitStack() as stack:
        waiting = target if isinstance(target, PlainTarget) else stack.enter_context(closing(TemporaryBytes(folder)))
        _scatter(rows, new, waiting, shares, borders, moved)
        _sort_buckets(rows, new, waiting, target, shares, borders, moved)


def _scatter(
    rows: Rows, new: NewOrder, waiting: Waiting, shares: MemoryShares, borders: np.ndarray, moved: Moved
) -> None:
    """Run the first pass, which writes every row to the bucket of its new position, in the old order."""
    local = threading.local()
    ends = [rows.new_offset(int(border)) for border in borders]  # offset for the next row of each bucket

    def plan(span: range) -> tuple[range, np.ndarray, list[tuple[int, int, int]]]:
        """Group the rows of a span by bucket.

        Returns the span, the order of its rows by bucket, and for each bucket the offset in the file, and the start and
        stop of the bucket's bytes among the grouped bytes.
        """
        buckets = np.searchsorted(borders, new.inverse[span.start : span.stop], "right") - 1
        picks = np.argsort(buckets, kind="stable")
        ordered = buckets[picks]
        firsts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        sizes = np.add.reduceat(rows.sizes(picks + span.start), firsts).tolist()
        groups, start = [], 0
        for bucket, size in zip(ordered[firsts].tolist(), sizes, strict=True):
            groups.append((ends[bucket], start, start + size))
            ends[bucket] += size
            start += size
        return span, picks, groups

    def scatter(step: tuple[range, np.ndarray, list[tuple[int, int, int]]], buffer: np.ndarray) -> int:
        span, picks, groups = step
        size = groups[-1][2]
        read, grouped = buffer[:size], scratch(local, "grouped", size)
        rows.read(span, read)
        rows.gather(read, np.arange(span.start, span.stop), picks, grouped)
        for offset, start, stop in groups:
            waiting.write(offset, grouped[start:stop])
        return size

    step_bytes = shares.scatter_bytes(len(borders) - 1)
    size = max(rows.old_offset(span.stop) - rows.old_offset(span.start) for span in rows.spans(shares, step_bytes))
    steps = (plan(span) for span in rows.spans(shares, step_bytes))
    for _, done in _in_order(steps, scatter, size, min(rows.source.num_threads, shares.num_threads)):
        moved(done // 2)


def _sort_buckets(
    rows: Rows, new: NewOrder, waiting: Waiting, target: Target, shares: MemoryShares, borders: np.ndarray, moved: Moved
) -> None:
    """Run the second pass, which puts the rows of every bucket in their new order."""
    local = threading.local()

    def sort_bucket(bucket: int, buffer: np.ndarray) -> np.ndarray:
        first, last = int(borders[bucket]), int(borders[bucket + 1])
        start, stop = rows.new_offset(first), rows.new_offset(last)
        data, old_rows = buffer[: stop - start], new.order[first:last]
        by_row = np.argsort(old_rows, kind="stable")  # the first pass kept the old order
        width = rows.source.row_bytes
        if not isinstance(rows, UnevenRows) and width >= MIN_VECTOR_BYTES:
            offsets = waiting.offset + (first + np.arange(len(old_rows))) * width
            where = "the file being written"
            for part in vector_tasks(offsets, rows.sizes(old_rows), by_row * width, data, lambda _: where):
                part(OneFile(waiting.descriptor))
        else:
            bucketed = scratch(local, "bucketed", stop - start)
            waiting.read(start, bucketed)
            picks = np.empty_like(by_row)
            picks[by_row] = np.arange(len(by_row))
            rows.gather(bucketed, old_rows[by_row], picks, data)
        if target.any_order:
            target.put(start, data)
        return data

    offsets = [rows.new_offset(int(border)) for border in borders]
    size = max(stop - start for start, stop in pairwise(offsets))
    for bucket, data in _in_order(range(len(borders) - 1), sort_bucket, size, shares.num_threads):
        if not target.any_order:
            target.put(offsets[bucket], data)
        moved(len(data) - len(data) // 2)


def _in_order(
    tasks: Iterable[T], work: Callable[[T, np.ndarray], R], buffer_bytes: int, num_threads: int
) -> Iterator[tuple[T, R]]:
    """Run ``work(task, buffer)`` in threads, with reused buffers. Yields the tasks with their results, in order."""
    buffers = [np.empty(buffer_bytes, np.uint8) for _ in range(num_threads + 1)]

    def run(task: T, buffer: np.ndarray) -> tuple[T, R]:
        return task, work(task, buffer)

    runs = (partial(run, task, buffer) for task, buffer in zip(tasks, cycle(buffers), strict=False))
    yield from in_order(runs, num_threads, len(buffers))
