"""The entries of some rows of a matrix, as numbers to compute with: on the host by NumPy, on a GPU by torch.

By NumPy there as torch's threads wait for each other, which takes long where others use the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.feed.spaces import CsrRows

NUM_CODES = 256
MAX_INT32 = (1 << 31) - 1
DENSE_BYTES = 4 << 20  # of a part that a thread makes dense; scripts/LOG.md
MapParts = Callable[[Callable[[int], None], Iterable[int]], Iterable[None]]
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Rule:
    """What becomes of what is stored.

    Attributes
    ----------
    table : (256,) array, or None
        What each stored byte stands for; None: the number that it is.
    least : float or None
        Values from here on become 1, others 0; the table has that done already.
    constant : float
        The value of every entry of a pattern.
    l2 : bool
        Divide each row by its Euclidean length, if it has one.
    dtype : torch.dtype
        Of the result.
    """

    table: np.ndarray | None
    least: float | None
    constant: float
    l2: bool
    dtype: torch.dtype

    @cached_property
    def divisor(self) -> np.floating[Any] | None:
        """What gives the table by one division, to the last bit; None if nothing does."""
        if self.table is None or not self.dtype.is_floating_point or not self.table[1]:
            return None
        divisor = (1 / self.table[1]).astype(self.table.dtype)
        same = np.arange(NUM_CODES, dtype=self.table.dtype) / divisor == self.table
        return divisor if same.all() else None

    @property
    def work_dtype(self) -> torch.dtype:
        """What is computed in."""
        if self.dtype.is_floating_point and self.dtype != torch.float64:
            return torch.float32
        return self.dtype


class Entries(NamedTuple):
    """Tensors on one device.

    Attributes
    ----------
    starts : (rows + 1,) int32 or int64
        Where each row begins.
    counts : (rows,) int64
    columns : (entries,) of the dtype of ``starts``
    values : (entries,)
    """

    starts: torch.Tensor
    counts: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor


def entries_of(rows: CsrRows, rule: Rule, num_columns: int) -> Entries:
    """The entries of rows, on their device; what is as it was stored lies where it was."""
    return (_on_host if rows.starts.device.type == "cpu" else _on_gpu)(rows, rule, num_columns)


def values_of(codes: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Values of stored numbers, in the dtype that is computed in."""
    if codes.device.type == "cpu":
        return torch.from_numpy(_host_values(codes.numpy(), rule))
    return _gpu_values(codes, codes.numel(), codes.device, rule).view(codes.shape)


def _on_host(rows: CsrRows, rule: Rule, num_columns: int) -> Entries:
    host = rows.host_starts
    numbers = np.arange(rows.first, rows.first + len(rows)) if rows.numbers is None else rows.numbers.host
    counts = host[numbers + 1] - host[numbers]
    starts = np.concatenate(([0], np.cumsum(counts)))
    indices, codes = rows.indices.numpy(), None if rows.values is None else rows.values.numpy()
    if rows.numbers is None:
        some = slice(int(host[rows.first]), int(host[rows.first + len(rows)]))
        indices, codes = indices[some], None if codes is None else codes[some]
    else:
        places = np.repeat(host[numbers] - starts[:-1], counts) + np.arange(starts[-1])
        indices, codes = indices[places], None if codes is None else codes[places]
    dtype = np.int32 if max(num_columns - 1, int(starts[-1])) <= MAX_INT32 else np.int64
    if codes is None:
        values = np.full(len(indices), rule.constant, _numpy_dtype(rule.work_dtype))
    else:
        values = _host_values(codes, rule)
    if rule.l2:
        squares = np.bincount(np.repeat(np.arange(len(counts)), counts), values.astype(np.float64) ** 2, len(counts))
        factors = np.divide(1, np.sqrt(squares), out=np.zeros(len(counts)), where=squares > 0)
        values = values * np.repeat(factors.astype(values.dtype), counts)
    return Entries(
        torch.from_numpy(starts.astype(dtype)),
        torch.from_numpy(counts),
        torch.from_numpy(indices.astype(dtype, copy=False)),
        torch.from_numpy(values).to(rule.dtype),
    )


def _host_values(codes: np.ndarray, rule: Rule) -> np.ndarray:
    dtype = _numpy_dtype(rule.work_dtype)
    if rule.divisor is not None:  # five times as fast as a look into the table
        values = codes.astype(dtype)
        return values if rule.divisor == 1 else np.divide(values, rule.divisor, out=values)
    if rule.table is not None:
        return np.take(rule.table, codes)
    return codes.astype(dtype, copy=False) if rule.least is None else (codes >= rule.least).astype(dtype)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _on_gpu(rows: CsrRows, rule: Rule, num_columns: int) -> Entries:
    host, device = rows.host_starts, rows.starts.device
    if rows.numbers is None:
        stop = rows.first + len(rows)
        some = slice(int(host[rows.first]), int(host[stop]))
        starts = rows.starts[rows.first : stop + 1]
        counts, starts = starts.diff(), starts - int(host[rows.first])
        indices, codes = rows.indices[some], None if rows.values is None else rows.values[some]
    else:
        numbers = rows.numbers
        total = int((host[numbers.host + 1] - host[numbers.host]).sum())
        firsts = rows.starts[numbers.there]
        counts = rows.starts[numbers.there + 1] - firsts
        starts = torch.zeros(len(counts) + 1, dtype=torch.int64, device=device)
        torch.cumsum(counts, 0, out=starts[1:])
        places = torch.repeat_interleave(firsts - starts[:-1], counts, output_size=total)
        places += torch.arange(total, device=device)
        indices, codes = _take(rows.indices, places), None if rows.values is None else _take(rows.values, places)
    values = _gpu_values(codes, len(indices), device, rule)
    if rule.l2:
        lengths = torch.segment_reduce(values * values, "sum", lengths=counts, unsafe=True).sqrt_()
        factors = torch.where(lengths > 0, 1 / lengths, 0)
        values = values * torch.repeat_interleave(factors, counts, output_size=len(values))
    dtype = torch.int32 if max(num_columns - 1, len(indices)) <= MAX_INT32 else torch.int64
    return Entries(starts.to(dtype), counts, indices.to(dtype), values.to(rule.dtype))


def _gpu_values(codes: torch.Tensor | None, count: int, device: torch.device, rule: Rule) -> torch.Tensor:
    if codes is None:
        return torch.full((count,), rule.constant, dtype=rule.work_dtype, device=device)
    if rule.table is not None:
        return torch.from_numpy(rule.table).to(device)[codes.reshape(-1).int()]
    values = codes.reshape(-1)
    if rule.least is None:
        return values.to(rule.work_dtype)
    return ((values if values.is_floating_point() else values.double()) >= rule.least).to(rule.work_dtype)


def _take(array: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Some entries; torch indexes no unsigned numbers of more than a byte."""
    return array.view(_SAME_SIZE[array.itemsize])[places].view(array.dtype)


def scatter(out: torch.Tensor, entries: Entries, map_parts: MapParts = map) -> None:
    """Make rows dense: ``out``, (rows, columns), is zero but for the entries.

    On the host in parts of rows of about `DENSE_BYTES`, which ``map_parts`` may hand to several threads.
    """
    num_rows, num_columns = out.shape
    if out.device.type != "cpu":
        first = torch.arange(0, num_rows * num_columns, max(1, num_columns), device=out.device)
        places = torch.repeat_interleave(first, entries.counts, output_size=len(entries.columns))
        out.zero_().view(-1)[places.add_(entries.columns)] = entries.values
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
    for _ in map_parts(fill, range(0, num_rows, step)):
        pass
