"""Loaders of sparse matrices, each in its own module with the same interface, so that `bench_sparse.py` can time them.

A contender is a module with a class::

    TRIED = {"csr": ({"workers": 0}, ...), "dense": ...}  # what `bench_sparse.py --tune` times

    class Contender:
        FILE_SETTINGS = ("chunk",)                       # settings that change its file

        @staticmethod
        def make(source, path, **settings): ...          # writes its file or folder of the matrix
        def __init__(self, source, path, batch_size, form, **settings): ...
        def epoch(self, number): ...                     # yields batches, each row once

With the ``form`` "csr", batches are torch.sparse_csr tensors or SciPy matrices, whichever is less work, with float32
values and columns of any type; with "dense", float32 tensors or arrays. There are no labels: a row is identified by its
checksum (`checks.py`). With ``REUSED`` settings a batch may become invalid with the next one. A contender that
only moves rows, without making batches, has ``run(number)`` in place of ``epoch``, which returns the number of rows.

Only modules that need torch import it, because a peer's environment may lack it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from peers import REUSED

CSR, DENSE = "csr", "dense"


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Attributes
    ----------
    module, form, label : str
    distribution : str
        Its name for pip; its version is printed.
    settings : dict
        The best settings that ``--tune`` found.
    """

    module: str
    form: str
    label: str
    distribution: str
    settings: dict = field(default_factory=dict)

    def load(self) -> type:
        """Import the contender's class. Raises ImportError if its library is not installed."""
        return importlib.import_module(f"peers.sparse.{self.module}").Contender


ANNBATCH = {"stored": 512, "codec": "none", "chunk": 2000, "window": 16_000}
SCDATASET = {"block": 500, "fetch": 32}
CONTENDERS = {
    "ours-csr": Entry("ours", CSR, "ChunkLoader", "h5chunk"),
    "ours-csr-resident": Entry("ours", CSR, "ChunkLoader, resident=True", "h5chunk", {"resident": True}),
    "ours-csr-workers": Entry("ours_workers", CSR, "ChunkDataset in a DataLoader", "h5chunk", {"workers": 2}),
    "ours-dense": Entry("ours", DENSE, "ChunkLoader", "h5chunk"),
    "ours-dense-reuse": Entry("ours", DENSE, "ChunkLoader, reuse=True", "h5chunk", {"memory": REUSED}),
    "ours-dense-resident": Entry("ours", DENSE, "ChunkLoader, resident=True", "h5chunk", {"resident": True}),
    "annbatch-csr": Entry("annbatch", CSR, "annbatch", "annbatch", ANNBATCH),
    "annbatch-dense": Entry("annbatch", DENSE, "annbatch, toarray()", "annbatch", ANNBATCH),
    "annbatch-dense-reuse": Entry(
        "annbatch", DENSE, "annbatch, toarray(out=)", "annbatch", ANNBATCH | {"memory": REUSED}
    ),
    "scdataset-csr": Entry("scdataset", CSR, "scDataset", "scDataset", SCDATASET),
    "scdataset-dense": Entry("scdataset", DENSE, "scDataset, toarray()", "scDataset", SCDATASET),
    "scdataset-dense-reuse": Entry(
        "scdataset", DENSE, "scDataset, toarray(out=)", "scDataset", SCDATASET | {"memory": REUSED}
    ),
    "rows-csr": Entry("rows", CSR, "SciPy rows in a DataLoader", "scipy", {"workers": 2}),
    "rows-dense": Entry("rows", DENSE, "SciPy rows in a DataLoader", "scipy", {"workers": 2}),
}
