"""Read names, ids and categories from the tables of an h5chunk file, or from an AnnData or 10x file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import (
    FieldError,
    FileError,
    TrustError,
    UnsupportedError,
    count_text,
    difference_text,
    printable,
)
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.child import in_child, limited_memory
from h5chunk.store.hdf5.encodings import NULLABLE, read_encoding
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import errors_as, opened
from h5chunk.store.hdf5.strings import MAX_STRING_BYTES, read_words
from h5chunk.store.read.field_readers import read_rows
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.source import Source

ROW_IDS, COLUMN_IDS, SYMBOLS = "row_ids", "column_ids", "column_symbols"
SOURCE_NAMES = "source_names"  # the table of all names, concatenated
TEXT_ERRORS = "backslashreplace"  # error handler for invalid UTF-8


def decoded(values: np.ndarray) -> np.ndarray:
    r"""Decode byte strings as UTF-8, with ``\xNN`` for an invalid byte. Numbers are returned unchanged."""
    return np.char.decode(values, "utf-8", TEXT_ERRORS) if values.dtype.kind == "S" else values


def read_table(reader: Source, name: str) -> np.ndarray:
    """Read a table of one file by its name in the group ``/h5chunk``: (n,) numbers, or bytes in UTF-8.

    Raises FieldError if the file does not have the table, or if reading it requires ``trusted``. Raises FileError if
    the table is damaged.
    """
    values = find_table(reader, name)
    if values is None:
        kinds = "ratings, AnnData and 10x files have them"
        if has_names := name.startswith("source_name"):
            kinds = "images and other single samples have names; rows of a matrix have row_ids"
        reason = f"its source had none ({kinds})"
        if reader.header is None:
            reason = "only files that h5chunk converted" + ("" if has_names else ", AnnData files and 10x files")
            reason += " have names of samples" if has_names else " have ids"
        raise FieldError(f"{printable(reader.path)} has no {name}: {reason}")
    return values


def find_table(reader: Source, name: str, matrix: str = "") -> np.ndarray | None:
    """Read a table as `read_table` does, but return None if the file does not have it.

    ``matrix`` is the field of the matrix whose ids are read. Default: the first matrix.
    """
    if reader.header is None:
        return _read_foreign_table(reader, name, matrix)
    try:
        stored = H5Reader(reader.path, {name: f"{GROUP}/{name}"}, trusted=reader.trusted)
    except (TrustError, UnsupportedError):
        raise
    except FieldError:
        return _read_foreign_table(reader, name, matrix)
    return read_rows(stored, name, np.arange(stored.num_samples))


def values_of_samples(reader: Source, name: str) -> np.ndarray:
    """Read a table of one file that has one value per sample: (n,), numbers or str."""
    table = read_table(reader, name)
    if name == SOURCE_NAMES:
        text, ends = table.tobytes(), read_table(reader, "source_name_ends")
        starts = np.concatenate(([0], ends[:-1]))
        if len(ends) != reader.num_samples or (ends < starts).any() or (len(ends) and ends[-1] != len(text)):
            raise FileError(f"{printable(reader.path)} is damaged, because source_name_ends does not fit source_names")
        names = [text[start:end].decode("utf-8", TEXT_ERRORS) for start, end in zip(starts, ends, strict=True)]
        return np.array(names, np.str_)
    if len(table) != reader.num_samples:
        raise FileError(
            f"{printable(reader.path)} is damaged, because {name} has {len(table)} values for {reader.num_samples} "
            "samples"
        )
    return decoded(table)


def has_table(reader: Source, name: str) -> bool:
    """Return whether a file has a table, or a dataset with this path."""
    matrix = reader.matrix.dataset if reader.matrix else ""
    found: bool = in_child(reader.path, _has_table, reader.path, reader.trusted, name, matrix)
    return found


def _has_table(file_path: Path, trusted: bool, name: str, matrix: str) -> bool:
    with limited_memory(file_path, trusted), opened(file_path) as file:
        guard = Guard(file_path, trusted)
        paths = f"{GROUP}/{name}", name, *_table_paths(file, guard, name, matrix)
        return any(guard.find(file, path) is not None for path in paths)


def _read_foreign_table(reader: Source, name: str, matrix: str = "") -> np.ndarray | None:
    """Read a table of an AnnData or 10x file, in a child process because HDF5 may hang on damaged strings."""
    field = reader.ragged_fields[matrix] if matrix else reader.matrix
    values = in_child(reader.path, _find_values, reader.path, reader.trusted, name, field.dataset if field else "")
    reader.check_unchanged()
    return values


def _find_values(file_path: Path, trusted: bool, name: str, matrix: str) -> np.ndarray | None:
    with limited_memory(file_path, trusted), opened(file_path) as file:
        guard = Guard(file_path, trusted)
        for path in _table_paths(file, guard, name, matrix):
            if guard.find(file, path) is not None:
                return _values(file, guard, path)
    return None


def _table_paths(file: h5py.File, guard: Guard, name: str, matrix: str) -> Iterator[str]:
    """Yield the paths of datasets that may contain the table ``name`` of an AnnData or 10x file."""
    matrix = matrix.strip("/")
    if name == SYMBOLS:
        yield from (f"{matrix}/features/name", f"{matrix}/gene_names")
        return
    if name not in (ROW_IDS, COLUMN_IDS):
        yield name
        return
    yield from [f"{matrix}/barcodes"] if name == ROW_IDS else [f"{matrix}/features/id", f"{matrix}/genes"]
    # var is beside X, layers and raw/X, obs beside X, layers and raw; a modality of MuData has its own
    folder = matrix.split("/")[:-1]
    if folder and folder[-1] in (("layers", "raw") if name == ROW_IDS else ("layers",)):
        folder = folder[:-1]
    table = "/".join([*folder, "obs" if name == ROW_IDS else "var"])
    if name == ROW_IDS and guard.find(file, table) is None:
        table = "obs"
    group = guard.find(file, table)
    if isinstance(group, h5py.Group):
        label = f"{printable(guard.path)}: {table!r}"
        read_encoding(group, lambda problem: FieldError(f"{label} {problem}"))  # refuses unknown encodings
        words = read_words(group, "_index", lambda problem: FileError(f"{label}: {problem}"))
        yield from (f"{table}/{word}" for word in (*words, "_index", "index"))


def _values(file: h5py.File, guard: Guard, path: str) -> np.ndarray:
    """Read numbers or strings, (n,), from a dataset or from AnnData's group of a column. Strings become bytes."""
    where, item = f"{printable(guard.path)}: {path!r}", guard.find(file, path)
    encoding = read_encoding(item, lambda problem: FieldError(f"{where} {problem}"))
    if encoding in NULLABLE:
        if num_missing := int(_values(file, guard, f"{path}/mask").sum()):
            raise FieldError(f"{where} has no value in {count_text(num_missing, 'row')}: fill them in the source")
        return _values(file, guard, f"{path}/values")
    if encoding == "categorical":
        codes, words = _values(file, guard, f"{path}/codes"), _values(file, guard, f"{path}/categories")
        if codes.dtype.kind not in "iu" or not ((codes >= 0) & (codes < len(words))).all():
            raise FieldError(f"{where} has rows without a category: fill them in the source")
        return words[codes]
    if not isinstance(item, h5py.Dataset):
        raise FieldError(f"{where} is a group with the encoding {encoding!r}, in which no names are stored")
    guard.check_field(item, path)
    if item.ndim != 1 or item.dtype.kind not in "biufSO":
        raise FieldError(f"{where} is {item.dtype} {item.shape}: names must be strings or numbers in one dimension")
    with errors_as(FileError, f"{where} is damaged"):
        values = item[()]
    if values.dtype.kind != "O":
        return np.asarray(values)
    words = values.tolist()
    width = max(map(len, words), default=0)
    if width > MAX_STRING_BYTES:
        raise FieldError(f"{where} has strings of {width} bytes, but the limit is {MAX_STRING_BYTES}")
    return np.array(words, f"S{max(1, width)}")


def check_same(tables: Sequence[tuple[Source, str]], noun: str, remedy: str, matrix: str = "") -> None:
    """Raise FieldError if the tables of several files differ.

    ``noun`` names the contents of the tables in the message. For ``matrix`` see `find_table`.
    """
    contents = [(reader.path, find_table(reader, name, matrix)) for reader, name in tables]
    named = [(printable(path), names) for path, names in contents if names is not None]
    for path, names in named[1:]:
        first_path, first = named[0]
        if not np.array_equal(names, first):
            difference = difference_text(names.tolist(), first.tolist(), path, first_path)
            raise FieldError(f"{path}: its {noun} differ from those of {first_path} ({difference}): {remedy}")
