"""Costs of a training loop, and fixes with their predicted gains."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from h5chunk.tools.model.pipeline import Loop, Range, gain_range, seconds_per_batch
from h5chunk.tools.model.seen import READING, Line, Seen

LEAST_SHARE = 0.05  # smallest share of all time that is reported
LEAST_GAIN = 1.05
LEAST_BOUND = 1.1  # the smallest gain that is reported if it is an upper limit
UNKNOWN = 2.0  # a gain is uncertain if the upper end of its interval is this many times the lower end


@dataclass(frozen=True)
class Fix:
    """A change to training and its predicted gain, which is the factor by which training becomes faster."""

    name: str
    gain: Range
    code: str
    apply: dict[str, Any] = field(default_factory=dict)  # settings that try the change without editing the script
    is_bound: bool = False  # whether the gain is an upper limit, for a change that removes the cost completely

    @property
    def is_worth_it(self) -> bool:
        return self.gain.value >= (LEAST_BOUND if self.is_bound else LEAST_GAIN)

    @property
    def gain_text(self) -> str:
        value, low, high = (f"{x:.2g}" for x in (self.gain.value, self.gain.low, self.gain.high))
        interval = "" if low == high else f" ({low} to {high})"
        if self.gain.high > UNKNOWN * self.gain.low:
            interval = f" ({low} to {high}: not certain)"
        return f"{'at most ' * self.is_bound}{value} times{interval}"


@dataclass(frozen=True)
class Cost:
    """A cause of lost training time, a sentence that describes it, and changes that reduce it."""

    cause: str
    is_data: bool
    share: float  # fraction of the training time that is lost
    sentence: str
    fixes: list[Fix] = field(default_factory=list)


def gain_of(seen: Seen, *changed: Loop) -> Range:
    """Predict the gain over all time of changing the loop. `gain_range` describes ``changed``."""
    return gain_range(seen.loop(), *changed).with_rest(seen.other_share)


def about(seen: Seen, gain: float, low: float = 2, high: float = 1.1) -> Range:
    """Return the gain over all time if the gain on training is from ``1 + (gain - 1) / low`` to ``high * gain``."""
    return Range(gain, 1 + (gain - 1) / low, high * gain).with_rest(seen.other_share)


def late_share(seen: Seen) -> float:
    """Return the share of time in which training waits for batches that the workers could have produced in time."""
    share, least = seen.waiting()
    if least < LEAST_SHARE or not (seen.workers and seen.fetches):
        return 0.0
    loop = replace(seen.loop(), cores=seen.cores)
    ready = replace(loop, exclusive=0.0).shorter(0.999, 0.999)
    expected = 1 - seconds_per_batch(ready) / max(1e-9, seconds_per_batch(loop))
    return share if expected < share / 2 else 0.0


def where(seen: Seen) -> str:
    """Return the file and line of the code that created the loader, as a prefix; empty if they are unknown."""
    place = str(seen.loader.get("made_at") or "").rpartition("/")[2]
    return f"{place}: " if place else ""


def slowest_line(seen: Seen, *stages: str) -> Line | None:
    """Return the line of the user's code that takes most of the time of these stages.

    Returns None if no line takes more than a tenth of the time of a fetch or a step.
    """
    lines = [line for line in seen.lines if line.stage in stages and line.place and line.share > 0.1]
    return max(lines, key=lambda line: line.share, default=None)


def chunked_file(seen: Seen) -> dict[str, Any] | None:
    """Return the HDF5 file with chunked data that the loop reads most often.

    Returns None if there is no such file, or if reading takes less than a tenth of a fetch.
    """
    if seen.stages.get(READING, 0.0) < 0.1 * seen.fetch:
        return None
    return max((file for file in seen.files if file.get("chunks")), key=lambda file: file.get("reads", 0), default=None)
