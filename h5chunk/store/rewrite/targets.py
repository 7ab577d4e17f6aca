"""Write the bytes of a dataset of a new file, plainly or in compressed chunks, and compute their checksums."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import h5py
import numpy as np

from h5chunk.errors import H5ChunkError, OutputError, printable
from h5chunk.store.format.spec import LIBVER, Region
from h5chunk.store.hdf5.codecs import GZIP
from h5chunk.store.hdf5.crc import crc32
from h5chunk.store.hdf5.ranges import read_bytes
from h5chunk.store.write.part_file import ROOM_BYTES, check_room, write_at
from h5chunk.store.write.spool import TemporaryBytes


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raise OutputError where the system or HDF5 fails to write."""
    try:
        yield
    except H5ChunkError:
        raise
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{printable(path)}: cannot be written: {reason}") from None


class PlainTarget:
    """Context manager around the writing of a dataset without filters: a run of bytes, chunk after chunk.

    Parameters
    ----------
    part : Path
        The new file, for messages.
    descriptor : int
        Of it, to read and write.
    region : Region
        Of the dataset.
    num_bytes, chunk_bytes : int
        Of its elements, and of one chunk.
    checked : bool
        Whether checksums are wanted.

    Attributes
    ----------
    any_order : bool
        Whether parts may come in any order and from several threads.
    """

    any_order = True

    def __init__(
        self, part: Path, descriptor: int, region: Region, *, num_bytes: int, chunk_bytes: int, checked: bool
    ) -> None:
        self._part, self.descriptor, self.offset = part, descriptor, region.offset
        self._num_bytes, self._chunk_bytes = num_bytes, chunk_bytes
        self._sums = np.zeros(math.ceil(num_bytes / chunk_bytes) if checked else 0, np.uint32)
        self._known = np.zeros(len(self._sums), bool)

    def __enter__(self) -> PlainTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def put(self, offset: int, data: np.ndarray) -> None:
        """Write bytes of the dataset, (n,) uint8, from its byte ``offset`` on.

        Raises
        ------
        OutputError
            They cannot be written.
        """
        self.write(offset, data)
        if not len(self._sums):
            return
        end = offset + len(data)
        last = len(self._sums) if end == self._num_bytes else end // self._chunk_bytes
        for chunk in range(math.ceil(offset / self._chunk_bytes), last):
            start = chunk * self._chunk_bytes - offset
            self._sum(chunk, data[start : start + self._chunk_bytes])

    def _sum(self, chunk: int, data: np.ndarray) -> None:
        checksum = crc32(data)
        if len(data) < self._chunk_bytes:  # the last one, which is filled up with zeros
            checksum = crc32(np.zeros(self._chunk_bytes - len(data), np.uint8), checksum)
        self._sums[chunk], self._known[chunk] = checksum, True

    def finish(self) -> np.ndarray:
        """Return the CRC-32 of each stored chunk: (num_chunks,) uint32; none if they are not wanted."""
        for chunk in np.flatnonzero(~self._known).tolist():  # those that came in parts
            start = chunk * self._chunk_bytes
            data = np.empty(min(self._chunk_bytes, self._num_bytes - start), np.uint8)
            self.read(start, data)
            self._sum(chunk, data)
        return self._sums

    def write(self, offset: int, data: np.ndarray) -> None:
        """Write bytes that are not yet in their final order."""
        with written(self._part):
            write_at(self.descriptor, data.data, self.offset + offset)

    def read(self, offset: int, out: np.ndarray) -> None:
        """Read bytes that `write` has written."""
        read_bytes(self.descriptor, self.offset + offset, out.data, lambda _: printable(self._part))


class CompressedTarget:
    """Context manager around the writing of a dataset whose chunks pass filters.

    gzip alone is applied by threads, other filters by HDF5. Parts must come from the first to the last.

    Parameters
    ----------
    part : Path
        The new file; nothing else may write to it meanwhile.
    path : bytes
        Of the dataset, with chunks of whole samples.
    num_threads : int
    checked : bool
        Whether checksums are wanted.
    """

    any_order = False

    def __init__(self, part: Path, path: bytes, num_threads: int, checked: bool) -> None:
        self._part, self._path, self._checked = part, path, checked
        self._num_threads = num_threads
        self._sums: list[int] = []
        self._waiting: deque[Future[bytes]] = deque()
        self._room = 0

    def __enter__(self) -> CompressedTarget:
        self._file = h5py.File(self._part, "r+", libver=LIBVER, locking=False)
        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        access.set_chunk_cache(1, 0, 0.0)
        self._dataset = h5py.h5d.open(self._file.id, self._path, access)
        properties = self._dataset.get_create_plist()
        code, _, values, _ = properties.get_filter(0)
        self._level = values[0] if (properties.get_nfilters(), code) == (1, GZIP) else None
        self._kind, self._shape = self._dataset.get_type(), self._dataset.shape
        self._item = f"V{self._kind.get_size()}"
        self._chunks = properties.get_chunk()
        self._row_bytes = math.prod(self._shape[1:]) * self._kind.get_size()
        self._chunk = np.zeros(self._chunks[0] * self._row_bytes, np.uint8)
        self._filled = self._stored = self._begun = 0
        self._pool = ThreadPoolExecutor(self._num_threads)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        with written(self._part):
            self._file.close()

    def put(self, offset: int, data: np.ndarray) -> None:
        """As `PlainTarget.put`, in order."""
        if offset != self._begun * len(self._chunk) + self._filled:
            raise ValueError(f"byte {offset} of {self._path!r} came out of turn")
        while len(data):
            part = data[: len(self._chunk) - self._filled]
            self._chunk[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == len(self._chunk):
                self._begin()

    def _begin(self) -> None:
        """Compress a chunk, and store those that are ready."""
        if self._level is None:
            self._by_hdf5()
        else:
            self._waiting.append(self._pool.submit(zlib.compress, self._chunk.data, self._level))
            self._chunk = np.zeros_like(self._chunk)
            while len(self._waiting) > self._num_threads:
                self._store(self._waiting.popleft().result())
        self._begun, self._filled = self._begun + 1, 0

    def _by_hdf5(self) -> None:
        first = self._begun * self._chunks[0]
        count = (min(self._chunks[0], self._shape[0] - first), *self._shape[1:])
        values = self._chunk.view(self._item).reshape(self._chunks)[: count[0]]
        self._check_room(2 * len(self._chunk))
        with written(self._part):
            space = self._dataset.get_space()
            space.select_hyperslab((first, *(0,) * (len(count) - 1)), count)
            self._dataset.write(h5py.h5s.create_simple(count), space, values, self._kind)
            if self._checked:
                _, stored = self._dataset.read_direct_chunk((first, *(0,) * (len(count) - 1)))
                self._sums.append(crc32(np.frombuffer(stored, np.uint8)))

    def _store(self, stored: bytes) -> None:
        self._check_room(len(stored))
        with written(self._part):
            place = (self._stored * self._chunks[0], *(0,) * (len(self._shape) - 1))
            self._dataset.write_direct_chunk(place, stored)
        self._stored += 1
        if self._checked:
            self._sums.append(crc32(np.frombuffer(stored, np.uint8)))

    def _check_room(self, num_bytes: int) -> None:
        self._room -= num_bytes
        if self._room < 0:  # before HDF5 writes, as it crashes on a full disk
            self._room = ROOM_BYTES
            check_room(self._part, num_bytes + 2 * ROOM_BYTES)

    def finish(self) -> np.ndarray:
        """As `PlainTarget.finish`."""
        if self._filled:  # the rest of it is zero
            self._begin()
        while self._waiting:
            self._store(self._waiting.popleft().result())
        return np.array(self._sums, np.uint32)


Target = PlainTarget | CompressedTarget
Waiting = PlainTarget | TemporaryBytes  # where bytes may be kept for a while
