"""The report of `h5chunk tune`: a table of four settings, each with a sentence of reason, and advice."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from h5chunk.errors import printable
from h5chunk.plan.layout import human_bytes
from h5chunk.tools.model.settings import Setting
from h5chunk.tools.report import Report
from h5chunk.tools.tune.advice import Advice, Triple

WIDTH = 100  # of the lines of a report, but for commands
TODAY, PLAIN, CHOSEN, SECOND = "today", "h5py default", "recommendation", "runner-up"


@dataclass(frozen=True)
class TuneRow:
    """One line of the table.

    Attributes
    ----------
    name : {"today", "h5py default", "recommendation", "runner-up"}
    setting : Setting or None
        None for plain h5py.
    description : str
        The setting in words.
    cache : (nslots, nbytes, w0)
        Of each process that reads through HDF5.
    rate : float
        Samples/s from the page cache: measured, or else predicted.
    measured_rate : float or None
        None: it was not measured.
    predicted_rate : float
        By the cost model, corrected by what was measured of other settings, not of this one.
    cold_rate : float or None
        From the disk, with the opening of the file.
    memory_bytes : int
    hit_rate : float or None
        Of HDF5's chunk cache; None where it is not asked.
    amplification : float
        Bytes read over bytes used.
    effective_batch : float or None
        None where no field says which samples are alike.
    slowest : str
        Stage.
    reason : str
    """

    name: str
    setting: Setting | None
    description: str
    cache: Triple
    rate: float
    measured_rate: float | None
    predicted_rate: float
    cold_rate: float | None
    memory_bytes: int
    hit_rate: float | None
    amplification: float
    effective_batch: float | None
    slowest: str
    reason: str

    def line(self) -> str:
        """The figures, in columns."""
        cold = "-" if self.cold_rate is None else f"{self.cold_rate:,.0f}"
        hits = "-" if self.hit_rate is None else f"{self.hit_rate:.3f}"
        batch = "-" if self.effective_batch is None else f"{self.effective_batch:.0f}"
        rate = f"{self.rate:,.0f}" if self.measured_rate is not None else f"~{self.rate:,.0f}"
        return (
            f"{self.name:15s}{rate:>11s}{cold:>10s}{human_bytes(self.memory_bytes):>11s}{hits:>9s}"
            f"{self.amplification:>10,.2f}{batch:>7s}"
        )


@dataclass(frozen=True)
class TriedSetting:
    """A setting with its rates in samples/s (see `TuneRow`), its memory and its effective batch.

    ``num_measured`` is how often it was measured; ``allowed``: whether it fits in memory and mixes well enough.
    """

    setting: Setting
    predicted_rate: float
    measured_rate: float | None
    num_measured: int
    memory_bytes: int
    effective_batch: float | None
    allowed: bool

    @property
    def rate(self) -> float:
        return self.predicted_rate if self.measured_rate is None else self.measured_rate


@dataclass(frozen=True)
class Recommendation(Report):
    """The recommended setting, and what it gives. ``--tuned`` of `h5chunk convert` and `repack` takes its JSON.

    Attributes
    ----------
    setting : Setting
        Recommended; where ``setting.repack``, of the file that `h5chunk repack` writes.
    cache : (nslots, nbytes, w0)
        Chunk cache of one process that reads all windows through HDF5.
    window_in_place, cache_in_place : int, (nslots, nbytes, w0)
        The best without a new file: what ``--apply`` stores.
    path : str
    converted : bool
        False: the source has to be converted first.
    batch_size : int
    device : str
    num_samples, num_measured : int
        Of the data, and those that rates are of.
    sample_bytes : int
    rows : list of TuneRow
    advice : list of Advice
    commands : list of str
        What to do, one step each.
    candidates : list of TriedSetting
    min_effective_batch : float
        Samples that a batch has to be worth.
    memory_bytes : int
        Memory that may be taken.
    machine : dict
        Rates that probes found.
    verify : dict or None
        Predicted and measured reads.
    applied : str or None
        Where the recommendation was stored.
    notes : list of str
    seconds, budget_s : float
    versions : dict of str to str
    """

    setting: Setting
    cache: Triple
    window_in_place: int
    cache_in_place: Triple
    path: str
    converted: bool
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
        """A line of the table by its name."""
        return next(each for each in self.rows if each.name == name)

    def facts(self) -> dict[str, Any]:
        return {**asdict(self.setting), **asdict(self)}

    def lines(self) -> list[str]:
        head = (
            f"{self.path}: {self.num_samples:,} samples of {human_bytes(self.sample_bytes)}, batches of "
            f"{self.batch_size} to {self.device}"
        )
        lines = [head, "", *_wrapped(self._headline(), "", "    "), *(f"  {command}" for command in self.commands), ""]
        lines.append(
            f"{'':15s}{'samples/s':>11s}{'cold':>10s}{'memory':>11s}{'hit rate':>9s}{'read/used':>10s}{'batch':>7s}"
        )
        for row in self.rows:
            lines += [row.line(), *_wrapped(f"{row.description}: {row.reason}", f"{'':17s}", f"{'':17s}")]
        for each in self.advice:
            lines += [*_wrapped(f"{each.code}: {each.message}:", "advice: "), f"{'':8s}{each.remedy}"]
        if self.verify is not None:
            lines.append(_verified(self.verify))
        if self.applied is not None:
            lines.append(f"stored in {self.applied}: readers take window and cache from there")
        for note in self.notes:
            lines += _wrapped(note, "note: ")
        slowest = self.row(CHOSEN).slowest
        lines.append(f"slowest stage: {slowest}; measured on {self.num_measured:,} samples in {self.seconds:.0f} s")
        return lines

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
    if verify.get("note"):
        return f"verify: {verify['note']}"
    same = "equal" if verify["predicted_reads"] == verify["measured_reads"] else "NOT EQUAL: please report it"
    return (
        f"verify: {verify['predicted_reads']:,} reads of chunks predicted, {verify['measured_reads']:,} measured, in "
        f"{verify['batches']:,} batches; {verify['measured_bytes']:,} bytes read: {same}"
    )
