"""Read attributes that are one number or one string, such as the magnitude of an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, H5ChunkError
from h5chunk.store.hdf5.guard import check_attributes
from h5chunk.store.hdf5.strings import read_words

EXACT = 1 << 53  # float64 represents all integers up to this exactly


def read_attribute(item: Any, name: str, where: str, kind: type[H5ChunkError]) -> Any:
    """Read an attribute that must be one number or one string. Otherwise raises an error of the type ``kind``."""

    def error(problem: str) -> H5ChunkError:
        return kind(f"{where}: {problem}")

    try:
        attribute = h5py.h5a.open(item, name.encode())
    except KeyError:
        numbers = range(min(10, h5py.h5a.get_num_attrs(item)))
        names = ", ".join(h5py.h5a.open(item, index=number).name.decode() for number in numbers) or "none"
        remedy = f"all samples must have it, unless h5chunk.Keyed gets a default, as in attributes={{{name!r}: 0}}"
        raise kind(f"{where} has no attribute {name!r} (it has {names}): {remedy}") from None
    shape = attribute.shape
    if shape is None or 0 in shape:
        raise error(f"attribute {name!r} is empty, but must be one number, or one string")
    if shape in ((), (1,)) and isinstance(attribute.get_type(), (h5py.h5t.TypeIntegerID, h5py.h5t.TypeFloatID)):
        value = np.empty(shape, attribute.dtype)
        attribute.read(value)
        return value.reshape(()).item()
    owner = h5py.Group(item) if isinstance(item, h5py.h5g.GroupID) else h5py.Dataset(item)
    if words := read_words(owner, name, error):
        if len(words) > 1:
            raise error(f"attribute {name!r} must be one number, or one string")
        return words[0].encode()
    check_attributes(owner, where, [name])
    value = np.asarray(owner.attrs[name])
    if value.size != 1 or value.dtype.kind not in "biuf":
        raise error(f"attribute {name!r} must be one number, or one string")
    return value.reshape(()).item()


def join_columns(name: str, columns: Sequence[np.ndarray]) -> np.ndarray:
    """Join the values of an attribute. Raises FieldError if no dtype represents all of them exactly."""
    if len({column.dtype.kind == "S" for column in columns}) > 1:
        raise FieldError(
            f"attribute {name!r} is a number in some samples, and a string in others: leave it out, or delete the "
            f"strings, such as del file[SAMPLE].attrs[{name!r}], and pass a default: attributes={{{name!r}: -1.0}}"
        )
    joined = np.concatenate(columns)
    whole = [column for column in columns if column.dtype.kind in "iu"] if joined.dtype.kind == "f" else []
    if not whole:
        return joined
    least, most = min(int(column.min()) for column in whole), max(int(column.max()) for column in whole)
    if least >= 0 and all(column.dtype.kind in "biu" for column in columns):
        return np.concatenate([column.astype(np.uint64) for column in columns])
    if not -EXACT <= least <= most <= EXACT:
        value = least if least < -EXACT else most
        raise FieldError(
            f"attribute {name!r} is {value} in a sample, and negative or not an integer in others, so no type "
            "represents all values exactly: use one type, or leave it out"
        )
    return joined
