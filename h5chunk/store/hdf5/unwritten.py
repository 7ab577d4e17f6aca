"""Count the chunks of a dataset that were never written, which is legal in HDF5; and find what they read as."""

from __future__ import annotations

import math

import h5py
import numpy as np

from h5chunk.errors import as_text, printable


def count_unwritten(dataset: h5py.Dataset) -> int:
    """Return the number of chunks that were never written; a contiguous dataset is one chunk."""
    properties = dataset.id.get_create_plist()
    layout = properties.get_layout()
    if layout == h5py.h5d.CHUNKED:
        return _missing_chunks(dataset)
    inside = layout == h5py.h5d.CONTIGUOUS and not properties.get_external_count() and dataset.shape is not None
    return int(inside and math.prod(dataset.shape) > 0 and dataset.id.get_offset() is None)


def unwritten_value(dataset: h5py.Dataset) -> str:
    """Return the value that readers give for elements never written: the fill value; else zero, or an error."""
    if not _has_fill_value(dataset):
        never = dataset.id.get_create_plist().get_fill_time() == h5py.h5d.FILL_TIME_NEVER
        found = "0" if never or dataset.id.get_storage_size() else "an error"
        return f"{found}, as there is no fill value"
    value = dataset.fillvalue
    value = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
    return printable(repr(as_text(value) if isinstance(value, bytes) else value))


def leaves_memory(dataset: h5py.Dataset) -> bool:
    """Return whether HDF5 leaves memory unchanged for values that were never written, without a fill value.

    h5py clears the memory before.
    """
    if _has_fill_value(dataset):
        return False
    if dataset.id.get_create_plist().get_layout() == h5py.h5d.CHUNKED:
        return _missing_chunks(dataset) > 0
    return not dataset.id.get_storage_size()


def _has_fill_value(dataset: h5py.Dataset) -> bool:
    properties = dataset.id.get_create_plist()
    filled = properties.get_fill_time() != h5py.h5d.FILL_TIME_NEVER
    return filled and properties.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED


def _missing_chunks(dataset: h5py.Dataset) -> int:
    grid = (-(-length // chunk) for length, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    return max(0, math.prod(grid) - int(dataset.id.get_num_chunks()))
