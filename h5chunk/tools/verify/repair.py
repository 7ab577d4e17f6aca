"""Rewrite bad chunks of a file of images from the images that it was converted from.

A chunk is made again with the options that the file records, from the samples that it names (of a file that was
appended to: with the options of their part), and written in its place only if its checksum is the one in the file: so a
repaired file is what it was, byte for byte. A process that is killed while a chunk is written leaves that chunk as bad
as it was, or half new: verify says so, and repairing goes on from there. No chunk that was right is ever written to.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, OutputError, SampleError, printable
from h5chunk.sources.images import ImageSource
from h5chunk.sources.kinds import ImageOptions
from h5chunk.sources.listing import Listing, list_images
from h5chunk.sources.manifest import list_manifest
from h5chunk.store.format.header import read_header
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.open import open_file
from h5chunk.store.write.new_file import write_at
from h5chunk.tools.verify.report import BadChunk

IMAGES = "images"
OPTIONS = ("size", "fit", "color", "layout", "animated")  # of decoding, as the file records them


def repair_chunks(
    path: Path, bad: list[BadChunk], source: str | os.PathLike[str], manifest: str | os.PathLike[str] | None
) -> tuple[list[BadChunk], list[BadChunk]]:
    """Rewrite bad chunks.

    Parameters
    ----------
    path : Path
    bad : list of BadChunk
    source : path
        The folder or archive of images.
    manifest : path, optional

    Returns
    -------
    (list of BadChunk, list of BadChunk)
        Those that were repaired; those that are still bad, and why.

    Raises
    ------
    FileError
        The file is not one of images that can be repaired.
    SourceError
        The source cannot be listed.
    OutputError
        The file cannot be written.
    """
    with open_file(path) as file:
        options = _options(file, path)
        maker = _Maker(file, path, options, source, manifest)
        repaired, left = [], []
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise OutputError(f"{printable(path)}: cannot be repaired in its place: {error.strerror}") from None
        try:
            with maker.source.session():
                for each in bad:
                    why = maker.why_not(each) or _write(maker, each, descriptor, path)
                    if why is None:
                        repaired.append(each)
                    else:
                        left.append(replace(each, what=f"{each.what} (not repaired: {why})"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return repaired, left


def _options(file: h5py.File, path: Path) -> dict[str, Any]:
    """Return the options that the file was converted with."""
    shown = printable(path)
    header = read_header(file)
    if header is None:
        raise FileError(f"{shown}: not written by h5chunk: nothing says what its chunks were made from")
    if header.kind:
        raise FileError(f"{shown}: holds a matrix, of which chunks cannot be made one by one: convert it again")
    try:
        options = header.options
        found = {name: options[name] for name in OPTIONS}
        found["split_folders"] = str(options.get("split_folders", "auto"))
        found["parts"] = [(int(part["first_index"]), str(part["fit"])) for part in options.get("appended", [])]
    except (ValueError, KeyError, TypeError):
        raise FileError(
            f"{shown}: does not say how its images were decoded, and only images are repaired: convert its source again"
        ) from None
    return found


def _write(maker: _Maker, each: BadChunk, descriptor: int, path: Path) -> str | None:
    """Rewrite a chunk; return the reason if that is impossible."""
    try:
        data = maker.make(each)
    except SampleError as error:
        return str(error)
    found = zlib.crc32(data)
    if found != each.expected:
        return f"the source gives {found:08x}: it has changed, or the checksum is damaged"
    try:
        write_at(descriptor, memoryview(data), each.offset)
    except OSError as error:
        raise OutputError(f"{printable(path)}: chunk {each.chunk} cannot be written: {error.strerror}") from None
    return None


class _Maker:
    """Maker of chunks as convert made them."""

    def __init__(
        self,
        file: h5py.File,
        path: Path,
        options: dict[str, Any],
        source: str | os.PathLike[str],
        manifest: str | os.PathLike[str] | None,
    ) -> None:
        splits = options.pop("split_folders")
        listing = list_manifest(manifest, source) if manifest is not None else list_images(source, split_folders=splits)
        size, parts = options.pop("size"), options.pop("parts")
        self.source = ImageSource(listing, ImageOptions(size=None if size is None else tuple(size), **options))
        self._parts = [(first, self._of_part(fit, options, file)) for first, fit in parts]
        self._file = file
        self._class_names = _class_names(file)
        try:
            self._index = file[f"{GROUP}/source_index"][()]
            ends = file[f"{GROUP}/source_name_ends"][()]
            self._ends = np.concatenate(([0], ends))
            self._names = file[f"{GROUP}/source_names"]
        except (KeyError, TypeError, OSError) as error:
            raise FileError(f"{printable(path)}: does not say where its samples came from: {error}") from None
        self._by_name: dict[bytes, int] | None = None

    def _of_part(self, fit: str, options: dict[str, Any], file: h5py.File) -> ImageSource:
        """Return the source of images that were appended, in the size of the file."""
        shape = file[IMAGES].shape
        size = shape[2:] if options["layout"] == "nchw" else shape[1:3]
        return ImageSource(self.source.listing, ImageOptions(**{**options, "fit": fit, "size": tuple(size)}))

    def _source(self, row: int) -> ImageSource:
        """Return the source that decodes a row as it was decoded."""
        index, found = int(self._index[row]), self.source
        for first, source in self._parts:
            found = source if index >= first else found
        return found

    def why_not(self, each: BadChunk) -> str | None:
        """Return the reason why a chunk cannot be made; None if it can."""
        dataset = self._file[each.field]
        if each.expected is None:
            return "there is no checksum to compare it with"
        if dataset.id.get_create_plist().get_nfilters():
            return "it is compressed: repack the file again"
        if dataset.chunks is None or dataset.chunks[1:] != dataset.shape[1:]:
            return "it does not hold whole samples"
        if each.field != IMAGES and each.field not in self.source.listing.columns:
            return "the source says nothing of it: give the manifest that it was converted with"
        return None

    def make(self, each: BadChunk) -> bytes:
        """Make the bytes of a chunk.

        Raises
        ------
        SampleError
            A sample is not in the source any more, or cannot be decoded.
        """
        dataset = self._file[each.field]
        values = np.zeros(dataset.chunks, dataset.dtype)
        for place, row in enumerate(range(each.first_sample, each.last_sample + 1)):
            name = self._name(row)
            index = self._find(row, name)
            try:
                if each.field == IMAGES:
                    self._source(row).read_into(index, {IMAGES: values[place]})
                else:
                    values[place] = self._value(each.field, index)
            except SampleError as error:
                raise SampleError(f"{printable(name)}: {error}") from None
        return values.tobytes()

    def _name(self, row: int) -> bytes:
        return bytes(self._names[int(self._ends[row]) : int(self._ends[row + 1])])

    def _find(self, row: int, name: bytes) -> int:
        """Find a sample in the source: where it was, or by its name."""
        names = self.source.listing.names
        first = max((first for first, _ in self._parts if first <= self._index[row]), default=0)
        index = int(self._index[row]) - first
        if index < len(names) and names[index] == name:
            return index
        if self._by_name is None:
            self._by_name = {each: number for number, each in enumerate(names)}
        if name not in self._by_name:
            raise SampleError(f"{printable(name)}: is not in the source any more")
        return self._by_name[name]

    def _value(self, field: str, index: int) -> Any:
        """Return the value of a column; labels count the classes as the file names them."""
        listing: Listing = self.source.listing
        value = listing.columns[field][index]
        if field != "labels" or not listing.class_names:
            return value
        name = listing.class_names[int(value)]
        if name not in self._class_names:
            raise SampleError(f"is of class {name!r}, which the file does not have")
        return self._class_names.index(name)


def _class_names(file: h5py.File) -> list[str]:
    header = read_header(file)
    return list(header.class_names) if header is not None else []
