"""Write the shards of a conversion on a Dask cluster, one per task.

Every attempt at a task writes a file with a unique name to a folder beside the output. This process moves one such file
per shard into the unfinished output, and records it in the journal as if it had written the file itself. Therefore, an
interrupted conversion can be continued with or without a cluster. If the output is in an object store, attempts upload
their files.
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
    """A shard to write. The file ``job`` contains everything that all shards share."""

    folder: SharedFolder  # folder in which attempts write their files
    job: str  # name of the file with the job
    path: Path  # path of the shard in the unfinished output
    order: np.ndarray
    layout: Layout
    options: Mapping[str, Any]
    claims: Mapping[int, TaskResult]  # tasks that the journal records as written to an earlier file at ``path``


class WrittenShard(NamedTuple):
    """A shard that a worker has written."""

    attempt: str  # name of the complete file
    file_bytes: int
    order: np.ndarray  # indices of the samples that were not skipped
    num_bytes: int | None  # total size of images of any size; None for other samples
    filled: Filled
    results: list[TaskResult]  # of the tasks that are not in ``claims``


def write_shards(
    cluster: Cluster,
    jobs: Sequence[SampleJob],
    part: Path,
    claims: Sequence[Mapping[int, TaskResult]],
    say: Callable[[int, int], None],
) -> Iterator[tuple[int, SampleJob, Filled, list[TaskResult]]]:
    """Write shards to the folder ``part``; yield (number, job, outcome, new results) for each complete shard.

    The yielded jobs exclude skipped samples. ``claims`` has, for each shard, the tasks that the journal records as
    written. ``say(number, done)`` is called with the number of samples of a shard that have been written so far.
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
            part_path(tasks[number].path).unlink(missing_ok=True)  # left by an earlier run without a cluster
            written = replace(jobs[number].with_order(shard.order), num_bytes=shard.num_bytes)
            yield number, written, shard.filled, shard.results


@contextmanager
def _attempts(part: Path) -> Iterator[SharedFolder]:
    """Create the folder for attempts, and remove it at the end. Also removes the folders of killed conversions."""
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
    """Write a shard to a uniquely named file, in a worker."""
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
                raise OutputError(f"{printable(folder.path)}: was removed, because the conversion has ended")
            say(done)

        def finished(result: TaskResult) -> None:
            results.append(result._replace(data=b""))

        with NewFile(attempt, journal=Journal(folder.path / f"{attempt.name}.journal")) as new:
            job, filled = write_samples(new, job, claims=claims, finished=finished, written=written)
            new.commit()
        folder.finish(task.job, attempt.name, task.path.name)
        filled.checksums.clear()  # the file has them
        return WrittenShard(attempt.name, attempt.stat().st_size, job.order, job.num_bytes, filled, results)


def _adopt(folder: SharedFolder, path: Path, part: Path) -> bool:
    """Use an earlier file of the shard, finished or not, as the part file of an attempt. Return whether one exists."""
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
