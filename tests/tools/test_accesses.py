"""Which chunks reading samples touches, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripts import load

from h5chunk.errors import OptionError
from h5chunk.plan.cache import ChunkGrid

model = load("hdf5_cache")
range_accesses, sample_accesses = model.range_accesses, model.sample_accesses

GRID = ChunkGrid((7, 5), (3, 2), 4)


def brute_force(grid: ChunkGrid, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Chunk, bytes and runs, from every single element of a range of samples."""
    places = np.arange(np.prod(grid.shape)).reshape(grid.shape)[start:stop]
    counts = [-(-size // chunk) for size, chunk in zip(grid.shape, grid.chunks, strict=True)]
    touched: dict[int, list[tuple[int, int]]] = {}
    for result_place, place in enumerate(places.ravel()):
        index = np.unravel_index(place, grid.shape)
        scaled, inside = zip(*(divmod(int(i), c) for i, c in zip(index, grid.chunks, strict=True)), strict=True)
        chunk_place = int(np.ravel_multi_index(inside, grid.chunks))
        touched.setdefault(int(np.ravel_multi_index(scaled, counts)), []).append((chunk_place, result_place))
    return [
        (
            chunk,
            len(elements) * grid.itemsize,
            1 + sum((b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in itertools.pairwise(elements)),
        )
        for chunk, elements in sorted(touched.items())
    ]


def as_rows(accesses: model.Accesses) -> list[tuple[int, int, int]]:
    return list(zip(accesses.chunks.tolist(), accesses.bytes_each.tolist(), accesses.runs.tolist(), strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ChunkGrid, list[tuple[int, int]]]:
    rank = draw(st.integers(1, 4))
    shape = draw(st.tuples(*[st.integers(1, 9 - rank)] * rank))
    grid = ChunkGrid(shape, draw(st.tuples(*[st.integers(1, 5)] * rank)), draw(st.sampled_from((1, 4))))
    bounds = st.tuples(*[st.integers(0, shape[0])] * 2).map(lambda pair: (min(pair), max(pair)))
    return grid, draw(st.lists(bounds, max_size=5))


@given(cases())
@settings(deadline=None, max_examples=200)
def test_against_brute_force(case):
    grid, ranges = case
    accesses = range_accesses(grid, *np.array(ranges, np.int64).reshape(-1, 2).T)
    assert as_rows(accesses) == [row for start, stop in ranges for row in brute_force(grid, start, stop)]
    assert accesses.chunks.dtype == accesses.bytes_each.dtype == accesses.runs.dtype == np.int64


def test_samples():
    samples = np.array([4, 0, 4], np.uint8)
    assert as_rows(sample_accesses(GRID, samples)) == as_rows(range_accesses(GRID, [4, 0, 4], [5, 1, 5]))
    assert sample_accesses(ChunkGrid((300, 5), (3, 2), 4), np.array([255], np.uint8)).chunks.tolist() == [255, 256, 257]
    assert len(sample_accesses(GRID, [])) == 0


def test_ranges_that_cannot_be_read():
    with pytest.raises(OptionError, match="range 1 is 3 to 8: give 0 <= start <= stop <= 7"):
        range_accesses(GRID, [0, 3], [7, 8])
    with pytest.raises(OptionError, match="range 0 is 3 to 2"):
        range_accesses(GRID, [3], [2])
    with pytest.raises(OptionError, match="range 0 is -1 to 0"):
        sample_accesses(GRID, np.array([-1]))
    with pytest.raises(OptionError, match=r"shapes \(2,\) and \(1,\)"):
        range_accesses(GRID, [1, 2], [3])
    with pytest.raises(OptionError, match="is contiguous: it has no chunks"):
        sample_accesses(ChunkGrid((7, 5), None, 4), [0])
