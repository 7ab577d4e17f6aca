"""Copy attributes and values that refer to other objects between files, which HDF5 itself does not.

Copied objects lie elsewhere in the new file, so that every reference is made anew, to the object of the same path.
What has neither references nor variable-length parts travels as the bytes that it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5o, h5r, h5s, h5t

from h5chunk.errors import FileError, printable

ORDER_TRACKED = 1  # of the flags of creation order


def parts_of(kind: h5t.TypeID) -> Iterator[h5t.TypeID]:
    """Yield a type and all types that it is made of."""
    yield kind
    if isinstance(kind, h5t.TypeCompoundID):
        for number in range(kind.get_nmembers()):
            yield from parts_of(kind.get_member_type(number))
    elif isinstance(kind, (h5t.TypeArrayID, h5t.TypeVlenID)):
        yield from parts_of(kind.get_super())


def is_fixed(kind: h5t.TypeID) -> bool:
    """Whether values are the bytes that they are: no variable-length parts, no references."""
    return not any(
        isinstance(part, (h5t.TypeVlenID, h5t.TypeReferenceID))
        or (isinstance(part, h5t.TypeStringID) and part.is_variable_str())
        for part in parts_of(kind)
    )


def references_of(kind: h5t.TypeID) -> list[h5t.TypeReferenceID]:
    """List the types of references that values have."""
    return [part for part in parts_of(kind) if isinstance(part, h5t.TypeReferenceID)]


def refers_to_regions(kind: h5t.TypeID) -> bool:
    """Whether values refer to parts of datasets."""
    return any(part.equal(h5t.STD_REF_DSETREG) for part in references_of(kind))


def attribute_names(item: Any) -> list[bytes]:
    """Names of the attributes of a low-level object, in the order in which they were made if that is known."""
    names: list[bytes] = []
    tracked = not isinstance(item, h5t.TypeID) and item.get_create_plist().get_attr_creation_order() & ORDER_TRACKED
    h5a.iterate(item, names.append, index_type=h5py.h5.INDEX_CRT_ORDER if tracked else h5py.h5.INDEX_NAME)
    return names


class Copier:
    """Copier of attributes and values from one open file to another that has the same objects."""

    def __init__(self, source: h5py.File, target: h5py.File, paths: Mapping[int, bytes]) -> None:
        self._source, self._target, self._paths = source.id, target.id, paths
        self._shown = printable(source.filename)
        self.lost: list[str] = []

    def type_of(self, kind: h5t.TypeID) -> h5t.TypeID:
        """Return a type for the target file: a named one stays a named one."""
        if kind.committed():
            path = self._paths.get(h5o.get_info(kind).addr)
            if path is not None and h5o.exists_by_name(self._target, path):
                return h5o.open(self._target, path)
        return kind.copy()

    def attributes(self, old: Any, new: Any, where: str, skip: Collection[bytes] = ()) -> None:
        """Copy the attributes of a low-level object, but for some names."""
        for name in attribute_names(old):
            if name not in skip:
                attribute = h5a.open(old, name)
                made = h5a.create(new, name, self.type_of(attribute.get_type()), attribute.get_space())
                self._value(attribute, made, f"{where}, attribute {printable(name)!r}")

    def _value(self, old: h5a.AttrID, new: h5a.AttrID, where: str) -> None:
        if old.get_space().get_simple_extent_type() == h5s.NULL or 0 in old.shape:
            return
        kind = old.get_type()
        if is_fixed(kind):
            values = np.empty(old.shape, f"V{kind.get_size()}")
            old.read(values, kind)
            new.write(values, kind)
            return
        values = np.empty(old.shape, old.dtype)
        old.read(values)
        new.write(self.translated(values, where))

    def translated(self, value: Any, where: str) -> Any:
        """Return a value, or an array of values, with references to the objects of the target."""
        if isinstance(value, h5r.Reference):
            return self._reference(value, where)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            copy = value.copy()
            if value.dtype.names:
                for name in value.dtype.names:
                    copy[name] = self.translated(value[name], where)
            else:
                flat = copy.reshape(-1)  # an index of one axis puts an array in as one object
                for number in range(len(flat)):
                    flat[number] = self.translated(flat[number], where)
            return copy
        return value

    def _reference(self, reference: h5r.Reference, where: str) -> h5r.Reference:
        if not reference:
            return reference
        try:
            item = h5r.dereference(reference, self._source)
        except (OSError, RuntimeError, ValueError, KeyError):
            item = None
        if item is None:
            self.lost.append(f"{where} refers to an object that is not there any more, so that it refers to none now")
            return type(reference)()
        path = self._paths.get(h5o.get_info(item).addr)
        if path is None:
            raise FileError(
                f"{self._shown}: {where} refers to an object that has no name: give it one, or delete the reference"
            )
        if isinstance(reference, h5r.RegionReference):
            region = h5r.get_region(reference, self._source)
            return h5r.create(self._target, path, h5r.DATASET_REGION, region)
        return h5r.create(self._target, path or b"/", h5r.OBJECT)
