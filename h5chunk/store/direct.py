"""Rows of a dataset by their byte ranges in the file, outside HDF5's lock, so that threads read side by side.

The chunk table is listed once through HDF5; after that the file is only read with ``preadv``. One call reads a run of
neighbouring rows and puts each where it is wanted, so that a shuffled batch needs no second copy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.store.chunktable import list_chunks
from h5chunk.store.reader import Field

RUN_BYTES = 2 << 20  # of one preadv; contiguous datasets are cut into such runs, so that threads can share them
MAX_VECTORS = 1024  # IOV_MAX of Linux: buffers of one preadv


class NotDirect(Exception):
    """Why a dataset cannot be read by byte ranges; the message says it."""


class DirectField:
    """Reads runs of rows of one field. Holds numbers only; the descriptor is the caller's.

    Parameters
    ----------
    path : path
    file : h5py.File
        Open for reading; used now and not kept.
    field : Field

    Raises
    ------
    NotDirect
        The layout or a filter needs HDF5.
    """

    def __init__(self, path: Path, file: h5py.File, field: Field) -> None:
        dataset = file[field.dataset]
        properties = dataset.id.get_create_plist()
        _check(file, dataset, properties, field)
        table = list_chunks(dataset)
        if (table.offsets < 0).any():
            raise NotDirect("parts of it were never written")
        if (table.sizes != math.prod(table.chunk_shape) * field.dtype.itemsize).any():
            raise NotDirect("its chunks are not of the size that its type and shape say")
        self.name = field.name
        self.row_bytes = field.grid.sample_bytes
        self._path = path
        self.num_bytes = dataset.nbytes
        self._dtype, self._shape = field.dtype, tuple(dataset.shape)
        self._rows_per_chunk = table.chunk_shape[0]
        self._rows_per_run = max(1, min(self._rows_per_chunk, RUN_BYTES // self.row_bytes))
        self._offsets = table.offsets
        self.is_one_run = table.is_one_run

    def borders(self, rows: np.ndarray) -> np.ndarray:
        """Cut rows into runs of neighbours in one chunk, none much longer than RUN_BYTES.

        Parameters
        ----------
        rows : (n,) int64, at least one

        Returns
        -------
        (num_runs + 1,) int64
            Run i is ``rows[borders[i]:borders[i + 1]]``.
        """
        chunks, offsets = np.divmod(rows, self._rows_per_chunk)
        groups = chunks * -(-self._rows_per_chunk // self._rows_per_run) + offsets // self._rows_per_run
        apart = (rows[1:] != rows[:-1] + 1) | (groups[1:] != groups[:-1])
        return np.concatenate(([0], np.flatnonzero(apart) + 1, [len(rows)]))

    def read_run(self, descriptor: int, first_row: int, buffers: Sequence[memoryview]) -> None:
        """Read ``len(buffers)`` rows from ``first_row`` on, one into each buffer of ``row_bytes`` bytes.

        Raises
        ------
        FileError
            The file ends before they do, or cannot be read.
        """
        chunk, row = divmod(first_row, self._rows_per_chunk)
        offset = int(self._offsets[chunk]) + row * self.row_bytes
        for start in range(0, len(buffers), MAX_VECTORS):
            part = buffers[start : start + MAX_VECTORS]
            wanted = len(part) * self.row_bytes
            try:
                got = os.preadv(descriptor, part, offset)
                if got != wanted:
                    self._read_rest(descriptor, first_row + start, part, offset, got)
            except FileError:
                raise
            except OSError as error:
                reason = error.strerror or str(error)
                raise FileError(f"{self._where(first_row + start)}: cannot be read: {reason}") from error
            offset += wanted

    def _read_rest(self, descriptor: int, first_row: int, buffers: Sequence[memoryview], offset: int, got: int) -> None:
        """preadv may give less than was asked for, in large requests or where a signal came."""
        for number in range(got // self.row_bytes, len(buffers)):
            done = max(0, got - number * self.row_bytes)
            while done < self.row_bytes:
                more = os.preadv(descriptor, [buffers[number][done:]], offset + number * self.row_bytes + done)
                if not more:
                    where = self._where(first_row + number)
                    raise FileError(f"{where}: the file ends in the middle of its data: it was cut short")
                done += more

    def read_all(self, descriptor: int) -> np.ndarray:
        """The whole field, for small ones whose chunks lie in one run."""
        values = np.empty(self._shape, self._dtype)
        done, view = 0, values.reshape(-1).view(np.uint8).data
        while done < len(view):
            row = done // self.row_bytes
            try:
                more = os.preadv(descriptor, [view[done:]], int(self._offsets[0]) + done)
            except OSError as error:
                raise FileError(f"{self._where(row)}: cannot be read: {error.strerror or error}") from error
            if not more:
                raise FileError(f"{self._where(row)}: the file ends in the middle of its data: it was cut short")
            done += more
        return values

    def _where(self, row: int) -> str:
        return f"{printable(self._path)}: field {self.name!r}, chunk {row // self._rows_per_chunk}"


def _check(file: h5py.File, dataset: h5py.Dataset, properties: h5py.h5p.PropDCID, field: Field) -> None:
    """Raise NotDirect unless rows are plain bytes of the file."""
    if h5py.h5o.get_info(dataset.id).fileno != h5py.h5o.get_info(file.id).fileno:
        raise NotDirect("a link leads to it in another file")
    if properties.get_layout() not in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS):
        raise NotDirect("it is stored compactly or is a view of other files")
    if properties.get_layout() == h5py.h5d.CONTIGUOUS and properties.get_external_count():
        raise NotDirect("its data lie in other files")
    if properties.get_nfilters():
        raise NotDirect("it is filtered (compressed)")
    native = h5py.h5t.py_create(np.dtype(field.dtype.str), logical=True)  # .str: without names of an enum's values
    stored = dataset.id.get_type()
    if isinstance(stored, h5py.h5t.TypeEnumID) and field.dtype.kind != "b":
        stored = stored.get_super()
    if field.dtype.kind not in "biuf" or not stored.equal(native):
        raise NotDirect(f"its type {dataset.dtype} is not stored as this machine has it")
    if dataset.chunks is not None and dataset.chunks[1:] != dataset.shape[1:]:
        raise NotDirect("its chunks hold parts of samples")
    if not math.prod(dataset.shape):
        raise NotDirect("it is empty")
