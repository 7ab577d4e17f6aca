"""Read samples that are datasets of one file, with the index of their byte ranges from `keyed_index`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import FieldError, FileError, printable, shown_as
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.layout import good_chunk_samples
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.chunk_table import NotDirect
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.keyed_index import THROUGH_HDF5, KeyedIndex, Wanted, names_in_folder, runs
from h5chunk.store.hdf5.open import opened, translate_errors
from h5chunk.store.hdf5.patterns import fill
from h5chunk.store.hdf5.types import Element, element_of, read_elements
from h5chunk.store.read.arrays import Arrays, Blocks, Codec, FillCodec, Origin
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.fields import Field
from h5chunk.store.read.fileset import joined_files
from h5chunk.store.read.ragged import SeriesField
from h5chunk.store.read.samples import Elements, Part, Rows
from h5chunk.store.read.source import Computed, Source, SourceFile, check_stamp
from h5chunk.store.read.stored import InMemory, codec_of
from h5chunk.store.read.through_hdf5 import Hdf5Files

OUTDATED = "does not match the index of the file: delete the index, NAME.h5chunk-index-*"


def _describe(path: Path, name: str, pattern: str, index: KeyedIndex, chunk_samples: int) -> Field | SeriesField:
    field = index.fields[name]
    if not math.prod(field.shape[field.is_ragged :]):
        raise FieldError(f"{printable(path)}: {name!r} has no values in any sample: leave it out")
    if field.is_ragged and field.dtype.kind == "S":
        raise FieldError(
            f"{printable(path)}: {name!r} has strings, whose number differs between samples, for which there are no "
            "batches: leave it out"
        )
    if field.is_ragged:
        total = int(field.lengths.sum()) * field.step_items
        where = name, pattern, index.num_samples, total, chunk_samples, False
        return SeriesField(*where, step_shape=field.shape[1:], value_dtype=field.dtype)
    shape = index.num_samples, *field.shape
    element = Element(field.dtype, field.dtype, names=field.names) if field.names else None
    return Field(name, pattern, ChunkGrid(shape, None, field.dtype.itemsize, False), field.dtype, element=element)


class KeyedReader(Source):
    """A source whose samples are the datasets that match ``patterns``, in the order of ``index``.

    ``files`` is the file at ``path``, or the files in the folder ``path`` of which each is a sample. The latter are
    opened whenever they are read.
    """

    joined_as = "samples that are datasets"

    def __init__(
        self,
        path: Path,
        files: Sequence[Path],
        patterns: Mapping[str, str],
        index: KeyedIndex,
        *,
        trusted: bool,
        decode: str,
    ) -> None:
        self.index, self.patterns, self._files = index, dict(patterns), tuple(files)
        self.decode = decode
        self.are_samples = not any("*" in pattern for pattern in patterns.values())  # whether each file is a sample
        self._stamps = [stamp_of(file) for file in files]
        total = sum(int(field.sample_bytes().sum()) for field in index.fields.values())
        chunk_samples = good_chunk_samples(index.num_samples, total // index.num_samples)
        fields = {name: _describe(path, name, patterns[name], index, chunk_samples) for name in index.fields}
        super().__init__(
            path,
            fields,
            index.num_samples,
            stamp=stamp_of(path),
            trusted=trusted,
            checksums=OFF,
            chunk_samples=chunk_samples,
        )

    @property
    def computed(self) -> dict[str, Computed]:
        """The attributes of the samples."""
        return {
            name: Computed.described(name, values.shape, values.dtype, values.__getitem__)
            for name, values in self.index.columns.items()
        }

    def names_of(self, samples: np.ndarray) -> np.ndarray:
        return np.array([self.index.name(number) for number in samples.tolist()], np.str_)

    def _read_indptr(self, name: str) -> np.ndarray:
        field = self.index.fields[name]
        return np.concatenate([[0], np.cumsum(field.lengths)]) * field.step_items

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 of the names, shapes and dtypes of the fields, and of the names and attributes of all samples."""
        facts = [(name, self.patterns[name], field.shape, field.dtype.str) for name, field in self.index.fields.items()]
        fingerprint = zlib.crc32(repr(facts).encode())
        for array in (self.index.names, self.index.ends, *self.index.columns.values()):
            fingerprint = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, fingerprint)
        return fingerprint

    def dataset_of(self, name: str, number: int) -> str:
        """Return the path of a sample's dataset."""
        return fill(self.patterns[name], self.index.name(number))

    def file_of(self, number: int) -> Path:
        """Return the file of a sample."""
        return self._files[number if self.are_samples else 0]

    def datasets_of(self, field: str) -> list[tuple[Path, str]]:
        if (described := self.fields.get(field)) is None:
            return super().datasets_of(field)
        scaled = " / 255" if described.dtype == np.uint8 else ""
        item = f"data[i][{[*self.fields].index(field)}]" + (".values" if isinstance(described, SeriesField) else "")
        raise FieldError(
            f"field {field!r} has samples that are datasets, of which h5chunk info --stats stores no statistics: "
            f"compute them from some samples, such as values = np.concatenate([np.ravel({item}) for i in "
            f"range(0, len(data), 1 + len(data) // 1000)]){scaled}, and Normalize(values.mean(), values.std())"
        )

    def check_unchanged(self, descriptor: int | None = None) -> None:
        """Raise FileError if the file was changed. Files that are samples are checked whenever they are read."""
        if not self.are_samples:
            super().check_unchanged(descriptor)

    @property
    def file_list(self) -> list[SourceFile]:
        return [SourceFile(path, self, number) for number, path in enumerate(self._files)]

    def check_file(self, number: int, descriptor: int | None = None) -> None:
        if self.are_samples:
            check_stamp(self._files[number], self._stamps[number], descriptor)
        else:
            self.check_unchanged(descriptor)

    def stored_parts(self, opening: Any, number: int, names: Collection[str]) -> dict[str, Part]:
        return {name: self._part(opening, number, name) for name in names}

    def _part(self, opening: Any, number: int, name: str) -> Part:
        """Return what the files store of a field: an array for each sample."""
        field, (kinds, codecs) = self.index.fields[name], self._kinds(name)
        shape, block = field.shapes, np.maximum(field.block_shapes(), 1)
        if not shape.shape[1]:  # a single value is an array of one item
            shape = block = np.ones((len(shape), 1), np.int64)
        through = kinds == THROUGH_HDF5  # of which each sample is one block
        block[through] = np.maximum(shape[through], 1)
        counts = np.where(through, np.minimum(field.num_blocks(), 1), field.num_blocks())
        first, listed = np.cumsum(counts) - counts, runs(field.first, counts)
        sample = np.repeat(np.arange(len(counts)), counts)  # of each block
        offset = np.where(through[sample], -1, field.offsets[listed])
        codec = kinds.astype(np.int64)
        if through.all():
            opening.why.setdefault(name, "its type, filters or layout need HDF5")
        if through.any():
            codecs = *codecs, SampleThroughHdf5(opening.cache.hdf5, self, name, first)
            codec[through] = len(codecs)
        files = number + sample if self.are_samples else np.full(len(sample), number)
        blocks = Blocks(files.astype(np.int32), offset, field.sizes[listed], field.masks[listed])
        origin = Origin(number, partial(self._label_of, name, first), blocks.offset)
        item, zero = field.dtype.itemsize, np.zeros(1, np.int64)
        arrays = Arrays(item, first, shape, block, codec, blocks, codecs, (origin,), zero)
        if arrays.is_raw and not field.is_ragged and not self.are_samples and len(blocks.offset) == len(shape):
            # all samples are runs of bytes of one size, which are rows of an array with one row in each block
            row = np.array([[len(shape)]]), np.ones((1, 1), np.int64), np.zeros(1, np.int64)
            rows = Arrays(int(shape[0].prod()) * item, zero, *row, blocks, (), (origin,), zero)
            return Part(Rows, (rows,), otherwise=Part(Elements, (arrays,), step_items=field.step_items))
        sizes = field.sample_bytes() if field.is_ragged else None
        return Part(Elements, (arrays,), step_items=field.step_items, sizes=sizes)

    def _label_of(self, name: str, first: np.ndarray, block: int) -> str:
        """Return a text that names a block's dataset. ``first`` is the first block of each sample."""
        sample = int(np.searchsorted(first, block, "right")) - 1
        return f"{printable(self.file_of(sample))}: {self.dataset_of(name, sample)!r}"

    def _kinds(self, name: str) -> tuple[np.ndarray, tuple[Codec, ...]]:
        """Return the kind of storage of each sample, as in `FieldIndex`, and the codec of each kind of chunks."""
        field, codecs = self.index.fields[name], list[Codec]()
        kinds = field.kinds
        found, firsts = np.unique(kinds, return_index=True)
        sample_of = dict(zip(found.tolist(), firsts.tolist(), strict=True))
        for kind, (chunk, *_) in enumerate(field.coded, 1):
            sample = sample_of.get(kind)
            if sample is None:  # chunks of this kind are only in samples of other files
                codecs.append(InMemory(np.empty(0, np.uint8)))
                continue
            where = self.file_of(sample)
            self.check_file(sample if self.are_samples else 0)
            with opened(where) as file:
                dataset = self.find_dataset(file, name, sample)
                if list(dataset.chunks or ()) != chunk[: dataset.ndim]:
                    raise self._outdated(name, sample)
                try:
                    codecs.append(codec_of(dataset, self.element_of(name, dataset)))
                except NotDirect:
                    kinds = np.where(kinds == kind, THROUGH_HDF5, kinds)
                    codecs.append(InMemory(np.empty(0, np.uint8)))  # which no sample uses
        return kinds, tuple(codecs)

    def element_of(self, name: str, dataset: h5py.Dataset) -> Element:
        """Describe the elements of a field in a dataset."""
        return element_of(
            dataset, f"{printable(self.path)}: {dataset.name!r}", self.index.fields[name].member, self.decode
        )

    def find_dataset(self, file: h5py.File, name: str, number: int) -> h5py.Dataset:
        """Return the dataset of a sample. Raises FileError if it is not the one in the index."""
        field = self.index.fields[name]
        path, shape = self.dataset_of(name, number), field.shapes[number].tolist()
        if field.member:  # which one separator precedes
            path = path[: -1 - len("/".join(field.member))]
        dataset = Guard(self.file_of(number), self.trusted).find(file, path)
        if not isinstance(dataset, h5py.Dataset) or list(dataset.shape) != shape[: dataset.ndim]:
            raise self._outdated(name, number)
        return dataset

    def _outdated(self, name: str, number: int) -> FileError:
        return FileError(f"{printable(self.file_of(number))}: {self.dataset_of(name, number)!r} {OUTDATED}")


def keyed_source(files: Sequence[Path], wanted: Wanted, index: KeyedIndex) -> Source:
    """Return a source of the samples in ``index``, which covers these files in this order."""
    if not wanted.outer:
        folder = names_in_folder(files)[0]
        shown_as[str(Path(folder))] = folder  # which differ for a URL
        return KeyedReader(Path(folder), files, wanted.patterns, index, trusted=wanted.trusted, decode=wanted.decode)
    parts = [index.take([number]) for number in range(len(files))]
    for name, field in index.fields.items():
        for part in parts:
            part.fields[name].varies = field.is_ragged
    readers = [
        KeyedReader(file, [file], wanted.patterns, part, trusted=wanted.trusted, decode=wanted.decode)
        for file, part in zip(files, parts, strict=True)
    ]
    return joined_files(readers)


class SampleThroughHdf5(FillCodec):
    """The codec of samples that HDF5 reads, each of which is one block. ``first`` is the first block of each sample."""

    def __init__(self, files: Hdf5Files, source: KeyedReader, name: str, first: np.ndarray) -> None:
        self._files, self._source, self._name, self._first = files, source, name, first

    def fill(self, number: int, out: np.ndarray) -> None:
        source = self._source
        sample = int(np.searchsorted(self._first, number, "right")) - 1
        path, own = source.file_of(sample), sample if source.are_samples else 0
        check = partial(source.check_file, own)
        with self._files.lock, translate_errors(path), self._opened(path, check) as file:
            dataset = source.find_dataset(file, self._name, sample)
            values = read_elements(dataset, source.element_of(self._name, dataset))
        check()
        out[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    @contextmanager
    def _opened(self, path: Path, check: Callable[[], None]) -> Iterator[h5py.File]:
        """Open a file in a context. A file that has all samples stays open."""
        if not self._source.are_samples:
            yield self._files.file(path, check)
            return
        check()
        with opened(path) as file:
            yield file
