"""annbatch: chunks of rows from a shuffled, sharded zarr store (or from memory), shuffled again in windows.

``pip install "annbatch[zarrs,numba]"`` on Python 3.12 or newer. Its batches are scipy.sparse.csr_matrix unless told
otherwise; ``to="torch"`` wraps the same arrays.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import annbatch
import anndata
import numpy as np
import zarr

from peers.sparse import CSR, DENSE
from peers.sparse.densify import WAYS as DENSE_WAYS
from peers.sparse.densify import Densify
from peers.sparse.matrix import Source

WAYS = tuple(
    {"chunk": chunk, "window": window}
    for chunk, window in ((500, 16_000), (100, 16_000), (500, 32_000), (2000, 32_000), (500, 64_000), (2000, 200_000))
)
BASE = {"chunk": 500, "window": 32_000}


TRIED = {
    CSR: (
        *WAYS,
        *(BASE | {"stored": stored, "codec": "none"} for stored in (64, 512, 2048)),
        BASE | {"stored": 512},
        BASE | {"pipeline": "python"},
        BASE | {"threads": 1},
        *(way | {"how": "memory"} for way in (BASE, WAYS[-1], {"chunk": 1, "window": 32_000})),
    ),
    DENSE: tuple(way | dense for way in (BASE, WAYS[0], BASE | {"how": "memory"}) for dense in DENSE_WAYS),
}


class Contender:
    FILE_SETTINGS = ("stored", "codec")

    @staticmethod
    def make(source: Source, path: Path, stored: int = 64, codec: str = "lz4") -> None:
        """Written by its own shuffling writer; ``stored`` rows in a chunk of the file."""
        plain = path.with_name(f"{path.name}.h5ad")
        anndata.AnnData(source.matrix()).write_h5ad(plain)
        options: dict[str, Any] = {} if codec == "lz4" else {"zarr_compressor": ()}
        collection = annbatch.DatasetCollection(zarr.open_group(path, mode="w"))
        collection.add_adatas([plain], n_obs_per_chunk=stored, rng=np.random.default_rng(source.seed), **options)
        plain.unlink()

    def __init__(
        self,
        source: Source,
        path: Path,
        batch_size: int,
        form: str,
        *,
        chunk: int = 512,
        window: int = 16_384,
        stored: int = 64,
        codec: str = "lz4",
        pipeline: str = "zarrs",
        threads: int = 0,
        how: str = "disk",
        **dense: Any,
    ) -> None:
        del stored, codec
        warnings.simplefilter("ignore")
        if pipeline == "zarrs":
            zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        if threads:
            zarr.config.set({"threading.max_workers": threads})
        self.finish = Densify(**dense) if form == DENSE else None
        self.loader = annbatch.Loader(
            batch_size=batch_size,
            chunk_size=chunk,
            preload_nchunks=preload(chunk, window, batch_size),
            shuffle=True,
            rng=np.random.default_rng(source.seed),
        )
        if how == "memory":
            self.loader.add_adata(anndata.AnnData(source.matrix()))
        else:
            self.loader.use_collection(annbatch.DatasetCollection(zarr.open_group(path, mode="r")), load_adata=only_x)

    def epoch(self, number: int) -> Iterator[Any]:
        del number  # each iteration is the next epoch
        for batch in self.loader:
            rows = batch["X"]
            yield self.finish(rows) if self.finish else rows


def preload(chunk: int, window: int, batch_size: int) -> int:
    """Chunks of a window of at least so many rows, that it wants to be whole batches."""
    step = batch_size // math.gcd(chunk, batch_size)
    return -(-window // (chunk * step)) * step


def only_x(group: zarr.Group) -> anndata.AnnData:
    """The matrix without annotations, as its documentation recommends."""
    return anndata.AnnData(X=anndata.io.sparse_dataset(group["X"]))
