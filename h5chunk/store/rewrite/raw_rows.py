"""Read rows of any dataset of fixed-size elements as the bytes that they are, whatever their type and chunks.

For rewriting a file: rows are wanted in order, each once, in long runs. No value is converted. Chunks are read by byte
ranges and decoded outside HDF5's lock where `h5chunk.store.hdf5.codecs` can, so that threads read side by side; else
HDF5 decodes them, one after the other. Chunks that were never written give the fill value, or zeros
without one.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, OptionError, human_bytes, printable
from h5chunk.plan.repack import Packing, plan_packing
from h5chunk.store.hdf5.chunk_table import is_listed_wrongly, list_chunks
from h5chunk.store.hdf5.codecs import scratch
from h5chunk.store.hdf5.ranges import read_bytes
from h5chunk.store.hdf5.raw_chunks import RawChunks
from h5chunk.store.write.spool import TemporaryBytes

TABLE_BYTES = 40  # of memory for each entry of a table of chunks, while it is listed
SPILLED_PARTS = 3  # parts of the memory that a chunk may take where one thread reads alone
BLOCK_BYTES = 1 << 20  # of samples that are put together at a time: what a processor's cache holds


class SpilledChunks:
    """One band of chunks at a time, decoded, in a file without a name, as they do not fit in memory together."""

    def __init__(self, chunks: RawChunks, per_band: int, folder: Path) -> None:
        self._chunks, self._per_band, self._folder = chunks, per_band, folder
        self._file: TemporaryBytes | None = None
        self._band = -1

    def read_part(self, number: int, start: int, out: np.ndarray) -> None:
        """Read bytes of a chunk from its byte ``start`` on."""
        band, place = divmod(number, self._per_band)
        size = self._chunks.chunk_bytes
        if self._file is None:
            self._file = TemporaryBytes(self._folder)
        if band != self._band:
            chunk = np.empty(size, np.uint8)
            for at in range(self._per_band):
                self._chunks.decode(band * self._per_band + at, chunk)
                self._file.write(at * size, chunk)
            self._band = band
        self._file.read(place * size + start, out)

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            self._file.close()
            self._file = None


class MemoryRows:
    """Rows of a dataset so small that HDF5 keeps it in its header.

    All kinds of rows say how many threads may read them at the same time, how many rows share their chunks and are best
    read together (``band_rows``), and whether part of such a band costs as much as all of it (``whole_bands``).
    """

    num_threads, band_rows, whole_bands = 1, 1, False

    def __init__(self, dataset: h5py.Dataset) -> None:
        kind = dataset.id.get_type()
        values = np.empty(dataset.shape, f"V{kind.get_size()}")
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values, kind)
        self.num_rows = dataset.shape[0]
        self._rows = values.reshape(-1).view(np.uint8).reshape(self.num_rows, -1)
        self.row_bytes = self._rows.shape[1]

    def read(self, first: int, last: int, out: np.ndarray) -> None:
        """Read rows ``first`` to ``last`` (excluded) into ``out``, (last - first, row_bytes) uint8, C-contiguous."""
        out[:] = self._rows[first:last]

    def close(self) -> None: ...


class RunRows:
    """Rows that lie one behind the other in the file; see `MemoryRows`."""

    band_rows, whole_bands = 1, False
    num_threads = 1 << 10

    def __init__(self, dataset: h5py.Dataset, descriptor: int, where: str, offset: int | None = None) -> None:
        self.num_rows = dataset.shape[0]
        self.row_bytes = math.prod(dataset.shape[1:]) * dataset.id.get_type().get_size()
        self._descriptor, self._where = descriptor, where
        self._offset = dataset.id.get_offset() if offset is None else offset
        if self._offset + self.num_rows * self.row_bytes > dataset.file.id.get_filesize():
            raise FileError(f"{where} reaches beyond the end of the file: it was cut short, or is damaged")

    def read(self, first: int, last: int, out: np.ndarray) -> None:
        view = out[: last - first].reshape(-1).data
        read_bytes(self._descriptor, self._offset + first * self.row_bytes, view, lambda _: self._where)

    def close(self) -> None: ...


class ChunkRows:
    """Rows of chunks that lie anywhere, are compressed, or hold parts of samples; see `MemoryRows`."""

    def __init__(
        self, dataset: h5py.Dataset, chunks: RawChunks, part_bytes: int, num_threads: int, folder: Path
    ) -> None:
        self._chunks, self._local = chunks, threading.local()
        self._item_bytes = dataset.id.get_type().get_size()
        self._shape, self._chunk_shape = dataset.shape[1:], dataset.chunks[1:]
        self.num_rows, self.band_rows = dataset.shape[0], dataset.chunks[0]
        self.row_bytes = math.prod(self._shape) * self._item_bytes
        self.num_threads, self.whole_bands = num_threads, chunks.decodes
        whole = self._chunk_shape == self._shape
        self._packing = None if whole else plan_packing(self._shape, self._chunk_shape, self._item_bytes)
        self._per_band = 1 if self._packing is None else self._packing.num_chunks
        self._spilled: SpilledChunks | None = None
        if chunks.decodes and self._per_band * chunks.chunk_bytes > part_bytes:
            if chunks.chunk_bytes > SPILLED_PARTS * part_bytes:
                need = human_bytes(chunks.chunk_bytes)
                raise OptionError(
                    f"{chunks.where} has compressed chunks of {need}, too much for the memory: allow more"
                )
            self._spilled = SpilledChunks(chunks, self._per_band, folder)
            self.num_threads, self.whole_bands = 1, False

    def close(self) -> None:
        if self._spilled is not None:
            self._spilled.close()

    def read(self, first: int, last: int, out: np.ndarray) -> None:
        if self._packing is None and not self._chunks.decodes:
            self._read_runs(first, last, out)
            return
        for band in range(first // self.band_rows, -(-last // self.band_rows)):
            start = band * self.band_rows
            low, high = max(first, start), min(last, start + self.band_rows)
            part = out[low - first : high - first]
            if self._packing is None:
                self._fetch(band, low - start, high - start, part)
            else:
                self._put_together(self._packing, band, low - start, high - start, part)

    def _read_runs(self, first: int, last: int, out: np.ndarray) -> None:
        """Read whole samples that are not encoded: chunks one behind the other are read together."""
        chunk, end = first // self.band_rows, -(-last // self.band_rows)
        for stop in self._chunks.run_ends(chunk, end):
            start = chunk * self.band_rows
            low, high = max(first, start), min(last, stop * self.band_rows)
            self._chunks.read_part(chunk, (low - start) * self.row_bytes, out[low - first : high - first])
            chunk = stop

    def _put_together(self, packing: Packing, band: int, low: int, high: int, out: np.ndarray) -> None:
        """Assemble rows ``low`` to ``high`` of a band out of all its chunks."""
        count, width = high - low, packing.chunk_row_bytes
        pieces = self._scratch("pieces", packing.num_chunks * count * width).reshape(packing.num_chunks, count, width)
        for number in range(packing.num_chunks):
            self._fetch(band * self._per_band + number, low, high, pieces[number])
        if packing.index is None:
            self._copy_slices(packing, pieces, out)
            return
        step = max(1, BLOCK_BYTES // (packing.num_chunks * width))
        packed = self._scratch("packed", packing.num_chunks * step * width)
        unit, wide = f"V{packing.unit_bytes}", f"V{width}"
        for start in range(0, count, step):
            rows = min(step, count - start)
            some = packed[: rows * packing.num_chunks * width]
            some.view(wide).reshape(rows, -1)[...] = pieces[:, start : start + rows].view(wide)[..., 0].T
            target = out[start : start + rows].view(unit)
            np.take(some.reshape(rows, -1).view(unit), packing.index, axis=1, out=target, mode="clip")

    def _copy_slices(self, packing: Packing, pieces: np.ndarray, out: np.ndarray) -> None:
        item = f"V{self._item_bytes}"
        samples = out.view(item).reshape(len(out), *self._shape)
        for number, place in enumerate(packing.slices):
            piece = pieces[number].view(item).reshape(len(out), *self._chunk_shape)
            inside = (slice(None), *(slice(0, each.stop - each.start) for each in place))
            there = (slice(None), *place)
            samples[there] = piece[inside]

    def _fetch(self, chunk: int, low: int, high: int, out: np.ndarray) -> None:
        """Read rows ``low`` to ``high`` of a chunk."""
        width = self._chunks.chunk_bytes // self.band_rows
        if self._spilled is not None:
            self._spilled.read_part(chunk, low * width, out)
        elif not self._chunks.decodes:
            self._chunks.read_part(chunk, low * width, out)
        elif len(out) == self.band_rows:
            self._chunks.decode(chunk, out.reshape(-1))
        else:  # the last band, mostly
            whole = self._scratch("whole", self._chunks.chunk_bytes)
            self._chunks.decode(chunk, whole)
            out[:] = whole.reshape(self.band_rows, -1)[low:high]

    def _scratch(self, name: str, size: int) -> np.ndarray:
        return scratch(self._local, name, size)


RawRows = MemoryRows | RunRows | ChunkRows


def open_rows(dataset: h5py.Dataset, descriptor: int, *, part_bytes: int, num_threads: int, folder: Path) -> RawRows:
    """Open a dataset of fixed-size elements, which must stay open, for reading its rows.

    Chunks of a band that take more than ``part_bytes`` for each thread wait in a file of ``folder``.
    """
    where = f"{printable(dataset.file.filename)}: {dataset.name!r}"
    properties = dataset.id.get_create_plist()
    if properties.get_layout() == h5py.h5d.COMPACT:
        return MemoryRows(dataset)
    if properties.get_layout() == h5py.h5d.CONTIGUOUS:
        return RunRows(dataset, descriptor, where)
    count = math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    if count * TABLE_BYTES > part_bytes * 4:
        raise OptionError(
            f"{where} has {count} chunks, whose table takes {human_bytes(count * TABLE_BYTES)}: allow more memory"
        )
    table = None if is_listed_wrongly(dataset) else list_chunks(dataset)
    filtered = properties.get_nfilters() > 0
    if table is not None and not filtered and table.is_one_run and dataset.chunks[1:] == dataset.shape[1:]:
        return RunRows(dataset, descriptor, where, int(table.offsets[0]))
    chunks = RawChunks(dataset, descriptor, where, table)
    return ChunkRows(dataset, chunks, part_bytes, num_threads, folder)
