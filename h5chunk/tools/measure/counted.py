"""Count the reads that HDF5 makes, and compare them with the model of its chunk cache."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any

import h5py
import numpy as np

from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.order import Order
from h5chunk.store.hdf5.chunk_table import ChunkTable, list_chunks
from h5chunk.store.hdf5.open import opened, same_file
from h5chunk.store.read.fields import MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.model.accesses import batch_accesses
from h5chunk.tools.model.hdf5_cache import HIT, ChunkCache

MOST_ACCESSES, MOST_BYTES = 200_000, 1 << 30  # number of predicted reads that is enough


@dataclass(frozen=True)
class ReadCounts:
    """Predicted and measured reads of the largest field's chunks, with their stored bytes, for several batches."""

    predicted_reads: int
    measured_reads: int
    predicted_bytes: int
    measured_bytes: int
    batches: int  # batches that were read
    samples: int
    cache: tuple[int, int, float]  # (nslots, nbytes, w0)
    note: str = ""  # why nothing is counted


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
        """Return the number and bytes of chunk reads since the last call; reads of metadata do not count."""
        starts, sizes = np.array(self.reads, np.int64).reshape(-1, 2).T
        self.reads.clear()
        turn = np.argsort(table.offsets)
        offsets, ends = table.offsets[turn], (table.offsets + table.sizes)[turn]
        at = np.searchsorted(offsets, starts, "right") - 1
        of_chunks = (at >= 0) & (starts < ends[at])
        return int(of_chunks.sum()), int(sizes[of_chunks].sum())


def count_reads(reader: H5Reader, order: Order, cache: CacheSettings, seconds: float) -> ReadCounts:
    """Read batches of an order through HDF5, with this cache for the largest field, and count the reads.

    No batch is begun after ``seconds``.
    """
    triple, main = (cache.nslots, cache.nbytes, cache.w0), reader.main
    table = _chunk_table(reader)
    if isinstance(table, str) or isinstance(main, MatrixField):
        return ReadCounts(0, 0, 0, 0, 0, 0, triple, str(table))
    model, visited, until = ChunkCache(main.grid, cache), 0, time.perf_counter() + seconds
    predicted, measured, batches, samples = np.zeros(2, int), np.zeros(2, int), 0, 0
    alone = H5Reader(reader.path, {main.name: main.dataset}, trusted=reader.trusted)
    alone.set_caches(cache)
    with reader.path.open("rb", buffering=0) as raw, h5py.File(counting := CountingFile(raw), "r") as file:
        alone.read_through(file)
        counting.take(table)  # reads of metadata
        with closing(alone):
            for batch in order.batches():
                _, accesses = batch_accesses(main.grid, cache, batch)
                replay = model.access(accesses)
                stored = table.sizes[accesses.chunks[replay.outcomes != HIT]]
                predicted += replay.num_reads, stored.sum() if main.grid.filtered else replay.bytes_read
                alone.read(main.name, batch, np.empty((len(batch), *main.sample_shape), main.dtype))
                measured += counting.take(table)
                batches, samples, visited = batches + 1, samples + len(batch), visited + len(accesses)
                if visited >= MOST_ACCESSES or predicted[1] >= MOST_BYTES or time.perf_counter() >= until:
                    break
    (expected_reads, expected_bytes), (reads, num_bytes) = predicted.tolist(), measured.tolist()
    return ReadCounts(expected_reads, reads, expected_bytes, num_bytes, batches, samples, triple)


def _chunk_table(reader: H5Reader) -> ChunkTable | str:
    """List the chunks of the largest field, or return why there are no reads to count."""
    main = reader.main
    if isinstance(main, MatrixField) or main.grid.chunks is None:
        what = "a sparse matrix is" if isinstance(main, MatrixField) else "data without chunks is"
        return f"{what} not read through the chunk cache: there is nothing to count"
    with opened(reader.path) as file:
        dataset = file[main.dataset]
        if not same_file(dataset, file):
            return "the data is in another file, whose reads are not counted"
        table = list_chunks(dataset)
    return table if (table.offsets >= 0).all() else "chunks were never written, which the model excludes"
