"""Disks that are full: system calls that fail with a given errno, and a limit that no file may outgrow."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def failing(error: int) -> Callable[..., object]:
    def fail(*args: object, **kwargs: object) -> object:
        raise OSError(error, os.strerror(error))

    return fail


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond this size: writing there fails with EFBIG."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
