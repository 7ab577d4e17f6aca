"""Telling how far something is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, "int | None"], None]
"""Told (stage, done, total): the total is None where it is not known."""


def count_up(stage: str, total: int, progress: Progress | None) -> Callable[[int], None]:
    """What is told of each part that is done, and tells ``progress`` of all of them: at most the total."""
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done = min(total, done + count)
        if progress:
            progress(stage, done, total)

    return told
