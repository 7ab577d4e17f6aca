"""Ratings whose entries keep the order of their times, and whose ids keep the numbers that they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from support.matrix_conversions import Source, run

import h5chunk
from h5chunk import ChunkDataset, ChunkLoader
from h5chunk.cli import main
from h5chunk.errors import FieldError, OptionError
from h5chunk.transforms import Csr, HoldOut

RNG = np.random.default_rng(0)


def ratings(path: Path, users: Any, items: Any, times: Any = None, values: Any = None) -> Path:
    times = range(len(users)) if times is None else times
    values = [1] * len(users) if values is None else values
    lines = (f"{u},{i},{v},{t}\n" for u, i, v, t in zip(users, items, values, times, strict=True))
    path.write_text("user,item,rating,timestamp\n" + "".join(lines))
    return path


def rows_of(path: Path) -> dict[Any, list[tuple[Any, float]]]:
    """Items and values of each user, in the order of the file."""
    dataset = ChunkDataset(path)
    with h5py.File(path) as file:
        group = file["X"]
        starts, columns, values = (group[name][:] for name in ("indptr", "indices", "data"))
        values = values / group.attrs["scale"]
    ids = dataset.column_ids[columns]
    return {
        user: list(zip(ids[start:stop].tolist(), values[start:stop].tolist(), strict=True))
        for user, start, stop in zip(dataset.row_ids.tolist(), starts[:-1], starts[1:], strict=True)
    }


@pytest.mark.parametrize("duplicates", ["last", "first", "sum", "max"])
@pytest.mark.parametrize("memory_bytes", [1 << 20, 1 << 30])
def test_entries_in_the_order_of_time(tmp_path, duplicates, memory_bytes):
    count = 40_000 if memory_bytes == 1 << 20 else 3000
    users, items = RNG.integers(0, 90, count), RNG.integers(0, 300, count)
    times, values = RNG.permutation(count), RNG.integers(1, 4, count)
    source = Source(users, items, values, has_ids=True, times=times, time_name="when")
    options = {"duplicates": duplicates, "memory_bytes": memory_bytes, "clip": True}
    report = run(source, tmp_path / "r.h5", time_order=True, **options)
    assert (report.num_ranges > 1) == (memory_bytes == 1 << 20)
    expected: dict[int, dict[int, Any]] = {}
    for place in np.argsort(times).tolist():
        row, item, value = expected.setdefault(int(users[place]), {}), int(items[place]), int(values[place])
        old = row.get(item)
        if duplicates != "first" or old is None:
            row.pop(item, None)  # the place goes to the end
            row[item] = {"sum": value + (old or 0), "max": max(value, old or 0)}.get(duplicates, value)
    assert rows_of(tmp_path / "r.h5") == {user: list(row.items()) for user, row in expected.items()}
    assert h5chunk.verify(tmp_path / "r.h5").ok
    run(source, tmp_path / "columns.h5", **options)
    sums = [ChunkDataset(tmp_path / name)[range(50)][0] for name in ("r.h5", "columns.h5")]
    assert sums[0].equal(sums[1])  # of dense rows, the order of entries is no matter


def test_the_last_entries_are_held_out(tmp_path):
    source = ratings(tmp_path / "r.csv", [1, 1, 1, 2, 2, 3], [7, 8, 9, 8, 7, 7], [30, 10, 20, 5, 6, 1])
    result = CliRunner().invoke(main, ["convert", str(source), str(tmp_path / "r.h5"), "--time-order", "--quiet"])
    assert result.exit_code == 0, result.output
    dataset = ChunkDataset(tmp_path / "r.h5")
    assert dataset.column_ids.tolist() == [7, 8, 9]
    for options in ({}, {"transforms": [Csr()]}):
        transforms = [HoldOut(last=1), *options.get("transforms", [])]
        ((inputs, targets),) = next(iter(ChunkLoader(dataset, 3, transforms=transforms, shuffle=False)))
        if options:
            inputs, targets = inputs.to_dense(), targets.to_dense()
        order = np.argsort(dataset.row_ids)
        assert targets[order].tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0]]
        assert inputs[order].tolist() == [[0, 1, 1], [0, 1, 0], [1, 0, 0]]
    ((inputs, targets),) = next(iter(ChunkLoader(dataset, 3, transforms=[HoldOut(last=5)], shuffle=False)))
    assert inputs[order].tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 0]]  # one stays


def test_files_in_the_order_of_time_and_others_together_have_no_order(tmp_path):
    source = ratings(tmp_path / "r.csv", [1, 1, 2], [7, 8, 8])
    h5chunk.convert(source, tmp_path / "a.h5", time_order=True)
    h5chunk.convert(source, tmp_path / "b.h5")
    h5chunk.convert(source, tmp_path / "c.h5", time_order=True)
    ChunkLoader([tmp_path / "a.h5", tmp_path / "c.h5"], 2, transforms=[HoldOut(last=1)]).close()
    with pytest.raises(OptionError, match="needs entries in the order of time"):
        ChunkLoader([tmp_path / "a.h5", tmp_path / "b.h5"], 2, transforms=[HoldOut(last=1)])


def test_time_order_needs_times(tmp_path):
    (tmp_path / "r.csv").write_text("user,item,rating\n1,2,3\n")
    for options in ({}, {"dry_run": True}):
        with pytest.raises(OptionError, match=r"r\.csv has no column of times"):
            h5chunk.convert(tmp_path / "r.csv", tmp_path / "r.h5", time_order=True, **options)
    with pytest.raises(OptionError, match="dense rows, whose entries have no order"):
        h5chunk.convert(tmp_path / "r.csv", tmp_path / "r.h5", time_order=True, dense=True)


@pytest.mark.parametrize("word", ["", "x"])
def test_old_items_keep_their_numbers(tmp_path, word):
    users, items = RNG.integers(0, 30, 200), RNG.integers(10, 40, 200)
    name = lambda ids: [f"{word}{each}" for each in ids]  # noqa: E731
    places = np.unique(np.stack([users, items], 1), axis=0)
    h5chunk.convert(ratings(tmp_path / "a.csv", name(places[:, 0]), name(places[:, 1])), tmp_path / "a.h5")
    places = np.unique(np.stack([RNG.integers(20, 50, 200), RNG.integers(0, 30, 200)], 1), axis=0)
    new = ratings(tmp_path / "b.csv", name(places[:, 0]), name(places[:, 1]))
    old = ChunkDataset(tmp_path / "a.h5")
    options = {"ids_from": tmp_path / "a.h5", "min_column_count": 5}
    h5chunk.convert(new, tmp_path / "b.h5", **options)
    dataset = ChunkDataset(tmp_path / "b.h5")
    num_old = len(old.column_ids)
    assert np.array_equal(dataset.column_ids[:num_old], old.column_ids) and len(dataset.column_ids) > num_old
    assert np.array_equal(dataset.column_ids[num_old:], sorted(set(dataset.column_ids.tolist()) - set(old.column_ids)))
    assert sorted(dataset.row_ids.tolist()) == sorted(set(name(places[:, 0])) if word else set(places[:, 0].tolist()))
    h5chunk.convert(new, tmp_path / "c.h5", keep_rows=True, **options)
    kept = ChunkDataset(tmp_path / "c.h5")
    assert np.array_equal(kept.row_ids[: len(old)], old.row_ids) and len(kept) > len(old)
    for path in ("b.h5", "c.h5"):
        rows = {user: dict(row) for user, row in rows_of(tmp_path / path).items() if row}
        expected: dict[Any, dict[Any, float]] = {}
        columns = set(dataset.column_ids.tolist())
        for user, item in zip(*(name(each) if word else each.tolist() for each in places.T), strict=True):
            if item in columns:
                expected.setdefault(user, {})[item] = 1.0
        assert rows == expected
    assert h5chunk.convert(new, tmp_path / "c.h5", keep_rows=True, **options).already_complete


def test_ids_that_do_not_fit(tmp_path):
    numbers, words = (ratings(tmp_path / f"{x or 'n'}.csv", [f"{x}1"], [f"{x}2"]) for x in ("", "x"))
    h5chunk.convert(numbers, tmp_path / "n.h5")
    with pytest.raises(OptionError, match="ids_from are whole numbers: convert the older source again, and"):
        h5chunk.convert(words, tmp_path / "x.h5", ids_from=tmp_path / "n.h5")
    with pytest.raises(OptionError, match="requires ids_from"):
        h5chunk.convert(words, tmp_path / "x.h5", keep_rows=True)
    np.save(tmp_path / "m.npy", np.eye(3, dtype=np.uint8))
    h5chunk.convert(tmp_path / "m.npy", tmp_path / "m.h5", format="npy")
    with pytest.raises(FieldError, match="has no row_ids"):
        h5chunk.convert(words, tmp_path / "x.h5", ids_from=tmp_path / "m.h5")
    with pytest.raises(OptionError, match=r"m.npy \(npy\) has none"):
        h5chunk.convert(tmp_path / "m.npy", tmp_path / "x.h5", format="npy", ids_from=tmp_path / "n.h5")
    with pytest.raises(h5chunk.H5ChunkError, match=r"n\.h5"):
        h5chunk.convert(numbers, tmp_path / "n.h5", ids_from=tmp_path / "n.h5", overwrite=True)
    assert not (tmp_path / "x.h5").exists()
