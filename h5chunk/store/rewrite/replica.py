"""Copy a file with its objects, links and attributes, but without the values of some datasets.

Datasets with a new layout are only allocated, and other modules write their values later. HDF5 copies all other objects
(``h5o.copy``), with chunks as they are stored. References are replaced by references to the new objects. Values with
references or variable-length parts are copied as Python objects, chunk by chunk. If their order changes, the old values
are read once for each part of the new values that fits in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5o, h5p, h5r, h5s, h5t, h5z

from h5chunk.errors import FileError, printable
from h5chunk.store.format.spec import ALIGNMENT, CHECKSUMS, GROUP, FileSpec, Region, create_objects, new_file, region_of
from h5chunk.store.hdf5.chunk_table import is_variable
from h5chunk.store.hdf5.open import DAMAGES, FULL_DISK, translate_errors
from h5chunk.store.rewrite.shuffle import NewOrder
from h5chunk.store.rewrite.survey import Node, Survey, attribute_names, references_of

LIBVER = ("v110", "latest")  # the format of HDF5 1.10, unless a type of the source needs a newer one
COMMENT = 13  # type of the object header message that contains a comment
BAND_ROWS = 1024  # rows to read together if a dataset has no chunks
OBJECT_BYTES = 80  # memory per Python object, in addition to its bytes


class Filter(NamedTuple):
    """An HDF5 filter: its registered id and its parameters."""

    code: int
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class NewLayout:
    """The new layout of a dataset."""

    chunks: tuple[int, ...] | None  # None: contiguous
    filters: tuple[Filter, ...] = ()
    written: bool = True  # False: no values are written, so that all elements read as the fill value


@dataclass(frozen=True)
class Changes:
    """The parts of a file that are not copied unchanged."""

    layouts: Mapping[bytes, NewLayout]  # new layouts of datasets, by path
    header: FileSpec | None  # new content of the group ``/h5chunk``
    order: NewOrder | None  # new order of the rows
    permuted: Sequence[bytes]  # paths of datasets that are copied as Python objects, in the new order
    memory_bytes: int  # limit on the memory for these objects


def create_replica(
    path: Path, source: h5py.File, survey: Survey, changes: Changes, copied: Callable[[int], None]
) -> tuple[dict[str, Region], list[str]]:
    """Write the new file, except for the values of datasets with a new layout.

    ``copied`` is called with the stored bytes of each copied dataset. Returns the byte ranges of the unfiltered
    datasets whose values must still be written, and messages about content that could not be preserved.
    """
    block = source.userblock_size  # HDF5 requires that it is a multiple of the alignment
    with translate_errors(source.filename):
        old, creation = h5g.open(source.id, b"/").get_create_plist(), h5p.create(h5p.FILE_CREATE)
        creation.set_userblock(block)
        creation.set_sizes(*source.id.get_create_plist().get_sizes())  # HDF5 copies objects without changing addresses
        _copy_orders(old, creation)
        made = new_file(path, creation, LIBVER, min(ALIGNMENT, block) if block else ALIGNMENT)
        with h5py.File(made) as target:
            maker = _Maker(source, target, survey, changes, copied)
            maker.make_nodes()
            maker.copy_attributes()
            maker.copy_values()
            datasets = {region_key(name): h5py.Dataset(dataset) for name, dataset in maker.new.items()}
            if changes.header is not None:
                datasets |= create_objects(target, changes.header)
            target.flush()
            regions = {
                name: region_of(dataset)
                for name, dataset in datasets.items()
                if not dataset.id.get_create_plist().get_nfilters() and dataset.id.get_storage_size()
            }
    if block:
        with open(source.filename, "rb") as file, path.open("r+b") as new:  # noqa: PTH123
            new.write(file.read(block))
    return regions, maker.copier.lost


def region_key(path: bytes) -> str:
    """Return the path of a dataset as text, even if it is not UTF-8. `create_replica` uses it as a key."""
    return path.decode("utf-8", "surrogateescape")


class _Copier:
    """Copies attributes and values from an open file to another one that has the same objects.

    References contain addresses, which differ between the files, so they are replaced by references to the same paths.
    ``lost`` collects messages about content that could not be preserved.
    """

    def __init__(self, source: h5py.File, target: h5py.File, survey: Survey) -> None:
        self._source, self._target, self._paths = source.id, target.id, survey.paths
        self._leaves_out = survey.left_out is not None
        self._shown = printable(source.filename)
        self.lost: list[str] = []

    def type_of(self, kind: h5t.TypeID) -> h5t.TypeID:
        """Return a type for the target file. It is the named type at the same path, or a copy of an unnamed type."""
        if kind.committed():
            path = self._paths.get(h5o.get_info(kind).addr)
            if path is not None and h5o.exists_by_name(self._target, path):
                return h5o.open(self._target, path)
        return kind.copy()

    def attributes(self, old: Any, new: Any, where: str, skip: Collection[bytes] = ()) -> None:
        """Copy the attributes of a low-level object, except for ``skip``. Messages call the object ``where``."""
        for name in attribute_names(old):
            if name not in skip:
                attribute = h5a.open(old, name)
                made = h5a.create(new, name, self.type_of(attribute.get_type()), attribute.get_space())
                if attribute.get_space().get_simple_extent_type() != h5s.NULL and 0 not in attribute.shape:
                    self._value(attribute, made, f"{where}, attribute {printable(name)!r}")

    def _value(self, old: h5a.AttrID, new: h5a.AttrID, where: str) -> None:
        kind = old.get_type()
        if not is_variable(kind):
            values = np.empty(old.shape, f"V{kind.get_size()}")
            old.read(values, kind)
            new.write(values, kind)
            return
        values = np.empty(old.shape, old.dtype)
        old.read(values)
        new.write(self.translated(values, where))

    def translated(self, value: Any, where: str) -> Any:
        """Return a copy of a value or array in which references refer to objects of the target file."""
        if isinstance(value, h5r.Reference):
            return self._reference(value, where)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            copy = value.copy()
            if value.dtype.names:
                for name in value.dtype.names:
                    copy[name] = self.translated(value[name], where)
            else:
                flat = copy.reshape(-1)  # so that an array is assigned as one object
                for number in range(len(flat)):
                    flat[number] = self.translated(flat[number], where)
            return copy
        return value

    def _reference(self, reference: h5r.Reference, where: str) -> h5r.Reference:
        if not reference:
            return reference
        address = None
        with suppress(OSError, RuntimeError, ValueError, KeyError):
            item = h5r.dereference(reference, self._source)
            address = h5o.get_info(item).addr if item is not None else None
        if address is None:
            self.lost.append(f"{where} referred to an object that cannot be read or no longer exists, and is now empty")
            return type(reference)()
        path = self._paths.get(address)
        if self._leaves_out and (path is None or (path and not h5o.exists_by_name(self._target, path))):
            self.lost.append(f"{where} referred to an object that is left out, and is now empty")
            return type(reference)()
        if path is None:
            raise FileError(
                f"{self._shown}: {where} refers to an object without a name: give it a name, or delete the reference"
            )
        if isinstance(reference, h5r.RegionReference):
            region = h5r.get_region(reference, self._source)
            return h5r.create(self._target, path, h5r.DATASET_REGION, region)
        return h5r.create(self._target, path or b"/", h5r.OBJECT)


class _Maker:
    """Creates the objects of the new file: first all objects and links, then attributes, then values."""

    def __init__(
        self, source: h5py.File, target: h5py.File, survey: Survey, changes: Changes, copied: Callable[[int], None]
    ) -> None:
        self._source, self._target = source.id, target.id
        self._survey, self._changes, self._copied = survey, changes, copied
        self.copier = _Copier(source, target, survey)
        self._utf8 = h5p.create(h5p.LINK_CREATE)
        self._utf8.set_char_encoding(h5t.CSET_UTF8)
        self.new: dict[bytes, h5d.DatasetID] = {}  # datasets whose values must still be written, by path
        changed = [*changes.layouts, *changes.permuted] if changes.header is not None else []
        outdated = {f"{CHECKSUMS}/".encode() + path for path in changed}
        self._nodes = [node for node in survey.nodes if node.path not in outdated]
        datasets = [survey.datasets[node.path] for node in self._nodes if node.kind == "dataset"]
        objects = [facts.path for facts in datasets if facts.has_references or facts.has_named_type]
        copied_here = [path for path in objects if path not in changes.layouts]
        self._by_value = dict.fromkeys([*copied_here, *changes.permuted])  # datasets that this class copies
        self._lost: set[bytes] = set()  # paths of objects that HDF5 cannot copy
        self._bare: set[bytes] = set()  # paths of objects that HDF5 copies without their attributes

    def make_nodes(self) -> None:
        """Create all objects and links. Only objects that HDF5 copies may already have attributes."""
        parent: bytes | None = None
        for node in self._nodes:
            if node.parent != parent:
                parent = node.parent
                old, new = (h5g.open(file, parent or b"/") for file in (self._source, self._target))
            links = None if node.name.isascii() else self._utf8
            if node.kind == "soft":
                new.links.create_soft(node.name, node.leads_to, lcpl=links)
            elif node.kind == "again" and node.leads_to in self._lost:
                self._lost.add(node.path)
            elif node.kind == "again":
                new.links.create_hard(node.name, self._target, b"/" + node.leads_to, lcpl=links)
            elif node.kind == "group":  # without the properties that locate the links of a large group in the file
                properties = h5p.create(h5p.GROUP_CREATE)
                old_properties = h5g.open(old, node.name).get_create_plist()
                _copy_orders(old_properties, properties)
                properties.set_attr_phase_change(*old_properties.get_attr_phase_change())
                properties.set_obj_track_times(False)
                h5g.create(new, node.name, lcpl=links, gcpl=properties)
            elif self._is_made(node.path):
                self._make_dataset(h5d.open(old, node.name), new, node, links)
            else:
                self._copy(old, new, node, links)
        self._nodes = [node for node in self._nodes if node.path not in self._lost]

    def _is_made(self, path: bytes) -> bool:
        """Return whether this class creates the dataset. Otherwise HDF5 copies it."""
        return path in self._changes.layouts or path in self._by_value

    def _copy(self, old: h5g.GroupID, new: h5g.GroupID, node: Node, links: h5p.PropLCID | None) -> None:
        """Let HDF5 copy an object. Attributes that would crash HDF5, or would be copied incompletely, are left out."""
        options = h5p.create(h5p.OBJECT_COPY)
        item = h5o.open(old, node.name)
        kinds = [h5a.open(item, name).get_type() for name in attribute_names(item)]
        if any(kind.committed() or references_of(kind) for kind in kinds):
            options.set_copy_object(h5o.COPY_WITHOUT_ATTR_FLAG)
            self._bare.add(node.path)
        try:
            h5o.copy(old, node.name, new, node.name, options, links)
        except DAMAGES as error:
            if self._survey.left_out is None or any(os.strerror(number) in str(error) for number in FULL_DISK):
                raise
            self.copier.lost.append(f"{printable(node.path)!r} is left out: HDF5 cannot copy it ({error})")
            self._lost.add(node.path)
        if isinstance(item, h5d.DatasetID):
            self._copied(self._survey.datasets[node.path].stored_bytes)

    def _make_dataset(self, old: h5d.DatasetID, group: h5g.GroupID, node: Node, links: h5p.PropLCID | None) -> None:
        layout, space, properties = self._changes.layouts.get(node.path), old.get_space(), old.get_create_plist()
        if layout is not None:
            properties, space = _properties(properties, layout), h5s.create_simple(old.shape)
        properties.set_obj_track_times(False)
        made = h5d.create(group, node.name, self.copier.type_of(old.get_type()), space, properties, links)
        if layout is not None and layout.written:
            self.new[node.path] = made

    def copy_attributes(self) -> None:
        """Copy the attributes that HDF5 did not copy."""
        self.copier.attributes(h5g.open(self._source, b"/"), h5g.open(self._target, b"/"), "the root")
        header = self._changes.header
        replaced = {GROUP.encode(): {name.encode() for name in header.attributes[GROUP]}} if header is not None else {}
        for node in self._nodes:
            if node.kind in ("soft", "again"):
                continue
            old, new = h5o.open(self._source, node.path), h5o.open(self._target, node.path)
            is_made, where = node.kind == "group" or self._is_made(node.path), repr(printable(node.path))
            if is_made or node.path in self._bare:
                self.copier.attributes(old, new, where, replaced.get(node.path, ()))
            if is_made and h5o.get_info(old).hdr.mesg.present >> COMMENT & 1:
                self.copier.lost.append(f"the comment on {where}, which h5py cannot read, is left out")

    def copy_values(self) -> None:
        """Copy the values of datasets that HDF5 did not copy and that have no new layout."""
        for path in self._by_value:
            old, new = (h5py.Dataset(h5d.open(file, path)) for file in (self._source, self._target))
            if self._changes.order is not None and path in self._changes.permuted:
                _permute_values(old, new, self.copier, self._changes.order, self._changes.memory_bytes)
            elif old.shape is not None and 0 not in old.shape:
                for rows in [None] if old.shape == () else _bands(old):
                    _write(new, rows, self.copier.translated(_read(old, rows), printable(old.name)))
            self._copied(self._survey.datasets[path].stored_bytes)


def _copy_orders(old: Any, new: Any) -> None:
    """Copy the settings that make a group or file track the creation order of links and attributes."""
    new.set_link_creation_order(old.get_link_creation_order())
    new.set_attr_creation_order(old.get_attr_creation_order())


def _properties(old: h5p.PropDCID, layout: NewLayout) -> h5p.PropDCID:
    """Return the creation properties of a dataset with a new layout. Other properties are preserved."""
    new = old.copy()
    for code in [old.get_filter(number)[0] for number in range(old.get_nfilters())]:
        new.remove_filter(code)
    if layout.chunks is None:
        new.set_layout(h5d.CONTIGUOUS)
    else:
        new.set_chunk(layout.chunks)
    for filter_ in layout.filters:
        new.set_filter(filter_.code, h5z.FLAG_OPTIONAL, filter_.values)
    plain = layout.written and not layout.filters
    new.set_alloc_time(h5d.ALLOC_TIME_EARLY if plain else h5d.ALLOC_TIME_INCR)
    if layout.written:  # otherwise values read as the fill value, if there is one
        new.set_fill_time(h5d.FILL_TIME_NEVER if plain else h5d.FILL_TIME_IFSET)
    return new


def _permute_values(old: h5py.Dataset, new: h5py.Dataset, copier: _Copier, order: NewOrder, memory_bytes: int) -> None:
    """Copy all values in the new order, in parts that fit in memory. References refer to objects of the new file."""
    num_rows = old.shape[0]
    total = sum(_size(_read(old, rows)) for rows in _bands(old))
    part = max(1, num_rows // math.ceil(total / memory_bytes))
    for first in range(0, num_rows, part):
        last = min(first + part, num_rows)
        values = np.empty((last - first, *old.shape[1:]), old.dtype)
        for rows in _bands(old):
            targets = order.inverse[rows.start : rows.stop] - first
            selected = (targets >= 0) & (targets < last - first)
            values[targets[selected]] = _read(old, rows)[selected]
        _write(new, range(first, last), copier.translated(values, printable(old.name)))


def _bands(dataset: h5py.Dataset) -> Iterator[range]:
    step = dataset.chunks[0] if dataset.chunks else BAND_ROWS
    return (range(first, min(first + step, len(dataset))) for first in range(0, len(dataset), step))


def _spaces(dataset: h5py.Dataset, rows: range | None) -> tuple[tuple[int, ...], h5s.SpaceID, h5s.SpaceID]:
    """Return the shape of a range of rows, and its selections in memory and in the file.

    If ``rows`` is None, select the single value of the dataset.
    """
    space = dataset.id.get_space()
    if rows is None:
        return (), h5s.create(h5s.SCALAR), space
    shape = (len(rows), *dataset.shape[1:])
    space.select_hyperslab((rows.start, *(0,) * (len(shape) - 1)), shape)
    return shape, h5s.create_simple(shape), space


def _read(dataset: h5py.Dataset, rows: range | None) -> np.ndarray:
    shape, memory, space = _spaces(dataset, rows)
    kind = dataset.id.get_type()
    fixed = not is_variable(kind)
    values = np.empty(shape, f"V{kind.get_size()}" if fixed else dataset.dtype)
    dataset.id.read(memory, space, values, kind if fixed else None)
    return values


def _write(dataset: h5py.Dataset, rows: range | None, values: np.ndarray) -> None:
    _, memory, space = _spaces(dataset, rows)
    kind = dataset.id.get_type()
    dataset.id.write(memory, space, values, None if is_variable(kind) else kind)


def _size(values: np.ndarray) -> int:
    if values.dtype.names:
        return sum(_size(values[name]) for name in values.dtype.names) + values.nbytes
    if values.dtype.kind != "O":
        return int(values.nbytes)
    return sum(
        OBJECT_BYTES + (item.nbytes if isinstance(item, np.ndarray) else len(item) if isinstance(item, bytes) else 0)
        for item in values.reshape(-1)
    )
