"""Recognise what other programs store in HDF5 beside data.

Sources: MATLAB's v7.3 files (https://www.mathworks.com/help/matlab/import_export/mat-file-versions.html), PyTables'
and pandas' groups, Keras' weights, and the netCDF-4 format
(https://docs.unidata.ucar.edu/nug/current/file_format_specifications.html).
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from typing import Any

import h5py

from h5chunk.errors import FileError
from h5chunk.store.hdf5.guard import small_attribute
from h5chunk.store.hdf5.strings import read_words

PANDAS_NAMES = re.compile(r"axis\d+(_level\d+|_label\d+)?|block\d+_items(_level\d+|_label\d+)?")
PLACEHOLDER = "This is a netCDF dimension but not a netCDF variable"
MAX_MEMBERS = 100  # members of the root group that are looked at
MATLAB_CHARACTERS = ("char", "string", "cell", "function_handle")


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


def _word(dataset: h5py.Dataset, name: str) -> str:
    """Return a string attribute, or an empty string."""
    words: list[Any] = []
    with suppress(FileError, OSError, ValueError, RuntimeError, KeyError, TypeError):
        words = read_words(dataset, name, FileError)
    return words[0] if len(words) == 1 else ""
