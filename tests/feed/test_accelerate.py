"""Hugging Face Accelerate: what ``prepare`` makes of a DataLoader, and checkpoints from the middle of an epoch."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.leftovers import nothing_is_left
from support.loader_files import path
from support.orders import ordered
from torch import nn
from torch.utils.data import DataLoader

from h5chunk.errors import OptionError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.transforms import Normalize, ToDtype

accelerate = pytest.importorskip("accelerate")

from accelerate.data_loader import prepare_data_loader  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DataLoaderConfiguration  # noqa: E402

__all__ = ["nothing_is_left", "path"]

pytestmark = pytest.mark.filterwarnings("ignore")  # those of others: torchdata's, torch's about few cores

ORDER = {"window_chunks": 5, "seed": 3}
NUM_BATCHES = 13

Batches = list[list[int]]


def forget() -> None:
    """Be a fresh process to Accelerate."""
    AcceleratorState._reset_state(True)


@pytest.fixture(autouse=True)
def nothing_is_shared():
    yield
    forget()


def labels_of(batches: Any) -> Batches:
    return [labels.tolist() for _, labels in batches]


def expected_epochs(path: Path, num_workers: int | None = None) -> list[Batches]:
    sampler = ChunkSampler(ChunkDataset(path), 16, num_workers=num_workers, **ORDER)
    return [list(sampler) for _ in range(3)]


def prepared(path: Path, num_workers: int, *, stateful: bool) -> tuple[Any, Any]:
    """An accelerator, as in a fresh process, with a model and a loader."""
    forget()
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    dataset = ChunkDataset(path)
    loader = DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 16, **ORDER), num_workers=num_workers)
    model = nn.Linear(2, 1)
    _, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return accelerator, loader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_dataloader_is_saved_with_all_else(path, tmp_path, num_workers):
    """``save_state`` in the middle of an epoch, ``load_state`` in another process: sample by sample."""
    pytest.importorskip("torchdata.stateful_dataloader")
    epochs = expected_epochs(path)
    for number, (epoch, cut) in enumerate([(0, 1), (0, 6), (1, 3), (1, NUM_BATCHES - 1)]):
        accelerator, loader = prepared(path, num_workers, stateful=True)
        for _ in range(epoch):
            assert len(list(loader)) == NUM_BATCHES
        batches = iter(loader)
        seen = labels_of(islice(batches, cut))
        accelerator.save_state(tmp_path / str(number))
        del batches
        loader.dataset.close()
        accelerator, loader = prepared(path, num_workers, stateful=True)
        accelerator.load_state(tmp_path / str(number))
        assert seen + labels_of(loader) == epochs[epoch]
        loader.set_epoch(epoch + 1)  # Accelerate counts from 0 in each process
        assert labels_of(loader) == epochs[epoch + 1]
        loader.dataset.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_first_batches_are_skipped(path, num_workers):
    epochs = expected_epochs(path)
    for epoch, cut in ((0, 5), (2, 1)):
        accelerator, loader = prepared(path, num_workers, stateful=False)
        loader.set_epoch(epoch)
        assert labels_of(accelerator.skip_first_batches(loader, cut)) == epochs[epoch][cut:]
        loader.dataset.close()


def dealt_out(path: Path, process: int, **ranks: int) -> Any:
    """What ``prepare`` makes of a DataLoader on one of two processes."""
    dataset = ChunkDataset(path)
    loader = DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 16, **ORDER, **ranks))
    return prepare_data_loader(loader, num_processes=2, process_index=process, put_on_device=False, even_batches=False)


def test_a_sampler_is_dealt_out_once(path):
    """By Accelerate, if it is told that it is alone; one that knows of ranks itself would lose half of the samples."""
    each = [labels_of(dealt_out(path, rank, rank=0, world_size=1)) for rank in range(2)]
    assert each == [expected_epochs(path)[0][rank::2] for rank in range(2)]
    with pytest.raises(OptionError, match=r"divided the samples among 2 ranks.* pass rank=0"):
        dealt_out(path, 1, rank=1, world_size=2)
    assert not hasattr(ChunkSampler(ChunkDataset(path), 16), "batch_size")


def test_epochs_are_those_of_the_order(path):
    _, loader = prepared(path, 0, stateful=False)
    assert [labels_of(loader) for _ in range(3)] == expected_epochs(path)
    loader.set_epoch(1)
    assert labels_of(loader) == expected_epochs(path)[1]
    loader.dataset.close()


def test_a_chunkloader_is_registered(path, tmp_path):
    """It needs no ``prepare``: it knows ranks and devices, and is saved where it is registered."""
    epochs = expected_epochs(path, num_workers=0)

    def make() -> tuple[Any, ChunkLoader]:
        forget()
        accelerator = accelerate.Accelerator(cpu=True)
        loader = ChunkLoader(**ordered(path, 16, **ORDER), device=accelerator.device)
        assert accelerator.prepare(loader) is loader
        accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    for epoch, cut in ((0, 4), (1, 0), (1, NUM_BATCHES)):
        accelerator, loader = make()
        with loader:
            for _ in range(epoch):
                list(loader)
            seen = labels_of(islice(loader, cut))
            accelerator.save_state(tmp_path / f"{epoch}-{cut}")
        accelerator, loader = make()
        with loader:
            accelerator.load_state(tmp_path / f"{epoch}-{cut}")
            assert seen + labels_of(loader) == epochs[epoch]
            assert labels_of(loader) == epochs[epoch + 1]


def brighter(batch: torch.Tensor) -> torch.Tensor:
    """A function of a batch."""
    return batch + batch.mean()


def test_the_first_batches_of_a_loader_are_skipped(path):
    """As transformers' Trainer does to resume: through a DataLoader, with all transforms."""
    transforms = [Normalize(100, 50), ToDtype(torch.float32, channels_last=True), brighter]
    order = ChunkSampler(ChunkDataset(path), 16, **ORDER)
    with ChunkLoader(path, batch_sampler=order, transforms=transforms) as loader:
        epochs = [[[field.clone() for field in batch] for batch in loader] for _ in range(3)]
        loader.set_epoch(1)
        rest = accelerate.skip_first_batches(loader, 4)
        for batches, expected in ((rest, epochs[1][4:]), (loader, epochs[2])):
            for batch, wanted in zip(batches, expected, strict=True):
                assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(batch, wanted, strict=True))
