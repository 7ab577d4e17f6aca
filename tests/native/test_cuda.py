"""Copies to a GPU and launches by native threads: with a library in place of CUDA's, which copies within the host."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.damaged_chunks import damage
from support.faults import small, watch
from support.foreign import make_file, values
from support.leftovers import nothing_is_left
from support.loader_files import N, epoch_of, path
from support.matrices import random_matrix, write
from support.subsets import flat_epochs, subset_of_kind

import h5chunk.native
from h5chunk import ChunkDataset, ChunkLoader
from h5chunk.errors import FileError
from h5chunk.feed import resident
from h5chunk.native import cuda, filters
from h5chunk.stamp import stamp_of
from h5chunk.transforms.csr import SampleNumbers
from h5chunk.transforms.kernel_cache import Code

__all__ = ["nothing_is_left", "path"]

HERE, PACKAGE = Path(__file__).parent, Path(h5chunk.native.__file__).parent
COMPILER = shutil.which("cc")
COPY_STREAM, USER_STREAM = 70, 80
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="torch would use the real device, too"),
]


class Driver:
    """The library in place of CUDA's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def copy_late(self, *, on: bool) -> None:
        self._library.copy_late(on)

    def is_over(self, event: int) -> bool:
        return not self._library.cuEventQuery(ctypes.c_void_p(event))

    def fail(self, kind: str) -> None:
        self._library.fail_cuda(ord(kind) if kind else 0)

    @property
    def calls(self) -> list[tuple[str, int, int, int]]:
        """Kind and arguments of each call so far, without those that only change the context."""
        found = np.zeros((10000, 4), np.int64)
        count = self._library.cuda_calls(ctypes.c_void_p(found.ctypes.data))
        return [(chr(kind), *rest) for kind, *rest in found[:count].tolist() if chr(kind) not in "pq"]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The library in place of CUDA's, and the native one on top of it."""
    folder = tmp_path_factory.mktemp("cuda")
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread", "-O1"]
    subprocess.run([str(COMPILER), *flags, HERE / "fake_cuda.c", "-o", folder / "cuda.so"], check=True)
    sources, define = sorted(PACKAGE.glob("*.c")), f'-DLIBCUDA="{folder}/cuda.so"'
    subprocess.run([str(COMPILER), *flags, define, *sources, "-o", folder / "core.so", "-ldl", "-lm"], check=True)
    return ctypes.CDLL(str(folder / "cuda.so")), h5chunk.native._declare(ctypes.CDLL(str(folder / "core.so")))


@pytest.fixture
def driver(libraries: tuple[ctypes.CDLL, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv("H5CHUNK_NATIVE", "1")
    monkeypatch.setattr(h5chunk.native, "_library", lambda: libraries[1])
    monkeypatch.setattr(filters, "_modules", functools.cache(filters._modules.__wrapped__))
    found = Driver(libraries[0])
    found.fail("")
    found.copy_late(on=False)
    return found


class Event:
    """An event of torch."""

    numbers, driver = itertools.count(1), None

    def __init__(self, *, blocking: bool = False) -> None:
        self.cuda_event = next(Event.numbers)

    def record(self, _stream: object) -> None: ...

    def query(self) -> bool:
        return Event.driver is None or Event.driver.is_over(self.cuda_event)

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.0001)


class Stream:
    """A stream of torch, on a device that is the host."""

    def __init__(self, handle: int = COPY_STREAM) -> None:
        self.cuda_stream, self.device = handle, torch.device("cpu")

    def wait_event(self, _event: Event) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def synchronize(self) -> None:
        if Event.driver is not None:
            Event.driver.copy_late(on=False)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Driver:
    """Let torch find a device, whose memory is the host's."""
    monkeypatch.setattr(Event, "driver", driver)
    own, other = Stream(), Stream(USER_STREAM)
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "mem_get_info": lambda _device: (1 << 40, 1 << 40),
        "Event": Event,
        "Stream": lambda _device: own,
        "current_stream": lambda _device: other,
        "stream": lambda _stream: contextlib.nullcontext(),
        "device": lambda _device: contextlib.nullcontext(),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
        "check_error": lambda _error: None,
    }
    for name, each in replaced.items():
        monkeypatch.setattr(torch.cuda, name, each)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: USER_STREAM, raising=False)
    return driver


def test_a_kernel_is_launched_with_its_arguments(driver: Driver) -> None:
    out = np.zeros(1, np.int64)
    launch = cuda.Launch(cuda.context(), 4, num_threads=128, shared_bytes=1000)
    assert launch.num_parameters == 3
    launch.arguments[2] = 30
    assert launch(USER_STREAM, 5, (out.ctypes.data, 12))
    assert out[0] == 42
    assert driver.calls == [("l", USER_STREAM, 4, 5 * 128 + 4 + 1000)]
    driver.fail("l")
    assert not launch(USER_STREAM, 5, (out.ctypes.data, 13))
    assert out[0] == 42
    assert cuda.Launch(cuda.context(), 8).num_parameters == 3
    assert cuda.Launch(cuda.context(), 9).num_parameters == -1


def test_machine_code_is_loaded(driver: Driver) -> None:
    """The kernel has three parameters, of which Triton has added the last two."""
    out = np.zeros(1, np.int64)
    launch = Code("kernel", 64, 0, b"code").launch(1, [])
    assert launch is not None and launch.grid_y == launch.grid_z == 1
    launch.arguments[1:3] = 30, 12
    assert launch(USER_STREAM, 5, (out.ctypes.data,)) and out[0] == 42
    kept = torch.tensor(5)
    constant = Code("kernel", 64, 0, b"code").launch(0, [kept])
    assert constant is not None and constant.arguments[0] == kept.data_ptr()
    assert Code("kernel", 64, 0, b"code").launch(1, [0.5]) is None, "a parameter was left out"
    assert Code("kernel", 64, 0, b"code").launch(0, []) is None, "there is one parameter more"
    assert Code("other", 64, 0, b"code").launch(1, []) is None
    assert Code("kernel", 64, 0, b"bad").launch(1, []) is None


def test_streams_wait_and_record(driver: Driver) -> None:
    context = cuda.context()
    assert context is not None
    assert cuda.order(context, USER_STREAM, wait=5) and cuda.order(context, USER_STREAM, wait=6, record=7)
    assert driver.calls == [("w", USER_STREAM, 5, 0), ("w", USER_STREAM, 6, 0), ("r", USER_STREAM, 7, 0)]
    driver.fail("w")
    assert not cuda.order(context, USER_STREAM, wait=5, record=7)
    assert [kind for kind, *_ in driver.calls] == ["w"]


@pytest.mark.parametrize("echo", [1, 1.5])
def test_windows_are_copied_once_they_are_read(device: Driver, path: Path, echo: float) -> None:
    """Each copy waits until its place on the device is free, and each batch for its copy."""
    with ChunkLoader(path, 16, device="cuda", resident=False, echo=echo, seed=3) as loader:
        epochs = [epoch_of(loader), epoch_of(loader)]
    if echo == 1:
        assert all(sorted(itertools.chain.from_iterable(epoch)) == list(range(N)) for epoch in epochs)
    calls = device.calls
    for number, (kind, stream, *_) in enumerate(calls):
        if kind == "c":
            near = [each for each in calls[:number] if each[1] == stream]
            assert stream == COPY_STREAM and near[-1][0] in "wc"
    copied = {event for kind, stream, event, _ in calls if (kind, stream) == ("r", COPY_STREAM)}
    consumed = {event for kind, stream, event, _ in calls if (kind, stream) == ("r", USER_STREAM)}
    assert copied and consumed and not copied & consumed
    assert {event for kind, stream, event, _ in calls if (kind, stream) == ("w", USER_STREAM)} <= copied
    assert sum(kind == "c" for kind, *_ in calls) >= len(epochs)


def test_the_device_is_that_of_the_construction(device: Driver, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device differs between threads, and may change until the loader is iterated."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with ChunkLoader(path, 16, device="cuda", resident=False) as loader:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        assert f"to cuda:1: {len(loader)} batches" in repr(loader)


@pytest.mark.parametrize("is_matrix", [False, True])
def test_batches_of_the_user_that_are_larger_than_all_before(
    device: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_matrix: bool
) -> None:
    """The memory of the slots becomes larger, after late copies from and to it."""
    small(monkeypatch, whole_bytes=0)
    monkeypatch.setattr("h5chunk.feed.budget.GROUP_BYTES", 400)
    file, dense = tmp_path / "some.h5", values((500, 20), np.uint8)
    if is_matrix:
        matrix = random_matrix(500, 20, 4)
        file, dense = write(file, matrix), matrix.toarray()
    else:
        make_file(file, images=(dense, {"chunks": (10, 20)}), labels=(np.arange(500), {}))
    random = np.random.default_rng(0)
    sizes = [*random.integers(1, 10, 30), 40, *random.integers(1, 60, 30), 700, 3]
    lists = [random.integers(0, 500, size).tolist() for size in sizes]
    device.copy_late(on=True)
    grown: list[int] = []
    watch(monkeypatch, "feed.stream.WindowStream._grow", before=lambda *_: grown.append(1), note=False)
    with ChunkLoader(file, batch_sampler=lists, device="cuda") as loader:
        for _ in range(2):
            for batch, numbers in zip(loader, lists, strict=True):
                np.testing.assert_array_equal(batch[0], dense[numbers])
    assert len(grown) >= 3


@pytest.mark.parametrize("num_pinned", [1, 2, 4])
def test_no_pinned_buffer_is_read_into_before_it_was_copied(
    device: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_pinned: int
) -> None:
    """Windows are queued for buffers that are in use."""
    monkeypatch.setattr("h5chunk.feed.cuda_slots.PINNED_BYTES", 0)
    monkeypatch.setattr("h5chunk.feed.cuda_slots.MIN_PINNED", num_pinned)
    file = tmp_path / "many.h5"
    images = values((3000, 20), np.uint8)
    h5chunk.convert({"images": images, "labels": np.arange(3000)}, file, chunk_samples=10)
    counted: list[bool] = []
    watch(monkeypatch, "feed.cuda_slots.CudaSlot.begin", before=lambda *_, queued: counted.append(queued), note=False)
    small(monkeypatch, whole_bytes=0)
    device.copy_late(on=True)
    with ChunkLoader(file, 16, device="cuda", resident=False) as loader:
        for _ in range(3):
            seen = []
            for some, labels in loader:
                np.testing.assert_array_equal(some, images[labels])
                seen += labels.tolist()
            assert sorted(seen) == list(range(3000))
        for stop in range(1, 30, 4):  # reading starts again
            for number, (some, labels) in enumerate(loader):
                np.testing.assert_array_equal(some, images[labels])
                if number == stop:
                    break
            loader.batch_sampler.set_epoch(stop)
    assert sum(counted) > num_pinned


def test_windows_of_other_sizes_are_copied(device: Driver, tmp_path: Path) -> None:
    """The arrays of a matrix differ in length from window to window."""
    matrix = random_matrix(300, 50, 4)
    file = write(tmp_path / "a.h5", matrix)
    with ChunkLoader(file, 20, shuffle=False, device="cuda", resident=False) as loader:
        found = np.concatenate([batch[0].numpy() for batch in loader])
    np.testing.assert_array_equal(found, matrix.toarray())
    assert {size for kind, *_, size in device.calls if kind == "c"}


@pytest.mark.parametrize("kind", "pwcr")
def test_an_error_of_cuda_is_raised_by_torch(device: Driver, path: Path, kind: str) -> None:
    loader = ChunkLoader(path, 16, device="cuda", resident=False)
    device.fail(kind)
    with pytest.raises(RuntimeError, match="CUDA error"):
        list(loader)
    device.fail("")
    assert sorted(itertools.chain.from_iterable(epoch_of(loader))) == list(range(N))
    loader.close()


def test_a_file_that_changes_is_not_copied(device: Driver, path: Path) -> None:
    with ChunkLoader(path, 16, device="cuda", resident=False) as loader:
        epoch_of(loader)
        path.touch()
        with pytest.raises(FileError, match=r"a\.h5.* changed"):
            [epoch_of(loader) for _ in range(3)]


@pytest.mark.parametrize("kind", ["raw", "coded", "matrix"])
@pytest.mark.filterwarnings("ignore:sample .* cannot be read, so that another sample:UserWarning")
def test_bad_samples_are_replaced(device: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The device has the batches of the host. Windows are read again into memory that late copies may still read."""
    monkeypatch.setattr("h5chunk.feed.cuda_slots.PINNED_BYTES", 0)
    monkeypatch.setattr("h5chunk.feed.cuda_slots.MIN_PINNED", 1)
    monkeypatch.setattr("h5chunk.plan.slots.TOGETHER_BYTES", 1)
    small(monkeypatch, whole_bytes=0)
    file, count = tmp_path / "some.h5", 3000
    if kind == "matrix":
        matrix = random_matrix(count, 30, 5)
        write(file, matrix)
        with h5py.File(file, "r+") as opened:
            for row in (40, 41, 1500):
                opened["X/indices"][matrix.indptr[row]] = 30
        dense, names = matrix.toarray(), ["X", "sample_number"]
    else:
        dense, names = values((count, 20), np.uint8), ["images", "labels", "sample_number"]
        coded = {"compression": "gzip"} if kind == "coded" else {}
        make_file(file, labels=(np.arange(count), {}), images=(dense, {"chunks": (10, 20), **coded}))
        if coded:
            damage(file, 7, "images")
    dataset = ChunkDataset(file, fields=names, on_error="skip", max_skipped=0.1)
    loaders = [ChunkLoader(dataset, 16, device=where, seed=2) for where in ("cpu", "cuda")]
    if kind == "raw":  # as if the file had always been shorter
        os.truncate(file, file.stat().st_size - 100)
        for loader in loaders:
            loader._source.reader.stamp = stamp_of(file)
    found = []
    for loader in loaders:
        device.copy_late(on=True)
        with loader:
            for _ in range(3):
                for some, *labels, numbers in loader:
                    np.testing.assert_array_equal(some, dense[numbers.numpy()])
                    assert not labels or labels[0].tolist() == numbers.tolist()
                    found.append(numbers.tolist())
                assert loader.report.skipped == {"raw": 5, "coded": 10, "matrix": 3}[kind]
    assert found[: len(found) // 2] == found[len(found) // 2 :]


@pytest.mark.parametrize("kind", ["dense", "matrix", "ragged", "windows"])
def test_a_subset_stays_on_the_device(
    device: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It is copied piece by piece."""
    monkeypatch.setattr(resident, "_on_device", lambda _, shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(resident, "to_device", lambda numbers, _: SampleNumbers(numbers, torch.from_numpy(numbers)))
    monkeypatch.setattr(Stream, "wait_event", lambda *_: None)  # torch copies what Python reads
    data = subset_of_kind(kind, tmp_path)
    assert flat_epochs(data, resident=True, device="cuda") == flat_epochs(data)
