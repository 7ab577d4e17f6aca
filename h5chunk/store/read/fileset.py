"""Read several files as one data set, which concatenates their samples.

Each file has its own reader, which opens the file when its first sample is needed. All files must have equal fields and
the same classes, but their chunks may differ in size.
"""

from __future__ import annotations

import resource
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import FieldError, FileError, OptionError, names_text, printable
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.layout import choose_window_chunks, good_chunk_samples
from h5chunk.store.format.header import Header
from h5chunk.store.read.encoded import EncodedField
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.store.read.ragged import REMEDY, ImageSizes, RaggedField
from h5chunk.store.read.source import Computed, Source
from h5chunk.store.read.tables import COLUMN_IDS, check_same

MIN_IMAGES, MAX_CHANNELS = 4, 4  # of a folder with an image per file
RESERVED_DESCRIPTORS = 32  # number of descriptors for other purposes, such as sockets and libraries

COLUMNS_REMEDY = (
    "convert their sources together, as a list or pattern of files with --join outer (or inner, except for ratings)"
)
CATEGORIES_REMEDY = "convert their sources together, or read these files separately"


class FileSet(Source):
    """Several sources that are read as one. Each of them reads a file or a part of a file.

    If chunks differ in size, ``chunk_samples`` is the average. ``header`` combines the headers of all files, and is
    None if a file has none. Raises FieldError if fields or classes differ between files.
    """

    def __init__(self, readers: Sequence[Source], name: Path) -> None:
        num_files = len({reader.path for reader in readers})
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if max_files != resource.RLIM_INFINITY and num_files + RESERVED_DESCRIPTORS > max_files:
            raise FileError(
                f"{printable(name)} has {num_files} files, but this process may open only {max_files}: raise the "
                f"limit with ulimit -n {2 * num_files + 1024}, or combine the files into fewer ones"
            )
        _check_names(readers)
        _check_same_names(readers)
        fields = {field: _combine_field(readers, field) for field in readers[0].fields}
        lengths = [reader.num_samples for reader in readers]
        borders = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        num_samples = int(borders[-1])
        main = fields[readers[0].main.name]
        sizes_in_files = [reader.chunk_samples for reader in readers]
        if not any(reader.main.grid.chunks for reader in readers):  # contiguous data has no chunks
            sizes_in_files = [good_chunk_samples(num_samples, main.grid.sample_bytes)] * len(lengths)
        files = zip(borders[:-1].tolist(), borders[1:].tolist(), sizes_in_files, strict=True)
        starts = np.concatenate([*(np.arange(start, stop, size) for start, stop, size in files), borders[-1:]])
        with_samples = [size for length, size in zip(lengths, sizes_in_files, strict=True) if length]
        chunk_samples, sizes = with_samples[0] if with_samples else max(sizes_in_files), np.diff(starts)
        are_alike = not len(sizes) or ((sizes[:-1] == chunk_samples).all() and sizes[-1] <= chunk_samples)
        if not are_alike:
            chunk_samples = round(num_samples / len(sizes))
        if isinstance(main, RaggedField):
            main = replace(main, chunk_samples=chunk_samples)
        elif main.grid.chunks:  # orders and caches assume chunks of the average size
            main = replace(main, grid=replace(main.grid, chunks=(chunk_samples, *main.grid.chunks[1:])))
        super().__init__(
            name,
            fields | {main.name: main},
            num_samples,
            readers=readers,
            trusted=readers[0].trusted,
            checksums=readers[0].checksums,
            main=main.name,
            starts=borders,
            chunk_samples=chunk_samples,
            chunk_starts=None if are_alike else starts,
            is_rows=all(reader.is_rows for reader in readers),
        )
        self.header = _combine_headers(self)
        self._cache: CacheSettings | None = None

    @property
    def computed(self) -> dict[str, Computed]:
        """The computed fields of the files, which have equal dtypes."""
        fields = {name: computed.field for name, computed in self.readers[0].computed.items()}
        return {
            name: Computed.described(
                name, (self.num_samples, *field.sample_shape), field.dtype, partial(self._compute, field)
            )
            for name, field in fields.items()
        }

    def _compute(self, field: Field, samples: np.ndarray) -> np.ndarray:
        values = np.empty((len(samples), *field.sample_shape), field.dtype)
        for number, positions in self.by_file(samples):
            compute = self.readers[number].computed[field.name].of
            values[positions] = compute(samples[positions] - self.starts[number])
        return values

    def names_of(self, samples: np.ndarray) -> np.ndarray | None:
        if self.readers[0].names_of(samples[:0]) is None:
            return None
        names = np.empty(len(samples), object)
        for number, positions in self.by_file(samples):
            names[positions] = self.readers[number].names_of(samples[positions] - self.starts[number])
        return names.astype(np.str_)

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 of the fingerprints and lengths of all files, in their order."""
        of_each = [(reader.fingerprint, reader.num_samples) for reader in self.readers]
        return zlib.crc32(repr(of_each).encode())

    def _table_of(self, name: str) -> tuple[Any, ...]:
        return tuple(reader._table_of(name) for reader in self.readers)

    def _read_indptr(self, name: str) -> np.ndarray:
        lengths = [np.diff(reader.indptr_of(name)) for reader in self.readers]
        return np.concatenate(([0], np.cumsum(np.concatenate(lengths))))

    def _read_image_sizes(self, name: str) -> ImageSizes:
        sizes = [reader.image_sizes_of(name) for reader in self.readers]
        return ImageSizes(*map(np.concatenate, zip(*sizes, strict=True)))


def are_images(readers: Sequence[Source], *, surely: bool = False) -> bool:
    """Return whether each of several files seems to be an image, so that its rows are not samples.

    They are if all files have the same shapes, such as (height, width, channels) for each field. With ``surely``, only
    if it is improbable that they are anything else.
    """
    shapes = {tuple(field.grid.shape for field in reader.fields.values()) for reader in readers}
    if len(readers) < MIN_IMAGES or len(shapes) != 1 or any(reader.header is not None for reader in readers):
        return False
    shape, *others = next(iter(shapes))
    has_channels = len(shape) == 3 and shape[-1] <= MAX_CHANNELS < min(shape[:2])
    is_square = shape[:1] == shape[1:2]
    is_image = has_channels or (len(shape) == 2 and is_square)
    if surely and not (has_channels and is_square):
        return False
    return is_image and all(len(other) == len(shape) and other[:2] == shape[:2] for other in others)


def _check_names(readers: Sequence[Source]) -> None:
    """Raise OptionError if a file is repeated, and FieldError if the names of fields differ between files."""
    seen: dict[tuple[object, ...], Path] = {}
    first = readers[0]
    for reader in readers:
        datasets = (field.dataset for field in reader.fields.values())
        other = seen.setdefault((*reader.stamp[:2], *datasets), reader.path)
        if other is not reader.path:
            raise OptionError(
                f"{printable(reader.path)} is the same file as {printable(other)}: name it once, and use weights to "
                "repeat samples"
            )
    for reader in readers[1:]:
        if list(reader.fields) != list(first.fields):
            fields, expected = (", ".join(map(repr, named.fields)) for named in (reader, first))
            raise FieldError(
                f"{printable(reader.path)} has {fields}, but {printable(first.path)} has {expected}: {REMEDY}"
            )


def _check_same_names(readers: Sequence[Source]) -> None:
    """Raise FieldError if the column ids of a matrix, or the categories of a field, differ between files."""
    for name in readers[0].fields:
        if all(isinstance(reader.fields[name], MatrixField) for reader in readers):
            check_same([(reader, COLUMN_IDS) for reader in readers], "columns", COLUMNS_REMEDY, name)
        tables = [(reader, reader.fields[name].categories) for reader in readers]
        if all(table for _, table in tables):
            check_same(tables, f"categories of {name!r}", CATEGORIES_REMEDY)
        names = [reader.fields[name].names for reader in readers]
        other = next((number for number, own in enumerate(names) if own != names[0]), 0)
        if other:
            raise FieldError(
                f"{printable(readers[other].path)}: the enumeration {name!r} has the names "
                f"{names_text(names[other].values())}, but in {printable(readers[0].path)} it has "
                f"{names_text(names[0].values())}: {CATEGORIES_REMEDY}"
            )


def _combine_field(readers: Sequence[Source], name: str) -> Field | RaggedField:
    """Describe a field of all files as one field. Raises FieldError if it differs between files."""
    if any(isinstance(reader.fields[name], EncodedField) for reader in readers):
        readers = [reader for reader in readers if reader.num_samples]  # images are recognised by their first row
    fields: list[Any] = [reader.fields[name] for reader in readers]
    for reader, field in zip(readers, fields, strict=True):
        if field.noun != fields[0].noun:
            path, first_path = _places(reader, readers[0], name)
            raise FieldError(
                f"{path}: field {name!r} is {field.noun}, but in {first_path} it is {fields[0].noun}: {REMEDY}"
            )
    for trait, remedy in fields[0].alike.items():
        _check_equal(readers, name, trait, remedy)
    joined: Field | RaggedField = fields[0].joined(fields)
    return joined


def _places(reader: Source, first: Source, name: str) -> list[str]:
    """Return the files of two readers. For episodes in groups of one file, add the datasets of the field."""
    both = reader, first
    datasets = [f": {each.fields[name].dataset!r}" if reader.path == first.path else "" for each in both]
    return [f"{printable(each.path)}{dataset}" for each, dataset in zip(both, datasets, strict=True)]


def _check_equal(readers: Sequence[Source], name: str, trait: str, remedy: str) -> None:
    expected = getattr(readers[0].fields[name], trait)
    for reader in readers[1:]:
        value = getattr(reader.fields[name], trait)
        if (value is None) != (expected is None) or value != expected:  # NumPy treats None as float64
            path, first_path = _places(reader, readers[0], name)
            raise FieldError(
                f"{path}: field {name!r} has the {trait.replace('_', ' ')} {_text(trait, value)}, but in {first_path} "
                f"it is {_text(trait, expected)}: {remedy}"
            )


def _text(trait: str, value: object) -> str:
    if trait == "value_dtype" and value is None:
        return "none (all values are 1)"
    if value is None or (isinstance(value, str) and not value):
        return "unknown"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _combine_headers(files: FileSet) -> Header | None:
    """Combine the headers of all files, or return None if a file has no header.

    The set counts as shuffled if its files are shards of one conversion, which shuffled all samples together.
    """
    class_names = _class_names(files.readers)
    headers = [reader.header for reader in files.readers if reader.header is not None]
    if len(headers) < len(files.readers):
        return None
    window_chunks = max(header.window_chunks for header in headers)
    if all(header.window_chunks * header.chunk_samples >= header.num_samples for header in headers):
        num_chunks = -(-files.num_samples // files.chunk_samples)
        window_chunks = choose_window_chunks(files.chunk_bytes, num_chunks)  # may exceed a file
    shards = {repr(header.options.get("shard")) for header in headers}
    others = [{**header.options, "shard": None} for header in headers]
    are_shards = all("shard" in header.options for header in headers) and len(shards) == len(headers)
    are_shards &= all(options == others[0] for options in others)  # some shards of the conversion may be missing
    return replace(
        headers[0],
        num_samples=files.num_samples,
        chunk_samples=files.chunk_samples,
        window_chunks=window_chunks,
        cache=max((header.cache for header in headers), key=lambda cache: cache.nbytes),
        shuffled=all(header.shuffled for header in headers) and are_shards,
        class_names=class_names,
    )


def _class_names(readers: Sequence[Source]) -> tuple[str, ...]:
    """Return the longest list of class names. Raises FieldError unless it begins with the lists of all other files."""
    named = [(reader.path, reader.header.class_names) for reader in readers if reader.header is not None]
    longest, longest_names = max(named, key=lambda item: len(item[1]), default=(Path(), ()))
    for path, names in named:
        for label, (name, other) in enumerate(zip(names, longest_names, strict=False)):
            if name != other:
                raise FieldError(
                    f"{printable(path)}: label {label} means {name!r}, but in {printable(longest)} it is {other!r}: "
                    "convert their sources together, or read these files separately"
                )
    return longest_names
