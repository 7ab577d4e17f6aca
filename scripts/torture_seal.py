"""Checksums of HDF5's metadata, made anew after a file was changed: else HDF5 refuses newer files at the first look.

Source: HDF5 File Format Specification, II.B (superblock), III.A.2 (B-tree 2), III.G (fractal heap), IV.A.1.b (object
header 2), VII.C and D (fixed and extensible array); the checksum is Bob Jenkins' lookup3, ``hashlittle``.
"""

from __future__ import annotations

import struct

SIZES = {b"BTHD": 34, b"FRHP": 142, b"FAHD": 24, b"EAHD": 68}  # of headers, up to their checksum
SIGNATURE = b"\x89HDF\r\n\x1a\n"
WORD = 0xFFFFFFFF


def reseal(data: bytearray) -> int:
    """Make the checksums of superblock, object headers and headers of indexes right; gives how many were not."""
    changed = 0
    if data[:8] == SIGNATURE and len(data) > 48 and data[8] in (2, 3):
        changed += _seal(data, 0, 44)
    for signature, size in SIZES.items():
        for start in _places(data, signature):
            changed += _seal(data, start, size)
    for start in _places(data, b"OHDR"):
        size = _header_bytes(data, start)
        changed += _seal(data, start, size)
    return changed


def _places(data: bytearray, signature: bytes) -> list[int]:
    found, at = [], data.find(signature)
    while at >= 0:
        found.append(at)
        at = data.find(signature, at + 4)
    return found


def _header_bytes(data: bytearray, start: int) -> int:
    """Of an object header's first block, up to its checksum."""
    flags = data[start + 5] if start + 5 < len(data) else 0
    at = start + 6 + 16 * (flags >> 5 & 1) + 4 * (flags >> 4 & 1)
    width = 1 << (flags & 3)
    return at + width + int.from_bytes(data[at : at + width], "little") - start


def _seal(data: bytearray, start: int, size: int) -> bool:
    end = start + size
    if end + 4 > len(data) or size > 1 << 16:
        return False
    new = struct.pack("<I", lookup3(bytes(data[start:end])))
    old, data[end : end + 4] = data[end : end + 4], new
    return old != new


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
