"""Rows of a sparse matrix made dense on a GPU, in one kernel of Triton.

Each program clears one row and scatters its entries, so that a batch is written once, and little more than once:
plain indexing writes it, then handles positions of 8 bytes for entries of 3, in kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from h5chunk.feed.entries import Rule
from h5chunk.feed.fused import Compiling
from h5chunk.feed.spaces import CsrRows, Numbers

BLOCK, ZEROS, NUM_WARPS = 256, 4096, 16  # entries and numbers of a program at a time; scripts/LOG.md
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DenseKernel:
    """``out[i, indices[e]] = value`` of each entry e of row i, and zero elsewhere, on a GPU.

    Parameters
    ----------
    like : callable
        Gives a `CsrRows` of one row on the device, of the types that will come.
    num_columns : int
    rule : Rule
    """

    def __init__(self, like: Callable[[], CsrRows], num_columns: int, rule: Rule) -> None:
        self._num_columns, self._rule = num_columns, rule
        self._table: torch.Tensor | None = None

        def first_launch() -> Any:
            from h5chunk.feed.kernels import make_rows_dense as kernel

            rows, zero = like(), np.zeros(1, np.int64)
            device = rows.starts.device
            if rows.values is not None and rule.table is not None:
                self._table = torch.from_numpy(rule.table).to(device)
            out = torch.empty(1, num_columns, dtype=rule.dtype, device=device)
            self._launch(kernel, rows, out)
            self._launch(kernel, rows.take(Numbers(zero, torch.from_numpy(zero).to(device))), out)
            return kernel

        self._compiling = Compiling(first_launch)
        if rule.l2:  # sums in another order would give other last bits
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
                float(self._rule.least or 0),
                self._rule.constant,
                has_numbers=rows.numbers is not None,
                has_values=rows.values is not None,
                has_table=self._table is not None,
                binarize=self._rule.least is not None,
                l2=self._rule.l2,
                block=BLOCK,
                zeros=ZEROS,
                num_warps=NUM_WARPS,
            )
