"""What batches are made by: conversion as the user asked for it, and the cutting into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from h5chunk.errors import OptionError
from h5chunk.feed.normalize import Convert
from h5chunk.feed.rowconvert import RowConvert, matrix_convert
from h5chunk.feed.spaces import Fields, torch_dtype
from h5chunk.store.read.reader import H5Reader

GROUP_BYTES = 8 << 20  # small batches are converted together on a GPU, as a kernel's launch costs more than its work
ROWS_BYTES = 256 << 20  # so are rows made dense: a batch of 500 x 26,744 then takes 40 us of Python, not 90; LOG.md
Normalize = tuple[Sequence[float] | float, Sequence[float] | float] | str
Tensors = tuple[torch.Tensor, ...]  # one a field


class Maker(Protocol):
    """Makes batches of samples."""

    transform: Callable[[Tensors], Any] | None

    def num_together(self, batch_size: int, *, gathered: bool = False) -> int:
        """Batches that are made with one call; ``gathered``: of samples that have to be copied for it."""

    def make(self, samples: Fields, batch_size: int, *, gathered: bool = False) -> list[Any]:
        """Batches of these samples."""


class BatchMaker:
    """Makes batches as the user asked for them of samples that lie in a slot, or in memory of their own.

    Parameters
    ----------
    convert : Convert or RowConvert
        Of the first field.
    transform : callable, optional
        Of a batch.
    keep : bool
        What is not converted may be handed on as it is; else it is copied, as the slot will be filled again.
    """

    def __init__(
        self, convert: Convert | RowConvert, transform: Callable[[Tensors], Any] | None, *, keep: bool
    ) -> None:
        self._convert, self._keep = convert, keep
        self.transform = transform

    def num_together(self, batch_size: int, *, gathered: bool = False) -> int:
        """Batches that are made with one call; ``gathered``: of samples that have to be copied for it."""
        if self._convert.makes_csr:  # which torch does not cut
            return 1
        if self._keep and not gathered:
            return 1 << 30 if self._convert.changes_nothing else 1
        together = ROWS_BYTES if isinstance(self._convert, RowConvert) else GROUP_BYTES
        return max(1, together // max(1, batch_size * self._convert.sample_bytes))

    def make(self, samples: Fields, batch_size: int, *, gathered: bool = False) -> list[Tensors]:
        """Batches of these samples; detached, so that changing one in place leaves autograd's view of others alone."""
        first, *others = samples
        keep = self._keep or gathered
        fields = self._convert(first, keep), *(others if keep else [other.clone() for other in others])
        if len(first) <= batch_size:
            return [tuple(field.data for field in fields)]
        batches = zip(*(field.split(batch_size) for field in fields), strict=True)
        return [tuple(field.data for field in batch) for batch in batches]


class AsItIs:
    """Hands on what a slot holds, all of it."""

    transform: Callable[[Tensors], Any] | None = None

    def num_together(self, batch_size: int, *, gathered: bool = False) -> int:
        return 1

    def make(self, samples: Fields, batch_size: int, *, gathered: bool = False) -> list[Fields]:
        return [samples]


def make_convert(
    reader: H5Reader,
    *,
    normalize: Normalize | None,
    dtype: torch.dtype | None,
    channels_last: bool,
    sparse: str | None,
    binarize: float | None,
    reuse: bool,
) -> Convert | RowConvert:
    """The conversion of a file's first field.

    Raises
    ------
    OptionError
        The options do not fit each other, or the field.
    """
    first = next(iter(reader.fields.values()))
    rows = matrix_convert(reader, sparse=sparse, dtype=dtype, binarize=binarize, normalize=normalize, reuse=reuse)
    if rows is not None:
        if channels_last:
            raise OptionError(f"channels_last is for images, but {first.name!r} is a matrix: leave it out")
        return rows
    assert not isinstance(normalize, str)
    stored = torch_dtype(first.dtype, first.name)
    assert stored is not None
    axis = _channel_axis(reader)
    return Convert(stored, dtype, normalize, channels_last, first.sample_shape, axis, reuse)


def _channel_axis(reader: H5Reader) -> int:
    """As the file says, or as the shape does: images of 1, 3 or 4 channels."""
    first = next(iter(reader.fields.values()))
    if first.axes or len(first.sample_shape) != 3:
        return 2 if first.axes == "NHWC" else 0
    ends = [size in (1, 3, 4) for size in (first.sample_shape[0], first.sample_shape[2])]
    return 2 if ends == [False, True] else 0
