"""Read untrusted HDF5 files of matrices: no references out of the file, and sizes as far as they are stored.

| threat | what is done |
| --- | --- |
| soft and external links | each name on a path must be a hard link |
| external storage, virtual datasets | refused |
| shapes larger than what is stored | refused: all chunks must be there, and their bytes in proportion |
| chunks that inflate to more or less | gzip, shuffle and Fletcher-32 are undone here, to the exact length |
| chunks, tables and strings that take more memory than is allowed | refused before it is taken |
| unknown filters, plugins | refused, but for LZF and those of hdf5plugin, which are left to HDF5 |
| strings of variable length, in datasets and attributes | their heap is read here, in bounds, and gives strings of \
fixed length |
| other types | numbers and fixed strings only; nothing is unpickled |

What is left to HDF5: the tree of groups, other attributes, and the filters that are not undone here.
Source: HDF5 File Format Specification, IV.A.2.l (filter pipeline).
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import SourceError, human_bytes, printable
from h5chunk.sources.sparse.hdf5calls import ALL_FILTERS, is_stored_as, partial_chunks_are_plain
from h5chunk.sources.sparse.heap import MAX_STRING_BYTES, POINTER, Bytes, attribute_bytes, resolve
from h5chunk.sources.sparse.memory import DEFAULT_MEMORY_BYTES, MemoryLimit
from h5chunk.sources.sparse.text import check_regular, stamp_of

MAGIC = b"\x89HDF\r\n\x1a\n"
GZIP, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000
PLUGINS = (32001, 32004, 32008, 32015, 32026)  # Blosc, LZ4, Bitshuffle, Zstandard, Blosc2
MAX_CHUNK_BYTES = 256 << 20
CHUNK_COPIES = 2  # of a chunk in memory while it is decoded
CHUNK_ENTRY_BYTES = 64  # of memory for a chunk in the table of chunks, while that is sorted
MAX_RATIO = 1032  # deflate cannot give more bytes for one
SLACK_BYTES = 1 << 16  # and is worth nothing on tiny chunks
DAMAGES = (OSError, RuntimeError, KeyError, ValueError, TypeError, struct.error)


class GuardedFile:
    """An HDF5 file that is opened when needed.

    Parameters
    ----------
    path : path
    memory_bytes : int
        Limit on what is kept of it in memory, and on a chunk while it is decoded.

    Raises
    ------
    SourceError
        It is missing, no HDF5 file, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str], memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        self.path = os.fspath(path)
        self.memory = MemoryLimit(self.path, memory_bytes)
        self._stamp = check_regular(self.path)
        self.file_bytes = self._stamp[2]

    @contextlib.contextmanager
    def open(self) -> Iterator[GuardedGroup]:
        """The root group; what HDF5 says while it is open becomes an error of ours."""
        try:
            with open(self.path, "rb") as raw:  # noqa: PTH123
                self._check(raw.fileno())
                if raw.read(len(MAGIC)) != MAGIC:
                    raise self.error("no HDF5 file: it does not start with its signature")
                with h5py.File(self.path, "r") as file:
                    yield GuardedGroup(self, file, raw.fileno(), "")
                self._check(raw.fileno())
        except SourceError:
            raise
        except DAMAGES as error:
            raise self.error(f"damaged: {error}") from None

    def _check(self, descriptor: int) -> None:
        if stamp_of(os.fstat(descriptor)) != self._stamp:
            raise self.error("changed while it was read")

    def error(self, what: str) -> SourceError:
        return SourceError(f"{printable(self.path)}: {what}")


class GuardedGroup:
    """A group whose members are reached by hard links only."""

    def __init__(self, owner: GuardedFile, group: h5py.Group, descriptor: int, path: str) -> None:
        self.owner, self.path = owner, path
        self._group, self._descriptor = group, descriptor

    def __contains__(self, name: str) -> bool:
        return name in self._group

    def names(self) -> list[str]:
        return list(self._group)

    def words(self, name: str) -> list[str]:
        """An attribute that is a string or several, else nothing."""
        if name not in self._group.attrs:
            return []
        attribute = h5py.h5a.open(self._group.id, name.encode())
        kind = attribute.get_type()
        if not isinstance(kind, h5py.h5t.TypeStringID) or len(attribute.shape) > 1:
            return []
        if kind.is_variable_str():
            file = Bytes(self._descriptor, self.owner.file_bytes, self.error)
            count = int(np.prod(attribute.shape))
            address = h5py.h5g.get_objinfo(self._group.id).objno[0]  # h5o.get_info crashes on damaged indexes
            value = attribute_bytes(file, address, name, count * POINTER.itemsize)
            strings = resolve(file, np.frombuffer(value, POINTER))
        else:
            strings = np.ravel(self._group.attrs[name])
        return [bytes(word).decode("utf-8", "backslashreplace") for word in strings.tolist()]

    def word(self, name: str) -> str:
        """An attribute that is one string, else an empty one."""
        words = self.words(name)
        return words[0] if len(words) == 1 else ""

    def numbers(self, name: str) -> np.ndarray | None:
        """An attribute that is whole numbers, if there is one."""
        if name not in self._group.attrs:
            return None
        kind = h5py.h5a.open(self._group.id, name.encode()).get_type()
        if not isinstance(kind, h5py.h5t.TypeIntegerID):
            raise self.error(f"its attribute {name!r} must be whole numbers")
        return np.asarray(self._group.attrs[name])

    def error(self, what: str, name: str = "") -> SourceError:
        where = f"{self.path}/{name}".strip("/")
        return self.owner.error(f"{where}: {what}" if where else what)

    def _member(self, name: str) -> Any:
        link = self._group.get(name, getlink=True)
        if link is None:
            raise self.error(f"has no {name!r}: it has {', '.join(self.names()[:20]) or 'nothing'}")
        if not isinstance(link, h5py.HardLink):
            raise self.error(f"is a {type(link).__name__}, which is not followed: copy what it leads to", name)
        return self._group[name]

    def is_group(self, name: str) -> bool:
        return isinstance(self._member(name), h5py.Group)

    def group(self, name: str) -> GuardedGroup:
        """A group in it."""
        member = self._member(name)
        if not isinstance(member, h5py.Group):
            raise self.error("must be a group", name)
        return GuardedGroup(self.owner, member, self._descriptor, f"{self.path}/{name}".strip("/"))

    def dataset(self, name: str, num_dimensions: int = 1) -> Stored:
        """A dataset in it, after a look at what it claims."""
        member = self._member(name)
        if not isinstance(member, h5py.Dataset):
            raise self.error("must be a dataset", name)
        if member.shape is None or len(member.shape) != num_dimensions:
            raise self.error(f"has the shape {member.shape} but must have {num_dimensions} dimensions", name)
        where = f"{self.path}/{name}".strip("/")
        return Stored(member, self._descriptor, self.owner, where)


class Stored:
    """A dataset of numbers or strings, read chunk by chunk; a `vector.Vector` if it has one dimension.

    Raises
    ------
    SourceError
        Its type, storage or size cannot be.
    """

    def __init__(self, dataset: h5py.Dataset, descriptor: int, owner: GuardedFile, where: str) -> None:
        self.name = f"{printable(owner.path)}: {where}"
        self.memory, self.where = owner.memory, where
        self._dataset, self.bytes = dataset, Bytes(descriptor, owner.file_bytes, self.error)
        self.shape: tuple[int, ...] = dataset.shape
        self.length = self.shape[0]
        kind = dataset.id.get_type()
        self.is_text = isinstance(kind, h5py.h5t.TypeStringID) and kind.is_variable_str()
        try:
            self.dtype = POINTER if self.is_text else dataset.dtype
        except (TypeError, ValueError) as error:
            raise self.error(f"has a type that is not read: {error}") from None
        if self.is_text and dataset.file.id.get_create_plist().get_sizes()[0] != 8:
            raise self.error("its strings have addresses that are not of 8 bytes: repack the file (h5repack)")
        if not self.is_text and (self.dtype.kind not in "biufcS" or not self.dtype.itemsize):
            raise self.error(f"has the type {self.dtype} but numbers and strings are read")
        if self.dtype.kind in "biufc" and not self.is_text and not is_stored_as(dataset, self.dtype):
            raise self.error("has numbers of unusual precision or bit offset, which are not read: convert its type")
        self.num_bytes = int(np.prod([self.dtype.itemsize, *self.shape], dtype=object))
        self._check_storage()
        self._cached: tuple[tuple[int, ...], np.ndarray] | None = None
        self._at = 0

    def error(self, what: str) -> SourceError:
        return SourceError(f"{self.name}: {what}")

    def _check_storage(self) -> None:
        plist = self._dataset.id.get_create_plist()
        layout = plist.get_layout()
        if plist.get_external_count():
            raise self.error("its values lie in other files, which are not opened: copy them into one (h5repack)")
        if layout not in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED, h5py.h5d.COMPACT):
            raise self.error("is a virtual dataset, which may lead to other files: copy it into one (h5repack)")
        self.stored_bytes = self._dataset.id.get_storage_size()
        self._offset = self._dataset.id.get_offset() if layout == h5py.h5d.CONTIGUOUS else None
        self._chunks = plist.get_chunk() if layout == h5py.h5d.CHUNKED else None
        filters = [plist.get_filter(i) for i in range(plist.get_nfilters())]
        self._filters: list[tuple[int, tuple[int, ...]]] = [(entry[0], entry[2]) for entry in filters]
        if self.stored_bytes > self.bytes.num_bytes:
            raise self.error(f"claims {self.stored_bytes} stored bytes but the file has {self.bytes.num_bytes}")
        if self._chunks is None:
            if self.stored_bytes != self.num_bytes:
                raise self.error(f"its shape {self.shape} needs {self.num_bytes} bytes, {self.stored_bytes} are stored")
            if self._offset is not None and self._offset + self.num_bytes > self.bytes.num_bytes:
                raise self.error("reaches beyond the end of the file: it is cut short")
        else:
            self._check_chunks(self._chunks)

    def _check_chunks(self, chunks: tuple[int, ...]) -> None:
        codes = [code for code, _ in self._filters]
        chunk_bytes = int(np.prod([self.dtype.itemsize, *chunks], dtype=object))
        if chunk_bytes > MAX_CHUNK_BYTES:
            raise self.error(f"its chunks of {chunk_bytes} bytes are over the limit of {MAX_CHUNK_BYTES}: repack it")
        if len(set(codes)) < len(codes):
            raise self.error(f"has a filter twice ({codes}): repack it (h5repack)")
        self._grid = tuple(-(-length // chunk) for length, chunk in zip(self.shape, chunks, strict=True))
        wanted = int(np.prod(self._grid, dtype=object))
        there = self._dataset.id.get_num_chunks()
        if there != wanted:
            raise self.error(f"its shape {self.shape} needs {wanted} chunks but {there} are stored")
        self.memory.check(f"{wanted:,} chunks of {self.where}", wanted * CHUNK_ENTRY_BYTES)
        self.memory.check(f"chunks of {human_bytes(chunk_bytes)} of {self.where}", chunk_bytes * CHUNK_COPIES)
        self._table = self._read_table(chunks, wanted)
        claimed = wanted * chunk_bytes
        undone = (GZIP, SHUFFLE, FLETCHER32, *([LZF] if self.is_text else []))  # in Python, LZF is slow
        self._own = all(code in undone for code in codes)
        ratio = MAX_RATIO if GZIP in codes or LZF in codes else 1
        if claimed > self.stored_bytes * ratio + SLACK_BYTES and self._own:
            raise self.error(f"claims {claimed} bytes out of {self.stored_bytes} stored ones: that cannot be")
        if not self._own:
            self._check_plugins(codes)

    def _read_table(self, chunks: tuple[int, ...], count: int) -> np.ndarray:
        """(count, 3) int64: where each chunk lies, its stored bytes and its filter mask, in the order of the grid.

        Chunks are then read past the library, which writes beyond its memory if a size is damaged.
        """
        table = np.full((count, 3), -1, np.int64)
        edges_plain = partial_chunks_are_plain(self._dataset.id.get_create_plist())

        def note(chunk: Any) -> None:
            place = [start // size for start, size in zip(chunk.chunk_offset, chunks, strict=True)]
            if chunk.byte_offset is not None and all(0 <= i < n for i, n in zip(place, self._grid, strict=True)):
                number = int(np.ravel_multi_index(place, self._grid))
                ends = zip(chunk.chunk_offset, chunks, self.shape, strict=True)
                plain = edges_plain and any(start + size > length for start, size, length in ends)
                mask = ALL_FILTERS if plain else chunk.filter_mask
                table[number] = min(chunk.byte_offset, 1 << 62), chunk.size, mask

        self._dataset.id.chunk_iter(note)
        order = table[table[:, 0].argsort(kind="stable")]
        ends = order[:, 0] + order[:, 1]
        if (table < 0).any() or (ends[:-1] > order[1:, 0]).any() or (ends > self.bytes.num_bytes).any():
            raise self.error("its chunks are not all there, overlap or lie beyond the end of the file: it is damaged")
        return table

    def _check_plugins(self, codes: list[int]) -> None:
        unknown = [code for code in codes if code not in (GZIP, SHUFFLE, FLETCHER32, LZF, *PLUGINS)]
        if unknown:
            raise self.error(
                f"is packed with HDF5 filter {unknown[0]}, which is not read: repack it (h5repack -f GZIP=4)"
            )
        if self.is_text:
            raise self.error("its strings are packed with a filter that is not read: repack it (h5repack -f GZIP=4)")
        with contextlib.suppress(ImportError):
            import hdf5plugin  # noqa: F401
        missing = [code for code in codes if not h5py.h5z.filter_avail(code)]
        if missing:
            raise self.error(f"is packed with HDF5 filter {missing[0]}: pip install hdf5plugin")

    @property
    def read_part(self) -> float:
        return self._at / self.length if self.length else 1.0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Values from ``start`` up to ``stop`` of a dataset of one dimension."""
        self._at = stop
        if self._offset is not None and stop > start:
            return self._pread(start, stop - start)
        if self._chunks is None or not self._own:
            return self._library((slice(start, stop),))
        values = np.empty(stop - start, self.dtype)
        size = self._chunks[0]
        for first in range(start // size * size, stop, size):
            low, high = max(first, start), min(first + size, stop)
            values[low - start : high - start] = self._chunk((first,))[low - first : high - first]
        return values

    def all(self) -> np.ndarray:
        """All values of a dataset of one dimension, if they fit in memory."""
        self.memory.check(f"{self.length:,} values of {self.where}", self.num_bytes)
        return self.read(0, self.length)

    def parts(self, max_bytes: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """(row, column, values) of the blocks that cover a dataset of two dimensions."""
        num_rows, num_columns = self.shape
        if not self.num_bytes:
            return
        if self._chunks is None:
            cells = max(1, max_bytes // self.dtype.itemsize)
            rows, columns = max(1, cells // num_columns), min(cells, num_columns)  # one of them is the whole axis
            for row in range(0, num_rows, rows):
                self._at = min(num_rows, row + rows)
                for column in range(0, num_columns, columns):
                    stop = min(num_columns, column + columns)
                    if self._offset is not None:
                        count = (self._at - row) * (stop - column)
                        part = self._pread(row * num_columns + column, count)
                    else:
                        part = self._library((slice(row, self._at), slice(column, stop)))
                    yield row, column, part.reshape(-1, stop - column)
            return
        rows, columns = self._chunks
        for row in range(0, num_rows, rows):
            self._at = min(num_rows, row + rows)
            for column in range(0, num_columns, columns):
                wanted = slice(row, min(num_rows, row + rows)), slice(column, min(num_columns, column + columns))
                if self._own:
                    yield row, column, self._chunk((row, column))[: wanted[0].stop - row, : wanted[1].stop - column]
                else:
                    yield row, column, self._library(wanted)

    def has_whole_rows(self) -> bool:
        return self._chunks is None or self._chunks[1] >= self.shape[1]

    def _pread(self, start: int, count: int) -> np.ndarray:
        size = self.dtype.itemsize
        data = os.pread(self.bytes.descriptor, count * size, (self._offset or 0) + start * size)
        while len(data) < count * size and (
            more := os.pread(
                self.bytes.descriptor, count * size - len(data), (self._offset or 0) + start * size + len(data)
            )
        ):
            data += more
        if len(data) != count * size:
            raise self.error("ends early: the file is cut short")
        return np.frombuffer(data, self.dtype)

    def _library(self, wanted: tuple[slice, ...]) -> np.ndarray:
        if self.is_text:
            raise self.error("its strings are kept in an unusual way: write them again")
        return np.asarray(self._dataset[wanted])

    def _chunk(self, origin: tuple[int, ...]) -> np.ndarray:
        """One chunk, whole; the last one is kept."""
        assert self._chunks is not None
        if self._cached is None or self._cached[0] != origin:
            place = [start // size for start, size in zip(origin, self._chunks, strict=True)]
            offset, size, mask = self._table[np.ravel_multi_index(place, self._grid)].tolist()
            data = self.bytes.read(offset, size)
            num_bytes = int(np.prod([self.dtype.itemsize, *self._chunks], dtype=object))
            for bit in reversed(range(len(self._filters))):
                if not mask >> bit & 1:
                    code, values = self._filters[bit]
                    data = self._undo(code, values, data, num_bytes)
            if len(data) != num_bytes:
                raise self.error(
                    f"its chunk at {origin} has {len(data)} bytes but must have {num_bytes}: it is damaged"
                )
            self._cached = origin, np.frombuffer(data, self.dtype).reshape(self._chunks)
        return self._cached[1]

    def _undo(self, code: int, values: tuple[int, ...], data: bytes, num_bytes: int) -> bytes:
        if code == GZIP:
            stream = zlib.decompressobj()
            try:
                data = stream.decompress(data, num_bytes + 5)  # a checksum may be below
            except zlib.error as error:
                raise self.error(f"a chunk cannot be inflated: {error}") from None
            if not stream.eof:
                raise self.error("a chunk inflates to more than it may, or its gzip stream is cut short")
            return data
        if code == LZF:
            return self._inflate_lzf(data, num_bytes)
        if code == FLETCHER32:
            if fletcher32(data[:-4]) != int.from_bytes(data[-4:], "little"):
                raise self.error("a chunk does not match its checksum: it is damaged")
            return data[:-4]
        size = values[0] if values else self.dtype.itemsize
        if not size:
            raise self.error("its shuffle filter has elements of no bytes")
        whole = len(data) // size * size
        planes = np.frombuffer(data, np.uint8, whole).reshape(size, -1)
        return planes.T.tobytes() + data[whole:]

    def _inflate_lzf(self, data: bytes, num_bytes: int) -> bytes:
        """LZF: runs of up to 32 bytes, and copies of what came before. Source: lzf_d.c of LibLZF."""
        out = bytearray()
        at = 0
        try:
            while at < len(data) and len(out) <= num_bytes:
                head = data[at]
                at += 1
                if head < 32:
                    out += data[at : at + head + 1]
                    at += head + 1
                    continue
                length = head >> 5
                if length == 7:
                    length += data[at]
                    at += 1
                back = ((head & 31) << 8) + data[at] + 1
                at += 1
                if back > len(out):
                    raise IndexError
                piece = out[len(out) - back : len(out) - back + length + 2]
                out += (piece * (length + 2))[: length + 2] if len(piece) < length + 2 else piece
        except IndexError:
            raise self.error("a chunk packed with LZF is damaged") from None
        return bytes(out)


def fletcher32(data: bytes) -> int:
    """The checksum that HDF5 puts behind a chunk. Source: H5checksum.c."""
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2").astype(np.int64)
    if not words.any():
        return 0
    weights = np.arange(len(words), 0, -1, dtype=np.int64) % 65535
    sums = [int(words.sum()), int((words * weights).sum())]
    low, high = ((total - 1) % 65535 + 1 for total in sums)
    return high << 16 | low


def read_strings(stored: Stored) -> np.ndarray:
    """Strings of any kind as bytes of fixed length: (length,) ``S``, UTF-8.

    Raises
    ------
    SourceError
        They are no strings, longer than `MAX_STRING_BYTES`, or their heap is damaged.
    """
    if not stored.is_text:
        if stored.dtype.kind != "S":
            raise stored.error(f"has the type {stored.dtype} but must be strings")
        if stored.dtype.itemsize > 16 * MAX_STRING_BYTES:
            raise stored.error(f"has strings of {stored.dtype.itemsize} bytes but the limit is {MAX_STRING_BYTES}")
        return _narrow(stored, stored.all())
    pointers = stored.all()
    width = min(int(pointers["length"].max(initial=0)), MAX_STRING_BYTES)
    stored.memory.check(f"{stored.length:,} strings of up to {width} bytes in {stored.where}", stored.length * width)
    return resolve(stored.bytes, pointers)


def _narrow(stored: Stored, strings: np.ndarray) -> np.ndarray:
    width = int(np.char.str_len(strings).max()) if len(strings) else 0
    if width > MAX_STRING_BYTES:
        raise stored.error(f"has strings of {width} bytes but the limit is {MAX_STRING_BYTES}")
    return strings.astype(f"S{max(1, width)}")
