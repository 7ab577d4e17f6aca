"""The report of `h5chunk doctor`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from h5chunk.errors import SourceError, count_text, human_bytes
from h5chunk.tools.doctor.collect import collect
from h5chunk.tools.model.diagnosis import Diagnosis, diagnose
from h5chunk.tools.model.seen import Seen
from h5chunk.tools.report import Report, code

SHOWN_FIXES = 5
SHOWN_LINES = 4  # of a loop without a loader
COMMANDS = ("h5chunk", "h5py.File")  # what fixes that can be copied begin with
BAR = 16  # characters of a full bar


@dataclass(frozen=True)
class Check:
    """A fix that was tried, with its predicted and measured gains."""

    fix: str
    predicted: float
    low: float
    high: float
    measured: float

    def __str__(self) -> str:
        predicted = f"{self.predicted:.2f} times ({self.low:.2f} to {self.high:.2f})"
        return f"{self.fix}: predicted {predicted}, measured {self.measured:.2f}"


@dataclass
class DoctorReport(Report):
    """Diagnosis of a training loop: where its time goes, and which changes would make it faster.

    Attributes
    ----------
    diagnosis : Diagnosis or None
        ``verdict``, one sentence; ``is_data``, whether the data is to blame; ``utilisation``, from 0 to 1; ``ladder``;
        ``fixes``, the best first. None until the loop has been watched.
    seen : Seen or None
        The measurements that the diagnosis is based on.
    check : Check or None
        The result of ``check=True``.
    status : int
        The exit status of the command; 128 plus the number of the signal that ended it; 0 if doctor ended it.
    reason : str
        Why there is no diagnosis; empty if there is one.
    """

    diagnosis: Diagnosis | None = None
    seen: Seen | None = None
    check: Check | None = None
    notes: list[str] = field(default_factory=list)
    status: int = 0
    reason: str = "no training loop has been watched yet"

    def fill(self, folder: Path, loader: int | None = None, cached_step: tuple[float, float] | None = None) -> None:
        """Fill the report from the measurements that are stored in a folder."""
        try:
            self.seen = collect(folder, loader, cached_step)
        except SourceError as error:
            self.reason = str(error)
            return
        self.diagnosis, self.reason = diagnose(self.seen), ""
        if self.seen.lost:
            self.notes.append(f"some measurements are missing or incomplete, because {', '.join(self.seen.lost)}")

    @property
    def verdict(self) -> str:
        """The diagnosis in one sentence; empty until the loop has been watched."""
        return "" if self.diagnosis is None else self.diagnosis.verdict

    @property
    def utilisation(self) -> float:
        """Fraction of the time in which the GPU works or, without a GPU, the step runs; NaN if it is unknown."""
        return math.nan if self.diagnosis is None else self.diagnosis.utilisation

    def lines(self) -> Iterator[str]:
        """Return the report as lines of text: the verdict, the ladder, where time goes, and the fixes."""
        if self.diagnosis is None or self.seen is None:
            yield self.reason
            yield from (f"note: {note}" for note in self.notes)
            return
        yield self.verdict
        yield from self._ladder() if self.seen.has_loader else self._steps()
        yield from self._times()
        if self.diagnosis.fixes:
            yield "fixes, by predicted gain:"
        for number, fix in enumerate(self.diagnosis.fixes[:SHOWN_FIXES], 1):
            yield f"  {number}. {fix.name}: {fix.gain_text}"
            yield f"     {code(fix.code) if fix.code.startswith(COMMANDS) else fix.code}"
        if self.check is not None:
            yield f"checked: {self.check}"
        yield from (f"note: {note}" for note in self.notes)

    def _ladder(self) -> Iterator[str]:
        rungs = self.rates()
        top = max(rate for _, rate, _ in rungs)
        width = max(len(name) for name, *_ in rungs)
        yield "training, in samples/s, as one stage after another is added:"
        for name, rate, alone in rungs:
            bar = "█" * max(1, round(BAR * rate / top))
            yield f"  {name:{width}}  {rate:>12,.0f}  {bar:{BAR}}" + (f"  alone {alone:,.0f}" if alone else "")

    def _steps(self) -> Iterator[str]:
        """Return lines about iterations that no loader feeds: their rate, and the lines of code that take longest."""
        seen = self.seen
        assert seen is not None
        yield f"training: {1 / seen.iteration:,.1f} steps of the optimizer per second"
        for line in [line for line in seen.lines if line.stage == "step" and line.place][:SHOWN_LINES]:
            yield f"  {line.share:>4.0%}  {line}"

    def rates(self) -> list[tuple[str, float, float | None]]:
        """List (name, samples/s, samples/s of the stage alone) for the rungs of the ladder, and for training."""
        assert self.diagnosis is not None and self.seen is not None
        rungs = [(rung.name, rung.rate, rung.alone) for rung in self.diagnosis.ladder]
        return [*rungs, ("as measured", self.seen.samples / self.seen.iteration, None)]

    def _times(self) -> Iterator[str]:
        seen = self.seen
        assert seen is not None
        text = f"an iteration of {seen.samples:.0f} samples: {_ms(seen.iteration)}, of which {_ms(seen.wait)} waiting"
        if not seen.has_loader:
            text = f"an iteration: {_ms(seen.iteration)}, with the preparation of its batch"
        if seen.gpu is not None:
            text += f"; GPU: {_ms(seen.gpu.busy)} busy, {_ms(seen.gpu.idle)} idle between steps"
        yield text
        least = 0.01 * (seen.fetch or seen.iteration)
        parts = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in seen.stages.items() if seconds > least)
        if seen.fetches:
            who = f"one of {seen.workers} workers" if seen.workers else "the training process"
            yield f"{who} takes {_ms(seen.fetch)} to produce a batch: {parts}"
        elif seen.loader_threads:
            threads = count_text(seen.loader_threads, "thread")
            yield f"ChunkLoader, which reads and decodes in {threads}, spends per batch: {parts}"
        if seen.other_cores > 0.1 * seen.cores:
            yield f"  other processes kept {seen.other_cores:.1f} of {seen.cores} cores busy; predictions assume this"
        for file in seen.files[:3]:
            cached = f", {file['cached']:.0%} in the page cache" if "cached" in file else ""
            chunks = f", chunks {tuple(file['chunks'])}" if file.get("chunks") else ""
            yield f"  {file['path']}: {human_bytes(file['bytes'])}{cached}{chunks}"

    def _repr_html_(self) -> str:
        from h5chunk.tools.doctor.page import figures

        return escape(self.reason) if self.diagnosis is None else figures(self)

    def facts(self) -> dict[str, Any]:
        """Return the values of the report by name."""
        if self.diagnosis is None or self.seen is None:
            return {"diagnosis": None, "reason": self.reason, "notes": self.notes, "status": self.status}
        seen = {**asdict(self.seen), "iteration": self.seen.iteration, "wait": self.seen.wait, "step": self.seen.step}
        check = self.check and asdict(self.check)
        found = {"diagnosis": asdict(self.diagnosis), "seen": seen, "check": check}
        return {**found, "notes": self.notes, "status": self.status}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
