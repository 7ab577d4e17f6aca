"""Describe the sparse matrices of a file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, human_bytes, printable
from h5chunk.store.format.matrix import CSR, MATRIX, read_matrix
from h5chunk.store.read.fields import MATRIX_PARTS, find_matrix_groups, look_at_matrix
from h5chunk.tools.report import Report

PART_ROWS = 1 << 20  # of data, read at a time
LOOK_BYTES = 256 << 20  # codes of more than this are not read


@dataclass(frozen=True)
class MatrixInfo(Report):
    """A sparse matrix, or the dense rows of one in an h5chunk file.

    Attributes
    ----------
    name : str
        Path of its group, or of its dataset.
    kind : {"csr", "dense", ""}
        Empty if the file does not say that rows are compressed.
    num_rows, num_columns, num_entries : int or None
        None where they are not known: the first two of a matrix that is not of compressed rows, the last of dense rows.
    dtype : str
        Of the values, as stored.
    stored_bytes : int
        Of rows, columns and values.
    verdict : str
        How to train on it; empty in an h5chunk file.
    density, median_row_entries, max_row_entries : float or None
        In an h5chunk file; None for dense rows.
    scale : float
        A value is what is stored over this.
    pattern : bool
        All values are one, and none is stored.
    value_range : (float, float) or None
        None where not all values were read, or there are none.
    """

    name: str
    kind: str
    num_rows: int | None
    num_columns: int | None
    num_entries: int | None
    dtype: str
    stored_bytes: int
    verdict: str = ""
    density: float | None = None
    median_row_entries: float | None = None
    max_row_entries: int | None = None
    scale: float = 1.0
    pattern: bool = False
    value_range: tuple[float, float] | None = None

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        shape = f"{self.num_rows:,} x {self.num_columns:,}, " if self.num_rows is not None else ""
        size = human_bytes(self.stored_bytes)
        if self.verdict:
            about = f"sparse matrix {self.name!r}: {shape}{self.num_entries:,} entries, values {self.dtype}, {size}"
            return [about, f"    {self.verdict}"]
        if self.num_entries is None:
            return [f"matrix {shape}dense rows, values codes / {self.scale:g}, {size}"]
        values = "all ones, none stored" if self.pattern else f"codes / {self.scale:g}"
        if self.value_range and not self.pattern:
            values += f", from {self.value_range[0]:g} to {self.value_range[1]:g}"
        return [
            f"matrix {shape}{self.num_entries:,} entries (density {self.density:.3g}; "
            f"a row {self.median_row_entries:g} in the median, {self.max_row_entries:,} at most), "
            f"values {values}, {size}"
        ]


def find_matrices(file: h5py.File, path: Path, names: Iterable[str]) -> list[MatrixInfo]:
    """Describe the groups of another HDF5 file that hold what a sparse matrix is made of.

    Parameters
    ----------
    file : h5py.File
    path : Path
    names : iterable of str
        Of the datasets that were checked.
    """
    groups = [name for name in find_matrix_groups(names) if isinstance(file[name], h5py.Group)]
    return [_describe(file[name], path, name) for name in groups]


def _describe(group: h5py.Group, path: Path, name: str) -> MatrixInfo:
    data = group["data"]
    about = MatrixInfo(name, "", None, None, math.prod(data.shape), str(data.dtype), _stored_bytes(group))
    try:
        field = look_at_matrix(group, path, name, None)
    except FileError as error:
        return replace(about, verdict=str(error).removeprefix(f"{printable(path)}: {name!r} "))
    shown = repr(printable(path))
    shown = shown if name == MATRIX else f"h5chunk.ChunkDataset({shown}, fields=[{name!r}])"
    verdict = (
        f"its rows are samples as they are: h5chunk.ChunkLoader({shown}, batch_size); "
        "h5chunk convert makes a file of it that is shuffled, and smaller where values are counts"
    )
    return replace(about, kind=CSR, num_rows=field.num_rows, num_columns=field.num_columns, verdict=verdict)


def describe_matrix(file: h5py.File) -> MatrixInfo | None:
    """Describe the matrix of an h5chunk file; None if there is none.

    Raises
    ------
    FileError
        It is damaged.
    """
    matrix = read_matrix(file)
    if matrix is None:
        return None
    item = file[MATRIX]
    about = MatrixInfo(
        MATRIX,
        matrix.kind,
        matrix.num_rows,
        matrix.num_columns,
        matrix.num_entries,
        "uint8",
        _stored_bytes(item),
        scale=matrix.scale,
        pattern=matrix.pattern,
    )
    if matrix.num_entries is None:
        return about
    sizes = np.diff(item["indptr"][()])
    if (sizes < 0).any():
        raise FileError(f"{printable(file.filename)}: damaged: indptr goes down")
    return replace(
        about,
        density=matrix.num_entries / (matrix.num_rows * matrix.num_columns),
        median_row_entries=float(np.median(sizes)),
        max_row_entries=int(sizes.max()),
        value_range=_value_range(item["data"], matrix.scale),
    )


def _stored_bytes(item: h5py.Group | h5py.Dataset) -> int:
    datasets = [item] if isinstance(item, h5py.Dataset) else [item[part] for part in MATRIX_PARTS]
    return sum(dataset.id.get_storage_size() for dataset in datasets)


def _value_range(data: h5py.Dataset, scale: float) -> tuple[float, float] | None:
    if not data.size or data.nbytes > LOOK_BYTES:
        return None
    parts = (data[start : start + PART_ROWS] for start in range(0, len(data), PART_ROWS))
    ranges = [(int(part.min()), int(part.max())) for part in parts]
    return min(low for low, _ in ranges) / scale, max(high for _, high in ranges) / scale
