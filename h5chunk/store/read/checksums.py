"""Check chunks against the checksums of an h5chunk file as they are read for training.

A checksum covers all stored bytes of a chunk, including padding (`h5chunk.store.format.spec`), so the complete chunk is
needed even if few of its rows are requested. Chunks that threads decode are checked in memory, and so are uncompressed
chunks whose rows are all read by native threads. Other chunks are read a second time, usually from the page cache. This
second read detects errors of the disk and of the page cache, but not errors of the first read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, OptionError, printable
from h5chunk.native import CHECKSUM, DONE, JOB, VERIFY, Result, available, run
from h5chunk.store.format.header import Header
from h5chunk.store.format.spec import CHECKSUMS
from h5chunk.store.hdf5.chunk_table import ChunkTable, is_listed_wrongly
from h5chunk.store.hdf5.codecs import crc32, scratch
from h5chunk.store.hdf5.ranges import PART_BYTES, Ranges, VectorTask, held, read_bytes, read_error, read_jobs
from h5chunk.urls import local_copy_of

OFF, FIRST, ALWAYS = "off", "first", "always"
PIECE_BYTES = 2 << 20  # bytes that are read and added to a checksum at a time

_local = threading.local()


@dataclass(frozen=True)
class Checksums:
    """The checksums of the chunks of a dataset, and which chunks have already been verified."""

    expected: np.ndarray  # (num_chunks,) uint32
    verified: np.ndarray  # (num_chunks,) bool: whether this process has verified the chunk; all False if ``always``
    always: bool  # whether to verify chunks at every read


Sums = Mapping[str, Checksums]  # by field, or by ``field/indptr``, ``field/data`` ... if samples differ in length
NO_SUMS: Sums = MappingProxyType({})


class ChunkChecks:
    """The checksums of one dataset's chunks, which any number of threads can verify.

    If the ``indptr`` of a matrix is given, messages name rows instead of entries.
    """

    def __init__(
        self, path: Path, name: str, table: ChunkTable, sums: Checksums, indptr: np.ndarray | None = None, file: int = 0
    ) -> None:
        self._path, self._name, self.table, self.sums, self._indptr = path, name, table, sums, indptr
        self.file = file  # its number in the data set
        self._chunk_rows, self._across, self._are_done = table.chunk_shape[0], table.num_across, False

    @property
    def are_done(self) -> bool:
        """True if all chunks have been verified."""
        self._are_done = self._are_done or bool(self.sums.verified.all())
        return self._are_done

    def of_rows(self, rows: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
        """Return the indices of the chunks that contain ``rows``: (n,) int64.

        With ``counts``, each ``rows[i]`` is the first of ``counts[i]`` consecutive rows.
        """
        bands = rows // self._chunk_rows
        if counts is None:
            bands = np.unique(bands[np.append(True, bands[1:] != bands[:-1])])  # drops repeats before the slow sort
        else:
            steps = np.zeros(len(self.table) + 1, np.int64)
            np.add.at(steps, bands, 1)
            np.add.at(steps, (rows + counts - 1) // self._chunk_rows + 1, -1)
            bands = np.flatnonzero(np.cumsum(steps[:-1]))
        return (bands[:, None] * self._across + np.arange(self._across)).reshape(-1)

    def tasks(self, chunks: np.ndarray) -> Iterator[CheckTask]:
        """Yield tasks that verify ``chunks``, except for those that are already verified."""
        for part in self._divided(chunks[~self.sums.verified[chunks]]):
            yield CheckTask(self, part)

    def are_read_whole(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows belong to unverified chunks whose rows are all requested: (n,) bool.

        The rows of a chunk must be adjacent and ascending in ``rows``.
        """
        chunks = rows // self._chunk_rows
        firsts = np.append(0, np.flatnonzero(chunks[1:] != chunks[:-1]) + 1)
        counts = np.diff(np.append(firsts, len(rows)))
        follows = np.append(True, rows[1:] == rows[:-1] + 1)
        follows[firsts] = True
        whole = (counts == self._chunk_rows) & np.logical_and.reduceat(follows, firsts)
        return np.repeat(whole & ~self.sums.verified[chunks[firsts]], counts)

    def whole_tasks(self, rows: np.ndarray, vectors: np.ndarray, out: object) -> Iterator[CheckTask]:
        """Yield tasks that read and verify complete chunks. ``rows`` has all rows of these chunks.

        ``vectors``, (n, 2) uintp, has the buffer of each row, as for `VectorTask`.
        """
        count = self._chunk_rows
        chunks = rows[::count] // count
        firsts, offsets, sizes = np.arange(len(chunks)) * count, self.table.offsets[chunks], self.table.sizes[chunks]
        for part in self._divided(np.arange(len(chunks))):
            jobs = read_jobs(vectors, firsts[part], np.full(len(part), count), offsets[part], sizes[part])
            yield CheckTask(self, chunks[part], VectorTask(jobs, vectors, out, self._where_at, self.file))

    def _divided(self, chunks: np.ndarray) -> Iterator[np.ndarray]:
        """Divide an array that has one element per chunk into arrays for tasks of about `PART_BYTES`."""
        per_part = max(1, PART_BYTES // max(1, int(self.table.sizes.max(initial=0))))
        return (chunks[first : first + per_part] for first in range(0, len(chunks), per_part))

    def check(self, descriptor: int, chunks: np.ndarray) -> None:
        """Read and verify ``chunks``, except for those that are already verified.

        Raises FileError if a checksum does not match.
        """
        for chunk in chunks[~self.sums.verified[chunks]].tolist():
            offset, size, actual = int(self.table.offsets[chunk]), int(self.table.sizes[chunk]), 0
            if offset < 0:
                raise self._error(chunk, "was never written, although it has a checksum")
            for start in range(0, size, PIECE_BYTES):
                piece = scratch(_local, "piece", PIECE_BYTES)[: size - start]
                read_bytes(descriptor, offset + start, piece.data, self._where_at)
                actual = crc32(piece, actual)
            self.compare(chunk, actual)

    def check_stored(self, chunk: int, stored: np.ndarray) -> None:
        """Verify a chunk from its stored bytes in memory, unless it is already verified."""
        if not self.sums.verified[chunk]:
            self.compare(chunk, crc32(stored))

    def compare(self, chunk: int, actual: int) -> None:
        """Mark a chunk as verified if its checksum is ``actual``. Otherwise raise FileError."""
        if actual != self.sums.expected[chunk]:
            raise self.mismatch(chunk, actual)
        self.mark_verified(chunk)

    def mark_verified(self, chunks: int | np.ndarray) -> None:
        """Mark chunks as verified, so that they are not verified again. Do nothing if every read must be verified."""
        if not self.sums.always:
            self.sums.verified[chunks] = True

    def mismatch(self, chunk: int, actual: int) -> FileError:
        """Return the error for a chunk whose checksum is ``actual``."""
        problem = f"does not match its checksum ({actual:08x}, not {self.sums.expected[chunk]:08x})"
        return self._error(chunk, f"{problem}, because its bytes have changed since they were written")

    def _error(self, chunk: int, problem: str) -> FileError:
        remedy = "to list all such chunks, with --repair SOURCE to repair images, or with --accept FIELD if they were "
        remedy += "changed on purpose"
        return FileError(f"{self.where(chunk)} {problem}: run h5chunk verify {printable(self._path)} {remedy}")

    def _where_at(self, offset: int) -> str:
        return self.where(self.table.chunk_at(offset))

    def where(self, chunk: int) -> str:
        """Return a text that names a chunk and its first and last samples, for messages."""
        first, last = self.table.rows(chunk)
        if self._indptr is not None:
            first, last = (np.searchsorted(self._indptr, (first, last), "right") - 1).tolist()
        return f"{printable(self._path)}: field {self._name!r}, chunk {chunk} (samples {first} to {last})"


class CheckTask:
    """A task that verifies chunks. It has the interface of `VectorTask`.

    With ``read``, a task that reads these chunks, native threads verify them while they are in the CPU's cache.
    """

    def __init__(self, checks: ChunkChecks, chunks: np.ndarray, read: VectorTask | None = None) -> None:
        self._checks, self._chunks, self._read, self.file = checks, chunks, read, checks.file

    @property
    def ranges(self) -> Iterator[tuple[int, Ranges]]:
        """The byte ranges that the task reads, by number of the file."""
        yield self.file, (self._checks.table.offsets[self._chunks], self._checks.table.sizes[self._chunks])

    def __call__(self, files: Any) -> None:
        if self._read is not None and available():
            (_, ranges), *_ = self.ranges
            with held(files.descriptor(self.file), *ranges):
                result = run(self.jobs(files))
            if result.status != DONE:
                raise self.error_of(result)
            self.end()
        else:
            if self._read is not None:
                self._read(files)
            with files.opened(self.file) as descriptor:
                self._checks.check(descriptor, self._chunks)
        files.check(self.file)

    def jobs(self, files: Any) -> np.ndarray:
        if self._read is not None:
            jobs = self._read.jobs(files)
            jobs["is_checked"] = 1
        else:
            jobs = np.zeros(len(self._chunks), JOB)
            jobs["kind"], jobs["descriptor"] = VERIFY, files.descriptor(self.file)
            jobs["offset"] = self._checks.table.offsets[self._chunks]
            jobs["num_bytes"] = self._checks.table.sizes[self._chunks]
        jobs["expected"] = self._checks.sums.expected[self._chunks]
        return jobs

    def end(self) -> None:
        self._checks.mark_verified(self._chunks)

    def error_of(self, result: Result) -> FileError:
        chunk = self._checks.table.chunk_at(result.offset)
        if result.status != CHECKSUM:
            return read_error(self._checks.where(chunk), result)
        return self._checks.mismatch(chunk, result.error & 0xFFFFFFFF)


def read_sums(
    file: h5py.File, path: Path, fields: Mapping[str, Any], header: Header | None, checksums: str
) -> dict[str, Checksums]:
    """Read the checksums of fields. The result is empty if ``checksums`` is "off".

    The bytes of a remote object that are kept on the disk are always compared with checksums, if it has any. Raises
    OptionError if the file has no checksums, and FileError if they are invalid.
    """
    if checksums not in (OFF, FIRST, ALWAYS):
        raise OptionError(f"checksums is {checksums!r}: use off, first or always")
    if checksums == OFF:
        mirror = local_copy_of(path)
        with suppress(OptionError):  # a file without checksums
            return {} if mirror is None or not mirror.keeps else read_sums(file, path, fields, header, FIRST)
        return {}
    datasets: dict[str, str] = {}
    for field in fields.values():
        datasets |= field.stored_datasets
    sums = {}
    for name, dataset in datasets.items():
        expected = _expected(file, path, dataset, header, checksums)
        sums[name] = Checksums(expected, np.zeros(len(expected), bool), checksums == ALWAYS)
    return sums


def _expected(file: h5py.File, path: Path, name: str, header: Header | None, checksums: str) -> np.ndarray:
    dataset = file[name]
    chunks = dataset.chunks or dataset.shape
    count = math.prod(-(-size // step) for size, step in zip(dataset.shape, chunks, strict=True) if step)
    if not dataset.size:
        return np.empty(0, np.uint32)
    name = "/".join(part for part in name.split("/") if part not in ("", "."))
    table = None if header is None else file.get(f"{CHECKSUMS}/{name}")
    if not isinstance(table, h5py.Dataset):
        raise OptionError(
            f"checksums is {checksums!r}, but {printable(path)} has no checksums of {name!r}: leave checksums out, or "
            "add them with h5chunk repack --window-chunks N (for AnnData files, with h5chunk convert)"
        )
    if is_listed_wrongly(dataset):
        raise FileError(f"{printable(path)}: HDF5 lists wrong offsets for the chunks of {name!r}: leave checksums out")
    if table.dtype != np.uint32 or table.shape != (count,):
        raise FileError(
            f"{printable(path)}: the checksums of {name!r} are damaged ({table.dtype} {table.shape} for {count} "
            "chunks): run h5chunk verify"
        )
    values: np.ndarray = table[()]
    return values
