"""Draw random numbers for individual samples, and the geometry of augmented images.

A random number depends only on the seed, the epoch, the index of the sample, and how often the epoch has used the
sample before. It does not depend on batches, ranks, workers or devices. If weights repeat a sample in an epoch, each
repeat has a different key.

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
EVERY_EPOCH = -1  # used as the epoch for draws that are the same in all epochs
ERASING = 1 << 20  # first stream of the transforms that erase boxes
ATTEMPTS, EARLY_ATTEMPTS = 10, 2  # attempts to draw a box that fits, as in torchvision
POWERS = [math.log(2) ** n / math.factorial(n) for n in range(8)]  # Taylor coefficients of 2**x; also in draws.c
STEP = 0x9E3779B97F4A7C15
REPEAT, MOST_REPEATS = 1 << 40, 1 << 23  # REPEAT exceeds the index of any sample

# columns of a table of geometry; from ERASED + 4 * k: top, left, height and width of the k-th erased box in the result
OFFSET, HEIGHT, WIDTH, TOP, LEFT, BOX_HEIGHT, BOX_WIDTH, FULL_HEIGHT, FULL_WIDTH, DOWN, RIGHT, FLIP, ERASED = range(13)


class Draws(NamedTuple):
    """The random numbers of some samples.

    ``samples``, (n,) int64, has the keys of the samples. The key of a sample is its index in the file, plus k *
    `REPEAT` if weights repeat the sample for the k-th time in the epoch. ``use`` is k for the k-th echo of the samples,
    and 0 for their first use. If the samples are a part of a window or an epoch, ``whole`` has the keys of the entire
    window or epoch, and the part begins at ``whole[first]``. All parts share the dict ``kept``, in which transforms
    store results for other parts.
    """

    seed: int
    epoch: int
    samples: Indices
    use: int = 0
    kept: dict[Any, Any] | None = None
    whole: Indices | None = None
    first: int = 0

    def uniform(self, stream: int, count: int, first: int = 0) -> Floats:
        """Return random numbers, uniform in [0, 1): (count, n) float64.

        For each sample, these are the numbers ``first`` to ``first + count - 1`` of its stream ``stream``.
        """
        key = stream_key(self.seed, self.epoch, self.use, stream)
        sample_words = mixed(self.samples.view(np.uint64), np.uint64(key))
        steps = (np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(STEP))[:, None]
        return np.asarray((mixed(sample_words + steps, np.uint64(0)) >> np.uint64(11)) * 2.0**-53)

    @property
    def numbers(self) -> Indices:
        """The indices of the samples in the file: (n,) int64."""
        return self.samples % REPEAT

    def of_all_epochs(self) -> Draws:
        """Return draws that are the same in all epochs."""
        return Draws(self.seed, EVERY_EPOCH, self.samples)

    def part(self, start: int, stop: int) -> Draws:
        """Return the draws of samples ``start`` to ``stop`` (excluded)."""
        return self._replace(samples=self.samples[start:stop], first=self.first + start)


def epoch_rows(epoch: int, num_samples: int) -> int:
    """Return the offset of an epoch's sample indices, for data sets like patches, whose samples differ between epochs.

    The offsets repeat before an index would reach REPEAT.
    """
    return epoch % (REPEAT // num_samples) * num_samples


def keys_of_repeated(samples: Indices) -> Indices:
    """Return the keys, (n,) int64, of ascending sample indices, which may be repeated.

    >>> (keys_of_repeated(np.array([1, 4, 4])) // REPEAT).tolist()
    [0, 0, 1]
    """
    repeats = np.arange(len(samples)) - np.searchsorted(samples, samples)
    return np.asarray(samples + REPEAT * (repeats % MOST_REPEATS))


@lru_cache(1024)
def stream_key(*numbers: int) -> int:
    """Hash the seed, the epoch, the use and the stream to one 64-bit integer."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mixed(key + np.uint64(number & (1 << 64) - 1), np.uint64(STEP))
    return int(key[0])


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
