"""Count the available cores, and run tasks in threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class KeptThreads:
    """A thread pool that starts on first use. Other processes that use it, such as forked ones, start their own."""

    def __init__(self, name: str) -> None:
        self._name, self._process = name, 0
        self._pool: ThreadPoolExecutor | None = None

    def pool(self, num_threads: int) -> ThreadPoolExecutor:
        """Return the pool of this process; ``num_threads`` is used only when it starts."""
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(num_threads, self._name), os.getpid()
        return self._pool

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
