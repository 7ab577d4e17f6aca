"""List the samples of an HDF5 file in which each sample is a dataset, or a group of datasets.

Child processes, one per core, list ranges of samples. Each range is stored once it is listed, so that after a killed
run only the other ranges are listed. A dataset that is stored like the first one needs only a few checks.

Source: https://github.com/h5py/h5py/issues/2425 and 2174, which report such files, and the rates of opening by name.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.machine import available_cores
from h5chunk.store.hdf5.attributes import join_columns, read_attribute
from h5chunk.store.hdf5.child import in_child, limited_memory
from h5chunk.store.hdf5.chunk_table import (
    ALL_FILTERS,
    check_chunks,
    impossible_sizes,
    is_listed_wrongly,
    is_stored_as,
    is_variable,
    leaves_out_user_block,
    partial_chunks_are_plain,
)
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.keyed_index import (
    CONTIGUOUS,
    THROUGH_HDF5,
    FieldIndex,
    KeyedIndex,
    index_paths,
    joined,
    load_index,
    locked_folder,
    remove_stale,
    save_index,
    stamp_with_bytes,
)
from h5chunk.store.hdf5.open import follow, opened
from h5chunk.store.hdf5.types import type_problem

PART_SAMPLES = 5_000  # samples per range; a child process lists a range in about a second
REPORTED = 1000  # number of samples between two reports of progress
HEADER_BYTES = 4 << 10  # bytes after the start of an object header to search for a compact dataset's values

Report = Callable[[int, "int | None"], None]  # called with the number of listed samples, and the total


def open_index(
    path: Path, patterns: Mapping[str, str], attributes: Mapping[str, Any], trusted: bool, report: Report
) -> KeyedIndex:
    """Load the index of a file, or build it and store it next to the file or, if that is impossible, in a cache folder.

    ``attributes`` maps names to the values of samples that lack the attribute, or to None. Raises FieldError if a
    sample lacks a dataset, or an attribute without a default, or differs from the first sample in more than its length.
    """
    defaults = [[name, repr(value)] for name, value in attributes.items() if value is not None]
    made_for = [[list(each) for each in patterns.items()], list(attributes), trusted, *([defaults] if defaults else [])]
    stamp = stamp_with_bytes(path)
    if not stamp:
        raise FileError(f"{printable(path)}: no such file")
    places = index_paths(path, made_for)
    for place in places:
        index = load_index(place, stamp, made_for)
        if isinstance(index, KeyedIndex):
            return index
        if index:
            warnings.warn(f"{printable(place)}: the index is rebuilt, because {index}", stacklevel=3)
    with locked_folder(places) as store:
        if store and isinstance(index := load_index(store[0], stamp, made_for), KeyedIndex):
            return index  # another process has built it
        options = _Options(path, patterns, attributes, trusted)
        built = _build(options, stamp, made_for, store and store[1], report)
        if store:
            try:
                save_index(*store, path, stamp, made_for, built)
            except FileError as error:
                warnings.warn(f"{error}, so it is rebuilt each time", stacklevel=3)
            shutil.rmtree(store[1], ignore_errors=True)
            remove_stale(path, stamp)
    return built


def list_samples(path: Path, patterns: Mapping[str, str], attributes: Sequence[str], report: Report) -> KeyedIndex:
    """List the samples of a file like `open_index`, but store no index. Fields may also contain strings."""
    options = _Options(path, patterns, dict.fromkeys(attributes), False, kinds="biufS")
    return _build(options, stamp_with_bytes(path), [], None, report)


class _Options(NamedTuple):
    path: Path
    patterns: Mapping[str, str]
    attributes: Mapping[str, Any]  # value of samples that lack the attribute, by name; None: raise an error
    trusted: bool
    kinds: str = "biuf"  # kinds of NumPy dtypes that a field may have

    @property
    def before(self) -> str:
        """The group of the samples."""
        return next(iter(self.patterns.values())).partition("*")[0].strip("/")


def _build(options: _Options, stamp: Any, made_for: Any, folder: Path | None, report: Report) -> KeyedIndex:
    path, before = options.path, options.before
    names, all_hard = in_child(lambda _: _list_names(path, before, options.trusted), lambda: printable(path))
    if not names:
        raise FieldError(f"{printable(path)}: no sample matches, because the group {before or '/'!r} is empty")
    borders = [*range(0, len(names), PART_SAMPLES), len(names)]
    done = dict.fromkeys(borders[:-1], 0)

    def list_part(start: int, stop: int) -> KeyedIndex:
        key = [*made_for, start, stop]
        part = load_index(folder / f"{start}-{stop}", stamp, key) if folder else ""
        if isinstance(part, KeyedIndex) and len(part) == stop - start:
            say(start, stop - start)
            return part

        def work(say_in_child: Callable[[Any], None]) -> KeyedIndex:
            with limited_memory(path, options.trusted):
                return _Lister(options, all_hard).list(names[start:stop], say_in_child)

        part = in_child(work, lambda: printable(path), lambda count: say(start, count))
        if folder:
            with suppress(FileError):  # the part is only needed after a kill
                save_index(folder / f"{start}-{stop}", folder, path, stamp, key, part)
        return part

    def say(start: int, count: int) -> None:
        done[start] = count
        report(sum(done.values()), len(names))

    def differ(name: str, number: int, field: FieldIndex, model: FieldIndex) -> Exception:
        where = f"{printable(path)}: sample {printable(names[number].decode())}"
        return _differs(where, name, (field.shape, field.dtype), (model.shape, model.dtype))

    with ThreadPoolExecutor(available_cores()) as pool:
        futures = [pool.submit(list_part, *part) for part in pairwise(borders)]
        try:
            parts = [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
    if stamp_with_bytes(path) != stamp:
        raise FileError(f"{printable(path)} changed while it was indexed: try again")
    return joined(parts, differ)


def _list_names(path: Path, before: str, trusted: bool) -> tuple[list[bytes], bool]:
    """Return the names in a group, and whether all are hard links."""
    guard = Guard(path, trusted)
    with limited_memory(path, trusted), opened(path) as file:
        group = guard.find(file, before) if before else file["/"]
        if not isinstance(group, h5py.Group):
            raise FieldError(f"{printable(path)} has no group {before!r}: run h5chunk info to list its datasets")
        names: list[bytes] = []
        kinds: set[int] = set()

        def note(name: bytes, link: Any) -> None:
            names.append(name)
            kinds.add(link.type)

        group.id.links.iterate(note, info=True)
    for name in names:
        try:
            name.decode()
        except UnicodeDecodeError:
            raise FieldError(f"{printable(path)}: the name {name!r} in {before!r} is not UTF-8: rename it") from None
    return names, kinds == {h5py.h5l.TYPE_HARD}


def _differs(where: str, name: str, found: tuple[Any, Any], first: tuple[Any, Any]) -> FieldError:
    return FieldError(
        f"{where} has {found[1]} {list(found[0])} in {name!r}, but the first sample has {first[1]} {list(first[0])}: "
        "samples may differ only in the length of the first axis"
    )


class _Lister:
    def __init__(self, options: _Options, all_hard: bool) -> None:
        self._path, self._before, self._all_hard = options.path, options.before, all_hard
        self._guard, self._kinds = Guard(options.path, options.trusted), options.kinds
        self._inner = {name: pattern.partition("*")[2].strip("/") for name, pattern in options.patterns.items()}
        self._defaults = options.attributes
        self._columns: dict[str, list[Any]] = {name: [] for name in options.attributes}

    def list(self, names: Sequence[bytes], say: Callable[[int], None]) -> KeyedIndex:
        labels: list[str] = []
        with opened(self._path) as file:
            self._group: Any = self._guard.find(file, self._before) if self._before else file["/"]
            fields = {name: _FieldLister(file, self._guard, name, self._kinds) for name in self._inner}
            for number, key in enumerate(names):
                sample = printable(f"{self._before}/{key.decode()}".lstrip("/"))
                labels.append(f"{printable(self._path)}: sample {sample}")
                self._add(key.decode(), labels[-1], fields)
                if number % REPORTED == REPORTED - 1:
                    say(number + 1)
        say(len(names))
        columns = {name: self._column(name, values) for name, values in self._columns.items()}
        blob, ends = np.frombuffer(b"".join(names), np.uint8), np.cumsum([len(name) for name in names])
        return KeyedIndex(blob, ends, {name: field.index(labels) for name, field in fields.items()}, columns)

    def _add(self, key: str, where: str, fields: Mapping[str, _FieldLister]) -> None:
        item = h5py.h5o.open(self._group.id, key.encode()) if self._all_hard else self._find(self._group, key)
        owners = [item]  # the objects that may have the attributes
        for name, inner in self._inner.items():
            dataset = self._find(item, inner) if inner else item
            if not isinstance(dataset, h5py.h5d.DatasetID):
                raise FieldError(f"{where} has no dataset {inner!r}: all samples must have the same datasets")
            fields[name].add(dataset, where)
            owners.append(dataset)
        for name, values in self._columns.items():
            owner = next((each for each in owners if h5py.h5a.exists(each, name.encode())), None)
            default = self._defaults[name] if owner is None else None
            if default is None:
                values.append(read_attribute(owner or item, name, where, FieldError))
            else:
                values.append(default.encode() if isinstance(default, str) else default)

    def _find(self, start: Any, path: str) -> Any:
        item = follow(start.id if isinstance(start, h5py.Group) else start, path)
        if item is None and isinstance(start, (h5py.Group, h5py.h5g.GroupID)):  # the path may contain a link
            group = start if isinstance(start, h5py.Group) else h5py.Group(start)
            target = self._guard.find(group, path)
            item = None if target is None else target.id
        return item

    def _column(self, name: str, values: Sequence[Any]) -> np.ndarray:
        try:
            column = join_columns(name, [np.array([value]) for value in values])
        except FieldError as error:
            raise FieldError(f"{printable(self._path)}: {error}") from None
        return column.astype("S1") if column.dtype.itemsize == 0 else column


class _FieldLister:
    def __init__(self, file: h5py.File, guard: Guard, name: str, kinds: str) -> None:
        self._file, self._guard, self._name, self._of_values = file, guard, name, kinds
        self._file_bytes = file.id.get_filesize()
        self._has_block = bool(file.userblock_size)
        self._first: tuple[Any, tuple[int, ...], np.dtype] | None = None  # type, shape, dtype
        self._kinds: list[tuple[Any, list[Any]]] = []  # creation properties, and description
        self._kinds_of: dict[tuple[int, ...], list[int]] = defaultdict(list)  # numbers of kinds, from 1, by chunk shape
        self._stored_here = True
        self._lengths: list[int] = []
        self._places: list[tuple[int, int]] = []  # place and kind
        self._chunks: list[tuple[int, int, int, int]] = []  # offset, size, filter mask and sample

    def add(self, dataset: Any, where: str) -> None:
        """Add the next sample."""
        shape = dataset.shape
        if self._first is None:
            self._check(dataset, where)
            number = h5py.Dataset(dataset)
            self._first = dataset.get_type(), shape, number.dtype.newbyteorder("=")
            self._stored_here = number.dtype.kind in "biuf" and is_stored_as(number, self._first[2])
            if self._first[2].kind not in self._of_values:
                raise FieldError(f"{where}: {self._name!r} {type_problem(number.dtype)}, or leave the field out")
        kind, first, dtype = self._first
        if dataset.get_type() != kind or len(shape) != len(first) or shape[1:] != first[1:]:
            self._check(dataset, where)
            raise _differs(where, self._name, (shape, h5py.Dataset(dataset).dtype), (first, dtype))
        self._lengths.append(shape[0] if shape else 1)
        self._places.append(self._place(dataset, shape, where))

    def index(self, names: Sequence[str]) -> FieldIndex:
        """Return the index of all samples that were added. ``names`` are their names in messages."""
        assert self._first is not None
        places = np.array(self._places, np.int64).reshape(-1, 2)
        listed = np.array(self._chunks, np.int64).reshape(-1, 4)
        self._check_chunks(listed, places[listed[:, 3], 1], names)
        offsets, sizes, masks, _ = listed.T
        lengths, kinds = np.array(self._lengths, np.int64), places[:, 1].astype(np.int32)
        chunked = [kind for _, kind in self._kinds]
        chunks = offsets.copy(), sizes.copy(), masks.astype(np.uint32)
        return FieldIndex(self._first[1], self._first[2], chunked, lengths, places[:, 0].copy(), kinds, *chunks)

    def _check(self, dataset: Any, where: str) -> None:
        if dataset.shape is None or is_variable(dataset.get_type()):
            problem = "is empty" if dataset.shape is None else type_problem(h5py.Dataset(dataset).dtype)
            raise FieldError(f"{where}: {self._name!r} {problem}; or leave the field out")
        self._guard.check_field(h5py.Dataset(dataset), where.partition(": sample ")[2])
        check_chunks(h5py.Dataset(dataset))

    def _place(self, dataset: Any, shape: tuple[int, ...], where: str) -> tuple[int, int]:
        """Return the place and kind of a sample. Raises FileError if it extends beyond the end of the file."""
        if not self._stored_here:
            self._check(dataset, where)
            return 0, THROUGH_HDF5
        num_bytes = math.prod(shape) * self._first[2].itemsize if self._first else 0
        if not num_bytes:
            return 0, CONTIGUOUS
        offset = dataset.get_offset() if not self._has_block or dataset.get_storage_size() else None
        if offset is not None:
            if not 0 <= offset <= self._file_bytes - num_bytes:
                raise FileError(f"{where} is damaged: {self._name!r} extends beyond the end of the file")
            return offset, CONTIGUOUS
        properties = dataset.get_create_plist()
        layout = properties.get_layout()
        if layout == h5py.h5d.CHUNKED and not (self._has_block and leaves_out_user_block()):
            return self._chunked(dataset, shape, properties, where)
        self._check(dataset, where)
        if layout == h5py.h5d.COMPACT and not self._has_block:
            return self._compact(dataset)
        return 0, THROUGH_HDF5

    def _compact(self, dataset: Any) -> tuple[int, int]:
        """Find the values of a dataset in its object header. Any place with equal bytes is suitable."""
        values = np.empty(dataset.shape, self._first[2]) if self._first else np.empty(0)
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
        start = int(h5py.h5g.get_objinfo(dataset).objno[0])
        found = os.pread(self._file.id.get_vfd_handle(), values.nbytes + HEADER_BYTES, start).find(values.tobytes())
        return (0, THROUGH_HDF5) if found < 0 else (start + found, CONTIGUOUS)

    def _chunked(self, dataset: Any, shape: tuple[int, ...], properties: Any, where: str) -> tuple[int, int]:
        chunk = properties.get_chunk()  # H5Pequal does not compare its last axis
        alike = self._kinds_of[chunk]
        kind = next((number for number in alike if properties.equal(self._kinds[number - 1][0])), None)
        is_wrong = is_listed_wrongly(h5py.Dataset(dataset))
        found: dict[tuple[int, ...], tuple[int, int, int]] = {}

        def note(stored: Any) -> None:
            found[stored.chunk_offset] = stored.byte_offset, stored.size, stored.filter_mask

        if not is_wrong:
            dataset.chunk_iter(note)
        num_chunks = math.prod(-(-side // step) for side, step in zip(shape, chunk, strict=True))
        starts = [*product(*(range(0, side, step) for side, step in zip(shape, chunk, strict=True)))]
        fits = len(found) == num_chunks and all(start in found for start in starts)
        if kind is None or not fits:
            self._check(dataset, where)
        if not fits:
            return 0, THROUGH_HDF5  # chunks were never written, or are listed wrongly
        kind = kind or self._add_kind(h5py.Dataset(dataset), properties)
        if self._kinds[kind - 1][1][1][0]:  # filter masks do not show that partial chunks have no filters
            for start in starts:
                if any(at + step > side for at, step, side in zip(start, chunk, shape, strict=True)):
                    found[start] = *found[start][:2], ALL_FILTERS
        sample = len(self._lengths) - 1
        self._chunks += [(*found[start], sample) for start in starts]
        return len(self._chunks) - len(starts), kind

    def _add_kind(self, dataset: h5py.Dataset, properties: Any) -> int:
        filters = [[*properties.get_filter(number)[:1], list(properties.get_filter(number)[2])]
                   for number in range(properties.get_nfilters())]  # fmt: skip
        partial = partial_chunks_are_plain(properties)
        self._kinds.append((properties, [list(properties.get_chunk()), [partial, filters]]))
        self._kinds_of[properties.get_chunk()].append(len(self._kinds))
        return len(self._kinds)

    def _check_chunks(self, chunks: np.ndarray, kinds: np.ndarray, names: Sequence[str]) -> None:
        """Raise FileError if a chunk has an impossible size, overlaps another or extends beyond the end of the file.

        ``chunks``, (n, 4), has the offset, size, filter mask and sample of each chunk, and ``kinds``, (n,), its kind.
        """
        offsets, sizes, masks, samples = chunks.T
        wrong = [np.flatnonzero(offsets + sizes > self._file_bytes)]
        order = np.lexsort((offsets, samples))
        after, ends = order[1:], (offsets + sizes)[order[:-1]]
        wrong.append(after[(samples[after] == samples[order[:-1]]) & (offsets[after] < ends)])
        for number, (properties, (chunk, _)) in enumerate(self._kinds, 1):
            own = np.flatnonzero(kinds == number)
            chunk_bytes = math.prod(chunk) * (self._first[2].itemsize if self._first else 0)
            wrong.append(own[impossible_sizes(properties, chunk_bytes, sizes[own], masks[own])])
        for first in np.concatenate(wrong)[:1].tolist():
            raise FileError(
                f"{names[samples[first]]} is damaged: {self._name!r} has a chunk of {sizes[first]} bytes at "
                f"{offsets[first]}, which is impossible"
            )
