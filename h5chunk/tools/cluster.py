"""Run tasks on a Dask cluster until each has succeeded once, even if workers die.

A task calls a function of this package with one picklable argument and a function that reports progress. Its input and
output are files that all workers and this process can access, on a shared file system or in an object store, so Dask
transfers little data. A task may run twice at the same time, for example if the scheduler considers a worker dead, so
tasks must write to unique names.
"""

from __future__ import annotations

import json
import pkgutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

import h5chunk
from h5chunk.errors import H5ChunkError, OptionError, OutputError, WorkerError, count_text, printable
from h5chunk.extras import load

Say = Callable[[int], None]
Task = Callable[[Any, Say], Any]

TRIES = 3  # attempts at a task that fails to read or write a file
LOSSES = 30  # number of workers that may die during one task before the task fails
SAY_S = 0.5  # minimum time between two progress reports of a task
CONNECT_S = 30.0  # timeout for reaching the scheduler, and for the first worker to appear
LOOK_S, IDLE_S = 5.0, 120.0  # time between checks for workers, and time without workers after which the run fails


class Cluster:
    """A connection to a Dask cluster; ``client`` is a `distributed.Client`.

    Raises WorkerError if the cluster has no workers, or if a worker has another version of h5chunk.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        try:
            client.wait_for_workers(1, timeout=CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise WorkerError(
                f"the Dask cluster has no workers ({error}): start workers, and repeat the command"
            ) from None
        versions = client.run(pkgutil.resolve_name, "h5chunk:__version__", on_error="return")
        for address, version in versions.items():  # a worker that cannot import a task ends without a message
            if version != h5chunk.__version__:
                raise _version_error(address, version if isinstance(version, str) else "")

    def run(
        self, function: Task, tasks: Mapping[int, Any], say: Callable[[int, int], None], last: Collection[int] = ()
    ) -> Iterator[tuple[int, Any]]:
        """Run ``function(task, say)`` for all tasks; yield (number, result) in the order in which they finish.

        ``say(number, done)`` is called, from another thread, with the progress of a task. A task is run again if its
        worker dies, and up to `TRIES` times if it fails to read or write a file; other errors are raised at once. On an
        error, and if the iterator is closed, tasks that have not started are cancelled. The tasks in ``last`` start
        after all other tasks have finished.
        """
        topic, relay = f"h5chunk-{uuid.uuid4().hex}", _ProgressRelay(say)
        self._client.subscribe_topic(topic, relay)
        numbers: dict[Any, int] = {}
        ended: Queue[Any] = Queue()

        def submit(number: int, failed: str = "") -> None:
            """Submit a task. If it has failed on the worker ``failed``, prefer other workers."""
            found = self._client.scheduler_info(n_workers=-1)["workers"] if failed else ()
            others = [address for address in found if address != failed]
            key = f"h5chunk-{function.__name__}-{number}-{uuid.uuid4().hex[:8]}"
            arguments = h5chunk.__version__, function, tasks[number], number, topic
            where = {"workers": others, "allow_other_workers": True} if others else {}
            future = self._client.submit(_run, *arguments, key=key, pure=False, **where)
            numbers[future] = number
            future.add_done_callback(ended.put)

        failures = _Failures()
        try:
            waiting = [number for number in tasks if number in last]
            for number in tasks:
                if number not in last:
                    submit(number)
            while numbers or waiting:
                if not numbers:
                    submit(waiting.pop())
                future = self._next(ended)
                number, result = numbers.pop(future), None
                try:
                    result = future.result()  # runs the task again if its worker has died since
                    if isinstance(result, _Failed):
                        raise result.error
                except BaseException as error:
                    failures.add(number, error)
                    submit(number, result.worker if isinstance(result, _Failed) else "")
                else:
                    yield number, result
        finally:
            self._client.unsubscribe_topic(topic)
            self._client.cancel(list(numbers))

    def _next(self, ended: Queue[Any]) -> Any:
        """Return the next future that has ended. Raises WorkerError if the cluster has no workers for `IDLE_S`."""
        last = time.monotonic()
        while True:
            with suppress(Empty):
                return ended.get(timeout=LOOK_S)
            if self._client.scheduler_info(n_workers=-1)["workers"]:
                last = time.monotonic()
            elif time.monotonic() > last + IDLE_S:
                raise WorkerError(
                    f"the Dask cluster has had no workers for {IDLE_S:.0f} s: start workers, and repeat the command"
                )


class _ProgressRelay:
    """Pass the progress reports of tasks to a function, except those that are outdated or repeated."""

    def __init__(self, say: Callable[[int, int], None]) -> None:
        self._say, self._most, self._lock = say, dict[int, int](), threading.Lock()

    def __call__(self, event: tuple[float, tuple[int, int]]) -> None:
        number, done = event[1]
        with self._lock:
            if done > self._most.get(number, 0):
                self._most[number] = done
                self._say(number, done)


class _Failures:
    def __init__(self) -> None:
        self._lost, self._failed = dict[int, int](), dict[int, int]()

    def add(self, number: int, error: BaseException) -> None:
        """Count a failure of a task; raise the error if the task must not be run again."""
        from distributed.client import FutureCancelledError
        from distributed.scheduler import KilledWorker

        if isinstance(error, FutureCancelledError):
            raise WorkerError(
                f"the Dask scheduler has stopped or cancelled the work ({error.reason}): make sure that the scheduler "
                "is running, and repeat the command"
            ) from None
        if isinstance(error, KilledWorker):
            self._lost[number] = self._lost.get(number, 0) + error.allowed_failures + 1
            if self._lost[number] > LOSSES:
                raise WorkerError(
                    f"{count_text(self._lost[number], 'worker')} died during the same task: check their logs, and "
                    "whether they have enough memory"
                ) from None
        elif isinstance(error, OSError) and (isinstance(error, OutputError) or not isinstance(error, H5ChunkError)):
            self._failed[number] = self._failed.get(number, 0) + 1
            if self._failed[number] == TRIES:
                raise error
        else:
            raise error


def _version_error(address: str, found: str, expected: str = h5chunk.__version__) -> WorkerError:
    has = f"h5chunk {found}" if found else "no h5chunk"
    return WorkerError(
        f"the Dask worker {printable(address)} has {has}, but the command runs version {expected}: install the same "
        'version on all machines (pip install "h5chunk[distributed]")'
    )


def _run(version: str, function: Task, task: Any, number: int, topic: str) -> Any:
    """Run a task in a worker. Raises WorkerError unless ``version`` of h5chunk is installed there."""
    from distributed import get_worker

    worker, last = get_worker(), time.monotonic()
    if version != h5chunk.__version__:
        raise _version_error(worker.address, h5chunk.__version__, version)

    def say(done: int) -> None:
        nonlocal last
        if time.monotonic() > last + SAY_S:
            last = time.monotonic()
            worker.log_event(topic, (number, done))

    try:
        return function(task, say)
    except H5ChunkError as error:  # Dask would log errors that are raised, although a command may expect them
        error.__context__ = error.__cause__ = None
        return _Failed(error.with_traceback(None), worker.address)


class _Failed(NamedTuple):
    """The result of a task that raised an error."""

    error: H5ChunkError
    worker: str  # its address


@contextmanager
def connected(client: Any) -> Iterator[Cluster]:
    """Connect to a Dask cluster while the context is open.

    ``client`` is a `distributed.Client`, the address of a scheduler such as ``tcp://host:8786``, the path of a
    scheduler file (.json), or ``local:N`` to start N worker processes on this machine.
    """
    distributed = load("distributed", "running on a Dask cluster")
    if isinstance(client, distributed.Client):
        yield Cluster(client)
        return
    with ExitStack() as stack:
        try:
            if isinstance(client, str) and client.startswith("local:"):
                about = {"threads_per_worker": 1, "dashboard_address": "127.0.0.1:0", "memory_limit": 0}
                processes = distributed.LocalCluster(_num_workers(client), host="127.0.0.1", **about)
                address: Any = stack.enter_context(processes)
            elif isinstance(client, str) and "://" in client:
                address = client
            else:
                address = json.loads(Path(client).read_text(encoding="utf-8"))["address"]
            connection = stack.enter_context(distributed.Client(address, timeout=CONNECT_S))
        except (OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(
                f"the Dask scheduler {printable(str(client))} cannot be reached ({error}): use tcp://HOST:PORT, the "
                "path of a scheduler file, or local:N for N processes on this machine"
            ) from None
        yield Cluster(connection)


def _num_workers(client: str) -> int:
    number = client.removeprefix("local:")
    if not number.isdecimal() or not 0 < int(number) <= 1024:
        raise OptionError(
            f"{printable(client)}: the number of worker processes must be from 1 to 1024: use, for example, local:4"
        )
    return int(number)
