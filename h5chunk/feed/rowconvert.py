"""Rows of a matrix, as the file has them, to what the network takes: dense or CSR, scaled, binarised, of length 1."""

from __future__ import annotations

import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

from h5chunk.errors import OptionError
from h5chunk.feed.dense import DenseKernel
from h5chunk.feed.entries import NUM_CODES, MapParts, Rule, entries_of, scatter, values_of
from h5chunk.feed.memory import BatchMemory
from h5chunk.feed.spaces import CsrRows
from h5chunk.store.read.fields import Field
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.write.fill import available_cores

DENSE_THREADS = 4  # of batches that are made dense on the host
DENSE, CSR, L2 = "dense", "csr", "l2"


class RowConvert:
    """Rows of a matrix to batches.

    What is stored is a code, and a value is the code over the file's scale. Floating dtypes hold values as they can
    (float16 ends at 65,504); an integer dtype is refused where it could not hold them.

    Parameters
    ----------
    field : MatrixField or Field
        Sparse rows; or dense ones, with a scale.
    sparse : {"dense", "csr"}
    dtype : torch.dtype
    binarize : float, optional
        Values from here on become 1, others 0.
    l2 : bool
        Divide each row by its Euclidean length; rows without entries stay zero.
    reuse : bool
        On the CPU, give every dense batch in the same memory.

    Raises
    ------
    OptionError
        They do not fit each other.

    Attributes
    ----------
    rule : Rule
    num_columns : int
    makes_csr : bool
    """

    changes_nothing = False

    def __init__(
        self,
        field: MatrixField | Field,
        *,
        sparse: str,
        dtype: torch.dtype,
        binarize: float | None,
        l2: bool,
        reuse: bool = False,
    ) -> None:
        _check(field, sparse, dtype, binarize, l2)
        self.dtype, self._reuse = dtype, reuse
        self.makes_csr = sparse == CSR
        self.num_columns = math.prod(field.sample_shape)
        self.rule = _rule(field, dtype, binarize, l2)
        self.sample_bytes = self.num_columns * dtype.itemsize
        if self.makes_csr and isinstance(field, MatrixField):
            per_row = field.num_entries / max(1, field.num_rows)
            self.sample_bytes = 4 + math.ceil(per_row * (4 + dtype.itemsize))
        self._memory, self._held = BatchMemory(), torch.empty(0, dtype=dtype)
        self._kernel: DenseKernel | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0

    def to(self, device: torch.device, like: CsrRows | None = None) -> None:
        """Compile for rows such as ``like``, which lie on the host."""
        suits = like is not None and not self.makes_csr and DenseKernel.suits(device, self.dtype)
        if self._kernel is None and suits and like is not None:
            self._kernel = DenseKernel(lambda: like.to(device), self.num_columns, self.rule)

    def __call__(self, rows: CsrRows | torch.Tensor, keep: bool) -> torch.Tensor:
        """The batch: (rows, columns), dense or CSR. ``keep``: parts of the input may be handed on."""
        if isinstance(rows, torch.Tensor):
            return self._of_dense(rows)
        if not self.makes_csr:
            out = self._empty(len(rows), rows.starts.device)
            if self._kernel is None or not self._kernel(rows, out):
                scatter(out, entries_of(rows, self.rule, self.num_columns), self._map_parts())
            return out
        starts, _, columns, values = entries_of(rows, self.rule, self.num_columns)
        if not keep:  # what was stored in the right type is part of the window
            columns = columns.clone() if shares(columns, rows.indices) else columns
            values = values.clone() if rows.values is not None and shares(values, rows.values) else values
        return make_csr(starts, columns, values, (len(rows), self.num_columns))

    def forget(self) -> None:
        """Free the memory that is kept for further batches, and end the thread that compiles."""
        if self._kernel is not None:
            self._kernel.wait()
        self._memory, self._held = BatchMemory(), torch.empty(0, dtype=self.dtype)
        if self._threads is not None and self._process == os.getpid():
            self._threads.shutdown()
        self._threads = None

    def _map_parts(self) -> MapParts:
        """As many threads as there are cores, but few; a fork leaves them behind."""
        if self._threads is None or self._process != os.getpid():
            count = min(DENSE_THREADS, available_cores())
            self._threads = ThreadPoolExecutor(count, thread_name_prefix="h5chunk-dense")
            self._process = os.getpid()
        return self._threads.map

    def _empty(self, num_rows: int, device: torch.device) -> torch.Tensor:
        shape = (num_rows, self.num_columns)
        if device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=device)
        if not self._reuse:
            return self._memory.empty(shape, self.dtype)
        if self._held.numel() < math.prod(shape):
            self._held = BatchMemory().empty((math.prod(shape),), self.dtype)
        return self._held[: math.prod(shape)].view(shape).data

    def _of_dense(self, rows: torch.Tensor) -> torch.Tensor:
        values = values_of(rows, self.rule)
        if self.rule.l2:
            lengths = torch.linalg.vector_norm(values, dim=1, keepdim=True)
            values = torch.where(lengths > 0, values / lengths, 0)
        return values.to(self.dtype)


def matrix_convert(
    reader: H5Reader,
    *,
    sparse: str | None,
    dtype: torch.dtype | None,
    binarize: float | None,
    normalize: object,
    reuse: bool = False,
) -> RowConvert | None:
    """The conversion of a file's first field, if its samples are rows of a matrix.

    Raises
    ------
    OptionError
        The options do not fit each other, or the field.
    """
    first, *others = reader.fields.values()
    for other in others:
        if other.scale is not None:
            raise OptionError(f"field {other.name!r} is a matrix: name it first")
    if first.scale is None:
        for name, given in (("sparse", sparse), ("binarize", binarize)):
            if given is not None:
                raise OptionError(f"{name} is for CSR matrices, and dense ones of ours: {first.name!r} is neither")
        if isinstance(normalize, str):
            raise OptionError(f"normalize is {normalize!r}: give (mean, std); 'l2' is for matrices")
        return None
    if normalize not in (None, L2):
        raise OptionError(f"normalize is {normalize!r}, but {first.name!r} is a matrix: give 'l2', or use transform")
    chosen = DENSE if sparse is None else sparse
    dtype = torch.float32 if dtype is None else dtype
    return RowConvert(first, sparse=chosen, dtype=dtype, binarize=binarize, l2=normalize == L2, reuse=reuse)


def shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of another, contiguous one."""
    return 0 <= tensor.data_ptr() - other.data_ptr() < max(1, other.nbytes)


def make_csr(starts: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A sparse CSR tensor; nothing is copied, and nothing is checked."""
    _have_warned()
    return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


@cache
def _have_warned() -> None:
    """torch says once a process that such tensors are in beta, and unchecked; readers have checked these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def _rule(field: MatrixField | Field, dtype: torch.dtype, binarize: float | None, l2: bool) -> Rule:
    """Bytes have a table of what they stand for, rounded once."""
    pattern = isinstance(field, MatrixField) and field.value_dtype is None
    if not pattern and field.dtype != np.uint8:
        return Rule(None, binarize, 1.0, l2, dtype)
    values = np.arange(NUM_CODES) / (field.scale or 1.0)
    if binarize is not None:
        values = (values >= binarize).astype(np.float64)
    rule = Rule(None, None, float(values[1]), l2, dtype)
    table = torch.from_numpy(values).to(rule.work_dtype).numpy()
    return Rule(table, None, float(table[1]), l2, dtype)


def _check(field: MatrixField | Field, sparse: str, dtype: torch.dtype, binarize: float | None, l2: bool) -> None:
    if sparse not in (DENSE, CSR):
        raise OptionError(f"sparse is {sparse!r}: give 'dense' or 'csr'")
    if sparse == CSR and not isinstance(field, MatrixField):
        raise OptionError(f"sparse is 'csr' but field {field.name!r} holds dense rows: give sparse='dense'")
    if not isinstance(dtype, torch.dtype) or dtype.is_complex or dtype == torch.bool or dtype not in _known():
        raise OptionError(f"dtype is {dtype!r}: give a torch.dtype of numbers, such as torch.float32")
    if binarize is not None and not _is_threshold(binarize):
        raise OptionError(f"binarize is {binarize!r}: give the least value that counts as 1, a number above 0")
    if l2 and not dtype.is_floating_point:
        raise OptionError(f"normalize='l2' gives fractions but dtype is {dtype}: give a floating dtype")
    if binarize is None and not dtype.is_floating_point:
        fits = (field.scale or 1.0) == 1 and np.can_cast(field.dtype, str(dtype).removeprefix("torch."))
        if not fits:
            raise OptionError(
                f"dtype is {dtype}, which may not hold the values of field {field.name!r} ({field.dtype}"
                f"{'' if (field.scale or 1.0) == 1 else f' over {field.scale:g}'}): give a floating dtype, or binarize"
            )


def _is_threshold(value: object) -> bool:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return number and 0 < float(value) < math.inf  # type: ignore[arg-type]


def _known() -> tuple[torch.dtype, ...]:
    return (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
