"""Read AnnData files: one matrix, the columns of ``obs`` as fields, and the names of rows and columns.

The matrix is X, a layer, or raw/X. It may be stored as compressed rows or columns, in the format of any version of
AnnData, or as a dense dataset, whose zeros are dropped. Columns of ``obs`` whose type an h5chunk file cannot store are
left out, and listed in ``ignored``. Source: the on-disk format of AnnData (encoding versions 0.1.0 to 0.2.0) and of
h5sparse (legacy).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from h5chunk.errors import SourceError, count_text
from h5chunk.source import OpenContext
from h5chunk.sources.kinds import LayerOptions
from h5chunk.sources.matrix.block import Block, SparseSource
from h5chunk.sources.matrix.compressed import check_values_type, check_vectors, dense_block, native, read_blocks
from h5chunk.sources.matrix.hdf5 import GuardedDataset, GuardedFile, GuardedGroup
from h5chunk.sources.recognise import HDF5_MAGIC, has_suffix, hdf5_members

FORMATS = {"csr_matrix": "csr", "csc_matrix": "csc", "csr": "csr", "csc": "csc"}
CELL_BYTES = 64  # bytes of memory per element of a dense matrix: int64 row and column, value, and masks
MAX_CATEGORIES = 1 << 20


class H5adSource(SparseSource):
    """A matrix of an .h5ad: X, a layer, or ``raw/X``."""

    kind = "h5ad"
    has_parts = True
    Options = LayerOptions
    shape: tuple[int, int]
    axes = ("obs", "var")

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        if has_suffix(source, ".h5ad"):
            return head.startswith(HDF5_MAGIC)
        return {"X", "obs", "var"} <= set(hdf5_members(source, head))

    def __init__(self, path: str, options: LayerOptions, context: OpenContext) -> None:
        self._file = GuardedFile(path, context.memory_bytes)
        self.path = self._file.path
        layer = options.layer or "X"
        self._where: tuple[str, ...] = {"X": ("X",), "raw": ("raw", "X"), "raw/X": ("raw", "X")}.get(
            layer, ("layers", layer.removeprefix("layers/"))
        )
        self.row_fields: dict[str, np.ndarray] = {}
        self.categories: dict[str, list[str]] = {}
        self.ignored: dict[str, str] = {}
        self.notes: list[str] = []
        with self._file.open() as root:
            if "h5chunk" in root:
                raise root.error(
                    "was written by h5chunk, which stores values multiplied by a scale: convert its source instead, or "
                    "change its layout with h5chunk repack"
                )
            if self._where == ("raw", "X") and "raw" not in root and "raw.X" in root:
                self._where = ("raw.X",)
            _, self.shape, parts = self._matrix(root)
            self.num_bytes = sum(part.stored_bytes for part in parts)
            self.row_names = self._names(root, "obs", self.shape[0])
            holder = root.group("raw") if self._where[0] == "raw" else root
            table = "raw.var" if self._where == ("raw.X",) else "var"
            self.column_names = self._names(holder, table, self.shape[1])
            if "obs" in root and root.is_group("obs"):
                self._read_fields(root.group("obs"))
            elif "obs" in root:
                self._read_table(root)

    def _matrix(self, root: GuardedGroup) -> tuple[str, tuple[int, int], list[GuardedDataset]]:
        """Return the layout of the matrix (csr, csc or dense), its shape, and its datasets.

        The datasets are data, indices and indptr; or the single dataset of a dense matrix.
        """
        holder = root
        for name in self._where[:-1]:
            if name not in holder:
                raise root.error(f"has no {name!r}; {_choices(root)}")
            holder = holder.group(name)
        name = self._where[-1]
        if name not in holder:
            raise root.error(f"has no matrix {'/'.join(self._where)!r}; {_choices(root)}")
        if not holder.is_group(name):
            dense = holder.dataset(name, 2)
            check_values_type(dense.name, dense.dtype)
            return "dense", (dense.shape[0], dense.shape[1]), [dense]
        group = holder.group(name)
        word = group.word("encoding-type") or group.word("h5sparse_format")
        if word not in FORMATS:
            raise group.error(
                f"has the encoding {word!r}, but only {', '.join(FORMATS)} and dense datasets are supported: store the "
                "matrix as one of these"
            )
        shape = self._shape(group)
        parts = [group.dataset(part) for part in ("data", "indices", "indptr")]
        check_vectors(FORMATS[word], shape, parts)
        return FORMATS[word], shape, parts

    def _shape(self, group: GuardedGroup) -> tuple[int, int]:
        for name in ("shape", "h5sparse_shape"):
            if (shape := group.numbers(name)) is not None:
                if shape.shape != (2,) or int(shape.min()) < 0:
                    raise group.error(f"its attribute {name!r} must be two numbers, those of rows and columns")
                return int(shape[0]), int(shape[1])
        raise group.error("has no attribute 'shape'")

    def _names(self, holder: GuardedGroup, table: str, length: int) -> np.ndarray | None:
        """Read the names of rows or columns from the table ``obs`` or ``var``; None if they are not strings."""
        if table not in holder:
            return None
        if not holder.is_group(table):
            try:
                rows = _table(holder, table, length)
            except _Unfit:
                return None
            name = next((name for name in ("index", "_index") if name in (rows.dtype.names or ())), "")
            return np.ascontiguousarray(rows[name]) if name and rows[name].dtype.kind == "S" else None
        group = holder.group(table)
        name = group.word("_index") or next((word for word in ("_index", "index") if word in group), "")
        if name not in group or group.is_group(name):
            return None
        stored = group.dataset(name)
        return stored.names(f"names of {table}", length) if stored.is_strings else None

    def _read_fields(self, obs: GuardedGroup) -> None:
        others = (obs.word("_index") or "_index", "index", "__categories")
        names = [name for name in obs.words("column-order") if name in obs] or obs.names()
        for name in dict.fromkeys(name for name in names if name not in others):
            try:
                self._read_field(obs, name)
            except _Unfit as reason:
                self.ignored[name] = str(reason)

    def _read_table(self, root: GuardedGroup) -> None:
        """Read ``obs`` from a file written before 2020: a compound dataset, whose categories are in ``uns``."""
        try:
            rows = _table(root, "obs", self.shape[0])
        except _Unfit as reason:
            self.ignored["obs"] = str(reason)
            return
        uns = root.group("uns") if "uns" in root and root.is_group("uns") else None
        for name in rows.dtype.names or ():
            words, values = f"{name}_categories", native(np.ascontiguousarray(rows[name]))
            if name in ("index", "_index"):
                continue
            if uns is None or words not in uns or uns.is_group(words) or values.dtype.kind not in "iu":
                self.row_fields[name] = values
                continue
            try:
                self._add_categorical(name, values, uns.dataset(words))
            except _Unfit as reason:
                self.ignored[name] = str(reason)

    def _read_field(self, obs: GuardedGroup, name: str) -> None:
        if not obs.is_group(name):
            values = self._column(obs.dataset(name))
            if "__categories" in obs and name in obs.group("__categories"):
                self._add_categorical(name, values, obs.group("__categories").dataset(name))
            else:
                self.row_fields[name] = values
            return
        group = obs.group(name)
        word = group.word("encoding-type")
        if word == "categorical":
            self._add_categorical(name, self._column(group.dataset("codes")), group.dataset("categories"))
        elif word.startswith("nullable-"):
            if self._column(group.dataset("mask")).any():
                raise _Unfit("has missing values")
            self.row_fields[name] = self._column(group.dataset("values"))
        else:
            raise _Unfit(f"has the encoding {word!r}")

    def _column(self, stored: GuardedDataset) -> np.ndarray:
        """Read a column of ``obs``. Raises _Unfit if an h5chunk file cannot store its type."""
        if stored.length != self.shape[0]:
            raise stored.error(f"has {stored.length} values but the matrix has {self.shape[0]} rows")
        if stored.is_strings:
            return stored.keep(_strings(stored), f"values of {stored.where}")
        if stored.dtype.kind not in "biuf":
            raise _Unfit(f"has the type {stored.dtype}")
        return stored.keep(native(stored.all()), f"values of {stored.where}")

    def _add_categorical(self, name: str, codes: np.ndarray, stored: GuardedDataset) -> None:
        if stored.length > MAX_CATEGORIES:
            raise _Unfit(f"has {stored.length} categories, over the limit of {MAX_CATEGORIES}")
        if codes.dtype.kind not in "iu":
            raise stored.error(f"the codes of these categories have the type {codes.dtype} but must be whole numbers")
        bad = np.flatnonzero((codes < -1) | (codes >= stored.length))
        if len(bad):
            raise stored.error(f"code {codes[bad[0]]} of row {bad[0]} is out of range for {stored.length} categories")
        if stored.is_strings:
            strings = stored.keep(_strings(stored), f"categories of {name}")
            words = [word.decode("utf-8", "backslashreplace") for word in strings.tolist()]
        else:
            words = [str(value) for value in stored.all().tolist()]
        if missing := int((codes == -1).sum()):
            self.notes.append(f"{name!r} has no category in {count_text(missing, 'row')}: their code is -1")
        self.row_fields[name], self.categories[name] = codes, words

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        with self._file.open() as root:
            layout, shape, parts = self._matrix(root)
            if layout == "dense":
                dense, at_once = parts[0], max(1, max_bytes // CELL_BYTES)
                for row, column, part in dense.parts(at_once * dense.dtype.itemsize, self.range_of):
                    cells, width = part.reshape(-1), part.shape[1]
                    for start in range(0, len(cells), at_once):
                        piece = cells[start : start + at_once]
                        yield dense_block(dense.name, piece, start, width, (row, column)), dense.consumed_bytes
            else:
                yield from read_blocks(layout, shape, parts, max_bytes, self.range_of)


class _Unfit(Exception):
    """A column of ``obs`` cannot be converted; the message is the reason."""


def _strings(stored: GuardedDataset) -> np.ndarray:
    """Read strings. Raises _Unfit if they are longer than the limit."""
    try:
        return stored.strings()
    except SourceError as error:
        if "the limit is" in str(error):
            raise _Unfit(str(error)) from None
        raise


def _table(holder: GuardedGroup, name: str, length: int) -> np.ndarray:
    """Read a compound dataset, whose members are columns: (length,).

    Raises _Unfit for a dataset of another type, and SourceError for another length.
    """
    try:
        stored = holder.dataset(name)
    except SourceError as error:
        raise _Unfit(str(error)) from None
    if not stored.dtype.names:
        raise _Unfit("is not a table of several columns")
    if stored.length != length:
        raise stored.error(f"has {stored.length} rows but the matrix has {length}")
    return stored.keep(stored.all(), f"rows of {stored.where}")


def _choices(root: GuardedGroup) -> str:
    """List the matrices of the file, for messages."""
    matrices = [name for name in ("X", "raw") if name in root or f"{name}.X" in root]
    layers = root.group("layers").names() if "layers" in root else []
    matrices += [f"layers/{name}" if name in ("X", "raw") else name for name in layers]
    return f"choose one of its matrices (--layer): {', '.join(matrices)}" if matrices else "it has no matrices"
