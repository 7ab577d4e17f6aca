"""A Dask scheduler and workers in processes of their own, which can be killed."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

SCHEDULER = "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard", "--no-show"
WORKER = "distributed.cli.dask_worker", "--no-nanny", "--nthreads", "1", "--no-dashboard", "--memory-limit", "0"


def start(*command: object, folder: Path) -> subprocess.Popen:
    """Start a module of Dask as a process."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", *map(str, command)], cwd=folder, **quiet)


@contextmanager
def dask_scheduler(folder: Path):
    """Start a scheduler; yield its process and its scheduler file."""
    file = folder / "scheduler.json"
    process = start(*SCHEDULER, "--scheduler-file", file, folder=folder)
    try:
        while not file.exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield process, file
    finally:
        process.kill()
        process.wait()


class MortalWorkers:
    """Context manager that keeps workers running, and kills one after the other by SIGKILL until it has done so often.

    ``killed`` is the number of those that were killed while they had work.
    """

    def __init__(self, file: Path, num_workers: int, num_kills: int, seed: int = 0, life_s: float = 1.0) -> None:
        self._file, self._num_kills, self._life_s = file, num_kills, life_s
        self._rng, self._stop = random.Random(seed), threading.Event()
        self._workers = [self._start() for _ in range(num_workers)]
        self._thread = threading.Thread(target=self._kill)
        self.killed = 0

    def _start(self) -> subprocess.Popen:
        return start(*WORKER, "--scheduler-file", self._file, folder=self._file.parent)

    def _kill(self) -> None:
        while self.killed < self._num_kills and not self._stop.wait(self._rng.uniform(0, self._life_s)):
            number = self._rng.randrange(len(self._workers))
            self._workers[number].kill()
            self._workers[number].wait()
            self._workers[number] = self._start()
            self.killed += 1

    def __enter__(self) -> MortalWorkers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        for worker in self._workers:
            worker.kill()
            worker.wait()
