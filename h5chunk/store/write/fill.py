"""Fill the chunks of a new file from a source, in worker processes.

Workers take runs of chunks, get the samples from a source, and write each chunk with one ``pwrite``: pixels never
pass between processes. What comes back for a chunk is its checksum and what to count. Which worker writes a chunk
does not change its bytes. What a journal claims to be written is looked at again by the workers, first of all.

On Linux workers are forked, at once and without a guard in the caller's main module: they run Pillow, NumPy and zlib in
one thread, and take no lock that a thread of the parent may hold. Elsewhere fork is not safe, and the caller's main
module needs the guard that torch's DataLoader needs as well.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from h5chunk.errors import WorkerError
from h5chunk.store.write.fill_task import Done, Failure, FillJob, TaskRunner

START_METHOD = "fork" if sys.platform == "linux" else "spawn"
TASKS_AHEAD = 3  # waiting for each worker
GO_ON, STOP, LEAVE = 0, 1, 2  # what workers are told
LEAVE_S = 1.0  # to stop; behind that they leave where they are
LOOK_S = 0.5

Written = Callable[[int], None]  # told how many samples were written since the last call


@dataclass
class Filled:
    """Result of `fill`."""

    checksums: dict[str, np.ndarray] = field(default_factory=dict)  # of each field's chunks
    notes: Counter[str] = field(default_factory=Counter)  # what the source noted of its samples
    failures: list[Failure] = field(default_factory=list)  # in row order; their rows hold zeros
    stamp: int = 0  # of all samples, as they were when they were read


def fill(
    job: FillJob,
    num_workers: int,
    stop_at_failure: bool,
    written: Written,
    claims: Mapping[int, Done] | None = None,
    finished: Callable[[Done], None] = lambda done: None,
) -> Filled:
    """Write all chunks of the job, in ``num_workers`` processes, or in this one if there are none.

    The tasks that ``claims`` names, by their first chunks, are not done again where the claim holds. ``finished`` is
    told each task that was done here, unless the failure of a sample is the end of all.
    """
    filled = Filled()
    checksums = np.zeros((len(job.fields), job.num_chunks), np.uint32)
    claims = claims or {}
    claimed = {first: claim for first, claim in claims.items() if not (stop_at_failure and claim.failures)}
    tasks = [(chunks, claimed.get(chunks.start)) for chunks in job.tasks()]
    tasks.sort(key=lambda task: task[1] is None)
    results = _in_this_process(job, tasks) if num_workers == 0 else _in_workers(job, tasks, num_workers)
    try:
        for done in results:
            for chunk, of_fields in zip(done.chunks, done.checksums, strict=False):
                checksums[:, chunk] = of_fields
            filled.notes.update(done.notes)
            filled.failures.extend(done.failures)
            filled.stamp ^= done.stamp
            is_end = bool(done.failures) and stop_at_failure
            if done.is_new and not is_end:
                finished(done)
            written(len(job.rows(done.chunks)))
            if is_end:
                break
    finally:
        results.close()
    filled.failures.sort()
    filled.checksums = {each.name: of_field for each, of_field in zip(job.fields, checksums, strict=True)}
    return filled


_Task = tuple[range, "Done | None"]


def _in_this_process(job: FillJob, tasks: list[_Task]) -> Generator[Done]:
    with TaskRunner(job) as runner:
        for task in tasks:
            yield runner.run(*task)


def _in_workers(job: FillJob, tasks: list[_Task], num_workers: int) -> Generator[Done]:
    context = multiprocessing.get_context(START_METHOD)
    try:
        told = context.RawValue("b", GO_ON)  # no lock: a worker that is killed must not hold one
        pool = ProcessPoolExecutor(
            min(num_workers, len(tasks)), mp_context=context, initializer=_start_worker, initargs=(job, told)
        )
    except OSError as error:
        raise WorkerError(
            f"no worker can be started: {error.strerror}: look at the room in /dev/shm and {tempfile.gettempdir()}, or "
            "use --workers 0"
        ) from None
    waiting: set[Future[Done]] = set()
    left = iter(tasks)
    try:
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
                for task in left:
                    waiting.add(pool.submit(_run_task, *task))
                    if len(waiting) >= TASKS_AHEAD * num_workers:
                        break
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise WorkerError(
            "a worker process died (killed, or out of memory?): the output was left as it was; "
            "run it again, with fewer workers if memory was short"
        ) from None
    finally:
        told.value = STOP  # after an error or Ctrl-C, do not finish the tasks that were started
        timer = threading.Timer(LEAVE_S, lambda: setattr(told, "value", LEAVE))
        timer.start()
        pool.shutdown(wait=True, cancel_futures=True)
        timer.cancel()


_runner: TaskRunner


def _start_worker(job: FillJob, told: Any) -> None:
    global _runner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, which stops us
    threading.Thread(target=_leave_in_time, args=(told,), daemon=True).start()
    _runner = TaskRunner(job, lambda: told.value != GO_ON)
    _runner.__enter__()  # for the life of this process


def _leave_in_time(told: Any) -> None:
    """End with the parent, or when told to: a killed process may hold a lock that the others wait for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        while told.value != LEAVE and not multiprocessing.connection.wait([parent.sentinel], LOOK_S):
            pass
        os._exit(1)


def _run_task(chunks: range, claim: Done | None) -> Done:
    return _runner.run(chunks, claim)
