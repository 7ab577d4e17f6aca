"""Validate the arguments of bench and tune, and find out whether a file can be read by byte ranges."""

from __future__ import annotations

from collections.abc import Sequence

from h5chunk.errors import OptionError
from h5chunk.store.read.fields import Field
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.several import direct_fields


def check_counts(**counts: int) -> None:
    """Raise OptionError unless all arguments are whole numbers of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} is {value!r}: give a whole number, at least 1")


def check_budget(budget_s: float) -> None:
    """Raise OptionError unless the budget is a positive number of seconds."""
    if not 0 < budget_s < float("inf"):
        raise OptionError(f"budget_s is {budget_s!r}: give a number of seconds above 0")


def worker_counts(workers: Sequence[int] | None, default: Sequence[int]) -> tuple[int, ...]:
    """Return DataLoader worker counts, sorted, without duplicates; OptionError if a count is invalid."""
    given = default if workers is None else workers
    for number in given:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise OptionError(f"workers has {number!r}: give whole numbers, at least 0")
    return tuple(sorted(set(given)))


def why_not_direct(reader: H5Reader) -> str:
    """Return why a field cannot be read by byte ranges; empty if all can. Strings and matrices are ignored."""
    for name, why in direct_fields(reader)[1].items():
        field = reader.fields[name]
        if isinstance(field, Field) and field.dtype.kind != "S":
            return f"field {name!r} cannot be read by byte ranges: {why}"
    return ""
