"""Whether rows can be added to a sparse matrix in a file, and what the longer one is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from h5chunk.errors import FileError, SourceError, printable
from h5chunk.store.format import GROUP
from h5chunk.store.write.appended import OldDataset, OldFile
from h5chunk.store.write.csr import CSR, MATRIX, read_matrix
from h5chunk.tools.append.fields import fit_columns, match_classes
from h5chunk.tools.convert.sparse_fields import fields_of, tables_of
from h5chunk.tools.convert.sparse_keep import Kept
from h5chunk.tools.convert.sparse_options import SparseOptions

TABLES = ("source_index", "row_ids", "column_ids", "column_index", "class_names")
PARTS = ("indptr", "indices", "data")
RECORDED = ("clip", "binarize", "min_row_count")  # of what the file was converted with, what holds for new rows


class OldRows:
    """A file of a sparse matrix as convert wrote it.

    Parameters
    ----------
    old : OldFile

    Attributes
    ----------
    matrix : Matrix
    parts : dict of str to OldDataset
        ``indptr``, ``indices`` and, but for a pattern, ``data``; of dense rows the matrix itself, as ``X``.
    fields : dict of str to np.dtype

    Raises
    ------
    FileError
        It is none, or has more in it.
    """

    def __init__(self, old: OldFile) -> None:
        self.old = old
        matrix = read_matrix(old.file)
        if matrix is None:
            raise FileError(f"{old.shown}: its kind is {old.kind!r}: a newer h5chunk may append to it")
        self.matrix = matrix
        paths = [f"{MATRIX}/{part}" for part in PARTS] if matrix.kind == CSR else [MATRIX]
        names = [name for name in old.fields if name != MATRIX]
        known = {*paths, *names, *(f"{GROUP}/{table}" for table in TABLES)}
        known |= {f"{GROUP}/checksums/{name}" for name in (*paths, *names)}
        known |= {f"{GROUP}/categories/{name}" for name in names}
        old.check_known(lambda name: name in known)
        if f"{GROUP}/source_index" not in old.datasets:
            raise FileError(f"{old.shown}: lacks 'source_index': only what h5chunk convert made can be appended to")
        used = [path for path in paths if old.datasets[path].size and not (matrix.pattern and path.endswith("/data"))]
        self.parts = {path.rpartition("/")[2]: OldDataset(old, path) for path in used}
        self.fields = {name: old.datasets[name].dtype for name in names}
        packed = [name for name in (*self.parts, *names) if self._is_filtered(name)]
        if packed:
            raise FileError(
                f"{old.shown}: {packed[0]!r} is compressed, which h5chunk convert does not do: repack it "
                "(--compression none), or convert all sources together"
            )

    def _is_filtered(self, name: str) -> bool:
        if name in self.parts:
            return self.parts[name].filtered and self.matrix.kind == CSR
        return OldDataset(self.old, name).filtered

    @property
    def stored_bytes(self) -> int:
        """Of columns and codes."""
        return sum(int(part.dataset.id.get_storage_size()) for name, part in self.parts.items() if name != "indptr")

    def options(self, given: dict[str, Any]) -> SparseOptions:
        """How new rows are to be read."""
        recorded = {name: self.old.options[name] for name in RECORDED if self.old.options.get(name) is not None}
        if "binarize" not in recorded:
            recorded["scale"] = self.matrix.scale
        taken = {name: given[name] for name in ("seed", "shuffle", "memory_bytes")}
        return SparseOptions(**recorded, **taken, overwrite=True)

    def row_entries(self) -> np.ndarray:
        """Entries of each row: (num_rows,) int64."""
        return np.diff(self.parts["indptr"].values())

    def first_index(self) -> int:
        """The ``source_index`` of what is row 0 of the new source."""
        index = self.old.table("source_index")
        assert index is not None
        return int(index.max()) + 1


@dataclass(frozen=True)
class MoreRows:
    """What stands beside the matrix in the longer file.

    Attributes
    ----------
    fields : dict of str to (num_rows,) array
    tables : dict of str to array
    new_classes : list of str
    notes : list of str
    """

    fields: dict[str, np.ndarray]
    tables: dict[str, np.ndarray]
    new_classes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_rows(rows: OldRows, kept: Kept, *, new_classes: bool) -> MoreRows:
    """Compare what was read with the file.

    Raises
    ------
    SourceError
        They do not agree.
    """
    old, source = rows.old, printable(kept.read.source.path)
    if rows.matrix.kind == CSR and rows.matrix.pattern and not kept.pattern and kept.row_entries.any():
        raise SourceError(
            f"{source}: has values, but {old.shown} holds a pattern, where all are one: convert all sources together"
        )
    found, tables = fields_of(kept), tables_of(kept)
    more = MoreRows({}, {name: table for name in TABLES if (table := old.table(name)) is not None})
    for name in rows.fields.keys() & found.keys():
        new, there = tables.get(f"categories/{name}"), old.table(f"categories/{name}")
        if (new is None) != (there is None):
            lacks, has = (source, old.shown) if new is None else (old.shown, source)
            raise SourceError(f"{source}: the values of field {name!r} have names in {has}, but none in {lacks}")
        if new is not None:
            found[name] = _recoded(more, rows, name, found[name], _words(new), new_classes=new_classes, source=source)
    for name, values in fit_columns(rows.fields, found, shown=old.shown, source=source).items():
        more.fields[name] = np.concatenate([OldDataset(old, name).values(), values])
    more.tables["source_index"] = np.concatenate(
        [more.tables["source_index"], tables["source_index"] + rows.first_index()]
    )
    _add_row_ids(more, rows, kept, tables, source)
    return more


def _words(table: np.ndarray) -> list[str]:
    return [value.decode("utf-8", "replace") for value in table.tolist()]


def _recoded(
    more: MoreRows,
    rows: OldRows,
    name: str,
    values: np.ndarray,
    new: list[str],
    *,
    new_classes: bool,
    source: str,
) -> np.ndarray:
    """Codes of a categorical field as those of the file; puts the table of names beside them."""
    table, what = rows.old.table(f"categories/{name}"), f"category of {name!r}"
    assert table is not None
    matched = match_classes(_words(table), new, new_classes=new_classes, shown=rows.old.shown, source=source, what=what)
    more.tables[f"categories/{name}"] = np.array([each.encode() for each in matched.names], "S")
    if name == "labels" and "class_names" in more.tables:
        more.tables["class_names"] = more.tables[f"categories/{name}"]
    more.new_classes.extend(matched.added)
    return matched.relabel(values.astype(np.int64))


def _add_row_ids(more: MoreRows, rows: OldRows, kept: Kept, tables: dict[str, np.ndarray], source: str) -> None:
    """Ids of the rows, where the file has any."""
    old, new, shown = more.tables.get("row_ids"), tables.get("row_ids"), rows.old.shown
    if old is None:
        if kept.read.row_ids is not None:
            raise SourceError(
                f"{source}: its rows have ids, but those of {shown} are numbered: give one like the first"
            )
        if new is not None:
            more.notes.append(f"the names of new rows are left out, as {shown} has none for its own")
        return
    if new is None or new.dtype.kind != old.dtype.kind:
        text = "are strings" if old.dtype.kind == "S" else "are whole numbers"
        raise SourceError(
            f"{source}: {'its rows have no ids' if new is None else 'the ids of its rows are of another kind'}, but "
            f"those of {shown} {text}: give a source like the first one"
        )
    again = np.intersect1d(old, new)
    if len(again):
        first = again[0].decode("utf-8", "backslashreplace") if old.dtype.kind == "S" else again[0]
        more.notes.append(f"{len(again):,} ids of rows, such as {first}, were in the file before: such rows come twice")
    more.tables["row_ids"] = np.concatenate([old, new])
