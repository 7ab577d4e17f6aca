"""Read a manifest: a table with the paths of images, and with other columns that become fields.

The type of a column is determined after all rows have been read; until then, its cells are kept as bytes.

| column | becomes |
| --- | --- |
| 0 and 1, or true and false, only | uint8 |
| -1 and 1 only (CelebA) | int8 |
| integers | int64, or uint64 if all fit only that; strings if one of them does not fit |
| numbers, inf, nan | float64, unless digits of an integer would be lost: this is an error |
| paths of images in the source | a field of images |
| anything else | UTF-8 strings of fixed length, at most 4096 bytes |
| ``label`` or ``labels``, as strings | ``labels``, int64, with the sorted strings as class names |

A ``metadata.csv`` or ``metadata.jsonl`` among the images is a table of Hugging Face's ``imagefolder``: its columns
``file_name`` or ``..._file_name`` contain paths relative to the folder of the table. The images in such a table keep
the order and the splits of their folders and, if the table has no column of labels, also the classes.
"""

from __future__ import annotations

import io
import math
import os
import posixpath
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from h5chunk.errors import OptionError, SourceError, as_text, count_text, names_text, printable
from h5chunk.sample_source import ENDS_IN_NULL, Names
from h5chunk.sources.cells import LABEL_COLUMNS, LostDigitsError, note_zeros, typed
from h5chunk.sources.container import Folder
from h5chunk.sources.kinds import ImageSourceOptions
from h5chunk.sources.listing import EXTENSIONS, Listing, ReportFound, Tree, check_source, sort_and_label
from h5chunk.sources.manifest_table import NESTED, Table, not_utf8
from h5chunk.sources.masks import MASK_FIELDS
from h5chunk.sources.named_files import NamedFiles, open_files
from h5chunk.sources.pairs import Directory
from h5chunk.stamp import stamp_of

PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "image_id", "image_path")
FILE_NAME = "file_name"  # suffix of the names of Hugging Face's columns of paths
RESERVED = ("images", "h5chunk")
MAX_STRING_BYTES = 4096
MORE = "\0"  # in a problem: where the number of other lines with it is inserted
MAX_CLASSES, NUM_PROBES = 50, 1000
PACKED_ROWS = 4096  # rows that are packed, and reported as progress, at a time
MAX_NAMES = 12  # maximum number of columns that a remedy lists


def list_manifest(
    source: str | os.PathLike[str],
    options: ImageSourceOptions,
    report_found: ReportFound,
    skips: bool,
) -> Listing:
    """List the images of the manifest in ``options``, in its order, with its columns as fields.

    Paths are relative to the source. They are read from the first column whose name is in `PATH_COLUMNS`, or else from
    the first column. With ``skips``, files of a folder that are missing, and empty cells, are problems of their samples
    only. Raises SourceError if the manifest or a path is invalid, and OptionError if a column does not
    exist.
    """
    assert options.manifest is not None
    path, source = Path(options.manifest), Path(source)
    check_source(path)
    if not path.is_file():  # opening a pipe would block
        raise SourceError(f"{printable(path)}: is not a regular file: pass a table as a file")
    try:
        with path.open("rb") as file:
            before = stamp_of(file.fileno())
            table = Table(printable(path), path.name, file, options.encoding)
            cells = _Cells(table, options, printable(source), skips)
            report_found(0)
            check_source(source)
            files = open_files(source)
            cells.read(table, files, b"", report_found)
            if stamp_of(file.fileno()) != before:
                raise SourceError(f"{table.label}: changed while it was read")
    except OSError as error:
        raise SourceError(f"{printable(path)}: cannot be read: {error.strerror}") from None
    if not cells.num_rows:
        raise SourceError(f"{table.label}: lists no images: it has no line below the header")
    if table.declared not in (None, cells.num_rows):
        raise SourceError(
            f"{table.label}: is truncated: it lists {cells.num_rows} images, but its first line declares "
            f"{table.declared}"
        )
    return cells.fill(Listing(files.container, cells.paths), np.arange(cells.num_rows))


def list_metadata(tree: Tree, options: ImageSourceOptions, skips: bool) -> Listing | None:
    """List the images that Hugging Face's tables of metadata name; None if no table has a column ``file_name``."""
    numbers = {
        posixpath.join(folder, file): number
        for folder, directory in tree.directories.items()
        for file, number in zip(directory.files, directory.members, strict=True)
    }
    cells: _Cells | None = None
    files = NamedFiles(tree.container, numbers)
    for path, number in sorted(tree.tables):
        label = f"{tree.label}: {printable(path)}"
        table = Table(label, as_text(path), io.BytesIO(tree.container.read(number, path)), options.encoding)
        if not any(name.endswith(FILE_NAME) for name in table.columns):
            tree.ignored.append(f"{printable(path)}, which has no column {FILE_NAME!r}")
            continue
        cells = cells or _Cells(table, options, tree.label, skips)
        cells.read(table, files, posixpath.dirname(path), lambda count: None)
    return None if cells is None else _list_named_images(tree, cells, numbers, options.split_folders)


def _list_named_images(tree: Tree, cells: _Cells, numbers: dict[bytes, int], split_folders: str) -> Listing:
    """List the images that tables of metadata name, in the order and with the splits of their folders."""
    rows = {path: row for row, path in enumerate(cells.paths)}
    if len(rows) < cells.num_rows:
        twice = next(path for path, count in Counter(cells.paths).items() if count > 1)
        raise SourceError(f"{tree.label}: the metadata lists {printable(twice)} several times: keep one of the lines")
    used = {path for column in cells.images.values() for path in column.paths} | rows.keys()
    directories: dict[bytes, Directory] = {}
    for path in cells.paths:
        folder, file = posixpath.split(path)
        directory = directories.setdefault(folder, Directory())
        directory.files.append(file)
        directory.members.append(numbers.get(path, -1))
    unused = sorted(numbers.keys() - used)
    tops = tuple(posixpath.join(posixpath.dirname(path), b"") for path, _ in tree.tables)
    if outside := [path for path in unused if not path.startswith(tops)]:
        raise SourceError(
            f"{tree.label}: {len(outside):,} images are outside of the folders with metadata, such as "
            f"{printable(outside[0])}: add a table for them, or convert each folder alone"
        )
    if unused:
        tree.ignored.append(
            f"{count_text(len(unused), 'image')} without a line in the metadata, such as {printable(unused[0])}"
        )
    min_classes = math.inf if cells.has_labels else 2
    listing, _ = sort_and_label(replace(tree, directories=directories), split_folders, min_classes)
    listing.notes.append(f"{', '.join(printable(path) for path, _ in tree.tables)}: columns became fields")
    return cells.fill(listing, np.array([rows[name] for name in listing.names], np.int64))


@dataclass
class _ImageColumn:
    """A column with paths of images."""

    name: str  # of the field that it becomes
    paths: Names = field(default_factory=Names)
    numbers: array[int] = field(default_factory=lambda: array("q"))  # of the images in the archive


class _Cells:
    """The cells of one or more tables with the same columns. Paths are kept as names, other cells as packed bytes."""

    def __init__(self, table: Table, options: ImageSourceOptions, source: str, skips: bool) -> None:
        self._table, self._source, self.columns = table, source, table.columns
        self._texts = options.text_columns or ()
        self._masks = MASK_FIELDS if options.mask_column is None else options.mask_column
        _check_columns(table)
        names = [name.lower() for name in self.columns]
        usual = [i for i, name in enumerate(names) if name in PATH_COLUMNS]
        usual += [i for i, name in enumerate(names) if name.endswith(FILE_NAME)]
        self._path_column = usual[0] if usual else _unnamed(self.columns)
        chosen = self.columns if options.columns is None else options.columns
        self._kept = self._choose(chosen, options.mask_column or ())
        self._check_exists(self._texts)
        self.images: dict[int, _ImageColumn] = {}
        self.paths = Names()
        self._numbers = array("q")
        self._rows: list[tuple[int, list[str]]] = []  # line numbers and cells
        self._packed: dict[int, list[np.ndarray]] = {i: [] for i in self._kept}
        self._skips = skips
        self.unusable: dict[int, str] = {}  # why a sample cannot be used, by row
        self._missing, self._num_missing = (0, ""), 0  # the first line with a file that does not exist, and its problem
        self._empty: dict[int, tuple[tuple[int, str], int]] = {}  # the same for empty cells, by column
        self._respelled = ""

    @property
    def num_rows(self) -> int:
        return len(self.paths)

    @property
    def has_labels(self) -> bool:
        return any(self.columns[i].lower() in LABEL_COLUMNS for i in self._kept)

    def _choose(self, *names: Sequence[str]) -> list[int]:
        """Return the indices of the columns with these names, other than the column of paths."""
        requested = list(chain(*names))
        self._check_exists(requested)
        kept = (i for i, name in enumerate(self.columns) if name in requested or _field_of(name) in requested)
        return [i for i in kept if i != self._path_column and self.columns[i]]

    def _check_exists(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.columns and f"{name}_{FILE_NAME}" not in self.columns:
                raise OptionError(f"{self._table.label}: has no column {name!r}: it has {names_text(self.columns)}")

    def read(self, table: Table, files: NamedFiles, folder: bytes, report_found: ReportFound) -> None:
        """Read the rows of a table with paths relative to ``folder``."""
        if table.columns != self.columns:
            raise table.error(
                table.first_line,
                f"its columns differ from those of {self._table.label}: use the same columns in all tables",
            )
        for line, row in table.rows():
            if not len(self.paths):
                self._find_images(row, files, folder)
            for i in (self._path_column, *self._kept):
                if not row[i] or row[i] == NESTED:
                    self._note_problem(table, line, row, i)
            path, number = self._path(table, line, row[self._path_column], files, folder)
            self.paths.append(path)
            self._numbers.append(number)
            for i, column in self.images.items():
                path, number = self._path(table, line, row[i], files, folder) if row[i] else (b"", -1)
                column.paths.append(path)
                column.numbers.append(number)
            self._rows.append((line, row))
            if len(self._rows) == PACKED_ROWS:
                self._pack()
                report_found(len(self.paths))
        report_found(len(self.paths))
        for (line, problem), count in ((self._missing, self._num_missing), *self._empty.values()):
            if count and not self._skips:
                more = f" (and so {count_text(count - 1, 'more line')})" if count > 1 else ""
                raise table.error(line, problem.replace(MORE, more))

    def _note_problem(self, table: Table, line: int, row: list[str], column: int) -> None:
        """Note an empty cell; raise SourceError for one that cannot be skipped."""
        name = self.columns[column]
        if row[column]:
            raise table.error(
                line,
                f"column {name!r} is a list or an object: {self._drop_remedy(column)}, or write its numbers as columns "
                "of their own; boxes, whose number differs, must be padded to a fixed number",
            )
        if column == self._path_column:
            raise table.error(line, f"column {name!r} is empty: write the path of an image, or remove the line")
        self.unusable[len(self.paths)] = f"has no value in column {name!r}"
        problem = (
            f"column {name!r} is empty{MORE}: fill it (with nan in a column of numbers), skip such samples (--on-error "
            f"skip), or {self._drop_remedy(column)}"
        )
        first, count = self._empty.get(column, ((line, problem), 0))
        self._empty[column] = first, count + 1

    def _drop_remedy(self, column: int) -> str:
        """Return advice on how to leave out a column, for error messages."""
        others = [self.columns[i] for i in self._kept if i != column]
        if len(others) > MAX_NAMES:
            return "drop the column (name all others: --columns A,B,...)"
        return f"drop the column (--columns {printable(','.join(others))})" if others else "drop the column"

    def _find_images(self, row: list[str], files: NamedFiles, folder: bytes) -> None:
        """Find the columns with paths of images or masks, from the first row."""
        for i in self._kept:
            name = _field_of(self.columns[i])
            path = posixpath.normpath(posixpath.join(folder, os.fsencode(as_text(row[i]))))
            is_image = row[i] != row[self._path_column] and path.lower().endswith(EXTENSIONS)
            is_image = is_image and any(files.number(spelling) is not None for spelling in files.spellings(path))
            if is_image or name in self._masks or self.columns[i] != name:
                self.images[i] = _ImageColumn(name)

    def _path(self, table: Table, line: int, cell: str, files: NamedFiles, folder: bytes) -> tuple[bytes, int]:
        """Return the path in a cell, relative to the source, and the number of the file; -1 if it is missing."""
        try:
            named = posixpath.normpath(posixpath.join(folder, os.fsencode(cell)))
        except UnicodeEncodeError:
            raise table.error(line, f"path {printable(cell)} is not valid Unicode") from None
        for path in files.spellings(named):
            if path.startswith(b"/"):
                path = files.inside(path)
            if path.startswith((b"/", b"../")) or path in (b"..", b"."):
                raise table.error(line, f"path {printable(path)} is outside of the source: pass paths inside it")
            number = files.number(path)
            if number is not None:
                if path != named and not self._respelled:
                    self._respelled = f"{printable(named)} in the table is read as {printable(path)}, and so are others"
                return path, number
        if not self._num_missing:
            problem = not_utf8(cell)
            remedy = f"or, as {problem}" if problem else "remove such lines"
            if not problem and isinstance(files.container, Folder):
                remedy += ", skip such samples (--on-error skip)"
            remedy += "" if problem else ", or pass the folder to which paths are relative as the source"
            self._missing = (
                line,
                f"{printable(named)} does not exist in {self._source}{MORE}: correct the path, {remedy}",
            )
        self._num_missing += 1
        if self._skips and not isinstance(files.container, Folder):
            raise table.error(line, self._missing[1].replace(MORE, ""))
        return named, -1

    def _pack(self) -> None:
        """Move the rows that were read since the last call into one array of bytes per column."""
        for i in (i for i in self._kept if i not in self.images):
            for line, row in self._rows:
                if problem := not_utf8(row[i]):
                    raise self._table.error(line, f"column {self.columns[i]!r}: {problem}")
            cells = [row[i].encode() for _, row in self._rows]
            longest = max(map(len, cells), default=0)
            if any(cell.endswith(b"\0") for cell in cells):
                value = next(cell for cell in cells if cell.endswith(b"\0"))
                raise SourceError(f"column {self.columns[i]!r}: {printable(value[:60])} {ENDS_IN_NULL}")
            if longest > MAX_STRING_BYTES:
                raise SourceError(
                    f"column {self.columns[i]!r} contains a string of {longest} bytes, over the limit of "
                    f"{MAX_STRING_BYTES} ({printable(max(cells, key=len)[:60])}...): shorten it, or "
                    f"{self._drop_remedy(i)}"
                )
            self._packed[i].append(np.array(cells, f"S{max(1, longest)}"))
        self._rows = []

    def fill(self, listing: Listing, order: np.ndarray) -> Listing:
        """Add the columns to a listing whose samples are the rows ``order``, (num_samples,) int64; return it."""
        self._pack()
        packed = {self.columns[i]: parts for i, parts in self._packed.items() if i not in self.images}
        label = next((name for name in packed if name.lower() in LABEL_COLUMNS), None)
        for name, parts in packed.items():
            words = np.concatenate(parts)
            filled = words != b"" if self.unusable else np.ones(len(words), np.bool_)
            try:
                values = words[filled] if name in self._texts else typed(name, words[filled])
            except LostDigitsError as error:
                raise SourceError(f"{self._table.label}: column {name!r} {error}") from None
            if values.dtype.kind in "iu":
                listing.notes += note_zeros(name, words)
            if name == label:
                name = "labels"
                if values.dtype.kind == "S" or values.dtype == np.uint64:
                    classes, values = np.unique(words[filled], return_inverse=True)
                    listing.class_names = [as_text(word) for word in classes.tolist()]
                values = values if values.dtype.kind == "f" else values.astype(np.int64)
            spread = np.zeros(len(words), values.dtype)  # cells of samples that are skipped stay empty
            spread[filled] = values
            values = spread[order]
            if name in listing.columns:
                raise SourceError(f"two columns would become the field {name!r}: rename one of them")
            listing.columns[name] = values
        listing.unusable = {i: self.unusable[row] for i, row in enumerate(order.tolist()) if row in self.unusable}
        if _unnamed(self.columns):
            listing.ignored.append("the first column of the table, which has no name")
        if self._respelled:
            listing.notes.append(self._respelled)
        if label is None:
            self._note_labels(listing)
        images = list(self.images.values())
        for column in images:
            listing.others[column.name] = Names(column.paths[row] for row in order.tolist())
        if images:
            fields = ", ".join(repr(column.name) for column in images)
            listing.notes.append(f"columns with paths of images became image fields: {fields}")
        listing.select(*(np.array(numbers)[order] for numbers in (self._numbers, *(i.numbers for i in images))))
        return listing

    def _note_labels(self, listing: Listing) -> None:
        """Add a note on columns of text that may be the label."""
        for name, values in listing.columns.items():
            words = set(values[:NUM_PROBES].tolist()) if values.dtype.kind == "S" else ()
            if name in self.columns and 1 < len(words) <= MAX_CLASSES and len(words) < len(values):
                listing.notes.append(
                    f"column {name!r} became text, which is not loaded on a GPU: if it is the label, call it "
                    "'label' in the table, so that its values become classes"
                )


def _field_of(column: str) -> str:
    """Return the name of the field that a column of paths becomes, without Hugging Face's suffix."""
    return column.removesuffix(f"_{FILE_NAME}")


def _unnamed(columns: Sequence[str]) -> int:
    """Return 1 if the first of several columns has no name, as pandas writes the index of a frame; otherwise 0."""
    return int(len(columns) > 1 and not columns[0])


def _check_columns(table: Table) -> None:
    """Raise SourceError if a column name is missing, duplicated, or not a valid field name."""
    line, columns = table.first_line, table.columns
    for problem in filter(None, map(not_utf8, columns)):
        raise table.error(line, f"the header {problem}")
    if not columns or not all(columns[_unnamed(columns) :]):
        raise table.error(line, "the header must name every column")
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise table.error(line, f"two columns are called {twice[0]!r}: rename one of them")
    for name in columns:
        if any(word.lower().endswith(EXTENSIONS) for word in os.fsencode(as_text(name)).split()):
            raise table.error(
                line,
                f"{printable(name)} is not a column name: insert a header with the column names, and separate the "
                "columns by commas, semicolons or tabs",
            )
        if "/" in name or name == "." or not name.isprintable():
            raise table.error(
                line,
                f"column {name!r} is not a valid name of a field: rename it, with printable characters other than /",
            )
        if name in RESERVED:
            raise table.error(line, f"column {name!r} has a name that is reserved for other data: rename it")
