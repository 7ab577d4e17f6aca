"""annbatch: chunks of rows from a shuffled, sharded zarr store (or from memory), shuffled again in windows.

It needs ``pip install "annbatch[zarrs,numba]"`` on Python 3.12 or newer. Its batches are scipy.sparse.csr_matrix by
default; ``to="torch"`` wraps the same arrays.
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
from peers.sparse.finish import DENSE_WAYS, Finish
from peers.sparse.matrix import Source

# Windows have at least 16,000 rows, as by default. Fastest: an uncompressed store in chunks of 512 rows, runs of 2000
# rows, and zarrs. It is slower from memory, where windows are copied too. Threads make no difference.
BASE = {"stored": 512, "codec": "none", "chunk": 2000, "window": 16_000}
TRIED = {
    CSR: (
        BASE,
        *(BASE | {"chunk": chunk} for chunk in (100, 500)),
        *(BASE | {"window": window} for window in (32_000, 64_000)),
        *(BASE | {"stored": stored} for stored in (64, 2048)),
        *({"chunk": 2000, "window": 16_000, "stored": stored} for stored in (64, 512)),
        BASE | {"pipeline": "python"},
        BASE | {"threads": 1},
        *({"chunk": chunk, "window": 16_000, "how": "memory"} for chunk in (1, 500, 2000)),
    ),
    DENSE: tuple(
        way | dense for way in (BASE, BASE | {"window": 32_000}, BASE | {"threads": 1}) for dense in DENSE_WAYS
    ),
}


class Contender:
    FILE_SETTINGS = ("stored", "codec")

    @staticmethod
    def make(source: Source, path: Path, stored: int = 64, codec: str = "lz4") -> None:
        """Write the file with annbatch's own shuffling writer, with ``stored`` rows per chunk."""
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
        memory: str = "fresh",
    ) -> None:
        del stored, codec
        warnings.simplefilter("ignore")
        if pipeline == "zarrs":
            zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        if threads:
            zarr.config.set({"threading.max_workers": threads})
        self.finish = Finish(form, memory)
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
            yield self.finish(batch["X"])


def preload(chunk: int, window: int, batch_size: int) -> int:
    """Return the number of chunks in a window of at least ``window`` rows and, as required, of complete batches."""
    step = batch_size // math.gcd(chunk, batch_size)
    return -(-window // (chunk * step)) * step


def only_x(group: zarr.Group) -> anndata.AnnData:
    """Load the matrix without annotations, as annbatch's documentation recommends."""
    return anndata.AnnData(X=anndata.io.sparse_dataset(group["X"]))
