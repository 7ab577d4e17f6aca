"""Count the chunks of a dataset that were never written, which is legal in HDF5, and tell what they read as."""

from __future__ import annotations

import math

import h5py
import numpy as np

from h5chunk.errors import as_text, printable


def count_unwritten(dataset: h5py.Dataset) -> int:
    """The number of chunks in the file that were never written; a contiguous dataset is one chunk."""
    properties = dataset.id.get_create_plist()
    layout, shape = properties.get_layout(), (0,) if dataset.shape is None else dataset.shape
    if layout == h5py.h5d.CHUNKED:
        grid = (-(-length // chunk) for length, chunk in zip(shape, properties.get_chunk(), strict=True))
        return max(0, math.prod(grid) - int(dataset.id.get_num_chunks()))
    inside = layout == h5py.h5d.CONTIGUOUS and not properties.get_external_count()
    return int(inside and math.prod(shape) > 0 and dataset.id.get_offset() is None)


def unwritten_value(dataset: h5py.Dataset) -> str:
    """The value that readers give for elements that were never written: the fill value, or zero where there is none."""
    properties = dataset.id.get_create_plist()
    filled = properties.get_fill_time() != h5py.h5d.FILL_TIME_NEVER
    if not filled or properties.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED:
        return "0, as no fill value is defined"
    value = dataset.fillvalue
    value = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
    return printable(repr(as_text(value) if isinstance(value, bytes) else value))
