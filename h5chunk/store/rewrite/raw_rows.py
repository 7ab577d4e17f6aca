"""Read rows of any dataset of fixed-size elements as bytes, whatever its type and chunks, to rewrite a file.

No value is converted. Threads read and decode chunks in parallel, outside HDF5's lock, unless only HDF5 can decode
them. Chunks that were never written read as the fill value, or as zeros if there is none.
"""

from __future__ import annotations

import math
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import OptionError, exact_bytes, printable
from h5chunk.plan.repack import MemoryShares
from h5chunk.store.hdf5.ranges import OneFile
from h5chunk.store.read.arrays import Arrays, Blocks, Origin
from h5chunk.store.read.engine import BlockCache, BoxReader
from h5chunk.store.read.raw import RawValues, read_box
from h5chunk.store.write.spool import TemporaryBytes

TABLE_BYTES = 40  # memory per chunk while a chunk table is listed
SPILLED_PARTS = 3  # maximum size of a chunk, as a multiple of part_bytes, if a single thread reads
ANY_THREADS = 1 << 10  # effectively no limit on the threads that read chunks without decoding them


class SpilledBand:
    """A temporary file for one decoded band (the chunks of the same rows), which does not fit in memory."""

    def __init__(self, values: RawValues, per_band: int, folder: Path) -> None:
        self._values, self._per_band = values, per_band
        self._file, self._band = TemporaryBytes(folder), -1
        arrays, size = values.arrays, int(values.arrays.block_bytes[0])
        sizes, numbers = np.full(per_band, size), np.arange(per_band)
        blocks = Blocks(np.zeros(per_band, np.int32), numbers * size, sizes, np.zeros(per_band, np.uint32))
        origin = Origin(0, lambda _: "temporary file")
        shape = arrays.block[0, 0], *arrays.shape[0, 1:]
        self._arrays = Arrays.of_one(arrays.item_bytes, shape, arrays.block[0], blocks, None, origin)

    def read(self, band: int, low: int, high: int, out: np.ndarray) -> None:
        """Read rows of a band."""
        if band != self._band:
            chunk = np.empty(int(self._values.arrays.block_bytes[0]), np.uint8)
            for number in range(self._per_band):
                self._values.decode(band * self._per_band + number, chunk)
                self._file.write(number * len(chunk), chunk)
            self._band = band
            self._reader = BoxReader(self._arrays, BlockCache())  # a cache must not have blocks of another band
        read_box(self._reader, OneFile(self._file.descriptor), [low], [high], out)

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()


class RawRows:
    """A reader of the rows of a dataset of fixed-size elements, which must stay open.

    At most ``num_threads`` threads may read at the same time. The ``band_rows`` rows of a band share their chunks and
    are best read together. If ``whole_bands``, reading a part of a band takes as long as reading all of it. Decoded
    chunks that do not fit in memory are held in a temporary file in ``folder``.
    """

    def __init__(self, dataset: h5py.Dataset, shares: MemoryShares, folder: Path) -> None:
        where = f"{printable(dataset.file.filename)}: {dataset.name!r}"
        if dataset.chunks is not None:
            count = math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
            if count * TABLE_BYTES > shares.part_bytes * 4:
                need = exact_bytes(count * TABLE_BYTES)
                raise OptionError(
                    f"{where} has {count} chunks, whose table needs {need}: use more memory (--memory-bytes)"
                )
        self._values = RawValues(dataset)
        arrays = self._values.arrays
        self.num_rows, self.row_bytes = int(arrays.shape[0, 0]), int(arrays.shape[0, 1:].prod()) * arrays.item_bytes
        self.num_threads, self.band_rows = shares.num_threads, int(arrays.block[0, 0])
        self.whole_bands = not arrays.is_raw
        if arrays.is_raw and len(arrays.blocks.offset) == 1:
            self.num_threads, self.band_rows = ANY_THREADS, 1
        self._spilled: SpilledBand | None = None
        chunk_bytes, per_band = arrays.max_block_bytes, int((-(-arrays.shape // arrays.block))[0, 1:].prod())
        if per_band * chunk_bytes > shares.part_bytes and dataset.chunks is not None:
            if chunk_bytes > SPILLED_PARTS * shares.part_bytes:
                need = exact_bytes(chunk_bytes)
                raise OptionError(f"{where} has compressed chunks of {need}: use more memory (--memory-bytes)")
            self._spilled = SpilledBand(self._values, per_band, folder)
            self.num_threads, self.whole_bands = 1, False

    def close(self) -> None:
        """Remove the temporary file, if there is one."""
        if self._spilled is not None:
            self._spilled.close()

    def read(self, first: int, last: int, out: np.ndarray) -> None:
        """Read rows ``first`` to ``last`` (excluded) into ``out``, (last - first, row_bytes) uint8, C-contiguous."""
        if self._spilled is None:
            self._values.read([first], [last], out)
            return
        for band in range(first // self.band_rows, -(-last // self.band_rows)):
            start = band * self.band_rows
            low, high = max(first, start), min(last, start + self.band_rows)
            self._spilled.read(band, low - start, high - start, out[low - first : high - first])
