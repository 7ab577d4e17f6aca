"""Base of the sample sources, whose values are numbers, arrays, strings or images."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from h5chunk.errors import SampleError, ShapeError, SourceError, printable
from h5chunk.source import SampleField, SampleSource, shape_text
from h5chunk.sources.decode import decode, pillow_limits, sample_shape, write_pixels
from h5chunk.sources.kinds import ImageOptions
from h5chunk.sources.options import Options

IMAGES, LABELS, DATA = "images", "labels", "data"  # names of fields


class Samples(SampleSource):
    """Base of sample sources: a subclass recognises and opens a source, and reads values; images are decoded here."""

    noun: ClassVar[str]  # the contents of such a source, for messages
    Options: ClassVar[type[Options]] = Options
    decoding: ImageOptions = ImageOptions()

    def values(self, index: int) -> Mapping[str, Any]:
        """Read all fields of a sample: arrays, opened images, or encoded images as bytes; or raise SampleError."""
        raise NotImplementedError

    def session(self) -> AbstractContextManager[None]:
        return pillow_limits(self.decoding.max_pixels)

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        values = self.values(index)
        notes: tuple[str, ...] = ()
        for name, target in out.items():
            value = values[name]
            if not isinstance(value, (bytes, Image.Image)):
                _check_shape(name, value.shape, target.shape)
                target[...] = value
                continue
            image, said = decode(value, self.decoding)
            _check_shape(name, sample_shape(image, self.decoding.layout), target.shape)
            write_pixels(image, self.decoding.layout, target)
            notes += said
        return notes

    def describe(self, index: int) -> dict[str, SampleField]:
        """Return the fields of one sample."""
        fields, layout = {}, self.decoding.layout
        with self.session():
            for name, value in self.values(index).items():
                if isinstance(value, (bytes, Image.Image)):
                    image, _ = decode(value, self.decoding)
                    fields[name] = SampleField(sample_shape(image, layout), np.dtype(np.uint8), layout.upper())
                else:
                    fields[name] = SampleField(value.shape, field_dtype(name, value.dtype))
        return fields

    def settle(self, skip_bad: bool) -> list[str]:
        """Take the fields of the first readable sample, which all samples must share; return the unreadable names.

        Raises SampleError if the first sample is unreadable, or with ``skip_bad`` SourceError if all samples are.
        """
        for index in range(len(self)):
            try:
                fields = self.describe(index)
                self.fields = largest_first(fields)
                return list(fields)
            except SampleError as error:
                reason = f"{self.name(index)}: {error}"
                if not skip_bad:
                    raise SampleError(reason) from None
        raise SourceError(f"none of the {len(self)} samples can be used; the last: {reason}")

    def disagreement(self) -> str:
        """Name the first two samples of different shapes, and the remedy."""
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
                remedy = "give arrays of one shape"
                if field.axes:
                    remedy = "give a size and how to fit it (--size H W --fit stretch|crop|pad)"
                    same_size = self.decoding.size or sorted(shape)[1:] == sorted(field.shape)[1:]
                    if self.decoding.color == "keep" and same_size:
                        remedy = "give the colours of all images (--color rgb|gray)"
                return (
                    f"samples differ in {printable(name)!r}: {self.name(number)} is {shape_text(shape)}, "
                    f"{self.name(index)} is {shape_text(field.shape)}: {remedy}"
                )
        return "the samples had different shapes, and have changed since"


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(shape) != tuple(expected):
        raise ShapeError(f"{printable(name)!r} is {shape_text(shape)} but others are {shape_text(expected)}")


def largest_first(fields: Mapping[str, SampleField]) -> dict[str, SampleField]:
    """Sort fields by the size of a sample."""
    return dict(sorted(fields.items(), key=lambda item: -item[1].sample_bytes))


def field_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Return the dtype in which a file stores values of a dtype: native byte order, and bool as uint8.

    Raises SourceError if a file cannot hold such values; the message says how to change them.
    """
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind in "iuf" and dtype.itemsize <= 8:
        return dtype.newbyteorder("=")
    if dtype.kind == "S" and dtype.itemsize:
        return dtype
    remedies = {
        "O": "Python objects are never unpickled: convert them to plain numbers",
        "c": "split real and imaginary parts",
        "U": "encode it as UTF-8 (np.char.encode)",
        "M": "convert it to int64",
        "m": "convert it to int64",
    }
    remedy = remedies.get(dtype.kind, "convert it to a number of at most 64 bits")
    raise SourceError(f"{printable(name)} has the dtype {dtype}, which a field cannot have: {remedy}")
