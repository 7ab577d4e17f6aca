"""Find the datasets of a file that contain samples, and plan their chunks.

A field is a dataset whose first axis indexes samples. All fields are as long as a main field: a dataset that the user
names, or else ``images``, ``X`` of AnnData, or the largest dataset. If other groups, such as episodes, have a dataset
like it, all datasets in these groups are fields, too. A sparse matrix is a group of ``data``,
``indices`` and ``indptr``. Images of any size, which only h5chunk files have, are a group of ``data``, ``offsets`` and
tables of their sizes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, OptionError, as_text, printable
from h5chunk.plan.csr import INDEX_CHUNK_BYTES, plan_csr
from h5chunk.plan.layout import MAX_CHUNK_BYTES, Layout, plan_layout
from h5chunk.store.format.header import Header
from h5chunk.store.format.spec import GROUP, IMAGE_TABLES
from h5chunk.store.hdf5.patterns import natural
from h5chunk.store.read.ragged import describe_images, find_image_groups
from h5chunk.store.rewrite.survey import NUMBERS_AND_TEXT, DatasetFacts, Survey
from h5chunk.store.write.any_size import CHUNK_BYTES
from h5chunk.tools.info.layouts import recognise
from h5chunk.tools.repack.options import RepackOptions
from h5chunk.tools.report import shell_command

PARTS = ("indices", "data", "indptr")  # datasets of a sparse matrix
IMAGES = b"images"


@dataclass(frozen=True)
class RaggedGroup:
    """A group of samples that differ in length: a sparse matrix, or images of any size.

    ``lists`` are the datasets in which the entries of all samples follow each other: the column indices and the values
    of a matrix, or the bytes of images.
    """

    path: bytes
    kind: str  # csr, csc or images; empty if unknown
    shape: tuple[int, int]  # zeros if unknown
    lists: tuple[DatasetFacts, ...]
    pointers: DatasetFacts
    tables: tuple[DatasetFacts, ...] = ()  # one value per sample: the sizes of images

    @property
    def parts(self) -> tuple[DatasetFacts, ...]:
        return *self.lists, self.pointers, *self.tables

    @property
    def has_samples(self) -> bool:
        """True if the entries of each sample are stored one after another."""
        return self.kind in ("csr", "images")

    @property
    def num_entries(self) -> int:
        return self.lists[0].num_rows

    @property
    def num_bytes(self) -> int:
        """Size of all stored entries, in bytes. A matrix whose values are all 1 stores no values."""
        first, *others = self.lists
        return self.num_entries * (first.item_bytes + sum(facts.item_bytes for facts in others if facts.stored_bytes))

    def chunk_entries(self, compressed: bool) -> int:
        """Return the number of entries per chunk of ``lists``."""
        num_bytes = CHUNK_BYTES if self.kind == "images" and not compressed else INDEX_CHUNK_BYTES
        return max(1, min(num_bytes // self.lists[0].item_bytes, self.num_entries))


@dataclass(frozen=True)
class Samples:
    """The fields, matrices and images of the file to repack."""

    num_samples: int  # length of the main field; 0 if no dataset has samples
    main: str  # name of the main field
    layouts: dict[int, Layout]  # the layout for each number of samples; usually there is only one
    fields: list[DatasetFacts] = field(default_factory=list)  # all datasets of these lengths with fixed-size types
    other_datasets: list[DatasetFacts] = field(default_factory=list)  # datasets of these lengths with other types
    ragged: list[RaggedGroup] = field(default_factory=list)
    anndata: bool = False  # whether the file was written by AnnData
    too_large: list[str] = field(default_factory=list)  # datasets whose rows are too large for a chunk or memory
    num_alike: int = 0  # number of datasets like the main field in other groups, such as episodes
    cut: list[str] = field(default_factory=list)  # datasets that are no fields, though samples are cut into chunks

    @property
    def layout(self) -> Layout | None:
        """The layout of the main field."""
        return self.layouts.get(self.num_samples)


def find_samples(
    file: h5py.File, survey: Survey, header: Header | None, options: RepackOptions, part_bytes: int
) -> Samples:
    """Find the fields, and plan their chunks."""
    label = printable(file.filename)
    beside = f"{GROUP}/".encode() if header is not None else b"\0"
    datasets = {path: facts for path, facts in survey.datasets.items() if not path.startswith(beside)}
    kept = kept_paths(options)
    _check_kept(kept, file, survey, label)
    excluded = {path for path in datasets if any(path == each or path.startswith(each + b"/") for each in kept)}
    only = {_named(datasets, name, survey, label).path for name in options.fields if not options.shuffle}
    ragged: list[RaggedGroup] = []
    if not only:
        groups = (*_sparse_groups(file, survey, datasets, label), *_image_groups(file, datasets, header))
        ragged = [group for group in groups if not excluded & {part.path for part in group.parts}]
    parts = {facts.path for group in ragged for facts in group.parts}
    anndata = is_anndata(file)
    candidates = [facts for facts in datasets.values() if facts.num_rows and facts.path not in parts | excluded]
    large = [facts for facts in candidates if facts.grid.sample_bytes > min(part_bytes, MAX_CHUNK_BYTES)]
    if not options.shuffle and not options.fields:  # otherwise they raise an error later
        candidates = [facts for facts in candidates if facts not in large]
    mains = _main_fields(candidates, datasets, survey, ragged, header, options, anndata, label)
    if options.chunks and not options.fields:
        mains = [(facts.num_rows, facts.name) for facts in candidates if len(facts.grid.shape) == len(options.chunks)]
    lengths = dict(mains)
    if options.chunks:
        candidates = [facts for facts in candidates if len(facts.grid.shape) == len(options.chunks)]
        if not candidates:
            raise OptionError(f"{label}: chunks is {options.chunks}, but no field has {len(options.chunks)} axes")
    members = [facts for facts in candidates if facts.num_rows in lengths and (not only or facts.path in only)]
    alike: list[DatasetFacts] = []
    if mains and not (options.fields or options.chunks or anndata or ragged or header or options.needs_header):
        alike, paths = _find_alike(mains[0][1], candidates)
        members = [facts for facts in candidates if facts.num_rows in lengths or facts.path in paths]
        lengths |= {facts.num_rows: facts.name for facts in members}
    fields = [facts for facts in members if facts.is_fixed_size]
    layouts = {rows: _plan(rows, fields, ragged, options.chunk_samples) for rows in lengths}
    num_samples, main = mains[0] if mains else (0, "")
    others = [facts for facts in members if not facts.is_fixed_size]
    too_large = [] if only else [facts.name for facts in large]
    found = {facts.path for facts in (*fields, *large)} | parts | excluded
    left = [facts for path, facts in datasets.items() if path not in found and facts.num_rows and facts.is_fixed_size]
    cut = [] if options.fields or options.chunks else [facts.name for facts in left if facts.grid.chunks_per_sample > 1]
    return Samples(num_samples, main, layouts, fields, others, ragged, anndata, too_large, len(alike), cut)


def expand_fields(survey: Survey, names: Sequence[str]) -> tuple[str, ...]:
    """Replace names in which * stands for the name of a group, such as an episode, by those of all matching datasets.

    A name that no dataset matches is returned as it is.
    """
    stored = [as_text(os.fsdecode(path)) for path in survey.datasets]
    expanded = []
    for name in names:
        pattern = re.compile(re.escape(name.strip("/")).replace(r"\*", "[^/]*"))
        found = [each for each in stored if pattern.fullmatch(each)] if "*" in name and name not in stored else []
        expanded += sorted(found, key=natural) or [name]
    return tuple(dict.fromkeys(expanded))


def _find_alike(main: str, candidates: Sequence[DatasetFacts]) -> tuple[list[DatasetFacts], set[bytes]]:
    """Return the datasets that are like the main field, and the paths of all in their groups, such as episodes.

    They have its type, and their paths differ from its path in the name of a group, or only in numbers.
    """
    first = next((facts for facts in candidates if facts.name == main), None)
    if first is None:
        return [], set()
    parts, alike, groups = main.split("/"), [], set[tuple[str, ...]]()
    for facts in candidates:
        own = facts.name.split("/")
        if len(own) != len(parts) or facts is first or not _same_type(facts, first):
            continue
        differing = [at for at, (name, other) in enumerate(zip(own, parts, strict=True)) if name != other]
        is_group = len(differing) == 1 and differing[0] < len(parts) - 1
        if is_group or re.sub(r"\d+", "*", facts.name) == re.sub(r"\d+", "*", main):
            alike.append(facts)
            if differing[0] < len(parts) - 1:
                groups |= {tuple(names[: differing[0] + 1]) for names in (own, parts)}
    depths, found = {len(group) for group in groups}, {facts.path for facts in alike}
    for facts in candidates:
        own = facts.name.split("/")
        found |= {facts.path} if any(tuple(own[:depth]) in groups for depth in depths) else set()
    return alike, found


def _same_type(facts: DatasetFacts, other: DatasetFacts) -> bool:
    return facts.dtype == other.dtype and facts.grid.shape[1:] == other.grid.shape[1:]


def kept_paths(options: RepackOptions) -> set[bytes]:
    """Return the paths of the datasets and groups to copy unchanged, and ``OBJECT@ATTRIBUTE`` for attributes."""
    return {os.fsencode(name).strip(b"/") for name in options.keep}


def _check_kept(kept: set[bytes], file: h5py.File, survey: Survey, label: str) -> None:
    """Raise FieldError if something to keep does not exist."""
    paths = {node.path for node in survey.nodes if node.kind != "soft"}
    for path in sorted(kept - paths):
        item, _, attribute = path.rpartition(b"@")
        known = not item or item in paths
        if not known or attribute.decode("utf-8", "surrogateescape") not in file[item or b"/"].attrs:
            raise FieldError(
                f"{label}: has no dataset, group or attribute (OBJECT@ATTRIBUTE) {printable(path)!r}, which keep names"
            )


def _main_fields(
    candidates: list[DatasetFacts],
    datasets: dict[bytes, DatasetFacts],
    survey: Survey,
    ragged: list[RaggedGroup],
    header: Header | None,
    options: RepackOptions,
    anndata: bool,
    label: str,
) -> list[tuple[int, str]]:
    """Return the (length, name) of the main fields. All datasets of the same lengths become fields."""
    if options.fields:
        named = [_named(datasets, name, survey, label) for name in options.fields]
        for facts in named:
            if not facts.num_rows or not facts.is_fixed_size:
                raise FieldError(
                    f"{label}: {facts.name!r} of type {facts.dtype} and shape {facts.shape} cannot be a field: name "
                    "datasets of fixed-size elements with samples along the first axis"
                )
        return [(facts.num_rows, facts.name) for facts in named]
    matrix = next((group for group in ragged if group.path == b"X" or group.kind == "images"), None)
    if header is not None:
        if matrix is not None:
            return [(header.num_samples, printable(matrix.path))]
        whole = [facts for facts in candidates if facts.is_fixed_size and facts.num_rows == header.num_samples]
        first = datasets.get(IMAGES) or datasets.get(b"X")
        first = first or max(whole, key=lambda facts: facts.num_bytes, default=None)
        if first is None or first.num_rows != header.num_samples:
            raise FileError(
                f"{label}: is damaged, because no field has the {header.num_samples} samples that /{GROUP} records"
            )
        return [(header.num_samples, first.name)]
    usable = {facts.path: facts for facts in candidates if facts.is_fixed_size and facts.kind in NUMBERS_AND_TEXT}
    images = [usable[IMAGES]] if IMAGES in usable else []
    if anndata and (matrix is not None or b"X" in usable):
        return [(matrix.shape[0] if matrix is not None else usable[b"X"].num_rows, "X")]
    largest = sorted(usable.values(), key=lambda facts: facts.num_bytes)[-1:]
    rows = [group for group in ragged if group.kind == "csr" and group.shape[0]]
    if rows and not images:
        group = max(rows, key=lambda group: group.num_entries)
        entry_bytes = sum(facts.item_bytes for facts in group.lists)
        if not largest or group.num_entries * entry_bytes > largest[0].num_bytes:
            return [(group.shape[0], printable(group.path))]
    return [(facts.num_rows, facts.name) for facts in images or largest]


def _named(datasets: dict[bytes, DatasetFacts], name: str, survey: Survey, label: str) -> DatasetFacts:
    path = os.fsencode(name).strip(b"/")
    facts = datasets.get(path)
    if facts is None:
        left_out = f"{printable(path)!r} is left out: "
        for reason in survey.left_out or ():
            if reason.startswith(left_out):
                raise FieldError(f"{label}: {reason.removeprefix(left_out)}")
        for node in survey.nodes:
            if node.path == path and node.leads_to:
                target = printable(node.leads_to)
                raise FieldError(f"{label}: {printable(path)!r} is a link to {target!r}: name that dataset")
        names = ", ".join(facts.name for facts in list(datasets.values())[:8]) or "none"
        raise FieldError(f"{label}: has no dataset {printable(name)!r}; it has {names}")
    return facts


def _plan(num_rows: int, fields: list[DatasetFacts], ragged: list[RaggedGroup], chunk_samples: int | None) -> Layout:
    """Plan the chunks of all fields of one length. The largest of them determines the number of samples per chunk."""
    largest = max((facts.num_bytes for facts in fields if facts.num_rows == num_rows), default=0)
    rows = [group for group in ragged if group.has_samples and group.shape[0] == num_rows and group.shape[1]]
    for group in sorted(rows, key=lambda group: group.num_entries)[-1:]:
        if group.num_bytes < largest:
            continue
        if group.kind == "images":
            largest = group.num_bytes
        else:
            values = group.lists[1]
            dtype = np.dtype(f"V{values.item_bytes}") if values.stored_bytes else None
            return plan_csr(num_rows, group.shape[1], group.num_entries, value_dtype=dtype, chunk_samples=chunk_samples)
    return plan_layout(num_rows, max(1, largest // num_rows), chunk_samples)


def is_anndata(file: h5py.File) -> bool:
    """Return whether AnnData wrote the file, or it contains ``X``, ``obs`` and ``var`` like an AnnData file."""
    return _word(file, "encoding-type") == "anndata" or all(name in file for name in ("X", "obs", "var"))


def _sparse_groups(
    file: h5py.File, survey: Survey, datasets: dict[bytes, DatasetFacts], label: str
) -> Iterator[RaggedGroup]:
    for node in survey.nodes:
        if node.kind != "group":
            continue
        prefix = node.path + b"/"
        parts = [datasets.get(prefix + part.encode()) for part in PARTS]
        if any(facts is None or len(facts.shape or ()) != 1 or not facts.is_fixed_size for facts in parts):
            continue
        facts = [part_facts for part_facts in parts if part_facts is not None]
        group, where = file[node.path], f"{label}: {printable(node.path)!r}"
        word = _word(group, "encoding-type") or _word(group, "h5sparse_format")
        kind = word.removesuffix("_matrix")
        if kind not in ("csr", "csc"):
            if not word:  # files of Cell Ranger
                yield RaggedGroup(node.path, "", (0, 0), (facts[0], facts[1]), facts[2])
            continue
        shape = np.asarray(group.attrs.get("shape", group.attrs.get("h5sparse_shape", ())))
        if shape.shape != (2,) or shape.dtype.kind not in "iu" or int(shape.min()) < 0:
            raise FileError(f"{where} has an attribute 'shape' that does not contain the numbers of rows and columns")
        major = int(shape[1 if kind == "csc" else 0])
        lengths = [part_facts.shape[0] if part_facts.shape else 0 for part_facts in facts]
        if lengths[2] != major + 1 or lengths[0] != lengths[1] or facts[2].kind not in "iu":
            raise FileError(
                f"{where} is damaged ({lengths[1]} values, {lengths[0]} indices and {lengths[2]} pointers of "
                f"{facts[2].dtype} in a matrix of {shape[0]} x {shape[1]})"
            )
        yield RaggedGroup(node.path, kind, (int(shape[0]), int(shape[1])), (facts[0], facts[1]), facts[2])


def _image_groups(file: h5py.File, datasets: dict[bytes, DatasetFacts], header: Header | None) -> Iterator[RaggedGroup]:
    """Yield the images of any size in an h5chunk file. Raises FileError if they are damaged."""
    names = find_image_groups(path.decode("utf-8", "replace") for path in datasets) if header is not None else []
    for name in names:
        assert header is not None
        field = describe_images(file[name], Path(file.filename), name, header.chunk_samples)
        if field.num_rows != header.num_samples:
            raise FileError(
                f"{printable(file.filename)}: {name!r} is damaged, because it has {field.num_rows} images for "
                f"{header.num_samples} samples"
            )
        pointers, *tables = (datasets[f"{name}/{table}".encode()] for table in IMAGE_TABLES)
        lists = (datasets[f"{name}/data".encode()],)
        yield RaggedGroup(name.encode(), "images", (field.num_rows, 1), lists, pointers, tuple(tables))


def _word(group: h5py.Group, name: str) -> str:
    value = group.attrs.get(name, "")
    return as_text(value) if isinstance(value, (str, bytes)) else ""


class _Item(NamedTuple):
    """A dataset, as `recognise` expects it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored_bytes: int
    can_train: bool
    num_bytes: int = 0
    has_images: bool = False  # a survey does not look into the values
    is_number: bool = False
    packing: None = None
    can_decode: bool = True

    @property
    def num_axes(self) -> int:
        return len(self.shape)


def keyed_note(survey: Survey, path: str) -> list[str]:
    """Return a note on how to join the samples of a file in which each sample is a dataset; empty for other files."""
    items: list[Any] = []
    for each in survey.datasets.values():
        name, size = as_text(os.fsdecode(each.path)), each.stored_bytes
        items.append(_Item(name, each.shape or (), each.dtype, size, bool(each.num_rows), size))
    found = recognise(items, repr(path))
    if found is None or not found.samples:
        return []
    command = shell_command(["h5chunk", "convert", path, "NEW.h5", "--samples", ",".join(found.samples)])
    return [f"each sample seems to be a dataset, which repack keeps: {command} puts all samples in one dataset"]
