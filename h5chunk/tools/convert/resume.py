"""Continue what was stopped, and recognise what is complete: what a journal is bound to, and what people are told.

Samples are written task by task: the chunks that the journal claims are read and their checksums computed again, and
the samples in them must have the stamps that they had. So only what changed is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import h5chunk
from h5chunk.errors import SampleError, printable
from h5chunk.store.write.command_id import has_command_id, is_made_by
from h5chunk.store.write.fill_task import Done, Failure, parse_record, stamp_of_samples
from h5chunk.store.write.journal import Journal, key_of
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.new_folder import NewFolder
from h5chunk.store.write.samples import SampleJob

Notify = Callable[[str], None]


def say_nothing(line: str) -> None:
    """Discard a message."""


def facts_of_all() -> dict[str, Any]:
    """Return the facts that are part of every journal's key."""
    return {"h5chunk": h5chunk.__version__, "journal": 2}


def job_key(job: SampleJob, num_files: int) -> str | None:
    """Return the key of a journal: all that decides the bytes of the chunks but the samples' own bytes.

    None if the source has no identity: then nothing that was done can be used again.
    """
    identity = job.source.identity()
    if identity is None:
        return None
    facts, blobs = identity
    fields = [(name, each.shape, str(each.dtype)) for name, each in job.fields.items()]
    mine = {"fields": fields, "chunk_samples": job.layout.chunk_samples, "files": num_files}
    mine |= {name: job.options[name] for name in ("seed", "shuffle")}
    return key_of({**facts_of_all(), "kind": job.source.kind, **facts, **mine}, blobs)


def command_id(job: SampleJob, num_files: int, stamp: int) -> str | None:
    """Identify the command: equal ones make equal files. None if the source has no identity.

    Parameters
    ----------
    job : SampleJob
    num_files : int
    stamp : int
        Of all samples: see `h5chunk.store.write.fill_task.SourceStamp`.
    """
    key = job_key(job, num_files)
    if key is None:
        return None
    columns, categories = job.source.columns, job.source.categories
    facts = {"key": key, "options": dict(job.options), "skip": job.skip, "stamp": stamp}
    facts["append"] = job.old.num_samples > 0
    facts |= {"categories": dict(categories), "columns": {name: str(columns[name].dtype) for name in columns}}
    return key_of(facts, (values.tobytes() for values in columns.values()))


def is_complete(job: SampleJob, num_files: int) -> bool:
    """Whether the output is there, and this command made it of the samples as they are now."""
    if not has_command_id(job.path):
        return False
    command = command_id(job, num_files, stamp_of_samples(job.source, job.order))
    return command is not None and is_made_by(job.path, command)


def left_out(job: SampleJob, kept: np.ndarray) -> list[Failure]:
    """Return the samples that are not among those that were kept, and why, as reading them again shows."""
    failures = []
    out = job.sample_buffers()
    with job.source.session():
        for row in np.flatnonzero(~np.isin(job.order, kept)).tolist():
            reason = "could not be used then, though it can be now"
            try:
                job.source.read_into(int(job.order[row]), out)
            except SampleError as error:
                reason = str(error)
            failures.append(Failure(row, reason, SampleError.__name__))
    return failures


class TaskLog:
    """The tasks of several files that a journal claims to be done, and where more are added.

    Parameters
    ----------
    journal : Journal
        Opened; or not, where nothing can be continued.
    jobs : sequence of SampleJob
        One per file.
    notify : callable
        Told how many samples are there.
    """

    def __init__(self, journal: Journal, jobs: Sequence[SampleJob], notify: Notify) -> None:
        self._journal = journal
        self._sizes = [(len(job.order), job.layout.chunk_samples) for job in jobs]
        self._notify = notify
        self._claims: list[dict[int, Done]] = [{} for _ in jobs]
        self._num_again = 0
        for record in journal.records:
            self._take(record)
        if journal.was_of_another:
            notify("the unfinished conversion was of other options or sources: starting over")
        if journal.records:
            there = sum(self._samples(i, done) for i, claims in enumerate(self._claims) for done in claims.values())
            notify(f"continuing: {there:,} of {sum(size for size, _ in self._sizes):,} samples are there")

    def _take(self, record: Any) -> None:
        if isinstance(record, list) and record and record[0] in range(len(self._sizes)):
            done = parse_record(record[1:])
            if done is not None:
                self._claims[record[0]][done.chunks.start] = done

    def _samples(self, number: int, done: Done) -> int:
        num_samples, size = self._sizes[number]
        return max(0, min(done.chunks.stop * size, num_samples) - done.chunks.start * size)

    def claims(self, number: int) -> dict[int, Done]:
        """Return the claimed tasks of a file, by their first chunks."""
        return self._claims[number]

    def adder(self, number: int) -> Callable[[Done], None]:
        """Return a callable that adds finished tasks of a file to the journal."""

        def add(done: Done) -> None:
            if done.chunks.start in self._claims[number]:
                self._num_again += self._samples(number, done)
            self._journal.add([number, *done.record()])

        return add

    def finish(self) -> None:
        """Report how many samples had to be written again."""
        if self._num_again:
            self._notify(f"{self._num_again:,} samples were not as they had been, and were done again")


@contextmanager
def keeping(new: NewFile | NewFolder, job: SampleJob, notify: Notify) -> Iterator[None]:
    """Report what becomes of an output that is not finished."""
    try:
        yield
    except BaseException:
        if new.kept:
            there = [path for path in (new.part, new.journal.path) if path.exists()]
            notify(
                "what was done is kept, and the same command continues it; to give its space back, delete "
                + " and ".join(map(printable, there))
            )
        elif job.source.identity() is None:
            notify("nothing of what was done is kept: whether this source changes cannot be told")
        raise
