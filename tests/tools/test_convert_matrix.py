"""From a sparse source to a file: every row as scipy has it, the same bytes in any memory, every way to fail."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.faults import small, watch
from support.full_disk import failing
from support.matrix_conversions import Source, read_back, run
from support.specification import check_fixed_types_only

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import H5ChunkError, OptionError, OutputError, SourceError
from h5chunk.plan.permutation import permutation
from h5chunk.sources.matrix.block import Block
from h5chunk.sources.matrix.codes import MAX_CODE, SCALES, Coding
from h5chunk.store.write.spool import Spool
from h5chunk.tools.convert.matrix import convert_matrix
from h5chunk.tools.convert.matrix_ids import Ids
from h5chunk.tools.convert.matrix_sort import Entries
from h5chunk.tools.convert.matrix_write import field_name
from h5chunk.tools.convert.options import MatrixOptions

sp = pytest.importorskip("scipy.sparse")
pytest.importorskip("pyarrow")


def make(
    num_rows: int = 300, num_columns: int = 40, count: int = 5000, seed: int = 0, **more: Any
) -> tuple[Source, np.ndarray]:
    """Ratings of 0 (explicit zeros) to 5 by 0.5, with duplicates; and what they sum to, dense."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(0, num_rows, count), rng.integers(0, num_columns, count)
    values = rng.integers(0, 11, count) / 2
    dense = np.zeros((num_rows, num_columns))
    np.add.at(dense, (rows, columns), values)
    return Source(rows, columns, values, **{"shape": (num_rows, num_columns), **more}), dense


def with_ids(source: Source) -> Source:
    """The same with ids that have gaps and are not in order of appearance."""
    return Source(source.rows * 7 - 50, source.columns * 3 + 1000, source.values, has_ids=True, block=source.block)


# ---- what is in the file


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("memory_bytes", [1 << 30, 1 << 20])
def test_every_row_is_that_of_the_source(tmp_path: Path, ids: bool, shuffle: bool, memory_bytes: int) -> None:
    source, dense = make(count=60_000, num_rows=900, num_columns=150)
    given_source = with_ids(source) if ids else source
    report = run(given_source, tmp_path / "x.h5", shuffle=shuffle, seed=5, memory_bytes=memory_bytes)
    values, index = read_back(tmp_path / "x.h5")
    np.testing.assert_array_equal(values, dense[index])
    order = permutation(900, 5) if shuffle else np.arange(900)
    assert index.tolist() == order.tolist()
    assert (report.num_ranges > 1) == (memory_bytes == 1 << 20)
    assert (report.num_rows, report.num_columns, report.num_entries) == (900, 150, np.count_nonzero(dense))
    assert report.scale == 2 and not report.pattern
    num_places = len(np.unique(source.rows * 150 + source.columns))
    assert report.counts == {
        "entries read": 60_000,
        "duplicates summed": 60_000 - num_places,
        "explicit zeros dropped": num_places - np.count_nonzero(dense),
    }
    with h5py.File(tmp_path / "x.h5") as file:
        if ids:
            assert file["h5chunk/row_ids"][()].tolist() == (index * 7 - 50).tolist()
            assert file["h5chunk/column_ids"][()].tolist() == (np.arange(150) * 3 + 1000).tolist()
        else:
            assert "row_ids" not in file["h5chunk"] and "column_index" not in file["h5chunk"]


@given(data=st.data())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_against_scipy(tmp_path: Path, data: st.DataObject) -> None:
    num_rows, num_columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 300))
    entry = st.tuples(st.integers(0, num_rows - 1), st.integers(0, num_columns - 1), st.integers(0, 20))
    entries = data.draw(st.lists(entry, max_size=40))
    rows, columns, numbers = (np.array([each[i] for each in entries], np.int64) for i in range(3))
    scale = data.draw(st.sampled_from(SCALES))
    dtype = data.draw(st.sampled_from([np.float64, np.float32] if scale > 1 else [np.int8, np.uint64, np.float16]))
    expected = sp.coo_matrix((numbers, (rows, columns)), (num_rows, num_columns)).toarray()
    block = data.draw(st.integers(1, 50))
    source = Source(rows, columns, (numbers / scale).astype(dtype), (num_rows, num_columns), block)
    seed = data.draw(st.integers(0, 3))
    if expected.max(initial=0) > 255:
        return
    report = run(source, tmp_path / "x.h5", seed=seed, overwrite=True)
    values, index = read_back(tmp_path / "x.h5")
    np.testing.assert_array_equal(np.rint(values * scale), expected[index])
    np.testing.assert_allclose(values * scale, expected[index])
    assert report.scale <= scale
    assert report.pattern == (expected.any() and set(expected.ravel().tolist()) <= {0, scale})


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": True},
        {"binarize": 3},
        {"values": "float16"},
        {"scale": 2, "min_row_count": 20, "min_column_count": 257},
    ],
)
def test_bytes_depend_neither_on_memory_nor_on_blocks(tmp_path: Path, ids: bool, options: dict[str, Any]) -> None:
    contents, ranges = set(), set()
    for number, (memory, block) in enumerate([(1 << 30, 1000), (1 << 30, 7777), (1 << 20, 1000), (3 << 20, 40_000)]):
        source, _ = make(900, 150, 50_000, block=block)
        report = run(with_ids(source) if ids else source, tmp_path / f"{number}", memory_bytes=memory, **options)
        contents.add((tmp_path / f"{number}").read_bytes())
        ranges.add(report.num_ranges)
    assert len(contents) == 1 and len(ranges) >= 2


def test_a_pattern(tmp_path: Path) -> None:
    source, _ = make(count=300)
    keys = np.unique(source.rows * 40 + source.columns)
    pattern = Source(keys // 40, keys % 40, None, (300, 40))
    report = run(pattern, tmp_path / "x.h5")
    assert report.pattern and report.scale == 1
    values, index = read_back(tmp_path / "x.h5")
    expected = np.zeros((300, 40))
    expected[keys // 40, keys % 40] = 1
    np.testing.assert_array_equal(values, expected[index])


def test_a_pattern_with_duplicates_counts_them(tmp_path: Path) -> None:
    report = run(Source(np.array([0, 0, 1]), np.array([1, 1, 0]), None, (2, 2)), tmp_path / "x.h5", shuffle=False)
    assert not report.pattern and read_back(tmp_path / "x.h5")[0].tolist() == [[0, 2], [1, 0]]


@pytest.mark.parametrize("ids", [False, True])
def test_binarize(tmp_path: Path, ids: bool) -> None:
    source, dense = make()
    report = run(with_ids(source) if ids else source, tmp_path / "x.h5", binarize=4.5)
    values, index = read_back(tmp_path / "x.h5")
    np.testing.assert_array_equal(values, (dense >= 4.5)[index])
    assert report.pattern and report.counts["entries dropped by their values"] > 0


def test_binarize_takes_any_finite_values(tmp_path: Path) -> None:
    source = Source(np.array([0, 0, 1, 2]), np.arange(4), np.array([-1e300, 0.3333, 1e300, 0.1]), (3, 4))
    run(source, tmp_path / "x.h5", binarize=0.3333, shuffle=False)
    assert read_back(tmp_path / "x.h5")[0].tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("memory_bytes", [1 << 30, 1 << 20])
@pytest.mark.parametrize("ids", [False, True])
def test_filters(tmp_path: Path, ids: bool, memory_bytes: int) -> None:
    source, dense = make(900, 150, 50_000)
    present = dense > 0
    columns = present.sum(0) >= 257
    rows = present[:, columns].sum(1) >= 22
    assert 0 < columns.sum() < 150 and 0 < rows.sum() < 900
    options = {"min_row_count": 22, "min_column_count": 257, "memory_bytes": memory_bytes}
    report = run(with_ids(source) if ids else source, tmp_path / "x.h5", **options)
    values, index = read_back(tmp_path / "x.h5")
    order = permutation(900, 0)
    assert index.tolist() == order[rows[order]].tolist()
    np.testing.assert_array_equal(values, dense[index][:, columns])
    assert report.counts["rows left out"] == 900 - rows.sum()
    assert report.counts["columns left out"] == 150 - columns.sum()
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["h5chunk/column_index"][()].tolist() == np.flatnonzero(columns).tolist()
        if ids:
            assert file["h5chunk/column_ids"][()].tolist() == (np.flatnonzero(columns) * 3 + 1000).tolist()
            assert file["h5chunk/row_ids"][()].tolist() == (index * 7 - 50).tolist()


def test_empty_rows_stay_where_rows_have_numbers(tmp_path: Path) -> None:
    entries = (np.array([1, 3, 5]), np.array([0, 2, 2]), np.array([1.0, 5.0, 5.0]))
    assert run(Source(*entries, (7, 4)), tmp_path / "a.h5").num_rows == 7
    assert run(Source(*entries, (7, 4)), tmp_path / "b.h5", min_row_count=1).num_rows == 3
    assert run(Source(*entries, (None, None)), tmp_path / "c.h5").num_rows == 6
    report = run(Source(*entries, has_ids=True), tmp_path / "d.h5", binarize=5)
    assert (report.num_rows, report.num_columns) == (2, 1), "ids without entries do not exist"
    report = run(Source(*entries, has_ids=True), tmp_path / "e.h5", binarize=5, min_row_count=0, min_column_count=0)
    assert (report.num_rows, report.num_columns) == (3, 2), "unless they are asked for"


def test_a_matrix_without_entries(tmp_path: Path) -> None:
    empty = np.empty(0, np.int64)
    report = run(Source(empty, empty, np.empty(0), (3, 5)), tmp_path / "x.h5")
    assert report.num_entries == 0 and read_back(tmp_path / "x.h5")[0].tolist() == [[0] * 5] * 3


def test_fields_names_and_categories(tmp_path: Path) -> None:
    source, _ = make()
    names = np.array([f"cell{i}".encode() for i in range(300)])
    source.row_fields = {
        "n/a": np.arange(300, dtype=">i4"),
        "good": np.arange(300) % 2 == 0,
        "kind": np.arange(300) % 3,
    }
    source.categories = {"kind": ["a", "é", ""]}
    source.row_names, source.column_names = names, np.array([f"gene{i}".encode() for i in range(40)])
    report = run(source, tmp_path / "x.h5", min_column_count=105)
    _, index = read_back(tmp_path / "x.h5")
    assert list(report.fields) == ["n_a", "good", "kind"]
    with h5py.File(tmp_path / "x.h5") as file:
        own = file["h5chunk"]
        assert file["n_a"][()].tolist() == index.tolist() and file["n_a"].dtype == "<i4"
        assert file["good"][()].tolist() == (index % 2 == 0).tolist() and file["good"].dtype == np.uint8
        assert set(own["checksums"]) == {"X", "n_a", "good", "kind"}
        assert [each.decode() for each in own["categories/kind"]] == ["a", "é", ""]
        assert own["row_ids"][()].tolist() == names[index].tolist()
        assert own["column_ids"][()].tolist() == [b"gene%d" % i for i in own["column_index"][()]]
    assert [field_name(name) for name in ("X", "h5chunk", "", "..", "a\0b")] == ["X_", "h5chunk_", "_", ".._", "a_b"]


@pytest.mark.parametrize("bytes_ids", [False, True])
def test_ids_of_any_kind_are_numbered_in_ascending_order(tmp_path: Path, bytes_ids: bool) -> None:
    """Small and huge, negative, and bytes whose length differs from block to block."""
    rng = np.random.default_rng(0)
    if bytes_ids:
        universe = np.unique(
            np.array([b"%x" % int(n) for n in rng.integers(0, 1 << 62, 50) >> rng.integers(0, 60, 50)])
        )
    else:
        universe = np.unique(np.concatenate([np.arange(30), rng.integers(-(1 << 63), (1 << 63) - 1, 20)]))
    rows = np.concatenate([np.arange(20), rng.integers(0, len(universe), 500)])
    columns = rng.integers(0, len(universe), len(rows))
    source = Source(universe[rows], universe[columns], None, has_ids=True, block=25)

    def narrow(max_bytes: int) -> Iterator[tuple[Block, int]]:
        for block, done in Source.blocks(source, max_bytes):
            shrunk = [np.array(ids.tolist()) for ids in (block.rows, block.columns)]
            yield Block(shrunk[0], shrunk[1], None), done

    source.blocks = narrow  # type: ignore[method-assign]
    run(source, tmp_path / "x.h5")
    values, index = read_back(tmp_path / "x.h5")
    seen_rows, row_numbers = np.unique(rows, return_inverse=True)
    seen_columns, column_numbers = np.unique(columns, return_inverse=True)
    expected = np.zeros((len(seen_rows), len(seen_columns)))
    np.add.at(expected, (row_numbers, column_numbers), 1)
    np.testing.assert_array_equal(values, expected[index])
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["h5chunk/row_ids"][()].tolist() == universe[seen_rows][index].tolist()
        assert file["h5chunk/column_ids"][()].tolist() == universe[seen_columns].tolist()


@pytest.mark.parametrize("compression", ["gzip", "none"])
@pytest.mark.parametrize("chunk_samples", [None, 1, 7, 300])
def test_dense_rows(tmp_path: Path, compression: str, chunk_samples: int | None) -> None:
    source, dense = make()
    report = run(source, tmp_path / "x.h5", dense=True, compression=compression, chunk_samples=chunk_samples)
    with h5py.File(tmp_path / "x.h5") as file:
        data, own = file["X"], file["h5chunk"]
        np.testing.assert_array_equal(data[()] / data.attrs["scale"], dense[own["source_index"][()]])
        assert own.attrs["kind"] == b"dense" and data.chunks == (own.attrs["chunk_samples"], 40)
        assert data.compression == (None if compression == "none" else "gzip")
        stored = [data.id.read_direct_chunk((i * data.chunks[0], 0))[1] for i in range(-(-300 // data.chunks[0]))]
        assert own["checksums/X"][()].tolist() == [zlib.crc32(chunk) for chunk in stored]
    assert report.kind == "dense" and report.num_entries == np.count_nonzero(dense)
    first = (tmp_path / "x.h5").read_bytes()
    run(source, tmp_path / "x.h5", dense=True, compression=compression, chunk_samples=chunk_samples, overwrite=True)
    assert (tmp_path / "x.h5").read_bytes() == first
    if compression == "none":
        check_fixed_types_only(tmp_path / "x.h5")


def test_dense_rows_that_are_empty_at_both_ends(tmp_path: Path) -> None:
    source = Source(np.array([50]), np.array([1]), np.array([3]), (100, 2))
    run(source, tmp_path / "x.h5", dense=True, chunk_samples=8, shuffle=False)
    with h5py.File(tmp_path / "x.h5") as file:
        assert np.argwhere(file["X"][()]).tolist() == [[50, 1]]


def test_dense_rows_must_fit_in_memory(tmp_path: Path) -> None:
    source = Source(np.array([0]), np.array([0]), np.array([3]), (10, 1 << 20))
    with pytest.raises(OptionError, match=r"dense chunks of .* need .* but half of memory_bytes is 1,048,576 bytes"):
        run(source, tmp_path / "x.h5", dense=True, memory_bytes=2 << 20)
    assert list(tmp_path.iterdir()) == []


# ---- values


def test_values_of_any_type_that_fit(tmp_path: Path) -> None:
    for number, (values, scale) in enumerate(
        [
            (np.array([1, 255], np.int64), 1), (np.array([True, True]), 1), (np.array([0.25, 63.75], np.float32), 4),
            (np.array([0.1, 0.7], np.float32), 10), (np.array([0.01, 2.55]), 100), (np.array([0.5, 127.5]), 2),
            (np.array([0.125, 0.25], np.float16), 8), (np.array([0.05, 0.0625 * 0]), 20), (np.array([3, 7], ">u2"), 1),
        ]
    ):  # fmt: skip
        source = Source(np.array([0, 1]), np.array([0, 1]), values, (2, 2))
        assert run(source, tmp_path / f"{number}", shuffle=False).scale == scale
        np.testing.assert_allclose(read_back(tmp_path / f"{number}")[0].diagonal(), values.astype(float), rtol=1e-3)


STRICT = {"values": "uint8"}
WRONG = {
    "fraction": ([1, 0.3333], STRICT, r"value 0\.3333 has no exact code from 1 to 255: use --values auto"),
    "too large": ([1, 256], STRICT, r"row 8, column 6: value 256\.0 is more than 255: use --clip .*--values auto"),
    "negative": ([1, -1], STRICT, r"row 8, column 6: value -1\.0 is negative: use --clip .* or --binarize MIN"),
    "nan": ([1, np.nan], {}, r"row 8, column 6: value nan is not finite"),
    "infinite": ([1, np.inf], {"clip": True}, r"row 8, column 6: value inf is not finite"),
    "infinite too": ([1, -np.inf], {"binarize": 1}, r"row 8, column 6: value -inf is not finite"),
    "scale": ([1, 0.3], {"scale": 2}, r"row 8, column 6: value 0\.3 times the scale 2 is not a whole number"),
    "scaled": ([1, 200], {"scale": 2}, r"row 8, column 6: value 200\.0 times the scale 2 is more than 255: use --clip"),
    "no common scale": ([0.5, 200], STRICT, r"no scale makes all values whole numbers up to 255: use --values auto"),
    "decimal": ([1, 0.3333], {}, r"row 8, column 6: .* not exact in float32: use --values float32 .*0\.3332999945\)"),
    "time": (
        [1, 978300760 + 2**24],
        {},
        r"row 8, column 6: value \d+\.0 is not exact in float32: use --values float32",
    ),
    "huge": ([1, 1e39], {}, r"row 8, column 6: value 1e\+39 is beyond the range of float32: use --binarize MIN"),
    "half": ([1, 7e4], {"values": "float16"}, r"value 70000\.0 is beyond the range of float16: use --values float32"),
    "not finite": ([1, np.nan], {"values": "float32"}, r"row 8, column 6: value nan is not finite"),
}


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("what", WRONG)
def test_values_that_do_not_fit_are_named(tmp_path: Path, what: str, ids: bool) -> None:
    values, options, message = WRONG[what]
    source = Source(np.array([2, 8]), np.array([5, 6]), np.array(values, float), (9, 7), has_ids=ids)
    (tmp_path / "x.h5").write_bytes(b"old")
    with pytest.raises(SourceError, match=r"^fake\.csv: .*" + message):
        run(source, tmp_path / "x.h5", overwrite=True, **options)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x.h5", b"old")]


def test_sums_that_do_not_fit_are_named(tmp_path: Path) -> None:
    source = Source(np.array([0, 2, 2]), np.array([0, 5, 5]), np.array([1, 200, 100], np.uint8), (9, 7))
    with pytest.raises(SourceError, match=r"row 2, column 5: value 300\.0 is more than 255: use --clip"):
        run(source, tmp_path / "x.h5", values="uint8")
    run(source, tmp_path / "x.h5", clip=True, shuffle=False)
    assert read_back(tmp_path / "x.h5")[0][2, 5] == 255
    assert run(source, tmp_path / "y.h5", shuffle=False).dtype == "float16", "a sum that has no code"
    assert read_back(tmp_path / "y.h5")[0][2, 5] == 300


FLOATS = {
    "negative": ([-1, 2.5], {}, "float16"),
    "whole": ([1, 2048], {}, "float16"),
    "large": ([1, 2049], {}, "float32"),
    "largest": ([1, 2**24], {}, "float32"),
    "float32": (np.float32([0.3333, 1]), {}, "float32"),
    "no common scale": ([0.5, 200], {}, "float16"),
    "clipped": ([0.5, 300], {"clip": True}, "float16"),
    "whole as floats": ([1, 1], {"values": "float32"}, "float32"),
    "rounded": ([1 / 3, 1e-9], {"values": "float32"}, "float32"),
    "rounded to half": ([1 / 3, 70], {"values": "float16"}, "float16"),
}


@pytest.mark.parametrize("form", ["csr", "dense"])
@pytest.mark.parametrize("what", FLOATS)
def test_values_without_codes_are_floats(tmp_path: Path, what: str, form: str) -> None:
    values, options, dtype = FLOATS[what]
    source = Source(np.array([2, 8]), np.array([5, 6]), np.asarray(values, getattr(values, "dtype", float)), (9, 7))
    options = {**options, "shuffle": False, "dense": form == "dense"}
    plan = run(source, tmp_path / "x.h5", dry_run=True, **options)
    report = run(source, tmp_path / "x.h5", **options)
    assert plan.dtype == report.dtype == dtype and f"stored as {dtype}" in str(plan) and f"as {dtype}" in str(report)
    expected = np.clip(source.values, 0, 255) if "clip" in options else source.values
    with h5py.File(tmp_path / "x.h5") as file:
        found = file["X"][()][[2, 8], [5, 6]] if form == "dense" else file["X/data"][()]
        assert found.dtype == dtype and np.array_equal(found, expected.astype(dtype))
    if form == "csr":
        read_back(tmp_path / "x.h5")
    rounded = int((expected.astype(dtype) != expected).sum())
    assert report.counts.get("values rounded", 0) == rounded == (2 if what == "rounded" else what == "rounded to half")
    assert h5chunk.verify(tmp_path / "x.h5").ok


def test_values_that_round_to_zero_are_dropped_and_counted(tmp_path: Path) -> None:
    source = Source(np.arange(3), np.arange(3), np.array([1, 1e-9, 1e-60]), (3, 3))
    report = run(source, tmp_path / "x.h5", values="float16", shuffle=False)
    assert report.counts["entries dropped by their values"] == 2 and report.num_entries == 1
    assert read_back(tmp_path / "x.h5")[0].diagonal().tolist() == [1, 0, 0]


def test_whole_numbers_beyond_float64_are_named(tmp_path: Path) -> None:
    """Two numbers of 64 bits that are the same float64 must not be taken for it."""
    source = Source(np.arange(2), np.arange(2), np.array([1, 2**53 + 1]), (2, 2))
    with pytest.raises(SourceError, match="row 1, column 1: value 9007199254740993 is not exact in float32"):
        run(source, tmp_path / "x.h5")


def test_clip(tmp_path: Path) -> None:
    values = np.array([-7, 300, 255, 1e12, 4, 1e30])
    report = run(Source(np.arange(6), np.arange(6), values, (6, 6)), tmp_path / "x.h5", clip=True, shuffle=False)
    assert read_back(tmp_path / "x.h5")[0].diagonal().tolist() == [0, 255, 255, 255, 4, 255]
    assert report.counts["values clipped"] == 4
    values[:2] = -8, 510
    report = run(Source(np.arange(6), np.arange(6), values * 2, (6, 6)), tmp_path / "y.h5", clip=True, scale=0.5)
    assert report.counts["values clipped"] == 4 and report.scale == 0.5
    halves = Source(np.arange(2), np.arange(2), np.array([0.5, 200]), (2, 2))
    report = run(halves, tmp_path / "z.h5", clip=True, scale=2, shuffle=False)
    assert read_back(tmp_path / "z.h5")[0].diagonal().tolist() == [0.5, 127.5]
    assert report.counts["values clipped"] == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_binarize_takes_a_decimal_fraction_as_it_is_written(tmp_path: Path, dtype: type) -> None:
    """0.7 of float32 is less than 0.7 of float64, and so are the mean of three 0.7, and 0.7 + 0.1 than 0.8."""
    values = np.array([0.7, 0.6, 0.8], dtype)
    source = Source(np.arange(3), np.arange(3), values, (3, 3))
    run(source, tmp_path / "x.h5", binarize=0.7, shuffle=False)
    assert read_back(tmp_path / "x.h5")[0].diagonal().tolist() == [1, 0, 1]
    whole = Source(np.arange(3), np.arange(3), np.array([0, 1, 2], np.uint8), (3, 3))
    run(whole, tmp_path / "y.h5", binarize=0.7, shuffle=False)
    assert read_back(tmp_path / "y.h5")[0].diagonal().tolist() == [0, 1, 1]
    for how, numbers, least in (("mean", [0.7] * 3, 0.7), ("sum", [0.7, 0.1], 0.8)):
        zeros = np.zeros(len(numbers), int)
        source = Source(zeros, zeros, np.array(numbers), (1, 1))
        run(source, tmp_path / "x.h5", binarize=least, duplicates=how, overwrite=True)
        assert read_back(tmp_path / "x.h5")[0].tolist() == [[1]]


def test_a_scale_that_is_asked_for(tmp_path: Path) -> None:
    source = Source(np.arange(3), np.arange(3), np.array([10, 20, 2550]), (3, 3))
    assert run(source, tmp_path / "x.h5", scale=0.1, shuffle=False).scale == 0.1
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["X/data"][()].tolist() == [1, 2, 255]


@given(st.lists(st.integers(0, 255), min_size=1), st.sampled_from(SCALES), st.sampled_from([np.float32, np.float64]))
def test_codes_give_back_their_values(codes: list[int], scale: int, dtype: type) -> None:
    values = (np.array(codes) / scale).astype(dtype)
    coding = Coding()
    units, unfit = coding.units(values)
    assert unfit is None
    chosen = coding.choose_scale(np.unique(units).astype(np.int64))
    assert chosen is not None and chosen <= scale
    np.testing.assert_array_equal((coding.codes(chosen)[units] / chosen).astype(dtype), values)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_value_has_a_code_or_none(value: float) -> None:
    _, unfit = Coding().units(np.array([value]))
    exact = (
        any(round(value * s) / s == value and 0 <= round(value * s) <= MAX_CODE for s in SCALES)
        if abs(value) < 1e6
        else False
    )
    assert (unfit is None) == exact


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0}, "scale is 0"), ({"scale": float("nan")}, "scale is nan"), ({"binarize": 0}, "binarize is 0"),
        ({"binarize": 1, "clip": True}, "leave out scale and clip"),
        ({"values": "float32", "scale": 2}, "values is 'float32', but scale"), ({"values": "f4"}, "values is 'f4'"),
        ({"min_row_count": -1}, "min_row_count is -1"),
        ({"memory_bytes": 1000}, "memory_bytes is 1000: pass at least 1048576"), ({"seed": -1}, "seed is -1"),
        ({"compression": "lzf", "dense": True}, "compression is 'lzf'"), ({"chunk_samples": 0}, "chunk_samples is 0"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MatrixOptions(**options)


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    source, _ = make()
    for options in ({"min_row_count": 41}, {"min_column_count": 301}):
        with pytest.raises(SourceError, match=r"fake\.csv: no (row|column) has enough entries: lower"):
            run(source, tmp_path / "x.h5", **options)
    empty = np.empty(0, np.int64)
    with pytest.raises(SourceError, match="the matrix is empty, with 0 rows and 0 columns"):
        run(Source(empty, empty, None, has_ids=True), tmp_path / "x.h5")
    assert list(tmp_path.iterdir()) == []


def test_an_entry_outside_of_the_matrix_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="an entry is outside of the matrix of 3 x 3"):
        run(Source(np.array([3]), np.array([0]), None, (3, 3)), tmp_path / "x.h5")


def test_matrices_that_are_too_large_are_refused(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(OptionError, match="must fit in 64 bits"):
        stack.enter_context(Entries(tmp_path, 1 << 33, 1 << 32, np.dtype(np.uint32), 8, 1 << 20))


# ---- sorting within a bound


@given(data=st.data())
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_entries_come_sorted_and_summed(tmp_path: Path, data: st.DataObject) -> None:
    num_rows = data.draw(st.sampled_from([1, 5, 3000, 1 << 40]))
    num_columns = data.draw(st.sampled_from([1, 4, 1 << 20]))
    dtype, bits = data.draw(st.sampled_from([(np.uint32, 17), (np.int64, None), (np.float64, None)]))
    count = data.draw(st.integers(0, 2000))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows, columns = rng.integers(0, num_rows, count), rng.integers(0, num_columns, count)
    values = rng.integers(1, 1 << 17, count).astype(dtype)
    if data.draw(st.booleans()):
        rows = np.sort(rows)
    expected: dict[tuple[int, int], float] = {}
    for row, column, value in zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True):
        expected[row, column] = expected.get((row, column), 0) + value
    memory = data.draw(st.sampled_from([1 << 10, 1 << 14, 1 << 20]))
    with Entries(tmp_path, num_rows, num_columns, np.dtype(dtype), bits, memory) as entries:
        step = data.draw(st.integers(1, 500))
        for start in range(0, count, step):
            part = slice(start, start + step)
            entries.append(rows[part], columns[part], values[part])
        entries.finish()
        for _ in range(2):
            found = [
                each for part in entries.sorted() for each in zip(*(array.tolist() for array in part[:3]), strict=True)
            ]
            assert [(row, column) for row, column, _ in found] == sorted(expected)
            assert all(expected[row, column] == value for row, column, value in found)
    assert list(tmp_path.iterdir()) == []


def test_a_range_is_never_much_larger_than_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with rows in order nor with one row that holds most entries."""
    rng = np.random.default_rng(0)
    for rows in (np.arange(100_000), np.where(rng.random(100_000) < 0.9, 7, rng.integers(0, 100, 100_000))):
        with Entries(tmp_path, 100_000, 1 << 20, np.dtype(np.uint32), 8, 64 << 10) as entries:
            for start in range(0, 100_000, 5000):
                part = slice(start, start + 5000)
                entries.append(rows[part], rng.integers(0, 1 << 20, 5000), np.ones(5000, np.uint32))
            entries.finish()
            sizes: list[int] = []
            real = entries._range
            monkeypatch.setattr(entries, "_range", lambda *args: [sizes.append(len(r := real(*args))), r][1])  # noqa: B023
            assert sum(len(places.rows) for places in entries.sorted()) > 95_000
            assert len(sizes) > 20 and max(sizes) <= 2 * (64 << 10) // 2 // 8


def test_a_spool_gives_back_what_was_put_in(tmp_path: Path) -> None:
    parts = [np.arange(i, i + 10, dtype=np.uint64) for i in range(0, 100, 10)]
    for memory in (0, 300, 1 << 20):
        with Spool(tmp_path, np.dtype(np.uint64), memory) as spool:
            for part in parts:
                spool.append(part)
            assert len(spool) == 100
            assert list(tmp_path.iterdir()) == [], "the file has no name"
            taken = list(spool.take(7))
            assert len(taken[0]) == (7 if memory < 800 else 10), "only what is on disk is cut anew"
            assert np.concatenate(taken).tolist() == list(range(100))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(monkeypatch, "store.write.spool.write_at", failing(errno.ENOSPC))
    source, _ = make(900, 150, 50_000)
    with pytest.raises(
        OutputError, match=r"the disk is full after .* bytes of a temporary file: free some space, incr"
    ):
        run(source, tmp_path / "x.h5", memory_bytes=1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_ids_gives_way_to_a_search() -> None:
    ids = Ids(table_ids=1000)
    assert ids.number(np.array([5, 3, 5, 900])).tolist() == [1, 0, 1, 2]
    assert ids.number(np.array([1000, 3, -1, 5])).tolist() == [3, 0, 4, 1]
    assert ids.number(np.array([900, 2])).tolist() == [2, 5]
    found, ranks = ids.ranks()
    assert found.tolist() == [-1, 2, 3, 5, 900, 1000] and found[ranks].tolist() == [3, 5, 900, 1000, -1, 2]


# ---- through the public functions and the command line


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow")
    path = tmp_path / "ratings.csv"
    path.write_text(
        "userId,movieId,rating,timestamp\n"
        + "".join(f"{i // 4},{i % 7 * 10},{i % 10 / 2 + 0.5},9\n" for i in range(80))
    )
    return path


def cli(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_convert_knows_a_sparse_source(ratings: Path, tmp_path: Path) -> None:
    report = h5chunk.convert(ratings, tmp_path / "x.h5", duplicates="sum")
    assert (report.num_rows, report.num_columns, report.num_entries, report.scale) == (20, 7, 80, 2)
    values, index = read_back(tmp_path / "x.h5")
    expected = np.zeros((20, 7))
    for i in range(80):
        expected[i // 4, i % 7] += i % 10 / 2 + 0.5
    np.testing.assert_array_equal(values, expected[index])


def test_the_command_line(ratings: Path, tmp_path: Path) -> None:
    result = cli("convert", ratings, tmp_path / "x.h5", "--binarize", 3, "--min-row-count", 2, "--memory-bytes", "64M")
    assert result.exit_code == 0, result.output
    assert "entries (csv), a pattern of ones" in result.stdout and "  entries read: 80, " in result.stdout
    result = cli("convert", ratings, tmp_path / "x.h5", "--overwrite", "--columns", "movieId,userId", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_rows"] == 7
    with h5py.File(tmp_path / "x.h5") as file:
        options = json.loads(file["h5chunk"].attrs["options"])
    assert options["shuffle"] is True and "memory_bytes" not in options
    assert cli("convert", ratings, tmp_path / "y.h5", "--memory-bytes", "much").exit_code == 2
    assert not (tmp_path / "y.h5").exists()


def test_a_plan_writes_nothing(ratings: Path, tmp_path: Path) -> None:
    result = cli("convert", ratings, tmp_path / "x.h5", "--dry-run")
    assert result.exit_code == 0 and "80 entries (csv)" in result.stdout and "memory at most 1.0 GiB" in result.stdout
    plan = json.loads(cli("convert", ratings, tmp_path / "x.h5", "--dry-run", "--json").stdout)
    assert plan["num_entries"] == 80 and plan["is_exact"] is True and plan["temporary_bytes"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ratings.csv"]


def test_a_plan_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, probe_s=0)
    source, _ = make(count=100_000, block=10_000)
    options = MatrixOptions(memory_bytes=1 << 20)
    plan = convert_matrix(source, tmp_path / "x.h5", options, dry_run=True)  # type: ignore[arg-type]
    assert not plan.is_exact and plan.temporary_bytes and "about" in str(plan)


@pytest.mark.parametrize("option", [["--size", "3,4"], ["--fit", "crop"], ["--color", "gray"], ["--workers", 2]])
def test_image_options_are_refused_for_a_matrix(ratings: Path, tmp_path: Path, option: list[object]) -> None:
    result = cli("convert", ratings, tmp_path / "x.h5", *option)
    assert result.exit_code == 1 and f"{option[0]} applies only to " in result.stderr
    assert "ratings.csv contains sparse matrices (csv)" in result.stderr


@pytest.mark.parametrize(
    "option",
    [["--clip"], ["--dense"], ["--layer", "X"], ["--duplicates", "sum"], ["--transpose"]],
)
def test_sparse_options_are_refused_for_images(tmp_path: Path, option: list[object]) -> None:
    (tmp_path / "photos").mkdir()
    result = cli("convert", tmp_path / "photos", tmp_path / "x.h5", *option)
    assert result.exit_code == 1 and f"{option[0]} applies only to sparse matrices" in result.stderr
    assert "photos contains images" in result.stderr


def test_a_filter_without_dense_is_refused(ratings: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="only dense rows are compressed"):
        h5chunk.convert(ratings, tmp_path / "x.h5", compression="none")


def test_the_source_is_not_overwritten(ratings: Path) -> None:
    with pytest.raises(OutputError, match="is also the source"):
        h5chunk.convert(ratings, ratings, overwrite=True)


def test_progress_is_told(tmp_path: Path) -> None:
    source, _ = make()
    told: list[tuple[str, int, int | None]] = []
    options = MatrixOptions(duplicates="sum")
    convert_matrix(source, tmp_path / "x.h5", options, progress=lambda *what: told.append(what))
    assert {stage for stage, _, _ in told} == {"read", "write"}
    assert told[-1][1] == told[-1][2]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    source, _ = make(900, 150, 50_000)

    def interrupt(stage: str, done: int, total: int | None) -> None:
        if stage == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        options = MatrixOptions(memory_bytes=1 << 20, duplicates="sum")
        convert_matrix(source, tmp_path / "x.h5", options, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dense", [False, True])
def test_after_a_kill_the_same_command_starts_over(ratings: Path, tmp_path: Path, dense: bool) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    ratings.write_text("user,item\n" + "".join(f"{i % 97},{i % 1009}\n" for i in range(200_000)))
    options = {"memory_bytes": 12 << 20, "dense": dense, "chunk_samples": 10, "duplicates": "sum"}
    code = (
        "import json, os, signal, sys, h5chunk\ndef kill(stage, done, total):\n"
        "    if stage == 'write': os.kill(os.getpid(), signal.SIGKILL)\n"
        "h5chunk.convert(sys.argv[1], sys.argv[2], progress=kill, **json.loads(sys.argv[3]))\n"
    )
    arguments = [str(ratings), str(folder / "x.h5"), json.dumps(options)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=False, timeout=240)
    assert done.returncode == -9
    assert os.listdir(folder) == [".x.h5.h5chunk-part"]
    h5chunk.convert(ratings, folder / "x.h5", **options)
    h5chunk.convert(ratings, tmp_path / "whole.h5", **options)
    assert (folder / "x.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes() and os.listdir(folder) == ["x.h5"]


def test_info(tmp_path: Path) -> None:
    source, dense = make()
    run(source, tmp_path / "x.h5")
    found = h5chunk.info(tmp_path / "x.h5").matrices[0]
    assert (found.num_rows, found.num_columns, found.num_entries) == (300, 40, np.count_nonzero(dense))
    sizes = (dense > 0).sum(1)
    assert (found.median_row_entries, found.max_row_entries) == (np.median(sizes), sizes.max())
    assert found.value_range == (dense[dense > 0].min(), dense.max()) and found.scale == 2
    assert found.density == np.count_nonzero(dense) / dense.size
    text = cli("info", tmp_path / "x.h5").stdout
    assert (
        "matrix 300 x 40" in text
        and "part of the matrix" in text
        and "values from 0.5 to " in text
        and ", stored times 2 as uint8, " in text
    )
    assert json.loads(cli("info", tmp_path / "x.h5", "--json").stdout)["matrices"][0]["kind"] == "csr"
    run(source, tmp_path / "y.h5", dense=True)
    assert "matrix 300 x 40, dense rows" in cli("info", tmp_path / "y.h5").stdout
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["X/indptr"][5] = 1 << 40
    with pytest.raises(H5ChunkError, match=r"is damaged \(the row starts in X/indptr decrease"):
        h5chunk.info(tmp_path / "x.h5")
