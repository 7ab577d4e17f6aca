"""Datasets made through the low-level interface of h5py."""

from __future__ import annotations

import h5py
import numpy as np

N = 37
SHAPE = (N, 3, 6)


def create(path, early: bool, shape=SHAPE, chunks=(4, 3, 6), data=None, **file_options) -> None:
    """A dataset by the low-level interface, for what h5py's own does not offer."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(chunks)
    if early:
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(path, "w", **file_options) as file:
        space, kind = h5py.h5s.create_simple(shape), h5py.h5t.py_create(np.dtype("u1"))
        made = h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, space, properties))
        if data is not None:
            made[:] = data
