"""The order of an epoch: complete, reproducible, fair, and kind to chunks."""

from __future__ import annotations

import hashlib
import itertools
import math
import tracemalloc
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from h5chunk.errors import OptionError
from h5chunk.plan.order import Order, Window
from h5chunk.plan.permutation import permutation
from h5chunk.plan.selection import FixedSelection, starts_of_runs

orders = st.builds(
    Order,
    num_samples=st.integers(0, 400),
    chunk_samples=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    window_chunks=st.integers(1, 9),
    interleave=st.integers(1, 8),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**40),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
many = settings(max_examples=150, deadline=None)
few = settings(max_examples=25, deadline=None)


def check_epoch(order: Order) -> None:
    """Every sample once, all batches full but the last, and as many as promised."""
    batches = list(order.batches())
    assert len(batches) == order.num_batches
    assert all(len(batch) == order.batch_size for batch in batches[:-1])
    assert all(batch.dtype == np.int64 for batch in batches)
    seen = np.concatenate(batches) if batches else np.empty(0, np.int64)
    assert len(np.unique(seen)) == len(seen)
    assert not len(seen) or (seen.min() >= 0 and seen.max() < order.num_samples)
    left_out = order.num_samples % order.batch_size if order.drop_last else 0
    assert len(seen) == order.num_samples - left_out


@given(orders)
@example(Order(0, 1, 1, 1))
@example(Order(1, 100, 100, 100))
@many
def test_every_sample_once(order):
    check_epoch(order)


@given(orders, st.integers(0, 60))
@many
def test_an_epoch_can_start_at_any_batch(order, start):
    whole = [batch.tolist() for batch in order.batches()]
    assert [batch.tolist() for batch in order.batches(start)] == whole[start:]


@given(orders)
@many
def test_a_batch_comes_from_one_window(order):
    window_samples = order.window_batches * order.batch_size
    most = (window_samples - 2) // order.chunk_samples + 2 + 1  # both borders are cut, and the short chunk is filled
    for batch in order.batches():
        assert len(np.unique(batch // order.chunk_samples)) <= min(most, len(batch))


@given(orders)
@many
def test_rounds_cover_the_epoch(order):
    rounds = list(order.rounds())
    assert sum(r.num_windows * r.window_batches for r in rounds) == order.num_batches
    assert [r.first_batch for r in rounds] == [
        0,
        *itertools.accumulate(r.num_windows * r.window_batches for r in rounds[:-1]),
    ][: len(rounds)]
    assert all(r.window_batches <= order.window_batches and order.interleave % r.num_windows == 0 for r in rounds)


def most_open_chunks(order: Order) -> int:
    """Chunks that are partly read at one time, the one being read included, by one process that reads in order."""
    left = Counter((np.arange(order.num_samples) // order.chunk_samples).tolist())
    opened: set[int] = set()
    most = 0
    for batch in order.batches():
        for chunk, count in sorted(Counter((batch // order.chunk_samples).tolist()).items()):
            opened.add(chunk)
            most = max(most, len(opened))
            left[chunk] -= count
            if not left[chunk]:
                opened.remove(chunk)
    return most


@given(orders)
@example(Order(4000, 64, 64, 4, 8))  # the short chunk needs one more
@example(Order(4003, 10, 64, 4, 8))  # both borders of a batch
@many
def test_no_more_chunks_are_open_than_promised(order):
    assert most_open_chunks(order) <= max(1, order.open_chunks)


def test_no_more_open_chunks_are_promised_than_needed():
    order = Order(num_samples=4096, chunk_samples=8, batch_size=32, window_chunks=8, interleave=4)
    assert order.open_chunks == 32
    assert most_open_chunks(order) >= 31  # a window's first batch may miss a chunk


def readers(order: Order, num_workers: int) -> dict[int, set[int]]:
    """The workers that read each chunk when batch t goes to worker t % num_workers."""
    found = defaultdict(set)
    for turn, batch in enumerate(order.batches()):
        for chunk in np.unique(batch // order.chunk_samples).tolist():
            found[chunk].add(turn % num_workers)
    return found


@pytest.mark.parametrize(("batch_size", "chunk_samples"), [(32, 8), (8, 8), (64, 64), (256, 32)])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("num_samples", [4096, 8000, 10_240])
def test_one_worker_reads_a_chunk(batch_size, chunk_samples, num_workers, num_samples):
    order = Order(num_samples, chunk_samples, batch_size, window_chunks=9)
    shared = [chunk for chunk, workers in readers(order, num_workers).items() if len(workers) > 1]
    assert len(shared) <= (1 if num_samples % chunk_samples else 0)  # the chunk that fills the short one's gap


@pytest.mark.parametrize("num_workers", [2, 3, 4, 8])
def test_one_worker_reads_a_chunk_of_several_batches(num_workers):
    order = Order(num_samples=64 * 500, chunk_samples=64, batch_size=16, window_chunks=2)
    by_chunk = readers(order, num_workers)
    shared = sum(len(workers) > 1 for workers in by_chunk.values())
    full = order.interleave * order.window_batches * order.batch_size // order.chunk_samples
    assert shared <= len(by_chunk) % full  # only where an epoch's end has too few windows for all workers


@given(orders, st.integers(1, 8))
@many
def test_workers_share_few_chunks(order, num_workers):
    """At most the chunks at window borders are shared where the workers divide all rounds."""
    rounds = list(order.rounds())
    if not order.shuffle or any(r.num_windows % num_workers for r in rounds):
        return
    extra = sum(len(workers) - 1 for workers in readers(order, num_workers).values())
    windows = sum(r.num_windows for r in rounds)
    assert extra <= windows + order.interleave  # a border each, and the chunk that fills


def test_open_chunks_are_dealt_to_workers():
    order = Order(num_samples=100_000, chunk_samples=10, batch_size=20, window_chunks=8)
    assert order.open_chunks == 24 * 8
    assert [order.open_chunks_of(n) for n in (1, 2, 3, 24)] == [192, 96, 64, 8]
    assert [order.open_chunks_of(n) for n in (5, 16)] == [192, 24]  # they share windows


def test_file_order():
    order = Order(num_samples=11, chunk_samples=2, batch_size=4, window_chunks=2, shuffle=False)
    assert [batch.tolist() for batch in order.batches()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_epochs_and_seeds_differ():
    def line(**options):
        return np.concatenate(list(Order(1000, 8, 32, 4, **options).batches())).tolist()

    lines = [line(seed=s, epoch=e) for s in (0, 1, 2**63) for e in (0, 1, 2**33)]
    assert all(a != b for a, b in itertools.combinations(lines, 2))
    assert line(seed=1, epoch=1) == line(seed=1, epoch=1)


def turns_over_epochs(order: Order, num_epochs: int) -> np.ndarray:
    """The batch that each sample is in: (num_epochs, num_samples)."""
    turns = np.empty((num_epochs, order.num_samples), np.int64)
    for epoch in range(num_epochs):
        each = Order(**{**order.__dict__, "epoch": epoch})
        for turn, batch in enumerate(each.batches()):
            turns[epoch, batch] = turn
    return turns


@pytest.mark.parametrize("num_samples", [24, 23, 21])  # whole chunks; a short one of 3; a short one of 1
def test_each_sample_is_equally_likely_in_each_batch(num_samples):
    order = Order(num_samples, chunk_samples=4, batch_size=3, window_chunks=3, interleave=2, seed=5)
    num_epochs = 10_000
    turns = turns_over_epochs(order, num_epochs)
    counts = np.stack([np.bincount(turns[:, i], minlength=order.num_batches) for i in range(num_samples)])
    sizes = np.full(order.num_batches, 3)
    sizes[-1] = num_samples - 3 * (order.num_batches - 1)
    share = sizes / num_samples
    z = (counts - num_epochs * share) / np.sqrt(num_epochs * share * (1 - share))
    assert np.abs(z).max() < 4
    assert 0.7 < (z**2).mean() < 1.3  # chi-square over its degrees of freedom


def test_epochs_are_independent():
    turns = turns_over_epochs(Order(24, chunk_samples=4, batch_size=4, window_chunks=2, interleave=2, seed=8), 4000)
    pairs = np.zeros((6, 6))
    np.add.at(pairs, (turns[:-1, 0], turns[1:, 0]), 1)
    expected = 3999 / 36
    assert ((pairs - expected) ** 2 / expected).sum() < 70  # 35 degrees of freedom: p = 0.0004


def test_samples_of_a_window_are_mixed():
    """Two neighbours on disk share a batch about as often as a shuffled window says."""
    order = Order(num_samples=1024, chunk_samples=8, batch_size=16, window_chunks=16, interleave=2, seed=3)
    turns = turns_over_epochs(order, 60)
    together = (turns[:, 0::8] == turns[:, 1::8]).mean()  # always in one window of 8 batches
    assert together == pytest.approx(15 / 127, rel=0.1)


@pytest.mark.parametrize(
    ("order", "digest"),
    [
        (Order(1000, 8, 32, 4), "e761e23990276108"),
        (Order(1000, 8, 32, 4, epoch=1), "7a7f4c27530db55c"),
        (Order(997, 10, 24, 7, seed=2**64 - 1), "15b2f67aa513c3cc"),
        (Order(12_000, 8, 256, 64, interleave=6, seed=42, epoch=3, drop_last=True), "e36da43a39308b87"),
    ],
)
def test_the_order_of_a_seed_never_changes(order, digest):
    line = np.concatenate(list(order.batches())).astype("<i8")
    assert hashlib.sha256(line.tobytes()).hexdigest()[:16] == digest


def test_permutation():
    assert permutation(8, 0).tolist() == [1, 5, 3, 0, 7, 2, 4, 6]
    assert sorted(permutation(100, 7, stream=(1, 2, 3)).tolist()) == list(range(100))
    assert permutation(0, 7).tolist() == []


def test_memory_is_by_chunks_not_samples():
    order = Order(num_samples=100_000_000, chunk_samples=1000, batch_size=256, window_chunks=4)
    tracemalloc.start()
    try:
        assert len(next(order.batches())) == 256
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: pass a whole number, at least 1"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": True}, "batch_size is True"),
        ({"window_chunks": 0}, "window_chunks is 0"),
        ({"interleave": -1}, "interleave is -1"),
        (
            {"batch_size": 2**70},
            "batch_size is 1180591620717411303424: pass a whole number from 1 to 9223372036854775807",
        ),
        ({"epoch": -1}, "epoch is -1: pass a whole number from 0 to 9223372036854775807"),
        ({"epoch": 2**63}, "epoch is 9223372036854775808: pass a whole number from 0"),
        ({"rank": 0, "world_size": 0, "lanes": 0}, "world_size is 0"),
        ({"seed": -1}, "seed is -1: pass a whole number from 0 to 18446744073709551615"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_what_cannot_be(wrong, message):
    with pytest.raises(OptionError, match=message):
        Order(**{"num_samples": 10, "chunk_samples": 2, "batch_size": 4, "window_chunks": 1, **wrong})


def test_numpy_numbers_will_do():
    order = Order(np.int64(10), np.int32(2), np.int64(4), np.uint8(2), seed=np.uint64(7))
    assert math.ceil(10 / 4) == order.num_batches
    check_epoch(order)
    assert {type(value) for name, value in vars(order).items()} == {int, bool, type(None)}  # narrow ones wrap around


lane_orders = st.builds(
    lambda lanes, per_lane, **options: Order(batch_size=lanes * per_lane, lanes=lanes, **options),
    lanes=st.sampled_from([1, 2, 3, 4, 6, 12]),
    per_lane=st.integers(1, 7),
    num_samples=st.integers(0, 600),
    chunk_samples=st.integers(1, 40),
    window_chunks=st.integers(1, 9),
    interleave=st.integers(1, 8),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
TAILS = [{}, {"drop_last": True}, {"pad": True}]


def ranks_of(order: Order, world_size: int) -> list[Order]:
    """The same order on so many ranks, the batches of all together as large as before."""
    return [
        replace(order, batch_size=order.batch_size // world_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def check_ranks(order: Order, world_size: int) -> list[list[int]]:
    """Of each batch the samples of all ranks, after a look at what each rank gets."""
    ranks = ranks_of(order, world_size)
    batches = [[batch.tolist() for batch in each.batches()] for each in ranks]
    assert [len(each) for each in batches] == [order.num_batches] * world_size
    for each in batches:
        assert all(len(batch) == order.batch_size // world_size for batch in each[:-1])
    if (order.num_batches and order.pad) or order.drop_last:
        assert all(len(each[-1]) == order.batch_size // world_size for each in batches if each)
    return [sorted(itertools.chain(*together)) for together in zip(*batches, strict=True)]


@pytest.mark.parametrize("tail", TAILS)
@given(order=lane_orders)
@many
def test_all_ranks_together_give_the_same_batches(tail, order):
    """At every number of ranks that divides the lanes; and every sample once."""
    if "pad" in tail and 0 < order.num_samples < order.lanes:
        with pytest.raises(OptionError, match=f"{order.num_samples} samples are too few for {order.lanes} lanes"):
            replace(order, **tail)
        return
    order = replace(order, **tail)
    wanted = check_ranks(order, 1)
    for world_size in (n for n in range(2, order.lanes + 1) if order.lanes % n == 0):
        assert check_ranks(order, world_size) == wanted
    seen = Counter(itertools.chain(*wanted))
    if tail.get("pad"):
        assert set(seen) == set(range(order.num_samples))
        extra = sum(seen.values()) - order.num_samples
        assert extra == -order.num_samples % order.batch_size
        assert all(len({*batch}) == len(batch) for batch in wanted[:-1])
        fewest = min(order.num_samples // order.lanes, order.lane_batch) * order.lanes
        assert not wanted or len({*wanted[-1]}) >= fewest  # all, unless a lane has fewer samples than it needs
    elif tail:
        assert max(seen.values(), default=1) == 1 and len(seen) == order.num_batches * order.batch_size
    else:
        assert sorted(seen.elements()) == list(range(order.num_samples))


@given(order=lane_orders, start=st.integers(0, 60))
@many
def test_each_rank_can_start_at_any_batch(order, start):
    for each in ranks_of(order, order.lanes):
        whole = [batch.tolist() for batch in each.batches()]
        assert [batch.tolist() for batch in each.batches(start)] == whole[start:]


@given(order=lane_orders)
@many
def test_ranks_read_different_chunks(order):
    """But for those at the end of the line, fewer than there are lanes, and the one that fills the short chunk."""
    ranks = ranks_of(order, order.lanes)
    readers = Counter(
        chunk for each in ranks for chunk in {s // order.chunk_samples for b in each.batches() for s in b.tolist()}
    )
    shared = [chunk for chunk, count in readers.items() if count > 1]
    assert len(shared) <= order.lanes
    if order.num_samples % (order.chunk_samples * order.lanes) == 0:
        assert not shared


@given(order=lane_orders, start=st.integers(0, 60), together=st.sampled_from([1, 1, 2, 3, 4, 24]))
@many
def test_windows_say_where_each_sample_lies(order, start, together):
    """And hold nothing of batches before the start: what was trained already is not read again."""
    for each in ranks_of(order, 1 if order.lanes == 1 else order.lanes // 2 if order.lanes % 2 == 0 else 1):
        wanted = dict(enumerate(each.batches()))
        found, firsts = {}, []
        windows, joins = each.windows(start), together if each.interleave == 1 else 1  # those that alternate stay alone
        while group := list(itertools.islice(windows, joins)):
            window = Window.joined(group)
            firsts.append(window.batches[0])
            assert window.samples[window.destinations].tolist() == window.rows.tolist()
            assert sorted(window.destinations.tolist()) == list(range(len(window.rows)))
            assert len(window.samples) == sum(len(wanted[number]) for number in window.batches)
            cuts = range(each.batch_size, each.batch_size * len(window.batches), each.batch_size)
            found.update(zip(window.batches, np.split(window.samples, cuts), strict=True))
        assert {number: batch.tolist() for number, batch in found.items()} == {
            number: batch.tolist() for number, batch in wanted.items() if number >= start
        }
        assert start or firsts == sorted(firsts)


picked = st.builds(
    lambda samples, chunk_samples: (np.sort(np.array(samples, np.int64)), chunk_samples),
    st.lists(st.integers(0, 300), max_size=200),
    st.integers(1, 30),
)


@given(picked, st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 2, 3]), st.booleans())
@many
def test_selected_samples_come_as_often_as_they_are_named(picked, batch, window_chunks, lanes, shuffle):
    samples, chunk_samples = picked
    selection = FixedSelection(starts_of_runs(samples // chunk_samples), samples)
    order = Order(
        num_samples=len(selection), chunk_samples=chunk_samples, batch_size=batch * lanes, window_chunks=window_chunks,
        lanes=lanes, shuffle=shuffle, selection=selection,
    )  # fmt: skip
    assert sorted(itertools.chain(*check_ranks(order, lanes))) == samples.tolist()
    if lanes == 1 and not shuffle:
        assert np.concatenate([*order.batches(), []]).tolist() == samples.tolist()


def test_a_huge_epoch_starts_at_once():
    """10**8 samples: memory by what is asked for."""
    tracemalloc.start()
    order = Order(num_samples=10**8, chunk_samples=64, batch_size=256, window_chunks=128, lanes=8, world_size=8)
    first = next(order.batches())
    assert len(set(first.tolist())) == 256 and tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lanes": 3, "world_size": 2}, "lanes is 3, which is not a multiple of world_size 2"),
        ({"lanes": 4}, "batch_size is 6, but each rank has 4 lanes"),
        ({"rank": 1}, "rank is 1, but world_size is 1: pass a rank from 0 to 0"),
        ({"rank": -1}, "rank is -1"),
        ({"drop_last": True, "pad": True}, "pass only one of them"),
        ({"selection": FixedSelection(np.array([0, 2, 3]))}, "selection has 3"),
    ],
)
def test_lanes_that_cannot_be(wrong, message):
    with pytest.raises(OptionError, match=message):
        Order(num_samples=100, chunk_samples=4, batch_size=6, window_chunks=2, **wrong)


def chunks_of_nodes(order: Order, epoch: int) -> list[set[int]]:
    """The chunks that the ranks of each node read in an epoch, with two ranks on each."""
    ranks = [replace(each, epoch=epoch) for each in ranks_of(order, 2 * order.nodes)]
    read = [{int(sample) // order.chunk_samples for batch in each.batches() for sample in batch} for each in ranks]
    return [read[first] | read[first + 1] for first in range(0, len(read), 2)]


@given(order=lane_orders, nodes=st.integers(2, 3), lanes=st.integers(1, 2), per_lane=st.integers(1, 5))
@few
def test_nodes_keep_their_chunks(order, nodes, lanes, per_lane):
    """All but the chunks at the end of an epoch, and two for a short last chunk; and every sample once."""
    lanes *= 2 * nodes
    order = replace(order, shuffle=True, nodes=nodes, lanes=lanes, batch_size=per_lane * lanes)
    wanted = check_ranks(order, 1)
    assert check_ranks(order, 2 * nodes) == wanted
    assert sorted(itertools.chain(*wanted)) == list(range(order.num_samples))
    epochs = [chunks_of_nodes(order, epoch) for epoch in range(2)]
    for node in range(nodes):
        for later in epochs[1:]:
            assert len(later[node] - epochs[0][node]) <= 2 * lanes + 2


def test_nodes_visit_their_chunks_in_another_order_in_each_epoch():
    order = Order(6400, 10, 40, 4, lanes=4, nodes=2)
    first, second = chunks_of_nodes(order, 0), chunks_of_nodes(order, 1)
    assert first == second and [len(each) for each in first] == [320, 320]
    assert all(max(each) - min(each) > 600 for each in first)
    assert chunks_of_nodes(replace(order, seed=1), 0) != first
    batches = [np.concatenate(list(replace(order, epoch=epoch).batches())) for epoch in range(2)]
    assert (batches[0] == batches[1]).mean() < 0.01
    assert chunks_of_nodes(order, 0) != [set(range(320)), set(range(320, 640))]


def test_what_is_left_over_is_not_left_out_in_all_epochs():
    order = Order(430, 10, 40, 4, lanes=4, nodes=2, drop_last=True)
    seen = Counter(int(s) for epoch in range(60) for batch in replace(order, epoch=epoch).batches() for s in batch)
    assert len(seen) == 430 and min(seen.values()) > 30
