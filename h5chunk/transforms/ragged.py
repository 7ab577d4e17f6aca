"""Batches of samples that differ in length: padded to the longest of the batch, or packed one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from h5chunk.errors import OptionError
from h5chunk.plan.draws import Draws
from h5chunk.store.read.ragged import SeriesField
from h5chunk.transforms.csr import _SAME_SIZE, Allocate, CsrRows


class _Lengths:
    """Base class of the transforms for samples that differ in length."""

    def __call__(self, batch: Any) -> Any:
        raise OptionError(f"{self} is for a field whose samples differ in length: put it first, or leave it out")


@dataclass(frozen=True)
class Pad(_Lengths):
    """Return samples that differ in length as two tensors: padded to the longest of the batch, and their lengths.

    The first is (batch_size, longest, ...), the second (batch_size,) int64. Functions after this one get the first.

    Parameters
    ----------
    value : float
        What is put behind shorter samples; the type of the field must be able to hold it.
    """

    value: float = 0


@dataclass(frozen=True)
class Pack(_Lengths):
    """Return samples that differ in length as two tensors: all samples one after the other, and the offset of each.

    The first is (total, ...), the second (batch_size + 1,) int64, from 0 to the total: as for
    ``torch.nested.nested_tensor_from_jagged(values, offsets)``, and as the ``cu_seqlens`` of attention kernels.
    Functions after this one get the first.
    """


LENGTH_TRANSFORMS = (Pad, Pack)


def packs(transforms: Any) -> bool:
    """Return whether transforms, a list or lists by field, pack samples instead of padding them."""
    lists = transforms.values() if isinstance(transforms, Mapping) else [transforms or ()]
    return any(isinstance(each, Pack) for part in lists for each in part)


class RaggedConverter:
    """Make batches of a field whose samples differ in length; ``allocate`` gives host memory for them."""

    changes_nothing = False
    is_uncut = True
    num_outputs = 2

    def __init__(self, transforms: Sequence[Any], field: SeriesField, allocate: Allocate) -> None:
        self._form = transforms[0] if transforms else Pad()
        self.packs = isinstance(self._form, Pack)
        self.dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
        self._step, self._allocate = field.step_shape, allocate
        self._step_items = math.prod(field.step_shape)
        self.sample_bytes = field.grid.sample_bytes
        if isinstance(self._form, Pad):
            self._padding = _padding(self._form, field, self.dtype)

    def prepare(self, device: torch.device) -> None:
        """Do nothing: nothing is compiled."""

    def release(self) -> None:
        """Do nothing: the converter holds no resources."""

    def __call__(self, rows: CsrRows, keep: bool, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values, and lengths or offsets, on the device of the rows."""
        counts = rows.host_counts
        lengths = torch.from_numpy(counts // self._step_items)
        if self.packs:
            values = self._packed(rows, counts, keep)
            offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
            torch.cumsum(lengths, 0, out=offsets[1:])
            return values.view(-1, *self._step), offsets.to(rows.starts.device)
        longest = int(lengths.max()) if len(lengths) else 0
        padded = self._padded(rows, counts, longest * self._step_items)
        return padded.view(len(lengths), longest, *self._step), lengths.to(rows.starts.device)

    def _packed(self, rows: CsrRows, counts: np.ndarray, keep: bool) -> torch.Tensor:
        if rows.numbers is None:
            start = int(rows.host_starts[rows.first])
            values = rows.indices[start : start + int(counts.sum())]
            if keep or values.device.type != "cpu":
                return values if keep else values.clone()
            return self._allocate((len(values),), self.dtype).copy_(values)
        if rows.starts.device.type != "cpu":
            starts = torch.from_numpy(np.cumsum(counts) - counts).to(rows.starts.device)
            on_device = torch.from_numpy(counts).to(rows.starts.device)
            firsts = rows.starts[rows.numbers.on_device]
            total = int(counts.sum())
            positions = torch.repeat_interleave(firsts - starts, on_device, output_size=total)
            return self._take(rows, positions + torch.arange(total, device=positions.device))
        values = self._allocate((int(counts.sum()),), self.dtype)
        out, source, done = values.numpy(), rows.indices.numpy(), 0
        firsts = rows.host_starts[rows.host_numbers]
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            out[done : done + count] = source[first : first + count]
            done += count
        return values

    def _padded(self, rows: CsrRows, counts: np.ndarray, longest: int) -> torch.Tensor:
        if rows.starts.device.type != "cpu":
            firsts = torch.from_numpy(rows.host_starts[rows.host_numbers]).to(rows.starts.device)
            steps = torch.arange(longest, device=firsts.device)
            inside = steps < torch.from_numpy(counts).to(firsts.device)[:, None]
            same = _SAME_SIZE[self.dtype.itemsize]
            padding = self._padding.to(firsts.device).view(same)
            if not len(rows.indices):
                return padding.expand(len(counts), longest).clone().view(self.dtype)
            positions = (firsts[:, None] + steps).clamp_(max=len(rows.indices) - 1)
            return torch.where(inside, self._take(rows, positions).view(same), padding).view(self.dtype)
        padded = self._allocate((len(counts), longest), self.dtype)
        out, source = padded.numpy(), rows.indices.numpy()
        firsts = rows.host_starts[rows.host_numbers]
        for row, first, count in zip(out, firsts.tolist(), counts.tolist(), strict=True):
            row[:count] = source[first : first + count]
            row[count:] = self._padding
        return padded

    def _take(self, rows: CsrRows, positions: torch.Tensor) -> torch.Tensor:
        """Index the values; torch does not index unsigned integers larger than a byte."""
        return rows.indices.view(_SAME_SIZE[self.dtype.itemsize])[positions].view(self.dtype)


def _padding(form: Pad, field: SeriesField, dtype: torch.dtype) -> torch.Tensor:
    """Return the padding value in a field's dtype; raise OptionError if the dtype cannot represent it."""
    try:
        value = np.array(form.value).astype(field.dtype)
    except (TypeError, ValueError):
        raise OptionError(f"Pad: value is {form.value!r}: give a number") from None
    if field.dtype.kind in "biu" and value != form.value:
        raise OptionError(f"Pad: value is {form.value!r}, which {field.dtype}, the type of {field.name!r}, cannot hold")
    return torch.from_numpy(value.reshape(())).to(dtype)
