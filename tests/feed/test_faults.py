"""What goes wrong while data is read is an error, soon, and leaves neither threads nor processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults import watch
from support.foreign import make_file, values
from support.leftovers import WAIT_S, end_workers, nothing_is_left, reading_threads, workers_of
from support.loaders import loader_by
from support.matrices import random_matrix, write
from support.orders import ordered
from torch.utils.data import DataLoader

from h5chunk import native
from h5chunk.errors import FileError, H5ChunkError, OptionError, WorkerError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.plan.order import Order, Window
from h5chunk.transforms import Csr, Dense

__all__ = ["nothing_is_left"]

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

N, SHAPE = 600, (3, 40, 50)  # 3.6 MB: what is read ahead is a part of it
CHANGED = r"a\.h5: (the file was (replaced or changed|removed)|cannot be opened: No such file|field .*cut short)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_images(tmp_path / "a.h5")


def write_images(path: Path, seed: int = 0) -> Path:
    images = values((N, *SHAPE), np.uint8, seed)
    return make_file(path, images=(images, {"chunks": (8, *SHAPE)}), labels=(np.arange(N), {"chunks": (8,)}))


def replace(path: Path) -> None:
    """By another file of the same size and shape, as a tool does that writes and renames."""
    write_images(path.with_name("new.h5"), seed=1).replace(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(100_000))


WAYS: dict[str, Callable[[Path], Any]] = {
    "direct": lambda path: loader_by(**ordered(path, 16, window_chunks=1), reader="direct", num_threads=2),
    "h5py": lambda path: loader_by(**ordered(path, 16, window_chunks=1), reader="h5py"),
    "dataset": lambda path: dataset_loader(path),
    "workers": lambda path: dataset_loader(path, num_workers=1, prefetch_factor=1),
}


def dataset_loader(path: Path, **options: Any) -> DataLoader:
    dataset = ChunkDataset(path)
    return DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 16, window_chunks=4), **options)


def check_batches(batches: Iterator[Any], path: Path) -> int:
    """Each batch is of the file as it was; gives their number."""
    count = 0
    for images, labels in batches:
        np.testing.assert_array_equal(images, values((N, *SHAPE), np.uint8)[labels])
        count += 1
    return count


# ---- files that change


@pytest.mark.parametrize("change", [replace, cut, overwrite, Path.unlink])
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_changes_in_an_epoch(path: Path, way: str, change: Callable[[Path], Any]) -> None:
    """An error within the epoch, and until then what was there."""
    loader = WAYS[way](path)
    batches = iter(loader)
    first = next(batches)
    np.testing.assert_array_equal(first[0], values((N, *SHAPE), np.uint8)[first[1]])
    change(path)
    with pytest.raises(FileError, match=CHANGED):
        check_batches(batches, path)
    if way == "workers":
        end_workers(batches)  # the garbage collector's turn would come later, and take seconds
    if isinstance(loader, ChunkLoader):
        with pytest.raises(FileError, match=CHANGED):  # no other epoch either
            next(iter(loader))
        loader.close()


def read_mapped(path: Path, before: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """Read an epoch in a process of its own, whose file is cut short after the first batch, and run code around it."""
    code = f"""
        import faulthandler, os, signal, sys
        from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler, native
        from h5chunk.errors import FileError
        path = sys.argv[1]
        {before}
        dataset = ChunkDataset(path)
        loader = ChunkLoader(dataset, batch_sampler=ChunkSampler(dataset, 16, window_chunks=1), num_threads=1)
        batches = iter(loader)
        next(batches)
        print(native.can_map(), path in open("/proc/self/maps").read())
        {after}
        os.truncate(path, os.path.getsize(path) // 3)
        try:
            list(batches)
        except FileError as error:
            print("cut short" in str(error) or "changed" in str(error))
        loader.close()
        print(path in open("/proc/self/maps").read())
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S * 4)


@pytest.mark.skipif(not native.can_map(), reason="files are not mapped here")
@pytest.mark.parametrize("before", ["pass", "faulthandler.enable()", "signal.signal(signal.SIGBUS, print)"])
def test_a_mapped_file_that_is_cut_short(path: Path, before: str) -> None:
    """An error, and no word of the signal from a handler that was there before."""
    done = read_mapped(path, before)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True", "True", "True", "False"], "")


@pytest.mark.skipif(not native.can_map(), reason="files are not mapped here")
@pytest.mark.parametrize("after", ["faulthandler.enable()", "signal.signal(signal.SIGBUS, signal.SIG_DFL)"])
def test_a_handler_that_is_replaced(path: Path, after: str) -> None:
    """Nothing is read from the map any more, whose signals others would get."""
    done = read_mapped(path, "pass", after)
    assert (done.returncode, done.stdout.split()[2:], done.stderr) == (0, ["True", "False"], "")


OTHER_MAP = """
        import mmap
        file = open(path + ".other", "w+b")
        file.truncate(100)
        other = mmap.mmap(file.fileno(), 0)
        file.truncate(0)
        other[0]
"""


@pytest.mark.skipif(not native.can_map(), reason="files are not mapped here")
@pytest.mark.parametrize("before", ["pass", "faulthandler.enable()"])
@pytest.mark.parametrize("after", [OTHER_MAP, "os.kill(os.getpid(), signal.SIGBUS)"])
def test_the_signal_of_others_ends_the_process(path: Path, before: str, after: str) -> None:
    done = read_mapped(path, before, after)
    assert done.returncode == -signal.SIGBUS and ("Bus error" in done.stderr) == (before != "pass")


@pytest.mark.parametrize("layout", [Dense(), Csr()])
def test_a_matrix_that_changes_in_an_epoch(tmp_path: Path, layout: Any) -> None:
    matrix = random_matrix(4000, 300, 20)
    path = write(tmp_path / "a.h5", matrix)
    dataset = ChunkDataset(path, transforms=layout)
    loader = ChunkLoader(**ordered(path, 8, window_chunks=1), transforms=[layout])
    batches = iter(loader)
    next(batches), dataset[[0, 1]]
    write(tmp_path / "b.h5", matrix).replace(path)
    with pytest.raises(FileError, match=CHANGED):
        list(batches)
    with pytest.raises(FileError, match=CHANGED):
        dataset[[0, 1]]


def test_what_is_resident_stays_right(path: Path) -> None:
    """Nothing is read again; but a loader that has to is told."""
    loader = ChunkLoader(path, 16, resident=True)
    batches = iter(loader)
    next(batches)
    replace(path)
    assert check_batches(batches, path) == N // 16
    assert check_batches(iter(loader), path) == N // 16 + 1
    loader.close()
    with pytest.raises(FileError, match=CHANGED):
        next(iter(loader))


# ---- threads that hang


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes reader threads hang, after two calls of a method or as many as given, until the test is over."""
    go_on = threading.Event()

    def hang(call: str, after: int = 2) -> None:
        calls: list[int] = []

        def wait(*_: Any) -> None:
            if threading.current_thread() is not threading.main_thread():  # which reads small fields
                calls.append(1)
                if len(calls) > after:
                    go_on.wait(WAIT_S)

        watch(monkeypatch, call, wait)

    yield hang
    go_on.set()


@pytest.mark.usefixtures("python_threads")
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("reader", ["direct", "h5py"])
def test_a_thread_that_hangs(path: Path, hanging: Any, reader: str, resident: bool) -> None:
    hanging("read part" if reader == "direct" else "read through HDF5", after=0 if resident else 2)
    loader = loader_by(**ordered(path, 16, window_chunks=1), reader=reader, resident=resident, timeout=0.2)
    with pytest.raises(
        WorkerError, match=r"a\.h5: no data was read for 0\.2 s, because a reading thread .* pass a larger timeout"
    ):
        list(loader)
    loader.close()
    assert reading_threads()  # it still hangs: nobody can end it, and nobody waits for it


@pytest.fixture
def lagging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The thread that plans windows stops before the second one until this is set."""
    go_on, windows = threading.Event(), Order.windows

    def lag(order: Order, start: int = 0) -> Iterator[Window]:
        each = windows(order, start)
        yield next(each)
        go_on.wait()
        yield from each

    monkeypatch.setattr(Order, "windows", lag)
    yield go_on
    go_on.set()


def test_a_planner_that_hangs(path: Path, lagging: threading.Event) -> None:
    """Neither the loop nor closing waits for it; what it leaves is closed when it comes back."""
    loader = ChunkLoader(**ordered(path, 16, window_chunks=1), timeout=0.2)
    with pytest.raises(WorkerError, match=r"a\.h5: no data was read for 0\.2 s, .* pass a larger timeout"):
        list(loader)
    loader.close()
    lagging.set()
    end = time.monotonic() + WAIT_S
    while reading_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not reading_threads()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_closing_while_the_planner_lags(path: Path, lagging: threading.Event, elsewhere: bool) -> None:
    """Whoever waits for its next window gets an error, in this thread and in others."""
    loader = ChunkLoader(**ordered(path, 16, window_chunks=1))
    batches = iter(loader)
    errors: list[BaseException] = []

    def iterate() -> None:
        try:
            list(batches)
        except BaseException as error:
            errors.append(error)

    next(batches)
    consumer = threading.Thread(target=iterate, daemon=True)
    if elsewhere:
        consumer.start()
    threading.Timer(0.1, lagging.set).start()
    loader.close()
    if not elsewhere:
        consumer.start()
    consumer.join(WAIT_S)
    [error] = errors
    assert isinstance(error, FileError if elsewhere else OptionError) and "close" in str(error)


@pytest.mark.parametrize("options", [{}, {"reuse": True}, {"echo": 2}, {"resident": True}])
def test_closing_from_another_thread(tmp_path: Path, options: dict[str, Any]) -> None:
    """At any moment: the loop ends soon, with all batches or an error of ours, and no thread dies."""
    numbers = np.arange(3000)
    images = np.repeat(numbers[:, None], 64, 1).astype(np.int32)
    path = make_file(tmp_path / "a.h5", images=(images, {"chunks": (16, 64)}), labels=(numbers, {"chunks": (16,)}))
    for attempt in range(40):
        loader = loader_by(path, 7 if attempt % 2 else 300, timeout=WAIT_S, **options)
        timer = threading.Timer(attempt / 4000, loader.close)
        timer.start()
        begun = time.monotonic()
        with suppress(H5ChunkError):
            for _ in range(3):
                for rows, labels in loader:
                    assert (rows[:, 0] == labels).all() and (rows[:, 63] == labels).all()
        timer.join()
        loader.close()
        assert time.monotonic() - begun < WAIT_S / 2


@linux
def test_a_process_ends_though_a_thread_hangs(path: Path) -> None:
    code = (
        "import os, sys, threading, h5chunk\nos.environ['H5CHUNK_NATIVE'] = '0'\n"
        "from h5chunk.store.hdf5.ranges import VectorTask\n"
        "def hang(*_):\n    return threading.current_thread() is threading.main_thread() or threading.Event().wait()\n"
        "VectorTask.__call__ = hang\n"
        "list(h5chunk.ChunkLoader(sys.argv[1], 16, timeout=0.2))\n"
    )
    process = run_python(code, path)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1 and b"WorkerError" in errors


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "1", True])
def test_timeouts_that_cannot_be(path: Path, timeout: Any) -> None:
    with pytest.raises(OptionError, match=r"timeout is .*: pass a number of seconds, or 0 to wait forever"):
        ChunkLoader(path, 16, timeout=timeout)


def test_without_a_timeout_it_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    wait = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds=None: waited.append(seconds) or wait(self))
    with ChunkLoader(**ordered(path, 16, window_chunks=1), timeout=0) as loader:
        assert check_batches(iter(loader), path) == N // 16 + 1
    assert set(waited) <= {None}


# ---- processes that die


def run_python(code: str, *arguments: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pids: list[int]) -> None:
    end = time.monotonic() + WAIT_S
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_alive(pid)]


def slowly(image: Any) -> Any:
    time.sleep(0.01)
    return image


@linux
@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (signal.SIGKILL, r"DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)"),
        (signal.SIGSTOP, "DataLoader timed out after 1 seconds"),
    ],
)
def test_a_worker_of_a_dataloader_that_dies_or_stops(path: Path, sent: signal.Signals, match: str) -> None:
    """torch says so: of one that was stopped, with its ``timeout``, but not while the worker hands a batch over."""
    options = {"num_workers": 1, "prefetch_factor": 1, "timeout": 1 if sent == signal.SIGSTOP else 0}
    dataset = ChunkDataset(path, transforms=slowly)  # the worker is in the middle of its second batch
    batches = iter(DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 16, window_chunks=4), **options))
    next(batches)
    (worker,) = workers_of(batches)
    os.kill(worker, sent)
    try:
        with pytest.raises(RuntimeError, match=match):
            list(batches)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        with suppress(RuntimeError):  # torch says once more that it was killed
            end_workers(batches)
    wait_until_ended([worker])


TRAINING = """
import sys, time, h5chunk, torch
path, workers = sys.argv[1], int(sys.argv[2])
dataset = h5chunk.ChunkDataset(path)
sampler, windows = (h5chunk.ChunkSampler(dataset, 16, window_chunks=size) for size in (None, 1))
loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=2) if workers else None
batches = iter(loader or h5chunk.ChunkLoader(dataset, batch_sampler=windows))
next(batches)
print(*([worker.pid for worker in batches._workers] if workers else []), flush=True)
while True:
    for _ in batches:
        time.sleep(0.01)
    batches = iter(loader or h5chunk.ChunkLoader(dataset, batch_sampler=windows))
"""


@linux
def test_the_end_of_the_main_process(path: Path) -> None:
    """Ctrl-C in mid-epoch, or a kill: it ends at once, and so do its workers (torch's look every five seconds)."""
    ends = [(signal.SIGKILL, 2), (signal.SIGINT, 2), (signal.SIGINT, 0)]
    processes = [run_python(TRAINING, path, workers) for _, workers in ends]
    pids: list[int] = []
    try:
        for process, (sent, workers) in zip(processes, ends, strict=True):
            assert process.stdout is not None and process.stderr is not None
            found = [int(pid) for pid in process.stdout.readline().split()]
            assert len(found) == workers
            pids += found
            process.send_signal(sent)
            assert process.wait(WAIT_S) == -sent
            if sent == signal.SIGINT:
                assert process.stderr.read().rstrip().endswith(b"KeyboardInterrupt")
        wait_until_ended(pids)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_ctrl_c_in_the_loop(path: Path) -> None:
    loader = ChunkLoader(**ordered(path, 16, window_chunks=1))

    def loop() -> None:
        for _ in loader:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert check_batches(iter(loader), path) == len(loader)
    loader.close()
    assert not reading_threads()
