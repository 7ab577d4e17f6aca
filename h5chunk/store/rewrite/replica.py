"""A new file with all that another one has: objects, links, attributes; some datasets with their values, some without.

What is to be laid out anew gets its space, and its bytes are written later by others. All else is copied by HDF5
(``h5o.copy``), chunk by chunk as it is stored. References are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import h5py
from h5py import h5a, h5d, h5f, h5g, h5o, h5p, h5s, h5t, h5z

from h5chunk.errors import printable
from h5chunk.store.format import ALIGNMENT, Region, new_file, region_of
from h5chunk.store.rewrite.references import Copier, attribute_names, refers
from h5chunk.store.rewrite.survey import Survey, damages

LIBVER = ("v110", "latest")  # nothing newer than 1.10 unless a type of the source needs it
COMMENT = 13  # number of the message of an object's header that is a comment
WriteValues = Callable[[h5py.Dataset, h5py.Dataset, Copier], None]


@dataclass(frozen=True)
class Filter:
    """A filter of chunks: its registered number and its parameters."""

    code: int
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class NewLayout:
    """How a dataset is laid out anew.

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
    """What is not copied as it is.

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
    """What came of it.

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
    shown = printable(source.filename)
    with damages(shown), h5py.File(_create_file(path, source)) as target:
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
    """Makes the objects of the new file, step by step."""

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
