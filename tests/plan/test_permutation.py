"""Permutations: complete, the same for ever, and by chance."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import small

from h5chunk.plan.permutation import Permutation, permutation


@given(size=st.integers(0, 3000), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_by_a_key_each_number_comes_once(size, seed):
    with pytest.MonkeyPatch.context() as patch:
        small(patch, max_listed=-1)
        numbers = Permutation(size, seed).at(np.arange(size))
    assert sorted(numbers.tolist()) == list(range(size))


def test_small_ones_are_listed():
    for size in (0, 1, 1000):
        assert (
            Permutation(size, 7, stream=(1, 2, 3)).at(np.arange(size)).tolist()
            == permutation(size, 7, stream=(1, 2, 3)).tolist()
        )


def test_by_a_key_the_numbers_of_a_seed_never_change():
    assert Permutation(10**10, 5).at(np.array([0, 1, 10**10 - 1])).tolist() == [2219455405, 3906910623, 6264442967]


def chi_square(counts: np.ndarray) -> float:
    """In standard deviations from what chance gives."""
    expected = counts.sum() / counts.size
    degrees = (counts.shape[0] - 1) * (counts.shape[1] - 1)
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("size", [16, 30, 101])
def test_by_a_key_each_number_is_equally_likely_in_each_place(monkeypatch, size):
    """Also the differences of neighbours: what a bad network betrays."""
    small(monkeypatch, max_listed=-1)
    places, steps = (np.zeros((size, size)) for _ in range(2))
    for epoch in range(3000):
        numbers = Permutation(size, 3, stream=(0, epoch, 0)).at(np.arange(size))
        np.add.at(places, (np.arange(size), numbers), 1)
        np.add.at(steps, (np.arange(size), (np.roll(numbers, 1) - numbers) % size), 1)
    assert abs(chi_square(places)) < 4.5
    assert abs(chi_square(steps[:, 1:])) < 4.5


def test_by_a_key_it_takes_no_list():
    tracemalloc.start()
    Permutation(1 << 40, 0).at(np.arange(1000))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
