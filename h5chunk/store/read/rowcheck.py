"""Looks at the columns of a CSR matrix as their chunks are read: within the matrix, ascending in a row, none twice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import h5py
import numpy as np

PART_ENTRIES = 4 << 20  # of rows that are sorted to find columns that are there twice


class ColumnLook:
    """Takes the columns of entries, part by part, from any thread.

    Parameters
    ----------
    indptr : (num_rows + 1,) int64
    num_columns : int
    dtype : np.dtype
        Of the columns, as stored.

    Attributes
    ----------
    outside, twice, falls : int or None
        An entry whose column is not in the matrix, is the one before it again, or is smaller than that; the first of
        those that were seen.
    """

    def __init__(self, indptr: np.ndarray, num_columns: int, dtype: np.dtype) -> None:
        self._indptr, self._num_columns, self._dtype = indptr, num_columns, dtype
        self._ends: list[tuple[int, int, int, int]] = []  # first entry, the one behind the last, and their columns
        self._outside: list[int] = []
        self._twice: list[int] = []
        self._falls: list[int] = []

    def __call__(self, first: int, data: np.ndarray) -> None:
        columns = data.view(self._dtype)[: max(0, int(self._indptr[-1]) - first)]
        if not len(columns):
            return
        outside = columns >= self._num_columns
        if self._dtype.kind == "i":
            outside |= columns < 0
        _note(self._outside, outside, first)
        starts = np.zeros(len(columns) + 1, bool)
        low, high = np.searchsorted(self._indptr, (first, first + len(columns)))
        starts[self._indptr[low:high] - first] = True
        inside = ~starts[1:-1]
        _note(self._twice, (columns[1:] == columns[:-1]) & inside, first + 1)
        _note(self._falls, (columns[1:] < columns[:-1]) & inside, first + 1)
        self._ends.append((first, first + len(columns), int(columns[0]), int(columns[-1])))

    def finish(self) -> None:
        """Compare the borders of parts; after the last one."""
        ends = sorted(self._ends)
        for (_, stop, _, last), (start, _, first, _) in pairwise(ends):
            place = int(np.searchsorted(self._indptr, start))
            if start != stop or self._indptr[place] == start or first > last:
                continue
            (self._twice if first == last else self._falls).append(start)

    @property
    def outside(self) -> int | None:
        return min(self._outside, default=None)

    @property
    def twice(self) -> int | None:
        return min(self._twice, default=None)

    @property
    def falls(self) -> int | None:
        return min(self._falls, default=None)


def _note(found: list[int], wrong: np.ndarray, first: int) -> None:
    if wrong.any():
        found.append(first + int(wrong.argmax()))


def row_of(indptr: np.ndarray, entry: int) -> int:
    """The row that an entry lies in.

    >>> row_of(np.array([0, 2, 2, 5]), 2)
    2
    """
    return int(np.searchsorted(indptr, entry, "right")) - 1


def rows_of(indptr: np.ndarray, first: int, stop: int) -> tuple[int, int]:
    """First and last row that entries ``first`` to ``stop`` (excluded) lie in."""
    return row_of(indptr, first), row_of(indptr, stop - 1)


def find_twice(indices: h5py.Dataset, indptr: np.ndarray) -> int | None:
    """The first row that names a column twice, of rows in which columns come in any order; read through HDF5."""
    for first, last in _row_parts(indptr):
        start, stop = int(indptr[first]), int(indptr[last])
        columns = indices[start:stop].astype(np.int64)
        rows = np.repeat(np.arange(first, last), np.diff(indptr[first : last + 1]))
        order = np.lexsort((columns, rows))
        columns, rows = columns[order], rows[order]
        again = (columns[1:] == columns[:-1]) & (rows[1:] == rows[:-1])
        if again.any():
            return int(rows[1:][again.argmax()])
    return None


def _row_parts(indptr: np.ndarray) -> Iterator[tuple[int, int]]:
    first, num_rows = 0, len(indptr) - 1
    while first < num_rows:
        last = int(np.searchsorted(indptr, indptr[first] + PART_ENTRIES, "right")) - 1
        last = min(max(last, first + 1), num_rows)
        yield first, last
        first = last
