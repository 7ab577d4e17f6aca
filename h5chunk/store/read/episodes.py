"""Open episodes as one reader of frames: groups of a file, files, or parts of flat fields."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, OptionError, printable, shown
from h5chunk.remote.mirror import NO_OPTIONS
from h5chunk.store.hdf5.child import try_files
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import opened
from h5chunk.store.read.files import Paths, check_shards, list_files, open_reader
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.reader import H5Reader
from h5chunk.urls import local_copy_of


def open_frames(path: Paths, fields: Mapping[str, str], trusted: bool, checksums: str) -> H5Reader:
    """Open the frames of all episodes as the rows of one reader."""
    stars = {re.sub(r"\*.*", "", dataset) for dataset in fields.values()}
    files = list_files(path, NO_OPTIONS)
    if any(local_copy_of(file) is not None for file in files):
        raise OptionError(f"path is {path!r}: windows are read from local files: copy the objects first")
    if all("*" not in dataset for dataset in fields.values()):
        return open_reader(path, fields, trusted=trusted, checksums=checksums)
    if len(stars) > 1 or any(dataset.count("*") != 1 for dataset in fields.values()):
        raise OptionError(f"fields is {fields!r}: each path needs exactly one *, after the same group: data/*/NAME")
    check_shards(path)
    parent = stars.pop()
    suffixes = {name: dataset.split("*")[1] for name, dataset in fields.items()}
    if (parent and not parent.endswith("/")) or any(not each.startswith("/") for each in suffixes.values()):
        raise OptionError(f"fields is {fields!r}: the * stands for the whole name of a group, as in data/*/NAME")

    def open_file(file: Path) -> tuple[list[Path], list[dict[str, str]]]:
        groups = _list_episodes(file, parent, suffixes, trusted)
        return [file] * len(groups), [
            {name: f"{parent}{group}{suffix}" for name, suffix in suffixes.items()} for group in groups
        ]

    def open_all(some: Sequence[Path]) -> H5Reader:
        listed = [open_file(file) for file in some]
        paths, own = [each for part in listed for each in part[0]], [each for part in listed for each in part[1]]
        name = some[0] if len(some) == 1 else Path(f"{shown(some[0])} and {len(some) - 1} more")
        if len(paths) == 1:
            return H5Reader(paths[0], own[0], trusted=trusted, checksums=checksums)
        return FileSet(paths, own, name, trusted=trusted, checksums=checksums)

    if not trusted:
        try_files(files, lambda file: open_all([file]).check_metadata(), repr((fields, checksums)))
    return open_all(files)


def _list_episodes(file: Path, parent: str, suffixes: Mapping[str, str], trusted: bool) -> list[str]:
    """Return the groups of a file's episodes. Raises FieldError if an episode lacks a field, or has unequal fields."""
    guard = Guard(file, trusted)
    where = f"{printable(file)}: {parent.rstrip('/') or '/'!r}"
    with opened(file) as handle:
        group = guard.find(handle, parent or "/")
        if not isinstance(group, h5py.Group):
            raise FieldError(f"{where} is not a group of episodes")
        names = sorted((name for name in group if isinstance(name, str)), key=_by_value)
        if not names:
            raise FieldError(f"{where} has no episodes")
        for name in names:
            lengths = {}
            for suffix in suffixes.values():
                item = guard.find(handle, f"{parent}{name}{suffix}")
                if not isinstance(item, h5py.Dataset) or not item.shape:
                    raise FieldError(f"{where}: episode {name!r} has no dataset {suffix[1:]!r} with one row per step")
                lengths[suffix[1:]] = item.shape[0]
            if len({*lengths.values()}) > 1:
                listed = ", ".join(f"{field!r} has {count}" for field, count in lengths.items())
                raise FieldError(f"{where}: fields of episode {name!r} differ in length: {listed}")
    return names


def _by_value(name: str) -> list[Any]:
    return [(int(part), "") if number % 2 else (-1, part) for number, part in enumerate(re.split(r"(\d+)", name))]


def find_borders(frames: H5Reader, dataset: str, trusted: bool) -> np.ndarray:
    """Return the first row of each episode, and the number of rows: (num_episodes + 1,) int64, of all files."""
    found = [np.zeros(1, np.int64)]
    for number, reader in enumerate(frames.readers):
        start, stop = frames.starts[number : number + 2].tolist()
        table = open_reader(reader.path, {"lengths": dataset}, trusted=trusted)
        field = table.fields["lengths"]
        if field.dtype.kind not in "iu" or field.sample_shape or table.num_samples > stop - start:
            raise FieldError(
                f"{printable(reader.path)}: {dataset!r} is not a list of whole numbers, at most {stop - start}, "
                "with the length of each episode"
            )
        lengths = np.empty(table.num_samples, field.dtype)
        table.read("lengths", np.arange(len(lengths)), lengths)
        if (lengths < 0).any() or sum(lengths.tolist()) != stop - start:
            raise FieldError(
                f"{printable(reader.path)}: the lengths of episodes in {dataset!r} add up to {sum(lengths.tolist())}, "
                f"but the fields have {stop - start} rows"
            )
        found.append(start + np.cumsum(lengths.astype(np.int64)))
    return np.concatenate(found)
