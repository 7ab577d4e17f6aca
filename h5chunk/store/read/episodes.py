"""Read the episodes of one file as the rows of one reader. An episode is a group with one dataset per field."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, printable
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import follow, opened
from h5chunk.store.hdf5.patterns import Match, Pattern, find_matches
from h5chunk.store.read.csr import CsrBuffers
from h5chunk.store.read.encoded import EncodedField
from h5chunk.store.read.fields import Field, FrameDataset, FrameDecoder
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.ragged import RaggedField
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.source import Source


class EpisodeFile(Source):
    """The concatenated episodes of one file, which are read like the rows of a file.

    ``starts_of`` has, for each field that is not encoded, the offset in the file at which each episode begins, or -1 if
    it is unknown. ``patterns`` has the path of each field's datasets, with ``*`` for the names of the episode, and
    ``names`` the names of the episodes. ``offsets`` has, for each uncompressed field, the offset of each row. All are
    int64.
    """

    def __init__(self, episodes: FileSet, patterns: Mapping[str, Pattern], names: Sequence[str]) -> None:
        first = episodes.readers[0]
        super().__init__(
            first.path,
            episodes.fields,
            episodes.num_samples,
            stamp=first.stamp,
            header=first.header,
            trusted=first.trusted,
            checksums=first.checksums,
            main=episodes.main.name,
            chunk_samples=episodes.chunk_samples,
            chunk_starts=episodes.chunk_starts,
        )
        self.episodes, self.names = episodes, names
        self._patterns = {field: str(pattern) for field, pattern in patterns.items()}
        self.starts_of: dict[str, np.ndarray] = {}
        self.offsets: dict[str, np.ndarray] = {}

    def datasets_of(self, field: str) -> list[tuple[Path, str]]:
        return [(self.path, self._patterns.get(field, field))]

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 of the fingerprint of the first episode, and of the lengths and datasets of all episodes."""
        datasets = "\n".join(reader.main.dataset for reader in self.episodes.readers)
        fingerprint = zlib.crc32(datasets.encode("utf-8", "surrogateescape"), self.episodes.readers[0].fingerprint)
        return zlib.crc32(self.episodes.starts.tobytes(), fingerprint)

    def set_caches(self, main: CacheSettings) -> None:
        self.episodes.set_caches(main)

    def cache_bytes(self, main: CacheSettings) -> int:
        return self.episodes.cache_bytes(main)

    def actual_caches(self) -> dict[str, CacheSettings]:
        return self.episodes.actual_caches()

    def read(self, name: str, rows: np.ndarray, out: np.ndarray | CsrBuffers) -> None:
        self.episodes.read(name, rows, out)

    def close(self) -> None:
        self.episodes.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "episodes": copy(self.episodes)}


def open_episodes(
    file: Path, patterns: Mapping[str, Pattern], decoder: FrameDecoder, trusted: bool, checksums: str
) -> EpisodeFile:
    """Open what the ``*`` in the path of each field match in a file as episodes.

    JPEG and PNG images are decoded by ``decoder``. Raises FieldError if there is no episode, or if an episode lacks a
    field or has fields that differ in length.
    """
    with opened(file) as handle:
        guard = Guard(file, trusted)
        matches = {name: find_matches(handle, guard, pattern) for name, pattern in patterns.items()}
        readers: list[H5Reader] = []
        starts: list[dict[str, int]] = []
        types: dict[str, Any] = {}
        for fields in _by_episode(file, matches):
            alike = _open_like_first(readers[0], types, handle, fields) if readers else None
            if alike is None:
                datasets = {field: FrameDataset(dataset, decoder) for field, dataset in fields.items()}
                alike = H5Reader(file, datasets, trusted=trusted, checksums=checksums, file=handle), {}
                types = types or {name: handle[field.dataset].id.get_type() for name, field in alike[0].fields.items()}
            readers.append(alike[0])
            starts.append(alike[1])
    names = [match.name for match in next(iter(matches.values()))]
    episodes = EpisodeFile(FileSet(readers, file), patterns, names)
    rows = [field for field in patterns if not isinstance(episodes.fields[field], EncodedField)]
    episodes.starts_of = {field: np.array([each.get(field, -1) for each in starts]) for field in rows}
    return episodes


def _by_episode(file: Path, matches: Mapping[str, Sequence[Match]]) -> Iterator[dict[str, str]]:
    """Yield the datasets of each episode, by field. Raises FieldError if a field has other episodes than the first."""
    first, *others = matches
    expected = [match.texts for match in matches[first]]
    for name in others:
        if odd := {*expected} ^ {match.texts for match in matches[name]}:
            raise FieldError(
                f"{printable(file)}: only some of the fields have the episode {printable('/'.join(min(odd)))!r}"
            )
    yield from (
        {name: match.path for name, match in zip(matches, own, strict=True)}
        for own in zip(*matches.values(), strict=True)
    )


def _open_like_first(
    first: H5Reader, types: Mapping[str, Any], file: h5py.File, datasets: Mapping[str, str]
) -> tuple[H5Reader, dict[str, int]] | None:
    """Return a reader of an episode that differs from the first one only in length, and the offsets of its fields.

    This takes a tenth of the time of a complete check. Returns None if the fields are not contiguous, or differ in
    anything but their length.
    """
    fields: dict[str, Field | RaggedField] = {}
    places: dict[str, int] = {}
    for name, dataset in datasets.items():
        item, model = follow(h5py.h5g.open(file.id, b"/"), dataset), first.fields[name]
        if not isinstance(item, h5py.h5d.DatasetID) or not isinstance(model, Field) or model.grid.chunks:
            return None
        properties, shape, stored = item.get_create_plist(), item.shape, item.get_storage_size()
        if (
            properties.get_layout() != h5py.h5d.CONTIGUOUS
            or properties.get_external_count()
            or item.get_type() != types[name]
            or shape[1:] != model.grid.shape[1:]
            or not 0 < stored == math.prod(shape) * model.dtype.itemsize
        ):
            return None
        places[name] = item.get_offset()
        if places[name] + stored > file.id.get_filesize():
            return None
        fields[name] = replace(model, dataset=dataset, grid=replace(model.grid, shape=shape))
    if len({field.grid.shape[0] for field in fields.values()}) > 1:
        return None
    reader = copy(first)
    reader.fields, reader.main = fields, fields[first.main.name]
    reader.num_samples = reader.main.grid.shape[0]
    reader.starts = np.array([0, reader.num_samples])
    return reader, places
