"""Read rows of one or several files by their byte ranges: the rows of a request are grouped by file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.store.hdf5.chunk_table import NotDirect
from h5chunk.store.hdf5.open import opened
from h5chunk.store.hdf5.ranges import PART_BYTES, Part, VectorPart, open_descriptor
from h5chunk.store.read.chunks import ChunkedField, ChunkSet
from h5chunk.store.read.csr import CsrField
from h5chunk.store.read.fields import MatrixField
from h5chunk.store.read.fileset import with_remedy
from h5chunk.store.read.plain import PlainField, direct_field
from h5chunk.store.read.reader import H5Reader

FileField = PlainField | ChunkedField | CsrField  # what reads a field of one file by byte ranges


class OpenFiles:
    """Descriptors of a set's files, each opened when it is first asked for; for any number of threads."""

    def __init__(self, reader: H5Reader) -> None:
        self._readers = reader.readers
        self._open: list[int | None] = [None] * len(reader.readers)
        self._lock = threading.Lock()

    def of(self, number: int) -> int:
        """The descriptor of a file.

        Raises
        ------
        FileError
            It cannot be opened, or is not what it was.
        """
        found = self._open[number]
        if found is None:
            with self._lock:
                found = self._open[number]
                if found is None:
                    found = self._open[number] = self._open_one(number)
        return found

    def _open_one(self, number: int) -> int:
        reader = self._readers[number]
        try:
            descriptor = open_descriptor(reader.path)
        except FileError as error:
            raise with_remedy(error, len(self._readers)) from error.__cause__
        try:
            reader.check_unchanged(descriptor)
        except FileError:
            os.close(descriptor)
            raise
        return descriptor

    def check(self, number: int) -> None:
        """Raise FileError if a file was changed, or replaced under its name."""
        self._readers[number].check_unchanged()

    def close(self) -> None:
        """Close them. Not while parts are read."""
        for descriptor in self._open:
            if descriptor is not None:
                os.close(descriptor)
        self._open = [None] * len(self._readers)


def open_descriptors(reader: H5Reader) -> Any:
    """Open the files of a reader for tasks: the descriptor of one file, or `OpenFiles` of several.

    Raises
    ------
    FileError
        The file cannot be opened, or is not what it was.
    """
    if len(reader.readers) > 1:
        return OpenFiles(reader)
    descriptor = open_descriptor(reader.path)
    try:
        reader.check_unchanged(descriptor)
    except FileError:
        os.close(descriptor)
        raise
    return descriptor


def close_descriptors(opened: Any) -> None:
    """Close what `open_descriptors` returned."""
    if isinstance(opened, OpenFiles):
        opened.close()
    else:
        os.close(opened)


class FilesField:
    """Reader of a field of several files, as `PlainField` is of one; its tasks take `OpenFiles` for a descriptor.

    Parameters
    ----------
    reader : H5Reader
    name : str
    fields : list of PlainField, ChunkedField, CsrField or None
        Of each file; None for one without samples.
    """

    def __init__(self, reader: H5Reader, name: str, fields: Sequence[FileField | None]) -> None:
        self.name, self._reader, self._fields = name, reader, fields
        self._there: list[tuple[int, Any]] = [
            (number, field) for number, field in enumerate(fields) if field is not None
        ]
        each = [field for _, field in self._there]
        self.num_bytes = sum(field.num_bytes for field in each)
        self.is_plain = all(field.is_plain for field in each)
        self._encoded = ChunkSet([chunks for field in each for chunks in field.chunks])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self._there[0][1].row_bytes)

    def parts(self, rows: np.ndarray, places: np.ndarray, out: Any) -> Iterator[Part]:
        """As `PlainField.parts`."""
        return _together(self._of_each(rows, places, out))

    def _of_each(self, rows: np.ndarray, places: np.ndarray, out: Any) -> Iterator[tuple[Part, int, int]]:
        for number, some in self._reader.by_file(rows):
            field: Any = self._fields[number]
            its_rows = rows[some] - self._reader.starts[number]
            num_bytes = PART_BYTES if field.chunks else field.bytes_read(its_rows)
            for part in field.parts(its_rows, places[some], out):
                yield part, number, num_bytes

    def read_all(self, opened: OpenFiles) -> np.ndarray:
        """Read the whole field, for small ones."""
        values = []
        for number, field in self._there:
            values.append(field.read_all(opened.of(number)))
            opened.check(number)
        return np.concatenate(values)

    def bytes_read(self, rows: np.ndarray) -> int:
        """As `PlainField.bytes_read`."""
        total = 0
        for number, some in self._reader.by_file(rows):
            field: Any = self._fields[number]
            total += field.bytes_read(rows[some] - self._reader.starts[number])
        return total

    def scratch_bytes(self, num_threads: int) -> int:
        """As `PlainField.scratch_bytes`."""
        return self._encoded.scratch_bytes(num_threads)

    def forget(self) -> None:
        """As `PlainField.forget`."""
        for _, field in self._there:
            field.forget()
        self._encoded.share()


class FilesMatrix(FilesField, CsrField):
    """Reader of a matrix that lies in several files, as `CsrField` is of one."""

    def __init__(self, reader: H5Reader, name: str, fields: Sequence[FileField | None]) -> None:
        super().__init__(reader, name, fields)
        self.indptr = reader.indptr
        self.is_plain = all(field.is_plain for _, field in self._there)


DirectField = FileField | FilesField  # what reads a field by byte ranges


class FileParts:
    """A task made of tasks of several files, which a thread runs one after the other."""

    def __init__(self) -> None:
        self._parts: list[tuple[Part, int]] = []

    def add(self, part: Part, number: int) -> None:
        """Add a task of file ``number``."""
        self._parts.append((part, number))

    @property
    def is_plain(self) -> bool:
        """Whether all of it is byte ranges."""
        return all(isinstance(part, VectorPart) for part, _ in self._parts)

    def each(self, opened: OpenFiles) -> Iterator[tuple[Part, int, Callable[[], None]]]:
        """Each part with the descriptor of its file, and what looks whether that was changed meanwhile."""
        for part, number in self._parts:
            yield part, opened.of(number), partial(opened.check, number)

    def __call__(self, opened: Any) -> None:
        for part, number in self._parts:
            part(opened.of(number))
            opened.check(number)


def _together(parts: Iterable[tuple[Part, int, int]]) -> Iterator[Part]:
    """Join small tasks of several files, given with the number of their file and about their bytes."""
    together, total = FileParts(), 0
    for part, number, num_bytes in parts:
        together.add(part, number)
        total += num_bytes
        if total >= PART_BYTES:
            yield together
            together, total = FileParts(), 0
    if total:
        yield together


def direct_fields(reader: H5Reader) -> tuple[dict[str, DirectField], dict[str, str]]:
    """Return the fields that can be read by byte ranges, and the reasons why the others cannot.

    Raises
    ------
    FileError
        A file is damaged, or was changed.
    """
    if not reader.num_samples:
        return {}, dict.fromkeys(reader.fields, "it is empty")
    found: dict[str, list[Any]] = {name: [] for name in reader.fields}
    why: dict[str, str] = {}
    for each in reader.readers:
        with opened(each.path) as file:
            each.check_unchanged()
            for name in each.fields:
                try:
                    found[name].append(_direct(each, file, name) if each.num_samples else None)
                except NotDirect as error:
                    why.setdefault(name, f"{printable(each.path)}: {error}" if len(reader.readers) > 1 else str(error))
    return {name: _join(reader, name, fields) for name, fields in found.items() if name not in why}, why


def _join(reader: H5Reader, name: str, fields: list[Any]) -> DirectField:
    if len(fields) == 1:
        field: DirectField = fields[0]
        return field
    is_matrix = isinstance(reader.fields[name], MatrixField)
    return FilesMatrix(reader, name, fields) if is_matrix else FilesField(reader, name, fields)


def _direct(reader: H5Reader, file: h5py.File, name: str) -> FileField:
    field = reader.fields[name]
    if isinstance(field, MatrixField):
        return CsrField(reader.path, file, field, reader.indptr, reader.sums)
    return direct_field(reader.path, file, field, reader.sums)
