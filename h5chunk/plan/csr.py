"""Choose the layout of a sparse matrix in a file: types, chunks, and the window.

A nominal chunk is a run of rows that an epoch's order keeps together, like the chunk of a field.

>>> layout = plan_csr(138_493, 26_744, 20_000_263)
>>> layout.chunk_samples, layout.window_chunks
(512, 49)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from h5chunk.errors import count_text, human_bytes
from h5chunk.plan.cache import CacheSettings, cache_for
from h5chunk.plan.layout import Layout, choose_window_chunks, good_chunk_samples
from h5chunk.plan.order import INTERLEAVE

INDEX_CHUNK_BYTES = 1 << 20  # size of an HDF5 chunk of ``indices``
ROW_CHUNK_BYTES = 256 << 10  # largest average size of a nominal chunk
MIN_ROW_CHUNK_BYTES = 16 << 10  # smallest average size, unless the matrix is smaller
POINTER_BYTES = 8  # size of an element of ``indptr``, of which each row has one
CODE = np.dtype(np.uint8)
WINDOW_SKEW = 2  # limit on the entries in the fullest window, as a multiple of the entries in an average window


@dataclass(frozen=True, kw_only=True)
class CsrLayout(Layout):
    """The layout of a sparse matrix, whose samples are rows, of ``sample_bytes`` on average."""

    num_columns: int
    num_entries: int
    value_dtype: np.dtype | None  # stored dtype; None for a pattern, whose values are all 1 and not stored

    @property
    def index_dtype(self) -> np.dtype[np.unsignedinteger]:
        return index_dtype(self.num_columns)

    @property
    def pattern(self) -> bool:
        """True if no values are stored."""
        return self.value_dtype is None

    @property
    def chunk_entries(self) -> int:
        """Number of entries in one HDF5 chunk of ``indices`` or ``data``, at least 1."""
        return max(1, min(INDEX_CHUNK_BYTES // self.index_dtype.itemsize, self.num_entries))

    @property
    def cache(self) -> CacheSettings:
        """Recommended cache for one process that reads all batches through HDF5."""
        num_chunks = max(1, math.ceil(self.num_entries / self.chunk_entries))
        open_rows = INTERLEAVE * self.window_chunks
        entries_bytes = self.chunk_entries * _entry_bytes(self.num_columns, self.value_dtype)
        open_chunks = math.ceil(open_rows * self.chunk_bytes / entries_bytes) + open_rows
        return cache_for(min(open_chunks, num_chunks), self.chunk_entries * self.index_dtype.itemsize, num_chunks)


def plan_csr(
    num_rows: int,
    num_columns: int,
    num_entries: int,
    *,
    value_dtype: np.dtype | None = CODE,
    chunk_samples: int | None = None,
) -> CsrLayout:
    """Plan the layout of a matrix. If ``chunk_samples`` is None, choose a suitable number of rows per nominal chunk."""
    row_bytes = POINTER_BYTES + math.ceil(num_entries * _entry_bytes(num_columns, value_dtype) / num_rows)
    how = ", as requested" if chunk_samples is not None else ""
    chunk_samples = good_chunk_samples(num_rows, row_bytes, chunk_samples, ROW_CHUNK_BYTES, MIN_ROW_CHUNK_BYTES)
    chunk_bytes = chunk_samples * row_bytes
    window_chunks = choose_window_chunks(chunk_bytes, math.ceil(num_rows / chunk_samples))
    return CsrLayout(
        num_samples=num_rows,
        sample_bytes=row_bytes,
        chunk_samples=chunk_samples,
        window_chunks=window_chunks,
        num_columns=num_columns,
        num_entries=num_entries,
        value_dtype=value_dtype,
        reasons=(
            f"{chunk_samples} rows per nominal chunk{how}: {human_bytes(chunk_bytes)} on average",
            f"rows are shuffled within windows of {count_text(window_chunks, 'nominal chunk')}",
        ),
    )


def _entry_bytes(num_columns: int, value_dtype: np.dtype | None) -> int:
    """Return the stored size of one entry in bytes."""
    return index_dtype(num_columns).itemsize + (value_dtype.itemsize if value_dtype else 0)


def fullest_chunks(indptr: np.ndarray, chunk_samples: int) -> np.ndarray:
    """Return the total number of entries in the k fullest nominal chunks, for each k from 0: (num_chunks + 1,) int64.

    >>> fullest_chunks(np.array([0, 1, 2, 9, 10, 14]), 2).tolist()  # chunks of 2, 8 and 4 entries
    [0, 8, 12, 14]
    """
    num_rows = len(indptr) - 1
    cuts = np.append(np.arange(0, num_rows, chunk_samples), num_rows)
    counts = np.sort(np.diff(indptr[cuts]))[::-1]
    return np.concatenate(([0], np.cumsum(counts)))


def entries_of_chunks(fullest: np.ndarray, chunk_samples: int, lanes: int = 1) -> Callable[[int], int]:
    """Return a function that computes the maximum number of entries in a window of n rows.

    ``fullest`` is the result of `fullest_chunks`. In addition to complete chunks, a window may contain pieces of four
    chunks per lane of the rank: two at its borders, and two from the end of the sequence. One more chunk may fill the
    gap after the file's short last chunk.
    """

    def max_entries(num_rows: int) -> int:
        num_chunks = -(-num_rows // chunk_samples) + 4 * lanes + 1
        return int(fullest[min(num_chunks, len(fullest) - 1)])

    return max_entries


def entries_of_rows(lengths: np.ndarray, counts: np.ndarray) -> Callable[[int], int]:
    """Return a function that computes the maximum number of entries in n rows.

    Row i has ``lengths[i]`` entries, and occurs at most ``counts[i]`` times among the n rows.

    >>> entries_of_rows(np.array([5, 1, 9]), np.array([1, 1, 2]))(3)  # 9, 9 and 5
    23
    """
    longest = np.argsort(-lengths, kind="stable")
    rows = np.concatenate(([0], np.cumsum(counts[longest])))
    entries = np.concatenate(([0], np.cumsum(counts[longest] * lengths[longest])))

    def max_entries(num_rows: int) -> int:
        return int(entries[min(int(np.searchsorted(rows, num_rows)), len(entries) - 1)])

    return max_entries


def bounded_window(window_chunks: int, fullest: np.ndarray) -> int:
    """Reduce ``window_chunks`` until every window has at most `WINDOW_SKEW` times the entries of an average window.

    >>> bounded_window(2, np.array([0, 8, 12, 14]))
    2
    >>> bounded_window(2, np.array([0, 90, 91, 92, 93, 94, 95, 96, 97]))
    1
    """
    num_chunks = max(1, len(fullest) - 1)
    max_entries = WINDOW_SKEW * window_chunks * int(fullest[-1]) / num_chunks
    return max(1, min(window_chunks, int(np.searchsorted(fullest, max_entries, "right")) - 1))


def index_dtype(num_columns: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest unsigned integer dtype for column indices.

    >>> [str(index_dtype(n)) for n in (1, 256, 257, 65_536, 65_537, 1 << 32, (1 << 32) + 1)]
    ['uint8', 'uint8', 'uint16', 'uint16', 'uint32', 'uint32', 'uint64']
    """
    return np.min_scalar_type(max(0, num_columns - 1))
