"""Describe the sparse matrices of a file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.store.format.matrix import CSR, MATRIX, read_matrix
from h5chunk.store.read.fields import MATRIX_PARTS, find_matrix_groups, look_at_matrix
from h5chunk.tools.info.report import MatrixInfo
from h5chunk.tools.report import shell_command

PART_ROWS = 1 << 20  # of data, read at a time
LOOK_BYTES = 256 << 20  # codes of more than this are not read


def find_matrices(file: h5py.File, path: Path, names: Iterable[str]) -> list[MatrixInfo]:
    """Describe the groups of another HDF5 file that hold what a sparse matrix is made of.

    Only the datasets of these names are looked at, which were checked.
    """
    groups = [name for name in find_matrix_groups(names) if isinstance(file[name], h5py.Group)]
    return [_describe(file[name], path, name, _convert_command(file, path, name)) for name in groups]


def _convert_command(file: h5py.File, path: Path, name: str) -> str:
    """The command that converts a matrix, if it is one of AnnData or 10x; else nothing."""
    members, (parent, _, last) = {*file}, name.rpartition("/")
    layer: list[str] | None = None
    if {"X", "obs", "var"} <= members and (parent == "layers" or name in ("X", "raw/X")):
        layer = [] if name == "X" else ["--layer", last if parent == "layers" else "raw"]
    elif not parent and "barcodes" in file[name]:
        layer = ["--layer", name] if len(members) > 1 else []
    return "" if layer is None else shell_command(["h5chunk", "convert", str(path), "NEW.h5", *layer])


def _describe(group: h5py.Group, path: Path, name: str, command: str) -> MatrixInfo:
    data = group["data"]
    about = MatrixInfo(name, "", None, None, math.prod(data.shape), str(data.dtype), _stored_bytes(group))
    try:
        field = look_at_matrix(group, path, name, None)
    except FileError as error:
        reason = str(error).removeprefix(f"{printable(path)}: {name!r} ").partition(": ")[0]
        return replace(about, verdict=f"{reason}: {command} makes one of it" if command else reason)
    shown = repr(printable(path))
    shown = shown if name == MATRIX else f"h5chunk.ChunkDataset({shown}, fields=[{name!r}])"
    verdict = f"its rows are samples as they are: h5chunk.ChunkLoader({shown}, batch_size)"
    if command:
        verdict += f"; {command} makes a file of it that is shuffled, and smaller where values are counts"
    return replace(about, kind=CSR, num_rows=field.num_rows, num_columns=field.num_columns, verdict=verdict)


def describe_matrix(file: h5py.File) -> MatrixInfo | None:
    """Describe the matrix of an h5chunk file; None if there is none. Raises FileError if it is damaged."""
    matrix = read_matrix(file)
    if matrix is None:
        return None
    item = file[MATRIX]
    about = MatrixInfo(
        MATRIX,
        matrix.kind,
        matrix.num_rows,
        matrix.num_columns,
        matrix.num_entries,
        "uint8",
        _stored_bytes(item),
        scale=matrix.scale,
        pattern=matrix.pattern,
    )
    if matrix.num_entries is None:
        return about
    sizes = np.diff(item["indptr"][()])
    if (sizes < 0).any():
        raise FileError(f"{printable(file.filename)}: damaged: indptr goes down")
    data, value_range = item["data"], None
    if data.size and data.nbytes <= LOOK_BYTES:
        parts = (data[start : start + PART_ROWS] for start in range(0, len(data), PART_ROWS))
        lows, highs = zip(*((int(part.min()), int(part.max())) for part in parts), strict=True)
        value_range = min(lows) / matrix.scale, max(highs) / matrix.scale
    return replace(
        about,
        density=matrix.num_entries / (matrix.num_rows * matrix.num_columns),
        median_row_entries=float(np.median(sizes)),
        max_row_entries=int(sizes.max()),
        value_range=value_range,
    )


def _stored_bytes(item: h5py.Group | h5py.Dataset) -> int:
    datasets = [item] if isinstance(item, h5py.Dataset) else [item[part] for part in MATRIX_PARTS]
    return sum(dataset.id.get_storage_size() for dataset in datasets)
