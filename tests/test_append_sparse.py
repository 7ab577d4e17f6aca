"""Rows behind those of a sparse matrix: each as in its source, columns by number, id or name, and every way to fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from sparse_files import anndata, write_h5ad
from test_sparse_format import check_csr_file
from test_verify import flip, places

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import FileError, OptionError, OutputError, SourceError
from h5chunk.tools.append.append import append, plan_append

sp = pytest.importorskip("scipy.sparse")


def ratings(num_rows: int, num_columns: int = 40, seed: int = 0, density: float = 0.2) -> np.ndarray:
    """Dense: 0.5 to 5 by 0.5, none in most places; no row or column is empty."""
    rng = np.random.default_rng(seed)
    dense = (rng.random((num_rows, num_columns)) < density) * rng.integers(1, 11, (num_rows, num_columns)) / 2
    dense[np.arange(num_rows), np.arange(num_rows) % num_columns] = 0.5
    return dense


def save_npz(path: Path, dense: np.ndarray) -> Path:
    sp.save_npz(path, sp.csr_matrix(dense))
    return path


def save_csv(path: Path, dense: np.ndarray, first_row: int, columns: list[Any]) -> Path:
    rows, numbers = np.nonzero(dense)
    lines = [f"{first_row + row},{columns[c]},{dense[row, c]}" for row, c in zip(rows, numbers, strict=True)]
    path.write_text("\n".join(["userId,movieId,rating", *lines]) + "\n")
    return path


def read(path: Path) -> np.ndarray:
    """Values, in the order of ``source_index``; checks all that can be checked of the file."""
    codes = check_csr_file(path)
    assert h5chunk.verify(path).ok
    with h5py.File(path) as file:
        index = file["h5chunk/source_index"][()]
        assert len(set(index.tolist())) == len(index) == int(file["h5chunk"].attrs["num_samples"])
        return (codes.toarray() / file["X"].attrs["scale"])[np.argsort(index)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5chunk.plan.sparse.INDEX_CHUNK_BYTES", 256)


# ---- what is in the file


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("num_old", "num_new"), [(300, 200), (10, 300), (64, 1), (1, 1)])
@pytest.mark.parametrize("pattern", [False, True])
def test_rows_are_those_of_the_sources(tmp_path: Path, num_old: int, num_new: int, pattern: bool) -> None:
    dense = ratings(num_old + num_new)
    dense = np.minimum(dense * 2, 1) if pattern else dense
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:num_old]), tmp_path / "x.h5", scale=None if pattern else 2.0)
    with h5py.File(tmp_path / "x.h5") as file:
        before = [file[f"X/{name}"][()] for name in ("indptr", "indices", "data")]
    report = append(tmp_path / "x.h5", save_npz(tmp_path / "b.npz", dense[num_old:]), seed=3)
    np.testing.assert_array_equal(read(tmp_path / "x.h5"), dense)
    with h5py.File(tmp_path / "x.h5") as file:
        for name, values in zip(("indptr", "indices", "data"), before, strict=True):
            np.testing.assert_array_equal(file[f"X/{name}"][: len(values)], values)
        header = dict(file["h5chunk"].attrs)
        assert file["X"].attrs["pattern"] == pattern and header["shuffled"] == 0
        index = file["h5chunk/source_index"][()]
    assert sorted(index[:num_old]) == list(range(num_old)) and (num_new < 9 or (np.diff(index[num_old:]) < 0).any())
    records = json.loads(header["options"])["appended"]
    assert records == [{"samples": num_new, "first_index": num_old, "seed": 3, "shuffle": True, "drop_columns": False}]
    assert (report.num_added, report.num_samples, report.kind) == (num_new, num_old + num_new, "csr")
    assert report.counts["entries read"] == np.count_nonzero(dense[num_old:])


@pytest.mark.usefixtures("small_chunks")
def test_again_and_again_and_in_little_memory(tmp_path: Path) -> None:
    dense, path = ratings(900, 150), tmp_path / "x.h5"
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:300]), path)
    kept, found = path.read_bytes(), []
    for memory_bytes in (1 << 30, 1 << 20):
        path.write_bytes(kept)
        for first in (300, 500, 700):
            source = save_npz(tmp_path / "b.npz", dense[first : first + 200])
            append(path, source, memory_bytes=memory_bytes, shuffle=first != 500)
        found.append(path.read_bytes())
    assert found[0] == found[1]
    np.testing.assert_array_equal(read(path), dense)


def test_without_entries(tmp_path: Path) -> None:
    for old, new in ((0, 5), (5, 0)):
        dense = np.concatenate([ratings(20, density=old / 9) * bool(old), ratings(20, density=new / 9) * bool(new)])
        h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:20]), tmp_path / "x.h5", scale=2.0, overwrite=True)
        append(tmp_path / "x.h5", save_npz(tmp_path / "b.npz", dense[20:]))
        np.testing.assert_array_equal(read(tmp_path / "x.h5"), dense)


def test_training_on_it(tmp_path: Path) -> None:
    dense = ratings(300)
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:100]), tmp_path / "x.h5")
    append(tmp_path / "x.h5", save_npz(tmp_path / "b.npz", dense[100:]))
    with h5chunk.ChunkLoader(tmp_path / "x.h5", 32) as loader:
        rows = np.concatenate([batch.numpy().copy() for (batch,) in loader])
    np.testing.assert_array_equal(np.sort(rows @ np.arange(40)), np.sort(dense @ np.arange(40)))


@pytest.mark.parametrize(("num_old", "num_new", "size"), [(60, 40, 8), (64, 3, 8), (61, 1, 8), (3, 50, None)])
@pytest.mark.parametrize("filter", ["gzip", "none"])
@pytest.mark.parametrize("ids", [False, True])
def test_dense_rows(tmp_path: Path, num_old: int, num_new: int, size: int | None, filter: str, ids: bool) -> None:
    dense, path = ratings(num_old + num_new), tmp_path / "x.h5"
    columns = list(range(40))
    save = (lambda path, part: save_csv(path, part, 0, columns)) if ids else save_npz
    dense[0] = 1
    sources = [
        save(tmp_path / f"{n}{'.csv' if ids else '.npz'}", part) for n, part in enumerate(np.split(dense, [num_old]))
    ]
    h5chunk.convert(sources[0], path, dense=True, filter=filter, chunk_samples=size)
    report = append(path, sources[1])
    assert h5chunk.verify(path).ok and (report.kind, report.num_added) == ("dense", num_new)
    with h5py.File(path) as file:
        index = file["h5chunk/source_index"][()]
        there = file["h5chunk/column_ids"][()] if ids else columns
        values = (file["X"][()] / file["X"].attrs["scale"])[np.argsort(index)]
        np.testing.assert_array_equal(values, dense[:, there])
        assert file["X"].compression == (None if filter == "none" else "gzip")
        assert file["h5chunk"].attrs["shuffled"] == 0 and file["h5chunk"].attrs["kind"] == b"dense"


def test_dense_rows_that_are_packed_otherwise(tmp_path: Path) -> None:
    dense, path = ratings(60), tmp_path / "x.h5"
    source = save_npz(tmp_path / "a.npz", dense)
    h5chunk.convert(source, path, dense=True, chunk_samples=8)
    with h5py.File(path, "r+") as file:
        values, attributes = file["X"][()], dict(file["X"].attrs)
        del file["X"]
        file.create_dataset("X", data=values, chunks=(8, 40), compression="lzf").attrs.update(attributes)
    with pytest.raises(FileError, match=r"its rows are not in chunks of 8 rows packed by gzip.*repack it"):
        append(path, source)


# ---- columns


@pytest.mark.parametrize("kind", ["numbers", "strings"])
def test_columns_by_their_ids(tmp_path: Path, kind: str) -> None:
    dense, path = ratings(60), tmp_path / "x.h5"
    ids: list[Any] = [1000 + 7 * c if kind == "numbers" else f"item {c % 10}{c}" for c in range(40)]
    new_ids = [ids[c] for c in reversed(range(40))]
    h5chunk.convert(save_csv(tmp_path / "a.csv", dense[:35], 100, ids), path)
    append(path, save_csv(tmp_path / "b.csv", dense[35:, ::-1], 500, new_ids))
    found = read(path)
    with h5py.File(path) as file:
        columns = [each.decode() if isinstance(each, bytes) else each for each in file["h5chunk/column_ids"][()]]
        rows = file["h5chunk/row_ids"][()].tolist()
        index = file["h5chunk/source_index"][()]
    np.testing.assert_array_equal(found, dense[:, [ids.index(each) for each in columns]])
    assert np.array(rows)[np.argsort(index)].tolist() == [*range(100, 135), *range(500, 525)]


def test_columns_that_the_file_does_not_have(tmp_path: Path) -> None:
    dense, path = ratings(60), tmp_path / "x.h5"
    h5chunk.convert(save_csv(tmp_path / "a.csv", dense[:35, :38], 0, list(range(38))), path)
    source = save_csv(tmp_path / "b.csv", dense[35:], 500, list(range(40)))
    old = path.read_bytes()
    with pytest.raises(SourceError, match=r"has entries in column 38, which .* does not have \(2 such\): --drop-col"):
        append(path, source)
    with pytest.raises(SourceError, match="has entries in column 38"):
        plan_append(path, source)
    assert path.read_bytes() == old
    report = append(path, source, drop_columns=True)
    np.testing.assert_array_equal(read(path), dense[:, :38])
    dropped = np.count_nonzero(dense[35:, 38:])
    assert report.counts["entries in columns that the file does not have"] == dropped


def test_rows_that_were_in_the_file_before_are_told(tmp_path: Path) -> None:
    dense, path = ratings(60), tmp_path / "x.h5"
    h5chunk.convert(save_csv(tmp_path / "a.csv", dense[:35], 0, list(range(40))), path)
    report = append(path, save_csv(tmp_path / "b.csv", dense[35:], 30, list(range(40))))
    assert "5 ids of rows, such as 30, were in the file before" in report.notes[0]


def test_columns_by_number(tmp_path: Path) -> None:
    dense, path = ratings(60), tmp_path / "x.h5"
    dense[:, 7] = dense[:, 20] = 0
    dense[50, 7] = 1
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:35]), path, min_column_count=1)
    left = [c for c in range(40) if dense[:35, c].any()]
    source = save_npz(tmp_path / "b.npz", dense[35:])
    with pytest.raises(SourceError, match=r"has entries in column 7, which .* \(1 such\)"):
        append(path, source)
    append(path, source, drop_columns=True)
    np.testing.assert_array_equal(read(path), dense[:, left])
    with h5py.File(path) as file:
        assert file["h5chunk/column_index"][()].tolist() == left


def test_numbers_of_columns_that_differ(tmp_path: Path) -> None:
    dense, path = ratings(60), tmp_path / "x.h5"
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:, :38]), path)
    with pytest.raises(SourceError, match=r"has 40 columns, but .* 38: .*--drop-columns"):
        append(path, save_npz(tmp_path / "b.npz", dense))
    with pytest.raises(SourceError, match=r"has 30 columns, but .* 38: .*add the rest"):
        append(path, save_npz(tmp_path / "c.npz", dense[:, :30]), drop_columns=True)
    with pytest.raises(SourceError, match=r"its columns have ids, but those of .* are numbered"):
        append(path, save_csv(tmp_path / "d.csv", dense, 0, list(range(40))))
    append(path, tmp_path / "b.npz", drop_columns=True)
    np.testing.assert_array_equal(read(path), np.concatenate([dense[:, :38], dense[:, :38]]))


def test_libsvm_with_labels(tmp_path: Path) -> None:
    dense, path = np.rint(ratings(30, 9) * 2), tmp_path / "x.h5"
    for name, part in (("a.libsvm", range(20)), ("b.libsvm", range(20, 30))):
        lines = [" ".join([str(i % 2), *(f"{c + 1}:{dense[i, c]:g}" for c in np.flatnonzero(dense[i]))]) for i in part]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    h5chunk.convert(tmp_path / "a.libsvm", path)
    append(path, tmp_path / "b.libsvm")
    np.testing.assert_array_equal(read(path), dense)
    with h5py.File(path) as file:
        assert (file["labels"][()] == file["h5chunk/source_index"][()] % 2).all()


# ---- AnnData


def cells(path: Path, dense: np.ndarray, genes: list[str], kinds: list[str], first: int) -> Path:
    import pandas

    names = [f"cell{first + i}" for i in range(len(dense))]
    kind = pandas.Categorical([kinds[i % len(kinds)] for i in range(len(dense))], sorted(set(kinds)))
    obs = pandas.DataFrame({"kind": kind, "age": np.arange(first, first + len(dense))}, index=names)
    return write_h5ad(path, sp.csr_matrix(dense), obs=obs, var=pandas.DataFrame(index=genes))


def test_anndata(tmp_path: Path) -> None:
    dense, path = np.rint(ratings(60) * 2), tmp_path / "x.h5"
    genes = [f"gene{c}" for c in range(40)]
    order = np.random.default_rng(0).permutation(40)
    h5chunk.convert(cells(tmp_path / "a.h5ad", dense[:35], genes, ["T", "B"], 0), path)
    source = cells(tmp_path / "b.h5ad", dense[35:, order], [genes[c] for c in order], ["T", "NK"], 35)
    with pytest.raises(
        SourceError, match=r"has category of 'kind' 'NK', which .* does not .1 such of 2.: --new-classes"
    ):
        append(path, source)
    report = append(path, source, new_classes=True)
    assert report.new_classes == ["NK"]
    np.testing.assert_array_equal(read(path), dense)
    with h5py.File(path) as file:
        index = file["h5chunk/source_index"][()]
        assert file["age"][()].tolist() == index.tolist()
        assert [each.decode() for each in file["h5chunk/row_ids"]] == [f"cell{i}" for i in index]
        names = [each.decode() for each in file["h5chunk/categories/kind"]]
        assert names == ["B", "T", "NK"]
        kinds = [("T", "B")[i % 2] if i < 35 else ("T", "NK")[(i - 35) % 2] for i in index]
        assert [names[code] for code in file["kind"][()]] == kinds
        codes = anndata.io.read_elem(file["X"])
        assert codes.shape == (60, 40)
    fewer = cells(tmp_path / "c.h5ad", dense[:5, :30], genes[:30], ["T", "B"], 60)
    append(path, fewer)
    np.testing.assert_array_equal(read(path)[60:], np.pad(dense[:5, :30], ((0, 0), (0, 10))))
    more = cells(tmp_path / "d.h5ad", dense[:5, :3], ["gene0", "GENE1", "GENE2"], ["T", "B"], 70)
    with pytest.raises(SourceError, match=r"has entries in column 'GENE1', which .* does not have \(2 such\)"):
        append(path, more)
    append(path, more, drop_columns=True)
    np.testing.assert_array_equal(read(path)[65:, :2], np.stack([dense[:5, 0], np.zeros(5)], 1))
    nameless = save_npz(tmp_path / "e.npz", dense)
    with pytest.raises(SourceError, match=r"its columns have no names, but those of .* have, such as 'gene0'"):
        append(path, nameless)


# ---- values


def test_values_that_the_file_has_no_code_for(tmp_path: Path) -> None:
    dense, path = ratings(60), tmp_path / "x.h5"
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:35]), path)
    old = path.read_bytes()
    for value in (0.25, 128, -1):
        dense[40, 3] = value
        with pytest.raises(SourceError, match=f"row 5, column 3: value {value}.*: values must have codes with the sc"):
            append(path, save_npz(tmp_path / "b.npz", dense[35:]))
        assert path.read_bytes() == old
    dense[40, 3] = np.nan
    with pytest.raises(SourceError, match="must be finite"):
        append(path, save_npz(tmp_path / "b.npz", dense[35:]))


def test_a_pattern_stays_one(tmp_path: Path) -> None:
    dense, path = np.ceil(ratings(60) / 5), tmp_path / "x.h5"
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:35]), path)
    with pytest.raises(SourceError, match=r"has values, but .* holds a pattern"):
        append(path, save_npz(tmp_path / "b.npz", 2 * dense[35:]))
    append(path, save_npz(tmp_path / "b.npz", dense[35:]))
    np.testing.assert_array_equal(read(path), dense)


def test_clip_binarize_and_counts_are_those_of_the_file(tmp_path: Path) -> None:
    dense, path = np.rint(ratings(60) * 100), tmp_path / "x.h5"
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:35]), path, clip=True)
    append(path, save_npz(tmp_path / "b.npz", dense[35:]))
    np.testing.assert_array_equal(read(path), np.minimum(dense, 255))
    h5chunk.convert(tmp_path / "a.npz", tmp_path / "y.h5", binarize=250, min_row_count=3, shuffle=False)
    append(tmp_path / "y.h5", tmp_path / "b.npz", shuffle=False)
    ones = (dense >= 250).astype(float)
    np.testing.assert_array_equal(read(tmp_path / "y.h5"), ones[ones.sum(1) >= 3])


# ---- what cannot be


def test_damage_is_not_carried_along(tmp_path: Path, small_chunks: None) -> None:
    dense, path = ratings(100), tmp_path / "x.h5"
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:60]), path)
    source, kept = save_npz(tmp_path / "b.npz", dense[60:]), path.read_bytes()
    for name, chunk, offset, _ in places(path):
        flip(path, offset + 20)
        with pytest.raises(FileError, match=f"chunk {chunk} of '{name}' does not match its checksum"):
            append(path, source)
        path.write_bytes(kept)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.npz", "b.npz", "x.h5"]


def test_options_and_files_of_another_kind(tmp_path: Path, class_folder: Any) -> None:
    dense, path = ratings(60), tmp_path / "x.h5"
    source = save_npz(tmp_path / "a.npz", dense)
    h5chunk.convert(source, path)
    with pytest.raises(OptionError, match=r"workers is 3 but .* holds a matrix"):
        append(path, source, workers=3)
    with pytest.raises(SourceError, match="no sparse matrix that is known"):
        append(path, class_folder())
    with pytest.raises(OptionError, match="memory_bytes is 5"):
        append(path, source, memory_bytes=5)
    with h5py.File(path, "r+") as file:
        file["mine"] = np.arange(60)
    with pytest.raises(FileError, match="'mine' is not as h5chunk convert writes it"):
        append(path, source)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, path = ratings(100), tmp_path / "x.h5"
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:60]), path)
    old = path.read_bytes()
    source = save_npz(tmp_path / "b.npz", dense[60:])
    monkeypatch.setattr("h5chunk.store.write.newfile.check_room", _full)
    with pytest.raises(OutputError, match="no room"):
        append(path, source)
    assert path.read_bytes() == old and not (tmp_path / ".x.h5.h5chunk-part").exists()


def _full(*args: object) -> None:
    raise OutputError("no room")


def test_on_the_command_line(tmp_path: Path) -> None:
    dense, path = ratings(100), tmp_path / "x.h5"
    h5chunk.convert(save_npz(tmp_path / "a.npz", dense[:60]), path)
    source = save_npz(tmp_path / "b.npz", dense[60:])
    plan = plan_append(path, source)
    assert (plan.num_old, plan.num_new, plan.kind) == (60, 40, "csr")
    result = CliRunner().invoke(main, ["append", str(path), str(source), "--dry-run"])
    assert "60 rows in" in result.stdout and "40 behind them" in result.stdout, result.output
    result = CliRunner().invoke(main, ["append", str(path), str(source), "--memory", "64M"])
    assert "40 rows added, 100 now" in result.stdout and "entries read" in result.stdout, result.output
    np.testing.assert_array_equal(read(path), dense)
