"""Find the rows at which episodes begin and end, and the time steps whose window is inside their episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def ends_of_flags(flags: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Return the end of each episode, which is the row after its last one: (num_episodes,) int64.

    ``flags``, (num_rows,) each, are nonzero in the last row of an episode. The rows after the last such row are an
    episode, too.

    >>> ends_of_flags([np.array([0, 1, 0, 0, 0]), np.array([0, 0, 0, 1, 0])], 5).tolist()
    [2, 4, 5]
    """
    marked = np.flatnonzero(np.logical_or.reduce([each != 0 for each in flags])) + 1
    return np.union1d(marked, [num_rows] if num_rows else []).astype(np.int64)


def needed_steps(steps: Mapping[str, np.ndarray], extra: Mapping[str, int]) -> tuple[int, int]:
    """Return how many time steps of an episode a window needs before and after the current one.

    ``steps`` has the offsets of each field's frames from the current time step, ascending. The fields in ``extra`` have
    so many more frames than the episode has time steps.
    """
    before = max(0, *(-int(each[0]) for each in steps.values()))
    after = max(0, *(int(each[-1]) - extra.get(name, 0) for name, each in steps.items()))
    return before, after


def anchors_inside(borders: np.ndarray, before: int, after: int) -> np.ndarray:
    """Return the time steps that have so many others of their episode before and after them: (n,) int64, ascending.

    ``borders``, (num_episodes + 1,), has the first time step of each episode, and finally the number of time steps.

    >>> anchors_inside(np.array([0, 4, 5, 8]), before=1, after=1).tolist()
    [1, 2, 6]
    """
    rows = np.arange(int(borders[-1]))
    episode = np.searchsorted(borders, rows, "right") - 1
    return rows[(rows - before >= borders[episode]) & (rows + after < borders[episode + 1])]
