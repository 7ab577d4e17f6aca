"""Triton kernels, in a separate module because importing it requires Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def scale_and_shift(  # type: ignore[no-untyped-def,unused-ignore]
    source,
    out,
    scale,
    shift,
    num_pixels: tl.constexpr,
    source_channel: tl.constexpr,
    source_pixel: tl.constexpr,
    out_channel: tl.constexpr,
    out_pixel: tl.constexpr,
    channels: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """Multiply a block of pixels of one sample by the scale of each channel, and add its shift.

    ``source_*`` and ``out_*`` are the strides of channels and pixels within a sample.
    """
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


@triton.jit(do_not_specialize=["numbers", "first", "least", "constant"])  # type: ignore[untyped-decorator,unused-ignore]
def make_rows_dense(  # type: ignore[no-untyped-def,unused-ignore]
    starts,
    indices,
    values,
    table,
    numbers,
    out,
    first,
    num_columns,
    least,
    constant,
    has_numbers: tl.constexpr,
    has_values: tl.constexpr,
    has_table: tl.constexpr,
    binarize: tl.constexpr,
    l2: tl.constexpr,
    block: tl.constexpr,
    zeros: tl.constexpr,
):
    """Clear a dense row, then write a sparse row's entries to it. See `h5chunk.transforms.compiled.DenseKernel`."""
    place = tl.program_id(0).to(tl.int64)
    row = first + place
    if has_numbers:
        row = tl.load(numbers + row)
    start = tl.load(starts + row)
    stop = tl.load(starts + row + 1)
    there = out + place * num_columns
    for low in range(0, num_columns, zeros):
        cleared = low + tl.arange(0, zeros)
        tl.store(there + cleared, tl.zeros([zeros], out.dtype.element_ty), mask=cleared < num_columns)
    factor = 1.0
    if l2:
        total = 0.0
        for entry in range(start, stop, block):
            entries = entry + tl.arange(0, block)
            inside = entries < stop
            number = tl.where(inside, constant, 0.0)
            if has_values:
                number = tl.load(values + entries, mask=inside, other=0)
                if has_table:
                    number = tl.load(table + number.to(tl.int32), mask=inside, other=0)
                number = tl.where(inside, number.to(tl.float32), 0.0)
                if binarize:
                    number = tl.where(inside & (number >= least), 1.0, 0.0)
            total += tl.sum(number * number)
        factor = tl.where(total > 0, 1 / tl.sqrt(total), 0.0)
    tl.debug_barrier()  # wait until all threads of this program have cleared their part
    for entry in range(start, stop, block):
        entries = entry + tl.arange(0, block)
        inside = entries < stop
        columns = tl.load(indices + entries, mask=inside, other=0).to(tl.int64)
        number = tl.where(inside, constant, 0.0)
        if has_values:
            number = tl.load(values + entries, mask=inside, other=0)
            if has_table:
                number = tl.load(table + number.to(tl.int32), mask=inside, other=0)
            number = number.to(tl.float32)
            if binarize:
                number = tl.where(number >= least, 1.0, 0.0)
        result = (number * factor).to(out.dtype.element_ty)
        tl.store(there + columns, result, mask=inside & (columns < num_columns))
