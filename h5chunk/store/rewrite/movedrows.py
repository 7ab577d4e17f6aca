"""Rows that are moved into another order: all of one length, or each of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.plan.layout import human_bytes
from h5chunk.plan.repack import Shares, plan_buckets, plan_steps, plan_uneven
from h5chunk.store.read.ranges import MAX_VECTORS, RUN_BYTES, vector_parts
from h5chunk.store.rewrite.rawrows import RawRows
from h5chunk.store.rewrite.targets import Waiting

ROW_BYTES = 48  # of memory for the numbers of a row, while rows are regrouped
LEAST_VECTOR_BYTES = 512  # rows from here on are read to their places one by one, shorter ones sorted in memory
INDEX_BYTES = 24  # of memory for those of an element of rows of different lengths


class EvenRows:
    """Rows of one length: samples.

    Parameters
    ----------
    source : RawRows
    unit_rows : int
        Rows of a chunk in the new file: buckets are whole chunks where they can.
    """

    def __init__(self, source: RawRows, unit_rows: int = 1) -> None:
        self.source, self._unit_rows = source, unit_rows
        self._width = source.row_bytes
        self.num_bytes = source.num_rows * self._width

    def spans(self, shares: Shares, step_bytes: int) -> Iterator[range]:
        source, cost = self.source, self._width + ROW_BYTES
        step_bytes = shares.banded(step_bytes, source.band_rows * cost, source.whole_bands)
        return plan_steps(source.num_rows, row_bytes=cost, band_rows=source.band_rows, step_bytes=step_bytes)

    def borders(self, part_bytes: int) -> np.ndarray:
        return plan_buckets(self.source.num_rows, self._width + ROW_BYTES, part_bytes, self._unit_rows)

    def old_offset(self, row: int) -> int:
        return row * self._width

    def new_offset(self, place: int) -> int:
        return place * self._width

    def read(self, rows: range, out: np.ndarray) -> None:
        self.source.read(rows.start, rows.stop, out.reshape(len(rows), self._width))

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        return np.full(len(rows), self._width, np.int64)

    def gather(self, data: np.ndarray, lying: np.ndarray | None, picks: np.ndarray, out: np.ndarray) -> None:
        wide = f"V{self._width}" if self._width in (1, 2, 4, 8, 16, 32) else np.uint8
        table, target = (each.reshape(-1, self._width).view(wide) for each in (data, out))
        np.take(table, picks, axis=0, out=target, mode="clip")

    def arrange(self, waiting: Waiting, place: int, wanted: np.ndarray, lies: np.ndarray, out: np.ndarray) -> None:
        if self._width < LEAST_VECTOR_BYTES:
            _arrange(self, waiting, place, wanted, lies, out)
            return
        vectors = np.empty((len(wanted), 2), np.uintp)
        vectors[:, 0] = out.ctypes.data + np.argsort(wanted, kind="stable") * self._width
        vectors[:, 1] = self._width
        step = max(1, min(MAX_VECTORS, RUN_BYTES // self._width))
        borders = np.append(np.arange(0, len(wanted), step), len(wanted))
        offsets = waiting.offset + (place + borders[:-1]) * self._width
        for part in vector_parts(borders, vectors, offsets, out, lambda _: "a file that is being written"):
            part(waiting.descriptor)


def _arrange(
    rows: EvenRows | UnevenRows, waiting: Waiting, place: int, wanted: np.ndarray, lies: np.ndarray, out: np.ndarray
) -> None:
    waiting.read(rows.new_offset(place), lies)
    by_row = np.argsort(wanted, kind="stable")
    picks = np.empty_like(by_row)
    picks[by_row] = np.arange(len(by_row))
    rows.gather(lies, wanted[by_row], picks, out)


class UnevenRows:
    """Rows of different lengths: of a sparse matrix, or names that lie end to end.

    Parameters
    ----------
    source : RawRows
        Of the elements.
    starts : (num_rows + 1,) int64
        Row i has the elements from ``starts[i]`` to ``starts[i + 1]``, excluded; checked by the caller.
    order : (num_rows,) int64
        Of the rows in the new file.
    part_bytes : int
        The most that a row may take in memory.
    where : str
        Names the dataset in messages.

    Raises
    ------
    OptionError
        A row does not fit in memory.
    """

    def __init__(self, source: RawRows, starts: np.ndarray, order: np.ndarray, part_bytes: int, where: str) -> None:
        self.source, self._starts = source, starts
        self._item = source.row_bytes
        self._counts = np.diff(starts)
        self._new_starts = np.concatenate(([0], np.cumsum(self._counts[order])))
        self.num_bytes = int(starts[-1]) * self._item
        longest = int(self._counts.max(initial=0)) * (self._item + INDEX_BYTES)
        if longest > part_bytes:
            row = int(self._counts.argmax())
            raise OptionError(f"{where}: row {row} takes {human_bytes(longest)}, too much for the memory: allow more")

    def spans(self, shares: Shares, step_bytes: int) -> Iterator[range]:
        borders = plan_uneven(self._starts, step_bytes, self._item + INDEX_BYTES).tolist()
        return (range(first, last) for first, last in pairwise(borders))

    def borders(self, part_bytes: int) -> np.ndarray:
        return plan_uneven(self._new_starts, part_bytes, self._item + INDEX_BYTES)

    def old_offset(self, row: int) -> int:
        return int(self._starts[row]) * self._item

    def new_offset(self, place: int) -> int:
        return int(self._new_starts[place]) * self._item

    def read(self, rows: range, out: np.ndarray) -> None:
        first, last = int(self._starts[rows.start]), int(self._starts[rows.stop])
        if last > first:
            self.source.read(first, last, out.reshape(last - first, self._item))

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        return self._counts[rows] * self._item

    def gather(self, data: np.ndarray, lying: np.ndarray | None, picks: np.ndarray, out: np.ndarray) -> None:
        if lying is None:
            firsts, counts = self._starts[picks], self._counts[picks]
        else:
            lengths = self._counts[lying]
            firsts, counts = (np.cumsum(lengths) - lengths)[picks], lengths[picks]
        before = np.cumsum(counts) - counts
        index = np.repeat(firsts - before, counts)
        index += np.arange(len(index))
        wide = f"V{self._item}"
        np.take(data.view(wide), index, out=out.view(wide), mode="clip")

    def arrange(self, waiting: Waiting, place: int, wanted: np.ndarray, lies: np.ndarray, out: np.ndarray) -> None:
        _arrange(self, waiting, place, wanted, lies, out)
