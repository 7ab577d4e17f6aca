"""scDataset: sorted blocks of rows are read from an .h5ad file (or AnnData in memory), and shuffled in windows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
from scdataset import BlockShuffling, scDataset
from torch.utils.data import DataLoader

from peers.sparse import CSR, DENSE
from peers.sparse.finish import DENSE_WAYS, Finish
from peers.sparse.matrix import Source

# Windows have at least 16,000 rows, as for annbatch. Fastest: long runs, selected by booleans, in this process. Workers
# lose time to their transport, and memory is no faster than the page cache.
BASE = {"block": 500, "fetch": 32}
WAYS = ((16, 64), (100, 64), (500, 32), (500, 64), (2000, 32), (2000, 64))
TRIED = {
    CSR: (
        *({"block": block, "fetch": fetch} for block, fetch in WAYS),
        BASE | {"how": "rows"},
        *(BASE | {"chunk": chunk} for chunk in (16_384, 262_144)),
        *(BASE | {"workers": workers} for workers in (1, 2)),
        BASE | {"how": "memory"},
        BASE | {"how": "memory", "workers": 2},
        {"block": 1, "fetch": 8, "how": "memory"},
    ),
    DENSE: (
        *(way | dense for way in (BASE, BASE | {"how": "memory"}) for dense in DENSE_WAYS),
        *(BASE | {"workers": workers} for workers in (1, 2)),
    ),
}


class Matrix:
    """The matrix of an AnnData file, opened once, because AnnData would open it for every window.

    With ``mask``, rows are selected by booleans, so that AnnData reads runs of rows at once; without it, row by row.
    """

    def __init__(self, annotated: anndata.AnnData, mask: bool) -> None:
        self.matrix, self.length, self.mask = annotated.X, annotated.n_obs, mask

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, rows: np.ndarray) -> Any:
        if self.mask:
            wanted = np.zeros(self.length, bool)
            wanted[rows] = True  # rows are sorted
            return self.matrix[wanted]
        return self.matrix[rows]


class Contender:
    FILE_SETTINGS = ("chunk",)

    @staticmethod
    def make(source: Source, path: Path, chunk: int = 0) -> None:
        """Write an .h5ad file with shuffled rows and ``chunk`` entries per HDF5 chunk (default: AnnData's)."""
        import scipy.sparse

        indptr, indices, values = source.shuffled()
        shape = (source.num_rows, source.num_columns)
        matrix = scipy.sparse.csr_matrix((values, indices.astype(np.int32), indptr), shape)
        options = {"chunks": (min(chunk, len(values)),)} if chunk else {}
        narrow = anndata.settings.override(write_csr_csc_indices_with_min_possible_dtype=True)
        with narrow, h5py.File(path, "w") as file:
            anndata.io.write_elem(file, "/", anndata.AnnData(shape=shape))
            anndata.io.write_elem(file, "X", matrix, dataset_kwargs=options)

    def __init__(
        self,
        source: Source,
        path: Path,
        batch_size: int,
        form: str,
        *,
        block: int = 16,
        fetch: int = 256,
        chunk: int = 0,
        workers: int = 0,
        how: str = "disk",
        memory: str = "fresh",
    ) -> None:
        del chunk
        warnings.simplefilter("ignore")
        annotated = anndata.read_h5ad(path, backed=None if how == "memory" else "r")
        dataset = scDataset(
            Matrix(annotated, mask=how == "disk"),
            BlockShuffling(block),
            batch_size,
            fetch,
            batch_transform=Finish(form, memory),
            seed=source.seed,
        )
        options = {"persistent_workers": True, "prefetch_factor": 2} if workers else {}
        self.loader = DataLoader(dataset, batch_size=None, num_workers=workers, **options)

    def epoch(self, number: int) -> Iterator[Any]:
        del number  # each iteration is the next epoch
        return iter(self.loader)
