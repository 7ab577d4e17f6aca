"""Map the row and column ids of a source to indices. Ids in an older converted file can keep their indices."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from h5chunk.errors import FileError, OptionError, printable
from h5chunk.sources.arrow import index_values
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.store.read.files import open_reader
from h5chunk.store.read.tables import COLUMN_IDS, ROW_IDS, read_table

TABLE_START = 1 << 16
NUMBERS_BYTES, ID_COPIES = 24, 4  # per id: bytes of its index in several orders, and number of its copies


class OldIds(NamedTuple):
    """The ids of an older converted file, in the order of their indices; None for an axis that gets new indices."""

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    shuffled: bool = True  # whether the older file is shuffled

    @property
    def num_rows(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    @property
    def num_columns(self) -> int:
        return 0 if self.columns is None else len(self.columns)


def read_old_ids(path: str | os.PathLike[str] | None, source: SparseSource, *, keep_rows: bool) -> OldIds:
    """Read the ids of the converted file or folder ``path``, whose indices the new file reuses.

    Row ids are returned only with ``keep_rows``. If ``path`` is None, no ids are returned. Raises OptionError if
    ``source`` has no ids.
    """
    if path is None:
        return OldIds()
    if not source.has_ids:
        raise OptionError(
            f"ids_from (--ids-from) needs ids, but {printable(source.path)} ({source.kind}) has none: use it only with "
            "ratings and other lists of entries"
        )
    reader = open_reader(path)
    rows = np.concatenate([read_table(file, ROW_IDS) for file in reader.readers])
    columns = read_table(reader.readers[0], COLUMN_IDS)  # the same in all files
    for name, ids in ((ROW_IDS, rows), (COLUMN_IDS, columns)):
        if len(np.unique(ids)) < len(ids):
            raise FileError(f"{printable(path)}: {name} contains duplicate ids: convert its source again")
    is_shuffled = reader.header is not None and reader.header.shuffled
    return OldIds(rows, columns, is_shuffled) if keep_rows else OldIds(None, columns)


class Ids:
    """Assign indices to ids in the order in which they appear, starting with the ``old`` ids.

    Integers below ``table_ids`` are looked up in a table, which is many times faster than Arrow's hash table.
    """

    def __init__(self, table_ids: int, old: np.ndarray | None = None) -> None:
        self._table_ids = table_ids
        self._table: np.ndarray | None = np.full(min(TABLE_START, table_ids), -1, np.int32)
        self._known = old  # all ids, in the order of their indices
        self._num_old = 0 if old is None else len(old)
        if old is not None and self._num_old:
            self._table = None
            if old.dtype.kind == "i" and old.min() >= 0 and (largest := int(old.max())) < table_ids:
                self._table = np.full(max(TABLE_START, largest + 1), -1, np.int32)
                self._table[old] = np.arange(self._num_old)

    @property
    def size(self) -> int:
        return 0 if self._known is None else len(self._known)

    @property
    def known(self) -> np.ndarray:
        """All ids, in the order of their indices."""
        return np.empty(0, np.int64) if self._known is None else self._known

    @property
    def num_bytes(self) -> int:
        """Upper limit on the memory that the ids use until they are written, in bytes."""
        width = 8 if self._known is None else max(8, self._known.itemsize)
        return self.size * (NUMBERS_BYTES + ID_COPIES * width)

    def number(self, ids: np.ndarray) -> np.ndarray:
        """Return the indices, (n,) int64, of (n,) ids, int64 or fixed-length bytes; new ids get the next indices."""
        if not len(ids):
            return np.empty(0, np.int64)
        if self._table is not None:
            if ids.dtype.kind == "i" and ids.min() >= 0 and (largest := int(ids.max())) < self._table_ids:
                return self._look_up(self._table, ids, largest)
            self._table = None
        numbers, new = index_values(ids[:0] if self._known is None else self._known, ids)
        if len(new):
            self._add(new)
        return numbers

    def _look_up(self, table: np.ndarray, ids: np.ndarray, largest: int) -> np.ndarray:
        if largest >= len(table):
            size = min(max(largest + 1, 2 * len(table)), self._table_ids)
            self._table = table = np.concatenate([table, np.full(size - len(table), -1, np.int32)])
        numbers = table[ids]
        unknown = numbers < 0
        if unknown.any():
            new = np.unique(ids[unknown])
            table[new] = self._add(new)
            numbers = table[ids]
        return numbers

    def _add(self, new: np.ndarray) -> np.ndarray:
        first = self.size
        self._known = new if self._known is None else np.concatenate([self._known, new])
        return np.arange(first, self.size, dtype=np.int64)

    def ranks(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids in their final order, and the final index of each preliminary index.

        Old ids come first, in their old order; new ids follow, sorted.
        """
        ids, num_old = self.known, self._num_old
        order = np.concatenate([np.arange(num_old), np.argsort(ids[num_old:], kind="stable") + num_old])
        return ids[order], inverse_of(order)


def inverse_of(order: np.ndarray) -> np.ndarray:
    """Return the inverse of a permutation."""
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.arange(len(order), dtype=np.int64)
    return inverse
