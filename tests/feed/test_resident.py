"""Resident data: read once, in the order of the epoch, and gone when it is not wanted any more."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.faults import nth, watch
from support.foreign import make_file
from support.leftovers import descriptors, in_fork, nothing_is_left, reading_threads
from support.loader_files import IMAGES, LABELS, N, epoch_of, large, path
from support.loaders import loader_by
from support.subsets import flat_epochs, flat_tensors, subset_of_kind

import h5chunk
from h5chunk.errors import FileError, OptionError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.resident import AHEAD
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.machine import available_cores
from h5chunk.transforms import Normalize

__all__ = ["large", "nothing_is_left", "path"]

WAIT_S = 30


def load_whole(path, batch_size: int = 16, **options) -> ChunkLoader:
    return loader_by(path, batch_size, resident=True, **options)


def in_order(path, batch_size: int = 16, epoch: int = 0, **options) -> list[list[int]]:
    """The batches of a loader that reads window by window."""
    order = loader_by(path, batch_size, resident=False, **options).order
    return [batch.tolist() for batch in replace(order, epoch=epoch).batches()]


@pytest.fixture
def reads(monkeypatch):
    """How many samples were asked of the file."""
    counts: list[int] = []
    watch(monkeypatch, "load window", lambda _, window, slot: counts.append(len(window.samples)), note=False)
    return counts


# The same batches as from the file


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_samples=st.integers(1, N),
    chunk_samples=st.integers(0, N),
    batch_size=st.integers(1, 230),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    reuse=st.booleans(),
    seed=st.sampled_from([0, 7, (1 << 64) - 1]),
    reader=st.sampled_from(["auto", "h5py"]),
    compression=st.sampled_from([None, "gzip"]),
)
def test_the_order_of_the_file(tmp_path, num_samples, chunk_samples, batch_size, reuse, reader, compression, **order):
    options = {"chunks": (chunk_samples, 3, 5, 6), "maxshape": (None, 3, 5, 6), "compression": compression}
    path = make_file(
        tmp_path / "a.h5",
        images=(IMAGES[:num_samples], options if chunk_samples else {}),
        labels=(LABELS[:num_samples], {}),
    )
    order["drop_last"] &= batch_size <= num_samples
    with load_whole(path, batch_size, reuse=reuse, reader=reader, **order) as loader:
        assert loader.is_resident
        for epoch in range(3):
            expected = in_order(path, batch_size, epoch, **order)
            assert len(loader) == len(expected)
            assert epoch_of(loader) == expected
            assert loader.report.fresh_samples == loader.report.samples == sum(map(len, expected))
            assert loader.report.batches == len(expected)


@pytest.mark.parametrize("echo", [1, 1.5])
def test_samples_without_values(tmp_path, echo):
    made = make_file(tmp_path / "a.h5", images=(np.zeros((20, 3, 0), np.float32), {}))
    with load_whole(ChunkDataset(made, fields=["images"]), 8, echo=echo) as loader:
        assert [len(images) for (images,) in loader][:3] == [8, 8, 4]


def test_orders_do_not_pile_up(path):
    with load_whole(path) as loader:
        for epoch in range(20, 0, -2):
            loader.set_epoch(epoch)
            list(loader)
            assert len(loader._feed._planned) <= 2


def test_the_next_order_is_drawn_while_an_epoch_is_trained(path, monkeypatch):
    drawn: dict[int, str] = {}
    there = threading.Event()

    def note(drawing):
        drawn[drawing.order.epoch] = threading.current_thread().name
        if drawing.order.epoch == 1:
            there.set()

    watch(monkeypatch, "feed.resident._DrawnOrder._draw", note)
    with load_whole(path) as loader:
        batches = iter(loader)
        next(batches)
        assert there.wait(WAIT_S)
        list(batches)
        list(loader)
        assert all(name.startswith("h5chunk-order") for name in drawn.values())
        assert sorted(drawn)[:2] == [0, 1]


def test_a_break_and_on(path, reads):
    """Nothing is read again, and the epoch after it comes."""
    with load_whole(path) as loader:
        for number, _ in enumerate(loader):
            if number == 4:
                break
        assert loader.order.epoch == 1
        assert epoch_of(loader) == in_order(path, epoch=1)
        with pytest.raises(ZeroDivisionError):
            for _ in loader:
                raise ZeroDivisionError
        assert epoch_of(loader) == in_order(path, epoch=3)
    assert sum(reads) == N


def test_each_sample_is_read_once(path, reads):
    with load_whole(path) as loader:
        assert not reads
        for _ in range(2):
            list(loader)
    assert sum(reads) == N


def test_the_file_is_closed_once_it_is_read(path):
    with load_whole(path) as loader:
        list(loader)
        assert not [found for found in descriptors() if str(path) in found]
        assert [thread.name for thread in reading_threads() if "reader" in thread.name] == []
        expected = in_order(path, epoch=1)
        path.unlink()
        assert epoch_of(loader) == expected


# Echoes, and what is done to batches


@pytest.mark.parametrize("echo", [2, 3, 2.0])
@pytest.mark.parametrize("drop_last", [False, True])
def test_whole_echoes(path, echo, drop_last):
    with load_whole(path, echo=echo, drop_last=drop_last, seed=4) as loader:
        for epoch in range(2):
            fresh = in_order(path, 16, epoch, drop_last=drop_last, seed=4, echo=echo)
            batches = epoch_of(loader)
            assert batches[: len(fresh)] == fresh
            assert len(batches) == len(loader) == echo * len(fresh)
            counts = Counter(label for batch in batches for label in batch)
            assert set(counts.values()) == {int(echo)}
            assert len({frozenset(batch) for batch in batches}) == len(batches)
            report = loader.report
            assert (report.fresh_samples, report.samples) == (len(counts), counts.total())


def test_a_part_of_an_echo(path):
    with load_whole(path, echo=1.5) as loader:
        batches = epoch_of(loader)
        assert len(batches) == len(loader) == 13 + 6
        assert batches[:13] == in_order(path, echo=1.5)
        echoed = [label for batch in batches[13:] for label in batch]
        assert len(set(echoed)) == len(echoed) == 6 * 16


@pytest.mark.filterwarnings("ignore:field .* is read through h5py:UserWarning")
@pytest.mark.parametrize("options", [{"chunks": chunks, "scaleoffset": 8} for chunks in ((8, 2, 5, 3), (4, 3, 5, 6))])
def test_fields_through_hdf5(tmp_path, options):
    path = make_file(tmp_path / "a.h5", images=(IMAGES, options), labels=(LABELS, {}))
    with load_whole(path) as loader:
        assert "images: h5py" in repr(loader)
        assert epoch_of(loader) == in_order(path)


# Memory


def test_repr(path):
    shown = repr(load_whole(path))
    for part in ("all 203 samples resident", "KiB", "cpu"):
        assert part in shown


def test_on_the_cpu_only_if_asked(path):
    for loader in (ChunkLoader(path, 16), ChunkLoader(path, 16, memory_bytes=1 << 30), ChunkLoader(path, 16, echo=2)):
        assert not loader.is_resident


@pytest.mark.parametrize("resident", ["yes", None, 1, 0, "auto"])
def test_options_that_cannot_be(path, resident):
    with pytest.raises(OptionError, match=r"resident is .*: pass True or False"):
        ChunkLoader(path, 16, resident=resident)


def test_memory_bytes(path, monkeypatch):
    """What is held while it is read counts, and the message says what would do."""
    with pytest.raises(
        OptionError, match=r"resident=True needs \d+ bytes, \d+ of them .* memory_bytes is 100: raise"
    ) as refused:
        load_whole(path, memory_bytes=100)
    needed, held = (int(word) for word in str(refused.value).split() if word.isdigit())
    assert N * 98 <= held <= needed < 2 * N * 98
    with pytest.raises(OptionError, match=f"memory_bytes is {needed - 1}"):
        load_whole(path, memory_bytes=needed - 1)
    made = watch(monkeypatch, "make slot")
    with load_whole(path, memory_bytes=needed) as loader:
        assert epoch_of(loader) == in_order(path)
    assert [num_samples for _, _, num_samples, *_ in made] == [N]  # it is read where it stays


def test_little_data_is_loaded_in_little_memory(path):
    with load_whole(path, memory_bytes=3 * N * 98) as loader:
        assert epoch_of(loader) == in_order(path)


@pytest.mark.parametrize(
    ("transforms", "reuse"), [([], False), ([Normalize(0.5, 0.5)], False), ([Normalize(0.5, 0.5)], True)]
)
def test_memory_of_batches_is_used_again(large, transforms, reuse):
    with load_whole(large, 60, drop_last=True, transforms=transforms, reuse=reuse) as loader:
        places = {images.data_ptr() for _ in range(6) for images, _ in loader}
    assert len(places) <= 3 + AHEAD * available_cores()  # the batches that threads gather ahead are some of them


@pytest.mark.parametrize("suspended", [False, True])
def test_closing_frees_the_data(path, suspended):
    loader = load_whole(path)
    batches = iter(loader)
    next(batches)
    data = [weakref.ref(field) for field in loader._feed._columns]
    if not suspended:
        list(batches)
    gc.collect()
    gc.disable()
    try:
        loader.close()
        assert len(data) == 2 and all(ref() is None for ref in data)
        assert not reading_threads()
    finally:
        gc.enable()
    if suspended:
        with pytest.raises(OptionError, match="closed"):
            list(batches)
    assert epoch_of(loader) == in_order(path, epoch=1)  # read once more
    loader.close()


# What goes wrong


def fail_at(monkeypatch, number: int, work) -> None:
    """Do something when so many parts were read."""
    monkeypatch.setenv("H5CHUNK_NATIVE", "0")
    watch(monkeypatch, "read part", nth(number, work))


def test_a_file_that_changes_while_it_is_read(path, monkeypatch):
    def change():
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))

    fail_at(monkeypatch, 1, change)
    loader = load_whole(path)
    with pytest.raises(FileError, match=r"a\.h5: the file was replaced or changed"):
        next(iter(loader))
    assert not reading_threads() and not [found for found in descriptors() if str(path) in found]


def test_interrupted_in_the_loop(path, reads):
    def loop():
        for _ in loader:
            raise KeyboardInterrupt

    with load_whole(path) as loader:
        with pytest.raises(KeyboardInterrupt):
            loop()
        assert epoch_of(loader) == in_order(path, epoch=1)
    assert sum(reads) == N


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("when", ["in an epoch", "between epochs"])
def test_a_fork_goes_on_with_its_copy(path, when):
    """The thread that draws orders stays behind."""
    loader = load_whole(path)
    batches = iter(loader)
    found = [next(batches)[1].tolist()]

    def iterate():
        rest = [labels.tolist() for _, labels in batches]
        if when == "in an epoch":
            assert found + rest == in_order(path)
        for epoch in (1, 2):
            assert epoch_of(loader) == in_order(path, epoch=epoch)
        loader.close()

    if when == "between epochs":
        found += [labels.tolist() for _, labels in batches]
    assert in_fork(iterate) == 0
    assert in_fork(loader.close) == 0
    found += [labels.tolist() for _, labels in batches]
    assert found == in_order(path)
    assert epoch_of(loader) == in_order(path, epoch=1)
    loader.close()


def test_seconds_and_waiting(path):
    with load_whole(path) as loader:
        before = time.perf_counter()
        list(loader)
        took = time.perf_counter() - before
        assert 0 <= loader.report.waited_s <= loader.report.seconds <= took


# Subsets


@pytest.mark.parametrize("kind", ["dense", "matrix", "ragged", "windows"])
def test_only_a_subset_is_kept(tmp_path, kind, reads):
    data = subset_of_kind(kind, tmp_path)
    streamed = flat_epochs(data)
    reads.clear()
    assert flat_epochs(data, resident=True) == streamed
    assert sum(reads) == 70
    loader = ChunkLoader(data, 16, resident=True)
    assert "all 70 samples resident" in repr(loader)
    sampler = ChunkSampler(data, 16, seed=3, weights=np.arange(70))
    assert flat_weighted(data, sampler, resident=True) == flat_weighted(data, sampler)


def flat_weighted(data: ChunkDataset, sampler: ChunkSampler, **options) -> list[list[float]]:
    sampler.set_epoch(0)
    with loader_by(data, batch_sampler=sampler, **options) as loader:
        return flat_tensors(loader)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["dense", "matrix", "ragged", "windows"])
def test_only_a_subset_is_kept_on_a_gpu(tmp_path, kind):
    data = subset_of_kind(kind, tmp_path)
    assert flat_epochs(data, resident=True, device="cuda") == flat_epochs(data)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_subset_takes_the_memory_of_its_samples(tmp_path):
    h5chunk.convert({"images": np.zeros((2000, 3, 64, 64), np.uint8)}, tmp_path / "a.h5")
    before = torch.cuda.memory_allocated()
    data = ChunkDataset(tmp_path / "a.h5").subset(range(100))
    with ChunkLoader(data, 10, device="cuda", resident=True) as loader:
        list(loader)
        assert torch.cuda.memory_allocated() - before < 8 << 20  # the file has 24 MiB
