"""The training examples: that they learn, validate, and continue exactly where they were stopped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.scripts import load, one_thread

import h5chunk

__all__ = ["one_thread"]

train_images, train_cifar = load("train_images"), load("train_cifar")
FORMS = {"encoded": {"keep_encoded": True}, "raw": {"keep_size": True}, "one size": {"size": (32, 32), "fit": "crop"}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bright and dark images of different sizes, in files of each form."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(96):
        values = rng.integers(0, 100, (*rng.integers(24, 48, 2), 3), np.uint8) + 120 * (number % 2)
        path = root / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.astype(np.uint8)).save(path)
    for form, options in FORMS.items():
        h5chunk.convert(root / "photos", root / f"{form}.h5", workers=0, chunk_samples=8, **options)
    return {form: root / f"{form}.h5" for form in FORMS}


def arguments(path: Path, *more: str) -> list[str]:
    small = ["--model", "cnn", "--size", "24", "--epochs", "3", "--warmup", "1", "--batch-size", "16", "--lr", "2"]
    return [str(path), *small, "--no-compile", *more]


@pytest.mark.parametrize("form", FORMS)
def test_learns_from_files_of_each_form(files, capsys, form):
    train_images.main(arguments(files[form], "--val", str(files[form])))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in lines]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert float(re.search(r"validation ([\d.]+)%", lines[-1])[1]) > 80


def test_a_stopped_training_continues_exactly(files, tmp_path, monkeypatch):
    """In the middle of the second epoch, after a step that was not saved."""
    whole, parts = (tmp_path / name for name in ("whole.pt", "parts.pt"))
    train_images.main(arguments(files["encoded"], "--checkpoint", str(whole)))
    train_step = train_images.Trainer.train_step

    def stop(self, images, labels):
        if self.step == 10:
            raise KeyboardInterrupt
        return train_step(self, images, labels)

    with monkeypatch.context() as patched:
        patched.setattr(train_images.Trainer, "train_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train_images.main(arguments(files["encoded"], "--checkpoint", str(parts), "--save-steps", "3"))
    assert torch.load(parts)["step"] == 9
    train_images.main(arguments(files["encoded"], "--checkpoint", str(parts)))
    first, second = (torch.load(path)["network"] for path in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.nightly
def test_processes_share_an_epoch(files):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(train_images.__file__)
    options = arguments(files["raw"], "--val", str(files["raw"]), "--epochs", "1")
    done = subprocess.run([*command, str(script), *options], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("epoch   1 .*validation", done.stdout)) == 1


def test_errors_name_the_remedy(files, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train_images.main(arguments(tmp_path / "none.h5"))
    assert "no such file" in capsys.readouterr().err


def test_small_images_are_learned_from_memory(tmp_path, capsys):
    options = ["--model", "cnn", "--epochs", "3", "--batch-size", "20", "--lr", "0.1", "--no-compile"]
    accuracy = train_cifar.main(["--root", str(tmp_path), "--made", "300", *options])
    assert accuracy > 0.5 and "resident" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"made300-train.h5", "made300-test.h5"}


def test_cifar_is_not_downloaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(SystemExit):
        train_cifar.main(["--root", str(tmp_path)])
    assert "CIFAR-10 is read by torchvision" in capsys.readouterr().err
