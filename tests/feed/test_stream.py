"""Windows one after the other, whatever is mixed: threads, slots, epochs, echoes; the same on a GPU as on the CPU."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.faults import failure, nth, small, watch
from support.foreign import make_file, values
from support.leftovers import WAIT_S, in_fork, nothing_is_left, reading_threads
from support.loader_files import IMAGES, LABELS, N, epoch_of, least_memory, path
from support.orders import ordered

from h5chunk.errors import FileError, OptionError
from h5chunk.feed.batches import BatchMaker, FieldPipeline
from h5chunk.feed.columns import dense_kind
from h5chunk.feed.cuda_slots import CudaSlot
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.plan.draws import Draws
from h5chunk.plan.order import Order
from h5chunk.transforms import Normalize, ToDtype
from h5chunk.transforms.converter import Converter

__all__ = ["nothing_is_left", "path"]

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FLOAT = {"transforms": [ToDtype(torch.float32, scale=True)]}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def loads(monkeypatch):
    """Every window that was asked for, in order; each is read alone."""
    monkeypatch.setattr("h5chunk.feed.budget.TOGETHER_BYTES", 0)
    asked: list[tuple[list[int], object]] = []
    watch(monkeypatch, "load window", lambda _, window, slot: asked.append((window.samples.tolist(), slot)))
    return asked


def until(condition, seconds: float = WAIT_S) -> bool:
    """Whether something comes true, for which another thread has to run."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("echo", [1, 2, 1.5])
@pytest.mark.parametrize("options", [{"window_chunks": 8}, {"shuffle": False}, {"window_chunks": 30}])
def test_windows_are_read_once_and_in_order(path, loads, echo, options):
    """However often they are trained, over the seams between epochs too."""
    with ChunkLoader(**ordered(path, 8, **options), echo=echo) as loader:
        orders = [loader.order]
        for epoch in range(1, 12):
            orders.append(Order(**{**orders[0].__dict__, "epoch": epoch}))
        for _ in range(3):
            list(loader)
    wanted = [window.samples.tolist() for order in orders for window in order.windows()]
    read = [samples for samples, _ in loads]
    assert read == wanted[: len(read)]
    assert len(read) >= 3 * len(list(orders[0].windows()))


@pytest.mark.parametrize("reuse", [False, True])
def test_a_slot_is_filled_again_once_its_batches_were_used(path, loads, reuse):
    """With reuse not before the next batch is asked for; without, as soon as the last one is given."""
    with ChunkLoader(path, 16, shuffle=False, reuse=reuse, memory_bytes=(2 if reuse else 4) * 2048 + N * 8) as loader:
        batches = iter(loader)
        for number in range(5):
            next(batches)
            expected = 2 + number + (0 if reuse else 1)
            assert until(lambda expected=expected: len(loads) >= expected) and len(loads) == expected
        batches.close()
    assert len({id(slot) for _, slot in loads}) == 2


@pytest.mark.parametrize("echo", [1, 2])
def test_a_window_is_read_while_others_are_used_and_kept_for_echoes(path, loads, echo):
    """Even in the least memory. On busy cores a window may be planned too late, so there are several attempts."""
    options = {**ordered(path, 16, window_chunks=8), "echo": echo}

    def reads_third_window() -> bool:
        with ChunkLoader(**options, memory_bytes=least_memory(**options)) as loader:
            del loads[:]
            batches = iter(loader)
            for _ in range(3 if echo != 2 else 5):  # the first batch of the second window
                next(batches)
            return until(lambda: len(loads) >= 3, seconds=2)

    assert any(reads_third_window() for _ in range(8))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch_size=st.integers(1, 60),
    window_chunks=st.integers(1, 20),
    num_threads=st.sampled_from([1, 2, 5]),
    reuse=st.booleans(),
    shuffle=st.booleans(),
    echo=st.sampled_from([1, 2, 1.3]),
    more=st.integers(0, 5000),
    breaks=st.lists(st.integers(0, 300), max_size=4),
)
def test_epochs_and_breaks_in_any_memory(
    path, batch_size, window_chunks, shuffle, num_threads, reuse, echo, more, breaks
):
    """Right data, never a deadlock, and after a break the next epoch."""
    options = {**ordered(path, batch_size, window_chunks=window_chunks, shuffle=shuffle), "echo": echo, "reuse": reuse}
    needed = least_memory(**options, num_threads=num_threads)
    with ChunkLoader(**options, num_threads=num_threads, memory_bytes=needed + more) as loader:
        for epoch, stop in enumerate([*breaks, 1 << 30]):
            assert loader.order.epoch == epoch
            seen: Counter[int] = Counter()
            for number, (images, labels) in enumerate(loader):
                assert images.numpy().tobytes() == IMAGES[labels.numpy()].tobytes()
                seen.update(labels.tolist())
                if number == stop:
                    break
        assert len(seen) == N and loader.report.fresh_samples == N
        assert loader.report.batches == len(loader)


def test_several_loaders_at_a_time(path):
    """Of one file, in turns, each with threads and memory of its own."""
    loaders = [ChunkLoader(path, 16, seed=seed, echo=echo) for seed, echo in ((0, 1), (0, 1), (1, 2), (0, 2))]
    epochs: list[list[list[int]]] = [[] for _ in loaders]
    for batches in zip(*loaders, strict=False):
        for epoch, (images, labels) in zip(epochs, batches, strict=True):
            assert images.numpy().tobytes() == IMAGES[labels.numpy()].tobytes()
            epoch.append(labels.tolist())
    assert epochs[0] == epochs[1] != epochs[2] != epochs[3]
    for loader in loaders:
        loader.close()


def test_loaders_in_several_threads(path):
    found: list[list[list[int]]] = []

    def iterate():
        with ChunkLoader(path, 16, num_threads=2) as loader:
            for _ in range(3):
                found.append(epoch_of(loader))

    threads = [threading.Thread(target=iterate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 12 and all(
        sorted(label for batch in epoch for label in batch) == list(range(N)) for epoch in found
    )
    assert len({str(epoch) for epoch in found}) == 3


@pytest.mark.parametrize("options", [{}, {"echo": 2}, {"echo": 2.5}, {"resident": True}])
def test_changing_a_batch_changes_no_other(path, options):
    with ChunkLoader(path, 16, **options) as loader:
        for _ in range(2):
            for images, labels in loader:
                assert images.numpy().tobytes() == IMAGES[labels.numpy()].tobytes()
                images.zero_()
                labels.zero_()


@pytest.mark.parametrize("echo", [1, 3])
@pytest.mark.parametrize("when", ["first", "last"])
def test_an_error_while_waiting_comes_as_it_is(path, monkeypatch, echo, when):
    small(monkeypatch, together_bytes=0)  # each window is read alone
    with ChunkLoader(path, 16, echo=echo, shuffle=False, num_threads=1) as loader:

        def fail(load):
            if len(calls) == {"first": 1, "last": 13}[when]:
                load.error = MemoryError("no room")

        calls = watch(monkeypatch, "feed.read_pool.WindowRead.finish", fail)
        found: list[list[int]] = []
        with pytest.raises(MemoryError, match="no room"):
            for _, labels in loader:
                found.append(labels.tolist())
    assert len(found) == (0 if when == "first" else 12 * echo)
    assert not reading_threads()


# Batches that are made together


def make_pipeline(dataset: ChunkDataset, name: str, transforms: list) -> FieldPipeline:
    field = dataset.field(name)
    return FieldPipeline(transforms, field, dense_kind(field), reuse=False)


def make_maker(path, transforms: list, keep: bool) -> BatchMaker:
    dataset = ChunkDataset(path)
    fields = {"images": transforms, "labels": []}
    return BatchMaker([make_pipeline(dataset, name, each) for name, each in fields.items()], keep=keep)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("transforms", [[], [Normalize(MEAN, STD)]])
def test_batches_made_together_are_those_made_alone(path, keep, transforms):
    images, labels = torch.from_numpy(IMAGES), torch.from_numpy(LABELS)
    maker = make_maker(path, transforms, keep)
    draws = Draws(0, 0, np.arange(len(images)))
    window = maker.open((images, labels), draws, 16)
    for number in range(13):
        some, batch = slice(16 * number, 16 * number + 16), next(window)
        [alone] = maker.make((images[some], labels[some]), draws.part(some.start, some.stop), 16)
        assert all(one.equal(other) for one, other in zip(batch, alone, strict=True))
        assert (batch[1].data_ptr() == labels[some].data_ptr()) == keep
    assert [len(field) for field in next(window)] == [0, 0]  # as another rank may have one


def test_how_many_batches_are_made_together(path):
    """Views of what is there: all; copies: as many as are small together."""
    dataset = ChunkDataset(path)
    plain, changed = (make_pipeline(dataset, "images", each) for each in ([], [ToDtype(torch.float32, scale=True)]))
    assert plain.num_together(16, keep=True) > 1 << 20
    assert changed.num_together(16, keep=True) == 1
    few = plain.num_together(16, keep=False)
    assert few * 16 * 90 <= Converter.together_bytes < (few + 1) * 16 * 90
    assert changed.num_together(16, keep=False) == Converter.together_bytes // (16 * 360)
    assert changed.num_together(1 << 20, keep=False) == 1


class TestCuda:
    """On a GPU: what the CPU gives, whatever the streams do."""

    pytestmark = gpu

    @pytest.fixture
    def images(self, tmp_path):
        """Windows of megabytes, so that copies take time."""
        images = values((1003, 3, 64, 64), np.uint8)
        options = {"chunks": (8, 3, 64, 64)}
        return make_file(tmp_path / "b.h5", images=(images, options), labels=(np.arange(1003), {}))

    @pytest.fixture
    def poisoned(self, monkeypatch):
        """What is free to be overwritten is: device memory once it was consumed, pinned memory once it was copied."""
        begin, release = CudaSlot.begin, CudaSlot.release

        def begin_poisoned(slot, samples, *, queued):
            room = begin(slot, samples, queued=queued)
            if queued:  # the buffer is still in use
                return room
            slot._pinned.room.buffer.fill_(0xD5)
            return room

        def release_poisoned(slot):
            release(slot)
            with torch.cuda.stream(slot._stream):
                slot._stream.wait_event(slot._consumed)
                slot._room.buffer.fill_(0xE5)

        monkeypatch.setattr(CudaSlot, "begin", begin_poisoned)
        monkeypatch.setattr(CudaSlot, "release", release_poisoned)

    def sums(self, loader, num_epochs: int, delay: int = 0) -> list[tuple[float, int]]:
        """Of each batch; the consumer's stream is late."""
        found = []
        for _ in range(num_epochs):
            for number, (images, labels) in enumerate(loader):
                if delay and number % 3 == 0:
                    torch.cuda._sleep(delay)
                places = torch.arange(1, images[0].numel() + 1, device=images.device, dtype=torch.float64)
                numbers = torch.arange(1, len(labels) + 1, device=images.device)
                pixels = (images.double().flatten(1) * 255).round() @ places.remainder(251)
                found.append(((pixels * numbers).sum(), (labels * numbers).sum()))
        return [(float(pixels), int(labels)) for pixels, labels in found]

    @pytest.mark.parametrize("resident", [False, True])
    @pytest.mark.parametrize("echo", [1, 2, 1.5])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"transforms": [ToDtype(torch.float32, True, channels_last=True)]},
            {"batch_size": 7},
            {"batch_size": 300, "drop_last": True, "memory_bytes": 80 << 20},
            {"shuffle": False},
        ],
    )
    def test_the_same_as_on_the_cpu(self, images, poisoned, resident, echo, options):
        if resident:
            options = {name: value for name, value in options.items() if name != "memory_bytes"}
        options = {"batch_size": 64, "echo": echo, "resident": resident, "seed": 2, **FLOAT, **options}
        with ChunkLoader(images, **options) as loader:
            expected = self.sums(loader, 2)
        with ChunkLoader(images, device="cuda", **options) as loader:
            assert loader.is_resident == resident
            assert self.sums(loader, 2, delay=10_000_000) == expected

    @pytest.mark.parametrize("kind", [{"compression": "gzip"}, {"chunks": (8, 3, 32, 64)}])
    @pytest.mark.filterwarnings("ignore:field .* is read through h5py:UserWarning")
    def test_compressed_and_through_hdf5(self, tmp_path, poisoned, kind):
        data = values((203, 3, 64, 64), np.uint8)
        path = make_file(tmp_path / "c.h5", images=(data, {"chunks": (8, 3, 64, 64), **kind}), labels=(LABELS, {}))
        for resident in (False, True):
            found = []
            for device, delay in (("cpu", 0), ("cuda", 10_000_000)):
                with ChunkLoader(path, 32, device=device, resident=resident, **FLOAT) as loader:
                    found.append(self.sums(loader, 2, delay))
            assert found[0] == found[1]

    def test_another_stream_of_the_consumer(self, images, poisoned):
        with ChunkLoader(images, 64, resident=False, **FLOAT) as loader:
            expected = self.sums(loader, 2)
        stream = torch.cuda.Stream()
        options = {"resident": False, "device": "cuda", **FLOAT}
        with ChunkLoader(images, 64, **options) as loader, torch.cuda.stream(stream):
            assert self.sums(loader, 2, delay=10_000_000) == expected

    def test_resident(self, images):
        """Only if that is asked for, because the model takes its memory later."""
        assert not ChunkLoader(images, 64, device="cuda").is_resident
        loader = ChunkLoader(images, 64, device="cuda", resident=True)
        assert loader.is_resident and "resident" in repr(loader)
        with ChunkLoader(images, 64, resident=True) as cpu, loader:
            assert [labels.tolist() for _, labels in loader] == [labels.tolist() for _, labels in cpu]
        assert ChunkLoader(images, 64, device="cuda", memory_bytes=1 << 30, resident=True).is_resident
        with pytest.raises(OptionError, match="but memory_bytes is 100"):
            ChunkLoader(images, 64, device="cuda", memory_bytes=100, resident=True)

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
    @pytest.mark.parametrize("resident", [False, True])
    @pytest.mark.parametrize("echo", [1, 2])
    def test_the_loop_never_waits_for_the_device(self, images, resident, echo):
        """Nothing in it synchronises: the loop runs ahead of the GPU."""
        options = {"echo": echo, "resident": resident, "transforms": [Normalize(MEAN, STD)]}
        with ChunkLoader(images, 64, device="cuda", **options) as loader:
            list(loader)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(2):
                    for _ in loader:
                        torch.cuda._sleep(1_000_000)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("resident", [False, True])
    @pytest.mark.parametrize("echo", [1, 2])
    @pytest.mark.parametrize("how", ["close", "break", "del"])
    def test_memory_comes_back(self, images, resident, echo, how):
        """Without the garbage collector."""
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        gc.disable()
        try:
            loader = ChunkLoader(images, 64, device="cuda", echo=echo, resident=resident)
            for number, _ in enumerate(loader):
                assert torch.cuda.memory_allocated() > before
                if number == 5 and how == "break":
                    break
            del _
            if how in ("close", "break"):  # after a break the loader keeps what the next epoch needs
                loader.close()
            if how == "del":
                del loader
            assert torch.cuda.memory_allocated() == before
        finally:
            gc.enable()

    @pytest.mark.parametrize("transforms", [[], [Normalize(MEAN, STD)]])
    def test_resident_data_is_there_once(self, images, transforms):
        """Batches are gathered a few at a time."""
        gc.collect()
        data, before = 1003 * 3 * 64 * 64, torch.cuda.memory_allocated()
        with ChunkLoader(images, 16, device="cuda", resident=True, transforms=transforms) as loader:
            batches = iter(loader)
            next(batches)  # all is loaded
            torch.cuda.reset_peak_memory_stats()
            for _ in batches:
                pass
            assert data <= torch.cuda.max_memory_allocated() <= data + before + 5 * Converter.together_bytes

    def test_memory_bytes_bounds_it(self, images):
        """Pinned and device memory together."""
        for memory_bytes in (20 << 20, 60 << 20, 200 << 20):
            before = torch.cuda.memory_allocated()
            with ChunkLoader(images, 64, device="cuda", memory_bytes=memory_bytes, resident=False) as loader:
                for _ in loader:
                    pass
                held = torch.cuda.memory_allocated() - before
                assert 0 < 2 * held <= memory_bytes + (80 << 10) + 2 * Converter.together_bytes


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_uses_no_locks_of_its_parents_threads(path, monkeypatch):
    """They may be held for ever. The child gets an error, and can iterate again."""
    sampler = ChunkSampler(ChunkDataset(path), 4, window_chunks=1, num_workers=1)
    loader = ChunkLoader(path, batch_sampler=sampler, resident=False, num_threads=2)
    batches, parent = iter(loader), os.getpid()
    next(batches)
    planner, pool = loader._feed._planner, loader._feed._pool._native

    def check(used, *_):
        assert os.getpid() == parent or used not in (planner, pool)

    def in_child():
        with pytest.raises(FileError, match="fork"):
            list(batches)
        assert len(epoch_of(loader)) == len(loader)
        loader.close()

    with monkeypatch.context() as patch:
        for call in ("take", "stop", "join"):
            watch(patch, f"feed.stream._Planner.{call}", check, note=False)
        for call in ("submit", "wait", "cancel", "_ask") if pool else ():
            watch(patch, f"native.NativePool.{call}", check, note=False)
        assert in_fork(in_child) == 0
    assert len(list(batches)) == len(loader) - 1
    loader.close()


@pytest.mark.parametrize(("native", "number"), [("1", 1), ("0", 1), ("0", 2), ("0", 3)])
def test_an_interrupt_while_a_thread_starts_leaves_no_thread(path, monkeypatch, native, number):
    monkeypatch.setenv("H5CHUNK_NATIVE", native)
    with ChunkLoader(path, 4, resident=False, num_threads=2) as loader:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(
                threading.Thread, "start", _interrupted(threading.Thread.start, number if native == "0" else 1)
            )
            list(loader)
        assert not reading_threads()
        assert len(epoch_of(loader)) == len(loader)


def _interrupted(start, number):
    """Start threads, and raise KeyboardInterrupt after one of them."""
    interrupt = nth(number, failure(KeyboardInterrupt))

    def start_and_fail(thread):
        start(thread)
        interrupt()

    return start_and_fail


def test_an_interrupt_while_the_first_windows_are_asked_for(path, monkeypatch):
    """A signal may come anywhere in the loader: it can be closed, and iterated again."""
    with ChunkLoader(path, 4, resident=False) as loader:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            watch(patch, "feed.loader.weakref.finalize", after=nth(1, failure(KeyboardInterrupt)), note=False)
            list(loader)
        loader.close()
        assert len(epoch_of(loader)) == len(loader)
