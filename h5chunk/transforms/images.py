"""Converters of images and other dense samples: values alone, or with crops, resizing and flips."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from h5chunk.errors import MAX_SIDE, OptionError
from h5chunk.native.augment import OFFSET
from h5chunk.plan.draws import Draws
from h5chunk.plan.permutation import Indices
from h5chunk.store.read.fields import WINDOW
from h5chunk.transforms.augment import AUGMENTING, check_order, drawing_of
from h5chunk.transforms.compiled import FusedKernel, LoadedTable
from h5chunk.transforms.converter import Converter, Loaded
from h5chunk.transforms.csr import Allocate, SampleNumbers, fresh
from h5chunk.transforms.normalize import Normalize, ToDtype, result_dtype, scale_and_shift, unit_of
from h5chunk.transforms.pixels import Pixels, make_rule

KEPT_CONVERTERS = 32  # of transforms that are called as functions
MAX_TOGETHER, TAPS_BYTES = 4096, 64 << 20  # samples to draw at a time, and bytes of their weights on a GPU
MAX_CHANNELS = 256  # of augment.c


class ImageConverter(Converter):
    """Convert stored samples by at most one `Normalize` and one `ToDtype`, in one kernel.

    ``channel_axis`` is 0 for (C, H, W) samples, 2 for (H, W, C), and one more for windows of these. ``allocate``
    returns host memory for batches. Raise `OptionError` if the transforms do not fit each other, or the samples.
    """

    def __init__(
        self,
        transforms: Sequence[Any],
        stored: torch.dtype,
        sample_shape: tuple[int, ...],
        channel_axis: int,
        allocate: Allocate,
    ) -> None:
        normalize = next((each for each in transforms if isinstance(each, Normalize)), None)
        to_dtype = next((each for each in transforms if isinstance(each, ToDtype)), None)
        self.dtype = result_dtype(transforms, normalize, to_dtype, stored)
        unit = unit_of(transforms, stored)
        self._scaled = normalize is not None or unit != 1
        channels_last = to_dtype is not None and to_dtype.channels_last
        if channels_last and (len(sample_shape) != 3 or channel_axis != 0):
            raise OptionError(f"channels_last needs samples of (C, H, W), not of {sample_shape}: leave it out")
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self.changes_nothing = self.dtype == stored and not self._scaled and not channels_last
        self._scale, self._shift = scale_and_shift(normalize or Normalize(0, 1), unit, sample_shape, channel_axis)
        self._shape = sample_shape
        self._channel_axis, self._stored = channel_axis, stored
        self.sample_bytes = math.prod(sample_shape) * self.dtype.itemsize
        self._allocate = allocate
        self._kernel: FusedKernel | None = None

    def prepare(self, device: torch.device) -> None:
        """Put the constants on the device, and compile the kernel for it."""
        if self._scaled:
            self._scale, self._shift = self._scale.to(device), self._shift.to(device)
        wanted = device.type == "cuda" and self._kernel is None and self._scaled and self._stored == torch.uint8
        at_end = self._scale.numel() == 1 or self._channel_axis in (0, len(self._shape) - 1)
        if wanted and at_end and FusedKernel.suits(self.dtype, self._scale):
            last = self._format == torch.channels_last
            self._kernel = FusedKernel(self._scale, self._shift, self._shape, self._channel_axis, self.dtype, last)

    def __call__(self, samples: torch.Tensor, keep: bool, draws: Draws | None = None) -> torch.Tensor:
        """Return the converted batch; with ``keep`` the result may be the input itself."""
        images, unchanged = samples, samples.dtype == self.dtype and not self._scaled
        if keep and unchanged and images.is_contiguous(memory_format=self._format):
            return images
        if unchanged and images.device.type != "cpu":
            return images.clone(memory_format=self._format)
        out = self._empty(images)
        if not self._scaled:
            return out.copy_(images)
        if self._kernel is not None and self._kernel(images, out):
            return out
        return torch.addcmul(self._shift, images, self._scale, out=out)

    def _empty(self, images: torch.Tensor) -> torch.Tensor:
        """Allocate the result. On the CPU, memory is reused, because the first access to new memory is slow."""
        shape = images.shape
        if images.device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=images.device, memory_format=self._format)
        if self._format == torch.channels_last:
            shape = torch.Size((shape[0], shape[2], shape[3], shape[1]))
            return self._allocate(tuple(shape), self.dtype).permute(0, 3, 1, 2)
        return self._allocate(tuple(shape), self.dtype)


class ImagesByNumber:
    """Images selected by number, in the order of the numbers, that are gathered only when they are converted."""

    def __init__(self, images: torch.Tensor, numbers: SampleNumbers | None = None) -> None:
        self.images, self.numbers = images, numbers

    def __len__(self) -> int:
        return len(self.images) if self.numbers is None else len(self.numbers.host)

    def take(self, numbers: SampleNumbers) -> ImagesByNumber:
        """Select images by their numbers, without a copy."""
        return ImagesByNumber(self.images, numbers)


@dataclass(eq=False)
class DrawnTable:
    """The geometry table of consecutive samples of a window or an epoch, one row per sample."""

    table: Indices
    first: int  # position of the first of these samples in the window or epoch
    loaded: LoadedTable | None = None  # the table on a GPU
    following: Future[Indices] | None = None  # the table of the samples after these


class AugmentConverter(Converter):
    """Converts stored images by transforms: crops, resizing and flips, then `Normalize`, `ToDtype` and erasing.

    For the arguments see `ImageConverter`. With ``is_mask``, images are resized by nearest-neighbour interpolation.
    """

    is_random = takes_numbers = True

    def __init__(
        self,
        transforms: Sequence[Any],
        stored: torch.dtype,
        sample_shape: tuple[int, ...],
        channel_axis: int,
        allocate: Allocate,
        *,
        is_mask: bool = False,
    ) -> None:
        check_order(transforms)
        _check_images(transforms, stored, sample_shape, channel_axis)
        height, width = sample_shape[:2] if channel_axis == 2 else sample_shape[-2:]
        self._sides = np.array([height]), np.array([width])
        self.drawing = drawing_of(transforms)
        size = self.drawing.size_of(*self._sides)
        rule = make_rule(transforms, sample_shape, channel_axis, size, is_mask)
        self.pixels, self.drawing.size, self.dtype = Pixels(rule), size, rule.dtype
        self.threads, self._allocate = self.pixels.threads, allocate
        self._image_bytes, self.result_shape = math.prod(sample_shape), rule.shape(1)[1:]
        self.sample_bytes = rule.channels * math.prod(size) * self.dtype.itemsize
        taps = 2 * (3 + 2 * max(height, width) // min(size)) * max(size)
        self._together = max(1, min(MAX_TOGETHER, TAPS_BYTES // (4 * taps)))

    def prepare(self, device: torch.device) -> None:
        self.pixels.prepare(device)
        self.drawing.is_pinned = device.type == "cuda"

    def release(self) -> None:
        self.pixels.release()

    def __call__(self, samples: torch.Tensor | ImagesByNumber, keep: bool, draws: Draws) -> torch.Tensor:
        """Return the augmented batch in newly allocated memory."""
        images = samples if isinstance(samples, ImagesByNumber) else ImagesByNumber(samples)
        out = self.pixels.rule.empty(len(images), images.images.device, self._allocate)
        self._fill(images, draws, out)
        return self.pixels.rule.as_batch(out)

    def load(self, samples: torch.Tensor, draws: Draws) -> list[Loaded]:
        shape = self.pixels.rule.shape(len(samples))
        return [Loaded([(shape, self.dtype)], lambda out: self._fill(ImagesByNumber(samples), draws, out[0]))]

    def _fill(self, images: ImagesByNumber, draws: Draws, out: torch.Tensor) -> None:
        """Write the augmented images to ``out``, whose shape is that of a batch in memory."""
        if not len(images):
            return
        source, numbers, kernel = images.images.reshape(-1), images.numbers, self.pixels.kernel
        drawn = self._drawn(draws)
        first, count = draws.first - drawn.first, len(images)
        if kernel is not None and (loaded := kernel.load(drawn.table, drawn.loaded, of_one_size=True)):
            drawn.loaded = loaded
            kernel(source, loaded, first, None if numbers is None else numbers.on_device, self._image_bytes, out)
            return
        table = drawn.table[first : first + count].copy()
        table[:, OFFSET] = self._image_bytes * (np.arange(count) if numbers is None else numbers.host)
        self.pixels.compute(source, table, out)

    def _drawn(self, draws: Draws) -> DrawnTable:
        """Return the geometry table of these samples, which may also contain the samples of the following batches."""
        if draws.kept is None or draws.whole is None:
            return DrawnTable(self.drawing.table(*self._sides, draws), draws.first)
        drawn, stop = draws.kept.get(self), draws.first + len(draws.samples)
        if drawn is None or not drawn.first <= draws.first <= stop <= drawn.first + len(drawn.table):
            count = max(1, self._together // len(draws.samples)) * len(draws.samples)
            drawn = draws.kept[self] = self._draw(draws, draws.whole[draws.first :], count, drawn)
        return drawn

    def _draw(self, draws: Draws, samples: Indices, count: int, before: DrawnTable | None) -> DrawnTable:
        """Return the geometry of ``count`` samples, which a thread may already have drawn.

        For a GPU, start drawing the geometry of the samples that follow.
        """
        if before is not None and before.following is not None and before.first + len(before.table) == draws.first:
            table = before.following.result()
        else:
            table = self.drawing.table(*self._sides, draws._replace(samples=samples[:count]))
        drawn, rest = DrawnTable(table, draws.first), samples[len(table) : len(table) + count]
        if self.pixels.kernel is not None and len(rest):
            following = draws._replace(samples=rest)
            drawn.following = self.pixels.threads.pool(1).submit(self.drawing.table, *self._sides, following)
        return drawn


def channel_axis(sample_shape: tuple[int, ...], axes: str = "") -> int:
    """Return the axis of a sample's channels.

    ``axes`` determines it; if a file does not state its axes, the axis of length 1, 3 or 4 holds the channels. In a
    window of frames, whose axes begin with NT, the channels are those of a frame.
    """
    if axes.startswith(WINDOW):
        frame = axes.removeprefix(WINDOW)
        return 1 + channel_axis(sample_shape[1:], frame and f"N{frame}")
    if axes or len(sample_shape) != 3:
        return len(sample_shape) - 1 if axes.endswith("C") else 0
    ends = [size in (1, 3, 4) for size in (sample_shape[0], sample_shape[2])]
    return 2 if ends == [False, True] else 0


def convert(transform: Normalize | ToDtype, batch: torch.Tensor, axes: str = "") -> torch.Tensor:
    """Apply one transform to a batch. Without ``axes``, its shape decides which axis has the channels."""
    shape = tuple(batch.shape[1:])
    converter: ImageConverter = kept_converter(ImageConverter, transform, batch.dtype, shape, batch.device, axes)
    return converter(batch, keep=True)


@lru_cache(KEPT_CONVERTERS)
def kept_converter(
    kind: Callable[..., Any],
    transform: Any,
    stored: torch.dtype,
    sample_shape: tuple[int, ...],
    device: torch.device,
    axes: str = "",
) -> Any:
    """Return the converter for a transform that is called as a function; equal calls share one converter."""
    converter = kind((transform,), stored, sample_shape, channel_axis(sample_shape, axes), fresh)
    converter.prepare(device)
    return converter


def augment_batch(transform: Any, batch: torch.Tensor) -> torch.Tensor:
    """Apply one transform to a batch, with draws from torch's random generator."""
    converter = kept_converter(AugmentConverter, transform, batch.dtype, tuple(batch.shape[1:]), batch.device)
    seed = int(torch.randint(1 << 62, ()))
    return converter(batch.contiguous(), True, Draws(seed, 0, np.arange(len(batch))))


def _check_images(
    transforms: Sequence[Any], stored: torch.dtype, sample_shape: tuple[int, ...], channel_axis: int
) -> None:
    """Raise OptionError if samples cannot be augmented."""
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
    if len(sample_shape) == 3 and sample_shape[channel_axis] > MAX_CHANNELS:
        raise OptionError(
            f"{first} is for at most {MAX_CHANNELS} channels, but samples have {sample_shape[channel_axis]}: leave it "
            "out"
        )
