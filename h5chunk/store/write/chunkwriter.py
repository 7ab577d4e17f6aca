"""Compressed chunks of a dataset, written one by one, or taken over from a file that was not finished."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import h5py

from h5chunk.store.write.partfile import ROOM_BYTES, check_room


class StoredChunk(NamedTuple):
    """Where the bytes of a chunk lie in a file, and their CRC-32."""

    offset: int
    num_bytes: int
    checksum: int


class ChunkWriter:
    """Writes chunks of a dataset that is chunked along its first axis only, in order.

    Parameters
    ----------
    dataset : h5py.Dataset
    path : Path
        The output, whose disk is looked at.

    Attributes
    ----------
    chunks : list of StoredChunk
        Those that are written.
    """

    def __init__(self, dataset: h5py.Dataset, path: Path) -> None:
        self._dataset = dataset
        self._path = path
        self._room_bytes = 0
        self.chunks: list[StoredChunk] = []

    def write(self, data: bytes) -> StoredChunk:
        """Write the next chunk."""
        self._room_bytes -= len(data)
        if self._room_bytes < 0:  # before HDF5 writes, as it crashes on a full disk
            self._room_bytes = ROOM_BYTES
            check_room(self._path, len(data) + 2 * ROOM_BYTES)
        start = (len(self.chunks) * self._dataset.chunks[0], *(0,) * (self._dataset.ndim - 1))
        self._dataset.id.write_direct_chunk(start, data)
        offset = self._dataset.id.get_chunk_info_by_coord(start).byte_offset
        chunk = StoredChunk(offset, len(data), zlib.crc32(data))
        self.chunks.append(chunk)
        return chunk

    def take_over(self, descriptor: int, chunks: Sequence[StoredChunk]) -> None:
        """Copy chunks from an open file, up to the first that is not there as it should be."""
        num_bytes = os.fstat(descriptor).st_size
        for chunk in chunks:
            if not (chunk.offset >= 0 and 0 < chunk.num_bytes <= num_bytes - chunk.offset):
                return
            data = os.pread(descriptor, chunk.num_bytes, chunk.offset)
            if zlib.crc32(data) != chunk.checksum:
                return
            self.write(data)
