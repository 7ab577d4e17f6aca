"""Every section of the torture in its quick version; minutes, so only with ``--torture``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(sys.platform != "linux", reason="forks, limits and counts as only Linux can"),
]


@pytest.mark.parametrize("section", ["kills", "boundaries", "workers"])
def test_section(section: str) -> None:
    command = [sys.executable, "-m", "torture", "--quick", "--only", section]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mutated_files() -> None:
    command = [sys.executable, "-m", "torture.mutated", "500", "--jobs", "2"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
