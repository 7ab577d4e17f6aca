"""What `h5chunk.info` says of a sparse matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.plan.layout import human_bytes
from h5chunk.store.read.matrixfield import look_at_matrix
from h5chunk.store.write.csr import CSR, MATRIX, read_matrix
from h5chunk.tools.report import Report

PART_ROWS = 1 << 20  # of indptr, and of data, read at a time
LOOK_BYTES = 256 << 20  # codes of more than this are not looked at


@dataclass(frozen=True)
class MatrixInfo:
    """A matrix in a file of ours.

    Attributes
    ----------
    kind : {"csr", "dense"}
    num_rows, num_columns : int
    num_entries : int or None
        None for dense rows, as is all that follows from it.
    density : float or None
    median_row_entries : float or None
    max_row_entries : int or None
    scale : float
    pattern : bool
        All values are one, and none is stored.
    value_range : (float, float) or None
        None where the file is too large to look at all values, or there are none.
    stored_bytes : int
        Of rows, columns and values.
    """

    kind: str
    num_rows: int
    num_columns: int
    num_entries: int | None
    density: float | None
    median_row_entries: float | None
    max_row_entries: int | None
    scale: float
    pattern: bool
    value_range: tuple[float, float] | None
    stored_bytes: int

    def __str__(self) -> str:
        shape = f"{self.num_rows:,} x {self.num_columns:,}"
        size = human_bytes(self.stored_bytes)
        if self.num_entries is None:
            return f"matrix {shape}, dense rows, values codes / {self.scale:g}, {size}"
        values = "all ones, none stored" if self.pattern else f"codes / {self.scale:g}"
        if self.value_range and not self.pattern:
            values += f", from {self.value_range[0]:g} to {self.value_range[1]:g}"
        return (
            f"matrix {shape}, {self.num_entries:,} entries (density {self.density:.3g}; "
            f"a row {self.median_row_entries:g} in the median, {self.max_row_entries:,} at most), "
            f"values {values}, {size}"
        )


@dataclass(frozen=True)
class ForeignMatrix(Report):
    """A sparse matrix in a file of others, such as one of AnnData's.

    Attributes
    ----------
    name : str
        Path of its group in the file.
    num_rows, num_columns, num_entries : int or None
        None where it is not of compressed rows.
    dtype : str
        Of the values.
    stored_bytes : int
        Of rows, columns and values.
    verdict : str
        How to train on it.
    """

    name: str
    num_rows: int | None
    num_columns: int | None
    num_entries: int
    dtype: str
    stored_bytes: int
    verdict: str

    def lines(self) -> list[str]:
        shape = f"{self.num_rows:,} x {self.num_columns:,}, " if self.num_rows is not None else ""
        return [
            f"sparse matrix {self.name!r}: {shape}{self.num_entries:,} entries, values {self.dtype}, "
            f"{human_bytes(self.stored_bytes)}",
            f"    {self.verdict}",
        ]


def foreign_matrices(file: h5py.File, path: Path, names: Iterable[str]) -> list[ForeignMatrix]:
    """The groups among datasets of these names that hold what a sparse matrix is made of."""
    there = set(names)
    groups = sorted(name[: -len("/indptr")] for name in there if name.endswith("/indptr"))
    return [
        _foreign_matrix(file[name], path, name)
        for name in groups
        if {f"{name}/indices", f"{name}/data"} <= there and isinstance(file[name], h5py.Group)
    ]


def _foreign_matrix(group: h5py.Group, path: Path, name: str) -> ForeignMatrix:
    parts = [group[part] for part in ("indptr", "indices", "data")]
    about = (math.prod(parts[2].shape), str(parts[2].dtype), sum(part.id.get_storage_size() for part in parts))
    try:
        found = look_at_matrix(group, path, name, None)
    except FileError as error:
        return ForeignMatrix(name, None, None, *about, str(error).removeprefix(f"{printable(path)}: {name!r} "))
    data = repr(printable(path))
    data = data if name == MATRIX else f"h5chunk.ChunkDataset({data}, fields=[{name!r}])"
    verdict = (
        f"its rows are samples as they are: h5chunk.ChunkLoader({data}, batch_size); "
        "h5chunk convert makes a file of it that is shuffled, and smaller where values are counts"
    )
    return ForeignMatrix(name, found.num_rows, found.num_columns, *about, verdict)


def info_matrix(file: h5py.File) -> MatrixInfo | None:
    """The matrix in a file of ours; None if there is none.

    Raises
    ------
    FileError
        What it says of itself cannot be.
    """
    matrix = read_matrix(file)
    if matrix is None:
        return None
    density = median = largest = value_range = None
    item = file[MATRIX]
    stored = item.id.get_storage_size() if isinstance(item, h5py.Dataset) else 0
    if matrix.kind == CSR and matrix.num_entries is not None:
        stored = sum(item[name].id.get_storage_size() for name in ("indptr", "indices", "data"))
        sizes = np.diff(item["indptr"][()])
        if (sizes < 0).any():
            raise FileError(f"{printable(file.filename)}: damaged: indptr goes down")
        density = matrix.num_entries / (matrix.num_rows * matrix.num_columns)
        median, largest = float(np.median(sizes)), int(sizes.max())
        value_range = _value_range(item["data"], matrix.scale)
    return MatrixInfo(
        kind=matrix.kind,
        num_rows=matrix.num_rows,
        num_columns=matrix.num_columns,
        num_entries=matrix.num_entries,
        density=density,
        median_row_entries=median,
        max_row_entries=largest,
        scale=matrix.scale,
        pattern=matrix.pattern,
        value_range=value_range,
        stored_bytes=stored,
    )


def _value_range(data: h5py.Dataset, scale: float) -> tuple[float, float] | None:
    if not data.size or data.nbytes > LOOK_BYTES:
        return None
    ranges = [(part.min(), part.max()) for part in _parts(data)]
    return float(min(low for low, _ in ranges)) / scale, float(max(high for _, high in ranges)) / scale


def _parts(data: h5py.Dataset) -> Iterator[np.ndarray]:
    for start in range(0, len(data), PART_ROWS):
        yield data[start : start + PART_ROWS]
