"""Select the entries, rows and columns of a sparse matrix that go into the file, and how values are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.plan.codes import FloatCoding, Storage
from h5chunk.tools.convert.matrix_read import READ_SHARE, SortedMatrix, no_scale, place_text
from h5chunk.tools.convert.matrix_sort import Places

Part = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Entries in the order of the file: rows (n,) int64, columns (n,) integers, and units or stored numbers (n,)."""


@dataclass(frozen=True)
class Selection:
    """The rows, columns and entries of a matrix that are written."""

    matrix: SortedMatrix
    rows: np.ndarray  # (rows,) bool, in the order of the file
    columns: np.ndarray | None  # (columns,) bool; None if all are kept
    row_entries: np.ndarray  # (kept rows,) int64
    storage: Storage
    counts: dict[str, int]  # counts of what was left out, for the report

    @property
    def num_rows(self) -> int:
        return len(self.row_entries)

    @property
    def num_columns(self) -> int:
        return self.matrix.num_columns if self.columns is None else int(self.columns.sum())

    @property
    def num_entries(self) -> int:
        return int(self.row_entries.sum())

    def parts(self, index_dtype: np.dtype) -> Iterator[Part]:
        """Yield the entries: rows as in the file, columns of ``index_dtype``, and the stored numbers."""
        new_rows = None if self.rows.all() else np.cumsum(self.rows) - 1
        new_columns = None if self.columns is None else (np.cumsum(self.columns) - 1).astype(index_dtype)
        for rows, columns, units in _settled(self.matrix, self.columns):
            if new_rows is not None:
                keep = self.rows[rows]
                rows, columns, units = new_rows[rows[keep]], columns[keep], units[keep]
            indices = columns.astype(index_dtype) if new_columns is None else new_columns[columns]
            yield rows, indices, self.storage.encode(units)


def select(matrix: SortedMatrix) -> Selection:
    """Count entries, choose the storage, and leave out columns, then rows, with too few entries.

    The storage is chosen before any columns or rows are left out. Raises UnfitError if a value cannot be stored, and
    SourceError if no rows or columns remain.
    """
    coding, options, source = matrix.coding, matrix.options, matrix.source
    min_row_count, min_column_count = options.min_counts(source.has_ids)
    row_entries = np.zeros(len(matrix.order), np.int64)
    column_entries = np.zeros(matrix.num_columns, np.int64) if min_column_count else None
    tally: Counter[str] = Counter()
    occurring = coding.tally()
    for rows, columns, units in _settled(matrix, None, tally):
        occurring.add(units)
        _count_rows(rows, row_entries)
        if column_entries is not None:
            np.add.at(column_entries, columns, 1)
    storage = occurring.storage()
    if storage is None:
        raise no_scale(source)
    num_entries = int(row_entries.sum())
    columns_kept = None
    if column_entries is not None:
        kept = column_entries >= min_column_count
        kept[: matrix.num_old_columns] = True
        columns_kept = None if kept.all() else kept
    if columns_kept is not None:
        row_entries[:] = 0
        for rows, _, _ in _settled(matrix, columns_kept):
            _count_rows(rows, row_entries)
    rows_kept = row_entries >= min_row_count
    rows_kept[: matrix.num_old_rows] = True
    if not rows_kept.any() or (columns_kept is not None and not columns_kept.any()):
        axis = "column" if rows_kept.any() else "row"
        raise SourceError(f"{printable(source.path)}: no {axis} is left: filter less")
    counts = {
        "entries read": matrix.num_read,
        f"duplicates {options.duplicates_text(source.time_name)}": tally["duplicates"],
        "explicit zeros dropped": tally["zeros"],
        "entries dropped by their values": tally["places"] - tally["zeros"] - num_entries,
        "values clipped": tally["clipped"],
        "values rounded": tally["rounded"],
        "rows left out": int((~rows_kept).sum()),
        "columns left out": 0 if columns_kept is None else int((~columns_kept).sum()),
    }
    counts = {what: count for what, count in counts.items() if count}
    return Selection(matrix, rows_kept, columns_kept, row_entries[rows_kept], storage, counts)


def _count_rows(rows: np.ndarray, row_entries: np.ndarray) -> None:
    """Add the entries of each row; ``rows`` is ascending."""
    if len(rows):
        starts = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
        row_entries[rows[starts]] += np.diff(starts, append=len(rows))


def _settled(
    matrix: SortedMatrix, columns_kept: np.ndarray | None, tally: Counter[str] | None = None
) -> Iterator[Part]:
    """Yield the entries that are kept, in the order of the file, with their units; counts all places in ``tally``."""
    coding = matrix.coding
    for places in matrix.entries.sorted():
        rows, columns, values = places.rows, places.columns, _combined(matrix, places)
        units, unfit = coding.settle(values)
        if tally is not None:
            tally["places"] += len(rows)
            tally["zeros"] += int((values == 0).sum())
            tally["duplicates"] += 0 if places.counts is None else int(places.counts.sum()) - len(rows)
            clipped = (values < 0) | (values > coding.max_unit) if coding.clip else np.zeros(len(rows), bool)
            tally["clipped"] += int(clipped.sum())
            if isinstance(coding, FloatCoding):
                tally["rounded"] += int(((units != values) & ~clipped).sum())
        if unfit.any():
            first = int(unfit.argmax())
            place = matrix.place(int(rows[first]), int(columns[first]))
            raise matrix.unfit_error(place, float(values[first]) / coding.units_per_one)
        keep = units != 0
        if columns_kept is not None:
            keep &= columns_kept[columns]
        yield (rows, columns, units) if keep.all() else (rows[keep], columns[keep], units[keep])


def _combined(matrix: SortedMatrix, places: Places) -> np.ndarray:
    """Combine duplicates (or refuse them, if requested), and return the value of each place in units."""
    values, counts = places.values, places.counts
    if counts is None:
        return values
    if matrix.options.duplicates == "error":
        raise _duplicate_error(matrix)
    if matrix.options.duplicates != "mean":
        return values
    if values.dtype.kind == "f":
        return values / counts
    means, rest = np.divmod(values.astype(np.int64), counts)
    if rest.any():
        first = int(rest.argmax())
        place = matrix.place(int(places.rows[first]), int(places.columns[first]))
        value = int(values[first]) / int(counts[first]) / matrix.coding.units_per_one
        raise matrix.unfit_error(f"{place} (the mean of {counts[first]} entries)", value)
    return means


def _duplicate_error(matrix: SortedMatrix) -> SourceError:
    """Describe the first place, by row and column of the source, that has more than one entry.

    Entries are read again for this, because only the source knows their lines and original values.
    """
    num_places, repeated = 0, []
    for rows, columns, _, counts in matrix.entries.sorted():
        num_places += len(rows)
        if counts is not None:
            repeated.append(_first_of(matrix, rows[counts > 1], columns[counts > 1], counts[counts > 1]))
    num_duplicates = matrix.num_read - num_places
    row, column = matrix.ids_of(*min(repeated)[:2])
    return SourceError(
        f"{printable(matrix.source.path)}: {place_text(row, column)} has more than one entry: "
        f"{' and '.join(_entries_of(matrix, row, column))}; {num_duplicates:,} of {matrix.num_read:,} entries "
        "are duplicates: choose --duplicates last, first, max, mean or sum"
    )


def _entries_of(matrix: SortedMatrix, row: object, column: object) -> list[str]:
    """Return the first two entries of a place, with their lines, or without lines their numbers."""
    entries: list[str] = []
    num_before = 0
    for block, _ in matrix.source.blocks(matrix.options.memory_bytes // READ_SHARE):
        for index in np.flatnonzero((block.rows == row) & (block.columns == column)).tolist():
            value = 1 if block.values is None else block.values[index].item()
            line = f"entry {num_before + index + 1}" if block.first_line is None else f"line {block.first_line + index}"
            entries.append(f"{value:g} ({line})")
            if len(entries) == 2:
                return entries
        num_before += len(block)
    return entries


def _first_of(matrix: SortedMatrix, *entries: np.ndarray) -> tuple[int, int, int]:
    """Return the first of these (row, column, number) entries in the source's order, with its row in the source."""
    rows, columns, numbers = matrix.order[entries[0]], *entries[1:]
    first = np.lexsort((columns, rows))[0]
    return int(rows[first]), int(columns[first]), int(numbers[first])
