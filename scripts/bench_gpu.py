"""Measure ChunkLoader on a GPU: its rate against the best bare loop, and how busy it keeps a network.

    python scripts/make_packed.py data.h5 --count 200000                 # 30 GB
    python scripts/make_packed.py small.h5 --count 1000000 --size 32 32  # 3 GB
    python scripts/bench_gpu.py data.h5 [--models resnet50 resnet18 vit_b_16] [--compile] [--json FILE]
    python scripts/bench_gpu.py small.h5 --batch-size 512 --models resnet9 --compile

Limits, measured in turns: reading the file from the page cache into pinned memory (preadv of 8 MB with the best number
of threads); copying pinned memory to the GPU; and both at once by a bare loop. In the bare loop, threads in C read
windows of one, four or eight batches into three, four or six pinned buffers (whichever is fastest), with the rows of a
batch in shuffled order. Each buffer is copied to the GPU once it is full. The tables of all windows are made before the
clock starts, and nothing is normalised. See `gpu_limits`.
Delivery: each loader's second epoch of normalised batches on the GPU, without resident data.
First batch: the time from construction, on this file and on a sparse file of 100 GB, and after a break between epochs.
Utilisation: images/s of training epochs with the loader, divided by images/s of the same number of steps on one cached
batch. Epochs of both take turns. Prints the median ratio of neighbouring epochs, a 95 % bootstrap interval, processor
time, and the processor time per step that the training thread spends in the loader. The model ``python`` is a loop that
computes in Python for 10 ms per step and uses no GPU.
``--gpus 2``: the rates of a bare loop and of a loader on one GPU, and on two GPUs at the same time, in one process and
in two processes. If two bare loops are slower than one, the host's memory is the limit rather than the loader.
Steps: the slowest step of whole epochs, divided by the median step, from GPU events. The first and last step count.
All models except resnet9 need torchvision.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from gpu_limits import BareLoop, copy_rate, read_rate
from models import make_model
from torch import nn

import h5chunk
from h5chunk.feed.source import MAX_THREADS
from h5chunk.store.hdf5.open import open_file
from h5chunk.transforms import Normalize, ToDtype

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SPARSE_BYTES = 100 << 30
BARE_SLOTS = 3, 4, 6  # numbers of pinned windows of the bare loop; a few windows fit in the cache
BARE_BYTES = 64 << 20  # size of a window of the bare loop, unless a batch is larger
PYTHON_S = 0.01
BARRIER_S = 60.0
WARM_STEPS = 30


def run_beside(number: int, path: Path, args: argparse.Namespace, name: str, ready: Any, rates: Any) -> None:
    """Measure images/s of an epoch of a bare loop or a loader on one GPU, beside others that start together."""
    with torch.cuda.device(number):
        if name == "bare loop":
            loop = bare_loops(path, args)[-1]
            rates.put(loop.rate(args.threads or MAX_THREADS, ready.wait) / loop.row_bytes)
            return
        with make_loader(path, args, dtype=torch.bfloat16, device=number) as loader:
            epoch(loader)
            ready.wait()
            rates.put(epoch(loader))


def side_by_side(path: Path, args: argparse.Namespace) -> dict[str, float]:
    """Measure images/s of bare loops and of loaders, alone and beside others, in threads and in processes."""
    spawn = multiprocessing.get_context("spawn")
    kinds: dict[str, tuple[Any, Any, Any, int]] = {
        "alone": (threading.Thread, threading.Barrier, queue.SimpleQueue, 1),
        "in one process": (threading.Thread, threading.Barrier, queue.SimpleQueue, args.gpus),
        "in processes": (spawn.Process, spawn.Barrier, spawn.SimpleQueue, args.gpus),
    }
    found: dict[str, float] = {}
    for name in ("bare loop", "loader"):
        for kind, (runner, barrier, results, count) in kinds.items():
            measured: list[float] = []
            for _ in range(args.rounds):
                ready, rates = barrier(count, timeout=BARRIER_S), results()
                each = [runner(target=run_beside, args=(i, path, args, name, ready, rates)) for i in range(count)]
                for one in each:
                    one.start()
                for one in each:
                    one.join()
                measured += [rates.get() for _ in each]
            rate = found[f"{name}, {kind}"] = statistics.median(measured)
            print(
                f"{name} {kind}, {count} GPUs: {rate:,.0f} images/s each, {rate / found[f'{name}, alone']:.3f} of one "
                f"alone, {rate / found[f'bare loop, {kind}']:.3f} of the bare loop",
                flush=True,
            )
    return found


def make_loader(
    path: Path,
    args: argparse.Namespace,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    device: int = 0,
    **options: Any,
) -> h5chunk.ChunkLoader:
    return h5chunk.ChunkLoader(
        path,
        args.batch_size,
        device=f"cuda:{device}",
        transforms=[Normalize(MEAN, STD), ToDtype(dtype, channels_last=channels_last)],
        num_threads=args.threads,
        resident=False,
        **options,
    )


def bare_loops(path: Path, args: argparse.Namespace) -> list[BareLoop]:
    """Return bare loops with windows of one batch and, if batches are small, of four and eight batches."""
    loops = [BareLoop(path, args.batch_size * batches, slots) for batches in (1, 4, 8) for slots in BARE_SLOTS]
    return [loop for loop in loops if loop.window_bytes <= max(loops[0].window_bytes, BARE_BYTES)]


def delivery(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the limits and the delivery of loaders, in rounds."""
    with open_file(path) as file:
        num_bytes, image_bytes = file["images"].nbytes, file["images"].nbytes // len(file["images"])
    bare_bytes = args.batch_size * image_bytes
    cores = os.cpu_count() or 1
    counts = [n for n in (1, 2, 4, 8, 12, 16, 32) if n <= cores]
    read_rate(path, counts[-1], num_bytes)  # into the page cache
    best = max(counts, key=lambda threads: read_rate(path, threads, num_bytes))
    loops = bare_loops(path, args)
    tried = [(loop, threads) for loop in loops for threads in {cores * 3 // 4, max(1, cores - 1), cores}]
    bare, bare_threads = max(tried, key=lambda each: each[0].rate(each[1]))
    rates: dict[str, list[float]] = {"read": [], "copy": [], "bare": [], "bfloat16": [], "float32": []}
    dtypes = ("bfloat16", "float32")
    print(make_loader(path, args), flush=True)
    for _ in range(args.rounds):
        rates["read"].append(read_rate(path, best, num_bytes))
        rates["copy"].append(copy_rate())
        rates["bare"].append(bare.rate(bare_threads))
        for name in dtypes:
            with make_loader(path, args, dtype=getattr(torch, name)) as loader:
                epoch(loader)  # the first one touches fresh memory
                rates[name].append(epoch(loader) * image_bytes)
    middle = {name: statistics.median(each) for name, each in rates.items()}
    limit = middle["bare"]
    print(f"page cache to pinned memory {middle['read'] / 1e9:6.1f} GB/s ({best} threads)")
    print(f"pinned memory to the GPU    {middle['copy'] / 1e9:6.1f} GB/s")
    how = f"{bare_threads} threads, {bare.num_slots} windows of {bare.window_bytes // bare_bytes} batches"
    print(f"both at once, bare loop     {limit / 1e9:6.1f} GB/s ({how})")
    for name in dtypes:
        print(
            f"delivered {name:9s} {middle[name] / image_bytes:>9,.0f} images/s, {middle[name] / limit:.3f} of the loop"
        )
    return {"bytes_per_s": rates, "limit_bytes_per_s": limit} | {name: middle[name] / limit for name in dtypes}


def epoch(loader: h5chunk.ChunkLoader) -> float:
    started, images = time.perf_counter(), 0
    for batch, _labels in loader:
        images += len(batch)
    torch.cuda.synchronize()
    return images / (time.perf_counter() - started)


def sparse_file(path: Path) -> Path:
    """Make a sparse file of 100 GB of images, with the chunks of `h5chunk convert`; it takes no disk space."""
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
    """Measure the seconds from construction to the first batch on the GPU."""
    seconds = {}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for name, file in (("this file", path), ("sparse file of 100 GB", sparse_file(Path(folder) / "sparse.h5"))):
            times = []
            again = []
            for _ in range(args.rounds):
                started = time.perf_counter()
                with make_loader(file, args) as loader:
                    for kept in (times, again):
                        next(iter(loader))
                        torch.cuda.synchronize()
                        kept.append(time.perf_counter() - started)
                        started = time.perf_counter()
            seconds[name], seconds[f"{name}, next epoch"] = statistics.median(times), statistics.median(again)
            print(
                f"first batch, {name}: {seconds[name]:.3f} s (slowest {max(times):.3f}), of the next epoch "
                f"after a break {statistics.median(again):.4f} s",
                flush=True,
            )
    return seconds


class Training:
    """A network, its optimizer and an endless loader."""

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
        self.cached = tuple(tensor.clone() for tensor in next(iter(self.loader)))
        for batch in islice(self.loader, WARM_STEPS):
            self.step(*self.cached)
            self.step(*batch)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(self._network(images), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class PythonLoop:
    """Training steps that compute in Python, holding the GIL, while the GPU is idle."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.loader = make_loader(path, args, dtype=torch.bfloat16, drop_last=True)
        self.cached = tuple(tensor.clone() for tensor in next(iter(self.loader)))
        self._count = 1000
        started = time.perf_counter()
        self.step()
        self._count = int(self._count * PYTHON_S / (time.perf_counter() - started))

    def step(self, *_batch: torch.Tensor) -> None:
        total = 0
        for number in range(self._count):
            total += number


def utilisation(training: Training | PythonLoop, args: argparse.Namespace) -> dict[str, float]:
    """Measure whole epochs: the rate with the loader, divided by the rate on a cached batch."""

    in_loader: list[float] = []

    def measured(batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and note the processor time that each one took in this thread."""
        while True:
            started = time.thread_time()
            batch = next(batches, None)
            in_loader.append(time.thread_time() - started)
            if batch is None:
                return
            yield batch

    def timed(batches: Iterator[Any]) -> tuple[float, float]:
        """Return images/s, and processor time divided by wall time."""
        torch.cuda.synchronize()
        started, cpu_started, images = time.perf_counter(), time.process_time(), 0
        for batch in batches:
            training.step(*batch)
            images += len(batch[0])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return images / seconds, (time.process_time() - cpu_started) / seconds

    sources: dict[str, Callable[[], Any]] = {
        "real": lambda: measured(iter(training.loader)),
        "cached": lambda: repeat(training.cached, len(training.loader)),
    }
    rates: dict[str, list[float]] = {"real": [], "cached": []}
    cores: dict[str, list[float]] = {"real": [], "cached": []}
    for number in range(args.epochs):
        for name in ("real", "cached") if number % 2 else ("cached", "real"):
            rate, used = timed(sources[name]())
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
        "loader_us_per_step": statistics.mean(in_loader) * 1e6,
    }


def steps(training: Training, num_epochs: int) -> dict[str, float]:
    """Measure the slowest step of whole epochs, including the steps between epochs, divided by the median step."""
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
    training = PythonLoop(path, args) if name == "python" else Training(path, name, args)
    found = utilisation(training, args)
    print(
        f"{name}: utilisation {found['utilisation']:.4f} ({found['low']:.4f} to {found['high']:.4f}), "
        f"{found['real_images_per_s']:,.0f} against {found['cached_images_per_s']:,.0f} images/s cached; "
        f"{found['cores_used']:.1f} of {os.cpu_count()} cores used, {found['cores_used_on_cached']:.1f} on the cached; "
        f"{found['loader_us_per_step']:.0f} us per step in the loader",
        flush=True,
    )
    if name in args.steps:
        found |= steps(training, 2)
        print(
            f"{name}: two epochs, slowest step {found['slowest_ms']:.2f} ms, median {found['median_ms']:.2f} ms, "
            f"{found['over_twice']} over twice the median",
            flush=True,
        )
    training.loader.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads of the loader; default: the loader's")
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--steps", nargs="*", default=[], help="models to time step by step")
    parser.add_argument("--epochs", type=int, default=6, help="training epochs of each kind")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that are fed at once")
    parser.add_argument("--compile", action="store_true", help="torch.compile the models")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"delivery": delivery(args.path, args), "first_batch_s": first_batches(args.path, args)}
    if args.gpus > 1:
        result["side_by_side"] = side_by_side(args.path, args)
    for name in args.models:
        result[name] = train(args.path, name, args)
    if args.json:
        result["versions"] = {"h5chunk": h5chunk.__version__, "torch": torch.__version__, "h5py": h5py.__version__}
        python = platform.python_version()
        result["machine"] = f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, Python {python}"
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
