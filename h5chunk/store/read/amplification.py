"""Count the bytes that are read for some samples: of their rows alone, or of the chunks around them.

Bytes are those of decoded samples, each chunk read once: what a cache that holds open chunks gives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from h5chunk.plan.cache import read_with
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.several import DirectField

NOTABLE = 1.01  # bytes read over bytes wanted: less is not worth saying


def read_amplification(
    reader: H5Reader, rows: np.ndarray | None, direct: Mapping[str, DirectField], kept: Collection[str] = ()
) -> float:
    """Return the bytes read over the bytes of some samples; 1.0 if there are none, or all are read (``rows`` None).

    ``direct`` is read by byte ranges, other fields through HDF5; those ``kept`` in memory whole are not counted.
    """
    names = [name for name in reader.fields if name not in kept]
    wanted = 0 if rows is None else sum(_bytes_of(reader, name, rows) for name in names)
    if rows is None or not wanted:
        return 1.0
    read = 0
    for name in names:
        if name in direct:
            read += direct[name].bytes_read(rows)
            continue
        for number, some in reader.by_file(rows):
            read += _bytes_by_hdf5(reader.readers[number], name, rows[some] - reader.starts[number])
    return read / wanted


def _bytes_of(reader: H5Reader, name: str, rows: np.ndarray) -> int:
    """Return the bytes of some samples of a field, each as often as it is named."""
    field = reader.fields[name]
    if isinstance(field, MatrixField):
        return int((reader.indptr[rows + 1] - reader.indptr[rows]).sum()) * field.entry_bytes
    return len(rows) * field.grid.sample_bytes


def _bytes_by_hdf5(reader: H5Reader, name: str, rows: np.ndarray) -> int:
    """Return the bytes that are read through HDF5's chunk cache: whole chunks, but for large plain samples.

    Of a compressed matrix, whose chunks are not those of its rows, about.
    """
    field, grid = reader.fields[name], reader.fields[name].grid
    if isinstance(field, Field):
        if not grid.needs_cache or not grid.band_samples:
            return len(rows) * grid.sample_bytes
        return read_with(rows, grid.band_samples, grid.shape[0]) * grid.sample_bytes
    if not field.filtered:
        return _bytes_of(reader, name, rows)
    chunks = np.unique(rows // field.chunk_samples)
    ends = np.minimum((chunks + 1) * field.chunk_samples, field.num_rows)
    return int((reader.indptr[ends] - reader.indptr[chunks * field.chunk_samples]).sum()) * field.entry_bytes
