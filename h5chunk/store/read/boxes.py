"""Read boxes of volumes by byte ranges. Each chunk is read and decoded once for all patches that are read together."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5chunk.native import available, copy_boxes
from h5chunk.store.hdf5.chunk_table import NotDirect, check_bytes, list_chunks
from h5chunk.store.hdf5.codecs import scratch
from h5chunk.store.hdf5.ranges import MAX_VECTORS, PART_BYTES, ReadTask, VectorTask, read_jobs, vector_tasks
from h5chunk.store.read.checksums import NO_SUMS, ChunkChecks, Sums
from h5chunk.store.read.direct import KEPT_BYTES, ByteReader, DecodedChunks

GAP_BYTES = 4 << 10  # smaller gaps between two rows are read, because skipping them would need another system call

SLAB_BYTES = 8 << 20  # limit on the bytes of a chunk without filters that are read at once for several patches
BLOCK_BYTES = 4 << 20  # bytes of the blocks in which a contiguous dataset is read, as if they were its chunks


class Parts(NamedTuple):
    """Parts of patches, sorted by chunk.

    A row of ``table``, (n, 1 + 3 * axes) int64, has the index of the patch, and along each axis the first index in the
    chunk, the first index in the patch, and the length.
    """

    chunks: np.ndarray
    table: np.ndarray

    def by_chunk(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each chunk that has parts, and its rows of the table."""
        firsts = np.flatnonzero(np.diff(self.chunks, prepend=-1))
        for first, end in pairwise([*firsts.tolist(), len(self.chunks)]):
            yield int(self.chunks[first]), self.table[first:end]


class VolumeBytes:
    """The chunks of one dataset of a volume. A contiguous dataset is divided into blocks instead."""

    def __init__(
        self, path: Path, name: str, file: int, dataset: h5py.Dataset, field: Any, sums: Sums = NO_SUMS
    ) -> None:
        check_bytes(dataset, field.dtype)
        self.file, self.shape, self.dtype = file, dataset.shape, dataset.dtype.newbyteorder("=")
        self.decoded: DecodedChunks | None = None
        if dataset.id.get_create_plist().get_nfilters():
            self.decoded = DecodedChunks(path, name, dataset, sums, None, KEPT_BYTES)
            table = self.decoded.table
        else:
            table = list_chunks(dataset)
            if (table.offsets < 0).any():
                raise NotDirect("parts of it were never written")
            if (table.sizes != math.prod(table.chunk_shape) * self.dtype.itemsize).any():
                raise NotDirect("the size of its chunks does not follow from their type and shape")
        self._checks = ChunkChecks(path, name, table, sums[name]) if name in sums and self.decoded is None else None
        self._is_chunked = dataset.chunks is not None
        self.chunk, self._offsets = np.array(table.chunk_shape), table.offsets
        if not self._is_chunked:
            self._divide(int(table.offsets[0]))
        self.grid = -(-np.array(self.shape) // self.chunk)
        self.chunk_bytes = int(self.chunk.prod()) * self.dtype.itemsize
        self.where: Callable[[int], str] = lambda offset: f"{path}: field {name!r}, chunk {table.chunk_at(offset)}"

    def _divide(self, offset: int) -> None:
        """Divide a contiguous dataset at ``offset`` into blocks, each of which is contiguous, too."""
        steps = self.dtype.itemsize * np.cumprod([1, *self.shape[:0:-1]])[::-1]
        for axis in range(len(self.shape) - 1):
            self.chunk[axis] = np.clip(BLOCK_BYTES // steps[axis], 1, self.shape[axis])
            if self.chunk[axis] > 1:
                break
        grid = -(-np.array(self.shape) // self.chunk)
        firsts = np.stack(np.unravel_index(np.arange(grid.prod()), tuple(grid)), axis=1) * self.chunk
        self._offsets = offset + firsts @ steps

    def check(self, descriptor: int, chunks: np.ndarray) -> None:
        """Compare chunks without filters with their checksums. A contiguous dataset has one checksum."""
        if self._checks is not None:
            self._checks.check(descriptor, np.unique(chunks) if self._is_chunked else np.zeros(1, np.int64))

    def parts(self, patches: np.ndarray, low: np.ndarray, high: np.ndarray) -> Parts:
        """Return the parts of boxes in each chunk. Boxes extend from ``low`` to ``high``, (n, axes) each."""
        begin, end = np.maximum(low, 0), np.minimum(high, self.shape)
        first = begin // self.chunk
        counts = (end - 1) // self.chunk - first + 1
        totals = counts.prod(axis=1)
        box = np.repeat(np.arange(len(low)), totals)
        left, chunks = np.arange(len(box)) - np.repeat(np.cumsum(totals) - totals, totals), np.empty_like(first[box])
        for axis in reversed(range(len(self.shape))):
            left, chunks[:, axis] = np.divmod(left, counts[box, axis])
        chunks += first[box]
        numbers = np.ravel_multi_index(tuple(chunks.T), tuple(self.grid))
        start, stop = np.maximum(begin[box], chunks * self.chunk), np.minimum(end[box], (chunks + 1) * self.chunk)
        table = np.hstack([patches[box, None], start - chunks * self.chunk, start - low[box], stop - start])
        order = np.argsort(numbers, kind="stable")
        return Parts(numbers[order], np.ascontiguousarray(table[order]))

    def sizes(self, table: np.ndarray) -> np.ndarray:
        """Return the size of each part in bytes: (n,) int64."""
        sizes: np.ndarray = table[:, 1 + 2 * len(self.shape) :].prod(axis=1) * self.dtype.itemsize
        return sizes

    def read_parts(self, descriptor: int, chunk: int, table: np.ndarray, out: np.ndarray, local: Any) -> None:
        """Read parts of a chunk without filters.

        All parts are read in one slab of the chunk if that is less work than reading them one by one.
        """
        first, length = table[:, 1 : 1 + len(self.shape)], table[:, 1 + 2 * len(self.shape) :]
        low, shape = first.min(axis=0), (first + length).max(axis=0)
        low[-1], shape[-1] = 0, self.chunk[-1]
        shape -= low
        num_bytes, item = int(shape.prod()) * self.dtype.itemsize, self.dtype.itemsize
        runs = np.minimum(length[:, -1] * item + GAP_BYTES, shape[-1] * item)
        if num_bytes > SLAB_BYTES or num_bytes + self.sizes(table).sum() > (length[:, :-1].prod(axis=1) * runs).sum():
            for row in table.tolist():
                self._vectors(chunk, row, out[row[0]])(descriptor)
            return
        slab = scratch(local, "slab", num_bytes)
        axis, steps = len(shape) - 1, item * np.cumprod([1, *self.chunk[:0:-1]])[::-1]
        while axis > 0 and shape[axis] == self.chunk[axis]:
            axis -= 1
        run = int(shape[axis:].prod()) * item
        offsets = np.array(self._offsets[chunk] + low @ steps)
        for step, count in zip(steps[:axis], shape[:axis], strict=True):
            offsets = np.add.outer(offsets, np.arange(count) * step)
        offsets = offsets.reshape(-1)
        starts = np.arange(len(offsets)) * run
        for task in vector_tasks(offsets, np.full(len(offsets), run), starts, slab, self.where):
            task(descriptor)
        moved = table.copy()
        moved[:, 1 : 1 + len(low)] -= low
        copy_parts(slab.view(self.dtype).reshape(shape), moved, out)

    def _vectors(self, chunk: int, row: list[int], out: np.ndarray) -> VectorTask:
        """Return the task that reads one part from a chunk without filters to ``out``, the memory of the patch."""
        axes, run = len(self.shape), self.dtype.itemsize
        first, place, length = row[1 : 1 + axes], row[1 + axes : 1 + 2 * axes], row[1 + 2 * axes :]
        while axes > 1 and length[axes - 1] == self.chunk[axes - 1] == out.shape[axes - 1]:
            axes -= 1
            run *= out.shape[axes]
        steps, offset = [run], run * first[axes - 1]  # in the chunk
        strides, address = [run], out.ctypes.data + run * place[axes - 1]
        for axis in reversed(range(axes - 1)):
            steps.insert(0, steps[0] * int(self.chunk[axis + 1]))
            strides.insert(0, strides[0] * out.shape[axis + 1])
            offset, address = offset + steps[0] * first[axis], address + strides[0] * place[axis]
        offsets = _sums(offset + int(self._offsets[chunk]), steps[:-1], length[: axes - 1])
        addresses = _sums(address, strides[:-1], length[: axes - 1])
        run *= length[axes - 1]
        together = length[axes - 2] if axes > 1 and 0 <= steps[axes - 2] - run <= GAP_BYTES else 1
        gap = steps[axes - 2] - run if together > 1 else 0
        return _rows_task(offsets, addresses, run, gap, min(together, MAX_VECTORS // 2), out, self.where)


def copy_parts(values: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """Copy parts of an array, as described by `Parts`, to patches, (n, *shape) of the same dtype."""
    if available():
        copy_boxes(values, table, out)
        return
    axes = values.ndim
    for patch, *row in table.tolist():
        first, place, length = row[:axes], row[axes : 2 * axes], row[2 * axes :]
        inside, where = (tuple(map(slice, begin, map(add, begin, length))) for begin in (first, place))
        out[patch][where] = values[inside]


def _sums(start: int, steps: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """Return ``start`` plus multiples of all ``steps``, from 0 to below ``counts``: (n, counts[-1]), in C order."""
    total = np.array(start)
    for step, count in zip(steps, counts, strict=True):
        total = np.add.outer(total, np.arange(count) * step)
    return total.reshape(-1, counts[-1] if counts else 1)


def _rows_task(
    offsets: np.ndarray,
    addresses: np.ndarray,
    run: int,
    gap: int,
    together: int,
    out: np.ndarray,
    where: Callable[[int], str],
) -> VectorTask:
    """Return a task that reads runs of bytes. One system call reads ``together`` runs and the gaps between them."""
    unused = np.empty(max(1, gap), np.uint8)
    vectors = np.empty((*offsets.shape, 2, 2), np.uintp)
    vectors[..., 0, 0], vectors[..., 0, 1] = addresses, run
    vectors[..., 1, 0], vectors[..., 1, 1] = unused.ctypes.data, gap
    firsts = np.arange(0, offsets.shape[1], together)
    counts = np.minimum(together, offsets.shape[1] - firsts)
    first = (np.arange(offsets.shape[0])[:, None] * offsets.shape[1] + firsts).ravel() * 2
    count = np.tile(counts * 2 - 1, offsets.shape[0])
    sizes = np.tile(counts * run + (counts - 1) * gap, offsets.shape[0])
    flat = vectors.reshape(-1, 2)
    return VectorTask(read_jobs(flat, first, count, offsets[:, firsts].ravel(), sizes), flat, (out, unused), where)


class PatchBytes(ByteReader):
    """A byte-range reader of the patches of one field of a `h5chunk.store.read.volumes.PatchReader`."""

    is_plain = True  # although volumes may be compressed, because HDF5's cache would not help
    num_bytes = 1 << 62  # never kept in memory, because each epoch has different patches

    def __init__(self, reader: Any, name: str, volumes: Sequence[VolumeBytes]) -> None:
        self.name, self._reader, self._field, self._volumes = name, reader, reader.volume_fields[name], volumes
        self._shape = self._field.box_shape()
        self.row_bytes = math.prod(self._shape) * self._field.dtype.itemsize
        self.chunks = [volume.decoded for volume in volumes if volume.decoded is not None]
        self.forget()

    def forget(self) -> None:
        """Free the memory for kept chunks, which all volumes share."""
        self._local = threading.local()
        for chunks in self.chunks:
            chunks.forget()
            chunks.share_kept(self.chunks[0])
            chunks.local = self.chunks[0].local

    def scratch_bytes(self, num_threads: int) -> int:
        slab = SLAB_BYTES if len(self.chunks) < len(self._volumes) else 0
        return max(num_threads * slab, super().scratch_bytes(num_threads))

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> Iterator[ReadTask]:
        """Yield tasks as `ByteReader.tasks` does. Rows may be in any order.

        Decoded chunks are cached if fewer patches are requested than a cell has.
        """
        target = out.view(self._field.dtype).reshape(len(out), *self._shape)
        volumes, starts = self._reader.plan.boxes(rows)
        low, high = self._field.boxes(starts)
        keeps = len(rows) < self._reader.chunk_samples
        padding = _Padding(self._field, volumes, low, high, destinations, target)
        tasks = []
        for number in np.unique(volumes).tolist():
            own, volume = volumes == number, self._volumes[number]
            parts = volume.parts(destinations[own], low[own], high[own])
            sizes = volume.sizes(parts.table)
            if volume.decoded:
                sizes = np.where(np.diff(parts.chunks, prepend=-1) > 0, volume.chunk_bytes, 0)
            numbers = np.cumsum(sizes) // PART_BYTES
            begins_chunk = np.diff(parts.chunks, prepend=-1) > 0
            firsts = np.flatnonzero(begins_chunk)
            firsts = firsts[np.diff(numbers[firsts], prepend=-1) > 0]
            for first, end in pairwise([*firsts.tolist(), len(parts.chunks)]):
                some = Parts(*(each[first:end] for each in parts))
                tasks.append(BoxTask(volume, some, target, padding, keeps, self._local))
        padding.num_left = len(tasks)
        yield from tasks

    def bytes_read(self, rows: np.ndarray) -> int:
        """Return the number of bytes that are read, or decoded, for these rows. A decoded chunk counts once."""
        volumes, starts = self._reader.plan.boxes(rows)
        low, high = self._field.boxes(starts)
        total = 0
        for number in np.unique(volumes).tolist():
            own, volume = volumes == number, self._volumes[number]
            parts = volume.parts(rows[own], low[own], high[own])
            if volume.decoded:
                total += len(np.unique(parts.chunks)) * volume.chunk_bytes
            else:
                total += int(volume.sizes(parts.table).sum())
        return total


class BoxTask:
    """A task that reads those parts of patches that are in some chunks of one volume."""

    def __init__(
        self, volume: VolumeBytes, parts: Parts, target: np.ndarray, padding: _Padding, keeps: bool, local: Any
    ) -> None:
        self._volume, self._parts, self._target, self._padding = volume, parts, target, padding
        self._keeps, self._local = keeps, local

    def __call__(self, opened: Any) -> None:
        volume, target = self._volume, self._target
        several = hasattr(opened, "descriptor_of")
        descriptor = opened.descriptor_of(volume.file) if several else opened
        volume.check(descriptor, self._parts.chunks)
        for chunk, table in self._parts.by_chunk():
            if volume.decoded is None:
                volume.read_parts(descriptor, chunk, table, target, self._local)
                continue
            values = volume.decoded.read(descriptor, chunk, is_whole=not self._keeps)
            copy_parts(values.view(volume.dtype).reshape(volume.chunk), table, target)
        if several:
            opened.check(volume.file)
        self._padding.end_task()


class _Padding:
    """Padding for the parts of patches that are outside of volumes. It is filled in when the last task ends."""

    def __init__(
        self,
        field: Any,
        volumes: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
        destinations: np.ndarray,
        target: np.ndarray,
    ) -> None:
        self._field, self._target, self._lock, self.num_left = field, target, threading.Lock(), 0
        shapes = np.array([grid.shape for grid in field.grids])[volumes]
        where = np.flatnonzero(((low < 0) | (high > shapes)).any(axis=1))
        self._patches = [(int(destinations[each]), low[each], shapes[each]) for each in where]

    def end_task(self) -> None:
        """Count a task as done. After the last task, fill the padding of all patches."""
        with self._lock:
            self.num_left -= 1
            if self.num_left:
                return
        for patch, low, shape in self._patches:
            pad(self._target[patch], low, shape, self._field.padding)


def pad(patch: np.ndarray, low: np.ndarray, shape: np.ndarray, padding: Any) -> None:
    """Fill the part of a patch that is outside of its volume. ``shape`` is the shape of the volume.

    ``low`` has the first index of the patch along each axis. ``padding`` is edge, reflect, or a number.
    """
    for axis, (first, size) in enumerate(zip(low.tolist(), shape.tolist(), strict=True)):
        index = np.arange(first, first + patch.shape[axis])
        outside = np.flatnonzero((index < 0) | (index >= size))
        if not len(outside):
            continue
        view = np.moveaxis(patch, axis, 0)
        if padding not in ("edge", "reflect"):
            view[outside] = padding
            continue
        source = np.clip(index[outside], 0, size - 1)
        if padding == "reflect":
            period = max(1, 2 * (size - 1))
            source = index[outside] % period
            source = np.minimum(source, period - source) if size > 1 else source * 0
        view[outside] = view[source - first]
