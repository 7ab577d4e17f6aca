"""Check the tables of an h5chunk file, and the sparse matrices of any file, for contradictions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, count_text, printable
from h5chunk.store.format.header import Header, read_matrix
from h5chunk.store.format.spec import CHECKSUMS, GROUP, IMAGE_TABLES
from h5chunk.store.hdf5.guard import Guard, small_attribute
from h5chunk.store.read.fields import describe_matrix, in_time_order
from h5chunk.store.read.ragged import describe_images, read_image_sizes, read_indptr

TABLES = ("source_index", "source_name_ends", "source_names")
PART_VALUES = 4 << 20  # labels or matrix entries that are read at a time


def find_table_problems(file: h5py.File, header: Header, names: list[str]) -> Iterator[str]:
    """Yield a message for each contradiction between the group ``/h5chunk`` and the fields."""
    num_samples = header.num_samples
    tables = {name: file[f"{GROUP}/{name}"] for name in TABLES if f"{GROUP}/{name}" in names}
    for name, table in tables.items():
        if name != "source_names" and table.shape != (num_samples,):
            yield f"/{GROUP}/{name} has the shape {table.shape} for {count_text(num_samples, 'sample')}"
            return
    if "source_index" in tables:
        index = np.sort(tables["source_index"][()])
        if index[0] < 0:
            yield f"/{GROUP}/source_index contains the negative index {index[0]}"
        twice = index[1:] == index[:-1]
        if twice.any():
            yield f"/{GROUP}/source_index contains sample {index[1:][twice.argmax()]} of the source twice"
    if "source_name_ends" in tables and "source_names" in tables:
        ends = tables["source_name_ends"][()]
        if (np.diff(ends, prepend=0) < 0).any() or ends[-1] != len(tables["source_names"]):
            yield f"/{GROUP}/source_name_ends does not divide the names, so the names of samples are unknown"
    if header.class_names and "labels" in names:
        yield from _check_codes(file["labels"], len(header.class_names), "classes")
    for name in names:
        table = f"{GROUP}/categories/{name}"
        if table in names:
            yield from _check_codes(file[name], len(file[table]), "categories")
    layout = str(header.options.get("layout")).upper()
    for name in names:
        dataset = file[name]
        axes = small_attribute(dataset, "axes", b"")
        if {layout.encode(), axes} == {b"NCHW", b"NHWC"}:
            yield f"{name} has the attribute axes={axes.decode()}, but was written with layout={layout.lower()}"
        is_field = "/" not in name and f"{CHECKSUMS}/{name}" in names and "repack" not in header.options
        chunks = dataset.chunks or ()
        if is_field and (dataset.shape[:1] != (num_samples,) or chunks[:1] != (header.chunk_samples,)):
            yield (
                f"{name} has the shape {dataset.shape} in chunks of {chunks}, but the header records {num_samples} "
                f"samples in chunks of {header.chunk_samples}"
            )


def _check_codes(field: h5py.Dataset, num_categories: int, noun: str) -> Iterator[str]:
    """Yield a message if a code is not that of a category, nor -1, which means none."""
    if field.dtype.kind not in "iu" or field.ndim != 1:
        return
    for first in range(0, len(field), PART_VALUES):
        values = field[first : first + PART_VALUES]
        wrong = (values < -1) | (values >= num_categories)
        if wrong.any():
            index = int(wrong.argmax())
            name = field.name.lstrip("/")
            yield f"{name}: sample {first + index} has the label {values[index]}, but there are {num_categories} {noun}"
            return


class MatrixCheck:
    """Check the entries of a sparse matrix, chunk by chunk, in any order and from any thread.

    If h5chunk wrote the matrix (``by_h5chunk``), columns must ascend within each row, unless entries are sorted by
    time, and no value may be zero, infinite or NaN.
    """

    def __init__(self, file: h5py.File, path: Path, prefix: str, by_h5chunk: bool) -> None:
        self.prefix, self.by_h5chunk, self._indices = prefix, by_h5chunk, file[f"{prefix}/indices"]
        self._dtype, self._value_dtype = self._indices.dtype, file[f"{prefix}/data"].dtype
        self._ascends = by_h5chunk and not in_time_order(file[prefix])
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.indptr: np.ndarray | None = None  # (num_rows + 1,) int64; None if too damaged, or not a matrix
        self._num_columns = 0
        self._ends: list[tuple[int, int, int, int]] = []  # start, stop, first and last column of each checked run
        # for each kind of error, the first such entry of each run
        self._faults: dict[str, list[int]] = {"outside": [], "twice": [], "falls": [], "zero": [], "infinite": []}
        try:
            if by_h5chunk:
                read_matrix(file)
            Guard(path).check_matrix(file, prefix)
            field = describe_matrix(file[prefix], path, prefix, None)
            self.indptr, self._num_columns = read_indptr(file, path, field), field.num_columns
        except FieldError as error:
            (self.problems if by_h5chunk else self.notes).append(without_path(error, path))
        except FileError as error:
            self.problems.append(without_path(error, path))

    def check_column_indices(self, first: int, data: np.ndarray) -> None:
        """Check the bytes of consecutive column indices, starting at entry ``first``."""
        assert self.indptr is not None
        columns = data.view(self._dtype)[: max(0, int(self.indptr[-1]) - first)]
        if not len(columns):
            return
        outside = columns >= self._num_columns
        if self._dtype.kind == "i":
            outside |= columns < 0
        starts = np.zeros(len(columns) + 1, bool)
        low, high = np.searchsorted(self.indptr, (first, first + len(columns)))
        starts[self.indptr[low:high] - first] = True
        inside = ~starts[1:-1]
        self._note("outside", outside, first)
        self._note("twice", (columns[1:] == columns[:-1]) & inside, first + 1)
        self._note("falls", (columns[1:] < columns[:-1]) & inside, first + 1)
        self._ends.append((first, first + len(columns), int(columns[0]), int(columns[-1])))

    def check_entry_values(self, first: int, data: np.ndarray) -> None:
        """Check the bytes of consecutive stored values of an h5chunk file, starting at entry ``first``."""
        assert self.indptr is not None
        values = data.view(self._value_dtype)[: max(0, int(self.indptr[-1]) - first)]
        self._note("zero", values == 0, first)
        if self._value_dtype.kind == "f":
            self._note("infinite", ~np.isfinite(values), first)

    def _note(self, kind: str, wrong: np.ndarray, first: int) -> None:
        if wrong.any():
            self._faults[kind].append(first + int(wrong.argmax()))

    def finish(self, is_complete: bool) -> None:
        """Add the errors of all runs to ``problems``. ``is_complete`` is true if all chunks were read."""
        if self.indptr is None:
            return
        if is_complete:  # compare the last column of each run with the first of the next, if both are in one row
            for (_, stop, _, last), (start, _, first, _) in pairwise(sorted(self._ends)):
                goes_on = start == stop and self.indptr[np.searchsorted(self.indptr, start)] != start
                if goes_on and first <= last:
                    self._faults["twice" if first == last else "falls"].append(start)
        name, firsts = self.prefix, {kind: min(entries) for kind, entries in self._faults.items() if entries}
        rows = {kind: row_of(self.indptr, entry) for kind, entry in firsts.items()}
        if "outside" in rows:
            row, columns = rows["outside"], self._num_columns
            self.problems.append(f"{name}: row {row} has a column outside of the {columns} columns")
        if "falls" in rows and not self._ascends and is_complete and not rows.keys() & {"twice", "outside"}:
            row_twice = find_repeated_column(self._indices, self.indptr)
            if row_twice is not None:
                rows["twice"] = row_twice
        if "twice" in rows:
            self.problems.append(f"{name}: row {rows['twice']} has a column twice")
        if "falls" in rows and self._ascends:
            self.problems.append(f"{name}: the columns of row {rows['falls']} do not ascend")
        if "zero" in firsts:
            self.problems.append(f"{name}: the value of entry {firsts['zero']} is stored as 0, which is invalid")
        if "infinite" in firsts:
            self.problems.append(f"{name}: the value of entry {firsts['infinite']} is not finite")

    def rows(self, part: str, first: int, stop: int) -> tuple[int, int] | None:
        """Return the first and last row of elements ``first`` to ``stop`` of a dataset; None if they are unknown."""
        if self.indptr is None:
            return None
        if part == "indptr":
            return max(0, first - 1), max(0, min(stop, len(self.indptr) - 1) - 1)
        return row_of(self.indptr, first), row_of(self.indptr, stop - 1)


class ImagesCheck:
    """Check the tables of images of any size. Checksums protect the bytes of the images."""

    notes: tuple[str, ...] = ()

    def __init__(self, file: h5py.File, path: Path, prefix: str, header: Header) -> None:
        self.problems: list[str] = []
        self.indptr: np.ndarray | None = None
        try:
            Guard(path).check_parts(file, prefix, ("data", *IMAGE_TABLES))
            field = describe_images(file[prefix], path, prefix, header.chunk_samples)
            self.indptr = read_indptr(file, path, field)
            read_image_sizes(file[prefix], path, field, self.indptr)
            if field.num_rows != header.num_samples:
                self.problems.append(f"{prefix} has {field.num_rows} images for {header.num_samples} samples")
            color = header.options.get("color")
            if field.channels != (1 if color == "gray" else 3):  # channels determine how images are decoded
                self.problems.append(f"{prefix} has channels={field.channels}, but was written with color={color!r}")
        except FileError as error:
            self.problems.append(without_path(error, path))

    def finish(self, is_complete: bool) -> None:
        """Do nothing, because everything was checked when the file was opened."""

    def rows(self, part: str, first: int, stop: int) -> tuple[int, int] | None:
        """Return the indices of the first and last image in bytes ``first`` to ``stop``; None if they are unknown."""
        if self.indptr is None or part != "data":
            return None
        return row_of(self.indptr, first), row_of(self.indptr, stop - 1)


def row_of(indptr: np.ndarray, entry: int) -> int:
    """Return the row of an entry of a CSR matrix.

    >>> row_of(np.array([0, 2, 2, 5]), 2)
    2
    """
    return int(np.searchsorted(indptr, entry, "right")) - 1


def find_repeated_column(indices: h5py.Dataset, indptr: np.ndarray) -> int | None:
    """Return the first row in which a column occurs twice; None if there is no such row.

    Columns may be in any order. They are read through HDF5.
    """
    first, num_rows = 0, len(indptr) - 1
    while first < num_rows:
        last = int(np.searchsorted(indptr, indptr[first] + PART_VALUES, "right")) - 1
        last = min(max(last, first + 1), num_rows)
        columns = indices[int(indptr[first]) : int(indptr[last])].astype(np.int64)
        rows = np.repeat(np.arange(first, last), np.diff(indptr[first : last + 1]))
        order = np.lexsort((columns, rows))
        columns, rows = columns[order], rows[order]
        again = (columns[1:] == columns[:-1]) & (rows[1:] == rows[:-1])
        if again.any():
            return int(rows[1:][again.argmax()])
        first = last
    return None


def without_path(error: Exception, path: Path) -> str:
    """Return the message of an error without the path at its beginning."""
    return str(error).removeprefix(f"{printable(path)}: ")
