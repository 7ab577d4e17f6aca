"""How much is read beside what is wanted, where whole chunks are read and not all of a chunk is wanted.

>>> rows = np.array([0, 3, 4, 21])  # of 22 samples, in chunks of 10: the last holds two
>>> read_with(rows, 10, 22)
12
"""

from __future__ import annotations

import numpy as np

from h5chunk.plan.permutation import Indices


def read_with(wanted: Indices, chunk_size: int, length: int) -> int:
    """How many lie in the chunks that hold any of those wanted: (n,) samples or entries, in any order, also repeated.

    ``length`` is that of all chunks together: the last one may be short.
    """
    chunks = np.unique(wanted // chunk_size)
    return int(np.minimum(chunks * chunk_size + chunk_size, length).sum() - (chunks * chunk_size).sum())


def entries_read_with(starts: Indices, stops: Indices, chunk_size: int, length: int) -> int:
    """How many lie in the chunks that hold any entry of these ranges: (n,) int64 each, empty ones among them.

    >>> entries_read_with(np.array([0, 35, 4]), np.array([3, 52, 4]), 10, 55)  # chunks 0, 3, 4 and 5
    35
    """
    some = stops > starts
    num_chunks = -(-length // chunk_size)
    opened = np.bincount(starts[some] // chunk_size, minlength=num_chunks + 1)
    closed = np.bincount((stops[some] - 1) // chunk_size + 1, minlength=num_chunks + 1)
    chunks = np.flatnonzero(np.cumsum(opened - closed)[:num_chunks] > 0)
    return read_with(chunks * chunk_size, chunk_size, length)
