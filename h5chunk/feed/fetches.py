"""Read windows of remote objects: their bytes are first fetched to a local copy, from which the threads then read."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from h5chunk.errors import FileError, H5ChunkError, OptionError
from h5chunk.feed.disk_cache import DiskCache
from h5chunk.feed.read_pool import ReadPool, WindowRead
from h5chunk.feed.slots import Slot
from h5chunk.plan.order import Window
from h5chunk.plan.selection import Selection
from h5chunk.remote.client import client
from h5chunk.remote.mirror import Hold
from h5chunk.store.hdf5.ranges import ReadTask
from h5chunk.store.read.open_files import remote_pages
from h5chunk.store.read.samples import FieldReader
from h5chunk.store.read.source import Source


class RemoteReadPool(ReadPool):
    """A pool of threads that read each window once its bytes have been fetched."""

    def __init__(
        self,
        reader: Source,
        fields: Mapping[str, FieldReader],
        num_threads: int,
        *,
        selection: Selection | None,
        num_windows: int,
        **options: Any,
    ) -> None:
        self._selection, self._num_windows, self._cache = selection, num_windows, DiskCache(reader, fields)
        self._fetched: dict[int, WindowRead] = {}  # windows being fetched, none of whose tasks has begun
        self._looked = -1  # the last epoch in which `_become_local` was called
        self._held: Hold | None = None  # on all pages, once they are cached
        super().__init__(reader, fields, num_threads, **options)

    @property
    def progress(self) -> int:
        """See `ReadPool.progress`. Completed requests also count as progress."""
        is_fetching = not self.is_local and self.is_usable
        return super().progress + (client().num_parts if is_fetching else 0)

    def load(self, window: Window, slot: Slot) -> WindowRead:
        """See `ReadPool.load`. Once all data is in the cache, it is kept there, and is read like a local file."""
        if not self.is_local and self._looked != self.epoch and not self._fetched:
            self._looked = self.epoch
            self._become_local()
        return super().load(window, slot)

    def _become_local(self) -> None:
        """If all data is in the cache, hold it there until the pool is closed."""
        self._held = self._cache.hold_all(self._selection, set(self._fields) - set(self._whole))
        if self._held is None:
            return
        self.is_local = True
        if not self.files.are_several:
            self.files.use_local_copies()  # so that their pages are not held a second time
            status = os.stat(self.files.descriptor(0))
            self._stamp = (
                os.fsencode(self._reader.path),
                status.st_dev,
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
            )

    def _begin(self, load: WindowRead, all_tasks: list[ReadTask], tasks: list[ReadTask]) -> None:
        if self.is_local:
            super()._begin(load, all_tasks, tasks)
            return
        begin, cache = super()._begin, self._cache
        try:
            wanted = remote_pages(all_tasks, self.files)
            num_bytes = cache.make_room(wanted, self._num_windows)
        except (FileError, OptionError) as error:
            _drop(load, error)
            return
        hold = Hold(wanted)
        load.at_end = hold.close
        self._fetched[id(load)] = load
        cache.pending_bytes += num_bytes

        def then(error: H5ChunkError | None) -> None:
            cache.pending_bytes -= num_bytes
            if self._fetched.pop(id(load), None) is None:  # it was cancelled
                return
            if error is not None:
                _drop(load, error)
            else:
                begin(load, all_tasks, tasks)

        hold.fetch(then)

    def _end(self, threads: list[threading.Thread]) -> None:
        super()._end(threads)
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def cancel(self) -> None:
        """See `ReadPool.cancel`."""
        for number in list(self._fetched):
            if (load := self._fetched.pop(number, None)) is not None:
                _drop(load)
        super().cancel()


def _drop(load: WindowRead, error: H5ChunkError | None = None) -> None:
    """Drop all tasks of a window, which ends with an error; by default, with that of a closed pool."""
    load.error = load.error or error
    for _ in range(load.num_left):
        load.drop()
