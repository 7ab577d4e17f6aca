"""Read frames that are stored as JPEG or PNG images, one in each row of a dataset, and decode them.

The rows are arrays of bytes of variable length, or are padded with zeros to the same length. Images are recognised by
their first bytes. The functions that decode images are passed in as a `FrameDecoder`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, SampleError, UnsupportedError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.store.format.header import Header
from h5chunk.store.hdf5.chunk_table import NotDirect, is_vlen, list_chunks
from h5chunk.store.hdf5.guard import MAX_RATIO, Guard
from h5chunk.store.hdf5.open import OpenFile, descriptor_of, errors_as
from h5chunk.store.hdf5.ranges import ReadTask
from h5chunk.store.hdf5.strings import POINTER, find_in_heap
from h5chunk.store.read.checksums import Sums
from h5chunk.store.read.csr import CsrBuffers, VlenBytes
from h5chunk.store.read.direct import ByteReader, direct_field
from h5chunk.store.read.fields import Field, FrameDataset, FrameDecoder, Shape, describe_field
from h5chunk.store.read.ragged import FlatSamples, RaggedField
from h5chunk.store.read.vlen import VlenField, open_heap

MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # the first bytes of JPEG and PNG images
HEAD_BYTES = 1 << 20  # bytes at the start of the first image that are read to parse its header
TASK_BYTES = 4 << 20  # bytes of encoded images and of their pixels per task of a thread
SLACK_BYTES = 64 << 10  # an encoded image may have this many bytes more than its pixels
REMEDY = (
    "write each image as an array of uint8 of variable length, or padded with zeros to the length of the longest one"
)


@dataclass(frozen=True, kw_only=True)
class EncodedField(Field):
    """A field of images that are decoded: ``grid`` and ``dtype`` describe the pixels, (n, H, W, C) uint8.

    ``stored`` describes the dataset, which has an encoded image in each row.
    """

    stored: Field | VlenField
    decoder: FrameDecoder


def describe(
    file: h5py.File,
    path: Path,
    name: str,
    dataset: str | FlatSamples | FrameDataset,
    header: Header | None,
    guard: Guard,
) -> Field | RaggedField:
    """Describe a field as `describe_field` does, or as an `EncodedField` if its rows are images to be decoded.

    Rows are images if the first row and, if all have one length, the last row begin with the `MAGIC` of an image.
    Raises FileError if the first image is damaged or not supported.
    """
    if not isinstance(dataset, FrameDataset):
        return describe_field(file, path, name, dataset, header, guard)
    field = describe_field(file, path, name, dataset.dataset, header, guard)
    heads = _heads(file, path, field)
    if not _are_images(heads):
        return field
    try:
        shape = dataset.decoder.shape_of(np.frombuffer(heads[0], np.uint8))
        if math.prod(shape) > len(heads[0]) * MAX_RATIO + SLACK_BYTES:
            raise SampleError(f"claims {shape[0]} x {shape[1]} pixels in {len(heads[0])} bytes, so it is damaged")
    except SampleError as error:
        raise FileError(f"{printable(path)}: {field.dataset.strip('/')!r}, frame 0: {error}") from None
    return _decoded(field, shape, dataset.decoder)


def holds_images(file: h5py.File, path: Path, name: str, dataset: h5py.Dataset, guard: Guard) -> bool:
    """Return whether rows of the dataset at the path ``name`` are images, by `describe`'s rule; False if damaged."""
    has_bytes = (dataset.dtype == np.uint8 and dataset.ndim == 2) or dataset.dtype.kind == "S"
    try:
        if not has_bytes and not is_vlen(dataset):
            return False
        return _are_images(_heads(file, path, describe_field(file, path, "", name, None, guard)))
    except FileError:
        return False


def _are_images(heads: list[bytes]) -> bool:
    return bool(heads) and all(head.startswith(MAGIC) for head in heads)


def _heads(file: h5py.File, path: Path, field: Field | RaggedField) -> list[bytes]:
    """Read the beginning of the first row and, if all rows have one length, of the last row.

    Returns an empty list if there are no rows, or if they do not consist of bytes.
    """
    num_rows = field.grid.shape[0]
    if not num_rows:
        return []
    if isinstance(field, VlenField):
        return [_first_row(file, path, field)] if field.value_dtype == np.uint8 else []
    is_text = field.dtype.kind == "S" and not field.sample_shape
    if isinstance(field, Field) and (field.is_text or field.member):
        return []
    if not is_text and (field.dtype != np.uint8 or len(field.sample_shape) != 1):
        return []
    with suppress(NotDirect):
        list_chunks(file[field.dataset])  # raises FileError for chunks on which HDF5 would crash
    with errors_as(FileError, f"{printable(path)}: {field.dataset!r} cannot be read"):
        return [bytes(file[field.dataset][row])[:HEAD_BYTES] for row in (0, num_rows - 1)]


def _decoded(stored: Any, shape: Shape, decoder: FrameDecoder) -> EncodedField:
    """Describe the pixels of images. The grid has the dataset's chunks if HDF5 compresses them, too."""
    num_rows, grid = stored.grid.shape[0], stored.grid
    is_filtered = isinstance(stored, Field) and grid.filtered
    pixels = ChunkGrid((num_rows, *shape), (grid.chunks[0], *shape) if is_filtered else None, 1, is_filtered)
    place = stored.name, stored.dataset.strip("/")
    return EncodedField(*place, pixels, np.dtype(np.uint8), "NHWC", stored=stored, decoder=decoder)


def _first_row(file: h5py.File, path: Path, field: VlenField) -> bytes:
    """Read the beginning of the first row of arrays of variable length, without HDF5."""
    heap, pointer = open_heap(file, path, field.dataset), np.frombuffer(field.first, POINTER)
    length = int(pointer["length"][0])
    place = int(find_in_heap(heap, pointer, np.array([length]))[0])
    return heap.read(place - heap.base, min(length, HEAD_BYTES)) if length else b""


class EncodedBytes(ByteReader):
    """A byte-range reader of images, which decodes an image once per call of `tasks`, even if its row is repeated.

    ``stored`` is the byte reader of the rows, and ``sizes``, (n,) int64, has their lengths in bytes.
    """

    is_plain = True  # although images are compressed, because HDF5's cache would not help

    def __init__(self, path: Path, field: EncodedField, stored: ByteReader, sizes: np.ndarray) -> None:
        self.name, self.stored, self.sizes, self.chunks = field.name, stored, sizes, stored.chunks
        self._field, self._where = field, f"{printable(path)}: {field.dataset!r}"
        self.row_bytes, self.num_bytes = field.grid.sample_bytes, len(sizes) * field.grid.sample_bytes

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> Iterator[ReadTask]:
        """Yield tasks as `ByteReader.tasks` does, for rows that are ascending and possibly repeated."""
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        ends = np.cumsum(self.sizes[rows[firsts]] + self.row_bytes)
        cuts = np.flatnonzero(np.diff(ends // TASK_BYTES)) + 1
        for start, stop in pairwise([0, *firsts[cuts].tolist(), len(rows)]):
            yield partial(self._decode, rows[start:stop], destinations[start:stop], out)

    def _decode(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray, descriptor: int) -> None:
        is_first = np.diff(rows, prepend=-1) != 0
        distinct, targets = rows[is_first], places[is_first]
        data, bounds = self._read(distinct, descriptor)
        shape: Any = self._field.sample_shape
        problem = self._field.decoder.decode(data, bounds, shape, out, targets)
        if problem is not None:
            raise FileError(f"{self._where}, frame {distinct[problem[0]]}: {problem[1]}")
        if len(distinct) < len(rows):
            sources = targets[np.cumsum(is_first) - 1]
            out[places[~is_first]] = out[sources[~is_first]]

    def _read(self, rows: np.ndarray, descriptor: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of images, (k,) uint8, and the index at which each image begins and ends: (n, 2) int64."""
        sizes = self.sizes[rows]
        ends, out = np.cumsum(sizes), None
        if isinstance(self._field.stored, VlenField):
            if (wrong := (sizes > self.row_bytes + SLACK_BYTES) | (sizes == 0)).any():
                row, size = rows[wrong][0], sizes[wrong][0]
                raise FileError(f"{self._where}, frame {row}: has {size} bytes, so it is damaged or was never written")
            data = np.empty(int(ends[-1]), np.uint8)
            out = CsrBuffers(np.append(0, ends), data, None)
        else:
            data = np.empty((len(rows), self.sizes[0]), np.uint8)
        for task in self.stored.tasks(rows, np.arange(len(rows)), data if out is None else out):
            task(descriptor)
        return data.reshape(-1), np.stack([ends - sizes, ends], axis=1)

    def read_all(self, descriptor: Any) -> np.ndarray:
        values, rows = np.empty((len(self.sizes), self.row_bytes), np.uint8), np.arange(len(self.sizes))
        for task in self.tasks(rows, rows, values):
            task(descriptor)
        return values.reshape(self._field.grid.shape)

    def bytes_read(self, rows: np.ndarray) -> int:
        return len(rows) * self.row_bytes

    def scratch_bytes(self, num_threads: int) -> int:
        own = TASK_BYTES + int(self.sizes.max(initial=0))
        return num_threads * own + self.stored.scratch_bytes(num_threads)


def encoded_bytes(path: Path, file: h5py.File, field: EncodedField, sums: Sums) -> EncodedBytes:
    """Return the byte reader of a field of images. Raises NotDirect if only HDF5 can read its rows."""
    if isinstance(field.stored, VlenField):
        arrays = VlenBytes(path, file, field.stored)
        return EncodedBytes(path, field, arrays, np.diff(arrays.indptr))
    rows = direct_field(path, file, field.stored, sums)
    return EncodedBytes(path, field, rows, np.full(field.grid.shape[0], field.stored.grid.sample_bytes))


class EncodedHandle(OpenFile):
    """An open dataset of images. Raises UnsupportedError if only HDF5 can read its rows."""

    def __init__(self, path: Path, file: h5py.File, field: EncodedField, sums: Sums) -> None:
        super().__init__(file)
        self.id = file[field.dataset].id
        try:
            self._bytes = encoded_bytes(path, file, field, sums)
        except NotDirect as error:
            raise UnsupportedError(f"{printable(path)}: {field.dataset!r} has images, but {error}: {REMEDY}") from None

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read and decode rows, in any order and possibly repeated."""
        order = np.argsort(rows, kind="stable")
        for task in self._bytes.tasks(rows[order], order, out.reshape(len(rows), -1)) if len(rows) else ():
            task(descriptor_of(self._file))
