"""What a file of ours keeps beside the data, and what its matrices say: whether it agrees with itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError
from h5chunk.store.format import GROUP, Header
from h5chunk.store.guard.guard import Guard
from h5chunk.store.read.matrixfield import MatrixField, look_at_matrix, read_indptr
from h5chunk.store.read.rowcheck import ColumnLook, find_twice, row_of
from h5chunk.store.write.csr import CSR, MATRIX, read_matrix

PARTS = ("indptr", "indices", "data")
PART_VALUES = 4 << 20


def look_at_tables(file: h5py.File, header: Header, names: list[str]) -> Iterator[str]:
    """What is wrong in the group beside the data.

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
        yield from _look_at_labels(file["labels"], len(header.class_names))
    for name in names:
        dataset = file[name]
        own = "/" not in name and f"{GROUP}/checksums/{name}" in names and '"repack"' not in header.options
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


def _look_at_labels(labels: h5py.Dataset, num_classes: int) -> Iterator[str]:
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        return
    for first in range(0, len(labels), PART_VALUES):
        values = labels[first : first + PART_VALUES]
        wrong = (values < 0) | (values >= num_classes)
        if wrong.any():
            place = int(wrong.argmax())
            yield f"labels: sample {first + place} has the label {values[place]} but there are {num_classes} classes"
            return


class MatrixCheck:
    """A sparse matrix, as its chunks are read.

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
        """As `ColumnLook.__call__`, of the values in a file of ours."""
        assert self._field is not None
        zero = data[: max(0, self._field.num_entries - first)] == 0
        if zero.any():
            self._zeros.append(first + int(zero.argmax()))

    def finish(self, whole: bool) -> None:
        """Say what is wrong, after all chunks were read."""
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
        """The rows that entries ``first`` to ``stop`` of a part lie in; None: not known."""
        if self.indptr is None:
            return None
        if part == "indptr":
            return max(0, first - 1), max(0, min(stop, len(self.indptr) - 1) - 1)
        return row_of(self.indptr, first), row_of(self.indptr, stop - 1)


def find_matrices(file: h5py.File, path: Path, names: list[str], is_csr: bool) -> dict[str, MatrixCheck]:
    """The sparse matrices among datasets, by the path of their group.

    Parameters
    ----------
    is_csr : bool
        Whether the file is one of ours with a matrix: ``X``.
    """
    there = set(names)
    groups = [name[: -len("/indptr")] for name in names if name.endswith("/indptr")]
    return {
        prefix: MatrixCheck(file, path, prefix, is_csr and prefix == MATRIX)
        for prefix in groups
        if all(f"{prefix}/{part}" in there for part in PARTS)
    }


def holds_matrix(file: h5py.File) -> bool:
    """Whether a file of ours says that it has a sparse matrix."""
    return bytes(file[GROUP].attrs.get("kind", b"")) == CSR.encode()


def _short(error: FileError, path: Path) -> str:
    """Its message without the path."""
    return str(error).partition(f"{path.name}: ")[2] or str(error)
