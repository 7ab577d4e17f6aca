"""Plans and reports of converting and appending, as text (``str``) and for scripts (``to_json``)."""

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
    """Plan of a conversion of samples."""

    source_kind: str
    num_samples: int
    sample_shape: tuple[int, ...]  # of the largest field
    layout: Layout
    fields: dict[str, str]  # dtypes, in the order of batches
    shapes: dict[str, tuple[int, ...]]  # of one sample, by field
    num_bytes: int  # of the output
    free_bytes: int  # on its disk
    estimated_s: float  # from reading a few samples now
    num_workers: int
    class_names: list[str]
    ignored: list[str]
    notes: list[str] = field(default_factory=list)
    already_complete: bool = False  # the same command has made the output: it would do nothing

    def facts(self) -> dict[str, Any]:
        """Return the plan for programs, with the values that follow from the layout."""
        plan = super().facts()
        plan["layout"] |= {
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
    """Base of the reports of converting and appending samples."""

    path: str
    num_samples: int  # in the file, or in all shards
    num_bytes: int  # of the whole file, or of all shards
    seconds: float  # from the first look at the source until the file was on disk under its name
    class_names: list[str]
    skipped: list[tuple[str, str]]  # names and reasons, which the file `skipped_list` holds too
    skipped_list: str | None
    ignored: list[str]  # what lies in the source and is not used
    notes: list[str]
    already_complete: bool  # the same command had done it before: nothing was done, and counts are not known

    def rate(self, count: int, noun: str) -> str:
        """Describe the size of the output, and the speed of writing it."""
        return f"{human_bytes(self.num_bytes)}, {_rate(count, self.seconds, noun, self.already_complete)}"

    def classes(self) -> list[str]:
        """Return the line about the classes, if the file has classes."""
        return [f"classes {list_some(self.class_names)}"] if self.class_names else []

    def remarks(self) -> list[str]:
        """Return the lines about ignored and skipped samples, and the notes."""
        lines = [f"ignored {what}" for what in self.ignored]
        if self.skipped:
            name, reason = self.skipped[0]
            lines.append(f"skipped {len(self.skipped):,} (all in {self.skipped_list}), such as {name}: {reason}")
        return [*lines, *(f"note: {note}" for note in self.notes)]


@dataclass(frozen=True, kw_only=True)
class ConvertReport(_SampleReport):
    """Report of a conversion of samples."""

    source_kind: str
    sample_shape: tuple[int, ...]  # of the largest field
    fields: list[str]  # in the order of batches
    chunk_samples: int
    modes: dict[str, int]  # images by the mode they came in, such as RGB, L, P, CMYK
    applied: dict[str, int]  # images that were rotated, resized, or cut to their first frame

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
    """Plan of `append`."""

    path: str
    num_old: int  # samples in the file
    num_new: int  # samples in the source
    num_bytes: int  # of the new file, which takes the place of the old one when it is complete
    free_bytes: int  # on its disk
    estimated_s: float  # of reading the source
    new_classes: list[str] = field(default_factory=list)  # those that the file does not have yet
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
    """Report of `append`."""

    num_added: int
    counts: dict[str, int] = field(default_factory=dict)  # of images: their modes, and what was applied
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
    """Plan of a conversion of a sparse matrix, from reading the start of the source."""

    source_kind: str
    num_rows: int | None  # None where only reading all of the source tells
    num_columns: int | None
    num_entries: int  # about, from the size of the source
    whole: bool  # all of the source was read for this: `num_entries` is exact
    fields: dict[str, str]  # dtypes
    num_bytes: int  # about
    temporary_bytes: int  # about; beside the output while it is made; 0 where all fits in memory
    free_bytes: int  # on the disk of the output
    memory_bytes: int  # what was allowed
    estimated_s: float
    axes: tuple[str, str]  # what rows, which are the samples, and columns are in the source
    duplicates: str  # what is done about entries that share a place
    already_complete: bool = False  # the same command has made the output: it would do nothing

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
    """Report of a conversion of a sparse matrix."""

    path: str
    source_kind: str
    kind: str  # csr or dense
    num_rows: int
    num_columns: int
    num_entries: int | None  # None where the file does not say: of dense rows that were complete before
    num_bytes: int  # of the whole file
    scale: float  # a value is its code over this
    pattern: bool  # all values are one
    chunk_samples: int
    seconds: float  # from the first look at the source until the file was on disk under its name
    counts: dict[str, int] = field(default_factory=dict)  # what was done to entries, rows and columns; none that is 0
    num_ranges: int = 1  # parts that were sorted one after the other; 1 where memory sufficed for all
    fields: list[str] = field(default_factory=list)
    axes: tuple[str, str] = (
        "rows",
        "columns",
    )  # what rows, which are the samples, and columns are in the source
    already_complete: bool = False  # the same command had made the file before: nothing was done

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
    """Describe which axis of the source became the samples.

    >>> _axes_line(138493, 26744, ("userId", "movieId"))
    'samples: 138,493 rows (userId); columns: 26,744 (movieId)'
    >>> _axes_line(None, None, ("userId", "movieId"))
    'samples: rows (userId); columns (movieId)'
    """
    rows = "rows" if num_rows is None else f"{num_rows:,} rows"
    columns = "columns" if num_columns is None else f"columns: {num_columns:,}"
    return f"samples: {rows} ({axes[0]}); {columns} ({axes[1]})"
