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
from h5chunk.store.guard.claims import small_attribute
from h5chunk.store.guard.guard import Guard
from h5chunk.store.read.matrixfield import MatrixField, look_at_matrix


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
    there = [name for name in ("images", "X", "labels") if file.id.links.exists(name.encode())]  # follows no link
    main = next((name for name in there if name != "labels"), None)
    if main is None:
        raise FieldError(_missing(file, path, "images"))
    return {name: name for name in (main, "labels") if name in there}


def _missing(file: h5py.File, path: Path, wanted: str) -> str:
    datasets = [name for name, item in Guard(path).walk(file) if isinstance(item, h5py.Dataset) and _has_samples(item)]
    datasets = sorted(name for name in datasets if not name.startswith(f"{GROUP}/"))
    there = ", ".join(datasets[:8]) + (", ..." if len(datasets) > 8 else "") if datasets else "no datasets at all"
    remedy = "name those to read with fields={'name': 'dataset'}"
    return f"{printable(path)}: has no dataset {wanted!r}; it has {there}: {remedy}"


def _has_samples(dataset: h5py.Dataset) -> bool:
    return dataset.id.get_create_plist().get_layout() == h5py.h5d.VIRTUAL or bool(dataset.shape)


def look_at(
    file: h5py.File, path: Path, name: str, dataset: str, header: Header | None, guard: Guard | None = None
) -> Field | MatrixField:
    """What a dataset, or the group of a matrix, says of itself, if it can be a field and the guard lets it through."""
    guard = guard or Guard(path)
    item = guard.find(file, dataset)
    if item is None:
        raise FieldError(_missing(file, path, dataset))
    where = f"{printable(path)}: {dataset!r}"
    if isinstance(item, h5py.Group) and item.id.links.exists(b"indptr"):
        guard.check_matrix(file, dataset)
        return look_at_matrix(item, path, name, header.chunk_samples if header else None)
    if not isinstance(item, h5py.Dataset):
        raise FieldError(f"{where} is a {type(item).__name__.lower()}: name a dataset in it")
    guard.check_field(item, dataset)
    if not item.shape:
        raise FieldError(f"{where} is a single value: a field has one row a sample")
    if item.dtype.kind not in "biufS":
        raise FieldError(f"{where} has the type {item.dtype}: a field holds numbers or strings of fixed length")
    filtered = item.id.get_create_plist().get_nfilters() > 0
    grid = ChunkGrid(tuple(item.shape), item.chunks, item.dtype.itemsize, filtered)
    axes = small_attribute(item, "axes", b"")
    axes = axes.decode("utf-8", "replace") if isinstance(axes, bytes) else ""
    return Field(name, dataset, grid, item.dtype.newbyteorder("="), axes, _scale(item, path, header))


def _scale(dataset: h5py.Dataset, path: Path, header: Header | None) -> float | None:
    """What the values of dense rows of ours are to be divided by."""
    found = small_attribute(dataset, "scale") if header is not None else None
    if found is None:
        return None
    try:
        scale = float(found)
    except (TypeError, ValueError):
        scale = math.nan
    if not 0 < scale < math.inf:
        raise FileError(f"{printable(path)}: {dataset.name!r} is damaged: its scale is {scale}")
    return scale
