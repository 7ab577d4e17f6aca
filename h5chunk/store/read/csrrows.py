"""Rows of a CSR matrix by their byte ranges in the file, outside HDF5's lock.

A row is one range of ``indices`` and the same range of ``data``. Rows that lie side by side in the file are read with
one call, and each goes where a shuffled window wants it. Any file will do in which ``indptr``, ``indices`` and
``data`` are datasets of numbers in one group: ours, or AnnData's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import printable
from h5chunk.store.guard.checksums import NO_SUMS, ChunkChecks, Sums, checks_of
from h5chunk.store.guard.claims import same_file
from h5chunk.store.read.chunktable import list_chunks
from h5chunk.store.read.decoded import DecodedChunks, NotDirect
from h5chunk.store.read.direct import check_bytes
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.ranges import MAX_VECTORS, PART_BYTES, RUN_BYTES, Part, vector_parts


@dataclass(frozen=True)
class CsrRoom:
    """Where rows of a matrix go.

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
    """Reads rows of a CSR matrix.

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

    is_one_run = False

    def __init__(
        self, path: Path, file: h5py.File, field: MatrixField, indptr: np.ndarray, sums: Sums = NO_SUMS
    ) -> None:
        group = file[field.dataset]
        if not all(same_file(group[part], file) for part in ("indices", "data")):
            raise NotDirect("a link leads to it in another file")
        self.name, self.indptr = field.name, indptr
        self._indices = _entries(path, f"{field.name}/indices", group["indices"], sums, indptr)
        self._values = None
        if field.value_dtype is not None:
            self._values = _entries(path, f"{field.name}/data", group["data"], sums, indptr)
        each = [self._indices] if self._values is None else [self._indices, self._values]
        self.is_plain = all(isinstance(entries, _PlainEntries) for entries in each)
        self.num_bytes = field.num_entries * field.entry_bytes

    def entry_counts(self, rows: np.ndarray) -> np.ndarray:
        """Entries of each of these rows: (n,) int64."""
        counts: np.ndarray = self.indptr[rows + 1] - self.indptr[rows]
        return counts

    def parts(self, rows: np.ndarray, places: np.ndarray, out: CsrRoom) -> Iterator[Part]:
        """What has to be done so that row ``places[i]`` of ``out`` is row ``rows[i]``, in parts for several threads.

        Parameters
        ----------
        rows, places : (n,) int64
            Neighbours in the file side by side.
        out : CsrRoom
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
        each = [self._indices] if self._values is None else [self._indices, self._values]
        return sum(entries.scratch_bytes(num_threads) for entries in each)

    def forget(self) -> None:
        """Free what is kept between parts."""
        for entries in (self._indices, self._values):
            if entries is not None:
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
            checks = checks_of(path, name, dataset, table, sums, indptr)
            return _PlainEntries(path, name, int(table.offsets[0]), dataset.dtype.itemsize, checks)
    return _EncodedEntries(path, name, dataset, sums, indptr)


class _PlainEntries:
    """Entries that lie one behind the other in the file."""

    def __init__(self, path: Path, name: str, offset: int, item_bytes: int, checks: ChunkChecks | None) -> None:
        self._path, self._name, self._offset, self._item_bytes = path, name, offset, item_bytes
        self._checks = checks

    def parts(self, firsts: np.ndarray, counts: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """Entries ``firsts[i]`` and the ``counts[i] - 1`` behind it to ``out[places[i]:]``."""
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

    def scratch_bytes(self, num_threads: int) -> int:
        return 0

    def forget(self) -> None:
        """Nothing is kept."""


class _EncodedEntries:
    """Entries in compressed chunks, or in chunks that lie anywhere."""

    def __init__(self, path: Path, name: str, dataset: h5py.Dataset, sums: Sums, indptr: np.ndarray) -> None:
        self._chunks = DecodedChunks(path, name, dataset, sums, indptr)
        self._per_chunk = dataset.chunks[0]
        self._dtype = dataset.dtype
        self.scratch_bytes, self.forget = self._chunks.scratch_bytes, self._chunks.forget

    def parts(self, firsts: np.ndarray, counts: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """As those of plain entries: runs of rows, chunk by chunk."""
        apart = np.flatnonzero(firsts[1:] != firsts[:-1] + counts[:-1]) + 1
        borders = [0, *apart.tolist(), len(firsts)]
        pieces: list[tuple[int, int, int, np.ndarray]] = []
        for start, stop in pairwise(borders):
            pieces += self._pieces(firsts[start:stop], counts[start:stop], places[start:stop])
        per_part = max(1, PART_BYTES // self._chunks.chunk_bytes)
        for first in range(0, len(pieces), per_part):
            yield _EncodedPart(self, pieces[first : first + per_part], out)

    def _pieces(
        self, firsts: np.ndarray, counts: np.ndarray, places: np.ndarray
    ) -> Iterator[tuple[int, int, int, np.ndarray]]:
        """Chunk, its first and last entry, and the place of each, of a run of rows."""
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

    def copy(self, descriptor: int, piece: tuple[int, int, int, np.ndarray], out: np.ndarray) -> None:
        """Put the entries of a piece in their places."""
        chunk, low, high, places = piece
        whole = high - low == self._per_chunk
        values = (self._chunks.whole if whole else self._chunks.shared)(descriptor, chunk)
        out[places] = values.view(self._dtype)[low:high]


class _EncodedPart:
    def __init__(
        self, entries: _EncodedEntries, pieces: list[tuple[int, int, int, np.ndarray]], out: np.ndarray
    ) -> None:
        self._entries, self._pieces, self._out = entries, pieces, out

    def __call__(self, descriptor: int) -> None:
        for piece in self._pieces:
            self._entries.copy(descriptor, piece, self._out)
