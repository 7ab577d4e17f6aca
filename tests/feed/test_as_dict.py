"""Batches and samples as dicts, with one item for each field."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.matrices import random_matrix, write
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate

import h5chunk
from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler, OptionError
from h5chunk.transforms import Csr, HoldOut, Pack, Pad

COUNT, BATCH = 40, 8
RANDOM = np.random.default_rng(5)
LENGTHS = RANDOM.integers(1, 9, COUNT)
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)])
TOKENS = RANDOM.integers(1, 100, STARTS[-1])
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = RANDOM.integers(0, 255, (COUNT, 3, 4, 4), np.uint8)
        file["labels"] = np.arange(COUNT)
        file["names"] = [f"name {number}".encode() for number in range(COUNT)]
        file["tokens"], file["starts"] = TOKENS, STARTS
    return tmp_path / "a.h5"


def open_texts(path: Path, *others: str, **options: Any) -> ChunkDataset:
    fields = {"input_ids": "tokens", "labels": "labels", **{name: name for name in others}}
    return ChunkDataset(path, fields=fields, offsets={"input_ids": "starts"}, as_dict=True, **options)


def check_texts(batch: Mapping[str, Any], numbers: Any = None) -> None:
    """Assert that a padded batch has the tokens of its samples."""
    values, lengths = batch["input_ids"]
    assert batch["input_ids"].values is values and batch["input_ids"].lengths is lengths
    assert numbers is None or batch["labels"].tolist() == list(numbers)
    for row, length, number in zip(values, lengths.tolist(), batch["labels"].tolist(), strict=True):
        assert row[:length].tolist() == TOKENS[STARTS[number] : STARTS[number + 1]].tolist() and not row[length:].any()


def through(dataset: ChunkDataset, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    context = "fork" if num_workers else None
    sampler = ChunkSampler(dataset, BATCH)
    return DataLoader(
        dataset, batch_sampler=sampler, num_workers=num_workers, multiprocessing_context=context, **options
    )


WAYS = {
    "streamed": {},
    "reused": {"reuse": True},
    "resident": {"resident": True},
    "gpu": pytest.param({"device": "cuda"}, marks=NEEDS_GPU),
    "resident on a gpu": pytest.param({"device": "cuda", "resident": True}, marks=NEEDS_GPU),
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_loader(path: Path, options: dict[str, Any]) -> None:
    dataset = open_texts(path, "images", "sample_number")
    with ChunkLoader(dataset, BATCH, **options) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                assert type(batch) is dict and (*batch,) == dataset.fields
                check_texts({name: tree_map(torch.Tensor.cpu, item) for name, item in batch.items()})
                assert batch["labels"].equal(batch["sample_number"]) and batch["images"].shape == (BATCH, 3, 4, 4)
                seen += batch["labels"].tolist()
            assert sorted(seen) == list(range(COUNT))


def test_echoes_and_functions(path: Path) -> None:
    transforms = {"images": lambda images: images / 255, "labels": lambda labels: labels + 1}
    with ChunkLoader(path, BATCH, echo=2, as_dict=True, transforms=transforms) as loader:
        batches = list(loader)
    assert len(batches) == 10 and {(*batch,) for batch in batches} == {("images", "labels")}
    assert sorted(torch.cat([batch["labels"] for batch in batches]).tolist()) == sorted([*range(1, COUNT + 1)] * 2)
    assert all(batch["images"].dtype == torch.float32 for batch in batches)


def test_the_loader_s_own_argument_goes_first(path: Path) -> None:
    named, plain = ChunkDataset(path, as_dict=True), ChunkDataset(path)
    for data, as_dict, kind in ((named, False, tuple), (plain, True, dict), (path, True, dict), (path, None, tuple)):
        with ChunkLoader(data, BATCH, as_dict=as_dict) as loader:
            assert type(next(iter(loader))) is kind is type(loader.dataset[0])
    assert named.as_dict and not plain.as_dict
    for make in (ChunkDataset, partial(ChunkLoader, batch_size=8)):
        with pytest.raises(OptionError, match="as_dict is 'yes': pass True or False"):
            make(path, as_dict="yes")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader(path: Path, num_workers: int) -> None:
    dataset = open_texts(path, "names", "images")
    for part in (dataset, open_texts(path)):  # with strings, and without, which are sent in another way
        seen = []
        for batch in through(part, num_workers):
            assert type(batch) is dict and (*batch,) == part.fields
            check_texts(batch)
            seen += batch["labels"].tolist()
            assert batch.get("names", []) in ([], [f"name {number}" for number in batch["labels"].tolist()])
        assert sorted(seen) == list(range(COUNT))


def test_a_worker_sends_what_its_collate_fn_returns(path: Path) -> None:
    def changed(samples: Any) -> Any:
        batch = h5chunk.collate(samples)
        batch["labels"] = batch["labels"] + 100
        batch["mask"] = torch.arange(batch["input_ids"].values.shape[1]) < batch["input_ids"].lengths[:, None]
        return batch

    for batch in through(open_texts(path), 1, collate_fn=changed):
        assert type(batch) is dict and (*batch,) == ("input_ids", "labels", "mask")
        assert batch["labels"].min() >= 100 and batch["mask"].sum(1).equal(batch["input_ids"].lengths)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_gets_dicts_of_samples(path: Path, num_workers: int) -> None:
    def stacked(features: list[Any]) -> dict[str, Any]:  # as transformers' default_data_collator does
        assert isinstance(features[0], Mapping) and type(features) is not list
        return {name: torch.stack([each[name] for each in features]) for name in features[0]}

    dataset = ChunkDataset(path, fields=["images", "labels"], as_dict=True)
    for batch in through(dataset, num_workers, collate_fn=stacked):
        assert batch["images"].equal(dataset[batch["labels"].tolist()]["images"])


def test_samples(path: Path) -> None:
    dataset = open_texts(path, "names")
    sample = dataset[5]
    assert type(sample) is dict and sample["names"] == "name 5" and sample["labels"] == 5
    assert sample["input_ids"].values.tolist() == TOKENS[STARTS[5] : STARTS[6]].tolist()
    assert sample["input_ids"].lengths == LENGTHS[5]
    check_texts(dataset[[7, 3]], [7, 3])
    check_texts(dataset[2:6], range(2, 6))
    check_texts(default_collate([dict(each) for each in dataset.__getitems__([7, 3])]), [7, 3])
    check_texts(dataset.subset([4, 9])[[1, 0]], [9, 4])
    check_texts(pickle.loads(pickle.dumps(dataset))[[7, 3]], [7, 3])
    assert {name: len(item[0] if name == "input_ids" else item) for name, item in dataset[[]].items()} == {
        "input_ids": 0,
        "labels": 0,
        "names": 0,
    }
    dataset.transforms = {"labels": lambda label: label * 2}  # of single samples
    assert dataset[5]["labels"] == 10 and dataset[[7, 3]]["labels"].tolist() == [14, 6]
    assert [batch["labels"].sum() for batch in DataLoader(dataset, COUNT)] == [COUNT * (COUNT - 1)]
    assert dataset[[]]["labels"].shape == (0,)


@pytest.mark.parametrize("way", [ChunkLoader, through])
def test_packed_samples(path: Path, way: Any) -> None:
    dataset = open_texts(path, transforms=Pack())
    for batch in ChunkLoader(dataset, BATCH) if way is ChunkLoader else through(dataset, 1):
        values, offsets = batch["input_ids"].values, batch["input_ids"].offsets
        parts = [TOKENS[STARTS[number] : STARTS[number + 1]] for number in batch["labels"]]
        assert values.tolist() == np.concatenate(parts).tolist() and offsets.diff().tolist() == list(map(len, parts))
    assert dataset[5]["input_ids"].lengths == len(dataset[5]["input_ids"].values) == LENGTHS[5]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("layout", [[], [Csr()]])
def test_a_matrix_and_held_out_entries(tmp_path: Path, num_workers: int, layout: list[Any]) -> None:
    path = write(tmp_path / "m.h5", random_matrix(COUNT, 30, 5), fields={"labels": np.arange(COUNT)})
    options = {"fields": ["X", "labels"], "as_dict": True}
    whole = ChunkDataset(path, transforms=layout, **options)
    dataset = whole.with_transforms([HoldOut(0.4), *layout])
    for batch in [*through(dataset, num_workers), *ChunkLoader(dataset, BATCH)]:
        assert (*batch,) == ("X", "labels")
        inputs, targets = (part.to_dense() for part in (batch["X"].inputs, batch["X"].targets))
        assert (inputs + targets).equal(whole[batch["labels"].tolist()]["X"].to_dense()) and targets.any()


class Model(torch.nn.Module):
    """Takes its batch by keywords, and returns a dict with the loss, like the models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, COUNT, padding_idx=0)

    def forward(self, input_ids: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.embedding(input_ids.values).sum(1) / input_ids.lengths[:, None]
        return {"loss": torch.nn.functional.cross_entropy(scores, labels)}


def prepared(data: Any) -> Any:
    """Move a batch to the device, as transformers' Trainer does."""
    if isinstance(data, Mapping):
        return type(data)({name: prepared(value) for name, value in data.items()})
    if isinstance(data, (tuple, list)):
        return type(data)(prepared(value) for value in data)
    return data.to("cpu")


@pytest.mark.parametrize("way", ["loader", "data loader"])
def test_a_model_that_takes_keywords_is_trained(path: Path, way: str) -> None:
    torch.manual_seed(0)
    dataset, model = open_texts(path, transforms=Pad(0)), Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    batches = ChunkLoader(dataset, BATCH) if way == "loader" else through(dataset, 1)
    losses = []
    for _ in range(8):
        for batch in batches:
            loss = model(**prepared(batch))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4


def test_the_rest_of_an_epoch_through_a_data_loader(path: Path) -> None:
    """As Accelerate skips batches."""
    transforms = {"images": lambda images: images.float()}
    with ChunkLoader(open_texts(path, "images"), BATCH, shuffle=False, transforms=transforms) as loader:
        whole = list(loader)
        rest = list(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn))
    for one, other in zip(rest, whole, strict=True):
        assert type(one) is dict and one["images"].equal(other["images"]) and one["images"].dtype == torch.float32
        assert one["input_ids"].values.equal(other["input_ids"].values)


def test_copies_of_pairs_and_pytrees(path: Path) -> None:
    pair = open_texts(path)[[3, 1]]["input_ids"]
    for copied in (pickle.loads(pickle.dumps(pair)), pair._replace(), tree_map(lambda tensor: tensor, pair)):
        assert type(copied) is type(pair) and copied.lengths.equal(pair.lengths)
    samples = open_texts(path).__getitems__([3, 1])
    doubled = tree_map(lambda tensor: tensor * 2, samples)
    assert doubled[0]["labels"] == 6 and doubled[1]["input_ids"].lengths == 2 * LENGTHS[1]
