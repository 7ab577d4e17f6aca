"""Read a manifest: a table with the path of each image, and further columns that become fields.

It is read once: the cells of each column are kept as packed bytes, whose type is determined at the end.

| column | becomes |
| --- | --- |
| 0 and 1 only | uint8 |
| -1 and 1 only (CelebA) | int8 |
| whole numbers | int64; strings if one does not fit |
| numbers, inf, nan | float64 |
| anything else | UTF-8 strings of fixed length, at most 256 bytes |
| ``label`` or ``labels``, as words | ``labels``, int64, with the sorted words as class names |

CelebA's own list is supported too: a line with the count, then a header without the path column, then lines separated
by blanks.
"""

from __future__ import annotations

import csv
import os
import posixpath
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TextIO

import numpy as np

from h5chunk.errors import SourceError, as_text, count_text, printable
from h5chunk.source import ENDS_IN_NULL, Names
from h5chunk.sources.container import Container, Folder, open_archive
from h5chunk.sources.listing import EXTENSIONS, Found, Listing, check_source
from h5chunk.stamp import stamp_of

PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "image_id", "image_path")
LABEL_COLUMNS = ("labels", "label")
RESERVED = ("images", "h5chunk")
MAX_STRING_BYTES = 256
MAX_LINE = 1 << 20  # characters
PACKED_ROWS = 4096
WHOLE = re.compile(rb"[+-]?[0-9]+")


def list_manifest(
    manifest: str | os.PathLike[str], source: str | os.PathLike[str], found: Found | None = None
) -> Listing:
    """List the images of a manifest, in its order, with its columns as fields.

    The manifest is a .csv, a .tsv or CelebA's list. Paths are relative to the source, and are in the column with a
    usual name (`PATH_COLUMNS`), otherwise in the first column.
    """
    path, source = Path(manifest), Path(source)
    check_source(path)
    if not path.is_file():  # opening a pipe would block
        raise SourceError(f"{printable(path)}: is not a regular file: give a table as a file")
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            return _list(_Table(path, file), source, found or (lambda count: None))
    except OSError as error:
        raise SourceError(f"{printable(path)}: cannot be read: {error.strerror}") from None


def _list(table: _Table, source: Path, found: Found) -> Listing:
    found(0)
    check_source(source)
    numbers: dict[bytes, int] = {}  # numbers of the members of an archive
    is_folder, root = source.is_dir(), os.fsencode(source)
    if is_folder:
        container: Container = Folder(source)
    else:
        container, members = open_archive(source)
        numbers = {posixpath.normpath(name): number for name, number in members if not name.endswith(b"/")}
    chosen = array("q")

    def paths() -> Iterator[bytes]:
        for line, row in table.rows():
            path = table.add(line, row)
            number = numbers.get(path, -1)
            if not (os.path.exists(os.path.join(root, path)) if is_folder else number >= 0):
                raise table.error(line, f"{printable(path)} is not in {printable(source)}")
            chosen.append(number)
            if len(chosen) % PACKED_ROWS == 0:
                found(len(chosen))
            yield path

    names = Names(paths())
    if not len(names):
        raise SourceError(f"{table.shown}: lists no images: it has no line below the header")
    if table.declared not in (None, len(names)):
        raise SourceError(f"{table.shown}: cut short: {len(names)} lines, but its first line says {table.declared}")
    found(len(names))
    container.select(np.frombuffer(chosen, np.int64))
    listing = Listing(container, names)
    table.fill(listing)
    return listing


class _Table:
    """A manifest that is read row by row; the cells of all columns except the paths are kept, packed as bytes."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.shown = printable(path)
        self._file, self._stamp = file, stamp_of(file.fileno())
        self._lines = self._read_lines()
        self.declared: int | None = None  # number of lines that CelebA's first line claims
        self._delimiter: str | None = "\t" if path.suffix.lower() == ".tsv" else ","
        first, second = next(self._lines, ""), next(self._lines, "")
        if first.strip().isdecimal() and len(first) < 20 and second.strip() and "," not in second:  # CelebA's own list
            self.columns, self._delimiter, self._skipped = ["path", *second.split()], None, 2
            self.declared = int(first)
        else:
            self.columns = [name.strip() for name in next(csv.reader([first], delimiter=self._delimiter), [])]
            self._lines, self._skipped = chain([second], self._lines), 1
        self._check_columns()
        usual = [i for i, name in enumerate(self.columns) if name.lower() in PATH_COLUMNS]
        self._path_column = usual[0] if usual else 0
        self._rows: list[list[str]] = []
        self._packed: list[list[np.ndarray]] = [[] for _ in self.columns]

    def _check_columns(self) -> None:
        line = self._skipped
        if not self.columns or not all(self.columns):
            raise self.error(line, "the header must name every column")
        twice = [name for name, count in Counter(self.columns).items() if count > 1]
        if twice:
            raise self.error(line, f"two columns are called {twice[0]!r}")
        for name in self.columns:
            if os.fsencode(name).lower().endswith(EXTENSIONS):
                raise self.error(line, f"{printable(name)} is an image: put a line with the columns' names first")
            if "/" in name or name == "." or not name.isprintable():
                raise self.error(line, f"column {name!r} cannot be the name of a field: rename it, without '/'")
            if name in RESERVED:
                raise self.error(line, f"column {name!r} has a name that files reserve for other data: rename it")

    def error(self, line: int, what: str) -> SourceError:
        return SourceError(f"{self.shown}, line {line}: {what}")

    def _read_lines(self) -> Iterator[str]:
        """Yield the lines of the file; no line may take unbounded memory."""
        number = 0
        while line := self._file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise self.error(number, f"longer than the limit of {MAX_LINE} characters: is this a table?")
            yield line

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (line number, cells) for each line below the header that is not blank."""
        if self._delimiter is None:
            lines = ((number, line.split()) for number, line in enumerate(self._lines, self._skipped + 1))
        else:
            reader = csv.reader(self._lines, delimiter=self._delimiter, strict=True)
            lines = ((reader.line_num + self._skipped, [cell.strip() for cell in row]) for row in reader)
        number = self._skipped
        try:
            for number, row in lines:
                if not row:
                    continue
                if len(row) != len(self.columns):
                    raise self.error(number, f"{count_text(len(row), 'column')} but the header has {len(self.columns)}")
                yield number, row
        except csv.Error as error:
            raise self.error(number + 1, str(error)) from None
        if stamp_of(self._file.fileno()) != self._stamp:
            raise SourceError(f"{self.shown}: changed while it was read")

    def add(self, line: int, row: list[str]) -> bytes:
        """Add the cells of a row, and return its path."""
        if not all(row):
            name = self.columns[row.index("")]
            raise self.error(line, f"column {name!r} is empty: fill it or drop the column")
        path = posixpath.normpath(os.fsencode(row[self._path_column]))
        if path.startswith((b"/", b"../")) or path in (b"..", b"."):
            raise self.error(line, f"path {printable(path)} is outside of the source: give paths below it")
        self._rows.append(row)
        if len(self._rows) == PACKED_ROWS:
            self._pack()
        return path

    def _pack(self) -> None:
        for number, name in enumerate(self.columns):
            if number == self._path_column:
                continue
            cells = [as_text(row[number]).encode() for row in self._rows]
            longest = max(map(len, cells), default=0)
            if any(cell.endswith(b"\0") for cell in cells):
                raise SourceError(f"column {name!r} holds a string that {ENDS_IN_NULL}")
            if longest > MAX_STRING_BYTES:
                raise SourceError(
                    f"column {name!r} holds a string of {longest} bytes but the limit is {MAX_STRING_BYTES}: shorten "
                    "it or drop the column"
                )
            self._packed[number].append(np.array(cells, f"S{max(1, longest)}"))
        self._rows = []

    def fill(self, listing: Listing) -> None:
        """Add the columns to a listing."""
        self._pack()
        columns = {name: packed for name, packed in zip(self.columns, self._packed, strict=True) if packed}
        label = next((name for name in columns if name.lower() in LABEL_COLUMNS), None)
        for name, packed in columns.items():
            values = _typed(np.concatenate(packed))
            if name == label:
                name = "labels"
                if values.dtype.kind == "S":
                    classes, values = np.unique(values, return_inverse=True)
                    listing.class_names = [as_text(word) for word in classes.tolist()]
                values = values if values.dtype.kind == "f" else values.astype(np.int64)
            if name in listing.columns:
                raise SourceError(f"two columns would become the field {name!r}: rename one")
            listing.columns[name] = values


def _typed(words: np.ndarray) -> np.ndarray:
    """Convert the words of a column to numbers, if all of them are numbers."""
    if b"_" in words.tobytes():  # allowed in Python's numbers
        return words
    try:
        numbers = words.astype(np.int64)
    except (ValueError, OverflowError):
        try:
            floats = words.astype(np.float64)
        except ValueError:
            return words
        return words if all(map(WHOLE.fullmatch, words.tolist())) else floats
    for small, values in ((np.uint8, (0, 1)), (np.int8, (-1, 1))):
        if np.isin(numbers, values).all():
            return numbers.astype(small)
    return numbers
