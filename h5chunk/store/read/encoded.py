"""Read frames that are stored as JPEG or PNG images, one in each row of a dataset, and decode them.

The rows are arrays of bytes of variable length, or are padded with zeros to the same length. Both are recognised by
their first bytes. The functions that decode images are passed in as a `FrameDecoder`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, SampleError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.store.format.header import Header
from h5chunk.store.hdf5.chunk_table import NotDirect
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import descriptor_of, errors_as
from h5chunk.store.hdf5.ranges import ReadTask
from h5chunk.store.hdf5.strings import FileBytes, find_in_heap
from h5chunk.store.read.checksums import Sums
from h5chunk.store.read.csr import CsrBuffers, VlenBytes
from h5chunk.store.read.direct import ByteReader, direct_field
from h5chunk.store.read.fields import Field, FrameDataset, FrameDecoder, Shape, describe_field
from h5chunk.store.read.ragged import FlatSamples, RaggedField
from h5chunk.store.read.vlen import VlenField, read_pointers, read_vlen_indptr

MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # the first bytes of JPEG and PNG images
HEAD_BYTES = 1 << 20  # bytes of the first image in which its header is looked for
TASK_BYTES = 2 << 20  # bytes of images and pixels that a thread handles at a time
SLACK_BYTES = 64 << 10  # an image may have this many bytes more than its pixels

ReadRows = Callable[[np.ndarray, Any], None]  # reads rows into an array, or into `CsrBuffers` if their lengths vary


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

    Rows of equal length are images if the first and the last row begin like one. Raises FileError if the first image is
    damaged or not supported.
    """
    if not isinstance(dataset, FrameDataset):
        return describe_field(file, path, name, dataset, header, guard)
    field = describe_field(file, path, name, dataset.dataset, header, guard)
    heads = _heads(file, path, field)
    if not heads or not all(head.startswith(MAGIC) for head in heads):
        return field
    where = f"{printable(path)}: {field.dataset.strip('/')!r}, frame 0"
    try:
        shape = dataset.decoder.shape_of(np.frombuffer(heads[0], np.uint8))
    except SampleError as error:
        raise FileError(f"{where}: {error}") from None
    return _decoded(field, shape, dataset.decoder)


def _heads(file: h5py.File, path: Path, field: Field | RaggedField) -> list[bytes]:
    """Read the beginning of the first row and, for rows of one length, of the last row. Empty if there are no bytes."""
    num_rows = field.grid.shape[0]
    if not num_rows:
        return []
    if isinstance(field, VlenField):
        return [_first_row(file, path, field)] if field.value_dtype == np.uint8 else []
    is_text = field.dtype.kind == "S" and not field.sample_shape
    if not is_text and (field.dtype != np.uint8 or len(field.sample_shape) != 1):
        return []
    with errors_as(FileError, f"{printable(path)}: {field.dataset!r} cannot be read"):
        return [bytes(file[field.dataset][row])[:HEAD_BYTES] for row in (0, num_rows - 1)]


def _decoded(stored: Any, shape: Shape, decoder: FrameDecoder) -> EncodedField:
    """Describe the pixels of images. Rows that are compressed again keep their chunks, which are read completely."""
    num_rows, grid = stored.grid.shape[0], stored.grid
    is_filtered = isinstance(stored, Field) and grid.filtered
    pixels = ChunkGrid((num_rows, *shape), (grid.chunks[0], *shape) if is_filtered else None, 1, is_filtered)
    place = stored.name, stored.dataset.strip("/")
    return EncodedField(*place, pixels, np.dtype(np.uint8), "NHWC", stored=stored, decoder=decoder)


def _first_row(file: h5py.File, path: Path, field: VlenField) -> bytes:
    """Read the beginning of the first row of arrays of variable length, without HDF5."""
    where = f"{printable(path)}: {field.dataset!r}"
    descriptor = descriptor_of(file)
    heap = FileBytes(
        descriptor,
        os.fstat(descriptor).st_size,
        lambda problem: FileError(f"{where}: {problem}"),
        file.userblock_size,
    )
    first = read_pointers(file[field.dataset], path)[:1]
    length = int(first["length"][0])
    place = int(find_in_heap(heap, first, np.array([length]))[0])
    return heap.read(place - heap.base, min(length, HEAD_BYTES)) if length else b""


class FrameRows:
    """The images of one dataset. ``sizes``, (n,) int64, has their lengths in bytes."""

    def __init__(self, path: Path, field: EncodedField, sizes: np.ndarray) -> None:
        self.sizes, self._field = sizes, field
        self.shape: Any = field.sample_shape
        self.frame_bytes = field.grid.sample_bytes
        self._where = f"{printable(path)}: {field.dataset!r}"

    def parts(self, rows: np.ndarray) -> Iterator[slice]:
        """Divide rows, ascending and possibly repeated, into parts that threads can decode at the same time."""
        if not len(rows):
            return
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        ends = np.cumsum(self.sizes[rows[firsts]] + self.frame_bytes)
        cuts = np.flatnonzero(np.diff(ends // TASK_BYTES)) + 1
        for start, stop in pairwise([0, *firsts[cuts].tolist(), len(rows)]):
            yield slice(start, stop)

    def decode(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray, read: ReadRows) -> None:
        """Decode row ``rows[i]`` to ``out[places[i]]``, (m, H * W * C) uint8. Equal rows must be adjacent.

        Raises FileError if an image is damaged, or has another shape than the first image.
        """
        is_first = np.diff(rows, prepend=-1) != 0
        distinct, targets = rows[is_first], places[is_first]
        data, bounds = self._read(distinct, read)
        problem = self._field.decoder.decode(data, bounds, self.shape, out, targets)
        if problem is not None:
            raise FileError(f"{self._where}, frame {distinct[problem[0]]}: {problem[1]}")
        if len(distinct) < len(rows):
            sources = targets[np.cumsum(is_first) - 1]
            out[places[~is_first]] = out[sources[~is_first]]

    def _read(self, rows: np.ndarray, read: ReadRows) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of images, (k,) uint8, and where each of them begins and ends: (n, 2) int64."""
        sizes, limit = self.sizes[rows], self.frame_bytes + SLACK_BYTES
        bounds = np.stack([np.cumsum(sizes) - sizes, np.cumsum(sizes)], axis=1)
        if isinstance(self._field.stored, VlenField):
            if (wrong := (sizes > limit) | (sizes == 0)).any():
                row, size = rows[wrong][0], sizes[wrong][0]
                raise FileError(f"{self._where}, frame {row}: has {size} bytes, so it is damaged or was never written")
            data = np.empty(int(sizes.sum()), np.uint8)
            read(rows, CsrBuffers(np.append(0, bounds[:, 1]), data, None))
            return data, bounds
        stored = np.empty((len(rows), self.sizes[0]), np.uint8)
        read(rows, stored)
        return stored.reshape(-1), bounds


class EncodedBytes(ByteReader):
    """A byte-range reader of images. Each call of `tasks` decodes an image once, even if its row is repeated.

    ``stored`` is the byte reader of the rows.
    """

    is_plain = True  # although images are compressed, because HDF5's cache would not help

    def __init__(self, name: str, frames: FrameRows, stored: ByteReader) -> None:
        self.name, self.frames, self.stored, self.chunks = name, frames, stored, stored.chunks
        self.row_bytes, self.num_bytes = frames.frame_bytes, len(frames.sizes) * frames.frame_bytes

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> Iterator[ReadTask]:
        for part in self.frames.parts(rows):
            yield DecodeTask(self, rows[part], destinations[part], out)

    def read_all(self, descriptor: Any) -> np.ndarray:
        values = np.empty((len(self.frames.sizes), self.row_bytes), np.uint8)
        rows = np.arange(len(values))
        for task in self.tasks(rows, rows, values):
            task(descriptor)
        return values.reshape(-1, *self.frames.shape)

    def bytes_read(self, rows: np.ndarray) -> int:
        return len(rows) * self.row_bytes

    def scratch_bytes(self, num_threads: int) -> int:
        own = TASK_BYTES + int(self.frames.sizes.max(initial=0))
        return num_threads * own + self.stored.scratch_bytes(num_threads)


class DecodeTask:
    """A task that reads and decodes images."""

    def __init__(self, field: EncodedBytes, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        self._field, self._rows, self._places, self._out = field, rows, places, out

    def __call__(self, descriptor: int) -> None:
        def read(rows: np.ndarray, out: Any) -> None:
            for task in self._field.stored.tasks(rows, np.arange(len(rows)), out):
                task(descriptor)

        self._field.frames.decode(self._rows, self._places, self._out, read)


def field_bytes(path: Path, file: h5py.File, field: Field, sums: Sums) -> ByteReader:
    """Return the byte reader of a field that may be encoded. Raises NotDirect if only HDF5 can read its rows."""
    if not isinstance(field, EncodedField):
        if field.dtype.kind == "S":
            raise NotDirect("it has strings")
        return direct_field(path, file, field, sums)
    stored, sizes = field.stored, row_sizes(path, file, field)
    if isinstance(stored, VlenField):
        reader: ByteReader = VlenBytes(path, file, stored, np.append(0, np.cumsum(sizes)))
    else:
        reader = direct_field(path, file, stored, sums)
    return EncodedBytes(field.name, FrameRows(path, field, sizes), reader)


def row_sizes(path: Path, file: h5py.File, field: EncodedField) -> np.ndarray:
    """Return the length of each row in bytes: (n,) int64."""
    stored = field.stored
    if isinstance(stored, VlenField):
        return np.diff(read_vlen_indptr(file[stored.dataset], path, 1))
    return np.full(field.grid.shape[0], stored.grid.sample_bytes)


class EncodedHandle:
    """An open dataset of images that is read through HDF5. ``handle`` is the open dataset of their rows."""

    def __init__(self, path: Path, field: EncodedField, sizes: np.ndarray, handle: Any) -> None:
        self.id, self.lock, self._handle = handle.id, threading.Lock(), handle
        self._frames, self._dtype = FrameRows(path, field, sizes), field.stored.dtype

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read and decode rows, in any order and possibly repeated."""
        order = np.argsort(rows, kind="stable")
        target = out.reshape(len(rows), -1)
        for part in self._frames.parts(rows[order]):
            self._frames.decode(rows[order[part]], order[part], target, self._read)

    def _read(self, rows: np.ndarray, out: Any) -> None:
        if not isinstance(out, CsrBuffers) and self._dtype.kind == "S":
            out = out.view(self._dtype)[:, 0]
        self._handle.read(rows, out)
