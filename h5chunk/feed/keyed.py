"""Data sets of HDF5 files in which each sample is a dataset, or a group of datasets, such as a trace or an event."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import MAX_NUMBER, OptionError, printable, shown
from h5chunk.feed.dataset import SAMPLE_NUMBER, ChunkDataset, without_numbers
from h5chunk.remote.mirror import remote_options
from h5chunk.store.hdf5.attributes import join_columns
from h5chunk.store.hdf5.keyed_index import FieldIndex, KeyedIndex
from h5chunk.store.hdf5.keyed_list import open_index
from h5chunk.store.hdf5.patterns import parse_samples
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.files import Paths, list_local_files
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.keyed import KeyedReader

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
    transform, trusted, cache_dir, cache_bytes, storage_options
        As for `ChunkDataset`.
    checksums : {"off"}
        The samples are not compared with checksums.
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
        checksums: str = OFF,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        progress: Callable[[str, int, int | None], None] | None = None,
    ) -> None:
        given, numbered = _without_numbers(pattern)
        patterns = {name: str(each) for name, each in parse_samples("pattern", given).items()}
        if isinstance(attributes, str) or not all(isinstance(name, str) for name in attributes):
            raise OptionError(f"attributes is {attributes!r}: pass a list of names")
        defaults = dict(attributes) if isinstance(attributes, Mapping) else dict.fromkeys(attributes)
        for value in defaults.values():
            _check_default(value)
        if taken := [name for name in attributes if name in patterns or name in numbered]:
            raise OptionError(
                f"attributes has {taken[0]!r}, which is also the name of a field: rename the field by passing a "
                "mapping as pattern"
            )
        if checksums != OFF:
            raise OptionError(
                f"checksums is {checksums!r}, but samples that are datasets have no checksums: leave checksums out, or "
                "copy them into one dataset, with checksums, by h5chunk convert --samples"
            )
        files = list_local_files(path, remote_options(cache_dir, cache_bytes, storage_options), "Keyed")
        report = partial(progress or _Line(), "index")
        indexes = [open_index(file, patterns, defaults, trusted, report) for file in files]
        for name in _varying_fields([index.fields for index in indexes]):
            for index in indexes:
                index.fields[name].varies = True
        _give_one_dtype(indexes, attributes)
        opened = zip(files, indexes, strict=True)
        readers = [KeyedReader(file, patterns, index, trusted=trusted) for file, index in opened]
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        source = readers[0] if len(readers) == 1 else FileSet(readers, Path(f"{shown(files[0])}{more}"))
        super().__init__(source, fields={**patterns, **dict.fromkeys(numbered, SAMPLE_NUMBER)}, transform=transform)


def _without_numbers(pattern: Any) -> tuple[Any, list[str]]:
    """Return the patterns without ``sample_number``, and the names of the fields that it was given."""
    if isinstance(pattern, str):
        return pattern, []
    if not isinstance(pattern, Mapping):
        return [each for each in pattern if each != SAMPLE_NUMBER], [each for each in pattern if each == SAMPLE_NUMBER]
    stored, numbered = without_numbers(pattern)
    return stored, numbered


def _give_one_dtype(indexes: Sequence[KeyedIndex], attributes: Iterable[str]) -> None:
    """Convert the values of attributes to a dtype that represents those of all files exactly."""
    if len(indexes) == 1:
        return
    borders = np.cumsum([len(index) for index in indexes])[:-1]
    for name in attributes:
        values = join_columns(name, [index.columns[name] for index in indexes])
        for index, own in zip(indexes, np.split(values, borders), strict=True):
            index.columns[name] = own


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
