"""Compare reading from a slow web server with a bare client that requests the same byte ranges.

    python scripts/bench_remote.py --rounds 5            # all kinds of samples, in turns with the bare client
    python scripts/bench_remote.py --kinds windows keyed --mib 256
    python scripts/bench_remote.py --kinds windows frames patches --device cuda   # batches go to the GPU
    python scripts/bench_remote.py --pairs 9     # epochs from the full cache against the local file, in turns
    python scripts/bench_remote.py --hits        # hit rates of LRU and of the optimal (Belady) policy
    python scripts/bench_remote.py --peers streaming=ENV/bin/python litdata=ENV/bin/python

Starts `range_server.py`: 30 ms before each response, 100 MB/s for each connection, and 1 GB/s in all. The kinds are
images; windows of 16 frames of episodes that are groups, of which each dataset is contiguous (``windows``), or that are
runs of rows with a chunk for each frame (``frames``); patches of chunked volumes; and a dataset per sample (``keyed``).
A turn is the epochs after the first, without a cache, in batches of 64: so many that what was read ahead before them,
and is read ahead at their end, hardly counts. The bare client then makes the requests of these epochs again, as the
server has logged them, with the same number at a time, and discards the bytes. Prints for each kind the samples/s, the
MB/s, and the seconds of processor time for each GB of both, without those of the server; the ratio of their rates
(medians and range of the rounds); the rate for the local file, which limits that for the URL; the bytes of all requests
for each byte of the file; and the seconds from opening to the first batch: for the first time, and again.

Other packages are measured with several numbers of workers and file sizes; ENV is an environment in which the package
and h5py are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import torch

import h5chunk
from h5chunk.plan.order import Order

SCRIPTS = Path(__file__).parent
BATCH, REQUESTS, EPOCHS = 64, 64, 4
PART_MIB, WORKERS = (4, 16, 64), (2, 4, 8)  # sizes of the files of other packages, and workers


@contextmanager
def range_server(folder: Path, *options: object) -> Iterator[str]:
    """Run the server in a process, and return its URL."""
    command = [sys.executable, str(SCRIPTS / "range_server.py"), str(folder), *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.kill()


@contextmanager
def stopwatch() -> Iterator[Callable[[], tuple[float, float]]]:
    """Return a function with the seconds, and the processor seconds of all processes but the server, of a context."""
    started, used = time.perf_counter(), processor_s()
    found: list[tuple[float, float]] = []
    yield lambda: found[0]
    found.append((time.perf_counter() - started, processor_s() - used))


def processor_s() -> float:
    """Return the processor time of this process and of the processes that it has started, except for the server."""
    children = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    ticks = 0
    for process in (Path("/proc", number) for number in children.split()):
        if b"range_server.py" not in (process / "cmdline").read_bytes():
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def bare_client(url: str, ranges: Sequence[tuple[str, int, int]]) -> tuple[float, float]:
    """Request byte ranges, several at a time, and discard the bytes. Returns the seconds and processor seconds."""
    import obstore
    from obstore.store import from_url

    store = from_url(url, client_options={"allow_http": True, "timeout": "60s"})
    with ThreadPoolExecutor(REQUESTS) as pool, stopwatch() as taken:
        list(pool.map(lambda each: len(obstore.get_range(store, each[0], start=each[1], end=each[2])), ranges))
    return taken()


# ---- the kinds of samples: each has a function that writes a file, and one that opens it


def make_images(path: Path, num_bytes: int) -> None:
    count = num_bytes // (3 * 112 * 112)
    command = [
        sys.executable,
        str(SCRIPTS / "make_packed.py"),
        str(path),
        "--count",
        str(count),
        "--size",
        "112",
        "112",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


FRAME, STEPS = (96, 96, 3), 100  # shape of a frame, and number of frames in an episode


def make_windows(path: Path, num_bytes: int) -> None:
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (STEPS, *FRAME), np.uint8)
    with h5py.File(path, "w") as file:
        for episode in range(num_bytes // frames.nbytes):
            group = file.create_group(f"data/demo_{episode}")
            group["images"], group["actions"] = frames, random.normal(size=(STEPS, 7)).astype(np.float32)


def make_frames(path: Path, num_bytes: int) -> None:
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (STEPS, *FRAME), np.uint8)
    count = num_bytes // frames.nbytes
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (count * STEPS, *FRAME), np.uint8, chunks=(1, *FRAME))
        for episode in range(count):
            images[episode * STEPS : (episode + 1) * STEPS] = frames
        file["actions"] = random.normal(size=(count * STEPS, 7)).astype(np.float32)
        file["lengths"] = np.full(count, STEPS)


def make_volumes(path: Path, num_bytes: int) -> None:
    volume = np.random.default_rng(0).integers(0, 256, (256, 512, 512), np.uint8)
    with h5py.File(path, "w") as file:
        for number in range(max(1, num_bytes // volume.nbytes)):
            file.create_dataset(f"{number}/raw", data=volume, chunks=(64, 64, 64))


def make_keyed(path: Path, num_bytes: int) -> None:
    traces = np.random.default_rng(0).normal(size=(64, num_bytes // NUM_KEYED // 4)).astype(np.float32)
    with h5py.File(path, "w") as file:
        for number in range(NUM_KEYED):
            group = file.create_group(f"traces/{number:07}")
            group["data"] = traces[number % 64]
            group.attrs["magnitude"] = number / 4


NUM_KEYED = 20_000
WINDOW = {"images": "images", "actions": "actions"}
KINDS: dict[str, tuple[Callable[[Path, int], None], Callable[..., h5chunk.ChunkDataset]]] = {
    "images": (make_images, h5chunk.ChunkDataset),
    "windows": (make_windows, lambda url, **how: h5chunk.Windows(url, {k: f"data/*/{k}" for k in WINDOW}, 16, **how)),
    "frames": (make_frames, lambda url, **how: h5chunk.Windows(url, WINDOW, 16, episode_lengths="lengths", **how)),
    "patches": (make_volumes, lambda url, **how: h5chunk.Patches(url, ["*/raw"], (64, 64, 64), **how)),
    "keyed": (make_keyed, lambda url, **how: h5chunk.Keyed(url, "traces/*/data", attributes=["magnitude"], **how)),
}


def measure_kind(kind: str, folder: Path, args: argparse.Namespace, options: Sequence[object]) -> None:
    """Print the rates of a kind of samples, and of the bare client, measured in turns."""
    num_bytes, how = args.mib << 20, {"resident": False, "reuse": True, "device": args.device}
    make, open_kind = KINDS[kind]
    served, log, cache = folder / kind, folder / f"{kind}.log", folder / f"{kind}-cache"
    served.mkdir()
    make(served / f"{kind}.h5", num_bytes)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    own, bare, local, firsts, ranges = [], [], [], [], []
    with range_server(served, "--log", log, *options) as url:
        for _ in range(2):
            started = time.perf_counter()
            data = open_kind(f"{url}/{kind}.h5")
            with h5chunk.ChunkLoader(data, BATCH, **how) as loader:
                next(iter(loader))
                firsts.append(time.perf_counter() - started)
        for _ in range(args.rounds):
            _, taken = later_epochs(open_kind(str(served / f"{kind}.h5")), log, how)
            local.append(taken)
            lines, taken = later_epochs(data, log, how)
            own.append(taken)
            ranges = [(name.lstrip("/"), int(start), int(stop)) for name, start, stop in map(str.split, lines)]
            bare.append(bare_client(url, ranges))
    total, num_samples = sum(stop - start for _, start, stop in ranges), EPOCHS * len(data)
    ratios = sorted(other_s / own_s for (own_s, _), (other_s, _) in zip(own, bare, strict=True))
    print(
        f"{kind}: {speed(own, num_samples, total)}, bare client {speed(bare, num_samples, total)}, ratio "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); local file "
        f"{num_samples / statistics.median(seconds for seconds, _ in local):,.0f} samples/s; {len(ranges)} requests of "
        f"{total / len(ranges) / 1e3:,.0f} kB, {total / EPOCHS / (served / f'{kind}.h5').stat().st_size:.2f} of the "
        f"bytes of the file; first batch after {firsts[0]:.2f} and {firsts[1]:.2f} s",
        flush=True,
    )
    shutil.rmtree(served)


def later_epochs(data: h5chunk.ChunkDataset, log: Path, how: dict) -> tuple[list[str], tuple[float, float]]:
    """Read epochs after a first one. Returns the logged requests, and the seconds and processor seconds."""
    with h5chunk.ChunkLoader(data, BATCH, **how) as loader:
        for _ in loader:  # which ends with reading the next epoch
            pass
        before = log.stat().st_size
        with stopwatch() as taken:
            for _ in range(EPOCHS):
                for _ in loader:
                    pass
            if how["device"] != "cpu":
                torch.cuda.synchronize()
        return log.read_text()[before:].splitlines(), taken()


def speed(taken: Sequence[tuple[float, float]], num_samples: int, num_bytes: int) -> str:
    seconds, used = map(statistics.median, zip(*taken, strict=True))
    return (
        f"{num_samples / seconds:,.0f} samples/s ({num_bytes / seconds / 1e6:,.0f} MB/s, "
        f"{used / num_bytes * 1e9:.2f} s of processor time per GB)"
    )


def epochs(data: object, num_epochs: int) -> tuple[float, list[float], list[float]]:
    """Return the seconds until the first batch, and each epoch's images/s and seconds of processor time."""
    started, first, rates, used = time.perf_counter(), 0.0, list[float](), list[float]()
    with h5chunk.ChunkLoader(data, BATCH, resident=False, reuse=True) as loader:
        for _ in range(num_epochs):
            begun, used_s, count = time.perf_counter(), time.process_time(), 0
            for images, _ in loader:
                first = first or time.perf_counter() - started
                count += len(images)
            rates.append(count / (time.perf_counter() - begun))
            used.append(time.process_time() - used_s)
    return first, rates, used


def measure_peer(kind: str, python: str, path: Path, folder: Path, options: Sequence[object]) -> None:
    """Print the rates of the first and later epochs of a package for all settings, each with an empty cache."""
    script = str(SCRIPTS / "remote_peers.py")
    found = []
    with range_server(folder, *options) as url:
        for part_mib in PART_MIB:
            part = folder / f"{kind}-{part_mib}"
            subprocess.run(
                [python, script, kind, "write", str(path), str(part), "--part-mib", str(part_mib)],
                check=True,
                capture_output=True,
            )
            for workers in WORKERS:
                cache = folder / f"cache-{kind}-{part_mib}-{workers}"
                command = [python, script, kind, "read", url, part.name, str(cache), "--workers", str(workers)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
                shutil.rmtree(cache, ignore_errors=True)
                lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
                if not lines:
                    print(f"{kind}, {part_mib} MiB, {workers} workers: failed: {done.stderr.strip()[-200:]}")
                    continue
                result = json.loads(lines[-1])
                found.append((result["first_s"], *result["rates"]))
                rates = ", ".join(f"{rate:,.0f}" for rate in result["rates"])
                name = f"{kind}, files of {part_mib} MiB, {workers} workers"
                print(f"{name}: {rates} images/s, first batch after {result['first_s']:.2f} s", flush=True)
            shutil.rmtree(part)
    if found:
        firsts, *rates = zip(*found, strict=True)
        best = ", ".join(f"{max(each):,.0f}" for each in rates)
        print(f"{kind}, best of each: {best} images/s, first batch after {min(firsts):.2f} s", flush=True)


def hit_rate(accesses: Sequence[Sequence[int]], capacity: int, policy: str) -> float:
    """Return the hit rate of a cache of ``capacity`` chunks for accesses, a list of chunk numbers per epoch.

    ``policy`` is "lru", or "belady", which is optimal: it evicts the chunk whose next use is latest, maybe the new one.

    >>> epochs = [[0, 1, 2, 3], [0, 1, 2, 3]]
    >>> hit_rate(epochs, 3, "lru"), hit_rate(epochs, 3, "belady")
    (0.0, 0.375)
    """
    trace = [chunk for epoch in accesses for chunk in epoch]
    following, upcoming = [0] * len(trace), dict[int, int]()
    for turn in range(len(trace) - 1, -1, -1):
        following[turn] = upcoming.get(trace[turn], len(trace) + trace[turn])
        upcoming[trace[turn]] = turn
    cached, num_hits = dict[int, int](), 0  # next or, with a sign, last use of each chunk
    for turn, chunk in enumerate(trace):
        num_hits += chunk in cached
        cached[chunk] = following[turn] if policy == "belady" else -turn
        if len(cached) > capacity:
            del cached[max(cached, key=cached.__getitem__)]
    return num_hits / len(trace)


def print_hits(num_chunks: int = 400, num_epochs: int = 6) -> None:
    """Print the hit rates in epochs of a shuffled order for several cache sizes."""
    order = Order(num_chunks * 8, 8, 64, window_chunks=8, interleave=1)
    accesses = []
    for epoch in range(num_epochs):
        windows = replace(order, epoch=epoch).windows()
        accesses.append([chunk for window in windows for chunk in dict.fromkeys((window.rows // 8).tolist())])
    print("fraction of the data in the cache: hit rates of LRU and of the optimal policy")
    for part in (0.1, 0.25, 0.5, 0.75, 0.9):
        capacity = round(part * num_chunks)
        print(f"{part:.2f}: {hit_rate(accesses, capacity, 'lru'):.3f} {hit_rate(accesses, capacity, 'belady'):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="where the batches are needed, such as cuda")
    parser.add_argument("--mib", type=int, default=512, help="size of the file of each kind")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds before each response")
    parser.add_argument("--connection", type=float, default=100.0, help="of each connection, in MB/s; 0: no limit")
    parser.add_argument("--bandwidth", type=float, default=1000.0, help="of the server, in MB/s; 0: no limit")
    parser.add_argument("--folder", type=Path, help="where to put the data; default: a temporary folder")
    parser.add_argument("--peers", nargs="+", default=[], metavar="NAME=PYTHON", help="streaming and litdata")
    parser.add_argument(
        "--pairs", type=int, default=0, metavar="N", help="only compare the full cache with a local file"
    )
    parser.add_argument("--hits", action="store_true", help="only compare policies of the cache")
    args = parser.parse_args()
    if args.hits:
        print_hits()
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        measure(args, Path(temporary))


def compare_cache(path: Path, data: h5chunk.ChunkDataset, num_pairs: int, num_epochs: int = 4) -> None:
    """Print the rates of later epochs from a local file and from a full cache, measured in turns."""
    epochs(data, 1)
    pairs = []
    for turn in range(num_pairs):
        sources = (path, data) if turn % 2 else (data, path)
        found = {source is data: epochs(source, num_epochs)[1:] for source in sources}
        local, cached = ([statistics.median(each[1:]) for each in found[is_cached]] for is_cached in (False, True))
        pairs.append((local[0], cached[0], cached[0] / local[0], local[1] / cached[1]))
    rate, cached_rate, ratio, used_ratio = map(statistics.median, zip(*pairs, strict=True))
    ratios = sorted(pair[2] for pair in pairs)
    print(f"local file: {rate:,.0f} images/s, full cache: {cached_rate:,.0f} images/s (medians of {num_pairs} turns)")
    print(
        f"cache / local: median {ratio:.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), by processor time {used_ratio:.3f}"
    )


def measure(args: argparse.Namespace, folder: Path) -> None:
    options = [f"--{name}={getattr(args, name)}" for name in ("latency", "connection", "bandwidth")]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.mib} MiB, {' '.join(options)}")
    if not args.pairs and not args.peers:
        for kind in args.kinds:
            measure_kind(kind, folder, args, options)
        return
    (folder / "data").mkdir()
    path = folder / "data" / "images.h5"
    make_images(path, args.mib << 20)
    if args.pairs:
        with range_server(folder / "data", *options) as url:
            compare_cache(path, h5chunk.ChunkDataset(f"{url}/images.h5", cache_dir=folder / "cache"), args.pairs)
    for peer in args.peers:
        kind, _, python = peer.partition("=")
        measure_peer(kind, python, path, folder, options)


if __name__ == "__main__":
    main()
