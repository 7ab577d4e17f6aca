"""Echoes: every sample as often as it should be, in batches of another cut, and only where they are asked for."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.faults import failure, watch
from support.foreign import make_file, values
from support.leftovers import nothing_is_left, readers_of_files, reading_threads
from support.loader_files import (
    CHANNELS_LAST,
    CONVERSIONS,
    IMAGES,
    LABELS,
    N,
    epoch_of,
    large,
    least_memory,
    path,
    slots_of,
)
from support.loaders import loader_by
from support.orders import ordered

from h5chunk.errors import OptionError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.feed.slots import CpuSlot
from h5chunk.plan.order import Order
from h5chunk.plan.permutation import permutation
from h5chunk.plan.slots import check_echo, echo_pass, num_echoed

__all__ = ["large", "nothing_is_left", "path"]


# Planning


@given(st.one_of(st.integers(1, 999), st.floats(1, 999, allow_nan=False)), st.integers(0, 10_000))
def test_the_number_of_echoes_is_exact(echo, fresh):
    """Rounded down, never by a binary fraction: 1.1 is eleven tenths."""
    found = num_echoed(echo, fresh)
    assert found == math.floor((Fraction(str(echo)) - 1) * fresh)
    assert 0 <= num_echoed(echo, fresh + 1) - found <= math.ceil(echo)


def test_tenths_do_not_add_up_to_less():
    assert [num_echoed(1.1, fresh) for fresh in (9, 10, 30, 70, 1000)] == [0, 1, 3, 7, 100]
    assert (num_echoed(1.7, 10), num_echoed(1.15, 20)) == (7, 3)


def test_a_pass_is_a_permutation_of_its_own():
    """Of each seed, epoch, window and number, and of no other thing that is drawn from them."""
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 2)]
    passes = [echo_pass(200, *key).tolist() for key in keys]
    drawn = [permutation(200, 0, stream=(stream, 0, 0)).tolist() for stream in range(5)]
    assert all(sorted(each) == list(range(200)) for each in passes)
    assert len({tuple(each) for each in passes + drawn}) == len(keys) + 5
    assert echo_pass(200, 0, 0, 0, 0).tolist() == passes[0]
    assert echo_pass(0, 0, 0, 0, 0).tolist() == []


@pytest.mark.parametrize("echo", [1, 1.0, 1.5, 2, 999, np.float32(2)])
def test_echoes_that_can_be(echo):
    check_echo(echo)


@pytest.mark.parametrize("echo", [0, 0.99, -1, -2.0, 1000, math.inf, math.nan, True, None, "2", "auto", [2], (), 2j])
def test_echoes_that_cannot_be(path, echo):
    with pytest.raises(OptionError, match=r"echo is .*pass the number of times that each sample is used"):
        ChunkLoader(path, 16, echo=echo)


# Every sample as often as it should be


def check_windows(batches: list[list[int]], order: Order, echo: float) -> None:
    """Batches are window after window: the fresh ones in order, then echoes, each pass all samples of the window."""
    position = fresh_batches = 0
    for window in order.windows():
        count, samples = len(window.batches), sorted(window.samples.tolist())
        fresh = batches[position : position + count]
        assert [sample for batch in fresh for sample in batch] == window.samples.tolist()
        assert all(len(batch) == order.batch_size for batch in fresh[:-1])
        position, fresh_batches = position + count, fresh_batches + count
        due = num_echoed(echo, fresh_batches) - num_echoed(echo, fresh_batches - count)
        for _ in range(due // count):
            whole = batches[position : position + count]
            assert [len(batch) for batch in whole] == [len(batch) for batch in fresh]
            assert sorted(sample for batch in whole for sample in batch) == samples
            position += count
        rest = [sample for batch in batches[position : position + due % count] for sample in batch]
        assert len(set(rest)) == len(rest) and set(rest) <= set(samples)
        position += due % count
    assert position == len(batches)


@settings(max_examples=35, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_samples=st.integers(1, N),
    chunk_samples=st.integers(0, 60),
    batch_size=st.integers(1, 60),
    window_chunks=st.integers(1, 20) | st.none(),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.sampled_from([0, 1, (1 << 64) - 1]),
    echo=st.sampled_from([2, 3, 2.0, 1.5, 1.25, 1.1, 2.75]),
    reuse=st.booleans(),
    reader=st.sampled_from(["auto", "h5py"]),
)
def test_every_sample_as_often_as_it_should_be(
    tmp_path, num_samples, chunk_samples, batch_size, echo, reuse, reader, **order
):
    path = make_file(
        tmp_path / "a.h5",
        images=(IMAGES[:num_samples], {"chunks": (chunk_samples, 3, 5, 6), "maxshape": (None, 3, 5, 6)})
        if chunk_samples
        else (IMAGES[:num_samples], {}),
        labels=(LABELS[:num_samples], {}),
    )
    order["drop_last"] &= batch_size <= num_samples
    with loader_by(**ordered(path, batch_size, **order), echo=echo, reuse=reuse, reader=reader) as loader:
        assert loader.order.interleave == 1
        for _ in range(3):
            now = loader.order
            batches = epoch_of(loader)
            assert len(batches) == len(loader) == now.num_batches + num_echoed(echo, now.num_batches)
            check_windows(batches, now, echo)
            counts = Counter(sample for batch in batches for sample in batch)
            if echo == int(echo):
                assert set(counts.values()) <= {int(echo)}
            report = loader.report
            fresh = min(num_samples, now.num_batches * batch_size)
            assert len(counts) == fresh
            assert (report.batches, report.samples) == (len(batches), counts.total())
            assert report.fresh_samples == (fresh if batches else 0)


@pytest.mark.parametrize("echo", [1.5, 2])
def test_the_fresh_batches_are_those_of_the_sampler(path, echo):
    dataset = ChunkDataset(path)
    sampler = ChunkSampler(dataset, 16, seed=3, window_chunks=17, num_workers=1)
    with ChunkLoader(**ordered(path, 16, window_chunks=17, seed=3), echo=echo) as loader:
        for epoch in range(2):
            order = loader.order
            fresh, batches = [], iter(epoch_of(loader))
            for window in order.windows():
                fresh += [next(batches) for _ in window.batches]
                end = len(fresh)
                due = num_echoed(echo, end) - num_echoed(echo, end - len(window.batches))
                for _ in range(due):
                    next(batches)
            assert list(batches) == []
            sampler.set_epoch(epoch)
            assert fresh == [list(rows) for rows in sampler]


def test_echoes_are_another_cut(path):
    """The blog's scheme: what was split in A and B is split in C and D."""
    with ChunkLoader(**ordered(path, 16, window_chunks=16), echo=3) as loader:
        batches = [frozenset(batch) for batch in epoch_of(loader)]
    first, second, third = batches[:4], batches[4:8], batches[8:12]
    assert frozenset.union(*first) == frozenset.union(*second) == frozenset.union(*third)
    assert len({*first, *second, *third}) == 12


def test_without_shuffling_the_samples_of_a_batch_come_again(path):
    with ChunkLoader(path, 16, shuffle=False, echo=2) as loader:
        batches = epoch_of(loader)
    for number in range(13):
        assert batches[2 * number] == list(range(16 * number, min(N, 16 * number + 16)))
        assert sorted(batches[2 * number + 1]) == batches[2 * number] != batches[2 * number + 1]


def test_without_shuffling_each_epoch_has_other_echoes(path):
    with ChunkLoader(path, 16, shuffle=False, echo=2) as loader:
        one, two = epoch_of(loader), epoch_of(loader)
    assert one[::2] == two[::2] and all(a != b for a, b in zip(one[1:-2:2], two[1:-2:2], strict=True))


def test_a_function_of_seed_and_epoch(path):
    with ChunkLoader(**ordered(path, 16, window_chunks=16, seed=1), echo=2.5) as loader:
        epochs = [epoch_of(loader) for _ in range(3)]
    options = {"num_threads": 1, "reuse": True, "memory_bytes": 1 << 20}
    with ChunkLoader(**ordered(path, 16, window_chunks=16, seed=1), echo=2.5, **options) as again:
        for epoch in (2, 0, 1):
            again.set_epoch(epoch)
            assert epoch_of(again) == epochs[epoch]
    with ChunkLoader(**ordered(path, 16, window_chunks=16, seed=2), echo=2.5) as other:
        epochs.append(epoch_of(other))
    for one in range(4):
        for two in range(one):
            assert all(frozenset(a) != frozenset(b) for a, b in zip(epochs[one][:20], epochs[two][:20], strict=True))


def test_one_is_no_echo(path):
    for echo in (1, 1.0):
        with ChunkLoader(path, 16, echo=echo) as loader, ChunkLoader(path, 16) as plain:
            assert loader.order == plain.order and "; echo" not in repr(loader)
            assert epoch_of(loader) == epoch_of(plain)
            assert loader.report.fresh_samples == loader.report.samples == N


# Windows


@pytest.mark.parametrize("echo", [1.5, 2])
@pytest.mark.parametrize("batch_size", [1, 3, 16, 30, 50, 101])
def test_windows_are_of_two_batches_at_least(path, echo, batch_size):
    assert ChunkLoader(path, batch_size, echo=echo).order.window_batches >= 2
    assert ChunkLoader(**ordered(path, batch_size, window_chunks=1), echo=echo).order.window_chunks == 1
    plain, echoed = (ChunkLoader(path, 2, echo=some).order for some in (1, echo))
    assert plain.window_chunks == echoed.window_chunks  # they are large enough already


def test_memory_bytes_makes_windows_smaller_but_not_of_one_batch(tmp_path):
    """Echoes of one batch are that batch."""
    images = values((600, 90), np.uint8)
    path = make_file(tmp_path / "a.h5", images=(images, {"chunks": (4, 90)}), labels=(np.arange(600), {}))
    wide = ChunkLoader(path, 8, echo=2)
    assert wide.order.window_batches > 2
    for memory_bytes in range(0, 100_000, 500):
        try:
            loader = ChunkLoader(path, 8, echo=2, memory_bytes=memory_bytes)
        except OptionError as error:
            needed = int(str(error).split("need ")[1].split(":")[0])
            continue
        assert 2 <= loader.order.window_batches <= wide.order.window_batches
        if loader.order.window_batches > 2:
            break
    assert ChunkLoader(path, 8, echo=2, memory_bytes=needed).order.window_batches == 2
    with ChunkLoader(path, 8, echo=2, memory_bytes=needed) as loader:
        assert Counter(label for _, labels in loader for label in labels.tolist()) == dict.fromkeys(range(600), 2)


@pytest.mark.parametrize("echo", [1.5, 3])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("window_chunks", [1, 8, 100])
def test_the_least_memory_is_enough(path, echo, reuse, window_chunks):
    """No deadlock, whatever number of slots."""
    options = {**ordered(path, 16, window_chunks=window_chunks), "echo": echo, "reuse": reuse, "num_threads": 1}
    with ChunkLoader(**options, memory_bytes=least_memory(**options)) as loader:
        for _ in range(2):
            counts = Counter(sample for batch in epoch_of(loader) for sample in batch)
            assert len(counts) == N and loader.report.fresh_samples == N


def test_repr_and_length(path):
    loader = ChunkLoader(path, 16, echo=2)
    assert "; echo 2; " in repr(loader)
    assert len(loader) == 26
    assert len(ChunkLoader(path, 16, echo=2, drop_last=True)) == 24


# Memory, and what is left behind


def test_echoes_take_little_memory(large):
    """Two buffers for echoes, as a loop holds one batch, and one for two fresh batches; not some for each slot."""
    with ChunkLoader(**ordered(large, 60, window_chunks=20, drop_last=True), echo=3, reuse=True) as loader:
        assert len({images.data_ptr() for _ in range(4) for images, _ in loader}) <= 4


def test_echoes_that_are_held_are_never_overwritten(large):
    images = {}
    with ChunkLoader(**ordered(large, 60, window_chunks=20), echo=3) as loader:
        held = [batch for _ in range(2) for batch in loader]
        for some, labels in held:
            for image, label in zip(some[::20], labels[::20].tolist(), strict=True):
                assert images.setdefault(label, image).equal(image)


@pytest.fixture
def slots(monkeypatch):
    """The slots that there are."""
    alive: weakref.WeakSet[CpuSlot] = weakref.WeakSet()
    watch(monkeypatch, "make slot", lambda slot, *_, **__: alive.add(slot), note=False)
    gc.collect()
    gc.disable()
    yield alive
    gc.enable()


@pytest.mark.parametrize("echo", [2, 1.5])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("batch", [0, 3, 5, 8, 11])
def test_a_break_keeps_threads_and_slots_until_close(path, slots, echo, reuse, batch):
    """Then nothing is left, not even for the garbage collector to find: a slot on a GPU is much memory."""
    loader = ChunkLoader(**ordered(path, 16, window_chunks=16), echo=echo, reuse=reuse)
    for number, _ in enumerate(loader):
        if number == batch:
            break
    kept, readers = set(slots), readers_of_files()
    assert kept and readers
    loader.set_epoch(0)
    check_windows(epoch_of(loader), Order(N, 4, 16, 16, interleave=1), echo)
    assert set(slots) == kept and readers <= readers_of_files()
    del kept
    loader.close()
    assert not reading_threads() and not slots


def test_interrupted_while_gathering_an_echo(path, monkeypatch, slots):
    loader = ChunkLoader(path, 16, echo=2)
    with monkeypatch.context() as patch:
        watch(patch, "feed.batches.BatchMaker.take", failure(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(loader)
    assert not reading_threads()
    loader.set_epoch(0)
    assert Counter(sample for batch in epoch_of(loader) for sample in batch) == dict.fromkeys(range(N), 2)
    loader.close()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_loop(path, slots, kind):
    def loop():
        for number, _ in enumerate(loader):
            if number == 6:
                raise kind

    loader = ChunkLoader(**ordered(path, 16, window_chunks=16), echo=2)
    with pytest.raises(kind):
        loop()
    loader.close()
    assert not reading_threads() and not slots


def test_windows_that_were_echoed_are_no_rubbish(path, slots, monkeypatch):
    """Nor are their orders, which hold much memory until the garbage collector runs."""
    reads: list[weakref.ref] = []
    watch(monkeypatch, "load window", after=lambda read, *_: reads.append(weakref.ref(read)), note=False)
    with ChunkLoader(**ordered(path, 16, window_chunks=16), echo=2) as loader:
        for _ in range(5):
            list(loader)
        assert sum(read() is not None for read in reads) <= slots_of(loader) < len(reads)


# What is done to batches


@pytest.mark.parametrize("transform", CONVERSIONS)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("way", [{"echo": 2}, {"resident": True}])
def test_all_are_converted_as_fresh_ones_are(path, transform, reuse, way):
    seen: dict[int, torch.Tensor] = {}
    options = {"transforms": [transform]}
    with ChunkLoader(path, 16, reuse=reuse, **way, **options) as loader, ChunkLoader(path, 16, **options) as plain:
        for images, labels in plain:
            seen.update(zip(labels.tolist(), images.clone(), strict=True))
        for images, labels in loader:
            assert images.dtype == seen[0].dtype
            assert images.equal(torch.stack([seen[label] for label in labels.tolist()]))
            if transform == CHANNELS_LAST:
                assert images.is_contiguous(memory_format=torch.channels_last)


def test_each_echo_is_transformed_anew(path):
    """So that random augmentation differs."""
    calls: list[int] = []

    def transform(images):
        calls.append(len(images))
        return images

    with ChunkLoader(path, 16, echo=3, transforms=[transform]) as loader:
        assert sum(len(batch[0]) for batch in loader) == sum(calls) == 3 * N


@pytest.mark.filterwarnings("ignore:the last batch of each epoch is empty")
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("num_samples", [1, 5])
def test_a_rank_without_samples_has_empty_echoes(path, num_samples, resident):
    """Where fewer samples than ranks are left, as many batches on each rank, none of them waited for in vain."""
    dataset = ChunkDataset(path).subset(np.arange(num_samples))
    lengths = []
    for rank in range(2):
        sampler = ChunkSampler(dataset, 4, rank=rank, world_size=2, lanes=2)
        with ChunkLoader(dataset, batch_sampler=sampler, echo=3, resident=resident) as loader:
            shapes = [tuple(images.shape) for images, _ in loader]
            assert len(shapes) == len(loader) == 3 and {shape[1:] for shape in shapes} == {IMAGES.shape[1:]}
            lengths.append([shape[0] for shape in shapes])
    assert np.sum(lengths, axis=0).tolist() == [num_samples] * 3
