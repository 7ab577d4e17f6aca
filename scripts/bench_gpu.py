"""What ChunkLoader delivers to a GPU, against the limits of the machine, and how busy it keeps a network.

    python scripts/make_packed.py data.h5 --count 200000                 # 30 GB
    python scripts/make_packed.py small.h5 --count 1000000 --size 32 32  # 3 GB
    python scripts/bench_gpu.py data.h5 [--models resnet50 resnet18 vit_b_16] [--compile] [--json FILE]
    python scripts/bench_gpu.py small.h5 --models resnet9 --compile

Limits, in the same run, turn about: reading the file from the page cache into pinned memory (preadv of 8 MB, as many
threads as are best), and copying pinned memory to the GPU. Delivery: normalised batches on the GPU, bf16 and float32,
medians of epochs; nothing is resident. First batch: from construction, on this file and on a sparse one of 100 GB.
Utilisation: images/s of training with the loader over images/s on one cached real batch; blocks of steps of both take
turns; prints the median of the ratios of neighbouring blocks, a 95 % bootstrap interval, and the processor time used.
Steps: the slowest step of whole epochs over the median one, from GPU events, the first and last of an epoch included.
Needs torchvision for its models.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from models import make_model
from torch import nn

import h5chunk
from h5chunk.feed.slots import PinnedMemory
from h5chunk.store.format import open_file
from h5chunk.transforms import Normalize, ToDtype

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIECE = 8 << 20
SPARSE_BYTES = 100 << 30
WARM_STEPS = 30


def read_rate(path: Path, threads: int, num_bytes: int) -> float:
    """Bytes/s of preadv from the page cache into pinned memory that is used again."""
    descriptor = os.open(path, os.O_RDONLY)
    pieces = iter(range(0, num_bytes - PIECE, PIECE))
    memory = PinnedMemory(threads * PIECE)
    lock = threading.Lock()

    def work(buffer: np.ndarray) -> None:
        while True:
            with lock:
                offset = next(pieces, None)
            if offset is None:
                return
            os.preadv(descriptor, [buffer], offset)

    buffers = memory.bytes[: threads * PIECE].reshape(threads, PIECE)
    workers = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    os.close(descriptor)
    memory.close()
    return num_bytes / seconds


def copy_rate() -> float:
    """Bytes/s of copying pinned memory to the GPU."""
    memory = PinnedMemory(256 << 20)
    host = torch.from_numpy(memory.bytes)
    there = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    memory.close()
    return host.nbytes / statistics.median(times)


def make_loader(
    path: Path,
    args: argparse.Namespace,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    **options: Any,
) -> h5chunk.ChunkLoader:
    return h5chunk.ChunkLoader(
        path,
        args.batch_size,
        device="cuda",
        transforms=[Normalize(MEAN, STD), ToDtype(dtype, channels_last)],
        num_threads=args.threads,
        resident=False,
        **options,
    )


def delivery(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The limits and what is delivered, round by round."""
    with open_file(path) as file:
        num_bytes, image_bytes = file["images"].nbytes, file["images"].nbytes // len(file["images"])
    counts = [n for n in (1, 2, 4, 8, 12, 16, 32) if n <= (os.cpu_count() or 1)]
    read_rate(path, counts[-1], num_bytes)  # into the page cache
    best = max(counts, key=lambda threads: read_rate(path, threads, num_bytes))
    rates: dict[str, list[float]] = {"read": [], "copy": [], "bfloat16": [], "float32": []}
    dtypes = ("bfloat16", "float32")
    print(make_loader(path, args), flush=True)
    for _ in range(args.rounds):
        rates["read"].append(read_rate(path, best, num_bytes))
        rates["copy"].append(copy_rate())
        for name in dtypes:
            with make_loader(path, args, dtype=getattr(torch, name)) as loader:
                epoch(loader)  # the first one touches fresh memory
                rates[name].append(epoch(loader) * image_bytes)
    middle = {name: statistics.median(each) for name, each in rates.items()}
    limit = min(middle["read"], middle["copy"])
    print(f"page cache to pinned memory {middle['read'] / 1e9:6.1f} GB/s ({best} threads)")
    print(f"pinned memory to the GPU    {middle['copy'] / 1e9:6.1f} GB/s")
    for name in dtypes:
        print(
            f"delivered {name:9s} {middle[name] / image_bytes:>9,.0f} images/s, {middle[name] / limit:.3f} of the limit"
        )
    return {"bytes_per_s": rates, "limit_bytes_per_s": limit} | {name: middle[name] / limit for name in dtypes}


def epoch(loader: h5chunk.ChunkLoader) -> float:
    """Images/s."""
    started, images = time.perf_counter(), 0
    for batch, _labels in loader:
        images += len(batch)
    torch.cuda.synchronize()
    return images / (time.perf_counter() - started)


def sparse_file(path: Path) -> Path:
    """100 GB of images that take no disk, in chunks as `h5chunk convert` writes them."""
    shape = (SPARSE_BYTES // (3 * 224 * 224), 3, 224, 224)
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((8, *shape[1:]))
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        h5py.h5d.create(file.id, b"images", h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple(shape), properties)
        file["labels"] = np.zeros(shape[0], np.int64)
    return path


def first_batches(path: Path, args: argparse.Namespace) -> dict[str, float]:
    """Seconds from construction to the first batch on the GPU."""
    seconds = {}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for name, file in (("this file", path), ("sparse file of 100 GB", sparse_file(Path(folder) / "sparse.h5"))):
            times = []
            for _ in range(args.rounds):
                started = time.perf_counter()
                with make_loader(file, args) as loader:
                    next(iter(loader))
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - started)
            seconds[name] = statistics.median(times)
            print(f"first batch, {name}: {seconds[name]:.3f} s (slowest {max(times):.3f})", flush=True)
    return seconds


class Training:
    """A network, its optimizer and a loader that never ends."""

    def __init__(self, path: Path, name: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        with open_file(path) as file:
            image_size = file["images"].shape[2:]
        network = make_model(name, 1000, image_size).cuda()
        channels_last = name != "vit_b_16"
        if channels_last:
            network = network.to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9)
        self._network = torch.compile(network) if args.compile else network
        self.loader = make_loader(path, args, dtype=torch.bfloat16, channels_last=channels_last, drop_last=True)
        self.batches = self._forever()
        self.cached = tuple(tensor.clone() for tensor in next(self.batches))
        for _ in range(WARM_STEPS):
            self.step(*self.cached)
            self.step(*next(self.batches))

    def _forever(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from self.loader

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(self._network(images), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        self.batches.close()
        self.loader.close()


def utilisation(training: Training, args: argparse.Namespace) -> dict[str, float]:
    """Rate with the loader over rate on a cached batch."""

    def block(batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
        """Images/s, and processor time over time."""
        torch.cuda.synchronize()
        started, cpu_started = time.perf_counter(), time.process_time()
        for _ in range(args.block):
            training.step(*batch())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return args.block * args.batch_size / seconds, (time.process_time() - cpu_started) / seconds

    sources = {"real": lambda: next(training.batches), "cached": lambda: training.cached}
    rates: dict[str, list[float]] = {"real": [], "cached": []}
    cores: dict[str, list[float]] = {"real": [], "cached": []}
    for number in range(args.blocks):
        for name in ("real", "cached") if number % 2 else ("cached", "real"):
            rate, used = block(sources[name])
            rates[name].append(rate)
            cores[name].append(used)
    ratios = np.array(rates["real"]) / np.array(rates["cached"])
    resampled = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(resampled, axis=1), (0.025, 0.975))
    return {
        "utilisation": float(np.median(ratios)),
        "low": float(low),
        "high": float(high),
        "real_images_per_s": statistics.median(rates["real"]),
        "cached_images_per_s": statistics.median(rates["cached"]),
        "cores_used": statistics.median(cores["real"]),
        "cores_used_on_cached": statistics.median(cores["cached"]),
    }


def steps(training: Training, num_epochs: int) -> dict[str, float]:
    """The slowest step of whole epochs, seams included, over the median one."""
    training.batches.close()
    training.loader.close()
    events = []
    for _ in range(num_epochs):
        for batch in training.loader:
            training.step(*batch)
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
    torch.cuda.synchronize()
    times = np.array([one.elapsed_time(two) for one, two in pairwise(events)])
    middle = float(np.median(times))
    return {"median_ms": middle, "slowest_ms": float(times.max()), "over_twice": int((times > 2 * middle).sum())}


def train(path: Path, name: str, args: argparse.Namespace) -> dict[str, float]:
    training = Training(path, name, args)
    found = utilisation(training, args)
    print(
        f"{name}: utilisation {found['utilisation']:.4f} ({found['low']:.4f} to {found['high']:.4f}), "
        f"{found['real_images_per_s']:,.0f} against {found['cached_images_per_s']:,.0f} images/s cached; "
        f"{found['cores_used']:.1f} of {os.cpu_count()} cores used, {found['cores_used_on_cached']:.1f} on the cached",
        flush=True,
    )
    if name in args.steps:
        found |= steps(training, 2)
        print(
            f"{name}: two epochs, slowest step {found['slowest_ms']:.2f} ms, median {found['median_ms']:.2f} ms, "
            f"{found['over_twice']} over twice the median",
            flush=True,
        )
    training.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the loader; default: its own")
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--steps", nargs="*", default=[], help="models whose every step is timed")
    parser.add_argument("--block", type=int, default=20, help="training steps of a block")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="torch.compile the models")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"delivery": delivery(args.path, args), "first_batch_s": first_batches(args.path, args)}
    for name in args.models:
        result[name] = train(args.path, name, args)
    if args.json:
        result["versions"] = {"h5chunk": h5chunk.__version__, "torch": torch.__version__, "h5py": h5py.__version__}
        python = platform.python_version()
        result["machine"] = f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, Python {python}"
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
