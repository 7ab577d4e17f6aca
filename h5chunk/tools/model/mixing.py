"""Model shuffle quality: the effective batch size if neighbouring samples are similar.

Complete chunks are shuffled, so samples of one chunk share a window, and a batch, more often than other samples do. The
loss of quality follows from two probabilities: that two samples of one chunk share a group
(`h5chunk.tools.model.clustering`), and that two samples of one batch share a chunk. Every batch is drawn from one
window, even if several windows alternate (`h5chunk.plan.order`).

The variance is relative to that of a full shuffle of the same samples. It is exact, except for the position of a short
last chunk (an error of 1 / num_chunks), if windows hold whole chunks, or if parts of chunks are no more similar than
whole chunks.

For example, with four sorted classes, chunks of 4 and batches of 4 from windows of 8, two samples of a batch share a
chunk, and so a class, with probability 3/7; in a full shuffle with probability 3/15:

>>> from h5chunk.tools.model.clustering import find_clustering
>>> order = Order(num_samples=16, chunk_samples=4, batch_size=4, window_chunks=2, interleave=2)
>>> clustering = find_clustering(np.repeat(np.arange(4), 4), 4)
>>> round(design_effect(clustering, order), 4)  # 1 + 3 * (3/7 - 3/15) / (1 - 3/15) * 16 / (16 - 4)
2.1429

Source: L. Kish, Survey Sampling, 1965 (design effect of clusters); scripts/check_shuffle_model.py simulates it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from h5chunk.errors import OptionError
from h5chunk.plan.order import Order, with_full_windows
from h5chunk.tools.model.clustering import MIN_CHANCE, Clustering

ROUNDING = 1e-9

Integers = npt.NDArray[np.int64]


def effective_batch(clustering: Clustering, order: Order) -> float:
    """Return the size of a fully shuffled batch whose group shares have the same variance, at most the batch size.

    Clustering that a shuffled file might show by chance, for example because it has few chunks, is ignored.
    """
    batch = float(min(order.batch_size, order.num_samples))
    if clustering.chance >= MIN_CHANCE:
        return batch
    deff = design_effect(clustering, order)
    return min(batch, batch / deff) if deff else batch


def design_effect(clustering: Clustering, order: Order) -> float:
    """Return the variance of group shares in batches, relative to a full shuffle, averaged over an epoch.

    For M samples in batches of B from windows of W, with whole chunks of b samples, it is
    ``1 + (B - 1) (b - 1) / (W - 1) (M - W) / (M - b) M / (M - B) correlation``. Raises OptionError if ``clustering``
    was measured for other chunks than those of ``order``, or if ``order`` does not shuffle or has no batches.
    """
    size, batch = order.num_samples, order.batch_size
    measured, expected = (clustering.num_samples, clustering.piece_samples), (size, min(size, order.chunk_samples))
    if measured != expected:
        raise OptionError(
            f"clustering was measured for {measured[0]} samples in pieces of {measured[1]}, but the order has "
            f"{expected[0]} samples in chunks of {expected[1]}: measure it for these chunks"
        )
    start, stop = _windows(order)
    if batch >= size:
        return 1.0
    pairs = np.maximum(1, (stop - start) * (stop - start - 1))
    together = float(np.average(_pairs_in(start, stop, order.chunk_samples) / pairs, weights=stop - start))
    excess = together * clustering.correlation
    anywhere = float(_pairs_in(np.array([0]), np.array([size]), order.chunk_samples)[0]) / (size * (size - 1))
    if anywhere < 1:  # samples of two chunks, which are less similar
        excess -= (1 - together) * clustering.correlation * anywhere / (1 - anywhere)
    deff = 1 + (batch - 1) * excess * size / (size - batch)
    return deff if deff > ROUNDING else 0.0


def window_for(clustering: Clustering, order: Order, min_share: float) -> int | None:
    """Find the smallest window, in chunks, whose effective batch is at least ``min_share`` of the batch size.

    Returns None if only a window of all chunks suffices. The result is within a few percent of the optimum for an order
    from `h5chunk.plan.order.with_full_windows`. The ``window_chunks`` of ``order`` is ignored.
    """
    if not 0 < min_share < 1:
        raise OptionError(f"min_share is {min_share}: use a fraction of the batch above 0 and below 1, such as 0.95")
    size, batch, chunk = order.num_samples, order.batch_size, order.chunk_samples
    num_chunks = 1
    if clustering.correlation > 0 and 1 < batch < size and 1 < chunk < size:
        allowed = (1 / min_share - 1) * (size - batch) / ((batch - 1) * clustering.correlation * size)
        room = allowed * (size - chunk)
        num_chunks = max(1, math.floor(((chunk - 1) * size + room) / (room + chunk - 1) / chunk))
    while num_chunks < order.num_chunks:
        tried = with_full_windows(replace(order, window_chunks=num_chunks))
        if design_effect(clustering, tried) <= 1 / min_share:
            return num_chunks
        num_chunks += 1 + num_chunks // 32  # the last windows of an epoch are smaller, and raise the mean
    return None


def _windows(order: Order) -> tuple[Integers, Integers]:
    """Return the start and end of each window in the shuffled sequence of samples, as two (num_windows,) arrays."""
    if not order.shuffle:
        raise OptionError("the order has shuffle=False: pass an order with shuffle=True")
    if not order.num_batches:
        raise OptionError(
            f"{order.num_samples} samples are less than a batch of {order.batch_size}: use a smaller batch_size"
        )
    num_windows, window_batches = np.array([round_[1:] for round_ in order.rounds()], np.int64).T
    samples = np.repeat(window_batches * order.batch_size, num_windows)
    stop = np.cumsum(samples)
    return stop - samples, np.minimum(stop, order.num_samples)


def _pairs_in(start: Integers, stop: Integers, piece: int) -> Integers | npt.NDArray[np.float64]:
    """Count the ordered pairs of samples from ``start`` to ``stop`` that share a piece of ``piece`` samples."""
    first, last = -(-start // piece) * piece, stop // piece * piece
    head, tail = first - start, stop - last
    cut = head * (head - 1) + (last - first) * (piece - 1) + tail * (tail - 1)
    return np.where(first <= last, cut, (stop - start) * (stop - start - 1))
