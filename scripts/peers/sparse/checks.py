"""Compare the rows of an epoch with the packed rows, by a checksum per row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from peers.sparse import DENSE
from peers.sparse.matrix import Source, row_checksums


class Wrong(Exception):
    """Raised if a batch has a wrong shape or dtype, or a row differs from the packed one."""


def csr_parts(batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return indptr, columns and values of a SciPy matrix or a torch.sparse_csr tensor."""
    if hasattr(batch, "crow_indices"):
        return batch.crow_indices().numpy(), batch.col_indices().numpy(), batch.values().numpy()
    return batch.indptr, batch.indices, batch.data


def as_array(batch: Any) -> np.ndarray:
    return batch if isinstance(batch, np.ndarray) else batch.numpy()


def dense_parts(batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return indptr, columns and values of a dense tensor or array."""
    dense = as_array(batch)
    flat = np.flatnonzero(dense != 0)  # np.flatnonzero is several times as fast for booleans
    indptr = np.searchsorted(flat, np.arange(len(dense) + 1) * dense.shape[1])
    return indptr, flat % dense.shape[1], dense.reshape(-1)[flat]


class Checker:
    """Compare the rows of epochs with those of the source."""

    def __init__(self, source: Source, batch_size: int, form: str) -> None:
        self.shape, self.batch_size, self.form = (source.num_rows, source.num_columns), batch_size, form
        self.weights = source.weights()
        self.known, self.counts = np.unique(source.array("checksums"), return_counts=True)
        self.last_order = np.empty(0, np.int64)

    def checksums(self, batch: Any) -> np.ndarray:
        """Return the checksums of a batch's rows. Raises Wrong if the batch has a wrong shape or dtype."""
        rows, columns = batch.shape
        if columns != self.shape[1] or not 0 < rows <= self.batch_size:
            raise Wrong(f"a batch is {rows} x {columns}")
        indptr, found, values = dense_parts(batch) if self.form == DENSE else csr_parts(batch)
        if values.dtype != np.float32:
            raise Wrong(f"a batch is {values.dtype}")
        return row_checksums(indptr, found, values, self.weights)

    def epoch(self, batches: Iterator[Any]) -> dict[str, int]:
        """Count the rows that are missing in an epoch, and the rows that it repeats."""
        order = np.concatenate([self.checksums(batch) for batch in batches])
        if np.array_equal(order, self.last_order):
            raise Wrong("two epochs had the same order")
        self.last_order = order
        rows, times = np.unique(order, return_counts=True)
        places = self.find(rows)
        excess = np.zeros(len(self.known), np.int64) - self.counts
        excess[places] += times
        return {"dropped": int(-excess[excess < 0].sum()), "repeated": int(excess[excess > 0].sum())}

    def find(self, rows: np.ndarray) -> np.ndarray:
        """Return the index of the packed row with each of these checksums. Raises Wrong if there is no such row."""
        places = np.minimum(np.searchsorted(self.known, rows), len(self.known) - 1)
        if not np.array_equal(self.known[places], rows):
            raise Wrong(f"{int((self.known[places] != rows).sum())} rows are none of those that were packed")
        return places

    def last_row(self, batch: Any) -> tuple[np.ndarray, ...]:
        """Copy the last row of a batch, to compare it after the clock has stopped."""
        if self.form == DENSE:
            return (as_array(batch)[-1].copy(),)
        indptr, columns, values = csr_parts(batch)
        return columns[indptr[-2] : indptr[-1]].copy(), values[indptr[-2] : indptr[-1]].copy()

    def check_row(self, row: tuple[np.ndarray, ...]) -> None:
        """Raise Wrong unless the row is one of the packed rows."""
        columns, values = dense_parts(row[0][None])[1:] if self.form == DENSE else row
        self.find(row_checksums(np.array([0, len(columns)]), columns, values, self.weights))
