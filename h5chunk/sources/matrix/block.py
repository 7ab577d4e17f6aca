"""The interface of all readers of sparse matrices.

A source knows its file and nothing of what is made of it. It checks what the file claims before it believes it, names
what is wrong with row, column or line, and lets through any finite value of any type: which values fit the output, and
what is done about duplicates, is the converter's business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from h5chunk.source import OpenContext
from h5chunk.sources.kinds import MatrixSourceOptions
from h5chunk.sources.options import Options
from h5chunk.stamp import stamp_of


@dataclass(frozen=True)
class Block:
    """A block of entries of a sparse matrix.

    Attributes
    ----------
    rows, columns : (n,) int64
        Numbers from 0, as the source counts them. Where the source has ids (`SparseSource.has_ids`) the raw ids:
        int64, or fixed-length bytes (``S``, UTF-8) whose length may differ from block to block.
    values : (n,) array of any numeric type, or None
        Finite; zeros that a sparse file holds are kept. None for a pure pattern, where every entry is a one; it is
        None in all blocks of a source or in none. Arrays may be read-only.
    times : (n,) int64, or None
        When each entry was made, in any unit, of a source that was asked for times and has them.
    first_line : int or None
        Line of the first entry, from 1, where each entry is one line and the lines have no gaps.
    """

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray | None
    times: np.ndarray | None = None
    first_line: int | None = None

    def __len__(self) -> int:
        return len(self.rows)


class SparseSource:
    """Base class of the readers of sparse matrices.

    Attributes
    ----------
    path : str
    kind : str
    noun : str
        What the source contains, for messages.
    shape : (rows, columns)
        None where only reading tells (delimited files; the columns of libsvm).
    axes : (str, str)
        What rows and columns are, for reports.
    has_ids : bool
        Rows and columns of blocks are raw ids, to be numbered in ascending order: integers by value, strings by
        their bytes. An axis is the one or the other in all blocks.
    is_sorted_by_row : bool
        Rows never go down, within blocks and from one to the next.
    row_fields : mapping of str to (rows,) array
        Columns of h5ad's ``obs``; libsvm's ``labels`` (complete only after ``blocks`` is through). Fixed-size types.
    categories : mapping of str to list of str
        What the codes of a categorical row field mean; code -1 is missing.
    row_names, column_names : (rows,) and (columns,) fixed-length bytes, or None
        UTF-8: obs_names and var_names, barcodes and ids of features.
    time_name : str or None
        The column that ``times`` of blocks are from, if the source was asked for times and has them.
    num_bytes : int
        Size of what is read, for progress.
    """

    kind: str
    noun: ClassVar[str] = "sparse matrices"
    Options: ClassVar[type[Options]] = MatrixSourceOptions
    path: str
    shape: tuple[int | None, int | None]
    num_bytes: int
    axes: tuple[str, str] = ("rows of the source", "columns of the source")
    has_ids: bool = False
    is_sorted_by_row: bool = False
    row_fields: Mapping[str, np.ndarray] = MappingProxyType({})
    categories: Mapping[str, list[str]] = MappingProxyType({})
    row_names: np.ndarray | None = None
    column_names: np.ndarray | None = None
    time_name: str | None = None

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        """Whether a source, of which these are the first bytes, is of this kind."""
        raise NotImplementedError

    @classmethod
    def open(cls, source: Any, options: Any, context: OpenContext) -> SparseSource:
        """Open a source; reads no more than its description."""
        return cls(os.fspath(source))  # type: ignore[call-arg]

    def files(self) -> Sequence[str]:
        """Return the paths of all files that the matrix is read from."""
        return (self.path,)

    def identity(self) -> dict[str, Any] | None:
        """Return a JSON fingerprint: equal ones mean equal entries. None if there is none."""
        return {"kind": self.kind, "stamps": [stamp_of(path, with_ctime=True) for path in self.files()]}

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        """Yield the entries in bounded memory, block by block, with the bytes of the source consumed so far.

        May be called again, and gives the same entries again.

        Parameters
        ----------
        max_bytes : int
            About as much memory as reading may take, the blocks included.

        Raises
        ------
        SourceError
            The file is damaged, holds what cannot be, or changed while it was read; names line, or row and column.
        """
        raise NotImplementedError
