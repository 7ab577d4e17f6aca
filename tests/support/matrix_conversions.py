"""A sparse source in memory, converted and read back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from support.csr_specification import check_csr_file

from h5chunk.sources.matrix.block import Block, SparseSource
from h5chunk.tools.convert.matrix import convert_matrix
from h5chunk.tools.convert.options import MatrixOptions


@dataclass
class Source(SparseSource):
    """A matrix in memory, given in blocks."""

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray | None
    shape: tuple[int | None, int | None] = (None, None)
    block: int = 1000
    has_ids: bool = False
    path: str = "fake.csv"
    kind: str = "csv"
    row_fields: dict[str, np.ndarray] = field(default_factory=dict)
    categories: dict[str, list[str]] = field(default_factory=dict)
    row_names: np.ndarray | None = None
    column_names: np.ndarray | None = None
    num_bytes: int = 100
    times: np.ndarray | None = None
    time_name: str | None = None

    def identity(self) -> None:
        return None

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        for start in range(0, len(self.rows), self.block):
            part = slice(start, start + self.block)
            values = None if self.values is None else self.values[part]
            times = None if self.times is None else self.times[part]
            yield Block(self.rows[part], self.columns[part], values, times), start * self.num_bytes // len(self.rows)


def run(source: Source, path: Path, *, overwrite: bool = False, dry_run: bool = False, **options: Any) -> Any:
    given = MatrixOptions(**{"duplicates": "sum", **options})
    return convert_matrix(source, path, given, overwrite=overwrite, dry_run=dry_run)


def read_back(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Values, dense, in the order of the file, and ``source_index``; checks all that can be checked of the file."""
    codes = check_csr_file(path)
    with h5py.File(path) as file:
        index = file["h5chunk/source_index"][()]
        assert len(index) == len(set(index.tolist())) == file["h5chunk"].attrs["num_samples"]
        return codes.toarray() / file["X"].attrs["scale"], index
