"""A manifest: a table with the path of each image and further columns that become fields.

Read twice: once to learn what each column holds, once to fill an array, so that memory is the arrays' own.

| column | becomes |
| --- | --- |
| 0 and 1 only | uint8 |
| -1 and 1 only (CelebA) | int8 |
| whole numbers | int64; strings if one does not fit |
| numbers, inf, nan | float64 |
| anything else | UTF-8 strings of fixed length, at most 256 bytes |
| the one called ``label`` or ``labels``, as words | ``labels``, int64, with the sorted words as class names |

CelebA's own list (a line with the count, then a header that does not name the path column, then lines separated by
blanks) is read as well.
"""

from __future__ import annotations

import csv
import os
import posixpath
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from h5chunk.errors import SourceError, as_text, printable
from h5chunk.sources.container import Folder, open_archive
from h5chunk.sources.listing import EXTENSIONS, Found, Listing, Names, check_source

PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "image_id", "image_path")
LABEL_COLUMNS = ("labels", "label")
RESERVED = ("images", "h5chunk")
MAX_STRING_BYTES = 256
MAX_LINE = 1 << 20  # characters


def list_manifest(
    manifest: str | os.PathLike[str], source: str | os.PathLike[str], found: Found | None = None
) -> Listing:
    """List the images that a manifest names, in its order, with its columns as fields.

    Parameters
    ----------
    manifest : path
        .csv, .tsv or CelebA's list; first line: names of the columns. The path column is the one with a usual
        name (`PATH_COLUMNS`), else the first.
    source : path
        The folder, .zip or .tar that its paths are relative to.
    found : callable, optional
        Called now and then with the number of lines read.

    Raises
    ------
    SourceError
        A line or column cannot be used; names file, line and column.
    """
    table = _Table(Path(manifest))
    found = found or (lambda count: None)
    kinds = [_Kind() for _ in table.columns]
    count = 0
    for line, row in table.rows():
        for position, (kind, text) in enumerate(zip(kinds, row, strict=True)):
            if not text:
                raise table.error(line, f"column {table.columns[position]!r} is empty: fill it or drop the column")
            if position != table.path_column:
                kind.add(text)
        count += 1
        if count % 4096 == 0:
            found(count)
    if not count:
        raise SourceError(f"{printable(manifest)}: no images listed: there is no line below the header")
    if table.declared not in (None, count):
        raise SourceError(f"{printable(manifest)}: cut short: {count} lines but its first line says {table.declared}")
    found(count)
    listing = _open(table, Path(source), count)
    _fill_columns(listing, table, kinds, count)
    return listing


class _Table:
    """The rows of a manifest, split into cells."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._skip = 1
        check_source(path)
        try:
            if not path.is_file():  # a pipe would be waited for, and could not be read twice
                raise SourceError(f"{printable(path)}: is no regular file: give a table as a file")
            with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                self._stamp = _stamp(file)
                lines = self._lines(file)
                first, second = next(lines, ""), next(lines, "")
        except OSError as error:
            raise SourceError(f"{printable(path)}: cannot be read: {error.strerror}") from None
        self.declared: int | None = None  # number of lines that the file itself says it has
        self._delimiter: str | None = "\t" if path.suffix.lower() == ".tsv" else ","
        if first.strip().isdecimal() and len(first) < 20 and second.strip() and "," not in second:  # CelebA's own list
            self.columns, self._delimiter, self._skip = ["path", *second.split()], None, 2
            self.declared = int(first)
        else:
            self.columns = [name.strip() for name in next(csv.reader([first], delimiter=self._delimiter), [])]
        self._check_columns()
        usual = [i for i, name in enumerate(self.columns) if name.lower() in PATH_COLUMNS]
        self.path_column = usual[0] if usual else 0

    def _check_columns(self) -> None:
        if not self.columns or not all(self.columns):
            raise self.error(self._skip, "the header must name every column")
        twice = [name for name, count in Counter(self.columns).items() if count > 1]
        if twice:
            raise self.error(self._skip, f"two columns are called {twice[0]!r}")
        for name in self.columns:
            if os.fsencode(name).lower().endswith(EXTENSIONS):
                raise self.error(self._skip, f"{printable(name)} is an image: put a line with the columns' names first")
            if "/" in name or name == "." or not name.isprintable():
                raise self.error(self._skip, f"column {name!r} cannot be the name of a field: rename it, without '/'")
            if name in RESERVED:
                raise self.error(self._skip, f"column {name!r} has the name of something else in the file: rename it")

    def error(self, line: int, what: str) -> SourceError:
        return SourceError(f"{printable(self._path)}, line {line}: {what}")

    def _lines(self, file: TextIO) -> Iterator[str]:
        """The lines of the file, of which none may take unbounded memory."""
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise self.error(number, f"longer than the limit of {MAX_LINE} characters: is this a table?")
            yield line

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """(line number, cells) of each line below the header that is not blank."""
        with self._path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            self._check(file)
            text = self._lines(file)
            for _ in range(self._skip):
                next(text, "")
            if self._delimiter is None:
                lines = ((number, line.split()) for number, line in enumerate(text, self._skip + 1))
            else:
                reader = csv.reader(text, delimiter=self._delimiter, strict=True)
                lines = ((reader.line_num + self._skip, [cell.strip() for cell in row]) for row in reader)
            number = self._skip
            try:
                for number, row in lines:
                    if not row:
                        continue
                    if len(row) != len(self.columns):
                        raise self.error(number, f"{len(row)} columns but the header has {len(self.columns)}")
                    yield number, row
            except csv.Error as error:
                raise self.error(number + 1, str(error)) from None
            self._check(file)

    def _check(self, file: TextIO) -> None:
        if _stamp(file) != self._stamp:
            raise SourceError(f"{printable(self._path)}: changed while it was read")


def _stamp(file: TextIO) -> tuple[int, int, int]:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass
class _Kind:
    """The type of a column, inferred cell by cell."""

    whole: bool = True
    fits: bool = True  # whole numbers in 64 bits
    number: bool = True
    small: frozenset[int] = frozenset()  # the values, while they are few
    longest: int = 0

    def add(self, text: str) -> None:
        if self.whole:
            try:
                value = int(text)
                self.whole = "_" not in text
                self.fits = self.fits and -(1 << 63) <= value < 1 << 63
                if len(self.small) < 3 and value not in self.small:
                    self.small |= {value}
            except ValueError:
                self.whole = False
        if not self.whole and self.number:
            try:
                float(text)
                self.number = "_" not in text
            except ValueError:
                self.number = False
        self.longest = max(self.longest, len(_stored(text)))

    @property
    def dtype(self) -> np.dtype:
        if self.whole and self.fits:
            if self.small <= {0, 1}:
                return np.dtype(np.uint8)
            return np.dtype(np.int8) if self.small <= {-1, 1} else np.dtype(np.int64)
        return np.dtype(np.float64) if self.number and not self.whole else np.dtype(f"S{self.longest}")


def _stored(text: str) -> bytes:
    """Encode a string as UTF-8; bytes that are not UTF-8 are escaped."""
    return as_text(text).encode()


def _open(table: _Table, source: Path, count: int) -> Listing:
    """Match the manifest's paths with what the source holds."""
    check_source(source)
    lines = []
    if source.is_dir():
        container = Folder(source)
        root = os.fsencode(source)

        def names() -> Iterator[bytes]:
            for line, row in table.rows():
                name = _checked(table, line, row[table.path_column])
                if not os.path.exists(os.path.join(root, name)):
                    raise table.error(line, f"{printable(name)} is not in {printable(source)}")
                yield name

        return Listing(container, Names(names()))
    archive, members = open_archive(source)
    numbers = {posixpath.normpath(name): number for name, number in members if not name.endswith(b"/")}

    def found_names() -> Iterator[bytes]:
        for line, row in table.rows():
            name = _checked(table, line, row[table.path_column])
            if name not in numbers:
                raise table.error(line, f"{printable(name)} is not in {printable(source)}")
            lines.append(numbers[name])
            yield name

    listing = Listing(archive, Names(found_names()))
    archive.select(np.array(lines, dtype=np.int64))
    return listing


def _checked(table: _Table, line: int, text: str) -> bytes:
    name = posixpath.normpath(os.fsencode(text))
    if name.startswith((b"/", b"../")) or name in (b"..", b"."):
        raise table.error(line, f"path {printable(name)} leads out of the source: give paths below it")
    return name


def _fill_columns(listing: Listing, table: _Table, kinds: list[_Kind], count: int) -> None:
    wanted = [i for i in range(len(table.columns)) if i != table.path_column]
    for i in wanted:
        if kinds[i].dtype.kind == "S" and kinds[i].longest > MAX_STRING_BYTES:
            raise SourceError(
                f"column {table.columns[i]!r} holds a string of {kinds[i].longest} bytes but the limit is "
                f"{MAX_STRING_BYTES}: shorten it or drop the column"
            )
    arrays = {i: np.empty(count, kinds[i].dtype) for i in wanted}
    for number, (_, row) in enumerate(table.rows()):
        for i in wanted:
            array = arrays[i]
            array[number] = _stored(row[i]) if array.dtype.kind == "S" else array.dtype.type(row[i])
    label = next((i for i in wanted if table.columns[i].lower() in LABEL_COLUMNS), None)
    for i in wanted:
        name, array = table.columns[i], arrays[i]
        if i == label:
            name = "labels"
            if array.dtype.kind == "S":
                classes, array = np.unique(array, return_inverse=True)
                listing.class_names = [as_text(word) for word in classes.tolist()]
            array = array if array.dtype.kind == "f" else array.astype(np.int64)
        if name in listing.columns:
            raise SourceError(f"two columns would become the field {name!r}: rename one")
        listing.columns[name] = array
