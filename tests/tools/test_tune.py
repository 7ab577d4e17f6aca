"""tune: what is recommended, advised, verified and stored; and that it keeps to its budget."""

from __future__ import annotations

import json
import math
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import check_error, run
from support.faults import failure, watch
from support.foreign import make_file, values

import h5chunk
from h5chunk.errors import FieldError, FileError, OptionError, OutputError
from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.store.format.recommendation import read_recommendation, sidecar_of
from h5chunk.store.write.new_file import write_recommendation
from h5chunk.tools.model.ratio import Ratio
from h5chunk.tools.model.settings import (
    STAY,
    DataFacts,
    Setting,
    Trial,
    choose,
    cut_order,
    enumerate_settings,
    memory_of,
    order_of,
)
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.repack.options import RepackOptions, read_tuned
from h5chunk.tools.tune.search import CACHED, IN_PLACE, MAX_TURNS, NEW, PLAIN, TODAY, TURNS_SHARE, Search
from h5chunk.tools.tune.study import BATCH_BYTES, SAMPLE_BYTES, samples_to_measure

QUICK: dict[str, Any] = {"budget_s": 0.3, "batch_size": 32, "workers": [0]}
CODES = {"labels_clustered", "sample_spans_chunks", "giant_chunk", "cache_below_chunk", "slow_filter"}
N = 600


COUNT = 100


@pytest.fixture
def converted(class_folder, tmp_path) -> Path:
    h5chunk.convert(class_folder(count=COUNT), tmp_path / "photos.h5", workers=0, chunk_samples=4)
    return tmp_path / "photos.h5"


def images_file(path: Path, labels: np.ndarray | None = None, shape=(3, 12, 12), **options: Any) -> Path:
    """Images of others, with labels."""
    labels = np.random.default_rng(0).integers(0, 5, N) if labels is None else labels
    return make_file(path, images=(values((len(labels), *shape), "u1"), options), labels=(labels, {}))


def unwrapped(found: h5chunk.Recommendation) -> str:
    return " ".join(str(found).split())


def codes(found: h5chunk.Recommendation) -> set[str]:
    return {each.code for each in found.advice}


@pytest.fixture
def any_size(monkeypatch) -> None:
    """Settings are searched for, however little data there is."""
    monkeypatch.setattr("h5chunk.tools.tune.study.SMALL_BYTES", 0)


def printed(found: h5chunk.Recommendation) -> tuple[list[str], str]:
    """The commands and the lines of Python, as they are printed."""
    steps = [line for line in str(found).partition("\n\n")[0].splitlines()[1:] if not line.startswith("     ")]
    steps = [line.strip() for line in steps]
    commands = [line for line in steps if line.startswith("h5chunk ")]
    start = next(number for number, line in enumerate(steps) if line.startswith("import h5chunk"))
    return commands, "\n".join(steps[start:])


def samples_of(found: h5chunk.Recommendation) -> int:
    """The samples of an epoch of the lines that are printed, run as they are, in a scope of their own."""
    scope: dict[str, Any] = {}
    exec(printed(found)[1], scope)
    return sum(len(batch[0]) for batch in scope["loader"])


def test_report(converted, any_size):
    calls: list[tuple[str, int, int | None]] = []
    found = h5chunk.tune(converted, progress=lambda *call: calls.append(call), **QUICK)
    names = [row.name for row in found.rows]
    assert names[0] == TODAY and names[-2:] == [PLAIN, CACHED] and {*names} <= {TODAY, IN_PLACE, NEW, PLAIN, CACHED}
    assert (found.num_samples, found.batch_size, found.device) == (COUNT, 32, "cpu")
    for row in found.rows:
        assert row.rate > 0 and row.memory_bytes > 0 and row.description in str(found).replace("\n    ", " ")
        assert (row.times is None) == (row.name == TODAY)
    assert found.row(TODAY).setting.chunk_samples < 10 and NEW in names
    assert {(stage, total) for stage, _, total in calls} == {("tune", 100)}
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})
    assert str(found).startswith(found.headline()[:60]) and found.headline().endswith(".")
    assert f"measured in {found.num_turns} turn" in str(found)


def test_little_data_is_left_as_it_is(converted):
    """However much faster something else would be."""
    found = h5chunk.tune(converted, **QUICK)
    assert re.match(r"Keep the file as it is: its [\d.]+ KiB are too small to matter\.\n", str(found))
    assert [row.name for row in found.rows] == [TODAY, PLAIN, CACHED] and found.setting == found.row(TODAY).setting


STEADY = [100.0, 101.0, 99.0, 100.0, 100.0, 102.0, 98.0, 100.0]
WILD = [100.0, 150.0, 60.0, 100.0, 200.0, 40.0, 100.0, 90.0]


@pytest.mark.parametrize(
    ("rates", "today_fails", "chosen", "kept"),
    [
        ({NEW: (1.2, STEADY)}, False, TODAY, TODAY),  # sure, but too little for a new file
        ({NEW: (1.5, STEADY)}, False, NEW, TODAY),
        ({NEW: (1.5, WILD)}, False, TODAY, TODAY),  # enough, but not sure
        ({IN_PLACE: (1.2, STEADY)}, False, IN_PLACE, IN_PLACE),
        ({IN_PLACE: (1.2, WILD)}, False, TODAY, TODAY),
        ({IN_PLACE: (1.6, STEADY), NEW: (1.7, STEADY)}, False, IN_PLACE, IN_PLACE),  # what a line of code gives
        ({IN_PLACE: (1.6, STEADY), NEW: (3.0, STEADY)}, False, NEW, IN_PLACE),
        ({IN_PLACE: (0.5, STEADY), NEW: (0.6, STEADY)}, True, IN_PLACE, IN_PLACE),
        ({NEW: (0.5, STEADY)}, True, NEW, TODAY),
    ],
)
def test_a_change_has_to_be_certain_and_a_new_file_worth_it(rates, today_fails, chosen, kept):
    settings = {
        TODAY: Setting("loader", 8, 9),
        IN_PLACE: Setting("loader", 8, 2),
        NEW: Setting("loader", 4, 9, 0, True),
    }
    trials = {each: Trial(each, 1, None, each != settings[TODAY] or not today_fails) for each in settings.values()}
    search = Search(None, "cpu", TimeBudget("tune", 1.0), trials, 1)  # type: ignore[arg-type]
    search.finalists = {name: settings[name] for name in (TODAY, *rates)}
    turns = {name: [factor * rate for rate in some] for name, (factor, some) in rates.items()}
    search.turns = {TODAY: [100.0] * len(STEADY)} | turns
    assert search.decide() == (chosen, kept)


@given(st.lists(st.floats(1, 1e6), min_size=2, max_size=20), st.floats(0.01, 100))
def test_a_ratio_is_that_of_turns(rates, factor):
    """A machine that slows down both alike changes nothing; what slows down one alone widens the interval."""
    found = Ratio.of([factor * rate for rate in rates], rates)
    assert found.times == pytest.approx(factor) and found.low == pytest.approx(factor * math.exp(-0.03))
    assert Ratio.of(rates, rates[::-1]).times == pytest.approx(1) and Ratio.of(rates[:1], rates[-1:]).low == 0
    slower = Ratio.of([factor * rates[0] / 2, *(factor * rate for rate in rates[1:])], rates)
    busy = Ratio.of([factor * rate for rate in rates], rates, 4.0)
    assert busy.low == pytest.approx(found.low / 2) and busy.high == pytest.approx(found.high * 2)
    assert slower.low < found.low * 0.97 and slower.high > found.high and slower.times < found.times


def test_json_is_what_repack_and_convert_take(converted, class_folder, tmp_path):
    found = h5chunk.tune(converted, **QUICK)
    parsed = json.loads(found.to_json(), parse_constant=pytest.fail)
    assert {"advice", "rows", "candidates", "chosen"} <= set(parsed)
    (tmp_path / "tuned.json").write_text(json.dumps({**parsed, "repack": False, "chunk_samples": 1}))
    assert read_tuned(tmp_path / "tuned.json") == (RepackOptions(), COUNT)  # nobody chose chunks of one sample
    (tmp_path / "tuned.json").write_text(json.dumps({**parsed, "repack": True}))
    tuned, num_samples = read_tuned(tmp_path / "tuned.json")
    assert num_samples == COUNT
    assert (tuned.chunk_samples, tuned.window_chunks) == (found.setting.chunk_samples, found.setting.window_chunks)
    assert tuned.cache == CacheSettings.of(found.cache) and tuned.shuffle == found.setting.shuffle
    arguments = "convert", class_folder(count=COUNT), tmp_path / "out.h5", "--tuned", tmp_path / "tuned.json"
    assert run(*arguments).exit_code == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["images"].chunks[0] == found.setting.chunk_samples


GOOD = {
    "whole": {"chunks": (8, 3, 12, 12)},
    "contiguous": {},
    "one a chunk": {"chunks": (1, 3, 12, 12)},
}


@pytest.mark.parametrize("name", GOOD)
def test_no_advice_on_good_files(tmp_path, name):
    assert codes(h5chunk.tune(images_file(tmp_path / "a.h5", **GOOD[name]), **QUICK)) == set()


def test_no_advice_on_a_converted_file(converted):
    assert codes(h5chunk.tune(converted, **QUICK)) == set()


def check_advice(found: h5chunk.Recommendation, code: str) -> None:
    """It is there, with a figure and a remedy, once; in JSON too."""
    (advice,) = [each for each in found.advice if each.code == code]
    assert advice.figures and advice.message and advice.remedy
    assert code in [each["code"] for each in json.loads(found.to_json())["advice"]] and code in str(found)
    assert codes(found) <= CODES


def test_sample_spans_chunks(tmp_path, any_size):
    found = h5chunk.tune(images_file(tmp_path / "a.h5", chunks=(50, 1, 6, 6)), **QUICK)
    check_advice(found, "sample_spans_chunks")
    (advice,) = found.advice
    assert advice.figures["chunks_per_sample"] == 12 and "h5chunk repack" in advice.remedy


def test_giant_chunk(tmp_path):
    path = images_file(tmp_path / "a.h5", shape=(3, 32, 32), chunks=(N, 3, 32, 32))
    found = h5chunk.tune(path, **QUICK)
    check_advice(found, "giant_chunk")
    assert codes(found) == {"giant_chunk"}


def test_cache_below_chunk(tmp_path):
    options = {"shape": (3, 200, 200), "chunks": (80, 3, 200, 200), "compression": "gzip"}  # 9.6 MB, HDF5 caches 8 MiB
    found = h5chunk.tune(images_file(tmp_path / "a.h5", np.arange(160) % 2, **options), **QUICK)
    check_advice(found, "cache_below_chunk")
    assert "rdcc_nbytes=" in found.advice[[a.code for a in found.advice].index("cache_below_chunk")].message


def test_slow_filter(tmp_path, any_size):
    images = np.random.default_rng(0).integers(0, 16, (4 * N, 64, 64), dtype=np.uint8)
    path = make_file(tmp_path / "a.h5", images=(images, {"chunks": (8, 64, 64), "compression": "gzip"}))
    found = h5chunk.tune(path, **QUICK | {"budget_s": 1.0})
    assert (codes(found) == {"slow_filter"}) == (found.chosen == NEW)
    if found.chosen == NEW:
        check_advice(found, "slow_filter")


@pytest.mark.parametrize(
    ("options", "num_classes"), [({"chunks": (8, 3, 12, 12)}, 2), ({}, 5), ({"chunks": (N, 3, 12, 12)}, 60)], ids=str
)
def test_sorted_labels_are_flagged(tmp_path, options, num_classes):
    labels = np.arange(N) * num_classes // N
    found = h5chunk.tune(images_file(tmp_path / "a.h5", labels, **options), **QUICK)
    check_advice(found, "labels_clustered")
    assert "--shuffle" in next(each for each in found.advice if each.code == "labels_clustered").remedy
    rewrites = {*found.commands, *(each.remedy for each in found.advice if each.remedy.startswith("h5chunk repack"))}
    assert len(rewrites) == 1, "commands that write the same file"


def test_a_large_sorted_file_is_shuffled_on_disk(tmp_path):
    labels = np.arange(20_000) // 2000
    path = make_file(tmp_path / "a.h5", images=(values((20_000, 50), "u1"), {"chunks": (64, 50)}), labels=(labels, {}))
    found = h5chunk.tune(path, memory_bytes=200_000, **QUICK)
    assert found.setting.shuffle and found.setting.repack and "--shuffle" in found.commands[0]
    assert found.row(found.chosen).effective_batch == 32
    assert "Rewrite the file shuffled: it needs " in str(found) and " of memory, not " in str(found)


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_labels_are_not(tmp_path, seed):
    labels = np.random.default_rng(seed).permutation(np.arange(N) // 60)
    found = h5chunk.tune(images_file(tmp_path / "a.h5", labels, chunks=(50, 3, 12, 12)), **QUICK)
    assert "labels_clustered" not in codes(found)
    assert found.row(TODAY).effective_batch == 32


@pytest.mark.parametrize("name", ["a.h5", "a b'c\"d\ne$(x)\\.h5"])
def test_commands_run_as_they_are_printed(tmp_path, monkeypatch, name):
    """And each remedy is the command that is recommended, if one is."""
    monkeypatch.chdir(tmp_path)
    images = values((20_000, 50), "u1"), {"chunks": (64, 50)}
    path = make_file(Path(name), images=images, labels=(np.arange(20_000) // 2000, {}))
    found = h5chunk.tune(path, memory_bytes=200_000, **QUICK)
    assert found.setting.repack and found.setting.shuffle
    assert {each.remedy for each in found.advice} == {found.commands[0]}
    assert f"\n        {found.commands[0]}\n" in str(found)
    (command,), _ = printed(found)
    split = ["bash", "-c", rf"printf '%s\0' {command}"]
    words = subprocess.run(split, capture_output=True, check=True, timeout=240).stdout
    result = run(*words.decode().split("\0")[1:-1])
    assert result.exit_code == 0, result.output
    assert samples_of(found) == 20_000


@pytest.mark.parametrize("fields", [["x", "y"], {"a": "x", "b": "y"}, ["x", "names"]])
@pytest.mark.parametrize("chosen", [TODAY, IN_PLACE, NEW])
def test_the_lines_have_the_fields_that_were_named(tmp_path, monkeypatch, any_size, fields, chosen):
    """And run, whatever is recommended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Search, "decide", lambda search: (chosen if chosen in search.finalists else TODAY, TODAY))
    names = np.array([b"a", b"b"])[np.arange(600) % 2]
    path = make_file(Path("a.h5"), x=(values((600, 50), "u1"), {}), y=(np.arange(600), {}), names=(names, {}))
    found = h5chunk.tune(path, fields=fields, **QUICK)
    for command in printed(found)[0]:
        assert run(*shlex.split(command)[1:]).exit_code == 0
    assert samples_of(found) == 600


def test_a_report_fits_its_width(tmp_path):
    """But for commands."""
    options = {"chunks": (N // 2, 2, 5, 5), "compression": "gzip"}
    path = images_file(tmp_path / "a.h5", np.arange(N) // 60, **options)
    text = h5chunk.tune(path, group_by="labels", **QUICK).text(80)
    long = [line for line in text.splitlines() if len(line) > 80]
    assert [
        line
        for line in long
        if not line.strip().startswith(
            ("h5chunk", "h5py.File", "for readers with h5py: ", f"{path}: ", "data = ", "loader = ")
        )
    ] == []
    assert "advice: sample_spans_chunks" in text and "e+0" not in text


def test_cells_of_anndata(tmp_path):
    """Their categories are groups; what is advised is what can be done: they are converted, not shuffled in place."""
    anndata, pd = pytest.importorskip("anndata"), pytest.importorskip("pandas")
    kinds = pd.Categorical(np.repeat(["a", "b", "c"], 100))
    obs = pd.DataFrame({"kind": kinds}, index=[f"cell{i}" for i in range(300)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells = anndata.AnnData(np.random.default_rng(0).poisson(1, (300, 40)).astype(np.float32), obs)
        cells.write_h5ad(tmp_path / "cells.h5ad", compression="gzip")
    found = h5chunk.tune(tmp_path / "cells.h5ad", fields=["X"], group_by="obs/kind", **QUICK)
    assert not found.setting.shuffle and not any(each.setting.shuffle for each in found.candidates)
    (advice,) = [each for each in found.advice if each.code == "labels_clustered"]
    assert run(*shlex.split(advice.remedy)[1:]).exit_code == 0
    with h5py.File(tmp_path / "cells-tuned.h5") as file:
        assert file["h5chunk"].attrs["shuffled"] == 1
    if found.setting.repack:
        assert run(*shlex.split(found.commands[0])[1:], "--overwrite").exit_code == 0
    with pytest.raises(OptionError, match="group_by"):
        h5chunk.tune(tmp_path / "cells.h5ad", fields=["X"], group_by="obs", **QUICK)


def test_group_by(tmp_path):
    data = values((N, 20), "u1"), {"chunks": (8, 20)}
    path = make_file(tmp_path / "a.h5", images=data, patient=(np.arange(N) // 100, {}), age=(np.zeros((N, 2)), {}))
    assert h5chunk.tune(path, **QUICK).row(TODAY).effective_batch is None
    check_advice(h5chunk.tune(path, group_by="patient", **QUICK), "labels_clustered")
    for wrong in ("age", "nothing", ""):
        with pytest.raises(OptionError, match="group_by"):
            h5chunk.tune(path, group_by=wrong, **QUICK)


FACTS = st.builds(
    lambda n, size, k, b, w, shuffled: DataFacts(
        ChunkGrid((n, size), (min(k, n), size), 1), size + 8, min(k, n), b, w, shuffled
    ),
    st.integers(1, 5000), st.integers(1, 200_000), st.integers(1, 600), st.integers(1, 300), st.integers(1, 50),
    st.booleans(),
)  # fmt: skip


@given(FACTS)
@settings(max_examples=50, deadline=None)
def test_settings_are_possible(facts):
    found = enumerate_settings(facts, workers=(0, 2))
    assert found[0] == Setting(
        "loader", facts.chunk_samples, min(facts.window_chunks, order_of(found[0], facts).num_chunks)
    )
    assert len(set(found)) == len(found)
    for each in found:
        order = order_of(each, facts)
        assert 1 <= each.chunk_samples <= facts.num_samples and 1 <= each.window_chunks <= order.num_chunks
        assert memory_of(each, facts) > 0
        cut = cut_order(order, max(1, facts.num_samples // 3))
        each_chunk = order.chunk_samples  # a window is no less
        sizes = [max(each.window_batches for each in one.rounds()) for one in (cut, order)]
        assert cut.num_samples <= order.num_samples and sizes[0] <= max(sizes[1], -(-each_chunk // facts.batch_size))


SETTINGS = st.builds(
    Setting, st.sampled_from(["loader", "dataset"]), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2),
    st.booleans(),
)  # fmt: skip
TRIALS = st.builds(
    Trial, SETTINGS, st.integers(1, 100), st.none() | st.floats(1, 256), st.booleans(), st.none() | st.floats(1, 1e6)
)


@given(st.lists(TRIALS, max_size=12))
def test_choice(trials):
    found = choose(trials)
    fitting = [each for each in trials if each.allowed and each.rate is not None]
    assert (found is None) == (not fitting)
    if found is not None:
        fast = [each for each in fitting if each.rate >= STAY * max(each.rate for each in fitting)]
        assert found in fast and found.setting.repack <= all(each.setting.repack for each in fast)


def test_apply_to_a_file_of_ours(converted):
    """What lies beside it goes before its header, which stays."""
    before = converted.read_bytes()
    found = h5chunk.tune(converted, apply=True, **QUICK)
    assert converted.read_bytes() == before and found.applied == str(sidecar_of(converted))
    dataset = h5chunk.ChunkDataset(converted)
    assert dataset.window_chunks == found.window_in_place and dataset.cache == CacheSettings.of(found.cache_in_place)


def test_apply_to_a_file_of_others(tmp_path):
    path = images_file(tmp_path / "a.h5", chunks=(8, 3, 12, 12))
    before = path.read_bytes()
    found = h5chunk.tune(path, apply=True, **QUICK)
    assert path.read_bytes() == before and found.applied == str(sidecar_of(path))
    assert f"stored in {sidecar_of(path)}: windows of {found.window_in_place:,} chunks, and " in unwrapped(found)
    assert read_recommendation(path) == (found.window_in_place, CacheSettings.of(found.cache_in_place))
    assert read_recommendation(path, dataset="images", num_samples=N, chunk_samples=8) is not None
    for other in ({"dataset": "x"}, {"num_samples": N + 1}, {"chunk_samples": 9}):
        assert read_recommendation(path, **other) is None
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.h5", "a.h5.h5chunk.json"]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"version": 1}', '{"version": 1, "window_chunks": 0, "cache": [1, 0, 0]}',
        '{"version": 1, "window_chunks": 3, "cache": [1, 0, 1.0]}', '{"version": 1, "window_chunks": 3, "cache": 5}',
    ],
)  # fmt: skip
def test_damaged_sidecars(tmp_path, text):
    sidecar_of(tmp_path / "a.h5").write_text(text)
    with pytest.raises(FileError, match="damaged"):
        read_recommendation(tmp_path / "a.h5")


def test_sidecars_that_cannot_be(tmp_path):
    """Where the name is too long there is none; what is no file is an error of ours."""
    path = images_file(tmp_path / f"{'a' * 245}.h5", chunks=(8, 3, 12, 12))
    assert read_recommendation(path) is None
    assert h5chunk.ChunkDataset(path).window_chunks >= 1
    with pytest.raises(OutputError, match="File name too long"):
        write_recommendation(path, 3, CacheSettings(5, 6), dataset="x", num_samples=9, chunk_samples=2)
    sidecar_of(tmp_path / "b.h5").mkdir()
    with pytest.raises(FileError, match=r"cannot be read .Is a directory"):
        read_recommendation(tmp_path / "b.h5")


def test_newer_and_missing_sidecars(tmp_path):
    assert read_recommendation(tmp_path / "a.h5") is None
    sidecar_of(tmp_path / "a.h5").write_text('{"version": 2}')
    assert read_recommendation(tmp_path / "a.h5") is None
    write_recommendation(tmp_path / "a.h5", 3, CacheSettings(5, 6), dataset="x", num_samples=9, chunk_samples=2)
    assert read_recommendation(tmp_path / "a.h5") == (3, CacheSettings(5, 6))


KILLED = """
import sys, itertools
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.write.new_file import write_recommendation
print("ready", flush=True)
for i in itertools.count(1):
    write_recommendation(sys.argv[1], i, CacheSettings(i, i, 0.5), dataset="x", num_samples=1, chunk_samples=1)
"""


def test_a_kill_leaves_a_whole_recommendation(tmp_path):
    for delay in (0.05, 0.08, 0.12):
        with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "a.h5"], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        window, cache = read_recommendation(tmp_path / "a.h5")
        assert cache == CacheSettings(window, window, 0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0}, {"memory_bytes": 0}, {"min_effective_batch": 1}, {"min_effective_batch": 0}, {"budget_s": 0},
        {"workers": [-1]}, {"workers": [True]}, {"device": "tpu"},
    ],
)  # fmt: skip
def test_wrong_options(converted, options):
    with pytest.raises(OptionError):
        h5chunk.tune(converted, **QUICK | options)


def test_files_that_cannot_be_tuned(tmp_path):
    with pytest.raises(FileError, match="no such file"):
        h5chunk.tune(tmp_path / "missing.h5", **QUICK)
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(FileError, match=r"not an HDF5 file$"):
        h5chunk.tune(tmp_path / "text.h5", **QUICK)
    with pytest.raises(FieldError, match="no samples"):
        h5chunk.tune(make_file(tmp_path / "a.h5", images=(np.zeros((0, 3)), {})), **QUICK)


def test_what_has_to_be_converted_first(class_folder, ratings, tmp_path, monkeypatch):
    """The error has the command, which does what it says; files of a folder are tuned one by one."""
    (tmp_path / "shards").mkdir()
    monkeypatch.chdir(tmp_path / "shards")
    for source in (class_folder(count=COUNT), ratings):
        with pytest.raises(FileError, match="is not an HDF5 file: convert it first") as raised:
            h5chunk.tune(source, **QUICK)
        command = str(raised.value).partition("first (")[2].removesuffix("), and tune the result")
        assert run(*shlex.split(command)[1:]).exit_code == 0
        assert h5chunk.tune(Path(f"{source.stem}.h5"), **QUICK).row(TODAY).rate
    check_error(run("tune", ratings), "convert it first")
    with pytest.raises(FileError, match=r"is a folder of HDF5 files, but tune accepts one file: use .*photos\.h5"):
        h5chunk.tune(tmp_path / "shards", **QUICK)


@pytest.mark.parametrize("shape", [(1, 5), (40, 5), (7, 1000)])
def test_tiny_files(tmp_path, shape):
    path = make_file(tmp_path / "a.h5", images=(values(shape, "f4"), {}))
    assert h5chunk.tune(path, **QUICK).row(TODAY).rate > 0


def test_fields_of_any_name_and_strings(tmp_path):
    path = make_file(
        tmp_path / "a.h5",
        train__x=(values((N, 30), "f4"), {"chunks": (8, 30)}),
        train__y=(np.arange(N) % 3, {}),
        train__names=(values((N,), "S5"), {}),
    )
    found = h5chunk.tune(path, fields={"x": "train/x", "y": "train/y"}, group_by="y", **QUICK)
    assert found.row(TODAY).effective_batch == 32
    found = h5chunk.tune(path, fields=["train/x", "train/names"], **QUICK)
    assert found.setting.reader == "dataset" and all(each.setting.reader != "loader" for each in found.candidates)


def test_command_line(converted):
    arguments = ("tune", converted, "--budget", "0.5s", "--batch-size", 16, "--workers", 0, "--memory-bytes", "1GiB")
    result = run(*arguments, "--apply")
    assert result.exit_code == 0, result.output
    assert f"stored in {sidecar_of(converted)}" in " ".join(result.stdout.split())
    parsed = json.loads(run(*arguments, "--json").stdout)
    assert parsed["memory_bytes"] <= 1 << 30 and parsed["budget_s"] == 0.5
    for wrong in (["--budget", "0"], ["--budget", "x"], ["--min-effective-batch", "1"]):
        assert run("tune", converted, *wrong).exit_code in (1, 2)
    check_error(run("tune", converted, "--device", "tpu"), "tpu")


def test_plot(converted, tmp_path, monkeypatch):
    path = images_file(tmp_path / "a.h5", np.arange(N) // 60, chunks=(8, 3, 12, 12))
    h5chunk.tune(path, plot=tmp_path / "a.png", **QUICK)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    h5chunk.tune(converted, group_by="labels", plot=tmp_path / "b.svg", **QUICK)
    assert (tmp_path / "b.svg").read_text().rstrip().endswith("</svg>")
    with monkeypatch.context() as patched:  # before anything is measured
        watch(patched, "tools.tune.tune.study_file", failure(AssertionError("measured")))
        with pytest.raises(OptionError, match="is not a picture"):
            h5chunk.tune(path, plot=tmp_path / "a.nothing", **QUICK)
        with pytest.raises(OutputError, match="does not exist"):
            h5chunk.tune(path, plot=tmp_path / "none" / "a.png", **QUICK)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(h5chunk.H5ChunkError, match="plot"):
        h5chunk.tune(path, plot=tmp_path / "a.png", **QUICK)


@pytest.fixture
def ratings(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    pairs = sorted({(int(a), int(b)) for a, b in rng.integers(0, 200, (3000, 2))})
    path = tmp_path / "ratings.csv"
    path.write_text("user,item,rating\n" + "".join(f"{a},{b},{(a + b) % 5 + 1}\n" for a, b in pairs))
    return path


def test_a_sparse_file(ratings, tmp_path):
    path = tmp_path / "ratings.h5"
    h5chunk.convert(ratings, path)
    found = h5chunk.tune(path, apply=True, **QUICK)
    assert found.row(TODAY).rate and not found.setting.repack and codes(found) == set()
    assert h5chunk.ChunkDataset(path).window_chunks == found.window_in_place


@pytest.mark.parametrize("memory_bytes", [1, 300_000])
def test_memory_for_nothing(tmp_path, memory_bytes):
    """The error says what feeding takes at least, and with so much it can be tuned."""
    path = images_file(tmp_path / "a.h5", np.arange(N) // 60, chunks=(8, 3, 12, 12))
    with pytest.raises(OptionError, match=r"loading needs [\d.]+ KiB, but the limit is .*: raise memory_bytes"):
        h5chunk.tune(path, **QUICK | {"memory_bytes": memory_bytes, "batch_size": 256})


@pytest.mark.parametrize("batch_size", [1, 10**14])
def test_batches_of_any_size(tmp_path, batch_size):
    path = images_file(tmp_path / "a.h5", chunks=(8, 3, 12, 12))
    assert h5chunk.tune(path, **QUICK | {"batch_size": batch_size}).row(PLAIN).rate


def limited(num_bytes: int, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code where no file may have more bytes than this."""
    limit = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({num_bytes}, {num_bytes}))\n"
    return subprocess.run([sys.executable, "-c", limit + code], capture_output=True, text=True, timeout=120)


def test_a_full_temporary_disk(tmp_path):
    """Costs the measurements that need it, and no more."""
    path = images_file(tmp_path / "a.h5", chunks=(8, 3, 12, 12))
    code = (
        "import h5chunk, sys\nimport h5chunk.tools.tune.study as study\n"
        "study.SMALL_BYTES = 0\noptions = {'budget_s': 0.3, 'batch_size': 32, 'workers': [0]}\n"
        f"found = h5chunk.tune({str(path)!r}, **options)\nassert found.row('as today').rate\n"
        "assert not any(each.rate for each in found.candidates if each.setting.repack)\nprint(found)\n"
    )
    result = limited(20_000, code)
    assert "note: no new file was measured" in result.stdout, result.stdout
    shown = " ".join(result.stdout.split())
    assert "File too large" in shown and "set TMPDIR" in shown and not result.returncode, result.stderr


def test_no_temporary_folder(converted, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent/folder")
    with pytest.raises(OutputError, match="set TMPDIR"):
        h5chunk.tune(converted, **QUICK)


def test_large_samples_are_measured_on_fewer_than_a_batch():
    assert samples_to_measure(256, 100) == SAMPLE_BYTES // 100
    assert samples_to_measure(256, 4 << 20) == 256
    assert samples_to_measure(256, 100 << 20) == BATCH_BYTES // (100 << 20) < 256
    assert samples_to_measure(256, 10 << 30) == 1


@pytest.mark.parametrize("slow", [0.01, 0.5, 1.9, 3.0, 30.0])
def test_measuring_ends_with_the_budget(slow):
    """But for three turns, if these take little more; each turn has all runners, in alternating order."""
    now, called = [0.0], []
    budget = TimeBudget("tune", 10.0, clock=lambda: now[0])
    search = Search(None, "cpu", budget, {}, 1)  # type: ignore[arg-type]

    def runner(name: str) -> float:
        now[0] += slow
        called.append(name)
        return 100.0

    turns = search._measure_in_turns({name: partial(runner, name) for name in "ab"}, 3, MAX_TURNS, TURNS_SHARE)
    assert len(turns["a"]) == len(turns["b"]) == {0.01: MAX_TURNS, 0.5: 9, 1.9: 3, 3.0: 2, 30.0: 1}[slow]
    assert called[:4] == ["b", "a", "a", "b"][: 2 * len(turns["a"])]


def test_a_search_finds_the_fastest_of_neighbours(monkeypatch):
    """A setting is measured at most once, and most are not; what is not allowed is never."""
    facts = DataFacts(ChunkGrid((90_000, 3000), (16, 3000), 1), 3000, 16, 256, 40)
    trials = {
        each: Trial(each, 1, None, each.num_workers != 1) for each in enumerate_settings(facts, workers=(0, 1, 2))
    }
    rates = {
        each: 50 + 10 * each.num_workers + 1000 / each.window_chunks + 3 * (each.chunk_samples > 64) for each in trials
    }
    measured: list[Setting] = []

    def rate(_search: Search, setting: Setting) -> float:
        measured.append(setting)
        return rates[setting]

    monkeypatch.setattr(Search, "_rate", rate)
    study = SimpleNamespace(facts=facts, num_measured=100, path_of=lambda setting: None)
    search = Search(study, "cpu", TimeBudget("tune", 3600.0), trials, 1)  # type: ignore[arg-type]
    for anew in (False, True):
        del measured[:]
        some = [each for each in trials if each.repack == anew]
        best, *_ = search._search(some, 1.0)
        of_layout = [each for each in some if each.layout == best.layout and trials[each].allowed]
        assert rates[best] == max(rates[each] for each in of_layout)
        assert len(set(measured)) == len(measured) <= 24 and all(each.num_workers != 1 for each in measured)


def test_a_sidecar_appears_at_once(tmp_path, monkeypatch):
    """Until it takes its place, complete, what stood there is as it was."""
    path = tmp_path / "a.h5"
    about = {"dataset": "x", "num_samples": 9, "chunk_samples": 2}
    write_recommendation(path, 3, CacheSettings(5, 6), **about)

    def fail(self, target):
        assert read_recommendation(path) == (3, CacheSettings(5, 6))
        assert json.loads(self.read_text())["window_chunks"] == 4
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(h5chunk.H5ChunkError, match="No space left"):
        write_recommendation(path, 4, CacheSettings(5, 6), **about)
    assert read_recommendation(path) == (3, CacheSettings(5, 6))
    assert [each.name for each in tmp_path.iterdir()] == ["a.h5.h5chunk.json"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *(({"window": 4, **option}, next(iter(option))) for option in ({"batch_size": 8}, {"budget_s": 1.0})),
        *(
            ({"patch": (4, 4), **option}, next(iter(option)))
            for option in ({"device": "cuda"}, {"memory_bytes": 1 << 30})
        ),
        ({"path": "s3://bucket/a.h5", "min_effective_batch": 0.5}, "min_effective_batch"),
        ({"path": "s3://bucket/a.h5", "memory_bytes": 1 << 30}, "memory_bytes"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, name):
    with pytest.raises(OptionError, match=f"{name} is .*: leave it out"):
        h5chunk.tune(**{"path": "a.h5", **options})


@pytest.mark.parametrize("command", [h5chunk.tune, h5chunk.bench])
def test_fields_that_info_names_are_the_default(tmp_path, command):
    path = make_file(
        tmp_path / "a.h5", **{"g/x": (values((600, 50), "u1"), {}), "g/labels": (np.arange(600) // 60, {})}
    )
    found = command(path, batch_size=32, workers=[0], budget_s=0.3)
    fields = h5chunk.info(path).fields
    assert "g/x" in fields
    if command is h5chunk.tune:
        assert samples_of(found) == 600
        assert found.row(TODAY).effective_batch is not None  # by g/labels
    else:
        assert found.fields == fields


def test_advice_for_a_file_that_is_to_be_kept_is_for_other_readers(tmp_path, monkeypatch):
    monkeypatch.setattr("h5chunk.tools.tune.tune.no_gain_reason", lambda *_: "")
    monkeypatch.setattr(Search, "decide", lambda _: (TODAY, TODAY))
    text = str(h5chunk.tune(images_file(tmp_path / "a.h5", chunks=(N // 2, 1, 12, 12), compression="gzip"), **QUICK))
    assert text.startswith("Keep the file") and "\nadvice for other readers, such as plain h5py: sample_spans" in text
