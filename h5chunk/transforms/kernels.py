"""Triton kernels, in a separate module because importing it requires Triton.

`h5chunk.transforms.pixels` specifies what `augment_images` computes, and the columns of its table of geometry.
"""

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


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def index_inside(index, full, padding: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """For an index, which may lie in the padding, return the row or column of the resized image to read."""
    if padding == "reflect":
        index = tl.abs(index)
        index = tl.minimum(index, 2 * (full - 1) - index)
    return tl.minimum(tl.maximum(index, 0), full - 1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def count_taps(own, antialias: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Return how many rows and columns of the source box contribute to one pixel of the result."""
    height, width = tl.load(own + 5).to(tl.int32), tl.load(own + 6).to(tl.int32)
    full_height, full_width = tl.load(own + 7).to(tl.int32), tl.load(own + 8).to(tl.int32)
    count = 2
    if antialias:
        count = tl.maximum(tl.cdiv(2 * height, full_height), tl.cdiv(2 * width, full_width))
        count = tl.maximum(count, 2)
    return tl.minimum(count, height), tl.minimum(count, width)


@triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
    do_not_specialize=["most"], do_not_specialize_on_alignment=["table"]
)
def weigh_taps(  # type: ignore[no-untyped-def,unused-ignore]
    table,
    taps,
    most,
    columns: tl.constexpr,
    out_height: tl.constexpr,
    out_width: tl.constexpr,
    longest: tl.constexpr,
    antialias: tl.constexpr,
    padding: tl.constexpr,
    block: tl.constexpr,
):
    """For each output row and column of a sample, write the position of the first tap in its box, and 22-bit weights.

    The position is -1 for pixels in constant padding.
    """
    sample, axis = tl.program_id(0), tl.program_id(1)  # axis 0: rows, 1: columns
    own = table + sample.to(tl.int64) * columns
    size = tl.load(own + 5 + axis).to(tl.int32)
    full = tl.load(own + 7 + axis).to(tl.int32)
    length = tl.where(axis == 0, out_height, out_width)
    place = tl.program_id(2) * block + tl.arange(0, block)
    index = tl.where((axis == 1) & (tl.load(own + 11) != 0), length - 1 - place, place)
    index += tl.load(own + 9 + axis).to(tl.int32)
    inside = index_inside(index, full, padding)
    reach = full
    if antialias:
        reach = tl.maximum(size, full)
    count_y, count_x = count_taps(own, antialias)
    count = tl.where(axis == 0, count_y, count_x)
    centre = (2 * inside + 1) * size
    first = tl.minimum(tl.maximum(centre - 2 * reach + full, 0) // (2 * full), size - count)
    distance = (2 * first + 1) * full - centre
    total = tl.zeros([block], tl.int32)
    for tap in range(0, count):
        total += tl.maximum(2 * reach - tl.abs(distance + 2 * tap * full), 0)
    there = taps + (sample * 2 + axis).to(tl.int64) * ((most + 1) * longest) + place
    is_place = place < length
    for tap in range(0, count):
        weight = tl.maximum(2 * reach - tl.abs(distance + 2 * tap * full), 0).to(tl.int64)
        weight = (weight * 4194304 + total // 2) // total
        tl.store(there + (1 + tap) * longest, weight.to(tl.int32), mask=is_place)
    if padding == "constant":
        first = tl.where(index == inside, first, -1)
    tl.store(there, first, mask=is_place)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def mean_of_line(line, at, pixel, x0, x1, x2, count_x: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Return the weighted means of 2 or 3 neighbouring pixels of a row of the source, from ``line + at`` on."""
    sums = x0 * tl.load(line + at).to(tl.int32) + 2097152
    sums += x1 * tl.load(line + at + pixel).to(tl.int32)
    if count_x == 3:
        sums += x2 * tl.load(line + at + 2 * pixel).to(tl.int32)
    return sums >> 22


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def mean_of_many(source, at, row, pixel, taps_y, taps_x, count_y, count_x, is_column, longest: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Return the weighted means of any number of rows and columns of pixels, from ``source + at`` on."""
    total = tl.zeros_like(at).to(tl.int32) + 2097152
    for tap_y in range(0, count_y):
        sums = tl.zeros_like(total) + 2097152
        for tap_x in range(0, count_x):
            weight = tl.load(taps_x + tap_x * longest, mask=is_column, other=0)
            sums += weight * tl.load(source + at + tap_x * pixel).to(tl.int32)
        total += tl.load(taps_y + tap_y * longest) * (sums >> 22)
        source += row
    return total >> 22


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def write_rows(  # type: ignore[no-untyped-def,unused-ignore]
    source,
    image,
    own,
    taps_y,
    taps_x,
    at,
    x,
    channel,
    place,
    is_there_x,
    first_y,
    last_y,
    scale,
    shift,
    fill,
    erased,
    count_y,
    count_x,
    few_y: tl.constexpr,
    few_x: tl.constexpr,
    channels: tl.constexpr,
    line_size: tl.constexpr,
    longest: tl.constexpr,
    planar: tl.constexpr,
    scales: tl.constexpr,
    resamples: tl.constexpr,
    padding: tl.constexpr,
    num_erased: tl.constexpr,
    passes: tl.constexpr,
    plane: tl.constexpr,
):
    """Write rows of a result, channel by channel if it is planar; ``few_*`` is the number of taps if 2 or 3, else 0."""
    is_place = place < line_size
    pixel: tl.constexpr = 1 if planar else channels
    row = tl.load(own + 2).to(tl.int32) * pixel
    step = tl.load(own + 1).to(tl.int32) * row if planar else 1
    full_height, down = tl.load(own + 7).to(tl.int32), tl.load(own + 9).to(tl.int32)
    if few_x:
        x0 = tl.load(taps_x, mask=is_place, other=0)
        x1 = tl.load(taps_x + longest, mask=is_place, other=0)
        x2 = x1
        if few_x == 3:
            x2 = tl.load(taps_x + 2 * longest, mask=is_place, other=0)
    for _number in range(0, passes):
        if scales:
            factor, offset = tl.load(scale + channel), tl.load(shift + channel)
        line0 = tl.zeros_like(at).to(tl.int32)  # the last rows of the box, resampled, for the next results
        line1 = tl.zeros_like(at).to(tl.int32)
        line2 = tl.zeros_like(at).to(tl.int32)
        for y in range(first_y, last_y):
            if resamples:
                from_y = tl.load(taps_y - longest + y)
                is_there_y = from_y >= 0
                from_y = tl.maximum(from_y, 0)
                line = source + from_y.to(tl.int64) * row
                if few_x:
                    before = tl.maximum(tl.load(taps_y - longest + tl.maximum(y - 1, first_y)), 0)
                    begin = tl.maximum(from_y, before + few_y)
                    begin = tl.where((y == first_y) | (before > from_y), from_y, begin)
                    for tap in tl.static_range(few_y):
                        if from_y + tap >= begin:
                            line0 = line1
                            line1 = line2
                            line2 = mean_of_line(line + tap * row, at, pixel, x0, x1, x2, few_x)
                    value = 2097152 + tl.load(taps_y + y + (few_y - 1) * longest) * line2
                    value += tl.load(taps_y + y + (few_y - 2) * longest) * line1
                    if few_y == 3:
                        value += tl.load(taps_y + y) * line0
                    value = value >> 22
                else:
                    value = mean_of_many(line, at, row, pixel, taps_y + y, taps_x, count_y, count_x, is_place, longest)
            else:
                inside = index_inside(y + down, full_height, padding)
                is_there_y = inside == y + down
                from_y = (2 * inside + 1) * tl.load(own + 5).to(tl.int32) // (2 * full_height)
                value = tl.load(source + from_y.to(tl.int64) * row + at).to(tl.int32)
            if padding == "constant":
                value = tl.where(is_there_y & is_there_x, value, tl.load(fill + channel).to(tl.int32))
            result = value
            if scales:
                result = value.to(tl.float32) * factor + offset
            result = result.to(image.dtype.element_ty)
            for box in tl.static_range(num_erased):
                blank = tl.load(erased + box * channels + channel)
                result = tl.where(is_erased(own + 12 + 4 * box, y, x), blank, result)
            tl.store(image + y * line_size + place, result, mask=is_place)
        source += step
        image += plane
        channel += 1


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def is_erased(box, y, x):  # type: ignore[no-untyped-def,unused-ignore]
    """Return which pixels of a row lie in a box, given by its top, left, height and width."""
    top, left = tl.load(box), tl.load(box + 1)
    in_columns = (x >= left) & (x < left + tl.load(box + 3))
    return (y >= top) & (y < top + tl.load(box + 2)) & in_columns


@triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
    do_not_specialize=["first", "row_bytes", "most"], do_not_specialize_on_alignment=["images", "rows"]
)
def augment_images(  # type: ignore[no-untyped-def,unused-ignore]
    images,
    out,
    rows,
    table,
    taps,
    first,
    row_bytes,
    most,
    scale,
    shift,
    fill,
    erased,
    columns: tl.constexpr,
    channels: tl.constexpr,
    out_height: tl.constexpr,
    out_width: tl.constexpr,
    longest: tl.constexpr,
    has_rows: tl.constexpr,
    planar: tl.constexpr,
    interleaves: tl.constexpr,
    scales: tl.constexpr,
    resamples: tl.constexpr,
    antialias: tl.constexpr,
    padding: tl.constexpr,
    num_erased: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Compute a block of rows and columns of one output image, channel by channel if it is planar.

    ``planar`` refers to the stored images, ``interleaves`` to the output. All Triton tensors have one axis and the same
    layout, because converting between layouts takes longer than everything else.
    """
    line_size: tl.constexpr = out_width * channels if interleaves else out_width
    across: tl.constexpr = (line_size + block - 1) // block
    down: tl.constexpr = (out_height + block_rows - 1) // block_rows
    sample = (tl.program_id(0) // (down * across)).to(tl.int64)
    first_y = tl.program_id(0) % (down * across) // across * block_rows
    last_y = tl.minimum(first_y + block_rows, out_height)
    place = tl.program_id(0) % across * block + tl.arange(0, block)
    if interleaves:
        place = place.to(tl.float32).to(tl.int32)  # hides that places are consecutive, so that each thread gets one
    own = table + (first + sample) * columns
    stored = sample
    if has_rows:
        stored = tl.load(rows + sample)
    pixel: tl.constexpr = 1 if planar else channels
    row = tl.load(own + 2).to(tl.int32) * pixel
    step = tl.load(own + 1).to(tl.int32) * row if planar else 1
    x = place
    if interleaves:
        x = place // channels
    taps_y = taps + (first + sample) * (2 * (most + 1) * longest)
    taps_x = taps_y + ((most + 1) * longest + x)
    if resamples:
        from_x = tl.load(taps_x, mask=place < line_size, other=0)
        is_there_x = from_x >= 0
        from_x = tl.maximum(from_x, 0)
    else:
        index_x = tl.where(tl.load(own + 11) != 0, out_width - 1 - x, x) + tl.load(own + 10).to(tl.int32)
        width = tl.load(own + 8).to(tl.int32)
        inside_x = index_inside(index_x, width, padding)
        from_x = (2 * inside_x + 1) * tl.load(own + 6).to(tl.int32) // (2 * width)
        is_there_x = index_x == inside_x
    at = ((tl.load(own + 4).to(tl.int32) + from_x) * pixel).to(tl.uint32)
    if interleaves:
        at += ((place % channels) * step).to(tl.uint32)
    else:
        at = tl.max_contiguous(at, 4)  # so that neighbouring threads read neighbouring columns
    source = images + tl.load(own) + stored * row_bytes + tl.load(own + 3) * row
    image = out + sample * (channels * out_height * out_width)
    count_y, count_x = count_taps(own, antialias)
    taps_y += longest
    taps_x += longest
    is_few = ((count_y == 2) | (count_y == 3)) & ((count_x == 2) | (count_x == 3))
    passes: tl.constexpr = 1 if interleaves else channels
    channel = place % channels if interleaves else tl.program_id(0) * 0
    if resamples:
        for few_y in tl.static_range(2, 4):
            for few_x in tl.static_range(2, 4):
                if (count_y == few_y) & (count_x == few_x):
                    write_rows(
                        source, image, own, taps_y, taps_x, at, x, channel, place, is_there_x, first_y, last_y,
                        scale, shift, fill, erased, count_y, count_x, few_y, few_x, channels, line_size, longest,
                        planar, scales, resamples, padding, num_erased, passes, out_height * out_width,
                    )  # fmt: skip
    if not (resamples and is_few):
        write_rows(
            source, image, own, taps_y, taps_x, at, x, channel, place, is_there_x, first_y, last_y,
            scale, shift, fill, erased, count_y, count_x, 0, 0, channels, line_size, longest,
            planar, scales, resamples, padding, num_erased, passes, out_height * out_width,
        )  # fmt: skip


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


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_colours(place, channel_stride, inside, channels: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Return the three colours of pixels, which are equal for one channel."""
    red = tl.load(place, mask=inside, other=0).to(tl.int32)
    green = red
    blue = red
    if channels == 3:
        green = tl.load(place + channel_stride, mask=inside, other=0).to(tl.int32)
        blue = tl.load(place + 2 * channel_stride, mask=inside, other=0).to(tl.int32)
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
            red, green, blue = load_colours(place, channel_stride, inside, channels)
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
        red, green, blue = load_colours(place, channel_stride, inside, channels)
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
