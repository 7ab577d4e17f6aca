"""Data sets of HDF5 files in which each sample is a dataset, or a group of datasets, such as a trace or an event."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import MAX_NUMBER, FieldError, OptionError, names_text, printable, shown
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.layout import torch_dtype
from h5chunk.feed.sample_reader import SampleTransforms
from h5chunk.feed.stored_tables import decoded
from h5chunk.plan.cache import ChunkGrid
from h5chunk.store.hdf5.attributes import join_columns
from h5chunk.store.hdf5.keyed_index import FieldIndex, parse_patterns
from h5chunk.store.read.fields import Field
from h5chunk.store.read.files import Paths, list_data_files
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.keyed import KeyedReader
from h5chunk.urls import local_copy_of

QUIET_S = 1.0  # time after which progress is shown on a terminal


class Keyed(ChunkDataset):
    """A `ChunkDataset` of files in which each sample is a dataset, such as ``traces/000123/data``, or a group of them.

    ::

        dataset = h5chunk.Keyed("traces.h5", "traces/*/data", attributes=["magnitude"])
        for data, magnitude in h5chunk.ChunkLoader(dataset, 256):
            ...

    The first time that a file is opened, one process per core builds an index of the location of each sample. The index
    is saved beside the file as ``NAME.h5chunk-index-*``, or in ``~/.cache/h5chunk`` if that is impossible, and may be
    deleted at any time. An interrupted build is continued, and a file that has changed is indexed again. Samples are
    then read by their byte ranges, without HDF5, whether they are contiguous, chunked, compressed or compact.
    ``h5chunk convert FILE OUTPUT --samples 'traces/*/data'`` copies them into one dataset instead, which is read even
    faster, especially from hard disks.

    If samples differ in length (only along their first axis), a batch has two tensors for the field: see
    `h5chunk.transforms.Pad` (the default) and `h5chunk.transforms.Pack`. ``dataset[i]`` then also has two tensors for
    the field: the sample, and its length.

    Parameters
    ----------
    path : path or sequence of paths
        As for `ChunkDataset`, but no URLs.
    pattern : str, or sequence or mapping of str
        Paths of datasets, with ``*`` in place of the name of a sample. Each pattern is a field; all patterns must have
        the same path before the ``*``. A mapping names the fields. Otherwise, a field is named after the path that
        follows the ``*``, with ``_`` for ``/``, or after the group if nothing follows. Samples are sorted by name.
    attributes : sequence of str, or mapping of str
        HDF5 attributes of each sample, which become fields. Each value must be one number or one string. An attribute
        is read from the object whose name ``*`` matches or, if that lacks it, from the sample's datasets. A mapping
        such as ``{"magnitude": -1.0, "station": None}`` has the default for samples that lack the attribute; None
        means that no sample may lack it.
    transform, trusted
        As for `ChunkDataset`.
    progress : callable, optional
        Called as ``progress("index", done, total)``, in samples, while the index is built. Default: print a line to
        standard error, if that is a terminal.

    Raises
    ------
    FieldError
        A sample lacks a dataset, or an attribute without a default, or differs from the first sample in more than its
        length.
    FileError
        The file is missing or damaged, or it changes while it is read.
    """

    def __init__(
        self,
        path: Paths,
        pattern: str | Sequence[str] | Mapping[str, str],
        *,
        attributes: Sequence[str] | Mapping[str, Any] = (),
        transform: Any = None,
        trusted: bool = False,
        progress: Callable[[str, int, int | None], None] | None = None,
    ) -> None:
        patterns = parse_patterns(pattern)
        if isinstance(attributes, str) or not all(isinstance(name, str) for name in attributes):
            raise OptionError(f"attributes is {attributes!r}: pass a list of names")
        defaults = dict(attributes) if isinstance(attributes, Mapping) else dict.fromkeys(attributes)
        for value in defaults.values():
            _check_default(value)
        if taken := [name for name in attributes if name in patterns]:
            raise OptionError(
                f"attributes has {taken[0]!r}, which is also the name of a field: rename the field by passing a "
                "mapping as pattern"
            )
        files = list_data_files(path)
        if any(local_copy_of(file) is not None for file in files):
            raise OptionError(f"path is {path!r}, but Keyed reads only local files: copy the objects to a disk first")
        report = partial(progress or _Line(), "index")
        readers = [KeyedReader(file, patterns, defaults, trusted, report) for file in files]
        varying = _varying_fields([reader.index.fields for reader in readers])
        for reader in readers:
            reader.set_varying(varying)
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        self._reader = readers[0] if len(readers) == 1 else FileSet(readers, Path(f"{shown(files[0])}{more}"))
        indexes = [reader.index for reader in readers]
        self._columns = {name: join_columns(name, [index.columns[name] for index in indexes]) for name in attributes}
        self._names, self._numbered = (*patterns, *attributes), list(attributes)
        for name in self._names:
            torch_dtype(self.field(name).dtype, name)
        self._transforms = SampleTransforms(transform, {name: self.field(name) for name in self._names})
        self._samples, self._order, self._tables = None, None, {}

    def field(self, name: str) -> Any:
        """See `ChunkDataset.field`."""
        if name not in self._columns:
            return self._reader.fields[name]
        column = self._columns[name]
        return Field(name, "", ChunkGrid(column.shape, None, column.itemsize, False), column.dtype)

    @property
    def numbered_fields(self) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
        """See `ChunkDataset.numbered_fields`. These fields are the attributes."""
        return {name: column.__getitem__ for name, column in self._columns.items()}

    def values(self, name: str) -> np.ndarray:
        """Return an attribute of all samples, (n,), or read a field that has one value per sample."""
        if name not in self._columns:
            if name not in self._reader.fields:
                raise FieldError(f"there is no field {name!r}: pass one of {names_text(self._names)}")
            return super().values(name)
        return decoded(self._columns[name][self.samples])

    @property
    def source_names(self) -> np.ndarray:
        """The name of each sample, which is the text that ``*`` matches in its path: (n,) of str."""

        def read() -> np.ndarray:
            indexes = [reader.index for reader in self._reader.readers if isinstance(reader, KeyedReader)]
            return np.array([index.name(number) for index in indexes for number in range(len(index))])

        return self._once("source_names", read)[self.samples]


def _check_default(value: Any) -> None:
    if not isinstance(value, (int, float, str, type(None))):
        raise OptionError(f"attributes has the default {value!r}: pass a number, a string or None")
    if isinstance(value, int) and not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise OptionError(f"attributes has the default {value}: pass a whole number from -{MAX_NUMBER} to {MAX_NUMBER}")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise OptionError(f"attributes has the default {value!r}, which is not valid Unicode: change it") from None


def _varying_fields(files: Sequence[Mapping[str, FieldIndex]]) -> list[str]:
    """Return the fields of which any two samples in the files differ in length, and only in length."""
    varying = []
    for name in files[0]:
        shapes = [fields[name].shape for fields in files]
        is_alike = len({(len(shape), shape[1:]) for shape in shapes}) == 1
        if is_alike and (len(set(shapes)) > 1 or any(fields[name].is_ragged for fields in files)):
            varying.append(name)
    return varying


class _Line:
    """A progress line on a terminal, shown once the work has taken some time."""

    def __init__(self) -> None:
        self._started, self._shown = time.monotonic(), 0.0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self._started < QUIET_S or (now - self._shown < 0.1 and done != total):
            return
        self._shown = now
        end = "\n" if done == total else ""
        print(printable(f"\r{stage}: {done:,} of {total:,} samples"), end=end, file=sys.stderr, flush=True)
