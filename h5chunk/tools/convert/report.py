"""Plans and reports of converting samples, for people (``str``) and for scripts (``to_json``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from h5chunk.plan.layout import Layout, human_bytes
from h5chunk.source import shape_text
from h5chunk.tools.report import Report, list_some


@dataclass(frozen=True)
class ConvertPlan(Report):
    """Plan of a conversion of samples.

    Attributes
    ----------
    source_kind : str
    num_samples : int
    sample_shape : tuple of int
        Of the largest field.
    layout : Layout
    fields : dict of str to str
        dtype of each field.
    shapes : dict of str to tuple of int
        Shape of one sample of each field.
    num_bytes : int
        Of the output.
    free_bytes : int
        On its disk.
    estimated_s : float
        From decoding a few images now.
    num_workers : int
    class_names, ignored, notes : list of str
    already_complete : bool
        The same command has made the output already, and would do nothing.
    """

    source_kind: str
    num_samples: int
    sample_shape: tuple[int, ...]
    layout: Layout
    fields: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    num_bytes: int
    free_bytes: int
    estimated_s: float
    num_workers: int
    class_names: list[str]
    ignored: list[str]
    notes: list[str] = field(default_factory=list)
    already_complete: bool = False

    def facts(self) -> dict[str, Any]:
        """The plan for programs, with what follows from the layout."""
        plan = super().facts()
        plan["layout"] |= {
            "reasons": list(self.layout.reasons),
            "num_chunks": self.layout.num_chunks,
            "chunk_bytes": self.layout.chunk_bytes,
            "cache": asdict(self.layout.cache),
        }
        return plan

    def lines(self) -> list[str]:
        chunk = shape_text((self.layout.chunk_samples, *self.sample_shape))
        return [
            f"samples    {self.num_samples:,} ({self.source_kind})"
            + ("" if "labels" in self.fields else ", no labels"),
            *([f"classes    {list_some(self.class_names)}"] if self.class_names else []),
            *(
                f"field      {name} ({' '.join(filter(None, (shape_text(self.shapes[name]), dtype)))})"
                for name, dtype in self.fields.items()
            ),
            f"chunks     {self.layout.num_chunks:,} of {chunk}",
            *(f"           - {reason}" for reason in self.layout.reasons),
            f"disk       {human_bytes(self.num_bytes)} needed, {human_bytes(self.free_bytes)} free",
            f"time       about {self.estimated_s:.0f} s with {self.num_workers} workers",
            *(f"ignored    {what}" for what in self.ignored),
            *(f"note       {note}" for note in self.notes),
        ]


@dataclass(frozen=True)
class ConvertReport(Report):
    """Report of a conversion of samples.

    Attributes
    ----------
    path : str
    source_kind : str
    num_samples, num_bytes : int
        In the file; bytes of the whole file.
    sample_shape : tuple of int
        Of the largest field.
    fields : list of str
    chunk_samples : int
    seconds : float
        From the first look at the source until the file was on disk under its name.
    modes : dict of str to int
        Images by the mode they came in, such as RGB, L, P, CMYK.
    applied : dict of str to int
        Images that were ``rotated``, ``resized``, or cut to their ``first frame``.
    skipped : list of (name, reason)
    skipped_list : str or None
        The file that holds that list.
    ignored, class_names, notes : list of str
    already_complete : bool
        The same command had made the file before, and nothing was done; ``modes`` and ``applied`` are not known then.
    """

    path: str
    source_kind: str
    num_samples: int
    num_bytes: int
    sample_shape: tuple[int, ...]
    fields: list[str]
    chunk_samples: int
    seconds: float
    modes: dict[str, int]
    applied: dict[str, int]
    skipped: list[tuple[str, str]] = field(default_factory=list)
    skipped_list: str | None = None
    ignored: list[str] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    already_complete: bool = False

    def lines(self) -> list[str]:
        counts = ", ".join(f"{count:,} {name}" for name, count in self.modes.items())
        applied = "".join(f", {count:,} {name}" for name, count in self.applied.items())
        noun = "images" if self.source_kind == "images" else "samples"
        shape = f" of {shape_text(self.sample_shape)}" if self.sample_shape else ""
        rate = f"{self.num_samples / self.seconds:,.0f} {noun}/s"
        lines = [
            f"{self.path}: {self.num_samples:,} {noun}{shape}, "
            f"{human_bytes(self.num_bytes)}, {'already complete' if self.already_complete else rate}",
            *([f"came as {counts}{applied}"] if counts and not self.already_complete else []),
            f"fields {', '.join(self.fields)}",
            *([f"classes {list_some(self.class_names)}"] if self.class_names else []),
            *(f"ignored {what}" for what in self.ignored),
        ]
        if self.skipped:
            name, reason = self.skipped[0]
            lines.append(f"skipped {len(self.skipped):,} (all in {self.skipped_list}), such as {name}: {reason}")
        return [*lines, *(f"note: {note}" for note in self.notes)]
