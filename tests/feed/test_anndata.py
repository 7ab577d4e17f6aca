"""AnnData's and 10x files as they are: matrices, labels with their names, and files of other genes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from support.matrix_files import write_10x, write_h5ad

from h5chunk import ChunkDataset, ChunkLoader, FieldError, FileError, convert
from h5chunk.transforms import Log1p

COUNTS = scipy.sparse.random(60, 12, 0.4, "csr", dtype=np.float32, random_state=np.random.default_rng(0))
COUNTS.data = np.arange(1, COUNTS.nnz + 1, dtype=np.float32)
TYPES = np.array(["B", "NK", "T"])
CODES = np.arange(60) % 3
GENES = [f"gene{i}" for i in range(12)]


def cells(path: Path, genes: list[str] = GENES, types: Any = TYPES, **more: Any) -> Path:
    frame = pd.DataFrame({"type": pd.Categorical.from_codes(CODES, types)}, [f"cell{i}" for i in range(60)])
    frame.loc["cell5", "type"] = None
    matrix = COUNTS[:, : len(genes)]
    layers = {"counts": matrix * 2}
    return write_h5ad(path, matrix, obs=frame, var=pd.DataFrame(index=genes), layers=layers, raw=matrix * 3, **more)


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize(("matrix", "factor"), [("X", 1), ("layers/counts", 2), ("raw/X", 3)])
def test_a_matrix_with_its_labels(tmp_path: Path, matrix: str, factor: int, compression: str | None) -> None:
    path = cells(tmp_path / "a.h5ad", compression=compression)
    dataset = ChunkDataset(path, fields=[matrix, "obs/type", "sample_number"])
    assert dataset.classes == ("B", "NK", "T") == tuple(dataset.categories("obs/type"))
    assert dataset.obs_names[:2].tolist() == dataset.row_ids[:2].tolist() == ["cell0", "cell1"]
    names = [str(i) for i in range(12)] if matrix == "raw/X" else GENES  # as the writer of these tests names them
    assert dataset.var_names.tolist() == dataset.column_ids.tolist() == names
    for rows, labels, numbers in ChunkLoader(dataset, 16):
        np.testing.assert_array_equal(rows, COUNTS.toarray()[numbers] * factor)
        assert labels.tolist() == np.where(numbers == 5, -1, CODES[numbers]).tolist()
    assert sorted(map(len, dataset.split((0.5, 0.5), stratify="obs/type"))) == [30, 30]


def test_modalities_and_their_columns_in_several_files(tmp_path: Path) -> None:
    paths, fields = [tmp_path / "a.h5mu", tmp_path / "b.h5mu"], ["mod/rna/X", "mod/atac/layers/counts"]
    for path in paths:
        with h5py.File(path, "w") as file, h5py.File(cells(tmp_path / "cells.h5ad")) as single:
            for name in ("rna", "atac"):
                for part in ("X", "layers", "obs", "var"):
                    single.copy(part, file.require_group(f"mod/{name}"), part)
    dataset = ChunkDataset(paths, fields=fields)
    assert dataset.column_ids.tolist() == GENES and dataset.row_ids[60:62].tolist() == ["cell0", "cell1"]
    for rna, counts in ChunkLoader(dataset, 16):
        np.testing.assert_array_equal(2 * rna, counts)
    with h5py.File(paths[1], "a") as file:
        names = file["mod/atac/var"][file["mod/atac/var"].attrs["_index"]]
        names[3] = "another"
    with pytest.raises(FieldError, match="its columns differ"):
        ChunkDataset(paths, fields=fields)
    assert len(ChunkDataset(paths, fields=fields[:1])) == 120


def test_categories_of_older_files(tmp_path: Path) -> None:
    path = cells(tmp_path / "a.h5ad")
    with h5py.File(path, "a") as file:
        file.create_group("obs/__categories")
        file.move("obs/type/categories", "obs/__categories/type")
        file.move("obs/type/codes", "codes")
        del file["obs/type"]
        file.move("codes", "obs/type")
    assert ChunkDataset(path, fields=["X", "obs/type"]).classes == ("B", "NK", "T")


def test_a_file_of_10x(tmp_path: Path) -> None:
    dataset = ChunkDataset(write_10x(tmp_path / "a.h5", COUNTS))
    assert dataset.fields == ("X",) and dataset.classes == ()
    assert dataset.obs_names[:2].tolist() == ["CELL-0", "CELL-1"] and dataset.var_names[-1] == "ENSG11"
    assert dataset.column_symbols[-1] == "GENE11"
    convert(tmp_path / "a.h5", tmp_path / "b.h5", min_column_count=int((COUNTS > 0).sum(0).min()) + 1)
    converted = ChunkDataset(tmp_path / "b.h5")
    assert 0 < len(converted.column_ids) < 12, "some genes are left out"
    assert [f"ENSG{name[4:]}" for name in converted.column_symbols] == converted.column_ids.tolist()
    with ChunkLoader(dataset, 60, shuffle=False, transforms=[Log1p(1e4)]) as loader:
        [(rows,)] = loader
    np.testing.assert_allclose(rows.expm1().sum(1), 1e4 * (COUNTS.sum(1) > 0).A1, rtol=1e-5)
    with ChunkLoader(tmp_path / "a.h5", 60, shuffle=False) as loader:
        [(rows,)] = loader
    np.testing.assert_array_equal(rows, COUNTS.toarray())


def test_a_file_of_10x_with_two_genomes(tmp_path: Path) -> None:
    for genome in ("hg19", "mm10"):
        write_10x(tmp_path / "a.h5", COUNTS, version=2, genome=genome)
    with pytest.raises(
        FieldError, match=r"a matrix for each of hg19, mm10: choose one, such as fields=\{'X': 'hg19'\}"
    ):
        ChunkDataset(tmp_path / "a.h5")
    assert ChunkDataset(tmp_path / "a.h5", fields={"X": "mm10"}).var_names[0] == "ENSG0"


@pytest.mark.parametrize("value", [np.array([12]), np.array([12.0, 60.0]), np.array([-12, 60]), None])
def test_a_damaged_shape_of_10x(tmp_path: Path, value: Any) -> None:
    path = write_10x(tmp_path / "a.h5", COUNTS)
    with h5py.File(path, "a") as file:
        del file["matrix/shape"]
        if value is None:
            file["matrix/shape"] = h5py.ExternalLink("other.h5", "shape")
        else:
            file["matrix/shape"] = value
    with pytest.raises(
        FileError, match="its shape is not stored as two integers" if value is not None else "which is not foll"
    ):
        ChunkDataset(path)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "genes": (
        {"genes": ["geneA", *GENES[1:]]},
        r"b.h5: its columns differ from those of .*a.h5 .1 only in .*b.h5, such as 'geneA'; 1 only in .*a.h5, such as "
        r"'gene0'.*: .* --join outer",
    ),
    "fewer genes": ({"genes": GENES[:7]}, r"its columns differ .*.5 only in .*a.h5, such as 'gene10', 'gene11'"),
    "order of genes": ({"genes": [*GENES[:10], "gene11", "gene10"]}, "they differ from position 10 on"),
    "types": (
        {"types": ["B", "NK", "M"]},
        r"its categories of '.*type' differ .*such as 'M'.*convert their sources together",
    ),
}


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("what", OTHERS)
def test_files_whose_columns_or_codes_mean_something_else(tmp_path: Path, what: str, converted: bool) -> None:
    change, message = OTHERS[what]
    paths = [cells(tmp_path / "a.h5"), cells(tmp_path / "b.h5", **change), cells(tmp_path / "c.h5")]
    fields = ["X", "obs/type"]
    if converted:
        for name in "abc":
            (tmp_path / "converted").mkdir(exist_ok=True)
            convert(tmp_path / f"{name}.h5", tmp_path / "converted" / f"{name}.h5")
        paths, fields = [path.parent / "converted" / path.name for path in paths], ["X", "type"]
    with pytest.raises(FieldError, match=message):
        ChunkDataset(paths, fields=fields)
    together = ChunkDataset(paths[::2], fields=fields)
    assert len(together) == 120 and together.classes == ("B", "NK", "T") and len(together.obs_names) == 120


def test_names_that_hdf5_cannot_read_are_an_error(tmp_path: Path) -> None:
    path = cells(tmp_path / "a.h5ad")
    with h5py.File(path, "a") as file:
        del file["obs/_index"]
        file["obs/_index"] = ["x" * 300] * 60
    with pytest.raises(FieldError, match="has strings of 300 bytes, but the limit is 256"):
        ChunkDataset(path).obs_names  # noqa: B018


def test_columns_with_missing_values(tmp_path: Path) -> None:
    frame = pd.DataFrame({"age": pd.array(range(60), "Int64"), "dose": pd.array([None, 1] * 30, "Int64")})
    frame["type"] = pd.Categorical.from_codes(np.where(CODES, CODES, -1), TYPES)
    path = write_h5ad(tmp_path / "a.h5ad", COUNTS, obs=frame.set_index(frame.index.astype(str)))
    assert ChunkDataset(path, fields=["X", "obs/age"]).values("obs/age").tolist() == [*range(60)]
    with pytest.raises(FieldError, match="'obs/dose' has no value in 30 rows"):
        ChunkDataset(path, fields=["X", "obs/dose"])
    report = convert(path, tmp_path / "x.h5")
    assert [*report.fields] == ["age", "type"] and "ignored dose: has missing values" in str(report)
    assert "note: 'type' has no category in 20 rows: their code is -1" in str(report)
