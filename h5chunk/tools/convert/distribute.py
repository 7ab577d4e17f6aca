"""Write the shards of a conversion on a Dask cluster: each task writes one shard.

Attempts write files of unique names to a folder beside the output. For each shard, this process moves the file of one
attempt into the unfinished output, and records it in the journal as if it had been written here, so that an
interrupted conversion can be continued with or without a cluster.
"""

from __future__ import annotations

import glob
import os
import pickle
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import FileError, OptionError, OutputError, printable
from h5chunk.plan.layout import Layout
from h5chunk.store.write.fill import Filled, TaskResult
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.part_file import part_path, writing
from h5chunk.store.write.samples import SampleJob, write_samples
from h5chunk.tools.cluster import Cluster, Say

JOB = "job.pickle"  # the job that all shards share, in the folder of attempts


@dataclass(frozen=True)
class ShardTask:
    """One shard to write; everything that the shards have in common is in the file `JOB`."""

    folder: Path  # of attempts
    path: Path  # of the shard in the unfinished output
    order: np.ndarray
    layout: Layout
    options: Mapping[str, Any]
    claims: Mapping[int, TaskResult]  # what the journal says of an earlier shard at ``path``


class WrittenShard(NamedTuple):
    """The result of a task."""

    attempt: Path  # the complete file
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
    with _attempts(part, jobs[0]) as folder:
        tasks = {
            number: ShardTask(folder, part / job.path.name, job.order, job.layout, job.options, claims[number])
            for number, job in enumerate(jobs)
        }
        for number, shard in cluster.run(write_shard, tasks, say):
            try:
                os.replace(shard.attempt, tasks[number].path)
            except FileNotFoundError:
                raise OutputError(
                    f"{printable(part)}: a worker has written {shard.attempt.name} to a folder that this process does "
                    "not see: SOURCE and OUTPUT must be on a file system that all workers share"
                ) from None
            part_path(tasks[number].path).unlink(missing_ok=True)  # of an earlier run without a cluster
            written = replace(jobs[number].with_order(shard.order), num_bytes=shard.num_bytes)
            yield number, written, shard.filled, shard.results


@contextmanager
def _attempts(part: Path, job: SampleJob) -> Iterator[Path]:
    """Make the folder of attempts, with the job; remove it in the end, and those of killed conversions before."""
    for old in part.parent.glob(f"{glob.escape(part.name)}-attempts-*"):
        shutil.rmtree(old, ignore_errors=True)
    folder = part.with_name(f"{part.name}-attempts-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        save_job(folder / JOB, replace(job, order=job.order[:0], num_workers=0))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_job(path: Path, job: Any) -> None:
    """Write what tasks have in common to a file. Raises OptionError if its source cannot be sent to workers."""
    import cloudpickle

    try:
        data = cloudpickle.dumps(job)
    except Exception as error:  # pickle raises errors of many types
        raise OptionError(
            f"the source cannot be sent to Dask workers ({error}): convert it without a cluster"
        ) from None
    with writing(path):
        path.write_bytes(data)


def load_job(path: Path) -> Any:
    """Read in a worker what tasks have in common."""
    try:
        return pickle.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileError(
            f"{printable(path.parent)}: a worker does not see this folder: SOURCE and OUTPUT must be on a file system "
            "that all workers share"
        ) from None


def write_shard(task: ShardTask, say: Say) -> WrittenShard:
    """Write a shard in a worker, under a unique name, and return what was written."""
    job: SampleJob = load_job(task.folder / JOB)
    attempt = task.folder / f"{task.path.stem}-{uuid.uuid4().hex[:8]}.h5"
    job = replace(job, path=attempt, order=task.order, layout=task.layout, options=task.options)
    claims = task.claims if _adopt(task.path, part_path(attempt)) else {}
    results: list[TaskResult] = []
    done = 0

    def written(num_samples: int) -> None:
        nonlocal done
        done += num_samples
        if not task.folder.exists():
            raise OutputError(f"{printable(task.folder)}: the conversion has ended")
        say(done)

    def finished(result: TaskResult) -> None:
        results.append(result._replace(data=b""))

    with NewFile(attempt, journal=Journal(task.folder / f"{attempt.name}.journal")) as new:
        job, filled = write_samples(new, job, claims=claims, finished=finished, written=written)
        new.commit()
    return WrittenShard(attempt, job.order, job.num_bytes, replace(filled, checksums={}), results)


def _adopt(path: Path, part: Path) -> bool:
    """Make an earlier file, finished or not, the part file of an attempt; return whether there is one."""
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
