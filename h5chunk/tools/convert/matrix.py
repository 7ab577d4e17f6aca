"""Convert a sparse matrix into one HDF5 file: read, sort by row, choose the codes, write.

Entries are read once and sorted within ``memory_bytes``; what does not fit waits on disk, beside the output, in files
without names, which the system takes back however this ends. The bytes of the output do not depend on the memory.

A conversion that is stopped starts over.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from h5chunk.errors import OptionError, SourceError, human_bytes, printable
from h5chunk.plan.csr import index_dtype, plan_csr
from h5chunk.plan.duplicates import describe
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.matrix.transposed import Transposed
from h5chunk.store.format.spec import GROUP, FileSpec
from h5chunk.store.write.columns import write_columns
from h5chunk.store.write.command_id import is_made_by
from h5chunk.store.write.csr import CsrWriter, csr_spec
from h5chunk.store.write.journal import key_of
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.part_file import check_output
from h5chunk.tools.convert.matrix_dense import DenseFile
from h5chunk.tools.convert.matrix_fields import field_name, fields_of, tables_of
from h5chunk.tools.convert.matrix_read import Budget, read_source
from h5chunk.tools.convert.matrix_select import Kept, choose_what_to_keep
from h5chunk.tools.convert.options import MatrixOptions
from h5chunk.tools.convert.report_matrix import MatrixPlan, MatrixReport, read_report
from h5chunk.tools.convert.resume import facts_of_all
from h5chunk.tools.progress import Progress, count_up

PROBE_S = 1.0  # time to read the start of a source for a plan


def convert_matrix(
    source: SparseSource,
    path: Path,
    options: MatrixOptions,
    *,
    how: Mapping[str, Any] = MappingProxyType({}),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> MatrixReport:
    """Write a matrix to one HDF5 file, or report that the same call has done so before.

    Parameters
    ----------
    source : SparseSource
    path : Path
    options : MatrixOptions
    how : mapping
        Options that the source was opened with.
    overwrite : bool
    progress : callable, optional

    Raises
    ------
    SourceError, OutputError, OptionError
        As `h5chunk.convert`.
    """
    started = time.perf_counter()
    source, options = _prepare(source, options)
    command_id = _command_id(source, options, how)
    if not overwrite and command_id is not None and is_made_by(path, command_id):
        return replace(read_report(path, source), seconds=time.perf_counter() - started)
    check_output(path, overwrite)

    def report_read(done: int) -> None:
        if progress:
            progress("read", done, source.num_bytes)

    with ExitStack() as stack:
        stack.enter_context(naming_memory(options.memory_bytes))
        new = stack.enter_context(NewFile(path, overwrite))
        read = read_source(source, options, Path(os.path.realpath(path)).parent, stack, report_read)
        kept = choose_what_to_keep(read, options.min_row_count, options.min_column_count)
        if kept.num_columns < 1 or not len(kept.row_entries):
            raise SourceError(f"{printable(source.path)}: nothing is left of it")
        fields, tables = fields_of(kept), tables_of(kept)
        write = _write_dense if options.dense else _write_csr
        report_written = count_up("write", int(kept.row_entries.sum()), progress)
        chunk_samples = write(new, kept, options, fields, tables, report_written)
        new.command_id = command_id
        new.commit()
        num_ranges = read.entries.num_ranges
    return MatrixReport(
        path=str(path),
        source_kind=source.kind,
        kind="dense" if options.dense else "csr",
        num_rows=len(kept.row_entries),
        num_columns=kept.num_columns,
        num_entries=int(kept.row_entries.sum()),
        num_bytes=path.stat().st_size,
        scale=kept.scale,
        pattern=kept.pattern,
        chunk_samples=chunk_samples,
        seconds=time.perf_counter() - started,
        counts={what: count for what, count in kept.counts.items() if count},
        num_ranges=num_ranges,
        fields=list(fields),
        axes=source.axes,
    )


def _prepare(source: SparseSource, options: MatrixOptions) -> tuple[SparseSource, MatrixOptions]:
    return Transposed(source) if options.transpose else source, options.for_kind(source.kind)


def _command_id(source: SparseSource, options: MatrixOptions, how: Mapping[str, Any]) -> str | None:
    """Identify the command: equal ones make equal files."""
    identity = source.identity()
    facts = {**facts_of_all(), "options": options.recorded(), "how": dict(how), "source": identity}
    return None if identity is None else key_of(facts)


@contextmanager
def naming_memory(memory_bytes: int) -> Iterator[None]:
    """Turn the system's refusal of memory into an error that says how to go on."""
    try:
        yield
    except MemoryError:
        raise OptionError(
            f"memory_bytes is {human_bytes(memory_bytes)}, but the system gave less: allow less (--memory-bytes), or "
            "give this process more"
        ) from None


def _write_csr(
    new: NewFile,
    kept: Kept,
    options: MatrixOptions,
    fields: Mapping[str, np.ndarray],
    tables: Mapping[str, np.ndarray],
    wrote: Callable[[int], None],
) -> int:
    num_entries = int(kept.row_entries.sum())
    layout = plan_csr(
        len(kept.row_entries),
        kept.num_columns,
        num_entries,
        pattern=kept.pattern,
        chunk_samples=options.chunk_samples,
    )
    new.allocate(csr_spec(layout, scale=kept.scale, attributes=_attributes(options), fields=fields, tables=tables))
    writer = CsrWriter(new, layout)
    with new.flusher():
        for part in kept.parts(layout.index_dtype):
            writer.append(part.columns, None if layout.pattern else part.values)
            wrote(len(part.rows))
        writer.finish(kept.row_entries)
        _write_rest(new, fields, tables, layout.chunk_samples)
    return layout.chunk_samples


def _write_dense(
    new: NewFile,
    kept: Kept,
    options: MatrixOptions,
    fields: Mapping[str, np.ndarray],
    tables: Mapping[str, np.ndarray],
    wrote: Callable[[int], None],
) -> int:
    num_rows, num_columns = len(kept.row_entries), kept.num_columns
    file = DenseFile(num_rows, num_columns, options.chunk_samples, options.is_compressed, options.memory_bytes)
    spec: FileSpec = file.spec(
        scale=kept.scale, pattern=kept.pattern, attributes=_attributes(options), fields=fields, tables=tables
    )
    new.allocate(spec)
    file.write(new, kept.parts(index_dtype(num_columns)), wrote)
    _write_rest(new, fields, tables, file.layout.chunk_samples)
    return file.layout.chunk_samples


def _write_rest(
    new: NewFile, fields: Mapping[str, np.ndarray], tables: Mapping[str, np.ndarray], chunk_samples: int
) -> None:
    write_columns(new, fields, chunk_samples)
    for name, values in tables.items():
        new.write(f"{GROUP}/{name}", values)


def _attributes(options: MatrixOptions) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "shuffled": options.shuffle,
        "options": options.recorded(),
    }


def plan_matrix(
    source: SparseSource,
    path: Path,
    options: MatrixOptions,
    *,
    how: Mapping[str, Any] = MappingProxyType({}),
    overwrite: bool = False,
) -> MatrixPlan:
    """Predict what `convert_matrix` would do; reads the start of the source, for a second, and writes nothing.

    Raises
    ------
    As `convert_matrix`, as far as that shows it.
    """
    source, options = _prepare(source, options)
    command_id = _command_id(source, options, how)
    complete = not overwrite and command_id is not None and is_made_by(path, command_id)
    if not complete:
        check_output(path, overwrite)
    with naming_memory(options.memory_bytes):
        return replace(_plan(source, path, options), already_complete=complete)


def _plan(source: SparseSource, path: Path, options: MatrixOptions) -> MatrixPlan:
    coding, budget = options.coding(), Budget(options.memory_bytes, counts_columns=options.min_column_count > 0)
    budget.check_shape(source, source.shape[0] or 0, source.shape[1] or 0)
    started = time.perf_counter()
    num_entries, done, whole, largest = 0, 0, True, [0, 0]
    for block, done in source.blocks(budget.source_bytes):
        num_entries += len(block.rows)
        if block.values is not None:
            coding.units(block.values)
        if not source.has_ids and len(block.rows):
            largest = [max(largest[0], int(block.rows.max())), max(largest[1], int(block.columns.max()))]
        if time.perf_counter() - started > PROBE_S:
            whole = done >= source.num_bytes
            break
    seconds = time.perf_counter() - started
    if not whole:
        share = source.num_bytes / max(1, done)
        num_entries, seconds = int(num_entries * share), seconds * share
    rows, num_columns = source.shape
    width = index_dtype(num_columns or max(largest[1] + 1, 1 << 16)).itemsize + 1
    num_bytes = num_entries * width + 24 * (rows or 0)
    if options.dense:
        num_bytes = (rows or 0) * (num_columns or 0)
    record = 8 + (coding.dtype.itemsize if coding.num_bits is None else 0)
    temporary = num_entries * record if num_entries * record > budget.sort_bytes // 2 else 0
    waiting = num_entries * (8 + coding.dtype.itemsize) if source.has_ids else 0
    temporary += waiting if waiting > budget.spool_bytes else 0
    return MatrixPlan(
        source_kind=source.kind,
        num_rows=rows,
        num_columns=num_columns,
        num_entries=num_entries,
        whole=whole,
        fields={field_name(name): str(values.dtype) for name, values in source.row_fields.items()},
        num_bytes=num_bytes,
        temporary_bytes=temporary,
        free_bytes=shutil.disk_usage(path.absolute().parent).free,
        memory_bytes=options.memory_bytes,
        estimated_s=seconds * 2,  # sorting and writing take about as long as reading
        axes=source.axes,
        duplicates=describe(options.duplicates, source.time_name),
    )
