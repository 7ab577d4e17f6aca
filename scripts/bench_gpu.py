"""What ChunkLoader delivers to a GPU, against the limits of the machine, and how busy it keeps a network.

    python scripts/make_packed.py data.h5 --count 200000
    python scripts/bench_gpu.py data.h5 [--models resnet50 resnet18 vit_b_16] [--json FILE]

Limits, in the same run: reading the file from the page cache into pinned memory with as many threads (preadv of 8 MB),
and copying pinned memory to the GPU. Delivery: normalised batches on the GPU, bf16 and float32, medians of epochs.
Utilisation: images/s of training with the loader over images/s on one cached real batch; blocks of steps of both take
turns; prints the median of the ratios of neighbouring blocks and a 95 % bootstrap interval. Needs torchvision for the
models.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

import h5chunk
from h5chunk.store.format import open_file

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIECE = 8 << 20


def read_limit(path: Path, threads: int, num_bytes: int) -> float:
    """Bytes/s of preadv from the page cache into pinned memory that is used again."""
    descriptor = os.open(path, os.O_RDONLY)
    pieces = iter(range(0, num_bytes - PIECE, PIECE))
    buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True).numpy() for _ in range(threads)]
    lock = threading.Lock()

    def work(buffer: np.ndarray) -> None:
        while True:
            with lock:
                offset = next(pieces, None)
            if offset is None:
                return
            os.preadv(descriptor, [buffer], offset)

    workers = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(descriptor)
    return num_bytes / (time.perf_counter() - started)


def copy_limit() -> float:
    """Bytes/s of copying pinned memory to the GPU."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return host.nbytes / statistics.median(times)


def delivery(path: Path, args: argparse.Namespace, dtype: torch.dtype) -> list[float]:
    """Images/s of each epoch but the first."""
    rates = []
    with h5chunk.ChunkLoader(
        path, args.batch_size, device="cuda", normalize=(MEAN, STD), dtype=dtype, num_threads=args.threads
    ) as loader:
        print(loader)
        for _ in range(args.epochs + 1):
            started, images = time.perf_counter(), 0
            for batch, _labels in loader:
                images += len(batch)
            torch.cuda.synchronize()
            rates.append(images / (time.perf_counter() - started))
    return rates[1:]


def make_model(name: str) -> nn.Module:
    if name == "resnet9":
        return resnet9()
    import torchvision

    return getattr(torchvision.models, name)()


def resnet9() -> nn.Module:
    """The small residual network that is common for CIFAR-10."""

    def block(inputs: int, outputs: int, pool: bool) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
        return nn.Sequential(*layers, nn.ReLU(inplace=True), *([nn.MaxPool2d(2)] if pool else []))

    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.body = nn.Sequential(block(width, width, False), block(width, width, False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.body(x)

    layers = [block(3, 64, False), block(64, 128, True), Residual(128), block(128, 256, True), block(256, 512, True)]
    return nn.Sequential(*layers, Residual(512), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(512, 1000))


def utilisation(path: Path, name: str, args: argparse.Namespace) -> dict[str, float]:
    """Rate with the loader over rate on a cached batch."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = make_model(name).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    step_model = torch.compile(model) if args.compile else model
    channels_last = name != "vit_b_16"
    batch_size = args.train_batch_size

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(step_model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    loader = h5chunk.ChunkLoader(
        path,
        batch_size,
        device="cuda",
        normalize=(MEAN, STD),
        dtype=torch.bfloat16,
        channels_last=channels_last,
        drop_last=True,
        num_threads=args.threads,
    )

    def forever() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from loader

    batches = forever()
    cached = tuple(tensor.clone() for tensor in next(batches))
    for _ in range(30):
        step(*cached)
        step(*next(batches))

    def block(real: bool) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(args.block):
            step(*(next(batches) if real else cached))
        torch.cuda.synchronize()
        return args.block * batch_size / (time.perf_counter() - started)

    pairs = []
    cpu_before, started = time.process_time(), time.perf_counter()
    real_cpu = 0.0
    for number in range(args.blocks):
        order = (True, False) if number % 2 else (False, True)
        rates = {}
        for real in order:
            before = time.process_time()
            rates[real] = block(real)
            if real:
                real_cpu += (time.process_time() - before) / (args.block * batch_size / rates[True])
        pairs.append((rates[True], rates[False]))
    del cpu_before, started
    batches.close()
    loader.close()
    ratios = np.array([real / fake for real, fake in pairs])
    rng = np.random.default_rng(0)
    boot = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    return {
        "utilisation": float(np.median(ratios)),
        "low": float(np.quantile(boot, 0.025)),
        "high": float(np.quantile(boot, 0.975)),
        "real_images_per_s": statistics.median(real for real, _ in pairs),
        "cached_images_per_s": statistics.median(fake for _, fake in pairs),
        "cores_used": real_cpu / args.blocks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--train-batch-size", type=int, default=256)
    parser.add_argument("--block", type=int, default=20, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--compile", action="store_true", help="torch.compile the models")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with open_file(args.path) as file:
        image_bytes = file["images"].nbytes // len(file["images"])
        num_bytes = file["images"].nbytes
    read_limit(args.path, args.threads, num_bytes)  # into the page cache
    reads = [read_limit(args.path, args.threads, num_bytes) for _ in range(3)]
    result: dict[str, object] = {"read_bytes_per_s": statistics.median(reads), "copy_bytes_per_s": copy_limit()}
    limit = min(statistics.median(reads), copy_limit())
    print(f"page cache to pinned memory {statistics.median(reads) / 1e9:6.1f} GB/s ({args.threads} threads)")
    print(f"pinned memory to the GPU    {result['copy_bytes_per_s'] / 1e9:6.1f} GB/s", flush=True)
    for dtype in (torch.bfloat16, torch.float32):
        rates = delivery(args.path, args, dtype)
        rate = statistics.median(rates)
        result[str(dtype)] = {"images_per_s": rate, "rates": rates, "of_limit": rate * image_bytes / limit}
        print(f"delivered {dtype}: {rate:,.0f} images/s, {rate * image_bytes / limit:.2f} of the limit", flush=True)
    for name in args.models:
        result[name] = one = utilisation(args.path, name, args)
        print(
            f"{name}: utilisation {one['utilisation']:.4f} ({one['low']:.4f} to {one['high']:.4f}), "
            f"{one['real_images_per_s']:,.0f} against {one['cached_images_per_s']:,.0f} images/s cached, "
            f"{one['cores_used']:.1f} cores used",
            flush=True,
        )
    if args.json:
        result["versions"] = {"h5chunk": h5chunk.__version__, "torch": torch.__version__}
        result["machine"] = (
            f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        )
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
