"""Hold out part of each row's entries as the target of a batch, to train and evaluate recommender systems."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from h5chunk.errors import OptionError
from h5chunk.transforms.csr import Entries, scatter
from h5chunk.transforms.segments import (
    Array,
    as_tensor,
    converted,
    library,
    make_csr,
    of_device,
    row_of_each,
    starts_of,
    up_to,
)

MAX_SEED = (1 << 62) - 1
ROUNDING = 1e-9  # added before rounding down, because 0.29 * 100 is 28.999999999999996


@dataclass(frozen=True)
class HoldOut:
    """Split each row's entries into inputs and targets, which a batch then has in place of the rows, as a named tuple.

    ::

        for (rows,) in ChunkLoader(dataset, 500, transforms=[Binarize(4), HoldOut(0.2)]):
            loss = criterion(model(rows.inputs), rows.targets)

    Both have the same shape, and the entries of one are zeros in the other. Transforms of values before
    `HoldOut`, such as `Binarize`, are computed on the whole row, and entries that become zero do not count; transforms
    after it are applied to both inputs and targets. The held-out entries depend only on the seed and on the columns of
    the row: they are the same for any reader, batch size, order, device and number of ranks, and in a copy of the file.

    Parameters
    ----------
    fraction : float, optional
        The fraction of each row's entries to hold out at random, above 0 and below 1. The number of entries is rounded
        down, so that a row with few entries may keep them all.
    last : int, optional
        In place of ``fraction``: hold out this many of the latest entries of each row, but never all of them. The file
        must store the entries in the order of time: ``convert(..., time_order=True)``.
    seed : int
        Seed of the choice of entries.
    each_epoch : bool
        Hold out different entries in each epoch of a `ChunkLoader` or `ChunkSampler`, or whenever a row is read without
        a sampler, for training. False: always the same entries, for validation.

    Raises
    ------
    OptionError
        An argument is invalid; or in a loader, the field is not a matrix, or is not in the order of time.
    """

    fraction: float | None = None
    last: int | None = None
    seed: int = 0
    each_epoch: bool = False

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.last is None):
            raise OptionError(f"HoldOut: fraction is {self.fraction!r} and last is {self.last!r}: pass one of the two")
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise OptionError(f"HoldOut: fraction is {self.fraction!r}: pass a number above 0 and below 1")
        if self.last is not None and (not isinstance(self.last, int) or self.last < 1):
            raise OptionError(f"HoldOut: last is {self.last!r}: pass a whole number of at least 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise OptionError(f"HoldOut: seed is {self.seed!r}: pass a whole number from 0 to {MAX_SEED}")
        if self.last is not None and (self.seed or self.each_epoch):
            raise OptionError("HoldOut: last is not random: leave out seed and each_epoch, or pass fraction")

    def __call__(self, batch: torch.Tensor, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Split a batch, dense or CSR, into inputs and targets of the same layout."""
        shape = len(batch), batch.shape[1]
        if batch.layout == torch.sparse_csr:
            starts = batch.crow_indices()
            parts = self.part(Entries(starts, starts.diff().long(), batch.col_indices(), batch.values()), epoch)
            inputs, targets = (make_csr(part.starts, part.columns, part.values, shape) for part in parts)
            return inputs, targets
        inputs, targets = (torch.empty(shape, dtype=batch.dtype, device=batch.device) for _ in range(2))
        for out, part in zip((inputs, targets), self.part(_entries_of(batch), epoch), strict=True):
            scatter(out, part)
        return inputs, targets

    def part(self, entries: Entries, epoch: int) -> tuple[Entries, Entries]:
        """Split entries into inputs and held-out targets, in their original order."""
        counts, columns, values = map(of_device, entries[1:])
        rows, exists = row_of_each(counts), values != 0
        if not exists.all():
            rows, columns, values = rows[exists], columns[exists], values[exists]
            counts = library(rows).bincount(rows, minlength=len(counts))
        held, num_held = self._held(rows, columns, counts, epoch)
        stays = ~held
        return (
            _entries(counts - num_held, columns[stays], values[stays], entries.values.dtype),
            _entries(num_held, columns[held], values[held], entries.values.dtype),
        )

    def _held(self, rows: Array, columns: Array, counts: Array, epoch: int) -> tuple[Array, Array]:
        """Return whether each entry is held out, and the number of held-out entries per row."""
        ends = counts.cumsum(0)
        position = up_to(len(rows), rows) - (ends - counts)[rows]  # position within the row
        if self.last is not None:
            num_held = (counts - 1).clip(0, self.last)
            return counts[rows] - position <= num_held[rows], num_held
        keys = _keys(rows, columns, ends, counts, _mix_number(self.seed, epoch * self.each_epoch))
        rank = position + 0
        order = rows << 32 | keys & 0xFFFFFFFF
        rank[order.argsort(kind="stable") if isinstance(order, np.ndarray) else order.argsort(stable=True)] = position
        num_held = converted(converted(counts, torch.float64) * self.fraction + ROUNDING, torch.int64)
        return rank < num_held[rows], num_held


def _entries(counts: Array, columns: Array, values: Array, dtype: torch.dtype) -> Entries:
    starts, counts, columns, values = map(as_tensor, (starts_of(counts), counts, columns, values))
    return Entries(starts.to(columns.dtype), counts, columns, values.view(dtype))


def _entries_of(batch: torch.Tensor) -> Entries:
    """Return the entries of a dense batch that are not zero."""
    flat = of_device(batch.reshape(-1))
    positions = flat.nonzero()[0] if isinstance(flat, np.ndarray) else flat.nonzero()[:, 0]
    counts = library(flat).bincount(positions // batch.shape[1], minlength=len(batch))
    return _entries(counts, positions % batch.shape[1], flat[positions], batch.dtype)


def _keys(rows: Array, columns: Array, ends: Array, counts: Array, seed: int) -> Array:
    """Return a random number per entry: a function of the seed, the column, and all columns of the row."""
    mixed = _mix(converted(columns, torch.int64) ^ seed)
    sums = mixed.cumsum(0)  # overflows wrap around, and so do differences of sums
    firsts = (ends - counts)[rows]
    of_rows = sums[ends[rows] - 1] - sums[firsts] + mixed[firsts]
    return _mix(mixed ^ of_rows)


def _mix(numbers: Array) -> Array:
    """Mix the bits of (n,) int64, as the finalizer of SplitMix64 does."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return numbers ^ ((numbers >> 31) & ((1 << 33) - 1))


def _mix_number(*numbers: int) -> int:
    """Combine several numbers into one int64."""
    mixed = np.zeros(1, np.int64)
    for number in numbers:
        mixed = _mix(mixed + number + 1)
    return int(mixed[0])
