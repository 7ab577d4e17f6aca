"""The memory layout of a field in a slot: one array of dense samples, or the arrays of a CSR matrix.

A slot is large enough for the largest window. A matrix needs up to three arrays: the start of each row, and the column
indices and values of the entries, in the dtypes of the file. The number of entries differs between windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.errors import FieldError, printable
from h5chunk.plan.csr import entries_of_chunks, entries_of_rows, fullest_chunks
from h5chunk.store.format.header import CSR
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.store.read.ragged import RaggedField, SeriesField
from h5chunk.store.read.source import Source

ALIGNMENT = 512  # alignment of an array in a slot's buffer
BYTES = 256  # number of different values of a byte
ArrayShape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class FieldLayout:
    """Shape and dtype of the samples of a dense field."""

    sample_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def sample_bytes(self) -> int:
        """Bytes per sample."""
        return math.prod(self.sample_shape) * self.dtype.itemsize

    def capacity(self, num_samples: int) -> list[ArrayShape]:
        """Return the shapes of the arrays for any window of this many samples."""
        return [((num_samples, *self.sample_shape), self.dtype)]

    def for_any(self) -> FieldLayout:
        """Return the layout for windows of any samples, in memory of their own."""
        return self


@dataclass(frozen=True)
class MatrixLayout:
    """The layout of the rows of a CSR matrix, or of samples that differ in length.

    Attributes
    ----------
    indptr : array, (num_rows + 1,) int64
        The start of each row.
    num_columns : int
        0 for samples that differ in length, whose values take the place of the column indices.
    where : str
        The file and field, for messages.
    may_repeat : bool
        Whether rows must be checked for several entries in a column, because h5chunk did not write the matrix.
    max_entries : callable
        ``max_entries(num_rows)`` is the maximum number of entries in a window of that many rows.
    """

    indptr: np.ndarray = field(repr=False)
    num_columns: int
    index_dtype: torch.dtype
    value_dtype: torch.dtype | None
    where: str
    may_repeat: bool
    max_entries: Callable[[int], int] = field(repr=False)

    @property
    def sample_bytes(self) -> int:
        """Bytes per row, on average."""
        entry_bytes = self.index_dtype.itemsize + (0 if self.value_dtype is None else self.value_dtype.itemsize)
        return 8 + math.ceil(int(self.indptr[-1]) * entry_bytes / max(1, len(self.indptr) - 1))

    def arrays(self, num_rows: int, num_entries: int) -> list[ArrayShape]:
        """Return the shapes of the arrays for this many rows and entries."""
        values: list[ArrayShape] = [] if self.value_dtype is None else [((num_entries,), self.value_dtype)]
        return [((num_rows + 1,), torch.int64), ((num_entries,), self.index_dtype), *values]

    def capacity(self, num_samples: int) -> list[ArrayShape]:
        """Return the shapes of the arrays for any window of this many rows."""
        return self.arrays(num_samples, self.max_entries(num_samples))

    def for_any(self) -> MatrixLayout:
        """Return the layout for windows of any samples, in memory of their own."""
        return self

    def starts_of(self, rows: np.ndarray | None) -> np.ndarray:
        """Return the start of each of these rows in memory, where they follow each other. None means all rows."""
        return self.indptr if rows is None else np.concatenate(([0], np.cumsum(np.diff(self.indptr)[rows])))

    def of_pieces(self, rows: np.ndarray | None) -> MatrixLayout:
        """Return the layout for windows of consecutive ones of these rows, for reading all of them once."""
        starts = self.starts_of(rows)

        def max_entries(num_samples: int) -> int:
            borders = np.append(starts[: -1 : max(1, num_samples)], starts[-1])
            return int(np.diff(borders).max(initial=0))

        return replace(self, max_entries=max_entries)


Layouts = Mapping[str, Any]  # `FieldLayout`, `MatrixLayout`, or `h5chunk.feed.frames.FrameLayout`


class Uses(NamedTuple):
    """How often and in which order an epoch uses samples. The sizes of the largest windows follow from it.

    ``counts``, (num_samples,) int64, is the maximum number of times that an epoch uses each sample. None means once,
    or, unless ``by_chunk``, any number of times. ``by_chunk`` means chunk by chunk, in ``lanes`` lanes per rank, and
    otherwise in any order.
    """

    counts: np.ndarray | None = None
    lanes: int = 1
    by_chunk: bool = True


ONCE = Uses()


def layout_of(reader: Source, name: str, uses: Uses) -> FieldLayout | MatrixLayout:
    """Return the layout of a field.

    Raise `FieldError` if the field has strings, or a dtype that torch does not support.
    """
    stored = reader.fields[name]
    if isinstance(stored, RaggedField):
        return ragged_layout(reader, stored, uses)
    return layout_of_numbers(stored)


def layout_of_numbers(field: Field | RaggedField) -> FieldLayout:
    """Return the layout of a dense field. Raise `FieldError` as `layout_of` does."""
    dtype = torch_dtype(field.dtype, field.name)
    if dtype is None:
        raise FieldError(
            f"field {field.name!r} has strings, which cannot be on a device: leave it out, as in "
            "ChunkLoader(ChunkDataset(path, fields=[...]), ...), or use a DataLoader: "
            "torch.utils.data.DataLoader(data, batch_sampler=h5chunk.ChunkSampler(data, batch_size=256))"
        )
    return FieldLayout(field.sample_shape, dtype)


def ragged_layout(reader: Source, field: RaggedField, uses: Uses = ONCE) -> MatrixLayout:
    """Return the layout of a matrix, of samples that differ in length, or of images of any size (an entry per byte).

    Raise `FieldError` if torch does not support the dtype of the matrix, and `FileError` if the matrix is damaged.
    """
    where, indptr = f"{printable(reader.path)}: {field.name!r}", reader.indptr_of(field.name)
    if uses.counts is not None:
        max_entries: Callable[[int], int] = entries_of_rows(np.diff(indptr), uses.counts)
    elif uses.by_chunk:  # the order's chunks are those of the main field
        max_entries = entries_of_chunks(fullest_chunks(indptr, reader.chunk_samples), reader.chunk_samples, uses.lanes)
    else:
        max_entries = partial(mul, int(np.diff(indptr).max(initial=0)))
    if isinstance(field, SeriesField):
        values = torch_dtype(field.dtype, field.name)
        assert values is not None
        return MatrixLayout(indptr, 0, values, None, where, False, max_entries)
    if not isinstance(field, MatrixField):
        return MatrixLayout(indptr, BYTES, torch.uint8, None, where, False, max_entries)
    values = None if field.value_dtype is None else torch_dtype(field.value_dtype, field.name)
    columns = torch_dtype(field.index_dtype, field.name)
    assert columns is not None
    may_repeat = reader.header is None or reader.header.kind != CSR
    return MatrixLayout(indptr, field.num_columns, columns, values, where, may_repeat, max_entries)


def torch_dtype(dtype: np.dtype, name: str) -> torch.dtype | None:
    """Return the torch dtype of a field, or None for strings. Raise FieldError if torch does not support it."""
    if dtype.kind == "S":
        return None
    if dtype.names:  # the bits of a type that NumPy lacks
        return getattr(torch, dtype.names[0])
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        raise FieldError(f"field {name!r} has the type {dtype}, which torch does not support: leave it out") from None


def slot_bytes(layouts: Layouts, num_samples: int) -> int:
    """Return the size of a slot for windows of this many samples, in bytes."""
    return sum(aligned_bytes(layout.capacity(num_samples)) for layout in layouts.values())


def aligned_bytes(shapes: Sequence[ArrayShape]) -> int:
    """Return the size of consecutive, aligned arrays in a buffer, in bytes."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in shapes)
