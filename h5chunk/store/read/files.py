"""List the files that a path names, and open one file, or several files such as shards as one data set.

A shard is called ``NAME-00003-of-00012.h5``, so that its name contains the number of shards in the set.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import FieldError, FileError, OptionError, names_text, printable
from h5chunk.paths import check_path, expanded
from h5chunk.remote.mirror import NO_OPTIONS, RemoteOptions, list_url, open_urls
from h5chunk.store.hdf5.child import try_files
from h5chunk.store.hdf5.lookalike import describe_lookalike
from h5chunk.store.hdf5.patterns import natural
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.field_readers import field_readers, read_rows
from h5chunk.store.read.fields import SAMPLE_NUMBER, Stored
from h5chunk.store.read.fileset import joined_files, set_name
from h5chunk.store.read.joined import DROP, Joined, check_positions, rows_by_key
from h5chunk.store.read.ragged import RaggedField
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.read.source import Source
from h5chunk.store.read.tables import ROW_IDS, SOURCE_NAMES, decoded, values_of_samples
from h5chunk.urls import PATTERN, is_cut_url, is_url, parse

OnePath = str | os.PathLike[str]
Paths = OnePath | Sequence[OnePath]

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".h5ad", ".nc", ".nc4", ".nwb")  # suffixes of the files to read in a folder
MAPPING = "h5chunk.ChunkDataset({'x': 'FILE.h5', 'y': 'OTHER.h5'})"  # for messages
NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.h5")


def open_reader(
    path: Paths,
    fields: Stored | None = None,
    *,
    trusted: bool = False,
    checksums: str = OFF,
    decode: str = "",
    remote: RemoteOptions = NO_OPTIONS,
) -> Source:
    """Open one file, or several files as one data set.

    ``path`` is a file, a folder, a pattern such as ``shards/*.h5``, a URL of one of these, or a list of them. The files
    of a folder or pattern are sorted by name, with ``a2`` before ``a10``. A folder of shards must have all shards of
    the set. To read only some of them, use a pattern or a list. ``decode`` is how packed numbers are converted.

    Raises FileError if there is no file, a file cannot be opened, or a shard is missing. Raises FieldError if fields
    differ between files. Raises OptionError if a file is repeated, or lacks the checksums that are to be verified.
    """
    files = list_data_files(path, remote)
    name = Path(path) if isinstance(path, (str, os.PathLike)) else set_name(files)
    return _open(files, fields, name, trusted, checksums, decode)


def open_joined(
    paths: Mapping[str, Paths],
    fields: Stored | None = None,
    *,
    key: str | Mapping[str, str] | None = None,
    missing: str = DROP,
    **options: Any,
) -> Source:
    """Open fields that are in several files, or sets of files, as one data set.

    ``paths`` has the path of each field, as `open_reader` takes it. ``fields`` and ``options`` are also those of
    `open_reader`. Without a ``key``, row i of each file belongs to sample i. Otherwise samples are joined by the values
    of a dataset with this name, or of a table such as ``row_ids``, or by the numbers of rows, ``sample_number``; a
    mapping has the key of each file, by one of its fields.

    Raises OptionError or FieldError if the files do not fit.
    """
    fields = {name: name for name in paths} if fields is None else fields
    if not fields:
        raise OptionError(f"path is {{}}: name the file of each field, as in {MAPPING}")
    for name in fields:
        if name not in paths:
            raise OptionError(f"path has no file for the field {name!r}: add it, as in {{{name!r}: 'FILE.h5'}}")
    groups: dict[Any, dict[str, Any]] = {}  # the fields of each path
    for name, dataset in fields.items():
        path: Any = paths[name]
        path = str(path) if isinstance(path, os.PathLike) else tuple(path) if isinstance(path, list) else path
        groups.setdefault(path, {})[name] = dataset
    parts = []
    for path, own in groups.items():
        try:
            parts.append(open_reader(path, own, **options))
        except FieldError as error:
            name = next(iter(own))
            if own[name] != name or "has no dataset" not in str(error):
                raise
            remedy = f"if the field {name!r} has another name there, pass fields={{{name!r}: 'DATASET', ...}}"
            raise FieldError(f"{error}; {remedy}") from None
    if len(parts) == 1:
        return parts[0]
    rows: list[Any] = [None] * len(parts)
    if key is None:
        check_positions(parts)
    else:
        named = [_key_of(key, part, [*own]) for part, own in zip(parts, groups.values(), strict=True)]
        rows = rows_by_key(parts, [_read_key(part, own) for part, own in zip(parts, named, strict=True)], missing)
    found = [own for part in parts for own in part.fields]
    ordered = [own for name in fields for own in found if own == name or own.startswith(f"{name}/")]
    return Joined(parts, rows, list(dict.fromkeys(ordered)))


def _key_of(key: str | Mapping[str, str], part: Source, names: Sequence[str]) -> str:
    found = [key[name] for name in names if name in key] if isinstance(key, Mapping) else [key]
    if not found or not all(isinstance(each, str) for each in found):
        raise OptionError(
            f"key is {key!r}: pass the name of a dataset that all files have, or that in the file of each field, as in "
            f"key={{{names[0]!r}: 'id'}}"
        )
    if len({*found}) > 1:
        raise OptionError(f"key has {names_text(sorted({*found}))} for the fields of {printable(part.path)}: name one")
    return found[0]


def _read_key(part: Source, name: str) -> np.ndarray:
    """Read the values of a dataset or table that say which sample is which: (n,), numbers or text."""
    if name == SAMPLE_NUMBER:
        return np.arange(part.num_samples)
    if name in (SOURCE_NAMES, ROW_IDS):
        return np.concatenate([values_of_samples(file, name) for file in part.readers])
    try:
        stored = reopen_with_fields(part, {name: name})
    except FieldError as error:
        remedy = "if the files' keys differ in name, pass that of each field: key={'x': 'source_names', 'y': 'id'}"
        raise FieldError(f"{error}; {remedy}") from None
    field = stored.fields[name]
    if isinstance(field, RaggedField) or field.sample_shape:
        raise FieldError(f"{printable(part.path)}: the key {name!r} needs one value per sample: name another dataset")
    if stored.num_samples != part.num_samples:
        raise FieldError(
            f"{printable(part.path)}: the key {name!r} has {stored.num_samples} values for {part.num_samples} samples: "
            "name another dataset"
        )
    return decoded(read_rows(stored, name, np.arange(stored.num_samples)))


def reopen_with_fields(reader: Source, fields: Mapping[str, str]) -> Source:
    """Open other fields of the same file or files. Raises FieldError if these have no rows for the samples."""
    for name in fields:
        reader.check_rows(name)
        reader = reader.part_of(name)
    how = reader.trusted, reader.checksums, reader.readers[0].decode
    return _open([single.path for single in reader.readers], fields, reader.path, *how)


def _open(files: list[Path], fields: Stored | None, name: Path, trusted: bool, checksums: str, decode: str) -> Source:
    with in_one_file(files, fields):
        readers = open_each(files, _open_file, fields, checksums, decode, trusted=trusted)
    if reason := readers[0].why_no_labels:
        warnings.warn(f"{reason}; batches have no labels", stacklevel=4)
    return joined_files(readers, name)


def _open_file(path: Path, fields: Stored | None, checksums: str, decode: str, trusted: bool) -> H5Reader:
    return H5Reader(path, fields, trusted=trusted, checksums=checksums, decode=decode)


def open_each(files: Sequence[Path], open_file: Callable[..., Any], *how: Any, trusted: bool) -> list[Any]:
    """Return ``open_file(path, *how, trusted)`` for each file: a source, or an object that has ``sources``.

    Untrusted files are first opened in a child process, with all metadata for reading, because they may crash HDF5.
    """
    tried = {} if trusted else try_files(files, _tried, open_file, (*how, trusted), purpose=(open_file, repr(how)))
    return [tried.get(file) or open_file(file, *how, trusted) for file in files]


def _tried(path: Path, open_file: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    opened = open_file(path, *arguments)
    for source in [opened] if isinstance(opened, Source) else opened.sources:
        check_metadata(source)
    return opened


def check_metadata(source: Source) -> None:
    """Read all metadata that is needed to read samples, but no samples. Raises FileError if it is damaged."""
    assert source.fingerprint is not None
    field_readers(source)


@contextmanager
def in_one_file(files: Sequence[Path], fields: Stored | None) -> Iterator[None]:
    """Add a remedy to the error for a dataset that a file lacks, if it may be in another file."""
    try:
        yield
    except FieldError as error:
        if len(files) == 1 or fields is None or "has no dataset" not in str(error):
            raise
        remedy = f"if each file has other fields of the same samples, pass the file of each field: {MAPPING}"
        raise FieldError(f"{error}; {remedy}") from None


def list_files(path: Paths, remote: RemoteOptions = NO_OPTIONS, *, complete: bool = False) -> list[Path]:
    """List the files that a path, pattern or list names, as `open_reader` describes.

    For remote objects, returns the paths of their local copies. Raises FileError if there is no file or, with
    ``complete``, if a folder lacks a shard.
    """
    check_path(path)
    path = expanded(path)
    if not isinstance(path, (str, os.PathLike)):
        if isinstance(path, Mapping):
            raise OptionError(
                "path is a mapping of fields to files, which only h5chunk.ChunkDataset and Windows take: pass a path, "
                "a pattern, or a list of them"
            )
        if not isinstance(path, Iterable):
            raise OptionError(f"path is {path!r}: pass a path, a pattern, or a list of them")
        paths = list(path)
        if not paths:
            raise OptionError("path is an empty list: name at least one file")
        return [file for item in paths for file in list_files(item, remote, complete=complete)]
    if not str(path) or "\0" in str(path):
        raise OptionError(f"path is {str(path)!r}: pass a path, a pattern, or a list of them")
    if is_cut_url(path):
        raise OptionError(f"path is {str(path)!r}: pass a URL as text, because Path removes one of its slashes")
    if isinstance(path, str) and is_url(path):
        urls = _urls(path, remote)
        if complete and urls != [path] and not re.search(PATTERN, path):
            _check_shards(path, [parse(url)[1] for url in urls])
        return open_urls(path, urls, remote)
    try:
        files = _list_files(Path(path))
        if complete and Path(path).is_dir():
            _check_shards(path, [file.name for file in files])
        return files
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"{printable(path)}: cannot be opened: {error.strerror}") from error


def list_data_files(path: Paths, remote: RemoteOptions = NO_OPTIONS) -> list[Path]:
    """List complete files as `list_files` does, such that they are found after the current folder was changed."""
    return [Path(os.path.abspath(file)) for file in list_files(path, remote, complete=True)]


def single_file(path: Paths) -> Path | None:
    """Return the file that a path names, or the local copy of the remote object that it names.

    Returns None if there may be several files.
    """
    path = expanded(path)
    if not isinstance(path, (str, os.PathLike)):
        return None
    if is_url(path):
        return list_files(path)[0] if _urls(str(path), NO_OPTIONS) == [path] else None
    return Path(path) if Path(path).is_file() or list_files(path) == [Path(path)] else None


def _check_shards(folder: OnePath, names: Sequence[str]) -> None:
    """Raise FileError if a folder with these files lacks shards of a set, or has several sets with the same name."""
    remedy = "restore all shards, or name the files to read with a pattern or a list"
    missing = list(missing_shards(names))
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise FileError(f"{printable(folder)}: shard {printable(missing[0])}{more} missing: {remedy}")
    if wrong := next(wrong_counts(names), None):
        raise FileError(f"{printable(folder)}: {wrong}")


def _list_files(path: Path) -> list[Path]:
    if path.is_dir():
        found = [file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]
        if not found:
            if what := describe_lookalike(path):
                raise FileError(f"{printable(path)}: {what}")
            raise FileError(
                f"{printable(path)}: no file in this folder ends in {', '.join(SUFFIXES)}: name a file or a pattern, "
                "or run h5chunk convert if these are images"
            )
        return sorted(found, key=natural)
    if path.exists() or not re.search(PATTERN, str(path)):
        return [path]  # if it does not exist, opening it raises the error
    plain = next(number for number, part in enumerate(path.parts) if re.search(PATTERN, part))
    root, pattern = Path(*path.parts[:plain]), str(Path(*path.parts[plain:]))
    matching = [file for file in root.glob(pattern) if file.is_file() and not file.name.startswith(".")]
    if not matching:
        raise FileError(f"{printable(path)}: no file matches this pattern: check its folder and its wildcards")
    return sorted(matching, key=natural)


def _urls(url: str, remote: RemoteOptions) -> list[str]:
    """List the objects that a URL names: one object, those in a folder, or those whose names match a pattern."""
    folder, name = parse(url)
    on_server = url.startswith("http")
    is_pattern = "*" in name if on_server else re.search(PATTERN, name) is not None
    if not is_pattern and name.lower().endswith((*SUFFIXES, ".mat") if on_server else SUFFIXES):
        return [url]
    if not is_pattern and name:
        folder, name = f"{url}/", ""
    if on_server:
        raise OptionError(f"{printable(url)}: web servers do not list folders: pass a list of URLs that end in .h5")
    found = [
        f"{folder}{each}"
        for each in list_url(folder, remote)
        if each.lower().endswith(SUFFIXES) and not each.startswith(".") and (not name or fnmatchcase(each, name))
    ]
    if not found:
        suffixes = ", ".join(SUFFIXES)
        problem = "no object matches this pattern" if is_pattern else f"no object in this folder ends in {suffixes}"
        raise FileError(f"{printable(url)}: {problem}: check the URL")
    return sorted(found, key=natural)


def shard_name(name: str, number: int, count: int) -> str:
    """Return the file name of shard ``number`` out of ``count``.

    >>> shard_name("photos", 3, 12)
    'photos-00003-of-00012.h5'
    """
    return f"{name}-{number:05}-of-{count:05}.h5"


def missing_shards(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of missing shards. ``names`` are the names of all files.

    >>> list(missing_shards(["a-00001-of-00002.h5", "other.h5"]))
    ['a-00000-of-00002.h5']
    """
    for (name, count), existing in sorted(shard_numbers(names).items()):
        yield from (shard_name(name, number, count) for number in range(count) if number not in existing)


def wrong_counts(names: Iterable[str]) -> Iterator[str]:
    """Yield a message for each name that several sets of shards share, and for each shard number that is too high."""
    sets = shard_numbers(names)
    for name in sorted({name for name, _ in sets}):
        counts = sorted(count for other, count in sets if other == name)
        if len(counts) > 1:
            yield f"there are sets of {' and '.join(map(str, counts))} shards named {printable(name)!r}: keep one set"
    for (name, count), existing in sorted(sets.items()):
        for number in sorted(number for number in existing if number >= count):
            yield f"{printable(shard_name(name, number, count))} has an invalid number for a set of {count}: rename it"


def shard_numbers(names: Iterable[str]) -> dict[tuple[str, int], set[int]]:
    """Return the numbers of the existing shards, by the name of their set and its number of shards.

    >>> shard_numbers(["a-00001-of-00003.h5", "other.h5"])
    {('a', 3): {1}}
    """
    found: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := NUMBERED.fullmatch(name):
            found.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    return found
