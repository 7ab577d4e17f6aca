"""Read the chunks of a dataset as decoded bytes, whatever their type and filters."""

from __future__ import annotations

import math
import threading
from contextlib import suppress

import h5py
import numpy as np

from h5chunk.errors import FileError
from h5chunk.store.hdf5.chunk_table import ChunkTable, stored_item_bytes
from h5chunk.store.hdf5.codecs import ChunkDecoder, DecodeError, NoDecoder, scratch
from h5chunk.store.hdf5.ranges import read_bytes


class RawChunks:
    """The chunks of one dataset, by number in row-major order; for any number of threads.

    Parameters
    ----------
    dataset : h5py.Dataset
        Chunked, of fixed-size elements; must stay open.
    descriptor : int
        Of the same file.
    where : str
        Names the dataset in messages.
    table : ChunkTable, or None
        None: where the chunks lie is not known, and HDF5 reads them.

    Attributes
    ----------
    chunk_bytes : int
        Decoded.
    decodes : bool
        Whether chunks pass filters, or HDF5 reads them: then they can only be read whole.

    Raises
    ------
    FileError
        A stored length cannot be.
    """

    def __init__(self, dataset: h5py.Dataset, descriptor: int, where: str, table: ChunkTable | None) -> None:
        self._dataset, self._descriptor, self.where = dataset, descriptor, where
        self._kind = dataset.id.get_type()
        self._item_bytes = stored_item_bytes(dataset)
        self._grid = [-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True)]
        self.chunk_bytes = math.prod(dataset.chunks) * self._item_bytes
        properties = dataset.id.get_create_plist()
        self.decodes = properties.get_nfilters() > 0 or table is None
        self._table = _unknown(math.prod(self._grid)) if table is None else table
        self._fill = self._read_fill() if (self._table.offsets < 0).any() and table is not None else None
        self._local = threading.local()
        self._decoder: ChunkDecoder | None = None
        if self.decodes and table is not None:
            with suppress(NoDecoder):  # then HDF5 decodes them
                self._decoder = ChunkDecoder(properties, self.chunk_bytes, self._item_bytes)
        most = int(self._table.sizes.max(initial=0))
        if self._decoder is not None and most > self._decoder.max_stored_bytes:
            raise FileError(f"{where} has a chunk of {self.chunk_bytes} bytes that is stored in {most}: it is damaged")

    def run_ends(self, first: int, last: int) -> list[int]:
        """Return the ends of runs of chunks that lie one behind the other, from ``first`` to ``last`` (excluded)."""
        offsets = self._table.offsets[first:last]
        unwritten = offsets < 0
        behind = (offsets[1:] == offsets[:-1] + self.chunk_bytes) & ~unwritten[:-1]
        ends = np.flatnonzero(~(behind | (unwritten[1:] & unwritten[:-1]))) + first + 1
        return [*ends.tolist(), last]

    @property
    def needs_hdf5(self) -> bool:
        """Whether HDF5 reads the chunks."""
        return self.decodes and self._decoder is None

    def read(self, number: int, out: np.ndarray) -> None:
        """Read a whole chunk, with or without filters, into ``out``, (chunk_bytes,) uint8.

        Raises
        ------
        FileError
            It is damaged.
        """
        if self.decodes:
            self.decode(number, out)
        else:
            self.read_part(number, 0, out)

    def read_part(self, number: int, start: int, out: np.ndarray) -> None:
        """Read bytes of a chunk without filters from its byte ``start`` on, and of those behind it in a run."""
        offset = int(self._table.offsets[number])
        if offset < 0:
            self._put_fill(out)
        else:
            view = out.reshape(-1).data
            read_bytes(self._descriptor, offset + start, view, lambda _: f"{self.where}, chunk {number}")

    def decode(self, number: int, out: np.ndarray) -> None:
        """Read a whole chunk with filters into ``out``, (chunk_bytes,) uint8.

        Raises
        ------
        FileError
            It is damaged.
        """
        offset, size = int(self._table.offsets[number]), int(self._table.sizes[number])
        if offset < 0 and self._fill is not None:
            self._put_fill(out)
        elif self._decoder is None:
            self._decode_by_hdf5(number, out)
        else:
            stored = scratch(self._local, "stored", size)
            read_bytes(self._descriptor, offset, stored.data, lambda _: f"{self.where}, chunk {number}")
            try:
                self._decoder.decode(stored, int(self._table.filter_masks[number]), out)
            except DecodeError as error:
                raise FileError(f"{self.where}, chunk {number}: {error}: it is damaged") from None

    def _decode_by_hdf5(self, number: int, out: np.ndarray) -> None:
        place = np.unravel_index(number, self._grid)
        chunks, shape = self._dataset.chunks, self._dataset.shape
        start = tuple(int(at) * chunk for at, chunk in zip(place, chunks, strict=True))
        count = tuple(min(chunk, size - at) for chunk, size, at in zip(chunks, shape, start, strict=True))
        try:
            values = self._read(start, count)
        except (OSError, RuntimeError) as error:
            raise FileError(f"{self.where}, chunk {number}: HDF5 cannot decode it: {error}") from None
        item = f"V{self._item_bytes}"
        out.view(item).reshape(chunks)[tuple(slice(0, size) for size in count)] = values

    def _read(self, start: tuple[int, ...], count: tuple[int, ...]) -> np.ndarray:
        """Read elements through HDF5, unconverted."""
        values = np.zeros(count, f"V{self._item_bytes}")  # HDF5 leaves it so where there is no fill value
        space = self._dataset.id.get_space()
        space.select_hyperslab(start, count)
        self._dataset.id.read(h5py.h5s.create_simple(count), space, values, self._kind)
        return values

    def _read_fill(self) -> np.ndarray:
        """Read the value of an element that was never written: (item_bytes,) uint8."""
        number = int((self._table.offsets < 0).argmax())
        place = np.unravel_index(number, self._grid)
        start = tuple(int(at) * chunk for at, chunk in zip(place, self._dataset.chunks, strict=True))
        return self._read(start, (1,) * len(start)).reshape(1).view(np.uint8)

    def _put_fill(self, out: np.ndarray) -> None:
        out.reshape(-1, self._item_bytes)[:] = self._fill


def _unknown(count: int) -> ChunkTable:
    return ChunkTable(np.full(count, -1, np.int64), np.zeros(count, np.int64), np.zeros(count, np.uint32), ())
