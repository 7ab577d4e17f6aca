"""Random sparse matrices, files of them, and the check of an epoch over one."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import scipy.sparse
import torch
from support.csr_files import write_csr

from h5chunk import ChunkLoader
from h5chunk.transforms import Csr, Dense

LAYOUTS = {"dense": Dense, "csr": Csr}


def random_matrix(num_rows: int, num_columns: int, per_row: float, seed: int = 0) -> scipy.sparse.csr_matrix:
    """Codes 1 to 255; rows of very different length, some empty."""
    rng = np.random.default_rng(seed)
    counts = np.minimum(rng.geometric(1 / (1 + per_row), num_rows) - 1, num_columns)
    counts[:: max(2, num_rows // 3)] = 0
    columns = [np.sort(rng.choice(num_columns, count, replace=False)) for count in counts]
    indptr = np.concatenate(([0], np.cumsum(counts)))
    data = rng.integers(1, 256, indptr[-1]).astype(np.uint8)
    indices = np.concatenate(columns).astype(np.int64)
    return scipy.sparse.csr_matrix((data, indices, indptr), (num_rows, num_columns))


def write(path: Path, matrix: scipy.sparse.csr_matrix, *, pattern: bool = False, dtype: str = "", **options) -> Path:
    codes = None if pattern else matrix.data.astype(dtype or matrix.data.dtype)
    indptr, indices = matrix.indptr.astype(np.int64), matrix.indices.astype(np.uint64)
    write_csr(path, indptr, indices, codes, matrix.shape[1], overwrite=True, **options)
    return path


def write_anndata(path: Path, matrix: scipy.sparse.csr_matrix, **options) -> Path:
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": matrix.shape})
        for name in ("data", "indices", "indptr"):
            group.create_dataset(name, data=getattr(matrix, name), **(options if len(getattr(matrix, name)) else {}))
    return path


def dense(batch: torch.Tensor) -> torch.Tensor:
    return batch.to_dense() if batch.layout == torch.sparse_csr else batch


def check_epoch(loader: ChunkLoader, expected: np.ndarray, *, sparse: str, tolerance: float) -> None:
    """Each batch is the rows that the order says."""
    order = loader.order
    numbers = [batch.tolist() for batch in order.batches()]
    count = 0
    for (batch,), rows in zip(loader, numbers, strict=True):
        assert batch.shape == (len(rows), expected.shape[1])
        assert batch.layout == (torch.sparse_csr if sparse == "csr" else torch.strided)
        found = dense(batch).cpu().double().numpy()
        np.testing.assert_allclose(found, expected[rows], rtol=tolerance, atol=0)
        count += len(rows)
    assert count == len(expected)
