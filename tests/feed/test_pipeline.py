"""Threads that read ahead: right bytes, errors that arrive, and nothing left behind."""

from __future__ import annotations

import os
import threading
from contextlib import closing

import numpy as np
import pytest
from support.faults import failure, nth, small, watch
from support.foreign import make_file, values
from support.leftovers import WAIT_S, in_fork, nothing_is_left

from h5chunk.errors import FileError, WorkerError
from h5chunk.feed.columns import Destination
from h5chunk.feed.read_pool import ReadPool, WindowRead
from h5chunk.plan.order import Window
from h5chunk.store.read.field_readers import field_readers
from h5chunk.store.read.reader import H5Reader

__all__ = ["nothing_is_left"]

pytestmark = pytest.mark.usefixtures("python_threads")  # tests/native has the same of native threads

N = 203
DATA = {"x": values((N, 500), np.uint8), "z": values((N, 60), np.int16), "y": values((N,), np.int64)}
FIELDS = {name: name for name in DATA}


class MemorySlot:
    """A slot of plain arrays."""

    sender, queues = (None, None), False

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def begin(self, samples: np.ndarray, *, queued: bool) -> dict[str, Destination]:
        num_samples = len(samples)
        self.arrays = {name: np.zeros((num_samples, *data.shape[1:]), data.dtype) for name, data in DATA.items()}
        flat = ((name, array.reshape(num_samples, -1).view(np.uint8)) for name, array in self.arrays.items())
        return {name: Destination(out) for name, out in flat}

    def send(self) -> None: ...

    def check(self) -> None: ...

    def return_pinned(self) -> None: ...


def window(samples: object) -> Window:
    numbers = np.asarray(samples, np.int64)
    places = np.argsort(numbers, kind="stable")
    return Window(numbers, numbers[places], places, range(1), numbers)


@pytest.fixture
def path(tmp_path):
    return make_file(
        tmp_path / "a.h5",
        x=(DATA["x"], {"chunks": (8, 500)}),
        z=(DATA["z"], {"chunks": (16, 30)}),
        y=(DATA["y"], {"chunks": (32,)}),
    )


def make_readers(path, num_threads: int = 2, direct: tuple[str, ...] = ("x", "y")) -> ReadPool:
    """Other fields than those in ``direct`` are read through HDF5."""
    reader = H5Reader(path, FIELDS)
    fields = {name: field_readers(reader, "direct" if name in direct else "h5py", [name])[0][name] for name in FIELDS}
    return ReadPool(reader, fields, num_threads)


@pytest.mark.parametrize("part_bytes", [1, 5000, 1 << 22])
@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
@pytest.mark.parametrize("direct", [(), ("x",), ("x", "y")])
@pytest.mark.parametrize(("whole_row_bytes", "quick_bytes"), [(64, 1 << 20), (1024, 1 << 20), (1024, 0)])
def test_windows_are_filled(path, monkeypatch, part_bytes, whole_bytes, direct, whole_row_bytes, quick_bytes):
    small(
        monkeypatch,
        whole_row_bytes=whole_row_bytes,
        quick_bytes=quick_bytes,
        part_bytes=part_bytes,
        whole_bytes=whole_bytes,
    )
    readers = make_readers(path, 3, direct)
    shuffled = np.random.default_rng(0).permutation(N)
    cuts = [shuffled[:80], shuffled[80:81], shuffled[81:], np.arange(N), np.arange(N)[::-1]]
    loads = [readers.load(window(samples), MemorySlot()) for samples in cuts]
    for load, samples in zip(loads, cuts, strict=True):
        load.wait(WAIT_S)
        assert load.is_ready
        for name, data in DATA.items():
            np.testing.assert_array_equal(load.slot.arrays[name], data[samples])
    readers.close()


def test_parts_are_shared_out(path, monkeypatch):
    """Two threads work on one window at the same time."""
    small(monkeypatch, part_bytes=1, run_bytes=1)
    both, seen = threading.Barrier(2, timeout=WAIT_S), set()

    def meet(*_):
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            both.wait()

    readers = make_readers(path)  # reads y, which is small
    watch(monkeypatch, "read part", meet)
    load = readers.load(window(range(N)), MemorySlot())
    load.wait(WAIT_S)
    readers.close()
    assert len(seen) == 2


@pytest.mark.parametrize("field", ["x", "z"])
def test_an_error_is_raised_by_wait_and_others_are_read(path, monkeypatch, field):
    small(monkeypatch, part_bytes=1)
    call = "read part" if field == "x" else "read through HDF5"
    readers = make_readers(path, 1)
    watch(monkeypatch, call, nth(1, failure(MemoryError("no room"))))
    bad, good = (readers.load(window(range(N)), MemorySlot()) for _ in range(2))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            bad.wait(WAIT_S)
    good.wait(WAIT_S)
    np.testing.assert_array_equal(good.slot.arrays[field], DATA[field])
    readers.close()


@pytest.mark.parametrize("field", ["x", "z"])
def test_a_file_that_changes_is_an_error(path, field):
    """It is changed in place, to the same number of bytes or fewer."""
    readers = make_readers(path, direct=() if field == "z" else ("x", "y"))
    readers.load(window(range(N)), MemorySlot()).wait(WAIT_S)  # all is open
    status = path.stat()
    with path.open("r+b") as file:
        if field == "z":  # HDF5 alone would give zeros
            file.truncate(status.st_size - 1)
        else:
            file.write(file.read(1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    load = readers.load(window(range(N)), MemorySlot())
    with pytest.raises(FileError, match=r"a\.h5: (the file was replaced or changed|field)"):
        load.wait(WAIT_S)
    readers.close()


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_file_that_is_not_the_one_that_was_looked_at(path, change):
    reader = H5Reader(path, FIELDS)
    path.unlink()
    if change == "replaced":
        make_file(path, x=(DATA["x"], {}))
    with pytest.raises(FileError, match=r"a\.h5: the file was (replaced|removed)"):
        pool = ReadPool(reader, field_readers(reader)[0], 2)
        with closing(pool):
            pool.load(window(range(N)), MemorySlot()).wait(WAIT_S)


def test_a_thread_that_does_not_start_leaves_nothing(path, monkeypatch):
    start, started = threading.Thread.start, []

    def start_two(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start"):
        make_readers(path, 4)


def blocked(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Let reading begin and stand still; gives (begun, go on)."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(*_):
        begun.set()
        assert go_on.wait(WAIT_S)

    watch(monkeypatch, "read part", wait)
    return begun, go_on


def test_closing_fails_what_was_not_read(path, monkeypatch):
    readers = make_readers(path, 1)
    begun, go_on = blocked(monkeypatch)
    loads = [readers.load(window(range(N)), MemorySlot()) for _ in range(3)]
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=readers.close)
    closing.start()
    with pytest.raises(FileError, match=r"a\.h5: the file was closed while it was read"):
        loads[2].wait(WAIT_S)
    go_on.set()
    closing.join(WAIT_S)
    for load in loads:
        with pytest.raises(FileError, match="closed"):
            load.wait(WAIT_S)
    with pytest.raises(FileError, match="closed"):
        readers.load(window(range(N)), MemorySlot()).wait(WAIT_S)


def test_closing_races_with_threads_that_take_tasks(path, monkeypatch):
    """The last task may be gone between a look at the queue and taking it."""
    small(monkeypatch, part_bytes=500)
    for _ in range(60):
        readers = make_readers(path, 4)
        readers.load(window(range(N)), MemorySlot())
        done = threading.Thread(target=readers.close, daemon=True)
        done.start()
        done.join(WAIT_S)
        assert not done.is_alive()


def test_closing_from_a_reading_thread(path, monkeypatch):
    """The garbage collector may run there, while the lock of HDF5 is held."""
    readers = make_readers(path)
    watch(monkeypatch, "read through HDF5", lambda *_: readers.close())
    load = readers.load(window(range(N)), MemorySlot())
    try:
        load.wait(WAIT_S)
    except FileError as error:
        assert "closed" in str(error)
    else:
        np.testing.assert_array_equal(load.slot.arrays["z"], DATA["z"])


def test_a_thread_that_hangs_is_an_error(path, monkeypatch):
    readers = make_readers(path, 1)
    begun, go_on = blocked(monkeypatch)
    load = readers.load(window(range(N)), MemorySlot())
    assert begun.wait(WAIT_S)
    with pytest.raises(WorkerError, match=r"a\.h5: no data was read for 0.05 s"):
        load.wait(0.05)
    go_on.set()
    load.wait(WAIT_S)
    readers.close()


def test_slow_reading_is_no_error(path):
    readers = make_readers(path)
    load = WindowRead(readers, MemorySlot(), window([0]), 4)
    waits = [False, False, False, True]

    class Slowly:
        def wait(self, _):
            readers.tasks_done += 1
            load.is_ready = waits.pop(0)
            return load.is_ready

    load._ready = Slowly()
    load.wait(0.01)
    assert not waits
    load = WindowRead(readers, MemorySlot(), window([0]), 4)
    with pytest.raises(WorkerError, match="hangs"):
        load.wait(0.01)
    readers.close()


def test_a_window_of_nothing_to_read_is_ready(path):
    readers = make_readers(path)
    load = WindowRead(readers, MemorySlot(), window([]), 0)
    load.finish()
    load.wait(0)
    readers.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_neither_hangs_nor_disturbs(path, monkeypatch):
    """While threads hold their locks."""
    readers = make_readers(path, 2)
    begun, go_on = blocked(monkeypatch)
    descriptor = readers.files.descriptor(0)
    loads = [readers.load(window(range(N)), MemorySlot()) for _ in range(3)]
    assert begun.wait(WAIT_S)

    def use_and_close():
        with pytest.raises(FileError, match="fork"):
            loads[0].wait(WAIT_S)
        readers._fields["z"].cache.hdf5.lock.acquire(blocking=False)  # as if a thread held it
        readers.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

    assert in_fork(use_and_close) == 0
    go_on.set()
    for load in loads:
        load.wait(WAIT_S)
        np.testing.assert_array_equal(load.slot.arrays["x"], DATA["x"])
    readers.close()
