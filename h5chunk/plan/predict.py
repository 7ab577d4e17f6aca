"""How many chunks an order will read, before anything is read.

Closed forms for the orders that people use, and the exact count for ours. Caches here evict what was used least
recently (LRU) or nothing at all; HDF5's own has other rules. A read is that of a whole chunk, also of a short last one;
a chunk is asked for once a batch where batches are read, else once a sample.

Batches of 2 at random from 4 samples in 2 chunks: a batch touches both chunks in 4 of its 6 forms.

>>> round(predict_random(4, 2, 2).chunk_reads, 4)  # two batches of (2 * 4 + 1 * 2) / 6
3.3333
>>> predict_sequential(4, 2, 2).amplification
1.0
>>> predict_shuffled(4, 2, cache_chunks=1).chunk_reads  # 2 first reads, and 1 of the other 2 finds its chunk
3.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.plan.order import Order
from h5chunk.plan.stack import Trace, lru_reads


@dataclass(frozen=True)
class ReadPrediction:
    """Reads of one epoch.

    Attributes
    ----------
    num_samples, chunk_samples : int
    chunk_reads : float
        Chunks read, each counted as often as it is read; the expected number where the order is random.
    """

    num_samples: int
    chunk_samples: int
    chunk_reads: float

    @property
    def num_chunks(self) -> int:
        """Chunks there are: the least that an epoch can read."""
        return math.ceil(self.num_samples / self.chunk_samples)

    @property
    def reads_per_chunk(self) -> float:
        """How often a chunk is read, mean of all."""
        return self.chunk_reads / max(1, self.num_chunks)

    @property
    def amplification(self) -> float:
        """Bytes read over bytes used, of whole chunks."""
        return self.chunk_reads * self.chunk_samples / max(1, self.num_samples)


def expected_chunks(num_samples: int, chunk_samples: int, batch_size: int) -> float:
    """Chunks that a batch touches whose samples are drawn at random, without replacement: exact.

    ``N (1 - C(M - b, B) / C(M, B))`` for N chunks of b samples, M in all, and a batch of B.

    Raises
    ------
    OptionError
        A number is below 1.

    Source: S. B. Yao, "Approximating block accesses in database organizations", CACM 20(4), 1977.

    Examples
    --------
    >>> expected_chunks(4, 2, 2) == 2 * (1 - 1 / 6)
    True
    >>> round(64 * expected_chunks(20_000 * 64, 64, 256) / 256, 1)  # times the bytes that are used
    63.6
    """
    _check(num_samples=num_samples, chunk_samples=chunk_samples, batch_size=batch_size)
    batch = min(batch_size, num_samples)
    full, rest = divmod(num_samples, chunk_samples)
    return full * _touched(num_samples, chunk_samples, batch) + _touched(num_samples, rest, batch)


def predict_random(num_samples: int, chunk_samples: int, batch_size: int) -> ReadPrediction:
    """Batches of a full shuffle, each chunk read once a batch and not kept to the next.

    Raises
    ------
    OptionError
        A number is below 1.
    """
    _check(num_samples=num_samples, chunk_samples=chunk_samples, batch_size=batch_size)
    full, rest = divmod(num_samples, batch_size)
    reads = full * expected_chunks(num_samples, chunk_samples, batch_size)
    if rest:
        reads += expected_chunks(num_samples, chunk_samples, rest)
    return ReadPrediction(num_samples, chunk_samples, reads)


def predict_sequential(
    num_samples: int, chunk_samples: int, batch_size: int, *, cache_chunks: int = 1
) -> ReadPrediction:
    """Batches in the order of the file. Without a cache, a chunk is read by each batch that has part of it.

    Raises
    ------
    OptionError
        A number is below 1, or ``cache_chunks`` below 0.

    Examples
    --------
    >>> predict_sequential(6, 3, 2).chunk_reads, predict_sequential(6, 3, 2, cache_chunks=0).chunk_reads
    (2, 4)
    """
    _check(num_samples=num_samples, chunk_samples=chunk_samples, batch_size=batch_size)
    _check_cache(cache_chunks)
    reads = math.ceil(num_samples / chunk_samples)
    if cache_chunks == 0:
        cut_or_not = (num_samples - 1) // batch_size  # borders of batches
        reads += cut_or_not - (num_samples - 1) // math.lcm(batch_size, chunk_samples)
    return ReadPrediction(num_samples, chunk_samples, reads)


def predict_shuffled(
    num_samples: int, chunk_samples: int, *, cache_chunks: int, window_chunks: int | None = None
) -> ReadPrediction:
    """Sample after sample in random order, through an LRU cache: of the whole data, or of one window after the other.

    With windows of n chunks of b samples and room for C chunks, a sample finds its chunk with probability
    ``(1 - 1/b) C / n``. This is exact for whole chunks: give samples independent places in [0, 1]. Two of a chunk that
    follow each other are x apart, where ``(1 - x)^b`` is uniform on [0, 1], and also the probability that another chunk
    has none between them: so their number is uniform on 0 .. n - 1. Without windows, never evicting finds as many.

    Parameters
    ----------
    num_samples, chunk_samples, cache_chunks : int
    window_chunks : int, optional
        Default: all.

    Raises
    ------
    OptionError
        A number is below 1, or ``cache_chunks`` below 0.

    Examples
    --------
    >>> [predict_shuffled(8, 2, cache_chunks=c, window_chunks=2).chunk_reads for c in (0, 1, 2)]
    [8.0, 6.0, 4.0]
    """
    _check(
        num_samples=num_samples,
        chunk_samples=chunk_samples,
        window_chunks=1 if window_chunks is None else window_chunks,
    )
    _check_cache(cache_chunks)
    left, reads, chunks = num_samples, 0.0, math.ceil(num_samples / chunk_samples)
    window = min(chunks, chunks if window_chunks is None else window_chunks)
    in_full = chunks // window * window
    for total, each in ((in_full, window), (chunks - in_full, chunks - in_full)):  # full windows, then a smaller one
        samples = min(left, total * chunk_samples)
        left -= samples
        reads += samples - (samples - total) * min(cache_chunks, each) / max(1, each)
    return ReadPrediction(num_samples, chunk_samples, reads)


def kept_across_epochs(cache_chunks: int, num_chunks: int, *, evicts: bool = True) -> float:
    """Share of chunks that a cache still has from the epoch before, each chunk used once an epoch, in a new order.

    LRU, exact: ``c - (1 - c) (1/(N-C+1) + ... + 1/N)``, for large N ``c + (1 - c) ln(1 - c)``, where ``c = C / N``: a
    chunk stays if fewer than C others come between its places u and v of two epochs, and another one does not with
    probability ``u (1 - v)``. A cache that never evicts has c from the second epoch on.

    Raises
    ------
    OptionError
        ``num_chunks`` is below 1, or ``cache_chunks`` below 0.

    Source: Mohan et al., "Analyzing and mitigating data stalls in DNN training", arXiv:2007.06775 (never evicting).

    Examples
    --------
    Of two chunks the last one of an epoch is the first one of the next in half of all cases:

    >>> kept_across_epochs(1, 2), kept_across_epochs(1, 2, evicts=False)
    (0.25, 0.5)
    >>> round(kept_across_epochs(5000, 10_000), 3)
    0.153
    """
    _check(num_chunks=num_chunks)
    _check_cache(cache_chunks)
    room = min(cache_chunks, num_chunks)
    if not evicts:
        return room / num_chunks
    return float(room - (num_chunks - room) * np.sum(1 / np.arange(num_chunks - room + 1, num_chunks + 1))) / num_chunks


def expected_workers(window_samples: int, chunk_samples: int, batch_size: int, num_workers: int) -> float:
    """Workers that read a chunk, if the batches of a shuffled window are dealt to them in turn: about min(w, b).

    Each worker has a random part of the window, so that this is Yao's formula again; a full shuffle is one window.

    Raises
    ------
    OptionError
        A number is below 1.

    Examples
    --------
    Two workers have a batch of 1 each of a window of 2, which is a chunk:

    >>> expected_workers(2, 2, 1, 2), round(expected_workers(64_000, 64, 256, 8), 2)
    (2.0, 8.0)
    """
    _check(window_samples=window_samples, chunk_samples=chunk_samples, batch_size=batch_size, num_workers=num_workers)
    chunk = min(chunk_samples, window_samples)
    full, rest = divmod(window_samples, batch_size)
    workers = 0.0
    for worker in range(num_workers):
        batches = (full - worker + num_workers - 1) // num_workers
        workers += _touched(window_samples, chunk, batches * batch_size + (rest if worker == full % num_workers else 0))
    return workers


def predict_order(order: Order, *, cache_chunks: int, num_workers: int = 1) -> ReadPrediction:
    """One epoch of our order, batch by batch, through an LRU cache in each worker that takes them in turn: exact.

    Parameters
    ----------
    order : Order
    cache_chunks : int
        Chunks that each worker's cache holds.
    num_workers : int

    Raises
    ------
    OptionError
        ``num_workers`` is below 1, or ``cache_chunks`` below 0.

    Examples
    --------
    Two windows of two chunks alternate: four open chunks.

    >>> order = Order(num_samples=32, chunk_samples=4, batch_size=4, window_chunks=2, interleave=2)
    >>> [predict_order(order, cache_chunks=room).chunk_reads for room in (0, 4)]
    [16, 8]
    >>> predict_order(order, cache_chunks=2, num_workers=2).chunk_reads  # each has a window
    8
    """
    _check(num_workers=num_workers)
    _check_cache(cache_chunks)
    reads = 0
    for worker in range(num_workers):
        of_room = lru_reads(chunk_trace(order, worker=worker, num_workers=num_workers))
        reads += int(of_room[min(cache_chunks, len(of_room) - 1)])
    return ReadPrediction(order.num_samples, order.chunk_samples, reads)


def chunk_trace(order: Order, *, worker: int = 0, num_workers: int = 1) -> Trace:
    """The chunks that batches of an epoch ask for, one after the other, each once a batch: (n,) int64.

    Of the batches ``worker``, ``worker + num_workers``, ...
    """
    batches = enumerate(order.batches())
    asked = [np.unique(batch // order.chunk_samples) for number, batch in batches if number % num_workers == worker]
    return np.concatenate([np.empty(0, np.int64), *asked])


def _touched(num_samples: int, part: int, drawn: int) -> float:
    """Probability that of so many samples drawn without replacement at least one is of a given part."""
    few, many = sorted((part, drawn))
    if few + many > num_samples:
        return 1.0 if few else 0.0
    return float(-np.expm1(np.sum(np.log1p(-many / np.arange(num_samples, num_samples - few, -1)))))


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise OptionError(f"{name} is {value}: give at least 1")


def _check_cache(cache_chunks: int) -> None:
    if cache_chunks < 0:
        raise OptionError(f"cache_chunks is {cache_chunks}: give 0 (no cache) or more")
