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
        _check(dataset, properties, field)
        table = list_chunks(dataset)
        if (table.offsets < 0).any():
            raise NotDirect("parts of it were never written")
        self.name = field.name
        self.row_bytes = field.grid.sample_bytes
        self._path = path
        self._rows_per_chunk = table.chunk_shape[0]
        self._table = table

    def runs(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Group rows into runs of neighbours in the file.

        Parameters
        ----------
        rows : (n,) int64, all different

        Returns
        -------
        places : (n,) int64
            Places in ``rows``, sorted by row.
        borders : (num_runs + 1,) int64
            Run i is ``places[borders[i]:borders[i + 1]]``.
        """
        places = np.argsort(rows, kind="stable")
        ordered = rows[places]
        apart = ordered[1:] != ordered[:-1] + 1
        if not self._table.is_one_run:
            apart |= ordered[1:] % self._rows_per_chunk == 0
        return places, np.concatenate(([0], np.flatnonzero(apart) + 1, [len(rows)]))

    def read_run(self, descriptor: int, first_row: int, buffers: Sequence[memoryview]) -> None:
        """Read ``len(buffers)`` rows from ``first_row`` on, one into each buffer of ``row_bytes`` bytes.

        Raises
        ------
        FileError
            The file ends before they do, or cannot be read.
        """
        chunk, row = divmod(first_row, self._rows_per_chunk)
        offset = int(self._table.offsets[chunk]) + row * self.row_bytes
        for start in range(0, len(buffers), MAX_VECTORS):
            part = buffers[start : start + MAX_VECTORS]
            wanted = len(part) * self.row_bytes
            try:
                got = os.preadv(descriptor, part, offset)
                if got != wanted:
                    self._read_rest(descriptor, part, offset, got)
            except OSError as error:
                if isinstance(error, FileError):
                    raise
                reason = error.strerror or str(error)
                raise FileError(f"{self._where(first_row)}: cannot be read: {reason}") from error
            offset += wanted

    def _read_rest(self, descriptor: int, buffers: Sequence[memoryview], offset: int, got: int) -> None:
        """preadv may give less than was asked for, in large requests or where a signal came."""
        for number in range(got // self.row_bytes, len(buffers)):
            done = max(0, got - number * self.row_bytes)
            while done < self.row_bytes:
                more = os.preadv(descriptor, [buffers[number][done:]], offset + number * self.row_bytes + done)
                if not more:
                    raise FileError(f"{self._where(0)}: the file ends in the middle of its data: it was cut short")
                done += more

    def _where(self, first_row: int) -> str:
        return f"{printable(self._path)}: field {self.name!r}, chunk {first_row // self._rows_per_chunk}"


def _check(dataset: h5py.Dataset, properties: h5py.h5p.PropDCID, field: Field) -> None:
    """Raise NotDirect unless rows are plain bytes of the file."""
    if properties.get_layout() not in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS):
        raise NotDirect("it is stored compactly or is a view of other files")
    if properties.get_layout() == h5py.h5d.CONTIGUOUS and properties.get_external_count():
        raise NotDirect("its data lie in other files")
    if properties.get_nfilters():
        raise NotDirect("it is filtered (compressed)")
    if field.dtype.kind not in "biuf" or dataset.dtype != field.dtype:
        raise NotDirect(f"its type {dataset.dtype} is not that of this machine")
    if dataset.chunks is not None and dataset.chunks[1:] != dataset.shape[1:]:
        raise NotDirect("its chunks hold parts of samples")
    if not math.prod(dataset.shape):
        raise NotDirect("it is empty")
