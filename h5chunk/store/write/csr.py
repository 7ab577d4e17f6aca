"""Writing a sparse matrix as the CSR group that `h5chunk.store.format` specifies, and reading what describes one."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.plan.sparse import CsrLayout, index_dtype, plan_csr
from h5chunk.store.format import FORMAT_VERSION, GROUP, ArraySpec, FieldSpec, FileSpec
from h5chunk.store.write.newfile import NewFile

MATRIX = "X"
CSR, DENSE = "csr", "dense"


def csr_spec(
    layout: CsrLayout,
    *,
    scale: float,
    attributes: Mapping[str, Any],
    fields: Mapping[str, np.ndarray],
    tables: Mapping[str, np.ndarray],
) -> FileSpec:
    """The file to write.

    Parameters
    ----------
    layout : CsrLayout
    scale : float
        A value is its code over this.
    attributes : dict
        ``h5chunk_version``, ``seed``, ``shuffled`` and ``options`` of ``/h5chunk``.
    fields, tables : dict of str to array
        Fields at the root, and datasets below ``/h5chunk``; only shapes and types are looked at.
    """
    entries = (layout.num_entries,)
    chunks = (layout.chunk_entries,)
    arrays = {
        f"{MATRIX}/indices": ArraySpec(entries, layout.index_dtype, chunks),
        f"{MATRIX}/data": ArraySpec(entries, np.dtype(np.uint8), chunks, fill=1 if layout.pattern else None),
        f"{MATRIX}/indptr": ArraySpec((layout.num_rows + 1,), np.dtype(np.int64)),
    }
    num_chunks = -(-layout.num_entries // layout.chunk_entries)
    checksums = {f"checksums/{MATRIX}/indices": (num_chunks,), f"checksums/{MATRIX}/indptr": (1,)}
    if not layout.pattern:
        checksums[f"checksums/{MATRIX}/data"] = (num_chunks,)
    shape = np.array([layout.num_rows, layout.num_columns], np.int64)
    return FileSpec(
        num_samples=layout.num_rows,
        chunk_samples=layout.chunk_samples,
        fields=field_specs(fields),
        tables={
            **{name: (shape_of, np.dtype(np.uint32)) for name, shape_of in checksums.items()},
            **field_tables(fields, layout.num_chunks),
            **{name: (values.shape, values.dtype) for name, values in tables.items()},
        },
        attributes=header_attributes(CSR, layout, attributes),
        field_attributes={
            MATRIX: {
                "encoding-type": "csr_matrix",
                "encoding-version": "0.1.0",
                "shape": shape,
                "scale": np.float64(scale),
                "pattern": np.uint8(layout.pattern),
            }
        },
        arrays=arrays,
    )


def field_specs(fields: Mapping[str, np.ndarray]) -> tuple[FieldSpec, ...]:
    """Fields at the root, one value a row."""
    return tuple(FieldSpec(name, (), values.dtype) for name, values in fields.items())


def field_tables(fields: Mapping[str, np.ndarray], num_chunks: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Where the checksums of fields go."""
    return {f"checksums/{name}": ((num_chunks,), np.dtype(np.uint32)) for name in fields}


def header_attributes(kind: str, layout: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of ``/h5chunk``.

    Parameters
    ----------
    kind : {"csr", "dense"}
    layout : CsrLayout or Layout
    attributes : dict
        ``h5chunk_version``, ``seed``, ``shuffled`` and ``options``.
    """
    cache = layout.cache
    num_samples = layout.num_rows if isinstance(layout, CsrLayout) else layout.num_samples
    return {
        "format_version": np.int64(FORMAT_VERSION),
        "kind": kind,
        "h5chunk_version": attributes["h5chunk_version"],
        "num_samples": np.int64(num_samples),
        "chunk_samples": np.int64(layout.chunk_samples),
        "window_chunks": np.int64(layout.window_chunks),
        "rdcc_nslots": np.int64(cache.nslots),
        "rdcc_nbytes": np.int64(cache.nbytes),
        "rdcc_w0": np.float64(cache.w0),
        "seed": np.uint64(attributes["seed"]),
        "shuffled": np.uint8(attributes["shuffled"]),
        "options": attributes["options"],
    }


class CsrWriter:
    """Writes the entries of a matrix in row order, in parts of any size.

    Parameters
    ----------
    new : NewFile
        With the space of ``csr_spec(layout, ...)`` allocated.
    layout : CsrLayout
    """

    def __init__(self, new: NewFile, layout: CsrLayout) -> None:
        self._new = new
        self._layout = layout
        size = layout.chunk_entries
        self._indices = _RunWriter(new, f"{MATRIX}/indices", size * layout.index_dtype.itemsize)
        self._data = None if layout.pattern else _RunWriter(new, f"{MATRIX}/data", size)

    def append(self, indices: np.ndarray, codes: np.ndarray | None) -> None:
        """Write the next entries.

        Parameters
        ----------
        indices : (n,) array of the layout's ``index_dtype``
        codes : (n,) uint8, or None for a pattern
        """
        if indices.dtype != self._layout.index_dtype or (codes is None) != (self._data is None):
            raise TypeError(f"indices are {indices.dtype}, codes {None if codes is None else codes.dtype}")
        if codes is not None and (codes.dtype != np.uint8 or len(codes) != len(indices)):
            raise TypeError(f"{len(codes)} codes of {codes.dtype} for {len(indices)} indices")
        self._indices.append(indices)
        if self._data is not None and codes is not None:
            self._data.append(codes)

    def finish(self, row_entries: np.ndarray) -> None:
        """Write ``indptr`` and the checksums.

        Parameters
        ----------
        row_entries : (rows,) int64
            Entries of each row.
        """
        indptr = np.zeros(self._layout.num_rows + 1, np.int64)
        np.cumsum(row_entries, out=indptr[1:])
        if indptr[-1] != self._layout.num_entries:
            raise ValueError(f"{indptr[-1]} entries in the rows, {self._layout.num_entries} in the matrix")
        write_table(self._new, f"{MATRIX}/indptr", indptr)
        self._indices.finish(self._layout.num_entries * self._layout.index_dtype.itemsize)
        if self._data is not None:
            self._data.finish(self._layout.num_entries)


class _RunWriter:
    """Bytes of a dataset, one after the other, with the checksum of each chunk."""

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


def write_table(new: NewFile, name: str, values: np.ndarray) -> None:
    """Write a contiguous dataset with the checksum of the whole."""
    new.write(name, values)
    new.write(f"{GROUP}/checksums/{name}", np.array([zlib.crc32(values.tobytes())], np.uint32))


def write_fields(new: NewFile, fields: Mapping[str, np.ndarray], chunk_samples: int) -> None:
    """Write fields at the root, already in row order, with their checksums."""
    for name, values in fields.items():
        new.write(name, values)
        new.write(f"{GROUP}/checksums/{name}", field_checksums(values, chunk_samples))


def field_checksums(rows: np.ndarray, chunk_samples: int) -> np.ndarray:
    """CRC-32 of each chunk of a field, the last filled up with zeros: (num_chunks,) uint32."""
    data, chunk_bytes = rows.tobytes(), chunk_samples * rows.itemsize
    data += bytes(-len(data) % chunk_bytes)
    return np.array([zlib.crc32(data[i : i + chunk_bytes]) for i in range(0, len(data), chunk_bytes)], np.uint32)


def write_csr(
    path: str | os.PathLike[str],
    indptr: np.ndarray,
    indices: np.ndarray,
    codes: np.ndarray | None,
    num_columns: int,
    *,
    scale: float = 1.0,
    chunk_samples: int | None = None,
    version: str = "0",
    seed: int = 0,
    shuffled: bool = False,
    fields: Mapping[str, np.ndarray] | None = None,
    tables: Mapping[str, np.ndarray] | None = None,
    overwrite: bool = False,
) -> CsrLayout:
    """Write a matrix that is in memory, its rows in the order they have there.

    Parameters
    ----------
    path : path
    indptr : (rows + 1,) int64
    indices : (entries,) unsigned integers
        Ascending within a row.
    codes : (entries,) uint8, or None
        None for a pattern.
    num_columns : int
    scale : float
        A value is its code over this.
    chunk_samples : int, optional
        Rows of a nominal chunk; chosen if not given.
    version, seed, shuffled
        What the file says of who wrote it, and how the rows were permuted.
    fields : dict of str to (rows,) array
    tables : dict of str to array
        Datasets below ``/h5chunk``; ``source_index`` is 0, 1, 2, ... if not among them.
    overwrite : bool
    """
    num_rows = len(indptr) - 1
    layout = plan_csr(num_rows, num_columns, len(indices), pattern=codes is None, chunk_samples=chunk_samples)
    fields = fields or {}
    tables = {"source_index": np.arange(num_rows, dtype=np.int64), **(tables or {})}
    attributes = {"h5chunk_version": version, "seed": seed, "shuffled": shuffled, "options": "{}"}
    with NewFile(path, overwrite) as new:
        new.allocate(csr_spec(layout, scale=scale, attributes=attributes, fields=fields, tables=tables))
        writer = CsrWriter(new, layout)
        writer.append(indices.astype(layout.index_dtype, copy=False), codes)
        writer.finish(np.diff(indptr))
        write_fields(new, fields, layout.chunk_samples)
        for name, values in tables.items():
            new.write(f"{GROUP}/{name}", values)
        new.commit()
    return layout


@dataclass(frozen=True)
class Matrix:
    """What a file of ours says of the matrix in it.

    Attributes
    ----------
    kind : {"csr", "dense"}
    num_rows, num_columns : int
    num_entries : int or None
        None for dense rows.
    scale : float
        A value is its code over this.
    pattern : bool
        All values are one.
    """

    kind: str
    num_rows: int
    num_columns: int
    num_entries: int | None
    scale: float
    pattern: bool


def read_matrix(file: h5py.File) -> Matrix | None:
    """What a file of ours says of its matrix; None if it holds none, or is not ours.

    Looks at shapes and types, and at the ends of ``indptr``; not at the entries.

    Raises
    ------
    FileError
        What it says cannot be.
    """
    group = file.get(GROUP)
    if not isinstance(group, h5py.Group) or "kind" not in group.attrs:
        return None
    try:
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
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError, OSError) as error:
        raise FileError(f"{printable(file.filename)}: damaged: its matrix cannot be: {error}") from None


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
