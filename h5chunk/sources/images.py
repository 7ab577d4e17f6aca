"""A source of images: a listing, a container and the options to decode with."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL
from PIL import Image

from h5chunk.errors import SampleError, SourceError, as_text
from h5chunk.sources.decode import ImageOptions, decode, pillow_limits, sample_shape, write_pixels
from h5chunk.sources.listing import Listing


@dataclass
class ImageSource:
    """Images by number. Travels to worker processes.

    Attributes
    ----------
    listing : Listing
    options : ImageOptions
    """

    listing: Listing
    options: ImageOptions

    def __len__(self) -> int:
        return len(self.listing.names)

    def name(self, index: int) -> str:
        """Where sample ``index`` comes from, for people."""
        return as_text(self.listing.names[index])

    def session(self) -> AbstractContextManager[None]:
        """What must be in force while samples are read."""
        return pillow_limits(self.options.max_pixels)

    def stamp(self, index: int) -> tuple[int, ...]:
        """What changes when the bytes of sample ``index`` do."""
        return self.listing.container.stamp(index, self.listing.names[index])

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        """All that, with the bytes of each sample, decides its pixels: what JSON has, and blobs."""
        names = self.listing.names
        facts = {"decoder": PIL.__version__, "options": vars(self.options)}
        return facts, (names.blob, names.offsets.tobytes())

    def read_into(self, index: int, out: np.ndarray) -> tuple[str, ...]:
        """Decode sample ``index`` into ``out`` (uint8, a sample's shape); give what to count for the report.

        Raises
        ------
        SampleError
            The image is refused, or of another shape than ``out``.
        """
        image, notes = self._decode(index)
        shape = sample_shape(image, self.options.layout)
        if shape != out.shape:
            raise ShapeError(f"is {shape_text(shape)} but others are {shape_text(out.shape)}")
        write_pixels(image, self.options.layout, out)
        return notes

    def _decode(self, index: int) -> tuple[Image.Image, tuple[str, ...]]:
        listing = self.listing
        return decode(listing.container.read(index, listing.names[index]), self.options)

    def shape_of(self, index: int) -> tuple[int, int, int]:
        """Shape of sample ``index``: (C, H, W) or (H, W, C)."""
        with self.session():
            return sample_shape(self._decode(index)[0], self.options.layout)

    def first_shape(self, skip: bool) -> tuple[int, tuple[int, int, int]]:
        """The first sample that can be read, and its shape, which all samples must have.

        Raises
        ------
        SampleError
            It cannot be read and ``skip`` is false.
        SourceError
            None of the samples can be read.
        """
        for index in range(len(self)):
            try:
                return index, self.shape_of(index)
            except SampleError as error:
                if not skip:
                    raise SampleError(f"{self.name(index)}: {error}") from None
                reason = f"{self.name(index)}: {error}"
        raise SourceError(f"none of the {len(self)} images can be used; the last: {reason}")

    def disagreement(self, shape: tuple[int, ...]) -> str:
        """Names the first two samples that do not agree; called once some are known not to."""
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
            return f"the images do not all have the shape {shape_text(shape)}, and changed since"
        remedy = "give a size and how to fit it (--size H W --fit stretch|crop|pad)"
        if self.options.color == "keep" and (self.options.size or sorted(first[1])[1:] == sorted(other[1])[1:]):
            remedy = "give the colours that all shall have (--color rgb|gray)"
        return (
            f"images differ: {self.name(first[0])} is {shape_text(first[1])}, {self.name(other[0])} is "
            f"{shape_text(other[1])}: {remedy}"
        )


class ShapeError(SampleError):
    """An image of another shape than the rest, which no option allowed."""


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape for people.

    >>> shape_text((3, 224, 224))
    '3 x 224 x 224'
    """
    return " x ".join(map(str, shape))
