"""Rows of a dataset by their byte ranges in the file, outside HDF5's lock, so that threads read side by side.

The chunk table is listed once through HDF5; after that the file is only read with ``preadv``. What is stored plainly
goes straight to its place in a shuffled batch: one call reads a run of neighbouring rows and puts each where it is
wanted. What is compressed is read and decoded chunk by chunk, and its rows are copied to their places.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.plan.layout import human_bytes
from h5chunk.store.chunktable import list_chunks
from h5chunk.store.codecs import ChunkDecoder, DecodeError, NoDecoder
from h5chunk.store.reader import Field

RUN_BYTES = 2 << 20  # of one preadv; contiguous datasets are cut into such runs, so that threads can share them
MAX_VECTORS = 1024  # IOV_MAX of Linux and macOS: buffers of one preadv
PART_BYTES = 8 << 20  # what a thread does at a time: large enough not to fight for the GIL; scripts/LOG.md
MAX_DECODED_BYTES = 256 << 20  # of a compressed chunk: each thread holds one, and one more for what it decodes from
KEPT_CHUNKS, KEPT_BYTES = 8, 256 << 20  # decoded chunks that are kept, as a window took only some of their rows

Part = Callable[[int], None]  # reads what it stands for through a descriptor of the file

# os.preadv wants a Python object for each buffer, made while holding the GIL: a table of addresses costs nothing.
_preadv = ctypes.CDLL(None, use_errno=True).preadv
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_preadv.restype = ctypes.c_ssize_t


class NotDirect(Exception):
    """Why a dataset cannot be read by byte ranges; the message says it."""


def direct_field(path: Path, file: h5py.File, field: Field) -> PlainField | EncodedField:
    """What reads a field by byte ranges. Holds numbers only; descriptors are the caller's.

    Parameters
    ----------
    path : path
    file : h5py.File
        Open for reading; used now and not kept.
    field : Field

    Raises
    ------
    NotDirect
        The layout or a filter needs HDF5.
    """
    dataset = file[field.dataset]
    properties = dataset.id.get_create_plist()
    _check(file, dataset, properties, field)
    kind = EncodedField if properties.get_nfilters() else PlainField
    return kind(path, dataset, properties, field)


class PlainField:
    """Reads rows that are plain bytes of the file.

    Attributes
    ----------
    row_bytes, num_bytes : int
        Of a row, and of the whole field.
    is_one_run : bool
        Whether all rows lie one behind the other.
    """

    def __init__(self, path: Path, dataset: h5py.Dataset, properties: h5py.h5p.PropDCID, field: Field) -> None:
        table = list_chunks(dataset)
        if (table.offsets < 0).any():
            raise NotDirect("parts of it were never written")
        if (table.sizes != math.prod(table.chunk_shape) * field.dtype.itemsize).any():
            raise NotDirect("its chunks are not of the size that its type and shape say")
        self.name = field.name
        self.row_bytes, self.num_bytes = field.grid.sample_bytes, dataset.nbytes
        self.is_one_run = table.is_one_run
        self._path = path
        self._dtype, self._shape = field.dtype, tuple(dataset.shape)
        self._rows_per_chunk = table.chunk_shape[0]
        self._rows_per_run = max(1, min(self._rows_per_chunk, RUN_BYTES // self.row_bytes, MAX_VECTORS))
        self._offsets = table.offsets

    def parts(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """What has to be done so that ``out[places[i]]`` is row ``rows[i]``, in parts for several threads.

        Parameters
        ----------
        rows, places : (n,) int64, at least one
            Neighbours in a chunk side by side, ascending within it.
        out : (m, row_bytes) uint8, C-contiguous
            Must stay in place until the last part is done.

        Raises
        ------
        FileError
            From a part: the file ends before its rows do, or cannot be read.
        """
        borders = self._borders(rows)
        firsts = rows[borders[:-1]]
        chunks, offsets = np.divmod(firsts, self._rows_per_chunk)
        offsets = (self._offsets[chunks] + offsets * self.row_bytes).tolist()
        vectors = np.empty((len(rows), 2), np.uintp)
        vectors[:, 0] = out.ctypes.data + places * self.row_bytes
        vectors[:, 1] = self.row_bytes
        counts = np.diff(borders).tolist()
        tables = (vectors.ctypes.data + borders[:-1] * vectors.strides[0]).tolist()
        per_part = max(1, PART_BYTES * len(counts) // max(1, len(rows) * self.row_bytes))
        for first in range(0, len(counts), per_part):
            some = slice(first, first + per_part)
            yield _PlainPart(self, vectors, out, tables[some], counts[some], offsets[some])

    def scratch_bytes(self, num_threads: int) -> int:
        """Memory beside ``out`` that so many threads take."""
        return 0

    def _borders(self, rows: np.ndarray) -> np.ndarray:
        """Cut rows into runs of neighbours in one chunk: run i is ``rows[borders[i]:borders[i + 1]]``."""
        chunks, offsets = np.divmod(rows, self._rows_per_chunk)
        groups = chunks * -(-self._rows_per_chunk // self._rows_per_run) + offsets // self._rows_per_run
        apart = (rows[1:] != rows[:-1] + 1) | (groups[1:] != groups[:-1])
        return np.concatenate(([0], np.flatnonzero(apart) + 1, [len(rows)]))

    def read_all(self, descriptor: int) -> np.ndarray:
        """The whole field, for small ones."""
        values = np.empty(self._shape, self._dtype)
        flat = values.reshape(-1).view(np.uint8).data
        size = len(flat) if self.is_one_run else self._rows_per_chunk * self.row_bytes
        for number, start in enumerate(range(0, len(flat), size)):
            self._read_bytes(descriptor, int(self._offsets[number]), flat[start : start + size])
        return values

    def forget(self) -> None:
        """Nothing is kept between parts."""

    def read_rest(self, descriptor: int, offset: int, out: np.ndarray, vectors: np.ndarray, got: int) -> None:
        """What is missing after ``got`` bytes: preadv may give less, in large requests or where a signal came."""
        flat = out.reshape(-1).data
        for number in range(got // self.row_bytes, len(vectors)):
            done = max(0, got - number * self.row_bytes)
            start = int(vectors[number, 0]) - out.ctypes.data
            at = offset + number * self.row_bytes + done
            self._read_bytes(descriptor, at, flat[start + done : start + self.row_bytes])

    def _read_bytes(self, descriptor: int, offset: int, buffer: memoryview) -> None:
        _read_bytes(descriptor, offset, buffer, lambda at: self.where(offset + at))

    def where(self, offset: int) -> str:
        """Names the chunk that holds this byte of the file."""
        chunk = int(np.where(self._offsets <= offset, self._offsets, -1).argmax())
        return f"{printable(self._path)}: field {self.name!r}, chunk {chunk}"


class _PlainPart:
    """Some runs of rows; each goes with one call that holds no lock."""

    def __init__(
        self,
        field: PlainField,
        vectors: np.ndarray,
        out: np.ndarray,
        tables: list[int],
        counts: list[int],
        offsets: list[int],
    ) -> None:
        self._field, self._vectors, self._out = field, vectors, out
        self._runs = list(zip(tables, counts, offsets, strict=True))

    def __call__(self, descriptor: int) -> None:
        size = self._field.row_bytes
        for table, count, offset in self._runs:
            got = _preadv(descriptor, table, count, offset)
            if got != count * size:
                if got < 0:
                    got = self._failed(ctypes.get_errno(), offset)
                first = (table - self._vectors.ctypes.data) // self._vectors.strides[0]
                self._field.read_rest(descriptor, offset, self._out, self._vectors[first : first + count], got)

    def _failed(self, number: int, offset: int) -> int:
        error = OSError(number, os.strerror(number))
        if isinstance(error, (InterruptedError, BlockingIOError)):
            return 0
        raise FileError(f"{self._field.where(offset)}: cannot be read: {error.strerror}") from error


class EncodedField:
    """Reads rows of compressed chunks: whole chunks are read and decoded, by several threads at a time."""

    def __init__(self, path: Path, dataset: h5py.Dataset, properties: h5py.h5p.PropDCID, field: Field) -> None:
        table = list_chunks(dataset)
        self._chunk_bytes = math.prod(table.chunk_shape) * field.dtype.itemsize
        if self._chunk_bytes > MAX_DECODED_BYTES:
            size, limit = human_bytes(self._chunk_bytes), human_bytes(MAX_DECODED_BYTES)
            raise NotDirect(f"its compressed chunks are of {size}, and threads decode at most {limit} each")
        if (table.offsets < 0).any():
            raise NotDirect("parts of it were never written")
        try:
            self._decoder = ChunkDecoder(properties, self._chunk_bytes, field.dtype.itemsize)
        except NoDecoder as error:
            raise NotDirect(str(error)) from None
        most = int(table.sizes.max(initial=0))
        if most > self._decoder.max_stored_bytes:
            raise FileError(
                f"{printable(path)}: field {field.name!r} has a stored chunk of {most} bytes for "
                f"{self._chunk_bytes} of data: it is damaged"
            )
        self.name = field.name
        self.row_bytes, self.num_bytes = field.grid.sample_bytes, dataset.nbytes
        self._path, self._table = path, table
        self._rows_per_chunk = table.chunk_shape[0]
        self._dtype, self._shape = field.dtype, tuple(dataset.shape)
        self._num_kept = max(1, min(KEPT_CHUNKS, KEPT_BYTES // self._chunk_bytes))
        self.forget()

    def forget(self) -> None:
        """Free what is kept between parts; in a fork also locks that its threads, left behind, may hold."""
        self._local = threading.local()
        self._kept: OrderedDict[int, _KeptChunk] = OrderedDict()
        self._kept_lock = threading.Lock()

    def parts(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """As `PlainField.parts`; a part may also find stored bytes that cannot be decoded."""
        chunks = rows // self._rows_per_chunk
        borders = np.concatenate(([0], np.flatnonzero(chunks[1:] != chunks[:-1]) + 1, [len(rows)])).tolist()
        rows = rows - chunks * self._rows_per_chunk
        per_part = max(1, PART_BYTES // self._chunk_bytes)
        for first in range(0, len(borders) - 1, per_part):
            cuts = borders[first : first + per_part + 1]
            yield _EncodedPart(self, chunks, rows, places, out, cuts)

    def scratch_bytes(self, num_threads: int) -> int:
        """Memory beside ``out`` that so many threads take."""
        return (3 * num_threads + self._num_kept) * self._chunk_bytes

    def copy_rows(self, descriptor: int, chunk: int, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        """Decode a chunk and copy some of its rows to their places."""
        if len(rows) == min(self._rows_per_chunk, self._shape[0] - chunk * self._rows_per_chunk):
            values = self._scratch("decoded", self._chunk_bytes)
            self._decode(descriptor, chunk, values)
        else:
            kept = self._keep(chunk)
            with kept.lock:
                if kept.values is None:
                    values = np.empty(self._chunk_bytes, np.uint8)
                    self._decode(descriptor, chunk, values)
                    kept.values = values
            values = kept.values
        out[places] = values.reshape(self._rows_per_chunk, self.row_bytes)[rows]

    def read_all(self, descriptor: int) -> np.ndarray:
        """The whole field, for small ones."""
        values = np.empty(self._shape, self._dtype)
        rows, decoded = values.reshape(-1).view(np.uint8), np.empty(self._chunk_bytes, np.uint8)
        for number, start in enumerate(range(0, len(rows), self._chunk_bytes)):
            self._decode(descriptor, number, decoded)
            rows[start : start + self._chunk_bytes] = decoded[: len(rows) - start]
        return values

    def _keep(self, chunk: int) -> _KeptChunk:
        """A chunk that is shared by two windows, which come one after the other."""
        with self._kept_lock:
            kept = self._kept.setdefault(chunk, _KeptChunk())
            self._kept.move_to_end(chunk)
            if len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
            return kept

    def _decode(self, descriptor: int, chunk: int, values: np.ndarray) -> None:
        size = int(self._table.sizes[chunk])
        stored = self._scratch("stored", size)
        _read_bytes(descriptor, int(self._table.offsets[chunk]), stored.data, lambda _: self._where(chunk))
        try:
            self._decoder.decode(stored, int(self._table.filter_masks[chunk]), values)
        except DecodeError as error:
            raise FileError(f"{self._where(chunk)}: {error}: it is damaged") from None

    def _scratch(self, name: str, size: int) -> np.ndarray:
        """Memory of this thread that is used again for each chunk."""
        memory: np.ndarray | None = getattr(self._local, name, None)
        if memory is None or len(memory) < size:
            memory = np.empty(size, np.uint8)
            setattr(self._local, name, memory)
        return memory[:size]

    def _where(self, chunk: int) -> str:
        return f"{printable(self._path)}: field {self.name!r}, chunk {chunk}"


class _KeptChunk:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: np.ndarray | None = None


class _EncodedPart:
    """Some compressed chunks."""

    def __init__(
        self,
        field: EncodedField,
        chunks: np.ndarray,
        rows: np.ndarray,
        places: np.ndarray,
        out: np.ndarray,
        cuts: list[int],
    ) -> None:
        self._field, self._chunks, self._rows, self._places, self._out = field, chunks, rows, places, out
        self._cuts = cuts

    def __call__(self, descriptor: int) -> None:
        for start, stop in zip(self._cuts[:-1], self._cuts[1:], strict=True):
            some = slice(start, stop)
            chunk = int(self._chunks[start])
            self._field.copy_rows(descriptor, chunk, self._rows[some], self._places[some], self._out)


def _read_bytes(descriptor: int, offset: int, buffer: memoryview, where: Callable[[int], str]) -> None:
    """Fill a buffer from an offset of the file; ``where`` names what lies ``n`` bytes behind it."""
    done = 0
    while done < len(buffer):
        try:
            more = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise FileError(f"{where(done)}: cannot be read: {error.strerror or error}") from error
        if not more:
            raise FileError(f"{where(done)}: the file ends in the middle of its data: it was cut short")
        done += more


def _check(file: h5py.File, dataset: h5py.Dataset, properties: h5py.h5p.PropDCID, field: Field) -> None:
    """Raise NotDirect unless rows are bytes of the file, plain or encoded."""
    if h5py.h5o.get_info(dataset.id).fileno != h5py.h5o.get_info(file.id).fileno:
        raise NotDirect("a link leads to it in another file")
    if properties.get_layout() not in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS):
        raise NotDirect("it is stored compactly or is a view of other files")
    if properties.get_layout() == h5py.h5d.CONTIGUOUS and properties.get_external_count():
        raise NotDirect("its data lie in other files")
    native = h5py.h5t.py_create(np.dtype(field.dtype.str), logical=True)  # .str: without names of an enum's values
    stored = dataset.id.get_type()
    if isinstance(stored, h5py.h5t.TypeEnumID) and field.dtype.kind != "b":
        stored = stored.get_super()
    if field.dtype.kind not in "biuf" or not stored.equal(native):
        raise NotDirect(f"its type {dataset.dtype} is not stored as this machine has it")
    if dataset.chunks is not None and dataset.chunks[1:] != dataset.shape[1:]:
        raise NotDirect("its chunks hold parts of samples")
    if not math.prod(dataset.shape):
        raise NotDirect("it is empty")
