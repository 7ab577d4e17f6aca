"""Several files of cells as one source: rows one after the other, and columns joined by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from click.testing import CliRunner
from support.matrix_files import write_10x, write_h5ad

from h5chunk import ChunkDataset, ChunkLoader, OptionError, OutputError, SourceError, convert
from h5chunk.cli import main

COUNTS = {
    name: scipy.sparse.random(20, 6, 0.5, "csr", dtype=np.float32, random_state=number)
    for number, name in enumerate("abc")
}
GENES = {"a": list("ABCDEF"), "b": list("FEDCBG"), "c": list("ABCDEF")}
TYPES = {"a": ["T", "B"], "b": ["NK", "T"], "c": ["B"]}


def cells(folder: Path, name: str, **change: Any) -> Path:
    codes = np.arange(20) % len(TYPES[name])
    obs = pd.DataFrame(
        {"type": pd.Categorical.from_codes(codes, TYPES[name]), "size": np.arange(20)},
        [f"{name}{i}" for i in range(20)],
    )
    if name == "a":
        obs["only here"], obs.loc["a3", "type"] = 1.5, None
    var = pd.DataFrame(index=change.get("genes", GENES[name]))
    return write_h5ad(folder / f"{name}.h5ad", COUNTS[name], obs=obs, var=var, layers={"half": COUNTS[name] / 2})


def expected(genes: list[str], factor: float = 1) -> pd.DataFrame:
    frames = [
        pd.DataFrame(COUNTS[name].toarray() * factor, [f"{name}{i}" for i in range(20)], GENES[name]) for name in "abc"
    ]
    return pd.concat(frames).reindex(columns=genes).fillna(0)


@pytest.mark.parametrize("form", ["list", "folder", "pattern"])
@pytest.mark.parametrize(("join", "genes"), [("inner", list("BCDEF")), ("outer", list("ABCDEFG"))])
def test_columns_are_joined_by_name(tmp_path: Path, join: str, genes: list[str], form: str) -> None:
    paths = [cells(tmp_path, name) for name in "abc"]
    source = {"list": paths, "folder": tmp_path, "pattern": tmp_path / "?.h5ad"}[form]
    layer = {"layer": "half"} if form == "list" else {}
    report = convert(source, tmp_path / "x.h5", join=join, **layer)
    assert report.num_rows == 60 and any("only here: is in only 1 of 3 files" in line for line in report.ignored)
    dataset = ChunkDataset(tmp_path / "x.h5", fields=["X", "type", "file", "size"])
    assert dataset.var_names.tolist() == genes
    table = expected(genes, 0.5 if layer else 1).loc[dataset.obs_names]
    [(rows, types, files, sizes)] = ChunkLoader(dataset, 60, shuffle=False)
    np.testing.assert_array_equal(rows, table.to_numpy(np.float32))
    for name, code, file, size in zip(dataset.obs_names, types, files, sizes, strict=True):
        number = int(name[1:])
        word = "" if name == "a3" else TYPES[name[0]][number % len(TYPES[name[0]])]
        assert (word == "") == (code == -1) and (code == -1 or dataset.categories("type")[code] == word)
        assert dataset.categories("file")[file] == f"{name[0]}.h5ad" and size == number


def test_columns_that_differ_are_named(tmp_path: Path) -> None:
    paths = [cells(tmp_path, name) for name in "abc"]
    with pytest.raises(
        OptionError, match=r"b.h5ad: its columns differ from those of .*a.h5ad.{1,2} ?1 only in .*b.h5ad, such"
    ):
        convert(paths, tmp_path / "x.h5")
    assert convert(paths[::2], tmp_path / "x.h5").num_columns == 6, "the same columns need no join"
    cells(tmp_path, "b", genes=list("UVWXYZ"))
    with pytest.raises(SourceError, match="shares no column"):
        convert(paths, tmp_path / "y.h5", join="inner")
    cells(tmp_path, "b", genes=list("AACDEF"))
    with pytest.raises(SourceError, match=r"b.h5ad: has two columns 'A': make their names unique"):
        convert(paths, tmp_path / "y.h5", join="outer")
    scipy.sparse.save_npz(tmp_path / "n.npz", COUNTS["a"][:, :3])
    with pytest.raises(SourceError, match=r"cannot be joined with .*: not all files name their columns, so"):
        convert([paths[0], tmp_path / "n.npz"], tmp_path / "y.h5", join="outer")
    (tmp_path / "r.h5").write_bytes(b"")
    with pytest.raises(SourceError, match=r"only sparse matrices are joined|not recognised"):
        convert([paths[0], tmp_path / "r.h5"], tmp_path / "y.h5")


def test_an_output_that_is_one_of_the_sources_stays(tmp_path: Path) -> None:
    paths = [cells(tmp_path, name) for name in "ac"]
    before = paths[1].read_bytes()
    with pytest.raises(OutputError, match=r"c\.h5ad is also the source"):
        convert(paths, paths[1], overwrite=True)
    assert paths[1].read_bytes() == before


def test_files_of_10x_on_the_command_line(tmp_path: Path) -> None:
    for name in "ab":
        write_10x(tmp_path / f"{name}.h5", COUNTS[name] * 1000)
    run = CliRunner().invoke(main, ["convert", str(tmp_path / "[ab].h5"), str(tmp_path / "x.hdf5")])
    assert run.exit_code == 0 and "40 rows (barcodes)" in run.stdout, run.output


def entries(folder: Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return str(folder / name)


def test_ratings_of_several_files_are_one_matrix(tmp_path: Path) -> None:
    """By a list, a tuple, a pattern, or a folder as Spark writes it, whether or not the format is named."""
    folder, names = tmp_path / "parts", ("part-00000.csv", "part-00001.csv")
    paths = [entries(folder, name, f"user,item,rating\n1,2,3\n{n},{n},4\n") for n, name in enumerate(names, 7)]
    (folder / "_SUCCESS").touch()
    sources = [paths, tuple(map(Path, paths)), folder / "*.csv", folder]
    for number, source in enumerate(sources * 2):
        out = tmp_path / f"{number}.h5"
        report = convert(source, out, join="outer", **({"format": "csv"} if number >= len(sources) else {}))
        assert (report.num_rows, report.num_columns, report.num_entries) == (3, 3, 3), report
        [(rows,)] = ChunkLoader(ChunkDataset(out, fields=["X"]), 3, shuffle=False)
        assert ChunkDataset(out).row_ids[rows.sum(1).argmax()] == 1 and rows.max() == 6  # 3 + 3, from two files
    assert convert(folder, tmp_path / "s", shards=2, client="local:1").num_entries == 3


def test_files_that_are_read_differently_are_refused(tmp_path: Path) -> None:
    texts = {
        "a.csv": "user,item,c\n1,2,3\n",
        "b.csv": "user,item,c\nx,2,3\n",
        "a.svm": "1 1:2 3:4\n",
        "b.svm": "1 0:2 3:4\n",
    }
    paths = [entries(tmp_path, name, text) for name, text in texts.items()]
    with pytest.raises(
        SourceError, match=r"row strings, column int64s, but those of .*: name the columns; a name that"
    ):
        convert(paths[:2], tmp_path / "x.h5")
    assert convert(paths[:2], tmp_path / "x.h5", columns=("user:str", "item", "c")).num_rows == 2
    with pytest.raises(SourceError, match=r"indices from 0, but those of .* from 1: say which is right"):
        convert(paths[2:], tmp_path / "y.h5")
    assert convert(paths[2:], tmp_path / "y.h5", first_index="0").num_columns == 4
    with pytest.raises(SourceError, match=r"a.svm: has numbered rows and columns, other than the files with which"):
        convert([paths[0], paths[2]], tmp_path / "z.h5")


def test_folders_of_10x_and_matrices_with_a_prefix(tmp_path: Path) -> None:
    for sample in ("one", "two"):
        for folder, prefix in ((tmp_path / "tenx" / sample, ""), (tmp_path / "geo", f"{sample}_")):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{prefix}barcodes.tsv").write_text("c1\nc2\n")
            (folder / f"{prefix}features.tsv").write_text("g1\ng2\ng3\n")
            scipy.io.mmwrite(folder / f"{prefix}matrix.mtx", scipy.sparse.csr_matrix([[1, 0], [0, 2], [3, 0]]))
    for name, files in (("tenx", ["one", "two"]), ("geo", ["one_matrix.mtx", "two_matrix.mtx"])):
        report = convert(tmp_path / name, tmp_path / f"{name}.h5")
        dataset = ChunkDataset(tmp_path / f"{name}.h5")
        assert (report.num_rows, report.num_entries, [*dataset.categories("file")]) == (4, 6, files)
        assert sorted(dataset.row_ids) == ["c1", "c1", "c2", "c2"] and list(dataset.column_ids) == ["g1", "g2", "g3"]


@pytest.mark.parametrize(
    "form", ["list", "paths", "tuple", "pairs", "dicts", "arrays", "strings", "bytes", "generator"]
)
@pytest.mark.parametrize("name", ["a.png", "missing.png", "notes.txt"])
def test_names_of_files_are_never_stored_in_place_of_their_contents(tmp_path: Path, name: str, form: str) -> None:
    paths = [str(tmp_path / name), str(tmp_path / name)]
    for existing in ("a.png", "notes.txt"):
        (tmp_path / existing).write_bytes(b"text")
    source: Any = {
        "list": paths,
        "paths": [*map(Path, paths)],
        "tuple": tuple(paths),
        "pairs": [(path, 1) for path in paths],
        "dicts": [{"image": path} for path in paths],
        "arrays": {"image": np.array(paths), "label": np.arange(2)},
        "strings": np.array(paths),
        "bytes": [path.encode() for path in paths],
        "generator": (path for path in paths),
    }[form]
    with pytest.raises(
        SourceError, match=r"names of files, such as|can be listed: |or a list of the samples that it yields"
    ):
        convert(source, tmp_path / "x.h5")
    assert not (tmp_path / "x.h5").exists()
