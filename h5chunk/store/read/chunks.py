"""Read compressed chunks, and rows of datasets in them, outside of HDF5's lock by several threads at a time."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.plan.amplification import read_with
from h5chunk.plan.layout import human_bytes
from h5chunk.plan.repack import find_pieces
from h5chunk.store.hdf5.chunk_table import NotDirect, list_chunks
from h5chunk.store.hdf5.codecs import ChunkDecoder, DecodeError, NoDecoder, scratch
from h5chunk.store.hdf5.ranges import PART_BYTES, Part, read_bytes
from h5chunk.store.read.checksums import NO_SUMS, Sums, checks_of
from h5chunk.store.read.fields import Field

MAX_DECODED_BYTES = 256 << 20  # of a chunk: each thread holds one, and one more for what it decodes from
KEPT_CHUNKS, KEPT_BYTES = 8, 256 << 20  # of chunks that are kept
MIN_KEPT_CHUNKS = 2  # that each file keeps, where many files share the memory
KEPT_BANDS = 2  # of chunks that share samples: windows cut them, and the next one finds the rest decoded

_Copy = tuple[int, int, "slice | np.ndarray", np.ndarray]  # chunk, piece, rows of the chunk, destinations


class DecodedChunks:
    """The chunks of a dataset by number.

    Parameters
    ----------
    path : path
    name : str
        Of the field, for messages.
    dataset : h5py.Dataset
        Used now and not kept.
    sums : mapping of str to Checksums
        What is to be checked.
    indptr : (num_rows + 1,) int64, optional
        Of entries of a matrix, for messages.
    num_kept : int, optional
        The most chunks that are kept, as a window took only a part of them; `KEPT_CHUNKS` if not given.

    Raises
    ------
    NotDirect
        A filter, or the size of its chunks, needs HDF5.
    FileError
        The index of its chunks is damaged.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        dataset: h5py.Dataset,
        sums: Sums = NO_SUMS,
        indptr: np.ndarray | None = None,
        num_kept: int | None = None,
    ) -> None:
        self._table = list_chunks(dataset)
        self._checks = checks_of(path, name, dataset, self._table, sums, indptr) if sums else None
        item_bytes = dataset.dtype.itemsize
        self.chunk_bytes = math.prod(self._table.chunk_shape) * item_bytes
        if self.chunk_bytes > MAX_DECODED_BYTES:
            size, limit = human_bytes(self.chunk_bytes), human_bytes(MAX_DECODED_BYTES)
            raise NotDirect(f"its chunks are of {size}, and threads decode at most {limit} each")
        if (self._table.offsets < 0).any():
            raise NotDirect("parts of it were never written")
        try:
            self._decoder = ChunkDecoder(dataset.id.get_create_plist(), self.chunk_bytes, item_bytes)
        except NoDecoder as error:
            raise NotDirect(str(error)) from None
        self._path, self._name = path, name
        most = int(self._table.sizes.max(initial=0))
        if most > self._decoder.max_stored_bytes:
            raise FileError(
                f"{self._where(int(self._table.sizes.argmax()))}: {most} stored bytes for {self.chunk_bytes} of data: "
                "it is damaged"
            )
        self._num_kept = max(1, min(num_kept or KEPT_CHUNKS, KEPT_BYTES // self.chunk_bytes))
        self.forget()

    def forget(self) -> None:
        """Free what is kept; in a fork also locks that its threads, left behind, may hold."""
        self._local = threading.local()
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._kept_lock = threading.Lock()

    def scratch_bytes(self, num_threads: int) -> int:
        """Return the memory that so many threads take."""
        return (3 * num_threads + self._num_kept) * self.chunk_bytes

    def read(self, descriptor: int, chunk: int, *, is_whole: bool) -> np.ndarray:
        """Read and decode a chunk: (chunk_bytes,) uint8, valid until this thread's next call.

        Parameters
        ----------
        descriptor, chunk : int
        is_whole : bool
            Whether all of the chunk is used now; else the next window will ask for it again, and it is kept.

        Raises
        ------
        FileError
            The chunk is damaged, or cannot be read.
        """
        if is_whole:
            values = scratch(self._local, "decoded", self.chunk_bytes)
            self._decode(descriptor, chunk, values)
            return values
        with self._kept_lock:
            kept = self._kept.setdefault(chunk, _Kept())
            self._kept.move_to_end(chunk)
            if len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        with kept.lock:
            if kept.values is None:
                values = np.empty(self.chunk_bytes, np.uint8)
                self._decode(descriptor, chunk, values)
                kept.values = values
        return kept.values

    def _decode(self, descriptor: int, chunk: int, values: np.ndarray) -> None:
        stored = scratch(self._local, "stored", int(self._table.sizes[chunk]))
        read_bytes(descriptor, int(self._table.offsets[chunk]), stored.data, lambda _: self._where(chunk))
        if self._checks is not None:
            self._checks.check_stored(chunk, stored)
        try:
            self._decoder.decode(stored, int(self._table.filter_masks[chunk]), values)
        except DecodeError as error:
            raise FileError(f"{self._where(chunk)}: {error}: it is damaged") from None

    def _where(self, chunk: int) -> str:
        return f"{printable(self._path)}: field {self._name!r}, chunk {chunk}"


class _Kept:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: np.ndarray | None = None


class ChunkSet:
    """The compressed chunks of a field in several files, which share the memory that one file would have."""

    def __init__(self, each: Sequence[DecodedChunks]) -> None:
        self._each = each
        for chunks in each:
            share = -(-chunks._num_kept // len(each))
            chunks._num_kept = min(chunks._num_kept, max(MIN_KEPT_CHUNKS, share))
        self.share()

    def share(self) -> None:
        """Let a thread use the same memory for the chunks of all files."""
        for chunks in self._each:
            chunks._local = self._each[0]._local

    def scratch_bytes(self, num_threads: int) -> int:
        """Return the memory that so many threads take."""
        if not self._each:
            return 0
        kept = sum(chunks._num_kept * chunks.chunk_bytes for chunks in self._each)
        return 3 * num_threads * max(chunks.chunk_bytes for chunks in self._each) + kept


class ChunkedField:
    """Rows of chunks that are compressed, or hold parts of samples: a chunk is read once for all of its rows.

    A band is the chunks that lie side by side over the same samples: one, where chunks hold whole samples. The piece of
    a sample that a chunk holds is copied to the sample's place.

    Parameters
    ----------
    path : path
    dataset : h5py.Dataset
        Used now and not kept.
    field : Field
    sums : mapping of str to Checksums
        What is to be checked.

    Attributes
    ----------
    row_bytes, num_bytes : int
        Of a row, and of the whole field.

    Raises
    ------
    NotDirect
        A filter, or the size of its chunks, needs HDF5.
    """

    is_plain = False

    def __init__(self, path: Path, dataset: h5py.Dataset, field: Field, sums: Sums = NO_SUMS) -> None:
        self.name = field.name
        self.row_bytes, self.num_bytes = field.grid.sample_bytes, dataset.nbytes
        self._dtype, self._shape, self._chunk = field.dtype, tuple(dataset.shape), tuple(dataset.chunks)
        self._pieces = find_pieces(self._shape[1:], self._chunk[1:])
        self._holds_samples = self._chunk[1:] == self._shape[1:]
        num_kept = max(KEPT_CHUNKS, KEPT_BANDS * len(self._pieces))
        self._decoded = DecodedChunks(path, field.name, dataset, sums, num_kept=num_kept)
        self.forget, self.scratch_bytes = self._decoded.forget, self._decoded.scratch_bytes

    @property
    def chunks(self) -> list[DecodedChunks]:
        """The chunks that are decoded."""
        return [self._decoded]

    def parts(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """As `PlainField.parts`; a part may also find stored bytes that cannot be decoded."""
        bands = rows // self._chunk[0]
        within = rows - bands * self._chunk[0]
        per_part = max(1, PART_BYTES // self._decoded.chunk_bytes)
        target = out if self._holds_samples else out.view(self._dtype).reshape(len(out), *self._shape[1:])
        copies: list[_Copy] = []
        for start, stop in pairwise([0, *(np.flatnonzero(bands[1:] != bands[:-1]) + 1).tolist(), len(rows)]):
            band, some = int(bands[start]), _as_slice(within[start:stop])
            for piece in range(len(self._pieces)):
                copies.append((band, piece, some, places[start:stop]))
                if len(copies) == per_part:
                    yield partial(self._copy, copies, target)
                    copies = []
        if copies:
            yield partial(self._copy, copies, target)

    def _copy(self, copies: list[_Copy], target: np.ndarray, descriptor: int) -> None:
        """Read chunks, and copy their pieces of some samples of their band to these samples' places."""
        for band, piece, rows, places in copies:
            is_whole = len(places) >= min(self._chunk[0], self._shape[0] - band * self._chunk[0])
            values = self._decoded.read(descriptor, band * len(self._pieces) + piece, is_whole=is_whole)
            if self._holds_samples:
                target[places] = values.reshape(self._chunk[0], self.row_bytes)[rows]
                continue
            where = self._pieces[piece]
            inside: Any = (rows, *(slice(0, each.stop - each.start) for each in where))  # at the edge stored in full
            there: Any = (places, *where)
            target[there] = values.view(self._dtype).reshape(self._chunk)[inside]

    def read_all(self, descriptor: int) -> np.ndarray:
        """Read the whole field, for small ones."""
        values = np.empty(self._shape, self._dtype)
        rows = np.arange(self._shape[0])
        for part in self.parts(rows, rows, values.reshape(len(values), -1).view(np.uint8)):
            part(descriptor)
        return values

    def bytes_read(self, rows: np.ndarray) -> int:
        """Return the bytes of the samples that are decoded for some rows, in any order."""
        return read_with(rows, self._chunk[0], self._shape[0]) * self.row_bytes


def _as_slice(rows: np.ndarray) -> slice | np.ndarray:
    """Return neighbours as a slice, which NumPy copies at once."""
    first = int(rows[0])
    return slice(first, first + len(rows)) if (np.diff(rows) == 1).all() else rows
