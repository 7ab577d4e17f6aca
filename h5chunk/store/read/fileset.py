"""Read several files as one data set, which concatenates their samples.

Each file has its own reader, which opens the file when its first sample is needed. All files must have equal fields and
the same classes, but their chunks may differ in size.
"""

from __future__ import annotations

import resource
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import FieldError, FileError, OptionError, names_text, printable, shown
from h5chunk.plan.layout import choose_window_chunks, good_chunk_samples
from h5chunk.store.format.header import Header
from h5chunk.store.read.encoded import EncodedField
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.store.read.ragged import REMEDY, ImageSizes, RaggedField
from h5chunk.store.read.source import Computed, Source, of_all_parts
from h5chunk.store.read.tables import COLUMN_IDS, check_same

MIN_IMAGES, MAX_CHANNELS = 4, 4  # of a folder with an image per file
RESERVED_DESCRIPTORS = 32  # number of descriptors for other purposes, such as sockets and libraries

COLUMNS_REMEDY = (
    "convert their sources together, as a list or pattern of files with --join outer (or inner, except for ratings)"
)
CATEGORIES_REMEDY = "convert their sources together, or read these files separately"


class Chunks(NamedTuple):
    """The chunks of the main field of several parts: all have so many ``samples``, or begin at these ``starts``."""

    main: Field | RaggedField
    samples: int
    starts: np.ndarray | None

    @classmethod
    def joined(cls, borders: np.ndarray, given: Sequence[int | None], main: Any) -> Chunks:
        """Join parts that begin at the samples in ``borders``, and whose chunks have so many samples; None: no chunks.

        If chunks differ in size, ``samples`` is the average. ``main`` describes the field of all parts.
        """
        lengths, num_samples = np.diff(borders), int(borders[-1])
        together = lengths.tolist() if any(given) else [num_samples] * len(given)
        good = (good_chunk_samples(length, main.grid.sample_bytes) for length in together)
        sizes = [size or own for size, own in zip(given, good, strict=True)]
        parts = zip(borders[:-1].tolist(), borders[1:].tolist(), sizes, strict=True)
        starts = np.concatenate([*(np.arange(start, stop, size) for start, stop, size in parts), borders[-1:]])
        samples = next((size for length, size in zip(lengths, sizes, strict=True) if length), max(sizes))
        counts = np.diff(starts)
        are_alike = not len(counts) or ((counts[:-1] == samples).all() and counts[-1] <= samples)
        if not are_alike:
            samples = round(num_samples / len(counts))
        if isinstance(main, RaggedField):
            main = replace(main, chunk_samples=samples)
        elif main.grid.chunks:  # orders and caches assume chunks of the average size
            main = replace(main, grid=replace(main.grid, chunks=(samples, *main.grid.chunks[1:])))
        return cls(main, samples, None if are_alike else starts)


class FileSet(Source):
    """Several sources that are read as one. Each of them reads a file or a part of a file.

    If chunks differ in size, ``chunk_samples`` is the average. ``header`` combines the headers of all files, and is
    None if a file has none. With ``repeated``, a file may be read by several sources. Raises FieldError if fields or
    classes differ between files.
    """

    def __init__(self, readers: Sequence[Source], name: Path, *, repeated: bool = False) -> None:
        num_files = len({reader.path for reader in readers})
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if max_files != resource.RLIM_INFINITY and num_files + RESERVED_DESCRIPTORS > max_files:
            raise FileError(
                f"{printable(name)} has {num_files} files, but this process may open only {max_files}: raise the "
                f"limit with ulimit -n {2 * num_files + 1024}, or combine the files into fewer ones"
            )
        if not repeated:
            _check_repeats(readers)
        _check_names(readers)
        fields = {
            name: combined([(reader, reader.fields[name]) for reader in readers], name) for name in readers[0].fields
        }
        borders = np.concatenate(([0], np.cumsum([reader.num_samples for reader in readers], dtype=np.int64)))
        sizes = [reader.chunk_samples if reader.main.grid.chunks else None for reader in readers]
        chunks = Chunks.joined(borders, sizes, fields[readers[0].main.name])
        super().__init__(
            name,
            fields | {chunks.main.name: chunks.main},
            int(borders[-1]),
            readers=readers,
            trusted=all(reader.trusted for reader in readers),
            checksums=readers[0].checksums,
            main=chunks.main.name,
            starts=borders,
            chunk_samples=chunks.samples,
            chunk_starts=chunks.starts,
            is_rows=all(reader.is_rows for reader in readers),
        )
        self.header = _combine_headers(self)

    @classmethod
    def of_several(cls, sources: Sequence[Source], name: Path) -> FileSet:
        """Return a source of the samples of several sources, one after the other, which may have the same files."""
        return cls([reader for source in sources for reader in source.readers], name, repeated=True)

    @property
    def joined_as(self) -> str:  # type: ignore[override]
        return self.readers[0].joined_as

    @property
    def computed(self) -> dict[str, Computed]:
        """The computed fields of the files, whose dtypes are equal, or are those of strings."""
        fields = {name: computed.field for name, computed in self.readers[0].computed.items()}
        return {
            name: Computed.described(
                name, (self.num_samples, *field.sample_shape), self._dtypes[name], partial(self._compute, name)
            )
            for name, field in fields.items()
        }

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype]:
        """The dtypes of the computed fields."""
        first, *others = [reader.computed for reader in self.readers]
        return {
            name: np.result_type(one.field.dtype, *(each[name].field.dtype for each in others))
            for name, one in first.items()
        }

    def _compute(self, name: str, samples: np.ndarray) -> np.ndarray:
        return self._of_files(samples, lambda reader, own: reader.computed[name].of(own))

    def names_of(self, samples: np.ndarray) -> np.ndarray | None:
        if self.readers[0].names_of(samples[:0]) is None:
            return None
        return self._of_files(samples, lambda reader, own: reader.names_of(own))

    def _of_files(self, samples: np.ndarray, compute: Callable[[Source, np.ndarray], Any]) -> np.ndarray:
        """Return what a function computes from the samples of each file, whose numbers count from its first one."""
        if not len(samples):
            return np.asarray(compute(self.readers[0], samples))
        by_file = self.by_file(samples)
        return of_all_parts(by_file, lambda file, own: compute(self.readers[file], samples[own] - self.starts[file]))

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


def set_name(files: Sequence[Path]) -> Path:
    """Return the name of a set of files, for messages."""
    return files[0] if len(files) == 1 else Path(f"{shown(files[0])} and {len(files) - 1} more")


def joined_files(readers: Sequence[Source], name: Path | None = None) -> Source:
    """Return the only source, or a `FileSet` of several sources, one of each file."""
    if len(readers) == 1:
        return readers[0]
    return FileSet(readers, set_name([reader.path for reader in readers]) if name is None else name)


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


def _check_repeats(readers: Sequence[Source]) -> None:
    """Raise OptionError if a file is repeated."""
    seen: dict[tuple[object, ...], Path] = {}
    for reader in readers:
        datasets = (field.dataset for field in reader.fields.values())
        other = seen.setdefault((*reader.stamp[:2], *datasets), reader.path)
        if other is not reader.path:
            raise OptionError(
                f"{printable(reader.path)} is the same file as {printable(other)}: name it once, and use weights to "
                "repeat samples"
            )


def _check_names(readers: Sequence[Source]) -> None:
    """Raise FieldError if the names of fields differ between files."""
    first = readers[0]
    for reader in readers[1:]:
        if list(reader.fields) != list(first.fields):
            fields, expected = (", ".join(map(repr, named.fields)) for named in (reader, first))
            raise FieldError(
                f"{printable(reader.path)} has {fields}, but {printable(first.path)} has {expected}: {REMEDY}"
            )


def combined(parts: Sequence[tuple[Source, Field | RaggedField]], name: str) -> Field | RaggedField:
    """Describe a field as one whose samples are those of several datasets. A part has the source of its file.

    Raises FieldError if they differ in anything else than their length and chunks.
    """
    if any(isinstance(field, EncodedField) for _, field in parts):  # images are recognised by their first row
        parts = [part for part in parts if part[1].grid.shape[0]]
    first: Any = parts[0][1]
    if all(isinstance(field, MatrixField) for _, field in parts):  # before their numbers: it names them
        check_same([(source, COLUMN_IDS) for source, _ in parts], "columns", COLUMNS_REMEDY, name)
    for part in parts[1:]:
        if part[1].noun != first.noun:
            place, first_place = _places(part, parts[0])
            raise FieldError(
                f"{place}: field {name!r} is {part[1].noun}, but in {first_place} it is {first.noun}: {REMEDY}"
            )
        for trait, remedy in first.alike.items():
            _check_equal(part, parts[0], trait, remedy)
        if part[1].names != first.names:
            raise FieldError(
                f"{printable(part[0].path)}: the enumeration {name!r} has the names "
                f"{names_text(part[1].names.values())}, but in {printable(parts[0][0].path)} it has "
                f"{names_text(first.names.values())}: {CATEGORIES_REMEDY}"
            )
    tables = [(source, field.categories) for source, field in parts]
    if all(table for _, table in tables):
        check_same(tables, f"categories of {name!r}", CATEGORIES_REMEDY)
    joined: Field | RaggedField = first.joined([field for _, field in parts])
    return joined


def _places(part: tuple[Source, Any], first: tuple[Source, Any]) -> list[str]:
    """Return the files of two parts. If they are in the same file, add their datasets."""
    is_same = part[0].path == first[0].path
    return [
        f"{printable(source.path)}: {field.dataset!r}" if is_same else printable(source.path)
        for source, field in (part, first)
    ]


def _check_equal(part: tuple[Source, Any], first: tuple[Source, Any], trait: str, remedy: str) -> None:
    value, expected = getattr(part[1], trait), getattr(first[1], trait)
    if (value is None) != (expected is None) or value != expected:  # NumPy treats None as float64
        place, first_place = _places(part, first)
        raise FieldError(
            f"{place}: field {part[1].name!r} has the {trait.replace('_', ' ')} {_text(trait, value)}, but in "
            f"{first_place} it is {_text(trait, expected)}: {remedy}"
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
