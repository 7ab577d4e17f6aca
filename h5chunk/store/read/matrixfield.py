"""A sparse matrix as a field: what its group in the file says, whoever wrote it.

`h5chunk.store.format` specifies that of an h5chunk file. AnnData's differ in types, and may be compressed:
https://anndata.readthedocs.io/en/latest/fileformat-prose.html, "Sparse arrays".
"""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.sparse import plan_csr
from h5chunk.sources.sparse.heap import POINTER, Bytes, attribute_bytes, resolve
from h5chunk.store.guard.claims import address_of, small_attribute

MAX_RATIO = 1032  # of gzip, the most that a stored byte can stand for
SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class MatrixField:
    """A CSR matrix of a file; a sample is a row of it.

    Attributes
    ----------
    name : str
        What users call it.
    dataset : str
        Path of its group in the file.
    num_rows, num_columns, num_entries : int
    index_dtype : np.dtype
        Of columns, as stored.
    value_dtype : np.dtype or None
        None for a pattern: all values are one, and none is read.
    scale : float
        A value is what is stored over this.
    chunk_samples : int
        Rows of a nominal chunk of rows.
    filtered : bool
        Whether entries are compressed.
    """

    name: str
    dataset: str
    num_rows: int
    num_columns: int
    num_entries: int
    index_dtype: np.dtype
    value_dtype: np.dtype | None
    scale: float
    chunk_samples: int
    filtered: bool
    axes: str = ""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Of a row made dense."""
        return (self.num_columns,)

    @property
    def dtype(self) -> np.dtype:
        """Of the values, as stored."""
        return np.dtype(np.uint8) if self.value_dtype is None else self.value_dtype

    @property
    def entry_bytes(self) -> int:
        """Stored bytes of an entry."""
        return self.index_dtype.itemsize + (0 if self.value_dtype is None else self.value_dtype.itemsize)

    @property
    def grid(self) -> ChunkGrid:
        """Its nominal chunks: rows of average length."""
        row_bytes = max(1, math.ceil(self.num_entries * self.entry_bytes / max(1, self.num_rows)))
        return ChunkGrid((self.num_rows, row_bytes), (self.chunk_samples, row_bytes), 1, self.filtered)


def look_at_matrix(group: h5py.Group, path: Path, name: str, chunk_samples: int | None) -> MatrixField:
    """What a group says of the CSR matrix in it.

    Parameters
    ----------
    group : h5py.Group
    path : path
    name : str
        For messages.
    chunk_samples : int, optional
        Rows of a nominal chunk, where the file says it.

    Raises
    ------
    FieldError
        It is no CSR matrix.
    FileError
        It is damaged.
    """
    where = f"{printable(path)}: {name!r}"
    for part in ("indptr", "indices", "data"):
        dataset = group.get(part)
        if not isinstance(dataset, h5py.Dataset) or dataset.ndim != 1 or dataset.dtype.kind not in "biuf":
            raise FieldError(f"{where} is no CSR matrix: it has no list of numbers {part!r}")
    num_rows, num_columns = _shape(group, where)
    num_entries = len(group["indices"])
    if len(group["indptr"]) != num_rows + 1:
        raise FileError(f"{where} is damaged: {num_rows} rows but indptr has {len(group['indptr'])} numbers")
    if len(group["data"]) != num_entries:
        raise FileError(f"{where} is damaged: {num_entries} indices but {len(group['data'])} values")
    if group["indices"].dtype.kind not in "iu" or group["indptr"].dtype.kind not in "iu":
        raise FieldError(f"{where} is no CSR matrix: its indptr or indices are not whole numbers")
    pattern, scale = False, 1.0
    if chunk_samples is not None:
        pattern, scale = _codes(group, where)
    values = None if pattern else group["data"].dtype.newbyteorder("=")
    filtered = any(group[part].id.get_create_plist().get_nfilters() > 0 for part in ("indices", "data"))
    index_dtype = group["indices"].dtype.newbyteorder("=")
    if chunk_samples is None:
        chunk_samples = _nominal_chunk(group, num_rows, num_columns, num_entries)
    return MatrixField(
        name, group.name, num_rows, num_columns, num_entries, index_dtype, values, scale, chunk_samples, filtered
    )


def _codes(group: h5py.Group, where: str) -> tuple[bool, float]:
    """Whether a matrix of ours is a pattern, and its scale."""
    try:
        pattern, scale = bool(int(small_attribute(group, "pattern"))), float(small_attribute(group, "scale"))
    except (TypeError, ValueError, OverflowError):
        raise FileError(f"{where} is damaged: it does not say its scale, or whether it is a pattern") from None
    if not 0 < scale < math.inf:
        raise FileError(f"{where} is damaged: its scale is {scale}")
    if group["data"].dtype != np.uint8:
        raise FileError(f"{where} is damaged: its codes are {group['data'].dtype}, not uint8")
    return pattern, scale


def _shape(group: h5py.Group, where: str) -> tuple[int, int]:
    """Rows and columns; that they are rows which are compressed has to be said, as a CSC matrix looks the same."""
    try:
        kind = _word(group, "encoding-type", where) or _word(group, "h5sparse_format", where)
    except FileError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise FileError(f"{where} is damaged: what it says of itself cannot be read: {error}") from None
    if kind not in ("csr_matrix", "csr"):
        said = f"it says {kind!r}" if kind else "it does not say so"
        raise FieldError(f"{where} is no matrix of compressed rows ({said}): pack it with h5chunk convert")
    try:
        rows, columns = map(operator.index, small_attribute(group, "shape", small_attribute(group, "h5sparse_shape")))
    except (TypeError, ValueError, OverflowError):
        raise FileError(f"{where} is damaged: it has no shape of two numbers") from None
    if not (0 <= rows < 1 << 62 and 1 <= columns < 1 << 62):
        raise FileError(f"{where} is damaged: its shape is {rows} x {columns}")
    return rows, columns


def _word(group: h5py.Group, name: str, where: str) -> str:
    """An attribute that is a string; of variable length, it is looked up without HDF5, which hangs on damaged ones."""
    if name not in group.attrs:
        return ""
    attribute = group.attrs.get_id(name)
    kind = attribute.get_type()
    if not isinstance(kind, h5py.h5t.TypeStringID) or attribute.shape != ():
        return ""
    if not kind.is_variable_str():
        return bytes(small_attribute(group, name, b"")).rstrip(b"\0").decode("utf-8", "replace")
    file = group.file
    descriptor = os.open(file.filename, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_bytes = os.fstat(descriptor).st_size
        raw = Bytes(descriptor, num_bytes, lambda what: FileError(f"{where}: {what}"), file.userblock_size)
        pointer = attribute_bytes(raw, address_of(group)[-2], name, POINTER.itemsize)
        [word] = resolve(raw, np.frombuffer(pointer, POINTER)).tolist()
    finally:
        os.close(descriptor)
    return word.decode("utf-8", "replace")


def _nominal_chunk(group: h5py.Group, num_rows: int, num_columns: int, num_entries: int) -> int:
    """Rows that are read together: as in files of ours, but no fewer than a compressed chunk holds."""
    chosen = plan_csr(max(1, num_rows), num_columns, num_entries, pattern=False).chunk_samples
    indices = group["indices"]
    if num_entries and indices.chunks and indices.id.get_create_plist().get_nfilters():
        chosen = max(chosen, math.ceil(indices.chunks[0] * num_rows / num_entries))
    return max(1, min(chosen, num_rows))


def read_indptr(group: h5py.Group, path: Path, field: MatrixField) -> np.ndarray:
    """Where each row begins: (num_rows + 1,) int64.

    Raises
    ------
    FileError
        It is damaged.
    """
    where = f"{printable(path)}: {field.name!r}"
    dataset = group["indptr"]
    if dataset.nbytes > dataset.id.get_storage_size() * MAX_RATIO + SLACK_BYTES:
        raise FileError(
            f"{where} is damaged: indptr claims {dataset.nbytes} bytes out of {dataset.id.get_storage_size()} stored"
        )
    try:
        indptr: np.ndarray = dataset[:].astype(np.int64)
    except OSError as error:
        raise FileError(f"{where}: indptr cannot be read: {error}") from error
    if indptr[0] != 0 or indptr[-1] != field.num_entries:
        raise FileError(
            f"{where} is damaged: indptr does not lead from 0 to {field.num_entries} in {field.num_rows} rows"
        )
    falls = np.diff(indptr) < 0
    if falls.any():
        raise FileError(f"{where} is damaged: indptr falls at row {int(falls.argmax())}")
    return indptr
