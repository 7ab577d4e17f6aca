"""Combine the values of entries that share a place in a sparse matrix.

>>> values, starts = np.array([4, 2, 3, 5]), np.array([0, 1])  # 4 alone; 2, 3 and 5 share a place
>>> {how: combine(how, values, starts).tolist() for how in ("sum", "first", "last", "max")}
{'sum': [4, 10], 'first': [4, 2], 'last': [4, 5], 'max': [4, 5]}
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TEXTS = {
    "error": "are an error",
    "sum": "summed",
    "last": "reduced to the last",
    "first": "reduced to the first",
    "max": "reduced to the largest",
    "mean": "averaged",
}
IN_ORDER = ("last", "first")  # those that depend on the order of the entries


def combine(how: str, values: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Combine each run of values into one: (n,) values, runs that begin at (m,) ``starts``, from 0, give (m,) values.

    ``how`` is one of `TEXTS`; ``error`` and ``mean``, which need the number of entries as well, give the sum.
    """
    if how == "first":
        combined: npt.NDArray[Any] = values[starts]
    elif how == "last":
        combined = values[np.append(starts[1:], len(values)) - 1]
    else:
        combined = (np.maximum if how == "max" else np.add).reduceat(values, starts)
    return combined


def describe(how: str, time_name: str | None) -> str:
    """What is done with duplicates, for reports.

    >>> describe("last", "timestamp"), describe("last", None)
    ('reduced to the last by timestamp', 'reduced to the last in the order of the source')
    """
    order = f" by {time_name}" if time_name else " in the order of the source"
    return TEXTS[how] + (order if how in IN_ORDER else "")
