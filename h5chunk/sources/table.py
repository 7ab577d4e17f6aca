"""Tables in .parquet files, one file or a folder of files, or in delimited text: rows are samples, columns fields.

| column | becomes |
| --- | --- |
| numbers, bool | a column of that type; bool is uint8 |
| strings | UTF-8, as fixed-length bytes as long as the longest, at most 4096 bytes |
| categories (Arrow's dictionaries) | int64 and their names; so do Hugging Face's class labels |
| lists of numbers of one length | vectors |
| encoded images, as bytes or as Hugging Face's ``{bytes, path}`` | uint8 pixels, by the options of images |
| anything else, and missing values | refused |

Rows are read once, batch by batch. Vectors and images are copied to a temporary file, from which samples are read in
any order. That file has no name, so that the system removes it when the process ends.
"""

from __future__ import annotations

import json
import os
import tempfile
from array import array as number_array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from h5chunk.errors import OptionError, SourceError, printable
from h5chunk.source import OpenContext
from h5chunk.sources.arrow import byte_lengths, compute, has_type, parquet, pyarrow, to_fixed_bytes
from h5chunk.sources.container import read_at
from h5chunk.sources.kinds import TableOptions
from h5chunk.sources.listing import EXTENSIONS
from h5chunk.sources.matrix.dialect import is_number
from h5chunk.sources.recognise import is_path, read_head
from h5chunk.sources.samples import Samples, field_dtype
from h5chunk.sources.text_table import is_table, read_text_table
from h5chunk.stamp import stamp_of

MAGIC = b"PAR1"
SUFFIX = ".parquet"
TEXTS = ("string", "large_string")
BATCH_ROWS = 1024
MAX_STRING_BYTES = 4096
NAMED_IMAGES = (
    "column {!r} has names of images, and stays text: to convert the images, give their folder as the source, and this "
    "file as its manifest (--manifest)"
)


class _SpooledValues:
    """Values of any size in an unnamed temporary file, which forked processes share."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix=".h5chunk-", buffering=0)
        self._ends = number_array("q", [0])

    def __del__(self) -> None:
        self._file.close()

    def append(self, data: Any, count: int = 1) -> None:
        """Append ``count`` values of equal size."""
        view = memoryview(data).cast("B")
        start, size = self._ends[-1], len(view) // count
        self._ends.extend(range(start + size, start + len(view) + 1, size) if size else [start] * count)
        while view:
            view = view[self._file.write(view) :]

    def value(self, index: int) -> Any:
        start, stop = self._ends[index : index + 2]
        return read_at(self._file.fileno(), start, stop - start)


class _Vectors(_SpooledValues):
    """A column with lists of numbers, all of the same length and type."""

    dtype = np.dtype(np.uint8)
    length: int | None = None

    def add(self, array: Any) -> None:
        numbers = array.flatten()
        if numbers.null_count:
            raise ValueError("holds a list with a missing number")
        values = np.asarray(numbers.to_numpy(zero_copy_only=False))
        lengths, dtype = set(compute.list_value_length(array).to_pylist()), field_dtype("it", values.dtype)
        if self.length is None:
            self.length, self.dtype = min(lengths), dtype
        if lengths != {self.length}:
            other = max(lengths - {self.length})
            raise ValueError(f"holds lists of {self.length} and of {other} numbers: give them one length")
        if not self.length or dtype != self.dtype:
            raise ValueError(f"holds lists of {self.length} {self.dtype} and of {dtype}: give them one type")
        self.append(np.ascontiguousarray(values, dtype), len(array))

    def value(self, index: int) -> np.ndarray:
        return np.frombuffer(super().value(index), self.dtype)


class _Images(_SpooledValues):
    """A column with encoded images."""

    def add(self, array: Any) -> None:
        if pyarrow.types.is_struct(array.type):
            array = array.field("bytes")
        if array.null_count:
            raise ValueError("holds an image as a path without bytes: embed the images")
        for value in array:
            self.append(value.as_buffer())


class _Values(list[np.ndarray]):
    """A column of numbers or strings, in memory."""

    def add(self, array: Any) -> None:
        if not has_type(array.type, *TEXTS):
            self.append(np.asarray(array.to_numpy(zero_copy_only=False)))
            return
        strings = array.cast(pyarrow.binary())
        longest = int(byte_lengths(strings).max(initial=0))
        if longest > MAX_STRING_BYTES:
            raise ValueError(f"holds a string of {longest} bytes, over the limit of {MAX_STRING_BYTES}")
        self.append(to_fixed_bytes(strings))


def _first_row(table: Any) -> Iterable[tuple[str, Any]]:
    return table.slice(0, 1).to_pylist()[0].items() if table.num_rows else ()


def _names_image(value: Any) -> bool:
    return isinstance(value, str) and value.lower().encode().endswith(EXTENSIONS)


class TableSource(Samples):
    """Tables in .parquet files with the same columns, whose rows are concatenated; or one file of delimited text."""

    kind = "table"
    noun = "tables"
    Options = TableOptions

    def __init__(self, paths: Sequence[Path], options: TableOptions, context: OpenContext) -> None:
        self._paths, self.decoding, self._chosen = paths, options, options.columns
        self._num_rows = 0
        self._first_rows: list[int] = []
        self._columns: dict[str, Any] = {}
        self._categories: dict[str, list[str]] = {}
        for path in paths:
            self._read(path, context)
        if not self._num_rows:
            raise SourceError(f"{printable(paths[0])}: holds no rows")
        columns = {
            name: self._encode_categories(name, self._concatenate(name, column))
            for name, column in self._columns.items()
            if isinstance(column, _Values)
        }
        self._readers = {name: column.value for name, column in self._columns.items() if name not in columns}
        if not self._readers:
            largest = max(columns, key=lambda name: columns[name].itemsize)
            values = columns.pop(largest)
            self._readers = {largest: lambda index: values[index, ...]}
        self.columns = columns
        self.categories = {name: names for name, names in self._categories.items() if names}
        self.options = {**options.recorded(), "fields": list(self._columns)}
        self.find_fields(context.skips_bad_samples)

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        return head.startswith(MAGIC) or is_table(source, head) or (is_path(source) and bool(tables_in(source)))

    @classmethod
    def open(cls, source: Any, options: TableOptions, context: OpenContext) -> TableSource:
        if context.is_guessed and options.columns is not None and not is_parquet(Path(source)):
            raise OptionError(
                f"{printable(source)}: its columns may be fields of samples, or the rows, columns and values of a "
                "sparse matrix: say which with --format table or --format csv"
            )
        try:
            return cls(tables_in(source) or [Path(source)], options, context)
        except (OSError, pyarrow.ArrowException) as error:
            kind = ".parquet" if is_parquet(Path(source)) else "a table"
            raise SourceError(f"{printable(source)}: cannot be read as {kind}: {printable(str(error))}") from None

    def _read(self, path: Path, context: OpenContext) -> None:
        """Append the rows of a file to the columns."""
        self._first_rows.append(self._num_rows)
        if not is_parquet(path):
            table, form = read_text_table(os.fspath(path), context.memory_bytes)
            names = "" if form.has_header else "; there is no header, so that columns are called column_0, ..."
            if form.has_header and any(map(is_number, form.names)):
                names = f"; the first line became names of columns: {', '.join(form.names[:8])}"
            self.notes = [f"each line became a sample{names} (--format csv reads entries of a sparse matrix)"]
            columns = self._choose(path, table.schema)
            self.notes += [NAMED_IMAGES.format(name) for name, value in _first_row(table) if _names_image(value)]
            self._add_batches(path, columns, table.select(columns).to_batches(BATCH_ROWS), context)
            return
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            columns = self._choose(path, schema)
            self._categories |= _class_names(schema)
            self._add_batches(path, columns, file.iter_batches(BATCH_ROWS, columns=columns), context)

    def _add_batches(self, path: Path, columns: list[str], batches: Iterable[Any], context: OpenContext) -> None:
        for batch in batches:
            for name in columns:
                self._add(path, columns, name, batch.column(batch.schema.get_field_index(name)))
            self._num_rows += len(batch)
            context.report_found(self._num_rows)

    def _choose(self, path: Path, schema: Any) -> list[str]:
        columns = list(schema.names) if self._chosen is None else list(self._chosen)
        missing = [name for name in columns if name not in schema.names]
        if missing:
            raise OptionError(f"{printable(path)}: has no column {missing[0]!r}: it has {', '.join(schema.names)}")
        if self._columns and set(columns) != set(self._columns):
            raise SourceError(
                f"{printable(path)}: has the columns {', '.join(columns)} but {printable(self._paths[0])} has "
                f"{', '.join(self._columns)}: give tables of the same columns, or choose some (--columns)"
            )
        return columns

    def _add(self, path: Path, columns: list[str], name: str, array: Any) -> None:
        where = f"{printable(path)}: column {name!r}"
        others = ",".join(column for column in columns if column != name)
        kind = "" if is_parquet(path) else " --format table"
        remedy = f"leave it out (--columns {printable(others)}{kind})" if others else "convert the table without it"
        if array.null_count:
            row = self._num_rows - self._first_rows[-1] + array.is_null().index(True).as_py()
            raise SourceError(f"{where} has no value in row {row}: fill it, or {remedy}")
        if pyarrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
            self._categories.setdefault(name, [])
        if name not in self._columns:
            kind = _storage_class(array.type)
            if kind is None:
                raise SourceError(f"{where} is of type {array.type}, which fields do not support: {remedy}")
            self._columns[name] = kind()
        try:
            self._columns[name].add(array)
        except (ValueError, SourceError) as error:
            raise SourceError(f"{where} {error}: change it, or {remedy}") from None

    def _concatenate(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        """Concatenate a column from all files. Raises SourceError if their common type cannot hold all integers."""
        values = np.concatenate(parts)
        for part in parts:
            if part.dtype.kind in "iu" and (part.astype(values.dtype).astype(part.dtype) != part).any():
                raise SourceError(
                    f"{printable(self._paths[0])} and other files: column {name!r} is of {values.dtype} and "
                    f"{part.dtype}, and the former cannot hold all integers of the latter: give the files one type"
                )
        return values

    def _encode_categories(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return the values of a column; categories given as strings become codes."""
        if self._categories.get(name) != []:
            return values.astype(field_dtype(name, values.dtype), copy=False)
        words, codes = np.unique(values, return_inverse=True)
        self._categories[name] = [
            word.decode("utf-8", "backslashreplace") if isinstance(word, bytes) else str(word)
            for word in words.tolist()
        ]
        return codes.astype(np.int64)

    def __len__(self) -> int:
        return self._num_rows

    def name(self, index: int) -> str:
        number = int(np.searchsorted(self._first_rows, index, "right")) - 1
        return f"{printable(self._paths[number].name)}, row {index - self._first_rows[number]}"

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        stamps = [stamp_of(path, with_ctime=True) for path in self._paths]
        return {"kind": self.kind, "decoder": PIL.__version__, "options": vars(self.decoding), "stamps": stamps}, ()

    def values(self, index: int) -> dict[str, Any]:
        return {name: read(index) for name, read in self._readers.items()}


def tables_in(source: Any) -> list[Path]:
    """Return the .parquet files of a folder; an empty list if it has other visible files, or is not a folder."""
    folder = Path(os.fsdecode(source))
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "_")))
    return files if files and all(path.suffix == SUFFIX and path.is_file() for path in files) else []


def is_parquet(path: Path) -> bool:
    """Return whether a path is a folder or a .parquet file, by its suffix or first bytes."""
    return path.is_dir() or path.suffix == SUFFIX or read_head(path).startswith(MAGIC)


def _storage_class(kind: Any) -> Any:
    """Return the class that stores a column of an Arrow type; None for unsupported types."""
    numbers = ("integer", "floating", "boolean")
    if has_type(kind, *numbers, *TEXTS):
        return _Values
    if has_type(kind, "list", "large_list", "fixed_size_list") and has_type(kind.value_type, *numbers):
        return _Vectors
    is_image = has_type(kind, "struct") and kind.get_field_index("bytes") >= 0
    return _Images if is_image or has_type(kind, "binary", "large_binary") else None


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Return the class names by column from the metadata that Hugging Face writes into a table."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            name: list(feature["names"]) for name, feature in features.items() if feature.get("_type") == "ClassLabel"
        }
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
