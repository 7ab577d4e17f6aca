"""CSR batches: stored rows of a sparse matrix, and their conversion to tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk import native
from h5chunk.attributes import cached_property
from h5chunk.machine import warnings_filtered
from h5chunk.transforms.arithmetic import CsrArithmetic, DenseArithmetic, HostArithmetic, RowArithmetic

NUM_CODES = 256
MAX_INT32 = (1 << 31) - 1
DENSE_BYTES = 4 << 20  # bytes of a batch that one thread makes dense; scripts/LOG.md
Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
Share = Callable[[Callable[[int], None], range], None]  # does work for each part of a range
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        if self.numbers is not None:
            return self.host_starts[self.numbers.host + 1] - self.host_starts[self.numbers.host]
        starts = self.host_starts[self.first : self.first + len(self) + 1]
        return starts[1:] - starts[:-1]

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


@dataclass(frozen=True)
class ValueRule:
    """The rule that converts stored codes to values.

    Stored bytes are looked up in ``table``, (256,). Without a table, the stored numbers are the values or, with a
    ``threshold``, 1 if they reach it, otherwise 0. All entries of a pattern are ``constant``. Then ``steps``,
    which are transforms of values, are applied, and the result is converted to ``dtype``.
    """

    table: np.ndarray | None
    threshold: float | None
    constant: float
    steps: tuple[Any, ...]
    dtype: torch.dtype

    @cached_property
    def divisor(self) -> np.floating[Any] | None:
        """The number d for which code / d is exactly the table's value for every code; None if there is none."""
        if self.table is None or not self.dtype.is_floating_point or not self.table[1]:
            return None
        divisor = (1 / self.table[1]).astype(self.table.dtype)
        same = np.arange(NUM_CODES, dtype=self.table.dtype) / divisor == self.table
        return divisor if same.all() else None

    def applied(self, values: Any, rows: RowArithmetic) -> Any:
        """Apply all steps to values."""
        for step in self.steps:
            values = step.on_values(values, rows)
        return values

    def is_direct(self, rows: CsrRows, dtype: torch.dtype) -> bool:
        """Return whether values need no arithmetic before the steps: they are in a table, constant, or of ``dtype``."""
        return self.threshold is None and (self.table is not None or rows.values is None or rows.values.dtype == dtype)

    def table_of(self, rows: CsrRows, dtype: torch.dtype) -> np.ndarray | None:
        """Return the values of codes, or the constant, in ``dtype``, viewed as integers; None without a table."""
        table = np.array([self.constant]) if rows.values is None else self.table
        if table is not None and dtype not in self._tables:
            self._tables[dtype] = torch.from_numpy(table).to(dtype).view(_SAME_SIZE[dtype.itemsize]).numpy()
        return self._tables.get(dtype)

    @cached_property
    def _tables(self) -> dict[torch.dtype, np.ndarray]:
        return {}

    @property
    def work_dtype(self) -> torch.dtype:
        """The dtype in which values are computed."""
        if self.dtype.is_floating_point and self.dtype != torch.float64:
            return torch.float32
        return self.dtype


class Entries(NamedTuple):
    """The entries of selected rows, as tensors on one device."""

    starts: torch.Tensor  # (rows + 1,) int32 or int64
    counts: torch.Tensor  # (rows,) int64
    columns: torch.Tensor  # (entries,), with the dtype of starts
    values: torch.Tensor  # (entries,)


def entries_of(rows: CsrRows, rule: ValueRule, num_columns: int, allocate: Allocate = fresh) -> Entries:
    """Return the entries of rows in new memory on the rows' device; host memory comes from ``allocate``."""
    if rows.starts.device.type != "cpu":
        return _on_gpu(rows, rule, num_columns)
    counts = rows.host_counts
    dtype = index_dtype(num_columns, int(counts.sum()))
    entries = (_copied if native.available() else _indexed)(rows, rule, counts, dtype, allocate)
    if rule.steps:
        values = rule.applied(entries.values.numpy(), HostArithmetic(counts))
        entries = entries._replace(values=torch.from_numpy(values))
    return entries if entries.values.dtype == rule.dtype else entries._replace(values=entries.values.to(rule.dtype))


def index_dtype(num_columns: int, num_entries: int) -> torch.dtype:
    """Return the dtype of the columns and row starts of a CSR batch."""
    return torch.int32 if max(num_columns - 1, num_entries) <= MAX_INT32 else torch.int64


def dense_values(codes: torch.Tensor, rule: ValueRule) -> torch.Tensor:
    """Return the values of dense rows, (rows, columns), in the rule's dtype."""
    if codes.device.type == "cpu":
        values = torch.from_numpy(_host_values(codes.numpy(), rule))
    else:
        values = _gpu_values(codes, codes.numel(), codes.device, rule).view(codes.shape)
    return rule.applied(values, DenseArithmetic()).to(rule.dtype)


def _copied(rows: CsrRows, rule: ValueRule, counts: np.ndarray, dtype: torch.dtype, allocate: Allocate) -> Entries:
    """Copy entries in native code, before the steps of the rule are applied."""
    kind = rule.work_dtype if rule.steps else rule.dtype
    if is_direct := rule.is_direct(rows, kind):
        source = rows.natively(rule.table_of(rows, kind))
    else:  # values are copied as they are stored, then converted
        assert rows.values is not None
        source, kind = rows.natively(None), rows.values.dtype
    starts, columns, values = _room(allocate, len(counts) + 1, int(counts.sum()), dtype, kind)
    source.copy(rows.host_numbers, starts.itemsize, starts.data_ptr(), columns.data_ptr(), values.data_ptr())
    if not is_direct:
        values = torch.from_numpy(_host_values(values.numpy(), rule))
    return Entries(starts, torch.from_numpy(counts), columns, values)


def _room(
    allocate: Allocate, num_starts: int, total: int, dtype: torch.dtype, kind: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate memory for row starts and columns, of ``dtype``, and for values of type ``kind``, in one call."""
    ends = -(-total * kind.itemsize // 8) * 8, -(-total * kind.itemsize // 8) * 8 + total * dtype.itemsize
    values, columns, starts = allocate((ends[1] + num_starts * dtype.itemsize,), torch.uint8).tensor_split(ends)
    return starts.view(dtype), columns.view(dtype), values.view(kind)[:total]


def _indexed(rows: CsrRows, rule: ValueRule, counts: np.ndarray, dtype: torch.dtype, _allocate: Allocate) -> Entries:
    """Copy entries with NumPy, before the steps of the rule are applied."""
    starts = np.concatenate(([0], np.cumsum(counts)))
    firsts, indices = rows.host_starts[rows.host_numbers], rows.indices.numpy()
    positions: Any = np.repeat(firsts - starts[:-1], counts) + np.arange(starts[-1])
    if rows.numbers is None and len(counts):
        positions = slice(int(firsts[0]), int(firsts[0] + starts[-1]))
    columns = indices[positions].astype(_numpy_dtype(dtype))
    if rows.values is None:
        values = np.full(len(columns), rule.constant, _numpy_dtype(rule.work_dtype))
    else:
        values = np.array(_host_values(rows.values.numpy()[positions], rule))
    return Entries(*map(torch.from_numpy, (starts.astype(columns.dtype), counts, columns, values)))


def _host_values(codes: np.ndarray, rule: ValueRule) -> np.ndarray:
    dtype = _numpy_dtype(rule.work_dtype)
    if rule.divisor is not None:  # five times as fast as looking up the table
        values = codes.astype(dtype)
        return values if rule.divisor == 1 else np.divide(values, rule.divisor, out=values)
    if rule.table is not None:
        return np.take(rule.table, codes)
    return codes.astype(dtype, copy=False) if rule.threshold is None else (codes >= rule.threshold).astype(dtype)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _on_gpu(rows: CsrRows, rule: ValueRule, num_columns: int) -> Entries:
    host, device = rows.host_starts, rows.starts.device
    if rows.numbers is None:
        stop = rows.first + len(rows)
        selected = slice(int(host[rows.first]), int(host[stop]))
        starts = rows.starts[rows.first : stop + 1]
        counts, starts = starts.diff(), starts - int(host[rows.first])
        # the types are converted below, which copies; what keeps its type is copied here, because slots are reused
        indices, codes = rows.indices[selected], None if rows.values is None else rows.values[selected]
        if codes is not None and codes.dtype == rule.work_dtype:
            codes = codes.clone()
        if indices.dtype == index_dtype(num_columns, len(indices)):
            indices = indices.clone()
    else:
        numbers = rows.numbers
        total = int((host[numbers.host + 1] - host[numbers.host]).sum())
        firsts = rows.starts[numbers.on_device]
        counts = rows.starts[numbers.on_device + 1] - firsts
        starts = torch.zeros(len(counts) + 1, dtype=torch.int64, device=device)
        torch.cumsum(counts, 0, out=starts[1:])
        positions = torch.repeat_interleave(firsts - starts[:-1], counts, output_size=total)
        positions += torch.arange(total, device=device)
        indices, codes = _take(rows.indices, positions), None if rows.values is None else _take(rows.values, positions)
    values = rule.applied(_gpu_values(codes, len(indices), device, rule), CsrArithmetic(counts))
    dtype = index_dtype(num_columns, len(indices))
    return Entries(starts.to(dtype), counts, indices.to(dtype), values.to(rule.dtype))


def _gpu_values(codes: torch.Tensor | None, count: int, device: torch.device, rule: ValueRule) -> torch.Tensor:
    if codes is None:
        return torch.full((count,), rule.constant, dtype=rule.work_dtype, device=device)
    if rule.table is not None:
        return torch.from_numpy(rule.table).to(device)[codes.reshape(-1).int()]
    values = codes.reshape(-1)
    if rule.threshold is None:
        return values.to(rule.work_dtype)
    return ((values if values.is_floating_point() else values.double()) >= rule.threshold).to(rule.work_dtype)


def _take(array: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Index an array; torch does not index unsigned integers larger than a byte."""
    return array.view(_SAME_SIZE[array.itemsize])[positions].view(array.dtype)


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
    same = _SAME_SIZE[out.itemsize]  # NumPy has no bfloat16
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


def scatter_natively(out: torch.Tensor, rows: CsrRows, rule: ValueRule, share: Share = alone) -> bool:
    """Do the same as `scatter` in native code, without the GIL; return whether that was possible."""
    if rule.steps or not rule.is_direct(rows, rule.dtype) or not native.available():
        return False
    source, numbers = rows.natively(rule.table_of(rows, rule.dtype)), rows.host_numbers
    dense = out.view(_SAME_SIZE[out.itemsize]).numpy()

    def fill(start: int) -> None:
        part = slice(start, start + step)
        source.make_dense(numbers[part], dense[part])

    step = max(1, DENSE_BYTES // max(1, out.shape[1] * out.itemsize))
    share(fill, range(0, len(numbers), step))
    return True


def make_csr(starts: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Make a sparse CSR tensor, without copies or checks."""
    _silence_beta_warning()
    return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


@cache
def _silence_beta_warning() -> None:
    """Silence torch's warning that CSR tensors are in beta and unchecked; h5chunk's readers have checked them."""
    with warnings_filtered("ignore"):
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)
