"""Mixing: pair counts against brute force, the effective batch against the real order."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import small

from h5chunk.errors import OptionError
from h5chunk.plan.order import Order, with_full_windows
from h5chunk.tools.model.clustering import find_clustering
from h5chunk.tools.model.mixing import design_effect, effective_batch, window_for

many = settings(max_examples=60, deadline=None)
group_lists = st.lists(st.integers(0, 4), min_size=1, max_size=40)


def sorted_groups(num_samples: int, num_groups: int = 10) -> np.ndarray:
    return np.arange(num_samples) * num_groups // num_samples


def shuffled_groups(num_samples: int, num_groups: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(sorted_groups(num_samples, num_groups))


def runs_of(num_samples: int, length: int) -> np.ndarray:
    return np.repeat(np.random.default_rng(1).integers(0, 10, num_samples // length + 1), length)[:num_samples]


def alike_share(groups: np.ndarray, pairs: list[tuple[int, int]]) -> float:
    return float(np.mean([groups[i] == groups[j] for i, j in pairs]))


# the pairs


@given(group_lists, st.integers(1, 12))
@many
def test_clustering_is_that_of_all_pairs(groups, piece):
    groups = np.array(groups)
    found = find_clustering(groups, piece)
    pairs = list(itertools.combinations(range(len(groups)), 2))
    inside = [(i, j) for i, j in pairs if i // piece == j // piece]
    if not inside or len(set(groups.tolist())) == 1:
        assert found.correlation == 0
        return
    anywhere = alike_share(groups, pairs)
    assert found.same_group == pytest.approx(anywhere)
    assert found.correlation == pytest.approx((alike_share(groups, inside) - anywhere) / (1 - anywhere), abs=1e-12)


def test_many_blocks_count_as_one(monkeypatch):
    groups = np.random.default_rng(0).integers(0, 300, 10_007)
    whole = find_clustering(groups, 20)
    small(monkeypatch, block_samples=61)
    assert find_clustering(groups, 20) == whole
    assert find_clustering(groups, 200).correlation != whole.correlation
    small(monkeypatch, max_table=10)  # sorted instead of counted in a table
    assert find_clustering(groups, 20) == whole


@pytest.mark.parametrize(
    "kind", ["i1", "u1", ">i4", "u8", "S3", "S16", "U5", "far apart", "negative", "at the top", "two, as bool"]
)
def test_any_kind_of_group(kind):
    numbers = np.random.default_rng(3).integers(0, 2 if "bool" in kind else 90, 1000)
    groups = {
        "far apart": numbers * (1 << 56),
        "negative": numbers.astype(np.int8) - np.int8(100),
        "at the top": np.uint64(2**64 - 1) - numbers.astype(np.uint64),
        "two, as bool": numbers.astype(bool),
        "S16": np.char.add(b"a long prefix.", numbers.astype("S2")),
    }.get(kind)
    groups = numbers.astype(kind) if groups is None else groups
    assert find_clustering(groups, 7) == find_clustering(numbers, 7)
    assert find_clustering(groups, 7).same_group < 1


@pytest.mark.parametrize("num_groups", [2, 10, 300, 500])
@pytest.mark.parametrize(("num_samples", "chunk"), [(1000, 50), (1030, 50), (60, 25)])
def test_a_shuffled_file_has_no_clustering_on_average(num_samples, chunk, num_groups):
    found = [
        find_clustering(shuffled_groups(num_samples, min(num_groups, num_samples // 2), seed), chunk).h_y
        for seed in range(300)
    ]
    assert abs(np.mean(found) - 1) <= 4 * np.std(found) / np.sqrt(300) + 1e-9


@pytest.mark.parametrize("num_samples", [640, 650, 641])
def test_one_group_a_chunk(num_samples):
    assert find_clustering(np.arange(num_samples) // 64, 64).h_y == pytest.approx(64)
    assert find_clustering(np.arange(num_samples), 64).h_y == 1  # all different
    assert find_clustering(np.zeros(num_samples, int), 64).h_y == 1  # all the same


@pytest.mark.parametrize(
    ("sizes", "chunk"), [((20, 20), 4), ((38, 2), 4), ((10, 10, 10, 12), 8), ((2,) * 20, 5), ((395, 5), 40)]
)
def test_chance_bounds_how_often_a_shuffle_is_as_clustered(sizes, chunk):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rng = np.random.default_rng(5)
    found = np.array([find_clustering(rng.permutation(groups), chunk).chance for _ in range(1000)])
    for bound in (0.3, 0.1, 0.03, 0.01):
        assert (found < bound).mean() <= bound + 3 * math.sqrt(bound / 1000)
    if 2 not in sizes:  # groups of two are too few samples for a small chance
        assert found.min() < 0.3


def test_chance_of_a_sorted_file_is_none():
    assert find_clustering(sorted_groups(10_000), 50).chance < 1e-100
    assert find_clustering(sorted_groups(64, 2), 8).chance < 1e-6


# the formula against what it stands for


@given(
    st.lists(st.integers(0, 3), min_size=16, max_size=16), st.sampled_from([(4, 2, 4), (4, 2, 8), (2, 2, 2), (2, 4, 4)])
)
@many
def test_deff_is_that_of_all_windows(groups, shape):
    """Exact for whole chunks: over all windows and batches, the probability that two samples are of one group."""
    groups, (chunk, window, batch) = np.array(groups), shape
    chunks = groups.reshape(-1, chunk)
    shares = []
    for picked in itertools.combinations(range(len(chunks)), window):
        together = chunks[list(picked)].ravel()
        shares.append(alike_share(together, list(itertools.combinations(range(len(together)), 2))))
    order = Order(16, chunk, batch, window, interleave=1)
    clustering = find_clustering(groups, chunk)
    variance, shuffled = (
        (1 - clustering_share(groups)) + (batch - 1) * (alike - clustering_share(groups))
        for alike in (np.mean(shares), clustering.same_group)
    )
    if shuffled > 1e-12:
        assert design_effect(clustering, order) == pytest.approx(variance / shuffled, abs=1e-9)


def clustering_share(groups: np.ndarray) -> float:
    """Probability that two independent samples are of one group."""
    return float(((np.bincount(groups) / len(groups)) ** 2).sum())


def simulated_deff(groups: np.ndarray, order: Order, num_epochs: int) -> float:
    """Variance of the group shares of real batches over that of independent ones, drawn without replacement."""
    shares = np.bincount(groups) / len(groups)
    variances = []
    for epoch in range(num_epochs):
        rows = groups[np.stack(list(replace(order, epoch=epoch, drop_last=True).batches()))]
        counts = np.stack([(rows == group).sum(axis=1) for group in range(len(shares))], axis=1)
        variances.append(((counts / order.batch_size - shares) ** 2).sum(axis=1).mean())
    finite = (order.num_samples - order.batch_size) / (order.num_samples - 1)
    return float(np.mean(variances) * order.batch_size / (1 - (shares**2).sum()) / finite)


@pytest.mark.parametrize(
    ("order", "num_epochs"),
    [
        (Order(16_384, 32, 128, 8, interleave=1, seed=11), 80),  # windows one after the other
        (Order(16_384, 32, 128, 16, interleave=8, seed=12), 120),  # alternating ones
        (Order(16_384, 32, 32, 24, interleave=4, seed=13), 100),  # small batches
        (Order(16_000, 50, 128, 16, interleave=2, seed=14), 120),  # windows cut chunks
        (Order(16_010, 32, 64, 32, interleave=1, seed=15, drop_last=True), 120),  # a short last chunk
        (Order(16_384, 32, 128, 256, interleave=24, seed=16), 120),  # windows that 24 make smaller
    ],
)
def test_effective_batch_of_sorted_data_is_that_of_the_real_order(order, num_epochs):
    groups = sorted_groups(order.num_samples)
    found = effective_batch(find_clustering(groups, order.chunk_samples), order)
    assert found < order.batch_size / 1.5
    assert found * simulated_deff(groups, order, num_epochs) / order.batch_size == pytest.approx(1, abs=0.05)


def test_alternating_windows_make_no_batch_better():
    """A batch is of one window, however many windows alternate."""
    groups = sorted_groups(16_384)
    clustering = find_clustering(groups, 32)
    alone, many_windows = (Order(16_384, 32, 64, 16, interleave=n, seed=2) for n in (1, 8))
    assert design_effect(clustering, alone) == pytest.approx(design_effect(clustering, many_windows))
    for order in (alone, many_windows):
        assert simulated_deff(groups, order, 60) == pytest.approx(design_effect(clustering, order), rel=0.05)


def test_a_window_of_everything_is_a_full_shuffle():
    clustering, order = find_clustering(sorted_groups(6400), 64), Order(6400, 64, 64, 100, interleave=1)
    assert design_effect(clustering, order) == pytest.approx(1)
    assert effective_batch(clustering, order) == pytest.approx(64)


def test_even_chunks_are_worth_no_more_than_their_size():
    clustering, order = find_clustering(np.tile(np.arange(8), 1000), 8), Order(8000, 8, 80, 10, interleave=1)
    assert design_effect(clustering, order) == 0  # each batch is a window with ten of each group
    assert effective_batch(clustering, order) == 80


# what is said of shuffled and of sorted data


@pytest.mark.parametrize("num_groups", [1, 2, 10, 1000, 3000])
@pytest.mark.parametrize(
    "order",
    [
        Order(6000, 50, 100, 2, interleave=2),
        Order(6000, 64, 50, 1),
        Order(6000, 1500, 100, 1, interleave=1),  # four chunks
        Order(6000, 64, 1000, 8, interleave=1),
        Order(6000, 999, 64, 1),  # a short last chunk, windows less than a chunk
    ],
)
def test_shuffled_data_are_never_flagged(order, num_groups):
    for seed in range(6):
        clustering = find_clustering(shuffled_groups(6000, num_groups, seed), order.chunk_samples)
        assert effective_batch(clustering, order) == order.batch_size


@pytest.mark.parametrize("rare", [1, 2, 3, 10, 40])
def test_a_rare_group_that_is_shuffled_is_not_flagged(rare):
    order = Order(6400, 64, 64, 1, interleave=2)
    for seed in range(15):
        groups = np.random.default_rng(seed).permutation((np.arange(6400) < rare).astype(np.int64))
        assert effective_batch(find_clustering(groups, 64), order) == 64


@pytest.mark.parametrize("num_groups", [2, 3, 10, 100, 640])
@pytest.mark.parametrize(
    "order",
    [
        Order(6400, 64, 64, 2, interleave=2),
        Order(6400, 64, 64, 25),
        Order(6390, 64, 32, 10, interleave=1),
        Order(6400, 500, 64, 3, interleave=1),
        Order(6400, 8, 256, 64, interleave=4),
    ],
)
def test_sorted_data_are_always_flagged(order, num_groups):
    clustering = find_clustering(sorted_groups(order.num_samples, num_groups), order.chunk_samples)
    assert effective_batch(clustering, order) < 0.95 * order.batch_size


# the window that is needed


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
@pytest.mark.parametrize(("num_samples", "chunk"), [(640_000, 64), (640_010, 50)])
def test_the_window_for_an_effective_batch(num_samples, chunk, share):
    clustering = find_clustering(sorted_groups(num_samples), chunk)
    order = Order(num_samples, chunk, 128, 1)
    window = window_for(clustering, order, share)
    assert window is not None
    found, less = (
        1 / design_effect(clustering, with_full_windows(replace(order, window_chunks=n)))
        for n in (window, window * 9 // 10)
    )
    assert less < share <= found
    if chunk == 64:  # windows of whole chunks can have any size
        assert found < share + 0.02


def test_no_window_short_of_everything():
    clustering = find_clustering(sorted_groups(6400), 64)
    assert window_for(clustering, Order(6400, 64, 128, 1), 0.99) is None
    assert window_for(clustering, Order(6400, 64, 1, 1), 0.99) == 1  # a batch of one cannot be clustered
    assert window_for(find_clustering(sorted_groups(6400), 6400), Order(6400, 6400, 64, 1), 0.5) is None


def test_a_shuffled_file_needs_no_window():
    order = Order(640_000, 64, 128, 1)
    assert window_for(find_clustering(shuffled_groups(640_000, 10, 0), 64), order, 0.95) == 1


# the rest


def test_as_many_groups_as_samples_take_no_table():
    groups = np.random.default_rng(0).permutation(1_000_000) * 10_000
    tracemalloc.start()
    try:
        assert find_clustering(groups, 64).same_group == 0
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (np.zeros((2, 5), int), r"groups has shape \(2, 5\): pass one integer or string per sample"),
        (np.zeros(0, int), "one integer or string per sample"),
        (np.zeros(10), "groups has type float64: pass integers or fixed-length strings"),
    ],
)
def test_groups_that_cannot_be(groups, message):
    with pytest.raises(OptionError, match=message):
        find_clustering(groups, 2)


def test_other_things_that_cannot_be():
    groups = np.arange(10)
    clustering = find_clustering(groups, 2)
    with pytest.raises(OptionError, match="piece_samples is 0"):
        find_clustering(groups, 0)
    with pytest.raises(OptionError, match="the order has shuffle=False"):
        design_effect(clustering, Order(10, 2, 2, 1, shuffle=False))
    with pytest.raises(OptionError, match="10 samples are less than a batch of 11"):
        design_effect(clustering, Order(10, 2, 11, 1, drop_last=True))
    with pytest.raises(OptionError, match="10 samples in pieces of 2, but the order has 10 samples in chunks of 5"):
        design_effect(clustering, Order(10, 5, 2, 1))
    for share in (0, 1, 1.5, -1):
        with pytest.raises(OptionError, match=f"min_share is {share}: use a fraction of the batch above 0 and below 1"):
            window_for(clustering, Order(10, 2, 2, 1), share)


def test_one_sample():
    assert effective_batch(find_clustering(np.array([5]), 4), Order(1, 4, 2, 1)) == 1
