"""Make batches of the rows of a matrix, dense (`Dense`) or sparse (`Csr`).

`h5chunk.transforms.values` computes their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from h5chunk import native
from h5chunk.errors import OptionError, human_bytes
from h5chunk.machine import KeptThreads, own_cores
from h5chunk.plan.draws import Draws
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.transforms.compiled import DenseKernel
from h5chunk.transforms.converter import Converted, Converter, Loaded, loaded
from h5chunk.transforms.csr import (
    Allocate,
    CsrRows,
    Entries,
    Filled,
    Share,
    alone,
    entries_of,
    index_dtype,
    scatter,
    scatter_natively,
)
from h5chunk.transforms.hold_out import HoldOut
from h5chunk.transforms.pairs import HELD_OUT, num_tensors
from h5chunk.transforms.segments import make_csr
from h5chunk.transforms.values import L2, Binarize, Log1p, ValueTransform, dense_values, make_rule

DENSE_THREADS = 4  # threads that make batches dense on the host
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class _Layout:
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS + INTEGERS:
            name = type(self).__name__
            raise OptionError(f"{name}: dtype is {self.dtype!r}: pass a torch.dtype of numbers, such as torch.float32")


class Dense(_Layout):
    """Make rows dense: (batch_size, columns). Without `Dense` and `Csr`, rows become dense float32.

    Parameters
    ----------
    dtype : torch.dtype
        Floating types round values (the maximum of float16 is 65,504). An integer type that cannot
        represent all values of the field raises OptionError.
    """

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        dense = batch.to_dense() if batch.layout == torch.sparse_csr else batch
        return dense.to(self.dtype)


class Csr(_Layout):
    """Return batches as ``torch.sparse_csr`` tensors of shape (batch_size, columns).

    Parameters
    ----------
    dtype : torch.dtype
        Dtype of the values; as for `Dense`.
    """

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        csr = batch if batch.layout == torch.sparse_csr else batch.to_sparse_csr()
        return csr.to(self.dtype)


ROW_TRANSFORMS = (Dense, Csr, Binarize, L2, Log1p, HoldOut)


class RowConverter(Converter):
    """Convert stored rows of a matrix to batches; the rows may be sparse, or dense codes with a scale.

    A value is the stored number divided by the file's scale. Arithmetic is in float32, or in float64 if the result has
    that dtype. The transforms are those of this module, with at most one `Dense` or `Csr`; raise `OptionError` if one
    does not fit the field. ``allocate`` returns host memory for batches.
    """

    together_bytes = 256 << 20  # see scripts/LOG.md
    threads: KeptThreads

    def __init__(self, transforms: Sequence[Any], field: MatrixField | Field, allocate: Allocate) -> None:
        layout = next((transform for transform in transforms if isinstance(transform, (Dense, Csr))), Dense())
        steps = tuple(transform for transform in transforms if isinstance(transform, ValueTransform))
        _check_fit(layout, steps, field)
        self.dtype, self._field, self._allocate = layout.dtype, field, allocate
        self.makes_csr = isinstance(layout, Csr)
        self.hold_out = next((transform for transform in transforms if isinstance(transform, HoldOut)), None)
        self.pair = None if self.hold_out is None else HELD_OUT
        self.is_random = self.hold_out is not None and self.hold_out.each_epoch
        self.is_uncut = self.makes_csr or self.hold_out is not None
        self.whole_by = "Csr" if self.makes_csr else ""
        self.num_columns = math.prod(field.sample_shape)
        self.rule = make_rule(field, self.dtype, steps)
        self.sample_bytes = self.num_columns * self.dtype.itemsize
        if self.makes_csr and isinstance(field, MatrixField):
            per_row = field.num_entries / max(1, field.num_rows)
            self.sample_bytes = 4 + math.ceil(per_row * (4 + self.dtype.itemsize))
        self.sample_bytes *= num_tensors(self.pair)
        self._kernel: DenseKernel | None = None
        self.threads, self._filled = KeptThreads("h5chunk-dense"), Filled()

    def prepare(self, device: torch.device) -> None:
        """Start compiling the kernel that makes sparse rows dense, if the device and the transforms allow it."""
        if self._kernel is not None or self.makes_csr or self.hold_out or not isinstance(self._field, MatrixField):
            return
        l2 = self.rule.steps == (L2(),)
        if DenseKernel.suits(device, self.dtype) and (l2 or not self.rule.steps):
            self._kernel = DenseKernel(partial(_example, self._field, device), self.num_columns, self.rule, l2=l2)

    def __call__(self, samples: CsrRows | torch.Tensor, keep: bool, draws: Draws) -> Converted:
        """Return the batch: (rows, columns), dense or CSR. With ``keep`` it may share memory with the samples.

        With `HoldOut`, return inputs and targets, which share no memory with them.
        """
        rows = samples
        if self.hold_out is not None:
            if isinstance(rows, torch.Tensor):
                return self.hold_out(dense_values(rows, self.rule), draws.epoch)
            return self._held_out(self.parted(rows, draws), rows.starts.device)
        if isinstance(rows, torch.Tensor):
            return dense_values(rows, self.rule)
        if not self.makes_csr:
            out = self._empty(len(rows), rows.starts.device)
            if out.device.type == "cpu":
                self.make_dense(rows, out, self._share, self._filled)
            else:
                self.make_dense(rows, out)
            return out
        entries = entries_of(rows, self.rule, self.num_columns, self._allocate)
        return make_csr(entries.starts, entries.columns, entries.values, (len(rows), self.num_columns))

    def make_dense(self, rows: CsrRows, out: torch.Tensor, share: Share = alone, filled: Filled | None = None) -> None:
        """Fill ``out``, (rows, columns), with the converted rows; ``share`` may use several threads."""
        if out.device.type == "cpu" and scatter_natively(out, rows, self.rule, share, filled):
            return
        if self._kernel is None or not self._kernel(rows, out):
            scatter(out, entries_of(rows, self.rule, self.num_columns), share)

    def load(self, samples: CsrRows | torch.Tensor, draws: Draws) -> list[Loaded]:
        if isinstance(samples, torch.Tensor):
            return super().load(samples, draws)
        if (copied := self._copied(samples)) is not None:
            return [copied]
        shape = len(samples), self.num_columns
        if self.hold_out is None and not self.makes_csr:
            return [Loaded([(shape, self.dtype)], lambda tensors: self.make_dense(samples, tensors[0]))]
        parts = self.parted(samples, draws)
        if self.makes_csr:
            return [loaded(part.starts, part.columns, part.values, num_columns=shape[1]) for part in parts]
        return [Loaded([(shape, self.dtype)], partial(_scatter, part)) for part in parts]

    def _copied(self, rows: CsrRows) -> Loaded | None:
        """Return the starts, columns and values of a CSR batch, if their stored values can be copied natively."""
        rule = self.rule
        is_stored = not rule.steps and rule.is_direct(rows.values, self.dtype)
        if not (self.makes_csr and self.hold_out is None and is_stored and native.available()):
            return None
        total, numbers = int(rows.host_counts.sum()), rows.host_numbers
        dtype = index_dtype(self.num_columns, total)
        source = rows.natively(rule.table_of(rows.values, self.dtype))

        def copy(tensors: Sequence[torch.Tensor]) -> None:
            source.copy(numbers, dtype.itemsize, *(tensor.data_ptr() for tensor in tensors))

        shapes = [((len(rows) + 1,), dtype), ((total,), dtype), ((total,), self.dtype)]
        return Loaded(shapes, copy, self.num_columns)

    def parted(self, rows: CsrRows, draws: Draws) -> tuple[Entries, ...]:
        """Return the converted entries of all rows or, if entries are held out, of the inputs and of the targets."""
        entries = entries_of(rows, self.rule, self.num_columns)
        return (entries,) if self.hold_out is None else self.hold_out.part(entries, draws.epoch)

    def _held_out(self, parts: tuple[Entries, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
        num_rows = len(parts[0].counts)
        if self.makes_csr:
            shape = num_rows, self.num_columns
            return tuple(make_csr(part.starts, part.columns, part.values, shape) for part in parts)
        both = self._empty(2 * num_rows, device)  # one allocation, because a `SingleBuffer` has memory for only one
        outs = both[:num_rows], both[num_rows:]
        for out, part in zip(outs, parts, strict=True):
            scatter(out, part, self._share)
        return outs

    def _share(self, work: Callable[[int], None], parts: range) -> None:
        self.threads.share(work, parts, min(DENSE_THREADS, own_cores()))

    def _empty(self, num_rows: int, device: torch.device) -> torch.Tensor:
        shape = (num_rows, self.num_columns)
        try:
            if device.type != "cpu":
                return torch.empty(shape, dtype=self.dtype, device=device)
            return self._allocate(shape, self.dtype)
        except (MemoryError, ValueError, RuntimeError) as error:  # errors of NumPy, and of torch
            taken = human_bytes(math.prod(shape) * self.dtype.itemsize)
            raise OptionError(
                f"a dense batch of {num_rows} rows and {self.num_columns} columns needs {taken}, more than the "
                "free memory: use a smaller batch_size, or transforms=[Csr()]"
            ) from error


def _scatter(entries: Entries, tensors: Sequence[torch.Tensor]) -> None:
    scatter(tensors[0], entries)


def _example(matrix: MatrixField, device: torch.device) -> CsrRows:
    """Return one row with one entry, in the dtypes of a matrix."""
    starts, columns = np.array([0, 1], np.int64), torch.from_numpy(np.zeros(1, matrix.index_dtype))
    values = None if matrix.value_dtype is None else torch.from_numpy(np.zeros(1, matrix.value_dtype))
    return CsrRows(torch.from_numpy(starts), starts, columns, values).to(device)


def _check_fit(layout: Dense | Csr, steps: tuple[ValueTransform, ...], field: MatrixField | Field) -> None:
    dtype = layout.dtype
    if isinstance(layout, Csr) and not isinstance(field, MatrixField):
        raise OptionError(f"Csr is for sparse rows, but field {field.name!r} has dense ones: use Dense")
    for step in steps:
        if not isinstance(step, Binarize) and not dtype.is_floating_point:
            raise OptionError(f"{step} gives fractions, but {layout} has integers: pass a floating dtype")
    scale = field.scale or 1.0
    if dtype.is_floating_point or any(isinstance(step, Binarize) for step in steps):
        return
    if scale != 1 or not np.can_cast(field.dtype, str(dtype).removeprefix("torch.")):
        raise OptionError(
            f"{layout} cannot represent all values of field {field.name!r} ({field.dtype}"
            f"{'' if scale == 1 else f' over {scale:g}'}): pass a floating dtype, or Binarize"
        )
