"""Find every checksummed block of HDF5 metadata, and make the checksums fit again after the file was changed.

Without this HDF5 refuses a changed file at the first look. All kinds of blocks of the file format are covered, except
those inside compressed fractal heaps, and metadata cache images. Addresses and lengths are taken to be of 8 bytes.

Source: HDF5 File Format Specification version 3.0: II (superblock), III.A.2 (version 2 B-trees), III.E (global heap),
III.F (free-space manager), III.G (fractal heap), IV.A.1.b (object header version 2), IV.A.2.p (shared messages), VII.C
and D (fixed and extensible arrays); the sizes of fields that the specification leaves to the library are from
H5B2hdr.c, H5HFdtable.c and H5EAhdr.c. The checksum is Bob Jenkins' lookup3, ``hashlittle``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

SIGNATURE = b"\x89HDF\r\n\x1a\n"
WORD = 0xFFFFFFFF
UNDEFINED = (1 << 64) - 1
MAX_BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 1 << 16  # of one file; changed pointers may lead round in circles
CONTINUATION, SHARED_TABLE, LAYOUT, VIRTUAL = 0x10, 0x0F, 0x08, 3


class Block(NamedTuple):
    """A checksummed range of bytes of a file, and where its checksum is: behind it, or, as zeros, inside."""

    kind: str
    start: int
    stop: int
    checksum: int


def seal(data: bytearray) -> int:
    """Make all checksums of metadata fit; return how many did not."""
    changed = 0
    for block in blocks(data):
        old = data[block.checksum : block.checksum + 4]
        if block.checksum < block.stop:
            data[block.checksum : block.checksum + 4] = bytes(4)
        new = struct.pack("<I", lookup3(bytes(data[block.start : block.stop])))
        data[block.checksum : block.checksum + 4] = new
        changed += old != new
    return changed


def blocks(data: bytes | bytearray) -> list[Block]:
    """All checksummed blocks, each once: headers by their signatures, what they lead to by its address."""
    found: dict[tuple[int, int], Block] = {}
    for block in _Walk(data).all():
        inside = 0 <= block.start < block.stop <= min(len(data), block.start + MAX_BLOCK_BYTES)
        if inside and block.checksum + 4 <= len(data):
            found.setdefault((block.start, block.checksum), block)
        if len(found) >= MAX_BLOCKS:
            break
    return list(found.values())


def signatures(data: bytes | bytearray, signature: bytes) -> list[int]:
    """Where a signature of four bytes occurs."""
    found, at = [], data.find(signature)
    while at >= 0:
        found.append(at)
        at = data.find(signature, at + 4)
    return found


class _Walk:
    """Follows the structures of one file; whatever they say may be wrong."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data

    def all(self) -> Iterator[Block]:
        if self._data[:8] == SIGNATURE and self._data[8:9] in (b"\2", b"\3"):
            yield Block("superblock", 0, 44, 44)
        of_headers = {
            b"OHDR": self._object_header,
            b"BTHD": self._btree,
            b"FRHP": self._heap,
            b"FSHD": self._free_space,
            b"FAHD": self._fixed_array,
            b"EAHD": self._extensible_array,
        }
        for signature, walk in of_headers.items():
            for start in signatures(self._data, signature):
                yield from walk(start)

    def _number(self, at: int, size: int) -> int:
        return int.from_bytes(self._data[at : at + size], "little") if at >= 0 else 0

    def _is(self, address: int, signature: bytes) -> bool:
        return address + 4 <= len(self._data) and self._data[address : address + 4] == signature

    def _block(self, signature: bytes, start: int, num_bytes: int) -> Block:
        return Block(signature.decode(), start, start + num_bytes, start + num_bytes)

    def _object_header(self, start: int) -> Iterator[Block]:
        flags = self._number(start + 5, 1)
        at = start + 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1)
        width = 1 << (flags & 3)
        first, size = at + width, self._number(at, width)
        yield self._block(b"OHDR", start, first + size - start)
        ordered = 2 * (flags >> 2 & 1)
        waiting, seen = [(first, first + size)], {start}
        while waiting:
            for kind, message in self._messages(*waiting.pop(), 4 + ordered):
                if kind == CONTINUATION:
                    chunk, num_bytes = self._number(message, 8), self._number(message + 8, 8)
                    if self._is(chunk, b"OCHK") and chunk not in seen and 8 <= num_bytes <= MAX_BLOCK_BYTES:
                        seen.add(chunk)
                        yield self._block(b"OCHK", chunk, num_bytes - 4)
                        waiting.append((chunk + 4, chunk + num_bytes - 4))
                elif kind == SHARED_TABLE:
                    yield from self._shared_messages(self._number(message + 1, 8), self._number(message + 9, 1))
                elif kind == LAYOUT and self._number(message, 1) >= 4 and self._number(message + 1, 1) == VIRTUAL:
                    yield from self._virtual_mapping(self._number(message + 2, 8), self._number(message + 10, 4))

    def _messages(self, at: int, stop: int, prefix_bytes: int) -> Iterator[tuple[int, int]]:
        """Types and places of the messages of an object header in some bytes."""
        while at + prefix_bytes <= min(stop, len(self._data)):
            yield self._number(at, 1), at + prefix_bytes
            at += prefix_bytes + self._number(at + 1, 2)

    def _shared_messages(self, start: int, num_indexes: int) -> Iterator[Block]:
        if not self._is(start, b"SMTB"):
            return
        yield self._block(b"SMTB", start, 4 + 30 * num_indexes)
        for number in range(num_indexes):
            index = start + 4 + 30 * number
            messages = self._number(index + 12, 2)
            records = self._number(index + 14, 8)
            if self._is(records, b"SMLI"):
                yield self._block(b"SMLI", records, 4 + 17 * messages)

    def _virtual_mapping(self, collection: int, number: int) -> Iterator[Block]:
        """Of a virtual dataset, as an object of a global heap."""
        if not self._is(collection, b"GCOL"):
            return
        at, stop = collection + 16, min(len(self._data), collection + self._number(collection + 8, 8))
        while at + 16 <= stop and self._number(at, 2):
            size = self._number(at + 8, 8)
            if self._number(at, 2) == number and size > 4:
                yield self._block(b"GCOL", at + 16, size - 4)
            at += 16 + -(-size // 8) * 8

    def _btree(self, start: int) -> Iterator[Block]:
        yield self._block(b"BTHD", start, 34)
        node_bytes, record_bytes, depth = (self._number(start + at, size) for at, size in ((6, 4), (10, 2), (12, 2)))
        root, records = self._number(start + 16, 8), self._number(start + 24, 2)
        if not record_bytes or depth > 16 or node_bytes > MAX_BLOCK_BYTES:
            return
        most = max(0, node_bytes - 10) // record_bytes
        count_bytes, sums, total = _num_bytes(most), [0], most  # sums: bytes of a count of all records below a node
        for _ in range(depth):
            pointer = 8 + count_bytes + sums[-1]
            most = max(0, node_bytes - 10 - pointer) // (record_bytes + pointer)
            total = (most + 1) * total + most
            sums.append(_num_bytes(total))
        yield from self._btree_node(root, records, depth, record_bytes, count_bytes, sums)

    def _btree_node(
        self, start: int, records: int, depth: int, record_bytes: int, count_bytes: int, sums: list[int]
    ) -> Iterator[Block]:
        signature = b"BTIN" if depth else b"BTLF"
        if not self._is(start, signature):
            return
        pointer_bytes = 8 + count_bytes + sums[depth - 1] if depth else 0
        first = start + 6 + records * record_bytes
        yield self._block(signature, start, first + (records + 1) * pointer_bytes * bool(depth) - start)
        for at in range(first, first + (records + 1) * pointer_bytes, pointer_bytes) if depth else ():
            child, count = self._number(at, 8), self._number(at + 8, count_bytes)
            yield from self._btree_node(child, count, depth - 1, record_bytes, count_bytes, sums)

    def _heap(self, start: int) -> Iterator[Block]:
        filter_bytes = self._number(start + 7, 2)
        yield self._block(b"FRHP", start, 142 + (12 + filter_bytes) * bool(filter_bytes))
        if filter_bytes:
            return
        width, first_bytes, most_bytes = (self._number(start + at, size) for at, size in ((110, 2), (112, 8), (120, 8)))
        offset_bytes = -(-self._number(start + 128, 2) // 8)
        root, rows = self._number(start + 132, 8), self._number(start + 140, 2)
        sealed = bool(self._number(start + 9, 1) & 2)
        if not width or not first_bytes or first_bytes > most_bytes:
            return
        table = _Doubling(width, first_bytes, most_bytes, offset_bytes, sealed)
        if rows:
            yield from self._heap_indirect(root, rows, table, 0)
        else:
            yield from self._heap_direct(root, first_bytes, table)

    def _heap_direct(self, start: int, num_bytes: int, table: _Doubling) -> Iterator[Block]:
        if table.sealed and self._is(start, b"FHDB"):
            yield Block("FHDB", start, start + num_bytes, start + 13 + table.offset_bytes)

    def _heap_indirect(self, start: int, rows: int, table: _Doubling, level: int) -> Iterator[Block]:
        if not self._is(start, b"FHIB") or rows > 64 or level > 16:
            return
        first = start + 13 + table.offset_bytes
        yield self._block(b"FHIB", start, first + 8 * rows * table.width - start)
        for row in range(rows):
            num_bytes = table.row_bytes(row)
            for column in range(table.width):
                child = self._number(first + 8 * (row * table.width + column), 8)
                if num_bytes <= table.most_bytes:
                    yield from self._heap_direct(child, num_bytes, table)
                else:
                    yield from self._heap_indirect(child, table.rows_of(num_bytes), table, level + 1)

    def _free_space(self, start: int) -> Iterator[Block]:
        yield self._block(b"FSHD", start, 78)
        sections, used = self._number(start + 54, 8), self._number(start + 62, 8)
        if self._is(sections, b"FSSE") and 4 < used <= MAX_BLOCK_BYTES:
            yield self._block(b"FSSE", sections, used - 4)

    def _fixed_array(self, start: int) -> Iterator[Block]:
        yield self._block(b"FAHD", start, 24)
        element_bytes, bits = self._number(start + 6, 1), self._number(start + 7, 1)
        count, block = self._number(start + 8, 8), self._number(start + 16, 8)
        if self._is(block, b"FADB") and bits < 32 and count * element_bytes <= len(self._data):
            pages = -(-count // (1 << bits)) if count > 1 << bits else 0
            prefix = 14 + (-(-pages // 8) if pages else count * element_bytes)
            yield self._block(b"FADB", block, prefix)
            yield from self._pages("FADB page", block + prefix + 4, count if pages else 0, 1 << bits, element_bytes)

    def _pages(self, kind: str, start: int, count: int, of_page: int, element_bytes: int) -> Iterator[Block]:
        for first in range(0, count, of_page):
            stop = start + min(of_page, count - first) * element_bytes
            if start >= len(self._data):
                return
            if any(self._data[start : stop + 4]):  # pages that nothing was written to yet are zeros
                yield Block(kind, start, stop, stop)
            start = stop + 4

    def _extensible_array(self, start: int) -> Iterator[Block]:
        yield self._block(b"EAHD", start, 68)
        element_bytes, bits, in_index, least, pointers, page_bits = self._data[start + 6 : start + 12].ljust(6, b"\0")
        index = self._number(start + 60, 8)
        if not self._is(index, b"EAIB") or not least or not pointers or bits > 64 or page_bits > 32:
            return
        array = _Extensible(element_bytes, -(-bits // 8), least, 1 << page_bits)
        num_supers = 1 + bits - (least.bit_length() - 1)
        first_super = 2 * (pointers.bit_length() - 1)
        num_blocks = 2 * (pointers - 1)
        at = index + 14 + in_index * element_bytes
        yield self._block(b"EAIB", index, at + 8 * (num_blocks + max(0, num_supers - first_super)) - index)
        for number in range(first_super):
            for _ in range(1 << number // 2):
                yield from self._array_data(self._number(at, 8), number, array)
                at += 8
        for number in range(first_super, num_supers):
            yield from self._array_super(self._number(at, 8), number, array)
            at += 8

    def _array_super(self, start: int, number: int, array: _Extensible) -> Iterator[Block]:
        if not self._is(start, b"EASB"):
            return
        count = 1 << number // 2
        at = start + 14 + array.offset_bytes + count * -(-array.pages_of(number) // 8)
        yield self._block(b"EASB", start, at + 8 * count - start)
        for place in range(at, min(at + 8 * count, len(self._data)), 8):
            yield from self._array_data(self._number(place, 8), number, array)

    def _array_data(self, start: int, number: int, array: _Extensible) -> Iterator[Block]:
        if not self._is(start, b"EADB"):
            return
        count, pages = array.elements_of(number), array.pages_of(number)
        prefix = 14 + array.offset_bytes + (0 if pages else count * array.element_bytes)
        yield self._block(b"EADB", start, prefix)
        if pages:
            yield from self._pages("EADB page", start + prefix + 4, count, array.of_page, array.element_bytes)


class _Doubling(NamedTuple):
    """The doubling table of a fractal heap."""

    width: int
    first_bytes: int
    most_bytes: int
    offset_bytes: int
    sealed: bool

    def row_bytes(self, row: int) -> int:
        return self.first_bytes << max(0, row - 1)

    def rows_of(self, num_bytes: int) -> int:
        """Of an indirect block that stands for so many bytes."""
        return num_bytes.bit_length() - (self.first_bytes * self.width).bit_length() + 1


class _Extensible(NamedTuple):
    """What the header of an extensible array says of its blocks."""

    element_bytes: int
    offset_bytes: int
    least: int
    of_page: int

    def elements_of(self, number: int) -> int:
        """Of a data block of a super block of this number."""
        return (1 << (number + 1) // 2) * self.least

    def pages_of(self, number: int) -> int:
        count = self.elements_of(number)
        return count // self.of_page if count > self.of_page else 0


def _num_bytes(limit: int) -> int:
    """That a count of at most this takes."""
    return (limit.bit_length() - 1) // 8 + 1 if limit > 0 else 1


def lookup3(key: bytes) -> int:
    """Jenkins' hash of some bytes, with the initial value 0.

    >>> hex(lookup3(b"Four score and seven years ago"))
    '0x17770551'
    """
    a = b = c = (0xDEADBEEF + len(key)) & WORD
    if not key:
        return c
    whole = (len(key) - 1) // 12
    words = struct.unpack(f"<{3 * whole}I", key[: 12 * whole])
    for i in range(0, len(words), 3):
        a, b, c = a + words[i] & WORD, b + words[i + 1] & WORD, c + words[i + 2] & WORD
        a = (a - c & WORD) ^ _turn(c, 4)
        c = c + b & WORD
        b = (b - a & WORD) ^ _turn(a, 6)
        a = a + c & WORD
        c = (c - b & WORD) ^ _turn(b, 8)
        b = b + a & WORD
        a = (a - c & WORD) ^ _turn(c, 16)
        c = c + b & WORD
        b = (b - a & WORD) ^ _turn(a, 19)
        a = a + c & WORD
        c = (c - b & WORD) ^ _turn(b, 4)
        b = b + a & WORD
    last = struct.unpack("<3I", key[12 * whole :].ljust(12, b"\0"))
    a, b, c = a + last[0] & WORD, b + last[1] & WORD, c + last[2] & WORD
    for first, second, bits in ((1, 2, 14), (2, 0, 11), (0, 1, 25), (1, 2, 16), (2, 0, 4), (0, 1, 14), (1, 2, 24)):
        three = [a, b, c]  # first acts on second
        three[second] = (three[second] ^ three[first]) - _turn(three[first], bits) & WORD
        a, b, c = three
    return c


def _turn(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & WORD
