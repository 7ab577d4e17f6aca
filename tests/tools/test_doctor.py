"""`h5chunk doctor` names what a loop waits for, and does not change its training."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.commands import check_error, run
from support.foreign import make_file
from support.scripts import load
from torch.utils.data import DataLoader, Dataset

import h5chunk
from h5chunk.plan.cache import ChunkGrid, mean_hits
from h5chunk.tools.doctor.record import caller
from h5chunk.tools.model.diagnosis import diagnose
from h5chunk.tools.model.seen import Gpu, Line, Seen

SCRIPT = """
    import sys, time, torch
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 160

        def __getitem__(self, i):
            time.sleep(float(sys.argv[1]))
            return torch.full((8,), float(i)), i % 2

    if __name__ == "__main__":
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters())
        for epoch in range(2):  # each with a loader of its own
            for images, labels in DataLoader(Slow(), 8, shuffle=True, num_workers=int(sys.argv[2])):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
        torch.save(model.state_dict(), sys.argv[3])
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_a_command_is_diagnosed_and_trains_as_without(script, tmp_path):
    weights, workers = [], 1
    for prefix in (["doctor", "--json", "--"], []):
        command = [*prefix, sys.executable, script, "0.003", workers, tmp_path / "weights.pt"]
        if prefix:
            result = run(*command)
            assert result.exit_code == 0, result.output
            found = json.loads(result.stdout)
        else:
            subprocess.run([*map(str, command)], check=True, timeout=120)
        weights.append(torch.load(tmp_path / "weights.pt"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    diagnosis = found["diagnosis"]
    assert diagnosis["verdict"] and found["seen"]["loader"]["num_workers"] == workers
    assert found["seen"]["elsewhere"] == 0  # the loader of the second epoch is not another one
    assert found["seen"]["stages"]["transform"] > 8 * 0.003 / 2  # seconds that a batch sleeps
    assert any("time.sleep(float(sys.argv[1]))" in line["code"] for line in found["seen"]["lines"])


class Quick(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        return i


def test_a_loop_of_this_process_is_watched_until_the_block_ends():
    loader, before = DataLoader(Quick(), 10), DataLoader.__init__
    with h5chunk.doctor(loader) as report:
        for _ in loader:
            torch.randn(300, 300) @ torch.randn(300, 300)
    assert DataLoader.__init__ is before
    assert report.seen.samples == 10 and 0 < report.utilisation <= 1
    assert "samples/s" in str(report) and report.verdict in str(report)
    kept = weakref.ref(loader)
    del loader
    assert kept() is None  # the report does not keep the data in memory


def test_wrong_calls_say_what_is_missing(script):
    check_error(run("doctor"), "the command is missing")
    check_error(run("doctor", "--", "/no/such/program"), "cannot be run")
    check_error(run("doctor", "--assert-util", "2", "--", "x"), "assert_util is 2.0")
    with pytest.raises(h5chunk.OptionError, match="cannot be combined"):
        h5chunk.doctor(DataLoader(Quick()), check=True)
    with pytest.raises(h5chunk.OptionError, match="a step cannot be combined"):
        h5chunk.doctor(step=print, command=["x"])


def test_the_page_needs_no_other_file_and_low_utilisation_is_an_error(tmp_path):
    page = tmp_path / "why.html"
    loader = DataLoader(Quick(), 10)
    with (
        pytest.raises(h5chunk.UtilisationError, match=r"below 1\.0") as raised,
        h5chunk.doctor(loader, html=page, assert_util=1.0),
    ):
        for _ in loader:
            torch.randn(100, 100) @ torch.randn(100, 100)
    text = page.read_text()
    assert raised.value.report.verdict in html.unescape(text) and "<svg" in text
    assert not re.search(r"(src|href)=|@import|url\(", text)


def test_a_planted_fault_is_named():
    bench_doctor = load("bench_doctor")
    fault = next(fault for fault in bench_doctor.FAULTS if fault.name == "unbalanced workers")
    found = bench_doctor.watched(fault.make, None, 0.3).diagnosis
    assert found.cause in fault.causes, found.verdict


def seen(**changes):
    """A loop of one worker: 10 ms of fetching, of which 9 are decoding, and 2 ms of training."""
    stages = {"reading": 0.0, "decoding": 0.009, "transform": 0.0, "lock": 0.0, "collate": 0.001}
    facts = {
        "samples": 32.0,
        "waits": [0.008] * 40,
        "steps": [0.002] * 40,
        "fetches": [0.01] * 40,
        "stages": stages,
        "lines": [Line("decoding", "/a/train.py:7", 0.9, 1.0, "decode(path)")],
        "loader": {"kind": "DataLoader", "num_workers": 1, "made_at": "/a/train.py:20"},
        "batch": {"tensors": 2},
        "cores": 16,
        "threads": 8,
        "fetch_cpu": 0.01,
        "step_cpu": 0.002,
    }
    return Seen(**{**facts, **changes})


def test_the_verdict_blames_decoding_and_more_workers_gain_until_the_step_is_the_limit():
    found = diagnose(seen())
    assert found.is_data and found.cause == "decoding" and "train.py:7" in found.verdict
    workers = next(fix for fix in found.fixes if fix.name.startswith("num_workers"))
    assert workers.apply == {"loader": {"num_workers": 8}} and "train.py:20" in workers.code
    assert workers.gain.value == pytest.approx(0.01 / 0.0023, rel=0.05) and workers.gain.low <= workers.gain.value
    rates = [rung.rate for rung in found.ladder]
    assert rates == sorted(rates, reverse=True) and rates[0] == pytest.approx(32 / 0.002)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"waits": [0.0001] * 40, "fetches": [0.001] * 40}, "none"),
        ({"waits": [0.008] * 40, "fetches": [0.001] * 40, "other_cores": 12.0}, "other processes"),
        ({"waits": [0.0001] * 40, "fetches": [0.001] * 40, "elsewhere": 0.4}, "validation"),
        ({"waits": [0.0001] * 40, "fetches": [0.001] * 40, "threads": 64, "step_delay": 0.001}, "oversubscription"),
        (
            {"waits": [0.001] * 40, "steps": [0.0003] * 40, "fetches": [0.0002] * 40, "fetch_gap": 0.0008},
            "small batches",
        ),
        ({"waits": [0.0001] * 40, "memory_stall": 0.3}, "memory"),
        ({"waits": [0.0001] * 40, "ranks": [(0.01, 0.006), (0.01, 0.001)]}, "straggler"),
        ({"waits": [0.0001] * 40, "threads": 64, "step_cpu": 0.02}, "oversubscription"),
        ({"waits": [0.0001] * 40, "held": 0.4, "holder": "log (train.py:9)"}, "gil"),
        ({"waits": [0.008] * 40, "fetches": [0.001] * 40, "held": 0.4, "holder": "log (train.py:9)"}, "gil"),
    ],
)
def test_data_is_not_blamed_if_it_is_not_the_cause(changes, cause):
    found = diagnose(seen(**changes))
    assert (found.cause, found.is_data) == (cause, False), found.verdict


def test_workers_that_wait_for_a_lock_get_no_advice_to_add_workers():
    stages = {"reading": 0.0, "decoding": 0.004, "transform": 0.0, "lock": 0.006, "collate": 0.0}
    loader = {"kind": "DataLoader", "num_workers": 2, "made_at": ""}
    found = diagnose(
        seen(stages=stages, loader=loader, waits=[0.003] * 40, lines=[Line("lock", "/a/t.py:3", 0.6, 0.0)])
    )
    assert found.cause == "lock" and not any(fix.name.startswith("num_workers") for fix in found.fixes)


def gpu(busy=0.001, **changes):
    facts = {"busy": busy, "idle": 0.0, "copy": 0.0, "kernels": 100.0, "blocked": 0.0, "is_profiled": True}
    return Gpu(**{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "cause", "gain"),
    [
        ({"gpu": gpu(0.0097)}, "none", None),
        ({"gpu": gpu(), "in_torch": 0.9}, "launches", 0.01 / 0.0012),  # 2 us between two kernels
        ({"gpu": gpu(0.004, blocked=0.004)}, "synchronisation", 0.01 / 0.006),
        ({"gpu": gpu(), "optimizer": 0.005}, "optimizer", 0.01 / 0.0055),
        ({"gpu": gpu(), "lines": [Line("step", "/a/t.py:3", 0.8, 1.0)]}, "python", 5.0),
        ({"gpu": gpu(0.0097, slow_clocks="it is too hot", clock=0.5)}, "clocks", None),
        (
            {"gpu": gpu(0.009, copy=0.006), "copy": 0.007, "copy_bytes": 3e6, "pageable_bytes": 3e6},
            "copy",
            0.01 / 0.003275,
        ),
    ],
)
def test_an_idle_gpu_is_explained_by_what_python_did(changes, cause, gain):
    waits, steps = [0.0] * 40, [0.01] * 40
    found = diagnose(seen(**{"waits": waits, "steps": steps, "fetches": [], "loader": {}, "lines": [], **changes}))
    assert found.cause == cause, found.verdict
    if gain is None:
        assert not found.fixes
    else:
        assert found.fixes[0].gain.value == pytest.approx(gain, rel=0.02)


def reading_chunks(rest=0.0001, **changes):
    file = {
        "path": "/a/x.h5",
        "bytes": 1 << 24,
        "shape": [2000, 32, 32, 3],
        "chunks": [100, 32, 32, 3],
        "itemsize": 1,
        "filtered": True,
        "cache": [521, 1 << 16],
    }
    stages = {"reading": 0.01 - rest, "decoding": 0.0, "transform": 0.0, "lock": 0.0, "collate": rest}
    return diagnose(seen(**{"stages": stages, "files": [file], "h5_reads": 32.0, "lines": [], **changes}))


def test_what_is_left_of_a_fetch_is_faster_if_large_reads_no_longer_empty_the_caches():
    found = (reading_chunks(0.002, warm=warm, steps=[1e-5] * 40) for warm in (1.0, 0.25))
    gains = [fix.gain.value for diagnosis in found for fix in diagnosis.fixes if fix.name.startswith("repack")]
    assert gains == pytest.approx([0.01 / 0.00216, 0.01 / 0.00086], rel=0.15)


def test_a_chunk_cache_is_advised_by_the_bytes_that_it_saves():
    found = reading_chunks(cold_s=0.1, read_bytes=1e6)
    assert found.cause == "reading" and "100 times the bytes" in found.verdict
    cache = next(fix for fix in found.fixes if "cache" in fix.apply)
    assert cache.apply == {"cache": [20, 21 * 307_200]} and cache.gain.value > 3
    assert found.ladder[-1].name == "+ reading from the disk" and found.ladder[-1].rate < found.ladder[-2].rate


def test_a_line_that_reads_bad_chunks_is_cured_by_repacking_and_opened_as_info_says():
    line = Line("reading", "/a/train.py:7", 0.9, 1.0, "file['x'][i]")
    fixes = {fix.name: fix.code for fix in reading_chunks(lines=[line]).fixes}
    assert "h5chunk info repacked.h5" in next(code for name, code in fixes.items() if name.startswith("repack"))
    assert not any("train.py" in name for name in fixes)


@pytest.mark.parametrize(("slots", "nbytes", "shuffled"), [(521, 3200, True), (521, 3200, False), (7, 8000, True)])
def test_hits_of_the_chunk_cache_are_those_of_the_exact_model(slots, nbytes, shuffled):
    exact = load("hdf5_cache")
    grid = ChunkGrid((1000, 8), (100, 8), 1)
    order = np.random.default_rng(0).integers(0, 1000, 6000) if shuffled else np.arange(1000)
    replay = exact.ChunkCache(grid, (slots, nbytes, 0.75)).access(exact.sample_accesses(grid, order))
    assert mean_hits(grid, slots, nbytes, shuffled) == pytest.approx(replay.hits / len(order), abs=0.03)


def test_a_step_that_is_given_is_timed_and_leaves_the_random_numbers_alone():
    loader, states = DataLoader(Quick(), 10), []

    def step(batch):
        torch.randn(300, 300) @ torch.randn(300, 300)

    with h5chunk.doctor(loader, step) as report:
        for batch in loader:
            step(batch)
        states.append(torch.get_rng_state())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert report.seen.cached_step[1] > 0 and report.diagnosis.ladder[0].name == "the step on one cached batch"


@pytest.mark.parametrize("resident", [False, True])
def test_stages_of_a_chunk_loader_are_measured(tmp_path, resident):
    images = np.zeros((800, 3, 32, 32), "u1"), {"chunks": (8, 3, 32, 32), "compression": "gzip"}
    path = make_file(tmp_path / "a.h5", images=images)
    loader = h5chunk.ChunkLoader(h5chunk.ChunkDataset(path), 16, resident=resident)
    with h5chunk.doctor(loader) as report:
        for _ in range(3):
            for _ in loader:
                torch.randn(200, 200) @ torch.randn(200, 200)
    assert report.seen.loader["kind"] == "ChunkLoader" and report.seen.loader["compressed"]
    stages = report.seen.stages
    assert (stages["reading"] > 0, stages["decoding"] > 0) == (not resident, not resident) and stages["gathering"] > 0
    assert "reads and decodes in " in str(report)


def test_threads_of_a_chunk_loader_that_decode_too_slowly_are_the_limit_until_data_is_used_more_often():
    stages = {"reading": 0.002, "decoding": 0.018, "gathering": 0.0005, "copying": 0.0, "waiting": 0.0075}
    facts = {"num_threads": 2, "resident": False, "fits": True, "form": "", "compressed": True, "echo": 1.0}
    found = diagnose(seen(stages=stages, fetches=[], lines=[], loader={"kind": "ChunkLoader", "made_at": "", **facts}))
    assert found.cause == "decoding" and "90% of the work of the loader's threads (2)" in found.verdict
    gains = {fix.name: fix.gain.value for fix in found.fixes}
    expected = {"resident=True": 4.0, "no compression": 4.0, "num_threads=16": 4.0, "echo=4": 4.0}
    assert gains == pytest.approx(expected, rel=0.01)
    assert found.fixes[0].apply["chunk_loader"] and found.ladder[-1].alone == pytest.approx(32 * 2 / 0.02)


def test_the_thread_that_holds_the_lock_is_named():
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            sum(range(500_000))  # some milliseconds in C, without releasing the lock

    threading.Thread(target=spin, name="my log").start()
    loader = DataLoader(Quick(), 20)
    with h5chunk.doctor(loader) as report:
        for _ in range(50):  # epochs; on busy cores, few samples show which thread it is
            for _ in loader:
                torch.randn(100, 100) @ torch.randn(100, 100)
            if any(path.read_text().count('["held", "my log"') > 2 for path in Path(report._folder.name).iterdir()):
                break
    stop.set()
    assert report.seen.held > 0 and report.seen.holder.startswith("my log (test_doctor.py:")


def test_a_frame_without_a_line_counts_as_its_function():
    code = SimpleNamespace(co_filename="/a/train.py", co_firstlineno=7)
    assert caller(SimpleNamespace(f_code=code, f_lineno=None, f_back=None)) == "/a/train.py:7"
