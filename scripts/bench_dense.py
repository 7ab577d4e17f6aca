"""Compare dense float32 rows of a sparse matrix with SciPy's ``matrix[rows].toarray()``.

    python scripts/bench_dense.py FOLDER [--rows 50000] [--columns 9000] [--density 0.02] [--rounds 7]

Measures in turns, with batches of 500 rows: SciPy's loop over a matrix in memory; the first epoch of a new ChunkLoader,
including its construction; and later epochs. Both epochs are also measured with ``reuse=True``. ``num_threads`` is 1,
but several threads make rows dense. Prints microseconds per batch, of wall time and of processor time, and the speedup
over SciPy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from peers.sparse import ours
from peers.sparse.matrix import Source, make_source

import h5chunk

BATCH_SIZE = 500


def run(batches: Iterable[object]) -> None:
    for _ in batches:
        pass


def first_epoch(path: Path, reuse: bool) -> None:
    with h5chunk.ChunkLoader(path, BATCH_SIZE, num_threads=1, reuse=reuse) as loader:
        run(loader)


def timed(epoch: Callable[[], None]) -> tuple[float, float]:
    """Return the wall time and the processor time of an epoch, in seconds."""
    started, before = time.perf_counter(), time.process_time()
    epoch()
    return time.perf_counter() - started, time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--density", type=float, default=0.02)
    for name, default in (("rows", 50_000), ("columns", 9_000), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    per_row = int(args.columns * args.density)
    source = Source(str(args.folder), args.rows, args.columns, per_row, lengths="equal", seed=0)
    make_source(source)
    path = args.folder / f"{source.name}.h5"
    if not path.exists():
        ours.write(source, path)
    matrix, order = source.matrix(np.float32), np.random.default_rng(0).permutation(args.rows)
    firsts = range(0, args.rows, BATCH_SIZE)
    loaders = [h5chunk.ChunkLoader(path, BATCH_SIZE, num_threads=1, reuse=reuse) for reuse in (False, True)]
    for loader in loaders:
        run(loader)
    epochs: dict[str, Callable[[], None]] = {
        "toarray": lambda: run(matrix[order[first : first + BATCH_SIZE]].toarray() for first in firsts),
        "first epoch": lambda: first_epoch(path, False),
        "first epoch, reuse": lambda: first_epoch(path, True),
        "later epochs": lambda: run(loaders[0]),
        "later epochs, reuse": lambda: run(loaders[1]),
    }
    found = {name: [] for name in epochs}
    for number in range(args.rounds):
        for name in list(epochs)[:: -1 if number % 2 else 1]:
            found[name].append(timed(epochs[name]))
    for name, times in found.items():
        clock, cpu = (statistics.median(each) / len(firsts) * 1e6 for each in zip(*times, strict=True))
        pairs = list(zip(found["toarray"], times, strict=True))
        over = [statistics.median(base[part] / own[part] for base, own in pairs) for part in (0, 1)]
        print(f"{name:20s} {clock:7,.0f} us {cpu:7,.0f} us of CPU   {over[0]:.2f} x, {over[1]:.2f} x per CPU")


if __name__ == "__main__":
    main()
