"""The report of repack, as text (``str``) and for programs (``to_json``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
from h5py import h5d

from h5chunk.errors import count_text, human_bytes
from h5chunk.sample_source import shape_text
from h5chunk.store.hdf5.codecs import KNOWN_FILTERS
from h5chunk.store.rewrite.survey import DatasetFacts, describe_dataset
from h5chunk.tools.info.summary import MIN_SIMILAR
from h5chunk.tools.repack.plan import RepackPlan
from h5chunk.tools.report import MAX_LISTED, Report, rows


@dataclass(frozen=True)
class DatasetLayout:
    """The layout of a dataset in a file."""

    chunks: tuple[int, ...] | None  # None for a contiguous or compact dataset
    filters: tuple[str, ...]
    stored_bytes: int | None  # None for a layout that is only planned
    chunks_per_sample: float  # number of chunks with parts of a sample; the mean for a matrix; 1 if contiguous

    @classmethod
    def of(cls, facts: DatasetFacts, row_elements: float) -> DatasetLayout:
        """Describe the layout of a dataset. A sample consists of ``row_elements`` of its rows."""
        touched: float = facts.grid.chunks_per_sample
        if facts.chunks and row_elements > 1:
            touched = round(1 + (row_elements - 1) / facts.chunks[0], 3)
        return cls(facts.chunks, facts.filter_names, facts.stored_bytes, touched)

    def __str__(self) -> str:
        chunks = "contiguous" if self.chunks is None else f"chunks of {shape_text(self.chunks)}"
        filters = f", {'+'.join(self.filters)}" if self.filters else ""
        size = "" if self.stored_bytes is None else f", {human_bytes(self.stored_bytes)}"
        return f"{chunks}{filters}{size}, {self.chunks_per_sample:,} per sample"


@dataclass(frozen=True)
class FieldReport(Report):
    """The old and new layout of a dataset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int  # size of the decoded values
    before: DatasetLayout
    after: DatasetLayout
    shuffled: bool

    def lines(self) -> list[str]:
        is_done = self.after.stored_bytes is not None
        return [
            f"{self.name}  {self.dtype} {shape_text(self.shape)}",
            f"    {'was' if is_done else 'is'} {self.before}",
            f"    {'is ' if is_done else 'would be'} {self.after}",
        ]


@dataclass(frozen=True)
class RepackReport(Report):
    """The result of a repack, or the plan of a dry run."""

    path: str
    dry_run: bool
    num_samples: int  # length of the main field; 0 if no dataset has samples
    main: str  # name of the main field
    chunk_samples: int | None  # samples per chunk of the fields
    window_chunks: int | None  # recommended window; stored only if ``has_header``
    has_header: bool  # whether the new file has the group /h5chunk
    shuffled: bool
    seed: int
    source_bytes: int
    num_bytes: int  # size of the new file; for a dry run, approximate size on disk
    seconds: float
    fields: list[FieldReport]  # datasets with a new layout
    num_alike: int  # number of datasets like the main field in other groups, such as episodes
    num_copied: int  # number of other datasets
    notes: list[str]  # warnings, for example about content that could not be kept
    already_complete: bool  # whether the same command had already written the file, so that nothing was done

    def lines(self) -> list[str]:
        sizes = [human_bytes(self.source_bytes), f"{'about ' if self.dry_run else ''}{human_bytes(self.num_bytes)}"]
        rate = "nothing written" if self.dry_run else f"{human_bytes(self.num_bytes / max(self.seconds, 1e-9))}/s"
        order = f", shuffled with seed {self.seed}" if self.shuffled else ""
        samples = f"{count_text(self.num_samples, 'sample')} of {self.main!r}{order}" if self.main else "no samples"
        samples += f" and {count_text(self.num_alike, 'dataset')} like it" if self.num_alike else ""
        window, copied = "", ""
        if self.has_header:
            chunks = count_text(self.window_chunks or 0, "chunk")
            window = f"of {chunks} of {count_text(self.chunk_samples or 0, 'sample')} are recommended"
        if self.num_copied:
            copied = f"unchanged: {count_text(self.num_copied, 'other dataset')}"
        return [
            f"{self.path}: {samples}, {' -> '.join(sizes)}, {'already complete' if self.already_complete else rate}",
            *(f"  {line}" for line in _field_lines(self.fields)),
            *rows("windows", window),
            *rows("copied", copied),
            *rows("note:", self.notes),
        ]


def _field_lines(fields: Sequence[FieldReport]) -> Iterator[str]:
    """Yield the lines of fields. Those of the same layout in different groups, such as episodes, share lines."""
    groups: dict[tuple[object, ...], list[FieldReport]] = {}
    for each in fields:
        *parents, name = each.name.split("/")
        layouts = [
            (layout.chunks and layout.chunks[1:], layout.filters, layout.chunks_per_sample)
            for layout in (each.before, each.after)
        ]
        key = len(parents), re.sub(r"\d+", "*", name), each.dtype, each.shape[1:], each.shuffled, *layouts
        groups.setdefault(key, []).append(each)
    for alike in groups.values():
        shown = alike[:1] if len(alike) >= MIN_SIMILAR else alike
        for each in shown:
            first, *others = each.lines()
            yield f"{first}, and {len(alike) - 1:,} more like it" if len(shown) < len(alike) else first
            yield from others


@dataclass(frozen=True)
class RepackFolderReport(Report):
    """The result of repacking several files, or the plan of a dry run."""

    path: str
    dry_run: bool
    files: tuple[RepackReport, ...]
    seconds: float
    already_complete: bool

    def lines(self) -> list[str]:
        source_bytes, num_bytes = (
            sum(getattr(file, name) for file in self.files) for name in ("source_bytes", "num_bytes")
        )
        rate = "nothing written" if self.dry_run else f"{human_bytes(num_bytes / max(self.seconds, 1e-9))}/s"
        done = "already complete" if self.already_complete else rate
        size = f"{human_bytes(source_bytes)} -> {'about ' if self.dry_run else ''}{human_bytes(num_bytes)}"
        first, *others = self.files
        return [
            f"{self.path}: {count_text(len(self.files), 'file')}, {size}, {done}",
            *(f"  {line}" for line in first.lines()),
            *rows("", (file.lines()[0] for file in others), MAX_LISTED),
        ]


def planned_fields(plan: RepackPlan) -> list[FieldReport]:
    reports = []
    for facts, row_elements, moved, planned in _fields_of(plan):
        before, after = (
            DatasetLayout.of(facts, row_elements),
            replace(DatasetLayout.of(planned, row_elements), stored_bytes=None),
        )
        reports.append(FieldReport(facts.name, facts.dtype, facts.shape or (), facts.num_bytes, before, after, moved))
    return reports


def describe_fields(plan: RepackPlan, path: Path, label: str) -> list[FieldReport]:
    """Report the old layout of each field, and its new layout in the file at ``path``."""
    reports = []
    with h5py.File(path, "r", locking=False) as file:
        for planned, (facts, row_elements, *_) in zip(planned_fields(plan), _fields_of(plan), strict=True):
            now = describe_dataset(h5d.open(file.id, facts.path), facts.path, label)
            reports.append(replace(planned, after=DatasetLayout.of(now, row_elements)))
    return reports


def _fields_of(plan: RepackPlan) -> Iterator[tuple[DatasetFacts, float, bool, DatasetFacts]]:
    """Yield for each field its facts, its rows per sample, whether it is shuffled, and its planned facts."""
    for move in plan.moves:
        if move.is_field:
            names = tuple(KNOWN_FILTERS.get(filter_.code, f"filter {filter_.code}") for filter_ in move.layout.filters)
            planned = replace(move.facts, chunks=move.layout.chunks, filter_names=names)
            yield move.facts, move.row_elements, move.kind != "copy", planned
    if plan.options.shuffle:
        yield from ((facts, 1.0, True, facts) for facts in plan.samples.other_datasets)
