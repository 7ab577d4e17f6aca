"""Select the entries, rows and columns of a sparse matrix to write, and choose how values are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from h5chunk.errors import OptionError, SourceError, printable
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.matrix.codes import CodeTally, FloatCoding, FloatTally, Storage
from h5chunk.tools.convert.matrix_read import READ_SHARE, SortedMatrix, no_scale_error, position_text
from h5chunk.tools.convert.matrix_sort import Positions
from h5chunk.tools.convert.options import MatrixOptions

Entries = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, columns and values of entries in the order of the file, (n,) each; values are in units or as stored."""

ZEROS = "explicit zeros dropped"  # label of their number in the report


@dataclass(frozen=True)
class Selection:
    """The rows, columns and entries of a matrix that are written."""

    matrix: SortedMatrix
    rows: np.ndarray  # (rows,) bool, in the order of the file: whether a row is written
    columns: np.ndarray | None  # (columns,) bool: whether a column is written; None if all are
    row_entries: np.ndarray  # (written rows,) int64: number of entries of each
    storage: Storage
    counts: dict[str, int]  # numbers of entries read and dropped, and of rows and columns left out, for the report

    @property
    def num_rows(self) -> int:
        return len(self.row_entries)

    @property
    def num_columns(self) -> int:
        return self.matrix.num_columns if self.columns is None else int(self.columns.sum())

    @property
    def num_entries(self) -> int:
        return int(self.row_entries.sum())

    def entries(self, index_dtype: np.dtype) -> Iterator[Entries]:
        """Yield groups of entries to write: row indices, column indices of ``index_dtype``, and encoded values."""
        new_rows = None if self.rows.all() else np.cumsum(self.rows) - 1
        new_columns = None if self.columns is None else (np.cumsum(self.columns) - 1).astype(index_dtype)
        for rows, columns, units in _final_entries(self.matrix, self.columns):
            if new_rows is not None:
                keep = self.rows[rows]
                rows, columns, units = new_rows[rows[keep]], columns[keep], units[keep]
            indices = columns.astype(index_dtype) if new_columns is None else new_columns[columns]
            yield rows, indices, self.storage.encode(units)


@dataclass(frozen=True)
class Survey:
    """Counts and values of the entries of a matrix, before any columns or rows are left out."""

    row_entries: np.ndarray  # (rows,) int64: number of entries of each row, in the order of the file
    column_entries: np.ndarray | None  # (columns,) int64; None unless columns may be left out
    values: CodeTally | FloatTally
    tally: Counter[str]  # numbers of positions, zeros, duplicates, and clipped and rounded values


def survey(matrix: SortedMatrix) -> Survey:
    """Count the entries of a matrix, and collect their values. Raises UnfitError if a value cannot be stored."""
    may_leave_out = matrix.options.min_counts(matrix.source.has_ids)[1] > 0
    column_entries = np.zeros(matrix.num_columns, np.int64) if may_leave_out else None
    found = Survey(np.zeros(len(matrix.order), np.int64), column_entries, matrix.coding.tally(), Counter())
    for rows, columns, units in _final_entries(matrix, None, found.tally):
        found.values.add(units)
        _count_rows(rows, found.row_entries)
        if column_entries is not None:
            np.add.at(column_entries, columns, 1)
    return found


def storage_of(values: CodeTally | FloatTally, source: SparseSource) -> Storage:
    """Return the dtype and scale in which values are stored. Raises UnfitError if they have no common scale."""
    storage = values.storage()
    if storage is None:
        raise no_scale_error(source)
    return storage


def columns_with_enough(
    column_entries: np.ndarray | None, options: MatrixOptions, num_old: int, source: SparseSource
) -> np.ndarray | None:
    """Return a mask, (columns,) bool, of the columns to write; None if all are written.

    Old columns are always written. Raises SourceError if no column has enough entries.
    """
    if column_entries is None:
        return None
    has_enough = column_entries >= options.min_counts(source.has_ids)[1]
    has_enough[:num_old] = True
    if not has_enough.any():
        raise _nothing_left(source, "column")
    return None if has_enough.all() else has_enough


def _nothing_left(source: SparseSource, axis: str) -> SourceError:
    return SourceError(
        f"{printable(source.path)}: no {axis} has enough entries: lower --min-row-count or --min-column-count"
    )


def select(matrix: SortedMatrix) -> Selection:
    """Choose how values are stored, and leave out columns, then rows, with too few entries.

    The storage is chosen for all entries, including those that are left out. Raises UnfitError if a value cannot be
    stored, and SourceError if no rows or columns remain.
    """
    found, source = survey(matrix), matrix.source
    storage = storage_of(found.values, source)
    columns = columns_with_enough(found.column_entries, matrix.options, matrix.old.num_columns, source)
    return select_rows(matrix, found, storage, columns)


def select_rows(matrix: SortedMatrix, found: Survey, storage: Storage, columns_kept: np.ndarray | None) -> Selection:
    """Leave out rows with too few entries in the kept columns. Raises SourceError if no rows remain."""
    options, source, tally = matrix.options, matrix.source, found.tally
    row_entries, num_entries = found.row_entries, int(found.row_entries.sum())
    if columns_kept is not None:
        row_entries = np.zeros_like(row_entries)
        for rows, _, _ in _final_entries(matrix, columns_kept):
            _count_rows(rows, row_entries)
    rows_kept = row_entries >= options.min_counts(source.has_ids)[0]
    rows_kept[: matrix.old.num_rows] = True
    if not rows_kept.any():
        if matrix.shard:
            raise OptionError(
                f"{printable(source.path)}: no row of shard {matrix.shard['shard']} has enough entries: use fewer "
                "shards, or lower --min-row-count or --min-column-count"
            )
        raise _nothing_left(source, "row")
    counts = {
        "entries read": matrix.num_read,
        f"duplicates {options.duplicates_text(source.time_name)}": tally["duplicates"],
        ZEROS: tally["zeros"],
        "entries dropped by their values": tally["positions"] - tally["zeros"] - num_entries,
        "values clipped": tally["clipped"],
        "values rounded": tally["rounded"],
        "rows left out": int((~rows_kept).sum()),
        "columns left out": 0 if columns_kept is None else int((~columns_kept).sum()),
    }
    counts = {label: count for label, count in counts.items() if count}
    return Selection(matrix, rows_kept, columns_kept, row_entries[rows_kept], storage, counts)


def _count_rows(rows: np.ndarray, row_entries: np.ndarray) -> None:
    """Add the number of entries of each row to ``row_entries``. ``rows`` contains the row of each entry, ascending."""
    if len(rows):
        starts = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
        row_entries[rows[starts]] += np.diff(starts, append=len(rows))


def _final_entries(
    matrix: SortedMatrix, columns_kept: np.ndarray | None, tally: Counter[str] | None = None
) -> Iterator[Entries]:
    """Combine duplicates, and yield the nonzero entries in kept columns, with values in units.

    ``tally``, if given, counts positions, zeros, duplicates, and clipped and rounded values.
    """
    coding = matrix.coding
    for positions in matrix.entries.sorted():
        rows, columns, values = positions.rows, positions.columns, _combined(matrix, positions)
        units, unfit = coding.finish_sums(values)
        if tally is not None:
            tally["positions"] += len(rows)
            tally["zeros"] += int((values == 0).sum())
            tally["duplicates"] += 0 if positions.counts is None else int(positions.counts.sum()) - len(rows)
            clipped = (values < 0) | (values > coding.max_unit) if coding.clip else np.zeros(len(rows), bool)
            tally["clipped"] += int(clipped.sum())
            if isinstance(coding, FloatCoding):
                tally["rounded"] += int(((units != values) & ~clipped).sum())
        if unfit.any():
            first = int(unfit.argmax())
            position = matrix.position(int(rows[first]), int(columns[first]))
            raise matrix.unfit_error(position, float(values[first]) / coding.units_per_one)
        keep = units != 0
        if columns_kept is not None:
            keep &= columns_kept[columns]
        yield (rows, columns, units) if keep.all() else (rows[keep], columns[keep], units[keep])


def _combined(matrix: SortedMatrix, positions: Positions) -> np.ndarray:
    """Return the value at each position, in units. Raises SourceError for duplicates if the rule is ``error``."""
    values, counts = positions.values, positions.counts
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
        position = matrix.position(int(positions.rows[first]), int(positions.columns[first]))
        value = int(values[first]) / int(counts[first]) / matrix.coding.units_per_one
        raise matrix.unfit_error(f"{position} (the mean of {counts[first]} entries)", value)
    return means


def _duplicate_error(matrix: SortedMatrix) -> SourceError:
    """Return an error that names the first position with more than one entry, by source row and column.

    The source is read again, because only the source has the line numbers and original values.
    """
    num_positions, repeated = 0, []
    for rows, columns, _, counts in matrix.entries.sorted():
        num_positions += len(rows)
        if counts is not None:
            source_rows, columns = matrix.order[rows[counts > 1]], columns[counts > 1]
            first = np.lexsort((columns, source_rows))[0]
            repeated.append((int(source_rows[first]), int(columns[first])))
    num_duplicates = matrix.num_read - num_positions
    row, column = matrix.ids_of(*min(repeated))
    return SourceError(
        f"{printable(matrix.source.path)}: {position_text(row, column)} has more than one entry, such as "
        f"{' and '.join(_entries_of(matrix, row, column))}; {num_duplicates:,} of {matrix.num_read:,} entries "
        "are duplicates: use --duplicates last, first, max, mean or sum"
    )


def _entries_of(matrix: SortedMatrix, row: object, column: object) -> list[str]:
    """Describe the first two entries at a position by their values, and by their line or number in the source."""
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
