"""Write compressed chunks of a dataset one by one."""

from __future__ import annotations

import zlib
from pathlib import Path

import h5py

from h5chunk.store.write.partfile import ROOM_BYTES, check_room


class ChunkWriter:
    """Writes chunks of a dataset that is chunked along its first axis only, in order.

    Parameters
    ----------
    dataset : h5py.Dataset
    path : Path
        The output, whose disk is looked at.

    Attributes
    ----------
    checksums : list of int
        CRC-32 of each chunk written so far.
    """

    def __init__(self, dataset: h5py.Dataset, path: Path) -> None:
        self._dataset = dataset
        self._path = path
        self._room_bytes = 0
        self.checksums: list[int] = []

    def write(self, data: bytes) -> None:
        """Write the next chunk."""
        self._room_bytes -= len(data)
        if self._room_bytes < 0:  # before HDF5 writes, as it crashes on a full disk
            self._room_bytes = ROOM_BYTES
            check_room(self._path, len(data) + 2 * ROOM_BYTES)
        start = (len(self.checksums) * self._dataset.chunks[0], *(0,) * (self._dataset.ndim - 1))
        self._dataset.id.write_direct_chunk(start, data)
        self.checksums.append(zlib.crc32(data))
