"""Test how boxes are divided into the parts in each block."""

from __future__ import annotations

import numpy as np
import pytest

from h5chunk.store.read.arrays import RAW, Arrays, Blocks, Boxes, Origin, Parts, divided


def make_arrays(random: np.random.Generator, axes: int, count: int) -> Arrays:
    """Return arrays of different shapes, and blocks that need not divide them."""
    parts = []
    for _ in range(count):
        shape = random.integers(1, 9, axes)
        block = random.integers(1, shape + 1)
        number = int((-(-shape // block)).prod())
        zeros = np.zeros(number, np.int64)
        blocks = Blocks(zeros.astype(np.int32), zeros, zeros, zeros.astype(np.uint32))
        parts.append(Arrays.of_one(1, shape, block, blocks, None, Origin(0, str)))
    return Arrays.joined(parts)


def lines(parts: Parts) -> list[list[int]]:
    return sorted(np.column_stack([parts.block, parts.table]).tolist())


@pytest.mark.parametrize("axes", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_cut_as_boxes_are(axes: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    arrays = make_arrays(random, axes, count)
    array = random.integers(0, count, 50)
    row = random.integers(0, arrays.shape[array, 0])
    element = random.permutation(len(row))
    low, high = np.zeros((len(row), axes), np.int64), arrays.shape[array]
    low[:, 0], high[:, 0] = row, row + 1
    expected = arrays.cut(Boxes(array, low, high, element, 0))
    parts = arrays.cut_rows(array, row, element)
    assert lines(parts) == lines(expected)
    assert sorted(zip(parts.block, parts.sizes, strict=True)) == sorted(
        zip(expected.block, expected.sizes, strict=True)
    )
    assert (arrays.codec == RAW).all()
    if axes > 1:  # the parts of a block are next to each other, in the order in which rows need their bands
        assert len(parts.firsts) == len(np.unique(parts.block))
        bands = dict.fromkeys((arrays.first[array] + row // arrays.block[array, 0] * arrays._steps[array, 0]).tolist())
        assert [block for block in dict.fromkeys(parts.block.tolist()) if block in bands] == list(bands)


def test_blocks_of_a_contiguous_array_are_contiguous() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        shape = tuple(random.integers(1, 7, random.integers(1, 5)).tolist())
        limit = int(random.integers(1, 400))
        block = divided(shape, 3, limit)
        count = np.prod(block)
        values = np.arange(np.prod(shape)).reshape(shape)[tuple(map(slice, block))]
        assert values.ravel().tolist() == list(range(count))
        assert count * 3 <= max(3, limit)
        wider = [min(size, step + 1) for size, step in zip(shape, block, strict=True)]
        first = next((axis for axis, step in enumerate(block) if step > 1), len(shape) - 1)
        wider = [*block[:first], wider[first], *block[first + 1 :]]
        assert wider == list(block) or np.prod(wider) * 3 > limit
