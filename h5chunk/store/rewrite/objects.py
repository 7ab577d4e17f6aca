"""Values that go through HDF5, from a dataset to its copy: of variable length, references, or of types with a name.

What is no plain bytes goes through Python objects. Values are read chunk by chunk; in a new order, once for each part
of the new file that fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import h5py
import numpy as np

from h5chunk.errors import printable
from h5chunk.store.rewrite.references import Copier, is_fixed
from h5chunk.store.rewrite.rewrite import NewOrder

BAND_ROWS = 1024  # read together where there are no chunks
OBJECT_BYTES = 80  # of memory for a value, beside its own bytes


def copy_objects(old: h5py.Dataset, new: h5py.Dataset, copier: Copier) -> None:
    """Write all values as they are, but for references, which lead to the new objects."""
    where = printable(old.name)
    if old.shape is None or 0 in old.shape:
        return
    if old.shape == ():
        _write(new, None, copier.translated(_read(old, None), where))
        return
    for rows in _bands(old):
        _write(new, rows, copier.translated(_read(old, rows), where))


def permute_objects(order: NewOrder, memory_bytes: int) -> Callable[[h5py.Dataset, h5py.Dataset, Copier], None]:
    """As `copy_objects`, in another order, and within a memory."""

    def permute(old: h5py.Dataset, new: h5py.Dataset, copier: Copier) -> None:
        num_rows = old.shape[0]
        total = sum(_size(_read(old, rows)) for rows in _bands(old))
        part = max(1, num_rows // math.ceil(total / memory_bytes))
        for first in range(0, num_rows, part):
            last = min(first + part, num_rows)
            values = np.empty((last - first, *old.shape[1:]), old.dtype)
            for rows in _bands(old):
                places = order.places[rows.start : rows.stop] - first
                wanted = (places >= 0) & (places < last - first)
                values[places[wanted]] = _read(old, rows)[wanted]
            _write(new, range(first, last), copier.translated(values, printable(old.name)))

    return permute


def _bands(dataset: h5py.Dataset) -> Iterator[range]:
    step = dataset.chunks[0] if dataset.chunks else BAND_ROWS
    return (range(first, min(first + step, len(dataset))) for first in range(0, len(dataset), step))


def _spaces(dataset: h5py.Dataset, rows: range | None) -> tuple[tuple[int, ...], h5py.h5s.SpaceID, h5py.h5s.SpaceID]:
    if rows is None:
        return (), h5py.h5s.create(h5py.h5s.SCALAR), dataset.id.get_space()
    shape = (len(rows), *dataset.shape[1:])
    space = dataset.id.get_space()
    space.select_hyperslab((rows.start, *(0,) * (len(shape) - 1)), shape)
    return shape, h5py.h5s.create_simple(shape), space


def _read(dataset: h5py.Dataset, rows: range | None) -> np.ndarray:
    shape, memory, space = _spaces(dataset, rows)
    kind = dataset.id.get_type()
    fixed = is_fixed(kind)
    values = np.empty(shape, f"V{kind.get_size()}" if fixed else dataset.dtype)
    dataset.id.read(memory, space, values, kind if fixed else None)
    return values


def _write(dataset: h5py.Dataset, rows: range | None, values: np.ndarray) -> None:
    _, memory, space = _spaces(dataset, rows)
    kind = dataset.id.get_type()
    dataset.id.write(memory, space, values, kind if is_fixed(kind) else None)


def _size(values: np.ndarray) -> int:
    """Bytes of memory, about."""
    if values.dtype.names:
        return sum(_size(values[name]) for name in values.dtype.names) + values.nbytes
    if values.dtype.kind != "O":
        return int(values.nbytes)
    return sum(
        OBJECT_BYTES + (each.nbytes if isinstance(each, np.ndarray) else len(each) if isinstance(each, bytes) else 0)
        for each in values.reshape(-1)
    )
