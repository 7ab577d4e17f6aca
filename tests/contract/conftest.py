"""Files that these tests make are opened in the process of the test, because forking takes longer than most tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def opened_by(in_process: None) -> None:
    """Open files in this process."""
