"""Train an image classifier from a packed file, with the known tricks for feeding a GPU as switches.

    h5chunk convert photos/ photos.h5 --size 224 224 --fit crop
    python scripts/train_images.py photos.h5 --model resnet50 --amp bf16 --channels-last --compile --set-to-none
    python scripts/train_images.py photos.h5 --loader dataset --num-workers 8 --pin-memory --non-blocking
    python scripts/train_images.py photos/ --loader folder --image-size 224 224 --num-workers 8 --transport float32

Loaders: ``chunk`` is ChunkLoader, which reads, pins, copies and normalises by itself; ``dataset`` is ChunkDataset with
ChunkSampler in torch's DataLoader; ``folder`` decodes a folder of images, one folder per class, in torch's DataLoader.
A switch without effect for the chosen loader or device is an error that gives the reason.

Prints for each epoch: training loss and accuracy, images/s, seconds, the share of them that the loop waited in the
loader's ``next`` (on a GPU, earlier steps may still be computing meanwhile), the peak of GPU memory that torch
allocated, and, with --measure-utilisation, images/s over those on one batch that stays on the device, measured before
and after the epoch (training on it is undone). The first epoch includes one-time costs such as starting workers, and
without --measure-utilisation also the choice of kernels and compiling.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import MODELS, ModelError, make_model
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import h5chunk
from h5chunk.plan.order import INTERLEAVE
from h5chunk.transforms import Normalize, ToDtype

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as in torchvision
AMP = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RESIDENT = {"auto": "auto", "yes": True, "no": False}
WARM_UP_STEPS, BLOCK_STEPS = 5, 5  # on the cached batch: untimed steps, and steps per reading of the clock
UTILISATION_S = 3.0

Batch = tuple[torch.Tensor, torch.Tensor]


class SettingsError(ValueError):
    """Settings are invalid, or do not fit the data."""


@dataclass(frozen=True)
class Settings:
    """Everything that a training run depends on; the command line has a switch for each."""

    data: Path
    val: Path | None = None
    model: str = "cnn"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    epochs: int = 2
    steps: int | None = None
    batch_size: int = 64
    lr: float = 1e-3
    seed: int = 0
    deterministic: bool = False
    # where batches come from
    loader: str = "chunk"
    image_size: tuple[int, int] | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    # how batches get to the device
    transport: str = "uint8"
    pin_memory: bool = False
    non_blocking: bool = False
    prefetch_stream: bool = False
    echo: float = 1
    resident: str | None = None
    # how the network computes
    cpu_threads: int | None = None
    amp: str = "none"
    set_to_none: bool = False
    channels_last: bool = False
    compile: bool = False
    measure_utilisation: float | None = None

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


def refusals(s: Settings) -> list[str]:
    """Return the reasons why settings are invalid or have no effect."""
    chunk, cpu = s.loader == "chunk", not s.on_gpu
    of_dataloader = "is for torch's DataLoader, but ChunkLoader {}: leave it out, or use --loader dataset"
    rules = [
        (chunk and s.num_workers, f"--num-workers {of_dataloader.format('reads with threads')}"),
        (chunk and s.pin_memory, f"--pin-memory {of_dataloader.format('reads into pinned memory by itself')}"),
        (chunk and s.non_blocking, f"--non-blocking {of_dataloader.format('copies beside the computation by itself')}"),
        (chunk and s.prefetch_stream, f"--prefetch-stream {of_dataloader.format('has a stream of its own')}"),
        (chunk and s.transport != "uint8", f"--transport float32 {of_dataloader.format('sends what the file holds')}"),
        (not chunk and s.echo != 1, "--echo is for ChunkLoader: use --loader chunk"),
        (not chunk and s.resident is not None, "--resident is for ChunkLoader: use --loader chunk"),
        (s.loader != "folder" and s.image_size, "--image-size is for --loader folder: a packed file has its size"),
        (s.prefetch_factor and not s.num_workers, "--prefetch-factor is per worker: give --num-workers"),
        (s.persistent_workers and not s.num_workers, "--persistent-workers needs workers: give --num-workers"),
        (cpu and s.pin_memory, "--pin-memory is for copies to a GPU, but --device is cpu"),
        (cpu and s.non_blocking, "--non-blocking is for copies to a GPU, but --device is cpu"),
        (cpu and s.prefetch_stream, "--prefetch-stream is for copies to a GPU, but --device is cpu"),
        (not cpu and s.cpu_threads, "--cpu-threads is for training on a CPU, but --device is cuda"),
        (cpu and s.amp == "fp16", "--amp fp16 with its GradScaler needs a GPU: use bf16"),
        (
            s.non_blocking and not s.pin_memory and not chunk,
            "--non-blocking does nothing for pageable memory, whose copy blocks in any case: add --pin-memory",
        ),
        (s.channels_last and s.model.startswith("vit"), "--channels-last is for convolutions: leave it out for a ViT"),
        (s.batch_size < 1, f"--batch-size is {s.batch_size}: give at least 1"),
        (s.epochs < 1, f"--epochs is {s.epochs}: give at least 1"),
        (s.cpu_threads is not None and s.cpu_threads < 1, f"--cpu-threads is {s.cpu_threads}: give at least 1"),
        (s.steps is not None and s.steps < 1, f"--steps is {s.steps}: give at least 1"),
    ]
    return [message for broken, message in rules if broken]


def check(settings: Settings) -> None:
    """Raise SettingsError unless the settings are valid."""
    if found := refusals(settings):
        raise SettingsError("; ".join(found))
    if settings.on_gpu and not torch.cuda.is_available():
        raise SettingsError(f"--device is {settings.device}, but torch finds no GPU: use cpu")


# --- data ------------------------------------------------------------------------------------------------------------


def to_floats(image: torch.Tensor) -> torch.Tensor:
    """Convert a uint8 image (3, H, W) to normalised float32, like torchvision's ToTensor and Normalize."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (image.float() / 255 - mean) / std


class FolderImages(Dataset[Any]):
    """Images of one folder per class, decoded on access: (uint8 (3, H, W), label)."""

    def __init__(
        self, root: Path, transform: Callable[[torch.Tensor], torch.Tensor] | None, size: tuple[int, int] | None
    ) -> None:
        self.classes = tuple(sorted(path.name for path in root.iterdir() if path.is_dir()))
        if not self.classes:
            raise SettingsError(f"{root} holds no folders: --loader folder needs one for each class")
        self.files = [(path, i) for i, name in enumerate(self.classes) for path in sorted((root / name).iterdir())]
        self.transform, self.size = transform, size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        if self.size is not None:
            image = ImageOps.fit(image, self.size[::-1])
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return (pixels if self.transform is None else self.transform(pixels)), label


def open_dataset(settings: Settings, path: Path) -> Any:
    """Open a Dataset of (image, label); images are uint8, or normalised float32 with --transport float32."""
    transform = to_floats if settings.transport == "float32" else None
    if settings.loader == "folder":
        if not path.is_dir():
            raise SettingsError(f"--loader folder needs a folder of images, but {path} is not a folder")
        return FolderImages(path, transform, settings.image_size)
    dataset = h5chunk.ChunkDataset(path, transform=transform)
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
    num_classes = len(dataset.classes)
    if not num_classes:
        labels = h5chunk.ChunkDataset(dataset.path, fields=["labels"])[:][0]
        num_classes = int(labels.max()) + 1
    return shape[1:], num_classes


def make_loader(settings: Settings, dataset: Any, path: Path, *, training: bool = True) -> Any:
    """Make a loader: shuffled for training; for validation in order, with each sample once."""
    s = settings
    order = {"shuffle": training, "drop_last": training}
    if s.loader == "chunk":
        tricks = {"echo": s.echo, "resident": RESIDENT[s.resident or "auto"]} if training else {}
        return h5chunk.ChunkLoader(
            path,
            s.batch_size,
            **order,
            seed=s.seed,
            device=s.device,
            transforms=[Normalize(MEAN, STD), ToDtype(AMP[s.amp], s.channels_last)],
            **tricks,
        )
    workers = {
        "num_workers": s.num_workers,
        "pin_memory": s.pin_memory,
        "prefetch_factor": s.prefetch_factor,
        "persistent_workers": s.persistent_workers,
    }
    if s.loader == "dataset":
        interleave = s.num_workers if s.num_workers and INTERLEAVE % s.num_workers else None  # whole windows per worker
        sampler = h5chunk.ChunkSampler(dataset, s.batch_size, **order, seed=s.seed, interleave=interleave)
        return DataLoader(dataset, batch_sampler=sampler, **workers)
    generator = torch.Generator().manual_seed(s.seed)
    return DataLoader(dataset, s.batch_size, **order, generator=generator, **workers)


# --- from the loader to the device -----------------------------------------------------------------------------------


class Waiting:
    """Wraps an iterable, and adds up the time spent in its ``iter`` and ``next``."""

    seconds = 0.0

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        started = time.perf_counter()
        for batch in batches:
            self.seconds += time.perf_counter() - started
            yield batch
            started = time.perf_counter()
        self.seconds += time.perf_counter() - started


class Place:
    """Moves a batch of torch's DataLoader to the device, and converts it there for the network."""

    def __init__(self, settings: Settings) -> None:
        self.device, self.non_blocking = torch.device(settings.device), settings.non_blocking
        self.dtype = AMP[settings.amp]
        self.format = torch.channels_last if settings.channels_last else torch.contiguous_format
        self.mean = 255 * torch.tensor(MEAN, device=self.device)[:, None, None]
        self.std = 255 * torch.tensor(STD, device=self.device)[:, None, None]

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> Batch:
        images = images.to(self.device, non_blocking=self.non_blocking)
        labels = labels.to(self.device, non_blocking=self.non_blocking)
        if images.dtype == torch.uint8:  # normalised after the copy: uint8 has a quarter of float32's bytes
            images = (images - self.mean) / self.std
        return images.to(self.dtype, memory_format=self.format), labels

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return (self(*batch) for batch in batches)


class PrefetchStream:
    """Copies the next batch and normalises it on a stream of its own, while the GPU trains on this one."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stream = torch.cuda.Stream(place.device)
        self.stream.wait_stream(torch.cuda.current_stream(place.device))  # wait until mean and std are on the device

    def send(self, batches: Iterator[Batch]) -> Batch | None:
        """Start copying the next batch; return None at the end."""
        batch = next(batches, None)
        if batch is None:
            return None
        with torch.cuda.stream(self.stream):
            return self.place(*batch)

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        source = iter(batches)
        ahead = self.send(source)
        while ahead is not None:
            training = torch.cuda.current_stream(self.place.device)
            training.wait_stream(self.stream)  # the step's kernels wait for the batch
            for tensor in ahead:
                tensor.record_stream(training)  # and its memory is not reused before they end
            batch, ahead = ahead, self.send(source)
            yield batch


def forever(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Iterate over the loader again and again."""
    while True:
        yield from loader


class Feed:
    """The training batches of a run, on the device, an epoch at a time."""

    def __init__(self, settings: Settings, dataset: Any) -> None:
        self.settings = settings
        self.loader = make_loader(settings, dataset, settings.data)
        self.waiting = Waiting()
        self.place = Place(settings)
        self.mover = PrefetchStream(self.place) if settings.prefetch_stream else self.place

    def on_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        batches = self.waiting.over(batches)
        return batches if self.settings.loader == "chunk" else self.mover.over(batches)

    def epochs(self) -> Iterator[Iterable[Batch]]:
        """Yield passes over the data; with --steps that many batches each, continuing where the last epoch stopped."""
        endless = self.on_device(forever(self.loader))
        for _ in range(self.settings.epochs):
            yield self.on_device(self.loader) if self.settings.steps is None else islice(endless, self.settings.steps)

    def fresh_share(self) -> float:
        """The share of this pass's images that are not echoes."""
        if self.settings.echo == 1:
            return 1.0
        return self.loader.report.fresh_samples / self.loader.report.samples

    def validation(self, loader: Any) -> Iterable[Batch]:
        """Yield the validation batches on the device."""
        return loader if self.settings.loader == "chunk" else self.place.over(loader)

    def close(self) -> None:
        """End the loader's threads or worker processes, also in the middle of a pass."""
        close(self.loader)
        del self.loader


def close(loader: Any) -> None:
    """End a loader's threads; a DataLoader's worker processes end when nothing refers to it."""
    if isinstance(loader, h5chunk.ChunkLoader):
        loader.close()


def one_batch(settings: Settings, dataset: Any) -> Batch:
    """Make a batch of samples from all over the data."""
    rows = range(0, len(dataset), len(dataset) // settings.batch_size)[: settings.batch_size]
    return default_collate([tuple(dataset[row]) for row in rows])


# --- training --------------------------------------------------------------------------------------------------------


class Trainer:
    """A network, its optimizer and one step of training."""

    def __init__(self, settings: Settings, image_size: tuple[int, int], num_classes: int) -> None:
        self.settings, self.device = settings, torch.device(settings.device)
        torch.manual_seed(settings.seed)
        memory_format = torch.channels_last if settings.channels_last else torch.contiguous_format
        self.network = make_model(settings.model, num_classes, image_size)
        self.network.to(device=self.device, memory_format=memory_format)
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

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Return a context that undoes the training inside it."""
        parts = (self.network, self.optimizer, self.scaler)
        states = [copy.deepcopy(part.state_dict()) for part in parts]
        with torch.random.fork_rng([self.device] if self.settings.on_gpu else []):
            yield
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        self.totals.zero_()

    def cached_rate(self, batch: Batch, seconds: float) -> float:
        """Return images/s on a batch on the device: the rate with an infinitely fast loader."""
        num_steps = 0
        with self.undone():
            for _ in range(WARM_UP_STEPS):
                self.step(*batch)
            self.synchronize()
            started, elapsed = time.perf_counter(), 0.0
            while elapsed < seconds:
                for _ in range(BLOCK_STEPS):
                    self.step(*batch)
                self.synchronize()
                num_steps += BLOCK_STEPS
                elapsed = time.perf_counter() - started
        return num_steps * len(batch[1]) / elapsed

    def synchronize(self) -> None:
        if self.settings.on_gpu:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Epoch:
    """The figures of an epoch. ``waiting`` and ``utilisation`` are shares; None: not measured; fresh: not echoed."""

    loss: float
    accuracy: float
    num_images: int
    seconds: float
    images_per_s: float
    fresh_images_per_s: float
    waiting: float
    peak_bytes: int | None
    cached_images_per_s: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None

    @property
    def utilisation(self) -> float | None:
        return None if self.cached_images_per_s is None else self.images_per_s / self.cached_images_per_s

    def __str__(self) -> str:
        texts = [f"{self.loss:8.4f} {self.accuracy:8.1%} {self.images_per_s:10,.0f} {self.seconds:8.2f}"]
        texts.append(f"{self.waiting:8.1%}")
        texts.append(f"{'-':>9s}" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:5.2f} GiB")
        texts.append(f"{'-':>11s}" if self.utilisation is None else f"{self.utilisation:11.3f}")
        if self.val_loss is not None:
            texts.append(f"{self.val_loss:8.4f} {self.val_accuracy:8.1%}")
        if self.fresh_images_per_s != self.images_per_s:
            texts.append(f" {self.fresh_images_per_s:,.0f} fresh images/s")
        return " ".join(texts)


HEADER = "epoch     loss accuracy   images/s  seconds  waiting    memory utilisation"


def run_epoch(trainer: Trainer, batches: Iterable[Batch], feed: Feed) -> Epoch:
    """Train on the batches of an epoch, and return its figures."""
    on_gpu, device = trainer.settings.on_gpu, trainer.device
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    feed.waiting.seconds = 0.0
    num_images = 0
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
        fresh_images_per_s=num_images / seconds * feed.fresh_share(),
        waiting=feed.waiting.seconds / seconds,
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


@dataclass(frozen=True)
class Run:
    """The result of a training run."""

    settings: Settings
    num_samples: int
    epochs: list[Epoch]
    loader: str


def train(settings: Settings, say: Callable[[str], None] = print) -> Run:
    """Train a network. Raises SettingsError or ModelError for invalid settings."""
    check(settings)
    dataset = open_dataset(settings, settings.data)
    image_size, num_classes = inspect(settings, dataset)
    with kernels(settings):
        trainer = Trainer(settings, image_size, num_classes)
        val_loader = open_validation(settings, dataset.classes)
        feed = Feed(settings, dataset)
        if settings.loader == "chunk":
            say(repr(feed.loader))
        try:
            epochs = train_epochs(trainer, feed, val_loader, one_batch(settings, dataset), say)
            return Run(settings, len(dataset), epochs, repr(feed.loader))
        finally:
            feed.close()
            close(val_loader)
            del trainer, feed, val_loader
            free_memory(settings)


def open_validation(settings: Settings, classes: tuple[str, ...]) -> Any:
    """Open a loader of the validation data, or return None if there is none."""
    if settings.val is None:
        return None
    dataset = open_dataset(settings, settings.val)
    if tuple(dataset.classes) != tuple(classes):
        raise SettingsError(f"{settings.val} has classes {dataset.classes}, {settings.data} has {classes}")
    return make_loader(settings, dataset, settings.val, training=False)


def train_epochs(
    trainer: Trainer, feed: Feed, val_loader: Any, batch: Batch, say: Callable[[str], None]
) -> list[Epoch]:
    """Train, validate and measure, epoch after epoch."""
    seconds = trainer.settings.measure_utilisation
    rates = [] if seconds is None else [trainer.cached_rate(feed.place(*batch), seconds)]
    say(HEADER + (" val loss  val acc" if val_loader is not None else ""))
    epochs = []
    for number, batches in enumerate(feed.epochs()):
        epoch = run_epoch(trainer, batches, feed)
        if val_loader is not None:
            loss, accuracy = trainer.validate(feed.validation(val_loader))
            epoch = replace(epoch, val_loss=loss, val_accuracy=accuracy)
        if seconds is not None:
            rates.append(trainer.cached_rate(feed.place(*batch), seconds))
            epoch = replace(epoch, cached_images_per_s=(rates[-2] + rates[-1]) / 2)
        say(f"{number:5d} {epoch}")
        epochs.append(epoch)
    return epochs


def free_memory(settings: Settings) -> None:
    """Free memory for the next run in this process."""
    gc.collect()
    if settings.compile:
        torch.compiler.reset()
    if settings.on_gpu:
        torch.cuda.empty_cache()


# --- command line ----------------------------------------------------------------------------------------------------


def describe(run: Run) -> dict[str, Any]:
    """Return a run as values for JSON."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(run.settings).items()}
    epochs = [asdict(epoch) | {"utilisation": epoch.utilisation} for epoch in run.epochs]
    return asdict(run) | {"settings": settings, "epochs": epochs, **where()}


def where() -> dict[str, Any]:
    """Return versions and machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = {"h5chunk": h5chunk.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"versions": versions, "machine": f"{gpu}, {os.cpu_count()} cores"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(**{field.name: field.default for field in fields(Settings) if field.name != "data"})
    add = parser.add_argument
    add("data", type=Path, help="packed file, or folder for --loader folder")
    add("--val", type=Path, help="validation data of the same kind, used after each epoch")
    add("--model", choices=MODELS)
    add("--device", help="cpu or cuda; default: a GPU if there is one")
    add("--epochs", type=int)
    add("--steps", type=int, help="steps per epoch; default: a pass over the data")
    add("--batch-size", type=int)
    add("--lr", type=float)
    add("--seed", type=int)
    add("--deterministic", action="store_true", help="use only kernels with reproducible results")
    add = parser.add_argument_group("where batches come from").add_argument
    add("--loader", choices=["chunk", "dataset", "folder"], help="default: chunk")
    add("--image-size", type=int, nargs=2, metavar=("H", "W"), help="crop and scale the images of a folder")
    add("--num-workers", type=int, help="worker processes of the DataLoader")
    add("--prefetch-factor", type=int, help="batches that each worker prepares ahead")
    add("--persistent-workers", action="store_true", help="keep the workers from one epoch to the next")
    add = parser.add_argument_group("how they get to the device").add_argument
    add("--transport", choices=["uint8", "float32"], help="normalise after the copy, or (float32) before it on the CPU")
    add("--pin-memory", action="store_true", help="copy from page-locked memory")
    add("--non-blocking", action="store_true", help="do not wait for the copy on the host")
    add("--prefetch-stream", action="store_true", help="copy and normalise the next batch during computation")
    add("--echo", type=float, help="times that each window is trained on; ChunkLoader only")
    add("--resident", choices=RESIDENT, help="keep all data on the device; ChunkLoader only")
    add = parser.add_argument_group("how the network computes").add_argument
    add("--cpu-threads", type=int, help="cores for the network; loading needs the others")
    add("--amp", choices=AMP, help="autocast; fp16 with GradScaler")
    add("--set-to-none", action="store_true", help="set gradients to None instead of zero")
    add("--channels-last", action="store_true", help="NHWC memory format, which suits tensor cores")
    add("--compile", action="store_true", help="torch.compile")
    help_text = f"against one cached batch, for so many seconds ({UTILISATION_S:g})"
    add("--measure-utilisation", type=float, nargs="?", const=UTILISATION_S, metavar="SECONDS", help=help_text)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    values = vars(parser.parse_args(argv))
    json_path = values.pop("json")
    if json_path is not None and not json_path.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {json_path.resolve().parent}: make it first")
    if values["image_size"] is not None:
        values["image_size"] = tuple(values["image_size"])
    try:
        run = train(Settings(**values))
    except (SettingsError, ModelError, h5chunk.H5ChunkError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if json_path is not None:
        json_path.write_text(json.dumps(describe(run), indent=2) + "\n")


if __name__ == "__main__":
    main()
