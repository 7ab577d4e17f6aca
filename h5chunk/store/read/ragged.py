"""Describe fields whose samples differ in length: rows of a sparse matrix, images of any size, and other arrays.

`h5chunk.store.format.spec` specifies how rows and images are stored: as arrays of entries, with the index at which each
sample starts. Other arrays are stored one after the other in one dataset, and another has their offsets or lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.layout import good_chunk_samples
from h5chunk.store.format.spec import GROUP, IMAGE_TABLES
from h5chunk.store.hdf5.chunk_table import check_chunks
from h5chunk.store.hdf5.guard import max_ratio, small_attribute
from h5chunk.store.hdf5.open import errors_as
from h5chunk.store.read.samples import Part, Runs, StoredFile

SLACK_BYTES = 1 << 20
REMEDY = "choose fields that are equal in all files with fields=..., or read these files separately"


@dataclass(frozen=True)
class RaggedField:
    """A field whose samples are runs of entries of different lengths. ``dataset`` is the path of its group.

    ``chunk_samples`` is the number of samples in a nominal chunk. ``filtered`` is True if entries are compressed.
    """

    name: str
    dataset: str
    num_rows: int
    num_entries: int
    chunk_samples: int
    filtered: bool

    axes = ""
    categories = ""
    is_text = False
    names: ClassVar[Mapping[int, str]] = MappingProxyType({})  # of an enumeration's values
    scale: float | None = None
    pointers = "indptr"  # name of the dataset with the start of each row
    noun = ""  # what the field consists of, for messages
    alike: ClassVar[Mapping[str, str]] = MappingProxyType({})  # as `h5chunk.store.read.fields.Field.alike`

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype:
        """Type of the values, as stored."""
        raise NotImplementedError

    @property
    def lengths_key(self) -> tuple[Any, ...]:
        """A key that is equal for two fields of one file if each sample has as many entries in both."""
        return self.path_of(self.pointers), self.step_items

    @property
    def entry_datasets(self) -> tuple[str, ...]:
        """Names of the datasets of entries to read."""
        raise NotImplementedError

    @property
    def entry_bytes(self) -> int:
        """Stored bytes per entry."""
        raise NotImplementedError

    @property
    def table_datasets(self) -> tuple[str, ...]:
        """Names of the datasets that are read completely: the starts of samples and, for images, the sizes."""
        return (self.pointers,)

    def path_of(self, part: str) -> str:
        """Return the path of one of the field's datasets."""
        return f"{self.dataset}/{part}"

    @property
    def stored_datasets(self) -> dict[str, str]:
        """The paths of the datasets that are read, by their names among the checksums."""
        return {f"{self.name}/{part}": self.path_of(part) for part in (*self.table_datasets, *self.entry_datasets)}

    @property
    def step_items(self) -> int:
        """Number of entries of one index along the first axis of the datasets of entries."""
        return 1

    def joined(self, fields: Sequence[RaggedField]) -> Any:
        """Describe the field of several files as one."""
        return replace(
            self,
            num_rows=sum(field.num_rows for field in fields),
            num_entries=sum(field.num_entries for field in fields),
            chunk_samples=max(field.chunk_samples for field in fields),
            filtered=any(field.filtered for field in fields),
        )

    def read_indptr(self, file: h5py.File, path: Path) -> np.ndarray:
        """Read the index of the first entry of each sample, as `read_indptr` does."""
        return read_indptr(file, path, self)

    def part(self, file: StoredFile) -> Part:
        """Return what a file stores of this field."""
        names, indptr = self.entry_datasets if self.num_entries else (), file.source.indptr_of(self.name)
        steps = indptr if self.step_items == 1 else indptr // self.step_items
        arrays = tuple(file.arrays(self.name, self.path_of(part), part, steps) for part in names)
        return Part(Runs, arrays, step_items=self.step_items)

    @property
    def grid(self) -> ChunkGrid:
        """The grid of the nominal chunks, as if all rows had the average length."""
        row_bytes = max(1, math.ceil(self.num_entries * self.entry_bytes / max(1, self.num_rows)))
        return ChunkGrid((self.num_rows, row_bytes), (self.chunk_samples, row_bytes), 1, self.filtered)


@dataclass(frozen=True, kw_only=True)
class ImagesField(RaggedField):
    """Images of any size. ``form`` is encoded, or raw for pixels. An entry is a byte."""

    form: str
    channels: int

    axes = "NHWC"
    noun = "images of any size"
    alike: ClassVar[Mapping[str, str]] = dict.fromkeys(("form", "channels"), REMEDY)
    pointers = "offsets"
    entry_datasets = ("data",)
    entry_bytes = 1
    dtype = np.dtype(np.uint8)
    sample_shape = ()
    table_datasets = tuple(IMAGE_TABLES)


@dataclass(frozen=True, kw_only=True)
class SeriesField(RaggedField):
    """Arrays that differ in the length of their first axis. An entry is one number.

    ``step_shape`` is the shape of one step along the first axis. If ``dataset`` has the steps of all samples, one after
    the other, ``table`` is the dataset with the offset of each sample or, with ``has_lengths``, its length.
    """

    step_shape: tuple[int, ...]
    value_dtype: np.dtype
    table: str = ""
    has_lengths: bool = False

    noun = "samples of several lengths"
    alike: ClassVar[Mapping[str, str]] = dict.fromkeys(("dtype", "step_shape"), REMEDY)
    entry_datasets = ("values",)

    def path_of(self, part: str) -> str:
        return self.table if part == self.pointers else self.dataset

    @property
    def lengths_key(self) -> tuple[Any, ...]:
        return self.table or self.dataset, self.has_lengths, self.num_entries, self.step_items

    @property
    def step_items(self) -> int:
        """Number of entries of one step."""
        return math.prod(self.step_shape)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return (-1, *self.step_shape)

    @property
    def dtype(self) -> np.dtype:
        return self.value_dtype

    @property
    def entry_bytes(self) -> int:
        return self.value_dtype.itemsize

    @property
    def swapped_rows(self) -> int:
        """Number of samples if the table has offsets in place of lengths, or the reverse."""
        return self.num_rows - 1 if self.has_lengths else self.num_rows + 1

    @property
    def swap(self) -> str:
        """The remedy if the table has offsets in place of lengths, or the reverse."""
        given, meant = ("lengths", "offsets") if self.has_lengths else ("offsets", "lengths")
        return (
            f"{self.table!r} was passed as {given}; if it has the {meant} of samples, pass "
            f"{meant}={{{self.name!r}: {self.table!r}}}"
        )


@dataclass(frozen=True)
class FlatSamples:
    """The datasets of a `SeriesField`: one with the steps of all samples, and one with their offsets or lengths."""

    values: str
    table: str
    has_lengths: bool

    def describe(self, contents: Any, name: str) -> SeriesField:
        """Describe samples that are stored one after the other. Raises FieldError if the datasets are not suitable."""
        label, found = printable(contents.path), []
        for dataset in (self.values, self.table):
            item = contents.find(dataset)
            if not isinstance(item, h5py.Dataset):
                raise FieldError(f"{label} has no dataset {dataset!r}: run h5chunk info to list its datasets")
            contents.guard.check_field(item, dataset)
            found.append(item)
        values, table = found
        if not values.shape or not math.prod(values.shape[1:]) or values.dtype.kind not in "biuf":
            text = f"{self.values!r} is {values.dtype} {values.shape}"
            raise FieldError(f"{label}: {text}: use a dataset of numbers with one row per step")
        kind, num_rows = ("lengths", len(table)) if self.has_lengths else ("offsets", len(table) - 1)
        if table.ndim != 1 or table.dtype.kind not in "iu" or num_rows < 0:
            text = f"{self.table!r} is {table.dtype} {table.shape}"
            raise FieldError(f"{label}: {text}: {kind} must be integers in one dimension")
        chunk_samples = good_chunk_samples(num_rows, values.nbytes // max(1, num_rows))
        if filtered := values.id.get_create_plist().get_nfilters() > 0:  # at least the samples of a compressed chunk
            chunk_samples = max(chunk_samples, math.ceil(values.chunks[0] * num_rows / max(1, len(values))))
        return SeriesField(
            name,
            self.values,
            num_rows,
            values.size,
            max(1, min(chunk_samples, num_rows)),
            filtered,
            step_shape=values.shape[1:],
            value_dtype=values.dtype.newbyteorder("="),
            table=self.table,
            has_lengths=self.has_lengths,
        )


def find_image_groups(names: Iterable[str]) -> list[str]:
    """Find the groups of images of any size in an h5chunk file. ``names`` are the paths of all datasets.

    >>> find_image_groups(["images/data", "images/offsets", "images/heights", "labels"])
    ['images']
    """
    datasets = {name for name in names if not name.startswith(f"{GROUP}/")}
    groups = sorted(name.removesuffix("/offsets") for name in datasets if name.endswith("/offsets"))
    return [group for group in groups if {f"{group}/data", f"{group}/heights"} <= datasets]


def describe_images(group: h5py.Group, path: Path, name: str, chunk_samples: int) -> ImagesField:
    """Describe the images of any size in a group. Raises FileError if they are damaged."""
    where = f"{printable(path)}: {name!r} is damaged"
    kinds = {**IMAGE_TABLES, "data": "u1"}
    parts = {part: group.get(part) for part in kinds}
    for part, dataset in parts.items():
        if not isinstance(dataset, h5py.Dataset) or dataset.ndim != 1 or dataset.dtype != np.dtype(kinds[part]):
            raise FileError(f"{where}: it has no one-dimensional dataset {part!r} of {np.dtype(kinds[part])}")
    num_rows, num_bytes = len(parts["heights"]), len(parts["data"])
    for part, length in {"offsets": num_rows + 1, "widths": num_rows, "orientations": num_rows}.items():
        if len(parts[part]) != length:
            raise FileError(f"{where}: it has {num_rows} heights, but {len(parts[part])} {part}")
    form, channels = small_attribute(group, "form", b""), small_attribute(group, "channels", 0)
    if form not in (b"encoded", b"raw") or channels not in (1, 3):
        raise FileError(f"{where}: its form is {form!r} with {channels!r} channels")
    filtered = parts["data"].id.get_create_plist().get_nfilters() > 0
    chunk_samples = max(1, min(chunk_samples, num_rows))
    pixels = {"form": form.decode(), "channels": int(channels)}
    return ImagesField(name, group.name, num_rows, num_bytes, chunk_samples, filtered, **pixels)


class ImageSizes(NamedTuple):
    """Heights and widths after EXIF rotation, and EXIF orientations, of all images of a field: (num_rows,) each."""

    heights: np.ndarray
    widths: np.ndarray
    orientations: np.ndarray


def read_image_sizes(group: h5py.Group, path: Path, field: ImagesField, offsets: np.ndarray) -> ImageSizes:
    """Read the sizes of all images. Raises FileError if they contradict the lengths of the images."""
    where = f"{printable(path)}: {field.name!r} is damaged"
    with errors_as(FileError, where):
        for table in ImageSizes._fields:
            check_chunks(group[table])
        sizes = ImageSizes(*(group[table][()] for table in ImageSizes._fields))
    area = sizes.heights.astype(np.float64) * sizes.widths
    lengths = np.diff(offsets)
    wrong = (area < 1) | (lengths < 1) | (sizes.orientations < 1) | (sizes.orientations > 8)
    if field.form == "raw":
        wrong |= (lengths != area * field.channels) | (sizes.orientations != 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise FileError(
            f"{where}: image {row} cannot have size {sizes.heights[row]} x {sizes.widths[row]}, orientation "
            f"{sizes.orientations[row]} and {lengths[row]} bytes"
        )
    return sizes


def read_indptr(file: h5py.File, path: Path, field: RaggedField) -> np.ndarray:
    """Read the index of the first entry of each row, and finally the number of entries: (num_rows + 1,) int64.

    Raises FileError if the table is damaged.
    """
    pointers, entry_items = field.pointers, 1
    if isinstance(field, SeriesField):
        pointers, entry_items = repr(field.table), field.step_items
    where, num_entries = f"{printable(path)}: {field.name!r}", field.num_entries // entry_items
    dataset = file[field.path_of(field.pointers)]
    if dataset.nbytes > dataset.id.get_storage_size() * max_ratio(dataset.id.get_create_plist()) + SLACK_BYTES:
        raise FileError(
            f"{where} is damaged: {pointers} claims {dataset.nbytes} bytes, but {dataset.id.get_storage_size()} are "
            "stored"
        )
    check_chunks(dataset)
    try:
        indptr: np.ndarray = dataset[:].astype(np.int64)
    except OSError as error:
        raise FileError(f"{where}: {pointers} cannot be read ({error})") from error
    if isinstance(field, SeriesField) and field.has_lengths:
        return _ends(indptr, num_entries, f"{printable(path)}: {pointers}") * entry_items
    if indptr[0] != 0 or indptr[-1] != num_entries:
        verb, remedy = "is damaged", ""
        if isinstance(field, SeriesField):
            verb = "does not fit"
            remedy = ". It must have the first row of each sample, and finally the number of rows"
            if indptr.min() >= 0 and indptr.sum() == num_entries:
                remedy = f": {field.swap}"
        raise FileError(
            f"{where} {verb}: {pointers} runs from {indptr[0]} to {indptr[-1]} instead of from 0 to "
            f"{num_entries}{remedy}"
        )
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        raise FileError(f"{where} is damaged: {pointers} decreases after row {int(falls.argmax())}")
    return indptr * entry_items


def _ends(lengths: np.ndarray, num_entries: int, where: str) -> np.ndarray:
    """Return the offsets of samples with these lengths. Raises FileError unless they add up to ``num_entries``."""
    wrong = (lengths < 0) | (lengths > num_entries)
    if wrong.any():
        row = int(wrong.argmax())
        raise FileError(
            f"{where} has the length {lengths[row]} for sample {row}, but the values have {num_entries} steps in all"
        )
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if ends[-1] != num_entries or (ends[1:] < ends[:-1]).any():
        raise FileError(f"{where} has lengths that add up to {ends[-1]}, but the values have {num_entries} steps")
    return ends
