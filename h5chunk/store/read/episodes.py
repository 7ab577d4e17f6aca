"""Open the frames of all episodes as one source. An episode is a group, a file, or a range of rows of a file."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import FieldError, OptionError, count_text, printable
from h5chunk.paths import check_path
from h5chunk.plan.episodes import ends_of_flags
from h5chunk.remote.mirror import NO_OPTIONS, RemoteOptions
from h5chunk.store.hdf5.attributes import has_attribute, join_columns, read_attribute
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import errors_as, fetched_objects, follow, opened
from h5chunk.store.hdf5.patterns import Match, Pattern, find_matches, parse
from h5chunk.store.hdf5.types import element_of, read_elements, type_problem
from h5chunk.store.read.arrays import Arrays, Blocks, Origin
from h5chunk.store.read.checksums import Sums
from h5chunk.store.read.encoded import FrameDataset, FrameDecoder
from h5chunk.store.read.field_readers import read_rows
from h5chunk.store.read.fields import Field
from h5chunk.store.read.files import Paths, in_one_file, list_data_files, open_each, open_joined, open_reader
from h5chunk.store.read.fileset import Chunks, combined, joined_files
from h5chunk.store.read.ragged import RaggedField
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.samples import Part, Rows
from h5chunk.store.read.source import Source
from h5chunk.store.read.windows import Episodes

ONE_RULE = (
    "a field may have one frame more than the others at the end of every episode, such as a last observation; name "
    "fields that have one value per episode in constants=[...]"
)
Table = str | np.ndarray  # a dataset in each file, or its values for all files
ENDS = "ends"
MAX_CONSTANT_BYTES = 64 << 20  # limit on the size of one value of a constant


class Episode(NamedTuple):
    """The datasets of one episode in a file.

    ``offsets`` has the offset in the file of fields that are stored like those of the first episode, and ``sums`` the
    checksums to verify.
    """

    fields: Mapping[str, Field | RaggedField]
    offsets: Mapping[str, int]
    sums: Sums


class EpisodeFile(Source):
    """The concatenated episodes of one file, which are read like the rows of a file.

    ``first`` reads the first episode. ``patterns`` has the path of each field's datasets, with ``*`` for the names of
    the episode, and ``names`` the names of the episodes. ``borders``, (num_episodes + 1,) int64, has the first row of
    each episode, and finally the number of rows.
    """

    joined_as = H5Reader.joined_as

    def __init__(
        self, first: H5Reader, episodes: Sequence[Episode], patterns: Mapping[str, Pattern], names: Sequence[str]
    ) -> None:
        of_main = [each.fields[first.main.name].grid for each in episodes]
        self.borders = np.concatenate([[0], np.cumsum([grid.shape[0] for grid in of_main], dtype=np.int64)])
        self.episodes, self.names = episodes, names
        self._patterns = {field: str(pattern) for field, pattern in patterns.items()}
        fields = {name: combined([(first, each.fields[name]) for each in episodes], name) for name in first.fields}
        chunks = Chunks.joined(self.borders, [grid.band_samples for grid in of_main], fields[first.main.name])
        super().__init__(
            first.path,
            fields | {first.main.name: chunks.main},
            int(self.borders[-1]),
            stamp=first.stamp,
            header=first.header,
            trusted=first.trusted,
            checksums=first.checksums,
            main=first.main.name,
            chunk_samples=chunks.samples,
            chunk_starts=chunks.starts,
        )
        self._first_fingerprint = first.fingerprint

    def datasets_of(self, field: str) -> list[tuple[Path, str]]:
        return [(self.path, self._patterns.get(field, field))]

    @cached_property
    def fingerprint(self) -> int:
        """A CRC-32 of the fingerprint of the first episode, and of the lengths and datasets of all episodes."""
        datasets = "\n".join(each.fields[self.main.name].dataset for each in self.episodes)
        fingerprint = zlib.crc32(datasets.encode("utf-8", "surrogateescape"), self._first_fingerprint)
        return zlib.crc32(self.borders.tobytes(), fingerprint)

    def stored_parts(self, opening: Any, number: int, names: Collection[str]) -> dict[str, Part]:
        self.check_unchanged()
        with opened(self.path) as file:
            self.check_unchanged()
            return {name: self._part(opening.file(self, file, number), name) for name in names}

    def _part(self, file: Any, name: str) -> Part:
        """Return what the file stores of a field. Only the first contiguous episode is described by itself."""
        filled = np.flatnonzero(np.diff(self.borders))
        episodes = [self.episodes[number] for number in filled.tolist()]
        parts: list[tuple[int, Part]] = []
        for start, episode in zip(self.borders[filled].tolist(), episodes, strict=True):
            own = self
            if episode.sums:
                own = copy(self)
                own.sums = episode.sums
            part, rest = episode.fields[name].part(replace(file, source=own)), episodes[1:]
            parts.append((start, part))
            if len(parts) == 1 and rest and part.kind is Rows and part.arrays[0].is_raw:
                offsets = np.array([each.offsets.get(name, -1) for each in rest])
                if (offsets >= 0).all():
                    datasets = [each.fields[name].dataset for each in rest]
                    lengths = np.diff(self.borders)[filled[1:]]
                    arrays = _contiguous(self.path, file.number, datasets, offsets, lengths, part.arrays[0])
                    parts.append((0, Part(Rows, (arrays,), starts=self.borders[filled[1:]])))
                    break
        return Part.joined(parts)


def _contiguous(
    path: Path, file: int, datasets: Sequence[str], offsets: np.ndarray, lengths: np.ndarray, first: Arrays
) -> Arrays:
    """Return the arrays of contiguous datasets of a file, whose rows are like those of the array ``first``."""
    zeros, count = np.zeros(len(datasets), np.int64), len(datasets)
    blocks = Blocks(np.full(count, file, np.int32), offsets, lengths * first.item_bytes, zeros.astype(np.uint32))
    origin = Origin(file, lambda block: f"{printable(path)}: {datasets[block]!r}", offsets)
    tables = np.arange(count), lengths[:, None], lengths[:, None], zeros
    return Arrays(first.item_bytes, *tables, blocks, (), (origin,), zeros[:1], first.inner)


class EpisodeFields(NamedTuple):
    """The fields to read of the episodes of a file, and the options for reading them.

    ``rows`` has the paths of fields with a row per time step, by name, and ``constants`` those of fields with one value
    per episode. ``attributes`` has, by name, the value of episodes that lack an attribute; None: raise an error.
    """

    rows: Mapping[str, Pattern]
    constants: Mapping[str, Pattern]
    attributes: Mapping[str, Any]
    decoder: FrameDecoder
    checksums: str
    decode: str


class OpenedEpisodes(NamedTuple):
    """The episodes of one file: sources of the fields of each length, and the values of each other field, by name.

    A path without ``*`` has one value, whatever the number of episodes in the file.
    """

    sources: list[H5Reader | EpisodeFile]
    values: dict[str, list[np.ndarray]]


def open_episodes(path: Path, wanted: EpisodeFields, trusted: bool) -> OpenedEpisodes:
    """Open what the ``*`` in the path of each field match in a file as episodes, or all rows if there is no ``*``.

    Fields whose first datasets have equal lengths have one source. Datasets without axes are constants. Raises
    FieldError if there is no episode, or if an episode lacks a field.
    """
    with opened(path) as file, ExitStack() as held:
        guard = Guard(path, trusted)
        how: dict[str, Any] = {"trusted": trusted, "checksums": wanted.checksums, "decode": wanted.decode, "file": file}
        patterns = {**wanted.rows, **wanted.constants}
        matches = {name: find_matches(file, guard, each) for name, each in patterns.items()}
        held.enter_context(fetched_objects(file, [match.path for each in matches.values() for match in each]))
        rows = {name: matches[name] for name in wanted.rows}
        rows = {name: own for name, own in rows.items() if not _has_no_axis(guard.find(file, own[0].path))}
        if not rows:
            raise OptionError("fields has no dataset with a row per time step: name one, such as the actions")
        episodes = _by_episode(path, rows)
        of_first = {name: FrameDataset(dataset, wanted.decoder) for name, dataset in episodes[0].items()}
        first = H5Reader(path, of_first, **how, are_alike=False)
        lengths = {name: field.grid.shape[0] for name, field in first.fields.items()}
        if max(lengths.values()) > 2 * min(lengths.values()) + 1:
            listed = ", ".join(f"{episodes[0][name]!r} has {length}" for name, length in [*lengths.items()][:8])
            raise FieldError(f"{printable(path)}: fields differ in length ({listed}): {ONE_RULE}")
        sources: list[H5Reader | EpisodeFile] = []
        main = next(iter(rows))
        for length in sorted({*lengths.values()}):
            names = [name for name in rows if lengths[name] == length]
            own: Any = first
            if len(names) < len(rows):
                own = H5Reader(path, {name: of_first[name] for name in names}, **how)
            if wanted.rows[main].stars:
                joined = [*_all_episodes(own, episodes, wanted.decoder, how)]
                own = EpisodeFile(own, joined, wanted.rows, [match.name for match in rows[main]])
            sources.append(own)
        texts = [match.texts for match in rows[main]]
        values = {
            name: _constants(file, guard, own, texts, wanted.decode)
            for name, own in matches.items()
            if name not in rows
        }
        depth = max([*wanted.rows[main].stars, -1]) + 1
        groups = ["/".join(episode[main].split("/")[:depth]) or "/" for episode in episodes]
        for name, default in wanted.attributes.items():
            values[name] = [attribute_of(guard.find(file, group), group, name, default, path) for group in groups]
    return OpenedEpisodes(sources, values)


def _all_episodes(
    first: H5Reader, episodes: Sequence[Mapping[str, str]], decoder: FrameDecoder, how: Mapping[str, Any]
) -> Iterator[Episode]:
    """Yield the episodes of a file, of which ``first`` reads some fields of the first one.

    ``how`` are arguments of `H5Reader`.
    """
    file = how["file"]
    yield Episode(first.fields, {}, first.sums)
    types = {name: file[field.dataset].id.get_type() for name, field in first.fields.items()}
    for episode in episodes[1:]:
        datasets = {name: episode[name] for name in first.fields}
        alike = _like_first(first, types, file, datasets)
        if alike is None:
            encoded = {name: FrameDataset(dataset, decoder) for name, dataset in datasets.items()}
            own = H5Reader(first.path, encoded, **how)
            alike = Episode(own.fields, {}, own.sums)
        yield alike


def _by_episode(file: Path, matches: Mapping[str, Sequence[Match]]) -> list[dict[str, str]]:
    """Return the datasets of each episode, by field. Raises FieldError if a field has other episodes than the first."""
    first, *others = matches
    expected = {match.texts for match in matches[first]}
    for name in others:
        if odd := expected ^ {match.texts for match in matches[name]}:
            raise FieldError(
                f"{printable(file)}: only some of the fields have the episode {printable('/'.join(min(odd)))!r}"
            )
    return [
        {name: match.path for name, match in zip(matches, own, strict=True)}
        for own in zip(*matches.values(), strict=True)
    ]


def _constants(
    file: h5py.File, guard: Guard, matches: Sequence[Match], episodes: Sequence[tuple[str, ...]], decode: str
) -> list[np.ndarray]:
    """Read the value of each episode. If the path has fewer ``*``, episodes whose first texts are equal share it."""
    paths = {match.texts: match.path for match in matches}
    num_texts = len(matches[0].texts)
    read: dict[str, np.ndarray] = {}
    found = []
    for texts in episodes:
        if (path := paths.get(texts[:num_texts])) is None:
            raise FieldError(f"{printable(guard.path)}: the episode {printable('/'.join(texts))!r} has no constant")
        if path not in read:
            read[path] = read_constant(file, guard, path, decode)
        found.append(read[path])
    return found


def _has_no_axis(item: h5py.Dataset | h5py.Group | None) -> bool:
    if not isinstance(item, h5py.Dataset) or item.id.get_create_plist().get_layout() == h5py.h5d.VIRTUAL:
        return False  # the shape of a view would open other files
    return item.shape == ()


def read_constant(file: h5py.File, guard: Guard, path: str, decode: str = "") -> np.ndarray:
    """Read a dataset of numbers or strings completely. Strings become bytes of fixed length.

    Raises FieldError if it does not exist, has another type, or has more than `MAX_CONSTANT_BYTES`.
    """
    where = f"{printable(guard.path)}: {path!r}"
    found = follow(h5py.h5g.open(file.id, b"/"), path)  # faster, but does not follow links
    item = h5py.Dataset(found) if isinstance(found, h5py.h5d.DatasetID) else guard.find(file, path)
    if not isinstance(item, h5py.Dataset):
        raise FieldError(f"{where} is not a dataset: name one with the values of an episode")
    guard.check_field(item, path)
    if item.shape is None or item.size * item.dtype.itemsize > MAX_CONSTANT_BYTES:
        size = "no values" if item.shape is None else f"the shape {item.shape}"
        raise FieldError(
            f"{where} has {size}, but a constant of an episode is kept in memory, with at most "
            f"{MAX_CONSTANT_BYTES >> 20} MiB: leave it out"
        )
    is_text = h5py.check_string_dtype(item.dtype) is not None
    with errors_as(FieldError, f"{where} cannot be read"):
        values = np.asarray(item[()])
    if decode and values.dtype.kind in "iuf" and (element := element_of(item, where, (), decode)).packing is not None:
        return read_elements(item, element).reshape(item.shape)
    if is_text and values.dtype.kind == "O":
        values = np.array([as_bytes(each) for each in values.ravel()], np.bytes_).reshape(values.shape)
    if values.dtype.kind not in "biufcS":
        raise FieldError(f"{where} {type_problem(item.id.get_type())}, or leave the field out")
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def as_bytes(text: bytes | str) -> bytes:
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(text)


def attribute_of(item: h5py.Group | h5py.Dataset | None, where: str, name: str, default: Any, file: Path) -> np.ndarray:
    """Read an attribute of an episode. ``default`` is the value if it is missing; None: raise FieldError."""
    assert item is not None
    if default is not None and not has_attribute(item.id, name, default):
        return np.array(default.encode() if isinstance(default, str) else default)
    return np.array(read_attribute(item.id, name, f"{printable(file)}: {printable(where)}", FieldError))


def _like_first(
    first: H5Reader, types: Mapping[str, Any], file: h5py.File, datasets: Mapping[str, str]
) -> Episode | None:
    """Return an episode that differs from the first one only in length.

    This takes a tenth of the time of a complete check. Returns None if the fields are not contiguous, or differ in
    anything but their length.
    """
    fields: dict[str, Field | RaggedField] = {}
    offsets: dict[str, int] = {}
    if first.decode or first.sums:  # each dataset may be packed in another way, and has its own checksums
        return None
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
        offsets[name] = item.get_offset()
        if offsets[name] + stored > file.id.get_filesize():
            return None
        fields[name] = replace(model, dataset=dataset, grid=replace(model.grid, shape=shape))
    return Episode(fields, offsets, {}) if len({field.grid.shape[0] for field in fields.values()}) == 1 else None


def open_frames(
    path: Paths | Mapping[str, Paths],
    fields: Mapping[str, str],
    decoder: FrameDecoder,
    trusted: bool,
    checksums: str,
    remote: RemoteOptions = NO_OPTIONS,
    *,
    tables: Mapping[str, Sequence[Table]],
    constants: Iterable[str] = (),
    attributes: Mapping[str, Any],
    decode: str = "",
) -> Episodes:
    """Open the frames of all episodes. JPEG and PNG images are decoded by ``decoder``.

    If the paths in ``fields`` have ``*``, each text that they match is an episode. Otherwise, ``tables`` has where
    episodes begin or end, by kind (see `find_borders`); if it is empty, each file is an episode. The fields that are
    named in ``constants``, and those without axes, have one value per episode. ``attributes`` of episodes are such
    fields, too; their values are those of episodes that lack them, or None. If ``path`` is a mapping of fields to
    files, only rows are read. Raises OptionError if a name has several ``*``, or if some paths have more of them than
    others.
    """
    check_path(path)
    if isinstance(path, Mapping):
        if constants or attributes or any("*" in each for each in fields.values()):
            raise OptionError(
                "path is a mapping of fields to files, which may neither have constants or attributes, nor groups for "
                "episodes (with a *): pass a path for all fields"
            )
        datasets = {name: FrameDataset(fields[name], decoder) for name in fields}
        joined = open_joined(path, datasets, trusted=trusted, checksums=checksums, remote=remote, decode=decode)
        borders, _ = find_borders(joined, tables, trusted)
        for each in fields if not tables else ():
            if not np.array_equal(joined.part_of(each).starts, joined.starts):
                raise FieldError(
                    f"{printable(joined.path)}: the files of {each!r} have other lengths than those of "
                    f"{joined.main.name!r}, but each file is an episode: pass episode_lengths or episode_ends"
                )
        numbers = [*map(str, range(len(borders) - 1))]
        return Episodes([joined], borders, numbers if tables else episode_names(joined), {})
    rows = parse("fields", {name: path for name, path in fields.items() if name not in constants})
    alone = {name: parse("fields", {name: fields[name]})[name] for name in fields if name in constants}
    wanted = EpisodeFields(rows, alone, attributes, decoder, checksums, decode)
    files = list_data_files(path, remote)
    with in_one_file(files, fields):
        of_files: list[OpenedEpisodes] = open_each(files, open_episodes, wanted, trusted=trusted)
    kinds = [[sorted(source.fields) for source in each.sources] for each in of_files]
    for file, kind in zip(files, kinds, strict=True):
        if kind != kinds[0]:
            raise FieldError(
                f"{printable(file)}: other fields have a last frame more than the others than in "
                f"{printable(files[0])}: {ONE_RULE}"
            )
    sources = [joined_files(own) for own in zip(*(each.sources for each in of_files), strict=True)]
    borders, in_files = find_borders(sources[0], tables, trusted)
    _check_lengths(sources, np.diff(in_files) if tables else 1)
    names = [*map(str, range(len(borders) - 1))] if tables else episode_names(sources[0])
    values: dict[str, list[np.ndarray]] = {}
    for file, of_file, count in zip(files, of_files, np.diff(in_files).tolist(), strict=True):
        for field, own in of_file.values.items():
            own = _of_episodes(own[0], count, f"{printable(file)}: {fields[field]!r}") if tables else own
            values.setdefault(field, []).extend(own)
    return Episodes(sources, borders, names, _joined(values, attributes, names))


def _of_episodes(value: np.ndarray, count: int, where: str) -> list[np.ndarray]:
    """Divide the value of a constant in a file among the episodes of the file."""
    if value.shape and len(value) != count:
        raise FieldError(
            f"{where} has {count_text(len(value), 'row')}, but there are {count_text(count, 'episode')}: a constant "
            "needs one row per episode, or no axes"
        )
    return list(value) if value.shape else [value] * count


def _check_lengths(sources: Sequence[Source], episodes: np.ndarray | int) -> None:
    """Raise FieldError unless the second source has one frame more than the first per episode, and is the last.

    Each match of ``*``, or else each file, has so many ``episodes``.
    """
    lengths = [np.diff(find_borders(source, {}, False)[0]) for source in sources]
    for extra, (source, own) in enumerate(zip(sources, lengths, strict=True)):
        odd = np.flatnonzero(own != lengths[0] + extra * episodes)
        if len(odd) or extra > 1:
            number = int(odd[0]) if len(odd) else 0
            listed = ", ".join(
                f"{each.main.name!r} has {int(of[number])}" for each, of in zip(sources, lengths, strict=True)
            )
            raise FieldError(
                f"{printable(source.path)}: fields differ in length in {printable(episode_names(source)[number])!r} "
                f"({listed}): {ONE_RULE}"
            )


def _joined(
    values: Mapping[str, Sequence[np.ndarray]], attributes: Mapping[str, Any], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the values of each constant, (num_episodes, ...). Raises FieldError if they differ in shape or type."""
    found = {}
    for name, own in values.items():
        if name in attributes:
            column = join_columns(name, [each.reshape(1) for each in own])
            found[name] = column.astype("S1") if column.dtype == "S0" else column
            continue
        for episode, each in zip(names, own, strict=True):
            if each.shape != own[0].shape or (
                each.dtype != own[0].dtype and {each.dtype.kind, own[0].dtype.kind} != {"S"}
            ):
                raise FieldError(
                    f"the constant {name!r} is {each.dtype} {list(each.shape)} in the episode {printable(episode)!r}, "
                    f"but {own[0].dtype} {list(own[0].shape)} in {printable(names[0])!r}: give it one shape and type"
                )
        found[name] = np.stack(own)
        if found[name].dtype == "S0":
            found[name] = found[name].astype("S1")
    return found


def episode_names(frames: Source) -> list[str]:
    """Return the name of each episode: the names in its path that have a ``*``, or else the name of its file."""
    return [
        name for each in frames.readers for name in (each.names if isinstance(each, EpisodeFile) else [each.path.name])
    ]


def find_borders(frames: Source, tables: Mapping[str, Sequence[Table]], trusted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row of each episode and finally the number of rows, (num_episodes + 1,) int64.

    Also return the first episode of each file, and finally the number of episodes: (num_files + 1,) int64. Without
    tables, each match of ``*`` is an episode, or else each file.

    ``tables`` has at most one kind of tables: "lengths" of episodes, "offsets" (their first rows), or "ends", which
    mark their last rows. An array has the values of all files.
    """
    found = [np.zeros(1, np.int64)]
    for start, reader in zip(frames.starts.tolist(), frames.readers, strict=False) if not tables else ():
        found.append(start + (reader.borders if isinstance(reader, EpisodeFile) else reader.starts)[1:])
    for kind, given in tables.items():
        whole = [each for each in given if not isinstance(each, str)]
        if whole and (kind != ENDS or len(whole[0]) != frames.num_samples):  # a table of the episodes of all files
            where = f"episode_{kind}"
            borders = np.append(0, _ends(kind, [(where, np.asarray(whole[0]))], frames.num_samples))
            if not np.isin(frames.starts, borders).all():
                raise OptionError(f"{where}: an episode would continue in another file: join the files, or the episode")
            in_files = np.searchsorted(borders, frames.starts)
            return borders, np.append(in_files[:-1], len(borders) - 1)
        source = next((frames.part_of(each) for each in given if isinstance(each, str)), frames)
        for reader, (start, stop) in zip(source.readers, pairwise(source.starts.tolist()), strict=True):
            values = [
                (f"{printable(reader.path)}: {each!r}", _read_table(reader, each, trusted))
                if isinstance(each, str)
                else (f"episode_{kind}", np.asarray(each)[start:stop])
                for each in given
            ]
            found.append(start + _ends(kind, values, stop - start))
    return np.concatenate(found), np.cumsum([0, *map(len, found[1:])])


def _read_table(reader: Source, dataset: str, trusted: bool) -> np.ndarray:
    table = open_reader(reader.path, {dataset: dataset}, trusted=trusted)
    return read_rows(table, dataset, np.arange(table.num_samples))


def _ends(kind: str, tables: Sequence[tuple[str, np.ndarray]], num_rows: int) -> np.ndarray:
    """Return the row after the last one of each episode: (num_episodes,) int64. ``tables`` are texts and values."""
    flags = [_flags(where, values, num_rows) for where, values in tables]
    if all(each is not None for each in flags) and (kind == ENDS or tables[0][1].dtype.kind == "b"):
        marks = [each for each in flags if each is not None]
        if kind == "offsets":  # the rows before each first row are last rows
            marks = [np.append(each[1:], 0) for each in marks]
        return ends_of_flags(marks, num_rows)
    where, numbers = tables[0]
    if len(tables) > 1:
        where = next(text for (text, _), each in zip(tables, flags, strict=True) if each is None)
        raise FieldError(f"{where} must have one boolean for each of {num_rows} rows, like the other datasets of ends")
    numbers = numbers.reshape(len(numbers)) if numbers.size == len(numbers) else numbers
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or len(numbers) > num_rows:
        content = {"lengths": "length", "offsets": "first row", ENDS: "end"}[kind]
        flags_too = ", or a boolean for each row, which is true in its last row" if kind == ENDS else ""
        raise FieldError(
            f"{where} must have one axis of at most {num_rows} integers, the {content} of each episode{flags_too}"
        )
    if kind == "lengths":
        if (numbers < 0).any():
            raise FieldError(f"{where} has the negative length {numbers.min()}: pass the lengths of episodes")
        if (total := sum(numbers.tolist())) != num_rows:
            raise FieldError(
                f"{where} add up to {total}, but the fields have {num_rows} rows: pass lengths of episodes"
            )
        return np.cumsum(numbers.astype(np.int64))
    borders = [*numbers.tolist(), num_rows] if kind == "offsets" else [0, *numbers.tolist()]
    if borders[0] != 0 or borders[-1] != num_rows or any(after < first for first, after in pairwise(borders)):
        rule = "ends of episodes must not be negative, not decrease, and end with"
        if kind == "offsets":
            rule = "first rows of episodes must start with 0, not decrease, and be at most"
        raise FieldError(f"{where}: the {rule} {num_rows}, the number of rows of the fields")
    return np.array(borders[1:], np.int64)


def _flags(where: str, values: np.ndarray, num_rows: int) -> np.ndarray | None:
    """Return values as (num_rows,) if they are booleans, or numbers that are all 0 or 1; None otherwise."""
    if values.dtype.kind not in "biuf" or len(values) != num_rows or values.size != num_rows:
        return None
    flat = values.reshape(num_rows)
    return flat if flat.dtype.kind == "b" or np.isin(flat, (0, 1)).all() else None
