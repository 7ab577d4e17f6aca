"""Divide the list of transforms of a field into a converter, which computes the first ones in one step, and the others.

Which converter it is depends on the kind of the field. A list that no converter can compute raises `OptionError`.

Where to find what in this package:

- Transforms are declared in `normalize`, `augment`, `colour`, `mixing`, `per_sample`, `values`, `rows`, `hold_out` and
  `ragged`, and named in the package itself.
- Converters are subclasses of `converter.Converter`: in `images`, `any_size` (with `nvjpeg`), `colour`, `rows` and
  `ragged`. Feed knows nothing else of them. `pairs` has the form that a batch has of each field.
- The random geometry of images is drawn in `geometry`; `h5chunk.plan.draws` has the random numbers.
- Pixels are computed by `pixels`, in C (``native/augment.c``) or with torch, and by Triton (`kernels`), whose kernels
  `compiled` launches and `kernel_cache` keeps on disk.
- Rows of matrices, and other samples that differ in length, are gathered in `csr` and `segments`; `values` computes
  their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from h5chunk.errors import OptionError, names_text
from h5chunk.store.read.fields import WINDOW, Field, MatrixField
from h5chunk.store.read.ragged import ImagesField, RaggedField, SeriesField
from h5chunk.transforms.any_size import AnySizeConverter
from h5chunk.transforms.augment import AUGMENTING, Geometric
from h5chunk.transforms.colour import ColorJitter, ColourConverter
from h5chunk.transforms.converter import Converter
from h5chunk.transforms.csr import fresh
from h5chunk.transforms.hold_out import HoldOut
from h5chunk.transforms.images import AugmentConverter, ImageConverter, channel_axis
from h5chunk.transforms.mixing import MIXING
from h5chunk.transforms.normalize import Normalize, ToDtype
from h5chunk.transforms.per_sample import NO_NUMBERS
from h5chunk.transforms.ragged import LENGTH_TRANSFORMS, RaggedConverter
from h5chunk.transforms.rows import ROW_TRANSFORMS, Allocate, Csr, Dense, RowConverter

DRAWN = (*AUGMENTING, ColorJitter)  # which need the draws of samples, or are computed with those that do
IMAGE_TRANSFORMS = (Normalize, ToDtype, *DRAWN)
BATCH_TRANSFORMS = (*IMAGE_TRANSFORMS, *ROW_TRANSFORMS, *LENGTH_TRANSFORMS)
OWN_TRANSFORMS = (*BATCH_TRANSFORMS, *MIXING)
Transform = Callable[[Any], Any]
Transforms = Transform | Sequence[Transform] | Mapping[str, Transform | Sequence[Transform]]


def transforms_by_field(
    transforms: Transforms | None, fields: Mapping[str, Field | RaggedField]
) -> dict[str, list[Transform]]:
    """Return the validated transforms of each field; one transform, or a plain list, is for the first field."""
    if transforms is None:
        transforms = ()
    if not isinstance(transforms, Mapping):
        _check_masks(_listed(transforms), fields)
        transforms = {next(iter(fields)): transforms}
    for name in transforms:
        if name not in fields:
            raise OptionError(f"transforms has the field {name!r}, but the fields are {names_text(map(repr, fields))}")
    return {name: _listed(transforms.get(name, ())) for name in fields}


def _check_masks(transforms: list[Transform], fields: Mapping[str, Field | RaggedField]) -> None:
    """Raise OptionError if transforms would crop or flip the first field, but not another one of the same size."""
    moved = next((transform for transform in transforms if isinstance(transform, Geometric)), None)
    first, *others = fields
    like = next((name for name in others if _sides(fields[name]) == _sides(fields[first]) is not None), None)
    if moved is not None and like is not None:
        raise OptionError(
            f"transforms is a list, which changes {first!r} alone, so {like!r}, of the same height and width, would no "
            f"longer fit it after {type(moved).__name__}: pass a list for each, as in "
            f"transforms={{{first!r}: [...], {like!r}: [...]}}"
        )


def _sides(field: Field | RaggedField) -> tuple[int, ...] | None:
    """Return height and width of the samples of a field; None if they are not images of one size."""
    shape = field.sample_shape if isinstance(field, Field) and field.scale is None else ()
    if len(shape) == 3:
        axis = _image_axis(field)
        return shape[:axis] + shape[axis + 1 :]
    return shape if len(shape) == 2 else None


def _image_axis(field: Any) -> int:
    """Return the axis of channels for transforms of images, which treat the gray frames of a window as channels."""
    return 0 if field.axes.startswith(WINDOW) else channel_axis(field.sample_shape, field.axes)


def _listed(transforms: Any) -> list[Transform]:
    """Return one transform, or a sequence of them, as a list; raise OptionError if one cannot be called."""
    if callable(transforms):
        transforms = [transforms]
    if isinstance(transforms, (str, bytes)) or not isinstance(transforms, Sequence):
        raise OptionError(f"transforms is {transforms!r}: pass a list of objects of h5chunk.transforms, or functions")
    for transform in transforms:
        if isinstance(transform, type) or not callable(transform):
            raise OptionError(f"transforms has {transform!r}: pass objects of h5chunk.transforms, or functions")
    return list(transforms)


def compile_transforms(
    transforms: Sequence[Transform], field: Field | RaggedField, stored: torch.dtype | None, allocate: Allocate
) -> tuple[Converter, tuple[Transform, ...]]:
    """Split the transforms of a field into a converter, which computes the leading ones in one step, and the others.

    ``stored`` is the dtype in the file (unused for a matrix); ``allocate`` returns host memory for batches. Raise
    `OptionError` if the transforms do not fit each other, or the field.
    """
    check_first(transforms, field, stored)
    if isinstance(field, SeriesField):
        count = _leading(transforms, LENGTH_TRANSFORMS, LENGTH_TRANSFORMS)
        if wrong := [each for each in transforms[count:] if isinstance(each, BATCH_TRANSFORMS)]:
            raise OptionError(
                f"{wrong[0]} does not fit field {field.name!r}, whose samples differ in length: leave it out"
            )
        return RaggedConverter(transforms[:count], field, allocate), tuple(transforms[count:])
    if isinstance(field, ImagesField):
        count = _leading(transforms, IMAGE_TRANSFORMS, Normalize, ToDtype, ColorJitter)
        _check_late(transforms, count)
        return _convert_any_size(transforms[:count], field, allocate), tuple(transforms[count:])
    if field.scale is not None:
        assert isinstance(field, (Field, MatrixField))
        count = _leading(transforms, ROW_TRANSFORMS, (Dense, Csr), HoldOut)
        held_out = next((n for n, transform in enumerate(transforms[:count]) if isinstance(transform, HoldOut)), count)
        after = (n for n in range(held_out + 1, count) if not isinstance(transforms[n], (Dense, Csr)))
        count = next(after, count)  # the following transforms are applied to both inputs and targets
        _check_held_out(transforms, count, field)
        return RowConverter(transforms[:count], field, allocate), tuple(transforms[count:])
    assert stored is not None and isinstance(field, Field)
    count = _leading(transforms, IMAGE_TRANSFORMS, Normalize, ToDtype, ColorJitter)
    _check_late(transforms, count)
    return _convert_images(transforms[:count], field, stored, allocate), tuple(transforms[count:])


def _convert_any_size(transforms: Sequence[Transform], field: ImagesField, allocate: Allocate) -> Converter:
    """Return the converter of images that differ in size."""
    place = _place_of_jitter(transforms)
    if place is None:
        return AnySizeConverter(transforms, field, allocate)
    before = AnySizeConverter(transforms[:place], field, fresh)
    return _with_colours(before, transforms[place:], before.result_shape, 0, allocate)


def _convert_images(
    transforms: Sequence[Transform], field: Field, stored: torch.dtype, allocate: Allocate
) -> Converter:
    """Return the converter of images of one size, or of other dense samples."""
    shape, axis = field.sample_shape, channel_axis(field.sample_shape, field.axes)
    place = _place_of_jitter(transforms)
    if place is None and not any(isinstance(transform, AUGMENTING) for transform in transforms):
        return ImageConverter(transforms, stored, shape, axis, allocate)
    axis, is_mask = _image_axis(field), field.axes == "NHW"
    if place is None:
        return AugmentConverter(transforms, stored, shape, axis, allocate, is_mask=is_mask)
    if is_mask or field.axes.startswith(WINDOW):
        noun = "a mask, whose values are classes" if is_mask else "windows of frames"
        raise OptionError(f"{transforms[place]} does not fit field {field.name!r}, which has {noun}: leave it out")
    if not place:
        return _with_colours(ImageConverter((), stored, shape, axis, fresh), transforms, shape, axis, allocate)
    before = AugmentConverter(transforms[:place], stored, shape, axis, fresh)
    return _with_colours(before, transforms[place:], before.result_shape, axis, allocate)


def _place_of_jitter(transforms: Sequence[Transform]) -> int | None:
    """Return the index of `ColorJitter`, or None. Raise OptionError if it is not between geometry and the others."""
    place = next((number for number, each in enumerate(transforms) if isinstance(each, ColorJitter)), None)
    for number, each in enumerate(transforms):
        if place is None or isinstance(each, ColorJitter) or isinstance(each, Geometric) == (number < place):
            continue
        first, second = (transforms[place], each) if number < place else (each, transforms[place])
        raise OptionError(f"{second} comes before {first}: put crops, resizing and flips first, then ColorJitter")
    return place


def _with_colours(
    before: Converter, transforms: Sequence[Transform], shape: tuple[int, ...], axis: int, allocate: Allocate
) -> ColourConverter:
    """Return the converter of a list that goes on with ``transforms``, of which the first is `ColorJitter`."""
    jitter, *rest = transforms
    kind = AugmentConverter if any(isinstance(each, AUGMENTING) for each in rest) else ImageConverter
    after = kind(rest, torch.uint8, shape, axis, allocate) if rest else None
    return ColourConverter(before, jitter, after, shape, axis)  # type: ignore[arg-type]


def _check_late(transforms: Sequence[Transform], count: int) -> None:
    for late in (transform for transform in transforms[count:] if isinstance(transform, DRAWN)):
        if isinstance(transforms[count], ColorJitter):
            raise OptionError(f"{late} is the second ColorJitter of the list: leave it out")
        raise OptionError(f"{late} comes after {transforms[count]}: put it first, as {NO_NUMBERS}")


def _check_held_out(transforms: Sequence[Transform], count: int, field: Field | RaggedField) -> None:
    if any(isinstance(transform, HoldOut) for transform in transforms[count:]):
        raise OptionError("HoldOut is given twice, or after a function: pass it once, before all functions")
    last = any(isinstance(transform, HoldOut) and transform.last is not None for transform in transforms)
    if last and not (isinstance(field, MatrixField) and field.has_time_order):
        raise OptionError(
            f"HoldOut(last=...) needs entries in the order of time, which field {field.name!r} does not have: convert "
            "it with time_order=True (--time-order)"
        )


def _leading(transforms: Sequence[Transform], kinds: tuple[type, ...], *once: Any) -> int:
    """Count the leading transforms of these kinds, with at most one of each type, or tuple of types, in ``once``."""
    for number, transform in enumerate(transforms):
        taken = any(
            isinstance(transform, kind) and isinstance(earlier, kind)
            for kind in once
            for earlier in transforms[:number]
        )
        if taken or not isinstance(transform, kinds):
            return number
    return len(transforms)


def check_first(transforms: Sequence[Transform], field: Field | RaggedField, stored: torch.dtype | None) -> None:
    """Raise OptionError if the first transform does not fit the field; after a function, any transform is allowed."""
    if not transforms:
        return
    first, remedy = transforms[0], ""
    may_be_complex = isinstance(first, LENGTH_TRANSFORMS) or not isinstance(first, BATCH_TRANSFORMS)
    if stored is not None and stored.is_complex and not may_be_complex:
        remedy = "is complex: put a function that makes real numbers first, such as torch.abs or torch.view_as_real"
    elif field.scale is not None and isinstance(first, IMAGE_TRANSFORMS):
        remedy = "is a matrix: pass Dense, Csr, L2 or Log1p"
    elif field.scale is None and any(isinstance(transform, HoldOut) for transform in transforms):
        remedy = "is not a matrix: leave HoldOut out"
    elif isinstance(first, LENGTH_TRANSFORMS) != isinstance(field, SeriesField) and isinstance(first, BATCH_TRANSFORMS):
        differ = isinstance(field, SeriesField)
        remedy = (
            "has samples that differ in length: pass Pad or Pack"
            if differ
            else "has samples of one shape: leave it out"
        )
    elif field.scale is None and isinstance(first, (Dense, Csr)):
        remedy = "is not a matrix: use ToDtype"
    elif field.scale is None and isinstance(first, ROW_TRANSFORMS) and stored and not stored.is_floating_point:
        remedy = f"is {stored}: put ToDtype(torch.float32) first"
    if remedy:
        raise OptionError(f"{first} does not fit field {field.name!r}, which {remedy}")
