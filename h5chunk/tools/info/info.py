"""Describe the contents of HDF5 files, and how well their layout suits training."""

from __future__ import annotations

import math
import os
import random
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk import native
from h5chunk.errors import (
    FieldError,
    FileError,
    H5ChunkError,
    OptionError,
    UnsupportedError,
    names_text,
    printable,
    shown,
)
from h5chunk.machine import available_cores
from h5chunk.paths import takes_paths
from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.sample_source import shape_text
from h5chunk.sources.keyed import LOOM, LOOM_MEMBERS
from h5chunk.store.format.header import CSR, MATRIX, Header, lost_fields, read_header, read_matrix
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.child import in_child, limited_memory
from h5chunk.store.hdf5.chunk_table import count_unwritten, is_text, is_vlen, partial_chunks_are_plain, unwritten_value
from h5chunk.store.hdf5.codecs import KNOWN_FILTERS
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import DAMAGES, errors_as, opened
from h5chunk.store.hdf5.packing import Packing, packing_of
from h5chunk.store.hdf5.types import element_of, members_of, type_text
from h5chunk.store.read.encoded import holds_images
from h5chunk.store.read.fields import (
    MATRIX_PARTS,
    Contents,
    Field,
    default_fields,
    describe_matrix,
    find_matrix_groups,
)
from h5chunk.store.read.files import Paths, list_files, open_reader, single_file
from h5chunk.store.read.fileset import MIN_IMAGES, are_images
from h5chunk.store.read.ragged import (
    ImagesField,
    describe_images,
    find_image_groups,
    read_image_sizes,
    read_indptr,
)
from h5chunk.store.read.source import Source
from h5chunk.store.read.vlen import describe_vlen
from h5chunk.tools.chunk_cache import ChunkCacheInfo, cache_of_file
from h5chunk.tools.info.conventions import is_keras, is_matlab, why_no_data
from h5chunk.tools.info.layouts import Recognised, loader_code, note_on_volume, recognise
from h5chunk.tools.info.report import DatasetInfo, FileInfo, FolderInfo, ImagesInfo, MachineInfo, MatrixInfo
from h5chunk.tools.info.summary import (
    BATCH,
    IMAGES,
    MAX_FIELDS,
    SINGLE,
    TABLE,
    TRUSTED,
    VLEN,
    images_code,
    matlab_code,
    options_text,
    order_key,
    training_code,
    training_fields,
)
from h5chunk.tools.measure.machine import available_bytes, cuda_device, default_cache, library_versions
from h5chunk.tools.progress import Progress
from h5chunk.tools.report import code as unbroken
from h5chunk.tools.report import python_text, shell_command
from h5chunk.urls import url_of

PART_VALUES = 1 << 20  # values of a matrix that are read at a time
LOOK_BYTES = 256 << 20  # the range of values is computed only for matrices with at most this size of values
RUNS = {"offsets": re.compile(r"(.*_)?(offsets|ptr|indptr|ptrs)"), "lengths": re.compile(r"(.*_)?(lengths?|lens?)")}
EPISODE_ENDS = ("terminals", "timeouts", "dones", "done", "is_last", "is_terminal")
LOOKED_AT, MAX_ATTRIBUTES = 1000, 100  # samples whose attributes are looked at, and attributes of each
NO_LABELS = ("scale_factor", "add_offset", "_FillValue", "missing_value", "valid_min", "valid_max", "_Netcdf4Dimid")
LAYOUTS = {
    h5py.h5d.COMPACT: "compact",
    h5py.h5d.CONTIGUOUS: "contiguous",
    h5py.h5d.CHUNKED: "chunked",
    h5py.h5d.VIRTUAL: "virtual",
}


@takes_paths("path")
def info(
    path: Paths | None = None,
    *,
    trusted: bool = False,
    show_all: bool = False,
    stats: bool = False,
    fields: Sequence[str] = (),
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
        Whether to follow links and virtual datasets to other files.
    show_all : bool
        Whether the text lists every dataset of a file. Default: a summary that fits on a screen, with one line for
        datasets whose names differ only in their numbers.
    stats : bool
        Whether to read the fields to train on, compute mean and standard deviation of each of their channels, and store
        them beside the file, where `ChunkDataset.statistics` finds them. For a URL they are not stored.
    fields : sequence of str
        Datasets whose statistics are computed instead, such as ``obsm/X_pca``, a column ``events/pt``, or
        ``*/obs/state`` for all episodes or volumes.
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
    if fields and not stats:
        raise OptionError("fields chooses what stats (--stats) describes: pass stats, too, or leave out fields")
    if path is None:
        return MachineInfo(available_cores(), available_bytes(), native.available(), cuda_device(), library_versions())
    if (only := single_file(path)) is not None:
        found = replace(_info_file(only, trusted), show_all=show_all)
        return _with_statistics(found, only, trusted, stats, fields, progress)
    files, broken = [], {}
    num_bytes = 0
    for file in list_files(path):
        num_bytes += file.stat().st_size if file.is_file() else 0
        try:
            files.append(_with_statistics(_info_file(file, trusted), file, trusted, stats, fields, progress))
        except FileError as error:
            broken[str(file)] = str(error).removeprefix(f"{printable(file)}: ")
    name = str(path) if isinstance(path, (str, Path)) else f"{len(files) + len(broken)} files"
    argument = python_text(str(path)) if isinstance(path, (str, os.PathLike)) else _list_text(map(str, path))
    described = _describe_episodes(argument, files, trusted) or _describe_set(path, argument, files, trusted)
    return FolderInfo(path=name, num_bytes=num_bytes, files=tuple(files), broken=broken, **described)


def _describe_episodes(argument: str, files: Sequence[FileInfo], trusted: bool) -> dict[str, Any]:
    """Return the attributes of `FolderInfo` that describe files of one layout; empty if they are anything else.

    ``argument`` is the path of the files as a Python expression.
    """
    if len({(file.layout, *file.fields) for file in files}) != 1 or not files[0].layout:
        return {}
    found = [recognise(file.datasets, argument, trusted=trusted) for file in files]
    if found[0] is None or any(other is None or other.code != found[0].code for other in found):
        one = shell_command(["h5chunk", "info", files[0].path])
        return {"layout": files[0].layout, "notes": [f"{one} describes a single file"]}
    return {"layout": found[0].name, "code": found[0].code, "notes": list(found[0].notes)}


def _with_statistics(
    file: FileInfo, path: Path, trusted: bool, stats: bool, fields: Sequence[str], progress: Progress | None
) -> FileInfo:
    """If ``stats``, compute the statistics of ``fields``, or else of the fields to train on, and store them."""
    if not stats:
        return file
    from h5chunk.tools.measure.statistics import has_statistics, store_statistics  # imports torch

    names = [name.strip("/") for name in fields] or [*file.fields]
    alike = {name: _like(file.datasets, name) for name in names}
    stored = {name: next(iter(items), None) for name, items in alike.items()}
    volumes = {
        name: [item.name for item in items]
        for name, items in alike.items()
        if len({item.shape[1:] for item in items}) > 1
    }
    images = {name for name, item in stored.items() if item and item.has_images}
    if not fields:
        names = [
            name
            for name, item in stored.items()
            if item and (name in images or has_statistics(item.dtype, item.shape[1:]))
        ]
    if not names:
        raise FieldError(
            f"{printable(file.path)}: has no dense field of floats or arrays that info would train on: name the "
            "datasets, such as --fields obsm/X_pca, or leave out --stats"
        )
    packings = {name: item.packing for name, item in stored.items() if item}
    missing = {name: packing.stored_missing if (packing := packings.get(name)) else () for name in names}
    found = store_statistics(path, missing, images, volumes, trusted=trusted, progress=progress)
    return replace(file, statistics=found)


def _like(datasets: Sequence[DatasetInfo], name: str) -> list[DatasetInfo]:
    """Return the trainable datasets whose names match ``name``, where * matches the name of any group."""
    pattern = re.compile(re.escape(name).replace(r"\*", "[^/]*"))
    return [item for item in datasets if (item.can_train or item.has_images) and pattern.fullmatch(item.name)]


def _describe_set(path: Paths, argument: str, files: Sequence[FileInfo], trusted: bool) -> dict[str, Any]:
    """Return the attributes of `FolderInfo` that describe the files as one data set.

    The fields are those that readers select by default, or else those that all files have. If the files do not match,
    the attributes are only ``mismatch``, and the code that joins them, if there is any. ``argument`` is the path of the
    files as a Python expression.
    """
    names: list[str] = []
    try:
        try:
            reader = open_reader(path, trusted=trusted)
        except FieldError:
            names = [name for name in files[0].fields if all(name in file.fields for file in files)] if files else []
            if not files:
                raise
            if not names:
                return _describe_parts(files, trusted) or {"mismatch": _nothing_common(files)}
            reader = open_reader(path, fields={name: name for name in names}, trusted=trusted)
    except H5ChunkError as error:
        return _describe_parts(files, trusted) or {"mismatch": str(error).replace(" (--fields)", "")}
    fields = []
    images = files[0].images if files else []
    for name, field in reader.fields.items():
        kind = str(field.dtype) if isinstance(field, Field) else "sparse row of"
        kind = f"{field.form}, of any size" if isinstance(field, ImagesField) else kind
        fields.append(f"{name} ({f'{kind} {shape_text(field.sample_shape)}'.strip()})")
    stored = [field.dataset for field in reader.fields.values()]
    more = options_text([item for file in files for item in file.datasets], stored, trusted=trusted)
    if are_images(reader.readers):
        code = loader_code(f"data = h5chunk.Keyed({argument}, [{', '.join(map(python_text, stored))}]{more})")
        note = "if the rows of the files are samples instead, h5chunk.ChunkDataset reads them"
        return {"layout": "an image in each file", "code": code, "notes": [note]}
    splits = {
        Path(file.path).stem: file.path for file in files if file.header and file.header.options.get("split_files")
    }
    notes = [f"each file is a split ({names_text(splits)}); the code reads one of them"] if splits else []
    if splits:
        argument = python_text(splits.get("train", files[0].path))
    return {
        "notes": notes or _notes_on_bags(argument, files, reader),
        "num_samples": tuple(single.num_samples for single in reader.readers),
        "fields": tuple(fields),
        "class_names": reader.header.class_names if reader.header else (),
        "chunk_samples": tuple(single.chunk_samples for single in reader.readers),
        "is_shuffled": bool(reader.header and reader.header.shuffled),
        "code": training_code(argument, [*reader.fields], () if names else [*reader.fields], images, more),
    }


def _nothing_common(files: Sequence[FileInfo]) -> str:
    """Say that no field is in all files, with the fields of two that differ."""
    first = files[0]
    other = next((file for file in files if not {*first.fields[:1]} & {*file.fields}), files[-1])
    listed = "; ".join(
        f"{file.path} has {names_text(file.fields[:MAX_FIELDS]) or 'no fields'}" for file in (first, other)
    )
    one = shell_command(["h5chunk", "info", first.path])
    return f"no field is in all files ({listed}): describe one at a time ({one}), or only files that are alike"


def _notes_on_bags(argument: str, files: Sequence[FileInfo], reader: Source) -> list[str]:
    """Return a note on how to read each file as one sample, if the files differ in length; empty otherwise."""
    if (
        len(files) < MIN_IMAGES
        or reader.header is not None
        or len({single.num_samples for single in reader.readers}) < 3  # as shards, of which the last one is shorter
    ):
        return []
    code = unbroken(f"data = h5chunk.Keyed({argument}, [{python_text(reader.main.dataset)}])")
    return [f"if each file is one sample instead: {code}"]


def _split_notes(header: Header | None, names: Iterable[str], path: Path) -> list[str]:
    """Return a note if the samples of a file belong to several splits, which a loader mixes."""
    if header is None or "split" not in names or header.options.get("split_files"):
        return []
    data = unbroken(f"data = h5chunk.ChunkDataset({python_text(shown(path))})")
    subset = unbroken('data.subset(data.values("split") == "train")')
    return [f"the field 'split' has the split of each sample: with {data}, {subset} selects the samples of one split"]


def _lost_notes(file: h5py.File, header: Header | None, path: Path) -> list[str]:
    """Return a note on fields that have checksums but do not exist."""
    lost = lost_fields(file) if header is not None else []
    if not lost:
        return []
    verify = shell_command(["h5chunk", "verify", shown(path)])
    return [f"{', '.join(map(repr, lost[:4]))} has checksums, but does not exist: it was renamed or deleted ({verify})"]


def _describe_parts(files: Sequence[FileInfo], trusted: bool) -> dict[str, Any]:
    """Describe files that each have other fields of the same samples; empty if they are anything else."""
    owners = {name: file for file in files for name in file.fields}
    items = [item for name, file in owners.items() for item in _like(file.datasets, name)[:1]]
    is_split = 1 < len(files) == len({file.fields[0] for file in files if file.fields})
    if not is_split or len(items) < len(owners) or len({item.shape[0] for item in items}) != 1:
        return {}
    names = [item.name for item in sorted(items, key=order_key)]
    of_fields = ", ".join(f"{python_text(name)}: {python_text(owners[name].path)}" for name in names)
    return {
        "mismatch": "each file has other fields of the same samples; the code joins row i of all files, and key='NAME' "
        "joins by a dataset of ids",
        "code": training_code(f"{{{of_fields}}}", names, names, (), options_text(items, names, trusted=trusted)),
    }


def _list_text(names: Iterable[str]) -> str:
    return f"[{', '.join(map(python_text, names))}]"


def _info_file(path: Path, trusted: bool) -> FileInfo:
    return in_child(path, _describe_file, path, trusted)


def _describe_file(path: Path, trusted: bool) -> FileInfo:
    with limited_memory(path, trusted), opened(path) as file:
        header = read_header(file)
        guard = Guard(path, trusted)
        if header and isinstance(guard.find(file, MATRIX), h5py.Group):
            guard.check_matrix(file, MATRIX)
        matrix = _describe_matrix(file) if header else None
        datasets, refused = _list_datasets(file, guard, by_h5chunk=header is not None)
        names = [*datasets]
        matrices = [matrix] if matrix is not None else _find_matrices(file, path, names)
        images = [_describe_images(file, path, name, header) for name in find_image_groups(names)] if header else []
        groups = {item.name: "part of the matrix" for item in matrices}
        groups |= {item.name: f"part of {item.name}" for item in images}
        cache = default_cache()
        in_keras = header is None and is_keras(file)
        described = []
        for name, dataset in datasets.items():
            why = groups.get(name.rpartition("/")[0], "") or why_no_data(name, dataset, in_keras=in_keras)
            described.append(_describe(name, dataset, path, cache, why))
        images_in = _find_image_rows(file, datasets, guard) if header is None else set()
        described = [replace(item, verdict=IMAGES) if item.name in images_in else item for item in described]
        found = _find_code(file, path, described, matrices, images, header, trusted)
        return FileInfo(
            path=shown(path),
            num_bytes=path.stat().st_size,
            header=header,
            default_cache=cache,
            datasets=described,
            matrices=matrices,
            images=images,
            refused=[str(error).removeprefix(f"{printable(path)}: ") for error in refused],
            fields=found.fields,
            code=found.code,
            layout=found.name,
            notes=[*found.notes, *_split_notes(header, datasets, path), *_lost_notes(file, header, path)],
            chunk_cache=_find_cache(file, path, found, described, matrices, images, header),
        )


def _find_code(
    file: h5py.File,
    path: Path,
    datasets: Sequence[DatasetInfo],
    matrices: Sequence[MatrixInfo],
    images: Sequence[ImagesInfo],
    header: Header | None,
    trusted: bool,
) -> Recognised:
    """Return the layout of a file, if it is known, its fields, and the code that loads them."""
    name, argument = shown(path), python_text(shown(path))
    if header is None and is_keras(file):
        return Recognised("weights of a Keras model, which are not samples", [], [])
    if header is None and is_matlab(file):
        fields, code = matlab_code(name, datasets)
        shapes = [
            f"{item.name} is {shape_text(item.shape[::-1])} in MATLAB" for item in datasets if item.name in fields
        ]
        if any("sample_axis" in line for line in code):
            copied = f"file['NEW'] = file[{fields[0]!r}][:].T"
            shapes.append(f"if repr(data) says that much more is read than used, make transposed copies: {copied}")
        return Recognised("written by MATLAB, whose axes HDF5 has in reverse order", fields, code, notes=shapes)
    if header is None and not matrices:
        attributes_of = partial(_sample_attributes, file)
        if (found := recognise(datasets, argument, trusted=trusted, attributes_of=attributes_of)) is not None:
            return found
        if (code := images_code(name, datasets)) and url_of(path):
            note = "download the file: h5py, which copies its images for training, reads no URLs"
            return Recognised("", [], [], notes=[note])
        if code:
            return Recognised(
                "", [], code, notes=["the code copies the images unchanged, and decodes them in training"]
            )
    fields = training_fields(datasets, matrices, images, header)
    if not fields and (columns := _table_columns(file, datasets)):
        return Recognised("", columns, training_code(argument, columns, (), (), options_text([], [], trusted=trusted)))
    try:
        usual = [*default_fields(file, path, header).values()]
    except FieldError:
        usual = []
    notes = [
        f"{' and '.join(map(repr, ends))} {'seem' if ends[1:] else 'seems'} to mark the last rows of episodes; for "
        f"windows within episodes: data = h5chunk.Windows({argument}, "
        f"{{{_rows_of(datasets, num_rows, fields, ends)}}}, 16, episode_ends={(ends if ends[1:] else ends[0])!r}"
        f"{TRUSTED if trusted else ''})"
        for num_rows, ends in _episode_ends(datasets, fields).items()
    ]
    if header is None and not matrices:
        notes += note_on_volume(datasets, fields, argument, trusted=trusted)
        notes += _notes_on_runs(argument, datasets, fields, trusted)
    if all(file.id.links.exists(name.encode()) for name in LOOM_MEMBERS):
        notes.append(LOOM)
    more = options_text(datasets, fields, trusted=trusted)
    code = training_code(argument, fields, usual, images, more) if fields else []
    return Recognised("", fields, code, notes=notes)


def _table_columns(file: h5py.File, datasets: Sequence[DatasetInfo]) -> list[str]:
    """Return the largest table, or the columns of it that are numbers if not all are; empty if there is none."""
    tables = [item for item in datasets if item.verdict.startswith(TABLE) and item.num_bytes]
    if not tables:
        return []
    name = max(tables, key=lambda item: item.num_bytes).name
    columns = [*_columns(file[name].dtype)]
    numbers = ["/".join((name, *path)) for path, dtype in columns if dtype.kind in "biuf"]
    return [name] if len(numbers) == len(columns) else numbers[:MAX_FIELDS]


def _columns(dtype: np.dtype, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], np.dtype]]:
    for name in dtype.names or ():
        column = dtype[name].base
        yield from _columns(column, (*path, name)) if column.names else [((*path, name), column)]


def _sample_attributes(file: h5py.File, pattern: str, keys: Collection[str]) -> list[str]:
    """Return the names of the attributes that samples have as single numbers, by those of some of the samples."""
    counts: Counter[str] = Counter()
    start = pattern.partition("*")[0]
    some = random.Random(0).sample(sorted(keys), min(len(keys), LOOKED_AT))
    for key in some:
        item = file[f"{start}{key}"]
        for name in islice(item.attrs, MAX_ATTRIBUTES):
            with suppress(*DAMAGES, TypeError):
                attribute = item.attrs.get_id(name)
                counts[name] += attribute.shape == () and attribute.dtype.kind in "biuf"
    return [name for name, count in sorted(counts.items()) if count == len(some) and name not in NO_LABELS][:MAX_FIELDS]


def _notes_on_runs(path: str, datasets: Sequence[DatasetInfo], fields: Sequence[str], trusted: bool) -> list[str]:
    """Return a note if a dataset may divide the rows of the main field into samples, and those of fields as long.

    ``path`` is a Python literal.
    """
    rows = {item.name: item.shape[0] for item in datasets if item.can_train}
    for item in datasets if fields and fields[0] in rows else ():
        folder, _, name = item.name.rpartition("/")
        is_list = item.can_train and item.num_axes == 1 and np.dtype(item.dtype).kind in "iu"
        if not is_list or folder != fields[0].rpartition("/")[0] or item.shape[0] >= rows[fields[0]]:
            continue
        for argument, pattern in RUNS.items():
            if pattern.fullmatch(name.lower()):
                divided = [name for name in fields if rows.get(name) == rows[fields[0]]]
                pairs = ", ".join(f"{python_text(name)}: {python_text(item.name)}" for name in divided)
                runs = f"{argument}={{{pairs}}}{TRUSTED if trusted else ''}"
                code = f"data = h5chunk.ChunkDataset({path}, fields={_list_text(divided)}, {runs})"
                return [f"if {item.name!r} has the {argument} of samples that are runs of rows: {code}"]
    return []


def _episode_ends(datasets: Sequence[DatasetInfo], fields: Sequence[str]) -> dict[int, list[str]]:
    """Return the fields that mark the ends of episodes, by their number of rows.

    An episode may end in a terminal state, which one field marks, or because its time is over, which another marks.
    """
    ends: dict[int, list[str]] = {}
    for item in datasets if len(fields) > 1 else ():
        if item.name in fields and item.num_axes == 1 and item.name.rpartition("/")[2].lower() in EPISODE_ENDS:
            ends.setdefault(item.shape[0], []).append(item.name)
    return ends


def _rows_of(datasets: Sequence[DatasetInfo], num_rows: int, fields: Sequence[str], ends: Sequence[str]) -> str:
    """Return the fields with this number of rows, other than ``ends``, as the inside of a Python dictionary."""
    names = [item.name for item in datasets if item.name in fields and item.shape[0] == num_rows]
    return ", ".join(
        f"{python_text(name.rpartition('/')[2])}: {python_text(name)}" for name in names if name not in ends
    )


def _find_cache(
    file: h5py.File,
    path: Path,
    found: Recognised,
    datasets: Sequence[DatasetInfo],
    matrices: Sequence[MatrixInfo],
    images: Sequence[ImagesInfo],
    header: Header | None,
) -> ChunkCacheInfo | None:
    """Describe the chunk cache for the largest of the fields whose rows are samples."""
    rows = {item.name: item.num_rows or 0 for item in matrices if item.name in found.fields}
    rows |= {item.name: item.num_images for item in images if item.name in found.fields}
    sizes = {item.name: item.sample_bytes for item in datasets if item.name in found.fields and item.can_train}
    name = next(iter(rows), None) or max(sizes, key=lambda name: sizes[name], default=None)
    if name is None or any("h5chunk.convert(" in line for line in found.code):
        return None
    num_rows = rows.get(name) or next(item.shape[0] for item in datasets if item.name == name)
    with errors_as(FileError, f"{printable(path)}: {name!r} cannot be described"):
        return cache_of_file(file, path, python_text(shown(path)), name, num_rows, header)


def _list_datasets(
    file: h5py.File, guard: Guard, *, by_h5chunk: bool
) -> tuple[dict[str, h5py.Dataset], list[FileError]]:
    """Return the datasets by path, sorted, and the errors of datasets that were refused.

    The group /h5chunk is left out.
    """
    datasets: dict[str, h5py.Dataset] = {}
    refused = []
    for name, item in sorted(guard.walk(file), key=lambda pair: pair[0]):
        if by_h5chunk and name.startswith(f"{GROUP}/"):
            continue
        try:
            if isinstance(item, FieldError):
                raise item
            with errors_as(FieldError, f"{name!r} has a type that NumPy does not have"):
                if not (by_h5chunk and name == f"{MATRIX}/data"):  # a binary matrix stores no values
                    guard.check_field(item, name)
                if item.dtype:
                    datasets[name] = item
        except FileError as error:
            refused.append(error)
    return datasets, refused


def _find_image_rows(file: h5py.File, datasets: Mapping[str, h5py.Dataset], guard: Guard) -> set[str]:
    """Return the names of the datasets with an encoded image in each row.

    If the names of several datasets differ only in numbers, one is examined, and the others are taken to be like it.
    """
    known: dict[tuple[object, ...], bool] = {}
    found, contents = set(), Contents(file, guard)
    for name, dataset in datasets.items():
        key = re.sub(r"\d+", "*", name), dataset.dtype.kind, dataset.ndim
        if key not in known:
            known[key] = holds_images(contents, name, dataset)
        found |= {name} if known[key] else set()
    return found


def _describe(name: str, dataset: h5py.Dataset, path: Path, cache: CacheSettings, verdict: str) -> DatasetInfo:
    """Describe the dataset at the path ``name``. ``verdict`` says what it has, if it has no data of samples."""
    properties = dataset.id.get_create_plist()
    numbers = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    grid = ChunkGrid(tuple(dataset.shape or ()), dataset.chunks, dataset.dtype.itemsize, bool(numbers))
    usable = bool(grid.shape)
    cached = usable and grid.chunk_bytes <= cache.nbytes
    num_unwritten = count_unwritten(dataset)
    reads = grid.reads_per_sample(cached) if usable else 0
    packing, can_decode = _packing_of(dataset)
    return DatasetInfo(
        name=name,
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
        verdict=verdict or _verdict(dataset, path, grid, reads),
        num_unwritten=num_unwritten,
        reads_as=unwritten_value(dataset) if num_unwritten else "",
        packing=packing,
        can_decode=can_decode,
    )


def _packing_of(dataset: h5py.Dataset) -> tuple[Packing | None, bool]:
    """Return what the numbers mean, and whether the attributes that say so fit the conventions."""
    with suppress(FieldError, *DAMAGES):
        return packing_of(dataset, dataset.dtype.newbyteorder("="), ""), True
    return None, False


def _verdict(dataset: h5py.Dataset, path: Path, grid: ChunkGrid, reads: int) -> str:
    if not grid.shape:
        return SINGLE if dataset.shape == () else "empty"
    if is_vlen(dataset):
        try:
            describe_vlen(dataset, path, "")
        except FileError as error:
            return str(error).partition(f"{dataset.name!r} ")[2] or str(error)
        return VLEN
    if problem := _type_verdict(dataset):
        return problem
    if 0 in grid.shape:
        return "empty"
    if dataset.is_virtual:
        return "good: a view, which HDF5 reads in one thread"
    if grid.chunks is None:
        return "good: each sample is stored in consecutive bytes"
    if grid.chunks_per_sample > 1:
        return f"bad: each sample is cut into {grid.chunks_per_sample:,} chunks, which take {reads:,} reads"
    return "good: each chunk contains complete samples"


def _type_verdict(dataset: h5py.Dataset) -> str:
    """Say how to read a dataset whose elements aren't plain numbers or strings, or why it cannot be read."""
    kind = dataset.id.get_type()
    if columns := members_of(kind):
        name = f"{dataset.name.strip('/')}/{'/'.join(columns[0])}"
        return f"is a {type_text(kind)}: ChunkDataset(path, fields=[{name!r}]) reads a column"
    if is_text(dataset):
        return "has strings of variable length: name it in fields to read them as str, with a DataLoader"
    try:
        element = element_of(kind, "")
    except UnsupportedError as error:
        return str(error).strip()
    return f"has elements of {type_text(kind)}: name it in fields to read it with these axes" if element.shape else ""


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
