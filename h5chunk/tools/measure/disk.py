"""Measure reads of chunks by byte ranges, from the page cache and from the disk."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import h5py
import numpy as np

from h5chunk.errors import printable
from h5chunk.store.hdf5.chunk_table import NotDirect, list_chunks
from h5chunk.store.hdf5.open import opened, same_file
from h5chunk.store.hdf5.ranges import open_descriptor, read_bytes
from h5chunk.store.read.fields import Field
from h5chunk.store.read.ragged import RaggedField
from h5chunk.store.read.source import Source
from h5chunk.tools.measure.machine import NotMeasured, threads_rate

READ_BYTES = 8 << 20  # largest read
DISK_THREADS = 16  # concurrent reads
DISK_BYTES = 256 << 20  # bytes that are dropped from the page cache at a time
STILL_CACHED = 0.1  # dropping data has failed if more than this fraction stays in the page cache

_DONTNEED = getattr(os, "POSIX_FADV_DONTNEED", 0)
_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class ByteRange(NamedTuple):
    """Consecutive bytes of a file, such as a chunk."""

    file: int  # index of the file in the reader
    offset: int
    size: int
    first_sample: int = 0  # index of the first sample that has data in these bytes


Ranges = Sequence[ByteRange]
Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def merge(ranges: Ranges) -> Ranges:
    """Join adjacent ranges, and cut the result into pieces of at most READ_BYTES."""
    merged: list[ByteRange] = []
    for range_ in sorted(ranges):
        last = merged[-1] if merged else None
        if last is not None and (last.file, last.offset + last.size) == (range_.file, range_.offset):
            merged[-1] = last._replace(size=last.size + range_.size)
        else:
            merged.append(range_)
    return cut(merged)


def cut(ranges: Ranges) -> Ranges:
    """Cut ranges into pieces of at most READ_BYTES."""
    return [
        ByteRange(range_.file, range_.offset + start, min(READ_BYTES, range_.size - start))
        for range_ in ranges
        for start in range(0, range_.size, READ_BYTES)
    ]


def large(ranges: Ranges) -> Ranges:
    """Return the ranges of at least one page, or all ranges if none is that large."""
    return [range_ for range_ in ranges if range_.size >= mmap.PAGESIZE] or ranges


def locate(reader: Source) -> list[ByteRange]:
    """List the chunks of all fields in the order of their samples.

    Contiguous fields are cut into pieces of similar size. Raises NotMeasured if the data is outside of
    the reader's files, or was never written.
    """
    found: list[ByteRange] = []
    first = 0
    for number, single in enumerate(reader.readers):
        with opened(single.path) as file:
            for field in single.fields.values():
                if not single.num_samples:
                    continue
                if isinstance(field, Field):
                    located = [_locate_field(file, field.name, file[field.dataset], single.chunk_samples)]
                else:
                    located = _locate_ragged(file, field, single.indptr_of(field.name))
                for columns in located:
                    for offset, size, sample in zip(*(column.tolist() for column in columns), strict=True):
                        found.append(ByteRange(number, offset, size, first + sample))
        first += single.num_samples
    if not any(single.size for single in found):
        raise NotMeasured("the data was never written to the file")
    return sorted(found, key=lambda single: single.first_sample)


def _locate_ragged(file: h5py.File, field: RaggedField, indptr: np.ndarray) -> list[Columns]:
    """Return the offsets, sizes and first samples of the chunks of each dataset with entries."""
    found = []
    for part in field.entry_datasets if field.num_entries else ():
        offsets, sizes, entries = _locate_field(file, field.name, file[field.path_of(part)], READ_BYTES)
        found.append((offsets, sizes, np.searchsorted(indptr, entries, "right") - 1))
    return found


def _locate_field(file: h5py.File, name: str, dataset: h5py.Dataset, rows: int) -> Columns:
    """Return the offsets, sizes and first rows of a dataset's chunks.

    A contiguous dataset is cut into pieces of ``rows`` rows instead.
    """
    properties = dataset.id.get_create_plist()
    elsewhere = not same_file(dataset, file)
    plain = properties.get_layout() in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS)
    if elsewhere or not plain or (dataset.chunks is None and properties.get_external_count()):
        raise NotMeasured(f"the data of field {name!r} is stored in other files, or in the file's header")
    try:
        table = list_chunks(dataset)
    except NotDirect as error:
        raise NotMeasured(f"field {name!r} cannot be located ({error})") from None
    if dataset.chunks is None:
        firsts = np.arange(0, len(dataset), rows)
        row_bytes = dataset.nbytes // len(dataset)
        offsets = table.offsets[0] + firsts * row_bytes
        sizes = np.minimum(rows, len(dataset) - firsts) * row_bytes
        return (offsets, sizes, firsts) if table.offsets[0] >= 0 else (firsts[:0],) * 3
    per_band = max(1, len(table) // -(-len(dataset) // dataset.chunks[0]))
    firsts = np.arange(len(table)) // per_band * dataset.chunks[0]
    written = (table.offsets >= 0) & (table.sizes > 0)
    return _join(table.offsets[written], table.sizes[written], firsts[written])


def _join(offsets: np.ndarray, sizes: np.ndarray, firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join chunks that belong to the same samples and follow each other in the file."""
    apart = (firsts[1:] != firsts[:-1]) | (offsets[1:] != offsets[:-1] + sizes[:-1])
    starts = np.append(0, np.flatnonzero(apart) + 1)[: len(offsets)]
    return offsets[starts], np.add.reduceat(sizes, starts) if len(starts) else sizes, firsts[starts]


class FileReads:
    """Read the chunks of a reader's files in threads, into reused memory.

    Raises NotMeasured in the same cases as `locate`.
    """

    def __init__(self, reader: Source) -> None:
        self._paths = [single.path for single in reader.readers]
        self.num_samples = reader.num_samples
        with ExitStack() as closing:
            self._descriptors: list[int] = []
            for path in self._paths:
                self._descriptors.append(open_descriptor(path))
                closing.callback(os.close, self._descriptors[-1])
            self.stored = locate(reader)
            self.close = closing.pop_all().close
        self.num_bytes = sum(single.size for single in self.stored)
        self._buffers: list[np.ndarray] = []
        self.num_read = 0  # number of ranges that the last call of `rate` read

    def rate(self, ranges: Ranges, num_threads: int, seconds: float, *, again: bool) -> float:
        """Measure bytes/s of reading ranges in order. With ``again``, start over after the last range."""
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

    def head(self, num_samples: int) -> Ranges:
        """Return the chunks that contain the first samples."""
        return [range_ for range_ in self.stored if range_.first_sample < num_samples]

    def fill_page_cache(self, num_threads: int, seconds: float, memory_bytes: int) -> tuple[int, bool]:
        """Read as many of the first chunks into the page cache as memory and time allow.

        Returns the number of samples in the page cache, at least one, and whether all chunks that fit in memory were
        read in time.
        """
        fitting = bisect.bisect_right(list(itertools.accumulate(range_.size for range_ in self.stored)), memory_bytes)
        done = 0
        if fitting:
            self.rate(self.stored[:fitting], num_threads, seconds, again=False)
            done = self.num_read
        samples = self.num_samples if done == len(self.stored) else self.stored[done].first_sample
        return max(1, samples), done == fitting

    def read(self, range_: ByteRange, buffer: np.ndarray) -> None:
        """Read a range in pieces, all into the same buffer. Raise FileError if it cannot be read completely."""
        path = self._paths[range_.file]
        for piece in cut([range_]):
            memory = buffer[: piece.size].data
            read_bytes(self._descriptors[piece.file], piece.offset, memory, lambda _: printable(path))

    def drop(self, ranges: Ranges) -> None:
        """Drop ranges from the page cache, or entire files if that fails.

        Raises NotMeasured if the ranges remain cached.
        """
        if not hasattr(os, "posix_fadvise"):
            raise NotMeasured("this system cannot drop a file from the page cache")
        page = mmap.PAGESIZE
        for range_ in ranges:
            start = range_.offset // page * page
            length = -(-(range_.offset + range_.size) // page) * page - start
            os.posix_fadvise(self._descriptors[range_.file], start, length, _DONTNEED)
        if self.cached_share(ranges) > STILL_CACHED:
            for descriptor in self._descriptors:
                os.posix_fadvise(descriptor, 0, 0, _DONTNEED)
            if (share := self.cached_share(ranges)) > STILL_CACHED:
                raise NotMeasured(
                    f"{share:.0%} of the data stays in the page cache, because the file system is in memory (tmpfs), "
                    "the file was written just now (run sync first), or another process has it open"
                )

    @property
    def can_be_checked(self) -> bool:
        """True if mincore(2) shows which pages are cached, which requires that this process may write the files."""
        return all(os.access(path, os.W_OK) or os.stat(path).st_uid == os.geteuid() for path in self._paths)

    def cached_share(self, ranges: Ranges) -> float:
        """Return the fraction of the ranges' pages that is in the page cache, by mincore(2); 0 if unknown."""
        if not self.can_be_checked or not ranges:
            return 0.0
        cached = pages = 0
        for file, offset, size, _ in ranges[:: max(1, len(ranges) // 256)]:
            start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            length = offset + size - start
            with mmap.mmap(self._descriptors[file], length, access=mmap.ACCESS_READ, offset=start) as mapped:
                memory, states = np.frombuffer(mapped, np.uint8), np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
                if not _mincore(memory.ctypes.data, length, states.ctypes.data):
                    cached, pages = cached + int((states & 1).sum()), pages + len(states)
                del memory
        return cached / max(1, pages)


def disk_rates(reads: FileReads, seconds: float) -> Iterator[float]:
    """Yield bytes/s of reading chunks from the disk in shuffled order, measured for about ``seconds`` each time.

    Chunks are dropped from the page cache before they are read. Raises NotMeasured if they remain cached.
    """
    chunks = large(reads.stored)
    shuffled = itertools.cycle([chunks[index] for index in np.random.default_rng(0).permutation(len(chunks))])
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
