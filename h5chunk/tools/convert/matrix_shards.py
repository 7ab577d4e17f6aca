"""Write a matrix as a folder of shards with the same columns and storage, in this process or on a Dask cluster.

The tasks of `matrix_tasks` run in four rounds, and this process merges their results between rounds. The journal of the
output records the results of finished tasks, so that a conversion can be continued with or without a cluster.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import count_text
from h5chunk.plan.csr import plan_csr
from h5chunk.plan.layout import plan_layout
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.matrix.codes import Coding, FloatCoding
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.output import NewFolder
from h5chunk.tools.cluster import Cluster, connected
from h5chunk.tools.convert.matrix_ids import OldIds, inverse_of
from h5chunk.tools.convert.matrix_read import (
    UnfitError,
    check_shape,
    first_that_fits,
    numbering,
    order_of_rows,
    whole_shape,
)
from h5chunk.tools.convert.matrix_select import columns_with_enough, storage_of
from h5chunk.tools.convert.matrix_tasks import (
    COLUMNS,
    DESTINATION,
    ORDER,
    ROWS,
    MatrixJob,
    Result,
    read_part,
    save,
    scatter_part,
    survey_shard,
    write_shard,
)
from h5chunk.tools.convert.options import MatrixOptions
from h5chunk.tools.convert.samples import shard_starts
from h5chunk.tools.progress import Progress, count_tasks
from h5chunk.tools.shared import SharedFolder
from h5chunk.tools.upload import is_uploaded, shared_folder, take, upload_last
from h5chunk.tools.verify.verify import verify

Task = Callable[[MatrixJob, int, Callable[[int], None]], Result]
Notify = Callable[[str], None]


@dataclass
class ShardedMatrix:
    """Write the shards of a matrix to an output folder."""

    source: SparseSource
    path: Path
    options: MatrixOptions
    old: OldIds
    overwrite: bool
    command_id: str | None
    progress: Progress | None
    notify: Notify
    client: Any

    def write(self) -> dict[str, Any]:
        """Write the folder, continuing earlier work. Return report values that the files do not contain."""
        with ExitStack() as stack:
            output = stack.enter_context(NewFolder(self.path, self.overwrite))
            output.open_journal(self.command_id)
            if output.journal.key_mismatch:
                self.notify("the unfinished conversion had other options or sources: starting over")
            cluster = None if self.client is None else stack.enter_context(connected(self.client))
            rounds = _Rounds(output.journal, cluster, self.progress, self.notify)
            folder = shared_folder(output.part, output.work) if cluster else SharedFolder(output.work)
            results = first_that_fits(self.options, partial(self._attempt, rounds, output.part, folder))
            folder.clear()
            output.command_id = self.command_id
            output.commit()
        return _sums(results)

    def _attempt(self, rounds: _Rounds, part: Path, folder: SharedFolder, coding: Coding | FloatCoding) -> list[Result]:
        """Write all shards with one coding. Raises UnfitError if it cannot store a value."""
        rounds.coding = type(coding).__name__
        if rounds.is_known_unfit() and coding.fallback() is not None:
            raise UnfitError("an earlier run found a value that this coding cannot store")
        folder.path.mkdir(exist_ok=True)
        if not rounds.have_begun:
            folder.clear()
        try:
            return self._write(rounds, part, folder, coding)
        except UnfitError:
            rounds.add_unfit()
            shutil.rmtree(folder.path, ignore_errors=True)
            folder.clear()
            raise

    def _write(self, rounds: _Rounds, part: Path, folder: SharedFolder, coding: Coding | FloatCoding) -> list[Result]:
        shards = self.options.shards or 1
        parts = self.source.split(shards)
        name = self.path.name.removesuffix(".h5")
        job = MatrixJob(folder, name, self.source, parts, self.options, coding, self.old)
        read = rounds.run("read", read_part, job, len(parts), sum(part.num_bytes for part in parts))
        job = _plan(replace(job, read=read))
        num_entries = sum(result["entries"] for result in read)

        scattered = rounds.run("sort", scatter_part, job, len(parts), num_entries)
        for result in read:
            folder.free(result["file"])
        job = replace(job, scattered=scattered)
        surveys = rounds.run("survey", survey_shard, job, shards, num_entries)
        job = _merge(job, surveys)
        names = [job.shard_name(number) for number in range(shards)]

        def finish(number: int, result: Result) -> None:
            take(folder, result["file"], part / names[number], result["bytes"])

        def is_whole(number: int, result: Result) -> bool:
            if folder.url:  # uploads are atomic
                return is_uploaded(names[number], result["bytes"])
            return (part / names[number]).exists() and verify(part / names[number]).ok

        last = upload_last(names, folder)
        return rounds.run("write", write_shard, job, shards, num_entries, finish, is_whole, last)


class _Rounds:
    """Run rounds of tasks, in this process or on a cluster. Tasks whose results are in the journal are skipped."""

    def __init__(self, journal: Journal, cluster: Cluster | None, progress: Progress | None, notify: Notify) -> None:
        self._journal, self._cluster, self._progress, self._notify = journal, cluster, progress, notify
        self.coding = ""

    @property
    def have_begun(self) -> bool:
        return bool(self._journal.records)

    def is_known_unfit(self) -> bool:
        return [self.coding, "unfit"] in self._journal.records

    def add_unfit(self) -> None:
        self._journal.add([self.coding, "unfit"])

    def run(
        self,
        stage: str,
        function: Task,
        job: MatrixJob,
        num_tasks: int,
        total: int,
        finish: Callable[[int, Result], None] | None = None,
        is_there: Callable[[int, Result], bool] | None = None,
        last: Collection[int] = (),
    ) -> list[Result]:
        """Run the tasks that the journal does not record as finished, and return the results of all tasks.

        ``finish(number, result)`` is called after each task. ``is_there(number, result)`` returns whether the output of
        a recorded task still exists; by default, this checks for the task's file. The tasks in ``last`` run after all
        others.
        """
        say = count_tasks(stage, total, self._progress)
        done: dict[int, Result] = {}
        for record in self._journal.records:
            if record[:2] != [self.coding, stage] or not 0 <= record[2] < num_tasks:
                continue
            if is_there(*record[2:]) if is_there else job.folder.has(record[3]["file"]):
                done[record[2]] = record[3]
        if done:
            self._notify(f"continuing: {len(done)} of {count_text(num_tasks, f'{stage} task')} are already done")
        for number, result in self._ended(function, job, [n for n in range(num_tasks) if n not in done], say, last):
            if finish is not None:
                finish(number, result)
            self._journal.add([self.coding, stage, number, result])
            done[number] = result
            say(number, job.parts[number].num_bytes if stage == "read" else result["entries"])
        return [done[number] for number in range(num_tasks)]

    def _ended(
        self,
        function: Task,
        job: MatrixJob,
        numbers: list[int],
        say: Callable[[int, int], None],
        last: Collection[int],
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks, and yield the number and the result of each task as it finishes."""
        if self._cluster is None:
            yield from ((number, function(job, number, partial(say, number))) for number in numbers)
        elif numbers:
            name = job.folder.save_job(job)
            tasks = {number: RoundTask(job.folder, name, function, number) for number in numbers}
            yield from self._cluster.run(run_task, tasks, say, last)


class RoundTask(NamedTuple):
    """A task of a round."""

    folder: SharedFolder
    job: str  # name of the file with the job that all tasks share
    function: Task
    number: int


def run_task(task: RoundTask, say: Callable[[int], None]) -> Result:
    with task.folder.in_worker() as folder:
        job = replace(folder.load_job(task.job), folder=folder)
        result = task.function(job, task.number, say)
        if task.function is write_shard:
            folder.finish(task.job, result["file"], job.shard_name(task.number))
        return result


# ---- between rounds


def _plan(job: MatrixJob) -> MatrixJob:
    """Map all ids to indices, choose the order of the rows, and divide them into shards."""
    source, options, old = job.source, job.options, job.old
    sizes, maps = _merge_ids(job) if source.has_ids else (_extent(job), {})
    num_rows, num_columns = sizes
    order = order_of_rows(source, options, num_rows, num_columns, old.num_rows)
    destination = inverse_of(order)
    save(job.folder, ORDER, order)
    save(job.folder, DESTINATION, destination)
    for (axis, number), numbers in maps.items():
        save(job.folder, job.of_part(number, axis), destination[numbers] if axis == ROWS else numbers)
    shards = options.shards or 1
    chunk_samples = options.chunk_samples or _chunk_samples(job, num_rows, num_columns)
    if options.chunk_samples is None and -(-num_rows // chunk_samples) < shards <= num_rows:
        chunk_samples = -(-num_rows // shards)
        if -(-num_rows // chunk_samples) < shards:
            chunk_samples = num_rows // shards
    starts = shard_starts(num_rows, chunk_samples, shards)
    return replace(job, num_rows=num_rows, num_columns=num_columns, chunk_samples=chunk_samples, starts=starts)


def _extent(job: MatrixJob) -> tuple[int, int]:
    rows, columns = (max(result["extent"][axis] for result in job.read) for axis in (0, 1))
    return whole_shape(job.source, rows, columns)


def _merge_ids(job: MatrixJob) -> tuple[tuple[int, int], dict[tuple[str, int], np.ndarray]]:
    """Map the ids of all parts to common indices, and save the ids.

    Returns the number of row ids and of column ids. Also returns, for each axis and part, the array that maps the
    part's indices to common indices.
    """
    all_ids, maps = [], dict[tuple[str, int], np.ndarray]()
    for axis, old in ((ROWS, job.old.rows), (COLUMNS, job.old.columns)):
        ids = numbering(job.options, old)
        found = [ids.number(np.load(job.folder.file(f"{result['file']}-{axis}.npy"))) for result in job.read]
        known, ranks = ids.ranks()
        save(job.folder, f"{axis}.npy", known)
        maps |= {(axis, number): ranks[numbers] for number, numbers in enumerate(found)}
        all_ids.append(ids)
    rows, columns = all_ids
    check_shape(job.source, job.options, rows.size, columns.size, id_bytes=rows.num_bytes + columns.num_bytes)
    return (rows.size, columns.size), maps


def _chunk_samples(job: MatrixJob, num_rows: int, num_columns: int) -> int:
    """Choose the number of rows per chunk, before the storage of values is known."""
    if job.options.dense:
        return plan_layout(num_rows, num_columns * np.dtype(np.uint8).itemsize).chunk_samples
    num_entries = sum(result["entries"] for result in job.read)
    return plan_csr(num_rows, num_columns, num_entries).chunk_samples


def _merge(job: MatrixJob, surveys: list[Result]) -> MatrixJob:
    """Choose the storage and the columns of all shards from the surveys of the shards."""
    values, columns = job.coding.tally(), None
    for result in surveys:
        with np.load(job.folder.file(result["file"])) as found:
            values.add(found["examples"])
            if COLUMNS in found:
                columns = found[COLUMNS] if columns is None else columns + found[COLUMNS]
    kept = columns_with_enough(columns, job.options, job.old.num_columns, job.source)
    return replace(job, storage=storage_of(values, job.source), columns=kept)


def _sums(results: list[Result]) -> dict[str, Any]:
    """Combine the results of all shards into the report values that the files do not contain."""
    counts: dict[str, int] = {}
    for result in results:
        for label, count in result["counts"].items():
            counts[label] = count if label == "columns left out" else counts.get(label, 0) + count
    return {
        "counts": counts,
        "num_entries": sum(result["entries"] for result in results),
        "num_ranges": max(result["ranges"] for result in results),
        "fields": results[0]["fields"],
    }
