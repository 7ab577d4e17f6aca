"""Train a small CNN on the same images with three loaders, and print how long each waits for data.

    python scripts/train_demo.py demo-data         # needs train/, test/, train.h5 and test.h5 there: scripts/demo.sh

folder   one file per image, decoded in ``__getitem__``, as torchvision's ImageFolder does it
h5py     ``h5py.File(...)["images"][i]``, which reads a whole chunk per image
h5chunk  ChunkDataset

Each trains the same network from the same initial weights for ``--epochs`` epochs with torch's DataLoader, on the same
batches in ChunkSampler's order. Losses and accuracies must therefore be equal to the last digit, and the script
checks this. The times differ, and so does the fraction of time spent waiting for the next batch. Uses a GPU if there
is one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import h5chunk


class FolderDataset(Dataset):
    """Images and labels in the format of torchvision's ImageFolder, with the indices of the converted file."""

    def __init__(self, root: Path, converted: h5chunk.ChunkDataset) -> None:
        names = converted.source_names.tolist()
        self.samples = [(root / name, converted.classes.index(name.split("/")[0])) for name in names]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1), label


class PlainDataset(Dataset):
    """Reads one row of an HDF5 dataset at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: h5py.File | None = None
        with h5py.File(path) as file:
            self.length = len(file["images"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = h5py.File(self.path)
        return torch.from_numpy(self.file["images"][index]), int(self.file["labels"][index])


def make_loader(name: str, data: Path, batch_size: int, workers: int) -> DataLoader:
    dataset = h5chunk.ChunkDataset(data / "train.h5")
    rows: Dataset = dataset
    if name == "folder":
        rows = FolderDataset(data / "train", dataset)
    elif name == "h5py":
        rows = PlainDataset(data / "train.h5")
    return DataLoader(rows, batch_sampler=h5chunk.ChunkSampler(dataset, batch_size), num_workers=workers)


def make_network(num_classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 16, 4), (16, 32, 2), (32, 64, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))


def prepare(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    return images.to(device).contiguous().float().div_(127.5).sub_(1)


class Waiting:
    """Iterate over batches, and measure the time spent waiting for them."""

    def __init__(self, loader: Iterable) -> None:
        self.loader, self.seconds = loader, 0.0

    def __iter__(self):
        started = time.perf_counter()
        for batch in self.loader:
            self.seconds += time.perf_counter() - started
            yield batch
            started = time.perf_counter()


def train(
    name: str, args: argparse.Namespace, device: torch.device, num_classes: int
) -> tuple[nn.Module, list[float], float, float]:
    """Train a network; return it, the loss of each batch, the seconds taken, and the seconds spent waiting."""
    torch.manual_seed(0)
    network = make_network(num_classes).to(device)
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    loader = make_loader(name, args.data, args.batch_size, args.workers)
    waited, losses = 0.0, []
    started = time.perf_counter()
    for _ in range(args.epochs):
        batches = Waiting(loader)
        for images, labels in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(network(prepare(images, device)), labels.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        waited += batches.seconds
    losses = torch.stack(losses).tolist()  # waits for the GPU
    return network, losses, time.perf_counter() - started, waited


@torch.no_grad()
def accuracy(network: nn.Module, data: Path, device: torch.device) -> float:
    network.eval()
    dataset = h5chunk.ChunkDataset(data / "test.h5")
    batches = DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, 256, shuffle=False))
    right = sum(
        int((network(prepare(images, device)).argmax(1) == labels.to(device)).sum()) for images, labels in batches
    )
    return right / len(dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0, help="workers of the DataLoader")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_classes = len(h5chunk.ChunkDataset(args.data / "train.h5").classes)
    torch.backends.cudnn.deterministic = True
    print(f"{args.epochs} epochs on {device}, batches of {args.batch_size}, {args.workers} workers")
    print(f"{'':8s} {'last loss':>11s}  accuracy   seconds   waiting for data")
    curves = []
    for name in ("folder", "h5py", "h5chunk"):
        network, losses, seconds, waited = train(name, args, device, num_classes)
        right = accuracy(network, args.data, device)
        print(f"{name:8s} {losses[-1]:>11.8f} {right:>9.1%} {seconds:>9.1f} {waited / seconds:>18.1%}", flush=True)
        curves.append(losses)
    if all(losses == curves[0] for losses in curves):
        print(f"The losses of all {len(curves[0])} batches are equal to the last digit: it is the same training.")
    else:
        raise SystemExit("the losses differ, though the batches should be the same")


if __name__ == "__main__":
    main()
