"""Files of a sparse matrix in memory, its rows in the order that they have there."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from h5chunk.plan.csr import CsrLayout, plan_csr
from h5chunk.store.format.spec import GROUP
from h5chunk.store.write.csr import CsrWriter, csr_spec
from h5chunk.store.write.new_file import NewFile


def write_csr(
    path: str | os.PathLike[str],
    indptr: np.ndarray,
    indices: np.ndarray,
    codes: np.ndarray | None,
    num_columns: int,
    *,
    scale: float = 1.0,
    chunk_samples: int | None = None,
    seed: int = 0,
    shuffled: bool = False,
    fields: Mapping[str, np.ndarray] | None = None,
    tables: Mapping[str, np.ndarray] | None = None,
    overwrite: bool = False,
) -> CsrLayout:
    """Write a matrix from memory, in the order of its rows.

    Parameters
    ----------
    path : path
    indptr : (rows + 1,) int64
    indices : (entries,) unsigned integers
        Ascending within a row.
    codes : (entries,) uint8, float16 or float32, or None
        None for a pattern.
    num_columns : int
    scale : float
        A value is its code over this.
    chunk_samples : int, optional
        Rows of a nominal chunk; chosen if not given.
    seed, shuffled
        What the file says of how the rows were permuted.
    fields : dict of str to (rows,) array
    tables : dict of str to array
        Datasets below ``/h5chunk``; ``source_index`` is 0, 1, 2, ... if not among them.
    overwrite : bool
    """
    num_rows = len(indptr) - 1
    layout = plan_csr(
        num_rows,
        num_columns,
        len(indices),
        value_dtype=None if codes is None else codes.dtype,
        chunk_samples=chunk_samples,
    )
    fields = fields or {}
    tables = {"source_index": np.arange(num_rows, dtype=np.int64), **(tables or {})}
    attributes = {"seed": seed, "shuffled": shuffled, "options": {}}
    with NewFile(path, overwrite) as new:
        new.allocate(csr_spec(layout, scale=scale, attributes=attributes, fields=fields, tables=tables))
        writer = CsrWriter(new, layout)
        writer.append(indices.astype(layout.index_dtype, copy=False), codes)
        writer.finish(np.diff(indptr))
        for name, values in fields.items():
            new.write_checked(name, values, layout.chunk_samples * values.itemsize)
        for name, values in tables.items():
            new.write(f"{GROUP}/{name}", values)
        new.commit()
    return layout
