"""Read samples that are datasets of one file, with the index of their byte ranges from `keyed_index`."""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, names_text, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.layout import good_chunk_samples
from h5chunk.stamp import stamp_of
from h5chunk.store.hdf5.chunk_table import NotDirect, is_stored_as
from h5chunk.store.hdf5.codecs import ChunkDecoder, DecodeError, NoDecoder, scratch
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.keyed_index import CONTIGUOUS, THROUGH_HDF5, KeyedIndex
from h5chunk.store.hdf5.open import open_file, opened, translate_errors
from h5chunk.store.hdf5.ranges import PART_BYTES, ReadTask, read_bytes, row_tasks, vector_tasks
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.csr import CsrBuffers
from h5chunk.store.read.direct import ByteReader
from h5chunk.store.read.fields import Field
from h5chunk.store.read.ragged import SeriesField
from h5chunk.store.read.source import Computed, Source

OUTDATED = "does not match the index of the file: delete the index, NAME.h5chunk-index-*"


def _describe(path: Path, name: str, pattern: str, index: KeyedIndex, chunk_samples: int) -> Field | SeriesField:
    field = index.fields[name]
    if not math.prod(field.shape[field.is_ragged :]):
        raise FieldError(f"{printable(path)}: {name!r} has no values in any sample: leave it out")
    if field.is_ragged:
        total = int(field.lengths.sum()) * field.step_items
        where = name, pattern, len(index), total, chunk_samples, False
        return SeriesField(*where, step_shape=field.shape[1:], value_dtype=field.dtype)
    shape = len(index), *field.shape
    return Field(name, pattern, ChunkGrid(shape, None, field.dtype.itemsize, False), field.dtype)


class KeyedReader(Source):
    """A source whose samples are the datasets that match ``patterns``, in the order of their names in ``index``."""

    def __init__(self, path: Path, patterns: Mapping[str, str], index: KeyedIndex, *, trusted: bool) -> None:
        ragged = [name for name, field in index.fields.items() if field.is_ragged]
        if len(ragged) > 1:
            raise FieldError(
                f"{printable(path)}: {names_text(map(repr, ragged))} differ in length between samples, but only "
                "one such field is supported: leave out the others"
            )
        self.index, self.patterns = index, dict(patterns)
        total = sum(int(field.sample_bytes().sum()) for field in index.fields.values())
        chunk_samples = good_chunk_samples(len(index), total // len(index))
        fields = {name: _describe(path, name, patterns[name], index, chunk_samples) for name in index.fields}
        super().__init__(
            path, fields, len(index), stamp=stamp_of(path), trusted=trusted, checksums=OFF, chunk_samples=chunk_samples
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
        return self.patterns[name].replace("*", self.index.name(number))

    def read(self, name: str, rows: np.ndarray, out: np.ndarray | CsrBuffers) -> None:
        """Read samples of a field through HDF5."""
        field = self.index.fields[name]
        with self._lock, translate_errors(self.path):
            if self._file[0] != os.getpid():
                self._file = os.getpid(), open_file(self.path)
            file = self._file[1]
            for position, row in enumerate(rows.tolist()):
                path = self.dataset_of(name, row)
                dataset = Guard(self.path, self.trusted).find(file, path)
                shape = (int(field.lengths[row]), *field.shape[1:]) if field.shape else ()
                if not isinstance(dataset, h5py.Dataset) or dataset.shape != shape:
                    raise FileError(f"{printable(self.path)}: {path!r} {OUTDATED}")
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


class KeyedBytes(ByteReader):
    """A byte-range reader of one field of samples that are datasets.

    Samples whose filters or layout need HDF5 are read with it.
    """

    is_plain = True  # a cache would not help, because samples share no chunks

    def __init__(self, reader: KeyedReader, name: str) -> None:
        self.name, self._reader, self._field = name, reader, reader.index.fields[name]
        field = self._field
        self._sizes = field.sample_bytes()
        self.num_bytes = int(self._sizes.sum())
        if not field.is_ragged:
            self.row_bytes = int(self._sizes[0])
        self.reads_rows = not field.is_ragged and bool((field.kinds == CONTIGUOUS).all())
        if (field.kinds == THROUGH_HDF5).all():
            raise NotDirect("its type, filters or layout need HDF5")
        self._decoders = self._find_decoders()
        self.forget()

    def _find_decoders(self) -> list[tuple[ChunkDecoder, tuple[int, ...]]]:
        """Return the decoder and the chunk shape for each kind of chunked sample, from a dataset of that kind."""
        decoders = []
        if self._field.chunked:
            kinds, firsts = np.unique(self._field.kinds, return_index=True)
            sample_of = dict(zip(kinds.tolist(), firsts.tolist(), strict=True))
            with opened(self._reader.path) as file:
                for number, (chunk, _) in enumerate(self._field.chunked, 1):
                    path = self._reader.dataset_of(self.name, sample_of.get(number, 0))
                    dataset = Guard(self._reader.path, self._reader.trusted).find(file, path)
                    if not isinstance(dataset, h5py.Dataset) or dataset.chunks != tuple(chunk):
                        raise FileError(f"{printable(self._reader.path)}: {path!r} {OUTDATED}")
                    if not is_stored_as(dataset, self._field.dtype):
                        raise NotDirect(f"its type {dataset.dtype} is not stored in this machine's format")
                    item_bytes = self._field.dtype.itemsize
                    properties = dataset.id.get_create_plist()
                    try:
                        decoder = ChunkDecoder(properties, math.prod(chunk) * item_bytes, item_bytes)
                    except NoDecoder as error:
                        raise NotDirect(str(error)) from None
                    decoders.append((decoder, tuple(chunk)))
        return decoders

    def forget(self) -> None:
        self._local = threading.local()

    def scratch_bytes(self, num_threads: int) -> int:
        return 3 * num_threads * max((decoder.chunk_bytes for decoder, _ in self._decoders), default=0)

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: Any) -> Iterator[ReadTask]:
        """Yield tasks as `ByteReader.tasks` does. Rows may be in any order."""
        if self.reads_rows:
            yield from row_tasks((self._field.places, 1, self.row_bytes), rows, None, destinations, out, self._where)
            return
        sizes, kinds = self._sizes[rows], self._field.kinds[rows]
        memory, starts = (out.indices, out.starts) if isinstance(out, CsrBuffers) else (out, None)
        firsts = destinations * self.row_bytes if starts is None else starts[destinations] * self._field.dtype.itemsize
        flat = memory.reshape(-1).view(np.uint8)
        plain = (kinds == CONTIGUOUS) & (sizes > 0)
        if plain.any():
            yield from vector_tasks(self._field.places[rows[plain]], sizes[plain], firsts[plain], flat, self._where)
        others = np.flatnonzero(kinds != CONTIGUOUS)
        parts = np.cumsum(sizes[others]) // PART_BYTES
        for part in np.split(others, np.flatnonzero(np.diff(parts)) + 1) if len(others) else ():
            yield SampleTask(self, rows[part].tolist(), firsts[part].tolist(), flat)

    def read_sample(self, descriptor: int, row: int, out: np.ndarray) -> None:
        """Read a sample that is not contiguous into ``out``, a one-dimensional array of the sample's dtype."""
        field, kind = self._field, int(self._field.kinds[row])
        if kind == THROUGH_HDF5:
            self._reader.read(self.name, np.array([row]), CsrBuffers(np.array([0, len(out)]), out, None))
            return
        decoder, chunk = self._decoders[kind - 1]
        shape = int(field.lengths[row]), *field.shape[1:]
        starts = product(*(range(0, side, step) for side, step in zip(shape, chunk, strict=True)))
        for number, start in enumerate(starts, int(field.places[row])):
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
        return f"{printable(self._reader.path)}: {self._reader.dataset_of(self.name, row)!r}"

    def _where(self, offset: int) -> str:
        before = (self._field.kinds == CONTIGUOUS) & (self._field.places <= offset)
        return self._path_of(int(np.where(before, self._field.places, -1).argmax()))


class SampleTask:
    """A task that reads samples one by one."""

    def __init__(self, field: KeyedBytes, rows: list[int], firsts: list[int], flat: np.ndarray) -> None:
        self._field, self._rows, self._firsts, self._flat = field, rows, firsts, flat

    def __call__(self, descriptor: int) -> None:
        for row, first in zip(self._rows, self._firsts, strict=True):
            self._field.read_sample(descriptor, row, self._field.task_values(self._flat, row, first))
