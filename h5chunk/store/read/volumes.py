"""Open the volumes of HDF5 files, and read patches of them as the samples of a reader. A volume is one dataset."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import FieldError, OptionError, names_text, printable, shown
from h5chunk.plan.cache import ChunkGrid
from h5chunk.plan.patches import RandomPatches, Tiles
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import fetched_objects, opened
from h5chunk.store.hdf5.patterns import find_matches, parse
from h5chunk.store.read.arrays import Arrays
from h5chunk.store.read.engine import CACHE_BYTES, BlockCache, BoxReader
from h5chunk.store.read.field_readers import Opening
from h5chunk.store.read.fields import Contents, Field, exists
from h5chunk.store.read.files import open_each
from h5chunk.store.read.fileset import CATEGORIES_REMEDY, set_name
from h5chunk.store.read.open_files import OpenFiles
from h5chunk.store.read.raw import read_box
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

    ``pattern`` is the path of these datasets, which may have a ``*``. ``stored`` has, for each volume, the number
    of its file and a description of its dataset. Datasets may differ in how they are stored. ``size`` is the shape
    of a patch without its border, and ``halo`` the width of the border along each spatial axis. ``padding`` is how
    patches are filled outside of the volume: edge, reflect, or a number.
    """

    name: str
    pattern: str
    stored: list[tuple[int, Field]]
    leading: int
    size: tuple[int, ...]
    halo: tuple[int, ...]
    padding: Any = 0

    @property
    def dtype(self) -> np.dtype:
        return self.stored[0][1].dtype

    def shape(self, volume: int) -> tuple[int, ...]:
        """Return the shape of a volume's dataset."""
        return self.stored[volume][1].grid.shape

    def space(self, volume: int) -> tuple[int, ...]:
        """Return the shape of a volume along its spatial axes."""
        return self.shape(volume)[self.leading : self.leading + len(self.size)]

    def other_axes(self, volume: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of axes of a volume's dataset, and the sizes of those that are not spatial."""
        shape = self.shape(volume)
        return len(shape), shape[: self.leading] + shape[self.leading + len(self.size) :]

    def box_shape(self) -> tuple[int, ...]:
        """Return the shape of a patch."""
        space = [size + 2 * halo for size, halo in zip(self.size, self.halo, strict=True)]
        shape = self.shape(0)
        return (*shape[: self.leading], *space, *shape[self.leading + len(space) :])

    def boxes(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the start and end of patches along each axis, (n, axes) int64 each. A start may be negative."""
        shape = np.array(self.box_shape())
        low = np.zeros((len(starts), len(shape)), np.int64)
        low[:, self.leading : self.leading + len(self.size)] = starts - np.array(self.halo)
        return low, low + shape


class Volumes:
    """The volumes of some files.

    ``readers`` are the sources of the files, and ``names`` has the name of each volume. ``shapes`` has their shapes in
    space, (num_volumes, axes) int64.
    """

    def __init__(self, readers: Sequence[Source], fields: Mapping[str, VolumeField], names: Sequence[str]) -> None:
        self.readers, self.fields, self.names = tuple(readers), dict(fields), list(names)
        self.file_list = [file for reader in readers for file in reader.file_list]
        self.shapes = np.array([next(iter(fields.values())).space(number) for number in range(len(names))])

    def with_fields(self, fields: Mapping[str, VolumeField]) -> Volumes:
        """Return the same volumes with other fields."""
        return Volumes(self.readers, fields, self.names)

    def arrays(self, opening: Any, names: Collection[str]) -> dict[str, Arrays]:
        """Describe the volumes of some fields. ``opening`` is a `h5chunk.store.read.field_readers.Opening`."""
        found: dict[str, list[Arrays]] = {name: [] for name in names}
        for number, source in enumerate(self.readers):
            source.check_unchanged()
            with opened(source.path) as file:
                source.check_unchanged()
                stored = opening.file(source, file, opening.first_file + number)
                for name in names:
                    for each in (described for of, described in self.fields[name].stored if of == number):
                        sums = {name: source.sums[each.name]} if each.name in source.sums else {}
                        how = {"member": each.member, "axes": each.num_axes, "sums": sums, "decode": each.decode}
                        found[name].append(stored.arrays(name, each.dataset, **how))
        return {name: Arrays.joined(arrays) for name, arrays in found.items()}

    def copied(self) -> Volumes:
        """Return a copy for another process."""
        return Volumes([copy(reader) for reader in self.readers], self.fields, self.names)


class VolumeBoxes:
    """Reads any boxes of the volumes of one field, without channels."""

    def __init__(self, volumes: Volumes, name: str) -> None:
        self.field, opening = volumes.fields[name], Opening(BlockCache(CACHE_BYTES))
        self._reader = BoxReader(volumes.arrays(opening, [name])[name], opening.cache)
        self._readers, self._opened = volumes.readers, OpenFiles(volumes)

    def read(self, volume: int, box: Sequence[slice]) -> np.ndarray:
        """Read a box of a volume."""
        values = np.empty([part.stop - part.start for part in box], self.field.dtype)
        low, high = [part.start for part in box], [part.stop for part in box]
        read_box(self._reader, self._opened, low, high, values, volume)
        return values

    def close(self) -> None:
        """Close the files. Raises FileError if one was changed while it was read."""
        self._opened.close()
        self._reader.cache.forget()
        for source in self._readers:
            source.check_unchanged()


class PatchReader(Source):
    """A source whose samples are patches of volumes.

    ``plan`` has their positions, which are a computed field if ``has_positions``.
    """

    def __init__(self, volumes: Volumes, plan: RandomPatches | Tiles, *, has_positions: bool = False) -> None:
        first, *others = volumes.readers
        self.volumes, self.plan, self._has_positions = volumes, plan, has_positions
        super().__init__(
            set_name([reader.path for reader in volumes.readers]),
            {name: self._describe(each) for name, each in volumes.fields.items()},
            plan.num_samples,
            readers=volumes.readers if others else (),
            stamp=first.stamp,
            trusted=first.trusted,
            checksums=first.checksums,
            starts=np.array([0, plan.num_samples]),
            chunk_samples=max(1, round(plan.num_samples / max(1, len(plan.chunk_starts) - 1))),
            chunk_starts=plan.chunk_starts,
        )

    @property
    def epoch_samples(self) -> int:  # type: ignore[override]
        """The offset of each epoch. It is 0 for tiles, which are the same in all epochs."""
        return self.num_samples if isinstance(self.plan, RandomPatches) else 0

    @property
    def computed(self) -> dict[str, Computed]:
        """The positions of patches, if they are wanted."""
        if not self._has_positions:
            return {}
        num_axes = self.volumes.shapes.shape[1]
        shape = self.num_samples, 1 + num_axes
        return {POSITION: Computed.described(POSITION, shape, np.int64, self.positions_of)}

    def positions_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the volume of each patch, and its start in it without the halo: (n, 1 + axes) int64."""
        volumes, starts = self.plan.boxes(rows)
        return np.concatenate([volumes[:, None], starts], axis=1)

    @property
    def groups(self) -> Groups:
        """The volumes."""
        return Groups("volume", self.volumes.names, self.plan.boxes(np.arange(self.num_samples))[0])

    def rows_of_samples(self, name: str, samples: np.ndarray) -> tuple[Source, np.ndarray]:
        raise OptionError(f"field {name!r} has many values in a patch: to weight patches, pass weights= to Patches")

    def datasets_of(self, field: str) -> list[tuple[Path, str]]:
        if (each := self.volumes.fields.get(field)) is None:
            return super().datasets_of(field)
        if len(each.box_shape()) > len(each.size) or len(each.size) not in (1, 3):  # as info would find channels
            what = "has channels" if len(each.box_shape()) > len(each.size) else f"is {len(each.size)}-dimensional"
            raise FieldError(
                f"field {field!r} {what}, for which h5chunk info --stats computes no statistics in volumes: "
                "compute their mean and standard deviation with NumPy"
            )
        return [(self.volumes.readers[file].path, each.pattern) for file in sorted({file for file, _ in each.stored})]

    def _describe(self, each: VolumeField) -> Field:
        grid = ChunkGrid((self.plan.num_samples, *each.box_shape()), None, each.dtype.itemsize, False)
        space = "UDHW"[-len(each.size) :]
        axes = {0: f"N{space}C", 1: f"NC{space}"}.get(each.leading, "")
        axes = axes if len(axes) == len(grid.shape) else ""
        stored = each.stored[0][1]
        return Field(each.name, stored.dataset, grid, each.dtype, axes, element=stored.element)

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
            (each.box_shape(), each.padding, [(file, stored.name) for file, stored in each.stored])
            for each in self.volumes.fields.values()
        ]
        files = [each.fingerprint for each in self.volumes.readers]
        return zlib.crc32(repr((files, facts, self.plan.identity)).encode())

    def field_readers(self, opening: Any, names: Collection[str]) -> dict[str, FieldReader]:
        arrays = self.volumes.arrays(opening, names)
        return {name: PatchRows(name, self, own, opening.cache) for name, own in arrays.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "volumes": self.volumes.copied()}


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


class VolumeFile(NamedTuple):
    """The datasets of the volumes of one file, which are fields of ``reader``.

    ``volumes`` has the name of the dataset of each field, for each volume in the order of ``texts``, which are what
    each ``*`` stands for.
    """

    reader: H5Reader
    volumes: dict[str, list[str]]
    texts: list[str]

    @property
    def sources(self) -> list[H5Reader]:
        return [self.reader]


def _open_file(path: Path, fields: Mapping[str, str], decode: str, checksums: str, trusted: bool) -> VolumeFile:
    guard = Guard(path, trusted)
    with opened(path) as file, ExitStack() as held:
        contents, listed = Contents(file, guard), dict[str, dict[str, str]]()  # datasets by the texts that * matches
        for name, pattern in parse("fields", fields).items():
            found = [
                each for each in find_matches(file, guard, pattern) if not each.texts or exists(contents, each.path)
            ]
            if not found:
                raise FieldError(f"{printable(path)}: no dataset matches {str(pattern)!r}")
            listed[name] = {"/".join(each.texts): each.path for each in found}
        datasets = [dataset for own in listed.values() for dataset in own.values()]
        held.enter_context(fetched_objects(file, datasets))
        texts = list(next(iter(listed.values())))
        for own in listed.values():
            if own.keys() != {*texts}:
                odd = printable(min(own.keys() ^ {*texts}))
                raise FieldError(f"{printable(path)}: only some of the fields have the volume {odd!r}")
        how: dict[str, Any] = {"trusted": trusted, "checksums": checksums, "decode": decode, "file": file}
        reader = H5Reader(path, {dataset: dataset for dataset in datasets}, **how, are_alike=False)
    return VolumeFile(reader, {name: [own[text] for text in texts] for name, own in listed.items()}, texts)


def open_volumes(
    files: Sequence[Path],
    fields: Mapping[str, str],
    size: tuple[int, ...],
    channels: Mapping[str, str | None],
    decode: str,
    trusted: bool,
    checksums: str,
) -> Volumes:
    """Open the datasets of all volumes. Their fields have no halo yet.

    A field with a ``*`` in its path has several datasets. Datasets of different fields belong to the same volume if the
    ``*`` match the same texts. ``channels`` says for each field whether the axes of a dataset that are not
    spatial come "first" or "last"; None if it has no others. Raises OptionError if a dataset has others nevertheless,
    or if a file has no checksums that are to be compared.
    """
    of_files = open_each(files, _open_file, fields, decode, checksums, trusted=trusted)
    found: dict[str, VolumeField] = {}
    names: list[str] = []
    for number, (reader, volumes, texts) in enumerate(of_files):
        for name, datasets in volumes.items():
            for dataset in datasets:
                described = _numbers(reader, dataset, size)
                leading = _leading(name, channels[name], len(size), described.num_axes)
                each = found.setdefault(name, VolumeField(name, fields[name], [], leading, size, (0,) * len(size)))
                each.stored.append((number, described))
                _check_last(each, reader.path)
        names += [f"{shown(reader.path)}: {text}" if text else shown(reader.path) for text in texts]
    _check_same_space(found, names)
    return Volumes([each.reader for each in of_files], found, names)


def _numbers(reader: H5Reader, dataset: str, size: tuple[int, ...]) -> Field:
    """Return the description of a dataset. Raises FieldError unless it has numbers, and the axes of a patch."""
    described, where = reader.fields[dataset], f"{printable(reader.path)}: {dataset!r}"
    if not isinstance(described, Field) or described.element is None or described.dtype.kind == "S":
        raise FieldError(f"{where} does not contain numbers")
    if described.num_axes < len(size):
        raise FieldError(f"{where} has {described.num_axes} axes, but size has {len(size)}")
    return described


def _check_last(each: VolumeField, path: Path) -> None:
    """Raise FieldError if the last volume of a field differs from the first one in more than its shape in space."""
    (_, first), (_, last) = each.stored[0], each.stored[-1]
    where = f"{printable(path)}: {last.name!r}"
    if first.dtype != last.dtype or each.other_axes(-1) != each.other_axes(0):
        raise FieldError(
            f"{where} has the type {last.dtype} and the shape {last.grid.shape}, but another volume has {first.dtype} "
            f"and {first.grid.shape}: only spatial axes may differ"
        )
    if first.names != last.names:
        raise FieldError(
            f"{printable(path)}: the enumeration {last.name!r} has the names {names_text(last.names.values())}, but in "
            f"another volume they are {names_text(first.names.values())}: {CATEGORIES_REMEDY}"
        )


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
