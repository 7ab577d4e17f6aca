"""The entries of a matrix, sorted by row and column, within a bound of memory.

They come in any order. What fits in memory is sorted there, at once. Else each part that fits is sorted and put on
disk, with every so many-th of its keys kept in memory; those tell where to cut the range of keys so that what lies
between two cuts fits in memory, and where it lies in each part. So rows of any length are cut evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.store.write.spool import Spool

MAX_KEY_STEP = 1024  # of the keys in order, one of so many is kept in memory
PART_ENTRIES = 1 << 19  # entries handed on at a time: a few MB


class Run(NamedTuple):
    """Sorted records on disk: the number of the first, and how many."""

    first: int
    size: int


class Entries:
    """Context manager around (row, column, number) records.

    Parameters
    ----------
    folder : Path
        Where temporary data go.
    num_rows, num_columns : int
    dtype : np.dtype
        Of the numbers; those of one place are summed.
    num_bits : int, optional
        Of each number, where there is a bound: small ones are sorted together with their place.
    memory_bytes : int
        For the records in memory.

    Raises
    ------
    OptionError
        The matrix has more than 2**64 places.
    """

    def __init__(
        self,
        folder: Path,
        num_rows: int,
        num_columns: int,
        dtype: np.dtype,
        num_bits: int | None,
        memory_bytes: int,
    ) -> None:
        column_bits = max(1, (num_columns - 1).bit_length())
        row_bits = max(1, (num_rows - 1).bit_length())
        if row_bits + column_bits > 64:
            raise OptionError(f"{num_rows} x {num_columns}: rows and columns together take more than 64 bits")
        self._bits = num_bits if num_bits is not None and row_bits + column_bits + num_bits <= 64 else 0
        self._column_bits = column_bits
        self._value_dtype = dtype
        packed = np.dtype(np.uint64)
        self.record = packed if self._bits else np.dtype([("key", packed), ("value", dtype)])
        self._spool = Spool(folder, self.record, 0)
        copies = 2 if self._bits else 4  # packed records are sorted in place, others through an index
        self._limit = max(64, memory_bytes // copies // self.record.itemsize)
        self._step = min(MAX_KEY_STEP, self._limit // 64)
        self._parts: list[np.ndarray] = []
        self._num_waiting = 0
        self._sorted: np.ndarray | None = None
        self._runs: list[Run] = []
        self._keys_of_runs: list[np.ndarray] = []
        self._cuts: list[int] = []

    def __enter__(self) -> Entries:
        self._spool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._parts, self._sorted = [], None
        self._spool.__exit__(None, None, None)

    @property
    def num_ranges(self) -> int:
        """In how many ranges of keys they are sorted."""
        return len(self._cuts) + 1

    def append(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        """Add records: (n,) int64, (n,) int64 and (n,) of the numbers' dtype."""
        keys = rows.astype(np.uint64)
        keys <<= np.uint64(self._column_bits)
        keys |= columns.astype(np.uint64)
        records = self._records(keys, values)
        for start in range(0, len(records), self._limit):
            part = records[start : start + self._limit]
            if self._num_waiting + len(part) > self._limit:
                self._spill()
            self._parts.append(part)
            self._num_waiting += len(part)

    def _records(self, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        if self._bits:
            keys <<= np.uint64(self._bits)
            keys |= values.astype(np.uint64)
            return keys
        records: np.ndarray = np.empty(len(keys), self.record)
        records["key"], records["value"] = keys, values
        return records

    def finish(self) -> None:
        """Nothing more will come."""
        if self._runs:
            self._spill()
            self._cuts = self._choose_cuts()
        else:
            self._sorted = self._sort_waiting()

    def _sort_waiting(self) -> np.ndarray:
        records = np.empty(self._num_waiting, self.record)
        start = 0
        self._parts.reverse()
        while self._parts:  # each part goes as soon as it is copied
            part = self._parts.pop()
            records[start : start + len(part)] = part
            start += len(part)
        self._num_waiting = 0
        return self._sort(records)

    def _sort(self, records: np.ndarray) -> np.ndarray:
        """In the order of keys; those of one key stay as they came, so that floats are summed in one order."""
        if self._bits:
            records.sort()
            return records
        return records[np.argsort(records["key"], kind="stable")]

    def _keys(self, records: np.ndarray) -> np.ndarray:
        return records >> np.uint64(self._bits) if self._bits else records["key"]

    def _spill(self) -> None:
        if not self._num_waiting:
            return
        records = self._sort_waiting()
        self._runs.append(Run(len(self._spool), len(records)))
        self._spool.append(records)
        self._keys_of_runs.append(self._keys(records[:: self._step]).copy())

    def _choose_cuts(self) -> list[int]:
        """Keys where ranges begin, but for the first."""
        every = np.sort(np.concatenate(self._keys_of_runs))
        # Of a range that holds n of the kept keys, each run may hold up to that step of records more.
        step = max(1, self._limit // self._step - len(self._runs))
        return np.unique(every[step::step]).tolist()

    def sorted(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """All entries in the order of rows, then columns, each place once.

        May be called again. Yields parts: rows (n,) int64, columns (n,) int64, sums (n,) of uint64, int64 or float64.
        """
        if self._sorted is not None:
            yield from self._sums(self._sorted)
            return
        for low, high in zip([0, *self._cuts], [*self._cuts, None], strict=True):
            yield from self._sums(self._sort(self._range(low, high)))

    def _range(self, low: int, high: int | None) -> np.ndarray:
        """The records of keys from ``low`` to ``high`` (excluded), of all runs in turn."""
        found = []
        for (first, size), keys in zip(self._runs, self._keys_of_runs, strict=True):
            start = max(0, int(np.searchsorted(keys, np.uint64(low), "left")) - 1) * self._step
            stop = size
            if high is not None:
                stop = min(size, int(np.searchsorted(keys, np.uint64(high), "left")) * self._step)
            if start >= stop:
                continue
            records = self._spool.read(first + start, first + stop)
            there = self._keys(records)
            a = int(np.searchsorted(there, np.uint64(low), "left"))
            b = len(there) if high is None else int(np.searchsorted(there, np.uint64(high), "left"))
            found.append(records[a:b].copy())
        return np.concatenate(found) if found else np.empty(0, self.record)

    def _sums(self, records: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        start = 0
        while start < len(records):
            stop = self._cut(records, start + PART_ENTRIES)
            part = records[start:stop]
            keys = self._keys(part)
            values = part & np.uint64((1 << self._bits) - 1) if self._bits else part["value"]
            if values.dtype.kind == "u":
                values = values.astype(np.uint64, copy=False)
            first = np.empty(len(keys), bool)
            first[0] = True
            np.not_equal(keys[1:], keys[:-1], out=first[1:])
            if not first.all():
                starts = np.flatnonzero(first)
                values, keys = np.add.reduceat(values, starts), keys[starts]
            rows = (keys >> np.uint64(self._column_bits)).astype(np.int64)
            columns = (keys & np.uint64((1 << self._column_bits) - 1)).astype(np.int64)
            yield rows, columns, values
            start = stop

    def _cut(self, records: np.ndarray, place: int) -> int:
        """The end of the entry that is at ``place``."""
        if place >= len(records):
            return len(records)
        key = self._keys(records[place - 1 : place])[0]
        size = 64
        while True:
            after = self._keys(records[place : place + size]) != key
            if after.any():
                return place + int(after.argmax())
            if place + size >= len(records):
                return len(records)
            place, size = place + size, size * 2
