"""The budget of a tuner: what is left of it, and who wants to know."""

from __future__ import annotations

import time

from h5chunk.tools.progress import Progress

LEAST_SLICE_S, MOST_SLICE_S = 0.05, 1.0


class Budget:
    """Seconds that may be taken.

    Parameters
    ----------
    seconds : float
    progress : callable, optional
        Called with ("tune", done, 100).
    """

    def __init__(self, seconds: float, progress: Progress | None = None) -> None:
        self.seconds, self._progress = seconds, progress
        self._started = time.perf_counter()
        self._told = -1

    @property
    def taken_s(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._started

    @property
    def slice_s(self) -> float:
        """Of one measurement."""
        return min(MOST_SLICE_S, max(LEAST_SLICE_S, self.seconds / 75))

    def has(self, share: float) -> bool:
        """Whether less than this share of the budget was taken; tells how far it is."""
        done = min(100, int(100 * self.taken_s / self.seconds))
        if self._progress is not None and done > self._told:
            self._progress("tune", done, 100)
        self._told = max(self._told, done)
        return self.taken_s < share * self.seconds
