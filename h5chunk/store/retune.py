"""Window and cache in the header of a file of ours, changed in place without opening the file for writing in HDF5.

HDF5 marks a file as open for writing, and writes its metadata piece by piece: a process that is killed meanwhile leaves
a file that nobody can open. Here HDF5 works on an overlay in memory instead, over the file opened for reading. What
differs in the end, a few bytes of the block that holds the attributes and its checksum, is written with one ``pwrite``
within one page, and put on disk. The page cache takes a page whole or not at all, whatever kills the process, and a
disk that writes pages whole keeps that through a loss of power. Where the difference spans pages, nothing is written,
and the recommendation goes beside the file.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, OutputError, printable
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.format import GROUP, LIBVER, read_header

PAGE_BYTES = 4096


class Overlay(io.RawIOBase):
    """A file that is only read; what is written to it stays in memory, page by page."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._at = 0
        self.pages: dict[int, bytearray] = {}

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = bytearray(os.pread(self._descriptor, len(view), self._at))
        data += bytes(max(0, min(len(view), self._size - self._at) - len(data)))
        for page, content in self.pages.items():
            start = page * PAGE_BYTES - self._at
            low, high = max(0, start), min(len(data), start + PAGE_BYTES)
            if low < high:
                data[low:high] = content[low - start : high - start]
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def write(self, buffer: Any) -> int:
        data = bytes(memoryview(buffer).cast("B"))
        done = 0
        while done < len(data):
            page, place = divmod(self._at + done, PAGE_BYTES)
            content = self.pages.get(page) or self._page(page)
            some = data[done : done + PAGE_BYTES - place]
            content[place : place + len(some)] = some
            self.pages[page] = content
            done += len(some)
        self._at += done
        self._size = max(self._size, self._at)
        return done

    def _page(self, page: int) -> bytearray:
        content = bytearray(os.pread(self._descriptor, PAGE_BYTES, page * PAGE_BYTES))
        return content + bytes(PAGE_BYTES - len(content))

    def truncate(self, size: int | None = None) -> int:
        self._size = self._at if size is None else size
        return self._size

    def flush(self) -> None:
        """Nothing to do."""

    def changes(self) -> list[tuple[int, bytes]]:
        """Where the pages differ from the file: from the first to the last byte of each."""
        found = []
        for page, content in sorted(self.pages.items()):
            old = np.frombuffer(bytes(self._page(page)), np.uint8)
            differ = np.flatnonzero(old != np.frombuffer(bytes(content), np.uint8))
            if len(differ):
                first, last = int(differ[0]), int(differ[-1]) + 1
                found.append((page * PAGE_BYTES + first, bytes(content[first:last])))
        return found


def rewrite_header(path: str | os.PathLike[str], window_chunks: int, cache: CacheSettings) -> bool:
    """Change window and cache in the header of a file of ours; False if that cannot be done in one step.

    Who has the file open for reading meanwhile is told that it changed.

    Raises
    ------
    FileError
        It is not one of ours, or damaged.
    OutputError
        It cannot be written.
    """
    path = Path(path)
    shown = printable(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OutputError(f"{shown}: cannot be changed: {error.strerror}") from None
    try:
        changes = _changes(descriptor, shown, window_chunks, cache)
        if len(changes) > 1:
            return False
        for offset, data in changes:
            if os.pwrite(descriptor, data, offset) != len(data):
                raise OutputError(f"{shown}: cannot be changed: a part of {len(data)} bytes was not written")
            os.fsync(descriptor)
        return True
    except OSError as error:
        if isinstance(error, (FileError, OutputError)):
            raise
        raise OutputError(f"{shown}: cannot be changed: {error}") from None
    finally:
        os.close(descriptor)


def _changes(descriptor: int, shown: str, window_chunks: int, cache: CacheSettings) -> list[tuple[int, bytes]]:
    """What HDF5 would write."""
    overlay = Overlay(descriptor)
    with h5py.File(overlay, "r+", libver=LIBVER) as file:
        if GROUP not in file or "format_version" not in file[GROUP].attrs:
            raise FileError(f"{shown}: not written by h5chunk: it has no header to change")
        attributes = file[GROUP].attrs
        values = {
            "window_chunks": np.int64(window_chunks),
            "rdcc_nslots": np.int64(cache.nslots),
            "rdcc_nbytes": np.int64(cache.nbytes),
            "rdcc_w0": np.float64(cache.w0),
        }
        for name, value in values.items():
            if attributes.get_id(name).shape != () or attributes.get_id(name).dtype != value.dtype:
                raise FileError(f"{shown}: damaged: attribute {name!r} is not a single {value.dtype}")
            attributes.modify(name, value)
    overlay.seek(0)
    with h5py.File(overlay, "r") as file:  # as it will be
        header = read_header(file)
        if header is None or (header.window_chunks, header.cache) != (window_chunks, cache):
            raise FileError(f"{shown}: HDF5 does not read back what it wrote: the file was left as it is")
    return overlay.changes()
