"""Kernels of Triton; imported only where there may be a GPU and Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def scale_and_shift(  # type: ignore[no-untyped-def,unused-ignore]
    source,
    out,
    scale,
    shift,
    num_pixels,
    source_channel,
    source_pixel,
    out_channel,
    out_pixel,
    channels: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """A block of pixels of one sample, all channels; ``source_*`` and ``out_*`` are strides within a sample."""
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
