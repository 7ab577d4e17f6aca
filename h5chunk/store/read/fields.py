"""Describe datasets, and groups that contain a sparse matrix, as fields of samples.

`h5chunk.store.format.spec` specifies the matrix of an h5chunk file. A matrix of AnnData may have other types and
filters: https://anndata.readthedocs.io/en/latest/fileformat-prose.html, "Sparse arrays".
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, OptionError, UnsupportedError, count_text, names_text, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.csr import plan_csr
from h5chunk.store.format.header import CSR, DENSE, Header, check_values
from h5chunk.store.format.spec import GROUP, IMAGE_TABLES
from h5chunk.store.hdf5.child import limited_memory
from h5chunk.store.hdf5.chunk_table import check_chunks, is_text, is_vlen
from h5chunk.store.hdf5.encodings import read_encoding
from h5chunk.store.hdf5.guard import Guard, small_attribute
from h5chunk.store.hdf5.open import errors_as, opened
from h5chunk.store.hdf5.strings import read_words
from h5chunk.store.hdf5.types import Element, element_of, find_column, members_of
from h5chunk.store.read.ragged import REMEDY, FlatSamples, RaggedField, describe_images
from h5chunk.store.read.samples import Part, Rows, StoredFile
from h5chunk.store.read.vlen import describe_vlen, longest_text, text_part

MATRIX_PARTS = ("indptr", "indices", "data")
TENX_PARTS = (b"barcodes", b"indptr", b"indices", b"data", b"shape")
WINDOW = "NT"  # beginning of the axes of a field of windows: samples, then time steps
MATRIX_REMEDY = "convert their sources together, or with the same --scale, --values or --binarize"
SAMPLE_NUMBER = "sample_number"  # the field that numbers samples
NAME_FIELDS = "name the fields to read with fields=[...] (--fields)"
KIND_ATTRIBUTES = ("encoding-type", "h5sparse_format")

Fields = Mapping[str, str] | Sequence[str]


class Contents(NamedTuple):
    """An open file whose datasets are described as fields. ``decode`` is how packed numbers are converted."""

    file: h5py.File
    guard: Guard
    header: Header | None = None
    decode: str = ""

    @property
    def path(self) -> Path:
        return self.guard.path

    def find(self, path: str) -> Any:
        """Return the object at a path, or None."""
        return self.guard.find(self.file, path)

    def where(self, dataset: str) -> str:
        """Return a text that names a dataset."""
        return f"{printable(self.guard.path)}: {dataset!r}"


class StoredAs(Protocol):
    """How the samples of a field are stored, if they are not the rows of one dataset."""

    def describe(self, contents: Contents, name: str) -> Field | RaggedField:
        """Check the datasets of the field ``name``, and describe it."""


Stored = Mapping[str, str | StoredAs]  # the dataset of each field, by field name


@dataclass(frozen=True)
class AlongAxis:
    """A dataset whose samples are along another axis than the first one."""

    dataset: str
    axis: int

    def describe(self, contents: Contents, name: str) -> Field | RaggedField:
        """Describe a field whose samples are along the axis. A negative axis counts from the last one."""
        field = describe_field(contents, name, self.dataset)
        is_array = isinstance(field, Field) and not field.is_text
        num_axes = field.num_axes if isinstance(field, Field) and is_array else 1
        if not -num_axes <= self.axis < num_axes or (not is_array and isinstance(field, MatrixField) and self.axis):
            axes = "1 axis" if num_axes == 1 else f"{num_axes} axes"
            what = axes if is_array else "samples along its first axis only"
            where = contents.where(self.dataset)
            raise FieldError(f"{where} has {what}, but sample_axis is {self.axis}: leave it out of sample_axis")
        if not isinstance(field, Field) or not self.axis % num_axes:
            return field
        axis, grid = self.axis % num_axes, field.grid
        order = (axis, *(other for other in range(len(grid.shape)) if other != axis))
        shape = tuple(grid.shape[each] for each in order)
        chunks = grid.chunks and tuple(grid.chunks[each] for each in order)
        return replace(field, grid=replace(grid, shape=shape, chunks=chunks), axes="", sample_axis=axis)


@dataclass(frozen=True)
class Field:
    """A field that is a dataset. ``name`` is the name of the field, and ``dataset`` its path in the file.

    ``dtype`` has native byte order. ``axes``, such as NCHW, is empty if the file does not record it. For the dense rows
    of a matrix, value = stored value / ``scale``. ``element`` says how the elements are stored. It is None for fields
    that are not read from a dataset as they are. If it is a member of a compound type, ``dataset`` has all members.
    ``grid`` has the axes of the dataset, with the axis of samples first. ``decode`` is how packed numbers are
    converted.
    ``is_text`` is True for strings of variable length, which are padded to the longest one in memory.
    """

    name: str
    dataset: str
    grid: ChunkGrid
    dtype: np.dtype
    axes: str = ""
    scale: float | None = None
    categories: str = ""  # name of the table of its categories (`h5chunk.store.read.tables`), or empty
    element: Element | None = None
    is_text: bool = False
    sample_axis: int = 0  # the axis of the dataset that is the first one of the grid
    decode: str = ""

    @property
    def noun(self) -> str:
        """What the field consists of, for messages."""
        return "dense rows"

    @property
    def alike(self) -> dict[str, str]:
        """The attributes that must be equal in all files of a data set, and the remedy if they are not."""
        kept = ("sample_shape", "axes", "scale")
        return dict.fromkeys(kept if self.is_text else ("dtype", *kept), REMEDY)  # texts are padded to the longest one

    def joined(self, fields: Sequence[Field]) -> Field:
        """Describe the field of several files as one, with the chunk shape of the file with the largest chunks."""
        grids = [field.grid for field in fields]
        largest = max(grids, key=lambda grid: (grid.filtered, grid.chunks is not None, grid.band_bytes))
        shape = sum(grid.shape[0] for grid in grids), *self.sample_shape
        dtype = max((field.dtype for field in fields), key=lambda dtype: dtype.itemsize)
        return replace(self, grid=ChunkGrid(shape, largest.chunks, dtype.itemsize, largest.filtered), dtype=dtype)

    @property
    def member(self) -> tuple[str, ...]:
        """The names that lead to the member of a compound type; empty for others."""
        return () if self.element is None else self.element.member

    @property
    def more_facts(self) -> tuple[str | int, ...]:
        """The member and the axis of the dataset, for the fingerprint: other fields may read the same dataset."""
        return (*self.member, self.sample_axis) if self.sample_axis else self.member

    @property
    def names(self) -> dict[int, str]:
        """The names of the values of an enumeration; empty for others."""
        return {} if self.element is None else self.element.names

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.grid.shape[1:]

    @property
    def num_axes(self) -> int:
        """The number of axes of the dataset, without those of its elements."""
        return len(self.grid.shape) - (0 if self.element is None else len(self.element.shape))

    @property
    def stored_datasets(self) -> dict[str, str]:
        """The paths of the datasets that are read, by their names among the checksums."""
        return {self.name: self.dataset}

    def part(self, file: StoredFile) -> Part:
        """Return what a file stores of this field."""
        if self.is_text:
            return text_part(file, self.dataset)
        axes = self.num_axes if self.sample_axis else 1
        arrays = file.arrays(self.name, self.dataset, member=self.member, axes=axes, decode=self.decode)
        return Part(Rows, (arrays,), axis=self.sample_axis)


@dataclass(frozen=True, kw_only=True)
class MatrixField(RaggedField):
    """A CSR matrix of a file. A sample is a row.

    The dtypes are those in the file, and value = stored value / ``scale``. For a pattern, whose values are all 1 and
    are not read, ``value_dtype`` is None.
    """

    num_columns: int
    index_dtype: np.dtype
    value_dtype: np.dtype | None
    scale: float
    has_time_order: bool = False  # whether the entries of each row are sorted by their times

    noun = "a sparse matrix"
    alike: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("num_columns", "index_dtype"), REMEDY),
        **dict.fromkeys(("value_dtype", "scale"), MATRIX_REMEDY),
    }

    def joined(self, fields: Sequence[Any]) -> MatrixField:
        return replace(super().joined(fields), has_time_order=all(field.has_time_order for field in fields))

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of a dense row."""
        return (self.num_columns,)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8) if self.value_dtype is None else self.value_dtype

    @property
    def entry_datasets(self) -> tuple[str, ...]:
        """The datasets of the group that must be read for entries. The values of a pattern are not read."""
        return ("indices",) if self.value_dtype is None else ("indices", "data")

    @property
    def entry_bytes(self) -> int:
        return self.index_dtype.itemsize + (0 if self.value_dtype is None else self.value_dtype.itemsize)


def default_fields(file: h5py.File, path: Path, header: Header | None) -> dict[str, str]:
    """Return the fields to read by default, as paths of datasets by field name. Raises FieldError if there are none."""
    recorded = header.fields if header is not None else ()
    recorded = tuple(name for name in recorded if file.id.links.exists(name.encode()))
    if recorded:
        return {name: name for name in recorded}
    usual = ("images", "X", "labels")
    present = [name for name in usual if file.id.links.exists(name.encode())]  # does not follow links
    main = next((name for name in present if name != "labels"), None)
    if main is None and (groups := _tenx_groups(file, path)):
        if len(groups) > 1:
            raise FieldError(
                f"{printable(path)} has a matrix for each of {names_text(groups)}: choose one, such as "
                f"fields={{'X': {groups[0]!r}}}"
            )
        return {"X": groups[0]}
    if main is None:
        raise _missing(file, path, "images")
    return {name: name for name in (main, "labels") if name in present}


def _tenx_groups(file: h5py.File, path: Path) -> list[str]:
    """Return the groups of the matrices in a file of 10x Genomics. In version 2 there is one per genome."""
    guard, groups = Guard(path), []
    for name in file:
        if isinstance(file.get(name, getlink=True), h5py.HardLink):
            item = guard.find(file, name)
            if isinstance(item, h5py.Group) and all(item.id.links.exists(part) for part in TENX_PARTS):
                groups.append(name)
    return groups


def _missing(file: h5py.File, path: Path, missing: str) -> FieldError:
    """Return the error for a missing dataset, which lists the datasets in the file."""
    datasets = []
    for name, item in Guard(path).walk(file):
        if isinstance(item, h5py.Dataset) and not name.startswith(f"{GROUP}/"):
            is_view = item.id.get_create_plist().get_layout() == h5py.h5d.VIRTUAL  # its shape would open other files
            datasets += [name] if is_view or item.shape else []
    last = missing.rsplit("/", 1)[-1]
    datasets.sort(key=lambda name: (last not in name.split("/"), name))  # datasets with this name come first
    listed = ", ".join(datasets[:8]) + (", ..." if len(datasets) > 8 else "") if datasets else "no datasets at all"
    return FieldError(f"{printable(path)} has no dataset {missing!r}; it has {listed}: {NAME_FIELDS}")


def columns_of(path: Path, trusted: bool, num_rows: int) -> list[str]:
    """Return the names of the datasets, and of the categorical columns, that have one value for each of the rows."""
    found = []
    with limited_memory(path, trusted), opened(path) as file:
        for name, item in Guard(path, trusted).walk(file):
            if isinstance(item, h5py.Dataset) and not name.startswith(f"{GROUP}/"):
                is_view = item.id.get_create_plist().get_layout() == h5py.h5d.VIRTUAL  # it would open other files
                found += [name.removesuffix("/codes")] if not is_view and item.shape == (num_rows,) else []
    return found


def describe_field(contents: Contents, name: str, dataset: str | StoredAs) -> Field | RaggedField:
    """Check a dataset, or the group of a matrix or of images, and describe it as the field ``name``."""
    if not isinstance(dataset, str):
        return dataset.describe(contents, name)
    file, path, guard, header = contents.file, contents.path, contents.guard, contents.header
    item = contents.find(dataset)
    member: tuple[str, ...] = ()
    if item is None and (found := find_column(file, guard, dataset)):
        dataset, member = found
        item = contents.find(dataset)
    if item is None:
        raise _missing(file, path, dataset)
    if isinstance(item, h5py.Group) and header is None:
        where = contents.where(dataset)
        read_encoding(item, lambda problem: FieldError(f"{where} {problem}"))  # refuses unknown encodings
    if isinstance(item, h5py.Group) and item.id.links.exists(b"codes") and item.id.links.exists(b"categories"):
        dataset = f"{dataset}/codes"  # a categorical column of AnnData
        item = contents.find(dataset)
    where = contents.where(dataset)
    if isinstance(item, h5py.Group) and item.id.links.exists(b"values") and item.id.links.exists(b"mask"):
        if num_missing := _count_masked(contents, f"{dataset}/mask"):  # a nullable column of AnnData
            raise FieldError(f"{where} has no value in {count_text(num_missing, 'row')}: fill them in the source")
        dataset = f"{dataset}/values"
        item = contents.find(dataset)
    if isinstance(item, h5py.Group) and item.id.links.exists(b"indptr"):
        guard.check_matrix(file, dataset)
        return describe_matrix(item, path, name, header.chunk_samples if header and header.kind == CSR else None)
    if isinstance(item, h5py.Group) and item.id.links.exists(b"offsets") and header is not None:
        guard.check_parts(file, dataset, (*IMAGE_TABLES, "data"))
        return describe_images(item, path, name, header.chunk_samples)
    if not isinstance(item, h5py.Dataset):
        raise FieldError(f"{where} is a {type(item).__name__.lower()}: name a dataset in it")
    guard.check_field(item, dataset)
    if is_vlen(item):
        return describe_vlen(item, path, name)
    if not item.shape:
        raise FieldError(
            f"{where} is a single value, but a field needs one row per sample: copy it to a dataset with a row for "
            f"each, such as file['NEW'] = np.repeat(file[{dataset!r}][()], 100) for 100 samples (h5chunk.Keyed reads "
            "single values as they are, if each sample is a group)"
        )
    columns = [] if member else members_of(item.id.get_type())
    if columns:
        raise UnsupportedError(
            f"{where} is a table with the columns {names_text(map('/'.join, columns))}: name the columns to read, such "
            f"as {dataset.rstrip('/') + '/' + '/'.join(columns[0])!r}"
        )
    filtered = item.id.get_create_plist().get_nfilters() > 0
    if is_text(item):
        dtype = np.dtype(f"S{longest_text(item, path)}")
        grid = ChunkGrid(tuple(item.shape), item.chunks, dtype.itemsize, filtered)
        return Field(name, dataset, grid, dtype, is_text=True)
    element = element_of(item, contents.where("/".join((dataset, *member))), member, contents.decode)
    chunks = item.chunks and (*item.chunks, *element.shape)
    grid = ChunkGrid((*item.shape, *element.shape), chunks, element.dtype.itemsize, filtered)
    axes = small_attribute(item, "axes", b"")
    axes = axes.decode("utf-8", "replace") if isinstance(axes, bytes) and not element.shape else ""
    codes = header is not None and header.kind == DENSE and "scale" in item.attrs
    scale = _scale(item, where) if codes else None
    categories = _find_categories(contents, dataset.strip("/"))
    return Field(name, dataset, grid, element.dtype, axes, scale, categories, element, decode=contents.decode)


def exists(contents: Contents, path: str) -> bool:
    """Return whether there is an object, or a member of a compound type, at a path."""
    return contents.find(path) is not None or find_column(contents.file, contents.guard, path) is not None


def with_members(contents: Contents, fields: Stored) -> Stored:
    """Replace each field that is a table (a dataset of a compound type) by a field for each column.

    The column ``pt`` of the field ``events`` becomes the field ``events/pt``.
    """
    named: dict[str, Any] = {}
    for name, dataset in fields.items():
        item = contents.find(dataset) if isinstance(dataset, str) and dataset else None
        columns = members_of(item.id.get_type()) if isinstance(item, h5py.Dataset) else []
        parts = [f"/{'/'.join(column)}" for column in columns] or [""]
        for part in parts:
            if f"{name}{part}" in named or (part and f"{name}{part}" in fields):
                raise OptionError(
                    f"{printable(contents.path)}: fields has {name!r} and its column {name + part!r}: name only one"
                )
            named[f"{name}{part}"] = f"{dataset}{part}" if part else dataset
    return named


def parse_fields(
    fields: Fields | None, sample_axis: int | Mapping[str, int] | None = None, **tables: Mapping[str, str] | None
) -> dict[str, Any] | None:
    """Validate the argument ``fields``, and return what is stored of each field, or None for the default fields.

    ``sample_axis`` is an axis for all fields that are datasets, or for each field. ``tables`` are the arguments
    ``offsets`` and ``lengths``, which map fields to datasets.
    """
    if fields is None and isinstance(sample_axis, Mapping):
        fields = list(sample_axis)
    given = [(kind, name, path) for kind, mapping in tables.items() for name, path in _pairs(kind, mapping)]
    if fields is None and given:
        fields = list(dict.fromkeys(name for _, name, _ in given))
    parsed: dict[str, Any] | None = field_mapping(fields)
    for kind, name, table in given:
        if parsed is None or name not in parsed:
            raise OptionError(f"{kind} has the field {name!r}, but fields is {fields!r}: name the field in fields, too")
        values = parsed[name]
        if not isinstance(values, str) or not isinstance(table, str):
            raise OptionError(f"{kind} has {table!r} for {name!r}: specify one dataset, as offsets or as lengths")
        parsed[name] = FlatSamples(values, table, kind == "lengths")
    if sample_axis is None:
        return parsed
    if parsed is None:
        raise OptionError(f"sample_axis is {sample_axis!r}, but no fields are named: name them in fields=[...], too")
    if not isinstance(sample_axis, Mapping):
        stored = {name: dataset for name, dataset in parsed.items() if dataset != SAMPLE_NUMBER}
        sample_axis = {name: sample_axis for name, dataset in stored.items() if isinstance(dataset, str)}
    for name, axis in sample_axis.items():
        if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
            raise OptionError(f"sample_axis is {axis!r}: pass the number of an axis, such as -1 for the last one")
        if not isinstance(parsed.get(name), str):
            raise OptionError(f"sample_axis has {name!r}: name a field of fields, which has no offsets or lengths")
        parsed[name] = AlongAxis(parsed[name], int(axis))
    return parsed


def _pairs(kind: str, mapping: Mapping[str, str] | None) -> Iterable[tuple[str, str]]:
    if mapping is not None and not isinstance(mapping, Mapping):
        raise OptionError(f"{kind} is {mapping!r}: pass a mapping of fields to datasets, as in {{'values': {kind!r}}}")
    return (mapping or {}).items()


def field_mapping(fields: Fields | None) -> dict[str, str] | None:
    """Validate the argument ``fields``, and return the dataset of each field, or None for the default fields."""
    if fields is None or isinstance(fields, Mapping):
        return None if fields is None else dict(fields)
    names: Any = (fields,) if isinstance(fields, str) else fields
    if isinstance(names, bytes) or not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise OptionError(f"fields is {fields!r}: pass names of datasets, or a mapping of names to datasets")
    names = [str(name) for name in names]
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise OptionError(f"fields has {twice!r} twice: name each field, as in fields={{'name': {twice!r}}}")
    return {name: name for name in names}


def named_paths(fields: Any) -> dict[str, str]:
    """Validate an argument ``fields`` that has no default, and return the path of each field, by its name.

    A field without a name is named after its path, or after what follows a ``*`` in it, with ``_`` for ``/``.
    """
    paths = field_mapping(fields)
    if not paths or not all(isinstance(each, str) for each in (*paths, *paths.values())):
        raise OptionError(f"fields is {fields!r}: pass names of datasets, or a mapping of names to datasets")
    if isinstance(fields, Mapping):
        return paths
    names = [path.rpartition("*")[2].strip("/").replace("/", "_") if "*" in path else path for path in paths]
    if "" in names or len({*names}) < len(names):
        raise OptionError(f"fields is {fields!r}: pass a mapping of names to datasets, because these have no names")
    return dict(zip(names, paths, strict=True))


def attribute_defaults(attributes: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Validate an argument ``attributes``, and return the default of each attribute, or None, by its name."""
    if isinstance(attributes, str) or not all(isinstance(name, str) for name in attributes):
        raise OptionError(f"attributes is {attributes!r}: pass a list of names")
    return dict(attributes) if isinstance(attributes, Mapping) else dict.fromkeys(attributes)


def _count_masked(contents: Contents, dataset: str) -> int:
    mask = contents.find(dataset)
    if not isinstance(mask, h5py.Dataset):
        return 0
    contents.guard.check_field(mask, dataset)
    with errors_as(FileError, f"{contents.where(dataset)} is damaged"):
        check_chunks(mask)
        return int(np.count_nonzero(mask[()]))


def _find_categories(contents: Contents, dataset: str) -> str:
    """Return the name of the table of a dataset's categories, stored by h5chunk or AnnData, or an empty string."""
    if contents.header is not None and contents.find(f"{GROUP}/categories/{dataset}") is not None:
        return f"categories/{dataset}"
    parent, _, name = dataset.rpartition("/")
    table = f"{parent}/categories" if name == "codes" else f"{parent}/__categories/{name}"
    return table if parent and contents.find(table) is not None else ""


def find_matrix_groups(names: Iterable[str]) -> list[str]:
    """Find the groups that contain the parts of a CSR or CSC matrix. ``names`` are the paths of all datasets.

    >>> find_matrix_groups(["X/data", "X/indices", "X/indptr", "indptr", "obs/indptr"])
    ['X']
    """
    all_names = set(names)
    groups = sorted(name.removesuffix("/indptr") for name in all_names if name.endswith("/indptr"))
    return [group for group in groups if all(f"{group}/{part}" in all_names for part in MATRIX_PARTS)]


def describe_matrix(group: h5py.Group, path: Path, name: str, chunk_samples: int | None) -> MatrixField:
    """Describe the CSR matrix in a group as the field ``name``.

    ``chunk_samples`` is given only for files of h5chunk, in which values may be codes. Raises FieldError if the group
    is not a CSR matrix, and FileError if the matrix is damaged.
    """
    where = f"{printable(path)}: {name!r}"
    for part in MATRIX_PARTS:
        dataset = group.get(part)
        if not isinstance(dataset, h5py.Dataset) or dataset.ndim != 1 or dataset.dtype.kind not in "biuf":
            raise FieldError(f"{where} is not a CSR matrix: it lacks a one-dimensional numeric dataset {part!r}")
    num_rows, num_columns = _shape(group, path, where)
    num_entries = len(group["indices"])
    if len(group["indptr"]) != num_rows + 1:
        raise FileError(
            f"{where} is damaged: it has {num_rows} rows, but {len(group['indptr'])} values in indptr instead of "
            f"{num_rows + 1}"
        )
    if len(group["data"]) != num_entries:
        raise FileError(f"{where} is damaged: it has {num_entries} indices, but {len(group['data'])} values in data")
    if group["indices"].dtype.kind not in "iu" or group["indptr"].dtype.kind not in "iu":
        raise FieldError(f"{where} is not a CSR matrix: its indptr or indices are not integers")
    pattern, scale, is_own = False, 1.0, chunk_samples is not None
    if is_own:
        scale, pattern = _scale(group, where), small_attribute(group, "pattern")
        if not isinstance(pattern, np.generic) or pattern not in (0, 1):
            raise FileError(f"{where} is damaged: its attribute 'pattern' is missing or invalid")
        with errors_as(FileError, f"{where} is damaged"):
            check_values(group["data"].dtype, scale, bool(pattern))
    values = None if pattern else group["data"].dtype.newbyteorder("=")
    filtered = any(group[part].id.get_create_plist().get_nfilters() > 0 for part in ("indices", "data"))
    indices = group["indices"]
    index_dtype = indices.dtype.newbyteorder("=")
    if chunk_samples is None:  # choose as for h5chunk files, but at least the rows of a compressed chunk
        chosen = plan_csr(max(1, num_rows), num_columns, num_entries, value_dtype=values).chunk_samples
        if num_entries and indices.chunks and indices.id.get_create_plist().get_nfilters():
            chosen = max(chosen, math.ceil(indices.chunks[0] * num_rows / num_entries))
        chunk_samples = max(1, min(chosen, num_rows))
    return MatrixField(
        name,
        group.name,
        num_rows,
        num_entries,
        chunk_samples,
        filtered,
        num_columns=num_columns,
        index_dtype=index_dtype,
        value_dtype=values,
        scale=scale,
        has_time_order=is_own and in_time_order(group),
    )


def in_time_order(group: h5py.Group) -> bool:
    """Return whether the entries of each row of an h5chunk matrix are sorted by their times."""
    value = small_attribute(group, "time_order", 0)
    return isinstance(value, np.generic) and bool(value == 1)


def _scale(item: h5py.HLObject, where: str) -> float:
    """Return the divisor of the stored values of an h5chunk matrix. Raises FileError if it is invalid."""
    try:
        scale = float(small_attribute(item, "scale"))
    except (TypeError, ValueError, OverflowError):
        scale = math.nan
    if not 0 < scale < math.inf:
        raise FileError(f"{where} is damaged: its scale is {scale}")
    return scale


def _tenx_shape(group: h5py.Group, path: Path, where: str) -> tuple[int, int]:
    """Return the numbers of rows (barcodes) and columns (features) of a 10x matrix, which is stored transposed."""
    name = f"{group.name}/shape"
    guard = Guard(path)
    sizes = guard.find(group.file, name)
    if isinstance(sizes, h5py.Dataset):
        guard.check_field(sizes, name)
        if sizes.shape == (2,) and sizes.dtype.kind in "iu" and 0 < int(sizes[0]) < 1 << 62 > int(sizes[1]) >= 0:
            return int(sizes[1]), int(sizes[0])
    raise FileError(f"{where} is damaged: its shape is not stored as two integers")


def _shape(group: h5py.Group, path: Path, where: str) -> tuple[int, int]:
    """Return the numbers of rows and columns of a matrix. Raises FieldError unless it is marked as CSR."""
    with errors_as(FileError, f"{where} has unreadable attributes"):
        words = [read_words(group, name, lambda problem: FileError(f"{where}: {problem}")) for name in KIND_ATTRIBUTES]
        kind = next((strings[0] for strings in words if len(strings) == 1), "")
    if not kind and all(group.id.links.exists(part) for part in TENX_PARTS):
        return _tenx_shape(group, path, where)
    if kind not in ("csr_matrix", "csr"):
        encoding = f"encoding-type {kind!r}" if kind else "it has no encoding-type"
        remedy = "if this is an .h5ad or 10x file, run h5chunk convert"
        raise FieldError(f"{where} is not a CSR matrix ({encoding}): {remedy}")
    try:
        rows, columns = map(operator.index, small_attribute(group, "shape", small_attribute(group, "h5sparse_shape")))
    except (TypeError, ValueError, OverflowError):
        raise FileError(f"{where} is damaged: its shape is not stored as two integers") from None
    if not (0 <= rows < 1 << 62 and 1 <= columns < 1 << 62):
        raise FileError(f"{where} is damaged: its shape is {rows} x {columns}")
    return rows, columns
