"""Readers of simulated fields and of strain, which `bench_windows.py` compares: The Well's, ml4gw's, h5py and h5chunk.

Every reader gives the same tensors: fields as (window, time, y, x, channel), strain as (window, detector, time).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np

INPUTS, STEPS, SHAPE = 4, 5, (4, 101, 128, 384)
KERNEL, SAMPLES, FILES = 8192, 1 << 21, 4
DETECTORS = ("H1", "L1")
BATCHES = {"well": 8, "strain": 256}  # windows in a batch


def make_well(path: Path) -> None:
    """Make a file like those of The Well's turbulent_radiative_layer_2D: 4 trajectories of 101 steps, 128 x 384."""
    random = np.random.default_rng(0)
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file.attrs.update(grid_type="cartesian", n_trajectories=SHAPE[0], n_spatial_dims=2, dataset_name="made")
        file.create_group("boundary_conditions")
        for name, length in (("time", SHAPE[1]), ("x", SHAPE[2]), ("y", SHAPE[3])):
            file[f"dimensions/{name}"] = np.arange(length, dtype=np.float32)
            file[f"dimensions/{name}"].attrs["sample_varying"] = False
        file["dimensions"].attrs["spatial_dims"] = ["x", "y"]
        file["scalars/tcool"] = np.float32(0.1)
        file["scalars"].attrs["field_names"] = ["tcool"]
        file["scalars/tcool"].attrs.update(time_varying=False, sample_varying=False)
        for order, names in enumerate((["density", "pressure"], ["velocity"], [])):
            group = file.create_group(f"t{order}_fields")
            group.attrs["field_names"] = np.array(names, h5py.string_dtype())
            for name in names:
                group[name] = random.random(SHAPE + (2,) * order, np.float32)
                group[name].attrs.update(dim_varying=[True, True], sample_varying=True, time_varying=True)


def make_strain(path: Path) -> None:
    """Make files of 512 s of noise of two detectors at 4,096 Hz, chunked as ml4gw recommends (it names no size)."""
    path.parent.mkdir(exist_ok=True)
    for number in range(FILES):
        random = np.random.default_rng(number)
        with h5py.File(path.with_name(f"{number}.h5"), "w") as file:
            for name in DETECTORS:
                file.create_dataset(name, data=random.normal(size=SAMPLES).astype(np.float32), chunks=(KERNEL,))


class NaiveReader:
    """The usual reader: open each file once in each process, and read a window by slices."""

    def __init__(self, path: Path) -> None:
        self._is_well = path.parent.name == "well"
        self._paths, self._files = [path] if self._is_well else strain_files(path), {}
        self._windows = SHAPE[1] - STEPS + 1 if self._is_well else SAMPLES - KERNEL + 1

    def __len__(self) -> int:
        return self._windows * (SHAPE[0] if self._is_well else FILES)

    def __getitem__(self, index: int) -> np.ndarray:
        number, start = divmod(index, self._windows)
        path = self._paths[0 if self._is_well else number]
        file = self._files[path] if path in self._files else self._files.setdefault(path, h5py.File(path))
        if not self._is_well:
            return np.stack([file[name][start : start + KERNEL] for name in DETECTORS])
        where = number, slice(start, start + STEPS)
        scalars = [file[f"t0_fields/{name}"][where][..., None] for name in ("density", "pressure")]
        return np.concatenate([*scalars, file["t1_fields/velocity"][where]], -1)


def strain_files(path: Path) -> list[Path]:
    return sorted(path.parent.glob("*.h5"))


def well_reader(path: Path) -> Any:
    """Return The Well's reader, without the grid and the boundaries, which are the same in all windows."""
    from the_well.data import WellDataset

    steps = {"n_steps_input": INPUTS, "n_steps_output": STEPS - INPUTS}
    return WellDataset(path=str(path.parent), **steps, return_grid=False, boundary_return_type=None)


def strain_reader(path: Path) -> Any:
    """Return ml4gw's reader, which yields batches of kernels at random positions, the same for both detectors."""
    for name in ("torchaudio", "torchaudio.functional", "torchaudio.transforms"):
        sys.modules.setdefault(name, mock.MagicMock())  # only ml4gw's transforms use it, and it may need CUDA
    from ml4gw.dataloading.hdf5_dataset import Hdf5TimeSeriesDataset

    files = [str(file) for file in strain_files(path)]
    return Hdf5TimeSeriesDataset(files, DETECTORS, KERNEL, BATCHES["strain"], 1 << 20, coincident=True)


def kernels_in_order(reader: Any) -> Iterator[Any]:
    """Yield the batches of ml4gw's reader at the positions 0, 1, 2 ... of the first file."""
    for first in itertools.count(step=BATCHES["strain"]):
        positions = mock.patch("numpy.random.randint", lambda _high, size, first=first: np.arange(first, first + size))
        same = mock.patch.object(reader, "sample_fnames", lambda size: np.full(size, reader.fnames[0]))
        with positions, same:
            yield reader.sample_batch()


def peer_batches(kind: str, path: Path, workers: int, *, shuffle: bool) -> Iterator[Any]:
    """Yield batches of ``h5py``, ``well`` or ``ml4gw``, for any number of epochs."""
    import torch
    from torch.utils.data import DataLoader

    settings: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if kind == "ml4gw":
        reader = strain_reader(path)
        yield from DataLoader(reader, None, **settings) if shuffle else kernels_in_order(reader)
    dataset = well_reader(path) if kind == "well" else NaiveReader(path)
    order = torch.utils.data.RandomSampler(dataset, num_samples=100_000) if shuffle and kind == "h5py" else None
    loader = DataLoader(
        dataset, BATCHES[path.parent.name], shuffle=shuffle and order is None, sampler=order, **settings
    )  # a permutation of 8 million kernels would take seconds
    while True:
        for batch in loader:
            yield torch.cat([batch["input_fields"], batch["output_fields"]], 1) if kind == "well" else batch


def open_own(path: Path, *, shuffle: bool) -> Any:
    """Return kernels at random positions, or in order; or windows of fields as ``h5chunk info`` recommends."""
    import h5chunk

    if path.parent.name == "well":
        space: dict[str, Any] = {"h5chunk": h5chunk}
        exec(h5chunk.info(path).code[1], space)
        return space["data"]
    fields = dict(zip(DETECTORS, DETECTORS, strict=True))
    if shuffle:
        return h5chunk.Patches(strain_files(path), fields, (KERNEL,), per_volume=8192)
    return h5chunk.Patches(path, fields, (KERNEL,)).tiles(overlap=KERNEL - 1)


def own_batches(name: str, path: Path, *, shuffle: bool, device: str) -> Iterator[Any]:
    """Yield batches of h5chunk, with fields as channels as the peers give them."""
    import torch

    import h5chunk

    is_well, data = path.parent.name == "well", open_own(path, shuffle=shuffle)
    reuse = name == "h5chunk:reuse"
    loader = h5chunk.ChunkLoader(data, BATCHES[path.parent.name], shuffle=shuffle, device=device, reuse=reuse)
    kept = None
    while True:
        for first, *others in loader:
            parts = (
                [each[..., None] for each in others[:2]] + [first] if is_well else [first[:, None], others[0][:, None]]
            )
            out = kept if reuse and kept is not None and len(kept) == len(first) else None
            kept = torch.cat(parts, -1 if is_well else 1, out=out)
            yield kept[:, 0] if is_well else kept
