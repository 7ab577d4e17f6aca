"""The report of `h5chunk tune`: a table of settings with reasons, and advice."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from h5chunk.errors import printable
from h5chunk.plan.layout import human_bytes
from h5chunk.tools.model.settings import Setting, TriedSetting
from h5chunk.tools.report import Report
from h5chunk.tools.tune.advice import Advice

Triple = tuple[int, int, float]

WIDTH = 100  # of the lines of a report, but for commands
TODAY, PLAIN, CHOSEN, SECOND = "today", "h5py default", "recommendation", "runner-up"


@dataclass(frozen=True)
class TuneRow:
    """One line of the table; for rates, memory and ``effective_batch``, see `TriedSetting`."""

    name: str  # TODAY, PLAIN, CHOSEN or SECOND
    setting: Setting | None  # None for plain h5py
    description: str  # the setting in words
    cache: Triple  # (nslots, nbytes, w0) of each process that reads through HDF5
    rate: float
    measured_rate: float | None
    predicted_rate: float
    memory_bytes: int
    hit_rate: float | None  # of HDF5's chunk cache; None where it is not used
    amplification: float  # bytes read over bytes used
    effective_batch: float | None
    slowest: str  # the stage that takes most of the time
    reason: str

    def lines(self) -> list[str]:
        """Return the figures in columns, and the setting with its reason."""
        hits = "-" if self.hit_rate is None else f"{self.hit_rate:.3f}"
        batch = "-" if self.effective_batch is None else f"{self.effective_batch:.0f}"
        rate = f"{self.rate:,.0f}" if self.measured_rate is not None else f"~{self.rate:,.0f}"
        figures = f"{rate:>11s}{human_bytes(self.memory_bytes):>11s}{hits:>9s}{self.amplification:>10,.2f}{batch:>7s}"
        indent = f"{'':17s}"
        return [f"{self.name:15s}{figures}", *_wrapped(f"{self.description}: {self.reason}", indent, indent)]


@dataclass(frozen=True)
class Recommendation(Report):
    """The recommended setting, with its rates, memory and shuffle quality.

    Its JSON is the input of ``--tuned`` of `h5chunk convert` and `h5chunk repack`.

    Attributes
    ----------
    setting : Setting
        The recommended setting; if ``setting.repack``, for the file that `h5chunk repack` writes.
    cache : (nslots, nbytes, w0)
        Chunk cache of one process that reads all windows through HDF5.
    window_in_place, cache_in_place : int, (nslots, nbytes, w0)
        The best window and cache without a new file, which ``--apply`` stores.
    num_samples, num_measured : int
        Number of samples, and of the samples that rates were measured on.
    commands : list of str
        The commands to run, and a line of Python.
    min_effective_batch : float
        Minimum shuffle quality, as an effective batch in samples.
    memory_bytes : int
        Upper limit on the memory of feeding.
    machine : dict
        Rates of the machine as probed, in bytes/s.
    verify : dict or None
        Predicted and measured reads.
    applied : str or None
        Path where the recommendation was stored.
    """

    setting: Setting
    cache: Triple
    window_in_place: int
    cache_in_place: Triple
    path: str
    batch_size: int
    device: str
    num_samples: int
    num_measured: int
    sample_bytes: int
    rows: list[TuneRow]
    advice: list[Advice]
    commands: list[str]
    min_effective_batch: float
    memory_bytes: int
    notes: list[str]
    seconds: float
    budget_s: float
    versions: dict[str, str]
    candidates: list[TriedSetting] = field(repr=False)
    machine: dict[str, float | None] = field(repr=False)
    verify: dict[str, Any] | None = None
    applied: str | None = None

    def row(self, name: str) -> TuneRow:
        """Return a line of the table by its name."""
        return next(each for each in self.rows if each.name == name)

    def facts(self) -> dict[str, Any]:
        return {**asdict(self.setting), **asdict(self)}

    def lines(self) -> list[str]:
        size = human_bytes(self.sample_bytes)
        lines = [
            f"{self.path}: {self.num_samples:,} samples of {size}, batches of {self.batch_size} to {self.device}",
            "",
            *_wrapped(self._headline(), "", "    "),
            *(f"  {command}" for command in self.commands),
            "",
            f"{'':15s}{'samples/s':>11s}{'memory':>11s}{'hit rate':>9s}{'read/used':>10s}{'batch':>7s}",
        ]
        for row in self.rows:
            lines += row.lines()
        for advice in self.advice:
            lines += [*_wrapped(f"{advice.code}: {advice.message}:", "advice: "), f"{'':8s}{advice.remedy}"]
        if self.verify is not None:
            lines.append(_verified(self.verify))
        if self.applied is not None:
            lines.append(f"stored in {self.applied}: readers take window and cache from there")
        for note in self.notes:
            lines += _wrapped(note, "note: ")
        measured = f"measured on {self.num_measured:,} samples in {self.seconds:.0f} s"
        return [*lines, f"slowest stage: {self.row(CHOSEN).slowest}; {measured}"]

    def _headline(self) -> str:
        chosen, today = self.row(CHOSEN), self.row(TODAY)
        gain = chosen.rate / max(1e-9, today.rate)
        batch = f", a batch of {self.batch_size} worth {chosen.effective_batch:.0f}" if chosen.effective_batch else ""
        times = f"{gain:,.0f}" if gain >= 10 else f"{gain:.2g}"
        against = "as today" if chosen.setting == today.setting else f"{times} x today's"
        about = "" if chosen.measured_rate is not None else "about "
        return f"{chosen.description}: {about}{chosen.rate:,.0f} samples/s, {against}{batch}"


def _wrapped(text: str, head: str, indent: str = "        ") -> list[str]:
    """Wrap a sentence; paths in it stay in one piece."""
    text = printable(text)  # wrapping would make spaces of line breaks
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _verified(verify: dict[str, Any]) -> str:
    if verify["note"]:
        return f"verify: {verify['note']}"
    same = "equal" if verify["predicted_reads"] == verify["measured_reads"] else "NOT EQUAL: please report it"
    return (
        f"verify: {verify['predicted_reads']:,} reads of chunks predicted, {verify['measured_reads']:,} measured, in "
        f"{verify['batches']:,} batches; {verify['measured_bytes']:,} bytes read: {same}"
    )
