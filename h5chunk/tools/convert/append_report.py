"""Reports of appending: the plan and the result, for people (``str``) and for scripts (``to_json``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from h5chunk.plan.layout import Layout, human_bytes, plan_layout
from h5chunk.tools.report import Report, list_some


@dataclass(frozen=True)
class AppendPlan(Report):
    """Plan of `append`.

    Attributes
    ----------
    path : str
    num_old, num_new : int
        Samples in the file, and in the source.
    num_bytes : int
        Of the new file, which takes the place of the old one when it is complete.
    free_bytes : int
        On its disk.
    estimated_s : float
        Of reading the source.
    new_classes : list of str
        Those that the file does not have yet.
    notes : list of str
    """

    path: str
    num_old: int
    num_new: int
    num_bytes: int
    free_bytes: int
    estimated_s: float
    new_classes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [
            f"samples    {self.num_old:,} in {self.path}, and {self.num_new:,} behind them",
            f"disk       {human_bytes(self.num_bytes)} needed beside the old file, {human_bytes(self.free_bytes)} free",
            f"time       about {self.estimated_s:.0f} s for the new ones",
            *(f"new class  {name}" for name in self.new_classes),
            *(f"note       {note}" for note in self.notes),
        ]


@dataclass(frozen=True)
class AppendReport(Report):
    """Result of `append`.

    Attributes
    ----------
    path : str
    num_added, num_samples : int
        New ones, and all that are in the file now.
    num_bytes : int
        Of the whole file.
    seconds : float
        From the first look at the file until the new one was on disk under its name.
    counts : dict of str to int
        What the source noted of the new samples: for images, the mode they came in and what was applied.
    new_classes, class_names : list of str
    skipped : list of (name, reason)
    skipped_list : str or None
        The file that holds that list, with those of before.
    ignored : list of str
        What lies in the source and is not packed.
    notes : list of str
    already_complete : bool
        The same command had appended the samples before, and nothing was done; ``counts`` are not known then.
    """

    path: str
    num_added: int
    num_samples: int
    num_bytes: int
    seconds: float
    counts: dict[str, int]
    new_classes: list[str] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    skipped_list: str | None = None
    ignored: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    already_complete: bool = False

    def lines(self) -> list[str]:
        rate = f"{self.num_added / self.seconds:,.0f} samples/s"
        lines = [
            f"{self.path}: {self.num_added:,} samples added, {self.num_samples:,} now, {human_bytes(self.num_bytes)}, "
            f"{'already complete' if self.already_complete else rate}",
            ", ".join(f"{count:,} {what}" for what, count in self.counts.items()),
            *([f"classes {list_some(self.class_names)}"] if self.class_names else []),
            *(f"new class {name}" for name in self.new_classes),
            *(f"ignored {what}" for what in self.ignored),
        ]
        if self.skipped:
            name, reason = self.skipped[0]
            lines.append(f"skipped {len(self.skipped):,} (all in {self.skipped_list}), such as {name}: {reason}")
        lines += [f"note: {note}" for note in self.notes]
        return [line for line in lines if line]


def small_chunks(layout: Layout) -> list[str]:
    """Return a note if chunks are much smaller than a longer file needs."""
    chosen = plan_layout(layout.num_samples, layout.sample_bytes).chunk_samples
    if chosen < 4 * layout.chunk_samples:
        return []
    return [f"chunks keep their {layout.chunk_samples} samples; of so many they would get {chosen}: repack does that"]


def unmixed(shown: str) -> str:
    """Return the note that old and new samples are not mixed."""
    return f"old and new samples are not mixed: h5chunk repack {shown} NEW.h5 --shuffle does that, where they differ"
