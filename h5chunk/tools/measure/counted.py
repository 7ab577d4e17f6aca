"""Count what HDF5 really reads of an order, and compare it with the model of its chunk cache."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import islice
from typing import IO, Any

import h5py
import numpy as np

from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.plan.order import Order
from h5chunk.store.format import opened
from h5chunk.store.guard.claims import same_file
from h5chunk.store.read.chunktable import ChunkTable, list_chunks
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.model.hdf5_cache import HIT, ChunkCache
from h5chunk.tools.model.row_reads import batch_accesses

MOST_ACCESSES, MOST_BYTES = 200_000, 1 << 30  # predicted, after which it is enough


@dataclass(frozen=True)
class ReadCounts:
    """Predicted and measured reads of an order.

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

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class CountingFile:
    """A binary file for ``h5py.File`` to read from that remembers the offset and size of every read in ``reads``."""

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
    """Read batches of an order through HDF5, and count what it reads.

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
    started = time.perf_counter()
    predicted, batches = _predict(main.grid, cache, table, order, started + seconds / 3)
    measured = _measure(reader, cache, batches, table, started + seconds)
    done = len(measured)
    num_reads, num_bytes = (int(sum(column)) for column in zip(*measured, strict=True))
    samples = sum(len(batch) for batch in batches[:done])
    expected = np.sum(predicted[:done], axis=0)
    return ReadCounts(int(expected[0]), num_reads, int(expected[1]), num_bytes, done, samples, triple)


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


def _predict(
    grid: ChunkGrid, cache: CacheSettings, table: ChunkTable, order: Order, until: float
) -> tuple[list[tuple[int, int]], list[np.ndarray]]:
    """Predict the reads and stored bytes of each batch; returns them with the batches, as many as the time allows."""
    model, visited, read_bytes = ChunkCache(grid, cache), 0, 0
    predicted: list[tuple[int, int]] = []
    batches = []
    for batch in islice(order.batches(), MOST_ACCESSES):
        _, accesses = batch_accesses(grid, cache, batch)
        replay = model.access(accesses)
        chunks = accesses.chunks[replay.outcomes != HIT]
        num_bytes = int(table.sizes[chunks].sum()) if grid.filtered else replay.bytes_read
        predicted.append((replay.num_reads, num_bytes))
        batches.append(batch)
        visited, read_bytes = visited + len(accesses), read_bytes + num_bytes
        if visited >= MOST_ACCESSES or read_bytes >= MOST_BYTES or time.perf_counter() >= until:
            break
    return predicted, batches


def _measure(
    reader: H5Reader, cache: CacheSettings, batches: list[np.ndarray], table: ChunkTable, until: float
) -> list[tuple[int, int]]:
    """Read batches, at least one; returns the reads and bytes of each."""
    main, counts = reader.main, []
    assert not isinstance(main, MatrixField)
    alone = H5Reader(reader.path, {main.name: main.dataset}, trusted=reader.trusted)
    alone.set_caches(cache)
    with reader.path.open("rb", buffering=0) as raw, h5py.File(counting := CountingFile(raw), "r") as file:
        alone.read_through(file)
        counting.take(table)
        for batch in batches:
            alone.read(main.name, batch, np.empty((len(batch), *main.sample_shape), main.dtype))
            counts.append(counting.take(table))
            if time.perf_counter() >= until:
                break
        alone.close()
    return counts
