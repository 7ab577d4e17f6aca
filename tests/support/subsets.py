"""Subsets of data sets of all kinds, and what a loader returns of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from support.foreign import values
from support.matrices import random_matrix, write

import h5chunk


def subset_of_kind(kind: str, folder: Path) -> h5chunk.ChunkDataset:
    """A data set of some samples of 300, or windows of a series of 300 steps."""
    numbers, file = np.arange(300), folder / "a.h5"
    if kind == "matrix":
        write(file, random_matrix(300, 50, 4))
        data = h5chunk.ChunkDataset(file)
    elif kind == "ragged":
        starts = np.append(0, np.cumsum(numbers % 7))
        with h5py.File(file, "w") as opened:
            opened["tokens"], opened["starts"], opened["labels"] = np.arange(starts[-1]), starts, numbers
        data = h5chunk.ChunkDataset(file, fields=["tokens", "labels"], offsets={"tokens": "starts"})
    elif kind == "windows":
        with h5py.File(file, "w") as opened:
            opened["x"] = np.arange(600, dtype=np.float32).reshape(300, 2)
        data = h5chunk.Windows(file, {"x": "x"}, 5, padding="edge")
    else:
        h5chunk.convert({"images": values((300, 20), np.uint8), "labels": numbers}, file, chunk_samples=10)
        data = h5chunk.ChunkDataset(file, fields=["images", "labels", "sample_number"])
    return data.subset(np.flatnonzero(numbers % 3 != 1)[50:120])


def flat_epochs(data: h5chunk.ChunkDataset, **options: Any) -> list[list[float]]:
    with h5chunk.ChunkLoader(data, 16, seed=3, **options) as loader:
        return [part for _ in range(2) for part in flat_tensors(loader)]


def flat_tensors(loader: Iterable[Any]) -> list[list[float]]:
    """The numbers of each tensor of an epoch. An item of a batch is a tensor, or several."""
    items = (item if isinstance(item, tuple) else (item,) for batch in loader for item in batch)
    return [part.to_dense().reshape(-1).tolist() for item in items for part in item]
