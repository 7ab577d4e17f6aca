"""Arrays of rows that differ in length, one after another: the entries of a matrix, or the steps of series.

All functions take arrays of NumPy, on the host, or tensors, on a GPU, and return the same. On the host, NumPy computes
in one thread, because torch's threads would wait for each other, which is slow on busy cores.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from h5chunk.machine import warnings_filtered

Array = Any  # an array of NumPy, or a tensor
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # in place of types that a library lacks


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of a CPU tensor as an array. Values of types that NumPy lacks, like bfloat16, become their bits."""
    has_bits = tensor.dtype.is_floating_point and (tensor.itemsize == 1 or tensor.dtype == torch.bfloat16)
    return (tensor.view(SAME_SIZE[tensor.itemsize]) if has_bits else tensor).numpy()


def of_device(tensor: torch.Tensor) -> Array:
    """Return a tensor of the host as an array, and one on a GPU as it is."""
    return as_array(tensor) if tensor.device.type == "cpu" else tensor


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array as a tensor that shares its memory."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def library(array: Array) -> Any:
    """Return the module of an array's functions: ``numpy`` or ``torch``."""
    return np if isinstance(array, np.ndarray) else torch


def converted(array: Array, dtype: torch.dtype) -> Array:
    """Return an array in another type. It may share memory."""
    if isinstance(array, np.ndarray):
        return array.astype(torch.empty(0, dtype=dtype).numpy().dtype, copy=False)
    return array.to(dtype)


def up_to(count: int, like: Array) -> Array:
    """Return 0, 1, ... ``count`` - 1: int64, on the device of another array."""
    return np.arange(count) if isinstance(like, np.ndarray) else torch.arange(count, device=like.device)


def starts_of(counts: Array) -> Array:
    """Return where each row begins, and where the last one ends: (rows + 1,) int64."""
    starts = up_to(len(counts) + 1, counts)  # begins with 0; the rest is overwritten
    starts[1:] = counts.cumsum(0)
    return starts


def repeated(values: Array, counts: Array, total: int | None = None) -> Array:
    """Repeat the value of each row for each of its entries. With their number, ``total``, the host waits for no GPU."""
    if isinstance(values, np.ndarray):
        return np.repeat(values, counts)
    return torch.repeat_interleave(values, counts, output_size=total)


def row_of_each(counts: Array) -> Array:
    """Return the row number of each entry."""
    return repeated(up_to(len(counts), counts), counts)


def positions_of(firsts: Array, counts: Array, total: int) -> Array:
    """Return the positions of the entries of rows that begin at ``firsts``: (total,) int64."""
    return repeated(firsts - starts_of(counts)[:-1], counts, total) + up_to(total, counts)


def taken(array: Array, where: Array | slice) -> Array:
    """Return the entries at these positions in new memory."""
    if isinstance(array, np.ndarray):
        return array[where].copy() if isinstance(where, slice) else array[where]
    if isinstance(where, slice):
        return array[where].clone()
    return array.view(SAME_SIZE[array.itemsize])[where].view(array.dtype)  # torch does not index large unsigned types


def sums(values: Array, counts: Array) -> Array:
    """Return the sum of each row."""
    if isinstance(values, np.ndarray):
        return np.bincount(row_of_each(counts), values.astype(np.float64), len(counts))
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)


def make_csr(starts: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Make a sparse CSR tensor, without copies or checks."""
    _silence_beta_warning()
    return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


@cache
def _silence_beta_warning() -> None:
    """Silence torch's warning that CSR tensors are in beta and unchecked; h5chunk's readers have checked them."""
    with warnings_filtered("ignore"):
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)
