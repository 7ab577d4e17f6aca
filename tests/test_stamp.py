"""A stamp changes with what is in a file, and not with its name."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from h5chunk.stamp import stamp_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a").write_bytes(b"words")
    return tmp_path / "a"


def test_of_a_path_a_descriptor_and_a_status(path: Path) -> None:
    with path.open("rb") as file:
        assert stamp_of(path) == stamp_of(str(path)) == stamp_of(file.fileno()) == stamp_of(os.stat(path))
    assert stamp_of(path)[2] == 5


def test_a_file_that_was_written_to_or_replaced(path: Path) -> None:
    before = stamp_of(path)
    path.write_bytes(b"other words")
    assert stamp_of(path) != before
    same = path.with_name("b")
    same.write_bytes(b"words")
    os.utime(same, ns=(before[3], before[3]))
    same.rename(path)
    assert stamp_of(path)[2:] == before[2:] and stamp_of(path) != before


def test_a_new_name_or_mode_changes_the_ctime_only(path: Path) -> None:
    before, with_ctime = stamp_of(path), stamp_of(path, with_ctime=True)
    time.sleep(0.02)  # the clock of file systems may tick every 4 ms
    path.chmod(0o600)
    assert stamp_of(path) == before and stamp_of(path, with_ctime=True) != with_ctime


def test_there_is_none_of_what_is_missing(path: Path) -> None:
    assert stamp_of(path.with_name("missing")) == stamp_of(path / "inside") == stamp_of("a\0b") == ()
