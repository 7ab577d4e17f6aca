"""Draw the geometry of augmented images: crops, sizes, flips and erased boxes, as integers per image.

`Drawing` draws for a list of transforms (`h5chunk.transforms.augment`), whose methods change a `Geometry`. The result
is a table with a row per image, from which `h5chunk.transforms.pixels` computes the images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from h5chunk.native.augment import ERASED
from h5chunk.plan.draws import Draws, Floats
from h5chunk.plan.permutation import Indices

Flags = npt.NDArray[np.bool_]
Size = tuple[int, int]
Box = tuple[Indices, Indices, Indices, Indices]  # top, left, height and width of each image's box
ERASING = 1 << 20  # first stream of the transforms that erase boxes
ATTEMPTS, EARLY_ATTEMPTS = 10, 2  # attempts to draw a box that fits, as in torchvision
POWERS = [math.log(2) ** n / math.factorial(n) for n in range(8)]  # Taylor coefficients of 2**x


@dataclass(eq=False)
class Drawing:
    """Draws the geometry of images for the transforms of a list: first the geometric ones, then those that erase.

    ``size`` is the size of the results, in which boxes are erased.
    """

    geometric: Sequence[Any]
    erasers: Sequence[Any]
    size: Size = (0, 0)
    is_pinned: bool = False  # whether tables are in pinned memory, for a GPU

    def size_of(self, heights: Indices, widths: Indices) -> Size:
        """Return the size of the result for an image. Raise OptionError if the image is too small for a transform."""
        geometry = self._cut(heights, widths, Draws(0, 0, np.zeros(1, np.int64)))
        return int(geometry.height[0]), int(geometry.width[0])

    def table(self, heights: Indices, widths: Indices, draws: Draws) -> Indices:
        """Draw the geometry of n images: (n, columns) int64, whose offsets are 0; see `h5chunk.native.augment`.

        ``heights`` and ``widths`` are (n,), or (1,) if all images have one size. The random numbers of a transform
        depend on its position among the random transforms of the list, so that fields with equal lists get equal
        geometry.
        """
        count = len(draws.samples)
        geometry = self._cut(np.full(count, heights, np.int64), np.full(count, widths, np.int64), draws)
        for number, eraser in enumerate(self.erasers, ERASING):
            geometry.erased.append(eraser.boxes(*self.size, draws, number))
        shape = count, ERASED + 4 * len(self.erasers)
        return geometry.fill(torch.empty(shape, dtype=torch.int64, pin_memory=self.is_pinned).numpy())

    def _cut(self, heights: Indices, widths: Indices, draws: Draws) -> Geometry:
        geometry, stream = Geometry(heights, widths), 0
        for each in self.geometric:
            each.change(geometry, draws, stream)
            stream += each.is_random
        return geometry


@dataclass
class Geometry:
    """The crop, resize and flip of each image, in (n,) int64 arrays or in integers that apply to all images.

    The ``box`` of the image is resized to the size ``full``. The result is a window of the resized box that starts at
    row ``down`` and column ``right``, and is padded where it extends beyond the box. Where ``flip`` is set, the window
    is then mirrored.
    """

    height: Indices  # of the window, initially of the image
    width: Indices
    flip: Flags = field(init=False)
    box: Box = field(init=False)
    full: tuple[Indices, Indices] = field(init=False)
    erased: list[Box] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = self.full = self.height, self.width
        zero = np.zeros(len(self.height), np.int64)
        self.box, self.down, self.right = (zero, zero, self.height, self.width), zero, zero
        self.flip = np.zeros(len(self.height), np.bool_)

    def crop(self, top: Indices, left: Indices, height: Indices | int, width: Indices | int) -> None:
        """Crop the window. Where ``flip`` is set, ``left`` is counted in the mirrored window."""
        left = np.where(self.flip, self.width - left - width, left) if self.flip.any() else left
        self.down, self.right = self.down + top, self.right + left
        self.height, self.width = self._each(height), self._each(width)

    def resize(self, height: Indices | int, width: Indices | int) -> None:
        """Resize the window, which must be inside the image and must not have been resized before."""
        self.box = self.box[0] + self.down, self.box[1] + self.right, self.height, self.width
        self.full = self.height, self.width = self._each(height), self._each(width)
        self.down = self.right = np.zeros_like(self.down)

    def _each(self, size: Indices | int) -> Indices:
        return size if isinstance(size, np.ndarray) else np.full(len(self.down), size)

    def mirror(self, flip: Flags) -> None:
        """Flip the window from left to right where ``flip`` is set."""
        self.flip = self.flip ^ flip

    def fill(self, table: Indices) -> Indices:
        """Fill and return a table, (n, ERASED + 4 * len(erased)) int64, with a row per image and OFFSET set to 0."""
        columns: list[Any] = [0, *self.sizes, *self.box, *self.full, self.down, self.right, self.flip]
        columns += [values for box in self.erased for values in box]
        for number, column in enumerate(columns):
            table[:, number] = column
        return table


def random_boxes(
    draws: Draws, stream: int, height: Indices, width: Indices, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Box, Flags]:
    """Draw a box in each image, whose sizes are ``height`` and ``width``, (n,) each.

    ``scale`` is the range of a box's area, as a fraction of the image's area, and ``ratio`` the range of its aspect
    ratio, width over height. Returns the boxes, and whether one of `ATTEMPTS` boxes fitted, (n,). Where none fitted,
    the box is undefined. The sizes of the attempts are the first 2 * `ATTEMPTS` numbers of the stream, and the next two
    place the box.
    """
    early, placing = range(2 * EARLY_ATTEMPTS), range(2 * ATTEMPTS, 2 * ATTEMPTS + 2)
    numbers = draws.chosen(stream, (*early, *placing))
    sizes, (down, right) = _first_fitting(numbers[:-2], height, width, scale, ratio), numbers[-2:]
    remaining = np.flatnonzero(~sizes[2])
    if len(remaining):  # few, because most boxes fit at an early attempt
        some = Draws(draws.seed, draws.epoch, draws.samples[remaining], draws.use)
        more = some.chosen(stream, range(2 * EARLY_ATTEMPTS, 2 * ATTEMPTS))
        later = _first_fitting(more, height[remaining], width[remaining], scale, ratio)
        for values, value in zip(sizes, later, strict=True):
            values[remaining] = value
    tall, wide, found = sizes
    return (random_offsets(down, height - tall), random_offsets(right, width - wide), tall, wide), found


def _first_fitting(
    numbers: Floats, height: Indices, width: Indices, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Indices, Indices, Flags]:
    """Return the height and width of the first box that fits into each image, and whether one fits: (n,) each.

    ``numbers``, (2 * attempts, n), are uniform in [0, 1): the area and the aspect ratio of each attempt.
    """
    areas = (scale[0] + numbers[::2] * (scale[1] - scale[0])) * (height * width)
    low, high = math.log2(ratio[0]), math.log2(ratio[1])
    shapes = _powers_of_two(low + numbers[1::2] * (high - low))
    tall, wide = np.rint(np.sqrt(areas / shapes)), np.rint(np.sqrt(areas * shapes))
    fits = (tall > 0) & (wide > 0) & (tall <= height) & (wide <= width)
    first, images = fits.argmax(0), np.arange(fits.shape[1])
    return tall[first, images].astype(np.int64), wide[first, images].astype(np.int64), fits[first, images]


def _powers_of_two(exponents: Floats) -> Floats:
    """Return 2**x with a relative error below 1e-7. Unlike np.exp2, it gives the same bits on every machine."""
    whole = np.rint(exponents)
    part, total = exponents - whole, np.full_like(exponents, POWERS[-1])
    for power in POWERS[-2::-1]:
        total *= part
        total += power
    return np.ldexp(total, whole.astype(np.int64))


def random_offsets(numbers: Floats, room: Indices) -> Indices:
    """Scale random numbers in [0, 1) to integers from 0 to ``room`` (included): (n,) int64."""
    return np.minimum((numbers * (room + 1)).astype(np.int64), room)
