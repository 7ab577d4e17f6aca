"""Check that a test leaves no threads, open files or processes behind."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

WAIT_S = 30
left_behind: set[threading.Thread] = set()


def descriptors() -> set[str]:
    """What this process has open, without what comes and goes."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.endswith(".h5"):
            found.add(f"{entry}: {target}")
    return found


def reading_threads() -> list[threading.Thread]:
    """Threads of ours, without those that a test which failed has left."""
    return [t for t in threading.enumerate() if t.name.startswith("h5chunk") and t not in left_behind]


def readers_of_files() -> set[int]:
    """The system's numbers of threads that read files, and of all others that Python does not know."""
    others = {each.native_id for each in threading.enumerate() if each.name != "h5chunk-reader"}
    return {int(name) for name in os.listdir("/proc/self/task")} - others


def are_readers_again(threads: set[int]) -> bool:
    """Whether these threads and no others read files, after a moment in which other threads may start or end."""
    end = time.monotonic() + 2
    while readers_of_files() != threads and time.monotonic() < end:
        time.sleep(0.01)
    return readers_of_files() == threads


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Neither threads nor open files, beyond those of a test that failed before."""
    left_behind.update(reading_threads())
    files = descriptors()
    yield
    if reading_threads() or descriptors() - files:
        gc.collect()
    end = time.monotonic() + 2
    while (reading_threads() or descriptors() - files) and time.monotonic() < end:
        time.sleep(0.01)
    assert not reading_threads()
    assert not descriptors() - files


def workers_of(batches) -> list[int]:
    """The processes that an iteration of torch's DataLoader started."""
    return [worker.pid for worker in batches._workers]


def end_workers(batches) -> None:
    batches._shutdown_workers()


def in_fork(work) -> int:
    """The exit status of a fork that does some work: 0 if all was well."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9
