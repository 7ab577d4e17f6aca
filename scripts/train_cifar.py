"""Train a ResNet-9 on CIFAR-10 within seconds on a GPU: small images stay on the device and are augmented there.

    python scripts/train_cifar.py                                        # CIFAR-10, as torchvision stores it in data/
    python scripts/train_cifar.py --made 2000 --model cnn --epochs 3     # synthetic data and a small network, for a CPU

The images are converted once, into cifar10-train.h5 and cifar10-test.h5 beside them. ChunkLoader keeps all images in
the memory of the device, and computes augmented batches there: each image is flipped every other epoch, shifted by up
to 4 pixels, and partly covered. The script downloads nothing: run ``torchvision.datasets.CIFAR10("data",
download=True)`` first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import PLAIN, make_model
from torch import nn

import h5chunk
from h5chunk.transforms import AlternatingFlip, Cutout, Normalize, RandomCrop, ToDtype

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10
CLASSES = 10


class MadeImages:
    """A data set like CIFAR-10: noise, with a square whose height and colour depend on the class."""

    classes = tuple(f"class{number}" for number in range(CLASSES))

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._labels = rng.integers(0, CLASSES, count)
        self._images = rng.integers(0, 128, (count, 3, 32, 32), np.uint8)
        for image, label in zip(self._images, self._labels, strict=True):
            color, row = divmod(int(label), 3)
            image[slice(color, color + 1) if color < 3 else slice(3), 4 + 9 * row : 12 + 9 * row, 8:24] += 100

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self._images[index], int(self._labels[index])


def open_source(args: argparse.Namespace, *, train: bool) -> Any:
    """Open CIFAR-10, or make similar data."""
    if args.made:
        return MadeImages(args.made, seed=int(train))
    from torchvision.datasets import CIFAR10

    return CIFAR10(args.root, train=train)


def convert(args: argparse.Namespace, *, train: bool) -> Path:
    """Convert the images once, and return the path of the file."""
    name = f"made{args.made}" if args.made else "cifar10"
    path = args.root / f"{name}-{'train' if train else 'test'}.h5"
    if not path.exists():
        args.root.mkdir(parents=True, exist_ok=True)
        h5chunk.convert(open_source(args, train=train), path)
    return path


def make_loader(args: argparse.Namespace, *, train: bool) -> h5chunk.ChunkLoader:
    """Return augmented, shuffled batches of the training images, or the test images as they are."""
    dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    normalize = [Normalize(MEAN, STD), ToDtype(dtype, channels_last=True)]
    augment = [AlternatingFlip(), RandomCrop(32, padding=4, padding_mode="reflect"), Cutout(8)] if train else []
    options = {"shuffle": train, "drop_last": train, "seed": args.seed, "device": args.device, "resident": True}
    path = convert(args, train=train)
    return h5chunk.ChunkLoader(path, args.batch_size, transforms=[*augment, *normalize], **options)


def train(args: argparse.Namespace) -> float:
    """Train, print a line for each epoch, and return the accuracy on the test images."""
    loader, test = make_loader(args, train=True), make_loader(args, train=False)
    print(loader)
    torch.manual_seed(args.seed)
    network = make_model(args.model, CLASSES, (32, 32)).to(args.device, memory_format=torch.channels_last)
    forward = torch.compile(network) if args.compile else network
    optimizer = torch.optim.SGD(network.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    how = {"pct_start": 0.25, "anneal_strategy": "linear"}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * len(loader), **how)
    accuracy = 0.0
    for epoch in range(args.epochs):
        total, started = torch.zeros((), device=args.device), time.perf_counter()
        for images, labels in loader:
            with torch.autocast(args.device.type, torch.bfloat16, enabled=args.device.type == "cuda"):
                loss = nn.functional.cross_entropy(forward(images), labels, label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        mean = float(total) / len(loader)  # waits for the device
        seconds = time.perf_counter() - started
        accuracy = evaluate(args, network, test)
        print(f"epoch {epoch + 1:3d}  loss {mean:.4f}  {seconds:6.2f} s  test {accuracy:.2%}", flush=True)
    return accuracy


@torch.no_grad()
def evaluate(args: argparse.Namespace, network: nn.Module, batches: h5chunk.ChunkLoader) -> float:
    """Return the accuracy, with the logits of each image and its mirror image added."""
    right = torch.zeros((), device=args.device)
    num_images = 0
    network.eval()
    for images, labels in batches:
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.device.type == "cuda"):
            answers = network(images) + network(images.flip(3))
        right += (answers.argmax(1) == labels).sum()
        num_images += len(labels)
    network.train()
    return float(right) / num_images


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--root",
        type=Path,
        default=Path("data"),
        help="folder of torchvision's data and of the converted files (%(default)s)",
    )
    add("--made", type=int, default=0, metavar="N", help="train on N made images")
    add("--model", choices=PLAIN, default="resnet9")
    add("--epochs", type=int, default=16)
    add("--batch-size", type=int, default=512)
    add("--lr", type=float, default=0.4, help="highest learning rate (%(default)s)")
    add("--seed", type=int, default=0)
    add("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    args = parser.parse_args(argv)
    try:
        return train(args)
    except ImportError as error:
        parser.exit(2, f"{parser.prog}: error: CIFAR-10 is read by torchvision ({error}): install it, or give --made\n")
    except RuntimeError as error:
        if "not found or corrupted" not in str(error):
            raise
        parser.exit(2, f"{parser.prog}: error: {args.root} has no CIFAR-10: {error}\n")


if __name__ == "__main__":
    main()
