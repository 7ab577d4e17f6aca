"""Read map-style data sets, such as torchvision's and Hugging Face's: Python objects with ``len()`` and indexing.

| sample | becomes the fields |
| --- | --- |
| a dict | its keys |
| a pair of an image and a number | ``images`` and ``labels`` |
| another tuple or list | ``field0``, ``field1``, ... by position, but ``images`` for an image if it is the only one |
| anything else | ``images`` for an image, otherwise ``data`` |

Pillow images, and bytes that are a JPEG or PNG file, are converted with the options for images. Numbers, arrays and
tensors are stored unchanged; strings and other bytes become fixed-length bytes, as long as the longest. All samples
must have the same fields. Class names are read from the attribute ``classes`` or ``class_to_idx`` of the data set, or
from Hugging Face's ``features``.

Worker processes receive the data set by pickle, and never by a fork: see `h5chunk.store.write.workers`. A data set that
cannot be pickled, such as one that holds an open file, is read in the calling process.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from h5chunk.errors import SampleError, SourceError, names_text, printable
from h5chunk.sample_source import ENDS_IN_NULL, AnyImage, OpenContext, SampleField
from h5chunk.sources.kinds import ImageOptions
from h5chunk.sources.recognise import is_path, refuse_names
from h5chunk.sources.samples import DATA, IMAGES, LABELS, PADDING, Samples, field_dtype, largest_first

IMAGE_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # the first bytes of JPEG and PNG files
NO_SOURCES = {  # for objects whose indexing does not return samples: an attribute that only they have, and the remedy
    "nnz": "save it with scipy.sparse.save_npz(path, x.tocsr()), and convert the .npz",
    "write_h5ad": "save it with write_h5ad, and convert the .h5ad",
    "iloc": "pass a dict of its columns, dict(frame), or save it as .parquet",
}


class MappingSource(Samples):
    """A map-style data set in Python."""

    kind = "mapping"
    noun = "a data set in Python"
    Options = ImageOptions

    def __init__(self, dataset: Any, decoding: ImageOptions, context: OpenContext) -> None:
        self._dataset, self.decoding = dataset, decoding
        self._others: dict[str, SampleField] = {}  # fields beside an image of any size
        self._are_read = False  # whether the values of ``columns`` are known
        order = self.find_fields(context.skips_bad_samples)
        found = {**self.fields, **self._others}
        if any(field.dtype.kind == "S" for field in found.values()):
            widths = self._text_widths(context)
            found |= {name: SampleField((), np.dtype(f"S{width}")) for name, width in widths.items()}
        self._others = {name: found[name] for name in self._others}
        self.fields = largest_first({name: found[name] for name in self.fields})
        if not decoding.form and not any(field.shape or field.axes for field in found.values()):
            self._refuse_names(found)
        self.columns = {name: np.zeros(len(self), field.dtype) for name, field in self._others.items()}
        has_images = any(field.axes for field in self.fields.values())
        self.options = {**(self.decoding.recorded() if has_images else {}), "fields": [*order, *self._others]}
        self.categories = _class_names(dataset, found)
        self.notes = [
            *self.notes,
            "changes to a data set in Python cannot be detected, so an interrupted conversion starts over",
        ]

    def _refuse_names(self, fields: Iterable[str]) -> None:
        samples: list[dict[str, Any]] = []
        for index in range(min(3, len(self))):
            with suppress(SampleError):  # reported when the sample is converted
                samples.append(self._sample(index))
        for name in fields:
            refuse_names((sample[name] for sample in samples), name)

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        methods = ("__len__", "__getitem__")
        return (
            not is_path(source) and not isinstance(source, bytes) and all(hasattr(source, method) for method in methods)
        )

    @classmethod
    def open(cls, source: Any, options: ImageOptions, context: OpenContext) -> MappingSource:
        if is_path(source):
            raise SourceError(f"{printable(source)}: is a path, not a data set in Python: leave out the format")
        if isinstance(source, Mapping) and source and 0 not in source:
            if all(hasattr(value, "features") for value in source.values()):  # Hugging Face's DatasetDict
                names = names_text(map(repr, source))
                raise SourceError(
                    f"a dict of the data sets {names} is not a source: convert each of them, such as "
                    f"data[{next(iter(source))!r}]"
                )
            lists = names_text(repr(name) for name, value in source.items() if not hasattr(value, "__array__"))
            raise SourceError(f"a dict of columns has values that are not arrays ({lists}): convert them with np.array")
        for attribute, remedy in NO_SOURCES.items():
            if hasattr(source, attribute):
                raise SourceError(f"an object of type {type(source).__name__} is not a source: {remedy}")
        if isinstance(source, tuple) and source and all(getattr(value, "ndim", 0) for value in source):
            raise SourceError(
                "a tuple of arrays can be columns or samples: pass columns as a dict, such as {'x': x, 'y': y}, and "
                "samples as a list"
            )
        if not len(source):
            raise SourceError(f"the {type(source).__name__} is empty: pass at least one sample")
        return cls(source, options, context)

    @property
    def runs_user_code(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._dataset)

    def values(self, index: int) -> dict[str, Any]:
        sample, known = self._sample(index), {**self.fields, **self._others}
        return {
            name: value if _is_image(value) else _as_array(name, value, known.get(name))
            for name, value in sample.items()
        }

    def read_any(self, index: int) -> AnyImage:
        image = super().read_any(index)
        return image._replace(values={}) if self._are_read else image

    def read_columns(self) -> None:
        for index in range(len(self) if self.columns else 0):
            with suppress(SampleError):  # reported when the sample is converted
                for name, value in self._only_image(index)[2].items():
                    self.columns[name][index] = value
        self._are_read = True

    def _declare_columns(self, values: Mapping[str, np.ndarray]) -> None:
        self._others = {name: SampleField((), field_dtype(name, value.dtype)) for name, value in values.items()}

    def _sample(self, index: int) -> dict[str, Any]:
        """Read a sample as a dict. Raises SampleError if its fields differ from the first sample's."""
        try:
            value = self._dataset[index]
            if value is None:
                raise SampleError("is missing (None): return a value, or leave the sample out")
            sample = _named(value)
        except SampleError:
            raise
        except (Exception, SystemExit) as error:  # a data set may raise any error
            raise SampleError(f"cannot be read: {type(error).__name__}: {printable(str(error))}") from None
        if self.fields and sample.keys() != {*self.fields, *self._others}:
            names = names_text((*self.fields, *self._others))
            raise SampleError(
                f"has the fields {names_text(sample)}, but other samples have {names}: all samples must "
                "have the same fields"
            )
        return sample

    def _text_widths(self, context: OpenContext) -> dict[str, int]:
        """Return the length in bytes of the longest string in each field of strings, by reading all samples."""
        widths: dict[str, int] = {}
        for index in range(len(self)):
            try:
                sample = self._sample(index)
            except SampleError:
                continue  # reported when the sample is converted
            for name, value in sample.items():
                if isinstance(value, (str, bytes)) and not _is_image(value):
                    widths[name] = max(widths.get(name, 1), len(_encoded(value)))
            context.report_found(index + 1)
        return widths


def _named(sample: Any) -> dict[str, Any]:
    """Convert a sample to a dict of its values by field, as the table in this module's docstring describes."""
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    if not isinstance(sample, (tuple, list)):
        return {IMAGES if _is_image(sample) else DATA: sample}
    images = [_is_image(value) for value in sample]
    if len(sample) == 2:
        is_picture = images[0] or len(getattr(sample[0], "shape", ())) in (2, 3)
        if is_picture and (isinstance(sample[1], numbers.Number) or getattr(sample[1], "shape", None) == ()):
            return {IMAGES: sample[0], LABELS: sample[1]}
    named = {f"field{number}": value for number, value in enumerate(sample)}
    return {
        IMAGES if images.count(True) == 1 and is_image else name: value
        for (name, value), is_image in zip(named.items(), images, strict=True)
    }


def _is_image(value: Any) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, bytes) and value.startswith(IMAGE_MAGIC))


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _as_array(name: str, value: Any, field: SampleField | None) -> np.ndarray:
    """Convert a number, array, tensor or string to an array, with the dtype of its field if this is known.

    Raises SampleError for any other value, and if the dtype cannot hold the value exactly.
    """
    label = f"field {printable(name)!r}"
    if value is None:
        raise SampleError(f"{label} is missing (None): fill it, or leave the sample out")
    if isinstance(value, (str, bytes)) and _encoded(value).endswith(b"\0"):
        raise SampleError(f"{label} {ENDS_IN_NULL}")
    try:
        array = np.array(_encoded(value) or b"\0", "S") if isinstance(value, (str, bytes)) else np.asarray(value)
        field_dtype(name, array.dtype)
    except (SourceError, ValueError, TypeError, RuntimeError) as error:
        remedy = f"; {PADDING}" if isinstance(value, (list, tuple, Mapping)) else ""
        if hasattr(value, "detach") and not isinstance(error, SourceError):
            remedy = "; store such a tensor as value.detach().float()"
        raise SampleError(
            f"{label} is of type {type(value).__name__}, and cannot be stored as an image, number, array or string: "
            f"{printable(str(error))}{remedy}"
        ) from None
    if field is None or array.dtype == field.dtype:
        return array
    if array.dtype.kind == field.dtype.kind == "S":
        if array.dtype.itemsize > field.dtype.itemsize:
            raise SampleError(f"{label} is longer than when the data set was first read: its samples must not change")
        return array
    with np.errstate(all="ignore"):
        fitted = array if "S" in (array.dtype.kind, field.dtype.kind) else array.astype(field.dtype)
    if fitted is array or not np.array_equal(fitted, array, equal_nan=array.dtype.kind == "f"):
        raise SampleError(
            f"{label} is {array.dtype}, which does not fit the {field.dtype} of the first sample: all samples must "
            "have the same dtype"
        )
    return fitted


def _class_names(dataset: Any, fields: Mapping[str, SampleField]) -> dict[str, list[str]]:
    """Return the class names by field, from the attributes of a data set of torchvision or Hugging Face."""
    class_names: dict[str, list[str]] = {}
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        named = {name: feature for name, feature in features.items() if getattr(feature, "names", None)}
        class_names = {name: list(map(str, feature.names)) for name, feature in named.items()}
    numbers_by_class = getattr(dataset, "class_to_idx", None)
    classes = getattr(dataset, "classes", None)
    if LABELS in fields and isinstance(numbers_by_class, Mapping) and numbers_by_class:
        names = sorted(numbers_by_class, key=lambda name: numbers_by_class[name])
        if [numbers_by_class[name] for name in names] == list(range(len(names))):
            class_names[LABELS] = list(map(str, names))
    elif LABELS in fields and isinstance(classes, (list, tuple)) and classes:
        class_names[LABELS] = list(map(str, classes))
    return {name: names for name, names in class_names.items() if name in fields and fields[name].dtype.kind in "iu"}
