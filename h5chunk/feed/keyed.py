"""Data sets of HDF5 files in which each sample is a dataset, or a group of datasets, such as a trace or an event."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from h5chunk.errors import MAX_NUMBER, OptionError, printable
from h5chunk.feed.dataset import ChunkDataset, without_numbers
from h5chunk.feed.skipping import MAX_SKIPPED, RAISE
from h5chunk.remote.mirror import remote_options
from h5chunk.store.hdf5.keyed_index import KeyedIndex, Wanted
from h5chunk.store.hdf5.keyed_list import open_index
from h5chunk.store.hdf5.packing import check_decode
from h5chunk.store.hdf5.patterns import parse_samples
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.fields import SAMPLE_NUMBER, attribute_defaults
from h5chunk.store.read.files import Paths, list_data_files, single_file
from h5chunk.store.read.keyed import keyed_source
from h5chunk.transforms.compile import Transforms

QUIET_S = 1.0  # time after which progress is shown on a terminal


class Keyed(ChunkDataset):
    """A `ChunkDataset` whose samples are datasets such as ``traces/000123/data``, or groups of them, or whole files.

    ::

        dataset = h5chunk.Keyed("traces.h5", "traces/*/data", attributes=["magnitude"])
        for data, magnitude in h5chunk.ChunkLoader(dataset, 256):
            ...

        classes = h5chunk.Keyed("images.h5", "*/*/pixels")  # a group for each class, with a group for each sample
        slices = h5chunk.Keyed("slices/*.h5", ["image", "mask"])  # each file is a sample

    The first time that files are opened, one process per core builds an index of the location of each sample. The index
    is saved beside the file as ``NAME.h5chunk-index-*.npz``, or for several files as ``.h5chunk-index-*.npz`` in the
    folder that they have in common, or in ``~/.cache/h5chunk`` if that is impossible; it may be deleted at any time.
    Files that are new or have changed are indexed again. Of processes that open new files at the same time, each builds
    an index: open them once before you start many. Samples are then read by their byte ranges, without HDF5, whether
    they are contiguous, chunked, compressed or compact. Files that are samples are opened only while they are read.
    ``h5chunk convert FILE OUTPUT --samples 'traces/*/data'`` copies them into one dataset instead, which is read even
    faster, especially from hard disks.

    If samples differ in length (only along their first axis), the field's item in a batch is a named tuple of values
    and lengths, or offsets: see `h5chunk.transforms.Pad` (the default), `h5chunk.transforms.Pack` and
    `h5chunk.transforms.Nested`. In ``dataset[i]`` it is the values, without padding, and their length.

    Parameters
    ----------
    path : path or sequence of paths
        As for `ChunkDataset`.
    pattern : str, or sequence or mapping of str
        Paths of datasets, with ``*`` in place of each part of a sample's key. Each pattern is a field; all patterns
        must be equal up to the last ``*``. A mapping names the fields. Otherwise, a field is named after the path that
        follows the last ``*``, with ``_`` for ``/``, or after the group if nothing follows. Samples are sorted by key.
        Paths without ``*`` are those of datasets in each of many files, of which each is a sample; its key is the path
        of the file in the folder that all files have in common, without its suffix. `source_names` has the keys.
        A path may lead to a column of a table (a compound type), as in ``events/*/table/pt`` or ``events/*/table.pt``.
        A field may have one string per sample, of up to 65,536 bytes; the index has these strings, and a sample has
        each as ``str``.
    attributes : sequence of str, or mapping of str
        HDF5 attributes of each sample, which become fields. Each value must be one string, or numbers of the same shape
        in all samples. An attribute is read from the object that the last ``*`` matches or, if that lacks it, from the
        sample's datasets, and then from the groups above, up to the file. A mapping such as ``{"magnitude": -1.0,
        "station": None}`` has the default for samples that lack the attribute; None means that no sample may lack it.
        If the default is a number, the strings ``""`` and ``"None"`` count as lacking, and others are read as numbers.
    labels : mapping of int, optional
        Fields that are parts of the samples' keys as class numbers (int64), by name. ``{"label": 0}`` is the first
        part: for ``"*/*/pixels"``, the name of the outer group. The classes are sorted by name; `classes` has the names
        of a single such field, and `categories` of any. A negative number counts from the last part.
    transforms, as_dict, on_error, max_skipped, trusted, decode, cache_dir, cache_bytes, storage_options
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
        labels: Mapping[str, int] | None = None,
        transforms: Transforms | None = None,
        as_dict: bool = False,
        on_error: str = RAISE,
        max_skipped: float = MAX_SKIPPED,
        trusted: bool = False,
        checksums: str = OFF,
        decode: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        progress: Callable[[str, int, int | None], None] | None = None,
    ) -> None:
        given, numbered = _without_numbers(pattern)
        patterns = {name: str(each) for name, each in parse_samples("pattern", given).items()}
        defaults = attribute_defaults(attributes)
        for value in defaults.values():
            _check_default(value)
        labels = {} if labels is None else labels
        if not isinstance(labels, Mapping) or not all(type(part) is int for part in labels.values()):
            raise OptionError(
                f"labels is {labels!r}: pass a mapping of names to parts of the key, as in {{'label': 0}}"
            )
        known = [*patterns, *numbered]
        for argument, given_names in (("attributes", list(attributes)), ("labels", list(labels))):
            if taken := [name for name in given_names if name in known]:
                raise OptionError(
                    f"{argument} has {taken[0]!r}, which is also the name of a field: rename the field by passing a "
                    "mapping as pattern, or use another name"
                )
            known += given_names
        if checksums != OFF:
            raise OptionError(
                f"checksums is {checksums!r}, but samples that are datasets have no checksums: leave checksums out, or "
                "copy them into one dataset, with checksums, by h5chunk convert --samples"
            )
        files = list_data_files(path, remote_options(cache_dir, cache_bytes, storage_options))
        if not any("*" in each for each in patterns.values()) and len(files) == 1 and single_file(path):
            raise OptionError(
                f"pattern has {next(iter(patterns.values()))!r} without a *, which makes each file a sample, "
                "but path is one file: use a * in place of the names of samples, as in 'traces/*/data'"
            )
        wanted = Wanted(patterns, defaults, trusted, decode=check_decode(decode))
        index = open_index(files, wanted, partial(progress or _Line(), "index"))
        self._classes = {}
        for name, part in labels.items():
            self._classes[name], index.columns[name] = _classes_of(index, name, part)
        super().__init__(
            keyed_source(files, wanted, index),
            fields={**patterns, **dict.fromkeys(numbered, SAMPLE_NUMBER)},
            decode=decode,
            transforms=transforms,
            as_dict=as_dict,
            on_error=on_error,
            max_skipped=max_skipped,
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes of the field in ``labels``; empty if there is none, or if there are several."""
        found = list(self._classes.values())
        return tuple(found[0].tolist()) if len(found) == 1 else ()

    def categories(self, field: str) -> np.ndarray:
        """Return the names of the classes of a field in ``labels``: (num_classes,) of str."""
        return self._classes[field] if field in self._classes else super().categories(field)

    def has_categories(self, field: str) -> bool:
        return field in self._classes or super().has_categories(field)


def _classes_of(index: KeyedIndex, name: str, part: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted classes, (num_classes,) of str, and the class of each sample, (n,) int64."""
    keys = [index.name(number).split("/") for number in range(index.num_samples)]
    shortest = min(keys, key=len)
    if not -len(shortest) <= part < len(shortest):
        raise OptionError(
            f"labels has {part} for {name!r}, but the key {printable('/'.join(shortest))!r} has only parts from 0 to "
            f"{len(shortest) - 1}: pass one of them, or patterns with more *"
        )
    classes, codes = np.unique([key[part] for key in keys], return_inverse=True)
    return classes, codes.astype(np.int64)


def _without_numbers(pattern: Any) -> tuple[Any, list[str]]:
    """Return the patterns without ``sample_number``, and the names of the fields that it was given."""
    if isinstance(pattern, str) or not isinstance(pattern, Iterable):
        return pattern, []
    if not isinstance(pattern, Mapping):
        return [each for each in pattern if each != SAMPLE_NUMBER], [each for each in pattern if each == SAMPLE_NUMBER]
    stored, numbered = without_numbers(pattern)
    return stored, numbered


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
