"""The usual h5py loop: a Dataset of ``h5py.File(...)["images"][i]``, default collate, shuffle=True."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import h5py
import torch
from torch.utils.data import DataLoader, Dataset

from peers import Source
from peers.reading import Batch


class Plain(Dataset):
    def __init__(self, source: Source) -> None:
        self.source = source
        self.file: h5py.File | None = None

    def __len__(self) -> int:
        return self.source.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = h5py.File(self.source.path, "r")
            self.images, self.labels = self.file["images"], self.file["labels"]
        return torch.from_numpy(self.images[index]), int(self.labels[index])


class Contender:
    FILE_SETTINGS = ()
    # Fastest: two processes; a third gains nothing on two cores.
    TRIED = ({"workers": 0}, {"workers": 1}, {"workers": 2}, {"workers": 3})

    def __init__(self, source: Source, path: Path, batch_size: int, workers: int = 0) -> None:
        del path
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        self.loader = DataLoader(Plain(source), batch_size, shuffle=True, **options)

    def epoch(self, number: int) -> Iterator[Batch]:
        del number
        return iter(self.loader)
