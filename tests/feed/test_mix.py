"""Mixtures of data sets: proportions, the length of an epoch, resuming, and the kinds of members."""

from __future__ import annotations

import textwrap
from collections import Counter
from itertools import chain

import h5py
import numpy as np
import pytest
import torch
from support.foreign import make_file
from torch.utils.data import DataLoader

import h5chunk
from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler, FieldError, Mix, OptionError, StateError

SIZES = {"a": 300, "b": 60, "c": 31}
STARTS = dict(zip(SIZES, (0, 300, 360), strict=True))


@pytest.fixture
def paths(tmp_path):
    found = {}
    for number, (name, size) in enumerate(SIZES.items()):
        images = (STARTS[name] + np.arange(size, dtype=np.int32))[:, None].repeat(20, 1)
        found[name] = make_file(
            tmp_path / f"{name}.h5",
            images=(images, {"chunks": (7 + number, 20), "compression": "gzip"}),
            labels=(np.arange(size) % 4, {}),
            other=(np.arange(size) * 10, {}),
        )
    return found


@pytest.fixture
def members(paths):
    return {name: ChunkDataset(path) for name, path in paths.items()}


def batches_of(sampler) -> list[list[int]]:
    return [list(batch) for batch in sampler]


def first_numbers(loader) -> list[list[int]]:
    return [batch[0][:, 0].tolist() for batch in loader]


def codes_of(mix, batch) -> list[int]:
    return np.bincount(mix.values("member")[batch], minlength=len(mix.members)).tolist()


def uses_of(mix, batches, name) -> list[int]:
    uses = Counter(chain(*batches))
    code = mix.members.index(name)
    return [uses[number] for number in np.flatnonzero(mix.values("member") == code).tolist()]


def test_the_example_of_the_docstring(tmp_path, monkeypatch):
    """A path is opened with the fields of the mixture."""
    monkeypatch.chdir(tmp_path)
    for name, stars in (("web.h5", 0), ("code.h5", 20)):
        make_file(tmp_path / name, tokens=(np.full((300, 4), stars), {}), stars=(np.full(300, stars), {}))
    lines = (Mix.__doc__ or "").partition("::\n\n")[2].partition("\n    `ChunkLoader`")[0]
    names = {"h5chunk": h5chunk}
    exec(textwrap.dedent(lines), names)
    assert names["mix"].fields == ("tokens", "member") and torch.equal(names["tokens"][:, 0], 20 * names["member"])


def test_default_proportions_are_the_numbers_of_samples(members):
    mix = Mix(members, fields=["images", "labels", "member", "sample_number"])
    assert mix.members == ("a", "b", "c") and mix.fields == ("images", "labels", "member", "sample_number")
    assert mix.proportions == pytest.approx({name: size / 391 for name, size in SIZES.items()})
    sampler = ChunkSampler(mix, 39, window_chunks=5)
    batches = batches_of(sampler)
    assert sorted(chain(*batches)) == list(range(391)) and len(batches) == len(sampler) == 11
    for batch in batches[:-1]:
        assert (np.abs(np.array(codes_of(mix, batch)) - [29.92, 5.98, 3.09]) < 2).all()
    with ChunkLoader(mix, batch_sampler=ChunkSampler(mix, 39, window_chunks=5)) as loader:
        for (images, labels, member, numbers), batch in zip(loader, batches, strict=True):
            assert images[:, 0].tolist() == numbers.tolist() == batch
            assert np.bincount(member, minlength=3).tolist() == codes_of(mix, batch)
            assert labels.tolist() == mix.values("labels")[batch].tolist()
    assert "a 76.7%, b 15.3%, c 7.9% in each batch; an epoch is the longest member" in repr(mix)
    assert sampler.report().left_out == 0


def test_temperature(members):
    assert Mix(members, temperature=1).proportions == Mix(members).proportions
    roots = np.sqrt([*SIZES.values()])
    assert [*Mix(members, temperature=2).proportions.values()] == pytest.approx((roots / roots.sum()).tolist())
    assert [*Mix(members, temperature=1e9).proportions.values()] == pytest.approx([1 / 3] * 3)
    mix = Mix(members, weights={"a": 9, "b": 4, "c": 0}, temperature=2)
    assert mix.proportions == pytest.approx({"a": 0.6, "b": 0.4, "c": 0})
    assert all(codes_of(mix, batch) == [12, 8, 0] for batch in ChunkSampler(mix, 20, drop_last=True))


EQUAL = {"a": 1, "b": 1, "c": 1}


def test_the_longest_member_is_used_once_and_others_in_passes(members):
    mix = Mix(members, weights=EQUAL)
    sampler = ChunkSampler(mix, 30, window_chunks=4)
    for _ in range(2):
        batches = batches_of(sampler)
        assert len(batches) == 30 and all(codes_of(mix, batch) == [10, 10, 10] for batch in batches)
        assert set(uses_of(mix, batches, "a")) == {1} and set(uses_of(mix, batches, "b")) == {5}
        assert set(uses_of(mix, batches, "c")) == {9, 10}
        assert all(len(set(batch)) == 30 for batch in batches)
    keys = list(chain(*sampler.order.keys(0)))
    assert len(set(keys)) == len(keys)  # random transforms differ between repeats
    in_order = [number for number in chain(*batches) if 300 <= number < 360]
    gaps = [np.diff(np.flatnonzero(np.array(in_order) == number)).min() for number in range(300, 360)]
    assert min(gaps) > 12  # windows shuffle, but passes follow each other


def test_the_shortest_member_ends_an_epoch(members):
    mix = Mix(members, weights={"a": 2, "b": 1, "c": 1}, epoch="shortest")
    sampler = ChunkSampler(mix, 12)
    first, second = (batches_of(sampler) for _ in range(2))
    for batches in (first, second):
        assert [sum(uses_of(mix, batches, name)) for name in "abc"] == [62, 31, 31]
        assert max(Counter(chain(*batches)).values()) == 1
        assert all(codes_of(mix, batch) == [6, 3, 3] for batch in batches[:-1])
    assert {*chain(*first)} != {*chain(*second)}


def test_an_epoch_of_a_number_of_batches(members):
    mix = Mix(members, weights={"a": 1, "b": 2, "c": 1}, epoch=7)
    for ranks in (1, 2):
        samplers = [ChunkSampler(mix, 20, rank=rank, world_size=ranks) for rank in range(ranks)]
        batches = [batches_of(sampler) for sampler in samplers]
        assert [len(own) for own in batches] == [7] * ranks
        assert all(codes_of(mix, batch) == [5, 10, 5] for batch in chain(*batches))
        for name in "abc":
            uses = uses_of(mix, chain(*batches), name)
            assert max(uses) - min(uses) <= 1


def test_ranks_share_an_epoch(members):
    mix = Mix(members, weights={"a": 2, "b": 1, "c": 1})
    batches = [batches_of(ChunkSampler(mix, 8, rank=rank, world_size=2, window_chunks=2)) for rank in range(2)]
    assert len(batches[0]) == len(batches[1]) == -(-600 // 16)
    assert set(uses_of(mix, chain(*batches), "a")) == {1}
    assert all(codes_of(mix, batch) == [4, 2, 2] for batch in chain(*(own[:-1] for own in batches)))


WAYS = [{}, {"weights": EQUAL}, {"weights": EQUAL, "epoch": "shortest"}, {"temperature": 3, "epoch": 9}]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_everyone_reads_the_same_order(members, options):
    mix = Mix(members, **options)
    for data in (mix, mix.where("other % 30 != 0 and labels < 3"), mix.split([0.5, 0.3])[1]):
        texts = data.values("other") // 10 + np.array([*STARTS.values()])[data.values("member")]
        sampler = ChunkSampler(data, 12, seed=3, window_chunks=4, num_workers=0)
        epochs = [[texts[batch].tolist() for batch in sampler] for _ in range(2)]
        assert epochs[0] != epochs[1]
        for how in ({}, {"resident": True}, {"reuse": True}):
            begun = ChunkSampler(data, 12, seed=3, window_chunks=4, num_workers=0)
            with ChunkLoader(data, batch_sampler=begun, **how) as loader:
                assert [first_numbers(loader), first_numbers(loader)] == epochs
        for workers in (0, 2) if data is mix else ():
            own, again = (ChunkSampler(data, 12, seed=3, window_chunks=4, num_workers=workers) for _ in range(2))
            numbers = first_numbers(DataLoader(data, batch_sampler=own, num_workers=workers))
            assert numbers == [texts[batch].tolist() for batch in again]
        start = len(epochs[0]) // 2
        resumed = ChunkSampler(data, 12, seed=3, window_chunks=4, num_workers=0)
        resumed.load_state_dict(sampler.state_dict() | {"epoch": 0, "batch": start})
        with ChunkLoader(data, batch_sampler=resumed) as loader:
            assert [first_numbers(loader), first_numbers(loader)] == [epochs[0][start:], epochs[1]]


@pytest.mark.parametrize("resident", [False, True])
def test_proportions_change_between_epochs_and_are_in_the_state(members, resident):
    mix = Mix(members, epoch=6)
    with ChunkLoader(mix, 20, seed=1, resident=resident) as loader:
        first = first_numbers(loader)
        loader.batch_sampler.set_proportions({"a": 0, "b": 3, "c": 1})
        second = first_numbers(loader)
        loader.batch_sampler.set_proportions("equal")
        batches = iter(loader)
        third = [next(batches)[0][:, 0].tolist() for _ in range(4)]
        state = loader.state_dict()
        with pytest.raises(OptionError, match="batch 4 of 6 of an epoch is running"):
            loader.batch_sampler.set_proportions("equal")
        third += [images[:, 0].tolist() for images, _ in batches]
        fourth = first_numbers(loader)
    sampler = ChunkSampler(mix, 20, seed=1)
    assert len([next(batches) for batches in [iter(sampler)] for _ in range(6)]) == 6  # but not the end
    sampler.set_proportions("equal")
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["batch"]) == (1, 0)
    assert codes_of(mix, first[0])[0] >= 15
    assert [codes_of(mix, batch) for batch in second] == [[0, 15, 5]] * 6
    assert all(max(codes_of(mix, batch)) == 7 for batch in third)
    for resumed in (ChunkLoader(mix, 20, seed=1, resident=resident), ChunkSampler(mix, 20, seed=1)):
        resumed.load_state_dict(state)
        read = batches_of if isinstance(resumed, ChunkSampler) else first_numbers
        assert [read(resumed), read(resumed)] == [third[4:], fourth]
        own = resumed.state_dict()
        with pytest.raises(StateError, match="other samples, weights or groups"):
            resumed.load_state_dict(state | {"proportions": [1.0, 2.0, 3.0]})
        for wrong in ([1.0, 2.0], [-1, 2, 3], ["a", "b", "c"], "equal"):
            with pytest.raises(StateError, match=r"state cannot be resumed|other samples, weights or groups"):
                resumed.load_state_dict(state | {"proportions": wrong, "file": 0})
        assert resumed.state_dict() == own
        if isinstance(resumed, ChunkLoader):
            resumed.close()


def test_memory_is_planned_anew_for_longer_samples(tmp_path):
    for name, length in {"short": 1, "long": 50}.items():
        make_file(tmp_path / f"{name}.h5", tokens=(np.full(40 * length, length), {}), n=(np.full(40, length), {}))
    options = {"fields": ["tokens"], "lengths": {"tokens": "n"}}
    members = {name: ChunkDataset(tmp_path / f"{name}.h5", **options) for name in ("short", "long")}
    for how in ({}, {"reuse": True}):
        with ChunkLoader(Mix(members, weights={"short": 1, "long": 0}, epoch=5), 8, **how) as loader:
            for length in (1, 50, 1):
                assert [{*lengths.tolist()} for ((_, lengths),) in loader] == [{length}] * 5
                assert all((tokens == length).all() for ((tokens, _),) in loader)
                loader.batch_sampler.set_proportions({"short": length > 1, "long": length == 1})


def test_the_sampler_overrides_proportions(members):
    mix = Mix(members)
    sampler = ChunkSampler(mix, 10, proportions={"a": 1, "b": 4, "c": 0}, drop_last=True)
    assert {tuple(codes_of(mix, batch)) for batch in sampler} == {(2, 8, 0)}
    by_label = ChunkSampler(mix, 20, groups="labels", proportions="equal")
    assert all(np.ptp(np.bincount(mix.values("labels")[batch])) <= 2 for batch in batches_of(by_label)[:-1])
    by_name = ChunkSampler(mix, 10, groups="member", proportions={"a": 1, "b": 1, "c": 0})
    assert all(codes_of(mix, batch)[2] == 0 for batch in by_name)


def test_tables_and_subsets(members, paths):
    mix = Mix({**members, "again": members["b"].where("labels == 1")})
    assert len(mix) == 391 + 15 and mix.categories("member").tolist() == ["a", "b", "c", "again"]
    assert mix.values("other").tolist() == [
        *range(0, 3000, 10),
        *range(0, 600, 10),
        *range(0, 310, 10),
        *range(10, 600, 40),
    ]
    assert mix[400][0][0] == 300 + 1 + 4 * 9
    part = mix.where("member == 'again' or member == 'c'")
    assert len(part) == 46 and part.proportions == pytest.approx({"a": 0, "b": 0, "c": 31 / 46, "again": 15 / 46})
    assert sorted(chain(*ChunkSampler(part, 8))) == list(range(46))
    with pytest.raises(OptionError, match="proportions has member 'a', which has no samples"):
        ChunkSampler(part, 8, proportions="equal")
    none = Mix(members, weights={"a": 1, "b": 0, "c": 0}).where("member == 'b'")
    assert none.proportions == dict.fromkeys("abc", 0) and "b 0.0%" in repr(none)
    with pytest.raises(OptionError, match="all members that have a weight above 0 have no samples"):
        ChunkSampler(none, 8)
    with pytest.raises(FieldError, match="--stats"):
        mix.statistics("images")
    parts = Mix(paths, weights=EQUAL).split([0.5, 0.5], seed=4, stratify="labels")
    assert [len(part.where(f"member == {name!r}")) for part in parts for name in "abc"] == [150, 30, 16, 150, 30, 15]
    numbers = [each.values("other") + each.values("member") for each in parts]
    assert len({*numbers[0].tolist()} & {*numbers[1].tolist()}) == 0
    assert all(each.proportions == pytest.approx(dict.fromkeys("abc", 1 / 3)) for each in parts)


def test_samples_as_dicts_and_transforms(members):
    mix = Mix(
        members,
        transforms={"images": h5chunk.transforms.ToDtype(torch.float32)},
        as_dict=True,
        fields=["member", "labels", "images"],
    )
    with ChunkLoader(mix, 30) as loader:
        batch = next(iter(loader))
    assert [*batch] == ["member", "labels", "images"] and str(batch["images"].dtype) == "torch.float32"
    assert mix[350]["member"] == 1


@pytest.fixture
def traces(tmp_path):
    found = []
    for site in range(2):
        with h5py.File(tmp_path / f"traces{site}.h5", "w") as file:
            for number in range(6 + site):
                group = file.create_group(f"s{number}")
                group["data"] = 100 * site + 10 * number + np.arange(9)
                group.attrs["name"] = f"s{'x' * site}{number}"
        found.append(tmp_path / f"traces{site}.h5")
    return found


def test_keyed_members(traces):
    mix = Mix({str(site): h5chunk.Keyed(path, "*/data", attributes=["name"]) for site, path in enumerate(traces)})
    assert mix.values("name").tolist() == [*(f"s{n}" for n in range(6)), *(f"sx{n}" for n in range(7))]
    assert mix.source_names.tolist() == [*(f"s{n}" for n in range(6)), *(f"s{n}" for n in range(7))]
    loader = DataLoader(mix, batch_sampler=ChunkSampler(mix, 4), collate_fn=h5chunk.collate)
    rows = sorted((int(row[0]), name) for data, names in loader for row, name in zip(data, names, strict=True))
    assert rows == [(10 * n, f"s{n}") for n in range(6)] + [(100 + 10 * n, f"sx{n}") for n in range(7)]


@pytest.mark.parametrize("options", [{}, {"padding": "edge"}, {"goal": "future"}], ids=str)
def test_members_that_are_windows(traces, options):
    parts = {str(site): h5chunk.Windows(path, {"x": "*/data"}, 3, **options) for site, path in enumerate(traces)}
    mix = Mix(parts, weights={"0": 1, "1": 1})
    sampler = ChunkSampler(mix, 6)
    expected = batches_of(sampler)
    assert all(codes_of(mix, batch) == [3, 3] for batch in expected[:-1])
    number = 0
    with ChunkLoader(mix, batch_sampler=ChunkSampler(mix, 6)) as loader:
        for batch, numbers in zip(loader, expected, strict=True):
            for x, sample in zip(batch[0], numbers, strict=True):
                site = int(sample >= len(parts["0"]))
                own = parts[str(site)][sample - site * len(parts["0"])]
                assert x.tolist() == own[0].tolist() and int(x[0]) // 100 == site
                number += 1
    assert number == 2 * max(map(len, parts.values()))
    train, test = mix.split([0.5, 0.5])
    episodes = [
        {(int(code), name) for code, name in zip(each.values("member"), each.source_names, strict=True)}
        for each in (train, test)
    ]
    assert episodes[0].isdisjoint(episodes[1]) and len(episodes[0] | episodes[1]) == 13
    assert all({code for code, _ in each} == {0, 1} for each in episodes)


def test_errors_name_the_remedy(members, paths, traces, tmp_path):
    make_file(tmp_path / "d.h5", images=(np.zeros((9, 21), np.int32), {}), labels=(np.zeros(9, int), {}))
    make_file(tmp_path / "e.h5", images=(np.zeros((9, 20), np.int32), {}), member=(np.zeros(9, int), {}))
    keyed = h5chunk.Keyed(traces[0], {"images": "*/data"})
    patches = h5chunk.Patches(traces[0], {"images": "*/data"}, (3,), per_volume=2)
    windows = [h5chunk.Windows(traces[0], {"images": "*/data"}, length) for length in (2, 3)]
    images = ChunkDataset(paths["a"], fields=["images"])
    make_file(tmp_path / "f.h5", labels=(np.zeros(300, int), {}), other=(np.arange(300)[::-1] * 10, {}))
    by_key = ChunkDataset({"images": paths["a"], "labels": tmp_path / "f.h5"}, key="other")
    apart, together = (
        ChunkDataset({"images": paths["a"], "labels": tmp_path / "f.h5", "other": where})
        for where in (paths["a"], tmp_path / "f.h5")
    )
    joined = ChunkDataset({"images": paths["a"], "labels": tmp_path / "f.h5"})
    for wrong, options, message in [
        ([], {}, "pass a mapping of names"),
        ({}, {}, "pass a mapping of names"),
        ({**members, "d": tmp_path / "d.h5"}, {}, "d.h5: field 'images' has the sample shape"),
        ({**members, "d": images}, {}, "member 'd' has the fields images, but member 'a' has images, labels"),
        ({"a": ChunkDataset(tmp_path / "e.h5", fields=["images", "member"])}, {}, "rename it"),
        ({"a": Mix(members)}, {}, "member 'a' is a Mix itself"),
        ({"a": members["a"].with_transforms([h5chunk.transforms.ToDtype(torch.float32)])}, {}, "'a' has transforms"),
        ({"a": members["a"].subset([])}, {}, "member 'a' has no samples"),
        ({"a": images, "k": keyed}, {}, "'k' has samples that are datasets, but member 'a' has rows of datasets"),
        ({"a": images, "k": patches}, {}, "member 'k' has patches, files that are joined by a key"),
        ({"a": by_key, "b": members["b"]}, {}, "member 'a' has patches, files that are joined by a key"),
        ({"a": joined, "b": members["b"]}, {}, "'b' has rows of datasets, but member 'a' has fields in different"),
        ({"a": apart, "b": together}, {}, r"has the fields .*'labels', 'other'.* in its files, but"),
        (dict(zip("ab", windows, strict=True)), {}, "the time steps of the frames are"),
        (members, {"weights": {"a": 1}}, "weights lacks the member 'b'"),
        (members, {"weights": dict.fromkeys("abcd", 1)}, "weights has 'd', but the members are a, b, c"),
        (members, {"weights": {"a": 1, "b": -1, "c": 1}}, "0 or more"),
        (members, {"temperature": 0}, "temperature is 0: pass a number above 0"),
        (members, {"epoch": "all"}, "epoch is 'all': pass 'longest', 'shortest' or"),
        (members, {"epoch": 0}, "epoch is 0: pass"),
        (members, {"fields": ["images"]}, "fields lacks 'labels'"),
        (members, {"fields": ["images", "labels", "depth"]}, "fields has 'depth'"),
    ]:  # fmt: skip
        with pytest.raises((OptionError, FieldError), match=message):
            Mix(wrong, **options)
    for options, message in [
        ({"weights": "labels"}, "weights and batches of a Mix exclude each other"),
        ({"lanes": 2}, "lanes and batches of a Mix"),
        ({"groups_per_batch": 2}, "groups_per_batch needs groups"),
        ({"proportions": {"a": 1}}, "proportions lacks the member 'b'"),
    ]:
        with pytest.raises(OptionError, match=message):
            ChunkSampler(Mix(members), 12, **options)
    with pytest.raises(OptionError, match="pass fewer batches as epoch, or more equal weights"):
        ChunkSampler(Mix(members, weights={"a": 1e-9, "b": 1, "c": 1}), 12)
    with pytest.raises(OptionError, match="this sampler has no proportions"):
        ChunkSampler(members["a"], 12).set_proportions("equal")
    with pytest.raises(OptionError, match="by group are not repeated"):
        ChunkLoader(Mix(members), 12, echo=2)


def test_classes_must_mean_the_same(tmp_path):
    for name, classes in {"a": "xy", "b": "xz"}.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for each in classes:
                file[f"{each}/0/data"] = np.arange(3)
    parts = {name: h5chunk.Keyed(tmp_path / f"{name}.h5", "*/*/data", labels={"label": 0}) for name in "ab"}
    with pytest.raises(FieldError, match="'label' has other classes than in member 'a'"):
        Mix(parts)
    assert Mix({"a": parts["a"], "again": parts["a"]}).classes == ("x", "y")
