"""Compare the loader's kernel for dense rows on a GPU with memory bandwidth, torch and the host.

    python scripts/bench_dense_gpu.py [--folder FOLDER] [--json FILE]
    python scripts/bench_dense_gpu.py --device cpu --rows 3000 --columns 500 --entries-per-row 20   # without a GPU

Batches of 500 x 20,000 float32 are computed from CSR rows on the device: int64 starts, uint16 columns, uint8 values,
and 150 entries per row, with columns from a power law. The limit is the time to write the bytes of a batch at the
highest rate at which torch fills or clears a large buffer. All methods take turns, and medians are printed. A turn
writes batches into alternating buffers, so that they are not cached. It is timed twice: on the GPU, by events while a
full queue runs, which excludes launches; and from Python, which includes them.

ours               the loader's kernel on contiguous rows, or on shuffled rows by index, as for resident data
ours, 6 together   several batches with one launch, as in the loader
bf16, pattern, l2  the kernel writes bfloat16; stores no values; scales rows to length 1
torch, indexing    zero_, then values are put at positions that are computed, or were computed before
torch, to_dense()  to_dense() of a ready sparse_csr tensor of int32 and float32
host               SciPy's toarray() and the copy to the GPU

Prints for each method: microseconds per batch, GB/s written, and the limit divided by its time on the GPU. Then prints
rows/s of whole epochs through ChunkLoader, streaming and resident, float32 and bfloat16 (medians of ``--rounds``), and
the ratio to the limit. The data takes 0.2 GB in FOLDER (default: a temporary folder). ``--json FILE`` writes all
results with versions, machine and seed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.sparse.dense_gpu import Case, Make, Way, other_ways, our_ways
from peers.sparse.matrix import Source, make_source
from peers.sparse.ours import write

import h5chunk
from h5chunk.transforms import Dense

SLEEP_CYCLES = 10_000_000  # the GPU waits for this many cycles, about 5 ms, while launches queue up
BUFFERS_BYTES, BANDWIDTH_BYTES = 1 << 30, 4 << 30
BY_HOST = 2  # batches per turn of methods on the host
SEED = 0


def bandwidth(device: torch.device, num_bytes: int, repeats: int) -> float:
    """Return the highest bytes/s of filling or clearing a large buffer."""
    buffer = torch.empty(num_bytes // 4, device=device)
    ways: tuple[Make, ...] = (lambda number: buffer.fill_(number), lambda number: buffer.zero_())
    best = min(gpu_seconds(way, 2, device) for _ in range(repeats) for way in ways)
    return num_bytes / best


def gpu_seconds(make: Make, count: int, device: torch.device) -> float:
    """Return the seconds per call on the GPU, without launches, which are queued beforehand."""
    if device.type != "cuda":
        return wall_seconds(make, count, device)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    for number in range(count):
        make(number)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000 / count


def wall_seconds(make: Make, count: int, device: torch.device) -> float:
    """Return the seconds per call as seen from Python."""
    synchronize(device)
    started = time.perf_counter()
    for number in range(count):
        make(number)
    synchronize(device)
    return (time.perf_counter() - started) / count


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def kernels(case: Case, args: argparse.Namespace, bytes_per_s: float) -> dict[str, Any]:
    """Measure single batches and print their table."""
    ways = other_ways(case) | our_ways(case, args.together)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for turn in range(args.repeats + 1):
        for name, way in ways.items():
            on_gpu, from_python = turn_of(way, args.count, case.device)
            if turn:  # the first call allocates memory
                times[name][0].append(on_gpu)
                times[name][1].append(from_python)
    found = {}
    print(f"\n{'':38s} {'us on the GPU':>13s}  {'us from Python':>14s}  {'GB/s':>6s}  of limit")
    for name, way in ways.items():
        num_bytes = case.batch_size * case.num_columns * way.dtype.itemsize
        on_gpu, from_python = (statistics.median(each) for each in times[name])
        found[name] = {"gpu_s": on_gpu, "python_s": from_python, "of_limit": num_bytes / bytes_per_s / on_gpu}
        print(
            f"{name:38s} {on_gpu * 1e6:>13,.1f}  {from_python * 1e6:>14,.1f}  {num_bytes / on_gpu / 1e9:>6,.0f}"
            f"  {found[name]['of_limit']:8.2f}",
            flush=True,
        )
    return found


def turn_of(way: Way, num_batches: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds per batch on the GPU and from Python."""
    count = BY_HOST if way.by_host else max(1, num_batches // way.together)
    on_gpu, from_python = gpu_seconds(way.make, count, device), wall_seconds(way.make, count, device)
    return on_gpu / way.together, from_python / way.together


def epochs(path: Path, case: Case, args: argparse.Namespace, bytes_per_s: float) -> dict[str, Any]:
    """Measure rows/s of whole epochs and print their table."""
    found = {}
    print(f"\n{'ChunkLoader':38s} {'rows/s':>13s}  {'min .. max':>26s}  of limit")
    for dtype in (torch.float32, torch.bfloat16):
        for resident in (False, True):
            options = {"device": str(case.device), "transforms": [Dense(dtype)], "resident": resident}
            with h5chunk.ChunkLoader(path, args.batch_size, **options) as loader:
                rates = [epoch(loader, case.device) for _ in range(args.rounds + 1)][1:]
            name = f"{'resident' if resident else 'streaming'}, {str(dtype).removeprefix('torch.')}"
            limit = bytes_per_s / (case.num_columns * dtype.itemsize)
            middle = statistics.median(rates)
            found[name] = {"rows_per_s": middle, "rates": rates, "of_limit": middle / limit}
            print(
                f"{name:38s} {middle:>13,.0f}  {min(rates):>12,.0f} .. {max(rates):<10,.0f}  {middle / limit:8.2f}",
                flush=True,
            )
    return found


def epoch(loader: h5chunk.ChunkLoader, device: torch.device) -> float:
    synchronize(device)
    started, rows = time.perf_counter(), 0
    for (batch,) in loader:
        rows += len(batch)
    synchronize(device)
    return rows / (time.perf_counter() - started)


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=20_000)
    parser.add_argument("--entries-per-row", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--together", type=int, default=6, help="batches per launch")
    parser.add_argument("--count", type=int, default=24, help="batches per turn")
    parser.add_argument("--repeats", type=int, default=50, help="turns")
    parser.add_argument("--rounds", type=int, default=5, help="epochs")
    parser.add_argument("--buffers-bytes", type=int, default=BUFFERS_BYTES)
    parser.add_argument("--bandwidth-bytes", type=int, default=BANDWIDTH_BYTES)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        source = Source(str(folder), args.rows, args.columns, args.entries_per_row, seed=SEED)
        make_source(source)
        path = folder / f"ours-{source.name}.h5"
        if not path.exists():
            write(source, path)
        bytes_per_s = bandwidth(device, args.bandwidth_bytes, 10)
        print(f"memory bandwidth: {bytes_per_s / 1e9:,.0f} GB/s", flush=True)
        case = Case(source, device, args.batch_size, args.buffers_bytes)
        result = {"bytes_per_s": bytes_per_s, "batches": kernels(case, args, bytes_per_s)}
        result["epochs"] = epochs(path, case, args, bytes_per_s)
    if args.json:
        machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
        result["machine"] = f"{machine}, {os.cpu_count()} cores, Python {platform.python_version()}"
        result["versions"] = {"h5chunk": h5chunk.__version__, "torch": torch.__version__, "numpy": np.__version__}
        result |= {"matrix": source.name, "batch_size": args.batch_size, "seed": SEED}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
