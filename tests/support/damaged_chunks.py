"""Filter pipelines of HDF5, and chunks whose stored bytes are overwritten."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
from support.foreign import values

from h5chunk.store.hdf5 import codecs

FILTERS = {
    "gzip": {"compression": "gzip"},
    "gzip 9, shuffle": {"compression": "gzip", "compression_opts": 9, "shuffle": True},
    "lzf": {"compression": "lzf"},
    "lzf, shuffle, fletcher32": {"compression": "lzf", "shuffle": True, "fletcher32": True},
    "shuffle": {"shuffle": True},
    "fletcher32": {"fletcher32": True},
    "shuffle, fletcher32": {"shuffle": True, "fletcher32": True},
    "gzip, shuffle, fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "zstd": {**hdf5plugin.Zstd()},
    "zstd, shuffle, fletcher32": {**hdf5plugin.Zstd(), "shuffle": True, "fletcher32": True},
    "lz4": {**hdf5plugin.LZ4()},
    "blosc lz4": {**hdf5plugin.Blosc(cname="lz4")},
    "blosc zstd, bitshuffle": {**hdf5plugin.Blosc(cname="zstd", shuffle=2)},
    "bitshuffle": {**hdf5plugin.Bitshuffle()},
}


def half_smooth(shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Rows that can be compressed, and rows that cannot: HDF5 leaves filters out where they do not help."""
    data = values(shape, dtype)
    data[: len(data) // 2] = 1
    data[len(data) // 4] = 0
    return data


def damage(path: Path, chunk: int, dataset: str = "x", byte: int = 0xF7) -> None:
    """Overwrite the stored bytes of a chunk."""
    with h5py.File(path) as file:
        found = file[dataset].id.get_chunk_info(chunk)
    with path.open("r+b") as file:
        file.seek(found.byte_offset)
        file.write(bytes([byte]) * found.size)


@contextmanager
def libraries_found_again() -> Iterator[None]:
    """Look for libraries of codecs anew, here and behind this."""
    codecs._library.cache_clear()
    yield
    codecs._library.cache_clear()


@pytest.fixture
def no_imagecodecs(monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    with libraries_found_again():
        yield
