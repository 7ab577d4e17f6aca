"""Arithmetic of value transforms on the rows of a matrix.

NumPy computes sparse rows on the host, because torch's threads would wait for each other, which is slow on busy cores.
Torch computes dense rows, and all rows on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class HostArithmetic:
    """Arithmetic of value transforms for sparse rows on the host, by NumPy."""

    def __init__(self, counts: np.ndarray) -> None:
        self._counts = counts

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of each row."""
        rows = np.repeat(np.arange(len(self._counts)), self._counts)
        return np.bincount(rows, values.astype(np.float64), len(self._counts))

    def lengths(self, values: np.ndarray) -> np.ndarray:
        """Return the Euclidean length of each row."""
        return np.sqrt(self.sums(values.astype(np.float64) ** 2))

    def reciprocal(self, sums: np.ndarray, otherwise: float) -> np.ndarray:
        """Return 1 / sum for each row, and ``otherwise`` where the sum is 0."""
        return np.divide(1, sums, out=np.full(len(sums), otherwise), where=sums != 0)

    def scaled(self, values: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """Multiply the values of each row by the factor of the row."""
        return values * np.repeat(factors.astype(values.dtype), self._counts)


class DenseArithmetic:
    """Arithmetic of value transforms for dense rows, (rows, ...), by torch."""

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return values.flatten(1).sum(1)

    def lengths(self, values: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(values.flatten(1), dim=1)

    def scaled(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return values * factors.to(values.dtype).view(-1, *(1,) * (values.ndim - 1))

    def reciprocal(self, sums: torch.Tensor, otherwise: float) -> torch.Tensor:
        return torch.where(sums != 0, 1 / sums, otherwise)


class CsrArithmetic(DenseArithmetic):
    """Arithmetic of value transforms for sparse rows, by torch; ``counts`` has the number of entries of each row."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._counts = counts

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(values, "sum", lengths=self._counts, unsafe=True)

    def lengths(self, values: torch.Tensor) -> torch.Tensor:
        return self.sums(values * values).sqrt_()

    def scaled(self, values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return values * torch.repeat_interleave(factors.to(values.dtype), self._counts, output_size=len(values))


RowArithmetic = Any  # HostArithmetic of NumPy arrays, or DenseArithmetic of tensors
