"""Read the names, identifiers and categories that files store beside their samples."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.store.format.header import Header
from h5chunk.store.format.statistics import FieldStatistics, merged, read_statistics, statistics_path
from h5chunk.store.hdf5.open import opened
from h5chunk.store.hdf5.types import element_of
from h5chunk.store.read.fields import Field
from h5chunk.store.read.files import reopen_with_fields
from h5chunk.store.read.ragged import RaggedField
from h5chunk.store.read.source import Source
from h5chunk.store.read.tables import SOURCE_NAMES, decoded, read_table, values_of_samples
from h5chunk.urls import PATTERN

MAX_CATEGORIES = 1 << 16  # limit on the values of an enumeration that has categories


class StoredNames:
    """Base class of data sets, which reads the tables in their files. Each table is read only once."""

    _reader: Source
    _decode: str  # how packed numbers are converted
    _samples: np.ndarray | None  # of a subset
    samples: Any  # the number of each sample in the files
    numbered_fields: Any  # the fields that are not in the files
    _tables: dict[str, np.ndarray]  # tables that were read, shared by all subsets

    @property
    def header(self) -> Header | None:
        """The header of an h5chunk file; None for other HDF5 files."""
        return self._reader.header

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, such that ``classes[label]`` is the name of a label; empty if the file has none.

        The labels are the field ``labels`` or, without it, the only field with categories, such as ``obs/cell_type``.
        """
        if class_names := self._class_names:
            return class_names
        coded = [
            name for name, field in self._reader.fields.items() if field.categories or min(field.names, default=-1) >= 0
        ]
        coded = [name for name in coded if name == "labels"] or coded
        return tuple(map(str, self.categories(coded[0]).tolist())) if len(coded) == 1 else ()

    @property
    def _class_names(self) -> tuple[str, ...]:
        """The class names in the header of the file that has the labels."""
        header = self._reader.part_of("labels").header if "labels" in self._reader.fields else self.header
        return header.class_names if header else ()

    @property
    def source_names(self) -> np.ndarray:
        """Name of each sample: (n,) of str.

        This is the path of its file, relative to the source that was converted; for `Keyed`, the text that ``*``
        matches; for `Windows` and `Patches`, the name of its episode or volume. Raises `FieldError` if the file has no
        such table, as `row_ids`, `column_ids`, `column_symbols` and `categories` do.
        """
        return self._source_names(self.samples)

    def _source_names(self, samples: np.ndarray) -> np.ndarray:
        """Return the names of samples, given their numbers in the files: (n,) of str."""
        if self._reader.groups is not None:
            return np.asarray(self._names_of(samples))
        if self._names_of(np.zeros(0, np.int64)) is None:
            return self._of_samples(SOURCE_NAMES, samples)
        names = self._once("names of samples", lambda: self._names_of(np.arange(self._reader.num_samples)))
        return names[samples]

    def _names_of(self, samples: np.ndarray) -> Any:
        return self._reader.names_of(samples)

    @property
    def row_ids(self) -> np.ndarray:
        """Identifier of each sample in the source, such as a cell's barcode or a user's ID: (n,), int or str."""
        return self._of_samples("row_ids", self.samples)

    @property
    def column_ids(self) -> np.ndarray:
        """Identifier of each column of a matrix, such as the name of a gene: (num_columns,), int or str."""
        return self._common("column_ids")

    @property
    def column_symbols(self) -> np.ndarray:
        """Symbol of each column of a 10x matrix, such as CD3E for a gene: (num_columns,) of str, not always unique."""
        return self._common("column_symbols")

    @property
    def obs_names(self) -> np.ndarray:
        """The `row_ids`, as AnnData calls them."""
        return self.row_ids

    @property
    def var_names(self) -> np.ndarray:
        """The `column_ids`, as AnnData calls them."""
        return self.column_ids

    def categories(self, field: str) -> np.ndarray:
        """Return the names of a field's categories, (num_categories,) of str, in the order of its codes.

        The code -1 means a missing value. For the labels of images, the categories are the `classes`. For an
        enumeration, they are the names of its values, up to the highest one; values without a name have an empty name.
        Raises `FieldError` if the field has no categories, or a named value is negative or above 65,535.
        """
        stored = self._stored(field)
        if stored.dataset.strip("/") == "labels" and self._class_names:
            return np.array(self._class_names)
        where = f"{printable(self._reader.path)}: field {field!r}"
        if isinstance(stored, Field) and stored.names:
            lowest, highest = min(stored.names), max(stored.names)
            if lowest < 0 or highest >= MAX_CATEGORIES:
                remedy = f"h5py.check_enum_dtype(h5py.File(...)[{stored.dataset!r}].dtype) returns the names by value"
                raise FieldError(
                    f"{where} has names for values from {lowest} to {highest}, but categories are numbered from 0 to "
                    f"at most {MAX_CATEGORIES - 1}: {remedy}"
                )
            return np.array([stored.names.get(code, "") for code in range(highest + 1)])
        if not stored.categories:
            raise FieldError(f"{where} has no categories: name a field of codes, or an enumeration")
        return self._common(stored.categories, field)

    def has_categories(self, field: str) -> bool:
        """Return whether the values of a field are codes of `categories`. Raises FieldError if there is no field."""
        if field in self.numbered_fields:
            return False
        stored = self._stored(field)
        has_classes = stored.dataset.strip("/") == "labels" and bool(self._class_names)
        is_enumeration = isinstance(stored, Field) and min(stored.names, default=-1) >= 0
        return has_classes or is_enumeration or bool(stored.categories)

    def _stored(self, field: str) -> Field | RaggedField:
        """Return the description of a field, or of another dataset of the files."""
        stored = self._reader.fields.get(field)
        return stored or reopen_with_fields(self._reader.part_of(field), {field: field}).fields[field]

    def statistics(self, field: str) -> FieldStatistics:
        """Return the mean and standard deviation of each channel of a field, over all samples of the files.

        ::

            found = dataset.statistics("images")
            loader = h5chunk.ChunkLoader(dataset, 256, transforms=[Normalize(found.mean, found.std)])

        ``h5chunk info FILE --stats`` computes them once, for all subsets; ``--fields`` names fields that it would not
        choose. Raises FieldError, with the command, if they have not been computed, or if the file has changed since
        then. For samples of `Keyed` and for URLs they are not stored, and the error says how to compute them.
        """
        found, datasets = [], self._reader.datasets_of(field)
        command = _statistics_command(self._reader.path, datasets)
        for path, dataset in datasets:
            name = dataset.strip("/")
            stored = read_statistics(path, command)
            if name not in stored:
                listed = ", ".join(map(repr, stored))
                raise FieldError(
                    f"{printable(statistics_path(path))} has no statistics of {name!r}, only those of {listed}: "
                    f"run {command}"
                )
            found.append(_unpacked(stored[name], path, dataset, self._decode))
        return merged(found)

    def _of_samples(self, name: str, samples: np.ndarray) -> np.ndarray:
        source, rows = self._reader.rows_of_samples(name, samples)
        table = self._once(name, lambda: np.concatenate([values_of_samples(file, name) for file in source.readers]))
        return table if len(rows) == len(table) and self._samples is None else table[rows]

    def _common(self, name: str, field: str | None = None) -> np.ndarray:
        """Return a table of a field that must be equal in all files. By default, the field is the main one."""
        source = self._reader.part_of(field or self._reader.main.name)

        def read() -> np.ndarray:
            first, *others = source.readers
            table = read_table(first, name)
            for other in others:
                if not np.array_equal(read_table(other, name), table):
                    paths = f"{printable(first.path)} and {printable(other.path)}"
                    raise FieldError(f"{name} differs between {paths}: open the files as separate data sets")
            return decoded(table)

        return self._once(name if field is None else f"{field}: {name}", read)

    def _once(self, name: str, read: Callable[[], np.ndarray]) -> np.ndarray:
        if name not in self._tables:
            table = read()
            table.flags.writeable = False  # all callers get the same array
            self._tables[name] = table
        return self._tables[name]


def _statistics_command(source: Path, datasets: Sequence[tuple[Path, str]]) -> str:
    """Return the command that stores the statistics of these datasets, of all files at once."""
    files = [printable(path) for path in dict.fromkeys(path for path, _ in datasets)]
    if len(files) > 1 and (source.is_dir() or re.search(PATTERN, str(source))):
        files = [printable(source)]
    names = [part for name in dict.fromkeys(name.strip("/") for _, name in datasets) for part in ("--fields", name)]
    return shlex.join(["h5chunk", "info", "--stats", *map(printable, names), *files])


def _unpacked(found: FieldStatistics, path: Path, dataset: str, decode: str) -> FieldStatistics:
    """Convert the statistics of stored values to those of unpacked values."""
    if not decode:
        return found
    where = f"{printable(path)}: {dataset!r}"
    packing = None
    if "*" not in dataset:
        with opened(path) as file:
            if dataset not in file:  # a column of a table, which is not packed
                return found
            item = file[dataset]
            packing = element_of(item, where, (), decode).packing
            if packing is None:
                return found
            stored = item.dtype
    if packing is None or packing.numbers != packing.stored or (packing.low, packing.high) != (None, None):
        raise FieldError(
            f"{where} has statistics of stored values, which do not show those of unpacked values, because there are "
            "several datasets, or its values have limits (valid_range) or are unsigned: compute them from batches"
        )
    unit = 255 if stored == np.uint8 else 1  # statistics of uint8 are those of values from 0 to 1
    columns = {
        name: tuple(value * unit * packing.scale + packing.offset for value in getattr(found, name))
        for name in ("mean", "minimum", "maximum")
    }
    if packing.scale < 0:
        columns["minimum"], columns["maximum"] = columns["maximum"], columns["minimum"]
    std = tuple(value * unit * abs(packing.scale) for value in found.std)
    return FieldStatistics(found.count, std=std, num_missing=found.num_missing, **columns)


def name_of_sample(reader: Source, number: int) -> str:
    """Return the path of the file and the name of a sample, for messages, given the sample's number in all files."""
    reader, rows = reader.rows_of_samples(reader.main.name, np.array([number]))
    number = int(rows[0])
    file = int(np.searchsorted(reader.starts, number, "right")) - 1
    file_reader = reader.readers[file]
    try:
        name = printable(values_of_samples(file_reader, SOURCE_NAMES)[number - reader.starts[file]])
    except FileError:
        name = f"image {number - reader.starts[file]}"
    return f"{printable(file_reader.path)}: {name}"
