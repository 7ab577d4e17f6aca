"""The comparison of versions: that it reads files of each layout by both, and says by which it cannot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from support.scripts import SCRIPTS


def test_a_version_against_itself(tmp_path: Path) -> None:
    names = ["gzip1.h5", "csr-gzip.h5", "windows"]
    options = ["--rounds", "1", "--scale", "0.003", "--seconds", "0", "--folder", str(tmp_path), "--kinds", *names]
    command = [sys.executable, str(SCRIPTS / "bench_versions.py"), str(SCRIPTS.parent), *options]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "gzip1.h5",
        "csr-gzip.h5",
        "windows",
        "csr-gzip.h5 DataLoader",
        "windows DataLoader",
        "windows [i]",
    ]
    assert all(re.search(r"samples/s, +[\d.]+ us; of the other: +[\d.]+ by rate", line) for line in lines), lines
    assert not list(tmp_path.iterdir())
