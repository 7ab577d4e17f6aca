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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import h5chunk
from h5chunk.errors import SourceError, printable
from h5chunk.plan.sparse import index_dtype, plan_csr
from h5chunk.sources.sparse import block as sparse
from h5chunk.sources.sparse.block import SparseSource
from h5chunk.store.format import GROUP, FileSpec
from h5chunk.store.write.csr import CsrWriter, csr_spec, write_fields
from h5chunk.store.write.newfile import NewFile
from h5chunk.store.write.partfile import check_not_source, check_output, parse_output
from h5chunk.tools.convert.report_sparse import SparsePlan, SparseReport
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
    source, path = _open(source, path, options, format, layer, columns)

    def told(done: int) -> None:
        if progress:
            progress("read", done, source.num_bytes)

    folder = Path(os.path.realpath(path)).parent
    budget, seed = Budget(options.memory_bytes), options.seed if options.shuffle else None
    with NewFile(path, options.overwrite) as new, ExitStack() as stack:
        read = read_source(source, options.coding(), folder, budget, seed, stack, told)
        kept = choose_what_to_keep(read, options.min_row_count, options.min_column_count)
        if kept.num_columns < 1 or not len(kept.row_entries):
            raise SourceError(f"{printable(source.path)}: nothing is left of it")
        fields, tables = fields_of(kept), tables_of(kept)
        write = _write_dense if options.dense else _write_csr
        chunk_samples = write(
            new, kept, options, fields, tables, count_up("write", int(kept.row_entries.sum()), progress)
        )
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
    )


def _open(
    source: SparseSource | str | os.PathLike[str],
    path: str | os.PathLike[str],
    options: SparseOptions,
    format: str | None,
    layer: str | None,
    columns: tuple[str, ...] | None,
) -> tuple[SparseSource, Path]:
    path = parse_output(path)
    if isinstance(source, str | os.PathLike):
        check_not_source(path, source)
        check_output(path, options.overwrite)
        source = sparse.open_sparse(source, format, layer=layer, columns=columns)
    return source, path


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
    source, path = _open(source, path, options, format, layer, columns)
    coding = options.coding()
    started = time.perf_counter()
    num_entries, done, whole, largest = 0, 0, True, [0, 0]
    for block, done in source.blocks(Budget(options.memory_bytes).source_bytes):
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
    budget = Budget(options.memory_bytes)
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
    )
