"""Compare the speed of conversion with the speed of decoding alone.

    python scripts/bench_convert.py                # makes 12,000 JPEGs of 224 x 224 in bench-data/ once
    python scripts/bench_convert.py --folder DIR   # any folder of images of one size
    python scripts/bench_convert.py --out /dev/shm # writes to memory instead of the disk

Decode limit: the same decoder (Pillow) decodes the same files in the same order, in the same number of processes, to
uint8 arrays (C, H, W), which are discarded. Disk limit: the same number of bytes is written to the same folder and
synced. Convert: `h5chunk.convert`, from listing the folder until the file is on the disk. All three take turns,
``--rounds`` times. ``loader`` is torchvision's loader, ``Image.open(path).convert("RGB")``, for comparison. Prints
the median rates in images/s, the median ratio to each limit, and the peak memory of all processes of a conversion.
``--json FILE`` writes all results.
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
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL
from PIL import Image

import h5chunk
from h5chunk.sources.images import list_source
from h5chunk.sources.kinds import ImageSourceOptions

HERE = Path(__file__).parent
TASK = 64


def decode_all(paths: list[str]) -> int:
    for path in paths:
        with Image.open(path) as image:
            image.load()
            pixels = np.empty((3, image.height, image.width), np.uint8)
            for channel, band in zip(pixels, "RGB", strict=True):
                channel[...] = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(channel.shape)
    return len(paths)


def load_all(paths: list[str]) -> int:
    for path in paths:
        with Image.open(path) as image:
            image.convert("RGB")
    return len(paths)


def rate(work: Callable[[list[str]], int], paths: list[str], workers: int) -> float:
    """Return images/s of calling ``work`` for all images."""
    tasks = [paths[i : i + TASK] for i in range(0, len(paths), TASK)]
    started = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        done = sum(pool.imap_unordered(work, tasks))
    return done / (time.perf_counter() - started)


class PeakMemory(threading.Thread):
    """Track the peak memory of this process and its children, as the sum of their proportional set sizes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes, self._done = 0, threading.Event()

    def run(self) -> None:
        while not self._done.wait(1):
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
    """Return bytes/s of writing a file of this size and syncing it."""
    block = os.urandom(8 << 20)
    started = time.perf_counter()
    with path.open("wb") as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - start])
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return num_bytes / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--count", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="output folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = args.folder
    if folder is None:
        folder = Path("bench-data") / f"jpegs-{args.count}-224"
        command = [sys.executable, HERE / "make_images.py", folder, "--count", str(args.count), "--size", "224", "224"]
        subprocess.run(command, check=True)
    listing = list_source(folder, ImageSourceOptions())
    paths = [os.path.join(os.fsencode(folder), name).decode() for name in listing.names]
    paths = [paths[i] for i in np.random.default_rng(0).permutation(len(paths))]
    out = (args.out or folder.parent) / "bench-convert.h5"
    figures: dict[str, list[float]] = {name: [] for name in ("decode", "loader", "disk", "convert", "peak_bytes")}
    rate(decode_all, paths[:2000], args.workers)  # warm the page cache
    report = h5chunk.convert(folder, out, workers=args.workers, overwrite=True)
    image_bytes = report.num_bytes / report.num_samples
    for number in range(args.rounds):
        out.unlink()
        figures["decode"].append(rate(decode_all, paths, args.workers))
        figures["loader"].append(rate(load_all, paths, args.workers))
        figures["disk"].append(disk_rate(out.with_suffix(".disk"), report.num_bytes) / image_bytes)
        memory = PeakMemory()
        memory.start()
        report = h5chunk.convert(folder, out, workers=args.workers)
        figures["peak_bytes"].append(memory.stop())
        figures["convert"].append(report.num_samples / report.seconds)
        print(
            f"round {number + 1}: " + ", ".join(f"{name} {each[-1]:,.0f}" for name, each in figures.items()), flush=True
        )
    out.unlink()
    both = [min(pair) for pair in zip(figures["decode"], figures["disk"], strict=True)]
    medians = {name: statistics.median(each) for name, each in figures.items()}
    result = {
        "images": len(paths),
        "workers": args.workers,
        "images_per_s": medians,
        "rounds": figures,
        "of_decode_limit": ratio(figures["convert"], figures["decode"]),
        "of_both_limits": ratio(figures["convert"], both),
        "of_loader": ratio(figures["convert"], figures["loader"]),
        "versions": {"h5chunk": h5chunk.__version__, "pillow": PIL.__version__, "python": platform.python_version()},
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
    }
    print(f"decode limit  {medians['decode']:>9,.0f} images/s   disk limit {medians['disk']:>9,.0f}")
    print(f"convert       {medians['convert']:>9,.0f} images/s")
    print(f"of the decode limit            {result['of_decode_limit']:.2f}")
    print(f"of the smaller of both limits  {result['of_both_limits']:.2f}")
    print(f"of torchvision's loader        {result['of_loader']:.2f}")
    print(f"peak memory   {medians['peak_bytes'] / 2**20:>9,.0f} MiB in all processes together")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def ratio(rates: list[float], limits: list[float]) -> float:
    """Return the median of the ratios of rates to limits over the rounds."""
    return statistics.median(rate / limit for rate, limit in zip(rates, limits, strict=True))


if __name__ == "__main__":
    main()
