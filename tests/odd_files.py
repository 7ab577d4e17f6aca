"""HDF5 files of every layout that the format allows, each with one dataset ``images``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  # HDF5 finds its filters from then on
import numpy as np
from foreign import values
from h5py import h5d, h5p, h5s, h5t, h5z

N = 37
SHAPE = (N, 5, 7)
DATA = values(SHAPE, np.uint16)  # 70 bytes a sample: more than what loaders keep whole in the tests
LATEST = {"libver": "latest"}

GZIP, SHUFFLE, FLETCHER32, LZ4 = (1, (4,)), (2, ()), (3, ()), (32004, ())
NBIT, SCALEOFFSET = (5, ()), (6, (2, 0))
BITSHUFFLE, BITSHUFFLE_LZ4 = (32008, (0, 0)), (32008, (0, 2))  # a block size of its own choice; nothing, LZ4

_library = ctypes.CDLL(h5py.h5p.__file__)


def _status(name: str, *arguments: Any) -> None:
    """Call a function of HDF5 that h5py does not offer."""
    function = getattr(_library, name)
    function.restype = ctypes.c_int
    assert function(*arguments) >= 0, name


def set_partial_chunks_plain(properties: h5p.PropDCID) -> None:
    """H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS: partial chunks at the edges skip the filters."""
    _status("H5Pset_chunk_opts", ctypes.c_int64(properties.id), ctypes.c_uint(2))


def set_fill_undefined(properties: h5p.PropDCID) -> None:
    """No fill value at all, not even the default of zero."""
    _status("H5Pset_fill_value", ctypes.c_int64(properties.id), ctypes.c_int64(h5t.NATIVE_UINT16.id), None)


def create(
    file: h5py.File,
    *,
    shape: tuple[int, ...] = SHAPE,
    chunks: tuple[int, ...] | None = None,
    kind: h5t.TypeID | None = None,
    maxshape: Sequence[int | None] | None = None,
    filters: Sequence[tuple[int, tuple[int, ...]]] = (),
    alloc: int | None = None,
    fill_time: int | None = None,
    fill: int | None = None,
    partial_plain: bool = False,
    change: Callable[[h5p.PropDCID], Any] = lambda _: None,
    name: str = "images",
) -> h5py.Dataset:
    """A dataset made by the low-level interface, of which nothing is written."""
    properties = h5p.create(h5p.DATASET_CREATE)
    if chunks is not None:
        properties.set_chunk(chunks)
    for code, parameters in filters:
        properties.set_filter(code, h5z.FLAG_OPTIONAL, parameters)
    if alloc is not None:
        properties.set_alloc_time(alloc)
    if fill_time is not None:
        properties.set_fill_time(fill_time)
    if fill is not None:
        properties.set_fill_value(np.array(fill, np.uint16))
    if partial_plain:
        set_partial_chunks_plain(properties)
    change(properties)
    limits = None if maxshape is None else tuple(h5s.UNLIMITED if size is None else size for size in maxshape)
    kind = kind or h5t.STD_U16LE
    return h5py.Dataset(h5d.create(file.id, name.encode(), kind, h5s.create_simple(shape, limits), properties))


def make(
    path: Path,
    *,
    data: np.ndarray = DATA,
    file: dict[str, Any] | None = None,
    then: Callable[[h5py.Dataset], Any] = lambda _: None,
    **options: Any,
) -> None:
    """A file with ``images``, written in full; ``then`` changes it further."""
    with h5py.File(path, "w", **(file or {})) as opened:
        dataset = create(opened, shape=data.shape, **options)
        if data.size:
            dataset[...] = data
        then(dataset)
