"""Describe datasets as arrays of blocks: their chunks, or blocks into which a contiguous dataset is divided."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, human_bytes, printable
from h5chunk.store.hdf5.chunk_table import ChunkTable, NotDirect, is_variable, list_chunks
from h5chunk.store.hdf5.codecs import ChunkDecoder, DecodeError, NoDecoder, scratch
from h5chunk.store.hdf5.types import Element, packed_element, packed_type, read_elements
from h5chunk.store.read.arrays import (
    BOX_BLOCK_BYTES,
    Arrays,
    Blocks,
    Codec,
    FillCodec,
    Origin,
    dataset_text,
    divided,
    whole_chunk,
)
from h5chunk.store.read.checksums import NO_SUMS, ChunkChecks, Sums

MAX_DECODED_BYTES = 256 << 20  # limit on a decoded chunk, because each thread holds one and its stored bytes
CONVERTED_BYTES = 256 << 10  # bytes of the blocks of a contiguous dataset whose values must be converted

_local = threading.local()


class Filtered:
    """The codec of chunks that have filters, or whose elements must be converted, or some of which were never written.

    ``element`` describes the elements, and ``unwritten`` has the value, in memory, of those that were never written, or
    the error if they have no value.
    """

    def __init__(
        self, decoder: ChunkDecoder | None, element: Element, count: int, unwritten: bytes | FileError
    ) -> None:
        self._decoder, self._element, self._unwritten = decoder, element, unwritten
        self._is_plain = element.is_plain
        self._stored_bytes = count * element.item_bytes

    @property
    def pipeline(self) -> np.ndarray | None:
        return self._decoder.pipeline if self._is_plain and self._decoder is not None else None

    def fill(self, number: int, out: np.ndarray) -> None:
        if isinstance(self._unwritten, FileError):
            raise FileError(str(self._unwritten))
        out.reshape(-1, len(self._unwritten))[:] = np.frombuffer(self._unwritten, np.uint8)

    def decode(self, stored: np.ndarray, mask: int, out: np.ndarray, where: Callable[[], str]) -> None:
        values = stored
        if self._decoder is not None:
            values = out if self._is_plain else scratch(_local, "as stored", self._stored_bytes)
            try:
                self._decoder.decode(stored, mask, values)
            except DecodeError as error:
                raise FileError(f"{where()} is damaged ({error})") from None
        if not self._is_plain:
            values = np.ascontiguousarray(self._element.convert(values)).reshape(-1).view(np.uint8)
        if values is not out:  # a block at the end of a contiguous dataset may be shorter
            out[: len(values)] = values


class InMemory(FillCodec):
    """The codec of a block that is in memory already, because the file stores it in an object header."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def fill(self, number: int, out: np.ndarray) -> None:
        out[:] = self._values


def dataset_arrays(
    path: Path,
    name: str,
    file: int,
    dataset: h5py.Dataset,
    element: Element,
    sums: Sums = NO_SUMS,
    indptr: np.ndarray | None = None,
    *,
    axes: int = 1,
) -> Arrays:
    """Describe a dataset as an array, of which boxes contain all of the axes after the first ``axes``.

    ``file`` is the number of the file at ``path``, and ``sums`` has the checksums to verify. If the ``indptr`` of a
    matrix is given, messages name rows instead of entries. No reference to the dataset is kept. Raises NotDirect if
    only HDF5 can read it.
    """
    properties = dataset.id.get_create_plist()
    layout = properties.get_layout()
    is_whole = element.dtype.kind == "V" and not element.dtype.names  # elements as they are stored, such as pointers
    if is_variable(dataset.id.get_type()) and not is_whole:
        raise NotDirect("its elements have parts of variable length, so that their places in the file are unknown")
    if layout == h5py.h5d.COMPACT:
        return _compact_arrays(path, name, file, dataset, element)
    if layout not in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS):
        raise NotDirect("it is a view of other files")
    if layout == h5py.h5d.CONTIGUOUS and properties.get_external_count():
        raise NotDirect("its data is in other files")
    table = list_chunks(dataset)
    checks = ChunkChecks(path, name, table, sums[name], indptr, file) if name in sums else None
    count = math.prod(table.chunk_shape)
    is_filtered, is_unwritten = properties.get_nfilters() > 0, bool((table.offsets < 0).any())
    is_raw = not is_filtered and not is_unwritten and element.is_plain
    if not is_filtered and (table.sizes[table.offsets >= 0] != count * element.item_bytes).any():
        raise NotDirect("the size of its chunks does not follow from their type and shape")
    kept = _kept_axes(dataset.shape, table.chunk_shape, axes)
    item_bytes = math.prod(dataset.shape[kept:]) * element.num_bytes
    shape, block = dataset.shape[:kept], np.array(table.chunk_shape[:kept])
    blocks = Blocks.of_chunks(file, table)
    inner, is_divided = math.prod(dataset.shape[kept:]), False  # elements in an item
    if dataset.chunks is None and (not is_raw or kept > 1):
        stored_bytes = inner * element.item_bytes
        block = np.array(divided(shape, stored_bytes, BOX_BLOCK_BYTES if is_raw else CONVERTED_BYTES))
        blocks = _blocks_of_run(file, int(table.offsets[0]), shape, block, stored_bytes)
        if is_unwritten:
            blocks.offset[:] = -1
        count, is_divided = int(block.prod()) * inner, True
    elif is_raw and kept == 1 and table.is_one_run and checks is None:  # any range of rows is one range of bytes
        block, blocks = np.array(shape), Blocks(*(column[:1] for column in blocks))
    codec: Codec | None = None
    if not is_raw:
        decoder = _decoder(properties, count, element) if is_filtered else None
        unwritten = _unwritten_value(dataset, table, element, path) if is_unwritten else b""
        codec = Filtered(decoder, element, count, unwritten)
    origin = _origin(path, name, file, dataset, table, checks, is_divided=is_divided)
    inner_shape = *dataset.shape[kept:], *element.shape, element.dtype.itemsize
    return Arrays.of_one(item_bytes, shape, block, blocks, codec, origin, inner_shape)


def _origin(
    path: Path,
    name: str,
    file: int,
    dataset: h5py.Dataset,
    table: ChunkTable,
    checks: ChunkChecks | None = None,
    *,
    is_divided: bool = False,
) -> Origin:
    """Return the origin of a dataset's chunks, or of its blocks if it is one chunk that is divided into them."""
    text = dataset_text(path, name, dataset.name)
    chunks = whole_chunk if is_divided else np.asarray
    return Origin(file, lambda chunk: f"{text}, chunk {chunk}", table.offsets, checks, chunks)


def codec_of(dataset: h5py.Dataset, element: Element) -> Filtered:
    """Return the codec of a dataset's blocks, all of which were written. Raises NotDirect if only HDF5 decodes them."""
    if dataset.chunks is None:
        return Filtered(None, element, 0, b"")
    count = math.prod(dataset.chunks)
    return Filtered(_decoder(dataset.id.get_create_plist(), count, element), element, count, b"")


def _kept_axes(shape: tuple[int, ...], chunk_shape: tuple[int, ...], axes: int) -> int:
    """Return the number of axes without those at the end that every chunk, and every box, contains completely."""
    kept = len(shape)
    while kept > axes and chunk_shape[kept - 1] == shape[kept - 1]:
        kept -= 1
    return kept


def _decoder(properties: h5py.h5p.PropDCID, count: int, element: Element) -> ChunkDecoder:
    size, limit = count * max(element.item_bytes, element.num_bytes), MAX_DECODED_BYTES
    if size > limit:
        raise NotDirect(
            f"its chunks have {human_bytes(size)}, but threads decode chunks of at most {human_bytes(limit)}"
        )
    try:
        return ChunkDecoder(properties, count * element.item_bytes, element.item_bytes)
    except NoDecoder as error:
        raise NotDirect(str(error)) from None


def _unwritten_value(dataset: h5py.Dataset, table: ChunkTable, element: Element, path: Path) -> bytes | FileError:
    """Read, through HDF5, the value of elements that were never written, as bytes in memory.

    Returns the error for reading them if they have none.
    """
    if is_variable(dataset.id.get_type()):  # HDF5 reads nothing there
        return bytes(element.item_bytes)
    start, element = table.start(int(np.flatnonzero(table.offsets < 0)[0])), packed_element(dataset, element)
    space = dataset.id.get_space()
    space.select_hyperslab(start, (1,) * len(start))
    raw = np.zeros(1, f"V{element.item_bytes}")  # HDF5 leaves memory unchanged if there is no fill value
    kind = packed_type(dataset.id.get_type(), element.member)
    try:
        dataset.id.read(h5py.h5s.create_simple((1,)), space, raw, kind)
    except OSError as error:
        return FileError(f"{printable(path)}: {dataset.name!r} cannot be read: {error}")
    return element.convert(raw.view(np.uint8)).tobytes()


def _compact_arrays(path: Path, name: str, file: int, dataset: h5py.Dataset, element: Element) -> Arrays:
    """Read a dataset that is stored in its object header, and has at most 64 KiB."""
    values = read_elements(dataset, element)
    table = ChunkTable.unwritten(dataset.shape, dataset.shape)
    origin = _origin(path, name, file, dataset, table)
    blocks = Blocks.of_chunks(file, table)
    inner = *element.shape, element.dtype.itemsize
    return Arrays.of_one(element.num_bytes, dataset.shape, dataset.shape, blocks, InMemory(values), origin, inner)


def no_values(path: Path, name: str, file: int, dataset: h5py.Dataset, element: Element, axes: int) -> Arrays:
    """Describe a dataset without values, such as samples of zero bytes."""
    table = ChunkTable.unwritten(dataset.shape, dataset.shape)
    origin = _origin(path, name, file, dataset, table)
    blocks = Blocks.of_chunks(file, table)
    shape, inner = dataset.shape[:axes], (*dataset.shape[axes:], *element.shape, element.dtype.itemsize)
    codec = InMemory(np.empty(0, np.uint8))
    return Arrays.of_one(math.prod(inner), shape, [max(1, size) for size in shape], blocks, codec, origin, inner)


def _blocks_of_run(file: int, offset: int, shape: tuple[int, ...], block: np.ndarray, item_bytes: int) -> Blocks:
    """Return the blocks of a contiguous array at an offset of a file. Those at the edges end with the array."""
    steps = item_bytes * np.cumprod([1, *shape[:0:-1]])[::-1]  # bytes from one index to the next, along each axis
    grid = -(-np.array(shape) // block)
    firsts = np.stack(np.unravel_index(np.arange(grid.prod()), tuple(grid)), axis=1) * block
    offsets = offset + firsts @ steps
    sizes = np.minimum(firsts + block, shape) - firsts
    count = len(offsets)
    return Blocks(np.full(count, file, np.int32), offsets, sizes.prod(axis=1) * item_bytes, np.zeros(count, np.uint32))
