"""Columns: the samples of one field in memory, on one device.

| kind | the field has | a column | its arrays |
| --- | --- | --- | --- |
| `Dense` | samples of one shape | a tensor | the tensor, (num_samples, ...) |
| `Ragged` | rows of a sparse matrix, samples of many lengths, encoded images | `CsrRows` | starts, indices, values |
| `Framed` | windows of frames, which share frames | `Frames` | the distinct frames, and a table that locates windows |

A kind describes a field before there is memory. It makes the columns of the field, and does with them what depends on
the kind: a slot, a batch, data that stays on a device, and the memory of a DataLoader's worker all consist of columns.
Any column has a length, and ``column[a:b]`` refers to some of its samples.

A slot is large enough for the largest window. The number of entries or of distinct frames differs between windows, so
that columns of as many samples may need different arrays: `Kind.capacity` has the largest ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.attributes import cached_property
from h5chunk.errors import FieldError, FileError, OptionError, printable
from h5chunk.plan.csr import entries_of_chunks, entries_of_rows, fullest_chunks
from h5chunk.store.format.header import CSR
from h5chunk.store.read.fields import Field, MatrixField
from h5chunk.store.read.ragged import RaggedField, SeriesField
from h5chunk.store.read.samples import CsrBuffers
from h5chunk.store.read.source import Source
from h5chunk.store.read.windows import WindowReader
from h5chunk.transforms.csr import Allocate, CsrRows, SampleNumbers
from h5chunk.transforms.segments import as_array

ALIGNMENT = 512  # alignment of an array in a slot's buffer
BYTES = 256  # number of different values of a byte
SMALL_FRAME = 256  # frames of at most this many bytes are copied window by window, larger ones one by one

ArrayShape = tuple[tuple[int, ...], torch.dtype]
Column = Any  # a tensor, `CsrRows`, or `Frames`
Columns = tuple[Column, ...]  # one for each field


class Destination(NamedTuple):
    """The memory that readers fill: (n, row_bytes) uint8, or `CsrBuffers`.

    ``rows`` are the rows of the file that belong there, (n,) int64 and ascending; None for the samples themselves.
    """

    out: np.ndarray | CsrBuffers
    rows: np.ndarray | None = None


class Kind:
    """The kind and the shape of a field's samples. It is a base class.

    Attributes
    ----------
    sample_bytes : int
        Bytes of a sample in memory, on average.
    is_fixed : bool
        Whether a column is one array whose shape depends only on the number of samples.
    is_gathered : bool
        Whether `samples` gathers the samples into other memory than that of the column.
    is_encoded : bool
        Whether samples are encoded images, which are decoded on the host.
    """

    sample_bytes: int
    is_fixed = False
    is_gathered = False
    is_encoded = False

    def capacity(self, num_samples: int) -> list[ArrayShape]:
        """Return the shapes of arrays that have room for any window of this many samples."""
        raise NotImplementedError

    def of_pieces(self, samples: np.ndarray | None) -> Kind:
        """Return the kind for windows of consecutive ones of these samples, all of which are read once. None: all."""
        raise NotImplementedError

    def empty(self, samples: np.ndarray, allocate: Allocate) -> Column:
        """Return a column for samples that are yet to be read. What is known of their places and sizes is filled in."""
        raise NotImplementedError

    def arrays(self, column: Column) -> tuple[torch.Tensor, ...]:
        """Return the arrays of a column that `empty` made, in the order in which it allocated them."""
        raise NotImplementedError

    def copied(self, column: Column, arrays: Sequence[torch.Tensor]) -> Column:
        """Return the column whose arrays are copies of those of ``column``, on this or another device."""
        raise NotImplementedError

    def destination(self, column: Column) -> Destination:
        """Return the memory of a column on the host that readers fill."""
        raise NotImplementedError

    def check(self, column: Column) -> None:
        """Raise FileError if what was read into a column on the host is damaged. By default, any bytes are valid."""

    def take(self, column: Column, numbers: SampleNumbers, allocate: Allocate | None) -> Column:
        """Return the samples with these numbers. What must be copied on the host is in memory from ``allocate``."""
        return column.take(numbers)

    def put(self, column: Column, first: int, part: Column) -> None:
        """Copy consecutive samples into a column with room for all, beginning at sample ``first``."""
        raise NotImplementedError

    def samples(self, column: Column, _allocate: Allocate) -> Any:
        """Return the samples as converters take them: a tensor, or `CsrRows`."""
        return column


Kinds = Mapping[str, Kind]  # by the name of the field


@dataclass(frozen=True)
class Dense(Kind):
    """Samples of one shape."""

    sample_shape: tuple[int, ...]
    dtype: torch.dtype

    is_fixed = True

    @property
    def sample_bytes(self) -> int:  # type: ignore[override]
        return math.prod(self.sample_shape) * self.dtype.itemsize

    def capacity(self, num_samples: int) -> list[ArrayShape]:
        return [((num_samples, *self.sample_shape), self.dtype)]

    def of_pieces(self, _samples: np.ndarray | None) -> Dense:
        return self

    def empty(self, samples: np.ndarray, allocate: Allocate) -> torch.Tensor:
        return allocate((len(samples), *self.sample_shape), self.dtype)

    def arrays(self, column: torch.Tensor) -> tuple[torch.Tensor]:
        return (column,)

    def copied(self, _column: torch.Tensor, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        return arrays[0]

    def destination(self, column: torch.Tensor) -> Destination:
        return Destination(_bytes_of(column))

    def take(self, column: torch.Tensor, numbers: SampleNumbers, allocate: Allocate | None) -> torch.Tensor:
        """See `Kind.take`. NumPy copies on the host: torch's threads would wait for each other on busy cores."""
        if allocate is None:
            return column.index_select(0, numbers.on_device)
        out = allocate((len(numbers.host), *column.shape[1:]), column.dtype)
        np.take(as_array(column), numbers.host, axis=0, out=as_array(out), mode="clip")
        return out

    def put(self, column: torch.Tensor, first: int, part: torch.Tensor) -> None:
        column[first : first + len(part)].copy_(part)


@dataclass(frozen=True)
class Ragged(Kind):
    """The rows of a CSR matrix, or samples that differ in length. The entries have the dtypes of the file.

    Attributes
    ----------
    indptr : array, (num_rows + 1,) int64
        The start of each row.
    num_columns : int
        0 for samples that differ in length, whose values take the place of the column indices.
    where : str
        The file and field, for messages.
    may_repeat : bool
        Whether rows must be checked for several entries in a column, because h5chunk did not write the matrix.
    max_entries : callable
        ``max_entries(num_rows)`` is the maximum number of entries in a window of that many rows.
    """

    indptr: np.ndarray = field(repr=False)
    num_columns: int
    index_dtype: torch.dtype
    value_dtype: torch.dtype | None
    where: str
    may_repeat: bool
    max_entries: Callable[[int], int] = field(repr=False)
    is_encoded: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether samples are the rows of a matrix that has columns."""
        return self.num_columns > 0 and not self.is_encoded

    @property
    def sample_bytes(self) -> int:  # type: ignore[override]
        entry_bytes = self.index_dtype.itemsize + (0 if self.value_dtype is None else self.value_dtype.itemsize)
        return 8 + math.ceil(int(self.indptr[-1]) * entry_bytes / max(1, len(self.indptr) - 1))

    def entries(self, num_entries: int) -> list[ArrayShape]:
        """Return the shapes of the arrays for this many entries."""
        dtypes = [self.index_dtype] if self.value_dtype is None else [self.index_dtype, self.value_dtype]
        return [((num_entries,), dtype) for dtype in dtypes]

    def capacity(self, num_samples: int) -> list[ArrayShape]:
        return [((num_samples + 1,), torch.int64), *self.entries(self.max_entries(num_samples))]

    def of_pieces(self, samples: np.ndarray | None) -> Ragged:
        starts = self.indptr if samples is None else self._starts_of(samples)

        def max_entries(num_samples: int) -> int:
            borders = np.append(starts[: -1 : max(1, num_samples)], starts[-1])
            return int(np.diff(borders).max(initial=0))

        return replace(self, max_entries=max_entries)

    def _starts_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the start of each of these samples in memory, where they follow each other: (n + 1,) int64."""
        starts = np.zeros(len(samples) + 1, np.int64)
        np.cumsum(self.indptr[samples + 1] - self.indptr[samples], out=starts[1:])
        return starts

    def empty(self, samples: np.ndarray, allocate: Allocate) -> CsrRows:
        starts = self._starts_of(samples)
        on_device = allocate((len(starts),), torch.int64)
        _set(on_device, starts)
        entries = [allocate(*shape) for shape in self.entries(int(starts[-1]))]
        return CsrRows(on_device, starts, entries[0], (*entries, None)[1])

    def arrays(self, column: CsrRows) -> tuple[torch.Tensor, ...]:
        return column.starts, column.indices, *(() if column.values is None else (column.values,))

    def copied(self, column: CsrRows, arrays: Sequence[torch.Tensor]) -> CsrRows:
        starts, indices, *values = arrays
        return CsrRows(starts, column.host_starts, indices, values[0] if values else None)

    def destination(self, column: CsrRows) -> Destination:
        values = None if column.values is None else column.values.numpy()
        return Destination(CsrBuffers(column.host_starts, column.indices.numpy(), values))

    def put(self, column: CsrRows, first: int, part: CsrRows) -> None:
        start, stop = (int(column.host_starts[row]) for row in (first, first + len(part)))
        for own, other in zip(self.arrays(column)[1:], self.arrays(part)[1:], strict=True):
            own[start:stop].copy_(other)

    def check(self, column: CsrRows) -> None:
        """Raise FileError unless all columns exist in the matrix, and no row repeats a column."""
        starts = column.host_starts[column.first : column.first + len(column) + 1]
        indices, columns = column.indices.numpy()[int(starts[0]) : int(starts[-1])], self.num_columns
        if self.may_repeat:
            self._check_repeated(indices, starts - starts[0])
        if not columns:
            return
        signed = indices.dtype.kind == "i"
        if not len(indices) or (not signed and np.iinfo(indices.dtype).max < columns):
            return
        most, least = int(indices.max()), int(indices.min()) if signed else 0
        if most >= columns or least < 0:
            wrong = most if most >= columns else least
            raise FileError(f"{self.where} is damaged: it has an entry in column {wrong} of {columns}")

    def _check_repeated(self, indices: np.ndarray, starts: np.ndarray) -> None:
        falls = np.flatnonzero(indices[1:] <= indices[:-1]) + 1
        if (starts[np.searchsorted(starts, falls)] == falls).all():
            return
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))  # a row is not in order
        order = np.lexsort((indices, rows))
        same = (np.diff(rows[order]) == 0) & (indices[order[1:]] == indices[order[:-1]])
        if same.any():
            column = int(indices[order[int(same.argmax())]])
            raise FileError(
                f"{self.where} has a row with several entries in column {column}: write a file in which they are added "
                "up (h5chunk convert does so for .h5ad and 10x files)"
            )


class Frames:
    """The distinct frames of n windows, ``values``, (m, ...), and ``table``, int64, which locates the windows in them.

    If ``steps`` is (k,) int64, the table is (n, 3). Each row has the positions in ``values`` of the window's current
    time step, and of the first and the last frame that the window may use; ``steps`` has the offsets of the window's
    frames from the current time step. If ``steps`` is None, the table is (n, k), with the position of each frame. These
    tensors are on the same device. ``rows``, (m,) int64, are the rows of the frames in the file.
    """

    def __init__(self, values: torch.Tensor, table: torch.Tensor, rows: np.ndarray, steps: torch.Tensor | None) -> None:
        self.values, self.table, self.rows, self.steps = values, table, rows, steps

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, some: slice) -> Frames:
        return Frames(self.values, self.table[some], self.rows, self.steps)

    @property
    def positions(self) -> torch.Tensor:
        """The position of each frame in ``values``: (n, k) int64."""
        if self.steps is None:
            return self.table
        anchors, firsts, lasts = (self.table[:, column, None] for column in range(3))
        return torch.minimum(torch.maximum(anchors + self.steps, firsts), lasts)

    def take(self, numbers: SampleNumbers) -> Frames:
        """Select windows by their numbers. Frames are not copied."""
        if self.table.device.type == "cpu":
            some = torch.from_numpy(self.table.numpy()[numbers.host])
        else:
            some = self.table.index_select(0, numbers.on_device)
        return Frames(self.values, some, self.rows, self.steps)

    def gathered(self, allocate: Allocate) -> torch.Tensor:
        """Return the frames of all windows, (n, k, ...). On the CPU, the memory comes from ``allocate``."""
        num_frames = self.table.shape[1] if self.steps is None else len(self.steps)
        shape = (len(self.table), num_frames, *self.values.shape[1:])
        if self.values.device.type != "cpu":
            return self.values.index_select(0, self.positions.reshape(-1)).view(shape)
        out = allocate(shape, self.values.dtype)
        frame_items = math.prod(shape[2:])
        if self.steps is None or not 0 < frame_items * out.itemsize <= SMALL_FRAME or num_frames == 1:
            np.take(as_array(self.values), self.positions.numpy(), axis=0, out=as_array(out), mode="clip")
        else:
            self._copy_runs(as_array(out).reshape(len(out), num_frames * frame_items), frame_items)
        return out

    def _copy_runs(self, out: np.ndarray, frame_items: int) -> None:
        """Gather windows of small frames. Copy all frames of a window at once if they are consecutive."""
        assert self.steps is not None
        steps, table, values = self.steps.numpy(), self.table.numpy(), as_array(self.values).reshape(-1)
        starts, ends = table[:, 0] + steps[0], table[:, 0] + steps[-1]
        is_run = (starts >= table[:, 1]) & (ends <= table[:, 2]) & (steps[-1] - steps[0] + 1 == len(steps))
        if is_run.any():
            runs = np.lib.stride_tricks.sliding_window_view(values, out.shape[1])
            out[is_run] = runs[starts[is_run] * frame_items]
        if not is_run.all():
            others = Frames(self.values, self.table[torch.from_numpy(~is_run)], self.rows, self.steps).positions.numpy()
            out[~is_run] = np.take(values.reshape(-1, frame_items), others, axis=0).reshape(len(others), -1)


@dataclass(frozen=True)
class Framed(Kind):
    """Windows of frames. Each distinct frame is stored once. ``max_frames(n)`` is the maximum number in n windows."""

    reader: WindowReader
    name: str
    dtype: torch.dtype
    max_frames: Callable[[int], int]
    _steps: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    is_gathered = True

    @property
    def _frame_shape(self) -> tuple[int, ...]:
        return self.reader.fields[self.name].sample_shape[1:]

    @cached_property
    def _table_width(self) -> int:
        return 3 if self.reader.is_dense(self.name) else len(self.reader.steps[self.name])

    @property
    def sample_bytes(self) -> int:  # type: ignore[override]
        """Estimated bytes per window: one frame, because windows share the others, and a row of the table."""
        return self.reader.source_of(self.name).fields[self.name].grid.sample_bytes + 8 * self._table_width

    def capacity(self, num_samples: int) -> list[ArrayShape]:
        frames = (self.max_frames(num_samples), *self._frame_shape)
        return [(frames, self.dtype), ((num_samples, self._table_width), torch.int64)]

    def of_pieces(self, samples: np.ndarray | None) -> Framed:
        return replace(self, max_frames=self.reader.frames_of_pieces(self.name, samples))

    def empty(self, samples: np.ndarray, allocate: Allocate) -> Frames:
        rows, places = self.reader.distinct_rows(self.name, samples)
        values = allocate((len(rows), *self._frame_shape), self.dtype)
        table = allocate((len(samples), self._table_width), torch.int64)
        _set(table, places)
        return Frames(values, table, rows, self._steps_on(values.device))

    def _steps_on(self, device: torch.device) -> torch.Tensor | None:
        if not self.reader.is_dense(self.name):
            return None
        if device not in self._steps:
            self._steps[device] = torch.from_numpy(self.reader.steps[self.name]).to(device)
        return self._steps[device]

    def arrays(self, column: Frames) -> tuple[torch.Tensor, ...]:
        return column.values, column.table

    def copied(self, column: Frames, arrays: Sequence[torch.Tensor]) -> Frames:
        values, table = arrays
        return Frames(values, table, column.rows, self._steps_on(values.device))

    def destination(self, column: Frames) -> Destination:
        return Destination(_bytes_of(column.values), column.rows)

    def put(self, column: Frames, _first: int, part: Frames) -> None:
        where = torch.from_numpy(np.searchsorted(column.rows, part.rows))
        column.values.index_copy_(0, where.to(column.values.device), part.values)

    def samples(self, column: Frames, allocate: Allocate) -> torch.Tensor:
        return column.gathered(allocate)


def _bytes_of(samples: torch.Tensor) -> np.ndarray:
    """Return a view of samples on the host: (num_samples, sample_bytes) uint8."""
    array = as_array(samples)
    return array.reshape(len(array), -1 if array.size else 0).view(np.uint8)


def _set(numbers: torch.Tensor, values: np.ndarray) -> None:
    """Copy an array to a tensor, on the host without torch's threads, which wait for each other on busy cores."""
    if numbers.device.type == "cpu":
        numbers.numpy()[:] = values
    else:
        numbers.copy_(torch.from_numpy(values))


class Uses(NamedTuple):
    """The counts and the order in which an epoch uses samples, from which the sizes of its largest windows follow.

    ``counts``, (num_samples,) int64, is the maximum number of times that an epoch uses each sample. None means once,
    or, unless ``by_chunk``, any number of times. ``by_chunk`` means chunk by chunk, in ``lanes`` lanes per rank, and
    otherwise in any order.
    """

    counts: np.ndarray | None = None
    lanes: int = 1
    by_chunk: bool = True


ONCE = Uses()


def kind_of(reader: Source, name: str, uses: Uses) -> Kind:
    """Return the kind of a stored field.

    Raise `FieldError` if the field has strings, or a dtype that torch does not support.
    """
    stored = reader.fields[name]
    if isinstance(stored, RaggedField):
        return ragged_kind(reader, stored, uses)
    kind = dense_kind(stored)
    if not isinstance(reader, WindowReader):
        return kind
    used = np.arange(reader.num_samples) if uses.counts is None else np.flatnonzero(uses.counts)
    once = uses.by_chunk and (uses.counts is None or int(uses.counts.max(initial=0)) <= 1)
    return Framed(reader, name, kind.dtype, reader.frames_of_chunks(name, used, uses.lanes, once=once))


def dense_kind(field: Field | RaggedField) -> Dense:
    """Return the kind of a field whose samples have one shape. Raise `FieldError` as `kind_of` does."""
    dtype = torch_dtype(field.dtype, field.name)
    if dtype is None:
        raise FieldError(
            f"field {field.name!r} has strings, which cannot be on a device: leave it out, as in "
            "ChunkLoader(ChunkDataset(path, fields=[...]), ...), or use a DataLoader: "
            "torch.utils.data.DataLoader(data, batch_sampler=h5chunk.ChunkSampler(data, batch_size=256))"
        )
    return Dense(field.sample_shape, dtype)


def ragged_kind(reader: Source, field: RaggedField, uses: Uses = ONCE) -> Ragged:
    """Return the kind of a matrix, of samples that differ in length, or of images of any size (an entry per byte).

    Raise `FieldError` if torch does not support the dtype of the matrix, and `FileError` if the matrix is damaged.
    """
    where, indptr = f"{printable(reader.path)}: {field.name!r}", reader.indptr_of(field.name)
    if uses.counts is not None:
        max_entries: Callable[[int], int] = entries_of_rows(np.diff(indptr), uses.counts)
    elif uses.by_chunk:  # the order's chunks are those of the main field
        max_entries = entries_of_chunks(fullest_chunks(indptr, reader.chunk_samples), reader.chunk_samples, uses.lanes)
    else:
        max_entries = partial(mul, int(np.diff(indptr).max(initial=0)))
    if isinstance(field, SeriesField):
        values = torch_dtype(field.dtype, field.name)
        assert values is not None
        return Ragged(indptr, 0, values, None, where, False, max_entries)
    if not isinstance(field, MatrixField):  # images
        return Ragged(indptr, BYTES, torch.uint8, None, where, False, max_entries, True)
    values = None if field.value_dtype is None else torch_dtype(field.value_dtype, field.name)
    columns = torch_dtype(field.index_dtype, field.name)
    assert columns is not None
    may_repeat = reader.header is None or reader.header.kind != CSR
    return Ragged(indptr, field.num_columns, columns, values, where, may_repeat, max_entries)


def torch_dtype(dtype: np.dtype, name: str) -> torch.dtype | None:
    """Return the torch dtype of a field, or None for strings. Raise FieldError if torch does not support it."""
    if dtype.kind == "S":
        return None
    if dtype.names:  # the bits of a type that NumPy lacks
        return getattr(torch, dtype.names[0])
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        raise FieldError(f"field {name!r} has the type {dtype}, which torch does not support: leave it out") from None


class Room:
    """A buffer with room for the columns of a window of up to ``num_samples`` samples, in one array after another.

    The arrays are views of the buffer, which are made once, because making a view releases the GIL and then waits for
    it, which is slow while other threads run.
    """

    def __init__(self, buffer: torch.Tensor, kinds: Iterable[Kind], num_samples: int) -> None:
        self.buffer, self.arrays = buffer, list[torch.Tensor]()
        start = 0
        for shape in (shape for kind in kinds for shape in kind.capacity(num_samples)):
            size, dtype = math.prod(shape[0]) * shape[1].itemsize, shape[1]
            self.arrays.append(buffer[start : start + size].view(dtype).view(shape[0]))
            start += aligned_bytes([shape])

    def allocate(self) -> Allocate:
        """Return a function that allocates the arrays of a window's columns, in the order of the fields."""
        left = iter(self.arrays)

        def first_rows(shape: tuple[int, ...], _dtype: torch.dtype) -> torch.Tensor:
            array = next(left)
            if array.shape[0] == shape[0]:
                return array
            if array.shape[0] < shape[0]:  # threads would write beyond the end of the array
                raise OptionError(
                    f"a window needs an array of {shape}, but was planned to need {tuple(array.shape)}: if bad samples "
                    "were replaced, use a smaller max_skipped, or repair the files"
                )
            return array[: shape[0]]

        return first_rows


def slot_bytes(kinds: Kinds, num_samples: int) -> int:
    """Return the size of a `Room` for windows of this many samples, in bytes."""
    return sum(aligned_bytes(kind.capacity(num_samples)) for kind in kinds.values())


def aligned_bytes(shapes: Sequence[ArrayShape]) -> int:
    """Return the size of consecutive, aligned arrays in a buffer, in bytes."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in shapes)
