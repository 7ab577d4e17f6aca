"""Read the chunks of a dataset as decoded bytes, whatever their type and filters."""

from __future__ import annotations

import math
import threading

import h5py
import numpy as np

from h5chunk.errors import FileError, UnsupportedError
from h5chunk.store.hdf5.chunk_table import ChunkTable, stored_item_bytes
from h5chunk.store.hdf5.codecs import INSTALL, KNOWN_FILTERS, ChunkDecoder, DecodeError, NoDecoder, scratch
from h5chunk.store.hdf5.ranges import read_bytes


class RawChunks:
    """The chunks of a dataset of fixed-size elements, which any number of threads can read.

    A chunk is identified by its index in row-major order. ``where`` names the dataset in messages. ``table`` lists the
    chunks. If it is None, HDF5 reads them. The dataset must stay open if HDF5 reads chunks, or if some chunks were
    never written. If ``decodes`` is True, chunks can only be read completely, because they have filters or HDF5 reads
    them. ``left_to_hdf5`` is the reason why HDF5 must decode the chunks, or an empty string.
    """

    def __init__(self, dataset: h5py.Dataset, descriptor: int, where: str, table: ChunkTable | None) -> None:
        properties = dataset.id.get_create_plist()
        self._descriptor, self.where, self._item_bytes = descriptor, where, stored_item_bytes(dataset)
        chunks = dataset.chunks or dataset.shape
        self._table = ChunkTable.unwritten(dataset.shape, chunks) if table is None else table
        self.chunk_bytes = math.prod(chunks) * self._item_bytes
        self.decodes = properties.get_nfilters() > 0 or table is None
        self._local = threading.local()
        self.left_to_hdf5 = "" if table is not None else "HDF5 does not list the offsets of its chunks"
        if table is not None:
            try:
                self._decoder = ChunkDecoder(properties, self.chunk_bytes, self._item_bytes)
            except NoDecoder as error:
                self.left_to_hdf5 = str(error)
        if self.needs_hdf5:
            _check_available(properties, where)
        self._fill: np.ndarray | None = None
        self._is_listed = table is not None
        self._dataset = dataset if self.needs_hdf5 or (self._table.offsets < 0).any() else None

    @property
    def needs_hdf5(self) -> bool:
        """True if HDF5 must read and decode the chunks."""
        return self.decodes and bool(self.left_to_hdf5)

    def run_ends(self, first: int, last: int) -> list[int]:
        """Return the ends of the runs that chunks ``first`` to ``last`` (excluded) form in the file.

        A run is contiguous, or consists of chunks that were never written.
        """
        offsets = self._table.offsets[first:last]
        unwritten = offsets < 0
        behind = (offsets[1:] == offsets[:-1] + self.chunk_bytes) & ~unwritten[:-1]
        ends = np.flatnonzero(~(behind | (unwritten[1:] & unwritten[:-1]))) + first + 1
        return [*ends.tolist(), last]

    def read_part(self, number: int, start: int, out: np.ndarray) -> None:
        """Fill ``out`` with bytes of unfiltered chunks, from byte ``start`` of chunk ``number`` on.

        The chunks that follow chunk ``number`` in ``out`` must also follow it in the file.
        """
        offset = int(self._table.offsets[number])
        if offset < 0:
            self._put_fill(number, out)
        else:
            view = out.reshape(-1).data
            read_bytes(self._descriptor, offset + start, view, lambda _: f"{self.where}, chunk {number}")

    def decode(self, number: int, out: np.ndarray) -> None:
        """Read and decode a chunk into ``out``, (chunk_bytes,) uint8. Raises FileError if it is damaged."""
        if not self.decodes:
            self.read_part(number, 0, out)
        elif self._table.offsets[number] < 0 and self._is_listed:
            self._put_fill(number, out)
        elif self.left_to_hdf5:
            self._decode_by_hdf5(number, out)
        else:
            self.decode_stored(number, self.read_stored(self._descriptor, number, self._local), out)

    def read_stored(self, descriptor: int, number: int, local: threading.local) -> np.ndarray:
        """Read the stored bytes of a chunk: (n,) uint8, valid until this thread's next call with the same ``local``."""
        stored = scratch(local, "stored", int(self._table.sizes[number]))
        offset = int(self._table.offsets[number])
        read_bytes(descriptor, offset, stored.data, lambda _: f"{self.where}, chunk {number}")
        return stored

    def decode_stored(self, number: int, stored: np.ndarray, out: np.ndarray) -> None:
        """Decode the stored bytes of a chunk into ``out``, (chunk_bytes,) uint8. Raises FileError if it is damaged."""
        try:
            self._decoder.decode(stored, int(self._table.filter_masks[number]), out)
        except DecodeError as error:
            raise FileError(f"{self.where}, chunk {number} is damaged ({error})") from None

    def _put_fill(self, number: int, out: np.ndarray) -> None:
        """Fill ``out`` with the value that HDF5 reads for elements of a chunk that was never written."""
        if self._fill is None:
            start = self._table.start(number)
            self._fill = self._read_by_hdf5(start, (1,) * len(start)).reshape(1).view(np.uint8)
        out.reshape(-1, self._item_bytes)[:] = self._fill

    def _decode_by_hdf5(self, number: int, out: np.ndarray) -> None:
        start, chunks = self._table.start(number), self._table.chunk_shape
        ends = zip(chunks, self._table.shape, start, strict=True)
        count = tuple(min(chunk, size - at) for chunk, size, at in ends)
        try:
            values = self._read_by_hdf5(start, count)
        except (OSError, RuntimeError) as error:
            raise FileError(f"{self.where}, chunk {number}: HDF5 cannot decode it ({error})") from None
        out.view(f"V{self._item_bytes}").reshape(chunks)[tuple(map(slice, count))] = values

    def _read_by_hdf5(self, start: tuple[int, ...], count: tuple[int, ...]) -> np.ndarray:
        """Read ``count`` elements along each axis, from ``start`` on, through HDF5 and without conversion."""
        assert self._dataset is not None
        values = np.zeros(count, f"V{self._item_bytes}")  # HDF5 leaves memory unchanged if there is no fill value
        dataset = self._dataset.id
        space = dataset.get_space()
        space.select_hyperslab(start, count)
        dataset.read(h5py.h5s.create_simple(count), space, values, dataset.get_type())
        return values


def _check_available(properties: h5py.h5p.PropDCID, where: str) -> None:
    """Raise UnsupportedError if HDF5 has no decoder for one of the filters."""
    for number in range(properties.get_nfilters()):
        code = properties.get_filter(number)[0]
        if code in KNOWN_FILTERS and not h5py.h5z.filter_avail(code):
            label = f"{KNOWN_FILTERS[code]} ({code})"
            raise UnsupportedError(f"{where} is compressed with filter {label}, which needs hdf5plugin: {INSTALL}")
