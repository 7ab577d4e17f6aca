"""Reading a file's own bytes, found through its chunk tables, from the page cache and from the disk."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.store.chunktable import list_chunks
from h5chunk.store.fields import Field
from h5chunk.store.format import open_file
from h5chunk.store.reader import H5Reader
from h5chunk.tools.limits import NotMeasured, threads_rate

READ_BYTES = 8 << 20  # of one preadv
DISK_THREADS = 16  # reads under way at a time
DISK_BYTES = 256 << 20  # dropped from the page cache at a time
STILL_CACHED = 0.1  # if more of what was dropped is still there, it could not be dropped

Ranges = Sequence[tuple[int, int]]  # offset and size


@dataclass(frozen=True)
class Stored:
    """Where the bytes of some fields lie in the file, in the order of their samples.

    Attributes
    ----------
    path : Path
    num_samples : int
    offsets, sizes, first_samples : (n,) int64
        Of each chunk, or run of rows.
    """

    path: Path
    num_samples: int
    offsets: np.ndarray
    sizes: np.ndarray
    first_samples: np.ndarray

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def head(self, num_samples: int) -> Stored:
        """Only chunks that hold some of the first samples."""
        some = self.first_samples < num_samples
        return Stored(self.path, num_samples, self.offsets[some], self.sizes[some], self.first_samples[some])

    def chunks(self) -> Ranges:
        """The chunks, without those that are smaller than a page if there are others."""
        large = self.sizes >= mmap.PAGESIZE
        some = large if large.any() else slice(None)
        return list(zip(self.offsets[some].tolist(), self.sizes[some].tolist(), strict=True))

    def runs(self) -> Ranges:
        """All of it in as few reads as READ_BYTES allows."""
        merged: list[list[int]] = []
        for place in np.argsort(self.offsets, kind="stable"):
            offset, size = int(self.offsets[place]), int(self.sizes[place])
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1][1] += size
            else:
                merged.append([offset, size])
        return cut(merged)


def cut(ranges: Sequence[Sequence[int]]) -> Ranges:
    """Ranges in pieces of READ_BYTES at most."""
    return [
        (offset + start, min(READ_BYTES, size - start))
        for offset, size in ranges
        for start in range(0, size, READ_BYTES)
    ]


def locate(reader: H5Reader) -> Stored:
    """Where the fields lie.

    Raises
    ------
    NotMeasured
        Not in this file, or nowhere yet.
    FileError
        The list of chunks makes no sense.
    """
    with open_file(reader.path) as file:
        fields = [field for field in reader.fields.values() if isinstance(field, Field)]
        parts = [_locate_field(file, field, reader.chunk_samples) for field in fields]
    offsets, sizes, firsts = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not sizes.sum():
        raise NotMeasured("nothing was written into it yet")
    order = np.argsort(firsts, kind="stable")
    return Stored(reader.path, reader.num_samples, offsets[order], sizes[order], firsts[order])


def _locate_field(file: h5py.File, field: Field, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets, sizes and first samples of a field's chunks; runs of so many rows if it has none."""
    dataset = file[field.dataset]
    properties = dataset.id.get_create_plist()
    elsewhere = h5py.h5o.get_info(dataset.id).fileno != h5py.h5o.get_info(file.id).fileno
    plain = properties.get_layout() in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS)
    if elsewhere or not plain or (dataset.chunks is None and properties.get_external_count()):
        raise NotMeasured(f"the bytes of field {field.name!r} lie in other files, or in the file's header")
    table = list_chunks(dataset)
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
    """Reads ranges of a file, by threads into memory that is used again. Keeps the file open until it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._buffers: list[np.ndarray] = []
        self.num_read = 0  # ranges, by the last call

    def rate(self, ranges: Ranges, num_threads: int, seconds: float, *, again: bool) -> float:
        """Bytes/s; ``again``: from the first range on after the last one."""
        while len(self._buffers) < num_threads:
            self._buffers.append(np.zeros(READ_BYTES, np.uint8))
        numbers = itertools.count()
        self.num_read = 0

        def read(thread: int) -> int:
            number = next(numbers)
            if number >= len(ranges) and not again:
                return 0
            self._read(*ranges[number % len(ranges)], self._buffers[thread])
            return ranges[number % len(ranges)][1]

        rate = threads_rate(read, num_threads, seconds)
        self.num_read = min(next(numbers), len(ranges))
        return rate

    def _read(self, offset: int, size: int, buffer: np.ndarray) -> None:
        done = 0
        while done < size:
            try:
                more = os.preadv(self._descriptor, [buffer[: size - done].data], offset + done)
            except OSError as error:
                raise FileError(f"{printable(self._path)}: cannot be read: {error.strerror}") from error
            if not more:
                raise FileError(f"{printable(self._path)}: the file ends in the middle of its data: it was cut short")
            done += more

    def drop(self, ranges: Ranges) -> None:
        """Drop ranges from the page cache; if their neighbours keep them there, all of the file.

        Raises
        ------
        NotMeasured
            They are still there.
        """
        if not hasattr(os, "posix_fadvise"):
            raise NotMeasured("this system cannot drop a file from the page cache")
        page = mmap.PAGESIZE
        for offset, size in ranges:
            start = offset // page * page
            os.posix_fadvise(self._descriptor, start, -(-(offset + size) // page) * page - start, _DONTNEED)
        if self.cached_share(ranges) > STILL_CACHED:
            os.posix_fadvise(self._descriptor, 0, 0, _DONTNEED)
            if (share := self.cached_share(ranges)) > STILL_CACHED:
                raise NotMeasured(
                    f"{share:.0%} of it stays in the page cache: the file system is in memory (tmpfs), or the file "
                    "was written just now (run sync first), or it is open elsewhere"
                )

    @property
    def can_be_checked(self) -> bool:
        """Whether the system tells us what is cached: it does so for files that we may write."""
        return os.access(self._path, os.W_OK) or os.stat(self._path).st_uid == os.geteuid()

    def cached_share(self, ranges: Ranges) -> float:
        """Part of the pages of some ranges that is in the page cache; 0 if nobody says. Source: mincore(2)."""
        if not self.can_be_checked or not ranges:
            return 0.0
        cached = pages = 0
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as mapped:
            whole = np.frombuffer(mapped, np.uint8)
            for offset, size in ranges[:: max(1, len(ranges) // 256)]:
                start = offset // mmap.PAGESIZE * mmap.PAGESIZE
                state = np.zeros(-(-(offset + size - start) // mmap.PAGESIZE), np.uint8)
                if _mincore(whole.ctypes.data + start, offset + size - start, state.ctypes.data):
                    continue
                cached, pages = cached + int((state & 1).sum()), pages + len(state)
            del whole
        return cached / max(1, pages)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


_DONTNEED = getattr(os, "POSIX_FADV_DONTNEED", 0)
_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class DiskRead:
    """Reads chunks of a file in a shuffled order, each after it was dropped from the page cache."""

    def __init__(self, reads: FileReads, chunks: Ranges) -> None:
        self._reads = reads
        self._chunks = [chunks[place] for place in np.random.default_rng(0).permutation(len(chunks))]
        self._start = 0

    def rate(self, seconds: float) -> float:
        """Bytes/s.

        Raises
        ------
        NotMeasured
            The page cache keeps them.
        """
        moved = taken = 0.0
        while taken < seconds:
            group = self._take_group()
            self._reads.drop(group)
            started = time.perf_counter()
            rate = self._reads.rate(cut(group), DISK_THREADS, seconds - taken, again=False)
            step = time.perf_counter() - started
            moved, taken = moved + rate * step, taken + step
        return moved / taken

    def _take_group(self) -> Ranges:
        group: list[tuple[int, int]] = []
        num_bytes = 0
        while num_bytes < DISK_BYTES and len(group) < len(self._chunks):
            group.append(self._chunks[self._start])
            num_bytes += group[-1][1]
            self._start = (self._start + 1) % len(self._chunks)
        return group
