"""Add rows to a matrix of dense rows: old chunks as they are stored, the last one filled up, new ones after it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError
from h5chunk.store.format import GROUP, FileSpec
from h5chunk.store.read.chunktable import list_chunks
from h5chunk.store.write.appended import Told
from h5chunk.store.write.csr import MATRIX, write_fields
from h5chunk.store.write.fill import available_cores
from h5chunk.store.write.newfile import NewFile
from h5chunk.tools.append.header import header_attributes, longer_layout
from h5chunk.tools.append.rows import MoreRows, OldRows
from h5chunk.tools.append.sparse import parts_of, recorded
from h5chunk.tools.convert.sparse_dense import DenseFile, compressed
from h5chunk.tools.convert.sparse_keep import Kept, Part


def write_dense_rows(
    new: NewFile, rows: OldRows, kept: Kept, more: MoreRows, given: Mapping[str, Any], told: Told
) -> None:
    """Write the whole file, but for its commit.

    Raises
    ------
    FileError
        The old file is damaged, or compressed as convert does not do it.
    OutputError
        The new file cannot be written.
    """
    old, filter = rows.parts[MATRIX], _filter(rows)
    size, num_columns = rows.old.header.chunk_samples, rows.matrix.num_columns
    first, num_tail = divmod(rows.matrix.num_rows, size)
    tail = _decoded(rows, first, filter)[:num_tail] if num_tail else np.empty((0, num_columns), np.uint8)
    regions = new.allocate(_spec(rows, kept, more, given, filter))
    num_rows = max(size, num_tail + len(kept.row_entries))  # behind the whole chunks; one of less is filled up
    file = DenseFile(num_rows, num_columns, size, filter, given["memory_bytes"])
    chunks = file.chunks(_behind(tail, parts_of(kept)), lambda count: None)
    with new.flusher():
        if filter == "gzip":
            with new.chunk_writer(MATRIX) as writer, ThreadPoolExecutor(available_cores()) as pool:
                for chunk in range(first):
                    told(writer.write(old.stored(chunk).tobytes()).num_bytes)
                for data in compressed(pool, chunks, available_cores()):
                    writer.write(data)
            checksums = [chunk.checksum for chunk in writer.chunks]
        else:
            old.carry(first, new.part, regions[MATRIX].offset, told)
            checksums = old.checksums[:first].tolist()
            for values in chunks:
                new.write_bytes(MATRIX, len(checksums) * values.nbytes, values.data.cast("B"))
                checksums.append(zlib.crc32(values.data))
        new.write(f"{GROUP}/checksums/{MATRIX}", np.array(checksums, np.uint32))
        write_fields(new, more.fields, size)
        for name, table in more.tables.items():
            new.write(f"{GROUP}/{name}", table)


def _filter(rows: OldRows) -> str:
    """How the chunks are compressed: gzip or none.

    Raises
    ------
    FileError
        Otherwise, or they are not whole rows.
    """
    dataset = rows.parts[MATRIX].dataset
    properties = dataset.id.get_create_plist()
    codes = [properties.get_filter(number)[0] for number in range(properties.get_nfilters())]
    whole = dataset.chunks == (rows.old.header.chunk_samples, rows.matrix.num_columns)
    if whole and codes in ([], [h5py.h5z.FILTER_DEFLATE]) and not list_chunks(dataset).filter_masks.any():
        return "gzip" if codes else "none"
    raise FileError(
        f"{rows.old.shown}: its rows are not in chunks of {rows.old.header.chunk_samples} rows packed by gzip, or not "
        "packed, as h5chunk convert writes them: repack it (--compression gzip), or convert all sources together"
    )


def _decoded(rows: OldRows, chunk: int, filter: str) -> np.ndarray:
    """(chunk_samples, columns) uint8 of a chunk."""
    stored = rows.parts[MATRIX].stored(chunk).tobytes()
    shape = rows.old.header.chunk_samples, rows.matrix.num_columns
    try:
        data = zlib.decompress(stored) if filter == "gzip" else stored
        return np.frombuffer(data, np.uint8).reshape(shape)
    except (zlib.error, ValueError):
        raise FileError(f"{rows.old.shown}: chunk {chunk} of {MATRIX!r} does not decode: run h5chunk verify") from None


def _behind(tail: np.ndarray, parts: Iterator[Part]) -> Iterator[Part]:
    """The entries of the rows that the last chunk had, and of new ones behind them."""
    where = tail.nonzero()
    moved = (part._replace(rows=part.rows + len(tail)) for part in parts)
    return chain([Part(where[0], where[1], tail[where])], moved)


def _spec(rows: OldRows, kept: Kept, more: MoreRows, given: Mapping[str, Any], filter: str) -> FileSpec:
    old, num_columns = rows.old, rows.matrix.num_columns
    num_rows = rows.matrix.num_rows + len(kept.row_entries)
    layout, cache = longer_layout(old.header, num_rows, num_columns)
    own = header_attributes(num_rows, layout.window_chunks, cache, recorded(rows, kept, given))
    file = DenseFile(num_rows, num_columns, layout.chunk_samples, filter, given["memory_bytes"])
    pattern = rows.matrix.pattern and kept.pattern
    spec = file.spec(
        scale=rows.matrix.scale,
        pattern=pattern,
        attributes={**own, "seed": old.header.seed},
        fields=more.fields,
        tables=more.tables,
    )
    return replace(
        spec,
        attributes=old.attributes(GROUP) | own,
        field_attributes={
            "/": old.attributes("/"),
            MATRIX: old.attributes(MATRIX) | {"pattern": np.uint8(pattern)},
            **{name: old.attributes(name) for name in more.fields},
        },
    )
