"""The layout of a sparse matrix in a slot: three arrays, narrow as in the file, whose lengths differ by window.

They are where each row starts, the columns, and the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from h5chunk.errors import FileError, printable
from h5chunk.feed.slots import ArrayShape, aligned, torch_dtype
from h5chunk.plan.sparse import entries_of_chunks, entries_of_rows, fullest_chunks
from h5chunk.store.read.csrrows import CsrRoom
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.transforms.csr import CsrRows


class CsrWindow:
    """Rows of a matrix: their starts, and their entries as they are in the file."""

    def __init__(self, starts: np.ndarray, layout: MatrixLayout) -> None:
        entries = (int(starts[-1]),)
        self.shapes: list[ArrayShape] = [(starts.shape, torch.int64), (entries, layout.index_dtype)]
        if layout.value_dtype is not None:
            self.shapes.append((entries, layout.value_dtype))
        self._starts, self._layout = starts, layout
        self._room = CsrRoom(starts, starts, None)

    def destination(self, arrays: Sequence[torch.Tensor]) -> CsrRoom:
        """Where readers put them."""
        starts, indices, *values = (array.numpy() for array in arrays)
        starts[:] = self._starts
        self._room = CsrRoom(starts, indices, values[0] if values else None)
        return self._room

    def check(self) -> None:
        """Raise FileError unless each entry has a column of the matrix: batches are written there unchecked."""
        indices, columns = self._room.indices, self._layout.num_columns
        signed = indices.dtype.kind == "i"
        if not len(indices) or (not signed and np.iinfo(indices.dtype).max < columns):
            return
        most, least = int(indices.max()), int(indices.min()) if signed else 0
        if most >= columns or least < 0:
            wrong = most if most >= columns else least
            raise FileError(f"{self._layout.where} is damaged: it has an entry in column {wrong} of {columns}")

    def samples(self, arrays: Sequence[torch.Tensor]) -> CsrRows:
        """What batches are made of."""
        return CsrRows(arrays[0], self._starts, arrays[1], arrays[2] if len(arrays) > 2 else None)


@dataclass(frozen=True)
class MatrixLayout:
    """Types of a matrix's entries, and where its rows begin.

    Attributes
    ----------
    indptr : (num_rows + 1,) int64
    num_columns : int
    index_dtype : torch.dtype
    value_dtype : torch.dtype or None
    where : str
        File and field, for messages.
    most_entries : callable
        The most entries that any window of so many rows may have.
    """

    indptr: np.ndarray = field(repr=False)
    num_columns: int
    index_dtype: torch.dtype
    value_dtype: torch.dtype | None
    where: str
    most_entries: Callable[[int], int] = field(repr=False)

    @property
    def entry_bytes(self) -> int:
        return self.index_dtype.itemsize + (0 if self.value_dtype is None else self.value_dtype.itemsize)

    @property
    def sample_bytes(self) -> int:
        """Of a row, on average."""
        num_rows = max(1, len(self.indptr) - 1)
        return 8 + math.ceil(int(self.indptr[-1]) * self.entry_bytes / num_rows)

    def _bytes(self, num_rows: int, num_entries: int) -> int:
        values = 0 if self.value_dtype is None else aligned(num_entries * self.value_dtype.itemsize)
        return aligned(8 * (num_rows + 1)) + aligned(num_entries * self.index_dtype.itemsize) + values

    def most_bytes(self, num_samples: int) -> int:
        """Of any window of this many rows."""
        return self._bytes(num_samples, self.most_entries(num_samples))

    def all_bytes(self, num_samples: int) -> int:
        """Of all rows of the file."""
        return self._bytes(num_samples, int(self.indptr[-1]))

    def window(self, samples: np.ndarray) -> CsrWindow:
        """These rows."""
        starts = np.zeros(len(samples) + 1, np.int64)
        np.cumsum(self.indptr[samples + 1] - self.indptr[samples], out=starts[1:])
        return CsrWindow(starts, self)

    @property
    def example(self) -> CsrRows:
        """A row of one entry, on the host."""
        starts = np.array([0, 1], np.int64)
        values = None if self.value_dtype is None else torch.zeros(1, dtype=self.value_dtype)
        return CsrRows(torch.from_numpy(starts), starts, torch.zeros(1, dtype=self.index_dtype), values)

    def empty(self, num_samples: int, device: torch.device) -> CsrRows:
        """Room for all rows of the file."""
        entries = int(self.indptr[-1])
        values = None if self.value_dtype is None else torch.empty(entries, dtype=self.value_dtype, device=device)
        starts = torch.from_numpy(self.indptr).to(device)
        return CsrRows(starts, self.indptr, torch.empty(entries, dtype=self.index_dtype, device=device), values)

    def put(self, there: CsrRows, first: int, samples: CsrRows) -> None:
        """Copy some rows to their place among all."""
        num_entries = int(samples.host_starts[-1])
        place = slice(int(self.indptr[first]), int(self.indptr[first]) + num_entries)
        there.indices[place].copy_(samples.indices)
        if there.values is not None and samples.values is not None:
            there.values[place].copy_(samples.values)


def matrix_layout(
    reader: H5Reader, field: MatrixField, counts: np.ndarray | None = None, lanes: int = 1
) -> MatrixLayout:
    """The layout of a file's matrix.

    Parameters
    ----------
    reader : H5Reader
    field : MatrixField
    counts : (num_rows,) int64, optional
        How often each row may come in an epoch; None: all of them once, chunk by chunk.
    lanes : int
        Of this rank.

    Raises
    ------
    FieldError
        It holds numbers that torch does not have.
    FileError
        It is damaged.
    """
    values = None if field.value_dtype is None else torch_dtype(field.value_dtype, field.name)
    columns = torch_dtype(field.index_dtype, field.name)
    assert columns is not None
    where = f"{printable(reader.path)}: {field.name!r}"
    if counts is None:
        most = entries_of_chunks(fullest_chunks(reader.indptr, field.chunk_samples), field.chunk_samples, lanes)
    else:
        most = entries_of_rows(np.diff(reader.indptr), counts)
    return MatrixLayout(reader.indptr, field.num_columns, columns, values, where, most)
