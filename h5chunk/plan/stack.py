"""What a trace of chunks costs with LRU caches of every size at once: Mattson's stack distances.

A cache of C chunks that evicts the least recently used one has a chunk if fewer than C others were asked for since.

>>> lru_reads(np.array([7, 8, 7, 9, 8])).tolist()  # 7 is found with room for two, 8 with room for three
[5, 5, 4, 3]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Trace = npt.NDArray[np.int64]


def lru_reads(trace: Trace) -> Trace:
    """Reads of a trace of chunks through LRU caches of every size.

    Parameters
    ----------
    trace : (T,) integers
        The chunks in the order in which they are asked for.

    Returns
    -------
    (n + 1,) int64
        Reads with room for 0, 1, ... n chunks, where n is the number of different ones; more room changes nothing.

    Source: R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970.
    """
    distances = stack_distances(trace)
    found = np.bincount(distances[distances >= 0], minlength=int((distances < 0).sum()))
    return len(distances) - np.append(0, np.cumsum(found))


def stack_distances(trace: Trace) -> Trace:
    """How many other chunks a trace asks for since it last asked for this one.

    An LRU cache of C chunks has it if these are fewer than C. O(T log T) in NumPy: about a second for a million.

    Parameters
    ----------
    trace : (T,) integers

    Returns
    -------
    (T,) int64
        -1 where a chunk is asked for the first time.

    Source: Mattson et al., 1970; O(T log T) as B. T. Bennett and V. J. Kruskal, "LRU stack processing", IBM Journal of
    Research and Development 19(4), 1975, whose tree this replaces.

    Examples
    --------
    >>> stack_distances(np.array([7, 8, 7, 7, 9, 8])).tolist()
    [-1, -1, 1, 0, -1, 2]
    """
    before = _last_use(np.asarray(trace))
    again = np.flatnonzero(before >= 0)
    distances = np.full(len(before), -1, np.int64)
    # p is the last use of i. Before i, last uses are smaller than p at all j <= p, and between them once a chunk.
    distances[again] = _count_smaller_before(before)[again] - before[again] - 1
    return distances


def _last_use(trace: Trace) -> Trace:
    """The place of the last access to the same chunk; -1 for the first one."""
    turn = np.argsort(trace, kind="stable")
    same = trace[turn[1:]] == trace[turn[:-1]]
    before = np.full(len(trace), -1, np.int64)
    before[turn[1:][same]] = turn[:-1][same]
    return before


def _count_smaller_before(values: Trace) -> Trace:
    """For each place, how many places before it have a smaller value; equal values only count where they are -1.

    Places are sorted by value; then their binary digits, the highest first, split them into left and right halves, each
    still sorted by value. Those of a left half that the list has before one of its right half are smaller and earlier.
    In the end places are in order again, and so are the counts that moved with them.
    """
    digits = max(0, len(values) - 1).bit_length()
    dtype = np.int32 if digits < 31 else np.int64
    places = np.arange(1 << digits, dtype=dtype)  # those beyond the trace have the largest values, and count nowhere
    places[: len(values)] = np.argsort(values, kind="stable")
    counts = np.zeros_like(places)
    for half in (1 << digit for digit in reversed(range(digits))):
        right = (places & half) != 0
        left = ~right
        lefts = np.cumsum(left, dtype=dtype)[right].reshape(-1, half)
        lefts -= np.arange(len(lefts), dtype=dtype)[:, np.newaxis] * dtype(half)  # those of other parts
        counts = np.stack([counts[left].reshape(-1, half), counts[right].reshape(-1, half) + lefts], axis=1).ravel()
        places = np.stack([places[left].reshape(-1, half), places[right].reshape(-1, half)], axis=1).ravel()
    return counts[: len(values)].astype(np.int64)
