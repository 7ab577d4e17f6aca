"""Write a matrix as a CSR group or as dense rows, as `h5chunk.store.format.spec` specifies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from h5chunk.plan.csr import CODE, CsrLayout
from h5chunk.plan.layout import Layout
from h5chunk.store.format.header import CSR, DENSE, MATRIX, header_attributes
from h5chunk.store.format.spec import CHECKSUMS, GROUP, ArraySpec, FileSpec, field_spec
from h5chunk.store.write.new_file import NewFile, checksum_specs, column_specs, table_specs
from h5chunk.store.write.targets import PlainTarget


def csr_spec(layout: CsrLayout, *, scale: float, time_order: bool = False, **parts: Any) -> FileSpec:
    """Return the specification of a file with a CSR matrix, where value = stored value / ``scale``.

    ``time_order`` is True if the entries of each row are sorted by their times. ``parts`` are other arguments of
    `_spec`.
    """
    entries, chunks = (layout.num_entries,), (layout.chunk_entries,)
    arrays = {
        f"{MATRIX}/indices": ArraySpec(entries, layout.index_dtype, chunks),
        f"{MATRIX}/data": ArraySpec(entries, layout.value_dtype or CODE, chunks, fill=1 if layout.pattern else None),
        f"{MATRIX}/indptr": ArraySpec((layout.num_samples + 1,), np.dtype(np.int64)),
    }
    shape = np.array([layout.num_samples, layout.num_columns], np.int64)
    facts = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": shape}
    if time_order:
        facts["time_order"] = np.uint8(1)
    return _spec(layout, CSR, arrays, facts, scale=scale, pattern=layout.pattern, **parts)


def dense_spec(layout: Layout, dtype: np.dtype, *, gzip: bool, **parts: Any) -> FileSpec:
    """Return the specification of a file with dense rows, compressed if ``gzip``.

    ``parts`` are arguments of `_spec`.
    """
    num_columns = layout.sample_bytes // dtype.itemsize
    rows = field_spec(layout.num_samples, layout.chunk_samples, (num_columns,), dtype, gzip=gzip)
    return _spec(layout, DENSE, {MATRIX: rows}, {}, **parts)


def _spec(
    layout: Layout,
    kind: str,
    arrays: Mapping[str, ArraySpec],
    facts: Mapping[str, Any],
    *,
    scale: float,
    pattern: bool,
    attributes: Mapping[str, Any],
    fields: Mapping[str, np.ndarray],
    tables: Mapping[str, np.ndarray],
) -> FileSpec:
    """Return the specification of a file with a matrix.

    ``arrays`` and ``facts`` are the datasets and the additional attributes of the matrix. ``fields`` and ``tables`` are
    the other datasets, by path below the root and below ``/h5chunk``. Only their dtypes and shapes are used.
    ``attributes`` are the header's ``seed``, ``shuffled`` and ``options``.
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
    matrix = {**facts, "scale": np.float64(scale), "pattern": np.uint8(pattern)}
    datasets |= {**checksum_specs(fields, layout.num_chunks), **table_specs(tables)}
    return FileSpec(datasets, {MATRIX: matrix, GROUP: header})


class CsrWriter:
    """A writer of the entries of a matrix. Entries are passed in row order, any number at a time."""

    def __init__(self, new: NewFile, layout: CsrLayout) -> None:
        self._new, self._layout, self._num_done = new, layout, 0
        self._targets: dict[str, PlainTarget] = {}
        for name, dtype in (("indices", layout.index_dtype), ("data", layout.value_dtype)):
            if dtype is not None and layout.num_entries:
                self._targets[name] = PlainTarget(new, f"{MATRIX}/{name}", layout.chunk_entries * dtype.itemsize)

    def append(self, indices: np.ndarray, values: np.ndarray | None) -> None:
        """Write the next entries. For a pattern, ``values`` is None."""
        dtype = None if values is None else values.dtype
        if indices.dtype != self._layout.index_dtype or dtype != self._layout.value_dtype:
            raise TypeError(f"indices have the dtype {indices.dtype}, and values have the dtype {dtype}")
        if values is not None and len(values) != len(indices):
            raise TypeError(f"{len(values)} values for {len(indices)} indices")
        for target, part in zip(self._targets.values(), (indices, values), strict=False):
            if part is not None and len(part):
                target.put(self._num_done * part.itemsize, np.ascontiguousarray(part).view(np.uint8))
        self._num_done += len(indices)

    def finish(self, row_entries: np.ndarray) -> None:
        """Write ``indptr`` and all checksums. ``row_entries`` has the number of entries of each row."""
        indptr = np.zeros(self._layout.num_samples + 1, np.int64)
        np.cumsum(row_entries, out=indptr[1:])
        if not indptr[-1] == self._num_done == self._layout.num_entries:
            raise ValueError(
                f"rows have {indptr[-1]} entries, but {self._num_done} of {self._layout.num_entries} were written"
            )
        self._new.write_checked(f"{MATRIX}/indptr", indptr)
        for name, target in self._targets.items():
            self._new.write(f"{CHECKSUMS}/{MATRIX}/{name}", target.finish())
