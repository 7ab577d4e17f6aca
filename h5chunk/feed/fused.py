"""Bytes to normalised floats in one kernel of Triton, which PyTorch brings along for NVIDIA's GPUs on Linux.

torch.addcmul does the same in one kernel too, but takes five times as long for types that differ (scripts/LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

FEWEST_NUMBERS = 4 << 20  # with fewer, launching it takes longer than torch.addcmul does; scripts/LOG.md
MOST_CHANNELS = 16  # a program holds all channels of its pixels
PIXELS = 1024  # of a program; 512 to 2048 made no difference
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

if triton is not None:

    @triton.jit
    def _scale_and_shift(
        source: Any,
        out: Any,
        scale: Any,
        shift: Any,
        num_pixels: Any,
        source_channel: Any,
        source_pixel: Any,
        out_channel: Any,
        out_pixel: Any,
        channels: tl.constexpr,
        padded: tl.constexpr,
        block: tl.constexpr,
    ) -> None:
        blocks = tl.cdiv(num_pixels, block)
        sample = (tl.program_id(0) // blocks).to(tl.int64) * channels * num_pixels
        pixel = (tl.program_id(0) % blocks * block + tl.arange(0, block))[:, None]
        channel = tl.arange(0, padded)[None, :]
        inside = (pixel < num_pixels) & (channel < channels)
        factor = tl.load(scale + channel, mask=channel < channels, other=0)
        offset = tl.load(shift + channel, mask=channel < channels, other=0)
        numbers = tl.load(source + sample + channel * source_channel + pixel * source_pixel, mask=inside, other=0)
        result = numbers.to(tl.float32) * factor + offset
        tl.store(out + sample + channel * out_channel + pixel * out_pixel, result.to(out.dtype.element_ty), mask=inside)


def scale_and_shift(source: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, out: torch.Tensor) -> None:
    """``out = source * scale + shift``, channel by channel.

    Parameters
    ----------
    source : (n, channels, pixels) uint8, on a GPU
        Any strides within a sample; samples lie one behind the other.
    scale, shift : (channels,) float32
    out : as source, of one of DTYPES
    """
    num_samples, channels, pixels = source.shape
    programs = num_samples * triton.cdiv(pixels, PIXELS)
    padded = triton.next_power_of_2(channels)
    strides = (*source.stride()[1:], *out.stride()[1:])
    _scale_and_shift[(programs,)](source, out, scale, shift, pixels, *strides, channels, padded, PIXELS, num_warps=4)


def works_on(device: torch.device) -> bool:
    """Whether there is a Triton that can compile for this device; the first time on a machine takes 0.2 s."""
    if triton is None or device.type != "cuda":
        return False
    try:
        pixels = torch.ones(1, 1, 16, dtype=torch.uint8, device=device)
        one, out = torch.ones(1, device=device), torch.empty(1, 1, 16, device=device)
        scale_and_shift(pixels, one, one, out)
    except Exception:  # no C compiler, no folder to cache in, whatever: torch.addcmul does as well
        return False
    return True
