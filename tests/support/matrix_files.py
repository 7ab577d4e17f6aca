"""Sparse matrices in files as others make them, and what a source gives of one."""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.sparse
from support.open_source import open_source

from h5chunk.sources.matrix.block import SparseSource

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import anndata


def entries(source: SparseSource, max_bytes: int = 1 << 20) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Rows, columns and values of all blocks, after a look at what every source promises."""
    parts, before = [], 0
    for block, consumed in source.blocks(max_bytes):
        assert block.rows.ndim == block.columns.ndim == 1 and len(block) == len(block.rows) == len(block.columns)
        assert block.values is None or (len(block.values) == len(block) and block.values.dtype.isnative)
        assert all(part.dtype == np.int64 or (part.dtype.kind == "S" and source.has_ids) for part in ids_of(block))
        assert before <= consumed <= source.num_bytes
        before = consumed
        parts.append(block)
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    rows, columns = (np.concatenate([ids_of(block)[i] for block in parts]) for i in range(2))
    patterns = {block.values is None for block in parts}
    assert len(patterns) == 1
    return rows, columns, None if patterns == {True} else np.concatenate([block.values for block in parts])


def ids_of(block: Any) -> tuple[np.ndarray, np.ndarray]:
    return block.rows, block.columns


def dense(source: SparseSource, max_bytes: int = 1 << 20, shape: tuple[int, int] | None = None) -> np.ndarray:
    """The matrix that the blocks add up to."""
    rows, columns, values = entries(source, max_bytes)
    if shape is None:
        shape = tuple(source.shape)
    total = np.zeros(shape)
    np.add.at(total, (rows, columns), 1 if values is None else values)
    return total


def opened(path: Path, data: bytes, **options: Any) -> SparseSource:
    """A source of a file with these bytes."""
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return open_source(path, **options)


def write_h5ad(path: Path, matrix: Any, **options: Any) -> Path:
    """An .h5ad by anndata itself."""
    compression = options.pop("compression", None)
    raw = options.pop("raw", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = anndata.AnnData(matrix, **options)
        if raw is not None:
            data.raw = anndata.AnnData(raw)
        data.write_h5ad(path, compression=compression)
    return path


def write_10x(path: Path, cells_by_genes: scipy.sparse.csr_matrix, *, version: int = 3, genome: str = "hg19") -> Path:
    """A file as Cell Ranger writes it."""
    matrix = cells_by_genes
    num_cells, num_genes = matrix.shape
    with h5py.File(path, "a") as file:
        group = file.create_group("matrix" if version == 3 else genome)
        packed = {"compression": "gzip", "shuffle": True} if matrix.nnz else {}
        group.create_dataset("data", data=matrix.data.astype(np.int32), **packed)
        group.create_dataset("indices", data=matrix.indices.astype(np.int64), **packed)
        group.create_dataset("indptr", data=matrix.indptr.astype(np.int64))
        group.create_dataset("shape", data=np.array([num_genes, num_cells], np.int32))
        group.create_dataset("barcodes", data=np.array([f"CELL-{i}" for i in range(num_cells)], "S18"))
        genes = np.array([f"ENSG{i}" for i in range(num_genes)], "S15")
        if version == 3:
            group.create_dataset("features/id", data=genes)
            group.create_dataset("features/name", data=np.array([f"GENE{i}" for i in range(num_genes)], "S15"))
        else:
            group.create_dataset("genes", data=genes)
    return path
