"""Which chunks HDF5 visits for a selection, in which order, and how many bytes of each it wants.

HDF5 reads a selection chunk by chunk, in row-major order of the chunks' coordinates: for slices, for slices with a
step, and for a list of indices, of which h5py makes one union of hyperslabs. A chunk's number here is its place in
that order, `numpy.ravel_multi_index` of its coordinates. The order of the selected elements does not matter.

>>> grid = ChunkGrid(shape=(10, 6), chunks=(4, 3), itemsize=2)
>>> accesses = find_accesses(grid, [5, slice(2, 5), (slice(None, None, 5), 0), [0, 9]])
>>> accesses
Accesses(num_selections=4, num_accesses=12, wanted_bytes=76)
>>> [accesses.chunks[start:stop].tolist() for start, stop in zip(accesses.bounds[:-1], accesses.bounds[1:])]
[[2, 3], [0, 1, 2, 3], [0, 2], [0, 1, 4, 5]]
>>> accesses.bytes_each[2:6].tolist()  # rows 2 and 3 of three columns, then row 4
[12, 12, 6, 6]

Source: H5Dchunk.c, H5D__chunk_io_init and H5D__create_piece_file_map_hyper; h5py, _selector.pyx.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from h5chunk.errors import OptionError
from h5chunk.plan.cache import ChunkGrid

Numbers = npt.NDArray[np.int64]
Axis = range | tuple[int, ...]  # the selected indices of one axis, growing


@dataclass(frozen=True, eq=False, repr=False)
class Accesses:
    """Chunks in the order in which HDF5 visits them for one selection after another.

    Attributes
    ----------
    chunks : (n,) int64
        Numbers of the chunks.
    bytes_each : (n,) int64
        Bytes that the selection wants of each.
    runs : (n,) int64
        Pieces in which they lie, without gaps both in the chunk and in the result: the number of reads if the chunk
        passes no filter and does not fit the cache. Of steps and lists HDF5 reads some pieces in several parts.
    bounds : (m + 1,) int64
        Accesses ``bounds[i]`` to ``bounds[i + 1]`` belong to selection ``i``.
    """

    chunks: Numbers
    bytes_each: Numbers
    runs: Numbers
    bounds: Numbers

    def __repr__(self) -> str:
        total = int(self.bytes_each.sum())
        return f"Accesses(num_selections={len(self.bounds) - 1}, num_accesses={len(self)}, wanted_bytes={total})"

    def __len__(self) -> int:
        return len(self.chunks)


class _Pieces(NamedTuple):
    """The chunks that a selection touches, along some axes: each array has one element a chunk.

    ``numbers`` count the chunks in row-major order, ``counts`` the elements wanted of each, ``runs`` the pieces in
    which these lie; ``joins`` says that it is the only chunk, and its first and last element are wanted: then the next
    such row follows without a gap.
    """

    numbers: Numbers
    counts: Numbers
    runs: Numbers
    joins: npt.NDArray[np.bool_]


_NO_AXES = _Pieces(np.zeros(1, np.int64), np.ones(1, np.int64), np.ones(1, np.int64), np.ones(1, np.bool_))


def chunk_counts(grid: ChunkGrid) -> tuple[int, ...]:
    """Chunks along each axis.

    Raises
    ------
    OptionError
        The dataset has no chunks.
    """
    if grid.chunks is None:
        raise OptionError(f"dataset of shape {grid.shape} is contiguous: it has no chunks and no chunk cache")
    return tuple(math.ceil(length / chunk) for length, chunk in zip(grid.shape, grid.chunks, strict=True))


def find_accesses(grid: ChunkGrid, selections: Iterable[Any]) -> Accesses:
    """The chunks that HDF5 visits for selections, one h5py read each.

    Fast where each selection is a sample or neighbouring samples, and all want the same of the other axes; fastest for
    an array of samples, and for `find_row_accesses`.

    Parameters
    ----------
    grid : ChunkGrid
    selections : (m,) integer array, or iterable
        An array of integers is one sample a read. Else each is what goes between the brackets of ``dataset[...]``:
        an integer, a slice, an ellipsis, a growing list or 1-d array of integers, a 1-d mask, or a tuple of these, with
        at most one list or mask, as in h5py.

    Returns
    -------
    Accesses

    Raises
    ------
    OptionError
        The dataset has no chunks, or h5py does not take a selection.
    """
    if isinstance(selections, np.ndarray) and selections.ndim == 1 and selections.dtype.kind in "iu":
        starts = selections.astype(np.int64)
        return find_row_accesses(grid, starts, starts + 1)
    sizes = _sizes(grid)
    trace = [_axes_of(selection, grid.shape) for selection in selections]
    rests = {axes: _pieces(axes, sizes[1:]) for axes in {axes[1:] for axes in trace}}
    ranges = [axes[0] for axes in trace if isinstance(axes[0], range) and axes[0].step == 1]
    if len(rests) == 1 and len(ranges) == len(trace):
        rows = np.array([(each.start, max(each.start, each.stop)) for each in ranges], np.int64)
        return _row_accesses(grid, rows[:, 0], rows[:, 1], *rests.values())
    per_band = math.prod(count for count, _ in sizes[1:])
    found = [_combine(_axis_pieces(axes[0], sizes[0][1]), rests[axes[1:]], per_band) for axes in trace]
    bounds = np.cumsum([0, *(len(pieces.numbers) for pieces in found)], dtype=np.int64)
    none = np.empty(0, np.int64)
    chunks, counts, runs = (np.concatenate([none, *(each[i] for each in found)]) for i in range(3))
    return Accesses(chunks, counts * grid.itemsize, runs, bounds)


def find_row_accesses(grid: ChunkGrid, starts: npt.ArrayLike, stops: npt.ArrayLike) -> Accesses:
    """The same for reads of whole neighbouring samples, ``dataset[start:stop]`` each.

    Parameters
    ----------
    grid : ChunkGrid
    starts, stops : (m,) int
        ``0 <= start <= stop <= grid.shape[0]``.

    Raises
    ------
    OptionError
        The dataset has no chunks, or a range does not lie in it.
    """
    sizes = _sizes(grid)
    first, last = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
    if first.shape != last.shape or first.ndim != 1:
        raise OptionError(f"starts and stops have the shapes {first.shape} and {last.shape}: give two (m,) arrays")
    wrong = np.flatnonzero((first < 0) | (last < first) | (last > grid.shape[0]))
    if len(wrong):
        at = int(wrong[0])
        raise OptionError(
            f"selection {at} is rows {first[at]} to {last[at]}: give 0 <= start <= stop <= {grid.shape[0]}"
        )
    return _row_accesses(grid, first, last, _pieces(tuple(range(length) for length in grid.shape[1:]), sizes[1:]))


def _row_accesses(grid: ChunkGrid, starts: Numbers, stops: Numbers, rest: _Pieces) -> Accesses:
    """Accesses of row ranges, each of which wants the same of the other axes."""
    band_rows = grid.band_samples or 1
    first = starts // band_rows
    bands_each = np.where(stops > starts, -(-stops // band_rows) - first, 0)
    begins = np.cumsum(bands_each) - bands_each
    bands = np.arange(int(bands_each.sum())) + np.repeat(first - begins, bands_each)
    low = np.maximum(bands * band_rows, np.repeat(starts, bands_each))
    high = np.minimum((bands + 1) * band_rows, np.repeat(stops, bands_each))
    rows = (high - low)[:, None]
    per_band = math.prod(chunk_counts(grid)[1:])
    chunks = (bands[:, None] * per_band + rest.numbers).ravel()
    runs = (rows * rest.runs - rest.joins * (rows - 1)).ravel()
    bounds = np.concatenate([[0], np.cumsum(bands_each * len(rest.numbers))])
    return Accesses(chunks, (rows * (rest.counts * grid.itemsize)).ravel(), runs, bounds)


def _sizes(grid: ChunkGrid) -> tuple[tuple[int, int], ...]:
    """Of each axis, how many chunks it has, and their length."""
    return tuple(zip(chunk_counts(grid), grid.chunks or (), strict=True))


def _pieces(axes: tuple[Axis, ...], sizes: tuple[tuple[int, int], ...]) -> _Pieces:
    """Of some axes, the last one first: the elements of it are neighbours."""
    pieces, per_outer = _NO_AXES, 1
    for axis, (count, chunk) in zip(reversed(axes), reversed(sizes), strict=True):
        pieces = _combine(_axis_pieces(axis, chunk), pieces, per_outer)
        per_outer *= count
    return pieces


def _combine(outer: _Pieces, inner: _Pieces, per_outer: int) -> _Pieces:
    """Every chunk of an axis with every chunk of the axes behind it, of which there are ``per_outer`` in all."""
    counts = outer.counts[:, None]
    return _Pieces(
        (outer.numbers[:, None] * per_outer + inner.numbers).ravel(),
        (counts * inner.counts).ravel(),
        (counts * inner.runs - inner.joins * (counts - outer.runs[:, None])).ravel(),
        (outer.joins[:, None] & inner.joins).ravel(),
    )


def _axis_pieces(axis: Axis, chunk: int) -> _Pieces:
    if isinstance(axis, range) and axis.step == 1 and len(axis):
        numbers = np.arange(axis.start // chunk, (axis.stop - 1) // chunk + 1)
        edges = np.clip(np.append(numbers, numbers[-1] + 1) * chunk, axis.start, axis.stop)
        counts, runs = np.diff(edges), np.ones(len(numbers), np.int64)
    else:
        indices = np.array(axis, np.int64)
        numbers, places, counts = np.unique(indices // chunk, return_index=True, return_counts=True)
        jumps = np.cumsum(np.diff(indices, prepend=indices[:1]) > 1)
        runs = jumps[places + counts - 1] - jumps[places] + 1
    joins = len(numbers) == 1 and axis[0] % chunk == 0 and axis[-1] % chunk == chunk - 1
    return _Pieces(numbers, counts, runs, np.full(len(numbers), joins))


def _axes_of(selection: Any, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """The selected indices of every axis."""
    parts = selection if isinstance(selection, tuple) else (selection,)
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    num_missing = len(shape) - (len(parts) - len(dots))
    if len(dots) > 1 or num_missing < 0:
        raise OptionError(f"selection {selection!r} has {len(parts)} parts: give at most one for each axis of {shape}")
    at = dots[0] if dots else len(parts)
    parts = (*parts[:at], *(slice(None),) * num_missing, *parts[at + 1 :])
    axes = tuple(_axis_of(part, length, axis) for axis, (part, length) in enumerate(zip(parts, shape, strict=True)))
    if sum(isinstance(axis, tuple) for axis in axes) > 1:
        raise OptionError(f"selection {selection!r} has two lists, h5py takes one: read with one, index the result")
    return axes


def _axis_of(part: Any, length: int, axis: int) -> Axis:
    what = f"selection of axis {axis} is {part!r}"
    if isinstance(part, slice):
        try:
            indices = range(*part.indices(length))
        except (TypeError, ValueError) as error:
            raise OptionError(f"{what}: {error}") from None
        if indices.step < 1:
            raise OptionError(f"{what}: h5py takes a step of 1 or more: turn the result round")
        return indices
    try:
        index = operator.index(part)
    except TypeError:
        return _listed(part, length, what)
    if not -length <= index < length:
        raise OptionError(f"{what}: give {-length} to {length - 1}")
    return range(index % length, index % length + 1)


def _listed(part: Any, length: int, what: str) -> tuple[int, ...]:
    listed = np.asarray(part)
    if listed.dtype.kind == "b" and listed.shape == (length,):
        listed = np.flatnonzero(listed)
    if listed.ndim != 1 or (listed.dtype.kind not in "iu" and listed.size):
        raise OptionError(f"{what}: give an integer, a slice, a 1-d list of integers or a mask of {length}")
    indices = [int(index) + (length if index < 0 else 0) for index in listed]
    if indices and not 0 <= min(indices) <= max(indices) < length:
        raise OptionError(f"{what}: give indices from {-length} to {length - 1}")
    if any(a >= b for a, b in itertools.pairwise(indices)):
        raise OptionError(f"{what}: h5py takes a list whose indices grow: sort it and drop what comes twice")
    return tuple(indices)
