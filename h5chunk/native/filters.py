"""Reverse filters of HDF5 in C, without holding the GIL. All arrays are C-contiguous uint8."""

from __future__ import annotations

import ctypes
import functools
import os
from importlib.util import find_spec
from typing import Any

import numpy as np


def available() -> bool:
    """Return whether the library was built, and the environment variable H5CHUNK_NATIVE does not switch it off."""
    return os.environ.get("H5CHUNK_NATIVE", "1") != "0" and _library() is not None


@functools.cache
def _library() -> Any:
    spec = find_spec("h5chunk.native._filters")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.h5chunk_unshuffle.restype, library.h5chunk_unshuffle.argtypes = None, (address, address, number, number)
    library.h5chunk_fletcher32.restype, library.h5chunk_fletcher32.argtypes = ctypes.c_uint32, (address, number)
    library.h5chunk_unlzf.restype, library.h5chunk_unlzf.argtypes = number, (address, number, address, number)
    return library


def unshuffle(data: np.ndarray, item_bytes: int, out: np.ndarray) -> None:
    """Undo the shuffle filter for whole elements of ``item_bytes``. Both arrays have the same length."""
    _library().h5chunk_unshuffle(data.ctypes.data, out.ctypes.data, item_bytes, len(data) // item_bytes)


def fletcher32(data: np.ndarray) -> int:
    """Return the checksum that HDF5's filter Fletcher-32 appends to data."""
    return int(_library().h5chunk_fletcher32(data.ctypes.data, len(data)))


def unlzf(data: np.ndarray, out: np.ndarray) -> int:
    """Decode LZF data into ``out``, and return its decoded length, or -1 if it is damaged or too long."""
    return int(_library().h5chunk_unlzf(data.ctypes.data, len(data), out.ctypes.data, len(out)))
