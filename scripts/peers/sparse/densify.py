"""Dense float32 batches of peers that give SciPy matrices, as a user of theirs would make them; the fastest counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from peers import REUSED

WAYS = ({}, {"memory": REUSED}, {"by": "torch"})


class Densify:
    """Makes a scipy.sparse.csr_matrix dense: with toarray, into memory used again if asked for, or with torch."""

    def __init__(self, by: str = "scipy", memory: str = "fresh") -> None:
        self.by, self.reused = by, memory == REUSED
        self.held: np.ndarray | None = None

    def __call__(self, rows: Any) -> Any:
        rows = rows.astype(np.float32, copy=False)
        if self.by == "torch":
            import torch

            parts = [torch.from_numpy(each) for each in (rows.indptr, rows.indices, rows.data)]
            return torch.sparse_csr_tensor(*parts, rows.shape, check_invariants=False).to_dense()
        if not self.reused:
            return rows.toarray()
        if self.held is None or len(self.held) < rows.shape[0]:
            self.held = np.empty(rows.shape, np.float32)
        return rows.toarray(out=self.held[: rows.shape[0]])
