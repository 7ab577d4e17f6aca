"""Read counts of 10x Genomics' Cell Ranger: samples are the barcodes (cells), and columns are features (genes).

An HDF5 file holds compressed columns of features x barcodes, which equal the compressed rows of barcodes x features. In
a folder, a Matrix Market file has tables of barcodes and features beside it:

| | matrix | cells | genes |
| --- | --- | --- | --- |
| Cell Ranger 2 | ``matrix.mtx`` | ``barcodes.tsv`` | ``genes.tsv`` |
| Cell Ranger 3 and later, STARsolo | ``matrix.mtx.gz`` | ``barcodes.tsv.gz`` | ``features.tsv.gz`` |

Any of these files may be compressed with gzip. The names may share a prefix, as in ``GSM123_matrix.mtx.gz``; the matrix
may have another name if the tables have no prefix. According to the lengths of the tables, the matrix has a row per
feature, and is transposed, or a row per barcode.
Source: 10x Genomics, "Feature-Barcode Matrices" (HDF5 and the MEX format).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import OptionError, SourceError, names_text, printable
from h5chunk.sample_source import OpenContext
from h5chunk.sources.kinds import LayerOptions
from h5chunk.sources.matrix.block import Block, MemoryLimit, SparseSource, Transposed
from h5chunk.sources.matrix.compressed import check_vectors, read_blocks
from h5chunk.sources.matrix.hdf5 import GuardedDataset, GuardedFile, GuardedGroup
from h5chunk.sources.matrix.mtx import MtxSource
from h5chunk.sources.matrix.text import MAX_ID_BYTES, TextFile
from h5chunk.sources.recognise import has_suffix, hdf5_members, is_path

PIECE_BYTES = 1 << 20
V2_NAMES = ("genes", "gene_names")
NAME_BYTES = 64  # bytes of memory per name while a piece is read
UNCLEAR = "so that it is unclear whether its rows or its columns are the samples"
WAYS = (
    "put the tables of this matrix beside it, or convert the .mtx with --format mtx, which makes its rows the samples, "
    "or with --format mtx --transpose, which makes its columns the samples"
)


class TenxSource(SparseSource):
    """An .h5 file of Cell Ranger. If a file of version 2 has several genomes, the option ``layer`` chooses one."""

    kind = "10x"
    has_parts = reads_folders = True
    Options = LayerOptions
    shape: tuple[int, int]
    axes = ("barcodes", "features")

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        if is_path(source) and _find_files(source) is not None:
            return True
        groups = {} if has_suffix(source, ".h5ad") else hdf5_members(source, head)
        return any({"barcodes", "indptr", "indices"} <= members for members in groups.values())

    @classmethod
    def open(cls, source: Any, options: LayerOptions, context: OpenContext) -> SparseSource:
        """Open an HDF5 file, a folder, or a Matrix Market file with its tables."""
        files = _find_files(source)
        if files is None:
            return cls(os.fspath(source), options, context)
        return TenxFolderSource(files, options, context)

    def __init__(self, path: str, options: LayerOptions, context: OpenContext) -> None:
        self._file = GuardedFile(path, context.memory_bytes)
        self.path, self._layer = path, options.layer
        with self._file.open() as root:
            group = self._find(root)
            self.shape, parts = self._matrix(group)
            self.num_bytes = sum(part.stored_bytes for part in parts)
            self.row_names = group.dataset("barcodes").names("barcodes", self.shape[0])
            features, names = (group.group("features"), ("id", "name")) if "features" in group else (group, V2_NAMES)
            self.column_names = features.dataset(names[0]).names("features", self.shape[1])
            if names[1] in features:
                self.column_symbols = features.dataset(names[1]).names("features", self.shape[1])

    def _find(self, root: GuardedGroup) -> GuardedGroup:
        """Return the group with the matrix: the only group, or the group of the genome that ``layer`` names."""
        names = [
            name
            for name in root.names()
            if root.is_group(name) and {"barcodes", "indptr"} <= set(root.group(name).names())
        ]
        if not names:
            raise root.error("has no group with barcodes and indptr, so it is not a matrix of Cell Ranger")
        if self._layer is None and len(names) > 1:
            raise root.error(f"has a matrix for each of {names_text(names)}: choose one (--layer)")
        name = names[0] if self._layer is None else self._layer
        if name not in names:
            raise root.error(f"has no matrix {name!r}: it has {names_text(names)} (--layer)")
        return root.group(name)

    def _matrix(self, group: GuardedGroup) -> tuple[tuple[int, int], list[GuardedDataset]]:
        sizes = group.dataset("shape")
        if sizes.dtype.kind not in "iu" or sizes.length != 2:
            raise sizes.error("must be two numbers, those of features and barcodes")
        num_features, num_barcodes = (int(size) for size in sizes.read(0, 2))
        parts = [group.dataset(name) for name in ("data", "indices", "indptr")]
        shape = num_barcodes, num_features
        check_vectors("csr", shape, parts)
        return shape, parts

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        with self._file.open() as root:
            yield from read_blocks("csr", *self._matrix(self._find(root)), max_bytes, self.range_of)


class TenxFiles(NamedTuple):
    """Paths of a Matrix Market file and of its tables; None for a missing table."""

    matrix: str
    barcodes: str | None
    features: str | None


def _find_files(path: str | os.PathLike[str]) -> TenxFiles | None:
    """Find the Matrix Market file of a folder, or take ``path`` as such a file, and find its tables.

    Cell Ranger 2 has the files in a subfolder with the name of the genome. Returns None for a folder without
    ``matrix.mtx``, and for a file that is not a Matrix Market file or has no table beside it.
    """
    path = os.fsdecode(path)
    if os.path.isdir(path):
        if matrix := _first_file(path, "matrix.mtx"):
            return _with_tables(matrix, path, "")
        try:
            with os.scandir(path) as entries:
                folders = [entry.path for entry in islice(filter(os.DirEntry.is_dir, entries), 2)]
        except OSError:
            return None
        matrix = _first_file(folders[0], "matrix.mtx") if len(folders) == 1 else None
        files = None if matrix is None else _with_tables(matrix, folders[0], "")
        return files if files is not None and None not in files else None
    folder, name = os.path.split(path)
    stem = name.removesuffix(".gz")
    if not stem.endswith(".mtx") or not os.path.isfile(path):
        return None
    for prefix in dict.fromkeys((stem.removesuffix("matrix.mtx") if stem.endswith("matrix.mtx") else "", "")):
        files = _with_tables(path, folder, prefix)
        if files.barcodes or files.features:
            return files
    return None


def _with_tables(matrix: str, folder: str, prefix: str) -> TenxFiles:
    features = _first_file(folder, f"{prefix}features.tsv") or _first_file(folder, f"{prefix}genes.tsv")
    return TenxFiles(matrix, _first_file(folder, f"{prefix}barcodes.tsv"), features)


def _first_file(folder: str, name: str) -> str | None:
    paths = (os.path.join(folder, name + packing) for packing in ("", ".gz"))
    return next((path for path in paths if os.path.isfile(path)), None)


class TenxFolderSource(SparseSource):
    """A Matrix Market file with tables of barcodes and features."""

    kind = "10x"
    axes = ("barcodes", "features")

    def __init__(self, files: TenxFiles, options: LayerOptions, context: OpenContext) -> None:
        if options.layer is not None:
            raise OptionError(f"layer is {options.layer!r} but {printable(files.matrix)} has only one matrix")
        self.path, self._files = files.matrix, files
        if files.barcodes is None or files.features is None:
            other = files.barcodes or files.features
            missing = "features.tsv or genes.tsv" if files.barcodes else "barcodes.tsv"
            beside = f"{printable(other)} is beside it, but no {missing}" if other else "no tables of 10x are beside it"
            raise SourceError(f"{printable(self.path)}: {beside}, {UNCLEAR}: {WAYS}")
        matrix: SparseSource = MtxSource(files.matrix, options, context)
        self.num_bytes = matrix.num_bytes
        memory = MemoryLimit(self.path, context.memory_bytes)
        max_lines = max(size or 0 for size in matrix.shape)
        self.row_names = _read_names(files.barcodes, max_lines, memory)
        self.column_names = _read_names(files.features, max_lines, memory)
        self.column_symbols = _read_names(files.features, max_lines, memory, column=1)
        self.shape = len(self.row_names), len(self.column_names)
        if matrix.shape not in (self.shape, self.shape[::-1]):
            raise SourceError(
                f"{printable(self.path)}: is {matrix.shape[0]} x {matrix.shape[1]}, but "
                f"{printable(files.barcodes)} has {self.shape[0]} lines and {printable(files.features)} "
                f"{self.shape[1]}, {UNCLEAR}: {WAYS}"
            )
        self._matrix = Transposed(matrix) if matrix.shape == self.shape[::-1] else matrix

    def files(self) -> list[str]:
        return [path for path in (self.path, self._files.barcodes, self._files.features) if path is not None]

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        return self._matrix.blocks(max_bytes)


def _read_names(path: str, max_lines: int, memory: MemoryLimit, column: int = 0) -> np.ndarray:
    """Read a column of a table without a header: (num_lines,) ``S``. A name is empty if its line lacks the column.

    Raises SourceError for an empty name in the first column, and for more than ``max_lines`` lines.
    """
    table = TextFile(path)
    parts: list[np.ndarray] = []
    count, width = 0, 1
    for piece in table.pieces(PIECE_BYTES):
        rows = (line.removesuffix(b"\r").split(b"\t", column + 1) for line in piece.data.split(b"\n")[:-1])
        names = [row[column] if len(row) > column else b"" for row in rows]
        min_bytes = int(column == 0)
        bad = next((i for i, name in enumerate(names) if not min_bytes <= len(name) <= MAX_ID_BYTES), None)
        if bad is not None:
            table.fail(
                f"has a name of {len(names[bad])} bytes, but names must have {min_bytes} to {MAX_ID_BYTES}",
                piece.line + bad,
            )
        count, width = count + len(names), max(width, *map(len, names))
        if count > max_lines:
            table.fail(f"has more lines than the {max_lines:,} rows or columns of the matrix", piece.line)
        memory.check(f"{count:,} names of up to {width} bytes", 2 * count * width + len(names) * NAME_BYTES)
        parts.append(np.array(names, "S"))
    names_of_all = np.concatenate(parts)
    memory.keep(f"{count:,} names", names_of_all.nbytes)
    return names_of_all
