"""What a source of a sparse matrix gives, and how one is opened.

A source knows its file and nothing of what is made of it. It checks what the file claims before it believes it, names
what is wrong with row, column or line, and lets through any finite value of any type: which values fit the output, and
what is done about duplicates, is the converter's business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Block:
    """Some entries of a sparse matrix.

    Attributes
    ----------
    rows, columns : (n,) int64
        Numbers from 0, as the source counts them. Where the source has ids (`SparseSource.has_ids`) the raw ids:
        int64, or fixed-length bytes (``S``, UTF-8) whose length may differ from block to block.
    values : (n,) array of any numeric type, or None
        Finite. None for a pure pattern, where every entry is a one; it is None in all blocks of a source or in none.
    """

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray | None

    def __len__(self) -> int:
        return len(self.rows)


class SparseSource(Protocol):
    """A sparse matrix in a file.

    Attributes
    ----------
    path : str
    kind : str
        One of ``csv``, ``npz``, ``mtx``, ``libsvm``, ``h5ad``, ``10x``, ``npy``.
    shape : (rows, columns)
        None where only reading tells (delimited files; the columns of libsvm).
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
    num_bytes : int
        Size of what is read, for progress.
    """

    path: str
    kind: str
    shape: tuple[int | None, int | None]
    has_ids: bool
    is_sorted_by_row: bool
    row_fields: Mapping[str, np.ndarray]
    categories: Mapping[str, list[str]]
    row_names: np.ndarray | None
    column_names: np.ndarray | None
    num_bytes: int

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        """The entries, in bounded memory, each with the bytes of the source consumed so far.

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


def open_sparse(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    layer: str | None = None,
    columns: tuple[str, ...] | None = None,
) -> SparseSource:
    """Open a sparse matrix; reads no more than its description.

    Parameters
    ----------
    path : path
    format : str, optional
        A kind of `SparseSource`, where name and first bytes do not tell (`looks_sparse`).
    layer : str, optional
        The matrix in an .h5ad: ``X`` (default), ``raw`` (that is ``raw/X``) or the name of a layer; the genome of a
        10x file of version 2 that has several.
    columns : tuple of str, optional
        Columns of a delimited file that are row, column and, if there is a third, value: names of the header, or
        numbers from 0.

    Raises
    ------
    SourceError
        There is no such file, it is none of ours, or it is broken.
    OptionError
        An option that cannot be.
    """
    raise NotImplementedError


def looks_sparse(path: str | os.PathLike[str]) -> str | None:
    """The kind of a file by its name and first bytes, None if it is none of ours (a folder or archive of images)."""
    raise NotImplementedError
