"""HDF5 files as others make them, and a look at what HDF5 reads of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.scripts import load

import h5chunk.store.read.through_hdf5
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.sampler import ChunkSampler

CountingFile = load("hdf5_cache").CountingFile


def values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Random values of any type that a field may have."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype.kind == "S":
        letters = rng.integers(97, 123, (*shape, dtype.itemsize), dtype=np.uint8)
        return np.ascontiguousarray(letters).view(dtype)[..., 0]
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype=dtype.newbyteorder("="), endpoint=True).astype(dtype)


def make_file(path: Path, *, file: dict[str, Any] | None = None, **datasets: tuple[np.ndarray, dict[str, Any]]) -> Path:
    """A file of plain h5py; each dataset is its values and further arguments of ``create_dataset``."""
    with h5py.File(path, "w", **(file or {})) as opened:
        for name, (data, options) in datasets.items():
            opened.create_dataset(name.replace("__", "/"), data=data, **options)
    return path


def make_images(
    path: Path, num_samples: int, chunk_samples: int, shape: tuple[int, ...] = (50,), **options: Any
) -> Path:
    """A file with ``images`` in whole-sample chunks; sample i starts with the two digits of i to base 256."""
    images = values((num_samples, *shape), np.uint8)
    flat = images.reshape(num_samples, -1)
    flat[:, 0], flat[:, 1] = np.arange(num_samples) >> 8, np.arange(num_samples) & 255
    return make_file(path, images=(images, {"chunks": (chunk_samples, *shape), **options}))


def counting_file(path: Any) -> CountingFile:
    """The content of a file, for HDF5 to read from, which notes every read."""
    return CountingFile(io.BytesIO(Path(path).read_bytes()))


def chunk_table(path: Path, dataset: str = "images") -> dict[int, int]:
    """Stored bytes of each chunk, by its offset."""
    table: dict[int, int] = {}
    with h5py.File(path) as file:
        file[dataset].id.chunk_iter(lambda chunk: table.__setitem__(chunk.byte_offset, chunk.size))
    return table


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[CountingFile]:
    """The files that are read through HDF5 during the test, each of which counts."""
    opened: list[CountingFile] = []

    def open_counting(path: Any) -> h5py.File:
        opened.append(counting_file(path))
        return h5py.File(opened[-1], "r")

    monkeypatch.setattr(h5chunk.store.read.through_hdf5, "open_file", open_counting)
    return opened


def read_epochs(dataset: ChunkDataset, sampler: ChunkSampler, num_epochs: int = 1) -> None:
    """Read as a DataLoader without workers does."""
    for _ in range(num_epochs):
        for batch in sampler:
            dataset.__getitems__(batch)
