"""Rows of several files by their byte ranges: each part of a request goes to the file that holds its rows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.store.format import opened
from h5chunk.store.read.csrrows import CsrField, CsrRoom, _EncodedEntries
from h5chunk.store.read.decoded import DecodedChunks, NotDirect
from h5chunk.store.read.direct import EncodedField, PlainField, direct_field
from h5chunk.store.read.fileset import FileSet, with_remedy
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.ranges import PART_BYTES, Part, open_descriptor
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.tiles import TiledField

MIN_KEPT_CHUNKS = 2  # compressed chunks that each file keeps for the next window, where many files share the room


class OpenFiles:
    """Descriptors of a set's files, each opened when it is first asked for; for any number of threads."""

    def __init__(self, reader: FileSet) -> None:
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
    """What the parts of a reader's fields read through: a descriptor of its file, or `OpenFiles` of several."""
    return OpenFiles(reader) if isinstance(reader, FileSet) else open_descriptor(reader.path)


def close_descriptors(opened: Any) -> None:
    """Close what `open_descriptors` gave."""
    if isinstance(opened, OpenFiles):
        opened.close()
    else:
        os.close(opened)


class _Encoded:
    """The compressed chunks of all files, which share what one file would have for itself."""

    def __init__(self, each: Sequence[DecodedChunks]) -> None:
        self._each = each
        for chunks in each:
            share = -(-chunks._num_kept // len(each))
            chunks._num_kept = min(chunks._num_kept, max(MIN_KEPT_CHUNKS, share))
        self.share()

    def share(self) -> None:
        """A thread's memory is its own until its next chunk, of any file."""
        for chunks in self._each:
            chunks._local = self._each[0]._local

    def scratch_bytes(self, num_threads: int) -> int:
        """Memory beside ``out`` that so many threads take."""
        if not self._each:
            return 0
        kept = sum(chunks._num_kept * chunks.chunk_bytes for chunks in self._each)
        return 3 * num_threads * max(chunks.chunk_bytes for chunks in self._each) + kept


class FilesField:
    """Reads rows of a field of several files, as `h5chunk.store.read.direct` does of one; through `OpenFiles`.

    Parameters
    ----------
    reader : FileSet
    name : str
    fields : list of PlainField, EncodedField, TiledField or None
        Of each file; None for one without samples.
    """

    def __init__(
        self, reader: FileSet, name: str, fields: Sequence[PlainField | EncodedField | TiledField | None]
    ) -> None:
        self.name = name
        self._reader, self._fields = reader, fields
        self._there = [(number, field) for number, field in enumerate(fields) if field is not None]
        each = [field for _, field in self._there]
        self.row_bytes = each[0].row_bytes
        self.num_bytes = sum(field.num_bytes for field in each)
        self.is_one_run = all(field.is_one_run for field in each)
        self._encoded = _Encoded([field._chunks for field in each if isinstance(field, EncodedField | TiledField)])
        self.scratch_bytes = self._encoded.scratch_bytes

    def parts(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """As `PlainField.parts`; they take `OpenFiles` for a descriptor."""
        return _together(self._of_each(rows, places, out))

    def _of_each(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[tuple[Part, int, int]]:
        for number, some in self._reader.by_file(rows):
            field, its_rows = self._fields[number], rows[some] - self._reader.starts[number]
            assert field is not None
            for part in field.parts(its_rows, places[some], out):
                is_decoded = isinstance(field, EncodedField | TiledField)
                yield part, number, PART_BYTES if is_decoded else len(some) * self.row_bytes

    def map(self, opened: Any) -> None:
        """As `PlainField.map`."""
        for number, field in self._there:
            if isinstance(field, PlainField):
                field.map(opened.of(number))

    def read_all(self, opened: Any) -> np.ndarray:
        """The whole field, for small ones."""
        found = []
        for number, field in self._there:
            found.append(field.read_all(opened.of(number)))
            opened.check(number)
        return np.concatenate(found)

    def forget(self) -> None:
        """As `PlainField.forget`."""
        for _, field in self._there:
            field.forget()
        self._encoded.share()


class FilesMatrix(CsrField):
    """Reads rows of a matrix that lies in several files.

    Parameters
    ----------
    reader : FileSet
    name : str
    fields : list of CsrField or None
        Of each file; None for one without rows.
    """

    def __init__(self, reader: FileSet, name: str, fields: Sequence[CsrField | None]) -> None:
        self.name, self.indptr = name, reader.indptr
        self._reader, self._fields = reader, fields
        each = self._there = [field for field in fields if field is not None]
        self.is_plain = all(field.is_plain for field in each)
        self.num_bytes = sum(field.num_bytes for field in each)
        parts = [entries for field in each for entries in (field._indices, field._values)]
        self._encoded = _Encoded([entries._chunks for entries in parts if isinstance(entries, _EncodedEntries)])

    def parts(self, rows: np.ndarray, places: np.ndarray, out: CsrRoom) -> Iterator[Part]:
        """As `CsrField.parts`; they take `OpenFiles` for a descriptor."""
        return _together(self._of_each(rows, places, out))

    def _of_each(self, rows: np.ndarray, places: np.ndarray, out: CsrRoom) -> Iterator[tuple[Part, int, int]]:
        for number, some in self._reader.by_file(rows):
            field, its_rows = self._fields[number], rows[some] - self._reader.starts[number]
            assert field is not None
            num_bytes = int(field.entry_counts(its_rows).sum()) * out.indices.itemsize if field.is_plain else PART_BYTES
            for part in field.parts(its_rows, places[some], out):
                yield part, number, num_bytes

    def scratch_bytes(self, num_threads: int) -> int:
        """Memory beside ``out`` that so many threads take."""
        return self._encoded.scratch_bytes(num_threads)

    def forget(self) -> None:
        """Free what is kept between parts."""
        for field in self._there:
            field.forget()
        self._encoded.share()


class _FileParts:
    """Parts of some of the files, which a thread does one after the other."""

    def __init__(self) -> None:
        self._parts: list[tuple[Part, int]] = []

    def add(self, part: Part, number: int) -> None:
        """One more, of file ``number``."""
        self._parts.append((part, number))

    def __call__(self, opened: Any) -> None:
        for part, number in self._parts:
            part(opened.of(number))
            opened.check(number)


def _together(parts: Iterable[tuple[Part, int, int]]) -> Iterator[Part]:
    """Parts with the number of their file, and about how many bytes: small ones of several files are one task."""
    together, total = _FileParts(), 0
    for part, number, num_bytes in parts:
        together.add(part, number)
        total += num_bytes
        if total >= PART_BYTES:
            yield together
            together, total = _FileParts(), 0
    if total:
        yield together


def files_fields(reader: FileSet) -> tuple[dict[str, FilesField | FilesMatrix], dict[str, str]]:
    """The fields of a set that can be read by byte ranges, and why the others cannot."""
    found: dict[str, list[Any]] = {name: [] for name in reader.fields}
    why: dict[str, str] = {}
    for each in reader.readers:
        with opened(each.path) as file:
            each.check_unchanged()
            for name in each.fields:
                try:
                    found[name].append(_direct(each, file, name) if each.num_samples else None)
                except NotDirect as error:
                    why.setdefault(name, f"{printable(each.path)}: {error}")
    if not reader.num_samples:
        return {}, dict.fromkeys(reader.fields, "it is empty")
    return {name: _joined(reader, name, fields) for name, fields in found.items() if name not in why}, why


def _joined(reader: FileSet, name: str, fields: list[Any]) -> FilesField | FilesMatrix:
    is_matrix = isinstance(reader.fields[name], MatrixField)
    return FilesMatrix(reader, name, fields) if is_matrix else FilesField(reader, name, fields)


def _direct(reader: H5Reader, file: h5py.File, name: str) -> PlainField | EncodedField | TiledField | CsrField:
    field = reader.fields[name]
    if isinstance(field, MatrixField):
        return CsrField(reader.path, file, field, reader.indptr, reader.sums)
    return direct_field(reader.path, file, field, reader.sums)
