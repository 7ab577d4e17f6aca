"""`h5chunk doctor` names what a loop waits for, and does not change its training."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from support.commands import check_error, run
from support.foreign import make_file
from support.scripts import load
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import h5chunk
from h5chunk.plan.cache import ChunkGrid, mean_hits
from h5chunk.tools.doctor.record import caller
from h5chunk.tools.doctor.watch import Watch
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


def test_a_loop_without_a_loader_is_not_said_to_wait_for_something_else_than_data():
    line, without = Line("step", "/a/t.py:3", 0.8, 1.0), {"kind": "none", "num_workers": 0, "made_at": ""}
    changes = {"waits": [0.0] * 40, "steps": [0.01] * 40, "fetches": [], "loader": without, "lines": [line]}
    found = diagnose(seen(**changes, gpu=gpu()))
    assert found.cause == "python" and found.verdict.startswith("Your data or your step: ") and not found.ladder
    found = diagnose(seen(**changes, samples=1.0, gpu=gpu(), in_torch=0.9))
    assert found.cause == "launches" and found.verdict.startswith("Not your data: ")
    assert math.isnan(diagnose(seen(**changes)).utilisation)


def reading_chunks(rest=0.0001, **changes):
    file = {
        "path": "/a/x.h5",
        "dataset": "/x",
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
    assert "h5chunk info /a/x-repacked.h5" in next(code for name, code in fixes.items() if name.startswith("repack"))
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
    facts = {
        "num_threads": 2,
        "path": "/a/x.h5",
        "resident": False,
        "fits": True,
        "form": "",
        "compressed": True,
        "echo": 1.0,
    }
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


ENDING = """
    import os, signal, sys
    from torch.utils.data import DataLoader

    class Samples(list):
        def __getitem__(self, i):
            if i == 170 and sys.argv[1] == "worker":
                raise ValueError("damaged sample")
            return super().__getitem__(i)

    if __name__ == "__main__":
        print("a line of the program")
        for number, batch in enumerate(DataLoader(Samples(range(200)), 4, num_workers=sys.argv[1] == "worker")):
            if number == 40 and sys.argv[1] == "raise":
                raise RuntimeError("the loss is nan")
            elif number == 40 and sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif number == 40 and sys.argv[1] != "worker":
                sys.exit(3 if sys.argv[1] == "exit" else "a text")
"""


def start(*arguments, **options):
    command = [sys.executable, "-m", "h5chunk", "doctor", *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize(
    ("how", "options", "status"),
    [
        ("raise", ["--quiet"], 1),
        ("exit", ["--assert-util", 0.0001], 3),
        ("text", ["--json"], 1),
        ("kill", [], 128 + signal.SIGKILL),
        ("worker", [], 1),
        ("raise", ["--seconds", "1ms"], 0),
    ],
)
def test_a_training_that_fails_makes_doctor_fail_unless_doctor_ended_it(tmp_path, how, options, status):
    (tmp_path / "train.py").write_text(textwrap.dedent(ENDING))
    process = start(*options, "--", sys.executable, "train.py", how, cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    if status:
        assert "failed: the command ended " in errors
    if how != "kill":  # otherwise neither its output nor its measurements are complete
        as_json = "--json" in options
        assert ("verdict" if as_json else "" if "--quiet" in options else "iteration") in output
        assert ("a line of the program" in output, "a line of the program" in errors) == (not as_json, as_json)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_training_and_the_processes_of_its_shell(tmp_path, number):
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(100)"
    handled = partial(signal.signal, number, signal.SIG_DFL)  # not ignored, as under nohup
    process = start("--", "bash", "-c", f'{sys.executable} -c "{code}"; sleep 100', cwd=tmp_path, preexec_fn=handled)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    with process:
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 128 + number
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    wait_until(
        lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    )  # no sleep of 100 s


def test_a_training_may_handle_the_signal_that_doctor_forwards(tmp_path):
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (open("saved", "w").close(), sys.exit(0)))
        open("ready", "w").close()
        time.sleep(100)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(code))
    process = start("--", sys.executable, "train.py", cwd=tmp_path)
    wait_until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and (tmp_path / "saved").exists() and "imported torch" in output


def wait_until(is_true):
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_page_that_cannot_be_written_is_refused_before_the_training(tmp_path):
    command = ["--", sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    check_error(run("doctor", "--html", tmp_path / "no" / "why.html", *command), "no does not exist: create it first")
    check_error(run("doctor", "--html", tmp_path, *command), "is a folder: use the name of a file")
    assert run("doctor", "--epochs", 0, *command).exit_code == 2
    assert not (tmp_path / "ran").exists()
    with pytest.raises(h5chunk.OptionError, match="epochs is -1: pass a whole number, at least 1"):
        h5chunk.doctor(command=["x"], epochs=-1)


def test_the_report_is_printed_even_if_the_page_cannot_be_written_at_the_end(tmp_path):
    (tmp_path / "pages").mkdir()
    code = f"import shutil; shutil.rmtree({str(tmp_path / 'pages')!r})"
    result = run("doctor", "--html", tmp_path / "pages" / "why.html", "--", sys.executable, "-c", code)
    assert result.exit_code == 1 and "cannot be written" in result.stderr and "has imported torch" in result.stdout


def fit(training, validation, epochs=3):
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(epochs):
        for (batch,) in training:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
        for (batch,) in validation:
            model(batch)


def loader_of(num_samples, batch_size):
    return DataLoader(TensorDataset(torch.zeros(num_samples, 10)), batch_size)


@pytest.mark.parametrize("sizes", [(640, 64, 2560, 128), (640, 64, 640, 64)])
def test_validation_is_not_training_even_if_its_iterators_have_the_same_addresses(sizes):
    with h5chunk.doctor(object()) as report:  # loaders that are made at one line and are alike have one number
        fit(loader_of(*sizes[:2]), loader_of(*sizes[2:]))
    assert report.seen.samples == 64 and len(report.seen.steps) <= 3 * 10
    assert report.seen.elsewhere > 0.1


def test_a_loop_without_a_loader_is_measured_by_the_steps_of_its_optimizer(tmp_path):
    code = """
        import time, torch
        model = torch.nn.Linear(10, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(60):
            time.sleep(0.02)
            optimizer.zero_grad()
            model(torch.zeros(4, 10)).mean().backward()
            optimizer.step()
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(code))
    process = start("--epochs", 1, "--html", "why.html", "--", sys.executable, "train.py", cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "neither a torch DataLoader nor a ChunkLoader" in errors and "--epochs has no effect" in errors
    assert "steps of the optimizer per second" in output and "train.py:6 `time.sleep(0.02)`" in output
    assert "steps/s" in (tmp_path / "why.html").read_text()
    process = start("--assert-util", 0.1, "--", sys.executable, "train.py", cwd=tmp_path)
    assert "utilisation is unknown" in process.communicate(timeout=120)[1] and process.returncode == 1


def test_the_remedy_for_a_loop_without_a_loader_works():
    class Batches(IterableDataset):
        def __iter__(self):
            for _ in range(40):
                time.sleep(0.002)
                yield torch.zeros(8, 10)

    loader = DataLoader(Batches(), batch_size=None)
    with h5chunk.doctor(loader) as report:
        for _ in loader:
            pass
    assert report.diagnosis.is_data and report.seen.samples == 8


def test_what_was_not_seen_is_said(tmp_path):
    reports = [
        run("doctor", "--", sys.executable, *options, "-c", code)
        for options, code in [(["-I"], "pass"), ([], "pass"), ([], "import torch")]
    ]
    assert [report.exit_code for report in reports] == [0, 0, 0]
    for report, text in zip(
        reports, ["without the options -I", "has imported torch", "no loop over a torch DataLoader"], strict=True
    ):
        assert text in report.stdout
    code = "import os; from torch.utils.data import DataLoader\nfor i in DataLoader(range(9)): pass"
    code += "\nos.kill(os.getpid(), 9)"
    assert "killed before" in run("doctor", "--", sys.executable, "-c", code).stdout
    with h5chunk.doctor(loader := DataLoader(Quick(), 100)) as report:
        list(loader)
    assert "ended after 4 iterations" in str(report) and report.diagnosis is None


FORKS = """
    import multiprocessing, os, time, torch
    from torch.utils.data import DataLoader

    def train(batch_size, count):
        for batch in DataLoader(torch.arange(count * batch_size), batch_size):
            time.sleep(0.01)

    train(4, 100)
    process = multiprocessing.get_context("fork").Process(target=train, args=(64, 90))
    process.start()
    process.join()
    if not os.fork():
        train(512, 90)
        os._exit(0)
    os.wait()
"""


def test_forks_are_measured_apart(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(FORKS))
    seen = json.loads(run("doctor", "--json", "--", sys.executable, tmp_path / "train.py").stdout)["seen"]
    assert seen["samples"] in (4, 64, 512) and len(seen["steps"]) <= 100


def test_a_command_may_run_a_python_without_h5chunk(capfd):
    code = "import subprocess, sys; print(subprocess.run([sys.executable, '-S', '-c', CODE], stderr=-1).stderr)"
    code = code.replace("CODE", "'import sitecustomize'")
    found = run("doctor", "--", sys.executable, "-c", code)
    assert found.exit_code == 0 and "b''" in capfd.readouterr().out


def test_the_loop_is_no_part_of_making_a_batch():
    with h5chunk.doctor(loader := DataLoader(TensorDataset(torch.zeros(80_000, 4)), 50)) as report:
        for _ in loader:
            pass
    places = [line.place for line in report.seen.lines if line.stage != "step"]
    assert not any(places)


class NoLength(IterableDataset):
    def __iter__(self):
        return iter(range(200))

    def __len__(self):
        raise TypeError("no length")

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


class Hostile(list):
    def __getitem__(self, index):
        raise RuntimeError("not by index")

    def __bool__(self):
        raise RuntimeError("neither")


class Unruly(DataLoader):
    def __iter__(self):
        return (batch for batch in super().__iter__())

    @property
    def batch_size(self):
        raise RuntimeError("no batch size")

    @batch_size.setter
    def batch_size(self, value):
        pass


def endless(samples):
    samples = list(samples)
    samples[0] = samples
    return samples


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(NoLength(), 4),
        lambda: DataLoader(Quick(), 4, collate_fn=Hostile),
        lambda: DataLoader(Quick(), 4, collate_fn=endless),
        lambda: Unruly(Quick(), 4),
    ],
)
def test_objects_that_raise_are_trained_with_as_without_doctor(make):
    with h5chunk.doctor(loader := make()) as report:
        count = sum(1 for _ in loader)
    assert count == sum(1 for _ in make()) and report.verdict


@pytest.mark.parametrize(("method", "hook"), [("begins_epoch", "iter"), ("receives", "next"), ("number_of", "next")])
def test_an_error_in_a_hook_does_not_reach_the_training_and_is_reported(monkeypatch, method, hook):
    def fail(*_):
        raise ValueError("in a hook")

    with h5chunk.doctor(loader := DataLoader(Quick(), 10)) as report:
        assert sum(1 for _ in loader) == 40
        monkeypatch.setattr(Watch, method, fail)
        assert sum(1 for _ in loader) == 40
    assert "missing or incomplete" in str(report) and f"{hook} raised ValueError" in str(report)


def test_only_the_dataset_that_is_read_is_examined(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("read", data=np.zeros((400, 400), "f8"), chunks=(10, 400))
        file.create_dataset("large", data=np.zeros((800, 800), "f8"), chunks=(8, 800))

    class Stored(Quick):
        def __getitem__(self, i):
            return file["read"][i]

    with h5py.File(path) as file:
        monkeypatch.setattr(h5py.Group, "visititems", None)
        with h5chunk.doctor(loader := DataLoader(Stored(), 10)) as report:
            list(loader)
        assert h5py.h5f.get_obj_count(file.id, h5py.h5f.OBJ_DATASET) == 0
    assert report.seen.files[0]["path"] == str(path) and report.seen.files[0]["chunks"] == [10, 400]


def test_the_commands_of_fixes_run_as_they_are_printed(tmp_path):
    path = tmp_path / "a b.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("g/x", data=np.zeros((400, 4000), "u1"), chunks=(400, 4000), compression="gzip")

    class Stored(Quick):
        def __getitem__(self, i):
            return file["g/x"][i]

    with h5py.File(path, rdcc_nbytes=0) as file, h5chunk.doctor(loader := DataLoader(Stored(), 10)) as report:
        list(loader)
    command, cache = (fix.code for fix in report.diagnosis.fixes if fix.code.startswith(("h5chunk", "h5py")))
    assert f"\n     {command}\n" in f"{report}\n"
    for part in command.split(" && "):
        assert run(*shlex.split(part)[1:]).exit_code == 0
    with eval(cache) as file:
        assert file["g/x"].shape == (400, 4000)
    with h5py.File(tmp_path / "a b-repacked.h5") as file:
        assert file["g/x"].chunks[0] < 400
