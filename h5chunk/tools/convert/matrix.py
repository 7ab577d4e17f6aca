"""Convert a sparse matrix: read its entries, sort them by row, choose how values are stored, and write a file.

Entries are read and sorted within ``memory_bytes``. Data that does not fit is kept on disk beside the output, in
unnamed files that the system removes when the process ends. The memory limit does not change the bytes of the output.

An interrupted conversion into a single file starts over; a conversion into shards is continued (see `matrix_shards`).
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

from h5chunk.errors import OptionError, count_text, human_bytes, printable
from h5chunk.plan.csr import index_dtype
from h5chunk.sources.matrix.block import Block, SparseSource, Transposed
from h5chunk.sources.matrix.codes import Coding, FloatCoding, Storage
from h5chunk.stamp import stamp_of
from h5chunk.store.format.header import CSR, DENSE, MATRIX, read_header, read_matrix
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.open import opened
from h5chunk.store.read.files import list_files
from h5chunk.store.write.journal import is_made_by, key_of
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.output import check_folder
from h5chunk.store.write.part_file import check_output
from h5chunk.tools.chunk_cache import cache_of_file
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
from h5chunk.tools.convert.matrix_select import ZEROS, Selection, select
from h5chunk.tools.convert.matrix_shards import ShardedMatrix
from h5chunk.tools.convert.matrix_write import field_name, write_matrix
from h5chunk.tools.convert.options import MatrixOptions
from h5chunk.tools.convert.report import MatrixReport
from h5chunk.tools.convert.samples import KEY_FACTS
from h5chunk.tools.progress import Progress, count_up
from h5chunk.tools.report import python_text
from h5chunk.tools.upload import files_in

PROBE_S = 1.0  # seconds for which a dry run reads the source


def convert_matrix(
    source: SparseSource,
    path: Path,
    options: MatrixOptions,
    *,
    source_options: Mapping[str, Any] = MappingProxyType({}),
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    client: Any = None,
) -> MatrixReport:
    """Write a matrix to one HDF5 file or to shards, or report that the same call has already written it.

    A dry run reads the source for about a second, and writes nothing. ``source_options`` are the options with which
    the source was opened. Raises the same errors as `h5chunk.convert`.
    """
    started = time.perf_counter()
    source = Transposed(source) if options.transpose else source
    options, identity = options.for_kind(source.kind), source.identity()
    facts: dict[str, Any] = {"options": options.recorded(), "how": dict(source_options), "source": identity}
    if options.time_order and source.time_name is None:
        raise OptionError(
            f"time_order (--time-order) needs times, but {printable(source.path)} has no column of times: name one as "
            "the fourth column in --columns"
        )
    old = read_old_ids(options.ids_from, source, keep_rows=options.keep_rows)
    if options.shards is not None:
        facts["shards"] = options.shards
    if options.ids_from is not None:
        facts["ids_from"] = [stamp_of(file, with_ctime=True) for file in list_files(options.ids_from)]
    command_id = None if identity is None else key_of({**KEY_FACTS, **facts})
    complete = not overwrite and command_id is not None and is_made_by(path, command_id)
    if not complete:
        (check_folder if options.is_sharded else check_output)(path, overwrite)
    with explain_memory_error(options.memory_bytes):
        if dry_run and not complete:
            facts = _predict(source, path, options)
        else:
            about = source, path, options, old, overwrite, command_id, progress
            if complete:
                facts = {}
            elif options.is_sharded:
                facts = ShardedMatrix(*about, notify or (lambda line: None), client).write()
            else:
                facts = _write(*about)
            facts = {**_facts_of(path), "seconds": time.perf_counter() - started, **facts}
    return MatrixReport(
        path=str(path),
        source_kind=source.kind,
        dry_run=dry_run,
        axes=source.axes,
        duplicates=options.duplicates_text(source.time_name),
        ignored=[f"{name}: {reason}" for name, reason in source.ignored.items()],
        notes=[*source.notes, *_zeros_note(source, facts.get("counts", {}))],
        already_complete=complete,
        **facts,
    )


def _zeros_note(source: SparseSource, counts: Mapping[str, int]) -> list[str]:
    """Return a note on values of 0 that a list of entries has, such as implicit feedback, and how to keep them."""
    zeros = counts.get(ZEROS, 0)
    if not zeros or not source.pair_option:
        return []
    return [
        f"{count_text(zeros, 'entry')} had the value 0, and zeros are not stored: if they mean something, such as "
        f"implicit feedback, read all entries as ones ({source.pair_option})"
    ]


def _write(
    source: SparseSource,
    path: Path,
    options: MatrixOptions,
    old: OldIds,
    overwrite: bool,
    command_id: str | None,
    progress: Progress | None,
) -> dict[str, Any]:
    def report_read(done: int) -> None:
        if progress:
            progress("read", done, source.num_bytes)

    with NewFile(path, overwrite) as new, ExitStack() as stack:
        folder = Path(os.path.realpath(path)).parent

        def attempt(coding: Coding | FloatCoding) -> Selection:
            stack.close()
            return select(SortedMatrix(source, options, coding, folder, stack, report_read, old))

        selection = first_that_fits(options, attempt)
        fields = write_matrix(new, selection, count_up("write", selection.num_entries, progress))
        new.command_id = command_id
        new.commit()
        known = {
            "num_entries": selection.num_entries,
            "counts": selection.counts,
            "num_ranges": selection.matrix.entries.num_ranges,
        }
        return {**known, "fields": fields}


def _facts_of(path: Path) -> dict[str, Any]:
    files = files_in(path) if path.is_dir() else [path]
    facts = [_facts_of_file(file) for file in files]
    sums = {name: sum(each[name] for each in facts) for name in ("num_rows", "num_bytes")}
    entries = [each["num_entries"] for each in facts]
    return {**facts[0], **sums, "num_entries": None if None in entries else sum(entries), "num_files": len(files)}


def _facts_of_file(path: Path) -> dict[str, Any]:
    with opened(path) as file:
        matrix, header = read_matrix(file), read_header(file)
        assert matrix is not None
        return {
            "chunk_cache": cache_of_file(file, path, python_text(str(path)), MATRIX, matrix.num_rows, header),
            **asdict(matrix),
            "num_bytes": path.stat().st_size,
            "chunk_samples": int(file[GROUP].attrs["chunk_samples"]),
            "fields": {name: str(file[name].dtype) for name in file[f"{GROUP}/checksums"] if name != MATRIX},
        }


@contextmanager
def explain_memory_error(memory_bytes: int) -> Iterator[None]:
    """Turn a MemoryError inside the context into an OptionError that names the limit and the remedy."""
    try:
        yield
    except MemoryError:
        raise OptionError(
            f"the memory limit is {human_bytes(memory_bytes)}, but the system has less free memory: lower the limit "
            "(--memory-bytes), or close other programs"
        ) from None


# ---- planning


class _Estimate(NamedTuple):
    """Properties of a matrix, estimated from the start of its source."""

    num_entries: int  # exact if the entire source was read
    seconds: float  # time to read the entire source
    whole: bool  # whether the entire source was read
    num_columns: int  # lower bound
    coding: Coding | FloatCoding
    storage: Storage


def _read_start(source: SparseSource, options: MatrixOptions, coding: Coding | FloatCoding) -> _Estimate:
    """Read a matrix for `PROBE_S` seconds, and estimate its size and storage.

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
    """Return the values of a block in the units of the coding, as if there were no duplicates."""
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
    """Predict the values for the report from the start of the source. Raises SourceError if the start is invalid."""
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
    if options.is_sharded:
        temporary += 2 * num_entries * (16 + coding.dtype.itemsize)
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
        "num_files": options.shards or 1,
        "seconds": start.seconds * 2,  # sorting and writing take about as long as reading
        "fields": {field_name(name): str(values.dtype) for name, values in source.row_fields.items()},
        "free_bytes": shutil.disk_usage(path.absolute().parent).free,
        "memory_bytes": memory_bytes,
        "temporary_bytes": temporary,
    }
