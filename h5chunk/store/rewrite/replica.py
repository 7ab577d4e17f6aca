"""Copy a file with its objects, links and attributes; some datasets with their values, some without.

What is to be laid out anew gets its space, and its bytes are written later by others. All else is copied by HDF5
(``h5o.copy``), chunk by chunk as it is stored. References are made anew. Values that are no plain bytes, as they are of
variable length or refer to objects, go through Python objects, chunk by chunk; in a new order, once for each part of
the new file that fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5o, h5p, h5s, h5t, h5z

from h5chunk.errors import printable
from h5chunk.store.format.spec import (
    ALIGNMENT,
    GROUP,
    ArraySpec,
    Region,
    create_dataset,
    make_group,
    new_file,
    region_of,
)
from h5chunk.store.hdf5.open import translate_errors
from h5chunk.store.rewrite.references import Copier, attribute_names, is_fixed, references_of
from h5chunk.store.rewrite.shuffle import NewOrder
from h5chunk.store.rewrite.survey import Survey

LIBVER = ("v110", "latest")  # nothing newer than 1.10 unless a type of the source needs it
COMMENT = 13  # number of the message of an object's header that is a comment
BAND_ROWS = 1024  # read together where there are no chunks
OBJECT_BYTES = 80  # of memory for a value, beside its own bytes
CHECKSUMS = f"{GROUP}/checksums"


class Filter(NamedTuple):
    """A filter of chunks: its registered number and its parameters."""

    code: int
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class NewLayout:
    """The new layout of a dataset."""

    chunks: tuple[int, ...] | None  # None: contiguous
    filters: tuple[Filter, ...] = ()
    written: bool = True  # else nothing will be written to it: it keeps its fill value, and takes no bytes


@dataclass
class NewHeader:
    """The group ``/h5chunk`` of the new file; what the old one has besides stays."""

    attributes: dict[str, Any]
    tables: dict[str, tuple[tuple[int, ...], np.dtype]] = field(default_factory=dict)  # shapes and types of datasets

    def write(self, file: h5py.File) -> Mapping[str, h5py.Dataset]:
        """Create or update the group; return its new datasets by path, to be filled."""
        group = make_group(file, GROUP)
        for name, value in self.attributes.items():
            group.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value
        make_group(group, "checksums")
        made = {}
        for name, (shape, dtype) in self.tables.items():
            parent, _, last = name.rpartition("/")
            holder = make_group(group, parent) if parent else group
            made[f"{GROUP}/{name}"] = create_dataset(holder, last, ArraySpec(shape, dtype))
        return made


@dataclass(frozen=True)
class Changes:
    """The parts of a file that are not copied unchanged."""

    layouts: Mapping[bytes, NewLayout]  # of datasets that are laid out anew, by path
    header: NewHeader | None
    order: NewOrder | None
    permuted: Sequence[bytes]  # datasets of other values than plain bytes that are put in this order
    memory_bytes: int  # for their values


class Replica(NamedTuple):
    """Where the bytes of unfiltered datasets go that are yet to be written, and what could not be kept, for people."""

    regions: dict[str, Region]
    lost: list[str]


def create_replica(
    path: Path, source: h5py.File, survey: Survey, changes: Changes, copied: Callable[[int], None]
) -> Replica:
    """Write the new file, but for the bytes of what is laid out anew.

    ``copied`` is told the stored bytes of each dataset that was copied.
    """
    with translate_errors(source.filename), h5py.File(_create_file(path, source)) as target:
        maker = _Maker(source, target, survey, changes, copied)
        maker.make_nodes()
        maker.copy_attributes()
        maker.copy_values()
        datasets = {region_key(name): h5py.Dataset(each) for name, each in maker.new.items()}
        if changes.header is not None:
            datasets |= changes.header.write(target)
        target.flush()
        regions = {
            name: region_of(dataset)
            for name, dataset in datasets.items()
            if not dataset.id.get_create_plist().get_nfilters() and dataset.id.get_storage_size()
        }
    block = source.userblock_size
    if block:
        with open(source.filename, "rb") as old, path.open("r+b") as new:  # noqa: PTH123
            new.write(old.read(block))
    return Replica(regions, maker.copier.lost)


def region_key(path: bytes) -> str:
    """Return a path as a key of regions: any bytes, as text."""
    return path.decode("utf-8", "surrogateescape")


def _create_file(path: Path, source: h5py.File) -> h5f.FileID:
    """Create an empty file with the user block, and the orders of the root, of another."""
    old, new = h5g.open(source.id, b"/").get_create_plist(), h5p.create(h5p.FILE_CREATE)
    new.set_userblock(source.userblock_size)
    new.set_sizes(*source.id.get_create_plist().get_sizes())  # HDF5 copies objects without changing their addresses
    new.set_link_creation_order(old.get_link_creation_order())
    new.set_attr_creation_order(old.get_attr_creation_order())
    block = source.userblock_size  # HDF5 wants it to be a multiple of the alignment
    return new_file(path, new, LIBVER, min(ALIGNMENT, block) if block else ALIGNMENT)


class _Maker:
    """Builder of the objects of the new file."""

    def __init__(
        self, source: h5py.File, target: h5py.File, survey: Survey, changes: Changes, copied: Callable[[int], None]
    ) -> None:
        self._source, self._target = source.id, target.id
        self._survey, self._changes, self._copied = survey, changes, copied
        self.copier = Copier(source, target, survey.paths)
        self._utf8 = h5p.create(h5p.LINK_CREATE)
        self._utf8.set_char_encoding(h5t.CSET_UTF8)
        self.new: dict[bytes, h5d.DatasetID] = {}  # datasets that will be written
        self._left_out: set[bytes] = set()
        objects = [path for path, facts in survey.datasets.items() if facts.refers or facts.named]
        copied_here = [path for path in objects if path not in changes.layouts]
        self._by_value = dict.fromkeys([*copied_here, *changes.permuted])  # in this order
        self._bare: set[bytes] = set()  # copied without their attributes

    def make_nodes(self) -> None:
        """Make all objects and links, without attributes but those that HDF5 copies."""
        parent: bytes | None = None
        for node in self._survey.nodes:
            outdated = self._changes.header is not None and node.path == CHECKSUMS.encode()
            if node.parent in self._left_out or outdated:
                self._left_out.add(node.path)
                continue
            if node.parent != parent:
                parent = node.parent
                old, new = (h5g.open(file, parent or b"/") for file in (self._source, self._target))
            links = None if node.name.isascii() else self._utf8
            if node.kind == "soft":
                new.links.create_soft(node.name, node.leads_to, lcpl=links)
            elif node.kind == "again":
                new.links.create_hard(node.name, self._target, b"/" + node.leads_to, lcpl=links)
            elif node.kind == "group":
                self._make_group(old, new, node.name, links)
            elif self._is_made(node.path):
                self._make_dataset(h5d.open(old, node.name), new, node.name, node.path, links)
            else:
                self._copy(old, new, node.name, node.path, links)

    def _is_made(self, path: bytes) -> bool:
        """Whether a dataset is made here, not copied by HDF5."""
        return path in self._changes.layouts or path in self._by_value

    def _make_group(self, old: h5g.GroupID, new: h5g.GroupID, name: bytes, links: h5p.PropLCID | None) -> None:
        """Make a group with the orders of another; all properties of one of many links also say where those lie."""
        said, properties = h5g.open(old, name).get_create_plist(), h5p.create(h5p.GROUP_CREATE)
        properties.set_link_creation_order(said.get_link_creation_order())
        properties.set_attr_creation_order(said.get_attr_creation_order())
        properties.set_attr_phase_change(*said.get_attr_phase_change())
        properties.set_obj_track_times(False)
        h5g.create(new, name, lcpl=links, gcpl=properties)

    def _copy(self, old: h5g.GroupID, new: h5g.GroupID, name: bytes, path: bytes, links: h5p.PropLCID | None) -> None:
        """Let HDF5 copy an object, but for attributes of which it would copy less than they refer to, or crash."""
        options = h5p.create(h5p.OBJECT_COPY)
        item = h5o.open(old, name)
        kinds = [h5a.open(item, each).get_type() for each in attribute_names(item)]
        if any(kind.committed() or references_of(kind) for kind in kinds):
            options.set_copy_object(h5o.COPY_WITHOUT_ATTR_FLAG)
            self._bare.add(path)
        h5o.copy(old, name, new, name, options, links)
        if isinstance(item, h5d.DatasetID):
            self._copied(self._survey.datasets[path].stored_bytes)

    def _make_dataset(
        self, old: h5d.DatasetID, group: h5g.GroupID, name: bytes, path: bytes, links: h5p.PropLCID | None
    ) -> None:
        layout, space, properties = self._changes.layouts.get(path), old.get_space(), old.get_create_plist()
        if layout is not None:
            properties, space = _properties(properties, layout), h5s.create_simple(old.shape)
        properties.set_obj_track_times(False)
        made = h5d.create(group, name, self.copier.type_of(old.get_type()), space, properties, links)
        if layout is not None and layout.written:
            self.new[path] = made

    def copy_attributes(self) -> None:
        """Copy the attributes that HDF5 did not copy, or that refer to objects."""
        self.copier.attributes(h5g.open(self._source, b"/"), h5g.open(self._target, b"/"), "the root")
        header = self._changes.header
        replaced = {GROUP.encode(): {name.encode() for name in header.attributes}} if header is not None else {}
        for node in self._survey.nodes:
            if node.kind in ("soft", "again") or node.path in self._left_out:
                continue
            old, new = h5o.open(self._source, node.path), h5o.open(self._target, node.path)
            is_made, where = node.kind == "group" or self._is_made(node.path), repr(printable(node.path))
            if is_made or node.path in self._bare:
                self.copier.attributes(old, new, where, replaced.get(node.path, ()))
            if is_made and h5o.get_info(old).hdr.mesg.present >> COMMENT & 1:
                self.copier.lost.append(f"the comment on {where}, which h5py cannot read, is left out")

    def copy_values(self) -> None:
        """Copy the values that are no plain bytes."""
        for path in self._by_value:
            if path in self._left_out:
                continue
            old, new = (h5py.Dataset(h5d.open(file, path)) for file in (self._source, self._target))
            if self._changes.order is not None and path in self._changes.permuted:
                _permute_values(old, new, self.copier, self._changes.order, self._changes.memory_bytes)
            else:
                _copy_values(old, new, self.copier)
            self._copied(self._survey.datasets[path].stored_bytes)


def _properties(old: h5p.PropDCID, layout: NewLayout) -> h5p.PropDCID:
    """Return the properties of a dataset in its new layout: all others stay."""
    new = old.copy()
    for code in [old.get_filter(number)[0] for number in range(old.get_nfilters())]:
        new.remove_filter(code)
    if layout.chunks is None:
        new.set_layout(h5d.CONTIGUOUS)
    else:
        new.set_chunk(layout.chunks)
    for each in layout.filters:
        new.set_filter(each.code, h5z.FLAG_OPTIONAL, each.values)
    plain = layout.written and not layout.filters
    new.set_alloc_time(h5d.ALLOC_TIME_EARLY if plain else h5d.ALLOC_TIME_INCR)
    if layout.written:  # else values stay what they are: the fill value, or nothing
        new.set_fill_time(h5d.FILL_TIME_NEVER if plain else h5d.FILL_TIME_IFSET)
    return new


def _copy_values(old: h5py.Dataset, new: h5py.Dataset, copier: Copier) -> None:
    """Write all values as they are, but for references, which lead to the new objects."""
    if old.shape is None or 0 in old.shape:
        return
    for rows in [None] if old.shape == () else _bands(old):
        _write(new, rows, copier.translated(_read(old, rows), printable(old.name)))


def _permute_values(old: h5py.Dataset, new: h5py.Dataset, copier: Copier, order: NewOrder, memory_bytes: int) -> None:
    """As `_copy_values`, in another order and within limited memory."""
    num_rows = old.shape[0]
    total = sum(_size(_read(old, rows)) for rows in _bands(old))
    part = max(1, num_rows // math.ceil(total / memory_bytes))
    for first in range(0, num_rows, part):
        last = min(first + part, num_rows)
        values = np.empty((last - first, *old.shape[1:]), old.dtype)
        for rows in _bands(old):
            places = order.places[rows.start : rows.stop] - first
            wanted = (places >= 0) & (places < last - first)
            values[places[wanted]] = _read(old, rows)[wanted]
        _write(new, range(first, last), copier.translated(values, printable(old.name)))


def _bands(dataset: h5py.Dataset) -> Iterator[range]:
    step = dataset.chunks[0] if dataset.chunks else BAND_ROWS
    return (range(first, min(first + step, len(dataset))) for first in range(0, len(dataset), step))


def _spaces(dataset: h5py.Dataset, rows: range | None) -> tuple[tuple[int, ...], h5s.SpaceID, h5s.SpaceID]:
    """Return the shape of some rows, or of a single value, and how they are selected in memory and in the file."""
    space = dataset.id.get_space()
    if rows is None:
        return (), h5s.create(h5s.SCALAR), space
    shape = (len(rows), *dataset.shape[1:])
    space.select_hyperslab((rows.start, *(0,) * (len(shape) - 1)), shape)
    return shape, h5s.create_simple(shape), space


def _read(dataset: h5py.Dataset, rows: range | None) -> np.ndarray:
    shape, memory, space = _spaces(dataset, rows)
    kind = dataset.id.get_type()
    fixed = is_fixed(kind)
    values = np.empty(shape, f"V{kind.get_size()}" if fixed else dataset.dtype)
    dataset.id.read(memory, space, values, kind if fixed else None)
    return values


def _write(dataset: h5py.Dataset, rows: range | None, values: np.ndarray) -> None:
    _, memory, space = _spaces(dataset, rows)
    kind = dataset.id.get_type()
    dataset.id.write(memory, space, values, kind if is_fixed(kind) else None)


def _size(values: np.ndarray) -> int:
    """Return the bytes of memory that values take, about."""
    if values.dtype.names:
        return sum(_size(values[name]) for name in values.dtype.names) + values.nbytes
    if values.dtype.kind != "O":
        return int(values.nbytes)
    return sum(
        OBJECT_BYTES + (each.nbytes if isinstance(each, np.ndarray) else len(each) if isinstance(each, bytes) else 0)
        for each in values.reshape(-1)
    )
