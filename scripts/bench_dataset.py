"""Compare ChunkDataset and ChunkSampler in torch's DataLoader with the usual ways to read HDF5.

    python scripts/bench_dataset.py                              # 12,000 images of 224 x 224, made once (6 GB)
    python scripts/bench_dataset.py --count 50000 --size 32      # the size of CIFAR, read through the chunk cache

All readers read the same images in ``bench-data/`` in batches of 256, with a warm page cache, with 0 and 2 persistent
workers, after a warm-up epoch:

ours        ChunkDataset and ChunkSampler on the converted file
loader      ChunkLoader on the same file, with two reading threads instead of a DataLoader
plain       ``h5py.File(...)["images"][i]`` with ``shuffle=True`` on a contiguous file
blog        the same code on chunks of 100 images with a 1 GiB chunk cache and w0 = 1, as blogs recommend; the file is
            opened anew for each round, because with w0 = 1 the cache has no limit and would grow to the whole file
ready       a Dataset that copies one ready batch into fresh memory for the DataLoader: the limit of torch's transport
ready-held  a Dataset that returns the same tensor repeatedly, so that only a file descriptor is passed

Prints for each reader: images/s (median of the interleaved rounds); the ratio of bytes read by the processes (rchar of
/proc/PID/io) to bytes used; with a chunk cache, the fraction of samples that needed no chunk read, computed from the
same bytes; and the growth of the private memory of a reading process. ``--json FILE`` writes all results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import h5chunk
from h5chunk.feed.shared import shared_empty

HERE = Path(__file__).parent
BLOG_CHUNK = 100
NAMES = ("ours", "loader", "plain", "blog", "ready", "ready-held")


class PlainDataset(Dataset):
    """The usual Dataset, which opens the file on first access and reads one row at a time."""

    def __init__(self, path: Path, length: int, **options: object) -> None:
        self.path, self.length, self.options = path, length, options
        self.file: h5py.File | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = h5py.File(self.path, "r", **self.options)
            self.images, self.labels = self.file["images"], self.file["labels"]
        return torch.from_numpy(self.images[index]), int(self.labels[index])


class ReadyDataset(Dataset):
    """Return the same batch each time, either itself or, with ``copy``, copied into fresh memory."""

    def __init__(self, length: int, batch_size: int, size: int, copy: bool) -> None:
        self.length, self.copy = length // batch_size, copy
        self.images = torch.randint(0, 255, (batch_size, 3, size, size), dtype=torch.uint8)
        self.labels = torch.zeros(batch_size, dtype=torch.int64)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.copy:
            return self.images, self.labels
        shape = tuple(self.images.shape)
        in_worker = torch.utils.data.get_worker_info() is not None
        images = shared_empty(shape, torch.uint8) if in_worker else torch.empty(shape, dtype=torch.uint8)
        return images.copy_(self.images), self.labels.clone()


def make_files(folder: Path, count: int, size: int) -> dict[str, Path]:
    """Make the converted file, and two files with the same images: a contiguous one and one with chunks of 100."""
    paths = {name: folder / f"{name}-{count}-{size}.h5" for name in ("ours", "plain", "blog")}
    if not paths["ours"].exists():
        jpegs = folder / f"jpegs-{count}-{size}"
        sizes = ["--size", str(size), str(size)]
        subprocess.run([sys.executable, HERE / "make_images.py", jpegs, "--count", str(count), *sizes], check=True)
        print(h5chunk.convert(jpegs, paths["ours"]))
    for name, chunks in (("plain", None), ("blog", (BLOG_CHUNK, 3, size, size))):
        if not paths[name].exists():
            part = paths[name].with_suffix(".part")
            with h5py.File(paths["ours"]) as source, h5py.File(part, "w") as target:
                images = target.create_dataset("images", source["images"].shape, "u1", chunks=chunks)
                for start in range(0, len(images), 10 * BLOG_CHUNK):
                    images[start : start + 10 * BLOG_CHUNK] = source["images"][start : start + 10 * BLOG_CHUNK]
                target["labels"] = source["labels"][()]
            part.rename(paths[name])
    return paths


def loader(name: str, paths: dict[str, Path], args: argparse.Namespace, workers: int) -> DataLoader:
    count, batch_size = args.count, args.batch_size
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    if name == "loader":
        return h5chunk.ChunkLoader(paths["ours"], batch_size, num_threads=2)
    if name == "ours":
        dataset = h5chunk.ChunkDataset(paths[name])
        return DataLoader(dataset, batch_sampler=h5chunk.ChunkSampler(dataset, batch_size), **options)
    if name.startswith("ready"):
        return DataLoader(ReadyDataset(count, batch_size, args.size, name == "ready"), batch_size=None, **options)
    cache = {"rdcc_nbytes": 1 << 30, "rdcc_nslots": 100_003, "rdcc_w0": 1.0} if name == "blog" else {}
    dataset = PlainDataset(paths[name], count, **cache)
    sampler = torch.utils.data.RandomSampler(dataset, num_samples=args.blog_images if name == "blog" else count)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **options)


def processes(iterator: Iterator) -> list[int]:
    """Return the ids of the processes that read for this iterator."""
    workers = getattr(iterator, "_workers", None)
    return [worker.pid for worker in workers] if workers else [os.getpid()]


def read_bytes(pids: list[int]) -> int:
    return sum(int(Path(f"/proc/{pid}/io").read_text().split("rchar: ")[1].split()[0]) for pid in pids)


def private_bytes(pid: int) -> int:
    """Return a process's private memory, which includes its chunk cache but not batches in shared memory."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(text.split(f"{key}:")[1].split()[0]) * 1024 for key in ("Private_Clean", "Private_Dirty"))


def epoch(data: DataLoader) -> dict[str, float]:
    """Run an epoch; return images/s, bytes read per image, and the final memory of the first reading process."""
    old = getattr(data, "_iterator", None)
    running = processes(old) if old else []  # because persistent workers start reading at iter()
    before = read_bytes(running)
    started, images = time.perf_counter(), 0
    iterator = iter(data)
    pids = processes(iterator)
    before = before if running else read_bytes(pids)
    for batch in iterator:
        images += len(batch[0])
    seconds = time.perf_counter() - started
    return {
        "images": images,
        "images_per_s": images / seconds,
        "read_bytes": read_bytes(pids) - before,
        "private_bytes": private_bytes(pids[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("bench-data"))
    parser.add_argument("--count", type=int, default=12_000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blog-images", type=int, default=1024, help="images per round of the slow blog settings")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    paths = make_files(args.folder, args.count, args.size)
    results = {f"{name}/{workers}": row for workers in args.workers for name, row in measure(paths, args, workers)}
    print_table(results, args.workers)
    if args.json:
        versions = {"h5chunk": h5chunk.__version__, "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
        versions |= {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
        machine = f"{os.cpu_count()} cores, {platform.machine()}"
        args.json.write_text(
            json.dumps({"results": results, "versions": versions, "machine": machine}, indent=2) + "\n"
        )


def measure(paths: dict[str, Path], args: argparse.Namespace, workers: int) -> Iterator[tuple[str, dict]]:
    """Return the results of all readers with this number of workers."""
    names = [name for name in NAMES if name != "loader" or workers == 0]
    loaders, rounds, grown = {}, {name: [] for name in names}, {}
    for name in names:
        start_bytes = private_bytes(os.getpid()) if workers == 0 else 0
        loaders[name] = loader(name, paths, args, workers)
        grown[name] = epoch(loaders[name])["private_bytes"] - start_bytes
    for _ in range(args.rounds):
        for name in names:
            if name == "blog":
                loaders[name] = loader(name, paths, args, workers)
            rounds[name].append(epoch(loaders[name]))
    image_bytes = 3 * args.size * args.size
    dataset = h5chunk.ChunkDataset(paths["ours"])
    chunks = {"blog": BLOG_CHUNK}
    if loaders["ours"].dataset.cache.nbytes:
        chunks["ours"] = dataset.chunk_samples
    for name in names:
        last = rounds[name][-1]
        reads = last["read_bytes"] / image_bytes
        rates = [each["images_per_s"] for each in rounds[name]]
        yield (
            name,
            {
                "images_per_s": statistics.median(rates),
                "rates": rates,
                "amplification": reads / last["images"] if not name.startswith("ready") else None,
                "hit_rate": 1 - reads / chunks[name] / last["images"] if name in chunks else None,
                "grown_bytes": grown[name],
            },
        )


def print_table(results: dict[str, dict], workers: list[int]) -> None:
    for num_workers in workers:
        ours = results[f"ours/{num_workers}"]["images_per_s"]
        print(f"\n{num_workers} workers   images/s   ours is    read/used   hit rate   memory grew")
        for key, row in results.items():
            name, of = key.split("/")
            if int(of) != num_workers:
                continue
            read = "" if row["amplification"] is None else f"{row['amplification']:.3f}"
            hits = "" if row["hit_rate"] is None else f"{row['hit_rate']:.3f}"
            rate = row["images_per_s"]
            print(
                f"{name:10s} {rate:>9,.0f}   {ours / rate:>6.2f} x   {read:>9s}   {hits:>8s}   "
                f"{row['grown_bytes'] / 2**20:>7,.0f} MiB"
            )


if __name__ == "__main__":
    main()
