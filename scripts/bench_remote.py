"""Compare reading from a slow web server (30 ms, 100 MB/s) with a bare client and with a local file.

    python scripts/bench_remote.py --count 8000 --size 112 112
    python scripts/bench_remote.py --pairs 9     # epochs from the full cache against the local file, in turns
    python scripts/bench_remote.py --hits        # hit rates of LRU and of the optimal (Belady) policy
    python scripts/bench_remote.py --peers streaming=ENV/bin/python litdata=ENV/bin/python

Starts `range_server.py` on a file of random images. The bare client requests the same chunks, with the same number of
concurrent requests, and discards the bytes. Prints images/s of complete epochs and the time to the first batch. Other
packages are measured with several numbers of workers and file sizes; ENV is an environment in which the package and
h5py are installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

import h5chunk
from h5chunk.plan.order import Order

SCRIPTS = Path(__file__).parent
BATCH, REQUESTS = 256, 64
PART_MIB, WORKERS = (4, 16, 64), (2, 4, 8)  # sizes of the files of other packages, and workers


@contextmanager
def range_server(folder: Path, latency_s: float, bandwidth: float) -> Iterator[str]:
    """Run the server in a process, and return its URL."""
    options = ["--latency", str(latency_s), "--bandwidth", str(bandwidth)]
    command = [sys.executable, str(SCRIPTS / "range_server.py"), str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def bare_client(url: str, ranges: list[tuple[int, int]], count: int) -> float:
    """Request the byte ranges concurrently and discard the bytes; return images/s for ``count`` images."""
    import obstore
    from obstore.store import from_url

    folder, _, name = url.rpartition("/")
    store = from_url(folder, client_options={"allow_http": True, "timeout": "60s"})
    with ThreadPoolExecutor(REQUESTS) as pool:
        started = time.perf_counter()
        list(pool.map(lambda each: len(obstore.get_range(store, name, start=each[0], end=each[1])), ranges))
        return count / (time.perf_counter() - started)


def chunk_ranges(path: Path) -> list[tuple[int, int]]:
    """Return the byte ranges of the chunks in random order, divided as in h5chunk's requests."""
    import h5py

    from h5chunk.store.hdf5.chunk_table import list_chunks

    with h5py.File(path) as file:
        table = list_chunks(file["images"])
    ranges = []
    for offset, size in zip(table.offsets.tolist(), table.sizes.tolist(), strict=True):
        parts = -(-size // (4 << 20))
        cuts = [offset + size * part // parts for part in range(parts + 1)]
        ranges += list(pairwise(cuts))
    return [ranges[number] for number in np.random.default_rng(0).permutation(len(ranges))]


def epochs(data: object, num_epochs: int) -> tuple[float, list[float], list[float]]:
    """Return the seconds until the first batch, and each epoch's images/s and seconds of processor time."""
    started, first, rates, used = time.perf_counter(), 0.0, list[float](), list[float]()
    with h5chunk.ChunkLoader(data, BATCH, resident=False, reuse=True) as loader:  # type: ignore[arg-type]
        for _ in range(num_epochs):
            begun, used_s, count = time.perf_counter(), time.process_time(), 0
            for images, _ in loader:
                first = first or time.perf_counter() - started
                count += len(images)
            rates.append(count / (time.perf_counter() - begun))
            used.append(time.process_time() - used_s)
    return first, rates, used


def measure_peer(kind: str, python: str, path: Path, folder: Path, latency_s: float, bandwidth: float) -> None:
    """Print the rates of the first and later epochs of a package for all settings, each with an empty cache."""
    script = str(SCRIPTS / "remote_peers.py")
    found = []
    with range_server(folder, latency_s, bandwidth) as url:
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
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--size", type=int, nargs=2, default=[112, 112])
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--bandwidth", type=float, default=100.0, help="of the server, in MB/s; 0: no limit")
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
    (folder / "data").mkdir()
    path = folder / "data" / "images.h5"
    size = list(map(str, args.size))
    command = [sys.executable, str(SCRIPTS / "make_packed.py"), str(path), "--count", str(args.count), "--size", *size]
    subprocess.run(command, check=True)
    if not args.pairs:
        print(f"local file: {max(epochs(path, 3)[1]):,.0f} images/s")
    with range_server(folder / "data", args.latency, args.bandwidth) as url:
        url = f"{url}/images.h5"
        if args.pairs:
            compare_cache(path, h5chunk.ChunkDataset(url, cache_dir=folder / "cache"), args.pairs)
            return
        ranges = chunk_ranges(path)
        for turn in range(2):
            print(f"bare client, {len(ranges)} requests: {bare_client(url, ranges, args.count):,.0f} images/s")
            first, rates, _ = epochs(url, 2)
            print(f"h5chunk: {', '.join(f'{rate:,.0f}' for rate in rates)} images/s, first batch after {first:.2f} s")
            data = h5chunk.ChunkDataset(url, cache_dir=folder / f"cache{turn}")
            first, rates, _ = epochs(data, 3)
            print(f"h5chunk with a cache: {', '.join(f'{rate:,.0f}' for rate in rates)} images/s")
    for peer in args.peers:
        kind, _, python = peer.partition("=")
        measure_peer(kind, python, path, folder, args.latency, args.bandwidth)


if __name__ == "__main__":
    main()
