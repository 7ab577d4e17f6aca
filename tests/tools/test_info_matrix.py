"""Info describes sparse matrices, of h5chunk files and of others."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.matrices import random_matrix, write
from support.matrix_files import write_h5ad

import h5chunk
from h5chunk.tools.info.info import info
from h5chunk.tools.info.report import FileInfo


def look(path: Path) -> FileInfo:
    found = info(path)
    assert isinstance(found, FileInfo)
    assert json.loads(found.to_json())["path"] == str(path)
    return found


def test_a_matrix_of_anndata(tmp_path: Path) -> None:
    matrix = random_matrix(40, 30, 5).astype(np.float32)
    path = write_h5ad(tmp_path / "a.h5ad", matrix, layers={"more": matrix, "columns": matrix.tocsc()})
    found = look(path)
    assert [each.name for each in found.matrices] == ["X", "layers/columns", "layers/more"]
    x, columns, more = found.matrices
    assert (x.num_rows, x.num_columns, x.num_entries, x.dtype) == (40, 30, matrix.nnz, "float32")
    assert f"h5chunk.ChunkLoader({str(path)!r}, batch_size);" in x.verdict
    assert columns.num_rows is None and "'csc_matrix'): pack it with h5chunk convert" in columns.verdict
    assert f"sparse matrix 'X': 40 x 30, {matrix.nnz} entries, values float32" in str(found)
    verdicts = {each.name: each.verdict for each in found.datasets}
    assert "part of the matrix" in verdicts["X/indptr"] and "part of the matrix" in verdicts["layers/more/data"]
    for each in (x, more):  # what it advises works
        code = each.verdict.partition(":")[2].partition(";")[0].strip().replace("batch_size", "40, shuffle=False")
        ((rows,),) = eval(code, {"h5chunk": h5chunk})
        np.testing.assert_array_equal(rows.numpy(), matrix.toarray())


def test_what_only_looks_like_one(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("indptr", "indices", "data"):
            file[f"graph/{name}"] = np.arange(4)
            file[name] = np.arange(4)
        file["other/indptr"] = np.arange(4)
    (found,) = look(tmp_path / "a.h5").matrices
    assert found.name == "graph" and "it does not say so" in found.verdict


@pytest.mark.parametrize("pattern", [False, True])
def test_of_ours_as_ever(tmp_path: Path, pattern: bool) -> None:
    found = look(write(tmp_path / "a.h5", random_matrix(40, 30, 5), pattern=pattern))
    (matrix,) = found.matrices
    assert (matrix.kind, matrix.num_rows, matrix.pattern, matrix.verdict) == ("csr", 40, pattern, "")
