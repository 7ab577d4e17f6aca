"""Split a packed file of ratings into training and held-out users, as in the Mult-VAE paper (strong generalisation).

The file is read as plain HDF5 with AnnData's CSR layout. Ratings of 4 and more count as likes, and users with fewer
than 5 likes are left out (nothing changes if the file was converted with ``--binarize 4 --min-row-count 5``). A
permutation of the rows with a fixed seed decides which users are held out. The training users
are converted by `h5chunk.convert` to a file in a temporary folder, which takes some seconds for ML-20M. Columns that no
training user has are left out, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np
import torch

import h5chunk
from h5chunk.transforms import HoldOut
from h5chunk.transforms.segments import make_csr

LIKED, LEAST_LIKES = 4.0, 5  # lowest rating of a like, and fewest likes of a user, as in the paper
HELD_OUT = 10_000  # number of users for validation, and for the test, as for ML-20M
LARGEST_SHARE = 10  # at most 1 / LARGEST_SHARE of the users of a small file are held out for each
SPLIT_SEED = 98765  # seed of the authors' code; all runs hold out the same users
TEST_SHARE = 0.2  # the hidden share of a held-out user's likes
CONVERT = "h5chunk convert {} {} --binarize 4 --min-row-count 5"


class DataError(ValueError):
    """Raised if a file does not suit this training."""


@dataclass(frozen=True)
class Rows:
    """A CSR matrix of ones: ``indptr`` (rows + 1,) int64, ``indices`` (entries,) int32."""

    indptr: np.ndarray
    indices: np.ndarray
    num_columns: int

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def row_numbers(self) -> np.ndarray:
        """Return the row of each entry: (entries,) int64."""
        return np.repeat(np.arange(len(self)), np.diff(self.indptr))

    def keep(self, entries: np.ndarray) -> Rows:
        """Return the matrix of the entries where ``entries`` (bool) is true."""
        counts = np.bincount(self.row_numbers[entries], minlength=len(self))
        return Rows(np.concatenate(([0], np.cumsum(counts))), self.indices[entries], self.num_columns)

    def take(self, rows: np.ndarray) -> Rows:
        """Return these rows in this order."""
        counts = np.diff(self.indptr)[rows]
        indptr = np.concatenate(([0], np.cumsum(counts)))
        entries = np.arange(indptr[-1]) + np.repeat(self.indptr[rows] - indptr[:-1], counts)
        return Rows(indptr, self.indices[entries], self.num_columns)

    def dense(
        self, first: int, last: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the rows from ``first`` to before ``last``: (last - first, columns) of zeros and ones."""
        indptr = self.indptr[first : last + 1]
        rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        columns = self.indices[indptr[0] : indptr[-1]]
        x = torch.zeros((len(indptr) - 1, self.num_columns), dtype=dtype, device=device)
        x[torch.from_numpy(rows).to(device), torch.from_numpy(columns).long().to(device)] = 1
        return x


@dataclass(frozen=True)
class HeldOut:
    """Held-out users: the likes that the model sees, and those that it must predict."""

    shown: Rows
    hidden: Rows


@dataclass(frozen=True)
class Split:
    """The data to train, validate and test on.

    Attributes
    ----------
    path : Path
        The packed file of the training users.
    train : Rows
        The rows of that file, in its order.
    validation, test : HeldOut
    """

    path: Path
    train: Rows
    validation: HeldOut
    test: HeldOut

    @property
    def popularity(self) -> np.ndarray:
        """Number of training users who like each column: (columns,) int64."""
        return np.bincount(self.train.indices, minlength=self.train.num_columns)

    def __str__(self) -> str:
        train = self.train
        return (
            f"{len(train):,} users to train on, {train.num_columns:,} columns, {len(train.indices):,} likes; "
            f"{len(self.validation.shown):,} users to validate, {len(self.test.shown):,} to test"
        )


def packed_file(path: Path, say: Any = print) -> Path:
    """Return the file if it is HDF5, otherwise convert it to a file beside it. Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path}: no such file: make one with python scripts/make_ratings.py ratings.csv")
    if h5py.is_hdf5(path):
        return path
    packed = path.with_suffix(".h5")
    command = CONVERT.format(path, packed)
    if not packed.exists():
        say(command)
        say(str(h5chunk.convert(path, packed, binarize=LIKED, min_row_count=LEAST_LIKES)))
    elif packed.stat().st_mtime_ns < path.stat().st_mtime_ns:
        raise DataError(f"{packed} is older than {path}: {command} --overwrite")
    return packed


def read_likes(path: Path) -> Rows:
    """Read the likes of users who have enough of them from a packed file. Raises DataError."""
    with h5py.File(path, "r") as file:
        group = file.get("X")
        encoding = group.attrs.get("encoding-type", b"") if isinstance(group, h5py.Group) else b""
        if encoding not in (b"csr_matrix", "csr_matrix"):
            raise DataError(f"{path} holds no rows of ratings: {CONVERT.format('ratings.csv', 'ml.h5')} makes one")
        indptr, indices = group["indptr"][:].astype(np.int64), group["indices"][:].astype(np.int32)
        rows = Rows(indptr, indices, int(group.attrs["shape"][1]))
        if not group.attrs.get("pattern", 0):
            rows = rows.keep(group["data"][:] / float(group.attrs.get("scale", 1)) >= LIKED)
    return rows.take(np.flatnonzero(np.diff(rows.indptr) >= LEAST_LIKES))


@contextmanager
def split_users(path: Path, held_out: int = HELD_OUT) -> Iterator[Split]:
    """Split a packed file; the file of the training users is removed when the context ends.

    Parameters
    ----------
    path : Path
    held_out : int
        Users for validation, and as many for the test; of a small file at most a tenth each.

    Raises
    ------
    DataError
        The file has too few users.
    """
    likes = read_likes(path)
    held_out = min(held_out, len(likes) // LARGEST_SHARE)
    if not held_out:
        raise DataError(f"{path} has {len(likes)} users with {LEAST_LIKES} likes: it needs at least {LARGEST_SHARE}")
    order = np.random.default_rng(SPLIT_SEED).permutation(len(likes))
    with TemporaryDirectory(dir=path.parent, prefix=".train_vae-") as folder:
        train = Path(folder) / "train.h5"
        columns = pack(likes.take(np.sort(order[2 * held_out :])), train)
        hidden = [hide(likes.take(np.sort(order[n * held_out :][:held_out])), columns, n) for n in (0, 1)]
        yield Split(train, read_likes(train), *hidden)


def pack(likes: Rows, path: Path) -> np.ndarray:
    """Make a packed file of the rows, through SciPy's format, and return its columns: int64."""
    source = path.with_suffix(".npz")
    arrays = {"indptr": likes.indptr, "indices": likes.indices, "data": np.ones(len(likes.indices), np.uint8)}
    np.savez(source, format=np.array(b"csr"), shape=np.array((len(likes), likes.num_columns)), **arrays)
    h5chunk.convert(source, path, min_column_count=1)
    source.unlink()
    with h5py.File(path, "r") as file:
        index = file.get("h5chunk/column_index")
        return np.arange(likes.num_columns) if index is None else index[:]


def hide(likes: Rows, columns: np.ndarray, number: int) -> HeldOut:
    """Hide one fifth of each user's likes, and leave out users with fewer than 5 in these columns.

    Parameters
    ----------
    likes : Rows
        Likes in all columns of the source.
    columns : (num_columns,) int64
        The columns that are trained on.
    number : int
        Number of this set of users, which seeds the choice of hidden likes.
    """
    place = np.full(likes.num_columns, -1, np.int32)
    place[columns] = np.arange(len(columns))
    likes = likes.keep(place[likes.indices] >= 0)
    likes = Rows(likes.indptr, place[likes.indices], len(columns))
    sizes = len(likes), likes.num_columns
    indptr, indices = torch.from_numpy(likes.indptr), torch.from_numpy(likes.indices.astype(np.int64))
    csr = make_csr(indptr, indices, torch.ones(len(indices)), sizes)
    shown, hidden = (
        Rows(part.crow_indices().numpy(), part.col_indices().numpy().astype(np.int32), likes.num_columns)
        for part in HoldOut(TEST_SHARE, seed=number)(csr)
    )
    users = np.flatnonzero(np.diff(hidden.indptr))
    return HeldOut(shown.take(users), hidden.take(users))
