"""Read rows of a CSR matrix: by their byte ranges in the file, outside HDF5's lock; or through HDF5.

A row is one range of ``indices`` and the same range of ``data``. Rows that lie side by side in the file are read with
one call, and each goes where a shuffled window wants it. Any file will do in which ``indptr``, ``indices`` and
``data`` are datasets of numbers in one group: those of h5chunk, or AnnData's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import printable
from h5chunk.plan.cache import CacheSettings, entries_read_with
from h5chunk.store.hdf5.chunk_table import NotDirect, list_chunks
from h5chunk.store.hdf5.claims import same_file
from h5chunk.store.hdf5.ranges import PART_BYTES, Part, vector_parts
from h5chunk.store.read.checksums import NO_SUMS, ChunkChecks, Sums
from h5chunk.store.read.direct import ByteReader, DecodedChunks, check_bytes
from h5chunk.store.read.fields import MatrixField

GAP_BYTES = 48 << 10  # between two rows: to read it as well takes the time of a call; scripts/sweep_reads.py
_Piece = tuple[int, int, int, np.ndarray]  # chunk, its first and last entry, and the place of each


@dataclass(frozen=True)
class CsrBuffers:
    """The memory that rows of a matrix are read into.

    Row i begins at ``starts[i]``, (num_rows + 1,) int64, of ``indices``, which has the file's type, and of ``values``,
    which a pattern does not have.
    """

    starts: np.ndarray
    indices: np.ndarray
    values: np.ndarray | None


class CsrField(ByteReader):
    """Reader of rows of a CSR matrix by their byte ranges; raises NotDirect if a layout, type or filter needs HDF5.

    It is plain if no entry is compressed, and all lie one behind the other.
    """

    def __init__(
        self, path: Path, file: h5py.File, field: MatrixField, indptr: np.ndarray, sums: Sums = NO_SUMS
    ) -> None:
        group = file[field.dataset]
        names = ["indices"] + (["data"] if field.value_dtype is not None else [])
        if not all(same_file(group[part], file) for part in ("indices", "data")):
            raise NotDirect("a link leads to it in another file")
        self.name, self.indptr = field.name, indptr
        self._entries = [_entries(path, f"{field.name}/{part}", group[part], sums, indptr) for part in names]
        self.chunks = [each.chunks for each in self._entries if isinstance(each, _EncodedEntries)]
        self.is_plain = not self.chunks
        self.num_bytes = field.num_entries * field.entry_bytes
        self.forget()

    def entry_counts(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of entries of each of these rows: (n,) int64."""
        counts: np.ndarray = self.indptr[rows + 1] - self.indptr[rows]
        return counts

    def parts(self, rows: np.ndarray, places: np.ndarray, out: CsrBuffers) -> Iterator[Part]:
        """Yield the tasks that read row ``rows[i]`` to row ``places[i]`` of ``out``, for several threads.

        ``out.starts`` is there already. Neighbours in the file stand side by side in ``rows``.
        """
        counts = self.entry_counts(rows)
        some = counts > 0
        firsts, counts, places = self.indptr[rows[some]], counts[some], out.starts[places[some]]
        if len(firsts):
            for entries, target in zip(self._entries, (out.indices, out.values), strict=False):
                if target is not None:
                    yield from entries.parts(firsts, counts, places, target)

    def bytes_read(self, rows: np.ndarray) -> int:
        """Return the bytes of the entries that are read, or decoded, for some rows, in any order."""
        firsts, ends = self.indptr[rows], self.indptr[rows + 1]
        return sum(entries.bytes_read(firsts, ends) for entries in self._entries)


def _entries(
    path: Path, name: str, dataset: h5py.Dataset, sums: Sums, indptr: np.ndarray
) -> _PlainEntries | _EncodedEntries:
    if not len(dataset):
        return _PlainEntries(path, name, dataset.dtype.itemsize, 0, None)
    check_bytes(dataset, dataset.dtype.newbyteorder("="))
    if not dataset.id.get_create_plist().get_nfilters():
        table = list_chunks(dataset)
        if table.is_one_run:
            checks = ChunkChecks(path, name, table, sums[name], indptr) if name in sums else None
            return _PlainEntries(path, name, dataset.dtype.itemsize, int(table.offsets[0]), checks)
    return _EncodedEntries(path, name, dataset, sums, indptr)


class _PlainEntries:
    """Entries that lie one behind the other in the file."""

    def __init__(self, path: Path, name: str, item_bytes: int, offset: int, checks: ChunkChecks | None) -> None:
        self._path, self._name, self._item_bytes, self._offset, self._checks = path, name, item_bytes, offset, checks

    def parts(self, firsts: np.ndarray, counts: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """Yield the tasks that read entries ``firsts[i]`` to ``firsts[i] + counts[i]`` to ``out[places[i]:]``."""
        size = self._item_bytes
        parts = vector_parts(self._offset + firsts * size, counts * size, places * size, out, self._where)
        if self._checks is None:
            return parts
        return chain(self._checks.parts(self._checks.of_entries(firsts, counts)), parts)

    def bytes_read(self, firsts: np.ndarray, ends: np.ndarray) -> int:
        """Return the bytes that are read for runs of entries."""
        return int((ends - firsts).sum()) * self._item_bytes

    def _where(self, offset: int) -> str:
        return f"{printable(self._path)}: {self._name!r}, entry {(offset - self._offset) // self._item_bytes}"


class _EncodedEntries:
    """Entries in compressed chunks, or in chunks that lie anywhere."""

    def __init__(self, path: Path, name: str, dataset: h5py.Dataset, sums: Sums, indptr: np.ndarray) -> None:
        self.chunks = DecodedChunks(path, name, dataset, sums, indptr)
        self._per_chunk, self._length, self._dtype = dataset.chunks[0], len(dataset), dataset.dtype

    def parts(self, firsts: np.ndarray, counts: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """Yield the tasks as `_PlainEntries.parts` does, chunk by chunk."""
        apart = np.flatnonzero(firsts[1:] != firsts[:-1] + counts[:-1]) + 1
        pieces: list[_Piece] = []
        for start, stop in pairwise([0, *apart.tolist(), len(firsts)]):
            pieces += self._pieces(firsts[start:stop], counts[start:stop], places[start:stop])
        per_part = max(1, PART_BYTES // self.chunks.chunk_bytes)
        for first in range(0, len(pieces), per_part):
            yield partial(self._copy, pieces[first : first + per_part], out)

    def _pieces(self, firsts: np.ndarray, counts: np.ndarray, places: np.ndarray) -> Iterator[_Piece]:
        """Yield the pieces of chunks that hold a run of rows."""
        first, end = int(firsts[0]), int(firsts[-1] + counts[-1])
        there = np.repeat(places - firsts, counts) + np.arange(first, end)
        for chunk in range(first // self._per_chunk, (end - 1) // self._per_chunk + 1):
            start = chunk * self._per_chunk
            low, high = max(first, start), min(end, start + self._per_chunk)
            yield chunk, low - start, high - start, there[low - first : high - first]

    def _copy(self, pieces: list[_Piece], out: np.ndarray, descriptor: int) -> None:
        """Put the entries of some pieces in their places."""
        for chunk, low, high, places in pieces:
            values = self.chunks.read(descriptor, chunk, is_whole=high - low == self._per_chunk)
            out[places] = values.view(self._dtype)[low:high]

    def bytes_read(self, firsts: np.ndarray, ends: np.ndarray) -> int:
        """Return the bytes that are decoded for runs of entries."""
        return entries_read_with(firsts, ends, self._per_chunk, self._length) * self._dtype.itemsize


class CsrHandle:
    """The open datasets of a matrix, each with its own chunk cache of these settings."""

    def __init__(
        self, file: h5py.File, field: MatrixField, indptr: np.ndarray, cache: CacheSettings | None, sums: Sums
    ) -> None:
        self._file, self._indptr, self.lock = file, indptr, threading.Lock()
        self._gap = max(1, GAP_BYTES // max(1, field.entry_bytes))
        names = ["indices"] + (["data"] if field.value_dtype is not None else [])
        self._parts = [h5py.Dataset(open_dataset(file, f"{field.dataset}/{name}", cache)) for name in names]
        path = Path(file.filename)
        self._checks = []
        for dataset, name in zip(self._parts, (f"{field.name}/{part}" for part in names), strict=True):
            if name in sums and len(dataset):
                self._checks.append(ChunkChecks(path, name, list_chunks(dataset), sums[name], indptr))

    def cache(self) -> CacheSettings:
        """Return the cache of ``indices`` that HDF5 uses."""
        return cache_of(self._parts[0].id)

    def read(self, rows: np.ndarray, out: CsrBuffers) -> None:
        """Read rows, in any order; ``out.starts`` is there already.

        Rows that lie near each other are read with one call, and what lies between them with them.
        """
        if not len(rows):
            return
        order = np.argsort(rows, kind="stable")
        firsts, ends = self._indptr[rows[order]], self._indptr[rows[order] + 1]
        counts, places = ends - firsts, out.starts[:-1][order]
        for checks in self._checks:
            checks.check(self._file.id.get_vfd_handle(), checks.of_entries(firsts[counts > 0], counts[counts > 0]))
        borders = np.flatnonzero(firsts[1:] - ends[:-1] > self._gap) + 1
        for start, stop in pairwise([0, *borders.tolist(), len(rows)]):
            low, high = int(firsts[start]), int(ends[start:stop].max(initial=0))
            if high <= low:
                continue
            sizes = counts[start:stop]
            before = np.cumsum(sizes) - sizes
            entries = np.arange(int(sizes.sum()))
            wanted = np.repeat(firsts[start:stop] - low - before, sizes) + entries
            there = np.repeat(places[start:stop] - before, sizes) + entries
            for dataset, target in zip(self._parts, (out.indices, out.values), strict=False):
                if target is not None:
                    target[there] = dataset[low:high][wanted]


def open_dataset(file: h5py.File, name: str, cache: CacheSettings | None) -> h5py.h5d.DatasetID:
    """Open a dataset with a chunk cache of its own; None: that of the file."""
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    if cache is not None:
        access.set_chunk_cache(cache.nslots, cache.nbytes, cache.w0)
    return h5py.h5d.open(file.id, name.encode(), access)


def cache_of(dataset: h5py.h5d.DatasetID) -> CacheSettings:
    """Return the chunk cache that HDF5 uses."""
    nslots, nbytes, w0 = dataset.get_access_plist().get_chunk_cache()
    return CacheSettings(max(1, nslots), nbytes, w0)  # HDF5 says 0 slots where there is no cache
