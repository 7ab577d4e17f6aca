"""Convert a sparse matrix into one HDF5 file: read, sort by row, choose how values are stored, write.

Entries are read once and sorted within ``memory_bytes``. What does not fit is kept on disk beside the output, in
unnamed files that the system removes when the process ends. The memory limit does not change the bytes of the output.

A conversion that is stopped starts over.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import OptionError, SourceError, human_bytes, printable
from h5chunk.machine import available_cores
from h5chunk.plan.codes import Coding, FloatCoding, Storage
from h5chunk.plan.csr import index_dtype, plan_csr
from h5chunk.plan.layout import Layout, plan_layout
from h5chunk.sources.matrix.block import Block, SparseSource, Transposed
from h5chunk.stamp import stamp_of
from h5chunk.store.format.header import CSR, DENSE, MATRIX, read_matrix
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.open import opened
from h5chunk.store.write.csr import CsrWriter, csr_spec, dense_spec
from h5chunk.store.write.journal import is_made_by, key_of
from h5chunk.store.write.new_file import NewFile, write_columns
from h5chunk.store.write.part_file import check_output
from h5chunk.store.write.targets import CompressedTarget, PlainTarget, Target
from h5chunk.tools.convert.matrix_ids import OldIds, read_old_ids
from h5chunk.tools.convert.matrix_read import (
    READ_SHARE,
    SORT_SHARE,
    SPOOL_SHARE,
    SortedMatrix,
    check_shape,
    first_that_fits,
    no_scale_error,
    position_text,
    unfit_error,
)
from h5chunk.tools.convert.matrix_select import Selection, select
from h5chunk.tools.convert.options import MatrixOptions
from h5chunk.tools.convert.report import MatrixReport
from h5chunk.tools.convert.samples import KEY_FACTS
from h5chunk.tools.progress import Progress, count_up

PROBE_S = 1.0  # seconds for which a dry run reads the source

Arrays = Mapping[str, np.ndarray]


def convert_matrix(
    source: SparseSource,
    path: Path,
    options: MatrixOptions,
    *,
    source_options: Mapping[str, Any] = MappingProxyType({}),
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> MatrixReport:
    """Write a matrix to one HDF5 file, or report that the same call has already written it.

    A dry run reads the source for about a second, and writes nothing. ``source_options`` are the options with which
    the source was opened. Raises the same errors as `h5chunk.convert`.
    """
    started = time.perf_counter()
    source = Transposed(source) if options.transpose else source
    options, identity = options.for_kind(source.kind), source.identity()
    facts: dict[str, Any] = {"options": options.recorded(), "how": dict(source_options), "source": identity}
    if options.time_order and source.time_name is None:
        raise OptionError(
            f"time_order is given, but {printable(source.path)} has no column of times: name the column as the "
            "fourth of --columns"
        )
    old = read_old_ids(options.ids_from, source, keep_rows=options.keep_rows)
    if options.ids_from is not None:
        facts["ids_from"] = stamp_of(options.ids_from, with_ctime=True)
    command_id = None if identity is None else key_of({**KEY_FACTS, **facts})
    complete = not overwrite and command_id is not None and is_made_by(path, command_id)
    if not complete:
        check_output(path, overwrite)
    with explain_memory_error(options.memory_bytes):
        if dry_run and not complete:
            facts = _predict(source, path, options)
        else:
            facts = {} if complete else _write(source, path, options, old, overwrite, command_id, progress)
            facts = {**_facts_of_file(path), "seconds": time.perf_counter() - started, **facts}
    return MatrixReport(
        path=str(path),
        source_kind=source.kind,
        dry_run=dry_run,
        axes=source.axes,
        duplicates=options.duplicates_text(source.time_name),
        ignored=[f"{name}: {reason}" for name, reason in source.ignored.items()],
        notes=[*source.notes],
        already_complete=complete,
        **facts,
    )


def _write(
    source: SparseSource,
    path: Path,
    options: MatrixOptions,
    old: OldIds,
    overwrite: bool,
    command_id: str | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Write the file; return the values for the report that cannot be read from the file."""

    def report_read(done: int) -> None:
        if progress:
            progress("read", done, source.num_bytes)

    with NewFile(path, overwrite) as new, ExitStack() as stack:
        folder = Path(os.path.realpath(path)).parent

        def attempt(coding: Coding | FloatCoding) -> Selection:
            stack.close()
            return select(SortedMatrix(source, options, coding, folder, stack, report_read, old))

        selection = first_that_fits(options, attempt)
        fields, tables = fields_of(selection), tables_of(selection)
        write = _write_dense if options.dense else _write_csr
        chunk_samples = write(new, selection, fields, tables, count_up("write", selection.num_entries, progress))
        write_columns(new, fields, chunk_samples)
        for name, values in tables.items():
            new.write(f"{GROUP}/{name}", values)
        new.command_id = command_id
        new.commit()
        known = {
            "num_entries": selection.num_entries,
            "counts": selection.counts,
            "num_ranges": selection.matrix.entries.num_ranges,
        }
        return {**known, "fields": {name: str(values.dtype) for name, values in fields.items()}}


def _facts_of_file(path: Path) -> dict[str, Any]:
    """Read the values for the report from the header of a complete file."""
    with opened(path) as file:
        matrix = read_matrix(file)
        assert matrix is not None
        return {
            **asdict(matrix),
            "num_bytes": path.stat().st_size,
            "chunk_samples": int(file[GROUP].attrs["chunk_samples"]),
            "fields": {name: str(file[name].dtype) for name in file[f"{GROUP}/checksums"] if name != MATRIX},
        }


@contextmanager
def explain_memory_error(memory_bytes: int) -> Iterator[None]:
    """Turn a MemoryError within the context into an OptionError that names the limit and the remedy."""
    try:
        yield
    except MemoryError:
        raise OptionError(
            f"the memory limit is {human_bytes(memory_bytes)}, but the system has less free memory: lower the limit "
            "(--memory-bytes), or free memory"
        ) from None


# ---- fields with one value per row, and the names of rows, columns and categories


def fields_of(selection: Selection) -> dict[str, np.ndarray]:
    """Return the row fields of the source by their names in the file, with one value per row of the file."""
    fields: dict[str, np.ndarray] = {}
    source, order = selection.matrix.source, selection.matrix.order
    for name, values in source.row_fields.items():
        where = f"{printable(source.path)}: field {name!r}"
        if len(values) != len(order):
            raise SourceError(f"{where} has {len(values)} values, but the matrix has {len(order)} rows")
        if values.dtype.kind not in "biufS":
            raise SourceError(f"{where} is of type {values.dtype}")
        stored = field_name(name)
        if stored in fields:
            raise SourceError(f"{printable(source.path)}: two fields would be called {stored!r}")
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
    """Write compressed sparse rows; return the number of rows that a chunk holds on average."""
    options = selection.matrix.options
    sizes = selection.num_rows, selection.num_columns, selection.num_entries
    dtype = None if selection.storage.pattern else selection.storage.dtype
    layout = plan_csr(*sizes, value_dtype=dtype, chunk_samples=options.chunk_samples)
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
    """Write dense rows in chunks of whole rows; return the number of rows per chunk."""
    options = selection.matrix.options
    layout = plan_layout(
        selection.num_rows, selection.num_columns * selection.storage.dtype.itemsize, options.chunk_samples
    )
    threads, memory_bytes = available_cores(), options.memory_bytes
    need = layout.chunk_bytes * 3 * (threads + 1)
    if need > memory_bytes // 2:
        raise OptionError(
            f"dense chunks of {human_bytes(layout.chunk_bytes)} need {human_bytes(need)} of memory while they are "
            f"written, but half of memory_bytes is {human_bytes(memory_bytes // 2)}: raise memory_bytes, or give a "
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
        num_bytes = layout.num_chunks * layout.chunk_bytes
        target = PlainTarget(new, MATRIX, num_bytes=num_bytes, chunk_bytes=layout.chunk_bytes, checked=True)
    with target:
        for number, chunk in enumerate(_dense_chunks(layout, selection, report_written)):
            target.put(number * layout.chunk_bytes, chunk.reshape(-1).view(np.uint8))
        checksums = target.finish()
    new.write(f"{GROUP}/checksums/{MATRIX}", checksums)
    return layout.chunk_samples


def _dense_chunks(layout: Layout, selection: Selection, report_written: Callable[[int], None]) -> Iterator[np.ndarray]:
    """Yield the chunks, (chunk_samples, columns), in one reused buffer; the last chunk is padded with zeros."""
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
    options, old = selection.matrix.options, selection.matrix.old
    return {"seed": options.seed, "shuffled": options.shuffle and old.shuffled, "options": options.recorded()}


# ---- planning


class _Estimate(NamedTuple):
    """Properties of a matrix, estimated from the start of its source."""

    num_entries: int  # exact if the whole source was read
    seconds: float  # time to read the whole source
    whole: bool  # whether the whole source was read
    num_columns: int  # lower bound
    coding: Coding | FloatCoding
    storage: Storage


def _read_start(source: SparseSource, options: MatrixOptions, coding: Coding | FloatCoding) -> _Estimate:
    """Estimate a matrix's size and storage by reading for `PROBE_S` seconds.

    Raises UnfitError if ``coding`` cannot store a value.
    """
    tally, started = coding.tally(), time.perf_counter()
    num_entries, done, whole, largest = 0, 0, True, 0
    for block, done in source.blocks(options.memory_bytes // READ_SHARE):
        num_entries += len(block)
        tally.add(_units_of(source, block, coding))
        if not source.has_ids:
            largest = max(largest, int(block.columns.max(initial=0)))
        if time.perf_counter() - started > PROBE_S:
            whole = done >= source.num_bytes
            break
    storage = tally.storage()
    if storage is None:
        raise no_scale_error(source)
    factor = 1.0 if whole else source.num_bytes / max(1, done)
    seconds = (time.perf_counter() - started) * factor
    return _Estimate(int(num_entries * factor), seconds, whole, largest + 1, coding, storage)


def _units_of(source: SparseSource, block: Block, coding: Coding | FloatCoding) -> np.ndarray:
    """Return the values of a block in the units of the coding, as if no entry had duplicates."""
    values = np.ones(len(block), np.uint8) if block.values is None else block.values
    units, unfit = coding.units(values)
    if unfit is None:
        units, wrong = coding.finish_sums(units)
        unfit = int(wrong.argmax()) if wrong.any() else None
    if unfit is not None:
        position = position_text(block.rows[unfit], block.columns[unfit])
        raise unfit_error(source, coding, position, values[unfit].item())
    return units


def _predict(source: SparseSource, path: Path, options: MatrixOptions) -> dict[str, Any]:
    """Predict the values for the report from the start of the source. Raises errors in that part of the source."""
    memory_bytes = options.memory_bytes
    check_shape(source, options, source.shape[0] or 0, source.shape[1] or 0)
    start = first_that_fits(options, lambda coding: _read_start(source, options, coding))
    num_entries, coding, value_bytes = start.num_entries, start.coding, start.storage.dtype.itemsize
    rows, num_columns = source.shape
    width = index_dtype(num_columns or max(start.num_columns, 1 << 16)).itemsize + value_bytes
    num_bytes = num_entries * width + 24 * (rows or 0)
    if options.dense:
        num_bytes = (rows or 0) * (num_columns or 0) * value_bytes
    sorted_bytes = num_entries * (8 + (coding.dtype.itemsize if coding.num_bits is None else 0))
    spooled_bytes = num_entries * (8 + coding.dtype.itemsize) if source.has_ids else 0
    temporary = sorted_bytes if sorted_bytes > memory_bytes // SORT_SHARE // 2 else 0
    temporary += spooled_bytes if spooled_bytes > memory_bytes // SPOOL_SHARE else 0
    return {
        "kind": DENSE if options.dense else CSR,
        "num_rows": rows,
        "num_columns": num_columns,
        "num_entries": num_entries,
        "is_exact": start.whole,
        "dtype": str(start.storage.dtype),
        "scale": start.storage.scale,
        "pattern": start.storage.pattern,
        "num_bytes": num_bytes,
        "seconds": start.seconds * 2,  # sorting and writing take about as long as reading
        "fields": {field_name(name): str(values.dtype) for name, values in source.row_fields.items()},
        "free_bytes": shutil.disk_usage(path.absolute().parent).free,
        "memory_bytes": memory_bytes,
        "temporary_bytes": temporary,
    }
