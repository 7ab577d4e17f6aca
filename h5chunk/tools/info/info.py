"""What is in any HDF5 file, and what drawing single random samples from it costs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import h5py

from h5chunk.errors import FileError, printable
from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.plan.layout import human_bytes
from h5chunk.sources.sparse.hdf5calls import partial_chunks_are_plain
from h5chunk.store.format import GROUP, Header, opened, read_header
from h5chunk.store.guard.child import in_child, limited_memory
from h5chunk.store.guard.claims import KNOWN_FILTERS
from h5chunk.store.guard.guard import Guard, Refusal, Trusted
from h5chunk.store.read.files import Paths, list_files
from h5chunk.store.read.unwritten import count_unwritten, unwritten_value
from h5chunk.store.write.csr import MATRIX
from h5chunk.tools.info.folder import FolderInfo, info_folder
from h5chunk.tools.info.matrix import ForeignMatrix, MatrixInfo, foreign_matrices, info_matrix
from h5chunk.tools.report import Report, list_some

_LAYOUTS = {
    h5py.h5d.COMPACT: "compact",
    h5py.h5d.CONTIGUOUS: "contiguous",
    h5py.h5d.CHUNKED: "chunked",
    h5py.h5d.VIRTUAL: "virtual",
}
_OF_MATRIX = "part of the matrix: a run of rows is a run of bytes of each part"


@dataclass(frozen=True)
class DatasetInfo:
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


@dataclass(frozen=True)
class FileInfo(Report):
    """What `info` found.

    Attributes
    ----------
    path : str
    num_bytes : int
        Of the file.
    header : Header or None
        What a file of ours says about itself.
    default_cache : CacheSettings
        The chunk cache that this HDF5 library gives a dataset by default.
    datasets : list of DatasetInfo
        All but what h5chunk keeps beside the data.
    matrix : MatrixInfo or None
        The sparse matrix in a file of ours.
    refused : list of str
        What was not looked at, and why: links, views of other files, claims that cannot be.
    matrices : list of ForeignMatrix
        Sparse matrices in a file of others.
    """

    path: str
    num_bytes: int
    header: Header | None
    default_cache: CacheSettings
    datasets: list[DatasetInfo]
    matrix: MatrixInfo | None = None
    refused: list[str] = field(default_factory=list)
    matrices: list[ForeignMatrix] = field(default_factory=list)

    def lines(self) -> list[str]:
        lines = [f"{self.path}: {human_bytes(self.num_bytes)}, {self._origin()}"]
        if self.header and self.header.class_names:
            lines.append(f"  classes {list_some(self.header.class_names)}")
        if self.matrix is not None:
            lines.append(f"  {self.matrix}")
        lines += [f"  {line}" for each in self.matrices for line in each.lines()]
        for each in self.datasets:
            layout = each.layout
            if each.chunks is not None:
                layout = f"{each.num_chunks:,} chunks of {_shape(each.chunks)} ({human_bytes(each.chunk_bytes)})"
            filters = f", {'+'.join(each.filters)}" if each.filters else ""
            filters += " (not in partial chunks at the edges)" if each.edges_unfiltered else ""
            lines.append(f"  {each.name}  {each.dtype} {_shape(each.shape)}  {layout}{filters}")
            lines.append(f"      {each.verdict}")
            if each.num_unwritten:
                some = f"{each.num_unwritten:,} chunks were " if each.num_unwritten < each.num_chunks else ""
                lines.append(f"      {some}never written: reads as {each.reads_as}")
        lines += [f"  not looked at: {each}" for each in self.refused]
        if not self.datasets and not self.refused:
            lines.append("  no datasets")
        return lines

    def _origin(self) -> str:
        if self.header is None:
            return f"{len(self.datasets)} datasets, not written by h5chunk"
        header = self.header
        order = f"shuffled with seed {header.seed}" if header.shuffled else "in the order of the source"
        if not header.shuffled and '"appended"' in header.options:
            order = "appended to, parts not mixed"
        return f"h5chunk format {header.format_version}, {header.num_samples:,} samples, {order}"


def info(path: Paths, *, trusted: Trusted = False) -> FileInfo | FolderInfo:
    """Look at all datasets of a file; reads no data, but of a sparse matrix of ours the lengths of rows, and values.

    Parameters
    ----------
    path : path or sequence of paths
        Of several files, named as for `ChunkDataset`, also whether they read as one data set.
    trusted : bool, path or sequence of paths
        Whether links and views of other files are followed: not; in the folder of the file; or in these folders.

    Returns
    -------
    FileInfo, or FolderInfo of a folder, a pattern or a list

    Raises
    ------
    FileError
        It is missing, not HDF5, or cut short; or there is no file in the folder.
    """
    if isinstance(path, (str, os.PathLike)) and (Path(path).is_file() or list_files(path) == [Path(path)]):
        return _info_file(Path(path), trusted)
    return info_folder(path, partial(_info_file, trusted=trusted), trusted)


def _info_file(path: Path, trusted: Trusted) -> FileInfo:
    return in_child(lambda _: _look_at_file(path, trusted), lambda: printable(path))


def _look_at_file(path: Path, trusted: Trusted) -> FileInfo:
    with limited_memory(path), opened(path) as file:
        header = read_header(file)
        guard = Guard(path, trusted)
        if header and isinstance(guard.find(file, MATRIX), h5py.Group):
            guard.check_matrix(file, MATRIX)
        matrix = info_matrix(file) if header else None
        found, refused = _look(file, guard, ours=header is not None)
        names = [dataset.name.lstrip("/") for dataset in found]
        others = foreign_matrices(file, path, names) if matrix is None else []
        groups = [MATRIX] if matrix is not None else [each.name for each in others]
        nslots, nbytes, w0 = h5py.h5p.create(h5py.h5p.FILE_ACCESS).get_cache()[1:]
        cache = CacheSettings(int(nslots), int(nbytes), float(w0))
        return FileInfo(
            path=str(path),
            num_bytes=path.stat().st_size,
            header=header,
            default_cache=cache,
            datasets=[_describe(dataset, cache, groups) for dataset in found],
            matrix=matrix,
            matrices=others,
            refused=[str(error).removeprefix(f"{printable(path)}: ") for error in refused],
        )


def _look(file: h5py.File, guard: Guard, ours: bool) -> tuple[list[h5py.Dataset], list[FileError]]:
    """Datasets by name, but for what h5chunk keeps beside the data; and what the guard refuses."""
    found, refused = [], []
    for name, item in sorted(guard.walk(file), key=lambda each: each[0]):
        if ours and name.startswith(f"{GROUP}/"):
            continue
        try:
            if isinstance(item, Refusal):
                raise item.error
            pattern = name == f"{MATRIX}/data" and ours
            if not pattern:  # which claims ones that are stored nowhere
                guard.check_field(item, name)
            found.append(item)
        except FileError as error:
            refused.append(error)
    return found, refused


def _describe(dataset: h5py.Dataset, cache: CacheSettings, matrices: list[str]) -> DatasetInfo:
    properties = dataset.id.get_create_plist()
    numbers = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    grid = ChunkGrid(tuple(dataset.shape or ()), dataset.chunks, dataset.dtype.itemsize, bool(numbers))
    usable = bool(grid.shape)
    cached = usable and grid.chunk_bytes <= cache.nbytes
    amplification = grid.amplification(cached) if usable else 1.0
    num_unwritten = count_unwritten(dataset)
    return DatasetInfo(
        name=dataset.name.lstrip("/"),
        shape=grid.shape,
        dtype=str(dataset.dtype),
        layout=_LAYOUTS.get(properties.get_layout(), "unknown"),
        chunks=grid.chunks,
        filters=[KNOWN_FILTERS.get(number, f"filter {number}") for number in numbers],
        edges_unfiltered=bool(numbers and partial_chunks_are_plain(properties)),
        stored_bytes=dataset.id.get_storage_size(),
        num_chunks=grid.num_chunks if usable else 0,
        chunk_bytes=grid.chunk_bytes,
        sample_bytes=grid.sample_bytes,
        chunks_per_sample=grid.chunks_per_sample if usable else 0,
        reads_per_sample=grid.reads_per_sample(cached) if usable else 0,
        amplification=amplification,
        verdict=_OF_MATRIX if _is_part(dataset, matrices) else _verdict(dataset, grid, amplification, cached),
        num_unwritten=num_unwritten,
        reads_as=unwritten_value(dataset) if num_unwritten else "",
    )


def _is_part(dataset: h5py.Dataset, matrices: list[str]) -> bool:
    return dataset.name.lstrip("/").rpartition("/")[0] in matrices


def _verdict(dataset: h5py.Dataset, grid: ChunkGrid, amplification: float, cached: bool) -> str:
    if not grid.shape:
        return "a single value: no samples along a first axis"
    if dataset.dtype.kind not in "biufS":
        return f"of type {dataset.dtype}: cannot be a field for training (numbers and fixed-length strings can)"
    if 0 in grid.shape:
        return "empty"
    single = f"a single random sample, with h5py's default cache, reads {amplification:,.1f} x its bytes"
    if dataset.is_virtual:
        return "a view of other files: look at those"
    if grid.chunks is None:
        return f"good: each sample is one run of bytes; {single}"
    if grid.chunks_per_sample > 1:
        whole = "(k, " + ", ".join(map(str, grid.shape[1:])) + ")"
        return (
            f"bad: each sample touches {grid.chunks_per_sample:,} chunks in {grid.reads_per_sample(cached):,} reads; "
            f"{single}: rewrite it with chunks={whole}"
        )
    if amplification == 1.0:
        return f"good: whole samples in each chunk; {single}"
    return f"good chunk by chunk (ChunkSampler reads each chunk once), but {single}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
