"""Manage a sparse local copy of an object, and the table of its present pages.

Processes share the copy. A page is marked as present after it was written, and as absent before it is freed, so that a
process that is killed at any moment leaves a valid table. File locks, which the system releases when a process exits,
protect pages that are being fetched (exclusive locks) and pages in use (shared locks) from being freed.

After a power failure, the table may mark pages as present that never reached the disk. Therefore each page has a
checksum. Pages that were written before the machine last booted are doubted, which means that they count as absent
until `verify` has compared their checksums.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import FileError, printable

PAGE = 16 << 10  # size of a page in bytes
GAP_PAGES = 4  # runs with at most this many pages between them share a request
OBJECT, TABLE, ABOUT, SUMS, BOOT = "object.h5", "pages", "about.json", "sums", "boot"  # the files of a copy
SUM = np.dtype("<u4")  # dtype of a page's checksum
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # differs after each boot
TO_DOUBT = bytes([0, 3, 3, 3]) + bytes(range(4, 256))  # translation table that marks present pages as doubted
FETCHED, IN_USE = 0, 1 << 40  # offsets of the two ranges of locks in the table
PUNCH_HOLE, KEEP_SIZE = 2, 1  # flags of fallocate
ABSENT, FREEABLE, DOUBTED = re.compile(b"[\0\3]+"), re.compile(b"[\1\3]+"), re.compile(b"\3+")
FLOCK = struct.Struct("hhqqixxxx")  # struct flock

Runs = list[tuple[int, int]]  # first page, and the page after the last one


class Pages:
    """An open local copy of a remote object. Pages that were not fetched are holes in the file.

    A process counts its holds on each page, and has one lock on the pages that it holds, for other processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
            self.num_bytes = int(self.about["num_bytes"])
            sizes = [(folder / name).stat().st_size for name in (OBJECT, TABLE, SUMS)]
        except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
            sizes = []
        count = pages_of(self.num_bytes) if sizes else 0
        if not sizes or sizes != [self.num_bytes, count, count * SUM.itemsize]:
            raise FileError(f"{printable(str(folder))}: this local copy of a remote object is damaged: delete it")
        self.descriptor = os.open(folder / OBJECT, os.O_RDWR | os.O_CLOEXEC)
        self._table_file = os.open(folder / TABLE, os.O_RDWR | os.O_CLOEXEC)
        self._sums_file = os.open(folder / SUMS, os.O_RDWR | os.O_CLOEXEC)
        self._held, self._holding = np.zeros(count, np.uint32), threading.Lock()
        self._writing = threading.Lock()  # else threads would spin in the file system until the others have written
        self._process = os.getpid()  # a fork shares the locks, and must leave them alone
        self._table = mmap.mmap(self._table_file, count, prot=mmap.PROT_READ)
        self._doubt_after_boot()

    def _doubt_after_boot(self) -> None:
        boot, now = self.folder / BOOT, _boot_id()
        if not boot.exists() or boot.read_bytes() != now:
            write_at(self._table_file, self._table[:].translate(TO_DOUBT), 0)
            part = boot.with_name(f"{BOOT}-{os.getpid()}-{os.urandom(4).hex()}")
            part.write_bytes(now)
            part.replace(boot)

    def verify(self, first: int, stop: int) -> None:
        """Mark the doubted pages of a run as present, or as absent if their checksums do not match."""
        for match in DOUBTED.finditer(self._table[first:stop]):
            for page in range(first + match.start(), first + match.end()):
                checksum = zlib.crc32(os.pread(self.descriptor, PAGE, page * PAGE)).to_bytes(SUM.itemsize, "little")
                is_right = checksum == os.pread(self._sums_file, SUM.itemsize, page * SUM.itemsize)
                self._mark(page, page + 1, b"\1" if is_right else b"\0")

    def absent(self, runs: Iterable[tuple[int, int]]) -> Runs:
        """Return the parts of runs that are absent or doubted."""
        found: Runs = []
        for first, stop in runs:
            if self._table.find(b"\0", first, stop) >= 0 or self._table.find(b"\3", first, stop) >= 0:
                spans = (match.span() for match in ABSENT.finditer(self._table[first:stop]))
                found += [(first + begin, first + end) for begin, end in spans]
        return found

    def put(self, first: int, stop: int, data: Any, *, keeps: bool = True) -> None:
        """Write pages, and then mark those that were absent as present.

        Pages without checksums, because nobody ``keeps`` them, are absent after the next boot.
        """
        with self._writing:
            write_at(self.descriptor, data, first * PAGE)
        if keeps:
            self._write_sums(first, data)
        for begin, end in self.absent([(first, stop)]):
            self._mark(begin, end, b"\1")

    def _write_sums(self, first: int, data: Any) -> None:
        pages = (memoryview(data)[at : at + PAGE] for at in range(0, len(data), PAGE))
        write_at(self._sums_file, np.fromiter(map(zlib.crc32, pages), SUM).tobytes(), first * SUM.itemsize)

    def _mark(self, first: int, stop: int, state: bytes) -> None:
        """Set the state of a run of pages. The mmap is not used, because it would kill the process on a full disk."""
        write_at(self._table_file, state * (stop - first), first)

    def keep(self, runs: Iterable[tuple[int, int]]) -> None:
        """Mark pages so that `free` never frees them. They must be present and in use."""
        for first, stop in runs:
            self._write_sums(first, os.pread(self.descriptor, (stop - first) * PAGE, first * PAGE))
            self._mark(first, stop, b"\2")

    def are_kept(self, first: int, stop: int) -> bool:
        """Return whether all pages of a run are kept."""
        return not self._table[first:stop].strip(b"\2")

    def which_are_kept(self, pages: np.ndarray) -> np.ndarray:
        """Return which of some pages are kept: (n,) bool."""
        found: np.ndarray = np.frombuffer(self._table, np.uint8)[pages] == 2
        return found

    def hold(self, runs: Runs) -> None:
        """Protect pages from being freed until `release`, whether or not they are present."""
        with self._holding:
            for first, stop in runs:
                self._lock(fcntl.F_RDLCK, IN_USE + first, stop - first)
                self._held[first:stop] += 1

    def release(self, runs: Runs) -> Runs:
        """End a hold on pages, and return the runs that this process no longer holds."""
        if os.getpid() != self._process:
            return []
        with self._holding:
            for first, stop in runs:
                self._held[first:stop] -= 1
            unheld = list(self._unheld(runs))
            for first, stop in unheld:
                self._lock(fcntl.F_UNLCK, IN_USE + first, stop - first)
        return unheld

    def free(self, runs: Iterable[tuple[int, int]]) -> None:
        """Mark pages as absent and free their space, unless they are in use, being fetched or kept."""
        with self._holding:
            for first, stop in self._unheld(runs):
                self._free(first, stop)

    def _unheld(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the parts of runs that this process does not hold."""
        for first, stop in runs:
            borders = np.flatnonzero(np.diff(self._held[first:stop] == 0, prepend=False, append=False)) + first
            yield from zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True)

    def _free(self, start: int, end: int) -> None:
        for match in FREEABLE.finditer(self._table[start:end]):
            first, stop = start + match.start(), start + match.end()
            places = IN_USE + first, FETCHED + first
            is_free = all(self._lock(fcntl.F_WRLCK, place, stop - first, waits=False) for place in places)
            if is_free:
                self._mark(first, stop, b"\0")
                punch(self.descriptor, first * PAGE, (stop - first) * PAGE)
            for place in places:
                self._lock(fcntl.F_UNLCK, place, stop - first)
            if not is_free and stop - first > 1:  # other processes may use only some of the pages
                middle = (first + stop) // 2
                self._free(first, middle)
                self._free(middle, stop)

    @contextmanager
    def fetching(self, first: int, stop: int) -> Iterator[None]:
        """Protect pages that are being fetched in a context, after other processes have fetched them."""
        with self._holding:  # because the lock does not keep other threads of this process from freeing them
            self._held[first:stop] += 1
        try:
            self._lock(fcntl.F_WRLCK, FETCHED + first, stop - first)
            yield
        finally:
            self._lock(fcntl.F_UNLCK, FETCHED + first, stop - first)
            with self._holding:
                self._held[first:stop] -= 1

    def _lock(self, kind: int, start: int, count: int, *, waits: bool = True) -> bool:
        """Set a lock on bytes of the table, which ends with the process. Return False if another process has one."""
        command = fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._table_file, command, FLOCK.pack(kind, os.SEEK_SET, start, count, 0))
        except OSError:
            if waits:
                raise
            return False
        return True

    def present(self) -> bytes:
        """Return the state of each page as one byte: 0 is absent, 1 present, 2 present and kept, 3 doubted."""
        return self._table[:]

    @property
    def disk_bytes(self) -> int:
        """Disk space of the copy in bytes."""
        return os.fstat(self.descriptor).st_blocks * 512

    @property
    def is_there(self) -> bool:
        """Whether the files of the copy are still in its folder."""
        try:
            return os.path.samestat(os.fstat(self._table_file), (self.folder / TABLE).stat())
        except FileNotFoundError:
            return False


def write_at(descriptor: int, data: Any, offset: int) -> None:
    """Write all of ``data``, any contiguous buffer, with pwrite."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _boot_id() -> bytes:
    """Return an identifier of the machine's current boot, or random bytes if there is none."""
    try:
        return BOOT_ID.read_bytes()
    except OSError:
        return os.urandom(16)


def pages_of(num_bytes: int) -> int:
    """Return the number of pages that ``num_bytes`` bytes need."""
    return -(-num_bytes // PAGE)


def punch(descriptor: int, offset: int, num_bytes: int) -> None:
    """Free a part of a file, which then reads as zeros. Raises OSError if the file system does not support this."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(descriptor, PUNCH_HOLE | KEEP_SIZE, offset, num_bytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def create(folder: Path, about: dict[str, Any]) -> None:
    """Create an empty copy in a folder atomically. Raises OSError if that fails."""
    part = folder.with_name(f".{folder.name}-{os.getpid()}-{os.urandom(4).hex()}")
    part.mkdir(parents=True, mode=0o700)
    try:
        count = pages_of(about["num_bytes"])
        for name, num_bytes in ((OBJECT, about["num_bytes"]), (TABLE, count), (SUMS, count * SUM.itemsize)):
            with (part / name).open("wb") as file:
                file.truncate(num_bytes)
                punch(file.fileno(), 0, PAGE)  # fails if the file system does not support holes
        (part / BOOT).write_bytes(_boot_id())
        with (part / ABOUT).open("w") as file:
            file.write(json.dumps(about))
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, folder)
    except OSError:
        for each in part.iterdir():
            each.unlink()
        part.rmdir()
        if not folder.is_dir():
            raise
