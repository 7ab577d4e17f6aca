"""What a data set reads: the samples of some fields, in one file or several.

A kind of source, such as rows of datasets, windows of frames or patches of volumes, is a subclass of `Source`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import ChangedError, FieldError, names_text, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.csr import bounded_window, fullest_chunks
from h5chunk.plan.layout import choose_window_chunks, good_chunk_samples
from h5chunk.remote.mirror import Mirror
from h5chunk.stamp import stamp_of
from h5chunk.store.format.header import Header
from h5chunk.store.format.recommendation import Recommended, read_recommendation
from h5chunk.store.read.checksums import OFF, Sums
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.store.read.ragged import ImageSizes, RaggedField, SeriesField
from h5chunk.store.read.samples import FieldReader, Part
from h5chunk.urls import local_copy_of


class Computed(NamedTuple):
    """A field that is not in the file. ``of`` computes its values from the numbers of samples, (n,) int64.

    If samples differ between epochs, the numbers have an offset for the epoch: see `h5chunk.plan.draws.epoch_rows`.
    """

    field: Field
    of: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def described(cls, name: str, shape: Sequence[int], dtype: Any, of: Callable[[np.ndarray], np.ndarray]) -> Computed:
        """Return a computed field whose samples together have this shape, (n, ...), and dtype."""
        dtype = np.dtype(dtype)
        return cls(Field(name, "", ChunkGrid(tuple(shape), None, dtype.itemsize, False), dtype), of)


class Groups(NamedTuple):
    """The groups to which samples belong, such as episodes. A split keeps the samples of a group together."""

    noun: str  # what a group is, such as episode
    names: Sequence[str]
    numbers: np.ndarray  # (n,) int64, the group of each sample


class SourceFile(NamedTuple):
    """A file of a data set. It is the file ``number`` of ``source``."""

    path: Path
    source: Source
    number: int


class Source:
    """The samples of some fields, in one file or several. Each process opens the files at its first read.

    ``fields`` has the stored fields by name, and `computed` those that follow from the number of a sample. Those whose
    samples differ in length, such as a matrix, are in ``ragged_fields``, too. ``main`` is the field with the largest
    samples, of these fields if there are any, and it is ``ragged`` if it is one of them. Its chunks have
    ``chunk_samples`` samples, or, if they differ in size, begin at the samples in ``chunk_starts``, which ends with the
    number of samples. ``starts``, (num_files + 1,) int64, is the first sample of each file, and finally the number of
    samples. ``stamp`` identifies the version of a single file. ``is_rows`` is whether each sample is a row of each
    dataset.
    """

    decode = ""  # how packed numbers of other fields are converted
    joined_as = ""  # what the samples are, which `of_several` of such sources joins; empty if they cannot be joined
    epoch_samples = 0  # offset added to the sample numbers per epoch, if each epoch has different samples

    def __init__(
        self,
        path: Path,
        fields: Mapping[str, Field | RaggedField],
        num_samples: int,
        *,
        readers: Sequence[Source] = (),
        stamp: tuple[int, ...] = (),
        header: Header | None = None,
        trusted: bool = False,
        checksums: str = OFF,
        sums: Sums | None = None,
        main: str | None = None,
        starts: np.ndarray | None = None,
        chunk_samples: int | None = None,
        chunk_starts: np.ndarray | None = None,
        is_rows: bool = False,
    ) -> None:
        self.path, self.stamp, self.header = path, stamp, header
        self.trusted, self.checksums, self.is_rows = trusted, checksums, is_rows
        self.sums: Sums = {} if sums is None else sums
        self._readers = tuple(readers)
        self.fields, self.num_samples = dict(fields), num_samples
        self.ragged_fields = {name: field for name, field in fields.items() if isinstance(field, RaggedField)}
        largest = max(self.ragged_fields or fields, key=lambda name: fields[name].grid.sample_bytes)
        self.main: Field | RaggedField = fields[main or largest]
        self.ragged: RaggedField | None = self.main if isinstance(self.main, RaggedField) else None
        self.starts = np.array([0, num_samples]) if starts is None else starts
        good = good_chunk_samples(num_samples, self.main.grid.sample_bytes)
        self.chunk_samples: int = chunk_samples or self.main.grid.band_samples or good  # contiguous data has no chunks
        self.chunk_starts = chunk_starts
        self._indptrs: dict[Any, np.ndarray] = {}  # by `_table_of` a field
        self._image_sizes: dict[str, ImageSizes] = {}

    @property
    def readers(self) -> tuple[Source, ...]:
        """The sources of all files. For a single file, this is the source itself."""
        return self._readers or (self,)

    @property
    def file_list(self) -> list[SourceFile]:
        """All files, in the order of their samples. Blocks refer to a file by its index in this list."""
        own = [SourceFile(self.path, self, 0)]
        return [file for reader in self.readers for file in (own if reader is self else reader.file_list)]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of all files, each of them once."""
        return tuple(dict.fromkeys(file.path for file in self.file_list))

    @property
    def is_set(self) -> bool:
        """Whether there are several files."""
        return len(self.readers) > 1

    @cached_property
    def mirrors(self) -> tuple[Mirror | None, ...]:
        """The mirror of each file that is a remote object, and None for local files.

        Files are in the order of `file_list`.
        """
        return tuple(local_copy_of(file.path) for file in self.file_list)

    @cached_property
    def is_remote(self) -> bool:
        """Whether at least one file is a remote object."""
        return any(mirror is not None for mirror in self.mirrors)

    @property
    def reads_again(self) -> bool:
        """Whether a stored block may be read for several windows, even if each sample is read once."""
        return any(isinstance(field, Field) and field.sample_axis for field in self.fields.values())

    @property
    def matrix(self) -> MatrixField | None:
        """The first sparse matrix, if there is one."""
        return next((field for field in self.ragged_fields.values() if isinstance(field, MatrixField)), None)

    @property
    def computed(self) -> Mapping[str, Computed]:
        """The fields that are not in the file, by name."""
        return {}

    @property
    def groups(self) -> Groups | None:
        """The groups to which samples belong, if they do."""
        return None

    def names_of(self, samples: np.ndarray) -> np.ndarray | None:
        """Return the names of samples, (n,) of str; None if they can only be in a table of the file."""
        groups = self.groups
        return None if groups is None else np.array(groups.names, np.str_)[groups.numbers[samples]]

    def check_file(self, number: int, descriptor: int | None = None) -> None:
        """Raise FileError if one of its files, or the open file, was changed since this source was made."""
        self.check_unchanged(descriptor)

    def source_of(self, name: str) -> Source:
        """Return the source of the rows of which a field's samples consist, such as the frames of windows."""
        return self

    def part_of(self, name: str) -> Source:
        """Return the source of a field, or of another dataset or table, if different fields have different files."""
        return self

    def rows_of_samples(self, name: str, samples: np.ndarray) -> tuple[Source, np.ndarray]:
        """Return where one value per sample of a field is: a source of rows, and the row of each sample, (n,) int64.

        Raises OptionError if a sample has many values of each field.
        """
        return self, samples

    def datasets_of(self, field: str) -> list[tuple[Path, str]]:
        """Return the file and the path of each dataset that has values of a field, or of the dataset ``field``."""
        if self._readers:
            return list(dict.fromkeys(each for reader in self._readers for each in reader.datasets_of(field)))
        stored = self.fields.get(field)
        if isinstance(stored, Field) and stored.sample_axis:
            raise FieldError(
                f"field {field!r} has samples along the axis {stored.sample_axis}, for which h5chunk info --stats "
                "computes no statistics: compute their mean and standard deviation with NumPy"
            )
        member = stored.member if isinstance(stored, Field) else ()
        return [(self.path, field if stored is None else "/".join((stored.dataset, *member)))]

    def check_rows(self, name: str) -> None:
        """Raise FieldError unless other datasets than those of the fields have one row per sample."""
        if not self.is_rows:
            raise FieldError(f"there is no field {name!r}: pass one of {names_text((*self.fields, *self.computed))}")

    def by_file(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Group rows by file. Yields the index of a file and the positions of its rows in ``rows``, ascending."""
        return by_part(self.starts, rows)

    @property
    def chunk_bytes(self) -> int:
        """Decoded size in bytes of all chunks of the main field that contain the same ``chunk_samples`` samples."""
        grid = self.main.grid
        return grid.band_bytes if grid.chunks else self.chunk_samples * grid.sample_bytes

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 that is equal for copies of the same files, with the same fields."""
        raise NotImplementedError

    def indptr_of(self, name: str) -> np.ndarray:
        """Return the first entry of each sample of a field whose samples differ in length: (n + 1,) int64.

        It is read once, also for several fields with the same offsets or lengths. Raises FileError if it is damaged.
        """
        table = self._table_of(name)
        if table not in self._indptrs:
            self._indptrs[table] = self._read_indptr(name)
        return self._indptrs[table]

    def _table_of(self, name: str) -> Any:
        """Return a key that is equal for fields of which `_read_indptr` returns the same."""
        return self.ragged_fields[name].lengths_key

    def _read_indptr(self, name: str) -> np.ndarray:
        """Read what `indptr_of` returns."""
        raise NotImplementedError

    @property
    def indptr_bytes(self) -> int:
        """The size in bytes of all that `indptr_of` keeps."""
        tables = {self._table_of(name): self.indptr_of(name) for name in self.ragged_fields}
        return sum(indptr.nbytes for indptr in tables.values())

    def image_sizes_of(self, name: str) -> ImageSizes:
        """Return the height and width of each image in a field of images of any size, which are read once.

        Raises FileError if a table is damaged.
        """
        if name not in self._image_sizes:
            self._image_sizes[name] = self._read_image_sizes(name)
        return self._image_sizes[name]

    def _read_image_sizes(self, name: str) -> ImageSizes:
        """Read what `image_sizes_of` returns."""
        raise NotImplementedError

    @property
    def lengths_field(self) -> SeriesField | None:
        """The first field whose samples are arrays that differ in length, which is that of `sample_lengths`."""
        return next((field for field in self.ragged_fields.values() if isinstance(field, SeriesField)), None)

    @property
    def sample_lengths(self) -> np.ndarray:
        """The length of each sample along its first axis: (n,) int64. Raises FieldError if no field has lengths."""
        field = self.lengths_field
        if field is None:
            raise FieldError(
                f"{printable(self.path)}: no field has samples that differ in length: name one with offsets or lengths"
            )
        return np.diff(self.indptr_of(field.name)) // field.step_items

    @property
    def recommendation(self) -> Recommended | None:
        """The window in chunks, and the cache of one process, stored by `h5chunk tune` or else in the header."""
        if not self.is_rows:  # recommendations are for rows
            return None
        facts = {"num_samples": self.num_samples, "chunk_samples": self.chunk_samples}
        stored = read_recommendation(self.path, dataset=self.main.dataset, **facts)
        if stored is not None or self.header is None:
            return stored
        return self.header.window_chunks, self.header.cache

    @property
    def recommended_window(self) -> int:
        """Number of chunks to shuffle together: the recommendation, or else as many as fit in the default memory.

        It is reduced if some chunks of samples that differ in length are far larger than others, because the size of a
        window is limited.
        """
        if recommended := self.recommendation:
            window_chunks = recommended[0]
        else:
            window_chunks = choose_window_chunks(self.chunk_bytes, math.ceil(self.num_samples / self.chunk_samples))
        if not self.ragged_fields:
            return window_chunks
        sizes = [self.indptr_of(name) * field.entry_bytes for name, field in self.ragged_fields.items()]
        return bounded_window(window_chunks, fullest_chunks(sum(sizes[1:], sizes[0]), self.chunk_samples))

    def field_readers(self, opening: Any, names: Collection[str]) -> dict[str, FieldReader]:
        """Return the readers of fields. ``opening`` is a `h5chunk.store.read.field_readers.Opening`."""
        readers: dict[str, FieldReader] = opening.joined(self, names)
        return readers

    def stored_parts(self, opening: Any, number: int, names: Collection[str]) -> dict[str, Part]:
        """Return what a file stores of fields. ``number`` is the number of the file in the data set."""
        raise NotImplementedError

    def check_unchanged(self, descriptor: int | None = None) -> None:
        """Raise FileError if a file, or the open file, was changed since this source was made.

        If there are several files, do nothing for an open file, because reading checks it.
        """
        if self._readers:
            for reader in self._readers if descriptor is None else ():
                reader.check_unchanged()
            return
        check_stamp(self.path, self.stamp, descriptor)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_indptrs": {}, "_image_sizes": {}, "_readers": tuple(copy(reader) for reader in self._readers)}
        # unpickling the mirrors makes the local copies known to another process
        return {**self.__dict__, "mirrors": self.mirrors, **own}


def check_stamp(path: Path, first: tuple[int, ...], descriptor: int | None = None) -> None:
    """Raise ChangedError if a file, or the open file, no longer has the stamp ``first``."""
    stamp = stamp_of(path if descriptor is None else descriptor)
    if not stamp:
        raise ChangedError(f"{printable(path)}: the file was removed since it was first opened: put it back")
    if stamp != first:
        raise ChangedError(
            f"{printable(path)}: the file was replaced or changed since it was first opened: open it again"
        )


def by_part(starts: np.ndarray, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Group rows by the part that they are in, where part i has the rows from ``starts[i]`` to ``starts[i + 1]``.

    Yields the index of a part and the positions of its rows in ``rows``, ascending.
    """
    if not len(rows):
        return
    num_parts = len(starts) - 1
    if num_parts == 1:
        yield 0, np.arange(len(rows))
        return
    parts = np.searchsorted(starts, rows, "right") - 1
    order = np.argsort(parts.astype(np.uint16) if num_parts <= 1 << 16 else parts, kind="stable")
    for start, stop in pairwise([0, *(np.flatnonzero(np.diff(parts[order])) + 1).tolist(), len(rows)]):
        positions = order[start:stop]
        yield int(parts[positions[0]]), positions


def of_all_parts(
    grouped: Iterable[tuple[int, np.ndarray]], compute: Callable[[int, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return the values of rows, of which there is at least one, in their order.

    ``grouped`` has them by part, as `by_part` yields them, and ``compute(part, positions)`` returns those of a part.
    """
    found = [(positions, compute(part, positions)) for part, positions in grouped]
    order = np.argsort(np.concatenate([positions for positions, _ in found]))
    values: np.ndarray = np.concatenate([values for _, values in found])[order]
    return values
