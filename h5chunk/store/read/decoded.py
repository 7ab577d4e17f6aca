"""Compressed chunks of a dataset, read and decoded outside HDF5's lock by several threads at a time."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.plan.layout import human_bytes
from h5chunk.store.guard.checksums import NO_SUMS, Sums, checks_of
from h5chunk.store.read.chunktable import NotDirect, list_chunks
from h5chunk.store.read.codecs import ChunkDecoder, DecodeError, NoDecoder
from h5chunk.store.read.ranges import read_bytes

MAX_DECODED_BYTES = 256 << 20  # of a chunk: each thread holds one, and one more for what it decodes from
KEPT_CHUNKS, KEPT_BYTES = 8, 256 << 20  # of chunks that are kept


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
    num_kept : int
        The most chunks that are kept, as a window took only a part of them.

    Raises
    ------
    NotDirect
        A filter, or the size of its chunks, needs HDF5.
    FileError
        The index of its chunks makes no sense.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        dataset: h5py.Dataset,
        sums: Sums = NO_SUMS,
        indptr: np.ndarray | None = None,
        num_kept: int = KEPT_CHUNKS,
    ) -> None:
        self._table = list_chunks(dataset)
        self._checks = checks_of(path, name, dataset, self._table, sums, indptr)
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
        self._num_kept = max(1, min(num_kept, KEPT_BYTES // self.chunk_bytes))
        self.forget()

    def forget(self) -> None:
        """Free what is kept; in a fork also locks that its threads, left behind, may hold."""
        self._local = threading.local()
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._kept_lock = threading.Lock()

    def scratch_bytes(self, num_threads: int) -> int:
        """Memory that so many threads take."""
        return (3 * num_threads + self._num_kept) * self.chunk_bytes

    def whole(self, descriptor: int, chunk: int) -> np.ndarray:
        """(chunk_bytes,) uint8 of a chunk that is used once; valid until this thread's next one."""
        values = self._scratch("decoded", self.chunk_bytes)
        self._decode(descriptor, chunk, values)
        return values

    def shared(self, descriptor: int, chunk: int) -> np.ndarray:
        """(chunk_bytes,) uint8 of a chunk that two windows, which come one after the other, share."""
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
        stored = self._scratch("stored", int(self._table.sizes[chunk]))
        read_bytes(descriptor, int(self._table.offsets[chunk]), stored.data, lambda _: self._where(chunk))
        if self._checks is not None:
            self._checks.check_stored(chunk, stored)
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
        return f"{printable(self._path)}: field {self._name!r}, chunk {chunk}"


class _Kept:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: np.ndarray | None = None
