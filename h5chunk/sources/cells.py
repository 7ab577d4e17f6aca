"""Convert cells of text to numbers without losing a digit."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from h5chunk.errors import printable

LABEL_COLUMNS = ("labels", "label")
WHOLE = re.compile(rb"[+-]?[0-9]+")
INFINITE = (b"inf", b"infinity")
MIN_ROUNDED = 2.0**53  # float64 holds all integers below
TRUE, FALSE = (b"true", b"True", b"TRUE"), (b"false", b"False", b"FALSE")


class LostDigitsError(ValueError):
    """Neither the numbers of a column nor their digits can be kept; ``str()`` says why, and how to read the column."""


def may_be_lost(values: np.ndarray) -> bool:
    """Return whether `check_floats` would find anything in (n,) float64, as far as the values show it."""
    return bool((np.abs(values) >= MIN_ROUNDED).any())


def check_floats(name: str, values: np.ndarray, cells: Sequence[bytes] | np.ndarray) -> None:
    """Raise `LostDigitsError` if a cell is a number that float64 does not hold.

    These are integers that were rounded, and numbers beyond its range, such as a hash that looks like one: 68e51234.
    ``values``, (n,) float64, are the cells of the column ``name``.
    """
    for row in np.flatnonzero(np.abs(values) >= MIN_ROUNDED).tolist():
        cell, value, problem = cells[row].strip(), float(values[row]), ""
        if np.isinf(value):
            problem = "is beyond the range of float64" * (cell.lstrip(b"+-").lower() not in INFINITE)
        elif WHOLE.fullmatch(cell) and int(cell) != int(value):
            problem = f"would be rounded to {value:.17g}, because other cells of the column are not integers"
        if problem:
            raise LostDigitsError(
                f"contains {printable(cell[:60])}, which {problem}: read the column as text (--text-columns "
                f"{printable(name)})"
            )


def note_zeros(name: str, words: np.ndarray) -> list[str]:
    """Return a note, in a list, if cells of integers, (n,) bytes, have leading zeros, which numbers lose."""
    padded = words[np.char.startswith(words, b"0") & (np.char.str_len(words) > 1)]
    if not len(padded):
        return []
    return [
        f"column {name!r} became numbers, without leading zeros such as those of {printable(padded[0])} "
        f"(--text-columns {printable(name)} keeps them)"
    ]


def typed(name: str, words: np.ndarray) -> np.ndarray:
    """Convert the cells of the column ``name``, (n,) bytes, to numbers if all of them are numbers.

    Integers that do not fit 64 bits remain text. Raises `LostDigitsError` if float64 does not hold the numbers.
    """
    if b"_" in words.tobytes():  # Python would accept 1_000 as a number
        return words
    if np.isin(words, TRUE + FALSE).all():
        return np.isin(words, TRUE).astype(np.uint8)
    for kind in (np.int64, np.uint64):
        try:
            numbers = words.astype(kind)
        except (ValueError, OverflowError):
            continue
        for small, values in ((np.uint8, (0, 1)), (np.int8, (-1, 1))):
            if np.isin(numbers, values).all():
                return numbers.astype(small)
        return numbers
    try:
        floats = words.astype(np.float64)
    except ValueError:
        return words
    if all(map(WHOLE.fullmatch, words.tolist())):
        return words
    check_floats(name, floats, words)
    return floats
