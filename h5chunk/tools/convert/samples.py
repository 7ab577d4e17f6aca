"""Settle how the samples of a source are written, and write them into a file, continuing what was stopped.

Samples are written task by task, and a journal beside the unfinished output claims what is done: the chunks that it
claims are read and their checksums computed again, and the samples in them must have the stamps that they had. So only
what changed is done again.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import h5chunk
from h5chunk.errors import OutputError, SampleError, ShapeError, SourceError, printable
from h5chunk.machine import available_cores
from h5chunk.plan.layout import plan_layout
from h5chunk.plan.permutation import permutation
from h5chunk.source import OpenContext, SampleField, SampleSource
from h5chunk.store.format.header import checksums_of
from h5chunk.store.format.spec import GROUP
from h5chunk.store.write.command_id import has_command_id, is_made_by
from h5chunk.store.write.fill import Filled
from h5chunk.store.write.fill_task import Done, Failure, parse_record, stamp_of_samples
from h5chunk.store.write.journal import Journal, key_of
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.old_file import OldFile
from h5chunk.store.write.output import NewFolder
from h5chunk.store.write.samples import SampleJob, write_samples
from h5chunk.tools.convert.options import ReadOptions, SampleOptions
from h5chunk.tools.progress import Progress, count_up

PROBES = 24  # samples read to estimate the time
DTYPE_KINDS = "iufS"  # of fields: integers, floats and fixed-length strings

Notify = Callable[[str], None]


def say_nothing(line: str) -> None:
    """Discard a message."""


def open_context(how: ReadOptions, progress: Progress | None) -> OpenContext:
    """Return what opening a source of samples may use."""

    def report_found(count: int) -> None:
        if progress:
            progress("list", count, None)

    return OpenContext(skips_bad_samples=how.on_error == "skip", report_found=report_found)


def prepare(source: SampleSource, path: Path, how: SampleOptions) -> SampleJob:
    """Settle layout and order of a new file; raise SourceError if a file cannot hold what the source has."""
    check_fields(source)
    largest = max(field.sample_bytes for field in source.fields.values())
    # what readers read by default is recorded, but for images and their labels
    fields = {} if "images" in source.fields else {"fields": [*source.fields, *source.columns]}
    return SampleJob(
        path=path,
        source=source,
        order=permutation(len(source), how.seed) if how.shuffle else np.arange(len(source), dtype=np.int64),
        layout=plan_layout(len(source), largest, how.chunk_samples),
        options={**fields, **source.options, "seed": how.seed, "shuffle": how.shuffle},
        columns=source.columns,
        categories=source.categories,
        num_workers=available_cores() if how.workers is None else how.workers,
        skip=how.on_error == "skip",
    )


def check_fields(source: SampleSource) -> None:
    """Raise SourceError unless a file can hold the fields and columns of a source."""
    if not len(source) or not source.fields:
        raise SourceError(f"the source has {len(source)} samples of {len(source.fields)} fields: give at least one")
    columns = {name: SampleField(values.shape[1:], values.dtype) for name, values in source.columns.items()}
    for name, field in (*source.fields.items(), *columns.items()):
        if not name or "/" in name or name in (".", GROUP):
            raise SourceError(f"{name!r} cannot be the name of a field: rename it")
        if field.dtype.kind not in DTYPE_KINDS or not field.sample_bytes:
            raise SourceError(
                f"field {name!r} is {field.dtype} of shape {field.shape}: give integers, floats or strings of a fixed "
                "length, and at least one element"
            )
    for name, values in source.columns.items():
        if name in source.fields or values.shape != (len(source),):
            raise SourceError(f"column {name!r} is {values.shape} but there are {len(source)} samples, or is a field")


def estimate_s(job: SampleJob) -> float:
    """Return the seconds that writing will take, from reading a few samples spread over the source."""
    source, out = job.source, job.sample_buffers()
    probes = np.unique(np.linspace(0, len(source) - 1, PROBES).astype(np.int64))
    started = time.perf_counter()
    with source.session():
        for index in probes.tolist():
            try:
                source.read_into(index, out)
            except ShapeError:
                raise SourceError(source.disagreement()) from None
            except SampleError as error:
                if not job.skip:
                    raise SampleError(f"{source.name(index)}: {error}") from None
    return (time.perf_counter() - started) / len(probes) * len(source) / max(1, min(job.num_workers, available_cores()))


# ---- writing


def write_file(
    job: SampleJob, overwrite: bool, progress: Progress | None, notify: Notify, old: OldFile | None = None
) -> tuple[SampleJob, Filled]:
    """Write one file and put it in its place, continuing what was done of it before.

    ``old`` is the file that ``job`` appends to, whose place the new one takes. Returns the job without the samples that
    were skipped.
    """
    new = NewFile(job.path, overwrite)
    with keeping(new, job, notify), new:
        if old is not None:
            old.check_unchanged()  # by who had the lock before
        new.journal.open(job_key(job, 1, old))
        log = TaskLog(new.journal, [job], notify)
        written, filled = write_samples(
            new,
            job,
            claims=log.claims[0],
            finished=partial(log.add, 0),
            written=count_written(job, progress),
            carried=count_up("copy", job.carried_bytes, progress),
        )
        log.finish()
        new.command_id = command_id(job, 1, filled.stamp)
        if old is not None:
            new.part.chmod(old.mode)
            old.check_unchanged()
        new.commit()
    return written, filled


def count_written(job: SampleJob, progress: Progress | None) -> Callable[[int], None]:
    """Return a function that is told how many samples were written, and reports how many of all these are."""
    written = count_up("convert", len(job.order), progress)
    written(0)
    return written


class TaskLog:
    """The tasks of several files, one per job, that a journal claims to be done, and where more are added.

    ``claims`` are the claimed tasks of each file, by their first chunks.
    """

    def __init__(self, journal: Journal, jobs: Sequence[SampleJob], notify: Notify) -> None:
        self._journal, self._jobs, self._notify = journal, jobs, notify
        self.claims: list[dict[int, Done]] = [{} for _ in jobs]
        self._num_again = 0
        for record in journal.records:
            if isinstance(record, list) and record and record[0] in range(len(jobs)):
                done = parse_record(record[1:])
                if done is not None:
                    self.claims[record[0]][done.chunks.start] = done
        if journal.was_of_another:
            notify("the unfinished conversion was of other options or sources: starting over")
        if journal.records:
            there = sum(self._samples(i, done) for i, claims in enumerate(self.claims) for done in claims.values())
            notify(f"continuing: {there:,} of {sum(len(job.order) for job in jobs):,} samples are there")

    def _samples(self, number: int, done: Done) -> int:
        num_samples, size = len(self._jobs[number].order), self._jobs[number].layout.chunk_samples
        return max(0, min(done.chunks.stop * size, num_samples) - done.chunks.start * size)

    def add(self, number: int, done: Done) -> None:
        """Add a finished task of a file to the journal."""
        if done.chunks.start in self.claims[number]:
            self._num_again += self._samples(number, done)
        self._journal.add([number, *done.record()])

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


# ---- recognising what was done before


def facts_of_all() -> dict[str, Any]:
    """Return the facts that are part of every journal's key."""
    return {"h5chunk": h5chunk.__version__, "journal": 2}


def job_key(job: SampleJob, num_files: int, old: OldFile | None = None) -> str | None:
    """Return the key of a journal: all that decides the bytes of new chunks but the samples' own bytes.

    None if the source has no identity: then nothing that was done can be used again.
    """
    identity = job.source.identity()
    if identity is None:
        return None
    facts, blobs = identity
    fields = [(name, each.shape, str(each.dtype)) for name, each in job.fields.items()]
    mine = {"fields": fields, "chunk_samples": job.layout.chunk_samples, "files": num_files}
    mine |= {name: job.options[name] for name in ("seed", "shuffle")}
    key = key_of({**facts_of_all(), "kind": job.source.kind, **facts, **mine}, blobs)
    if old is None:
        return key
    was = {"num_samples": old.header.num_samples, "chunk_samples": old.header.chunk_samples}
    return key_of({"append": was, "checksums": checksums_of(old.file), "source": key})


def command_id(job: SampleJob, num_files: int, stamp: int) -> str | None:
    """Identify the command: equal ones make equal files. None if the source has no identity.

    ``stamp`` is that of all samples: see `h5chunk.store.write.fill_task.stamp_of_samples`.
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


# ---- the list of skipped samples


def skipped_path(output: Path) -> Path:
    """Return the path of the list of the samples that were left out of an output."""
    return output.with_name(output.name + ".skipped.csv")


def save_skipped(output: Path, skipped: Sequence[tuple[str, str]], *, behind: bool = False) -> str | None:
    """Write the list of (name, reason) beside the output; return its path, or None if nothing was left out.

    With ``behind``, they are put behind those of an earlier list, unless that ends with them.
    """
    target, rows = skipped_path(output), [list(each) for each in skipped]
    if not rows:
        return None
    try:
        before = []
        if behind and target.exists():
            with target.open(newline="", encoding="utf-8", errors="replace") as file:
                before = list(csv.reader(file))
        if before[-len(rows) :] != rows:
            with target.open("a" if before else "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows if before else [["path", "reason"], *rows])
    except OSError as error:
        raise OutputError(
            f"{printable(target)}: the list of {len(rows)} skipped samples cannot be written: {error.strerror}; "
            f"{printable(output)} itself is complete"
        ) from None
    return str(target)
