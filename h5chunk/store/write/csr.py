"""Write a matrix as `h5chunk.store.format.spec` specifies it: as a CSR group, or as dense rows."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from h5chunk.plan.csr import CODE, CsrLayout
from h5chunk.plan.layout import Layout
from h5chunk.store.format.header import CSR, DENSE, MATRIX, header_attributes
from h5chunk.store.format.spec import GROUP, ArraySpec, FileSpec, field_spec
from h5chunk.store.write.new_file import NewFile, checksum_specs, column_specs, table_specs


def csr_spec(layout: CsrLayout, *, scale: float, **parts: Any) -> FileSpec:
    """Return the file to write: see `_spec` for ``parts``; a value is the stored number divided by ``scale``."""
    entries, chunks = (layout.num_entries,), (layout.chunk_entries,)
    arrays = {
        f"{MATRIX}/indices": ArraySpec(entries, layout.index_dtype, chunks),
        f"{MATRIX}/data": ArraySpec(entries, layout.value_dtype or CODE, chunks, fill=1 if layout.pattern else None),
        f"{MATRIX}/indptr": ArraySpec((layout.num_rows + 1,), np.dtype(np.int64)),
    }
    shape = np.array([layout.num_rows, layout.num_columns], np.int64)
    about = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape}
    return _spec(layout, CSR, arrays, about, scale=scale, pattern=layout.pattern, **parts)


def dense_spec(layout: Layout, dtype: np.dtype, *, gzip: bool, **parts: Any) -> FileSpec:
    """Return the file to write for dense rows, compressed or not: see `_spec` for ``parts``."""
    num_columns = layout.sample_bytes // dtype.itemsize
    rows = field_spec(layout.num_samples, layout.chunk_samples, (num_columns,), dtype, gzip=gzip)
    return _spec(layout, DENSE, {MATRIX: rows}, {}, **parts)


def _spec(
    layout: CsrLayout | Layout,
    kind: str,
    arrays: Mapping[str, ArraySpec],
    about: Mapping[str, Any],
    *,
    scale: float,
    pattern: bool,
    attributes: Mapping[str, Any],
    fields: Mapping[str, np.ndarray],
    tables: Mapping[str, np.ndarray],
) -> FileSpec:
    """Return the file to write; fields and tables, by path below the root and ``/h5chunk``, only give types.

    ``attributes`` has ``seed``, ``shuffled`` and ``options``.
    """
    datasets = {**arrays, **column_specs(fields, layout.num_samples, layout.chunk_samples)}
    for name, array in arrays.items():
        if array.fill is None:
            datasets |= checksum_specs([name], -(-array.shape[0] // array.chunks[0]) if array.chunks else 1)
    header = header_attributes(
        num_samples=layout.num_samples,
        chunk_samples=layout.chunk_samples,
        window_chunks=layout.window_chunks,
        cache=layout.cache,
        kind=kind,
        **attributes,
    )
    matrix = {**about, "scale": np.float64(scale), "pattern": np.uint8(pattern)}
    datasets |= {**checksum_specs(fields, layout.num_chunks), **table_specs(tables)}
    return FileSpec(datasets, {MATRIX: matrix, GROUP: header})


class CsrWriter:
    """Write the entries of a matrix, in row order, in parts of any size."""

    def __init__(self, new: NewFile, layout: CsrLayout) -> None:
        self._new = new
        self._layout = layout
        size, dtype = layout.chunk_entries, layout.value_dtype
        self._indices = _RunWriter(new, f"{MATRIX}/indices", size * layout.index_dtype.itemsize)
        self._data = None if dtype is None else _RunWriter(new, f"{MATRIX}/data", size * dtype.itemsize)

    def append(self, indices: np.ndarray, values: np.ndarray | None) -> None:
        """Write the next entries."""
        dtype = None if values is None else values.dtype
        if indices.dtype != self._layout.index_dtype or dtype != self._layout.value_dtype:
            raise TypeError(f"indices are {indices.dtype}, values {dtype}")
        if values is not None and len(values) != len(indices):
            raise TypeError(f"{len(values)} values for {len(indices)} indices")
        self._indices.append(indices)
        if self._data is not None and values is not None:
            self._data.append(values)

    def finish(self, row_entries: np.ndarray) -> None:
        """Write ``indptr`` and the checksums."""
        indptr = np.zeros(self._layout.num_rows + 1, np.int64)
        np.cumsum(row_entries, out=indptr[1:])
        if indptr[-1] != self._layout.num_entries:
            raise ValueError(f"{indptr[-1]} entries in the rows, {self._layout.num_entries} in the matrix")
        self._new.write(f"{MATRIX}/indptr", indptr)
        checksum = zlib.crc32(indptr.tobytes())
        self._new.write(f"{GROUP}/checksums/{MATRIX}/indptr", np.array([checksum], np.uint32))
        self._indices.finish(self._layout.num_entries * self._layout.index_dtype.itemsize)
        if self._data is not None and self._layout.value_dtype is not None:
            self._data.finish(self._layout.num_entries * self._layout.value_dtype.itemsize)


class _RunWriter:
    """Write the bytes of a dataset in order, and compute the checksum of each chunk."""

    def __init__(self, new: NewFile, name: str, chunk_bytes: int) -> None:
        self._new, self._name, self._chunk_bytes = new, name, chunk_bytes
        self._done = 0
        self._checksum = 0
        self._checksums: list[int] = []

    def append(self, values: np.ndarray) -> None:
        view = np.ascontiguousarray(values).data.cast("B")
        if len(view):
            self._new.write_bytes(self._name, self._done, view)
        while len(view):
            part = view[: self._chunk_bytes - self._done % self._chunk_bytes]
            self._checksum = zlib.crc32(part, self._checksum)
            self._done += len(part)
            if self._done % self._chunk_bytes == 0:
                self._checksums.append(self._checksum)
                self._checksum = 0
            view = view[len(part) :]

    def finish(self, num_bytes: int) -> None:
        if self._done != num_bytes:
            raise ValueError(f"{self._done} bytes of {self._name} were written, not {num_bytes}")
        rest = -self._done % self._chunk_bytes
        self.append(np.zeros(rest, np.uint8))
        self._new.write(f"{GROUP}/checksums/{self._name}", np.array(self._checksums, np.uint32))
