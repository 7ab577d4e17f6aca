"""Tables in .parquet files, one or a folder of them: a row is a sample, and columns are fields.

| column | becomes |
| --- | --- |
| numbers, bool | a column of that type; bool is uint8 |
| strings | UTF-8 of a fixed length, that of the longest, at most 4096 bytes |
| categories (Arrow's dictionaries) | int64 and their names; so do Hugging Face's class labels |
| lists of numbers of one length | vectors |
| encoded images, as bytes or as Hugging Face's ``{bytes, path}`` | uint8 pixels, by the options of images |
| anything else, and missing values | refused |

Rows are read once, batch by batch; vectors and images wait in a temporary file, from which samples are read in any
order. That file has no name, so that the system takes it back however this ends.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from h5chunk.errors import OptionError, SampleError, ShapeError, SourceError, printable
from h5chunk.source import OpenContext, SampleField, shape_text
from h5chunk.sources.arrow import byte_lengths, compute, parquet, pyarrow, to_fixed_bytes
from h5chunk.sources.decode import decode, pillow_limits, sample_shape, write_pixels
from h5chunk.sources.kinds import TableOptions
from h5chunk.sources.recognise import is_path
from h5chunk.sources.samples import Samples, field_dtype
from h5chunk.stamp import stamp_of

MAGIC = b"PAR1"
SUFFIX = ".parquet"
BATCH_ROWS = 1024
MAX_STRING_BYTES = 4096


class _Spool:
    """Bytes in a temporary file without a name, which forked processes share."""

    def __init__(self, folder: Path | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".h5chunk-", buffering=0)
        self.num_bytes = 0

    def __del__(self) -> None:
        self._file.close()

    def append(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view:
            done = self._file.write(view)
            self.num_bytes, view = self.num_bytes + done, view[done:]

    def read(self, offset: int, num_bytes: int) -> bytes:
        data = os.pread(self._file.fileno(), num_bytes, offset)
        while len(data) < num_bytes and (
            more := os.pread(self._file.fileno(), num_bytes - len(data), offset + len(data))
        ):
            data += more
        return data


class _Values:
    """Numbers, or strings, in memory."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []

    def add(self, array: Any) -> None:
        if not _is_text(array.type):
            self._parts.append(np.asarray(array.to_numpy(zero_copy_only=False)))
            return
        strings = array.cast(pyarrow.binary())
        longest = int(byte_lengths(strings).max(initial=0))
        if longest > MAX_STRING_BYTES:
            raise ValueError(f"holds a string of {longest} bytes, over the limit of {MAX_STRING_BYTES}")
        self._parts.append(to_fixed_bytes(strings))

    def values(self) -> np.ndarray:
        return np.concatenate(self._parts)


class _Vectors:
    """Lists of numbers of one length, in a spool."""

    def __init__(self, folder: Path | None) -> None:
        self._spool = _Spool(folder)
        self.length: int | None = None
        self.dtype = np.dtype(np.uint8)

    def add(self, array: Any) -> None:
        lengths = set(compute.list_value_length(array).to_pylist())
        self.length = min(lengths) if self.length is None else self.length
        if lengths != {self.length}:
            other = max(lengths - {self.length})
            raise ValueError(f"holds lists of {self.length} and of {other} numbers: make them of one length")
        numbers = array.flatten()
        if numbers.null_count:
            raise ValueError("holds a list with a missing number")
        values = np.asarray(numbers.to_numpy(zero_copy_only=False))
        self.dtype = field_dtype("it", values.dtype)
        self._spool.append(np.ascontiguousarray(values, self.dtype))

    def read(self, index: int) -> np.ndarray:
        size = int(self.length or 0) * self.dtype.itemsize
        return np.frombuffer(self._spool.read(index * size, size), self.dtype)


class _Images:
    """Encoded images in a spool."""

    def __init__(self, folder: Path | None) -> None:
        self._spool = _Spool(folder)
        self._offsets: list[np.ndarray] = [np.zeros(1, np.int64)]
        self.shape: tuple[int, ...] = ()

    def add(self, array: Any) -> None:
        if pyarrow.types.is_struct(array.type):
            array = array.field("bytes")
        if array.null_count:
            raise ValueError("holds an image without bytes, of which only the path is known: embed the images")
        offsets = [self._spool.num_bytes]
        for value in array:
            self._spool.append(value.as_buffer())
            offsets.append(self._spool.num_bytes)
        self._offsets.append(np.array(offsets[1:], np.int64))

    def finish(self) -> None:
        self._offsets = [np.concatenate(self._offsets)]

    def read(self, index: int) -> bytes:
        start, stop = self._offsets[0][index : index + 2].tolist()
        return self._spool.read(start, stop - start)


class TableSource(Samples):
    """Tables in .parquet files: a `h5chunk.source.SampleSource`.

    Parameters
    ----------
    paths : sequence of Path
        Files with the same columns; rows of the first come first.
    options : TableOptions
    context : OpenContext
    """

    kind = "table"
    noun = "tables"
    Options = TableOptions

    def __init__(self, paths: Sequence[Path], options: TableOptions, context: OpenContext) -> None:
        super().__init__()
        self._paths, self._decoding, self._chosen = paths, options, options.columns
        self._num_rows = 0
        self._first_rows: list[int] = []
        self._readers: dict[str, Any] = {}
        self._names: dict[str, list[str]] = {}
        for path in paths:
            self._read(path, context)
        if not self._num_rows:
            raise SourceError(f"{printable(paths[0])}: holds no rows")
        self._settle(context.skips_bad_samples)

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        return head.startswith(MAGIC) or (is_path(source) and bool(_tables_in(source)))

    @classmethod
    def open(cls, source: Any, options: TableOptions, context: OpenContext) -> TableSource:
        try:
            return cls(_tables_in(source) or [Path(source)], options, context)
        except (OSError, pyarrow.ArrowException) as error:
            raise SourceError(f"{printable(source)}: cannot be read as .parquet: {printable(str(error))}") from None

    def _read(self, path: Path, context: OpenContext) -> None:
        """Read the rows of a file."""
        self._first_rows.append(self._num_rows)
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            columns = self._columns(path, schema)
            self._names |= _class_names(schema)
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                for name in columns:
                    self._add(path, name, batch.column(batch.schema.get_field_index(name)), context)
                self._num_rows += len(batch)
                context.report_found(self._num_rows)

    def _columns(self, path: Path, schema: Any) -> list[str]:
        columns = list(schema.names) if self._chosen is None else list(self._chosen)
        missing = [name for name in columns if name not in schema.names]
        if missing:
            raise OptionError(f"{printable(path)}: has no column {missing[0]!r}: it has {', '.join(schema.names)}")
        if self._readers and set(columns) != set(self._readers):
            raise SourceError(
                f"{printable(path)}: has the columns {', '.join(columns)} but {printable(self._paths[0])} has "
                f"{', '.join(self._readers)}: give tables of the same columns, or choose some (--columns)"
            )
        return columns

    def _add(self, path: Path, name: str, array: Any, context: OpenContext) -> None:
        where = f"{printable(path)}: column {name!r}"
        if array.null_count:
            row = self._num_rows - self._first_rows[-1] + array.is_null().index(True).as_py()
            raise SourceError(f"{where} has no value in row {row}: fill it, or leave the column out (--columns)")
        if pyarrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
            self._names.setdefault(name, [])
        if name not in self._readers:
            self._readers[name] = _reader(where, array.type, context)
        try:
            self._readers[name].add(array)
        except (ValueError, SourceError) as error:
            raise SourceError(f"{where} {error}: change it, or leave it out (--columns)") from None

    def _settle(self, skip: bool) -> None:
        fields: dict[str, SampleField] = {}
        columns: dict[str, np.ndarray] = {}
        for name, reader in self._readers.items():
            if isinstance(reader, _Vectors):
                fields[name] = SampleField((int(reader.length or 0),), reader.dtype)
            elif isinstance(reader, _Images):
                reader.finish()
                reader.shape = self._first_shape(name, skip)
                fields[name] = SampleField(reader.shape, np.dtype(np.uint8), self._decoding.layout.upper())
            else:
                columns[name] = self._column(name, reader.values())
        if not fields:
            largest = max(columns, key=lambda name: columns[name].itemsize)
            fields[largest] = SampleField((), columns[largest].dtype)
        self._in_memory = columns
        self.fields = dict(sorted(fields.items(), key=lambda item: -item[1].sample_bytes))
        self.columns = {name: values for name, values in columns.items() if name not in fields}
        self.categories = {name: names for name, names in self._names.items() if names}
        self.options = {**self._decoding.recorded(), "fields": list(self._readers)}

    def _column(self, name: str, values: np.ndarray) -> np.ndarray:
        """The values of a column; words of categories as codes."""
        if self._names.get(name) == []:
            words, codes = np.unique(values, return_inverse=True)
            self._names[name] = [
                word.decode("utf-8", "backslashreplace") if isinstance(word, bytes) else str(word)
                for word in words.tolist()
            ]
            return codes.astype(np.int64)
        return values.astype(field_dtype(name, values.dtype), copy=False)

    def _first_shape(self, name: str, skip: bool) -> tuple[int, ...]:
        reason = ""
        for index in range(self._num_rows):
            try:
                return self._shape(name, index)
            except SampleError as error:
                reason = f"{self.name(index)}: {error}"
                if not skip:
                    raise SampleError(reason) from None
        raise SourceError(f"none of the {self._num_rows} images of column {name!r} can be used; the last: {reason}")

    def _shape(self, name: str, index: int) -> tuple[int, ...]:
        with self.session():
            image, _ = decode(self._readers[name].read(index), self._decoding)
            return sample_shape(image, self._decoding.layout)

    def __len__(self) -> int:
        return self._num_rows

    def name(self, index: int) -> str:
        number = int(np.searchsorted(self._first_rows, index, "right")) - 1
        return f"{printable(self._paths[number].name)}, row {index - self._first_rows[number]}"

    def session(self) -> AbstractContextManager[None]:
        return pillow_limits(self._decoding.max_pixels)

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        stamps = [stamp_of(path, with_ctime=True) for path in self._paths]
        return {"kind": self.kind, "decoder": PIL.__version__, "options": vars(self._decoding), "stamps": stamps}, ()

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        said: tuple[str, ...] = ()
        for name, values in out.items():
            reader = self._readers[name]
            if isinstance(reader, _Images):
                image, notes = decode(reader.read(index), self._decoding)
                shape = sample_shape(image, self._decoding.layout)
                if shape != values.shape:
                    raise ShapeError(
                        f"column {name!r} is {shape_text(shape)} but others are {shape_text(values.shape)}"
                    )
                write_pixels(image, self._decoding.layout, values)
                said += notes
            else:
                values[...] = reader.read(index) if isinstance(reader, _Vectors) else self._in_memory[name][index]
        return said

    def disagreement(self) -> str:
        for name, reader in self._readers.items():
            for index in range(self._num_rows) if isinstance(reader, _Images) else ():
                try:
                    shape = self._shape(name, index)
                except SampleError:
                    continue
                if shape != reader.shape:
                    return (
                        f"images of column {name!r} differ: others are {shape_text(reader.shape)}, {self.name(index)} "
                        f"is {shape_text(shape)}: give a size and how to fit it (--size H W --fit stretch|crop|pad)"
                    )
        return "the images do not all have one shape, and changed since"


def _tables_in(source: Any) -> list[Path]:
    """The .parquet files of a folder, if all visible files in it are such."""
    folder = Path(os.fsdecode(source))
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "_")))
    return files if files and all(path.suffix == SUFFIX and path.is_file() for path in files) else []


def _is_text(kind: Any) -> bool:
    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _reader(where: str, kind: Any, context: OpenContext) -> Any:
    """What keeps the values of a column of some type of Arrow."""
    types = pyarrow.types
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or _is_text(kind):
        return _Values()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        numbers = kind.value_type
        if types.is_integer(numbers) or types.is_floating(numbers) or types.is_boolean(numbers):
            return _Vectors(context.spool_folder)
    is_image = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    if is_image or types.is_binary(kind) or types.is_large_binary(kind):
        return _Images(context.spool_folder)
    raise SourceError(f"{where} is of type {kind}, which a field cannot have: leave it out (--columns)")


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Names of classes, as Hugging Face writes them into the metadata of a table."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: list(each["names"]) for name, each in features.items() if each.get("_type") == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
