"""Compare tune's recommendation with the best setting of its grid, and its predictions with measured rates.

    python scripts/bench_tune.py --folder /tmp/bench-tune                # all five, about 15 minutes on 2 cores
    python scripts/bench_tune.py --folder /tmp/bench-tune --data cifar   # one of them

Makes five data sets of 100 to 600 MB in the folder and removes them afterwards (``--keep`` keeps them):

large    3,000 images of 224 x 224, as convert writes them
cifar    50,000 images of 32 x 32, likewise
gzip     20,000 images of 32 x 32, written by h5py in gzip chunks of 64
sparse   40,000 x 20,000, 4 million entries, as convert writes them
badly    4,000 images of 96 x 96 x 3 in the chunks that h5py guesses

For each, `h5chunk.tune` runs with ``--budget`` seconds (60). Then every setting of its grid that memory and quality
allow is measured for ``--seconds``; the best ``--finalists`` of them and the recommendation are measured again in
``--rounds`` turns, and compared within each turn. Prints for each data set: the seconds that tune took; the rate of its
recommendation over the best rate of the grid; the recommendation and that best setting; and the error of the predicted
rates for the settings that tune measured in its last turns. ``--json FILE`` writes all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import h5chunk
from h5chunk.tools.measure.machine import interleaved_rates
from h5chunk.tools.model.settings import Setting
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.tune.search import measure
from h5chunk.tools.tune.study import Study, study_file

HERE = Path(__file__).parent
FOREVER = 1e9


def packed(path: Path, count: int, size: int) -> None:
    sizes = ["--count", str(count), "--size", str(size), str(size)]
    subprocess.run([sys.executable, HERE / "make_packed.py", path, *sizes], check=True, stdout=subprocess.DEVNULL)


def make_gzip(path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        images = rng.integers(0, 16, (20_000, 3, 32, 32), dtype=np.uint8)
        file.create_dataset("images", data=images, chunks=(64, 3, 32, 32), compression="gzip")
        file["labels"] = rng.integers(0, 10, len(images))


def make_badly(path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=rng.integers(0, 256, (4000, 96, 96, 3), dtype=np.uint8), chunks=True)
        file["labels"] = rng.integers(0, 10, 4000)


def make_sparse(path: Path) -> None:
    rng = np.random.default_rng(0)
    num_rows, num_columns, each = 40_000, 20_000, 100
    columns = np.sort(rng.integers(0, num_columns // each, (num_rows, each)) + np.arange(each) * (num_columns // each))
    raw = path.with_suffix(".npz")
    parts = {
        "indices": columns.ravel().astype(np.int32),
        "indptr": np.arange(num_rows + 1, dtype=np.int32) * each,
        "data": rng.integers(1, 6, num_rows * each).astype(np.float32),
        "shape": np.array([num_rows, num_columns]),
        "format": np.array(b"csr"),
    }
    np.savez(raw, **parts)
    h5chunk.convert(raw, path)
    raw.unlink()


MAKERS: dict[str, Callable[[Path], None]] = {
    "large": lambda path: packed(path, 3000, 224),
    "cifar": lambda path: packed(path, 50_000, 32),
    "gzip": make_gzip,
    "sparse": make_sparse,
    "badly": make_badly,
}


def rate(study: Study, setting: Setting, seconds: float) -> float:
    return measure(study, setting, "cpu", TimeBudget("tune", FOREVER), seconds)


def best_of_grid(study: Study, found: h5chunk.Recommendation, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the recommendation and the best settings of the grid in turns."""
    allowed = [each.setting for each in found.candidates if each.allowed]
    rates = {setting: rate(study, setting, args.seconds) for setting in allowed}
    chosen = found.setting
    best = sorted(rates, key=lambda setting: rates[setting], reverse=True)[: args.finalists]
    turns: dict[Setting, list[float]] = {setting: [] for setting in dict.fromkeys([chosen, *best])}
    for _ in range(args.rounds):
        for setting, some in turns.items():
            some.append(rate(study, setting, args.seconds))
    medians = interleaved_rates([{each: some[turn] for each, some in turns.items()} for turn in range(args.rounds)])
    winner = max(medians, key=lambda setting: medians[setting])
    return {
        "settings": len(allowed),
        "recommendation": str(chosen),
        "recommended_rate": medians[chosen],
        "best": str(winner),
        "best_rate": medians[winner],
        "share": medians[chosen] / medians[winner],
        "turns": {str(setting): some for setting, some in turns.items()},
    }


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    path = args.folder / f"{name}.h5"
    if not path.exists():
        MAKERS[name](path)
        os.sync()
    started = time.perf_counter()
    found = h5chunk.tune(path, budget_s=args.budget, progress=None)
    taken = time.perf_counter() - started
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        study = study_file(path, None, batch_size=256, group_by=None, folder=Path(folder))
        result = best_of_grid(study, found, args)
    errors = [
        each.predicted_rate / each.measured_rate - 1
        for each in found.candidates
        if each.measured_rate is not None and each.num_measured > 1
    ]
    if not args.keep:
        path.unlink()
    return result | {"tune_s": taken, "errors": errors, "advice": [each.code for each in found.advice]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", nargs="*", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--finalists", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in args.data:
        results[name] = each = run(name, args)
        errors = ", ".join(f"{error:+.0%}" for error in each["errors"])
        print(
            f"{name:7s} tune {each['tune_s']:.0f} s; {each['share']:.2f} of the best of {each['settings']} settings: "
            f"{each['recommended_rate']:,.0f} of {each['best_rate']:,.0f} samples/s\n"
            f"        recommended {each['recommendation']}; best {each['best']}\n"
            f"        predicted against measured: {errors}; advice: {', '.join(each['advice']) or 'none'}",
            flush=True,
        )
    if not args.keep and not any(args.folder.iterdir()):
        shutil.rmtree(args.folder)
    if args.json:
        versions = {"h5chunk": h5chunk.__version__, "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
        machine = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
        args.json.write_text(
            json.dumps({"results": results, "versions": versions, "machine": machine}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
