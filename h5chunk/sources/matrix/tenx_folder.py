"""Counts of 10x Genomics' Cell Ranger as a Matrix Market file with tables of barcodes and features beside it.

The file has a row for each feature (gene) and a column for each barcode (cell); samples are the cells, so that it is
read transposed. A file that has a row for each barcode, by the lengths of the tables, is read as it is.
Source: 10x Genomics, "Feature-Barcode Matrices" (the MEX format).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from h5chunk.errors import OptionError, SourceError, printable
from h5chunk.sources.matrix.block import Block, SparseSource
from h5chunk.sources.matrix.memory import MemoryLimit
from h5chunk.sources.matrix.mtx import MtxSource
from h5chunk.sources.matrix.tenx_files import TenxFiles
from h5chunk.sources.matrix.text import MAX_ID_BYTES, TextFile
from h5chunk.sources.matrix.transposed import Transposed

PIECE_BYTES = 1 << 20
NAME_BYTES = 64  # of memory for a name while a piece is read


class TenxFolderSource(SparseSource):
    """A Matrix Market file of 10x with its tables; see `SparseSource`.

    Parameters
    ----------
    files : TenxFiles
    layer : str, optional
        Not accepted: a folder has one matrix.
    memory_bytes : int

    Raises
    ------
    SourceError
        A table is missing, or the tables do not fit the matrix.
    """

    kind = "10x"
    axes = ("barcodes", "features")

    def __init__(self, files: TenxFiles, layer: str | None, memory_bytes: int) -> None:
        if layer is not None:
            raise OptionError(f"layer is {layer!r} but {printable(files.matrix)} has one matrix only")
        self.path, self._files = files.matrix, files
        if files.barcodes is None or files.features is None:
            other, missing = (
                (files.features, "barcodes.tsv")
                if files.barcodes is None
                else (files.barcodes, "features.tsv or genes.tsv")
            )
            beside = f"{printable(other)} is beside it, but no {missing}" if other else "no tables of 10x are beside it"
            raise SourceError(f"{printable(self.path)}: {beside}, so that it is unclear what samples are: {_WAYS}")
        matrix: SparseSource = MtxSource(files.matrix)
        self.num_bytes = matrix.num_bytes
        memory = MemoryLimit(self.path, memory_bytes)
        most = max(size or 0 for size in matrix.shape)
        self.row_names = _read_names(files.barcodes, most, memory)
        self.column_names = _read_names(files.features, most, memory)
        self.shape = len(self.row_names), len(self.column_names)
        if matrix.shape not in (self.shape, self.shape[::-1]):
            raise SourceError(
                f"{printable(self.path)}: is {matrix.shape[0]} x {matrix.shape[1]}, but "
                f"{printable(files.barcodes)} has {self.shape[0]} lines and {printable(files.features)} "
                f"{self.shape[1]}, so that it is unclear what samples are: {_WAYS}"
            )
        self._matrix = Transposed(matrix) if matrix.shape == self.shape[::-1] else matrix

    def files(self) -> list[str]:
        return [path for path in (self.path, self._files.barcodes, self._files.features) if path is not None]

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        return self._matrix.blocks(max_bytes)


_WAYS = (
    "put the tables of this matrix beside it, or convert the .mtx with --format mtx, which makes its rows the samples, "
    "or with --format mtx --transpose, which makes its columns the samples"
)


def _read_names(path: str, most: int, memory: MemoryLimit) -> np.ndarray:
    """The first column of a table without a header: (lines,) ``S``.

    Raises
    ------
    SourceError
        The table has more than ``most`` lines, a name is empty or too long, or the names do not fit in memory.
    """
    table = TextFile(path)
    parts: list[np.ndarray] = []
    count, width = 0, 1
    for piece in table.pieces(PIECE_BYTES):
        names = [line.split(b"\t", 1)[0].removesuffix(b"\r") for line in piece.data.split(b"\n")[:-1]]
        bad = next((i for i, name in enumerate(names) if not 0 < len(name) <= MAX_ID_BYTES), None)
        if bad is not None:
            table.fail(f"has a name of {len(names[bad])} bytes, but 1 to {MAX_ID_BYTES} are read", piece.line + bad)
        count, width = count + len(names), max(width, *map(len, names))
        if count > most:
            table.fail(f"has more lines than the {most:,} rows or columns of the matrix", piece.line)
        memory.check(f"{count:,} names of up to {width} bytes", 2 * count * width + len(names) * NAME_BYTES)
        parts.append(np.array(names, "S"))
    names_of_all = np.concatenate(parts)
    memory.keep(f"{count:,} names", names_of_all.nbytes)
    return names_of_all
