"""Loaders of sparse matrices, each in a module of its own, behind one contract: `bench_sparse.py` times them alike.

A contender is a module with a class::

    TRIED = {"csr": ({"workers": 0}, ...), "dense": ...}  # what `bench_sparse.py --tune` times

    class Contender:
        FILE_SETTINGS = ("chunk",)                       # settings that change its file

        @staticmethod
        def make(source, path, **settings): ...          # its file, or folder, of the source's matrix
        def __init__(self, source, path, batch_size, form, **settings): ...
        def epoch(self, number): ...                     # yields batches, each row once

``form`` is "csr": batches are torch.sparse_csr tensors or SciPy matrices, whatever is less work, with float32 values
and columns of any type; or "dense": float32 tensors or arrays. No labels: a row is known by its checksum (`checks.py`).
What is yielded need stay valid only until the next is asked for if the settings say so (``REUSED``). What only moves
rows, without giving batches, has ``run(number)`` in place of ``epoch``, and returns how many.

Only modules that need torch import it: the environment of a peer may do without.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from peers import REUSED

CSR, DENSE = "csr", "dense"


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes
    ----------
    module, form, label : str
    distribution : str
        What pip calls it; its version is printed.
    settings : dict
        The best that ``--tune`` found.
    """

    module: str
    form: str
    label: str
    distribution: str
    settings: dict = field(default_factory=dict)

    def load(self) -> type:
        """The contender's class. Raises ImportError where its library is not installed."""
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
