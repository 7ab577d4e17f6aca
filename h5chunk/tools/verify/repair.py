"""Rewrite damaged chunks of an image file from the images that it was converted from.

A chunk is rebuilt from its recorded samples, with the options that the file records. It is written only if it matches
the stored checksum, so a repaired file equals the original byte for byte. If the process is killed while it writes a
chunk, verify still reports this chunk, and another repair rewrites it. Undamaged chunks are never written to.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, SampleError, printable
from h5chunk.remote.pages import write_at
from h5chunk.sample_source import AnyImage
from h5chunk.sources.images import ImageSource, list_source
from h5chunk.sources.kinds import ImageOptions, ImageSourceOptions
from h5chunk.store.format.header import read_header
from h5chunk.store.format.spec import GROUP, IMAGE_TABLES
from h5chunk.store.hdf5.open import open_file
from h5chunk.store.read.scan import Damage
from h5chunk.store.write.part_file import writing

IMAGES = "images"


def repair_chunks(
    path: Path, bad: list[Damage], source: str | os.PathLike[str], manifest: str | os.PathLike[str] | None
) -> tuple[list[Damage], list[Damage]]:
    """Rewrite damaged chunks. Returns the repaired chunks, and those that could not be repaired, with the reasons."""
    repaired, left = [], []
    bad = sorted(bad, key=lambda damage: damage.field == f"{IMAGES}/data")  # after the offsets, which divide the bytes
    with open_file(path) as file, writing(path):
        maker = _ChunkMaker(file, path, source, manifest)
        with path.open("r+b", buffering=0) as target, maker.source.session():
            for damage in bad:
                try:
                    write_at(target.fileno(), maker.make(damage), damage.offset)
                    repaired.append(damage)
                except SampleError as error:
                    left.append(replace(damage, problem=f"{damage.problem} (not repaired: {error})"))
            os.fsync(target.fileno())
    return repaired, left


class _ChunkMaker:
    """Rebuild the chunks of a file from its source, exactly as convert wrote them."""

    def __init__(
        self,
        file: h5py.File,
        path: Path,
        source: str | os.PathLike[str],
        manifest: str | os.PathLike[str] | None,
    ) -> None:
        label, header = printable(path), read_header(file)
        if header is None:
            raise FileError(f"{label}: was not written by h5chunk, so the source of its chunks is unknown")
        if header.kind:
            raise FileError(f"{label}: contains a matrix, whose chunks cannot be rebuilt one by one: convert it again")
        try:
            options = ImageOptions.of_recorded(header.options)
            splits = "auto" if manifest is not None else str(header.options.get("split_folders", "auto"))
            columns, texts = (
                tuple(map(str, header.options.get(name, ()))) or None for name in ("columns", "text_columns")
            )
            encoding = header.options.get("encoding")
        except (ValueError, KeyError, TypeError):
            raise FileError(
                f"{label}: does not record how images were decoded, and only images can be repaired: convert its "
                "source again"
            ) from None
        listed = ImageSourceOptions(
            manifest=manifest,
            split_folders=splits,
            mask_column=options.mask_column,
            columns=columns,
            text_columns=texts,
            encoding=None if encoding is None else str(encoding),
        )
        self._listing = list_source(source, listed, skips=True)
        self.source = ImageSource(self._listing, options)
        self._file, self._class_names = file, list(header.class_names)
        try:
            self._index = file[f"{GROUP}/source_index"][()]
            self._ends = np.concatenate(([0], file[f"{GROUP}/source_name_ends"][()]))
            self._names = file[f"{GROUP}/source_names"]
        except (KeyError, TypeError, OSError) as error:
            raise FileError(f"{label}: does not record the names of its samples ({error}): convert it again") from None
        self._by_name: dict[bytes, int] | None = None

    def make(self, damage: Damage) -> bytes:
        """Return the bytes of a chunk. Raises SampleError if they cannot be reproduced exactly."""
        dataset = self._file[damage.field]
        if damage.expected is None:
            raise SampleError("the file has no checksum of this chunk")
        if dataset.id.get_create_plist().get_nfilters():
            raise SampleError("the chunk is compressed: convert the source again")
        group, _, table = damage.field.partition("/")
        if group == IMAGES and table == "data":
            return self._checked(damage, self._kept_bytes(dataset, damage.chunk))
        if group == IMAGES and table in IMAGE_TABLES:
            return self._checked(damage, self._kept_table(table))
        if dataset.chunks is None or dataset.chunks[1:] != dataset.shape[1:]:
            raise SampleError("the chunk contains parts of samples: convert the source again")
        is_image = damage.field == IMAGES or damage.field in self._listing.others
        if not is_image and damage.field not in self._listing.columns:
            raise SampleError("the source lacks this field: add --manifest, with the manifest of the conversion")
        values = np.zeros(dataset.chunks, dataset.dtype)
        for position, row in enumerate(range(damage.first_sample, damage.last_sample + 1)):
            index, name = self._sample(row)
            try:
                if is_image:
                    self.source.read_into(index, {damage.field: values[position]})
                else:
                    values[position] = self._value(damage.field, index)
            except SampleError as error:
                raise SampleError(f"{printable(name)}: {error}") from None
        return self._checked(damage, values.tobytes())

    def _sample(self, row: int) -> tuple[int, bytes]:
        """Return the index of a row's image in the source, and its name."""
        name = bytes(self._names[int(self._ends[row]) : int(self._ends[row + 1])])
        return self._find(int(self._index[row]), name), name

    def _kept_image(self, row: int) -> AnyImage:
        """Return a kept image as convert stored it: the content of its file, or its pixels."""
        index, name = self._sample(row)
        try:
            return self.source.read_any(index)
        except SampleError as error:
            raise SampleError(f"{printable(name)}: {error}") from None

    def _kept_bytes(self, data: h5py.Dataset, chunk: int) -> bytes:
        """Return the bytes of a chunk of kept images, which may begin and end within an image."""
        offsets = self._file[f"{IMAGES}/offsets"][()].astype(np.int64)
        first = chunk * data.chunks[0]
        last = min(first + data.chunks[0], len(data))
        begin, end = np.searchsorted(offsets, first, "right") - 1, np.searchsorted(offsets, last, "left")
        parts = []
        for row in range(int(begin), int(end)):
            stored = self._kept_image(row).data
            if len(stored) != offsets[row + 1] - offsets[row]:
                raise SampleError(f"image {row} has {len(stored)} bytes in the source, so it has changed")
            parts.append(stored)
        skipped = first - int(offsets[begin])
        return b"".join(parts)[skipped : skipped + last - first].ljust(data.chunks[0], b"\0")

    def _kept_table(self, table: str) -> bytes:
        """Return the offsets, or the sizes or orientations, of all kept images."""
        images = (self._kept_image(row) for row in range(len(self._index)))
        if table == "offsets":
            numbers = [0, *accumulate(len(image.data) for image in images)]
        else:
            numbers = [getattr(image, table.removesuffix("s")) for image in images]
        return np.array(numbers).astype(IMAGE_TABLES[table]).tobytes()

    def _checked(self, damage: Damage, data: bytes) -> bytes:
        """Return the bytes if they match the checksum of the chunk. Otherwise raise SampleError."""
        actual = zlib.crc32(data)
        if actual != damage.expected:
            raise SampleError(
                f"the source gives the checksum {actual:08x}, not {damage.expected:08x}, so it has changed, or the "
                "stored checksum is damaged"
            )
        return data

    def _find(self, index: int, name: bytes) -> int:
        """Return the index of a sample in the source.

        This is ``index`` if the sample there has this name; otherwise, the sample is found by its name.
        """
        names = self._listing.names
        if index < len(names) and names[index] == name:
            return index
        if self._by_name is None:
            self._by_name = {known: number for number, known in enumerate(names)}
        if name not in self._by_name:
            raise SampleError(f"{printable(name)} is no longer in the source")
        return self._by_name[name]

    def _value(self, field: str, index: int) -> Any:
        """Return the value of a sample in a column of the source. A label becomes the code of its class in the file."""
        value, class_names = self._listing.columns[field][index], self._listing.class_names
        if field != "labels" or not class_names:
            return value
        name = class_names[int(value)]
        if name not in self._class_names:
            raise SampleError(f"its class {name!r} is not in the file")
        return self._class_names.index(name)
