"""What is read at a time, and which samples wait where: against brute force."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5chunk.errors import OptionError
from h5chunk.plan.repack import (
    MIN_MEMORY_BYTES,
    MemoryShares,
    memory_for_copying,
    plan_buckets,
    plan_steps,
    plan_uneven,
)

sizes = st.integers(1, 60)


@given(st.integers(0, 200), sizes, sizes, sizes, st.integers(1, 4000))
@settings(deadline=None)
def test_steps_cover_all_rows_and_no_border_of_bands_that_do_not_fit(
    num_rows: int, row_bytes: int, band_rows: int, unit_rows: int, step_bytes: int
) -> None:
    steps = list(
        plan_steps(num_rows, row_bytes=row_bytes, band_rows=band_rows, step_bytes=step_bytes, unit_rows=unit_rows)
    )
    assert [row for step in steps for row in step] == list(range(num_rows))
    rows = max(1, step_bytes // row_bytes)
    assert all(len(step) <= rows for step in steps)
    if rows >= band_rows:
        assert all(step.start % band_rows == 0 for step in steps)
        if rows >= math.lcm(band_rows, unit_rows):
            assert all(step.start % unit_rows == 0 for step in steps)
    else:
        assert all(step.start // band_rows == (step.stop - 1) // band_rows for step in steps)


@given(st.integers(1, 200), sizes, st.integers(1, 4000), sizes)
def test_buckets_cover_all_rows(num_rows: int, row_bytes: int, bucket_bytes: int, unit_rows: int) -> None:
    borders = plan_buckets(num_rows, row_bytes, bucket_bytes, unit_rows)
    assert borders[0] == 0 and borders[-1] == num_rows and (np.diff(borders) > 0).all()
    assert max(np.diff(borders)) <= max(1, bucket_bytes // row_bytes)
    if bucket_bytes >= unit_rows * row_bytes:
        assert (borders[:-1] % unit_rows == 0).all()


@given(st.lists(st.integers(0, 30), max_size=50), st.integers(1, 300), st.sampled_from([1, 2, 8, 28]))
def test_uneven_rows_are_grouped_within_their_bytes(lengths: list[int], part_bytes: int, item_bytes: int) -> None:
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    borders = plan_uneven(ends, part_bytes, item_bytes)
    assert borders[0] == 0 and borders[-1] == len(lengths) and (np.diff(borders) > 0).all()
    for first, last in pairwise(borders):
        cost = int(ends[last] - ends[first]) * item_bytes + 8 * int(last - first)
        assert cost <= part_bytes or last == first + 1


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_the_parts_fit_in_memory_together(num_threads: int) -> None:
    shares = MemoryShares(1 << 30, num_threads)
    held = (num_threads + 1) + 3 * num_threads  # buffers, and scratch of the threads
    assert held * shares.part_bytes <= shares.memory_bytes
    assert shares.step_bytes <= shares.part_bytes
    assert max(shares.scatter_bytes(10_000), shares.bucket_bytes(1 << 45)) <= shares.part_bytes


def test_too_little_memory_is_refused() -> None:
    assert memory_for_copying(1 << 30, 1000) == (1 << 30) - 24_000
    with pytest.raises(OptionError, match=f"pass at least {MIN_MEMORY_BYTES}"):
        memory_for_copying(MIN_MEMORY_BYTES - 1, 0)
    with pytest.raises(OptionError, match=r"shuffling 100000000 samples needs 2,408,388,608 bytes .*: pass that much"):
        memory_for_copying(1 << 30, 100_000_000)
