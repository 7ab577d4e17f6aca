"""Check the arguments of commands that measure, and whether a file can be read by byte ranges."""

from __future__ import annotations

from collections.abc import Sequence

from h5chunk.errors import OptionError
from h5chunk.store.format import opened
from h5chunk.store.read.direct import NotDirect, direct_field
from h5chunk.store.read.fields import Field
from h5chunk.store.read.filesdirect import files_fields
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.reader import H5Reader


def check_counts(**counts: int) -> None:
    """Raise OptionError unless all are whole numbers of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} is {value!r}: give a whole number, at least 1")


def check_budget(budget_s: float) -> None:
    """Raise OptionError unless it is a time."""
    if not 0 < budget_s < float("inf"):
        raise OptionError(f"budget_s is {budget_s!r}: give a number of seconds above 0")


def worker_counts(workers: Sequence[int] | None, default: Sequence[int]) -> tuple[int, ...]:
    """Numbers of workers of a DataLoader, each once.

    Raises
    ------
    OptionError
        One of them is not a number of workers.
    """
    for number in default if workers is None else workers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise OptionError(f"workers has {number!r}: give whole numbers, at least 0")
    return tuple(sorted(set(default if workers is None else workers)))


def why_not_direct(reader: H5Reader) -> str:
    """Why a field cannot be read by byte ranges; empty if all can. Strings and matrices are left out."""
    if isinstance(reader, FileSet):
        reasons = files_fields(reader)[1]
    else:
        reasons = {}
        with opened(reader.path) as file:
            for name, each in reader.fields.items():
                try:
                    if isinstance(each, Field) and each.dtype.kind != "S":
                        direct_field(reader.path, file, each)
                except NotDirect as reason:
                    reasons[name] = str(reason)
    for name, why in reasons.items():
        return f"field {name!r} cannot be read by byte ranges: {why}"
    return ""
