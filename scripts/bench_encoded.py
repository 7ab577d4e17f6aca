"""Compare loaders of JPEG images: ChunkLoader on a converted file, decoding alone, DALI and FFCV.

    python scripts/bench_encoded.py [--images 2000] [--side 224] [--size 224] [--rounds 3] [--threads 2]
        [--device cuda] [--decoder gpu] [--only ours decode ffcv] [--json FILE]
    python scripts/bench_encoded.py --images 16384 --side 256 --device cuda --train resnet50

The data is JPEG images of quality 90, as noisy as photographs, made by ``make_images.py`` in ``bench-data/``. Batches
have 256 images:

- ``ours``: ChunkLoader on a file of ``convert --keep-encoded``, with ``[CenterCrop(size)]``, as (C, H, W). ``ours,
  interleaved`` writes the memory format of all other loaders, ``channels_last``. ``ours, cropped`` uses
  ``[RandomResizedCrop(size), RandomHorizontalFlip()]``, and ``ours, float`` also normalises to float32. With
  ``--device cuda``, uint8 images are delivered on the GPU.
- ``decode``: threads with simplejpeg decode the same bytes from memory, in random order, into two alternating batches.
  With ``--device cuda``, ``decode, gpu`` decodes batches with nvJPEG.
- ``dali``: DALI on the CPU, from the folder: ``fn.readers.file``, which shuffles, ``fn.decoders.image`` and a central
  crop; or, for ``dali, cropped``, ``fn.decoders.image_random_crop``, a resize and a flip.
- ``ffcv``: images in JPEG mode, in random order, decoded by ``CenterCropRGBImageDecoder`` with ratio 1; or, for ``ffcv,
  cropped``, by ``RandomResizedCropRGBImageDecoder``, and flipped.

Loaders take turns, in reverse order every other round. A turn is a warm-up epoch and a timed epoch. The table shows
images/s (median and range), and images per second of processor time (median). Packages that cannot be imported are
skipped.

With ``--train``, a network is trained on the crops instead, in bf16 and compiled. Prints images/s of the loader alone,
which is the decoding rate of this machine; of whole training epochs; and of training on one cached batch, before and
after each epoch. ``--decoder`` decodes on the GPU or in threads, instead of what the loader would choose.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ablation_feeds import cached_rate
from ablation_train import Settings, Trainer, Waiting, inspect, kernels, make_loader, open_dataset, run_epoch
from models import MODELS
from PIL import Image
from turns import Epoch, make_parser, take_turns, write_json

import h5chunk
from h5chunk import transforms
from h5chunk.transforms import any_size

BATCH, GROUP = 256, 8
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photos(args: argparse.Namespace) -> Path:
    """Make the folder of images if it is missing, and return it."""
    folder = Path("bench-data") / f"jpegs-{args.images}-{args.side}"
    if not folder.exists():
        options = ("--count", args.images, "--size", args.side, args.side, "--quality", 90)
        script = Path(__file__).with_name("make_images.py")
        subprocess.run([sys.executable, str(script), str(folder), *map(str, options)], check=True)
    return folder


def files(args: argparse.Namespace) -> list[Path]:
    return sorted(photos(args).glob("*/*.jpg"))


def kept(args: argparse.Namespace) -> Path:
    folder = photos(args)
    path = folder.with_suffix(".h5")
    if not path.exists():
        h5chunk.convert(folder, path, keep_encoded=True)
    return path


def counted(batches: Any) -> Iterator[int]:
    for batch in batches:
        yield len(batch[0] if isinstance(batch, (tuple, list)) else batch)


def loaded(args: argparse.Namespace, *chosen: Any) -> Epoch:
    loader = h5chunk.ChunkLoader(kept(args), BATCH, transforms=chosen, num_threads=args.threads, device=args.device)
    print(loader)

    def epoch() -> Iterator[int]:
        yield from counted(loader)
        if args.device == "cuda":
            torch.cuda.synchronize()

    return epoch


def ours(args: argparse.Namespace) -> Epoch:
    return loaded(args, transforms.CenterCrop(args.size))


def ours_interleaved(args: argparse.Namespace) -> Epoch:
    return loaded(args, transforms.CenterCrop(args.size), transforms.ToDtype(torch.uint8, channels_last=True))


def ours_cropped(args: argparse.Namespace, *more: Any) -> Epoch:
    return loaded(args, transforms.RandomResizedCrop(args.size), transforms.RandomHorizontalFlip(), *more)


def ours_as_float(args: argparse.Namespace) -> Epoch:
    return ours_cropped(args, transforms.Normalize(MEAN, STD))


def decode(args: argparse.Namespace) -> Epoch:
    from simplejpeg import decode_jpeg

    data = [path.read_bytes() for path in files(args)]
    out = np.empty((2 * BATCH, args.side, args.side, 3), np.uint8)
    pool, order = ThreadPoolExecutor(args.threads), np.random.default_rng(0).permutation(len(data))

    def group(first: int) -> int:
        some = order[first : first + GROUP].tolist()
        for place, number in enumerate(some, first):
            decode_jpeg(data[number], "RGB", buffer=out[place % len(out)])
        return len(some)

    return lambda: pool.map(group, range(0, len(data), GROUP))


def decode_gpu(args: argparse.Namespace) -> Epoch:
    from h5chunk.transforms.nvjpeg import find_decoder

    if args.device != "cuda" or (found := find_decoder()) is None:
        raise ImportError("needs --device cuda and torchvision")
    data = [np.frombuffer(path.read_bytes(), np.uint8) for path in files(args)]
    sound, size, device = np.ones(BATCH, bool), (args.side, args.side), torch.device("cuda")

    def epoch() -> Iterator[int]:
        for first in range(0, len(data), BATCH):
            some = data[first : first + BATCH]
            found[1](some, [size] * len(some), sound[: len(some)], lambda number: torch.empty(0), device)
            yield len(some)

    return epoch


def dali(args: argparse.Namespace, cropped: bool = False) -> Epoch:
    from nvidia.dali import fn, pipeline_def

    folder, size = str(photos(args)), (args.size, args.size)

    @pipeline_def(batch_size=BATCH, num_threads=args.threads, device_id=None, prefetch_queue_depth=2, seed=0)
    def pipeline() -> Any:
        data, labels = fn.readers.file(file_root=folder, random_shuffle=True, initial_fill=4 * BATCH, name="files")
        if cropped:
            images = fn.resize(fn.decoders.image_random_crop(data), size=size)
            images = fn.flip(images, horizontal=fn.random.coin_flip())
        else:
            images = fn.crop(fn.decoders.image(data), crop=size)
        return images, labels

    running = pipeline()
    running.build()

    def epoch() -> Iterator[int]:
        for _ in range(args.images // BATCH):
            yield len(running.run()[0])

    return epoch


def dali_cropped(args: argparse.Namespace) -> Epoch:
    return dali(args, cropped=True)


def ffcv(args: argparse.Namespace, cropped: bool = False) -> Epoch:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    path = photos(args).with_suffix(".beton")
    if not path.exists():
        images = [Image.open(io.BytesIO(each.read_bytes())) for each in files(args)]
        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
        DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset([(image, 0) for image in images])
    size = (args.size, args.size)
    first = [RandomResizedCropRGBImageDecoder(size), RandomHorizontalFlip()] if cropped else []
    pipelines = {
        "image": [*(first or [CenterCropRGBImageDecoder(size, 1)]), ToTensor(), ToTorchImage()],
        "label": [IntDecoder(), ToTensor(), Squeeze()],
    }
    how = {"num_workers": args.threads, "order": OrderOption.RANDOM, "os_cache": True, "drop_last": False}
    loader = Loader(str(path), batch_size=BATCH, pipelines=pipelines, **how)
    return lambda: counted(loader)


def ffcv_cropped(args: argparse.Namespace) -> Epoch:
    return ffcv(args, cropped=True)


CONTENDERS = {
    "ours": ours, "ours, interleaved": ours_interleaved, "decode": decode, "decode, gpu": decode_gpu, "ffcv": ffcv,
    "ours, cropped": ours_cropped, "ffcv, cropped": ffcv_cropped, "ours, float": ours_as_float, "dali": dali,
    "dali, cropped": dali_cropped,
}  # fmt: skip


def train(args: argparse.Namespace) -> None:
    """Print the rates of the loader alone, of training with it, and of training on one cached batch."""
    size = args.size, args.size
    gpu = {"amp": "bf16", "compile": True} if args.device == "cuda" else {}
    how = {"augment": size, "resident": "no", "set_to_none": True, "channels_last": True, **gpu}
    settings = Settings(kept(args), args.train, args.device, batch_size=BATCH, **how)
    dataset = open_dataset(settings.data)
    alone, trained, cached, waiting = [], [], [], Waiting()
    with kernels(settings), make_loader(settings, dataset) as loader:
        print(loader)
        trainer = Trainer(settings, size, inspect(settings, dataset)[1])
        for _ in range(2):
            started = time.perf_counter()
            for images, labels in loader:
                batch = images.clone(), labels.clone()
            float(batch[0].sum())  # waits for the device
            alone.append(len(loader) * BATCH / (time.perf_counter() - started))
        before = cached_rate(trainer, batch, 2)
        for _ in range(1 + args.rounds):
            trained.append(run_epoch(trainer, waiting.over(loader), waiting))
            after = cached_rate(trainer, batch, 2)
            cached.append((before + after) / 2)
            before = after
    parts = [epoch.images_per_s / rate for epoch, rate in zip(trained[1:], cached[1:], strict=True)]
    print(f"loader alone    {alone[-1]:8,.0f} images/s")
    print(f"one batch       {statistics.median(cached[1:]):8,.0f} images/s")
    print(f"training        {statistics.median(epoch.images_per_s for epoch in trained[1:]):8,.0f} images/s")
    print(f"utilisation     {statistics.median(parts):8.4f} ({min(parts):.4f} to {max(parts):.4f})")
    print(f"waiting         {statistics.median(epoch.waiting for epoch in trained[1:]):8.4f} of the time")


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0], CONTENDERS, images=2000, side=224)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--decoder", choices=("gpu", "cpu"))
    parser.add_argument("--train", choices=MODELS)
    args = parser.parse_args()
    if args.decoder:
        any_size.ENOUGH_THREADS = {"gpu": 1 << 20, "cpu": 0}[args.decoder]
    if args.train:
        train(args)
        return
    rates = take_turns(args, CONTENDERS)
    for name, turns in rates.items():
        own, by_processor = zip(*turns, strict=True)
        spread = f"({min(own):,.0f} to {max(own):,.0f})"
        print(f"{name:18} {statistics.median(own):8,.0f} images/s {spread:20} {statistics.median(by_processor):8,.0f}")
    write_json(args, rates)


if __name__ == "__main__":
    main()
