"""Write the samples of a source into a file or a folder of files, or predict the result, and report on it.

A journal beside the unfinished output records which chunks are written. If a conversion is continued, the checksums of
these chunks are verified, and the stamps of their samples are compared with the source. Only damaged chunks, and chunks
whose samples have changed, are written again.
"""

from __future__ import annotations

import csv
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import OutputError, count_text, printable
from h5chunk.plan.cache import ChunkGrid
from h5chunk.store.format.spec import GROUP
from h5chunk.store.hdf5.open import opened
from h5chunk.store.write.fill import Filled, TaskResult, parse_record
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.output import NewFolder, check_folder
from h5chunk.store.write.part_file import check_free_space, check_output
from h5chunk.store.write.samples import SampleJob, write_samples
from h5chunk.tools.chunk_cache import NO_CACHE, ChunkCacheInfo, describe_cache
from h5chunk.tools.cluster import connected
from h5chunk.tools.convert.distribute import write_shards
from h5chunk.tools.convert.forms import compare_forms, recommend
from h5chunk.tools.convert.report import ConvertReport
from h5chunk.tools.convert.samples import command_id, estimate_s, find_skipped, folder_layout, is_complete, job_key
from h5chunk.tools.progress import Progress, count_up
from h5chunk.tools.report import python_text
from h5chunk.tools.upload import in_store, size_of, upload_early

GREY = {"L", "LA", "1"}  # modes of images without colours
APPLIED = ("rotated", "resized", "first frame")  # notes on what was done to images; other notes are their modes

Notify = Callable[[str], None]


@dataclass
class SampleRun:
    """Convert samples: write one or several files, unless they are already complete, and return a report."""

    job: SampleJob
    shards: list[SampleJob]  # jobs of the files of an output folder; empty for a single file
    overwrite: bool
    dry_run: bool  # whether to predict the report, and write nothing
    progress: Progress | None
    notify: Notify | None
    started: float  # time of `time.perf_counter` at the start of the command
    complete: bool = False  # whether the same command has already made the output
    client: Any = None  # the Dask cluster that writes the shards: see `h5chunk.tools.cluster.connected`

    def report(self, notes: Sequence[str]) -> ConvertReport:
        """Write the output, unless it is complete or this is a dry run, and return the report."""
        files, filled = self._result()
        job, dry_run = self.job, self.dry_run and not self.complete
        skipped = [(job.name(failure.row), failure.reason) for failure in filled.failures]
        if self.overwrite and not self.dry_run and not skipped:
            skipped_path(job.path).unlink(missing_ok=True)  # lists the samples that the replaced file lacks
        form = job.source.fields[job.any_size].form if job.any_size else ""
        kinds = {name: (() if field.form else field.shape, field.dtype) for name, field in job.fields.items()}
        kinds |= {name: ((), values.dtype) for name, values in job.columns.items()}
        layout = folder_layout(files) if self.shards else files[0].layout
        free_bytes = shutil.disk_usage(job.path.absolute().parent).free if dry_run else None
        forms = []
        if free_bytes is not None and job.any_size:
            forms = compare_forms(job, free_bytes)
        return ConvertReport(
            path=str(job.path),
            source_kind=job.source.kind,
            dry_run=self.dry_run,
            num_samples=layout.num_samples,
            num_bytes=sum(file.spec().num_bytes if dry_run else size_of(file.path) for file in files),
            seconds=estimate_s(job) if dry_run else time.perf_counter() - self.started,
            free_bytes=free_bytes,
            num_workers=job.num_workers if dry_run else None,
            sample_shape=next(iter(kinds.values()))[0],
            form=form,
            size_bytes=dict(job.source.size_bytes) if dry_run else {},
            forms=forms,
            recommendation=recommend(forms),
            fields={name: str(kinds[name][1]) for name in job.field_names},
            shapes={name: kinds[name][0] for name in job.field_names},
            layout=layout,
            chunk_cache=_describe_cache(files[0], () if form else next(iter(kinds.values()))[0] or (1,)),
            class_names=list(job.categories.get("labels", ())),
            counts=dict(sorted(filled.notes.most_common(), key=lambda note: note[0] in APPLIED)),
            skipped=skipped,
            skipped_list=None if self.dry_run else save_skipped(job.path, skipped),
            ignored=list(job.source.ignored),
            notes=[*notes, *self._grey_note(filled.notes)],
            already_complete=self.complete,
        )

    def _grey_note(self, counts: Mapping[str, int]) -> list[str]:
        """Return a note if all images are grey, but stored in colour, according to the ``counts`` of their modes."""
        modes = {mode for mode in counts if mode not in APPLIED and not mode.endswith(" mask")}
        if not modes or not modes <= GREY or self.job.source.options.get("color") != "rgb":
            return []
        return ["all images are grey, but have three equal channels: --color gray needs a third of the space"]

    def _result(self) -> tuple[list[SampleJob], Filled]:
        """Write, predict or read back the output. Returns its files, without skipped samples, and the outcome."""
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
        check_free_space(self.job.path, sum(file.spec().num_bytes for file in files))
        return files, Filled()

    def _write(self, files: list[SampleJob]) -> tuple[list[SampleJob], Filled]:
        """Write the files, and move the complete output to its path. Earlier work is continued."""
        job, all_filled, kept = self.job, Filled(), []
        output = (NewFolder if self.shards else NewFile)(job.path, self.overwrite)
        with self._explain_interruption(output), output:
            output.open_journal(job_key(job, len(files)))
            log = _TaskLog(output.journal, files, self.progress, self._notify)
            if self.shards and not (self.client and in_store()):
                taken = sum(file.stat().st_blocks * 512 for file in output.part.iterdir())
                check_free_space(job.path, sum(file.spec().num_bytes for file in files) - taken)
            first_row, writing = 0, log.write_here(output)
            if self.client is not None:
                writing = log.write_on(self.client, output.part)
            for _, written, filled in sorted(writing, key=lambda file: file[0]):
                kept.append(written)
                all_filled.notes.update(filled.notes)
                all_filled.stamp ^= filled.stamp
                all_filled.failures += [failure._replace(row=first_row + failure.row) for failure in filled.failures]
                first_row += len(files[len(kept) - 1].order)
            log.finish()
            output.command_id = command_id(job, len(files), all_filled.stamp)
            output.commit()
        return kept, all_filled

    def _read_back(self, files: list[SampleJob]) -> tuple[list[SampleJob], Filled]:
        """Return the jobs of the files of a complete output, and its skipped samples. Counts of notes are unknown."""
        written = []
        for file_job in files:
            with opened(file_job.path) as file:
                written.append(file_job.with_order(file[f"{GROUP}/source_index"][()]))
        return written, Filled(
            failures=find_skipped(self.job, np.concatenate([file_job.order for file_job in written]))
        )

    def _notify(self, line: str) -> None:
        if self.notify is not None:
            self.notify(line)

    @contextmanager
    def _explain_interruption(self, output: NewFile | NewFolder) -> Iterator[None]:
        """If the context ends with an error, tell the user whether the finished work is kept."""
        try:
            yield
        except BaseException:
            if output.kept:
                paths = [path for path in (output.part, output.journal.path) if path.exists()]
                self._notify(
                    "the finished work is kept, and the same command continues it; to free its space, delete "
                    + " and ".join(map(printable, paths))
                )
            elif self.job.source.identity() is None:
                self._notify("the finished work is discarded, because changes in this source cannot be detected")
            raise


@contextmanager
def _file_of(output: NewFile | NewFolder, name: str) -> Iterator[NewFile]:
    """Open the output file, or the file ``name`` of an output folder, for writing."""
    if isinstance(output, NewFile):
        yield output
        return
    output.reopen(name)
    with NewFile(output.part / name, journal=output.journal) as new:
        yield new
        new.commit()


class _TaskLog:
    """Track the tasks that the journal records as written, for each file, and report progress."""

    def __init__(self, journal: Journal, jobs: Sequence[SampleJob], progress: Progress | None, notify: Notify) -> None:
        self._journal, self._jobs, self._notify = journal, jobs, notify
        num_samples = sum(len(job.order) for job in jobs)
        self._written = count_up("convert", num_samples, progress)
        self._written(0)
        self._claims: list[dict[int, TaskResult]] = [
            {} for _ in jobs
        ]  # recorded tasks of each file, by the index of their first chunk
        self._num_rewritten = 0  # samples
        for record in journal.records:
            if isinstance(record, list) and record and record[0] in range(len(jobs)):
                done = parse_record(record[1:])
                if done is not None:
                    self._claims[record[0]][done.chunks.start] = done
        if journal.key_mismatch:
            notify("the unfinished conversion had other options or sources: starting over")
        if journal.records:
            written = sum(self._samples(i, done) for i, claims in enumerate(self._claims) for done in claims.values())
            notify(f"continuing: {written:,} of {count_text(num_samples, 'sample')} are already written")

    def _samples(self, number: int, done: TaskResult) -> int:
        """Return the number of samples in the chunks of a task of file ``number``."""
        num_samples, size = len(self._jobs[number].order), self._jobs[number].layout.chunk_samples
        return max(0, min(done.chunks.stop * size, num_samples) - done.chunks.start * size)

    def write_here(self, output: NewFile | NewFolder) -> Iterator[tuple[int, SampleJob, Filled]]:
        """Write all files, except chunks that the journal records and that are unchanged.

        Yields (number, job, outcome) for each file. Skipped samples are removed from the yielded job.
        """
        for number, job in enumerate(self._jobs):
            options: dict[str, Any] = {"claims": self._claims[number], "written": self._written}
            with _file_of(output, job.path.name) as new:
                written = write_samples(new, job, finished=partial(self._finished, number), **options)
            if isinstance(output, NewFolder):
                upload_early(output.part / job.path.name)
            yield number, *written

    def write_on(self, client: Any, part: Path) -> Iterator[tuple[int, SampleJob, Filled]]:
        """Write the files on a Dask cluster, and yield (number, job, outcome) for each file as it finishes."""
        told = [0] * len(self._jobs)

        def say(number: int, done: int) -> None:
            told[number], before = done, told[number]
            self._written(done - before)

        with connected(client) as cluster:
            for number, job, filled, results in write_shards(cluster, self._jobs, part, self._claims, say):
                for done in results:
                    self._finished(number, done)
                say(number, len(self._jobs[number].order))
                yield number, job, filled

    def _finished(self, number: int, done: TaskResult) -> None:
        if done.chunks.start in self._claims[number]:
            self._num_rewritten += self._samples(number, done)
        self._journal.add([number, *done.record()])

    def finish(self) -> None:
        """Tell the user how many samples were written again, if any."""
        if self._num_rewritten:
            self._notify(f"changed samples that were written again: {self._num_rewritten:,}")


# ---- the list of skipped samples


def skipped_path(output: Path) -> Path:
    """Return the path of the list of samples that were skipped when ``output`` was written."""
    return output.with_name(output.name + ".skipped.csv")


def save_skipped(output: Path, skipped: Sequence[tuple[str, str]]) -> str | None:
    """Write the names and reasons of skipped samples to a .csv beside the output; return its path, or None."""
    target = skipped_path(output)
    if not skipped:
        return None
    try:
        with target.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["path", "reason"], *skipped])
    except OSError as error:
        raise OutputError(
            f"{printable(target)}: the list of {count_text(len(skipped), 'skipped sample')} cannot be written "
            f"({error.strerror}), but "
            f"{printable(output)} is complete"
        ) from None
    return str(target)


def _describe_cache(job: SampleJob, sample_shape: tuple[int, ...]) -> ChunkCacheInfo:
    """Describe the chunk cache of the main field of a file. An empty ``sample_shape`` stands for images of any size."""
    layout = job.layout
    shape = sample_shape or (layout.sample_bytes,)
    grid = ChunkGrid(
        (layout.num_samples, *shape), (layout.chunk_samples, *shape), max(1, layout.sample_bytes // math.prod(shape))
    )
    cache = layout.cache if sample_shape else NO_CACHE
    return describe_cache(python_text(str(job.path)), grid, cache, "; ".join(layout.reasons[:1]))
