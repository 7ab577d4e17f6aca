"""Compute the pixels of a list of augmenting transforms: crop, resize, pad, flip, erase, normalise and cast each image.

The geometry of each image has been drawn on the host, as one row of a table (`h5chunk.transforms.geometry`). The pixels
are computed in C (``native/augment.c``), by a Triton kernel on a GPU (`h5chunk.transforms.kernels`), or with torch
operations. All give the same bits, by this arithmetic:

- The source is consecutive bytes: an image begins at its ``OFFSET``, with ``HEIGHT`` rows of ``WIDTH`` pixels, either
  interleaved (H, W, C) or planar (C, H, W). Images may have any sizes and offsets, so that gathering needs no copy.
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
  shift[c]`` in float32, rounded after each of the two operations, then cast.
- Pixels in the k-th erased box become ``erased[k, c]``; later boxes overwrite earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from h5chunk import native
from h5chunk.errors import OptionError
from h5chunk.machine import KeptThreads, own_cores
from h5chunk.native.augment import ERASED, ImageRule, augment
from h5chunk.plan.permutation import Indices
from h5chunk.transforms.augment import AUGMENTING, MODES, Erasing, RandomCrop
from h5chunk.transforms.compiled import AugmentKernel
from h5chunk.transforms.csr import Allocate
from h5chunk.transforms.geometry import Size
from h5chunk.transforms.normalize import Normalize, ToDtype, result_dtype, scale_and_shift, unit_of

RESAMPLINGS = ("antialias", "bilinear", "nearest")  # as numbered by augment.c
WEIGHT_BITS = 22
IMAGES = 8  # images that a thread takes at a time
LOOKED_UP, SAME, FLOAT32, BFLOAT16 = range(4)  # conversions of augment.c


@dataclass(frozen=True, eq=False)
class Rule:
    """The parameters that all samples of a field share; tensors are on the device of the batches.

    ``interpolation`` is "antialias", "bilinear" or "nearest", ``mode`` "constant", "reflect" or "edge". The source is
    ``interleaved`` (H, W, C) or planar (C, H, W), and so is the memory of the result (``out_interleaved``). Results
    have an axis of channels at the position ``axis``, or none.
    """

    channels: int
    axis: int | None
    size: Size  # of results
    interpolation: str
    mode: str
    pads: bool  # whether results contain pixels outside of an image
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
        tensors = {name: value.to(device) for name, value in self.__dict__.items() if isinstance(value, torch.Tensor)}
        return Rule(**{**self.__dict__, **tensors})

    def shape(self, count: int) -> tuple[int, ...]:
        """Return the shape of results in memory."""
        if self.axis is None:
            return count, *self.size
        return (count, *self.size, self.channels) if self.out_interleaved else (count, self.channels, *self.size)

    def empty(self, count: int, device: torch.device, allocate: Allocate) -> torch.Tensor:
        """Return memory for results; ``allocate`` returns that of the host."""
        if device.type == "cpu":
            return allocate(self.shape(count), self.dtype)
        return torch.empty(self.shape(count), dtype=self.dtype, device=device)

    def as_batch(self, out: torch.Tensor) -> torch.Tensor:
        """Return a view of results with the axes of the stored images."""
        return out.permute(0, 3, 1, 2) if self.out_interleaved and self.axis == 0 else out


class Pixels:
    """Computes the pixels of results by a rule, on the CPU or a GPU.

    ``kernel`` is the one for a GPU, if there is one; it is used as soon as it is compiled.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule, self.threads = rule, KeptThreads("h5chunk-augment")
        self.kernel: AugmentKernel | None = None
        self._native: ImageRule | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kernel": None, "_native": None}  # another process makes its own

    def prepare(self, device: torch.device) -> None:
        """Put the constants on the device, and start to compile the kernel for it."""
        self.rule = self.rule.to(device)
        if self.kernel is None and AugmentKernel.suits(self.rule):
            self.kernel = AugmentKernel(self.rule)

    def release(self) -> None:
        """Stop the threads, and wait for the one that compiles the kernel."""
        if self.kernel is not None:
            self.kernel.wait()
        self.threads.close()

    def compute(self, source: torch.Tensor, table: Indices, out: torch.Tensor) -> None:
        """Write the result of each row of ``table`` to ``out``. ``source``, 1-D uint8, contains the images."""
        if self.kernel is not None and (loaded := self.kernel.load(table, None)) is not None:
            self.kernel(source, loaded, 0, None, 0, out)
        elif source.device.type == "cpu" and native.available():
            self._compute_natively(source, table, out)
        else:
            augment_with_torch(self.rule, source, table, self._planar(out))

    def _planar(self, out: torch.Tensor) -> torch.Tensor:
        rule, count = self.rule, len(out)
        if rule.out_interleaved:
            return out.view(count, *rule.size, rule.channels).permute(0, 3, 1, 2)
        return out.view(count, rule.channels, *rule.size)

    def _compute_natively(self, source: torch.Tensor, table: Indices, out: torch.Tensor) -> None:
        rule, result_bytes = self.native_rule(), out.nbytes // max(1, len(table))

        def compute(first: int) -> None:
            part = table[first : first + IMAGES]
            augment(rule, source.data_ptr(), source.nbytes, part, out.data_ptr() + first * result_bytes)

        self.threads.share(compute, range(0, len(table), IMAGES), own_cores())

    def native_rule(self) -> ImageRule:
        """Return the rule in the format of C, which is made once."""
        if self._native is None:
            self._native = _native_rule(self.rule)
        return self._native


def augment_with_torch(rule: Rule, source: torch.Tensor, table: Indices, out: torch.Tensor) -> None:
    """Compute results with torch operations, which is slow, but works on any device.

    ``source`` is flat uint8, ``table`` on the host, and ``out`` (n, channels, *size) in any memory format.
    """
    for row, result in zip(table.tolist(), out, strict=True):
        offset, height, width, top, left, tall, wide, full_height, full_width, down, right, flip = row[:ERASED]
        image = source[offset : offset + height * width * rule.channels]
        shape = (height, width, rule.channels) if rule.interleaved else (rule.channels, height, width)
        image = image.view(shape).permute(2, 0, 1) if rule.interleaved else image.view(shape)
        box = image[:, top : top + tall, left : left + wide].double()
        rows, outside_rows = _window_positions(rule, rule.size[0], down, full_height)
        columns, outside_columns = _window_positions(rule, rule.size[1], right, full_width)
        if flip:
            columns, outside_columns = columns[::-1], outside_columns[::-1]
        pixels = _weighted(box, _weights(rule.interpolation, wide, full_width, columns).to(box.device).mT)
        pixels = _weighted(pixels.mT, _weights(rule.interpolation, tall, full_height, rows).to(box.device).mT).mT
        outside = torch.from_numpy(outside_rows[:, None] | outside_columns).to(box.device)
        pixels = torch.where(outside, rule.fill[:, None, None], pixels.to(torch.uint8)).long()
        result.copy_(
            torch.stack([table_of_channel[pixel] for table_of_channel, pixel in zip(rule.values, pixels, strict=True)])
        )
        for number, value in enumerate(rule.erased):
            first, start, high, long = row[ERASED + 4 * number : ERASED + 4 * number + 4]
            result[:, first : first + high, start : start + long] = value[:, None, None]


def _native_rule(rule: Rule) -> ImageRule:
    (height, width), conversion = rule.size, LOOKED_UP
    if rule.scale is not None and rule.dtype in (torch.float32, torch.bfloat16):
        conversion = FLOAT32 if rule.dtype == torch.float32 else BFLOAT16
    elif rule.dtype == torch.uint8:
        conversion = SAME
    constants = rule.scale, rule.shift
    if rule.out_interleaved:  # for each result of a row
        scale, shift = (torch.zeros(1) if constant is None else constant.repeat(width) for constant in constants)
    else:
        scale, shift = (
            torch.zeros(1) if constant is None else constant.repeat_interleave(width) for constant in constants
        )
    kept = rule.fill.contiguous(), rule.values, rule.erased, scale, shift
    numbers = rule.channels, height, width, RESAMPLINGS.index(rule.interpolation), MODES.index(rule.mode)
    sizes = rule.interleaved, rule.out_interleaved, rule.dtype.itemsize, conversion, len(rule.erased)
    made = ImageRule(*numbers, *sizes, *(constant.data_ptr() for constant in kept))
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
    scale = 2 * max(length if interpolation == "antialias" else 0, full)
    shares = (scale - abs((2 * pixel + 1) * full - (2 * number + 1) * length)).clip(0)
    sums = shares.sum(1, keepdims=True)
    return np.asarray(((shares << (WEIGHT_BITS + 1)) + sums) // (2 * sums))


def _weights(interpolation: str, length: int, full: int, positions: Indices) -> torch.Tensor:
    return torch.from_numpy(_all_weights(interpolation, length, full)[positions].astype(np.float64))


def _window_positions(rule: Rule, count: int, first: int, length: int) -> tuple[Indices, np.ndarray]:
    """Return the positions of a window along a side of ``length`` pixels, and which of them get the fill value."""
    positions = np.arange(first, first + count)
    if rule.mode == "reflect":
        positions = np.abs(positions)
        positions = np.minimum(positions, 2 * (length - 1) - positions)
    outside = (positions < 0) | (positions >= length)
    return positions.clip(0, length - 1), outside & (rule.mode == "constant")


def make_rule(transforms: Sequence[Any], sample_shape: tuple[int, ...], axis: int, size: Size, is_mask: bool) -> Rule:
    """Return the rule of a list of transforms for samples of a shape, whose channels are at ``axis``."""
    channels = 1 if len(sample_shape) == 2 else sample_shape[axis]
    normalize = next((transform for transform in transforms if isinstance(transform, Normalize)), None)
    to_dtype = next((transform for transform in transforms if isinstance(transform, ToDtype)), None)
    converting = [transform for transform in transforms if not isinstance(transform, AUGMENTING)]
    dtype = result_dtype(converting, normalize, to_dtype, torch.uint8)
    resizing = next((each.resampling for each in transforms if getattr(each, "resizes", False)), "nearest")
    crop = next(
        (transform for transform in transforms if isinstance(transform, RandomCrop) and transform.pads), RandomCrop(1)
    )
    channels_last = to_dtype is not None and to_dtype.channels_last
    if channels_last and (len(sample_shape) != 3 or axis != 0):
        raise OptionError(f"channels_last needs samples of (C, H, W), not of {sample_shape}: leave it out")
    scale = shift = None
    values = torch.arange(256).expand(channels, 256)
    if dtype.is_floating_point:
        unit = unit_of(converting, torch.uint8)
        constants = scale_and_shift(normalize or Normalize(0, 1), unit, sample_shape, axis)
        scale, shift = (transform.reshape(-1).expand(channels).contiguous() for transform in constants)
        values = values.float() * scale[:, None] + shift[:, None]
    rule = Rule(
        channels=channels,
        axis=axis if len(sample_shape) == 3 else None,
        size=size,
        interpolation="nearest" if is_mask else resizing,
        mode=crop.padding_mode,
        pads=crop.pads,
        interleaved=axis == 2,
        out_interleaved=axis == 2 or channels_last,
        fill=_per_channel(crop, "fill", crop.fill, channels).to(torch.uint8),
        dtype=dtype,
        scale=scale,
        shift=shift,
        values=values.to(dtype).contiguous(),
        erased=torch.empty(0, channels, dtype=dtype),
    )
    return replace(rule, erased=_erased_values(transforms, rule))


def _erased_values(transforms: Sequence[Any], rule: Rule) -> torch.Tensor:
    """Return the values of erased boxes in the units of the result: (boxes, channels)."""
    found, unit = [rule.erased], 1.0  # the pixel value that 1 means at this point of the list
    for transform in transforms:
        if isinstance(transform, ToDtype) and transform.scale:
            unit = 255.0 if unit else unit
        elif isinstance(transform, Normalize):
            unit = 0.0  # values are in the units of the result
        elif isinstance(transform, Erasing):
            value = _per_channel(transform, "value", transform.value, rule.channels)
            if unit and rule.scale is not None and rule.shift is not None:
                value = (value * unit).float() * rule.scale + rule.shift
            found.append(value.to(rule.dtype)[None])
    return torch.cat(found)


def _per_channel(transform: Any, name: str, values: Any, channels: int) -> torch.Tensor:
    if len(values) not in (1, channels):
        raise OptionError(f"{transform}: {name} has {len(values)} values for {channels} channels: pass one per channel")
    return torch.tensor(values, dtype=torch.float64).expand(channels)
