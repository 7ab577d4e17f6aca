"""Measure how much tune and repack speed up an unchanged training loop on a file with h5py's guessed chunks.

    python scripts/bench_badly_chunked.py --folder /tmp/bench-badly     # 2,000 images of 224 x 224 x 3: 300 MB, twice

Makes ``create_dataset("images", (N, 224, 224, 3), "u1", chunks=True)`` and measures samples/s with a warm page cache:

plain             the usual loop: a Dataset of ``file["images"][i]`` in a ``DataLoader(shuffle=True)``
plain, repacked   the same loop, unchanged, on the output of ``h5chunk repack --tuned`` after ``tune --json``
loader            ChunkLoader on the original file, with the window that tune recommends without a new file
HDF5's best       HDF5 reads the original file band by band, and each chunk once: the limit of readers that use HDF5
bytes             one thread reads the file's bytes in order: the limit of all readers of the original file
loader, repacked  ChunkLoader on the new file

Prints each rate and its ratio to that of ``plain``. For the plain loops, prints also the rate per processor time, which
other processes disturb less. Then prints the recommendation and advice of tune, and the duration of tune and repack.
The files are removed afterwards unless ``--keep`` is set. ``--json FILE`` writes all results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import h5chunk


class Plain(Dataset):
    """The usual Dataset over h5py, which reads one sample at a time."""

    def __init__(self, path: Path) -> None:
        self.file = h5py.File(path, "r")
        self.images, self.labels = self.file["images"], self.file["labels"]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.images[index]), int(self.labels[index])


def make(path: Path, count: int, size: int) -> tuple[int, ...]:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (count, size, size, 3), "u1", chunks=True)
        step = images.chunks[0]
        for start in range(0, count, step):
            images[start : start + step] = rng.integers(0, 256, (min(step, count - start), size, size, 3), np.uint8)
        file["labels"] = rng.integers(0, 10, count)
        return images.chunks


def rate(epochs: Callable[[], Iterable], seconds: float) -> float:
    """Return samples/s over about ``seconds``, starting epochs as needed."""
    started, samples = time.perf_counter(), 0
    while True:
        for images, _ in epochs():
            samples += len(images)
            if time.perf_counter() - started > seconds:
                return samples / (time.perf_counter() - started)


def plain_rate(path: Path, batch_size: int, seconds: float, used: list[float]) -> float:
    """Return samples/s of wall time. The samples per second of this process's CPU time are appended to ``used``."""
    data, cpu, started = Plain(path), time.process_time(), time.perf_counter()
    found = rate(lambda: DataLoader(data, batch_size=batch_size, shuffle=True), seconds)
    taken = time.perf_counter() - started
    used.append(found * taken / (time.process_time() - cpu))
    data.file.close()
    return found


def loader_rate(path: Path, batch_size: int, seconds: float, window: int | None) -> float:
    dataset = h5chunk.ChunkDataset(path)
    sampler = h5chunk.ChunkSampler(dataset, batch_size, window_chunks=window)
    with h5chunk.ChunkLoader(dataset, batch_sampler=sampler) as loader:
        rate(lambda: loader, 0.5 * seconds)
        return rate(lambda: loader, seconds)


def bytes_rate(path: Path, count: int) -> float:
    """Return the images/s of reading a whole file of ``count`` images into a reused buffer."""
    buffer = memoryview(bytearray(8 << 20))
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return count / (time.perf_counter() - started)


def hdf5_rate(path: Path) -> float:
    """Return the images/s of reading band by band, so that every chunk is read once."""
    with h5py.File(path, "r", rdcc_nbytes=1 << 30, rdcc_nslots=1 << 20, rdcc_w0=0.0) as file:
        images = file["images"]
        band = images.chunks[0]
        out = np.empty((band, *images.shape[1:]), np.uint8)
        started = time.perf_counter()
        for start in range(0, len(images), band):
            stop = min(start + band, len(images))
            images.read_direct(out, np.s_[start:stop], np.s_[: stop - start])
        return len(images) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--budget", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    path, new, tuned = (args.folder / name for name in ("badly.h5", "repacked.h5", "tuned.json"))
    chunks = make(path, args.count, args.size)
    found = h5chunk.tune(path, batch_size=args.batch_size, budget_s=args.budget)
    tuned.write_text(found.to_json())
    from h5chunk.tools.repack.repack import repack

    started = time.perf_counter()
    repack(path, new, tuned=tuned, overwrite=True)
    repack_s = time.perf_counter() - started
    batch, seconds = args.batch_size, args.seconds
    turns: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {"plain": [], "plain, repacked": []}
    torch.set_num_threads(1)  # so that all processor time belongs to the loop
    for _ in range(args.rounds):
        for name, measured in (
            ("plain", lambda: plain_rate(path, batch, seconds, used["plain"])),
            ("plain, repacked", lambda: plain_rate(new, batch, seconds, used["plain, repacked"])),
            ("loader", lambda: loader_rate(path, batch, seconds, found.window_in_place)),
            ("HDF5's best", lambda: hdf5_rate(path)),
            ("bytes", lambda: bytes_rate(path, args.count)),
            ("loader, repacked", lambda: loader_rate(new, batch, seconds, None)),
        ):
            turns.setdefault(name, []).append(measured())
    rates = {name: statistics.median(some) for name, some in turns.items()}
    print(f"{args.count} images of {args.size} x {args.size} x 3 in chunks of {chunks}; batches of {batch}")
    for name, each in rates.items():
        print(f"{name:17s}{each:>12,.1f} samples/s {each / rates['plain']:>9,.1f} x plain")
    cpu = [statistics.median(each) for each in used.values()]
    print(f"plain loops by processor time: {cpu[0]:,.0f} and {cpu[1]:,.0f} samples/s, {cpu[1] / cpu[0]:.1f} x")
    print(f"recommended: {found.setting}")
    best, limit = rates["HDF5's best"], rates["bytes"]
    print(f"loader: {rates['loader'] / best:.2f} of HDF5's best, {rates['loader'] / limit:.2f} of the bytes alone")
    print(
        f"tune took {found.seconds:.0f} s, repack {repack_s:.1f} s; advice: {', '.join(a.code for a in found.advice)}"
    )
    if not args.keep:
        for each in (path, new, tuned):
            each.unlink()
        if not any(args.folder.iterdir()):
            args.folder.rmdir()
    if args.json:
        versions = {"h5chunk": h5chunk.__version__, "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
        about = {"chunks": chunks, "machine": f"{os.cpu_count()} cores, {platform.machine()}", "versions": versions}
        args.json.write_text(
            json.dumps(
                {"rates": rates, "turns": turns, "by_processor_time": used, "tune_s": found.seconds} | about, indent=2
            )
        )


if __name__ == "__main__":
    main()
