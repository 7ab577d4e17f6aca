"""Write the values of one dataset of a new file, uncompressed or compressed, and compute checksums of its chunks."""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import h5py
import numpy as np

from h5chunk.errors import printable
from h5chunk.store.format.spec import LIBVER
from h5chunk.store.hdf5.codecs import GZIP, crc32
from h5chunk.store.hdf5.ranges import read_bytes
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.part_file import ROOM_BYTES, check_free_space, writing
from h5chunk.store.write.spool import TemporaryBytes


class PlainTarget:
    """A context manager that writes a dataset without filters, whose chunks are one run of bytes in the file.

    Bytes may be written in any order and from several threads. Checksums are computed if ``checked``.
    """

    any_order = True

    def __init__(self, new: NewFile, name: str, chunk_bytes: int, *, checked: bool = True) -> None:
        self._new, self._name = new, name
        self.descriptor, self.offset = new.descriptor, new.offset(name)
        self._chunk_bytes, self._checked = chunk_bytes, checked
        self._num_bytes, self._lock = 0, threading.Lock()  # where the last bytes end, which threads add in any order
        num_chunks = -(-new.num_bytes(name) // chunk_bytes) if checked else 0
        self._sums = np.zeros(num_chunks, np.uint32)  # of the first bytes of each chunk
        self._num_summed = np.zeros(num_chunks, np.int64)  # the number of these bytes

    def __enter__(self) -> PlainTarget:
        return self

    def __exit__(self, *_: object) -> None: ...

    def put(self, offset: int, data: np.ndarray) -> None:
        """Write bytes that will not be overwritten, (n,) uint8, from byte ``offset`` of the dataset on."""
        self.write(offset, data)
        if self._checked:
            self.count(offset, data)

    def count(self, offset: int, data: np.ndarray) -> None:
        """Add bytes that the file has to the checksums."""
        with self._lock:
            self._num_bytes = max(self._num_bytes, offset + len(data))
        if self._num_bytes > len(self._sums) * self._chunk_bytes:  # the dataset has no length yet, and one thread
            more = (0, len(self._sums) + -(-len(data) // self._chunk_bytes))
            self._sums, self._num_summed = np.pad(self._sums, more), np.pad(self._num_summed, more)
        while len(data):
            chunk, within = divmod(offset, self._chunk_bytes)
            part = data[: self._chunk_bytes - within]
            # otherwise, `finish` reads the chunk; of all threads, only the one with the next bytes changes its checksum
            if self._num_summed[chunk] == within:
                self._sums[chunk] = crc32(part, int(self._sums[chunk]))
                self._num_summed[chunk] += len(part)
            offset += len(part)
            data = data[len(part) :]

    def finish(self) -> np.ndarray:
        """Return the CRC-32 of each stored chunk, (num_chunks,) uint32, or an empty array unless ``checked``.

        The last chunk is padded with zeros, unless it is the only one.
        """
        starts = np.arange(0, self._num_bytes if self._checked else 0, self._chunk_bytes)
        sums, sizes = self._sums[: len(starts)], np.minimum(self._num_bytes - starts, self._chunk_bytes)
        for chunk in np.flatnonzero(self._num_summed[: len(starts)] != sizes).tolist():  # not written in order
            data = np.empty(int(sizes[chunk]), np.uint8)
            self.read(chunk * self._chunk_bytes, data)
            sums[chunk] = crc32(data)
        if len(sizes) > 1:
            sums[-1] = crc32(np.zeros(self._chunk_bytes - int(sizes[-1]), np.uint8), int(sums[-1]))
        return sums

    def write(self, offset: int, data: np.ndarray) -> None:
        """Write bytes, (n,) uint8, that `put` will overwrite, and that therefore need no checksum."""
        self._new.write_bytes(self._name, offset, data.data)

    def read(self, offset: int, out: np.ndarray) -> None:
        """Fill ``out``, (n,) uint8, with the bytes of the dataset that start at byte ``offset``."""
        read_bytes(self.descriptor, self.offset + offset, out.data, lambda _: printable(self._new.part))


class CompressedTarget:
    """A context manager that writes a dataset of chunks that are compressed, or that contain only pieces of rows.

    gzip is applied in threads, and other filters by HDF5. Bytes must be written in order, and nothing else may write to
    the file until the target is finished. All chunks of the same rows, a band, are held in memory.
    """

    any_order = False

    def __init__(self, new: NewFile, path: bytes, num_threads: int, checked: bool) -> None:
        self._new, self._path, self._num_threads, self._checked = new, path, num_threads, checked
        self._waiting: deque[Future[bytes]] = deque()
        self._checksums: list[int] = []
        self._filled = self._begun = self._stored = self._room_bytes = 0

    def __enter__(self) -> CompressedTarget:
        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        access.set_chunk_cache(1, 0, 0.0)  # without a cache, HDF5 compresses and writes each chunk immediately
        with writing(self._new.path):
            self._file = h5py.File(self._new.part, "r+", libver=LIBVER, locking=False)
            self._dataset = h5py.h5d.open(self._file.id, self._path, access)
        properties = self._dataset.get_create_plist()
        filters = [properties.get_filter(number) for number in range(properties.get_nfilters())]
        self._level = filters[0][2][0] if [each[0] for each in filters] == [GZIP] else None
        self._shape: tuple[int, ...] = self._dataset.shape
        self._chunks: tuple[int, ...] = properties.get_chunk()
        steps = zip(self._shape[1:], self._chunks[1:], strict=True)
        self._corners = list(itertools.product(*(range(0, size, step) for size, step in steps)))
        self._item = f"V{self._dataset.get_type().get_size()}"
        self._chunk = self._new_chunk()
        self._pool = ThreadPoolExecutor(self._num_threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        with writing(self._new.path):
            self._file.close()

    def _new_chunk(self) -> np.ndarray:
        return np.zeros((self._chunks[0], *self._shape[1:]), self._item).reshape(-1).view(np.uint8)

    def put(self, offset: int, data: np.ndarray) -> None:
        """Write the next bytes, (n,) uint8, which start at byte ``offset`` of the decoded dataset."""
        if offset != self._begun * len(self._chunk) + self._filled:
            raise ValueError(f"byte {offset} is out of order")
        while len(data):
            part = data[: len(self._chunk) - self._filled]
            self._chunk[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == len(self._chunk):
                self._compress()

    def _compress(self) -> None:
        """Start to compress the full chunk, and store the chunks that are already compressed."""
        num_rows = min(self._chunks[0], self._shape[0] - self._begun * self._chunks[0])
        band = self._chunk.view(self._item).reshape(self._chunks[0], *self._shape[1:])
        for corner in self._corners:
            starts = zip((0, *corner), self._chunks, strict=True)
            piece = band[tuple(slice(at, at + step) for at, step in starts)]
            if self._level is None:
                self._store(np.ascontiguousarray(piece[:num_rows]))
                continue
            if piece.shape != self._chunks:  # at an edge, where chunks are stored in full
                missing = zip(self._chunks, piece.shape, strict=True)
                piece = np.pad(piece, [(0, step - size) for step, size in missing])
            self._waiting.append(self._pool.submit(self._deflate, piece))
            while len(self._waiting) > self._num_threads:
                self._store(self._waiting.popleft().result())
        if self._level is not None:
            self._chunk = self._new_chunk()
        self._begun, self._filled = self._begun + 1, 0

    def _deflate(self, piece: np.ndarray) -> bytes:
        assert self._level is not None
        return zlib.compress(np.ascontiguousarray(piece).view(np.uint8).data, self._level)

    def _store(self, chunk: bytes | np.ndarray) -> None:
        """Store the next chunk, as compressed bytes, or as elements that HDF5 compresses."""
        num_bytes = len(chunk) if isinstance(chunk, bytes) else 2 * chunk.nbytes
        self._room_bytes -= num_bytes
        if self._room_bytes < 0:  # before HDF5 writes, because it crashes on a full disk
            self._room_bytes = ROOM_BYTES
            check_free_space(self._new.path, num_bytes + 2 * ROOM_BYTES)
        band, corner = divmod(self._stored, len(self._corners))
        start = band * self._chunks[0], *self._corners[corner]
        with writing(self._new.path):
            if isinstance(chunk, bytes):
                self._dataset.write_direct_chunk(start, chunk)
            else:
                space, kind = self._dataset.get_space(), self._dataset.get_type()
                space.select_hyperslab(start, chunk.shape)
                self._dataset.write(h5py.h5s.create_simple(chunk.shape), space, chunk, kind)
                chunk = self._dataset.read_direct_chunk(start)[1] if self._checked else b""
        self._stored += 1
        if self._checked:
            self._checksums.append(crc32(np.frombuffer(chunk, np.uint8)))

    def finish(self) -> np.ndarray:
        """Store the last chunk, and return the checksums as `PlainTarget.finish` does."""
        if self._filled:  # the rest of the chunk is zero
            self._compress()
        while self._waiting:
            self._store(self._waiting.popleft().result())
        return np.array(self._checksums, np.uint32)


Target = PlainTarget | CompressedTarget
Waiting = PlainTarget | TemporaryBytes  # storage for samples between the two passes of a shuffle
