"""Compare the speed of repacking a file with the speed of copying it.

    python scripts/bench_repack.py                         # files of 1 GiB in the temporary folder, 5 rounds
    python scripts/bench_repack.py --gib 2 --folder DIR    # other sizes and folders; needs four times the space
    python scripts/bench_repack.py --only guessed          # one layout: guessed, one or contiguous

Makes files of random 32 x 32 images in three layouts: h5py's guessed chunks of (6250, 4, 4, 1), one image per chunk,
and contiguous. Each is repacked in order, shuffled, and shuffled with memory for a quarter of the file. A copy reads
and writes the same bytes 8 MiB at a time, and syncs them. A copy runs right before and right after every repack.
Prints GB/s of the images, and the median ratio over the rounds to the mean rate of both copies. ``cpu`` is the ratio of
the processor times of a repack and a copy. The files are removed afterwards. ``--json FILE`` writes all results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import h5chunk
from h5chunk.tools.repack.repack import repack

SHAPE = (32, 32, 3)
BAND = 6250  # samples that h5py puts into one band of chunks
LAYOUTS: dict[str, tuple[int, ...] | None] = {"guessed": (BAND, 4, 4, 1), "one": (1, *SHAPE), "contiguous": None}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shuffle": {"shuffle": True},
    "shuffle, memory a quarter": {"shuffle": True, "memory_bytes": 0},
}
BLOCK_BYTES = 8 << 20


def make(path: Path, num_bands: int, chunks: tuple[int, ...] | None) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (num_bands * BAND, *SHAPE), np.uint8, chunks=chunks)
        for band in range(num_bands):
            images[band * BAND : (band + 1) * BAND] = rng.integers(0, 256, (BAND, *SHAPE), np.uint8)
        file["labels"] = np.arange(num_bands * BAND) % 10
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def copy(source: Path, out: Path) -> None:
    """Copy a file 8 MiB at a time and sync the copy."""
    buffer = bytearray(BLOCK_BYTES)
    with source.open("rb", buffering=0) as old, out.open("wb", buffering=0) as new:
        while count := old.readinto(buffer):
            new.write(memoryview(buffer)[:count])
        os.fsync(new.fileno())


def measure(work: Callable[[], object], out: Path) -> tuple[float, float]:
    """Return the seconds and processor seconds of ``work``, and remove its output."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    work()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    out.unlink()
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_round(source: Path, out: Path, figures: dict[str, list[dict[str, float]]]) -> None:
    num_bytes = source.stat().st_size
    copied = measure(lambda: copy(source, out), out)
    for case, options in CASES.items():
        options = {name: value or num_bytes // 4 for name, value in options.items()}
        seconds, cpu_s = measure(lambda options=options: repack(source, out, **options), out)
        again = measure(lambda: copy(source, out), out)
        copy_s, copy_cpu_s = (copied[0] + again[0]) / 2, (copied[1] + again[1]) / 2
        copied = again
        figures.setdefault(case, []).append(
            {
                "gb_per_s": num_bytes / seconds / 1e9,
                "copy_gb_per_s": num_bytes / copy_s / 1e9,
                "ratio": copy_s / seconds,
                "cpu": cpu_s / copy_cpu_s,
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(LAYOUTS), nargs="+", default=list(LAYOUTS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="bench-repack-"))
    figures: dict[str, dict[str, list[dict[str, float]]]] = {layout: {} for layout in args.only}
    try:
        num_bands = max(1, round(args.gib * (1 << 30) / (BAND * int(np.prod(SHAPE)))))
        for layout in args.only:
            make(folder / f"{layout}.h5", num_bands, LAYOUTS[layout])
        for _ in range(args.rounds):
            for layout in args.only:
                run_round(folder / f"{layout}.h5", folder / "out.h5", figures[layout])
    finally:
        shutil.rmtree(folder)
    medians = {
        layout: {
            case: {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
            for case, rounds in cases.items()
        }
        for layout, cases in figures.items()
    }
    print(f"{'layout':<12}{'':<28}{'GB/s':>8}{'copy':>8}{'ratio':>8}{'cpu':>8}")
    for layout, cases in medians.items():
        for case, each in cases.items():
            rates = (each["gb_per_s"], each["copy_gb_per_s"], each["ratio"], each["cpu"])
            print(f"{layout:<12}{case:<28}" + "".join(f"{rate:>8.2f}" for rate in rates))
    if args.json:
        versions = {"h5chunk": h5chunk.__version__, "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
        machine = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, {folder.parent}"
        result = {"medians": medians, "rounds": figures, "gib": args.gib, "versions": versions, "machine": machine}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
