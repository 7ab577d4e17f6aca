"""Work on a file in a child process: what it gives, and what becomes of a file on which HDF5 crashes or hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support import jobs
from support.faults import small, watch
from support.jobs import in_children_too
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.errors import FieldError, FileError, SourceError, WorkerError
from h5chunk.machine import warnings_filtered
from h5chunk.store.hdf5 import child, helper_start
from h5chunk.store.hdf5.child import Stuck, in_child, try_files
from h5chunk.tools.tune.tune import tune

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are watched on Linux only")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=np.arange(400, dtype="u1").reshape(40, 10), chunks=(4, 10))
        file["labels"] = np.arange(40)
    return tmp_path / "a.h5"


def test_a_loop_of_hdf5_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, loop_s=0.05, look_s=0.1)
    with pytest.raises(FileError, match=r"f\.h5: this file makes HDF5 loop endlessly: it is damaged"):
        in_child(Path("f.h5"), jobs.loop)


def test_waiting_is_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, loop_s=0.05, look_s=0.02)
    assert in_child(Path("f.h5"), jobs.sleep, 0.5) == "done"
    assert in_child(Path("f.h5"), jobs.read_much, 0.4) == "done"


def test_a_child_gives_what_it_has_and_says_what_went_wrong() -> None:
    heard: list[int] = []
    assert in_child(Path("f.h5"), jobs.talk, on_message=heard.append) == "done" and heard == [1, 2]
    with pytest.raises(SourceError, match="it is so"):
        in_child(Path("f.h5"), jobs.fail, on_message=heard.append)
    with pytest.raises(WorkerError, match="ZeroDivisionError: by nothing"):
        in_child(Path("f.h5"), jobs.break_down)


def test_children_do_their_work_here_and_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the folder where the first of them was started, nor with the variables of then."""
    first = in_child(Path("f.h5"), jobs.facts)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("H5CHUNK_TEST", "now")
    second = in_child(Path("f.h5"), jobs.facts)
    assert second["folder"] == str(tmp_path) and second["variable"] == "now"
    assert len({first["number"], second["number"], os.getpid()}) == 3


def ended(process: int) -> bool:
    for _ in range(100):
        if not Path(f"/proc/{process}").exists():
            return True
        time.sleep(0.05)
    return False


def test_a_child_and_the_helper_end_with_the_process() -> None:
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom support import jobs\n"
        "from h5chunk.store.hdf5.child import in_child\n"
        "def told(numbers):\n    print(*numbers, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "in_child(Path('f.h5'), jobs.say_number_and_sleep, on_message=told)\n"
    )
    folder = str(Path(jobs.__file__).parents[1])
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": folder},
    )
    assert all(ended(int(number)) for number in process.stdout.split()), process


def test_a_helper_that_was_killed_is_replaced(path: Path) -> None:
    numbers: list[Any] = []

    def note(both: Any) -> None:
        numbers.append(both)
        os.kill(both[1], signal.SIGKILL)

    with pytest.raises(FileError, match="crashes HDF5"):
        in_child(Path("f.h5"), jobs.say_number_and_sleep, on_message=note)
    assert ended(numbers[0][0])
    assert len(h5chunk.ChunkDataset(path)) == 40


SCRIPT = """
import sys, torch, h5chunk
from torch.utils.data import DataLoader
torch.rand(500, 500) @ torch.rand(500, 500)
loader = DataLoader(h5chunk.ChunkDataset(sys.argv[1]), batch_size=20, num_workers=1, multiprocessing_context="fork")
assert sum(len(labels) for _, labels in loader) == 40
"""


@pytest.mark.parametrize("streams", ["", "<&-", "<&- >&- 2>&-"])
def test_a_script_needs_no_guard_and_no_streams(path: Path, streams: str) -> None:
    """A script without a guard is read once, also from a pipe, and may have threads that wait for work."""
    script = "-" if not streams else path.with_name("script.py")
    if streams:
        Path(script).write_text(SCRIPT)
    command = ["bash", "-c", f'exec "{sys.executable}" "{script}" "{path}" {streams}']
    ran = subprocess.run(command, input=SCRIPT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def open_in(path: Path, results: Any) -> None:
    results.put(len(h5chunk.ChunkDataset(path)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_worker_may_open_files_too(path: Path) -> None:
    """Processes that are daemons may not start others by multiprocessing; and a fork must not use its parent's."""
    assert len(h5chunk.ChunkDataset(path)) == 40
    os.utime(path, (1, 1))
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=open_in, args=(path, results), daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [results.get() for _ in workers] == [40, 40]
    for worker in workers:
        worker.join()
    assert len(h5chunk.ChunkDataset(path)) == 40


def test_a_crash_is_an_error_that_names_the_file() -> None:
    what = r"f\.h5: this file crashes HDF5 \(SIGSEGV\): it is damaged, or too little memory is free"
    with pytest.raises(FileError, match=what):
        in_child(Path("f.h5"), jobs.crash)


def test_a_child_whose_connection_somebody_else_holds() -> None:
    """A process that it forked keeps the connection open, so that its end does not show the death."""
    started = time.monotonic()
    with pytest.raises(FileError, match="crashes HDF5"):
        in_child(Path("f.h5"), jobs.crash_with_heir)
    assert time.monotonic() - started < 4


def test_a_child_that_only_sleeps_is_ended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that does not answer; files are then opened without having been tried."""
    small(monkeypatch, idle_s=0.2, look_s=0.05)
    with pytest.raises(Stuck, match=r"f\.h5: a process that was started to read it made no progress"):
        in_child(Path("f.h5"), jobs.wait_forever)
    in_children_too(monkeypatch, "store.read.files.check_metadata", jobs.wait_forever)
    with pytest.warns(RuntimeWarning, match=r"a\.h5: .* The file is now opened without testing first"):
        assert len(h5chunk.ChunkDataset(path)) == 40


def test_threads_have_children_of_their_own(path: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(h5chunk.info(path).path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [str(path)] * 4


def test_where_nothing_can_be_started(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(helper_start, "_helper", None)
    monkeypatch.setattr(helper_start, "start_python", fail)
    with pytest.warns(RuntimeWarning, match=r"a\.h5: no process can be started to test files first .*unavailable"):
        assert len(h5chunk.ChunkDataset(path)) == 40


def test_a_child_takes_no_more_memory_than_metadata_need(path: Path) -> None:
    assert in_child(Path("f.h5"), jobs.take_little, path, 600 << 20) == 600 << 20


def test_filters_of_warnings_survive_threads_that_overlap() -> None:
    before, entered, leave = list(warnings.filters), threading.Event(), threading.Event()

    def stay() -> None:
        with warnings_filtered("ignore"):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    with warnings_filtered("ignore"):
        thread.start()
        assert entered.wait(10)
    leave.set()
    thread.join()
    assert warnings.filters == before
    package = Path(h5chunk.__file__).parent
    users = [module.name for module in package.rglob("*.py") if "catch_warnings(" in module.read_text()]
    assert users == ["machine.py"], "threads may only use warnings_filtered"


def test_the_limit_on_memory_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_children_too(monkeypatch, "store.hdf5.child.METADATA_BYTES", 40 << 20)
    in_children_too(monkeypatch, "store.hdf5.child.METADATA_RATIO", 1)
    with h5py.File(tmp_path / "many.h5", "w", libver="latest") as file:
        for number in range(5000):
            file[f"sample {number}/x"] = np.arange(4)
    for tool in h5chunk.info, h5chunk.verify:
        with pytest.raises(h5chunk.FileError, match=r"more memory than the .* very many objects"):
            tool(tmp_path / "many.h5")
        tool(tmp_path / "many.h5", trusted=True)


# ------------------------------------------------------------------------------------------------------ tools, readers

TOOLS = {
    "info": (h5chunk.info, "tools.info.info.read_header"),
    "verify": (h5chunk.verify, "tools.verify.verify.read_header"),
    "tune": (tune, "store.read.reader.read_header"),
    "dataset": (h5chunk.ChunkDataset, "store.read.reader.read_header"),
    "loader": (lambda path: h5chunk.ChunkLoader(path, 4), "store.read.reader.read_header"),
}


@pytest.mark.parametrize("name", TOOLS)
def test_tools_and_readers_survive(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look, where = TOOLS[name]
    in_children_too(monkeypatch, where, jobs.crash)
    with pytest.raises(FileError, match=r"a\.h5: this file crashes HDF5"):
        look(path)


def test_of_several_files_the_one_that_crashes_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [path, path.with_name("b.h5"), path.with_name("c.h5")]
    for each in paths[1:]:
        each.write_bytes(path.read_bytes())
    where = "store.read.files.check_metadata"
    in_children_too(monkeypatch, where, partial(jobs.crash_at, "b.h5"), before=True)
    with pytest.raises(FileError, match=r"b\.h5: this file crashes HDF5"):
        h5chunk.ChunkDataset(paths)


def test_a_folder_with_a_file_that_crashes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = path.with_name("b-00000-of-00001.h5")
    bad.write_bytes(path.read_bytes())
    in_children_too(monkeypatch, "store.hdf5.open.open_file", partial(jobs.crash_at, bad.name), before=True)
    report = h5chunk.verify(path.parent)
    assert [each.ok for each in report.files] == [True, False]
    assert "this file crashes HDF5" in str(report) and "this file crashes HDF5" in str(h5chunk.info(path.parent))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_beside_a_gpu_in_use(path: Path) -> None:
    """The child knows nothing of it."""
    kept = [torch.ones(1000, device="cuda")]
    kept.append(kept)  # garbage that is collected late
    for number in range(3):
        os.utime(path, (number, number))
        with h5chunk.ChunkLoader(path, 4, shuffle=False, device="cuda") as loader:
            images = torch.cat([batch[0] for batch in loader])
        assert images.cpu().numpy().sum() == np.arange(400, dtype="u1").sum() and kept[0].sum().item() == 1000


def count_children(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    modules: list[str] = []
    start = child.start_child
    monkeypatch.setattr(child, "start_child", lambda module: modules.append(module) or start(module))
    return modules


def test_a_file_is_tried_once_for_each_state_and_choice_of_fields(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = count_children(monkeypatch)
    for _ in range(2):
        h5chunk.ChunkDataset(path)
        h5chunk.ChunkLoader(path, 4)
    assert len(tries) == 1
    h5chunk.ChunkDataset(path).values("labels")
    assert len(tries) == 1
    h5chunk.ChunkDataset(path, fields=["labels"])
    assert len(tries) == 2
    os.utime(path, (1, 1))
    h5chunk.ChunkDataset(path)
    assert len(tries) == 3
    h5chunk.ChunkDataset(path, trusted=True, fields=["images"])
    assert len(tries) == 3


def test_a_file_that_is_refused_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = count_children(monkeypatch)
    for _ in range(2):
        with pytest.raises(FieldError, match="has no dataset 'x'"):
            h5chunk.ChunkDataset(path, fields=["x"])
    assert len(tries) == 2


def test_an_error_that_is_not_of_hdf5_is_left_to_the_caller(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = count_children(monkeypatch)
    for _ in range(2):
        assert try_files([path], jobs.break_down) == {}
    assert len(tries) == 2


AHEAD = """
import sys
import h5chunk
from h5chunk.store.hdf5 import helper_start
before = helper_start._helper
h5chunk.ChunkSampler, h5chunk.FileError
sampled = helper_start._helper
h5chunk.ChunkDataset
ahead = helper_start._helper
h5chunk.ChunkDataset(sys.argv[1])
print(before, sampled, ahead is helper_start._helper, ahead._process.poll())
"""


def test_the_helper_starts_while_modules_are_imported(path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", AHEAD, str(path)], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("None None True None\n", "")


def test_chunks_are_listed_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the child; and here again once the file has changed."""
    paths = [path, path.with_name("b.h5")]
    paths[1].write_bytes(path.read_bytes())
    listed = watch(monkeypatch, "store.hdf5.chunk_table._list_index")
    dataset = h5chunk.ChunkDataset(paths)
    assert np.array_equal(dataset.__getitems__([41])[0][0], np.arange(10, 20)) and not listed
    with h5py.File(path, "r+") as file:
        file["images"][0] = 7
    assert np.array_equal(h5chunk.ChunkDataset(path, trusted=True).__getitems__([0])[0][0], [7] * 10) and listed


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_do_not_try_again(path: Path, context: str) -> None:
    dataset = _Counting(h5chunk.ChunkDataset(path))
    loader = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context=context)
    assert [int(has_helper) for has_helper in loader] == [0] * 5


class _Counting:
    """Batches of a dataset, in whose place is whether the worker has started a helper."""

    def __init__(self, dataset: h5chunk.ChunkDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.dataset.__getitems__(indices)
        return [helper_start._helper is not None]


def test_an_error_does_not_bring_the_one_that_it_replaces() -> None:
    """Importing dask makes pickle keep the errors behind an error, of which some cannot be unpickled."""
    pytest.importorskip("tblib")
    with pytest.raises(FileError, match="is damaged"):
        in_child(Path("a.h5"), jobs.fail_oddly)
