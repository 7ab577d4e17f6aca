"""Readers of patches of volumes, which `bench_patches.py` compares: pytorch-3dunet's and MONAI's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch.utils.data import ConcatDataset, DataLoader
from turns import Epoch

KEYS = ("raw", "label")


def unet3d_datasets(path: Path, args: argparse.Namespace, *, in_memory: bool) -> list[Any]:
    """Return pytorch-3dunet's dataset of each volume, with the patches of a grid and no augmentation."""
    from pytorch3dunet.datasets.hdf5 import LazyHDF5Dataset, StandardHDF5Dataset

    size = [args.size] * 3
    slices = {"name": "SliceBuilder", "patch_shape": size, "stride_shape": size, "skip_shape_check": True}
    same = [{"name": "ToTensor", "expand_dims": False}]
    kind = StandardHDF5Dataset if in_memory else LazyHDF5Dataset
    return [
        kind(
            str(path), "train", dict(slices), {"raw": same, "label": same},
            raw_internal_path=f"{number}/raw", label_internal_path=f"{number}/label",
        )
        for number in range(args.volumes)
    ]  # fmt: skip


def unet3d(path: Path, args: argparse.Namespace, *, in_memory: bool = False) -> Epoch:
    datasets = ConcatDataset(unet3d_datasets(path, args, in_memory=in_memory))
    loader = DataLoader(datasets, args.batch, shuffle=True, num_workers=args.workers, persistent_workers=True)
    return lambda: (len(raw) for raw, _ in loader)


def read_volume(path: Path, number: int) -> dict[str, np.ndarray]:
    """Return a volume with the axis of channels that MONAI expects."""
    with h5py.File(path) as file:
        return {key: file[f"{number}/{key}"][()][None] for key in KEYS}


def monai(path: Path, args: argparse.Namespace) -> Epoch:
    """Read whole volumes, as MONAI does for lack of an HDF5 reader, and cut all patches of a volume from it."""
    from monai.data import Dataset, list_data_collate, set_track_meta
    from monai.transforms import Compose, RandSpatialCropSamplesd

    set_track_meta(False)
    each = args.images // args.volumes
    crop = RandSpatialCropSamplesd(KEYS, (args.size,) * 3, num_samples=each, random_size=False)
    dataset = Dataset(range(args.volumes), Compose([lambda number: read_volume(path, number), crop]))
    settings = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    loader = DataLoader(dataset, 1, shuffle=True, collate_fn=list_data_collate, **settings)
    return lambda: (len(part) for batch in loader for part in batch["raw"].split(args.batch))


def monai_in_memory(path: Path, args: argparse.Namespace, workers: int) -> Epoch:
    """Keep all volumes in memory, which worker processes share."""
    from monai.data import CacheDataset, list_data_collate, set_track_meta
    from monai.transforms import Compose, Lambda, RandSpatialCropd

    set_track_meta(False)  # plain tensors are faster
    crop = RandSpatialCropd(KEYS, (args.size,) * 3, random_size=False)
    reading = Lambda(lambda number: read_volume(path, number), track_meta=False)  # a bare function is never cached
    transform = Compose([reading, crop])
    cached = CacheDataset(range(args.volumes), transform, progress=False, copy_cache=False)
    patches = ConcatDataset([cached] * (args.images // args.volumes))
    settings = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(patches, args.batch, shuffle=True, collate_fn=list_data_collate, **settings)
    return lambda: (len(batch["raw"]) for batch in loader)


def unet3d_grid(path: Path, args: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    for dataset in unet3d_datasets(path, args, in_memory=False):
        yield from (dataset[number] for number in range(len(dataset)))


def monai_grid(path: Path, args: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """Yield the patches of MONAI's GridPatchDataset."""
    from monai.data import GridPatchDataset, PatchIterd

    volumes = [read_volume(path, number) for number in range(args.volumes)]
    for patch, _ in GridPatchDataset(volumes, PatchIterd(KEYS, (args.size,) * 3), with_coordinates=True):
        yield patch["raw"][0], patch["label"][0]


GRIDS: dict[str, Callable[[Path, argparse.Namespace], Iterator[tuple[Any, Any]]]] = {
    "pytorch-3dunet": unet3d_grid,
    "MONAI": monai_grid,
}
