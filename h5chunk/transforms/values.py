"""Compute the values of the rows of a matrix from what is stored, and change them by `Binarize`, `L2` and `Log1p`.

A missing entry is a zero, and all these transforms keep zeros. So they give the same result before and after `Dense` or
`Csr`, and are computed only on the entries; on a GPU, in the kernel that makes rows dense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from h5chunk.attributes import cached_property
from h5chunk.errors import OptionError
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.transforms.segments import (
    SAME_SIZE,
    Array,
    as_tensor,
    converted,
    library,
    make_csr,
    of_device,
    repeated,
    sums,
)

NUM_CODES = 256


class RowArithmetic:
    """Sums and scaling of rows, on the device of the values.

    With ``counts``, the values are the entries of sparse rows, and ``counts`` has the number of entries of each row.
    Without, they are dense rows, (rows, ...), in a tensor.
    """

    def __init__(self, counts: Array | None = None) -> None:
        self._counts = counts

    def sums(self, values: Array) -> Array:
        """Return the sum of each row."""
        return values.flatten(1).sum(1) if self._counts is None else sums(values, self._counts)

    def lengths(self, values: Array) -> Array:
        """Return the Euclidean length of each row."""
        if self._counts is None:
            return torch.linalg.vector_norm(values.flatten(1), dim=1)
        if isinstance(values, np.ndarray):
            return np.sqrt(sums(values.astype(np.float64) ** 2, self._counts))
        return sums(values * values, self._counts).sqrt_()

    def reciprocal(self, numbers: Array, otherwise: float) -> Array:
        """Return 1 / number for each row, and ``otherwise`` where the number is 0."""
        if isinstance(numbers, np.ndarray):
            return np.divide(1, numbers, out=np.full(len(numbers), otherwise), where=numbers != 0)
        return torch.where(numbers != 0, 1 / numbers, otherwise)

    def scaled(self, values: Array, factors: Array) -> Array:
        """Multiply the values of each row by the factor of the row."""
        if isinstance(values, np.ndarray):
            return values * repeated(factors.astype(values.dtype), self._counts)
        factors = factors.to(values.dtype)
        if self._counts is None:
            return values * factors.view(-1, *(1,) * (values.ndim - 1))
        return values * repeated(factors, self._counts, len(values))


class ValueTransform:
    """Base class of value transforms, which can also be called as a function of a batch."""

    def on_values(self, values: Array, rows: RowArithmetic) -> Array:
        """Return the changed values of all entries, or of dense rows."""
        raise NotImplementedError

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        if batch.layout != torch.sparse_csr:
            return self.on_values(batch, RowArithmetic()).to(batch.dtype)
        starts = batch.crow_indices()
        values = self.on_values(batch.values(), RowArithmetic(starts.diff())).to(batch.dtype)
        return make_csr(starts, batch.col_indices(), values, (len(batch), batch.shape[1]))


@dataclass(frozen=True)
class Binarize(ValueTransform):
    """Set values at or above a threshold to 1, and others to 0; a CSR batch keeps these zeros as entries.

    Parameters
    ----------
    threshold : float
        The smallest value that becomes 1, above 0.
    """

    threshold: float

    def __post_init__(self) -> None:
        if not _is_positive(self.threshold):
            raise OptionError(
                f"Binarize: threshold is {self.threshold!r}: pass the smallest value that becomes 1, a number above 0"
            )

    def on_values(self, values: Array, rows: RowArithmetic) -> Array:
        found = values >= self.threshold
        return found.to(values.dtype) if isinstance(values, torch.Tensor) else found.astype(values.dtype)


@dataclass(frozen=True)
class L2(ValueTransform):
    """Divide each row by its Euclidean length; rows of length 0 do not change."""

    def on_values(self, values: Array, rows: RowArithmetic) -> Array:
        return rows.scaled(values, rows.reciprocal(rows.lengths(values), 0.0))


@dataclass(frozen=True)
class Log1p(ValueTransform):
    """Replace each value by ``log(1 + value)``, as is usual for gene counts of cells.

    Parameters
    ----------
    target_sum : float, optional
        First scale each row to this sum, as scanpy's ``normalize_total`` does; rows with a sum of 0 do not change.
        Default: no scaling.
    """

    target_sum: float | None = None

    def __post_init__(self) -> None:
        if self.target_sum is not None and not _is_positive(self.target_sum):
            raise OptionError(f"Log1p: target_sum is {self.target_sum!r}: pass a number above 0, or None")

    def on_values(self, values: Array, rows: RowArithmetic) -> Array:
        if self.target_sum is not None:
            factors = rows.reciprocal(rows.sums(values), 1 / self.target_sum) * self.target_sum
            values = rows.scaled(values, factors)
        return library(values).log1p(values)


@dataclass(frozen=True)
class ValueRule:
    """The rule that converts stored codes to values.

    Stored bytes are looked up in ``table``, (256,). Without a table, the stored numbers are the values or, with a
    ``threshold``, 1 if they reach it, otherwise 0. All entries of a pattern are ``constant``. Then ``steps``,
    which are transforms of values, are applied, and the result is converted to ``dtype``.
    """

    table: np.ndarray | None
    threshold: float | None
    constant: float
    steps: tuple[Any, ...]
    dtype: torch.dtype

    @cached_property
    def divisor(self) -> np.floating[Any] | None:
        """The number d for which code / d is exactly the table's value for every code; None if there is none."""
        if self.table is None or not self.dtype.is_floating_point or not self.table[1]:
            return None
        divisor = (1 / self.table[1]).astype(self.table.dtype)
        same = np.arange(NUM_CODES, dtype=self.table.dtype) / divisor == self.table
        return divisor if same.all() else None

    def applied(self, values: Array, rows: RowArithmetic) -> Array:
        """Apply all steps to values."""
        for step in self.steps:
            values = step.on_values(values, rows)
        return values

    def is_direct(self, codes: torch.Tensor | None, dtype: torch.dtype) -> bool:
        """Return whether values need no arithmetic before the steps: they are in a table, constant, or of ``dtype``."""
        return self.threshold is None and (self.table is not None or codes is None or codes.dtype == dtype)

    def table_of(self, codes: torch.Tensor | None, dtype: torch.dtype) -> np.ndarray | None:
        """Return the values of codes, or the constant, in ``dtype``, viewed as integers; None without a table."""
        table = np.array([self.constant]) if codes is None else self.table
        if table is not None and dtype not in self._tables:
            self._tables[dtype] = torch.from_numpy(table).to(dtype).view(SAME_SIZE[dtype.itemsize]).numpy()
        return self._tables.get(dtype)

    @cached_property
    def _tables(self) -> dict[torch.dtype, np.ndarray]:
        return {}

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype in which values are computed."""
        if self.dtype.is_floating_point and self.dtype != torch.float64:
            return torch.float32
        return self.dtype


def make_rule(field: MatrixField | Field, dtype: torch.dtype, steps: tuple[ValueTransform, ...]) -> ValueRule:
    """Create the value rule of a field; for stored bytes, the table of values includes the leading steps."""
    pattern = isinstance(field, MatrixField) and field.value_dtype is None
    if not pattern and field.dtype != np.uint8:
        if steps and isinstance(steps[0], Binarize):
            threshold = float(field.dtype.type(steps[0].threshold)) if field.dtype.kind == "f" else steps[0].threshold
            return ValueRule(None, threshold, 1.0, steps[1:], dtype)
        return ValueRule(None, None, 1.0, steps, dtype)
    values = np.arange(NUM_CODES) / (field.scale or 1.0)
    while steps and (isinstance(steps[0], Binarize) or steps[0] == Log1p()):
        values = steps[0].on_values(values, RowArithmetic())  # these steps do not depend on rows
        steps = steps[1:]
    rule = ValueRule(None, None, float(values[1]), steps, dtype)
    table = torch.from_numpy(values).to(rule.work_dtype).numpy()
    return ValueRule(table, None, float(table[1]), steps, dtype)


def values_of(codes: Array, rule: ValueRule) -> Array:
    """Return the values of stored numbers before the steps of the rule; they may share memory with these."""
    if rule.table is not None and isinstance(codes, np.ndarray):
        if rule.divisor is None:
            return np.take(rule.table, codes)
        values = converted(codes, rule.work_dtype)  # five times as fast as looking up the table
        return values if rule.divisor == 1 else np.divide(values, rule.divisor, out=values)
    if rule.table is not None:
        return torch.from_numpy(rule.table).to(codes.device)[codes.int()]
    if rule.threshold is not None:
        codes = codes if isinstance(codes, np.ndarray) or codes.is_floating_point() else codes.double()
        codes = codes >= rule.threshold
    return converted(codes, rule.work_dtype)


def dense_values(codes: torch.Tensor, rule: ValueRule) -> torch.Tensor:
    """Return the values of dense rows, (rows, columns), in the rule's dtype."""
    return rule.applied(as_tensor(values_of(of_device(codes), rule)), RowArithmetic()).to(rule.dtype)


def _is_positive(value: object) -> bool:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return number and 0 < float(value) < math.inf  # type: ignore[arg-type]
