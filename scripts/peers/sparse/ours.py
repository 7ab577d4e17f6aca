"""h5chunk's ChunkLoader on a file of `h5chunk convert`: rows shuffled once, uint8 values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import h5chunk
from h5chunk.plan.csr import plan_csr
from h5chunk.store.write.csr import CsrWriter, csr_spec
from h5chunk.store.write.new_file import NewFile
from h5chunk.transforms import Csr, Dense
from peers import REUSED
from peers.sparse import CSR, DENSE
from peers.sparse.matrix import Source


def write(source: Source, path: Path) -> None:
    indptr, indices, values = source.shuffled()
    layout = plan_csr(len(indptr) - 1, source.num_columns, len(indices))
    header = {"seed": source.seed, "shuffled": True, "options": {}}
    with NewFile(path) as new:
        new.allocate(csr_spec(layout, scale=1.0, attributes=header, fields={}, tables={}))
        writer = CsrWriter(new, layout)
        writer.append(indices.astype(layout.index_dtype, copy=False), values)
        writer.finish(np.diff(indptr))
        new.commit()


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
