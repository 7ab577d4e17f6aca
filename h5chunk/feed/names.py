"""Names and ids that a converted file keeps beside its samples."""

from __future__ import annotations

import numpy as np

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.store.format import GROUP
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.reader import H5Reader

TEXT_ERRORS = "backslashreplace"  # of bytes that are not UTF-8


def decoded(values: np.ndarray) -> np.ndarray:
    """Decode fixed-length strings from UTF-8; a byte that is not UTF-8 becomes ``\\xNN``. Numbers stay as they are."""
    return np.char.decode(values, "utf-8", TEXT_ERRORS) if values.dtype.kind == "S" else values


def sample_table(reader: H5Reader, name: str) -> np.ndarray:
    """A table of one value per sample, of all files: (num_samples,), numbers or str.

    Raises
    ------
    FieldError
        A file does not have it.
    """
    tables = [decoded(_read(each, name)) for each in _files(reader)]
    for each, table in zip(_files(reader), tables, strict=True):
        if len(table) != each.num_samples:
            raise FileError(
                f"{printable(each.path)}: damaged: {name} has {len(table)} values for {each.num_samples} samples"
            )
    return np.concatenate(tables)


def common_table(reader: H5Reader, name: str) -> np.ndarray:
    """A table that all files share, such as the ids of columns: numbers or str.

    Raises
    ------
    FieldError
        A file does not have it, or has another one.
    """
    first, *others = _files(reader)
    table = _read(first, name)
    for other in others:
        if not np.array_equal(_read(other, name), table):
            raise FieldError(f"{name} of {printable(other.path)} differs from that of {printable(first.path)}")
    return decoded(table)


def source_names(reader: H5Reader) -> np.ndarray:
    """The path of each sample below the source that it was converted from: (num_samples,) of str.

    Raises
    ------
    FieldError
        A file does not have them.
    FileError
        They are damaged.
    """
    return np.array([name for each in _files(reader) for name in _names_of_file(each)], dtype=np.str_)


def _names_of_file(reader: H5Reader) -> list[str]:
    text, ends = _read(reader, "source_names").tobytes(), _read(reader, "source_name_ends")
    starts = np.concatenate(([0], ends[:-1]))
    if len(ends) != reader.num_samples or (ends < starts).any() or (len(ends) and ends[-1] != len(text)):
        raise FileError(f"{printable(reader.path)}: damaged: source_name_ends does not divide source_names")
    return [text[start:end].decode("utf-8", TEXT_ERRORS) for start, end in zip(starts, ends, strict=True)]


def _read(reader: H5Reader, name: str) -> np.ndarray:
    """A table of one file."""
    if reader.header is None:
        raise FieldError(
            f"{printable(reader.path)}: has no {name}: only files that h5chunk converted keep names and ids"
        )
    try:
        table = H5Reader(reader.path, {name: f"{GROUP}/{name}"}, trusted=reader.trusted)
    except FieldError as error:
        raise FieldError(f"{printable(reader.path)}: has no {name}: its source had none ({error})") from None
    field = table.fields[name]
    values = np.empty((table.num_samples, *field.sample_shape), field.dtype)
    table.read(name, np.arange(table.num_samples), values)
    return values


def _files(reader: H5Reader) -> tuple[H5Reader, ...]:
    return reader.readers if isinstance(reader, FileSet) else (reader,)
