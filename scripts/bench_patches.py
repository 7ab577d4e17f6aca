"""Compare random 3-D patches of volumes: ChunkLoader and DataLoader over `h5chunk.Patches`, and others.

    python scripts/bench_patches.py [--volumes 4] [--side 320] [--size 64] [--batch 4] [--rounds 3] [--epochs 4]
        [--layouts contiguous gzip lz4 guessed] [--only ...] [--json FILE]

The volumes are made once in ``bench-data/``: smooth noise as float32 ``raw``, and a uint8 ``label``. They are
contiguous, or in chunks of ``--size`` with gzip or lz4 (which needs hdf5plugin), or ``guessed``: with gzip in the
chunks that h5py guesses. The patches of an epoch have as many voxels as the volumes, in both datasets:

- ``ours`` is ChunkLoader with ``--workers`` threads; ``ours, DataLoader`` has a ChunkSampler and workers.
- ``ours, grid`` is ChunkLoader over the tiles of the volumes, shuffled.
- ``h5py`` is a DataLoader with workers over a data set that keeps the file open and slices at random starts.
- ``h5py, 1 process`` is the same without workers.
- ``3dunet`` is pytorch-3dunet's LazyHDF5Dataset (patches of a grid, shuffled) in a DataLoader with workers;
  ``3dunet, in memory`` is its StandardHDF5Dataset, of which each worker keeps all volumes in memory.
- ``monai`` is MONAI's RandSpatialCropSamplesd, which cuts all patches of a volume after h5py has read it, with workers.
  ``monai, in memory`` is its CacheDataset of all volumes with RandSpatialCropd, in one process or with workers.

They take turns, in reverse order every other round. A turn is a warm-up epoch and ``--epochs`` timed ones, because a
single short epoch could have been read ahead. The table shows patches/s (median and range), and the median ratio to
``h5py`` in the same round. Before that, the values of ``ours`` are compared with slices. For windows of 1, 4, 8 and all
cells, the script also prints the bytes decoded per byte used, and how often the patches of a batch share a volume.
Packages that cannot be imported are skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from peers import volumes as peers
from torch.utils.data import DataLoader, Dataset
from turns import Epoch, take_turns

import h5chunk

FIELDS = {"raw": "*/raw", "label": "*/label"}


def made(args: argparse.Namespace) -> Path:
    """Make the file with volumes in one layout, and return its path."""
    path = Path("bench-data") / f"patches-{args.volumes}-{args.side}-{args.size}-{args.layout}.h5"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    options: dict[str, Any] = {"contiguous": {}, "guessed": {"compression": "gzip", "compression_opts": 4}}.get(
        args.layout, {"chunks": (args.size,) * 3, "compression": "gzip", "compression_opts": 4}
    )
    if args.layout == "lz4":
        import hdf5plugin

        options = {"chunks": (args.size,) * 3, **hdf5plugin.Blosc(cname="lz4", clevel=5)}
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, h5py.File(Path(folder) / "made.h5", "w") as file:
        for number in range(args.volumes):
            coarse = random.normal(size=(args.side // 8,) * 3)
            raw = coarse.repeat(8, 0).repeat(8, 1).repeat(8, 2) + random.integers(0, 16, (args.side,) * 3) / 16
            file.create_dataset(f"{number}/raw", data=raw.astype(np.float32), **options)
            file.create_dataset(f"{number}/label", data=(raw > 1).astype(np.uint8), **options)
        file.close()
        Path(folder, "made.h5").rename(path)
    return path


def patches_of(args: argparse.Namespace, **more: Any) -> h5chunk.Patches:
    return h5chunk.Patches(made(args), FIELDS, (args.size,) * 3, trusted=True, **more)


def counted(batches: Any) -> Iterator[int]:
    for raw, _ in batches:
        yield len(raw)


def ours(args: argparse.Namespace) -> Epoch:
    loader = h5chunk.ChunkLoader(patches_of(args), args.batch, num_threads=args.workers)
    return lambda: counted(loader)


def ours_on_a_grid(args: argparse.Namespace) -> Epoch:
    loader = h5chunk.ChunkLoader(patches_of(args).tiles(), args.batch, num_threads=args.workers)
    return lambda: (len(batch[0]) for batch in loader)


def ours_in_data_loader(args: argparse.Namespace) -> Epoch:
    patches = patches_of(args)
    sampler = h5chunk.ChunkSampler(patches, args.batch)
    loader = DataLoader(patches, batch_sampler=sampler, num_workers=args.workers, persistent_workers=True)
    return lambda: counted(loader)


class Slices(Dataset[Any]):
    """The usual Dataset of random patches: the file stays open, and each patch is a slice."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._path, self._size, self._side = made(args), args.size, args.side
        self._count, self._volumes, self._file = args.images, args.volumes, None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        if self._file is None:
            self._file = h5py.File(self._path)
        starts = torch.randint(self._side - self._size + 1, (3,)).tolist()
        where = tuple(slice(start, start + self._size) for start in starts)
        group = self._file[str(number % self._volumes)]
        return tuple(torch.from_numpy(group[name][where]) for name in ("raw", "label"))


def naive(args: argparse.Namespace, workers: int | None = None) -> Epoch:
    workers = args.workers if workers is None else workers
    loader = DataLoader(Slices(args), args.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    return lambda: counted(loader)


CONTENDERS = {
    "ours": ours,
    "ours, grid": ours_on_a_grid,
    "ours, DataLoader": ours_in_data_loader,
    "h5py": naive,
    "h5py, 1 process": lambda args: naive(args, 0),
    "3dunet": lambda args: peers.unet3d(made(args), args),
    "3dunet, in memory": lambda args: peers.unet3d(made(args), args, in_memory=True),
    "monai": lambda args: peers.monai(made(args), args),
    "monai, in memory": lambda args: peers.monai_in_memory(made(args), args, args.workers),
    "monai, in memory, 1 process": lambda args: peers.monai_in_memory(made(args), args, 0),
}


def compare_values(args: argparse.Namespace) -> None:
    """Compare the patches of an epoch with slices of the file."""
    patches = patches_of(args, positions=True)
    with h5py.File(made(args)) as file, h5chunk.ChunkLoader(patches, args.batch) as loader:
        for raw, label, positions in loader:
            for number, (volume, *start) in enumerate(positions.tolist()):
                where = tuple(slice(at, at + args.size) for at in start)
                assert np.array_equal(raw[number].numpy(), file[f"{volume}/raw"][where])
                assert np.array_equal(label[number].numpy(), file[f"{volume}/label"][where])
    tiles = patches_of(args).tiles()
    for name, grid in peers.GRIDS.items():
        try:
            theirs = grid(made(args), args)
            for number, (raw, label) in enumerate(theirs):
                own = tiles[number]
                assert np.array_equal(own[0], raw) and np.array_equal(own[1], label), (name, number)
            print(f"{args.layout}: the {number + 1} patches of a grid are equal to those of {name}")
        except ImportError as error:
            print(f"{name} is not compared ({error})")


def windows(args: argparse.Namespace) -> None:
    """Print how many bytes windows of several sizes decode, and how often patches of a batch share a volume."""
    patches = patches_of(args)
    print(f"{len(patches)} patches, about {patches.chunk_samples} per cell")
    for number in (1, 4, 8, len(patches)):
        order = h5chunk.ChunkSampler(patches, args.batch, window_chunks=number)
        volumes = patches.positions()[:, 0]
        pairs = [np.mean(volumes[batch][:, None] == volumes[batch]) for batch in order]
        read = patches.amplification(order.order)
        print(f"windows of {number} cells: decodes {read:.2f} x the bytes of patches, "
              f"{np.mean(pairs):.2f} of the pairs in a batch are of one volume")  # fmt: skip


def report(args: argparse.Namespace, rates: dict[str, list[tuple[float, float]]]) -> None:
    base = rates.get("h5py")
    for name, turns in rates.items():
        found = [rate for rate, _ in turns]
        times = [own / other for (own, _), (other, _) in zip(turns, base, strict=True)] if base else [float("nan")]
        spread = f"{min(found):.0f} to {max(found):.0f}"
        print(f"{args.layout:10} {name:28} {statistics.median(found):8.0f} ({spread}) patches/s, "
              f"{statistics.median(times):5.2f} x h5py")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("volumes", 4),
        ("side", 320),
        ("size", 64),
        ("batch", 4),
        ("rounds", 3),
        ("workers", 2),
        ("epochs", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layouts", nargs="+", default=["contiguous", "gzip", "lz4", "guessed"])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    args.images, args.threads = args.volumes * (args.side // args.size) ** 3, 1
    found = {}
    for layout in args.layouts:
        args.layout = layout
        compare_values(args)
        if args.layout != "contiguous":
            windows(args)
        report(args, found.setdefault(args.layout, take_turns(args, CONTENDERS)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
