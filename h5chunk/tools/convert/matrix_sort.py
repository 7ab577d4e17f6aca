"""Sort the entries of a matrix by row and column in bounded memory.

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
from h5chunk.plan.duplicates import IN_ORDER, combine
from h5chunk.store.write.spool import Spool

MAX_KEY_STEP = 1024  # of the keys in order, one of so many is kept in memory
MIN_ALIKE = 1 << 16  # entries of one place that are sorted at once in any memory
PART_ENTRIES = 1 << 19  # entries handed on at a time: a few MB


class Run(NamedTuple):
    """Sorted records on disk: the number of the first, and how many."""

    first: int
    size: int


class Places(NamedTuple):
    """Sorted places of a matrix.

    Attributes
    ----------
    rows, columns : (n,) int64
    values : (n,) uint64, int64 or float64
        The entries of each place, combined.
    counts : (n,) int64, or None
        Entries of each place; None if there is one in each.
    """

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    counts: np.ndarray | None


class Entries:
    """Context manager around (row, column, number) records.

    Parameters
    ----------
    folder : Path
        Where temporary data go.
    num_rows, num_columns : int
    dtype : np.dtype
        Of the numbers.
    num_bits : int, optional
        Of each number, where there is a bound: small ones are sorted together with their place.
    memory_bytes : int
        For the records in memory.
    duplicates : str
        How the numbers of one place are combined: see `h5chunk.plan.duplicates.combine`.
    has_times : bool
        Whether the entries of one place are ordered by their times; else they are in the order in which they come.

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
        duplicates: str = "sum",
        has_times: bool = False,
    ) -> None:
        column_bits = max(1, (num_columns - 1).bit_length())
        row_bits = max(1, (num_rows - 1).bit_length())
        if row_bits + column_bits > 64:
            raise OptionError(f"{num_rows} x {num_columns}: rows and columns together take more than 64 bits")
        fits = num_bits is not None and row_bits + column_bits + num_bits <= 64 and duplicates not in IN_ORDER
        self._bits = num_bits if fits and num_bits else 0
        self._duplicates, self._has_times = duplicates, has_times
        self._column_bits = column_bits
        self._value_dtype = dtype
        packed = np.dtype(np.uint64)
        times = [("time", np.int64)] if has_times else []
        self.record = packed if self._bits else np.dtype([("key", packed), *times, ("value", dtype)])
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

    def append(
        self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, times: np.ndarray | None = None
    ) -> None:
        """Add records: (n,) int64, (n,) int64, (n,) of the numbers' dtype, and (n,) int64 if they have times."""
        keys = rows.astype(np.uint64)
        keys <<= np.uint64(self._column_bits)
        keys |= columns.astype(np.uint64)
        records = self._records(keys, values, times)
        for start in range(0, len(records), self._limit):
            part = records[start : start + self._limit]
            if self._num_waiting + len(part) > self._limit:
                self._spill()
            self._parts.append(part)
            self._num_waiting += len(part)

    def _records(self, keys: np.ndarray, values: np.ndarray, times: np.ndarray | None) -> np.ndarray:
        if self._bits:
            keys <<= np.uint64(self._bits)
            keys |= values.astype(np.uint64)
            return keys
        records: np.ndarray = np.empty(len(keys), self.record)
        records["key"], records["value"] = keys, values
        if self._has_times:
            records["time"] = times
        return records

    def finish(self) -> None:
        """Sort what was appended; nothing is appended afterwards."""
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
        """Sort by key, then by time; records alike in both stay as they came, so that floats have one sum."""
        if self._bits:
            records.sort()
            return records
        if self._has_times:
            return records[np.lexsort((records["time"], records["key"]))]
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

    def sorted(self) -> Iterator[Places]:
        """All places in the order of rows, then columns. May be called again."""
        if self._sorted is not None:
            yield from self._combined(self._sorted)
            return
        for low, high in zip([0, *self._cuts], [*self._cuts, None], strict=True):
            yield from self._combined(self._sort(self._range(low, high)))

    def _range(self, low: int, high: int | None) -> np.ndarray:
        """The records of keys from ``low`` to ``high`` (excluded), of all runs in turn.

        Raises
        ------
        OptionError
            One place has more entries than fit in memory: no cut can part them, and ``low`` is its key.
        """
        found, num_alike = [], 0
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
            num_alike += int(np.searchsorted(there, np.uint64(low), "right")) - a
            if num_alike > max(MIN_ALIKE, self._limit):
                raise OptionError(
                    f"{num_alike:,} entries or more share one row and column, which do not fit in memory together: "
                    "allow more (--memory-bytes), or remove them from the source"
                )
        return np.concatenate(found) if found else np.empty(0, self.record)

    def _combined(self, records: np.ndarray) -> Iterator[Places]:
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
            counts = None
            if not first.all():
                starts = np.flatnonzero(first)
                counts = np.diff(starts, append=len(keys))
                values, keys = combine(self._duplicates, values, starts), keys[starts]
            rows = (keys >> np.uint64(self._column_bits)).astype(np.int64)
            columns = (keys & np.uint64((1 << self._column_bits) - 1)).astype(np.int64)
            yield Places(rows, columns, values, counts)
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
