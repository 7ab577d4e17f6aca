"""Inspect the files that a process reads: how much is in the page cache, and how HDF5 files are chunked."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MIN_BYTES = 1 << 20  # smaller files are ignored
MAX_FILES = 64
PART, PARTS = 1 << 24, 16  # size in bytes, and number, of the parts of a large file that are examined
COLD_READS = 16


def open_files() -> list[dict[str, Any]]:
    """Describe the regular files that this process has open."""
    found = []
    for entry in list(Path("/proc/self/fd").iterdir())[: 16 * MAX_FILES]:
        with suppress(OSError, ValueError):
            path, status = entry.readlink(), entry.stat()
            is_data = stat.S_ISREG(status.st_mode) and status.st_size >= MIN_BYTES and "deleted" not in str(path)
            if is_data and not str(path).startswith(("/dev/shm/torch_", "/proc")):
                found.append({"path": str(path), "bytes": status.st_size})
    return found[:MAX_FILES]


def page_states(path: str, start: int, size: int) -> npt.NDArray[np.uint8]:
    """Return a 1 for each page of a part of a file that is in the page cache, and a 0 for each other page.

    ``start`` must be a multiple of the page size.
    """
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    with (
        open(path, "rb") as file,  # noqa: PTH123
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ, offset=start) as mapped,
    ):
        memory, states = np.frombuffer(mapped, np.uint8), np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        failed = mincore(memory.ctypes.data, size, states.ctypes.data)
        del memory
    if failed:
        raise OSError(f"{path}: mincore failed")
    return np.asarray(states & 1, np.uint8)


def cached_share(path: str, size: int) -> float:
    """Return the fraction of a file's pages in the page cache. For a large file, only parts are examined."""
    part = min(size, PART)
    starts = np.linspace(0, size - part, num=1 if part == size else PARTS).astype(np.int64) // mmap.PAGESIZE
    return float(np.mean([page_states(path, int(start) * mmap.PAGESIZE, part).mean() for start in starts]))


def cold_seconds(path: str, size: int, read_bytes: int) -> float | None:
    """Measure the time of an uncached read, by dropping a few parts of the file from the page cache.

    Returns None if the parts stay cached, because the file system is in memory or another process maps the file.
    """
    seconds = []
    read_bytes = min(read_bytes, size)
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        for start in np.random.default_rng(0).integers(0, size - read_bytes + 1, COLD_READS):
            first = int(start) // mmap.PAGESIZE * mmap.PAGESIZE
            os.posix_fadvise(file.fileno(), first, read_bytes + mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)
            if page_states(path, first, min(read_bytes, size - first)).any():
                continue
            started = time.perf_counter()
            os.pread(file.fileno(), read_bytes, int(start))
            seconds.append(time.perf_counter() - started)
    return statistics.fmean(seconds) if len(seconds) > COLD_READS // 2 else None


def describe_dataset(data: Any) -> tuple[str, dict[str, Any]]:
    """Return the path of the file of an h5py dataset, and the facts that determine how fast numbers can be read.

    Only the dataset itself is examined: a file may have millions of other ones.
    """
    file = data.file
    path = str(Path(file.filename).resolve())
    if not data.shape or data.dtype.kind not in "biuf":
        return path, {}
    return path, {
        "dataset": data.name,
        "shape": data.shape,
        "chunks": data.chunks,
        "itemsize": data.dtype.itemsize,
        "filtered": bool(data.id.get_create_plist().get_nfilters()),
        "cache": file.id.get_access_plist().get_cache()[1:],
    }
