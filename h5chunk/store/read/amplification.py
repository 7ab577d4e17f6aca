"""What reading some samples of a field takes, by the way in which it is read: rows alone, or the chunks around them.

Bytes are those of decoded samples, each chunk read once: what a cache that holds open chunks gives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from h5chunk.plan.amplification import entries_read_with, read_with
from h5chunk.store.read.csrrows import CsrField, _EncodedEntries
from h5chunk.store.read.direct import EncodedField, PlainField
from h5chunk.store.read.fields import Field
from h5chunk.store.read.filesdirect import FilesField, FilesMatrix
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.tiles import TiledField

NOTABLE = 1.01  # bytes read over bytes wanted: less is not worth saying


def read_amplification(
    reader: H5Reader, rows: np.ndarray | None, direct: Mapping[str, Any] | None = None, kept: Collection[str] = ()
) -> float:
    """Bytes read over bytes of these samples; 1.0 if there are none, or all are read.

    Parameters
    ----------
    reader : H5Reader
    rows : (n,) int64, optional
        None: all samples once.
    direct : dict of str to PlainField, EncodedField, ..., optional
        What is read by byte ranges, not through HDF5.
    kept : collection of str
        Fields that are not counted, as they are kept in memory whole.
    """
    names = [name for name in reader.fields if name not in kept]
    wanted = 0 if rows is None else sum(bytes_of(reader, name, rows) for name in names)
    if rows is None or not wanted:
        return 1.0
    direct = direct or {}
    read = (
        bytes_by_ranges(direct[name], rows) if name in direct else bytes_by_hdf5(reader, name, rows) for name in names
    )
    return sum(read) / wanted


def bytes_of(reader: H5Reader, name: str, rows: np.ndarray) -> int:
    """Of these samples of a field themselves, each as often as it is named."""
    field = reader.fields[name]
    if isinstance(field, MatrixField):
        return int((reader.indptr[rows + 1] - reader.indptr[rows]).sum()) * field.entry_bytes
    return len(rows) * field.grid.sample_bytes


def bytes_by_ranges(field: Any, rows: np.ndarray) -> int:
    """That a field which is read by byte ranges takes.

    Parameters
    ----------
    field : PlainField, EncodedField, TiledField, CsrField, or one of several files
    rows : (n,) int64
        In any order, also repeated.
    """
    if isinstance(field, (FilesField, FilesMatrix)):
        reader = field._reader
        return sum(
            bytes_by_ranges(field._fields[number], rows[some] - reader.starts[number])
            for number, some in reader.by_file(rows)
        )
    if isinstance(field, CsrField):
        return sum(_entry_bytes(field, entries, rows) for entries in (field._indices, field._values) if entries)
    if isinstance(field, PlainField):
        return len(rows) * field.row_bytes
    assert isinstance(field, (EncodedField, TiledField))
    chunk_samples = field._rows_per_chunk if isinstance(field, EncodedField) else field._chunk[0]
    return read_with(rows, chunk_samples, field._shape[0]) * field.row_bytes


def _entry_bytes(field: CsrField, entries: Any, rows: np.ndarray) -> int:
    if not isinstance(entries, _EncodedEntries):
        return int(field.entry_counts(rows).sum()) * entries._item_bytes
    length = int(field.indptr[-1])
    count = entries_read_with(field.indptr[rows], field.indptr[rows + 1], entries._per_chunk, length)
    return count * entries._dtype.itemsize


def bytes_by_hdf5(reader: H5Reader, name: str, rows: np.ndarray) -> int:
    """That a field takes through HDF5's chunk cache: whole chunks, but for large plain samples.

    Of a compressed matrix, whose chunks are not those of its rows, about.
    """
    if isinstance(reader, FileSet):
        return sum(
            bytes_by_hdf5(reader.readers[number], name, rows[some] - reader.starts[number])
            for number, some in reader.by_file(rows)
        )
    field = reader.fields[name]
    grid = field.grid
    if isinstance(field, Field):
        if not grid.needs_cache or not grid.band_samples:
            return len(rows) * grid.sample_bytes
        return read_with(rows, grid.band_samples, grid.shape[0]) * grid.sample_bytes
    if not field.filtered:
        return bytes_of(reader, name, rows)
    chunks = np.unique(rows // field.chunk_samples)
    ends = np.minimum((chunks + 1) * field.chunk_samples, field.num_rows)
    return int((reader.indptr[ends] - reader.indptr[chunks * field.chunk_samples]).sum()) * field.entry_bytes
