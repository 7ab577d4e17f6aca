"""Rows of a matrix, as the file has them, to what the network takes: dense or CSR, scaled, binarised, of length 1."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch

from h5chunk.errors import OptionError
from h5chunk.feed.dense import DenseKernel
from h5chunk.feed.memory import BatchMemory
from h5chunk.feed.spaces import CsrRows
from h5chunk.store.fields import Field
from h5chunk.store.matrixfield import MatrixField

DENSE, CSR = "dense", "csr"
NUM_CODES = 256
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowConvert:
    """Rows of a matrix to batches.

    What is stored is a code, and a value is the code over the file's scale. Values stay what they are in any
    floating dtype; an integer dtype is refused where it could not hold them.

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
        self.dtype, self._l2, self._reuse = dtype, l2, reuse
        self.makes_csr = sparse == CSR
        self._num_columns = math.prod(field.sample_shape)
        self._work = torch.float64 if dtype == torch.float64 else torch.float32 if dtype.is_floating_point else dtype
        pattern = isinstance(field, MatrixField) and field.value_dtype is None
        coded = pattern or field.dtype == np.uint8
        self._least = None if coded else binarize
        self._table = _table(field.scale or 1.0, binarize, self._work) if coded else None
        self._constant = self._table[1].item() if pattern and self._table is not None else 1.0
        self.sample_bytes = self._num_columns * dtype.itemsize
        if self.makes_csr and isinstance(field, MatrixField):
            per_row = field.num_entries / max(1, field.num_rows)
            self.sample_bytes = 4 + math.ceil(per_row * (4 + dtype.itemsize))
        self._memory, self._held = BatchMemory(), torch.empty(0, dtype=dtype)
        self._kernel: DenseKernel | None = None

    def to(self, device: torch.device, like: CsrRows | None = None) -> None:
        """Put the constants on the device, and compile for rows such as ``like``, on the host."""
        if self._table is not None:
            self._table = self._table.to(device)
        if self._kernel is None and like is not None and not self.makes_csr and DenseKernel.suits(device, self.dtype):
            self._kernel = DenseKernel(
                device,
                lambda: like.to(device),
                self._num_columns,
                self.dtype,
                table=self._table if like.values is not None else None,
                least=self._least,
                constant=float(self._constant),
                l2=self._l2,
            )

    def __call__(self, rows: CsrRows | torch.Tensor, keep: bool) -> torch.Tensor:
        """The batch: (rows, columns), dense or CSR. ``keep``: parts of the input may be handed on."""
        if isinstance(rows, torch.Tensor):
            return self._of_dense(rows)
        if self.makes_csr:
            starts, _, indices, values = self._entries(rows)
            if not keep and rows.numbers is None:  # what had the right type is part of the window
                indices, values = indices.clone(), values.clone()
            return make_csr(starts, indices, values, (len(rows), self._num_columns))
        out = self._empty(len(rows), rows.starts.device)
        if self._kernel is not None and self._kernel(rows, out):
            return out
        _, counts, indices, values = self._entries(rows)
        first = torch.arange(0, out.numel(), max(1, self._num_columns), device=out.device)
        places = torch.repeat_interleave(first, counts, output_size=len(indices)).add_(indices)
        _scatter(out.zero_().view(-1), places, values)
        return out

    def forget(self) -> None:
        """Free the memory that is kept for further batches, and end the thread that compiles."""
        if self._kernel is not None:
            self._kernel.wait()
        self._memory, self._held = BatchMemory(), torch.empty(0, dtype=self.dtype)

    def _empty(self, num_rows: int, device: torch.device) -> torch.Tensor:
        shape = (num_rows, self._num_columns)
        if device.type != "cpu":
            return torch.empty(shape, dtype=self.dtype, device=device)
        if not self._reuse:
            return self._memory.empty(shape, self.dtype)
        if self._held.numel() < math.prod(shape):
            self._held = BatchMemory().empty((math.prod(shape),), self.dtype)
        return self._held[: math.prod(shape)].view(shape).data

    def _entries(self, rows: CsrRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where rows begin, their lengths, and the columns (int32 or int64) and values (dtype) of their entries."""
        starts, counts, indices, codes = _picked(rows)
        narrow = self._num_columns <= 1 << 31 and len(indices) < 1 << 31
        indices = indices.to(torch.int32 if narrow else torch.int64)
        values = self._values(codes, len(indices), indices.device)
        if self._l2:
            lengths = torch.segment_reduce(values * values, "sum", lengths=counts, unsafe=True).sqrt_()
            factors = torch.where(lengths > 0, 1 / lengths, 0)
            values = values * torch.repeat_interleave(factors, counts, output_size=len(values))
        return starts.to(indices.dtype), counts, indices, values.to(self.dtype)

    def _values(self, codes: torch.Tensor | None, count: int, device: torch.device) -> torch.Tensor:
        """In the type that is computed in."""
        if codes is None:
            return torch.full((count,), self._constant, dtype=self._work, device=device)
        if self._table is None:
            if self._least is None:
                return codes.to(self._work)
            return ((codes if codes.is_floating_point() else codes.double()) >= self._least).to(self._work)
        if device.type == "cpu":  # torch takes no bytes for an index, and int64 of them would be eight times as much
            return torch.from_numpy(np.take(self._table.numpy(), codes.numpy()))
        return self._table[codes.int()]

    def _of_dense(self, rows: torch.Tensor) -> torch.Tensor:
        values = self._values(rows.reshape(-1), rows.numel(), rows.device).view(rows.shape)
        if self._l2:
            lengths = torch.linalg.vector_norm(values, dim=1, keepdim=True)
            values = torch.where(lengths > 0, values / lengths, 0)
        return values.to(self.dtype)


def make_csr(starts: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A sparse CSR tensor; nothing is copied, and nothing is checked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(starts, indices, values, shape, check_invariants=False)


def _picked(rows: CsrRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Where rows begin among their entries, their lengths, and the stored columns and values of those."""
    host, device = rows.host_starts, rows.starts.device
    if rows.numbers is None:
        stop = rows.first + len(rows)
        starts = rows.starts[rows.first : stop + 1]
        some = slice(int(host[rows.first]), int(host[stop]))
        values = None if rows.values is None else rows.values[some]
        return starts - int(host[rows.first]), starts.diff(), rows.indices[some], values
    numbers = rows.numbers
    total = int((host[numbers.host + 1] - host[numbers.host]).sum())
    firsts = rows.starts[numbers.there]
    counts = rows.starts[numbers.there + 1] - firsts
    starts = torch.zeros(len(counts) + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 0, out=starts[1:])
    entries = torch.repeat_interleave(firsts - starts[:-1], counts, output_size=total)
    entries += torch.arange(total, device=device)
    values = None if rows.values is None else _take(rows.values, entries)
    return starts, counts, _take(rows.indices, entries), values


def _take(array: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Some entries; torch indexes no unsigned numbers of more than a byte."""
    return array.view(_SAME_SIZE[array.itemsize])[entries].view(array.dtype)


def _scatter(out: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    if out.device.type != "cpu":
        out[places] = values
        return
    same = _SAME_SIZE[out.itemsize]  # NumPy has no bfloat16
    out.view(same).numpy()[places.numpy()] = values.view(same).numpy()


def _table(scale: float, binarize: float | None, dtype: torch.dtype) -> torch.Tensor:
    """What each code stands for: (256,), rounded once."""
    values = np.arange(NUM_CODES) / scale
    if binarize is not None:
        values = (values >= binarize).astype(np.float64)
    return torch.from_numpy(values).to(dtype)


def _check(field: MatrixField | Field, sparse: str, dtype: torch.dtype, binarize: float | None, l2: bool) -> None:
    if sparse not in (DENSE, CSR):
        raise OptionError(f"sparse is {sparse!r}: give 'dense' or 'csr'")
    if sparse == CSR and not isinstance(field, MatrixField):
        raise OptionError(f"sparse is 'csr' but field {field.name!r} holds dense rows: give sparse='dense'")
    if not isinstance(dtype, torch.dtype) or dtype.is_complex or dtype == torch.bool or dtype not in _known():
        raise OptionError(f"dtype is {dtype!r}: give a torch.dtype of numbers, such as torch.float32")
    if binarize is not None and (
        isinstance(binarize, bool) or not isinstance(binarize, (int, float)) or not math.isfinite(binarize)
    ):
        raise OptionError(f"binarize is {binarize!r}: give the least value that counts as 1")
    if l2 and not dtype.is_floating_point:
        raise OptionError(f"normalize='l2' gives fractions but dtype is {dtype}: give a floating dtype")
    if binarize is None and not dtype.is_floating_point:
        fits = (field.scale or 1.0) == 1 and np.can_cast(field.dtype, str(dtype).removeprefix("torch."))
        if not fits:
            raise OptionError(
                f"dtype is {dtype}, which may not hold the values of field {field.name!r} ({field.dtype}"
                f"{'' if (field.scale or 1.0) == 1 else f' over {field.scale:g}'}): give a floating dtype, or binarize"
            )


def _known() -> tuple[torch.dtype, ...]:
    return (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
