"""Transforms of images and other dense samples: `Normalize` and `ToDtype`, fused into one kernel if adjacent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

import torch

from h5chunk.errors import OptionError, check_flag
from h5chunk.plan.draws import Draws
from h5chunk.store.read.fields import WINDOW
from h5chunk.transforms.compiled import FusedKernel
from h5chunk.transforms.csr import Allocate, SampleNumbers, fresh

KEPT_CONVERTERS = 32  # of transforms that are called as functions


@dataclass(frozen=True)
class Normalize:
    """Subtract the mean and divide by the standard deviation, like torchvision's transform of this name.

    Unlike torchvision's, it also takes stored uint8, which is first scaled to 0..1 and becomes float32. Floats are not
    scaled and keep their dtype. An adjacent `ToDtype` changes the dtype of the result at no cost.

    Parameters
    ----------
    mean, std : float, or sequence of float
        A scalar, or one value per channel. If the file does not state which axis holds the channels, it is the axis of
        length 1, 3 or 4. In windows of frames, the channels are those of a frame, as in `h5chunk.Windows.statistics`.
    """

    mean: float | Sequence[float]
    std: float | Sequence[float]

    def __post_init__(self) -> None:
        means, stds = _numbers(self, self.mean), _numbers(self, self.std)
        if means.numel() != stds.numel() and 1 not in (means.numel(), stds.numel()):
            raise OptionError(f"{self}: {means.numel()} means but {stds.numel()} stds: pass one per channel for both")
        if not ((stds > 0).all() and torch.isfinite(stds).all() and torch.isfinite(means).all()):
            raise OptionError(f"{self}: pass finite means, and positive stds")
        for name, numbers in (("mean", means), ("std", stds)):  # hashable, whatever was passed
            object.__setattr__(self, name, tuple(numbers.tolist()) if numbers.ndim else float(numbers))

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        return convert(self, batch)


@dataclass(frozen=True)
class ToDtype:
    """Convert to another dtype, like torchvision's transform of this name, which can also scale to integers.

    Parameters
    ----------
    dtype : torch.dtype
    scale : bool
        Whether integers are divided by the largest number of their dtype, such as 255 for uint8, so that images become
        numbers from 0 to 1. ``dtype`` must then be a floating type. False: numbers are only cast.
    channels_last : bool
        Whether to return batches of (C, H, W) images in torch's memory format ``channels_last``.
    """

    dtype: torch.dtype
    scale: bool = False
    _: KW_ONLY
    channels_last: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise OptionError(f"ToDtype: dtype is {self.dtype!r}: pass a torch.dtype, such as torch.bfloat16")
        check_flag("ToDtype: channels_last", self.channels_last)
        if check_flag("ToDtype: scale", self.scale) and not self.dtype.is_floating_point:
            raise OptionError(f"ToDtype: scale is True, but {self.dtype} holds no fractions: pass a floating dtype")

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        return convert(self, batch)


class ImagesByNumber:
    """Images selected by number, in the order of the numbers, that are gathered only when they are converted."""

    def __init__(self, images: torch.Tensor, numbers: SampleNumbers | None = None) -> None:
        self.images, self.numbers = images, numbers

    def __len__(self) -> int:
        return len(self.images) if self.numbers is None else len(self.numbers.host)

    def take(self, numbers: SampleNumbers) -> ImagesByNumber:
        """Select images by their numbers, without a copy."""
        return ImagesByNumber(self.images, numbers)


class ImageConverter:
    """Convert stored samples by at most one `Normalize` and one `ToDtype`, in one kernel.

    ``channel_axis`` is 0 for (C, H, W) samples, 2 for (H, W, C), and one more for windows of these. ``allocate``
    returns host memory for batches. Raise `OptionError` if the transforms do not fit each other, or the samples.
    """

    is_uncut = False
    is_random = False
    pair = None

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
        self._scale, self._shift = scale_and_shift(normalize or Normalize(0, 1), unit, sample_shape, channel_axis)
        self._shape = sample_shape
        self._channel_axis, self._stored = channel_axis, stored
        self.sample_bytes = math.prod(sample_shape) * self.dtype.itemsize
        self._allocate = allocate
        self._kernel: FusedKernel | None = None

    @property
    def changes_nothing(self) -> bool:
        """Whether batches contain the samples exactly as stored."""
        return self.dtype == self._stored and not self._scaled and self._format == torch.contiguous_format

    def prepare(self, device: torch.device) -> None:
        """Put the constants on the device, and compile the kernel for it."""
        if self._scaled:
            self._scale, self._shift = self._scale.to(device), self._shift.to(device)
        wanted = device.type == "cuda" and self._kernel is None and self._scaled and self._stored == torch.uint8
        at_end = self._scale.numel() == 1 or self._channel_axis in (0, len(self._shape) - 1)
        if wanted and at_end and FusedKernel.suits(self.dtype, self._scale):
            last = self._format == torch.channels_last
            self._kernel = FusedKernel(self._scale, self._shift, self._shape, self._channel_axis, self.dtype, last)

    def __call__(self, images: torch.Tensor, keep: bool, draws: Draws | None = None) -> torch.Tensor:
        """Return the converted batch; with ``keep`` the result may be the input itself."""
        unchanged = images.dtype == self.dtype and not self._scaled
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

    def release(self) -> None:
        """Wait for the thread that compiles the kernel."""
        if self._kernel is not None:
            self._kernel.wait()

    def _empty(self, images: torch.Tensor) -> torch.Tensor:
        """Allocate the result. On the CPU, memory is reused, because the first access to new memory is slow."""
        shape = images.shape
        if images.device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=images.device, memory_format=self._format)
        if self._format == torch.channels_last:
            shape = torch.Size((shape[0], shape[2], shape[3], shape[1]))
            return self._allocate(tuple(shape), self.dtype).permute(0, 3, 1, 2)
        return self._allocate(tuple(shape), self.dtype)


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


def result_dtype(
    transforms: Sequence[Any], normalize: Normalize | None, to_dtype: ToDtype | None, stored: torch.dtype
) -> torch.dtype:
    """Return the dtype of batches."""
    if normalize is None:
        return stored if to_dtype is None else to_dtype.dtype
    given = to_dtype.dtype if to_dtype is not None and transforms[0] is to_dtype else stored
    if given != torch.uint8 and not given.is_floating_point:
        raise OptionError(f"Normalize is for uint8 and floats, not for {given}: put ToDtype(torch.float32) first")
    if to_dtype is None:
        return torch.float32 if stored == torch.uint8 else stored
    if not to_dtype.dtype.is_floating_point:
        raise OptionError(
            f"Normalize gives fractions but ToDtype converts them to {to_dtype.dtype}: pass a floating dtype"
        )
    return to_dtype.dtype


def unit_of(transforms: Sequence[Any], stored: torch.dtype) -> int:
    """Return the stored number that the first of `Normalize` and `ToDtype` makes 1, before it subtracts the mean."""
    first = next((each for each in transforms if isinstance(each, (Normalize, ToDtype))), None)
    if isinstance(first, Normalize):
        return 255 if stored == torch.uint8 else 1
    is_integer = not (stored.is_floating_point or stored.is_complex or stored == torch.bool)
    return torch.iinfo(stored).max if first is not None and first.scale and is_integer else 1


def _numbers(transform: Normalize, values: Any) -> torch.Tensor:
    try:
        numbers = torch.as_tensor(values, dtype=torch.float64)
        if numbers.ndim > 1 or not numbers.numel():
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"{transform}: pass mean and std, each a number or one per channel") from None
    return numbers


def scale_and_shift(
    normalize: Normalize, unit: int, sample_shape: tuple[int, ...], axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 scale and shift, to broadcast over samples: x * scale + shift is (x / unit - mean) / std."""
    means, stds = (torch.as_tensor(each, dtype=torch.float64) for each in (normalize.mean, normalize.std))
    scale, shift = 1 / (unit * stds), -means / stds
    shape = [1] * len(sample_shape)
    for values, name in ((scale, "std"), (shift, "mean")):
        if values.numel() > 1:
            channels = sample_shape[axis] if axis < len(sample_shape) else 1
            if values.numel() != channels:
                raise OptionError(
                    f"Normalize has {values.numel()} values of {name} for {channels} channels: pass one per channel"
                )
            shape[axis] = channels
    scale, shift = scale.expand(math.prod(shape)), shift.expand(math.prod(shape))
    return scale.reshape(shape).float(), shift.reshape(shape).float()
