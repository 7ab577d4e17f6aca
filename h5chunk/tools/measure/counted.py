"""The cache model against the library: an order read through real HDF5, every byte of which is counted."""

from __future__ import annotations

import io
import os
import time
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import h5py
import numpy as np

from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.plan.order import Order
from h5chunk.store.format import opened
from h5chunk.store.guard.claims import same_file
from h5chunk.store.read.chunktable import ChunkTable, NotDirect, list_chunks
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.model.accesses import find_row_accesses
from h5chunk.tools.model.hdf5_cache import HIT, ChunkCache
from h5chunk.tools.model.row_reads import find_reads

MOST_ACCESSES, MOST_BYTES = 200_000, 1 << 30  # predicted, after which it is enough


@dataclass(frozen=True)
class Verified:
    """What the model said, and what HDF5 did.

    Attributes
    ----------
    predicted_misses, measured_misses : int
        Visits of chunks, of the largest field, that read the file.
    predicted_bytes, measured_bytes : int
        Stored bytes that they read.
    batches, samples : int
        That were read.
    cache : (nslots, nbytes, w0)
    note : str
        Why there is nothing to count; else empty.
    """

    predicted_misses: int
    measured_misses: int
    predicted_bytes: int
    measured_bytes: int
    batches: int
    samples: int
    cache: tuple[int, int, float]
    note: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the model was right."""
        return (self.predicted_misses, self.predicted_bytes) == (self.measured_misses, self.measured_bytes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def verify_order(reader: H5Reader, order: Order, cache: CacheSettings, seconds: float) -> Verified:
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
    triple = cache.nslots, cache.nbytes, cache.w0
    main = reader.main
    if isinstance(main, MatrixField) or main.grid.chunks is None:
        what = "a sparse matrix is" if isinstance(main, MatrixField) else "data without chunks is"
        return Verified(0, 0, 0, 0, 0, 0, triple, f"{what} not read through the chunk cache: there is nothing to count")
    try:
        with opened(reader.path) as file:
            dataset = file[main.dataset]
            elsewhere = not same_file(dataset, file)
            table = list_chunks(dataset)
    except NotDirect as error:
        return Verified(0, 0, 0, 0, 0, 0, triple, f"reads cannot be counted: {error}")
    if elsewhere:
        return Verified(0, 0, 0, 0, 0, 0, triple, "the data lie in another file, of which no reads are counted")
    if (table.offsets < 0).any():
        return Verified(0, 0, 0, 0, 0, 0, triple, "chunks that were never written cost no read: the model has no such")
    started, batches = time.perf_counter(), []
    predictor = _Predictor(main.grid, cache, table)
    for batch in islice(order.batches(), MOST_ACCESSES):
        batches.append(batch)
        predictor.visit(batch)
        if predictor.accesses >= MOST_ACCESSES or predictor.bytes[-1] >= MOST_BYTES:
            break
        if time.perf_counter() - started > seconds / 3:
            break
    measured = _measure(reader, cache, batches, table, started + seconds)
    done = measured[2]
    return Verified(
        predictor.misses[done],
        measured[0],
        predictor.bytes[done],
        measured[1],
        done,
        sum(len(batch) for batch in batches[:done]),
        triple,
    )


class _Predictor:
    """What the model says, batch by batch: sums of misses and stored bytes, from 0 on."""

    def __init__(self, grid: ChunkGrid, cache: CacheSettings, table: ChunkTable) -> None:
        self._grid, self._cache, self._sizes = grid, ChunkCache(grid, cache), table.sizes
        self._whole = grid.filtered and grid.band_bytes > cache.nbytes
        self.accesses, self.misses, self.bytes = 0, [0], [0]

    def visit(self, rows: np.ndarray) -> None:
        grid = self._grid
        starts, stops = find_reads(
            rows, band_samples=grid.band_samples or 1, row_bytes=grid.sample_bytes, whole=self._whole
        )
        accesses = find_row_accesses(grid, starts, stops)
        replay = self._cache.access(accesses)
        read = replay.outcomes != HIT
        num_bytes = int(self._sizes[accesses.chunks[read]].sum()) if grid.filtered else replay.bytes_read
        self.accesses += len(accesses)
        self.misses.append(self.misses[-1] + int(read.sum()))
        self.bytes.append(self.bytes[-1] + num_bytes)


class NotingFile(io.FileIO):
    """A file for HDF5 to read from that notes every read as (offset, size), and every call as None."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "rb")
        self.reads: list[tuple[int, int] | None] = []

    def readinto(self, buffer: Any) -> int:
        self.reads.append((self.tell(), len(buffer)))
        return super().readinto(buffer)


def _measure(
    reader: H5Reader, cache: CacheSettings, batches: list[np.ndarray], table: ChunkTable, until: float
) -> tuple[int, int, int]:
    """Misses, bytes, and batches read; chunks are told by their offsets."""
    main = reader.main
    assert not isinstance(main, MatrixField)
    turn = np.argsort(table.offsets)
    offsets, ends = table.offsets[turn], (table.offsets + table.sizes)[turn]
    counts = np.zeros(2, np.int64)
    done = 0
    with NotingFile(reader.path) as noting, h5py.File(noting, "r") as file:
        alone = H5Reader(reader.path, {main.name: main.dataset}, trusted=reader.trusted)
        alone.set_caches(cache)
        handle = alone._handle(file, main)
        read_run = handle._read_run  # type: ignore[union-attr]

        def counted(*arguments: Any) -> None:
            noting.reads.append(None)
            read_run(*arguments)

        handle._read_run = counted  # type: ignore[union-attr, method-assign]
        noting.reads.clear()
        for batch in batches:
            out = np.empty((len(batch), *main.sample_shape), main.dtype)
            handle.read(batch, out)  # type: ignore[arg-type]
            counts += _count(noting.reads, offsets, ends)
            noting.reads.clear()
            done += 1
            if time.perf_counter() >= until:
                break
    return int(counts[0]), int(counts[1]), done


def _count(reads: list[tuple[int, int] | None], offsets: np.ndarray, ends: np.ndarray) -> tuple[int, int]:
    """Chunks that were read, each once a call, and bytes of them; reads of the index do not count."""
    misses = num_bytes = 0
    before = -1
    for read in reads:
        if read is None:
            before = -1
            continue
        at = int(np.searchsorted(offsets, read[0], "right")) - 1
        if at < 0 or read[0] >= ends[at]:
            continue
        misses += at != before
        num_bytes += read[1]
        before = at
    return misses, num_bytes
