"""Read rows of a dataset by their byte ranges in the file, outside HDF5's lock, in several threads.

HDF5 lists the chunks once. After that the file is read only with ``preadv``. Uncompressed rows are read directly to
their positions in a shuffled batch. Compressed chunks are read and decoded, and then their rows are copied to the
batch.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5chunk.errors import FileError, human_bytes, printable
from h5chunk.plan.cache import count_entries_read, count_items_read
from h5chunk.plan.repack import find_pieces
from h5chunk.store.hdf5.chunk_table import NotDirect, check_bytes, list_chunks
from h5chunk.store.hdf5.codecs import scratch
from h5chunk.store.hdf5.open import same_file
from h5chunk.store.hdf5.ranges import PART_BYTES, Ranges, ReadTask, held, read_bytes, row_tasks, vectors_of
from h5chunk.store.hdf5.raw_chunks import RawChunks
from h5chunk.store.read.checksums import NO_SUMS, ChunkChecks, Sums
from h5chunk.store.read.fields import Field

WHOLE_ROW_BYTES = 1 << 10  # fields with rows of at most this size are kept in memory
WHOLE_BYTES = 64 << 20  # unless the field is larger than this
MAX_DECODED_BYTES = 256 << 20  # limit on a decoded chunk, because each thread holds one and its stored bytes
KEPT_CHUNKS, KEPT_BYTES = 8, 256 << 20  # number of decoded chunks to keep, and the limit on their total size
TINY_BYTES, MANY_CHUNKS = 8 << 10, 4096  # HDF5 is faster at reading so many chunks below this size (scripts/LOG.md)
KEPT_BANDS = 2  # bands to keep if samples are cut, because two windows may share a band

_Copy = tuple[int, int, "slice | np.ndarray", np.ndarray]  # band, chunk in the band, rows of the band, destinations


class ChunkRows(NamedTuple):
    """The offset and size of each stored chunk, and its rows from ``starts`` to ``stops``, exclusive: (n,) int64."""

    offsets: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class DecodedChunks:
    """The decoded chunks of a dataset, for any number of threads. Chunks that are only partly used are cached.

    No reference to the dataset object is kept. Raises NotDirect if only HDF5 can decode the chunks. If the ``indptr``
    of a matrix is given, messages name rows instead of entries.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        dataset: h5py.Dataset,
        sums: Sums,
        indptr: np.ndarray | None,
        num_kept: int,
    ) -> None:
        self.table = table = list_chunks(dataset)
        self.chunk_bytes = math.prod(table.chunk_shape) * dataset.dtype.itemsize
        if self.chunk_bytes > MAX_DECODED_BYTES:
            size, limit = human_bytes(self.chunk_bytes), human_bytes(MAX_DECODED_BYTES)
            raise NotDirect(f"its chunks have {size}, but threads decode chunks of at most {limit}")
        if (table.offsets < 0).any():
            raise NotDirect("parts of it were never written")
        other = "" if dataset.name.strip("/") == name else f" ({printable(dataset.name.strip('/'))})"
        self._raw = RawChunks(dataset, -1, f"{printable(path)}: field {name!r}{other}", table)
        if self._raw.left_to_hdf5:
            raise NotDirect(self._raw.left_to_hdf5)
        self._checks = ChunkChecks(path, name, table, sums[name], indptr) if name in sums else None
        self._kept_bytes = max(1, min(num_kept, KEPT_BYTES // self.chunk_bytes)) * self.chunk_bytes
        self.are_tiny = self.chunk_bytes < TINY_BYTES and len(table) >= MANY_CHUNKS
        self.forget()

    def forget(self) -> None:
        """Free the kept chunks, and replace locks that threads of a forked parent may hold."""
        self.local = threading.local()
        self.kept = _KeptChunks(self._kept_bytes)

    def share_kept(self, other: DecodedChunks) -> None:
        """Share the cache of another dataset, which then keeps the most recently used chunks of both."""
        other.kept.limit_bytes = max(other.kept.limit_bytes, self._kept_bytes)
        self.kept = other.kept

    def read(self, descriptor: int, chunk: int, *, is_whole: bool) -> np.ndarray:
        """Read and decode a chunk: (chunk_bytes,) uint8, valid until this thread's next call.

        ``is_whole`` means that all rows of the chunk are used now. Otherwise the decoded chunk is cached for the next
        window. Raises FileError if the chunk is damaged or unreadable.
        """
        if is_whole:
            values = scratch(self.local, "decoded", self.chunk_bytes)
            self._decode(descriptor, chunk, values)
            return values
        kept = self.kept.entry((id(self), chunk), self.chunk_bytes)
        with kept.lock:
            if kept.values is None:
                values = np.empty(self.chunk_bytes, np.uint8)
                self._decode(descriptor, chunk, values)
                kept.values = values
        return kept.values

    def _decode(self, descriptor: int, chunk: int, values: np.ndarray) -> None:
        stored = self._raw.read_stored(descriptor, chunk, self.local)
        if self._checks is not None:
            self._checks.check_stored(chunk, stored)
        self._raw.decode_stored(chunk, stored, values)


class _KeptChunk:
    def __init__(self, num_bytes: int) -> None:
        self.lock, self.num_bytes = threading.Lock(), num_bytes
        self.values: np.ndarray | None = None


class _KeptChunks:
    """The most recently used decoded chunks of one or several datasets, of at most ``limit_bytes`` or one chunk."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock, self._num_bytes = threading.Lock(), 0
        self._chunks: OrderedDict[tuple[int, int], _KeptChunk] = OrderedDict()

    def entry(self, key: tuple[int, int], num_bytes: int) -> _KeptChunk:
        """Return the entry of a chunk of ``num_bytes``, which is empty if the chunk is new."""
        with self._lock:
            if key not in self._chunks:
                self._chunks[key] = _KeptChunk(num_bytes)
                self._num_bytes += num_bytes
            self._chunks.move_to_end(key)
            while self._num_bytes > self.limit_bytes and len(self._chunks) > 1:
                self._num_bytes -= self._chunks.popitem(last=False)[1].num_bytes
            return self._chunks[key]


class ByteReader:
    """Base class of readers of one field by byte ranges. The caller opens the file and passes the descriptor.

    A field is plain if its rows are neither compressed nor cut into pieces. Otherwise ``chunks`` decodes its chunks.
    """

    name: str
    row_bytes: int = 1 << 62  # bytes of a row; exceeds any limit for a matrix, whose rows differ in length
    num_bytes: int
    is_plain = False
    reads_rows = False  # whether `row_tasks` makes all tasks
    chunks: Sequence[DecodedChunks] = ()

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: Any) -> Iterator[ReadTask]:
        """Yield tasks for several threads that read row ``rows[i]`` to ``out[destinations[i]]``.

        There must be at least one row. The rows of a chunk must be adjacent and ascending, and no two destinations may
        be equal. ``out`` is (m, row_bytes) uint8, or the `CsrBuffers` of a matrix, and must live until the last task is
        done.
        """
        raise NotImplementedError

    def read_all(self, descriptor: Any) -> np.ndarray:
        """Read all rows of a field that is not a matrix: (num_rows, *sample_shape)."""
        raise NotImplementedError

    def rows_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the indices, in the result of `read_all`, of the rows that make up each sample: (n, ...) int64."""
        return samples

    def bytes_read(self, rows: np.ndarray) -> int:
        """Return the number of bytes that are read or decoded for these rows, which may be in any order."""
        raise NotImplementedError

    def chunk_rows(self, _number: int = 0) -> Iterator[ChunkRows]:
        """Yield the byte ranges of the field's chunks and their rows, for file ``_number`` of a set."""
        raise NotImplementedError

    @property
    def is_slower_than_hdf5(self) -> bool:
        """True if HDF5 in one thread is faster than several threads here, because the field has many tiny chunks."""
        return any(chunks.are_tiny for chunks in self.chunks)

    def scratch_bytes(self, num_threads: int) -> int:
        """Return how many bytes of memory threads need for chunks, in addition to the rows themselves."""
        if not self.chunks:
            return 0
        limits = {id(chunks.kept): chunks.kept.limit_bytes for chunks in self.chunks}
        return 3 * num_threads * max(chunks.chunk_bytes for chunks in self.chunks) + sum(limits.values())

    def forget(self) -> None:
        """Free the memory that is kept between tasks. Each thread then shares its buffers among all ``chunks``."""
        for chunks in self.chunks:
            chunks.forget()
            chunks.local = self.chunks[0].local


def direct_field(path: Path, file: h5py.File, field: Field, sums: Sums = NO_SUMS) -> PlainField | ChunkedField:
    """Return the byte reader of a field, which verifies the checksums in ``sums`` and does not keep the file object.

    Raises NotDirect if only HDF5 can read the field.
    """
    dataset = file[field.dataset]
    if not same_file(dataset, file):
        raise NotDirect("it is in another file, to which a link refers")
    check_bytes(dataset, field.dtype)
    has_parts = dataset.chunks is not None and dataset.chunks[1:] != dataset.shape[1:]
    filtered = dataset.id.get_create_plist().get_nfilters() > 0
    return (ChunkedField if has_parts or filtered else PlainField)(path, field.name, dataset, sums)


class PlainField(ByteReader):
    """A reader of rows that are stored uncompressed, each in one run of bytes."""

    is_plain = True

    def __init__(
        self, path: Path, name: str, dataset: h5py.Dataset, sums: Sums, indptr: np.ndarray | None = None
    ) -> None:
        table = list_chunks(dataset)
        self._dtype, self._shape = dataset.dtype.newbyteorder("="), dataset.shape
        if (table.offsets < 0).any():
            raise NotDirect("parts of it were never written")
        if (table.sizes != math.prod(table.chunk_shape) * self._dtype.itemsize).any():
            raise NotDirect("the size of its chunks does not follow from their type and shape")
        self.name, self._path = name, path
        self.row_bytes, self.num_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize, dataset.nbytes
        self.is_one_run = table.is_run_of_rows
        self._table, self._chunk_rows = table, table.chunk_shape[0]
        self._checks = ChunkChecks(path, name, table, sums[name], indptr) if name in sums else None

    @property
    def reads_rows(self) -> bool:  # type: ignore[override]
        return self._checks is None or self._checks.are_done

    def tasks(
        self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray, counts: np.ndarray | None = None
    ) -> Iterator[ReadTask]:
        """Yield tasks as `ByteReader.tasks` does. With ``counts``, ``rows[i]`` is the first of ``counts[i]`` rows."""
        blocks = self._table.offsets, self._chunk_rows, self.row_bytes
        if self.reads_rows:
            return row_tasks(blocks, rows, counts, destinations, out, self._where)
        assert self._checks is not None
        whole = self._checks.are_read_whole(rows) if counts is None else np.zeros(len(rows), bool)
        sizes = np.full(int(whole.sum()), self.row_bytes)
        vectors = vectors_of(sizes, destinations[whole] * self.row_bytes, out)
        parts: Iterator[ReadTask] = self._checks.whole_tasks(rows[whole], vectors, out)
        if not whole.all():
            rows, destinations = rows[~whole], destinations[~whole]
            counts = None if counts is None else counts[~whole]
            due = self._checks.tasks(self._checks.of_rows(rows, counts))
            parts = chain(parts, due, row_tasks(blocks, rows, counts, destinations, out, self._where))
        return parts

    def read_all(self, descriptor: int) -> np.ndarray:
        values = np.empty(self._shape, self._dtype)
        flat = values.reshape(-1).view(np.uint8).data
        size = (self._shape[0] if self.is_one_run else self._chunk_rows) * self.row_bytes
        with held(descriptor, self._table.offsets, self._table.sizes):
            for number, start in enumerate(range(0, len(flat), size)):
                read_bytes(int(descriptor), int(self._table.offsets[number]), flat[start : start + size], self._where)
        if self._checks is not None:
            self._checks.check(descriptor, np.arange(len(self._table)))
        return values

    @property
    def offsets(self) -> np.ndarray:
        """The offset of each row in the file: (num_rows,) int64."""
        rows = np.arange(self._shape[0])
        return self._table.offsets[rows // self._chunk_rows] + rows % self._chunk_rows * self.row_bytes

    def chunk_rows(self, _number: int = 0) -> Iterator[ChunkRows]:
        step = self._chunk_rows if len(self._table) > 1 else max(1, PART_BYTES // self.row_bytes)
        starts = np.arange(0, self._shape[0], step)
        stops = np.minimum(starts + step, self._shape[0])
        offsets = self._table.offsets[starts // self._chunk_rows] + starts % self._chunk_rows * self.row_bytes
        yield ChunkRows(offsets, (stops - starts) * self.row_bytes, starts, stops)

    def bytes_read(self, rows: np.ndarray, counts: np.ndarray | None = None) -> int:
        return (len(rows) if counts is None else int(counts.sum())) * self.row_bytes

    def _where(self, offset: int) -> str:
        """Return a text that names the chunk at an offset of the file, for messages."""
        return f"{printable(self._path)}: field {self.name!r}, chunk {self._table.chunk_at(offset)}"


class ChunkedField(ByteReader):
    """A reader of rows in chunks that are compressed, or that contain only pieces of samples. Each chunk is read once.

    A band consists of all chunks that contain pieces of the same samples. If chunks contain whole samples, it is one
    chunk.
    """

    def __init__(
        self, path: Path, name: str, dataset: h5py.Dataset, sums: Sums, indptr: np.ndarray | None = None
    ) -> None:
        self.name = name
        self._dtype, self._shape, self._chunk = dataset.dtype.newbyteorder("="), dataset.shape, dataset.chunks
        self.row_bytes, self.num_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize, dataset.nbytes
        self._pieces = find_pieces(self._shape[1:], self._chunk[1:])
        self._holds_samples = len(self._shape) > 1 and self._chunk[1:] == self._shape[1:]
        num_kept = max(KEPT_CHUNKS, KEPT_BANDS * len(self._pieces))
        self._decoded = DecodedChunks(path, name, dataset, sums, indptr, num_kept)
        self.chunks = [self._decoded]

    def tasks(
        self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray, counts: np.ndarray | None = None
    ) -> Iterator[ReadTask]:
        """Yield tasks as `PlainField.tasks` does."""
        target = out if self._holds_samples else out.view(self._dtype).reshape(len(out), *self._shape[1:])
        copies = (
            self._copies(rows, destinations) if counts is None else self._copies_of_runs(rows, destinations, counts)
        )
        per_part = max(1, PART_BYTES // self._decoded.chunk_bytes)
        while part := list(islice(copies, per_part)):
            yield ChunkTask(self, part, target)

    def _copies(self, rows: np.ndarray, destinations: np.ndarray) -> Iterator[_Copy]:
        bands = rows // self._chunk[0]
        within = rows - bands * self._chunk[0]
        for start, stop in pairwise([0, *(np.flatnonzero(bands[1:] != bands[:-1]) + 1).tolist(), len(rows)]):
            selected: slice | np.ndarray = within[start:stop]
            if (within[start + 1 : stop] == within[start : stop - 1] + 1).all():  # NumPy copies a slice faster
                selected = slice(int(within[start]), int(within[start]) + stop - start)
            for piece in range(len(self._pieces)):
                yield int(bands[start]), piece, selected, destinations[start:stop]

    def _copies_of_runs(self, firsts: np.ndarray, destinations: np.ndarray, counts: np.ndarray) -> Iterator[_Copy]:
        apart = np.flatnonzero(firsts[1:] != firsts[:-1] + counts[:-1]) + 1
        for start, stop in pairwise([0, *apart.tolist(), len(firsts)]):
            first, end = int(firsts[start]), int(firsts[stop - 1] + counts[stop - 1])
            targets = np.repeat(destinations[start:stop] - firsts[start:stop], counts[start:stop]) + np.arange(
                first, end
            )
            for chunk in range(first // self._chunk[0], (end - 1) // self._chunk[0] + 1):
                begin = chunk * self._chunk[0]
                low, high = max(first, begin), min(end, begin + self._chunk[0])
                for piece in range(len(self._pieces)):
                    yield chunk, piece, slice(low - begin, high - begin), targets[low - first : high - first]

    def ranges(self, copies: list[_Copy]) -> Ranges:
        chunks = np.array([band * len(self._pieces) + piece for band, piece, _, _ in copies])
        return self._decoded.table.offsets[chunks], self._decoded.table.sizes[chunks]

    def copy(self, copies: list[_Copy], target: np.ndarray, descriptor: int) -> None:
        """Decode chunks, and copy the requested rows of each chunk to their destinations in ``target``."""
        for band, piece, rows, destinations in copies:
            is_whole = len(destinations) >= min(self._chunk[0], self._shape[0] - band * self._chunk[0])
            values = self._decoded.read(descriptor, band * len(self._pieces) + piece, is_whole=is_whole)
            if self._holds_samples:
                target[destinations] = values.reshape(self._chunk[0], self.row_bytes)[rows]
                continue
            where = self._pieces[piece]
            inside: Any = (rows, *(slice(0, part.stop - part.start) for part in where))  # edge chunks are full
            target_index: Any = (destinations, *where)
            target[target_index] = values.view(self._dtype).reshape(self._chunk)[inside]

    def read_all(self, descriptor: int) -> np.ndarray:
        values = np.empty(self._shape, self._dtype)
        rows = np.arange(self._shape[0])
        with held(descriptor, self._decoded.table.offsets, self._decoded.table.sizes):
            for part in self.tasks(rows, rows, values.reshape(len(values), -1).view(np.uint8)):
                part(int(descriptor))
        return values

    def chunk_rows(self, _number: int = 0) -> Iterator[ChunkRows]:
        table = self._decoded.table
        starts = np.arange(len(table)) // len(self._pieces) * self._chunk[0]
        yield ChunkRows(table.offsets, table.sizes, starts, np.minimum(starts + self._chunk[0], self._shape[0]))

    def bytes_read(self, rows: np.ndarray, counts: np.ndarray | None = None) -> int:
        if counts is not None:
            return count_entries_read(rows, rows + counts, self._chunk[0], self._shape[0]) * self.row_bytes
        return count_items_read(rows, self._chunk[0], self._shape[0]) * self.row_bytes


class ChunkTask:
    """A task that decodes chunks, and copies their rows."""

    def __init__(self, field: ChunkedField, copies: list[_Copy], target: np.ndarray) -> None:
        self._field, self._copies, self._target = field, copies, target

    @property
    def ranges(self) -> Ranges:
        """The byte ranges that the task reads."""
        return self._field.ranges(self._copies)

    def __call__(self, descriptor: int) -> None:
        self._field.copy(self._copies, self._target, descriptor)


def is_small_field(field: ByteReader) -> bool:
    """Return whether a field is small enough to be read once and kept in memory."""
    return field.row_bytes <= WHOLE_ROW_BYTES and field.num_bytes <= WHOLE_BYTES


def read_small_fields(
    direct: Mapping[str, ByteReader], descriptor: Any, check: Callable[[], None], max_bytes: float = math.inf
) -> dict[str, np.ndarray]:
    """Read the small fields that are kept in memory, and return them by name. Each has at most ``max_bytes``.

    If reading fails, ``check`` is called first, which raises an error if the file was changed. If reading succeeds, the
    caller must call ``check``.
    """
    try:
        return {
            name: field.read_all(descriptor)
            for name, field in direct.items()
            if is_small_field(field) and field.num_bytes <= max_bytes
        }
    except (FileError, ValueError, OSError):
        check()
        raise
