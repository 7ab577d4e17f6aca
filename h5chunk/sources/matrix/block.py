"""The interface of all readers of sparse matrices.

A source knows its file, but not how its data is used. It checks what the file claims before trusting it, names row,
column or line in errors, and accepts any finite value of any type: which values fit the output, and how duplicates are
combined, is decided by the converter.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any, ClassVar

import numpy as np

from h5chunk.errors import SourceError, human_bytes, printable
from h5chunk.source import OpenContext
from h5chunk.sources.kinds import MatrixSourceOptions
from h5chunk.sources.options import Options
from h5chunk.stamp import stamp_of


@dataclass(frozen=True)
class Block:
    """A block of n entries of a sparse matrix; arrays may be read-only.

    Rows and columns are int64, counted from 0; or if the source has ids (`SparseSource.has_ids`) the raw ids, int64 or
    fixed-length bytes (``S``, UTF-8) whose length may differ from block to block. Values are finite, of any numeric
    type, and zeros that a sparse file holds are kept; None in all blocks of a pattern, whose entries are all one.
    """

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray | None
    times: np.ndarray | None = None  # int64: time of each entry, in any unit, if requested and known
    first_line: int | None = None  # line of the first entry, from 1, if every entry is a line and no lines are skipped

    def __len__(self) -> int:
        return len(self.rows)


class SparseSource:
    """Base class of the readers of sparse matrices.

    Sizes in ``shape`` are None if only reading shows them (delimited files; the columns of libsvm). Raw ids
    (``has_ids``) are numbered in ascending order: integers by value, strings by their bytes; an axis has one of these
    types in all blocks. ``row_fields`` are of fixed-size types, (rows,) each, such as h5ad's ``obs``;
    ``categories`` give the meaning of a field's codes; code -1 means missing. ``row_names`` and ``column_names`` are
    UTF-8 of a fixed length, such as barcodes. ``time_name`` is the column that ``times`` of blocks are from.
    """

    kind: str
    noun: ClassVar[str] = "sparse matrices"
    Options: ClassVar[type[Options]] = MatrixSourceOptions
    path: str
    shape: tuple[int | None, int | None]
    num_bytes: int  # bytes to read, for progress
    axes: tuple[str, str] = ("rows of the source", "columns of the source")  # what rows and columns are, for reports
    has_ids: bool = False
    is_sorted_by_row: bool = False  # whether rows are in ascending order, within and across blocks
    row_fields: Mapping[str, np.ndarray] = MappingProxyType({})
    categories: Mapping[str, list[str]] = MappingProxyType({})
    row_names: np.ndarray | None = None
    column_names: np.ndarray | None = None
    column_symbols: np.ndarray | None = None  # names for people beside the column names, such as symbols of genes
    time_name: str | None = None
    ignored: Mapping[str, str] = MappingProxyType({})  # fields that are left out, with the reason
    notes: Sequence[str] = ()  # for the report

    def __init__(self, path: str, options: Any, context: OpenContext) -> None:
        raise NotImplementedError

    @classmethod
    def open(cls, source: Any, options: Any, context: OpenContext) -> SparseSource:
        """Open a source; read no more than its description."""
        return cls(os.fspath(source), options, context)

    def files(self) -> Sequence[str]:
        """Return the paths of all files that the matrix is read from."""
        return (self.path,)

    def identity(self) -> dict[str, Any] | None:
        """Return a JSON fingerprint: equal fingerprints mean equal entries. None if the source has none."""
        return {"kind": self.kind, "stamps": [stamp_of(path, with_ctime=True) for path in self.files()]}

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        """Yield the entries block by block, with the bytes of the source read so far; all calls yield the same blocks.

        Reading takes about ``max_bytes`` of memory, the blocks included. SourceErrors name the line, or row and column.
        """
        raise NotImplementedError


class Transposed(SparseSource):
    """The transpose of a source; its row fields are left out, because they now belong to columns."""

    def __init__(self, source: SparseSource) -> None:
        self._source = source
        self.path, self.kind, self.num_bytes = source.path, source.kind, source.num_bytes
        self.has_ids, self.time_name = source.has_ids, source.time_name
        self.shape, self.axes = source.shape[::-1], source.axes[::-1]
        self.row_names, self.column_names = source.column_names, source.row_names
        self.notes = source.notes

    def files(self) -> Sequence[str]:
        return self._source.files()

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        for block, done in self._source.blocks(max_bytes):
            yield Block(block.columns, block.rows, block.values, block.times, block.first_line), done


class MemoryLimit:
    """Limit on the memory of one source: what the file claims is checked before memory is allocated."""

    def __init__(self, path: str | os.PathLike[str], memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self._name = printable(path)
        self._held_bytes = 0

    def check(self, claim: str, num_bytes: int, part_read: float = 1.0) -> None:
        """Raise SourceError if the data that the source claims, with the data that it already keeps, exceeds memory.

        ``part_read`` is the fraction of the source read so far, from 0 to 1; the rest is assumed to be similar.
        """
        if self._held_bytes + num_bytes <= self.memory_bytes:
            return
        held = f" in addition to {human_bytes(self._held_bytes)} of names and fields" if self._held_bytes else ""
        where = f" in the first {part_read:.0%} of the file" if part_read < 1 else ""
        needed = self._held_bytes + int(num_bytes / max(part_read, 0.01))
        unit, letter = (1 << 30, "G") if needed >= 1 << 30 else (1 << 20, "M")
        raise SourceError(
            f"{self._name}: claims {claim}{where}, which take {human_bytes(num_bytes)} of memory{held}, over the "
            f"limit of {human_bytes(self.memory_bytes)}: if this is right, allow more "
            f"(--memory-bytes {-(-needed // unit)}{letter})"
        )

    def keep(self, claim: str, num_bytes: int) -> None:
        """Check and count memory that the source keeps until it is converted."""
        self.check(claim, num_bytes)
        self._held_bytes += num_bytes


class RegularFile:
    """A regular file that is not empty, and must not change while it is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            status = os.stat(self.path)
        except (OSError, ValueError) as error:
            raise self.error(f"cannot be read: {getattr(error, 'strerror', error)}") from None
        if not stat.S_ISREG(status.st_mode):
            raise self.error("not a regular file")
        if not status.st_size:
            raise self.error("is empty (0 bytes)")
        self.num_bytes, self._stamp = status.st_size, stamp_of(status)

    def error(self, what: str) -> SourceError:
        return SourceError(f"{printable(self.path)}: {what}")

    @contextmanager
    def reading(self) -> Iterator[IO[bytes]]:
        """Open the file in a context, after checking that it is unchanged; an OSError becomes a SourceError."""
        try:
            with open(self.path, "rb") as file:  # noqa: PTH123
                self.check_unchanged(file.fileno())
                yield file
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from None

    def check_unchanged(self, descriptor: int) -> None:
        if stamp_of(descriptor) != self._stamp:
            raise self.error("changed while it was read")
