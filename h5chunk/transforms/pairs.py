"""Batches as dicts, with one item for each field: a tensor, or a pair of tensors."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


class Pair(tuple[Any, ...]):
    """Base class of the named tuples of the two tensors that a batch may have of a field.

    They are made of two tensors, or of one iterable, as transformers' Trainer makes a tuple again on its device.
    Functions after the conversion get the first ``num_changed`` tensors.
    """

    __slots__ = ()
    num_changed: ClassVar = 1

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
    num_changed = 2


def num_tensors(kind: type[Pair] | None) -> int:
    """Return the number of tensors that a batch has of a field."""
    return 1 if kind is None else 2


def num_changed(kind: type[Pair] | None) -> int:
    """Return the number of tensors of a field that functions change after the conversion."""
    return 1 if kind is None else kind.num_changed


@dataclass(frozen=True)
class ByName:
    """Makes a batch, or a sample, a dict with an item per field, and takes the tensors out of such a dict again.

    ``kinds`` has the type of pair of each field by name, in order; None for a field of one tensor.
    """

    kinds: Mapping[str, type[Pair] | None]

    def __call__(self, tensors: Iterable[Any]) -> dict[str, Any]:
        """Return the items by field. ``tensors`` are in the order of the fields."""
        left = iter(tensors)
        return {name: next(left) if kind is None else kind(next(left), next(left)) for name, kind in self.kinds.items()}

    def tensors(self, items: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the tensors of all items, in the order of the fields."""
        for name, kind in self.kinds.items():
            yield from [items[name]] if kind is None else items[name]

    @property
    def of_samples(self) -> ByName:
        """The same for single samples, which have a length, but no offsets."""
        return ByName({name: Padded if kind is Packed else kind for name, kind in self.kinds.items()})
