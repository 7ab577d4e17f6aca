"""Sort the entries of a matrix by row and column in bounded memory, and combine duplicates.

Entries may be appended in any order. If they fit in memory, they are sorted there. Otherwise, runs of entries that fit
in memory are sorted and written to disk, and every n-th key of each run stays in memory. These keys show where to cut
the range of all keys so that the entries between two cuts fit in memory, and roughly where each cut is in each run.
If there are so many runs that this takes too much memory, groups of runs are first merged into longer ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.store.write.spool import Spool
from h5chunk.tools.convert.options import IN_ORDER

MAX_KEY_STEP = 1024  # largest distance between two keys of a run that are kept in memory
MIN_ALIKE = 1 << 16  # duplicates of one position that are sorted together even if they exceed the memory limit
RUN_SHARE = 4  # a range may contain up to a step of each run beyond its cuts: at most 1/4 of the memory limit
PART_ENTRIES = 1 << 19  # entries yielded at a time: a few MB


class _Run(NamedTuple):
    """A sorted run of records on disk."""

    first: int  # index of its first record in the spool
    size: int  # number of records
    keys: np.ndarray  # the key of every n-th record


class Positions(NamedTuple):
    """Distinct (row, column) positions, sorted: int64 rows, int64 columns, and the combined value at each, (n,) arrays.

    ``counts`` has the number of entries at each position; it is None if every position has one entry.
    """

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    counts: np.ndarray | None

    def take(self, order: np.ndarray) -> Positions:
        """Return the positions in another order."""
        counts = None if self.counts is None else self.counts[order]
        return Positions(self.rows[order], self.columns[order], self.values[order], counts)


class Entries:
    """Sort (row, column, value) entries within ``memory_bytes``, and combine duplicates.

    Values of at most ``num_bits`` bits are packed into the sort key if row, column and value fit in 64 bits, unless
    ``time_order`` is set or ``duplicates`` is "first" or "last". Duplicates are combined in the order of their times,
    or without times in the order in which they were appended. With ``time_order``, the positions of a row are sorted by
    the time of their last entry, then by column. Raises OptionError if a row index and a column index together need
    more than 64 bits. Use it as a context manager.
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
        time_order: bool = False,
    ) -> None:
        self._column_bits = max(1, (num_columns - 1).bit_length())
        row_bits = max(1, (num_rows - 1).bit_length())
        if row_bits + self._column_bits > 64:
            raise OptionError(
                f"the matrix has {num_rows} x {num_columns} positions, but indices of rows and columns must fit in 64 "
                "bits together: convert fewer rows at a time"
            )
        fits = num_bits is not None and row_bits + self._column_bits + num_bits <= 64
        fits = fits and not time_order and duplicates not in IN_ORDER
        self._bits = num_bits if fits and num_bits else 0
        self._duplicates, self._has_times = duplicates, has_times
        # Entries whose keys are equal without these lowest bits form a group: a position, or with time_order a row.
        self._group_bits = self._column_bits if time_order else 0
        packed = np.dtype(np.uint64)
        times = [("time", np.int64)] if has_times else []
        self._record = packed if self._bits else np.dtype([("key", packed), *times, ("value", dtype)])
        self._folder = folder
        self._spool = Spool(folder, self._record, 0)
        copies = 2 if self._bits else 4  # packed records are sorted in place, other records by index
        self._limit = max(64, memory_bytes // copies // self._record.itemsize)
        self._step = min(MAX_KEY_STEP, self._limit // 64)
        self._parts: list[np.ndarray] = []
        self._num_waiting = 0
        self._sorted: np.ndarray | None = None
        self._runs: list[_Run] = []
        self._cuts: list[int] = []

    def __enter__(self) -> Entries:
        self._spool.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._parts, self._sorted = [], None
        self._spool.__exit__(None, None, None)

    @property
    def num_ranges(self) -> int:
        """Number of key ranges that are sorted one after the other; 1 if all entries fit in memory."""
        return len(self._cuts) + 1

    def append(
        self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, times: np.ndarray | None = None
    ) -> None:
        """Add entries as (n,) arrays: int64 rows and columns, values of the sorter's dtype, and int64 times if any."""
        keys = rows.astype(np.uint64)
        keys <<= np.uint64(self._column_bits)
        keys |= columns.astype(np.uint64)
        records: np.ndarray = keys
        if self._bits:
            keys <<= np.uint64(self._bits)
            keys |= values.astype(np.uint64)
        else:
            records = np.empty(len(keys), self._record)
            records["key"], records["value"] = keys, values
            if self._has_times:
                records["time"] = times
        for start in range(0, len(records), self._limit):
            part = records[start : start + self._limit]
            if self._num_waiting + len(part) > self._limit:
                self._spill()
            self._parts.append(part)
            self._num_waiting += len(part)

    def finish(self) -> None:
        """Finish sorting; no more entries can be appended."""
        if not self._runs:
            self._sorted = self._sort_waiting()
            return
        self._spill()
        most = max(2, self._limit // self._step // RUN_SHARE)
        while len(self._runs) > most:
            self._merge(most)
        self._cuts = self._cuts_of(self._runs)

    def _cuts_of(self, runs: list[_Run]) -> list[int]:
        """Return keys that cut the records of runs into ranges that fit in memory."""
        keys = np.sort(np.concatenate([run.keys for run in runs]))
        # A range that contains n of these keys contains up to n steps of records, and up to a step more in each run.
        step = max(1, self._limit // self._step - len(runs))
        bits = np.uint64(self._group_bits)
        cuts: list[int] = np.unique(keys[step::step] >> bits << bits).tolist()
        return cuts

    def _merge(self, most: int) -> None:
        """Merge each ``most`` consecutive runs into one, in a new spool. Their order is kept for equal keys."""
        merged, runs = Spool(self._folder, self._record, 0), list[_Run]()
        with ExitStack() as stack:
            stack.push(merged)
            for start in range(0, len(self._runs), most):
                group, first, keys = self._runs[start : start + most], len(merged), []
                for low, high in _ranges(self._cuts_of(group)):
                    records = self._sort(self._range(group, low, high))
                    keys.append(self._keys(records[-(len(merged) - first) % self._step :: self._step]).copy())
                    merged.append(records)
                runs.append(_Run(first, len(merged) - first, np.concatenate(keys)))
            stack.pop_all()
        self._spool.__exit__(None, None, None)
        self._spool, self._runs = merged, runs

    def _sort_waiting(self) -> np.ndarray:
        records = np.empty(self._num_waiting, self._record)
        start = 0
        self._parts.reverse()
        while self._parts:  # each part is freed once it is copied
            part = self._parts.pop()
            records[start : start + len(part)] = part
            start += len(part)
        self._num_waiting = 0
        return self._sort(records)

    def _sort(self, records: np.ndarray) -> np.ndarray:
        """Sort records by key, then by time. The sort is stable, so that sums of floats are reproducible."""
        if self._bits:
            records.sort()
            return records
        if self._has_times:
            return records[np.lexsort((records["time"], records["key"]))]
        return records[np.argsort(records["key"], kind="stable")]

    def _keys(self, records: Any) -> Any:
        return records >> np.uint64(self._bits) if self._bits else records["key"]

    def _groups(self, records: Any) -> Any:
        """Return the part of the keys that identifies a position, or with ``time_order`` a row."""
        return self._keys(records) >> np.uint64(self._group_bits)

    def _spill(self) -> None:
        if self._num_waiting:
            records = self._sort_waiting()
            self._runs.append(_Run(len(self._spool), len(records), self._keys(records[:: self._step]).copy()))
            self._spool.append(records)

    def sorted(self) -> Iterator[Positions]:
        """Yield all positions, sorted by row, then by column or time. May be called several times."""
        if self._sorted is not None:
            yield from self._combined(self._sorted)
            return
        for low, high in _ranges(self._cuts):
            yield from self._combined(self._sort(self._range(self._runs, low, high)))

    def _range(self, runs: list[_Run], low: int, high: int | None) -> np.ndarray:
        """Return the records of runs with ``low`` <= key < ``high`` (None: no upper limit), one run after the other.

        Raises OptionError if the position with key ``low``, or with ``time_order`` its row, has more entries than fit
        in memory, because a cut cannot divide them.
        """
        parts, num_alike, alike = [], 0, ((low >> self._group_bits) + 1) << self._group_bits
        for run in runs:
            start = max(0, _first_at(run.keys, low) - 1) * self._step
            stop = run.size if high is None else min(run.size, _first_at(run.keys, high) * self._step)
            if start >= stop:
                continue
            records = self._spool.read(run.first + start, run.first + stop)
            keys = self._keys(records)
            begin, end = _first_at(keys, low), len(keys) if high is None else _first_at(keys, high)
            parts.append(records[begin:end].copy())
            num_alike += (_first_at(keys, alike) if alike < 1 << 64 else len(keys)) - begin
            if num_alike > max(MIN_ALIKE, self._limit):
                what = "duplicates of one row and column" if not self._group_bits else "entries of one row"
                remedy = "remove the duplicates from the source" if not self._group_bits else "leave out time_order"
                raise OptionError(
                    f"{num_alike:,} or more {what} do not fit in memory: raise memory_bytes (--memory-bytes), or "
                    f"{remedy}"
                )
        return np.concatenate(parts) if parts else np.empty(0, self._record)

    def _combined(self, records: np.ndarray) -> Iterator[Positions]:
        """Yield the positions of sorted records, about `PART_ENTRIES` records at a time."""
        start = 0
        while start < len(records):
            stop = min(start + PART_ENTRIES, len(records))
            if stop < len(records):
                stop = bisect_right(records, self._groups(records[stop - 1]), stop, key=self._groups)
            part = records[start:stop]
            keys = self._keys(part)
            values = part & np.uint64((1 << self._bits) - 1) if self._bits else part["value"]
            if values.dtype.kind == "u":
                values = values.astype(np.uint64, copy=False)
            times = part["time"] if self._group_bits else keys
            first = np.empty(len(keys), bool)
            first[0] = True
            np.not_equal(keys[1:], keys[:-1], out=first[1:])
            counts = None
            if not first.all():
                starts = np.flatnonzero(first)
                counts = np.diff(starts, append=len(keys))
                if self._group_bits:
                    times = combine("first" if self._duplicates == "first" else "last", times, starts)
                values, keys = combine(self._duplicates, values, starts), keys[starts]
            rows = (keys >> np.uint64(self._column_bits)).astype(np.int64)
            columns = (keys & np.uint64((1 << self._column_bits) - 1)).astype(np.int64)
            positions = Positions(rows, columns, values, counts)
            yield positions.take(np.lexsort((times, rows))) if self._group_bits else positions
            start = stop


def _ranges(cuts: list[int]) -> Iterator[tuple[int, int | None]]:
    """Yield the first key of each range between cuts, and the key that follows it; None for the last range."""
    return zip([0, *cuts], [*cuts, None], strict=True)


def _first_at(keys: np.ndarray, key: int) -> int:
    """Return the index of the first key that is at least ``key``."""
    return int(np.searchsorted(keys, np.uint64(key), "left"))


def combine(rule: str, values: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Combine each group of duplicates into one value. The rules ``error`` and ``mean`` give the sum.

    Groups are consecutive values, (n,); ``starts`` has the index of the first value of each group.

    >>> values, starts = np.array([4, 2, 3, 5]), np.array([0, 1])  # 4 alone; 2, 3 and 5 share a position
    >>> {how: combine(how, values, starts).tolist() for how in ("sum", "first", "last", "max")}
    {'sum': [4, 10], 'first': [4, 2], 'last': [4, 5], 'max': [4, 5]}
    """
    if rule == "first":
        return values[starts]
    if rule == "last":
        return values[np.append(starts[1:], len(values)) - 1]
    return (np.maximum if rule == "max" else np.add).reduceat(values, starts)
