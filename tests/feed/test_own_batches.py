"""Batches in the user's order: what is drawn when, what is resumed, and what is wrong with them."""

from __future__ import annotations

import gc
import json
import weakref
from itertools import chain

import numpy as np
import pytest
import torch
from support.faults import watch
from support.leftovers import nothing_is_left
from support.loader_files import IMAGES, N, epoch_of, path
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from h5chunk.errors import OptionError, StateError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.transforms import RandomHorizontalFlip

__all__ = ["nothing_is_left", "path"]


class Plain:
    """Batches of several sizes with repeated samples, of each epoch others."""

    def __init__(self, seed: int = 0, num_batches: int = 30) -> None:
        self.seed, self.num_batches, self.epoch, self.drawn = seed, num_batches, 0, 0

    def __iter__(self):
        random = np.random.default_rng([self.seed, self.epoch])
        for _ in range(self.num_batches):
            self.drawn += 1
            yield random.integers(0, N, random.integers(1, 40)).tolist()


class WithEpochs(Plain):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class WithState(Plain):
    """It goes on where it was, epoch after epoch, with one random generator."""

    def __init__(self, num_batches: int = 30) -> None:
        self.random, self.at, self.num_batches = np.random.default_rng(0), 0, num_batches

    def __iter__(self):
        while self.at < self.num_batches:
            self.at += 1
            yield self.random.integers(0, N, self.random.integers(1, 40)).tolist()
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "random": self.random.bit_generator.state}

    def load_state_dict(self, state):
        self.at, self.random.bit_generator.state = state["at"], state["random"]


def of_torch(kind: str) -> BatchSampler:
    weights = torch.arange(N).double()
    samplers = {
        "weighted": lambda: WeightedRandomSampler(weights, 150),
        "subset": lambda: SubsetRandomSampler(range(50, 120)),
        "random": lambda: RandomSampler(range(N)),
    }
    return BatchSampler(samplers[kind](), 16, drop_last=False)


@pytest.mark.parametrize("options", [{}, {"resident": True}, {"reuse": True}, {"num_threads": 1}], ids=str)
@pytest.mark.parametrize("kind", ["weighted", "subset", "random"])
def test_samplers_of_torch(path, kind, options):
    """They draw in this thread what they would draw for a DataLoader, epoch after epoch."""
    torch.manual_seed(3)
    expected = [[list(batch) for batch in of_torch(kind)] for _ in range(3)]
    torch.manual_seed(3)
    sampler = of_torch(kind)
    with ChunkLoader(path, batch_sampler=sampler, **options) as loader:
        assert [epoch_of(loader) for _ in range(3)] == expected
        assert len(loader) == len(sampler) and loader.batch_size == 16 and loader.batch_sampler is sampler


def test_a_chunk_sampler_in_an_iterable_of_the_user(path):
    dataset = ChunkDataset(path)
    sampler = ChunkSampler(dataset, 8, seed=4)
    expected = epoch_of(ChunkLoader(dataset, batch_sampler=sampler))
    sampler.set_epoch(0)
    assert epoch_of(ChunkLoader(dataset, batch_sampler=(batch for batch in sampler))) == expected
    other = ChunkSampler(dataset.subset(range(100)), 8)
    with pytest.raises(OptionError, match="100 samples, but is read from one of 203"):
        epoch_of(ChunkLoader(dataset, batch_sampler=list(other)))


def test_batches_are_read_together_in_the_order_of_the_file(tmp_path, path, monkeypatch):
    windows = []
    watch(monkeypatch, "load window", lambda _, window, slot: windows.append(window))
    lists = [[int(n) for n in batch] for batch in np.random.default_rng(0).permutation(200).reshape(50, 4)]
    with ChunkLoader(path, batch_sampler=lists) as loader:
        assert epoch_of(loader) == lists
    assert [len(window.batches) for window in windows[:-1]] == [6] * (len(windows) - 1)  # 24 of 203 samples
    for window in windows:
        assert (np.diff(window.rows) > 0).all() and (window.samples[window.destinations] == window.rows).all()


def test_batches_are_drawn_a_fixed_number_ahead_and_never_of_the_next_epoch(path):
    """So that a sampler may learn from the loop, and finds the same in each run."""
    runs = []
    for _ in range(3):
        sampler = Plain(num_batches=100)
        with ChunkLoader(path, batch_sampler=sampler, num_threads=2) as loader:
            runs.append([sampler.drawn for _ in loader])
            assert sampler.drawn == 100
            next(iter(loader))
            assert sampler.drawn < 160
    assert runs[0] == runs[1] == runs[2] and runs[0][0] < 60


def test_an_error_of_the_sampler_is_raised_when_its_batch_is_due(path):
    def failing():
        yield from ([1, 2], [3], [5, 5])
        raise KeyError("lost")

    loader, seen = ChunkLoader(path, batch_sampler=failing()), []
    with pytest.raises(KeyError, match="lost"):
        seen += [labels.tolist() for _, labels in loader]
    with pytest.raises(KeyError, match="lost"):
        for _, labels in ChunkLoader(path, batch_sampler=failing()):
            seen.append(labels.tolist())
    assert seen == [[1, 2], [3], [5, 5]]


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ([], r"batch 1 of batch_sampler is empty: yield at least one sample"),
        ([5, N], rf"has sample {N}, but the data set has {N} samples: yield numbers from 0 to {N - 1}"),
        ([5, -1], r"has sample -1, but"),
        (7, r"batch 1 of batch_sampler is 7: yield lists of sample numbers, as torch.utils.data.BatchSampler\("),
        ([[1, 2]], r"is \[\[1, 2\]\]: yield lists"),
        ([1.5], r"is \[1.5\]: yield lists"),
        ([True, False], r"is \[True, False\]: yield lists"),
        (None, r"is None: yield lists"),
        ("ab", r"is 'ab': yield lists"),
    ],
)
def test_wrong_batches(path, batch, error):
    for resident in (False, True):
        with ChunkLoader(path, batch_sampler=[[0, 1], batch, [2]], resident=resident) as loader:
            batches = iter(loader)
            assert next(batches)[1].tolist() == [0, 1]
            with pytest.raises(OptionError, match=error):
                next(batches)


def test_batches_of_any_integers(path):
    lists = [(1, 2), np.array([3, 3]), torch.tensor([4]), [torch.tensor(5), np.int8(6)], range(3)]
    assert epoch_of(ChunkLoader(path, batch_sampler=lists)) == [[1, 2], [3, 3], [4], [5, 6], [0, 1, 2]]


def test_arguments(path):
    for name, value in {"batch_size": 8, "shuffle": False, "drop_last": True, "batch_elements": 9}.items():
        with pytest.raises(OptionError, match=f"{name} is given together with batch_sampler"):
            ChunkLoader(path, batch_sampler=[[1]], **{name: value})
    with pytest.raises(OptionError, match="echo is 2, but batches of your own order are not repeated"):
        ChunkLoader(path, batch_sampler=[[1]], echo=2)
    loader = ChunkLoader(path, batch_sampler=Plain())
    with pytest.raises(TypeError, match="len"):
        len(loader)
    assert "batches of a Plain; " in repr(loader)
    assert epoch_of(ChunkLoader(path, batch_sampler=[])) == []


def test_an_iterator_is_used_once(path):
    with ChunkLoader(path, batch_sampler=iter([[1], [2]])) as loader:
        assert epoch_of(loader) == [[1], [2]]
        with pytest.raises(OptionError, match=r"batch_sampler is an iterator .*, which yields its batches only once"):
            epoch_of(loader)


def test_memory_bytes_limits_batches(path):
    lists = [[1] * 10, [2] * 1000]
    with ChunkLoader(path, batch_sampler=lists, memory_bytes=100_000, reuse=True) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(OptionError, match=r"memory_bytes is 100000, but 2 windows of 1 batch need \d+: pass that"):
            next(batches)


def test_a_sampler_may_refer_to_the_loader(path):
    """As those do that learn from its batches. The loader ends with its last reference all the same."""
    sampler = Plain()
    sampler.loader = loader = ChunkLoader(path, batch_sampler=sampler)
    next(iter(loader))
    gone = weakref.ref(loader)
    del loader, sampler
    gc.collect()
    assert gone() is None


def flipped(loader, count: int | None = None):
    """Images and labels of some batches, with random flips."""
    found = []
    for images, labels in loader:
        found.append((labels.tolist(), images.numpy().copy()))
        if len(found) == count:
            break
    return found


def same(found, expected) -> None:
    assert [labels for labels, _ in found] == [labels for labels, _ in expected]
    for (_, images), (_, others) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(images, others)


def loader_of(path, sampler, resident: bool) -> ChunkLoader:
    return ChunkLoader(path, batch_sampler=sampler, resident=resident, seed=5, transforms=[RandomHorizontalFlip()])


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("kind", [WithState, WithEpochs, list])
def test_resume(path, kind, resident):
    """At any batch of any epoch, to the pixel, although the sampler was ahead when the state was saved."""

    def made():
        return list(Plain()) if kind is list else kind()

    with loader_of(path, made(), resident) as loader:
        whole, states = [], {}
        for epoch in range(3):
            loader.set_epoch(epoch)
            states[epoch, 0] = loader.state_dict()
            whole.append([])
            for images, labels in loader:
                whole[-1].append((labels.tolist(), images.numpy().copy()))
                states[epoch, len(whole[-1])] = loader.state_dict()
        states[3, 0] = loader.state_dict()
    for epoch, batch in [(0, 0), (0, 1), (1, 0), (1, 17), (1, 30), (2, 29)]:
        with loader_of(path, made(), resident) as loader:
            loader.load_state_dict(json.loads(json.dumps(states[epoch, batch])))
            assert loader.state_dict() == states[epoch, batch]
            for number in range(epoch, 3):
                loader.set_epoch(number)
                rest = flipped(loader, 4)  # and again, from within
                same(rest, whole[number][batch:][:4])
                if len(rest) == 4:
                    state = loader.state_dict()
                    assert state == states[number, batch + 4]
                    loader.load_state_dict(state)
                    loader.set_epoch(number)
                    same(flipped(loader), whole[number][batch + 4 :])
                batch = 0
            assert loader.state_dict() == states[3, 0]


def test_resume_samplers_of_torchdata(path):
    """Their iterators have the state."""
    samplers = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def made():
        return samplers.BatchSampler(samplers.RandomSampler(range(N), generator=torch.Generator()), 16, False)

    with ChunkLoader(path, batch_sampler=made()) as loader:
        whole = [epoch_of(loader) for _ in range(3)]
    assert sorted(chain(*whole[0])) == list(range(N)) and whole[0] != whole[1]
    for cut in (1, 5, len(whole[0])):
        with ChunkLoader(path, batch_sampler=made()) as loader:
            epoch_of(loader)
            for number, _ in enumerate(loader, 1):
                if number == cut:
                    break
            state = loader.state_dict()
        with ChunkLoader(path, batch_sampler=made()) as loader:
            loader.load_state_dict(state)
            assert epoch_of(loader) == whole[1][cut:]
            assert epoch_of(loader) == whole[2]
    with ChunkLoader(path, batch_sampler=made()) as loader:
        epoch_of(loader)
        state = loader.state_dict()
    with ChunkLoader(path, batch_sampler=made()) as loader:
        loader.load_state_dict(state)
        assert [epoch_of(loader), epoch_of(loader)] == whole[1:]


@pytest.mark.parametrize("stateful", [False, True])
def test_resume_a_distributed_sampler(path, stateful):
    """Each rank has its own batches. The epoch is passed on."""
    kind = DistributedSampler
    if stateful:
        kind = pytest.importorskip("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler
    options = [{"num_replicas": 2, "rank": rank, "seed": 9} for rank in range(2)]
    seen = []
    for own in options:

        def made(own=own):
            return BatchSampler(kind(range(N), **own), 8, drop_last=False)

        with ChunkLoader(path, batch_sampler=made()) as loader:
            loader.sampler.set_epoch(3)  # as Lightning does
            whole = [epoch_of(loader)]
            state = loader.state_dict()
            loader.set_epoch(4)
            whole.append(epoch_of(loader))
        expected = made()
        expected.sampler.set_epoch(3)
        assert whole[0] == list(expected) and whole[0] != whole[1]
        seen += chain(*whole[0])
        with ChunkLoader(path, batch_sampler=made()) as loader:
            loader.load_state_dict(state)
            loader.set_epoch(4)
            batches = iter(loader)
            assert [next(batches)[1].tolist() for _ in range(5)] == whole[1][:5]
            state = loader.state_dict()
        with ChunkLoader(path, batch_sampler=made()) as loader:
            loader.load_state_dict(state)
            assert epoch_of(loader) == whole[1][5:]
    assert set(seen) == set(range(N))


@pytest.mark.parametrize(("size", "seed"), [(32, 0), (16, 7)])
def test_other_batches_are_not_resumed(path, size, seed):
    """Batches before the position are drawn again, and must be those that were used."""

    def made(size: int, seed: int) -> ChunkLoader:
        return ChunkLoader(path, batch_sampler=BatchSampler(DistributedSampler(range(N), 2, 0, seed=seed), size, False))

    with made(16, 0) as loader:
        loader.set_epoch(3)
        batches = iter(loader)
        used = [next(batches)[1].tolist() for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
    with made(16, 0) as loader:
        loader.load_state_dict(state)
        assert len(set(chain(*used, *epoch_of(loader)))) == 102
    with made(size, seed) as loader, pytest.raises(StateError, match="at batch 3 of epoch 3, but batch_sampler"):
        loader.load_state_dict(state)
        epoch_of(loader)


def test_what_cannot_be_resumed(path):
    with ChunkLoader(path, batch_sampler=Plain()) as loader:
        next(iter(loader))
        with pytest.raises(
            OptionError, match=r"\(Plain\) cannot be saved, because it has neither a state nor epochs: gi"
        ):
            loader.state_dict()
    with ChunkLoader(path, batch_sampler=WithEpochs()) as loader:
        loader.set_epoch(0)
        epoch_of(loader)
        next(iter(loader))
        with pytest.raises(OptionError, match=r"within epoch 1, because .* call the loader's set_epoch before each"):
            loader.state_dict()
    with ChunkLoader(path, batch_sampler=WithState()) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for wrong, error in [
        (state | {"uses": "AAAA"}, "uses='AAAA', which is damaged"),
        (state | {"ahead": state["ahead"] | {"sizes": [1]}}, "ahead=.*, which is damaged"),
        (state | {"ahead": 3}, "ahead=3, which is damaged"),
        (state | {"num_samples": 3}, "num_samples=3"),
        (state | {"seed": 3}, "seed=3"),
    ]:
        with pytest.raises(StateError, match=error):
            loader = ChunkLoader(path, batch_sampler=WithState())
            loader.load_state_dict(wrong)
            epoch_of(loader)
    for other in (ChunkLoader(path, 8), ChunkLoader(path, batch_sampler=WithEpochs())):
        with pytest.raises(StateError, match=r"batch_sampler"):
            other.load_state_dict(state)
    with pytest.raises(StateError, match="state has no batch_sampler"):
        loader.load_state_dict(ChunkLoader(path, 8, seed=0).state_dict())
    few = ChunkLoader(path, batch_sampler=[[1]])
    with pytest.raises(StateError, match="state is at batch 3, but batch_sampler has only 1 batches"):
        few.load_state_dict(few.state_dict() | {"batch": 3})
        epoch_of(few)


def test_uses_of_a_sample_differ(path):
    """In a batch, and in the batches of an epoch, as with weights; and those of two epochs."""
    lists = [[7] * 20] * 20
    loader = loader_of(path, lists, False)
    epochs = [np.concatenate([images for _, images in flipped(loader)]) for _ in range(2)]
    is_flipped = [(each != IMAGES[7]).any((1, 2, 3)) for each in epochs]
    assert all(100 < each.sum() < 300 for each in is_flipped)
    assert (is_flipped[0] != is_flipped[1]).any()
    halves = is_flipped[0].reshape(20, 20)
    assert len(np.unique(halves, axis=0)) == 20
