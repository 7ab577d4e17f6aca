"""Work on a file in a child process: what it gives, and what becomes of a file on which HDF5 crashes or hangs."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.faults import small, watch
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.errors import FieldError, FileError, SourceError, WorkerError
from h5chunk.machine import warnings_filtered
from h5chunk.store.hdf5.child import Stuck, in_child, limited_memory, try_files
from h5chunk.tools.tune.tune import tune

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux only")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=np.arange(400, dtype="u1").reshape(40, 10), chunks=(4, 10))
        file["labels"] = np.arange(40)
    return tmp_path / "a.h5"


def crash(*_: object, **__: object) -> None:
    faulthandler.disable()  # pytest's
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_loop_of_hdf5_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, loop_s=0.05, look_s=0.1)

    def run(_: object) -> None:
        while True:
            pass

    with pytest.raises(FileError, match=r"f\.h5: this file makes HDF5 loop endlessly: it is damaged"):
        in_child(run, lambda: "f.h5")


def test_waiting_is_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, loop_s=0.05, look_s=0.02)
    assert in_child(lambda _: time.sleep(0.5) or "done", lambda: "f.h5") == "done"

    def read(_: object) -> str:
        until = time.process_time() + 0.4
        while time.process_time() < until:
            sum(Path("/proc/self/stat").read_bytes() * 50)
        return "done"

    assert in_child(read, lambda: "f.h5") == "done"


def children() -> set[str]:
    """Processes of this one; other tests may have left a server of workers among them."""
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


def test_a_child_gives_what_it_has_and_says_what_went_wrong() -> None:
    heard: list[int] = []
    before = children()

    def work(say: Callable[[int], None]) -> str:
        say(1)
        say(2)
        return "done"

    assert in_child(work, lambda: "f.h5", heard.append) == "done" and heard == [1, 2]

    def fail(say: Callable[[int], None]) -> None:
        raise SourceError("it is so")

    def break_down(say: Callable[[int], None]) -> None:
        raise ZeroDivisionError("by nothing")

    with pytest.raises(SourceError, match="it is so"):
        in_child(fail, lambda: "f.h5", heard.append)
    with pytest.raises(WorkerError, match="ZeroDivisionError: by nothing"):
        in_child(break_down, lambda: "f.h5", heard.append)
    assert children() <= before


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\nfrom h5chunk.store.hdf5.child import in_child\n"
        "def told(pid):\n    print(pid, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "in_child(lambda say: say(os.getpid()) or time.sleep(60), lambda: 'f.h5', told)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    for _ in range(100):
        if not Path(f"/proc/{int(process.stdout)}").exists():
            return
        time.sleep(0.05)
    pytest.fail("the child lives on")


def test_a_crash_is_an_error_that_names_the_file() -> None:
    with pytest.raises(
        FileError, match=r"f\.h5: this file crashes HDF5 \(SIGSEGV\): it is damaged, or too little memory is free"
    ):
        in_child(crash, lambda: "f.h5")


def test_a_child_whose_pipe_somebody_else_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that another thread forked just then keeps the pipe open, so that its end does not show the death."""
    small(monkeypatch, look_s=0.05)

    def work(_: object) -> None:
        if not os.fork():
            time.sleep(5)
            os._exit(0)
        crash()

    started = time.monotonic()
    with pytest.raises(FileError, match="crashes HDF5"):
        in_child(work, lambda: "f.h5")
    assert time.monotonic() - started < 4


def test_a_child_that_only_sleeps_is_ended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a lock that another thread held when it was forked; files are then opened without having been tried."""
    small(monkeypatch, idle_s=0.2, look_s=0.05)
    with pytest.raises(Stuck, match=r"f\.h5: a process that was started to read it made no progress"):
        in_child(lambda _: threading.Lock().acquire() and threading.Event().wait(), lambda: "f.h5")
    watch(monkeypatch, "touch file", lambda _: threading.Event().wait())
    with pytest.warns(RuntimeWarning, match=r"a\.h5: .* The file is now opened without testing first"):
        assert len(h5chunk.ChunkDataset(path)) == 40


def test_another_thread_that_reads_is_no_deadlock(path: Path) -> None:
    """HDF5's lock is held while the process forks, so that no thread is inside HDF5 in the child."""
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            with h5py.File(path) as file:
                file["images"][:]

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert in_child(lambda _: h5chunk.info(path).path, lambda: "f.h5") == str(path)
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_where_nothing_can_be_forked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    assert in_child(lambda say: say(1) or os.getpid(), lambda: "f.h5") == os.getpid()
    assert len(h5chunk.ChunkDataset(path)) == 40


def test_a_child_takes_no_more_memory_than_metadata_need(path: Path) -> None:
    def take(_: object) -> int:
        return len(bytearray(600 << 20)) >> 20

    def take_little(_: object) -> int:
        with (
            pytest.raises(h5chunk.FileError, match=r"more memory than the \d+,\d+,\d+ bytes \(25"),
            limited_memory(path),
        ):
            take(_)
        return take(_)

    assert in_child(take_little, lambda: "f.h5") == 600


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
    monkeypatch.setattr("h5chunk.store.hdf5.child.METADATA_BYTES", 48 << 20)
    monkeypatch.setattr("h5chunk.store.hdf5.child.METADATA_RATIO", 1)
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
    watch(monkeypatch, where, crash)
    with pytest.raises(FileError, match=r"a\.h5: this file crashes HDF5"):
        look(path)


def test_of_several_files_the_one_that_crashes_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [path, path.with_name("b.h5"), path.with_name("c.h5")]
    for each in paths[1:]:
        each.write_bytes(path.read_bytes())
    watch(monkeypatch, "touch file", lambda reader: reader.path.name == "b.h5" and crash())
    with pytest.raises(FileError, match=r"b\.h5: this file crashes HDF5"):
        h5chunk.ChunkDataset(paths)


def test_a_folder_with_a_file_that_crashes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = path.with_name("b-00000-of-00001.h5")
    bad.write_bytes(path.read_bytes())
    watch(monkeypatch, "store.hdf5.open.open_file", lambda name, **_: Path(name) == bad and crash())
    report = h5chunk.verify(path.parent)
    assert [each.ok for each in report.files] == [True, False]
    assert "this file crashes HDF5" in str(report) and "this file crashes HDF5" in str(h5chunk.info(path.parent))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_beside_a_gpu_in_use(path: Path) -> None:
    """The child has inherited the state of CUDA, and leaves it alone."""
    kept = [torch.ones(1000, device="cuda")]
    kept.append(kept)  # garbage that is collected late
    for number in range(3):
        os.utime(path, (number, number))
        with h5chunk.ChunkLoader(path, 4, shuffle=False, device="cuda") as loader:
            images = torch.cat([batch[0] for batch in loader])
        assert images.cpu().numpy().sum() == np.arange(400, dtype="u1").sum() and kept[0].sum().item() == 1000


def count_forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    forks: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(os.getpid()) or fork())
    return forks


def test_a_file_is_tried_once_for_each_state_and_choice_of_fields(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks = count_forks(monkeypatch)
    for _ in range(2):
        h5chunk.ChunkDataset(path)
        h5chunk.ChunkLoader(path, 4)
    assert len(forks) == 1
    h5chunk.ChunkDataset(path).values("labels")
    assert len(forks) == 1
    h5chunk.ChunkDataset(path, fields=["labels"])
    assert len(forks) == 2
    os.utime(path, (1, 1))
    h5chunk.ChunkDataset(path)
    assert len(forks) == 3
    h5chunk.ChunkDataset(path, trusted=True, fields=["images"])
    assert len(forks) == 3


def test_a_file_that_is_refused_is_tried_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks = count_forks(monkeypatch)
    for _ in range(2):
        with pytest.raises(FieldError, match="has no dataset 'x'"):
            h5chunk.ChunkDataset(path, fields=["x"])
    assert len(forks) == 2


def test_an_error_that_is_not_of_hdf5_is_raised_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("by nothing")

    forks = count_forks(monkeypatch)
    for _ in range(2):
        try_files([path], fail, "")
    assert len(forks) == 2


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_do_not_try_again(path: Path, context: str) -> None:
    dataset = _Counting(h5chunk.ChunkDataset(path))
    loader = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context=context)
    assert [int(forks) for forks in loader] == [0] * 5


class _Counting:
    """Batches of a dataset, in whose place are the forks of the worker so far."""

    def __init__(self, dataset: h5chunk.ChunkDataset) -> None:
        self.dataset, self.forks = dataset, None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[int]:
        if self.forks is None:
            self.forks, fork = [], os.fork
            os.fork = lambda: self.forks.append(1) or fork()
        self.dataset.__getitems__(indices)
        return [len(self.forks)]


def test_an_error_does_not_bring_the_one_that_it_replaces(monkeypatch):
    """Importing dask makes pickle keep the errors behind an error, of which some cannot be unpickled."""
    pytest.importorskip("tblib.pickling_support").install()

    class OddError(Exception):
        def __init__(self, function: str, code: int) -> None:
            super().__init__(f"{function}: {code}")

    OddError.__qualname__ = "OddError"
    monkeypatch.setattr(sys.modules[__name__], "OddError", OddError, raising=False)

    def fail(say):
        try:
            raise OddError("decode", 1)
        except OddError as error:
            raise FileError("a.h5: is damaged") from error

    with pytest.raises(FileError, match="is damaged"):
        in_child(fail, lambda: "a.h5")


def test_a_child_collects_no_garbage_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even right after the fork: it may own GPU memory, which aborts the child when it is freed."""
    parent, fork = os.getpid(), os.fork

    class Owner:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if os.getpid() != parent:
                crash()

    def fork_and_allocate() -> int:
        Owner()
        child = fork()
        if not child:
            assert [[] for _ in range(100_000)]  # enough for a collection
        return child

    monkeypatch.setattr(os, "fork", fork_and_allocate)
    assert in_child(lambda _: sum(1 for _ in [[] for _ in range(100_000)]), lambda: "f.h5") == 100_000
    assert gc.isenabled()
