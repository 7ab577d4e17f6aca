"""Read what an h5chunk file says of its matrix, and check it against the specification."""

from __future__ import annotations

from dataclasses import dataclass

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.plan.csr import index_dtype
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.open import damages_are

MATRIX = "X"  # name of the group, or of the dataset of dense rows
CSR, DENSE = "csr", "dense"  # kinds


@dataclass(frozen=True)
class Matrix:
    """The matrix of an h5chunk file; dense rows have no ``num_entries``, and a value is its code over ``scale``."""

    kind: str
    num_rows: int
    num_columns: int
    num_entries: int | None
    scale: float
    pattern: bool


def read_matrix(file: h5py.File) -> Matrix | None:
    """Read the shape and scale of the matrix of an h5chunk file; None if there is none.

    Raises FileError if it is damaged: shapes, types and the ends of ``indptr`` are checked, but not the entries.
    """
    group = file.get(GROUP)
    if not isinstance(group, h5py.Group) or "kind" not in group.attrs:
        return None
    with damages_are(FileError, f"{printable(file.filename)}: damaged: its matrix cannot be", AttributeError):
        kind = bytes(group.attrs["kind"]).decode("utf-8", "replace")
        if kind not in (CSR, DENSE):
            raise ValueError(f"its kind is {kind!r}, not {CSR} or {DENSE}: a newer h5chunk may read it")
        matrix = file[MATRIX]
        scale, pattern = float(matrix.attrs["scale"]), bool(matrix.attrs["pattern"])
        if not 0 < scale < float("inf"):
            raise ValueError(f"its scale is {scale}")
        if kind == DENSE:
            num_rows, num_columns = map(int, matrix.shape)
            if matrix.dtype != np.uint8 or num_rows != int(group.attrs["num_samples"]):
                raise ValueError(f"/{MATRIX} is {matrix.dtype} of {matrix.shape}")
            return Matrix(kind, num_rows, num_columns, None, scale, pattern)
        num_rows, num_columns = (int(size) for size in matrix.attrs["shape"])
        num_entries = _check_csr(matrix, num_rows, num_columns, int(group.attrs["num_samples"]))
        return Matrix(kind, num_rows, num_columns, num_entries, scale, pattern)


def _check_csr(group: h5py.Group, num_rows: int, num_columns: int, num_samples: int) -> int:
    indptr, indices, data = group["indptr"], group["indices"], group["data"]
    num_entries = int(indices.shape[0])
    expected = (
        (indptr, (num_rows + 1,), np.dtype(np.int64)),
        (indices, (num_entries,), index_dtype(num_columns)),
        (data, (num_entries,), np.dtype(np.uint8)),
    )
    if num_rows != num_samples or num_columns < 1:
        raise ValueError(f"{num_rows} x {num_columns} of {num_samples} samples")
    for dataset, shape, dtype in expected:
        if dataset.shape != shape or dataset.dtype != dtype:
            raise ValueError(f"{dataset.name} is {dataset.dtype} {dataset.shape}, not {dtype} {shape}")
    if indices.chunks != data.chunks:
        raise ValueError(f"chunks of {indices.chunks} indices but {data.chunks} data")
    if indptr[0] != 0 or indptr[-1] != num_entries:
        raise ValueError(f"indptr goes from {indptr[0]} to {indptr[-1]}, not from 0 to {num_entries}")
    return num_entries
