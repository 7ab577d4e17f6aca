"""Batches that torch's DataLoader sends to the main process without another copy.

A worker of a DataLoader reads a batch as a unit, into memory that it shares with the main process. `Batch` presents
this batch as the sequence of samples that torch expects from ``__getitems__``. torch's default ``collate_fn`` then
returns the batch unchanged, because this module registers a function for it.

A sample index is relative to a subset of a file, so the same index in another subset refers to another sample.
Therefore a sampler tags each batch of indices with a key of the subset, and a data set of another subset rejects it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, overload

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from h5chunk.errors import FieldError, OptionError


class Sample(tuple[Any, ...]):
    """One sample: a tuple of its fields."""

    __slots__ = ()


class Batch(Sequence[Sample]):
    """A batch as a sequence of samples. It is stored by field: (batch_size, ...) tensors, or lists of str.

    ``packed`` is the index of the field that `Pack` made, in which samples are concatenated; the next field then holds
    their offsets.
    """

    def __init__(
        self, fields: tuple[Any, ...] | list[Any], num_samples: int | None = None, packed: int | None = None
    ) -> None:
        self.fields, self._packed = fields, packed
        self._num_samples = len(fields[0]) if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._num_samples

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not len(self):  # torch looks at the first sample even of an empty batch
            return Sample()
        if self._packed is None:
            return Sample(field[index] for field in self.fields)
        first, (start, stop) = self._packed, self.fields[self._packed + 1][index : index + 2].tolist()
        own = self.fields[first][start:stop], torch.tensor(stop - start)
        others = [field[index] for field in (*self.fields[:first], *self.fields[first + 2 :])]
        return Sample([*others[:first], *own, *others[first:]])

    def stacked(self) -> Batch:
        """Return the batch with the separately decoded images of each field stacked into one tensor.

        Raise FieldError if the images differ in size.
        """
        images = [
            isinstance(field, list) and bool(field) and isinstance(field[0], torch.Tensor) for field in self.fields
        ]
        if not any(images):
            return self
        pairs = list(zip(self.fields, images, strict=True))
        sizes = {tuple(image.shape) for field, is_image in pairs if is_image for image in field}
        if len(sizes) > 1:
            one, other = (" x ".join(map(str, size)) for size in sorted(sizes)[:2])
            raise FieldError(
                f"the images of a batch differ in size ({one}, {other}): pass ChunkDataset a transform that makes them "
                "equal in size, such as transform=[RandomResizedCrop(224)] or [Resize(256), CenterCrop(224)]"
            )
        return Batch([torch.stack(field) if is_image else field for field, is_image in pairs], len(self))

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))


def no_samples(sample: Sample) -> Sequence[Sample]:
    """Return an empty batch with the shapes and types that torch would collate from such samples.

    If torch cannot collate the sample, return an empty list, which the user's ``collate_fn`` has to handle.
    """
    with suppress(TypeError, RuntimeError):
        return Batch([_emptied(default_collate([value])) for value in sample], 0)
    return []


def _emptied(collated: Any) -> Any:
    if isinstance(collated, torch.Tensor):
        return collated[:0]
    if isinstance(collated, Mapping):
        return {name: _emptied(value) for name, value in collated.items()}
    if any(isinstance(value, (str, bytes)) for value in collated):
        return []
    emptied = [_emptied(value) for value in collated]
    return type(collated)(*emptied) if hasattr(collated, "_fields") else emptied


def collate(batch: Sequence[Any]) -> Any:
    """Return the fields of a `Batch` as a tuple, without a copy. Collate any other batch as torch does.

    As the ``collate_fn`` of a DataLoader, it returns what torch's default returns, but does not make the first sample,
    which takes time if batches are sparse.
    """
    return batch.fields if isinstance(batch, Batch) else default_collate(list(batch))


def _collate_samples(batch: Sequence[Sample], *, collate_fn_map: Any = None) -> Any:
    if isinstance(batch, Batch):
        return batch.fields
    return default_collate([tuple(sample) for sample in batch])


default_collate_fn_map.setdefault(Sample, _collate_samples)


Numbering = tuple[int, int]  # a subset's key: its size, and a checksum of its sample numbers in the file (0 for all)


class TaggedBatch(list[int]):
    """A batch of sample indices, with the key of their subset, and the epoch and seed for random transforms.

    ``repeats``, (n,), distinguishes the repetitions of a sample in an epoch. It is added to the sample's number in the
    file when random numbers are drawn: see `h5chunk.plan.draws`.
    """

    def __init__(
        self,
        numbers: Iterable[int] = (),
        numbering: Numbering | None = None,
        epoch: int = 0,
        seed: int = 0,
        repeats: np.ndarray | int = 0,
    ) -> None:
        super().__init__(numbers)
        self.numbering, self.epoch, self.seed, self.repeats = numbering, epoch, seed, repeats


def check_numbering(drawn: Numbering, numbering: Numbering) -> None:
    """Raise OptionError if sample indices were drawn for one subset, but are used with another.

    A different file with equally many samples is allowed, because it may contain other fields of the same samples.
    """
    if drawn == numbering:
        return
    expected = f"{numbering[0]}" if drawn[0] != numbering[0] else f"{numbering[0]} other samples"
    raise OptionError(
        f"this batch was drawn from a data set of {drawn[0]} samples, but is read from one of {expected}: pass the "
        "same data set or subset to the loader and to the ChunkSampler"
    )


def sample_numbers(indices: Any) -> np.ndarray:
    """Convert sample indices to an int64 array. Raise IndexError for a mask, or for values that are not integers."""
    if isinstance(indices, TaggedBatch):
        return np.array(indices, np.int64)
    try:
        numbers = np.asarray(indices)
    except (TypeError, ValueError):
        raise IndexError("the indices are lists of different lengths: pass an integer or a list of integers") from None
    if numbers.size and numbers.dtype.kind not in "iu":
        raise IndexError(f"the indices are of type {numbers.dtype}: pass integers (for a mask, mask.nonzero()[0])")
    return numbers.astype(np.int64, copy=False)
