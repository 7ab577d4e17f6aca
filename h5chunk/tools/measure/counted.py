"""Count the reads that HDF5 makes, and compare them with the model of its chunk cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import h5py
import numpy as np

from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.plan.order import Order
from h5chunk.store.hdf5.chunk_table import ChunkTable, list_chunks
from h5chunk.store.hdf5.claims import same_file
from h5chunk.store.hdf5.open import opened
from h5chunk.store.read.fields import MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.model.accesses import batch_accesses
from h5chunk.tools.model.hdf5_cache import HIT, ChunkCache

MOST_ACCESSES, MOST_BYTES = 200_000, 1 << 30  # predicted, after which it is enough


@dataclass(frozen=True)
class ReadCounts:
    """Predicted and measured reads of the batches of an order.

    Attributes
    ----------
    predicted_reads, measured_reads : int
        Reads of the file for chunks of the largest field.
    predicted_bytes, measured_bytes : int
        Stored bytes that they read.
    batches, samples : int
        That were read.
    cache : (nslots, nbytes, w0)
    note : str
        Why there is nothing to count; else empty.
    """

    predicted_reads: int
    measured_reads: int
    predicted_bytes: int
    measured_bytes: int
    batches: int
    samples: int
    cache: tuple[int, int, float]
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the model was right."""
        return (self.predicted_reads, self.predicted_bytes) == (self.measured_reads, self.measured_bytes)


class CountingFile:
    """A file object for ``h5py.File`` that records the offset and size of every read in ``reads``."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.reads: list[tuple[int, int]] = []

    def readinto(self, buffer: Any) -> int:
        self.reads.append((self._file.tell(), len(buffer)))
        return int(self._file.readinto(buffer))  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def take(self, table: ChunkTable) -> tuple[int, int]:
        """Number and bytes of the reads of chunks since the last call; reads of metadata do not count."""
        starts, sizes = np.array(self.reads, np.int64).reshape(-1, 2).T
        self.reads.clear()
        turn = np.argsort(table.offsets)
        offsets, ends = table.offsets[turn], (table.offsets + table.sizes)[turn]
        at = np.searchsorted(offsets, starts, "right") - 1
        of_chunks = (at >= 0) & (starts < ends[at])
        return int(of_chunks.sum()), int(sizes[of_chunks].sum())


def count_reads(reader: H5Reader, order: Order, cache: CacheSettings, seconds: float) -> ReadCounts:
    """Read batches of an order through HDF5 and count the reads.

    Parameters
    ----------
    reader : H5Reader
    order : Order
    cache : CacheSettings
        Of the largest field.
    seconds : float
        After which no further batch is begun.
    """
    triple, main = (cache.nslots, cache.nbytes, cache.w0), reader.main
    table, note = _chunk_table(reader)
    if table is None or isinstance(main, MatrixField):
        return ReadCounts(0, 0, 0, 0, 0, 0, triple, note)
    model, until = CacheModel(main.grid, cache, table), time.perf_counter() + seconds
    predicted, measured, batches, samples = np.zeros(2, int), np.zeros(2, int), 0, 0
    with _counting_reader(reader, cache) as (read, counting):
        counting.take(table)  # reads of metadata
        for batch in order.batches():
            predicted += model.read(batch)
            read(batch)
            measured += counting.take(table)
            batches, samples = batches + 1, samples + len(batch)
            if model.visited >= MOST_ACCESSES or predicted[1] >= MOST_BYTES or time.perf_counter() >= until:
                break
    (expected_reads, expected_bytes), (reads, num_bytes) = predicted.tolist(), measured.tolist()
    return ReadCounts(expected_reads, reads, expected_bytes, num_bytes, batches, samples, triple)


class CacheModel:
    """Predicts the reads of batches through HDF5's chunk cache; ``visited`` counts its visits of chunks."""

    def __init__(self, grid: ChunkGrid, cache: CacheSettings, table: ChunkTable) -> None:
        self._grid, self._cache, self._table = grid, cache, table
        self._model = ChunkCache(grid, cache)
        self.visited = 0

    def read(self, batch: np.ndarray) -> tuple[int, int]:
        """Number of reads for a batch, and their stored bytes."""
        _, accesses = batch_accesses(self._grid, self._cache, batch)
        self.visited += len(accesses)
        replay = self._model.access(accesses)
        if not self._grid.filtered:
            return replay.num_reads, replay.bytes_read
        return replay.num_reads, int(self._table.sizes[accesses.chunks[replay.outcomes != HIT]].sum())


@contextmanager
def _counting_reader(
    reader: H5Reader, cache: CacheSettings
) -> Iterator[tuple[Callable[[np.ndarray], None], CountingFile]]:
    """Open a function that reads batches of the largest field through HDF5, and the file that counts its reads."""
    main = reader.main
    alone = H5Reader(reader.path, {main.name: main.dataset}, trusted=reader.trusted)
    alone.set_caches(cache)

    def read(batch: np.ndarray) -> None:
        alone.read(main.name, batch, np.empty((len(batch), *main.sample_shape), main.dtype))

    with reader.path.open("rb", buffering=0) as raw, h5py.File(counting := CountingFile(raw), "r") as file:
        alone.read_through(file)
        yield read, counting
        alone.close()


def _chunk_table(reader: H5Reader) -> tuple[ChunkTable | None, str]:
    """Where the chunks of the largest field lie, or why there is nothing to count."""
    main = reader.main
    if isinstance(main, MatrixField) or main.grid.chunks is None:
        what = "a sparse matrix is" if isinstance(main, MatrixField) else "data without chunks is"
        return None, f"{what} not read through the chunk cache: there is nothing to count"
    with opened(reader.path) as file:
        dataset = file[main.dataset]
        if not same_file(dataset, file):
            return None, "the data lie in another file, of which no reads are counted"
        table = list_chunks(dataset)
    if (table.offsets < 0).any():
        return None, "chunks that were never written cost no read: the model has no such"
    return table, ""
