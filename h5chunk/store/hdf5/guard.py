"""Validate untrusted HDF5 files: no references to other files, and sizes in proportion to the stored bytes.

| threat | defence |
| --- | --- |
| soft and external links | each name on a path must be a hard link, which is checked before anything is opened |
| external storage, virtual datasets | refused before their shape is queried |
| unknown filters, repeated filters | refused before a chunk is read, so that no plugin is loaded |
| unwritten chunks | refused beyond 64 MiB plus 1032 times the stored bytes (`check_stored_size`) |
| chunks above 256 MiB | refused beyond the highest ratio of their filters (`max_ratio`) |
| chunks that overlap, are outside of the file, or have a wrong length | refused (`list_chunks`, `ChunkDecoder`) |
| filters whose parameters do not match the chunks, so that HDF5 crashes | refused (`check_filters`) |
| strings of variable length that describe a matrix | read without HDF5, which may hang on them |
| strings of variable length, references | refused in /h5chunk, like large attributes of /h5chunk |
| fields with strings or arrays of variable length | read without HDF5, with all addresses and sizes checked |
| members of variable length in compound types, references | refused as fields; other members are read without them |
| links and datasets in the group /h5chunk | refused, except for hard links to datasets of valid types and shapes |

HDF5 itself detects other damaged metadata. Its errors become FileErrors, and so do its crashes and endless loops,
because files are first opened in a child process (`h5chunk.store.hdf5.child`).

With ``trusted``, HDF5 loads any filter, and follows links, views (virtual datasets) and external storage wherever they
lead. `scripts/PROMISES.md` describes the evidence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py

from h5chunk.errors import (
    FieldError,
    FileError,
    OptionError,
    TrustError,
    UnsupportedError,
    as_text,
    exact_bytes,
    human_bytes,
    printable,
)
from h5chunk.store.hdf5.chunk_table import check_chunks, is_variable
from h5chunk.store.hdf5.codecs import BITSHUFFLE, FLETCHER32, GZIP, KNOWN_FILTERS, LZ4, LZF, SHUFFLE
from h5chunk.store.hdf5.open import DAMAGES, address_of, errors_as, explained, is_refused

MAX_RATIO = 1032  # highest compression ratio of gzip, and of the filters in `WEAK_FILTERS`
MAX_STRONG_RATIO = 1 << 17  # highest ratio of other filters: Zstandard stores 128 KiB of equal bytes in 4 bytes
WEAK_FILTERS = {GZIP, SHUFFLE, FLETCHER32, LZF, LZ4}
SLACK_BYTES = 64 << 20  # bytes that a shape may claim although nothing was written, because they read as the fill value
SLACK_CHUNKS = 1 << 20  # chunks that a shape may claim although they were never written; each needs memory in a table
MAX_INFLATED_BYTES = 256 << 20  # larger chunks must have enough stored bytes for MAX_RATIO
MAX_ATTRIBUTE_BYTES = 1 << 20
REMEDY = "to allow it, pass trusted=True (--trusted)"


class Guard:
    """Finds objects in a file, and refuses those that the description of this module calls unsafe.

    Errors about objects that could be read with ``trusted`` end with ``remedy``.
    """

    def __init__(self, path: str | os.PathLike[str], trusted: bool = False, *, remedy: str = REMEDY) -> None:
        self.path, self._remedy = Path(path), remedy
        if not isinstance(trusted, bool):
            raise OptionError(f"trusted is {trusted!r}: pass True to follow links, also to other files, or False")
        self._trusted = trusted

    def find(self, file: h5py.File, name: str) -> h5py.Dataset | h5py.Group | None:
        """Open the object at a path; None if it does not exist. Raises TrustError if an untrusted link is on it."""
        where = self._where(name)
        with errors_as(FieldError, f"{where} cannot be opened"):
            if self._trusted and name not in file:
                return None
            if self._trusted:
                return file[name]
            item: Any = file.file["/"] if name.startswith("/") else file
            for part in (part for part in name.split("/") if part not in ("", ".")):
                item = self._member(item, part, where) if isinstance(item, h5py.Group) else None
            return item

    def _member(self, group: h5py.Group, part: str, where: str) -> Any:
        """Open a member of a group; None if it or its target does not exist. Raises TrustError for untrusted links."""
        link = group.get(part, getlink=True)
        if isinstance(link, h5py.HardLink):
            return group[part]
        if link is not None and not self._trusted:
            raise self._not_followed(link, where)
        return group.get(part)

    def _not_followed(self, link: Any, where: str) -> TrustError:
        if not isinstance(link, (h5py.SoftLink, h5py.ExternalLink)):
            return TrustError(
                f"{where} is a user-defined link, which is not followed: replace it by a copy of its target"
            )
        soft = isinstance(link, h5py.SoftLink)
        kind, of = ("a soft link", "") if soft else ("an external link", f" of {link.filename!r}")
        remedy = f"read {'its target' if soft else 'that file'} directly; {self._remedy}"
        return TrustError(f"{where} is {kind} to {link.path!r}{of}, which is not followed: {remedy}")

    def check_field(self, dataset: h5py.Dataset, name: str) -> None:
        """Check a dataset before its shape is used.

        Raises FieldError if its shape doesn't match the stored bytes, TrustError if it needs other files or plugins.
        """
        where = self._where(name)
        with errors_as(FieldError, f"{where} is damaged"):
            self._check_field(dataset, where)

    def _check_field(self, dataset: h5py.Dataset, where: str) -> None:
        properties = dataset.id.get_create_plist()
        layout = properties.get_layout()
        if layout == h5py.h5d.VIRTUAL:
            if not self._trusted:
                first = f", such as {properties.get_virtual_filename(0)!r}" if properties.get_virtual_count() else ""
                raise TrustError(
                    f"{where} is a view of other files{first}, which are not opened: read those directly; "
                    f"{self._remedy}"
                )
        elif layout == h5py.h5d.CONTIGUOUS and properties.get_external_count():
            if not self._trusted:
                name = os.fsdecode(properties.get_external(0)[0])
                raise TrustError(
                    f"{where} has its values in another file, {name!r}, which is not opened: copy them into this file; "
                    f"{self._remedy}"
                )
        elif dataset.id.get_space().get_simple_extent_type() != h5py.h5s.NULL:  # get_space opens the files of a view
            check_filters(properties, where, trusted=self._trusted, remedy=self._remedy)
            check_stored_size(dataset, properties, where)

    def check_matrix(self, file: h5py.File, name: str) -> None:
        """Check the datasets of the sparse matrix in a group as `check_field` does."""
        group = file[name]
        parts = ["indptr", "indices"] + ([] if small_attribute(group, "pattern", False) else ["data"])
        self.check_parts(file, name, parts)

    def check_parts(self, file: h5py.File, name: str, parts: Collection[str]) -> None:
        """Check the datasets of a group that are named in ``parts`` and exist, as `check_field` does."""
        for part in (part for part in list(file[name]) if part in parts):  # ``part in group`` would follow links
            where = f"{name.rstrip('/')}/{part}"
            item = self.find(file, where)
            if isinstance(item, h5py.Dataset):
                self.check_field(item, where)

    def walk(self, group: h5py.Group) -> Iterator[tuple[str, h5py.Dataset | FieldError]]:
        """Yield (path, dataset) once for each dataset in a group, and (path, error) for each refused or damaged one."""
        seen: set[tuple[int, ...]] = set()
        stack: list[tuple[str, Any]] = [("", group)]
        while stack:
            prefix, inside = stack.pop()
            try:
                parts = list(inside)
            except DAMAGES as error:
                name = prefix.rstrip("/") or "/"
                yield name, self._damaged(name, "list its members", error)
                continue
            for part in parts:
                name = f"{prefix}{as_text(part)}"
                try:
                    if isinstance(part, bytes):  # h5py returns names that it cannot decode as bytes
                        raise UnsupportedError(f"{self._where(name)} has a name that is not UTF-8: rename it")
                    item = self._member(inside, part, self._where(name))
                    if item is None:
                        raise FieldError(f"{self._where(name)} is a link without a target")
                    address = address_of(item)
                except FieldError as error:
                    yield name, error
                    continue
                except DAMAGES as error:
                    yield name, self._damaged(name, "open it", error)
                    continue
                if address in seen:
                    continue
                seen.add(address)
                if isinstance(item, h5py.Group):
                    stack.append((f"{name}/", item))
                elif isinstance(item, h5py.Dataset):
                    yield name, item

    def _damaged(self, name: str, action: str, error: Exception) -> FieldError:
        problem = "" if is_refused(error) else " is damaged"
        return FieldError(f"{self._where(name)}{problem}: HDF5 cannot {action} ({explained(error)})")

    def _where(self, name: str) -> str:
        return f"{printable(self.path)}: {name!r}"


def check_header_group(file: h5py.File, name: str, attributes: Sequence[str]) -> None:
    """Raise FileError if links, datasets or ``attributes`` of the group /``name`` are unsafe to read."""
    label = f"{printable(file.filename)}: its group /{name} is damaged"
    with errors_as(FileError, label):
        link = file.get(name, getlink=True)
        if link is not None and not isinstance(link, h5py.HardLink):
            raise FileError(f"{label}: it is a link instead of a group")
        group = None if link is None else file[name]
        if not isinstance(group, h5py.Group) or "format_version" not in group.attrs:
            return
        check_attributes(group, label, attributes)
        guard = Guard(file.filename)
        for inner, item in guard.walk(group):
            if isinstance(item, FieldError):
                raise FileError(f"{label}: {inner} is a link, or cannot be opened")
            if is_variable(item.id.get_type()):
                raise FileError(f"{label}: {inner} has values of variable length")
            guard.check_field(item, f"{name}/{inner}")
            check_chunks(item)


def check_filters(properties: h5py.h5p.PropDCID, where: str, *, trusted: bool, remedy: str = "") -> None:
    """Raise TrustError for unknown filters, and FieldError for filters that are repeated or have invalid parameters."""
    codes = []
    for number in range(properties.get_nfilters()):
        code, _, values, name = properties.get_filter(number)
        if code == BITSHUFFLE and len(values) >= 3 and not values[2]:  # HDF5 would crash
            raise FieldError(f"{where} is compressed with filter bitshuffle for elements of 0 bytes: it is damaged")
        if code in (h5py.h5z.FILTER_SCALEOFFSET, h5py.h5z.FILTER_NBIT) and len(values) >= 3:
            count = math.prod(properties.get_chunk())
            if values[2] != count:  # HDF5 would crash
                raise FieldError(
                    f"{where} is compressed with filter {KNOWN_FILTERS[code]} for chunks of {values[2]} elements, but "
                    f"its chunks have {count}: it is damaged"
                )
        if code not in KNOWN_FILTERS and not trusted:
            label = ascii(name.decode(errors="replace")[:40])
            raise TrustError(
                f"{where} is compressed with filter {code} ({label}), which would load a plugin: rewrite it with "
                f"another filter (h5repack -f GZIP=4){remedy and '; '}{remedy}"
            )
        codes.append(code)
    twice = next((code for code in codes if codes.count(code) > 1), None)
    if twice is not None:
        label = KNOWN_FILTERS.get(twice, str(twice))
        raise FieldError(
            f"{where} has filter {label} more than once, like a decompression bomb: rewrite it with h5repack"
        )


def max_ratio(properties: h5py.h5p.PropDCID) -> float:
    """Return the highest compression ratio of undamaged data with the filters of a dataset."""
    codes = {properties.get_filter(number)[0] for number in range(properties.get_nfilters())}
    if h5py.h5z.FILTER_SCALEOFFSET in codes:
        return math.inf  # a chunk of equal values has only a header
    return MAX_RATIO if codes <= WEAK_FILTERS and not {GZIP, LZF} <= codes else MAX_STRONG_RATIO


def check_stored_size(dataset: h5py.Dataset, properties: h5py.h5p.PropDCID, where: str) -> None:
    """Raise FieldError unless a dataset's shape, chunks and stored bytes match each other and the file's size."""
    shape, item_bytes = dataset.id.get_space().shape, dataset.id.get_type().get_size()
    claimed, stored = math.prod(shape) * item_bytes, dataset.id.get_storage_size()
    file_bytes = dataset.file.id.get_filesize()
    if stored > file_bytes:
        raise FieldError(f"{where} claims {stored} stored bytes, but the file has only {file_bytes}: it is damaged")
    layout = properties.get_layout()
    if layout == h5py.h5d.CHUNKED:
        _check_chunk_sizes(dataset, properties, where, claimed, stored)
    elif stored and stored < claimed:
        raise FieldError(f"{where} has a shape of {claimed} bytes, but {stored} bytes are stored: it is damaged")
    elif not stored and claimed > SLACK_BYTES:
        raise UnsupportedError(f"{where} claims {human_bytes(claimed)}, but nothing was ever written: write it first")
    elif layout == h5py.h5d.CONTIGUOUS and stored and (dataset.id.get_offset() or 0) + claimed > file_bytes:
        raise FieldError(f"{where} extends beyond the end of the file: it is damaged")


def _check_chunk_sizes(
    dataset: h5py.Dataset, properties: h5py.h5p.PropDCID, where: str, claimed: int, stored: int
) -> None:
    shape, chunks = dataset.id.get_space().shape, properties.get_chunk()
    chunk_bytes = math.prod(chunks) * dataset.id.get_type().get_size()
    if not stored and chunk_bytes > MAX_INFLATED_BYTES:
        size = human_bytes(chunk_bytes)
        raise UnsupportedError(f"{where} has chunks of {size}, but none was ever written: write it first")
    if chunk_bytes > max(MAX_INFLATED_BYTES, max_ratio(properties) * stored):
        raise FieldError(
            f"{where} has chunks of {human_bytes(chunk_bytes)}, but only {human_bytes(stored)} are stored: it is "
            "damaged, or a decompression bomb"
        )
    expected = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
    num_chunks = dataset.id.get_num_chunks()
    if num_chunks > expected:
        raise FieldError(f"{where} has {num_chunks} chunks, but its shape allows only {expected}: it is damaged")
    unwritten = (expected - num_chunks) * chunk_bytes
    if expected - num_chunks > SLACK_CHUNKS:
        raise UnsupportedError(
            f"{where} has {expected} chunks, but only {num_chunks} were ever written: write them first"
        )
    if unwritten > SLACK_BYTES + MAX_RATIO * stored:
        raise UnsupportedError(
            f"{where} claims {human_bytes(claimed)}, but only {human_bytes(stored)} were ever written: write it first"
        )


def check_attributes(item: h5py.HLObject, where: str, names: Iterable[str]) -> None:
    """Raise FileError if an attribute of an object is large or has a variable-length type."""
    for name in names:
        if name in item.attrs and (problem := _attribute_problem(item, name)):
            raise FileError(f"{where}: attribute {name!r} has {problem}")


def small_attribute(item: h5py.HLObject, name: str, default: Any = None) -> Any:
    """Return the value of an attribute, or the default if it is missing, large or of variable length."""
    return item.attrs[name] if name in item.attrs and not _attribute_problem(item, name) else default


def _attribute_problem(item: h5py.HLObject, name: str) -> str:
    attribute = item.attrs.get_id(name)
    if is_variable(attribute.get_type()):
        return "variable length, so h5chunk did not write it"
    has_values = attribute.get_space().get_simple_extent_npoints() > 0  # else h5py raises an error for the size
    size = attribute.get_storage_size() if has_values else 0
    return f"{exact_bytes(size)}, but the limit is {exact_bytes(MAX_ATTRIBUTE_BYTES)}" * (size > MAX_ATTRIBUTE_BYTES)
