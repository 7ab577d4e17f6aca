"""How well an order mixes a file whose neighbours are alike.

Chunks are shuffled whole, so samples of one chunk share a window, and a batch, more often than others do. The cost of
that follows from pairs: how much likelier two samples of one chunk are of the same group than any two
(`h5chunk.tools.model.clustering`), and how much likelier two of one batch are of the same chunk. Every batch comes from
one window, however many alternate (`h5chunk.plan.order`): that makes no batch better, only what is trained in a round.

Variances are against a full shuffle of the same samples, and exact but for the place of a short last chunk (a part in
num_chunks). Where windows cut chunks, whose parts are more alike than the whole, pairs are counted in such parts.

Four classes in order, chunks of 4, batches of 4 from windows of 8. Two samples of a batch share a chunk, and so a
class, 3 times in 7, in a full shuffle 3 in 15:

>>> order = Order(num_samples=16, chunk_samples=4, batch_size=4, window_chunks=2, interleave=2)
>>> quality = shuffle_quality(np.repeat(np.arange(4), 4), order)
>>> quality.h_y, round(quality.deff, 4), quality.gate  # 1 + 3 * (3/7 - 3/15) / (1 - 3/15) * 16 / (16 - 4)
(4.0, 2.1429, 'poor')

Source: L. Kish, Survey Sampling, 1965 (design effect of clusters); scripts/check_shuffle_model.py simulates it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from h5chunk.errors import OptionError
from h5chunk.plan.order import Order, with_full_windows
from h5chunk.tools.model.clustering import (
    LEAST_CHANCE,
    PART_SAMPLES,
    Clustering,
    Groups,
    check_groups,
    codes_of,
    correlation_of_parts,
    find_clustering,
    run_lengths,
)

GOOD_DEFF, GOOD_DRIFT, FAIR_DEFF = 1.05, 2.0, 1.5  # heuristics
ROUNDING = 1e-9
SIMULATED_EPOCHS, SIMULATED_BATCHES = 8, 25  # batches of each epoch
LOOKED_AT = 8 * PART_SAMPLES  # samples whose pairs are counted where windows of one size cut chunks


@dataclass(frozen=True)
class ShuffleQuality:
    """What an order makes of the clustering of a file.

    Attributes
    ----------
    batch_size, window_samples, num_groups : int
        The window is the one that most batches come from.
    h_y : float
        Clustering within chunks: 1 is a shuffled file, ``chunk_samples`` one group a chunk.
    deff : float
        Variance of a batch's group shares over that of a batch of a full shuffle, mean of the epoch.
    effective_batch : float
        The batch of a full shuffle that varies as much; above ``batch_size`` if chunks are more even than chance.
    drift : float
        Variance of the group shares of a round of alternating windows over that of as many independent samples.
    entropy_ratio : float
        Mean entropy of the groups in about 200 simulated batches over that of as many of a full shuffle. It decides
        nothing, as it is noisy: where most batches have one group only it may be off by half.
    chance : float
        Bound of the probability that a shuffled file is as clustered as this one.
    """

    batch_size: int
    window_samples: int
    num_groups: int
    h_y: float
    deff: float
    effective_batch: float
    drift: float
    entropy_ratio: float
    chance: float

    @property
    def gate(self) -> str:
        """By heuristic bounds: "good", "fair" or "poor". A poor one asks for a shuffle on disk, or larger windows.

        What a shuffled file might show by chance, such as one of few chunks, is good: shuffling it changes nothing.
        """
        if self.chance >= LEAST_CHANCE or (self.deff <= GOOD_DEFF and self.drift <= GOOD_DRIFT):
            return "good"
        return "fair" if self.deff <= FAIR_DEFF else "poor"


def shuffle_quality(groups: Groups, order: Order, *, clustering: Clustering | None = None) -> ShuffleQuality:
    """How well an order mixes samples of these groups.

    Parameters
    ----------
    groups : (num_samples,) array of integers, bool or fixed-length strings
        The group of each sample, in the order of the file.
    order : Order
        As the epoch will really be read; its seed draws the simulated batches.
    clustering : Clustering, optional
        Of the chunks, if it is known: finding it is what takes long.

    Raises
    ------
    OptionError
        ``groups`` or ``clustering`` are not of these samples, or ``order`` does not shuffle, or has no batch.
    """
    check_groups(groups)
    if len(groups) != order.num_samples:
        raise OptionError(f"groups has {len(groups)} entries but the order {order.num_samples} samples: give one each")
    if clustering is None:
        clustering = find_clustering(groups, order.chunk_samples)
    num_windows, window_samples = _main_window(order)
    deff = design_effect(clustering, order, groups=groups)
    chance = clustering.chance
    if window_samples < order.chunk_samples:
        chance = min(chance, find_clustering(groups, window_samples).chance)
    return ShuffleQuality(
        batch_size=order.batch_size,
        window_samples=window_samples,
        num_groups=clustering.num_groups,
        h_y=clustering.h_y,
        deff=deff,
        effective_batch=order.batch_size / deff if deff else math.inf,
        drift=_drift(clustering, num_windows * window_samples),
        entropy_ratio=_entropy_ratio(groups, order),
        chance=chance,
    )


def design_effect(clustering: Clustering, order: Order, *, groups: Groups | None = None) -> float:
    """Variance of a batch's group shares over that of a full shuffle, mean over the batches of an epoch.

    For whole chunks of b in windows of W, batches of B and M samples
    ``1 + (B - 1) (b - 1) / (W - 1) (M - W) / (M - b) M / (M - B) correlation``.

    Parameters
    ----------
    clustering : Clustering
        Of the chunks of ``order``.
    order : Order
    groups : (num_samples,) array, optional
        What to look at where windows cut chunks; without, their parts are taken to be no more alike than they are.

    Raises
    ------
    OptionError
        ``clustering`` is of other chunks, or ``order`` does not shuffle, or has no batch.
    """
    size, batch = order.num_samples, order.batch_size
    found, wanted = (clustering.num_samples, clustering.piece_samples), (size, min(size, order.chunk_samples))
    if found != wanted:
        raise OptionError(f"clustering is of {found[0]} samples by {found[1]}, the order {wanted[0]} by {wanted[1]}")
    start, stop = _windows(order)
    if batch >= size:
        return 1.0
    pairs = np.maximum(1, (stop - start) * (stop - start - 1))
    together = float(np.average(_pairs_in(start, stop, order.chunk_samples) / pairs, weights=stop - start))
    alike = together * clustering.correlation
    if groups is not None and (start % order.chunk_samples).any():
        alike = _alike_in_parts(groups, clustering, start, stop)
    anywhere = float(_pairs_in(np.array([0]), np.array([size]), order.chunk_samples)[0]) / (size * (size - 1))
    if anywhere < 1:  # there are samples of two chunks, and those are less alike
        alike -= (1 - together) * clustering.correlation * anywhere / (1 - anywhere)
    deff = 1 + (batch - 1) * alike * size / (size - batch)
    return deff if deff > ROUNDING else 0.0


def _alike_in_parts(
    groups: Groups, clustering: Clustering, start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
) -> float:
    """Probability that two samples of a batch share a chunk, times their correlation, where windows cut chunks.

    The line of chunks is cut where windows start. Of the chunks that are cut, a few are looked at for each size of
    windows.
    """
    size, chunk = int(stop[-1]), clustering.piece_samples
    first = np.union1d(np.arange(0, size, chunk), start)  # of each part
    length = np.diff(first, append=size)
    turn = first // chunk
    window = (stop - start)[np.searchsorted(start, first, side="right") - 1]
    weight = length * (length - 1) / np.maximum(1, window - 1)
    cut = np.bincount(turn)[turn] > 1
    if clustering.num_samples % chunk:  # the chunk that ends the line is shuffled, as it fills the gap of the short one
        cut &= turn < clustering.num_samples // chunk
    alike = weight[~cut].sum() * clustering.correlation
    begins_in = window[np.searchsorted(first, turn * chunk)]
    for samples in np.unique(begins_in[cut]):
        same = cut & (begins_in == samples)
        turns = np.unique(turn[same])
        num_turns = min(len(turns), LOOKED_AT // min(PART_SAMPLES, size))
        turns = turns[np.argsort(length[np.searchsorted(first, turns * chunk)], kind="stable")]  # by the first cut
        looked_at = np.flatnonzero(np.isin(turn, turns[(np.arange(num_turns) * 2 + 1) * len(turns) // (2 * num_turns)]))
        begin = first[looked_at] - turn[looked_at] * chunk
        parts = zip(begin.tolist(), (begin + length[looked_at]).tolist(), weight[looked_at].tolist(), strict=True)
        alike += weight[same].sum() * correlation_of_parts(groups, clustering, list(parts))
    return float(alike) / size


def window_for(clustering: Clustering, order: Order, min_share: float) -> int | None:
    """The window with which an effective batch is at least ``min_share`` of a batch, in chunks.

    The smallest to within a few percent, for `h5chunk.plan.order.with_full_windows` of the order; None if no window
    short of all chunks will do.

    Parameters
    ----------
    clustering : Clustering
        Of the chunks of ``order``.
    order : Order
        Its ``window_chunks`` does not matter.
    min_share : float
        Above 0 and below 1, such as 0.95.

    Raises
    ------
    OptionError
        ``min_share`` is out of range; what `design_effect` raises.
    """
    if not 0 < min_share < 1:
        raise OptionError(f"min_share is {min_share}: give a share of the batch above 0 and below 1, such as 0.95")
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
        num_chunks += 1 + num_chunks // 32  # the last windows of an epoch are smaller, and add to its mean
    return None


def _rounds(order: Order) -> npt.NDArray[np.int64]:
    """First sample in the line, number of windows, and samples of a window, of each round: (num_rounds, 3)."""
    if not order.shuffle:
        raise OptionError("shuffle is False: the order is the file's, give one with shuffle=True")
    if not order.num_batches:
        raise OptionError(f"{order.num_samples} samples make no batch of {order.batch_size}: give a smaller batch_size")
    batch = order.batch_size
    return np.array([(batch * first, windows, batch * batches) for first, windows, batches in order.rounds()], np.int64)


def _main_window(order: Order) -> tuple[int, int]:
    """Windows of a round and samples of a window, as most batches have them."""
    found: dict[tuple[int, int], int] = {}
    for _, num_windows, samples in _rounds(order).tolist():
        key = num_windows, min(samples, order.num_samples)
        found[key] = found.get(key, 0) + num_windows * samples
    return max(found, key=lambda key: found[key])


def _windows(order: Order) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where windows start and stop in the line: (num_windows,) each."""
    _, num_windows, samples = _rounds(order).T
    stop = np.cumsum(np.repeat(samples, num_windows))
    return stop - np.repeat(samples, num_windows), np.minimum(stop, order.num_samples)


def _pairs_in(
    start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64], piece: int
) -> npt.NDArray[np.int64] | npt.NDArray[np.float64]:
    """Ordered pairs of samples of one piece in the part [start, stop) of a line of pieces."""
    first, last = -(-start // piece) * piece, stop // piece * piece
    head, tail = first - start, stop - last
    cut = head * (head - 1) + (last - first) * (piece - 1) + tail * (tail - 1)
    return np.where(first <= last, cut, (stop - start) * (stop - start - 1))


def _drift(clustering: Clustering, round_samples: int) -> float:
    """Variance of the group shares of chunks drawn at random over that of as many independent samples."""
    size, piece = clustering.num_samples, min(clustering.piece_samples, round_samples)
    if round_samples >= size:
        return 0.0
    clustered = max(0.0, 1 + (piece - 1) * clustering.correlation * size / (size - piece))
    return (size - round_samples) / (size - 1) * clustered


def _entropy_ratio(groups: Groups, order: Order) -> float:
    """Mean entropy of batches of the order over that of a full shuffle; 1 if that has none."""
    num_batches = min(SIMULATED_BATCHES, order.num_batches)
    drawn = np.random.Generator(np.random.Philox(key=np.array([order.seed, order.epoch], np.uint64)))
    real = shuffled = 0.0
    for epoch in range(SIMULATED_EPOCHS):  # each gives other batches, those of all windows of a round in turn
        each = replace(order, epoch=order.epoch + epoch)
        start = (order.num_batches - num_batches) * epoch // SIMULATED_EPOCHS
        for _, batch in zip(range(num_batches), each.batches(start), strict=False):
            real += _entropy(groups[batch])
            shuffled += _entropy(groups[drawn.choice(len(groups), len(batch), replace=False, shuffle=False)])
    return real / shuffled if shuffled else 1.0


def _entropy(groups: Groups) -> float:
    shares = run_lengths(np.sort(codes_of(groups))[np.newaxis]) / len(groups)
    return float(-np.dot(shares, np.log(shares)))
