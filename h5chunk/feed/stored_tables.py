"""Read the names, identifiers and categories that files keep beside their samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.tables import read_table

SOURCE_NAMES = "source_names"  # the text of all, one behind the other
TEXT_ERRORS = "backslashreplace"  # of bytes that are not UTF-8


def decoded(values: np.ndarray) -> np.ndarray:
    """Decode fixed-length strings from UTF-8; a byte that is not UTF-8 becomes ``\\xNN``. Numbers stay as they are."""
    return np.char.decode(values, "utf-8", TEXT_ERRORS) if values.dtype.kind == "S" else values


class StoredTables:
    """The tables of one or several files, each of which is read only once.

    All methods raise `FieldError` if a file does not have the table, and `FileError` if it is damaged.
    """

    def __init__(self, reader: H5Reader) -> None:
        self._files = reader.readers
        self._tables: dict[str, np.ndarray] = {}

    def of_samples(self, name: str) -> np.ndarray:
        """Read a table of one value per sample, over all files: (num_samples,), numbers or str."""
        return self._once(name, lambda: np.concatenate([_values_of_samples(file, name) for file in self._files]))

    def common(self, name: str) -> np.ndarray:
        """Read a table that all files share, such as the identifiers of columns: numbers or str."""

        def read() -> np.ndarray:
            first, *others = self._files
            table = read_table(first, name)
            for other in others:
                if not np.array_equal(read_table(other, name), table):
                    raise FieldError(f"{name} of {printable(other.path)} differs from that of {printable(first.path)}")
            return decoded(table)

        return self._once(name, read)

    def _once(self, name: str, read: Callable[[], np.ndarray]) -> np.ndarray:
        if name not in self._tables:
            table = read()
            table.flags.writeable = False  # all who ask get the same
            self._tables[name] = table
        return self._tables[name]


def _values_of_samples(reader: H5Reader, name: str) -> np.ndarray:
    """Read a value for each sample of one file."""
    table = read_table(reader, name)
    if name == SOURCE_NAMES:
        text, ends = table.tobytes(), read_table(reader, "source_name_ends")
        starts = np.concatenate(([0], ends[:-1]))
        if len(ends) != reader.num_samples or (ends < starts).any() or (len(ends) and ends[-1] != len(text)):
            raise FileError(f"{printable(reader.path)}: damaged: source_name_ends does not divide source_names")
        names = [text[start:end].decode("utf-8", TEXT_ERRORS) for start, end in zip(starts, ends, strict=True)]
        return np.array(names, np.str_)
    if len(table) != reader.num_samples:
        raise FileError(
            f"{printable(reader.path)}: damaged: {name} has {len(table)} values for {reader.num_samples} samples"
        )
    return decoded(table)
