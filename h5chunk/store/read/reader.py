"""Read rows of any HDF5 file whose samples are along the first axis, through HDF5's chunk cache.

A reader can be sent to other processes, and each process opens the file at its first read. The rows of a request are
sorted and read chunk by chunk, so that a request reads no chunk twice.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, OptionError, UnsupportedError, printable
from h5chunk.plan.cache import CALL_BYTES, CacheSettings
from h5chunk.stamp import stamp_of
from h5chunk.store.format.header import checksums_of, lost_fields, read_header
from h5chunk.store.hdf5.chunk_table import leaves_memory, list_chunks
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import OpenFile, descriptor_of, open_file, opened, translate_errors
from h5chunk.store.hdf5.types import element_of, packed_type
from h5chunk.store.read.checksums import OFF, ChunkChecks, Sums, read_sums
from h5chunk.store.read.csr import CsrBuffers, CsrHandle, VlenHandle, cache_of, open_dataset
from h5chunk.store.read.encoded import EncodedField, EncodedHandle, describe
from h5chunk.store.read.fields import Field, FrameDataset, MatrixField, Stored, default_fields, with_members
from h5chunk.store.read.ragged import (
    FlatSamples,
    ImagesField,
    ImageSizes,
    RaggedField,
    SeriesField,
    read_image_sizes,
    read_indptr,
)
from h5chunk.store.read.source import Source
from h5chunk.store.read.vlen import TextHandle, VlenField, read_pointers, vlen_indptr
from h5chunk.urls import local_copy_of

LABELS = "labels"
SMALL_FIELD_BYTES = 8 << 20  # fields of at most this size, except the main field, are cached completely


def _joined(fields: Sequence[RaggedField]) -> str:
    """Return the remedy for fields of arrays with the same offsets or lengths; empty for other fields."""
    series = [field for field in fields if isinstance(field, SeriesField) and field.table]
    if len(series) < len(fields) or len({(field.table, field.num_entries, field.step_shape) for field in series}) > 1:
        return ""
    values = ", ".join(f"file[{field.dataset!r}][:]" for field in series[:3])
    more = ", ..." if len(series) > 3 else ""
    return f", or join them as columns of one dataset, such as file['NEW'] = np.stack([{values}{more}], -1)"


def _of_one_length(fields: Collection[Field | RaggedField]) -> str:
    """Return the remedy for fields that differ in length."""
    shapes = [field.grid.shape for field in fields]
    if len({shape[-1] for shape in shapes}) == 1 and max(map(len, shapes)) > 1:
        return (
            "name fields of one length; the last axes are equal, so if the samples are along these, as in files of "
            "MATLAB, use the transposed copies file['NEW'] = file['OLD'][:].T"
        )
    shortest = min(shape[0] for shape in shapes)
    longest = max(fields, key=lambda field: field.grid.shape[0]).dataset
    return (
        "name fields of one length, or copy the rows that belong to samples, such as "
        f"file['NEW'] = file[{longest!r}][:{shortest}]"
    )


class H5Reader(Source):
    """A source of the rows of datasets of one file. `h5chunk.store.read.fileset.FileSet` joins several files.

    ``fields`` maps field names to the paths of datasets, of groups with a CSR matrix, or to `FlatSamples`. By default
    these are the fields that the file records, or else ``images`` or the matrix ``X``, and ``labels``. ``checksums`` is
    when chunks of an h5chunk file are compared with their checksums: "off", "first" (at this process's first read) or
    "always". ``file`` is the open file, if it is open already.
    """

    why_no_labels: str = ""  # the reason why labels are not read by default, or empty

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Stored | None = None,
        *,
        trusted: bool = False,
        checksums: str = OFF,
        file: h5py.File | None = None,
    ) -> None:
        self.mirror = local_copy_of(path)
        path = Path(path)
        stamp = stamp_of(path)  # compared after opening, to detect a replaced file
        with opened(path) if file is None else nullcontext(file) as file:
            header = read_header(file)
            is_default = fields is None
            if fields is None:
                fields = default_fields(file, path, header)
            if not fields:
                raise OptionError("fields is empty: name at least one dataset")
            for name in (*fields.keys(), *fields.values()):
                if not isinstance(name, (str, FlatSamples, FrameDataset)):
                    raise OptionError(f"fields contains {name!r}: pass names of datasets")
            guard = Guard(path, trusted)
            found: dict[str, Field | RaggedField] = {}
            for name, dataset in with_members(file, guard, fields).items():
                try:
                    found[name] = describe(file, path, name, dataset, header, guard)
                    if is_default and header is None and name == LABELS and found[name].is_text:
                        del found[name]
                        raise UnsupportedError(
                            f"{printable(path)}: {dataset!r} has strings of variable length: to read them as str, name "
                            f"the fields, such as fields={[*found, name]}"
                        )
                except FieldError as error:
                    may_miss = is_default and header is None and name == LABELS and found
                    if not may_miss or not isinstance(error, UnsupportedError):
                        raise
                    self.why_no_labels = str(error)
            sums = read_sums(file, path, found, header, checksums)
            if is_default and sums and (lost := lost_fields(file)):
                raise OptionError(
                    f"checksums is {checksums!r}, but {printable(path)} has checksums of {printable(lost[0])!r}, "
                    "which does not exist: give the field its name back, or name the fields to read (fields=[...])"
                )
        ragged = [field for field in found.values() if isinstance(field, RaggedField)]
        if len(ragged) > 1:
            all_matrices = all(isinstance(field, MatrixField) for field in ragged)
            which = "sparse matrices" if all_matrices else "fields whose samples differ in length"
            raise FieldError(f"{printable(path)}: fields has {len(ragged)} {which}: choose one{_joined(ragged)}")
        lengths = {name: field.grid.shape[0] for name, field in found.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{found[name].dataset!r} has {length}" for name, length in lengths.items())
            raise FieldError(f"{printable(path)}: fields differ in length ({listed}): {_of_one_length(found.values())}")
        how: dict[str, Any] = {"trusted": trusted, "checksums": checksums, "sums": sums, "is_rows": True}
        super().__init__(path, found, next(iter(lengths.values())), stamp=stamp, header=header, **how)
        self._caches: dict[str, CacheSettings] = {}
        self._opened: tuple[int, dict[str, Any]] | None = None

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 of the names, shapes and dtypes of the fields and of all checksums, which is equal for copies.

        Only h5chunk files have checksums. Other HDF5 files that differ only in their values have equal fingerprints.
        """
        facts = [
            (name, field.dataset, tuple(map(int, field.grid.shape)), field.dtype.str, *getattr(field, "member", ()))
            for name, field in self.fields.items()
        ]
        fingerprint = zlib.crc32(repr(facts).encode())
        if self.header is not None:
            with opened(self.path) as file:
                self.check_unchanged()
                fingerprint = checksums_of(file, fingerprint)
        return fingerprint

    @cached_property
    def indptr(self) -> np.ndarray:
        """The first entry of each sample of ``ragged``: (n + 1,) int64. Raises FileError if the table is damaged."""
        assert self.ragged is not None
        with opened(self.path) as file:
            self.check_unchanged()
            if isinstance(self.ragged, VlenField):
                dataset = file[self.ragged.dataset]
                return vlen_indptr(read_pointers(dataset, self.path), dataset, self.path, self.ragged.entry_bytes)
            self._check_table(file, self.ragged, self.ragged.pointers)
            return read_indptr(file, self.path, self.ragged)

    @cached_property
    def image_sizes(self) -> ImageSizes:
        """The height and width of each image, in a field of images of any size.

        Raises FileError if a table is damaged.
        """
        assert isinstance(self.ragged, ImagesField)
        with opened(self.path) as file:
            self.check_unchanged()
            for table in ImageSizes._fields:
                self._check_table(file, self.ragged, table)
            return read_image_sizes(file[self.ragged.dataset], self.path, self.ragged, self.indptr)

    def _check_table(self, file: h5py.File, field: RaggedField, table: str) -> None:
        """Verify the checksum of a table of a field, unless ``checksums`` is "off"."""
        name = f"{field.name}/{table}"
        if name in self.sums:
            chunks = replace(list_chunks(file[field.path_of(table)]), shape=(field.num_rows,))  # for messages
            checks = ChunkChecks(self.path, name, chunks, self.sums[name])
            checks.check(descriptor_of(file), np.arange(len(chunks)))

    def set_caches(self, main: CacheSettings) -> None:
        """Set the cache of the main field. The caches of other fields are chosen for the same number of samples."""
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

    def actual_caches(self) -> dict[str, CacheSettings]:
        """Return the caches that HDF5 reports for the open datasets of this process, by field."""
        return {name: cache_of(handle.id) for name, handle in self._handles().items()}

    def read(self, name: str, rows: np.ndarray, out: np.ndarray | CsrBuffers) -> None:
        handle = self._handles()[name]
        try:
            with handle.lock:  # the handle reuses its buffer and its selection
                handle.read(rows, out)
        except FileError:
            self.check_unchanged()
            raise
        except OSError as error:  # HDF5's error names neither file nor field
            self.check_unchanged()
            remedy = ""
            if "plugin" in str(error) or "filter" in str(error):
                remedy = '. If a filter is missing, run pip install "h5chunk[codecs]"'
            raise FileError(f"{printable(self.path)}: field {name!r} cannot be read: {error}{remedy}") from error
        self.check_unchanged()  # HDF5 returns zeros for the missing part of a truncated file

    def _handles(self) -> dict[str, Any]:
        """Return the datasets that this process has open, by field. Those of a forked parent are never used."""
        if self._opened is not None and self._opened[0] == os.getpid():
            return self._opened[1]
        handles: dict[str, Any] = {}
        self._opened = None
        with translate_errors(self.path):
            file = open_file(self.path)
            self.check_unchanged()
            for name, field in self.fields.items():
                if isinstance(field, Field) and field.is_text:
                    handles[name] = TextHandle(self.path, file, field.dataset)
                elif isinstance(field, VlenField):
                    handles[name] = VlenHandle(self.path, file, field)
                elif isinstance(field, RaggedField):
                    handles[name] = CsrHandle(file, field, self.indptr, self._caches.get(name), self.sums)
                elif isinstance(field, EncodedField):
                    handles[name] = EncodedHandle(self.path, file, field, self.sums)
                else:
                    band_samples = field.grid.band_samples or self.chunk_samples
                    handles[name] = _Handle(file, field, self._caches.get(name), band_samples, self.sums)
        self._opened = os.getpid(), handles
        return handles

    def check_metadata(self) -> None:
        """Read all metadata that is needed to read samples, but no samples. Raises FileError if it is damaged."""
        assert self.fingerprint is not None
        self._handles()
        self.close()

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            for handle in opened[1].values():
                handle.close()  # tracebacks of errors may refer to it

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened": None}


class _Handle(OpenFile):
    """An open dataset with a separate chunk cache."""

    def __init__(
        self, file: h5py.File, field: Field, cache: CacheSettings | None, band_samples: int, sums: Sums
    ) -> None:
        super().__init__(file)
        if cache is not None and field.element is not None:  # HDF5 caches whole elements
            scale = -(-field.element.item_bytes // field.element.num_bytes)
            cache = CacheSettings(cache.nslots, cache.nbytes * scale, cache.w0)
        self.id = open_dataset(file, field.dataset, cache)
        dataset = h5py.Dataset(self.id)
        self._checks: ChunkChecks | None = None
        if field.name in sums and dataset.size:
            self._checks = ChunkChecks(Path(file.filename), field.name, list_chunks(dataset), sums[field.name])
        self._clears = leaves_memory(dataset)
        self._space = self.id.get_space()
        # elements are read as they are stored, and HDF5 selects the member
        self._kind = packed_type(self.id.get_type(), field.member)
        self._element = element_of(self._kind, f"{printable(file.filename)}: {field.dataset!r}", field.member)
        self._own_shape = dataset.shape[1:]
        self._shape = field.sample_shape
        self._row_bytes = field.grid.sample_bytes
        self._band_samples = band_samples
        room = cache.nbytes if cache is not None else 0
        self._decodes_each_call = field.grid.filtered and field.grid.band_bytes > room
        self._scratch = np.empty((0, *self._shape), field.dtype)

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read rows chunk by chunk.

        A chunk is read with one call if that reads few unused rows, otherwise row by row.
        """
        if not len(rows):
            return
        if self._checks is not None:
            self._checks.check(descriptor_of(self._file), self._checks.of_rows(rows))
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        chunks = ordered // self._band_samples
        borders = np.flatnonzero(chunks[1:] != chunks[:-1]) + 1
        for start, stop in pairwise([0, *borders.tolist(), len(rows)]):
            first, last = int(ordered[start]), int(ordered[stop - 1]) + 1
            too_many = (last - first) * self._row_bytes > (stop - start - 1) * CALL_BYTES
            if stop - start == 1 or (too_many and not self._decodes_each_call):
                for index in range(start, stop):
                    self._read_run(int(ordered[index]), out[order[index] : order[index] + 1])
                continue
            if len(self._scratch) < last - first:
                self._scratch = np.empty((last - first, *self._shape), out.dtype)
            scratch = self._scratch[: last - first]
            self._read_run(first, scratch)
            out[order[start:stop]] = scratch[ordered[start:stop] - first]

    def _read_run(self, first: int, out: np.ndarray) -> None:
        count, is_plain = (len(out), *self._own_shape), self._element.is_plain
        stored = out if is_plain else np.empty(math.prod(count) * self._element.item_bytes, np.uint8)
        if self._clears:
            stored[...] = np.zeros((), stored.dtype)
        self._space.select_hyperslab((first, *(0,) * len(self._own_shape)), count)
        self.id.read(h5py.h5s.create_simple(count), self._space, stored, self._kind)
        if not is_plain:
            out[...] = self._element.convert(stored).reshape(out.shape)
