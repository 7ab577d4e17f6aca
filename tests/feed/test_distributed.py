"""Several training processes: real ones, over gloo. Each sample once, equally many batches, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from dataclasses import replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.foreign import make_file
from support.leftovers import nothing_is_left
from support.loader_files import IMAGES, LABELS, N, path
from support.loaders import loader_by
from support.matrices import LAYOUTS, random_matrix, write
from support.orders import ordered
from support.rank_processes import ORDER, TAILS, WAIT_S, in_ranks, read_epoch, read_part, start_ranks, train
from torch import distributed
from torch.utils.data import DataLoader

from h5chunk.errors import OptionError, StateError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler, find_ranks

__all__ = ["nothing_is_left", "path"]

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch without gloo")


# Ranks, batches, samples


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_sample_once_over_all_ranks(path, tmp_path, world_size):
    """Of 203, which neither number of ranks divides."""
    ranks = in_ranks(tmp_path / "run", world_size, read_epoch, path, 16)
    for rank, each in enumerate(ranks):
        assert len(each["early"]) == 2
        assert all(f"has rank {rank} of {world_size}: create it after init" in text for text in each["early"])
    for tail, options in TAILS.items():
        batches = [each[tail]["loader"] for each in ranks]
        assert batches == [each[tail]["sampler"] for each in ranks]
        by_hand = [
            ChunkSampler(
                ChunkDataset(path),
                16,
                num_workers=0,
                **ORDER,
                **options,
                lanes=world_size,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]
        assert batches == [list(sampler) for sampler in by_hand]
        full, rest = divmod(N, 16 * world_size)
        last = {"exact": [rest], "drop_last": [], "pad": [16 * world_size]}[tail]
        sizes = [16 * world_size] * full + last
        assert [each[tail]["sizes"] for each in ranks] == [sizes] * world_size
        seen = list(chain(*chain(*batches)))
        if tail == "exact":
            assert sorted(seen) == list(range(N))
        elif tail == "drop_last":
            assert len(set(seen)) == len(seen) == 16 * world_size * full
        else:
            assert set(seen) == set(range(N))


def test_ranks_read_different_chunks(path, tmp_path):
    """But for those at the end of the line, which are dealt out sample by sample."""
    ranks = in_ranks(tmp_path / "run", 2, read_epoch, path, 16)
    chunks = [{sample // 4 for sample in chain(*each["exact"]["loader"])} for each in ranks]
    assert len(chunks[0] & chunks[1]) <= 2
    assert len(chunks[0] | chunks[1]) == 51


def test_only_one_of_rank_and_world_size():
    for options in ({"rank": 0}, {"world_size": 2}):
        with pytest.raises(OptionError, match="pass both or neither"):
            find_ranks(**{"lanes": None, "rank": None, "world_size": None, **options})


def test_without_torch_distributed():
    assert find_ranks(None, None, None) == (1, 0, 1)
    assert find_ranks(6, None, None) == (6, 0, 1)
    assert find_ranks(None, 1, 4) == (4, 1, 4)


# A last batch without samples


@pytest.mark.filterwarnings("ignore:field .* is read through h5py")
@pytest.mark.filterwarnings("ignore:the last batch of each epoch is empty")
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("reader", ["direct", "h5py"])
@pytest.mark.parametrize("kind", ["plain", "gzip", "dense", "csr"])
def test_ranks_without_samples_in_their_last_batch(path, tmp_path, kind, reader, resident):
    """203 samples of which 48 are a step of all 16 ranks: in the last one there are 11."""
    transforms = [LAYOUTS[kind]()] if kind in LAYOUTS else []
    options: dict[str, Any] = {"reader": reader, "resident": resident, "transforms": transforms}
    if kind == "gzip":
        how = {"chunks": (4, 3, 5, 6), "compression": "gzip"}
        path = make_file(tmp_path / "gzip.h5", images=(IMAGES, how), labels=(LABELS, {}))
    elif kind in LAYOUTS:
        path = write(tmp_path / "matrix.h5", random_matrix(N, 30, 4), chunk_samples=4)
    sizes = []
    for rank in range(16):
        order = ordered(path, 3, **ORDER, shuffle=kind != "gzip", rank=rank, world_size=16)
        with loader_by(**order, **options) as loader:
            sizes.append([[len(batch[0]) for batch in loader] for _ in range(2)])
    assert sizes == [[[3] * 4 + [1]] * 2] * 11 + [[[3] * 4 + [0]] * 2] * 5


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("world_size", [2, 5, 16])
def test_an_empty_last_batch_warns(path, world_size, lanes):
    """In every case in which it is empty, and in no other."""
    dataset, size, seen = ChunkDataset(path), 2 * lanes, set()
    for count in range(N - 4 * world_size * lanes, N + 1, 3):
        options = {"lanes": world_size * lanes, "world_size": world_size, "rank": 0}
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            order = ChunkSampler(dataset.subset(range(count)), size, **options).order
        last = [list(replace(order, rank=rank).keys())[-1] for rank in range(world_size)]
        empty = sum(not len(keys) for keys in last)
        assert [str(each.message).split(":")[0] for each in found] == [
            f"the last batch of each epoch is empty on {empty} of {world_size} ranks"
        ] * (empty > 0)
        seen.add(empty > 0)
    assert seen == {True, False}


def test_who_hears_of_an_empty_last_batch(path):
    dataset = ChunkDataset(path)  # of 203 samples
    with pytest.warns(UserWarning, match="empty on 5 of 16 ranks: pass drop_last=True or pad=True, or another"):
        ChunkSampler(dataset, 3, rank=0, world_size=16)
    for options in ({"rank": 1}, {"rank": 0, "pad": True}, {"rank": 0, "drop_last": True}):
        ChunkSampler(dataset, 3, world_size=16, **options)


def test_a_dataloader_without_samples_in_its_last_batch(path):
    dataset = ChunkDataset(path)
    sampler = ChunkSampler(dataset, 3, **ORDER, rank=15, world_size=16)
    batches = list(DataLoader(dataset, batch_sampler=sampler))
    assert [images.shape[0] for images, _ in batches] == [3, 3, 3, 3, 0]
    assert batches[-1][0].shape == (0, 3, 5, 6) and batches[-1][1].dtype == torch.int64


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # fewer cores than workers
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_transform_without_samples_in_the_last_batch(path, num_workers):
    dataset = ChunkDataset(path, transforms=as_views)
    sampler = ChunkSampler(dataset, 3, **ORDER, rank=15, world_size=16)
    *_, full, last = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
    assert (full[0]["small"].shape, last[0]["small"].shape) == ((3, 3, 2, 3), (0, 3, 2, 3))
    assert last[0]["small"].dtype == torch.float32 and last[1].shape == (0,) and last[1].dtype == torch.int64
    assert type(full) is type(last) and type(dataset[[]]) is tuple and dataset[[]][0]["small"].shape == (0, 3, 2, 3)
    dataset.close()


def as_views(image: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"whole": image, "small": image[:, ::3, ::2] / 255}


# Saved and resumed


def test_saved_by_two_ranks_and_resumed_by_four_and_by_one(path, tmp_path):
    before = in_ranks(tmp_path / "two", 2, read_part, path, 24, None, 4)
    assert before[0]["state"] == before[1]["state"]
    with ChunkLoader(**ordered(path, 24, **ORDER, lanes=4)) as loader:
        whole = [sorted(labels.tolist()) for _, labels in loader]
        loader.load_state_dict(before[0]["state"])
        by_one = [sorted(labels.tolist()) for _, labels in loader]
    by_four = in_ranks(tmp_path / "four", 4, read_part, path, 24, before[0]["state"], None)
    seen = global_batches(before)
    assert seen + by_one == seen + global_batches(by_four) == whole
    assert sorted(chain(*whole)) == list(range(N))


def global_batches(ranks: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    return [sorted(chain(*step)) for step in zip(*(each["batches"] for each in ranks), strict=True)]


# Killed


def seen_by(folder: Path) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Each step and its samples, of each rank, in the order in which they were trained; a torn last line is none."""
    logs = [folder / f"log{rank}" for rank in range(2)]
    lines = [log.read_text().split("\n")[:-1] if log.exists() else [] for log in logs]  # a rank may be behind
    return [[(step, tuple(samples)) for step, samples in map(json.loads, some)] for some in lines]


def test_a_killed_training_sees_what_an_uninterrupted_one_sees(path, tmp_path):
    """SIGKILL to all ranks, twice, the second time in the second epoch; then to the end."""
    whole = tmp_path / "whole"
    whole.mkdir()
    weights = in_ranks(tmp_path / "run", 2, train, path, whole, 0.0)
    killed = tmp_path / "killed"
    killed.mkdir()
    for number, steps in enumerate((5, 13)):
        ranks = start_ranks(tmp_path / f"kill{number}", 2, train, path, killed, 0.02)
        until = time.monotonic() + WAIT_S
        while not all(log and log[-1][0] >= steps for log in seen_by(killed)):
            assert time.monotonic() < until and all(process.exitcode is None for process in ranks)
            time.sleep(0.005)
        for process in ranks:
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.join(WAIT_S)
            assert process.exitcode == -signal.SIGKILL
        for log in ("log0", "log1"):  # a line that was being written
            text = (killed / log).read_text()
            (killed / log).write_text(text[: text.rfind("\n") + 1])
    assert in_ranks(tmp_path / "end", 2, train, path, killed, 0.0) == weights
    for expected, found in zip(seen_by(whole), seen_by(killed), strict=True):
        assert [step for step, _ in expected] == list(range(1, 19))  # 9 batches of 24 an epoch
        assert set(found) == set(expected)  # some steps were trained again, from the last checkpoint on: saw the same
        assert sum(two[0] != one[0] + 1 for one, two in pairwise(found)) <= 2
    samples = [list(chain(*(batch for step, batch in log if step <= 9))) for log in seen_by(whole)]
    assert sorted(chain(*samples)) == list(range(N))


# Nodes that keep their chunks


def local_ranks(path: Path, world_size: int, state: Any = None, **options: Any) -> list[ChunkSampler]:
    ranks = [
        ChunkSampler(
            ChunkDataset(path), 24 // world_size, **ORDER, lanes=4, rank=rank, world_size=world_size, **options
        )
        for rank in range(world_size)
    ]
    for each in ranks if state else ():
        each.load_state_dict(state)
    return ranks


def steps(ranks: list[ChunkSampler]) -> list[list[int]]:
    return [sorted(chain(*step)) for step in zip(*map(list, ranks), strict=True)]


def test_locality_resumes_on_another_number_of_ranks_and_nodes(path, monkeypatch):
    """Two nodes of two ranks, then one of two and one rank alone, which name the number of nodes."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    whole = steps(local_ranks(path, 4, locality="node"))
    assert sorted(chain(*whole)) == list(range(N)) and whole != steps(local_ranks(path, 4))
    running = local_ranks(path, 4, locality="node")
    began = [sorted(chain(*step)) for step in islice(zip(*running, strict=True), 3)]
    state = running[0].state_dict()
    for world_size in (4, 2, 1):
        assert began + steps(local_ranks(path, world_size, state, locality=2)) == whole
    with pytest.raises(StateError, match="state has locality=2, not 1: pass the same locality"):
        local_ranks(path, 2, state, locality="node")


@pytest.mark.filterwarnings("ignore:the last batch of each epoch is empty")
@pytest.mark.parametrize("weighted", [False, True])
def test_locality_of_a_selection(path, weighted):
    """A node has the chunks of earlier epochs, but for those where the parts of two nodes meet."""
    subset = np.random.default_rng(0).permutation(N)[: N * 2 // 3]
    dataset = ChunkDataset(path) if weighted else ChunkDataset(path).subset(subset)
    options = {"weights": np.random.default_rng(0).uniform(0, 2, N)} if weighted else {}
    chunks: dict[tuple[int | None, int], list[set[int]]] = {}
    for locality in (None, 2):
        for epoch in range(3):
            ranks = [ChunkSampler(dataset, 2, rank=r, world_size=4, locality=locality, **options) for r in range(4)]
            for rank in ranks:
                rank.set_epoch(epoch)
            samples = [list(chain(*rank)) for rank in ranks]
            if not weighted:
                assert sorted(chain(*samples)) == list(range(len(subset)))
            numbers = np.arange(N) if weighted else np.sort(subset)
            for node in range(2):
                found = numbers[[*samples[2 * node], *samples[2 * node + 1]]] // dataset.new_reader().chunk_samples
                chunks.setdefault((locality, node), []).append(set(found.tolist()))
    more = {key: len(set.union(*sets)) - max(map(len, sets)) for key, sets in chunks.items()}
    assert max(more[2, 0], more[2, 1]) <= (3 if weighted else 0) < min(more[None, 0], more[None, 1]) - 1


def test_locality_that_cannot_be(path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    dataset = ChunkDataset(path)
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"locality": "node"},
            "per node, is '', which does not divide the world_size of 4: start training with torchrun",
        ),
        ({"locality": "rack"}, "locality is 'rack': pass 'node' or a number of nodes"),
        ({"locality": 3}, "lanes is 4, which is not a multiple of nodes 3: pass a multiple"),
        ({"locality": 0}, "locality is 0"),
    ]
    for options, message in wrong:
        with pytest.raises(OptionError, match=message):
            ChunkSampler(dataset, 6, rank=0, world_size=4, **options)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(OptionError, match="per node, is '3', which does not divide the world_size of 4"):
        ChunkSampler(dataset, 6, rank=0, world_size=4, locality="node")
