"""Write the shards of a conversion on a Dask cluster: each task writes one shard.

Attempts write files of unique names to a folder beside the output. For each shard, this process moves the file of one
attempt into the unfinished output, and records it in the journal as if it had been written here, so that an
interrupted conversion can be continued with or without a cluster. If the output is in a store, attempts upload it.
"""

from __future__ import annotations

import glob
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import FileError, OutputError, printable
from h5chunk.plan.layout import Layout
from h5chunk.remote.mirror import download
from h5chunk.store.write.fill import Filled, TaskResult
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.part_file import part_path
from h5chunk.store.write.samples import SampleJob, write_samples
from h5chunk.tools.cluster import Cluster, Say
from h5chunk.tools.shared import SharedFolder
from h5chunk.tools.upload import shared_folder, take, upload_last


@dataclass(frozen=True)
class ShardTask:
    """One shard to write; everything that the shards have in common is in the file ``job``."""

    folder: SharedFolder  # of attempts
    job: str
    path: Path  # of the shard in the unfinished output
    order: np.ndarray
    layout: Layout
    options: Mapping[str, Any]
    claims: Mapping[int, TaskResult]  # what the journal says of an earlier shard at ``path``


class WrittenShard(NamedTuple):
    """The result of a task."""

    attempt: str  # name of the complete file
    file_bytes: int
    order: np.ndarray  # the samples that were not skipped
    num_bytes: int | None  # of images of any size
    filled: Filled
    results: list[TaskResult]  # of the tasks that were not claimed


def write_shards(
    cluster: Cluster,
    jobs: Sequence[SampleJob],
    part: Path,
    claims: Sequence[Mapping[int, TaskResult]],
    say: Callable[[int, int], None],
) -> Iterator[tuple[int, SampleJob, Filled, list[TaskResult]]]:
    """Write shards to the folder ``part``; yield (number, job, outcome, new results) of each once it is complete.

    The jobs that are yielded lack the samples that were skipped. ``claims`` has the claims of each shard, and
    ``say(number, done)`` is called with the number of samples that are written.
    """
    with _attempts(part) as folder:
        name = folder.save_job(replace(jobs[0], order=jobs[0].order[:0], num_workers=0))
        tasks = {
            number: ShardTask(folder, name, part / job.path.name, job.order, job.layout, job.options, claims[number])
            for number, job in enumerate(jobs)
        }
        last = upload_last([job.path.name for job in jobs], folder)
        for number, shard in cluster.run(write_shard, tasks, say, last):
            take(folder, shard.attempt, tasks[number].path, shard.file_bytes)
            part_path(tasks[number].path).unlink(missing_ok=True)  # of an earlier run without a cluster
            written = replace(jobs[number].with_order(shard.order), num_bytes=shard.num_bytes)
            yield number, written, shard.filled, shard.results


@contextmanager
def _attempts(part: Path) -> Iterator[SharedFolder]:
    """Make the folder of attempts; remove it in the end, and those of killed conversions before."""
    for old in part.parent.glob(f"{glob.escape(part.name)}-attempts-*"):
        shutil.rmtree(old, ignore_errors=True)
    folder = shared_folder(part, part.with_name(f"{part.name}-attempts-{uuid.uuid4().hex[:8]}"))
    folder.clear()
    folder.path.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.clear()


def write_shard(task: ShardTask, say: Say) -> WrittenShard:
    """Write a shard in a worker, under a unique name, and return what was written."""
    with task.folder.in_worker() as folder:
        job: SampleJob = folder.load_job(task.job)
        attempt = folder.path / f"{task.path.stem}-{uuid.uuid4().hex[:8]}.h5"
        job = replace(job, path=attempt, order=task.order, layout=task.layout, options=task.options)
        claims = task.claims if task.claims and _adopt(folder, task.path, part_path(attempt)) else {}
        results: list[TaskResult] = []
        done = 0

        def written(num_samples: int) -> None:
            nonlocal done
            done += num_samples
            if not folder.path.exists():
                raise OutputError(f"{printable(folder.path)}: the conversion has ended")
            say(done)

        def finished(result: TaskResult) -> None:
            results.append(result._replace(data=b""))

        with NewFile(attempt, journal=Journal(folder.path / f"{attempt.name}.journal")) as new:
            job, filled = write_samples(new, job, claims=claims, finished=finished, written=written)
            new.commit()
        folder.finish(task.job, attempt.name, task.path.name)
        filled = replace(filled, checksums={})
        return WrittenShard(attempt.name, attempt.stat().st_size, job.order, job.num_bytes, filled, results)


def _adopt(folder: SharedFolder, path: Path, part: Path) -> bool:
    """Make an earlier file, finished or not, the part file of an attempt; return whether there is one."""
    if folder.url:
        with suppress(FileError):
            download(f"{folder.output}/{path.name}", part)
        return part.exists()
    for earlier in (path, part_path(path)):
        with suppress(FileNotFoundError):
            try:
                os.link(earlier, part)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without hard links
                shutil.copyfile(earlier, part)
            return True
    return False
