"""Info describes sparse matrices, of h5chunk files and of others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.commands import run
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
    assert f'h5chunk.ChunkLoader("{path}", 256);' in x.verdict
    assert columns.num_rows is None and "not a CSR matrix (encoding-type 'csc_matrix')" in columns.verdict
    assert f"sparse matrix 'X': 40 x 30, {matrix.nnz} entries, values float32" in str(found)
    verdicts = {each.name: each.verdict for each in found.datasets}
    assert "part of the matrix" in verdicts["X/indptr"] and "part of the matrix" in verdicts["layers/more/data"]
    for each in (x, more):  # what it advises works
        code = each.verdict.partition(":")[2].partition(";")[0].strip().replace("256", "40, shuffle=False")
        ((rows,),) = eval(code, {"h5chunk": h5chunk})
        np.testing.assert_array_equal(rows.numpy(), matrix.toarray())
    for each in (x, columns, more):
        command = re.search(r"h5chunk (convert \S+) NEW.h5(.*) (?:makes|converts)", each.verdict)
        assert command is not None
        words, path = " ".join(command.groups()).split(), tmp_path / f"{each.name.replace('/', '-')}.h5"
        result = run(*words[:2], path, *words[2:], "--binarize", 0.001)
        assert result.exit_code == 0 and len(h5chunk.ChunkDataset(path)) == 40, result.stderr


def test_commands_are_recommended_for_files_on_which_they_work(tmp_path: Path) -> None:
    path = tmp_path / "plain.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("bad", data=np.arange(600.0).reshape(20, 30), chunks=(20, 3))
        file.create_dataset("good", data=np.zeros((20, 300)), chunks=(10, 300))
    text = str(look(path))
    assert text.count("plain h5py reads") == 1 and "a sample is cut into 10 chunks" in text
    (command,) = re.findall(r"h5chunk (repack \S+) NEW.h5 (--fields \w+) stores complete samples", text)
    words = " ".join(command).split()
    assert run(*words[:2], tmp_path / "new.h5", *words[2:]).exit_code == 0
    assert "bad" not in [each.verdict[:3] for each in look(tmp_path / "new.h5").datasets]
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": (2, 3)})
        for name, values in {"indptr": [0, 1, 2], "indices": [0, 2], "data": [1.0, 2.0]}.items():
            group[name] = values
    (matrix,) = look(path).matrices
    assert "h5chunk.ChunkLoader(" in matrix.verdict and "h5chunk convert" not in matrix.verdict


def test_the_machine_is_described() -> None:
    found = json.loads(run("info", "--json").stdout)
    assert found["num_cores"] >= 1 and found["available_bytes"] > 0
    assert {"native_threads", "device"} <= found.keys() and {"h5py", "hdf5", "torch"} <= found["versions"].keys()
    assert "cores " in run("info").stdout


def test_what_only_looks_like_one(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("indptr", "indices", "data"):
            file[f"graph/{name}"] = np.arange(4)
            file[name] = np.arange(4)
        file["other/indptr"] = np.arange(4)
    (found,) = look(tmp_path / "a.h5").matrices
    assert found.name == "graph" and "has no encoding-type" in found.verdict


@pytest.mark.parametrize("pattern", [False, True])
def test_of_ours_as_ever(tmp_path: Path, pattern: bool) -> None:
    found = look(write(tmp_path / "a.h5", random_matrix(40, 30, 5), pattern=pattern))
    (matrix,) = found.matrices
    assert (matrix.kind, matrix.num_rows, matrix.pattern, matrix.verdict) == ("csr", 40, pattern, "")
