"""List the samples of HDF5 files in which each sample is a dataset, a group of datasets, or a whole file.

Child processes, one per core, list ranges of samples. A dataset that is stored like the first one needs only a few
checks. Two processes that open the same files at the same time both list them, and the index of the last one is kept.

Source: https://github.com/h5py/h5py/issues/2425 and 2174, which report such files, and the rates of opening by name.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.machine import available_cores
from h5chunk.store.hdf5.attributes import as_number, column_of, has_attribute, read_attribute
from h5chunk.store.hdf5.child import in_child, limited_memory
from h5chunk.store.hdf5.chunk_table import (
    ALL_FILTERS,
    check_chunks,
    impossible_sizes,
    is_listed_wrongly,
    is_variable,
    left_out_of_offsets,
    partial_chunks_are_plain,
)
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.keyed_index import (
    CONTIGUOUS,
    THROUGH_HDF5,
    FieldIndex,
    KeyedIndex,
    StoredIndex,
    Wanted,
    differs,
    joined,
    stamps_of,
)
from h5chunk.store.hdf5.open import fetched_objects, follow, opened
from h5chunk.store.hdf5.patterns import fill
from h5chunk.store.hdf5.strings import MAX_TEXT_BYTES, POINTER, FileBytes, read_strings
from h5chunk.store.hdf5.types import element_of, find_column, find_member, read_elements, type_problem, type_text
from h5chunk.urls import local_copy_of

PART_SAMPLES = 5_000  # samples per range; a child process lists a range in about a second
PART_FILES = 500  # files per range
FETCHED = 500  # samples of a remote file whose metadata is fetched together, and between two reports of progress
HEADER_BYTES = 4 << 10  # bytes after the start of an object header to search for a compact dataset's values

StoredBlock = tuple[int, int, int]  # offset in the file, size and filter mask
NO_PLACES: tuple[int, list[StoredBlock]] = THROUGH_HDF5, [(-1, 0, 0)]  # kind and block of a sample that HDF5 reads

Report = Callable[[int, "int | None"], None]  # called with the number of listed samples, and the total
Say = Callable[[int], None]  # sends the number of listed samples from a child process


Keys = tuple[Path, list[bytes]]  # a file, and the keys of samples in it


def open_index(files: Sequence[Path], wanted: Wanted, report: Report) -> KeyedIndex:
    """Load the index of files, after listing those that are new or have changed, and storing the index with them.

    Raises FieldError if a sample lacks a dataset, or an attribute without a default, or differs from the first sample
    in more than its length.
    """
    stored = StoredIndex(files, wanted)
    stamps = dict(zip(stored.files, stamps_of(files, wanted), strict=True))
    index, known = stored.load()
    number_of = {name: number for number, name in enumerate(known)}
    due = [name for name, stamp in stamps.items() if name not in known or known[name] != stamp]
    if index is not None and not due:
        return index.take([number_of[name] for name in stored.files])
    if changed := [name for name in due if name in known]:
        place = printable(os.path.join(stored.folder, changed[0]))
        which = "the file has" if len(changed) == 1 else f"this and {len(changed) - 1} other files have"
        warnings.warn(f"{place}: the index is rebuilt, because {which} changed since it was indexed", stacklevel=4)
    paths = dict(zip(stored.files, files, strict=True))
    try:
        new = _list_files({name: paths[name] for name in due}, wanted, report)
    finally:
        for mirror in filter(None, map(local_copy_of, files)):
            mirror.free_unused()
    if dict(zip(stored.files, stamps_of(files, wanted), strict=True)) != stamps:
        raise FileError(f"{printable(files[0])} or another file changed while it was indexed: try again")
    kept = [name for name in known if name in stamps and name not in {*due}]
    others = [name for name in known if name not in stamps]
    parts = [index.take([number_of[name] for name in names]) for names in (kept, others) if index and names]
    try:
        whole = joined([*parts, new], wanted)
    except FieldError:  # the others may be of another kind
        whole, others = joined([*parts[: bool(kept)], new], wanted), []
    names = [*kept, *others, *due]
    stored.save(whole, {name: stamps.get(name) or known[name] for name in names})
    order = {name: number for number, name in enumerate(names)}
    return whole.take([order[name] for name in stored.files])


def list_samples(path: Path, wanted: Wanted, report: Report) -> KeyedIndex:
    """List the samples of a file like `open_index`, but store no index."""
    return _list_files({path.name: path}, wanted, report)


def _list_files(named: Mapping[str, Path], wanted: Wanted, report: Report) -> KeyedIndex:
    """List the samples of files, by their names, in child processes."""
    if wanted.outer:
        files = [*named.values()]
        keys = in_child(files[0], _list_keys, files, wanted)
    else:  # each file is a sample, whose key is its path without the suffix
        keys = [(path, [os.fsencode(os.path.splitext(name)[0])]) for name, path in named.items()]
    counts = [len(own) for _, own in keys]
    if empty := [path for path, own in keys if not own]:
        before = wanted.outer.partition("*")[0].strip("/")
        raise FieldError(f"{printable(empty[0])}: no sample matches, because the group {before or '/'!r} is empty")
    parts = list(_parts(keys))
    done = [0] * len(parts)

    def list_part(number: int) -> KeyedIndex:
        def note(count: int) -> None:
            done[number] = count
            report(sum(done), sum(counts))

        return in_child(parts[number][0][0], _list_part, parts[number], wanted, on_message=note)

    with ThreadPoolExecutor(available_cores()) as pool:
        futures = [pool.submit(list_part, number) for number in range(len(parts))]
        try:
            listed = joined([future.result() for future in futures], wanted)
        finally:
            for future in futures:
                future.cancel()
    return listed._replace(starts=np.cumsum([0, *counts]))


def _parts(files: Sequence[Keys]) -> Iterator[list[Keys]]:
    """Divide the samples of all files into parts, each with some samples of a large file, or with several files."""
    part: list[Keys] = []
    for path, keys in files:
        for start in range(0, len(keys), PART_SAMPLES):
            own = keys[start : start + PART_SAMPLES]
            if part and (len(part) == PART_FILES or sum(len(others) for _, others in part) + len(own) > PART_SAMPLES):
                yield part
                part = []
            part.append((path, own))
    yield part


def _list_keys(files: Sequence[Path], wanted: Wanted) -> list[Keys]:
    """Return the keys of the samples of each file, sorted by their names."""
    groups = [group.strip("/") for group in wanted.outer.split("*")[:-1]]  # before each *
    found = []
    for path in files:
        with _opened(path, wanted.trusted) as file:
            found.append((path, [*_walk(file["/"], groups, b"", Guard(path, wanted.trusted))]))
    return found


def _walk(start: h5py.Group, groups: list[str], key: bytes, guard: Guard) -> Iterator[bytes]:
    """Yield the keys of samples in the group ``groups[0]`` below another group, whose own key is ``key``."""
    group = guard.find(start, groups[0]) if groups[0] else start
    where = "/".join(filter(None, (start.name.strip("/"), groups[0])))
    if not isinstance(group, h5py.Group):
        raise FieldError(f"{printable(guard.path)} has no group {where!r}: run h5chunk info to list its datasets")
    names: list[bytes] = []
    group.id.links.iterate(names.append)
    for name in names:
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise FieldError(
                f"{printable(guard.path)}: the name {name!r} in {where!r} is not UTF-8: rename it"
            ) from None
        if not groups[1:]:
            yield key + name
        elif isinstance(below := guard.find(group, text), h5py.Group):  # other objects have no samples
            yield from _walk(below, groups[1:], key + name + b"/", guard)


def _list_part(say: Say, part: Sequence[Keys], wanted: Wanted) -> KeyedIndex:
    """List the samples of a part."""
    fields = {name: _FieldLister(name, wanted) for name in wanted.patterns}
    values: dict[str, list[Any]] = {name: [] for name in wanted.attributes}
    done = 0
    for path, keys in part:
        with _opened(path, wanted.trusted) as file:
            lister = _Lister(file, wanted)
            for field in fields.values():
                field.enter(file, lister.guard)
            for start in range(0, len(keys), FETCHED):
                some = [key.decode("utf-8", "surrogateescape") for key in keys[start : start + FETCHED]]
                with fetched_objects(file, [fill(each, key) for each in wanted.patterns.values() for key in some]):
                    for key in some:
                        lister.add(key, fields, values)
                done += len(some)
                say(done)
            for field in fields.values():
                field.leave()
    say(done)
    keys, names = [key for _, own in part for key in own], next(iter(fields.values())).names
    values |= {name: field.texts for name, field in fields.items() if field.is_text}
    if len(values) > len(wanted.attributes) + len(fields) - 1:
        raise FieldError(f"{names[0]} has only strings: name at least one dataset of numbers, too")
    try:
        columns = {name: column_of(name, own, wanted.attributes.get(name), names) for name, own in values.items()}
    except FieldError as error:
        first = printable(part[0][0])
        raise FieldError(f"{'' if str(error).startswith(first) else f'{first}: '}{error}") from None
    return KeyedIndex(
        np.frombuffer(b"".join(keys), np.uint8),
        np.cumsum([len(key) for key in keys]),
        {name: field.index() for name, field in fields.items() if not field.is_text},
        columns,
        np.cumsum([0, *(len(own) for _, own in part)]),
    )


@contextmanager
def _opened(path: Path, trusted: bool) -> Iterator[h5py.File]:
    """Open a file in a context. No metadata of a remote file is kept, because the index has all that is needed."""
    mirror = local_copy_of(path)
    unkept = nullcontext() if mirror is None else mirror.without_keeping()
    with limited_memory(path, trusted), unkept, opened(path) as file:
        yield file


class _Lister:
    """Opens the datasets of the samples of one file, and reads their attributes."""

    def __init__(self, file: h5py.File, wanted: Wanted) -> None:
        self._file, self._wanted = file, wanted
        self.guard = Guard(file.filename, wanted.trusted)
        self._inner = wanted.inner
        self._segments = wanted.outer.split("*")
        self._folder: tuple[str, Any] = "", file["/"].id  # the group that has the latest sample
        self._above: dict[str, Any] = {}  # attributes of the groups above the latest sample, by name

    def add(self, key: str, fields: Mapping[str, _FieldLister], values: Mapping[str, list[Any]]) -> None:
        """Add the datasets of a sample to ``fields``, and its attributes to ``values``."""
        path, item = "", self._file["/"].id
        if len(self._segments) > 1:
            path = fill(self._wanted.outer, key)
            folder, _, name = path.rpartition("/")
            if folder != self._folder[0]:
                group = self.guard.find(self._file, folder)
                self._folder, self._above = (folder, None if group is None else group.id), {}
            item = self._find(self._folder[1], name)
        where = f"{printable(self.guard.path)}{': sample ' if path else ''}{printable(path)}"
        owners = [item]  # the objects that may have the attributes
        for name, inner in self._inner.items():
            field = fields[name]
            dataset = self._find(item, inner if field.path is None else field.path)
            if field.path is None and not isinstance(dataset, h5py.h5d.DatasetID):
                dataset = self._find_column(item, inner, field)
            if not isinstance(dataset, h5py.h5d.DatasetID):
                if not inner:
                    remedy = (
                        "add /NAME to the pattern, or /* if each of its datasets is a sample; if the other samples are "
                        "datasets, move these into a group of their own"
                    )
                    raise FieldError(f"{where} is a group: {remedy}")
                raise FieldError(f"{where} has no dataset {inner!r}: all samples must have the same datasets")
            field.add(dataset, where)
            owners.append(dataset)
        for name, own in values.items():
            default = self._wanted.attributes[name]
            owner = next((each for each in owners if has_attribute(each, name, default)), None)
            if owner is not None:
                own.append(as_number(read_attribute(owner, name, where, FieldError), default, name, where))
                continue
            if name not in self._above:
                self._above[name] = self._of_groups(name, where) if path else None
            if self._above[name] is None and default is None:
                read_attribute(item, name, where, FieldError)  # raises the error
            own.append(self._above[name])

    def _of_groups(self, name: str, where: str) -> Any:
        """Return an attribute of the nearest group above the latest sample that has it; None if there is none."""
        parts = self._folder[0].split("/") if self._folder[0] else []
        for number in range(len(parts), -1, -1):
            group = self.guard.find(self._file, "/".join(parts[:number]) or "/")
            if group is not None and has_attribute(group.id, name, self._wanted.attributes[name]):
                value = read_attribute(group.id, name, where, FieldError)
                return as_number(value, self._wanted.attributes[name], name, where)
        return None

    def _find_column(self, item: Any, inner: str, field: _FieldLister) -> Any:
        """Return the dataset of a member of a compound type, and note where all samples have it."""
        if isinstance(item, h5py.h5d.DatasetID):  # the samples are the datasets
            member = find_member(item.get_type(), inner)
            found = None if member is None else ("", member)
        else:
            is_group = isinstance(item, h5py.h5g.GroupID)
            found = find_column(h5py.Group(item), self.guard, inner) if is_group else None
        if found is None:
            return None
        field.path, field.member = found
        return self._find(item, field.path)

    def _find(self, start: Any, path: str) -> Any:
        if not path:
            return start
        item = follow(start, path)
        if item is None and isinstance(start, h5py.h5g.GroupID):  # the path may contain a link
            target = self.guard.find(h5py.Group(start), path)
            item = None if target is None else target.id
        return item


class _Kind(NamedTuple):
    """The storage of samples that are stored alike. ``properties`` are those of creation; None if contiguous."""

    properties: Any
    partial_are_plain: bool  # whether partial chunks have no filters
    description: list[Any]  # as in `FieldIndex`


class _FieldLister:
    """Lists the blocks of the datasets of one field."""

    def __init__(self, name: str, wanted: Wanted) -> None:
        self._name, self._of_values, self._decode = name, wanted.kinds, wanted.decode
        self.path: str | None = None  # of the dataset in a sample, if the field is a member
        self.member: tuple[str, ...] = ()
        self._first: tuple[Any, tuple[int, ...]] | None = None  # type and shape
        self._kinds: list[_Kind] = []
        self._alike: dict[Any, list[int]] = defaultdict(list)  # numbers of kinds, from 1, by chunk shape and type
        self.is_text, self.texts = False, list[bytes]()  # whether each sample is one string, which the index has
        self._pointers: dict[int, bytes] = {}  # by the number of the sample, of the strings in the heap of the file
        self._shapes: list[tuple[int, ...]] = []
        self._places: list[tuple[int, int, int]] = []  # kind, number of blocks, and size of the file
        self._blocks: list[StoredBlock] = []
        self.names: list[str] = []  # of the samples, in messages

    def enter(self, file: h5py.File, guard: Guard) -> None:
        """Continue with the datasets of another file."""
        self._file, self._guard = file, guard
        self._file_bytes = file.id.get_filesize()
        self._user_block = file.userblock_size
        self._left_out = left_out_of_offsets(file)
        name = f"{printable(guard.path)}: {self._name!r}"
        self._bytes = FileBytes.of(file, lambda problem: FieldError(f"{name}: {problem}; or leave the field out"))

    def leave(self) -> None:
        """Read the strings in the heap of the file."""
        if self._pointers:
            pointers = np.frombuffer(b"".join(self._pointers.values()), POINTER)
            strings = read_strings(self._bytes, pointers, MAX_TEXT_BYTES).tolist()
            for number, text in zip(self._pointers, strings, strict=True):
                self.texts[number] = text
            self._pointers = {}

    def add(self, dataset: Any, where: str) -> None:
        """Add the next sample."""
        shape = dataset.shape
        if self._first is None:
            self._describe(dataset, where)
        kind, first = self._first or (None, ())
        if self.is_text and isinstance(dataset.get_type(), h5py.h5t.TypeStringID) and shape in ((), (1,)):
            self._add_text(dataset, where)
            return
        if self.is_text or dataset.get_type() != kind or len(shape) != len(first) or shape[1:] != first[1:]:
            self._check(dataset, where)
            raise differs(where, self._name, (shape, type_text(dataset.get_type())), (first, type_text(kind)))
        if self._decode and self.names:
            model = self._element.dtype
            self._set_element(h5py.Dataset(dataset), where)
            if self._element.dtype != model:
                raise differs(where, self._name, (shape, self._element.dtype), (first, model))
        self.names.append(where)
        self._shapes.append((*shape, *self._element.shape))
        number, blocks = self._stored(dataset, shape, where)
        self._blocks += blocks
        self._places.append((number, len(blocks), self._file_bytes))

    def _describe(self, dataset: Any, where: str) -> None:
        """Note the type and shape of the first sample. Raises FieldError if it cannot be a field."""
        kind, item = dataset.get_type(), h5py.Dataset(dataset)
        self.is_text = isinstance(kind, h5py.h5t.TypeStringID) and dataset.shape in ((), (1,)) and not self.member
        self._check(dataset, where)
        if not self.is_text:
            try:
                self._set_element(item, where)
            except FieldError as error:
                raise type(error)(f"{error}; or leave the field out") from None
            if self._element.dtype.kind not in self._of_values:
                raise FieldError(f"{where}: {self._name!r} {type_problem(kind)}, or leave the field out")
        self._has_places = not is_variable(kind)  # otherwise, only HDF5 knows where a member is
        self._first = kind.copy(), dataset.shape

    def _set_element(self, dataset: h5py.Dataset, where: str) -> None:
        """Note how the elements of a sample are stored."""
        self._element = element_of(dataset, f"{where}: {self._name!r}", self.member, self._decode)
        kind = dataset.id.get_type().encode().hex()
        self._type = "" if self._element.is_plain else f"{kind} {self._element.packing or ''}"

    def _add_text(self, dataset: Any, where: str) -> None:
        """Add a sample that is one string."""
        self.names.append(where)
        self.texts.append(b"")
        if not dataset.get_storage_size():
            return
        kind = dataset.get_type()
        if not kind.is_variable_str():
            self._check(dataset, where)
            values = read_elements(h5py.Dataset(dataset), element_of(kind, where))
            self.texts[-1] = bytes(values[0])
            return
        offset = dataset.get_offset()
        if offset is None or self._file.id.get_create_plist().get_sizes()[0] != 8:
            raise FieldError(f"{where}: {self._name!r} {type_problem(kind)}; or leave the field out")
        self._pointers[len(self.texts) - 1] = self._bytes.read(offset - self._user_block, POINTER.itemsize)

    def index(self) -> FieldIndex:
        """Return the index of all samples that were added."""
        assert self._first is not None
        kinds, counts, file_bytes = np.array(self._places, np.int64).T
        blocks = np.array(self._blocks, np.int64).reshape(-1, 3)
        self._check_blocks(blocks, np.repeat(np.arange(len(counts)), counts), kinds, file_bytes)
        offsets, sizes, masks = blocks.T
        return FieldIndex(
            self._element.dtype,
            [kind.description for kind in self._kinds],
            np.array(self._shapes, np.int64).reshape(len(kinds), -1),
            kinds.astype(np.int32),
            offsets.copy(),
            sizes.copy(),
            masks.astype(np.uint32),
            member=self.member,
            names=self._element.names,
        )

    def _check(self, dataset: Any, where: str) -> None:
        if dataset.shape is None or (is_variable(dataset.get_type()) and not self.is_text and not self.member):
            problem = "is empty" if dataset.shape is None else type_problem(dataset.get_type())
            raise FieldError(f"{where}: {self._name!r} {problem}; or leave the field out")
        name = h5py.h5i.get_name(dataset) or b""
        self._guard.check_field(h5py.Dataset(dataset), name.decode("utf-8", "backslashreplace").lstrip("/"))
        check_chunks(h5py.Dataset(dataset))

    def _stored(self, dataset: Any, shape: tuple[int, ...], where: str) -> tuple[int, list[StoredBlock]]:
        """Return the kind and the blocks of a sample. Raises FileError if it extends beyond the end of the file."""
        num_bytes = math.prod(shape) * self._element.item_bytes
        if not num_bytes:
            return CONTIGUOUS, []
        if self._has_places:
            # without stored bytes, h5py would add the user block to an undefined offset
            offset = dataset.get_offset() if not self._user_block or dataset.get_storage_size() else None
            if offset is not None:
                if not 0 <= offset <= self._file_bytes - num_bytes:
                    raise FileError(f"{where} is damaged: {self._name!r} extends beyond the end of the file")
                kind = CONTIGUOUS if not self._type else self._find_kind(None, ()) or self._add_kind(None, ())
                return kind, [(offset, num_bytes, 0)]
            properties = dataset.get_create_plist()
            if properties.get_layout() == h5py.h5d.CHUNKED:
                return self._chunked(dataset, shape, properties, where)
        self._check(dataset, where)
        if self._has_places and properties.get_layout() == h5py.h5d.COMPACT and not self._type:
            return self._compact(dataset)
        return NO_PLACES

    def _compact(self, dataset: Any) -> tuple[int, list[StoredBlock]]:
        """Find the values of a dataset in its object header. Any place with equal bytes is suitable."""
        values = np.empty(dataset.shape, self._element.dtype)
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
        start = int(h5py.h5g.get_objinfo(dataset).objno[0]) + self._user_block
        size = min(values.nbytes + HEADER_BYTES, self._file_bytes - start)
        found = self._bytes.read(start - self._user_block, size).find(values.tobytes())
        return NO_PLACES if found < 0 else (CONTIGUOUS, [(start + found, values.nbytes, 0)])

    def _chunked(
        self, dataset: Any, shape: tuple[int, ...], properties: Any, where: str
    ) -> tuple[int, list[StoredBlock]]:
        chunk = properties.get_chunk()
        kind = self._find_kind(properties, chunk)
        found: dict[tuple[int, ...], StoredBlock] = {}

        def note(stored: Any) -> None:
            found[stored.chunk_offset] = stored.byte_offset + self._left_out, stored.size, stored.filter_mask

        if not is_listed_wrongly(h5py.Dataset(dataset)):
            dataset.chunk_iter(note)
        num_chunks = math.prod(-(-side // step) for side, step in zip(shape, chunk, strict=True))
        is_whole = len(found) == num_chunks and all(
            at < side for start in found for at, side in zip(start, shape, strict=True)
        )
        if kind is None or not is_whole:
            self._check(dataset, where)
        if not is_whole:  # chunks were never written, or are listed wrongly
            return NO_PLACES
        if kind is None:
            kind = self._add_kind(properties, chunk)
        starts = sorted(found)  # which is the order of the places in the sample
        if self._kinds[kind - 1].partial_are_plain:  # filter masks do not show this
            for start in starts:
                if any(at + step > side for at, step, side in zip(start, chunk, shape, strict=True)):
                    found[start] = *found[start][:2], ALL_FILTERS
        return kind, [found[start] for start in starts]

    def _find_kind(self, properties: Any, chunk: tuple[int, ...]) -> int | None:
        """Return the number of the kind of samples that are stored like this, or None if this is the first one.

        ``properties`` is None for contiguous samples.
        """
        alike = self._alike[chunk, self._type]  # H5Pequal does not compare the last axis of chunks
        return next(
            (each for each in alike if properties is None or properties.equal(self._kinds[each - 1].properties)), None
        )

    def _add_kind(self, properties: Any, chunk: tuple[int, ...]) -> int:
        """Note how samples are stored, and return the number of this kind."""
        element, text = [self._element.item_bytes, self._element.num_bytes], self._type
        if properties is None:
            self._kinds.append(_Kind(None, False, [[], *element, text]))
        else:
            filters = [properties.get_filter(number)[::2] for number in range(properties.get_nfilters())]
            partial_are_plain = bool(partial_chunks_are_plain(properties))
            description = [[*chunk, *self._element.shape], *element, f"{partial_are_plain} {filters} {text}"]
            self._kinds.append(_Kind(properties, partial_are_plain, description))
        self._alike[chunk, self._type].append(len(self._kinds))
        return len(self._kinds)

    def _check_blocks(self, blocks: np.ndarray, samples: np.ndarray, kinds: np.ndarray, file_bytes: np.ndarray) -> None:
        """Raise FileError if a block has an impossible size, overlaps another or extends beyond the end of its file.

        ``blocks``, (n, 3), has the offset, size and filter mask of each block, and ``samples``, (n,), its sample.
        ``kinds`` and ``file_bytes``, (samples,), are the kind of each sample, and the size of its file.
        """
        offsets, sizes, masks = blocks.T
        wrong = [np.flatnonzero(offsets + sizes > file_bytes[samples])]
        order = np.lexsort((offsets, samples))
        after, ends = order[1:], (offsets + sizes)[order[:-1]]
        wrong.append(after[(samples[after] == samples[order[:-1]]) & (offsets[after] < ends)])
        for number, (properties, *_) in enumerate(self._kinds, 1):
            if properties is None:  # contiguous
                continue
            own = np.flatnonzero(kinds[samples] == number)
            chunk_bytes = math.prod(properties.get_chunk()) * self._element.item_bytes
            wrong.append(own[impossible_sizes(properties, chunk_bytes, sizes[own], masks[own])])
        for first in np.concatenate(wrong)[:1].tolist():
            raise FileError(
                f"{self.names[samples[first]]} is damaged: {self._name!r} has a chunk of {sizes[first]} bytes at "
                f"{offsets[first]}, which is impossible"
            )
