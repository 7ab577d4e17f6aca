"""List the objects of any HDF5 file, and refuse those that cannot be preserved when the file is rewritten.

External links, external storage and virtual datasets are refused. Soft links are preserved, but not followed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import h5py
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t

from h5chunk.errors import FileError, TrustError, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.store.hdf5.chunk_table import is_variable, parts_of
from h5chunk.store.hdf5.codecs import KNOWN_FILTERS
from h5chunk.store.hdf5.open import DAMAGES, translate_errors

ORDER_TRACKED = 1  # H5P_CRT_ORDER_TRACKED of H5Ppublic.h
NUMBERS_AND_TEXT = "biufS"  # kinds of NumPy dtypes that a field may have


@dataclass(frozen=True)
class DatasetFacts:
    """The metadata of a dataset."""

    path: bytes  # without a leading slash
    shape: tuple[int, ...] | None  # None: an empty dataspace
    maxshape: tuple[int | None, ...]
    chunks: tuple[int, ...] | None
    dtype: str  # as text, for messages
    kind: str  # kind of the NumPy dtype, or V if NumPy has no such type
    item_bytes: int
    filters: tuple[int, ...]  # registered ids of filters
    filter_names: tuple[str, ...]
    stored_bytes: int
    is_fixed_size: bool  # whether values are plain bytes, without references or variable-length parts
    has_references: bool  # whether values contain references to objects or regions
    has_region_references: bool  # whether values contain references to regions of datasets
    has_named_type: bool  # whether the type has a name in the file

    @property
    def name(self) -> str:
        """The path as text, for messages."""
        return printable(self.path)

    @property
    def num_bytes(self) -> int:
        """Size of all elements in bytes."""
        return math.prod(self.shape or (0,)) * self.item_bytes if self.shape != () else self.item_bytes

    @property
    def num_rows(self) -> int:
        """Length of the first axis, or 0 for a dataset without axes or elements."""
        return self.shape[0] if self.shape and self.num_bytes else 0

    @property
    def grid(self) -> ChunkGrid:
        """The chunk grid, for a dataset with at least one axis."""
        return ChunkGrid(self.shape or (), self.chunks, self.item_bytes, bool(self.filters))


@dataclass(frozen=True)
class Node:
    """A link in a group, and the kind of object that it refers to."""

    parent: bytes  # path of the group
    name: bytes
    kind: str  # "group", "dataset", "type", "soft" (a soft link), or "again" (another hard link to a listed object)
    leads_to: bytes = b""  # target of a soft link; for another hard link, the first path of its object

    @property
    def path(self) -> bytes:
        return b"/".join((self.parent, self.name)) if self.parent else self.name


@dataclass
class Survey:
    """All objects and links of a file."""

    nodes: list[Node] = field(default_factory=list)  # groups are listed before their members
    datasets: dict[bytes, DatasetFacts] = field(default_factory=dict)  # by path
    paths: dict[int, bytes] = field(default_factory=dict)  # first path of each object, by address; empty for the root
    left_out: list[str] | None = None  # what cannot be copied, and why; None: it raises an error


def survey_file(file: h5py.File, *, leave_out: bool = False) -> Survey:
    """List all objects and links of a file.

    Raises FileError or TrustError if one cannot be preserved; with ``leave_out``, it is listed in ``left_out`` instead.
    """
    survey, label = Survey(left_out=[] if leave_out else None), printable(file.filename)
    with translate_errors(file.filename):
        survey.paths[h5o.get_info(file.id).addr] = b""
        groups = [b""]
        for parent in groups:  # the list grows during the iteration
            group = h5g.open(file.id, parent or b"/")
            names: list[bytes] = []
            tracked = group.get_create_plist().get_link_creation_order() & ORDER_TRACKED
            group.links.iterate(names.append, idx_type=h5py.h5.INDEX_CRT_ORDER if tracked else h5py.h5.INDEX_NAME)
            for name in names:
                try:
                    node = _add_link(survey, group, parent, name, label)
                except (FileError, *DAMAGES) as error:
                    if survey.left_out is None and isinstance(error, FileError):
                        raise type(error)(
                            f"{error}. To leave it out, name the datasets to repack with fields"
                        ) from None
                    if survey.left_out is None:
                        raise
                    path = parent + b"/" + name if parent else name
                    survey.left_out.append(f"{printable(path)!r} is left out: {_reason(error, label)}")
                    continue
                if node.kind == "group":
                    groups.append(node.path)
    return survey


def _add_link(survey: Survey, group: h5g.GroupID, parent: bytes, name: bytes, label: str) -> Node:
    """Add a link, and the dataset that it leads to, unless an error is raised."""
    paths = dict[int, bytes]()
    node = _describe_link(group, parent, name, survey.paths, paths, label)
    if node.kind == "dataset":
        survey.datasets[node.path] = describe_dataset(h5d.open(group, name), node.path, label)
    survey.paths |= paths
    survey.nodes.append(node)
    return node


def _reason(error: Exception, label: str) -> str:
    text = str(error) if isinstance(error, FileError) else f"HDF5 cannot read it ({error})"
    return text.removeprefix(f"{label}: ")


def _describe_link(
    group: h5g.GroupID, parent: bytes, name: bytes, known: dict[int, bytes], paths: dict[int, bytes], label: str
) -> Node:
    """Describe a link. If its object is not ``known``, add the path to ``paths``."""
    where = f"{label}: {printable(parent + b'/' + name if parent else name)!r}"
    if name in (b"", b".") or b"/" in name:
        raise FileError(f"{where} is damaged: it has an invalid name")
    kind = group.links.get_info(name).type
    if kind == h5l.TYPE_SOFT:
        return Node(parent, name, "soft", group.links.get_val(name))
    if kind == h5l.TYPE_EXTERNAL:
        raise FileError(
            f"{where} is a link into another file, which is not followed: replace it by its target, or delete it"
        )
    if kind != h5l.TYPE_HARD:
        raise FileError(f"{where} is a link of an unknown kind ({kind}): delete it")
    info = h5o.get_info(group, name)
    if info.addr in known:
        return Node(parent, name, "again", known[info.addr])
    kinds = {h5o.TYPE_GROUP: "group", h5o.TYPE_DATASET: "dataset", h5o.TYPE_NAMED_DATATYPE: "type"}
    if info.type not in kinds:
        raise FileError(f"{where} is an object of an unknown kind ({info.type}): delete it")
    node = Node(parent, name, kinds[info.type])
    paths[info.addr] = node.path
    return node


def describe_dataset(dataset: h5d.DatasetID, path: bytes, label: str) -> DatasetFacts:
    """Return the metadata of a dataset. Raises FileError or TrustError if it cannot be preserved."""
    where = f"{label}: {printable(path)!r}"
    properties, kind, space = dataset.get_create_plist(), dataset.get_type(), dataset.get_space()
    layout = properties.get_layout()
    name = repr(printable(path))
    remedy = f"copy the values with h5py: values = file[{name}][()]; del file[{name}]; file[{name}] = values"
    if layout == h5d.CONTIGUOUS and properties.get_external_count():
        raise TrustError(f"{where} has values in other files, which are not opened: {remedy}")
    if layout not in (h5d.CONTIGUOUS, h5d.CHUNKED, h5d.COMPACT):
        raise TrustError(f"{where} is a virtual dataset, which may read other files: {remedy}")
    references = references_of(kind)
    if not all(part.equal(h5t.STD_REF_OBJ) or part.equal(h5t.STD_REF_DSETREG) for part in references):
        raise FileError(f"{where} has references that h5py cannot read: leave it out, or rewrite it")
    stored_bytes, file_bytes = dataset.get_storage_size(), h5py.h5i.get_file_id(dataset).get_filesize()
    if stored_bytes > file_bytes:
        raise FileError(f"{where} claims {stored_bytes} stored bytes, but the file has {file_bytes}: it is damaged")
    try:
        dtype, letter = str(dataset.dtype), dataset.dtype.kind
    except TypeError:
        dtype, letter = "a type that NumPy does not have", "V"
    null = space.get_simple_extent_type() == h5s.NULL
    filters = [properties.get_filter(number) for number in range(properties.get_nfilters())]
    maxshape = () if null else space.get_simple_extent_dims(True)
    return DatasetFacts(
        path=path,
        shape=None if null else tuple(dataset.shape),
        maxshape=tuple(None if size == h5s.UNLIMITED else size for size in maxshape),
        chunks=properties.get_chunk() if layout == h5d.CHUNKED else None,
        dtype=dtype,
        kind=letter,
        item_bytes=kind.get_size(),
        filters=tuple(filter_[0] for filter_ in filters),
        filter_names=tuple(
            KNOWN_FILTERS.get(filter_[0]) or printable(filter_[3].split(b"\0")[0]) for filter_ in filters
        ),
        stored_bytes=int(stored_bytes),
        is_fixed_size=not is_variable(kind),
        has_references=bool(references),
        has_region_references=refers_to_regions(kind),
        has_named_type=kind.committed(),
    )


def references_of(kind: h5t.TypeID) -> list[h5t.TypeReferenceID]:
    """List the types of the references that values contain."""
    return [part for part in parts_of(kind) if isinstance(part, h5t.TypeReferenceID)]


def refers_to_regions(kind: h5t.TypeID) -> bool:
    """Return whether values contain references to regions of datasets."""
    return any(part.equal(h5t.STD_REF_DSETREG) for part in references_of(kind))


def attribute_names(item: Any) -> list[bytes]:
    """List the names of an object's attributes, in order of creation if the file tracks it."""
    names: list[bytes] = []
    tracked = not isinstance(item, h5t.TypeID) and item.get_create_plist().get_attr_creation_order() & ORDER_TRACKED
    h5a.iterate(item, names.append, index_type=h5py.h5.INDEX_CRT_ORDER if tracked else h5py.h5.INDEX_NAME)
    return names
