"""Arrays that are stored as grids of blocks, and the blocks that boxes of them consist of. Nothing is read here.

A sample is a box of an array. An array is a grid of stored blocks: the chunks of a dataset, or one block if the dataset
is contiguous. A block is a run of bytes of a file. `h5chunk.store.read.samples` says which boxes a sample consists of,
and `h5chunk.store.read.engine` reads them.

Arrays consist of items, which are single values, or as many of them as every box contains completely: the items of
an array of images that are read as a whole are images, and such an array has one axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from h5chunk.attributes import cached_property
from h5chunk.errors import printable
from h5chunk.store.hdf5.chunk_table import ChunkTable
from h5chunk.store.read.checksums import ChunkChecks

SMALL_BYTES = 256 << 10  # bytes that can be read while a task for one part is made in Python
BOX_BLOCK_BYTES = 4 << 20  # bytes of the blocks of a contiguous dataset of which boxes are read
RAW = 0  # the codec of blocks whose bytes in the file are those in memory


class Blocks(NamedTuple):
    """All stored blocks of some arrays: (n,) each."""

    file: np.ndarray  # int32, the number of the file
    offset: np.ndarray  # int64, in the file; -1 if the block was never written
    size: np.ndarray  # int64, stored bytes
    mask: np.ndarray  # uint32, bit i is set if filter i was skipped for the block

    @classmethod
    def of_chunks(cls, file: int, table: ChunkTable) -> Blocks:
        """Return the chunks of a dataset as blocks. ``file`` is the number of the file."""
        return cls(np.full(len(table), file, np.int32), table.offsets, table.sizes, table.filter_masks)


class Block(NamedTuple):
    """A stored block, in Python numbers."""

    number: int
    array: int
    codec: int  # `RAW`, or 1 + an index of the codecs
    num_bytes: int  # decoded
    file: int
    offset: int
    size: int
    mask: int


class Boxes(NamedTuple):
    """Boxes of arrays: ``low`` to ``high`` of an array go to an element of the output, from the index ``place`` on.

    A box may extend beyond its array. That part of the element is left unchanged.
    """

    array: np.ndarray  # (n,) int64
    low: np.ndarray  # (n, axes) int64, in items
    high: np.ndarray  # (n, axes) int64
    element: np.ndarray  # (n,) int64
    place: np.ndarray | int  # (n, axes) int64; 0 is the first index along all axes


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of boxes in each block.

    A row of ``table``, (n, 1 + 3 * axes) int64, has the index of the element and, along each axis, the first index in
    the block, the first index in the element, and the length. If ``are_equal``, all parts of a block have the same
    lengths.
    """

    block: np.ndarray
    table: np.ndarray
    are_equal: bool = False

    def grouped(self) -> Parts:
        """Return the parts with those of a block next to each other.

        Blocks stay in the order in which they are needed first: the last blocks of a window may be the first ones of
        the next window, for which the cache has them.
        """
        runs = self.block[self.firsts]
        if len(np.unique(runs)) == len(runs):
            return self
        _, first, number = np.unique(self.block, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return self.some(np.argsort(rank[number], kind="stable"))

    @cached_property
    def firsts(self) -> np.ndarray:
        """The index of the first part of each run of parts of one block."""
        return (
            np.flatnonzero(np.diff(self.block, prepend=-1)) if len(self.block) > 1 else np.zeros(len(self.block), int)
        )

    @property
    def sizes(self) -> np.ndarray:
        """The number of items of each part: (n,) int64."""
        return self.by_lengths(lambda parts: parts.table[:, -(self.table.shape[1] // 3) :].prod(axis=1))

    def by_lengths(self, compute: Callable[[Parts], np.ndarray]) -> np.ndarray:
        """Return what a function computes for each part, (n,), from its block and its lengths only."""
        if not self.are_equal:
            return compute(self)
        firsts = self.firsts
        one = Parts(self.block[firsts], self.table[firsts])
        return np.repeat(compute(one), np.diff(firsts, append=len(self.block)))

    def some(self, which: Any) -> Parts:
        """Return some of the parts."""
        return Parts(self.block[which], self.table[which], self.are_equal)


def dataset_text(path: Path, name: str, dataset: str) -> str:
    """Return a text that names a dataset, and the field ``name`` that it belongs to, which may be empty."""
    if not name:
        return f"{printable(path)}: {dataset!r}"
    stored = dataset.strip("/")
    return f"{printable(path)}: field {name!r}" + ("" if stored == name else f" ({printable(stored)})")


def whole_chunk(blocks: np.ndarray) -> np.ndarray:
    """Return the number of the only chunk of a dataset, for `Origin.chunks`."""
    return np.zeros(1, np.int64)


def divided(shape: Sequence[int], item_bytes: int, limit: int = BOX_BLOCK_BYTES) -> tuple[int, ...]:
    """Return the shape of the blocks of an array in C order: contiguous blocks of at most ``limit`` bytes.

    A block has at least one item.

    >>> divided((10, 4, 6), item_bytes=1, limit=50), divided((10, 4, 6), item_bytes=1, limit=14)
    ((2, 4, 6), (1, 2, 6))
    """
    block, left = list(shape), max(1, limit // item_bytes)
    for axis in reversed(range(len(shape))):
        block[axis] = min(shape[axis], max(1, left))
        left //= max(1, block[axis])
    return tuple(block)


class Origin:
    """A dataset that blocks belong to, or several datasets of one file: their names for messages, and their checksums.

    ``name`` returns a text that names the chunk with this number, and ``offsets``, (n,) int64, is where each chunk
    begins in the file, if that is known. ``chunks`` returns the numbers of the chunks that contain blocks with these
    numbers, both (n,) int64, which count from the first block of the origin. ``checks`` has the chunks' checksums.
    """

    def __init__(
        self,
        file: int,
        name: Callable[[int], str],
        offsets: np.ndarray | None = None,
        checks: ChunkChecks | None = None,
        chunks: Callable[[np.ndarray], np.ndarray] = lambda blocks: blocks,
    ) -> None:
        self.file, self.checks, self.chunks = file, checks, chunks
        self._name, self._offsets = name, np.zeros(1, np.int64) if offsets is None else offsets

    def at(self, offset: int) -> str:
        """Return a text that names the data at an offset of the file."""
        return self._name(int(np.where(self._offsets <= offset, self._offsets, -1).argmax()))

    def block(self, number: int) -> str:
        """Return a text that names a block."""
        return self._name(int(self.chunks(np.array([number]))[0]))


class Codec(Protocol):
    """Converts the stored bytes of a block to items.

    ``pipeline`` has the filters for jobs of native threads, () `h5chunk.native.filters.PIPELINE`, or is None.
    """

    @property
    def pipeline(self) -> np.ndarray | None: ...

    def fill(self, number: int, out: np.ndarray) -> None:
        """Fill a block, (n,) uint8, that has no offset in the file.

        Either it was never written, or this codec gets it in another way. ``number`` counts from the first block of the
        origin.
        """

    def decode(self, stored: np.ndarray, mask: int, out: np.ndarray, where: Callable[[], str]) -> None:
        """Decode stored bytes into ``out``, (n,) uint8, a whole block.

        Raises FileError if they are damaged. ``where`` returns a text that names the block.
        """


class FillCodec:
    """A codec of blocks that have no bytes in the file."""

    pipeline = None

    def decode(self, stored: np.ndarray, mask: int, out: np.ndarray, where: Callable[[], str]) -> None:
        raise AssertionError("the block has no stored bytes")


@dataclass(frozen=True)
class Arrays:
    """Arrays that have the same item size and number of axes, and differ in shape, blocks and place."""

    item_bytes: int
    first: np.ndarray  # (m,) int64, the number of each array's first block
    shape: np.ndarray  # (m, axes) int64, in items
    block: np.ndarray  # (m, axes) int64, the shape of a block; blocks at the edges are stored in full
    codec: np.ndarray  # (m,) int64: `RAW`, or 1 + an index of ``codecs``
    blocks: Blocks
    codecs: tuple[Codec, ...]
    origins: tuple[Origin, ...]
    origin_starts: np.ndarray  # (len(origins),) int64, the first block of each origin
    inner: tuple[int, ...] = ()  # the shape of an item, whose last axis consists of bytes

    @classmethod
    def of_one(
        cls,
        item_bytes: int,
        shape: Sequence[int],
        block: Any,
        blocks: Blocks,
        codec: Codec | None,
        origin: Origin,
        inner: tuple[int, ...] = (),
    ) -> Arrays:
        """Return a single array. ``codec`` is None if its bytes are stored as in memory."""
        start, codecs = np.zeros(1, np.int64), () if codec is None else (codec,)
        kind = np.full(1, len(codecs))
        tables = np.array([shape], np.int64), np.array([block], np.int64)
        return cls(item_bytes, start, *tables, kind, blocks, codecs, (origin,), start, inner)

    @classmethod
    def joined(cls, parts: Sequence[Arrays]) -> Arrays:
        """Concatenate arrays, such as those of several files or episodes."""
        if len(parts) == 1:
            return parts[0]
        axes = max(part.num_axes for part in parts)
        parts = [part.with_axes(axes) for part in parts]
        while len({part.item_bytes for part in parts}) > 1:  # such as strings of other lengths
            axes += 1
            parts = [part.with_axes(axes) for part in parts]
        num_blocks = np.cumsum([0, *(len(part.blocks.offset) for part in parts)])
        codecs: dict[int, tuple[int, Codec]] = {}  # parts may share a codec
        kinds = []
        for part in parts:
            own = [RAW, *(codecs.setdefault(id(each), (len(codecs) + 1, each))[0] for each in part.codecs)]
            kinds.append(np.array(own)[part.codec])
        return cls(
            parts[0].item_bytes,
            np.concatenate([part.first + start for part, start in zip(parts, num_blocks, strict=False)]),
            np.concatenate([part.shape for part in parts]),
            np.concatenate([part.block for part in parts]),
            np.concatenate(kinds),
            Blocks(*map(np.concatenate, zip(*(part.blocks for part in parts), strict=True))),
            tuple(codec for _, codec in codecs.values()),
            tuple(origin for part in parts for origin in part.origins),
            np.concatenate([part.origin_starts + start for part, start in zip(parts, num_blocks, strict=False)]),
            parts[0].inner,
        )

    def with_axes(self, num_axes: int) -> Arrays:
        """Return the same arrays with smaller items, so that they have ``num_axes`` axes."""
        count = num_axes - self.num_axes
        if not count:
            return self
        axes = np.broadcast_to(np.array(self.inner[:count], np.int64), (len(self), count))
        return replace(
            self,
            item_bytes=self.item_bytes // max(1, math.prod(self.inner[:count])),
            shape=np.concatenate([self.shape, axes], axis=1),
            block=np.concatenate([self.block, axes], axis=1),
            inner=self.inner[count:],
        )

    def __len__(self) -> int:
        return len(self.first)

    @property
    def num_axes(self) -> int:
        return self.shape.shape[1]

    @cached_property
    def is_raw(self) -> bool:
        """Whether the bytes of all blocks in the file are those in memory."""
        return not self.codec.any()

    @cached_property
    def has_raw(self) -> bool:
        """Whether the bytes of any blocks in the file are those in memory."""
        return not self.codec.all()

    @cached_property
    def _steps(self) -> np.ndarray:
        """By how much the number of a block grows along each axis of the grid of each array: (m, axes) int64."""
        grid = -(-self.shape // self.block)
        steps = np.ones_like(grid)
        steps[:, :-1] = np.cumprod(grid[:, :0:-1], axis=1)[:, ::-1]
        return steps

    @cached_property
    def max_block_bytes(self) -> int:
        """Size in bytes of the largest decoded block, or 0 if no block is decoded."""
        return int(self.block_bytes[self.codec != RAW].max(initial=0))

    @cached_property
    def block_bytes(self) -> np.ndarray:
        """Size in bytes of a decoded block of each array: (m,) int64."""
        sizes: np.ndarray = self.block.prod(axis=1) * self.item_bytes
        return sizes

    def array_of(self, block: np.ndarray) -> np.ndarray:
        """Return the number of the array that contains each block."""
        if len(self) == 1:
            return np.zeros(len(block), np.int64)
        return np.searchsorted(self.first, block, "right") - 1

    def listed(self, blocks: np.ndarray) -> list[Block]:
        """Return all that is known about some blocks, (n,) int64."""
        array = self.array_of(blocks)
        about = blocks, array, self.codec[array], self.block_bytes[array], *(each[blocks] for each in self.blocks)
        return [*map(Block._make, zip(*(column.tolist() for column in about), strict=True))]

    def cut_rows(self, array: np.ndarray, row: np.ndarray, element: np.ndarray) -> Parts:
        """Do the same as `cut`, in less time, for boxes that are one index of the first axis, and all of the others.

        If there are several axes, the parts of a block are next to each other.
        """
        block = self.block[array, 0] if len(self) > 1 else self.block[0, 0]
        band = row // block
        if self.num_axes == 1:
            table = np.zeros((len(row), 4), np.int64)
            table[:, 0], table[:, 1], table[:, 3] = element, row - band * block, 1
            return Parts(self.first[array] + band, table)
        # rows of a band are in the same blocks: put them next to each other, the bands in the order of their first rows
        number = self.first[array] + band * self._steps[array, 0]  # the first block of the band
        _, first, which = np.unique(number, return_index=True, return_inverse=True)
        order = np.argsort(first[which], kind="stable")
        begins = np.flatnonzero(np.diff(number[order], prepend=-1))
        counts = np.diff(begins, append=len(row)) * self._steps[array[order[begins]], 0]
        ends = np.cumsum(counts)
        numbers, table = np.empty(ends[-1], np.int64), np.empty((ends[-1], 1 + 3 * self.num_axes), np.int64)
        for begin, own_count, end in zip(begins.tolist(), counts.tolist(), ends.tolist(), strict=True):
            cells = self._cells(int(array[order[begin]]))
            own = order[begin : begin + own_count // len(cells)]
            parts = table[end - own_count : end].reshape(len(cells), len(own), -1)
            parts[:, :, 0], parts[:, :, 1:] = element[own], cells[:, None]
            parts[:, :, 1] = row[own] % self.block[array[own[0]], 0]
            numbers[end - own_count : end] = np.repeat(number[own[0]] + np.arange(len(cells)), len(own))
        return Parts(numbers, table, are_equal=True)

    def _cells(self, array: int) -> np.ndarray:
        """Return the columns of `Parts.table`, without the first, for one row of an array: (n, 3 * axes) int64."""
        if array not in self._cells_of:
            block, shape = self.block[array].copy(), self.shape[array].copy()
            block[0] = shape[0] = 1
            grid = -(-shape // block)
            place = np.stack(np.unravel_index(np.arange(grid.prod()), tuple(grid)), axis=1) * block
            lengths = np.minimum(place + block, shape) - place
            self._cells_of[array] = np.concatenate([np.zeros_like(place), place, lengths], axis=1)
        return self._cells_of[array]

    @cached_property
    def _cells_of(self) -> dict[int, np.ndarray]:
        return {}

    def cut(self, boxes: Boxes) -> Parts:
        """Divide boxes into the parts that are in each block."""
        # tables of a single array are broadcast instead of being copied for each box
        array = boxes.array if len(self) > 1 else np.zeros(1, np.int64)
        block, shape, steps = self.block[array], self.shape[array], self._steps[array]
        begin, end = np.maximum(boxes.low, 0), np.minimum(boxes.high, shape)
        first = begin // block
        counts = np.where(end > begin, (end - 1) // block - first + 1, 0)
        totals = counts[:, 0] if self.num_axes == 1 else counts.prod(axis=1)
        element, place = boxes.element, boxes.place - boxes.low
        if (totals == 1).all():
            at = first
            number = self.first[array] + (at * steps).sum(axis=1)
        else:
            # count the blocks of each box, and write the count as a position in the grid of the box's blocks
            box = np.repeat(np.arange(len(totals)), totals)
            left = np.arange(len(box)) - np.repeat(np.cumsum(totals) - totals, totals)
            at = np.empty((len(box), self.num_axes), np.int64)
            for axis in reversed(range(self.num_axes)):
                left, at[:, axis] = np.divmod(left, counts[box, axis])
            at += first[box]
            begin, end, element, place = begin[box], end[box], element[box], place[box]
            if len(self) > 1:
                block, steps, array = block[box], steps[box], array[box]
            number = self.first[array] + (at * steps).sum(axis=1)
        corner = at * block
        start, stop = np.maximum(begin, corner), np.minimum(end, corner + block)
        table = np.concatenate([element[:, None], start - corner, start + place, stop - start], axis=1)
        return Parts(number, table)

    def items_in(self, block: np.ndarray) -> np.ndarray:
        """Return how many items of each block are inside of its array: (n,) int64."""
        low, high = self.bounds(block)
        items: np.ndarray = (high - low).prod(axis=1)
        return items

    def bounds(self, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first index of each block along each axis, and the end of its part inside of its array."""
        array = self.array_of(block)
        left, at = block - self.first[array], np.empty((len(block), self.num_axes), np.int64)
        for axis in range(self.num_axes):
            at[:, axis], left = np.divmod(left, self._steps[array, axis])
        low = at * self.block[array]
        return low, np.minimum(low + self.block[array], self.shape[array])

    def bytes_read(self, parts: Parts) -> int:
        """Return the bytes that are read or decoded for these parts.

        A decoded block counts once, and so does a small raw block of which boxes are read. Other raw blocks count in
        part.
        """
        array = self.array_of(parts.block)
        whole = self.codec[array] != RAW
        if self.num_axes > 1:
            whole |= self.block_bytes[array] <= SMALL_BYTES
        items = parts.some(~whole).sizes.sum() + self.items_in(np.unique(parts.block[whole])).sum()
        return int(items) * self.item_bytes

    def origin_of(self, block: int) -> tuple[Origin, int]:
        """Return the origin of a block, and the number of the block in it."""
        if len(self.origins) == 1:
            return self.origins[0], block
        number = int(np.searchsorted(self.origin_starts, block, "right")) - 1
        return self.origins[number], block - int(self.origin_starts[number])

    def at(self, file: int, offset: int) -> str:
        """Return a text that names the data at an offset of a file."""
        own = (self.blocks.file == file) & (self.blocks.offset <= offset)
        return self.origin_of(int(np.where(own, self.blocks.offset, -1).argmax()))[0].at(offset)

    def where(self, block: int) -> str:
        """Return a text that names a block."""
        origin, number = self.origin_of(block)
        return origin.block(number)

    def only(self, number: int) -> Arrays:
        """Return one of the arrays."""
        start = int(self.first[number])
        stop = int(self.first[number + 1]) if number + 1 < len(self) else len(self.blocks.offset)
        own, zero = slice(number, number + 1), np.zeros(1, np.int64)
        return replace(
            self,
            first=zero,
            shape=self.shape[own],
            block=self.block[own],
            codec=self.codec[own],
            blocks=Blocks(*(column[start:stop] for column in self.blocks)),
            origins=(self.origin_of(start)[0],),
            origin_starts=zero,
        )
