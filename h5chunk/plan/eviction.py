"""Compute when chunks are used next. The disk cache evicts the chunk whose next use is the latest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from h5chunk.plan.order import Order
from h5chunk.plan.permutation import Indices

NEVER = np.iinfo(np.int64).max


class EpochUses:
    """The batches of an epoch at which each chunk is used first and last, on any of ``ranks``.

    ``first`` and ``last``, (num_chunks,) int64, are the indices of the first batch of the first and of the last window
    that contains the chunk. They are NEVER and -1 for a chunk that is not used.
    """

    def __init__(self, order: Order, num_samples: int, ranks: Iterable[int]) -> None:
        count = -(-num_samples // order.chunk_samples)
        self.first, self.last = np.full(count, NEVER), np.full(count, -1)
        for rank in ranks:
            for window in replace(order, rank=rank).windows():
                chunks = np.unique(window.rows // order.chunk_samples)
                self.first[chunks] = np.minimum(self.first[chunks], window.batches[0])
                self.last[chunks] = np.maximum(self.last[chunks], window.batches[0])


class NextUses:
    """The next use of each chunk by any of ``ranks``, in the current epoch or in the following one.

    By default, all ranks count.
    """

    def __init__(self, order: Order, num_samples: int, ranks: Iterable[int] | None = None) -> None:
        self._order, self._num_samples = order, num_samples
        self._ranks = range(order.world_size) if ranks is None else ranks
        self._epochs: dict[int, EpochUses] = {}

    def since(self, epoch: int, batch: int) -> Indices:
        """Return how many batches after ``batch`` each chunk is used next: (num_chunks,) int64.

        The number is 0 for a chunk that ``batch`` uses, and NEVER for a chunk that is not used before the end of the
        next epoch.
        """
        now, later = self._uses(epoch), self._uses(epoch + 1)
        following = np.where(later.first == NEVER, NEVER, later.first + self._order.num_batches - batch)
        in_last = np.where(now.last >= batch, now.last - batch, following)
        return np.where((now.first >= batch) & (now.first != NEVER), now.first - batch, in_last)

    def _uses(self, epoch: int) -> EpochUses:
        if epoch not in self._epochs:
            self._epochs = {number: uses for number, uses in self._epochs.items() if number == epoch - 1}
            self._epochs[epoch] = EpochUses(replace(self._order, epoch=epoch), self._num_samples, self._ranks)
        return self._epochs[epoch]


def uses_of_rows(uses: Indices, chunk_samples: int, starts: Indices, stops: Indices) -> Indices:
    """Return the earliest next use of the chunks of each range of samples ``starts[i]:stops[i]``: (n,) int64.

    ``uses`` has the next use of every chunk, as `NextUses.since` returns it.

    >>> uses_of_rows(np.array([5, 3, 9]), 10, np.array([0, 20, 0]), np.array([20, 30, 5])).tolist()
    [3, 9, 5]
    """
    firsts, lasts = starts // chunk_samples, (stops - 1) // chunk_samples + 1
    padded = np.append(uses, NEVER)
    pairs = np.stack([firsts, lasts], axis=1).reshape(-1)
    return np.minimum.reduceat(padded, pairs)[::2] if len(pairs) else np.empty(0, np.int64)
