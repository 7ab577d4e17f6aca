"""Parse sizes and durations with units, as command lines have them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from h5chunk.errors import OptionError

SIZES = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}  # powers of two, by the first letter of a unit
BYTES = {
    unit: 1 << power
    for letter, power in SIZES.items()
    for unit in (letter, f"{letter}b", f"{letter}ib")
    if unit != "ib"
}
SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_bytes(text: str) -> int:
    """Parse a size in bytes, with or without a unit. Raises OptionError if it is invalid.

    >>> parse_bytes("1GiB"), parse_bytes("512M"), parse_bytes("1048576")
    (1073741824, 536870912, 1048576)
    """
    return int(_parse(text, BYTES, "a size: use a number of bytes, or a size such as 1.0 GiB"))


def parse_seconds(text: str) -> float:
    """Parse a duration in seconds, with or without a unit. Raises OptionError if it is invalid.

    >>> parse_seconds("500ms"), parse_seconds("10"), parse_seconds("2m"), parse_seconds("1.5h")
    (0.5, 10.0, 120.0, 5400.0)
    """
    return _parse(text, SECONDS, "a time: use a number of seconds, or a time such as 500ms, 60s, 2m or 1.5h")


def _parse(text: str, units: Mapping[str, float], problem: str) -> float:
    """Return a plain decimal number times its unit. Other forms, such as nan, -1 and 1e9, are invalid."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) *([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in units:
        raise OptionError(f"{text!r} is not {problem}")
    return float(match[1]) * units[match[2]]
