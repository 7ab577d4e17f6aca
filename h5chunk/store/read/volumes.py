"""Open the volumes of HDF5 files, and read patches of them as the samples of a reader. A volume is one dataset."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, OptionError, printable, shown
from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.plan.patches import RandomPatches, Tiles
from h5chunk.store.hdf5.chunk_table import NotDirect, check_chunks
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import open_file, opened, translate_errors
from h5chunk.store.read.boxes import PatchBytes, VolumeBytes, pad
from h5chunk.store.read.csr import CsrBuffers
from h5chunk.store.read.direct import ByteReader
from h5chunk.store.read.fields import Field, describe_field
from h5chunk.store.read.files import natural
from h5chunk.store.read.reader import H5Reader

WINDOW_BYTES = 1 << 30  # limit on the decoded size of the chunks of cells that are shuffled together
HELD_BYTES = 384 << 20  # limit on the size of the patches in cells that are shuffled together


@dataclass(frozen=True)
class VolumeField:
    """A field of patches. Each volume has one dataset, with ``leading`` axes before its spatial axes.

    ``halo`` is the width of the border around a patch along each spatial axis. ``padding`` is how patches are filled
    outside of the volume: edge, reflect, or a number.
    """

    name: str
    datasets: list[tuple[int, str]]  # index of the file, and path in the file
    grids: list[ChunkGrid]
    dtype: np.dtype
    leading: int
    halo: tuple[int, ...]
    padding: Any
    size: tuple[int, ...] = field(default=())  # of a patch without its halo

    def box_shape(self) -> tuple[int, ...]:
        """Return the shape of a patch."""
        space = [size + 2 * halo for size, halo in zip(self.size, self.halo, strict=True)]
        shape = self.grids[0].shape
        return (*shape[: self.leading], *space, *shape[self.leading + len(space) :])

    def space(self, volume: int) -> tuple[int, ...]:
        """Return the shape of a volume along its spatial axes."""
        return self.grids[volume].shape[self.leading : self.leading + len(self.size)]

    def boxes(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the start and end of patches along each axis, (n, axes) int64 each. A start may be negative."""
        shape = np.array(self.box_shape())
        low = np.zeros((len(starts), len(shape)), np.int64)
        low[:, self.leading : self.leading + len(self.size)] = starts - np.array(self.halo)
        return low, low + shape


class PatchReader(H5Reader):
    """A reader whose samples are patches of volumes. ``plan`` has their positions."""

    def __init__(self, files: Sequence[Path], fields: Mapping[str, VolumeField], plan: Any, trusted: bool) -> None:
        readers = [H5Reader(file, _some_field(fields, number), trusted=trusted) for number, file in enumerate(files)]
        first = readers[0]
        self.path, self.stamp, self.header, self.ragged = first.path, first.stamp, None, None
        if len(files) > 1:
            self.is_set = True
            self._readers, self.path = tuple(readers), Path(f"{shown(files[0])} and {len(files) - 1} more")
        self.trusted, self.checksums, self.sums = trusted, first.checksums, {}
        self.volume_fields, self._facts = dict(fields), [reader.fingerprint for reader in readers]
        self._opened = None
        self.set_plan(plan)

    def set_plan(self, plan: RandomPatches | Tiles) -> None:
        """Replace the positions of the patches."""
        self.__dict__.pop("fingerprint", None)
        self.plan, self.num_samples, self.chunk_starts = plan, plan.num_samples, plan.chunk_starts
        self.starts = np.array([0, self.num_samples])
        self.chunk_samples = max(1, round(self.num_samples / max(1, len(plan.chunk_starts) - 1)))
        self.fields = {name: self._describe(each) for name, each in self.volume_fields.items()}
        self.main = self.fields[max(self.fields, key=lambda name: self.fields[name].grid.sample_bytes)]

    def _describe(self, each: VolumeField) -> Field:
        grid = ChunkGrid((self.num_samples, *each.box_shape()), None, each.dtype.itemsize, False)
        space = "UDHW"[-len(each.size) :]
        axes = {0: f"N{space}C", 1: f"NC{space}"}.get(each.leading, "")
        return Field(each.name, each.datasets[0][1], grid, each.dtype, axes if len(axes) == len(grid.shape) else "")

    @property
    def chunk_bytes(self) -> int:
        """The decoded size of a cell's chunks in bytes, or the size of its patches if that is larger."""
        return max(self.plan.cell_bytes, self.chunk_samples * self.main.grid.sample_bytes)

    @property
    def recommendation(self) -> None:
        """Always None: `h5chunk tune` stores recommendations for rows, not for patches."""
        return

    @property
    def recommended_window(self) -> int:
        patches = self.chunk_samples * self.main.grid.sample_bytes
        return max(1, min(WINDOW_BYTES // max(1, self.chunk_bytes), HELD_BYTES // max(1, patches)))

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 of the fingerprints of all files, the shapes of all volumes, and the positions of patches."""
        fields = zlib.crc32(repr([(each.datasets, each.box_shape(), each.padding, str(each.dtype),
                                   [grid.shape for grid in each.grids]) for each in self.volume_fields.values()]
                                 ).encode())  # fmt: skip
        return zlib.crc32(repr((self._facts, self.plan.identity)).encode(), fields)

    def set_caches(self, main: CacheSettings) -> None:
        """Do nothing, because volumes are read through HDF5 only if byte ranges are not possible."""

    def actual_caches(self) -> dict[str, CacheSettings]:
        """Return no caches, because `set_caches` sets none."""
        return {}

    def cache_bytes(self, main: CacheSettings) -> int:
        return 0

    def check_unchanged(self, descriptor: int | None = None) -> None:
        if not self._readers:
            super().check_unchanged(descriptor)
        for reader in self._readers:
            reader.check_unchanged()

    def check_metadata(self) -> None:
        self.direct_fields()

    def direct_fields(self) -> tuple[dict[str, ByteReader], dict[str, str]]:
        """Return the byte readers of fields, and the reason why each other field has none."""
        volumes: dict[str, list[VolumeBytes]] = {name: [] for name in self.fields}
        why: dict[str, str] = {}
        for number, reader in enumerate(self.readers):
            with opened(reader.path) as file:
                reader.check_unchanged()
                for name, each in self.volume_fields.items():
                    try:
                        own = [dataset for where, dataset in each.datasets if where == number]
                        volumes[name] += [VolumeBytes(reader.path, name, number, file[path], each) for path in own]
                    except NotDirect as error:
                        why.setdefault(name, f"{printable(reader.path)}: {error}")
        return {name: PatchBytes(self, name, own) for name, own in volumes.items() if name not in why}, why

    def read(self, name: str, rows: np.ndarray, out: np.ndarray | CsrBuffers) -> None:
        assert isinstance(out, np.ndarray)
        each = self.volume_fields[name]
        volumes, starts = self.plan.boxes(rows)
        low, high = each.boxes(starts)
        for number in np.argsort(volumes, kind="stable").tolist():
            volume = int(volumes[number])
            shape = np.array(each.grids[volume].shape)
            inside = [np.clip(bound[number], 0, shape) for bound in (low, high)]
            file, path = each.datasets[volume]
            values = self.read_box(
                file, path, [slice(*pair) for pair in zip(*map(np.ndarray.tolist, inside), strict=True)]
            )
            where = tuple(slice(*pair) for pair in zip(*(bound - low[number] for bound in inside), strict=True))
            out[number][where] = values
            pad(out[number], low[number], shape, each.padding)
        self.check_unchanged()

    def read_box(self, number: int, dataset: str, box: Sequence[slice]) -> np.ndarray:
        """Read a box of a dataset through HDF5. ``number`` is the index of the file."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), {}
        files: Any = self._opened[1]
        path = self.readers[number].path
        with translate_errors(path):
            if number not in files:
                files[number] = open_file(path, rdcc_nbytes=64 << 20)
                self.readers[number].check_unchanged()
                for each in self.volume_fields.values():
                    for name in (name for of, name in each.datasets if of == number):
                        check_chunks(files[number][name])
            values: np.ndarray = files[number][dataset][tuple(box)]
            return values


def _some_field(fields: Mapping[str, VolumeField], number: int) -> dict[str, str]:
    """Return the name of a field, and one of its datasets in file ``number``."""
    name, each = next(iter(fields.items()))
    return {name: next(path for file, path in each.datasets if file == number)}


def probe_volumes(*opened_as: Any) -> None:
    """Open volumes, and list their chunks. The arguments are passed to `open_volumes`."""
    fields, _ = open_volumes(*opened_as)
    with opened(opened_as[0][0]) as file:
        for each in fields.values():
            for _, dataset in each.datasets:
                check_chunks(file[dataset])
                with suppress(NotDirect):
                    VolumeBytes(opened_as[0][0], each.name, 0, file[dataset], each)


def open_volumes(
    files: Sequence[Path],
    fields: Mapping[str, str],
    size: tuple[int, ...],
    leading: Mapping[str, Callable[[int], int]],
    trusted: bool,
) -> tuple[dict[str, VolumeField], list[str]]:
    """Open the datasets of all volumes. Returns the fields, which have no halo yet, and the names of the volumes.

    A field with a ``*`` in its path has several datasets. Datasets of different fields belong to the same volume if the
    ``*`` matches the same text. ``leading`` has, for each field, a function that converts the number of axes of a
    dataset to the number of axes before its spatial axes.
    """
    found: dict[str, VolumeField] = {}
    names: list[str] = []
    for number, path in enumerate(files):
        guard = Guard(path, trusted)
        with opened(path) as file:
            listed = {name: _list_datasets(file, path, guard, pattern) for name, pattern in fields.items()}
            texts = list(next(iter(listed.values())))
            for name, own in listed.items():
                if own.keys() != {*texts}:
                    odd = printable(min(own.keys() ^ {*texts}))
                    raise FieldError(f"{printable(path)}: only some of the fields have the volume {odd!r}")
                for text in texts:
                    described = describe_field(file, path, name, own[text], None, guard)
                    if not isinstance(described, Field) or described.dtype.kind == "S":
                        raise FieldError(f"{printable(path)}: {own[text]!r} does not contain numbers")
                    grid, dtype = described.grid, described.dtype
                    if len(grid.shape) < len(size):
                        raise FieldError(
                            f"{printable(path)}: {own[text]!r} has {len(grid.shape)} axes, but size has {len(size)}"
                        )
                    first = found.setdefault(
                        name,
                        VolumeField(name, [], [], dtype, leading[name](len(grid.shape)), (0,) * len(size), 0, size),
                    )
                    first.datasets.append((number, own[text]))
                    first.grids.append(grid)
                    if first.dtype != dtype or _other_axes(first, -1) != _other_axes(first, 0):
                        raise FieldError(
                            f"{printable(path)}: {own[text]!r} has the type {dtype} and the shape {grid.shape}, but "
                            f"another volume has {first.dtype} and {first.grids[0].shape}: only spatial axes may differ"
                        )
        names += [f"{shown(path)}: {text}" if text else shown(path) for text in texts]
    _check_same_space(found, names)
    return found, names


def _other_axes(each: VolumeField, volume: int) -> tuple[int, tuple[int, ...]]:
    shape = each.grids[volume].shape
    return len(shape), shape[: each.leading] + shape[each.leading + len(each.size) :]


def _check_same_space(fields: Mapping[str, VolumeField], names: Sequence[str]) -> None:
    main = next(iter(fields.values()))
    for number, name in enumerate(names):
        for each in fields.values():
            if each.space(number) != main.space(number):
                raise FieldError(
                    f"{printable(name)}: {each.name!r} has the spatial shape {each.space(number)}, but {main.name!r} "
                    f"has {main.space(number)}: both must be equal"
                )
        if not all(main.space(number)):
            raise FieldError(f"{printable(name)}: {main.name!r} is empty, with the shape {main.space(number)}")


def _list_datasets(file: h5py.File, path: Path, guard: Guard, pattern: str) -> dict[str, str]:
    """Return the datasets that ``pattern`` matches, by the text that its ``*`` matches, which is "" without a ``*``.

    Raises OptionError if there are several ``*``, and FieldError if no dataset matches.
    """
    parts = pattern.strip("/").split("/")
    stars = [number for number, part in enumerate(parts) if "*" in part]
    if not stars:
        return {"": pattern}
    if len(stars) > 1 or pattern.count("*") > 1:
        raise OptionError(f"fields has {pattern!r}: use at most one *, as in volumes/*/raw")
    before, part, after = parts[: stars[0]], parts[stars[0]], parts[stars[0] + 1 :]
    group = guard.find(file, "/".join(before) or "/")
    if not isinstance(group, h5py.Group):
        raise FieldError(f"{printable(path)}: {'/'.join(before)!r} is not a group")
    matching = sorted(
        (name for name in group if isinstance(name, str) and fnmatchcase(name, part)),
        key=lambda name: natural(Path(name)),
    )
    paths = {name: "/".join([*before, name, *after]) for name in matching}
    start, end = part.split("*")
    datasets = {name[len(start) : len(name) - len(end)]: each for name, each in paths.items() if guard.find(file, each)}
    if not datasets:
        raise FieldError(f"{printable(path)}: no dataset matches {pattern!r}")
    return datasets
