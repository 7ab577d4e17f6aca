"""Read the stored chunks of a dataset, and find damaged chunks by verifying checksums or by decoding.

Threads read the chunks by byte ranges, outside HDF5's lock. HDF5 reads only chunks with unsupported filters.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FileError, printable
from h5chunk.machine import available_cores, in_order
from h5chunk.store.hdf5.chunk_table import (
    ChunkTable,
    NotDirect,
    count_unwritten,
    list_chunks,
    stored_item_bytes,
    unwritten_value,
)
from h5chunk.store.hdf5.codecs import crc32, scratch
from h5chunk.store.hdf5.guard import SLACK_CHUNKS
from h5chunk.store.hdf5.open import descriptor_of
from h5chunk.store.hdf5.ranges import PART_BYTES, read_bytes
from h5chunk.store.read.arrays import Codec, dataset_text
from h5chunk.store.read.raw import RawValues

MAX_THREADS = 8
MEMORY_BYTES = 256 << 20  # approximate limit on the memory of all threads; a single chunk may need more
NO_CHUNKS = ChunkTable.unwritten((0,), (1,))
CHECKSUM, DECODING, READING = "checksum", "decoding", "reading"

OnValues = Callable[[int, np.ndarray], None]  # called with the index of the first element, and undamaged bytes


@dataclass(frozen=True)
class Damage:
    """A damaged chunk."""

    field: str  # path of the dataset in the file
    chunk: int  # index of the chunk, in row-major order
    first_sample: int
    last_sample: int  # of the chunk, included
    offset: int  # position of the chunk in the file
    num_bytes: int
    problem: str
    expected: int | None = None  # recorded CRC-32, if there is one
    actual: int | None = None  # actual CRC-32, if the chunk can be read

    def __str__(self) -> str:
        sums = ""
        if self.expected is not None and self.actual is not None and self.expected != self.actual:
            sums = f" (expected {self.expected:08x}, found {self.actual:08x})"
        samples = f"samples {self.first_sample} to {self.last_sample}"
        return printable(f"{self.field}, chunk {self.chunk}, {samples}: {self.problem}{sums}")


class CheckedDataset:
    """The chunks of one dataset, which are checked for damage. The dataset must stay open.

    The dataset must not be virtual or have external storage. ``expected``, (num_chunks,) uint32, has the recorded
    checksums. ``on_values`` is called with undamaged values. Raises FileError if the index of the chunks is
    inconsistent.

    ``method`` is how chunks are checked: `CHECKSUM`, `DECODING`, or `READING`, which only finds errors of the disk.
    ``table`` has no chunks if the data is stored in the dataset's header, or if chunks cannot be listed. In the latter
    case ``unlisted`` is the reason. ``num_unwritten`` chunks were never written, and their elements read as
    ``reads_as``.
    """

    def __init__(
        self, path: Path, dataset: h5py.Dataset, expected: np.ndarray | None = None, on_values: OnValues | None = None
    ) -> None:
        self.name = dataset.name.lstrip("/")
        self._label = printable(path)
        self._where = dataset_text(path, "", dataset.name)
        self._expected, self._on_values = expected, on_values
        self._local = threading.local()
        self._item_bytes, self._descriptor = stored_item_bytes(dataset), descriptor_of(dataset.file)
        properties = dataset.id.get_create_plist()
        stored = properties.get_layout() != h5py.h5d.COMPACT and math.prod(dataset.shape or (0,)) > 0
        self.num_unwritten = count_unwritten(dataset)
        self.reads_as = unwritten_value(dataset) if self.num_unwritten else ""
        sparse = self.num_unwritten > SLACK_CHUNKS
        partly = sparse and dataset.id.get_storage_size() > 0
        self.unlisted = f"{self.num_unwritten:,} of its chunks were never written" if partly else ""
        self.table = NO_CHUNKS
        try:
            if stored and not sparse:
                self.table = list_chunks(dataset)
        except NotDirect as error:
            self.unlisted = str(error)
        self.num_chunks = len(self.table)
        self.chunk_bytes = math.prod(self.table.chunk_shape) * self._item_bytes
        self.filtered = self.num_chunks > 0 and properties.get_nfilters() > 0
        self._codec: Codec | None = None
        self._is_left_to_hdf5 = False
        if self.filtered:
            with suppress(NotDirect):  # HDF5 would follow elements of variable length without checks
                raw = RawValues(dataset, dataset.ndim)
                self._codec, self._is_left_to_hdf5 = raw.arrays.codecs[0], bool(raw.left_to_hdf5)
        self.method = CHECKSUM if expected is not None else DECODING if self._codec is not None else READING

    @property
    def written(self) -> np.ndarray:
        """Indices of the chunks that were written: (n,) int64."""
        return np.flatnonzero(self.table.offsets >= 0)

    def location(self, chunk: int) -> tuple[int, int]:
        """Return the offset of a chunk in the file, and its stored size in bytes."""
        return int(self.table.offsets[chunk]), int(self.table.sizes[chunk])

    def check(
        self,
        chunks: np.ndarray,
        *,
        num_threads: int = MAX_THREADS,
        memory_bytes: int = MEMORY_BYTES,
        on_checked: Callable[[np.ndarray], None] = lambda chunks: None,
    ) -> Generator[tuple[int, list[Damage]]]:
        """Check chunks, (n,) int64 ascending, in threads. Yields each part's number of bytes read and its damage.

        The threads call ``on_checked`` with the chunks of each undamaged part.
        """
        if not len(chunks):
            return
        thread_bytes = PART_BYTES + (3 * self.chunk_bytes + int(self.table.sizes.max()) if self.filtered else 0)
        num_threads = max(1, min(available_cores(), num_threads, memory_bytes // thread_bytes))
        step = max(1, PART_BYTES // max(1, int(self.table.sizes[chunks].max())))
        borders = range(0, len(chunks), step)
        parts = (partial(self._check_part, chunks[first : first + step], on_checked) for first in borders)
        yield from (part() for part in parts) if num_threads == 1 else in_order(parts, num_threads, 4 * num_threads)

    def require_undamaged(
        self,
        chunks: np.ndarray,
        on_read: Callable[[int], None],
        consequence: str,
        **options: Any,
    ) -> None:
        """Raise FileError if a chunk is damaged. The message contains ``consequence``.

        ``on_read`` is called with the number of bytes read since its last call. ``options`` are arguments of `check`.
        """
        with closing(self.check(chunks, **options)) as parts:  # stop all threads after an error
            for num_bytes, damages in parts:
                for damage in damages:
                    raise FileError(
                        f"{self._label}: chunk {damage.chunk} of {self.name!r} {damage.problem}, so {consequence}. Run "
                        "h5chunk verify to list all damage, with --repair SOURCE to repair images, or with "
                        "--accept FIELD if values were changed on purpose"
                    )
                on_read(num_bytes)

    def _check_part(self, chunks: np.ndarray, on_checked: Callable[[np.ndarray], None]) -> tuple[int, list[Damage]]:
        num_bytes, damages = 0, list[Damage]()
        for chunk in chunks.tolist():
            offset, size = self.location(chunk)
            try:
                damage = self._check_chunk(chunk, offset, size)
                num_bytes += size
            except FileError as error:
                damage = self._damage(chunk, self._reason(chunk, error))
            if damage is not None:
                damages.append(damage)
        if not damages:
            on_checked(chunks)
        return num_bytes, damages

    def _check_chunk(self, chunk: int, offset: int, size: int) -> Damage | None:
        """Return the damage of a chunk, if any. Raises FileError if it cannot be read."""
        if offset < 0 and self._expected is not None:
            return self._damage(chunk, "was never written, although it has a checksum")
        if offset < 0:
            return None
        room = size
        if not self.filtered:  # the chunk is read in pieces of whole elements
            room = min(size, PART_BYTES // self._item_bytes * self._item_bytes or self._item_bytes)
        memory, actual = scratch(self._local, "stored", room), 0
        first = chunk * (self.chunk_bytes // self._item_bytes)
        for start in range(0, size, room):
            piece = memory[: size - start]
            read_bytes(self._descriptor, offset + start, piece.data, lambda _: f"{self._where}, chunk {chunk}")
            actual = crc32(piece, actual)
            if room < size and self._on_values is not None:
                self._on_values(first + start // self._item_bytes, piece)
        expected = None if self._expected is None else int(self._expected[chunk])
        if expected not in (None, actual):
            return self._damage(chunk, "does not match its checksum", expected, actual)
        values = memory
        if self._codec is not None:
            values = scratch(self._local, "decoded", self.chunk_bytes)
            try:
                if self._is_left_to_hdf5:
                    self._codec.fill(chunk, values)
                else:
                    mask = int(self.table.filter_masks[chunk])
                    self._codec.decode(memory, mask, values, lambda: f"{self._where}, chunk {chunk}")
            except FileError as error:
                return self._damage(chunk, f"cannot be decoded ({self._reason(chunk, error)})", expected, actual)
        if self._on_values is not None and room == size and (self._codec is not None or not self.filtered):
            self._on_values(first, values)
        return None

    def _damage(self, chunk: int, problem: str, expected: int | None = None, actual: int | None = None) -> Damage:
        return Damage(self.name, chunk, *self.table.rows(chunk), *self.location(chunk), problem, expected, actual)

    def _reason(self, chunk: int, error: FileError) -> str:
        text = str(error).removeprefix(f"{self._where}, chunk {chunk}")
        if text.startswith(damaged := " is damaged ("):
            return text[len(damaged) : -1]
        return text.lstrip(": ").removeprefix("cannot be read: ")
