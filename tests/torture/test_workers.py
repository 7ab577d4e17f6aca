"""Killed workers: a short version of the torture, and that it notices processes which are left behind."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from torture import workers
from torture.result import Result

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, limits and counts as only Linux can"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # destructors of torch's queues
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_killed_workers(tmp_path: Path) -> None:
    result = workers.run_killed(3, 0, tmp_path)
    assert result.cases == 3 and not result.bad, result.bad


def test_processes_that_outlive_are_noticed(tmp_path: Path) -> None:
    result = Result("processes")
    sleep = partial(subprocess.run, ["sleep", "60"])
    workers.left_alone(result, random.Random(0), "sleep", sleep, signal.SIGKILL, 0.5)
    assert len(result.bad) == 1 and result.bad[0].startswith("sleep: leaves others after")
