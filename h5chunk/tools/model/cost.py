"""What a training loop loses its time to, and what changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from h5chunk.tools.model.pipeline import Loop, Range, gain_range
from h5chunk.tools.model.seen import READING, Line, Seen

LEAST_SHARE = 0.05  # of all time: less is not worth a word
LEAST_GAIN = 1.05
LEAST_BOUND = 1.1  # the least gain of those that are upper limits
UNKNOWN = 2.0  # upper end of an interval over its lower end, from which on it says little


@dataclass(frozen=True)
class Fix:
    """A change with its predicted gain: how many times faster the whole training is."""

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
    """Something that training loses time to, the sentence that says so, and changes that lower it."""

    cause: str
    is_data: bool
    share: float  # of all time
    sentence: str
    fixes: list[Fix] = field(default_factory=list)


def gain_of(seen: Seen, *changed: Loop) -> Range:
    """Predict the gain of a changed loop on all time; further loops widen its interval, as in `gain_range`."""
    return gain_range(seen.loop(), *changed).with_rest(seen.other_share)


def where(seen: Seen) -> str:
    """Return the line that made the loader, as the beginning of a line of code."""
    place = str(seen.loader.get("made_at") or "").rpartition("/")[2]
    return f"{place}: " if place else ""


def slowest_line(seen: Seen, *stages: str) -> Line | None:
    """Return the line of the user's code that takes most of some stages; None if it takes less than a tenth."""
    lines = [line for line in seen.lines if line.stage in stages and line.place and line.share > 0.1]
    return max(lines, key=lambda line: line.share, default=None)


def chunked_file(seen: Seen) -> dict[str, Any] | None:
    """Return the largest HDF5 file whose data is chunked; None if none was open, or reading takes little time."""
    if seen.stages.get(READING, 0.0) < 0.1 * seen.fetch:
        return None
    return max((file for file in seen.files if file.get("chunks")), key=lambda file: file["bytes"], default=None)
