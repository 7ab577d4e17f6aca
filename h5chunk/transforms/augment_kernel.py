"""The Triton kernels of augmentation, in a module that is imported only if a GPU and Triton may exist.

`h5chunk.transforms.augment_rule` says what they compute, and what the columns of a table are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def index_inside(index, full, padding: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Return the row or column of a resized image to read at an index, which may lie in the padding."""
    if padding == "reflect":
        index = tl.abs(index)
        index = tl.minimum(index, 2 * (full - 1) - index)
    return tl.minimum(tl.maximum(index, 0), full - 1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def count_taps(own, antialias: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Return the number of rows, and of columns, of the source box that are weighted into one pixel of the result."""
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
    """Write where the taps of each output row and column of a sample begin in its box, and their 22-bit weights.

    -1 stands for a pixel outside, where the padding is constant.
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
def add_row(sums, source, at, weights_x, tap, stride, is_column, longest: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Add the pixels of one tap of each column to the sums of a row of the box."""
    weight = tl.load(weights_x + tap * longest, mask=is_column, other=0)
    return sums + weight[None, :] * tl.load(source + at + tap * stride).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def resampled(  # type: ignore[no-untyped-def,unused-ignore]
    source,
    at,
    row,
    pixel,
    weights_y,
    weights_x,
    count_y,
    count_x,
    is_row,
    is_column,
    longest: tl.constexpr,
    unrolled: tl.constexpr,
    shape: tl.constexpr,
):
    """Return the weighted means of pixels from ``source + at`` on, of ``unrolled`` rows and columns if it is not 0."""
    total = tl.zeros(shape, tl.int32)
    if unrolled:
        for tap_y in tl.static_range(unrolled):
            weight_y = tl.load(weights_y + tap_y * longest, mask=is_row, other=0)
            sums = tl.full(shape, 2097152, tl.int32)
            for tap_x in tl.static_range(unrolled):
                sums = add_row(sums, source + tap_y * row, at, weights_x, tap_x, pixel, is_column, longest)
            total += weight_y[:, None] * (sums >> 22)
    else:
        for tap_y in range(0, count_y):
            weight_y = tl.load(weights_y + tap_y * longest, mask=is_row, other=0)
            sums = tl.full(shape, 2097152, tl.int32)
            for tap_x in range(0, count_x):
                sums = add_row(sums, source + tap_y * row, at, weights_x, tap_x, pixel, is_column, longest)
            total += weight_y[:, None] * (sums >> 22)
    return (total + 2097152) >> 22


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def nearest_places(own, y, x, out_width: tl.constexpr, padding: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """Return the rows and columns of the box to copy for those of a result, and whether they lie inside the image."""
    height, width = tl.load(own + 7).to(tl.int32), tl.load(own + 8).to(tl.int32)
    index_y = y + tl.load(own + 9).to(tl.int32)
    index_x = tl.where(tl.load(own + 11) != 0, out_width - 1 - x, x) + tl.load(own + 10).to(tl.int32)
    inside_y = index_inside(index_y, height, padding)
    inside_x = index_inside(index_x, width, padding)
    from_y = (2 * inside_y + 1) * tl.load(own + 5).to(tl.int32) // (2 * height)
    from_x = (2 * inside_x + 1) * tl.load(own + 6).to(tl.int32) // (2 * width)
    return from_y, from_x, index_y == inside_y, index_x == inside_x


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def is_erased(box, y, x):  # type: ignore[no-untyped-def,unused-ignore]
    """Return which pixels are in a box: its top, left, height and width."""
    top, left = tl.load(box), tl.load(box + 1)
    in_rows = (y >= top) & (y < top + tl.load(box + 2))
    in_columns = (x >= left) & (x < left + tl.load(box + 3))
    return in_rows[:, None] & in_columns[None, :]


@triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
    do_not_specialize=["first", "row_bytes", "most"], do_not_specialize_on_alignment=["images", "rows"]
)
def augment_images(  # type: ignore[no-untyped-def,unused-ignore]
    images,
    out,
    rows,
    table,
    taps,
    scale,
    shift,
    fill,
    erased,
    first,
    row_bytes,
    most,
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
    block_columns: tl.constexpr,
    together: tl.constexpr,
):
    """Compute a block of one output image, channel after channel.

    ``planar`` is the layout of the stored images, ``interleaves`` that of the output.
    """
    across: tl.constexpr = (out_width + block_columns - 1) // block_columns
    down: tl.constexpr = (out_height + block_rows - 1) // block_rows
    sample = (tl.program_id(0) // (down * across)).to(tl.int64)
    y = tl.program_id(0) % (down * across) // across * block_rows + tl.arange(0, block_rows)
    x = tl.program_id(0) % across * block_columns + tl.arange(0, block_columns)
    is_row = y < out_height
    is_column = x < out_width
    own = table + (first + sample) * columns
    stored = sample
    if has_rows:
        stored = tl.load(rows + sample)
    pixel: tl.constexpr = 1 if planar else channels
    row = tl.load(own + 2).to(tl.int32) * pixel
    step = tl.load(own + 1).to(tl.int32) * row if planar else 1
    if resamples:
        taps_y = taps + (first + sample) * (2 * (most + 1) * longest) + y
        taps_x = taps + ((first + sample) * 2 + 1) * ((most + 1) * longest) + x
        from_y = tl.load(taps_y, mask=is_row, other=0)
        from_x = tl.load(taps_x, mask=is_column, other=0)
        is_there_y = from_y >= 0
        is_there_x = from_x >= 0
        from_y = tl.maximum(from_y, 0)
        from_x = tl.maximum(from_x, 0)
        count_y, count_x = count_taps(own, antialias)
        taps_y += longest
        taps_x += longest
    else:
        from_y, from_x, is_there_y, is_there_x = nearest_places(own, y, x, out_width, padding)
    at = ((tl.load(own + 3).to(tl.int32) + from_y) * row)[:, None]
    at += ((tl.load(own + 4).to(tl.int32) + from_x) * pixel)[None, :]
    at = tl.max_contiguous(at.to(tl.uint32), [1, 2])  # so that neighbouring threads read neighbouring columns
    source = images + tl.load(own) + stored * row_bytes
    if interleaves:
        there = ((y * out_width)[:, None] + x[None, :]) * channels
    else:
        there = tl.max_contiguous((y * out_width)[:, None] + x[None, :], [1, together])
    image = out + sample * (channels * out_height * out_width)
    for channel in range(channels):
        if resamples:
            shape: tl.constexpr = [block_rows, block_columns]
            if (count_y == 2) & (count_x == 2):
                value = resampled(source, at, row, pixel, taps_y, taps_x, 2, 2, is_row, is_column, longest, 2, shape)
            elif (count_y == 3) & (count_x == 3):
                value = resampled(source, at, row, pixel, taps_y, taps_x, 3, 3, is_row, is_column, longest, 3, shape)
            else:
                value = resampled(
                    source, at, row, pixel, taps_y, taps_x, count_y, count_x, is_row, is_column, longest, 0, shape
                )
        else:
            value = tl.load(source + at).to(tl.int32)
        if padding == "constant":
            is_there = is_there_y[:, None] & is_there_x[None, :]
            value = tl.where(is_there, value, tl.load(fill + channel).to(tl.int32))
        result = value
        if scales:
            result = value.to(tl.float32) * tl.load(scale + channel) + tl.load(shift + channel)
        result = result.to(out.dtype.element_ty)
        for number in tl.static_range(num_erased):
            blank = tl.load(erased + number * channels + channel)
            result = tl.where(is_erased(own + 12 + 4 * number, y, x), blank, result)
        tl.store(image + there, result, mask=is_row[:, None] & is_column[None, :])
        source += step
        image += 1 if interleaves else out_height * out_width
