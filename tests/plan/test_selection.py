"""Subsets, splits and weights: the samples that were asked for, chunk by chunk, by every reader."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loader_files import LABELS, N, epoch_of, path  # noqa: F401
from support.loaders import loader_by
from support.matrices import dense, random_matrix, write
from support.orders import ordered
from torch.utils.data import DataLoader

from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler
from h5chunk.errors import FieldError, OptionError, StateError
from h5chunk.plan.selection import WeightedSelection, balanced_weights, check_weights, select_samples, split_samples
from h5chunk.transforms import Csr, Dense

many = settings(max_examples=100, deadline=None)
SUBSET = np.random.default_rng(0).permutation(N)[:71]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 200), st.integers(0, 99))
@many
def test_each_sample_is_drawn_as_often_as_it_is_due(weights, chunk_samples, num_draws, epoch):
    found = np.array(weights) + 1e-6
    picks = WeightedSelection.of(found, np.arange(len(found)) // chunk_samples, num_draws)
    drawn = picks.resolve(3, epoch)
    assert len(picks) == len(drawn) == num_draws
    counts = np.bincount(drawn.samples, minlength=len(found))
    due = found / found.sum() * num_draws
    assert (np.abs(counts - due) < 1 + 1e-6).all() and (counts <= picks.max_draws).all()
    assert (np.diff(drawn.samples) >= 0).all()
    for start, stop in zip(drawn.starts[:-1], drawn.starts[1:], strict=True):
        assert len(set((drawn.samples[start:stop] // chunk_samples).tolist())) == 1


def test_over_epochs_each_is_drawn_as_often_as_its_weight_says():
    weights = np.array([0.3, 1.0, 0.0, 2.2, 0.5])
    picks = WeightedSelection.of(weights, np.zeros(5, np.int64), 3)
    counts = sum(np.bincount(picks.resolve(0, epoch).samples, minlength=5) for epoch in range(4000))
    np.testing.assert_allclose(counts / 4000, weights / weights.sum() * 3, atol=0.03)


@given(
    st.integers(0, 80),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(0, 9),
    st.booleans(),
)
@many
def test_splits_are_parts_of_the_right_size(size, fractions, num_groups, seed, stratify):
    shares = np.array(fractions) / max(1, sum(fractions) * 1.0000001)
    line, groups = np.random.default_rng(seed).permutation(size), np.arange(size) % num_groups
    parts = split_samples(line, shares, groups if stratify else None, seed)
    taken = np.concatenate(parts)
    assert len(set(taken.tolist())) == len(taken) and set(taken.tolist()) <= set(range(size))
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - share * size) < 2 and (np.diff(part) > 0).all()
        if stratify:
            for group in range(num_groups):
                of_all = (groups == group).sum()
                assert abs((groups[part] == group).sum() - share * of_all) <= 2


@pytest.mark.parametrize("options", [{"reader": "direct"}, {"reader": "h5py"}, {"resident": True}, {"reuse": True}])
@pytest.mark.parametrize("as_mask", [False, True])
def test_a_subset_by_every_reader(path, options, as_mask):  # noqa: F811
    """In the same order, and nothing else; images are checked by epoch_of."""
    mask = np.zeros(N, bool)
    mask[SUBSET] = True
    part = ChunkDataset(path).subset(mask if as_mask else SUBSET)
    assert len(part) == 71 and part.samples.tolist() == sorted(SUBSET.tolist())
    sampler = ChunkSampler(part, 16, seed=4)
    with loader_by(part, 16, seed=4, **options) as loader:
        for _ in range(2):
            found = epoch_of(loader)
            assert found == [part[rows][1].tolist() for rows in sampler]
            assert sorted(chain(*found)) == sorted(SUBSET.tolist())


def test_a_subset_of_a_subset_and_workers(path):  # noqa: F811
    part = ChunkDataset(path).subset(SUBSET).subset(np.arange(0, 71, 2))
    assert part.samples.tolist() == sorted(SUBSET.tolist())[::2]
    loader = DataLoader(part, batch_sampler=ChunkSampler(part, 8, num_workers=2), num_workers=2)
    assert sorted(torch.cat([labels for _, labels in loader]).tolist()) == part.samples.tolist()
    assert part[-1][1] == part.samples[-1]
    assert [labels.tolist() for _, labels in ChunkLoader(part, 8)] == epoch_of(
        ChunkLoader(ChunkDataset(path).subset(part.samples), 8)
    )


def test_chunks_without_a_wanted_sample_are_not_read(path, monkeypatch):  # noqa: F811
    dataset = ChunkDataset(path)
    size = dataset.chunk_samples
    wanted = np.arange(2 * size, 3 * size)
    sampler = ChunkSampler(dataset.subset(wanted), 5)
    assert sampler.order.selection.num_chunks == 1
    assert sorted(chain(*epoch_of(ChunkLoader(ChunkDataset(path).subset(wanted), 5)))) == wanted.tolist()


def test_split(path):  # noqa: F811
    """Of a file that nobody shuffled: sample by sample."""
    train, test = ChunkDataset(path).split((0.8, 0.2), seed=1)
    assert len(train) == 162 and len(test) == 41
    assert sorted([*train.samples, *test.samples]) == list(range(N))
    assert train.samples.tolist() != ChunkDataset(path).split((0.8, 0.2), seed=2)[0].samples.tolist()
    assert [len(part) for part in ChunkDataset(path).split((0.5, 0.1))] == [102, 20]


def test_split_of_a_shuffled_file_is_by_chunks(tmp_path):
    matrix = random_matrix(1000, 30, 4)
    path = write(tmp_path / "a.h5", matrix, shuffled=True, chunk_samples=50)  # noqa: F811
    train, test = ChunkDataset(path).split((0.72, 0.28), seed=3)
    assert len(train) == 720 and len(test) == 280
    shared = set((train.samples // 50).tolist()) & set((test.samples // 50).tolist())
    assert len(shared) == 1
    found = torch.cat([dense(rows) for (rows,) in ChunkLoader(test, 32, transforms=[Csr()])]).sum(0)
    np.testing.assert_array_equal(found.numpy(), matrix[test.samples].sum(0).A1.astype(np.float32))


def test_stratified(tmp_path):
    classes = np.repeat([0, 1, 2], [700, 280, 20])
    path = write(tmp_path / "a.h5", random_matrix(1000, 30, 4), fields={"labels": classes}, shuffled=True)  # noqa: F811
    parts = ChunkDataset(path).split((0.7, 0.2, 0.1), stratify="labels")
    counts = [np.bincount(classes[part.samples], minlength=3).tolist() for part in parts]
    assert counts == [[490, 196, 14], [140, 56, 4], [70, 28, 2]]


@pytest.mark.parametrize("layout", [Dense(), Csr()])
def test_weights(tmp_path, layout):
    """By class, of sampler and loader alike; also of a matrix, whose windows have other sizes then."""
    classes = np.repeat([0, 1], [380, 20])
    matrix = random_matrix(400, 50, 6)
    path = write(tmp_path / "a.h5", matrix, fields={"labels": classes}, chunk_samples=8)  # noqa: F811
    dataset = ChunkDataset(path, fields=("X", "labels"))
    sampler = ChunkSampler(dataset, 32, weights="labels", window_chunks=4, num_workers=0)
    loader = ChunkLoader(**ordered(dataset, 32, weights="labels", window_chunks=4), transforms=[layout])
    for _ in range(2):
        drawn = Counter()
        for rows, (found, labels) in zip(sampler, loader, strict=True):
            assert torch.equal(dense(found), dense(dataset[rows][0]))
            np.testing.assert_array_equal(dense(found).numpy(), matrix[rows].toarray())
            drawn.update(labels.tolist())
        assert drawn == {0: 200, 1: 200}


def test_weights_of_a_subset(path):  # noqa: F811
    weights = np.zeros(71)
    weights[[3, 50]] = 1, 3
    loader = ChunkLoader(**ordered(ChunkDataset(path).subset(SUBSET), 10, weights=weights))
    drawn = Counter(chain(*epoch_of(loader)))
    wanted = np.sort(SUBSET)[[3, 50]].tolist()
    assert set(drawn) == set(wanted) and abs(drawn[wanted[1]] - 53) <= 1


def test_states_of_other_samples_are_refused(path):  # noqa: F811
    state = ChunkLoader(ChunkDataset(path).subset(SUBSET), 10).state_dict()
    ChunkLoader(ChunkDataset(path).subset(np.sort(SUBSET)), 10).load_state_dict(state)
    ChunkSampler(ChunkDataset(path).subset(SUBSET), 10).load_state_dict(state)
    other = np.append(np.sort(SUBSET)[:-1], N - 1 if N - 1 not in SUBSET else N - 2)
    dataset = ChunkDataset(path)
    for data, order in ((dataset.subset(other), {}), (dataset.subset(SUBSET), {"weights": np.ones(71)}), (dataset, {})):
        with pytest.raises(StateError, match=r"state (has|belongs)"):
            ChunkLoader(**ordered(data, 10, **order)).load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select_samples([3, 3], 9), "has sample 3 twice"),
        (lambda: select_samples([3, 9], 9), "has sample 9: pass indices from 0 to 8"),
        (lambda: select_samples([-1], 9), "has sample -1"),
        (lambda: select_samples(np.array([1 << 63], np.uint64), 9), "has sample 9223372036854775808"),
        (lambda: select_samples([True, False], 9), "a mask of shape"),
        (lambda: select_samples([0.5], 9), "pass sample indices, or a mask"),
        (lambda: check_weights([1, 2], 3), "there are 3 samples: pass one weight for each"),
        (lambda: check_weights([1, -2], 2), r"weights\[1\] is -2"),
        (lambda: check_weights([1, np.nan], 2), r"weights\[1\] is nan"),
        (lambda: check_weights([0, 0], 2), "all 0"),
        (lambda: split_samples(np.arange(4), (0.9, 0.2), None, 0), "have the sum 1.1: pass a sum of at most 1"),
        (lambda: split_samples(np.arange(4), (-0.1, 0.2), None, 0), "pass numbers from 0 to 1"),
        (lambda: split_samples(np.arange(4), (), None, 0), "one for each part"),
    ],
)
def test_what_cannot_be(call, message):
    with pytest.raises(OptionError, match=message):
        call()


def test_fields_that_cannot_be_weights(path):  # noqa: F811
    with pytest.raises(FieldError, match="has no dataset 'nothing'"):
        ChunkLoader(**ordered(path, 10, weights="nothing"))
    with pytest.raises(FieldError, match="name a field with one value per sample"):
        ChunkDataset(path).split((1.0,), stratify="images")
    with pytest.raises(OptionError, match="name is a ndarray: pass the name of a field"):
        ChunkDataset(path).split((1.0,), stratify=LABELS)
    assert balanced_weights(LABELS).tolist() == [1.0] * N


@pytest.mark.parametrize("weight", [1e308, 1e-320, 1.0])
def test_huge_and_tiny_weights_are_equal_ones(path, weight):  # noqa: F811
    with ChunkLoader(**ordered(path, 16, weights=np.full(N, weight))) as loader:
        assert sorted(chain(*epoch_of(loader))) == list(range(N))
