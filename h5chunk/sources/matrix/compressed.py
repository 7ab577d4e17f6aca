"""Compressed rows, compressed columns and coordinates, from vectors that are read piece by piece, checked in full.

Knows neither zip nor HDF5: a vector has a length and a type and gives a range of its values. Nothing of it is believed:
pointers must start at 0, never fall and end at the number of entries; indices must be in range; values must be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from h5chunk.errors import SourceError
from h5chunk.sources.matrix.block import Block

ENTRY_BYTES = 64  # of memory for one entry: as read, as int64, masks
MIN_ENTRIES = 256


class Vector(Protocol):
    """One dimension of numbers in a file; ranges are asked for in ascending order.

    Attributes
    ----------
    name : str
        For messages: the file and the vector in it.
    """

    name: str
    length: int
    dtype: np.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read the values from ``start`` up to ``stop``."""


def check_kinds(
    shape: tuple[int, int], data: Vector | None, pointers: Vector | None, *indices: Vector
) -> tuple[int, int]:
    """Validate shape, lengths and types of a matrix before a value is read.

    Parameters
    ----------
    shape : (major, minor)
        As the pointers count.
    data, pointers : Vector, optional
    *indices : Vector
        One (compressed) or two (coordinates).

    Raises
    ------
    SourceError
        Lengths do not agree, or a type is no number of ours.
    """
    for length in shape:
        if not 0 <= length < 1 << 62:
            raise SourceError(f"{indices[0].name}: the matrix's shape {shape} cannot be")
    for vector in (*indices, *([pointers] if pointers is not None else [])):
        if vector.dtype.kind not in "iu":
            raise SourceError(f"{vector.name} has the type {vector.dtype} but must be whole numbers")
        if vector is not pointers and vector.length != indices[0].length:
            raise SourceError(f"{vector.name} has {vector.length} numbers but {indices[0].name} {indices[0].length}")
    if data is not None:
        check_values_type(data.name, data.dtype)
        if data.length != indices[0].length:
            raise SourceError(f"{data.name} has {data.length} values but {indices[0].name} {indices[0].length} numbers")
    if pointers is not None and pointers.length != shape[0] + 1:
        raise SourceError(
            f"{pointers.name} has {pointers.length} numbers but a matrix of {shape[0]} must have {shape[0] + 1}: one "
            "more than its rows, or columns if it is kept by columns"
        )
    return shape


def check_values_type(name: str, dtype: np.dtype) -> None:
    """Raise SourceError unless a type is that of real numbers of at most 64 bits."""
    if dtype.kind == "c":
        raise SourceError(f"{name} holds complex numbers ({dtype}): keep the real part, or the absolute value")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise SourceError(f"{name} has the type {dtype} but values must be whole or real numbers of at most 64 bits")


def compressed_blocks(
    shape: tuple[int, int],
    data: Vector | None,
    indices: Vector,
    pointers: Vector,
    *,
    by_column: bool,
    max_bytes: int,
    consumed: Callable[[], int],
) -> Iterator[tuple[Block, int]]:
    """Yield the entries of compressed rows, or columns, in stored order.

    Parameters
    ----------
    shape : (major, minor)
        For compressed columns (columns, rows).
    consumed : callable
        Bytes of the source read so far.
    """
    num_major, num_minor = shape
    words = ("column", "row") if by_column else ("row", "column")
    at_once = max(MIN_ENTRIES, max_bytes // ENTRY_BYTES)
    previous = 0
    for first in range(0, max(num_major, 1), at_once):
        last = min(num_major, first + at_once)
        ends = _pointers(pointers, first, last, previous, indices.length, words[0])
        previous = int(ends[-1])
        for start in range(int(ends[0]), previous, at_once):
            stop = min(previous, start + at_once)
            low = int(np.searchsorted(ends, start, "right")) - 1
            high = int(np.searchsorted(ends, stop, "left"))
            counts = np.diff(np.clip(ends[low : high + 1], start, stop))
            major = np.repeat(np.arange(first + low, first + high, dtype=np.int64), counts)
            minor = _numbers(indices, start, stop, num_minor, words[1], words[0], major)
            rows, columns = (minor, major) if by_column else (major, minor)
            yield Block(rows, columns, read_values(data, start, stop, rows, columns)), consumed()
    if previous != indices.length:
        raise SourceError(f"{pointers.name} ends at {previous} but {indices.name} has {indices.length} numbers")


def coordinate_blocks(
    shape: tuple[int, int],
    data: Vector | None,
    rows: Vector,
    columns: Vector,
    *,
    max_bytes: int,
    consumed: Callable[[], int],
) -> Iterator[tuple[Block, int]]:
    """Yield the entries of a matrix of coordinates in stored order."""
    at_once = max(MIN_ENTRIES, max_bytes // ENTRY_BYTES)
    for start in range(0, rows.length, at_once):
        stop = min(rows.length, start + at_once)
        major = _numbers(rows, start, stop, shape[0], "row", "entry", np.arange(start, stop))
        minor = _numbers(columns, start, stop, shape[1], "column", "row", major)
        yield Block(major, minor, read_values(data, start, stop, major, minor)), consumed()


def _pointers(vector: Vector, first: int, last: int, previous: int, num_entries: int, word: str) -> np.ndarray:
    """Where the rows ``first`` up to ``last`` start, and where the last one ends: (last - first + 1,) int64.

    Vectors are read once and in order, so that the first is what the piece above ended with.
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
        place = int(falls[0])
        raise SourceError(
            f"{vector.name} falls from {ends[place]} to {ends[place + 1]} at {word} {first + place}: it must never fall"
        )
    beyond = np.flatnonzero(ends > num_entries)
    if len(beyond):
        place = int(beyond[0])
        raise SourceError(
            f"{vector.name} has {ends[place]} at {word} {first + place - 1} but there are only {num_entries} entries"
        )
    return ends


def _numbers(
    vector: Vector, start: int, stop: int, limit: int, word: str, others: str, other: np.ndarray
) -> np.ndarray:
    """Checked numbers of rows or columns, int64; messages name the number on the other axis."""
    read = vector.read(start, stop)
    if len(read) and (int(read.min()) < 0 or int(read.max()) >= limit):
        place = int(np.flatnonzero((read < 0) | (read >= limit))[0])
        raise SourceError(
            f"{vector.name}: {word} {read[place]} in {others} {other[place]} is out of range: there are {limit} "
            f"{word}s, counted from 0"
        )
    return read.astype(np.int64)


def read_values(
    vector: Vector | None, start: int, stop: int, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray | None:
    """Read and check the values of a range of entries."""
    if vector is None:
        return None
    values = native(vector.read(start, stop))
    check_finite(vector.name, values, rows, columns)
    return values


def native(values: np.ndarray) -> np.ndarray:
    """Convert numbers to native byte order, and bool to uint8."""
    if values.dtype.kind == "b":
        return (values.view(np.uint8) != 0).astype(np.uint8)
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def check_finite(name: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
    """Refuse NaN and infinity.

    Raises
    ------
    SourceError
        Names the first one's row and column.
    """
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        place = int(np.flatnonzero(~np.isfinite(values))[0])
        raise SourceError(
            f"{name}: the value at row {rows[place]}, column {columns[place]} is {values[place]}: values must be finite"
        )
