"""Batches of sample numbers, tagged with their data set: in another part the same numbers mean other samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from h5chunk.errors import OptionError

Numbering = tuple[int, int]  # how many samples there are, and a checksum of which of the file, 0 for all


def numbering_of(num_samples: int, samples: np.ndarray | None) -> Numbering:
    """Tell the numbers of one part of a file from those of another.

    Parameters
    ----------
    num_samples : int
        Of the file, or of all files.
    samples : (n,) int64, or None
        Their numbers in the file; None: all.
    """
    if samples is None or len(samples) == num_samples:
        return num_samples, 0
    return len(samples), zlib.crc32(samples.tobytes())


class TaggedBatch(list[int]):
    """A batch of sample numbers: a list, tagged with the numbering that it is of."""

    def __init__(self, numbers: Iterable[int] = (), numbering: Numbering | None = None) -> None:
        super().__init__(numbers)
        self.numbering = numbering


def check_batch(indices: Any, numbering: Numbering) -> None:
    """Raise OptionError if a sampler drew these for other samples than those that are to be read."""
    if isinstance(indices, TaggedBatch) and indices.numbering is not None:
        check_numbering(indices.numbering, numbering)


def check_numbering(drawn: Numbering, numbering: Numbering) -> None:
    """Raise OptionError if two numberings differ.

    Other files of as many samples are let pass: they may hold other fields of the same samples.
    """
    if drawn == numbering:
        return
    here = f"{numbering[0]}" if drawn[0] != numbering[0] else f"{numbering[0]} others"
    raise OptionError(
        f"this batch was drawn from a data set of {drawn[0]} samples, but is read from one of {here}: give the "
        "loader the data set, or the part of one, that the ChunkSampler was made with"
    )
