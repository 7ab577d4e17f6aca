"""The loaders that ablation.py compares: torch's DataLoader of a folder or of a converted file, FFCV, and
ChunkLoader.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import ablation_train
import numpy as np
import torch
from ablation_train import AMP, MEAN, STD, Batch, SettingsError, Trainer, Waiting
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset, default_collate

import h5chunk

WARM_UP_STEPS, BLOCK_STEPS = 5, 5  # untimed steps on the cached batch, and steps between two readings of the clock


@dataclass(frozen=True)
class Settings(ablation_train.Settings):
    """Settings of a training run.

    ``loader`` is "chunk" for ChunkLoader, which reads, pins, copies and normalises by itself; "dataset" for
    ChunkDataset with ChunkSampler in torch's DataLoader; "folder" for a DataLoader that decodes images, one folder per
    class; or "ffcv" for FFCV's Loader of the same pixels. All loaders except ChunkLoader normalise images after the
    copy to the device (``transport`` "uint8") or before it ("float32").
    """

    loader: str = "chunk"
    image_size: tuple[int, int] | None = None
    steps: int | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    transport: str = "uint8"
    pin_memory: bool = False
    non_blocking: bool = False
    prefetch_stream: bool = False


def check(settings: Settings) -> None:
    ablation_train.check(settings)
    if settings.prefetch_factor and settings.num_workers < 1:
        raise SettingsError(
            f"--num-workers is {settings.num_workers}, but --prefetch-factor needs workers: use at least 1"
        )
    if settings.steps is not None and settings.steps < 1:
        raise SettingsError(f"--steps is {settings.steps}: give at least 1")


def to_floats(image: torch.Tensor) -> torch.Tensor:
    """Convert a uint8 image (3, H, W) to normalised float32, like torchvision's ToTensor and Normalize."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (image.float() / 255 - mean) / std


class FolderImages(Dataset[Any]):
    """Images of one folder per class, decoded on access, with their labels: (uint8 (3, H, W), int)."""

    def __init__(
        self, root: Path, transform: Callable[[torch.Tensor], torch.Tensor] | None, size: tuple[int, int] | None
    ) -> None:
        self.classes = tuple(sorted(path.name for path in root.iterdir() if path.is_dir()))
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


def open_dataset(settings: Settings) -> Any:
    """Open a Dataset of (image, label). Images are uint8, or normalised float32 with --transport float32."""
    transform = to_floats if settings.transport == "float32" else None
    if settings.augment is not None and settings.loader == "dataset":
        from torchvision.transforms import v2

        transform = v2.Compose([v2.RandomResizedCrop(settings.augment, antialias=True), v2.RandomHorizontalFlip()])
    if settings.loader == "folder":
        return FolderImages(settings.data, transform, settings.image_size)
    return ablation_train.open_dataset(settings.data, transforms=transform)


def make_loader(settings: Settings, dataset: Any) -> Any:
    s = settings
    if s.loader == "chunk":
        return ablation_train.make_loader(s, dataset)
    if s.loader == "ffcv":
        return ffcv_loader(s, dataset)
    workers = {
        "num_workers": s.num_workers,
        "pin_memory": s.pin_memory and s.on_gpu,
        "prefetch_factor": s.prefetch_factor,
        "persistent_workers": s.persistent_workers,
    }
    order = {"shuffle": True, "drop_last": True}
    if s.loader == "dataset":
        sampler = h5chunk.ChunkSampler(dataset, s.batch_size, **order, seed=s.seed, num_workers=s.num_workers)
        return DataLoader(dataset, batch_sampler=sampler, **workers)
    generator = torch.Generator().manual_seed(s.seed)
    return DataLoader(dataset, s.batch_size, **order, generator=generator, **workers)


def ffcv_loader(settings: Settings, dataset: h5chunk.ChunkDataset) -> Any:
    """Make FFCV's loader of augmented batches. Its file is written beside the packed file if it is missing."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    path = settings.data.with_suffix(".beton")
    if not path.exists():
        fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
        samples = [(image.permute(1, 2, 0).contiguous().numpy(), int(label)) for image, label in dataset]
        DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(samples)
    images = [RandomResizedCropRGBImageDecoder(settings.augment), RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    pipelines = {"image": images, "label": [IntDecoder(), ToTensor(), Squeeze()]}
    how = {"num_workers": settings.num_workers, "order": OrderOption.RANDOM, "os_cache": True, "drop_last": True}
    return Loader(str(path), settings.batch_size, seed=settings.seed, pipelines=pipelines, **how)


class Place:
    """Move a batch of torch's DataLoader to the device, and convert it there for the network."""

    def __init__(self, settings: Settings) -> None:
        self.device, self.non_blocking = torch.device(settings.device), settings.non_blocking
        self.dtype = AMP[settings.amp]
        self.format = torch.channels_last if settings.channels_last else torch.contiguous_format
        self.mean = 255 * torch.tensor(MEAN, device=self.device)[:, None, None]
        self.std = 255 * torch.tensor(STD, device=self.device)[:, None, None]

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> Batch:
        images = images.to(self.device, non_blocking=self.non_blocking)
        labels = labels.to(self.device, non_blocking=self.non_blocking)
        if images.dtype == torch.uint8:  # normalised after the copy, because float32 has four times the bytes of uint8
            images = (images - self.mean) / self.std
        return images.to(self.dtype, memory_format=self.format), labels

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return (self(*batch) for batch in batches)


class PrefetchStream:
    """Copy and normalise the next batch on a separate stream, while the GPU trains on the current one."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.stream = torch.cuda.Stream(place.device)
        self.stream.wait_stream(torch.cuda.current_stream(place.device))  # wait until mean and std are on the device

    def send(self, batches: Iterator[Batch]) -> Batch | None:
        """Start copying the next batch. Return None if there is none."""
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
                tensor.record_stream(training)  # its memory is not reused before these kernels end
            batch, ahead = ahead, self.send(source)
            yield batch


class Feed:
    """The training batches of a run on the device, epoch by epoch."""

    def __init__(self, settings: Settings, dataset: Any) -> None:
        self.settings, self.waiting = settings, Waiting()
        self.loader, self.place = make_loader(settings, dataset), Place(settings)
        self.mover = PrefetchStream(self.place) if settings.prefetch_stream else self.place
        rows = range(0, len(dataset), len(dataset) // settings.batch_size)[: settings.batch_size]
        self.real_batch = self.place(
            *default_collate([tuple(dataset[row]) for row in rows])
        )  # from all parts of the data

    def on_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        batches = self.waiting.over(batches)
        return batches if self.settings.loader == "chunk" else self.mover.over(batches)

    def passes(self) -> Iterator[Batch]:
        while True:
            yield from self.loader

    def epochs(self) -> Iterator[Iterable[Batch]]:
        """Yield the epochs. With --steps, each has this number of batches and continues where the last one stopped."""
        endless = self.on_device(self.passes())
        for _ in range(self.settings.epochs):
            yield self.on_device(self.loader) if self.settings.steps is None else islice(endless, self.settings.steps)

    def fresh_share(self) -> float:
        """Return the fraction of an epoch's images that are not echoes."""
        if self.settings.echo == 1:
            return 1.0
        return self.loader.report.fresh_samples / self.loader.report.samples

    def close(self) -> None:
        """Stop the loader's threads. The worker processes of a DataLoader end when it is deleted."""
        if isinstance(self.loader, h5chunk.ChunkLoader):
            self.loader.close()
        del self.loader


@contextmanager
def undone(trainer: Trainer) -> Iterator[None]:
    """Restore the state of network, optimizer and scaler at the end of the context."""
    parts = (trainer.network, trainer.optimizer, trainer.scaler)
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    with torch.random.fork_rng([trainer.device] if trainer.settings.on_gpu else []):
        yield
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)
    trainer.totals.zero_()


def cached_rate(trainer: Trainer, batch: Batch, seconds: float) -> float:
    """Return images/s on a batch that is on the device, which is the rate with an infinitely fast loader."""
    synchronize = torch.cuda.synchronize if trainer.settings.on_gpu else lambda _: None
    num_steps = 0
    with undone(trainer):
        for _ in range(WARM_UP_STEPS):
            trainer.step(*batch)
        synchronize(trainer.device)
        started, elapsed = time.perf_counter(), 0.0
        while elapsed < seconds:
            for _ in range(BLOCK_STEPS):
                trainer.step(*batch)
            synchronize(trainer.device)
            num_steps += BLOCK_STEPS
            elapsed = time.perf_counter() - started
    return num_steps * len(batch[1]) / elapsed
