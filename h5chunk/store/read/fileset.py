"""Read several files as one, with samples numbered file after file.

A set has one reader for each of its files, which opens it when the first of its samples is asked for. The chunks of
different files may differ in size; their fields must agree, and so must the classes that labels stand for.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import zlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path

import numpy as np

from h5chunk.errors import FileError, OptionError, printable
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.layout import plan_layout
from h5chunk.store.read.agreement import check_names, joined_field, joined_header, with_chunks
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.csr import CsrBuffers
from h5chunk.store.read.fields import MatrixField
from h5chunk.store.read.reader import H5Reader

RESERVED_DESCRIPTORS = 32  # of a process, beside those of data: standard streams, sockets, libraries


class FileSet(H5Reader):
    """Reader of rows of several files as if they were one.

    Parameters
    ----------
    paths : sequence of paths
    fields : mapping of str to str, or None
        As for `H5Reader`, in each of the files.
    name : path
        What messages call the set.
    trusted, checksums
        As for `H5Reader`, of each of the files.

    Attributes
    ----------
    chunk_starts : (num_chunks + 1,) int64, or None
        The number of each chunk's first sample; None: all chunks are of ``chunk_samples``, but for the last one. Where
        they differ, ``chunk_samples`` is what they have on average.
    header : Header or None
        What all files say of themselves, if all do. A set is shuffled if it was as a whole, when it was packed.

    Raises
    ------
    FileError
        A file cannot be opened, or there are more than this process may open.
    FieldError
        Fields differ, or the classes of labels.
    OptionError
        A file comes twice.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        fields: Mapping[str, str] | None,
        name: Path,
        *,
        trusted: bool = False,
        checksums: str = OFF,
    ) -> None:
        self.path, self.trusted, self.checksums = name, trusted, checksums
        _check_number(len(paths), name)
        self._readers = tuple(H5Reader(path, fields, trusted=trusted, checksums=checksums) for path in paths)
        _check_different(self.readers)
        check_names(self.readers)
        self.fields = {each: joined_field(self.readers, each) for each in self.readers[0].fields}
        self.matrix = next((field for field in self.fields.values() if isinstance(field, MatrixField)), None)
        lengths = [reader.num_samples for reader in self.readers]
        self._starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        self.num_samples = int(self.starts[-1])
        main = self.matrix or max(self.fields.values(), key=lambda field: field.grid.sample_bytes)
        sizes = _chunk_samples(self.readers)
        even, starts = _even_size(lengths, sizes), _starts_of_chunks(lengths, sizes)
        self.chunk_starts = None if even else starts
        self.chunk_samples = even or round(self.num_samples / (len(starts) - 1))
        self.main = self.fields[main.name] = with_chunks(main, self.chunk_samples)  # as orders think, and caches
        if isinstance(self.main, MatrixField):
            self.matrix = self.main
        self.header = joined_header(self.readers, self.num_samples, self.chunk_samples, self.chunk_bytes)
        self._cache: CacheSettings | None = None
        self._fingerprint = self._indptr = None

    @property
    def readers(self) -> tuple[H5Reader, ...]:
        """The reader of each file."""
        return self._readers

    @property
    def starts(self) -> np.ndarray:
        """The number of each file's first sample, and that of all samples: (num_files + 1,) int64."""
        return self._starts

    @property
    def fingerprint(self) -> int:
        """As `H5Reader.fingerprint`, of all files in their order."""
        if self._fingerprint is None:
            of_each = [(reader.fingerprint, reader.num_samples) for reader in self.readers]
            self._fingerprint = zlib.crc32(repr(of_each).encode())
        return self._fingerprint

    @property
    def indptr(self) -> np.ndarray:
        """Where each row of the matrices begins, as if their entries lay one behind the other: (num_rows + 1,) int64.

        Raises
        ------
        FileError
            A file is damaged, or was changed.
        """
        if self._indptr is None:
            lengths = [np.diff(reader.indptr) for reader in self.readers]
            self._indptr = np.concatenate(([0], np.cumsum(np.concatenate(lengths))))
        return self._indptr

    def set_caches(self, main: CacheSettings) -> None:
        """Share the cache ``main`` of the largest field out among the files, as each has one of its own."""
        if main != self._cache:
            self._cache = main
            for reader in self.readers:
                reader.set_caches(self._share(reader, main))

    def _share(self, reader: H5Reader, main: CacheSettings) -> CacheSettings:
        """Return the cache of one file: its part of the open chunks, and as many more as chance may give it."""
        grid = reader.main.grid
        if not main.nbytes or not grid.chunks:
            return CacheSettings(1, 0, main.w0)
        due = main.nbytes / max(1, self.main.grid.band_bytes) * grid.num_bands / max(1, self.main.grid.num_bands)
        bands = min(math.ceil(due + 3 * math.sqrt(due)) + 2, max(1, grid.num_bands))
        return CacheSettings(min(main.nslots, grid.num_slots), min(main.nbytes, bands * grid.band_bytes), main.w0)

    def cache_bytes(self, main: CacheSettings) -> int:
        """The most that the caches of the largest field take, all files together."""
        return sum(self._share(reader, main).nbytes for reader in self.readers)

    def caches_in_force(self) -> dict[str, CacheSettings]:
        """Return the caches that HDF5 uses in this process, by field: those of all files together."""
        found = [reader.caches_in_force() for reader in self.readers]
        return {
            name: CacheSettings(
                sum(each[name].nslots for each in found), sum(each[name].nbytes for each in found), found[0][name].w0
            )
            for name in self.fields
        }

    def read(self, name: str, rows: np.ndarray, out: np.ndarray | CsrBuffers) -> None:
        """Read rows of a field, as `H5Reader.read`.

        Raises
        ------
        FileError
            A file was changed or replaced, or cannot be read.
        """
        for number, some in self.by_file(rows):
            reader, whole = self.readers[number], len(some) == len(rows)
            there = out if whole else _room_of(some, out)
            try:
                reader.read(name, (rows if whole else rows[some]) - self.starts[number], there)
            except FileError as error:
                raise with_remedy(error, len(self.readers)) from error.__cause__
            if not whole and isinstance(out, np.ndarray):
                out[some] = there
            reader.check_unchanged()

    def by_file(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Each file in which there are any of these rows, and where they are among them, in the same order."""
        if not len(rows):
            return
        files = np.searchsorted(self.starts, rows, "right") - 1
        order = np.argsort(files.astype(np.uint16) if len(self.readers) <= 1 << 16 else files, kind="stable")
        borders = [0, *(np.flatnonzero(np.diff(files[order])) + 1).tolist(), len(rows)]
        for start, stop in pairwise(borders):
            some = order[start:stop]
            yield int(files[some[0]]), some

    def check_unchanged(self, descriptor: object = None) -> None:
        """Raise FileError unless all files are what they were; those that were opened, are as they are read."""
        if descriptor is None:
            for reader in self.readers:
                reader.check_unchanged()

    def close(self) -> None:
        """Close the files in this process; the next read opens them again."""
        for reader in self.readers:
            reader.close()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_readers": tuple(copy(reader) for reader in self.readers), "_indptr": None}


def _room_of(some: np.ndarray, out: np.ndarray | CsrBuffers) -> np.ndarray | CsrBuffers:
    """Return memory for some of the rows; those of a matrix go to their places at once."""
    if isinstance(out, np.ndarray):
        return np.empty((len(some), *out.shape[1:]), out.dtype)
    return CsrBuffers(np.append(out.starts[some], out.starts[-1]), out.indices, out.values)


def with_remedy(error: FileError, num_files: int) -> FileError:
    """Add the remedy to an error where no more files can be opened."""
    if os.strerror(errno.EMFILE) not in str(error):
        return error
    return FileError(f"{error}: a set of {num_files} files: raise ulimit -n, or pack them into fewer")


def _check_number(num_files: int, name: Path) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most != resource.RLIM_INFINITY and num_files + RESERVED_DESCRIPTORS > most:
        raise FileError(
            f"{printable(name)}: {num_files} files, but this process may have {most} open at a time: raise that with "
            f"ulimit -n {2 * num_files + 1024}, or pack them into fewer files"
        )


def _check_different(readers: Sequence[H5Reader]) -> None:
    seen: dict[tuple[int, ...], Path] = {}
    for reader in readers:
        other = seen.setdefault(reader.stamp[:2], reader.path)
        if other is not reader.path:
            raise OptionError(
                f"{printable(reader.path)}: the same file as {printable(other)}: name it once; for more of some "
                "samples use weights"
            )


def _chunk_samples(readers: Sequence[H5Reader]) -> list[int]:
    """Return the samples that are read together in each file; the same number where none has chunks."""
    if any(reader.main.grid.chunks for reader in readers):
        return [reader.chunk_samples for reader in readers]
    total = sum(reader.num_samples for reader in readers)
    return [plan_layout(max(1, total), max(1, readers[0].main.grid.sample_bytes)).chunk_samples] * len(readers)


def _even_size(lengths: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Return the samples of a chunk if all chunks are equal but for the last one; else None."""
    filled = [(length, size) for length, size in zip(lengths, sizes, strict=True) if length]
    if not filled:
        return max(1, *sizes)
    *others, (last, last_size) = filled
    size = filled[0][1]
    whole = all(each == size and length % size == 0 for length, each in others)
    return size if whole and (last_size == size or last <= min(size, last_size)) else None


def _starts_of_chunks(lengths: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    starts, done = [], 0
    for length, size in zip(lengths, sizes, strict=True):
        starts.append(np.arange(done, done + length, size, dtype=np.int64))
        done += length
    return np.concatenate([*starts, [done]])
