"""Read rows of a CSR matrix, and images of any size, by their byte ranges in the file or through HDF5.

A row is one range of ``indices`` and the same range of ``data``. An image is one range of bytes. Rows that are adjacent
in the file are read with one call, directly to their positions in a shuffled window. The datasets ``indptr``,
``indices`` and ``data`` may be in any group, as in files of h5chunk and AnnData.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import printable
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.hdf5.chunk_table import NotDirect, check_bytes, check_chunks, list_chunks
from h5chunk.store.hdf5.open import OpenFile, descriptor_of, same_file
from h5chunk.store.hdf5.ranges import ReadTask, vector_tasks
from h5chunk.store.hdf5.strings import find_in_heap
from h5chunk.store.read.checksums import NO_SUMS, ChunkChecks, Sums
from h5chunk.store.read.direct import ByteReader, ChunkedField, ChunkRows, PlainField
from h5chunk.store.read.ragged import RaggedField, SeriesField
from h5chunk.store.read.vlen import VlenField, open_heap, read_pointers, vlen_indptr

GAP_BYTES = 48 << 10  # size of a gap that takes as long to read as one more call (scripts/sweep_reads.py)


@dataclass(frozen=True)
class CsrBuffers:
    """The buffers that rows of a matrix, or images of any size, are read into.

    Row i begins at index ``starts[i]`` of ``indices`` and ``values``, which have the dtypes of the file. ``starts`` is
    (num_rows + 1,) int64. ``values`` is None for a pattern (a matrix without stored values). For images, ``indices``
    contains the bytes of the images, and ``values`` is None.
    """

    starts: np.ndarray
    indices: np.ndarray
    values: np.ndarray | None


class CsrField(ByteReader):
    """A reader of sparse rows or images by byte ranges. Raises NotDirect if a layout, type or filter needs HDF5.

    The field is plain if its entries are uncompressed and contiguous.
    """

    def __init__(
        self, path: Path, file: h5py.File, field: RaggedField, indptr: np.ndarray, sums: Sums = NO_SUMS
    ) -> None:
        parts = {part: file[field.path_of(part)] for part in field.entry_datasets}
        if not all(same_file(dataset, file) for dataset in parts.values()):
            raise NotDirect("it is a link into another file")
        self._step = field.step_items if isinstance(field, SeriesField) else 1  # entries in one row of a dataset
        self.name, self._indptr = field.name, indptr // self._step
        self._entries: list[PlainField | ChunkedField] = []
        for part, dataset in parts.items() if field.num_entries else ():
            name = f"{field.name}/{part}"
            check_bytes(dataset, dataset.dtype.newbyteorder("="))
            if not dataset.id.get_create_plist().get_nfilters():
                plain = PlainField(path, name, dataset, sums, self._indptr)
                if plain.is_one_run:
                    self._entries.append(plain)
                    continue
            self._entries.append(ChunkedField(path, name, dataset, sums, self._indptr))
        self.chunks = [chunks for entries in self._entries for chunks in entries.chunks]
        self.is_plain = not self.chunks
        self.num_bytes = field.num_entries * field.entry_bytes
        self.forget()

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: CsrBuffers) -> Iterator[ReadTask]:
        """Yield tasks as `ByteReader.tasks` does.

        ``out.starts`` must be set, and rows that are adjacent in the file must be adjacent in ``rows``.
        """
        firsts = self._indptr[rows]
        counts = self._indptr[rows + 1] - firsts
        nonempty = counts > 0
        destinations = out.starts[destinations[nonempty]] // self._step
        firsts, counts = firsts[nonempty], counts[nonempty]
        if len(firsts):
            for entries, target in zip(self._entries, (out.indices, out.values), strict=False):
                if target is not None:
                    memory = target.view(np.uint8).reshape(len(target) // self._step, -1)
                    yield from entries.tasks(firsts, destinations, memory, counts)

    def chunk_rows(self, _number: int = 0) -> Iterator[ChunkRows]:
        for entries in self._entries:
            for offsets, sizes, starts, stops in entries.chunk_rows():
                first = np.maximum(np.searchsorted(self._indptr, starts, "right") - 1, 0)
                yield ChunkRows(offsets, sizes, first, np.maximum(np.searchsorted(self._indptr, stops), first + 1))

    def bytes_read(self, rows: np.ndarray) -> int:
        firsts = self._indptr[rows]
        counts = self._indptr[rows + 1] - firsts
        return sum(entries.bytes_read(firsts, counts) for entries in self._entries)


class CsrHandle(OpenFile):
    """The open datasets of a matrix. Each has its own chunk cache."""

    def __init__(
        self, file: h5py.File, field: RaggedField, indptr: np.ndarray, cache: CacheSettings | None, sums: Sums
    ) -> None:
        self._step = field.step_items if isinstance(field, SeriesField) else 1
        super().__init__(file)
        self._indptr = indptr // self._step
        self._gap = max(1, GAP_BYTES // max(1, field.entry_bytes))
        names = field.entry_datasets
        self._parts = [h5py.Dataset(open_dataset(file, field.path_of(name), cache)) for name in names]
        self.id, path = self._parts[0].id, Path(file.filename)
        self._checks = []
        for dataset, name in zip(self._parts, (f"{field.name}/{part}" for part in names), strict=True):
            if name in sums and len(dataset):
                self._checks.append(ChunkChecks(path, name, list_chunks(dataset), sums[name], self._indptr))

    def read(self, rows: np.ndarray, out: CsrBuffers) -> None:
        """Read rows, in any order. The caller must have set ``out.starts``.

        Rows that are close to each other are read with one call, including the rows between them.
        """
        if not len(rows):
            return
        order = np.argsort(rows, kind="stable")
        firsts, ends = self._indptr[rows[order]], self._indptr[rows[order] + 1]
        counts, destinations = ends - firsts, out.starts[:-1][order] // self._step
        for checks in self._checks:
            checks.check(descriptor_of(self._file), checks.of_rows(firsts[counts > 0], counts[counts > 0]))
        borders = np.flatnonzero(firsts[1:] - ends[:-1] > self._gap) + 1
        for start, stop in pairwise([0, *borders.tolist(), len(rows)]):
            low, high = int(firsts[start]), int(ends[start:stop].max(initial=0))
            if high <= low:
                continue
            sizes = counts[start:stop]
            before = np.cumsum(sizes) - sizes
            entries = np.arange(int(sizes.sum()))
            positions = np.repeat(firsts[start:stop] - low - before, sizes) + entries
            targets = np.repeat(destinations[start:stop] - before, sizes) + entries
            for dataset, target in zip(self._parts, (out.indices, out.values), strict=False):
                if target is not None:
                    target.reshape(-1, *dataset.shape[1:])[targets] = dataset[low:high][positions]


class VlenBytes(ByteReader):
    """A byte-range reader of the arrays of a `VlenField`. ``indptr``, (n + 1,) int64, has the first entry of each."""

    is_plain = True

    def __init__(self, path: Path, file: h5py.File, field: VlenField) -> None:
        self.name, self._item_bytes = field.name, field.entry_bytes
        self._where = f"{printable(path)}: {field.dataset!r}"
        self.num_bytes = field.num_entries * self._item_bytes
        pointers = read_pointers(dataset := file[field.dataset], path)
        self.indptr = vlen_indptr(pointers, dataset, path, self._item_bytes)
        heap = open_heap(file, path, field.dataset)
        self._places = find_in_heap(heap, pointers, np.diff(self.indptr) * self._item_bytes)
        self.forget()

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: CsrBuffers) -> Iterator[ReadTask]:
        """Yield tasks as `ByteReader.tasks` does. Rows may be in any order."""
        sizes = (self.indptr[rows + 1] - self.indptr[rows]) * self._item_bytes
        filled = sizes > 0
        if filled.any():
            firsts = out.starts[destinations[filled]] * self._item_bytes
            memory = out.indices.view(np.uint8)
            yield from vector_tasks(self._places[rows[filled]], sizes[filled], firsts, memory, lambda _: self._where)

    def chunk_rows(self, _number: int = 0) -> Iterator[ChunkRows]:
        sizes = np.diff(self.indptr) * self._item_bytes
        rows = np.flatnonzero(sizes)
        yield ChunkRows(self._places[rows], sizes[rows], rows, rows + 1)

    def bytes_read(self, rows: np.ndarray) -> int:
        return int((self.indptr[rows + 1] - self.indptr[rows]).sum()) * self._item_bytes


class VlenHandle(OpenFile):
    """An open dataset of arrays of variable length."""

    def __init__(self, path: Path, file: h5py.File, field: VlenField) -> None:
        super().__init__(file)
        self.id = file[field.dataset].id
        self._bytes = VlenBytes(path, file, field)

    def read(self, rows: np.ndarray, out: CsrBuffers) -> None:
        """Read rows, in any order. The caller must have set ``out.starts``."""
        for task in self._bytes.tasks(rows, np.arange(len(rows)), out) if len(rows) else ():
            task(descriptor_of(self._file))


def open_dataset(file: h5py.File, name: str, cache: CacheSettings | None) -> h5py.h5d.DatasetID:
    """Open a dataset with a separate chunk cache, or with the file's default cache if ``cache`` is None.

    Raises FileError if HDF5 may crash on its chunks.
    """
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    if cache is not None:
        access.set_chunk_cache(cache.nslots, cache.nbytes, cache.w0)
    dataset = h5py.h5d.open(file.id, name.encode(), access)
    check_chunks(h5py.Dataset(dataset))
    return dataset


def cache_of(dataset: h5py.h5d.DatasetID) -> CacheSettings:
    """Return the settings of the chunk cache that HDF5 uses for an open dataset."""
    nslots, nbytes, w0 = dataset.get_access_plist().get_chunk_cache()
    return CacheSettings(max(1, nslots), nbytes, w0)  # HDF5 reports 0 slots if there is no cache
