"""Make a ratings matrix like MovieLens-20M, from planted tastes that a model can learn.

    python scripts/make_ratings.py ratings.csv                                    # 138,493 x 26,744, 20 million ratings
    python scripts/make_ratings.py small.npz --rows 5000 --columns 2000 --ratings 400000

A .csv has the format of MovieLens' ratings.csv (userId,movieId,rating,timestamp; arbitrary ids), a .npz is SciPy's CSR
matrix. Prints the size of the matrix, the ratings per row and column, and the popularity of columns.

The number of ratings of a user is lognormal, at least 20; the popularity of columns follows a power law that levels off
for the most popular ones. The choice of columns and the ratings come from planted factors: every column belongs to a
few of 32 genres, and every user likes a few genres. If users rate a large part of all columns, little can be learned,
because everybody rates the popular ones. Equal arguments give equal bytes on one machine (on others the last bit of a
matrix product may differ).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

LEAST = 20  # minimum number of ratings per user, as in ML-20M
GENRES = 32
FEW = 0.03  # Dirichlet parameter: one or two genres of a user or column have most of the weight
LEAST_SHARE = 1e-6  # smaller values have denormal products, which are slow to compute
OTHERWISE = 0.15  # weight of ratings that depend only on popularity
BLOCK_ENTRIES = 12 << 20  # users x columns that are drawn together
LIKED = 4.0  # the lowest rating that the summary counts as liked
FIRST_S, LAST_S = 1_000_000_000, 1_425_000_000  # range of the timestamps: ten digits
USER_S = 30 * 86_400  # time span of a user's ratings
HEADER = b"userId,movieId,rating,timestamp\n"


class RatingsError(ValueError):
    """Raised if a ratings matrix of this size is impossible."""


@dataclass(frozen=True)
class Planted:
    """The planted factors: users' tastes and columns' genres.

    Attributes
    ----------
    counts : (rows,) int64
        Ratings of each user.
    tastes : (rows, GENRES) float32
        How much a user likes each genre: sums to 1.
    genres : (columns, GENRES) float32
        How much a column belongs to each genre: sums to 1.
    popularity : (columns,) float32
        Sums to 1.
    """

    counts: np.ndarray
    tastes: np.ndarray
    genres: np.ndarray
    popularity: np.ndarray


@dataclass(frozen=True)
class Block:
    """The ratings of some users: ``counts`` (users,), and ``columns`` and ``codes`` (2 x rating) for each entry."""

    first_row: int
    counts: np.ndarray
    columns: np.ndarray
    codes: np.ndarray


def check(num_rows: int, num_columns: int, num_ratings: int) -> None:
    """Raise RatingsError unless each user can have from 20 ratings to half of the columns."""
    if num_rows < 1:
        raise RatingsError(f"--rows is {num_rows}: give at least 1")
    if num_columns < 2 * LEAST:
        raise RatingsError(f"--columns is {num_columns}: give at least {2 * LEAST}, as users rate at most half")
    least, most = num_rows * LEAST, num_rows * (num_columns // 2)
    if not least <= num_ratings <= most:
        raise RatingsError(
            f"--ratings is {num_ratings}, but {num_rows} users rate from {LEAST} to {num_columns // 2} of "
            f"{num_columns} columns each: give {least} to {most}, or change --rows or --columns"
        )


def draw_counts(rng: np.random.Generator, num_rows: int, num_columns: int, num_ratings: int) -> np.ndarray:
    """Draw the number of ratings of each user, (rows,) int64, lognormal, with the sum ``num_ratings``."""
    weights = rng.lognormal(0, 1.37, num_rows)  # ML-20M: mean 144, median 68, maximum 9254

    def counts(factor: float) -> np.ndarray:
        return np.minimum(LEAST + (factor * weights).astype(np.int64), num_columns // 2)

    low, high = 0.0, float(num_columns / weights.min())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if counts(middle).sum() <= num_ratings else (low, middle)
    found = counts(low)
    while missing := num_ratings - int(found.sum()):
        room = rng.permutation(np.flatnonzero(found < num_columns // 2))
        found[room[:missing]] += 1
    return found


def plant(num_rows: int, num_columns: int, num_ratings: int, seed: int) -> Planted:
    check(num_rows, num_columns, num_ratings)
    rng = np.random.default_rng([seed, 0])
    counts = draw_counts(rng, num_rows, num_columns, num_ratings)
    ranks = rng.permutation(num_columns)
    popularity = (ranks + 0.006 * num_columns) ** -2.2  # the first in 41 % of users, rank 1000 in 3 %; ML-20M: 48, 3.6
    tastes, genres = (rng.dirichlet(np.full(GENRES, FEW), size) for size in (num_rows, num_columns))
    for shares in (tastes, genres):
        shares[shares < LEAST_SHARE] = 0
    return Planted(
        counts,
        tastes.astype(np.float32),
        genres.astype(np.float32),
        (popularity / popularity.sum()).astype(np.float32),
    )


def draw_blocks(planted: Planted, seed: int) -> Iterator[Block]:
    """Draw the ratings in blocks of users. Columns ascend within a user, without duplicates."""
    num_rows, num_columns = len(planted.counts), len(planted.popularity)
    size = max(1, BLOCK_ENTRIES // num_columns)
    quality = np.random.default_rng([seed, 1]).normal(0, 0.4, num_columns).astype(np.float32)
    for first in range(0, num_rows, size):
        rng = np.random.default_rng([seed, 2, first])
        rows = slice(first, min(first + size, num_rows))
        counts, tastes = planted.counts[rows], planted.tastes[rows]
        likes = tastes @ planted.genres.T  # 0 to 1, 1 / GENRES on average
        columns = draw_columns(rng, (OTHERWISE / GENRES + likes) * planted.popularity, counts)
        likes = np.take_along_axis(likes.ravel(), np.repeat(np.arange(len(counts)) * num_columns, counts) + columns, 0)
        mean = np.repeat(rng.normal(3.6, 0.4, len(counts)), counts) + quality[columns] + 1.2 * np.minimum(likes, 0.6)
        values = rng.normal(mean, 0.75)
        yield Block(first, counts, columns, np.clip(np.rint(2 * values), 1, 10).astype(np.uint8))


def draw_columns(rng: np.random.Generator, weights: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Draw columns for each row, by weight and without replacement; (counts.sum(),) int64.

    Taking the smallest ``counts[i]`` of exponential times over weights gives the same distribution.

    Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006.
    """
    times = rng.standard_exponential(weights.shape, np.float32)
    times /= weights
    found = []
    for row, count in zip(times, counts.tolist(), strict=True):
        last = np.partition(row, count - 1)[count - 1]
        found.append(np.flatnonzero(row <= last)[:count])  # among equal times, take the first columns
    return np.concatenate(found)


# --- files -----------------------------------------------------------------------------------------------------------


def arbitrary_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw ids that are neither contiguous nor ordered: (count,) int64."""
    return rng.permutation(np.sort(rng.choice(5 * count, count, replace=False)) + 1)


def texts(values: np.ndarray, after: str = ",") -> np.ndarray:
    """Return the numbers as bytes of fixed length, padded with NUL bytes, each followed by ``after``."""
    return np.array([f"{value}{after}".encode() for value in values.tolist()])


class CsvWriter:
    """Write blocks as lines of MovieLens' ratings.csv, with users in the order of their ids."""

    def __init__(self, path: Path, planted: Planted, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 3])
        self._users = texts(np.sort(arbitrary_ids(self._rng, len(planted.counts))))
        self._movies = texts(arbitrary_ids(self._rng, len(planted.popularity)))
        self._ratings = texts(np.arange(11) / 2)
        self._highs = texts(np.arange(100_000), "")
        self._lows = np.array([f"{value:05d}\n".encode() for value in range(100_000)])
        self._file = path.open("wb")
        self._file.write(HEADER)

    def write(self, block: Block) -> None:
        """Remove the padding, and write one line per rating."""
        rows = np.repeat(np.arange(len(block.counts)), block.counts)
        starts = self._rng.integers(FIRST_S, LAST_S, len(block.counts))
        times = starts[rows] + self._rng.integers(0, USER_S, len(rows))
        parts = (
            self._users[block.first_row + rows],
            self._movies[block.columns],
            self._ratings[block.codes],
            self._highs[times // 100_000],
            self._lows[times % 100_000],
        )
        lines = np.empty(len(rows), [(f"part{i}", part.dtype) for i, part in enumerate(parts)])
        for i, part in enumerate(parts):
            lines[f"part{i}"] = part
        self._file.write(lines.tobytes().translate(None, b"\0"))

    def finish(self) -> None:
        """Do nothing: all lines are written."""

    def close(self) -> None:
        self._file.close()


class NpzWriter:
    """Collect blocks, and write them as `scipy.sparse.save_npz` does."""

    def __init__(self, path: Path, planted: Planted, seed: int) -> None:
        del seed
        num_entries = int(planted.counts.sum())
        self._file = path.open("wb")
        self._shape = (len(planted.counts), len(planted.popularity))
        self._indptr = np.concatenate(([0], np.cumsum(planted.counts)))
        self._indices, self._values = np.empty(num_entries, np.int32), np.empty(num_entries, np.float32)

    def write(self, block: Block) -> None:
        first = self._indptr[block.first_row]
        place = slice(first, first + len(block.columns))
        self._indices[place], self._values[place] = block.columns, block.codes / np.float32(2)

    def finish(self) -> None:
        indptr = self._indptr.astype(np.int32 if len(self._indices) < 2**31 else np.int64)
        arrays = {"indices": self._indices, "indptr": indptr, "data": self._values}
        np.savez(self._file, format=np.array(b"csr"), shape=np.array(self._shape), **arrays)

    def close(self) -> None:
        self._file.close()


WRITERS = {".csv": CsvWriter, ".npz": NpzWriter}


def make_ratings(path: Path, num_rows: int, num_columns: int, num_ratings: int, seed: int) -> str:
    """Make the file, which gets its name once it is complete, and return its description. Raises RatingsError."""
    if path.suffix not in WRITERS:
        raise RatingsError(f"{path} ends in {path.suffix or 'nothing'}: name it {' or '.join(WRITERS)}")
    if not path.resolve().parent.is_dir():
        raise RatingsError(f"there is no folder {path.resolve().parent}: make it first")
    planted = plant(num_rows, num_columns, num_ratings, seed)
    column_counts, code_counts = np.zeros(num_columns, np.int64), np.zeros(11, np.int64)
    part = path.with_name(f".{path.name}.part")
    writer = WRITERS[path.suffix](part, planted, seed)
    try:
        with tqdm(total=num_ratings, unit=" ratings", unit_scale=True, disable=None, leave=False) as bar:
            for block in draw_blocks(planted, seed):
                writer.write(block)
                column_counts += np.bincount(block.columns, minlength=num_columns)
                code_counts += np.bincount(block.codes, minlength=11)
                bar.update(len(block.columns))
        writer.finish()
        writer.close()
        part.replace(path)
    finally:
        writer.close()
        with suppress(FileNotFoundError):
            os.unlink(part)
    return describe(planted.counts, column_counts, code_counts)


def describe(row_counts: np.ndarray, column_counts: np.ndarray, code_counts: np.ndarray) -> str:
    """Describe a matrix: its size, ratings per row and column, and popularity."""
    num_rows, num_columns, total = len(row_counts), len(column_counts), int(row_counts.sum())
    shares = np.cumsum(np.sort(column_counts)[::-1]) / total
    share = {percent: shares[max(1, num_columns * percent // 100) - 1] for percent in (1, 10)}
    liked = code_counts[int(2 * LIKED) :].sum() / total

    def spread(counts: np.ndarray) -> str:
        return f"{counts.min():,} to {counts.max():,}, median {int(np.median(counts)):,}"

    return (
        f"{num_rows:,} x {num_columns:,}, {total:,} ratings ({total / num_rows / num_columns:.2%}), "
        f"{liked:.0%} of them {LIKED:g} or better\n"
        f"of a user: {spread(row_counts)}\n"
        f"of a column: {spread(column_counts)}; {int((column_counts == 0).sum()):,} have none; "
        f"the most popular 1 % have {share[1]:.0%} of all, 10 % have {share[10]:.0%}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the .csv or .npz to make; an existing file is replaced")
    parser.add_argument("--rows", type=int, default=138_493, help="users (%(default)s)")
    parser.add_argument("--columns", type=int, default=26_744, help="movies (%(default)s)")
    parser.add_argument("--ratings", type=int, default=20_000_000, help="ratings in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        text = make_ratings(args.path, args.rows, args.columns, args.ratings, args.seed)
    except (RatingsError, OSError) as error:
        parser.error(str(error))
    print(f"{args.path}: {text}")


if __name__ == "__main__":
    main()
