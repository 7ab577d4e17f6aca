"""A matrix as a folder of shards: the rows of one file, with the same columns and storage, here and on a cluster."""

from __future__ import annotations

import filecmp
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.dask_workers import MortalWorkers, dask_scheduler
from support.matrix_conversions import Source, run
from support.matrix_files import write_10x, write_h5ad
from support.open_source import open_source

import h5chunk
from h5chunk.errors import OptionError, OutputError, SourceError
from h5chunk.sources.matrix import text
from h5chunk.store.write.part_file import lock
from h5chunk.tools.convert import matrix_shards
from h5chunk.tools.convert.convert import convert
from h5chunk.tools.convert.matrix_shards import run_task

sp = pytest.importorskip("scipy.sparse")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
RNG = np.random.default_rng(0)


def rows_of(*files: Path):
    """Rows in the order of the files, their numbers in the source, their ids, those of the columns, and a field."""
    parts: list[list] = [[], [], [], []]
    for file in files:
        with h5py.File(file) as opened:
            matrix, group = opened["X"], opened["h5chunk"]
            if isinstance(matrix, h5py.Dataset):
                values = sp.csr_matrix(matrix[()].astype(float))
            else:
                stored = matrix["data"][()].astype(float), matrix["indices"][()].astype(int), matrix["indptr"][()]
                values = sp.csr_matrix(stored, matrix.attrs["shape"])
            index = group["source_index"][()]
            ids = group["row_ids"][()] if "row_ids" in group else index
            columns = group["column_ids"][()] if "column_ids" in group else np.arange(values.shape[1])
            found = (
                values.toarray() / matrix.attrs["scale"],
                index,
                ids,
                opened["age"][()] if "age" in opened else index,
            )
            for part, each in zip(parts, found, strict=True):
                part.append(each)
    return [*map(np.concatenate, parts), columns]


def same_rows(one: Path, folder: Path) -> bool:
    pairs = zip(rows_of(one), rows_of(*sorted(folder.iterdir())), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def ratings(path: Path, count: int = 3000, value=None) -> Path:
    """Write ratings of users and items, all with this value or with different ones."""
    pairs = np.unique(np.random.default_rng(1).integers(0, (200, 60), (count, 2)), axis=0)
    pairs = np.random.default_rng(2).permutation(pairs).tolist()
    lines = [f"{u * 3},{i + 500},{value or (u + i) % 9 / 2 + 0.5},{n}" for n, (u, i) in enumerate(pairs)]
    path.write_text("user,item,rating,timestamp\n" + "\n".join(lines) + "\n")
    return path


def in_memory(has_ids: bool = False) -> Source:
    """Entries with duplicates, in blocks, with fields; the last rows and columns are empty."""
    rows, columns = RNG.integers(0, 180, 4000), RNG.integers(0, 35, 4000)
    fields = {} if has_ids else {"age": RNG.integers(0, 99, 200)}
    shape = (None, None) if has_ids else (200, 40)
    more = {"times": RNG.permutation(4000), "time_name": "when"}
    return Source(rows, columns, RNG.integers(0, 5, 4000), shape, has_ids=has_ids, row_fields=fields, **more)


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory_bytes": 1 << 20, "shuffle": False},
        {"min_row_count": 15, "min_column_count": 70},
        {"time_order": True, "duplicates": "last"},
        {"values": "float32", "duplicates": "mean"},
        {"dense": True, "chunk_samples": 16},
        {"transpose": True, "seed": 3},
        {"binarize": 3, "chunk_samples": 7},
    ],
)
def test_the_rows_of_one_file(tmp_path, has_ids, options):
    source = in_memory(has_ids)
    one = run(source, tmp_path / "one.h5", **options)
    report = run(source, tmp_path / "out", shards=3, **options)
    assert same_rows(tmp_path / "one.h5", tmp_path / "out")
    kept = ("num_rows", "num_columns", "num_entries", "counts", "dtype", "scale", "pattern", "fields", "kind")
    assert {name: getattr(report, name) for name in kept} == {name: getattr(one, name) for name in kept}
    assert report.num_files == 3 and len(list(tmp_path.iterdir())) == 2
    assert h5chunk.verify(tmp_path / "out").ok


def test_one_data_set(tmp_path):
    convert(ratings(tmp_path / "r.csv"), tmp_path / "one.h5")
    convert(tmp_path / "r.csv", tmp_path / "out", shards=4)
    one, many = (h5chunk.ChunkDataset(tmp_path / name) for name in ("one.h5", "out"))
    assert many.header.shuffled
    assert np.array_equal(one.row_ids, many.row_ids) and np.array_equal(one.column_ids, many.column_ids)
    with h5chunk.ChunkLoader(many, 50) as loader:
        assert sum(batch.sum() for (batch,) in loader) == sum(batch.sum() for (batch,) in h5chunk.ChunkLoader(one, 50))


def test_ids_of_older_shards(tmp_path, recwarn):
    convert(ratings(tmp_path / "old.csv", 500), tmp_path / "old", shards=3)
    ratings(tmp_path / "new.csv")
    options = {"ids_from": tmp_path / "old", "keep_rows": True}
    convert(tmp_path / "new.csv", tmp_path / "one.h5", **options)
    convert(tmp_path / "new.csv", tmp_path / "out", shards=3, **options)
    assert same_rows(tmp_path / "one.h5", tmp_path / "out")
    old, new = (h5chunk.ChunkDataset(tmp_path / name) for name in ("old", "out"))
    assert np.array_equal(old.row_ids, new.row_ids[: len(old)])
    assert np.array_equal(old.column_ids, new.column_ids[: len(old.column_ids)])
    assert not recwarn.list


def test_text_in_parts(tmp_path, monkeypatch):
    """Lines at the borders of parts come once, and errors name the right line."""
    path = ratings(tmp_path / "r.csv")
    convert(path, tmp_path / "one.h5")
    for size in (1000, 1001, 1013):
        monkeypatch.setattr(text, "MIN_PART_BYTES", size)
        convert(path, tmp_path / "out", shards=9, chunk_samples=8, overwrite=True)
        assert same_rows(tmp_path / "one.h5", tmp_path / "out")
    lines = path.read_text().splitlines()
    lines[2000] = "1,2,x,3"
    path.write_text("\n".join(lines))
    with pytest.raises(SourceError, match="line 2001"):
        convert(path, tmp_path / "bad", shards=9)
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("kind", ["h5ad", "dense.h5ad", "10x", "csc.h5ad", "npy", "parquet"])
def test_sources_that_are_read_in_parts(tmp_path, monkeypatch, kind):
    """Parts, one after the other, have the entries of the whole; the shards have the rows of one file."""
    source, options = tmp_path / kind, {"format": "npy"} if kind == "npy" else {}
    cells = sp.random(120, 40, 0.3, "csr", random_state=0)
    cells.data = np.arange(cells.nnz) % 9 + 1
    if kind == "10x":
        source = write_10x(tmp_path / "cells.h5", cells)
    elif kind == "npy":
        source = tmp_path / "cells.npy"
        np.save(source, cells.toarray())
    elif kind == "parquet":
        source.mkdir()
        for number in range(2):
            rows, columns = cells[60 * number : 60 * number + 60].nonzero()
            table = pa.table({"user": rows + 60 * number, "item": columns, "rating": columns % 5 + 1})
            pq.write_table(table, source / f"{number}.parquet", row_group_size=200)
    else:
        forms = {"h5ad": cells, "dense.h5ad": cells.toarray(), "csc.h5ad": cells.tocsc()}
        source = write_h5ad(tmp_path / f"a.{kind}", forms[kind])
    monkeypatch.setattr("h5chunk.sources.matrix.block.MIN_PART_BYTES", 1)
    opened = open_source(source, kind=options.get("format"))
    parts = [entries_of(part) for part in opened.split(4)]
    if kind != "dense.h5ad":  # its rows are few, and read together
        assert len(parts) == 4 and min(map(len, parts)) > 0
    assert np.array_equal(np.concatenate(parts), entries_of(opened))
    convert(source, tmp_path / "one.h5", **options)
    convert(source, tmp_path / "out", shards=3, **options)
    assert same_rows(tmp_path / "one.h5", tmp_path / "out")


def entries_of(source) -> np.ndarray:
    """The rows, columns and values that a source reads."""
    return np.concatenate([np.stack([b.rows, b.columns, b.values], 1) for b, _ in source.blocks(1 << 14)])


def test_a_value_that_has_no_code(tmp_path):
    """The second coding is tried for all shards if the first does not fit in one."""
    path = ratings(tmp_path / "r.csv", value=1)
    with path.open("a") as file:
        file.write("9999,500,-0.25,1\n")
    report = convert(path, tmp_path / "out", shards=3)
    assert report.dtype == "float16"
    convert(path, tmp_path / "one.h5")
    assert same_rows(tmp_path / "one.h5", tmp_path / "out")


def test_a_stopped_conversion_continues(tmp_path, monkeypatch):
    path, write = ratings(tmp_path / "r.csv"), matrix_shards.write_shard
    convert(path, tmp_path / "right", shards=4)

    def fail(job, number, say):
        if number == 2:
            raise OutputError("the disk is full")
        return write(job, number, say)

    monkeypatch.setattr(matrix_shards, "write_shard", fail)
    with pytest.raises(OutputError, match="the disk is full"):
        convert(path, tmp_path / "out", shards=4)
    monkeypatch.setattr(matrix_shards, "write_shard", write)
    monkeypatch.setattr(matrix_shards, "read_part", None)
    notes = []
    convert(path, tmp_path / "out", shards=4, notify=notes.append)
    assert "continuing: 2 of 4 write tasks are already done" in notes
    assert equal_folders(tmp_path / "right", tmp_path / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == {"r.csv", "right", "out"}
    assert convert(path, tmp_path / "out", shards=4).already_complete


def equal_folders(one: Path, other: Path) -> bool:
    pairs = zip(sorted(one.iterdir()), sorted(other.iterdir()), strict=True)
    return all(filecmp.cmp(*pair, shallow=False) for pair in pairs)


def test_a_killed_conversion_continues(tmp_path):
    path = ratings(tmp_path / "r.csv")
    command = [sys.executable, "-m", "h5chunk", "convert", str(path), str(tmp_path / "out"), "--shards", "40"]
    process = subprocess.Popen([*command, "--chunk-samples", "5"])
    work = tmp_path / ".out.h5chunk-part"
    while not (work.is_dir() and len(list(work.iterdir())) > 3):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    notes = []
    convert(path, tmp_path / "out", shards=40, chunk_samples=5, notify=notes.append)
    assert any("write tasks are already done" in note for note in notes)
    convert(path, tmp_path / "right", shards=40, chunk_samples=5)
    assert equal_folders(tmp_path / "right", tmp_path / "out")
    assert {entry.name for entry in tmp_path.iterdir()} == {"r.csv", "right", "out"}


def test_a_second_conversion_does_not_touch_the_first(tmp_path):
    part, work = tmp_path / ".out.h5chunk-part", tmp_path / ".out.h5chunk-part-work"
    part.mkdir()
    work.mkdir()
    descriptor = os.open(part, os.O_RDONLY)
    lock(descriptor, "out")
    with pytest.raises(OutputError, match="another process is writing it"):
        convert(ratings(tmp_path / "r.csv"), tmp_path / "out", shards=2)
    os.close(descriptor)
    assert work.is_dir()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shards": 300}, OptionError, "shards is 300"),
        ({"shards": 9, "chunk_samples": 150}, OptionError, "use fewer shards"),
        ({"shards": 2, "min_row_count": 1000}, OptionError, "no row of shard 0 has enough entries: use fewer shards"),
        ({"client": "local:1"}, OptionError, "add shards"),
    ],
)
def test_errors(tmp_path, options, error, message):
    given = {"source": ratings(tmp_path / "r.csv"), "output": tmp_path / "out", **options}
    with pytest.raises(error, match=message):
        convert(given.pop("source"), given.pop("output"), **given)
    assert {entry.name for entry in tmp_path.iterdir()} == {"r.csv"}


def test_dry_run(tmp_path):
    report = convert(ratings(tmp_path / "r.csv"), tmp_path / "out", shards=3, dry_run=True)
    assert report.num_files == 3 and "3 files" in str(report)
    assert not (tmp_path / "out").exists()


def twice_and_once_in_vain(folder: Path):
    """Each task fails at first, as on a full disk, and then runs twice at once."""

    def run(task, say):
        mark = folder / f"{task.job}-{task.number}"
        if not mark.exists():
            mark.touch()
            raise OutputError("the disk is full")
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(lambda _: run_task(task, say), range(2))
        assert one["file"] != other["file"]
        return one

    return run


def test_on_a_cluster(tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    about = {"processes": False, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    cells = sp.random(300, 50, 0.2, "csr", random_state=0)
    cells.data[:] = np.arange(cells.nnz) % 300  # the first coding does not fit
    sp.save_npz(tmp_path / "cells.npz", cells)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    told = []
    with distributed.LocalCluster(**about) as local, distributed.Client(local) as client:
        for source in (ratings(tmp_path / "r.csv"), tmp_path / "cells.npz"):
            options = {"shards": 5, "overwrite": True}
            convert(source, tmp_path / "here" / "m", **options)
            convert(
                source, tmp_path / "there" / "m", client=client, progress=lambda *args: told.append(args), **options
            )
            assert equal_folders(tmp_path / "here" / "m", tmp_path / "there" / "m")
            monkeypatch.setattr(matrix_shards, "run_task", twice_and_once_in_vain(tmp_path))
            convert(source, tmp_path / "there" / "m", client=client, **options)
            monkeypatch.setattr(matrix_shards, "run_task", run_task)
            assert equal_folders(tmp_path / "here" / "m", tmp_path / "there" / "m")
    assert {stage for stage, *_ in told} == {"read", "sort", "survey", "write"}
    assert list((tmp_path / "there").iterdir()) == [tmp_path / "there" / "m"]


@pytest.mark.torture
def test_killed_workers(tmp_path):
    """Convert a matrix, and repack its shards, until 25 workers were killed."""
    source = ratings(tmp_path / "r.csv", 11_000)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    convert(source, tmp_path / "here" / "m", shards=12)
    h5chunk.repack(tmp_path / "here" / "m", tmp_path / "here" / "n", compression="gzip")
    with dask_scheduler(tmp_path) as (_, file), MortalWorkers(file, 2, 25, life_s=1.5) as workers:
        while workers.killed < 25:
            options = {"client": str(file), "overwrite": True}
            convert(source, tmp_path / "there" / "m", shards=12, **options)
            h5chunk.repack(tmp_path / "there" / "m", tmp_path / "there" / "n", compression="gzip", **options)
            for name in "mn":
                assert equal_folders(tmp_path / "here" / name, tmp_path / "there" / name)
            assert len(list((tmp_path / "there").iterdir())) == 2
