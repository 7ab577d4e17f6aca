"""Write images of any size one after another, in the order of their rows.

The length of an image is known only after it was read, and possibly reduced. Therefore workers return the bytes of
their tasks, the main process writes them in order, and the header of the file is written last.
`h5chunk.store.format.spec` specifies the layout.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from h5chunk.errors import SampleError
from h5chunk.store.format.spec import IMAGE_TABLES, ArraySpec
from h5chunk.store.hdf5.codecs import crc32
from h5chunk.store.write.fill import Filled, FillJob, TaskResult, TaskRunner
from h5chunk.store.write.new_file import NewFile, checksum_specs
from h5chunk.store.write.targets import PlainTarget

CHUNK_BYTES = 8 << 20
TASK_BYTES = 4 << 20  # average total size of the images in a task
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
    """The job of writing images, of which ``mean_bytes`` is the average size."""

    mean_bytes: int = 1
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

    def __init__(self, job: FillJob, stopped: Callable[[], bool]) -> None:
        super().__init__(job, stopped)
        self._images: list[bytes] = []
        self._values: list[tuple[int, Mapping[str, Any]]] = []

    def run(self, chunks: range, claim: TaskResult | None = None) -> TaskResult:
        self._images, self._values = [], []
        done = super().run(chunks)
        return done._replace(data=b"".join(self._images), values=tuple(self._values))

    def _read_sample(self, index: int, position: int, notes: Counter[str]) -> SampleError | None:
        self._begin(index)
        try:
            image = self._job.source.read_any(index)
        except SampleError as error:
            self._record += [-1, 0, 0, 0]
            return error
        self._record[0] = zlib.crc32(image.data, self._record[0])
        self._record += [len(image.data), image.height, image.width, image.orientation]
        notes.update(image.notes)
        self._images.append(image.data)
        if image.values:
            self._values.append((index, image.values))
        return None


class FilledImages(Filled):
    """The results of an `AnySizeJob`, whose images are written to the dataset ``name`` of a new file.

    Claims are accepted up to the first outdated one, because a new length moves the bytes of all later images.
    ``columns`` gets the values of other fields that were read with the images.
    """

    def __init__(self, new: NewFile, name: str, columns: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self._new, self._name, self._columns = new, name, columns
        self._facts: list[int] = []
        self.num_bytes = 0
        self.target = PlainTarget(new, name, CHUNK_BYTES)

    @property
    def facts(self) -> np.ndarray:
        """The integers of each sample: (num_rows, FACTS) int64."""
        return np.array(self._facts, np.int64).reshape(-1, FACTS)

    def add(self, done: TaskResult) -> None:
        super().add(done)
        self._facts += [number for _, *facts in done.checksums for number in facts]
        for index, values in done.values:
            for name, value in values.items():
                self._columns[name][index] = value
        if done.is_new:
            self.target.put(self.num_bytes, np.frombuffer(done.data, np.uint8))
        self.num_bytes += sum(_num_bytes(record) for record in done.checksums)

    def accept(self, job: FillJob, claims: Mapping[int, TaskResult]) -> Iterator[TaskResult]:
        with job.runner() as runner:
            for chunks in job.tasks():
                claim = claims.get(chunks.start)
                if claim is None or not runner.is_unchanged(chunks, claim):
                    return
                start, images = self.num_bytes, list[np.ndarray]()
                for record in claim.checksums:
                    data = self._new.read(self._name, start, _num_bytes(record))
                    if len(data) != _num_bytes(record) or crc32(np.frombuffer(data, np.uint8)) != record[0]:
                        return
                    images.append(np.frombuffer(data, np.uint8))
                    start += len(data)
                self.target.count(self.num_bytes, np.concatenate(images))
                yield claim


def _num_bytes(record: list[int]) -> int:
    """Return the total size of the images of a chunk, from its record in a result."""
    return sum(max(0, number) for number in record[1::FACTS])
