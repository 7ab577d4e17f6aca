"""Add rows to a sparse matrix: old chunks as they are, new entries behind them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import SourceError
from h5chunk.plan.sparse import CsrLayout, plan_csr
from h5chunk.sources.sparse.block import open_sparse
from h5chunk.store.format import GROUP, FileSpec
from h5chunk.store.write.appended import Told
from h5chunk.store.write.csr import MATRIX, CsrWriter, csr_spec, write_fields
from h5chunk.store.write.newfile import NewFile
from h5chunk.tools.append.columns import MappedSource
from h5chunk.tools.append.header import header_attributes, options_with
from h5chunk.tools.append.report import AppendPlan
from h5chunk.tools.append.rows import MoreRows, OldRows
from h5chunk.tools.convert.sparse import plan_sparse
from h5chunk.tools.convert.sparse_keep import Kept, Part, choose_what_to_keep
from h5chunk.tools.convert.sparse_read import Budget, UnfitError, read_source


def read_rows(rows: OldRows, source: MappedSource, given: Mapping[str, Any], stack: ExitStack, told: Told) -> Kept:
    """Read and sort all of a source.

    Raises
    ------
    SourceError
        It cannot be used, has columns that the file does not have, or values without a code.
    """
    options = rows.options(dict(given))
    folder = Path(os.path.realpath(rows.old.path)).parent
    seed = options.seed if options.shuffle else None
    with _scale_of(rows):
        read = read_source(source, options.coding(), folder, Budget(options.memory_bytes), seed, stack, told)
        source.check_known()
        return choose_what_to_keep(read, options.min_row_count, 0)


@contextmanager
def _scale_of(rows: OldRows) -> Iterator[None]:
    """Say of values without a code what can be done here."""
    try:
        yield
    except UnfitError as error:
        raise SourceError(
            f"{error.what}: values must have codes with the scale {rows.matrix.scale:g} of {rows.old.shown}, as its "
            "own keep theirs: convert all sources together"
        ) from None


def open_mapped(rows: OldRows, given: Mapping[str, Any]) -> MappedSource:
    """The source, in columns of the file."""
    columns = None if given["columns"] is None else tuple(given["columns"])
    source = open_sparse(given["source"], given["format"], layer=given["layer"], columns=columns)
    return MappedSource(source, rows.old, rows.matrix.num_columns, drop_columns=given["drop_columns"])


def write_csr_rows(
    new: NewFile, rows: OldRows, kept: Kept, more: MoreRows, given: Mapping[str, Any], told: Told
) -> None:
    """Write the whole file, but for its commit.

    Raises
    ------
    FileError
        The old file is damaged.
    OutputError
        The new file cannot be written.
    """
    row_entries = np.concatenate([rows.row_entries(), kept.row_entries])
    layout = _layout(rows, len(row_entries), int(row_entries.sum()))
    regions = new.allocate(_spec(rows, kept, more, layout, given))
    writer = CsrWriter(new, layout)
    with new.flusher():
        if rows.matrix.num_entries:
            _carry(new, rows, layout, writer, {name: region.offset for name, region in regions.items()}, told)
        for part in parts_of(kept):
            writer.append(part.columns.astype(layout.index_dtype), None if layout.pattern else part.values)
        writer.finish(row_entries)
        write_fields(new, more.fields, layout.chunk_samples)
        for name, values in more.tables.items():
            new.write(f"{GROUP}/{name}", values)


def parts_of(kept: Kept) -> Iterator[Part]:
    """The new entries, in columns of the file."""
    numbers = kept.read.column_ids
    if numbers is not None and kept.columns is not None:
        numbers = numbers[kept.columns]
    for part in kept.parts(np.dtype(np.int64)):
        yield part if numbers is None else part._replace(columns=numbers[part.columns])


def _layout(rows: OldRows, num_rows: int, num_entries: int) -> CsrLayout:
    """As it would be chosen, but for chunks and window that the file has."""
    header, matrix = rows.old.header, rows.matrix
    assert matrix.num_entries is not None
    sizes = (matrix.num_rows, matrix.num_entries), (num_rows, num_entries)
    was, layout = (
        plan_csr(count, matrix.num_columns, entries, pattern=matrix.pattern, chunk_samples=header.chunk_samples)
        for count, entries in sizes
    )
    if header.window_chunks != was.window_chunks:  # a tuner said so
        layout = replace(layout, window_chunks=header.window_chunks)
    return layout


def _spec(rows: OldRows, kept: Kept, more: MoreRows, layout: CsrLayout, given: Mapping[str, Any]) -> FileSpec:
    old = rows.old
    own = header_attributes(layout.num_rows, layout.window_chunks, layout.cache, recorded(rows, kept, given))
    spec = csr_spec(
        layout,
        scale=rows.matrix.scale,
        attributes={**own, "seed": old.header.seed},
        fields=more.fields,
        tables=more.tables,
    )
    return replace(
        spec,
        attributes=old.attributes(GROUP) | own,
        field_attributes={
            "/": old.attributes("/"),
            MATRIX: old.attributes(MATRIX) | {"shape": spec.field_attributes[MATRIX]["shape"]},
            **{name: old.attributes(name) for name in more.fields},
        },
    )


def recorded(rows: OldRows, kept: Kept, given: Mapping[str, Any]) -> str:
    """The options of the file, with what was asked for now."""
    taken = {name: given[name] for name in ("seed", "shuffle", "drop_columns")}
    return options_with(rows.old, samples=len(kept.row_entries), first_index=rows.first_index(), **taken)


def _carry(
    new: NewFile, rows: OldRows, layout: CsrLayout, writer: CsrWriter, offsets: Mapping[str, int], told: Told
) -> None:
    """Put the old entries at the beginning: whole chunks as they lie, where the new ones are of that size."""
    indices, data = rows.parts["indices"], rows.parts.get("data")
    size, num_entries = indices.dataset.chunks[0], rows.matrix.num_entries or 0
    whole = num_entries // size if size == layout.chunk_entries else 0
    if whole:
        indices.carry(whole, new.part, offsets[f"{MATRIX}/indices"], told)
        if data is not None:
            data.carry(whole, new.part, offsets[f"{MATRIX}/data"], told)
        writer.begin_behind(indices.checksums[:whole], None if data is None else data.checksums[:whole])
    for chunk in range(whole, indices.num_chunks):
        count = min(size, num_entries - chunk * size)
        columns = indices.stored(chunk).view(layout.index_dtype)[:count]
        writer.append(columns, None if data is None else data.stored(chunk)[:count])
        told(columns.nbytes)


def estimate_rows(rows: OldRows, given: Mapping[str, Any]) -> AppendPlan:
    """What appending would do, from reading the start of the source."""
    old = rows.old
    source = open_mapped(rows, given)
    with _scale_of(rows):
        plan = plan_sparse(source, old.path, rows.options(dict(given)))
    source.check_known()
    return AppendPlan(
        path=old.shown,
        kind=old.kind,
        num_old=rows.matrix.num_rows,
        num_new=plan.num_rows,
        num_bytes=old.path.stat().st_size + plan.num_bytes,
        free_bytes=shutil.disk_usage(old.path.absolute().parent).free,
        estimated_s=plan.estimated_s,
    )
