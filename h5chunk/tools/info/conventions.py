"""Recognise what other programs store in HDF5 beside data, and the attributes that change the meaning of numbers.

Sources: MATLAB's v7.3 files (https://www.mathworks.com/help/matlab/import_export/mat-file-versions.html), PyTables'
and pandas' groups, Keras' weights, the netCDF-4 format (https://docs.unidata.ucar.edu/nug/current/file_format_specifications.html)
and the CF conventions, section 8.1 (packed data).
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError
from h5chunk.store.hdf5.guard import small_attribute
from h5chunk.store.hdf5.strings import read_words

PANDAS_NAMES = re.compile(r"axis\d+(_level\d+|_label\d+)?|block\d+_items(_level\d+|_label\d+)?")
PLACEHOLDER = "This is a netCDF dimension but not a netCDF variable"
MAX_MEMBERS = 100  # members of the root group that are looked at
MATLAB_CHARACTERS = ("char", "string", "cell", "function_handle")


@dataclass(frozen=True)
class Packing:
    """The attributes with which netCDF says what stored values mean. value = stored * ``scale`` + ``offset``."""

    scale: float = 1.0
    offset: float = 0.0
    missing: tuple[int | float, ...] = ()  # stored values that mean that there is no value
    is_unsigned: bool = False  # whether signed integers stand for unsigned ones

    @property
    def is_packed(self) -> bool:
        return (self.scale, self.offset) != (1.0, 0.0)

    def __bool__(self) -> bool:
        return self != Packing()

    def __str__(self) -> str:
        """Describe the packing, as CF conventions define it."""
        parts = []
        if self.is_packed:
            parts.append(
                f"values are packed: value = stored * {self.scale:g} (scale_factor) + {self.offset:g} (add_offset)"
            )
        if self.is_unsigned:
            parts.append("stored integers are unsigned (_Unsigned), but read as signed")
        if self.missing:
            parts.append(f"{' and '.join(map(str, self.missing))} means missing (_FillValue or missing_value)")
        if self.is_packed or self.is_unsigned or self.missing:
            parts.append('pass decode="cf" to the data set to get the values')
        return "; ".join(parts)


def is_matlab(file: h5py.File) -> bool:
    """Return whether MATLAB wrote a file: one of its objects has the attribute MATLAB_class."""
    return any(h5py.h5a.exists(item.id, b"MATLAB_class") for item in _members(file).values())


def is_keras(file: h5py.File) -> bool:
    """Return whether a file has the weights of a Keras model."""
    members = _members(file)
    owners = [file, *(members[name] for name in ("model_weights",) if name in members)]
    if any(h5py.h5a.exists(owner.id, name) for owner in owners for name in (b"layer_names", b"keras_version")):
        return True
    names = set(members)  # Keras 3 writes no attributes
    return "_layer_checkpoint_dependencies" in names or (
        "layers" in names and names <= {"layers", "optimizer", "vars", "metrics"}
    )


def _members(file: h5py.File) -> dict[str, h5py.Group | h5py.Dataset]:
    """Return the first members of a file that are not links."""
    names = [name for name in islice(file, MAX_MEMBERS) if isinstance(name, str)]
    return {name: file[name] for name in names if isinstance(file.get(name, getlink=True), h5py.HardLink)}


def why_no_data(name: str, dataset: h5py.Dataset, *, in_keras: bool = False) -> str:
    """Return what a dataset has if these are no data of samples; empty if it may be data."""
    *groups, last = name.split("/")
    if groups and groups[0] in ("#refs#", "#subsystem#"):
        return "references of MATLAB"
    if any(group.startswith("_i_") for group in groups):
        return "an index of PyTables"
    if in_keras:
        return "weights of a Keras model"
    if h5py.h5a.exists(dataset.id, b"MATLAB_empty") and small_attribute(dataset, "MATLAB_empty", 0):
        return "an empty array of MATLAB, of which only the size is stored"
    if _word(dataset, "MATLAB_class") in MATLAB_CHARACTERS:
        return "characters of MATLAB"
    if _word(dataset, "NAME").startswith(PLACEHOLDER):
        return "a dimension of netCDF without values"
    if _word(dataset, "CLASS") == "PALETTE":
        return "a palette of colours"
    if groups and PANDAS_NAMES.fullmatch(last) and h5py.h5a.exists(dataset.parent.id, b"pandas_type"):
        return "names of rows or columns of pandas"
    return ""


def packing_of(dataset: h5py.Dataset) -> Packing:
    """Return the packing of a dataset of numbers; the default if it has no attributes of netCDF."""
    if dataset.dtype.kind not in "iuf":
        return Packing()
    kind = dataset.dtype.newbyteorder("=")
    marks = np.concatenate([_numbers(dataset, name) for name in ("_FillValue", "missing_value")])
    with np.errstate(all="ignore"):
        stored = dict.fromkeys(marks.astype(kind).tolist())
    return Packing(
        scale=_number(dataset, "scale_factor", 1.0),
        offset=_number(dataset, "add_offset", 0.0),
        missing=tuple(value for value in stored if math.isfinite(value)),  # --stats leaves out all others
        is_unsigned=kind.kind == "i" and _word(dataset, "_Unsigned").lower() == "true",
    )


def _number(dataset: h5py.Dataset, name: str, default: float) -> float:
    found = _numbers(dataset, name)
    return float(found[0]) if len(found) == 1 and math.isfinite(found[0]) else default


def _numbers(dataset: h5py.Dataset, name: str) -> np.ndarray:
    value = np.ravel(small_attribute(dataset, name, ())) if h5py.h5a.exists(dataset.id, name.encode()) else np.empty(0)
    return value if value.dtype.kind in "iuf" else np.empty(0)


def _word(dataset: h5py.Dataset, name: str) -> str:
    """Return a string attribute, or an empty string."""
    words: list[Any] = []
    with suppress(FileError, OSError, ValueError, RuntimeError, KeyError, TypeError):
        words = read_words(dataset, name, FileError)
    return words[0] if len(words) == 1 else ""
