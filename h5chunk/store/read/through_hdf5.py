"""HDF5 as a codec: it reads the blocks of datasets whose layout, filters or links nothing else can read.

HDF5 reads under its lock, in one thread at a time. A block consists of the chunks with the same rows, unless these are
too large, so that HDF5 decodes each chunk once.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5chunk.errors import FileError
from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.store.hdf5.chunk_table import ChunkTable, NotDirect, check_chunks, list_chunks
from h5chunk.store.hdf5.codecs import INSTALL
from h5chunk.store.hdf5.open import DAMAGES, explained, open_file, translate_errors
from h5chunk.store.hdf5.types import Element, packed_element, packed_type
from h5chunk.store.read.arrays import Arrays, Blocks, FillCodec, Origin, dataset_text, divided, whole_chunk
from h5chunk.store.read.checksums import ChunkChecks, Sums
from h5chunk.store.read.open_files import with_remedy

CALL_BYTES = 32 << 10  # bytes of a contiguous dataset that are read with one call, unless samples are larger
MAX_BAND_BYTES = 16 << 20  # limit on a block; larger chunks are kept decoded by HDF5's own cache


class Hdf5Files:
    """The files that this process has open with HDF5, and their open datasets."""

    def __init__(self) -> None:
        self.lock, self._process = threading.RLock(), os.getpid()
        self._files: dict[Path, tuple[h5py.File, dict[Any, Any]]] = {}

    def file(self, path: Path, check: Callable[[], None]) -> h5py.File:
        """Return an open file. ``check`` raises FileError if it was changed. The caller must hold the lock."""
        return self._file(path, check)[0]

    def dataset(self, path: Path, check: Callable[[], None], key: Any, open_dataset: Callable[[h5py.File], Any]) -> Any:
        """Return the open dataset ``key`` of a file, which ``open_dataset`` opens at its first use."""
        file, datasets = self._file(path, check)
        if key not in datasets:
            datasets[key] = open_dataset(file)
        return datasets[key]

    def _file(self, path: Path, check: Callable[[], None]) -> tuple[h5py.File, dict[Any, Any]]:
        if self._process != os.getpid():  # the files of a forked parent are never used
            self._process, self._files = os.getpid(), {}
        if path not in self._files:
            try:
                with translate_errors(path):
                    file = open_file(path)
                    check()
            except FileError as error:
                raise with_remedy(error, len(self._files) + 1) from error.__cause__
            self._files[path] = file, {}
        return self._files[path]

    def close(self) -> None:
        """Close the files in this process. The next read opens them again."""
        if not self._files:
            return
        with self.lock:
            files, self._files = self._files, {}
        if self._process == os.getpid():
            for file, datasets in files.values():
                datasets.clear()
                file.close()


class _Opened(NamedTuple):
    """An open dataset, its selection, which the next read replaces, and the type in which HDF5 reads it."""

    dataset: h5py.h5d.DatasetID
    space: h5py.h5s.SpaceID
    kind: h5py.h5t.TypeID


class ThroughHdf5(FillCodec):
    """The codec of blocks of a dataset that HDF5 reads. They have no offset in the file."""

    def __init__(
        self,
        files: Hdf5Files,
        path: Path,
        check: Callable[[], None],
        text: Callable[[int], str],
        dataset: h5py.Dataset,
        name: str,
    ) -> None:
        self._files, self._path, self._check, self._text, self._name = files, path, check, text, name
        self._shape = dataset.shape

    def divide(self, element: Element, block: tuple[int, ...], grid: ChunkGrid) -> None:
        """Set the shape of a block."""
        self._element, self._block, self._is_plain = element, block, element.is_plain
        self._stored, self._packed = np.dtype(f"V{element.item_bytes}"), np.dtype(f"V{element.num_bytes}")
        self._grid = [-(-size // step) for size, step in zip(self._shape, block, strict=True)]
        # chunks that are blocks are kept by the engine, if at all
        self._settings = CacheSettings(1, 0) if block == grid.chunks else grid.cache_for(2)

    def fill(self, number: int, out: np.ndarray) -> None:
        """Read a block, as `Codec.fill` does.

        HDF5 returns zeros for the missing part of a truncated file. The task that reads blocks, or its caller, then
        finds that the file was changed.
        """
        name, start = partial(self._text, number), list[int]()
        for size, step in zip(reversed(self._grid), reversed(self._block), strict=True):
            number, at = divmod(number, size)
            start.insert(0, at * step)
        ends = zip(start, self._block, self._shape, strict=True)
        count = tuple(min(step, size - first) for first, step, size in ends)
        is_direct = self._is_plain and count == self._block  # HDF5 reads into the block itself
        if is_direct:
            out.fill(0)  # HDF5 leaves memory unchanged without a fill value
        raw = out.view(self._stored).reshape(count) if is_direct else np.zeros(count, self._stored)
        with self._files.lock:
            try:
                key = self._name, self._element.member
                dataset, space, kind = self._files.dataset(self._path, self._check, key, self._open)
                space.select_hyperslab(tuple(start), count)
                dataset.read(h5py.h5s.create_simple(count), space, raw, kind)
            except FileError:
                raise
            except DAMAGES as error:  # HDF5's error names neither file nor field
                self._check()
                text = explained(error)
                remedy = f". If a filter is missing, run {INSTALL}" if "plugin" in text or "filter" in text else ""
                raise FileError(f"{name()} cannot be read: {text}{remedy}") from error
        if is_direct:
            return
        values = self._element.convert(raw.reshape(-1).view(np.uint8))
        whole = np.ascontiguousarray(values).reshape(-1).view(np.uint8).view(self._packed)
        out.view(self._packed).reshape(self._block)[tuple(map(slice, count))] = whole.reshape(count)

    def _open(self, file: h5py.File) -> _Opened:
        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        access.set_chunk_cache(self._settings.nslots, self._settings.nbytes, self._settings.w0)
        dataset = h5py.h5d.open(file.id, self._name.encode(), access)
        check_chunks(h5py.Dataset(dataset))
        return _Opened(dataset, dataset.get_space(), packed_type(dataset.get_type(), self._element.member))


def hdf5_arrays(
    path: Path,
    name: str,
    file: int,
    dataset: h5py.Dataset,
    dataset_name: str,
    element: Element,
    sums: Sums,
    indptr: np.ndarray | None,
    files: Hdf5Files,
    check: Callable[[], None],
    *,
    axes: int = 1,
    block: tuple[int, ...] | None = None,
) -> Arrays:
    """Describe a dataset, as `h5chunk.store.read.stored.dataset_arrays` does, whose blocks HDF5 reads.

    ``dataset_name`` is its path in the file, and ``check`` raises FileError if the file was changed. ``block`` is the
    shape of a block; default: about `CALL_BYTES`, or a chunk if boxes are read.
    """
    shape, chunks = dataset.shape, dataset.chunks
    element = packed_element(dataset, element)
    grid = ChunkGrid(shape, chunks, element.num_bytes, dataset.id.get_create_plist().get_nfilters() > 0)
    text = dataset_text(path, name, dataset_name)
    if axes == 1 and block is None:
        rows = max(1, CALL_BYTES // max(1, grid.sample_bytes))
        if chunks and grid.needs_cache and chunks[0] * grid.sample_bytes <= MAX_BAND_BYTES:
            rows = chunks[0]  # more chunks would be decoded for other samples than those that are read together
        elif chunks:
            rows = 1
        block = (min(rows, shape[0]), *shape[1:])
    elif block is None:
        block = chunks or divided(shape, element.num_bytes)
    checks = None
    if name in sums:
        try:
            checks = ChunkChecks(path, name, list_chunks(dataset), sums[name], indptr, file)
        except NotDirect as error:
            raise FileError(f"{text}: its checksums cannot be verified, because {error}: leave checksums out") from None
    in_chunks = tuple(block) == chunks
    name_of = partial("{}, chunk {}".format, text) if in_chunks else lambda _: text
    codec = ThroughHdf5(files, path, check, name_of, dataset, dataset_name)
    codec.divide(element, tuple(block), grid)
    table = ChunkTable.unwritten(shape, tuple(block))
    blocks = Blocks.of_chunks(file, table)
    chunks_of: Callable[[np.ndarray], np.ndarray] = np.asarray
    if checks is not None and not in_chunks:
        chunks_of = partial(_chunks_of, checks, block[0], shape[0]) if chunks else whole_chunk
    origin = Origin(file, name_of, None, checks, chunks_of)
    item_bytes = math.prod(shape[axes:]) * element.num_bytes
    inner = *shape[axes:], *element.shape, element.dtype.itemsize
    return Arrays.of_one(item_bytes, shape[:axes], block[:axes], blocks, codec, origin, inner)


def _chunks_of(checks: ChunkChecks, band_rows: int, num_rows: int, bands: np.ndarray) -> np.ndarray:
    """Return the numbers of the chunks that contain bands of rows."""
    first = bands * band_rows
    return checks.of_rows(first, np.minimum(first + band_rows, num_rows) - first)
