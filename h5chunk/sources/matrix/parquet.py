"""Read (row, column[, value[, time]]) entries from a .parquet file, or a folder of such files.

A table is recognised if the name of every column is a known name for rows, columns, values or times (see
`choose_columns`). Ids are integers or strings, values are numbers, and times are numbers, dates or timestamps.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.sample_source import OpenContext
from h5chunk.sources.arrow import byte_lengths, has_type, parquet, pyarrow, to_fixed_bytes
from h5chunk.sources.kinds import EntryOptions
from h5chunk.sources.matrix.block import Block, RegularFile, SparseSource
from h5chunk.sources.matrix.columns import (
    PARTS,
    are_entries,
    choose_columns,
    describe_choice,
    order_of_floats,
    time_columns,
    without_type,
)
from h5chunk.sources.matrix.text import MAX_ID_BYTES
from h5chunk.sources.options import one_of
from h5chunk.sources.recognise import is_path
from h5chunk.sources.splits import refuse_splits
from h5chunk.sources.table import MAGIC, is_parquet, tables_in

ROW_BYTES = 256  # bytes of memory per row while it is read
IDS = ("integer", "string", "large_string", "dictionary")
TYPES = {  # Arrow types that are accepted
    "row": IDS,
    "column": IDS,
    "value": ("integer", "floating", "boolean", "decimal"),
    "time": ("integer", "floating", "timestamp", "date"),
}


class ParquetEntries(SparseSource):
    """Tables of entries in .parquet files with the same columns; their rows are concatenated."""

    kind = "ratings"
    has_parts = reads_folders = True
    shape = (None, None)
    has_ids = True
    Options = EntryOptions

    def __init__(self, path: str, options: EntryOptions, context: OpenContext) -> None:
        self.path, self._paths = path, tables_in(path) or [Path(path)]
        if len(self._paths) > 1:
            refuse_splits(Path(path), self._paths)
        self.num_bytes = sum(RegularFile(file).num_bytes for file in self._paths)
        if not is_parquet(self._paths[0]):
            raise SourceError(f"{printable(path)}: is not a .parquet file: for entries in text, pass --format csv")
        names = _names(self._paths[0])
        requested = None if options.columns is None else [without_type(str(name)) for name in options.columns]
        chosen = choose_columns(names, len(names), requested, path, self._fail)
        columns = dict(zip(PARTS, chosen, strict=False))
        if context.with_times and (times := time_columns(names, chosen)):
            columns.setdefault("time", times[0])
        elif not context.with_times:
            columns.pop("time", None)
        self._columns = {part: names[number] for part, number in columns.items()}
        choice = describe_choice(names, columns)
        if context.is_guessed:
            row, column = repr(names[columns["row"]]), repr(names[columns["column"]])
            self.notes = [
                f"each row became an entry of a matrix: row {row}, column {column}, {choice} (--format table: each row "
                "is a sample)"
            ]
        else:
            self.notes = [choice]
        self._check_types()
        self.time_name = self._columns.get("time")
        self.axes = self._columns["row"], self._columns["column"]
        self.pair_option = f"--columns {shlex.quote(','.join(self.axes))}" if "value" in self._columns else ""
        kinds = {part: _schema(self._paths[0]).field(name).type for part, name in self._columns.items()}
        self.entry_types = {
            part: "int64s" if has_type(kind, "integer") else "strings" if part in PARTS[:2] else f"{kind}s"
            for part, kind in kinds.items()
            if part != "value"
        }

    def _check_types(self) -> None:
        """Raise SourceError unless all files have the chosen columns, with supported types that agree."""
        first = _schema(self._paths[0])
        for path in self._paths:
            schema = _schema(path)
            for part, name in self._columns.items():
                where = f"{printable(path)}: {part} {name!r}"
                if name not in schema.names:
                    raise SourceError(f"{where}: is missing, but {printable(self._paths[0].name)} has this column")
                kind = schema.field(name).type
                if not has_type(kind, *TYPES[part]):
                    raise SourceError(
                        f"{where} is of type {kind}, but only {one_of(TYPES[part])} types are supported: convert it, "
                        "or choose other columns (--columns)"
                    )
                if has_type(kind, "integer") != has_type(first.field(name).type, "integer") and part in PARTS[:2]:
                    raise SourceError(
                        f"{where} is of type {kind}, but of type {first.field(name).type} in the first file: convert "
                        "one of them"
                    )

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        if not (head.startswith(MAGIC) or (is_path(source) and tables_in(source))):
            return False
        try:
            return are_entries(_names((tables_in(source) or [Path(source)])[0]))
        except (ImportError, SourceError):  # reading it as a table reports this
            return False

    def files(self) -> Sequence[str]:
        return [str(path) for path in self._paths]

    def _fail(self, problem: str) -> NoReturn:
        raise SourceError(f"{printable(self.path)}: {problem}")

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        done, counts = 0, [_opened(path, parquet.read_metadata).num_row_groups for path in self._paths]
        first_group, stop_group = self.range_of(sum(counts))
        for number, path in enumerate(self._paths):
            before = sum(counts[:number])
            first, stop = (min(max(0, group - before), counts[number]) for group in (first_group, stop_group))
            try:
                with parquet.ParquetFile(path) as file:
                    rows_before = sum(file.metadata.row_group(number).num_rows for number in range(first))
                    num_rows = max(1, file.metadata.num_rows)
                    options = {"columns": [*self._columns.values()], "row_groups": range(first, stop)}
                    batches = file.iter_batches(max(1024, max_bytes // ROW_BYTES), **options)
                    for batch in batches:
                        block = self._block(path, batch, rows_before)
                        rows_before += len(batch)
                        yield block, done + os.path.getsize(path) * rows_before // num_rows
            except (OSError, pyarrow.ArrowException) as error:
                raise _unreadable(path, error) from None
            done += os.path.getsize(path)

    def _block(self, path: Path, batch: Any, rows_before: int) -> Block:
        arrays = {}
        for part, name in self._columns.items():
            column = batch.column(batch.schema.get_field_index(name))
            where = f"{printable(path)}: {part} {name!r}"
            if column.null_count:
                row = rows_before + column.is_null().index(True).as_py()
                raise SourceError(f"{where} has no value in row {row}: fill it, or leave the row out")
            try:
                arrays[part] = _to_numpy(part, column, where, rows_before)
            except pyarrow.ArrowInvalid as error:
                way = (
                    "convert the column to strings in UTF-8"
                    if part in PARTS[:2]
                    else "convert the column to smaller numbers"
                )
                raise SourceError(f"{where} cannot be read exactly ({error}): {way}") from None
        return Block(arrays["row"], arrays["column"], arrays.get("value"), arrays.get("time"))


def _names(path: Path) -> list[str]:
    """Return the names of the columns, except the index that pandas writes."""
    return [name for name in _schema(path).names if not name.startswith("__index_level_")]


def _schema(path: Path) -> Any:
    return _opened(path, parquet.read_schema)


def _opened(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> SourceError:
    return SourceError(f"{printable(path)}: cannot be read as .parquet: {printable(str(error))}")


def _to_numpy(part: str, column: Any, where: str, rows_before: int) -> np.ndarray:
    if part in PARTS[:2]:
        return _ids(column, where)
    if part == "time" and has_type(column.type, "timestamp", "date"):
        return column.cast(pyarrow.timestamp("us")).cast(pyarrow.int64()).to_numpy()
    if has_type(column.type, "integer"):
        return column.cast(pyarrow.int64()).to_numpy()
    values = column.cast(pyarrow.float64()).to_numpy()
    bad = ~np.isfinite(values)
    if bad.any():
        row = rows_before + int(bad.argmax())
        raise SourceError(f"{where} is {values[bad][0]} in row {row}: values must be finite")
    return values if part == "value" else order_of_floats(values)


def _ids(column: Any, where: str) -> np.ndarray:
    if has_type(column.type, "integer"):
        return column.cast(pyarrow.int64()).to_numpy()
    if has_type(column.type, "dictionary"):
        column = column.dictionary_decode()
    strings = column.cast(pyarrow.string())
    strings.validate(full=True)
    texts = strings.cast(pyarrow.binary())
    lengths = byte_lengths(texts)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= MAX_ID_BYTES:
        raise SourceError(f"{where} has an id that is empty or longer than {MAX_ID_BYTES} bytes")
    return to_fixed_bytes(texts)
