"""Batches that torch's DataLoader sends to the main process without another copy.

A worker of a DataLoader reads a batch as a unit, into memory that it shares with the main process. `Batch` presents
this batch as the list of samples that torch expects from ``__getitems__``. torch's default ``collate_fn`` then
returns the batch unchanged, because this module registers a function for it.

A sample index is relative to a subset of a file, so the same index in another subset refers to another sample.
Therefore a sampler tags each batch of indices with a key of the subset, and a data set of another subset rejects it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import register_pytree_node
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from h5chunk.errors import FieldError, OptionError
from h5chunk.feed.shared import SharedFields
from h5chunk.plan.draws import Draws
from h5chunk.transforms.pairs import Items


class Sample(tuple[Any, ...]):
    """A sample of a `Batch`: a tuple of its fields, whose type tells torch's default ``collate_fn`` of the batch."""

    __slots__ = ()


class NamedSample(dict[str, Any]):
    """The same as a dict."""


class SharedTuple(tuple[Any, ...]):
    """A batch as a tuple, in memory that a worker shares. Another process receives a plain tuple, without a copy."""

    _parts: tuple[Items, SharedFields]

    def __new__(cls, items: Items, fields: SharedFields) -> SharedTuple:
        self = super().__new__(cls, items(fields))
        self._parts = items, fields
        return self

    def __reduce__(self) -> Any:
        items, fields = self._parts
        return items, (fields,)


class SharedDict(dict[str, Any]):
    """The same as a dict."""

    def __init__(self, items: Items, fields: SharedFields) -> None:
        self._made = items(fields)
        super().__init__(self._made)
        self._items, self._fields = items, fields

    def __reduce__(self) -> Any:
        # the worker's own collate_fn may have changed the dict
        is_same = len(self) == len(self._made) and all(self.get(name) is item for name, item in self._made.items())
        return (self._items, (self._fields,)) if is_same else (dict, (dict(self),))


class Batch(list[Any]):
    """A batch as a list of samples. It is stored by field: (batch_size, ...) tensors, or lists of str.

    ``packed`` has the indices of the tensors that `Pack` made, in which samples are concatenated; each next tensor has
    their offsets.

    A ``collate_fn`` may use it as any list. The samples are made when they are first needed, because most batches are
    collated without them. ``fields`` is None once the list has been changed. ``makes_items`` makes the samples and the
    collated batch of the tensors of the fields; without it, they are tuples of these. ``draws`` are the random numbers
    of its samples.
    """

    makes_items: Items | None = None
    draws: Draws | None = None

    def __init__(
        self, fields: tuple[Any, ...] | list[Any], num_samples: int | None = None, packed: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.fields: Any = fields
        self.packed, self._is_made = packed, False
        self._num_samples = len(fields[0]) if num_samples is None else num_samples

    def __len__(self) -> int:
        return super().__len__() if self._is_made else self._num_samples

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._is_made else map(self._sample, range(self._num_samples))

    def __getitem__(self, index: Any) -> Any:
        if self._is_made:
            return super().__getitem__(index)
        if isinstance(index, slice):
            return [self._sample(number) for number in range(self._num_samples)[index]]
        # torch looks at the first sample even of an empty batch
        return self._sample(range(self._num_samples)[index]) if self._num_samples else Sample()

    def _sample(self, number: int) -> Sample | NamedSample:
        values = self._values(number)
        if self.makes_items is None or self.makes_items.are_tensors:
            return Sample(values)
        made = self.makes_items.sample(values)
        return NamedSample(made) if self.makes_items.as_dict else Sample(made)

    def _values(self, number: int) -> Iterator[Any]:
        for at, field in enumerate(self.fields):
            if at in self.packed:
                start, stop = self.fields[at + 1][number : number + 2].tolist()
                yield from (field[start:stop], torch.tensor(stop - start))
            elif at - 1 not in self.packed:
                yield field[number]

    def __radd__(self, before: list[Any]) -> list[Any]:
        return before + list(self)

    def make(self, *, to_change: bool) -> None:
        """Make all samples, so that the methods of a list can read them, or change them."""
        if not self._is_made:
            samples = list(self)
            self._is_made = True
            super().extend(samples)
        if to_change:
            self.fields = None

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return list, (list(self),)

    @property
    def collated(self) -> Any:
        """The fields as a tuple or a dict; None once the list has been changed."""
        if self.fields is None or self.makes_items is None or self.makes_items.are_tensors:
            return self.fields
        if not isinstance(self.fields, SharedFields):
            return self.makes_items(self.fields)
        return (SharedDict if self.makes_items.as_dict else SharedTuple)(self.makes_items, self.fields)

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
                f"the images of a batch differ in size ({one}, {other}): pass ChunkDataset transforms that make them "
                "equal in size, such as transforms=[RandomResizedCrop(224)] or [Resize(256), CenterCrop(224)]"
            )
        fields = tuple(torch.stack(field) if is_image else field for field, is_image in pairs)
        stacked = Batch(fields, len(self), self.packed)
        stacked.draws = self.draws
        return stacked


def _of_list(name: str, *, changes: bool) -> Callable[..., Any]:
    method = getattr(list, name)

    def call(self: Batch, *args: Any, **options: Any) -> Any:
        self.make(to_change=changes)
        # a method of a list does not see the samples of a batch that has not made them
        return method(self, *[list(value) if isinstance(value, Batch) else value for value in args], **options)

    return functools.update_wrapper(call, method)


CHANGES = "__setitem__ __delitem__ __iadd__ __imul__ append clear extend insert pop remove reverse sort"
READS = "__add__ __mul__ __rmul__ __contains__ __reversed__ __repr__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ copy "
READS += "count index"
for _name in (CHANGES + " " + READS).split():
    setattr(Batch, _name, _of_list(_name, changes=_name in CHANGES.split()))


def no_samples(sample: Any) -> list[Any]:
    """Return an empty batch with the shapes and types that torch would collate from such samples.

    If torch cannot collate the sample, return an empty list, which the user's ``collate_fn`` has to handle.
    """
    with suppress(TypeError, RuntimeError):
        return Batch(_emptied(default_collate([sample])), 0)
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
    """Return the fields of a `Batch` as a tuple or a dict, without a copy. Collate any other batch as torch does.

    As the ``collate_fn`` of a DataLoader, it returns what torch's default returns, but does not make the first sample,
    which takes time if batches are sparse.
    """
    unchanged = batch.collated if isinstance(batch, Batch) else None
    return default_collate(list(batch)) if unchanged is None else unchanged


def _collate_samples(batch: Sequence[Sample | NamedSample], *, collate_fn_map: Any = None) -> Any:
    if isinstance(batch, Batch) and batch.fields is not None:
        return batch.collated
    return default_collate([tuple(sample) if isinstance(sample, tuple) else dict(sample) for sample in batch])


default_collate_fn_map.setdefault(Sample, _collate_samples)
default_collate_fn_map.setdefault(NamedSample, _collate_samples)


def _register(kind: type, plain: Callable[[Iterable[Any]], Any]) -> None:
    """Tell PyTree how to look into a container. It leaves others unchanged, and so do torchvision's transforms."""
    register_pytree_node(kind, lambda values: (list(values), None), lambda values, _: plain(values))


def _register_dict(kind: type) -> None:
    register_pytree_node(
        kind, lambda each: ([*each.values()], [*each]), lambda values, names: dict(zip(names, values, strict=True))
    )


_register_dict(NamedSample)
_register_dict(SharedDict)
_register(Sample, tuple)
_register(SharedFields, tuple)
_register(SharedTuple, tuple)
_register(Batch, list)


Numbering = tuple[int, int]  # a subset's key: its size, and a checksum of its sample numbers in the file (0 for all)


class TaggedBatch(list[int]):
    """A batch of sample indices, with the key of their subset, and the epoch and seed for random transforms.

    ``repeats``, (n,), distinguishes the repetitions of a sample in an epoch. It is added to the sample's number in the
    file when random numbers are drawn: see `h5chunk.plan.draws`. ``groups`` has the group of each sample, so that
    only others of it replace the sample, or is None.
    """

    def __init__(
        self,
        numbers: Iterable[int] = (),
        numbering: Numbering | None = None,
        epoch: int = 0,
        seed: int = 0,
        repeats: np.ndarray | int = 0,
        groups: list[Any] | None = None,
    ) -> None:
        super().__init__(numbers)
        self.numbering, self.epoch, self.seed, self.repeats = numbering, epoch, seed, repeats
        self.groups = groups

    def one_by_one(self) -> Iterator[TaggedIndex]:
        """Yield the indices, each of which keeps what the batch knows of it."""
        repeats = np.broadcast_to(self.repeats, len(self))
        for index, repeat in zip(self, repeats, strict=True):
            tagged = TaggedIndex(index)
            tagged.batch = TaggedBatch([index], self.numbering, self.epoch, self.seed, int(repeat))
            yield tagged


class TaggedIndex(int):
    """An index of a `TaggedBatch`."""

    batch: TaggedBatch  # with this index only


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
