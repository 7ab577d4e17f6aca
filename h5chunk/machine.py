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


def in_order(tasks: Iterable[Callable[[], T]], num_threads: int, ahead: int) -> Iterator[T]:
    """Run tasks in threads, and yield their results in the order of the tasks; at most ``ahead`` tasks are pending."""
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
