"""Validate the arguments of bench and tune, and the files that they measure."""

from __future__ import annotations

from collections.abc import Sequence

from h5chunk.errors import FieldError, OptionError, check_whole, printable
from h5chunk.store.read.field_readers import field_readers
from h5chunk.store.read.fields import Field
from h5chunk.store.read.ragged import ImagesField
from h5chunk.store.read.source import Source

CROP = 224  # height and width to which images of any size are cropped


def check_budget(budget_s: float, name: str = "budget_s") -> None:
    """Raise OptionError unless a duration, which is the option ``name``, is positive and finite."""
    if not 0 < budget_s < float("inf"):
        raise OptionError(f"{name} is {budget_s!r}: use a finite number of seconds above 0")


def worker_counts(workers: Sequence[int] | None, default: Sequence[int]) -> tuple[int, ...]:
    """Return DataLoader worker counts, sorted, without duplicates. Raise OptionError if a count is invalid."""
    return tuple(sorted({check_whole("workers", number, 0) for number in (default if workers is None else workers)}))


def check_samples(reader: Source, done: str) -> int:
    """Return the size of a sample in memory in bytes, all fields together.

    Raises FieldError if there are no samples, or if samples are empty.

    ``done`` is "measured" or "tuned", for the error message.
    """
    sample_bytes = sum(field.grid.sample_bytes for field in reader.fields.values())
    if not reader.num_samples:
        raise FieldError(f"{printable(reader.path)}: has no samples, so nothing can be {done}")
    if not sample_bytes:
        raise FieldError(f"{printable(reader.path)}: its samples have no bytes, so nothing can be {done}")
    return sample_bytes


def batch_bytes(reader: Source, sample_bytes: int) -> int:
    """Return the size of a sample of a batch in bytes. Images of any size are cropped to CROP x CROP pixels."""
    field = reader.ragged
    return max(sample_bytes, field.channels * CROP * CROP) if isinstance(field, ImagesField) else sample_bytes


def why_not_direct(reader: Source) -> str:
    """Return the reason why a dense numeric field cannot be read by byte ranges; empty if all such fields can."""
    for name, why in field_readers(reader)[1].items():
        field = reader.fields[name]
        if isinstance(field, Field) and field.dtype.kind != "S":
            return f"field {name!r} cannot be read by byte ranges ({why})"
    return ""
