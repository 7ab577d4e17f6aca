"""Read rows of any dataset of fixed-size elements as bytes, whatever its type and chunks, to rewrite a file.

No value is converted. If `h5chunk.store.hdf5.codecs` can decode the chunks, threads read and decode them in parallel,
outside HDF5's lock. Otherwise HDF5 decodes them one after another. Chunks that were never written read as the fill
value, or as zeros if there is none.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import OptionError, exact_bytes, printable
from h5chunk.plan.repack import MemoryShares, Packing, plan_packing
from h5chunk.store.hdf5.chunk_table import is_listed_wrongly, list_chunks
from h5chunk.store.hdf5.codecs import scratch
from h5chunk.store.hdf5.raw_chunks import RawChunks
from h5chunk.store.write.spool import TemporaryBytes

TABLE_BYTES = 40  # memory per chunk while a chunk table is listed
SPILLED_PARTS = 3  # maximum size of a chunk, as a multiple of part_bytes, if a single thread reads
ANY_THREADS = 1 << 10  # effectively no limit on the threads that read chunks without decoding them
BLOCK_BYTES = 1 << 20  # bytes of samples that are assembled at a time, which fit in the CPU's cache


class SpilledChunks:
    """A temporary file for one decoded band (the chunks of the same rows), which does not fit in memory."""

    def __init__(self, chunks: RawChunks, per_band: int, folder: Path) -> None:
        self._chunks, self._per_band, self._folder = chunks, per_band, folder
        self._file: TemporaryBytes | None = None
        self._band = -1

    def read_part(self, number: int, start: int, out: np.ndarray) -> None:
        """Fill ``out``, (n,) uint8, with decoded bytes of chunk ``number``, starting at byte ``start``."""
        band, within = divmod(number, self._per_band)
        size = self._chunks.chunk_bytes
        if self._file is None:
            self._file = TemporaryBytes(self._folder)
        if band != self._band:
            chunk = np.empty(size, np.uint8)
            for at in range(self._per_band):
                self._chunks.decode(band * self._per_band + at, chunk)
                self._file.write(at * size, chunk)
            self._band = band
        self._file.read(within * size + start, out)

    def close(self) -> None:
        """Close the file, which removes it."""
        if self._file is not None:
            self._file.close()
            self._file = None


class RawRows:
    """A reader of the rows of a dataset of fixed-size elements, which must stay open.

    At most ``num_threads`` threads may read at the same time. The ``band_rows`` rows of a band share their chunks and
    are best read together. If ``whole_bands``, reading a part of a band takes as long as reading all of it. Decoded
    chunks that do not fit in memory are held in a temporary file in ``folder``.
    """

    def __init__(self, dataset: h5py.Dataset, descriptor: int, shares: MemoryShares, folder: Path) -> None:
        where = f"{printable(dataset.file.filename)}: {dataset.name!r}"
        shape, chunk_shape, properties = dataset.shape, dataset.chunks, dataset.id.get_create_plist()
        is_compact = properties.get_layout() == h5py.h5d.COMPACT
        if chunk_shape is None:
            chunk_shape = shape
        else:
            count = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunk_shape, strict=True))
            if count * TABLE_BYTES > shares.part_bytes * 4:
                need = exact_bytes(count * TABLE_BYTES)
                raise OptionError(
                    f"{where} has {count} chunks, whose table needs {need}: use more memory (--memory-bytes)"
                )
        table = None if is_compact or is_listed_wrongly(dataset) else list_chunks(dataset)
        self._chunks = chunks = RawChunks(dataset, descriptor, where, table)
        self._shape, self._chunk_shape = shape[1:], chunk_shape[1:]
        self._item_bytes = dataset.id.get_type().get_size()
        self.num_rows, self.row_bytes = shape[0], math.prod(self._shape) * self._item_bytes
        self._chunk_rows = self.band_rows = chunk_shape[0]
        self.num_threads, self.whole_bands = shares.num_threads, chunks.decodes
        whole = self._chunk_shape == self._shape
        self._is_run = table is not None and table.is_one_run and whole and not chunks.decodes
        if self._is_run:
            self.num_threads, self.band_rows = ANY_THREADS, 1
        self._packing = None if whole else plan_packing(self._shape, self._chunk_shape, self._item_bytes)
        self._per_band = 1 if self._packing is None else self._packing.num_chunks
        self._local = threading.local()
        self._spilled: SpilledChunks | None = None
        if chunks.decodes and not is_compact and self._per_band * chunks.chunk_bytes > shares.part_bytes:
            if chunks.chunk_bytes > SPILLED_PARTS * shares.part_bytes:
                need = exact_bytes(chunks.chunk_bytes)
                raise OptionError(f"{where} has compressed chunks of {need}: use more memory (--memory-bytes)")
            self._spilled = SpilledChunks(chunks, self._per_band, folder)
            self.num_threads, self.whole_bands = 1, False

    def close(self) -> None:
        """Remove the temporary file, if there is one."""
        if self._spilled is not None:
            self._spilled.close()

    def read(self, first: int, last: int, out: np.ndarray) -> None:
        """Read rows ``first`` to ``last`` (excluded) into ``out``, (last - first, row_bytes) uint8, C-contiguous."""
        if self._is_run:
            self._chunks.read_part(0, first * self.row_bytes, out)
            return
        chunk, end = first // self._chunk_rows, -(-last // self._chunk_rows)
        is_plain = self._packing is None and not self._chunks.decodes  # adjacent chunks are read together
        for stop in self._chunks.run_ends(chunk, end) if is_plain else range(chunk + 1, end + 1):
            start = chunk * self._chunk_rows
            low, high = max(first, start), min(last, stop * self._chunk_rows)
            part = out[low - first : high - first]
            if self._packing is None:
                self._fetch(chunk, low - start, high - start, part)
            else:
                self._assemble(self._packing, chunk, low - start, high - start, part)
            chunk = stop

    def _assemble(self, packing: Packing, band: int, low: int, high: int, out: np.ndarray) -> None:
        """Assemble rows ``low`` to ``high`` (excluded) of a band from all its chunks."""
        count, width = high - low, packing.chunk_row_bytes
        pieces = scratch(self._local, "pieces", packing.num_chunks * count * width).reshape(-1, count, width)
        for number in range(packing.num_chunks):
            self._fetch(band * self._per_band + number, low, high, pieces[number])
        if packing.index is None:
            item = f"V{self._item_bytes}"
            samples = out.view(item).reshape(count, *self._shape)
            for number, piece_slices in enumerate(packing.slices):
                piece = pieces[number].view(item).reshape(count, *self._chunk_shape)
                target_slices = (slice(None), *piece_slices)
                inside = (slice(None), *(slice(0, part.stop - part.start) for part in piece_slices))
                samples[target_slices] = piece[inside]
            return
        step = max(1, BLOCK_BYTES // (packing.num_chunks * width))
        packed = scratch(self._local, "packed", packing.num_chunks * step * width)
        unit, wide = f"V{packing.unit_bytes}", f"V{width}"
        for start in range(0, count, step):
            rows = min(step, count - start)
            gathered = packed[: rows * packing.num_chunks * width]
            gathered.view(wide).reshape(rows, -1)[...] = pieces[:, start : start + rows].view(wide)[..., 0].T
            target = out[start : start + rows].view(unit)
            np.take(gathered.reshape(rows, -1).view(unit), packing.index, axis=1, out=target, mode="clip")

    def _fetch(self, chunk: int, low: int, high: int, out: np.ndarray) -> None:
        """Read rows ``low`` to ``high`` (excluded) of a chunk."""
        width = self._chunks.chunk_bytes // self._chunk_rows
        if self._spilled is not None:
            self._spilled.read_part(chunk, low * width, out)
        elif not self._chunks.decodes:
            self._chunks.read_part(chunk, low * width, out)
        elif len(out) == self._chunk_rows:
            self._chunks.decode(chunk, out.reshape(-1))
        else:  # usually the last band
            whole = scratch(self._local, "whole", self._chunks.chunk_bytes)
            self._chunks.decode(chunk, whole)
            out[:] = whole.reshape(self._chunk_rows, -1)[low:high]
