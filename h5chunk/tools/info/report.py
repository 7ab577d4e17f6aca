"""Reports on the contents of HDF5 files: for people (``str``) and for programs (``to_json``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from h5chunk.errors import human_bytes
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.format.header import Header
from h5chunk.tools.info.matrix import MatrixInfo
from h5chunk.tools.report import Report, list_some

SHOWN = 20  # files in what people read; JSON has all


@dataclass(frozen=True)
class DatasetInfo(Report):
    """One dataset.

    Attributes
    ----------
    name : str
    shape : tuple of int
    dtype : str
    layout : {"contiguous", "chunked", "compact", "virtual"}
    chunks : tuple of int or None
    filters : list of str
    edges_unfiltered : bool
        Whether partial chunks at the edges are stored without the filters.
    stored_bytes : int
        In the file.
    num_chunks, chunk_bytes : int
        Decoded; 0 chunks for a contiguous one.
    sample_bytes : int
        One index of the first axis.
    chunks_per_sample, reads_per_sample : int
        Chunks that a sample touches; byte ranges read for a single random one, with this HDF5's default cache.
    amplification : float
        Bytes read for a single random sample, with that cache, over the bytes of the sample.
    verdict : str
        Whether samples lie well, and if not, what would help.
    num_unwritten : int
        Chunks that were never written, which is legal in HDF5. A contiguous dataset is one chunk.
    reads_as : str
        The value that readers give for them; empty if there are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    chunks: tuple[int, ...] | None
    filters: list[str]
    edges_unfiltered: bool
    stored_bytes: int
    num_chunks: int
    chunk_bytes: int
    sample_bytes: int
    chunks_per_sample: int
    reads_per_sample: int
    amplification: float
    verdict: str
    num_unwritten: int = 0
    reads_as: str = ""

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        layout = self.layout
        if self.chunks is not None:
            layout = f"{self.num_chunks:,} chunks of {shape_text(self.chunks)} ({human_bytes(self.chunk_bytes)})"
        filters = f", {'+'.join(self.filters)}" if self.filters else ""
        filters += " (not in partial chunks at the edges)" if self.edges_unfiltered else ""
        lines = [f"{self.name}  {self.dtype} {shape_text(self.shape)}  {layout}{filters}", f"    {self.verdict}"]
        if self.num_unwritten:
            some = f"{self.num_unwritten:,} chunks were " if self.num_unwritten < self.num_chunks else ""
            lines.append(f"    {some}never written: reads as {self.reads_as}")
        return lines


@dataclass(frozen=True)
class FileInfo(Report):
    """The contents of a file.

    Attributes
    ----------
    path : str
    num_bytes : int
        Of the file.
    header : Header or None
        Of an h5chunk file.
    default_cache : CacheSettings
        The chunk cache that this HDF5 library gives a dataset by default.
    datasets : list of DatasetInfo
        All but what h5chunk keeps beside the data.
    refused : list of str
        What was not read, and why: links, views of other files, and sizes out of proportion.
    matrices : list of MatrixInfo
        Sparse matrices; in an h5chunk file also dense rows.
    """

    path: str
    num_bytes: int
    header: Header | None
    default_cache: CacheSettings
    datasets: list[DatasetInfo]
    refused: list[str] = field(default_factory=list)
    matrices: list[MatrixInfo] = field(default_factory=list)

    def lines(self) -> list[str]:
        lines = [f"{self.path}: {human_bytes(self.num_bytes)}, {self._origin()}"]
        if self.header and self.header.class_names:
            lines.append(f"  classes {list_some(self.header.class_names)}")
        lines += [f"  {line}" for each in self.matrices for line in each.lines()]
        lines += [f"  {line}" for each in self.datasets for line in each.lines()]
        lines += [f"  not looked at: {each}" for each in self.refused]
        if not self.datasets and not self.refused:
            lines.append("  no datasets")
        return lines

    def _origin(self) -> str:
        if self.header is None:
            return f"{len(self.datasets)} datasets, not written by h5chunk"
        header = self.header
        order = f"shuffled with seed {header.seed}" if header.shuffled else "in the order of the source"
        if not header.shuffled and "appended" in header.options:
            order = "appended to, parts not mixed"
        return f"h5chunk format {header.format_version}, {header.num_samples:,} samples, {order}"


@dataclass(frozen=True)
class FolderInfo(Report):
    """The contents of the files in a folder, or of those that match a pattern.

    Attributes
    ----------
    path : str
    num_bytes : int
        Of all files.
    files : tuple of FileInfo
        By name, with numbers in it by their value; without those that cannot be opened.
    broken : dict of str to str
        Those, and why.
    num_samples : tuple of int
        Of each of the files in the set; empty if they are none.
    fields : tuple of str
        Of a sample of the set.
    class_names : tuple of str
        Of the set.
    chunk_samples : tuple of int
        Samples that are read together, in each file of the set.
    is_shuffled : bool
        Whether the samples of all files were shuffled together when they were packed.
    why_not : str
        Why the files are no data set; empty if they are one.
    """

    path: str
    num_bytes: int
    files: tuple[FileInfo, ...]
    broken: dict[str, str]
    num_samples: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    chunk_samples: tuple[int, ...] = ()
    is_shuffled: bool = False
    why_not: str = ""

    def facts(self) -> dict[str, Any]:
        """The report for programs, with the samples of all files."""
        return {**super().facts(), "total_samples": sum(self.num_samples)}

    def lines(self) -> list[str]:
        number = len(self.files) + len(self.broken)
        lines = [f"{self.path}: {number} file{'' if number == 1 else 's'}, {human_bytes(self.num_bytes)}"]
        if self.why_not:
            lines.append(f"  not one data set: {self.why_not}")
        else:
            lines += self._as_one()
        lines += [f"  cannot be opened: {path}: {why}" for path, why in list(self.broken.items())[:SHOWN]]
        lines += [f"  {self._line(number)}" for number in range(len(self.files))[:SHOWN]]
        left = max(0, len(self.files) - SHOWN) + max(0, len(self.broken) - SHOWN)
        return [*lines, *([f"  {left} more (--json has all)"] if left else [])]

    def _as_one(self) -> list[str]:
        order = "shuffled as one" if self.is_shuffled else "not shuffled as one: take large window_chunks"
        sizes = Counter(self.chunk_samples).most_common()
        chunks = ", ".join(f"{size} in {count} file{'' if count == 1 else 's'}" for size, count in sizes)
        return [
            f"  read as one: {sum(self.num_samples):,} samples of {', '.join(self.fields)}; {order}",
            *([f"  classes {list_some(self.class_names)}"] if self.class_names else []),
            f"  samples that are read together: {chunks}",
        ]

    def _line(self, number: int) -> str:
        each = self.files[number]
        samples = f"{self.num_samples[number]:,} samples, " if self.num_samples else ""
        refused = f"; {len(each.refused)} not looked at" if each.refused else ""
        return f"{each.path}: {samples}{human_bytes(each.num_bytes)}{refused}"


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape for people."""
    return " x ".join(map(str, shape)) or "scalar"
