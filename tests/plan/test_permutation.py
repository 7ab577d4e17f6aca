"""Permutations: complete, the same for ever, and by chance."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from h5chunk.plan.permutation import permutation


@given(size=st.integers(0, 3000), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_each_number_comes_once(size, seed):
    assert sorted(permutation(size, seed).tolist()) == list(range(size))
