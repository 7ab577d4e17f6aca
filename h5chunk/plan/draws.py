"""Random numbers for individual samples, and the geometry of augmented images that is drawn with them.

A number depends only on the seed, the epoch, the sample's number, and which use of the sample in the epoch it is: not
on batches, ranks, workers or devices. A sample that weights repeat in an epoch is drawn for by a key, which is another
for each repeat.

Source: the finaliser of SplitMix64, of Steele et al., "Fast splittable pseudorandom number generators" (2014).

>>> draws = Draws(0, 0, np.arange(3))
>>> draws.uniform(0, 2).shape
(2, 3)
>>> bool((draws.uniform(0, 2)[:, 1:] == Draws(0, 0, np.arange(1, 3)).uniform(0, 2)).all())
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from h5chunk.plan.permutation import Indices, mixed

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Size = tuple[int, int]
EVERY_EPOCH = -1  # an epoch for draws that stay the same
ERASING = 1 << 20  # first stream of transforms that erase
ATTEMPTS, EARLY_ATTEMPTS = 10, 2  # to draw a box that fits, as in torchvision
POWERS = [math.log(2) ** n / math.factorial(n) for n in range(8)]  # of the series of 2**x; also in draws.c
STEP = 0x9E3779B97F4A7C15
REPEAT, MOST_REPEATS = 1 << 40, 1 << 23  # REPEAT is more than the number of any sample

# columns of a table of geometry; ERASED + 4 * k: top, left, height and width of the k-th erased box, in the result
OFFSET, HEIGHT, WIDTH, TOP, LEFT, BOX_HEIGHT, BOX_WIDTH, FULL_HEIGHT, FULL_WIDTH, DOWN, RIGHT, FLIP, ERASED = range(13)


class Draws(NamedTuple):
    """Random numbers for samples, given by their keys; ``use`` is 0, or k for the k-th echo of a sample.

    The key of a sample is its number in the file, plus k * `REPEAT` if an epoch has it again, for the k-th time.

    The draws of a batch are part of the draws of a window or an epoch: they begin at sample ``first`` of its samples,
    ``whole``. All parts share the dict ``kept``, in which converters cache results for several parts.
    """

    seed: int
    epoch: int
    samples: Indices
    use: int = 0
    kept: dict[Any, Any] | None = None
    whole: Indices | None = None
    first: int = 0

    def uniform(self, stream: int, count: int, first: int = 0) -> Floats:
        """Return numbers ``first`` to ``first + count`` of a stream, uniform in [0, 1): (count, num_samples)."""
        key = stream_key(self.seed, self.epoch, self.use, stream)
        sample_words = mixed(self.samples.view(np.uint64), np.uint64(key))
        steps = (np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(STEP))[:, None]
        return np.asarray((mixed(sample_words + steps, np.uint64(0)) >> np.uint64(11)) * 2.0**-53)

    @property
    def numbers(self) -> Indices:
        """The numbers of the samples in the file: (n,)."""
        return self.samples % REPEAT

    def of_all_epochs(self) -> Draws:
        """Return draws that are the same in each epoch."""
        return Draws(self.seed, EVERY_EPOCH, self.samples)

    def part(self, start: int, stop: int) -> Draws:
        """Return the draws of samples ``start`` to ``stop``."""
        return self._replace(samples=self.samples[start:stop], first=self.first + start)


def keys_of_repeated(samples: Indices) -> Indices:
    """Return the keys of samples, ascending and perhaps repeated.

    >>> (keys_of_repeated(np.array([1, 4, 4])) // REPEAT).tolist()
    [0, 0, 1]
    """
    repeats = np.arange(len(samples)) - np.searchsorted(samples, samples)
    return np.asarray(samples + REPEAT * (repeats % MOST_REPEATS))


@lru_cache(1024)
def stream_key(*numbers: int) -> int:
    """Combine the seed, the epoch, the use and the stream into one number of 64 bits."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mixed(key + np.uint64(number & (1 << 64) - 1), np.uint64(STEP))
    return int(key[0])


@dataclass
class Geometry:
    """The part of an image that each result shows, and its size: (n,) int64 arrays, or numbers for all results.

    A box of the image is resized to its full size, of which a window becomes the result: from ``down`` and ``right``,
    which may lie outside, where the image is padded. Where ``flip`` is set, the window is then mirrored.
    """

    height: Indices  # of the window, at first the image
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
        """Crop the window; ``left`` counts from its left side after mirroring, where ``flip`` is set."""
        left = np.where(self.flip, self.width - left - width, left) if self.flip.any() else left
        self.down, self.right = self.down + top, self.right + left
        self.height, self.width = (np.broadcast_to(size, self.down.shape) for size in (height, width))

    def resize(self, height: Indices | int, width: Indices | int) -> None:
        """Resize the window, which must lie inside of the image, and must not have been resized before."""
        self.box = self.box[0] + self.down, self.box[1] + self.right, self.height, self.width
        self.height, self.width = (np.broadcast_to(size, self.down.shape) for size in (height, width))
        self.full = self.height, self.width
        self.down = self.right = np.zeros_like(self.down)

    def mirror(self, flip: Flags) -> None:
        """Flip the window from left to right where ``flip`` is set."""
        self.flip = self.flip ^ flip

    def fill(self, table: Indices) -> Indices:
        """Fill a table, (n, ERASED + 4 * erased boxes) int64, with a row per image and offsets of 0, and return it."""
        columns: list[Any] = [0, *self.sizes, *self.box, *self.full, self.down, self.right, self.flip]
        columns += [values for box in self.erased for values in box]
        for number, column in enumerate(columns):
            table[:, number] = column
        return table


def random_boxes(
    draws: Draws, stream: int, height: Indices, width: Indices, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Indices, Indices, Flags]:
    """Draw the heights and widths of boxes that fit into images of these sizes.

    ``scale`` is the range of a box's area, as a fraction of the image's, and ``ratio`` that of its aspect ratio, width
    over height. Returns the heights, the widths, and whether one of `ATTEMPTS` boxes fitted; otherwise the size is
    invalid. The attempts use the first 2 * `ATTEMPTS` numbers of the stream.
    """
    boxes = _attempts(draws, stream, range(EARLY_ATTEMPTS), height, width, scale, ratio)
    remaining = np.flatnonzero(~boxes[2])
    if len(remaining):  # few: most boxes fit at once
        later_draws = Draws(draws.seed, draws.epoch, draws.samples[remaining], draws.use)
        later = _attempts(
            later_draws, stream, range(EARLY_ATTEMPTS, ATTEMPTS), height[remaining], width[remaining], scale, ratio
        )
        for values, value in zip(boxes, later, strict=True):
            values[remaining] = value
    return boxes


def _attempts(
    draws: Draws,
    stream: int,
    numbers: range,
    height: Indices,
    width: Indices,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[Indices, Indices, Flags]:
    """Draw a box for each of the attempts ``numbers``, and return the first that fits, as `random_boxes` does."""
    uniform = draws.uniform(stream, 2 * len(numbers), 2 * numbers.start)
    areas = (scale[0] + uniform[::2] * (scale[1] - scale[0])) * (height * width)
    low, high = (math.log2(bound) for bound in ratio)
    shapes = _powers_of_two(low + uniform[1::2] * (high - low))
    tall, wide = np.rint(np.sqrt(areas / shapes)), np.rint(np.sqrt(areas * shapes))
    fits = (tall > 0) & (wide > 0) & (tall <= height) & (wide <= width)
    first, images = fits.argmax(0), np.arange(fits.shape[1])
    return tall[first, images].astype(np.int64), wide[first, images].astype(np.int64), fits[first, images]


def _powers_of_two(exponents: Floats) -> Floats:
    """Return 2**x with a relative error below 1e-7, by operations whose results are the same in C; np.exp2 is not."""
    whole = np.rint(exponents)
    part, total = exponents - whole, np.full_like(exponents, POWERS[-1])
    for power in POWERS[-2::-1]:
        total = total * part + power
    return np.ldexp(total, whole.astype(np.int64))


def random_offsets(numbers: Floats, room: Indices) -> Indices:
    """Turn random numbers below 1, (n,), into whole numbers from 0 to ``room``."""
    return np.minimum((numbers * (room + 1)).astype(np.int64), room)
