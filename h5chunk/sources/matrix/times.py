"""Recognise times in text: whole numbers, real numbers or ISO 8601 dates."""

from __future__ import annotations

import contextlib

import numpy as np

from h5chunk.sources.arrow import pyarrow
from h5chunk.sources.matrix.dialect import is_number, is_whole

UNIX_TIMES = 10**8, 10**14  # from 1973 in seconds to 5138 in milliseconds


def are_unix_times(table: list[list[bytes]]) -> bool:
    """Whether the last cells of all rows look like numbers of seconds or milliseconds since 1970."""
    return all(is_whole(row[-1]) and UNIX_TIMES[0] <= int(row[-1]) < UNIX_TIMES[1] for row in table)


def time_type(cells: list[bytes]) -> pyarrow.DataType | None:
    """The type as which times are read; None if they are neither numbers nor ISO 8601 dates."""
    if all(map(is_whole, cells)):
        return pyarrow.int64()
    if all(map(is_number, cells)):
        return pyarrow.float64()
    for kind in (pyarrow.timestamp("us"), pyarrow.timestamp("us", "UTC")):
        with contextlib.suppress(pyarrow.ArrowInvalid):
            pyarrow.array(cells, pyarrow.binary()).cast(pyarrow.string()).cast(kind)
            return kind
    return None


def ordered(times: np.ndarray) -> np.ndarray:
    """Whole numbers in the order of these numbers, int64."""
    if times.dtype.kind != "f":
        return times
    bits = (times + 0.0).view(np.int64)  # -0.0 becomes 0.0
    return bits ^ (bits >> 63 & np.int64((1 << 63) - 1))
