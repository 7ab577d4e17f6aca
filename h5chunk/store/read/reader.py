"""Read rows of any HDF5 file whose samples lie along the first axis, through HDF5's own chunk cache.

A reader can be sent between processes, and opens the file in each process at the first read. The rows of a request are
read chunk by chunk, so that a request needs each chunk once, whatever the order of its rows.
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, OptionError, printable
from h5chunk.plan.cache import CALL_BYTES, CacheSettings
from h5chunk.plan.csr import bounded_window, fullest_chunks
from h5chunk.plan.layout import choose_window_chunks, plan_layout
from h5chunk.stamp import stamp_of
from h5chunk.store.format.header import Header, checksums_of, read_header
from h5chunk.store.format.recommendation import Recommended, read_recommendation
from h5chunk.store.hdf5.chunk_table import is_listed_wrongly, leaves_memory, list_chunks
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import open_file, opened, translate_errors
from h5chunk.store.read.checksums import OFF, ChunkChecks, Sums, read_sums
from h5chunk.store.read.csr import CsrBuffers, CsrHandle, cache_of, open_dataset
from h5chunk.store.read.fields import Field, MatrixField, look_at, read_indptr, usual_fields

SMALL_FIELD_BYTES = 8 << 20  # fields of at most this size, except the largest, are cached whole


class H5Reader:
    """Read fields of one file; a set of files is read by `h5chunk.store.read.fileset`.

    ``fields`` are datasets, or groups that hold a CSR matrix, by field name; None: ``images``, or the matrix ``X``, and
    ``labels`` if they exist. With ``checksums`` "first", chunks are checked against the checksums of an h5chunk file at
    this process's first read; with "always", at every read.

    ``main`` is the ``matrix``, if there is one, otherwise the field with the largest samples; ``chunk_samples`` samples
    are read together. ``starts``, (num_files + 1,) int64: each file's first sample, then the total.
    """

    chunk_starts: np.ndarray | None = None  # first sample of each chunk; None: all but the last have chunk_samples
    _readers: tuple[H5Reader, ...] = ()  # number of files in the set

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Mapping[str, str] | None = None,
        *,
        trusted: bool = False,
        checksums: str = OFF,
    ) -> None:
        self.path = Path(path)
        self.trusted, self.checksums = trusted, checksums
        self.stamp = stamp_of(self.path)  # compared after opening, to notice a replacement
        with opened(self.path) as file:
            self.header: Header | None = read_header(file)
            if fields is None:
                fields = usual_fields(file, self.path, self.header)
            if not fields:
                raise OptionError("fields is empty: name at least one dataset")
            for each in (*fields.keys(), *fields.values()):
                if not isinstance(each, str):
                    raise OptionError(f"fields has {each!r}: give names of datasets")
            guard = Guard(self.path, trusted)
            self.fields = {
                name: look_at(file, self.path, name, dataset, self.header, guard) for name, dataset in fields.items()
            }
            self.sums: Sums = read_sums(file, self.path, self.fields, self.header, checksums)
        matrices = [field for field in self.fields.values() if isinstance(field, MatrixField)]
        if len(matrices) > 1:
            raise FieldError(f"{printable(self.path)}: fields name {len(matrices)} sparse matrices: name one")
        self.matrix = matrices[0] if matrices else None
        lengths = {name: field.grid.shape[0] for name, field in self.fields.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
            raise FieldError(f"{printable(self.path)}: fields differ in length: {shown}: name fields of one length")
        self.num_samples = next(iter(lengths.values()))
        self._caches: dict[str, CacheSettings] = {}
        self._opened: tuple[int, dict[str, _Handle | CsrHandle]] | None = None
        self.starts = np.array([0, self.num_samples])
        self.main = self.matrix or max(self.fields.values(), key=lambda field: field.grid.sample_bytes)
        good = plan_layout(max(1, self.num_samples), max(1, self.main.grid.sample_bytes))
        self.chunk_samples: int = self.main.grid.band_samples or good.chunk_samples  # contiguous data has no chunks

    @property
    def readers(self) -> tuple[H5Reader, ...]:
        """The readers of the files."""
        return self._readers or (self,)

    def by_file(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each file that has any of these rows, and their positions in ``rows``, in the same order."""
        if not len(rows):
            return
        if len(self.readers) == 1:
            yield 0, np.arange(len(rows))
            return
        files = np.searchsorted(self.starts, rows, "right") - 1
        order = np.argsort(files.astype(np.uint16) if len(self.readers) <= 1 << 16 else files, kind="stable")
        for start, stop in pairwise([0, *(np.flatnonzero(np.diff(files[order])) + 1).tolist(), len(rows)]):
            some = order[start:stop]
            yield int(files[some[0]]), some

    def cache_bytes(self, main: CacheSettings) -> int:
        """Return the maximum bytes that caches of the largest field take in one process, in all files together."""
        return main.nbytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes that are read together: all chunks of the largest field that hold ``chunk_samples`` samples."""
        grid = self.main.grid
        return grid.band_bytes if grid.chunks else self.chunk_samples * grid.sample_bytes

    @cached_property
    def fingerprint(self) -> int:
        """A number that is equal for copies of a file, and differs for other data as far as possible.

        It is computed from the checksums of h5chunk files, and from names, shapes and types in other files.
        """
        about = [
            (name, each.dataset, tuple(map(int, each.grid.shape)), each.dtype.str) for name, each in self.fields.items()
        ]
        found = zlib.crc32(repr(about).encode())
        if self.header is not None:
            with opened(self.path) as file:
                self.check_unchanged()
                found = checksums_of(file, found)
        return found

    @cached_property
    def indptr(self) -> np.ndarray:
        """The start of each row in the matrix's entries: (num_rows + 1,) int64. Raises FileError if damaged."""
        assert self.matrix is not None
        name = f"{self.matrix.name}/indptr"
        with opened(self.path) as file:
            self.check_unchanged()
            if name in self.sums:
                table = list_chunks(file[f"{self.matrix.dataset}/indptr"])
                table = replace(table, shape=(self.matrix.num_rows,))  # messages are of rows
                checks = ChunkChecks(self.path, name, table, self.sums[name])
                checks.check(file.id.get_vfd_handle(), np.arange(len(table)))
            return read_indptr(file[self.matrix.dataset], self.path, self.matrix)

    @property
    def recommendation(self) -> Recommended | None:
        """Window (in chunks) and cache (of one process), as stored beside the file by tune, or in the file."""
        about = {"num_samples": self.num_samples, "chunk_samples": self.chunk_samples}
        beside = read_recommendation(self.path, dataset=self.main.dataset, **about)
        if beside is not None or self.header is None:
            return beside
        return self.header.window_chunks, self.header.cache

    @property
    def recommended_window(self) -> int:
        """Number of chunks to shuffle together, as recommended by the file, otherwise by the model.

        It is lower if some chunks of a matrix have far more entries than others, because windows are limited in bytes.
        """
        if recommended := self.recommendation:
            window_chunks = recommended[0]
        else:
            window_chunks = choose_window_chunks(self.chunk_bytes, math.ceil(self.num_samples / self.chunk_samples))
        if self.matrix is None:
            return window_chunks
        return bounded_window(window_chunks, fullest_chunks(self.indptr, self.chunk_samples))

    def set_caches(self, main: CacheSettings) -> None:
        """Give the largest field the cache ``main``, and other fields caches for the same samples.

        This takes effect at the next read.
        """
        room_samples = main.nbytes // max(1, self.main.grid.band_bytes) * self.chunk_samples
        caches = {}
        for field in self.fields.values():
            grid = field.grid
            bands = -(-room_samples // grid.band_samples) + 1 if grid.band_samples else 0
            if grid.num_bands * grid.band_bytes <= SMALL_FIELD_BYTES:
                bands = grid.num_bands
            caches[field.name] = grid.cache_for(bands)
        caches[self.main.name] = main
        if caches != self._caches:
            self._caches = caches
            self.close()

    def caches_in_force(self) -> dict[str, CacheSettings]:
        """Return the caches that HDF5 uses in this process, by field, as HDF5 reports them."""
        return {name: cache_of(handle.id) for name, handle in self._handles().items()}

    def read(self, name: str, rows: np.ndarray, out: np.ndarray | CsrBuffers) -> None:
        """Read rows of a field, (n,) int64, in any order; rows may be repeated.

        ``out`` is (n, *sample_shape), of the field's dtype, C-contiguous; for a matrix, CsrBuffers with ``starts`` set.
        """
        handle = self._handles()[name]
        try:
            with handle.lock:  # it caches selections, and has memory to read through
                handle.read(rows, out)  # type: ignore[arg-type]
        except FileError:
            self.check_unchanged()
            raise
        except OSError as error:  # HDF5's error names neither file nor field
            self.check_unchanged()
            remedy = ""
            if "plugin" in str(error) or "filter" in str(error):
                remedy = ': if a filter is missing, pip install "h5chunk[codecs]"'
            raise FileError(f"{printable(self.path)}: field {name!r} cannot be read: {error}{remedy}") from error
        self.check_unchanged()  # HDF5 returns zeros for the missing part of a truncated file

    def _handles(self) -> dict[str, _Handle | CsrHandle]:
        """The open datasets of this process; those inherited by a fork are never used."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = None
            with translate_errors(self.path):
                file = open_file(self.path)
                self.check_unchanged()
                return self.read_through(file)
        return self._opened[1]

    def read_through(self, file: h5py.File) -> dict[str, _Handle | CsrHandle]:
        """Read through an open file, such as an HDF5 file over a Python file object, until `close`."""
        handles: dict[str, _Handle | CsrHandle] = {}
        for name, field in self.fields.items():
            if isinstance(field, MatrixField):
                handles[name] = CsrHandle(file, field, self.indptr, self._caches.get(name), self.sums)
            else:
                band_samples = field.grid.band_samples or self.chunk_samples
                handles[name] = _Handle(file, field, self._caches.get(name), band_samples, self.sums)
        self._opened = os.getpid(), handles
        return handles

    def check_unchanged(self, descriptor: int | None = None) -> None:
        """Raise FileError unless the path (or the open file) is unchanged since this reader was made."""
        found = stamp_of(self.path if descriptor is None else descriptor)
        if not found:
            raise FileError(f"{printable(self.path)}: no such file: it was removed after it was first opened")
        if found != self.stamp:
            raise FileError(f"{printable(self.path)}: replaced or changed since it was first opened: open it again")

    def touch(self) -> None:
        """Read all the metadata that reading samples needs, but no samples."""
        assert self.fingerprint is not None
        self._handles()
        self.close()

    def close(self) -> None:
        """Close the file in this process; the next read opens it again."""
        self._opened = None

    def __getstate__(self) -> dict[str, object]:
        return {**{name: value for name, value in self.__dict__.items() if name != "indptr"}, "_opened": None}


class _Handle:
    """One open dataset with its cache."""

    def __init__(
        self, file: h5py.File, field: Field, cache: CacheSettings | None, band_samples: int, sums: Sums
    ) -> None:
        self._file, self.lock = file, threading.Lock()  # the file stays open while this is referenced
        self.id = open_dataset(file, field.dataset, cache)
        dataset = h5py.Dataset(self.id)
        self._checks: ChunkChecks | None = None
        if dataset.chunks and dataset.size and not is_listed_wrongly(dataset):
            list_chunks(dataset)  # lists and checks the chunks; byte ranges were checked when they were listed
        if field.name in sums and dataset.size:
            self._checks = ChunkChecks(Path(file.filename), field.name, list_chunks(dataset), sums[field.name])
        self._clears = leaves_memory(dataset)
        self._space = self.id.get_space()
        dtype = field.dtype if field.dtype.kind == "S" else np.dtype(field.dtype.str)  # .str: no names of an enum's
        self._kind = h5py.h5t.py_create(dtype, logical=True)  # values, or HDF5 would change values without a name
        self._row = h5py.h5s.create_simple((1, *field.sample_shape))
        self._shape = field.sample_shape
        self._row_bytes = field.grid.sample_bytes
        self._band_samples = band_samples
        room = cache.nbytes if cache is not None else 0
        self._whole = field.grid.filtered and field.grid.band_bytes > room  # decoded again at every call
        self._scratch = np.empty((0, *self._shape), field.dtype)

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read rows chunk by chunk: a run in one call if that copies few rows in excess, otherwise row by row."""
        if not len(rows):
            return
        if self._checks is not None:
            self._checks.check(self._file.id.get_vfd_handle(), self._checks.of_rows(rows))
        places = np.argsort(rows, kind="stable")
        ordered = rows[places]
        chunks = ordered // self._band_samples
        borders = np.flatnonzero(chunks[1:] != chunks[:-1]) + 1
        for start, stop in pairwise([0, *borders.tolist(), len(rows)]):
            first, last = int(ordered[start]), int(ordered[stop - 1]) + 1
            too_many = (last - first) * self._row_bytes > (stop - start - 1) * CALL_BYTES
            if stop - start == 1 or (too_many and not self._whole):
                for place in range(start, stop):
                    self._read_run(int(ordered[place]), self._row, out[places[place] : places[place] + 1])
                continue
            if len(self._scratch) < last - first:
                self._scratch = np.empty((last - first, *self._shape), out.dtype)
            scratch = self._scratch[: last - first]
            self._read_run(first, h5py.h5s.create_simple(scratch.shape), scratch)
            out[places[start:stop]] = scratch[ordered[start:stop] - first]

    def _read_run(self, first: int, memory: h5py.h5s.SpaceID, out: np.ndarray) -> None:
        count = memory.shape[0]
        if self._clears:
            out[...] = np.zeros((), out.dtype)
        self._space.select_hyperslab((first, *(0,) * len(self._shape)), (count, *self._shape))
        self.id.read(memory, self._space, out, self._kind)
