"""Draw the geometry of augmented images: crops, sizes, flips and erased boxes, as integers per image."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from h5chunk.plan.draws import Draws, Floats
from h5chunk.plan.permutation import Indices

Flags = npt.NDArray[np.bool_]
Size = tuple[int, int]
ERASING = 1 << 20  # first stream of the transforms that erase boxes
ATTEMPTS, EARLY_ATTEMPTS = 10, 2  # attempts to draw a box that fits, as in torchvision
POWERS = [math.log(2) ** n / math.factorial(n) for n in range(8)]  # Taylor coefficients of 2**x; also in draws.c


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
    box: tuple[Indices, Indices, Indices, Indices] = field(init=False)
    full: tuple[Indices, Indices] = field(init=False)
    erased: list[tuple[Indices, Indices, Indices, Indices]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = self.full = self.height, self.width
        zero = np.zeros(len(self.height), np.int64)
        self.box, self.down, self.right = (zero, zero, self.height, self.width), zero, zero
        self.flip = np.zeros(len(self.height), np.bool_)

    def crop(self, top: Indices, left: Indices, height: Indices | int, width: Indices | int) -> None:
        """Crop the window. Where ``flip`` is set, ``left`` is counted in the mirrored window."""
        left = np.where(self.flip, self.width - left - width, left) if self.flip.any() else left
        self.down, self.right = self.down + top, self.right + left
        self.height, self.width = (np.broadcast_to(size, self.down.shape) for size in (height, width))

    def resize(self, height: Indices | int, width: Indices | int) -> None:
        """Resize the window, which must be inside the image and must not have been resized before."""
        self.box = self.box[0] + self.down, self.box[1] + self.right, self.height, self.width
        self.height, self.width = (np.broadcast_to(size, self.down.shape) for size in (height, width))
        self.full = self.height, self.width
        self.down = self.right = np.zeros_like(self.down)

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
) -> tuple[Indices, Indices, Flags]:
    """Draw the heights and widths of boxes that fit into images, whose sizes are ``height`` and ``width``: (n,) each.

    ``scale`` is the range of a box's area, as a fraction of the image's area, and ``ratio`` the range of its aspect
    ratio, width over height. Returns the heights, the widths, and whether one of `ATTEMPTS` boxes fitted, (n,) each.
    Where none fitted, the size is undefined. The attempts use the first 2 * `ATTEMPTS` numbers of the stream.
    """
    boxes = _first_fitting(draws, stream, range(EARLY_ATTEMPTS), height, width, scale, ratio)
    remaining = np.flatnonzero(~boxes[2])
    if len(remaining):  # few, because most boxes fit at an early attempt
        later_draws = Draws(draws.seed, draws.epoch, draws.samples[remaining], draws.use)
        later = _first_fitting(
            later_draws, stream, range(EARLY_ATTEMPTS, ATTEMPTS), height[remaining], width[remaining], scale, ratio
        )
        for values, value in zip(boxes, later, strict=True):
            values[remaining] = value
    return boxes


def _first_fitting(
    draws: Draws,
    stream: int,
    attempts: range,
    height: Indices,
    width: Indices,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[Indices, Indices, Flags]:
    """Draw one box per attempt for each image, and return the first box that fits, as `random_boxes` does."""
    uniform = draws.uniform(stream, 2 * len(attempts), 2 * attempts.start)
    areas = (scale[0] + uniform[::2] * (scale[1] - scale[0])) * (height * width)
    low, high = (math.log2(bound) for bound in ratio)
    shapes = _powers_of_two(low + uniform[1::2] * (high - low))
    tall, wide = np.rint(np.sqrt(areas / shapes)), np.rint(np.sqrt(areas * shapes))
    fits = (tall > 0) & (wide > 0) & (tall <= height) & (wide <= width)
    first, images = fits.argmax(0), np.arange(fits.shape[1])
    return tall[first, images].astype(np.int64), wide[first, images].astype(np.int64), fits[first, images]


def _powers_of_two(exponents: Floats) -> Floats:
    """Return 2**x with a relative error below 1e-7. Unlike np.exp2, it gives the same bits as the native library."""
    whole = np.rint(exponents)
    part, total = exponents - whole, np.full_like(exponents, POWERS[-1])
    for power in POWERS[-2::-1]:
        total = total * part + power
    return np.ldexp(total, whole.astype(np.int64))


def random_offsets(numbers: Floats, room: Indices) -> Indices:
    """Scale random numbers in [0, 1) to integers from 0 to ``room`` (included): (n,) int64."""
    return np.minimum((numbers * (room + 1)).astype(np.int64), room)
