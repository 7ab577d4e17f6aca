"""Write the samples of a source into a file or a folder of files, or predict that, and report on it.

Samples are written task by task, and a journal beside the unfinished output records which tasks are done. When a
conversion continues, the checksums of these chunks are computed again, and their samples must have their old stamps.
So only changed chunks are written again.
"""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from h5chunk.errors import OutputError, count_text, printable
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.open import opened
from h5chunk.store.write.fill import Done, Filled, parse_record
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.old_file import OldFile
from h5chunk.store.write.output import NewFolder, check_folder
from h5chunk.store.write.part_file import check_output, check_room
from h5chunk.store.write.samples import SampleJob, write_samples
from h5chunk.tools.convert.report import ConvertReport
from h5chunk.tools.convert.samples import command_id, estimate_s, folder_layout, is_complete, job_key, left_out
from h5chunk.tools.progress import Progress, count_up

APPLIED = ("rotated", "resized", "first frame")  # notes on images, except their modes

Notify = Callable[[str], None]


@dataclass
class SampleRun:
    """Write a job into one file, or into ``shards``, or, with ``old``, into a longer file that replaces that one."""

    job: SampleJob
    shards: list[SampleJob]
    overwrite: bool
    dry_run: bool  # write nothing
    progress: Progress | None
    notify: Notify | None
    started: float  # by `time.perf_counter`
    old: OldFile | None = None
    complete: bool = False  # the same command has made the output

    def report(self, notes: Sequence[str], new_classes: Sequence[str] = ()) -> ConvertReport:
        """Write what is not complete yet, or predict that, and report on it."""
        files, filled = self._result()
        job, dry_run = self.job, self.dry_run and not self.complete
        skipped = [(job.name(failure.row), failure.reason) for failure in filled.failures]
        if self.overwrite and self.old is None and not self.dry_run and not skipped:
            skipped_path(job.path).unlink(missing_ok=True)  # bytes of the replaced file
        form = job.source.fields[job.any_size].form if job.any_size else ""
        kinds = {name: (() if each.form else each.shape, each.dtype) for name, each in job.fields.items()}
        kinds |= {name: ((), values.dtype) for name, values in job.columns.items()}
        layout = folder_layout(files) if self.shards else files[0].layout
        return ConvertReport(
            path=str(job.path),
            source_kind=job.source.kind,
            dry_run=self.dry_run,
            num_added=sum(len(file.order) for file in files),
            num_samples=layout.num_samples,
            num_bytes=sum(file.spec().num_bytes if dry_run else file.path.stat().st_size for file in files),
            seconds=estimate_s(job) if dry_run else time.perf_counter() - self.started,
            free_bytes=shutil.disk_usage(job.path.absolute().parent).free if dry_run else None,
            num_workers=job.num_workers if dry_run else None,
            sample_shape=next(iter(kinds.values()))[0],
            form=form,
            fields={name: str(kinds[name][1]) for name in job.field_names},
            shapes={name: kinds[name][0] for name in job.field_names},
            layout=layout,
            class_names=list(job.categories.get("labels", ())),
            new_classes=list(new_classes),
            counts=dict(sorted(filled.notes.most_common(), key=lambda note: note[0] in APPLIED)),
            skipped=skipped,
            skipped_list=None if self.dry_run else save_skipped(job.path, skipped, behind=self.old is not None),
            ignored=list(job.source.ignored),
            notes=list(notes),
            already_complete=self.complete,
        )

    def _result(self) -> tuple[list[SampleJob], Filled]:
        """Return the jobs of the files without the skipped samples, and the result for all new samples."""
        files = self.shards or [self.job]
        try:
            if not self.complete:
                return self._predict(files) if self.dry_run else self._write(files)
        except OutputError:
            self.complete = not self.overwrite and is_complete(self.job, len(files))
            if not self.complete:
                raise
        return self._read_back(files)

    def _predict(self, files: list[SampleJob]) -> tuple[list[SampleJob], Filled]:
        (check_folder if self.shards else check_output)(self.job.path, self.overwrite)
        check_room(self.job.path, sum(file.spec().num_bytes for file in files))
        return files, Filled()

    def _write(self, files: list[SampleJob]) -> tuple[list[SampleJob], Filled]:
        """Write the files and put the output in its place, continuing earlier work on it."""
        job, old, all_filled, kept = self.job, self.old, Filled(), []
        output = (NewFolder if self.shards else NewFile)(job.path, self.overwrite)
        with self._keeping(output), output:
            if old is not None:
                old.check_unchanged()  # by the previous holder of the lock
            output.open_journal(job_key(job, len(files), old))
            log = _TaskLog(output.journal, files, self.progress, self._notify)
            if self.shards:
                taken = sum(file.stat().st_blocks * 512 for file in output.part.iterdir())
                check_room(job.path, sum(file.spec().num_bytes for file in files) - taken)
            carried, first_row = count_up("copy", job.carried_bytes, self.progress), 0
            for number, file in enumerate(files):
                with _file_of(output, file.path.name) as new:
                    written, filled = log.write(new, number, carried)
                kept.append(written)
                all_filled.notes.update(filled.notes)
                all_filled.stamp ^= filled.stamp
                all_filled.failures += [failure._replace(row=first_row + failure.row) for failure in filled.failures]
                first_row += len(file.order)
            log.finish()
            output.command_id = command_id(job, len(files), all_filled.stamp)
            if old is not None:
                output.part.chmod(old.mode)
                old.check_unchanged()
            output.commit()
        return kept, all_filled

    def _read_back(self, files: list[SampleJob]) -> tuple[list[SampleJob], Filled]:
        """Report on files that are already complete, except facts that would require reading all samples."""
        job, old = self.job, self.job.old
        if old.num_samples:
            last = old.options["appended"][-1]
            kept = old.source_index[old.num_samples - last["samples"] :] - last["first_index"]
            written = [replace(job, order=kept, layout=replace(job.layout, num_samples=old.num_samples))]
        else:
            written = []
            for each in files:
                with opened(each.path) as file:
                    written.append(each.with_order(file[f"{GROUP}/source_index"][()]))
        return written, Filled(failures=left_out(job, np.concatenate([each.order for each in written])))

    def _notify(self, line: str) -> None:
        if self.notify is not None:
            self.notify(line)

    @contextmanager
    def _keeping(self, new: NewFile | NewFolder) -> Iterator[None]:
        """Report what happens to an output that is not finished, in a context."""
        try:
            yield
        except BaseException:
            if new.kept:
                there = [path for path in (new.part, new.journal.path) if path.exists()]
                self._notify(
                    "the finished work is kept, and the same command continues it; to free its space, delete "
                    + " and ".join(map(printable, there))
                )
            elif self.job.source.identity() is None:
                self._notify("the work is lost, because changes of this source cannot be noticed")
            raise


@contextmanager
def _file_of(output: NewFile | NewFolder, name: str) -> Iterator[NewFile]:
    """Open a file of an output to be written or continued, in a context: the file itself, or a shard."""
    if isinstance(output, NewFile):
        yield output
        return
    output.reopen(name)
    with NewFile(output.part / name, journal=output.journal) as new:
        yield new
        new.commit()


class _TaskLog:
    """The finished tasks of several files, one file per job: read from a journal, and added to it."""

    def __init__(self, journal: Journal, jobs: Sequence[SampleJob], progress: Progress | None, notify: Notify) -> None:
        self._journal, self._jobs, self._notify = journal, jobs, notify
        num_samples = sum(len(job.order) for job in jobs)
        self._written = count_up("convert", num_samples, progress)
        self._written(0)
        self._claims: list[dict[int, Done]] = [{} for _ in jobs]  # tasks of each file, by their first chunks
        self._num_again = 0
        for record in journal.records:
            if isinstance(record, list) and record and record[0] in range(len(jobs)):
                done = parse_record(record[1:])
                if done is not None:
                    self._claims[record[0]][done.chunks.start] = done
        if journal.key_mismatch:
            notify("the unfinished conversion had other options or sources: starting over")
        if journal.records:
            there = sum(self._samples(i, done) for i, claims in enumerate(self._claims) for done in claims.values())
            notify(f"continuing: {there:,} of {count_text(num_samples, 'sample')} are already written")

    def _samples(self, number: int, done: Done) -> int:
        num_samples, size = len(self._jobs[number].order), self._jobs[number].layout.chunk_samples
        return max(0, min(done.chunks.stop * size, num_samples) - done.chunks.start * size)

    def write(self, new: NewFile, number: int, carried: Callable[[int], None]) -> tuple[SampleJob, Filled]:
        """Write a file, except the chunks that the journal claims to be written."""
        claims, finished = self._claims[number], partial(self._add, number)
        return write_samples(
            new, self._jobs[number], claims=claims, finished=finished, written=self._written, carried=carried
        )

    def _add(self, number: int, done: Done) -> None:
        if done.chunks.start in self._claims[number]:
            self._num_again += self._samples(number, done)
        self._journal.add([number, *done.record()])

    def finish(self) -> None:
        """Report how many samples had to be written again."""
        if self._num_again:
            self._notify(f"{count_text(self._num_again, 'sample')} had changed, and were written again")


# ---- the list of skipped samples


def skipped_path(output: Path) -> Path:
    """Return the path of the list of skipped samples of an output."""
    return output.with_name(output.name + ".skipped.csv")


def save_skipped(output: Path, skipped: Sequence[tuple[str, str]], *, behind: bool = False) -> str | None:
    """Write the list of (name, reason) beside the output; return its path, or None if no sample was left out.

    With ``behind``, append them to an earlier list, unless it already ends with them.
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
