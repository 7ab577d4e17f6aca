"""Read boxes of arrays into memory: make the tasks, which native threads or Python threads run.

There are three ways, and no more:

- Raw rows (`row_tasks`): rows of a dataset that are runs of bytes are read directly to their places.
- Raw parts: boxes of blocks without filters are read by runs of bytes or, if many boxes share a block, in one slab.
- Coded blocks: a block is read, checked and decoded once, or found in the cache, and its parts are copied. Native
  threads do all of that (`BlocksTask`) if the C library knows the filters and no checksum is due; otherwise Python
  threads do (`BlockTask`).
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np

from h5chunk import native
from h5chunk.attributes import cached_property
from h5chunk.errors import FileError
from h5chunk.native import (
    BLOCK,
    BLOCKS,
    DAMAGED,
    DONE,
    FULL,
    JOB,
    Blocks,
    BoxCopies,
    Result,
    available,
    run,
)
from h5chunk.native.filters import PIPELINE
from h5chunk.store.hdf5.codecs import scratch
from h5chunk.store.hdf5.ranges import (
    MAX_VECTORS,
    PART_BYTES,
    OneFile,
    Ranges,
    ReadTask,
    VectorTask,
    held,
    read_bytes,
    read_error,
    read_jobs,
    row_tasks,
    vector_tasks,
    vectors_of,
)
from h5chunk.store.read.arrays import RAW, SMALL_BYTES, Arrays, Block, Boxes, Parts
from h5chunk.store.read.open_files import OpenFiles
from h5chunk.store.read.through_hdf5 import Hdf5Files

GAP_BYTES = 4 << 10  # smaller gaps between two rows are read, because skipping them would need another system call
SLAB_BYTES = 8 << 20  # limit on the bytes of a raw block that are read at once for several boxes
JOB_BYTES = 256 << 10  # decoded bytes that a native thread takes at a time
CACHE_BYTES = 256 << 20  # limit on the decoded blocks that are kept for all fields of a data set


class Kept:
    """A decoded block that is kept.

    ``memory`` has its bytes, (n,) uint8, and their state, (1,) int32, one of `h5chunk.native.EMPTY` to ``FULL``. Only
    native threads fill this memory. A Python thread, which holds the lock, replaces it by full memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.lock = threading.Lock()
        self.memory = np.empty(num_bytes, np.uint8), np.zeros(1, np.int32)


class BlockCache:
    """The most recently used decoded blocks of all fields of a data set, of ``limit_bytes`` or a single block.

    Any number of threads may use it. It also has each thread's buffers, and the files that HDF5 reads, which all fields
    share.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes, self.hdf5 = limit_bytes, Hdf5Files()
        self.forget()

    def forget(self) -> None:
        """Free all memory, and replace the locks that threads of a forked parent may hold."""
        self.hdf5.close()
        self.local = threading.local()
        self._lock, self._num_bytes = threading.Lock(), 0
        self._blocks: OrderedDict[tuple[object, int], Kept] = OrderedDict()

    def get(self, key: tuple[object, int], num_bytes: int, read: Callable[[np.ndarray], None]) -> np.ndarray:
        """Return a decoded block, (num_bytes,) uint8. ``read`` fills it if it is not kept."""
        kept = self.find(key, num_bytes)
        assert kept is not None
        if kept.memory[1][0] != FULL:
            with kept.lock:  # other Python threads wait for the one that decodes the block
                if kept.memory[1][0] != FULL:
                    values = np.empty(num_bytes, np.uint8)  # a native thread may be filling the other memory
                    read(values)
                    kept.memory = values, np.array([FULL], np.int32)
        return kept.memory[0]

    def find(self, key: tuple[object, int], num_bytes: int, *, is_made: bool = True) -> Kept | None:
        """Return the memory of a block, which its user must fill if it is empty.

        Returns None if it is not kept, and not to be made.
        """
        with self._lock:
            kept = self._blocks.get(key)
            if kept is None:
                if not is_made:
                    return None
                kept = self._blocks[key] = Kept(num_bytes)
                self._num_bytes += num_bytes
            self._blocks.move_to_end(key)
            while self._num_bytes > self.limit_bytes and len(self._blocks) > 1:
                self._num_bytes -= len(self._blocks.popitem(last=False)[1].memory[0])
        return kept


class BoxReader:
    """Makes the tasks that read boxes of some arrays."""

    def __init__(self, arrays: Arrays, cache: BlockCache) -> None:
        self.arrays, self.cache = arrays, cache
        self._key = object()  # of its blocks in the cache
        self._checks = [origin.checks for origin in arrays.origins if origin.checks is not None]

    @property
    def has_checks(self) -> bool:
        """Whether blocks must still be compared with their checksums."""
        return bool(self._checks) and not all(checks.are_done for checks in self._checks)

    @property
    def reads_rows(self) -> bool:
        """Whether `rows` reads any rows with tasks that do not depend on them, from a single file."""
        return len(self.arrays) == 1 and self.arrays.is_raw and self.arrays.num_axes == 1 and not self.has_checks

    # --- raw rows ------------------------------------------------------------------------------------------------

    def rows(
        self,
        array: np.ndarray,
        rows: np.ndarray,
        destinations: np.ndarray,
        out: np.ndarray,
        counts: np.ndarray | None = None,
    ) -> Iterator[ReadTask]:
        """Yield tasks that read item ``rows[i]`` of array ``array[i]`` to item ``destinations[i]`` of ``out``.

        The arrays must be raw, and have one axis. With ``counts``, ``rows[i]`` is the first of ``counts[i]`` items.
        """
        arrays = self.arrays
        if len(arrays) > 1 and self.has_checks:  # each array has its own checksums
            for number, own in _groups(array):
                one, own_counts = BoxReader(arrays.only(number), self.cache), None if counts is None else counts[own]
                yield from one.rows(np.zeros(len(rows[own]), np.int64), rows[own], destinations[own], out, own_counts)
            return
        block = arrays.block[array, 0] if len(arrays) > 1 else arrays.block[0, 0]
        if counts is not None and len(arrays.blocks.offset) > 1 and (rows % block + counts > block).any():
            nothing = np.zeros(len(rows), np.int64)
            boxes = Boxes(array, rows[:, None], (rows + counts)[:, None], nothing, destinations[:, None])
            yield from self._raw_runs(arrays.cut(boxes), items_of(out.reshape(-1), arrays.item_bytes, (1, -1)))
            return
        if len(arrays) == 1:
            yield from self._rows_of_one(rows, destinations, out, counts)
            return
        number = arrays.first[array] + rows // block
        offsets = arrays.blocks.offset[number] + rows % block * arrays.item_bytes
        for file, own in _groups(arrays.blocks.file[number]):
            blocks, own_counts = (offsets[own], 1, arrays.item_bytes), None if counts is None else counts[own]
            numbers = np.arange(len(blocks[0]))
            yield from row_tasks(blocks, numbers, own_counts, destinations[own], out, self._at(file), file)

    def _rows_of_one(
        self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray, counts: np.ndarray | None
    ) -> Iterator[ReadTask]:
        """Yield the tasks of `rows` for a single array, none of whose runs of items crosses the border of a block."""
        arrays, origin = self.arrays, self.arrays.origins[0]
        blocks, checks = (arrays.blocks.offset, int(arrays.block[0, 0]), arrays.item_bytes), origin.checks
        if checks is None or checks.are_done:
            yield from row_tasks(blocks, rows, counts, destinations, out, origin.at, origin.file)
            return
        whole = checks.are_read_whole(rows) if counts is None else np.zeros(len(rows), bool)
        sizes = np.full(int(whole.sum()), arrays.item_bytes)
        vectors = vectors_of(sizes, destinations[whole] * arrays.item_bytes, out)
        yield from checks.whole_tasks(rows[whole], vectors, out)
        if not whole.all():
            rows, destinations = rows[~whole], destinations[~whole]
            counts = None if counts is None else counts[~whole]
            yield from checks.tasks(checks.of_rows(rows, counts))
            yield from row_tasks(blocks, rows, counts, destinations, out, origin.at, origin.file)

    # --- boxes ---------------------------------------------------------------------------------------------------

    def boxes(
        self, boxes: Boxes, out: np.ndarray, keeps: bool | None = None, at_end: Callable[[], None] | None = None
    ) -> Iterator[ReadTask]:
        """Yield tasks that read boxes, as `parts` does."""
        return self.parts(self.arrays.cut(boxes), out, keeps, at_end)

    def parts(
        self, parts: Parts, out: np.ndarray, keeps: bool | None = None, at_end: Callable[[], None] | None = None
    ) -> Iterator[ReadTask]:
        """Yield tasks that read parts of blocks into ``out``, (n, *element shape) of items, C-contiguous.

        ``keeps`` is whether decoded blocks are kept in the cache. By default, those are that are used only in part.
        ``at_end`` is called after the last task.
        """
        if not len(parts.block):
            return
        tasks: list[ReadTask] = []
        if len(parts.block) == 1 and not self.arrays.has_raw:  # the same as below, in a quarter of the time
            is_whole = (
                parts.sizes * self.arrays.item_bytes >= self.arrays.max_block_bytes if keeps is None else not keeps
            )
            tasks.append(BlockTask(self, parts, np.atleast_1d(is_whole), out))
            parts = parts.some(slice(0))
        if self.arrays.has_raw:
            runs = parts.by_lengths(lambda parts: self._are_runs(parts, out))
            if runs.any():
                tasks += self._raw_runs(parts if runs.all() else parts.some(runs), out)
                parts = parts.some(~runs)
        if len(parts.block):
            tasks += self._block_tasks(parts.grouped(), out, keeps)
        yield from tasks if at_end is None else _with_end(tasks, at_end)

    def _are_runs(self, parts: Parts, out: np.ndarray) -> np.ndarray:
        """Return which parts are one run of bytes in a raw block and in the output: (n,) bool.

        In such a part, all axes after one axis are complete, and all axes before it have the length 1.
        """
        axes, array = self.arrays.num_axes, self.arrays.array_of(parts.block)
        length = parts.table[:, 1 + 2 * axes :]
        is_whole = (length == self.arrays.block[array]) & (length == np.array(out.shape[1:]))
        runs, are_whole = np.zeros(len(length), bool), np.ones(len(length), bool)
        for axis in reversed(range(axes)):
            runs |= are_whole & (length[:, :axis] == 1).all(axis=1)
            are_whole &= is_whole[:, axis]
        return runs & (self.arrays.codec[array] == RAW)

    def _raw_runs(self, parts: Parts, out: np.ndarray) -> Iterator[ReadTask]:
        arrays, axes, item = self.arrays, self.arrays.num_axes, self.arrays.item_bytes
        first, place = parts.table[:, 1 : 1 + axes], parts.table[:, 1 + axes : 1 + 2 * axes]
        block = arrays.block[arrays.array_of(parts.block)] if len(arrays) > 1 else arrays.block
        steps = np.ones_like(block)  # items from one index to the next in a block, along each axis
        steps[:, :-1] = np.cumprod(block[:, :0:-1], axis=1)[:, ::-1]
        out_steps = np.cumprod([1, *out.shape[:0:-1]])[::-1]  # the same in the output, whose first axis are elements
        places = parts.table[:, 0] * out_steps[0] + place @ out_steps[1:]
        offsets = arrays.blocks.offset[parts.block] + (first * steps).sum(axis=1) * item
        sizes, memory = parts.sizes * item, out.reshape(-1).view(np.uint8)
        for file, own in _groups(arrays.blocks.file[parts.block]):
            yield from self._check_tasks(parts.some(own))
            yield from vector_tasks(offsets[own], sizes[own], places[own] * item, memory, self._at(file), file)

    def _check_tasks(self, parts: Parts) -> Iterator[ReadTask]:
        """Yield tasks that verify the chunks of these parts which have not been verified."""
        if not self.has_checks:
            return
        arrays = self.arrays
        numbers = np.searchsorted(arrays.origin_starts, parts.block, "right") - 1
        for number, own in _groups(numbers):
            checks = arrays.origins[number].checks
            if checks is not None:
                blocks = np.unique(parts.block[own] - arrays.origin_starts[number])
                yield from checks.tasks(arrays.origins[number].chunks(blocks))

    def _block_tasks(self, parts: Parts, out: np.ndarray, keeps: bool | None) -> Iterator[ReadTask]:
        """Yield tasks that read parts of blocks, in which those of a block are next to each other."""
        by_c = self._are_native(parts)
        if by_c.all():
            yield from self._native_tasks(parts, out, keeps)
            return
        if by_c.any():
            own = np.repeat(by_c, np.diff(parts.firsts, append=len(parts.block)))
            yield from self._native_tasks(parts.some(own), out, keeps)
            parts = parts.some(~own)
        arrays, firsts, is_whole = self.arrays, parts.firsts, self._are_whole(parts, keeps)
        array = arrays.array_of(parts.block[firsts])
        # bytes that are read for each block; a decoded block counts once
        items = np.add.reduceat(parts.sizes, firsts)
        cost = np.where(arrays.codec[array] == RAW, items * arrays.item_bytes, arrays.block_bytes[array])
        begins = np.flatnonzero(np.diff(np.cumsum(cost) // PART_BYTES, prepend=-1) > 0)  # where tasks begin
        for begin, end in pairwise([*begins.tolist(), len(firsts)]):
            low, high = firsts[begin], firsts[end] if end < len(firsts) else len(parts.block)
            yield BlockTask(self, parts.some(slice(low, high)), is_whole[begin:end], out)

    def _are_whole(self, parts: Parts, keeps: bool | None) -> np.ndarray:
        """Return which blocks are used completely, or should not be kept for another reason: (number of blocks,)."""
        if keeps is not None:
            return np.full(len(parts.firsts), not keeps)
        whole: np.ndarray = np.add.reduceat(parts.sizes, parts.firsts) >= self.arrays.items_in(
            parts.block[parts.firsts]
        )
        return whole

    @cached_property
    def _pipelines(self) -> tuple[np.ndarray, np.ndarray]:
        """The filters of each kind of block for native threads, and whether these can undo them: (n,) each."""
        raw = np.zeros((), PIPELINE)
        found = [raw, *(codec.pipeline for codec in self.arrays.codecs)]
        pipelines = np.stack([raw if each is None else each for each in found])
        return pipelines, np.array([each is not None for each in found])

    def _are_native(self, parts: Parts) -> np.ndarray:
        """Return which blocks native threads read: (number of blocks,) bool."""
        if not available() or self.has_checks:
            return np.zeros(len(parts.firsts), bool)
        arrays, firsts = self.arrays, parts.firsts
        counts, blocks = np.diff(firsts, append=len(parts.block)), parts.block[firsts]
        array = arrays.array_of(blocks)
        is_known = self._pipelines[1][arrays.codec[array]] & (arrays.blocks.offset[blocks] >= 0)
        in_runs = (arrays.codec[array] == RAW) & _is_read_in_runs(arrays.block_bytes[array], counts)
        are_native: np.ndarray = is_known & ~in_runs
        return are_native

    def _native_tasks(self, parts: Parts, out: np.ndarray, keeps: bool | None) -> Iterator[BlocksTask]:
        arrays, firsts = self.arrays, parts.firsts
        blocks, table = parts.block[firsts], np.zeros(len(firsts), BLOCK)
        array = arrays.array_of(blocks)
        table["offset"], table["stored_bytes"] = arrays.blocks.offset[blocks], arrays.blocks.size[blocks]
        table["mask"], table["pipeline"] = arrays.blocks.mask[blocks], arrays.codec[array]
        table["num_bytes"] = arrays.block_bytes[array]
        shapes = np.ascontiguousarray(arrays.block)
        table["shape"] = shapes.ctypes.data + array * shapes.strides[0]
        table["first"], table["end"] = firsts, np.append(firsts[1:], len(parts.block))
        is_whole = self._are_whole(parts, keeps)
        runs = is_whole & (_run_lengths(arrays, parts, out) > 0)  # these are decoded to their places in the output
        places = parts.table[firsts[runs]][:, [0, 1 + arrays.num_axes]] @ [out[:1].nbytes, out[:1, :1].nbytes]
        table["target"][runs] = out.ctypes.data + places
        table["end"][runs] = table["first"][runs]
        kept = self._kept_of(
            table, blocks, ~is_whole & ((arrays.codec[array] != RAW) | (table["num_bytes"] <= SMALL_BYTES))
        )
        for file, own in _groups(arrays.blocks.file[blocks]):
            yield BlocksTask(self, table[own], blocks[own], (parts.table, shapes, kept), out, file)

    def _kept_of(self, table: np.ndarray, blocks: np.ndarray, wanted: np.ndarray) -> list[Any]:
        """Find or make the cache's memory for blocks, note it in their table, and return it.

        If not all fit into the cache, the last ones do, because the next window may need these.
        """
        numbers, found = np.flatnonzero(wanted), []
        sizes = table["num_bytes"][numbers]
        fits = np.cumsum(sizes[::-1])[::-1] <= sizes[-1:].max(initial=self.cache.limit_bytes)
        for row, block, size, is_made in zip(
            *(each.tolist() for each in (numbers, blocks[numbers], sizes, fits)), strict=True
        ):
            kept = self.cache.find((self._key, block), size, is_made=is_made)
            if kept is not None:
                found.append(memory := kept.memory)
                table["target"][row], table["state"][row] = (each.ctypes.data for each in memory)
        return found

    def _at(self, file: int) -> Callable[[int], str]:
        return lambda offset: self.arrays.at(file, offset)

    # --- coded blocks --------------------------------------------------------------------------------------------

    def block(self, files: OpenFiles, block: Block, *, is_whole: bool) -> np.ndarray:
        """Read and decode a block of an array: (n,) uint8, valid until this thread's next call.

        ``is_whole`` means that all of the block is used now. Otherwise, the decoded block is kept.
        """
        if is_whole or (block.codec == RAW and block.num_bytes > SMALL_BYTES):
            values = scratch(self.cache.local, "decoded", block.num_bytes)
            self.decode(files, block, values)
            return values
        key = self._key, block.number
        return self.cache.get(key, block.num_bytes, lambda values: self.decode(files, block, values))

    def decode(self, files: OpenFiles | OneFile, block: Block, values: np.ndarray) -> None:
        """Read and decode a block of an array into ``values``, (n,) uint8. Raises FileError if it is damaged."""
        codec = None if block.codec == RAW else self.arrays.codecs[block.codec - 1]
        origin, number = self.arrays.origin_of(block.number)
        if block.offset < 0:
            assert codec is not None
            if origin.checks is not None:
                with files.opened(block.file) as descriptor:
                    origin.checks.check(descriptor, origin.chunks(np.array([number])))
            codec.fill(number, values)
            return
        size = block.size
        stored = values[:size] if codec is None else scratch(self.cache.local, "stored", size)
        where = partial(origin.block, number)
        with files.opened(block.file) as descriptor:
            read_bytes(descriptor, block.offset, stored.data, lambda _: where())
            if origin.checks is not None:
                chunk = int(origin.chunks(np.array([number]))[0])
                if size == origin.checks.table.sizes[chunk]:
                    origin.checks.check_stored(chunk, stored)
                else:  # the block is a part of the chunk
                    origin.checks.check(descriptor, np.array([chunk]))
        if codec is not None:
            codec.decode(stored, block.mask, values, where)


class BlockTask:
    """A task that reads the parts of boxes in some blocks, and copies them to the output."""

    def __init__(self, reader: BoxReader, parts: Parts, is_whole: np.ndarray, out: np.ndarray) -> None:
        self._reader, self._parts, self._is_whole, self._out = reader, parts, is_whole, out

    @property
    def ranges(self) -> Iterator[tuple[int, Ranges]]:
        """The byte ranges that the task reads, by number of the file."""
        blocks = self._reader.arrays.blocks
        numbers = self._parts.block[self._parts.firsts]
        numbers = numbers[blocks.offset[numbers] >= 0]
        for file, own in _groups(blocks.file[numbers]):
            yield file, (blocks.offset[numbers[own]], blocks.size[numbers[own]])

    def __call__(self, files: OpenFiles) -> None:
        reader, table, firsts, out = self._reader, self._parts.table, self._parts.firsts, self._out
        blocks = reader.arrays.listed(self._parts.block[firsts])
        copies, targets = PartCopies(table, out), [0] * len(blocks)
        if self._is_whole.any():
            targets = _run_lengths(reader.arrays, self._parts, out).tolist()
        ends = pairwise([*firsts.tolist(), len(table)])
        for (first, end), block, is_whole, length in zip(ends, blocks, self._is_whole.tolist(), targets, strict=True):
            if block.codec == RAW and _is_read_in_runs(block.num_bytes, end - first):
                RawBlock(reader, block).read(files, table[first:end], out)
            elif is_whole and length:
                place = int(table[first, 1 + len(out.shape[1:])])
                target = out[table[first, 0], place : place + length]
                reader.decode(files, block, target.reshape(-1).view(np.uint8))
            else:
                values = reader.block(files, block, is_whole=is_whole)
                copies.copy(values, reader.arrays.block[block.array], first, end)
        for file in {block.file for block in blocks}:
            files.check(file)


class BlocksTask:
    """A task for native threads: they read blocks of a file, decode them, and copy their parts to the output.

    ``table`` describes the blocks, (n,) `h5chunk.native.BLOCK`, whose numbers are in ``blocks``. ``kept`` has the table
    of parts, and all memory whose addresses are in ``table``.
    """

    def __init__(
        self, reader: BoxReader, table: np.ndarray, blocks: np.ndarray, kept: Sequence[Any], out: np.ndarray, file: int
    ) -> None:
        self._reader, self._table, self._blocks = reader, table, blocks
        self.file, self._kept = file, kept
        self._source = Blocks(table, reader._pipelines[0], kept[0], out)

    @property
    def ranges(self) -> Iterator[tuple[int, Ranges]]:
        """The byte ranges that the task reads, by number of the file."""
        yield self.file, (self._table["offset"], self._table["stored_bytes"])

    def jobs(self, files: OpenFiles) -> np.ndarray:
        """Return the jobs of the task for a `h5chunk.native.NativePool`: (n,) JOB."""
        return self._jobs(files, files.descriptor(self.file))

    def _jobs(self, files: OpenFiles, descriptor: int) -> np.ndarray:
        self._files = files
        ends = np.cumsum(self._table["num_bytes"])
        firsts = np.flatnonzero(np.diff((ends - 1) // JOB_BYTES, prepend=-1))
        jobs = np.zeros(len(firsts), JOB)
        jobs["kind"], jobs["descriptor"], jobs["offset"] = BLOCKS, descriptor, firsts
        jobs["count"] = np.diff(firsts, append=len(ends))
        jobs["num_bytes"] = native.PART_BYTES  # so that a thread takes one job at a time
        jobs["source"] = ctypes.addressof(self._source)
        return jobs

    def end(self) -> None:
        """Do nothing, because no work remains after the jobs have succeeded."""

    def error_of(self, result: Result) -> FileError:
        """Return the error for a job that failed. Blocks that are damaged are decoded again, to say in what way."""
        offsets, reader = self._table["offset"], self._reader
        number = int(self._blocks[np.where(offsets <= result.offset, offsets, -1).argmax()])
        if result.status != DAMAGED:
            return read_error(reader.arrays.where(number), result)
        (block,) = reader.arrays.listed(np.array([number]))
        try:
            reader.decode(self._files, block, np.empty(block.num_bytes, np.uint8))
        except FileError as error:
            return error
        return FileError(f"{reader.arrays.where(number)} is damaged, or memory is short")

    def __call__(self, files: OpenFiles) -> None:
        with files.opened(self.file) as descriptor, held(descriptor, *next(self.ranges)[1]):
            result = run(self._jobs(files, int(descriptor)))
            if result.status != DONE:
                raise self.error_of(result)
        files.check(self.file)


def items_of(values: np.ndarray, item_bytes: int, shape: Iterable[int]) -> np.ndarray:
    """Return bytes as an array of items, which NumPy and C copy without looking into them."""
    return values.view(f"V{item_bytes}").reshape(*map(int, shape))


class RawBlock:
    """A block without filters, of which boxes are read by runs of bytes."""

    def __init__(self, reader: BoxReader, block: Block) -> None:
        self._reader, self._item = reader, reader.arrays.item_bytes
        self._shape, self._offset, self._file = reader.arrays.block[block.array], block.offset, block.file
        self._origin, self._number = reader.arrays.origin_of(block.number)

    def read(self, files: OpenFiles, table: np.ndarray, out: np.ndarray) -> None:
        """Read parts of the block. All are read in one slab if that is less work than reading them one by one."""
        axes, item = len(self._shape), self._item
        if self._origin.checks is not None:
            with files.opened(self._file) as descriptor:
                self._origin.checks.check(descriptor, self._origin.chunks(np.array([self._number])))
        first, length = table[:, 1 : 1 + axes], table[:, 1 + 2 * axes :]
        low, shape = first.min(axis=0), (first + length).max(axis=0)
        low[-1], shape[-1] = 0, self._shape[-1]
        shape -= low
        num_bytes = int(shape.prod()) * item
        runs = np.minimum(length[:, -1] * item + GAP_BYTES, shape[-1] * item)
        one_by_one = (length[:, :-1].prod(axis=1) * runs + SMALL_BYTES).sum()
        if num_bytes > SLAB_BYTES or num_bytes + length.prod(axis=1).sum() * item > one_by_one:
            for row in table.tolist():
                self._vectors(row, out[row[0]])(files)
            return
        slab = scratch(self._reader.cache.local, "slab", num_bytes)
        axis, steps = axes - 1, item * np.cumprod([1, *self._shape[:0:-1]])[::-1]
        while axis > 0 and shape[axis] == self._shape[axis]:
            axis -= 1
        run = int(shape[axis:].prod()) * item
        # the offset of each run of the slab: all sums of multiples of the outer axes' steps
        offsets = np.array(self._offset + low @ steps)
        for step, count in zip(steps[:axis], shape[:axis], strict=True):
            offsets = np.add.outer(offsets, np.arange(count) * step)
        offsets = offsets.reshape(-1)
        if len(offsets) == 1:
            with files.opened(self._file) as descriptor:
                read_bytes(descriptor, int(offsets[0]), slab.data, self._at)
        else:
            starts = np.arange(len(offsets)) * run
            for task in vector_tasks(offsets, np.full(len(offsets), run), starts, slab, self._at, self._file):
                task(files)
        moved = table.copy()
        moved[:, 1 : 1 + axes] -= low
        PartCopies(moved, out).copy(slab, shape, 0, len(moved))

    def _at(self, offset: int) -> str:
        return self._origin.at(offset)

    def _vectors(self, row: list[int], out: np.ndarray) -> VectorTask:
        """Return the task that reads one part of the block to ``out``, the memory of the element."""
        axes, run = len(self._shape), self._item
        first, place, length = row[1 : 1 + axes], row[1 + axes : 1 + 2 * axes], row[1 + 2 * axes :]
        while axes > 1 and length[axes - 1] == self._shape[axes - 1] == out.shape[axes - 1]:
            axes -= 1
            run *= out.shape[axes]
        steps, offset = [run], run * first[axes - 1]  # in the block
        strides, address = [run], out.ctypes.data + run * place[axes - 1]
        for axis in reversed(range(axes - 1)):
            steps.insert(0, steps[0] * int(self._shape[axis + 1]))
            strides.insert(0, strides[0] * out.shape[axis + 1])
            offset, address = offset + steps[0] * first[axis], address + strides[0] * place[axis]
        offsets = _sums(offset + self._offset, steps[:-1], length[: axes - 1])
        addresses = _sums(address, strides[:-1], length[: axes - 1])
        run *= length[axes - 1]
        together = length[axes - 2] if axes > 1 and 0 <= steps[axes - 2] - run <= GAP_BYTES else 1
        gap = steps[axes - 2] - run if together > 1 else 0
        together = min(together, MAX_VECTORS // 2)
        return _gapped_task(offsets, addresses, (run, gap, together), out, self._at, self._file)


def _sums(start: int, steps: Iterable[int], counts: list[int]) -> np.ndarray:
    """Return ``start`` plus multiples of all ``steps``, from 0 to below ``counts``: (n, counts[-1]), in C order."""
    total = np.array(start)
    for step, count in zip(steps, counts, strict=True):
        total = np.add.outer(total, np.arange(count) * step)
    return total.reshape(-1, counts[-1] if counts else 1)


def _gapped_task(
    offsets: np.ndarray,
    addresses: np.ndarray,
    run_gap_together: tuple[int, int, int],
    out: np.ndarray,
    where: Callable[[int], str],
    file: int,
) -> VectorTask:
    """Return a task that reads runs of bytes. One system call reads ``together`` runs and the gaps between them."""
    run, gap, together = run_gap_together
    unused = np.empty(max(1, gap), np.uint8)
    vectors = np.empty((*offsets.shape, 2, 2), np.uintp)
    vectors[..., 0, 0], vectors[..., 0, 1] = addresses, run
    vectors[..., 1, 0], vectors[..., 1, 1] = unused.ctypes.data, gap
    firsts = np.arange(0, offsets.shape[1], together)
    counts = np.minimum(together, offsets.shape[1] - firsts)
    first = (np.arange(offsets.shape[0])[:, None] * offsets.shape[1] + firsts).ravel() * 2
    count = np.tile(counts * 2 - 1, offsets.shape[0])
    sizes = np.tile(counts * run + (counts - 1) * gap, offsets.shape[0])
    flat = vectors.reshape(-1, 2)
    jobs = read_jobs(flat, first, count, offsets[:, firsts].ravel(), sizes)
    return VectorTask(jobs, flat, (out, unused), where, file)


class PartCopies:
    """Copies parts of blocks, the rows of a table as in `Parts`, to elements of ``out``, (n, *shape) of items."""

    def __init__(self, table: np.ndarray, out: np.ndarray) -> None:
        self._table, self._out = table, out
        self._native = BoxCopies(table, out) if available() else None

    def copy(self, values: np.ndarray, shape: np.ndarray, first: int, end: int) -> None:
        """Copy rows ``first`` to ``end`` of the table from ``values``, the bytes of a block of this shape, in items."""
        if self._native is not None:
            self._native.copy(values, shape, first, end)
            return
        items, table, axes = values.view(self._out.dtype).reshape(shape), self._table[first:end], len(shape)
        if axes == 1 and (table[:, 3] == 1).all():
            self._out.reshape(-1)[table[:, 0] * self._out.shape[1] + table[:, 2]] = items[table[:, 1]]
            return
        is_single = table[0, 1 + 2 * axes] == 1
        if is_single and (table[:, 2:] == table[0, 2:]).all():  # rows of the block, and equal places in all elements
            (_, *first_index), (place, *places), (_, *length) = table[0, 1:].reshape(3, axes).tolist()
            inside: tuple[Any, ...] = (table[:, 1], *_slices(first_index, length))
            where: tuple[Any, ...] = (table[:, 0], place, *_slices(places, length))
            self._out[where] = items[inside]
            return
        for element, *row in table.tolist():
            first_index, places, length = row[:axes], row[axes : 2 * axes], row[2 * axes :]
            self._out[element][_slices(places, length)] = items[_slices(first_index, length)]


def _slices(begin: list[int], length: list[int]) -> tuple[slice, ...]:
    return tuple(map(slice, begin, map(add, begin, length)))


def _is_read_in_runs(num_bytes: Any, num_parts: Any) -> Any:
    """Return whether a raw block is so large for the number of its parts that these are read, instead of the block."""
    return num_bytes > np.minimum(SLAB_BYTES, num_parts * SMALL_BYTES)


def _run_lengths(arrays: Arrays, parts: Parts, out: np.ndarray) -> np.ndarray:
    """Return the length along the first axis of blocks that are one run of bytes of the output, and others 0: (n,).

    Such a block has a single part, which is the whole block, and all of the output's axes after the first.
    """
    length = parts.table[parts.firsts, 1 + 2 * arrays.num_axes :]
    is_run = np.diff(parts.firsts, append=len(parts.block)) == 1
    is_run &= (length == arrays.block[arrays.array_of(parts.block[parts.firsts])]).all(axis=1)
    is_run &= (length[:, 1:] == np.array(out.shape[2:], np.int64)).all(axis=1)
    return np.where(is_run, length[:, 0], 0)


def _groups(keys: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Yield each distinct key, ascending, and the positions at which it occurs, ascending."""
    if not len(keys):
        return
    if (keys == keys[0]).all():
        yield int(keys[0]), slice(None)
        return
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    for start, stop in pairwise([*starts.tolist(), len(keys)]):
        yield int(ordered[start]), order[start:stop]


def _with_end(tasks: list[ReadTask], at_end: Callable[[], None]) -> Iterator[ReadTask]:
    """Yield tasks, the last of which to end, in any thread, calls ``at_end``."""
    lock, left = threading.Lock(), [len(tasks)]

    def run(task: ReadTask, files: OpenFiles) -> None:
        task(files)
        with lock:
            left[0] -= 1
            is_last = not left[0]
        if is_last:
            at_end()

    for task in tasks:
        yield EndedTask(task, run)


class EndedTask:
    """A task that calls a function with another task, which it runs in a Python thread."""

    def __init__(self, task: Any, run: Callable[[Any, OpenFiles], None]) -> None:
        self._task, self._run = task, run

    @property
    def ranges(self) -> Iterator[tuple[int, Ranges]]:
        return self._task.ranges

    def __call__(self, files: OpenFiles) -> None:
        self._run(self._task, files)
