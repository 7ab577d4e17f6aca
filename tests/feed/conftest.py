"""Files that these tests make are opened in the process of the test, because forking takes longer than most tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _opens_in_process(in_process):
    """Other folders test that files are first opened in a child process."""
