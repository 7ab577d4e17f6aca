"""Compare augmentation on a GPU with normalisation alone, and with Kornia and torchvision.

    python scripts/make_packed.py data.h5 --count 40000 --size 256 256    # 8 GB
    python scripts/bench_augment_gpu.py data.h5 [--size 224] [--rounds 3] [--json FILE]

All outputs are bfloat16. ``resize`` is an antialiased RandomResizedCrop and a flip; ``crop`` is RandomCrop and a flip.

- Kernels: images/s of the kernels alone, timed by events while a full queue runs, on batches of 1,024 images, which do
  not fit in the GPU's cache. Random parameters are on the GPU beforehand. The ratio is to the kernel that normalises
  whole images.
- Loaders: images/s of ChunkLoader in its second epoch with batches of 256, resident and streamed, contiguous and
  channels_last. All loaders take turns. Prints medians, and the median ratio to normalisation in the same round.
- Peers: resizing and flipping without normalisation. On batches on the GPU, Kornia draws random parameters for each
  sample, and torchvision's v2 processes one image after the other. From the file, v2 runs in a DataLoader with a
  worker per core. The ratio is that of the resident loader's ``resize`` to the peer.

Kornia and torchvision are skipped if they are not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

import h5chunk
from h5chunk.plan.draws import Draws
from h5chunk.store.hdf5.open import open_file
from h5chunk.transforms import Normalize, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, ToDtype
from h5chunk.transforms.images import AugmentConverter, ImageConverter, fresh

NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
BATCH, LARGE_BATCH, BUFFERS = 256, 1024, 3
SLEEP_CYCLES = 20_000_000  # the GPU waits for these cycles, so that all launches are queued before the first one runs
KORNIA_BATCHES = (64, 256, 1024)
PEER_S = 1.5  # time to measure a peer
Epoch = Callable[[], Iterable[Any]]


def lists(size: int, channels_last: bool) -> dict[str, list[Any]]:
    """Return the lists of transforms to compare."""
    convert = [NORMALIZE, ToDtype(torch.bfloat16, channels_last=channels_last)]
    resize, flip = RandomResizedCrop(size), RandomHorizontalFlip()
    return {"normalise": convert, "resize": [resize, flip, *convert], "crop": [RandomCrop(size), flip, *convert]}


def kernel_rates(shape: tuple[int, ...], size: int) -> dict[str, float]:
    images = [torch.randint(0, 256, (LARGE_BATCH, *shape), dtype=torch.uint8, device="cuda") for _ in range(BUFFERS)]
    draws = Draws(0, 0, np.arange(LARGE_BATCH), kept={}, whole=np.arange(LARGE_BATCH))
    rates = {}
    for layout in ("contiguous", "channels_last"):
        for name, transforms in lists(size, layout == "channels_last").items():
            make = ImageConverter if name == "normalise" else AugmentConverter
            converter = make(transforms, torch.uint8, shape, 0, fresh)
            converter.prepare(torch.device("cuda"))
            converter.release()  # waits until the kernel is compiled
            rates[f"{name}, {layout}"] = LARGE_BATCH / gpu_seconds(
                lambda number, convert=converter: convert(images[number % BUFFERS], False, draws)
            )
    return rates


def gpu_seconds(work: Callable[[int], Any], count: int = 12) -> float:
    """Return the time on the GPU of one call, in seconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(BUFFERS):
        work(number)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    for number in range(count):
        work(number)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count / 1000


def epoch_rate(loader: Iterable[Any]) -> float:
    """Return images/s of the loader's second epoch."""
    for _ in loader:
        pass
    torch.cuda.synchronize()
    started, count = time.perf_counter(), 0
    for images, _ in loader:
        count += len(images)
    torch.cuda.synchronize()
    return count / (time.perf_counter() - started)


def loader_rates(path: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """Return images/s of each ChunkLoader in each round."""
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        for resident in (True, False):
            for layout in ("contiguous", "channels_last"):
                for name, transforms in lists(size, layout == "channels_last").items():
                    options = {"device": "cuda", "resident": resident, "transforms": transforms}
                    with h5chunk.ChunkLoader(path, BATCH, **options) as loader:
                        key = f"{'resident' if resident else 'streamed'}, {layout}, {name}"
                        rates.setdefault(key, []).append(epoch_rate(loader))
    return rates


def work_rate(work: Callable[[], int]) -> float:
    """Return images/s of repeated calls. A call returns the number of images that it processed."""
    work()
    torch.cuda.synchronize()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < PEER_S:
        count += work()
        torch.cuda.synchronize()
    return count / (time.perf_counter() - started)


def kornia_rates(images: torch.Tensor, size: int) -> dict[str, float]:
    from kornia.augmentation import AugmentationSequential
    from kornia.augmentation import RandomHorizontalFlip as Flip
    from kornia.augmentation import RandomResizedCrop as Crop

    rates = {}
    for dtype in (torch.float32, torch.float16):
        augment = AugmentationSequential(Crop((size, size)), Flip()).cuda()
        for count in KORNIA_BATCHES:
            batch = images[:count].to(dtype) / 255

            def work(batch: torch.Tensor = batch, augment: Any = augment) -> int:
                return len(augment(batch))

            rates[f"kornia {dtype} batch {count}"] = work_rate(work)
    return rates


def torchvision_rates(path: Path, images: torch.Tensor, size: int) -> dict[str, float]:
    from torchvision.transforms import v2

    each = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])
    rate = work_rate(lambda: len(torch.stack([each(image) for image in images[:BATCH]])))
    dataset, workers = h5chunk.ChunkDataset(path, transforms=each), os.cpu_count() or 1
    sampler = h5chunk.ChunkSampler(dataset, BATCH)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=workers, pin_memory=True)
    batches = iter(loader)
    for _ in islice(batches, workers):
        pass  # until all workers have started
    started, count = time.perf_counter(), 0
    for batch, _ in islice(batches, len(loader) // 4):
        count += len(batch.cuda(non_blocking=True))
    torch.cuda.synchronize()
    in_workers = count / (time.perf_counter() - started)
    return {"torchvision v2 on the GPU": rate, f"torchvision v2 in {workers} workers": in_workers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    with open_file(args.path) as file:
        shape = file["images"].shape[1:]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {args.size} px from {shape}")
    kernels = kernel_rates(shape, args.size)
    for name, rate in kernels.items():
        layout = name.split(", ")[1]
        print(f"kernel {name:28} {rate:12,.0f} images/s, {rate / kernels[f'normalise, {layout}']:.2f}", flush=True)
    loaders = loader_rates(args.path, args.size, args.rounds)
    for name, own in loaders.items():
        limits = loaders[f"{name.rpartition(', ')[0]}, normalise"]
        ratio = statistics.median(one / limit for one, limit in zip(own, limits, strict=True))
        print(f"loader {name:36} {statistics.median(own):12,.0f} images/s, {ratio:.2f}", flush=True)
    images = torch.randint(0, 256, (max(KORNIA_BATCHES), *shape), dtype=torch.uint8, device="cuda")
    others: dict[str, float] = {}
    for measure in (lambda: kornia_rates(images, args.size), lambda: torchvision_rates(args.path, images, args.size)):
        try:
            others |= measure()
        except ImportError as error:
            print(f"skipped: {error}")
    ours = statistics.median(loaders["resident, contiguous, resize"])
    for name, rate in others.items():
        print(f"{name:42} {rate:12,.0f} images/s, ChunkLoader is {ours / rate:.1f} times as fast", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"kernels": kernels, "loaders": loaders, "others": others}, indent=1))


if __name__ == "__main__":
    main()
