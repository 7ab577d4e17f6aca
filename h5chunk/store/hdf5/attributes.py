"""Read attributes that are numbers or strings, such as the magnitude of an event, as a column of all samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, H5ChunkError
from h5chunk.store.hdf5.guard import check_attributes
from h5chunk.store.hdf5.strings import read_words

EXACT = 1 << 53  # float64 represents all integers up to this exactly
MISSING = ("", "None")  # strings that stand for a missing number


def read_attribute(item: Any, name: str, where: str, kind: type[H5ChunkError]) -> Any:
    """Read an attribute: a number, a string as bytes, or a list (of lists) of numbers.

    Otherwise raises an error of the type ``kind``.
    """

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
        raise error(f"attribute {name!r} is empty, but must be numbers, or one string")
    if shape in ((), (1,)) and isinstance(attribute.get_type(), (h5py.h5t.TypeIntegerID, h5py.h5t.TypeFloatID)):
        value = np.empty(shape, attribute.dtype)
        attribute.read(value)
        return value.reshape(()).item()
    owner = h5py.Group(item) if isinstance(item, h5py.h5g.GroupID) else h5py.Dataset(item)
    if words := read_words(owner, name, error):
        if len(words) > 1:
            raise error(f"attribute {name!r} is a list of strings, but must be numbers, or one string")
        return words[0].encode()
    check_attributes(owner, where, [name])
    value = np.asarray(owner.attrs[name])
    if value.dtype.kind not in "biuf":
        raise error(f"attribute {name!r} has the type {value.dtype}, but must be numbers, or one string")
    return value.reshape(()).item() if value.size == 1 else value.tolist()


def has_attribute(item: Any, name: str, default: Any) -> bool:
    """Return whether an object has an attribute. With a default, an empty attribute counts as lacking."""
    if not h5py.h5a.exists(item, name.encode()):
        return False
    return default is None or h5py.h5a.open(item, name.encode()).shape not in (None, (0,))


def as_number(value: Any, default: Any, name: str, where: str) -> Any:
    """Return a value of an attribute whose default is a number: None if it is missing, and a string as a number."""
    if not isinstance(value, bytes) or not isinstance(default, (int, float)):
        return value
    text = value.decode().strip()
    if text in MISSING:
        return None
    for number in (int, float):
        try:
            return number(text if "_" not in text else "")
        except ValueError:
            continue
    raise FieldError(
        f"{where}: attribute {name!r} is {text[:50]!r}, but its default {default!r} is a number: pass a string as "
        "the default, or leave the attribute out"
    )


def column_of(name: str, values: Sequence[Any], default: Any, names: Sequence[str]) -> np.ndarray:
    """Return the values of an attribute as an array, (n, ...). None stands for ``default``.

    ``names`` are the names of the samples in messages. Raises FieldError if the values differ in shape, or if no dtype
    represents all of them exactly.
    """
    default = default.encode() if isinstance(default, str) else default
    first = next((number for number, value in enumerate(values) if value is not None), 0)
    shape = np.shape(values[first])
    for where, value in zip(names, values, strict=True):
        if value is not None and np.shape(value) != shape:
            raise FieldError(
                f"{where}: attribute {name!r} has the shape {list(np.shape(value))}, but {list(shape)} in "
                f"{names[first].rpartition(': ')[2]}: it must be one number, or have one shape; leave it out"
            )
    if shape and None in values:
        values = [np.full(shape, default).tolist() if value is None else value for value in values]
    columns = [np.array([default if value is None else value]) for value in values]
    column = join_columns(name, columns, default)
    return column.astype("S1") if column.dtype.itemsize == 0 else column


def join_columns(name: str, columns: Sequence[np.ndarray], default: Any = None) -> np.ndarray:
    """Join the values of an attribute, of which some may be ``default`` instead of an array of several values.

    Raises FieldError if they differ in shape, or if no dtype represents all of them exactly.
    """
    if len({column.dtype.kind == "S" for column in columns}) > 1:
        raise FieldError(
            f"attribute {name!r} is a number in some samples, and a string in others: leave it out, or pass a number "
            f"for the samples with an empty string: attributes={{{name!r}: -1.0}}"
        )
    shapes = {column.shape[1:] for column in columns}
    if len(shapes) > 1:
        shape = max(shapes, key=len)
        columns = [
            np.broadcast_to(column.reshape(-1, *(1 for _ in shape)), (len(column), *shape))
            if column.shape[1:] == ()
            and default is not None
            and np.array_equal(column, np.full(len(column), default), equal_nan=True)
            else column
            for column in columns
        ]
        shapes = {column.shape[1:] for column in columns}
    if len(shapes) > 1:
        listed = " and ".join(map(str, sorted(shapes)[:2]))
        raise FieldError(f"attribute {name!r} has the shapes {listed} in different samples: leave it out")
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
