"""The usual SciPy loop: a Dataset whose items are ``matrix[i]`` of a SciPy matrix in memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from torch.utils.data import DataLoader, Dataset

from peers.sparse import CSR, DENSE
from peers.sparse.matrix import Source


class Rows(Dataset):
    def __init__(self, source: Source, form: str) -> None:
        self.matrix, self.form = source.matrix(np.float32), form

    def __len__(self) -> int:
        return self.matrix.shape[0]

    def __getitem__(self, index: int) -> Any:
        row = self.matrix[index]
        return row.toarray()[0] if self.form == DENSE else row


def stack(rows: Sequence[Any]) -> Any:
    """Stack rows into a CSR batch, because torch's default collate does not support SciPy matrices."""
    return scipy.sparse.vstack(rows, format="csr")


TRIED = dict.fromkeys((CSR, DENSE), ({"workers": 0}, {"workers": 1}, {"workers": 2}))


class Contender:
    FILE_SETTINGS = ()

    def __init__(self, source: Source, path: Path, batch_size: int, form: str, workers: int = 0) -> None:
        del path
        warnings.simplefilter("ignore")
        collate = None if form == DENSE else stack
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        self.loader = DataLoader(Rows(source, form), batch_size, shuffle=True, collate_fn=collate, **options)

    def epoch(self, number: int) -> Iterator[Any]:
        del number
        return iter(self.loader)
