"""Windows under way: enough of them, none too large, all within their memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h5chunk.errors import OptionError
from h5chunk.plan.order import Order
from h5chunk.plan.slots import AHEAD, AHEAD_BYTES, largest_window, num_ahead, num_open_windows, plan_slots

orders = st.builds(
    Order,
    num_samples=st.integers(0, 400),
    chunk_samples=st.integers(1, 20),
    batch_size=st.integers(1, 30),
    window_chunks=st.integers(1, 12),
    interleave=st.sampled_from([1, 2, 3, 24]),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)


def most_open(order: Order) -> int:
    """Windows that are open at one time, counted along the batches of an epoch."""
    spans = [(window.batches[0], window.batches[-1]) for window in order.windows()]
    return max((sum(first <= batch <= last for first, last in spans) for batch in range(order.num_batches)), default=1)


@given(orders)
def test_windows_of_an_epoch_fit(order):
    """What the planner says without looking at every window is what the windows are."""
    plan = plan_slots(order, lambda samples: samples, lambda _: 0)
    assert plan.order == order
    assert all(len(window.samples) <= plan.window_samples for window in order.windows())
    assert plan.num_slots == num_open_windows(order) + num_ahead(order)
    assert most_open(order) < plan.num_slots
    assert num_ahead(order) == min(AHEAD, max(1, sum(1 for _ in order.windows())))
    if order.num_batches:
        assert largest_window(order) == max(len(window.samples) for window in order.windows())


@given(orders, st.integers(0, 5000), st.integers(0, 300), st.integers(0, 1), st.sampled_from([None, 1, 2]))
def test_memory_is_bounded(order, memory_bytes, others, num_spare, least_chunks):
    try:
        plan = plan_slots(
            order,
            lambda samples: 3 * samples,
            lambda _: others,
            memory_bytes=memory_bytes,
            num_spare=num_spare,
            least_chunks=least_chunks,
        )
    except OptionError as error:
        named = int(str(error).split("need ")[1].split(":")[0])
        assert named > memory_bytes and ("num_threads" in str(error)) == (others > 0)
        return
    assert plan.num_slots * 3 * plan.window_samples + others <= memory_bytes
    assert num_open_windows(plan.order) + num_spare < plan.num_slots <= num_open_windows(plan.order) + num_spare + AHEAD
    if plan.order != order:
        assert least_chunks is not None
        assert least_chunks <= plan.order.window_chunks < order.window_chunks


def test_large_windows_are_read_ahead_too():
    order = Order(num_samples=100, chunk_samples=10, batch_size=10, window_chunks=1)
    assert plan_slots(order, lambda _: 2 * AHEAD_BYTES, lambda _: 0).num_slots == 2
    assert plan_slots(order, lambda _: AHEAD_BYTES // 3, lambda _: 0).num_slots == 4


def test_the_message_names_what_is_needed():
    order = Order(num_samples=100, chunk_samples=10, batch_size=10, window_chunks=1)
    with pytest.raises(
        OptionError, match=r"memory_bytes is 39 but 2 windows of 1 batches need 40: give that, smaller window"
    ):
        plan_slots(order, lambda samples: 2 * samples, lambda _: 0, memory_bytes=39)
