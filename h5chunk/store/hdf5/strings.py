"""Read strings of variable length, and attributes that contain them, from an HDF5 file without the HDF5 library.

HDF5 trusts the lengths in the file, so one damaged byte can make it allocate gigabytes. This module first checks all
lengths and addresses against the file. Addresses in the file must have 8 bytes. Source: HDF5 File Format Specification,
III.E (global heap), IV.A.1 (object headers), IV.A.2.m (attribute message), VIII.B (disk format of variable-length
data).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import h5py
import numpy as np

from h5chunk.errors import H5ChunkError
from h5chunk.store.hdf5.guard import small_attribute
from h5chunk.store.hdf5.open import address_of, descriptor_of
from h5chunk.store.hdf5.ranges import held

MAX_STRING_BYTES = 256
MAX_TEXT_BYTES = 64 << 10  # limit on strings that are samples, because those of a batch are padded to the longest
MAX_HEAP_BYTES = 64 << 20  # limit on the size of a heap collection that contains strings
BLOCK_BYTES = 64 << 10  # bytes at the start of a collection that are read at once
STRINGS_BYTES = 64 << 10  # bytes of the file that are read at a time for short strings
MAX_HEADER_BYTES = 1 << 20
MAX_HEADER_BLOCKS = 64
HEAP_HEADER = struct.Struct("<4sB3xQ")
HEAP_OBJECT = struct.Struct("<HH4xQ")
POINTER = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])  # to a variable-length string
ATTRIBUTE, CONTINUATION = 0x0C, 0x10


@dataclass(frozen=True)
class FileBytes:
    """An open file that is read at HDF5 addresses."""

    descriptor: int
    num_bytes: int
    error: Callable[[str], H5ChunkError]  # creates an error that names the object being read
    base: int = 0  # offset of address 0: the end of the user block

    @classmethod
    def of(cls, file: h5py.File, error: Callable[[str], H5ChunkError]) -> FileBytes:
        """Return the bytes of a file that HDF5 has open."""
        descriptor = descriptor_of(file)
        return cls(descriptor, os.fstat(descriptor).st_size, error, file.userblock_size)

    def read(self, address: int, num_bytes: int) -> bytes:
        if address + num_bytes > self.num_bytes - self.base:
            raise self.error("its strings are beyond the end of the file, which is cut short or damaged")
        with held(self.descriptor, np.array([address + self.base]), np.array([num_bytes])):
            data = os.pread(self.descriptor, num_bytes, address + self.base)
        if len(data) != num_bytes:
            raise self.error("the file is cut short")
        return data


def read_words(item: h5py.HLObject, name: str, error: Callable[[str], H5ChunkError]) -> list[str]:
    """Read the strings of an attribute of an object, without HDF5 if they have variable length.

    ``error`` creates the error for a damaged attribute. Returns an empty list if the attribute does not exist, contains
    no strings, or has more than one axis.
    """
    if name not in item.attrs:
        return []
    attribute = item.attrs.get_id(name)
    kind = attribute.get_type()
    if not isinstance(kind, h5py.h5t.TypeStringID) or attribute.shape is None or len(attribute.shape) > 1:
        return []
    words = np.ravel(small_attribute(item, name, ()))
    if kind.is_variable_str():
        file, num_bytes = FileBytes.of(item.file, error), math.prod(attribute.shape) * POINTER.itemsize
        stored = _attribute_bytes(file, address_of(item)[-2], name, num_bytes)
        words = read_strings(file, np.frombuffer(stored, POINTER))
    return [bytes(word).decode("utf-8", "backslashreplace") for word in words.tolist()]


def read_strings(file: FileBytes, pointers: np.ndarray, max_bytes: int = MAX_STRING_BYTES) -> np.ndarray:
    """Read the strings that ``pointers``, (n,) of dtype `POINTER`, refer to.

    Returns (n,) bytes, padded to the longest string. Raises ``file.error`` if a string is longer than ``max_bytes``, or
    the heap of strings is damaged.
    """
    lengths = pointers["length"].astype(np.int64)
    if len(lengths) and int(lengths.max()) > max_bytes:
        position = int(lengths.argmax())
        raise file.error(f"string {position} has {lengths[position]} bytes, but the limit is {max_bytes}")
    strings = np.zeros(len(pointers), f"S{max(1, int(lengths.max(initial=0)))}")
    places = find_in_heap(file, pointers, lengths, MAX_HEAP_BYTES)
    block, first = b"", 0  # bytes of the file from offset ``first`` on, which contain the next strings
    for position in np.flatnonzero(lengths)[np.argsort(places[lengths > 0], kind="stable")].tolist():
        start, length = int(places[position]) - file.base, int(lengths[position])
        if not block or start < first or start + length > first + len(block):
            first = start
            block = file.read(first, min(STRINGS_BYTES, file.num_bytes - file.base - first))
        strings[position] = block[start - first : start - first + length]
    return strings


def find_in_heap(file: FileBytes, pointers: np.ndarray, sizes: np.ndarray, max_bytes: int = 1 << 62) -> np.ndarray:
    """Return the offset in the file of the object that each pointer refers to, or 0 for empty objects: (n,) int64.

    ``sizes``, (n,), has the size of each object in bytes. Raises ``file.error`` if the heap is damaged, or one of its
    collections is larger than ``max_bytes``.
    """
    filled = np.flatnonzero(sizes)
    order = filled[np.argsort(pointers["address"][filled], kind="stable")]
    addresses, starts = np.unique(pointers["address"][order], return_index=True)
    stops = np.append(starts, len(order))[1:]
    places, end = np.zeros(len(pointers), np.int64), 0
    for address, start, stop in zip(addresses.tolist(), starts, stops, strict=True):
        if address < end:
            raise file.error("its heap is damaged (collections overlap)")
        objects, end = _objects(file, address, max_bytes)
        group = order[start:stop]
        indices, lengths = pointers["index"][group].tolist(), sizes[group].tolist()
        for position, index, length in zip(group.tolist(), indices, lengths, strict=True):
            begin, room = objects.get(index, (0, -1))
            if room < length:
                raise file.error(f"its heap is damaged (element {position} is not in the heap)")
            places[position] = begin + file.base
    return places


def _objects(file: FileBytes, address: int, max_bytes: int) -> tuple[dict[int, tuple[int, int]], int]:
    """Return the address and size of each object in a heap collection, by index, and the end of the collection."""
    magic, version, size = HEAP_HEADER.unpack(file.read(address, HEAP_HEADER.size))
    max_bytes = min(max_bytes, file.num_bytes - file.base - address)
    if magic != b"GCOL" or version != 1 or not HEAP_HEADER.size <= size <= max_bytes:
        raise file.error("its heap is damaged")
    data = file.read(address, min(size, BLOCK_BYTES))
    objects, at = {}, HEAP_HEADER.size
    while at + HEAP_OBJECT.size <= size:
        if at + HEAP_OBJECT.size <= len(data):
            index, _, length = HEAP_OBJECT.unpack_from(data, at)
        else:
            index, _, length = HEAP_OBJECT.unpack(file.read(address + at, HEAP_OBJECT.size))
        if index == 0:  # free space after the last object
            break
        at += HEAP_OBJECT.size
        if length > size - at:
            raise file.error("its heap is damaged (an object is larger than its collection)")
        objects[index] = address + at, length
        at += (length + 7) // 8 * 8
    return objects, address + size


def _attribute_bytes(file: FileBytes, address: int, name: str, num_bytes: int) -> bytes:
    """Read the stored bytes of an attribute of the object whose header is at ``address``."""
    encoded = name.encode()
    for kind, message in _messages(file, address):
        if kind == ATTRIBUTE and len(message) > 8:
            version, _, name_bytes, type_bytes, space_bytes = struct.unpack_from("<BBHHH", message)
            at = 9 if version == 3 else 8
            parts = [name_bytes, type_bytes, space_bytes]
            if version == 1:
                parts = [(part + 7) // 8 * 8 for part in parts]
            if message[at : at + name_bytes].rstrip(b"\0") == encoded:
                value = message[at + sum(parts) :][:num_bytes]
                if len(value) == num_bytes:
                    return value
    raise file.error(f"its attribute {name!r} is damaged, or in an unsupported layout: rewrite the file with h5repack")


def _messages(file: FileBytes, address: int) -> Iterator[tuple[int, bytes]]:
    """Yield the type and the bytes of each message in an object header of version 1 or 2."""
    start = file.read(address, 16)
    is_new = start.startswith(b"OHDR")
    if is_new:
        flags = start[5]
        at = address + 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1)
        width = 1 << (flags & 3)
        size = int.from_bytes(file.read(at, width), "little")
        blocks = [(at + width, size)]
        head = struct.Struct("<BHB2x" if flags & 4 else "<BHB")
    else:
        blocks = [(address + 16, int.from_bytes(start[8:12], "little"))]
        head = struct.Struct("<HHB3x")
    for number, (block_address, size) in enumerate(blocks):  # the list grows with each continuation message
        if size > MAX_HEADER_BYTES or number >= MAX_HEADER_BLOCKS:
            raise file.error("an object header is damaged (it has no end)")
        data = file.read(block_address, size)
        at = 0
        while at + head.size <= len(data):
            kind, length, _ = head.unpack_from(data, at)
            at += head.size
            message = data[at : at + length]
            at += length
            if kind == CONTINUATION and len(message) >= 16:
                where, extent = struct.unpack_from("<QQ", message)
                blocks.append((where + 4, extent - 8) if is_new and extent >= 8 else (where, extent))
            else:
                yield kind, message
