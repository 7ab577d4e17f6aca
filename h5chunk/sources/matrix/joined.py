"""Read several matrices as one: their rows are concatenated, and their columns are matched by name.

Row fields that all files have are kept; their categories are matched by name. The field ``file`` has the name of the
file of each row.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import islice, pairwise
from typing import Any

import numpy as np

from h5chunk.errors import OptionError, SourceError, as_text, difference_text, printable
from h5chunk.source import OpenContext
from h5chunk.sources.kinds import JoinOptions
from h5chunk.sources.matrix.block import Block, MemoryLimit, SparseSource
from h5chunk.sources.recognise import is_path

SUFFIXES = (".h5ad", ".h5", ".npz")
FILE = "file"
MAX_NAMES = 1000


class JoinedSource(SparseSource):
    """A folder of .h5ad files, a pattern of matrix files, or a list of paths."""

    kind = "joined"
    Options = JoinOptions
    shape: tuple[int, int]

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        paths = _list_paths(source)
        return len(paths) > 0 and all(path.lower().endswith(SUFFIXES) for path in paths)

    @classmethod
    def open(cls, source: Any, options: JoinOptions, context: OpenContext) -> JoinedSource:
        from h5chunk.sources.open import choose_options, find_kind

        paths, sources = _list_paths(source), []
        for path in paths:
            kind = find_kind(path)
            if not issubclass(kind, SparseSource):
                raise SourceError(f"{printable(path)}: holds {kind.noun}, and only sparse matrices are joined")
            [inner] = choose_options(
                kind, path, {} if options.layer is None else {"layer": options.layer}, [kind.Options]
            )
            sources.append(kind.open(path, inner, context))
        if not sources:
            raise SourceError(f"{_shown(source)}: no files to join")
        return cls(_shown(source), sources, options.join, context)

    def __init__(self, path: str, sources: Sequence[SparseSource], join: str | None, context: OpenContext) -> None:
        self.path, self._sources, self.axes = path, sources, sources[0].axes
        self.num_bytes = sum(source.num_bytes for source in sources)
        rows = [_check_shape(source) for source in sources]
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
            self.categories[FILE] = [as_text(os.path.basename(source.path)) for source in sources]
        MemoryLimit(path, context.memory_bytes).check(
            f"names and fields of {len(sources)} files", 2 * sum(values.nbytes for values in self.row_fields.values())
        )

    def files(self) -> list[str]:
        return [path for source in self._sources for path in source.files()]

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

    def split(self, num_parts: int) -> list[JoinedSource]:
        """Return sources that each read some of the files."""
        parts, num_files = [], len(self._sources)
        cuts = np.unique(np.linspace(0, num_files, min(num_parts, num_files) + 1).astype(np.int64)).tolist()
        for first, last in pairwise(cuts):
            part = copy(self)
            part._sources, part._starts = self._sources[first:last], self._starts[first:last]
            part._numbers, part.num_bytes = self._numbers[first:last], sum(s.num_bytes for s in part._sources)
            parts.append(part)
        return parts

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


def _list_paths(source: Any) -> list[str]:
    """Return the files of a list of paths, a pattern, or a folder of .h5ad files; an empty list for other sources."""
    if isinstance(source, (list, tuple)):
        return [os.fsdecode(path) for path in source] if source and all(map(is_path, source)) else []
    if not is_path(source):
        return []
    path = os.fsdecode(source)
    if os.path.isdir(path):
        if not _has_cells(path):
            return []
        path = os.path.join(glob.escape(path), "*.h5ad")
    elif os.path.exists(path):
        return []
    return sorted(glob.glob(path)) if glob.has_magic(path) else []


def _has_cells(folder: str) -> bool:
    """Return whether one of the first `MAX_NAMES` files of a folder is an .h5ad; it may contain millions of images."""
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(".h5ad") for entry in islice(entries, MAX_NAMES))
    except OSError:
        return False


def _shown(source: Any) -> str:
    if is_path(source):
        return os.fsdecode(source)
    return f"{os.fsdecode(source[0])} and {len(source) - 1} more"


def _check_shape(source: SparseSource) -> int:
    """Return the number of rows of a source. Raises SourceError if its shape is unknown before it is read."""
    if source.has_ids or source.shape[0] is None or source.shape[1] is None:
        raise SourceError(
            f"{printable(source.path)}: cannot be joined, because the numbers of rows and columns of {source.kind} are "
            "unknown before all entries are read: convert this file by itself"
        )
    return source.shape[0]


def _join_columns(
    sources: Sequence[SparseSource], join: str | None
) -> tuple[list[np.ndarray | None], np.ndarray | None, int]:
    """Match the columns of all sources by name.

    Returns the new numbers of the columns of each source (-1 for a column that is left out; None if all are unchanged),
    and the names and the number of the joined columns.
    """
    first = sources[0]
    lists = [None if source.column_names is None else source.column_names.tolist() for source in sources]
    other = next(
        (i for i in range(1, len(lists)) if lists[i] != lists[0] or sources[i].shape[1] != first.shape[1]), None
    )
    if other is None:
        return [None] * len(sources), first.column_names, first.shape[1] or 0
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
