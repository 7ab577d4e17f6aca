"""Augment batches: draw the random geometry of each sample, and compute results as `augment_rule` describes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from h5chunk import native
from h5chunk.errors import MAX_SIDE, OptionError
from h5chunk.machine import KeptThreads, available_cores
from h5chunk.native.augment import ERASED, OFFSET, ImageRule, augment
from h5chunk.plan.draws import Draws
from h5chunk.plan.permutation import Indices
from h5chunk.transforms.augment import ERASERS, GEOMETRIC
from h5chunk.transforms.augment_rule import AUGMENTING, augment_with_torch, make_rule, native_rule
from h5chunk.transforms.compiled import AugmentKernel, LoadedTable
from h5chunk.transforms.geometry import ERASING, Geometry, Size
from h5chunk.transforms.images import ImagesByNumber, kept_converter

MAX_TOGETHER, TAPS_BYTES = 4096, 64 << 20  # samples to draw at a time, and bytes of their weights on a GPU
MAX_CHANNELS = 256  # of augment.c
IMAGES = 8  # images that a thread takes at a time


@dataclass(eq=False)
class GeometryTable:
    """The geometry table of consecutive samples of a window or an epoch, one row per sample."""

    table: Indices
    first: int  # position of the first of these samples in the window or epoch
    loaded: LoadedTable | None = None  # the table on a GPU
    following: Future[Indices] | None = None  # the table of the samples after these


class AugmentConverter:
    """Converts stored images by transforms: crops, resizing and flips, then `Normalize`, `ToDtype` and erasing.

    For the arguments see `h5chunk.transforms.images.ImageConverter`. With ``is_mask``, images are resized by
    nearest-neighbour interpolation.
    """

    is_uncut = False
    changes_nothing = False
    is_random = True  # whether results depend on `Draws`
    pair = None

    def __init__(
        self,
        transforms: Sequence[Any],
        stored: torch.dtype,
        sample_shape: tuple[int, ...],
        axis: int,
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        *,
        is_mask: bool = False,
    ) -> None:
        self._geometric = tuple(each for each in transforms if isinstance(each, GEOMETRIC))
        self._erasers = tuple(each for each in transforms if isinstance(each, ERASERS))
        _check_list(transforms, stored, sample_shape, axis)
        self._shape, self._interleaved = sample_shape, axis == 2
        height, width = sample_shape[:2] if self._interleaved else sample_shape[-2:]
        self._sides = np.array([height]), np.array([width])
        self._rule = make_rule(transforms, sample_shape, axis, self._size(), is_mask)
        self.dtype, self._allocate = self._rule.dtype, allocate
        self.sample_bytes = self._rule.channels * math.prod(self._rule.size) * self.dtype.itemsize
        taps = 2 * (3 + 2 * max(height, width) // min(self._rule.size)) * max(self._rule.size)
        self._together = max(1, min(MAX_TOGETHER, TAPS_BYTES // (4 * taps)))
        self._kernel: AugmentKernel | None = None
        self._native: ImageRule | None = None
        self.threads = KeptThreads("h5chunk-augment")

    def _size(self) -> Size:
        """Return the size of results. Raise OptionError if an image is too small for a transform."""
        geometry = self._cut(*self._sides, Draws(0, 0, np.zeros(1, np.int64)))
        return int(geometry.height[0]), int(geometry.width[0])

    def table(self, heights: Indices, widths: Indices, draws: Draws) -> Indices:
        """Draw the geometry of n images, and return it as a table whose offsets are 0.

        ``heights`` and ``widths`` are (n,), or (1,) if all images have one size. The random numbers of a transform
        depend on its position among the random transforms of the list, so that fields with equal lists get equal
        geometry.
        """
        count = len(draws.samples)
        geometry = self._cut(np.full(count, heights, np.int64), np.full(count, widths, np.int64), draws)
        for number, eraser in enumerate(self._erasers, ERASING):
            geometry.erased.append(eraser.boxes(*self._rule.size, draws, number))
        return geometry.fill(self._empty_table(count))

    def _empty_table(self, count: int) -> Indices:
        shape = count, ERASED + 4 * len(self._erasers)
        return torch.empty(shape, dtype=torch.int64, pin_memory=self._rule.fill.device.type == "cuda").numpy()

    def _cut(self, heights: Indices, widths: Indices, draws: Draws) -> Geometry:
        geometry, stream = Geometry(heights, widths), 0
        for each in self._geometric:
            each.change(geometry, draws, stream)
            stream += each.is_random
        return geometry

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel": None, "_native": None}  # another process makes its own

    def prepare(self, device: torch.device) -> None:
        """Put the constants on the device, and compile the kernel for it."""
        self._rule = self._rule.to(device)
        if self._kernel is None and AugmentKernel.suits(self._rule):
            self._kernel = AugmentKernel(self._rule)

    def __call__(self, images: torch.Tensor | ImagesByNumber, keep: bool, draws: Draws) -> torch.Tensor:
        """Return the augmented batch in newly allocated memory."""
        images = images if isinstance(images, ImagesByNumber) else ImagesByNumber(images)
        shape = self.shape(len(images))
        if images.images.device.type == "cpu":
            out = self._allocate(shape, self.dtype)
        else:
            out = torch.empty(shape, dtype=self.dtype, device=images.images.device)
        self.fill(images, draws, out)
        return self.as_stored(out)

    def as_stored(self, out: torch.Tensor) -> torch.Tensor:
        """Return a view of the results whose axes are in the order of the stored images."""
        return out.permute(0, 3, 1, 2) if self._rule.out_interleaved and not self._interleaved else out

    def shape(self, count: int) -> tuple[int, ...]:
        """Return the shape of results in memory."""
        rule = self._rule
        if len(self._shape) == 2:
            return count, *rule.size
        return (count, *rule.size, rule.channels) if rule.out_interleaved else (count, rule.channels, *rule.size)

    def fill(self, images: torch.Tensor | ImagesByNumber, draws: Draws, out: torch.Tensor) -> None:
        """Write the augmented images to ``out``, which has the shape that `shape` returns."""
        images = images if isinstance(images, ImagesByNumber) else ImagesByNumber(images)
        if not len(images):
            return
        source, numbers, image_bytes = images.images.reshape(-1), images.numbers, math.prod(self._shape)
        drawn = self._geometry_of(draws)
        first, count = draws.first - drawn.first, len(images)
        if self._kernel is not None and (loaded := self._kernel.load(drawn.table, drawn.loaded, of_one_size=True)):
            drawn.loaded = loaded
            self._kernel(source, loaded, first, None if numbers is None else numbers.on_device, image_bytes, out)
            return
        table = drawn.table[first : first + count].copy()
        table[:, OFFSET] = image_bytes * (np.arange(count) if numbers is None else numbers.host)
        self.compute(source, table, out)

    def _geometry_of(self, draws: Draws) -> GeometryTable:
        """Return the geometry table of these samples, which may also contain the samples of the following batches."""
        if draws.kept is None or draws.whole is None:
            return GeometryTable(self.table(*self._sides, draws), draws.first)
        drawn, stop = draws.kept.get(self), draws.first + len(draws.samples)
        if drawn is None or not drawn.first <= draws.first <= stop <= drawn.first + len(drawn.table):
            count = max(1, self._together // len(draws.samples)) * len(draws.samples)
            drawn = draws.kept[self] = self._draw(draws, draws.whole[draws.first :], count, drawn)
        return drawn

    def _draw(self, draws: Draws, samples: Indices, count: int, before: GeometryTable | None) -> GeometryTable:
        """Return the geometry of ``count`` samples, which a thread may already have drawn.

        For a GPU, start drawing the geometry of the samples that follow.
        """
        if before is not None and before.following is not None and before.first + len(before.table) == draws.first:
            table = before.following.result()
        else:
            table = self.table(*self._sides, draws._replace(samples=samples[:count]))
        drawn, rest = GeometryTable(table, draws.first), samples[len(table) : len(table) + count]
        if self._kernel is not None and len(rest):
            drawn.following = self.threads.pool(1).submit(self.table, *self._sides, draws._replace(samples=rest))
        return drawn

    def compute(self, source: torch.Tensor, table: Indices, out: torch.Tensor) -> None:
        """Write the result of each row of ``table`` to ``out``. ``source``, 1-D uint8, contains the images."""
        if self._kernel is not None and (loaded := self._kernel.load(table, None)) is not None:
            self._kernel(source, loaded, 0, None, 0, out)
            return
        if source.device.type == "cpu" and native.available():
            self._compute_natively(source, table, out)
            return
        count, channels, height, width = len(table), self._rule.channels, *self._rule.size
        if self._rule.out_interleaved:
            planar = out.view(count, height, width, channels).permute(0, 3, 1, 2)
        else:
            planar = out.view(count, channels, height, width)
        augment_with_torch(self._rule, source, table, planar)

    def _compute_natively(self, source: torch.Tensor, table: Indices, out: torch.Tensor) -> None:
        rule, result_bytes = self._native_rule(), out.nbytes // max(1, len(table))

        def compute(first: int) -> None:
            part = table[first : first + IMAGES]
            augment(rule, source.data_ptr(), source.nbytes, part, out.data_ptr() + first * result_bytes)

        firsts = range(0, len(table), IMAGES)
        if len(firsts) == 1:
            compute(0)
            return
        deque(self.threads.pool(available_cores()).map(compute, firsts), 0)

    def _native_rule(self) -> ImageRule:
        if self._native is None:
            self._native = native_rule(self._rule)
        return self._native

    def release(self) -> None:
        """Stop the threads."""
        if self._kernel is not None:
            self._kernel.wait()
        self.threads.close()


def _check_list(transforms: Sequence[Any], stored: torch.dtype, sample_shape: tuple[int, ...], axis: int) -> None:
    """Raise OptionError if the transforms are in the wrong order, or unsuitable for the samples."""
    first = next(each for each in transforms if isinstance(each, AUGMENTING))
    if stored != torch.uint8:
        raise OptionError(
            f"{first} is for uint8, not for {stored}: store such samples as uint8, or transform batches yourself, with "
            "the same random numbers for images and masks"
        )
    if len(sample_shape) not in (2, 3) or not all(0 < side <= MAX_SIDE for side in sample_shape):
        raise OptionError(
            f"{first} is for images of (C, H, W), (H, W, C) or (H, W), of at most {MAX_SIDE} pixels per side, but "
            f"samples have the shape {sample_shape}: leave it out"
        )
    if len(sample_shape) == 3 and sample_shape[axis] > MAX_CHANNELS:
        raise OptionError(
            f"{first} is for at most {MAX_CHANNELS} channels, but samples have {sample_shape[axis]}: leave it out"
        )
    padded = resized = cut = behind = None
    for each in transforms:
        if not isinstance(each, GEOMETRIC):
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


def augment_batch(transform: Any, batch: torch.Tensor) -> torch.Tensor:
    """Apply one transform to a batch, with draws from torch's random generator."""
    converter = kept_converter(AugmentConverter, transform, batch.dtype, tuple(batch.shape[1:]), batch.device)
    seed = int(torch.randint(1 << 62, ()))
    return converter(batch.contiguous(), True, Draws(seed, 0, np.arange(len(batch))))
