"""The benchmarks of sparse matrices, on a tiny one: that they run, and that all give the rows that were packed."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
BATCH = 64

sys.path.insert(0, str(SCRIPTS))
try:
    bench_sparse, bench_dense_gpu = (importlib.import_module(name) for name in ("bench_sparse", "bench_dense_gpu"))
    checks, limits, matrix, serve = (
        importlib.import_module(f"peers.sparse.{name}") for name in ("checks", "limits", "matrix", "serve")
    )
finally:
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(autouse=True)
def threads_stay_as_they_are():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory):
    made = matrix.Source(str(tmp_path_factory.mktemp("sparse")), 300, 400, 20)
    matrix.make_source(made)
    return made


def test_rows_have_as_many_columns_as_asked_none_twice(source):
    assert np.array_equal(np.diff(source.indptr), np.full(300, 20))
    columns = source.indices.reshape(300, 20).astype(int)
    assert source.indices.dtype == np.uint16 and (np.diff(columns) > 0).all() and columns.max() < 400
    often = np.sort(np.bincount(columns.ravel(), minlength=400))
    assert often[-40:].sum() > 3 * often[:40].sum()


def test_rows_of_lognormal_length(source):
    other = replace(source, lengths="lognormal", num_rows=2000)
    matrix.make_source(other)
    lengths = np.diff(other.indptr)
    assert 18 < lengths.mean() < 22 and lengths.std() > 5
    dense = other.matrix().toarray()
    assert (dense > 0).sum() == len(other.values)  # no column twice
    assert np.array_equal(dense @ other.weights(), other.array("checksums"))


def test_a_file_that_was_shuffled_has_the_same_rows(source):
    indptr, indices, values = source.shuffled()
    found = matrix.row_checksums(indptr, indices, values, source.weights())
    assert not np.array_equal(found, source.array("checksums"))
    assert np.array_equal(np.sort(found), np.sort(source.array("checksums")))


def batches(source, order: np.ndarray, form: str):
    rows = source.matrix(np.float32)
    for start in range(0, len(order), BATCH):
        batch = rows[order[start : start + BATCH]]
        yield batch if form == "csr" else torch.from_numpy(batch.toarray())


@pytest.mark.parametrize("form", ["csr", "dense"])
def test_rows_that_are_dropped_or_repeated_are_counted(source, form):
    checker = checks.Checker(source, BATCH, form)
    order = source.order(0)
    assert checker.epoch(batches(source, order, form)) == {"dropped": 0, "repeated": 0}
    assert checker.epoch(batches(source, order[7:], form)) == {"dropped": 7, "repeated": 0}
    twice = np.concatenate((order[:-1], order[:3]))
    assert checker.epoch(batches(source, twice, form)) == {"dropped": 1, "repeated": 3}


@pytest.mark.filterwarnings("ignore:Changing the sparsity structure")
@pytest.mark.parametrize("form", ["csr", "dense"])
def test_what_is_not_what_was_packed_is_wrong(source, form):
    checker = checks.Checker(source, BATCH, form)
    good = next(batches(source, source.order(0), form))
    changed = good.copy() if form == "csr" else good.clone()
    changed[3, 5] += 1
    with pytest.raises(checks.Wrong, match="1 rows are none"):
        checker.epoch(iter([changed]))
    checker.check_row(checker.last_row(good))
    changed[BATCH - 1, 5] += 1
    with pytest.raises(checks.Wrong, match="none"):
        checker.check_row(checker.last_row(changed))
    with pytest.raises(checks.Wrong, match="float64"):
        checker.epoch(iter([good.astype(np.float64) if form == "csr" else good.double()]))
    with pytest.raises(checks.Wrong, match="64 x 399"):
        checker.epoch(iter([good[:, 1:]]))
    checker.epoch(batches(source, source.order(1), form))
    with pytest.raises(checks.Wrong, match="same order"):
        checker.epoch(batches(source, source.order(1), form))


@pytest.mark.parametrize(("form", "way"), [(form, way) for form in ("csr", "dense") for way in limits.WAYS[form]])
def test_limits_move_rows(source, form, way):
    contender = limits.Contender(source, Path(), BATCH, form, **way)
    assert contender.run(0) == contender.run(1) == source.num_rows
    checker = checks.Checker(source, BATCH, form)
    for item in range(len(contender.batches)):
        made = contender.step(0, item)
        if made is None:
            made = contender.held[0].reshape(BATCH, -1)[: len(contender.batches[item])] if contender.held else None
        if made is not None:
            checker.find(checker.checksums(made))


def serving(source, module: str, form: str, **settings):
    request = {"module": module, "form": form, "settings": settings, "source": source.fields(), "batch_size": BATCH}
    return serve.Server(request)


@pytest.mark.parametrize(
    ("module", "settings"), [("ours", {}), ("ours", {"memory": "reused"}), ("ours_workers", {}), ("rows", {})]
)
def test_dense_batches_of_ours_are_complete(source, module, settings):
    server = serving(source, module, "dense", **settings)
    assert server.first() == {"dropped": 0, "repeated": 0}
    timed = server.epoch(1)
    assert timed["rows"] == source.num_rows and timed["cpu_seconds"] > 0
    assert server.check(3) == {"dropped": 0, "repeated": 0}


def test_the_table_of_csr_batches(tmp_path, capsys):
    words = [str(tmp_path), "--rows", "300", "--columns", "400", "--entries-per-row", "20", "--batch-size", "64"]
    options = ["--forms", "csr", "--rounds", "2", "--peers", "annbatch-csr", "rows-csr", "--no-limits"]
    bench_sparse.main([*words, *options, "--json", str(tmp_path / "out.json")])
    out = capsys.readouterr().out
    content = json.loads((tmp_path / "out.json").read_text())
    results = content["results"]["csr"]
    assert len(results.pop("load_average")) == 2
    assert {"ours-csr", "ours-csr-resident", "ours-csr-workers", "rows-csr"} < set(results)
    for name, result in results.items():
        if not name.startswith("annbatch"):
            assert not result["trouble"] and result["rows_per_s"] > 0 and len(result["rates"]) == 2, result
            assert result["dropped"] == result["repeated"] == 0
    if importlib.util.find_spec("annbatch") is None:
        assert "not installed (No module named 'annbatch')" in out
    assert content["matrix"] == "300x400-20-equal-0" and content["versions"]["ours"]["torch"]


def test_limits_are_the_fastest_that_shuffle(source):
    class Fixed(bench_sparse.Contender):
        def __init__(self, kind: str, rate: float, reused: bool = False) -> None:
            self.settings, self.is_limit, self.reused, self.trouble = {"kind": kind}, True, reused, ""
            self.rounds = [{"rows": rate, "seconds": 1.0}]

    ways = [Fixed("zeros", 2), Fixed("toarray", 3), Fixed("scatter", 4, True), Fixed("unscatter", 9, True)]
    found = bench_sparse.limits_of(ways, "dense")
    assert found == {False: ways[1], True: ways[2]}
    assert set(bench_sparse.limits_of([Fixed("rows", 2), Fixed("widen", 3)], "csr")) == {False, True}


def test_rows_made_dense_without_a_gpu(tmp_path, capsys):
    words = ["--device", "cpu", "--rows", "300", "--columns", "400", "--entries-per-row", "20", "--batch-size", "20"]
    sizes = ["--repeats", "1", "--rounds", "1", "--bandwidth-bytes", "100000", "--buffers-bytes", "400000"]
    bench_dense_gpu.main([*words, *sizes, "--json", str(tmp_path / "out.json")])
    content = json.loads((tmp_path / "out.json").read_text())
    assert {"ours", "ours, pattern", "ours, l2", "torch, to_dense()", "zero_"} < set(content["batches"])
    assert len(content["epochs"]) == 4 and all(each["rows_per_s"] > 0 for each in content["epochs"].values())
    assert "of limit" in capsys.readouterr().out
