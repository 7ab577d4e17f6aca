"""The kinds of samples. A sample consists of one or several boxes of arrays, which its kind determines.

| kind | arrays | a sample |
| --- | --- | --- |
| `Rows` | a dataset, or one for each file or episode | one index of the first axis, or of another one |
| `Runs` | the entries of all samples, one after the other | a range of the first axis |
| `Elements` | one for each sample | all of it |
| `Texts` | one for each string of variable length | one or several of them |
| `PatchRows` | one for each volume | a box |
| `MappedRows` | those of another field | one of its samples |
| `WindowRows` | those of the frames | several rows |
| `EncodedRows` | those of the encoded images | one row, which is decoded |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import h5py
import numpy as np

from h5chunk.errors import FileError
from h5chunk.native import available
from h5chunk.store.hdf5.ranges import Ranges, ReadTask
from h5chunk.store.read.arrays import SMALL_BYTES, Arrays, Boxes
from h5chunk.store.read.engine import CACHE_BYTES, SLAB_BYTES, BlockCache, BoxReader, EndedTask, items_of
from h5chunk.store.read.open_files import OpenFiles

KEPT_BLOCKS, KEPT_BANDS = 8, 2  # blocks, or bands of blocks that share rows, which the cache should hold
MAX_TASKS = 64  # tasks of Python threads, which would compete for the GIL if they were smaller
TASK_BYTES = 4 << 20  # bytes of encoded images and of their pixels per task of a thread
SLACK_BYTES = 64 << 10  # an encoded image may have this many bytes more than its pixels


@dataclass(frozen=True)
class CsrBuffers:
    """The memory for samples that differ in length: rows of a matrix, images of any size, or other arrays.

    Sample i begins at index ``starts[i]`` of ``indices`` and ``values``, which have the dtypes of the file. ``starts``
    is (num_samples + 1,) int64. ``values`` is None for a matrix without stored values, and for other samples, whose
    values are in ``indices``.
    """

    starts: np.ndarray
    indices: np.ndarray
    values: np.ndarray | None


class BlockRows(NamedTuple):
    """The offset and size of each stored block, and its samples from ``starts`` to ``stops``: (n,) int64 each."""

    offsets: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class FieldReader:
    """Reads one field of samples. It is a base class.

    ``row_bytes`` is the size of a sample in bytes, or exceeds any limit if samples differ in length. ``num_bytes`` is
    that of all ``num_rows`` samples that are stored. ``readers`` read the field's arrays.
    """

    row_bytes = 1 << 62
    num_bytes: int
    num_rows: int
    axis = 0  # the axis of the arrays along which samples are
    is_scattered = False  # whether samples that follow each other are in many blocks, each of which has many samples

    def __init__(self, name: str, arrays: Sequence[Arrays], cache: BlockCache) -> None:
        self.name, self.cache = name, cache
        self.readers = tuple(BoxReader(each, cache) for each in arrays)

    def boxes(self, rows: np.ndarray, destinations: np.ndarray, starts: np.ndarray | None) -> Boxes:
        """Return the boxes of samples in the field's arrays, all of which have the same shapes.

        ``starts`` has the destinations of samples that differ in length, as in `CsrBuffers`.
        """
        raise NotImplementedError

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: Any) -> Iterator[ReadTask]:
        """Yield tasks that read sample ``rows[i]`` to ``out[destinations[i]]``, in any threads.

        Samples may be in any order, and repeated. There must be at least one, and no two destinations may be equal.
        ``out`` is (m, row_bytes) uint8, or `CsrBuffers`, and must live until the last task is done.
        """
        raise NotImplementedError

    @property
    def is_raw(self) -> bool:
        """Whether the stored bytes are those in memory, so that no block is decoded."""
        return all(reader.arrays.is_raw for reader in self.readers)

    @property
    def reads_rows(self) -> bool:
        """Whether the tasks do not depend on the samples, apart from tables of their rows and destinations."""
        return False

    @property
    def rows_field(self) -> FieldReader:
        """The field to whose samples `rows_of` refers: the frames of windows, or else this field."""
        return self

    def rows_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the indices, in the result of `read_all`, of the rows that make up each sample: (n, ...) int64."""
        return samples

    def read_all(self, files: OpenFiles) -> np.ndarray:
        """Read all rows of a field whose samples do not differ in length: (num_rows, row_bytes) uint8."""
        values = np.empty((self.num_rows, self.row_bytes), np.uint8)
        rows = np.arange(len(values))
        for task in self.tasks(rows, rows, values) if values.size else ():
            task(files)
        return values

    def bytes_read(self, rows: np.ndarray) -> int:
        """Return the number of bytes that are read or decoded for these samples. A decoded block counts once."""
        boxes = self.boxes(rows, np.zeros(len(rows), np.int64), np.zeros(len(rows) + 1, np.int64))
        return sum(reader.arrays.bytes_read(reader.arrays.cut(boxes)) for reader in self.readers)

    def block_rows(self, file: int) -> Iterator[BlockRows]:
        """Yield the byte ranges of a file's blocks, and their samples."""
        for reader in self.readers:
            arrays = reader.arrays
            own = np.flatnonzero((arrays.blocks.file == file) & (arrays.blocks.offset >= 0))
            if not len(own):
                continue
            low, high = arrays.bounds(own)
            starts, stops = self.samples_in(arrays.array_of(own), low[:, self.axis], high[:, self.axis])
            yield BlockRows(arrays.blocks.offset[own], arrays.blocks.size[own], starts, stops)

    def samples_in(self, array: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples of which parts are in the indices ``low`` to ``high`` of arrays: first and end."""
        raise NotImplementedError

    @property
    def kept_bytes(self) -> int:
        """The size in bytes of the decoded blocks that should be kept."""
        return max((self._kept_bytes(reader.arrays) for reader in self.readers), default=0)

    def _kept_bytes(self, arrays: Arrays) -> int:
        size = arrays.max_block_bytes
        if arrays.num_axes > 1 and (largest := int(arrays.block_bytes.max(initial=0))) <= SMALL_BYTES:
            size = max(size, largest)  # small raw blocks are read whole, too
        if not size:
            return 0
        grid = np.delete(-(-arrays.shape // arrays.block), self.axis, axis=1)
        across = int(grid.prod(axis=1).max(initial=1))
        return max(KEPT_BLOCKS, KEPT_BANDS * across) * size

    @property
    def thread_bytes(self) -> int:
        """The size in bytes of the buffers of one thread."""
        return 3 * max((reader.arrays.max_block_bytes for reader in self.readers), default=0)


class StoredFile(Protocol):
    """An open file, some fields of which are described as arrays. ``number`` is its number in the data set."""

    path: Path
    file: h5py.File
    source: Any  # the `h5chunk.store.read.source.Source` of the file
    number: int

    def arrays(self, name: str, dataset: str, part: str = "", indptr: np.ndarray | None = None, **how: Any) -> Arrays:
        """Describe a dataset of the field ``name``, or of its ``part``. With ``indptr``, messages name its rows."""


class Part(NamedTuple):
    """What one file, or several parts of it, store of a field: the arrays of samples of one kind.

    ``starts`` is the first sample of each dataset, and ``axis`` the axis of samples. ``sizes`` has the lengths of
    elements in bytes, and ``texts`` names the datasets of encoded images. ``otherwise`` describes the same samples in
    the way of other files that do not store them like this.
    """

    kind: type[FieldReader]
    arrays: tuple[Arrays, ...]
    starts: np.ndarray = np.zeros(1, np.int64)
    step_items: int = 1
    sizes: np.ndarray | None = None
    texts: tuple[str, ...] = ()
    axis: int = 0
    otherwise: Any = None  # a `Part`

    @classmethod
    def joined(cls, parts: Sequence[tuple[int, Part]]) -> Part:
        """Join parts, each of which begins at a sample."""
        filled = [each for each in parts if each[1].arrays] or parts[:1]  # a matrix without entries has no arrays
        if len({part.kind for _, part in filled}) > 1:
            filled = [(start, part.otherwise or part) for start, part in filled]
        own = [part for _, part in filled]
        sizes = [part.sizes for part in own if part.sizes is not None]
        return own[0]._replace(
            arrays=tuple(Arrays.joined(arrays) for arrays in zip(*(part.arrays for part in own), strict=True)),
            starts=np.concatenate([start + part.starts for start, part in filled]),
            sizes=np.concatenate(sizes) if sizes else None,
            texts=tuple(text for part in own for text in part.texts),
        )


class Rows(FieldReader):
    """Samples that are rows of arrays, or the indices of another ``axis`` of all arrays.

    ``starts``, (m,) int64, is the first sample of each array.
    """

    def __init__(
        self, name: str, arrays: Arrays, starts: np.ndarray, num_rows: int, cache: BlockCache, axis: int = 0
    ) -> None:
        super().__init__(name, [arrays], cache)
        self._arrays, self._starts, self.axis = arrays, starts, axis
        self.is_scattered = axis > 0  # the blocks of a contiguous dataset have parts of many samples
        self._sample = arrays.shape[0].copy()  # the shape of a sample, in items
        self._sample[axis] = 1
        self.row_bytes = int(self._sample.prod()) * arrays.item_bytes
        self.num_bytes, self.num_rows = num_rows * self.row_bytes, num_rows

    @property
    def reads_rows(self) -> bool:
        return self.readers[0].reads_rows

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the array of each row, and its index in the array."""
        if len(self._starts) == 1:
            return np.zeros(len(rows), np.int64), rows
        array = np.searchsorted(self._starts, rows, "right") - 1
        return array, rows - self._starts[array]

    def boxes(self, rows: np.ndarray, destinations: np.ndarray, starts: np.ndarray | None) -> Boxes:
        array, index = self._places(rows)
        low = np.zeros((len(rows), self._arrays.num_axes), np.int64)
        high = self._arrays.shape[array] if len(self._arrays) > 1 else np.repeat(self._arrays.shape, len(rows), axis=0)
        low[:, self.axis], high[:, self.axis] = index, index + 1
        return Boxes(array, low, high, destinations, 0)

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: Any) -> Iterator[ReadTask]:
        reader, item = self.readers[0], self._arrays.item_bytes
        is_raw = self._arrays.is_raw and self._arrays.num_axes == 1
        if not self.row_bytes:  # samples without values
            return iter(())
        if isinstance(out, CsrBuffers):  # rows of several arrays that differ in size, one after the other
            starts = out.starts[destinations]
            if is_raw:
                return _together(reader.rows(*self._places(rows), starts // item, out.indices))
            boxes = self.boxes(rows, np.zeros(len(rows), np.int64), None)
            place = np.zeros_like(boxes.low)
            place[:, -1] = starts // item
            shape = *np.ones(self._arrays.num_axes - 1, int), -1
            return _together(reader.boxes(boxes._replace(place=place), items_of(out.indices, item, (1, *shape))))
        if is_raw:
            return _together(reader.rows(*self._places(rows), destinations, out))
        target = items_of(out.reshape(-1), item, (len(out), *self._sample))
        if not self.axis:
            return _together(reader.parts(self._arrays.cut_rows(*self._places(rows), destinations), target))
        return _together(reader.boxes(self.boxes(rows, destinations, None), target))

    def bytes_read(self, rows: np.ndarray) -> int:
        if not self.axis:
            return super().bytes_read(rows)
        blocks = np.unique(self._arrays.cut(self.boxes(rows, rows, None)).block)  # also raw ones are read whole
        return int(self._arrays.items_in(blocks).sum()) * self._arrays.item_bytes

    def samples_in(self, array: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return low + self._starts[array], high + self._starts[array]


class Runs(FieldReader):
    """Samples that are ranges of the first axis of arrays: rows of a CSR matrix, images of any size, other arrays.

    ``indptr``, (n + 1,) int64, is the first index of each sample, counted through all arrays, and ``starts``, (m,)
    int64, is that of each array. A matrix has two arrays in each file: indices and values. ``step_items`` is the number
    of elements of ``out`` for one index.
    """

    def __init__(
        self,
        name: str,
        arrays: Sequence[Arrays],
        indptr: np.ndarray,
        starts: np.ndarray,
        step_items: int,
        cache: BlockCache,
    ) -> None:
        super().__init__(name, arrays, cache)
        self._indptr, self._starts, self._step = indptr, starts, step_items
        self.num_bytes = sum(int(indptr[-1]) * int(each.shape[0, 1:].prod()) * each.item_bytes for each in arrays)

    def boxes(self, rows: np.ndarray, destinations: np.ndarray, starts: np.ndarray | None) -> Boxes:
        raise NotImplementedError  # arrays of indices and values may differ in their axes

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        firsts = self._indptr[rows]
        counts = self._indptr[rows + 1] - firsts
        if len(self._starts) == 1:
            return np.zeros(len(rows), np.int64), firsts, counts
        array = np.searchsorted(self._starts, firsts, "right") - 1
        return array, firsts - self._starts[array], counts

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: CsrBuffers) -> Iterator[ReadTask]:
        """Yield tasks as `FieldReader.tasks` does. ``out.starts`` must be set."""
        array, firsts, counts = self._places(rows)
        nonempty = counts > 0
        places = out.starts[destinations[nonempty]] // self._step
        array, firsts, counts = array[nonempty], firsts[nonempty], counts[nonempty]
        if not len(firsts):
            return
        for reader, target in zip(self.readers, (out.indices, out.values), strict=False):
            if target is None:
                continue
            arrays, memory = reader.arrays, target.view(np.uint8)
            if arrays.is_raw and arrays.num_axes == 1:
                yield from _together(reader.rows(array, firsts, places, memory, counts))
            else:
                items = items_of(memory, arrays.item_bytes, (1, -1, *arrays.shape[0, 1:]))
                yield from _together(reader.boxes(_runs(arrays, array, firsts, counts, places), items))

    def bytes_read(self, rows: np.ndarray) -> int:
        array, firsts, counts = self._places(rows)
        boxes = (_runs(reader.arrays, array, firsts, counts, firsts) for reader in self.readers)
        return sum(
            reader.arrays.bytes_read(reader.arrays.cut(each)) for reader, each in zip(self.readers, boxes, strict=True)
        )

    def samples_in(self, array: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low, high = low + self._starts[array], high + self._starts[array]
        first = np.maximum(np.searchsorted(self._indptr, low, "right") - 1, 0)
        return first, np.maximum(np.searchsorted(self._indptr, high), first + 1)


def _runs(arrays: Arrays, array: np.ndarray, firsts: np.ndarray, counts: np.ndarray, places: np.ndarray) -> Boxes:
    """Return boxes that are ranges of the first axis, all of which go to one element of the output."""
    low, place = np.zeros((2, len(firsts), arrays.num_axes), np.int64)
    high = arrays.shape[array]
    low[:, 0], high[:, 0], place[:, 0] = firsts, firsts + counts, places
    return Boxes(array, low, high, np.zeros(len(firsts), np.int64), place)


class Elements(FieldReader):
    """Samples that are whole arrays: the elements of a dataset of variable length, or datasets.

    ``are_ragged`` is whether they differ in the length of their first axis, and ``step_items`` the number of elements
    of ``out`` for one index along it.
    """

    def __init__(self, name: str, arrays: Arrays, are_ragged: bool, step_items: int, cache: BlockCache) -> None:
        super().__init__(name, [arrays], cache)
        self._arrays, self._step = arrays, step_items
        self._are_files = len(np.unique(arrays.blocks.file)) > MAX_TASKS  # many files, each of which is read by itself
        self.num_bytes = int(arrays.shape.prod(axis=1).sum()) * arrays.item_bytes
        self.num_rows = len(arrays)
        if not are_ragged:
            self.row_bytes = int(arrays.shape[0].prod()) * arrays.item_bytes

    def boxes(self, rows: np.ndarray, destinations: np.ndarray, starts: np.ndarray | None) -> Boxes:
        high = self._arrays.shape[rows]
        low = np.zeros_like(high)
        if starts is None:
            return Boxes(rows, low, high, destinations, 0)
        place = np.zeros_like(high)
        place[:, 0] = starts[destinations] // self._step
        return Boxes(rows, low, high, np.zeros(len(rows), np.int64), place)

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: Any) -> Iterator[ReadTask]:
        arrays = self._arrays
        if isinstance(out, CsrBuffers):
            target = items_of(out.indices.view(np.uint8), arrays.item_bytes, (1, -1, *arrays.shape[0, 1:]))
            boxes = self.boxes(rows, destinations, out.starts)
        else:
            target = items_of(out.reshape(-1), arrays.item_bytes, (len(out), *arrays.shape[0]))
            boxes = self.boxes(rows, destinations, None)
        tasks = self.readers[0].boxes(boxes, target, keeps=False)  # samples share no blocks
        return _joined(tasks) if self._are_files else _together(tasks)

    def bytes_read(self, rows: np.ndarray) -> int:
        return int(self._arrays.shape[rows].prod(axis=1).sum()) * self._arrays.item_bytes

    def samples_in(self, array: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return array, array + 1

    @property
    def kept_bytes(self) -> int:
        return 0


class Texts(FieldReader):
    """Samples that are strings of variable length, padded with zeros to ``width`` bytes.

    Each string is an array of bytes. A sample has ``per_row`` of them.
    """

    def __init__(self, name: str, arrays: Arrays, per_row: int, width: int, cache: BlockCache) -> None:
        super().__init__(name, [arrays], cache)
        self._arrays, self._per_row, self._width = arrays, per_row, width
        self.row_bytes = per_row * width
        self.num_bytes, self.num_rows = len(arrays) * width, len(arrays) // per_row

    def boxes(self, rows: np.ndarray, destinations: np.ndarray, starts: np.ndarray | None) -> Boxes:
        inside = np.arange(self._per_row)
        array = (rows[:, None] * self._per_row + inside).reshape(-1)
        element = (destinations[:, None] * self._per_row + inside).reshape(-1)
        high = self._arrays.shape[array]
        return Boxes(array, np.zeros_like(high), high, element, 0)

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> Iterator[ReadTask]:
        out[destinations] = 0
        target = items_of(out.reshape(-1), 1, (len(out) * self._per_row, self._width))
        return _together(self.readers[0].boxes(self.boxes(rows, destinations, None), target))

    def samples_in(self, array: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return array // self._per_row, array // self._per_row + 1


class PatchRows(FieldReader):
    """Samples that are boxes of volumes. ``reader`` is the `PatchReader`, which has their plan."""

    num_bytes = 1 << 62  # never kept in memory, because each epoch has different patches

    def __init__(self, name: str, reader: Any, arrays: Arrays, cache: BlockCache) -> None:
        super().__init__(name, [arrays], cache)
        self._arrays, self._reader, self._field = arrays, reader, reader.volumes.fields[name]
        self.row_bytes = math.prod(self._field.box_shape()) * self._field.dtype.itemsize
        axes = arrays.num_axes
        self._shape = self._field.box_shape()[:axes]

    def _bounds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        volumes, starts = self._reader.plan.boxes(rows)
        low, high = self._field.boxes(starts)
        axes = self._arrays.num_axes
        return volumes, low[:, :axes], high[:, :axes]

    def boxes(self, rows: np.ndarray, destinations: np.ndarray, starts: np.ndarray | None) -> Boxes:
        volumes, low, high = self._bounds(rows)
        return Boxes(volumes, low, high, destinations, 0)

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> Iterator[ReadTask]:
        """Yield tasks as `FieldReader.tasks` does. Blocks are kept if fewer patches are read than a cell has."""
        target = items_of(out.reshape(-1), self._arrays.item_bytes, (len(out), *self._shape))
        volumes, low, high = self._bounds(rows)
        outside = np.flatnonzero(((low < 0) | (high > self._arrays.shape[volumes])).any(axis=1))
        patches = out.view(self._field.dtype).reshape(len(out), *self._field.box_shape())

        def fill_padding() -> None:
            for each in outside.tolist():
                shape = np.array(self._field.shape(volumes[each]))
                padded = np.zeros(len(shape), np.int64)
                padded[: low.shape[1]] = low[each]
                pad(patches[destinations[each]], padded, shape, self._field.padding)

        boxes = Boxes(volumes, low, high, destinations, 0)
        keeps = len(rows) < self._reader.chunk_samples
        return self.readers[0].boxes(boxes, target, keeps, fill_padding if len(outside) else None)

    def samples_in(self, array: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros_like(array), np.full_like(array, self._reader.num_samples)

    def _kept_bytes(self, arrays: Arrays) -> int:
        return CACHE_BYTES if arrays.max_block_bytes else 0

    @property
    def thread_bytes(self) -> int:
        return max(super().thread_bytes, SLAB_BYTES if self._arrays.has_raw else 0)


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
        if not isinstance(padding, str):
            view[outside] = padding
            continue
        source = np.clip(index[outside], 0, size - 1)
        if padding == "reflect":
            period = max(1, 2 * (size - 1))
            source = index[outside] % period
            source = np.minimum(source, period - source) if size > 1 else source * 0
        view[outside] = view[source - first]


class DerivedRows(FieldReader):
    """Samples that are made of those of another field, whose blocks are read."""

    def __init__(self, name: str, field: FieldReader) -> None:
        super().__init__(name, (), field.cache)
        self._field, self.readers = field, field.readers

    @property
    def kept_bytes(self) -> int:
        return self._field.kept_bytes

    @property
    def thread_bytes(self) -> int:
        return self._field.thread_bytes


class MappedRows(DerivedRows):
    """Samples that are other samples of a field. ``rows``, (n,) int64, has their numbers in ``field``."""

    def __init__(self, name: str, field: FieldReader, rows: np.ndarray) -> None:
        super().__init__(name, field)
        self._rows = rows
        self.row_bytes, self.num_bytes = field.row_bytes, field.num_bytes
        self.num_rows = len(rows)
        if self.row_bytes < FieldReader.row_bytes:
            self.num_bytes = len(rows) * self.row_bytes
        self._is_ascending = bool((rows[1:] >= rows[:-1]).all())
        self.is_scattered = not self._is_ascending or field.is_scattered

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: Any) -> Iterator[ReadTask]:
        """Yield tasks as `FieldReader.tasks` does, sorted, so that a block is decoded once."""
        mapped = self._rows[rows]
        order = np.argsort(mapped, kind="stable")
        return self._field.tasks(mapped[order], destinations[order], out)

    def bytes_read(self, rows: np.ndarray) -> int:
        mapped = np.sort(self._rows[rows])
        return self._field.bytes_read(mapped[np.diff(mapped, prepend=-1) != 0])

    def block_rows(self, file: int) -> Iterator[BlockRows]:
        for offsets, sizes, starts, stops in self._field.block_rows(file):
            if self._is_ascending:
                starts, stops = np.searchsorted(self._rows, starts), np.searchsorted(self._rows, stops)
            else:
                starts, stops = np.zeros_like(starts), np.full_like(stops, len(self._rows))
            yield BlockRows(offsets, sizes, starts, stops)

    @property
    def kept_bytes(self) -> int:
        """The size in bytes of the decoded blocks that should be kept: all of them, if they have another order."""
        if self._is_ascending or self.is_raw:
            return super().kept_bytes
        return max(super().kept_bytes, min(CACHE_BYTES, self._field.num_bytes))


class WindowRows(DerivedRows):
    """Samples that are several rows of another field, the frames. ``reader`` is the `WindowReader`."""

    def __init__(self, name: str, reader: Any, frames: FieldReader) -> None:
        super().__init__(name, frames)
        self._reader = reader
        self.row_bytes, self.num_bytes = frames.row_bytes, frames.num_bytes

    @property
    def rows_field(self) -> FieldReader:
        return self._field

    def rows_of(self, samples: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self._reader.rows_of(self.name, samples)
        return rows

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> Iterator[ReadTask]:
        """Yield tasks as `FieldReader.tasks` does. Frames are sorted, because windows overlap."""
        frames = self.rows_of(rows)
        places = destinations[:, None] * frames.shape[1] + np.arange(frames.shape[1])
        order = np.argsort(frames, axis=None, kind="stable")
        target = out.reshape(len(out) * frames.shape[1], self.row_bytes)
        return self._field.tasks(frames.ravel()[order], places.ravel()[order], target)

    def read_all(self, files: OpenFiles) -> np.ndarray:
        return self._field.read_all(files)

    def bytes_read(self, rows: np.ndarray) -> int:
        return self._field.bytes_read(np.unique(self.rows_of(rows)))

    def block_rows(self, file: int) -> Iterator[BlockRows]:
        for offsets, sizes, starts, stops in self._field.block_rows(file):
            yield BlockRows(offsets, sizes, *self._reader.samples_with(self.name, starts, stops))


class EncodedRows(DerivedRows):
    """Samples that are encoded images, which are decoded once per call of `tasks`, even if a sample is repeated.

    ``stored`` reads the encoded images, whose lengths in bytes are ``sizes``, (n,) int64. ``field`` describes the
    pixels, and ``texts`` names the dataset of each file in messages, whose first samples are ``starts``.
    """

    def __init__(
        self, stored: FieldReader, sizes: np.ndarray, field: Any, texts: Sequence[str], starts: np.ndarray
    ) -> None:
        super().__init__(stored.name, stored)
        self._sizes, self._described = sizes, field
        self._texts, self._starts = texts, starts
        self.row_bytes = math.prod(field.sample_shape) * field.dtype.itemsize
        self.num_bytes, self.num_rows = len(sizes) * self.row_bytes, len(sizes)

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> Iterator[ReadTask]:
        """Yield tasks as `FieldReader.tasks` does."""
        if (rows[1:] < rows[:-1]).any():
            order = np.argsort(rows, kind="stable")
            rows, destinations = rows[order], destinations[order]
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        ends = np.cumsum(self._sizes[rows[firsts]] + self.row_bytes)
        cuts = np.flatnonzero(np.diff(ends // TASK_BYTES)) + 1
        for start, stop in pairwise([0, *firsts[cuts].tolist(), len(rows)]):
            yield self._task(rows[start:stop], destinations[start:stop], out)

    def _task(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> ReadTask:
        is_first = np.diff(rows, prepend=-1) != 0
        distinct = rows[is_first]
        sizes = self._sizes[distinct]
        self._check_sizes(distinct, sizes)
        ends = np.cumsum(sizes)
        data = np.empty(int(ends[-1]), np.uint8)
        memory = CsrBuffers(np.append(0, ends), data, None)
        tasks = list(self._field.tasks(distinct, np.arange(len(distinct)), memory))
        bounds = np.stack([ends - sizes, ends], axis=1)
        targets = places[is_first], places[~is_first], places[is_first][np.cumsum(is_first) - 1][~is_first]
        return EndedTask(Tasks(tasks), partial(self._decode, distinct, data, bounds, targets, out))

    def _decode(
        self,
        rows: np.ndarray,
        data: np.ndarray,
        bounds: np.ndarray,
        targets: tuple[np.ndarray, np.ndarray, np.ndarray],
        out: np.ndarray,
        read: ReadTask,
        files: OpenFiles,
    ) -> None:
        read(files)
        distinct, repeated, sources = targets
        problem = self._described.decoder.decode(data, bounds, self._described.sample_shape, out, distinct)
        if problem is not None:
            raise self._error(rows[problem[0]], problem[1])
        out[repeated] = out[sources]

    def _check_sizes(self, rows: np.ndarray, sizes: np.ndarray) -> None:
        wrong = (sizes == 0) | (sizes > self.row_bytes + SLACK_BYTES)
        if self._field.row_bytes == 1 << 62 and wrong.any():
            size = sizes[wrong][0]
            raise self._error(rows[wrong][0], f"has {size} bytes, so it is damaged or was never written")

    def _error(self, row: int, problem: str) -> FileError:
        file = int(np.searchsorted(self._starts, row, "right")) - 1
        return FileError(f"{self._texts[file]}, frame {row - int(self._starts[file])}: {problem}")

    def bytes_read(self, rows: np.ndarray) -> int:
        return len(rows) * self.row_bytes

    def block_rows(self, file: int) -> Iterator[BlockRows]:
        return self._field.block_rows(file)

    @property
    def thread_bytes(self) -> int:
        return super().thread_bytes + TASK_BYTES + int(self._sizes.max(initial=0))


class Tasks:
    """Several tasks that one Python thread runs one after another."""

    def __init__(self, tasks: Sequence[Any]) -> None:
        self._tasks = tasks

    @property
    def ranges(self) -> Iterator[tuple[int, Ranges]]:
        for task in self._tasks:
            yield from task.ranges

    def __call__(self, files: OpenFiles) -> None:
        for task in self._tasks:
            task(files)


def _together(tasks: Iterator[ReadTask]) -> Iterator[ReadTask]:
    """Join tasks for Python threads if there are many, such as for rows of many files. Native threads take any."""
    return tasks if available() else _joined(tasks)


def _joined(tasks: Iterator[ReadTask]) -> Iterator[ReadTask]:
    listed = list(tasks)
    step = -(-len(listed) // MAX_TASKS)
    for first in range(0, len(listed), max(1, step)):
        part = listed[first : first + step]
        yield part[0] if len(part) == 1 else Tasks(part)
