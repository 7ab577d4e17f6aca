"""Compare two rates that were measured in turns, so that other work on the machine slows both down equally.

>>> print(Ratio.of([110.0, 66.0, 121.0, 108.0], [100.0, 60.0, 100.0, 99.0]))
1.1 times (0.91 to 1.4)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

STUDENT = (12.7, 4.3, 3.2, 2.8, 2.6, 2.5, 2.4, 2.3, 2.3)  # 95 % of Student's t, with 1 to 9 degrees of freedom
UNKNOWN = 100.0  # a ratio is uncertain if the upper end of its interval is this many times the lower end
MIN_SPREAD = 0.03  # typical difference of two runs of the same loop


@dataclass(frozen=True)
class Ratio:
    """The ratio of the rates of two settings, with the interval that contains the ratios of 95 % of the turns.

    With two turns the interval is very wide, and with one turn it is unbounded.
    """

    times: float
    low: float
    high: float

    @classmethod
    def of(cls, rates: Sequence[float], reference_rates: Sequence[float], busy: float = 1.0) -> Ratio:
        """Compare the rates of two settings turn by turn. There must be at least one turn.

        ``busy`` is the load per core by other programs. They slow down single-threaded and multi-threaded
        loops differently, and this varies over time, so the interval is widened by its square root on both sides.
        """
        logs = [math.log(rate / other) for rate, other in zip(rates, reference_rates, strict=True)]
        middle, count = statistics.fmean(logs), len(logs)
        if count == 1:
            return cls(math.exp(middle), 0.0, math.inf)
        student = STUDENT[count - 2] if count - 2 < len(STUDENT) else 1.96 + 2.6 / (count - 1)
        reach = student * statistics.stdev(logs) * math.sqrt(1 + 1 / count) + MIN_SPREAD
        reach += math.log(max(1.0, busy)) / 2
        return cls(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))

    def __str__(self) -> str:
        return self.text("")

    def text(self, reference: str) -> str:
        """Return the ratio and its interval in words. ``reference``, such as " today's rate", follows "times"."""
        if self.high > UNKNOWN * self.low:
            return f"{_times(self.times)} times{reference} (not certain)"
        return f"{_times(self.times)} times{reference} ({_times(self.low)} to {_times(self.high)})"


def _times(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}" if value >= 0.01 else f"{value:.1g}"
