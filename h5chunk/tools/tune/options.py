"""What can be asked of a tuner, and what cannot."""

from __future__ import annotations

import os
from collections.abc import Sequence

from h5chunk.errors import OptionError, printable
from h5chunk.store.write.fill import available_cores
from h5chunk.tools.tune.advice import Triple, default_cache

MAX_WORKERS = 4


def plain_cache(given: Sequence[float] | None) -> Triple:
    """The cache of plain h5py, w0 = 1 included: it is there to be advised against."""
    if given is None:
        return default_cache()
    try:
        nslots, nbytes, w0 = given
        found = int(nslots), int(nbytes), float(w0)
    except (TypeError, ValueError, OverflowError):
        raise OptionError(f"h5py_cache is {given!r}: give (nslots, nbytes, w0), as h5py's rdcc_* arguments") from None
    if found[0] < 1 or found[1] < 0 or not 0 <= found[2] <= 1:
        raise OptionError(f"h5py_cache is {given!r}: give nslots of at least 1, nbytes of at least 0, w0 from 0 to 1")
    return found


def check_unconverted(source: str | os.PathLike[str], **asked: object) -> None:
    """Raise OptionError for what only a file can have."""
    for name, value in asked.items():
        if value:
            raise OptionError(f"{name} is {value!r}, but {printable(source)} is not converted yet: leave it out")


def check_converted(source: str | os.PathLike[str], size: object) -> None:
    """Raise OptionError for what only a source can have."""
    if size is not None:
        raise OptionError(f"size is {size!r}, but {printable(source)} is no source of images: leave it out")


def worker_numbers(workers: Sequence[int] | None) -> tuple[int, ...]:
    """Numbers of workers, each once."""
    if workers is None:
        cores = available_cores()
        return tuple(number for number in (0, 1, 2, MAX_WORKERS) if number <= max(1, cores))
    for number in workers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise OptionError(f"workers has {number!r}: give whole numbers, at least 0")
    return tuple(sorted(set(workers)))


def check_numbers(batch_size: int, memory_bytes: int, share: float, budget_s: float) -> None:
    """Raise OptionError for a number that cannot be."""
    for name, value in (("batch_size", batch_size), ("memory_bytes", memory_bytes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} is {value!r}: give a whole number, at least 1")
    if not 0 < share < 1:
        raise OptionError(f"min_effective_batch is {share!r}: give a share of the batch above 0 and below 1")
    if not 0 < budget_s < float("inf"):
        raise OptionError(f"budget_s is {budget_s!r}: give a number of seconds above 0")
