"""Which of several settings to take: the fastest that mixes well enough and fits in memory, or a simpler one as good.

>>> slow, fast, sorted_ = (
...     Candidate(Setting("loader", 8, 9), 900.0, 1 << 20, 250.0),
...     Candidate(Setting("loader", 32, 9, repack=True), 1000.0, 1 << 20, 250.0),
...     Candidate(Setting("loader", 64, 9, repack=True), 2000.0, 1 << 20, 90.0),
... )
>>> choose([slow, fast, sorted_], min_effective=243.2).setting.chunk_samples
32
>>> choose([slow, fast, sorted_], min_effective=243.2, memory_bytes=1000) is None
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from h5chunk.tools.model.settings import LOADER, Setting

STAY = 0.97  # of the best rate: what needs no new file, or is simpler, is taken from here on


@dataclass(frozen=True)
class Candidate:
    """A setting with what it gives.

    Attributes
    ----------
    setting : Setting
    rate : float
        Samples/s.
    memory_bytes : int
    effective_batch : float or None
        None where no field says what is alike.
    """

    setting: Setting
    rate: float
    memory_bytes: int
    effective_batch: float | None


def allowed(each: Candidate, min_effective: float, memory_bytes: int | None) -> bool:
    """Whether it fits in memory and mixes well enough."""
    fits = memory_bytes is None or each.memory_bytes <= memory_bytes
    return fits and (each.effective_batch is None or each.effective_batch >= min_effective)


def choose(
    candidates: Sequence[Candidate], *, min_effective: float, memory_bytes: int | None = None
) -> Candidate | None:
    """The one to take, or None if none is allowed.

    Of those within 3 % of the fastest, the one that changes least: the file as it is, then `ChunkLoader`, then fewer
    workers, then smaller chunks, of which a single sample wants less, then less memory.

    Parameters
    ----------
    candidates : sequence of Candidate
    min_effective : float
        Samples.
    memory_bytes : int, optional
    """
    fitting = [each for each in candidates if allowed(each, min_effective, memory_bytes)]
    if not fitting:
        return None
    best = max(each.rate for each in fitting)
    return min((each for each in fitting if each.rate >= STAY * best), key=_effort)


def _effort(each: Candidate) -> tuple[bool, bool, bool, int, int, int, float]:
    setting = each.setting
    changes = setting.shuffle, setting.repack, setting.way != LOADER
    chunk_samples = setting.chunk_samples if setting.repack else 0
    return *changes, setting.num_workers, chunk_samples, each.memory_bytes, -each.rate


def runner_up(
    candidates: Sequence[Candidate], chosen: Candidate, *, min_effective: float, memory_bytes: int | None = None
) -> Candidate | None:
    """The second choice: without a new file if the first one needs that, else the other way of reading, or any."""
    others = [each for each in candidates if each.setting != chosen.setting]
    kinds = [
        [each for each in others if chosen.setting.repack and not each.setting.repack],
        [each for each in others if each.setting.way != chosen.setting.way and not each.setting.repack],
        others,
    ]
    for some in kinds:
        found = choose(some, min_effective=min_effective, memory_bytes=memory_bytes)
        if found is not None:
            return found
    return max(others, key=lambda each: each.effective_batch or 0.0, default=None)


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one beats in both rate and effective batch, by growing rate."""
    found: list[Candidate] = []
    best = -1.0
    for each in sorted(candidates, key=lambda each: (-each.rate, -(each.effective_batch or 0.0))):
        if (each.effective_batch or 0.0) > best:
            best = each.effective_batch or 0.0
            found.append(each)
    return found[::-1]
