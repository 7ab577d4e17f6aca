"""Read the fields of a file back in the order of its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import h5py
import numpy as np


def read_back(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """All values of some fields, of a file or a folder of shards, in the order of the source."""
    files = sorted(path.glob("*.h5")) if path.is_dir() else [path]
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("h5chunk/source_index", *names)}
    for each in files:
        with h5py.File(each) as file:
            for name, values in parts.items():
                values.append(file[name][()])
    index, *fields = (np.concatenate(values) for values in parts.values())
    order = np.argsort(index)
    assert index[order].tolist() == list(range(len(index)))
    return {name: values[order] for name, values in zip(names, fields, strict=True)}


def check_same(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Assert that a file holds these arrays and no other field, with their types but for byte order and bool."""
    found = read_back(path, arrays)
    for name, array in arrays.items():
        expected = np.dtype(np.uint8) if array.dtype == bool else array.dtype.newbyteorder("=")
        assert found[name].dtype == expected, name
        np.testing.assert_array_equal(found[name], array)
    with h5py.File(next(iter(sorted(path.glob("*.h5"))), path) if path.is_dir() else path) as file:
        assert set(file) == {*arrays, "h5chunk"}
