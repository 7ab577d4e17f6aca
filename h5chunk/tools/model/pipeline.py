"""Simulate a training loop that is fed by the workers of torch's DataLoader.

Workers beyond the number of cores gain nothing:

>>> loop = Loop(fetches=(0.08,) * 40, steps=(0.01,) * 40, workers=1, cores=8, fetch_cpu=0.08, step_cpu=0.01)
>>> [round(seconds_per_batch(replace(loop, workers=count)), 3) for count in (0, 1, 4, 16)]
[0.09, 0.08, 0.02, 0.011]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

RESAMPLES = 16
MODEL_ERROR = 0.05  # relative error of predicted times of simple loops


@dataclass(frozen=True)
class Loop:
    """Times of a training loop, in seconds per batch."""

    fetches: Sequence[float]  # time that a worker takes per batch, without waiting for a core or for other workers
    steps: Sequence[float]  # time between receiving a batch and requesting the next one
    workers: int  # 0: the main process makes the batches
    cores: float  # cores that this training may use
    fetch_cpu: float  # CPU time of a fetch
    step_cpu: float  # CPU time of a step
    prefetch: int = 2  # batches that each worker may have ready
    handover: float = 0.0  # time that the main process takes to receive a batch that is ready
    least: float = 0.0  # time that the GPU works per step, in parallel with Python; an iteration takes at least this
    exclusive: float = 0.0  # time per batch in which only one worker can work, because of a lock
    in_order: bool = True  # whether batches are delivered in the order of the sampler
    slowdown: Sequence[float] = ()  # time of each worker relative to the mean

    def shorter(self, share: float, cpu_share: float) -> Loop:
        """Return a loop whose fetches take ``share`` less time and ``cpu_share`` less CPU time, as fractions."""
        fetches = [seconds * (1 - share) for seconds in self.fetches]
        return replace(self, fetches=fetches, fetch_cpu=self.fetch_cpu * (1 - cpu_share))


@dataclass(frozen=True)
class Range:
    """A predicted ratio, with its confidence interval."""

    value: float
    low: float
    high: float

    def with_rest(self, rest: float) -> Range:
        """Return the gain on all time, if this gain applies to all but the fraction ``rest`` of the time."""
        low, value, high = (1 / ((1 - rest) / max(1e-9, x) + rest) for x in (self.low, self.value, self.high))
        return Range(value, low, high)


def seconds_per_batch(loop: Loop) -> float:
    """Return the mean time of an iteration, without the first iterations."""
    if loop.workers == 0:
        return max(loop.least, float(np.mean(loop.fetches) + np.mean(loop.steps)))
    simulated = _in_order(loop) if loop.in_order else _any_order(loop)
    return max(simulated, loop.least, loop.exclusive, (loop.fetch_cpu + loop.step_cpu) / loop.cores)


def _in_order(loop: Loop) -> float:
    ends = list(_ends(loop))
    half = len(ends) // 2
    return (ends[-1] - ends[half - 1]) / (len(ends) - half) if half else ends[-1]


def _any_order(loop: Loop) -> float:
    mean = float(np.mean(loop.fetches))
    factors = [loop.slowdown[i] if i < len(loop.slowdown) else 1.0 for i in range(loop.workers)]
    return max(1 / sum(1 / (mean * factor) for factor in factors), float(np.mean(loop.steps)) + loop.handover)


def _ends(loop: Loop) -> Iterator[float]:
    """Yield the end of each step. A worker starts a batch when the main process has received an earlier one."""
    workers = loop.workers
    free, received, now = [0.0] * workers, [0.0] * (workers * loop.prefetch), 0.0
    for number in range(max(len(loop.fetches), 8 * len(received))):
        worker, fetch = number % workers, loop.fetches[number % len(loop.fetches)]
        factor = loop.slowdown[worker] if worker < len(loop.slowdown) else 1.0
        free[worker] = max(free[worker], received[number]) + fetch * factor
        received.append(max(now, free[worker]))
        now = received[-1] + loop.handover + loop.steps[number % len(loop.steps)]
        yield now


def gain_range(today: Loop, *changed: Loop) -> Range:
    """Predict how many times faster a changed loop is, with a confidence interval from resampled batches.

    The first of the ``changed`` loops gives the predicted value. Further loops, with the change at the ends of
    its confidence interval, widen the predicted interval. Batches are resampled in blocks (block bootstrap).
    """
    generator = np.random.default_rng(0)
    before = seconds_per_batch(today)
    found = [before / max(1e-9, seconds_per_batch(loop)) for loop in changed]
    value = found[0]
    for _ in range(RESAMPLES):
        fetch, step = (_resampled(generator, times) for times in (today.fetches, today.steps))
        first, other = (seconds_per_batch(_drawn(loop, fetch, step)) for loop in (today, changed[0]))
        found.append(first / max(1e-9, other))
    return Range(value, min(found) * (1 - MODEL_ERROR), max(found) * (1 + MODEL_ERROR))


def _drawn(loop: Loop, fetch: Sequence[int], step: Sequence[int]) -> Loop:
    fetches, steps = loop.fetches, loop.steps
    return replace(
        loop, fetches=[fetches[i % len(fetches)] for i in fetch], steps=[steps[i % len(steps)] for i in step]
    )


def _resampled(generator: np.random.Generator, values: Sequence[float]) -> list[int]:
    block = max(1, len(values) // 8)
    starts = generator.integers(0, max(1, len(values) - block + 1), -(-len(values) // block))
    return (starts[:, None] + np.arange(block)).ravel()[: len(values)].tolist()
