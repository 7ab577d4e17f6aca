"""Decode the stored bytes of one chunk outside HDF5, in any number of threads, and check every length.

HDF5 decodes under its global lock and does not check the length of a decoded chunk. Here every filter must produce
exactly the expected number of bytes. No stored bytes can make a filter write beyond the chunk or allocate too much
memory.

gzip is decoded by zlib or, in half the time, by imagecodecs; shuffle, Fletcher-32 and LZF by h5chunk's own library.
imagecodecs decodes LZ4, Zstandard, Blosc and Bitshuffle; without it, HDF5 does. Filters make few calls into C, because
each call releases the GIL and may then have to wait for it.

Source: HDF5 File Format Specification, IV.A.2.l (filter pipeline); H5Zdeflate.c, H5Zshuffle.c, H5Zfletcher32.c and
H5checksum.c of HDF5; the registered filters' own formats: HDF5_LZ4.pdf, README_CHUNK_FORMAT.rst of c-blosc, RFC 8878.
"""

from __future__ import annotations

import functools
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5chunk import native
from h5chunk.native import filters
from h5chunk.native.filters import FLETCHER32, GZIP, LZ4, LZF, SHUFFLE, ZSTD
from h5chunk.store.hdf5.chunk_table import partial_chunks_are_plain

MAX_CHUNK_BYTES = 1 << 30  # the libraries use 32-bit lengths
SLACK_BYTES = 64 << 10  # for headers and block tables of small chunks

BLOSC, BITSHUFFLE = 32001, 32008
KNOWN_FILTERS = {
    GZIP: "gzip",
    SHUFFLE: "shuffle",
    FLETCHER32: "fletcher32",
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    LZF: "lzf",
    BLOSC: "blosc",
    LZ4: "lz4",
    BITSHUFFLE: "bitshuffle",
    ZSTD: "zstd",
    32026: "blosc2",
}  # by the id that is registered with The HDF Group
INSTALL = 'pip install "h5chunk[codecs]"'

PLANES_LZ4, PLANES_ZSTD = 2, 3  # Bitshuffle's ids of the compressors of its bit planes
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class NoDecoder(Exception):
    """Raised if only HDF5 can decode the chunks of a dataset."""


class DecodeError(Exception):
    """Raised if the stored bytes of a chunk are damaged. The message does not name the chunk."""


class ChunkDecoder:
    """A decoder for the chunks of one dataset, which can be pickled and used from any number of threads.

    ``properties`` are the dataset's creation properties, to which no reference is kept. ``max_stored_bytes`` is a limit
    on the stored size of a chunk. Raises NoDecoder if a filter is not supported here, or imagecodecs is missing.
    """

    def __init__(self, properties: h5py.h5p.PropDCID, chunk_bytes: int, item_bytes: int) -> None:
        if chunk_bytes < 1 or item_bytes < 1 or chunk_bytes % item_bytes:
            raise NoDecoder(f"its chunks of {chunk_bytes} bytes do not consist of elements of {item_bytes} bytes")
        if chunk_bytes > MAX_CHUNK_BYTES:
            raise NoDecoder(f"its chunks have {chunk_bytes} bytes, and only HDF5 decodes more than {MAX_CHUNK_BYTES}")
        if properties.get_layout() == h5py.h5d.CHUNKED and partial_chunks_are_plain(properties) is None:
            raise NoDecoder("this build of h5py does not report whether partial chunks are filtered")
        self._filters: list[tuple[int, int, tuple[int, ...]]] = []  # (bit in the masks, filter id, parameters)
        for bit in range(properties.get_nfilters()):
            code, _, values, name = properties.get_filter(bit)
            _check_filter(code, values, name)
            self._filters.append((bit, code, tuple(values)))
        self.chunk_bytes = chunk_bytes
        self.max_stored_bytes = min(2 * chunk_bytes + SLACK_BYTES, 2**31 - 1)

    @property
    def pipeline(self) -> np.ndarray | None:
        """The filters as jobs of native threads undo them, () `h5chunk.native.filters.PIPELINE`; None if they can't."""
        return filters.pipeline_of([(code, values) for _, code, values in self._filters])

    def __repr__(self) -> str:
        return " + ".join(KNOWN_FILTERS[code] for _, code, _ in self._filters) or "no filter"

    def decode(self, stored: memoryview | np.ndarray, filter_mask: int, out: np.ndarray) -> None:
        """Decode the stored bytes of a chunk into ``out``, (chunk_bytes,) uint8.

        Raises DecodeError if they are damaged.

        Bit i of ``filter_mask`` is set if filter i was skipped for this chunk. After an error ``out`` is undefined.
        """
        if out.shape != (self.chunk_bytes,) or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}, but must be contiguous uint8 ({self.chunk_bytes},)")
        active = [(code, values) for bit, code, values in self._filters if not filter_mask >> bit & 1]
        # the length before each filter, and finally the stored length; None if it depends on the values
        lengths: list[int | None] = [self.chunk_bytes]
        for code, values in active:
            keeps = code in (SHUFFLE, FLETCHER32) or (code == BITSHUFFLE and not _compressor(values))
            last = lengths[-1]
            lengths.append(None if last is None or not keeps else last + 4 * (code == FLETCHER32))
        data = np.frombuffer(stored, np.uint8) if stored.nbytes else np.empty(0, np.uint8)
        _check_length("the chunk is stored in", len(data), lengths[-1], self.max_stored_bytes)
        turn = 0
        for number in range(len(active) - 1, -1, -1):
            (code, values), length = active[number], lengths[number]
            room = out if number == 0 else scratch(_local, f"decoded {turn}", length or self.max_stored_bytes)
            try:
                decoded = _CODECS[code].decode(data, values, room)
            except DecodeError as error:
                raise DecodeError(f"{KNOWN_FILTERS[code]}: {error}") from None
            _check_length(f"{KNOWN_FILTERS[code]} gives", len(decoded), length, self.max_stored_bytes)
            if np.may_share_memory(decoded, room):  # otherwise the filter returned a part of its input
                turn ^= 1
            data = decoded
        if not np.may_share_memory(data, out):
            out[:] = data


def _check_filter(code: int, values: tuple[int, ...], name: bytes) -> None:
    """Raise NoDecoder unless a filter with these parameters can be decoded here."""
    label = KNOWN_FILTERS.get(code) or ascii(name.decode(errors="replace")[:40])
    if code not in _CODECS:
        raise NoDecoder(f"filter {label} ({code}) is decoded only by HDF5")
    functions = () if code == LZF and native.available() else _CODECS[code].functions
    if code == BITSHUFFLE:
        if (
            len(values) < 3
            or values[2] not in (1, 2, 4, 8)
            or (len(values) > 3 and values[3] % 8 != 0)
            or _compressor(values) not in (0, PLANES_LZ4, PLANES_ZSTD)
        ):
            raise NoDecoder(f"filter {label} ({code}) with parameters {values} is decoded only by HDF5")
        planes = {PLANES_LZ4: ("lz4h5_decode", "lz4_decode"), PLANES_ZSTD: ("zstd_decode",)}
        functions = (*functions, *planes.get(_compressor(values), ()))
    for function in functions:
        if _library(function) is None:
            raise NoDecoder(f"filter {label} ({code}) needs imagecodecs with {function}: {INSTALL}")


@functools.cache
def _library(function: str) -> Callable[..., Any] | None:
    """Return a function of imagecodecs. Returns None if imagecodecs is not installed or lacks the function."""
    try:
        import imagecodecs
    except ImportError:
        return None
    available = getattr(getattr(imagecodecs, function.split("_")[0].upper(), None), "available", False)
    return getattr(imagecodecs, function, None) if available else None


def crc32(data: np.ndarray, start: int = 0) -> int:
    """Return the CRC-32 of (n,) uint8, C-contiguous, without holding the GIL.

    ``start`` is the CRC-32 of preceding bytes, if there are any.

    >>> hex(crc32(np.frombuffer(b"123456789", np.uint8)))
    '0xcbf43926'
    """
    return int(_fastest_crc32()(data, start))


@functools.cache
def _fastest_crc32() -> Callable[..., Any]:
    """Return the CRC-32 function of libdeflate (in imagecodecs), of the native core or of zlib, in this order."""
    return _library("deflate_crc32") or (native.crc32 if native.available() else zlib.crc32)


def _function(name: str) -> Callable[..., Any]:
    """Return a function of imagecodecs. Raises DecodeError if it is missing, for example after unpickling elsewhere."""
    call = _library(name)
    if call is None:
        raise DecodeError(f"needs imagecodecs with {name}: {INSTALL}")
    return call


def _call(function: str, data: np.ndarray | memoryview | bytes, out: np.ndarray, **options: int) -> np.ndarray:
    """Call a function of imagecodecs, and return the part of ``out`` that it filled."""
    call = _function(function)
    try:
        return out[: len(call(data, out=out, **options))]
    except (RuntimeError, ValueError) as error:
        raise DecodeError(f"does not decode into {len(out)} bytes, {error}") from None


_local = threading.local()


def scratch(local: threading.local, name: str, num_bytes: int) -> np.ndarray:
    """Return a buffer of this thread, (num_bytes,) uint8. The thread's next call with the same name reuses it."""
    memory: np.ndarray | None = getattr(local, name, None)
    if memory is None or len(memory) < num_bytes:
        memory = np.empty(num_bytes, np.uint8)
        setattr(local, name, memory)
    return memory[:num_bytes]


def _check_length(subject: str, length: int, expected: int | None, limit: int) -> None:
    if expected is not None and length != expected:
        raise DecodeError(f"{subject} {length} bytes, but {expected} are expected")
    if not 0 < length <= limit:
        raise DecodeError(f"{subject} {length} bytes, but 1 to {limit} are expected")


def _check_room(length: int, out: np.ndarray) -> None:
    if length > len(out):
        raise DecodeError(f"claims {length} bytes, more than the {len(out)} that are expected")


def _ungzip(data: np.ndarray, values: tuple[int, ...], out: np.ndarray) -> np.ndarray:
    if _library("deflate_decode") is None or _library("deflate_adler32") is None:
        return _unzlib(data, out)
    decoded = _call("deflate_decode", data, out)  # libdeflate, which takes half of zlib's time
    if int.from_bytes(data[-4:], "big") != _function("deflate_adler32")(decoded):  # libdeflate ignores later bytes
        raise DecodeError("bytes follow the end of its stream")
    return decoded


def _unzlib(data: np.ndarray, out: np.ndarray) -> np.ndarray:
    stream = zlib.decompressobj()
    try:
        decoded = stream.decompress(data.data, len(out))
        rest = b"" if stream.eof else stream.decompress(stream.unconsumed_tail, 1)
    except zlib.error as error:
        raise DecodeError(f"does not decode into {len(out)} bytes, {error}") from None
    if rest or not stream.eof:
        raise DecodeError(f"does not decode into {len(out)} bytes, its stream is {'longer' if rest else 'cut short'}")
    if stream.unused_data:
        raise DecodeError("bytes follow the end of its stream")
    out[: len(decoded)] = np.frombuffer(decoded, np.uint8)
    return out[: len(decoded)]


def _unlzf(data: np.ndarray, values: tuple[int, ...], out: np.ndarray) -> np.ndarray:
    if not native.available():
        return _call("lzf_decode", data, out)
    length = filters.unlzf(data, out)
    if length < 0:
        raise DecodeError(f"does not decode into {len(out)} bytes")
    return out[:length]


def _unshuffle(data: np.ndarray, values: tuple[int, ...], out: np.ndarray) -> np.ndarray:
    """Undo the shuffle filter, which groups the bytes of whole elements by position, and keeps the remaining bytes."""
    _check_room(len(data), out)
    if not values or not values[0]:  # HDF5 writes this for a second shuffle filter, which it skips in every chunk
        raise DecodeError("its element size is missing")
    item, count = values[0], len(data) // values[0]
    if item == 1 or count < 2:
        return data
    whole, out = item * count, out[: len(data)]
    source, target = data[:whole], out[:whole]
    if native.available():
        filters.unshuffle(source, item, target)
    else:
        target.reshape(count, item)[...] = source.reshape(item, count).T
    out[whole:] = data[whole:]
    return out


def _check_fletcher32(data: np.ndarray, values: tuple[int, ...], out: np.ndarray) -> np.ndarray:
    """Check and remove the checksum. HDF5 up to 1.6.2 swapped the bytes of both halves of the checksum."""
    if len(data) < 4:
        raise DecodeError(f"{len(data)} bytes are too few for a checksum")
    found, body = int.from_bytes(data[-4:], "little"), data[:-4]
    computed = _fletcher32(body)
    if found not in (computed, (computed & 0x00FF00FF) << 8 | computed >> 8 & 0x00FF00FF):
        raise DecodeError(f"the checksum of {len(body)} bytes is {computed:08x}, but {found:08x} is stored")
    return body


def _fletcher32(data: np.ndarray) -> int:
    """Return the checksum of HDF5's filter Fletcher-32.

    >>> hex(_fletcher32(np.frombuffer(b"abcde", np.uint8)))
    '0x4ff029c7'
    """
    if not len(data):
        return 0
    if native.available():
        return filters.fletcher32(data)
    padded = np.append(data, np.zeros(len(data) % 2, np.uint8))
    words = padded.view(">u2").astype(np.uint64)
    weights = np.arange(len(words), 0, -1, dtype=np.uint64) % 0xFFFF
    sums = [int(words.sum()), int((words * weights % 0xFFFF).sum())]
    first, second = (sum_ % 0xFFFF or 0xFFFF * bool(words.any()) for sum_ in sums)  # HDF5's sums are 0 only for zeros
    return second << 16 | first


def _unzstd(data: np.ndarray, values: tuple[int, ...], out: np.ndarray) -> np.ndarray:
    if bytes(data[:4]) != ZSTD_MAGIC:
        raise DecodeError(f"starts with {bytes(data[:4]).hex()}, which is not the start of a Zstandard frame")
    return _call("zstd_decode", data, out)


def _unblosc(data: np.ndarray, values: tuple[int, ...], out: np.ndarray) -> np.ndarray:
    """Decode Blosc data. The lengths in its header are checked first, because c-blosc does not check them."""
    if len(data) < 16:
        raise DecodeError(f"{len(data)} bytes are too few for its header of 16")
    version, _, _, item, length, block, stored = struct.unpack_from("<4B3I", data.data)
    if stored != len(data):
        raise DecodeError(f"{len(data)} bytes are stored, but its header claims {stored}")
    _check_room(length, out)
    if version not in (1, 2) or not item or not 0 < block <= length:
        raise DecodeError(f"its header is invalid: version {version}, items of {item}, blocks of {block} bytes")
    return _call("blosc_decode", data, out[:length], numthreads=1)


def _unlz4(data: np.ndarray, values: tuple[int, ...], out: np.ndarray) -> np.ndarray:
    length, block = _read_header(data, out)
    _, end = _find_blocks(data, length, block)
    if end != len(data):
        raise DecodeError(f"{len(data) - end} bytes follow its last block")
    return _call("lz4h5_decode", data, out[:length])


def _read_header(data: np.ndarray, out: np.ndarray) -> tuple[int, int]:
    """Return the decoded size of all blocks, and of one block, in bytes, from the header of LZ4 or Bitshuffle data."""
    if len(data) < 12:
        raise DecodeError(f"{len(data)} bytes are too few for its header of 12")
    length, block = struct.unpack_from(">QI", data.data)
    _check_room(length, out)
    if not length or not block:
        raise DecodeError(f"its header is invalid: {length} bytes in blocks of {block}")
    return length, block


def _find_blocks(data: np.ndarray, length: int, block: int) -> tuple[list[slice], int]:
    """Return the slices of the compressed blocks with ``length`` decoded bytes, and the end of the last block."""
    blocks: list[slice] = []
    end = 12
    for _ in range(0, length, block):
        start = end + 4
        end = start + (struct.unpack_from(">I", data.data, end)[0] if start <= len(data) else 0)
        if end > len(data) or end == start:
            raise DecodeError(f"block {len(blocks)} is empty or ends at byte {end}, beyond the {len(data)} bytes")
        blocks.append(slice(start, end))
    return blocks, end


def _compressor(values: tuple[int, ...]) -> int:
    """Return Bitshuffle's id of the compressor of the bit planes, or 0 if they are not compressed."""
    return values[4] if len(values) > 4 else 0


def _unbitshuffle(data: np.ndarray, values: tuple[int, ...], out: np.ndarray) -> np.ndarray:
    """Decode Bitshuffle data, which consists of blocks of bit planes.

    Each block has the bit planes of groups of eight elements. The remaining elements are not shuffled.
    """
    item, block = values[2], values[3] * values[2] if len(values) > 3 else 0
    length = len(data)
    if _compressor(values):
        length, block = _read_header(data, out)
    _check_room(length, out)
    if length % item or block % (8 * item):
        raise DecodeError(f"blocks of {block} bytes, {length} in total, do not consist of groups of eight elements")
    planes = _unpack_planes(data, length, block, values) if _compressor(values) else data
    return _call("bitshuffle_decode", planes.data, out[:length], itemsize=item, blocksize=block // item)


def _unpack_planes(data: np.ndarray, length: int, block: int, values: tuple[int, ...]) -> np.ndarray:
    """Decompress the blocks of bit planes into (length,) uint8, a buffer that this thread reuses."""
    rest = length % (8 * values[2])
    packed, planes = length - rest, scratch(_local, "planes", length)
    blocks, end = _find_blocks(data, packed, block)
    if len(data) - end != rest:
        raise DecodeError(f"{len(data) - end} bytes follow its last block, but {rest} are expected")
    room, done = planes[:packed], packed
    sizes = [min(block, packed - start) for start in range(0, packed, block)]
    if _compressor(values) == PLANES_ZSTD:
        frames = [bytes(data[block_slice]) for block_slice in blocks]
        if any(not frame.startswith(ZSTD_MAGIC) for frame in frames):
            raise DecodeError("a block does not start with the signature of a Zstandard frame")
        done = len(_call("zstd_decode", b"".join(frames), room)) if frames else 0
    elif all(block_slice.stop - block_slice.start != size for block_slice, size in zip(blocks, sizes, strict=True)):
        framed = struct.pack(">QI", packed, block) + bytes(data[12:end]) if rest else data
        done = len(_call("lz4h5_decode", framed, room)) if blocks else 0
    else:  # the LZ4 filter treats a block of full size as uncompressed; Bitshuffle always compresses
        starts = range(0, packed, block)
        parts = [room[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        done = sum(
            len(_call("lz4_decode", data[block_slice], part)) for block_slice, part in zip(blocks, parts, strict=True)
        )
    if done != packed:
        raise DecodeError(f"its blocks decode to {done} bytes, but {packed} are expected")
    planes[packed:] = data[end:]
    return planes


class _Codec(NamedTuple):
    """A function that reverses a filter, and the functions of imagecodecs that it calls."""

    functions: tuple[str, ...]  # names in imagecodecs
    decode: Callable[[np.ndarray, tuple[int, ...], np.ndarray], np.ndarray]  # called with bytes, parameters, output


_CODECS = {
    GZIP: _Codec((), _ungzip),
    SHUFFLE: _Codec((), _unshuffle),
    FLETCHER32: _Codec((), _check_fletcher32),
    LZF: _Codec(("lzf_decode",), _unlzf),
    BLOSC: _Codec(("blosc_decode",), _unblosc),
    LZ4: _Codec(("lz4h5_decode",), _unlz4),
    BITSHUFFLE: _Codec(("bitshuffle_decode",), _unbitshuffle),
    ZSTD: _Codec(("zstd_decode",), _unzstd),
}
