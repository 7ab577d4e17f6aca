"""Compare conversion on a Dask cluster of two processes with conversion by two local workers, or by one process.

    python scripts/bench_dask.py                    # makes 6,000 JPEGs of 224 x 224 in bench-data/ once
    python scripts/bench_dask.py --folder DIR --shards 32
    python scripts/bench_dask.py --entries 5000000  # a matrix in a text file; compares with one process

Both conversions write the same shards, in turns. The cluster is started once, and both convert once as a warm-up.
Prints the median rates of all rounds in samples/s, and the median ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

import h5chunk

HERE = Path(__file__).parent


def make_images(count: int) -> Path:
    folder = Path("bench-data") / f"jpegs-{count}-224"
    command = [sys.executable, str(HERE / "make_images.py"), str(folder), "--count", str(count), "--size", "224", "224"]
    subprocess.run(command, check=True)
    return folder


def make_ratings(path: Path, num_entries: int) -> Path:
    """Write random ratings as text."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, num_entries // 100, num_entries), rng.zipf(1.3, num_entries) % 20_000
    with path.open("w") as file:
        file.write("user,item,rating\n")
        for start in range(0, num_entries, 1 << 20):
            part = slice(start, start + (1 << 20))
            ratings = rng.integers(1, 11, len(users[part])) / 2
            rows = zip(users[part].tolist(), items[part].tolist(), ratings.tolist(), strict=True)
            file.writelines(f"{user},{item},{rating}\n" for user, item, rating in rows)
    return path


def rate(source: Path, output: Path, **options: Any) -> float:
    """Return the samples/s of a conversion, or the entries/s for a matrix."""
    os.sync()
    started = time.perf_counter()
    report = h5chunk.convert(source, output, overwrite=True, **options)
    count = report.num_entries if isinstance(report, h5chunk.MatrixReport) else report.num_samples
    return (count or 0) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--entries", type=int, help="convert a matrix with this number of entries")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the output")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.out) as name, LocalCluster(2, threads_per_worker=1) as cluster:
        folder, options = Path(name), {"shards": args.shards}
        here: dict[str, Any] = {"workers": 2}
        source = args.folder or (None if args.entries else make_images(args.count))
        if args.entries:
            source, here = make_ratings(folder / "ratings.csv", args.entries), {}
            options["duplicates"] = "last"
        assert source is not None
        rates: dict[str, list[float]] = {"here": [], "cluster": []}
        with Client(cluster) as client:
            ways: dict[str, dict[str, Any]] = {"here": here, "cluster": {"client": client}}
            for number in range(args.rounds + 1):
                for way in list(ways)[:: -1 if number % 2 else 1]:
                    found = rate(source, folder / "out", **options, **ways[way])
                    if number:
                        rates[way].append(found)
                if number:
                    print(", ".join(f"{way} {each[-1]:,.0f}" for way, each in rates.items()), flush=True)
    medians = {way: statistics.median(each) for way, each in rates.items()}
    ratios = [cluster / here for here, cluster in zip(rates["here"], rates["cluster"], strict=True)]
    print(f"here {medians['here']:,.0f}/s, cluster {medians['cluster']:,.0f}/s, ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
