"""Ask the HDF5 library that h5py has loaded for properties of datasets that h5py does not show.

The dynamic linker finds a symbol in the libraries that h5py's own extension module depends on, wherever a wheel or a
distribution keeps them. A build of h5py that hides them makes every call here answer None: not known.
"""

from __future__ import annotations

import ctypes

import h5py
import numpy as np
from h5py._objects import phil

DONT_FILTER_PARTIAL_CHUNKS = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS of H5Dpublic.h
ALL_FILTERS = 0xFFFFFFFF  # the filter mask of a chunk that skipped them all
EXTENSIBLE_ARRAY = 4  # H5D_CHUNK_IDX_EARRAY of H5Dpublic.h


def partial_chunks_are_plain(properties: h5py.h5p.PropDCID) -> bool | None:
    """Whether the partial chunks at the edges of a chunked dataset are stored without its filters.

    Their filter masks do not say so. Source: H5Pset_chunk_opts, HDF5 File Format Specification, IV.A.2.i, version 4.
    """
    options = _call("H5Pget_chunk_opts", properties.id, ctypes.c_uint)
    return None if options is None else bool(options & DONT_FILTER_PARTIAL_CHUNKS)


def chunk_index_type(dataset: h5py.Dataset) -> int | None:
    """Return the type of the index of a chunked dataset, such as `EXTENSIBLE_ARRAY`."""
    return _call("H5Dget_chunk_index_type", dataset.id.id, ctypes.c_int)


def is_stored_as(dataset: h5py.Dataset, dtype: np.dtype) -> bool:
    """Whether the numbers of a dataset are stored bit by bit as NumPy has this type.

    h5py gives types of other precisions and bit offsets, and other floats, the next NumPy type that holds their values.
    """
    stored = dataset.id.get_type()
    if isinstance(stored, h5py.h5t.TypeEnumID) and dtype.kind != "b":
        stored = stored.get_super()
    plain = np.dtype(dtype.str)  # without the names of an enum's values
    return bool(stored.equal(h5py.h5t.py_create(plain, logical=True)))


def _call(name: str, identifier: int, kind: type[ctypes.c_uint] | type[ctypes.c_int]) -> int | None:
    """Call a function of the form ``herr_t name(hid_t identifier, kind *answer)``; return the answer."""
    try:
        function = getattr(ctypes.CDLL(h5py.h5p.__file__), name)
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_int64, ctypes.POINTER(kind)], ctypes.c_int
    answer = kind()
    with phil:  # HDF5 is not safe for several threads
        failed = function(identifier, ctypes.byref(answer)) < 0
    return None if failed else int(answer.value)
