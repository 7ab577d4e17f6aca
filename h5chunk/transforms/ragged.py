"""Transforms and batches for samples that differ in length: padded to the longest of the batch, or concatenated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from h5chunk.errors import OptionError
from h5chunk.plan.draws import Draws
from h5chunk.store.read.ragged import SeriesField
from h5chunk.transforms.converter import Converter
from h5chunk.transforms.csr import Allocate, CsrRows
from h5chunk.transforms.pairs import NESTED, PACKED, PADDED, Kind, is_packed
from h5chunk.transforms.segments import SAME_SIZE, as_array, positions_of, starts_of


class _Lengths:
    """Base class of the transforms for samples that differ in length."""

    def __call__(self, batch: Any) -> Any:
        raise OptionError(f"{self} is for a field whose samples differ in length: put it first, or leave it out")


@dataclass(frozen=True)
class Pad(_Lengths):
    """Return samples that differ in length padded to the longest of the batch, and their lengths.

    A batch has them as one item, a named tuple of ``values``, (batch_size, longest, ...), and ``lengths``,
    (batch_size,) int64::

        for tokens, labels in ChunkLoader(dataset, 64):
            mask = torch.arange(tokens.values.shape[1]) < tokens.lengths[:, None]

    Functions that follow get only the values.

    Parameters
    ----------
    value : float
        The value that is appended to shorter samples. The dtype of the field must be able to represent it.
    """

    value: float = 0


@dataclass(frozen=True)
class Pack(_Lengths):
    """Return samples that differ in length concatenated, and their offsets.

    A batch has them as one item, a named tuple of ``values``, (total, ...), and ``offsets``, (batch_size + 1,) int64,
    from 0 to the total, like the ``cu_seqlens`` of attention kernels. Functions that follow get only the values. A
    single sample has ``values`` and ``lengths``.
    """


@dataclass(frozen=True)
class Nested(_Lengths):
    """Return samples that differ in length as one nested tensor of torch, with the layout ``torch.jagged``.

    Its shape is (batch_size, j, ...), where j differs between samples, and its values and offsets are those of `Pack`.
    Functions that follow get the values, (total, ...). A single sample is a plain tensor.
    """


KINDS: dict[type, Kind] = {Pad: PADDED, Pack: PACKED, Nested: NESTED}
LENGTH_TRANSFORMS = (Pad, Pack, Nested)


def packs(transforms: Sequence[Any]) -> bool:
    """Return whether the transforms of a field concatenate samples that differ in length."""
    return any(isinstance(each, (Pack, Nested)) for each in transforms)


class RaggedConverter(Converter):
    """Makes the batches of a field whose samples differ in length. ``allocate`` returns host memory for them."""

    is_uncut = True
    whole_by = "Pad, Pack or Nested"

    def __init__(self, transforms: Sequence[Any], field: SeriesField, allocate: Allocate) -> None:
        self._form = transforms[0] if transforms else Pad()
        self.pair = KINDS[type(self._form)]
        bits = field.dtype.names  # of a type that NumPy lacks
        self.dtype = getattr(torch, bits[0]) if bits else torch.from_numpy(np.empty(0, field.dtype)).dtype
        self._step, self._allocate = field.step_shape, allocate
        self._step_items = math.prod(field.step_shape)
        self.sample_bytes = field.grid.sample_bytes
        if isinstance(self._form, Pad):
            self._padding = _padding(self._form, field, self.dtype)

    def __call__(self, samples: CsrRows, keep: bool, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values, and lengths or offsets, on the device of the rows."""
        rows, counts = samples, samples.host_counts
        lengths = torch.from_numpy(counts // self._step_items)
        if is_packed(self.pair):
            offsets = torch.from_numpy(starts_of(lengths.numpy()))
            return self._packed(rows, counts, keep).view(-1, *self._step), offsets.to(rows.starts.device)
        longest = int(lengths.max()) if len(lengths) else 0
        if rows.starts.device.type != "cpu":
            padded = self._padded_on_gpu(rows, lengths, longest)
        else:
            padded = self._padded(rows, counts, longest * self._step_items)
        return padded.view(len(lengths), longest, *self._step), lengths.to(rows.starts.device)

    def _packed(self, rows: CsrRows, counts: np.ndarray, keep: bool) -> torch.Tensor:
        on_gpu, total = rows.starts.device.type != "cpu", int(counts.sum())
        if rows.numbers is None:
            start = int(rows.host_starts[rows.first])
            values = rows.indices[start : start + total]
            if keep or on_gpu:
                return values if keep else values.clone()
            return self._allocate((total,), self.dtype).copy_(values)
        if on_gpu:
            return self._packed_on_gpu(rows, torch.from_numpy(counts // self._step_items))
        values = self._allocate((total,), self.dtype)
        out, source, done = as_array(values), as_array(rows.indices), 0
        firsts = rows.host_firsts
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            out[done : done + count] = source[first : first + count]
            done += count
        return values

    def _packed_on_gpu(self, rows: CsrRows, lengths: torch.Tensor) -> torch.Tensor:
        firsts, steps = self._on_gpu(rows)
        return steps[positions_of(firsts, lengths.to(firsts.device), int(lengths.sum()))].view(self.dtype)

    def _padded(self, rows: CsrRows, counts: np.ndarray, longest: int) -> torch.Tensor:
        padded = self._allocate((len(counts), longest), self.dtype)
        out, source, padding = as_array(padded), as_array(rows.indices), as_array(self._padding)
        firsts = rows.host_firsts
        for row, first, count in zip(out, firsts.tolist(), counts.tolist(), strict=True):
            row[:count] = source[first : first + count]
            row[count:] = padding
        return padded

    def _padded_on_gpu(self, rows: CsrRows, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        firsts, steps = self._on_gpu(rows)
        padding = self._padding.to(firsts.device).view(steps.dtype)
        if not len(steps):
            return padding.expand(len(lengths), longest, self._step_items).clone().view(self.dtype)
        numbers = torch.arange(longest, device=firsts.device)
        positions = (firsts[:, None] + numbers).clamp_(max=len(steps) - 1)
        inside = numbers < lengths.to(firsts.device)[:, None]
        return torch.where(inside[:, :, None], steps[positions], padding).view(self.dtype)

    def _on_gpu(self, rows: CsrRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first step of each selected row, and all steps as integers, as torch does not index uint16."""
        firsts = torch.from_numpy(rows.host_firsts // self._step_items)
        steps = rows.indices.view(SAME_SIZE[self.dtype.itemsize]).view(-1, self._step_items)
        return firsts.to(rows.starts.device), steps


def _padding(form: Pad, field: SeriesField, dtype: torch.dtype) -> torch.Tensor:
    """Return the padding value in a field's dtype; raise OptionError if the dtype cannot represent it."""
    try:
        value = np.array(form.value).astype(np.float32 if field.dtype.names else field.dtype)
    except (TypeError, ValueError):
        raise OptionError(f"Pad: value is {form.value!r}: pass a number") from None
    if field.dtype.kind in "biu" and value != form.value:
        raise OptionError(f"Pad: value is {form.value!r}, which {field.dtype}, the type of {field.name!r}, cannot hold")
    return torch.from_numpy(value.reshape(())).to(dtype)
