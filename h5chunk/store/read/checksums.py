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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Checksums:
    """The checksums of one dataset's chunks, (num_chunks,) uint32, and which chunks this process has found ``right``.

    These need no other look, unless all are checked ``always``.
    """

    expected: np.ndarray
    right: np.ndarray
    always: bool


Sums = Mapping[str, Checksums]  # by field; of a matrix by ``field/indptr``, ``field/indices`` and ``field/data``
NO_SUMS: Sums = MappingProxyType({})


class ChunkChecks:
    """Checker of the chunks of one dataset, for any number of threads.

    ``indptr`` says which rows the entries of a matrix belong to, for messages.
    """

    def __init__(
        self, path: Path, name: str, table: ChunkTable, sums: Checksums, indptr: np.ndarray | None = None
    ) -> None:
        self._path, self._name, self._table, self._sums, self._indptr = path, name, table, sums, indptr
        self._chunk_rows, self._across = table.chunk_shape[0], table.num_across

    def of_rows(self, rows: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Return the chunks that hold some of these rows of the dataset, at least one; or as many from each row on."""
        bands = rows // self._chunk_rows
        if counts is None:
            bands = np.unique(bands[np.append(True, bands[1:] != bands[:-1])])  # few are left to sort
        else:
            steps = np.zeros(len(self._table) + 1, np.int64)
            np.add.at(steps, bands, 1)
            np.add.at(steps, (rows + counts - 1) // self._chunk_rows + 1, -1)
            bands = np.flatnonzero(np.cumsum(steps[:-1]))
        return (bands[:, None] * self._across + np.arange(self._across)).reshape(-1)

    def parts(self, chunks: np.ndarray) -> Iterator[Part]:
        """Divide `check` into tasks for several threads."""
        due = chunks[~self._sums.right[chunks]]
        per_part = max(1, PART_BYTES // max(1, int(self._table.sizes.max(initial=0))))
        for first in range(0, len(due), per_part):
            yield partial(self.check, chunks=due[first : first + per_part])

    def check(self, descriptor: int, chunks: np.ndarray) -> None:
        """Read the stored bytes of chunks that are to be checked; FileError: one is not what it was when written."""
        for chunk in chunks[~self._sums.right[chunks]].tolist():
            self._compare(chunk, self._read(descriptor, chunk))

    def _read(self, descriptor: int, chunk: int) -> int:
        """Return the checksum of a chunk in the file."""
        offset, size = int(self._table.offsets[chunk]), int(self._table.sizes[chunk])
        if offset < 0:
            raise FileError(f"{self._where(chunk)} was never written, though it has a checksum: {self._remedy}")
        found = 0
        for start in range(0, size, PIECE_BYTES):
            piece = scratch(_local, "piece", PIECE_BYTES)[: size - start]
            read_bytes(descriptor, offset + start, piece.data, lambda _: self._where(chunk))
            found = crc32(piece, found)
        return found

    def check_stored(self, chunk: int, stored: np.ndarray) -> None:
        """Compare a chunk whose stored bytes are in memory."""
        if not self._sums.right[chunk]:
            self._compare(chunk, crc32(stored))

    def _compare(self, chunk: int, found: int) -> None:
        expected = int(self._sums.expected[chunk])
        if found != expected:
            raise FileError(
                f"{self._where(chunk)} does not match its checksum ({found:08x}, not {expected:08x}): its bytes are "
                f"not those that were written: {self._remedy}"
            )
        if not self._sums.always:
            self._sums.right[chunk] = True

    @property
    def _remedy(self) -> str:
        return f"h5chunk verify {printable(self._path)} lists all such chunks, and --repair SRC writes them anew"

    def _where(self, chunk: int) -> str:
        """Name a chunk, and the first and the last sample with elements in it."""
        first, last = self._table.rows(chunk)
        if self._indptr is not None:
            first, last = (np.searchsorted(self._indptr, (first, last), "right") - 1).tolist()
        return f"{printable(self._path)}: field {self._name!r}, chunk {chunk} (samples {first} to {last})"


def read_sums(
    file: h5py.File, path: Path, fields: Mapping[str, Field | MatrixField], header: Header | None, checksums: str
) -> dict[str, Checksums]:
    """Read the checksums of fields; none if they are not to be checked. OptionError: they shall be, but there are none.

    Raises FileError if those that the file has cannot be.
    """
    if checksums not in (OFF, FIRST, ALWAYS):
        raise OptionError(f"checksums is {checksums!r}: give off, first or always")
    if checksums == OFF:
        return {}
    datasets: dict[str, str] = {}
    for name, field in fields.items():
        if isinstance(field, MatrixField):
            datasets |= {f"{name}/{part}": f"{field.dataset}/{part}" for part in ("indptr", *field.lists)}
        else:
            datasets[name] = field.dataset
    found = {}
    for name, dataset in datasets.items():
        expected = _expected(file, path, dataset, header, checksums)
        found[name] = Checksums(expected, np.zeros(len(expected), bool), checksums == ALWAYS)
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
