"""Check chunks against the checksums of an h5chunk file as they are read for training.

A checksum is of a chunk's stored bytes, padding included (`h5chunk.store.format.spec`): so chunks are checked whole,
however few of their rows are wanted. Compressed chunks that threads decode are checked as they lie in memory. Of what
goes straight to its place in a batch, or through HDF5, the bytes of the chunk are read once more from the file, which
the page cache holds: what is wrong on the disk, or in the page cache, is found; what happens behind it is not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import h5py
import numpy as np

from h5chunk.errors import FileError, OptionError, printable
from h5chunk.store.format.header import Header
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.chunk_table import ChunkTable, is_listed_wrongly
from h5chunk.store.hdf5.codecs import scratch
from h5chunk.store.hdf5.crc import crc32
from h5chunk.store.hdf5.ranges import PART_BYTES, Part, read_bytes
from h5chunk.store.read.fields import Field, MatrixField

OFF, FIRST, ALWAYS = "off", "first", "always"
PIECE_BYTES = 2 << 20  # read and summed at a time

_local = threading.local()


class Checksums:
    """The checksums of one dataset's chunks, and which of them this process has found right. It pickles.

    Parameters
    ----------
    expected : (num_chunks,) uint32
    always : bool
        Whether a chunk that was found right is checked again.
    """

    def __init__(self, expected: np.ndarray, *, always: bool) -> None:
        self.expected = expected
        self._right = None if always else np.zeros(len(expected), bool)

    def due(self, chunks: np.ndarray) -> np.ndarray:
        """Return which of some chunks are to be checked: (n,) bool."""
        return np.ones(len(chunks), bool) if self._right is None else ~self._right[chunks]

    def is_due(self, chunk: int) -> bool:
        """Return whether one chunk is to be checked."""
        return self._right is None or not self._right[chunk]

    def found_right(self, chunk: int) -> None:
        """Note that a chunk is right: it is not checked again, unless all always are."""
        if self._right is not None:
            self._right[chunk] = True


Sums = Mapping[str, Checksums]  # by field; of a matrix by ``field/indptr``, ``field/indices`` and ``field/data``
NO_SUMS: Sums = MappingProxyType({})


class ChunkChecks:
    """Checker of the chunks of one dataset, for any number of threads.

    Parameters
    ----------
    path : path
    name : str
        Of the field, for messages.
    dataset : h5py.Dataset
        Used now and not kept.
    table : ChunkTable
        Of its chunks.
    sums : Checksums
    indptr : (num_rows + 1,) int64, optional
        Where rows begin, of the entries of a matrix.
    num_samples : int, optional
        Where it has not as many rows.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        dataset: h5py.Dataset,
        table: ChunkTable,
        sums: Checksums,
        indptr: np.ndarray | None = None,
        num_samples: int | None = None,
    ) -> None:
        self._path, self._name, self._table, self._sums, self._indptr = path, name, table, sums, indptr
        self._num_rows = num_samples or dataset.shape[0]
        self._chunk_rows = (dataset.chunks or dataset.shape)[0]
        steps = zip(dataset.shape[1:], (dataset.chunks or dataset.shape)[1:], strict=True)
        self._across = math.prod(-(-size // step) for size, step in steps)

    def check_rows(self, descriptor: int, rows: np.ndarray) -> None:
        """Check the chunks that hold some of these rows of the dataset, if they are to be checked."""
        bands = np.unique(rows // self._chunk_rows)
        self.check(descriptor, (bands[:, None] * self._across + np.arange(self._across)).reshape(-1))

    def check_entries(self, descriptor: int, firsts: np.ndarray, counts: np.ndarray) -> None:
        """Check the chunks that hold some of these runs of entries."""
        self.check(descriptor, self._of_entries(firsts, counts))

    def check_all(self, descriptor: int) -> None:
        """Check all chunks."""
        self.check(descriptor, np.arange(len(self._table)))

    def parts(self, rows: np.ndarray) -> Iterator[Part]:
        """Divide `check_rows` into tasks for several threads; ``rows`` of a chunk lie side by side."""
        assert self._across == 1
        chunks = rows // self._chunk_rows
        return self._parts(chunks[np.append(True, chunks[1:] != chunks[:-1])] if len(chunks) else chunks)

    def entry_parts(self, firsts: np.ndarray, counts: np.ndarray) -> Iterator[Part]:
        """Divide `check_entries` into tasks for several threads."""
        return self._parts(self._of_entries(firsts, counts))

    def _parts(self, chunks: np.ndarray) -> Iterator[Part]:
        due = chunks[self._sums.due(chunks)]
        per_part = max(1, PART_BYTES // max(1, int(self._table.sizes.max(initial=0))))
        for first in range(0, len(due), per_part):
            yield partial(self.check, chunks=due[first : first + per_part])

    def _of_entries(self, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the chunks that hold any of these runs of entries, none of which is empty."""
        steps = np.zeros(len(self._table) + 1, np.int64)
        np.add.at(steps, firsts // self._chunk_rows, 1)
        np.add.at(steps, (firsts + counts - 1) // self._chunk_rows + 1, -1)
        return np.flatnonzero(np.cumsum(steps[:-1]))

    def check(self, descriptor: int, chunks: np.ndarray) -> None:
        """Read the stored bytes of chunks that are to be checked, and compare.

        Raises
        ------
        FileError
            A chunk is not what it was when it was written, or cannot be read.
        """
        for chunk in chunks[self._sums.due(chunks)].tolist():
            offset, size = int(self._table.offsets[chunk]), int(self._table.sizes[chunk])
            if offset < 0:
                raise FileError(f"{self._where(chunk)} was never written, though it has a checksum: {self._remedy}")
            found = 0
            for start in range(0, size, PIECE_BYTES):
                piece = scratch(_local, "piece", PIECE_BYTES)[: size - start]
                read_bytes(descriptor, offset + start, piece.data, partial(self._where_at, chunk))
                found = crc32(piece, found)
            self._compare(chunk, found)

    def check_stored(self, chunk: int, stored: np.ndarray) -> None:
        """Compare a chunk whose stored bytes are in memory."""
        if self._sums.is_due(chunk):
            self._compare(chunk, crc32(stored))

    def _compare(self, chunk: int, found: int) -> None:
        expected = int(self._sums.expected[chunk])
        if found != expected:
            raise FileError(
                f"{self._where(chunk)} does not match its checksum ({found:08x}, not {expected:08x}): its bytes are "
                f"not those that were written: {self._remedy}"
            )
        self._sums.found_right(chunk)

    @property
    def _remedy(self) -> str:
        return f"h5chunk verify {printable(self._path)} lists all such chunks, and --repair SRC writes them anew"

    def _where_at(self, chunk: int, _offset: int) -> str:
        return self._where(chunk)

    def _where(self, chunk: int) -> str:
        first, last = self._samples(chunk)
        return f"{printable(self._path)}: field {self._name!r}, chunk {chunk} (samples {first} to {last})"

    def _samples(self, chunk: int) -> tuple[int, int]:
        """Return the first and the last sample with elements in a chunk."""
        first = chunk // self._across * self._chunk_rows
        last = min(first + self._chunk_rows, self._num_rows) - 1
        if self._indptr is None:
            return first, last
        rows = np.searchsorted(self._indptr, (first, last), "right") - 1
        return int(rows[0]), int(rows[1])


def checks_of(
    path: Path, name: str, dataset: h5py.Dataset, table: ChunkTable, sums: Sums, indptr: np.ndarray | None = None
) -> ChunkChecks | None:
    """Return the checker of a field, or of a part of a matrix; None if it is not to be checked."""
    return ChunkChecks(path, name, dataset, table, sums[name], indptr) if name in sums else None


def check_mode(checksums: str) -> None:
    """Raise OptionError unless ``checksums`` is off, first or always."""
    if checksums not in (OFF, FIRST, ALWAYS):
        raise OptionError(f"checksums is {checksums!r}: give off, first or always")


def read_sums(
    file: h5py.File, path: Path, fields: Mapping[str, Field | MatrixField], header: Header | None, checksums: str
) -> dict[str, Checksums]:
    """Read the checksums of fields; none if they are not to be checked.

    Raises
    ------
    OptionError
        They shall be checked, but the file has none.
    FileError
        Those that it has cannot be.
    """
    check_mode(checksums)
    found: dict[str, Checksums] = {}
    if checksums == OFF:
        return found
    for name, field in fields.items():
        if isinstance(field, MatrixField):
            parts = ["indptr", "indices"] + (["data"] if field.value_dtype is not None else [])
            datasets = {f"{name}/{part}": f"{field.dataset}/{part}" for part in parts}
        else:
            datasets = {name: field.dataset}
        for key, dataset in datasets.items():
            expected = _expected(file, path, dataset, header, checksums)
            found[key] = Checksums(expected, always=checksums == ALWAYS)
    return found


def _expected(file: h5py.File, path: Path, name: str, header: Header | None, checksums: str) -> np.ndarray:
    dataset = file[name]
    chunks = dataset.chunks or dataset.shape
    count = math.prod(-(-size // step) for size, step in zip(dataset.shape, chunks, strict=True) if step)
    if not dataset.size:
        return np.empty(0, np.uint32)
    name = "/".join(part for part in name.split("/") if part not in ("", "."))
    table = None if header is None else file.get(f"{GROUP}/checksums/{name}")
    if not isinstance(table, h5py.Dataset):
        raise OptionError(
            f"checksums is {checksums!r}, but {printable(path)} has no checksums of {name!r}: leave checksums out, or "
            "write the file anew with h5chunk repack --window-chunks N (AnnData's with h5chunk convert), which adds "
            "them"
        )
    if is_listed_wrongly(dataset):
        raise FileError(f"{printable(path)}: HDF5 lists the chunks of {name!r} at wrong places: leave checksums out")
    if table.dtype != np.uint32 or table.shape != (count,):
        raise FileError(
            f"{printable(path)}: damaged: the checksums of {name!r} are {table.dtype} {table.shape}, but it has "
            f"{count} chunks: run h5chunk verify"
        )
    values: np.ndarray = table[()]
    return values
