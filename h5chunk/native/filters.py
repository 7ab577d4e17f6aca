"""Reverse filters of HDF5 in C, without holding the GIL. All arrays are C-contiguous uint8."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from importlib import import_module

import numpy as np

from h5chunk import native
from h5chunk.native import available

GZIP, SHUFFLE, FLETCHER32, LZF, LZ4, ZSTD = 1, 2, 3, 32000, 32004, 32015  # numbers that The HDF Group assigned
MAX_FILTERS = 8
PIPELINE = np.dtype([("count", np.int64), ("filters", np.int64, (MAX_FILTERS, 2))])  # filters.h describes the fields
FUNCTIONS = {  # functions of libraries that these modules are linked with, in the order of filters.h
    "imagecodecs._deflate": (
        "libdeflate_alloc_decompressor",
        "libdeflate_free_decompressor",
        "libdeflate_zlib_decompress_ex",
    ),
    "zlib": ("uncompress2",),
    "imagecodecs._lz4": ("LZ4_decompress_safe",),
    "imagecodecs._zstd": ("ZSTD_createDCtx", "ZSTD_freeDCtx", "ZSTD_decompressDCtx"),
}
MODULES = {GZIP: ("imagecodecs._deflate", "zlib"), LZ4: ("imagecodecs._lz4",), ZSTD: ("imagecodecs._zstd",)}


@functools.cache
def _modules() -> set[str]:
    """Give the C library the functions that it needs. Returns the modules that have them."""
    found, addresses = set(), []
    for module, names in FUNCTIONS.items():
        try:  # a module that is part of the Python program has no file, and the program its functions
            library = ctypes.CDLL(getattr(import_module(module), "__file__", None))
            functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
            found.add(module)
        except (ImportError, OSError, AttributeError):
            functions = [None] * len(names)
        addresses += functions
    native._library().h5chunk_set_libraries((ctypes.c_void_p * len(addresses))(*addresses))
    return found


def pipeline_of(filters: Sequence[tuple[int, Sequence[int]]]) -> np.ndarray | None:
    """Return a table for jobs that undo these filters, () `PIPELINE`. Returns None if the C library cannot do that.

    ``filters`` has the numbers and parameters of filters, in the order in which they were applied.
    """
    if not available() or len(filters) > MAX_FILTERS:
        return None
    table = np.zeros((), PIPELINE)
    table["count"] = len(filters)
    for at, (code, parameters) in enumerate(filters):
        if code not in (SHUFFLE, FLETCHER32, LZF) and not _modules() & {*MODULES.get(code, ())}:
            return None
        table["filters"][at] = code, parameters[0] if code == SHUFFLE and parameters else 0
    return table


def unshuffle(data: np.ndarray, item_bytes: int, out: np.ndarray) -> None:
    """Undo the shuffle filter for whole elements of ``item_bytes``. Both arrays have the same length."""
    native._library().h5chunk_unshuffle(data.ctypes.data, out.ctypes.data, item_bytes, len(data) // item_bytes)


def fletcher32(data: np.ndarray) -> int:
    """Return the checksum that HDF5's filter Fletcher-32 appends to data."""
    return int(native._library().h5chunk_fletcher32(data.ctypes.data, len(data)))


def unlzf(data: np.ndarray, out: np.ndarray) -> int:
    """Decode LZF data into ``out``, and return its decoded length, or -1 if it is damaged or too long."""
    return int(native._library().h5chunk_unlzf(data.ctypes.data, len(data), out.ctypes.data, len(out)))
