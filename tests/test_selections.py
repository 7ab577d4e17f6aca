"""Which chunks a selection touches: against brute force, and refusing what h5py refuses."""

from __future__ import annotations

import itertools

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5chunk.errors import OptionError
from h5chunk.plan.cache import ChunkGrid
from h5chunk.tools.model.accesses import find_accesses, find_row_accesses

GRID = ChunkGrid((7, 5), (3, 2), 4)


def brute_force(grid: ChunkGrid, selection: object) -> list[tuple[int, int, int]]:
    """Chunk, bytes and runs, from every single element that numpy selects."""
    if isinstance(selection, tuple):  # beside an integer, numpy would move the axis of a list
        selection = tuple(slice(part, part + 1 or None) if isinstance(part, int) else part for part in selection)
    places = np.arange(np.prod(grid.shape)).reshape(grid.shape)[selection]
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


def check(grid: ChunkGrid, selections: list) -> None:
    accesses = find_accesses(grid, selections)
    rows = list(zip(accesses.chunks.tolist(), accesses.bytes_each.tolist(), accesses.runs.tolist(), strict=True))
    parts = [rows[start:stop] for start, stop in itertools.pairwise(accesses.bounds.tolist())]
    assert parts == [brute_force(grid, selection) for selection in selections]


@st.composite
def slices(draw: st.DrawFn, size: int, most_step: int = 6) -> slice:
    start, stop = (draw(st.none() | st.integers(-size - 2, size + 2)) for _ in range(2))
    return slice(start, stop, draw(st.none() | st.integers(1, most_step)))


@st.composite
def traces(draw: st.DrawFn) -> tuple[ChunkGrid, list]:
    rank = draw(st.integers(1, 3))
    shape = draw(st.tuples(*[st.integers(1, 9)] * rank))
    grid = ChunkGrid(shape, draw(st.tuples(*[st.integers(1, 5)] * rank)), draw(st.sampled_from((1, 4))))

    def part(axis: int, listed: int) -> st.SearchStrategy:
        size = shape[axis]
        lists = st.sets(st.integers(0, size - 1)).map(sorted)
        return slices(size) | st.integers(-size, size - 1) | (lists if axis == listed else st.nothing())

    whole = st.integers(0, rank - 1).flatmap(lambda n: st.tuples(*[part(axis, n) for axis in range(rank)]))
    shorter = st.tuples(whole, st.integers(0, rank)).map(lambda both: both[0][: both[1]])
    return grid, draw(st.lists(whole | shorter | st.integers(0, shape[0] - 1) | slices(shape[0], 1), max_size=5))


@given(traces())
@settings(deadline=None, max_examples=150)
def test_against_brute_force(case):
    check(*case)


@pytest.mark.parametrize("rest", [(), (slice(1, 4),), (slice(None, None, 3),), (4,), ([0, 3, 4],)])
def test_rows_that_want_the_same_of_the_other_axes(rest):
    check(GRID, [(first, *rest) for first in (0, slice(0, 3), slice(2, 2), slice(5, 1), slice(1, 99), -1)])


def test_rows():
    starts, stops = np.array([0, 2, 6, 3, 7]), np.array([7, 4, 7, 3, 7])
    rows = find_row_accesses(GRID, starts, stops)
    same = find_accesses(GRID, [slice(start, stop) for start, stop in zip(starts, stops, strict=True)])
    samples = find_accesses(GRID, np.array([4, 0, 4], np.uint8))
    for name in ("chunks", "bytes_each", "runs", "bounds"):
        assert getattr(rows, name).tolist() == getattr(same, name).tolist()
        assert getattr(samples, name).tolist() == getattr(find_accesses(GRID, [4, 0, 4]), name).tolist()
    long = ChunkGrid((300, 5), (3, 2), 4)
    assert find_accesses(long, np.array([255], np.uint8)).chunks.tolist() == find_accesses(long, [255]).chunks.tolist()
    assert rows.chunks.dtype == rows.bytes_each.dtype == rows.runs.dtype == rows.bounds.dtype == np.int64


def test_a_mask_an_ellipsis_and_nothing_at_all():
    check(GRID, [np.array([1, 0, 0, 1, 1, 0, 1], bool), [], (), ..., (..., 1), (1, ...), [-7, -1], np.int64(3)])
    assert len(find_accesses(GRID, [])) == len(find_accesses(GRID, np.array([], int))) == 0
    assert len(find_accesses(ChunkGrid((0, 5), (3, 2), 4), [slice(None)])) == 0
    assert repr(find_accesses(GRID, [0, 1])) == "Accesses(num_selections=2, num_accesses=6, wanted_bytes=40)"


def test_whole_chunks_follow_one_another_without_a_gap():
    grid = ChunkGrid((6, 4, 3), (6, 4, 3), 1)
    wanted = [slice(1, 4), (slice(1, 4), slice(1, 3)), (slice(None), [0, 3]), (slice(None), slice(None), 0)]
    assert find_accesses(grid, wanted).runs.tolist() == [1, 3, 7, 24]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (7, "axis 0 is 7: give -7 to 6"),
        ((0, -6), "axis 1 is -6: give -5 to 4"),
        (slice(None, None, -1), "h5py takes a step of 1 or more"),
        (slice(None, None, 0), "slice step cannot be zero"),
        (slice("a", None), "slice indices must be integers"),
        ([2, 1], "h5py takes a list whose indices grow: sort it"),
        ([2, 2], "sort it and drop what comes twice"),
        ([0, 7], "give indices from -7 to 6"),
        ([0.5], "give an integer, a slice, a 1-d list of integers or a mask of 7"),
        ([[0, 1]], "1-d list"),
        ("a", "axis 0 is 'a': give an integer"),
        (None, "axis 0 is None: give an integer"),
        ([True, False], "a mask of 7"),
        ((0, 0, 0), r"has 3 parts: give at most one for each axis of \(7, 5\)"),
        ((..., 0, ...), "at most one"),
        (([0, 1], [1, 2]), "two lists, h5py takes one"),
    ],
)
def test_what_h5py_refuses(selection, message):
    with pytest.raises(OptionError, match=message):
        find_accesses(GRID, [0, selection])
    with h5py.File("refused.h5", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("data", GRID.shape, "u1", chunks=GRID.chunks)
        with pytest.raises((TypeError, ValueError, IndexError, OSError)):
            dataset[selection]


def test_rows_that_cannot_be():
    with pytest.raises(OptionError, match="selection 1 is rows 3 to 8: give 0 <= start <= stop <= 7"):
        find_row_accesses(GRID, [0, 3], [7, 8])
    with pytest.raises(OptionError, match="selection 0 is rows 3 to 2"):
        find_row_accesses(GRID, [3], [2])
    with pytest.raises(OptionError, match="selection 0 is rows -1 to 0"):
        find_accesses(GRID, np.array([-1]))
    with pytest.raises(OptionError, match=r"shapes \(2,\) and \(1,\)"):
        find_row_accesses(GRID, [1, 2], [3])
    with pytest.raises(OptionError, match="is contiguous: it has no chunks"):
        find_accesses(ChunkGrid((7, 5), None, 4), [0])
