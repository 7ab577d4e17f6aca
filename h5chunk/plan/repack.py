"""Plan how to rewrite a file within a memory limit: the steps in which it is read, and the buckets of a shuffle.

A shuffle that exceeds the memory needs two passes. The first pass reads the samples in order, and writes each sample to
the bucket of its new position. A bucket is a range of positions. The second pass sorts one bucket after another in
memory.

>>> [(step.start, step.stop) for step in plan_steps(10, row_bytes=4, band_rows=3, step_bytes=24)]
[(0, 6), (6, 10)]
>>> plan_buckets(10, 4, 16, 1).tolist(), plan_buckets(10, 4, 16, 3).tolist()
([0, 4, 8, 10], [0, 3, 6, 9, 10])
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from h5chunk.errors import OptionError, exact_bytes

MIN_MEMORY_BYTES = 8 << 20
STEP_BYTES = 16 << 20  # size of one read, if memory allows; scripts/bench_repack.py measures it
MAX_BAND_STEPS = 4  # factor by which a read may grow to include a whole band
MIN_WRITE_BYTES = 256 << 10  # average size of a write to a bucket, if memory allows
FEW_BUCKETS = 64  # with at most this many buckets, one read has enough data for a long write to each
ORDER_BYTES = 24  # memory per sample for a permutation and its inverse, including temporary arrays


@dataclass(frozen=True)
class MemoryShares:
    """The division of the memory of a repack among its buffers."""

    memory_bytes: int  # memory for all buffers
    num_threads: int  # number of threads that work at the same time

    @property
    def part_bytes(self) -> int:
        """Maximum size of one buffer in bytes.

        A shuffle has at most three buffers per thread and one more. The divisor leaves space for index arrays.
        """
        return self.memory_bytes // (4 * self.num_threads + 2)

    @property
    def step_bytes(self) -> int:
        """Size of one read in bytes."""
        return min(STEP_BYTES, self.part_bytes)

    def bucket_bytes(self, total_bytes: int) -> int:
        """Return the size of a bucket in bytes. Larger ones are slower, because the first use of new memory is slow."""
        return min(self.part_bytes, max(STEP_BYTES, total_bytes // FEW_BUCKETS))

    def scatter_bytes(self, num_buckets: int) -> int:
        """Return the size in bytes of a read in the first pass, which suffices for a long write to each bucket."""
        return max(self.step_bytes, min(self.part_bytes, num_buckets * MIN_WRITE_BYTES))

    def with_whole_band(self, step_bytes: int, band_bytes: int, whole_bands: bool) -> int:
        """Increase the size of a read to a whole band.

        Unless ``whole_bands`` is set, do so only if the band is small.
        """
        fits = band_bytes <= min(self.part_bytes, MAX_BAND_STEPS * STEP_BYTES)
        return max(step_bytes, band_bytes) if whole_bands or fits else step_bytes


def memory_for_copying(memory_bytes: int, num_permuted: int) -> int:
    """Return the memory in bytes that remains after a permutation of ``num_permuted`` samples is stored.

    Raises OptionError if too little remains to copy data.
    """
    if memory_bytes < MIN_MEMORY_BYTES:
        raise OptionError(f"memory is {memory_bytes} bytes: pass at least {MIN_MEMORY_BYTES}")
    remaining = memory_bytes - num_permuted * ORDER_BYTES
    if remaining < MIN_MEMORY_BYTES // 2:
        need = exact_bytes(num_permuted * ORDER_BYTES + MIN_MEMORY_BYTES)
        raise OptionError(
            f"memory is {exact_bytes(memory_bytes)}, but shuffling {num_permuted} samples needs {need}: pass that much"
        )
    return remaining


def plan_steps(
    num_rows: int, *, row_bytes: int, band_rows: int, step_bytes: int, unit_rows: int = 1
) -> Iterator[range]:
    """Yield the ranges of rows to read at once. A range has at most ``step_bytes`` bytes, but at least one row.

    A band is ``band_rows`` rows that share their chunks. A step consists of whole bands, or of a part of one band if a
    band is too large. If possible, the number of rows in a step is a multiple of ``unit_rows``, the number of rows that
    are best written together.
    """
    rows = max(1, step_bytes // row_bytes)
    for unit in (math.lcm(band_rows, unit_rows), band_rows, unit_rows):
        if rows >= unit:
            rows -= rows % unit
            break
    piece = num_rows if rows % band_rows == 0 else band_rows
    for start in range(0, num_rows, max(1, piece)):
        last = min(start + piece, num_rows)
        for first in range(start, last, rows):
            yield range(first, min(first + rows, last))


def plan_buckets(num_rows: int, row_bytes: int, bucket_bytes: int, unit_rows: int) -> np.ndarray:
    """Cut rows into buckets of at most ``bucket_bytes``, and return the borders: (num_buckets + 1,) int64.

    If possible, the number of rows in a bucket is a multiple of ``unit_rows``.
    """
    rows = max(1, bucket_bytes // row_bytes)
    rows -= rows % unit_rows if rows >= unit_rows else 0
    return np.append(np.arange(0, num_rows, rows, dtype=np.int64), num_rows)


def plan_uneven(ends: np.ndarray, part_bytes: int, item_bytes: int) -> np.ndarray:
    """Cut rows of different lengths into runs of at most ``part_bytes``, or of one row if it is larger.

    Returns the borders, (num_runs + 1,) int64. Row i has the elements ``ends[i]:ends[i + 1]``, where ``ends`` is
    (num_rows + 1,) int64. A row needs ``item_bytes`` bytes per element, plus 8 bytes.

    >>> plan_uneven(np.array([0, 1, 2, 12, 12, 13]), 40, 4).tolist()
    [0, 2, 3, 5]
    """
    costs = ends * item_bytes + 8 * np.arange(len(ends), dtype=np.int64)
    borders = [0]
    while borders[-1] < len(ends) - 1:
        last = int(np.searchsorted(costs, costs[borders[-1]] + part_bytes, "right")) - 1
        borders.append(max(last, borders[-1] + 1))
    return np.array(borders, np.int64)
