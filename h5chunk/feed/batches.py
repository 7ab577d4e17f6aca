"""Conversion of samples and their division into batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from h5chunk.feed.slots import BatchMemory, Fields, SingleBuffer, torch_dtype
from h5chunk.store.read.fields import Field
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.transforms import Transform, compile_transforms
from h5chunk.transforms.rows import RowConverter

GROUP_BYTES = 8 << 20  # small batches are converted together on a GPU, as a kernel's launch costs more than its work
ROWS_BYTES = 256 << 20  # so are rows made dense: a batch of 500 x 26,744 then takes 40 us of Python, not 90; LOG.md
Tensors = tuple[torch.Tensor, ...]  # one per field


class FieldPipeline:
    """The transforms of a field, with the host memory of its batches.

    Parameters
    ----------
    transforms : sequence of callables
    field : Field or MatrixField
    reuse : bool
        On the CPU, a batch is valid until the next one.

    Attributes
    ----------
    converter : Converter
        The first transforms, which are computed together.
    others : tuple of callables
        The transforms after those.

    Raises
    ------
    OptionError
        The transforms do not fit each other, or the field.
    """

    def __init__(self, transforms: Sequence[Transform], field: Field | MatrixField, *, reuse: bool) -> None:
        self._reuse = reuse
        self._memory = self._new_memory()
        stored = torch_dtype(field.dtype, field.name)
        self.converter, self.others = compile_transforms(transforms, field, stored, self._empty)

    def _new_memory(self) -> BatchMemory | SingleBuffer:
        return SingleBuffer() if self._reuse else BatchMemory()

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._memory.empty(shape, dtype)

    def release(self) -> None:
        """End the threads, and free the memory that is kept for further batches."""
        self.converter.release()
        self._memory = self._new_memory()


class Maker(Protocol):
    """Makes batches of samples."""

    def num_together(self, batch_size: int, *, gathered: bool = False) -> int:
        """Batches that are made with one call; ``gathered``: of samples that have to be copied for it."""

    def make(self, samples: Fields, batch_size: int, *, gathered: bool = False) -> list[Any]:
        """Batches of these samples."""

    def finish(self, batch: Any) -> Any:
        """The batch as the user wants it; called when it is handed out."""


class BatchMaker:
    """Makes the batches that the user asked for, of samples that lie in a slot, or in memory of their own.

    Parameters
    ----------
    pipelines : sequence of FieldPipeline
        Of each field.
    keep : bool
        What is not converted may be handed on as it is; else it is copied, as the slot will be filled again.
    """

    def __init__(self, pipelines: Sequence[FieldPipeline], *, keep: bool) -> None:
        self._converters = [pipeline.converter for pipeline in pipelines]
        self._others = [pipeline.others for pipeline in pipelines]
        self._changes_nothing = all(converter.changes_nothing for converter in self._converters)
        self._finishes, self._keep = any(self._others), keep

    def num_together(self, batch_size: int, *, gathered: bool = False) -> int:
        """Batches that are made with one call; ``gathered``: of samples that have to be copied for it."""
        first = self._converters[0]
        if first.makes_csr:  # which torch does not cut
            return 1
        if self._keep and not gathered:
            return 1 << 30 if self._changes_nothing else 1
        together = ROWS_BYTES if isinstance(first, RowConverter) else GROUP_BYTES
        return max(1, together // max(1, batch_size * first.sample_bytes))

    def make(self, samples: Fields, batch_size: int, *, gathered: bool = False) -> list[Tensors]:
        """Batches of these samples; detached, so that changing one in place leaves autograd's view of others alone."""
        keep = self._keep or gathered
        fields = [convert(field, keep) for convert, field in zip(self._converters, samples, strict=True)]
        if len(samples[0]) <= batch_size:
            return [tuple(field.data for field in fields)]
        batches = zip(*(field.split(batch_size) for field in fields), strict=True)
        return [tuple(field.data for field in batch) for batch in batches]

    def finish(self, batch: Tensors) -> tuple[Any, ...]:
        """Apply the transforms that are not part of the conversion."""
        if not self._finishes:
            return batch
        return tuple(_apply(others, field) for others, field in zip(self._others, batch, strict=True))


def _apply(transforms: Sequence[Any], field: Any) -> Any:
    for transform in transforms:
        field = transform(field)
    return field


class Passthrough:
    """Hands on what a slot holds, all of it."""

    def num_together(self, batch_size: int, *, gathered: bool = False) -> int:
        return 1

    def make(self, samples: Fields, batch_size: int, *, gathered: bool = False) -> list[Fields]:
        return [samples]

    def finish(self, batch: Fields) -> Fields:
        return batch
