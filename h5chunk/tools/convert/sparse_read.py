"""From the blocks of a source to its entries, sorted in the order that the file shall have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.plan.codes import MAX_CODE, Coding
from h5chunk.plan.permute import permutation
from h5chunk.sources.sparse.block import Block, SparseSource
from h5chunk.store.write.spool import Spool
from h5chunk.tools.convert.sparse_entries import PART_ENTRIES, Entries
from h5chunk.tools.convert.sparse_ids import Ids, Numbers

TABLE_BYTES = 4  # of an id in a table of ids

Told = Callable[[int], None]


@dataclass(frozen=True)
class Budget:
    """How the memory that is allowed is dealt out; each part is used while others are not, or not in full.

    Attributes
    ----------
    memory_bytes : int
    """

    memory_bytes: int

    @property
    def source_bytes(self) -> int:
        """For reading."""
        return self.memory_bytes // 8

    @property
    def spool_bytes(self) -> int:
        """For entries whose ids are not yet in order."""
        return self.memory_bytes // 4

    @property
    def sort_bytes(self) -> int:
        """For sorting."""
        return self.memory_bytes // 2

    @property
    def table_ids(self) -> int:
        """Of the table of ids of an axis."""
        return min(max(1024, self.memory_bytes // 16 // TABLE_BYTES), 1 << 31)


@dataclass
class Read:
    """A source that was read.

    Attributes
    ----------
    source : SparseSource
    coding : Coding
    entries : Entries
        Sorted; their rows are those of the file, before any is left out.
    order : (rows,) int64
        Row i is row ``order[i]`` of the source.
    num_columns : int
    row_ids, column_ids : array or None
        In ascending order: of all rows and columns of the source. None where it has no ids.
    num_read, num_zeros : int
        Entries that came, and those of them that were zero.
    """

    source: SparseSource
    coding: Coding
    entries: Entries
    order: np.ndarray
    num_columns: int
    row_ids: np.ndarray | None
    column_ids: np.ndarray | None
    num_read: int = field(default=0)
    num_zeros: int = field(default=0)

    def place(self, row: int, column: int) -> str:
        """What the source calls an entry; ``row`` is one of the file."""
        number = int(self.order[row])
        return place_text(
            number if self.row_ids is None else self.row_ids[number],
            column if self.column_ids is None else self.column_ids[column],
        )


def place_text(row: object, column: object) -> str:
    """A row and a column for people; ids of bytes as text."""
    shown = [
        repr(name.decode("utf-8", "backslashreplace")) if isinstance(name, bytes) else str(name)
        for name in (row, column)
    ]
    return f"row {shown[0]}, column {shown[1]}"


def read_source(
    source: SparseSource,
    coding: Coding,
    folder: Path,
    budget: Budget,
    seed: int | None,
    stack: ExitStack,
    told: Told,
) -> Read:
    """Read all entries and sort them.

    Parameters
    ----------
    source : SparseSource
    coding : Coding
    folder : Path
        For temporary data.
    budget : Budget
    seed : int, optional
        Of the permutation of rows; None keeps their order.
    stack : ExitStack
        Closes what was opened here.
    told : callable
        Told the bytes of the source that were read.

    Raises
    ------
    SourceError
        A value that has no code, or what the source raises.
    """
    rows, columns = source.shape
    if source.has_ids or rows is None or columns is None:
        return _read_unnumbered(source, coding, folder, budget, seed, stack, told)
    order, destination = order_of(rows, seed)
    entries = _entries(folder, source, rows, columns, coding, budget, stack)
    read = Read(source, coding, entries, order, columns, None, None)
    for block, done in source.blocks(budget.source_bytes):
        part, units = _units(read, block)
        if len(part) and (int(part.rows.max()) >= rows or int(part.columns.max()) >= columns):
            raise SourceError(f"{printable(source.path)}: an entry lies outside of {rows} x {columns}")
        entries.append(destination[part.rows], part.columns, units)
        told(done)
    entries.finish()
    return read


def _read_unnumbered(
    source: SparseSource,
    coding: Coding,
    folder: Path,
    budget: Budget,
    seed: int | None,
    stack: ExitStack,
    told: Told,
) -> Read:
    """The same where only the whole source tells how many rows there are, and in which order their ids come."""
    number = np.uint32 if source.has_ids else np.int64
    record = np.dtype([("row", number), ("column", number), ("value", coding.dtype)])
    spool = stack.enter_context(Spool(folder, record, budget.spool_bytes))
    axes = [Ids(budget.table_ids) if source.has_ids else Numbers() for _ in range(2)]
    read = Read(source, coding, None, np.empty(0, np.int64), 0, None, None)  # type: ignore[arg-type]
    for block, done in source.blocks(budget.source_bytes):
        numbers = [axis.number(ids) for axis, ids in zip(axes, (block.rows, block.columns), strict=True)]
        kept, units = _units(read, block, numbers)
        records = np.empty(len(units), record)
        records["row"], records["column"], records["value"] = kept.rows, kept.columns, units
        spool.append(records)
        told(done)
    rows, columns = _shape(source, axes)
    read.order, destination = order_of(rows, seed)
    read.num_columns = columns
    ranks = None
    if isinstance(axes[0], Ids) and isinstance(axes[1], Ids):
        read.row_ids, row_ranks = axes[0].ranks()
        read.column_ids, ranks = axes[1].ranks()
        destination = destination[row_ranks]
    axes.clear()
    read.entries = _entries(folder, source, rows, columns, coding, budget, stack)
    for records in spool.take(PART_ENTRIES):
        numbers_of = records["column"]
        read.entries.append(
            destination[records["row"]], numbers_of if ranks is None else ranks[numbers_of], records["value"]
        )
    spool.__exit__(None, None, None)
    read.entries.finish()
    return read


def _entries(
    folder: Path, source: SparseSource, rows: int, columns: int, coding: Coding, budget: Budget, stack: ExitStack
) -> Entries:
    if rows < 1 or columns < 1:
        raise SourceError(f"{printable(source.path)}: {rows} rows and {columns} columns: nothing to convert")
    return stack.enter_context(Entries(folder, rows, columns, coding.dtype, coding.num_bits, budget.sort_bytes))


def _shape(source: SparseSource, axes: list[Ids | Numbers]) -> tuple[int, int]:
    """Rows and columns, after all was read."""
    if source.has_ids:
        return axes[0].size, axes[1].size
    rows, columns = source.shape  # a source may know by now
    lengths = [len(values) for values in source.row_fields.values()]
    return rows or max([axes[0].size, *lengths]), columns or axes[1].size


def order_of(num_rows: int, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The source row of each row, and the row of each source row."""
    if seed is None:
        order = np.arange(num_rows, dtype=np.int64)
        return order, order
    order = permutation(num_rows, seed)
    destination = np.empty_like(order)
    destination[order] = np.arange(num_rows, dtype=np.int64)
    return order, destination


def _units(read: Read, block: Block, numbers: list[np.ndarray] | None = None) -> tuple[Block, np.ndarray]:
    """The entries that are not zero, with their units; ``numbers`` in place of the ids of a block."""
    values = np.ones(len(block.rows), np.uint8) if block.values is None else block.values
    units, unfit = read.coding.units(values)
    if unfit is not None:
        place = place_text(block.rows[unfit], block.columns[unfit])
        raise unfit_error(read.source, place, values[unfit].item(), read.coding)
    rows, columns = numbers or (block.rows, block.columns)
    read.num_read += len(units)
    zero = units == 0
    if zero.any():
        keep = ~zero
        read.num_zeros += len(units) - int(keep.sum())
        rows, columns, units = rows[keep], columns[keep], units[keep]
    return Block(rows, columns, None), units


def unfit_error(source: SparseSource, place: str, value: float, coding: Coding, *, why: str = "") -> SourceError:
    """The error of a value that has no code, with what would help."""
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
            remedy = f"use --clip to make what is above {MAX_CODE} that, or --binarize MIN"
    return SourceError(f"{printable(source.path)}: {place}: value {value} {reason}: {remedy}")
