"""10x folders: cells become samples, named; no matrix says less than which axis became the samples."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.io
import scipy.sparse
from click.testing import CliRunner
from support.matrix_conversions import read_back
from support.matrix_files import dense, write_10x, write_h5ad
from support.open_source import open_source

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import OptionError, SourceError
from h5chunk.sources.matrix.block import Transposed
from h5chunk.sources.open import find_kind

pytest.importorskip("pyarrow")

CELLS, GENES = 5, 8
COUNTS = scipy.sparse.random(CELLS, GENES, 0.4, "csr", random_state=0, data_rvs=lambda n: np.arange(1, n + 1))
BARCODES = [f"AAAC{i}-1" for i in range(CELLS)]
FEATURES = [f"ENSG{i}" for i in range(GENES)]


def write(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def write_folder(folder: Path, *, version: int = 3, packed: bool | None = None, prefix: str = "") -> Path:
    """A folder as Cell Ranger writes it; the path of its matrix."""
    folder.mkdir(exist_ok=True)
    gz = ".gz" if (version == 3 if packed is None else packed) else ""
    matrix = COUNTS.T.tocoo()
    entries = zip(matrix.row + 1, matrix.col + 1, matrix.data.astype(int), strict=True)
    lines = ["%%MatrixMarket matrix coordinate integer general", "%", f"{GENES} {CELLS} {matrix.nnz}"]
    path = folder / f"{prefix}matrix.mtx{gz}"
    write(path, "\n".join([*lines, *(" ".join(map(str, entry)) for entry in entries)]) + "\n")
    write(folder / f"{prefix}barcodes.tsv{gz}", "".join(f"{name}\n" for name in BARCODES))
    more = "\tGene Expression" if version == 3 else ""
    table = f"{prefix}{'features' if version == 3 else 'genes'}.tsv{gz}"
    write(folder / table, "".join(f"{name}\tGENE{i}{more}\n" for i, name in enumerate(FEATURES)))
    return path


def check_cells(report: Any, path: Path) -> None:
    """Cells are the samples, by their values and names."""
    values, index = read_back(path)
    np.testing.assert_array_equal(values, COUNTS.toarray()[index])
    with h5py.File(path) as file:
        assert file["h5chunk/row_ids"][()].tolist() == [BARCODES[i].encode() for i in index]
        assert file["h5chunk/column_ids"][()].tolist() == [name.encode() for name in FEATURES]
    assert report.source_kind == "10x"
    assert f"samples: {CELLS} rows (barcodes); columns: {GENES} (features)" in str(report)


@pytest.mark.parametrize("prefix", ["", "GSM1_"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_cells_become_samples(tmp_path: Path, version: int, packed: bool, prefix: str) -> None:
    matrix = write_folder(tmp_path / "m", version=version, packed=packed, prefix=prefix)
    for source in (matrix, *([] if prefix else [matrix.parent])):
        assert find_kind(source).kind == "10x"
        check_cells(h5chunk.convert(source, tmp_path / "x.h5", overwrite=True), tmp_path / "x.h5")


def test_some_files_packed_and_some_not(tmp_path: Path) -> None:
    matrix = write_folder(tmp_path / "m")
    (tmp_path / "m" / "barcodes.tsv").write_bytes(gzip.decompress((tmp_path / "m" / "barcodes.tsv.gz").read_bytes()))
    (tmp_path / "m" / "barcodes.tsv.gz").unlink()
    check_cells(h5chunk.convert(matrix, tmp_path / "x.h5"), tmp_path / "x.h5")


def test_another_name_beside_the_tables(tmp_path: Path) -> None:
    """STARsolo's spliced.mtx and the like."""
    matrix = write_folder(tmp_path / "m", packed=False)
    check_cells(h5chunk.convert(matrix.rename(matrix.with_name("spliced.mtx")), tmp_path / "x.h5"), tmp_path / "x.h5")


def test_a_matrix_that_has_cells_as_rows_is_not_turned(tmp_path: Path) -> None:
    matrix = write_folder(tmp_path / "m", packed=False)
    with matrix.open("wb") as file:
        scipy.io.mmwrite(file, COUNTS, field="integer")
    check_cells(h5chunk.convert(matrix, tmp_path / "x.h5"), tmp_path / "x.h5")


def test_as_many_cells_as_genes(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write(folder / "matrix.mtx", "%%MatrixMarket matrix coordinate integer general\n2 2 1\n1 2 7\n")
    write(folder / "barcodes.tsv", "A\nB\n")
    write(folder / "features.tsv", "X\nY\n")
    h5chunk.convert(folder, tmp_path / "x.h5", shuffle=False)
    assert read_back(tmp_path / "x.h5")[0].tolist() == [[0, 0], [7, 0]], "gene X of cell B"


def test_transpose_makes_genes_the_samples(tmp_path: Path) -> None:
    report = h5chunk.convert(write_folder(tmp_path / "m").parent, tmp_path / "x.h5", transpose=True)
    values, index = read_back(tmp_path / "x.h5")
    np.testing.assert_array_equal(values, COUNTS.toarray().T[index])
    assert f"samples: {GENES} rows (features); columns: {CELLS} (barcodes)" in str(report)
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["h5chunk/row_ids"][()].tolist() == [FEATURES[i].encode() for i in index]
        assert json.loads(file["h5chunk"].attrs["options"])["transpose"] is True


def test_what_stays_unclear_is_refused_naming_both_ways(tmp_path: Path) -> None:
    both = r"so that it is unclear whether .*: .*--format mtx, .*rows.*--format mtx --transpose, .*columns"
    matrix = write_folder(tmp_path / "m", packed=False)
    for name, message in (("barcodes", "but no barcodes.tsv"), ("features", "but no features.tsv or genes.tsv")):
        table = matrix.with_name(f"{name}.tsv").rename(tmp_path / name)
        for source in (matrix, matrix.parent):
            with pytest.raises(SourceError, match=rf"is beside it, {message}, {both}"):
                h5chunk.convert(source, tmp_path / "x.h5")
        table.rename(matrix.with_name(f"{name}.tsv"))
    with matrix.with_name("barcodes.tsv").open("a") as file:
        file.write("MORE-1\n")
    with pytest.raises(SourceError, match=rf"is 8 x 5, but .*barcodes.tsv has 6 lines and .*features.tsv 8, {both}"):
        h5chunk.convert(matrix, tmp_path / "x.h5")
    report = h5chunk.convert(matrix, tmp_path / "x.h5", format="mtx")
    assert f"samples: {GENES} rows (rows of the source); columns: {CELLS} (columns of the source)" in str(report)
    report = h5chunk.convert(matrix, tmp_path / "y.h5", format="mtx", transpose=True)
    assert f"samples: {CELLS} rows (columns of the source); columns: {GENES} (rows of the source)" in str(report)
    with pytest.raises(OptionError, match="has only one matrix"):
        h5chunk.convert(matrix, tmp_path / "z.h5", layer="hg19")
    (tmp_path / "bare").mkdir()
    matrix.rename(tmp_path / "bare" / "matrix.mtx")
    with pytest.raises(SourceError, match="no tables of 10x are beside it, so that it is unclear"):
        h5chunk.convert(tmp_path / "bare", tmp_path / "z.h5")
    assert find_kind(tmp_path / "bare" / "matrix.mtx").kind == "mtx"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("A\nB\n\nD\nE\n", r"barcodes\.tsv, line 3: has a name of 0 bytes, but names must have 1 to 256"),
        ("A\n" * 4 + "E" * 257 + "\n", r"line 5: has a name of 257 bytes"),
        ("A\n" * 2000, r"has more lines than the 8 rows or columns of the matrix"),
        ("", "is empty"),
    ],
)
def test_broken_tables_are_named(tmp_path: Path, table: str, message: str) -> None:
    matrix = write_folder(tmp_path / "m", packed=False)
    matrix.with_name("barcodes.tsv").write_text(table)
    with pytest.raises(SourceError, match=message):
        open_source(matrix)


def test_the_plan_says_which_axis_becomes_samples(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m").parent
    run = CliRunner().invoke(main, ["convert", str(folder), str(tmp_path / "x.h5"), "--dry-run"])
    assert f"samples: {CELLS} rows (barcodes); columns: {GENES} (features)" in run.stdout
    run = CliRunner().invoke(
        main, ["convert", str(folder), str(tmp_path / "x.h5"), "--dry-run", "--transpose", "--json"]
    )
    assert json.loads(run.stdout)["axes"] == ["features", "barcodes"]


def test_every_kind_of_matrix_can_be_transposed(tmp_path: Path) -> None:
    write_10x(tmp_path / "m.h5", COUNTS)
    write_h5ad(tmp_path / "m.h5ad", COUNTS.astype(np.float32))
    scipy.sparse.save_npz(tmp_path / "m.npz", COUNTS)
    np.save(tmp_path / "m.npy", COUNTS.toarray())
    with (tmp_path / "m.mtx").open("wb") as file:
        scipy.io.mmwrite(file, COUNTS, field="integer")
    rows = [" ".join(f"{j + 1}:{v:g}" for j, v in enumerate(row) if v) for row in COUNTS.toarray()]
    (tmp_path / "m.svm").write_text("".join(f"1 {row}\n" for row in rows))
    for name in ("m.h5", "m.h5ad", "m.npz", "m.npy", "m.mtx", "m.svm"):
        kind = "npy" if name == "m.npy" else None
        source = Transposed(open_source(tmp_path / name, kind=kind))
        np.testing.assert_array_equal(dense(source, shape=(GENES, CELLS)), COUNTS.toarray().T)
        report = h5chunk.convert(tmp_path / name, tmp_path / "x.h5", format=kind, transpose=True, overwrite=True)
        values, index = read_back(tmp_path / "x.h5")
        np.testing.assert_array_equal(values, COUNTS.toarray().T[index])
        assert report.fields == {}
    (tmp_path / "r.csv").write_text("user,item,rating\n1,10,5\n2,10,3\n3,10,1\n")
    report = h5chunk.convert(tmp_path / "r.csv", tmp_path / "x.h5", transpose=True, overwrite=True)
    assert "samples: 1 row (item); columns: 3 (user)" in str(report)


def test_the_folder_above_that_of_the_only_genome(tmp_path: Path) -> None:
    folder = tmp_path / "filtered_gene_bc_matrices" / "hg19"
    folder.mkdir(parents=True)
    (folder / "matrix.mtx").write_text("%%MatrixMarket matrix coordinate integer general\n2 3 1\n1 1 3\n")
    (folder / "barcodes.tsv").write_text("A\nB\nC\n")
    (folder / "genes.tsv").write_text("g1\tG1\ng2\tG2\n")
    source = open_source(folder.parent)
    assert (source.kind, source.shape) == ("10x", (3, 2))
    (folder.parent / "mm10").mkdir()
    assert find_kind(folder.parent).kind == "images"


@pytest.mark.parametrize("version", [2, 3])
def test_symbols_of_genes(tmp_path: Path, version: int) -> None:
    write_folder(tmp_path / "a", version=version)
    h5chunk.convert(tmp_path / "a", tmp_path / "x.h5")
    dataset = h5chunk.ChunkDataset(tmp_path / "x.h5")
    assert dataset.column_ids.tolist() == FEATURES and dataset.column_symbols.tolist() == [f"GENE{i}" for i in range(8)]
