"""Reports of `h5chunk.convert`, and of its dry runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from h5chunk.errors import count_text, human_bytes
from h5chunk.plan.layout import Layout
from h5chunk.sample_source import shape_text
from h5chunk.store.write.any_size import CHUNK_BYTES
from h5chunk.tools.chunk_cache import ChunkCacheInfo
from h5chunk.tools.convert.forms import FormCost
from h5chunk.tools.report import Report, list_some, rows, values_text

COMPLETE = "already complete"
MAX_FIELDS = 12  # fields that a report lists
MODES = {"L": "grey (L)", "1": "black and white (1)", "P": "palette (P)", "LA": "grey with alpha (LA)"}
MODES |= {f"{mode} mask": f"{name} mask" for mode, name in MODES.items()}


@dataclass(frozen=True, kw_only=True)
class ConvertReport(Report):
    """Report on converted samples. For a dry run, it predicts the outcome."""

    path: str
    source_kind: str
    dry_run: bool
    num_samples: int  # samples in the file, or in all shards
    num_bytes: int  # size of the file, or of all shards
    seconds: float  # duration of the whole call; estimated if dry_run
    free_bytes: int | None  # free space on the disk of the output; None unless this is the plan of a dry run
    num_workers: int | None  # number of reading processes; None unless this is the plan of a dry run
    sample_shape: tuple[int, ...]  # shape of one sample of the largest field; empty for images of any size
    form: str = ""  # form of images of any size: encoded or raw
    size_bytes: dict[str, int] = field(default_factory=dict)  # sizes of images of any size, by form; only for a dry run
    forms: list[FormCost] = field(default_factory=list)  # costs of encoded images and raw pixels; only for a dry run
    recommendation: str = ""  # which form is better, in a sentence
    fields: dict[str, str]  # dtype of each field, in their order in a batch
    shapes: dict[str, tuple[int, ...]]  # shape of one sample of each field
    layout: Layout
    chunk_cache: ChunkCacheInfo  # the cache of the main field, for readers with h5py; of the first file of several
    class_names: list[str]
    counts: dict[str, int]  # numbers of images by original mode, such as RGB or L, and by conversion, such as resized
    skipped: list[tuple[str, str]]  # names of unusable samples, with the reasons
    skipped_list: str | None  # path of the .csv file that lists ``skipped``
    ignored: list[str]  # parts of the source that are not converted
    notes: list[str]
    already_complete: bool  # whether an earlier call had already made the output; then counts are unknown

    def facts(self) -> dict[str, Any]:
        """Return the values of the report for JSON, with values derived from the layout."""
        layout = self.layout
        derived = {"num_chunks": layout.num_chunks, "chunk_bytes": layout.chunk_bytes, "cache": asdict(layout.cache)}
        return {**super().facts(), "layout": {**asdict(layout), **derived}}

    def lines(self) -> list[str]:
        layout, skipped = self.layout, ""
        if self.skipped:
            skipped = f"{len(self.skipped):,} (all in {self.skipped_list}), such as {': '.join(self.skipped[0])}"
        fields = [
            f"{name} ({f'{shape_text(self.shapes[name])} {kind}'.lstrip()})" for name, kind in self.fields.items()
        ]
        more = [f"... ({len(fields):,} in all)"] if len(fields) > MAX_FIELDS else []
        is_unlabelled = self.source_kind == "images" and "labels" not in self.fields
        return [
            self._head(),
            *rows("fields", ", ".join([*fields[:MAX_FIELDS], *more]) + ("; no labels" if is_unlabelled else "")),
            *rows("chunks", self._chunk_text()),
            *rows("  -", layout.reasons[1:] if self.free_bytes is not None else ()),
            *self.chunk_cache.cache_lines("  "),
            *rows("on disk", ", ".join(f"about {human_bytes(size)} {form}" for form, size in self.size_bytes.items())),
            *(line for cost in self.forms for line in rows(cost.form, str(cost))),
            *rows("advice:", self.recommendation),
            *rows("originals", ", ".join(f"{count:,} {MODES.get(mode, mode)}" for mode, count in self.counts.items())),
            *rows("classes", list_some(self.class_names) if self.class_names else ""),
            *rows("ignored", self.ignored),
            *rows("skipped", skipped),
            *rows("note:", self.notes),
        ]

    def _chunk_text(self) -> str:
        layout = self.layout
        if not self.form:
            chunk = shape_text((layout.chunk_samples, *self.sample_shape))
            return f"{layout.num_chunks:,} of {chunk}: {self.chunk_cache.reason}"
        held = count_text(min(CHUNK_BYTES // max(1, layout.sample_bytes) or 1, layout.num_samples), "image")
        parts, images = count_text(layout.num_chunks, "part"), count_text(layout.chunk_samples, "image")
        return (
            f"each of about {held}, with one checksum; they are shuffled in {parts} of {images} (of any size, "
            f"{self.form})"
        )

    def _head(self) -> str:
        noun = "image" if self.source_kind == "images" else "sample"
        samples = count_text(self.num_samples, noun)
        if self.sample_shape:
            samples += f" of {shape_text(self.sample_shape)}"
        samples += f" ({self.source_kind})" if noun == "sample" else ""
        size, rate = human_bytes(self.num_bytes), f"{self.num_samples / self.seconds:,.0f} {noun}s/s"
        if self.free_bytes is not None:
            size += f" needed, {human_bytes(self.free_bytes)} free"
            rate = f"about {self.seconds:.0f} s with {count_text(self.num_workers or 0, 'worker')}"
        return f"{self.path}: {samples}, {size}, {COMPLETE if self.already_complete else rate}"


@dataclass(frozen=True, kw_only=True)
class MatrixReport(Report):
    """Report on a converted sparse matrix. For a dry run, it is an estimate from the start of the source."""

    path: str
    source_kind: str
    dry_run: bool
    kind: str  # csr or dense
    num_rows: int | None  # None if a dry run would have to read the entire source to count them
    num_columns: int | None  # None if a dry run would have to read the entire source to count them
    num_entries: int | None  # None for dense rows that were already complete
    is_exact: bool = True  # whether num_entries was counted rather than estimated
    num_bytes: int  # size of the file, or of all shards
    num_files: int = 1  # number of files: 1, or the number of shards
    seconds: float  # duration of the whole call; estimated if dry_run
    fields: dict[str, str]  # dtype of each row field
    axes: tuple[str, str]  # names that the source has for the rows, which are the samples, and for the columns
    duplicates: str  # how duplicates are combined
    dtype: str  # dtype of the stored values: uint8, float16 or float32
    scale: float  # the factor by which values were multiplied before they were stored
    pattern: bool  # whether all values are one, so that only their positions are stored
    chunk_samples: int | None = None  # None for a dry run
    chunk_cache: ChunkCacheInfo | None = None  # the cache of the entries, for readers with h5py; None for a dry run
    counts: dict[str, int] = field(default_factory=dict)  # numbers of entries read and dropped, rows left out, ...
    num_ranges: int = 1  # parts that were sorted one after the other; 1 if all entries fit in memory
    free_bytes: int | None = None  # free space on the disk of the output; None unless this is the plan of a dry run
    memory_bytes: int | None = None  # the memory limit; None unless this is the plan of a dry run
    temporary_bytes: int | None = None  # estimated size of temporary files; None unless this is the plan of a dry run
    ignored: list[str] = field(default_factory=list)  # fields of the source that are left out, with the reason
    notes: list[str] = field(default_factory=list)
    already_complete: bool = False  # whether an earlier call had already made the file

    def lines(self) -> list[str]:
        ranges = f"in {self.num_ranges} parts, with temporary data on disk"
        memory = "" if self.memory_bytes is None else f"at most {human_bytes(self.memory_bytes)}"
        if self.temporary_bytes:
            memory += f", about {human_bytes(self.temporary_bytes)} of temporary data on disk"
        return [
            self._head(),
            *rows("samples:", _axes_text(self.num_rows, self.num_columns, self.axes)),
            *rows("duplicates", self.duplicates if self.free_bytes is not None else ""),
            *rows("", ", ".join(f"{noun}: {count:,}" for noun, count in self.counts.items())),
            *rows("fields", ", ".join(f"{name} ({kind})" for name, kind in self.fields.items())),
            *rows("ignored", self.ignored),
            *rows("memory", memory),
            *rows("sorted", ranges if self.num_ranges > 1 else ""),
            *(f"  {line}" for line in (self.chunk_cache.lines() if self.chunk_cache else ())),
            *rows("note:", self.notes),
        ]

    def _head(self) -> str:
        parts = [" x ".join("?" if size is None else f"{size:,}" for size in (self.num_rows, self.num_columns))]
        prefix = "" if self.is_exact else "about "
        if self.num_entries is not None:
            parts.append(f"{prefix}{count_text(self.num_entries, 'entry')} ({self.source_kind})")
        parts.append("a pattern of ones" if self.pattern else f"values {values_text(self.dtype, self.scale)}")
        if self.kind == "dense":
            parts.append("as dense rows")
        if self.num_files > 1:
            parts.append(count_text(self.num_files, "file"))
        size, rate = human_bytes(self.num_bytes), f"{self.counts.get('entries read', 0) / self.seconds:,.0f} entries/s"
        if self.free_bytes is not None:
            size, rate = f"about {size} needed, {human_bytes(self.free_bytes)} free", f"about {self.seconds:.0f} s"
        return f"{self.path}: {', '.join([*parts, size, COMPLETE if self.already_complete else rate])}"


def _axes_text(num_rows: int | None, num_columns: int | None, axes: tuple[str, str]) -> str:
    """Describe the sizes of a matrix and the names that its axes have in the source.

    >>> _axes_text(138493, 26744, ("userId", "movieId"))
    '138,493 rows (userId); columns: 26,744 (movieId)'
    >>> _axes_text(None, None, ("userId", "movieId"))
    'rows (userId); columns (movieId)'
    """
    rows = "rows" if num_rows is None else count_text(num_rows, "row")
    columns = "columns" if num_columns is None else f"columns: {num_columns:,}"
    return f"{rows} ({axes[0]}); {columns} ({axes[1]})"
