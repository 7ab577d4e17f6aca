"""How near converting comes to the decode limit.

    python scripts/bench_convert.py                # makes 12,000 JPEGs of 224 x 224 in bench-data/ once
    python scripts/bench_convert.py --folder DIR   # any folder of images of one size

Limit: the same decoder (Pillow: open, convert to RGB) on the same files, in the same order, in as many processes,
results thrown away. Convert: the whole of `h5chunk.convert`, from listing the folder until the file is on the disk.
Both in turn, ``--rounds`` times; prints the median of each in images/s, their ratio, the peak memory of all processes
of a conversion, and the rate at which this disk takes a file of that size. Writes it as JSON with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import PIL
from PIL import Image

import h5chunk
from h5chunk.sources.listing import list_images

HERE = Path(__file__).parent
TASK = 64


def decode_all(paths: list[str]) -> int:
    for path in paths:
        with Image.open(path) as image:
            image.convert("RGB")
    return len(paths)


def decode_rate(paths: list[str], workers: int) -> float:
    """Images/s of decoding alone."""
    tasks = [paths[i : i + TASK] for i in range(0, len(paths), TASK)]
    started = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        done = sum(pool.imap_unordered(decode_all, tasks))
    return done / (time.perf_counter() - started)


class PeakMemory(threading.Thread):
    """The most memory that this process and its children took together: the sum of their proportional sets."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes, self._done = 0, threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.2):
            pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
            total = 0
            for pid in pids:
                try:
                    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                    total += int(text.split("\nPss:")[1].split()[0]) * 1024
                except (OSError, IndexError):
                    continue
            self.peak_bytes = max(self.peak_bytes, total)

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.peak_bytes


def disk_rate(path: Path, num_bytes: int) -> float:
    """Bytes/s of writing a file of that size and syncing it."""
    block = os.urandom(8 << 20)
    started = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(max(1, num_bytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    rate = file_bytes / (time.perf_counter() - started) if (file_bytes := path.stat().st_size) else 0.0
    path.unlink()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--count", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = args.folder
    if folder is None:
        folder = Path("bench-data") / f"jpegs-{args.count}-224"
        command = [sys.executable, HERE / "make_images.py", folder, "--count", str(args.count), "--size", "224", "224"]
        subprocess.run(command, check=True)
    listing = list_images(folder)
    paths = [os.path.join(os.fsencode(folder), name).decode() for name in listing.names]
    paths = [paths[i] for i in np.random.default_rng(0).permutation(len(paths))]
    out = folder.with_suffix(".h5")

    decode_rate(paths[:2000], args.workers)  # warm the page cache
    limits, rates, peaks = [], [], []
    for number in range(args.rounds):
        limits.append(decode_rate(paths, args.workers))
        memory = PeakMemory()
        memory.start()
        report = h5chunk.convert(folder, out, workers=args.workers, overwrite=True)
        peaks.append(memory.stop())
        rates.append(report.num_samples / report.seconds)
        print(f"round {number + 1}: limit {limits[-1]:,.0f} images/s, convert {rates[-1]:,.0f}", flush=True)
    result = {
        "images": len(paths),
        "workers": args.workers,
        "limit_images_per_s": statistics.median(limits),
        "convert_images_per_s": statistics.median(rates),
        "ratio": statistics.median(rate / limit for rate, limit in zip(rates, limits, strict=True)),
        "ratios": [rate / limit for rate, limit in zip(rates, limits, strict=True)],
        "peak_memory_bytes": max(peaks),
        "output_bytes": report.num_bytes,
        "disk_bytes_per_s": disk_rate(out.with_suffix(".disk"), report.num_bytes),
        "versions": {"h5chunk": h5chunk.__version__, "pillow": PIL.__version__, "python": platform.python_version()},
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
    }
    print(f"decode limit {result['limit_images_per_s']:>9,.0f} images/s")
    print(f"convert      {result['convert_images_per_s']:>9,.0f} images/s, {result['ratio']:.2f} of the limit")
    print(f"peak memory  {result['peak_memory_bytes'] / 2**20:>9,.0f} MiB in all processes together")
    disk = result["disk_bytes_per_s"] / (report.num_bytes / report.num_samples)
    print(f"disk         {disk:>9,.0f} images/s would be its limit")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
