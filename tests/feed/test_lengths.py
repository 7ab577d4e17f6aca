"""Batches by length: budgets of elements and buckets, exactly once, on any number of ranks, and resumed."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.transforms import Pack

COUNT, MOST = 1500, 600
LENGTHS = np.random.default_rng(2).lognormal(3, 0.7, COUNT).astype(np.int64)
LENGTHS[[3, 700]] = 0, MOST
WAYS: list[dict[str, Any]] = [
    {"batch_elements": MOST},
    {"batch_elements": MOST, "packed": True},
    {"batch_elements": 800, "bucket_batches": 10},
    {"batch_elements": 800, "batch_size": 12},
    {"batch_size": 16, "bucket_batches": 10},
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> h5chunk.ChunkDataset:
    path = tmp_path_factory.mktemp("lengths") / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("values", data=np.repeat(np.arange(COUNT), LENGTHS), chunks=(4000,), compression="gzip")
        file["lengths"], file["number"] = LENGTHS, np.arange(COUNT)
    return h5chunk.ChunkDataset(path, fields=["values", "number"], lengths={"values": "lengths"})


def sampler_of(dataset: h5chunk.ChunkDataset, *, packed: bool = False, **options: Any) -> h5chunk.ChunkSampler:
    return h5chunk.ChunkSampler(dataset.with_transforms(Pack()) if packed else dataset, **options)


def _elements(batch: list[int], way: dict[str, Any]) -> int:
    lengths = np.maximum(LENGTHS[batch], 1)
    return int(lengths.sum() if way.get("packed") else len(lengths) * lengths.max(initial=0))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_sample_comes_once_and_no_batch_is_too_large(dataset: h5chunk.ChunkDataset, way: dict[str, Any]) -> None:
    sampler = sampler_of(dataset, **way)
    for _ in range(2):
        count, batches = len(sampler), list(sampler)
        assert len(batches) == count and sorted(n for batch in batches for n in batch) == list(range(COUNT))
        assert all(len(batch) <= way.get("batch_size", COUNT) for batch in batches)
        assert all(_elements(batch, way) <= way.get("batch_elements", 1 << 40) for batch in batches)
        assert sum(_elements(batch, way) for batch in batches) > 0.7 * len(batches) * way.get("batch_elements", 0)


@pytest.mark.parametrize("change", [{"max_elements": 2 * MOST}, {"lengths": LENGTHS // 2}])
def test_a_copy_of_an_order_counts_its_own_batches(dataset: h5chunk.ChunkDataset, change: dict[str, Any]) -> None:
    order = h5chunk.ChunkSampler(dataset, batch_elements=MOST).order
    assert order.num_batches > 1.5 * replace(order, **change).num_batches > 0
    assert order.num_batches == replace(order, rank=0).num_batches


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_have_equally_many_batches(dataset: h5chunk.ChunkDataset, way: dict[str, Any], drop_last: bool) -> None:
    options = {**way, "drop_last": drop_last, "world_size": 3}
    samplers = [sampler_of(dataset, rank=rank, **options) for rank in range(3)]
    batches = [list(sampler) for sampler in samplers]
    assert len({len(own) for own in batches}) == 1 and all(all(own) for own in batches)
    seen = [number for own in batches for batch in own for number in batch]
    assert len(set(seen)) == len(seen)
    assert len(seen) == COUNT if not drop_last else COUNT - 3 * 80 < len(seen) < COUNT
    if drop_last and "batch_elements" not in way:
        assert {len(batch) for own in batches for batch in own} == {16}


def test_an_empty_batch_warns_and_pad_avoids_it(dataset: h5chunk.ChunkDataset) -> None:
    """In every case in which there is one, and in no other."""
    seen = set()
    ranks: dict[str, Any] = {"batch_elements": 600, "batch_size": 2, "window_chunks": 1, "world_size": 3}
    for count in range(40, 80):
        part = dataset.subset(13 * np.arange(count))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            plain = [list(h5chunk.ChunkSampler(part, rank=rank, **ranks)) for rank in range(3)]
        empty = sum(not all(batches) for batches in plain)
        assert [str(each.message).split(":")[0] for each in found] == [
            f"a batch at the end of the next epoch is empty on {empty} of 3 ranks"
        ] * (empty > 0)
        samplers = [h5chunk.ChunkSampler(part, rank=rank, pad=True, **ranks) for rank in range(3)]
        padded = [list(sampler) for sampler in samplers]
        assert len({len(batches) for batches in padded}) == 1 and all(all(batches) for batches in padded)
        assert {number for batches in padded for batch in batches for number in batch} == set(range(count))
        assert empty or padded == plain
        if empty:
            loader = h5chunk.ChunkLoader(part, batch_sampler=h5chunk.ChunkSampler(part, rank=2, pad=True, **ranks))
            assert [batch[1].tolist() for batch in loader] == [part.samples[own].tolist() for own in padded[2]]
        seen.add(empty > 0)
    assert seen == {True, False}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_a_loader_returns_the_samplers_batches_and_resumes(
    dataset: h5chunk.ChunkDataset, way: dict[str, Any], resident: bool, pack: bool
) -> None:
    part = dataset.subset(np.arange(COUNT) % 3 > 0)
    sampler, transforms = sampler_of(part, seed=7, **way), [Pack()] if pack else None
    expected = [part.samples[batch].tolist() for batch in sampler_of(part, seed=7, **way)]
    with h5chunk.ChunkLoader(part, batch_sampler=sampler, transforms=transforms, resident=resident) as loader:
        batches = list(loader)
        assert [batch[1].tolist() for batch in batches] == expected and loader.report.samples == len(part)
        for (values, where), numbers in batches[::5]:
            assert values.sum() == int((LENGTHS[numbers.numpy()] * numbers.numpy()).sum())
            assert (where.diff() if pack else where).tolist() == LENGTHS[numbers.numpy()].tolist()
        state = {**loader.state_dict(), "epoch": 0, "batch": 11}
        loader.load_state_dict(state)
        assert [batch[1].tolist() for batch in loader] == expected[11:]
    sampler.load_state_dict(state)
    assert [part.samples[batch].tolist() for batch in sampler] == expected[11:]


def test_weights_a_data_loader_with_a_worker_and_options_of_the_loader(dataset: h5chunk.ChunkDataset) -> None:
    sampler = h5chunk.ChunkSampler(dataset, batch_elements=800, weights=np.arange(COUNT) % 2)
    seen = torch.cat([batch[1] for batch in DataLoader(dataset, batch_sampler=sampler, num_workers=1)])
    assert len(seen) == COUNT and (seen % 2 == 1).all()
    padded = [batch[0].values.numel() for batch in h5chunk.ChunkLoader(dataset, batch_elements=800)]
    packed = [
        batch[0].values.numel() for batch in h5chunk.ChunkLoader(dataset, batch_elements=800, transforms=[Pack()])
    ]
    assert max(padded) <= 800 >= max(packed) and len(packed) < len(padded)
    again = h5chunk.ChunkLoader(dataset, batch_elements=800, shuffle=False)
    assert torch.cat([batch[1] for batch in again]).tolist() == list(range(COUNT))


def test_buckets_save_padding_and_state_their_cost(dataset: h5chunk.ChunkDataset) -> None:
    report = h5chunk.ChunkSampler(dataset, 16, bucket_batches=20).report()
    padded = sum(_elements(batch, {}) for batch in h5chunk.ChunkSampler(dataset, 16, bucket_batches=20))
    assert report.padding == pytest.approx(1 - LENGTHS.sum() / padded, abs=0.01)
    assert report.padding < 0.3 and report.padding_unsorted > 0.6 and report.effective_batch < 3
    groups = np.arange(COUNT) % 5
    assert h5chunk.ChunkSampler(dataset, 16, bucket_batches=20).report(groups).effective_batch > 13
    few = h5chunk.ChunkSampler(dataset, 16, bucket_batches=2).report()
    assert report.padding < few.padding < few.padding_unsorted and report.effective_batch < few.effective_batch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "batch_size is missing"),
        ({"batch_elements": MOST - 1}, r"sample 700 has 600: .*sample_lengths <= 599"),
        ({"batch_elements": 0}, "batch_elements is 0"),
        ({"batch_elements": 800, "batch_size": 0}, "batch_size is 0"),
        ({"batch_elements": 800, "num_workers": 4}, "num_workers is 4"),
        ({"batch_elements": 800, "lanes": 4, "rank": 0, "world_size": 2}, "one lane per rank"),
        ({"batch_size": 8, "bucket_batches": 0}, "bucket_batches is 0"),
    ],
)
def test_invalid_options(dataset: h5chunk.ChunkDataset, options: Any, message: str) -> None:
    with pytest.raises(h5chunk.OptionError, match=message):
        sampler_of(dataset, **options)


def test_other_data_echoes_and_states_of_other_budgets(dataset: h5chunk.ChunkDataset, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = np.arange(9)
    with pytest.raises(h5chunk.FieldError, match="no field has samples that differ in length"):
        h5chunk.ChunkLoader(h5chunk.ChunkDataset(tmp_path / "b.h5", fields=["x"]), batch_elements=5)
    with pytest.raises(h5chunk.OptionError, match="leave echo out"):
        h5chunk.ChunkLoader(dataset, batch_elements=800, echo=2)
    samplers = [h5chunk.ChunkSampler(dataset, batch_elements=number) for number in (800, 801)]
    with pytest.raises(h5chunk.StateError, match="batch_elements=800, not 801"):
        samplers[1].load_state_dict(samplers[0].state_dict())
    with pytest.raises(h5chunk.StateError, match="batch_elements=800, but the sampler has no batch_elements"):
        h5chunk.ChunkSampler(dataset, samplers[0].order.batch_size).load_state_dict(samplers[0].state_dict())
