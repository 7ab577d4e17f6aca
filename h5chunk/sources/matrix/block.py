"""The interface of all readers of sparse matrices.

A source validates the sizes that a file claims before it allocates memory, names the row, column or line in errors, and
yields finite values of any numeric type. The converter decides which values the output can store, and how duplicates
are combined.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any, ClassVar

import numpy as np

from h5chunk.errors import SourceError, exact_bytes, human_bytes, printable
from h5chunk.sample_source import OpenContext
from h5chunk.sources.kinds import MatrixSourceOptions
from h5chunk.sources.options import Options
from h5chunk.stamp import source_stamp, stamp_of

MIN_PART_BYTES = 4 << 20  # minimum size of the parts of a source that is split


@dataclass(frozen=True)
class Block:
    """A block of n entries of a sparse matrix, as (n,) arrays, which may be read-only.

    Rows and columns are int64, counted from 0. If the source has ids (`SparseSource.has_ids`), rows and columns are
    these ids: int64, or fixed-length bytes (``S``, UTF-8) whose length may differ from block to block. Values are
    finite and of any numeric type; explicit zeros are kept. If all entries of a matrix are 1, ``values`` may be None in
    all of its blocks.
    """

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray | None
    times: np.ndarray | None = None  # int64: the time of each entry, in any unit, if requested and known
    first_line: int | None = None  # line of the first entry, from 1, if entry i is on line first_line + i

    def __len__(self) -> int:
        return len(self.rows)


class SparseSource:
    """Base class of the readers of sparse matrices.

    Ids of rows or columns are all integers, or all strings. The converter numbers them in ascending order: integers by
    value, strings by their bytes. Names of rows and columns are fixed-length bytes (``S``, UTF-8).
    """

    kind: str
    noun: ClassVar[str] = "sparse matrices"
    Options: ClassVar[type[Options]] = MatrixSourceOptions
    path: str
    shape: tuple[int | None, int | None]  # None for a size that is unknown until all entries are read
    num_bytes: int  # bytes to read, for progress
    axes: tuple[str, str] = ("rows of the source", "columns of the source")  # names of the axes, for reports
    has_ids: bool = False  # whether blocks have ids in place of row and column numbers
    row_fields: Mapping[str, np.ndarray] = MappingProxyType({})  # (rows,) of fixed-size dtypes, such as h5ad's obs
    categories: Mapping[str, list[str]] = MappingProxyType({})  # names of the codes of a field; code -1: no category
    row_names: np.ndarray | None = None  # (rows,), such as barcodes
    column_names: np.ndarray | None = None  # (columns,), such as ids of genes
    column_symbols: np.ndarray | None = None  # (columns,): second names, such as symbols of genes
    time_name: str | None = None  # name of the column of times, if blocks have times
    entry_types: Mapping[str, str] = MappingProxyType({})  # how ids and times are read; files read as one must agree
    pair_option: str = ""  # the option that reads entries without their values, for messages; empty if there is none
    types_remedy: ClassVar[str] = "write them alike"  # for files whose ``entry_types`` differ
    ignored: Mapping[str, str] = MappingProxyType({})  # fields that are left out, with the reason
    notes: Sequence[str] = ()  # for the report
    reads_folders: ClassVar[bool] = False  # whether a folder is one source, rather than several
    has_parts: ClassVar[bool] = False  # whether `blocks` can read a part alone
    part: tuple[int, int] = (0, 1)  # the number of the part that `blocks` reads, and the number of parts

    def __init__(self, path: str, options: Any, context: OpenContext) -> None:
        raise NotImplementedError

    @classmethod
    def open(cls, source: Any, options: Any, context: OpenContext) -> SparseSource:
        """Open a source without reading its entries."""
        return cls(os.fspath(source), options, context)

    def files(self) -> Sequence[str]:
        """Return the paths of all files that the matrix is read from."""
        return (self.path,)

    def identity(self) -> dict[str, Any] | None:
        """Return a fingerprint that JSON can store, or None. Sources with equal fingerprints have equal entries."""
        return {
            "kind": self.kind,
            "stamps": [source_stamp(path) if os.path.exists(path) else () for path in self.files()],
        }

    def split(self, num_parts: int) -> Sequence[SparseSource]:
        """Return sources that can be read independently. Their entries, one after another, are those of this source."""
        num_parts = min(num_parts, max(1, self.num_bytes // MIN_PART_BYTES)) if self.has_parts else 1
        parts = [copy(self) for _ in range(num_parts)]
        for number, part in enumerate(parts):
            part.part, part.num_bytes = (number, num_parts), self.num_bytes // num_parts
        return parts

    def range_of(self, count: int) -> tuple[int, int]:
        """Return the range, (first, end), of this part's items if ``count`` items are divided among the parts."""
        number, num_parts = self.part
        return count * number // num_parts, count * (number + 1) // num_parts

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        """Yield each block of entries with the number of bytes of the source read so far.

        All calls yield the same blocks. Reading takes about ``max_bytes`` of memory, including the blocks. Raises
        SourceError for invalid data; the message names the line, or the row and column.
        """
        raise NotImplementedError


class Transposed(SparseSource):
    """The transpose of a source.

    The source's row fields are left out, because they would belong to columns, for which files store no fields.
    """

    def __init__(self, source: SparseSource) -> None:
        self._source = source
        self.path, self.kind, self.num_bytes = source.path, source.kind, source.num_bytes
        self.has_ids, self.time_name = source.has_ids, source.time_name
        self.shape, self.axes = source.shape[::-1], source.axes[::-1]
        self.row_names, self.column_names = source.column_names, source.row_names
        self.notes = source.notes

    def files(self) -> Sequence[str]:
        return self._source.files()

    def split(self, num_parts: int) -> Sequence[SparseSource]:
        return [Transposed(part) for part in self._source.split(num_parts)]

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        for block, done in self._source.blocks(max_bytes):
            yield Block(block.columns, block.rows, block.values, block.times, block.first_line), done


class MemoryLimit:
    """The memory limit of a source, against which claimed sizes are checked before memory is allocated."""

    def __init__(self, path: str | os.PathLike[str], memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self._name = printable(path)
        self._held_bytes = 0

    def check(self, claim: str, num_bytes: int, part_read: float = 1.0) -> None:
        """Raise SourceError if ``num_bytes`` more would exceed the limit. The message says that they are for ``claim``.

        ``part_read`` is the fraction of the source read so far, from 0 to 1. The limit that the message recommends
        assumes that the rest needs as much memory per byte.
        """
        if self._held_bytes + num_bytes <= self.memory_bytes:
            return
        held = f" in addition to {human_bytes(self._held_bytes)} of names and fields" if self._held_bytes else ""
        where = f" in the first {part_read:.0%} of the file" if part_read < 1 else ""
        needed = self._held_bytes + int(num_bytes / max(part_read, 0.01))
        unit, letter = (1 << 30, "G") if needed >= 1 << 30 else (1 << 20, "M")
        raise SourceError(
            f"{self._name}: claims {claim}{where}, which take {exact_bytes(num_bytes)} of memory{held}, over the "
            f"limit of {exact_bytes(self.memory_bytes)}: if this is right, allow more "
            f"(--memory-bytes {-(-needed // unit)}{letter})"
        )

    def keep(self, claim: str, num_bytes: int) -> None:
        """Check memory that the source holds until it is closed, and include it in later checks."""
        self.check(claim, num_bytes)
        self._held_bytes += num_bytes


class RegularFile:
    """A regular, nonempty file that must not change while it is read. Raises SourceError otherwise."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            status = os.stat(self.path)
        except (OSError, ValueError) as error:
            raise self.error(f"cannot be read: {getattr(error, 'strerror', error)}") from None
        if not stat.S_ISREG(status.st_mode):
            raise self.error("is not a regular file")
        if not status.st_size:
            raise self.error("is empty (0 bytes)")
        self.num_bytes, self._stamp = status.st_size, stamp_of(status)

    def error(self, problem: str) -> SourceError:
        return SourceError(f"{printable(self.path)}: {problem}")

    @contextmanager
    def reading(self) -> Iterator[IO[bytes]]:
        """Open the file in a context. Raises SourceError if the file has changed or cannot be read."""
        try:
            with open(self.path, "rb") as file:  # noqa: PTH123
                self.check_unchanged(file.fileno())
                yield file
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from None

    def check_unchanged(self, descriptor: int) -> None:
        """Raise SourceError if the open file ``descriptor`` has changed, or is another file."""
        if stamp_of(descriptor) != self._stamp:
            raise self.error("changed while it was read")
