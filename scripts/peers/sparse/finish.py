"""Make float32 batches for peers that return SciPy matrices with the stored dtype, as their users would."""

from __future__ import annotations

from typing import Any

import numpy as np

from peers import REUSED
from peers.sparse import CSR

DENSE_WAYS = ({}, {"memory": REUSED})


class Finish:
    """Convert a scipy.sparse.csr_matrix to float32, or make it dense, optionally in reused memory."""

    def __init__(self, form: str, memory: str = "fresh") -> None:
        self.form, self.reused = form, memory == REUSED
        self.held: np.ndarray | None = None

    def __call__(self, rows: Any) -> Any:
        rows.data = rows.data.astype(np.float32, copy=False)  # rows.astype would copy the columns as well
        if self.form == CSR:
            return rows
        if not self.reused:
            return rows.toarray()
        if self.held is None or len(self.held) < rows.shape[0]:
            self.held = np.empty(rows.shape, np.float32)
        return rows.toarray(out=self.held[: rows.shape[0]])
