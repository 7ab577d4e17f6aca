"""Read boxes of volumes by byte ranges: each chunk is read and decoded once for all patches that are read together."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.store.hdf5.chunk_table import NotDirect, check_bytes, list_chunks
from h5chunk.store.hdf5.ranges import MAX_VECTORS, PART_BYTES, ReadTask, VectorTask, read_jobs
from h5chunk.store.read.checksums import NO_SUMS
from h5chunk.store.read.direct import KEPT_BYTES, ByteReader, DecodedChunks

GAP_BYTES = 4 << 10  # largest gap between two rows that is read: skipping it would need another system call

# a part of a patch in a chunk: number of the volume, chunk, patch, and its slices of the chunk and of the patch
Part = tuple[int, int, int, tuple[slice, ...], tuple[slice, ...]]


class VolumeBytes:
    """The chunks of one dataset of a volume; a contiguous dataset is one chunk."""

    def __init__(self, path: Path, name: str, file: int, dataset: h5py.Dataset, field: Any) -> None:
        check_bytes(dataset, field.dtype)
        self.file, self.shape, self.dtype = file, dataset.shape, dataset.dtype.newbyteorder("=")
        self.decoded: DecodedChunks | None = None
        if dataset.id.get_create_plist().get_nfilters():
            self.decoded = DecodedChunks(path, name, dataset, NO_SUMS, None, KEPT_BYTES)
            table = self.decoded.table
        else:
            table = list_chunks(dataset)
            if (table.offsets < 0).any():
                raise NotDirect("parts of it were never written")
            if (table.sizes != math.prod(table.chunk_shape) * self.dtype.itemsize).any():
                raise NotDirect("the size of its chunks does not follow from their type and shape")
        self.table, self.chunk = table, np.array(table.chunk_shape)
        self.grid = -(-np.array(self.shape) // self.chunk)
        self.chunk_bytes = int(self.chunk.prod()) * self.dtype.itemsize
        self.where: Callable[[int], str] = lambda offset: f"{path}: field {name!r}, chunk {table.chunk_at(offset)}"

    def parts(self, number: int, patches: np.ndarray, low: np.ndarray, high: np.ndarray) -> Iterator[Part]:
        """Yield the parts of boxes, from ``low`` to ``high``, (n, axes), in each chunk, chunk by chunk."""
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
        columns = [start - chunks * self.chunk, stop - chunks * self.chunk, start - low[box], stop - low[box]]
        order = np.argsort(numbers, kind="stable")
        rows = (column[order].tolist() for column in (numbers, patches[box], *columns))
        for chunk, patch, *bounds in zip(*rows, strict=True):
            yield number, chunk, patch, tuple(map(slice, *bounds[:2])), tuple(map(slice, *bounds[2:]))

    def vectors(self, part: Part, out: np.ndarray) -> VectorTask:
        """Return the task that reads a part of a patch from a chunk without filters to ``out``, the patch."""
        _, chunk, _, inside, place = part
        axes, run = len(inside), self.dtype.itemsize
        while axes > 1 and _length(inside[axes - 1]) == self.chunk[axes - 1] == out.shape[axes - 1]:
            axes -= 1
            run *= out.shape[axes]
        steps, offset = [run], run * inside[axes - 1].start  # in the chunk
        strides, address = [run], out.ctypes.data + run * place[axes - 1].start
        for axis in reversed(range(axes - 1)):
            steps.insert(0, steps[0] * int(self.chunk[axis + 1]))
            strides.insert(0, strides[0] * out.shape[axis + 1])
            offset, address = offset + steps[0] * inside[axis].start, address + strides[0] * place[axis].start
        offsets = _sums(offset + int(self.table.offsets[chunk]), steps[:-1], inside[: axes - 1])
        addresses = _sums(address, strides[:-1], inside[: axes - 1])
        run *= _length(inside[axes - 1])
        together = _length(inside[axes - 2]) if axes > 1 and 0 <= steps[axes - 2] - run <= GAP_BYTES else 1
        gap = steps[axes - 2] - run if together > 1 else 0
        return _rows_task(offsets, addresses, run, gap, min(together, MAX_VECTORS // 2), out, self.where)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _sums(start: int, steps: Sequence[int], parts: Sequence[slice]) -> np.ndarray:
    total = np.array(start)
    for step, part in zip(steps, parts, strict=True):
        total = np.add.outer(total, np.arange(_length(part)) * step)
    return total.reshape(-1, _length(parts[-1]) if parts else 1)


def _rows_task(
    offsets: np.ndarray,
    addresses: np.ndarray,
    run: int,
    gap: int,
    together: int,
    out: np.ndarray,
    where: Callable[[int], str],
) -> VectorTask:
    """Return a task that reads runs of bytes, ``together`` of them and the gaps between them with one system call."""
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
    """Read the patches of one field of a `h5chunk.store.read.volumes.PatchReader`."""

    is_plain = True  # in a DataLoader too, because HDF5's cache would not help
    num_bytes = 1 << 62  # never kept in memory, because each epoch has different patches

    def __init__(self, reader: Any, name: str, volumes: Sequence[VolumeBytes]) -> None:
        self.name, self._reader, self._field, self._volumes = name, reader, reader.volume_fields[name], volumes
        self._shape = self._field.box_shape()
        self.row_bytes = math.prod(self._shape) * self._field.dtype.itemsize
        self.chunks = [volume.decoded for volume in volumes if volume.decoded is not None]
        self.forget()

    def forget(self) -> None:
        """See `ByteReader.forget`; all volumes share the memory for kept chunks."""
        for chunks in self.chunks:
            chunks.forget()
            chunks.share_kept(self.chunks[0])
            chunks.local = self.chunks[0].local

    def scratch_bytes(self, num_threads: int) -> int:
        """See `ByteReader.scratch_bytes`."""
        return 3 * num_threads * max((chunks.chunk_bytes for chunks in self.chunks), default=0)

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> Iterator[ReadTask]:
        """See `ByteReader.tasks`; rows may be in any order. Requests smaller than a cell use cached chunks."""
        target = out.view(self._field.dtype).reshape(len(out), *self._shape)
        volumes, starts = self._reader.plan.boxes(rows)
        low, high = self._field.boxes(starts)
        keeps = len(rows) < self._reader.chunk_samples
        padding = _Padding(self._field, volumes, low, high, destinations, target)
        tasks = []
        for number in np.unique(volumes).tolist():
            own, volume = volumes == number, self._volumes[number]
            parts, num_bytes = [], 0
            for _, group in groupby(volume.parts(number, destinations[own], low[own], high[own]), lambda part: part[1]):
                parts += (some := list(group))
                num_bytes += (
                    volume.chunk_bytes if volume.decoded else len(some) * min(self.row_bytes, volume.chunk_bytes)
                )
                if num_bytes >= PART_BYTES:
                    tasks.append(BoxTask(volume, parts, target, padding, keeps))
                    parts, num_bytes = [], 0
            tasks += [BoxTask(volume, parts, target, padding, keeps)] if parts else []
        padding.num_left = len(tasks)
        yield from tasks

    def bytes_read(self, rows: np.ndarray) -> int:
        """See `ByteReader.bytes_read`; complete chunks count, each once."""
        volumes, starts = self._reader.plan.boxes(rows)
        low, high = self._field.boxes(starts)
        total = 0
        for number in np.unique(volumes).tolist():
            own, volume = volumes == number, self._volumes[number]
            parts = volume.parts(number, rows[own], low[own], high[own])
            if volume.decoded:
                total += len({part[1] for part in parts}) * volume.chunk_bytes
            else:
                total += sum(math.prod(map(_length, part[3])) for part in parts) * volume.dtype.itemsize
        return total


class BoxTask:
    """A task that reads parts of patches in the chunks of one volume."""

    def __init__(
        self, volume: VolumeBytes, parts: list[Part], target: np.ndarray, padding: _Padding, keeps: bool
    ) -> None:
        self._volume, self._parts, self._target, self._padding, self._keeps = volume, parts, target, padding, keeps

    def __call__(self, opened: Any) -> None:
        volume, target = self._volume, self._target
        several = hasattr(opened, "descriptor_of")
        descriptor = opened.descriptor_of(volume.file) if several else opened
        for chunk, parts in groupby(self._parts, lambda part: part[1]):
            if volume.decoded is None:
                for part in parts:
                    volume.vectors(part, target[part[2]])(descriptor)
                continue
            values = volume.decoded.read(descriptor, chunk, is_whole=not self._keeps)
            values = values.view(volume.dtype).reshape(volume.chunk)
            for _, _, patch, inside, place in parts:
                target[patch][place] = values[inside]
        if several:
            opened.check(volume.file)
        self._padding.end_task()


class _Padding:
    """Fill the parts of patches that are outside of volumes, when the last task ends."""

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
        """Count a task as done; after the last one, fill all patches."""
        with self._lock:
            self.num_left -= 1
            if self.num_left:
                return
        for patch, low, shape in self._patches:
            pad(self._target[patch], low, shape, self._field.padding)


def pad(patch: np.ndarray, low: np.ndarray, shape: np.ndarray, padding: Any) -> None:
    """Fill the part of a patch, which begins at ``low``, that is outside of a volume of this shape."""
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
