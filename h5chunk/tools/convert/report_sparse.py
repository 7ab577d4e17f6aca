"""What a conversion of a sparse matrix would do, and what it did: for people (``str``) and scripts (``to_json``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from h5chunk.plan.layout import human_bytes
from h5chunk.tools.report import Report


@dataclass(frozen=True)
class SparsePlan(Report):
    """What a conversion would do, from reading the start of the source.

    Attributes
    ----------
    source_kind : str
    num_rows, num_columns : int or None
        None where only reading all of the source tells.
    num_entries : int
        About, from the size of the source.
    whole : bool
        Whether all of the source was read for this, so that the entries are those.
    fields : dict of str to str
        dtype of each field.
    num_bytes : int
        Of the output, about.
    temporary_bytes : int
        Beside it while it is made, about; 0 where all fits in memory.
    free_bytes : int
        On the disk of the output.
    memory_bytes : int
        What was allowed.
    estimated_s : float
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

    def lines(self) -> list[str]:
        rows = "rows" if self.num_rows is None else f"{self.num_rows:,} rows"
        columns = "columns" if self.num_columns is None else f"{self.num_columns:,} columns"
        about = "" if self.whole else "about "
        temporary = f", {human_bytes(self.temporary_bytes)} of temporary data" if self.temporary_bytes else ""
        return [
            f"matrix     {rows} x {columns}, {about}{self.num_entries:,} entries ({self.source_kind})",
            *(f"field      {name} ({dtype})" for name, dtype in self.fields.items()),
            f"memory     at most {human_bytes(self.memory_bytes)}",
            f"disk       about {human_bytes(self.num_bytes)} needed{temporary}, {human_bytes(self.free_bytes)} free",
            f"time       about {self.estimated_s:.0f} s",
        ]


@dataclass(frozen=True)
class SparseReport(Report):
    """What a conversion of a sparse matrix did.

    Attributes
    ----------
    path : str
    source_kind : str
    kind : {"csr", "dense"}
    num_rows, num_columns, num_entries, num_bytes : int
        In the file; bytes of the whole file.
    scale : float
        A value is its code over this.
    pattern : bool
        All values are one.
    chunk_samples : int
    seconds : float
        From the first look at the source until the file was on disk under its name.
    counts : dict of str to int
        What was done to entries, rows and columns: ``entries read``, ``explicit zeros dropped``, and so on; none that
        is 0.
    num_ranges : int
        Parts that were sorted one after the other, as memory did not suffice for all; 1 where it did.
    fields : list of str
    """

    path: str
    source_kind: str
    kind: str
    num_rows: int
    num_columns: int
    num_entries: int
    num_bytes: int
    scale: float
    pattern: bool
    chunk_samples: int
    seconds: float
    counts: dict[str, int]
    num_ranges: int = 1
    fields: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        values = "a pattern of ones" if self.pattern else f"values codes / {self.scale:g}"
        dense = ", as dense rows" if self.kind == "dense" else ""
        lines = [
            f"{self.path}: {self.num_rows:,} x {self.num_columns:,}, {self.num_entries:,} entries, {values}{dense}, "
            f"{human_bytes(self.num_bytes)}, {self.counts.get('entries read', 0) / self.seconds:,.0f} entries/s",
            ", ".join(f"{count:,} {what}" for what, count in self.counts.items()),
        ]
        if self.fields:
            lines.append(f"fields {', '.join(self.fields)}")
        if self.num_ranges > 1:
            lines.append(f"sorted in {self.num_ranges} parts, through temporary data on disk")
        return [line for line in lines if line]
