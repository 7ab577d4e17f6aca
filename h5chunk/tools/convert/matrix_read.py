"""Read the blocks of a source and sort their entries into the order of the file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.plan.codes import MAX_CODE, Coding
from h5chunk.plan.duplicates import IN_ORDER
from h5chunk.plan.permutation import permutation
from h5chunk.sources.matrix.block import Block, SparseSource
from h5chunk.sources.matrix.memory import MemoryLimit
from h5chunk.store.write.spool import Spool
from h5chunk.tools.convert.matrix_ids import Ids, Numbers
from h5chunk.tools.convert.matrix_sort import PART_ENTRIES, Entries
from h5chunk.tools.convert.options import MatrixOptions

TABLE_BYTES = 4  # of an id in a table of ids
# Of memory for a row (its number while rows are permuted, its entries, its source), and for a column whose entries are
# counted: 49 and 25 were measured (tracemalloc, as in tests/sources/test_claims.py).
ROW_BYTES, COLUMN_BYTES = 56, 32

Told = Callable[[int], None]


@dataclass(frozen=True)
class Budget:
    """Shares of the memory limit for reading, spooling and sorting, which do not peak at the same time.

    Attributes
    ----------
    memory_bytes : int
    counts_columns : bool
        Whether the entries of each column will be counted.
    """

    memory_bytes: int
    counts_columns: bool = False

    def check_shape(
        self, source: SparseSource, num_rows: int, num_columns: int, id_bytes: int = 0, part_read: float = 1.0
    ) -> None:
        """Refuse a matrix whose rows and columns alone do not fit in memory, however few entries it has.

        Parameters
        ----------
        source : SparseSource
        num_rows, num_columns : int
        id_bytes : int
            Memory that the ids of rows and columns take.
        part_read : float
            Part of the source that this was found in, from 0 to 1.

        Raises
        ------
        SourceError
            Says how much they would take.
        """
        column_bytes = COLUMN_BYTES if self.counts_columns or source.has_ids else 0
        MemoryLimit(source.path, self.memory_bytes).check(
            f"{num_rows:,} rows and {num_columns:,} columns",
            num_rows * ROW_BYTES + num_columns * column_bytes + id_bytes,
            part_read,
        )

    @property
    def source_bytes(self) -> int:
        """Bytes for reading."""
        return self.memory_bytes // 8

    @property
    def spool_bytes(self) -> int:
        """Bytes for entries whose ids are not ranked yet."""
        return self.memory_bytes // 4

    @property
    def sort_bytes(self) -> int:
        """Bytes for sorting."""
        return self.memory_bytes // 2

    @property
    def table_ids(self) -> int:
        """Largest number of ids in the lookup table of an axis."""
        return min(max(1024, self.memory_bytes // 16 // TABLE_BYTES), 1 << 31)


@dataclass
class Read:
    """The sorted entries of a source, with its row order and ids.

    Attributes
    ----------
    source : SparseSource
    options : MatrixOptions
    entries : Entries
        Sorted; their rows are those of the file, before any is left out.
    order : (rows,) int64
        Row i is row ``order[i]`` of the source.
    num_columns : int
    row_ids, column_ids : array or None
        In ascending order: of all rows and columns of the source. None where it has no ids.
    num_read : int
        Entries of the source.
    """

    source: SparseSource
    options: MatrixOptions
    entries: Entries
    order: np.ndarray
    num_columns: int
    row_ids: np.ndarray | None = None
    column_ids: np.ndarray | None = None
    num_read: int = 0

    @cached_property
    def coding(self) -> Coding:
        return self.options.coding()

    def ids(self, source_row: int, column: int) -> tuple[object, object]:
        """What the source calls a row and a column: their ids, or else their numbers."""
        return (
            source_row if self.row_ids is None else self.row_ids[source_row],
            column if self.column_ids is None else self.column_ids[column],
        )

    def place(self, row: int, column: int) -> str:
        """Name a place for people; ``row`` is one of the file."""
        return place_text(*self.ids(int(self.order[row]), column))


def place_text(row: object, column: object) -> str:
    """A row and a column for people; ids of bytes as text."""
    shown = [
        repr(name.decode("utf-8", "backslashreplace")) if isinstance(name, bytes) else str(name)
        for name in (row, column)
    ]
    return f"row {shown[0]}, column {shown[1]}"


def read_source(source: SparseSource, options: MatrixOptions, folder: Path, stack: ExitStack, told: Told) -> Read:
    """Read all entries and sort them.

    Parameters
    ----------
    source : SparseSource
    options : MatrixOptions
    folder : Path
        For temporary data.
    stack : ExitStack
        Closes what was opened here.
    told : callable
        Told the bytes of the source that were read.

    Raises
    ------
    SourceError
        A value that has no code, more rows and columns than fit in memory, or what the source raises.
    """
    rows, columns = source.shape
    budget = Budget(options.memory_bytes, counts_columns=options.min_column_count > 0)
    if source.has_ids or rows is None or columns is None:
        return _read_unnumbered(source, options, folder, budget, stack, told)
    budget.check_shape(source, rows, columns)
    order, destination = order_of(rows, options)
    read = Read(source, options, _entries(folder, source, rows, columns, options, budget, stack), order, columns)
    for block, done in source.blocks(budget.source_bytes):
        units = _units(read, block)
        if len(block) and (int(block.rows.max()) >= rows or int(block.columns.max()) >= columns):
            raise SourceError(f"{printable(source.path)}: an entry lies outside of {rows} x {columns}")
        read.entries.append(destination[block.rows], block.columns, units, block.times)
        told(done)
    read.entries.finish()
    return read


def _read_unnumbered(
    source: SparseSource, options: MatrixOptions, folder: Path, budget: Budget, stack: ExitStack, told: Told
) -> Read:
    """The same where only the whole source tells how many rows there are, and in which order their ids come."""
    number = np.uint32 if source.has_ids else np.int64
    times = [("time", np.int64)] if _uses_times(source, options) else []
    record = np.dtype([("row", number), ("column", number), *times, ("value", options.coding().dtype)])
    spool = stack.enter_context(Spool(folder, record, budget.spool_bytes))
    axes = [Ids(budget.table_ids) if source.has_ids else Numbers() for _ in range(2)]
    read = Read(source, options, None, np.empty(0, np.int64), 0)  # type: ignore[arg-type]
    for block, done in source.blocks(budget.source_bytes):
        units = _units(read, block)
        records = np.empty(len(units), record)
        records["row"], records["column"] = axes[0].number(block.rows), axes[1].number(block.columns)
        records["value"] = units
        if times:
            records["time"] = block.times
        id_bytes = sum(axis.num_bytes for axis in axes)
        budget.check_shape(source, *_shape(source, axes), id_bytes, min(1.0, done / max(1, source.num_bytes)))
        spool.append(records)
        told(done)
    rows, columns = _shape(source, axes)
    read.order, destination = order_of(rows, options)
    read.num_columns = columns
    ranks = None
    if isinstance(axes[0], Ids) and isinstance(axes[1], Ids):
        read.row_ids, row_ranks = axes[0].ranks()
        read.column_ids, ranks = axes[1].ranks()
        destination = destination[row_ranks]
    axes.clear()
    read.entries = _entries(folder, source, rows, columns, options, budget, stack)
    for records in spool.take(PART_ENTRIES):
        numbers = records["column"] if ranks is None else ranks[records["column"]]
        read.entries.append(destination[records["row"]], numbers, records["value"], records["time"] if times else None)
    spool.__exit__(None, None, None)
    read.entries.finish()
    return read


def _uses_times(source: SparseSource, options: MatrixOptions) -> bool:
    return source.time_name is not None and options.duplicates in IN_ORDER


def _entries(
    folder: Path,
    source: SparseSource,
    rows: int,
    columns: int,
    options: MatrixOptions,
    budget: Budget,
    stack: ExitStack,
) -> Entries:
    if rows < 1 or columns < 1:
        raise SourceError(f"{printable(source.path)}: {rows} rows and {columns} columns: nothing to convert")
    coding = options.coding()
    entries = Entries(
        folder,
        rows,
        columns,
        coding.dtype,
        coding.num_bits,
        budget.sort_bytes,
        options.duplicates,
        has_times=_uses_times(source, options),
    )
    return stack.enter_context(entries)


def _shape(source: SparseSource, axes: list[Ids | Numbers]) -> tuple[int, int]:
    """Rows and columns, after all was read."""
    if source.has_ids:
        return axes[0].size, axes[1].size
    rows, columns = source.shape  # a source may know by now
    lengths = [len(values) for values in source.row_fields.values()]
    return rows or max([axes[0].size, *lengths]), columns or axes[1].size


def order_of(num_rows: int, options: MatrixOptions) -> tuple[np.ndarray, np.ndarray]:
    """The source row of each row, and the row of each source row."""
    if not options.shuffle:
        order = np.arange(num_rows, dtype=np.int64)
        return order, order
    order = permutation(num_rows, options.seed)
    destination = np.empty_like(order)
    destination[order] = np.arange(num_rows, dtype=np.int64)
    return order, destination


def _units(read: Read, block: Block) -> np.ndarray:
    """The units of all entries, zeros among them: a zero may be the last of some duplicates."""
    values = np.ones(len(block.rows), np.uint8) if block.values is None else block.values
    units, unfit = read.coding.units(values)
    if unfit is not None:
        place = place_text(block.rows[unfit], block.columns[unfit])
        raise unfit_error(read.source, place, values[unfit].item(), read.coding)
    read.num_read += len(units)
    return units


def unfit_error(source: SparseSource, place: str, value: float, coding: Coding, *, why: str = "") -> SourceError:
    """Return the error of a value that has no code, with the remedy."""
    if not np.isfinite(value):
        reason, remedy = "is not finite", "remove it from the source"
    elif coding.scale is not None and value * coding.scale != round(value * coding.scale):
        reason = f"times the scale {coding.scale:g} is not a whole number"
        remedy = "use another --scale, or --binarize MIN"
    elif value < 0:
        reason, remedy = "is negative", "use --clip to make such values 0, or --binarize MIN"
    elif value * (coding.scale or 1) > MAX_CODE:
        times = f" times the scale {coding.scale:g}" if coding.scale else ""
        reason, remedy = (
            f"{times.strip()} is more than {MAX_CODE}".strip(),
            f"use --clip to make such values {MAX_CODE}",
        )
        remedy += ", --scale S with a smaller S, or --binarize MIN"
    else:
        reason = "has no exact code from 1 to 255" + why
        remedy = "use --scale S if S makes all values whole numbers up to 255, or --binarize MIN"
        if why:
            remedy = f"use --scale S with --clip, which makes what is above {MAX_CODE} / S that, or --binarize MIN"
    return SourceError(f"{printable(source.path)}: {place}: value {value} {reason}: {remedy}")
