"""The report of repack, as text (``str``) and for programs (``to_json``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from h5chunk.errors import human_bytes
from h5chunk.store.rewrite.survey import DatasetFacts
from h5chunk.tools.report import Report


@dataclass(frozen=True)
class LaidOut:
    """The layout of a dataset in a file."""

    chunks: tuple[int, ...] | None  # None: contiguous, or compact
    filters: tuple[str, ...]  # as the file names them
    stored_bytes: int
    chunks_per_sample: float  # that one sample touches, or a row of a sparse matrix in the mean; 1 if contiguous

    @classmethod
    def of(cls, facts: DatasetFacts, row_elements: float) -> LaidOut:
        """Describe the layout of a dataset; a sample consists of ``row_elements`` of its rows."""
        touched: float = facts.grid.chunks_per_sample
        if facts.chunks and row_elements > 1:
            touched = round(1 + (row_elements - 1) / facts.chunks[0], 3)
        return cls(facts.chunks, facts.filter_names, facts.stored_bytes, touched)

    def __str__(self) -> str:
        chunks = "contiguous" if self.chunks is None else "chunks of " + " x ".join(map(str, self.chunks))
        filters = f", {'+'.join(self.filters)}" if self.filters else ""
        return f"{chunks}{filters}, {human_bytes(self.stored_bytes)}, {self.chunks_per_sample:,} a sample"


@dataclass(frozen=True)
class FieldReport(Report):
    """The change of one dataset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int  # of its values
    before: LaidOut
    after: LaidOut
    shuffled: bool

    def lines(self) -> list[str]:
        shape = " x ".join(map(str, self.shape))
        return [f"{self.name}  {self.dtype} {shape}", f"    was {self.before}", f"    is  {self.after}"]


@dataclass(frozen=True)
class FieldPlan(Report):
    """The planned change of one dataset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    before: LaidOut
    chunks: tuple[int, ...] | None  # None: contiguous

    def lines(self) -> list[str]:
        shape = " x ".join(map(str, self.shape))
        chunks = "contiguous" if self.chunks is None else "chunks of " + " x ".join(map(str, self.chunks))
        return [f"{self.name}  {self.dtype} {shape}", f"    is        {self.before}", f"    would be  {chunks}"]


@dataclass(frozen=True)
class RepackSummary(Report):
    """The plan of a repack, as text and for programs."""

    path: str
    num_samples: int
    main: str  # the field that says how many
    chunk_samples: int | None
    window_chunks: int | None
    shuffled: bool
    num_bytes: int  # about what the output will take on disk
    fields: list[FieldPlan]  # datasets that would be laid out anew
    notes: list[str]

    def lines(self) -> list[str]:
        order = ", shuffled" if self.shuffled else ""
        samples = f"{self.num_samples:,} samples of {self.main!r}{order}" if self.num_samples else "no samples"
        return [
            f"{self.path}: {samples}, about {human_bytes(self.num_bytes)} on disk",
            *(f"  {line}" for each in self.fields for line in each.lines()),
            *(f"  note: {note}" for note in self.notes),
        ]


@dataclass(frozen=True)
class RepackReport(Report):
    """The result of a repack.

    ``num_samples``, 0 if no dataset counts samples, is the length of the field ``main``. ``chunk_samples`` and
    ``window_chunks`` are the planned values; the window is stored only if the file has the group ``/h5chunk``
    (``has_header``). ``fields`` are the datasets with a new layout, besides ``num_copied`` others. ``notes`` are
    warnings, such as what could not be kept. If ``already_complete``, the same command had made the file before, and
    nothing was done; the notes then do not say what could not be kept.
    """

    path: str
    num_samples: int
    main: str
    chunk_samples: int | None
    window_chunks: int | None
    has_header: bool
    shuffled: bool
    seed: int
    source_bytes: int
    num_bytes: int
    seconds: float
    fields: list[FieldReport] = field(default_factory=list)
    num_copied: int = 0
    notes: list[str] = field(default_factory=list)
    already_complete: bool = False

    def lines(self) -> list[str]:
        rate = f"{human_bytes(self.num_bytes / max(self.seconds, 1e-9))}/s"
        order = f", shuffled with seed {self.seed}" if self.shuffled else ""
        samples = f"{self.num_samples:,} samples of {self.main!r}{order}" if self.num_samples else "no samples"
        lines = [
            f"{self.path}: {samples}, {human_bytes(self.source_bytes)} -> {human_bytes(self.num_bytes)}, "
            f"{'already complete' if self.already_complete else rate}",
            *(f"  {line}" for each in self.fields for line in each.lines()),
        ]
        if self.has_header:
            lines.append(f"  windows of {self.window_chunks} chunks of {self.chunk_samples} samples are recommended")
        if self.num_copied:
            lines.append(f"  {self.num_copied:,} other datasets were copied as they are")
        return [*lines, *(f"  note: {note}" for note in self.notes)]
