"""Choose the positions of patches in volumes: at random, drawn anew in each epoch, or as the tiles of a grid.

The possible starts of a patch are divided into cells, which are blocks of neighbouring starts. The probabilities of the
cells are concatenated and divided equally among the samples of an epoch. Sample ``i`` is therefore always in the same
cell or an adjacent one, and an order of samples that keeps cells together reads each chunk for many patches at once.
The position of sample ``i`` within its share depends only on the seed, the epoch and ``i``. All starts of a volume are
equally likely, or have probabilities in proportion to their weights.

A row is the index of a sample plus the epoch times the number of samples.

Source: systematic sampling; Madow, "On the theory of systematic sampling" (1949).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from h5chunk.plan.draws import EVERY_EPOCH, Draws
from h5chunk.plan.permutation import Indices
from h5chunk.plan.selection import starts_of_runs

CELL_BYTES = 128 << 20  # decoded size of the chunks that the patches of a cell need
MAX_CHUNK_BYTES = 8 << 20  # maximum size of recommended chunks
CALL_BYTES = 32 << 10  # bytes that can be decoded in the fixed time that each chunk takes
CANDIDATES = 256  # number of centres that are drawn and kept for each cell, if there are weights
CANDIDATE_STREAM = 64  # first stream for drawing these centres

Shape = tuple[int, ...]
Weigh = Callable[[int, Sequence[slice]], np.ndarray]


class Starts(NamedTuple):
    """The possible starts of patches in each volume: ``num`` of them along each axis, beginning at ``first``."""

    first: Indices  # (num_volumes, axes)
    num: Indices

    @classmethod
    def of(cls, shapes: Indices, size: Indices, margin: Indices) -> Starts:
        """Return the starts of patches that keep ``margin`` from the borders.

        A volume that is too small has one start.
        """
        room = shapes - size - 2 * margin
        return cls(np.where(room < 0, -((-room + 1) // 2), 0) + margin, np.maximum(room, 0) + 1)


class ChunkCost(NamedTuple):
    """Ratio of decoded bytes to bytes of a patch, if patches are read ``alone``, or ``together`` with their cell."""

    chunks: Shape
    alone: float
    together: float


def chunk_cost(shape: Shape, size: Shape, chunks: Shape, itemsize: int) -> ChunkCost:
    """Return the cost of reading randomly placed patches, which have as many voxels in total as the volume.

    >>> chunk_cost((512, 512, 512), (64, 64, 64), (1, 512, 512), 1)
    ChunkCost(chunks=(1, 512, 512), alone=64.0, together=1.0)
    """
    alone = together = 1.0
    cell = cell_shape(shape, size, chunks, itemsize)
    for length, patch, chunk, step in zip(shape, size, chunks, cell, strict=True):
        starts = np.arange(max(1, length - patch + 1))
        last = np.minimum(starts + patch, length) - 1
        alone *= float(np.mean(last // chunk - starts // chunk + 1)) * chunk / min(patch, length)
        own = starts[::step], last[np.minimum(starts[::step] + step, len(starts)) - 1]
        together *= int((own[1] // chunk - own[0] // chunk + 1).sum()) * chunk / length
    return ChunkCost(chunks, alone, together)


def best_chunks(shape: Shape, size: Shape, itemsize: int) -> ChunkCost:
    """Choose chunks for which few bytes in few chunks are decoded per patch.

    Patches may be read alone or together with their cell, so both cases count.

    >>> best_chunks((512, 512, 512), (64, 64, 64), 4).chunks
    (32, 32, 32)
    """
    tried = [tuple(min(-(-patch * part // 4), length) for patch, length in zip(size, shape, strict=True))
             for part in (1, 2, 4, 8)]  # fmt: skip
    fitting = [chunks for chunks in tried if math.prod(chunks) * itemsize <= MAX_CHUNK_BYTES] or tried[:1]
    costs = [chunk_cost(shape, size, chunks, itemsize) for chunks in fitting]

    def time(cost: ChunkCost) -> float:
        return math.sqrt(cost.alone * cost.together) * (1 + CALL_BYTES / (math.prod(cost.chunks) * itemsize))

    return min(costs, key=time)


def cell_shape(shape: Shape, size: Shape, chunks: Shape, itemsize: int, cell_bytes: int = CELL_BYTES) -> Shape:
    """Choose the largest cells whose patches need chunks of at most ``cell_bytes`` decoded bytes.

    >>> cell_shape((512, 512, 512), (64, 64, 64), (64, 64, 64), 4)
    (256, 256, 256)
    """
    units = [max(pair) for pair in zip(size, chunks, strict=True)]
    cell, grows = list(units), [length > unit for length, unit in zip(shape, units, strict=True)]
    while any(grows):
        axis = min((axis for axis in range(len(shape)) if grows[axis]), key=lambda axis: cell[axis] / units[axis])
        larger = [*cell[:axis], cell[axis] + units[axis], *cell[axis + 1 :]]
        if decoded_voxels(shape, size, chunks, larger) * itemsize > cell_bytes:
            grows[axis] = False
            continue
        cell = larger
        grows[axis] = cell[axis] < shape[axis]
    return tuple(cell)


def decoded_voxels(shape: Sequence[int], size: Sequence[int], chunks: Sequence[int], cell: Sequence[int]) -> int:
    """Return the number of voxels in all chunks that the patches of a volume's first cell can need."""
    axes = zip(shape, size, chunks, cell, strict=True)
    return math.prod(min(-(-(starts + patch - 1) // chunk) * chunk, length) for length, patch, chunk, starts in axes)


class RandomPatches:
    """Random positions of patches.

    ``shapes``, (num_volumes, axes) int64, has the shapes of the volumes, and ``size`` is the shape of a patch. ``cell``
    is the shape of a cell, and the decoded size in bytes of the chunks that its patches need. ``counts``,
    (num_volumes,), is the number of patches of each volume in an epoch. ``weigh`` returns the weights of the voxels in
    a box of a volume. With weights, a fraction ``share`` of the patches is centred, as far as the borders allow, at
    voxels that are drawn by weight. Only `CANDIDATES` of the voxels of a cell can be drawn.
    """

    def __init__(
        self,
        shapes: Indices,
        size: Shape,
        starts: Starts,
        cell: tuple[Shape, int],
        counts: Indices,
        seed: int,
        weigh: Weigh | None = None,
        share: float = 1.0,
    ) -> None:
        self.size, self.shapes, self.starts, self._counts, self._seed = np.array(size), shapes, starts, counts, seed
        self.num_samples, self.cell_bytes = int(counts.sum()), cell[1]
        candidates = [np.zeros((0, CANDIDATES, len(size)), np.int32)]
        self.unweighted: list[int] = []  # volumes all of whose weights are 0
        num_cells = 0
        tables: list[tuple[np.ndarray, ...]] = []
        for number, (first, count) in enumerate(zip(*starts, strict=True)):
            low = _grid([np.arange(0, length, step) for length, step in zip(count.tolist(), cell[0], strict=True)])
            extent = np.minimum(low + cell[0], count) - low
            uniform = extent.prod(axis=1, dtype=np.float64)
            mass = np.stack([uniform / uniform.sum(), np.zeros(len(low))], axis=1)
            if weigh is not None:
                weights, kept = self._weigh(weigh, number, low, extent, num_cells)
                candidates.append(kept)
                num_cells += len(low)
                if not weights.any():
                    self.unweighted.append(number)
                else:
                    weights /= weights.max()
                    mass = np.stack([mass[:, 0] * (1 - share), weights / weights.sum() * share], axis=1)
            before, own = int(counts[:number].sum()), int(counts[number])
            end = np.minimum(before + np.cumsum(mass) * own, before + own)
            end[np.flatnonzero(mass)[-1] :] = before + own
            tables.append((low + first, extent, np.full(len(low), number), end))
        self._low, self._extent, self._volume, self._ends = map(np.concatenate, zip(*tables, strict=True))
        self._candidates = np.concatenate(candidates)
        self.chunk_starts = starts_of_runs(self._entries(np.arange(self.num_samples) + 0.5) // 2)

    def _weigh(
        self, weigh: Weigh, number: int, low: Indices, extent: Indices, before: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum of the weights in each cell, and draw candidates for starts of patches by weight."""
        first, count, shape = (each[number] for each in (*self.starts, self.shapes))
        half = self.size // 2
        begin = np.where(low == 0, 0, np.clip(low + first + half, 0, shape))
        end = np.where(low + extent == count, shape, np.clip(low + extent + first + half, 0, shape))
        sums, kept = np.zeros(len(low)), np.zeros((len(low), CANDIDATES, len(half)), np.int64)
        for cell in range(len(low)):
            weights = weigh(number, [slice(*pair) for pair in zip(begin[cell], end[cell], strict=True)])
            total = np.cumsum(weights, dtype=np.float64)
            if not total.size or not total[-1]:
                continue
            sums[cell] = total[-1]
            draws = Draws(self._seed, EVERY_EPOCH, np.arange(CANDIDATES))
            chance = (np.arange(CANDIDATES) + draws.uniform(CANDIDATE_STREAM + before + cell, 1)[0]) / CANDIDATES
            voxels = np.minimum(
                np.searchsorted(total, chance * total[-1], "right"), np.flatnonzero(weights.ravel())[-1]
            )
            centres = np.stack(np.unravel_index(voxels, weights.shape), axis=1) + begin[cell]
            kept[cell] = np.clip(centres - half, first, first + count - 1)
        return sums, kept.astype(np.int32)

    def _entries(self, targets: np.ndarray) -> Indices:
        return np.minimum(np.searchsorted(self._ends, targets, "right"), len(self._ends) - 1)

    def boxes(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return the volume, (n,), and the start, (n, axes), of each patch."""
        epochs, numbers = np.divmod(rows, self.num_samples)
        axes = len(self.size)
        chances = np.empty((axes + 1, len(rows)))
        for epoch in np.unique(epochs).tolist():
            own = epochs == epoch
            chances[:, own] = Draws(self._seed, epoch, np.ascontiguousarray(numbers[own])).uniform(0, axes + 1)
        entries = self._entries(np.minimum(numbers + chances[0], np.nextafter(numbers + 1.0, 0)))
        cells, weighted = entries // 2, entries % 2 == 1
        starts = self._low[cells] + (chances[1:].T * self._extent[cells]).astype(np.int64)
        if weighted.any():
            picks = (chances[1, weighted] * CANDIDATES).astype(np.int64)
            starts[weighted] = self._candidates[cells[weighted], picks]
        return self._volume[cells], starts

    @property
    def identity(self) -> tuple[object, ...]:
        """A value that is equal for plans with the same patches."""
        tables = self.shapes, self.size, self._counts, self._ends, self._candidates
        return self._seed, *(zlib.crc32(np.ascontiguousarray(table).tobytes()) for table in tables)


class Tiles:
    """The patches of a grid with steps of ``size - overlap``, volume after volume.

    The last patch along an axis ends at the border of the volume.
    """

    cell_bytes = 0

    def __init__(self, shapes: Indices, size: Shape, starts: Starts, overlap: Shape) -> None:
        self.size, self.shapes, self.starts = np.array(size), shapes, starts
        self._axes = []
        for first, count in zip(*starts, strict=True):
            steps = zip(first.tolist(), count.tolist(), size, overlap, strict=True)
            self._axes.append([np.unique(np.append(np.arange(at, at + num, step - both), at + num - 1))
                               for at, num, step, both in steps])  # fmt: skip
        grids = [[len(axis) for axis in axes] for axes in self._axes]
        self.first_of = np.concatenate([[0], np.cumsum([math.prod(grid) for grid in grids])])
        self.num_samples = int(self.first_of[-1])
        rows = [np.arange(before, before + math.prod(grid), math.prod(grid[1:]))
                for before, grid in zip(self.first_of, grids, strict=False)]  # fmt: skip
        self.chunk_starts = np.append(np.concatenate(rows), self.num_samples)

    @property
    def identity(self) -> tuple[object, ...]:
        """A value that is equal for plans with the same patches."""
        return self.size.tolist(), [[axis.tolist() for axis in axes] for axes in self._axes]

    def boxes(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return the volume, (n,), and the start, (n, axes), of each patch, which are the same in all epochs."""
        numbers = rows % self.num_samples
        volumes = np.searchsorted(self.first_of, numbers, "right") - 1
        starts = np.empty((len(rows), len(self.size)), np.int64)
        for volume in np.unique(volumes).tolist():
            own, axes = volumes == volume, self._axes[volume]
            where = np.unravel_index(numbers[own] - self.first_of[volume], [len(axis) for axis in axes])
            starts[own] = np.stack([axis[at] for axis, at in zip(axes, where, strict=True)], axis=1)
        return volumes, starts


def _grid(axes: Sequence[np.ndarray]) -> Indices:
    """Return all combinations of the values of axes, (n, axes). The last axis varies fastest."""
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
