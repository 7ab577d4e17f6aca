"""The samples of a round of windows: shuffled in each of them, lane by lane, all windows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from h5chunk.plan.line import Lane, Line
from h5chunk.plan.permute import WINDOW, Indices, random_bits, sorted_order

if TYPE_CHECKING:
    from h5chunk.plan.order import Order


class Round(NamedTuple):
    """Windows whose batches alternate: ``num_windows`` of them, of ``window_batches`` batches each."""

    first_batch: int
    num_windows: int
    window_batches: int


def round_rows(order: Order, line: Line, lanes: list[Lane], each: Round) -> tuple[Indices, Indices]:
    """The samples of a round of windows in the order of the line, and the place of each in its window.

    Window by window, and in each the lanes one behind the other.
    """
    parts = [_lane_round(order, lane, each) for lane in lanes]
    if len(lanes) == 1:
        return line.at(parts[0][0]), parts[0][1]
    size, batch = each.window_batches * order.lane_batch, order.lane_batch
    full = min(len(rows) for rows, _ in parts) // size
    windows = [_full_windows(order, parts, full, size)]
    for first in range(full * size, each.num_windows * size, size):
        some = [(rows[first : first + size], places[first : first + size]) for rows, places in parts]
        for number, (_, places) in enumerate(some):  # in a batch the lanes one behind the other, too
            batches, within = np.divmod(places, batch)
            before = sum(np.minimum(batch, len(rows) - batches * batch) for rows, _ in some[:number])
            places[:] = batches * order.batch_size + before + within
        windows += some
    rows, places = (np.concatenate(column) for column in zip(*windows, strict=True))
    return line.at(rows), places


def _full_windows(order: Order, parts: list[tuple[Indices, Indices]], count: int, size: int) -> tuple[Indices, Indices]:
    """As `round_rows`, of windows that are full in all lanes: one calculation for all of them."""
    rows, places = (
        np.stack([lane[: count * size].reshape(count, size) for lane in column], axis=1)
        for column in zip(*parts, strict=True)
    )
    batches, within = np.divmod(places, order.lane_batch)
    before = order.lane_batch * np.arange(len(parts))[:, None]
    return rows.reshape(-1), (batches * order.batch_size + before + within).reshape(-1)


def _lane_round(order: Order, lane: Lane, each: Round) -> tuple[Indices, Indices]:
    """Where in the line the samples of a lane's windows are, and the place of each in its window.

    One sort for all windows: the time of an order is that of the calls it takes, not of the numbers in it.
    """
    size = each.window_batches * order.lane_batch
    first = each.first_batch * order.lane_batch
    stop = first + each.num_windows * size
    if not order.pad and not order.drop_last:
        stop = min(stop, lane.num_samples)
    rows, count = lane.places(first, stop), stop - first
    if not order.shuffle:
        return rows, np.arange(count, dtype=np.int64) % size
    keys = random_bits(count, order.seed, (WINDOW, order.epoch, first), lane.number)
    places = np.empty(count, np.int64)
    full = count // size * size
    if full:
        turns = sorted_order(keys[:full].reshape(-1, size))
        np.put_along_axis(places[:full].reshape(-1, size), turns, np.arange(size, dtype=np.int64), axis=1)
    places[full:][sorted_order(keys[full:])] = np.arange(count - full, dtype=np.int64)
    return rows, places
