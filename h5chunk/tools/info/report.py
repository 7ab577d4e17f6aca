"""Reports on the contents of HDF5 files and on the machine, as text (``str``) and for programs (``to_json``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from h5chunk.errors import count_text, human_bytes
from h5chunk.plan.cache import CacheSettings
from h5chunk.sample_source import shape_text
from h5chunk.store.format.header import Header
from h5chunk.store.format.statistics import FieldStatistics, merged
from h5chunk.store.hdf5.packing import Packing
from h5chunk.tools.chunk_cache import ChunkCacheInfo
from h5chunk.tools.info.summary import IMAGES, SINGLE, summarise
from h5chunk.tools.report import Report, code, list_some, shell_command, values_text

SHOWN, SHOWN_REFUSED = 20, 5  # maximum number of files, and of refused datasets, in the text; JSON lists all
SHOWN_PACKED = 6
MAX_REPACKED = 4  # datasets that a command names
NOTABLE = 2.0  # read amplification above which the report mentions it


@dataclass(frozen=True)
class DatasetInfo(Report):
    """The report on a dataset."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str  # contiguous, chunked, compact or virtual
    chunks: tuple[int, ...] | None
    filters: list[str]
    edges_unfiltered: bool  # whether partial chunks at the edges are stored without filters
    stored_bytes: int
    num_chunks: int  # 0 for a contiguous dataset
    chunk_bytes: int  # decoded bytes
    sample_bytes: int  # bytes of a sample, which is an index of the first axis
    chunks_per_sample: int  # number of chunks that contain parts of a sample
    reads_per_sample: int  # byte ranges read for one random sample, with the default cache of this HDF5 library
    amplification: float  # bytes read for one random sample, with this default cache, divided by the sample's size
    verdict: str
    num_unwritten: int = 0  # number of chunks that were never written, which is legal; 1 for a contiguous dataset
    reads_as: str = ""  # the value that unwritten chunks read as
    packing: Packing | None = None  # what the stored numbers mean, by netCDF's attributes
    can_decode: bool = True  # False if these attributes do not fit the conventions

    @property
    def can_train(self) -> bool:
        """True if the rows of the dataset can be samples."""
        return self.verdict.startswith(("good", "bad"))

    @property
    def has_images(self) -> bool:
        """True if each row is an encoded image."""
        return self.verdict == IMAGES

    @property
    def is_number(self) -> bool:
        """True if the dataset is a single number, which may belong to one sample of many."""
        return self.verdict == SINGLE and np.dtype(self.dtype).kind in "biuf"

    @property
    def num_axes(self) -> int:
        return len(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the decoded values in bytes."""
        return self.sample_bytes * (self.shape[0] if self.shape else 1)

    @property
    def is_cut(self) -> bool:
        """True if each sample is cut into several chunks."""
        return self.verdict.startswith("bad")

    def lines(self) -> list[str]:
        layout = self.layout
        if self.chunks is not None:
            chunks = count_text(self.num_chunks, "chunk")
            layout = f"{chunks} of {shape_text(self.chunks)} ({human_bytes(self.chunk_bytes)})"
        filters = f", {'+'.join(self.filters)}" if self.filters else ""
        filters += " (not in partial chunks at the edges)" if self.edges_unfiltered else ""
        shape = shape_text(self.shape) or "scalar"
        lines = [f"{self.name}  {self.dtype} {shape}  {layout}{filters}", f"    {self.verdict}"]
        if self.num_unwritten:
            part = f"{count_text(self.num_unwritten, 'chunk')} " if self.num_unwritten < self.num_chunks else ""
            lines.append(f"    {part}never written (reads as {self.reads_as})")
        return [*lines, *([f"    {self.packing}"] if self.packing else [])]


@dataclass(frozen=True)
class MatrixInfo(Report):
    """The report on a sparse matrix, or on the dense rows of a matrix in an h5chunk file."""

    name: str
    kind: str  # csr or dense; empty if its rows cannot be read as samples
    num_rows: int | None  # None if `kind` is empty
    num_columns: int | None
    num_entries: int | None  # None for dense rows
    dtype: str
    stored_bytes: int  # bytes of rows, columns and values
    verdict: str = ""  # how to train on the matrix; empty for an h5chunk file
    density: float | None = None  # known, like the next two values, only for sparse rows in an h5chunk file
    median_row_entries: float | None = None
    max_row_entries: int | None = None
    scale: float = 1.0  # a value is the stored number divided by this
    pattern: bool = False  # whether all values are one, so that none is stored
    value_range: tuple[float, float] | None = None  # None if not all values were read, or there are none

    def lines(self) -> list[str]:
        shape = f"{self.num_rows:,} x {self.num_columns:,}, " if self.num_rows is not None else ""
        size = human_bytes(self.stored_bytes)
        if self.verdict:
            description = (
                f"sparse matrix {self.name!r}: {shape}{self.num_entries:,} entries, values {self.dtype}, {size}"
            )
            return [description, f"    {self.verdict}"]
        values = values_text(self.dtype, self.scale)
        if self.num_entries is None:
            return [f"matrix {shape}dense rows, values {values}, {size}"]
        if self.pattern:
            values = "all ones, none stored"
        elif self.value_range:
            values = f"from {self.value_range[0]:g} to {self.value_range[1]:g}, {values}"
        return [
            f"matrix {shape}{self.num_entries:,} entries (density {self.density:.3g}; "
            f"per row {self.median_row_entries:g} in the median and at most {self.max_row_entries:,}), "
            f"values {values}, {size}"
        ]


@dataclass(frozen=True)
class ImagesInfo(Report):
    """Images of any size in an h5chunk file."""

    name: str
    form: str  # encoded or raw
    num_images: int
    num_bytes: int
    heights: tuple[int, int]  # minimum and maximum
    widths: tuple[int, int]
    raw_bytes: int  # size of the pixels of all images

    def lines(self) -> list[str]:
        sizes = " to ".join(shape_text(size) for size in zip(self.heights, self.widths, strict=True))
        mean = human_bytes(self.num_bytes / self.num_images)
        raw = "" if self.form == "raw" else f", {human_bytes(self.raw_bytes)} as pixels"
        return [
            f"{self.name}  {count_text(self.num_images, f'{self.form} image')} of any size, {sizes}, "
            f"{human_bytes(self.num_bytes)} ({mean} each){raw}"
        ]


@dataclass(frozen=True)
class FileInfo(Report):
    """The report on a file."""

    path: str
    num_bytes: int
    header: Header | None  # only for an h5chunk file
    default_cache: CacheSettings  # the default cache of this HDF5 library
    datasets: list[DatasetInfo]  # all datasets except those of /h5chunk
    refused: list[str] = field(default_factory=list)  # why links, views and implausible datasets were not read
    matrices: list[MatrixInfo] = field(default_factory=list)  # sparse matrices; in an h5chunk file also dense rows
    images: list[ImagesInfo] = field(default_factory=list)  # groups of images of any size
    fields: list[str] = field(default_factory=list)  # names of the datasets to train on
    statistics: dict[str, FieldStatistics] = field(default_factory=dict)  # statistics of fields, if requested
    code: list[str] = field(default_factory=list)  # lines of Python that create a loader; empty without fields
    layout: str = ""  # the published layout of episodes or series that the file has; empty if it has none
    notes: list[str] = field(default_factory=list)  # what the numbers mean, and what the code leaves out
    chunk_cache: ChunkCacheInfo | None = None  # the cache of the main field; None if its samples share no chunks
    show_all: bool = False  # whether to list every dataset, instead of a summary

    def lines(self) -> list[str]:
        if self.header is None:
            origin = f"{count_text(len(self.datasets), 'dataset')}, {self.layout or 'not written by h5chunk'}"
        else:
            order = f"shuffled with seed {self.header.seed}" if self.header.shuffled else "in the order of the source"
            samples = count_text(self.header.num_samples, "sample")
            origin = f"h5chunk format {self.header.format_version}, {samples}, {order}"
        lines = [f"{self.path}: {human_bytes(self.num_bytes)}, {origin}"]
        lines += [f"    {code(line)}" for line in self.code]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  {line}" for line in (self.chunk_cache.lines() if self.chunk_cache else ())]
        if self.header and self.header.class_names:
            lines.append(f"  classes {list_some(self.header.class_names)}")
        lines += [
            f"  {line}" for matrix in self.matrices[: None if self.show_all else SHOWN] for line in matrix.lines()
        ]
        lines += [f"  {line}" for images in self.images for line in images.lines()]
        listed = (
            [line for dataset in self.datasets for line in dataset.lines()]
            if self.show_all
            else summarise(self.datasets)
        )
        lines += [f"  {line}" for line in listed]
        refused = self.refused if self.show_all else self.refused[:SHOWN_REFUSED]
        lines += [f"  not read: {reason}" for reason in refused]
        if len(refused) < len(self.refused):
            lines.append(f"  not read: {len(self.refused) - len(refused):,} more (--all)")
        packed = [] if self.show_all else [item for item in self.datasets if item.packing and item.can_train]
        lines += [f"  {item.name}: {item.packing}" for item in packed[:SHOWN_PACKED]]
        lines += [f"  {len(packed) - SHOWN_PACKED:,} more packed datasets (--all)"] if packed[SHOWN_PACKED:] else []
        for name, found in self.statistics.items():
            lines += [f"  {line}" for line in _statistics_lines(name, found, self.packing_of(name))]
        lines += [f"  {line}" for line in self._advice()]
        if not self.datasets and not self.refused:
            lines.append("  no datasets")
        return lines

    def packing_of(self, name: str) -> Packing | None:
        """Return what the numbers of a field mean."""
        return next((item.packing for item in self.datasets if item.name == name), None)

    def _advice(self) -> list[str]:
        """Return advice if plain reads of a dataset are slow, or samples are cut into several chunks."""
        lines = []
        fields = [dataset for dataset in self.datasets if dataset.can_train]
        worst = max(fields, key=lambda dataset: dataset.amplification, default=None)
        if self.header is None and worst is not None and worst.amplification > NOTABLE:
            lines.append(
                f"plain h5py reads up to {worst.amplification:,.0f} x the bytes of a random sample of {worst.name}, "
                "but h5chunk's loaders read each chunk once"
            )
        cut = [dataset for dataset in fields if dataset.is_cut]
        if cut and any("*" in name for name in self.fields):
            command = shell_command(["h5chunk", "tune", self.path, "--window", "10"])
            lines.append(f"{code(command)} says which chunks are better for windows of 10 time steps")
        elif cut and not self.refused and not any("sample_axis" in line for line in self.code):
            largest = sorted(cut, key=lambda dataset: -dataset.stored_bytes)[:MAX_REPACKED]
            named = [part for dataset in largest for part in ("--fields", dataset.name)]
            command = shell_command(["h5chunk", "repack", self.path, "NEW.h5", *named])
            lines.append(f"{code(command)} stores complete samples in each of their chunks")
        return lines


def _statistics_lines(name: str, found: FieldStatistics, packing: Packing | None) -> list[str]:
    mean, std = (_some(column) for column in (found.mean, found.std))
    what = "missing, NaN or infinite" if packing and packing.missing else "NaN or infinite"
    missing = f"; {count_text(found.num_missing, 'value')} {what}" if found.num_missing else ""
    if not any(found.count):
        return [f"{name}  all values are {what}"]
    values = f"mean=({mean}), std=({std})"
    is_usable = all(value > 0 for value in found.std)
    stored = " of stored values" if packing else ""
    lines = [
        f"{name}  Normalize({values}){stored}"
        if is_usable
        else f"{name}  {values}: Normalize needs each std to be positive",
        f"    values{stored and ' as stored'} from {min(found.minimum):.6g} to {max(found.maximum):.6g}{missing}",
    ]
    if packing and packing.is_scaled:
        mean = _some([value * packing.scale + packing.offset for value in found.mean])
        lines.append(f"    unpacked: mean=({mean}), std=({_some([value * abs(packing.scale) for value in found.std])})")
    return lines


def _some(column: Sequence[float]) -> str:
    more = f", ... ({len(column):,} channels)" if len(column) > SHOWN else ""
    return ", ".join(f"{value:.6g}" for value in column[:SHOWN]) + more


@dataclass(frozen=True)
class FolderInfo(Report):
    """The report on a folder, pattern or list of files."""

    path: str
    num_bytes: int
    files: tuple[FileInfo, ...]  # reports of all files that can be opened, sorted by name (numbers by value)
    broken: dict[str, str]  # files that cannot be opened, with the reasons
    num_samples: tuple[int, ...] = ()  # samples of each file; empty if the files do not form one data set
    fields: tuple[str, ...] = ()  # names of the fields
    class_names: tuple[str, ...] = ()
    chunk_samples: tuple[int, ...] = ()  # samples per chunk in each file
    is_shuffled: bool = False  # whether the samples of all files were shuffled together when they were written
    layout: str = ""  # the published layout of episodes that all files have; empty if they have none
    code: list[str] = field(default_factory=list)  # lines of Python that create a loader
    notes: list[str] = field(default_factory=list)
    mismatch: str = ""  # why the files do not form one data set; empty if they do

    def facts(self) -> dict[str, Any]:
        """Return the values of the report by name, with the number of samples in all files."""
        return {**super().facts(), "total_samples": sum(self.num_samples)}

    def lines(self) -> list[str]:
        files = count_text(len(self.files) + len(self.broken), "file")
        layout = f", {self.layout}" if self.layout else ""
        lines = [f"{self.path}: {files}, {human_bytes(self.num_bytes)}{layout}"]
        lines += [f"    {code(line)}" for line in self.code]
        lines += [f"  note: {note}" for note in self.notes]
        if self.mismatch:
            lines.append(f"  not one data set: {self.mismatch}")
        elif not self.layout:
            order = "shuffled together" if self.is_shuffled else "not shuffled together, so use large window_chunks"
            sizes = Counter(self.chunk_samples).most_common()
            chunks = ", ".join(f"{size} in {count_text(count, 'file')}" for size, count in sizes)
            samples = count_text(sum(self.num_samples), "sample")
            lines.append(f"  one data set: {samples} of {', '.join(self.fields)}; {order}")
            lines += [f"  classes {list_some(self.class_names)}"] if self.class_names else []
            lines.append(f"  samples per chunk: {chunks}")
            cache = self.files[0].chunk_cache
            lines += cache.cache_lines("  ") if cache is not None and cache.chunks else []
        for name in self.files[0].statistics if self.files and not self.mismatch else ():
            found = merged([file.statistics[name] for file in self.files])
            lines += [f"  {line}" for line in _statistics_lines(name, found, self.files[0].packing_of(name))]
        lines += [f"  cannot be opened: {path} ({why})" for path, why in list(self.broken.items())[:SHOWN]]
        for number, file in enumerate(self.files[:SHOWN]):
            samples = f"{count_text(self.num_samples[number], 'sample')}, " if self.num_samples else ""
            refused = f"; {count_text(len(file.refused), 'dataset')} not read" if file.refused else ""
            lines.append(f"  {file.path}: {samples}{human_bytes(file.num_bytes)}{refused}")
        left = max(0, len(self.files) - SHOWN) + max(0, len(self.broken) - SHOWN)
        return [*lines, *([f"  {left} more (--json lists all)"] if left else [])]


@dataclass(frozen=True)
class MachineInfo(Report):
    """The resources of the machine that are available to this process."""

    num_cores: int
    available_bytes: int  # bytes of memory, including reclaimable page cache
    native_threads: bool  # whether the native reading threads are built and enabled
    device: str | None  # the CUDA device that torch uses by default
    versions: dict[str, str]

    def lines(self) -> list[str]:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [
            f"cores      {self.num_cores}",
            f"memory     {human_bytes(self.available_bytes)} available",
            "threads    "
            f"{'native' if self.native_threads else 'Python, because native threads are not built or disabled'}",
            f"device     {self.device or 'no CUDA device'}",
            f"versions   {versions}",
        ]
