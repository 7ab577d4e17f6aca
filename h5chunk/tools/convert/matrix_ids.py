"""Number the ids of rows and columns as they appear, and rank them in ascending order at the end."""

from __future__ import annotations

import numpy as np

TABLE_START = 1 << 16
NUMBERS_BYTES, ID_COPIES = 24, 4  # of memory for an id: its number, in several orders, and copies of itself


class Numbers:
    """Rows, or columns, that the source numbers itself, so that nothing is renumbered.

    Attributes
    ----------
    size : int
        One more than the largest number seen.
    """

    num_bytes = 0  # of memory

    def __init__(self) -> None:
        self.size = 0

    def number(self, ids: np.ndarray) -> np.ndarray:
        """(n,) int64 of numbers, as they are."""
        if len(ids):
            self.size = max(self.size, int(ids.max()) + 1)
        return ids


class Ids:
    """Ids that are numbered as they appear.

    Parameters
    ----------
    table_ids : int
        Integers from 0 to this, excluded, are looked up in a table, which is many times faster than a search.
    """

    def __init__(self, table_ids: int) -> None:
        self._table_ids = table_ids
        self._table: np.ndarray | None = np.full(min(TABLE_START, table_ids), -1, np.int32)
        self._fresh: list[np.ndarray] = []  # ids in the order of their numbers
        self._sorted = np.empty(0, np.int64)
        self._numbers = np.empty(0, np.int64)
        self._width = 8
        self.size = 0

    @property
    def num_bytes(self) -> int:
        """Upper limit on the memory that the ids take until they are in the file."""
        return self.size * (NUMBERS_BYTES + ID_COPIES * self._width)

    def number(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of ids; new ids get the next numbers.

        Parameters
        ----------
        ids : (n,) int64 or fixed-length bytes

        Returns
        -------
        (n,) integers
        """
        if not len(ids):
            return np.empty(0, np.int64)
        if self._table is not None:
            if ids.dtype.kind == "i" and ids.min() >= 0 and (largest := int(ids.max())) < self._table_ids:
                return self._look_up(ids, largest)
            self._table = None
            known = self.in_order_of_numbers()
            order = np.argsort(known, kind="stable")
            self._sorted, self._numbers = known[order], order.astype(np.int64)
        return self._search(ids)

    def _look_up(self, ids: np.ndarray, largest: int) -> np.ndarray:
        table = self._table
        assert table is not None
        if largest >= len(table):
            size = min(max(largest + 1, 2 * len(table)), self._table_ids)
            table = np.concatenate([table, np.full(size - len(table), -1, np.int32)])
            self._table = table
        numbers = table[ids]
        unknown = numbers < 0
        if unknown.any():
            fresh = np.unique(ids[unknown])
            table[fresh] = self._add(fresh)
            numbers = table[ids]
        return numbers

    def _add(self, fresh: np.ndarray) -> np.ndarray:
        self._fresh.append(fresh)
        self._width = max(self._width, fresh.dtype.itemsize)
        self.size += len(fresh)
        return np.arange(self.size - len(fresh), self.size, dtype=np.int64)

    def _search(self, ids: np.ndarray) -> np.ndarray:
        found, inverse = _unique(ids)
        if not len(self._sorted):
            self._sorted = self._sorted.astype(found.dtype)
        places = np.searchsorted(self._sorted, found)
        known = np.zeros(len(found), bool)
        inside = places < len(self._sorted)
        known[inside] = self._sorted[places[inside]] == found[inside]
        numbers = np.empty(len(found), np.int64)
        numbers[known] = self._numbers[places[known]]
        fresh = found[~known]
        if len(fresh):
            numbers[~known] = self._add(fresh)
            width = max(self._sorted.dtype, fresh.dtype, key=lambda dtype: dtype.itemsize)
            self._sorted = np.insert(self._sorted.astype(width, copy=False), places[~known], fresh)
            self._numbers = np.insert(self._numbers, places[~known], numbers[~known])
        return numbers[inverse]

    def in_order_of_numbers(self) -> np.ndarray:
        """The id of each number."""
        return np.concatenate(self._fresh) if self._fresh else np.empty(0, np.int64)

    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids in ascending order, and the place there of each number."""
        ids = self.in_order_of_numbers()
        order = np.argsort(ids, kind="stable")
        ranks = np.empty(len(ids), np.int64)
        ranks[order] = np.arange(len(ids))
        return ids[order], ranks


def _unique(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids in ascending order, and where each one is among them."""
    if ids.dtype.kind == "S":
        return _unique_bytes(ids)
    found, inverse = np.unique(ids, return_inverse=True)
    return found, inverse


def _unique_bytes(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for bytes: sorting a hash of each first is ten times as fast as comparing them."""
    width = -(-ids.dtype.itemsize // 8) * 8
    words = ids.astype(f"S{width}").view(np.uint64).reshape(len(ids), -1)
    mixed = np.zeros(len(ids), np.uint64)
    for column in words.T:
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
    some = ids[first]
    if not np.array_equal(some[inverse], ids):  # two ids with one hash: somebody chose them so
        return np.unique(ids, return_inverse=True)
    order = np.argsort(some, kind="stable")
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return some[order], ranks[inverse]
