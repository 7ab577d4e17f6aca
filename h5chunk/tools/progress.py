"""Progress of a task, and the time that it may take."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str, int, "int | None"], None]
"""Called with (stage, done, total); the total is None where it is not known."""

LEAST_SLICE_S, MOST_SLICE_S = 0.05, 1.0


def count_up(stage: str, total: int, progress: Progress | None) -> Callable[[int], None]:
    """A function to call with the size of each part that is done; it reports the sum, at most the total."""
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done = min(total, done + count)
        if progress:
            progress(stage, done, total)

    return told


class TimeBudget:
    """Seconds that a measurement may take; ``progress`` is told the percentage of them that was taken."""

    def __init__(
        self,
        stage: str,
        seconds: float,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds, self._stage, self._progress, self._clock = seconds, stage, progress, clock
        self._started = clock()
        self._reported = -1

    @property
    def taken_s(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._started

    @property
    def slice_s(self) -> float:
        """Seconds of one measurement of many."""
        return min(MOST_SLICE_S, max(LEAST_SLICE_S, self.seconds / 75))

    def report(self) -> None:
        """Report how much of the time was taken."""
        done = min(100, int(100 * self.taken_s / self.seconds))
        if self._progress is not None and done > self._reported:
            self._progress(self._stage, done, 100)
        self._reported = max(self._reported, done)

    def has(self, share: float) -> bool:
        """Whether less than this share of the time was taken."""
        self.report()
        return self.taken_s < share * self.seconds
