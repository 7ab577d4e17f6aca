"""Compare the accuracy that a network reaches with augmentation by h5chunk, and by torchvision sample by sample.

    python scripts/bench_augment_accuracy.py [--seeds 10] [--epochs 30] [--workers 8] [--device cuda]

The synthetic task needs augmentation: ten shapes of 32 x 32, which are centred and unmirrored in the few training
images, but moved, mirrored and resized in the test images. For one seed, both contenders have the same weights and
batches; only the random numbers of the augmentation differ. ``crop`` is RandomCrop with padding, ``resize`` is
RandomResizedCrop, both with a flip.

Prints mean accuracies with their standard deviations, and the mean difference with its 95 % interval. Fails if the
interval exceeds ``--margin`` percentage points, or if augmentation gains no more than this margin.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import conv_block
from torch import nn
from torch.utils.data import DataLoader

import h5chunk
from h5chunk import transforms as ours

SIDE, CLASSES, BATCH = 32, 10, 100
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)  # for 2 seeds and more
Loader = Callable[[str, int], Iterable[Any]]  # called with a recipe and a seed


def make_shapes(count: int, rng: np.random.Generator, *, moved: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return images of random shapes, (count, 3, SIDE, SIDE) uint8, and their class labels, (count,)."""
    labels, reach = np.arange(count) % CLASSES, 5.0 if moved else 0.5
    y, x = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    down, right = rng.uniform(-reach, reach, (2, count, 1, 1))
    size, angle = rng.uniform(*((6, 11) if moved else (8, 9)), (count, 1, 1)), rng.normal(0, 0.1, (count, 1, 1))
    v, u = (y - down) / size, (x - right) / size
    if moved:
        u *= rng.choice([-1, 1], (count, 1, 1))
    u, v = u * np.cos(angle) - v * np.sin(angle), u * np.sin(angle) + v * np.cos(angle)
    far, wide = np.hypot(u, v), np.maximum(abs(u), abs(v))
    discs_and_squares = [far < 1, (far < 1) & (far > 0.6), wide < 0.9, (wide < 0.9) & (wide > 0.5)]
    shapes = [
        *discs_and_squares,
        (far < 1) & (np.hypot(u - 0.4, v) > 0.8),  # a crescent
        (wide < 1) & (u > v),  # triangles
        (wide < 1) & (u > 0) & (u < 0.9 - abs(v)),
        (wide < 1) & ((abs(u + 0.5) < 0.25) | (abs(v - 0.6) < 0.25)),  # letters L and F
        (wide < 1) & ((abs(u + 0.5) < 0.25) | (abs(v + 0.7) < 0.2) | ((abs(v) < 0.2) & (u < 0.5))),
        (wide < 1) & (abs(u - v * 0.8) < 0.3),
    ]
    mask = np.stack(shapes)[labels, np.arange(count)][:, None]
    dark, light = rng.uniform(30, 110, (count, 3, 1, 1)), rng.uniform(100, 225, (count, 3, 1, 1))
    pixels = np.where(mask, light, dark) + rng.normal(0, 30, (count, 3, SIDE, SIDE))
    return pixels.clip(0, 255).astype(np.uint8), labels


def make_network() -> nn.Module:
    blocks = [nn.Sequential(conv_block(*sizes), nn.MaxPool2d(2)) for sizes in ((3, 32), (32, 64), (64, 128))]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * (SIDE // 8) ** 2, CLASSES))


def our_loader(path: Path, args: argparse.Namespace) -> Loader:
    flip, normalize = ours.RandomHorizontalFlip(), ours.Normalize(MEAN, STD)
    first = {"crop": [ours.RandomCrop(SIDE, 4)], "resize": [ours.RandomResizedCrop(SIDE, (0.4, 1))]}

    def make(recipe: str, seed: int) -> Iterable[Any]:
        transforms = [normalize] if recipe == "none" else [*first[recipe], flip, normalize]
        return h5chunk.ChunkLoader(path, BATCH, seed=seed, device=args.device, transforms=transforms)

    return make


def torchvisions_loader(path: Path, args: argparse.Namespace) -> Loader:
    from torchvision.transforms import v2

    first = {"crop": v2.RandomCrop(SIDE, padding=4), "resize": v2.RandomResizedCrop(SIDE, (0.4, 1), antialias=True)}
    last = [v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]

    def make(recipe: str, seed: int) -> Iterable[Any]:
        dataset = h5chunk.ChunkDataset(path, transforms=v2.Compose([first[recipe], *last]))
        workers = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
        return DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, BATCH, seed=seed), **workers)

    return make


def accuracy(loader: Iterable[Any], test: tuple[torch.Tensor, torch.Tensor], seed: int, args: Any) -> float:
    """Train a network, and return its accuracy on the test images in percent."""
    torch.manual_seed(seed)
    network = make_network().to(args.device)
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for _ in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(network(images.to(args.device)), labels.to(args.device).long()).backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        return 100 * float((network.eval()(test[0]).argmax(1) == test[1]).float().mean())


def compare(recipe: str, makers: dict[str, Loader], plain: float, test: Any, args: argparse.Namespace) -> bool:
    """Train with both loaders, print their accuracies, and return whether these differ by at most the margin."""
    found = {}
    for name, make in makers.items():
        own = found[name] = [accuracy(make(recipe, seed), test, seed, args) for seed in range(args.seeds)]
        print(f"{recipe}, {name}: {statistics.mean(own):.2f} % (sd {statistics.stdev(own):.2f})", flush=True)
    differences = [one - other for one, other in zip(*found.values(), strict=True)]
    mean, gain = statistics.mean(differences), statistics.mean(found["h5chunk"]) - plain
    half = T_95[args.seeds - 2] * statistics.stdev(differences) / math.sqrt(args.seeds)
    print(f"{recipe}, difference: {mean:+.2f} +- {half:.2f} points; augmentation gains {gain:.2f}", flush=True)
    return abs(mean) - half <= args.margin < gain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, choices=range(2, len(T_95) + 2), metavar="N")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--count", type=int, nargs=2, default=(1000, 5000), metavar=("TRAIN", "TEST"))
    parser.add_argument("--workers", type=int, default=0, help="workers of torchvision's DataLoader")
    parser.add_argument("--margin", type=float, default=0.5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    images, labels = make_shapes(args.count[0], rng, moved=False)
    pixels, numbers = (torch.from_numpy(each).to(args.device) for each in make_shapes(args.count[1], rng, moved=True))
    test = ours.Normalize(MEAN, STD)(pixels), numbers
    with tempfile.TemporaryDirectory() as folder:
        h5chunk.convert({"images": images, "labels": labels}, path := Path(folder) / "shapes.h5")
        makers = {"h5chunk": our_loader(path, args), "torchvision": torchvisions_loader(path, args)}
        plain = [accuracy(makers["h5chunk"]("none", seed), test, seed, args) for seed in range(args.seeds)]
        print(f"no augmentation: {statistics.mean(plain):.2f} % (sd {statistics.stdev(plain):.2f})", flush=True)
        held = [compare(recipe, makers, statistics.mean(plain), test, args) for recipe in ("crop", "resize")]
    if not all(held):
        raise SystemExit(f"a difference exceeds {args.margin} points, or augmentation gains less than this")


if __name__ == "__main__":
    main()
