"""A sparse matrix with its rows and columns swapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from h5chunk.sources.matrix.block import Block, SparseSource


class Transposed(SparseSource):
    """The transpose of a source; its row fields are left out, as they belong to columns now."""

    def __init__(self, source: SparseSource) -> None:
        self._source = source
        self.path, self.kind, self.num_bytes = source.path, source.kind, source.num_bytes
        self.has_ids, self.time_name = source.has_ids, source.time_name
        self.shape, self.axes = source.shape[::-1], source.axes[::-1]
        self.row_names, self.column_names = source.column_names, source.row_names

    def files(self) -> Sequence[str]:
        return self._source.files()

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        for block, done in self._source.blocks(max_bytes):
            yield Block(block.columns, block.rows, block.values, block.times, block.first_line), done
