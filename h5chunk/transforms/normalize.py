"""The transforms of the values of dense samples, `Normalize` and `ToDtype`, and the rule that a list of them makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from h5chunk.errors import OptionError, check_flag


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
        from h5chunk.transforms.images import convert

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
        from h5chunk.transforms.images import convert

        return convert(self, batch)


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


def _numbers(transform: Normalize, values: Any) -> torch.Tensor:
    try:
        numbers = torch.as_tensor(values, dtype=torch.float64)
        if numbers.ndim > 1 or not numbers.numel():
            raise ValueError
    except (TypeError, ValueError, RuntimeError):
        raise OptionError(f"{transform}: pass mean and std, each a number or one per channel") from None
    return numbers
