"""The ablation: that its training learns, that each switch is heard, and what is refused."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.scripts import load, needs_gpu, one_thread

import h5chunk

__all__ = ["one_thread"]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product on a GPU in this process
COUNT, SIZE, CLASSES = 150, 24, 3

ablation_train, ablation, make_images = load("ablation_train"), load("ablation"), load("make_images")
feeds, models = load("ablation_feeds"), load("models")
Settings = feeds.Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images") / "photos"
    options = {"folder": root, "count": COUNT, "size": (SIZE, SIZE), "classes": CLASSES}
    quality = {"quality": 95, "grain": 1, "format": "jpg", "seed": 0}
    make_images.make_share(argparse.Namespace(**options, **quality), 0, 1)
    return root


@pytest.fixture(scope="module")
def packed(folder: Path) -> Path:
    path = folder.with_suffix(".h5")
    h5chunk.convert(folder, path, workers=0, chunk_samples=8)
    return path


@pytest.fixture
def settings(packed: Path):
    return Settings(packed, device="cpu", batch_size=16, lr=3e-3)


def run(settings, utilisation_s=None, **changes):
    return ablation.train(replace(settings, **changes), utilisation_s)


def losses(settings, **changes) -> list[float]:
    return [epoch.loss for epoch in run(settings, **changes).epochs]


@pytest.mark.parametrize("loader", ["chunk", "dataset", "folder"])
def test_learns(settings, folder, loader):
    data = folder if loader == "folder" else settings.data
    first, *_, last = run(settings, data=data, loader=loader, epochs=4).epochs
    assert last.loss < 0.7 * first.loss
    assert last.accuracy > first.accuracy
    assert 0 < last.waiting < 1 and last.images_per_s > 0


def test_loaders_give_the_same_batches(settings):
    assert losses(settings, loader="chunk") == pytest.approx(losses(settings, loader="dataset"), rel=1e-4)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_change_nothing(settings):
    alone = losses(settings, loader="dataset")
    workers = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True}
    assert losses(settings, loader="dataset", **workers) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("loader", ["dataset", "folder"])
def test_transport_changes_nothing_but_the_bytes(settings, folder, loader):
    settings = replace(settings, loader=loader, data=folder if loader == "folder" else settings.data)
    assert losses(settings, transport="float32") == pytest.approx(losses(settings, transport="uint8"), rel=1e-3)
    dataset = feeds.open_dataset(replace(settings, transport="float32"))
    assert dataset[0][0].dtype == torch.float32


def test_deterministic(settings):
    first, second = (losses(settings, deterministic=True) for _ in range(2))
    assert first == second
    assert losses(settings, deterministic=True, seed=1) != first
    with ablation_train.kernels(replace(settings, deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "changes", [{"amp": "bf16"}, {"channels_last": True}, {"set_to_none": True}, {"model": "resnet9", "steps": 2}]
)
def test_ways_to_compute(settings, changes):
    assert all(np.isfinite(losses(settings, **changes)))


def test_cpu_threads(settings):
    with ablation_train.kernels(replace(settings, cpu_threads=2)):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1


def test_set_to_none_drops_the_gradients(settings):
    for wanted in (True, False):
        trainer = ablation_train.Trainer(replace(settings, set_to_none=wanted), (SIZE, SIZE), CLASSES)
        trainer.step(torch.zeros(2, 3, SIZE, SIZE), torch.tensor([0, 1]))
        assert (next(trainer.network.parameters()).grad is None) is wanted


def test_image_size_of_a_folder(settings, folder):
    dataset = feeds.open_dataset(replace(settings, data=folder, loader="folder", image_size=(10, 14)))
    assert dataset[0][0].shape == (3, 10, 14)


def test_augmented(settings):
    assert losses(settings, augment=(16, 16)) != losses(settings, augment=(24, 24)) != losses(settings)


def test_steps_make_an_epoch(settings):
    epochs = run(settings, steps=4, epochs=3).epochs
    assert [epoch.num_images for epoch in epochs] == [4 * 16] * 3


def test_prefetch_stream_is_one_batch_ahead(monkeypatch):
    done: list[tuple] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_stream(self, stream: str) -> None:
            done.append(("keep", self.name))

    def place(images: str, labels: str) -> tuple[Part, Part]:
        done.append(("send", images))
        return Part(images), Part(labels)

    training = SimpleNamespace(wait_stream=lambda stream: done.append(("wait",)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    place.device = "cuda"
    for images, _labels in feeds.PrefetchStream(place).over([("a", "1"), ("b", "2")]):
        done.append(("train", images.name))
    assert done == [
        ("send", "a"),
        *[("wait",), ("keep", "a"), ("keep", "1"), ("send", "b"), ("train", "a")],
        *[("wait",), ("keep", "b"), ("keep", "2"), ("train", "b")],
    ]


def test_echo(settings):
    given = run(settings, echo=2.0, epochs=1)
    assert given.epochs[0].num_images == 2 * (COUNT // 16) * 16
    assert given.fresh_images_per_s == [pytest.approx(given.epochs[0].images_per_s / 2)]


def test_resident(settings):
    given = run(settings, resident="yes")
    assert "resident" in given.loader
    assert "resident" not in run(settings, resident="no").loader


def test_utilisation_leaves_no_trace(settings):
    measured = run(settings, 0.01)
    assert [epoch.loss for epoch in measured.epochs] == losses(settings)
    assert len(measured.cached_images_per_s) == 2 and min(measured.cached_images_per_s) > 0
    assert run(settings).cached_images_per_s == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"amp": "fp16"}, "needs a GPU"),
        ({"model": "vit_b_16", "channels_last": True}, "convolutions"),
        ({"loader": "dataset", "prefetch_factor": 2}, "--num-workers is 0, but --prefetch-factor"),
        ({"steps": 0}, "--steps is 0"),
        ({"cpu_threads": 0}, "--cpu-threads is 0"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"epochs": 0}, "--epochs is 0"),
        ({"cpu_threads": 1, "device": "cuda"}, "--cpu-threads is for training on a CPU"),
        ({"echo": 0.5}, "echo is 0.5"),
    ],
)
def test_what_would_do_nothing_is_refused(settings, changes, message):
    with pytest.raises((ablation_train.SettingsError, h5chunk.OptionError), match=message):
        run(settings, **changes)


def test_what_does_not_fit_the_data_is_refused(settings, folder, tmp_path):
    with pytest.raises(ablation_train.SettingsError, match="but there are 150 images"):
        run(settings, batch_size=1000)
    flat = tmp_path / "flat.h5"
    h5chunk.convert(folder / "class00", flat, workers=0)
    with pytest.raises(ablation_train.SettingsError, match="no labels"):
        run(settings, data=flat)


def test_torchvision_is_missing(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(models.ModelError, match="pip install torchvision"):
        run(settings, model="resnet18")


def test_vit_takes_squares_of_patches():
    pytest.importorskip("torchvision")
    with pytest.raises(models.ModelError, match="multiple of 16"):
        models.make_model("vit_b_16", CLASSES, (SIZE, SIZE))


def rows_of(device: str, model: str = "cnn") -> list[tuple[str, Settings]]:
    base = Settings(Path("photos.h5"), device=device, model=model)
    return ablation.rows_for(base, ablation.all_rows(Path("photos"), Path("photos.h5"), (64, 64), 2))


def test_rows_of_a_quick_ablation(monkeypatch):
    monkeypatch.setattr(ablation, "find_spec", lambda name: name)
    assert [name for name, _ in rows_of("cpu")] == [
        "folder of JPEGs, plain DataLoader",
        "+ num_workers=2",
        "+ prefetch_factor=4",
        "+ persistent_workers",
        "+ uint8, normalised on the device",
        "+ zero_grad(set_to_none)",
        "+ channels_last",
        "packed file, ChunkDataset in DataLoader",
        "ChunkLoader in place of DataLoader",
        "augmented: torchvision in workers",
        "augmented: FFCV",
        "augmented: ChunkLoader",
    ]
    monkeypatch.setattr(ablation, "find_spec", lambda name: None)
    assert [name for name, _ in rows_of("cpu") if name.startswith("augmented")] == ["augmented: ChunkLoader"]


@pytest.mark.parametrize("model", ["cnn", "resnet50", "vit_b_16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_can_be_and_differ(device, model):
    rows = rows_of(device, model)
    for _, row in rows:
        if row.loader == "chunk":  # which does by itself what the DataLoader's switches do
            assert not (row.num_workers or row.pin_memory or row.prefetch_stream) and row.transport == "uint8"
        assert row.pin_memory or not row.non_blocking  # the copy of other memory blocks in any case
        assert (row.image_size is None) is (row.loader != "folder")
    assert len({repr(settings) for _, settings in rows}) == len(rows)
    assert ("+ channels_last" in dict(rows)) is (model != "vit_b_16")


def test_last_row_has_everything():
    echoed, last = (settings for _, settings in rows_of("cuda")[-2:])
    assert (last.loader, last.resident, last.amp) == ("chunk", "yes", "bf16")
    assert last.compile and last.channels_last and last.set_to_none
    assert (echoed.echo, last.echo) == (2.0, 1)


def test_ablation(tmp_path, monkeypatch, capsys):
    every = ablation.rows_for
    monkeypatch.setattr(ablation, "rows_for", lambda *args: every(*args)[:: len(every(*args)) - 1])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    figures, folder = tmp_path / "figures.json", tmp_path / "photos"
    size = ["--count", "40", "--size", "16", "16", "--batch-size", "8", "--epochs", "1", "--utilisation-s", "0.01"]
    where = ["--folder", str(folder), "--json", str(figures), "--device", "cpu"]
    ablation.main(["--quick", *size, *where])
    printed = capsys.readouterr().out
    assert "augmented: ChunkLoader" in printed and "pip install 'h5chunk[plot]'" in printed
    result = json.loads(figures.read_text())
    assert [row["images_per_s"] > 0 for row in result["rows"]] == [True, True]
    assert len(h5chunk.ChunkDataset(tmp_path / "photos.h5")) == 40
    monkeypatch.undo()
    with pytest.raises(SystemExit):
        ablation.main(["--quick", *size, *where, "--num-workers", "0"])
    assert "--num-workers is 0, but --prefetch-factor" in capsys.readouterr().err
    next((folder / "class00").iterdir()).unlink()
    with pytest.raises(SystemExit):
        ablation.main(["--quick", *size, *where])
    assert "has 39 images" in capsys.readouterr().err


def test_seconds_of_a_cut_epoch_are_worked_out(settings):
    given = run(settings, steps=2, epochs=3)
    rate = np.median([epoch.images_per_s for epoch in given.epochs[1:]])
    assert ablation.epoch_seconds(given) == pytest.approx(COUNT / rate)
    assert "s/epoch*" in ablation.header(2) and "computed from" in ablation.header(2)


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"name": "a", "images_per_s": 50.0, "cached_images_per_s": 100.0, "utilisation": 0.5}
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({"model": "cnn", "batch_size": 8, "machine": "none", "rows": [row, row]}))
    ablation.main(["--plot-json", str(figures)])
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_moving_changes_nothing(self, settings):
        settings = replace(settings, device="cuda", deterministic=True)
        plain = losses(settings, loader="dataset")
        pinned = {"loader": "dataset", "pin_memory": True, "non_blocking": True}
        assert losses(settings, **pinned) == plain
        assert losses(settings, **pinned, prefetch_stream=True) == plain
        assert losses(settings, loader="chunk", resident="no") == pytest.approx(plain, rel=1e-3)

    @pytest.mark.parametrize("amp", ["bf16", "fp16"])
    def test_amp(self, settings, amp):
        epochs = run(settings, 0.05, device="cuda", amp=amp, epochs=4).epochs
        assert epochs[-1].loss < 0.7 * epochs[0].loss
        assert epochs[-1].peak_bytes > 0
