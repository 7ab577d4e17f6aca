"""Measure when to read single rows, when to read runs of rows of a chunk, and when HDF5's chunk cache helps.

    python scripts/sweep_reads.py [--json FILE]

Reads one epoch of shuffled batches of 128 into reused memory, with a warm page cache, for samples from 784 bytes to 600
KB in the chunks of `convert`, with and without gzip. Each file is read in four ways: with a cache for all open windows
or without a cache, and by single rows or by runs. Prints samples/s of each way (median of the rounds) and the way that
the reader chooses. The constants CALL_BYTES and DIRECT_BYTES of plan/cache.py follow from these results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np

import h5chunk.store.read.reader as reader_module
from h5chunk.plan.cache import CacheSettings, cache_for
from h5chunk.plan.layout import plan_layout
from h5chunk.plan.order import Order

SAMPLE_BYTES = (784, 3072, 12_288, 49_152, 150_528, 602_112)
DATA_BYTES = 96 << 20
BATCH = 128
WAYS = {
    "cache, rows": (True, 0),
    "cache, runs": (True, 1 << 40),
    "no cache, rows": (False, 0),
    "no cache, runs": (False, 1 << 40),
}


def make(path: Path, sample_bytes: int, compression: str | None) -> None:
    num_samples = max(4 * BATCH, DATA_BYTES // sample_bytes)
    chunk = plan_layout(num_samples, sample_bytes).chunk_samples
    data = np.random.default_rng(0).integers(0, 64, (num_samples, sample_bytes), dtype=np.uint8)
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        options = {"compression": compression, "compression_opts": 1} if compression else {}
        file.create_dataset("images", data=data, chunks=(chunk, sample_bytes), **options)


def rate(path: Path, cached: bool, call_bytes: int) -> float:
    reader_module.CALL_BYTES = call_bytes
    reader = reader_module.H5Reader(path)
    window = plan_layout(reader.num_samples, reader.main.grid.sample_bytes, reader.chunk_samples).window_chunks
    order = Order(reader.num_samples, reader.chunk_samples, BATCH, window)
    grid = reader.main.grid
    cache = cache_for(order.open_chunks, grid.chunk_bytes, grid.num_chunks) if cached else CacheSettings(1, 0)
    reader.set_caches(cache)
    out = np.zeros((BATCH, *reader.main.sample_shape), np.uint8)
    batches = list(order.batches())
    reader.read("images", batches[0], out[: len(batches[0])])
    started = time.perf_counter()
    for batch in batches:
        reader.read("images", batch, out[: len(batch)])
    return reader.num_samples / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    call_bytes, results = reader_module.CALL_BYTES, []
    print(f"{'sample':>10s} {'filter':>6s} " + " ".join(f"{way:>15s}" for way in WAYS))
    with tempfile.TemporaryDirectory() as folder:
        for compression in (None, "gzip"):
            for sample_bytes in SAMPLE_BYTES:
                path = Path(folder) / "data.h5"
                make(path, sample_bytes, compression)
                rates: dict[str, list[float]] = {way: [] for way in WAYS}
                for _ in range(args.rounds):
                    for way, (cached, force) in WAYS.items():
                        if compression and not cached and force == 0:
                            continue  # this would decode a chunk for every row
                        rates[way].append(rate(path, cached, force))
                medians = {way: statistics.median(each) if each else None for way, each in rates.items()}
                shown = " ".join(f"{m:>15,.0f}" if m else f"{'-':>15s}" for m in medians.values())
                print(f"{sample_bytes:>10,} {compression or '-':>6s} {shown}", flush=True)
                results.append({"sample_bytes": sample_bytes, "filter": compression, "samples_per_s": medians})
    reader_module.CALL_BYTES = call_bytes
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
