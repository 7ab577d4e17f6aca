"""List and validate the offsets of a dataset's chunks in the file, and find chunks that were never written.

H5Dchunk_iter (``DatasetID.chunk_iter`` in h5py) lists all chunks in one pass, while queries of single chunks search the
index each time. HDF5 1.14.2 counts the offsets from the end of the user block. This module therefore tests the library
with a file in memory, and compares one chunk of each dataset with the bytes at its offset.
"""

from __future__ import annotations

import ctypes
import functools
import io
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import h5py
import numpy as np
from h5py._objects import phil

from h5chunk.errors import FileError, as_text, printable
from h5chunk.stamp import stamp_of

NUMBERS_AT_A_TIME = 1 << 17  # number of Python integers after which listed chunks are stored in the table
FILTER_BYTES = 64 << 10  # bytes by which a stored chunk may exceed twice its decoded size, for headers and tables
CHECKSUM_BYTES = 4  # bytes that Fletcher-32 appends to a chunk
COMPARED_BYTES = 1 << 20  # larger chunks are not compared completely
COMPARED_ELEMENTS = 64  # number of elements to compare in a larger chunk, or in contiguous data
PROBE = bytes(range(1, 33))  # content of the file in memory
PROBE_BLOCK = 512  # size of its user block
DRIVERS = (h5py.h5fd.SEC2, h5py.h5fd.LOG)  # drivers that read a local file with its descriptor
DONT_FILTER_PARTIAL_CHUNKS = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS of H5Dpublic.h
ALL_FILTERS = 0xFFFFFFFF  # the filter mask of a chunk that skipped all filters
KEPT_CHUNKS = 1 << 14  # tables with at least this many chunks stay cached when they have been used
KEPT_BYTES = 256 << 20  # limit on the memory of all cached tables, unless one of them is larger
TABLE_BYTES = 1 << 10  # memory of a cached table besides its arrays
EXTENSIBLE_ARRAY = 4  # H5D_CHUNK_IDX_EARRAY of H5Dpublic.h


Tables = dict[tuple[object, ...], "ChunkTable"]  # by version of the file, and dataset

_kept: Tables = {}  # the cached tables
_noted: Tables | None = None  # the tables that were listed in a context of `noted_tables`


class NotDirect(Exception):
    """Raised if a dataset cannot be read by byte ranges."""


@dataclass(frozen=True)
class ChunkTable:
    """The chunks of one dataset, in row-major order. A contiguous dataset is one chunk.

    Chunks at the edges are stored in full.
    """

    offsets: np.ndarray  # offsets in the file: (num_chunks,) int64; -1 if the chunk was never written
    sizes: np.ndarray  # stored bytes: (num_chunks,) int64
    filter_masks: np.ndarray  # (num_chunks,) uint32; bit i is set if filter i was skipped for the chunk
    chunk_shape: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def unwritten(cls, shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> ChunkTable:
        count = math.prod(_grid(shape, chunk_shape))
        return cls(np.full(count, -1), np.zeros(count, np.int64), np.zeros(count, np.uint32), chunk_shape, shape)

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def is_one_run(self) -> bool:
        """True if all chunks are stored in order and without gaps."""
        if len(self) == 0 or self.offsets[0] < 0:
            return False
        expected = self.offsets[0] + np.arange(len(self)) * self.sizes[0]
        return bool((self.offsets == expected).all() and (self.sizes == self.sizes[0]).all())

    def chunk_at(self, offset: int) -> int:
        """Return the index of the chunk that contains a file offset."""
        return int(np.where(self.offsets <= offset, self.offsets, -1).argmax())

    def start(self, chunk: int) -> tuple[int, ...]:
        """Return the index of the first element of a chunk."""
        position = np.unravel_index(chunk, _grid(self.shape, self.chunk_shape))
        return tuple(int(at) * step for at, step in zip(position, self.chunk_shape, strict=True))

    @property
    def num_across(self) -> int:
        """Number of chunks that contain parts of the same rows."""
        return math.prod(_grid(self.shape[1:], self.chunk_shape[1:]))

    def rows(self, chunk: int) -> tuple[int, int]:
        """Return the first and the last row in a chunk."""
        first = chunk // self.num_across * self.chunk_shape[0]
        return first, min(first + self.chunk_shape[0], self.shape[0]) - 1


def _grid(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of chunks along each axis."""
    return tuple(-(-size // chunk) if chunk else 1 for size, chunk in zip(shape, chunk_shape, strict=True))


def list_chunks(dataset: h5py.Dataset) -> ChunkTable:
    """List the chunks of a dataset in one pass. Raises NotDirect if HDF5 lists them at wrong offsets.

    Raises FileError if the index of the chunks is invalid, or a chunk extends beyond the file, overlaps another chunk
    or has an impossible size. Raises FileError, too, if HDF5 reads bytes that differ from those at the offset of a
    chunk. Long tables are cached, because a data set, its loader and forked processes list the same chunks. Tables of
    `keep_tables` are not listed again.
    """
    file = dataset.file.id
    if not _is_stable(file):
        return _list_chunks(dataset)
    key = (stamp_of(file.get_vfd_handle(), with_ctime=True), dataset.name)
    table = _kept.pop(key, None) or _list_chunks(dataset)
    if _noted is not None:
        _noted[key] = table
    if len(table) >= KEPT_CHUNKS:
        keep_tables({key: table})
    return table


@contextmanager
def noted_tables() -> Iterator[Tables]:
    """Note all tables that are listed in the context, for `keep_tables` in another process."""
    global _noted
    tables: Tables = {}
    _noted = tables
    try:
        yield tables
    finally:
        _noted = None
        _drop_oldest(tables)


def keep_tables(tables: Tables) -> None:
    """Cache tables for `list_chunks`, which returns them if a file has not changed. Short ones are returned once."""
    for key, table in tables.items():
        for array in (table.offsets, table.sizes, table.filter_masks):
            array.flags.writeable = False
        _kept[key] = table
    _drop_oldest(_kept)


def _drop_oldest(tables: Tables) -> None:
    """Drop the oldest tables, but never the last one, until all need at most `KEPT_BYTES` of memory."""
    sizes = {key: TABLE_BYTES + 20 * len(table) for key, table in list(tables.items())}
    total = sum(sizes.values())
    for key in list(sizes)[:-1]:
        if total <= KEPT_BYTES:
            return
        tables.pop(key, None)
        total -= sizes[key]


def check_chunks(dataset: h5py.Dataset) -> None:
    """Raise FileError if a dataset has chunks that `list_chunks` refuses, because HDF5 may crash when it reads them."""
    if dataset.chunks and dataset.size:
        with suppress(NotDirect):  # sizes are checked even if the offsets are wrong
            list_chunks(dataset)


def _list_chunks(dataset: h5py.Dataset) -> ChunkTable:
    name = f"{printable(dataset.file.filename)}: {dataset.name!r}"
    if is_listed_wrongly(dataset):
        listed: list[tuple[int, int]] = []
        _visit_chunks(dataset, lambda chunk: listed.append((chunk.size, chunk.filter_mask)))
        sizes, masks = np.array(listed, np.int64).reshape(-1, 2).T
        _check_sizes(dataset, sizes, masks, np.arange(len(sizes)), name, are_in_order=False)
        raise NotDirect("HDF5 lists wrong offsets for its chunks, because an axis other than the first is unlimited")
    if dataset.chunks is None:
        # without stored bytes, h5py would add the user block to an undefined offset
        offset = dataset.id.get_offset() if dataset.id.get_storage_size() else None
        table = ChunkTable.unwritten(dataset.shape, dataset.shape)
        if offset is not None:
            table.offsets[:] = offset
            table.sizes[:] = math.prod(dataset.shape) * stored_item_bytes(dataset)  # h5py's dtype may be wider
    else:
        table = _list_index(dataset, name)
    end = int((table.offsets + table.sizes).max(initial=0))
    length = dataset.file.id.get_filesize()
    if end > length:
        raise FileError(f"{name} has a chunk that ends at byte {end}, but the file ends at {length}: it is damaged")
    stored = np.flatnonzero(table.offsets >= 0)
    order = stored[np.argsort(table.offsets[stored], kind="stable")]
    over = table.offsets[order[:-1]] + table.sizes[order[:-1]] > table.offsets[order[1:]]
    if over.any():
        first = int(over.argmax())
        raise FileError(f"{name} is damaged: its chunks {order[first]} and {order[first + 1]} overlap in the file")
    if dataset.chunks is not None:
        _check_sizes(dataset, table.sizes[stored], table.filter_masks[stored], stored, name)
    _check_bytes(dataset, table, name)
    return table


def _is_stable(file: h5py.h5f.FileID) -> bool:
    """Return whether a file is open for reading, and HDF5 reads it with its descriptor."""
    return bool(file.get_intent() == h5py.h5f.ACC_RDONLY and file.get_access_plist().get_driver() in DRIVERS)


def is_listed_wrongly(dataset: h5py.Dataset) -> bool:
    """Return whether HDF5 lists wrong offsets, which happens if the only unlimited axis is not the first one.

    An extensible array indexes such chunks with the unlimited axis first, but HDF5 lists them in the order of the axes.
    Source: H5Dearray.c, H5D__earray_idx_iterate_cb, as compared to H5D__earray_idx_get_addr.
    """
    if dataset.chunks is None or None in dataset.maxshape[:1] or dataset.maxshape.count(None) != 1:
        return False
    index_type = _ask_library("H5Dget_chunk_index_type", dataset.id.id, ctypes.c_int)
    return index_type in (EXTENSIBLE_ARRAY, None)


def parts_of(kind: h5py.h5t.TypeID) -> Iterator[h5py.h5t.TypeID]:
    """Yield a type and, recursively, the types of its members and elements."""
    yield kind
    if isinstance(kind, h5py.h5t.TypeCompoundID):
        for number in range(kind.get_nmembers()):
            yield from parts_of(kind.get_member_type(number))
    elif isinstance(kind, (h5py.h5t.TypeArrayID, h5py.h5t.TypeVlenID)):
        yield from parts_of(kind.get_super())


def is_variable(kind: h5py.h5t.TypeID) -> bool:
    """Return whether a type has variable-length parts or references, which HDF5 follows without checks.

    HDF5's own H5Tdetect_class does not find strings of variable length in array types.
    """
    return any(
        isinstance(part, (h5py.h5t.TypeVlenID, h5py.h5t.TypeReferenceID))
        or (isinstance(part, h5py.h5t.TypeStringID) and part.is_variable_str())
        for part in parts_of(kind)
    )


def is_vlen(dataset: h5py.Dataset) -> bool:
    """Return whether the elements of a dataset are arrays of variable length. Strings do not count."""
    return isinstance(dataset.id.get_type(), h5py.h5t.TypeVlenID)


def is_text(dataset: h5py.Dataset) -> bool:
    """Return whether the elements of a dataset are strings of variable length."""
    kind = dataset.id.get_type()
    return isinstance(kind, h5py.h5t.TypeStringID) and bool(kind.is_variable_str())


def partial_chunks_are_plain(properties: h5py.h5p.PropDCID) -> bool | None:
    """Return whether partial chunks at the edges of a dataset are stored without its filters, or None if unknown.

    Filter masks do not show this. Source: H5Pset_chunk_opts, HDF5 File Format Specification, IV.A.2.i, version 4.
    """
    options = _ask_library("H5Pget_chunk_opts", properties.id, ctypes.c_uint)
    return None if options is None else bool(options & DONT_FILTER_PARTIAL_CHUNKS)


def is_stored_as(dataset: h5py.Dataset, dtype: np.dtype) -> bool:
    """Return whether a dataset's values are stored in the file exactly as NumPy stores this dtype in memory.

    The dtype that h5py reports may differ from the stored type in precision, bit offset or float format.
    """
    stored = dataset.id.get_type()
    if isinstance(stored, h5py.h5t.TypeEnumID) and dtype.kind != "b":
        stored = stored.get_super()
    plain = np.dtype(dtype.str)  # without the names of an enum's values
    return bool(stored.equal(h5py.h5t.py_create(plain, logical=True)))


def stored_item_bytes(dataset: h5py.Dataset) -> int:
    """Return the number of bytes of one element in the file.

    For a variable-length type, this is the size of its pointer.
    """
    kind = dataset.id.get_type()
    if isinstance(kind, h5py.h5t.TypeVlenID) or (isinstance(kind, h5py.h5t.TypeStringID) and kind.is_variable_str()):
        return 8 + int(dataset.file.id.get_create_plist().get_sizes()[0])
    return int(kind.get_size())


def _check_sizes(
    dataset: h5py.Dataset,
    sizes: np.ndarray,
    masks: np.ndarray,
    numbers: np.ndarray,
    name: str,
    *,
    are_in_order: bool = True,
) -> None:
    """Raise FileError if a chunk has an impossible stored size, which would make HDF5 read beyond its buffer."""
    properties, kind = dataset.id.get_create_plist(), dataset.id.get_type()
    chunk_bytes, partial = math.prod(dataset.chunks) * kind.get_size(), partial_chunks_are_plain(properties)
    are_known = partial is not None and not is_variable(kind) and (are_in_order or not partial)
    for wrong in impossible_sizes(properties, chunk_bytes, sizes, masks, are_known)[:1].tolist():
        raise FileError(
            f"{name} is damaged: its chunk {numbers[wrong]} has {sizes[wrong]} stored bytes, which is impossible for "
            f"{chunk_bytes} bytes of data"
        )


def impossible_sizes(
    properties: h5py.h5p.PropDCID, chunk_bytes: int, sizes: np.ndarray, masks: np.ndarray, are_known: bool = True
) -> np.ndarray:
    """Return the indices of chunks with an impossible number of stored bytes, with which HDF5 may crash: int64.

    ``are_known`` is whether unfiltered chunks have ``chunk_bytes`` in the file.
    """
    changed = np.full(len(sizes), not are_known)  # whether a filter changes the length
    checksums = np.zeros(len(sizes), np.int64)
    for number in range(properties.get_nfilters()):
        code, applied = properties.get_filter(number)[0], masks >> number & 1 == 0
        changed |= applied & (code not in (h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32))
        checksums[applied] += CHECKSUM_BYTES * (code == h5py.h5z.FILTER_FLETCHER32)
    wrong = np.where(changed, sizes <= checksums, sizes != chunk_bytes + checksums)
    wrong |= sizes > 2 * chunk_bytes + FILTER_BYTES  # impossible with any filter
    return np.flatnonzero(wrong)


def _check_bytes(dataset: h5py.Dataset, table: ChunkTable, name: str) -> None:
    """Raise FileError if HDF5 reads bytes for the smallest chunk that differ from those at its offset in the file.

    Compressed chunks larger than 1 MiB and files that are open for writing are not checked.
    """
    file, stored = dataset.file.id, np.flatnonzero(table.sizes)
    if not len(stored) or not _is_stable(file):
        return
    chunk = int(stored[table.sizes[stored].argmin()])
    try:
        expected = _read_start(dataset, table.start(chunk), int(table.sizes[chunk]))
    except (OSError, RuntimeError, ValueError) as error:
        raise FileError(f"{name}: its chunk {chunk} cannot be read ({error})") from None
    if os.pread(file.get_vfd_handle(), len(expected), int(table.offsets[chunk])) != expected:
        raise FileError(
            f"{name}: HDF5 reads other bytes for its chunk {chunk} than the file has at {table.offsets[chunk]}, "
            "the offset that HDF5 lists. Either the file is being written or damaged, or HDF5 lists wrong offsets: "
            "wait for the writer, restore the file, or try another version of h5py"
        )


def _read_start(dataset: h5py.Dataset, start: tuple[int, ...], size: int) -> bytes:
    """Read the first stored bytes of a chunk through HDF5, or return no bytes if that would be slow."""
    chunks, kind = dataset.chunks or dataset.shape, dataset.id.get_type()
    if dataset.chunks and size <= COMPARED_BYTES:
        memory = bytearray(size)
        dataset.id.read_direct_chunk(start, out=memory)
        return bytes(memory)
    is_number = isinstance(kind, (h5py.h5t.TypeIntegerID, h5py.h5t.TypeFloatID))
    if not is_number or not start or dataset.id.get_create_plist().get_nfilters():
        return b""
    count = (*(1 for _ in start[1:]), min(chunks[-1], dataset.shape[-1] - start[-1], COMPARED_ELEMENTS))
    values, space = np.empty(count, f"V{kind.get_size()}"), dataset.id.get_space()
    space.select_hyperslab(start, count)
    dataset.id.read(h5py.h5s.create_simple(count), space, values, kind)
    return values.tobytes()


def _visit_chunks(dataset: h5py.Dataset, note: Callable[[h5py.h5d.StoreInfo], None]) -> None:
    dataset.id.chunk_iter(note)


@functools.cache
def leaves_out_user_block() -> bool:
    """Test with a file in memory whether this HDF5 library lists offsets from the end of the user block."""
    memory = io.BytesIO()
    listed: list[h5py.h5d.StoreInfo] = []
    with h5py.File(memory, "w", userblock_size=PROBE_BLOCK) as file:
        file.create_dataset("x", data=np.frombuffer(PROBE, np.uint8), chunks=(len(PROBE),))
    with h5py.File(memory, "r") as file:
        _visit_chunks(file["x"], listed.append)
    return memory.getvalue().find(PROBE) == listed[0].byte_offset + PROBE_BLOCK


def left_out_of_offsets(file: h5py.File) -> int:
    """Return the number of bytes by which the offsets are too small that HDF5 lists for the chunks of a file."""
    block = int(file.userblock_size)
    return block if block and leaves_out_user_block() else 0


def _list_index(dataset: h5py.Dataset, name: str) -> ChunkTable:
    chunks = dataset.chunks
    table = ChunkTable.unwritten(dataset.shape, chunks)
    grid = _grid(dataset.shape, chunks)
    strides = np.array([math.prod(grid[axis + 1 :]) for axis in range(len(grid))], np.int64)
    missing = left_out_of_offsets(dataset.file)
    numbers: list[int] = []  # values of many chunks, because storing them together is faster than one by one

    def add(chunk: h5py.h5d.StoreInfo) -> None:
        position, mask, offset, size = chunk
        numbers.extend(position)
        numbers.extend((mask, -1 if offset is None else offset + missing, size))
        if len(numbers) > NUMBERS_AT_A_TIME:
            store_listed()

    def store_listed() -> None:
        listed = np.array(numbers, np.int64).reshape(-1, len(grid) + 3)
        numbers.clear()
        scaled = listed[:, : len(grid)] // chunks
        if (wrong := (scaled >= grid).any(axis=1)).any():
            raise IndexError(f"its start {listed[wrong][0, : len(grid)].tolist()} is outside of {dataset.shape}")
        indices = scaled @ strides
        table.filter_masks[indices], table.offsets[indices], table.sizes[indices] = listed[:, len(grid) :].T

    try:
        _visit_chunks(dataset, add)
        store_listed()
    except (IndexError, OverflowError) as error:
        raise FileError(f"{name} lists an invalid chunk ({error}): it is damaged") from None
    except (OSError, RuntimeError) as error:
        raise FileError(f"{name}: its chunks cannot be listed ({error})") from None
    if partial_chunks_are_plain(dataset.id.get_create_plist()):
        masks = table.filter_masks.reshape(grid)
        for axis, (length, chunk) in enumerate(zip(dataset.shape, chunks, strict=True)):
            if length % chunk:
                np.moveaxis(masks, axis, 0)[-1] = ALL_FILTERS
    return table


def count_unwritten(dataset: h5py.Dataset) -> int:
    """Count the chunks that were never written, which HDF5 allows. A contiguous dataset is one chunk."""
    properties = dataset.id.get_create_plist()
    layout = properties.get_layout()
    if layout == h5py.h5d.CHUNKED:
        return max(0, math.prod(_grid(dataset.shape, dataset.chunks)) - int(dataset.id.get_num_chunks()))
    inside = layout == h5py.h5d.CONTIGUOUS and not properties.get_external_count() and dataset.shape is not None
    return int(inside and math.prod(dataset.shape) > 0 and dataset.id.get_offset() is None)


def unwritten_value(dataset: h5py.Dataset) -> str:
    """Return the value that HDF5 returns for unwritten elements, usually the fill value, as text for messages."""
    properties = dataset.id.get_create_plist()
    never = properties.get_fill_time() == h5py.h5d.FILL_TIME_NEVER
    if never or properties.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED:
        result = "0" if never or dataset.id.get_storage_size() else "an error"
        return f"{result}, because there is no fill value"
    value = dataset.fillvalue
    value = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
    return printable(repr(as_text(value) if isinstance(value, bytes) else value))


def _ask_library(name: str, identifier: int, kind: type[ctypes.c_uint] | type[ctypes.c_int]) -> int | None:
    """Call a function of HDF5 of the form ``herr_t name(hid_t identifier, kind *answer)``, and return the answer.

    The dynamic linker finds the function in the libraries that h5py's extension module is linked with. Returns None if
    this build of h5py hides the function, or if the call fails.
    """
    try:
        function = getattr(ctypes.CDLL(h5py.h5p.__file__), name)
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_int64, ctypes.POINTER(kind)], ctypes.c_int
    answer = kind()
    with phil:  # HDF5 is not thread-safe
        failed = function(identifier, ctypes.byref(answer)) < 0
    return None if failed else int(answer.value)
