"""Read rows of a dataset by their byte ranges in the file, outside HDF5's lock, in several threads.

The chunk table is listed once through HDF5; after that the file is only read with ``preadv``. What is stored plainly
goes straight to its place in a shuffled batch. What is compressed is read and decoded chunk by chunk, and its rows are
copied to their places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import printable
from h5chunk.store.hdf5.chunk_table import NotDirect, list_chunks
from h5chunk.store.hdf5.claims import same_file
from h5chunk.store.hdf5.library import is_stored_as
from h5chunk.store.hdf5.ranges import MAX_VECTORS, RUN_BYTES, Part, read_bytes, vector_parts
from h5chunk.store.read.checksums import NO_SUMS, Sums, checks_of
from h5chunk.store.read.chunks import ChunkedField, DecodedChunks
from h5chunk.store.read.fields import Field


def direct_field(path: Path, file: h5py.File, field: Field, sums: Sums = NO_SUMS) -> PlainField | ChunkedField:
    """Return the reader of a field by byte ranges. It holds numbers only; descriptors are the caller's.

    Parameters
    ----------
    path : path
    file : h5py.File
        Open for reading; used now and not kept.
    field : Field
    sums : mapping of str to Checksums
        What is to be checked.

    Raises
    ------
    NotDirect
        The layout or a filter needs HDF5.
    """
    dataset = file[field.dataset]
    if not same_file(dataset, file):
        raise NotDirect("a link leads to it in another file")
    check_bytes(dataset, field.dtype)
    has_parts = dataset.chunks is not None and dataset.chunks[1:] != dataset.shape[1:]
    filtered = dataset.id.get_create_plist().get_nfilters() > 0
    return (ChunkedField if has_parts or filtered else PlainField)(path, dataset, field, sums)


class PlainField:
    """Reader of rows that are plain bytes of the file.

    Attributes
    ----------
    row_bytes, num_bytes : int
        Of a row, and of the whole field.
    is_one_run : bool
        Whether all rows lie one behind the other.
    is_plain : bool
        Whether rows are bytes of the file, neither compressed nor cut into pieces.
    chunks : sequence of DecodedChunks
        None that are decoded.
    """

    is_plain = True
    chunks: Sequence[DecodedChunks] = ()

    def __init__(self, path: Path, dataset: h5py.Dataset, field: Field, sums: Sums = NO_SUMS) -> None:
        table = list_chunks(dataset)
        if (table.offsets < 0).any():
            raise NotDirect("parts of it were never written")
        if (table.sizes != math.prod(table.chunk_shape) * field.dtype.itemsize).any():
            raise NotDirect("its chunks are not of the size that its type and shape say")
        self.name = field.name
        self.row_bytes, self.num_bytes = field.grid.sample_bytes, dataset.nbytes
        self.is_one_run = table.is_one_run
        self._path = path
        self._dtype, self._shape = field.dtype, tuple(dataset.shape)
        self._rows_per_chunk = table.chunk_shape[0]
        self._rows_per_run = max(1, min(self._rows_per_chunk, RUN_BYTES // self.row_bytes, MAX_VECTORS))
        self._offsets = table.offsets
        self._checks = checks_of(path, field.name, dataset, table, sums) if sums else None

    def parts(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """Yield the tasks that read row ``rows[i]`` to ``out[places[i]]``, for several threads.

        Parameters
        ----------
        rows, places : (n,) int64, at least one
            Rows of a chunk side by side, ascending within it; no place twice, others of ``out`` stay as they are.
        out : (m, row_bytes) uint8, C-contiguous
            Must stay in place until the last part is done.

        Raises
        ------
        FileError
            From a part: the file ends before its rows do, or cannot be read; a chunk is not as it was written.
        """
        checks: Iterator[Part] = iter(()) if self._checks is None else self._checks.parts(rows)
        borders = self._borders(rows)
        chunks, offsets = np.divmod(rows[borders[:-1]], self._rows_per_chunk)
        vectors = np.empty((len(rows), 2), np.uintp)
        vectors[:, 0] = out.ctypes.data + places * self.row_bytes
        vectors[:, 1] = self.row_bytes
        starts = self._offsets[chunks] + offsets * self.row_bytes
        return chain(checks, vector_parts(borders, vectors, starts, out, self._where))

    def scratch_bytes(self, num_threads: int) -> int:
        """Memory beside ``out`` that so many threads take."""
        return 0

    def _borders(self, rows: np.ndarray) -> np.ndarray:
        """Cut rows into runs of neighbours in one chunk: run i is ``rows[borders[i]:borders[i + 1]]``."""
        chunks, offsets = np.divmod(rows, self._rows_per_chunk)
        groups = chunks * -(-self._rows_per_chunk // self._rows_per_run) + offsets // self._rows_per_run
        apart = (rows[1:] != rows[:-1] + 1) | (groups[1:] != groups[:-1])
        return np.concatenate(([0], np.flatnonzero(apart) + 1, [len(rows)]))

    def read_all(self, descriptor: int) -> np.ndarray:
        """Read the whole field, for small ones."""
        values = np.empty(self._shape, self._dtype)
        flat = values.reshape(-1).view(np.uint8).data
        size = len(flat) if self.is_one_run else self._rows_per_chunk * self.row_bytes
        for number, start in enumerate(range(0, len(flat), size)):
            read_bytes(descriptor, int(self._offsets[number]), flat[start : start + size], self._where)
        if self._checks is not None:
            self._checks.check_all(descriptor)
        return values

    def bytes_read(self, rows: np.ndarray) -> int:
        """Bytes that are read for some rows, in any order."""
        return len(rows) * self.row_bytes

    def forget(self) -> None:
        """Free what is kept between parts: nothing."""

    def _where(self, offset: int) -> str:
        """Name the chunk that holds a byte of the file."""
        chunk = int(np.where(self._offsets <= offset, self._offsets, -1).argmax())
        return f"{printable(self._path)}: field {self.name!r}, chunk {chunk}"


def check_bytes(dataset: h5py.Dataset, dtype: np.dtype | None = None) -> None:
    """Raise NotDirect unless a dataset's numbers are bytes of its file, plain or encoded, as this machine has them."""
    properties, dtype = dataset.id.get_create_plist(), dtype or dataset.dtype
    if properties.get_layout() not in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS):
        raise NotDirect("it is stored compactly or is a view of other files")
    if properties.get_layout() == h5py.h5d.CONTIGUOUS and properties.get_external_count():
        raise NotDirect("its data lie in other files")
    if dtype.kind not in "biuf" or not is_stored_as(dataset, dtype):
        raise NotDirect(f"its type {dataset.dtype} is not stored as this machine has it")
    if not math.prod(dataset.shape):
        raise NotDirect("it is empty")
