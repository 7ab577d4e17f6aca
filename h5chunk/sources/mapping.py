"""Map-style data sets in Python, such as torchvision's and Hugging Face's: objects with a length and samples by number.

| sample | becomes the fields |
| --- | --- |
| a dict | its own names |
| a pair of an image and a number | ``images`` and ``labels`` |
| another tuple or list | ``images`` (an image), else ``field0``, ``field1``, ... |
| anything else | ``images`` (an image), else ``data`` |

Images are those of Pillow, and follow the options of images. Numbers, arrays, tensors, strings (UTF-8, of a fixed
length, which is that of the longest) and bytes are kept as they are. All samples must be alike. ``classes`` or
``class_to_idx`` of the data set, or the names in Hugging Face's ``features``, become the names of its classes.

Samples are read in worker processes that are forked, where the system does that, as many data sets cannot be pickled.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from PIL import Image

from h5chunk.errors import SampleError, ShapeError, SourceError, printable
from h5chunk.source import OpenContext, SampleField, shape_text
from h5chunk.sources.decode import adapt, pillow_limits, sample_shape, write_pixels
from h5chunk.sources.kinds import ImageOptions
from h5chunk.sources.recognise import is_path
from h5chunk.sources.samples import LABELS, Samples, field_dtype

IMAGES, DATA = "images", "data"


class MappingSource(Samples):
    """A map-style data set: a `h5chunk.source.SampleSource`.

    Parameters
    ----------
    dataset : object
        With ``len()`` and samples by number.
    decoding : ImageOptions
    context : OpenContext
    """

    kind = "mapping"
    noun = "a data set in Python"
    Options = ImageOptions

    def __init__(self, dataset: Any, decoding: ImageOptions, context: OpenContext) -> None:
        super().__init__()
        self._dataset, self._decoding = dataset, decoding
        self._has_images = False
        first = self._first(context.skips_bad_samples)
        self._names = list(first)
        fields = {name: self._field(name, value) for name, value in first.items()}
        widths = self._text_widths(context) if any(field.dtype.kind == "S" for field in fields.values()) else {}
        for name, width in widths.items():
            fields[name] = SampleField((), np.dtype(f"S{width}"))
        self.fields = dict(sorted(fields.items(), key=lambda item: -item[1].sample_bytes))
        self.options = {**(decoding.recorded() if self._has_images else {}), "fields": self._names}
        self.categories = _class_names(dataset, self.fields)
        self.notes = ["a data set in Python has no date: a conversion that is stopped starts anew"]

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        methods = ("__len__", "__getitem__")
        return not is_path(source) and not isinstance(source, bytes) and all(hasattr(source, each) for each in methods)

    @classmethod
    def open(cls, source: Any, options: ImageOptions, context: OpenContext) -> MappingSource:
        if is_path(source):
            raise SourceError(f"{printable(source)}: is a path, not a data set in Python")
        if isinstance(source, Mapping) and source and 0 not in source:
            lists = ", ".join(repr(name) for name, value in source.items() if not hasattr(value, "__array__"))
            raise SourceError(f"a dict of columns whose values are not all arrays ({lists}): make arrays of them")
        if hasattr(source, "nnz"):
            raise SourceError(
                "a sparse matrix in Python is not a source: save it (scipy.sparse.save_npz), and convert that"
            )
        if not len(source):
            raise SourceError(f"the {type(source).__name__} is empty: give at least one sample")
        return cls(source, options, context)

    def __len__(self) -> int:
        return len(self._dataset)

    def session(self) -> AbstractContextManager[None]:
        return pillow_limits(self._decoding.max_pixels)

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        sample = self._sample(index)
        notes: list[str] = []
        for name, values in out.items():
            value = sample[name]
            if isinstance(value, Image.Image):
                image, said = adapt(value, self._decoding)
                _check_shape(name, sample_shape(image, self._decoding.layout), values.shape)
                write_pixels(image, self._decoding.layout, values)
                notes += said
            else:
                array = _as_array(name, value)
                _check_shape(name, array.shape, values.shape)
                _copy(name, array, values)
        return tuple(notes)

    def _sample(self, index: int) -> dict[str, Any]:
        """A sample as a dict, with the names of the first."""
        try:
            sample = _named(self._dataset[index])
        except SampleError:
            raise
        except Exception as error:  # a data set may raise anything
            raise SampleError(f"cannot be read: {type(error).__name__}: {printable(str(error))}") from None
        names = getattr(self, "_names", None)
        if names is not None and sample.keys() != set(names):
            raise SampleError(f"has the fields {', '.join(sample)} but others have {', '.join(names)}: make them alike")
        return sample

    def _first(self, skip: bool) -> dict[str, Any]:
        """The first sample that can be read."""
        for index in range(len(self)):
            try:
                return self._sample(index)
            except SampleError as error:
                if not skip:
                    raise SampleError(f"{self.name(index)}: {error}") from None
                reason = str(error)
        raise SourceError(f"none of the {len(self)} samples can be read; the last: {reason}")

    def _field(self, name: str, value: Any) -> SampleField:
        if isinstance(value, Image.Image):
            self._has_images = True
            with self.session():
                image, _ = adapt(value, self._decoding)
            layout = self._decoding.layout
            return SampleField(sample_shape(image, layout), np.dtype(np.uint8), layout.upper())
        array = _as_array(name, value)
        return SampleField(array.shape, field_dtype(name, array.dtype))

    def _text_widths(self, context: OpenContext) -> dict[str, int]:
        """The length of the longest string of each field, which only reading all samples tells."""
        widths: dict[str, int] = {}
        for index in range(len(self)):
            try:
                sample = self._sample(index)
            except SampleError:
                continue  # is told where it is converted
            for name, value in sample.items():
                if isinstance(value, (str, bytes)):
                    widths[name] = max(widths.get(name, 1), len(_encoded(value)))
            context.report_found(index + 1)
        return widths

    def disagreement(self) -> str:
        shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
        for index, name, shape in self._shapes():
            first, expected = shapes.setdefault(name, (index, shape))
            if shape != expected:
                remedy = "give arrays of one shape"
                if name in self.fields and self.fields[name].axes:
                    remedy = "give a size and how to fit it (--size H W --fit stretch|crop|pad)"
                return (
                    f"samples differ in {printable(name)!r}: {self.name(first)} is {shape_text(expected)}, "
                    f"{self.name(index)} is {shape_text(shape)}: {remedy}"
                )
        return "the samples did not all have one shape, and changed since"

    def _shapes(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        for index in range(len(self)):
            try:
                with self.session():
                    shapes = {name: self._field(name, value).shape for name, value in self._sample(index).items()}
            except SampleError:
                continue
            for name, shape in shapes.items():
                yield index, name, shape


def _named(sample: Any) -> dict[str, Any]:
    """Name the parts of a sample."""
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    if not isinstance(sample, (tuple, list)):
        return {IMAGES if isinstance(sample, Image.Image) else DATA: sample}
    if len(sample) == 2 and _is_picture(sample[0]) and _is_number(sample[1]):
        return {IMAGES: sample[0], LABELS: sample[1]}
    images = [isinstance(value, Image.Image) for value in sample]
    named = {f"field{number}": value for number, value in enumerate(sample)}
    return {
        IMAGES if images.count(True) == 1 and is_image else name: value
        for (name, value), is_image in zip(named.items(), images, strict=True)
    }


def _is_picture(value: Any) -> bool:
    return isinstance(value, Image.Image) or len(getattr(value, "shape", ())) in (2, 3)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) or getattr(value, "shape", None) == ()


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _as_array(name: str, value: Any) -> np.ndarray:
    """A number, an array, a tensor or a string as an array.

    Raises
    ------
    SampleError
        It is none of these.
    """
    if isinstance(value, (str, bytes)):
        return np.array(_encoded(value) or b"\0", "S")
    if value is None:
        raise SampleError(f"field {printable(name)!r} is missing (None): fill it, or leave such samples out")
    try:
        array = np.asarray(value)
        field_dtype(name, array.dtype)
    except (SourceError, ValueError, TypeError, RuntimeError) as error:
        raise SampleError(
            f"field {printable(name)!r} is of type {type(value).__name__}, which is no image, number, array or string: "
            f"{printable(str(error))}"
        ) from None
    return array


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(shape) != tuple(expected):
        raise ShapeError(f"field {printable(name)!r} is {shape_text(shape)} but others are {shape_text(expected)}")


def _copy(name: str, array: np.ndarray, out: np.ndarray) -> None:
    """Copy values that fit the dtype of a field exactly."""
    if array.dtype != out.dtype and array.dtype.kind != "S":
        with np.errstate(all="ignore"):
            fitted = array.astype(out.dtype)
        if not np.array_equal(fitted, array, equal_nan=array.dtype.kind == "f"):
            raise SampleError(
                f"field {printable(name)!r} is {array.dtype}, and does not fit the {out.dtype} of the first sample: "
                "give all samples one dtype"
            )
        array = fitted
    elif array.dtype.itemsize > out.dtype.itemsize:
        raise SampleError(f"field {printable(name)!r} is longer than when it was first read")
    out[...] = array


def _class_names(dataset: Any, fields: Mapping[str, SampleField]) -> dict[str, list[str]]:
    """What the codes of fields mean, as torchvision and Hugging Face say it."""
    found: dict[str, list[str]] = {}
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        found = {name: list(map(str, each.names)) for name, each in features.items() if getattr(each, "names", None)}
    numbers_by_class = getattr(dataset, "class_to_idx", None)
    classes = getattr(dataset, "classes", None)
    if LABELS in fields and isinstance(numbers_by_class, Mapping) and numbers_by_class:
        names = sorted(numbers_by_class, key=lambda name: numbers_by_class[name])
        if [numbers_by_class[name] for name in names] == list(range(len(names))):
            found[LABELS] = list(map(str, names))
    elif LABELS in fields and isinstance(classes, (list, tuple)) and classes:
        found[LABELS] = list(map(str, classes))
    return {name: names for name, names in found.items() if name in fields and fields[name].dtype.kind in "iu"}
