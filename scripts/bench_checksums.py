"""Measure how much ChunkLoader slows down when it verifies checksums while reading.

    python scripts/bench_checksums.py FILE.h5 [--batch-size 256] [--rounds 5] [--epochs 3] [--cold] [--device cpu]

FILE.h5 must be an h5chunk file, because only these have checksums. In each round, the modes ``off``, ``first`` and
``always`` take turns, in reverse order every other round. A turn is a new loader and ``--epochs`` epochs with a warm
page cache. ``--cold`` drops the file from the page cache before each turn, if the system allows it. The first round is
a warm-up.

Prints samples/s of each epoch (median of the rounds) and its ratio to ``off`` in the same round (median and range).
The last line is JSON with the machine and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import h5chunk

MODES = ("off", "first", "always")


def drop(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def turn(mode: str, args: argparse.Namespace) -> list[float]:
    """Return samples/s of each epoch. The first epoch includes the construction of the loader."""
    if args.cold:
        drop(args.path)
    rates, started = [], time.perf_counter()
    options = {"device": args.device, "reuse": args.device == "cpu", "resident": False}
    dataset = h5chunk.ChunkDataset(args.path, checksums=mode)
    with h5chunk.ChunkLoader(dataset, args.batch_size, **options) as loader:
        for _ in range(args.epochs):
            num_samples = sum(len(batch[0]) for batch in loader)
            if args.device != "cpu":
                torch.cuda.synchronize()
            now = time.perf_counter()
            rates.append(num_samples / (now - started))
            started = now
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    rounds: list[dict[str, list[float]]] = []
    for number in range(args.rounds + 1):
        modes = MODES if number % 2 else MODES[::-1]
        rounds.append({mode: turn(mode, args) for mode in modes})
    del rounds[0]
    found = {}
    for mode in MODES:
        for epoch in range(args.epochs):
            rate = statistics.median(each[mode][epoch] for each in rounds)
            ratios = [each[mode][epoch] / each["off"][epoch] for each in rounds]
            ratio = statistics.median(ratios)
            found[f"{mode} {epoch + 1}"] = [rate, ratio, min(ratios), max(ratios)]
            print(
                f"{mode:>7}, epoch {epoch + 1}: {rate:>12,.0f}/s  {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
    about = {"cores": os.cpu_count(), "machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    about |= {"python": platform.python_version(), "numpy": np.__version__, "h5chunk": h5chunk.__version__}
    print(json.dumps({"found": found, **about, "args": {name: str(value) for name, value in vars(args).items()}}))


if __name__ == "__main__":
    main()
