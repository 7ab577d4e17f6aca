"""Plans and reports of converting a sparse matrix, for people (``str``) and scripts (``to_json``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from h5chunk.plan.layout import human_bytes
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.store.format.matrix import MATRIX, read_matrix
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.open import opened
from h5chunk.tools.report import COMPLETE, Report


@dataclass(frozen=True)
class MatrixPlan(Report):
    """Plan of a conversion of a sparse matrix, from reading the start of the source.

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
    path : str
    source_kind : str
    kind : {"csr", "dense"}
    num_rows, num_columns, num_bytes : int
        In the file; bytes of the whole file.
    num_entries : int or None
        None where the file does not say: of dense rows that were complete before.
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
    counts: dict[str, int]
    num_ranges: int = 1
    fields: list[str] = field(default_factory=list)
    axes: tuple[str, str] = ("rows", "columns")
    already_complete: bool = False

    def lines(self) -> list[str]:
        values = "a pattern of ones" if self.pattern else f"values codes / {self.scale:g}"
        dense = ", as dense rows" if self.kind == "dense" else ""
        entries = "" if self.num_entries is None else f"{self.num_entries:,} entries, "
        rate = f"{self.counts.get('entries read', 0) / self.seconds:,.0f} entries/s"
        lines = [
            f"{self.path}: {self.num_rows:,} x {self.num_columns:,}, {entries}{values}{dense}, "
            f"{human_bytes(self.num_bytes)}, {'already complete' if self.already_complete else rate}",
            _axes_line(self.num_rows, self.num_columns, self.axes),
            ", ".join(f"{count:,} {what}" for what, count in self.counts.items()),
        ]
        if self.fields:
            lines.append(f"fields {', '.join(self.fields)}")
        if self.num_ranges > 1:
            lines.append(f"sorted in {self.num_ranges} parts, through temporary data on disk")
        return [line for line in lines if line]


def read_report(path: Path, source: SparseSource) -> MatrixReport:
    """Report a conversion that was complete before, as far as the file tells."""
    with opened(path) as file:
        matrix, checksums = read_matrix(file), file[f"{GROUP}/checksums"]
        assert matrix is not None
        return MatrixReport(
            path=str(path),
            source_kind=source.kind,
            kind=matrix.kind,
            num_rows=matrix.num_rows,
            num_columns=matrix.num_columns,
            num_entries=matrix.num_entries,
            num_bytes=path.stat().st_size,
            scale=matrix.scale,
            pattern=matrix.pattern,
            chunk_samples=int(file[GROUP].attrs["chunk_samples"]),
            seconds=0.0,
            counts={},
            fields=[name for name in checksums if name != MATRIX],
            axes=source.axes,
            already_complete=True,
        )


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
