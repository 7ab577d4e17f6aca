"""This library's ChunkLoader on a file as `h5chunk convert` writes it: rows shuffled once, uint8 values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import h5chunk
from h5chunk.store.write.csr import write_csr
from h5chunk.transforms import Csr, Dense
from peers import REUSED
from peers.sparse import CSR, DENSE
from peers.sparse.matrix import Source


def write(source: Source, path: Path) -> None:
    indptr, indices, values = source.shuffled()
    write_csr(path, indptr, indices, values, source.num_columns, seed=source.seed, shuffled=True)


TRIED = dict.fromkeys((CSR, DENSE), ({}, {"num_threads": 1}, {"memory": REUSED}, {"resident": True}))

LAYOUTS = {CSR: Csr(), DENSE: Dense()}


class Contender:
    FILE_SETTINGS = ()
    make = staticmethod(write)

    def __init__(
        self,
        source: Source,
        path: Path,
        batch_size: int,
        form: str,
        memory: str = "fresh",
        resident: bool = False,
        **options: Any,
    ) -> None:
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        options |= {"transforms": [LAYOUTS[form]], "resident": resident, "reuse": memory == REUSED}
        self.loader = h5chunk.ChunkLoader(path, batch_size, seed=source.seed, **options)

    def epoch(self, number: int) -> Iterator[torch.Tensor]:
        del number  # each iteration is the next epoch
        for (batch,) in self.loader:
            yield batch
