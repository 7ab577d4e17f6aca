"""Costs of a training loop, and fixes with their predicted gains."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from h5chunk.tools.model.pipeline import Loop, Range, gain_range, seconds_per_batch
from h5chunk.tools.model.seen import READING, Line, Seen

LEAST_SHARE = 0.05  # smallest share of all time that is reported
LEAST_GAIN = 1.05
LEAST_BOUND = 1.1  # the smallest gain that is reported if it is an upper limit
UNKNOWN = 2.0  # ratio of the ends of an interval above which the gain counts as uncertain


@dataclass(frozen=True)
class Fix:
    """A change and its predicted gain: the factor by which training becomes faster."""

    name: str
    gain: Range
    code: str
    apply: dict[str, Any] = field(default_factory=dict)  # how it can be tried without changing the script
    is_bound: bool = False  # the gain is an upper limit, as if the cost were gone

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
    share: float  # of all time
    sentence: str
    fixes: list[Fix] = field(default_factory=list)


def gain_of(seen: Seen, *changed: Loop) -> Range:
    """Predict the overall gain of a changed loop; further loops widen its interval, as in `gain_range`."""
    return gain_range(seen.loop(), *changed).with_rest(seen.other_share)


def late_share(seen: Seen) -> float:
    """Return the share of time for which workers' batches are late although the workers could make them in time."""
    share, least = seen.waiting()
    if least < LEAST_SHARE or not (seen.workers and seen.fetches):
        return 0.0
    loop = replace(seen.loop(), cores=seen.cores)
    ready = replace(loop, exclusive=0.0).shorter(0.999, 0.999)
    expected = 1 - seconds_per_batch(ready) / max(1e-9, seconds_per_batch(loop))
    return share if expected < share / 2 else 0.0


def where(seen: Seen) -> str:
    """Return the file and line that created the loader, as a prefix of a line of code."""
    place = str(seen.loader.get("made_at") or "").rpartition("/")[2]
    return f"{place}: " if place else ""


def slowest_line(seen: Seen, *stages: str) -> Line | None:
    """Return the line of the user's code with most of the time of these stages; None if it has less than a tenth."""
    lines = [line for line in seen.lines if line.stage in stages and line.place and line.share > 0.1]
    return max(lines, key=lambda line: line.share, default=None)


def chunked_file(seen: Seen) -> dict[str, Any] | None:
    """Return the largest open HDF5 file with chunked data; None if there is none, or if reading takes little time."""
    if seen.stages.get(READING, 0.0) < 0.1 * seen.fetch:
        return None
    return max((file for file in seen.files if file.get("chunks")), key=lambda file: file["bytes"], default=None)
