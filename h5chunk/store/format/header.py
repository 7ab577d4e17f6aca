"""Write and read the header of an h5chunk file (the attributes of its group ``/h5chunk``)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

import h5chunk
from h5chunk.errors import FileError, as_text, printable
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.csr import index_dtype
from h5chunk.store.format.spec import CHECKSUMS, FORMAT_VERSION, GROUP
from h5chunk.store.hdf5.guard import check_header_group
from h5chunk.store.hdf5.open import errors_as

MATRIX = "X"  # name of the group of a CSR matrix, or of the dataset of dense rows
CSR, DENSE = "csr", "dense"  # values of ``kind``

VALUE_DTYPES = (np.dtype(np.uint8), np.dtype(np.float16), np.dtype(np.float32))  # types of stored matrix values

_NUMBERS = {
    "num_samples": np.int64,
    "chunk_samples": np.int64,
    "window_chunks": np.int64,
    "seed": np.uint64,
    "shuffled": np.uint8,
}
_CACHE = ("rdcc_nslots", "rdcc_nbytes", "rdcc_w0")
_ATTRIBUTES = ("format_version", "h5chunk_version", "kind", *_NUMBERS, *_CACHE, "options")


@dataclass(frozen=True)
class Header:
    """The header of an h5chunk file, which `h5chunk.store.format.spec` describes."""

    format_version: int
    num_samples: int
    chunk_samples: int
    window_chunks: int  # recommended number of chunks to shuffle together
    cache: CacheSettings  # recommended cache of one process that reads all batches
    shuffled: bool
    seed: int
    options: dict[str, Any]  # options of the command that wrote the file, if they are recorded
    class_names: tuple[str, ...]
    kind: str  # csr or dense for a matrix, else empty

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields to read by default, or an empty tuple if the file does not record them."""
        names = self.options.get("fields")
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        return tuple(name for name in names if name and name.isprintable() and "/" not in name)


def header_attributes(
    *, cache: CacheSettings, options: Mapping[str, Any], kind: str = "", **numbers: int
) -> dict[str, Any]:
    """Return the attributes of ``/h5chunk``, by name, with the types of the specification.

    ``options`` must be serialisable as JSON. ``numbers`` are ``num_samples``, ``chunk_samples``, ``window_chunks``,
    ``seed`` and ``shuffled``. Unknown numbers may be left out.
    """
    attributes: dict[str, Any] = {"format_version": np.int64(FORMAT_VERSION), "h5chunk_version": h5chunk.__version__}
    if kind:
        attributes["kind"] = kind
    attributes |= {name: _NUMBERS[name](value) for name, value in numbers.items()}
    values = np.int64(cache.nslots), np.int64(cache.nbytes), np.float64(cache.w0)
    return {**attributes, **dict(zip(_CACHE, values, strict=True)), "options": json.dumps(options, sort_keys=True)}


def read_header(file: h5py.File) -> Header | None:
    """Read the header of a file. Returns None if h5chunk did not write the file.

    Raises FileError if the header is damaged, or the format is newer than this version of h5chunk.
    """
    check_header_group(file, GROUP, _ATTRIBUTES)
    group = file.get(GROUP)
    if not isinstance(group, h5py.Group) or "format_version" not in group.attrs:
        return None
    label = printable(file.filename)
    with errors_as(FileError, f"{label}: its group /{GROUP} is damaged", AttributeError):
        attrs = group.attrs
        version = int(attrs["format_version"])
        if version > FORMAT_VERSION:
            raise FileError(
                f"{label}: the file has format version {version}, but this h5chunk reads only versions up to "
                f"{FORMAT_VERSION}: install a newer h5chunk"
            )
        num_samples, chunk_samples, window_chunks, seed, shuffled = (int(attrs[name]) for name in _NUMBERS)
        if num_samples < 1 or chunk_samples < 1 or window_chunks < 1:
            raise ValueError("num_samples, chunk_samples and window_chunks must be at least 1")
        classes = group.get("class_names")
        if classes is not None and classes.dtype.kind != "S":  # variable-length strings of a bad file can hang HDF5
            raise ValueError("class_names are not strings of fixed length")
        options = None
        with suppress(ValueError, RecursionError):
            options = json.loads(bytes(attrs["options"]).decode("utf-8", "replace"))
        return Header(
            format_version=version,
            num_samples=num_samples,
            chunk_samples=chunk_samples,
            window_chunks=window_chunks,
            cache=CacheSettings(int(attrs["rdcc_nslots"]), int(attrs["rdcc_nbytes"]), float(attrs["rdcc_w0"])),
            shuffled=bool(shuffled),
            seed=seed,
            options=options if isinstance(options, dict) else {},
            class_names=tuple(map(as_text, classes[()].tolist())) if classes is not None else (),
            kind=bytes(attrs.get("kind", b"")).decode("utf-8", "replace"),
        )


def _checksum_tables(file: h5py.File) -> dict[str, h5py.Dataset]:
    """Return the tables of checksums in an h5chunk file, by path of the dataset whose chunks they describe."""
    tables: dict[str, h5py.Dataset] = {}

    def add(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if isinstance(item, h5py.Dataset):
            tables[name] = item

    group = file.get(CHECKSUMS)
    if isinstance(group, h5py.Group):
        group.visititems(add)
    return tables


def checksums_of(file: h5py.File, start: int = 0) -> int:
    """Return a CRC-32 of the names and values of all checksums in an h5chunk file.

    ``start`` is the CRC-32 of preceding bytes, if there are any.
    """
    for name, table in _checksum_tables(file).items():
        if table.dtype == np.uint32:
            start = zlib.crc32(table[()].tobytes(), zlib.crc32(name.encode(), start))
    return start


def lost_fields(file: h5py.File) -> list[str]:
    """Return the paths of datasets that have checksums in an h5chunk file, but do not exist: renamed or deleted."""
    return [name for name in _checksum_tables(file) if name not in file]


@dataclass(frozen=True)
class Matrix:
    """The description of the matrix in an h5chunk file."""

    kind: str  # csr or dense
    num_rows: int
    num_columns: int
    num_entries: int | None  # None for dense rows
    dtype: str  # of the stored values
    scale: float  # value = stored value / scale
    pattern: bool  # whether all values are 1


def check_values(dtype: np.dtype, scale: float, pattern: bool) -> None:
    """Raise ValueError unless the specification allows matrix values of this dtype, scale and pattern."""
    if dtype not in VALUE_DTYPES or (dtype != np.uint8 and (scale != 1 or pattern)):
        kind = f"{dtype} with scale {scale:g}{' in a pattern' if pattern else ''}"
        raise ValueError(f"its values are {kind}, which the format does not allow")


def read_matrix(file: h5py.File) -> Matrix | None:
    """Read the description of the matrix in an h5chunk file. Returns None if the file has no matrix.

    Raises FileError if a shape, a type, or the first or last value of ``indptr`` is wrong. Entries are not checked.
    """
    group = file.get(GROUP)
    if not isinstance(group, h5py.Group) or "kind" not in group.attrs:
        return None
    with errors_as(FileError, f"{printable(file.filename)}: its matrix is damaged", AttributeError):
        kind = bytes(group.attrs["kind"]).decode("utf-8", "replace")
        if kind not in (CSR, DENSE):
            raise ValueError(f"its kind is {kind!r}, not {CSR} or {DENSE} (a newer h5chunk may support it)")
        matrix = file[MATRIX]
        scale, pattern = float(matrix.attrs["scale"]), bool(matrix.attrs["pattern"])
        if not 0 < scale < float("inf"):
            raise ValueError(f"its scale is {scale}")
        dtype = (matrix if kind == DENSE else matrix["data"]).dtype
        check_values(dtype, scale, pattern)
        if kind == DENSE:
            num_rows, num_columns = map(int, matrix.shape)
            if num_rows != int(group.attrs["num_samples"]):
                raise ValueError(f"/{MATRIX} has {num_rows} rows, but num_samples is {group.attrs['num_samples']}")
            return Matrix(kind, num_rows, num_columns, None, str(dtype), scale, pattern)
        num_rows, num_columns = (int(size) for size in matrix.attrs["shape"])
        num_entries = _check_csr(matrix, num_rows, num_columns, int(group.attrs["num_samples"]))
        return Matrix(kind, num_rows, num_columns, num_entries, str(dtype), scale, pattern)


def _check_csr(group: h5py.Group, num_rows: int, num_columns: int, num_samples: int) -> int:
    """Return the number of entries of a CSR matrix. Raises ValueError if its datasets contradict each other."""
    indptr, indices, data = group["indptr"], group["indices"], group["data"]
    num_entries = int(indices.shape[0])
    expected = (
        (indptr, (num_rows + 1,), np.dtype(np.int64)),
        (indices, (num_entries,), index_dtype(num_columns)),
        (data, (num_entries,), data.dtype),
    )
    if num_rows != num_samples or num_columns < 1:
        raise ValueError(f"its shape is {num_rows} x {num_columns}, but the file has {num_samples} samples")
    for dataset, shape, dtype in expected:
        if dataset.shape != shape or dataset.dtype != dtype:
            raise ValueError(f"{dataset.name} is {dataset.dtype} {dataset.shape}, not {dtype} {shape}")
    if indices.chunks != data.chunks:
        raise ValueError(f"its indices have chunks of {indices.chunks}, but its data has chunks of {data.chunks}")
    if indptr[0] != 0 or indptr[-1] != num_entries:
        raise ValueError(f"its indptr runs from {indptr[0]} to {indptr[-1]} instead of from 0 to {num_entries}")
    return num_entries
