"""The open files of a data set, which any number of threads may read, and what is held of remote ones."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk import native
from h5chunk.errors import ChangedError, FileError, closed
from h5chunk.remote.mirror import Descriptor, Hold, Mirror, page_runs
from h5chunk.remote.pages import Runs
from h5chunk.store.hdf5.ranges import Ranges, open_descriptor
from h5chunk.urls import local_copy_of

MAX_OPEN = 64  # files of one source that may stay open
UNMAPPED = np.empty(0, np.uint8)


class OpenFiles:
    """The files of a `h5chunk.store.read.source.Source`. Each is opened at its first use, and stays open.

    If there are several files, each task checks that its files are unchanged. A single file is checked by the caller.
    If there are so many that the system may not keep them all open, a file is opened whenever it is used.
    """

    def __init__(self, source: Any) -> None:
        self._files = source.file_list
        self.are_several = len(self._files) > 1
        self._are_remote = any(local_copy_of(path) is not None for path, _, _ in self._files)
        self._stay_open = all(file.number < MAX_OPEN for file in self._files)
        first: dict[Path, int] = {}  # sources may be parts of the same file, whose descriptor they share
        self._first = [first.setdefault(path, number) for number, (path, _, _) in enumerate(self._files)]
        self._open: dict[int, int] = {}
        self._maps: dict[int, np.ndarray] = {}
        self._lock, self._is_closed = threading.Lock(), False

    def descriptor(self, number: int) -> int:
        """Return the descriptor of a file, which stays open. Raises FileError if it cannot be opened or has changed."""
        number = self._first[number]
        descriptor = self._open.get(number)
        if descriptor is None:
            with self._lock:
                descriptor = self._open.get(number)
                if self._is_closed:
                    raise closed(self._files[number][0])
                if descriptor is None:
                    descriptor = self._open[number] = self._open_checked(number)
        return descriptor

    def mapped(self, number: int) -> tuple[int, int]:
        """Map a file to memory, and return its address and size, which are valid until `close`.

        Return zeros for files that are remote, or may not fit in the page cache, or if the system refuses.
        """
        number = self._first[number]
        if number not in self._maps:
            with self._lock:
                self._maps.setdefault(number, _map(self._open.get(number)))
        memory = self._maps[number]
        return (memory.ctypes.data, len(memory)) if len(memory) else (0, 0)

    def opened(self, number: int) -> AbstractContextManager[int]:
        """Return a context with the descriptor of a file."""
        return nullcontext(self.descriptor(number)) if self._stay_open else self._opened_once(number)

    @contextmanager
    def _opened_once(self, number: int) -> Iterator[int]:
        descriptor = self._open_checked(number)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def check(self, number: int) -> None:
        """Raise FileError if one of several files was changed or replaced."""
        if self.are_several:
            _, source, own = self._files[number]
            source.check_file(own)

    def run(self, tasks: Iterable[Any], make_room: Callable[[Mapping[Mirror, Runs]], object] | None = None) -> None:
        """Run tasks one after another. What they read of remote objects is fetched first, all at once.

        ``make_room`` is called before, with the pages to fetch.
        """
        with ExitStack() as held:
            if self._are_remote:
                wanted = remote_pages(tasks := list(tasks), self)
                if make_room is not None:
                    make_room(wanted)
                held.enter_context(closing(Hold(wanted).fetched()))
            for task in tasks:
                task(self)

    def use_local_copies(self) -> None:
        """Read the local copies of remote objects as they are, because all of their bytes are held elsewhere."""
        for number in set(self._first):
            self._open[number] = int(self.descriptor(number))

    def close(self) -> None:
        """Close the files. No task may be running."""
        with self._lock:  # no thread may open a file again
            self._is_closed = True
            opened, self._open = self._open, {}
            self._maps.clear()
        for descriptor in opened.values():
            os.close(descriptor)

    def _open_checked(self, number: int) -> int:
        path, source, own = self._files[number]
        try:
            descriptor = open_descriptor(path)
        except FileError as error:
            source.check_file(own)  # it may have been removed
            raise with_remedy(error, len(self._files)) from error.__cause__
        try:
            source.check_file(own, descriptor)
        except FileError:
            os.close(descriptor)
            raise
        return descriptor


def _map(descriptor: int | None) -> np.ndarray:
    if descriptor is None or isinstance(descriptor, Descriptor) or not native.can_map():
        return UNMAPPED
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # ValueError: the file is empty
        if os.fstat(descriptor).st_size <= memory // 2:
            return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
    return UNMAPPED


def with_remedy(error: FileError, num_files: int) -> ChangedError:
    """Return the error for a file that cannot be opened any more. If too many files are open, add a remedy to it."""
    if os.strerror(errno.EMFILE) not in str(error):
        return ChangedError(str(error))
    return ChangedError(f"{error}. Raise the limit with ulimit -n, or combine the {num_files} files into fewer ones")


def remote_pages(tasks: Iterable[Any], files: OpenFiles) -> dict[Mirror, Runs]:
    """Return the pages that tasks read from remote objects."""
    by_mirror: dict[Mirror, list[Ranges]] = {}
    for task in tasks:
        for number, ranges in task.ranges:
            descriptor = files.descriptor(number)
            if isinstance(descriptor, Descriptor):
                by_mirror.setdefault(descriptor.mirror, []).append(ranges)
    return {
        mirror: page_runs(*(np.concatenate(each) for each in zip(*ranges, strict=True)))
        for mirror, ranges in by_mirror.items()
    }
