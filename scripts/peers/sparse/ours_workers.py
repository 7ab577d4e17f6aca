"""h5chunk's ChunkDataset and ChunkSampler in torch's DataLoader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import h5chunk
from peers.sparse import CSR, DENSE
from peers.sparse.matrix import Source
from peers.sparse.ours import LAYOUTS, write

TRIED = dict.fromkeys((CSR, DENSE), ({"workers": 0}, {"workers": 1}, {"workers": 2}))


class Contender:
    FILE_SETTINGS = ()
    make = staticmethod(write)

    def __init__(self, source: Source, path: Path, batch_size: int, form: str, workers: int = 0) -> None:
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        dataset = h5chunk.ChunkDataset(path, transforms=LAYOUTS[form])
        self.sampler = h5chunk.ChunkSampler(dataset, batch_size, seed=source.seed)
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        self.loader = DataLoader(dataset, batch_sampler=self.sampler, **options)

    def epoch(self, number: int) -> Iterator[torch.Tensor]:
        self.sampler.set_epoch(number)
        for (batch,) in self.loader:
            yield batch
