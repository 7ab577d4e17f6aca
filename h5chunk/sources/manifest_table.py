"""Read the rows of a manifest: .csv, .tsv, JSON lines, or a list in the format of CelebA, also compressed.

A CelebA list starts with a line with the number of images, and with a header that omits the column of paths; the cells
of its rows are separated by blanks. JSON lines have an object per line, and all objects have the same keys.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import IO, Any

from h5chunk.errors import SourceError, as_text, count_text
from h5chunk.sources.foreign import describe
from h5chunk.sources.matrix.text import NOT_UTF8, unpacker
from h5chunk.sources.recognise import HEAD_BYTES, PACKINGS, UTF16_MARKS

MAX_LINE = 1 << 20  # characters
KINDS = "a manifest is a .csv, .tsv or .jsonl file (JSON lines: one object per line), which may be compressed"
NESTED = "\0"  # replaces a JSON value that is a list or an object

Rows = Iterator[tuple[int, list[str]]]  # line numbers and cells


class Table:
    """The columns and rows of an open manifest. Messages call it ``label``; ``name`` is its file name.

    Without ``encoding``, bytes that are not UTF-8 become lone surrogates, because paths may contain any bytes.
    """

    def __init__(self, label: str, name: str, raw: IO[bytes], encoding: str | None = None) -> None:
        self.label, self._encoding = label, encoding
        self._file = self._open(raw)
        self.declared: int | None = None  # number of rows that the first line of a CelebA list declares
        self.first_line = 1  # number of the header line
        lines = self._read_lines()
        stem, suffix = os.path.splitext(name.lower())
        suffix = os.path.splitext(stem)[1] if suffix in PACKINGS else suffix
        first, second = next(lines, ""), next(lines, "")
        is_json = first.lstrip()[:1] in ("{", "[") and suffix not in (".csv", ".tsv")
        if suffix == ".jsonl" or (is_json and second.lstrip().startswith("{")):
            self.columns, self._rows = self._open_json(chain([first, second], lines))
            return
        if is_json:
            raise self.error(1, f"is JSON: {KINDS}")
        if first.strip().isdecimal() and len(first) < 20 and second.strip() and "," not in second:  # a CelebA list
            self.columns, self.declared, self.first_line = ["path", *second.split()], int(first), 2
            self._rows = ((number, line.split()) for number, line in enumerate(lines, 3))
            return
        delimiter = "\t" if suffix == ".tsv" else next((mark for mark in ",;\t" if mark in first), ",")
        self.columns = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
        self._rows = self._delimited(chain([second], lines), delimiter)

    def _open(self, raw: IO[bytes]) -> io.TextIOWrapper:
        """Open the text, which may be compressed. Raises SourceError unless its beginning is text."""
        unpack = unpacker(raw.read(8))[1]
        raw.seek(0)
        head = self._checked(lambda: unpack(raw).read(HEAD_BYTES))
        raw.seek(0)
        encoding = self._encoding or ("utf-16" if head.startswith(UTF16_MARKS) else None)
        if b"\0" in head and encoding is None:
            what = describe(self.label, head) or (
                f"is not text: {KINDS}; write another table as .csv (pandas.read_parquet(file).to_csv('NEW.csv', "
                "index=False)), or pass the encoding of a text, such as --encoding utf-16-le"
            )
            raise SourceError(f"{self.label}: {what}")
        return io.TextIOWrapper(unpack(raw), encoding or "utf-8-sig", "strict" if encoding else "surrogateescape", "")

    def _checked(self, read: Any) -> Any:
        """Return ``read()``, and convert errors of reading and decoding to SourceError."""
        try:
            return read()
        except UnicodeError as error:
            encoding = self._encoding or "utf-16"
            raise SourceError(
                f"{self.label}: is not text in the encoding {encoding}: {error}: pass another (--encoding)"
            ) from None
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            problem = getattr(error, "strerror", None) or str(error) or "it is cut short"
            raise SourceError(f"{self.label}: cannot be read: {problem}") from None

    def error(self, line: int, problem: str) -> SourceError:
        """Return an error that names the file and a line."""
        return SourceError(f"{self.label}, line {line}: {problem}")

    def _read_lines(self) -> Iterator[str]:
        """Yield the lines of the file. Raises SourceError for a line of more than `MAX_LINE` characters."""
        read = partial(self._file.readline, MAX_LINE + 1)
        for number, line in enumerate(iter(partial(self._checked, read), ""), 1):
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
                    values = json.loads(line, parse_float=str)  # digits as they are written
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


def not_utf8(cell: str) -> str:
    """Return the problem with a cell or a name that UTF-8 cannot encode, for messages; "" if there is none."""
    try:
        cell.encode()
    except UnicodeEncodeError as error:
        is_byte = "\udc80" <= cell[error.start] <= "\udcff"
        return f"{as_text(cell[:60])!r} is {NOT_UTF8 if is_byte else 'not valid Unicode: correct it'}"
    return ""
