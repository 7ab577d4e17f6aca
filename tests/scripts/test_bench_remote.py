"""The hit rates that bench_remote.py compares."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.scripts import load

hit_rate = load("bench_remote").hit_rate


@pytest.mark.parametrize("capacity", [1, 3, 5])
def test_hits_are_the_most_that_any_policy_can_have(capacity):
    def best(trace, cached):
        if not trace:
            return 0
        options = [
            set(some) for some in itertools.combinations(cached | {trace[0]}, min(capacity, len(cached | {trace[0]})))
        ]
        return (trace[0] in cached) + max(best(trace[1:], some) for some in options)

    epochs = [np.random.default_rng(seed).permutation(4).tolist() for seed in range(2)]
    assert hit_rate(epochs, capacity, "belady") == best([chunk for epoch in epochs for chunk in epoch], set()) / 8
    assert hit_rate(epochs, capacity, "lru") <= hit_rate(epochs, capacity, "belady")
