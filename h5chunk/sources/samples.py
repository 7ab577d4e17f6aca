"""The base class of sources whose samples are numbers, arrays, strings or images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from h5chunk.errors import OptionError, SampleError, ShapeError, SourceError, names_text, printable
from h5chunk.sample_source import AnyImage, SampleField, SampleSource, shape_text
from h5chunk.sources.any_size import make_any_image
from h5chunk.sources.decode import Decoded, decode, pillow_limits, sample_shape, write_pixels
from h5chunk.sources.kinds import ImageOptions
from h5chunk.sources.masks import MASK_FIELDS, find_masks, look_at, may_have_masks
from h5chunk.sources.options import Options

IMAGES, LABELS, DATA, SPLIT = "images", "labels", "data", "split"  # names of fields
PADDING = (
    "pad arrays whose lengths differ, such as the boxes in an image, to one length, for example with zeros, and store "
    "their number as a further field"
)
PROBES = 24  # number of images from which the average size in bytes is estimated
MASK_PROBES = 4  # number of samples that show which images are masks


class Samples(SampleSource):
    """Base class of sources of samples. Subclasses open and read a source; this class decodes its images."""

    noun: ClassVar[str]  # name of the contents of such a source, for messages
    Options: ClassVar[type[Options]] = Options
    decoding: ImageOptions = ImageOptions()

    def values(self, index: int) -> Mapping[str, Any]:
        """Read the values of a sample by field: arrays, Pillow images, or encoded images as bytes.

        Raises SampleError if the sample cannot be read.
        """
        raise NotImplementedError

    def session(self) -> AbstractContextManager[None]:
        return pillow_limits(self.decoding.max_pixels)

    @property
    def masks(self) -> Sequence[str]:
        """Names of the fields that contain masks if they contain images."""
        return MASK_FIELDS if self.decoding.mask_column is None else self.decoding.mask_column

    def part_name(self, index: int, name: str) -> str:
        """Return the origin of a field of a sample, such as the path of its mask, for messages."""
        return f"its {printable(name)!r}"

    def read_any(self, index: int) -> AnyImage:
        _, image, others = self._only_image(index)
        return make_any_image(image, self.decoding)._replace(values=others)

    def _only_image(self, index: int) -> tuple[str, bytes | Image.Image, dict[str, np.ndarray]]:
        """Return the field and value of the only image of a sample, and its other values: numbers and strings."""
        values = dict(self.values(index))
        images = [name for name, value in values.items() if isinstance(value, (bytes, Image.Image))]
        if len(images) == 1:
            name, image = images[0], values.pop(images[0])
            if all(not value.shape for value in values.values()):
                return name, image, values
        names = names_text(self.values(index))
        raise SourceError(
            f"samples have the fields {names}, but keep_encoded and keep_size require one image per sample, and "
            "otherwise only numbers or strings: leave other fields out; or resize all images and their masks to one "
            "size, such as one above that of random crops (--size H,W --fit crop)"
        )

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        if self.decoding.form:
            return self.read_any(index).notes
        values = self.values(index)
        images = self._decode(index, values)
        notes: tuple[str, ...] = ()
        for name, target in out.items():
            if name not in images:
                _check_shape(name, values[name].shape, target.shape)
                target[...] = values[name]
                continue
            image = images[name].image
            _check_shape(name, self._shape(name, image), target.shape)
            write_pixels(image, self.decoding.layout, target)
            notes += images[name].notes
        return notes

    def _decode(self, index: int, values: Mapping[str, Any]) -> dict[str, Decoded]:
        """Decode the images of a sample, whose masks must have the size of its first image that is not a mask."""
        images: dict[str, Decoded] = {}
        for name, value in values.items():
            if isinstance(value, (bytes, Image.Image)):
                try:
                    images[name] = decode(value, self.decoding, name in self.masks)
                except SampleError as error:
                    if not images:
                        raise
                    raise SampleError(f"{self.part_name(index, name)} {error}") from None
        main = next((image for name, image in images.items() if name not in self.masks), None)
        for name in self.masks:
            if main and name in images:
                check_pair(self.part_name(index, name), images[name], main)
        return images

    def _shape(self, name: str, image: Image.Image) -> tuple[int, ...]:
        return sample_shape(image, self.decoding.layout, name in self.masks)

    def describe(self, index: int) -> dict[str, SampleField]:
        """Return the shapes and dtypes of the fields of one sample."""
        if self.decoding.form:
            return self._averaged([index])
        fields, values = {}, self.values(index)
        with self.session():
            images = self._decode(index, values)
        for name, value in values.items():
            if name in images:
                shape = self._shape(name, images[name].image)
                axes = "NHW" if len(shape) == 2 else self.decoding.layout.upper()
                fields[name] = SampleField(shape, np.dtype(np.uint8), axes)
            else:
                _check_aligned(name, value, images.values(), self.decoding)
                fields[name] = SampleField(value.shape, field_dtype(name, value.dtype))
        return fields

    def find_fields(self, skip_bad: bool) -> list[str]:
        """Set ``fields``, the largest first, from the first sample. Return the field names in the sample's order.

        Raises SampleError if the first sample is unreadable. With ``skip_bad``, the first readable sample is used
        instead, and SourceError is raised if all are unreadable.
        """
        self._find_masks()
        for index in range(len(self)):
            try:
                fields = self.describe(index)
                self._check_masks(fields)
                self.fields = largest_first(fields)
                if self.decoding.form:
                    probes = np.linspace(0, len(self) - 1, PROBES).astype(np.int64)
                    self.fields = self._averaged([index, *np.unique(probes).tolist()])
                return list(fields)
            except SampleError as error:
                reason = f"{self.name(index)}: {error}"
                if not skip_bad:
                    raise SampleError(reason) from None
        raise SourceError(f"none of the {len(self)} samples can be used; the error of the last is: {reason}")

    def _find_masks(self) -> None:
        """Set the option ``mask_column`` if it is not set and some images may be masks, and add a note."""
        if self.decoding.mask_column is not None or self.decoding.form:
            return
        samples = []
        for index in np.unique(np.linspace(0, len(self) - 1, MASK_PROBES).astype(np.int64)).tolist():
            with suppress(Exception), self.session():  # bad samples are reported when they are converted
                values = self.values(index).items()
                images = {name: value for name, value in values if isinstance(value, (bytes, Image.Image))}
                if not may_have_masks(images):
                    return
                samples.append({name: look_at(image) for name, image in images.items()})
        samples = [sample for sample in samples if sample.keys() == samples[0].keys()]
        if not samples:
            return
        masks, notes = find_masks(samples, self.decoding.size is not None or self.decoding.color == "gray")
        self.decoding = replace(self.decoding, mask_column=masks)
        self.options = {**self.options, "mask_column": masks}
        self.notes = [*self.notes, *notes]

    def _averaged(self, indices: Sequence[int]) -> dict[str, SampleField]:
        """Return the field of images of any size. Its shape is their average size in bytes in the samples ``indices``.

        Unreadable samples are ignored, unless ``indices`` has a single index: then SampleError is raised.
        """
        sizes: list[tuple[int, int, int]] = []
        for index in indices:
            with nullcontext() if len(indices) == 1 else suppress(SampleError), self.session():
                name, value, others = self._only_image(index)
                image = make_any_image(value, self.decoding)
                encoded = len(value) if isinstance(value, bytes) else 0
                pixels = image.height * image.width * (1 if self.decoding.color == "gray" else 3)
                sizes.append((len(image.data), encoded, pixels))
        kept, encoded, pixels = (sum(column) // len(sizes) for column in zip(*sizes, strict=True))
        self._declare_columns(others)
        self.size_bytes = {"as files": encoded, "kept": kept, "as pixels": pixels}
        self.size_bytes = {form: size * len(self) for form, size in self.size_bytes.items() if size}
        return {name: SampleField((max(1, kept),), np.dtype(np.uint8), "NHWC", self.decoding.form)}

    def _declare_columns(self, values: Mapping[str, np.ndarray]) -> None:
        """Declare the columns whose values are read with images of any size, from the values of one sample."""

    def in_form(self, form: str) -> Samples:
        other, encoded = copy(self), form == "encoded"
        other.decoding = replace(self.decoding, keep_encoded=encoded, keep_size=not encoded)
        other.fields = {name: replace(field, form=form) for name, field in self.fields.items()}
        return other

    def _check_masks(self, fields: Mapping[str, SampleField]) -> None:
        images = [name for name, field in fields.items() if field.axes]
        for name in self.decoding.mask_column or ():
            if not images:
                raise OptionError(f"mask_column is {name!r}, but no field contains images: leave out mask_column")
            if name not in images:
                names = names_text(images)
                raise OptionError(f"mask_column is {name!r}, but the fields of images are {names}: name one of them")

    def disagreement(self) -> str:
        """Return an error message that names two samples of different shapes, and the remedy."""
        first: dict[str, tuple[int, tuple[int, ...]]] = {}
        for index in range(len(self)):
            try:
                fields = self.describe(index)
            except SampleError:
                continue
            for name, field in fields.items():
                number, shape = first.setdefault(name, (index, field.shape))
                if field.shape == shape:
                    continue
                remedy = f"make all arrays equal in shape: {PADDING}"
                if field.axes:
                    remedy = "pass a size and how to fit it (--size H,W --fit stretch|crop|pad)"
                    if len(fields) == 1:
                        remedy += ", or keep their sizes (--keep-encoded)"
                    same_size = self.decoding.size or sorted(shape)[1:] == sorted(field.shape)[1:]
                    if self.decoding.color == "keep" and same_size:
                        remedy = "pass the colours of all images (--color rgb|gray)"
                return (
                    f"samples differ in {printable(name)!r}: {self.name(number)} is {shape_text(shape)}, "
                    f"{self.name(index)} is {shape_text(field.shape)}: {remedy}"
                )
        return "the samples had different shapes, and have changed since: convert again"


def check_pair(name: str, mask: Decoded, image: Decoded) -> None:
    """Raise SampleError unless a mask, called ``name`` in messages, has the size and orientation of its image."""
    if mask.size != image.size:
        raise SampleError(
            f"{name} is {shape_text(mask.size)} but the image is {shape_text(image.size)}: resize the mask to the "
            "size of its image" + (" after its EXIF orientation is applied" if image.orientation != 1 else "")
        )
    is_unclear = image.orientation in (2, 3, 4) or image.size[0] == image.size[1]
    if mask.orientation != image.orientation and is_unclear:
        raise SampleError(
            f"EXIF rotates the image but not {name}, and their sizes do not show whether the mask is upright: rotate "
            "the pixels of the image, and remove its EXIF orientation"
        )


def _check_aligned(name: str, array: np.ndarray, images: Iterable[Decoded], options: ImageOptions) -> None:
    """Raise SourceError if an array has the pixels of an image, which is resized or rotated, while the array is not."""
    for image in images:
        is_moved = image.orientation != 1 or options.size not in (None, image.size)
        shapes = array.shape[:2], array.shape[-2:]
        if is_moved and array.ndim in (2, 3) and any(sorted(shape) == sorted(image.size) for shape in shapes):
            way = "resized" if image.orientation == 1 else "rotated by EXIF, or resized"
            raise SourceError(
                f"{printable(name)!r} is an array of the size of its image, {shape_text(image.size)}, which is {way}, "
                "unlike the array: return it as a Pillow image, such as Image.fromarray(mask.astype('uint8')) for a "
                "mask, or resize and rotate both in the data set"
            )


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(shape) != tuple(expected):
        raise ShapeError(f"{printable(name)!r} is {shape_text(shape)}, but in other samples {shape_text(expected)}")


def largest_first(fields: Mapping[str, SampleField]) -> dict[str, SampleField]:
    """Sort fields by the size of a sample, the largest first."""
    return dict(sorted(fields.items(), key=lambda item: -item[1].sample_bytes))


def field_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Return the dtype in which a file stores values of ``dtype``: in native byte order, and uint8 for bool.

    Raises SourceError if fields do not support such values; the message calls them ``name``.
    """
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind in "iuf" and dtype.itemsize <= 8:
        return dtype.newbyteorder("=")
    if dtype.kind == "S" and dtype.itemsize:
        return dtype
    remedies = {
        "O": "convert the Python objects, which are never unpickled, to plain numbers of at most 64 bits, or "
        "strings to fixed-length bytes (np.array(x, 'S') for bytes, np.char.encode(np.array(x, str)) for str)",
        "c": "split real and imaginary parts (x.view(x.real.dtype).reshape(*x.shape, 2))",
        "U": "encode it as UTF-8 (np.char.encode)",
        "M": "convert it to int64",
        "m": "convert it to int64",
    }
    remedy = remedies.get(dtype.kind, "convert it to a number of at most 64 bits")
    if dtype.names:
        remedy = "pass each of its columns as a separate array"
    raise SourceError(f"{printable(name)} has the dtype {dtype}, which fields do not support: {remedy}")
