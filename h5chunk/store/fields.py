"""What the datasets of a file say of themselves, as fields of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.store.format import GROUP, Header
from h5chunk.store.matrixfield import MatrixField, look_at_matrix


@dataclass(frozen=True)
class Field:
    """One field of a file, as its dataset says.

    Attributes
    ----------
    name : str
        What users call it.
    dataset : str
        Path in the file.
    grid : ChunkGrid
    dtype : np.dtype
        Native byte order.
    axes : str
        Such as NCHW, as the file says; empty if it does not.
    scale : float, optional
        Of rows of a matrix: a value is what is stored over this.
    """

    name: str
    dataset: str
    grid: ChunkGrid
    dtype: np.dtype
    axes: str = ""
    scale: float | None = None

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.grid.shape[1:]


def usual_fields(file: h5py.File, path: Path) -> dict[str, str]:
    """What is read where nothing is named."""
    main = next((name for name in ("images", "X") if name in file), None)
    if main is None:
        raise FieldError(_missing(file, path, "images"))
    return {name: name for name in (main, "labels") if name in file}


def _missing(file: h5py.File, path: Path, wanted: str) -> str:
    datasets: list[str] = []
    file.visititems(lambda name, item: datasets.append(name) if isinstance(item, h5py.Dataset) and item.shape else None)
    datasets = [name for name in datasets if not name.startswith(f"{GROUP}/")]
    there = ", ".join(datasets[:8]) + (", ..." if len(datasets) > 8 else "") if datasets else "no datasets at all"
    remedy = "name those to read with fields={'name': 'dataset'}"
    return f"{printable(path)}: has no dataset {wanted!r}; it has {there}: {remedy}"


def look_at(file: h5py.File, path: Path, name: str, dataset: str, header: Header | None) -> Field | MatrixField:
    """What a dataset, or the group of a matrix, says of itself, if it can be a field."""
    try:
        item = file.get(dataset)
    except (KeyError, OSError, ValueError) as error:
        raise FieldError(f"{printable(path)}: dataset {dataset!r} cannot be opened: {error}") from None
    if item is None:
        raise FieldError(_missing(file, path, dataset))
    where = f"{printable(path)}: {dataset!r}"
    if isinstance(item, h5py.Group) and "indptr" in item:
        return look_at_matrix(item, path, name, header.chunk_samples if header else None)
    if not isinstance(item, h5py.Dataset):
        raise FieldError(f"{where} is a {type(item).__name__.lower()}: name a dataset in it")
    if not item.shape:
        raise FieldError(f"{where} is a single value: a field has one row a sample")
    if item.dtype.kind not in "biufS":
        raise FieldError(f"{where} has the type {item.dtype}: a field holds numbers or strings of fixed length")
    filtered = item.id.get_create_plist().get_nfilters() > 0
    grid = ChunkGrid(tuple(item.shape), item.chunks, item.dtype.itemsize, filtered)
    axes = item.attrs.get("axes", b"")
    axes = axes.decode() if isinstance(axes, bytes) else ""
    return Field(name, dataset, grid, item.dtype.newbyteorder("="), axes, _scale(item, path, header))


def _scale(dataset: h5py.Dataset, path: Path, header: Header | None) -> float | None:
    """What the values of dense rows of ours are to be divided by."""
    if header is None or "scale" not in dataset.attrs:
        return None
    scale = float(dataset.attrs["scale"])
    if not 0 < scale < math.inf:
        raise FileError(f"{printable(path)}: {dataset.name!r} is damaged: its scale is {scale}")
    return scale
