"""Counts of 10x Genomics' Cell Ranger, version 2 and 3: rows are barcodes (cells), columns are features (genes).

In HDF5 they are kept as compressed columns of features x barcodes, which are the compressed rows of what is wanted.
Source: 10x Genomics, "Feature-Barcode Matrices (HDF5)".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from h5chunk.source import OpenContext
from h5chunk.sources.kinds import LayerOptions
from h5chunk.sources.matrix import compressed
from h5chunk.sources.matrix.block import Block, SparseSource
from h5chunk.sources.matrix.hdf5 import GuardedFile, GuardedGroup, Stored, read_strings
from h5chunk.sources.matrix.memory import DEFAULT_MEMORY_BYTES
from h5chunk.sources.matrix.tenx_files import find_tenx_files
from h5chunk.sources.recognise import hdf5_members, is_path, suffix_of


def open_tenx(
    path: str | os.PathLike[str], layer: str | None = None, memory_bytes: int = DEFAULT_MEMORY_BYTES
) -> SparseSource:
    """Open counts of 10x: an HDF5 file, a folder, or the Matrix Market file of a folder.

    Raises
    ------
    SourceError
        It is none of these, or broken.
    """
    files = find_tenx_files(path)
    if files is None:
        return TenxSource(path, layer, memory_bytes)
    from h5chunk.sources.matrix.tenx_folder import TenxFolderSource  # needs pyarrow

    return TenxFolderSource(files, layer, memory_bytes)


class TenxSource(SparseSource):
    """A 10x .h5; see `SparseSource`.

    Parameters
    ----------
    path : path
    layer : str, optional
        The genome, in files of version 2 that have several.
    memory_bytes : int

    Raises
    ------
    SourceError
        The file is damaged, none of 10x, or its parts do not agree.
    """

    kind = "10x"
    Options = LayerOptions

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        if is_path(source) and find_tenx_files(source) is not None:
            return True
        groups = {} if suffix_of(source) == ".h5ad" else hdf5_members(source, head)
        return any({"barcodes", "indptr", "indices"} <= members for members in groups.values())

    @classmethod
    def open(cls, source: Any, options: LayerOptions, context: OpenContext) -> SparseSource:
        return open_tenx(source, options.layer, context.memory_bytes)

    axes = ("barcodes", "features")
    is_sorted_by_row = True

    def __init__(
        self, path: str | os.PathLike[str], layer: str | None = None, memory_bytes: int = DEFAULT_MEMORY_BYTES
    ) -> None:
        self._file = GuardedFile(path, memory_bytes)
        self.path = self._file.path
        self._layer = layer
        with self._file.open() as root:
            group = self._find(root)
            self.shape, parts = self._matrix(group)
            self.num_bytes = sum(part.stored_bytes for part in parts)
            self.row_names = self._names(group.dataset("barcodes"), self.shape[0], "barcodes")
            genes = group.group("features").dataset("id") if "features" in group else group.dataset("genes")
            self.column_names = self._names(genes, self.shape[1], "features")

    def _find(self, root: GuardedGroup) -> GuardedGroup:
        """The group of version 3, or of the genome of version 2."""
        found = [
            name
            for name in root.names()
            if root.is_group(name) and {"barcodes", "indptr"} <= set(root.group(name).names())
        ]
        if not found:
            raise root.error("has no group with barcodes and indptr, so it is no matrix of 10x")
        if self._layer is None and len(found) > 1:
            raise root.error(f"has a matrix for each of {', '.join(found)}: say which (layer)")
        name = found[0] if self._layer is None else self._layer
        if name not in found:
            raise root.error(f"has no matrix {name!r}: it has {', '.join(found)} (layer)")
        return root.group(name)

    def _matrix(self, group: GuardedGroup) -> tuple[tuple[int, int], list[Stored]]:
        sizes = group.dataset("shape")
        if sizes.dtype.kind not in "iu" or sizes.length != 2:
            raise sizes.error("must be two numbers, of features and of barcodes")
        num_features, num_barcodes = (int(size) for size in sizes.read(0, 2))
        parts = [group.dataset(name) for name in ("data", "indices", "indptr")]
        shape = compressed.check_kinds((num_barcodes, num_features), parts[0], parts[2], parts[1])
        return shape, parts

    def _names(self, stored: Stored, length: int, what: str) -> np.ndarray:
        if stored.length != length:
            raise stored.error(f"has {stored.length} names but the matrix has {length} {what}")
        names = read_strings(stored)
        self._file.memory.keep(f"{length:,} {what}", 2 * names.nbytes)
        return names

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        with self._file.open() as root:
            shape, parts = self._matrix(self._find(root))

            def consumed() -> int:
                return int(sum(part.stored_bytes * part.read_part for part in parts))

            yield from compressed.compressed_blocks(
                shape, *parts, by_column=False, max_bytes=max_bytes, consumed=consumed
            )
