"""Run the tasks of a conversion in worker processes.

Code of the user, such as ``__getitem__`` of a data set in Python, must not run in a fork of a process that has threads:
OpenMP, OpenCV, CUDA, zarr and many other libraries hang there. Therefore a source with such code is sent to a process
that starts from nothing, and reads samples in workers of its own. That process forks its workers, which then share
the memory of the data set, unless it has threads by then, such as those that an import started. No worker imports the
caller's script, so that the script needs no ``__main__`` guard; classes and functions of the script are sent by value.

Other sources run Pillow, NumPy and zlib in one thread, and acquire no lock that a thread of the caller may hold. Their
workers are forked from the calling process, if the system allows it.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import numpy as np

from h5chunk.errors import WorkerError, human_bytes, printable
from h5chunk.machine import start_python, warnings_filtered

if TYPE_CHECKING:
    from h5chunk.store.write.fill import FillJob, Task, TaskResult, TaskRunner

CAN_FORK = sys.platform == "linux"
TASKS_AHEAD = 3  # tasks that are submitted per worker
GO_ON, STOP, EXIT = 0, 1, 2  # commands to workers: continue, stop reading samples, exit immediately
EXIT_S = 1.0  # seconds in which workers can stop before they must exit immediately
POLL_S = 0.5  # seconds between checks of commands, and of workers
STALL_S = 300.0  # seconds after which a worker that reads one sample, and sleeps, counts as stuck
SENT_BYTES = 1 << 30  # a data set that holds more is read in the calling process, because sending it would copy it
READY, RESULT, FAILED, REFUSED = "ready", "result", "failed", "refused"  # kinds of messages; each has a value

Stopped = Callable[[], bool]


def run_tasks(job: FillJob, tasks: list[Task], num_workers: int) -> Generator[TaskResult]:
    """Run tasks, which may have claims, in ``num_workers`` processes, or in this process if the number is 0."""
    if not num_workers:
        yield from _run_here(job, tasks)
    elif CAN_FORK and not job.source.runs_user_code:
        yield from _in_workers(job, tasks, num_workers, "fork", STALL_S)
    else:
        yield from _in_fresh_process(job, tasks, num_workers)


def _run_here(job: FillJob, tasks: list[Task]) -> Generator[TaskResult]:
    with job.runner() as runner:
        for task in tasks:
            yield runner.run(*task)


# ---- workers of this process


def _in_workers(
    job: FillJob,
    tasks: list[Task],
    num_workers: int,
    method: str,
    stall_s: float,
    stopped: Stopped = lambda: False,
) -> Generator[TaskResult]:
    """Run tasks in workers that are started by ``method``, a start method of multiprocessing, until ``stopped()``."""
    context = multiprocessing.get_context(method)
    num_workers = min(num_workers, len(tasks))
    sent = job if method == "fork" else _ByValue(job)
    try:
        command = context.RawValue("b", GO_ON)  # without a lock, which a killed worker could hold
        stuck = context.RawValue("q", -1)  # the sample at which a worker stands still
        start = partial(_start_worker, sent, command, stuck, stall_s)
        pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=start)
    except OSError as error:
        raise WorkerError(
            f"no worker process can be started ({error.strerror}): free space in /dev/shm and "
            f"{tempfile.gettempdir()}, or use --workers 0"
        ) from None
    waiting: list[Future[TaskResult]] = []
    left = iter(tasks)
    try:
        while not stopped():
            with warnings_filtered("ignore", category=DeprecationWarning):  # forks of processes with threads
                while len(waiting) < TASKS_AHEAD * num_workers and (task := next(left, None)) is not None:
                    waiting.append(pool.submit(_run_task, *task))
            if not waiting:
                return
            done = wait(waiting[:1] if job.in_order else waiting, POLL_S, FIRST_COMPLETED).done
            if stuck.value >= 0:
                raise WorkerError(
                    f"{job.source.name(stuck.value)}: a worker process has waited for {stall_s:.0f} s while it read "
                    "this sample, without using its processor: find out what it waits for, such as a lock, a file or "
                    "a connection; --workers 0 reads in the calling process, without this limit"
                )
            waiting = [future for future in waiting if future not in done]
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise WorkerError(
            "a worker process died, perhaps because it was killed for lack of memory, and the output is unchanged: run "
            "the command again, with fewer workers if memory is short"
        ) from None
    finally:
        command.value = STOP  # after an error or Ctrl-C, do not finish tasks that have started
        timer = threading.Timer(EXIT_S, lambda: setattr(command, "value", EXIT))
        timer.start()
        pool.shutdown(wait=True, cancel_futures=True)
        timer.cancel()


_runner: TaskRunner


def _start_worker(job: Any, command: Any, stuck: Any, stall_s: float) -> None:
    global _runner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the main process, which stops this one
    _runner = job.runner(lambda: command.value != GO_ON)
    threading.Thread(target=_watch, args=(_runner, command, stuck, stall_s), daemon=True).start()
    _runner.__enter__()  # until this process exits


def _watch(runner: TaskRunner, command: Any, stuck: Any, stall_s: float) -> None:
    """Exit when the parent exits, or on command, and report a sample at which this process stands still.

    The parent does not kill workers, because they may hold a lock.
    """
    parent = multiprocessing.parent_process()
    ends = [parent.sentinel] if parent is not None else []
    before, since, used = runner.position, time.monotonic(), time.process_time()
    while command.value != EXIT and not multiprocessing.connection.wait(ends, POLL_S):
        waited = time.monotonic() - since
        is_idle = time.process_time() - used < 0.02 * waited  # this thread takes a part of it
        if runner.position != before or runner.position[1] < 0 or not is_idle:
            before, since, used = runner.position, time.monotonic(), time.process_time()
        elif waited > stall_s:
            stuck.value = before[1]
    os._exit(1)


def _run_task(*task: Any) -> TaskResult:
    return _runner.run(*task)


# ---- workers of a process that starts from nothing


def _in_fresh_process(job: FillJob, tasks: list[Task], num_workers: int) -> Generator[TaskResult]:
    """Run tasks in workers of another process. If the job cannot be sent to it, warn, and run them in this process."""
    connection, other = multiprocessing.Pipe()
    process = start_python("h5chunk.store.write.workers:serve", other.fileno(), stdin=subprocess.PIPE)
    try:
        other.close()
        kind, value = _send(process, connection, (job, tasks, num_workers, STALL_S))
        while kind != REFUSED:
            kind, value = _receive(connection)
            if kind == FAILED:
                raise value
            if kind == READY:
                return
            yield value
    finally:
        _end(process, connection)
    warnings.warn(
        f"samples are read in this process, without workers, because the data set cannot be sent to other processes: "
        f"{value}. To use workers, open files and connections when the first sample is read",
        RuntimeWarning,
        stacklevel=2,
    )
    yield from _run_here(job, tasks)


def _send(process: subprocess.Popen[bytes], connection: Connection, work: tuple[Any, ...]) -> tuple[str, Any]:
    """Send work to the process. Returns the answer: `READY`, or `REFUSED` with the reason if that is impossible."""
    assert process.stdin is not None
    try:
        _ByValuePickler(_Limited(process.stdin)).dump(work)
        process.stdin.close()
    except BrokenPipeError:
        pass  # the process has a reason, or has died
    except Exception as error:  # objects may raise any error when they are pickled
        return REFUSED, printable(f"{type(error).__name__}: {error}")
    return _receive(connection)


def _receive(connection: Connection) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = connection.recv()
    except (EOFError, OSError):
        raise WorkerError(
            "the process that reads the samples died, perhaps because it was killed for lack of memory, and the output "
            "is unchanged: run the command again, with fewer workers if memory is short"
        ) from None
    return message


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """End the process, which stops its workers when the connection closes."""
    connection.close()
    with contextlib.suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()
    try:
        process.wait(4 * EXIT_S + POLL_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its workers exit, because they watch it
        process.wait()


def serve(descriptor: int) -> NoReturn:
    """Run the tasks that standard input has, and send their results: the main function of the fresh process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the main process, which closes the connection
    connection = Connection(descriptor)
    try:
        try:
            job, tasks, num_workers, stall_s = pickle.load(sys.stdin.buffer)
        except Exception as error:  # an import of the user's modules may raise any error
            connection.send((REFUSED, printable(f"{type(error).__name__}: {error}")))
            os._exit(0)
        connection.send((READY, None))
        method = "fork" if CAN_FORK and len(os.listdir("/proc/self/task")) == 1 else "spawn"
        try:
            for done in _in_workers(job, tasks, num_workers, method, stall_s, connection.poll):
                connection.send((RESULT, done))
            connection.send((READY, None))
        except Exception as error:
            connection.send(
                (FAILED, error if _is_picklable(error) else WorkerError(f"{type(error).__name__}: {error}"))
            )
    except OSError:
        pass  # the calling process has ended, or wants no further results
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of the user's modules


def _is_picklable(error: Exception) -> bool:
    try:
        return bool(pickle.loads(pickle.dumps(error)))
    except Exception:
        return False


class _ByValuePickler(cloudpickle.Pickler):
    """A pickler that sends a memory map as its file's name, rather than as its data."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.memmap:
            if type(value.base).__name__ != "mmap" or value.filename is None:
                raise pickle.PicklingError("it holds a part of a memory map, whose data would be copied")
            order = "C" if value.flags.c_contiguous else "F"
            where = str(value.filename), value.dtype, "c" if value.mode == "c" else "r", value.offset
            return np.memmap, (*where, value.shape, order)
        return super().reducer_override(value)


class _ByValue:
    """An object that pickles as the job that it holds, with the classes of ``__main__`` by value."""

    def __init__(self, job: FillJob) -> None:
        self._job = job

    def __reduce__(self) -> tuple[Any, ...]:
        data = io.BytesIO()
        _ByValuePickler(data).dump(self._job)
        return pickle.loads, (data.getvalue(),)


class _Limited:
    """A binary file that takes at most ``SENT_BYTES``."""

    def __init__(self, file: Any) -> None:
        self._file, self._num_bytes = file, 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._num_bytes += size
        if self._num_bytes > SENT_BYTES:
            raise pickle.PicklingError(f"it holds more than {human_bytes(SENT_BYTES)} in memory")
        self._file.write(data)
        return size
