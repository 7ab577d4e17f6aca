"""What the machine gives at most: threads that move bytes, and copying memory."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

REGION_BYTES = 128 << 20  # what is copied: larger than most processors' caches
LEAST_PIECE_BYTES = 1 << 20  # a copy of less would measure Python


def thread_counts(num_cores: int) -> list[int]:
    """1, 2, 4 and so on, and one a core.

    >>> thread_counts(6)
    [1, 2, 4, 6]
    """
    return sorted({min(1 << n, num_cores) for n in range(num_cores.bit_length() + 1)})


def threads_rate(work: Callable[[int], int], num_threads: int, seconds: float) -> float:
    """Bytes/s of threads that each call ``work(thread)``, which says how many bytes it moved, 0 when all is done."""

    def loop(thread: int) -> int:
        moved = 0
        while True:
            step = work(thread)
            moved += step
            if not step or time.perf_counter() >= deadline:
                return moved

    with ThreadPoolExecutor(num_threads) as pool:
        started = time.perf_counter()
        deadline = started + seconds
        moved = sum(pool.map(loop, range(num_threads)))
        return moved / max(1e-9, time.perf_counter() - started)


class NotMeasured(Exception):
    """Why something cannot be measured; the message says it."""


class MemoryCopy:
    """Copies pieces of memory.

    Parameters
    ----------
    piece_bytes : int
        Of a copy; made larger if very small, and smaller if many threads could not each have one.
    num_threads : int
        The most that will be asked for.
    room_bytes : int
        Memory that may be taken.
    """

    def __init__(self, piece_bytes: int, num_threads: int, room_bytes: int) -> None:
        region = max(LEAST_PIECE_BYTES * num_threads, min(REGION_BYTES, room_bytes // 2))
        piece = max(LEAST_PIECE_BYTES, min(piece_bytes, region // num_threads))
        self._source = np.ones((region // piece, piece), np.uint8)
        self._target = np.ones_like(self._source)
        self._next = itertools.count()

    def rate(self, num_threads: int, seconds: float) -> float:
        """Bytes/s, into memory that is used again."""
        return threads_rate(self._copy, num_threads, seconds)

    def fresh_rate(self, num_threads: int, seconds: float) -> float:
        """Bytes/s, into memory that the system gives for each piece, and takes back."""
        return threads_rate(self._copy_to_fresh, num_threads, seconds)

    def _copy(self, _thread: int) -> int:
        place = next(self._next) % len(self._source)
        np.copyto(self._target[place], self._source[place])
        return self._source[place].nbytes

    def _copy_to_fresh(self, _thread: int) -> int:
        source = self._source[next(self._next) % len(self._source)]
        with mmap.mmap(-1, source.nbytes) as memory:
            np.copyto(np.frombuffer(memory, np.uint8), source)
        return source.nbytes


def available_bytes() -> int:
    """Memory that this process can still take, what the page cache would give back included."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        return min(free, limit)
    except (OSError, ValueError):  # no such file, or "max"
        return free
