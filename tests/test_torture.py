"""Short versions of scripts/torture.py; and that its counts see what must not be."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import torture_workers  # noqa: E402
from torture_result import Result  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, limits and counts as only Linux can"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # destructors of torch's queues
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_killed_workers(tmp_path: Path) -> None:
    result = torture_workers.run_killed(3, 0, tmp_path)
    assert result.cases == 3 and not result.bad, result.bad


def test_processes_that_outlive_are_noticed(tmp_path: Path) -> None:
    result = Result("processes")
    sleep = partial(subprocess.run, ["sleep", "60"])
    torture_workers.left_alone(result, random.Random(0), "sleep", sleep, signal.SIGKILL, 0.5)
    assert len(result.bad) == 1 and result.bad[0].startswith("sleep: leaves others after")
