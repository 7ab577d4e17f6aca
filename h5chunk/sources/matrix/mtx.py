"""Read Matrix Market coordinate files (real, integer or pattern; general, symmetric or skew-symmetric); also .gz.

The blocks of a symmetric file have both triangles, although the file stores one. Source: Boisvert, Pozo, Remington,
"The Matrix Market Exchange Formats" (NISTIR 5935).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from h5chunk.errors import count_text
from h5chunk.sample_source import OpenContext
from h5chunk.sources.matrix.block import Block
from h5chunk.sources.matrix.dialect import BLANK
from h5chunk.sources.matrix.text import TextSource, quote_line, read_columns
from h5chunk.sources.options import one_of
from h5chunk.sources.recognise import has_suffix, text_lines
from h5chunk.store.hdf5.guard import MAX_RATIO

REAL, INTEGER, UNSIGNED = "float64", "int64", "uint64"
FIELDS = {"real": REAL, "integer": INTEGER, "unsigned-integer": UNSIGNED, "pattern": None}
SYMMETRIES = ("general", "symmetric", "skew-symmetric")
MIN_ENTRY_BYTES = 4  # "1 1" and the end of the line


class MtxSource(TextSource):
    """A Matrix Market file."""

    kind = "mtx"
    shape: tuple[int, int]
    pieces_in_memory = 10  # bytes of memory per byte read: text, pyarrow's columns, the block, its mirror image

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        first = text_lines(source, head)[:1]
        return has_suffix(source, ".mtx") or any(line.startswith(b"%%MatrixMarket") for line in first)

    def __init__(self, path: str, options: Any, context: OpenContext) -> None:
        super().__init__(path, options, context)
        lines = self._text.head_lines()
        self._read_banner(lines[0])
        self.num_skipped = 1 + next(
            (i for i, line in enumerate(lines) if i and line.strip() and not line.startswith(b"%")), len(lines)
        )
        if self.num_skipped > len(lines):
            self._text.fail("ends before the line with the numbers of rows, columns and entries", len(lines))
        self.shape, self._num_entries = self._read_size(lines[self.num_skipped - 1])

    def _read_banner(self, line: bytes) -> None:
        words = line.decode("latin-1").lower().split()
        if len(words) != 5 or words[:2] != ["%%matrixmarket", "matrix"]:
            self._text.fail(f"must be '%%MatrixMarket matrix coordinate ...' but is {quote_line(line)}", 1)
        layout, field, symmetry = words[2:]
        if layout != "coordinate":
            self._text.fail(f"its layout is {layout!r}, but only coordinate is supported: save it as .npy", 1)
        if field not in FIELDS:
            self._text.fail(f"its values are {field!r}, but only {one_of(list(FIELDS))} are supported: convert them", 1)
        has_no_signs = FIELDS[field] in (None, UNSIGNED)
        if symmetry not in SYMMETRIES or (has_no_signs and symmetry == "skew-symmetric"):
            self._text.fail(
                f"its symmetry is {symmetry!r}, but only {one_of(SYMMETRIES)}{f' (not of {field})' * has_no_signs} are "
                "supported: store both triangles, and declare the matrix general",
                1,
            )
        self._value_type = FIELDS[field]
        self._symmetry = symmetry

    def _read_size(self, line: bytes) -> tuple[tuple[int, int], int]:
        words = line.split()
        if len(words) != 3 or not all(word.isdigit() and len(word) < 19 for word in words):
            self._text.fail(f"must be numbers of rows, columns and entries but is {quote_line(line)}", self.num_skipped)
        rows, columns, entries = (int(word) for word in words)
        if self._symmetry != "general" and rows != columns:
            self._text.fail(f"is {self._symmetry}, but has {rows} rows and {columns} columns", self.num_skipped)
        if entries * MIN_ENTRY_BYTES > self.num_bytes * (MAX_RATIO if self._text.is_packed else 1):
            self._text.fail(
                f"claims {entries} entries but the file has {self.num_bytes} bytes: it is cut short, copy it again",
                self.num_skipped,
            )
        return (rows, columns), entries

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        num_entries, triangles = 0, set()
        for piece in self._pieces(max_bytes):
            rows, columns, values = self._parse(piece, self._read)
            num_entries += len(rows)
            if num_entries > self._num_entries:
                self._text.fail(f"has more entries than the {self._num_entries} that line {self.num_skipped} claims")
            if self._symmetry != "general":
                triangles |= set(np.unique(np.sign(rows - columns)).tolist()) - {0}
                if len(triangles) > 1:
                    self._text.fail(
                        f"is {self._symmetry}, but has entries on both sides of the diagonal, which is ambiguous: "
                        "keep one triangle, or declare the matrix general",
                        piece.line,
                    )
                off = rows != columns
                if values is not None:
                    sign = -1 if self._symmetry == "skew-symmetric" else 1
                    values = np.concatenate([values, sign * values[off]])
                rows, columns = np.concatenate([rows, columns[off]]), np.concatenate([columns, rows[off]])
            yield Block(rows, columns, values), piece.consumed_bytes
        if num_entries < self._num_entries:
            self._text.fail(
                f"cut short: {count_text(num_entries, 'entry')} but line {self.num_skipped} claims "
                f"{self._num_entries}: copy it again"
            )

    def _read(self, data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Parse the rows and columns, counted from 0, and the values. Raises ValueError if a line is invalid."""
        types = dict(enumerate([INTEGER, INTEGER, *([self._value_type] if self._value_type else [])]))
        read = read_columns(BLANK.translate(data), " ", False, len(types), types)
        rows, columns, *rest = (column.to_numpy() for column in read)
        values = rest[0] if rest else None
        for numbers, limit in ((rows, self.shape[0]), (columns, self.shape[1])):
            if len(numbers) and (int(numbers.min()) < 1 or int(numbers.max()) > limit):
                raise ValueError("a number is out of range")
        if values is not None and not np.isfinite(values).all():
            raise ValueError("a value is not finite")
        if self._symmetry == "skew-symmetric" and values is not None and (values[rows == columns] != 0).any():
            raise ValueError("the diagonal is not zero")
        return rows - 1, columns - 1, values

    def _refuse_line(self, line: int, text: bytes) -> NoReturn:
        words = text.split()
        kinds = [int, int] + ([] if self._value_type is None else [float if self._value_type == REAL else int])
        try:
            row, column, *rest = (kind(word) for kind, word in zip(kinds, words, strict=True))
        except ValueError:
            expected = "row and column" if len(kinds) == 2 else f"row, column and a value ({self._value_type})"
            self._text.fail(f"must be {expected} but is {quote_line(text)}", line)
        for word, number, limit in (("row", row, self.shape[0]), ("column", column, self.shape[1])):
            if not 1 <= number <= limit:
                self._text.fail(f"{word} {number} is out of range 1 to {limit}: {quote_line(text)}", line)
        if rest and not np.isfinite(float(rest[0])):
            self._text.fail(f"the value at row {row}, column {column} is {rest[0]}: values must be finite", line)
        if rest and rest[0] < 0 and self._value_type == UNSIGNED:
            self._text.fail(f"the value {rest[0]} is negative, but the values are unsigned: {quote_line(text)}", line)
        if rest and row == column and self._symmetry == "skew-symmetric":
            self._text.fail(f"is skew-symmetric, so that the diagonal must be zero: {quote_line(text)}", line)
        self._text.fail(f"cannot be read: {quote_line(text)}", line)
