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
    least,
    constant,
    num_columns: tl.constexpr,
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


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def gray_value(red, green, blue, channels: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    gray = red
    if channels == 3:
        gray = (2989 * red + 5870 * green + 1140 * blue) // 10000
    return gray


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def whole_value(number):  # type: ignore[no-untyped-def,unused-ignore]
    return tl.minimum(tl.maximum(number, 0.0), 255.0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def value_at(hue, sector, high):  # type: ignore[no-untyped-def,unused-ignore]
    """Return a channel's value, given the hue plus the channel's offset."""
    hue = tl.where(hue >= 6 * sector, hue - 6 * sector, hue)
    below = tl.minimum(tl.maximum(tl.minimum(hue, 4 * sector - hue), 0), sector)
    value = high * 65536 - below
    return (value + (value >> 8)) >> 16


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def turn_hue(red, green, blue, shift):  # type: ignore[no-untyped-def,unused-ignore]
    """Shift the hue of pixels."""
    high = tl.maximum(tl.maximum(red, green), blue)
    delta = high - tl.minimum(tl.minimum(red, green), blue)
    sector = delta * 65536
    hue = tl.where(high == green, 2 * delta + blue - red, 4 * delta + red - green)
    hue = tl.where(high == red, green - blue, hue) * 65536 + shift * delta
    hue = tl.where(hue < 0, hue + 6 * sector, hue)
    hue = tl.where(hue >= 6 * sector, hue - 6 * sector, hue)
    return (
        value_at(hue + 5 * sector, sector, high),
        value_at(hue + 3 * sector, sector, high),
        value_at(hue + sector, sector, high),
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def change_colours(red, green, blue, step, own, mean, channels: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Apply one step to pixels; ``own`` is the row of the image in the table."""
    if step < 2:  # brightness or contrast
        factor = tl.load(own + 1 + step).to(tl.float32, bitcast=True)
        added = tl.where(step == 0, 0.0, mean * (1.0 - factor))
        red = whole_value(red.to(tl.float32) * factor + added)
        if channels == 3:
            green = whole_value(green.to(tl.float32) * factor + added)
            blue = whole_value(blue.to(tl.float32) * factor + added)
    if channels == 3:
        if step == 2:
            factor = tl.load(own + 3).to(tl.float32, bitcast=True)
            added = gray_value(red, green, blue, channels).to(tl.float32) * (1.0 - factor)
            red = whole_value(red.to(tl.float32) * factor + added)
            green = whole_value(green.to(tl.float32) * factor + added)
            blue = whole_value(blue.to(tl.float32) * factor + added)
        if step == 3:
            red, green, blue = turn_hue(red, green, blue, tl.load(own + 4))
    return red, green, blue


@triton.jit(do_not_specialize_on_alignment=["images", "table"])  # type: ignore[untyped-decorator,unused-ignore]
def jitter_colours(  # type: ignore[no-untyped-def,unused-ignore]
    images,
    table,
    num_pixels: tl.constexpr,
    pixel_stride: tl.constexpr,
    channel_stride: tl.constexpr,
    channels: tl.constexpr,
    contrasts: tl.constexpr,
    block: tl.constexpr,
):
    """Change the colours of one image in place, as `h5chunk.transforms.colour` describes it.

    With ``contrasts``, the mean gray value of the image is computed first, after the steps before contrast.
    """
    image = images + tl.program_id(0).to(tl.int64) * num_pixels * channels
    own = table + tl.program_id(0) * 5
    order = tl.load(own)
    mean = order.to(tl.float32) * 0.0
    if contrasts:
        sums = tl.zeros([block], tl.int32)
        for first in range(0, num_pixels, block):
            pixel = first + tl.arange(0, block)
            inside = pixel < num_pixels
            place = image + pixel * pixel_stride
            red = tl.load(place, mask=inside, other=0).to(tl.int32)
            green = red
            blue = red
            if channels == 3:
                green = tl.load(place + channel_stride, mask=inside, other=0).to(tl.int32)
                blue = tl.load(place + 2 * channel_stride, mask=inside, other=0).to(tl.int32)
            is_before = True
            for number in tl.static_range(3):
                step = (order >> (3 * number)) & 7
                is_before = is_before & (step != 1)
                red, green, blue = change_colours(red, green, blue, tl.where(is_before, step, 4), own, mean, channels)
            sums += tl.where(inside, gray_value(red, green, blue, channels), 0)
        mean = (256 * tl.sum(sums.to(tl.int64)) // num_pixels).to(tl.float32) * 0.00390625
    for first in range(0, num_pixels, block):
        pixel = first + tl.arange(0, block)
        inside = pixel < num_pixels
        place = image + pixel * pixel_stride
        red = tl.load(place, mask=inside, other=0).to(tl.int32)
        green = red
        blue = red
        if channels == 3:
            green = tl.load(place + channel_stride, mask=inside, other=0).to(tl.int32)
            blue = tl.load(place + 2 * channel_stride, mask=inside, other=0).to(tl.int32)
        for number in tl.static_range(4):
            red, green, blue = change_colours(red, green, blue, (order >> (3 * number)) & 7, own, mean, channels)
        tl.store(place, red.to(tl.uint8), mask=inside)
        if channels == 3:
            tl.store(place + channel_stride, green.to(tl.uint8), mask=inside)
            tl.store(place + 2 * channel_stride, blue.to(tl.uint8), mask=inside)


@triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
    do_not_specialize=["count", "share", "rest", "top", "left", "height", "width"],
    do_not_specialize_on_alignment=["images", "labels", "out", "soft"],
)
def mix_samples(  # type: ignore[no-untyped-def,unused-ignore]
    images,
    labels,
    out,
    soft,
    wrong,
    count,
    share,
    rest,
    top,
    left,
    height,
    width,
    sample_size: tl.constexpr,
    inner: tl.constexpr,
    columns: tl.constexpr,
    lines: tl.constexpr,
    num_classes: tl.constexpr,
    is_index: tl.constexpr,
    cuts: tl.constexpr,
    block: tl.constexpr,
):
    """Mix a block of one sample, or the labels of one sample, with those of the sample before it in the batch.

    With ``cuts``, a box is copied; its pixel (y, x) has the elements from ``(y * columns + x) * inner`` on, in each of
    the planes of ``lines`` x ``columns`` pixels. Labels are classes if ``is_index``, otherwise numbers for each class.
    Labels that an invalid class is part of become NaN, and the class is written to ``wrong``.
    """
    blocks = tl.cdiv(sample_size, block)
    sample = (tl.program_id(0) // (blocks + 1)).to(tl.int64)
    before = tl.where(sample == 0, count - 1, sample - 1)
    part = tl.program_id(0) % (blocks + 1)
    if part < blocks:
        place = part * block + tl.arange(0, block)
        inside = place < sample_size
        if cuts:
            x = place // inner % columns
            y = place // (inner * columns) % lines
            is_cut = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
            own = tl.load(images + sample * sample_size + place, mask=inside & ~is_cut, other=0)
            other = tl.load(images + before * sample_size + place, mask=inside & is_cut, other=0)
            tl.store(out + sample * sample_size + place, tl.where(is_cut, other, own), mask=inside)
        else:
            own = tl.load(images + sample * sample_size + place, mask=inside, other=0).to(tl.float32)
            other = tl.load(images + before * sample_size + place, mask=inside, other=0).to(tl.float32)
            mean = own * share + other * rest
            tl.store(out + sample * sample_size + place, mean.to(out.dtype.element_ty), mask=inside)
    else:
        for first in range(0, num_classes, block):
            number = first + tl.arange(0, block)
            inside = number < num_classes
            if is_index:
                own_class = tl.load(labels + sample).to(tl.int64)
                other_class = tl.load(labels + before).to(tl.int64)
                is_own = (own_class < 0) | (own_class >= num_classes)
                is_wrong = is_own | (other_class < 0) | (other_class >= num_classes)
                mixed = (number == own_class).to(tl.float32) * share + (number == other_class).to(tl.float32) * rest
                mixed = tl.where(is_wrong, float("nan"), mixed)
                tl.store(wrong, own_class, mask=is_own)
            else:
                own = tl.load(labels + sample * num_classes + number, mask=inside, other=0).to(tl.float32)
                other = tl.load(labels + before * num_classes + number, mask=inside, other=0).to(tl.float32)
                mixed = own * share + other * rest
            tl.store(soft + sample * num_classes + number, mixed.to(soft.dtype.element_ty), mask=inside)
