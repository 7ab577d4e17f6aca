"""Predicted reads against counting them: every batch, every order, every cache."""

from __future__ import annotations

import doctest
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h5chunk.errors import OptionError
from h5chunk.plan import predict as predict_module
from h5chunk.plan import stack as stack_module
from h5chunk.plan.order import Order
from h5chunk.plan.predict import (
    ReadPrediction,
    chunk_trace,
    expected_chunks,
    expected_workers,
    kept_across_epochs,
    predict_order,
    predict_random,
    predict_sequential,
    predict_shuffled,
)
from h5chunk.plan.stack import lru_reads, stack_distances

many = settings(max_examples=80, deadline=None)
traces = st.lists(st.integers(0, 12), max_size=80).map(lambda chunks: np.array(chunks, np.int64))


class Lru:
    """A cache that evicts what was used least recently, step by step; or nothing."""

    def __init__(self, room: int, evicts: bool = True) -> None:
        self.room, self.evicts, self.reads = room, evicts, 0
        self.held: OrderedDict[int, None] = OrderedDict()

    def ask(self, chunks: Iterable[int]) -> Lru:
        for chunk in chunks:
            if chunk in self.held:
                self.held.move_to_end(chunk)
                continue
            self.reads += 1
            if self.evicts or len(self.held) < self.room:
                self.held[chunk] = None
            if len(self.held) > self.room:
                self.held.popitem(last=False)
        return self


# traces


@given(traces)
@many
def test_stack_distances_are_those_of_a_stack(trace):
    stack: list[int] = []
    expected = []
    for chunk in trace.tolist():
        expected.append(stack.index(chunk) if chunk in stack else -1)
        stack = [chunk, *(other for other in stack if other != chunk)]
    assert stack_distances(trace).tolist() == expected


@given(traces)
@many
def test_reads_at_every_size(trace):
    reads = lru_reads(trace)
    assert len(reads) == len(set(trace.tolist())) + 1
    assert reads.tolist() == [Lru(room).ask(trace.tolist()).reads for room in range(len(reads))]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 63, 64, 65, 1000, 5000])
def test_traces_of_any_length(size):
    trace = np.random.default_rng(size).integers(-5, size // 3 + 2, size)
    reads = lru_reads(trace)
    for room in {0, 1, 2, len(reads) // 2, len(reads) - 1}:
        if room < len(reads):
            assert reads[room] == Lru(room).ask(trace.tolist()).reads


def test_a_long_trace_takes_seconds_at_most():
    trace = np.random.default_rng(0).integers(0, 5000, 200_000)
    started = time.process_time()
    assert lru_reads(trace)[2500] == pytest.approx(100_000, rel=0.03)
    assert time.process_time() - started < 2


# closed forms


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 35))
@many
def test_yao_is_the_share_of_batches_that_touch(num_samples, chunk, batch):
    batch = min(batch, num_samples)
    sizes = [min(chunk, num_samples - start) for start in range(0, num_samples, chunk)]
    touched = sum(1 - math.comb(num_samples - size, batch) / math.comb(num_samples, batch) for size in sizes)
    assert expected_chunks(num_samples, chunk, batch) == pytest.approx(touched)


@pytest.mark.parametrize(("num_samples", "chunk", "batch"), [(7, 3, 2), (8, 2, 3), (6, 4, 6), (5, 1, 2)])
def test_yao_is_the_mean_of_all_batches(num_samples, chunk, batch):
    found = [len({i // chunk for i in drawn}) for drawn in itertools.combinations(range(num_samples), batch)]
    assert expected_chunks(num_samples, chunk, batch) == pytest.approx(np.mean(found))


def test_yao_of_large_data():
    assert expected_chunks(10**9, 1, 1) == pytest.approx(1, rel=1e-9)
    assert expected_chunks(10**9, 10**6, 256) == pytest.approx(1000 * (1 - 0.999**256), rel=1e-3)
    assert predict_random(64 * 20_000, 64, 256).amplification == pytest.approx(63.6, abs=0.05)


@pytest.mark.parametrize(("num_samples", "chunk", "batch"), [(1000, 20, 30), (1010, 33, 50), (64, 64, 10)])
def test_random_batches(num_samples, chunk, batch):
    rng = np.random.default_rng(1)
    cuts = range(batch, num_samples, batch)
    found = [
        sum(len(np.unique(part // chunk)) for part in np.split(rng.permutation(num_samples), cuts)) for _ in range(150)
    ]
    predicted = predict_random(num_samples, chunk, batch)
    assert predicted.chunk_reads == pytest.approx(np.mean(found), rel=0.01)


@given(st.integers(1, 60), st.integers(1, 15), st.integers(1, 20))
@many
def test_sequential_batches(num_samples, chunk, batch):
    asked = [
        number
        for start in range(0, num_samples, batch)
        for number in sorted({i // chunk for i in range(start, min(start + batch, num_samples))})
    ]
    for room in (0, 1, 2):
        predicted = predict_sequential(num_samples, chunk, batch, cache_chunks=room)
        assert predicted.chunk_reads == Lru(room).ask(asked).reads


def all_traces(chunks: int, samples: int) -> list[tuple[int, ...]]:
    """Every order of the samples of so many chunks, as chunks, equally likely."""
    return sorted(set(itertools.permutations(np.repeat(range(chunks), samples).tolist())))


@pytest.mark.parametrize(("chunks", "samples"), [(3, 2), (2, 4), (4, 2), (3, 1), (2, 3)])
@pytest.mark.parametrize("evicts", [True, False])
def test_a_shuffle_through_a_cache_is_the_mean_of_all_shuffles(chunks, samples, evicts):
    traces = all_traces(chunks, samples)
    for room in range(chunks + 2):
        found = [Lru(room, evicts).ask(trace).reads for trace in traces]
        predicted = predict_shuffled(chunks * samples, samples, cache_chunks=room)
        assert predicted.chunk_reads == pytest.approx(np.mean(found))


@pytest.mark.parametrize(("chunks", "window"), [(64, 8), (60, 16), (20, 64)])
@pytest.mark.parametrize("share", [0, 0.3, 0.9, 1])
def test_windows_through_a_cache(chunks, window, share):
    rng = np.random.default_rng(2)
    room = int(share * min(chunks, window))
    found = []
    for _ in range(60):
        line = np.arange(chunks)
        trace = np.concatenate([rng.permutation(np.repeat(line[i : i + window], 16)) for i in range(0, chunks, window)])
        found.append(Lru(room).ask(trace.tolist()).reads)
    predicted = predict_shuffled(chunks * 16, 16, cache_chunks=room, window_chunks=window)
    assert predicted.chunk_reads == pytest.approx(np.mean(found), rel=0.04)
    if share == 1:
        assert predicted == ReadPrediction(chunks * 16, 16, chunks)


def test_a_short_last_chunk_is_read_too():
    assert predict_shuffled(100, 30, cache_chunks=4).chunk_reads == 4
    assert predict_shuffled(100, 30, cache_chunks=2, window_chunks=2).chunk_reads == 4
    assert predict_shuffled(100, 30, cache_chunks=0, window_chunks=3).chunk_reads == 100
    assert predict_sequential(100, 30, 10).amplification == 1.2


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("evicts", [True, False])
def test_what_a_cache_keeps_is_the_mean_of_all_pairs_of_epochs(chunks, evicts):
    orders = list(itertools.permutations(range(chunks)))
    for room in range(chunks + 2):
        reads = [Lru(room, evicts).ask((*a, *b)).reads for a in orders for b in orders]
        kept = 2 - np.mean(reads) / chunks
        assert kept_across_epochs(room, chunks, evicts=evicts) == pytest.approx(kept)


def test_what_a_large_cache_keeps():
    for share in (0.1, 0.5, 0.9):
        limit = share + (1 - share) * math.log(1 - share)
        assert kept_across_epochs(int(share * 10**6), 10**6) == pytest.approx(limit, abs=1e-5)


@pytest.mark.parametrize(
    ("window", "chunk", "batch", "workers"), [(8, 2, 2, 2), (7, 3, 2, 3), (6, 3, 1, 4), (9, 2, 4, 2), (5, 2, 9, 3)]
)
def test_workers_of_a_chunk(window, chunk, batch, workers):
    """The places of a chunk's samples in a window are equally likely."""
    found = [
        len({place // batch % workers for place in places}) for places in itertools.combinations(range(window), chunk)
    ]
    assert expected_workers(window, chunk, batch, workers) == pytest.approx(np.mean(found))


def test_many_workers_read_each_chunk():
    assert expected_workers(64 * 1000, 64, 256, 8) == pytest.approx(8, abs=0.02)
    assert expected_workers(64 * 1000, 4, 256, 100) == pytest.approx(4, abs=0.1)


# our order


@given(
    st.builds(
        Order,
        num_samples=st.integers(1, 200),
        chunk_samples=st.integers(1, 20),
        batch_size=st.integers(1, 30),
        window_chunks=st.integers(1, 6),
        interleave=st.integers(1, 4),
        seed=st.integers(0, 1000),
    ),
    st.integers(0, 20),
    st.integers(1, 4),
)
@many
def test_our_order_through_caches_of_workers(order, room, workers):
    caches = [Lru(room) for _ in range(workers)]
    for number, batch in enumerate(order.batches()):
        caches[number % workers].ask(sorted({int(sample) // order.chunk_samples for sample in batch}))
    predicted = predict_order(order, cache_chunks=room, num_workers=workers)
    assert predicted.chunk_reads == sum(cache.reads for cache in caches)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_each_chunk_is_read_once_with_room_for_the_open_ones(workers):
    order = Order(64 * 480, 64, 128, 6, interleave=8)
    room = order.open_chunks_of(workers)
    assert predict_order(order, cache_chunks=room, num_workers=workers).reads_per_chunk == 1
    assert predict_order(order, cache_chunks=room - 1, num_workers=workers).amplification > 1


def test_workers_that_share_windows_read_as_many_times():
    order = Order(64 * 480, 64, 64, 48, interleave=1)
    predicted = predict_order(order, cache_chunks=48, num_workers=3)
    assert predicted.reads_per_chunk == pytest.approx(expected_workers(48 * 64, 64, 64, 3), rel=0.01)


def test_the_trace_of_an_order():
    order = Order(12, 3, 4, 2, shuffle=False)
    assert chunk_trace(order).tolist() == [0, 1, 1, 2, 2, 3]
    assert chunk_trace(order, worker=1, num_workers=2).tolist() == [1, 2]
    assert chunk_trace(order, worker=9, num_workers=10).tolist() == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_chunks(0, 1, 1), "num_samples is 0: give at least 1"),
        (lambda: predict_random(5, 0, 1), "chunk_samples is 0: give at least 1"),
        (lambda: predict_sequential(5, 2, -1), "batch_size is -1"),
        (lambda: predict_shuffled(5, 0, cache_chunks=1), "chunk_samples is 0"),
        (lambda: predict_shuffled(5, 2, cache_chunks=1, window_chunks=0), "window_chunks is 0"),
        (lambda: predict_shuffled(5, 2, cache_chunks=-1), r"cache_chunks is -1: give 0 \(no cache\) or more"),
        (lambda: kept_across_epochs(1, 0), "num_chunks is 0"),
        (lambda: expected_workers(5, 2, 2, 0), "num_workers is 0"),
        (lambda: predict_order(Order(5, 2, 2, 1), cache_chunks=1, num_workers=0), "num_workers is 0"),
    ],
)
def test_what_cannot_be(call, message):
    with pytest.raises(OptionError, match=message):
        call()


def test_doctests():
    for module in (predict_module, stack_module):
        result = doctest.testmod(module)
        assert result.attempted
        assert not result.failed
