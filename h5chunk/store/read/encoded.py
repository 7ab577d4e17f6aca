"""Read frames that are stored as JPEG or PNG images, one in each row of a dataset, and decode them.

The rows are arrays of bytes of variable length, or are padded with zeros to the same length. Images are recognised by
their first bytes. The functions that decode images are passed in as a `FrameDecoder`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5chunk.errors import FileError, SampleError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.store.hdf5.chunk_table import NotDirect, is_vlen, list_chunks
from h5chunk.store.hdf5.guard import MAX_RATIO
from h5chunk.store.hdf5.open import errors_as
from h5chunk.store.hdf5.strings import POINTER, find_in_heap
from h5chunk.store.read.fields import Contents, Field, describe_field
from h5chunk.store.read.ragged import RaggedField
from h5chunk.store.read.samples import SLACK_BYTES, Part, StoredFile
from h5chunk.store.read.vlen import VlenField, open_heap

MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # the first bytes of JPEG and PNG images
HEAD_BYTES = 1 << 20  # bytes at the start of the first image that are read to parse its header


Shape = tuple[int, int, int]  # height, width and channels


class FrameDecoder(NamedTuple):
    """The functions that decode frames. Both can be pickled.

    ``shape_of(data)`` returns the shape of an encoded image, (n,) uint8, according to its header. It raises SampleError
    if the image is damaged or not supported. ``decode(data, bounds, shape, out, places)`` decodes each image
    ``data[bounds[i, 0] : bounds[i, 1]]`` to ``out[places[i]]``, (m, H * W * C) uint8. It returns None, or else the
    index of an image that is damaged or has another shape, and a text that says what is wrong with it.
    """

    shape_of: Callable[[np.ndarray], Shape]
    decode: Callable[[np.ndarray, np.ndarray, Shape, np.ndarray, np.ndarray], tuple[int, str] | None]


@dataclass(frozen=True, kw_only=True)
class EncodedField(Field):
    """A field of images that are decoded: ``grid`` and ``dtype`` describe the pixels, (n, H, W, C) uint8.

    ``stored`` describes the dataset, which has an encoded image in each row.
    """

    stored: Field | VlenField
    decoder: FrameDecoder

    @property
    def noun(self) -> str:
        return f"JPEG or PNG images in {self.stored.noun}"

    def part(self, file: StoredFile) -> Part:
        part, num_rows = self.stored.part(file), self.grid.shape[0]
        sizes = np.full(num_rows, self.stored.grid.sample_bytes) if part.sizes is None else part.sizes
        where = f"{printable(file.path)}: {self.dataset!r}"
        return part._replace(sizes=sizes, texts=(where,))


@dataclass(frozen=True)
class FrameDataset:
    """A dataset whose rows are decoded if they are JPEG or PNG images."""

    dataset: str
    decoder: FrameDecoder

    def describe(self, contents: Contents, name: str) -> Field | RaggedField:
        """Describe a field as `describe_field` does, or as an `EncodedField` if its rows are images to be decoded.

        Rows are images if the first row and, if all have one length, the last row begin with the `MAGIC` of an image.
        Raises FileError if the first image is damaged or not supported.
        """
        field = describe_field(contents, name, self.dataset)
        heads = _heads(contents, field)
        if not _are_images(heads):
            return field
        try:
            shape = self.decoder.shape_of(np.frombuffer(heads[0], np.uint8))
            if math.prod(shape) > len(heads[0]) * MAX_RATIO + SLACK_BYTES:
                raise SampleError(f"claims {shape[0]} x {shape[1]} pixels in {len(heads[0])} bytes, so it is damaged")
        except SampleError as error:
            raise FileError(f"{contents.where(field.dataset.strip('/'))}, frame 0: {error}") from None
        return _decoded(field, shape, self.decoder)


def holds_images(contents: Contents, name: str, dataset: h5py.Dataset) -> bool:
    """Return whether rows of the dataset at the path ``name`` are images to be decoded; False if damaged."""
    has_bytes = (dataset.dtype == np.uint8 and dataset.ndim == 2) or dataset.dtype.kind == "S"
    try:
        if not has_bytes and not is_vlen(dataset):
            return False
        return _are_images(_heads(contents, describe_field(contents, "", name)))
    except FileError:
        return False


def _are_images(heads: list[bytes]) -> bool:
    return bool(heads) and all(head.startswith(MAGIC) for head in heads)


def _heads(contents: Contents, field: Field | RaggedField) -> list[bytes]:
    """Read the beginning of the first row and, if all rows have one length, of the last row.

    Returns an empty list if there are no rows, or if they do not consist of bytes.
    """
    file, num_rows = contents.file, field.grid.shape[0]
    if not num_rows:
        return []
    if isinstance(field, VlenField):
        return [_first_row(contents, field)] if field.value_dtype == np.uint8 else []
    is_text = field.dtype.kind == "S" and not field.sample_shape
    if isinstance(field, Field) and (field.is_text or field.member):
        return []
    if not is_text and (field.dtype != np.uint8 or len(field.sample_shape) != 1):
        return []
    with suppress(NotDirect):
        list_chunks(file[field.dataset])  # raises FileError for chunks on which HDF5 would crash
    with errors_as(FileError, f"{contents.where(field.dataset)} cannot be read"):
        return [bytes(file[field.dataset][row])[:HEAD_BYTES] for row in (0, num_rows - 1)]


def _decoded(stored: Any, shape: Shape, decoder: FrameDecoder) -> EncodedField:
    """Describe the pixels of images. The grid has the dataset's chunks if HDF5 compresses them, too."""
    num_rows, grid = stored.grid.shape[0], stored.grid
    is_filtered = isinstance(stored, Field) and grid.filtered
    pixels = ChunkGrid((num_rows, *shape), (grid.chunks[0], *shape) if is_filtered else None, 1, is_filtered)
    place = stored.name, stored.dataset.strip("/")
    return EncodedField(*place, pixels, np.dtype(np.uint8), "NHWC", stored=stored, decoder=decoder)


def _first_row(contents: Contents, field: VlenField) -> bytes:
    """Read the beginning of the first row of arrays of variable length, without HDF5."""
    heap, pointer = open_heap(contents.file, contents.path, field.dataset), np.frombuffer(field.first, POINTER)
    length = int(pointer["length"][0])
    place = int(find_in_heap(heap, pointer, np.array([length]))[0])
    return heap.read(place - heap.base, min(length, HEAD_BYTES)) if length else b""
