"""Measure the batches of an epoch: how well they are shuffled, and how much padding they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.plan.groups import GroupOrder
from h5chunk.plan.lengths import LengthOrder
from h5chunk.plan.order import Order
from h5chunk.plan.permutation import Indices

CLASSES = 10  # number of classes of length, which have equal numbers of samples


@dataclass(frozen=True)
class OrderReport:
    """The batches of an epoch.

    Attributes
    ----------
    batches : int
    samples : float
        Samples per batch, on average.
    effective_batch : float
        The size of fully shuffled batches in which the shares of the groups would vary as much as in these batches, at
        most ``samples``. It is 1 if all samples of each batch belong to one group.
    padding : float, optional
        The fraction of all elements of padded batches that is padding; None if batches are not made by length.
    padding_unsorted : float, optional
        The fraction that would be padding without buckets of samples of similar length.
    left_out : int
        Number of samples of the data set that an epoch leaves out, because of batches by group.
    chunk_reads : float, optional
        For batches by group: the number of windows that read from each chunk, on average, on this rank. If chunks are
        compressed, each of these windows decodes the chunk. It is larger if a batch needs more samples of a group than
        a few chunks have, or if the file is sorted by group; and smaller with a larger ``window_chunks``.
    """

    batches: int
    samples: float
    effective_batch: float
    padding: float | None = None
    padding_unsorted: float | None = None
    left_out: int = 0
    chunk_reads: float | None = None


def measure(order: Order, groups: Indices | None) -> OrderReport:
    """Measure an epoch on one rank; ``groups``, (n,), has the group of each sample of the data set.

    The groups of a `LengthOrder` are by default tenths of the samples, sorted by length. Raises OptionError if another
    order has no groups.
    """
    if groups is None and not isinstance(order, LengthOrder):
        raise OptionError("this data set has no groups: pass groups, such as the name of the field of labels")
    batches = [batch for batch in order.batches() if len(batch)]
    mean = float(np.mean([len(batch) for batch in batches])) if batches else 0.0
    padding: tuple[float | None, float | None] = None, None
    if isinstance(order, LengthOrder):
        unsorted = replace(order, bucket_batches=1)
        padding = _padding(order, batches), _padding(unsorted, unsorted.batches())
    if groups is not None:
        numbers = np.unique(groups, return_inverse=True)[1]
        own = [numbers[batch] for batch in batches]
    else:
        lengths = [order.lengths_of(batch) for batch in batches]  # type: ignore[attr-defined]
        borders = np.quantile(np.concatenate(lengths), np.arange(1, CLASSES) / CLASSES) if batches else []
        own = [np.searchsorted(borders, each, "right") for each in lengths]
    report = OrderReport(order.num_batches, mean, _effective_batch(own, mean), *padding)
    if isinstance(order, GroupOrder):
        report = replace(report, left_out=order.num_left_out, chunk_reads=order.chunk_reads())
    return report


def _padding(order: LengthOrder, batches: Iterable[Indices]) -> float:
    lengths = [order.lengths_of(batch) for batch in batches]
    padded = sum(len(own) * int(own.max(initial=0)) for own in lengths)
    return 1 - sum(int(own.sum()) for own in lengths) / padded if padded else 0.0


def _effective_batch(groups: list[Indices], mean: float) -> float:
    """Return the effective batch of batches with these groups and this mean size: see `OrderReport`."""
    if not groups:
        return 0.0
    shares = np.bincount(np.concatenate(groups)).astype(np.float64)
    shares /= shares.sum()
    same = float((shares**2).sum())
    effects = []  # sum((own share - share)**2) of all groups, times the batch size
    for each in groups:
        present, counts = np.unique(each, return_counts=True)
        own = counts / len(each)
        effects.append(len(each) * (same + ((own - 2 * shares[present]) * own).sum()))
    effect = float(np.mean(effects)) / (1 - same) if same < 1 else 0.0
    return min(mean, mean / effect) if effect > 0 else mean
