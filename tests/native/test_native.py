"""The native threads: alone, under sanitizers, with reads that fail or hang, and below a loader.

They are compiled here, with a layer between them and the system that makes reads short, interrupted, refused or hang.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.foreign import make_file
from support.leftovers import WAIT_S, in_fork, nothing_is_left, reading_threads
from support.loader_files import IMAGES, N, epoch_of, path

import h5chunk.native
from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler
from h5chunk.errors import FileError, WorkerError
from h5chunk.native import CANCELLED, CHECKSUM, DONE, JOB, READ, VERIFY, NativePool, SparseRows, crc32, run
from h5chunk.store.hdf5.ranges import RowGather

__all__ = ["nothing_is_left", "path"]

COMPILER = shutil.which(os.environ.get("CC", "cc"))
CORE = Path(h5chunk.native.__file__).with_name("core.c")
HERE = Path(__file__).parent
NONE, SHORT, INTERRUPTED, REFUSED, HANGING, EMPTY = range(6)  # faults.c
pytestmark = pytest.mark.skipif(COMPILER is None or sys.platform == "win32", reason="needs a C compiler")


def compile_c(out: Path, *arguments: object) -> None:
    subprocess.run([str(COMPILER), *map(str, arguments), "-pthread", "-o", str(out)], check=True, timeout=WAIT_S * 4)


@pytest.fixture(scope="session")
def faulty_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """core.c with faults.c between it and the system."""
    folder = tmp_path_factory.mktemp("native")
    faults = ("-U_FORTIFY_SOURCE", "-Dpread=faulty_pread", "-Dpreadv=faulty_preadv")
    compile_c(folder / "core.o", "-c", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", *faults, CORE)
    others = [part for part in CORE.parent.glob("*.c") if part != CORE]
    compile_c(folder / "faulty.so", "-shared", "-fPIC", HERE / "faults.c", *others, folder / "core.o", "-ldl", "-lm")
    return h5chunk.native._declare(ctypes.CDLL(str(folder / "faulty.so")))


@pytest.fixture(autouse=True)
def fault(faulty_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Use that library; gives what sets a fault."""
    monkeypatch.setenv("H5CHUNK_NATIVE", "1")
    monkeypatch.setattr(h5chunk.native, "_library", lambda: faulty_library)
    monkeypatch.setattr(h5chunk.native, "can_map", lambda: False)  # copies of maps do not meet these faults
    yield lambda kind, first=0: faulty_library.set_fault(kind, first)
    faulty_library.set_fault(NONE, 0)


# The pool alone


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str) -> None:
    flags = ("-g", "-O1", "-U_FORTIFY_SOURCE", f"-fsanitize={sanitizer}")
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    try:
        compile_c(tmp_path / "probe", *flags, probe)
        subprocess.run([tmp_path / "probe"], check=True, capture_output=True, timeout=WAIT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"no program with -fsanitize={sanitizer} runs here")
    compile_c(tmp_path / "driver.o", "-c", *flags, "-Dpread=faulty_pread", "-Dpreadv=faulty_preadv", HERE / "driver.c")
    others = (HERE / "faults.c", HERE / "fake_cuda.c", CORE.parent / "filters.c", "-rdynamic")
    compile_c(tmp_path / "driver", *flags, *others, tmp_path / "driver.o", "-ldl", "-lm")
    done = subprocess.run([tmp_path / "driver"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_checksums_are_those_of_zlib() -> None:
    data = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    for length in [*range(300), *range(500, 1100, 7), 4095, 5000]:
        for start in (0, 0xDEADBEEF):
            assert crc32(data[:length], start) == zlib.crc32(data[:length].tobytes(), start)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.dtype("S3"), np.dtype("S40")])
def test_rows_are_gathered(dtype: object) -> None:
    source = np.arange(1000).astype(dtype)
    indices = np.random.default_rng(1).integers(0, 1000, 333)
    out = np.empty(333, source.dtype)
    assert run(RowGather(source, indices, out).jobs(-1)).status == DONE
    assert (out == source[indices]).all()


@pytest.mark.parametrize("codes", [np.uint8, None, "values"])
@pytest.mark.parametrize("values", [np.uint8, np.float16, np.float32, np.int64])
@pytest.mark.parametrize("columns", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_rows_are_made_dense(columns: Any, values: Any, codes: Any) -> None:
    random = np.random.default_rng(5)
    matrix = random.integers(0, 5, (40, 70)) * (random.random((40, 70)) < 0.2)
    row, column = np.nonzero(matrix)
    starts = np.searchsorted(row, np.arange(41)).astype(np.int64)
    stored = matrix[row, column].astype(values if codes == "values" else np.uint8)
    table = None if codes == "values" else (np.arange(256) % 100 + 1).astype(values)
    expected = np.where(matrix, matrix if table is None else table[matrix if codes else 0 * matrix], 0)
    rows, out = random.permutation(40), np.full((40, 70), 9, values)
    sparse = SparseRows(starts, column.astype(columns), stored if codes else None, table)
    sparse.make_dense(rows, out)
    assert (out == expected[rows]).all()
    with pytest.raises(IndexError, match="a column is out of range for 60 columns"):
        sparse.make_dense(rows, np.empty((40, 60), values))
    for some in (rows, np.append(np.arange(7, 23), rows[:9])):
        for dtype in (np.int32, np.int64):
            counts = np.diff(starts)[some]
            ends, found, numbers = np.empty(len(some) + 1, dtype), *(np.empty(counts.sum(), t) for t in (dtype, values))
            sparse.copy(some, ends.itemsize, *(each.ctypes.data for each in (ends, found, numbers)))
            assert (ends == np.append(0, counts.cumsum())).all()
            assert (found == np.concatenate([np.flatnonzero(matrix[i]) for i in some])).all()
            assert (numbers == np.concatenate([expected[i][matrix[i] > 0] for i in some])).all()


def job(**numbers: object) -> np.ndarray:
    found = np.zeros(1, JOB)
    for name, value in numbers.items():
        found[name] = value
    return found


def ended(pool: NativePool, jobs: np.ndarray, number: int = 7) -> h5chunk.native.Result:
    pool.submit(number, jobs)
    result = pool.wait(WAIT_S)
    assert result is not None and result.ticket == number
    return result


@pytest.fixture
def pool() -> Iterator[NativePool]:
    made = NativePool(2)
    yield made
    assert made.close(WAIT_S)
    made.free()


@pytest.fixture
def data_file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    data = np.random.default_rng(2).integers(0, 256, 1_000_000, np.uint8).tobytes()
    (tmp_path / "data").write_bytes(data)
    descriptor = os.open(tmp_path / "data", os.O_RDONLY)
    yield descriptor, data
    os.close(descriptor)


@pytest.mark.parametrize("kind", [NONE, SHORT, INTERRUPTED])
def test_vectors_are_filled(
    pool: NativePool, data_file: tuple[int, bytes], fault: Callable[..., None], kind: int
) -> None:
    descriptor, data = data_file
    fault(kind)
    out = np.zeros(9000, np.uint8)
    lengths = np.full(3000, 3)
    places = np.random.default_rng(3).permutation(3000) * 3
    vectors = np.stack([out.ctypes.data + places, lengths], axis=1).astype(np.uintp)
    read = job(kind=READ, descriptor=descriptor, offset=500, count=3000, num_bytes=9000, source=vectors.ctypes.data)
    read["is_checked"], read["expected"] = 1, zlib.crc32(data[500:9500])
    assert ended(pool, read).status == DONE
    assert b"".join(out[place : place + 3].tobytes() for place in places) == data[500:9500]


def test_what_fails_is_said(pool: NativePool, data_file: tuple[int, bytes]) -> None:
    descriptor, data = data_file
    good = job(kind=VERIFY, descriptor=descriptor, num_bytes=len(data), expected=zlib.crc32(data))
    assert ended(pool, good).status == DONE
    wrong = job(kind=VERIFY, descriptor=descriptor, offset=10, num_bytes=600_000, expected=1)
    result = ended(pool, np.concatenate([good, wrong, good]))
    assert (result.status, result.job, result.offset) == (CHECKSUM, 1, 10)
    result = ended(pool, job(kind=VERIFY, descriptor=descriptor, offset=999_999, num_bytes=5))
    assert (result.status, result.offset) == (h5chunk.native.CUT_SHORT, 1_000_000)
    result = ended(pool, job(kind=VERIFY, descriptor=-1, num_bytes=5))
    assert (result.status, os.strerror(result.error)) == (h5chunk.native.SYSTEM, "Bad file descriptor")


def test_no_jobs_are_over_at_once(pool: NativePool) -> None:
    assert ended(pool, np.zeros(0, JOB)).status == DONE


def test_nothing_comes_of_a_closed_pool(pool: NativePool) -> None:
    assert pool.close(WAIT_S)
    with pytest.raises(EOFError):
        pool.wait(1)
    with pytest.raises(OSError, match="closed"):
        pool.submit(1, np.zeros(1, JOB))


def test_closing_cancels_what_waits(data_file: tuple[int, bytes], fault: Callable[..., None]) -> None:
    descriptor, _ = data_file
    made = NativePool(1)
    fault(HANGING)
    for ticket in range(3):
        made.submit(ticket, job(kind=VERIFY, descriptor=descriptor, num_bytes=100, expected=1))
    time.sleep(0.05)
    assert not made.close(0.05)
    results = [made.wait(WAIT_S) for _ in range(2)]
    assert sorted((each.ticket, each.status) for each in results) == [(1, CANCELLED), (2, CANCELLED)]
    fault(NONE)
    result = made.wait(WAIT_S)
    assert (result.ticket, result.status) == (0, CHECKSUM)
    assert made.close(WAIT_S)
    made.free()


def test_what_is_cancelled_ends_and_the_pool_reads_on(
    data_file: tuple[int, bytes], pool: NativePool, fault: Callable[..., None]
) -> None:
    descriptor, _ = data_file
    fault(HANGING)
    for ticket in range(4):
        pool.submit(ticket, job(kind=VERIFY, descriptor=descriptor, num_bytes=100, expected=1))
    time.sleep(0.05)  # until every thread hangs
    pool.cancel()
    fault(NONE)
    found = {each.ticket: each.status for each in (pool.wait(WAIT_S) for _ in range(4))}
    assert set(found.values()) == {CANCELLED, CHECKSUM} and found[3] == CANCELLED
    pool.submit(5, job(kind=VERIFY, descriptor=descriptor, num_bytes=100, expected=1))
    assert pool.wait(WAIT_S).status == CHECKSUM


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_pools_leave_no_threads_and_no_descriptors(count: int, data_file: tuple[int, bytes]) -> None:
    with nothing_is_kept():
        for number in range(count):
            made = NativePool(3)
            made.submit(number, job(kind=VERIFY, descriptor=data_file[0], num_bytes=100_000))
            assert made.close(WAIT_S)
            made.free()


@contextmanager
def nothing_is_kept() -> Iterator[None]:
    """Fail if the block leaves threads or descriptors behind."""

    def left() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    before = left()
    yield
    gc.collect()
    end = time.monotonic() + WAIT_S
    while left() != before and time.monotonic() < end:  # threads of before and of now take a moment to be gone
        before = min(before, left())
        time.sleep(0.01)
    assert left() == before


def test_a_disk_is_asked_for_data_before_a_thread_reads_it(tmp_path: Path, fault: Callable[..., None]) -> None:
    """The only thread hangs in its first read, and yet all of the file comes into the page cache."""
    size, name = 2 << 20, tmp_path / "data"
    name.write_bytes(np.random.default_rng(0).bytes(4 * size))
    with name.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        os.fsync(file.fileno())
        if sys.platform == "linux":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_share(mapped) or not hasattr(os, "RWF_NOWAIT"):
            pytest.skip("this file system is in memory")
        fault(HANGING)
        pool = NativePool(1)
        for ticket in range(4):
            pool.submit(
                ticket, job(kind=VERIFY, descriptor=file.fileno(), offset=ticket * size, num_bytes=size, expected=1)
            )
        end = time.monotonic() + WAIT_S
        while cached_share(mapped) < 1 and time.monotonic() < end:
            time.sleep(0.01)
        assert cached_share(mapped) == 1
        fault(NONE)
        assert {pool.wait(WAIT_S).status for _ in range(4)} == {CHECKSUM}
        assert pool.close(WAIT_S)
        pool.free()


def cached_share(mapped: mmap.mmap) -> float:
    """Return the fraction of a file's pages that is in the page cache."""
    memory = np.frombuffer(mapped, np.uint8)
    states = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert not mincore(memory.ctypes.data, len(memory), states.ctypes.data)
    return float((states & 1).mean())


# Below a loader


def test_a_loader_says_who_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "native threads" in repr(ChunkLoader(path, 16))
    monkeypatch.setenv("H5CHUNK_NATIVE", "0")
    assert "native" not in repr(ChunkLoader(path, 16)) and "threads" in repr(ChunkLoader(path, 16))


@pytest.mark.parametrize("kind", [NONE, SHORT, INTERRUPTED])
def test_batches_are_those_of_python_threads(
    path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], kind: int
) -> None:
    fault(kind)
    with ChunkLoader(path, 16, seed=3) as loader:
        batches = [epoch_of(loader), epoch_of(loader)]
    monkeypatch.setenv("H5CHUNK_NATIVE", "0")
    with ChunkLoader(path, 16, seed=3) as loader:
        assert batches == [epoch_of(loader), epoch_of(loader)]
    assert sorted(chain.from_iterable(batches[0])) == list(range(N))


@pytest.mark.parametrize(
    ("kind", "reason"), [(REFUSED, "cannot be read: Input/output error"), (EMPTY, "was cut short")]
)
def test_a_read_that_fails_names_the_chunk(path: Path, fault: Callable[..., None], kind: int, reason: str) -> None:
    dataset = ChunkDataset(path, fields=["images"])
    sampler = ChunkSampler(dataset, 16, window_chunks=2)
    loader = ChunkLoader(dataset, batch_sampler=sampler)
    batches = iter(loader)
    next(batches)
    fault(kind)
    with pytest.raises(FileError, match=rf"a\.h5: field 'images', chunk \d+: .*{reason}"):
        list(batches)
    fault(NONE)
    assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("resident", [False, True])
def test_a_read_that_hangs_is_an_error(path: Path, fault: Callable[..., None], resident: bool) -> None:
    fault(HANGING)
    loader = ChunkLoader(ChunkDataset(path, fields=["images"]), 16, resident=resident, timeout=0.2)
    with pytest.raises(
        WorkerError, match=r"a\.h5: no data was read for 0\.2 s, because a reading thread .* pass a larger timeout"
    ):
        list(loader)
    started = time.perf_counter()
    loader.close()
    assert time.perf_counter() - started < WAIT_S / 2  # nobody waits for what hangs
    assert reading_threads()
    fault(NONE)
    end = time.monotonic() + WAIT_S
    while reading_threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not reading_threads()


@pytest.mark.parametrize("count", [20, pytest.param(10_000, marks=pytest.mark.torture)])
def test_leaving_an_epoch_in_the_middle_of_reads(path: Path, count: int) -> None:
    ChunkLoader(path, 16).close()  # what a process keeps that has opened a file, such as its helper
    with nothing_is_kept():
        for _ in range(count):
            for _batch in ChunkLoader(path, 16):
                break
    assert not reading_threads()


def test_a_fork_in_the_middle_of_reads(path: Path, fault: Callable[..., None]) -> None:
    """The child has no threads; it may neither hang nor disturb the parent."""
    loader = ChunkLoader(path, 16)
    batches = iter(loader)
    first = next(batches)
    fault(HANGING)
    threading.Timer(0.3, fault, (NONE,)).start()

    def in_child() -> None:
        fault(NONE)
        loader.close()
        assert sorted(chain.from_iterable(epoch_of(ChunkLoader(path, 16)))) == list(range(N))

    assert in_fork(in_child) == 0
    labels = [first[1], *(labels for _, labels in batches)]
    assert sorted(np.concatenate(labels).tolist()) == list(range(N))


def test_files_of_a_set_are_read_and_watched(tmp_path: Path) -> None:
    for number in range(3):
        some = IMAGES[number * 60 : (number + 1) * 60]
        make_file(tmp_path / f"{number}.h5", images=(some, {"chunks": (4, 3, 5, 6)}))
    loader = ChunkLoader(tmp_path, 16)
    found = np.concatenate([images.numpy() for (images,) in loader])
    assert sorted(map(bytes, found)) == sorted(map(bytes, IMAGES[:180]))
    make_file(tmp_path / "1.h5", images=(IMAGES[:60], {"chunks": (4, 3, 5, 6)}))
    with pytest.raises(FileError, match=r"1\.h5"):
        for _ in range(3):  # what was read ahead is still given
            list(loader)


def test_an_interrupt_while_threads_start_leaves_no_thread():
    """The signal comes while the C function runs, and is handled once that returns."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, handler = len(os.listdir("/proc/self/task")), signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            NativePool(1000)
            time.sleep(30)  # if the machine is that fast
    finally:
        signal.signal(signal.SIGALRM, handler)
    end = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= before
