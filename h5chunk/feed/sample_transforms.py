"""The transforms of a `ChunkDataset`: of rows of a matrix together, of single samples one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from h5chunk.errors import OptionError
from h5chunk.feed.collate import Sample
from h5chunk.feed.layout import torch_dtype
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.transforms import BATCH_TRANSFORMS, ToDtype, check_first, check_transforms, compile_transforms
from h5chunk.transforms.rows import RowConverter


class SampleTransforms:
    """What becomes of the first field of samples.

    Parameters
    ----------
    transform : callable, sequence of callables, or None
    field : Field or MatrixField
        The first field.

    Attributes
    ----------
    rows : RowConverter or None
        For rows of a matrix: the transforms that are applied to whole batches.
    each : tuple of callables
        The transforms of single samples.

    Raises
    ------
    OptionError
        A transform cannot be applied, or does not fit the field.
    """

    def __init__(self, transform: Any, field: Field | MatrixField) -> None:
        transforms = _listed(transform)
        check_first(transforms, field, torch_dtype(field.dtype, field.name))
        self.rows: RowConverter | None = None
        if field.scale is not None:
            converter, others = compile_transforms(transforms, field, None, _empty)
            assert isinstance(converter, RowConverter)
            if converter.makes_csr and others:
                raise OptionError("transform has functions of single samples, and Csr gives batches: use collate_fn")
            self.rows, transforms = converter, others
        if any(isinstance(each, ToDtype) and each.channels_last for each in transforms):
            raise OptionError("channels_last is for batches, and a transform is of single samples: use a ChunkLoader")
        self.each = tuple(_of_single(each) for each in transforms)

    def of_sample(self, sample: Sample) -> Sample:
        """A sample with its first field transformed."""
        if not self.each:
            return sample
        first, *others = sample
        for transform in self.each:
            first = transform(first)
        return Sample((first, *others))


def _listed(transform: Any) -> Sequence[Callable[[Any], Any]]:
    if transform is None:
        return ()
    return check_transforms("transform", [transform] if callable(transform) else transform)


def _of_single(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A transform of batches as one of single samples."""
    return _Single(transform) if isinstance(transform, BATCH_TRANSFORMS) else transform


class _Single:
    """Applies a transform of batches to one sample; it travels to a DataLoader's workers."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self._transform = transform

    def __call__(self, sample: torch.Tensor) -> Any:
        return self._transform(sample[None])[0]


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
