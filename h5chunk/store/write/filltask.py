"""One task of writing samples into a new file: a run of whole chunks, written, or looked at again.

Knows the source and the file, not who else writes, nor in which order tasks are done.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from h5chunk.errors import OutputError, SampleError, printable
from h5chunk.store.guard.crc import crc32
from h5chunk.store.write.partfile import write_at

TASK_SAMPLES = 64  # samples a worker takes at a time: a task costs the main process about 0.3 ms


class Source(Protocol):
    """What can be written: samples by number."""

    def session(self) -> AbstractContextManager[None]: ...
    def stamp(self, index: int) -> tuple[int, ...]:
        """Changes when the sample may have changed."""

    def read_into(self, index: int, out: np.ndarray) -> Sequence[str]: ...


@dataclass
class FillJob:
    """What to write where. Travels to the workers once.

    Attributes
    ----------
    part : Path
        The file.
    offset : int
        Of the field's first chunk.
    sample_shape : tuple of int
    chunk_samples : int
    source : Source
        Gives uint8 samples.
    order : (num_samples,) int64
        Row i of the field is sample ``order[i]`` of the source.
    """

    part: Path
    offset: int
    sample_shape: tuple[int, ...]
    chunk_samples: int
    source: Source
    order: np.ndarray

    @property
    def num_chunks(self) -> int:
        return -(-len(self.order) // self.chunk_samples)

    def new_buffer(self) -> np.ndarray:
        """Memory of one chunk."""
        return np.zeros((self.chunk_samples, *self.sample_shape), np.uint8)

    def tasks(self) -> list[range]:
        """The chunks of each task."""
        step = max(1, TASK_SAMPLES // self.chunk_samples)
        return [range(first, min(first + step, self.num_chunks)) for first in range(0, self.num_chunks, step)]

    def rows(self, chunks: range) -> range:
        """The rows of some chunks."""
        size = self.chunk_samples
        return range(chunks.start * size, min(chunks.stop * size, len(self.order)))


class Failure(NamedTuple):
    """A sample that could not be had: its row, the reason, and the name of the error's class."""

    row: int
    reason: str
    kind: str


class Done(NamedTuple):
    """What came of a task.

    Attributes
    ----------
    chunks : range
        Fewer than those of the task if nobody wanted the rest any more.
    checksums : list of int
    notes : Counter
        What the source noted of its samples.
    failures : list of Failure
    stamp : int
        Changes when a sample of the source may have changed; see `SourceStamp`.
    is_new : bool
        False if all of it had been written before.
    """

    chunks: range
    checksums: list[int]
    notes: Counter[str]
    failures: list[Failure]
    stamp: int
    is_new: bool = True

    def record(self) -> list[Any]:
        """For a journal."""
        return [self.chunks.start, self.checksums, dict(self.notes), [list(f) for f in self.failures], self.stamp]


def done_of(record: Any) -> Done | None:
    """What a record claims to be done; None if it is no such record."""
    try:
        first, checksums, notes, failures, stamp = record
        chunks = range(first, first + len(checksums))
        failed = [Failure(int(row), str(reason), str(kind)) for row, reason, kind in failures]
        return Done(chunks, [int(each) for each in checksums], Counter(notes), failed, int(stamp), is_new=False)
    except (TypeError, ValueError):
        return None


class Tasks:
    """What does tasks, one after the other, in memory that is used again and again: new memory costs more than writing.

    Context manager.

    Parameters
    ----------
    job : FillJob
    stopped : callable
        Whether nobody wants the rest any more.
    """

    def __init__(self, job: FillJob, stopped: Callable[[], bool] = lambda: False) -> None:
        self._job = job
        self._stopped = stopped
        self._buffer = job.new_buffer()
        self._session = job.source.session()

    def __enter__(self) -> Tasks:
        self._descriptor = os.open(self._job.part, os.O_RDWR | os.O_CLOEXEC)
        self._session.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._session.__exit__(*error)
        os.close(self._descriptor)

    def do(self, chunks: range, claim: Done | None = None) -> Done:
        """Write some chunks, unless a claim that they are written holds.

        Raises
        ------
        OutputError
            They cannot be written.
        """
        if claim is not None and self._holds(chunks, claim):
            return claim
        job, buffer = self._job, self._buffer
        stamp = SourceStamp(job.source)
        done = Done(chunks, [], Counter(), [], 0)
        for chunk in chunks:
            rows = job.rows(range(chunk, chunk + 1))
            buffer[len(rows) :] = 0
            checksum = 0
            for row, out in zip(rows, buffer, strict=False):
                if self._stopped():
                    return done
                index = int(job.order[row])
                stamp.add(index)
                try:
                    done.notes.update(job.source.read_into(index, out))
                except SampleError as error:
                    out[...] = 0
                    done.failures.append(Failure(row, str(error), type(error).__name__))
                checksum = zlib.crc32(out.data, checksum)  # while it is in the processor's cache
            done.checksums.append(zlib.crc32(buffer[len(rows) :].data, checksum))
            try:
                write_at(self._descriptor, buffer.data, job.offset + chunk * buffer.nbytes)
            except OSError as error:
                raise OutputError(f"{printable(job.part)}: cannot be written: {error.strerror}") from None
        return done._replace(stamp=stamp.value)

    def _holds(self, chunks: range, claim: Done) -> bool:
        """Whether the source is as it was, failures included, and the chunks have the checksums claimed."""
        job = self._job
        if claim.chunks != chunks:
            return False
        rows = job.rows(chunks)
        now = stamp_of_samples(job.source, job.order[rows.start : rows.stop])
        return now == claim.stamp and self._still_fail(claim.failures) and self._are_there(claim)

    def _still_fail(self, failures: list[Failure]) -> bool:
        """Whether samples that failed do so again: what kept them from being read need not have changed their file."""
        for failure in failures:
            if not 0 <= failure.row < len(self._job.order):
                return False
            try:
                self._job.source.read_into(int(self._job.order[failure.row]), self._buffer[0])
                return False
            except SampleError as error:
                if (str(error), type(error).__name__) != failure[1:]:
                    return False
        return True

    def _are_there(self, claim: Done) -> bool:
        data = self._buffer.reshape(-1)
        for chunk, checksum in zip(claim.chunks, claim.checksums, strict=True):
            try:
                length = os.preadv(self._descriptor, [data.data], self._job.offset + chunk * data.nbytes)
            except OSError:
                return False
            if length != data.nbytes or crc32(data) != checksum:
                return False
        return True


class SourceStamp:
    """One number of 64 bits for many samples, which changes when one of them may have changed.

    It depends neither on the order in which samples are added, nor on which are added together: the stamp of several
    tasks is that of each, combined by exclusive or.

    Attributes
    ----------
    value : int
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.value = 0

    def add(self, index: int) -> None:
        """Add a sample; one without a stamp of its own never changes."""
        stamp = self._source.stamp(index)
        if stamp:
            packed = struct.pack(f"<{len(stamp) + 1}q", index, *stamp)
            self.value ^= int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def stamp_of_samples(source: Source, indices: np.ndarray) -> int:
    """The `SourceStamp` of some samples, as they are now."""
    stamp = SourceStamp(source)
    for index in indices.tolist():
        stamp.add(index)
    return stamp.value
