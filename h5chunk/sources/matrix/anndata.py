"""Read AnnData files: one matrix, the columns of ``obs`` as fields, and the names of rows and columns.

The matrix is X, a layer, or raw/X. It may be stored as compressed rows or columns, in the format of any version of
AnnData, or as a dense dataset, whose zeros are dropped. Columns of ``obs`` whose type an h5chunk file cannot store are
left out, and listed in ``ignored``. Source: the on-disk format of AnnData (see `h5chunk.store.hdf5.encodings`) and of
h5sparse (legacy).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from h5chunk.errors import SourceError, count_text, names_text
from h5chunk.sample_source import OpenContext
from h5chunk.sources.kinds import LayerOptions
from h5chunk.sources.matrix.block import Block, SparseSource
from h5chunk.sources.matrix.compressed import check_values_type, check_vectors, dense_block, native, read_blocks
from h5chunk.sources.matrix.hdf5 import GuardedDataset, GuardedFile, GuardedGroup
from h5chunk.sources.recognise import HDF5_MAGIC, has_suffix, hdf5_members
from h5chunk.store.hdf5.encodings import NULLABLE

FORMATS = {"csr_matrix": "csr", "csc_matrix": "csc", "csr": "csr", "csc": "csc"}
CELL_BYTES = 64  # bytes of memory per element of a dense matrix: int64 row and column, value, and masks
MATRIX_ENCODINGS = f"a matrix must be a dense array or one of {', '.join(FORMATS)}: store it as one of these"
OLD_CATEGORIES = "__categories"  # group with the categories of columns, in files of AnnData 0.7
MAX_LISTED = 5  # elements of obsm or obsp that a report lists
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
            if root.encoding() not in ("", "anndata"):
                raise root.error(f"has AnnData's encoding {root.encoding()!r}, but must be 'anndata'")
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
            if holder.encoding() not in ("", "anndata", "raw", "dict"):
                raise holder.error(f"has AnnData's encoding {holder.encoding()!r}, but must be 'raw'")
            table = "raw.var" if self._where == ("raw.X",) else "var"
            self.column_names = self._names(holder, table, self.shape[1])
            if "obs" in root and root.is_group("obs"):
                self._read_fields(root.group("obs"))
            elif "obs" in root:
                self._read_table(root)
            self._list_others(root)

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
            if dense.encoding() not in ("", "array"):
                raise dense.error(f"has AnnData's encoding {dense.encoding()!r}, but {MATRIX_ENCODINGS}")
            check_values_type(dense.name, dense.dtype)
            return "dense", (dense.shape[0], dense.shape[1]), [dense]
        group = holder.group(name)
        word = group.encoding() or group.word("h5sparse_format")
        if word not in FORMATS:
            raise group.error(f"has AnnData's encoding {word!r}, but {MATRIX_ENCODINGS}")
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
            return self._texts(np.ascontiguousarray(rows[name]), None, f"names of {table}") if name else None
        group = holder.group(table)
        if group.encoding() not in ("", "dataframe"):
            raise group.error(f"has AnnData's encoding {group.encoding()!r} but must be a dataframe")
        name = group.word("_index") or next((word for word in ("_index", "index") if word in group), "")
        if name not in group:
            return None
        try:
            names, words = self._column(group, name, length)
        except _Unfit as reason:
            raise reason.error or group.error(f"{reason}: change these names in the source", name) from None
        return self._texts(names, words, f"names of {table}")

    def _texts(self, values: np.ndarray, words: list[str] | None, noun: str) -> np.ndarray:
        """Return strings, categories by their codes, or numbers, which AnnData also makes strings, as bytes: (n,) S."""
        if words is not None:
            values = np.array([word.encode() for word in [*words, ""]], "S")[values]  # code -1 takes the last
        if values.dtype.kind != "S":
            values = np.array([str(value) for value in values.tolist()], "S")
        self._file.memory.keep(f"{len(values):,} {noun}", 2 * values.nbytes)
        return values

    def _read_fields(self, obs: GuardedGroup) -> None:
        others = (obs.word("_index") or "_index", "index", OLD_CATEGORIES)
        names = [name for name in obs.words("column-order") if name in obs] or obs.names()
        for name in dict.fromkeys(name for name in names if name not in others):
            try:
                self._add_field(name, *self._column(obs, name, self.shape[0]))
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
            words, values = f"{name}_categories", np.ascontiguousarray(rows[name])
            if name in ("index", "_index"):
                continue
            if uns is None or words not in uns or uns.is_group(words) or values.dtype.kind not in "iu":
                self._add_field(name, values, None)
                continue
            try:
                self._add_field(name, values, self._categories(uns, words, values))
            except _Unfit as reason:
                self.ignored[name] = str(reason)

    def _add_field(self, name: str, values: np.ndarray, words: list[str] | None) -> None:
        if words is not None:
            if missing := int((values == -1).sum()):
                self.notes.append(f"{name!r} has no category in {count_text(missing, 'row')}: their code is -1")
            self.categories[name] = words
        self.row_fields[name] = native(values)

    def _list_others(self, root: GuardedGroup) -> None:
        """Add the elements with a value per row that are left out to ``ignored``, with a way to read them."""
        for part in ("obsm", "obsp"):
            names = root.group(part).names() if part in root and root.is_group(part) else []
            dense = next((name for name in names if not root.group(part).is_group(name)), None)
            way = "" if dense is None else f", such as h5chunk.ChunkDataset(SOURCE, fields=['{part}/{dense}'])"
            for name in names[:MAX_LISTED]:
                self.ignored[f"{part}/{name}"] = f"only the matrix and obs are converted: read it from the source{way}"
            if len(names) > MAX_LISTED:
                self.ignored[part] = f"and {len(names) - MAX_LISTED} more"

    def _column(self, table: GuardedGroup, name: str, length: int | None) -> tuple[np.ndarray, list[str] | None]:
        """Read a column of ``obs`` or ``var``, or categories, by its encoding.

        Returns its values and None, or codes and the categories. Raises SourceError if there are not ``length`` values,
        and _Unfit if an h5chunk file cannot store them.
        """
        if not table.is_group(name):
            stored = table.dataset(name)
            if (encoding := _encoding(stored)) not in ("", "array", "string-array"):
                raise _Unfit(f"has AnnData's encoding {encoding!r}")
            values = self._values(stored, length)
            if OLD_CATEGORIES in table and name in table.group(OLD_CATEGORIES):
                return values, self._categories(table.group(OLD_CATEGORIES), name, values)
            return values, None
        group = table.group(name)
        encoding = _encoding(group)
        if encoding == "categorical":
            codes = self._values(group.dataset("codes"), length)
            return codes, self._categories(group, "categories", codes)
        if encoding in NULLABLE:
            if num_missing := int(self._values(group.dataset("mask"), length).sum()):
                raise _Unfit(f"has missing values in {count_text(num_missing, 'row')}")
            return self._values(group.dataset("values"), length), None
        raise _Unfit(f"has AnnData's encoding {encoding!r}" if encoding else "is a group without an encoding")

    def _values(self, stored: GuardedDataset, length: int | None) -> np.ndarray:
        """Read numbers or strings. Raises _Unfit if an h5chunk file cannot store their type."""
        if length is not None and stored.length != length:
            raise stored.error(f"has {stored.length} values but the matrix has {length}")
        if stored.is_strings:
            return stored.keep(_strings(stored), f"values of {stored.where}")
        if stored.dtype.kind not in "biuf":
            raise _Unfit(f"has the type {stored.dtype}")
        return stored.keep(stored.all(), f"values of {stored.where}")

    def _categories(self, holder: GuardedGroup, name: str, codes: np.ndarray) -> list[str]:
        """Read the categories of a column, and check its codes."""
        values, _ = self._column(holder, name, None)
        if len(values) > MAX_CATEGORIES:
            raise _Unfit(f"has {len(values)} categories, over the limit of {MAX_CATEGORIES}")
        if codes.dtype.kind not in "iu":
            problem = f"the codes of these categories have the type {codes.dtype} but must be whole numbers"
            raise holder.error(problem, name)
        bad = np.flatnonzero((codes < -1) | (codes >= len(values)))
        if len(bad):
            problem = f"code {codes[bad[0]]} of row {bad[0]} is out of range for {len(values)} categories"
            raise holder.error(problem, name)
        words = self._texts(values, None, f"categories of {name}").tolist()
        return [word.decode("utf-8", "backslashreplace") for word in words]

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
    """A column of ``obs`` cannot be converted; the message is the reason. ``error`` is one that names the column."""

    def __init__(self, reason: str | SourceError) -> None:
        super().__init__(str(reason))
        self.error = reason if isinstance(reason, SourceError) else None


def _encoding(item: GuardedGroup | GuardedDataset) -> str:
    """Return AnnData's encoding of a column. Raises _Unfit if it is not supported."""
    try:
        return item.encoding()
    except SourceError as error:
        raise _Unfit(error) from None


def _strings(stored: GuardedDataset) -> np.ndarray:
    """Read strings. Raises _Unfit if they are longer than the limit."""
    try:
        return stored.strings()
    except SourceError as error:
        if "the limit is" in str(error):
            raise _Unfit(error) from None
        raise


def _table(holder: GuardedGroup, name: str, length: int) -> np.ndarray:
    """Read a compound dataset, whose members are columns: (length,).

    Raises _Unfit for a dataset of another type, and SourceError for another length.
    """
    try:
        stored = holder.dataset(name)
    except SourceError as error:
        raise _Unfit(error) from None
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
    return f"choose one of its matrices (--layer): {names_text(matrices)}" if matrices else "it has no matrices"
