"""Pack a sparse matrix into one HDF5 file: read, sort by row, settle on codes, write.

Entries are read once and sorted within ``memory_bytes``; what does not fit waits on disk, beside the output, in files
without names, which the system takes back however this ends. The bytes of the output do not depend on the memory.

A conversion that is stopped starts over.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import h5chunk
from h5chunk.errors import OptionError, SourceError, human_bytes, printable
from h5chunk.plan.duplicates import IN_ORDER, describe
from h5chunk.plan.sparse import index_dtype, plan_csr
from h5chunk.sources.container import stamp_of
from h5chunk.sources.sparse import block as sparse
from h5chunk.sources.sparse.block import SparseSource
from h5chunk.sources.sparse.tenx_files import find_tenx_files
from h5chunk.sources.sparse.transposed import Transposed
from h5chunk.store.format import GROUP, FileSpec
from h5chunk.store.write.command_id import has_command_id, is_made_by
from h5chunk.store.write.csr import CsrWriter, csr_spec, write_fields
from h5chunk.store.write.journal import key_of
from h5chunk.store.write.newfile import NewFile
from h5chunk.store.write.partfile import check_not_source, check_output, parse_output
from h5chunk.tools.convert.report_sparse import SparsePlan, SparseReport, read_report
from h5chunk.tools.convert.resume import facts_of_all
from h5chunk.tools.convert.sparse_dense import DenseFile
from h5chunk.tools.convert.sparse_fields import field_name, fields_of, tables_of
from h5chunk.tools.convert.sparse_keep import Kept, choose_what_to_keep
from h5chunk.tools.convert.sparse_options import MEMORY_BYTES as MEMORY_BYTES
from h5chunk.tools.convert.sparse_options import SparseOptions
from h5chunk.tools.convert.sparse_read import Budget, read_source
from h5chunk.tools.progress import Progress, count_up

PROBE_S = 1.0  # time to read the start of a source for a plan


def convert_sparse(
    source: SparseSource | str | os.PathLike[str],
    path: str | os.PathLike[str],
    options: SparseOptions,
    *,
    format: str | None = None,
    layer: str | None = None,
    columns: tuple[str, ...] | None = None,
    progress: Progress | None = None,
) -> SparseReport:
    """Pack a sparse matrix into one HDF5 file: see `h5chunk.convert`.

    Raises
    ------
    SourceError, OutputError, OptionError
        As `h5chunk.convert`.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(_naming_memory(options))
        source, path, options, command_id, complete = _open(source, path, options, format, layer, columns)
        if complete:
            return replace(read_report(path, source), seconds=time.perf_counter() - started)

        def told(done: int) -> None:
            if progress:
                progress("read", done, source.num_bytes)

        new = stack.enter_context(NewFile(path, options.overwrite))
        read = read_source(source, options, Path(os.path.realpath(path)).parent, stack, told)
        kept = choose_what_to_keep(read, options.min_row_count, options.min_column_count)
        if kept.num_columns < 1 or not len(kept.row_entries):
            raise SourceError(f"{printable(source.path)}: nothing is left of it")
        fields, tables = fields_of(kept), tables_of(kept)
        write = _write_dense if options.dense else _write_csr
        chunk_samples = write(
            new, kept, options, fields, tables, count_up("write", int(kept.row_entries.sum()), progress)
        )
        new.command_id = command_id
        new.commit()
        num_ranges = read.entries.num_ranges
    return SparseReport(
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


class _Opened(NamedTuple):
    """What is to be converted; ``complete`` if the same command has done that already."""

    source: SparseSource
    path: Path
    options: SparseOptions
    command_id: str | None
    complete: bool


def _open(
    source: SparseSource | str | os.PathLike[str],
    path: str | os.PathLike[str],
    options: SparseOptions,
    format: str | None,
    layer: str | None,
    columns: tuple[str, ...] | None,
) -> _Opened:
    path, command_id, complete = parse_output(path), None, False
    if isinstance(source, str | os.PathLike):
        check_not_source(path, source)
        check_output(path, options.overwrite or has_command_id(path))
        command_id = _command_id(source, options, format, layer, columns)
        source = sparse.open_sparse(
            source,
            format,
            layer=layer,
            columns=columns,
            times=options.duplicates in IN_ORDER,
            memory_bytes=options.memory_bytes,
        )
        complete = not options.overwrite and is_made_by(path, command_id)
        if not complete:
            check_output(path, options.overwrite)
    opened = Transposed(source) if options.transpose else source
    return _Opened(opened, path, options.for_kind(source.kind), command_id, complete)


def _command_id(
    source: str | os.PathLike[str],
    options: SparseOptions,
    format: str | None,
    layer: str | None,
    columns: tuple[str, ...] | None,
) -> str:
    """Identify the command: equal ones make equal files."""
    tenx = find_tenx_files(source)
    files = [source] if tenx is None else [tenx.matrix, tenx.barcodes, tenx.features]
    stamps = [stamp_of(os.stat(file)) for file in files if file is not None and os.path.exists(file)]
    how = {"options": options.recorded(), "format": format, "layer": layer, "columns": columns}
    return key_of({**facts_of_all(), **how, "stamps": stamps})


@contextmanager
def _naming_memory(options: SparseOptions) -> Iterator[None]:
    """Turn the system's refusal of memory into an error that says what to do."""
    try:
        yield
    except MemoryError:
        raise OptionError(
            f"memory_bytes is {human_bytes(options.memory_bytes)}, but the system gave less: allow less "
            "(--memory-bytes), or give this process more"
        ) from None


def _write_csr(
    new: NewFile,
    kept: Kept,
    options: SparseOptions,
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
    options: SparseOptions,
    fields: Mapping[str, np.ndarray],
    tables: Mapping[str, np.ndarray],
    wrote: Callable[[int], None],
) -> int:
    num_rows, num_columns = len(kept.row_entries), kept.num_columns
    file = DenseFile(num_rows, num_columns, options.chunk_samples, options.filter, options.memory_bytes)
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
    write_fields(new, fields, chunk_samples)
    for name, values in tables.items():
        new.write(f"{GROUP}/{name}", values)


def _attributes(options: SparseOptions) -> dict[str, Any]:
    return {
        "h5chunk_version": h5chunk.__version__,
        "seed": options.seed,
        "shuffled": options.shuffle,
        "options": json.dumps(options.recorded(), sort_keys=True),
    }


def plan_sparse(
    source: SparseSource | str | os.PathLike[str],
    path: str | os.PathLike[str],
    options: SparseOptions,
    *,
    format: str | None = None,
    layer: str | None = None,
    columns: tuple[str, ...] | None = None,
) -> SparsePlan:
    """What `convert_sparse` would do; reads the start of the source, for a second, and writes nothing.

    Raises
    ------
    As `convert_sparse`, as far as that shows it.
    """
    with _naming_memory(options):
        opened = _open(source, path, options, format, layer, columns)
        return replace(_plan(*opened[:3]), already_complete=opened.complete)


def _plan(source: SparseSource, path: Path, options: SparseOptions) -> SparsePlan:
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
    return SparsePlan(
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
