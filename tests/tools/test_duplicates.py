"""Entries that share a place: every choice against a dictionary, in any memory; the error names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.matrix_conversions import Source, read_back, run
from support.open_source import open_source

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import OptionError, OutputError, SourceError
from h5chunk.sample_source import OpenContext
from h5chunk.tools.convert.matrix_sort import Entries
from h5chunk.tools.convert.options import DUPLICATES

CHOICES = [how for how in DUPLICATES if how != "error"]


def combined(how: str, values: list[float], times: list[int]) -> float:
    """What is left of the values of one place."""
    order = sorted(range(len(values)), key=lambda i: times[i])  # stable
    return {
        "sum": sum(values),
        "last": values[order[-1]],
        "first": values[order[0]],
        "max": max(values),
        "mean": sum(values) / len(values),
    }[how]


def expected_of(how: str, source: Source) -> dict[tuple[int, int], float]:
    assert source.values is not None
    times = np.arange(len(source.rows)) if source.times is None else source.times
    places: dict[tuple[int, int], list[int]] = {}
    for i, place in enumerate(zip(source.rows.tolist(), source.columns.tolist(), strict=True)):
        places.setdefault(place, []).append(i)
    values = source.values.tolist()
    return {place: combined(how, [values[i] for i in at], times[at].tolist()) for place, at in places.items()}


def random_source(count: int, seed: int, *, times: bool, top: int = 11) -> Source:
    """Ratings by halves, zeros among them; times have ties."""
    rng = np.random.default_rng(seed)
    source = Source(rng.integers(0, 60, count), rng.integers(0, 40, count), rng.integers(0, top, count) / 2, (60, 40))
    if times:
        source.times, source.time_name = rng.integers(-5, 6, count) * (1 << 40), "when"
    return source


@given(data=st.data())
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_choice_against_a_dictionary_across_runs_on_disk(tmp_path: Path, data: st.DataObject) -> None:
    how, has_times = data.draw(st.sampled_from(["sum", "last", "first", "max"])), data.draw(st.booleans())
    dtype, bits = data.draw(st.sampled_from([(np.uint32, 17), (np.int64, None), (np.float64, None)]))
    count = data.draw(st.integers(1, 1500))
    source = random_source(count, data.draw(st.integers(0, 99)), times=has_times)
    assert source.values is not None
    source.values = (source.values * 2).astype(dtype)
    uses_times = has_times and how in ("last", "first")
    memory = data.draw(st.sampled_from([1 << 10, 1 << 12, 1 << 20]))
    with Entries(tmp_path, 60, 40, np.dtype(dtype), bits, memory, how, uses_times) as entries:
        step = data.draw(st.integers(1, 400))
        for start in range(0, count, step):
            part = slice(start, start + step)
            times = None if source.times is None else source.times[part]
            entries.append(source.rows[part], source.columns[part], source.values[part], times)
        entries.finish()
        found, num_entries = {}, 0
        for places in entries.sorted():
            counts = np.ones(len(places.rows), int) if places.counts is None else places.counts
            num_entries += int(counts.sum())
            for row, column, value in zip(*(array.tolist() for array in places[:3]), strict=True):
                found[row, column] = value
    if not uses_times:
        source.times = None
    assert found == expected_of(how, source) and num_entries == count


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("how", CHOICES)
def test_the_bytes_do_not_depend_on_memory_or_blocks(tmp_path: Path, how: str, ids: bool) -> None:
    contents, ranges = set(), set()
    coarse = {"binarize": 20} if how == "mean" else {}  # thirds have no code
    for memory, block in [(1 << 30, 1000), (1 << 20, 777), (3 << 20, 40_000)]:
        rng = np.random.default_rng(0)
        values = rng.integers(0, 2, 60_000) * 60.0 if how == "mean" else rng.integers(0, 2, 60_000) / 2
        source = Source(rng.integers(0, 90, 60_000), rng.integers(0, 1000, 60_000), values, (90, 1000), block, ids)
        source.times, source.time_name = rng.integers(0, 3, 60_000), "when"
        report = run(source, tmp_path / f"{block}", duplicates=how, memory_bytes=memory, **coarse)
        contents.add((tmp_path / f"{block}").read_bytes())
        ranges.add(report.num_ranges)
    assert len(contents) == 1 and len(ranges) > 1
    expected = expected_of(how, source)
    if coarse:
        expected = {place: float(value >= 20) for place, value in expected.items()}
    values, index = read_back(tmp_path / f"{block}")
    assert all(values[index.tolist().index(row), column] == expected[row, column] for row, column in [*expected][:9])
    assert values.sum() == sum(expected.values())


@pytest.mark.parametrize("how", CHOICES)
def test_a_zero_counts_as_an_entry(tmp_path: Path, how: str) -> None:
    source = Source(np.zeros(3, int), np.array([0, 0, 1]), np.array([4.0, 0.0, 1.0]), (1, 2))
    report = run(source, tmp_path / "x.h5", duplicates=how)
    assert read_back(tmp_path / "x.h5")[0][0, 0] == {"sum": 4, "last": 0, "first": 4, "max": 4, "mean": 2}[how]
    assert report.counts.get("explicit zeros dropped", 0) == (how == "last")


def test_means_are_exact_or_an_error(tmp_path: Path) -> None:
    def source(*values: float) -> Source:
        return Source(np.zeros(len(values), int), np.zeros(len(values), int), np.array(values), (1, 1))

    report = run(source(3, 4), tmp_path / "a.h5", duplicates="mean")
    assert report.scale == 2 and read_back(tmp_path / "a.h5")[0].tolist() == [[3.5]]
    assert run(source(0.1, 0.2), tmp_path / "b.h5", duplicates="mean").scale == 20
    with pytest.raises(SourceError, match=r"\(the mean of 3 entries\): value 1\.33.* has no exact code"):
        run(source(1, 1, 2), tmp_path / "c.h5", duplicates="mean", values="uint8")
    with pytest.raises(SourceError, match=r"row 0, column 0: value 1\.33.* is not exact in float32"):
        run(source(1, 1, 2), tmp_path / "c.h5", duplicates="mean")
    run(source(1, 1, 2), tmp_path / "f.h5", duplicates="mean", values="float32")
    assert read_back(tmp_path / "f.h5")[0].tolist() == [[np.float32(4 / 3)]]
    with pytest.raises(SourceError, match=r"\(the mean of 2 entries\): value 3\.25 times the scale 2 is not a whole"):
        run(source(3, 3.5), tmp_path / "c.h5", duplicates="mean", scale=2)
    run(source(-4, 600), tmp_path / "d.h5", duplicates="mean", clip=True)
    assert read_back(tmp_path / "d.h5")[0].tolist() == [[255]]


@pytest.mark.parametrize("memory_bytes", [1 << 20, 1 << 30])
@pytest.mark.parametrize("ids", [False, True])
def test_the_error_names_the_first_place_and_both_values(tmp_path: Path, ids: bool, memory_bytes: int) -> None:
    """By row and column of the source, wherever the shuffle puts it."""
    count = 60_000
    source = Source(np.arange(count) % 300, np.arange(count) // 300, np.ones(count), (300, 200), 777, ids)
    source.rows[[40_000, 50_000]], source.columns[[40_000, 50_000]] = 7, [11, 5]
    source.values[7 + 300 * 11] = 4.5  # type: ignore[index]
    message = (
        r"^fake\.csv: row 7, column 5 has more than one entry, such as 1 \(entry 1508\) and 1 \(entry 50001\); "
        r"2 of 60,000 entries are duplicates: use --duplicates last, first, max, mean or sum"
    )
    for options in ({}, {"binarize": 3}, {"dense": True}, {"shuffle": False}):
        with pytest.raises(SourceError, match=message):
            run(source, tmp_path / "x.h5", duplicates="error", memory_bytes=memory_bytes, **options)
    assert list(tmp_path.iterdir()) == []


def test_equal_ratings_are_duplicates_too(tmp_path: Path) -> None:
    source = Source(np.zeros(2, int), np.zeros(2, int), np.array([5.0, 5.0]), (1, 1))
    with pytest.raises(SourceError, match=r"5 \(entry 1\) and 5 \(entry 2\)"):
        run(source, tmp_path / "x.h5", duplicates="auto")


# ---- files


def convert(path: Path, text: str, **options: Any) -> tuple[Any, dict[tuple[object, object], float]]:
    """The report, and the value of each (row id, column id)."""
    pytest.importorskip("pyarrow")
    path.write_text(text)
    report = h5chunk.convert(path, path.with_suffix(".h5"), overwrite=True, **options)
    values, _ = read_back(path.with_suffix(".h5"))
    with h5py.File(path.with_suffix(".h5")) as file:
        rows, columns = (file[f"h5chunk/{axis}_ids"][()].tolist() for axis in ("row", "column"))
    return report, {(rows[i], columns[j]): values[i, j] for i, j in np.argwhere(values).tolist()}


RATINGS = "userId,movieId,rating,timestamp\n1,10,5,100\n1,20,3,100\n1,10,4,50\n2,10,1,7\n"


def test_ratings_with_duplicates_are_an_error_that_names_lines(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"row 1, column 10 has more than one entry, such as 5 \(line 2\) and 4 \(line 4\); 1 of"
    ):
        convert(tmp_path / "r.csv", RATINGS)
    with pytest.raises(SourceError, match=r"5 \(entry 1\) and 4 \(entry 3\)"):  # lines have gaps
        convert(tmp_path / "r.csv", RATINGS + "\n")
    with pytest.raises(SourceError, match=r"row 'a', column 'x' .* 1 \(line 1\) and 1 \(line 2\)"):
        convert(tmp_path / "r.dat", "a::x\na::x\nb::x\n", columns=("0", "1"))
    with pytest.raises(
        SourceError, match=r"row 0, column 1 has more than one entry, such as 5 \(entry 1\) and 6 \(entry 2\)"
    ):
        convert(tmp_path / "m.svm", "1 2:5 2:6\n")
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix == ".h5"] == []


@pytest.mark.parametrize(
    ("name", "text", "options", "time"),
    [
        ("r.csv", RATINGS, {}, "timestamp"),
        ("r.dat", RATINGS.partition("\n")[2].replace(",", "::").replace("100", "881250949"), {}, None),
        ("u.data", "1\t10\t5\t881250949\n1\t10\t4\t881250940\n2\t10\t1\t891717742\n", {"format": "csv"}, "column 3"),
        ("r.csv", "user,item,rating,date\n1,10,5,2021-01-02\n1,10,4,2020-12-31\n", {}, "date"),
        ("r.csv", "user,item,rating,time\n1,10,5,2021-01-02T03:04:05Z\n1,10,4,2021-01-02T03:04:04Z\n", {}, "time"),
        ("r.csv", "user,item,rating,ts\n1,10,5,-1.5\n1,10,4,-2.5\n", {}, "ts"),
        ("r.csv", "a,b,c,d\n1,10,5,2\n1,10,4,1\n", {"columns": ("a", "b", "c", "d")}, "d"),
        ("r.csv", "user,item,rating,reviewTime,unixReviewTime\n1,10,5,09 1,2\n1,10,4,10 1,1\n", {}, "unixReviewTime"),
    ],
)
def test_last_and_first_go_by_the_times(
    tmp_path: Path, name: str, text: str, options: dict[str, Any], time: str | None
) -> None:
    if time is None:  # times that do not look so are left out
        assert convert(tmp_path / name, text, duplicates="last", **options)[1][1, 10] == 4
        return
    report, values = convert(tmp_path / name, text, duplicates="last", **options)
    assert values[1, 10] == 5 and report.counts[f"duplicates reduced to the last by {time}"] == 1
    assert convert(tmp_path / name, text, duplicates="first", **options)[1][1, 10] == 4


def test_without_times_the_order_in_the_source_tells(tmp_path: Path) -> None:
    text = "user,item,rating\n1,10,5\n1,10,4\n"
    report, values = convert(tmp_path / "r.csv", text, duplicates="last")
    assert values == {(1, 10): 4} and "duplicates reduced to the last in the order of the source" in report.counts
    assert convert(tmp_path / "r.csv", text, duplicates="first")[1] == {(1, 10): 5}
    tied = "user,item,rating,timestamp\n1,10,5,7\n1,10,4,7\n"
    assert convert(tmp_path / "r.csv", tied, duplicates="last")[1] == {(1, 10): 4}


def test_times_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"reviewTime must hold times, as numbers or ISO 8601 dates, but has '"):
        convert(tmp_path / "r.csv", "user,item,rating,reviewTime\n1,2,3,09 13 2009\n", duplicates="last")
    many = "user,item,rating,date\n" + "1,2,3,2020-01-01\n" * 40_000
    with pytest.raises(SourceError, match=r"line 40002: time 'date' is 'soon', which is not in the format of the"):
        convert(tmp_path / "r.csv", many + "1,2,3,soon\n", duplicates="last")
    report, _ = convert(tmp_path / "r.csv", many + "1,2,3,soon\n", duplicates="max")  # they are not looked at
    assert report.num_entries == 1


def test_counts_are_summed(tmp_path: Path) -> None:
    sp = pytest.importorskip("scipy.sparse")
    matrix = sp.coo_matrix((np.array([2, 3]), (np.array([1, 1]), np.array([0, 0]))), (2, 1))
    sp.save_npz(tmp_path / "m.npz", matrix)
    (tmp_path / "m.mtx").write_text("%%MatrixMarket matrix coordinate integer general\n2 1 2\n2 1 2\n2 1 3\n")
    for name in ("m.npz", "m.mtx"):
        h5chunk.convert(tmp_path / name, tmp_path / "x.h5", shuffle=False, overwrite=True)
        assert read_back(tmp_path / "x.h5")[0].tolist() == [[0], [5]]
        with h5py.File(tmp_path / "x.h5") as file:
            assert json.loads(file["h5chunk"].attrs["options"])["duplicates"] == "sum"
        with pytest.raises(
            SourceError, match=r"row 1, column 0 has more than one entry, such as 2 \(entry 1\) and 3 \(entry 2\)"
        ):
            h5chunk.convert(tmp_path / name, tmp_path / "y.h5", duplicates="error")


def test_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "r.csv").write_text(RATINGS)
    arguments = ["convert", str(tmp_path / "r.csv"), str(tmp_path / "x.h5")]
    assert CliRunner().invoke(main, arguments).exit_code == 1
    plan = CliRunner().invoke(main, [*arguments, "--duplicates", "first", "--dry-run"]).stdout
    assert "samples: rows (userId); columns (movieId)\n  duplicates reduced to the first by timestamp\n" in plan
    result = CliRunner().invoke(main, [*arguments, "--duplicates", "last"])
    assert "samples: 2 rows (userId); columns: 2 (movieId)\n" in result.stdout
    with pytest.raises(OptionError, match="duplicates is 'min': pass auto, error, sum, last, first, max or mean"):
        h5chunk.convert(tmp_path / "r.csv", tmp_path / "y.h5", duplicates="min")


def test_another_choice_is_another_command(tmp_path: Path) -> None:
    convert(tmp_path / "r.csv", RATINGS, duplicates="last")
    for options in ({"duplicates": "first"}, {"duplicates": "last", "transpose": True}):
        with pytest.raises(OutputError, match="exists"):
            h5chunk.convert(tmp_path / "r.csv", tmp_path / "r.h5", **options)


def test_times_are_read_only_if_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "r.csv").write_text(RATINGS)
    block, _ = next(open_source(tmp_path / "r.csv").blocks(1 << 20))
    assert block.times is None and block.first_line == 2
    block, _ = next(open_source(tmp_path / "r.csv", context=OpenContext(with_times=True)).blocks(1 << 20))
    assert block.times is not None and block.times.tolist() == [100, 100, 50, 7]


@pytest.mark.parametrize("bits", [4, None])
def test_many_runs_are_merged_within_the_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None
) -> None:
    """However many runs there are, no more records are sorted at a time than fit in memory."""
    rng, count = np.random.default_rng(0), 20_000
    rows, columns = rng.integers(0, 60, count), rng.integers(0, 5000, count)
    values, sizes = rng.integers(1, 9, count), []
    sort = Entries._sort
    monkeypatch.setattr(Entries, "_sort", lambda self, records: sizes.append(len(records)) or sort(self, records))
    with Entries(tmp_path, 60, 5000, np.dtype("u4"), bits, 1, "sum" if bits else "last") as entries:
        for start in range(0, count, 50):
            part = slice(start, start + 50)
            entries.append(rows[part], columns[part], values[part])
        entries.finish()
        found = [np.concatenate(parts) for parts in zip(*(p[:3] for p in entries.sorted()), strict=True)]
    assert max(sizes) <= 64 and len(sizes) > 400
    combine = np.add.at if bits else (lambda table, places, values: table.__setitem__(places, values))
    table = np.zeros((60, 5000), np.int64)
    combine(table, (rows, columns), values)
    assert (found[0] * 5000 + found[1]).tolist() == np.flatnonzero(table).tolist()
    assert found[2].tolist() == table[table > 0].tolist()


def test_a_row_in_time_order_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    lines = [f"{10**9 - i},7,1,{1700000000 + i}\n" for i in range(100_000)]
    (tmp_path / "r.csv").write_text("user,item,rating,timestamp\n" + "".join(lines))
    options: dict[str, Any] = {"time_order": True, "transpose": True}
    with pytest.raises(OptionError, match=r"entries of one row do not fit in memory: raise memory_bytes"):
        h5chunk.convert(tmp_path / "r.csv", tmp_path / "r.h5", memory_bytes=12 << 20, **options)
    assert h5chunk.convert(tmp_path / "r.csv", tmp_path / "r.h5", memory_bytes=64 << 20, **options).num_rows == 1
