"""The chunks that a cache frees are those whose next use comes last."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from h5chunk.feed.nodes import ranks_of_node
from h5chunk.plan.eviction import NEVER, NextUses
from h5chunk.plan.order import Order

ORDER = Order(num_samples=103, chunk_samples=4, batch_size=6, window_chunks=3, interleave=2, seed=5)


def by_looking_ahead(order, epoch, batch):
    """Batches until the window that uses each chunk next is read."""
    found = np.full(26, NEVER)
    for ahead, rank in itertools.product((1, 0), range(order.world_size)):
        for window in replace(order, epoch=epoch + ahead, rank=rank).windows():
            distance = window.batches[0] + ahead * order.num_batches - batch
            if distance >= 0:
                chunks = np.unique(window.rows // 4)
                found[chunks] = np.minimum(found[chunks], distance)
    return found


@pytest.mark.parametrize("order", [ORDER, replace(ORDER, batch_size=3, lanes=2, world_size=2)])
def test_next_uses(order):
    uses = NextUses(order, 103)
    firsts = [window.batches[0] for window in order.windows()]
    for batch in (firsts[0], firsts[3], firsts[-1]):
        assert uses.since(4, batch).tolist() == by_looking_ahead(order, 4, batch).tolist()


def test_a_cache_of_one_node(monkeypatch):
    """Only chunks that its own ranks use come before those that none uses."""
    order = replace(ORDER, batch_size=3, lanes=4, world_size=4, nodes=2, rank=3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_of_node(3, 4) == range(2, 4)
    own = NextUses(order, 103, ranks_of_node(3, 4)).since(0, 0) != NEVER
    whole = [
        np.unique(np.concatenate([w.rows // 4 for e in (0, 1) for w in replace(order, rank=r, epoch=e).windows()]))
        for r in (2, 3)
    ]
    assert np.flatnonzero(own).tolist() == np.union1d(*whole).tolist()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert ranks_of_node(3, 4) == range(4)


def test_chunks_that_no_epoch_uses_come_last():
    from h5chunk.plan.selection import FixedSelection

    order = replace(ORDER, num_samples=40, selection=FixedSelection(np.arange(0, 41, 4), np.arange(40)))
    assert (NextUses(order, 103).since(0, 0)[10:] == NEVER).all()
