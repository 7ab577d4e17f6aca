"""Open the volumes of HDF5 files, and read patches of them as the samples of a reader. A volume is one dataset."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, OptionError, names_text, printable, shown
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.patches import RandomPatches, Tiles
from h5chunk.store.hdf5.chunk_table import check_chunks
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import fetched_objects, opened
from h5chunk.store.hdf5.patterns import Pattern, find_matches, parse
from h5chunk.store.hdf5.types import Element
from h5chunk.store.read.arrays import Arrays, Boxes
from h5chunk.store.read.checksums import OFF, Sums, read_sums
from h5chunk.store.read.engine import CACHE_BYTES, BlockCache, BoxReader, items_of
from h5chunk.store.read.field_readers import Opening
from h5chunk.store.read.fields import Field, describe_field, exists
from h5chunk.store.read.fileset import CATEGORIES_REMEDY
from h5chunk.store.read.open_files import OpenFiles
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.samples import FieldReader, PatchRows
from h5chunk.store.read.source import Computed, Groups, Source

WEIGHTS = " weights"  # name of the field of weights; the blank distinguishes it from users' fields
CHANNELS = ("first", "last")
WINDOW_BYTES = 1 << 30  # limit on the decoded size of the chunks of cells that are shuffled together
POSITION = "position"
HELD_BYTES = 384 << 20  # limit on the size of the patches in cells that are shuffled together


@dataclass(frozen=True)
class VolumeField:
    """A field of patches. Each volume has one dataset, with ``leading`` axes before its spatial axes.

    ``element`` describes the elements of the first volume's dataset; others may be stored in another way. ``halo`` is
    the width of the border around a patch along each spatial axis. ``padding`` is how patches are filled outside of the
    volume: edge, reflect, or a number.
    """

    name: str
    datasets: list[tuple[int, str]]  # index of the file, and path in the file
    grids: list[ChunkGrid]
    element: Element
    leading: int
    halo: tuple[int, ...]
    padding: Any
    decode: str = ""  # how packed numbers are converted
    size: tuple[int, ...] = field(default=())  # of a patch without its halo

    @property
    def dtype(self) -> np.dtype:
        return self.element.dtype

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


class VolumeFiles:
    """The files of volumes. ``sums`` has the checksums of the datasets in each file, by their path."""

    def __init__(self, readers: Sequence[Source], sums: Sequence[Sums]) -> None:
        self.readers, self._sums = tuple(readers), tuple(sums)
        self.file_list = [file for reader in readers for file in reader.file_list]

    def arrays(self, opening: Any, fields: Collection[VolumeField]) -> dict[str, Arrays]:
        """Describe the volumes of each field. ``opening`` is a `h5chunk.store.read.field_readers.Opening`."""
        arrays: dict[str, dict[int, Arrays]] = {each.name: {} for each in fields}  # by number of the volume
        for number, source in enumerate(self.readers):
            source.check_unchanged()
            with opened(source.path) as file:
                source.check_unchanged()
                stored = opening.file(source, file, opening.first_file + number)
                for each in fields:
                    axes, member = len(each.grids[0].shape) - len(each.element.shape), each.element.member
                    for volume, (of, dataset) in enumerate(each.datasets):
                        if of == number:
                            found = self._sums[number].get(dataset)
                            sums: Sums = {} if found is None else {each.name: found}
                            own = stored.arrays(
                                each.name, dataset, member=member, axes=axes, sums=sums, decode=each.decode
                            )
                            arrays[each.name][volume] = own
        return {name: Arrays.joined([own[volume] for volume in sorted(own)]) for name, own in arrays.items()}


class VolumeBoxes:
    """Reads any boxes of the volumes of one field, without channels."""

    def __init__(self, files: VolumeFiles, field: VolumeField) -> None:
        opening = Opening(BlockCache(CACHE_BYTES))
        self._reader = BoxReader(files.arrays(opening, [field])[field.name], opening.cache)
        self._dtype, self._readers, self._opened = field.dtype, files.readers, OpenFiles(files)

    def read(self, volume: int, box: Sequence[slice]) -> np.ndarray:
        """Read a box of a volume."""
        low, high = (np.array([[getattr(part, end) for part in box]]) for end in ("start", "stop"))
        values = np.empty(tuple((high - low)[0]), self._dtype)
        arrays, zero = self._reader.arrays, np.zeros(1, np.int64)
        axes = arrays.num_axes
        boxes = Boxes(zero + volume, low[:, :axes], high[:, :axes], zero, 0)
        target = items_of(values.reshape(-1).view(np.uint8), arrays.item_bytes, (1, *values.shape[:axes]))
        for task in self._reader.boxes(boxes, target):
            task(self._opened)
        return values

    def close(self) -> None:
        """Close the files. Raises FileError if one was changed while it was read."""
        self._opened.close()
        self._reader.cache.forget()
        for source in self._readers:
            source.check_unchanged()


class PatchReader(Source):
    """A source whose samples are patches of volumes.

    ``plan`` has their positions, which are a computed field if ``has_positions``. ``names`` has the name of each
    volume.
    """

    def __init__(
        self,
        files: VolumeFiles,
        fields: Mapping[str, VolumeField],
        names: Sequence[str],
        plan: RandomPatches | Tiles,
        *,
        has_positions: bool = False,
    ) -> None:
        first, *others = files.readers
        self.files, self.volume_fields, self.volume_names = files, dict(fields), list(names)
        self.plan, self._has_positions = plan, has_positions
        super().__init__(
            Path(f"{shown(first.path)} and {len(others)} more") if others else first.path,
            {name: self._describe(each) for name, each in fields.items()},
            plan.num_samples,
            readers=files.readers if others else (),
            stamp=first.stamp,
            trusted=first.trusted,
            checksums=first.checksums,
            starts=np.array([0, plan.num_samples]),
            chunk_samples=max(1, round(plan.num_samples / max(1, len(plan.chunk_starts) - 1))),
            chunk_starts=plan.chunk_starts,
        )

    def with_plan(self, plan: RandomPatches | Tiles, *, has_positions: bool) -> PatchReader:
        """Return a source of other patches of the same volumes."""
        return PatchReader(self.files, self.volume_fields, self.volume_names, plan, has_positions=has_positions)

    @property
    def epoch_samples(self) -> int:  # type: ignore[override]
        """The offset of each epoch. It is 0 for tiles, which are the same in all epochs."""
        return self.num_samples if isinstance(self.plan, RandomPatches) else 0

    @property
    def computed(self) -> dict[str, Computed]:
        """The positions of patches, if they are wanted."""
        if not self._has_positions:
            return {}
        num_axes = len(next(iter(self.volume_fields.values())).size)
        shape = self.num_samples, 1 + num_axes
        return {POSITION: Computed.described(POSITION, shape, np.int64, self.positions_of)}

    def positions_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the volume of each patch, and its start in it without the halo: (n, 1 + axes) int64."""
        volumes, starts = self.plan.boxes(rows)
        return np.concatenate([volumes[:, None], starts], axis=1)

    @property
    def groups(self) -> Groups:
        """The volumes."""
        return Groups("volume", self.volume_names, self.plan.boxes(np.arange(self.num_samples))[0])

    def rows_of_samples(self, name: str, samples: np.ndarray) -> tuple[Source, np.ndarray]:
        raise OptionError(f"field {name!r} has many values in a patch: to weight patches, pass weights= to Patches")

    def datasets_of(self, field: str) -> list[tuple[Path, str]]:
        if field not in self.volume_fields:
            return super().datasets_of(field)
        each = self.volume_fields[field]
        if len(each.box_shape()) > len(each.size):
            raise FieldError(
                f"field {field!r} has channels, for which h5chunk info --stats computes no statistics in volumes: "
                "compute their mean and standard deviation with NumPy"
            )
        return [(self.files.readers[file].path, path) for file, path in each.datasets]

    def _describe(self, each: VolumeField) -> Field:
        grid = ChunkGrid((self.plan.num_samples, *each.box_shape()), None, each.dtype.itemsize, False)
        space = "UDHW"[-len(each.size) :]
        axes = {0: f"N{space}C", 1: f"NC{space}"}.get(each.leading, "")
        axes = axes if len(axes) == len(grid.shape) else ""
        return Field(each.name, each.datasets[0][1], grid, each.dtype, axes, element=each.element)

    @property
    def chunk_bytes(self) -> int:
        """The decoded size of a cell's chunks in bytes, or the size of its patches if that is larger."""
        return max(self.plan.cell_bytes, self.chunk_samples * self.main.grid.sample_bytes)

    @property
    def recommended_window(self) -> int:
        patches = self.chunk_samples * self.main.grid.sample_bytes
        return max(1, min(WINDOW_BYTES // max(1, self.chunk_bytes), HELD_BYTES // max(1, patches)))

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 of the fingerprints of all files, the shapes of all volumes, and the positions of patches."""
        facts = [
            (
                each.datasets,
                each.box_shape(),
                each.padding,
                str(each.dtype),
                [grid.shape for grid in each.grids],
                *each.element.member,
            )
            for each in self.volume_fields.values()
        ]
        fields = zlib.crc32(repr(facts).encode())
        return zlib.crc32(
            repr(([each.fingerprint for each in self.files.readers], self.plan.identity)).encode(), fields
        )

    def field_readers(self, opening: Any, names: Collection[str]) -> dict[str, FieldReader]:
        arrays = self.files.arrays(opening, [self.volume_fields[name] for name in names])
        return {name: PatchRows(name, self, own, opening.cache) for name, own in arrays.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "files": copy(self.files)}


def open_volume_files(
    files: Sequence[Path], fields: Mapping[str, VolumeField], trusted: bool, checksums: str
) -> VolumeFiles:
    """Return the files of volumes, of which each has a reader of one dataset.

    Raises OptionError if a file has no checksums that are to be compared.
    """
    readers, sums = [], []
    for number, path in enumerate(files):
        readers.append(H5Reader(path, _some_field(fields, number), trusted=trusted, checksums=checksums))
        described = {}
        for each in fields.values():
            for (of, dataset), grid in zip(each.datasets, each.grids, strict=True):
                if of == number:
                    described[dataset] = Field(dataset, dataset, grid, each.dtype)
        with opened(path) as file:
            sums.append(read_sums(file, path, described, readers[-1].header, checksums))
    return VolumeFiles(readers, sums)


def _some_field(fields: Mapping[str, VolumeField], number: int) -> dict[str, str]:
    """Return the name of a field, and one of its datasets in file ``number``."""
    name, each = next(iter(fields.items()))
    dataset = next(path for file, path in each.datasets if file == number)
    return {name: "/".join((dataset, *each.element.member))}


def _leading(name: str, channels: str | None, num_spatial: int, num_axes: int) -> int:
    """Return how many of a dataset's ``num_axes`` axes precede its ``num_spatial`` spatial axes."""
    if num_axes <= num_spatial:
        return 0
    if channels not in CHANNELS:
        subject = "the weights have" if name == WEIGHTS else f"field {name!r} has"
        raise OptionError(
            f"{subject} {num_axes} axes, but size has {num_spatial}: pass channels='first' if the other axes come "
            "first, otherwise channels='last'"
        )
    return num_axes - num_spatial if channels == "first" else 0


def probe_volumes(path: Path, checksums: str, *opened_as: Any) -> None:
    """Open the volumes of a file and their checksums, and list their chunks; other arguments are for `open_volumes`."""
    fields, _ = open_volumes([path], *opened_as)
    if checksums != OFF:
        open_volume_files([path], fields, opened_as[-1], checksums)
    with opened(path) as file:
        for each in fields.values():
            for _, dataset in each.datasets:
                check_chunks(file[dataset])


def open_volumes(
    files: Sequence[Path],
    fields: Mapping[str, str],
    size: tuple[int, ...],
    channels: Mapping[str, str | None],
    decode: str,
    trusted: bool,
) -> tuple[dict[str, VolumeField], list[str]]:
    """Open the datasets of all volumes. Returns the fields, which have no halo yet, and the names of the volumes.

    A field with a ``*`` in its path has several datasets. Datasets of different fields belong to the same volume if the
    ``*`` match the same texts. ``channels`` says for each field whether the axes of a dataset that are not
    spatial come "first" or "last"; None if it has no others. Raises OptionError if a dataset has others nevertheless.
    """
    patterns = parse("fields", fields)
    found: dict[str, VolumeField] = {}
    names: list[str] = []
    for number, path in enumerate(files):
        guard = Guard(path, trusted)
        with opened(path) as file, ExitStack() as held:
            listed = {name: _list_datasets(file, guard, pattern) for name, pattern in patterns.items()}
            held.enter_context(fetched_objects(file, [each for own in listed.values() for each in own.values()]))
            texts = list(next(iter(listed.values())))
            for name, own in listed.items():
                if own.keys() != {*texts}:
                    odd = printable(min(own.keys() ^ {*texts}))
                    raise FieldError(f"{printable(path)}: only some of the fields have the volume {odd!r}")
                for text in texts:
                    described = describe_field(file, path, name, own[text], None, guard, decode)
                    if not isinstance(described, Field) or described.element is None or described.dtype.kind == "S":
                        raise FieldError(f"{printable(path)}: {own[text]!r} does not contain numbers")
                    grid, element = described.grid, described.element
                    num_axes = len(grid.shape) - len(element.shape)
                    if num_axes < len(size):
                        raise FieldError(
                            f"{printable(path)}: {own[text]!r} has {num_axes} axes, but size has {len(size)}"
                        )
                    axes = _leading(name, channels[name], len(size), num_axes)
                    new = VolumeField(name, [], [], element, axes, (0,) * len(size), 0, decode, size)
                    first = found.setdefault(name, new)
                    first.datasets.append((number, described.dataset))
                    first.grids.append(grid)
                    if first.dtype != element.dtype or _other_axes(first, -1) != _other_axes(first, 0):
                        where = f"{printable(path)}: {own[text]!r}"
                        raise FieldError(
                            f"{where} has the type {element.dtype} and the shape {grid.shape}, but "
                            f"another volume has {first.dtype} and {first.grids[0].shape}: only spatial axes may differ"
                        )
                    if first.element.names != element.names:
                        raise FieldError(
                            f"{printable(path)}: the enumeration {own[text]!r} has the names "
                            f"{names_text(element.names.values())}, but in another volume they are "
                            f"{names_text(first.element.names.values())}: {CATEGORIES_REMEDY}"
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


def _list_datasets(file: h5py.File, guard: Guard, pattern: Pattern) -> dict[str, str]:
    """Return the datasets that a pattern matches, by the text that each * matches, which is "" without a *.

    Raises FieldError if no dataset matches.
    """
    matches = find_matches(file, guard, pattern)
    found = {"/".join(each.texts): each.path for each in matches if not each.texts or exists(file, guard, each.path)}
    if not found:
        raise FieldError(f"{printable(guard.path)}: no dataset matches {str(pattern)!r}")
    return found
