"""The types of datasets: how one element is stored in the file, and what it becomes in memory.

An `Element` decodes elements from their bytes in the file, outside HDF5 and in any thread. HDF5 itself converts only
numbers with an unusual number of bits. These types have no class of their own in HDF5:

- Complex numbers are compound types of two floats, named r and i by h5py, and real and imag by MATLAB.
- Booleans are enumerations of FALSE = 0 and TRUE = 1.
- bfloat16 and float8 are floats with the bit layouts of these formats, which NumPy lacks (`NARROW_FLOATS`).

Source: HDF5 File Format Specification, IV.A.2.d (datatype message).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import h5py
import numpy as np
from h5py import h5t

from h5chunk.errors import FieldError, UnsupportedError, names_text
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.packing import CF, Packing, packing_of

COMPLEX_NAMES = (["r", "i"], ["real", "imag"], ["re", "im"])  # of the parts of complex numbers, in lower case
NARROW_FLOATS = {  # by item size, sign bit, start and size of the exponent and of the mantissa, and exponent bias
    (2, 15, 7, 8, 0, 7, 127): np.dtype([("bfloat16", "<u2")]),
    (1, 7, 3, 4, 0, 3, 7): np.dtype([("float8_e4m3fn", "u1")]),
    (1, 7, 2, 5, 0, 2, 15): np.dtype([("float8_e5m2", "u1")]),
}
BITFIELDS = [getattr(h5t, f"STD_B{bits}{order}") for bits in (8, 16, 32, 64) for order in ("LE", "BE")]  # all bits used
INNER = "inner"  # name of the only field of the structured dtypes that lead to a member
MAX_LEVELS = 8  # limit on the nesting of types, which a damaged file may exceed by far


@dataclass(frozen=True)
class Element:
    """The type of a dataset's elements, or of a member of them, in the file and in memory.

    Attributes
    ----------
    stored : dtype
        The element in the file. Its size is that of a whole element. It is structured, with one field, which has one
        field in turn if the type is nested. Its byte orders are those of the file.
    dtype : dtype
        Numbers or strings of fixed length, in native byte order. Values of bfloat16 and float8 have a structured dtype
        with one field, which has the name of the type and contains the bits.
    shape : tuple of int
        Axes of one element, which array types have.
    member : tuple of str
        The names that lead to the member of a compound type; empty for the whole element.
    names : dict of int to str
        The names of the values of an enumeration.
    padding : int
        How strings are padded in the file: one of ``h5py.h5t.STR_NULLPAD``, ``STR_NULLTERM`` and ``STR_SPACEPAD``.
    converted : bytes
        The encoded HDF5 type of the values if only HDF5 can convert them.
    packing : Packing, optional
        How stored numbers are converted to ``dtype``, if they are packed.
    """

    stored: np.dtype
    dtype: np.dtype
    shape: tuple[int, ...] = ()
    member: tuple[str, ...] = ()
    names: dict[int, str] = field(default_factory=dict, hash=False)
    padding: int = h5t.STR_NULLPAD
    converted: bytes = b""
    packing: Packing | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of one element in the file."""
        return self.stored.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of one element in memory."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def is_plain(self) -> bool:
        """Whether the stored bytes are the bytes in memory."""
        same = self.values_of(np.empty(0, np.uint8)).dtype == self.dtype and self.item_bytes == self.num_bytes
        return same and self.padding == h5t.STR_NULLPAD and self.packing is None

    def values_of(self, raw: np.ndarray) -> np.ndarray:
        """Return a view of the values as they are stored, (n, *shape), in ``raw``, (n * item_bytes,) uint8."""
        values = raw.view(self.stored)
        while values.dtype.names == (INNER,):
            values = values[INNER]
        return values

    def convert(self, raw: np.ndarray) -> np.ndarray:
        """Convert stored elements, ``raw``, (n * item_bytes,) uint8, to values of ``dtype``: (n, *shape).

        The values are a view of ``raw`` if the element is plain. Threads may call this at the same time.
        """
        if self.packing is not None:
            stored = replace(self, dtype=self.packing.stored, packing=None)
            return self.packing.unpack(stored.convert(raw))
        values = self.values_of(raw)
        if self.converted:
            return self._convert_by_hdf5(values)
        if self.dtype.kind == "c" and values.dtype.kind == "f":  # NumPy has no complex numbers of two float16
            return np.ascontiguousarray(values, np.float32).view(self.dtype)[..., 0]
        if self.padding != h5t.STR_NULLPAD:
            values = self._padded_with_zeros(values)
        return values.astype(self.dtype, copy=False)

    def _padded_with_zeros(self, strings: np.ndarray) -> np.ndarray:
        strings = np.array(strings)
        characters = strings.reshape(-1).view(np.uint8).reshape(-1, self.dtype.itemsize)
        if self.padding == h5t.STR_NULLTERM:  # there may be anything after the first zero
            characters[np.logical_or.accumulate(characters == 0, axis=1)] = 0
        else:  # the spaces at the end are those in front of which only spaces follow
            backwards = characters[:, ::-1]
            backwards[np.logical_and.accumulate(backwards == ord(" "), axis=1)] = 0
        return strings

    def _convert_by_hdf5(self, values: np.ndarray) -> np.ndarray:
        target = h5t.py_create(self.dtype, logical=True)
        buffer = np.zeros(values.size * max(values.itemsize, self.dtype.itemsize), np.uint8)
        buffer[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        h5t.convert(h5t.decode(self.converted), target, values.size, buffer)  # in place
        return buffer[: values.size * self.dtype.itemsize].view(self.dtype).reshape(values.shape)


def element_of(kind: h5t.TypeID | h5py.Dataset, where: str, member: Sequence[str] = (), decode: str = "") -> Element:
    """Describe the elements of a dataset, or of an HDF5 type, or a member of them.

    ``member`` has the names that lead to the member, from the outside in, as `find_member` returns them. If ``decode``
    is `CF`, the numbers of a dataset are unpacked as its attributes say. ``where`` names the dataset in messages. Raise
    UnsupportedError, with a remedy, if the type or member can't be a field, and FieldError if there is no such member.
    """
    dataset, kind = (kind, kind.id.get_type()) if isinstance(kind, h5py.Dataset) else (None, kind)
    element = _describe(kind, where, tuple(member))
    element = replace(element, stored=_wrapped(element.stored, 0, kind.get_size()), member=tuple(member))
    if decode == CF and dataset is not None and not member and not element.names:
        packing = packing_of(dataset, element.dtype, where)
        return element if packing is None else replace(element, dtype=packing.dtype, packing=packing)
    return element


def packed_type(kind: h5t.TypeID, member: Sequence[str]) -> h5t.TypeID:
    """Return a type that contains only a member of ``kind``, stored as in ``kind``, with which HDF5 reads only that."""
    if not member:
        return kind
    if isinstance(kind, h5t.TypeArrayID):
        return h5t.array_create(packed_type(kind.get_super(), member), kind.get_array_dims())
    inner = packed_type(_member(kind, member[0])[1], member[1:])
    packed = h5t.create(h5t.COMPOUND, inner.get_size())
    packed.insert(member[0].encode("utf-8", "surrogateescape"), 0, inner)
    return packed


def packed_element(dataset: h5py.Dataset, element: Element) -> Element:
    """Describe the elements that HDF5 reads with `packed_type`, which have only the bytes of a member."""
    if not element.member:
        return element
    return element_of(packed_type(dataset.id.get_type(), element.member), repr(dataset.name), element.member)


def find_member(kind: h5t.TypeID, name: str) -> tuple[str, ...] | None:
    """Split the name of a member of a compound type, such as "p4.x" or "p4/x", into the names that lead to it.

    Names of members may contain dots and slashes. Return None if there is no such member.
    """
    kind = _without_axes(kind)
    if not isinstance(kind, h5t.TypeCompoundID):
        return None
    for own in _member_names(kind):
        if name == own:
            return (own,)
        if name.startswith((f"{own}.", f"{own}/")):
            rest = find_member(_member(kind, own)[1], name[len(own) + 1 :])
            if rest is not None:
                return (own, *rest)
    return None


def find_column(start: h5py.Group, guard: Guard, path: str) -> tuple[str, tuple[str, ...]] | None:
    """Split the path of a member of a compound type, such as "events/p4.x", into its dataset and the member."""
    for at in range(len(path) - 1, 0, -1):
        if path[at] in "./" and path[:at].strip("/"):
            item = guard.find(start, path[:at])
            if isinstance(item, h5py.Dataset) and (member := find_member(item.id.get_type(), path[at + 1 :])):
                return path[:at], member
    return None


def read_elements(dataset: h5py.Dataset, element: Element) -> np.ndarray:
    """Read all elements of a dataset through HDF5, and convert them: (n, *element.shape)."""
    packed = packed_element(dataset, element)
    raw = np.zeros(dataset.shape, f"V{packed.item_bytes}")  # HDF5 leaves memory unchanged if there is no fill value
    dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, packed_type(dataset.id.get_type(), element.member))
    return packed.convert(raw.reshape(-1).view(np.uint8))


def members_of(kind: h5t.TypeID, levels: int = MAX_LEVELS) -> list[tuple[str, ...]]:
    """List the members of a compound type that are not compound themselves, by the names that lead to each.

    The list is empty for other types, such as complex numbers. Tables in more than ``levels`` tables are listed whole.
    """
    kind = _without_axes(kind)
    if not isinstance(kind, h5t.TypeCompoundID) or _complex_part(kind) is not None or not levels:
        return []
    members: list[tuple[str, ...]] = []
    for name in _member_names(kind):
        members += [(name, *inner) for inner in members_of(_member(kind, name)[1], levels - 1) or [()]]
    return members


def type_text(kind: h5t.TypeID, levels: int = MAX_LEVELS) -> str:
    """Describe a type in a few words, such as ``table of pt float32, p4 (float32 x 4)``."""
    if not levels:
        return "..."
    if isinstance(kind, h5t.TypeCompoundID) and _complex_part(kind) is None:
        names = _member_names(kind)
        texts = [f"{name} {_in_brackets(_member(kind, name)[1], levels)}" for name in names[:8]]
        return f"table of {', '.join(texts)}{', ...' if len(names) > 8 else ''}"
    if isinstance(kind, h5t.TypeArrayID):
        return f"{_in_brackets(kind.get_super(), levels)} x {' x '.join(map(str, kind.get_array_dims()))}"
    if isinstance(kind, h5t.TypeStringID):
        return "strings of variable length" if kind.is_variable_str() else f"strings of {kind.get_size()} bytes"
    if isinstance(kind, h5t.TypeVlenID):
        return f"{_in_brackets(kind.get_super(), levels)} of variable length"
    try:
        element = element_of(kind, "")
    except UnsupportedError:
        return _class_text(kind)
    name = element.dtype.names[0] if element.dtype.names else element.dtype.name
    return f"{name} with the names {names_text(element.names.values())}" if element.names else name


def _in_brackets(kind: h5t.TypeID, levels: int) -> str:
    text = type_text(kind, levels - 1)
    return f"({text})" if " " in text else text


def _wrapped(inner: np.dtype, offset: int, size: int) -> np.dtype:
    """Return a dtype of ``size`` bytes that contains only ``inner``, at ``offset``."""
    return np.dtype({"names": [INNER], "formats": [inner], "offsets": [offset], "itemsize": size})


def _without_axes(kind: h5t.TypeID) -> h5t.TypeID:
    while isinstance(kind, h5t.TypeArrayID):
        kind = kind.get_super()
    return kind


def _member_names(kind: h5t.TypeCompoundID | h5t.TypeEnumID) -> list[str]:
    names = (kind.get_member_name(number) for number in range(kind.get_nmembers()))
    return [name.decode("utf-8", "surrogateescape") for name in names]


def _member(kind: h5t.TypeCompoundID, name: str) -> tuple[int, h5t.TypeID]:
    """Return the offset and type of a member."""
    number = _member_names(kind).index(name)
    return int(kind.get_member_offset(number)), kind.get_member_type(number)


def _complex_part(kind: h5t.TypeCompoundID) -> h5t.TypeID | None:
    """Return the type of the two parts of a complex number, or None if the members aren't such parts."""
    if [name.lower() for name in _member_names(kind)] not in COMPLEX_NAMES:
        return None
    real, imaginary = kind.get_member_type(0), kind.get_member_type(1)
    size = real.get_size()
    is_packed = (kind.get_member_offset(0), kind.get_member_offset(1), kind.get_size()) == (0, size, 2 * size)
    are_equal = isinstance(real, h5t.TypeFloatID) and real.equal(imaginary)
    return real if is_packed and are_equal else None


def _describe(kind: h5t.TypeID, where: str, member: tuple[str, ...], levels: int = MAX_LEVELS) -> Element:
    """Describe a type. ``stored`` of the result has the size of the type, but it may be any dtype."""
    if not levels:
        raise UnsupportedError(f"{where} has types nested in more than {MAX_LEVELS} levels: leave it out")
    if isinstance(kind, h5t.TypeArrayID):
        inner, dims = _describe(kind.get_super(), where, member, levels - 1), kind.get_array_dims()
        return replace(inner, stored=np.dtype((inner.stored, dims)), shape=(*dims, *inner.shape))
    if isinstance(kind, h5t.TypeCompoundID):
        part = _complex_part(kind)
        if part is not None and not member:
            return _describe_complex(kind, part, where)
        names = _member_names(kind)
        if not member:
            first = "/".join(members_of(kind)[0]) if names else ""
            raise UnsupportedError(
                f"{where} is a table with the columns {names_text(names)}, but a field is one column: name them, such "
                f"as {'NAME/' + first!r} for the dataset NAME"
            )
        if member[0] not in names:
            raise FieldError(f"{where} has no member {member[0]!r}; its members are {names_text(names)}")
        offset, inner_kind = _member(kind, member[0])
        inner = _describe(inner_kind, where, member[1:], levels - 1)
        return replace(inner, stored=_wrapped(inner.stored, offset, kind.get_size()))
    if member:
        raise FieldError(f"{where} has no member {member[0]!r}, because it is {type_text(kind)}, not a table")
    if isinstance(kind, h5t.TypeStringID) and not kind.is_variable_str() and kind.get_size():
        dtype = np.dtype(f"S{kind.get_size()}")
        return Element(dtype, dtype, padding=kind.get_strpad())
    if hasattr(h5t, "TypeComplexID") and isinstance(kind, h5t.TypeComplexID):
        return _describe_complex(kind, kind.get_super(), where)
    if isinstance(kind, (h5t.TypeIntegerID, h5t.TypeFloatID, h5t.TypeEnumID, h5t.TypeBitfieldID)):
        return _describe_number(kind, where)
    in_table = "has strings of variable length in a table, or strings of 0 bytes: leave it out"
    raise UnsupportedError(f"{where} {in_table if isinstance(kind, h5t.TypeStringID) else type_problem(kind)}")


def _describe_complex(kind: h5t.TypeID, part: h5t.TypeID, where: str) -> Element:
    parts = _describe_number(part, where)
    if parts.converted or parts.dtype.names or parts.dtype.itemsize > 8:
        raise UnsupportedError(
            f"{where} has complex numbers of two {_class_text(part)}, but only those of float16, float32 and float64 "
            "are supported: copy it (x) to another dataset, such as file['NEW'] = x[:].astype('c16')"
        )
    size = parts.dtype.itemsize
    if size == 2:
        return Element(np.dtype((parts.stored, (2,))), np.dtype(np.complex64))
    dtype = np.dtype(f"c{2 * size}")
    return Element(dtype.newbyteorder(parts.stored.byteorder), dtype)


def _describe_number(kind: h5t.TypeID, where: str) -> Element:
    names: dict[int, str] = {}
    base = kind
    if isinstance(kind, h5t.TypeEnumID):
        base = kind.get_super()
        values = [int(kind.get_member_value(number)) for number in range(kind.get_nmembers())]
        names = dict(zip(values, _member_names(kind), strict=True))
    if isinstance(base, h5t.TypeFloatID):
        start, sign = base.get_fields()[1:5], base.get_fields()[0]
        narrow = NARROW_FLOATS.get((base.get_size(), sign, *start, base.get_ebias()))
        if narrow is not None and base.get_precision() == 8 * base.get_size():
            order: Literal[">", "<"] = ">" if base.get_order() == h5t.ORDER_BE else "<"
            return Element(narrow.newbyteorder(order), narrow)
    try:
        stored = np.dtype(base.dtype.str)  # without metadata
    except TypeError:
        raise UnsupportedError(f"{where} {type_problem(kind)}") from None
    dtype = stored.newbyteorder("=")
    if names == {0: "FALSE", 1: "TRUE"}:
        names, dtype = {}, np.dtype(bool)
    if base.equal(h5t.py_create(stored)) or any(base.equal(bits) for bits in BITFIELDS):
        return Element(dtype if dtype.kind == "b" and stored.itemsize == 1 else stored, dtype, names=names)
    return Element(np.dtype(f"V{base.get_size()}"), dtype, names=names, converted=base.encode())


def _class_text(kind: h5t.TypeID) -> str:
    """Name the class of a type that is not supported."""
    try:
        return str(kind.dtype)
    except TypeError:
        return type(kind).__name__.removeprefix("Type").removesuffix("ID").lower()


def type_problem(kind: h5t.TypeID) -> str:
    """Say why a dataset of a type, which has no members, can't be a field, and how to copy it to one that can.

    ``x`` stands for the values, as h5py reads them.
    """
    if isinstance(kind, h5t.TypeStringID):
        return (
            "has strings of variable length, but a field needs numbers or strings of fixed length: copy it (x) to "
            "another dataset, such as file['NEW'] = np.char.encode(np.array(x.asstr()[()], str)), which makes their "
            "length fixed"
        )
    if isinstance(kind, h5t.TypeReferenceID):
        return (
            "has references to other objects: copy the values that they refer to, such as file['NEW'] = "
            "np.stack([file[reference][()] for reference in x[()]])"
        )
    if isinstance(kind, h5t.TypeVlenID):
        return "has arrays of variable length, but a field needs numbers or strings of fixed length: leave it out"
    if isinstance(kind, h5t.TypeOpaqueID):
        dtype = kind.dtype
        as_bytes = f"np.array(x[:]).view('u1').reshape(*x.shape, {dtype.itemsize})"
        copied = "x[:].astype('i8')" if dtype.kind in "mM" else as_bytes
        return f"has opaque bytes ({dtype}), which are not numbers: copy it (x), such as file['NEW'] = {copied}"
    if isinstance(kind, h5t.TypeCompoundID):
        part = _complex_part(kind)
        if part is None:
            names = _member_names(kind)
            return (
                f"is a table with the columns {names_text(names)}, but a field is one dataset: copy the columns of it "
                f"(x) to datasets, such as file['NEW'] = x[{names[0]!r}]"
            )
        return (
            f"has complex numbers ({kind.dtype}), but a field needs real numbers: copy it (x) to another dataset of "
            f"real and imaginary parts, such as file['NEW'] = x[:].view('f{part.get_size()}').reshape(*x.shape, 2), "
            "which torch.view_as_complex converts back"
        )
    return f"has the type {_class_text(kind)}, but a field needs numbers or strings of fixed length: leave it out"
