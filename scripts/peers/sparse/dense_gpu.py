"""Ways to make a batch of rows dense on a GPU, for `bench_dense_gpu.py`: h5chunk's kernel, torch, and the host.

The first result of each way is compared with the host's result for the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from h5chunk.transforms.compiled import DenseKernel
from h5chunk.transforms.csr import (
    CsrRows,
    Entries,
    SampleNumbers,
    entries_of,
    scatter,
)
from h5chunk.transforms.segments import make_csr
from h5chunk.transforms.values import L2, NUM_CODES, ValueRule
from peers.sparse.matrix import Source

Make = Callable[[int], torch.Tensor]  # makes batch i, or several batches at once


class Way(NamedTuple):
    """A way to make batches: its function, its output dtype, batches per call, and whether it runs on the host."""

    make: Make
    dtype: torch.dtype = torch.float32
    together: int = 1
    by_host: bool = False


def our_dense(kernel: DenseKernel | None, rows: CsrRows, rule: ValueRule, out: torch.Tensor) -> torch.Tensor:
    """Make rows dense as the loader does: with its kernel, or with torch if there is no kernel."""
    if kernel is None or not kernel(rows, out):
        scatter(out, entries_of(rows, rule, out.shape[1]))
    return out


def rule_of(dtype: torch.dtype, l2: bool = False) -> ValueRule:
    """Return the loader's rule for codes that equal the values."""
    return ValueRule(np.arange(NUM_CODES, dtype=np.float32), None, 1.0, (L2(),) if l2 else (), dtype)


class Case:
    """The matrix on the host and on the device, and memory for batches that take turns.

    Parameters
    ----------
    source : Source
    device : torch.device
    batch_size : int
    buffers_bytes : int
        Size of that memory.
    """

    def __init__(self, source: Source, device: torch.device, batch_size: int, buffers_bytes: int) -> None:
        self.device, self.batch_size, self.num_columns = device, batch_size, source.num_columns
        starts, indices, values = (torch.from_numpy(np.array(source.array(name))) for name in source.PARTS)
        self.host = CsrRows(starts, starts.numpy(), indices, values)
        self.rows = self.host.to(device)
        order = np.random.default_rng(source.seed).permutation(source.num_rows)
        self.shuffled = self.rows.take(SampleNumbers(order, torch.from_numpy(order).to(device)))
        self.num_batches = source.num_rows // batch_size
        self.num_buffers = max(2, buffers_bytes // (batch_size * self.num_columns * 4))
        shape = (self.num_buffers * batch_size, self.num_columns)
        self.memory = {
            dtype: torch.empty(shape, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16)
        }

    def out(self, number: int, dtype: torch.dtype = torch.float32, together: int = 1) -> torch.Tensor:
        """Return the output memory of the next batches."""
        place = number * together % (self.num_buffers - together + 1)
        return self.memory[dtype][place * self.batch_size : (place + together) * self.batch_size]

    def span(self, number: int, together: int = 1) -> slice:
        """Return the rows of the next batches."""
        start = number * together % (self.num_batches - together + 1) * self.batch_size
        return slice(start, start + together * self.batch_size)

    def kernel(self, rows: CsrRows, rule: ValueRule) -> DenseKernel | None:
        """Return the kernel for these rows, or None if the device has none."""
        if not DenseKernel.suits(self.device, rule.dtype):
            return None
        starts, values = np.array([0, 1]), None if rows.values is None else rows.values[:1]
        like = CsrRows(torch.from_numpy(starts).to(self.device), starts, rows.indices[:1], values)
        kernel = DenseKernel(lambda: like, self.num_columns, rule, l2=bool(rule.steps))
        if not kernel.wait():
            raise RuntimeError("the kernel could not be compiled")
        return kernel

    def check(self, name: str, made: torch.Tensor, rows: CsrRows, rule: ValueRule) -> None:
        """Raise RuntimeError unless a batch equals the host's result for the same rows."""
        values = None if rows.values is None else self.host.values
        numbers = np.arange(rows.first, rows.first + len(rows)) if rows.numbers is None else rows.numbers.host
        arrays = self.host.starts, self.host.host_starts, self.host.indices, values
        same = CsrRows(*arrays).take(SampleNumbers(numbers, torch.from_numpy(numbers)))
        expected = torch.empty(made.shape, dtype=rule.dtype)
        scatter(expected, entries_of(same, rule, self.num_columns))
        if not torch.allclose(made.cpu(), expected, rtol=1e-6 if rule.steps else 0, atol=0):
            raise RuntimeError(f"{name}: a batch is wrong")


def our_ways(case: Case, together: int) -> dict[str, Way]:
    """Return h5chunk's ways, by name."""
    ways: dict[str, Way] = {}
    pattern = CsrRows(case.rows.starts, case.rows.host_starts, case.rows.indices, None)

    def add(name: str, rows: CsrRows, dtype: torch.dtype = torch.float32, l2: bool = False, count: int = 1) -> None:
        rule = rule_of(dtype, l2)
        kernel = case.kernel(rows, rule)

        def make(number: int) -> torch.Tensor:
            return our_dense(kernel, rows[case.span(number, count)], rule, case.out(number, dtype, count))

        case.check(name, make(1), rows[case.span(1, count)], rule)
        ways[name] = Way(make, dtype, count)

    add("ours", case.rows)
    add("ours, shuffled rows", case.shuffled)
    add(f"ours, {together} together", case.rows, count=together)
    add(f"ours, {together} together, shuffled", case.shuffled, count=together)
    add("ours, bf16", case.rows, torch.bfloat16)
    add("ours, pattern", pattern)
    add("ours, l2", case.rows, l2=True)
    return ways


def other_ways(case: Case) -> dict[str, Way]:
    """Return the ways of torch, and of SciPy if it is installed."""
    rule = rule_of(torch.float32)
    num = min(case.num_batches, case.num_buffers)
    there = [entries_of(case.rows[case.span(number)], rule, case.num_columns) for number in range(num)]
    ways = {"torch, indexing": Way(indexing(case, rule))}
    ways["torch, indexing, positions there"] = Way(indexing_there(case, there))
    shape = (case.batch_size, case.num_columns)
    sparse = [make_csr(each.starts, each.columns, each.values, shape) for each in there]
    ways["torch, to_dense()"] = Way(lambda number: sparse[number % num].to_dense())
    try:
        ways["host, toarray() and copy"] = Way(on_host(case), by_host=True)
    except ImportError:
        print("SciPy is not installed, so toarray() is skipped")
    for name, way in ways.items():
        case.check(name, way.make(1), case.rows[case.span(1)], rule)
    fill = Way(lambda number: case.out(number).fill_(1))
    return {"fill_": fill, "zero_": Way(lambda number: case.out(number).zero_()), **ways}


def indexing(case: Case, rule: ValueRule) -> Make:
    """Zero the batch, and put the values at positions that are computed from the stored rows."""

    def make(number: int) -> torch.Tensor:
        out = case.out(number)
        scatter(out, entries_of(case.rows[case.span(number)], rule, case.num_columns))
        return out

    return make


def indexing_there(case: Case, there: list[Entries]) -> Make:
    """Zero the batch, and put the values at positions that were computed before."""
    first = torch.arange(0, case.batch_size * case.num_columns, case.num_columns, device=case.device)
    places = [torch.repeat_interleave(first, each.counts) + each.columns for each in there]

    def make(number: int) -> torch.Tensor:
        out = case.out(number)
        out.zero_().view(-1)[places[number % len(there)]] = there[number % len(there)].values
        return out

    return make


def on_host(case: Case) -> Make:
    """Make rows dense with SciPy's toarray(), and copy them to the device."""
    import scipy.sparse

    assert case.host.values is not None
    parts = (case.host.values.numpy().astype(np.float32), case.host.indices.numpy().astype(np.int32))
    matrix = scipy.sparse.csr_matrix((*parts, case.host.host_starts), (len(case.host), case.num_columns))

    def make(number: int) -> torch.Tensor:
        return case.out(number).copy_(torch.from_numpy(matrix[case.span(number)].toarray()))

    return make
