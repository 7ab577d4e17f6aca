"""Read several matrices as one.

Matrices of known sizes are stacked: their rows are concatenated, and their columns are matched by name. Row fields that
all files have are kept; their categories are matched by name. The field ``file`` has the name of the file of each row.
Lists of entries with ids, such as ratings, are read one after the other, and equal ids are the same row or column.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import OptionError, SourceError, as_text, difference_text, printable
from h5chunk.sample_source import OpenContext
from h5chunk.sources.foreign import format_of, way_for
from h5chunk.sources.kinds import JoinOptions
from h5chunk.sources.matrix.block import Block, MemoryLimit, SparseSource
from h5chunk.sources.recognise import has_suffix, is_path, read_head
from h5chunk.sources.splits import refuse_splits

TEXTS = (".csv", ".tsv", ".psv", ".dat", ".inter")  # a folder of only such files is read as one list of entries
FILE = "file"
MAX_NAMES = 1000


class SeveralFiles(SparseSource):
    """Base class of sources that read several files one after the other."""

    kind = "joined"
    Options = JoinOptions

    def __init__(self, path: str, sources: Sequence[SparseSource]) -> None:
        self.path, self._sources, self.axes = path, sources, sources[0].axes
        self.num_bytes = sum(source.num_bytes for source in sources)
        first = sources[0]
        for source in sources[1:]:
            if source.has_ids != first.has_ids:
                raise _mixed(source)
            if source.entry_types != first.entry_types:
                kinds, others = (
                    ", ".join(f"{part} {kind}" for part, kind in types.items())
                    for types in (source.entry_types, first.entry_types)
                )
                raise SourceError(
                    f"{printable(source.path)}: its entries have {kinds}, but those of {printable(first.path)} have "
                    f"{others}: {source.types_remedy}"
                )
        self.notes = list(dict.fromkeys(note for source in sources for note in source.notes))

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        return len(list_paths(source)) > 0

    @classmethod
    def open(cls, source: Any, options: JoinOptions, context: OpenContext) -> SeveralFiles:
        from h5chunk.sources.open import choose_options, find_kind

        format = None if context.format == cls.kind else context.format
        paths, sources = list_paths(source, any_folder=format is not None), []
        given = {name: value for name, value in options.non_defaults().items() if name != "join"}
        for path in paths:
            try:
                kind = find_kind(path, format)
            except SourceError:
                raise SourceError(_not_joined(source, path, "is not recognised as a matrix")) from None
            if not issubclass(kind, SparseSource) or issubclass(kind, SeveralFiles):
                raise SourceError(_not_joined(source, path, f"contains {kind.noun}"))
            [inner] = choose_options(kind, path, given, [kind.Options])
            sources.append(kind.open(path, inner, replace(context, format=None)))
        if not sources:
            raise SourceError(
                f"{_shown(source)}: there are no files to join: pass a list of paths, a folder of .h5ad files, or a "
                "pattern such as 'cells/*.h5ad'"
            )
        if not sources[0].has_ids:
            return JoinedSource(_shown(source), sources, paths, options.join, context)
        if options.join == "inner":
            raise OptionError(
                f"join is 'inner', but {printable(sources[0].path)} has ids, of which all are kept: pass outer, or "
                "leave join out"
            )
        if is_path(source) and os.path.isdir(source):
            refuse_splits(Path(source), list(map(Path, paths)))
        return JoinedEntries(_shown(source), sources)

    def files(self) -> list[str]:
        return [path for source in self._sources for path in source.files()]

    def split(self, num_parts: int) -> list[SeveralFiles]:
        """Return sources that each read some of the files."""
        num_files = len(self._sources)
        cuts = np.unique(np.linspace(0, num_files, min(num_parts, num_files) + 1).astype(np.int64)).tolist()
        return [self._take(slice(first, last)) for first, last in pairwise(cuts)]

    def _take(self, chosen: slice) -> SeveralFiles:
        part = copy(self)
        part._sources = self._sources[chosen]
        part.num_bytes = sum(source.num_bytes for source in part._sources)
        return part


class JoinedEntries(SeveralFiles):
    """Lists of entries with ids, such as a file of ratings per month."""

    shape = (None, None)
    has_ids = True

    def __init__(self, path: str, sources: Sequence[SparseSource]) -> None:
        super().__init__(path, sources)
        self.time_name, self.pair_option = sources[0].time_name, sources[0].pair_option

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        before = 0
        for source in self._sources:
            for block, done in source.blocks(max_bytes):
                values = np.ones(len(block), np.uint8) if block.values is None else block.values
                yield Block(block.rows, block.columns, values, block.times), before + done
            before += source.num_bytes


class JoinedSource(SeveralFiles):
    """Matrices whose numbers of rows are known, such as .h5ad files."""

    shape: tuple[int, int | None]

    def __init__(
        self,
        path: str,
        sources: Sequence[SparseSource],
        paths: Sequence[str],
        join: str | None,
        context: OpenContext,
    ) -> None:
        super().__init__(path, sources)
        rows = [_num_rows(source) for source in sources]
        self._starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._numbers, self.column_names, num_columns = _join_columns(sources, join)
        self.shape = int(self._starts[-1]), num_columns
        names = [source.row_names for source in sources if source.row_names is not None]
        self.row_names = np.concatenate(names) if len(names) == len(sources) else None
        self.ignored: dict[str, str] = {name: reason for source in sources for name, reason in source.ignored.items()}
        self.row_fields: dict[str, np.ndarray] = {}
        self.categories: dict[str, list[str]] = {}
        for name in dict.fromkeys(name for source in sources for name in source.row_fields):
            self._join_field(name)
        if FILE not in self.row_fields:
            self.row_fields[FILE] = np.repeat(np.arange(len(sources)), rows)
            self.categories[FILE] = _distinct_names(paths)
        MemoryLimit(path, context.memory_bytes).check(
            f"names and fields of {len(sources)} files", 2 * sum(values.nbytes for values in self.row_fields.values())
        )

    def _join_field(self, name: str) -> None:
        """Concatenate a row field of all files, or add it to ``ignored`` with the reason."""
        columns = [source.row_fields.get(name) for source in self._sources]
        parts = [values for values in columns if values is not None]
        if len(parts) < len(columns):
            self.ignored[name] = f"is in only {len(parts)} of {len(columns)} files"
            return
        coded = [name in source.categories for source in self._sources]
        if any(coded) != all(coded) or len({values.dtype.kind for values in parts}) > 1:
            self.ignored[name] = "does not have the same type in all files"
            return
        if all(coded):
            lists = [source.categories[name] for source in self._sources]
            self.categories[name] = union = list(dict.fromkeys(word for words in lists for word in words))
            number = {word: code for code, word in enumerate(union)}
            new_codes = [np.array([*(number[word] for word in words), -1], np.int64) for words in lists]
            parts = [new[codes] for new, codes in zip(new_codes, parts, strict=True)]  # code -1 takes the last
        self.row_fields[name] = np.concatenate(parts)

    def _take(self, chosen: slice) -> SeveralFiles:
        part = super()._take(chosen)
        assert isinstance(part, JoinedSource)
        part._starts, part._numbers = self._starts[chosen], self._numbers[chosen]
        return part

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        before = 0
        for source, start, numbers in zip(self._sources, self._starts.tolist(), self._numbers, strict=False):
            for block, done in source.blocks(max_bytes):
                rows, columns = block.rows + start, block.columns
                values = np.ones(len(block), np.uint8) if block.values is None else block.values
                if numbers is not None:
                    columns = numbers[columns]
                    keep = columns >= 0
                    rows, columns, values = rows[keep], columns[keep], values[keep]
                yield Block(rows, columns, values), before + done
            before += source.num_bytes


def list_paths(source: Any, any_folder: bool = False) -> list[str]:
    """Return the files of a list of paths, of a pattern, or of a folder; an empty list for other sources.

    Only folders that contain matrices are listed, or all with ``any_folder``.
    """
    if isinstance(source, (list, tuple)):
        return [os.fsdecode(path) for path in source] if source and all(map(is_path, source)) else []
    if not is_path(source):
        return []
    path = os.fsdecode(source)
    if os.path.isdir(path):
        return _listed(path) if any_folder else _matrices_in(path)
    return sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else []


def _matrices_in(folder: str) -> list[str]:
    """Return the files to join in a folder: .h5ad, else .mtx, else folders with matrix.mtx, else text with entries.

    Only its first `MAX_NAMES` names are read to decide this, because it may contain millions of images.
    """
    from h5chunk.sources.matrix.delimited import DelimitedSource

    try:
        with os.scandir(folder) as entries:
            first = [entry for entry in islice(entries, MAX_NAMES) if not entry.name.startswith((".", "_"))]
        for suffixes in ((".h5ad",), (".mtx", ".mtx.gz")):
            if any(entry.name.endswith(suffixes) for entry in first):
                return [path for path in _listed(folder) if path.endswith(suffixes)]
        if first and all(_has_matrix(entry.path) for entry in first):
            return [path for path in _listed(folder) if _has_matrix(path)]
        if first and all(has_suffix(entry.path, *TEXTS) for entry in first):
            paths = _listed(folder)
            if DelimitedSource.recognises(paths[0], read_head(paths[0])):
                return paths
    except (OSError, ImportError):  # the kind that opens the folder, or reads text, reports this
        pass
    return []


def _listed(folder: str) -> list[str]:
    names = sorted(name for name in os.listdir(folder) if not name.startswith((".", "_")))
    return [os.path.join(folder, name) for name in names]


def _has_matrix(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("matrix.mtx", "matrix.mtx.gz"))


def _shown(source: Any) -> str:
    if is_path(source):
        return os.fsdecode(source)
    return " and ".join([os.fsdecode(source[0]), *([f"{len(source) - 1} more"] if len(source) > 1 else [])])


def _not_joined(source: Any, path: str, problem: str) -> str:
    """Return the message for a path in a list, pattern or folder that is no sparse matrix."""
    if not is_path(source) and not os.path.exists(path):
        problem = "no such file or folder"
    ways = "convert it by itself; for several images or tables, pass the folder that contains them"
    if format_of(path) is not None:
        ways = way_for([path])
    if not is_path(source):
        ways += ", and for strings that are samples, a list of dicts, such as [{'text': 'a string'}]"
    return f"{printable(path)}: {problem}, but only files of one sparse matrix can be listed: {ways}"


def _distinct_names(paths: Sequence[str]) -> list[str]:
    """Return the names of files; with their folders if the names alone are not distinct."""
    names = [os.path.basename(os.path.normpath(path)) for path in paths]
    if len(set(names)) < len(names):
        whole = [os.path.abspath(path) for path in paths]
        root = os.path.commonpath(whole)
        names = [os.path.relpath(path, root) for path in whole]
    return [as_text(name) for name in names]


def _num_rows(source: SparseSource) -> int:
    """Return the number of rows of a source. Raises SourceError if it is unknown before all entries are read."""
    if source.shape[0] is None:
        raise _mixed(source)
    return source.shape[0]


def _mixed(source: SparseSource) -> SourceError:
    return SourceError(
        f"{printable(source.path)}: has {'ids' if source.has_ids else 'numbered rows and columns'}, other than the "
        "files with which it is listed, so that they cannot be read as one matrix: convert it by itself"
    )


def _join_columns(
    sources: Sequence[SparseSource], join: str | None
) -> tuple[list[np.ndarray | None], np.ndarray | None, int | None]:
    """Match the columns of all sources by name.

    Returns the new numbers of the columns of each source (-1 for a column that is left out; None if all are unchanged),
    and the names and the number of the joined columns; the number is None if it is unknown before all are read.
    """
    first = sources[0]
    lists = [None if source.column_names is None else source.column_names.tolist() for source in sources]
    other = next(
        (i for i in range(1, len(lists)) if lists[i] != lists[0] or sources[i].shape[1] != first.shape[1]), None
    )
    if other is None:
        return [None] * len(sources), first.column_names, first.shape[1]
    where, reference = printable(sources[other].path), printable(first.path)
    named = [names for names in lists if names is not None]
    if len(named) < len(lists):
        raise SourceError(
            f"{where}: cannot be joined with {reference}: not all files name their columns, so that "
            "these cannot be matched"
        )
    if join is None:
        difference = difference_text(named[other], named[0], where, reference)
        raise OptionError(
            f"{where}: its columns differ from those of {reference}: {difference}: pass --join inner to keep the "
            "columns that all files have, or --join outer to keep all, with zeros where a file lacks them"
        )
    for source, names in zip(sources, named, strict=True):
        [(twice, count)] = Counter(names).most_common(1)
        if count > 1:
            raise SourceError(f"{printable(source.path)}: has two columns {as_text(twice)!r}: make their names unique")
    union = dict.fromkeys(name for names in named for name in names)
    if join == "inner":
        common = set.intersection(*map(set, named))
        union = {name: None for name in union if name in common}
    if not union:
        raise SourceError(f"{where}: shares no column with the other files")
    number: Mapping[bytes, int] = {name: i for i, name in enumerate(union)}
    numbers = [np.array([number.get(name, -1) for name in names], np.int64) for names in named]
    return [*numbers], np.array(list(union), "S"), len(union)
