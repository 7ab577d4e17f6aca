"""The matrix that all contenders pack: small counts, columns from a power law, rows of equal or lognormal length."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

BLOCK = 5000  # rows that are drawn at a time
EXPONENT, OFFSET = 0.8, 20  # the weight of a column is (rank + OFFSET) ** -EXPONENT
SIGMA = 0.6  # standard deviation of the logarithm of lognormal lengths
COUNT_SHARE = 0.4  # parameter of the geometric distribution of values
MAX_WEIGHT = 1 << 31


@dataclass(frozen=True)
class Source:
    """A matrix in a folder of NumPy files, which are made once."""

    folder: str
    num_rows: int
    num_columns: int
    entries_per_row: int
    lengths: str = "equal"
    seed: int = 0
    PARTS: ClassVar = ("indptr", "indices", "values")

    @property
    def name(self) -> str:
        return f"{self.num_rows}x{self.num_columns}-{self.entries_per_row}-{self.lengths}-{self.seed}"

    @property
    def path(self) -> Path:
        return Path(self.folder) / f"source-{self.name}"

    def array(self, name: str) -> np.ndarray:
        return np.load(self.path / f"{name}.npy", mmap_mode="r")

    @cached_property
    def indptr(self) -> np.ndarray:
        """Row starts: int64 (num_rows + 1,)."""
        return np.array(self.array("indptr"))

    @property
    def indices(self) -> np.ndarray:
        """Columns, in the smallest unsigned type, as a memory map: (entries,), ascending within a row."""
        return self.array("indices")

    @property
    def values(self) -> np.ndarray:
        """Values, as a memory map: uint8 (entries,)."""
        return self.array("values")

    def matrix(self, dtype: Any = np.uint8) -> Any:
        """Return the matrix as a scipy.sparse.csr_matrix in memory, with values of this type."""
        import scipy.sparse

        parts = (self.values.astype(dtype), self.indices.astype(np.int32), self.indptr)
        return scipy.sparse.csr_matrix(parts, shape=(self.num_rows, self.num_columns))

    def order(self, epoch: int) -> np.ndarray:
        """Return a random permutation of the rows: int64 (num_rows,)."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)

    def batches(self, epoch: int, batch_size: int) -> list[np.ndarray]:
        """Split the order into batches. The last one may be smaller."""
        order = self.order(epoch)
        return [order[start : start + batch_size] for start in range(0, self.num_rows, batch_size)]

    def weights(self) -> np.ndarray:
        """Weights of the columns in checksums: int64 (num_columns,)."""
        return np.random.default_rng([self.seed, 1 << 20]).integers(1, MAX_WEIGHT, self.num_columns)

    def shuffled(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return indptr, indices and values with permuted rows, as in a file that was shuffled once."""
        order = np.random.default_rng([self.seed, 1 << 21]).permutation(self.num_rows)
        counts = np.diff(self.indptr)[order]
        indptr = np.concatenate(([0], np.cumsum(counts)))
        places = np.arange(indptr[-1]) + np.repeat(self.indptr[order] - indptr[:-1], counts)
        return indptr, self.indices[places], self.values[places]

    def fields(self) -> dict[str, Any]:
        """Return the arguments that create the same source in another process."""
        return asdict(self)


def make_source(source: Source) -> None:
    """Draw the matrix unless its files exist."""
    if source.path.exists():
        return
    part = source.path.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(source.seed)
    counts = draw_lengths(rng, source)
    shares = (np.arange(source.num_columns) + OFFSET) ** -EXPONENT
    cumulative = np.cumsum(rng.permutation(shares / shares.sum()))
    blocks = [counts[start : start + BLOCK] for start in range(0, source.num_rows, BLOCK)]
    columns = np.concatenate([draw_columns(rng, block, cumulative) for block in blocks])
    values = np.minimum(rng.geometric(COUNT_SHARE, len(columns)), 255).astype(np.uint8)
    np.save(part / "indptr.npy", np.concatenate(([0], np.cumsum(counts))))
    np.save(part / "indices.npy", columns.astype(np.min_scalar_type(source.num_columns - 1)))
    np.save(part / "values.npy", values)
    np.save(part / "checksums.npy", source_checksums(source, counts, columns, values))
    part.rename(source.path)


def source_checksums(source: Source, counts: np.ndarray, columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the checksums of all rows, computed in blocks: int64 (num_rows,)."""
    weights, indptr, found = source.weights(), np.concatenate(([0], np.cumsum(counts))), []
    for first in range(0, source.num_rows, BLOCK):
        pointers = indptr[first : first + BLOCK + 1]
        span = slice(pointers[0], pointers[-1])
        found.append(row_checksums(pointers - pointers[0], columns[span], values[span], weights))
    return np.concatenate(found)


def row_checksums(indptr: np.ndarray, columns: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return for each row the sum of values times column weights: int64 (rows,).

    >>> row_checksums(np.array([0, 2, 2, 3]), np.array([0, 1, 1]), np.array([3.0, 1, 2]), np.array([10, 100]))
    array([130,   0, 200])

    Raises
    ------
    ValueError
        A value is not a whole number.
    """
    codes = values.astype(np.int64)
    if not np.array_equal(codes, values):
        raise ValueError("a value is not a whole number")
    return np.diff(np.concatenate(([0], np.cumsum(codes * weights[columns])))[indptr])


def draw_lengths(rng: np.random.Generator, source: Source) -> np.ndarray:
    """Draw the number of entries of each row: int64 (num_rows,), at most a quarter of the columns."""
    most = max(1, source.num_columns // 4)
    if source.lengths == "equal":
        return np.full(source.num_rows, min(source.entries_per_row, most))
    middle = np.log(source.entries_per_row) - SIGMA**2 / 2
    return np.clip(np.rint(rng.lognormal(middle, SIGMA, source.num_rows)), 0, most).astype(np.int64)


def draw_columns(rng: np.random.Generator, counts: np.ndarray, cumulative: np.ndarray) -> np.ndarray:
    """Draw ``counts[i]`` distinct columns for row i, in ascending order: int64 (sum of counts,)."""
    num_columns = len(cumulative)
    done = np.empty(0, np.int64)  # of rows that are complete; a key is row * num_columns + column
    keys, missing = np.empty(0, np.int64), counts.copy()
    while missing.any():
        rows = np.repeat(np.arange(len(counts)), missing)
        drawn = np.minimum(np.searchsorted(cumulative, rng.random(len(rows))), num_columns - 1)
        keys = np.unique(np.concatenate((keys, rows * num_columns + drawn)))
        have = np.bincount(keys // num_columns, minlength=len(counts))
        missing = np.where(missing > 0, counts - have, 0)
        open_keys = missing[keys // num_columns] > 0
        done, keys = np.concatenate((done, keys[~open_keys])), keys[open_keys]
    return np.sort(done) % num_columns
