"""Compare random resized crops and flips on the CPU: ChunkLoader, FFCV, torchvision and Kornia.

    python scripts/bench_augment.py [--images 3000] [--side 256] [--size 224] [--rounds 3] [--threads 2]
        [--only ours ffcv] [--json FILE]

The data is random pixels, generated once in ``bench-data/`` and packed once for each loader. All loaders draw
random parameters for each sample, and deliver batches of 256:

- ``ours`` is ChunkLoader with ``[RandomResizedCrop(size), RandomHorizontalFlip()]``, as uint8; ``ours, float`` also
  normalises to float32.
- ``ffcv`` uses ``RandomResizedCropRGBImageDecoder`` and ``RandomHorizontalFlip`` on raw images in random order, as
  uint8.
- ``torchvision`` is a DataLoader with ``--threads`` workers over ChunkDataset, with transforms of torchvision's ``v2``.
- ``kornia`` augments whole batches of ChunkLoader as float32, with random parameters for each sample.

Loaders take turns, in reverse order every other round. A turn is a warm-up epoch and a timed epoch. The table shows
images/s (median and range), images per second of processor time of the process and its children, and the median ratio
to the rate of FFCV in the same round. Packages that cannot be imported are skipped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from turns import Epoch, make_parser, take_turns, write_json

import h5chunk
from h5chunk import transforms

BATCH = 256
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pixels(args: argparse.Namespace) -> np.ndarray:
    path = Path("bench-data") / f"augment-{args.images}-{args.side}.npy"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.random.default_rng(0).integers(0, 256, (args.images, args.side, args.side, 3), np.uint8))
    return np.load(path, mmap_mode="r")


def packed(args: argparse.Namespace) -> Path:
    path = Path("bench-data") / f"augment-{args.images}-{args.side}.h5"
    if not path.exists():
        images = pixels(args).transpose(0, 3, 1, 2)
        h5chunk.convert({"images": np.ascontiguousarray(images), "labels": np.arange(args.images) % 10}, path)
    return path


def augmenting(args: argparse.Namespace) -> list[Any]:
    return [transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip()]


def counted(batches: Any) -> Iterator[int]:
    for images, _ in batches:
        yield len(images)


def ours(args: argparse.Namespace, more: tuple[Any, ...] = ()) -> Epoch:
    loader = h5chunk.ChunkLoader(packed(args), BATCH, transforms=[*augmenting(args), *more], resident=False)
    return lambda: counted(loader)


def ours_as_float(args: argparse.Namespace) -> Epoch:
    return ours(args, (transforms.Normalize(MEAN, STD),))


def ffcv(args: argparse.Namespace) -> Epoch:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    images, path = pixels(args), Path("bench-data") / f"augment-{args.images}-{args.side}.beton"
    if not path.exists():
        fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
        writer = DatasetWriter(str(path), fields, num_workers=1)
        writer.from_indexed_dataset([(np.asarray(images[i]), i % 10) for i in range(args.images)])
    decode = RandomResizedCropRGBImageDecoder((args.size, args.size))
    pipelines = {
        "image": [decode, RandomHorizontalFlip(), ToTensor(), ToTorchImage()],
        "label": [IntDecoder(), ToTensor(), Squeeze()],
    }
    how = {"num_workers": args.threads, "order": OrderOption.RANDOM, "os_cache": True, "drop_last": False}
    loader = Loader(str(path), batch_size=BATCH, pipelines=pipelines, **how)
    return lambda: counted(loader)


def torchvision(args: argparse.Namespace) -> Epoch:
    from torchvision.transforms import v2

    each = v2.Compose([v2.RandomResizedCrop(args.size, antialias=True), v2.RandomHorizontalFlip()])
    dataset = h5chunk.ChunkDataset(packed(args), transforms=each)
    sampler = h5chunk.ChunkSampler(dataset, BATCH)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=args.threads)
    return lambda: counted(loader)


def kornia(args: argparse.Namespace) -> Epoch:
    from kornia.augmentation import AugmentationSequential, RandomHorizontalFlip, RandomResizedCrop

    augment = AugmentationSequential(RandomResizedCrop((args.size, args.size)), RandomHorizontalFlip())
    to_float = transforms.ToDtype(torch.float32, scale=True)
    loader = h5chunk.ChunkLoader(packed(args), BATCH, transforms=[to_float, augment], resident=False)
    return lambda: counted(loader)


CONTENDERS = {
    "ours": ours, "ours, float": ours_as_float, "ffcv": ffcv, "torchvision": torchvision, "kornia": kornia,
}  # fmt: skip


def main() -> None:
    args = make_parser(__doc__.splitlines()[0], CONTENDERS, images=3000, side=256).parse_args()
    rates = take_turns(args, CONTENDERS)
    for name, own in rates.items():
        rate, cpu = (statistics.median(column) for column in zip(*own, strict=True))
        ratios = [one[0] / other[0] for one, other in zip(own, rates.get("ffcv", own), strict=True)]
        low, high = min(own)[0], max(own)[0]
        print(
            f"{name:12} {rate:8,.0f} images/s ({low:,.0f} to {high:,.0f}), {cpu:8,.0f} per second of processor time, "
            f"{statistics.median(ratios):.2f} x FFCV"
        )
    write_json(args, rates)


if __name__ == "__main__":
    main()
