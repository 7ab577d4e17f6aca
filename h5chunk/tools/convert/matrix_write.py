"""Write the selected rows and columns of a matrix, with its fields and names, to a new file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from h5chunk.errors import OptionError, SourceError, exact_bytes, printable
from h5chunk.machine import available_cores
from h5chunk.plan.csr import index_dtype, plan_csr
from h5chunk.plan.layout import Layout, plan_layout
from h5chunk.store.format.header import MATRIX
from h5chunk.store.format.spec import CHECKSUMS, GROUP
from h5chunk.store.write.csr import CsrWriter, csr_spec, dense_spec
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.targets import CompressedTarget, PlainTarget, Target
from h5chunk.tools.convert.matrix_select import Selection

Arrays = Mapping[str, np.ndarray]


def write_matrix(new: NewFile, selection: Selection, report_written: Callable[[int], None]) -> dict[str, str]:
    """Write the file, and return the dtypes of its fields.

    ``report_written`` is called with the number of entries that were just written.
    """
    fields, tables = fields_of(selection), tables_of(selection)
    write = _write_dense if selection.matrix.options.dense else _write_csr
    chunk_samples = write(new, selection, fields, tables, report_written)
    for name, values in fields.items():
        new.write_checked(name, values, chunk_samples * values.itemsize)
    for name, values in tables.items():
        new.write(f"{GROUP}/{name}", values)
    return {name: str(values.dtype) for name, values in fields.items()}


# ---- fields with one value per row, and the names of rows, columns and categories


def fields_of(selection: Selection) -> dict[str, np.ndarray]:
    """Return the row fields of the source by their names in the file, with one value per written row."""
    fields: dict[str, np.ndarray] = {}
    matrix, source, order = selection.matrix, selection.matrix.source, selection.matrix.order
    for name, values in source.row_fields.items():
        where = f"{printable(source.path)}: field {name!r}"
        if len(values) != matrix.num_rows:
            raise SourceError(f"{where} has {len(values)} values, but the matrix has {matrix.num_rows} rows")
        if values.dtype.kind not in "biufS":
            raise SourceError(f"{where} has type {values.dtype}: use booleans, numbers or strings of fixed length")
        stored = field_name(name)
        if stored in fields:
            raise SourceError(f"{printable(source.path)}: two fields would have the name {stored!r}: rename one")
        kind = values.dtype.newbyteorder("<") if values.dtype.kind in "iuf" else values.dtype
        fields[stored] = values[order[selection.rows]].astype(
            np.uint8 if values.dtype.kind == "b" else kind, copy=False
        )
    return fields


def field_name(name: str) -> str:
    """Turn the name of a source's field into a valid name for a dataset at the root of the file.

    >>> field_name("cell type"), field_name("n/a"), field_name("X")
    ('cell type', 'n_a', 'X_')
    """
    name = name.replace("/", "_").replace("\0", "_")
    return f"{name}_" if name in (MATRIX, GROUP, "", ".", "..") else name


def tables_of(selection: Selection) -> dict[str, np.ndarray]:
    """Return the tables of row and column names, source indices and categories, by their names in the file."""
    matrix, source = selection.matrix, selection.matrix.source
    index = matrix.order[selection.rows]
    tables: dict[str, np.ndarray] = {"source_index": index}
    rows = matrix.row_ids if matrix.row_ids is not None else source.row_names
    columns = matrix.column_ids if matrix.column_ids is not None else source.column_names
    if rows is not None:
        tables["row_ids"] = rows[index]
    if columns is not None:
        tables["column_ids"] = columns if selection.columns is None else columns[selection.columns]
    if source.column_symbols is not None and matrix.column_ids is None:
        tables["column_symbols"] = source.column_symbols[... if selection.columns is None else selection.columns]
    if selection.columns is not None:
        tables["column_index"] = np.flatnonzero(selection.columns).astype(np.int64)
    for name, names in source.categories.items():
        if name in source.row_fields and names:
            encoded = np.array([category.encode() for category in names], "S")
            tables[f"categories/{field_name(name)}"] = encoded
            if name == "labels":
                tables["class_names"] = encoded
    # HDF5 has no strings of length 0
    return {name: v.astype("S1") if v.dtype == np.dtype("S0") else v for name, v in tables.items()}


# ---- writing rows


def _write_csr(
    new: NewFile, selection: Selection, fields: Arrays, tables: Arrays, report_written: Callable[[int], None]
) -> int:
    """Write compressed sparse rows; return the mean number of rows per chunk."""
    options = selection.matrix.options
    sizes = selection.num_rows, selection.num_columns, selection.num_entries
    dtype = None if selection.storage.pattern else selection.storage.dtype
    layout = plan_csr(*sizes, value_dtype=dtype, chunk_samples=selection.matrix.chunk_samples)
    storage: dict[str, Any] = {"scale": selection.storage.scale, "time_order": options.time_order}
    new.allocate(csr_spec(layout, attributes=_attributes(selection), fields=fields, tables=tables, **storage))
    writer = CsrWriter(new, layout)
    with new.flusher():
        for rows, columns, values in selection.entries(layout.index_dtype):
            writer.append(columns, None if layout.pattern else values)
            report_written(len(rows))
        writer.finish(selection.row_entries)
    return layout.chunk_samples


def _write_dense(
    new: NewFile, selection: Selection, fields: Arrays, tables: Arrays, report_written: Callable[[int], None]
) -> int:
    """Write dense rows in chunks of complete rows; return the number of rows per chunk."""
    options = selection.matrix.options
    layout = plan_layout(
        selection.num_rows, selection.num_columns * selection.storage.dtype.itemsize, selection.matrix.chunk_samples
    )
    threads, memory_bytes = available_cores(), options.memory_bytes
    need = layout.chunk_bytes * 3 * (threads + 1)
    if need > memory_bytes // 2:
        raise OptionError(
            f"dense chunks of {exact_bytes(layout.chunk_bytes)} need {exact_bytes(need)} of memory while they are "
            f"written, but half of memory_bytes is {exact_bytes(memory_bytes // 2)}: raise memory_bytes, or use a "
            "smaller chunk_samples"
        )
    is_compressed = options.compression != "none"
    values = {
        "scale": selection.storage.scale,
        "pattern": selection.storage.pattern,
        "attributes": _attributes(selection),
    }
    new.allocate(
        dense_spec(layout, selection.storage.dtype, gzip=is_compressed, fields=fields, tables=tables, **values)
    )
    target: Target
    if is_compressed:
        target = CompressedTarget(new, MATRIX.encode(), threads, checked=True)
    else:
        target = PlainTarget(new, MATRIX, layout.chunk_bytes)
    with target:
        for number, chunk in enumerate(_dense_chunks(layout, selection, report_written)):
            target.put(number * layout.chunk_bytes, chunk.reshape(-1).view(np.uint8))
        checksums = target.finish()
    new.write(f"{CHECKSUMS}/{MATRIX}", checksums)
    return layout.chunk_samples


def _dense_chunks(layout: Layout, selection: Selection, report_written: Callable[[int], None]) -> Iterator[np.ndarray]:
    """Yield the chunks, (chunk_samples, columns), in one reused buffer. The last chunk is padded with zeros."""
    size, number = layout.chunk_samples, 0
    chunk = np.zeros((size, selection.num_columns), selection.storage.dtype)
    for rows, columns, values in selection.entries(index_dtype(selection.num_columns)):
        start = 0
        while start < len(rows):
            while rows[start] >= (number + 1) * size:
                yield chunk
                number += 1
                chunk[...] = 0
            stop = int(np.searchsorted(rows, (number + 1) * size, "left"))
            chunk[rows[start:stop] - number * size, columns[start:stop]] = values[start:stop]
            start = stop
        report_written(len(rows))
    for _ in range(number, layout.num_chunks):
        yield chunk
        chunk[...] = 0


def _attributes(selection: Selection) -> dict[str, Any]:
    matrix, options = selection.matrix, selection.matrix.options
    recorded = {**options.recorded(), **matrix.shard}
    return {"seed": options.seed, "shuffled": options.shuffle and matrix.old.shuffled, "options": recorded}
