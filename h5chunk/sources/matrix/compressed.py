"""Read compressed sparse rows, compressed sparse columns and coordinates in blocks, and validate them.

Pointers must start at 0, never decrease, and end at the number of entries; indices must be in range; values must be
finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from h5chunk.errors import SourceError
from h5chunk.sources.matrix.block import Block

ENTRY_BYTES = 64  # bytes of memory per entry: its numbers as they are read and as int64, and masks
MIN_ENTRIES = 256


class Vector(Protocol):
    """A one-dimensional array of numbers in a file, which is read from its start to its end."""

    name: str  # for messages
    length: int
    dtype: np.dtype

    @property
    def consumed_bytes(self) -> int:
        """Number of bytes of the source read so far."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read the values from index ``start`` up to ``stop``, excluded."""


def check_vectors(layout: str, shape: tuple[int, int], vectors: Sequence[Vector]) -> None:
    """Raise SourceError unless the shape of a matrix, and the lengths and types of its vectors, are valid and agree.

    ``layout`` is ``csr``, ``csc`` or ``coo``. The vectors are data, indices and pointers; or, for coo, data, rows and
    columns. None of their values is read.
    """
    data, first, second = vectors
    if not all(0 <= length < 1 << 62 for length in shape):
        raise SourceError(f"{first.name}: the matrix's shape {shape} is invalid: lengths must be from 0 to 2**62 - 1")
    for vector in (first, second):
        if vector.dtype.kind not in "iu":
            raise SourceError(f"{vector.name} has the type {vector.dtype} but must be whole numbers")
    check_values_type(data.name, data.dtype)
    if data.length != first.length:
        raise SourceError(f"{data.name} has {data.length} values but {first.name} has {first.length} numbers")
    if layout == "coo":
        if second.length != first.length:
            raise SourceError(f"{second.name} has {second.length} numbers but {first.name} has {first.length}")
        return
    num_major = shape[layout == "csc"]
    if second.length != num_major + 1:
        raise SourceError(
            f"{second.name} has {second.length} numbers but must have {num_major + 1}, one more than the matrix has "
            f"{'columns' if layout == 'csc' else 'rows'}"
        )


def check_values_type(name: str, dtype: np.dtype) -> None:
    """Raise SourceError unless values of type ``dtype`` are booleans, or whole or real numbers of at most 64 bits."""
    if dtype.kind == "c":
        raise SourceError(f"{name} holds complex numbers ({dtype}): keep the real part, or the absolute value")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise SourceError(
            f"{name} has the type {dtype} but values must be whole or real numbers of at most 64 bits: convert it"
        )


def read_blocks(
    layout: str,
    shape: tuple[int, int],
    vectors: Sequence[Vector],
    max_bytes: int,
    range_of: Callable[[int], tuple[int, int]] = lambda count: (0, count),
) -> Iterator[tuple[Block, int]]:
    """Yield blocks of entries in stored order, each with the number of bytes of the source read so far.

    `check_vectors` describes the first three parameters. Reading takes about ``max_bytes`` of memory. ``range_of`` is
    called with the number of entries, and returns the range, (first, end), of the entries to yield. Raises SourceError
    for invalid data.
    """
    check_vectors(layout, shape, vectors)
    entries = range_of(vectors[0].length)
    at_once = max(MIN_ENTRIES, max_bytes // ENTRY_BYTES)
    if layout == "coo":
        blocks = _coordinates(shape, vectors, at_once, entries)
    else:
        blocks = _compressed(layout == "csc", shape, vectors, at_once, entries)
    done = 0
    for block in blocks:
        done += len(block)
        yield block, sum(vector.consumed_bytes for vector in vectors) * done // max(1, entries[0] + done)


def _compressed(
    by_column: bool, shape: tuple[int, int], vectors: Sequence[Vector], at_once: int, entries: tuple[int, int]
) -> Iterator[Block]:
    data, indices, pointers = vectors
    num_major, num_minor = shape[::-1] if by_column else shape
    words = ("column", "row") if by_column else ("row", "column")
    previous = 0
    for first in range(0, max(num_major, 1), at_once):
        last = min(num_major, first + at_once)
        ends = _pointers(pointers, first, last, previous, indices.length, words[0])
        previous = int(ends[-1])
        beyond = min(previous, entries[1])
        for start in range(max(int(ends[0]), entries[0]), beyond, at_once):
            stop = min(beyond, start + at_once)
            low = int(np.searchsorted(ends, start, "right")) - 1
            high = int(np.searchsorted(ends, stop, "left"))
            counts = np.diff(np.clip(ends[low : high + 1], start, stop))
            major = np.repeat(np.arange(first + low, first + high, dtype=np.int64), counts)
            minor = _numbers(indices, start, stop, num_minor, words[1], words[0], major)
            rows, columns = (minor, major) if by_column else (major, minor)
            yield Block(rows, columns, _values(data, start, stop, rows, columns))
    if previous != indices.length:
        raise SourceError(f"{pointers.name} ends at {previous} but {indices.name} has {indices.length} numbers")


def _coordinates(
    shape: tuple[int, int], vectors: Sequence[Vector], at_once: int, entries: tuple[int, int]
) -> Iterator[Block]:
    data, rows, columns = vectors
    for start in range(*entries, at_once):
        stop = min(entries[1], start + at_once)
        major = _numbers(rows, start, stop, shape[0], "row", "entry", np.arange(start, stop))
        minor = _numbers(columns, start, stop, shape[1], "column", "row", major)
        yield Block(major, minor, _values(data, start, stop, major, minor))


def _pointers(vector: Vector, first: int, last: int, previous: int, num_entries: int, axis: str) -> np.ndarray:
    """Return the starts of rows ``first`` to ``last`` (excluded) and the end of the last: (last - first + 1,) int64.

    The first start is ``previous``, the end of the preceding row, because vectors are read only once. ``axis`` is the
    name of the axis, row or column, for messages.
    """
    start = 0 if first == 0 else first + 1
    read = vector.read(start, last + 1)
    ends = read.astype(np.int64)
    if first == 0:
        if ends[0] != 0:
            raise SourceError(f"{vector.name} starts with {read[0]} but must start with 0")
    else:
        ends = np.concatenate([[previous], ends])
    falls = np.flatnonzero(np.diff(ends) < 0)
    if len(falls):
        index = int(falls[0])
        raise SourceError(
            f"{vector.name} falls from {ends[index]} to {ends[index + 1]} at {axis} {first + index}: its numbers must "
            "never decrease"
        )
    beyond = np.flatnonzero(ends > num_entries)
    if len(beyond):
        index = int(beyond[0])
        raise SourceError(
            f"{vector.name} says that {axis} {first + index - 1} ends at entry {ends[index]}, but there are only "
            f"{num_entries} entries"
        )
    return ends


def _numbers(
    vector: Vector, start: int, stop: int, limit: int, axis: str, other_axis: str, other_numbers: np.ndarray
) -> np.ndarray:
    """Read row or column numbers below ``limit``, as int64.

    Messages name the ``axis``, and the row or column on the other axis that an invalid number belongs to.
    """
    read = vector.read(start, stop)
    if len(read) and (int(read.min()) < 0 or int(read.max()) >= limit):
        index = int(np.flatnonzero((read < 0) | (read >= limit))[0])
        raise SourceError(
            f"{vector.name}: {axis} {read[index]} in {other_axis} {other_numbers[index]} is out of range: there are "
            f"{limit} {axis}s, counted from 0"
        )
    return read.astype(np.int64)


def _values(vector: Vector, start: int, stop: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    values = native(vector.read(start, stop))
    check_finite(vector.name, values, rows, columns)
    return values


def dense_block(
    name: str, cells: np.ndarray, first: int, width: int, corner: tuple[int, int] = (0, 0), *, by_column: bool = False
) -> Block:
    """Return the nonzero values among ``cells``, (n,), the consecutive cells of a dense matrix from number ``first``.

    The cells are numbered row by row, or ``by_column``, with ``width`` cells per row or column. The matrix may be part
    of a larger one, in which its first cell is at ``corner`` (row, column). Raises SourceError for a value that is not
    finite; its message starts with ``name``.
    """
    indices = np.flatnonzero(cells)
    values = native(cells[indices])
    line, within = np.divmod(indices + first, width)
    rows, columns = (within, line) if by_column else (line, within)
    block = Block(rows + corner[0], columns + corner[1], values)
    check_finite(name, values, block.rows, block.columns)
    return block


def native(values: np.ndarray) -> np.ndarray:
    """Convert numbers to native byte order, and bool to uint8."""
    if values.dtype.kind == "b":
        return (values.view(np.uint8) != 0).astype(np.uint8)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def check_finite(name: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
    """Raise a SourceError that says the row and the column if a value is NaN or infinite. All arrays are (n,)."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise SourceError(
            f"{name}: the value at row {rows[index]}, column {columns[index]} is {values[index]}: values must be finite"
        )
