"""Count the available cores, run tasks in threads, start processes, and change warning filters in threads."""

from __future__ import annotations

import fcntl
import json
import multiprocessing.spawn
import os
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB")}


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> int:
    """Return the number of cores for work of this process alone.

    Processes that torchrun starts on one host share its cores, unless each may use only some of them.
    """
    cores, processes = available_cores(), os.environ.get("LOCAL_WORLD_SIZE", "")
    if not processes.isdecimal() or cores < (os.cpu_count() or 1):
        return cores
    return max(1, cores // max(1, int(processes)))


def start_python(function: str, descriptor: int, **streams: Any) -> subprocess.Popen[bytes]:
    """Start a process that calls ``function``, such as "package.module:name", with a descriptor that it inherits.

    The process starts from nothing: it has no threads, memory or main module of this process. It finds modules where
    this process finds them. ``streams`` are arguments of `subprocess.Popen`. Raises OSError if it cannot be started.
    """
    if getattr(sys, "frozen", False) or not (executable := multiprocessing.spawn.get_executable()):
        raise OSError("this program has no Python interpreter to start")
    module, _, name = function.partition(":")
    folders = json.dumps([os.fspath(folder) for folder in sys.path])
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {module} import {name} as call"
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    inherited = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)  # the standard streams of this process may be closed
    try:
        return subprocess.Popen(
            [os.fsdecode(executable), *flags, "-c", f"{code}; call(int(sys.argv[1]))", str(inherited), folders],
            pass_fds=[inherited],
            env={**os.environ, **ONE_THREAD},
            **streams,
        )
    finally:
        os.close(inherited)


class KeptThreads:
    """A thread pool that starts on first use. Other processes that use it, such as forked ones, start their own."""

    def __init__(self, name: str) -> None:
        self._name, self._process = name, 0
        self.limit: int | None = None  # maximum number of threads
        self._pool: ThreadPoolExecutor | None = None

    def pool(self, num_threads: int) -> ThreadPoolExecutor:
        """Return the pool of this process; ``num_threads`` is used only when it starts."""
        if self._pool is None or self._process != os.getpid():
            limited = min(num_threads, self.limit or num_threads)
            self._pool, self._process = ThreadPoolExecutor(limited, self._name), os.getpid()
        return self._pool

    def share(self, work: Callable[[int], object], parts: range, num_threads: int) -> None:
        """Do ``work`` for each part, in this thread and up to ``num_threads`` - 1 others, and wait until all is done.

        A thread takes the next part when it has done one, so that none waits for a slower one. With a ``limit``, there
        are no more threads than that, this one included.
        """
        left = deque(partial(work, part) for part in parts)

        def run() -> None:  # does not refer to the work, which would live until a thread has seen that it was cancelled
            while True:
                try:
                    do = left.popleft()
                except IndexError:
                    return
                do()

        num_others = min(num_threads, self.limit or num_threads, len(parts)) - 1
        others = [self.pool(num_threads).submit(run) for _ in range(num_others)]
        try:
            run()
        finally:
            begun = [other for other in others if not other.cancel()]
            wait(begun)
        for other in begun:
            other.result()

    def close(self) -> None:
        """Stop the threads; the next use starts new ones."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pool": None}


def in_order(tasks: Iterable[Callable[[], T]], num_threads: int, ahead: int) -> Iterator[T]:
    """Run tasks in threads, and yield their results in the order of the tasks.

    At most ``ahead`` tasks are started before the result of the first of them is yielded.
    """
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(num_threads, "h5chunk")
    try:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        with suppress(RuntimeError):  # raised while the interpreter exits
            pool.shutdown(wait=True, cancel_futures=True)


class _Filters:
    """The uses of `warnings_filtered`: the saved filters, and the thread, which is None once it has left."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.uses: list[tuple[warnings.catch_warnings[None], list[int | None]]] = []

    def enter(self, action: Any, options: dict[str, Any]) -> list[int | None]:
        with self.lock:
            saved = warnings.catch_warnings()
            thread: list[int | None] = [threading.get_ident()]
            saved.__enter__()
            self.uses.append((saved, thread))
            warnings.filterwarnings(action, **options)
            return thread

    def leave(self, thread: list[int | None]) -> None:
        with self.lock:
            thread[0] = None
            while self.uses and self.uses[-1][1][0] is None:  # the last one to enter must be the first one to restore
                self.uses.pop()[0].__exit__(None, None, None)

    def after_fork(self) -> None:
        """End the uses of threads that the forked process does not have."""
        self.lock = threading.Lock()
        for _, thread in list(self.uses):
            if thread[0] != threading.get_ident():
                self.leave(thread)


_filters = _Filters()
os.register_at_fork(after_in_child=_filters.after_fork)


@contextmanager
def warnings_filtered(action: Any, **options: Any) -> Iterator[None]:
    """Call `warnings.filterwarnings` in a context, after which the filters are as before.

    Unlike `warnings.catch_warnings`, this may be used in several threads: filters stay while a thread that entered
    later is still inside. They apply to all threads.
    """
    thread = _filters.enter(action, options)
    try:
        yield
    finally:
        _filters.leave(thread)
