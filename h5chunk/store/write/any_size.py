"""Write images of any size one after another, in the order of their rows.

The length of an image is known only after it was read, and possibly reduced. Therefore workers return the bytes of
their tasks, the main process writes them in order, and the header of the file is written last.
`h5chunk.store.format.spec` specifies the layout.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from h5chunk.errors import SampleError
from h5chunk.store.format.spec import GROUP, IMAGE_TABLES, ArraySpec
from h5chunk.store.hdf5.codecs import crc32
from h5chunk.store.write.fill import (
    Failure,
    Filled,
    FillJob,
    Task,
    TaskResult,
    TaskRunner,
    stamp_of_samples,
)
from h5chunk.store.write.new_file import NewFile, checksum_specs
from h5chunk.store.write.workers import run_tasks

CHUNK_BYTES = 8 << 20
TASK_BYTES = 4 << 20  # average total size of the images in a task
PIECE_BYTES = 1 << 20
FACTS = 4  # integers per sample: bytes, height, width and EXIF orientation


def any_size_specs(name: str, num_samples: int, num_bytes: int) -> dict[str, ArraySpec]:
    """Return the datasets of images of any size, and of their checksums. The bytes of the images come first."""
    chunk = min(CHUNK_BYTES, num_bytes)
    specs = {f"{name}/data": ArraySpec((num_bytes,), np.dtype(np.uint8), (chunk,))}
    for table, kind in IMAGE_TABLES.items():
        specs[f"{name}/{table}"] = ArraySpec((num_samples + (table == "offsets"),), np.dtype(kind))
    tables = [f"{name}/{table}" for table in IMAGE_TABLES]
    return specs | checksum_specs([f"{name}/data"], -(-num_bytes // chunk)) | checksum_specs(tables, 1)


@dataclass
class AnySizeJob(FillJob):
    """The job of writing images. ``mean_bytes`` is their average size, and ``columns`` collects the other fields."""

    mean_bytes: int = 1
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    in_order = True

    def tasks(self) -> list[range]:
        step = max(1, TASK_BYTES // (self.mean_bytes * self.chunk_samples))
        return [range(first, min(first + step, self.num_chunks)) for first in range(0, self.num_chunks, step)]

    def runner(self, stopped: Callable[[], bool] = lambda: False) -> TaskRunner:
        return _ImageReader(self, stopped)


class _ImageReader(TaskRunner):
    """A runner of tasks that read images.

    The ``checksums`` of a result have, for each chunk, the CRC-32 of its images, followed by `FACTS` integers per
    sample. The number of bytes of an unreadable sample is -1.
    """

    def _run(self, chunks: range, claim: TaskResult | None) -> TaskResult:
        if claim is not None and self.is_unchanged(chunks, claim):
            return claim  # the main process verifies the bytes
        done, parts, values = TaskResult(chunks, [], Counter(), [], 0), list[bytes](), []
        for chunk in chunks:
            rows, facts = self._job.rows(range(chunk, chunk + 1)), [0]
            indices = self._job.order[rows.start : rows.stop]
            done = done._replace(stamp=done.stamp ^ stamp_of_samples(self._job.source, indices))
            for row, index in zip(rows, indices.tolist(), strict=True):
                if self._stopped():
                    return done
                self._begin(index)
                try:
                    image = self._job.source.read_any(index)
                except SampleError as error:
                    done.failures.append(Failure(row, str(error), type(error).__name__))
                    facts += [-1, 0, 0, 0]
                    continue
                facts += [len(image.data), image.height, image.width, image.orientation]
                facts[0] = zlib.crc32(image.data, facts[0])
                done.notes.update(image.notes)
                parts.append(image.data)
                if image.values:
                    values.append((index, image.values))
            done.checksums.append(facts)
        return done._replace(data=b"".join(parts), values=tuple(values))

    def _read_sample(self, index: int, position: int, notes: Counter[str]) -> SampleError | None:
        self._begin(index)
        try:
            self._job.source.read_any(index)
        except SampleError as error:
            return error
        return None


class BytesWriter:
    """A writer that appends bytes to a dataset, and computes the checksums of its chunks."""

    def __init__(self, new: NewFile, name: str) -> None:
        self._new, self._name = new, name
        self.num_bytes, self._sum = 0, 0
        self._sums: list[int] = []

    def put(self, data: bytes) -> None:
        self._new.write_bytes(self._name, self.num_bytes, data)
        self._count(np.frombuffer(data, np.uint8))

    def keep(self, facts: list[list[int]]) -> bool:
        """Skip the next bytes if they match ``facts``, the checksums of an earlier run. Returns whether they match."""
        before = self.num_bytes, self._sum, len(self._sums)
        for crc, *numbers in facts:
            left, actual = _num_bytes(numbers), 0
            while left:
                piece = np.frombuffer(self._new.read(self._name, self.num_bytes, min(left, PIECE_BYTES)), np.uint8)
                if not len(piece):
                    break
                actual = crc32(piece, actual)
                self._count(piece)
                left -= len(piece)
            if left or actual != crc:
                self.num_bytes, self._sum = before[:2]
                del self._sums[before[2] :]
                return False
        return True

    def _count(self, data: np.ndarray) -> None:
        while len(data):
            part = data[: CHUNK_BYTES - self.num_bytes % CHUNK_BYTES]
            self._sum = crc32(part, self._sum)
            self.num_bytes += len(part)
            data = data[len(part) :]
            if not self.num_bytes % CHUNK_BYTES:
                self._sums.append(self._sum)
                self._sum = 0

    def finish(self) -> np.ndarray:
        """Return the checksum of each chunk. The last chunk is padded with zeros, unless it is the only one."""
        rest = self.num_bytes % CHUNK_BYTES
        if rest and self._sums:
            self._sum = crc32(np.zeros(CHUNK_BYTES - rest, np.uint8), self._sum)
        return np.array(self._sums + [self._sum] * bool(rest), np.uint32)


@dataclass
class AnySizeFilled(Filled):
    """The result of `fill_any_size`. ``facts``, (num_rows, FACTS) int64, has the integers of each sample."""

    facts: np.ndarray = field(default_factory=lambda: np.empty((0, FACTS), np.int64))


def fill_any_size(
    writer: BytesWriter,
    job: AnySizeJob,
    num_workers: int,
    stop_at_failure: bool,
    written: Callable[[int], None],
    claims: Mapping[int, TaskResult],
    finished: Callable[[TaskResult], None],
) -> AnySizeFilled:
    """Write all images of the job. `fill` describes the other arguments.

    Claims are used up to the first outdated one, because a new length moves the bytes of all later images.
    """
    filled, facts = AnySizeFilled(), list[int]()
    left = job.tasks()
    while left:
        usable = {first: claim for first, claim in claims.items() if not (stop_at_failure and claim.failures)}
        tasks: list[Task] = []
        for chunks in left:
            tasks.append((chunks, usable.get(chunks.start)))
            if tasks[-1][1] is None:
                usable = {}
        results = run_tasks(job, tasks, num_workers)
        claims = {}
        try:
            for done in results:
                if not done.is_new and not writer.keep(done.checksums):
                    break  # restart here without claims
                claimed = tasks[len(tasks) - len(left)][1]
                filled.add(done)
                facts += [number for _, *numbers in done.checksums for number in numbers]
                for index, values in done.values:
                    for name, value in values.items():
                        job.columns[name][index] = value
                is_end = len(done.checksums) < len(done.chunks) or (bool(done.failures) and stop_at_failure)
                if done.is_new and not is_end:
                    writer.put(done.data)
                    finished(done)
                written(len(job.rows(done.chunks)))
                left = left[1:]
                if is_end:
                    left = []
                    break
                if done.is_new and claimed is not None:
                    break  # the images after it have moved
        finally:
            results.close()
    filled.facts = np.array(facts, np.int64).reshape(-1, FACTS)
    return filled


def _num_bytes(numbers: list[int]) -> int:
    return sum(max(0, number) for number in numbers[::FACTS])


def write_image_tables(new: NewFile, name: str, facts: np.ndarray, checksums: np.ndarray) -> None:
    """Write the offsets and sizes of all images, after the file's header is complete.

    ``checksums`` has the checksum of each chunk of ``data``.
    """
    offsets = np.concatenate(([0], np.cumsum(facts[:, 0])))
    columns = dict(zip(IMAGE_TABLES, (offsets, *facts.T[1:]), strict=True))
    for table, values in columns.items():
        values = values.astype(IMAGE_TABLES[table])
        new.write(f"{name}/{table}", values)
        new.write(f"{GROUP}/checksums/{name}/{table}", np.array([zlib.crc32(values.tobytes())], np.uint32))
    new.write(f"{GROUP}/checksums/{name}/data", checksums)
