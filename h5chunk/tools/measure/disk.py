"""Measure reads of chunks by byte ranges, from the page cache and from the disk."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.store.hdf5.chunk_table import NotDirect, list_chunks
from h5chunk.store.hdf5.claims import same_file
from h5chunk.store.hdf5.open import opened
from h5chunk.store.read.fields import Field
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.measure.machine import NotMeasured, threads_rate

READ_BYTES = 8 << 20  # of one preadv
DISK_THREADS = 16  # reads under way at a time
DISK_BYTES = 256 << 20  # dropped from the page cache at a time
STILL_CACHED = 0.1  # if more of what was dropped is still there, it could not be dropped

_DONTNEED = getattr(os, "POSIX_FADV_DONTNEED", 0)
_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class ByteRange(NamedTuple):
    """Consecutive bytes of a file, which is identified by its number."""

    file: int
    offset: int
    size: int


Ranges = Sequence[ByteRange]


@dataclass(frozen=True)
class Stored:
    """Location of the bytes of several fields in one or several files, chunk by chunk in the order of their samples.

    ``files``, ``offsets``, ``sizes`` and ``first_samples`` are (n,) int64, with an entry per chunk, or run of rows.
    """

    paths: tuple[Path, ...]
    num_samples: int
    files: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    first_samples: np.ndarray

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def _select(self, chosen: np.ndarray, num_samples: int) -> Stored:
        arrays = (self.files, self.offsets, self.sizes, self.first_samples)
        return Stored(self.paths, num_samples, *(each[chosen] for each in arrays))

    def head(self, num_samples: int) -> Stored:
        """Return only the chunks that hold the first samples."""
        return self._select(self.first_samples < num_samples, num_samples)

    def ranges(self) -> Ranges:
        """Return the byte ranges of all chunks."""
        return list(map(ByteRange, self.files.tolist(), self.offsets.tolist(), self.sizes.tolist()))

    def chunks(self) -> Ranges:
        """Return the byte ranges of chunks, without those smaller than a page if there are others."""
        large = self.sizes >= mmap.PAGESIZE
        return (self._select(large, self.num_samples) if large.any() else self).ranges()

    def runs(self) -> Ranges:
        """Return the ranges of all bytes, in as few reads as READ_BYTES allows."""
        merged: list[ByteRange] = []
        for file, offset, size in sorted(self.ranges()):
            last = merged[-1] if merged else None
            if last is not None and (last.file, last.offset + last.size) == (file, offset):
                merged[-1] = ByteRange(file, last.offset, last.size + size)
            else:
                merged.append(ByteRange(file, offset, size))
        return cut(merged)


def cut(ranges: Ranges) -> Ranges:
    """Cut ranges into pieces of at most READ_BYTES."""
    return [
        ByteRange(file, offset + start, min(READ_BYTES, size - start))
        for file, offset, size in ranges
        for start in range(0, size, READ_BYTES)
    ]


def locate(reader: H5Reader) -> Stored:
    """Locate the chunks of all fields; NotMeasured if they lie outside the reader's files, or were never written."""
    parts, first = [], 0
    for number, each in enumerate(reader.readers):
        with opened(each.path) as file:
            for field in each.fields.values():
                if isinstance(field, Field) and each.num_samples:
                    offsets, sizes, firsts = _locate_field(file, field, each.chunk_samples)
                    parts.append((np.full(len(offsets), number), offsets, sizes, firsts + first))
        first += each.num_samples
    files, offsets, sizes, firsts = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not sizes.sum():
        raise NotMeasured("its data was never written")
    paths, order = tuple(each.path for each in reader.readers), np.argsort(firsts, kind="stable")
    return Stored(paths, reader.num_samples, files[order], offsets[order], sizes[order], firsts[order])


def _locate_field(file: h5py.File, field: Field, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return offsets, sizes and first samples of a field's chunks; of runs of ``rows`` rows if it is contiguous."""
    dataset = file[field.dataset]
    properties = dataset.id.get_create_plist()
    elsewhere = not same_file(dataset, file)
    plain = properties.get_layout() in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS)
    if elsewhere or not plain or (dataset.chunks is None and properties.get_external_count()):
        raise NotMeasured(f"the bytes of field {field.name!r} lie in other files, or in the file's header")
    try:
        table = list_chunks(dataset)
    except NotDirect as error:
        raise NotMeasured(f"field {field.name!r}: {error}") from None
    if dataset.chunks is None:
        firsts = np.arange(0, len(dataset), rows)
        offsets = table.offsets[0] + firsts * field.grid.sample_bytes
        sizes = np.minimum(rows, len(dataset) - firsts) * field.grid.sample_bytes
        return (offsets, sizes, firsts) if table.offsets[0] >= 0 else (firsts[:0],) * 3
    per_band = max(1, len(table) // -(-len(dataset) // dataset.chunks[0]))
    firsts = np.arange(len(table)) // per_band * dataset.chunks[0]
    there = (table.offsets >= 0) & (table.sizes > 0)
    return table.offsets[there], table.sizes[there], firsts[there]


class FileReads:
    """Read byte ranges of files in threads, into reused memory."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._descriptors: list[int] = []
        for path in paths:
            try:
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                self.close()
                raise FileError(f"{printable(path)}: cannot be opened: {error.strerror}") from error
        self._buffers: list[np.ndarray] = []
        self.num_read = 0  # ranges, by the last call

    def rate(self, ranges: Ranges, num_threads: int, seconds: float, *, again: bool) -> float:
        """Measure bytes/s; with ``again``, restart at the first range after the last."""
        while len(self._buffers) < num_threads:
            self._buffers.append(np.zeros(READ_BYTES, np.uint8))
        numbers = itertools.count()
        self.num_read = 0

        def read(thread: int) -> int:
            number = next(numbers)
            if number >= len(ranges) and not again:
                return 0
            self.read(ranges[number % len(ranges)], self._buffers[thread])
            return ranges[number % len(ranges)].size

        rate = threads_rate(read, num_threads, seconds)
        self.num_read = min(next(numbers), len(ranges))
        return rate

    def fill_page_cache(self, stored: Stored, num_threads: int, seconds: float, memory_bytes: int) -> tuple[int, bool]:
        """Read the first chunks into the page cache, as many as memory and time allow.

        Returns the number of samples in the page cache, at least one, and whether time sufficed for all that fit.
        """
        fitting = int(np.searchsorted(np.cumsum(stored.sizes), memory_bytes, side="right"))
        done = 0
        if fitting:
            self.rate(stored.ranges()[:fitting], num_threads, seconds, again=False)
            done = self.num_read
        samples = stored.num_samples if done == len(stored.sizes) else int(stored.first_samples[done])
        return max(1, samples), done == fitting

    def read(self, wanted: ByteRange, buffer: np.ndarray) -> None:
        """Read a range into a buffer; FileError if it cannot be read, or the file ends too early."""
        done = 0
        while done < wanted.size:
            try:
                free = buffer[: wanted.size - done].data
                more = os.preadv(self._descriptors[wanted.file], [free], wanted.offset + done)
            except OSError as error:
                raise FileError(f"{printable(self._paths[wanted.file])}: cannot be read: {error.strerror}") from error
            if not more:
                where = printable(self._paths[wanted.file])
                raise FileError(f"{where}: the file ends in the middle of its data: it was cut short")
            done += more

    def drop(self, ranges: Ranges) -> None:
        """Drop ranges, or if necessary whole files, from the page cache; NotMeasured if they stay there."""
        if not hasattr(os, "posix_fadvise"):
            raise NotMeasured("this system cannot drop a file from the page cache")
        page = mmap.PAGESIZE
        for file, offset, size in ranges:
            start = offset // page * page
            length = -(-(offset + size) // page) * page - start
            os.posix_fadvise(self._descriptors[file], start, length, _DONTNEED)
        if self.cached_share(ranges) > STILL_CACHED:
            for descriptor in self._descriptors:
                os.posix_fadvise(descriptor, 0, 0, _DONTNEED)
            if (share := self.cached_share(ranges)) > STILL_CACHED:
                raise NotMeasured(
                    f"{share:.0%} of it stays in the page cache: the file system is in memory (tmpfs), or the file "
                    "was written just now (run sync first), or it is open elsewhere"
                )

    @property
    def can_be_checked(self) -> bool:
        """Whether the system reports what is cached, as it does for files that this process may write."""
        return all(os.access(path, os.W_OK) or os.stat(path).st_uid == os.geteuid() for path in self._paths)

    def cached_share(self, ranges: Ranges) -> float:
        """Return the fraction of these ranges' pages that is in the page cache; 0 if unknown. Source: mincore(2)."""
        if not self.can_be_checked or not ranges:
            return 0.0
        cached = pages = 0
        for file, offset, size in ranges[:: max(1, len(ranges) // 256)]:
            start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            length = offset + size - start
            with mmap.mmap(self._descriptors[file], length, access=mmap.ACCESS_READ, offset=start) as mapped:
                memory, states = np.frombuffer(mapped, np.uint8), np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
                if not _mincore(memory.ctypes.data, length, states.ctypes.data):
                    cached, pages = cached + int((states & 1).sum()), pages + len(states)
                del memory
        return cached / max(1, pages)

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def disk_rates(reads: FileReads, chunks: Ranges, seconds: float) -> Iterator[float]:
    """Yield bytes/s of chunks in shuffled order, which are dropped from the page cache before each turn reads them.

    A turn takes about this many seconds; the next turn continues after it. NotMeasured if the page cache keeps chunks.
    """
    shuffled = itertools.cycle([chunks[place] for place in np.random.default_rng(0).permutation(len(chunks))])
    while True:
        moved = taken = 0.0
        while taken < seconds:
            group: list[ByteRange] = []
            num_bytes = 0
            while num_bytes < DISK_BYTES and len(group) < len(chunks):
                group.append(next(shuffled))
                num_bytes += group[-1].size
            reads.drop(group)
            started = time.perf_counter()
            rate = reads.rate(cut(group), DISK_THREADS, seconds - taken, again=False)
            step = time.perf_counter() - started
            moved, taken = moved + rate * step, taken + step
        yield moved / taken
