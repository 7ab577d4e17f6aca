"""Read datasets whose elements are arrays of variable length, without HDF5, which trusts the lengths in the file.

Each element is a pointer into the heap of the file. The heap is read once to find where every array is stored. Source:
HDF5 File Format Specification, III.E (global heap) and VIII.B (disk format of variable-length data).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, UnsupportedError, printable
from h5chunk.plan.layout import good_chunk_samples
from h5chunk.store.hdf5.chunk_table import NotDirect, list_chunks
from h5chunk.store.hdf5.open import descriptor_of
from h5chunk.store.hdf5.raw_chunks import RawChunks
from h5chunk.store.hdf5.strings import POINTER, FileBytes
from h5chunk.store.read.ragged import SeriesField

REMEDY = "write its values one after the other, and their offsets to another dataset (offsets=...)"


@dataclass(frozen=True, kw_only=True)
class VlenField(SeriesField):
    """A dataset whose elements are arrays of variable length."""

    first: bytes  # the pointer of the first element, as stored; empty if there are no elements

    table_datasets = ()


def describe_vlen(dataset: h5py.Dataset, path: Path, name: str) -> VlenField:
    """Describe a dataset of arrays of variable length. Raises UnsupportedError unless they can be read without HDF5."""
    where = f"{printable(path)}: {dataset.name!r}"
    base = dataset.id.get_type().get_super()
    is_number = isinstance(base, (h5py.h5t.TypeIntegerID, h5py.h5t.TypeFloatID))
    dtype = base.dtype if is_number else None
    if dtype is None or not dtype.isnative or not base.equal(h5py.h5t.py_create(dtype)):
        raise UnsupportedError(f"{where} has arrays of an unsupported type ({dtype or 'no numbers'}): {REMEDY}")
    if dataset.ndim != 1 or dataset.file.id.get_create_plist().get_sizes()[0] != 8:
        raise UnsupportedError(f"{where} has {dataset.ndim} axes, or addresses of fewer than 8 bytes: {REMEDY}")
    pointers = read_pointers(dataset, path)
    num_rows, total = len(dataset), int(vlen_indptr(pointers, dataset, path, dtype.itemsize)[-1])
    chunk_samples = good_chunk_samples(num_rows, total * dtype.itemsize // max(1, num_rows))
    chunk_samples = max(1, min(chunk_samples, num_rows))
    sizes, first = (num_rows, total, chunk_samples), pointers[:1].tobytes()
    return VlenField(name, dataset.name, *sizes, False, step_shape=(), value_dtype=dtype, first=first)


def read_pointers(dataset: h5py.Dataset, path: Path) -> np.ndarray:
    """Read the pointers of all elements: (n,) `POINTER`. Elements that were never written are empty."""
    where = f"{printable(path)}: {dataset.name!r}"
    properties = dataset.id.get_create_plist()
    try:
        if properties.get_layout() not in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS) or (
            properties.get_layout() == h5py.h5d.CONTIGUOUS and properties.get_external_count()
        ):
            raise NotDirect("it is stored compactly, or in other files")
        table = list_chunks(dataset)
        raw = RawChunks(dataset, descriptor_of(dataset.file), where, table)
        if raw.needs_hdf5:
            raise NotDirect(raw.left_to_hdf5)
    except NotDirect as error:
        raise UnsupportedError(f"{where} has arrays of variable length, but {error}: {REMEDY}") from None
    size = table.chunk_shape[0]
    pointers = np.zeros(len(table) * size, POINTER)
    for chunk in np.flatnonzero(table.offsets >= 0).tolist():
        raw.decode(chunk, pointers[chunk * size : (chunk + 1) * size].view(np.uint8))
    return pointers[: len(dataset)]


def open_heap(file: h5py.File, path: Path, dataset: str) -> FileBytes:
    """Return the open file, which contains the heap, for `find_in_heap`. Errors name the dataset."""
    descriptor, where = descriptor_of(file), f"{printable(path)}: {dataset!r}"
    size = os.fstat(descriptor).st_size
    return FileBytes(descriptor, size, lambda problem: FileError(f"{where}: {problem}"), file.userblock_size)


def vlen_indptr(pointers: np.ndarray, dataset: h5py.Dataset, path: Path, item_bytes: int) -> np.ndarray:
    """Return the index of the first entry of each element, and finally the number of entries: (n + 1,) int64.

    Raises FileError if the elements have more bytes than the file.
    """
    indptr = np.concatenate([[0], np.cumsum(pointers["length"], dtype=np.int64)])
    file_bytes = dataset.file.id.get_filesize()
    if indptr[-1] * item_bytes > file_bytes:
        raise FileError(
            f"{printable(path)}: {dataset.name!r} claims {indptr[-1] * item_bytes} bytes, but the file has "
            f"{file_bytes}: it is damaged"
        )
    return indptr
