"""Select the entries, rows and columns of a sparse matrix that go into the file, and their codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.plan.codes import MAX_CODE, UNITS
from h5chunk.plan.duplicates import describe
from h5chunk.tools.convert.matrix_duplicates import settle_duplicates
from h5chunk.tools.convert.matrix_read import Read, unfit_error


class Part(NamedTuple):
    """Entries in the order of the file: rows (n,) int64, columns (n,) integers, and units or codes (n,)."""

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Kept:
    """The selected rows, columns and entries of a matrix.

    Attributes
    ----------
    read : Read
    rows : (rows,) bool
        Of the rows in the order of the file.
    columns : (columns,) bool, or None
        None where all are kept.
    row_entries : (kept rows,) int64
    scale : float
    pattern : bool
    counts : dict of str to int
        Of what was left out.
    """

    read: Read
    rows: np.ndarray
    columns: np.ndarray | None
    row_entries: np.ndarray
    scale: float
    pattern: bool
    counts: dict[str, int]

    @property
    def source_index(self) -> np.ndarray:
        """(kept rows,) int64: which rows of the source they are."""
        return self.read.order[self.rows]

    @property
    def num_columns(self) -> int:
        return self.read.num_columns if self.columns is None else int(self.columns.sum())

    def parts(self, index_dtype: np.dtype) -> Iterator[Part]:
        """The entries: rows as they are in the file, columns of ``index_dtype``, codes uint8."""
        codes = self.read.coding.codes(self.scale)
        new_rows = None if self.rows.all() else np.cumsum(self.rows) - 1
        new_columns = None if self.columns is None else (np.cumsum(self.columns) - 1).astype(index_dtype)
        for rows, columns, units in _settled(self.read, self.columns):
            if new_rows is not None:
                keep = self.rows[rows]
                rows, columns, units = new_rows[rows[keep]], columns[keep], units[keep]
            indices = columns.astype(index_dtype) if new_columns is None else new_columns[columns]
            yield Part(rows, indices, codes[units])


def choose_what_to_keep(read: Read, min_row_count: int, min_column_count: int) -> Kept:
    """Count entries, settle on the scale, and leave out columns, then rows, with too few entries.

    The scale is chosen before that. Where a source has ids, rows and columns without entries do not exist.

    Raises
    ------
    SourceError
        A value has no code, or nothing is left.
    """
    least = int(read.source.has_ids)
    min_row_count, min_column_count = max(min_row_count, least), max(min_column_count, least)
    unit_counts = np.zeros(read.coding.max_unit + 1, np.int64)
    row_entries = np.zeros(len(read.order), np.int64)
    column_entries = np.zeros(read.num_columns, np.int64) if min_column_count else None
    tally: Counter[str] = Counter()
    for rows, columns, units in _settled(read, None, tally):
        unit_counts += np.bincount(units, minlength=len(unit_counts))
        _count_rows(rows, row_entries)
        if column_entries is not None:
            np.add.at(column_entries, columns, 1)
    seen = np.flatnonzero(unit_counts)
    scale = read.coding.choose_scale(seen)
    if scale is None:
        raise _no_scale(read, seen)
    columns_kept = None
    if column_entries is not None and not (kept := column_entries >= min_column_count).all():
        columns_kept = kept
        row_entries[:] = 0
        for rows, _, _ in _settled(read, kept):
            _count_rows(rows, row_entries)
    rows_kept = row_entries >= min_row_count
    if not rows_kept.any() or (columns_kept is not None and not columns_kept.any()):
        raise SourceError(f"{printable(read.source.path)}: no {_nothing(rows_kept)} left: filter less")
    counts = {
        "entries read": read.num_read,
        f"duplicates {describe(read.options.duplicates, read.source.time_name)}": tally["duplicates"],
        "explicit zeros dropped": tally["zeros"],
        "entries dropped by their values": tally["places"] - tally["zeros"] - int(unit_counts.sum()),
        "values clipped": tally["below"] + tally["above"],
        "rows left out": int((~rows_kept).sum()),
        "columns left out": 0 if columns_kept is None else int((~columns_kept).sum()),
    }
    kept_entries = row_entries[rows_kept]
    pattern = scale == 1 and len(seen) > 0 and bool((read.coding.codes(scale)[seen] == 1).all())
    return Kept(read, rows_kept, columns_kept, kept_entries, scale, pattern, counts)


def _nothing(rows_kept: np.ndarray) -> str:
    return "row is" if not rows_kept.any() else "column is"


def _settled(read: Read, columns_kept: np.ndarray | None, tally: Counter[str] | None = None) -> Iterator[Part]:
    """The entries that are not dropped, in the order of the file, with their units; counts all places in ``tally``."""
    for places in read.entries.sorted():
        rows, columns, values = places.rows, places.columns, settle_duplicates(read, places)
        units, unfit = read.coding.settle(values)
        if tally is not None:
            tally["places"] += len(rows)
            tally["zeros"] += int((values == 0).sum())
            tally["duplicates"] += 0 if places.counts is None else int(places.counts.sum()) - len(rows)
            if read.coding.clip:
                tally["below"] += int((values < 0).sum())
                tally["above"] += int((values > read.coding.max_unit).sum())
        if unfit.any():
            first = int(unfit.argmax())
            place = read.place(int(rows[first]), int(columns[first]))
            value = float(values[first]) / read.coding.units_per_one
            raise unfit_error(read.source, place, value, read.coding)
        keep = units > 0
        if columns_kept is not None:
            keep &= columns_kept[columns]
        if keep.all():
            yield Part(rows, columns, units)
        else:
            yield Part(rows[keep], columns[keep], units[keep])


def _count_rows(rows: np.ndarray, row_entries: np.ndarray) -> None:
    """Add the entries of each row; ``rows`` ascend."""
    if len(rows):
        starts = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
        row_entries[rows[starts]] += np.diff(starts, append=len(rows))


def _no_scale(read: Read, units: np.ndarray) -> SourceError:
    """The error of values of which each has a code, but not with one scale for all: names the first in the way."""
    unfit = np.zeros(read.coding.max_unit + 1, bool)
    unfit[read.coding.unfit_units(units)] = True
    found: tuple[int, int, int, int] | None = None
    for rows, columns, values in _settled(read, None):
        for at in np.flatnonzero(unfit[values]):
            row, column = int(rows[at]), int(columns[at])
            here = (int(read.order[row]), column, row, int(values[at]))
            found = here if found is None else min(found, here)
    assert found is not None
    _, column, row, unit = found
    other = int(units[units != unit][0]) / UNITS if len(units) > 1 else 0
    why = f" with the scale that others, such as {other:g}, need (codes end at {MAX_CODE})"
    return unfit_error(read.source, read.place(row, column), unit / UNITS, read.coding, why=why)
