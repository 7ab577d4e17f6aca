"""Read rows of a CSR matrix: by their byte ranges in the file, outside HDF5's lock; or through HDF5.

A row is one range of ``indices`` and the same range of ``data``. Rows that lie side by side in the file are read with
one call, and each goes where a shuffled window wants it. Any file will do in which ``indptr``, ``indices`` and
``data`` are datasets of numbers in one group: ours, or AnnData's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import printable
from h5chunk.plan.amplification import entries_read_with
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.hdf5.chunk_table import NotDirect, list_chunks
from h5chunk.store.hdf5.claims import same_file
from h5chunk.store.hdf5.ranges import MAX_VECTORS, PART_BYTES, RUN_BYTES, Part, vector_parts
from h5chunk.store.read.checksums import NO_SUMS, ChunkChecks, Sums, checks_of
from h5chunk.store.read.chunks import DecodedChunks
from h5chunk.store.read.fields import MatrixField
from h5chunk.store.read.plain import check_bytes

GAP_BYTES = 48 << 10  # between two rows: to read it as well takes the time of a call; scripts/sweep_reads.py
_Piece = tuple[int, int, int, np.ndarray]  # chunk, its first and last entry, and the place of each


@dataclass(frozen=True)
class CsrBuffers:
    """The memory that rows of a matrix are read into.

    Attributes
    ----------
    starts : (num_rows + 1,) int64
        Where row i begins in the other two, and the last one ends.
    indices : (num_entries,)
        Columns, of the file's type.
    values : (num_entries,) or None
        None for a pattern.
    """

    starts: np.ndarray
    indices: np.ndarray
    values: np.ndarray | None


class CsrField:
    """Reader of rows of a CSR matrix by their byte ranges.

    Parameters
    ----------
    path : path
    file : h5py.File
        Used now and not kept.
    field : MatrixField
    indptr : (num_rows + 1,) int64
    sums : mapping of str to Checksums
        What is to be checked.

    Raises
    ------
    NotDirect
        A layout, type or filter needs HDF5.

    Attributes
    ----------
    is_plain : bool
        Whether no entry is compressed, and all lie one behind the other.
    """

    def __init__(
        self, path: Path, file: h5py.File, field: MatrixField, indptr: np.ndarray, sums: Sums = NO_SUMS
    ) -> None:
        group = file[field.dataset]
        if not all(same_file(group[part], file) for part in ("indices", "data")):
            raise NotDirect("a link leads to it in another file")
        self.name, self.indptr = field.name, indptr
        self._indices = _entries(path, f"{field.name}/indices", group["indices"], sums, indptr)
        self._values: _PlainEntries | _EncodedEntries | None = None
        if field.value_dtype is not None:
            self._values = _entries(path, f"{field.name}/data", group["data"], sums, indptr)
        self.is_plain = all(isinstance(entries, _PlainEntries) for entries in self._both)
        self.num_bytes = field.num_entries * field.entry_bytes

    def entry_counts(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of entries of each of these rows: (n,) int64."""
        counts: np.ndarray = self.indptr[rows + 1] - self.indptr[rows]
        return counts

    def parts(self, rows: np.ndarray, places: np.ndarray, out: CsrBuffers) -> Iterator[Part]:
        """Yield the tasks that read row ``rows[i]`` to row ``places[i]`` of ``out``, for several threads.

        Parameters
        ----------
        rows, places : (n,) int64
            Neighbours in the file side by side.
        out : CsrBuffers
            ``starts`` is there already.
        """
        counts = self.entry_counts(rows)
        some = counts > 0
        firsts, counts, places = self.indptr[rows[some]], counts[some], out.starts[places[some]]
        if not len(firsts):
            return
        yield from self._indices.parts(firsts, counts, places, out.indices)
        if self._values is not None and out.values is not None:
            yield from self._values.parts(firsts, counts, places, out.values)

    def scratch_bytes(self, num_threads: int) -> int:
        """Memory beside ``out`` that so many threads take."""
        return sum(entries.scratch_bytes(num_threads) for entries in self._both)

    def bytes_read(self, rows: np.ndarray) -> int:
        """Bytes of the entries that are read, or decoded, for some rows, in any order."""
        firsts, ends = self.indptr[rows], self.indptr[rows + 1]
        return sum(entries.bytes_read(firsts, ends, int(self.indptr[-1])) for entries in self._both)

    @property
    def chunks(self) -> list[DecodedChunks]:
        """The chunks of entries that are decoded."""
        return [entries.chunks for entries in self._both if isinstance(entries, _EncodedEntries)]

    @property
    def _both(self) -> list[_PlainEntries | _EncodedEntries]:
        return [each for each in (self._indices, self._values) if each is not None]

    def forget(self) -> None:
        """Free what is kept between parts."""
        for entries in self._both:
            entries.forget()


def _entries(
    path: Path, name: str, dataset: h5py.Dataset, sums: Sums, indptr: np.ndarray
) -> _PlainEntries | _EncodedEntries:
    if not len(dataset):
        return _PlainEntries(path, name, 0, dataset.dtype.itemsize, None)
    check_bytes(dataset, dataset.dtype.newbyteorder("="))
    if not dataset.id.get_create_plist().get_nfilters():
        table = list_chunks(dataset)
        if table.is_one_run:
            checks = checks_of(path, name, dataset, table, sums, indptr) if sums else None
            return _PlainEntries(path, name, int(table.offsets[0]), dataset.dtype.itemsize, checks)
    return _EncodedEntries(path, name, dataset, sums, indptr)


class _PlainEntries:
    """Entries that lie one behind the other in the file."""

    def __init__(self, path: Path, name: str, offset: int, item_bytes: int, checks: ChunkChecks | None) -> None:
        self._path, self._name, self._offset, self._item_bytes = path, name, offset, item_bytes
        self._checks = checks

    def parts(self, firsts: np.ndarray, counts: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """Yield the tasks that read entries ``firsts[i]`` to ``firsts[i] + counts[i]`` to ``out[places[i]:]``."""
        size = self._item_bytes
        vectors = np.empty((len(firsts), 2), np.uintp)
        vectors[:, 0] = out.ctypes.data + places * size
        vectors[:, 1] = counts * size
        ends = np.cumsum(counts * size)
        groups = ends // RUN_BYTES + np.arange(len(firsts)) // MAX_VECTORS
        apart = (firsts[1:] != firsts[:-1] + counts[:-1]) | (groups[1:] != groups[:-1])
        borders = np.concatenate(([0], np.flatnonzero(apart) + 1, [len(firsts)]))
        checks = iter(()) if self._checks is None else self._checks.entry_parts(firsts, counts)
        starts = self._offset + firsts[borders[:-1]] * size
        return chain(checks, vector_parts(borders, vectors, starts, out, self._where))

    def _where(self, offset: int) -> str:
        return f"{printable(self._path)}: {self._name!r}, entry {(offset - self._offset) // self._item_bytes}"

    def bytes_read(self, firsts: np.ndarray, ends: np.ndarray, length: int) -> int:
        """Bytes that are read for runs of entries."""
        return int((ends - firsts).sum()) * self._item_bytes

    def scratch_bytes(self, num_threads: int) -> int:
        return 0

    def forget(self) -> None:
        """Nothing is kept."""


class _EncodedEntries:
    """Entries in compressed chunks, or in chunks that lie anywhere."""

    def __init__(self, path: Path, name: str, dataset: h5py.Dataset, sums: Sums, indptr: np.ndarray) -> None:
        self.chunks = DecodedChunks(path, name, dataset, sums, indptr)
        self._per_chunk = dataset.chunks[0]
        self._dtype = dataset.dtype
        self.scratch_bytes, self.forget = self.chunks.scratch_bytes, self.chunks.forget

    def parts(self, firsts: np.ndarray, counts: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """Yield the tasks as `_PlainEntries.parts` does, chunk by chunk."""
        apart = np.flatnonzero(firsts[1:] != firsts[:-1] + counts[:-1]) + 1
        borders = [0, *apart.tolist(), len(firsts)]
        pieces: list[_Piece] = []
        for start, stop in pairwise(borders):
            pieces += self._pieces(firsts[start:stop], counts[start:stop], places[start:stop])
        per_part = max(1, PART_BYTES // self.chunks.chunk_bytes)
        for first in range(0, len(pieces), per_part):
            yield partial(self._copy, pieces[first : first + per_part], out)

    def _pieces(self, firsts: np.ndarray, counts: np.ndarray, places: np.ndarray) -> Iterator[_Piece]:
        """Yield the pieces of chunks that hold a run of rows."""
        first, end = int(firsts[0]), int(firsts[-1] + counts[-1])
        there = np.repeat(places - firsts, counts) + np.arange(first, end)
        for chunk in range(first // self._per_chunk, (end - 1) // self._per_chunk + 1):
            low, high = max(first, chunk * self._per_chunk), min(end, (chunk + 1) * self._per_chunk)
            yield (
                chunk,
                low - chunk * self._per_chunk,
                high - chunk * self._per_chunk,
                there[low - first : high - first],
            )

    def bytes_read(self, firsts: np.ndarray, ends: np.ndarray, length: int) -> int:
        """Bytes that are decoded for runs of entries, out of ``length`` entries."""
        return entries_read_with(firsts, ends, self._per_chunk, length) * self._dtype.itemsize

    def _copy(self, pieces: list[_Piece], out: np.ndarray, descriptor: int) -> None:
        """Put the entries of some pieces in their places."""
        for chunk, low, high, places in pieces:
            values = self.chunks.read(descriptor, chunk, is_whole=high - low == self._per_chunk)
            out[places] = values.view(self._dtype)[low:high]


class CsrHandle:
    """The open datasets of a matrix, each with a chunk cache.

    Parameters
    ----------
    file : h5py.File
    field : MatrixField
    indptr : (num_rows + 1,) int64
    cache : CacheSettings, optional
        Of ``indices`` and of ``data``, each.
    sums : mapping of str to Checksums
        What is to be checked.
    """

    def __init__(
        self,
        file: h5py.File,
        field: MatrixField,
        indptr: np.ndarray,
        cache: CacheSettings | None,
        sums: Sums = NO_SUMS,
    ) -> None:
        self._file, self._indptr = file, indptr
        self._gap = max(1, GAP_BYTES // max(1, field.entry_bytes))
        self._indices = _open(file, f"{field.dataset}/indices", cache)
        self._values = None if field.value_dtype is None else _open(file, f"{field.dataset}/data", cache)
        parts = {f"{field.name}/indices": self._indices, f"{field.name}/data": self._values}
        self._checks = [
            ChunkChecks(Path(file.filename), name, dataset, list_chunks(dataset), sums[name], indptr)
            for name, dataset in parts.items()
            if name in sums and dataset is not None and len(dataset)
        ]

    def cache(self) -> CacheSettings:
        """Return the cache of ``indices`` that HDF5 uses."""
        nslots, nbytes, w0 = self._indices.id.get_access_plist().get_chunk_cache()
        return CacheSettings(max(1, nslots), nbytes, w0)

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
            checks.check_entries(self._file.id.get_vfd_handle(), firsts[counts > 0], counts[counts > 0])
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
            out.indices[there] = self._indices[low:high][wanted]
            if self._values is not None and out.values is not None:
                out.values[there] = self._values[low:high][wanted]


def _open(file: h5py.File, name: str, cache: CacheSettings | None) -> h5py.Dataset:
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    if cache is not None:
        access.set_chunk_cache(cache.nslots, cache.nbytes, cache.w0)
    return h5py.Dataset(h5py.h5d.open(file.id, name.encode(), access))
