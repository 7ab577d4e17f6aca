"""Check the claims of `h5chunk tune` against independent measurements of the commands and code that it printed.

    python scripts/bench_tune.py --folder /tmp/bench-tune                            # 40 runs, about 2 hours on 2 cores
    python scripts/bench_tune.py --folder /tmp/bench-tune --small --runs 1 --budget 15   # small files, about 10 minutes
    python scripts/bench_tune.py --folder /tmp/bench-tune --data gzip --file mine.h5

Creates files in the folder (4 GB), and removes them afterwards unless ``--keep`` is set; ``--file`` adds another file.
The files take turns:

small      600 images of 32 x 32, too small for settings to matter
kept       20,000 images of 32 x 32, which ChunkLoader keeps in memory
converted  images as convert writes them
floats     contiguous samples of 1,024 float32
gzip       images in h5py's gzip chunks of 64
badly      images in the chunks that h5py guesses
tiny       images of 64 x 64 in chunks of 1 x 8 x 8 x 3
sparse     a sparse matrix, as convert writes it

For each file, `h5chunk.tune` runs ``--runs`` times (5) with ``--budget`` seconds (60). After each run, its claims about
settings are checked: files are repacked, and the lines of Python and a plain loop over h5py are
measured in ``--rounds`` turns (15), in whole epochs after a warm-up epoch, for at least ``--seconds``. A
claim fails if the median of these turns is outside of its interval. With ``--load N``, N processes meanwhile keep
cores busy every other second. Prints each claim with the measured value, and the number of claims that failed.
Exits with 1 if any claim failed. ``--json FILE`` writes all results.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import h5chunk
from h5chunk.tools.model.settings import DATASET, Setting
from h5chunk.tools.tune.search import NEW, PLAIN, TODAY

HERE = Path(__file__).parent
BATCH = 256


def packed(path: Path, count: int, size: int) -> None:
    sizes = ["--count", str(count), "--size", str(size), str(size)]
    subprocess.run([sys.executable, HERE / "make_packed.py", path, *sizes], check=True, stdout=subprocess.DEVNULL)


def images(path: Path, shape: tuple[int, ...], **options: Any) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("images", shape, np.uint8, **options)
        for start in range(0, shape[0], 2000):
            stop = min(shape[0], start + 2000)
            dataset[start:stop] = rng.integers(0, 32, (stop - start, *shape[1:]), dtype=np.uint8)
        file["labels"] = rng.integers(0, 10, shape[0])


def floats(path: Path, count: int) -> None:
    with h5py.File(path, "w") as file:
        file["X"] = np.random.default_rng(0).random((count, 1024), np.float32)


def sparse(path: Path, num_rows: int) -> None:
    rng, each = np.random.default_rng(0), 100
    columns = np.sort(rng.integers(0, 200, (num_rows, each)) + np.arange(each) * 200)
    raw = path.with_suffix(".npz")
    parts = {
        "indices": columns.ravel().astype(np.int32),
        "indptr": np.arange(num_rows + 1, dtype=np.int32) * each,
        "data": rng.integers(1, 6, num_rows * each).astype(np.float32),
        "shape": np.array([num_rows, 200 * each]),
        "format": np.array(b"csr"),
    }
    np.savez(raw, **parts)
    h5chunk.convert(raw, path)
    raw.unlink()


MAKERS: dict[str, Callable[[Path, int], None]] = {  # called with the path and a divisor of the size
    "small": lambda path, part: images(path, (600, 3, 32, 32), chunks=(64, 3, 32, 32)),
    "kept": lambda path, part: images(path, (20_000, 3, 32, 32), chunks=(64, 3, 32, 32)),
    "converted": lambda path, part: packed(path, 6000 // part, 224),
    "floats": lambda path, part: floats(path, 200_000 // part),
    "gzip": lambda path, part: images(path, (30_000 // part, 3, 96, 96), chunks=(64, 3, 96, 96), compression="gzip"),
    "badly": lambda path, part: images(path, (30_000 // part, 96, 96, 3), chunks=True),
    "tiny": lambda path, part: images(path, (40_000 // part, 64, 64, 3), chunks=(1, 8, 8, 3)),
    "sparse": lambda path, part: sparse(path, 40_000),
}


class Epochs:
    """Measure samples/s of a loader in whole epochs after the first one, for at least ``seconds``."""

    def __init__(self, code: list[str]) -> None:
        scope: dict[str, Any] = {}
        exec("\n".join(code), scope)
        self.loader = scope["loader"]
        self._epoch()

    def _epoch(self) -> int:
        return sum(len(batch[0]) for batch in self.loader)

    def rate(self, seconds: float) -> float:
        self._epoch()
        started, samples = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            samples += self._epoch()
        return samples / (time.perf_counter() - started)


class PlainLoop:
    """Measure samples/s of a loop that reads single random samples with h5py."""

    def __init__(self, path: Path, fields: dict[str, str]) -> None:
        self._file, self._rng = h5py.File(path), np.random.default_rng(1)
        self._items = [self._file[each] for each in fields.values()]

    def rate(self, seconds: float) -> float:
        started, samples, counted = time.perf_counter(), 0, False
        while not counted or not samples or time.perf_counter() - started < seconds:
            if not counted and time.perf_counter() - started >= seconds:
                started, samples, counted = time.perf_counter(), 0, True
            samples += self._batch(started + seconds)
        return samples / (time.perf_counter() - started)

    def _batch(self, until: float) -> int:
        read: list[list[Any]] = [[] for _ in self._items]
        for number, row in enumerate(self._rng.integers(0, len(self._items[0]), BATCH).tolist()):
            if number and time.perf_counter() >= until:
                break
            for item, some in zip(self._items, read, strict=True):
                some.append(item[row])
        return [len(np.stack(some)) for some in read].pop()


def busy() -> None:
    while True:
        until = time.perf_counter() + 1
        while time.perf_counter() < until:
            sum(range(10_000))
        time.sleep(1)


def lines_of(path: Path, setting: Setting) -> list[str]:
    """Return lines of Python that create the loader of a setting, written independently of tune's lines."""
    data, workers = f"data = h5chunk.ChunkDataset({str(path)!r})", setting.num_workers
    sampler = f"sampler = h5chunk.ChunkSampler(data, {BATCH}, window_chunks={setting.window_chunks})"
    loader = "h5chunk.ChunkLoader(data, batch_sampler=sampler)"
    if setting.reader == DATASET:
        options = f"num_workers={workers}, persistent_workers={workers > 0}"
        loader = f"torch.utils.data.DataLoader(data, batch_sampler=sampler, {options})"
    return ["import h5chunk, torch", data, sampler, f"loader = {loader}"]


def contenders(path: Path, found: h5chunk.Recommendation) -> dict[str, Any]:
    """Run the commands of a report, and return a measurement for each row of its table."""
    made: dict[str, Any] = {TODAY: Epochs(["import h5chunk", f"loader = h5chunk.ChunkLoader({str(path)!r}, {BATCH})"])}
    for command in found.commands:
        subprocess.run([sys.executable, "-m", *shlex.split(command), "--overwrite", "--quiet"], check=True)
    for row in found.rows:
        if row.setting is None or row.name == TODAY:
            continue
        if row.name == found.chosen:
            made[row.name] = Epochs(found.code)
        elif row.setting.repack:
            new = path.with_name(f"{path.stem}-other.h5")
            options = {"chunk_samples": row.setting.chunk_samples, "window_chunks": row.setting.window_chunks}
            h5chunk.repack(path, new, overwrite=True, **options)
            made[row.name] = Epochs(lines_of(new, row.setting))
        else:
            made[row.name] = Epochs(lines_of(path, row.setting))
    fields = h5chunk.ChunkDataset(path).fields
    with h5py.File(path) as file:
        is_dense = not any(isinstance(file[name], h5py.Group) for name in fields)
    return made | ({PLAIN: PlainLoop(path, {name: name for name in fields})} if is_dense else {})


def check(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run tune once, and compare its claims with independent measurements."""
    found = h5chunk.tune(path, batch_size=BATCH, budget_s=args.budget)
    measured = contenders(path, found)
    turns: dict[str, list[float]] = {name: [] for name in measured}
    for number in range(args.rounds):
        for name in list(measured)[:: 1 if number % 2 else -1]:
            turns[name].append(measured[name].rate(args.seconds))
    claims = []
    for name in measured.keys() - {TODAY}:
        ratios = [rate / today for rate, today in zip(turns[name], turns[TODAY], strict=True)]
        claim = found.row(name).times
        assert claim is not None
        middle = math.exp(statistics.fmean(map(math.log, ratios)))
        about = {"low": claim.low, "times": claim.times, "high": claim.high, "turns": found.num_turns}
        claims.append({"of": name, **about, "independent": middle, "holds": claim.low <= middle <= claim.high})
    del measured
    for each in ("tuned", "other"):
        path.with_name(f"{path.stem}-{each}.h5").unlink(missing_ok=True)
    print(f"{path.stem:10s} {found.headline()} ({found.seconds:.0f} s)")
    for each in claims:
        said = f"{each['times']:.3g} ({each['low']:.3g} to {each['high']:.3g}) in {each['turns']} turns"
        holds = "" if each["holds"] else "   FAILS"
        print(f"{'':10s} {each['of']:24s} {said:44s} independent {each['independent']:.3g}{holds}", flush=True)
    worthless = found.chosen == NEW and any(each["of"] == NEW and each["independent"] < 1.3 for each in claims)
    about = {"data": path.stem, "chosen": found.chosen, "worthless": worthless, "seconds": found.seconds}
    return [each | about for each in claims]


def write(claims: list[dict[str, Any]], path: Path) -> None:
    versions = {"h5chunk": h5chunk.__version__, "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    path.write_text(json.dumps({"claims": claims, "versions": versions, "machine": machine}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", nargs="*", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--file", type=Path, action="append", default=[])
    parser.add_argument("--small", action="store_true", help="smaller files")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    load = [multiprocessing.get_context("spawn").Process(target=busy, daemon=True) for _ in range(args.load)]
    for each in load:
        each.start()
    claims: list[dict[str, Any]] = []
    made = [args.folder / f"{name}.h5" for name in args.data]
    for path in made:
        if not path.exists():
            MAKERS[path.stem](path, 2 if args.small else 1)
    os.sync()
    for path in [*made, *args.file] * args.runs:
        claims += check(path, args)
        if args.json:
            write(claims, args.json)
    for path in [] if args.keep else made:
        path.unlink()
    for process in load:
        process.terminate()
    failed = sum(not each["holds"] for each in claims)
    worthless = sum(each["worthless"] for each in claims)
    print(f"{len(claims)} claims, {failed} failed; {worthless} recommended new files gain less than 1.3 times")
    if not args.keep and not any(args.folder.iterdir()):
        shutil.rmtree(args.folder)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
