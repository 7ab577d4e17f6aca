"""Read the stored chunks of a dataset, and find damaged ones by their checksums, or as they do not decode.

Chunks are read by byte ranges in several threads, outside HDF5's lock; only filters that are not decoded here are left
to HDF5. What the values mean, others know: they can have a look at those of each chunk that is right.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.store.hdf5.chunk_table import ChunkTable, NotDirect, is_variable, list_chunks, stored_item_bytes
from h5chunk.store.hdf5.claims import SLACK_CHUNKS
from h5chunk.store.hdf5.codecs import ChunkDecoder, DecodeError, NoDecoder, scratch
from h5chunk.store.hdf5.crc import crc32
from h5chunk.store.hdf5.ranges import PART_BYTES, read_bytes
from h5chunk.store.hdf5.raw_chunks import RawChunks
from h5chunk.store.hdf5.unwritten import count_unwritten, unwritten_value

MEMORY_BYTES = 256 << 20  # of all threads together, about; a single chunk may need more
CHECKSUM, DECODING, READING = "checksum", "decoding", "reading"

Look = Callable[[int, np.ndarray], None]  # (number of the first element, bytes) of a run of elements that is right


@dataclass(frozen=True)
class Damage:
    """A damaged chunk.

    Attributes
    ----------
    chunk : int
    what : str
    expected, found : int or None
        Checksums; None where there is none, or the chunk could not be read.
    """

    chunk: int
    what: str
    expected: int | None = None
    found: int | None = None


Part = Callable[[int], "Parted"]  # checks some chunks through a descriptor of the file


@dataclass(frozen=True)
class Parted:
    """The result of a task: the bytes that were read, and the damage."""

    num_bytes: int
    damages: tuple[Damage, ...]


class CheckedDataset:
    """The chunks of a dataset, to be checked by number.

    Parameters
    ----------
    path : path
    dataset : h5py.Dataset
        Not virtual, without external storage. Must stay open.
    expected : (num_chunks,) uint32, optional
        CRC-32 of the stored bytes of each chunk.
    look : callable, optional

    Attributes
    ----------
    num_chunks : int
        A contiguous dataset is one. 0: nothing is stored outside of the header, or chunks are not listed.
    num_unwritten : int
        Those of them that were never written.
    reads_as : str
        The value that readers give for these; empty if there are none.
    unlisted : str
        The reason why chunks are not listed, and so not checked; empty if they are.
    by : {"checksum", "decoding", "reading"}
        How a chunk is checked; reading shows no more than that the bytes are there.

    Raises
    ------
    FileError
        The index of its chunks makes no sense.
    """

    def __init__(
        self, path: Path, dataset: h5py.Dataset, expected: np.ndarray | None = None, look: Look | None = None
    ) -> None:
        self.name = dataset.name.lstrip("/")
        self._where = f"{printable(path)}: {self.name!r}"
        self._dataset, self._expected, self._look = dataset, expected, look
        self._local = threading.local()
        self._item_bytes = stored_item_bytes(dataset)
        self._decoder: ChunkDecoder | None = None
        self._by_hdf5 = False
        properties = dataset.id.get_create_plist()
        stored = properties.get_layout() != h5py.h5d.COMPACT and math.prod(dataset.shape or (0,)) > 0
        self.num_unwritten = count_unwritten(dataset)
        self.reads_as = unwritten_value(dataset) if self.num_unwritten else ""
        sparse = self.num_unwritten > SLACK_CHUNKS
        partly = sparse and dataset.id.get_storage_size() > 0
        self.unlisted = f"{self.num_unwritten:,} of its chunks were never written" if partly else ""
        self._table: ChunkTable | None = None
        try:
            self._table = list_chunks(dataset) if stored and not sparse else None
        except NotDirect as error:
            self.unlisted = str(error)
        self.num_chunks = len(self._table) if self._table is not None else 0
        shape = self._table.chunk_shape if self._table is not None else ()
        self.chunk_bytes = math.prod(shape) * self._item_bytes
        filtered = self._table is not None and properties.get_nfilters() > 0
        if filtered:
            try:
                self._decoder = ChunkDecoder(properties, self.chunk_bytes, self._item_bytes)
            except NoDecoder:
                self._by_hdf5 = not is_variable(dataset.id.get_type())
        self.by = CHECKSUM if expected is not None else DECODING if self._decoder or self._by_hdf5 else READING
        self.filtered = filtered

    @property
    def written(self) -> np.ndarray:
        """Numbers of the chunks that are stored: (n,) int64."""
        return np.flatnonzero(self._table.offsets >= 0) if self._table is not None else np.empty(0, np.int64)

    def place(self, chunk: int) -> tuple[int, int]:
        """Offset and stored bytes of a chunk."""
        assert self._table is not None
        return int(self._table.offsets[chunk]), int(self._table.sizes[chunk])

    def offsets(self, chunks: np.ndarray) -> np.ndarray:
        """Where chunks begin in the file: (n,) int64; -1 for what was never written."""
        assert self._table is not None
        return self._table.offsets[chunks]

    def stored_bytes(self, chunks: np.ndarray) -> int:
        """Return the stored bytes of some chunks together."""
        return int(self._table.sizes[chunks].sum()) if self._table is not None and len(chunks) else 0

    def rows(self, chunk: int) -> tuple[int, int]:
        """First and last index of the first axis that lie in a chunk."""
        shape, chunks = self._dataset.shape, self._dataset.chunks or self._dataset.shape
        across = math.prod(-(-size // step) for size, step in zip(shape[1:], chunks[1:], strict=True))
        first = chunk // across * chunks[0]
        return first, min(first + chunks[0], shape[0]) - 1

    def elements(self, chunk: int) -> tuple[int, int]:
        """First element of a chunk, and the first behind it, of a dataset of one dimension."""
        size = (self._dataset.chunks or self._dataset.shape)[0]
        return chunk * size, min((chunk + 1) * size, self._dataset.shape[0])

    def thread_bytes(self) -> int:
        """Memory that a thread takes, about."""
        if not self.filtered or self._table is None:
            return PART_BYTES
        return PART_BYTES + 3 * self.chunk_bytes + int(self._table.sizes.max(initial=0))

    def parts(self, chunks: np.ndarray) -> Iterator[Part]:
        """Yield the tasks that check some chunks, ascending, for several threads."""
        if self._table is None or not len(chunks):
            return
        offsets, sizes = self._table.offsets[chunks], self._table.sizes[chunks]
        apart = np.ones(len(chunks), bool)
        apart[1:] = (offsets[1:] != offsets[:-1] + sizes[:-1]) | (offsets[1:] < 0)
        runs = np.append(np.flatnonzero(apart), len(chunks)).tolist()
        for start, stop in pairwise(runs):
            step = max(1, PART_BYTES // max(1, int(sizes[start:stop].max())))
            for first in range(start, stop, step):
                yield partial(self._check_part, chunks[first : min(first + step, stop)])

    def _check_part(self, chunks: np.ndarray, descriptor: int) -> Parted:
        """Chunks that lie one behind the other."""
        table = self._table
        assert table is not None
        offset, sizes = int(table.offsets[chunks[0]]), table.sizes[chunks].tolist()
        if offset < 0:
            missing = self._expected is not None
            what = "was never written, though it has a checksum"
            return Parted(0, tuple(Damage(int(chunk), what) for chunk in chunks) if missing else ())
        if len(chunks) == 1 and sizes[0] > PART_BYTES and not self.filtered:
            return Parted(sizes[0], self._check_large(int(chunks[0]), offset, sizes[0], descriptor))
        memory = scratch(self._local, "stored", sum(sizes))
        try:
            read_bytes(descriptor, offset, memory.data, lambda _: f"{self._where}, chunk {chunks[0]}")
        except FileError as error:
            if len(chunks) == 1:
                return Parted(0, (Damage(int(chunks[0]), _reason(error)),))
            each = [self._check_part(chunks[i : i + 1], descriptor) for i in range(len(chunks))]
            return Parted(sum(one.num_bytes for one in each), tuple(bad for one in each for bad in one.damages))
        damages, at = [], 0
        for chunk, size in zip(chunks.tolist(), sizes, strict=True):
            damages.append(self._check_stored(chunk, memory[at : at + size], descriptor))
            at += size
        return Parted(at, tuple(damage for damage in damages if damage is not None))

    def _check_stored(self, chunk: int, stored: np.ndarray, descriptor: int) -> Damage | None:
        found = crc32(stored)
        damage = self._compare(chunk, found)
        if damage is not None:
            return damage
        values = stored
        assert self._table is not None
        try:
            if self._decoder is not None:
                values = scratch(self._local, "decoded", self.chunk_bytes)
                self._decoder.decode(stored, int(self._table.filter_masks[chunk]), values)
            elif self._by_hdf5:
                values = scratch(self._local, "decoded", self.chunk_bytes)
                RawChunks(self._dataset, descriptor, self._where, self._table).decode(chunk, values)
        except (DecodeError, FileError) as error:
            return Damage(chunk, f"does not decode: {_reason(error)}", self._expects(chunk), found)
        if self._look is not None and (not self.filtered or values is not stored):
            self._look(chunk * (self.chunk_bytes // self._item_bytes), values)
        return None

    def _check_large(self, chunk: int, offset: int, size: int, descriptor: int) -> tuple[Damage, ...]:
        """A plain chunk in pieces."""
        found = 0
        memory = scratch(self._local, "stored", PART_BYTES // self._item_bytes * self._item_bytes or self._item_bytes)
        first = chunk * (self.chunk_bytes // self._item_bytes)
        for start in range(0, size, len(memory)):
            piece = memory[: min(len(memory), size - start)]
            try:
                read_bytes(descriptor, offset + start, piece.data, lambda _: f"{self._where}, chunk {chunk}")
            except FileError as error:
                return (Damage(chunk, _reason(error)),)
            found = crc32(piece, found)
            if self._look is not None:
                self._look(first + start // self._item_bytes, piece)
        damage = self._compare(chunk, found)
        return () if damage is None else (damage,)

    def _compare(self, chunk: int, found: int) -> Damage | None:
        expected = self._expects(chunk)
        if expected in (None, found):
            return None
        return Damage(chunk, "does not match its checksum", expected, found)

    def _expects(self, chunk: int) -> int | None:
        return None if self._expected is None else int(self._expected[chunk])


def _reason(error: Exception) -> str:
    return str(error).rpartition(": ")[2] if isinstance(error, FileError) else str(error)


def check_parts(parts: Iterator[Part], descriptor: int, num_threads: int) -> Iterator[Parted]:
    """Run tasks in threads; yield their results, in any order.

    Parameters
    ----------
    parts : iterator of Part
    descriptor : int
    num_threads : int
    """
    if num_threads <= 1:
        yield from (part(descriptor) for part in parts)
        return
    pool = ThreadPoolExecutor(num_threads, "h5chunk-check")
    waiting: set[Future[Parted]] = set()
    try:
        while True:
            waiting |= {pool.submit(part, descriptor) for part in islice(parts, 4 * num_threads - len(waiting))}
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        with suppress(RuntimeError):
            pool.shutdown(wait=True, cancel_futures=True)
