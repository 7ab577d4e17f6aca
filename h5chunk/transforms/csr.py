"""Sparse rows: rows of a stored CSR matrix, their entries, and dense rows made of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk import native
from h5chunk.transforms.segments import (
    SAME_SIZE,
    Array,
    as_tensor,
    converted,
    of_device,
    positions_of,
    starts_of,
    taken,
)
from h5chunk.transforms.values import RowArithmetic, ValueRule, values_of

MAX_INT32 = (1 << 31) - 1
DENSE_BYTES = 4 << 20  # bytes of a batch that one thread makes dense; scripts/LOG.md
CLEARED_BYTES = 400  # clearing a row costs as much as clearing a number in each so many bytes of it; scripts/LOG.md
UNKNOWN = -1  # instead of the number of columns that are not zero
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
Share = Callable[[Callable[[int], None], range], None]  # does work for each part of a range


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor in new memory."""
    return torch.empty(shape, dtype=dtype)


class SampleNumbers(NamedTuple):
    """Sample numbers, (n,) int64, on the host and on the device that holds the samples."""

    host: np.ndarray
    on_device: torch.Tensor

    def part(self, start: int, stop: int) -> SampleNumbers:
        """Return the numbers from ``start`` to ``stop``."""
        return SampleNumbers(self.host[start:stop], self.on_device[start:stop])


class CsrRows:
    """Rows of a CSR matrix on one device: ``count`` stored rows starting at ``first``, or the rows ``numbers``.

    ``starts``, (m + 1,) int64, is the position in ``indices`` and ``values``, (entries,), at which each stored row
    begins; ``host_starts`` is a copy on the host. ``values`` is None for a pattern, whose entries are all equal.
    """

    def __init__(
        self,
        starts: torch.Tensor,
        host_starts: np.ndarray,
        indices: torch.Tensor,
        values: torch.Tensor | None,
        first: int = 0,
        count: int | None = None,
        numbers: SampleNumbers | None = None,
        native_rows: dict[int, native.SparseRows] | None = None,
    ) -> None:
        self._native_rows = {} if native_rows is None else native_rows  # the same for all selections
        self.starts, self.host_starts = starts, host_starts
        self.indices, self.values = indices, values
        self.first, self.numbers = first, numbers
        self._count = len(host_starts) - 1 if count is None else count

    def __len__(self) -> int:
        return self._count

    @property
    def host_numbers(self) -> np.ndarray:
        """The numbers of the selected rows: (n,) int64."""
        return np.arange(self.first, self.first + len(self)) if self.numbers is None else self.numbers.host

    @property
    def host_counts(self) -> np.ndarray:
        """The number of entries of each selected row: (n,) int64."""
        return self._firsts_and_counts(self.host_starts, None if self.numbers is None else self.numbers.host)[1]

    @property
    def host_firsts(self) -> np.ndarray:
        """The position of the first entry of each selected row: (n,) int64."""
        return self._firsts_and_counts(self.host_starts, None if self.numbers is None else self.numbers.host)[0]

    @property
    def firsts_and_counts(self) -> tuple[Array, Array]:
        """`host_firsts` and `host_counts`, or for rows on a GPU, the same there."""
        if self.starts.device.type == "cpu":
            return self.host_firsts, self.host_counts
        return self._firsts_and_counts(self.starts, None if self.numbers is None else self.numbers.on_device)

    def _firsts_and_counts(self, starts: Array, numbers: Array | None) -> tuple[Array, Array]:
        if numbers is not None:
            firsts, stops = starts[numbers], starts[numbers + 1]
        else:
            firsts, stops = (starts[first : first + len(self)] for first in (self.first, self.first + 1))
        return firsts, stops - firsts

    def natively(self, table: np.ndarray | None) -> native.SparseRows:
        """Describe all rows for native code; without a table, codes are the values."""
        if id(table) not in self._native_rows:
            codes = None if self.values is None else self.values.numpy()
            self._native_rows[id(table)] = native.SparseRows(self.host_starts, self.indices.numpy(), codes, table)
        return self._native_rows[id(table)]

    def __getitem__(self, rows: slice) -> CsrRows:
        start, stop, _ = rows.indices(len(self))
        numbers = None if self.numbers is None else self.numbers.part(start, stop)
        first = self.first if numbers is not None else self.first + start
        arrays = self.starts, self.host_starts, self.indices, self.values
        return CsrRows(*arrays, first, max(0, stop - start), numbers, self._native_rows)

    def take(self, numbers: SampleNumbers) -> CsrRows:
        """Select stored rows, in this order, without a copy."""
        arrays = self.starts, self.host_starts, self.indices, self.values
        return CsrRows(*arrays, 0, len(numbers.host), numbers, self._native_rows)

    def to(self, device: torch.device) -> CsrRows:
        """Copy all stored rows, selected or not, to another device."""
        values = None if self.values is None else self.values.to(device)
        return CsrRows(self.starts.to(device), self.host_starts, self.indices.to(device), values)


class Entries(NamedTuple):
    """The entries of selected rows, as tensors on one device."""

    starts: torch.Tensor  # (rows + 1,) int32 or int64
    counts: torch.Tensor  # (rows,) int64
    columns: torch.Tensor  # (entries,), with the dtype of starts
    values: torch.Tensor  # (entries,)


def entries_of(rows: CsrRows, rule: ValueRule, num_columns: int, allocate: Allocate = fresh) -> Entries:
    """Return the entries of rows in new memory on the rows' device; memory for native code comes from ``allocate``."""
    if rows.starts.device.type == "cpu" and native.available():
        entries = _copied(rows, rule, num_columns, allocate)
    else:
        entries = _gathered(rows, rule, num_columns)
    values = entries.values
    if rule.steps:
        values = as_tensor(rule.applied(of_device(values), RowArithmetic(of_device(entries.counts))))
    return entries._replace(values=values.to(rule.dtype))


def index_dtype(num_columns: int, num_entries: int) -> torch.dtype:
    """Return the dtype of the columns and row starts of a CSR batch."""
    return torch.int32 if max(num_columns - 1, num_entries) <= MAX_INT32 else torch.int64


def _copied(rows: CsrRows, rule: ValueRule, num_columns: int, allocate: Allocate) -> Entries:
    """Copy entries in native code, before the steps of the rule are applied."""
    counts = rows.host_counts
    total, kind = int(counts.sum()), rule.work_dtype if rule.steps else rule.dtype
    if is_direct := rule.is_direct(rows.values, kind):
        source = rows.natively(rule.table_of(rows.values, kind))
    else:  # values are copied as they are stored, then converted
        assert rows.values is not None
        source, kind = rows.natively(None), rows.values.dtype
    starts, columns, values = _room(allocate, len(counts) + 1, total, index_dtype(num_columns, total), kind)
    source.copy(rows.host_numbers, starts.itemsize, starts.data_ptr(), columns.data_ptr(), values.data_ptr())
    if not is_direct:
        values = as_tensor(values_of(values.numpy(), rule))
    return Entries(starts, torch.from_numpy(counts), columns, values)


def _gathered(rows: CsrRows, rule: ValueRule, num_columns: int) -> Entries:
    """Gather entries with torch on a GPU, or with NumPy, before the steps of the rule are applied."""
    total, (firsts, counts) = int(rows.host_counts.sum()), rows.firsts_and_counts
    if rows.numbers is None:
        first = int(rows.host_starts[rows.first])
        where: Any = slice(first, first + total)
    else:
        where = positions_of(firsts, counts, total)
    dtype = index_dtype(num_columns, total)
    columns = converted(taken(of_device(rows.indices), where), dtype)
    if rows.values is None:
        values = torch.full((total,), rule.constant, dtype=rule.work_dtype, device=rows.starts.device)
    else:
        values = as_tensor(values_of(taken(of_device(rows.values), where), rule))
    starts = converted(starts_of(counts), dtype)
    return Entries(as_tensor(starts), as_tensor(counts), as_tensor(columns), values)


def _room(
    allocate: Allocate, num_starts: int, total: int, dtype: torch.dtype, kind: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate memory for row starts and columns, of ``dtype``, and for values of type ``kind``, in one call."""
    ends = -(-total * kind.itemsize // 8) * 8, -(-total * kind.itemsize // 8) * 8 + total * dtype.itemsize
    values, columns, starts = allocate((ends[1] + num_starts * dtype.itemsize,), torch.uint8).tensor_split(ends)
    return starts.view(dtype), columns.view(dtype), values.view(kind)[:total]


def alone(work: Callable[[int], None], parts: range) -> None:
    """Do work for each part in the calling thread."""
    for part in parts:
        work(part)


def scatter(out: torch.Tensor, entries: Entries, share: Share = alone) -> None:
    """Make rows dense: ``out``, (rows, columns), is zero except at the entries.

    On the host this is done in parts of about `DENSE_BYTES`, which ``share`` may spread over several threads.
    """
    num_rows, num_columns = out.shape
    if out.device.type != "cpu":
        first = torch.arange(0, num_rows * num_columns, max(1, num_columns), device=out.device)
        positions = torch.repeat_interleave(first, entries.counts, output_size=len(entries.columns))
        out.zero_().view(-1)[positions.add_(entries.columns)] = entries.values
        return
    same = SAME_SIZE[out.itemsize]  # NumPy has no bfloat16
    rows, values = out.view(same).numpy(), entries.values.view(same).numpy()
    starts, counts, columns = entries.starts.numpy(), entries.counts.numpy(), entries.columns.numpy()

    def fill(start: int) -> None:
        part = slice(start, start + step)
        some = slice(int(starts[start]), int(starts[min(start + step, num_rows)]))
        flat = rows[part].reshape(-1)
        flat[:] = 0
        flat[np.repeat(np.arange(len(counts[part])) * num_columns, counts[part]) + columns[some]] = values[some]

    step = max(1, DENSE_BYTES // max(1, num_columns * out.itemsize))
    share(fill, range(0, num_rows, step))


class Filled:
    """The entries of the last dense batch. If the next batch gets its memory, only these are cleared.

    The memory is another one unless batches are lent. The last batch must still exist, and torch's count of its changes
    must be as before. Changes through NumPy, DLPack or ``.data`` are not counted: native code looks at a part of each
    row.
    """

    def __init__(self) -> None:
        self._batch: weakref.ref[torch.Tensor] | None = None
        self._address = self._version = 0
        self._columns = np.empty((0, 0), np.int32)  # for each row as in `native.SparseRows.make_dense`

    def columns_of(self, out: torch.Tensor) -> np.ndarray | None:
        """Return the columns of each row of ``out`` that are not zero, or None if they are not worth keeping."""
        most = out.shape[1] * out.itemsize // CLEARED_BYTES
        if out.data_ptr() != self._address or not 0 < most < out.shape[1] <= MAX_INT32 or out.is_inference():
            return None
        if self._columns.shape != (len(out), 1 + most):
            self._columns = np.full((len(out), 1 + most), UNKNOWN, np.int32)
        last = None if self._batch is None else self._batch()
        if last is None or last.shape != out.shape or last.dtype != out.dtype or last._version != self._version:
            self._columns[:, 0] = UNKNOWN
        return self._columns

    def keep(self, out: torch.Tensor) -> None:
        """Remember the batch that was filled with the columns."""
        self._address = out.data_ptr()
        if not out.is_inference():
            self._batch, self._version = weakref.ref(out), out._version

    def __reduce__(self) -> tuple[type[Filled], tuple[()]]:
        return Filled, ()  # in other processes, there is no last batch


def scatter_natively(
    out: torch.Tensor, rows: CsrRows, rule: ValueRule, share: Share = alone, filled: Filled | None = None
) -> bool:
    """Do the same as `scatter` in native code, without the GIL; return whether that was possible."""
    if rule.steps or not rule.is_direct(rows.values, rule.dtype) or not native.available():
        return False
    source, numbers = rows.natively(rule.table_of(rows.values, rule.dtype)), rows.host_numbers
    dense = out.view(SAME_SIZE[out.itemsize]).numpy()
    columns = None if filled is None else filled.columns_of(out)

    def fill(start: int) -> None:
        part = slice(start, start + step)
        source.make_dense(numbers[part], dense[part], None if columns is None else columns[part])

    step = max(1, DENSE_BYTES // max(1, out.shape[1] * out.itemsize))
    share(fill, range(0, len(numbers), step))
    if filled is not None:
        filled.keep(out)
    return True
