"""Batches by group: stratified, of one or several groups, and with matched controls."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.foreign import make_file
from support.object_server import object_server
from torch.utils.data import DataLoader

import h5chunk
import h5chunk.feed.filter
from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler, OptionError, StateError
from h5chunk.plan.draws import REPEAT
from h5chunk.plan.groups import GroupOrder, GroupSelection

N = 300
RANDOM = np.random.default_rng(0)
LABEL = RANDOM.choice(5, N, p=[0.4, 0.3, 0.15, 0.1, 0.05])
SUBJECT = np.repeat(np.arange(20), 15)  # sorted
LINE = np.array([b"A", b"B"])[RANDOM.integers(0, 2, N)]
DRUG = np.array([b"DMSO", b"x", b"y"])[np.minimum(RANDOM.integers(0, 4, N), 2)]
FIELDS = {"label": LABEL, "subject": SUBJECT, "line": LINE, "drug": DRUG}
MODES = [
    {"groups": "label"},
    {"groups": "label", "drop_last": True},
    {"groups": "label", "pad": True},
    {"groups": "label", "proportions": "equal"},
    {"groups": "subject", "groups_per_batch": 1, "pad": True},
    {"groups": "subject", "groups_per_batch": 4},
    {"groups": ["line", "drug"], "controls": {"drug": "DMSO"}},
    {"groups": "drug", "controls": "DMSO", "groups_per_batch": 2},
]


@pytest.fixture
def path(tmp_path):
    images = np.arange(N, dtype=np.int32)[:, None].repeat(20, 1)
    return make_file(
        tmp_path / "a.h5",
        images=(images, {"chunks": (8, 20), "compression": "gzip"}),
        **{
            name: (values, {})
            for name, values in {"label": LABEL, "subject": SUBJECT, "line": LINE, "drug": DRUG}.items()
        },
    )


@pytest.fixture
def dataset(path):
    return ChunkDataset(path, fields=["images", "label"])


def batches_of(sampler) -> list[list[int]]:
    return [list(batch) for batch in sampler]


def test_stratified_batches_have_the_proportions_of_the_data_set(dataset):
    sampler = ChunkSampler(dataset, 20, groups="label", window_chunks=6)
    for _ in range(2):
        batches = batches_of(sampler)
        assert sorted(chain(*batches)) == list(range(N))
        for batch in batches:
            counts = np.bincount(LABEL[batch], minlength=5)
            assert (np.abs(counts - np.bincount(LABEL) * 20 / N) < 2).all()
    assert (
        len({tuple(sorted(batch)) for batch in batches} & {tuple(sorted(batch)) for batch in batches_of(sampler)}) == 0
    )
    plain = ChunkSampler(dataset, 20, window_chunks=6)
    worst = [max(abs(np.mean(LABEL[batch] == 0) - np.mean(LABEL == 0)) for batch in each) for each in (batches, plain)]
    assert worst[0] <= 0.05 < worst[1]


def test_stratified_batches_of_a_sorted_file():
    codes = np.repeat(np.arange(4), [1000, 500, 3000, 1500])
    options = {"names": [*range(4)], "batch_size": 20}
    selection = GroupSelection.of(codes, np.arange(6000) // 500, **options)
    counts = [np.bincount(codes[batch], minlength=4) for batch in
              GroupOrder(6000, 500, 20, 1, interleave=1, selection=selection).batches()]  # fmt: skip
    assert np.abs(np.array(counts) - np.bincount(codes) / 300).max() < 1.6
    exact = GroupSelection.of(codes, np.arange(6000) // 500, proportions=np.array([5.0, 5, 5, 5]), **options)
    for batch in GroupOrder(6000, 500, 20, 1, interleave=1, selection=exact).batches():
        assert np.bincount(codes[batch]).tolist() == [5, 5, 5, 5]


def test_given_proportions_repeat_rare_groups(dataset):
    shares = {0: 1, 1: 1, 2: 0, 3: 1, 4: 2}
    sampler = ChunkSampler(dataset, 20, groups="label", proportions=shares)
    batches = batches_of(sampler)
    assert len(batches) == N // 20
    for batch in batches:
        assert np.bincount(LABEL[batch], minlength=5).tolist() == [4, 4, 0, 4, 8]
    uses = Counter(chain(*batches))
    for label in (0, 1, 3, 4):
        own = [uses[number] for number in np.flatnonzero(label == LABEL).tolist()]
        assert max(own) - min(own) <= 1
    keys = list(chain(*sampler.order.keys(0)))
    assert len(set(keys)) == len(keys)  # random transforms differ between repeats


def test_batches_of_one_group(dataset):
    sampler = ChunkSampler(dataset, 6, groups="subject", groups_per_batch=1)
    batches = batches_of(sampler)
    assert all(len(set(SUBJECT[batch])) == 1 and len(set(batch)) == 6 for batch in batches)
    assert len(batches) == 20 * (15 // 6) and len(set(chain(*batches))) == len(batches) * 6
    report = sampler.report()
    assert report.effective_batch == pytest.approx(1) and report.left_out == 20 * 3 and report.chunk_reads >= 1
    assert "40 batches of 6 (1 group x 6); an epoch leaves out 60 samples" in repr(sampler)
    first, second = (set(range(N)) - set(chain(*each)) for each in (batches, batches_of(sampler)))
    assert first != second  # other samples are left out
    padded = batches_of(ChunkSampler(dataset, 6, groups="subject", groups_per_batch=1, pad=True))
    assert {*chain(*padded)} == {*range(N)} and len(padded) == 20 * 3


def test_several_groups_with_as_many_samples_each(dataset):
    batches = batches_of(ChunkSampler(dataset, 20, groups=SUBJECT, groups_per_batch=4))
    pairs = Counter()
    for batch in batches:
        subjects = SUBJECT[batch].reshape(4, 5)  # the samples of a group follow each other
        assert (subjects == subjects[:, :1]).all() and len(set(subjects[:, 0])) == 4
        pairs.update((a, b) for a in subjects[:, 0].tolist() for b in subjects[:, 0].tolist() if a < b)
    assert sorted(chain(*batches)) == list(range(N))
    assert max(pairs.values()) <= 3  # of 15 * 6 pairs among 190


def test_sets_with_matched_controls(dataset):
    sampler = ChunkSampler(dataset, 24, groups=["line", "drug"], controls={"drug": "DMSO"}, groups_per_batch=2)
    batches = batches_of(sampler)
    for batch in batches:
        treated, controls = np.array(batch).reshape(2, 2, 6).transpose(1, 0, 2)
        assert (LINE[treated] == LINE[controls]).all() and (LINE[treated] == LINE[treated][:, :1]).all()
        assert (DRUG[controls] == b"DMSO").all() and (DRUG[treated] == DRUG[treated][:, :1]).all()
        assert (DRUG[treated] != b"DMSO").all() and len({*map(tuple, controls.tolist())}) == 2
        assert all(len(set(own)) == 6 for own in controls.tolist())
    uses = Counter(chain(*batches))
    assert all(uses[number] <= 1 for number in np.flatnonzero(DRUG != b"DMSO").tolist())
    by_value = ChunkSampler(dataset, 24, groups="drug", controls={"x": "DMSO", "y": "DMSO"}, groups_per_batch=2)
    assert batches_of(by_value) == batches_of(
        ChunkSampler(dataset, 24, groups="drug", controls="DMSO", groups_per_batch=2)
    )
    assert len(set(SUBJECT)) == 20


def first_numbers(loader) -> list[list[int]]:
    """The samples of each batch of a loader."""
    return [images[:, 0].tolist() for images, _ in loader]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_everyone_reads_the_same_order(dataset, mode):
    def sampler_of(data):
        return ChunkSampler(data, 12, seed=3, window_chunks=4, num_workers=0, **mode)

    for data in (dataset, dataset.where("label < 4")):
        sampler = sampler_of(data)
        epochs = [[data.samples[batch].tolist() for batch in sampler] for _ in range(2)]
        assert epochs[0] != epochs[1] and len(sampler) == len(epochs[0])
        for options in ({}, {"resident": True}, {"reuse": True}, {"num_threads": 1}):
            with ChunkLoader(data, batch_sampler=sampler_of(data), **options) as loader:
                assert [first_numbers(loader), first_numbers(loader)] == epochs
                assert ("12" in repr(loader)) and len(loader) == len(epochs[0])
        for start in (1, len(epochs[0]) - 1):
            begun, resumed = sampler_of(data), sampler_of(data)
            assert len([batch for batch, _ in zip(begun, range(start), strict=False)]) == start
            resumed.load_state_dict(begun.state_dict(start))
            with ChunkLoader(data, batch_sampler=resumed) as loader:
                assert [first_numbers(loader), first_numbers(loader)] == [epochs[0][start:], epochs[1]]


@pytest.mark.parametrize("mode", [MODES[0], MODES[5]], ids=str)
def test_workers_do_not_change_the_order(dataset, mode):
    batches = [
        first_numbers(
            DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 12, num_workers=2, **mode), num_workers=n)
        )
        for n in (0, 2)
    ]
    assert batches[0] == batches[1] == batches_of(ChunkSampler(dataset, 12, num_workers=2, **mode))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_ranks_have_as_many_batches_of_other_samples(dataset, mode):
    ranks = [
        ChunkSampler(dataset, 12, rank=rank, world_size=3, window_chunks=2, num_workers=2, **mode) for rank in range(3)
    ]
    batches = [batches_of(rank) for rank in ranks]
    assert {len(own) for own in batches} == {len(ranks[0])} and len(ranks[0]) > 1
    if mode.get("groups") != "label" or "drop_last" in mode or "pad" in mode:
        assert {len(batch) for batch in chain(*batches)} == {12}
    uses = Counter(chain(*chain(*batches)))
    assert "proportions" in mode or "pad" in mode or all(uses[n] <= 1 for n in np.flatnonzero(DRUG != b"DMSO").tolist())
    if mode == MODES[0]:
        assert sorted(uses.elements()) == list(range(N))


def test_an_empty_last_batch_warns(dataset):
    part = dataset.subset(range(12 * 3 * 2 + 2))
    with pytest.warns(UserWarning, match="the last batch of each epoch is empty on 1 of 3 ranks: pass drop_last=True"):
        ChunkSampler(part, 12, groups="label", rank=0, world_size=3)
    for last in ("pad", "drop_last"):
        ranks = [ChunkSampler(part, 12, groups="label", rank=rank, world_size=3, **{last: True}) for rank in range(3)]
        assert {len(batch) for batch in chain(*map(batches_of, ranks))} == {12}


def test_a_state_of_other_groups_is_refused(dataset):
    state = ChunkSampler(dataset, 12, groups="subject", groups_per_batch=1).state_dict(3)
    for other in ({"groups": "label", "groups_per_batch": 1}, {"groups": "subject", "groups_per_batch": 2}, {}):
        with pytest.raises(StateError, match=r"use the same|pass"):
            ChunkSampler(dataset, 12, **other).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": "subject", "groups_per_batch": 1, "batch_size": 16}, "group 0 has 15 samples, but .* 16.*pad="),
        ({"groups": "subject", "groups_per_batch": 7}, "not a multiple of the 7 groups"),
        ({"groups": "subject", "groups_per_batch": 24, "batch_size": 24}, "there are 20 groups: pass at most 20"),
        ({"groups": "nothing"}, "no dataset 'nothing'"),
        ({"groups": "images"}, "one value per sample"),
        ({"groups": [1, 2]}, "int64 of shape .2,.: pass the name of a field"),
        ({"groups_per_batch": 2}, "groups_per_batch needs groups"),
        ({"groups": "label", "weights": "label"}, "weights and groups exclude"),
        ({"groups": "label", "batch_elements": 9}, "batch_elements and groups exclude"),
        ({"groups": "label", "locality": 1}, "locality and groups exclude"),
        ({"groups": "label", "lanes": 2}, "lanes and groups exclude"),
        ({"groups": "label", "proportions": {0: 1}}, "proportions lacks the group 1: add it, with 0"),
        ({"groups": "label", "proportions": {9: 1}}, "has 9, but the groups are 0, 1, 2, 3, 4"),
        ({"groups": "label", "proportions": dict.fromkeys(range(5), 0)}, "one above 0"),
        ({"groups": "label", "proportions": "equal", "groups_per_batch": 2}, "exclude each other"),
        ({"groups": "drug", "controls": "water"}, "are 'water', which has no samples; the groups are DMSO, x, y"),
        ({"groups": "drug", "controls": {"x": "DMSO"}}, "controls lacks the group 'y'"),
        ({"groups": "drug", "controls": {"x": "DMSO", "y": "x"}}, "'x' is a control group, but also has controls"),
        ({"groups": ["line", "drug"], "controls": {"label": 1}}, "name one of these fields"),
        ({"groups": ["line", "drug"], "controls": "DMSO"}, "pass a mapping"),
        ({"groups": "label", "drop_last": True, "pad": True}, "exclude each other"),
        ({"groups": "subject", "groups_per_batch": 1, "world_size": 99, "rank": 0}, "do not suffice for a batch"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_name_the_remedy(dataset, options, message):
    with pytest.raises((OptionError, h5chunk.FieldError), match=message):
        ChunkSampler(dataset, **{"batch_size": 12, **options})


def test_groups_are_read_in_parts(dataset, monkeypatch):
    expected = [batches_of(ChunkSampler(dataset, 12, **mode)) for mode in MODES]
    monkeypatch.setattr(h5chunk.feed.filter, "PART_SAMPLES", 7)
    assert [batches_of(ChunkSampler(dataset, 12, **mode)) for mode in MODES] == expected
    assert expected[0] == batches_of(ChunkSampler(dataset, 12, groups=LABEL))
    assert expected[7] == batches_of(ChunkSampler(dataset, 12, **{**MODES[7], "groups": DRUG.astype(str)}))


def test_missing_groups_and_echoes_are_refused(tmp_path, dataset):
    with pytest.raises(OptionError, match="by group are not repeated"):
        ChunkLoader(dataset, batch_sampler=ChunkSampler(dataset, 12, groups="label"), echo=2)
    make_file(tmp_path / "b.h5", images=(np.zeros((4, 9)), {}), dose=(np.array([1, np.nan, 2, 2]), {}))
    doses = ChunkDataset(tmp_path / "b.h5")
    with pytest.raises(OptionError, match=r"no value for sample 1: .*dose == dose"):
        ChunkSampler(doses, 2, groups="dose")
    assert len(ChunkSampler(doses.where("dose == dose"), 2, groups="dose")) == 2


def test_other_kinds_of_samples(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(8):
            group = file.create_group(f"s{number}")
            group["data"] = np.full((9, 9), number)
            group.attrs["site"] = f"site{number % 2}"
    with object_server() as server:
        server.objects["/a.h5"] = (tmp_path / "a.h5").read_bytes()
        for path in (tmp_path / "a.h5", f"{server.url}/a.h5"):
            for dataset, groups in {
                h5chunk.Keyed(path, "*/data", attributes=["site"]): "site",
                h5chunk.Windows(path, {"x": "*/data"}, 3, attributes=["site"]): "source_name",
                h5chunk.Windows(path, {"x": "*/data"}, 3): "source_name",
                h5chunk.Patches(path, {"x": "*/data"}, (4, 4), per_volume=5): "source_name",
            }.items():
                data = ChunkDataset.with_transforms(dataset, None)
                names = dataset.values(groups) if groups == "site" else dataset.source_names
                sampler = ChunkSampler(data, 4, groups=groups, groups_per_batch=2)
                expected = batches_of(sampler)
                assert expected and all(len(set(names[batch])) == 2 for batch in expected)
                own = [each for each in dataset.fields if each != "site"]
                if len(own) < len(dataset.fields):
                    continue  # strings cannot be in a ChunkLoader
                with ChunkLoader(
                    data, batch_sampler=ChunkSampler(data, 4, groups=groups, groups_per_batch=2)
                ) as loader:
                    for (images,), batch in zip(loader, expected, strict=True):
                        assert [f"s{int(image.flatten()[0])}" for image in images] == [
                            name.rpartition(" ")[2] for name in names[batch]
                        ]


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=120),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_any_groups(codes, chunk, num_sets, set_samples, ranks, window, interleave, pad, shuffle, epoch):
    names, codes = np.unique(codes, return_inverse=True)
    chunks = np.arange(len(codes)) // chunk
    for per_batch, controls in ((None, None), (num_sets, None), (num_sets, np.zeros(len(names), np.int64))):
        each_set = set_samples * (1 if controls is None else 2)
        size = num_sets * each_set
        options = {"names": names.tolist(), "batch_size": size, "world_size": ranks, "pad": pad}
        try:
            selection = GroupSelection.of(codes, chunks, groups_per_batch=per_batch, controls=controls, **options)
        except OptionError:
            continue
        orders = [
            GroupOrder(len(selection), chunk, size, window, interleave=interleave, seed=1, epoch=epoch, shuffle=shuffle,
                       lanes=ranks, rank=rank, world_size=ranks, selection=selection)
            for rank in range(ranks)
        ]  # fmt: skip
        keys = [[own.tolist() for own in order.keys(0)] for order in orders]
        drawn = list(chain(*chain(*keys)))
        assert len(set(drawn)) == len(drawn) == len(selection)
        assert {len(own) for own in keys} == {orders[0].num_batches}
        assert not shuffle or sorted(key % REPEAT for key in drawn) == selection.resolve(1, epoch).samples.tolist()
        assert (np.bincount([key % REPEAT for key in drawn], minlength=len(codes)) <= selection.max_draws).all()
        for order, own in zip(orders, keys, strict=True):
            start = len(own) // 2
            assert [each.tolist() for each in order.keys(start)] == own[start:]
            for joined in order.windows(start):
                assert (joined.samples[joined.destinations] == joined.rows).all()
        numbers = np.array(drawn) % REPEAT
        if per_batch is None:
            shares = np.bincount(numbers, minlength=len(codes)) @ np.eye(len(names))[codes] / len(numbers)
            for batch in chain(*keys):
                counts = np.bincount(codes[np.array(batch, np.int64) % REPEAT], minlength=len(names))
                assert len(batch) < size or (np.abs(counts - shares * size) < 2).all()
            assert pad or sorted(drawn) == list(range(len(codes)))
            continue
        sets = numbers.reshape(-1, num_sets, each_set)
        own, matched = sets[:, :, :set_samples], sets[:, :, set_samples:]
        assert (codes[own] == codes[own][:, :, :1]).all() and (codes[matched] == 0).all()
        assert all(len(set(batch)) == num_sets for batch in codes[own][:, :, 0].tolist())
        assert pad or len(np.unique(own)) == own.size
        assert pad or all(len(set(each)) == len(each) for each in chain(*matched.tolist()))
