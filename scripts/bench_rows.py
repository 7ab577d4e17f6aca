"""Compare the reading threads of `h5chunk.native` with bare threads in C that do nothing else.

    python scripts/bench_rows.py FOLDER [--threads 2 4] [--rounds 7] [--gigabytes 2]

Threads copy rows of a file in the page cache, chunk by chunk, to shuffled rows of a few buffers that are used again and
again: rows of 224 x 224 x 3 bytes in windows of 256, and of 32 x 32 x 3 bytes in windows of 2048 and 8192. Bare threads
call preadv, or copy a memory map, through the processor's caches or past them. The pool gets the loader's jobs, with
and without a map (``is_cached``: through the caches, as for a GPU). A turn takes at least half a second; turns
alternate in order. Prints the medians of GB/s by the clock and of processor time, and the latter relative to bare
preadv. Use ``taskset`` to choose cores.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from h5chunk.native import DONE, NativePool, NativeTasks
from h5chunk.store.hdf5.ranges import NO_BYTES, row_tasks

CASES = ((150_528, 8, 256, 6), (3_072, 256, 2_048, 12), (3_072, 256, 8_192, 8))  # row, chunk, window, buffers
KINDS = ("preadv", "map, cached", "map")
TURN_S = 0.5


class Loop(ctypes.Structure):
    """The structure of rows_loop.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "descriptor", "row_bytes", "chunk_rows", "window_rows")),
        *((name, ctypes.c_int64) for name in ("num_windows", "num_buffers")),
        *((name, ctypes.c_void_p) for name in ("map", "offsets", "places", "buffers")),
        *((name, ctypes.c_int64) for name in ("num_taken", "has_failed")),
    )


class Mapped:
    """The open file, as a task asks for it."""

    def __init__(self, descriptor: int, memory: np.ndarray | None) -> None:
        self._descriptor, self._memory = descriptor, memory

    def descriptor(self, _number: int) -> int:
        return self._descriptor

    def mapped(self, _number: int) -> tuple[int, int]:
        return (0, 0) if self._memory is None else (self._memory.ctypes.data, len(self._memory))


def compiled(folder: str) -> ctypes.CDLL:
    out, source = Path(folder) / "rows_loop.so", Path(__file__).with_name("rows_loop.c")
    flags = ("-O3", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden")
    subprocess.run([os.environ.get("CC", "cc"), *flags, source, "-o", out], check=True)
    return ctypes.CDLL(str(out))


def aligned(num_bytes: int) -> np.ndarray:
    memory = np.empty(num_bytes + 4096, np.uint8)
    memory[:] = 1
    return memory[-memory.ctypes.data % 4096 :][:num_bytes]


def ways(
    library: ctypes.CDLL, descriptor: int, memory: np.ndarray, case: tuple[int, int, int, int], threads: int
) -> tuple[int, dict[str, Callable[[], None]]]:
    """Return the bytes of a run, and the ways to read them."""
    row_bytes, chunk_rows, window_rows, num_buffers = case
    rng, chunk_bytes = np.random.default_rng(0), row_bytes * chunk_rows
    per_window = window_rows // chunk_rows
    num_windows = len(memory) // chunk_bytes // per_window
    buffers = [aligned(window_rows * row_bytes) for _ in range(num_buffers)]
    addresses = np.array([buffer.ctypes.data for buffer in buffers])
    chunks = rng.permutation(num_windows * per_window)
    offsets, places = chunks * chunk_bytes, rng.permutation(window_rows)
    tables = [each.ctypes.data for each in (offsets, places, addresses)]
    kept = buffers, addresses, offsets, places

    def bare(kind: int) -> Callable[[], None]:
        shape = (row_bytes, chunk_rows, window_rows, num_windows, num_buffers)
        loop = Loop(kind, descriptor, *shape, memory.ctypes.data, *tables)

        def run() -> None:
            assert not library.run_loop(ctypes.byref(loop), ctypes.c_int64(threads)) and kept

        return run

    def pool(kind: int) -> Callable[[], None]:
        own = NativePool(threads, is_cached=kind == 1)
        blocks = np.zeros(1, np.int64), len(memory) // row_bytes, row_bytes
        nothing = np.zeros(window_rows, np.int64)
        files = Mapped(descriptor, memory if kind else None)
        tasks = NativeTasks(list(row_tasks(blocks, nothing, None, nothing, NO_BYTES, lambda _: "")), files)
        rows = (chunks[:, None] * chunk_rows + np.arange(chunk_rows)).reshape(num_windows, window_rows)
        windows = [SimpleNamespace(rows=each.copy(), destinations=places, samples=each) for each in rows]

        def run() -> None:
            free, running = list(buffers), dict[int, tuple[NativeTasks, np.ndarray]]()
            for number in range(num_windows + min(num_windows, num_buffers)):
                if not free or number >= num_windows:
                    result = own.wait(60.0)
                    assert result is not None and result.status == DONE
                    free.append(running.pop(result.ticket)[1])
                if number < num_windows:
                    aimed = tasks.for_window(windows[number], [free[-1]])
                    running[number] = aimed, free.pop()
                    own.submit(number, aimed.jobs)
            assert not running

        return run

    found = {f"bare, {name}": bare(kind) for kind, name in enumerate(KINDS)}
    found |= {f"pool, {name}": pool(kind) for kind, name in enumerate(KINDS)}
    return num_windows * window_rows * row_bytes, found


def turn(run: Callable[[], None], num_bytes: int) -> tuple[float, float]:
    """Return bytes per second, and per second of processor time."""
    started, before, count = time.perf_counter(), time.process_time(), 0
    while (seconds := time.perf_counter() - started) < TURN_S:
        run()
        count += 1
    return count * num_bytes / seconds, count * num_bytes / (time.process_time() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for a file of random bytes, which is removed")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=2)
    args = parser.parse_args()
    folder = tempfile.mkdtemp(dir=args.folder)
    try:
        library, block = compiled(folder), np.random.default_rng(0).bytes(1 << 20)
        with (Path(folder) / "data").open("w+b") as file:
            for _ in range(int(args.gigabytes * 1000)):
                file.write(block)
            file.flush()
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
            for threads in args.threads:
                for case in CASES:
                    num_bytes, runs = ways(library, file.fileno(), memory, case, threads)
                    report(
                        runs, num_bytes, args.rounds, f"{threads} threads, rows of {case[0]:,}, windows of {case[2]}"
                    )
    finally:
        shutil.rmtree(folder)


def report(runs: dict[str, Callable[[], None]], num_bytes: int, rounds: int, title: str) -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            found[name].append(turn(runs[name], num_bytes))
    print(f"\n{title} ({os.getloadavg()[0]:.1f} load)")
    for name, rates in found.items():
        clock, cpu = (statistics.median(each) / 1e9 for each in zip(*rates, strict=True))
        over = [
            statistics.median(a[i] / b[i] for a, b in zip(rates, found["bare, preadv"], strict=True)) for i in (0, 1)
        ]
        print(f"{name:20s} {clock:6.1f} GB/s {cpu:6.1f} GB/s of CPU   {over[0]:.2f} x, {over[1]:.2f} x per CPU")


if __name__ == "__main__":
    main()
