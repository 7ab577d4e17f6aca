"""Batches that torch's DataLoader takes without copying them again.

A whole batch is read at once, into memory that a DataLoader worker shares with the main process. `Batch` shows it to
torch as the sequence of samples that torch expects of ``__getitems__``, and torch's default ``collate_fn`` is told
(through its documented map of types) that such samples are together already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map


class Sample(tuple[Any, ...]):
    """One sample: a tuple of its fields."""

    __slots__ = ()


class Batch(Sequence[Sample]):
    """A batch as a sequence of samples.

    Parameters
    ----------
    fields : tuple
        Of each field: a (batch_size, ...) tensor, or a list of str.
    """

    def __init__(self, fields: tuple[Any, ...]) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return len(self.fields[0])

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not len(self):  # a last batch that only other ranks have: torch asks what its first sample would be
            return Sample()
        return Sample(field[index] for field in self.fields)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))


def collate(batch: Sequence[Any]) -> Any:
    """What a DataLoader's ``collate_fn`` gives: the tuple of fields of a `Batch`, uncopied; others as torch's does."""
    return batch.fields if isinstance(batch, Batch) else default_collate(list(batch))


def _collate_samples(batch: Sequence[Sample], *, collate_fn_map: Any = None) -> Any:
    if isinstance(batch, Batch):
        return batch.fields
    return default_collate([tuple(sample) for sample in batch])


default_collate_fn_map.setdefault(Sample, _collate_samples)
