"""Data sets and samples for `doctor_faults.py`, made efficiently and inefficiently."""

from __future__ import annotations

import atexit
import functools
import lzma
import mmap
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

FOLDER = Path(tempfile.mkdtemp(prefix="h5chunk-faults-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
PIXELS = np.random.default_rng(0).integers(0, 4, 48_000).astype(np.uint8).tobytes()
PACKED = lzma.compress(PIXELS)
LOCK = multiprocessing.get_context("fork").Lock()
PAGES = 4096  # of a file on a throttled disk
CGROUP = Path("/sys/fs/cgroup/blkio/h5chunk-bench")  # whose processes read from a throttled disk
atexit.register(lambda: CGROUP.rmdir() if CGROUP.exists() else None)
PAGE_OUT = 21  # MADV_PAGEOUT: evict pages as the kernel does when memory is short


class Made(Dataset):
    """Samples computed by a function of their index."""

    def __init__(self, make: Callable[[int], Any], length: int = 100_000) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


class Stored(Dataset):
    """Samples of an HDF5 file, which each worker opens."""

    def __init__(self, path: Path, **cache: Any) -> None:
        self.path, self.cache, self.images = path, cache, None
        with h5py.File(path) as file:
            self.length = len(file["images"])

    def __len__(self) -> int:
        return 100 * self.length  # long epochs

    def __getitem__(self, i: int) -> Any:
        if self.images is None:
            self.images = h5py.File(self.path, **self.cache)["images"]
        return torch.from_numpy(self.images[i % self.length]), i % 10


def stored(name: str, chunks: tuple[int, ...], side: int = 32, **filters: Any) -> Path:
    path = FOLDER / f"{name}.h5"
    if not path.exists():
        images = np.random.default_rng(0).integers(0, 40, (2_048_000 // side**2, side, side, 3)).astype(np.uint8)
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=images, chunks=chunks, **filters)
    return path


# ---- samples


def tiny(i: int) -> Any:
    return torch.zeros(256), i % 10


def decoded(i: int) -> Any:
    pixels = lzma.decompress(PACKED)
    return torch.frombuffer(bytearray(pixels[:256]), dtype=torch.uint8).float(), i % 10


def not_decoded(i: int) -> Any:
    pixels = PIXELS
    return torch.frombuffer(bytearray(pixels[:256]), dtype=torch.uint8).float(), i % 10


def slept(seconds: float) -> Callable[[int], Any]:
    def make(i: int) -> Any:
        time.sleep(seconds)  # as if it waited for a server
        return tiny(i)

    return make


def throttled(i: int) -> Any:
    file = throttled_file()
    os.posix_fadvise(file.fileno(), 4096 * (i % PAGES), 4096, os.POSIX_FADV_DONTNEED)
    file.seek(4096 * (i % PAGES))
    file.read(4096)
    return tiny(i)


def not_throttled(i: int) -> Any:
    return tiny(i)


@functools.cache
def throttled_file() -> Any:
    """Open a file on a disk from which this process may read 500 times per second, or one whose reads sleep."""
    path = FOLDER / "pages"
    path.write_bytes(os.urandom(4096 * PAGES))
    file = path.open("rb", buffering=0)
    try:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        device = os.stat(path).st_dev
        CGROUP.mkdir(exist_ok=True)
        limit = CGROUP / "blkio.throttle.read_iops_device"
        limit.write_text(f"{os.major(device)}:{os.minor(device)} 500")
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:  # not root, no such disk, or version 2 of cgroups
        print(f"the throttled disk is simulated: {error}", flush=True)
        return SleepingFile()
    return file


class SleepingFile:
    """A file on a disk where each read takes 0.6 ms."""

    def fileno(self) -> int:
        return 0

    def seek(self, offset: int) -> None: ...

    def read(self, size: int) -> bytes:
        time.sleep(0.0006)
        return bytes(size)


def locked(i: int) -> Any:
    with LOCK:
        time.sleep(0.0005)
    time.sleep(0.0002)
    return tiny(i)


def unlocked(i: int) -> Any:
    time.sleep(0.0005)
    time.sleep(0.0002)
    return tiny(i)


def uneven(i: int) -> Any:
    worker = get_worker_info()
    time.sleep(0.002 if worker is not None and worker.id == 0 else 0.0003)
    return tiny(i)


class Mapped(Dataset):
    """Samples in a memory-mapped file, whose pages are or are not evicted from time to time."""

    def __init__(self, evicts: bool) -> None:
        self.evicts, self.memory = evicts, None
        self.path = FOLDER / "mapped"
        with self.path.open("wb") as file:
            file.write(bytes(8 << 20))
            os.fsync(file.fileno())  # only clean pages are evicted

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> Any:
        if self.memory is None:
            with self.path.open("r+b") as file:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self.evicts and i % 32 == 0:
            self.memory.madvise(PAGE_OUT)
        if i % 32 == 0:
            np.frombuffer(self.memory, np.uint8)[:: mmap.PAGESIZE].sum()
        return tiny(i)


def slow_collate(samples: list[Any]) -> Any:
    rows = [torch.tensor([float(value) for value in sample.tolist() * 16])[:256] for sample, _ in samples]
    return torch.stack(rows), torch.tensor([label for _, label in samples])


class Large(Dataset):
    """Batches of 38 MB in shared memory, which a worker returns without delay."""

    def __init__(self) -> None:
        self.images = torch.zeros(128, 3, 160, 160).share_memory_()

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> Any:
        return self.images, i
