"""Open a sparse matrix, whatever its format, and the interface of all its readers.

A source knows its file and nothing of what is made of it. It checks what the file claims before it believes it, names
what is wrong with row, column or line, and lets through any finite value of any type: which values fit the output, and
what is done about duplicates, is the converter's business.
"""

from __future__ import annotations

import importlib
import os
import posixpath
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from h5chunk.errors import OptionError, SourceError, printable
from h5chunk.sources.container import BoundedFile
from h5chunk.sources.sparse.memory import DEFAULT_MEMORY_BYTES
from h5chunk.sources.sparse.tenx_files import find_tenx_files

READERS: dict[str, tuple[str, str, tuple[str, ...]]] = {  # modules are imported when a file needs them
    "csv": ("delimited", "DelimitedSource", ("columns", "times")),
    "npz": ("npz", "NpzSource", ()),
    "mtx": ("mtx", "MtxSource", ()),
    "libsvm": ("libsvm", "LibsvmSource", ("memory_bytes",)),
    "h5ad": ("h5ad", "H5adSource", ("layer", "memory_bytes")),
    "10x": ("tenx", "open_tenx", ("layer", "memory_bytes")),
    "npy": ("npy", "NpySource", ()),
}
BY_NAME = {
    ".mtx": "mtx",
    ".libsvm": "libsvm",
    ".svmlight": "libsvm",
    ".svm": "libsvm",
    ".csv": "csv",
    ".tsv": "csv",
    ".dat": "csv",
    ".npy": "npy",
    ".h5ad": "h5ad",
}
MAX_NPZ_DIRECTORY_BYTES = 1 << 20  # of a zip that is asked whether it is a matrix
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True)
class Block:
    """Some entries of a sparse matrix.

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
        One of `READERS`.
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

    path: str
    kind: str
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
        raise NotImplementedError


def open_sparse(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    layer: str | None = None,
    columns: tuple[str, ...] | None = None,
    times: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
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
        Columns of a delimited file that are row, column and, if there are more, value and time: names of the header,
        or numbers from 0.
    times : bool
        Whether to read the time of each entry, from sources that have one.
    memory_bytes : int
        Limit on what the description takes in memory: names, labels and fields of rows.

    Raises
    ------
    SourceError
        There is no such file, its format is unknown, it is broken, or claims more than fits in memory.
    OptionError
        An invalid option.
    """
    path = os.fspath(path)
    kind = format or looks_sparse(path)
    if kind is None:
        if not os.path.exists(path):
            raise SourceError(f"{printable(path)}: there is no such file")
        raise SourceError(
            f"{printable(path)}: no sparse matrix that is known by its name and first bytes: say the format "
            f"({', '.join(READERS)})"
        )
    if kind not in READERS:
        raise OptionError(f"format is {kind!r} but must be one of {', '.join(READERS)}")
    module, name, takes = READERS[kind]
    for option, value in (("layer", layer), ("columns", columns)):
        if value is not None and option not in takes:
            raise OptionError(f"{option} is {value!r} but {printable(path)} is read as {kind}, which has none")
    options = {"layer": layer, "columns": columns, "times": times, "memory_bytes": memory_bytes}
    try:
        reader = getattr(importlib.import_module(f"h5chunk.sources.sparse.{module}"), name)
        source: SparseSource = reader(path, **{option: options[option] for option in takes})
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise SourceError(f'{printable(path)}: {kind} is read with pyarrow: pip install "h5chunk[sparse]"') from None
    return source


def looks_sparse(path: str | os.PathLike[str]) -> str | None:
    """The kind of a source by its name and first bytes; None if it is unknown (a folder or archive of images)."""
    path = os.fspath(path)
    name = os.fsencode(path).decode("utf-8", "backslashreplace").lower()
    if find_tenx_files(path) is not None:
        return "10x"
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            start = file.read(1 << 12)
    except OSError:
        return None
    if start.startswith(HDF5_MAGIC):
        return _kind_of_hdf5(path, name)
    if start.startswith(b"PK\x03\x04"):
        return "npz" if _has_matrix(path) else None
    if start.startswith(b"\x93NUMPY"):
        return "npy"
    extension = posixpath.splitext(name.removesuffix(".gz"))[1]
    if extension in BY_NAME or start.startswith(b"%%MatrixMarket"):
        return BY_NAME.get(extension, "mtx")
    if extension == ".npz" or (b"\0" in start and not start.startswith(b"\x1f\x8b")):
        return None
    return _kind_of_text(path)


def _kind_of_hdf5(path: str, name: str) -> str | None:
    import h5py

    if name.endswith(".h5ad"):
        return "h5ad"
    try:
        with h5py.File(path, "r") as file:
            links = {key: file.get(key, getlink=True) for key in list(file)[:1000]}
            own = [key for key, link in links.items() if isinstance(link, h5py.HardLink)]
            groups = [set(file[key]) for key in own if isinstance(file[key], h5py.Group)]
    except (OSError, RuntimeError, KeyError, ValueError):
        return None
    if any({"barcodes", "indptr", "indices"} <= keys for keys in groups):
        return "10x"
    return "h5ad" if {"X", "obs", "var"} <= set(own) else None


def _has_matrix(path: str) -> bool:
    """Whether a zip is an .npz of scipy; one of many images is known by the size of its directory alone."""
    try:
        with (
            BoundedFile(path, MAX_NPZ_DIRECTORY_BYTES, zipfile.BadZipFile) as file,
            zipfile.ZipFile(file) as archive,
        ):
            return {"format.npy", "shape.npy"} <= set(archive.namelist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
        return path.lower().endswith(".npz")


def _kind_of_text(path: str) -> str | None:
    """Text without a telling name is taken only if its first lines leave no doubt."""
    try:
        from h5chunk.sources.sparse import delimited, libsvm
        from h5chunk.sources.sparse.text import TextFile

        lines = TextFile(path).head_lines()
    except (ModuleNotFoundError, SourceError):
        return None
    if lines[0].startswith(b"%%MatrixMarket"):
        return "mtx"
    if libsvm.looks_libsvm(lines):
        return "libsvm"
    return "csv" if delimited.looks_delimited(lines) else None
