"""Measure memory and device bandwidth, and describe the machine."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np

from h5chunk.plan.cache import CacheSettings

REGION_BYTES = 128 << 20  # memory to copy from: larger than most processors' caches
MIN_PIECE_BYTES = 1 << 20  # smaller copies would measure the overhead of Python calls
DEVICE_COPY_BYTES = 256 << 20
MEMORY_FILES = "memory.max", "memory.current"  # limit and use of a control group in version 2


class NotMeasured(Exception):
    """Raised if something cannot be measured; the message is the reason, which the report shows."""


def thread_counts(num_cores: int) -> list[int]:
    """Return the numbers of threads to try: the powers of two below the number of cores, and the number of cores.

    >>> thread_counts(6)
    [1, 2, 4, 6]
    """
    return sorted({min(1 << n, num_cores) for n in range(num_cores.bit_length() + 1)})


def threads_rate(work: Callable[[int], int], num_threads: int, seconds: float) -> float:
    """Measure bytes/s of threads that call ``work(thread)``, which returns the bytes it moved, or 0 at the end."""

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


def memory_copy(piece_bytes: int, num_threads: int, memory_bytes: int) -> Callable[[int, float], float]:
    """Return a function of (number of threads, seconds) that measures bytes/s of copying memory.

    Threads copy pieces of ``piece_bytes`` within reused memory. If ``memory_bytes`` is not enough for all threads,
    pieces are smaller, but at least 1 MiB.
    """
    region = max(MIN_PIECE_BYTES * num_threads, min(REGION_BYTES, memory_bytes // 2))
    piece = max(MIN_PIECE_BYTES, min(piece_bytes, region // num_threads))
    source = np.ones((region // piece, piece), np.uint8)
    target, numbers = np.ones_like(source), itertools.count()

    def copy(_thread: int) -> int:
        index = next(numbers) % len(source)
        np.copyto(target[index], source[index])
        return piece

    return partial(threads_rate, copy)


@contextmanager
def device_copy(device: str) -> Iterator[Callable[[float], float]]:
    """Yield a function of (seconds) that measures bytes/s of copying pinned memory to a GPU."""
    import torch

    from h5chunk.feed.memory import PinnedMemory

    found = torch.device(device)
    target = torch.empty(DEVICE_COPY_BYTES, dtype=torch.uint8, device=found)
    with torch.cuda.device(found):
        pinned = PinnedMemory(DEVICE_COPY_BYTES)
    source = torch.from_numpy(pinned.bytes[:DEVICE_COPY_BYTES]).zero_()

    def copy(_thread: int) -> int:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(found)
        return DEVICE_COPY_BYTES

    def rate(seconds: float) -> float:
        torch.cuda.synchronize(found)
        return threads_rate(copy, 1, seconds)

    try:
        yield rate
    finally:
        torch.cuda.synchronize(found)
        pinned.close()


def describe_device(device: str) -> str:
    """Return the name of a device. Raise OptionError if it does not exist, or is neither the CPU nor a CUDA device."""
    import torch

    from h5chunk.feed.source import find_device

    found = find_device(device)
    return "cpu" if found.type == "cpu" else f"{device} ({torch.cuda.get_device_name(found)})"


def library_versions() -> dict[str, str]:
    """Return the versions of h5chunk and of the libraries that affect its speed."""
    import platform

    import h5py
    import torch

    import h5chunk

    versions = {"h5chunk": h5chunk.__version__, "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
    return versions | {"numpy": np.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


def default_cache() -> CacheSettings:
    """Return the default settings of a dataset's chunk cache in this HDF5 library."""
    import h5py

    return CacheSettings.of(h5py.h5p.create(h5py.h5p.FILE_ACCESS).get_cache()[1:])


def available_bytes(root: Path = Path("/")) -> int:
    """Return the number of bytes of memory that this process may use, including reclaimable page cache.

    The limits of its control groups count without what their processes use already. ``root`` is the folder that
    contains ``proc`` and ``sys``.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min([free, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the memory that is left in each control group of this process that has a limit."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else MEMORY_FILES
        mount = root / "sys/fs/cgroup" / controllers
        group = mount / path.lstrip("/")
        for folder in {mount, group, *(parent for parent in group.parents if parent.is_relative_to(mount))}:
            with suppress(OSError, ValueError):  # no such group (a container may show only its own), or no limit
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
                yield left + _file_cache(folder / "memory.stat")


def _file_cache(path: Path) -> int:
    """Return the bytes of a control group that are pages of files, which the kernel frees if memory is needed."""
    numbers = dict(line.split() for line in path.read_text().splitlines())
    return sum(int(numbers.get(f"total_{name}", numbers.get(name, 0))) for name in ("active_file", "inactive_file"))


def cuda_device() -> str | None:
    """Return the name of the CUDA device that torch uses by default; None if there is no CUDA device."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
