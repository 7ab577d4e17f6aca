"""Import the optional package pyarrow on first use, and convert Arrow arrays to NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from h5chunk.errors import SourceError
from h5chunk.extras import load
from h5chunk.sample_source import ENDS_IN_NULL


class _LazyModule:
    """A module that is imported on first access to one of its attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(load(self._name, "reading text, .parquet or ids"), name)


pyarrow: Any = _LazyModule("pyarrow")
compute: Any = _LazyModule("pyarrow.compute")
csv: Any = _LazyModule("pyarrow.csv")
parquet: Any = _LazyModule("pyarrow.parquet")


def has_type(kind: Any, *names: str) -> bool:
    """Return whether any of these predicates of ``pyarrow.types``, without their prefix ``is_``, holds for a type.

    >>> has_type(pyarrow.int8(), "floating", "integer")
    True
    """
    return any(getattr(pyarrow.types, f"is_{name}")(kind) for name in names)


def byte_lengths(column: Any) -> np.ndarray:
    """Return the lengths in bytes of the strings in an Arrow array: (n,) int32."""
    return np.diff(_offsets(column))


def to_fixed_bytes(column: Any) -> np.ndarray:
    """Convert an Arrow array of strings without missing values to fixed-length bytes: (n,) ``S``.

    Raises SourceError for a string that ends with a NUL byte, which fixed-length bytes would lose.
    """
    if not len(column):
        return np.empty(0, "S1")
    offsets, lengths = _offsets(column), byte_lengths(column)
    wide = np.zeros((len(column), max(1, int(lengths.max()))), np.uint8)
    data = np.frombuffer(column.buffers()[2] or b"", np.uint8)
    if (data[offsets[1:][lengths > 0] - 1] == 0).any():
        raise SourceError(f"a string {ENDS_IN_NULL}")
    wide[np.arange(wide.shape[1]) < lengths[:, None]] = data[offsets[0] : offsets[-1]]
    return wide.view(f"S{wide.shape[1]}")[:, 0]


def index_values(known: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each value in ``known`` followed by the new values, and these new values.

    New values are those that ``known`` lacks, in the order in which they first occur. Both arguments are 1-D arrays of
    int64 or of fixed-length bytes; the indices are int64.

    >>> index_values(np.array([7, 5]), np.array([5, 9, 5]))
    (array([1, 2, 1]), array([9]))
    """
    kind = pyarrow.large_binary() if values.dtype.kind == "S" else None
    together = pyarrow.concat_arrays([pyarrow.array(array, kind) for array in (known, values)]).dictionary_encode()
    new = together.dictionary.slice(len(known))
    numbers = together.indices.slice(len(known)).to_numpy().astype(np.int64)
    return numbers, new.to_numpy() if kind is None else to_fixed_bytes(new.cast(pyarrow.binary()))


def _offsets(column: Any) -> np.ndarray:
    return np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
