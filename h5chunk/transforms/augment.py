"""Transforms that augment images sample by sample: crops, resizing, flips and erased boxes.

They are declared here, and change a `h5chunk.transforms.geometry.Geometry`, which is drawn for many images at a time.
`h5chunk.transforms.pixels` computes the results of all transforms of a list in one step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from h5chunk.errors import MAX_SIDE, OptionError, check_flag, check_whole
from h5chunk.plan.draws import Draws
from h5chunk.transforms.geometry import ATTEMPTS, Box, Drawing, Geometry, Size, random_boxes, random_offsets

INTERPOLATIONS = ("bilinear", "nearest-exact")
MODES = ("constant", "reflect", "edge")
Range = tuple[float, float]


class Geometric:
    """Base class of the transforms that crop, resize or flip images."""

    is_random: ClassVar[bool] = False
    crops: ClassVar[bool] = False  # without resizing
    resizes: ClassVar[bool] = False
    pads: ClassVar[bool] = False

    def change(self, geometry: Geometry, draws: Draws, stream: int) -> None:
        """Apply the transform to the geometry of images, with random numbers from a stream of ``draws``."""
        raise NotImplementedError

    def size_after(self, size: Size | None) -> Size | None:
        """Return the size of the results, or None if it depends on the image."""
        return size

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        from h5chunk.transforms.images import augment_batch

        return augment_batch(self, batch)


class Resizing(Geometric):
    """Base class of the transforms that resize images, by ``interpolation`` and ``antialias``."""

    interpolation: str
    antialias: bool
    resizes = True

    def check_interpolation(self) -> None:
        """Raise OptionError for an invalid interpolation. An ``InterpolationMode`` of torchvision becomes its name."""
        object.__setattr__(self, "interpolation", getattr(self.interpolation, "value", self.interpolation))
        _check_choice(self, "interpolation", INTERPOLATIONS)
        check_flag(f"{type(self).__name__}: antialias", self.antialias)

    @property
    def resampling(self) -> str:
        """How pixels are computed: "antialias", "bilinear" or "nearest"."""
        if self.interpolation != "bilinear":
            return "nearest"
        return "antialias" if self.antialias else "bilinear"


@dataclass(frozen=True)
class RandomResizedCrop(Resizing):
    """Crop a random part of each image, and resize it, like torchvision's transform of this name.

    Pixels differ by at most 1 of 255 from those of torchvision on uint8, and with ``antialias`` from those of Pillow's
    ``BILINEAR``.

    Parameters
    ----------
    size : int or (int, int)
        Height and width of the result.
    scale : (float, float)
        Range of the crop's area, as a fraction of the image's area.
    ratio : (float, float)
        Range of the crop's aspect ratio, width / height, drawn on a logarithmic scale.
    interpolation : {"bilinear", "nearest-exact"}
        Also as an ``InterpolationMode`` of torchvision. ``"nearest-exact"`` is Pillow's ``NEAREST``. Masks, whose axes
        are NHW in a converted file, are always resized by ``"nearest-exact"``.
    antialias : bool
        Whether ``"bilinear"`` averages all pixels of an image that shrinks. False: it interpolates between the four
        nearest pixels, which is faster.
    """

    size: int | Size
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    interpolation: str = "bilinear"
    antialias: bool = True
    is_random = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _size(self, self.size))
        _check_range(self, "scale", self.scale, 1.0)
        _check_range(self, "ratio", self.ratio)
        self.check_interpolation()

    def change(self, geometry: Geometry, draws: Draws, stream: int) -> None:
        height, width = geometry.height, geometry.width
        box, found = random_boxes(draws, stream, height, width, self.scale, self.ratio)
        if not found.all():  # use the largest box in the middle
            tall = np.rint(width / self.ratio[0]).clip(1, height).astype(np.int64)
            wide = np.rint(height * self.ratio[1]).clip(1, width).astype(np.int64)
            middle = (height - tall) // 2, (width - wide) // 2, tall, wide
            box = tuple(np.where(found, *both) for both in zip(box, middle, strict=True))  # type: ignore[assignment]
        geometry.crop(*box)
        geometry.resize(*self.size)  # type: ignore[misc]

    def size_after(self, size: Size | None) -> Size | None:
        return self.size  # type: ignore[return-value]


@dataclass(frozen=True)
class RandomCrop(Geometric):
    """Crop each image at a random position, after padding it, like torchvision's transform of this name.

    An image that is too small raises OptionError: there is no ``pad_if_needed``.

    Parameters
    ----------
    size : int or (int, int)
        Height and width of the result.
    padding : int, or sequence of int
        Pixels on all sides; or (left and right, top and bottom); or (left, top, right, bottom).
    fill : int, or sequence of int
        Value of the padding, from 0 to 255: one value, or one per channel.
    padding_mode : {"constant", "reflect", "edge"}
        Content of the padding: ``fill``; the image, mirrored at its edge; or the pixels of the edge.
    """

    size: int | Size
    padding: int | Sequence[int] = 0
    _: KW_ONLY
    fill: int | Sequence[int] = 0
    padding_mode: str = "constant"
    is_random = crops = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _size(self, self.size))
        padding = (self.padding,) if isinstance(self.padding, (int, np.integer)) else tuple(self.padding)
        if len(padding) not in (1, 2, 4):
            raise OptionError(f"RandomCrop: padding is {self.padding!r}: pass a number, or 2 or 4 of them")
        sides = [check_whole("RandomCrop: padding", side, 0, MAX_SIDE) for side in padding]
        object.__setattr__(self, "padding", tuple(sides * (4 // len(sides))))
        _check_choice(self, "padding_mode", MODES)
        fill = (self.fill,) if isinstance(self.fill, (int, np.integer)) else tuple(self.fill)
        fill = tuple(check_whole("RandomCrop: fill", value, 0, 255) for value in fill)
        object.__setattr__(self, "fill", fill)

    @property
    def pads(self) -> bool:  # type: ignore[override]
        return any(self.padding)  # type: ignore[arg-type]

    def change(self, geometry: Geometry, draws: Draws, stream: int) -> None:
        left, top, right, bottom = self.padding  # type: ignore[misc]
        height, width = self.size  # type: ignore[misc]
        if self.padding_mode == "reflect":
            _check_reflection(self, geometry)
        rooms = geometry.height + top + bottom - height, geometry.width + left + right - width
        _check_room(self, geometry, rooms)
        numbers = draws.uniform(stream, 2)
        down, along = (random_offsets(number, room) for number, room in zip(numbers, rooms, strict=True))
        geometry.crop(down - top, along - left, height, width)

    def size_after(self, size: Size | None) -> Size | None:
        return self.size  # type: ignore[return-value]


@dataclass(frozen=True)
class CenterCrop(Geometric):
    """Crop the middle of each image, like torchvision's transform of this name, which also pads smaller images.

    Parameters
    ----------
    size : int or (int, int)
        Height and width of the result, at most those of the image.
    """

    size: int | Size
    crops = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _size(self, self.size))

    def change(self, geometry: Geometry, draws: Draws, stream: int) -> None:
        height, width = self.size  # type: ignore[misc]
        rooms = geometry.height - height, geometry.width - width
        _check_room(self, geometry, rooms)
        down, right = (np.rint(room / 2).astype(np.int64) for room in rooms)
        geometry.crop(down, right, height, width)

    def size_after(self, size: Size | None) -> Size | None:
        return self.size  # type: ignore[return-value]


@dataclass(frozen=True)
class Resize(Resizing):
    """Resize each image, like torchvision's transform of this name, without its ``max_size``.

    Parameters
    ----------
    size : int or (int, int)
        Height and width; or one number for the shorter side, which keeps the proportions.
    interpolation : {"bilinear", "nearest-exact"}
    antialias : bool
        As for `RandomResizedCrop`.
    """

    size: int | Size
    interpolation: str = "bilinear"
    _: KW_ONLY
    antialias: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.size, (int, np.integer)):
            object.__setattr__(self, "size", check_whole("Resize: size", self.size, 1, MAX_SIDE))
        else:
            object.__setattr__(self, "size", _size(self, self.size))
        self.check_interpolation()

    def change(self, geometry: Geometry, draws: Draws, stream: int) -> None:
        if not isinstance(self.size, int):
            geometry.resize(*self.size)
            return
        height, width = geometry.height, geometry.width
        shorter, longer = np.minimum(height, width), np.maximum(height, width)
        longer = self.size * longer // shorter
        if longer.max(initial=0) > MAX_SIDE:
            raise OptionError(
                f"{self}: an image would be {longer.max()} pixels long, more than {MAX_SIDE}: pass a smaller size"
            )
        tall = height > width
        geometry.resize(np.where(tall, longer, self.size), np.where(tall, self.size, longer))

    def size_after(self, size: Size | None) -> Size | None:
        return None if isinstance(self.size, int) else self.size


@dataclass(frozen=True)
class RandomHorizontalFlip(Geometric):
    """Mirror each image from left to right with probability ``p``."""

    p: float = 0.5
    is_random = True

    def __post_init__(self) -> None:
        _check_probability(self, self.p)

    def change(self, geometry: Geometry, draws: Draws, stream: int) -> None:
        geometry.mirror(draws.uniform(stream, 1)[0] < self.p)


@dataclass(frozen=True)
class AlternatingFlip(Geometric):
    """Mirror a random half of the images in the first epoch, the others in the next, and so on.

    In two consecutive epochs, every image appears once mirrored and once not. (Samples that differ between epochs, of
    `h5chunk.Patches` or of `h5chunk.Windows` with ``goal="future"``, are mirrored independently in each epoch.)

    Source: Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", arXiv:2404.00498.
    """

    is_random = True

    def change(self, geometry: Geometry, draws: Draws, stream: int) -> None:
        first = draws.of_all_epochs().uniform(stream, 1)[0] < 0.5
        geometry.mirror(first ^ bool((draws.epoch + draws.use) % 2))


class Erasing:
    """Base class of the transforms that overwrite a random box of each image."""

    value: (
        float | Sequence[float]
    )  # one value, or one per channel, in the units of the values at this point of the list

    def boxes(self, height: int, width: int, draws: Draws, stream: int) -> Box:
        """Return the top, left, height and width of the boxes, (n,) int64 each. A box of 0 x 0 erases nothing."""
        raise NotImplementedError

    __call__ = Geometric.__call__


@dataclass(frozen=True)
class Cutout(Erasing):
    """Overwrite a square around a random pixel of each image; parts of it may lie outside of the image.

    Source: DeVries and Taylor, "Improved regularization of convolutional neural networks with cutout",
    arXiv:1708.04552.

    Parameters
    ----------
    size : int
        Side of the square.
    value : float, or sequence of float
        One value, or one per channel: from 0 to 255 if `Cutout` comes before `Normalize` and `ToDtype`, otherwise in
        the units of their results.
    """

    size: int
    value: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_whole("Cutout: size", self.size, 1, MAX_SIDE))
        object.__setattr__(self, "value", _values(self, self.value))

    def boxes(self, height: int, width: int, draws: Draws, stream: int) -> Box:
        numbers, half = draws.uniform(stream, 2), self.size // 2
        ends = []
        for number, side in zip(numbers, (height, width), strict=True):
            first = random_offsets(number, np.int64(side - 1)) - half
            ends.append((first.clip(0), (first + self.size).clip(None, side)))
        (top, bottom), (left, right) = ends
        return top, left, bottom - top, right - left


@dataclass(frozen=True)
class RandomErasing(Erasing):
    """Overwrite a random box of each image with probability ``p``, like torchvision's transform of this name.

    Parameters
    ----------
    p : float
        Probability that an image gets a box.
    scale : (float, float)
        Range of the box's area, as a fraction of the image's area.
    ratio : (float, float)
        Range of the box's aspect ratio, height / width, drawn on a logarithmic scale.
    value : float, or sequence of float
        As for `Cutout`. (Random values per pixel are not supported.)
    """

    p: float = 0.5
    scale: Range = (0.02, 0.33)
    ratio: Range = (0.3, 3.3)
    value: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        _check_probability(self, self.p)
        _check_range(self, "scale", self.scale, 1.0)
        _check_range(self, "ratio", self.ratio)
        object.__setattr__(self, "value", _values(self, self.value))

    @property
    def wide_ratio(self) -> Range:
        """The range of width / height, as of `RandomResizedCrop`; ``ratio`` is that of torchvision, the inverse."""
        low, high = self.ratio
        return 1 / high, 1 / low

    def boxes(self, height: int, width: int, draws: Draws, stream: int) -> Box:
        tall, wide = (np.full(len(draws.samples), side) for side in (height, width))
        box, found = random_boxes(draws, stream, tall, wide, self.scale, self.wide_ratio)
        erases = found & (draws.uniform(stream, 1, 2 * ATTEMPTS + 2)[0] < self.p)
        return tuple(values * erases for values in box)


AUGMENTING = (Geometric, Erasing)


def drawing_of(transforms: Sequence[Any]) -> Drawing:
    """Return what draws the geometry for a list of transforms, not all of which are augmenting."""
    geometric, erasers = ([each for each in transforms if isinstance(each, kind)] for kind in AUGMENTING)
    return Drawing(geometric, erasers)


def check_order(transforms: Sequence[Any]) -> None:
    """Raise OptionError if the transforms of a list are in an order in which they cannot be computed in one step."""
    padded = resized = cut = behind = None
    for each in transforms:
        if not isinstance(each, Geometric):
            behind = each
            continue
        if behind is not None:
            raise OptionError(f"{each} comes after {behind}: put crops, resizing and flips first")
        if each.resizes and resized is not None:
            raise OptionError(f"{each} comes after {resized}, but only one transform may resize: leave out one of them")
        if each.resizes and padded is not None:
            raise OptionError(f"{each} would resize the padding of {padded}: put the resizing transform first")
        if each.pads and cut is not None:
            remedy = "put the padded crop first" if padded is None else "leave out its padding"
            raise OptionError(f"{each} cannot pad an image that {cut} has cropped: {remedy}")
        padded, resized = each if each.pads else padded, each if each.resizes else resized
        if each.crops or each.resizes:
            cut = each if each.crops else None


def _size(transform: Any, size: Any) -> Size:
    sides = (size, size) if isinstance(size, (int, np.integer)) else tuple(size) if isinstance(size, Sequence) else ()
    name = type(transform).__name__
    if len(sides) != 2:
        raise OptionError(f"{name}: size is {size!r}: pass a number, or height and width")
    height, width = (check_whole(f"{name}: size", side, 1, MAX_SIDE) for side in sides)
    return height, width


def _check_range(transform: Any, name: str, bounds: Any, maximum: float = math.inf) -> None:
    try:
        low, high = (float(number) for number in bounds)
        valid = 0 < low <= high <= maximum and high < math.inf
    except (TypeError, ValueError):
        valid = False
    if not valid:
        limit = "" if maximum == math.inf else f", at most {maximum:g}"
        raise OptionError(
            f"{type(transform).__name__}: {name} is {bounds!r}: pass two numbers above 0, the lower first{limit}"
        )
    object.__setattr__(transform, name, (low, high))


def _check_choice(transform: Any, name: str, choices: Sequence[str]) -> None:
    if (choice := getattr(transform, name)) not in choices:
        raise OptionError(f"{type(transform).__name__}: {name} is {choice!r}: pass one of {', '.join(choices)}")


def _check_probability(transform: Any, p: Any) -> None:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise OptionError(f"{type(transform).__name__}: p is {p!r}: pass a probability, from 0 to 1")


def _values(transform: Any, value: Any) -> tuple[float, ...]:
    try:
        values = tuple(float(item) for item in (value if isinstance(value, Sequence) else (value,)))
    except (TypeError, ValueError):
        values = ()
    if not values or isinstance(value, str) or not all(map(math.isfinite, values)):
        raise OptionError(f"{type(transform).__name__}: value is {value!r}: pass a number, or one per channel")
    return values


def _check_room(transform: Any, geometry: Geometry, rooms: tuple[Any, Any]) -> None:
    if min(rooms[0].min(initial=0), rooms[1].min(initial=0)) >= 0:
        return
    first = int(np.flatnonzero((rooms[0] < 0) | (rooms[1] < 0))[0])
    size = f"{geometry.height[first]} x {geometry.width[first]}"
    remedy = "a larger padding" if isinstance(transform, RandomCrop) else "a smaller size"
    raise OptionError(f"{transform} is larger than an image of {size}: put a Resize before it, or pass {remedy}")


def _check_reflection(crop: RandomCrop, geometry: Geometry) -> None:
    left, top, right, bottom = crop.padding  # type: ignore[misc]
    for sides, max_padding in ((geometry.height, max(top, bottom)), (geometry.width, max(left, right))):
        if len(sides) and max_padding >= sides.min():
            raise OptionError(
                f"{crop}: a side of {sides.min()} pixels is too short to reflect {max_padding} pixels: use less padding"
            )
