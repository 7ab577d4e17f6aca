"""Lightning's Trainer with ChunkLoaders: a resumed training sees exactly what an uninterrupted one sees."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.leftovers import nothing_is_left
from support.loader_files import N, path
from support.orders import ordered
from support.pictures import pixels
from torch import nn

import h5chunk
from h5chunk.errors import FieldError, OptionError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.transforms import ToDtype

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from h5chunk.lightning import ChunkDataModule  # noqa: E402

__all__ = ["nothing_is_left", "path"]

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of which there are many

ORDER = {"window_chunks": 5, "seed": 3}
NUM_BATCHES = 13
Seen = list[tuple[int, int, list[int]]]


class Noting(lightning.LightningModule):
    """A small regression, which notes the labels of each batch: (epoch, number of the batch, labels)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(90, 1)
        self.seen: Seen = []
        self.evaluated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        self.seen.append((self.current_epoch, batch_idx, labels.tolist()))
        return self.layer(images.float().flatten(1) / 255).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch[1].tolist()

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": 3, "num_sanity_val_steps": 0, "enable_checkpointing": bool(callbacks), **options}
    return lightning.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, callbacks=list(callbacks), **quiet, **options
    )


def fit(folder: Path, data: Any, *callbacks: Any, checkpoint: Path | None = None, **options: Any) -> Noting:
    model = Noting()
    how = {"datamodule": data} if isinstance(data, lightning.LightningDataModule) else {"train_dataloaders": data}
    trainer_of(folder, *callbacks, **options).fit(model, **how, ckpt_path=checkpoint)
    if isinstance(data, ChunkLoader):
        data.close()
    return model


def check_resume(folder: Path, make: Any, **options: Any) -> Noting:
    """A checkpoint after every step, and one after every epoch: from each of them on, the same batches and weights."""
    steps = ModelCheckpoint(folder / "steps", "{step}", save_top_k=-1, every_n_train_steps=1)
    epochs = ModelCheckpoint(folder / "epochs", "{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    whole = fit(folder, make(), steps, epochs, **options)
    num_batches = len(whole.seen) // 3
    ends = [1, 4, num_batches - 1, num_batches, num_batches + 1, 2 * num_batches - 2, 3 * num_batches - 1]
    cuts = [folder / "steps" / f"step={step}.ckpt" for step in ends]
    cuts += [folder / "epochs" / f"step={num_batches * epoch}.ckpt" for epoch in (1, 2)]
    for cut in cuts:
        resumed = fit(folder, make(), checkpoint=cut, **options)
        step = int(cut.stem.removeprefix("step="))
        assert resumed.seen == whole.seen[step:], cut
        assert torch.equal(resumed.layer.weight, whole.layer.weight)
    return whole


def expected_epochs(path: Path, **options: Any) -> Seen:
    """What the sampler says."""
    sampler = ChunkSampler(ChunkDataset(path), 16, **{"num_workers": 0, **ORDER, **options})
    return [(epoch, number, batch) for epoch in range(3) for number, batch in enumerate(sampler)]


@pytest.mark.parametrize("resident", [False, True])
def test_a_loader_in_a_trainer(path, tmp_path, resident):
    whole = check_resume(tmp_path, lambda: ChunkLoader(**ordered(path, 16, **ORDER), resident=resident))
    assert whole.seen == expected_epochs(path)
    for epoch in range(3):
        assert sorted(label for at, _, labels in whole.seen for label in labels if at == epoch) == list(range(N))


def test_the_next_epoch_is_read_ahead(path, tmp_path):
    """The Trainer takes as many batches as there are, and never looks for the end: the threads go on nevertheless."""
    feeds = set()

    class Looking(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            feeds.add(id(trainer.train_dataloader._feed))

    fit(tmp_path, ChunkLoader(**ordered(path, 16, **ORDER)), Looking())
    assert len(feeds) == 1


def test_a_trainer_that_takes_fewer_batches(path, tmp_path):
    """Epochs of five batches are those that the order begins with."""
    model = fit(tmp_path, ChunkLoader(**ordered(path, 16, **ORDER)), limit_train_batches=5)
    assert model.seen == [each for each in expected_epochs(path) if each[1] < 5]


def test_a_dataloader_in_a_trainer(path, tmp_path):
    """The epoch of a sampler is the Trainer's, also after a checkpoint from between two."""
    from torch.utils.data import DataLoader

    def make() -> DataLoader:
        dataset = ChunkDataset(path)
        return DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 16, **ORDER))

    epochs = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    loader = make()
    whole = fit(tmp_path, loader, epochs)
    resumed = fit(tmp_path, other := make(), checkpoint=tmp_path / "step=26.ckpt")
    loader.dataset.close(), other.dataset.close()
    assert whole.seen == expected_epochs(path, num_workers=None)
    assert resumed.seen == whole.seen[26:]


def test_a_stateful_dataloader_in_a_trainer(path, tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    made = []

    def make() -> Any:
        dataset = ChunkDataset(path)
        made.append(dataset)
        return stateful.StatefulDataLoader(dataset, batch_sampler=ChunkSampler(dataset, 16, **ORDER))

    assert check_resume(tmp_path, make).seen == expected_epochs(path, num_workers=None)
    for dataset in made:
        dataset.close()


# ChunkDataModule


def make_module(path: Path, **options: Any) -> ChunkDataModule:
    return ChunkDataModule(path, 16, train_order=ORDER, **options)


def test_one_file_in_three_loaders_out(path, tmp_path):
    data = make_module(path)
    model = check_resume(tmp_path, lambda: make_module(path))
    train = [label for epoch, _, labels in model.seen for label in labels if epoch == 0]
    assert len(model.seen) == 3 * 11 and sorted(train) == data.datasets[0].samples.tolist()  # all 162
    val = model.evaluated[: len(model.evaluated) // 3]
    assert model.evaluated == 3 * val and val == sorted(val)
    model.evaluated = []
    trainer_of(tmp_path).test(model, datamodule=data, verbose=False)
    parts = [dataset.samples.tolist() for dataset in data.datasets]
    assert (val, model.evaluated) == (parts[1], parts[2])
    assert sorted(sum(parts, [])) == list(range(N))  # noqa: RUF017


def test_resumed_over_epochs_with_validation_in_the_middle(path, tmp_path):
    check_resume(tmp_path, lambda: make_module(path), val_check_interval=4)


TWO_PROCESSES = """
import json, sys
from pathlib import Path
from test_lightning import ChunkDataModule, ModelCheckpoint, Noting, lightning
folder = Path(sys.argv[1])
options = {"lanes": 4, "window_chunks": 5, "drop_last": False}
data = ChunkDataModule(folder / "a.h5", 12, split=(0.75, 0.25), train_order=options)
every = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=[every], **quiet)
trainer.fit(model := Noting(), datamodule=data)
(folder / f"{trainer.global_rank}.json").write_text(json.dumps([model.seen, model.evaluated]))
"""


def test_two_processes_and_then_one(path, tmp_path):
    """The Trainer says who reads what; its checkpoint is of both, and one process goes on with the same steps."""
    (tmp_path / "train.py").write_text(TWO_PROCESSES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-W", "ignore", tmp_path / "train.py", tmp_path]
    subprocess.run(command, check=True, env=environment, timeout=120, capture_output=True)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    steps = [
        (epoch, number, sorted([*labels, *others]))
        for (epoch, number, labels), (_, _, others) in zip(ranks[0][0], ranks[1][0], strict=True)
    ]
    options = {"lanes": 4, "window_chunks": 5, "drop_last": False}
    data = ChunkDataModule(path, 24, split=(0.75, 0.25), train_order=options)
    resumed = fit(tmp_path, data, checkpoint=tmp_path / "step=3.ckpt", max_epochs=2)
    assert [(epoch, number, sorted(labels)) for epoch, number, labels in resumed.seen] == steps[3:]
    parts = [dataset.samples.tolist() for dataset in data.datasets[:2]]
    assert sorted(label for epoch, _, labels in steps for label in labels if epoch == 1) == parts[0]
    assert sorted(ranks[0][1] + ranks[1][1]) == sorted(2 * parts[1])  # each once in each of two epochs


def test_two_parts_and_no_test(path):
    data = make_module(path, split=(0.75, 0.25))
    train, val, test = data.datasets
    assert (len(train), len(val), test) == (152, 51, None)
    assert data.test_dataloader() == []
    with data.val_dataloader() as loader:
        assert len(loader) == 4
    data.teardown("fit")


def test_a_file_each(path, tmp_path):
    copy = tmp_path / "copy.h5"
    copy.write_bytes(path.read_bytes())
    data = make_module(path, val=ChunkDataset(path).subset(np.arange(9)), test=copy, eval_batch_size=100)
    train, val, test = data.datasets
    assert (len(train), len(val), len(test), test.path) == (N, 9, N, str(copy))
    with data.test_dataloader() as loader:
        assert [len(labels) for _, labels in loader] == [100, 100, 3]
    assert make_module(path, val=copy).test_dataloader() == []


def test_strata(path):
    data = ChunkDataModule(path, 16, fields=["images"], stratify="labels", split=(0.5, 0.5), split_seed=4)
    assert data.datasets[0].fields == ("images",)
    assert abs(len(data.datasets[0]) - len(data.datasets[1])) <= N  # every label is a class of its own


def test_fields_beside_a_data_set(path):
    with pytest.raises(OptionError, match="fields is given together with a ChunkDataset"):
        make_module(ChunkDataset(path), fields=["images"]).train_dataloader()


def test_parts_are_the_folders_that_the_samples_were_in(tmp_path):
    for number in range(24):
        folder = tmp_path / "data" / ("training", "Valid", "train")[number % 3] / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number)).save(folder / f"{number}.png")
    h5chunk.convert(tmp_path / "data", tmp_path / "x.h5", workers=0)
    data = ChunkDataModule(tmp_path / "x.h5", 4)
    train, val, test = data.datasets
    assert (len(train), len(val), test) == (16, 8, None) and data.test_dataloader() == []
    assert set(val.values("split")) == {"Valid"}
    assert [len(part) for part in ChunkDataModule(tmp_path / "x.h5", 4, split=(0.5, 0.5)).datasets[:2]] == [12, 12]
    with pytest.raises(FieldError, match="fold"):
        _ = ChunkDataModule(tmp_path / "x.h5", 4, split="fold").datasets
    h5chunk.convert(tmp_path / "data", tmp_path / "y.h5", workers=0, split_folders="no")
    assert [len(part) for part in ChunkDataModule(tmp_path / "y.h5", 4).datasets] == [19, 3, 2]
    (tmp_path / "data" / "train").rename(tmp_path / "data" / "fold")
    h5chunk.convert(tmp_path / "data", tmp_path / "z.h5", workers=0, split_folders="yes")
    with pytest.raises(OptionError, match="field 'split' contains 'fold', which is not a part"):
        _ = ChunkDataModule(tmp_path / "z.h5", 4).datasets


def test_no_sample_is_left_out_unless_asked(path):
    """The defaults are those of ChunkLoader."""
    data = ChunkDataModule(path, 16, split=(1.0, 0.0))
    with data.train_dataloader() as loader, ChunkLoader(path, 16) as plain:
        assert (loader.order.drop_last, loader.order.pad) == (plain.order.drop_last, plain.order.pad) == (False, False)
        assert sum(len(labels) for _, labels in loader) == N
    data = ChunkDataModule(path, 16, split=(1.0, 0.0), train_order={"drop_last": True})
    with data.train_dataloader() as loader:
        assert sum(len(labels) for _, labels in loader) == N // 16 * 16


def test_pad_and_options_of_training(path):
    order, transforms = {"pad": True, "lanes": 4}, [ToDtype(torch.float64)]
    data = ChunkDataModule(path, 16, split=(1.0, 0.0), train_order=order, transforms=transforms)
    with data.train_dataloader() as loader:
        sizes = [len(images) for images, _ in loader]
        assert (loader.order.lanes, loader.order.drop_last) == (4, False)
        assert sizes == [16] * NUM_BATCHES and next(iter(loader))[0].dtype == torch.float64
    data.teardown("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": (0.5, 0.5), "val": "b.h5"}, "split or stratify divides one file, but val or test is given"),
        ({"stratify": "labels", "test": "b.h5"}, "split or stratify divides one file"),
        ({"split": (1.0,)}, r"split is \(1.0,\): pass the fractions"),
        ({"shuffle": False}, "shuffle is given, but the Trainer sets it"),
        ({"rank": 0}, "rank is given"),
    ],
)
def test_what_cannot_be(path, options, message):
    with pytest.raises(OptionError, match=message):
        ChunkDataModule(path, 16, **options)


def test_threads_end_with_the_training(path, tmp_path):
    data = make_module(path)
    fit(tmp_path, data, max_epochs=1)
    assert not data._loaders


def test_without_lightning(monkeypatch):
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "h5chunk.lightning")
    with pytest.raises(ImportError, match=r'needs Lightning: pip install "h5chunk\[lightning\]"'):
        importlib.import_module("h5chunk.lightning")


def test_overfitting_uses_the_same_batches_in_each_epoch(path, tmp_path):
    """Or says why it cannot."""

    def epochs(data: Any) -> list[list[list[int]]]:
        seen = fit(tmp_path, data, overfit_batches=2).seen
        return [[labels for at, _, labels in seen if at == epoch] for epoch in range(3)]

    first, *others = epochs(ChunkLoader(path, 16, shuffle=False))
    assert first == [list(range(16)), list(range(16, 32))] and others == [first, first]
    data = ChunkDataModule(path, 16, split=(0.8, 0.2))
    with pytest.warns(UserWarning, match="overfit_batches: training samples are not shuffled"):
        first, *others = epochs(data)
    assert others == [first, first]
    loader = ChunkLoader(path, 16)
    with pytest.raises(ValueError, match=r"ChunkLoader.*needs to subclass"):
        fit(tmp_path, loader, overfit_batches=2)
    loader.close()


def test_loaders_that_were_replaced_are_closed(path, tmp_path):
    made: list[ChunkLoader] = []

    class Noted(ChunkDataModule):
        def train_dataloader(self) -> ChunkLoader:
            new = super().train_dataloader()
            assert all(loader._feed is None for loader in made)
            made.append(new)
            return new

    model = fit(tmp_path, Noted(path, 16, split=(0.8, 0.2)), reload_dataloaders_every_n_epochs=1)
    assert len(made) == 3 and all(loader._feed is None for loader in made)
    epochs = [[label for at, _, labels in model.seen if at == epoch for label in labels] for epoch in range(3)]
    assert all(sorted(each) == sorted(epochs[0]) for each in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_divided_chunk_sampler_names_the_trainers_option(path):
    dataset = ChunkDataset(path)
    sampler = ChunkSampler(dataset, 16, rank=0, world_size=2)
    with pytest.raises(OptionError, match=r"for Lightning, pass Trainer\(use_distributed_sampler=False\)"):
        sampler.batch_size  # noqa: B018
