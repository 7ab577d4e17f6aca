"""Number the ids of rows and columns as they appear, and rank them in ascending order at the end."""

from __future__ import annotations

import numpy as np

TABLE_START = 1 << 16
NUMBERS_BYTES, ID_COPIES = 24, 4  # of memory for an id: its number, in several orders, and copies of itself


class Ids:
    """Ids that are numbered as they appear.

    Integers below ``table_ids`` are looked up in a table, which is many times faster than a search.
    """

    def __init__(self, table_ids: int) -> None:
        self._table_ids = table_ids
        self._table: np.ndarray | None = np.full(min(TABLE_START, table_ids), -1, np.int32)
        self._parts: list[np.ndarray] = []  # ids in the order of their numbers
        self._sorted = np.empty(0, np.int64)
        self._numbers = np.empty(0, np.int64)
        self._width = 8
        self.size = 0

    @property
    def num_bytes(self) -> int:
        """Upper limit on the memory that the ids take until they are in the file."""
        return self.size * (NUMBERS_BYTES + ID_COPIES * self._width)

    def number(self, ids: np.ndarray) -> np.ndarray:
        """Return the numbers of (n,) ids, int64 or fixed-length bytes; new ids get the next numbers."""
        if not len(ids):
            return np.empty(0, np.int64)
        if self._table is not None:
            if ids.dtype.kind == "i" and ids.min() >= 0 and (largest := int(ids.max())) < self._table_ids:
                return self._look_up(self._table, ids, largest)
            self._table = None
            known = self._in_order_of_numbers()
            order = np.argsort(known, kind="stable")
            self._sorted, self._numbers = known[order], order.astype(np.int64)
        return self._search(ids)

    def _look_up(self, table: np.ndarray, ids: np.ndarray, largest: int) -> np.ndarray:
        if largest >= len(table):
            size = min(max(largest + 1, 2 * len(table)), self._table_ids)
            self._table = table = np.concatenate([table, np.full(size - len(table), -1, np.int32)])
        numbers = table[ids]
        unknown = numbers < 0
        if unknown.any():
            new = np.unique(ids[unknown])
            table[new] = self._add(new)
            numbers = table[ids]
        return numbers

    def _search(self, ids: np.ndarray) -> np.ndarray:
        distinct, inverse = (_unique_bytes if ids.dtype.kind == "S" else _unique)(ids)
        if not len(self._sorted):
            self._sorted = self._sorted.astype(distinct.dtype)
        places = np.searchsorted(self._sorted, distinct)
        known = np.zeros(len(distinct), bool)
        inside = places < len(self._sorted)
        known[inside] = self._sorted[places[inside]] == distinct[inside]
        numbers = np.empty(len(distinct), np.int64)
        numbers[known] = self._numbers[places[known]]
        new = distinct[~known]
        if len(new):
            numbers[~known] = self._add(new)
            width = max(self._sorted.dtype, new.dtype, key=lambda dtype: dtype.itemsize)
            self._sorted = np.insert(self._sorted.astype(width, copy=False), places[~known], new)
            self._numbers = np.insert(self._numbers, places[~known], numbers[~known])
        return numbers[inverse]

    def _add(self, new: np.ndarray) -> np.ndarray:
        self._parts.append(new)
        self._width = max(self._width, new.dtype.itemsize)
        self.size += len(new)
        return np.arange(self.size - len(new), self.size, dtype=np.int64)

    def _in_order_of_numbers(self) -> np.ndarray:
        return np.concatenate(self._parts) if self._parts else np.empty(0, np.int64)

    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids in ascending order, and the place there of each number."""
        ids = self._in_order_of_numbers()
        order = np.argsort(ids, kind="stable")
        return ids[order], inverse_of(order)


def inverse_of(order: np.ndarray) -> np.ndarray:
    """The place of each number in a permutation."""
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order), dtype=np.int64)
    return places


def _unique(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids in ascending order, and where each one is among them."""
    return np.unique(ids, return_inverse=True)


def _unique_bytes(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for bytes: sorting a hash of each first is ten times as fast as comparing them."""
    width = -(-ids.dtype.itemsize // 8) * 8
    words = ids.astype(f"S{width}").view(np.uint64).reshape(len(ids), -1)
    mixed = np.zeros(len(ids), np.uint64)
    for column in words.T:
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    _, first, inverse = np.unique(mixed, return_index=True, return_inverse=True)
    distinct = ids[first]
    if not np.array_equal(distinct[inverse], ids):  # two ids with one hash: somebody chose them so
        return _unique(ids)
    order = np.argsort(distinct, kind="stable")
    return distinct[order], inverse_of(order)[inverse]
