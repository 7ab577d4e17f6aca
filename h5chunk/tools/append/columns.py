"""A sparse source whose columns are numbered as those of a file are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.sources.sparse.block import Block, SparseSource
from h5chunk.store.write.appended import OldFile

REMEDY = "--drop-columns (drop_columns=True) leaves them out, or convert all sources together"


class MappedSource:
    """A source, with entries in columns that a file does not have left out. See `SparseSource`.

    Where rows have ids, so have columns: their numbers in the file.

    Parameters
    ----------
    source : SparseSource
    old : OldFile
    num_columns : int
        Of the file.
    drop_columns : bool

    Attributes
    ----------
    num_dropped : int
        Entries that were left out.

    Raises
    ------
    SourceError
        Columns cannot be found by what the file says of its own.
    """

    def __init__(self, source: SparseSource, old: OldFile, num_columns: int, *, drop_columns: bool) -> None:
        self._source, self._old, self._drop = source, old, drop_columns
        self.path, self.kind, self.num_bytes = source.path, source.kind, source.num_bytes
        self.has_ids, self.is_sorted_by_row = source.has_ids, source.is_sorted_by_row
        self.row_names = source.row_names
        self.column_names: np.ndarray | None = None
        self._num_columns = num_columns
        self._ids = old.table("column_ids")
        self._numbers: np.ndarray | None = None  # of the file's columns, by those of the source
        self.num_dropped = 0
        self._refresh()
        self._unknown: dict[object, None] = {}  # in the order that they came in
        if source.has_ids:
            self._check_ids()
        elif self._ids is not None:
            self._numbers = self._by_name(self._ids)
        else:
            self._numbers = self._by_number()

    def _refresh(self) -> None:
        """Take over what a source may know only after it was read."""
        self.shape: tuple[int | None, int | None]
        self.shape = self._source.shape[0], None if self.has_ids else self._num_columns
        self.row_fields = self._source.row_fields
        self.categories = self._source.categories

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        """The entries in columns of the file."""
        self.num_dropped = 0
        for block, done in self._source.blocks(max_bytes):
            columns = self._by_id(block.columns) if self.has_ids else self._by_table(block.columns)
            known = columns >= 0
            if known.all():
                yield Block(block.rows, columns, block.values), done
                continue
            self._note(np.unique(block.columns[~known]))
            self.num_dropped += len(known) - int(known.sum())
            values = None if block.values is None else block.values[known]
            yield Block(block.rows[known], columns[known], values), done
        self._refresh()

    def check_known(self) -> None:
        """Raise SourceError if there were columns that the file does not have, and they shall not be dropped."""
        if self._unknown and not self._drop:
            raise self._error(list(self._unknown))

    def _error(self, unknown: list[object]) -> SourceError:
        return SourceError(
            f"{printable(self.path)}: has entries in column {_text(unknown[0])}, which {self._old.shown} does not have "
            f"({len(unknown)} such): {REMEDY}"
        )

    def _note(self, unknown: np.ndarray) -> None:
        names = self._source.column_names
        named = not self.has_ids and self._ids is not None and names is not None
        self._unknown.update(dict.fromkeys((names[unknown] if named and names is not None else unknown).tolist()))

    # By ids, as they come

    def _check_ids(self) -> None:
        if self._ids is None:
            raise SourceError(
                f"{printable(self.path)}: its columns have ids, but those of {self._old.shown} are numbered: give a "
                "source like the first one"
            )
        self._order = np.argsort(self._ids, kind="stable")
        self._sorted = self._ids[self._order]
        if (self._sorted[1:] == self._sorted[:-1]).any():
            raise SourceError(f"{self._old.shown}: two of its columns have one name: which is meant cannot be told")

    def _by_id(self, ids: np.ndarray) -> np.ndarray:
        """The columns of the file: (n,) int64; -1 for those that it does not have."""
        if ids.dtype.kind != self._sorted.dtype.kind:
            kinds = {"S": "strings"}
            here, there = (kinds.get(each.dtype.kind, "whole numbers") for each in (ids, self._sorted))
            raise SourceError(
                f"{printable(self.path)}: the ids of its columns are {here}, but those in {self._old.shown} are {there}"
            )
        places = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
        return np.where(self._sorted[places] == ids, self._order[places], -1)

    # By a table of all columns of the source

    def _by_table(self, columns: np.ndarray) -> np.ndarray:
        assert self._numbers is not None
        if not len(columns) or int(columns.max()) < len(self._numbers):
            return self._numbers[columns]
        inside = columns < len(self._numbers)
        return np.where(inside, self._numbers[np.where(inside, columns, 0)], -1)

    def _by_name(self, ids: np.ndarray) -> np.ndarray:
        """Of columns that the source knows all names of."""
        names = self._source.column_names
        if names is None or names.dtype.kind != ids.dtype.kind:
            raise SourceError(
                f"{printable(self.path)}: its columns have no names, but those of {self._old.shown} have, such as "
                f"{_text(ids[0])}: give a source like the first one"
            )
        if len(names) == len(ids) and (names == ids).all():
            return np.arange(len(ids))
        self._check_ids()
        order = np.sort(names)
        if (order[1:] == order[:-1]).any():
            raise SourceError(f"{printable(self.path)}: two of its columns have one name, and others than the file")
        return self._by_id(names)

    def _by_number(self) -> np.ndarray:
        """Of columns that are numbers in the source and in the file."""
        kept = self._old.table("column_index")
        numbers = np.arange(self._num_columns)
        if kept is not None:
            numbers = np.full(int(kept.max()) + 1, -1)
            numbers[kept] = np.arange(len(kept))
        columns = self._source.shape[1]
        wrong = columns is not None and (columns < len(numbers) or (kept is None and columns > len(numbers)))
        if wrong and not (self._drop and columns is not None and columns > len(numbers)):
            raise SourceError(
                f"{printable(self.path)}: has {columns} columns, but {self._old.shown} {len(numbers)}: columns without "
                f"ids must be the same; {REMEDY if columns is not None and columns > len(numbers) else 'add the rest'}"
            )
        return numbers


def _text(value: object) -> str:
    return repr(value.decode("utf-8", "backslashreplace")) if isinstance(value, bytes) else str(value)
