"""Read a sparse source in blocks, map its ids to indices, and sort its entries into the row order of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np

from h5chunk.errors import OptionError, SourceError, as_text, count_text, printable
from h5chunk.plan.permutation import permutation
from h5chunk.sources.matrix.block import Block, MemoryLimit, SparseSource
from h5chunk.sources.matrix.codes import MAX_CODE, Coding, FloatCoding
from h5chunk.store.write.spool import Spool
from h5chunk.tools.convert.matrix_ids import Ids, OldIds, inverse_of
from h5chunk.tools.convert.matrix_sort import PART_ENTRIES, Entries
from h5chunk.tools.convert.options import MatrixOptions

T = TypeVar("T")

# Reading, spooling, sorting and tables of ids use up to 1/8, 1/4, 1/2 and 1/16 of the memory limit, at different times.
READ_SHARE, SPOOL_SHARE, SORT_SHARE, TABLE_SHARE = 8, 4, 2, 16
TABLE_BYTES = 4  # bytes per entry of a table of ids
# Bytes of memory per row, and per column whose entries are counted. 49 and 25 were measured with tracemalloc.
ROW_BYTES, COLUMN_BYTES = 56, 32


def check_shape(
    source: SparseSource,
    options: MatrixOptions,
    num_rows: int,
    num_columns: int,
    id_bytes: int = 0,
    part_read: float = 1.0,
) -> None:
    """Raise SourceError if the rows and columns of a matrix alone, without its entries, exceed the memory limit.

    ``id_bytes`` is the memory for ids; ``part_read`` is the fraction of the source read so far, from 0 to 1.
    """
    column_bytes = COLUMN_BYTES if options.min_counts(source.has_ids)[1] else 0
    MemoryLimit(source.path, options.memory_bytes).check(
        f"{count_text(num_rows, 'row')} and {count_text(num_columns, 'column')}",
        num_rows * ROW_BYTES + num_columns * column_bytes + id_bytes,
        part_read,
    )


class UnfitError(SourceError):
    """A value cannot be stored with the coding that was tried."""


def unfit_error(source: SparseSource, coding: Coding | FloatCoding, position: str, value: float) -> UnfitError:
    """Return an error for a value at ``position`` that the coding cannot store."""
    reason, remedy = coding.explain_unfit(value)
    return UnfitError(f"{printable(source.path)}: {position}: value {value} {reason}: {remedy}")


def no_scale_error(source: SparseSource) -> UnfitError:
    """Return the error for values that no common scale turns into whole numbers."""
    return UnfitError(
        f"{printable(source.path)}: no scale makes all values whole numbers up to {MAX_CODE}: use --values auto, "
        "--scale S with --clip, or --binarize MIN"
    )


def first_that_fits(options: MatrixOptions, attempt: Callable[[Coding | FloatCoding], T]) -> T:
    """Call ``attempt`` with the requested coding or, if that raises UnfitError, with its fallback, if any."""
    coding = options.coding()
    try:
        return attempt(coding)
    except UnfitError:
        fallback = coding.fallback()
        if fallback is None:
            raise
    return attempt(fallback)


def uses_times(source: SparseSource, options: MatrixOptions) -> bool:
    """Return whether the source has times and the options depend on them."""
    return source.time_name is not None and options.needs_times


def units_of(source: SparseSource, coding: Coding | FloatCoding, block: Block) -> np.ndarray:
    """Return the values of a block in units. Zeros are kept, because a zero may be the last of several duplicates."""
    values = np.ones(len(block.rows), np.uint8) if block.values is None else block.values
    units, unfit = coding.units(values)
    if unfit is not None:
        position = position_text(block.rows[unfit], block.columns[unfit])
        raise unfit_error(source, coding, position, values[unfit].item())
    return units


def order_of_rows(
    source: SparseSource, options: MatrixOptions, num_rows: int, num_columns: int, num_old: int
) -> np.ndarray:
    """Return the order in which source rows are written, old rows first. Raises SourceError if the matrix is empty."""
    if num_rows < 1 or num_columns < 1:
        raise SourceError(
            f"{printable(source.path)}: the matrix is empty, with {num_rows} rows and {num_columns} columns: use a "
            "source with at least one row and one column"
        )
    check_shape(source, options, num_rows, num_columns)
    order = np.arange(num_rows, dtype=np.int64)
    if options.shuffle:
        order[num_old:] = permutation(num_rows - num_old, options.seed) + num_old
    return order


def numbering(options: MatrixOptions, old: np.ndarray | None) -> Ids:
    """Return an object that assigns indices to the ids of an axis, starting with the ``old`` ids."""
    return Ids(min(max(1024, options.memory_bytes // TABLE_SHARE // TABLE_BYTES), 1 << 31), old)


def whole_shape(source: SparseSource, num_rows: int, num_columns: int) -> tuple[int, int]:
    """Return the shape of a source without ids, after all of its entries have been read.

    ``num_rows`` and ``num_columns`` are the largest indices of entries plus one. Raises SourceError if they exceed the
    shape that the source declares.
    """
    rows, columns = source.shape  # some sources know their shape only after they are read
    if num_rows > (rows or num_rows) or num_columns > (columns or num_columns):
        raise SourceError(
            f"{printable(source.path)}: an entry is outside of the matrix of {rows or num_rows} x "
            f"{columns or num_columns}"
        )
    return rows or max([num_rows, *map(len, source.row_fields.values())]), columns or num_columns


class Records:
    """Read the entries of a source as records of row, column, time (if used) and value in units.

    Ids get indices in the order in which they appear.
    """

    def __init__(self, source: SparseSource, options: MatrixOptions, coding: Coding | FloatCoding, old: OldIds) -> None:
        self._source, self._options, self._coding, self._old = source, options, coding, old
        number = np.uint32 if source.has_ids else np.int64
        times = [("time", np.int64)] if uses_times(source, options) else []
        self.dtype = np.dtype([("row", number), ("column", number), *times, ("value", coding.dtype)])
        self.ids = (numbering(options, old.rows), numbering(options, old.columns)) if source.has_ids else None
        self.num_read = 0  # entries read so far
        self.extent = (0, 0)  # number of rows and of columns that the entries read so far need

    def read(self, report_read: Callable[[int], None]) -> Iterator[np.ndarray]:
        """Yield all entries. Raises SourceError if rows, columns and ids do not fit in memory."""
        source, has_times = self._source, "time" in (self.dtype.names or ())
        for block, done in source.blocks(self._options.memory_bytes // READ_SHARE):
            records = np.empty(len(block), self.dtype)
            records["value"] = units_of(source, self._coding, block)
            self.num_read += len(block)
            if has_times:
                records["time"] = block.times
            if self.ids is None:
                records["row"], records["column"] = block.rows, block.columns
                largest = (int(numbers.max(initial=-1)) + 1 for numbers in (block.rows, block.columns))
                rows, columns = map(max, self.extent, largest)
                self.extent = rows, columns
            else:
                self._check_id_types(block)
                records["row"], records["column"] = map(Ids.number, self.ids, (block.rows, block.columns))
                self.extent = self.ids[0].size, self.ids[1].size
            part_read = min(1.0, done / max(1, source.num_bytes))
            id_bytes = sum(ids.num_bytes for ids in self.ids or ())
            check_shape(source, self._options, *self.extent, id_bytes=id_bytes, part_read=part_read)
            yield records
            report_read(done)

    def _check_id_types(self, block: Block) -> None:
        """Raise OptionError unless the ids of the source and of ``ids_from`` have the same type."""
        for axis, ids, old in (("row", block.rows, self._old.rows), ("column", block.columns, self._old.columns)):
            if old is not None and len(ids) and old.dtype.kind != ids.dtype.kind:
                words = {"S": "strings", "i": "whole numbers"}
                remedy = "read them" if old.dtype.kind == "S" else "convert the older source again, and read its ids"
                raise OptionError(
                    f"{printable(self._source.path)}: {axis} ids are {words[ids.dtype.kind]}, but those of ids_from "
                    f"are {words[old.dtype.kind]}: {remedy} as strings (for a delimited file, with "
                    f"'{self._source.axes[axis == 'column']}:str' in --columns)"
                )


class SortedMatrix:
    """The entries of a source, sorted by the rows of the output file, before any rows or columns are left out.

    Temporary files are made in ``folder``; closing ``stack`` removes them. Raises UnfitError for a value that
    ``coding`` cannot store, and SourceError for an invalid source or one whose rows and columns do not fit in memory.
    """

    entries: Entries
    order: np.ndarray  # (rows,) int64: row i is row order[i] of the source
    num_rows: int  # number of rows of the source
    num_columns: int

    def __init__(
        self,
        source: SparseSource,
        options: MatrixOptions,
        coding: Coding | FloatCoding,
        folder: Path,
        stack: ExitStack,
        report_read: Callable[[int], None],
        old: OldIds,
    ) -> None:
        self.source, self.options, self.coding, self.old = source, options, coding, old
        self._folder, self._stack = folder, stack
        self._uses_times = uses_times(source, options)
        self.row_ids: np.ndarray | None = None  # ids of the source's rows; None if it has no ids
        self.column_ids: np.ndarray | None = None
        self.num_read = 0  # entries read
        self.shard: dict[str, int] = {}  # index of the shard, and number of shards; empty for a single file
        self.chunk_samples = options.chunk_samples
        num_rows, num_columns = source.shape
        if source.has_ids or num_rows is None or num_columns is None:
            self._read_unnumbered(report_read)
        else:
            destination = self._open_entries(num_rows, num_columns)
            for block, done in source.blocks(self.options.memory_bytes // READ_SHARE):
                units = units_of(source, coding, block)
                self.num_read += len(units)
                if len(block) and (int(block.rows.max()) >= num_rows or int(block.columns.max()) >= num_columns):
                    raise SourceError(
                        f"{printable(source.path)}: an entry is outside of the matrix of {num_rows} x {num_columns}"
                    )
                self.entries.append(destination[block.rows], block.columns, units, block.times)
                report_read(done)
        self.entries.finish()

    def _read_unnumbered(self, report_read: Callable[[int], None]) -> None:
        """Read a source whose shape or ids are not known in advance. Entries are spooled until all have been read."""
        column_ranks = None
        records = Records(self.source, self.options, self.coding, self.old)
        with Spool(self._folder, records.dtype, self.options.memory_bytes // SPOOL_SHARE) as spool:
            for part in records.read(report_read):
                spool.append(part)
            self.num_read = records.num_read
            if records.ids is None:
                destination = self._open_entries(*whole_shape(self.source, *records.extent))
            else:
                (self.row_ids, row_ranks), (self.column_ids, column_ranks) = (ids.ranks() for ids in records.ids)
                records.ids = None  # frees its memory before entries are sorted
                destination = self._open_entries(*records.extent)[row_ranks]
            for part in spool.take(PART_ENTRIES):
                numbers = part["column"] if column_ranks is None else column_ranks[part["column"]]
                entry_times = part["time"] if self._uses_times else None
                self.entries.append(destination[part["row"]], numbers, part["value"], entry_times)

    def _open_entries(self, num_rows: int, num_columns: int) -> np.ndarray:
        """Choose the row order, and open the sorter. Return the new index of each source row: (num_rows,) int64."""
        self.order = order_of_rows(self.source, self.options, num_rows, num_columns, self.old.num_rows)
        self.num_rows, self.num_columns = num_rows, num_columns
        self._open_sorter(num_rows)
        return inverse_of(self.order) if self.options.shuffle else self.order

    def _open_sorter(self, num_rows: int) -> None:
        entries = Entries(
            self._folder,
            num_rows,
            self.num_columns,
            self.coding.dtype,
            self.coding.num_bits,
            self.options.memory_bytes // SORT_SHARE,
            self.options.duplicates,
            has_times=self._uses_times,
            time_order=self.options.time_order,
        )
        self.entries = self._stack.enter_context(entries)

    def ids_of(self, source_row: int, column: int) -> tuple[object, object]:
        """Return the ids of a row and a column of the source, or their indices if it has no ids."""
        return (
            source_row if self.row_ids is None else self.row_ids[source_row],
            column if self.column_ids is None else self.column_ids[column],
        )

    def position(self, row: int, column: int) -> str:
        """Describe row ``row`` of the file and a column by their ids in the source, for error messages."""
        return position_text(*self.ids_of(int(self.order[row]), column))

    def unfit_error(self, position: str, value: float) -> UnfitError:
        """Return an error for a value at ``position`` that cannot be stored."""
        return unfit_error(self.source, self.coding, position, value)


def position_text(row: object, column: object) -> str:
    """Describe a row and a column by their indices or ids, for error messages."""
    row, column = (repr(as_text(name)) if isinstance(name, bytes) else name for name in (row, column))
    return f"row {row}, column {column}"
