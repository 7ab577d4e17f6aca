"""Draw random numbers for individual samples.

A random number depends only on the seed, the epoch, the index of the sample, and how often the epoch has used the
sample before. It does not depend on batches, ranks, workers or devices. If weights repeat a sample in an epoch, each
repeat has a different key.

Source: the finaliser of SplitMix64, of Steele et al., "Fast splittable pseudorandom number generators" (2014).

>>> draws = Draws(0, 0, np.arange(3))
>>> draws.uniform(0, 2).shape
(2, 3)
>>> bool((draws.uniform(0, 2)[:, 1:] == Draws(0, 0, np.arange(1, 3)).uniform(0, 2)).all())
True
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from h5chunk.plan.permutation import Indices, mixed

Floats = npt.NDArray[np.float64]
EVERY_EPOCH = -1  # used as the epoch for draws that are the same in all epochs
GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1
ZERO, UNUSED_BITS = np.uint64(0), np.uint64(11)  # a float64 has 53 bits
REPEAT, MOST_REPEATS = 1 << 40, 1 << 23  # REPEAT exceeds the index of any sample


class Draws(NamedTuple):
    """The random numbers of some samples.

    ``samples``, (n,) int64, has the keys of the samples. The key of a sample is its index in the file, plus k *
    `REPEAT` if weights repeat the sample for the k-th time in the epoch. ``use`` is k for the k-th echo of the samples,
    and 0 for their first use. If the samples are a part of a window or an epoch, ``whole`` has the keys of the entire
    window or epoch, and the part begins at ``whole[first]``. All parts share the dict ``kept``, in which transforms
    store results for other parts.
    """

    seed: int
    epoch: int
    samples: Indices
    use: int = 0
    kept: dict[Any, Any] | None = None
    whole: Indices | None = None
    first: int = 0

    def uniform(self, stream: int, count: int, first: int = 0) -> Floats:
        """Return random numbers, uniform in [0, 1): (count, n) float64.

        For each sample, these are the numbers ``first`` to ``first + count - 1`` of its stream ``stream``.
        """
        return self.chosen(stream, range(first, first + count))

    def chosen(self, stream: int, places: Iterable[int]) -> Floats:
        """Return the random numbers at these places of the stream: (places, n) float64, uniform in [0, 1)."""
        key = _stream_key(self.seed, self.epoch, self.use, stream)
        sample_words = mixed(self.samples.view(np.uint64), np.uint64(key))
        steps = np.array([(place + 1) * GOLDEN & WORD for place in places], np.uint64)[:, None]
        return np.asarray((mixed(sample_words + steps, ZERO) >> UNUSED_BITS) * 2.0**-53)

    @property
    def numbers(self) -> Indices:
        """The indices of the samples in the file: (n,) int64."""
        return self.samples % REPEAT

    def of_all_epochs(self) -> Draws:
        """Return draws that are the same in all epochs."""
        return Draws(self.seed, EVERY_EPOCH, self.samples)

    def part(self, start: int, stop: int) -> Draws:
        """Return the draws of samples ``start`` to ``stop`` (excluded)."""
        return self._replace(samples=self.samples[start:stop], first=self.first + start)


def epoch_rows(epoch: int, num_samples: int) -> int:
    """Return the offset of an epoch's sample indices, for data sets like patches, whose samples differ between epochs.

    The offsets repeat before an index would reach REPEAT.
    """
    return epoch % (REPEAT // num_samples) * num_samples


def keys_of_repeated(samples: Indices) -> Indices:
    """Return the keys, (n,) int64, of ascending sample indices, which may be repeated.

    >>> (keys_of_repeated(np.array([1, 4, 4])) // REPEAT).tolist()
    [0, 0, 1]
    """
    repeats = np.arange(len(samples)) - np.searchsorted(samples, samples)
    return np.asarray(samples + REPEAT * (repeats % MOST_REPEATS))


@lru_cache(1024)
def _stream_key(*numbers: int) -> int:
    """Hash the seed, the epoch, the use and the stream to one 64-bit integer."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mixed(key + np.uint64(number & WORD), np.uint64(GOLDEN))
    return int(key[0])
