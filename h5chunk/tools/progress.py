"""Report the progress of a task, and limit the time of a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[str, int, "int | None"], None]
"""Called with (stage, done, total); the total is None if it is unknown."""

MIN_SLICE_S, MAX_SLICE_S = 0.02, 0.5  # limits on `TimeBudget.slice_s`


def count_up(stage: str, total: int, progress: Progress | None) -> Callable[[int], None]:
    """Return a function that adds the size of a finished part to a sum, and reports the sum, limited to ``total``."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done = min(total, done + count)
        if progress:
            progress(stage, done, total)

    return add


def count_tasks(stage: str, total: int, progress: Progress | None) -> Callable[[int, int], None]:
    """Return a function to call with the number of a task and the amount done; it reports the sum over all tasks."""
    add, last = count_up(stage, total, progress), dict[int, int]()

    def say(number: int, done: int) -> None:
        add(done - last.get(number, 0))
        last[number] = done

    return say


class TimeBudget:
    """Limit the time of a measurement to a number of seconds; report the percentage that has passed to ``progress``."""

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
        """Seconds since the budget was created."""
        return self._clock() - self._started

    @property
    def slice_s(self) -> float:
        """Maximum duration of a single measurement, in seconds, if there are many."""
        return min(MAX_SLICE_S, max(MIN_SLICE_S, self.seconds / 200))

    def report(self) -> None:
        """Call ``progress`` with the percentage of the time that has passed, if it has increased."""
        done = min(100, int(100 * self.taken_s / self.seconds))
        if self._progress is not None and done > self._reported:
            self._progress(self._stage, done, 100)
        self._reported = max(self._reported, done)

    def has(self, share: float) -> bool:
        """Return whether less than the fraction ``share`` of the time has passed."""
        self.report()
        return self.taken_s < share * self.seconds
