"""The training that ablation.py measures: network, step, epoch and their settings."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import make_model
from torch import nn

import h5chunk
from h5chunk.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop, ToDtype

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as in torchvision
AMP = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RESIDENT = {"yes": True, "no": False}

Batch = tuple[torch.Tensor, torch.Tensor]


class SettingsError(ValueError):
    """Raised for settings that are invalid or do not fit the data."""


@dataclass(frozen=True)
class Settings:
    data: Path
    model: str = "cnn"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    epochs: int = 2
    batch_size: int = 64
    lr: float = 1e-3
    seed: int = 0
    deterministic: bool = False
    echo: float = 1
    resident: str = "no"
    cpu_threads: int | None = None
    augment: tuple[int, int] | None = None  # height and width of random resized crops, half of them flipped
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
        raise SettingsError(f"images are {shape}, but the networks need (3, height, width): use --color rgb")
    return shape[1:], len(dataset.classes) or int(dataset.values("labels").max()) + 1


def make_loader(settings: Settings, dataset: h5chunk.ChunkDataset) -> h5chunk.ChunkLoader:
    """Make a ChunkLoader of shuffled batches."""
    s = settings
    how = {"echo": s.echo, "resident": RESIDENT[s.resident], "seed": s.seed, "drop_last": True}
    augment = [] if s.augment is None else [RandomResizedCrop(s.augment), RandomHorizontalFlip()]
    transforms = [*augment, Normalize(MEAN, STD), ToDtype(AMP[s.amp], channels_last=s.channels_last)]
    return h5chunk.ChunkLoader(dataset, s.batch_size, device=s.device, transforms=transforms, **how)


class Waiting:
    """Wrap an iterable, and measure the time spent in its ``iter`` and ``next``."""

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
        """Return a context for 16-bit matrix products and convolutions if --amp is set."""
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
        """Add to the totals on the device. Calling ``item()`` here would make the host wait in each step."""
        self.totals += torch.stack((loss * len(labels), (logits.argmax(1) == labels).sum()))

    def take_totals(self) -> tuple[float, float]:
        """Return the sums of loss and correct answers since the last call. Waits for the device."""
        loss, right = self.totals.tolist()
        self.totals.zero_()
        return loss, right


@dataclass(frozen=True)
class Epoch:
    """The results of an epoch. ``waiting`` is a fraction of the time; ``num_images`` includes echoes."""

    loss: float
    accuracy: float
    num_images: int
    seconds: float
    images_per_s: float
    waiting: float
    peak_bytes: int | None


def run_epoch(trainer: Trainer, batches: Iterable[Batch], waiting: Waiting) -> Epoch:
    """Train on the batches of an epoch, which pass through ``waiting``, and return its results."""
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
