"""Check the tables of an h5chunk file, and sparse matrices, for contradictions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError
from h5chunk.store.format.header import Header
from h5chunk.store.format.matrix import MATRIX, read_matrix
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.read.fields import MatrixField, find_matrix_groups, look_at_matrix, read_indptr

PART_VALUES = 4 << 20  # labels, or entries of rows that are sorted, at a time


def look_at_tables(file: h5py.File, header: Header, names: list[str]) -> Iterator[str]:
    """Yield the contradictions in the group ``/h5chunk``.

    Parameters
    ----------
    file : h5py.File
    header : Header
    names : list of str
        Of all datasets.
    """
    num_samples = header.num_samples
    tables = {name: file[f"{GROUP}/{name}"] for name in _TABLES if f"{GROUP}/{name}" in names}
    for name, table in tables.items():
        if name != "source_names" and table.shape != (num_samples,):
            yield f"/{GROUP}/{name} has the shape {table.shape} but there are {num_samples} samples"
            return
    if "source_index" in tables:
        yield from _look_at_index(tables["source_index"])
    if "source_name_ends" in tables and "source_names" in tables:
        ends = tables["source_name_ends"][()]
        if (np.diff(ends, prepend=0) < 0).any() or ends[-1] != len(tables["source_names"]):
            yield f"/{GROUP}/source_name_ends does not lead through the names: the sources of samples are not known"
    if header.class_names and "labels" in names:
        yield from _check_codes(file["labels"], len(header.class_names), least=0)
    for name in names:
        table = f"{GROUP}/categories/{name}"
        if table in names:
            yield from _check_codes(file[name], len(file[table]), least=-1)
    for name in names:
        dataset = file[name]
        own = "/" not in name and f"{GROUP}/checksums/{name}" in names and "repack" not in header.options
        chunks = dataset.chunks or ()
        if own and (dataset.shape[:1] != (num_samples,) or chunks[:1] != (header.chunk_samples,)):
            yield (
                f"{name} has the shape {dataset.shape} in chunks of {chunks} but the header says {num_samples} "
                f"samples in chunks of {header.chunk_samples}"
            )


_TABLES = ("source_index", "source_name_ends", "source_names")


def _look_at_index(table: h5py.Dataset) -> Iterator[str]:
    index = np.sort(table[()])
    if index[0] < 0:
        yield f"/{GROUP}/source_index has the negative number {index[0]}"
    twice = index[1:] == index[:-1]
    if twice.any():
        yield f"/{GROUP}/source_index names sample {index[1:][twice.argmax()]} of the source twice"


def _check_codes(field: h5py.Dataset, num_categories: int, least: int) -> Iterator[str]:
    if field.dtype.kind not in "iu" or field.ndim != 1:
        return
    for first in range(0, len(field), PART_VALUES):
        values = field[first : first + PART_VALUES]
        wrong = (values < least) | (values >= num_categories)
        if wrong.any():
            place = int(wrong.argmax())
            name, what = field.name.lstrip("/"), "classes" if least == 0 else "categories"
            yield f"{name}: sample {first + place} has the label {values[place]} but there are {num_categories} {what}"
            return


class ColumnLook:
    """Checker of the columns of a CSR matrix, part by part, from any thread.

    Parameters
    ----------
    indptr : (num_rows + 1,) int64
    num_columns : int
    dtype : np.dtype
        Of the columns, as stored.

    Attributes
    ----------
    outside, twice, falls : int or None
        An entry whose column is not in the matrix, is the one before it again, or is smaller than that; the first of
        those that were seen.
    """

    def __init__(self, indptr: np.ndarray, num_columns: int, dtype: np.dtype) -> None:
        self._indptr, self._num_columns, self._dtype = indptr, num_columns, dtype
        self._ends: list[tuple[int, int, int, int]] = []  # first entry, the one behind the last, and their columns
        self._outside: list[int] = []
        self._twice: list[int] = []
        self._falls: list[int] = []

    def __call__(self, first: int, data: np.ndarray) -> None:
        columns = data.view(self._dtype)[: max(0, int(self._indptr[-1]) - first)]
        if not len(columns):
            return
        outside = columns >= self._num_columns
        if self._dtype.kind == "i":
            outside |= columns < 0
        _note(self._outside, outside, first)
        starts = np.zeros(len(columns) + 1, bool)
        low, high = np.searchsorted(self._indptr, (first, first + len(columns)))
        starts[self._indptr[low:high] - first] = True
        inside = ~starts[1:-1]
        _note(self._twice, (columns[1:] == columns[:-1]) & inside, first + 1)
        _note(self._falls, (columns[1:] < columns[:-1]) & inside, first + 1)
        self._ends.append((first, first + len(columns), int(columns[0]), int(columns[-1])))

    def finish(self) -> None:
        """Compare the borders of parts; after the last one."""
        ends = sorted(self._ends)
        for (_, stop, _, last), (start, _, first, _) in pairwise(ends):
            place = int(np.searchsorted(self._indptr, start))
            if start != stop or self._indptr[place] == start or first > last:
                continue
            (self._twice if first == last else self._falls).append(start)

    @property
    def outside(self) -> int | None:
        return min(self._outside, default=None)

    @property
    def twice(self) -> int | None:
        return min(self._twice, default=None)

    @property
    def falls(self) -> int | None:
        return min(self._falls, default=None)


def _note(found: list[int], wrong: np.ndarray, first: int) -> None:
    if wrong.any():
        found.append(first + int(wrong.argmax()))


def row_of(indptr: np.ndarray, entry: int) -> int:
    """Return the row that an entry lies in.

    >>> row_of(np.array([0, 2, 2, 5]), 2)
    2
    """
    return int(np.searchsorted(indptr, entry, "right")) - 1


def find_twice(indices: h5py.Dataset, indptr: np.ndarray) -> int | None:
    """Find the first row that names a column twice, with columns in any order; read through HDF5."""
    for first, last in _row_parts(indptr):
        start, stop = int(indptr[first]), int(indptr[last])
        columns = indices[start:stop].astype(np.int64)
        rows = np.repeat(np.arange(first, last), np.diff(indptr[first : last + 1]))
        order = np.lexsort((columns, rows))
        columns, rows = columns[order], rows[order]
        again = (columns[1:] == columns[:-1]) & (rows[1:] == rows[:-1])
        if again.any():
            return int(rows[1:][again.argmax()])
    return None


def _row_parts(indptr: np.ndarray) -> Iterator[tuple[int, int]]:
    first, num_rows = 0, len(indptr) - 1
    while first < num_rows:
        last = int(np.searchsorted(indptr, indptr[first] + PART_VALUES, "right")) - 1
        last = min(max(last, first + 1), num_rows)
        yield first, last
        first = last


class MatrixCheck:
    """Checker of a sparse matrix whose chunks are read.

    Parameters
    ----------
    file : h5py.File
    path : Path
    prefix : str
        Path of its group.
    ours : bool
        Columns then ascend in each row, and codes are 1 to 255.

    Attributes
    ----------
    indptr : (num_rows + 1,) int64 or None
    problems, notes : list of str
    """

    def __init__(self, file: h5py.File, path: Path, prefix: str, ours: bool) -> None:
        self.prefix, self.ours, self._indices = prefix, ours, file[f"{prefix}/indices"]
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.indptr: np.ndarray | None = None
        self.columns: ColumnLook | None = None
        self._field: MatrixField | None = None
        self._zeros: list[int] = []
        try:
            if ours:
                read_matrix(file)
            Guard(path).check_matrix(file, prefix)
            self._field = look_at_matrix(file[prefix], path, prefix, None)
            self.indptr = read_indptr(file[prefix], path, self._field)
            self.columns = ColumnLook(self.indptr, self._field.num_columns, self._indices.dtype)
        except FieldError as error:
            (self.problems if ours else self.notes).append(_short(error, path))
        except FileError as error:
            self.problems.append(_short(error, path))

    def look_at_codes(self, first: int, data: np.ndarray) -> None:
        """Check the codes of an h5chunk file, as `ColumnLook.__call__` does columns."""
        assert self._field is not None
        zero = data[: max(0, self._field.num_entries - first)] == 0
        if zero.any():
            self._zeros.append(first + int(zero.argmax()))

    def finish(self, whole: bool) -> None:
        """Report the problems, after all chunks were read."""
        look, indptr, name = self.columns, self.indptr, self.prefix
        if look is None or indptr is None or self._field is None:
            return
        if whole:
            look.finish()
        if look.outside is not None:
            row, columns = row_of(indptr, look.outside), self._field.num_columns
            self.problems.append(f"{name}: row {row} names a column outside of the {columns} that there are")
        if look.twice is not None:
            self.problems.append(f"{name}: row {row_of(indptr, look.twice)} names a column twice")
        if look.falls is not None and self.ours:
            self.problems.append(f"{name}: the columns of row {row_of(indptr, look.falls)} do not ascend")
        elif look.falls is not None and whole and look.twice is None and look.outside is None:
            row_twice = find_twice(self._indices, indptr)
            if row_twice is not None:
                self.problems.append(f"{name}: row {row_twice} names a column twice")
        if self._zeros:
            self.problems.append(f"{name}: entry {min(self._zeros)} has the code 0: codes are from 1 to 255")

    def rows(self, part: str, first: int, stop: int) -> tuple[int, int] | None:
        """Return the rows that entries ``first`` to ``stop`` of a part lie in; None if they are not known."""
        if self.indptr is None:
            return None
        if part == "indptr":
            return max(0, first - 1), max(0, min(stop, len(self.indptr) - 1) - 1)
        return row_of(self.indptr, first), row_of(self.indptr, stop - 1)


def find_matrices(file: h5py.File, path: Path, names: list[str], is_csr: bool) -> dict[str, MatrixCheck]:
    """Find the sparse matrices among datasets, by the path of their group.

    Parameters
    ----------
    is_csr : bool
        Whether it is an h5chunk file with a matrix, ``X``.
    """
    return {
        prefix: MatrixCheck(file, path, prefix, is_csr and prefix == MATRIX) for prefix in find_matrix_groups(names)
    }


def _short(error: FileError, path: Path) -> str:
    """Return the message of an error without the path."""
    return str(error).partition(f"{path.name}: ")[2] or str(error)
