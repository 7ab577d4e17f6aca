"""Read rows of any HDF5 file whose samples are along the first axis, through HDF5's chunk cache.

A reader can be sent to other processes, and each process opens the file at its first read. The rows of a request are
sorted and read chunk by chunk, so that a request reads no chunk twice.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import FieldError, OptionError, UnsupportedError, printable
from h5chunk.stamp import stamp_of
from h5chunk.store.format.header import checksums_of, lost_fields, read_header
from h5chunk.store.hdf5.chunk_table import list_chunks
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import descriptor_of, opened
from h5chunk.store.read.checksums import FIRST, OFF, ChunkChecks, read_sums
from h5chunk.store.read.fields import Contents, Field, Stored, default_fields, describe_field, with_members
from h5chunk.store.read.ragged import ImagesField, ImageSizes, RaggedField, SeriesField, read_image_sizes
from h5chunk.store.read.samples import Part
from h5chunk.store.read.source import Source

LABELS = "labels"


def _check_lengths(path: Path, fields: Collection[Field | RaggedField]) -> None:
    """Raise FieldError if fields differ in length."""
    shapes = [field.grid.shape for field in fields]
    if len({shape[0] for shape in shapes}) == 1:
        return
    listed = ", ".join(f"{field.dataset!r} has {field.grid.shape[0]}" for field in fields)
    longest = max(fields, key=lambda field: field.grid.shape[0])
    remedy = (
        "name fields of one length; if each sample is a run of rows, name the dataset of their offsets, as in "
        f"offsets={{{longest.name!r}: 'DATASET'}}; if only the first rows belong to samples, copy these: "
        f"file['NEW'] = file[{longest.dataset!r}][:{min(shape[0] for shape in shapes)}]"
    )
    num_rows = {shape[0] for shape in shapes}
    for field in fields:
        if isinstance(field, SeriesField) and num_rows == {field.num_rows, field.swapped_rows}:
            remedy = field.swap
    if len({shape[-1] for shape in shapes}) == 1 and max(map(len, shapes)) > 1:
        remedy = (
            "name fields of one length; the last axes are equal, so if the samples are along these, as in files of "
            "MATLAB, pass sample_axis=-1 to ChunkDataset, or an axis for each of some fields, as in "
            "sample_axis={'images': -1} (otherwise, make transposed copies, file['NEW'] = file['OLD'][:].T)"
        )
    raise FieldError(f"{printable(path)}: fields differ in length ({listed}): {remedy}")


class H5Reader(Source):
    """A source of the rows of datasets of one file. `h5chunk.store.read.fileset.FileSet` joins several files.

    ``fields`` maps field names to the paths of datasets, of groups with a CSR matrix, or to `FlatSamples`. By default
    these are the fields that the file records, or else ``images`` or the matrix ``X``, and ``labels``. ``checksums`` is
    when chunks of an h5chunk file are compared with their checksums: "off", "first" (at this process's first read) or
    "always". ``file`` is the open file, if it is open already. Unless ``are_alike`` is False, fields must have equal
    lengths, and a table stands for its columns.
    """

    joined_as = "rows of datasets"
    why_no_labels: str = ""  # the reason why labels are not read by default, or empty

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Stored | None = None,
        *,
        trusted: bool = False,
        checksums: str = OFF,
        decode: str = "",
        file: h5py.File | None = None,
        are_alike: bool = True,
    ) -> None:
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
                if not isinstance(name, str) and not hasattr(name, "describe"):
                    raise OptionError(f"fields contains {name!r}: pass names of datasets")
            contents = Contents(file, Guard(path, trusted), header, decode)
            found: dict[str, Field | RaggedField] = {}
            for name, dataset in (with_members(contents, fields) if are_alike else fields).items():
                may_miss = is_default and header is None and name == LABELS
                try:
                    described = describe_field(contents, name, dataset)
                    if may_miss and described.is_text:
                        raise UnsupportedError(
                            f"{printable(path)}: {dataset!r} has strings of variable length: to read them as str, name "
                            f"the fields, such as fields={[*found, name]}"
                        )
                    found[name] = described
                except UnsupportedError as error:
                    if not may_miss or not found:
                        raise
                    self.why_no_labels = str(error)
            sums = read_sums(file, path, found, header, checksums)
            if is_default and checksums != OFF and (lost := lost_fields(file)):
                raise OptionError(
                    f"checksums is {checksums!r}, but {printable(path)} has checksums of {printable(lost[0])!r}, "
                    "which does not exist: give the field its name back, or name the fields to read (fields=[...])"
                )
        if are_alike:
            _check_lengths(path, found.values())
        checksums = FIRST if sums and checksums == OFF else checksums
        how: dict[str, Any] = {"trusted": trusted, "checksums": checksums, "sums": sums}
        num_samples = next(iter(found.values())).grid.shape[0]
        super().__init__(path, found, num_samples, stamp=stamp, header=header, is_rows=True, **how)
        self.decode = decode

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 of the names, shapes and dtypes of the fields and of all checksums, which is equal for copies.

        Only h5chunk files have checksums. Other HDF5 files that differ only in their values have equal fingerprints.
        """
        facts = [
            (name, field.dataset, tuple(map(int, field.grid.shape)), field.dtype.str, *getattr(field, "more_facts", ()))
            for name, field in self.fields.items()
        ]
        fingerprint = zlib.crc32(repr(facts).encode())
        if self.header is not None:
            with opened(self.path) as file:
                self.check_unchanged()
                fingerprint = checksums_of(file, fingerprint)
        return fingerprint

    def _read_indptr(self, name: str) -> np.ndarray:
        field = self.ragged_fields[name]
        with opened(self.path) as file:
            self.check_unchanged()
            self._check_table(file, field, field.pointers)
            return field.read_indptr(file, self.path)

    def _read_image_sizes(self, name: str) -> ImageSizes:
        field, offsets = self.ragged_fields[name], self.indptr_of(name)
        assert isinstance(field, ImagesField)
        with opened(self.path) as file:
            self.check_unchanged()
            for table in ImageSizes._fields:
                self._check_table(file, field, table)
            return read_image_sizes(file[field.dataset], self.path, field, offsets)

    def _check_table(self, file: h5py.File, field: RaggedField, table: str) -> None:
        """Verify the checksum of a table of a field, unless ``checksums`` is "off"."""
        name = f"{field.name}/{table}"
        if name in self.sums:
            chunks = replace(list_chunks(file[field.path_of(table)]), shape=(field.num_rows,))  # for messages
            checks = ChunkChecks(self.path, name, chunks, self.sums[name])
            checks.check(descriptor_of(file), np.arange(len(chunks)))

    def stored_parts(self, opening: Any, number: int, names: Collection[str]) -> dict[str, Part]:
        self.check_unchanged()
        with opened(self.path) as file:
            self.check_unchanged()
            stored = opening.file(self, file, number)
            return {name: self.fields[name].part(stored) for name in names}
