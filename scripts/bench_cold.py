"""Compare an epoch of a file that is not in the page cache with random reads of 2 MiB by 8 threads.

    python scripts/bench_cold.py FILE.h5 [--batch-size 256] [--rounds 5] [--threads 8]

Three readers take turns, in reverse order every other round: threads that read each piece of the file once; a
ChunkLoader with its default number of threads; and a ChunkLoader with the same number of threads as the first reader.
The file is dropped from the page cache before each turn. Prints bytes/s of the file, processor time per GB, and the
median ratio to the rate of the first reader. Reading the file should take at least a second.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5chunk

READ_BYTES = 2 << 20


def drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read_all(path: Path, num_threads: int) -> None:
    """Read each piece of a file once, in random order."""
    descriptor = os.open(path, os.O_RDONLY)
    offsets = list(range(0, path.stat().st_size, READ_BYTES))
    random.shuffle(offsets)
    buffers = [bytearray(READ_BYTES) for _ in range(num_threads)]

    def read(thread: int) -> None:
        for offset in offsets[thread::num_threads]:
            os.preadv(descriptor, [buffers[thread]], offset)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, range(num_threads)))
    os.close(descriptor)


def load_all(path: Path, batch_size: int, num_threads: int | None) -> None:
    with h5chunk.ChunkLoader(path, batch_size, num_threads=num_threads, resident=False, reuse=True) as loader:
        for _ in loader:
            pass


def turn(path: Path, run: Callable[[], None]) -> tuple[float, float]:
    """Return bytes/s, and seconds of processor time per GB."""
    drop(path)
    started, before = time.perf_counter(), time.process_time()
    run()
    size = path.stat().st_size
    return size / (time.perf_counter() - started), (time.process_time() - before) / size * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    for name, default in (("batch-size", 256), ("rounds", 5), ("threads", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    contenders = {
        f"random reads, {args.threads} threads": lambda: read_all(args.path, args.threads),
        "ChunkLoader": lambda: load_all(args.path, args.batch_size, None),
        f"ChunkLoader, num_threads={args.threads}": lambda: load_all(args.path, args.batch_size, args.threads),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            found[name].append(turn(args.path, contenders[name]))
    limit = [rate for rate, _ in next(iter(found.values()))]
    for name, each in found.items():
        rates, seconds = zip(*each, strict=True)
        part = statistics.median(rate / most for rate, most in zip(rates, limit, strict=True))
        span = f"{min(rates) / 1e9:.2f} to {max(rates) / 1e9:.2f}"
        cpu = statistics.median(seconds)
        print(f"{name:28s} {statistics.median(rates) / 1e9:6.2f} GB/s ({span})  {cpu:.2f} s of CPU per GB  {part:.2f}")


if __name__ == "__main__":
    main()
