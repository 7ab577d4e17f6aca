"""Read tables from .parquet or delimited text, in a file or a folder of files: rows are samples, columns are fields.

| column | becomes |
| --- | --- |
| numbers, bool | a column of that type; bool is uint8 |
| strings, if some repeat and at most 50 are distinct | categories: int64 codes, with their names |
| strings called ``label`` or ``labels``, if each repeats on average | categories |
| other strings | UTF-8, as fixed-length bytes as long as the longest, at most 4096 bytes |
| Arrow's dictionaries, Hugging Face's class labels | categories |
| lists of numbers, all of the same length | vectors |
| encoded images, as bytes or as Hugging Face's ``{bytes, path}`` | uint8 pixels, by the options for images |
| dates and times | ISO 8601 text |
| missing floating-point numbers | NaN |
| missing integers | NaN with ``missing="nan"``; otherwise refused or skipped |
| other missing values | refused or skipped |
| anything else | refused |

If ``vector`` is set, all numeric columns except those in ``vector_except`` become one field.

Rows are read once, batch by batch. Vectors and images are copied to a temporary file, from which samples are read in
any order. That file has no name, so the system removes it when the process ends.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from h5chunk.errors import (
    H5ChunkError,
    OptionError,
    SampleError,
    SourceError,
    allowing,
    count_text,
    difference_text,
    human_bytes,
    names_text,
    printable,
)
from h5chunk.sample_source import OpenContext
from h5chunk.sources.arrow import compute, has_type, parquet, pyarrow
from h5chunk.sources.cells import LABEL_COLUMNS, may_be_lost
from h5chunk.sources.kinds import ImageOptions, TableOptions, TextOptions
from h5chunk.sources.matrix.dialect import is_number
from h5chunk.sources.options import flag_of
from h5chunk.sources.recognise import AS_MANIFEST, SYSTEM, has_suffix, is_path, names_image, read_head
from h5chunk.sources.samples import SPLIT, Samples, field_dtype
from h5chunk.sources.splits import splits_of
from h5chunk.sources.table_columns import MAX_CATEGORIES, TEXTS, Images, Values, storage_class
from h5chunk.sources.text_table import SUFFIXES, is_table, may_be_entries, read_text_table
from h5chunk.stamp import source_stamp

MAGIC = b"PAR1"
SUFFIX = ".parquet"
BATCH_ROWS = 1024
DOCUMENTS = ("readme", "license", "dataset_info")  # beginnings of the names of files that are not data
MAX_NAMES = 12  # maximum number of columns that a message lists
MANY_COLUMNS = 30  # from this number on, numeric columns are probably the components of one vector
NAMED_IMAGES = "column {!r} contains names of images, which are stored as text: " + AS_MANIFEST


def _first_row(table: Any) -> Iterable[tuple[str, Any]]:
    return table.slice(0, 1).to_pylist()[0].items() if table.num_rows else ()


class TableSource(Samples):
    """Tables with the same columns, in .parquet files or in delimited text, whose rows are concatenated."""

    kind = "table"
    noun = "tables"
    Options = TableOptions

    def __init__(
        self, paths: Sequence[Path], options: TableOptions, context: OpenContext, splits: Sequence[str] = ()
    ) -> None:
        self._paths, self.decoding, self._options = paths, options, options
        self._splits = splits  # of each file, if the names of the files tell it
        self._num_rows = 0
        self._first_rows: list[int] = []
        self._columns: dict[str, Any] = {}
        self._categories: dict[str, list[str]] = {}
        self._gaps: dict[str, int] = {}  # number of missing values that became NaN, by column
        self._lacking: dict[int, str] = {}  # the column whose missing value makes a row unusable, by row
        self._empty: dict[str, list[int]] = {}  # the rows without a value, by column
        self._count_missing: Callable[[str], int]  # of a column of the file that is being read
        self._folder = context.temporary_folder
        self._dates: dict[str, str] = {}  # types of columns of dates and times, which become text
        self._skips = context.skips_bad_samples
        for path in paths:
            (self._read if is_parquet(path) else self._read_text)(path, options, context)
        if not self._num_rows:
            raise SourceError(f"{printable(paths[0])}: contains no rows")
        columns = {
            name: self._encode_categories(name, self._concatenate(name, column.parts))
            for name, column in self._columns.items()
            if isinstance(column, Values)
        }
        self._readers = {name: column.value for name, column in self._columns.items() if name not in columns}
        self._check_images(options)
        self.columns, names = self._gather(columns, options), list(self._columns)
        if not self._readers:
            largest = max(self.columns, key=lambda name: self.columns[name].itemsize)
            values = self.columns.pop(largest)
            self._readers = {largest: lambda index: values[index, ...]}
        first = [] if options.vector is None else [options.vector]
        names = [*first, *(name for name in names if name in self.columns or name in self._readers)]
        self.categories = {name: words for name, words in self._categories.items() if words and name in names}
        self.options = {**options.recorded(), "fields": list(dict.fromkeys(names))}
        gaps = [f"{count_text(count, 'missing value')} of {name!r} became NaN" for name, count in self._gaps.items()]
        if len(gaps) > MAX_NAMES:
            total = count_text(sum(self._gaps.values()), "missing value")
            gaps = [f"{total} of {len(gaps)} columns, such as {next(iter(self._gaps))!r}, became NaN"]
        dates = [
            f"{name!r} became {'categories' if name in self._categories else 'text'}, because fields do not support "
            f"{kind}"
            for name, kind in self._dates.items()
        ]
        self.notes = [*self.notes, *gaps, *dates]
        if self._splits and SPLIT not in self._columns:
            self._add_splits()
        self.find_fields(self._skips)

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        return head.startswith(MAGIC) or is_table(source, head) or (is_path(source) and bool(tables_in(source)))

    @classmethod
    def open(cls, source: Any, options: TableOptions, context: OpenContext) -> TableSource:
        folder, paths = Path(os.fsdecode(source)), tables_in(source) or [Path(source)]
        if folder in paths and os.path.isdir(folder):
            raise SourceError(
                f"{printable(source)}: is no folder of tables: it must contain only .parquet files, or only text "
                f"tables ({', '.join(SUFFIXES)})"
            )
        splits = splits_of(folder, paths) if os.path.isdir(folder) else []
        is_text = not is_parquet(paths[0])
        if is_text and context.is_guessed and may_be_entries(paths[0], options):
            raise OptionError(
                f"{printable(source)}: its columns may be fields of samples, or the rows, columns and values of a "
                "sparse matrix: pass --format table for samples, or --format csv for a matrix"
            )
        given = [name for name in TextOptions.names() if name in options.non_defaults()]
        if given and not is_text:
            raise OptionError(
                f"{flag_of(given[0])} applies only to text, but {printable(source)} is .parquet: leave out the option"
            )
        try:
            return cls(paths, options, context, splits)
        except H5ChunkError:
            raise
        except (OSError, pyarrow.ArrowException) as error:
            kind = "a table" if is_text else ".parquet"
            raise SourceError(f"{printable(source)}: cannot be read as {kind}: {printable(str(error))}") from None

    def _add_splits(self) -> None:
        """Add the column ``split``, which is not among the fields that are read by default, and a note."""
        counts = np.diff([*self._first_rows, self._num_rows])
        self.columns = {**self.columns, SPLIT: np.repeat(np.array([name.encode() for name in self._splits]), counts)}
        rows = Counter[str]()
        for name, count in zip(self._splits, counts.tolist(), strict=True):
            rows[name] += count
        self.notes = [
            *self.notes,
            f"the names of the files are splits: {', '.join(f'{name} ({count:,})' for name, count in rows.items())}: "
            "the field 'split' has the split of each sample",
        ]

    def _read(self, path: Path, options: TableOptions, context: OpenContext) -> None:
        """Append the rows of a .parquet file to the columns."""
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            columns = self._choose(path, schema)
            self._categories |= {name: words for name, words in _class_names(schema).items() if name in columns}
            self._count_missing = partial(_missing_in, file.metadata)
            self._add_batches(path, columns, file.iter_batches(BATCH_ROWS, columns=columns), context)

    def _read_text(self, path: Path, options: TableOptions, context: OpenContext) -> None:
        table, form, losses = read_text_table(os.fspath(path), options, context.memory_bytes)
        names = "" if form.has_header else "; there is no header, so columns are called column_0, ..."
        is_unclear = not form.has_numbers or any(map(is_number, form.names))
        if form.has_header and options.header == "auto" and is_unclear:
            names = (
                f"; the first line became names of columns: {names_text(form.names)} (if it is a sample, pass "
                "--header no; if it is neither, --header skip)"
            )
        notes = [f"each line became a sample{names} (--format csv reads entries of a sparse matrix)"]
        columns = self._choose(path, table.schema)
        notes += [note for name, note in losses if name in columns]
        notes += [NAMED_IMAGES.format(name) for name, value in _first_row(table) if names_image(value)]
        self.notes = list(dict.fromkeys([*self.notes, *notes]))
        self._count_missing = lambda name: int(table.column(name).null_count)
        self._add_batches(path, columns, table.select(columns).to_batches(BATCH_ROWS), context)

    def _add_batches(self, path: Path, columns: list[str], batches: Iterable[Any], context: OpenContext) -> None:
        self._first_rows.append(self._num_rows)
        for batch in batches:
            for name in columns:
                self._add(path, columns, name, batch.column(batch.schema.get_field_index(name)))
            self._num_rows += len(batch)
            held = self._num_rows * sum(column.held_bytes for column in self._columns.values())
            if held > context.memory_bytes:
                limit = human_bytes(context.memory_bytes)
                raise SourceError(
                    f"{printable(path)}: the numbers and strings of {self._num_rows:,} rows take {human_bytes(held)} "
                    f"of memory, over the limit of {limit}: allow more memory (--memory-bytes, such as "
                    f"{allowing(2 * held)}), or leave out columns (--columns)"
                )
            context.report_found(self._num_rows)

    def _choose(self, path: Path, schema: Any) -> list[str]:
        chosen = self._options.columns
        columns = list(schema.names) if chosen is None else list(chosen)
        if repeated := [name for name in columns if schema.names.count(name) > 1]:
            raise SourceError(
                f"{printable(path)}: two columns are called {printable(repeated[0])!r}: rename one of them"
            )
        for name in [*columns, *(self._options.vector_except or ())]:
            if name not in schema.names:
                raise OptionError(f"{printable(path)}: has no column {name!r}: it has {names_text(schema.names)}")
        if self._columns and set(columns) != set(self._columns):
            paths = printable(path), printable(self._paths[0])
            raise SourceError(
                f"{paths[0]}: its columns differ from those of {paths[1]}: "
                f"{difference_text(columns, list(self._columns), *paths)}: pass tables with the same columns, or "
                "choose common ones (--columns)"
            )
        return columns

    def _add(self, path: Path, columns: list[str], name: str, array: Any) -> None:
        where = f"{printable(path)}: column {name!r}"
        remedy = self._without(path, columns, name)
        if pyarrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
            self._categories.setdefault(name, [])
        if pyarrow.types.is_null(array.type) and len(self._paths) == 1:
            array = array.cast(pyarrow.float64())
        if has_type(array.type, "date", "time", "timestamp"):
            self._dates[name], array = str(array.type), array.cast(pyarrow.string())
        if name not in self._columns:
            column = storage_class(array.type)
            if column is None:
                is_empty = pyarrow.types.is_null(array.type)
                problem = "no values" if is_empty else f"values of type {array.type}, which fields do not support"
                raise SourceError(f"{where} has {problem}: {remedy}")
            self._columns[name] = column(self._folder)
        if has_type(array.type, "struct"):
            paths = array
            array = compute.struct_field(array, ["bytes"])
            if paths.null_count < array.null_count:
                raise SourceError(f"{where} contains an image as a path without its bytes: change it, or {remedy}")
        if array.null_count:
            array = self._filled(path, name, array, where, remedy)
        try:
            self._columns[name].add(array)
        except (ValueError, SourceError) as error:
            raise SourceError(f"{where} {error}: change it, or {remedy}") from None

    def _without(self, path: Path, columns: list[str], name: str) -> str:
        """Return advice on how to leave out a column, for error messages."""
        others = [column for column in columns if column != name]
        if not others:
            return "convert the table without it"
        kind = "" if is_parquet(path) else " --format table"
        if len(others) > MAX_NAMES:
            return f"leave it out (name all other columns: --columns A,B,...{kind})"
        return f"leave it out (--columns {printable(','.join(others))}{kind})"

    def _filled(self, path: Path, name: str, array: Any, where: str, remedy: str) -> Any:
        """Fill the missing values of a column with NaN, or note the rows to skip.

        Raises SourceError, which starts with ``where`` and ends with ``remedy``, if the options allow neither.
        """
        is_whole, is_text = has_type(array.type, "integer", "boolean"), has_type(array.type, *TEXTS)
        if has_type(array.type, "floating") or (is_whole and self._options.missing == "nan"):
            if is_whole and may_be_lost(array.cast(pyarrow.float64(), safe=False).drop_null().to_numpy()):
                way = "" if is_parquet(path) else f"read the column as text (--text-columns {printable(name)}), "
                raise SourceError(
                    f"{where} has missing values, and integers that would be rounded, because columns with NaN are "
                    f"float64: {way}fill the missing values, or {remedy}"
                )
            self._gaps[name] = self._gaps.get(name, 0) + array.null_count
            return (array.cast(pyarrow.float64()) if is_whole else array).fill_null(math.nan)
        rows = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) + self._num_rows
        can_skip = is_whole or is_text or has_type(array.type, "binary", "large_binary")
        if self._skips and can_skip:
            self._lacking |= dict.fromkeys(rows.tolist(), name)
            self._empty.setdefault(name, []).extend(rows.tolist())
            if not is_whole and not is_text:
                return array
            return array.fill_null("" if is_text else False if pyarrow.types.is_boolean(array.type) else 0)
        advice = "convert such columns to float64 with NaN (--missing nan), " if is_whole else ""
        advice += "skip such rows (--on-error skip), " if can_skip else ""
        count = self._count_missing(name)
        more = f" (the first of {count:,} missing values)" if count > 1 else ""
        raise SourceError(
            f"{where} has no value in row {rows[0] - self._first_rows[-1]}{more}: fill it, {advice}or {remedy}"
        )

    def _concatenate(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        """Concatenate a column from all files. Raises SourceError if their common type cannot hold all values."""
        is_text = not is_parquet(self._paths[0])
        kinds = {part.dtype.kind for part in parts}
        if len(kinds) > 1 and "S" in kinds:
            remedy = f"read it as text (--text-columns {printable(name)})" if is_text else "use one type in all files"
            raise SourceError(
                f"{printable(self._paths[0])} and other files: column {name!r} has numbers in some files and text in "
                f"others: {remedy}"
            )
        if kinds == {"i", "u"} and min(part.min(initial=0) for part in parts) >= 0:  # not float64
            parts = [part.astype(np.uint64) for part in parts]
        values = np.concatenate(parts)
        for part in parts:
            if not _holds(values.dtype, part):
                raise SourceError(
                    f"{printable(self._paths[0])} and other files: the common type of column {name!r}, {values.dtype}, "
                    f"cannot hold all its integers of type {part.dtype}: use one type for the column in all files"
                    + (f", such as text (--text-columns {printable(name)})" if is_text else "")
                )
        return values

    def _encode_categories(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return the values of a column, with strings as category codes if few of them are distinct."""
        few = 1 < len(self._columns[name].words) <= min(MAX_CATEGORIES, self._num_rows - 1)
        if name.lower() in LABEL_COLUMNS and values.dtype.kind == "S":
            few |= 1 < len(np.unique(values)) <= self._num_rows // 2
        if self._categories.get(name, [] if few else None) != []:
            return values.astype(field_dtype(name, values.dtype), copy=False)
        words, counts = np.unique(np.delete(values, self._empty.get(name, [])), return_counts=True)
        if words[0] in (b"", ""):
            self.notes = [
                *self.notes,
                f"{count_text(int(counts[0]), 'empty cell')} of {name!r} became a category of its own, without a name",
            ]
        self._categories[name] = [word.decode() if isinstance(word, bytes) else str(word) for word in words.tolist()]
        return np.searchsorted(words, values).astype(np.int64)

    def _check_images(self, options: TableOptions) -> None:
        """Raise OptionError if options for images are passed but no column contains images."""
        given = [name for name in ImageOptions.names() if name in options.non_defaults()]
        if given and not any(isinstance(column, Images) for column in self._columns.values()):
            raise OptionError(
                f"{flag_of(given[0])} applies only to images, but {printable(self._paths[0])} has no column with the "
                "bytes of images: leave out the option; with --like a file of images, pass a source of images"
            )

    def _gather(self, columns: dict[str, np.ndarray], options: TableOptions) -> dict[str, np.ndarray]:
        """Combine the numeric columns into a field, if ``vector`` is set, and return the remaining columns."""
        apart = options.vector_except or ()
        parts = {
            name: values
            for name, values in columns.items()
            if values.dtype.kind in "iuf" and name not in self._categories and name not in apart
        }
        if options.vector is None:
            if len(parts) >= MANY_COLUMNS:
                self.notes = [
                    *self.notes,
                    f"{len(parts)} numeric columns could become one field of vectors (--vector NAME)",
                ]
            return columns
        if not parts:
            raise OptionError(
                f"vector is {options.vector!r}, but there is no numeric column for it: leave out the option, or choose "
                "numeric columns"
            )
        if options.vector in self._columns.keys() - parts.keys():
            raise OptionError(f"vector is {options.vector!r}, but a column is called that: pass another name")
        dtype = np.result_type(*parts.values())
        if dtype.kind in "iu" and not is_parquet(self._paths[0]):  # text has no types
            lowest, highest = (getattr(np.stack(list(parts.values())), which)() for which in ("min", "max"))
            dtype = np.promote_types(np.min_scalar_type(lowest), np.min_scalar_type(highest))
        together = np.empty((self._num_rows, len(parts)), dtype)
        for number, (name, values) in enumerate(parts.items()):
            if not _holds(dtype, values):
                raise SourceError(
                    f"{printable(self._paths[0])}: column {name!r} contains integers that {dtype}, the type of the "
                    f"vector, cannot hold exactly: leave it out of the vector (--vector-except {printable(name)})"
                )
            together[:, number] = values
        first, *_, last = [*parts, *parts]
        self.notes = [*self.notes, f"{options.vector} combines {count_text(len(parts), 'column')}: {first} to {last}"]
        self._readers[options.vector] = together.__getitem__
        return {name: values for name, values in columns.items() if name not in parts}

    def __len__(self) -> int:
        return self._num_rows

    def name(self, index: int) -> str:
        number = int(np.searchsorted(self._first_rows, index, "right")) - 1
        return f"{printable(self._paths[number].name)}, row {index - self._first_rows[number]}"

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        stamps = [source_stamp(path) for path in self._paths]
        return {
            "kind": self.kind,
            "decoder": PIL.__version__,
            "options": vars(self.decoding),
            "splits": self._splits,
            "stamps": stamps,
        }, ()

    def values(self, index: int) -> dict[str, Any]:
        if index in self._lacking:
            raise SampleError(f"has no value in column {self._lacking[index]!r}")
        return {name: read(index) for name, read in self._readers.items()}


def tables_in(source: Any) -> list[Path]:
    """Return the .parquet files or text tables in a folder and its subfolders, sorted.

    Returns an empty list if the folder contains any other file that is visible, except documents such as README.md.
    """
    folder = Path(os.fsdecode(source))
    files: list[Path] = []
    suffixes: tuple[str, ...] = ()
    for path in _visible_files(folder) if os.path.isdir(folder) else ():
        if path.name.lower().startswith(DOCUMENTS) or path.suffix == ".md":
            continue
        suffixes = suffixes or ((SUFFIX,) if path.suffix == SUFFIX else SUFFIXES)
        if path.suffix != SUFFIX if suffixes == (SUFFIX,) else not has_suffix(path, *SUFFIXES):
            return []
        files.append(path)
    files.sort()
    return files if files and (suffixes == (SUFFIX,) or is_table(files[0], read_head(files[0]))) else []


def _visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder one by one, because it may contain millions of images."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith((".", "_")) or os.fsencode(entry.name.lower()) in SYSTEM:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _visible_files(folder / entry.name)
            else:
                yield folder / entry.name


def is_parquet(path: Path) -> bool:
    """Return whether a path is a folder or a .parquet file, by its suffix or first bytes."""
    return os.path.isdir(path) or path.suffix == SUFFIX or read_head(path).startswith(MAGIC)


def _holds(dtype: np.dtype, values: np.ndarray) -> bool:
    """Return whether a type can hold all integers of an array exactly."""
    return values.dtype.kind not in "iu" or not (values.astype(dtype).astype(values.dtype) != values).any()


def _missing_in(metadata: Any, name: str) -> int:
    """Return the number of missing values of a column in a .parquet file, as far as its statistics tell."""
    count = 0
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            if column.path_in_schema in (name, f"{name}.bytes") and column.is_stats_set:
                count += column.statistics.null_count or 0
    return count


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Return the class names by column from the metadata that Hugging Face writes into a table."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            name: list(feature["names"]) for name, feature in features.items() if feature.get("_type") == "ClassLabel"
        }
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
