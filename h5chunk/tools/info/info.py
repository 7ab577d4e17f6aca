"""Describe the contents of HDF5 files, and how well their layout suits training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk import native
from h5chunk.errors import FieldError, FileError, H5ChunkError, printable, shown
from h5chunk.machine import available_cores
from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.source import shape_text
from h5chunk.store.format.header import CSR, MATRIX, Header, read_header, read_matrix
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.child import in_child, limited_memory
from h5chunk.store.hdf5.chunk_table import count_unwritten, is_vlen, partial_chunks_are_plain, unwritten_value
from h5chunk.store.hdf5.codecs import KNOWN_FILTERS
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import errors_as, opened
from h5chunk.store.read.encoded import holds_images
from h5chunk.store.read.fields import MATRIX_PARTS, Field, describe_matrix, find_matrix_groups
from h5chunk.store.read.files import Paths, list_files, open_reader, single_file
from h5chunk.store.read.ragged import (
    ImagesField,
    describe_images,
    find_image_groups,
    read_image_sizes,
    read_indptr,
)
from h5chunk.tools.info.layouts import recognise
from h5chunk.tools.info.report import DatasetInfo, FileInfo, FolderInfo, ImagesInfo, MachineInfo, MatrixInfo
from h5chunk.tools.info.summary import BATCH, IMAGES, VLEN, default_fields, training_code, training_fields
from h5chunk.tools.measure.machine import available_bytes, cuda_device, default_cache, library_versions
from h5chunk.tools.progress import Progress
from h5chunk.tools.report import python_text, shell_command

PART_VALUES = 1 << 20  # values of a matrix that are read at a time
LOOK_BYTES = 256 << 20  # the range of values is computed only for matrices with at most this size of values
LAYOUTS = {
    h5py.h5d.COMPACT: "compact",
    h5py.h5d.CONTIGUOUS: "contiguous",
    h5py.h5d.CHUNKED: "chunked",
    h5py.h5d.VIRTUAL: "virtual",
}


def info(
    path: Paths | None = None,
    *,
    trusted: bool = False,
    show_all: bool = False,
    stats: bool = False,
    progress: Progress | None = None,
) -> FileInfo | FolderInfo | MachineInfo:
    """Describe all datasets of a file without reading their data, or describe the machine.

    Row lengths and values are read only for the sparse matrix of an h5chunk file.

    Parameters
    ----------
    path : path or sequence of paths, optional
        A file, or several files, specified as for `ChunkDataset`. For several files, the report also says whether they
        form one data set. Default: describe the resources of the machine that this process may use.
    trusted : bool
        Whether to follow links and virtual datasets to other files in the file's folder.
    show_all : bool
        Whether the text lists every dataset of a file. Default: a summary that fits on a screen, with one line for
        datasets whose names differ only in their numbers.
    stats : bool
        Whether to read the fields to train on, compute mean and standard deviation of each of their channels, and store
        them beside the file, where `ChunkDataset.statistics` finds them.
    progress : function, optional
        Called with (stage, done, total) while statistics are computed.

    Returns
    -------
    FileInfo, FolderInfo (for a folder, a pattern or a list) or MachineInfo

    Raises
    ------
    FileError
        A file is missing, truncated or not HDF5, or the folder contains no HDF5 files.
    """
    if path is None:
        return MachineInfo(available_cores(), available_bytes(), native.available(), cuda_device(), library_versions())
    if (only := single_file(path)) is not None:
        found = replace(_info_file(only, trusted), show_all=show_all)
        return _with_statistics(found, trusted, stats, progress)
    files, broken = [], {}
    num_bytes = 0
    for file in list_files(path):
        num_bytes += file.stat().st_size if file.is_file() else 0
        try:
            files.append(_with_statistics(_info_file(file, trusted), trusted, stats, progress))
        except FileError as error:
            broken[str(file)] = str(error).removeprefix(f"{printable(file)}: ")
    name = str(path) if isinstance(path, (str, Path)) else f"{len(files) + len(broken)} files"
    described = _describe_episodes(name, files) or _describe_set(path, trusted)
    return FolderInfo(path=name, num_bytes=num_bytes, files=tuple(files), broken=broken, **described)


def _describe_episodes(path: str, files: Sequence[FileInfo]) -> dict[str, Any]:
    """Return the attributes of `FolderInfo` that describe files of episodes; empty if they are anything else."""
    if len({(file.layout, *file.fields) for file in files}) != 1 or not files[0].layout:
        return {}
    found = recognise(files[0].datasets, path)
    return {"layout": found.name, "code": found.code} if found and found.fields else {}


def _with_statistics(file: FileInfo, trusted: bool, stats: bool, progress: Progress | None) -> FileInfo:
    """If ``stats``, compute the statistics of the fields to train on, and store them beside the file."""
    if not stats:
        return file
    from h5chunk.tools.measure.statistics import has_statistics, store_statistics  # imports torch

    stored = {name: _first_like(file.datasets, name) for name in file.fields}
    images = {name for name, item in stored.items() if item and item.has_images}
    names = [
        name for name, item in stored.items() if item and (name in images or has_statistics(item.dtype, item.shape[1:]))
    ]
    if not names:
        raise FieldError(
            f"{printable(file.path)}: has no dense field of floats or arrays, and other fields have no statistics: "
            "leave out --stats"
        )
    found = store_statistics(Path(file.path), names, images, trusted=trusted, progress=progress)
    return replace(file, statistics=found)


def _first_like(datasets: Sequence[DatasetInfo], name: str) -> DatasetInfo | None:
    """Return the first trainable dataset whose name matches ``name``, where * matches the name of any group."""
    pattern = re.compile(re.escape(name).replace(r"\*", "[^/]+"))
    return next(
        (item for item in datasets if (item.can_train or item.has_images) and pattern.fullmatch(item.name)), None
    )


def _describe_set(path: Paths, trusted: bool) -> dict[str, Any]:
    """Return the attributes of `FolderInfo` that describe the files as one data set.

    If the files do not match, it is only ``mismatch``.
    """
    try:
        reader = open_reader(path, trusted=trusted)
    except H5ChunkError as error:
        return {"mismatch": str(error)}
    fields = []
    for name, field in reader.fields.items():
        kind = str(field.dtype) if isinstance(field, Field) else "sparse row of"
        kind = f"{field.form}, of any size" if isinstance(field, ImagesField) else kind
        fields.append(f"{name} ({f'{kind} {shape_text(field.sample_shape)}'.strip()})")
    return {
        "num_samples": tuple(single.num_samples for single in reader.readers),
        "fields": tuple(fields),
        "class_names": reader.header.class_names if reader.header else (),
        "chunk_samples": tuple(single.chunk_samples for single in reader.readers),
        "is_shuffled": bool(reader.header and reader.header.shuffled),
    }


def _info_file(path: Path, trusted: bool) -> FileInfo:
    return in_child(lambda _: _describe_file(path, trusted), lambda: printable(path))


def _describe_file(path: Path, trusted: bool) -> FileInfo:
    with limited_memory(path), opened(path) as file:
        header = read_header(file)
        guard = Guard(path, trusted)
        if header and isinstance(guard.find(file, MATRIX), h5py.Group):
            guard.check_matrix(file, MATRIX)
        matrix = _describe_matrix(file) if header else None
        datasets, refused = _list_datasets(file, guard, by_h5chunk=header is not None)
        names = [dataset.name.lstrip("/") for dataset in datasets]
        matrices = [matrix] if matrix is not None else _find_matrices(file, path, names)
        images = [_describe_images(file, path, name, header) for name in find_image_groups(names)] if header else []
        groups = {item.name: "part of the matrix" for item in matrices}
        groups |= {item.name: f"part of {item.name}" for item in images}
        cache = default_cache()
        described = [_describe(dataset, cache, groups) for dataset in datasets]
        images_in = _find_image_rows(file, path, datasets, guard) if header is None else set()
        described = [replace(item, verdict=IMAGES) if item.name in images_in else item for item in described]
        fields = training_fields(described, matrices, images, header)
        code = training_code(shown(path), fields, default_fields(file, header), images) if fields else []
        found = recognise(described, shown(path)) if header is None and not matrices else None
        return FileInfo(
            path=shown(path),
            num_bytes=path.stat().st_size,
            header=header,
            default_cache=cache,
            datasets=described,
            matrices=matrices,
            images=images,
            refused=[str(error).removeprefix(f"{printable(path)}: ") for error in refused],
            fields=found.fields if found else fields,
            code=found.code if found else code,
            layout=found.name if found else "",
        )


def _list_datasets(file: h5py.File, guard: Guard, *, by_h5chunk: bool) -> tuple[list[h5py.Dataset], list[FileError]]:
    """Return the datasets, sorted by name, and the errors of datasets that were refused.

    The group /h5chunk is left out.
    """
    datasets, refused = [], []
    for name, item in sorted(guard.walk(file), key=lambda pair: pair[0]):
        if by_h5chunk and name.startswith(f"{GROUP}/"):
            continue
        try:
            if isinstance(item, FieldError):
                raise item
            with errors_as(FieldError, f"{name!r} has a type that NumPy does not have"):
                if not (by_h5chunk and name == f"{MATRIX}/data"):  # a binary matrix stores no values
                    guard.check_field(item, name)
                datasets += [item] if item.dtype else []
        except FileError as error:
            refused.append(error)
    return datasets, refused


def _find_image_rows(file: h5py.File, path: Path, datasets: Sequence[h5py.Dataset], guard: Guard) -> set[str]:
    """Return the names of the datasets with an encoded image in each row.

    If the names of several datasets differ only in numbers, one is examined, and the others are taken to be like it.
    """
    known: dict[tuple[object, ...], bool] = {}
    found = set()
    for dataset in datasets:
        key = re.sub(r"\d+", "*", dataset.name), dataset.dtype.kind, dataset.ndim
        if key not in known:
            known[key] = holds_images(file, path, dataset, guard)
        found |= {dataset.name.lstrip("/")} if known[key] else set()
    return found


def _describe(dataset: h5py.Dataset, cache: CacheSettings, groups: Mapping[str, str]) -> DatasetInfo:
    properties = dataset.id.get_create_plist()
    numbers = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    grid = ChunkGrid(tuple(dataset.shape or ()), dataset.chunks, dataset.dtype.itemsize, bool(numbers))
    usable = bool(grid.shape)
    cached = usable and grid.chunk_bytes <= cache.nbytes
    num_unwritten = count_unwritten(dataset)
    reads = grid.reads_per_sample(cached) if usable else 0
    return DatasetInfo(
        name=dataset.name.lstrip("/"),
        shape=grid.shape,
        dtype=str(dataset.dtype),
        layout=LAYOUTS.get(properties.get_layout(), "unknown"),
        chunks=grid.chunks,
        filters=[KNOWN_FILTERS.get(number, f"filter {number}") for number in numbers],
        edges_unfiltered=bool(numbers and partial_chunks_are_plain(properties)),
        stored_bytes=dataset.id.get_storage_size(),
        num_chunks=grid.num_chunks if usable else 0,
        chunk_bytes=grid.chunk_bytes,
        sample_bytes=grid.sample_bytes,
        chunks_per_sample=grid.chunks_per_sample if usable else 0,
        reads_per_sample=reads,
        amplification=grid.amplification(cached) if usable else 1.0,
        verdict=_verdict(dataset, grid, reads, groups),
        num_unwritten=num_unwritten,
        reads_as=unwritten_value(dataset) if num_unwritten else "",
    )


def _verdict(dataset: h5py.Dataset, grid: ChunkGrid, reads: int, groups: Mapping[str, str]) -> str:
    if part := groups.get(dataset.name.lstrip("/").rpartition("/")[0]):
        return part
    if not grid.shape:
        return "a single value, which has no axis of samples"
    if is_vlen(dataset):
        return VLEN
    if dataset.dtype.kind not in "biufS":
        return f"type {dataset.dtype} is neither a number nor a string of fixed length"
    if 0 in grid.shape:
        return "empty"
    if dataset.is_virtual:
        return "a view of other files; run info on those files"
    if grid.chunks is None:
        return "good: each sample is stored in consecutive bytes"
    if grid.chunks_per_sample > 1:
        return f"bad: each sample is cut into {grid.chunks_per_sample:,} chunks, which take {reads:,} reads"
    return "good: each chunk contains complete samples"


def _describe_images(file: h5py.File, path: Path, name: str, header: Header) -> ImagesInfo:
    field = describe_images(file[name], path, name, header.chunk_samples)
    sizes = read_image_sizes(file[name], path, field, read_indptr(file, path, field))
    heights, widths = (
        (int(sizes_of_axis.min()), int(sizes_of_axis.max())) for sizes_of_axis in (sizes.heights, sizes.widths)
    )
    raw_bytes = int((sizes.heights.astype(np.int64) * sizes.widths).sum()) * field.channels
    return ImagesInfo(name, field.form, field.num_rows, field.num_entries, heights, widths, raw_bytes)


# ---- sparse matrices


def _find_matrices(file: h5py.File, path: Path, names: Iterable[str]) -> list[MatrixInfo]:
    """Describe the sparse matrices of a file that h5chunk did not write.

    The caller has checked the datasets in ``names``; no others are opened.
    """
    groups = [name for name in find_matrix_groups(names) if isinstance(file[name], h5py.Group)]
    return [_describe_group(file[name], path, name, _convert_command(file, path, name)) for name in groups]


def _convert_command(file: h5py.File, path: Path, name: str) -> str:
    """Return the command that converts a matrix of an AnnData or 10x file; empty for other files."""
    members, (parent, _, last) = {*file}, name.rpartition("/")
    layer: list[str] | None = None
    if {"X", "obs", "var"} <= members and (parent == "layers" or name in ("X", "raw/X")):
        layer = [] if name == "X" else ["--layer", last if parent == "layers" else "raw"]
    elif not parent and "barcodes" in file[name]:
        layer = ["--layer", name] if len(members) > 1 else []
    return "" if layer is None else shell_command(["h5chunk", "convert", str(path), "NEW.h5", *layer])


def _describe_group(group: h5py.Group, path: Path, name: str, command: str) -> MatrixInfo:
    data = group["data"]
    matrix = MatrixInfo(name, "", None, None, math.prod(data.shape), str(data.dtype), _stored_bytes(group))
    try:
        field = describe_matrix(group, path, name, None)
    except FileError as error:
        reason = str(error).removeprefix(f"{printable(path)}: {name!r} ").partition(": ")[0]
        return replace(matrix, verdict=f"{reason}; {command} converts it" if command else reason)
    source = python_text(str(path))
    source = source if name == MATRIX else f"h5chunk.ChunkDataset({source}, fields=[{python_text(name)}])"
    verdict = f"its rows can be read as samples: h5chunk.ChunkLoader({source}, {BATCH})"
    if data.dtype.itemsize > 4:
        verdict += f", as float32; transforms=[Dense(torch.float64)] keeps all digits of {data.dtype}"
    if command:
        verdict += f"; {command} makes a shuffled file, which is smaller if values are counts"
    return replace(matrix, kind=CSR, num_rows=field.num_rows, num_columns=field.num_columns, verdict=verdict)


def _describe_matrix(file: h5py.File) -> MatrixInfo | None:
    """Describe the matrix of an h5chunk file; return None if it has no matrix.

    Raises FileError if the matrix is damaged.
    """
    matrix = read_matrix(file)
    if matrix is None:
        return None
    item = file[MATRIX]
    info = MatrixInfo(
        MATRIX,
        matrix.kind,
        matrix.num_rows,
        matrix.num_columns,
        matrix.num_entries,
        matrix.dtype,
        _stored_bytes(item),
        scale=matrix.scale,
        pattern=matrix.pattern,
    )
    if matrix.num_entries is None:
        return info
    sizes = np.diff(item["indptr"][()])
    if (sizes < 0).any():
        raise FileError(f"{printable(file.filename)}: is damaged (the row starts in {MATRIX}/indptr decrease)")
    data, value_range = item["data"], None
    if data.size and data.nbytes <= LOOK_BYTES:
        parts = (data[start : start + PART_VALUES] for start in range(0, len(data), PART_VALUES))
        lows, highs = zip(*((float(part.min()), float(part.max())) for part in parts), strict=True)
        value_range = min(lows) / matrix.scale, max(highs) / matrix.scale
    return replace(
        info,
        density=matrix.num_entries / (matrix.num_rows * matrix.num_columns),
        median_row_entries=float(np.median(sizes)),
        max_row_entries=int(sizes.max()),
        value_range=value_range,
    )


def _stored_bytes(item: h5py.Group | h5py.Dataset) -> int:
    datasets = [item] if isinstance(item, h5py.Dataset) else [item[part] for part in MATRIX_PARTS]
    return sum(dataset.id.get_storage_size() for dataset in datasets)
