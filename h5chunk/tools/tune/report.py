"""The report of `h5chunk tune`: the recommendation, its speedup over today's setting, and the measured settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from h5chunk.errors import count_text, human_bytes
from h5chunk.tools.chunk_cache import ChunkCacheInfo
from h5chunk.tools.model.ratio import Ratio
from h5chunk.tools.model.settings import Setting, Trial
from h5chunk.tools.report import Report, code
from h5chunk.tools.tune.advice import Advice
from h5chunk.tools.tune.search import NEW, TODAY, WORTH_FILE

Triple = tuple[int, int, float]

UNSURE = 4.0  # an interval whose upper end is this many times its lower end is not shown


@dataclass(frozen=True)
class TuneRow:
    """A row of the table of measured settings."""

    name: str  # TODAY, IN_PLACE, NEW or PLAIN
    setting: Setting | None  # None for plain h5py
    description: str  # the setting in words
    rate: float  # samples/s, median of all turns
    times: Ratio | None  # ratio of this rate to that of today's setting in the same turns; None for today's setting
    memory_bytes: int
    effective_batch: float | None  # None if no field shows which samples are similar

    def lines(self, batch_size: int) -> list[str]:
        times = "" if self.times is None else str(self.times)
        row = f"{self.name:24s}{self.rate:>12,.0f}  {times:30s}{human_bytes(self.memory_bytes):>10s}"
        mixing = self.effective_batch
        effective = "" if mixing is None else f"; effective batch: {mixing:.0f} of {batch_size}"
        return [row, f"    {self.description}{effective}"]


@dataclass(frozen=True)
class Recommendation(Report):
    """The recommended setting, with its rate, memory and shuffle quality.

    Its JSON is the input of ``--tuned`` of `h5chunk convert` and `h5chunk repack`.

    Attributes
    ----------
    setting : Setting
        The recommended setting. If ``setting.repack``, it is for the file that `h5chunk repack` writes.
    cache : (nslots, nbytes, w0)
        Recommended chunk cache for a process that reads all windows through HDF5.
    window_in_place, cache_in_place : int, (nslots, nbytes, w0)
        The best window and cache for the unchanged file, which ``--apply`` stores.
    num_samples, num_measured : int
        Total number of samples, and number of samples that were read to measure rates.
    chosen : str
        Name of the recommended setting, as in the report.
    commands, code : list of str
        The commands to run, and lines of Python that create the loader.
    no_gain_reason : str
        Reason why no setting can make a difference for this data; empty if a setting may.
    min_effective_batch : float
        Minimum shuffle quality, as an effective batch in samples.
    memory_bytes : int
        Upper limit on the memory for windows, batches and caches.
    chunk_cache : ChunkCacheInfo or None
        The chunk cache for the unchanged file, for readers with h5py.
    num_turns : int
        Number of times that each row was measured.
    applied : str or None
        Path of the file in which ``--apply`` stored the recommendation.
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
    chosen: str
    rows: list[TuneRow]
    chunk_cache: ChunkCacheInfo | None
    advice: list[Advice]
    commands: list[str]
    code: list[str]
    no_gain_reason: str
    min_effective_batch: float
    memory_bytes: int
    num_turns: int
    notes: list[str]
    seconds: float
    budget_s: float
    versions: dict[str, str]
    candidates: list[Trial] = field(repr=False)
    applied: str | None = None

    def row(self, name: str) -> TuneRow:
        """Return a row of the table by its name."""
        return next(row for row in self.rows if row.name == name)

    def facts(self) -> dict[str, Any]:
        return {**asdict(self.setting), **asdict(self)}

    def lines(self) -> list[str]:
        size = human_bytes(self.sample_bytes)
        lines = [
            self.headline(),
            *(f"    {code(line)}" for line in (*self.commands, *self.code)),
            "",
            f"{self.path}: {self.num_samples:,} samples of {size}, batches of {self.batch_size} to {self.device}",
            f"{'':24s}{'samples/s':>12s}  {'against today':30s}{'memory':>10s}",
        ]
        for row in self.rows:
            lines += row.lines(self.batch_size)
        lines += self.chunk_cache.lines() if self.chunk_cache else []
        head = "advice: " if self.chosen == NEW else "advice for other readers, such as plain h5py: "
        for advice in self.advice:
            lines += [f"{head}{advice.code}: {advice.message}:", f"{'':8s}{code(advice.remedy)}"]
        lines += self._stored()
        lines += [f"note: {note}" for note in self.notes]
        measurement = (
            f"{count_text(self.num_turns, 'turn')} on {count_text(self.num_measured, 'sample')} in the page cache, "
            f"{self.seconds:.0f} s in all"
        )
        return [*lines, f"measured in {measurement}; 95 % of turns are in the brackets"]

    def headline(self) -> str:
        """Return the recommendation and its gain, in a sentence."""
        row, today = self.row(self.chosen), self.row(TODAY)
        rate = "" if row.times is None else row.times.text(" today's rate")
        if self.chosen == TODAY:
            return (
                f"Keep the file as it is{f': {self.no_gain_reason}' if self.no_gain_reason else ''}.{self._not_worth()}"
            )
        why = ""
        if today.effective_batch is not None and today.effective_batch < self.min_effective_batch:
            now, then = f"{today.effective_batch:.0f}", f"{row.effective_batch:.0f}"
            why = f"a batch of {self.batch_size} is then as diverse as {then} shuffled samples instead of {now}; "
        elif today.memory_bytes > self.memory_bytes:
            why = f"it needs {human_bytes(row.memory_bytes)} of memory, not {human_bytes(today.memory_bytes)}; "
        shuffled = " shuffled" if self.setting.shuffle else ""
        action = f"Rewrite the file{shuffled}" if self.chosen == NEW else "Keep the file, and read it as below"
        return f"{action}: {why}{rate}."

    def _not_worth(self) -> str:
        """Return a sentence about a new file that was faster but is not recommended; empty if it was not faster."""
        times = next((row.times for row in self.rows if row.name == NEW), None)
        if times is None or times.times < 1.1:
            return ""
        if times.high > UNSURE * times.low:
            return " Whether a new file is faster could not be measured: raise the budget, or use an idle machine."
        gave = times.text(" today's rate")
        return f" A new file reached {gave}, but a gain of {WORTH_FILE:g} times is not certain."

    def _stored(self) -> list[str]:
        if self.applied is None:
            return []
        slots, num_bytes, _ = self.cache_in_place
        cache = f"a chunk cache of {human_bytes(num_bytes)} in {slots:,} slots" if num_bytes else "no chunk cache"
        windows = f"windows of {count_text(self.window_in_place, 'chunk')}"
        text = (
            f"stored in {self.applied}: {windows}, and {cache}. h5chunk's readers use both until you delete this file; "
            "nothing else was changed"
        )
        return [text]
