"""Rows of a matrix in one process of a `ChunkDataset`: read when asked for, and converted into memory that is given."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.feed.matrix_layout import matrix_layout
from h5chunk.feed.shared_memory import Assemble
from h5chunk.feed.slots import ArrayShape
from h5chunk.store.format import opened
from h5chunk.store.read.csrrows import CsrField
from h5chunk.store.read.decoded import NotDirect
from h5chunk.store.read.filesdirect import close_descriptors, files_fields, open_descriptors
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.transforms.csr import CsrRows, entries_of, make_csr, scatter
from h5chunk.transforms.rows import RowConverter

Tensors = Sequence[torch.Tensor]


class Loaded(NamedTuple):
    """Samples of a field that were read: the tensors that they take, and the function that fills those."""

    shapes: list[ArrayShape]
    fill: Callable[[Tensors], None]


@dataclass(frozen=True)
class CsrFirst:
    """Makes the first three tensors of a batch one CSR tensor; it travels between processes with them."""

    num_columns: int

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        starts, columns, values, *others = tensors
        return make_csr(starts, columns, values, (len(starts) - 1, self.num_columns)), *others


class MatrixRows:
    """The first field of a file, whose samples are rows of a matrix: sparse ones, or dense ones of ours.

    Sparse rows are read by byte ranges, or through HDF5 where they are compressed, as its cache keeps what it decodes.

    Parameters
    ----------
    reader : H5Reader
    convert : RowConverter
    """

    def __init__(self, reader: H5Reader, convert: RowConverter) -> None:
        self._reader, self._convert = reader, convert
        self._file: _OpenFile | None = None

    def of(self, reader: H5Reader) -> MatrixRows:
        """The same by another reader of the file."""
        return MatrixRows(reader, self._convert)

    @property
    def assemble(self) -> Assemble | None:
        """What makes the fields of a batch of its tensors, if they are not those already."""
        if not self._convert.makes_csr:
            return None
        return CsrFirst(self._convert.num_columns)

    def load(self, rows: np.ndarray) -> Loaded:
        """These rows, in any order, also repeated."""
        convert = self._convert
        dense: list[ArrayShape] = [((len(rows), convert.num_columns), convert.dtype)]
        if self._reader.matrix is None:
            first = next(iter(self._reader.fields.values()))
            stored = np.empty((len(rows), *first.sample_shape), first.dtype)
            self._reader.read(first.name, rows, stored)
            made = convert(torch.from_numpy(stored), keep=True)
            return Loaded(dense, lambda tensors: copy_all((made,), tensors))
        entries = entries_of(self._read(rows), convert.rule, convert.num_columns)
        if not convert.makes_csr:
            return Loaded(dense, lambda tensors: scatter(tensors[0], entries))
        parts = entries.starts, entries.columns, entries.values
        return Loaded([(tuple(part.shape), part.dtype) for part in parts], lambda tensors: copy_all(parts, tensors))

    def close(self) -> None:
        """Close the file in this process; the next read opens it again."""
        self._file = None

    def _read(self, rows: np.ndarray) -> CsrRows:
        if self._file is None or self._file.process != os.getpid():
            self._file = _OpenFile(self._reader)
        file, matrix = self._file, self._reader.matrix
        assert matrix is not None
        window = file.layout.window(rows)
        arrays = [torch.empty(shape, dtype=dtype) for shape, dtype in window.shapes]
        room = window.destination(arrays)
        if file.direct is None:
            self._reader.read(matrix.name, rows, room)
        else:
            places = np.argsort(rows, kind="stable")
            for part in file.direct.parts(rows[places], places, room):
                part(file.descriptor)
            self._reader.check_unchanged(file.descriptor)
            self._reader.check_unchanged()
        window.check()
        return window.samples(arrays)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_file": None}


class _OpenFile:
    """What this process reads rows through, and what was read of the matrix already."""

    def __init__(self, reader: H5Reader) -> None:
        matrix = reader.matrix
        assert matrix is not None
        self.process = os.getpid()
        self.layout = matrix_layout(reader, matrix)
        self.direct: CsrField | None = _plain_field(reader, matrix)
        self.descriptor = open_descriptors(reader)
        weakref.finalize(self, close_descriptors, self.descriptor)


def _plain_field(reader: H5Reader, matrix: MatrixField) -> CsrField | None:
    """What reads rows by their byte ranges, unless they are compressed, or need HDF5."""
    field: Any = None
    if isinstance(reader, FileSet):
        field = files_fields(reader)[0].get(matrix.name)
    else:
        with opened(reader.path) as file, suppress(NotDirect):
            field = CsrField(reader.path, file, matrix, reader.indptr, reader.sums)
    return field if field is not None and field.is_plain else None


def copy_all(parts: Tensors, tensors: Tensors) -> None:
    """Copy each tensor to the one in its place."""
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.copy_(part)
