"""The layout of a field in a slot: one array of dense samples, or the arrays of a sparse matrix.

A slot has room for the largest window. The rows of a matrix take three arrays, with the types of the file: where each
row starts, the columns, and the values; how much of the last two is used differs by window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.plan.csr import entries_of_chunks, entries_of_rows, fullest_chunks
from h5chunk.store.format.matrix import CSR
from h5chunk.store.read.csr import CsrBuffers
from h5chunk.store.read.fields import MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.transforms.csr import CsrRows

ALIGNMENT = 512  # of an array in a slot's buffer
ArrayShape = tuple[tuple[int, ...], torch.dtype]
Arrays = Sequence[torch.Tensor]


@dataclass(frozen=True)
class FieldLayout:
    """Shape and dtype of the samples of a dense field."""

    sample_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.sample_shape) * self.dtype.itemsize

    @property
    def example(self) -> None:
        """Kernels are compiled without one."""

    def capacity(self, num_samples: int) -> list[ArrayShape]:
        """The arrays of any window of this many samples."""
        return [((num_samples, *self.sample_shape), self.dtype)]

    @property
    def of_pieces(self) -> FieldLayout:
        """The layout of pieces of the whole data set."""
        return self

    def all_bytes(self, num_samples: int) -> int:
        """Bytes of all samples of the data set."""
        return aligned_bytes(self.capacity(num_samples))

    def empty(self, num_samples: int, device: torch.device) -> torch.Tensor:
        """Allocate memory for all samples of the data set."""
        return torch.empty((num_samples, *self.sample_shape), dtype=self.dtype, device=device)

    def put(self, all_samples: torch.Tensor, first: int, samples: torch.Tensor) -> None:
        """Copy some samples to their place among all."""
        all_samples[first : first + len(samples)].copy_(samples)


class CsrWindow:
    """The rows of a matrix in one window.

    Attributes
    ----------
    shapes : list of (shape, dtype)
        The part of each array that this window takes.
    """

    def __init__(self, starts: np.ndarray, layout: MatrixLayout) -> None:
        self.shapes = layout.arrays(len(starts) - 1, int(starts[-1]))
        self._starts, self._layout = starts, layout
        self._room = CsrBuffers(starts, starts, None)

    def destination(self, arrays: Arrays) -> CsrBuffers:
        """Return the buffers that readers fill with the entries, in host arrays of these shapes."""
        starts, indices, *values = (array.numpy() for array in arrays)
        starts[:] = self._starts
        self._room = CsrBuffers(starts, indices, values[0] if values else None)
        return self._room

    def check(self) -> None:
        """Raise FileError unless each entry has a column of the matrix, and no other one of its row."""
        if self._layout.may_repeat:
            self._check_repeated()
        indices, columns = self._room.indices, self._layout.num_columns
        signed = indices.dtype.kind == "i"
        if not len(indices) or (not signed and np.iinfo(indices.dtype).max < columns):
            return
        most, least = int(indices.max()), int(indices.min()) if signed else 0
        if most >= columns or least < 0:
            wrong = most if most >= columns else least
            raise FileError(f"{self._layout.where} is damaged: it has an entry in column {wrong} of {columns}")

    def _check_repeated(self) -> None:
        indices, starts = self._room.indices, self._starts
        falls = np.flatnonzero(indices[1:] <= indices[:-1]) + 1
        if (starts[np.searchsorted(starts, falls)] == falls).all():
            return
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))  # some row is not in order
        order = np.lexsort((indices, rows))
        same = (np.diff(rows[order]) == 0) & (indices[order[1:]] == indices[order[:-1]])
        if same.any():
            column = int(indices[order[int(same.argmax())]])
            raise FileError(
                f"{self._layout.where} has a row with several entries in column {column}: pack it with h5chunk "
                "convert, which adds them up"
            )

    def rows(self, arrays: Arrays) -> CsrRows:
        """The rows, in arrays of these shapes on any device."""
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
    may_repeat : bool
        Others wrote it: rows may have several entries in one column, in any order.
    most_entries : callable
        Upper limit on the entries of a window, by its number of rows.
    """

    indptr: np.ndarray = field(repr=False)
    num_columns: int
    index_dtype: torch.dtype
    value_dtype: torch.dtype | None
    where: str
    may_repeat: bool
    most_entries: Callable[[int], int] = field(repr=False)

    @property
    def sample_bytes(self) -> int:
        """Bytes of a row, on average."""
        entry_bytes = self.index_dtype.itemsize + (0 if self.value_dtype is None else self.value_dtype.itemsize)
        return 8 + math.ceil(int(self.indptr[-1]) * entry_bytes / max(1, len(self.indptr) - 1))

    @property
    def example(self) -> CsrRows:
        """A row of one entry, on the host."""
        starts = np.array([0, 1], np.int64)
        values = None if self.value_dtype is None else torch.zeros(1, dtype=self.value_dtype)
        return CsrRows(torch.from_numpy(starts), starts, torch.zeros(1, dtype=self.index_dtype), values)

    def arrays(self, num_rows: int, num_entries: int) -> list[ArrayShape]:
        """Shapes of the arrays of this many rows and entries."""
        values: list[ArrayShape] = [] if self.value_dtype is None else [((num_entries,), self.value_dtype)]
        return [((num_rows + 1,), torch.int64), ((num_entries,), self.index_dtype), *values]

    def capacity(self, num_samples: int) -> list[ArrayShape]:
        """The arrays of any window of this many rows."""
        return self.arrays(num_samples, self.most_entries(num_samples))

    @property
    def of_pieces(self) -> MatrixLayout:
        """The same for pieces of the whole data set, one behind the other, whichever rows an epoch wants."""
        return replace(self, most_entries=self._most_of_pieces)

    def _most_of_pieces(self, num_samples: int) -> int:
        return int(np.diff(np.append(self.indptr[:-1:num_samples], self.indptr[-1])).max(initial=0))

    def all_bytes(self, num_samples: int) -> int:
        """Bytes of all rows of the data set."""
        return aligned_bytes(self.arrays(num_samples, int(self.indptr[-1])))

    def window(self, samples: np.ndarray) -> CsrWindow:
        """A window of these rows."""
        starts = np.zeros(len(samples) + 1, np.int64)
        np.cumsum(self.indptr[samples + 1] - self.indptr[samples], out=starts[1:])
        return CsrWindow(starts, self)

    def empty(self, num_samples: int, device: torch.device) -> CsrRows:
        """Allocate memory for all rows of the data set."""
        starts = torch.from_numpy(self.indptr).to(device)
        _, *entries = self.arrays(num_samples, int(self.indptr[-1]))
        indices, *values = (torch.empty(shape, dtype=dtype, device=device) for shape, dtype in entries)
        return CsrRows(starts, self.indptr, indices, values[0] if values else None)

    def put(self, all_rows: CsrRows, first: int, rows: CsrRows) -> None:
        """Copy some rows to their place among all."""
        start = int(self.indptr[first])
        some = slice(start, start + int(rows.host_starts[-1]))
        all_rows.indices[some].copy_(rows.indices)
        if all_rows.values is not None and rows.values is not None:
            all_rows.values[some].copy_(rows.values)


Layouts = Mapping[str, FieldLayout | MatrixLayout]


def field_layout(sample_shape: tuple[int, ...], dtype: np.dtype, name: str) -> FieldLayout:
    """The layout of a dense field.

    Raises
    ------
    FieldError
        It holds strings, or numbers that torch does not have.
    """
    found = torch_dtype(dtype, name)
    if found is None:
        raise FieldError(f"field {name!r} holds strings, which no device takes: leave it out, or use ChunkDataset")
    return FieldLayout(sample_shape, found)


def matrix_layout(
    reader: H5Reader, field: MatrixField, counts: np.ndarray | None = None, lanes: int = 1
) -> MatrixLayout:
    """The layout of a file's matrix.

    Parameters
    ----------
    reader : H5Reader
    field : MatrixField
    counts : (num_rows,) int64, optional
        Upper limit on the repetitions of each row in an epoch; None: all rows once, chunk by chunk.
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
    may_repeat = reader.header is None or reader.header.kind != CSR
    return MatrixLayout(reader.indptr, field.num_columns, columns, values, where, may_repeat, most)


def torch_dtype(dtype: np.dtype, name: str) -> torch.dtype | None:
    """The torch dtype of a field; None for strings.

    Raises
    ------
    FieldError
        torch does not have it.
    """
    if dtype.kind == "S":
        return None
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        raise FieldError(f"field {name!r} has the type {dtype}, which torch does not have: leave it out") from None


def slot_bytes(layouts: Layouts, num_samples: int) -> int:
    """Bytes of a slot for windows of this many samples."""
    return sum(aligned_bytes(layout.capacity(num_samples)) for layout in layouts.values())


def aligned_bytes(shapes: Sequence[ArrayShape]) -> int:
    """Bytes of arrays one behind the other in a buffer."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in shapes)
