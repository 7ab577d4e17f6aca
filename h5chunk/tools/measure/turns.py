"""Rates of settings measured in turns, freed of what else the machine did in each turn.

A machine that does other things is slow for a while, for all alike. So settings are compared within each turn, and the
median is taken of what they give against the others there.

>>> found = rates_in_turns([{"a": 100.0, "b": 90.0}, {"a": 50.0, "b": 45.0}, {"a": 98.0, "b": 99.0}])
>>> round(found["a"] / found["b"], 2)  # twice a is ahead by a ninth, once they are level
1.11
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def rates_in_turns(turns: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    """One rate of each, comparable with those of the others.

    Parameters
    ----------
    turns : sequence of dict of key to float
        Rates of each turn, above 0. Who is in the last one is in all; others may have left before.

    Returns
    -------
    dict of key to float
        Of all that are in the first turn; empty without turns.
    """
    if not turns:
        return {}
    stayed = turns[-1].keys()
    bases = [math.exp(statistics.fmean(math.log(turn[key]) for key in stayed)) for turn in turns]
    usual = statistics.median(bases)
    return {
        key: usual * statistics.median(turn[key] / base for turn, base in zip(turns, bases, strict=True) if key in turn)
        for key in turns[0]
    }
