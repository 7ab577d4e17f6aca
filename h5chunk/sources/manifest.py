"""Read a manifest: a table with the path of each image, and further columns that become fields.

It is read once: the cells of each column are kept as packed bytes, whose type is determined at the end.

| column | becomes |
| --- | --- |
| 0 and 1 only | uint8 |
| -1 and 1 only (CelebA) | int8 |
| whole numbers | int64; strings if one does not fit |
| numbers, inf, nan | float64 |
| paths of images in the source | a field of images |
| anything else | UTF-8 strings of fixed length, at most 4096 bytes |
| ``label`` or ``labels``, as words | ``labels``, int64, with the sorted words as class names |

Tables with the name ``metadata.csv`` or ``metadata.jsonl`` among the images are Hugging Face's ``imagefolder``: their
paths are in columns called ``file_name`` or ``..._file_name``, relative to the table's folder.
Images keep the order, the splits and, if there is no column of labels, the classes of their folders.
"""

from __future__ import annotations

import io
import math
import os
import posixpath
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from h5chunk.errors import OptionError, SourceError, as_text, count_text, printable
from h5chunk.source import ENDS_IN_NULL, Names
from h5chunk.sources.container import Container, Folder, open_archive
from h5chunk.sources.listing import EXTENSIONS, Found, Listing, Tree, arrange, check_source
from h5chunk.sources.manifest_table import NESTED, Table
from h5chunk.sources.pairs import Directory
from h5chunk.sources.samples import MASK_FIELDS
from h5chunk.stamp import stamp_of

PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "image_id", "image_path")
FILE_NAME = "file_name"  # suffix of Hugging Face's columns
LABEL_COLUMNS = ("labels", "label")
RESERVED = ("images", "h5chunk")
MAX_STRING_BYTES = 4096
PACKED_ROWS = 4096
WHOLE = re.compile(rb"[+-]?[0-9]+")

Find = Callable[[bytes], int | None]  # the number of a file in its archive, -1 in a folder, None if it is missing


@dataclass(frozen=True)
class Choice:
    """The choice of a manifest's columns (None: all), and of the columns with masks."""

    columns: Sequence[str] | None = None
    masks: Sequence[str] | None = None


def list_manifest(
    manifest: str | os.PathLike[str],
    source: str | os.PathLike[str],
    found: Found | None = None,
    choice: Choice = Choice(),
) -> Listing:
    """List the images of a manifest, in its order, with its columns as fields.

    Its paths, relative to the source, are in the column with a usual name (`PATH_COLUMNS`), else in the first column.
    """
    path, source = Path(manifest), Path(source)
    check_source(path)
    if not path.is_file():  # opening a pipe would block
        raise SourceError(f"{printable(path)}: is not a regular file: give a table as a file")
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            before = stamp_of(file.fileno())
            table = Table(printable(path), path.name, file)
            cells = _Cells(table, choice, printable(source))
            if found:
                found(0)
            check_source(source)
            container, find = _open_source(source)
            cells.read(table, find, b"", found or (lambda count: None))
            if stamp_of(file.fileno()) != before:
                raise SourceError(f"{table.shown}: changed while it was read")
    except OSError as error:
        raise SourceError(f"{printable(path)}: cannot be read: {error.strerror}") from None
    if not cells.num_rows:
        raise SourceError(f"{table.shown}: lists no images: it has no line below the header")
    if table.declared not in (None, cells.num_rows):
        raise SourceError(f"{table.shown}: cut short: {cells.num_rows} lines, but its first line says {table.declared}")
    return cells.fill(Listing(container, cells.paths), np.arange(cells.num_rows))


def _open_source(source: Path) -> tuple[Container, Find]:
    if source.is_dir():
        root = os.fsencode(source)
        return Folder(source), lambda path: -1 if os.path.exists(os.path.join(root, path)) else None
    container, members = open_archive(source)
    return container, {posixpath.normpath(name): i for name, i in members if not name.endswith(b"/")}.get


def list_metadata(tree: Tree, split_folders: str, choice: Choice) -> Listing | None:
    """List the images of Hugging Face's tables of metadata; None if there are no tables with ``file_name``."""
    numbers = {
        posixpath.join(folder, file): number
        for folder, each in tree.directories.items()
        for file, number in zip(each.files, each.members, strict=True)
    }
    cells: _Cells | None = None
    for path, number in sorted(tree.tables):
        shown = f"{tree.shown}: {printable(path)}"
        text = io.TextIOWrapper(io.BytesIO(tree.container.read(number, path)), "utf-8-sig", "surrogateescape", "")
        table = Table(shown, as_text(path), text)
        if not any(name.endswith(FILE_NAME) for name in table.columns):
            tree.ignored.append(f"{printable(path)}, which has no column {FILE_NAME!r}")
            continue
        cells = cells or _Cells(table, choice, tree.shown)
        cells.read(table, numbers.get, posixpath.dirname(path), lambda count: None)
    return None if cells is None else _arranged(tree, cells, numbers, split_folders)


def _arranged(tree: Tree, cells: _Cells, numbers: dict[bytes, int], split_folders: str) -> Listing:
    """Arrange the images of tables of metadata as samples: in the order, and with the splits, of their folders."""
    rows = {path: row for row, path in enumerate(cells.paths)}
    if len(rows) < cells.num_rows:
        twice = next(path for path, count in Counter(cells.paths).items() if count > 1)
        raise SourceError(f"{tree.shown}: {printable(twice)} has several lines in the metadata: keep one")
    used = {path for each in cells.images.values() for path in each.paths} | rows.keys()
    directories: dict[bytes, Directory] = {}
    for path in cells.paths:
        folder, file = posixpath.split(path)
        directory = directories.setdefault(folder, Directory())
        directory.files.append(file)
        directory.members.append(numbers[path])
    left = sorted(numbers.keys() - used)
    tops = tuple(posixpath.join(posixpath.dirname(path), b"") for path, _ in tree.tables)
    if beside := [path for path in left if not path.startswith(tops)]:
        raise SourceError(
            f"{tree.shown}: {len(beside):,} images are outside of the folders with metadata, such as "
            f"{printable(beside[0])}: add a table for them, or convert each folder alone"
        )
    if left:
        tree.ignored.append(
            f"{count_text(len(left), 'image')} without a line in the metadata, such as {printable(left[0])}"
        )
    fewest = math.inf if cells.has_labels else 2
    listing, _ = arrange(replace(tree, directories=directories), split_folders, fewest)
    listing.notes.append(f"{', '.join(printable(path) for path, _ in tree.tables)}: columns became fields")
    return cells.fill(listing, np.array([rows[name] for name in listing.names], np.int64))


@dataclass
class _ImageColumn:
    """A column with paths of images: the field that it becomes, and the paths and their numbers in the archive."""

    name: str
    paths: Names = field(default_factory=Names)
    numbers: array[int] = field(default_factory=lambda: array("q"))


class _Cells:
    """The cells of one or several tables of the same columns; all but paths are packed as bytes."""

    def __init__(self, table: Table, choice: Choice, source: str) -> None:
        self._table, self._source, self.columns = table, source, table.columns
        self._masks = MASK_FIELDS if choice.masks is None else choice.masks
        _check_columns(table)
        names = [name.lower() for name in self.columns]
        usual = [i for i, name in enumerate(names) if name in PATH_COLUMNS]
        usual += [i for i, name in enumerate(names) if name.endswith(FILE_NAME)]
        self._path_column = usual[0] if usual else 0
        self._kept = self._choose(choice)
        self.images: dict[int, _ImageColumn] = {}
        self.paths = Names()
        self._numbers = array("q")
        self._rows: list[list[str]] = []
        self._packed: dict[int, list[np.ndarray]] = {i: [] for i in self._kept}

    @property
    def num_rows(self) -> int:
        return len(self.paths)

    @property
    def has_labels(self) -> bool:
        return any(self.columns[i].lower() in LABEL_COLUMNS for i in self._kept)

    def _choose(self, choice: Choice) -> list[int]:
        """Return the indices of the columns to keep, other than the column of paths."""
        wanted = self.columns if choice.columns is None else choice.columns
        for name in (*wanted, *(choice.masks or ())):
            if name not in self.columns and f"{name}_{FILE_NAME}" not in self.columns:
                raise OptionError(f"{self._table.shown}: has no column {name!r}: it has {', '.join(self.columns)}")
        names = {*wanted, *(choice.masks or ())}
        kept = (i for i, name in enumerate(self.columns) if name in names or _field_of(name) in names)
        return [i for i in kept if i != self._path_column]

    def read(self, table: Table, find: Find, folder: bytes, found: Found) -> None:
        """Read the rows of a table whose paths count from ``folder``."""
        if table.columns != self.columns:
            raise table.error(
                table.first_line, f"has other columns than {self._table.shown}: give all tables the same columns"
            )
        for line, row in table.rows():
            if not len(self.paths):
                self._find_images(row, find, folder)
            for i in (self._path_column, *self._kept):
                if not row[i] or row[i] == NESTED:
                    what = "is a list or an object:" if row[i] else "is empty: fill it or"
                    raise table.error(line, f"column {self.columns[i]!r} {what} {self._dropped(i)}")
            self.paths.append(self._path(table, line, row[self._path_column], find, folder, self._numbers))
            for i, column in self.images.items():
                column.paths.append(self._path(table, line, row[i], find, folder, column.numbers))
            self._rows.append(row)
            if len(self._rows) == PACKED_ROWS:
                self._pack()
                found(len(self.paths))
        found(len(self.paths))

    def _dropped(self, column: int) -> str:
        others = ",".join(self.columns[i] for i in self._kept if i != column)
        return f"drop the column (--columns {printable(others)})" if others else "drop the column"

    def _find_images(self, row: list[str], find: Find, folder: bytes) -> None:
        """Find the columns whose first cell is the path of an image in the source, or that are masks."""
        for i in self._kept:
            name = _field_of(self.columns[i])
            path = posixpath.normpath(posixpath.join(folder, os.fsencode(as_text(row[i]))))
            is_image = path.lower().endswith(EXTENSIONS) and find(path) is not None and row[i] != row[self._path_column]
            if is_image or name in self._masks or self.columns[i] != name:
                self.images[i] = _ImageColumn(name)

    def _path(self, table: Table, line: int, cell: str, find: Find, folder: bytes, numbers: array[int]) -> bytes:
        """Return the path in a cell, below the source, and note its number."""
        try:
            path = posixpath.normpath(posixpath.join(folder, os.fsencode(cell)))
        except UnicodeEncodeError:
            raise table.error(line, f"path {printable(cell)} is not valid text") from None
        if path.startswith((b"/", b"../")) or path in (b"..", b"."):
            raise table.error(line, f"path {printable(path)} is outside of the source: give paths below it")
        number = find(path)
        if number is None:
            raise table.error(line, f"{printable(path)} is not in {self._source}")
        numbers.append(number)
        return path

    def _pack(self) -> None:
        for i in (i for i in self._kept if i not in self.images):
            cells = [as_text(row[i]).encode() for row in self._rows]
            longest = max(map(len, cells), default=0)
            if any(cell.endswith(b"\0") for cell in cells):
                raise SourceError(f"column {self.columns[i]!r} holds a string that {ENDS_IN_NULL}")
            if longest > MAX_STRING_BYTES:
                raise SourceError(
                    f"column {self.columns[i]!r} holds a string of {longest} bytes but the limit is "
                    f"{MAX_STRING_BYTES}: shorten it or {self._dropped(i)}"
                )
            self._packed[i].append(np.array(cells, f"S{max(1, longest)}"))
        self._rows = []

    def fill(self, listing: Listing, order: np.ndarray) -> Listing:
        """Add the columns, in this order of rows, to a listing, and select its images."""
        self._pack()
        packed = {self.columns[i]: each for i, each in self._packed.items() if i not in self.images}
        label = next((name for name in packed if name.lower() in LABEL_COLUMNS), None)
        for name, parts in packed.items():
            values = _typed(np.concatenate(parts))[order]
            if name == label:
                name = "labels"
                if values.dtype.kind == "S":
                    classes, values = np.unique(values, return_inverse=True)
                    listing.class_names = [as_text(word) for word in classes.tolist()]
                values = values if values.dtype.kind == "f" else values.astype(np.int64)
            if name in listing.columns:
                raise SourceError(f"two columns would become the field {name!r}: rename one")
            listing.columns[name] = values
        for each in self.images.values():
            listing.others[each.name] = Names(each.paths[row] for row in order.tolist())
        if self.images:
            fields = ", ".join(repr(each.name) for each in self.images.values())
            listing.notes.append(f"columns with paths of images became fields of images: {fields}")
        listing.select(*(np.array(each)[order] for each in (self._numbers, *(i.numbers for i in self.images.values()))))
        return listing


def _field_of(column: str) -> str:
    """Return the field that a column of paths becomes: Hugging Face's have a suffix."""
    return column.removesuffix(f"_{FILE_NAME}")


def _check_columns(table: Table) -> None:
    line, columns = table.first_line, table.columns
    if not columns or not all(columns):
        raise table.error(line, "the header must name every column")
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise table.error(line, f"two columns are called {twice[0]!r}")
    for name in columns:
        if os.fsencode(as_text(name)).lower().endswith(EXTENSIONS):
            raise table.error(line, f"{printable(name)} is an image: put a line with the columns' names first")
        if "/" in name or name == "." or not name.isprintable():
            raise table.error(line, f"column {name!r} cannot be the name of a field: rename it, without '/'")
        if name in RESERVED:
            raise table.error(line, f"column {name!r} has a name that files reserve for other data: rename it")


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
