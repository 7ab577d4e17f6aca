"""Read HDF5 files in which each sample is a dataset, or a group of datasets, such as ``traces/000123/data``.

A pattern such as ``traces/*/data`` selects the samples, and defines one field, ``data``; several patterns that differ
after the ``*`` define several fields. Contiguous values are read at their file offsets, all others through HDF5.

Background: https://github.com/h5py/h5py/issues/2425 and 2174 report how slowly h5py reads such files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, OptionError, SampleError, SourceError, printable
from h5chunk.source import Names, OpenContext, SampleField, shape_text
from h5chunk.sources.container import StoredFile
from h5chunk.sources.kinds import KeyedOptions
from h5chunk.sources.recognise import HDF5_MAGIC, has_suffix
from h5chunk.sources.samples import Samples, field_dtype, largest_first
from h5chunk.stamp import source_stamp
from h5chunk.store.hdf5.attributes import join_columns, read_attribute
from h5chunk.store.hdf5.child import in_child
from h5chunk.store.hdf5.chunk_table import is_variable
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import opened

SUFFIXES = (".h5", ".hdf5", ".hdf")
REPORTED = 1000  # samples between progress reports
THROUGH_HDF5 = -1  # in place of an offset: the values are compressed, in several pieces, or in the header of the object


@dataclass
class _Index:
    """The samples of a file, in the order of their names."""

    names: Names = field(default_factory=Names)  # the text that * matches in the path of each sample
    offsets: dict[str, list[int]] = field(default_factory=dict)  # file offset of each sample, by field
    stored: dict[str, tuple[tuple[int, ...], np.dtype]] = field(default_factory=dict)  # shape and dtype, by field
    columns: dict[str, list[Any]] = field(default_factory=dict)  # value of each sample, by attribute


class KeyedSource(Samples):
    """Samples that are datasets of one HDF5 file, or groups of datasets."""

    kind = "keyed"
    noun = "samples"
    Options = KeyedOptions

    def __init__(self, path: str, patterns: Mapping[str, str], attributes: Sequence[str], index: _Index) -> None:
        self._path, self._patterns, self._index = path, patterns, index
        self._file, self._opened = StoredFile(path), (0, None)
        self._offsets = {name: np.array(offsets, np.int64) for name, offsets in index.offsets.items()}
        fields = {name: SampleField(shape, field_dtype(name, dtype)) for name, (shape, dtype) in index.stored.items()}
        self.fields = largest_first(fields)
        self.columns = {name: _column(path, name, values) for name, values in index.columns.items()}
        self.names = index.names
        self.options = {"samples": list(patterns.values()), "attributes": list(attributes)}
        index.offsets, index.columns = {}, {}

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        return head.startswith(HDF5_MAGIC) or (has_suffix(source, *SUFFIXES) and h5py.is_hdf5(source))  # a user block

    @classmethod
    def open(cls, source: Any, options: KeyedOptions, context: OpenContext) -> KeyedSource:
        path = os.fspath(source)
        if options.samples is None:
            raise SourceError(
                f"{printable(path)}: is an HDF5 file, but neither .h5ad nor 10x .h5: if the rows of its datasets are "
                "samples, use h5chunk repack; if each sample is a dataset, give their path, such as --samples "
                "'traces/*/data' (h5chunk info describes the file)"
            )
        patterns = _patterns(options.samples)
        attributes = options.attributes or ()

        def work(say: Callable[[Any], None]) -> _Index:
            return _read_index(path, patterns, attributes, say)

        try:
            index = in_child(work, lambda: printable(path), context.report_found)
        except FileError as error:
            raise SourceError(str(error)) from None
        return cls(path, patterns, attributes, index)

    def __len__(self) -> int:
        return len(self._index.names)

    def name(self, index: int) -> str:
        return self._place(next(iter(self._patterns.values())), index)

    def identity(self) -> tuple[dict[str, Any], tuple[bytes, ...]] | None:
        return {"kind": self.kind, "stamp": source_stamp(self._path), **self.options}, ()

    @contextmanager
    def session(self) -> Iterator[None]:
        process, _ = self._opened
        if process == os.getpid() or all((offsets != THROUGH_HDF5).all() for offsets in self._offsets.values()):
            yield
            return
        with opened(self._path) as file:
            self._opened = os.getpid(), file
            try:
                yield
            finally:
                self._opened = 0, None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": (0, None)}

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        for name, target in out.items():
            shape, dtype = self._index.stored[name]
            offset = int(self._offsets[name][index])
            if offset == THROUGH_HDF5:
                target[...] = self._through_hdf5(name, index)
            else:
                data = self._file.read_at(offset, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
                target[...] = np.frombuffer(data, dtype).reshape(shape)
        return ()

    def _through_hdf5(self, name: str, index: int) -> np.ndarray:
        _, file = self._opened
        assert file is not None
        try:
            return np.asarray(file[self._place(self._patterns[name], index)][()])
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise SampleError(f"cannot be read: HDF5: {error}") from None

    def _place(self, pattern: str, index: int) -> str:
        return pattern.replace("*", self._index.names[index].decode("utf-8", "surrogateescape"))


def _patterns(samples: Sequence[str]) -> dict[str, str]:
    """Return patterns by field name: the path after ``*`` with ``/`` replaced by ``_``, or the name of the group."""
    patterns: dict[str, str] = {}
    for pattern in (each.strip("/") for each in samples):
        before, star, after = pattern.partition("*")
        if not star or "*" in after or (before and not before.endswith("/")) or (after and not after.startswith("/")):
            raise OptionError(f"samples has {pattern!r}: put one * in place of the name, such as 'traces/*/data'")
        name = after.strip("/").replace("/", "_") or before.strip("/").rpartition("/")[2] or "data"
        if name in patterns or before != next(iter(patterns.values()), pattern).partition("*")[0]:
            raise OptionError(f"samples is {', '.join(samples)}: give patterns that differ only after the *")
        patterns[name] = pattern
    return patterns


def _read_index(
    path: str, patterns: Mapping[str, str], attributes: Sequence[str], say: Callable[[Any], None]
) -> _Index:
    """Find all samples. Raises SourceError if a sample lacks a dataset or attribute, or differs from the first."""
    guard, index = Guard(path), _Index()
    before = next(iter(patterns.values())).partition("*")[0].strip("/")
    with opened(path) as file:
        group = guard.find(file, before) if before else file["/"]
        if not isinstance(group, h5py.Group):
            raise SourceError(f"{printable(path)}: has no group {before!r}: h5chunk info lists the groups of a file")
        after = {name: pattern.partition("*")[2].strip("/") for name, pattern in patterns.items()}
        index.offsets, index.columns = {name: [] for name in after}, {name: [] for name in attributes}
        for number, key in enumerate(group):
            _add(index, guard, group, key, after)
            if number % REPORTED == REPORTED - 1:
                say(REPORTED)
    if not len(index.names):
        raise SourceError(f"{printable(path)}: group {before!r} is empty: no sample matches the pattern")
    return index


def _add(index: _Index, guard: Guard, group: h5py.Group, key: str | bytes, after: Mapping[str, str]) -> None:
    """Add one sample to the index."""
    if isinstance(key, bytes):
        raise SourceError(f"{printable(guard.path)}: a name in {group.name} is not UTF-8: {key!r}: rename it")
    item = guard.find(group, key)
    where = f"{printable(guard.path)}: {printable(f'{group.name}/{key}'.lstrip('/'))}"
    owners: list[Any] = [item]  # of attributes
    for name, inner in after.items():
        dataset = item if not inner else guard.find(item, inner) if isinstance(item, h5py.Group) else None
        if not isinstance(dataset, h5py.Dataset):
            raise SourceError(f"{where} has no dataset {inner!r}: all samples must have the same datasets")
        guard.check_field(dataset, f"{key}/{inner}".strip("/"))
        if is_variable(dataset.id.get_type()):
            raise SourceError(f"{where}: {name!r} has values of variable length, which fields do not support")
        shape, dtype = dataset.shape, dataset.dtype
        if shape is None or not dataset.size:
            raise SourceError(f"{where}: {name!r} is empty: remove this sample")
        first = index.stored.setdefault(name, (shape, dtype))
        if first != (shape, dtype):
            raise SourceError(
                f"{where}: {name!r} is {dtype} {shape_text(shape)}, but {first[1]} {shape_text(first[0])} in earlier "
                "samples: all samples must have one shape and type"
            )
        index.offsets[name].append(_offset(dataset))
        owners.append(dataset)
    for name, values in index.columns.items():
        owner: Any = next((each for each in owners if name in each.attrs), item)
        values.append(read_attribute(owner.id, name, where, SourceError))
    index.names.append(key.encode("utf-8", "surrogateescape"))


def _offset(dataset: h5py.Dataset) -> int:
    """Return the file offset of the values of a contiguous dataset, or `THROUGH_HDF5` for any other."""
    properties = dataset.id.get_create_plist()
    is_plain = properties.get_layout() == h5py.h5d.CONTIGUOUS and not properties.get_external_count()
    offset = dataset.id.get_offset() if is_plain else None  # None if nothing was written
    return THROUGH_HDF5 if offset is None or dataset.file.userblock_size else int(offset)


def _column(path: str, name: str, values: Sequence[Any]) -> np.ndarray:
    try:
        column = join_columns(name, [np.array([value]) for value in values])
    except FieldError as error:
        raise SourceError(f"{printable(path)}: {error}") from None
    return column.astype(field_dtype(name, column.dtype))
