"""Compare `h5chunk.Keyed` with reading samples by name through h5py, and measure how long indexing takes.

    python scripts/bench_keyed.py --samples 20000 --rounds 3

The script makes a file of groups in a temporary folder, each with one trace of 1 KiB and one attribute. "listing" is
h5py's ``visititems``, which opens each object and does nothing with it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import torch

import h5chunk

PATTERN, BATCH = "traces/*/data", 256


def make(path: Path, count: int) -> None:
    traces = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    with h5py.File(path, "w") as file:
        for number in range(count):
            group = file.create_group(f"traces/{number:07}")
            group["data"] = traces[number % 64]
            group.attrs["magnitude"] = number / 4


def by_name(path: Path, names: np.ndarray) -> None:
    """Read all samples and their attributes by name through h5py, in shuffled order."""
    with h5py.File(path) as file:
        traces = file["traces"]
        for start in range(0, len(names), BATCH):
            groups = [traces[name] for name in names[start : start + BATCH]]
            torch.from_numpy(np.stack([group["data"][()] for group in groups]))
            torch.tensor([group.attrs["magnitude"] for group in groups])


def list_all(path: Path) -> None:
    """Open each object of the file once."""
    with h5py.File(path) as file:
        file.visititems(lambda _name, _item: None)


def open_keyed(path: Path) -> h5chunk.Keyed:
    """Open the samples. This makes the index if it is missing."""
    return h5chunk.Keyed(path, PATTERN, attributes=["magnitude"])


def read_all(loader: h5chunk.ChunkLoader) -> None:
    """Read all batches of an epoch."""
    for _ in loader:
        pass


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces.h5"
        make(path, options.samples)
        seconds: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for index in path.parent.glob(f"{path.name}.h5chunk-index-*"):
                index.unlink()
            runs: dict[str, Callable[[], object]] = {
                "listing (h5py visititems)": lambda: list_all(path),
                "indexing": lambda: open_keyed(path),
                "opening with an index": lambda: open_keyed(path),
            }
            for name, work in runs.items():
                seconds.setdefault(name, []).append(timed(work))
            dataset = open_keyed(path)
            names = np.random.default_rng(0).permutation(dataset.source_names)
            seconds.setdefault("h5py by name", []).append(timed(lambda shuffled=names: by_name(path, shuffled)))
            with h5chunk.ChunkLoader(dataset, BATCH, resident=False) as loader:
                seconds.setdefault("ChunkLoader", []).append(timed(lambda ready=loader: read_all(ready)))
        for name, taken in seconds.items():
            median = statistics.median(taken)
            print(f"{name:26} {median:8.3f} s {options.samples / median:12,.0f} samples/s")


if __name__ == "__main__":
    main()
