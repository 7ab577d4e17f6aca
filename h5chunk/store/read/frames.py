"""Open the frames of all episodes as one reader. An episode is a group, a file, or a range of rows of a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import FieldError, OptionError, count_text, printable, shown
from h5chunk.paths import check_path
from h5chunk.plan.episodes import ends_of_flags
from h5chunk.remote.mirror import NO_OPTIONS, RemoteOptions
from h5chunk.store.hdf5.attributes import join_columns
from h5chunk.store.hdf5.child import try_files
from h5chunk.store.hdf5.patterns import parse
from h5chunk.store.read.encoded import FrameDataset, FrameDecoder
from h5chunk.store.read.episodes import (
    ONE_RULE,
    EpisodeFields,
    EpisodeFile,
    open_episodes,
)
from h5chunk.store.read.field_readers import read_rows
from h5chunk.store.read.files import Paths, in_one_file, list_data_files, open_joined, open_reader
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.source import Source
from h5chunk.store.read.windows import Episodes

Table = str | np.ndarray  # a dataset in each file, or its values for all files
ENDS = "ends"


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
    how = {"trusted": trusted, "checksums": checksums, "decode": decode}
    wanted = EpisodeFields(rows, alone, attributes, decoder, how)
    files = list_data_files(path, remote)
    with in_one_file(files, fields):
        tried = {} if trusted else try_files(files, open_episodes, wanted, purpose=repr(wanted))
        of_files = [tried.get(file) or open_episodes(file, wanted) for file in files]
    kinds = [[sorted(source.fields) for source in each.sources] for each in of_files]
    for file, own in zip(files, kinds, strict=True):
        if own != kinds[0]:
            raise FieldError(
                f"{printable(file)}: other fields have a last frame more than the others than in "
                f"{printable(files[0])}: {ONE_RULE}"
            )
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    name = Path(f"{shown(files[0])}{more}")
    sources: list[Source] = [
        own[0] if len(own) == 1 else FileSet(own, name)
        for own in zip(*(each.sources for each in of_files), strict=True)
    ]
    borders, in_files = find_borders(sources[0], tables, trusted)
    _check_lengths(sources, np.diff(in_files) if tables else 1)
    names = [*map(str, range(len(borders) - 1))] if tables else episode_names(sources[0])
    values: dict[str, list[np.ndarray]] = {}
    for file, opened, count in zip(files, of_files, np.diff(in_files).tolist(), strict=True):
        for field, found in opened.values.items():
            values.setdefault(field, []).extend(
                _of_episodes(found[0], count, f"{printable(file)}: {fields[field]!r}") if tables else found
            )
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
