"""Compute a list of augmenting transforms at once: cut, resize, pad, flip, erase, normalise and cast, sample by sample.

What each sample needs is drawn on the host, as one row of a table (`h5chunk.plan.draws`). It is computed in C, in a
Triton kernel on a GPU (`h5chunk.transforms.augment_kernel`), or with torch operations. All give the same bits, by this
arithmetic:

- The source is consecutive bytes: an image begins at its ``OFFSET``, with ``HEIGHT`` rows of ``WIDTH`` pixels, either
  interleaved (H, W, C) or planar (C, H, W). Images may have any sizes and places, so that gathering needs no copy.
- Its box, at ``TOP`` and ``LEFT`` of ``BOX_HEIGHT`` x ``BOX_WIDTH``, is resized to ``FULL_HEIGHT`` x ``FULL_WIDTH``:
  first along rows, rounded to uint8, then along columns, rounded to uint8. Along a side of ``n`` pixels that becomes
  ``m``, result ``i`` has the weights ``a[x] = max(0, M - abs((2 * x + 1) * m - (2 * i + 1) * n))`` of pixels ``x`` of
  the box, with ``M = 2 * max(n, m)`` for antialias and ``2 * m`` for bilinear; in fixed point these are
  ``w[x] = floor((2 * a[x] * 2**22 + sum(a)) / (2 * sum(a)))``, and the result is ``(sum(w[x] * p[x]) + 2**21) >> 22``.
  For nearest it is pixel ``(2 * i + 1) * n // (2 * m)``. A side that keeps its length is copied.
- Pixel (i, j) of the result is the resized pixel ``(DOWN + i, RIGHT + j)``; with ``FLIP``, it is ``(DOWN + i, RIGHT +
  width - 1 - j)``. Outside of the resized image it is ``fill``, or for ``edge`` the nearest pixel, or for ``reflect``
  the pixel mirrored at the outermost one (once: -1 becomes 1).
- Each value v of channel c becomes ``values[c, v]``: v cast to the result's dtype or, if it is scaled, ``v * scale[c] +
  shift[c]`` in float32, with a rounding after both operations, then cast.
- Pixels in the k-th erased box become ``erased[k, c]``, boxes in their order.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from h5chunk import native
from h5chunk.errors import OptionError
from h5chunk.machine import available_cores
from h5chunk.plan.draws import ERASED, ERASING, MAX_SIDE, OFFSET, Draws, Geometry, Size
from h5chunk.plan.permutation import Indices
from h5chunk.transforms.augment import ERASERS, GEOMETRIC, INTERPOLATIONS, MODES, RandomCrop
from h5chunk.transforms.compiled import AugmentKernel, LoadedTable
from h5chunk.transforms.images import (
    KEPT_CONVERTERS,
    ImagesByNumber,
    Normalize,
    ToDtype,
    channel_axis,
    fresh,
    result_dtype,
    scale_and_shift,
)

WEIGHT_BITS = 22
MOST_TOGETHER, TAPS_BYTES = 1024, 16 << 20  # samples to draw at a time, and their bytes on a GPU
MOST_CHANNELS = 256  # of augment.c
IMAGES = 8  # that a thread takes at a time
LOOKED_UP, SAME, FLOAT32, BFLOAT16 = range(4)  # conversions of augment.c
AUGMENTING = (*GEOMETRIC, *ERASERS)


@dataclass(frozen=True, eq=False)
class Rule:
    """What is the same for all samples of a field; tensors are on the device of the batches.

    ``interpolation`` is "antialias", "bilinear" or "nearest", ``mode`` "constant", "reflect" or "edge". The source is
    ``interleaved`` (H, W, C) or planar (C, H, W), and so is the memory of the result (``out_interleaved``).
    """

    channels: int
    size: Size  # of results
    interpolation: str
    mode: str
    pads: bool  # whether anything outside of an image is seen
    interleaved: bool
    out_interleaved: bool
    fill: torch.Tensor  # (channels,) uint8
    dtype: torch.dtype  # of results
    scale: torch.Tensor | None  # (channels,) float32; None: values are only cast
    shift: torch.Tensor | None
    values: torch.Tensor  # (channels, 256), of the result's dtype
    erased: torch.Tensor  # (boxes, channels), of the result's dtype

    def to(self, device: torch.device) -> Rule:
        """Return the rule for batches on a device."""
        tensors = {name: each.to(device) for name, each in self.__dict__.items() if isinstance(each, torch.Tensor)}
        return Rule(**{**self.__dict__, **tensors})


def augment_with_torch(rule: Rule, source: torch.Tensor, table: Indices, out: torch.Tensor) -> None:
    """Compute results by torch operations: slow, on any device.

    ``source`` is flat uint8, ``table`` on the host, and ``out`` (n, channels, *size) in any memory format.
    """
    for row, result in zip(table.tolist(), out, strict=True):
        offset, height, width, top, left, tall, wide, full_height, full_width, down, right, flip = row[:ERASED]
        image = source[offset : offset + height * width * rule.channels]
        shape = (height, width, rule.channels) if rule.interleaved else (rule.channels, height, width)
        image = image.view(shape).permute(2, 0, 1) if rule.interleaved else image.view(shape)
        box = image[:, top : top + tall, left : left + wide].double()
        rows, outside_rows = _places(rule, rule.size[0], down, full_height)
        columns, outside_columns = _places(rule, rule.size[1], right, full_width)
        if flip:
            columns, outside_columns = columns[::-1], outside_columns[::-1]
        pixels = _weighted(box, _weights(rule.interpolation, wide, full_width, columns).to(box.device).mT)
        pixels = _weighted(pixels.mT, _weights(rule.interpolation, tall, full_height, rows).to(box.device).mT).mT
        outside = torch.from_numpy(outside_rows[:, None] | outside_columns).to(box.device)
        pixels = torch.where(outside, rule.fill[:, None, None], pixels.to(torch.uint8)).long()
        result.copy_(torch.stack([own[each] for own, each in zip(rule.values, pixels, strict=True)]))
        for number, value in enumerate(rule.erased):
            first, start, high, long = row[ERASED + 4 * number : ERASED + 4 * number + 4]
            result[:, first : first + high, start : start + long] = value[:, None, None]


def native_rule(rule: Rule) -> native.ImageRule:
    """Return the rule for `h5chunk.native.augment`."""
    (height, width), conversion = rule.size, LOOKED_UP
    if rule.scale is not None and rule.dtype in (torch.float32, torch.bfloat16):
        conversion = FLOAT32 if rule.dtype == torch.float32 else BFLOAT16
    elif rule.dtype == torch.uint8:
        conversion = SAME
    constants = rule.scale, rule.shift
    if rule.out_interleaved:  # for each result of a row
        scale, shift = (torch.zeros(1) if each is None else each.repeat(width) for each in constants)
    else:
        scale, shift = (torch.zeros(1) if each is None else each.repeat_interleave(width) for each in constants)
    kept = rule.fill.contiguous(), rule.values, rule.erased, scale, shift
    numbers = rule.channels, height, width, INTERPOLATIONS.index(rule.interpolation), MODES.index(rule.mode)
    sizes = rule.interleaved, rule.out_interleaved, rule.dtype.itemsize, conversion, len(rule.erased)
    made = native.ImageRule(*numbers, *sizes, *(each.data_ptr() for each in kept))
    made.kept = kept
    return made


def _weighted(pixels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Combine pixels along the last axis with fixed-point weights; the whole numbers are exact in float64."""
    return ((pixels @ weights + (1 << WEIGHT_BITS - 1)) / (1 << WEIGHT_BITS)).floor()


@lru_cache(64)
def _all_weights(interpolation: str, length: int, full: int) -> np.ndarray:
    """Return the weights of ``length`` pixels in each of ``full`` results: (full, length) int64."""
    number, pixel = np.arange(full)[:, None], np.arange(length)[None, :]
    if length == full or interpolation == "nearest":
        return np.asarray(((2 * number + 1) * length // (2 * full) == pixel) << WEIGHT_BITS)
    most = 2 * max(length if interpolation == "antialias" else 0, full)
    shares = (most - abs((2 * pixel + 1) * full - (2 * number + 1) * length)).clip(0)
    sums = shares.sum(1, keepdims=True)
    return np.asarray(((shares << (WEIGHT_BITS + 1)) + sums) // (2 * sums))


def _weights(interpolation: str, length: int, full: int, places: Indices) -> torch.Tensor:
    return torch.from_numpy(_all_weights(interpolation, length, full)[places].astype(np.float64))


def _places(rule: Rule, count: int, first: int, length: int) -> tuple[Indices, np.ndarray]:
    """Return the places of a window in a side of ``length`` pixels, and which of them are filled."""
    places = np.arange(first, first + count)
    if rule.mode == "reflect":
        places = np.abs(places)
        places = np.minimum(places, 2 * (length - 1) - places)
    outside = (places < 0) | (places >= length)
    return places.clip(0, length - 1), outside & (rule.mode == "constant")


@dataclass(eq=False)
class Drawn:
    """The geometry of samples, of which the first has this place in their draws, and its copy on a GPU."""

    table: Indices
    first: int
    loaded: LoadedTable | None = None


class AugmentConverter:
    """Convert stored images as transforms say: crops, resizing and flips, then `Normalize`, `ToDtype` and erasing.

    For the arguments see `h5chunk.transforms.images.ImageConverter`; ``is_mask`` resizes by nearest neighbour.
    """

    is_uncut = False
    changes_nothing = False
    num_outputs = 1

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
        self._sides = height, width
        self._rule = _make_rule(transforms, sample_shape, axis, self._size(), is_mask)
        self.dtype, self._allocate = self._rule.dtype, allocate
        self.sample_bytes = self._rule.channels * math.prod(self._rule.size) * self.dtype.itemsize
        taps = 2 * (3 + 2 * max(self._sides) // min(self._rule.size)) * max(self._rule.size)
        self._together = max(1, min(MOST_TOGETHER, TAPS_BYTES // (4 * taps)))
        self._kernel: AugmentKernel | None = None
        self._native: native.ImageRule | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0

    def _size(self) -> Size:
        """Return the size of results; raise OptionError if an image does not suit the transforms."""
        geometry = self._cut(*self._sizes(1), Draws(0, 0, np.zeros(1, np.int64)))
        return int(geometry.height[0]), int(geometry.width[0])

    def _sizes(self, count: int) -> tuple[Indices, Indices]:
        return np.full(count, self._sides[0]), np.full(count, self._sides[1])

    def geometry(self, heights: Indices, widths: Indices, draws: Draws) -> Geometry:
        """Draw the geometry of images of these sizes.

        A draw depends on its place among the random transforms, so that equal lists of two fields draw alike.
        """
        geometry = self._cut(heights, widths, draws)
        for number, eraser in enumerate(self._erasers, ERASING):
            geometry.erased.append(eraser.boxes(*self._rule.size, draws, number))
        return geometry

    def _cut(self, heights: Indices, widths: Indices, draws: Draws) -> Geometry:
        geometry, stream = Geometry(heights, widths), 0
        for each in self._geometric:
            each.change(geometry, draws, stream)
            stream += each.is_random
        return geometry

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel": None, "_native": None, "_threads": None}  # another process makes its own

    def prepare(self, device: torch.device) -> None:
        """Put the constants on the device, and compile the kernel for it."""
        self._rule = self._rule.to(device)
        if self._kernel is None and AugmentKernel.suits(self._rule):
            self._kernel = AugmentKernel(self._rule)

    def __call__(self, images: torch.Tensor | ImagesByNumber, keep: bool, draws: Draws) -> torch.Tensor:
        """Return the augmented batch, in memory of its own."""
        images = images if isinstance(images, ImagesByNumber) else ImagesByNumber(images)
        shape = self.shape(len(images))
        if images.images.device.type == "cpu":
            out = self._allocate(shape, self.dtype)
        else:
            out = torch.empty(shape, dtype=self.dtype, device=images.images.device)
        self.fill(images, draws, out)
        return out.permute(0, 3, 1, 2) if self._rule.out_interleaved and not self._interleaved else out

    def shape(self, count: int) -> tuple[int, ...]:
        """Return the shape of results in memory."""
        rule = self._rule
        if len(self._shape) == 2:
            return count, *rule.size
        return (count, *rule.size, rule.channels) if rule.out_interleaved else (count, rule.channels, *rule.size)

    def fill(self, images: torch.Tensor | ImagesByNumber, draws: Draws, out: torch.Tensor) -> None:
        """Write the results to ``out``, of this shape in memory."""
        images = images if isinstance(images, ImagesByNumber) else ImagesByNumber(images)
        if not len(images):
            return
        source, numbers, image_bytes = images.images.reshape(-1), images.numbers, math.prod(self._shape)
        drawn = self._drawn(draws)
        first, count = draws.first - drawn.first, len(images)
        if self._kernel is not None and (loaded := self._kernel.load(drawn.table, drawn.loaded)) is not None:
            drawn.loaded = loaded
            self._kernel(source, loaded, first, None if numbers is None else numbers.there, image_bytes, out)
            return
        table = drawn.table[first : first + count].copy()
        table[:, OFFSET] = image_bytes * (np.arange(count) if numbers is None else numbers.host)
        self.compute(source, table, out)

    def _drawn(self, draws: Draws) -> Drawn:
        """Return the geometry of these samples, which may be that of several batches."""
        if draws.kept is None or draws.whole is None:
            return Drawn(self._table(draws), draws.first)
        drawn, stop = draws.kept.get(self), draws.first + len(draws.samples)
        if drawn is None or not drawn.first <= draws.first <= stop <= drawn.first + len(drawn.table):
            count = max(1, self._together // len(draws.samples)) * len(draws.samples)
            whole = draws.whole[draws.first : draws.first + count]
            drawn = draws.kept[self] = Drawn(self._table(draws._replace(samples=whole)), draws.first)
        return drawn

    def _table(self, draws: Draws) -> Indices:
        count = len(draws.samples)
        return self.geometry(*self._sizes(count), draws).table(np.zeros(count, np.int64))

    def compute(self, source: torch.Tensor, table: Indices, out: torch.Tensor) -> None:
        """Compute the results of a table, of images in ``source``, flat uint8 on the device of the batches."""
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
        if self._native is None:
            self._native = native_rule(self._rule)
        rule, result_bytes = self._native, out.nbytes // max(1, len(table))

        def compute(first: int) -> None:
            part = table[first : first + IMAGES]
            native.augment(rule, source.data_ptr(), source.nbytes, part, out.data_ptr() + first * result_bytes)

        firsts = range(0, len(table), IMAGES)
        if len(firsts) == 1:
            compute(0)
            return
        if self._threads is None or self._process != os.getpid():  # threads do not survive a fork
            self._threads, self._process = ThreadPoolExecutor(available_cores(), "h5chunk-augment"), os.getpid()
        deque(self._threads.map(compute, firsts), 0)

    def release(self) -> None:
        """Stop the threads."""
        if self._kernel is not None:
            self._kernel.wait()
        if self._threads is not None and self._process == os.getpid():
            self._threads.shutdown()
        self._threads = None


def _check_list(transforms: Sequence[Any], stored: torch.dtype, sample_shape: tuple[int, ...], axis: int) -> None:
    """Raise OptionError if transforms do not fit each other, or the samples."""
    first = next(each for each in transforms if isinstance(each, AUGMENTING))
    if stored != torch.uint8:
        raise OptionError(f"{first} is for uint8, not for {stored}: convert the images to uint8")
    if len(sample_shape) not in (2, 3) or not all(0 < side <= MAX_SIDE for side in sample_shape):
        raise OptionError(
            f"{first} is for images of (C, H, W), (H, W, C) or (H, W), of at most {MAX_SIDE} pixels a side, but "
            f"samples have the shape {sample_shape}"
        )
    if len(sample_shape) == 3 and sample_shape[axis] > MOST_CHANNELS:
        raise OptionError(f"{first} is for at most {MOST_CHANNELS} channels, but samples have {sample_shape[axis]}")
    padded = resized = behind = None
    for each in transforms:
        if not isinstance(each, GEOMETRIC):
            behind = each
            continue
        if behind is not None:
            raise OptionError(f"{each} stands behind {behind}: put crops, resizing and flips first")
        if each.resizes and resized is not None:
            raise OptionError(f"{each} resizes again what {resized} has resized: give one of them")
        if each.resizes and padded is not None:
            raise OptionError(f"{each} would resize the padding of {padded}: put it before")
        padded, resized = each if each.pads else padded, each if each.resizes else resized
    paddings = {(each.mode, each.fill) for each in transforms if isinstance(each, RandomCrop) and each.pads}
    if len(paddings) > 1:
        raise OptionError("two RandomCrops pad in different ways: give both the same mode and fill")


def _make_rule(transforms: Sequence[Any], sample_shape: tuple[int, ...], axis: int, size: Size, is_mask: bool) -> Rule:
    channels = 1 if len(sample_shape) == 2 else sample_shape[axis]
    normalize = next((each for each in transforms if isinstance(each, Normalize)), None)
    to_dtype = next((each for each in transforms if isinstance(each, ToDtype)), None)
    converting = [each for each in transforms if not isinstance(each, AUGMENTING)]
    dtype = result_dtype(converting, normalize, to_dtype, torch.uint8)
    resizing = next((each.interpolation for each in transforms if getattr(each, "resizes", False)), "nearest")
    crop = next((each for each in transforms if isinstance(each, RandomCrop) and each.pads), RandomCrop(1))
    channels_last = to_dtype is not None and to_dtype.channels_last
    if channels_last and (len(sample_shape) != 3 or axis != 0):
        raise OptionError(f"channels_last needs samples of (C, H, W), but these are {sample_shape}")
    scale = shift = None
    values = torch.arange(256).expand(channels, 256)
    if dtype.is_floating_point:
        constants = scale_and_shift(normalize or Normalize(0, 1), 255, sample_shape, axis)
        scale, shift = (each.reshape(-1).expand(channels).contiguous() for each in constants)
        values = values.float() * scale[:, None] + shift[:, None]
    rule = Rule(
        channels,
        size,
        "nearest" if is_mask else resizing,
        crop.mode,
        crop.pads,
        axis == 2,
        axis == 2 or channels_last,
        _per_channel(crop, "fill", crop.fill, channels).to(torch.uint8),
        dtype,
        scale,
        shift,
        values.to(dtype).contiguous(),
        torch.empty(0, channels, dtype=dtype),
    )
    return replace(rule, erased=_erased_values(transforms, rule))


def _erased_values(transforms: Sequence[Any], rule: Rule) -> torch.Tensor:
    """Return the values of erased boxes in the units of the result: (boxes, channels)."""
    found, unit = [rule.erased], 1.0  # the number that counts as 1 at a place in the list, in units of a pixel
    for each in transforms:
        if isinstance(each, ToDtype) and each.dtype.is_floating_point:
            unit = 255.0 if unit else unit
        elif isinstance(each, Normalize):
            unit = 0.0  # values are final
        elif isinstance(each, ERASERS):
            value = _per_channel(each, "value", each.value, rule.channels)
            if unit and rule.scale is not None and rule.shift is not None:
                value = (value * unit).float() * rule.scale + rule.shift
            found.append(value.to(rule.dtype)[None])
    return torch.cat(found)


def _per_channel(transform: Any, name: str, values: Any, channels: int) -> torch.Tensor:
    if len(values) not in (1, channels):
        raise OptionError(f"{transform}: {name} has {len(values)} values for {channels} channels")
    return torch.tensor(values, dtype=torch.float64).expand(channels)


def augment_batch(transform: Any, batch: torch.Tensor) -> torch.Tensor:
    """Apply one transform to a batch, with draws from torch's random generator."""
    converter = _converter(transform, batch.dtype, tuple(batch.shape[1:]), batch.device)
    seed = int(torch.randint(1 << 62, ()))
    return converter(batch.contiguous(), True, Draws(seed, 0, np.arange(len(batch))))


@lru_cache(KEPT_CONVERTERS)
def _converter(
    transform: Any, stored: torch.dtype, sample_shape: tuple[int, ...], device: torch.device
) -> AugmentConverter:
    converter = AugmentConverter((transform,), stored, sample_shape, channel_axis(sample_shape), fresh)
    converter.prepare(device)
    return converter
