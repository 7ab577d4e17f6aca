"""Read the rows of a manifest: .csv, .tsv, JSON lines, or a list in the format of CelebA.

A CelebA list starts with a line with the number of images, and with a header that omits the column of paths; the cells
of its rows are separated by blanks. JSON lines have an object per line, and all objects have the same keys.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, TextIO

from h5chunk.errors import SourceError, count_text

MAX_LINE = 1 << 20  # characters
NESTED = "\0"  # replaces a JSON value that is a list or an object

Rows = Iterator[tuple[int, list[str]]]  # line numbers and cells


class Table:
    """The columns and rows of an open manifest. Messages call it ``label``; ``name`` is its file name."""

    def __init__(self, label: str, name: str, file: TextIO) -> None:
        self.label, self._file = label, file
        self.declared: int | None = None  # number of rows that the first line of a CelebA list declares
        self.first_line = 1  # number of the header line
        lines = self._read_lines()
        if name.lower().endswith(".jsonl"):
            self.columns, self._rows = self._open_json(lines)
            return
        first, second = next(lines, ""), next(lines, "")
        if first.strip().isdecimal() and len(first) < 20 and second.strip() and "," not in second:  # a CelebA list
            self.columns, self.declared, self.first_line = ["path", *second.split()], int(first), 2
            self._rows = ((number, line.split()) for number, line in enumerate(lines, 3))
            return
        delimiter = "\t" if name.lower().endswith(".tsv") else next((mark for mark in ",;\t" if mark in first), ",")
        self.columns = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
        self._rows = self._delimited(chain([second], lines), delimiter)

    def error(self, line: int, problem: str) -> SourceError:
        """Return an error that names the file and a line."""
        return SourceError(f"{self.label}, line {line}: {problem}")

    def _read_lines(self) -> Iterator[str]:
        """Yield the lines of the file. Raises SourceError for a line of more than `MAX_LINE` characters."""
        for number, line in enumerate(iter(partial(self._file.readline, MAX_LINE + 1), ""), 1):
            if len(line) > MAX_LINE:
                raise self.error(number, f"is longer than {MAX_LINE} characters: check that the file is a table")
            yield line

    def _delimited(self, lines: Iterable[str], delimiter: str) -> Rows:
        """Yield the rows of the lines below the header."""
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        number = 1
        try:
            for row in reader:
                number = reader.line_num + 1
                yield number, [cell.strip() for cell in row]
        except csv.Error as error:
            raise self.error(number + 1, str(error)) from None

    def _open_json(self, lines: Iterable[str]) -> tuple[list[str], Rows]:
        """Return the columns of JSON lines, which are the keys of the first object, and their rows."""
        objects = self._objects(lines)
        first = next(objects, (1, {}))
        columns = list(first[1])

        def rows() -> Rows:
            for number, values in chain([first] if columns else [], objects):
                if values.keys() != {*columns}:
                    differing = sorted(values.keys() ^ {*columns})[0]
                    raise self.error(number, f"some lines lack the key {differing!r}: use the same keys in all lines")
                yield number, [_text(values[name]) for name in columns]

        return columns, rows()

    def _objects(self, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise self.error(number, f"is not JSON: {error}") from None
                if not isinstance(values, dict):
                    raise self.error(
                        number, 'is not an object: write one object per line, such as {"file_name": "1.png"}'
                    )
                yield number, values

    def rows(self) -> Rows:
        """Yield (line number, cells) for each line below the header, except blank lines."""
        for number, row in self._rows:
            if row and len(row) != len(self.columns):
                raise self.error(
                    number, f"has {count_text(len(row), 'column')}, but the header has {len(self.columns)}"
                )
            if row:
                yield number, row


def _text(value: Any) -> str:
    """Format a JSON value like a cell of a .csv: null is empty, and booleans are 0 and 1."""
    if value is None or isinstance(value, str):
        return (value or "").strip().replace("\0", "\ufffd")
    if isinstance(value, (list, dict)):
        return NESTED
    return str(int(value)) if isinstance(value, bool) else json.dumps(value)
