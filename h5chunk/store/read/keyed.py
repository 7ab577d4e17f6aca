"""Read samples that are datasets of one file, with the index of their byte ranges from `keyed_index`."""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, names_text, printable, shown
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.layout import good_chunk_samples
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.chunk_table import NotDirect, is_stored_as
from h5chunk.store.hdf5.codecs import ChunkDecoder, DecodeError, NoDecoder, scratch
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.keyed_index import CONTIGUOUS, THROUGH_HDF5, KeyedIndex, Wanted, common_folder
from h5chunk.store.hdf5.open import open_file, opened, translate_errors
from h5chunk.store.hdf5.patterns import fill
from h5chunk.store.hdf5.ranges import PART_BYTES, ReadTask, open_descriptor, read_bytes, row_tasks, vector_tasks
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.csr import CsrBuffers
from h5chunk.store.read.direct import ByteReader
from h5chunk.store.read.fields import Field
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.ragged import SeriesField
from h5chunk.store.read.source import Computed, Source

OUTDATED = "does not match the index of the file: delete the index, NAME.h5chunk-index-*"


def _describe(path: Path, name: str, pattern: str, index: KeyedIndex, chunk_samples: int) -> Field | SeriesField:
    field = index.fields[name]
    if not math.prod(field.shape[field.is_ragged :]):
        raise FieldError(f"{printable(path)}: {name!r} has no values in any sample: leave it out")
    if field.is_ragged:
        total = int(field.lengths.sum()) * field.step_items
        where = name, pattern, index.num_samples, total, chunk_samples, False
        return SeriesField(*where, step_shape=field.shape[1:], value_dtype=field.dtype)
    shape = index.num_samples, *field.shape
    return Field(name, pattern, ChunkGrid(shape, None, field.dtype.itemsize, False), field.dtype)


class KeyedReader(Source):
    """A source whose samples are the datasets that match ``patterns``, in the order of ``index``.

    ``files`` is the file at ``path``, or the files in the folder ``path`` of which each is a sample. The latter are
    opened whenever they are read.
    """

    def __init__(
        self, path: Path, files: Sequence[Path], patterns: Mapping[str, str], index: KeyedIndex, *, trusted: bool
    ) -> None:
        ragged = [name for name, field in index.fields.items() if field.is_ragged]
        if len(ragged) > 1:
            raise FieldError(
                f"{printable(path)}: {names_text(map(repr, ragged))} differ in length between samples, but only "
                "one such field is supported: leave out the others"
            )
        self.index, self.patterns, self._files = index, dict(patterns), tuple(files)
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
        self._file: tuple[int, Any] = (0, None)  # the process that has opened the file, and the file
        self._lock = threading.Lock()

    @property
    def computed(self) -> dict[str, Computed]:
        """The attributes of the samples."""
        return {
            name: Computed.described(name, values.shape, values.dtype, values.__getitem__)
            for name, values in self.index.columns.items()
        }

    def names_of(self, samples: np.ndarray) -> np.ndarray:
        return np.array([self.index.name(number) for number in samples.tolist()], np.str_)

    @cached_property
    def indptr(self) -> np.ndarray:
        assert self.ragged is not None
        field = self.index.fields[self.ragged.name]
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

    @property
    def paths(self) -> tuple[Path, ...]:
        return self._files

    def file_of(self, number: int) -> Path:
        """Return the file of a sample."""
        return self._files[number if self.are_samples else 0]

    def datasets_of(self, field: str) -> list[tuple[Path, str]]:
        if self.are_samples:
            return [(file, self.patterns.get(field, field)) for file in self._files]
        return super().datasets_of(field)

    def check_unchanged(self, descriptor: int | None = None) -> None:
        """Raise FileError if the file was changed. Files that are samples are checked whenever they are read."""
        if not self.are_samples:
            super().check_unchanged(descriptor)

    @contextmanager
    def descriptor_of(self, number: int, descriptor: int) -> Iterator[int]:
        """Open the file of a sample in a context, unless all samples are in the file of ``descriptor``.

        Raises FileError if the file was changed.
        """
        if not self.are_samples:
            yield descriptor
            return
        opened = open_descriptor(self._files[number])
        try:
            self._check(number, stamp_of(opened))
            yield opened
        finally:
            os.close(opened)

    def _check(self, number: int, stamp: tuple[int, ...]) -> None:
        if stamp != self._stamps[number]:
            raise FileError(
                f"{printable(self._files[number])}: the file was replaced or changed since it was first opened: open "
                "the data set again"
            )

    @contextmanager
    def _opened(self, number: int) -> Iterator[h5py.File]:
        """Open the file of a sample with HDF5 in a context. A file that has all samples stays open."""
        if self.are_samples:
            self._check(number, stamp_of(self._files[number]))
            with opened(self._files[number]) as file:
                yield file
            return
        if self._file[0] != os.getpid():
            self._file = os.getpid(), open_file(self.path)
        with translate_errors(self.path):
            yield self._file[1]

    def read(self, name: str, rows: np.ndarray, out: np.ndarray | CsrBuffers) -> None:
        """Read samples of a field through HDF5."""
        field = self.index.fields[name]
        with self._lock:
            for position, row in enumerate(rows.tolist()):
                path = self.dataset_of(name, row)
                with self._opened(row) as file:
                    dataset = Guard(self.file_of(row), self.trusted).find(file, path)
                    if not isinstance(dataset, h5py.Dataset) or dataset.shape != tuple(field.shapes[row].tolist()):
                        raise FileError(f"{printable(self.file_of(row))}: {path!r} {OUTDATED}")
                    values = dataset[()]
                if isinstance(out, CsrBuffers):
                    start = int(out.starts[position])
                    out.indices[start : start + values.size] = values.reshape(-1)
                else:
                    out[position] = values
        self.check_unchanged()

    def close(self) -> None:
        (process, file), self._file = self._file, (0, None)
        if process == os.getpid():
            file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_lock": None, "_file": (0, None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def keyed_source(files: Sequence[Path], wanted: Wanted, index: KeyedIndex) -> Source:
    """Return a source of the samples in ``index``, which covers these files in this order."""
    if not wanted.outer:
        folder = common_folder(files)
        return KeyedReader(folder, files, wanted.patterns, index, trusted=wanted.trusted)
    parts = [index.take([number]) for number in range(len(files))]
    for name, field in index.fields.items():
        for part in parts:
            part.fields[name].varies = field.is_ragged
    readers = [
        KeyedReader(file, [file], wanted.patterns, part, trusted=wanted.trusted)
        for file, part in zip(files, parts, strict=True)
    ]
    return readers[0] if len(files) == 1 else FileSet(readers, Path(f"{shown(files[0])} and {len(files) - 1} more"))


class KeyedBytes(ByteReader):
    """A byte-range reader of one field of samples that are datasets.

    Samples whose filters or layout need HDF5 are read with it.
    """

    is_plain = True  # a cache would not help, because samples share no chunks

    def __init__(self, reader: KeyedReader, name: str) -> None:
        self.name, self._reader, self._field = name, reader, reader.index.fields[name]
        field = self._field
        self._sizes = field.sample_bytes()
        with_blocks = field.num_blocks() > 0
        self._places = np.zeros(len(with_blocks), np.int64)  # the offset of each sample's first block
        self._places[with_blocks] = field.offsets[field.first[with_blocks]]
        self.num_bytes = int(self._sizes.sum())
        if not field.is_ragged:
            self.row_bytes = int(self._sizes[0])
        are_plain = bool((field.kinds == CONTIGUOUS).all()) and not reader.are_samples
        self.reads_rows = not field.is_ragged and are_plain
        if (field.kinds == THROUGH_HDF5).all():
            raise NotDirect("its type, filters or layout need HDF5")
        self._decoders = self._find_decoders()
        self.forget()

    def _find_decoders(self) -> dict[int, tuple[ChunkDecoder, tuple[int, ...]]]:
        """Return the decoder and the chunk shape of each kind of chunked sample that is not empty, by its number."""
        decoders: dict[int, tuple[ChunkDecoder, tuple[int, ...]]] = {}
        if self._field.chunked:
            kinds, firsts = np.unique(self._field.kinds, return_index=True)
            sample_of = dict(zip(kinds.tolist(), firsts.tolist(), strict=True))
            for number, (chunk, _) in enumerate(self._field.chunked, 1):
                if (sample := sample_of.get(number)) is None:
                    continue
                path, where = self._reader.dataset_of(self.name, sample), self._reader.file_of(sample)
                with opened(where) as file:
                    dataset = Guard(where, self._reader.trusted).find(file, path)
                    if not isinstance(dataset, h5py.Dataset) or dataset.chunks != tuple(chunk):
                        raise FileError(f"{printable(where)}: {path!r} {OUTDATED}")
                    if not is_stored_as(dataset, self._field.dtype):
                        raise NotDirect(f"its type {dataset.dtype} is not stored in this machine's format")
                    item_bytes = self._field.dtype.itemsize
                    properties = dataset.id.get_create_plist()
                    try:
                        decoder = ChunkDecoder(properties, math.prod(chunk) * item_bytes, item_bytes)
                    except NoDecoder as error:
                        raise NotDirect(str(error)) from None
                    decoders[number] = decoder, tuple(chunk)
        return decoders

    def forget(self) -> None:
        self._local = threading.local()

    def scratch_bytes(self, num_threads: int) -> int:
        return 3 * num_threads * max((decoder.chunk_bytes for decoder, _ in self._decoders.values()), default=0)

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: Any) -> Iterator[ReadTask]:
        """Yield tasks as `ByteReader.tasks` does. Rows may be in any order."""
        if self.reads_rows:
            yield from row_tasks((self._places, 1, self.row_bytes), rows, None, destinations, out, self._where)
            return
        sizes, kinds = self._sizes[rows], self._field.kinds[rows]
        memory, starts = (out.indices, out.starts) if isinstance(out, CsrBuffers) else (out, None)
        firsts = destinations * self.row_bytes if starts is None else starts[destinations] * self._field.dtype.itemsize
        flat = memory.reshape(-1).view(np.uint8)
        # files that are samples are opened one by one
        plain = (kinds == CONTIGUOUS) & (sizes > 0) & (not self._reader.are_samples)
        if plain.any():
            yield from vector_tasks(self._places[rows[plain]], sizes[plain], firsts[plain], flat, self._where)
        others = np.flatnonzero(~plain & (sizes > 0))
        parts = np.cumsum(sizes[others]) // PART_BYTES
        for part in np.split(others, np.flatnonzero(np.diff(parts)) + 1) if len(others) else ():
            yield SampleTask(self, rows[part].tolist(), firsts[part].tolist(), flat)

    def read_sample(self, descriptor: int, row: int, out: np.ndarray) -> None:
        """Read a sample into ``out``, a one-dimensional array of the sample's dtype."""
        kind = int(self._field.kinds[row])
        if kind == THROUGH_HDF5:
            self._reader.read(self.name, np.array([row]), CsrBuffers(np.array([0, len(out)]), out, None))
            return
        with self._reader.descriptor_of(row, descriptor) as own:
            if kind == CONTIGUOUS:
                read_bytes(own, int(self._places[row]), out.view(np.uint8).data, lambda _: self._path_of(row))
            else:
                self._read_blocks(own, row, kind, out)

    def _read_blocks(self, descriptor: int, row: int, kind: int, out: np.ndarray) -> None:
        field = self._field
        decoder, chunk = self._decoders[kind]
        shape = int(field.lengths[row]), *field.shape[1:]
        starts = product(*(range(0, side, step) for side, step in zip(shape, chunk, strict=True)))
        for number, start in enumerate(starts, int(field.first[row])):
            stored = scratch(self._local, "stored", int(field.sizes[number]))
            read_bytes(descriptor, int(field.offsets[number]), stored.data, lambda _: self._path_of(row))
            whole = chunk == shape
            values = out.view(np.uint8) if whole else scratch(self._local, "decoded", decoder.chunk_bytes)
            try:
                decoder.decode(stored, int(field.masks[number]), values)
            except DecodeError as error:
                raise FileError(f"{self._path_of(row)} is damaged ({error})") from None
            if not whole:
                stops = [min(at + step, side) for at, step, side in zip(start, chunk, shape, strict=True)]
                inside = tuple(slice(0, stop - at) for at, stop in zip(start, stops, strict=True))
                target = tuple(map(slice, start, stops))
                out.reshape(shape)[target] = values.view(field.dtype).reshape(chunk)[inside]

    def task_values(self, flat: np.ndarray, row: int, first: int) -> np.ndarray:
        """Return the memory of a sample, a one-dimensional array of the sample's dtype."""
        return flat[first : first + int(self._sizes[row])].view(self._field.dtype)

    def read_all(self, descriptor: Any) -> np.ndarray:
        rows, shape = np.arange(self._reader.num_samples), self._reader.fields[self.name].grid.shape
        values = np.empty(shape, self._field.dtype)
        for task in self.tasks(rows, rows, values.reshape(len(rows), -1).view(np.uint8)):
            task(descriptor)
        return values

    def bytes_read(self, rows: np.ndarray) -> int:
        return int(self._sizes[rows].sum())

    def _path_of(self, row: int) -> str:
        return f"{printable(self._reader.file_of(row))}: {self._reader.dataset_of(self.name, row)!r}"

    def _where(self, offset: int) -> str:
        before = (self._field.kinds == CONTIGUOUS) & (self._places <= offset)
        return self._path_of(int(np.where(before, self._places, -1).argmax()))


class SampleTask:
    """A task that reads samples one by one."""

    def __init__(self, field: KeyedBytes, rows: list[int], firsts: list[int], flat: np.ndarray) -> None:
        self._field, self._rows, self._firsts, self._flat = field, rows, firsts, flat

    def __call__(self, descriptor: int) -> None:
        for row, first in zip(self._rows, self._firsts, strict=True):
            self._field.read_sample(descriptor, row, self._field.task_values(self._flat, row, first))
