"""Read windows of remote objects: their bytes are first fetched to a local copy, from which the threads then read."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from h5chunk.errors import FileError, H5ChunkError, OptionError
from h5chunk.feed.disk_cache import DiskCache
from h5chunk.feed.read_pool import ReadPool, WindowRead
from h5chunk.plan.order import Order, Window
from h5chunk.remote.client import client
from h5chunk.remote.mirror import Hold
from h5chunk.store.hdf5.ranges import ReadTask
from h5chunk.store.read.open_files import hold_ranges, remote_ranges
from h5chunk.store.read.samples import FieldReader
from h5chunk.store.read.source import Source


class _Holds:
    """Holds on the cached pages of a window until it is read. `keep` and `close` may be called in either order."""

    def __init__(self) -> None:
        self._holds: Sequence[Hold] = ()
        self._is_over, self._lock = False, threading.Lock()

    def keep(self, holds: Sequence[Hold]) -> None:
        with self._lock:
            self._holds = holds
            is_over = self._is_over
        if is_over:
            self.close()

    def close(self) -> None:
        """Allow the pages to be evicted."""
        with self._lock:
            holds, self._holds, self._is_over = self._holds, (), True
        for hold in holds:
            hold.close()


class RemoteReadPool(ReadPool):
    """A pool of threads that read each window once its bytes have been fetched."""

    def __init__(
        self,
        reader: Source,
        fields: Mapping[str, FieldReader],
        num_threads: int,
        *,
        order: Order,
        num_windows: int,
        **options: Any,
    ) -> None:
        self._order, self._num_windows, self._cache = order, num_windows, DiskCache(reader, fields)
        self._fetched: dict[int, tuple[WindowRead, int]] = {}  # windows being fetched, and their numbers of tasks
        self._looked = -1  # the last epoch in which `_become_local` was called
        self._held = _Holds()  # of all pages, once they are cached
        super().__init__(reader, fields, num_threads, **options)

    @property
    def progress(self) -> int:
        """See `ReadPool.progress`. Completed requests also count as progress."""
        is_fetching = not self.is_local and os.getpid() == self.process
        return super().progress + (client().num_parts if is_fetching else 0)

    def load(self, window: Window, slot: Any) -> WindowRead:
        """See `ReadPool.load`. Once all data is in the cache, it is kept there, and is read like a local file."""
        if not self.is_local and self._looked != self.epoch and not self._fetched:
            self._looked = self.epoch
            self._become_local()
        return super().load(window, slot)

    def _become_local(self) -> None:
        """If all data is in the cache, hold it there until the pool is closed."""
        holds = self._cache.hold_all(self._order, set(self._fields) - set(self._whole))
        if holds is None:
            return
        self._held.keep(holds)
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
        self._fetched[id(load)] = load, load.num_left
        holds = _Holds()
        load.at_end = holds.close
        begin, cache, num_bytes = super()._begin, self._cache, 0

        def then(error: H5ChunkError | None) -> None:
            cache.pending_bytes -= num_bytes
            if error is not None:
                self._drop(id(load), error)
            elif self._fetched.pop(id(load), None) is not None:  # else it was cancelled
                begin(load, all_tasks, tasks)

        try:
            ranges = remote_ranges(all_tasks, self.files)
            num_bytes = cache.make_room(ranges, self._num_windows)
            cache.pending_bytes += num_bytes
            holds.keep(hold_ranges(ranges, then))
        except (FileError, OptionError) as error:
            then(error)

    def _drop(self, number: int, error: H5ChunkError | None = None) -> None:
        """Drop the read tasks of a window whose bytes are being fetched. The window then ends with an error.

        The error is ``error`` or, if that is None, the error of a closed pool.
        """
        load, num_tasks = self._fetched.pop(number, (None, 0))
        for _ in range(num_tasks if load is not None else 0):
            load.error = load.error or error  # type: ignore[union-attr]
            load.drop()  # type: ignore[union-attr]

    def _end(self, threads: list[threading.Thread]) -> None:
        super()._end(threads)
        self._held.close()

    def cancel(self) -> None:
        """See `ReadPool.cancel`."""
        for number in list(self._fetched):
            self._drop(number)
        super().cancel()
