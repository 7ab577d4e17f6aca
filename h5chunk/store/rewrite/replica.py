"""Copy a file with its objects, links and attributes; some datasets with their values, some without.

What is to be laid out anew gets its space, and its bytes are written later by others. All else is copied by HDF5
(``h5o.copy``), chunk by chunk as it is stored. References are made anew. Values that are no plain bytes, as they are of
variable length or refer to objects, go through Python objects, chunk by chunk; in a new order, once for each part of
the new file that fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5o, h5p, h5s, h5t, h5z

from h5chunk.errors import printable
from h5chunk.store.format.spec import ALIGNMENT, Region, new_file, region_of
from h5chunk.store.hdf5.open import translate_errors
from h5chunk.store.rewrite.references import Copier, attribute_names, is_fixed, refers
from h5chunk.store.rewrite.shuffle import NewOrder
from h5chunk.store.rewrite.survey import Survey

LIBVER = ("v110", "latest")  # nothing newer than 1.10 unless a type of the source needs it
COMMENT = 13  # number of the message of an object's header that is a comment
WriteValues = Callable[[h5py.Dataset, h5py.Dataset, Copier], None]
BAND_ROWS = 1024  # read together where there are no chunks
OBJECT_BYTES = 80  # of memory for a value, beside its own bytes


@dataclass(frozen=True)
class Filter:
    """A filter of chunks: its registered number and its parameters."""

    code: int
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class NewLayout:
    """The new layout of a dataset.

    Attributes
    ----------
    chunks : tuple of int, or None
        None: contiguous.
    filters : tuple of Filter
    written : bool
        Whether anything will be written to it; else it keeps its fill value, and takes no bytes.
    """

    chunks: tuple[int, ...] | None
    filters: tuple[Filter, ...] = ()
    written: bool = True


@dataclass(frozen=True)
class Changes:
    """The parts of a file that are not copied unchanged.

    Attributes
    ----------
    layouts : dict of bytes to NewLayout
        Datasets to be laid out anew, by path.
    values : dict of bytes to callable
        Datasets whose values are written here: called with the old and the new dataset, and a `Copier`.
    left_out : callable
        Tells whether an object of this path is left out, with all that is in it.
    attribute_left_out : callable
        Tells whether an attribute of a group, by path and name, is left out.
    finish : callable
        Called at the end with the new file; gives the datasets that it has made.
    copied : callable
        Told the bytes of each dataset that was copied.
    """

    layouts: Mapping[bytes, NewLayout]
    values: Mapping[bytes, WriteValues]
    left_out: Callable[[bytes], bool] = lambda _: False
    attribute_left_out: Callable[[bytes, bytes], bool] = lambda *_: False
    finish: Callable[[h5py.File], Mapping[str, h5py.Dataset]] = lambda _: {}
    copied: Callable[[int], None] = lambda _: None


@dataclass
class Replica:
    """The places of the data in a copied file, and what could not be copied.

    Attributes
    ----------
    regions : dict of str to Region
        Where the bytes of each dataset without filters that is to be written go.
    lost : list of str
        What could not be kept, for people.
    """

    regions: dict[str, Region] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


def create_replica(path: Path, source: h5py.File, survey: Survey, changes: Changes) -> Replica:
    """Write the new file, but for the bytes of what is laid out anew.

    Raises
    ------
    FileError
        The source is damaged.
    """
    with translate_errors(source.filename), h5py.File(_create_file(path, source)) as target:
        copier = Copier(source, target, survey.paths)
        made = _Maker(source, target, survey, changes, copier)
        made.nodes()
        made.attributes()
        made.values()
        datasets = {printable_key(name): h5py.Dataset(each) for name, each in made.new.items()}
        datasets |= changes.finish(target)
        target.flush()
        regions = {name: region_of(each) for name, each in datasets.items() if _has_region(each)}
        replica = Replica(regions, copier.lost)
    block = source.userblock_size
    if block:
        with open(source.filename, "rb") as old, path.open("r+b") as new:  # noqa: PTH123
            new.write(old.read(block))
    return replica


def printable_key(path: bytes) -> str:
    """A path as a key of regions: any bytes, as text."""
    return path.decode("utf-8", "surrogateescape")


def _has_region(dataset: h5py.Dataset) -> bool:
    return not dataset.id.get_create_plist().get_nfilters() and dataset.id.get_storage_size() > 0


def _create_file(path: Path, source: h5py.File) -> h5f.FileID:
    """An empty file with the user block, and the orders of the root, of another."""
    old, new = h5g.open(source.id, b"/").get_create_plist(), h5p.create(h5p.FILE_CREATE)
    new.set_userblock(source.userblock_size)
    new.set_sizes(*source.id.get_create_plist().get_sizes())  # HDF5 copies objects without changing their addresses
    new.set_link_creation_order(old.get_link_creation_order())
    new.set_attr_creation_order(old.get_attr_creation_order())
    block = source.userblock_size  # HDF5 wants it to be a multiple of the alignment
    return new_file(path, new, LIBVER, min(ALIGNMENT, block) if block else ALIGNMENT)


class _Maker:
    """Builder of the objects of the new file."""

    def __init__(self, source: h5py.File, target: h5py.File, survey: Survey, changes: Changes, copier: Copier) -> None:
        self._source, self._target = source.id, target.id
        self._survey, self._changes, self._copier = survey, changes, copier
        self._utf8 = h5p.create(h5p.LINK_CREATE)
        self._utf8.set_char_encoding(h5t.CSET_UTF8)
        self.new: dict[bytes, h5d.DatasetID] = {}
        self._left_out: set[bytes] = set()
        self._made = changes.layouts.keys() | changes.values.keys()  # not copied by HDF5
        self._bare: set[bytes] = set()  # copied without their attributes

    def nodes(self) -> None:
        """All objects and links, without attributes but those that HDF5 copies."""
        parent: bytes | None = None
        for node in self._survey.nodes:
            if node.parent in self._left_out or self._changes.left_out(node.path):
                self._left_out.add(node.path)
                continue
            if node.parent != parent:
                parent = node.parent
                old, new = (h5g.open(file, parent or b"/") for file in (self._source, self._target))
            if node.kind == "soft":
                new.links.create_soft(node.name, node.leads_to, lcpl=self._links(node.name))
            elif node.kind == "again":
                leads_to = b"/" + node.leads_to
                new.links.create_hard(node.name, self._target, leads_to, lcpl=self._links(node.name))
            elif node.kind == "group":
                self._group(old, new, node.name)
            elif node.path in self._made:
                self._dataset(old, new, node.name, node.path)
            else:
                self._copy(old, new, node.name, node.path)

    def _links(self, name: bytes) -> h5p.PropLCID | None:
        return None if name.isascii() else self._utf8

    def _group(self, old: h5g.GroupID, new: h5g.GroupID, name: bytes) -> None:
        """A group with the orders of another; all properties of one of many links also say where those lie."""
        said, properties = h5g.open(old, name).get_create_plist(), h5p.create(h5p.GROUP_CREATE)
        properties.set_link_creation_order(said.get_link_creation_order())
        properties.set_attr_creation_order(said.get_attr_creation_order())
        properties.set_attr_phase_change(*said.get_attr_phase_change())
        properties.set_obj_track_times(False)
        h5g.create(new, name, lcpl=self._links(name), gcpl=properties)

    def _copy(self, old: h5g.GroupID, new: h5g.GroupID, name: bytes, path: bytes) -> None:
        options = h5p.create(h5p.OBJECT_COPY)
        item = h5o.open(old, name)
        if any(_needs_care(h5a.open(item, each).get_type()) for each in attribute_names(item)):
            options.set_copy_object(h5o.COPY_WITHOUT_ATTR_FLAG)
            self._bare.add(path)
        h5o.copy(old, name, new, name, options, self._links(name))
        if isinstance(item, h5d.DatasetID):
            self._changes.copied(self._survey.datasets[path].stored_bytes)

    def _dataset(self, old_group: h5g.GroupID, new_group: h5g.GroupID, name: bytes, path: bytes) -> None:
        old = h5d.open(old_group, name)
        layout, space = self._changes.layouts.get(path), old.get_space()
        properties = old.get_create_plist()
        if layout is not None:
            properties = _properties(properties, layout)
            space = h5s.create_simple(old.shape)
        properties.set_obj_track_times(False)
        kind = self._copier.type_of(old.get_type())
        made = h5d.create(new_group, name, kind, space, properties, self._links(name))
        if layout is not None and layout.written:
            self.new[path] = made

    def attributes(self) -> None:
        """Attributes that HDF5 did not copy, or that refer to objects."""
        self._copier.attributes(h5g.open(self._source, b"/"), h5g.open(self._target, b"/"), "the root", self._skip(b""))
        for node in self._survey.nodes:
            if node.kind in ("soft", "again") or node.path in self._left_out:
                continue
            old, new = h5o.open(self._source, node.path), h5o.open(self._target, node.path)
            anew = node.kind == "group" or node.path in self._made
            if anew or node.path in self._bare:
                self._copier.attributes(old, new, repr(printable(node.path)), self._skip(node.path))
            if anew and h5o.get_info(old).hdr.mesg.present >> COMMENT & 1:
                self._copier.lost.append(
                    f"the comment on {printable(node.path)!r}, which h5py cannot read, is left out"
                )

    def _skip(self, path: bytes) -> Callable[[bytes], bool]:
        return lambda name: self._changes.attribute_left_out(path, name)

    def values(self) -> None:
        """Values that are made here."""
        for path, write in self._changes.values.items():
            if path not in self._left_out:
                old, new = (h5py.Dataset(h5d.open(file, path)) for file in (self._source, self._target))
                write(old, new, self._copier)
                self._changes.copied(self._survey.datasets[path].stored_bytes)


def _needs_care(kind: h5t.TypeID) -> bool:
    """Whether HDF5 would copy a value, but not what it refers to; nor, safely, the name of its type."""
    return kind.committed() or refers(kind)


def _properties(old: h5p.PropDCID, layout: NewLayout) -> h5p.PropDCID:
    """Of a dataset laid out anew: all of the old one's that has nothing to do with its layout."""
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


def copy_objects(old: h5py.Dataset, new: h5py.Dataset, copier: Copier) -> None:
    """Write all values as they are, but for references, which lead to the new objects."""
    where = printable(old.name)
    if old.shape is None or 0 in old.shape:
        return
    if old.shape == ():
        _write(new, None, copier.translated(_read(old, None), where))
        return
    for rows in _bands(old):
        _write(new, rows, copier.translated(_read(old, rows), where))


def permute_objects(order: NewOrder, memory_bytes: int) -> Callable[[h5py.Dataset, h5py.Dataset, Copier], None]:
    """Return a function that does what `copy_objects` does, in another order and within limited memory."""

    def permute(old: h5py.Dataset, new: h5py.Dataset, copier: Copier) -> None:
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

    return permute


def _bands(dataset: h5py.Dataset) -> Iterator[range]:
    step = dataset.chunks[0] if dataset.chunks else BAND_ROWS
    return (range(first, min(first + step, len(dataset))) for first in range(0, len(dataset), step))


def _spaces(dataset: h5py.Dataset, rows: range | None) -> tuple[tuple[int, ...], h5py.h5s.SpaceID, h5py.h5s.SpaceID]:
    if rows is None:
        return (), h5py.h5s.create(h5py.h5s.SCALAR), dataset.id.get_space()
    shape = (len(rows), *dataset.shape[1:])
    space = dataset.id.get_space()
    space.select_hyperslab((rows.start, *(0,) * (len(shape) - 1)), shape)
    return shape, h5py.h5s.create_simple(shape), space


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
    """Bytes of memory, about."""
    if values.dtype.names:
        return sum(_size(values[name]) for name in values.dtype.names) + values.nbytes
    if values.dtype.kind != "O":
        return int(values.nbytes)
    return sum(
        OBJECT_BYTES + (each.nbytes if isinstance(each, np.ndarray) else len(each) if isinstance(each, bytes) else 0)
        for each in values.reshape(-1)
    )
