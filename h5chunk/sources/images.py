"""Images by number: a listing, its container, and the options to decode with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL
from PIL import Image

from h5chunk.errors import SampleError, ShapeError, SourceError, as_text
from h5chunk.source import OpenContext, SampleField, shape_text
from h5chunk.sources.decode import decode, pillow_limits, sample_shape, write_pixels
from h5chunk.sources.kinds import ImageOptions, ImageSourceOptions
from h5chunk.sources.listing import Listing, Names, list_images
from h5chunk.sources.manifest import list_manifest
from h5chunk.sources.recognise import is_path

IMAGES = "images"
LABELS = "labels"


@dataclass
class ImageSource:
    """Images by number, of one shape: a `h5chunk.source.SampleSource`.

    Attributes
    ----------
    listing : Listing
    decoding : ImageOptions
    split_folders : {"auto", "yes", "no"}
        Whether the top folders of the source are splits, as the file's header records it.
    shape : tuple of int
        Of every sample: (C, H, W) or (H, W, C). Known once `settle_shape` was called, or given.
    """

    listing: Listing
    decoding: ImageOptions
    split_folders: str = "auto"
    shape: tuple[int, ...] = ()

    kind = IMAGES
    noun = "images"
    Options = ImageSourceOptions

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        """Whether a source is a path: this kind is asked last, and its error says what images can be in."""
        return is_path(source)

    @classmethod
    def open(cls, source: Any, options: ImageSourceOptions, context: OpenContext) -> ImageSource:
        """List the images, and take the shape of the first."""
        splits = options.split_folders
        if options.manifest is not None:
            listing = list_manifest(options.manifest, source, context.report_found)
        else:
            listing = list_images(source, context.report_found, split_folders=splits)
            splits = "yes" if "split" in listing.columns else splits
        decoding = ImageOptions(**{name: getattr(options, name) for name in ImageOptions.names()})
        images = cls(listing, decoding, splits)
        images.settle_shape(context.skips_bad_samples)
        return images

    @property
    def fields(self) -> Mapping[str, SampleField]:
        return {IMAGES: SampleField(self.shape, np.dtype(np.uint8), self.decoding.layout.upper())}

    @property
    def columns(self) -> Mapping[str, np.ndarray]:
        return self.listing.columns

    @property
    def categories(self) -> Mapping[str, list[str]]:
        return {LABELS: self.listing.class_names} if self.listing.class_names else {}

    @property
    def names(self) -> Names:
        return self.listing.names

    @property
    def options(self) -> Mapping[str, Any]:
        return self.decoding.recorded() | {"split_folders": self.split_folders}

    @property
    def ignored(self) -> Sequence[str]:
        return self.listing.ignored

    @property
    def notes(self) -> Sequence[str]:
        return self.listing.notes

    def __len__(self) -> int:
        return len(self.listing.names)

    def name(self, index: int) -> str:
        """Return the path of sample ``index`` below the source."""
        return as_text(self.listing.names[index])

    def session(self) -> AbstractContextManager[None]:
        """Return Pillow's limits, which must be in force while samples are read."""
        return pillow_limits(self.decoding.max_pixels)

    def stamp(self, index: int) -> tuple[int, ...]:
        """Return numbers that change when the bytes of sample ``index`` do."""
        return self.listing.container.stamp(index, self.listing.names[index])

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        """Return all that, with the bytes of each sample, decides its pixels: facts for JSON, and blobs."""
        names = self.listing.names
        facts = {"decoder": PIL.__version__, "options": vars(self.decoding)}
        return facts, (names.blob, names.offsets.tobytes())

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Decode sample ``index`` into ``out["images"]`` (uint8); return what the report shall count.

        Raises
        ------
        SampleError
            The image is refused; `ShapeError` if it has another shape than the array.
        """
        pixels = out[IMAGES]
        image, notes = self._decode(index)
        shape = sample_shape(image, self.decoding.layout)
        if shape != pixels.shape:
            raise ShapeError(f"is {shape_text(shape)} but others are {shape_text(pixels.shape)}")
        write_pixels(image, self.decoding.layout, pixels)
        return notes

    def _decode(self, index: int) -> tuple[Image.Image, tuple[str, ...]]:
        listing = self.listing
        return decode(listing.container.read(index, listing.names[index]), self.decoding)

    def shape_of(self, index: int) -> tuple[int, int, int]:
        """Return the shape of sample ``index``: (C, H, W) or (H, W, C)."""
        with self.session():
            return sample_shape(self._decode(index)[0], self.decoding.layout)

    def settle_shape(self, skip: bool) -> int:
        """Take the shape of the first sample that can be read, which all samples must have; return its number.

        Raises
        ------
        SampleError
            It cannot be read and ``skip`` is false.
        SourceError
            None of the samples can be read.
        """
        for index in range(len(self)):
            try:
                self.shape = self.shape_of(index)
                return index
            except SampleError as error:
                if not skip:
                    raise SampleError(f"{self.name(index)}: {error}") from None
                reason = f"{self.name(index)}: {error}"
        raise SourceError(f"none of the {len(self)} images can be used; the last: {reason}")

    def disagreement(self) -> str:
        """Name the first two samples of different shapes and the remedy; called once a `ShapeError` was raised."""
        first = other = None
        for index in range(len(self)):
            try:
                found = self.shape_of(index)
            except SampleError:
                continue
            if first is None:
                first = index, found
            elif found != first[1]:
                other = index, found
                break
        if first is None or other is None:
            return f"the images do not all have the shape {shape_text(self.shape)}, and changed since"
        remedy = "give a size and how to fit it (--size H W --fit stretch|crop|pad)"
        if self.decoding.color == "keep" and (self.decoding.size or sorted(first[1])[1:] == sorted(other[1])[1:]):
            remedy = "give the colours that all shall have (--color rgb|gray)"
        return (
            f"images differ: {self.name(first[0])} is {shape_text(first[1])}, {self.name(other[0])} is "
            f"{shape_text(other[1])}: {remedy}"
        )
