"""Rows of a sparse matrix made dense on a GPU, in one kernel of Triton.

Each program clears one row and scatters its entries, so that a batch is written once, and little more than once:
plain indexing writes it, then handles positions of 8 bytes for entries of 3, in kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from h5chunk.feed.fused import Compiling
from h5chunk.feed.spaces import CsrRows, Numbers

BLOCK, ZEROS, NUM_WARPS = 512, 4096, 8  # entries and numbers of a program at a time; scripts/LOG.md
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DenseKernel:
    """``out[i, indices[e]] = value`` of each entry e of row i, and zero elsewhere, on a GPU.

    Parameters
    ----------
    device : torch.device
    like : callable
        Gives an example of the arrays: a `CsrRows` of one row on the device.
    num_columns : int
    dtype : torch.dtype
        Of the result.
    table : (256,) float32, on the device, or None
        What a stored byte stands for; None: the number that it is.
    least : float or None
        Values from here on count as 1, others as 0.
    constant : float
        The value of each entry of a pattern.
    l2 : bool
        Divide each row by its length.
    """

    def __init__(
        self,
        device: torch.device,
        like: Callable[[], CsrRows],
        num_columns: int,
        dtype: torch.dtype,
        *,
        table: torch.Tensor | None,
        least: float | None,
        constant: float,
        l2: bool,
    ) -> None:
        self._num_columns, self._table, self._l2 = num_columns, table, l2
        self._least, self._constant = least, constant

        def first_launch() -> Any:
            from h5chunk.feed.kernels import make_rows_dense as kernel

            rows, zero = like(), np.zeros(1, np.int64)
            out = torch.empty(1, num_columns, dtype=dtype, device=device)
            self._launch(kernel, rows, out)
            self._launch(kernel, rows.take(Numbers(zero, torch.from_numpy(zero).to(device))), out)
            return kernel

        self._compiling = Compiling(first_launch)
        if l2:  # sums in another order would give other last bits
            self._compiling.wait()

    @staticmethod
    def suits(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether it is made for such numbers."""
        return device.type == "cuda" and dtype in DTYPES

    def wait(self) -> bool:
        """Wait until it is compiled or has failed, and say whether it can be used."""
        return self._compiling.wait()

    def __call__(self, rows: CsrRows, out: torch.Tensor) -> bool:
        """Fill ``out``, (rows, columns), unless the kernel is not compiled yet; says whether it is done."""
        if self._compiling.kernel is None:
            return False
        if len(rows):
            self._launch(self._compiling.kernel, rows, out)
        return True

    def _launch(self, kernel: Any, rows: CsrRows, out: torch.Tensor) -> None:
        numbers = rows.starts if rows.numbers is None else rows.numbers.there
        values = rows.indices if rows.values is None else rows.values
        with torch.cuda.device(out.device):
            kernel[(len(rows),)](
                rows.starts,
                rows.indices,
                values,
                rows.starts if self._table is None else self._table,
                numbers,
                out,
                rows.first,
                self._num_columns,
                0.0 if self._least is None else float(self._least),
                self._constant,
                has_numbers=rows.numbers is not None,
                has_values=rows.values is not None,
                has_table=self._table is not None,
                binarize=self._least is not None and self._table is None,
                l2=self._l2,
                block=BLOCK,
                zeros=ZEROS,
                num_warps=NUM_WARPS,
            )
