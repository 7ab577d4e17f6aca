"""Fields with one value per row, and the names of rows, columns and categories, which a file keeps beside a matrix."""

from __future__ import annotations

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.store.format.matrix import MATRIX
from h5chunk.store.format.spec import GROUP
from h5chunk.tools.convert.matrix_select import Kept


def fields_of(kept: Kept) -> dict[str, np.ndarray]:
    """Return the row fields of the source, in the order of the file's rows."""
    fields: dict[str, np.ndarray] = {}
    source, index = kept.read.source, kept.source_index
    for name, values in source.row_fields.items():
        if len(values) != len(kept.read.order):
            raise SourceError(
                f"{printable(source.path)}: field {name!r} has {len(values)} values, "
                f"the matrix {len(kept.read.order)} rows"
            )
        if values.dtype.kind not in "biufS":
            raise SourceError(f"{printable(source.path)}: field {name!r} is of type {values.dtype}")
        given = field_name(name)
        if given in fields:
            raise SourceError(f"{printable(source.path)}: two fields would be called {given!r}")
        kind = values.dtype.newbyteorder("<") if values.dtype.kind in "iuf" else values.dtype
        fields[given] = values[index].astype(np.uint8 if values.dtype.kind == "b" else kind, copy=False)
    return fields


def field_name(name: str) -> str:
    """The name of a dataset at the root for a column of a source.

    >>> field_name("cell type"), field_name("n/a"), field_name("X")
    ('cell type', 'n_a', 'X_')
    """
    name = name.replace("/", "_").replace("\0", "_")
    return f"{name}_" if name in (MATRIX, GROUP, "", ".", "..") else name


def tables_of(kept: Kept) -> dict[str, np.ndarray]:
    """Return the tables of names and indices, by the names of their datasets."""
    read, source = kept.read, kept.read.source
    index = kept.source_index
    tables: dict[str, np.ndarray] = {"source_index": index}
    rows = read.row_ids if read.row_ids is not None else source.row_names
    columns = read.column_ids if read.column_ids is not None else source.column_names
    if rows is not None:
        tables["row_ids"] = rows[index]
    if columns is not None:
        tables["column_ids"] = columns if kept.columns is None else columns[kept.columns]
    if kept.columns is not None:
        tables["column_index"] = np.flatnonzero(kept.columns).astype(np.int64)
    for name, names in source.categories.items():
        if name in source.row_fields and names:
            encoded = np.array([each.encode() for each in names], "S")
            tables[f"categories/{field_name(name)}"] = encoded
            if name == "labels":
                tables["class_names"] = encoded
    return {name: _not_empty(values) for name, values in tables.items()}


def _not_empty(values: np.ndarray) -> np.ndarray:
    """HDF5 has no strings of length 0."""
    return values.astype("S1") if values.dtype == np.dtype("S0") else values
