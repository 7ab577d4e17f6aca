"""Plans and reports of converting and appending, for people (``str``) and for scripts (``to_json``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from h5chunk.errors import human_bytes
from h5chunk.plan.layout import Layout
from h5chunk.source import shape_text
from h5chunk.tools.report import COMPLETE, Report, codes_text, count_text, list_some


@dataclass(frozen=True)
class ConvertPlan(Report):
    """Plan of a conversion of samples.

    Attributes
    ----------
    sample_shape : tuple of int
        Of the largest field.
    fields, shapes : dict
        dtype of each field, in the order of batches, and shape of one sample.
    num_bytes, free_bytes : int
        Of the output, and on its disk.
    estimated_s : float
        From reading a few samples now.
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
            f"time       about {self.estimated_s:.0f} s with {count_text(self.num_workers, 'worker')}",
            *(f"ignored    {what}" for what in self.ignored),
            *(f"note       {note}" for note in self.notes),
        ]


@dataclass(frozen=True, kw_only=True)
class _SampleReport(Report):
    """What reports of converting and of appending samples have in common."""

    path: str
    num_samples: int
    num_bytes: int
    seconds: float
    class_names: list[str]
    skipped: list[tuple[str, str]]
    skipped_list: str | None
    ignored: list[str]
    notes: list[str]
    already_complete: bool

    def rate(self, count: int, noun: str) -> str:
        """The size of the output, and how fast it was made."""
        return f"{human_bytes(self.num_bytes)}, {_rate(count, self.seconds, noun, self.already_complete)}"

    def classes(self) -> list[str]:
        """The line of the classes, if there are any."""
        return [f"classes {list_some(self.class_names)}"] if self.class_names else []

    def remarks(self) -> list[str]:
        """What was ignored and skipped, and the notes."""
        lines = [f"ignored {what}" for what in self.ignored]
        if self.skipped:
            name, reason = self.skipped[0]
            lines.append(f"skipped {len(self.skipped):,} (all in {self.skipped_list}), such as {name}: {reason}")
        return [*lines, *(f"note: {note}" for note in self.notes)]


@dataclass(frozen=True, kw_only=True)
class ConvertReport(_SampleReport):
    """Report of a conversion of samples.

    Attributes
    ----------
    num_samples, num_bytes : int
        In the file; bytes of the whole file, or of all shards.
    sample_shape : tuple of int
        Of the largest field.
    fields : list of str
        In the order of batches.
    seconds : float
        From the first look at the source until the file was on disk under its name.
    modes : dict of str to int
        Images by the mode they came in, such as RGB, L, P, CMYK.
    applied : dict of str to int
        Images that were ``rotated``, ``resized``, or cut to their ``first frame``.
    skipped : list of (name, reason)
        Which the file ``skipped_list`` holds too.
    already_complete : bool
        The same command had made the file before, and nothing was done; ``modes`` and ``applied`` are not known then.
    """

    source_kind: str
    sample_shape: tuple[int, ...]
    fields: list[str]
    chunk_samples: int
    modes: dict[str, int]
    applied: dict[str, int]

    def lines(self) -> list[str]:
        noun = "image" if self.source_kind == "images" else "sample"
        shape = f" of {shape_text(self.sample_shape)}" if self.sample_shape else ""
        samples = count_text(self.num_samples, noun)
        return [
            f"{self.path}: {samples}{shape}, {self.rate(self.num_samples, f'{noun}s')}",
            *([f"came as {_counts_text({**self.modes, **self.applied})}"] if self.modes else []),
            f"fields {', '.join(self.fields)}",
            *self.classes(),
            *self.remarks(),
        ]


@dataclass(frozen=True)
class AppendPlan(Report):
    """Plan of `append`.

    Attributes
    ----------
    num_old, num_new : int
        Samples in the file, and in the source.
    num_bytes, free_bytes : int
        Of the new file, which takes the place of the old one when it is complete, and on its disk.
    estimated_s : float
        Of reading the source.
    new_classes : list of str
        Those that the file does not have yet.
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


@dataclass(frozen=True, kw_only=True)
class AppendReport(_SampleReport):
    """Result of `append`.

    Attributes
    ----------
    num_added, num_samples : int
        New ones, and all that are in the file now.
    num_bytes : int
        Of the whole file.
    seconds : float
        From the first look at the file until the new one was on disk under its name.
    counts : dict of str to int
        What the source noted of the new samples: for images, the mode they came in and what was applied.
    skipped : list of (name, reason)
        Which the file ``skipped_list`` holds too, behind those of before.
    ignored : list of str
        What lies in the source and is not used.
    already_complete : bool
        The same command had appended the samples before, and nothing was done; ``counts`` are not known then.
    """

    num_added: int
    counts: dict[str, int] = field(default_factory=dict)
    new_classes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        added = count_text(self.num_added, "sample")
        return [
            f"{self.path}: {added} added, {self.num_samples:,} now, {self.rate(self.num_added, 'samples')}",
            *([_counts_text(self.counts)] if self.counts else []),
            *self.classes(),
            *(f"new class {name}" for name in self.new_classes),
            *self.remarks(),
        ]


@dataclass(frozen=True)
class MatrixPlan(Report):
    """Plan of a conversion of a sparse matrix, from reading the start of the source.

    Attributes
    ----------
    num_rows, num_columns : int or None
        None where only reading all of the source tells.
    num_entries : int
        About, from the size of the source, unless ``whole`` says that all of it was read for this.
    fields : dict of str to str
        dtype of each field.
    num_bytes, temporary_bytes : int
        About: of the output, and beside it while it is made; 0 where all fits in memory.
    free_bytes : int
        On the disk of the output.
    memory_bytes : int
        What was allowed.
    axes : (str, str)
        What the rows, which are the samples, and the columns are in the source.
    duplicates : str
        What is done about entries that share a place.
    already_complete : bool
        The same command has made the output already, and would do nothing.
    """

    source_kind: str
    num_rows: int | None
    num_columns: int | None
    num_entries: int
    whole: bool
    fields: dict[str, str]
    num_bytes: int
    temporary_bytes: int
    free_bytes: int
    memory_bytes: int
    estimated_s: float
    axes: tuple[str, str]
    duplicates: str
    already_complete: bool = False

    def lines(self) -> list[str]:
        rows = "rows" if self.num_rows is None else f"{self.num_rows:,} rows"
        columns = "columns" if self.num_columns is None else f"{self.num_columns:,} columns"
        about = "" if self.whole else "about "
        temporary = f", {human_bytes(self.temporary_bytes)} of temporary data" if self.temporary_bytes else ""
        return [
            f"matrix     {rows} x {columns}, {about}{self.num_entries:,} entries ({self.source_kind})",
            _axes_line(self.num_rows, self.num_columns, self.axes),
            f"duplicates {self.duplicates}",
            *(f"field      {name} ({dtype})" for name, dtype in self.fields.items()),
            f"memory     at most {human_bytes(self.memory_bytes)}",
            f"disk       about {human_bytes(self.num_bytes)} needed{temporary}, {human_bytes(self.free_bytes)} free",
            f"time       about {self.estimated_s:.0f} s",
            *([f"note       {COMPLETE}"] * self.already_complete),
        ]


@dataclass(frozen=True)
class MatrixReport(Report):
    """Report of a conversion of a sparse matrix.

    Attributes
    ----------
    kind : {"csr", "dense"}
    num_entries : int or None
        None where the file does not say: of dense rows that were complete before.
    num_bytes : int
        Of the whole file.
    scale : float
        A value is its code over this.
    pattern : bool
        All values are one.
    seconds : float
        From the first look at the source until the file was on disk under its name.
    counts : dict of str to int
        What was done to entries, rows and columns: ``entries read``, ``explicit zeros dropped``, and so on; none that
        is 0.
    num_ranges : int
        Parts that were sorted one after the other, as memory did not suffice for all; 1 where it did.
    axes : (str, str)
        What the rows, which are the samples, and the columns are in the source.
    already_complete : bool
        The same command had made the file before, and nothing was done; ``counts`` are not known then.
    """

    path: str
    source_kind: str
    kind: str
    num_rows: int
    num_columns: int
    num_entries: int | None
    num_bytes: int
    scale: float
    pattern: bool
    chunk_samples: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    num_ranges: int = 1
    fields: list[str] = field(default_factory=list)
    axes: tuple[str, str] = ("rows", "columns")
    already_complete: bool = False

    def lines(self) -> list[str]:
        values = "a pattern of ones" if self.pattern else f"values {codes_text(self.scale)}"
        entries = "" if self.num_entries is None else f"{self.num_entries:,} entries, "
        dense = ", as dense rows" if self.kind == "dense" else ""
        rate = _rate(self.counts.get("entries read", 0), self.seconds, "entries", self.already_complete)
        lines = [
            f"{self.path}: {self.num_rows:,} x {self.num_columns:,}, {entries}{values}{dense}, "
            f"{human_bytes(self.num_bytes)}, {rate}",
            _axes_line(self.num_rows, self.num_columns, self.axes),
        ]
        if self.counts:
            lines.append(_counts_text(self.counts))
        if self.fields:
            lines.append(f"fields {', '.join(self.fields)}")
        if self.num_ranges > 1:
            lines.append(f"sorted in {self.num_ranges} parts, through temporary data on disk")
        return lines


def _rate(count: int, seconds: float, noun: str, already_complete: bool) -> str:
    return "already complete" if already_complete else f"{count / seconds:,.0f} {noun}/s"


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items())


def _axes_line(num_rows: int | None, num_columns: int | None, axes: tuple[str, str]) -> str:
    """Say which axis of the source became the samples.

    >>> _axes_line(138493, 26744, ("userId", "movieId"))
    'samples: 138,493 rows (userId); columns: 26,744 (movieId)'
    >>> _axes_line(None, None, ("userId", "movieId"))
    'samples: rows (userId); columns (movieId)'
    """
    rows = "rows" if num_rows is None else f"{num_rows:,} rows"
    columns = "columns" if num_columns is None else f"columns: {num_columns:,}"
    return f"samples: {rows} ({axes[0]}); {columns} ({axes[1]})"
