"""From samples as the file has them to what the network takes: conversion, normalisation, memory format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from h5chunk.errors import OptionError
from h5chunk.feed.fused import FusedKernel
from h5chunk.feed.memory import BatchMemory


class Convert:
    """Samples as the file has them to the numbers that the network takes, in one kernel.

    uint8 counts as 0..1, as torchvision does it; floats are taken as they are; other integers are only cast.

    Parameters
    ----------
    stored : torch.dtype
        In the file.
    dtype : torch.dtype, optional
        None: float32 if ``normalize`` is given, else as stored.
    normalize : (mean, std), optional
        One number, or one a channel, each.
    channels_last : bool
        Memory format of batches of images.
    channel_axis : int
        Axis of the channels in a sample: 0 for (C, H, W), 2 for (H, W, C).
    reuse : bool
        On the CPU, give every batch in the same memory.

    Raises
    ------
    OptionError
        They do not fit each other.
    """

    makes_csr = False

    def __init__(
        self,
        stored: torch.dtype,
        dtype: torch.dtype | None,
        normalize: tuple[Sequence[float] | float, Sequence[float] | float] | None,
        channels_last: bool,
        sample_shape: tuple[int, ...],
        channel_axis: int,
        reuse: bool = False,
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise OptionError(f"dtype is {dtype!r}: give a torch.dtype, such as torch.bfloat16")
        self.dtype = dtype or (torch.float32 if normalize is not None else stored)
        if normalize is not None and not self.dtype.is_floating_point:
            raise OptionError(f"normalize gives fractions but dtype is {self.dtype}: give a floating dtype")
        if normalize is not None and not (stored == torch.uint8 or stored.is_floating_point):
            raise OptionError(f"normalize is for uint8 and floats, but the field is {stored}: use transform")
        self._scaled = normalize is not None or (stored == torch.uint8 and self.dtype.is_floating_point)
        if channels_last and (len(sample_shape) != 3 or channel_axis != 0):
            raise OptionError(f"channels_last needs samples of (C, H, W), these are {sample_shape}")
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        unit = 255 if stored == torch.uint8 else 1
        self._scale, self._shift = _scale_and_shift(normalize, unit, sample_shape, channel_axis)
        self._channel_axis, self._stored = channel_axis, stored
        self.sample_bytes = math.prod(sample_shape) * self.dtype.itemsize
        self._reuse, self._memory = reuse, BatchMemory()
        self._held = torch.empty(0, dtype=self.dtype)
        self._fused: FusedKernel | None = None

    @property
    def changes_nothing(self) -> bool:
        """Whether batches are what the file has."""
        return self.dtype == self._stored and not self._scaled and self._format == torch.contiguous_format

    def to(self, device: torch.device, _like: object = None) -> None:
        """Put the constants on the device, and see what it can do."""
        self._scale, self._shift = self._scale.to(device), self._shift.to(device)
        if self._fused is None and self._scaled and self._stored == torch.uint8:
            last = self._format == torch.channels_last
            if FusedKernel.suits(self.dtype, self._scale):
                self._fused = FusedKernel(self._scale, self._shift, self._channel_axis, last)

    def __call__(self, images: torch.Tensor, keep: bool) -> torch.Tensor:
        """The batch as it was asked for; ``keep``: the input may be handed on as it is."""
        as_it_is = images.dtype == self.dtype and not self._scaled
        if keep and as_it_is and images.is_contiguous(memory_format=self._format):
            return images
        out = self._empty(images)
        if not self._scaled:
            return out.copy_(images)
        if self._fused is not None and self._fused(images, out):
            return out
        return torch.addcmul(self._shift, images, self._scale, out=out)

    def forget(self) -> None:
        """Free the memory that is kept for further batches, and end the thread that compiles."""
        if self._fused is not None:
            self._fused.wait()
        self._memory, self._held = BatchMemory(), torch.empty(0, dtype=self.dtype)

    def _empty(self, images: torch.Tensor) -> torch.Tensor:
        """Room for the result. On a GPU torch keeps memory itself; on the CPU it is ours, as fresh pages cost much."""
        shape = images.shape
        if images.device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=images.device, memory_format=self._format)
        last = self._format == torch.channels_last
        if last:
            shape = torch.Size((shape[0], shape[2], shape[3], shape[1]))
        if not self._reuse:
            out = self._memory.empty(tuple(shape), self.dtype)
        else:
            if self._held.numel() < shape.numel():
                self._held = BatchMemory().empty((shape.numel(),), self.dtype)
            out = self._held[: shape.numel()].view(shape).data
        return out.permute(0, 3, 1, 2) if last else out


def _scale_and_shift(
    normalize: tuple[Sequence[float] | float, Sequence[float] | float] | None,
    unit: int,
    sample_shape: tuple[int, ...],
    channel_axis: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / unit - mean) / std as x * scale + shift, float32, to be broadcast over samples."""
    try:
        mean, std = normalize if normalize is not None else (0.0, 1.0)
        means, stds = torch.as_tensor(mean, dtype=torch.float64), torch.as_tensor(std, dtype=torch.float64)
        if torch.broadcast_tensors(means, stds)[0].ndim > 1:
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"normalize is {normalize!r}: give (mean, std), each a number or one a channel") from None
    if (stds == 0).any():
        raise OptionError(f"normalize has a std of 0: {std}")
    if not ((stds > 0).all() and torch.isfinite(stds).all() and torch.isfinite(means).all()):
        raise OptionError(f"normalize is {normalize!r}: give finite means, and positive stds")
    scale, shift = 1 / (unit * stds), -means / stds
    shape = [1] * len(sample_shape)
    for values, name in ((scale, "std"), (shift, "mean")):
        if values.numel() > 1:
            channels = sample_shape[channel_axis] if sample_shape else 1
            if values.numel() != channels:
                raise OptionError(f"normalize has {values.numel()} values of {name} for {channels} channels")
            shape[channel_axis] = channels
    scale, shift = scale.expand(math.prod(shape)), shift.expand(math.prod(shape))
    return scale.reshape(shape).float(), shift.reshape(shape).float()
