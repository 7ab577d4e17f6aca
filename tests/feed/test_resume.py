"""A state that was saved after any batch goes on with the next one: any reader, workers, number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.foreign import make_file, values
from support.leftovers import nothing_is_left
from support.loader_files import IMAGES, LABELS, N, path
from support.loaders import loader_by
from support.matrices import random_matrix, write
from support.orders import ordered
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.errors import OptionError, StateError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler

__all__ = ["nothing_is_left", "path"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # fewer cores than workers
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's
]

ORDER = {"window_chunks": 6, "seed": 3}
NUM_BATCHES = -(-N // 16)

Batches = list[list[int]]
Resumable = Any  # what can be iterated, saved and loaded


def through_json(state: Any) -> Any:
    assert len(json.dumps(state)) < 400
    return json.loads(json.dumps(state))


def labels_of(batches: Iterator[Any]) -> Batches:
    """Numbers of the samples, whether a batch is these or has them as its labels."""
    return [batch if all(type(each) is int for each in batch) else batch[-1].tolist() for batch in batches]


def check_resume(make: Callable[[], Resumable], *, cuts: Any = None, other: Callable[[], Resumable] | None = None):
    """Cut an epoch, go on in another process, as it were: together it is what an uninterrupted run gives."""
    whole = make()
    epochs = [labels_of(iter(whole)) for _ in range(3)]
    num_batches = len(epochs[0])
    assert len({str(epoch) for epoch in epochs}) == 3
    for epoch, cut in cuts or [(epoch, cut) for epoch in (0, 1) for cut in range(num_batches + 1)]:
        first = make()
        for _ in range(epoch):
            list(first)
        batches = iter(first)
        seen = labels_of(islice(batches, cut))
        state = through_json(first.state_dict())
        del batches
        second = (other or make)()
        second.load_state_dict(state)
        assert through_json(second.state_dict()) == state
        rest = labels_of(iter(second))
        assert (rest, seen + rest) == (epochs[epoch][cut:], epochs[epoch])
        assert labels_of(iter(second)) == epochs[epoch + 1]


# Every cut


@pytest.mark.parametrize(
    "options",
    [{}, {"drop_last": True}, {"pad": True}, {"lanes": 4}, {"shuffle": False, "window_chunks": None}],
    ids=str,
)
def test_a_sampler_resumes_at_every_batch(path, options):
    if options.get("shuffle") is False:  # all epochs are alike
        options = {**options, "shuffle": True, "window_chunks": 1}
    check_resume(lambda: sampler_of(path, **options))


LOADERS = {  # options of the order, and of the loader
    "direct": ({}, {"reader": "direct"}),
    "h5py": ({}, {"reader": "h5py"}),
    "reuse": ({}, {"reuse": True}),
    "resident": ({}, {"resident": True}),
    "four lanes": ({"lanes": 4}, {"num_threads": 1}),
    "resident, four lanes": ({"lanes": 4, "pad": True}, {"resident": True}),
}


def loader_of(path: Path, name: str, batch_size: int = 16, **options: Any) -> ChunkLoader:
    order, how = LOADERS[name]
    return loader_by(**ordered(path, batch_size, **{**ORDER, **order, **options}), **how)


def sampler_of(path: Path, batch_size: int = 16, **options: Any) -> ChunkSampler:
    return ChunkSampler(ChunkDataset(path), batch_size, **{**ORDER, **options})


@pytest.mark.filterwarnings("ignore:field .* is read through h5py")
@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_resumes_at_every_batch(path, name):
    check_resume(lambda: loader_of(path, name))


@pytest.mark.filterwarnings("ignore:field .* is read through h5py")
def test_another_reader_goes_on(path):
    ways = [
        lambda: ChunkSampler(ChunkDataset(path), 16, num_workers=0, **ORDER),
        *(lambda name=name: loader_of(path, name) for name in ("direct", "h5py", "resident")),
    ]
    for number, way in enumerate(ways):
        check_resume(way, other=ways[(number + 1) % len(ways)], cuts=[(0, 0), (0, 5), (1, 1), (1, NUM_BATCHES)])


@pytest.mark.parametrize("resident", [False, True])
def test_rows_of_a_matrix(tmp_path, resident):
    """Every cut of an epoch of a CSR file: the rows themselves are compared."""
    matrix = random_matrix(101, 40, 5)
    path = write(tmp_path / "a.h5", matrix, chunk_samples=8)

    def make() -> ChunkLoader:
        return h5chunk.ChunkLoader(**ordered(path, 10, seed=2, window_chunks=3), resident=resident)

    with make() as loader:
        rows = [batch.clone() for (batch,) in loader]
    for cut in range(len(rows) + 1):
        with make() as loader:
            batches = iter(loader)
            seen = [batch.clone() for (batch,) in islice(batches, cut)]
            state = through_json(loader.state_dict())
            batches.close()
        with make() as loader:
            loader.load_state_dict(state)
            seen += [batch.clone() for (batch,) in loader]
        assert len(seen) == len(rows) and all(map(torch.equal, seen, rows))


@pytest.mark.parametrize("options", [{"resident": False}, {"resident": True}, {"resident": False, "reuse": True}])
def test_a_used_loader_loads_a_state(path, options):
    """Its threads are at another place, or the data is on the device already."""
    with loader_by(**ordered(path, 16, **ORDER), **options) as loader:
        epochs = [labels_of(iter(loader)) for _ in range(3)]
        loader.set_epoch(1)
        batches = iter(loader)
        assert labels_of(islice(batches, 4)) == epochs[1][:4]
        state = loader.state_dict()
        batches.close()
        for _ in range(2):
            loader.load_state_dict(state)
            assert labels_of(iter(loader)) == epochs[1][4:]
        assert labels_of(iter(loader)) == epochs[2]
        loader.set_epoch(0)
        assert labels_of(iter(loader)) == epochs[0]
        loader.load_state_dict(state)  # of the epoch whose first windows are there, which nobody would take
        assert labels_of(iter(loader)) == epochs[1][4:]


# Between epochs


@pytest.fixture(params=["sampler", "direct", "resident"])
def make(request, path):
    if request.param == "sampler":
        return lambda **options: sampler_of(path, **options)
    return lambda **options: loader_of(path, request.param, **options)


def test_after_the_last_batch_and_after_the_epoch(make):
    """In the loop's last turn nothing is left of this epoch; behind the loop it is the next one."""
    feed = make()
    batches = iter(feed)
    assert len(list(islice(batches, NUM_BATCHES))) == NUM_BATCHES
    inside = feed.state_dict()
    assert next(batches, None) is None
    behind = feed.state_dict()
    assert (inside["epoch"], inside["batch"]) == (0, NUM_BATCHES)
    assert (behind["epoch"], behind["batch"]) == (1, 0)
    second = labels_of(iter(feed))
    for state, expected in ((inside, [[], second]), (behind, [second])):
        other = make()
        other.load_state_dict(state)
        assert [labels_of(iter(other)) for _ in expected] == expected


def test_a_loop_that_was_left_is_where_it_was_left(make):
    feed = make()
    for _ in zip(range(4), feed, strict=False):
        pass
    state = feed.state_dict()
    assert state["epoch"] == 0 and state["batch"] in (4, 5)  # zip may have taken one more
    for number, _ in enumerate(feed, 1):
        if number == 3:
            break
    state = feed.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 3)


def test_before_the_first_batch(make):
    assert {"epoch": 0, "batch": 0}.items() <= make().state_dict().items()
    feed = make()
    feed.set_epoch(4)
    assert {"epoch": 4, "batch": 0}.items() <= feed.state_dict().items()


def test_set_epoch_keeps_the_batch_of_its_own_epoch_only(make):
    feed = make()
    feed.set_epoch(2)
    expected = labels_of(iter(feed))
    feed.set_epoch(2)
    first = iter(feed)
    next(first)
    state = feed.state_dict()
    del first
    for epoch, rest in ((2, expected[1:]), (3, None)):
        feed = make()
        feed.load_state_dict(state)
        feed.set_epoch(epoch)
        found = labels_of(iter(feed))
        assert found == rest if rest else len(found) == NUM_BATCHES


def test_saving_disturbs_nothing(make):
    expected = labels_of(iter(make()))
    feed, found = make(), []
    for batch in feed:
        found += labels_of(iter([batch]))
        assert feed.state_dict()["batch"] == len(found)
    assert found == expected


def test_a_loader_whose_batches_are_counted_reads_on_at_the_seam(path):
    """As Lightning does: as many batches as it has are taken, and the end is never looked for."""
    with h5chunk.ChunkLoader(**ordered(path, 16, **ORDER)) as loader:
        expected = [labels_of(iter(loader)) for _ in range(2)]
        loader.set_epoch(0)
        first = iter(loader)
        found = [labels_of(islice(first, NUM_BATCHES))]
        feed = loader._feed
        loader.set_epoch(1)
        first.close()
        found.append(labels_of(iter(loader)))
        assert found == expected and loader._feed is feed


# Workers


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 1), (1, 0)])
def test_workers_of_a_dataloader(path, before, after):
    """Plain torch: what training had is counted, since workers take batches ahead."""

    def make_loader(num_workers: int) -> tuple[ChunkSampler, DataLoader]:
        dataset = ChunkDataset(path)
        sampler = ChunkSampler(dataset, 16, **ORDER)
        return sampler, DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)

    _, whole = make_loader(0)
    epochs = [labels_of(iter(whole)) for _ in range(3)]
    for epoch, cut in ((0, 0), (0, 6), (1, 3), (1, NUM_BATCHES)):
        sampler, loader = make_loader(before)
        for _ in range(epoch):
            list(loader)
        batches = iter(loader)
        seen = labels_of(islice(batches, cut))
        state = through_json(sampler.state_dict(cut))
        del batches
        sampler, loader = make_loader(after)
        sampler.load_state_dict(state)
        assert seen + labels_of(iter(loader)) == epochs[epoch]
        assert labels_of(iter(loader)) == epochs[epoch + 1]


def test_batches_that_an_epoch_does_not_have(path):
    sampler = ChunkSampler(ChunkDataset(path), 16)
    for batches in (-1, NUM_BATCHES + 1, 1.5, True):
        with pytest.raises(OptionError, match=rf"batches is {batches}: pass a number from 0 to {NUM_BATCHES}"):
            sampler.state_dict(batches)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "snapshot_every_n_steps": 4},
        {"num_workers": 2, "persistent_workers": True, "as_sampler": True},
    ],
    ids=str,
)
def test_stateful_dataloader(path, options):
    """torchdata's counts what was delivered, by workers too."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    as_sampler = options.pop("as_sampler", False)

    def make_loader() -> Any:
        dataset = ChunkDataset(path)
        sampler = ChunkSampler(dataset, 16, **ORDER)
        how = {"sampler": sampler, "batch_size": None} if as_sampler else {"batch_sampler": sampler}
        return stateful.StatefulDataLoader(dataset, **how, **options)

    whole = make_loader()
    epochs = [labels_of(iter(whole)) for _ in range(4)]
    for epoch, cut in ((0, 1), (0, 7), (1, 0), (1, NUM_BATCHES)):
        loader = make_loader()
        for _ in range(epoch):
            list(loader)
        batches = iter(loader)
        seen = labels_of(islice(batches, cut))
        state = loader.state_dict()
        del batches
        other = make_loader()
        other.load_state_dict(state)
        assert seen + labels_of(iter(other)) == epochs[epoch]
        assert labels_of(iter(other)) == epochs[epoch + 1]
    assert labels_of(iter(loader)) == epochs[2]
    other = make_loader()
    other.load_state_dict(loader.state_dict())  # behind the loop
    assert labels_of(iter(other)) == epochs[3]


def test_stateful_dataloader_after_an_epoch_that_was_left(path):
    """Before the first batch of the next one."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make_loader() -> Any:
        dataset = ChunkDataset(path)
        sampler = ChunkSampler(dataset, 16, **ORDER)
        return stateful.StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=1)

    loader = make_loader()
    next(iter(loader))
    batches = iter(loader)
    state = loader.state_dict()
    other = make_loader()
    other.load_state_dict(state)
    assert labels_of(iter(other)) == labels_of(batches)


# Other numbers of processes


@pytest.mark.filterwarnings("ignore:the last batch of each epoch is empty")
@pytest.mark.parametrize("tail", ["drop_last", "pad", None])
@pytest.mark.parametrize("kind", ["sampler", "loader"])
def test_another_world_size_goes_on(path, kind, tail):
    def global_batches(world_size: int, state: Any, count: int | None) -> tuple[list[set[int]], Any]:
        """The samples of each batch over all ranks, and the state of the last rank."""
        parts = []
        for rank in range(world_size):
            options = {**ORDER, "lanes": 12, "rank": rank, "world_size": world_size, **({tail: True} if tail else {})}
            if kind == "sampler":
                feed = ChunkSampler(ChunkDataset(path), 24 // world_size, **options)
            else:
                feed = h5chunk.ChunkLoader(**ordered(path, 24 // world_size, **options))
            if state is not None:
                feed.load_state_dict(state)
            batches = iter(feed)
            parts.append(labels_of(islice(batches, count)))
            saved = through_json(feed.state_dict())
            batches.close()
        return [sorted(chain(*batch)) for batch in zip(*parts, strict=True)], saved

    whole, _ = global_batches(1, None, None)
    assert len(whole) == (8 if tail == "drop_last" else 9)
    if tail is None:
        assert sorted(chain(*whole)) == list(range(N))
    for before, after, cut in ((1, 2, 3), (2, 4, 5), (4, 1, 1), (12, 3, 8), (3, 12, 0), (6, 2, 7)):
        seen, state = global_batches(before, None, cut)
        rest, _ = global_batches(after, state, None)
        assert seen + rest == whole


# What a state does not fit


DIFFERENCES = {
    "seed": ({"seed": 4}, "state has seed=3, not 4: pass the same seed"),
    "batch size": ({"batch_size": 8}, "has batches of 16 samples over all ranks, not 8"),
    "ranks": (
        {"lanes": 2, "rank": 0, "world_size": 2},
        "has batches of 16 samples .* not 32",
    ),
    "lanes": ({"lanes": 4}, "state has lanes=1, not 4"),
    "window": ({"window_chunks": 5}, r"=6, not 5: pass batch_sampler=ChunkSampler\(..., window_chunks=6\)"),
    "shuffle": ({"shuffle": False}, "state has shuffle=1, not 0"),
    "drop_last": ({"drop_last": True}, "state has drop_last=0, not 1"),
    "pad": ({"pad": True}, "state has pad=0, not 1"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_state_of_another_order_is_named(make, name):
    options, message = DIFFERENCES[name]
    state = make().state_dict()
    with pytest.raises(StateError, match=message):
        make(**options).load_state_dict(state)


def test_a_refused_state_changes_nothing(make):
    feed = make()
    expected = labels_of(iter(make()))
    with pytest.raises(StateError):
        feed.load_state_dict({**feed.state_dict(), "batch": 3, "seed": 9})
    assert labels_of(iter(feed)) == expected


def test_the_interleave_of_a_sampler_is_named(path):
    state = ChunkSampler(ChunkDataset(path), 8, window_chunks=2, num_workers=2).state_dict()
    with pytest.raises(StateError, match=r"interleave=2, not 3: .*num_workers"):
        ChunkSampler(ChunkDataset(path), 8, window_chunks=2, num_workers=3).load_state_dict(state)


def test_another_file_is_named(path, tmp_path, class_folder):
    state = ChunkLoader(path, 16).state_dict()
    other = make_file(tmp_path / "b.h5", images=(IMAGES[:-1], {"chunks": (4, 3, 5, 6)}), labels=(LABELS[:-1], {}))
    for feed in (ChunkLoader(other, 16), ChunkLoader(ChunkDataset(path, fields=["labels"]), 16)):
        with pytest.raises(StateError, match="state belongs to another file"):
            feed.load_state_dict(state)
    for seed, name in ((1, "c.h5"), (2, "d.h5")):  # of the same shape: checksums tell
        h5chunk.convert(class_folder(30, name=name[0]), tmp_path / name, workers=0, seed=seed)
    state = ChunkLoader(tmp_path / "c.h5", 4).state_dict()
    ChunkLoader(tmp_path / "c.h5", 4).load_state_dict(state)
    with pytest.raises(StateError, match="state belongs to another file"):
        ChunkLoader(tmp_path / "d.h5", 4).load_state_dict(state)


def test_a_copy_of_the_file_is_the_same(path, tmp_path):
    state = ChunkLoader(path, 16).state_dict()
    copy = tmp_path / "copy.h5"
    copy.write_bytes(path.read_bytes())
    ChunkLoader(copy, 16).load_state_dict(state)


@pytest.mark.parametrize("state", [None, {}, [], "state", 3, {"version": 1}, {"version": "x", "epoch": 0, "batch": 0}])
def test_what_is_no_state(make, state):
    with pytest.raises(StateError, match=r"pass the result of state_dict\(\)"):
        make().load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "state has version 2, but this h5chunk reads 1"),
        ({"batch": 14}, "state is at batch 14 of epoch 0, but an epoch has 13"),
        ({"batch": -1}, "state is at batch -1"),
        ({"epoch": -1}, "of epoch -1"),
        ({"batch": 1.5}, r"pass the result of state_dict\(\)"),
        ({"batch": float("nan")}, r"pass the result of state_dict\(\)"),
    ],
    ids=str,
)
def test_a_state_that_cannot_be(make, change, message):
    feed = make()
    with pytest.raises(StateError, match=message):
        feed.load_state_dict({**feed.state_dict(), **change})


def test_a_state_without_one_of_its_numbers(make):
    feed = make()
    for name in feed.state_dict():
        state = feed.state_dict()
        del state[name]
        with pytest.raises(StateError, match=r"pass the result of state_dict\(\)"):
            feed.load_state_dict(state)


def test_numbers_of_numpy_and_torch_will_do(make):
    """As torch.save and others may bring them back."""
    feed = make()
    state = {name: np.int64(value) for name, value in {**feed.state_dict(), "batch": 5}.items()}
    feed.load_state_dict({**state, "epoch": torch.tensor(2)})
    assert {"epoch": 2, "batch": 5}.items() <= feed.state_dict().items()


def test_echoes_are_refused_by_name(path):
    with (
        ChunkLoader(path, 16, echo=2) as loader,
        pytest.raises(OptionError, match="echo is 2, but a loader that echoes has no state to save"),
    ):
        loader.state_dict()
    state = ChunkSampler(ChunkDataset(path), 16).state_dict()
    with ChunkLoader(path, 16, echo=2) as loader, pytest.raises(OptionError, match="state to save or load: use echo=1"):
        loader.load_state_dict(state)


def test_a_state_with_each_batch_looks_at_the_data_once(path, monkeypatch):
    """Of a subset, or with weights, that takes as long as there are samples."""
    looks = []
    whole = ChunkDataset.fingerprint.fget
    monkeypatch.setattr(ChunkDataset, "fingerprint", property(lambda dataset: looks.append(1) or whole(dataset)))
    dataset = ChunkDataset(path).subset(range(50))
    sampler = ChunkSampler(dataset, 8, weights=np.ones(50))
    with h5chunk.ChunkLoader(**ordered(dataset, 8, weights=np.ones(50))) as loader:
        states = [
            (sampler.state_dict()["batch"], loader.state_dict()["batch"]) for _ in zip(sampler, loader, strict=True)
        ]
    assert states == [(number, number) for number in range(1, 8)] and len(looks) == 2


def test_a_file_without_samples(tmp_path):
    path = make_file(tmp_path / "a.h5", images=(values((0, 9), "u1"), {}))
    sampler = ChunkSampler(ChunkDataset(path), 4)
    sampler.load_state_dict(sampler.state_dict())
    assert list(sampler) == []
