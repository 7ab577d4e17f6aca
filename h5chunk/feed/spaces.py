"""How the samples of a field lie in a slot: arrays of bytes that are filled, sent as they are, and looked at again.

A field of equal samples takes one array. Rows of a sparse matrix take three, narrow as in the file: where each row
starts, columns, and values; their lengths differ from window to window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.plan.sparse import entries_of_chunks, entries_of_rows, fullest_chunks
from h5chunk.store.read.csrrows import CsrRoom
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.reader import H5Reader

ALIGNMENT = 512  # of an array in a slot's buffer
ArrayShape = tuple[tuple[int, ...], torch.dtype]


def aligned(num_bytes: int) -> int:
    """The bytes that an array of so many takes in a slot's buffer."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Numbers(NamedTuple):
    """Numbers of samples: on the host, and on the device where those lie."""

    host: np.ndarray
    there: torch.Tensor

    def part(self, start: int, stop: int) -> Numbers:
        """Those from ``start`` to ``stop``."""
        return Numbers(self.host[start:stop], self.there[start:stop])


class CsrRows:
    """Rows of a matrix, all on one device: those of a range of the arrays, or some of them by number.

    Attributes
    ----------
    starts : (m + 1,) int64
        Where each of all rows begins in the entries.
    host_starts : (m + 1,) int64 array
        The same, on the host.
    indices, values : (entries,)
        ``values`` is None for a pattern.
    first : int
        The first row of the range.
    numbers : Numbers, optional
        Which rows; None: all of the range.
    """

    def __init__(
        self,
        starts: torch.Tensor,
        host_starts: np.ndarray,
        indices: torch.Tensor,
        values: torch.Tensor | None,
        first: int = 0,
        count: int | None = None,
        numbers: Numbers | None = None,
    ) -> None:
        self.starts, self.host_starts = starts, host_starts
        self.indices, self.values = indices, values
        self.first, self.numbers = first, numbers
        self._count = len(host_starts) - 1 if count is None else count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rows: slice) -> CsrRows:
        start, stop, _ = rows.indices(len(self))
        numbers = None if self.numbers is None else self.numbers.part(start, stop)
        first = self.first if numbers is not None else self.first + start
        arrays = self.starts, self.host_starts, self.indices, self.values
        return CsrRows(*arrays, first, max(0, stop - start), numbers)

    def take(self, numbers: Numbers) -> CsrRows:
        """Some of all rows, in this order; nothing is copied."""
        arrays = self.starts, self.host_starts, self.indices, self.values
        return CsrRows(*arrays, 0, len(numbers.host), numbers)

    def to(self, device: torch.device) -> CsrRows:
        """The same on another device; all rows, whatever part this is of them."""
        values = None if self.values is None else self.values.to(device)
        return CsrRows(self.starts.to(device), self.host_starts, self.indices.to(device), values)


Samples = torch.Tensor | CsrRows  # of one field, on the device
Fields = tuple[Any, ...]  # Samples of each field


class DenseWindow:
    """Samples of equal size: one array."""

    def __init__(self, num_samples: int, space: FieldSpace) -> None:
        self.shapes: list[ArrayShape] = [((num_samples, *space.sample_shape), space.dtype)]

    def room(self, arrays: Sequence[torch.Tensor]) -> np.ndarray:
        """Where readers put them: (num_samples, sample_bytes) uint8."""
        (samples,) = arrays
        if not samples.numel():
            return np.empty((len(samples), 0), np.uint8)
        return samples.reshape(len(samples), -1).view(torch.uint8).numpy()

    def check(self) -> None:
        """Any bytes will do."""

    def samples(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """What batches are made of."""
        return arrays[0]


@dataclass(frozen=True)
class FieldSpace:
    """Shape and dtype of a field's samples."""

    sample_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.sample_shape) * self.dtype.itemsize

    def most_bytes(self, num_samples: int) -> int:
        """Of any window of this many samples."""
        return aligned(num_samples * self.sample_bytes)

    def all_bytes(self, num_samples: int) -> int:
        """Of all samples of the file."""
        return self.most_bytes(num_samples)

    def window(self, samples: np.ndarray) -> DenseWindow:
        """These samples."""
        return DenseWindow(len(samples), self)

    def empty(self, num_samples: int, device: torch.device) -> torch.Tensor:
        """Room for all samples of the file."""
        return torch.empty((num_samples, *self.sample_shape), dtype=self.dtype, device=device)

    def put(self, there: torch.Tensor, first: int, samples: torch.Tensor) -> None:
        """Copy some samples to their place among all."""
        there[first : first + len(samples)].copy_(samples)


class CsrWindow:
    """Rows of a matrix: their starts, and their entries as they are in the file."""

    def __init__(self, starts: np.ndarray, space: MatrixSpace) -> None:
        entries = (int(starts[-1]),)
        self.shapes: list[ArrayShape] = [(starts.shape, torch.int64), (entries, space.index_dtype)]
        if space.value_dtype is not None:
            self.shapes.append((entries, space.value_dtype))
        self._starts, self._space = starts, space
        self._room = CsrRoom(starts, starts, None)

    def room(self, arrays: Sequence[torch.Tensor]) -> CsrRoom:
        """Where readers put them."""
        starts, indices, *values = (array.numpy() for array in arrays)
        starts[:] = self._starts
        self._room = CsrRoom(starts, indices, values[0] if values else None)
        return self._room

    def check(self) -> None:
        """Raise FileError unless each entry has a column of the matrix: batches are written there unchecked."""
        indices, columns = self._room.indices, self._space.num_columns
        signed = indices.dtype.kind == "i"
        if not len(indices) or (not signed and np.iinfo(indices.dtype).max < columns):
            return
        most, least = int(indices.max()), int(indices.min()) if signed else 0
        if most >= columns or least < 0:
            wrong = most if most >= columns else least
            raise FileError(f"{self._space.where} is damaged: it has an entry in column {wrong} of {columns}")

    def samples(self, arrays: Sequence[torch.Tensor]) -> CsrRows:
        """What batches are made of."""
        return CsrRows(arrays[0], self._starts, arrays[1], arrays[2] if len(arrays) > 2 else None)


@dataclass(frozen=True)
class MatrixSpace:
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


def matrix_space(reader: H5Reader, field: MatrixField, counts: np.ndarray | None = None, lanes: int = 1) -> MatrixSpace:
    """That of a file's matrix.

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
    return MatrixSpace(reader.indptr, field.num_columns, columns, values, where, most)


def torch_dtype(dtype: np.dtype, name: str) -> torch.dtype | None:
    """torch's dtype for a field's; None for strings."""
    if dtype.kind == "S":
        return None
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        raise FieldError(f"field {name!r} has the type {dtype}, which torch does not have: leave it out") from None


Space = FieldSpace | MatrixSpace
Spaces = Mapping[str, Space]


def slot_bytes(spaces: Spaces, num_samples: int) -> int:
    """Of any window of this many samples."""
    return sum(space.most_bytes(num_samples) for space in spaces.values())
