"""Train an image classifier from a converted file with ChunkLoader.

    h5chunk convert photos/ photos.h5 --size 224 224 --fit crop
    python scripts/train_images.py photos.h5 --model resnet50 --amp bf16 --channels-last --compile --set-to-none

Prints for each epoch: training loss and accuracy, images/s, seconds, the share of them that the loop waited in the
loader's ``next`` (on a GPU, earlier steps may still be computing meanwhile), and the peak of GPU memory that torch
allocated. The first epoch includes one-time costs: starting threads, choosing kernels and compiling. ablation.py
measures the same training with other loaders; train_demo.py uses torch's DataLoader.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from models import MODELS, ModelError, make_model
from torch import nn

import h5chunk
from h5chunk.transforms import Normalize, ToDtype

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as in torchvision
AMP = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RESIDENT = {"auto": "auto", "yes": True, "no": False}
HEADER = "epoch     loss accuracy   images/s  seconds  waiting    memory"

Batch = tuple[torch.Tensor, torch.Tensor]


class SettingsError(ValueError):
    """Settings that are invalid, or do not fit the data."""


@dataclass(frozen=True)
class Settings:
    """Everything that a training run depends on; the command line has a switch for each."""

    data: Path
    val: Path | None = None
    model: str = "cnn"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    epochs: int = 2
    batch_size: int = 64
    lr: float = 1e-3
    seed: int = 0
    deterministic: bool = False
    echo: float = 1
    resident: str = "auto"
    cpu_threads: int | None = None
    amp: str = "none"
    set_to_none: bool = False
    channels_last: bool = False
    compile: bool = False

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


def check(s: Settings) -> None:
    """Raise SettingsError if settings are invalid or have no effect."""
    rules = [
        (s.batch_size < 1, f"--batch-size is {s.batch_size}: give at least 1"),
        (s.epochs < 1, f"--epochs is {s.epochs}: give at least 1"),
        (s.cpu_threads is not None and s.cpu_threads < 1, f"--cpu-threads is {s.cpu_threads}: give at least 1"),
        (s.cpu_threads and s.on_gpu, f"--cpu-threads is for training on a CPU, but --device is {s.device}"),
        (s.amp == "fp16" and not s.on_gpu, "--amp fp16 with its GradScaler needs a GPU: use bf16"),
        (s.channels_last and s.model.startswith("vit"), "--channels-last is for convolutions: leave it out for a ViT"),
        (s.on_gpu and not torch.cuda.is_available(), f"--device is {s.device}, but torch finds no GPU: use cpu"),
    ]
    if messages := [message for broken, message in rules if broken]:
        raise SettingsError("; ".join(messages))


# --- data ------------------------------------------------------------------------------------------------------------


def open_dataset(path: Path, **options: Any) -> h5chunk.ChunkDataset:
    """Open a data set of images and labels."""
    dataset = h5chunk.ChunkDataset(path, **options)
    if len(dataset.fields) != 2:
        raise SettingsError(f"{path} has no labels: convert one folder per class, or a manifest with labels")
    return dataset


def inspect(settings: Settings, dataset: Any) -> tuple[tuple[int, int], int]:
    """Return the size of the images and the number of classes."""
    if len(dataset) < settings.batch_size:
        raise SettingsError(f"--batch-size is {settings.batch_size}, but there are {len(dataset)} images")
    shape = tuple(dataset[0][0].shape)
    if len(shape) != 3 or shape[0] != 3:
        raise SettingsError(f"images are {shape}, but the networks take (3, height, width): use --color rgb")
    return shape[1:], len(dataset.classes) or int(dataset.values("labels").max()) + 1


def make_loader(settings: Settings, dataset: h5chunk.ChunkDataset, *, training: bool = True) -> h5chunk.ChunkLoader:
    """Make a loader: shuffled for training; for validation in order, with each sample once."""
    s = settings
    how = {"echo": s.echo, "resident": RESIDENT[s.resident], "seed": s.seed, "drop_last": True} if training else {}
    transforms = [Normalize(MEAN, STD), ToDtype(AMP[s.amp], s.channels_last)]
    return h5chunk.ChunkLoader(dataset, s.batch_size, shuffle=training, device=s.device, transforms=transforms, **how)


class Waiting:
    """Wraps an iterable, and adds up the time spent in its ``iter`` and ``next``."""

    seconds = 0.0

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        started = time.perf_counter()
        for batch in batches:
            self.seconds += time.perf_counter() - started
            yield batch
            started = time.perf_counter()
        self.seconds += time.perf_counter() - started


# --- training --------------------------------------------------------------------------------------------------------


class Trainer:
    """A network, its optimizer and one step of training."""

    def __init__(self, settings: Settings, image_size: tuple[int, int], num_classes: int) -> None:
        self.settings, self.device = settings, torch.device(settings.device)
        torch.manual_seed(settings.seed)
        memory_format = torch.channels_last if settings.channels_last else torch.contiguous_format
        network = make_model(settings.model, num_classes, image_size)
        self.network = network.to(device=self.device, memory_format=memory_format)
        self.forward = torch.compile(self.network) if settings.compile else self.network
        self.optimizer = torch.optim.AdamW(self.network.parameters(), settings.lr)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.amp == "fp16")
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # sums of loss and correct answers

    def autocast(self) -> torch.autocast:
        """Return a context for products and convolutions in 16 bits, if --amp asks for it."""
        dtype = AMP[self.settings.amp]
        return torch.autocast(self.device.type, dtype if dtype != torch.float32 else None, dtype != torch.float32)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        with self.autocast():
            logits = self.forward(images)
            loss = nn.functional.cross_entropy(logits, labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.settings.set_to_none)
        self.count(loss.detach(), logits.detach(), labels)

    def count(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add to the totals, on the device: an ``item()`` here would make the host wait for each step."""
        self.totals += torch.stack((loss * len(labels), (logits.argmax(1) == labels).sum()))

    def take_totals(self) -> tuple[float, float]:
        """Return the sums of loss and correct answers since the last call; waits for the device."""
        loss, right = self.totals.tolist()
        self.totals.zero_()
        return loss, right

    @torch.no_grad()
    def validate(self, batches: Iterable[Batch]) -> tuple[float, float]:
        """Return mean loss and accuracy, of the uncompiled network: the smaller last batch would compile again."""
        num_images = 0
        self.network.eval()
        for images, labels in batches:
            with self.autocast():
                logits = self.network(images)
                loss = nn.functional.cross_entropy(logits, labels)
            self.count(loss, logits, labels)
            num_images += len(labels)
        self.network.train()
        loss_sum, right = self.take_totals()
        return loss_sum / num_images, right / num_images


@dataclass(frozen=True)
class Epoch:
    """The figures of an epoch. ``waiting`` is a share of the time; echoes count in ``num_images``."""

    loss: float
    accuracy: float
    num_images: int
    seconds: float
    images_per_s: float
    waiting: float
    peak_bytes: int | None
    val_loss: float | None = None
    val_accuracy: float | None = None

    def __str__(self) -> str:
        memory = f"{'-':>9s}" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:5.2f} GiB"
        validation = "" if self.val_loss is None else f" {self.val_loss:8.4f} {self.val_accuracy:8.1%}"
        speed = f"{self.images_per_s:10,.0f} {self.seconds:8.2f} {self.waiting:8.1%}"
        return f"{self.loss:8.4f} {self.accuracy:8.1%} {speed} {memory}{validation}"


def run_epoch(trainer: Trainer, batches: Iterable[Batch], waiting: Waiting) -> Epoch:
    """Train on the batches of an epoch, which pass through ``waiting``, and return its figures."""
    on_gpu, device = trainer.settings.on_gpu, trainer.device
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    num_images, waiting.seconds = 0, 0.0
    started = time.perf_counter()
    for images, labels in batches:
        trainer.step(images, labels)
        num_images += len(labels)
    loss, right = trainer.take_totals()
    seconds = time.perf_counter() - started
    return Epoch(
        loss=loss / num_images,
        accuracy=right / num_images,
        num_images=num_images,
        seconds=seconds,
        images_per_s=num_images / seconds,
        waiting=waiting.seconds / seconds,
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
    )


@contextmanager
def kernels(settings: Settings) -> Iterator[None]:
    """Choose the fastest kernels for these shapes, or with --deterministic kernels with reproducible results."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.get_num_threads()
    torch.set_num_threads(settings.cpu_threads or before[2])
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it before its first product
    torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.set_num_threads(before[2])


def train(settings: Settings, say: Callable[[str], None] = print) -> list[Epoch]:
    """Train and validate epoch after epoch. Raises SettingsError or ModelError for invalid settings."""
    check(settings)
    dataset = open_dataset(settings.data)
    val = None if settings.val is None else open_dataset(settings.val)
    if val is not None and val.classes != dataset.classes:
        raise SettingsError(f"{settings.val} has classes {val.classes}, {settings.data} has {dataset.classes}")
    with kernels(settings), make_loader(settings, dataset) as loader:
        trainer, waiting, epochs = Trainer(settings, *inspect(settings, dataset)), Waiting(), []
        say(f"{loader!r}\n{HEADER}{'' if val is None else ' val loss  val acc'}")
        for number in range(settings.epochs):
            epoch = run_epoch(trainer, waiting.over(loader), waiting)
            if val is not None:
                with make_loader(settings, val, training=False) as batches:
                    loss, accuracy = trainer.validate(batches)
                epoch = replace(epoch, val_loss=loss, val_accuracy=accuracy)
            say(f"{number:5d} {epoch}")
            epochs.append(epoch)
    return epochs


# --- command line ----------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(**{field.name: field.default for field in fields(Settings) if field.name != "data"})
    add = parser.add_argument
    add("data", type=Path, help="converted file")
    add("--val", type=Path, help="validation data, used after each epoch")
    add("--model", choices=MODELS, help=f"({Settings.model})")
    add("--device", help="cpu or cuda; default: a GPU if there is one")
    for name in ("--epochs", "--batch-size", "--seed"):
        add(name, type=int)
    add("--lr", type=float)
    add("--deterministic", action="store_true", help="use only kernels with reproducible results")
    add("--echo", type=float, help="times that each window is trained on")
    add("--resident", choices=RESIDENT, help="keep all data on the device")
    add("--cpu-threads", type=int, help="cores for the network; loading needs the others")
    add("--amp", choices=AMP, help="autocast; fp16 with GradScaler")
    add("--set-to-none", action="store_true", help="set gradients to None instead of zero")
    add("--channels-last", action="store_true", help="NHWC memory format, which suits tensor cores")
    add("--compile", action="store_true", help="torch.compile")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    try:
        train(Settings(**vars(parser.parse_args(argv))))
    except (SettingsError, ModelError, h5chunk.H5ChunkError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
