"""Tests of Triton kernels in Triton's interpreter, which runs them on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def passes_interpreted(module: str, count: int) -> None:
    """Run the tests of a module once more, in a process of their own: Triton must be imported with its interpreter."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", module]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and f"{count} passed" in run.stdout, run.stdout
