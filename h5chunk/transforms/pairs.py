"""Batches as tuples or dicts, with one item for each field: a tensor, or what is made of two tensors."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


class Pair(tuple[Any, ...]):
    """Base class of the named tuples of the two tensors that a batch may have of a field.

    They are made of two tensors, or of one iterable, as transformers' Trainer makes a tuple again on its device.
    """

    __slots__ = ()

    def __new__(cls, *tensors: Any) -> Pair:
        return super().__new__(cls, *(tensors if len(tensors) > 1 else tensors[0]))


class Padded(Pair, namedtuple("Padded", ("values", "lengths"))):
    """Samples that differ in length: padded to the longest, and their lengths; or a single sample, and its length."""

    __slots__ = ()


class Packed(Pair, namedtuple("Packed", ("values", "offsets"))):
    """Samples that differ in length: concatenated, and their offsets, which begin with 0 and end with the total."""

    __slots__ = ()


class HeldOut(Pair, namedtuple("HeldOut", ("inputs", "targets"))):
    """Rows of a matrix, of which some entries are held out: the other entries, and these."""

    __slots__ = ()


@dataclass(frozen=True)
class Kind:
    """How an item is made of the two tensors of a field, in a batch and in a single sample, and split into them again.

    A single sample of different length has a length as its second tensor. Functions after the conversion get the first
    ``num_changed`` tensors. If ``packs``, samples are concatenated in the first, and the second has their offsets.
    """

    of_batch: Callable[[Any, Any], Any]
    of_sample: Callable[[Any, Any], Any]
    split: Callable[[Any], Iterable[torch.Tensor]] = iter
    num_changed: int = 1
    packs: bool = False


def _nested(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _first(values: torch.Tensor, _length: torch.Tensor) -> torch.Tensor:
    return values


def _parts(nested: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return nested.values(), nested.offsets()


PADDED, PACKED = Kind(Padded, Padded), Kind(Packed, Padded, packs=True)
NESTED = Kind(_nested, _first, _parts, packs=True)
HELD_OUT = Kind(HeldOut, HeldOut, num_changed=2)


def num_tensors(kind: Kind | None) -> int:
    """Return the number of tensors of which an item is made."""
    return 1 if kind is None else 2


def num_changed(kind: Kind | None) -> int:
    """Return the number of tensors of a field that functions change after the conversion."""
    return 1 if kind is None else kind.num_changed


def is_packed(kind: Kind | None) -> bool:
    """Return whether samples that differ in length are concatenated."""
    return kind is not None and kind.packs


@dataclass(frozen=True)
class Items:
    """Makes a batch, or a sample, of the tensors of its fields, and takes the tensors out of it again.

    A batch is a tuple, or a dict if ``as_dict``, with one item for each field. ``kinds`` has the kind of item of each
    field by name, in order; None for an item that is a tensor.
    """

    kinds: Mapping[str, Kind | None]
    as_dict: bool = False

    @property
    def are_tensors(self) -> bool:
        """Whether a tuple of the tensors already is the batch."""
        return not self.as_dict and not any(self.kinds.values())

    def __call__(self, tensors: Iterable[Any]) -> Any:
        """Return a batch. ``tensors`` are in the order of the fields."""
        return self._made(tensors, (None if kind is None else kind.of_batch for kind in self.kinds.values()))

    def sample(self, tensors: Iterable[Any]) -> Any:
        """Return a single sample."""
        return self._made(tensors, (None if kind is None else kind.of_sample for kind in self.kinds.values()))

    def _made(self, tensors: Iterable[Any], makers: Iterable[Callable[[Any, Any], Any] | None]) -> Any:
        left = iter(tensors)
        items = (next(left) if make is None else make(next(left), next(left)) for make in makers)
        return dict(zip(self.kinds, items, strict=True)) if self.as_dict else tuple(items)

    def tensors(self, batch: Any) -> Iterator[torch.Tensor]:
        """Yield the tensors of a batch, in the order of the fields."""
        for number, (name, kind) in enumerate(self.kinds.items()):
            item = batch[name if self.as_dict else number]
            yield from [item] if kind is None else kind.split(item)
