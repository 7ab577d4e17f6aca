"""What a section of the torture found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    """What came of a section.

    Attributes
    ----------
    what : str
        What a case is.
    cases : int
    counts : dict of str to int
        What was seen, and how often.
    bad : list of str
        What must not be; the section failed if there is any.
    notes : list of str
        What readers of the table should know.
    seconds : float
    """

    what: str
    cases: int = 0
    counts: dict[str, Any] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, name: str, number: int = 1) -> None:
        """Count something."""
        self.counts[name] = self.counts.get(name, 0) + number
