"""Detect the separator of delimited text, split its lines, and distinguish numbers, words and times."""

from __future__ import annotations

import contextlib
import csv
import re
from dataclasses import dataclass
from typing import Any

from h5chunk.sources.arrow import pyarrow
from h5chunk.sources.kinds import NAMED_SEPARATORS, TextOptions

BLANKS = re.compile(rb"[ \t]+")
EDGES = re.compile(rb"(?m)^ +| +\r?$")
EDGE = re.compile(rb"\A |\n | \r?\n| \r?\Z")
NUM_ALIKE = 20  # first lines that a separator must split into equal numbers of cells
COMMENTS = (b"#", b"%")
WHOLE = re.compile(rb"-?(0|[1-9][0-9]{0,18})")


@dataclass(frozen=True)
class Dialect:
    """The separator of cells, and whether cells may be in double quotes."""

    separator: bytes
    has_quotes: bool = True

    @property
    def mark(self) -> bytes:
        """The single character to which `translate` changes the separator."""
        return self.separator if len(self.separator) == 1 else b"\x1f"

    def translate(self, data: bytes) -> bytes:
        """Replace the separator between the cells of lines by `mark`."""
        if self.separator == b" ":
            data = BLANKS.sub(b" ", data) if b"  " in data or b"\t" in data else data
            return EDGES.sub(b"", data) if EDGE.search(data) else data
        return data if self.separator == self.mark else data.replace(self.separator, self.mark)

    def cells(self, line: bytes) -> list[bytes]:
        """Return the cells of one line."""
        line = self.translate(line)
        if not self.has_quotes or b'"' not in line:
            return line.split(self.mark)
        text = line.decode("utf-8", "surrogateescape")
        try:
            row = next(csv.reader([text], delimiter=self.mark.decode()), [])
        except csv.Error:  # parsing reports this line
            return line.split(self.mark)
        return [cell.encode("utf-8", "surrogateescape") for cell in row]


TAB, BLANK = Dialect(b"\t"), Dialect(b" ")
DIALECTS = (Dialect(b"::", has_quotes=False), TAB, Dialect(b"|"), Dialect(b";"), Dialect(b","), BLANK)


def guess_dialect(lines: list[bytes]) -> Dialect:
    """Guess the separator of a file from its first lines, at least one.

    It is the first separator in `DIALECTS` that splits all lines into equal numbers of cells, or else that splits each
    of the first two lines, or else that occurs in the first line, or else blanks. Tabs count as blanks if only this
    makes all cells of the first two lines numbers.
    """
    for must_agree in (True, False):
        sample = lines[: NUM_ALIKE if must_agree else 2]
        for dialect in DIALECTS:
            widths = {len(dialect.cells(line)) for line in sample}
            if min(widths) > 1 and (len(widths) == 1 or not must_agree):
                mixed = dialect == TAB and not _are_numbers(TAB, sample[:2]) and _are_numbers(BLANK, sample[:2])
                return BLANK if mixed else dialect
    return next((dialect for dialect in DIALECTS if dialect.separator in lines[0]), BLANK)


def dialect_of(options: TextOptions, lines: list[bytes]) -> Dialect:
    """Return the dialect that the options specify, and guess the rest from the first lines."""
    if options.separator is None:
        dialect = guess_dialect(lines)
    else:
        separator = NAMED_SEPARATORS.get(options.separator, options.separator)
        dialect = Dialect(separator.encode(), has_quotes=len(separator) == 1)
    return Dialect(dialect.separator, has_quotes=False) if not options.quotes else dialect


def _are_numbers(dialect: Dialect, lines: list[bytes]) -> bool:
    return all(is_number(cell) for line in lines for cell in dialect.cells(line))


def num_comments(lines: list[bytes], mark: str | None = None) -> int:
    """Count the comments and blank lines above the first line of data. ``mark`` begins comments, as # and % do."""
    marks = COMMENTS + ((mark.encode(),) if mark else ())
    return next((i for i, line in enumerate(lines) if line.strip() and not line.startswith(marks)), len(lines))


def is_whole(cell: bytes) -> bool:
    """Return whether a cell is an integer that fits int64, in canonical form."""
    cell = cell.strip(b" \t")
    return WHOLE.fullmatch(cell) is not None and -(1 << 63) <= int(cell) < 1 << 63


def is_number(cell: bytes | str) -> bool:
    """Return whether a cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in str(cell)


def time_type(cells: list[bytes]) -> Any:
    """Return the Arrow type for a column of times; None if they are neither numbers nor ISO 8601 dates."""
    if all(map(is_whole, cells)):
        return pyarrow.int64()
    if all(map(is_number, cells)):
        return pyarrow.float64()
    for kind in (pyarrow.timestamp("us"), pyarrow.timestamp("us", "UTC")):
        with contextlib.suppress(pyarrow.ArrowInvalid):
            pyarrow.array(cells, pyarrow.binary()).cast(pyarrow.string()).cast(kind)
            return kind
    return None
